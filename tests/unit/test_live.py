"""The live document: what it is made of, and that one that is asked for piece by piece is the one asked for whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.controlplane.demand import Demand, Provenance
from ray_moe.controlplane.generations import GenerationStatus, State
from ray_moe.controlplane.operation_row import OperationRow
from ray_moe.controlplane.operations import Kind, Operation, Stage
from ray_moe.observe.live import (
    FREE,
    STEPS_KEPT,
    Known,
    OperationView,
    RankView,
    StepsView,
    balance_view,
    generation_views,
    joined,
    loads_view,
    merged,
    operation_views,
    placement_view,
    steps_after,
)
from tests.layers import placement, spec_of, untimed
from tests.observe.large import LargeCluster

HOMES = [(0, 2), (1, 0), (0, 1), (2, 1), (1, 2), (3, 2)]


def demand(rows: Sequence[Sequence[float]], end: int = 64) -> Demand:
    return Demand(np.asarray(rows), Provenance(unit="accepted_rows", start=0, end=end))


# -- Placement and loads


def test_every_copy_is_in_its_ranks_row_and_its_own_pool_slot_and_other_slots_are_free() -> None:
    active = placement(HOMES, spec_of((2, 0, 1)))  # peer slots are not in the ranks' order
    view = placement_view(active, 4)
    assert view.ranks == (2, 0, 1)
    held = {
        (rank, slot): expert
        for rank, layers in zip(view.ranks, view.slots_RLC, strict=True)
        for slot, expert in enumerate(layers[0])
        if expert != FREE
    }
    slots = active.layers[0].slots
    assert held == {(slot.destination_rank.value, slot.pool_slot): slot.logical_expert_id.value for slot in slots}
    assert sum(expert == FREE for layers in view.slots_RLC for expert in layers[0]) == 3 * 4 - len(HOMES)


def test_balance_is_the_busiest_rank_over_the_mean_with_loads_split_over_copies() -> None:
    active = placement(HOMES, spec_of((2, 0, 1)))
    balance = balance_view(demand([[40, 20, 10, 30]]), active)
    # rank 2: 40/2 + 20/2 + 30, rank 0: 20/2, rank 1: 40/2 + 10
    assert balance.rank_share == (0.6, 0.1, 0.3)
    assert balance.imbalance == (1.8,)


def test_a_layer_that_nobody_asked_for_is_balanced() -> None:
    assert balance_view(demand([[0, 0, 0, 0]]), placement(HOMES, spec_of((0, 1, 2)))).imbalance == (1.0,)


@given(st.lists(st.integers(0, 10_000), min_size=4, max_size=4).filter(any))
@untimed
def test_shares_of_ranks_add_up_and_the_busiest_rank_is_at_least_the_mean(loads: list[int]) -> None:
    balance = balance_view(demand([loads]), placement(HOMES, spec_of((0, 1, 2))))
    assert sum(balance.rank_share) == pytest.approx(1, abs=1e-4)  # shares are rounded to 1e-5
    assert 1 <= balance.imbalance[0] <= 3
    assert balance.imbalance[0] == pytest.approx(3 * max(balance.rank_share), abs=1e-3)


def test_loads_carry_the_steps_that_they_are_of() -> None:
    view = loads_view(demand([[1.23456, 2, 0, 7]], end=128))
    assert (view.start, view.end, view.rows_LE) == (0, 128, ((1.23, 2.0, 0.0, 7.0),))


# -- Steps


def steps(first: int, count: int) -> StepsView:
    return StepsView(0, first, tuple(map(float, range(first, first + count))), tuple([0.001] * count))


def test_stretches_of_steps_that_meet_become_one() -> None:
    assert joined(steps(3, 4), steps(7, 2)) == steps(3, 6)
    assert joined(None, steps(7, 2)) == steps(7, 2)
    assert joined(steps(3, 4), steps(7, 0)) == steps(3, 4)


def test_where_steps_in_between_are_unknown_only_the_later_ones_are_kept() -> None:
    assert joined(steps(3, 4), steps(9, 2)) == steps(9, 2)
    assert joined(steps(300, 4), steps(0, 2)) == steps(0, 2)  # another process counts anew


def test_of_a_long_time_the_latest_steps_are_kept() -> None:
    assert joined(steps(0, STEPS_KEPT), steps(STEPS_KEPT, 5)) == steps(5, STEPS_KEPT)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 50))
@untimed
def test_what_a_reader_lacks_is_what_comes_after_what_it_has(first: int, count: int, known: int) -> None:
    lacking = steps_after(steps(first, count), known)
    assert list(lacking.ended_at) == [float(n) for n in range(first, first + count) if n >= known]
    assert lacking.first + len(lacking.seconds) == first + count


# -- Operations


def operation(number: int, stage: Stage, **changes: object) -> Operation:
    return replace(Operation(number, Kind.REBALANCE, "me@here", "a test", 10.0, stage), **changes)  # type: ignore[arg-type]


def test_an_open_operation_says_what_it_waits_for_and_an_ended_one_nothing() -> None:
    registry = [GenerationStatus(4, "placement-v4", State.DRAINING, 1, ("rank-1",), False, None)]
    ended = operation(1, Stage.DONE, ended_at=12.0, last_generation=4)
    views = operation_views(
        [ended, operation(2, Stage.SWITCHING, last_generation=5), operation(3, Stage.QUEUED)],
        generation_views(registry),
        [RankView(0, "a", "serving", generation=5), RankView(1, "a", "serving", generation=4)],
    )
    assert [view.number for view in views] == [1, 2, 3]
    assert views[0].waits_for == ""
    assert views[1].waits_for == "rank 1 to take generation 5 at one agreed step"
    assert views[2].waits_for == "operation 2 (rebalance), which is switching"


def test_an_operation_here_has_every_field_that_a_row_of_history_has() -> None:
    assert {field.name for field in fields(OperationRow)} < {field.name for field in fields(OperationView)}
    row = OperationRow.of(operation(7, Stage.FILLING, waves=2, at=1))
    (view,) = operation_views([operation(7, Stage.FILLING, waves=2, at=1)], (), ())
    assert asdict(row) == {name: value for name, value in asdict(view).items() if name != "waits_for"}


# -- Whole, and piece by piece


def small() -> LargeCluster:
    sizes = {"layers": 2, "experts": 8, "ranks": 3, "per_node": 1, "copies": 2, "capacity": 5}
    cluster = LargeCluster(**sizes, step_s=0.05, switch_every_s=3600)
    cluster.began -= 5  # it has run a hundred steps
    return cluster


def test_a_reader_that_says_what_it_has_gets_the_rest_and_merges_it_into_the_same_document() -> None:
    cluster = small()
    first = cluster.live(Known())
    later = cluster.live(first.known)
    assert later.placement is None  # the generation that it has
    assert first.placement is not None
    whole = merged(first, later)
    assert (whole.placement, whole.at, whole.known) == (first.placement, later.at, later.known)
    assert whole.loads == (later.loads or first.loads)
    assert [one.seconds[: len(old.seconds)] for one, old in zip(whole.steps, first.steps, strict=True)] == [
        old.seconds for old in first.steps
    ]


def test_a_document_of_another_controllers_life_is_not_mixed_with_what_was_there() -> None:
    cluster = small()
    first = cluster.live(Known())
    reborn = cluster.live(Known())
    reborn = replace(reborn, placement=None, known=replace(reborn.known, life="another"))
    assert merged(first, reborn) is reborn


def test_the_document_of_61_layers_of_256_experts_on_64_ranks_is_json_of_less_than_a_megabyte() -> None:
    document = asdict(LargeCluster().live(Known()))
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    assert len(text) < 2**20
    assert len(document["loads"]["rows_LE"]) == 61
    assert len(document["survival"]) == 64 + 8 + 3
