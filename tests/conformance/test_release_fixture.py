"""The release fixture (0x0C to 0x0CD): the bundle, what carries its coordinates, and what a mismatch leads to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_moe.controlplane.bundles import COORDINATES, build, digest_of, mismatches
from ray_moe.controlplane.layouts import expert_layout, require_releasable
from ray_moe.dataplane.dispatch import Dispatcher
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.dataplane.phases import ElementBytes, ExecutableKey, ExecutableManifest, Fallback, PhaseStep, admit
from ray_moe.errors import GenerationError, ReleaseError, StaleHandleError
from ray_moe.identity import CheckpointVersion, GlobalRank
from ray_moe.placement import LayerPlacement, PlacementSnapshot, ReleaseBundle
from tests.conformance.test_dispatch import ORDER, handle_at, routes_at
from tests.conformance.test_lifecycle import HEADER, HIDDEN_TD, alone, bound
from tests.releases import NOTE, bundle_of, observed, serving, snapshot_of

FIXTURE = json.loads((Path(__file__).parent / "data" / "release.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
PATHS = INPUTS["phase_paths"]
REPORTS = {f"loop-{loop:02}": f"report of loop {loop}".encode() for loop in EXPECTED["upstream_loops"]}
BUNDLE = build(
    ReleaseBundle(
        release_id=INPUTS["release_id"],
        checkpoint_version=CheckpointVersion(INPUTS["checkpoint_version"]),
        checkpoint_digest="digest of checkpoint-0042",
        placement_generation=INPUTS["placement_generation"],
        placement_digest="digest of placement-v19",
        topology_version=INPUTS["topology_version"],
        process_group_generation=INPUTS["process_group_generation"],
        route_abi="ray_moe.routes/1",
        dispatch_handle_abi="ray_moe.handle/1",
        precision_roles=tuple(INPUTS["precision_roles"].items()),
        phase_backends=tuple((path["phase_path"], f"{path['dispatcher']}+{path['expert_runner']}") for path in PATHS),
        graph_manifest_digest=digest_of({path["phase_path"]: path["graph_state"] for path in PATHS}),
    ),
    REPORTS,
)


def test_the_bundle_has_the_printed_fields_and_binds_the_printed_coordinates() -> None:
    assert [item.name for item in dataclasses.fields(ReleaseBundle)] == EXPECTED["bundle_fields"]
    assert len(EXPECTED["bundle_fields"]) == DERIVED["num_bundle_fields"]
    assert list(COORDINATES) == EXPECTED["tuple_coordinates"]
    assert len(COORDINATES) == DERIVED["num_tuple_coordinates"]
    assert len(BUNDLE.upstream_report_digests) == EXPECTED["num_upstream_reports"]
    assert len(BUNDLE.phase_backends) == EXPECTED["num_phase_paths"]


def test_snapshots_and_handles_carry_the_release() -> None:
    in_snapshot = {
        "placement_generation": (PlacementSnapshot, "version"),
        "process_group_generation": (PlacementSnapshot, "group"),
        **{name: (LayerPlacement, name) for name in ("phy2log", "log2phy_offsets", "log2phy_values", "physical_rank")},
    }
    for name in EXPECTED["placement_snapshot_fields"]:
        kind, attribute = in_snapshot.get(name, (PlacementSnapshot, name))
        assert attribute in {item.name for item in dataclasses.fields(kind)} or hasattr(kind, attribute)
    handle = handle_at(0)
    in_handle: dict[str, Callable[[DispatchHandle], Any]] = {
        "release_id": lambda one: one.header.release_id,
        "placement_generation": lambda one: one.header.placement_version,
        "process_group_generation": lambda one: (one.header.process_group_id, one.header.epoch),
        "origin_token": lambda one: one.origin_token_N,
        "route_slot": lambda one: one.route_slot_N,
        "inverse_permutation": lambda one: one.inverse_N,
        "send_counts": lambda one: one.send_counts_P,
        "recv_counts": lambda one: one.recv_counts_P,
        "expert_offsets": lambda one: one.expert_offsets_S1,
        "gate_weights": lambda one: one.gates_TK,
        "dispatch_ready": lambda one: one.completion,
        "combine_ready": lambda one: one.completion,
    }
    assert list(in_handle) == EXPECTED["dispatch_handle_fields"]
    assert all(read(handle) is not None for read in in_handle.values())


# -- What a mismatch leads to

KINDS: dict[str, Callable[[Any], Any]] = {"checkpoint_version": CheckpointVersion}
KEY = ExecutableKey(
    *(INPUTS["process_group_generation"], INPUTS["placement_generation"], INPUTS["checkpoint_version"]),
    *(4, 2, "bf16", "fp32", "low-latency", "padded-masked", (4,), (8,)),
)


def outcome_of_handle(fields: dict[str, str]) -> str:
    """A handle bound under these coordinates meets a scope of the bundle's."""
    names = {"placement_generation": "placement_version", "process_group_generation": "process_group_id"}
    scope, own = (
        dataclasses.replace(HEADER, **{names.get(name, name): value for name, value in given.items()})
        for given in ({name: getattr(BUNDLE, name) for name in fields}, fields)
    )
    try:
        dataclasses.replace(bound(), header=own).require(scope, "dispatch")
    except StaleHandleError:
        return "refuse"
    return "use"


def outcome_of_graph(fields: dict[str, str]) -> str:
    names = {"placement_generation": "placement_version", "process_group_generation": "process_group_id"}
    key = dataclasses.replace(KEY, **{names.get(name, name): value for name, value in fields.items()})
    graph = ExecutableManifest("decode.bucket4.v19", key, ElementBytes(2, 4, 4, 2, 4))
    decision = admit(PhaseStep("decode", KEY, (2,), (4,)), graph, buffers_ready=True)
    return "eager_fallback" if isinstance(decision, Fallback) else "use"


def outcome_of_snapshot(fields: dict[str, str]) -> str:
    """A placement of another checkpoint is published under the release that serves."""
    registry = serving(1, fields["release_id"])
    stale = snapshot_of(2, fields["release_id"], checkpoint=fields["checkpoint_version"])
    try:
        registry.publish(stale, bundle_of(stale), NOTE)
    except GenerationError:
        return "refuse"
    return "use"


OUTCOMES = {
    "dispatch_handle": outcome_of_handle,
    "graph": outcome_of_graph,
    "placement_snapshot": outcome_of_snapshot,
}


@pytest.mark.parametrize("case", FIXTURE["compatibility_cases"], ids=lambda case: case["case"])
def test_an_object_of_another_release_is_refused_and_a_graph_falls_back(case: dict[str, Any]) -> None:
    carried = {name: KINDS.get(name, str)(value) for name, value in case["fields"].items()}
    assert [one.field for one in mismatches(BUNDLE, carried)] == case["expected_mismatched"]
    assert OUTCOMES[case["object"]](case["fields"]) == case["expected_outcome"]


def other_dispatch() -> None:
    Dispatcher(dataclasses.replace(HEADER, release_id="release-2"), alone()).dispatch(HIDDEN_TD, bound())


def other_combine() -> None:
    seat = Dispatcher(HEADER, alone())
    rows = seat.dispatch(HIDDEN_TD, bound())
    seat.header = dataclasses.replace(HEADER, release_id="release-2")
    seat.combine(rows)


@pytest.mark.parametrize("where", EXPECTED["release_equality"])
def test_dispatch_and_combine_are_of_one_release(where: str) -> None:
    with pytest.raises(
        StaleHandleError, match=f"{where} of handle .*: its release_id is release-1, the scope's is rel"
    ):
        {"dispatch": other_dispatch, "combine": other_combine}[where]()


def test_generations_are_compared_by_digest_in_the_four_places() -> None:
    # `tests/conformance/test_lifecycle.py` performs the mistake in each; all four read one header.
    assert EXPECTED["generation_equality"] == ["dispatch", "handle", "expert", "combine"]
    other = dataclasses.replace(HEADER, generation=HEADER.generation + 1)
    assert isinstance(other, HandleHeader)
    assert other.digest != HEADER.digest == dataclasses.replace(HEADER, holder="rank-9", lease_id=9).digest


# -- Route and combine assertions (0x0CD)


@pytest.mark.parametrize("rank", ORDER)
def test_counts_of_an_invocation_agree(rank: int) -> None:
    handle, routes = handle_at(rank), routes_at(rank)
    accepted, dropped = handle.route_count, 0  # nothing on this path drops
    received = handle.expert_offsets_S1[-1]
    holds = {
        "accepted + dropped == tokens * top_k": accepted + dropped == routes.num_tokens * routes.top_k,
        "sum(send_counts) == accepted": sum(handle.send_counts_P) == accepted,
        "sum(recv_counts) == received rows": sum(handle.recv_counts_P) == received,
        "len(inverse_permutation) == accepted": handle.inverse_N.numel() == accepted,
    }
    assert list(holds) == FIXTURE["route_assertions"]
    assert all(holds.values())
    assert torch.equal(handle.inverse_N.sort().values, torch.arange(accepted))


# -- Evidence and the blocked candidate


@pytest.mark.parametrize("name", REPORTS)
def test_a_release_built_after_one_report_changed_is_another_or_none(name: str) -> None:
    changed = {**REPORTS, name: REPORTS[name] + b" "}
    with pytest.raises(ReleaseError, match=f"^reject_build: .* report {name} was") as refused:
        build(BUNDLE, changed, BUNDLE.upstream_report_digests)
    assert refused.value.mismatched == (name,)
    unpinned = build(BUNDLE, changed)
    assert [one.field for one in mismatches(BUNDLE, vars(unpinned))] == ["upstream_report_digests"]


def test_the_sharded_candidate_stays_blocked_without_its_manifest() -> None:
    blocked = EXPECTED["blocked_candidate"]["blocked_by"].removeprefix("no ")
    layout = expert_layout(tuple(map(GlobalRank, range(4))), etp=2)
    with pytest.raises(ReleaseError, match=f"layout ep2-etp2 has no {blocked}"):
        require_releasable(layout, None)
    require_releasable(expert_layout(layout.ranks), None)
    assert EXPECTED["blocked_candidate"]["placement_generation"] != BUNDLE.placement_generation


def test_a_bundle_that_the_peers_confirm_loads_as_the_first_release() -> None:
    snapshot = snapshot_of(19, INPUTS["release_id"])
    bundle = dataclasses.replace(
        BUNDLE,
        checkpoint_version=snapshot.checkpoint_version,
        placement_generation=snapshot.version.value,
        placement_digest=snapshot.digest,
        topology_version=snapshot.topology.version,
    )
    registry = serving(1)
    registry.build(bundle, NOTE)
    registry.verify(bundle.release_id, build(bundle, REPORTS), NOTE)
    record = registry.load(bundle.release_id, snapshot, observed(snapshot, bundle), NOTE)
    assert record.evidence is not None and record.evidence.verified_slots == 3
