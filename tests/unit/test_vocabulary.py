"""The records that everybody shares: typed identities, frozen placements, refusals by name."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ray_moe import errors
from ray_moe.errors import (
    CompatibilityError,
    DuplicateExecutionError,
    LostRouteError,
    NotInReplicaSetError,
    PlacementError,
    RayMoEError,
    RoutesError,
)
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
from ray_moe.placement import (
    LayerPlacement,
    Lease,
    PlacementSnapshot,
    ReleaseBundle,
    ShardCoordinate,
    Slot,
    check_assignment,
    compatible,
)
from ray_moe.routes import Routes
from ray_moe.topology import Domain, ProcessGroupSpec, Topology

NUMBERS = (LogicalExpertId, GlobalRank)
NAMES = (PhysicalSlotId, ReplicaId, ProcessGroupId, PlacementVersion, CheckpointVersion)

CHECKPOINT = CheckpointVersion("c1")
GROUP = ProcessGroupSpec(ProcessGroupId("g"), 0, (GlobalRank(1), GlobalRank(0)))
TOPOLOGY = Topology("t", (Domain("node-0", (GlobalRank(0),)), Domain("node-1", (GlobalRank(1),))))


def slot(position: int, expert: int, rank: int, **changes: Any) -> Slot:
    """Slot `q<position>`, which is also its pool slot."""
    made = Slot(
        physical_slot_id=PhysicalSlotId(f"q{position}"),
        logical_expert_id=LogicalExpertId(expert),
        replica_id=ReplicaId(f"e{expert}-r{position}"),
        destination_rank=GlobalRank(rank),
        topology_domain_id=f"node-{rank}",
        checkpoint_version=CHECKPOINT,
        parameter_digest=f"weights-of-{expert}",
        pool_slot=position,
    )
    return dataclasses.replace(made, **changes)


def layer_of(*slots: Slot, layer: int = 0, experts: int = 2) -> LayerPlacement:
    return LayerPlacement(layer, experts, slots)


def snapshot_of(*layers: LayerPlacement) -> PlacementSnapshot:
    return PlacementSnapshot(PlacementVersion("p1"), 1, "r1", CHECKPOINT, GROUP, TOPOLOGY, layers)


# Two replicas of expert 0, one of expert 1; manifest order is not expert order.
LAYER = layer_of(slot(0, 0, 0), slot(1, 1, 1), slot(2, 0, 1))


# -- Identities


@pytest.mark.parametrize("values", [NUMBERS, NAMES])
def test_equal_values_of_two_namespaces_are_never_equal(values: tuple[type[Identity], ...]) -> None:
    value = 3 if values is NUMBERS else "x"
    made = [kind(value) for kind in values]
    assert len(set(made)) == len(values)
    assert all((one == other) == (one is other) for one in made for other in made)
    assert all(one != value for one in made)


def test_two_namespaces_have_no_order() -> None:
    assert GlobalRank(1) < GlobalRank(2)
    with pytest.raises(TypeError):
        sorted([GlobalRank(1), LogicalExpertId(0)])  # type: ignore[type-var]


def test_a_value_of_another_namespace_is_refused_with_both_types_and_the_field() -> None:
    with pytest.raises(TypeError, match=r"peer: expected GlobalRank, found LogicalExpertId"):
        expect(GlobalRank, LogicalExpertId(3), "peer")


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("physical_slot_id", ReplicaId("q0")),
        ("logical_expert_id", GlobalRank(0)),
        ("logical_expert_id", 0),
        ("replica_id", PhysicalSlotId("e0-r0")),
        ("destination_rank", LogicalExpertId(0)),
        ("destination_rank", 0),
        ("checkpoint_version", PlacementVersion("c1")),
    ],
)
def test_a_slot_takes_each_identity_from_its_own_namespace_only(field: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=f"{field}: expected"):
        slot(0, 0, 0, **{field: wrong})


def test_groups_topologies_and_snapshots_refuse_other_namespaces_too() -> None:
    with pytest.raises(TypeError, match="peers: expected GlobalRank, found int"):
        ProcessGroupSpec(ProcessGroupId("g"), 0, (0,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="process_group_id: expected ProcessGroupId, found PlacementVersion"):
        ProcessGroupSpec(PlacementVersion("g"), 0, (GlobalRank(0),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected GlobalRank, found LogicalExpertId"):
        Domain("node-0", (LogicalExpertId(0),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="version: expected PlacementVersion, found CheckpointVersion"):
        dataclasses.replace(snapshot_of(LAYER), version=CheckpointVersion("p1"))


# -- Frozen records


def bundle() -> ReleaseBundle:
    return ReleaseBundle("r1", CHECKPOINT, "d", "p1", "d", "t", "g/0", "routes/1", "handle/1", (), ())


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (LogicalExpertId(3), "value"),
        (TOPOLOGY.domains[0], "domain_id"),
        (TOPOLOGY, "version"),
        (GROUP, "epoch"),
        (ShardCoordinate(), "index"),
        (LAYER.slots[0], "destination_rank"),
        (LAYER, "slots"),
        (snapshot_of(LAYER), "generation"),
        (Lease(1, "peer-0", 1, 0), "generation"),
        (bundle(), "placement_digest"),
        (Routes(torch.tensor([[0]]), torch.tensor([[1.0]])), "topk_ids"),
    ],
    ids=lambda value: type(value).__name__ if dataclasses.is_dataclass(value) else value,
)
def test_a_record_cannot_be_changed_after_it_is_built(record: object, field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, getattr(record, field))


def test_a_snapshot_and_its_derived_maps_survive_pickling() -> None:
    snapshot = snapshot_of(LAYER)
    digest, offsets = snapshot.digest, LAYER.log2phy_offsets  # the caches travel along
    copy = pickle.loads(pickle.dumps(snapshot))
    assert copy == snapshot
    assert (copy.digest, copy.layers[0].log2phy_offsets) == (digest, offsets)


# -- Topology and groups


def test_one_rank_in_two_domains_is_refused_with_both_names() -> None:
    with pytest.raises(PlacementError, match="rank 0 is owned by both a and b"):
        Topology("t", (Domain("a", (GlobalRank(0),)), Domain("b", (GlobalRank(0),))))


@pytest.mark.parametrize("peers", [(), (0, 1, 0)])
def test_a_group_without_peers_or_with_one_twice_is_refused(peers: tuple[int, ...]) -> None:
    with pytest.raises(PlacementError, match="peers must be distinct and not empty"):
        ProcessGroupSpec(ProcessGroupId("g"), 0, tuple(GlobalRank(rank) for rank in peers))


def test_peer_slots_follow_the_groups_order_and_not_the_ranks() -> None:
    assert [GROUP.peer_slot(GlobalRank(rank)) for rank in (0, 1)] == [1, 0]
    with pytest.raises(PlacementError, match="rank 2 has no seat in group g epoch 0"):
        GROUP.peer_slot(GlobalRank(2))


# -- Placement


def test_the_derived_maps_are_inverse_to_each_other_and_in_manifest_order() -> None:
    assert LAYER.phy2log == (0, 1, 0)
    assert LAYER.physical_rank == (0, 1, 1)
    assert LAYER.log2phy_offsets == (0, 2, 3)
    assert LAYER.log2phy_values == (0, 2, 1)
    assert LAYER.replicas(LogicalExpertId(0)) == (0, 2)
    assert LAYER.slots_of(GlobalRank(1)) == LAYER.slots[1:]


def test_an_expert_that_the_layer_does_not_have_has_no_replica_set() -> None:
    for expert in (-1, 2):
        with pytest.raises(PlacementError, match=rf"must be in \[0, 2\), found {expert}"):
            LAYER.replicas(LogicalExpertId(expert))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((slot(0, 0, 0), slot(0, 1, 1)), "physical slot ids must be unique"),
        ((slot(0, 0, 0), slot(1, 1, 0, pool_slot=0)), "two slots share a pool slot of one rank"),
        ((slot(0, 0, 0), slot(1, 2, 1)), "slot q1 stores expert 2, the layer has 2"),
        ((slot(0, 0, 0), slot(1, 0, 1)), r"logical experts without a slot: \[1\]"),
    ],
    ids=["slot id twice", "pool slot twice", "expert out of range", "expert without a slot"],
)
def test_a_layer_that_would_lose_or_mix_up_experts_is_refused(slots: tuple[Slot, ...], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        layer_of(*slots)


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"checkpoint_version": CheckpointVersion("c0")}, "checkpoint_match"),
        ({"destination_rank": GlobalRank(7)}, "rank_in_group"),
        ({"topology_domain_id": "node-1"}, "domain_owns_rank"),
    ],
)
def test_a_snapshot_names_the_first_clause_that_a_slot_breaks(changes: dict[str, Any], clause: str) -> None:
    with pytest.raises(CompatibilityError) as refused:
        snapshot_of(layer_of(slot(0, 0, 0, **changes), slot(1, 1, 1)))
    assert refused.value.clause == clause
    assert "q0" in str(refused.value)


def test_the_clauses_are_tested_in_the_specifications_order() -> None:
    broken = slot(0, 0, 0, checkpoint_version=CheckpointVersion("c0"), destination_rank=GlobalRank(7))
    with pytest.raises(CompatibilityError) as refused:
        compatible(LogicalExpertId(1), broken, CHECKPOINT, GROUP, TOPOLOGY)
    assert refused.value.clause == "logical_expert_match"
    with pytest.raises(CompatibilityError) as refused:
        compatible(LogicalExpertId(0), broken, CHECKPOINT, GROUP, TOPOLOGY)
    assert refused.value.clause == "checkpoint_match"


def test_replicas_that_disagree_about_their_parameters_are_refused() -> None:
    with pytest.raises(PlacementError, match="replicas of expert 0 differ in parameter digest: 'weights-of-0' and 'x'"):
        snapshot_of(layer_of(slot(0, 0, 0), slot(1, 1, 1), slot(2, 0, 1, parameter_digest="x")))


def test_two_parts_of_one_expert_have_digests_of_their_own() -> None:
    parts = (
        slot(0, 0, 0, shard=ShardCoordinate(0, 2)),
        slot(1, 0, 1, shard=ShardCoordinate(1, 2), parameter_digest="x"),
    )
    assert snapshot_of(layer_of(*parts, experts=1)).verified
    with pytest.raises(PlacementError, match=r"shard index must be in \[0, 2\), found 2"):
        ShardCoordinate(2, 2)


def test_a_layer_that_comes_twice_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"every layer must have one manifest, found layers \[0, 0\]"):
        snapshot_of(LAYER, LAYER)


def test_a_candidate_is_verified_when_the_last_empty_slot_has_its_digest() -> None:
    candidate = snapshot_of(layer_of(slot(0, 0, 0), slot(1, 1, 1), slot(2, 0, 1, parameter_digest="")))
    assert not candidate.verified
    assert not candidate.with_digests({(1, 1, 2): "weights-of-0", (0, 0, 2): "weights-of-0"}).verified
    filled = candidate.with_digests({(0, 1, 2): "weights-of-0"})
    assert filled.verified
    assert filled == snapshot_of(LAYER)
    with pytest.raises(PlacementError, match="differ in parameter digest"):
        candidate.with_digests({(0, 1, 2): "corrupted on the way"})


@pytest.mark.parametrize(
    "changed",
    [
        dataclasses.replace(snapshot_of(LAYER), generation=2),
        dataclasses.replace(snapshot_of(LAYER), release_id="r2"),
        dataclasses.replace(snapshot_of(LAYER), group=dataclasses.replace(GROUP, epoch=1)),
        dataclasses.replace(snapshot_of(LAYER), group=dataclasses.replace(GROUP, peers=GROUP.peers[::-1])),
        snapshot_of(layer_of(slot(0, 0, 0), slot(1, 1, 1), slot(2, 0, 1, pool_slot=9))),
        snapshot_of(layer_of(slot(0, 0, 0), slot(2, 0, 1), slot(1, 1, 1))),
    ],
    ids=["generation", "release", "epoch", "peer order", "pool slot", "manifest order"],
)
def test_the_digest_tells_any_two_placements_apart(changed: PlacementSnapshot) -> None:
    assert changed.digest != snapshot_of(LAYER).digest
    assert snapshot_of(LAYER).digest == snapshot_of(LAYER).digest


# -- Assignments


def q(*positions: int) -> list[PhysicalSlotId]:
    return [PhysicalSlotId(f"q{position}") for position in positions]


def test_exactly_one_replica_per_route_gives_its_manifest_position() -> None:
    experts = [LogicalExpertId(0), LogicalExpertId(1), LogicalExpertId(0)]
    assert check_assignment(LAYER, experts, [q(2), q(1), q(0)]) == (2, 1, 0)


@pytest.mark.parametrize(
    ("slots", "error", "failure"),
    [
        (q(), LostRouteError, "lost_route"),
        (q(0, 2), DuplicateExecutionError, "duplicate_execution"),
        (q(1), NotInReplicaSetError, "not_in_replica_set"),
        (q(9), NotInReplicaSetError, "not_in_replica_set"),
    ],
    ids=["none", "two", "another expert's", "no slot at all"],
)
def test_a_route_without_exactly_one_replica_is_refused_by_name(
    slots: list[PhysicalSlotId], error: type[errors.AssignmentError], failure: str
) -> None:
    with pytest.raises(error) as refused:
        check_assignment(LAYER, [LogicalExpertId(0)], [slots])
    assert refused.value.failure == failure
    assert str(refused.value).startswith(f"{failure}: route 0")


def test_right_counts_with_two_experts_swapped_are_refused() -> None:
    experts = [LogicalExpertId(0), LogicalExpertId(1)]
    right, swapped = [q(0), q(1)], [q(1), q(0)]
    assert sorted(check_assignment(LAYER, experts, right)) == [0, 1]
    with pytest.raises(NotInReplicaSetError, match="route 0 wants expert 0, slot q1"):
        check_assignment(LAYER, experts, swapped)


# -- Routes


def test_routes_of_impossible_shape_dtype_or_range_are_refused() -> None:
    ids, gates = torch.tensor([[0, 3]]), torch.tensor([[0.5, 0.5]])
    with pytest.raises(RoutesError, match=r"must both be \[T, K\]"):
        Routes(ids, gates[0])
    with pytest.raises(RoutesError, match="must be int32 or int64"):
        Routes(gates, gates)
    with pytest.raises(RoutesError, match=r"must be in \[0, 3\), found 3"):
        Routes(ids, gates).checked(3)
    with pytest.raises(RoutesError, match=r"must be in \[0, 4\), found -1"):
        Routes(ids - 1, gates).checked(4)
    assert Routes(ids[:0], gates[:0]).checked(1).num_routes == 0


# -- Errors

EXAMPLES: dict[str, Callable[[], RayMoEError]] = {
    "ReleaseError": lambda: errors.ReleaseError("not_loaded", "release b", ("topology_version",)),
    "PeerLeavingError": lambda: errors.PeerLeavingError(3),
    "DigestMismatchError": lambda: errors.DigestMismatchError(1, 2, 3, "rank 4 slot 5", "ab", "cd"),
    "RequestError": lambda: errors.RequestError("too long", "max_tokens"),
    "UnsupportedModelError": lambda: errors.UnsupportedModelError("foo", "it has no experts"),
    "CheckpointError": lambda: errors.CheckpointError("a.safetensors", "w", "[2, 2]", "[2, 3]"),
    "CompatibilityError": lambda: CompatibilityError("rank_in_group", "slot q0"),
    "BindingError": lambda: errors.BindingError("other_generation", "the cell holds another"),
    "CompletionError": lambda: errors.CompletionError("cycle", "a waits for b, b for a"),
    "RunnerError": lambda: errors.RunnerError("stale_topology", "made for other counts"),
    "ScheduleError": lambda: errors.ScheduleError(("dependency", "duration"), "expert_0 starts early"),
    "TopologyError": lambda: errors.TopologyError("relay_not_member", "rank 3 is not of node-0"),
    "IllegalTransitionError": lambda: errors.IllegalTransitionError("h", "ROUTER_OUTPUT", "combine", 3, 1),
    "RetirementRefusedError": lambda: errors.RetirementRefusedError(17, ["peer-0", "peer-1"]),
    "DeadlineError": lambda: errors.DeadlineError("step 4", 2.5, "rank 1"),
    "CollectiveError": lambda: errors.CollectiveError("all_gather", 1, 2),
    "LeaseExpiredError": lambda: errors.LeaseExpiredError("h", 60.0),
    "PeerLostError": lambda: errors.PeerLostError("rank 2 is gone", 1, 2, 3),
}
ALL_ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, RayMoEError)]


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_its_message_and_fields(kind: type[RayMoEError]) -> None:
    error = EXAMPLES.get(kind.__name__, lambda: kind("what went wrong"))()
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) != ""
    assert vars(copy) == vars(error)


def test_every_error_with_fields_of_its_own_has_an_example_above() -> None:
    own = {kind.__name__ for kind in ALL_ERRORS if "__init__" in vars(kind)} - {"AssignmentError"}
    assert own == EXAMPLES.keys()
