"""Migration and publication in the failure lab of 0x08K: each mistake made through the product, and refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ray_moe.controlplane.execution import MigrationRun
from ray_moe.controlplane.generations import PlacementRegistry, State
from ray_moe.controlplane.migrate import plan_migration
from ray_moe.controlplane.migration_plan import Copy, Load, Publish, Retire, Verify
from ray_moe.controlplane.occupancy import Held, Home, Occupancy, Wanted
from ray_moe.controlplane.sources import CopyClass
from ray_moe.errors import (
    DuplicateExecutionError,
    EvidenceError,
    GenerationError,
    PlacementError,
    RetirementRefusedError,
    ScheduleError,
    StaleHandleError,
)
from ray_moe.evidence import Elapsed, LiveBytes, LogicalBytes, MeasuredBytes
from ray_moe.identity import LogicalExpertId
from ray_moe.placement import PlacementSnapshot, check_assignment
from tests.conformance.test_migration import EXPERT_BYTES, PLAN_POOLS, PRINTED, TARGET, planned, source
from tests.layers import placement, spec_of

PLAN = planned(PRINTED)


def at(kind: type, matches: Callable[..., bool] = lambda effect: True) -> int:
    """Position of the plan's first effect of a kind."""
    return next(n for n, effect in enumerate(PLAN.effects) if isinstance(effect, kind) and matches(effect))


def run_until(*, without: int) -> MigrationRun:
    """A run in which everything is done that may be done without the effect at position `without`."""
    run = MigrationRun(PLAN)
    while positions := [position for position in run.ready() if position != without]:
        run.begin(positions[0])
        run.complete(positions[0])
    return run


def snapshot(generation: int, *, verified: bool = True) -> PlacementSnapshot:
    """Two experts on two ranks, expert 0 with a copy on each."""
    whole = placement([(0, 0), (0, 1), (1, 1)], spec_of([0, 1]), generation=generation)
    if verified:
        return whole
    first, *rest = whole.layers[0].slots
    slots = (dataclasses.replace(first, parameter_digest=""), *rest)
    return dataclasses.replace(whole, layers=(dataclasses.replace(whole.layers[0], slots=slots),))


def test_fl_08k_08_a_generation_is_refused_while_one_slot_is_unverified() -> None:
    registry = PlacementRegistry()
    registry.publish(snapshot(18))
    with pytest.raises(
        GenerationError, match="generation 19 cannot be published: 1 of 3 slots have no verified digest"
    ):
        registry.publish(snapshot(19, verified=False))
    assert registry.active().generation == 18
    unverified = at(Verify)
    with pytest.raises(ScheduleError, match=r"^unverified: publish of wave 1 waits for"):
        run_until(without=unverified).begin(at(Publish))


def test_fl_08k_09_storage_that_stays_is_no_transfer() -> None:
    ledger = PLAN.ledger
    assert ledger.payload[CopyClass.KEEP] == LogicalBytes(0)
    assert (ledger.retained, ledger.network) == (LiveBytes(3 * EXPERT_BYTES), LogicalBytes(2 * EXPERT_BYTES))
    with pytest.raises(EvidenceError, match="two ledgers"):
        ledger.network + ledger.retained  # type: ignore[operator]


def test_fl_08k_10_a_plan_that_fits_only_when_shared_storage_counts_once_is_admitted() -> None:
    ledger = PLAN.ledger
    twice = ledger.prior_resident.value + ledger.target_resident.value
    assert ledger.peak_resident.value == twice - ledger.retained.value == 396
    held = {rank: sum(slot.rank == rank for slot in source(PRINTED)[0].layers[0]) for rank in range(4)}
    new = {rank: sum(copy.slot.rank.value == rank for copy in PLAN.waves[0].copies) for rank in range(4)}
    exact = dataclasses.replace(PLAN_POOLS, capacity_of_rank={rank: held[rank] + new[rank] for rank in range(4)})
    assert sum(exact.capacity_of_rank.values()) * EXPERT_BYTES == 396
    assert plan_migration(source(PRINTED)[0], TARGET, exact, max_waves=1).ledger.peak_resident == LiveBytes(396)


def test_fl_08k_11_a_slot_with_unfinished_outgoing_copies_cannot_be_freed() -> None:
    retire = at(Retire, lambda effect: any(isinstance(e, Copy) and e.source == effect.slot for e in PLAN.effects))
    slot = PLAN.effects[retire].slot  # type: ignore[union-attr]
    copy = at(Copy, lambda effect: effect.source == slot)
    run = run_until(without=copy)
    with pytest.raises(ScheduleError, match="unpublished, source_in_use: retire of layer 0 rank 1"):
        run.begin(retire)
    run.begin(copy)
    with pytest.raises(ScheduleError, match="source_in_use"):  # a copy that is under way reads the slot all the more
        run.begin(retire)


def test_fl_08k_12_neither_a_map_nor_a_slot_in_use_is_changed_in_place() -> None:
    published = snapshot(18)
    with pytest.raises(dataclasses.FrozenInstanceError):
        published.layers[0].slots[0].logical_expert_id = LogicalExpertId(1)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.waves[0].published.layers = {}  # type: ignore[misc]
    full = dataclasses.replace(PLAN_POOLS, capacity_of_rank=dict.fromkeys(range(4), 1))
    occupied, swapped = Occupancy({0: (Held(0, 0, 0), Held(1, 0, 1))}), Wanted({0: (Home(0, 1), Home(1, 0))})
    with pytest.raises(PlacementError, match="no order exists"):  # a swap in full pools could only overwrite
        plan_migration(occupied, swapped, full)
    prior = {(held.rank, held.pool_slot) for held in PLAN.prior.layers[0]}
    filled = {(e.slot.rank.value, e.slot.pool_slot) for e in PLAN.effects if isinstance(e, Load | Copy)}
    assert filled.isdisjoint(prior)
    assert PLAN.waves[0].published is not PLAN.prior


def test_fl_08k_13_the_old_generation_retires_at_zero_leases_only() -> None:
    registry = PlacementRegistry(final_after_steps=0)
    registry.publish(snapshot(18))
    lease = registry.acquire("dispatch-h18-0099")
    registry.publish(snapshot(19))
    with pytest.raises(RetirementRefusedError, match="generation 18 cannot retire: held by dispatch-h18-0099"):
        registry.retire(18)
    registry.release(lease)
    registry.retire(18)
    assert registry.status()[0].state is State.RETIRED
    with pytest.raises(StaleHandleError):
        registry.require_live(18)


def test_fl_08k_14_replicas_are_not_executed_side_by_side() -> None:
    layer = snapshot(18).layers[0]
    both = tuple(layer.slots[position].physical_slot_id for position in layer.replicas(LogicalExpertId(0)))
    assert len(both) == 2
    with pytest.raises(DuplicateExecutionError, match="assigned to 2 slots"):
        check_assignment(layer, [LogicalExpertId(0)], [both])


def test_fl_08k_15_planned_bytes_do_not_pass_for_measured_ones() -> None:
    for amount in (PLAN.ledger.network, PLAN.ledger.peak_resident):
        with pytest.raises(EvidenceError, match="needs the measurement that gave it"):
            MeasuredBytes(amount.value, PLAN.ledger)  # type: ignore[arg-type]
    with pytest.raises(EvidenceError, match="needs the measurement that gave it"):
        Elapsed(PLAN.ledger.network.value / 10e9, None)  # type: ignore[arg-type]
