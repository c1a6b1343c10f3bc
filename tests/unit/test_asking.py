"""Asking for a change: what is refused, what an operation says, and which ranks there will be when all have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.controlplane.asking import Asker, drain, expected_ranks, rebalance, scale
from ray_moe.controlplane.operations import ByCounts, ControlState, Kind, Operation, Stage
from ray_moe.errors import ConfigError
from tests.layers import untimed

ASKER = Asker("somebody", "it is late", 7.0)
BOUNDS = (2, 5)


def scaled(state: ControlState, wanted: int, serving: Sequence[int] = (0, 1, 2)) -> tuple[ControlState, Operation]:
    state, operation = scale(state, ASKER, serving, wanted, BOUNDS)
    assert operation is not None
    return state, operation


def with_stage(state: ControlState, number: int, stage: Stage) -> ControlState:
    return state.put(replace(state.find(number), stage=stage))


EMPTY = ControlState(next_rank=3)


def test_an_operation_says_who_asked_why_and_when_and_numbers_go_up() -> None:
    target = ByCounts({(0, 1): 2})
    state, first = rebalance(EMPTY, ASKER, target)
    assert (first.kind, first.stage, first.target, first.ranks) == (Kind.REBALANCE, Stage.QUEUED, target, ())
    assert (first.asked_by, first.why, first.asked_at, first.changed_at) == ("somebody", "it is late", 7.0, 7.0)
    state, second = rebalance(state, ASKER, target)
    assert state.operations == (first, second)
    assert (first.number, second.number, state.next_number) == (1, 2, 3)


def test_growing_brings_ranks_that_never_were() -> None:
    loads = np.ones((1, 4))
    state, operation = scale(ControlState(next_rank=6), ASKER, (0, 4), 4, BOUNDS, loads)
    assert operation is not None
    assert (operation.kind, operation.stage, operation.ranks) == (Kind.GROW, Stage.PREPARING, (6, 7))
    assert operation.loads_LE is loads and state.next_rank == 8
    state, more = scaled(state, 5, (0, 4))
    assert (more.ranks, state.next_rank) == ((8,), 9)
    _, found = scaled(ControlState(), 4, (0, 7))
    assert found.ranks == (8, 9), "also where the state knows less than the cluster"


def test_shrinking_takes_the_newest_ranks_and_draining_those_that_are_named() -> None:
    _, shrink = scaled(EMPTY, 2)
    assert (shrink.kind, shrink.stage, shrink.ranks, shrink.at_least) == (Kind.SHRINK, Stage.QUEUED, (2,), 2)
    state, named = drain(EMPTY, ASKER, (0, 1, 2), (0,), 2)
    assert (named.kind, named.ranks, named.at_least) == (Kind.SHRINK, (0,), 2)
    assert expected_ranks(state, (0, 1, 2)) == (1, 2)


def test_what_is_there_already_is_no_operation() -> None:
    assert scale(EMPTY, ASKER, (0, 1, 2), 3, BOUNDS) == (EMPTY, None)
    state, _ = scaled(EMPTY, 4)
    assert scale(state, ASKER, (0, 1, 2), 4, BOUNDS) == (state, None), "it is coming"


@pytest.mark.parametrize("wanted", [-1, 0, 1, 6])
def test_a_number_outside_the_bounds_is_refused(wanted: int) -> None:
    with pytest.raises(ConfigError, match=rf"peers must be in \[2, 5\], found {wanted}"):
        scale(EMPTY, ASKER, (0, 1, 2), wanted, BOUNDS)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((3,), r"rank must be one of \[0, 1, 2\], found 3"),
        ((), r"ranks must be distinct and not empty, found \[\]"),
        ((1, 1), r"ranks must be distinct and not empty, found \[1, 1\]"),
        ((0, 1), r"at least 2 of the ranks \[0, 1, 2\] must stay, asked to drain \[0, 1\]"),
    ],
)
def test_ranks_that_cannot_go_are_refused(ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drain(EMPTY, ASKER, (0, 1, 2), ranks, 2)


def test_a_rank_leaves_once_and_one_that_is_coming_can_be_drained() -> None:
    state, _ = drain(EMPTY, ASKER, (0, 1, 2), (0,), 1)
    with pytest.raises(ConfigError, match=r"rank must be one of \[1, 2\], found 0"):
        drain(state, ASKER, (0, 1, 2), (0,), 1)
    state, grow = scaled(state, 3)
    assert grow.ranks == (3,)
    _, back = drain(state, ASKER, (0, 1, 2), (3, 1), 1)
    assert back.ranks == (3, 1)


@pytest.mark.parametrize(
    "stage", [stage for stage in Stage if stage not in (Stage.DONE, Stage.CANCELLED, Stage.FAILED)]
)
def test_ranks_that_come_or_go_count_in_every_stage_but_while_it_is_undone(stage: Stage) -> None:
    state, grow = scaled(EMPTY, 4)
    state, shrink = drain(state, ASKER, (0, 1, 2), (0,), 2)
    state = with_stage(with_stage(state, grow.number, stage), shrink.number, stage)
    undone = stage is Stage.UNDOING
    assert expected_ranks(state, (0, 1, 2)) == ((0, 1, 2) if undone else (1, 2, 3))
    # A grow that is undone between two waves has brought its ranks, a shrink at its end has taken them.
    assert expected_ranks(state, (0, 1, 2, 3)) == ((0, 1, 2, 3) if undone else (1, 2, 3))
    assert expected_ranks(state, (1, 2, 3)) == (1, 2, 3)


@untimed
@given(st.lists(st.integers(2, 5) | st.tuples(st.integers(0, 8)), max_size=8), st.data())
def test_after_any_requests_the_ranks_are_within_bounds_and_as_many_as_were_asked_for_last(
    requests: list[int | tuple[int]], data: st.DataObject
) -> None:
    serving, state = (0, 1, 2), EMPTY
    given_out: set[int] = set(serving)
    for request in requests:
        before = expected_ranks(state, serving)
        if isinstance(request, int):
            state, operation = scale(state, ASKER, serving, request, BOUNDS)
            assert len(expected_ranks(state, serving)) == request
            if operation is not None and operation.kind is Kind.GROW:
                assert given_out.isdisjoint(operation.ranks) and max(operation.ranks) < state.next_rank
                given_out |= set(operation.ranks)
        elif request[0] in before and len(before) > BOUNDS[0]:
            state, _ = drain(state, ASKER, serving, request, BOUNDS[0])
            assert set(expected_ranks(state, serving)) == set(before) - {request[0]}
        else:
            with pytest.raises(ConfigError):
                drain(state, ASKER, serving, request, BOUNDS[0])
        assert BOUNDS[0] <= len(expected_ranks(state, serving)) <= BOUNDS[1]
        if state.operations and data.draw(st.booleans()):
            # The oldest is done: its ranks serve, or have gone.
            first = state.operations[0]
            serving = expected_ranks(replace(state, operations=(first,)), serving)
            expected = expected_ranks(state, serving)
            state = replace(state, operations=state.operations[1:])
            assert expected_ranks(state, serving) == expected
