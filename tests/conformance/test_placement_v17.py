"""The specification's six-slot fixture (0x01A0 to 0x02B3), read from its data file into the product's own records."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_moe import errors
from ray_moe.controlplane.generations import PlacementRegistry
from ray_moe.controlplane.solve import balanced
from ray_moe.errors import CompatibilityError, NotInReplicaSetError, PlacementError, RetirementRefusedError
from ray_moe.identity import (
    CheckpointVersion,
    GlobalRank,
    Identity,
    LogicalExpertId,
    PhysicalSlotId,
    PlacementVersion,
    ProcessGroupId,
    ReplicaId,
    expect,
)
from ray_moe.manifest import PlacementManifest
from ray_moe.placement import LayerPlacement, PlacementSnapshot, Slot, check_assignment, compatible
from ray_moe.routes import Routes

FIXTURE = json.loads((Path(__file__).parent / "data" / "placement_v17.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
ROUTES = INPUTS["routes_in_semantic_order"]

NAMESPACES: dict[str, type[Identity]] = {
    "logical_expert_id": LogicalExpertId,
    "physical_slot_id": PhysicalSlotId,
    "replica_id": ReplicaId,
    "destination_rank": GlobalRank,
    "process_group_id": ProcessGroupId,
    "placement_and_checkpoint_version": PlacementVersion,
}


def document() -> dict[str, Any]:
    """The fixture as a placement manifest: its own entries, and the pool slots that it leaves open."""
    taken: Counter[int] = Counter()
    slots = []
    for entry in INPUTS["slots_in_manifest_order"]:
        slots.append({**entry, "pool_slot": taken[entry["destination_rank"]]})
        taken[entry["destination_rank"]] += 1
    return {
        "placement_version": INPUTS["placement_version"],
        "generation": INPUTS["generation"],
        "state": "ACTIVE",
        "process_group_id": INPUTS["process_group"]["process_group_id"],
        "epoch": 0,
        "member_ranks": INPUTS["process_group"]["member_ranks"],
        "checkpoint_version": INPUTS["checkpoint_version"],
        "release_id": "r1",
        "in_flight_refcount": 0,
        "topology": {
            "version": "topology",
            "domains": [
                {"domain_id": node["node_id"], "member_ranks": node["member_ranks"]} for node in INPUTS["nodes"]
            ],
        },
        "layers": [{"layer": 0, "num_logical_experts": INPUTS["num_logical_experts"], "slots": slots}],
    }


SNAPSHOT = PlacementManifest.parse(document()).to_snapshot()
LAYER = SNAPSHOT.layer[0]
SLOTS = {slot.physical_slot_id.value: slot for slot in LAYER.slots}
WANTED = [LogicalExpertId(route["logical_expert_id"]) for route in ROUTES]
CHOSEN = [[PhysicalSlotId(route["physical_slot_id"])] for route in ROUTES]


def ledgers(positions: tuple[int, ...]) -> tuple[list[int], dict[str, int], dict[str, int]]:
    """Rows per logical expert, per physical slot and per rank of an assignment."""
    slots = [LAYER.slots[position] for position in positions]
    experts = Counter(slot.logical_expert_id.value for slot in slots)
    return (
        [experts[expert] for expert in range(LAYER.num_logical_experts)],
        dict(Counter(slot.physical_slot_id.value for slot in slots)),
        dict(Counter(str(slot.destination_rank) for slot in slots)),
    )


def routes_of(partition: str, **changes: Any) -> Routes:
    """The fixture's routes of one origin partition as the router hands them over."""
    mine = [route for route in ROUTES if route["origin_partition"] == partition]
    top_k = INPUTS["top_k"]
    routes = Routes(
        topk_ids=torch.tensor([route["logical_expert_id"] for route in mine]).view(-1, top_k),
        topk_weights=torch.tensor([route["combine_gate"] for route in mine]).view(-1, top_k),
        execution_scope_id=INPUTS["execution_scope_id"],
        origin_partition=partition,
        first_route_id=int(mine[0]["route_id"].removeprefix("r")),
    )
    return dataclasses.replace(routes, **changes)


# -- Six namespaces (0x01A0)


def test_every_namespace_of_the_fixture_is_a_type_of_its_own() -> None:
    names = {entry["namespace"] for entry in FIXTURE["identity_namespaces"]}
    assert names == NAMESPACES.keys()
    assert len(set(NAMESPACES.values())) == len(names)


@pytest.mark.parametrize(("one", "other"), list(combinations(NAMESPACES, 2)))
def test_no_two_namespaces_can_be_mixed(one: str, other: str) -> None:
    values = {
        entry["namespace"]: [
            int(value.removeprefix("E")) if entry["namespace"] == "logical_expert_id" else value
            for value in entry["fixture_values"]
        ]
        for entry in FIXTURE["identity_namespaces"]
    }
    for value in values[one] + values[other]:
        assert NAMESPACES[one](value) != NAMESPACES[other](value)
        with pytest.raises(TypeError, match=f"expected {NAMESPACES[one].__name__}"):
            expect(NAMESPACES[one], NAMESPACES[other](value), one)


def test_a_placement_version_is_no_checkpoint_version() -> None:
    assert PlacementVersion("x") != CheckpointVersion("x")
    with pytest.raises(TypeError, match="checkpoint_version: expected CheckpointVersion, found PlacementVersion"):
        dataclasses.replace(SNAPSHOT, checkpoint_version=SNAPSHOT.version)


def test_the_slot_carries_the_physical_identity_and_nothing_semantic() -> None:
    slot_fields = {field.name for field in dataclasses.fields(Slot)}
    of_the_snapshot = {"placement_version", "process_group_id"}  # one value for all slots of a generation
    assert set(FIXTURE["physical_identity_fields"]) - of_the_snapshot <= slot_fields
    assert set(FIXTURE["semantic_identity_fields"]) & slot_fields == {"logical_expert_id"}, "what the weights are"


# -- The manifest and its ledgers (0x01B, 0x02B1)


def test_the_six_slot_manifest_loads_as_printed() -> None:
    assert [slot.physical_slot_id.value for slot in LAYER.slots] == ["q0", "q1", "q2", "q3", "q4", "q5"]
    for slot, entry in zip(LAYER.slots, INPUTS["slots_in_manifest_order"], strict=True):
        assert slot.logical_expert_id == LogicalExpertId(entry["logical_expert_id"])
        assert slot.replica_id == ReplicaId(entry["replica_id"])
        assert slot.destination_rank == GlobalRank(entry["destination_rank"])
        assert slot.topology_domain_id == entry["topology_domain_id"]
        assert slot.checkpoint_version == CheckpointVersion(entry["checkpoint_version"])
        assert slot.parameter_digest == entry["parameter_digest"]
    assert SNAPSHOT.generation == 17
    assert SNAPSHOT.verified


def test_the_replica_sets_are_the_fixtures() -> None:
    for expert, names in DERIVED["replica_sets_by_logical_expert"].items():
        positions = LAYER.replicas(LogicalExpertId(int(expert)))
        assert [LAYER.slots[position].physical_slot_id.value for position in positions] == names
    assert LAYER.log2phy_offsets == (0, 2, 4, 5, 6)
    assert LAYER.log2phy_values == (0, 1, 2, 3, 4, 5)


def test_the_frozen_assignment_gives_the_three_printed_ledgers() -> None:
    experts, slots, ranks = ledgers(check_assignment(LAYER, WANTED, CHOSEN))
    assert experts == EXPECTED["logical_expert_counts_rows"]
    assert slots == EXPECTED["physical_slot_counts_rows"]
    assert ranks == EXPECTED["destination_rank_counts_rows"]
    assert sum(experts) == sum(slots.values()) == sum(ranks.values()) == EXPECTED["total_routes_rows"]
    assert len(ROUTES) == sum(part["num_tokens"] for part in INPUTS["partitions"]) * INPUTS["top_k"]


@given(st.data())
def test_any_choice_of_replicas_leaves_the_expert_ledger_alone(data: st.DataObject) -> None:
    positions = [data.draw(st.sampled_from(LAYER.replicas(expert))) for expert in WANTED]
    chosen = check_assignment(LAYER, WANTED, [[LAYER.slots[position].physical_slot_id] for position in positions])
    experts, slots, ranks = ledgers(chosen)
    assert experts == EXPECTED["logical_expert_counts_rows"]
    assert sum(slots.values()) == sum(ranks.values()) == EXPECTED["total_routes_rows"]


def test_the_ideal_load_of_a_replica_is_its_experts_rows_over_the_number_of_copies() -> None:
    rows = EXPECTED["logical_expert_counts_rows"]
    for expert, (numerator, denominator) in DERIVED["ideal_per_replica_load_rows"].items():
        copies = len(LAYER.replicas(LogicalExpertId(int(expert))))
        assert Fraction(rows[int(expert)], copies) == Fraction(numerator, denominator)


# -- Compatibility and cardinality (0x01D1)


@pytest.mark.parametrize("case", FIXTURE["compatibility_cases"], ids=lambda case: case["case"])
def test_a_slot_is_legal_or_refused_by_the_first_clause_that_fails(case: dict[str, Any]) -> None:
    (route,) = [route for route in ROUTES if route["route_id"] == case["route_id"]]
    override = dict(case["override"].get("slot", {}))
    if "checkpoint_version" in override:
        override["checkpoint_version"] = CheckpointVersion(override["checkpoint_version"])
    slot = dataclasses.replace(SLOTS[case["physical_slot_id"]], **override)
    members = case["override"].get("group_member_ranks", INPUTS["process_group"]["member_ranks"])
    group = dataclasses.replace(SNAPSHOT.group, peers=tuple(GlobalRank(rank) for rank in members))

    def check() -> None:
        wanted = LogicalExpertId(route["logical_expert_id"])
        compatible(wanted, slot, SNAPSHOT.checkpoint_version, group, SNAPSHOT.topology)

    if case["expected_compatible"]:
        check()
    else:
        with pytest.raises(CompatibilityError) as refused:
            check()
        assert refused.value.clause == case["failed_clause"]


@pytest.mark.parametrize("case", FIXTURE["assignment_cases"], ids=lambda case: case["case"])
def test_a_route_has_exactly_one_assignment_or_is_refused_by_name(case: dict[str, Any]) -> None:
    assignments = list(CHOSEN)
    for route_id, names in case["assignments_by_route"].items():
        assignments[int(route_id.removeprefix("r"))] = [PhysicalSlotId(name) for name in names]
    if case["expected_valid"]:
        check_assignment(LAYER, WANTED, assignments)
    else:
        with pytest.raises(errors.AssignmentError) as refused:
            check_assignment(LAYER, WANTED, assignments)
        assert refused.value.failure == case["failure"]


def test_equal_counts_on_every_slot_and_rank_do_not_excuse_a_wrong_expert() -> None:
    # r00 (expert 0 on q0) and r01 (expert 1 on q2) trade slots: all three ledgers stay as printed.
    traded = [CHOSEN[1], CHOSEN[0], *CHOSEN[2:]]
    positions = tuple(int(slots[0].value.removeprefix("q")) for slots in traded)
    assert ledgers(positions) == ledgers(check_assignment(LAYER, WANTED, CHOSEN))
    with pytest.raises(NotInReplicaSetError, match="route 0 wants expert 0, slot q2"):
        check_assignment(LAYER, WANTED, traded)


# -- Semantic digest (0x01A0)

MUTATIONS: dict[str, Callable[[Routes], Routes]] = {
    "execution_scope_id": lambda routes: dataclasses.replace(routes, execution_scope_id="scope-1"),
    "route_id": lambda routes: dataclasses.replace(routes, first_route_id=routes.first_route_id + 1),
    "origin_partition": lambda routes: dataclasses.replace(routes, origin_partition="p9"),
    "origin_token_row": lambda routes: dataclasses.replace(
        routes, topk_ids=routes.topk_ids.flip(0), topk_weights=routes.topk_weights.flip(0)
    ),
    "route_slot": lambda routes: dataclasses.replace(
        routes, topk_ids=routes.topk_ids.flip(1), topk_weights=routes.topk_weights.flip(1)
    ),
    "logical_expert_id": lambda routes: dataclasses.replace(
        routes, topk_ids=routes.topk_ids + torch.tensor([[0, 0], [0, 1]])
    ),
    "combine_gate": lambda routes: dataclasses.replace(
        routes, topk_weights=torch.nextafter(routes.topk_weights, torch.tensor(1.0))
    ),
}


@pytest.mark.parametrize("field", FIXTURE["semantic_identity_fields"])
@pytest.mark.parametrize("partition", ["p0", "p1"])
def test_a_change_of_any_semantic_field_changes_the_seal(partition: str, field: str) -> None:
    routes = routes_of(partition)
    sealed = routes.seal()
    assert routes_of(partition).seal() == sealed
    routes.verify(sealed)
    with pytest.raises(errors.RoutesError, match="semantic digest of the routes is"):
        MUTATIONS[field](routes).verify(sealed)


def test_the_same_bytes_in_another_shape_or_dtype_have_another_seal() -> None:
    routes = routes_of("p0")
    variants = [
        routes,
        dataclasses.replace(routes, topk_ids=routes.topk_ids.view(1, 4), topk_weights=routes.topk_weights.view(1, 4)),
        dataclasses.replace(routes, topk_ids=routes.topk_ids.view(4, 1), topk_weights=routes.topk_weights.view(4, 1)),
        dataclasses.replace(routes, topk_weights=routes.topk_weights.double()),
    ]
    assert len({variant.seal() for variant in variants}) == len(variants)


def test_the_seal_is_about_routes_and_not_about_how_their_tensors_lie_in_memory() -> None:
    routes = routes_of("p1")
    strided = dataclasses.replace(routes, topk_ids=routes.topk_ids.t().contiguous().t())
    narrow = dataclasses.replace(routes, topk_ids=routes.topk_ids.to(torch.int32))
    assert not strided.topk_ids.is_contiguous()
    assert routes.seal() == strided.seal() == narrow.seal()


def test_the_seal_is_the_same_under_every_placement() -> None:
    assert not {field.name for field in dataclasses.fields(Routes)} & set(FIXTURE["physical_identity_fields"])


# -- The pinned generation (0x02B2, 0x02B3) and replicas (0x02A, 0x02B)


def test_a_pinned_generation_reads_as_printed_while_the_next_one_serves() -> None:
    registry = PlacementRegistry(final_after_steps=0)
    registry.publish(SNAPSHOT)
    lease = registry.acquire("dispatch-h17")
    registry.publish(dataclasses.replace(SNAPSHOT, generation=18, version=PlacementVersion("placement-v18")))
    status = registry.status()[0]
    manifest = PlacementManifest.from_snapshot(
        registry.require_live(lease.generation), state=status.state, in_flight_refcount=status.references
    )
    assert (
        manifest.model_dump(include=set(EXPECTED["manifest_snapshot_while_pinned"]))
        == (EXPECTED["manifest_snapshot_while_pinned"])
    )
    with pytest.raises(RetirementRefusedError):
        registry.retire(17)


def test_a_replica_with_other_parameters_is_refused_whatever_its_name_says() -> None:
    changed = document()
    changed["layers"][0]["slots"][1]["parameter_digest"] = "expert-0-state-v41"
    with pytest.raises(PlacementError, match="replicas of expert 0 differ in parameter digest"):
        PlacementManifest.parse(changed).to_snapshot()


def rank_loads(placement: LayerPlacement, fractions: list[Fraction], num_ranks: int) -> list[Fraction]:
    """Share of the rows per rank when every expert's rows spread evenly over its replicas."""
    loads = [Fraction(0)] * num_ranks
    for expert, fraction in enumerate(fractions):
        positions = placement.replicas(LogicalExpertId(expert))
        for position in positions:
            loads[placement.physical_rank[position]] += fraction / len(positions)
    return loads


def baseline(slots: list[dict[str, Any]]) -> PlacementSnapshot:
    """The fixture's placement with only these slots, named by position where the baseline does not name them."""
    changed = document()
    owner = SNAPSHOT.topology.owner
    changed["layers"][0]["slots"] = [
        {
            "physical_slot_id": slot.get("physical_slot_id", f"q{position}"),
            "logical_expert_id": slot["logical_expert_id"],
            "replica_id": f"copy-{position}",
            "destination_rank": slot["destination_rank"],
            "topology_domain_id": owner[GlobalRank(slot["destination_rank"])],
            "parameter_digest": f"expert-{slot['logical_expert_id']}-state-v42",
            "pool_slot": position,
        }
        for position, slot in enumerate(slots)
    ]
    return PlacementManifest.parse(changed).to_snapshot()


HOT = [Fraction(1, 2), Fraction(1, 6), Fraction(1, 6), Fraction(1, 6)]  # half of the rows go to expert 0


def test_with_one_expert_per_rank_a_hot_expert_is_a_hot_rank() -> None:
    case = FIXTURE["baselines"]["one_expert_per_rank"]
    assert Fraction(*case["inputs"]["hot_fraction"]) == HOT[case["inputs"]["hot_expert"]]
    placement = baseline(case["inputs"]["slots"]).layers[0]
    start = balanced({0: 4}, SNAPSHOT.group.peers, replicas={}, spare_slots=0)
    assert start.layers[0].homes == tuple((slot.logical_expert_id, slot.destination_rank) for slot in placement.slots)
    loads = rank_loads(placement, HOT, 4)
    assert loads == [Fraction(*fraction) for fraction in case["derived"]["rank_load_fraction"]]
    assert max(loads) / (sum(loads) / 4) == Fraction(*case["derived"]["max_over_mean_load"])


def test_a_replica_of_the_hot_expert_relieves_its_rank_and_keeps_the_vocabulary() -> None:
    case = FIXTURE["baselines"]["replicated_expert_0"]
    placement = baseline(case["inputs"]["slots"]).layers[0]
    assert placement.num_logical_experts == 4
    assert len(placement.slots) - placement.num_logical_experts == case["derived"]["extra_replicas"]
    replicas = [placement.slots[position].physical_slot_id.value for position in placement.replicas(LogicalExpertId(0))]
    assert replicas == case["expected"]["replica_set_of_expert_0"]
    loads = rank_loads(placement, HOT, 4)
    ratio = Fraction(*case["derived"]["max_over_mean_load_if_hot_expert_split_evenly"])
    assert max(loads) / (sum(loads) / 4) == ratio
