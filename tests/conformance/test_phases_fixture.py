"""The specification's four workloads and its decode bucket (0x05A to 0x05F, 0x06D, 0x06G), through the product."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_moe.dataplane.graphs import Executable, ExecutableShape, HostCounters, bucket_name
from ray_moe.dataplane.phases import (
    EXCLUDED_FROM_PAYLOAD,
    STEP_METADATA,
    SURFACE_STRENGTH,
    Buckets,
    ElementBytes,
    ExecutableKey,
    ExecutableManifest,
    Fallback,
    FallbackReason,
    PhaseStep,
    PhaseUnit,
    Replay,
    UnitAccount,
    account_for,
    admit,
    joint_rows,
    split_by_phase,
)
from ray_moe.errors import ConfigError

DATA = Path(__file__).parent / "data"
FIXTURE = json.loads((DATA / "phases.json").read_text())
LIFECYCLE = json.loads((DATA / "lifecycle.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
GRAPH = INPUTS["graph_manifest"]
PROFILES = {profile["profile"]: profile for profile in INPUTS["profiles"]}
# A choice takes the capacities from the buckets, so that a step cannot come with its own.
SAME_CAPACITIES = [
    case
    for case in FIXTURE["admission_cases"]
    if not {"rank_token_capacities", "slot_route_capacities"} & case["step"]["key_override"].keys()
]
# The fixture writes the unit of a field into its name.
FIELD_NAMES = {"hidden_width_elements": "hidden_width"}


def key_of(values: dict[str, Any]) -> ExecutableKey:
    return ExecutableKey(
        **{
            FIELD_NAMES.get(name, name): tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
    )


KEY = key_of(GRAPH["immutable_key"])
MANIFEST = ExecutableManifest(
    GRAPH["graph_id"],
    KEY,
    ElementBytes(
        hidden=GRAPH["hidden_element_bytes"],
        route_id=GRAPH["route_id_bytes"],
        gate=GRAPH["gate_bytes"],
        expert_output=GRAPH["output_element_bytes"],
        metadata=GRAPH["metadata_value_bytes"],
    ),
)


def step_of(given: dict[str, Any]) -> PhaseStep:
    key = key_of(GRAPH["immutable_key"] | given.get("key_override", {}))
    return PhaseStep(given["phase"], key, tuple(given["rank_tokens"]), tuple(given["slot_routes_rows"]))


def account_of(profile: str, step: PhaseStep | None = None) -> UnitAccount:
    """A unit with the profile's declared counts, run as admission decides."""
    step = step or step_of(PROFILES[profile])
    return account_for(
        step,
        MANIFEST,
        admit(step, MANIFEST, buffers_ready=True),
        host_submissions=PROFILES[profile].get("declared_host_submissions", 1),
        control_items=PROFILES[profile].get("declared_control_items", 0),
    )


def executable_on(peer: int) -> Executable[str]:
    shape = ExecutableShape(
        peer=peer,
        num_peers=INPUTS["num_ranks"],
        num_slots=INPUTS["num_physical_slots"],
        tokens_per_rank=4,
        rows_per_slot=2,
        hidden=INPUTS["hidden_width_elements"],
        top_k=INPUTS["top_k"],
        activation=torch.bfloat16,
        gate=torch.float32,
    )
    return Executable(shape, torch.device("cpu"), HostCounters())


# The key as the product writes it: with torch's dtype names.
TORCH_KEY = replace(KEY, activation_dtype="bfloat16", gate_dtype="float32")


@pytest.mark.parametrize("profile", PROFILES)
def test_a_workload_is_sized_by_its_own_rows(profile: str) -> None:
    step = step_of(PROFILES[profile])
    assert sum(step.rank_tokens) == EXPECTED["current_tokens_rows"][profile]
    assert sum(step.slot_routes) == EXPECTED["useful_routes_rows"][profile]


@pytest.mark.parametrize("case", FIXTURE["admission_cases"], ids=lambda case: case["case"])
def test_admission_gives_the_first_reason(case: dict[str, Any]) -> None:
    decision = admit(step_of(case["step"]), MANIFEST, case["stable_buffers_ready"])
    if case["expected_decision"] == "replay":
        assert case["expected_reason"] is None
        assert decision == Replay(GRAPH["graph_id"])
    else:
        assert decision == Fallback(FallbackReason(case["expected_reason"]))


@pytest.mark.parametrize("case", SAME_CAPACITIES, ids=lambda case: case["case"])
def test_the_choice_among_one_bucket_is_admission(case: dict[str, Any]) -> None:
    step = step_of(case["step"])
    ready = case["stable_buffers_ready"]
    chosen = Buckets((MANIFEST,)).choose(
        step.phase, step.key.scope, step.rank_tokens, step.slot_routes, lambda name: ready
    )
    assert chosen == admit(step, MANIFEST, ready)


def test_the_key_has_the_eleven_fields_and_the_reasons_have_their_order() -> None:
    assert [item.name for item in fields(ExecutableKey)] == [
        FIELD_NAMES.get(name, name) for name in INPUTS["graph_key_fields"]
    ]
    assert list(FallbackReason) == INPUTS["admission_order"]


def test_prefill_executes_exactly_its_rows() -> None:
    expected, account = EXPECTED["prefill"], account_of("prefill")
    assert account.rows.useful_inputs.value == expected["dispatch_useful_token_slots"]
    assert account.rows.dispatch_slots.value == expected["dispatch_executed_token_slots"]
    assert account.rows.useful_routes.value == expected["runner_useful_rows"]
    assert account.rows.runner_rows.value == expected["runner_executed_rows"]
    assert (account.host_submissions, account.control_items) == (
        expected["host_submissions"],
        expected["control_items"],
    )
    ratio = account.control_ratio
    assert ratio.value == Fraction(*DERIVED["control_items_per_useful_route_prefill"])
    assert round(float(ratio.value), 3) == expected["control_items_per_useful_route_rounded"]
    assert ratio.evidence == "analytical"


def test_decode_executes_all_that_its_bucket_reserves() -> None:
    expected, account = EXPECTED["decode"], account_of("decode")
    assert account.decision == Replay(expected["graph_id"])
    assert account.rows.useful_inputs.value == expected["valid_input_rows"]
    assert account.rows.dispatch_slots.value == MANIFEST.reserved_input_slots == expected["reserved_input_slots"]
    assert account.rows.dispatch_padding.value == expected["masked_input_slots"]
    assert account.rows.useful_routes.value == expected["valid_route_rows"]
    assert account.rows.runner_rows.value == MANIFEST.reserved_runner_rows == expected["executed_runner_rows"]
    assert account.rows.runner_padding.value == expected["masked_runner_rows"]
    assert (account.host_submissions, account.control_items) == (
        expected["host_submissions"],
        expected["control_items"],
    )
    assert account.control_ratio.value == Fraction(*expected["control_items_per_useful_route"])


def test_the_payload_ledger_has_five_buffers_and_says_what_it_leaves_out() -> None:
    by_buffer = {name: size.value for name, size in MANIFEST.payload_bytes.items()}
    assert by_buffer == DERIVED["graph_payload_bytes_by_buffer"]
    assert list(by_buffer) == GRAPH["stable_buffers"]
    assert MANIFEST.total_payload_bytes.value == EXPECTED["graph_payload_bytes"]
    assert sorted(EXCLUDED_FROM_PAYLOAD) == FIXTURE["excluded_from_graph_payload_bytes"]
    assert len(STEP_METADATA) == GRAPH["int32_metadata_values_per_rank"]


def test_the_ledger_is_what_the_peers_executables_hold() -> None:
    executables = [executable_on(peer) for peer in range(INPUTS["num_ranks"])]
    for name in ("hidden", "route_ids", "gates", "expert_output"):
        held = [getattr(executable.buffers, name) for executable in executables]
        assert sum(tensor.nbytes for tensor in held) == DERIVED["graph_payload_bytes_by_buffer"][f"graph.{name}"]
    for executable in executables:
        metadata = executable.buffers.step_metadata
        assert metadata.nbytes == DERIVED["graph_payload_bytes_by_buffer"]["graph.step_metadata"]
        binding = executable.bind(17, TORCH_KEY, "table")
        assert binding.manifest == replace(MANIFEST, key=TORCH_KEY)


def test_the_validity_tensors_hold_the_decode_step() -> None:
    executable = executable_on(peer=0)
    binding = executable.bind(17, TORCH_KEY, "table")
    executable.activate(binding)
    decode = PROFILES["decode"]
    binding.write_validity(1, decode["rank_tokens"], decode["slot_routes_rows"])
    held = {name: getattr(executable.buffers, name).tolist() for name in GRAPH["mutable_device_values"]}
    assert held == {
        "real_tokens_by_rank": decode["rank_tokens"],
        "valid_tokens": [EXPECTED["decode"]["valid_input_rows"]],
        "rank_token_offsets": DERIVED["rank_token_offsets_decode"],
        "valid_routes_by_slot": decode["slot_routes_rows"],
    }
    assert executable.buffers.step_metadata.tolist() == [[5, 0, 3], [5, 3, 3], [5, 5, 3], [5, 5, 3]]


def test_the_bucket_has_the_fixtures_name() -> None:
    assert bucket_name(KEY) == GRAPH["graph_id"] == EXPECTED["decode"]["graph_id"]


def test_a_mixed_batch_splits_into_two_units_that_are_accounted_together() -> None:
    expected, slot_routes = EXPECTED["mixed"], DERIVED["mixed_unit_slot_routes_example"]
    # One row per token, interleaved by peer, each with its provenance.
    rows = [
        (phase, peer, token)
        for peer in range(INPUTS["num_ranks"])
        for phase in ("decode", "prefill")
        for token in range(INPUTS["mixed_units"][phase]["rank_tokens"][peer])
    ]
    units: tuple[PhaseUnit[Any], ...] = split_by_phase(rows, lambda row: row[0])
    assert [unit.phase for unit in units] == ["prefill", "decode"]
    accounts = []
    for unit in units:
        tokens = tuple(sum(row[1] == peer for row in unit.rows) for peer in range(INPUTS["num_ranks"]))
        assert list(tokens) == INPUTS["mixed_units"][unit.phase]["rank_tokens"]
        accounts.append(account_of(unit.phase, PhaseStep(unit.phase, KEY, tokens, tuple(slot_routes[unit.phase]))))
    prefill, decode = accounts
    assert prefill.rows.useful_routes.value == expected["prefill_unit_routes_rows"]
    assert decode.rows.useful_routes.value == expected["decode_unit_routes_rows"]
    assert isinstance(decode.decision, Replay) is expected["decode_unit_replays_graph"]
    assert decode.rows.dispatch_slots.value == expected["decode_unit_dispatch_slots"]
    assert decode.rows.runner_rows.value == expected["decode_unit_runner_rows"]
    both = joint_rows(accounts)
    assert both.useful_inputs.value == expected["useful_input_rows"]
    assert both.dispatch_slots.value == expected["executed_dispatch_token_slots"]
    assert both.dispatch_padding.value == expected["dispatch_padding_slots"]
    assert both.useful_routes.value == expected["useful_route_rows"]
    assert both.runner_rows.value == expected["executed_runner_rows"]
    assert both.runner_padding.value == expected["runner_padding_rows"]
    assert len(accounts) == expected["phase_execution_units"]
    assert sum(isinstance(unit.decision, Replay) for unit in accounts) == expected["graph_execution_units"]
    assert sum(unit.host_submissions for unit in accounts) == expected["host_submissions"]


def test_the_outer_mixed_batch_is_no_unit() -> None:
    with pytest.raises(ConfigError, match="mixed"):
        account_of("mixed_outer_batch")


def test_oversize_decode_falls_back_with_all_of_its_rows() -> None:
    expected, step = EXPECTED["oversize"], step_of(PROFILES["oversize_decode"])
    account = account_of("oversize_decode")
    assert expected["replay"] is False
    assert account.decision == Fallback(FallbackReason(expected["reason"]))
    assert account.rows.useful_inputs.value == expected["semantic_input_rows"]
    assert account.rows.useful_routes.value == expected["semantic_route_rows"]
    assert account.rows.dispatch_slots.value == expected["fallback_dispatch_slots"]
    assert account.rows.runner_rows.value == expected["fallback_runner_rows"]
    ample = 100
    for capacities, positions, reason in (
        ("rank_token_capacities", DERIVED["oversize_ranks_over_capacity"], FallbackReason.RANK_TOKEN_CAPACITY),
        ("slot_route_capacities", DERIVED["oversize_slots_over_capacity"], FallbackReason.SLOT_ROUTE_CAPACITY),
    ):
        bucket = getattr(KEY, capacities)
        for tight, capacity in enumerate(bucket):
            # All ample but one, which is the bucket's: that one alone decides.
            ample_key = replace(KEY, rank_token_capacities=(ample,) * 4, slot_route_capacities=(ample,) * 6)
            one = tuple(capacity if position == tight else ample for position in range(len(bucket)))
            key = replace(ample_key, **{capacities: one})
            decision = admit(replace(step, key=key), replace(MANIFEST, key=key), buffers_ready=True)
            assert decision == (Fallback(reason) if tight in positions else Replay(MANIFEST.executable_id))


def test_only_the_five_source_bindings_are_claimed_with_their_strength() -> None:
    listed = LIFECYCLE["phase_bindings"]
    assert {(item["profile"], item["surface"]): item["strength"] for item in listed} == SURFACE_STRENGTH
    assert len(SURFACE_STRENGTH) == LIFECYCLE["expected"]["evidence_counts"]["phase_bindings"]


def test_step_metadata_is_that_of_the_variable_count_surface() -> None:
    carriers = {item["surface"]: item for item in LIFECYCLE["state_carriers"]}
    assert list(STEP_METADATA) == carriers["megatron_inference_nvls"]["step_metadata"]
