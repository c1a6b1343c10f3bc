"""Operations as records: the state table edge by edge, and a control state that keeps what must not be forgotten."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ray_moe.controlplane.asking import Asker, rebalance, scale
from ray_moe.controlplane.fetching import FromCheckpoint
from ray_moe.controlplane.occupancy import Occupancy
from ray_moe.controlplane.operations import (
    CANCELLABLE,
    CHANGING,
    ENDED,
    HISTORY_REMEMBERED,
    TRANSITIONS,
    ByCounts,
    ByLoads,
    ControlState,
    Kind,
    Operation,
    Stage,
    Wave,
    advance,
)
from ray_moe.errors import GenerationError
from tests.unit.reconciling import first_placement

# The table once more, as it is meant: who comes, the wave, its end; and the way back up to publication.
EDGES: dict[tuple[Stage, str], Stage] = {
    (Stage.PREPARING, "prepared"): Stage.QUEUED,
    (Stage.QUEUED, "enter"): Stage.FILLING,
    (Stage.QUEUED, "done"): Stage.DONE,
    (Stage.FILLING, "join"): Stage.JOINING,
    (Stage.FILLING, "publish"): Stage.PUBLISHING,
    (Stage.JOINING, "move"): Stage.MOVING,
    (Stage.JOINING, "publish"): Stage.PUBLISHING,
    (Stage.MOVING, "publish"): Stage.PUBLISHING,
    (Stage.PUBLISHING, "published"): Stage.SWITCHING,
    (Stage.PUBLISHING, "refused"): Stage.UNDOING,
    (Stage.SWITCHING, "next_wave"): Stage.DRAINING,
    (Stage.SWITCHING, "end"): Stage.ENDING,
    (Stage.SWITCHING, "done"): Stage.DONE,
    (Stage.DRAINING, "enter"): Stage.FILLING,
    (Stage.ENDING, "done"): Stage.DONE,
    (Stage.UNDOING, "cancelled"): Stage.CANCELLED,
    (Stage.UNDOING, "failed"): Stage.FAILED,
    **{
        (stage, "undo"): Stage.UNDOING
        for stage in (Stage.PREPARING, Stage.QUEUED, Stage.FILLING, Stage.JOINING, Stage.MOVING, Stage.DRAINING)
    },
}
EVENTS = sorted({event for _, event in EDGES})
ASKER = Asker("somebody", "a test", 7.0)


def an_operation(stage: Stage = Stage.QUEUED, number: int = 1) -> Operation:
    return Operation(number, Kind.REBALANCE, "somebody", "a test", 7.0, stage)


@pytest.mark.parametrize(("stage", "event"), list(product(Stage, [*EVENTS, "restart"])))
def test_only_the_edges_of_the_table_exist(stage: Stage, event: str) -> None:
    if (stage, event) in EDGES:
        assert advance(stage, event) is EDGES[stage, event]
    else:
        with pytest.raises(GenerationError, match=f"an operation that is {stage.value} allows no '{event}'"):
            advance(stage, event)


def test_the_table_has_every_stage_and_no_event_besides() -> None:
    assert TRANSITIONS.keys() == set(Stage)
    assert {(stage, event) for stage, edges in TRANSITIONS.items() for event in edges} == EDGES.keys()


def test_what_has_ended_allows_nothing_and_everything_else_comes_to_an_end() -> None:
    assert {stage for stage, edges in TRANSITIONS.items() if not edges} == ENDED
    for stage in Stage:
        reached, new = {stage}, {stage}
        while new:
            new = {following for one in new for following in TRANSITIONS[one].values()} - reached
            reached |= new
        assert reached & ENDED, f"nothing leads out of {stage}"


def test_up_to_publication_an_operation_can_be_undone_and_from_there_on_it_cannot() -> None:
    assert {stage for stage, event in EDGES if event == "undo"} == CANCELLABLE
    after = {Stage.PUBLISHING, Stage.SWITCHING, Stage.ENDING, Stage.UNDOING, *ENDED}
    assert set(Stage) - after == CANCELLABLE
    assert set(Stage) - ENDED - {Stage.PREPARING, Stage.QUEUED} == CHANGING


def test_taking_an_edge_starts_the_attempts_anew_and_keeps_the_reason_unless_there_is_another() -> None:
    before = replace(an_operation(), attempts={"fill": 3}, not_before=9.0, reason="slow", changed_at=7.0)
    taken = before.take("enter", 8.0)
    assert (taken.stage, taken.attempts, taken.not_before, taken.changed_at) == (Stage.FILLING, {}, 0.0, 8.0)
    assert (taken.reason, taken.ended, taken.ended_at) == ("slow", False, 0.0)
    ended = before.take("done", 8.0, "nothing to do")
    assert (ended.reason, ended.ended, ended.ended_at) == ("nothing to do", True, 8.0)
    with pytest.raises(GenerationError, match="an operation that is queued allows no 'publish'"):
        before.take("publish", 8.0)


def test_an_operation_is_found_by_its_number_open_or_ended() -> None:
    state, first = rebalance(ControlState(), ASKER, ByCounts({}))
    state, second = rebalance(state, ASKER, ByCounts({}))
    assert (first.number, second.number, state.next_number) == (1, 2, 3)
    done = first.take("done", 8.0)
    state = state.put(done).close(done)
    assert state.operations == (second,)
    assert state.find(1).stage is Stage.DONE and state.find(2) is second
    for unknown in (0, 3):
        with pytest.raises(GenerationError, match=f"operation {unknown} is not known; the next one is 3"):
            state.find(unknown)


def test_put_replaces_the_open_operation_of_that_number_alone() -> None:
    state = ControlState((an_operation(number=1), an_operation(number=2)))
    changed = replace(an_operation(number=2), reason="why")
    assert state.put(changed).operations == (an_operation(number=1), changed)
    assert state.put(an_operation(number=3)) == state


def test_history_is_bounded_and_keeps_what_was_asked_and_what_came_of_it_without_placements() -> None:
    placement = first_placement({0: [(0, 0)]}, 2)
    whole = replace(
        an_operation(Stage.DONE),
        ranks=(3,),
        target=ByLoads(np.ones((1, 1))),
        loads_LE=np.ones((1, 1)),
        plan=(Wave(Occupancy.of(placement)),),
        waves=1,
        candidate=placement,
        bad=frozenset({(0, 0, 0, FromCheckpoint())}),
        moved_bytes={"peer": 5},
        reason="why",
        first_generation=1,
        last_generation=2,
    )
    state = ControlState((whole,)).close(whole)
    (kept,) = state.history
    assert (kept.plan, kept.candidate, kept.target, kept.loads_LE, kept.bad) == ((), None, None, None, frozenset())
    assert kept == replace(whole, plan=(), candidate=None, target=None, loads_LE=None, bad=frozenset())
    for number in range(2, 2 * HISTORY_REMEMBERED):
        state = state.close(an_operation(Stage.DONE, number))
    assert [one.number for one in state.history] == list(range(HISTORY_REMEMBERED, 2 * HISTORY_REMEMBERED))
    with pytest.raises(GenerationError, match=f"operation 1 is not known; the next one is {state.next_number}"):
        state.find(1)


def test_a_control_state_comes_back_from_a_file_as_it_was() -> None:
    state, grow = scale(ControlState(next_rank=2), ASKER, (0, 1), 3, (1, 4))
    assert grow is not None
    state, _ = rebalance(state, ASKER, ByCounts({(0, 0): 2}))
    candidate = first_placement({0: [(0, 0), (1, 1)]}, 2)
    filling = replace(grow, stage=Stage.FILLING, plan=(Wave(Occupancy.of(candidate), True),), candidate=candidate)
    state = replace(state.put(filling), members=(0, 1), members_version=4)
    assert pickle.loads(pickle.dumps(state)) == state
