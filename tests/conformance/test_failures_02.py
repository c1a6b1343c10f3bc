"""The rejections in the text of 0x01 and 0x02: identities, compatibility, generations; each made, and refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.dataplane.dispatch import Dispatcher
from ray_moe.dataplane.handle import HandleABI, HandleHeader
from ray_moe.dataplane.layer import Invocation
from ray_moe.dataplane.plan import SlotMap, plan_assignment
from ray_moe.dataplane.policies import TokenHash
from ray_moe.errors import (
    CompatibilityError,
    DuplicateExecutionError,
    GenerationError,
    LostRouteError,
    NotInReplicaSetError,
    PlacementError,
    ReleaseError,
    RoutesError,
    StaleHandleError,
)
from ray_moe.identity import CheckpointVersion, GlobalRank, LogicalExpertId, PhysicalSlotId
from ray_moe.placement import Slot, check_assignment
from ray_moe.routes import Routes
from tests.conformance.test_dispatch import assignment_at, routes_at, under
from tests.conformance.test_failure_rows_layer import assert_dense, at, layer_of, unit
from tests.conformance.test_lifecycle import HIDDEN_TD, SNAPSHOT, alone, bound
from tests.layers import CPU, slot_map, spec_of
from tests.releases import NOTE, bring, bundle_of, serving, snapshot_of

# -- 0x01A0


class Changing(TokenHash):
    """A policy that changes what it was given, and keeps every shape and count."""

    name = "changing"

    def __init__(self, gate: bool) -> None:
        self._gate = gate

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        if self._gate:
            routes.topk_weights[0] /= routes.topk_weights[0].sum()
        else:
            routes.topk_ids[0] = routes.topk_ids[0].flip(0)
        return super().choose(routes, slots)


@pytest.mark.parametrize("gate", [True, False], ids=["gate", "expert"])
def test_px_01a0_01_a_gate_or_expert_that_changes_after_the_hand_off_is_refused(gate: bool) -> None:
    layer, (hidden, routes) = layer_of(at(1, [(0, 0), (1, 0), (2, 0), (3, 0), (0, 0)])), unit()
    layer.policy = Changing(gate)
    with pytest.raises(RoutesError, match=r"semantic digest of the routes is .*, sealed as"):
        layer.forward(hidden, routes, Invocation(0, "bare", audit=True))


def test_px_01a0_02_a_bare_integer_is_no_identifier() -> None:
    snapshot = snapshot_of(1)
    slot = snapshot.layers[0].slots[0]
    for field, bare in (("logical_expert_id", 0), ("destination_rank", 0), ("physical_slot_id", "q0")):
        with pytest.raises(TypeError, match=f"{field}: expected .*, found {type(bare).__name__} {bare!r}"):
            dataclasses.replace(slot, **{field: bare})
    with pytest.raises(TypeError, match="rank: expected GlobalRank, found int 0"):
        snapshot.topology.locate(0)  # type: ignore[arg-type]


# -- 0x01D1: a slot that may not serve, in a placement that would be published


def replaced(number: int, **changes: Any) -> tuple[Slot, ...]:
    slots = list(snapshot_of(1).layers[0].slots)
    slots[number] = dataclasses.replace(slots[number], **changes)
    return tuple(slots)


def test_px_01d1_01_a_route_gets_no_slot_that_stores_another_expert() -> None:
    layer = snapshot_of(1).layers[0]
    other = next(slot for slot in layer.slots if slot.logical_expert_id != LogicalExpertId(0))
    with pytest.raises(NotInReplicaSetError, match=f"route 0 wants expert 0, slot {other.physical_slot_id}"):
        check_assignment(layer, [LogicalExpertId(0)], [[other.physical_slot_id]])


def refuses_placement(clause: str, slots: tuple[Slot, ...]) -> None:
    snapshot = snapshot_of(1)
    with pytest.raises(CompatibilityError) as refused:
        dataclasses.replace(snapshot, layers=(dataclasses.replace(snapshot.layers[0], slots=slots),))
    assert refused.value.clause == clause


def test_px_01d1_02_a_replica_of_another_checkpoint_makes_no_placement() -> None:
    refuses_placement("checkpoint_match", replaced(0, checkpoint_version=CheckpointVersion("checkpoint-0")))


def test_px_01d1_03_a_destination_outside_the_group_makes_no_placement() -> None:
    refuses_placement("rank_in_group", replaced(0, destination_rank=GlobalRank(7)))
    # A rank that left with the last epoch is outside, whatever its name.
    with pytest.raises(CompatibilityError, match="is on rank 1, outside group ep-group-0"):
        dataclasses.replace(snapshot_of(2), group=spec_of([0], epoch=1))


def test_px_01d1_04_a_domain_that_does_not_own_the_rank_makes_no_placement() -> None:
    refuses_placement("domain_owns_rank", replaced(0, topology_domain_id="node-9"))


def assignment(change: Any) -> None:
    slots = slot_map(under(spec_of(range(4))), 0)
    plan_assignment(routes_at(0), change(assignment_at(0)), slots)


def test_px_01d1_05_a_route_without_a_slot_is_no_plan() -> None:
    with pytest.raises(LostRouteError, match="layer 0 generation 17: 4 routes were given 3 slots"):
        assignment(lambda chosen: chosen[:-1])


def test_px_01d1_06_a_route_with_two_slots_is_no_plan() -> None:
    with pytest.raises(DuplicateExecutionError, match="layer 0 generation 17: 4 routes were given 5 slots"):
        assignment(lambda chosen: torch.cat([chosen, chosen[:1]]))


def test_px_01d1_07_a_slot_outside_the_replica_set_is_no_plan_though_all_counts_are_right() -> None:
    with pytest.raises(NotInReplicaSetError, match="route 0 wants expert 0, manifest position 2"):
        assignment(lambda chosen: chosen[[1, 0, 2, 3]])


# -- 0x02B2


def test_px_02b2_01_a_slot_is_addressed_within_its_placement_version_alone() -> None:
    homes = [(2, 0), (0, 0), (3, 0), (1, 0)]
    old, new = at(17, homes), at(18, [homes[1], homes[0], *homes[2:]])
    experts = [
        {slot.physical_slot_id: slot.logical_expert_id for slot in snapshot.layers[0].slots}[PhysicalSlotId("q0")]
        for snapshot in (old, new)
    ]
    assert experts == [LogicalExpertId(2), LogicalExpertId(0)]  # one name, two experts
    # A plan made of the one's slots binds under no lease of the other.
    layer, (hidden, routes) = layer_of(old), unit()
    layer.slots = slot_map(new, 0)
    with pytest.raises(StaleHandleError, match="plan of generation 18 cannot bind to a lease of 17"):
        layer.forward(hidden, routes, Invocation(0, "bare"))
    assert_dense(layer_of(new), hidden, routes)


def test_px_02b2_02_replicas_that_share_a_name_and_not_their_parameters_are_not_published() -> None:
    snapshot = snapshot_of(1)
    copy, names = snapshot.layers[0].slots[2], {slot.replica_id.value for slot in snapshot.layers[0].slots}
    assert copy.logical_expert_id == LogicalExpertId(0) and len(names) == 3
    stale = dataclasses.replace(copy, parameter_digest="weights-of-0-of-yesterday")
    layer = dataclasses.replace(snapshot.layers[0], slots=(*snapshot.layers[0].slots[:2], stale))
    with pytest.raises(PlacementError, match="replicas of expert 0 differ in parameter digest"):
        dataclasses.replace(snapshot, layers=(layer,))
    # The digests arrive from the owners: there too.
    with pytest.raises(PlacementError, match="replicas of expert 0 differ in parameter digest"):
        snapshot.with_digests({(0, copy.destination_rank.value, copy.pool_slot): "weights-of-0-of-yesterday"})


# -- 0x02B3


def test_px_02b3_01_combine_does_not_resolve_through_what_is_active() -> None:
    registry = serving(17)
    lease = registry.acquire("dispatch-h17")
    header = HandleHeader.grant(lease, registry.require_live(17), HandleABI())
    registry.publish(snapshot_of(18), bundle_of(snapshot_of(18)), NOTE)
    # The registry's active entry is no scope of the old lease ...
    with pytest.raises(StaleHandleError, match="lease 1 is on generation 17 epoch 0, the placement is generation 18"):
        HandleHeader.grant(lease, registry.active(), HandleABI())
    # ... and combine takes no placement: only the handle's own header brings its rows home.
    seat = Dispatcher(bound().header, alone())
    rows = seat.dispatch(HIDDEN_TD, bound())
    seat.header = dataclasses.replace(seat.header, generation=18, placement_version="placement-v18")
    with pytest.raises(StaleHandleError, match="its placement_version is placement-v17, the scope's is placement-v18"):
        seat.combine(rows)
    assert header.generation == registry.require_live(lease.generation).generation == SNAPSHOT.generation == 17


def test_px_02b3_02_a_draining_generation_takes_no_new_work() -> None:
    registry = serving(17)
    pinned = registry.acquire("dispatch-h17")
    registry.publish(snapshot_of(18), bundle_of(snapshot_of(18)), NOTE)
    with pytest.raises(
        GenerationError, match="late asks for generation 17, which is DRAINING: new dispatches go to 18"
    ):
        registry.acquire("late", 17)
    assert registry.holders(17) == ("dispatch-h17",)  # so that it can drain
    registry.release(pinned)
    registry.retire_generation(17)
    # A draining release takes none either.
    bring(registry, snapshot_of(19, "release-2"))
    with pytest.raises(ReleaseError, match=r"^not_dispatching: late asks for a lease on release release-1"):
        registry.acquire("late", release_id="release-1")


def test_px_02b3_02_a_layer_of_a_generation_that_drains_serves_its_pinned_handles() -> None:
    layer, (hidden, routes) = layer_of(at(17)), unit()
    assert layer.header.generation == 17
    assert_dense(layer, hidden, routes)
    with pytest.raises(StaleHandleError, match="header of generation 17 epoch 0, slots of generation 18"):
        type(layer)(
            layer.header,
            SlotMap.compile(at(18), at(18).layers[0], GlobalRank(0), CPU),
            layer.weights,
            layer.path,
            TokenHash(),
            layer.counters,
        )
