"""The reconciler against a model of the cluster: whatever fails, is slow, dies or is asked for, what serves goes on.

`Run.check` states after every round what must hold at every moment, `Run.check_settled` what must hold in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ray_moe.controlplane import effects
from ray_moe.controlplane.effects import Fill, Free, HandOver, Join, Prepare, Publish, Start
from ray_moe.controlplane.fetching import FromCheckpoint
from ray_moe.controlplane.operations import CANCELLABLE, TRANSITIONS, ByCounts, Kind, Stage
from ray_moe.controlplane.outstanding import candidate_in, ranks_of
from ray_moe.controlplane.reconcile import MAX_ATTEMPTS, absorb
from ray_moe.errors import ConfigError, GenerationError
from tests.unit.cluster_calls import EXPERT_BYTES, node_of
from tests.unit.cluster_model import CALM, Faults
from tests.unit.reconciling import Homes, Run

TWO: Homes = dict.fromkeys((0, 1), ((0, 0), (1, 0), (2, 1), (3, 1)))
THREE: Homes = dict.fromkeys((0, 1), ((0, 0), (1, 0), (2, 1), (3, 1), (0, 2), (2, 2)))
SWAPPED: Homes = dict.fromkeys((0, 1), ((0, 1), (1, 1), (2, 0), (3, 0)))
SWAPPED_OVER_THREE: Homes = dict.fromkeys((0, 1), ((0, 1), (1, 1), (2, 0), (3, 0), (0, 2)))
ROOMY, TIGHT = 6, 3  # slots of a layer; two are held on each rank, and all of them change


@dataclass(frozen=True)
class Scene:
    """One operation, behind another one that keeps it waiting a while; `waves` are those that it takes."""

    kind: Kind
    waves: int
    homes: Homes
    ask: Callable[[Run], int]

    def begin(self, seed: int = 0, faults: Faults = CALM) -> tuple[Run, int]:
        run = Run(self.homes, ROOMY if self.waves == 1 else TIGHT, seed=seed, faults=faults)
        run.rebalance({1: ((1, 1), (2, 0), (0, 0), (3, 1), *self.homes[1][4:])})
        return run, self.ask(run)

    @property
    def stages(self) -> list[Stage]:
        """All that it comes through, UNDOING left out."""
        grow, shrink, many = self.kind is Kind.GROW, self.kind is Kind.SHRINK, self.waves > 1
        return [
            *([Stage.PREPARING] if grow else []),
            *(Stage.QUEUED, Stage.FILLING),
            *([Stage.JOINING] if grow or shrink else []),
            *([Stage.MOVING] if shrink else []),
            *(Stage.PUBLISHING, Stage.SWITCHING),
            *([Stage.DRAINING] if many else []),
            *([Stage.ENDING] if shrink else []),
        ]


SCENES = {
    "rebalance": Scene(Kind.REBALANCE, 1, TWO, lambda run: run.rebalance(SWAPPED)),
    "rebalance in waves": Scene(Kind.REBALANCE, 2, TWO, lambda run: run.rebalance(SWAPPED)),
    "grow": Scene(Kind.GROW, 1, TWO, lambda run: run.scale(3)),
    "grow in waves": Scene(Kind.GROW, 2, TWO, lambda run: run.scale(3, homes=SWAPPED_OVER_THREE)),
    "shrink": Scene(Kind.SHRINK, 1, THREE, lambda run: run.drain(2)),
    "shrink in waves": Scene(Kind.SHRINK, 2, THREE, lambda run: run.drain(2, homes=SWAPPED)),
}
IN_EACH_STAGE = [(name, stage) for name, scene in SCENES.items() for stage in scene.stages]


def outcome(run: Run, number: int) -> tuple[object, ...]:
    """What an operation came to, and what serves then."""
    ended = run.ended(number)
    return ended.kind, ended.stage, ended.ranks, ended.waves, ended.reason, run.active, run.control.members


UNDISTURBED: dict[tuple[str, bool], tuple[object, ...]] = {}


def undisturbed(name: str, *, cancelled: bool = False) -> tuple[object, ...]:
    if (name, cancelled) not in UNDISTURBED:
        run, number = SCENES[name].begin()
        if cancelled:
            run.until(number, Stage.FILLING)
            run.cancel(number)
        run.settle()
        UNDISTURBED[name, cancelled] = outcome(run, number)
    return UNDISTURBED[name, cancelled]


# -- What is asked for comes about


@pytest.mark.parametrize("name", SCENES)
def test_an_operation_comes_through_its_stages_to_what_was_asked_for(name: str) -> None:
    scene = SCENES[name]
    run, number = scene.begin()
    run.settle()
    done = run.ended(number)
    assert (done.stage, done.waves, done.reason) == (Stage.DONE, scene.waves, "")
    assert set(run.seen_stages[number]) == {*scene.stages, Stage.DONE}
    before = run.ended(1).last_generation
    assert (done.first_generation, done.last_generation) == (before, before + scene.waves)
    assert run.active.generation == done.last_generation
    assert done.moved_bytes["peer"] > 0 and done.pause_s == pytest.approx(0.001 * done.last_generation)
    if scene.kind is Kind.REBALANCE:
        assert (ranks_of(run.active), run.active.group.epoch) == ((0, 1), 1)
        assert run.homes() == {layer: set(pairs) for layer, pairs in SWAPPED.items()}
    elif scene.kind is Kind.GROW:
        assert (ranks_of(run.active), run.active.group.epoch) == ((0, 1, 2), 2)
    else:
        assert (ranks_of(run.active), run.active.group.epoch) == ((0, 1), 2)
        assert run.world.ended == {2}


@pytest.mark.parametrize("name", ["grow", "grow in waves", "shrink", "shrink in waves"])
def test_clients_hear_of_ranks_that_serve_and_lose_those_that_leave_once_they_do(name: str) -> None:
    """Also in several waves: a rank takes requests up to the one with which it leaves."""
    run, _ = SCENES[name].begin()
    run.settle()
    both = [(0, 1), (0, 1, 2)]
    assert run.seen_members == (both if SCENES[name].kind is Kind.GROW else both[::-1])


def test_a_rank_that_comes_belongs_to_the_node_that_it_runs_on() -> None:
    run = Run(THREE, ROOMY)
    run.drain(1)
    run.settle()
    assert [domain.domain_id for domain in run.active.topology.domains] == ["node-0"]
    run.scale(4)
    run.settle()
    owner = run.active.topology.owner
    assert {rank.value: domain for rank, domain in owner.items()} == {
        rank: node_of(rank) for rank in ranks_of(run.active)
    }
    assert set(owner.values()) == {"node-0", "node-1"}


def test_a_rank_leaves_when_its_last_request_has_gone() -> None:
    run = Run(THREE, ROOMY)
    number = run.drain(2)
    run.until(number, Stage.MOVING)
    run.world.actors[2].requests += 50
    run.world.opened += 50
    run.world.held = {number}
    for _ in range(5):
        run.step()
    assert not run.world.actors[2].admitting and run.world.actors[2].requests
    assert run.control.find(number).stage is Stage.MOVING
    run.world.held = set()
    run.settle()
    assert run.ended(number).stage is Stage.DONE


def test_a_rank_ends_when_it_has_left_not_when_the_others_have_switched() -> None:
    run = Run(THREE, ROOMY)
    number = run.drain(2)
    run.world.slow = {2}
    run.until(number, Stage.SWITCHING)
    for _ in range(5):
        run.step()
    assert [run.world.actors[rank].generation for rank in (0, 1, 2)] == [2, 2, 1]
    assert run.control.find(number).stage is Stage.SWITCHING
    run.world.slow = set()
    run.settle()
    assert run.ended(number).stage is Stage.DONE


def test_a_source_that_failed_in_one_wave_is_asked_again_in_the_next() -> None:
    run = Run(TWO, TIGHT)
    run.world.corrupt = {(0, 0, 0), (1, 0, 0)}
    number = run.rebalance(SWAPPED)
    run.until(number, Stage.DRAINING)
    assert run.control.find(number).bad
    run.until(number, Stage.FILLING)
    assert not run.control.find(number).bad


def refused_publication() -> tuple[Run, int]:
    """A grow whose publication was not done, since a member of its group is gone."""
    run = Run(TWO, ROOMY)
    number = run.scale(3)
    run.world.failing[Publish] = 10**6
    run.until(number, Stage.PUBLISHING)
    candidate = run.control.find(number).candidate
    assert candidate is not None
    refused = Publish(number, candidate.generation, candidate)
    run.control = absorb(run.control, refused, "rank 2 is gone", (), run.world.now, refused=True)
    run.seen_stages[number].append(Stage.UNDOING)
    run.settle()
    return run, number


def test_a_publication_that_is_refused_is_undone_and_the_old_generation_serves_on() -> None:
    run, number = refused_publication()
    operation = run.control.find(number)
    assert (operation.stage, operation.reason) == (Stage.FAILED, "rank 2 is gone")
    assert run.serving == (0, 1)
    assert not operation.refused, "no want of machines: a grow may be tried at once"


def test_every_edge_of_the_table_is_taken() -> None:
    run, number = refused_publication()
    seen = set(pairwise(run.seen_stages[number]))
    for name, stage in [(name, None) for name in SCENES] + IN_EACH_STAGE:
        run, number = SCENES[name].begin()
        if stage in CANCELLABLE:
            run.until(number, stage)
            run.cancel(number)
        run.rebalance(ByCounts({}))  # nothing to do, once it is its turn
        run.world.failing[Prepare] = MAX_ATTEMPTS * (stage is Stage.SWITCHING)
        run.scale(4)
        run.settle()
        for stages in run.seen_stages.values():
            seen |= set(pairwise(stages))
    assert {(stage, after) for stage, edges in TRANSITIONS.items() for after in edges.values()} <= seen


def test_the_memory_that_a_wave_takes_is_the_figure_of_its_plan() -> None:
    run = Run(TWO, ROOMY)
    run.until(run.rebalance(SWAPPED), Stage.PUBLISHING)
    resident = sum(len(actor.pool) for actor in run.world.actors.values())
    assert resident == 8 + 8, "the four experts of two layers, before and after"
    assert run.figure == resident * EXPERT_BYTES


@pytest.mark.parametrize("queued", [False, True])
def test_a_hold_on_the_generation_before_is_given_up_where_somebody_waits_for_its_slots(queued: bool) -> None:
    """The next wave, or the next operation; otherwise it is held, for steps that never come here."""
    run = Run(TWO, ROOMY if queued else TIGHT, final_after_steps=10_000)
    number = run.rebalance(SWAPPED)
    last = run.rebalance(TWO) if queued else number
    run.until(last, Stage.DONE)
    for _ in range(20):
        run.step()
    assert [snapshot.generation for snapshot in run.world.registry.live()] == [2, 3]


# -- The controller dies


@pytest.mark.parametrize("moment", ["decided", "begun", "going on"])
@pytest.mark.parametrize(("name", "stage"), [*IN_EACH_STAGE, *((name, Stage.UNDOING) for name in SCENES)])
def test_a_controller_that_dies_is_resumed_to_the_same_end(name: str, stage: Stage, moment: str) -> None:
    """Before what was decided is begun, right after, or with calls going on whose end nobody hears."""
    run, number = SCENES[name].begin()
    if stage is Stage.UNDOING:
        run.until(number, Stage.FILLING)
        run.cancel(number)
        wanted = ()
    else:
        wanted = run.come_to(number, stage)
    if moment != "decided":
        run.begin(wanted)
    if moment == "going on":
        for _ in range(3):
            run.world.tick()
            run.check()
    run.crash()
    assert run.control.find(number).stage is stage
    run.settle()
    assert outcome(run, number) == undisturbed(name, cancelled=stage is Stage.UNDOING)


def test_after_a_restart_members_stay_members_until_they_are_heard() -> None:
    run = Run(TWO, ROOMY, faults=replace(CALM, late=0.9))
    run.settle()
    version = run.control.members_version
    run.crash()
    run.world.faults = replace(CALM, late=0.9)
    for _ in range(20):
        run.step()
    assert (run.control.members, run.control.members_version) == ((0, 1), version)


def test_after_a_restart_no_source_is_given_up_that_has_only_not_been_heard() -> None:
    """The checkpoint is bad, and rank 1 has the only copies: until it reports them again, nothing is concluded."""
    run = Run(TWO, ROOMY)
    number = run.rebalance({0: (*TWO[0], (2, 0))})
    run.world.held = {number}
    run.until(number, Stage.FILLING)
    operation = run.control.find(number)
    bad = frozenset((0, 0, pool_slot, FromCheckpoint()) for pool_slot in range(ROOMY))
    run.control = run.control.put(replace(operation, bad=bad))
    run.crash()
    run.world.faults, run.world.held = replace(CALM, late=1.0), set()
    run.step()
    assert run.control.find(number).stage is Stage.FILLING
    run.settle()
    assert run.ended(number).stage is Stage.DONE


# -- Somebody changes their mind


@pytest.mark.parametrize(("name", "stage"), [(n, stage) for n, stage in IN_EACH_STAGE if stage in CANCELLABLE])
def test_what_is_cancelled_leaves_the_generation_that_serves_and_gives_everything_back(name: str, stage: Stage) -> None:
    run, number = SCENES[name].begin()
    run.until(number, stage)
    run.cancel(number)
    if stage in (Stage.PREPARING, Stage.QUEUED):
        run.until(1, Stage.DONE)
    before = run.active
    run.settle()
    assert (run.ended(number).stage, run.ended(number).reason) == (Stage.CANCELLED, "cancelled by somebody")
    assert run.active == before, "between two waves it stops there"
    assert (run.active.group.epoch > 1) == (name == "grow in waves" and stage is Stage.DRAINING)


@pytest.mark.parametrize(("name", "stage"), [(n, stage) for n, stage in IN_EACH_STAGE if stage not in CANCELLABLE])
def test_what_was_published_is_brought_to_its_end(name: str, stage: Stage) -> None:
    run, number = SCENES[name].begin()
    run.until(number, stage)
    with pytest.raises(ConfigError, match=f"operation {number} is {stage.value}: only what is draining, filling, join"):
        run.cancel(number)
    run.settle()
    assert outcome(run, number) == undisturbed(name)
    with pytest.raises(ConfigError, match=f"operation {number} is done: only what is"):
        run.cancel(number)
    with pytest.raises(GenerationError, match="operation 99 is not known"):
        run.cancel(99)


def test_a_cancelled_grow_has_ended_when_its_actors_have() -> None:
    run = Run(TWO, ROOMY)
    number = run.scale(3)
    run.until(number, Stage.JOINING)
    run.cancel(number)
    run.world.held = {number}
    for _ in range(5):
        run.step()
    assert run.control.find(number).stage is Stage.UNDOING and 2 in run.world.actors
    run.world.held = set()
    run.settle()
    assert run.ended(number).stage is Stage.CANCELLED


def test_why_something_is_undone_stays_its_reason_also_where_that_takes_several_attempts() -> None:
    run = Run(TWO, ROOMY)
    number = run.scale(3)
    run.until(number, Stage.JOINING)
    run.world.failing[effects.End] = 2
    run.cancel(number)
    run.settle()
    assert run.world.failing[effects.End] == 0
    assert (run.ended(number).stage, run.reasons[number]) == (Stage.CANCELLED, ["cancelled by somebody"])


def test_what_one_operation_gives_up_another_takes_in_the_same_round() -> None:
    run = Run(TWO, ROOMY)
    run.world.held = {2}
    grow, other = run.scale(3), run.rebalance(SWAPPED)
    run.until(grow, Stage.QUEUED)
    run.cancel(other)
    run.step()
    assert run.ended(other).stage is Stage.CANCELLED
    assert run.control.find(grow).stage is Stage.FILLING


def test_an_actor_that_is_made_after_the_grow_was_cancelled_is_ended() -> None:
    run = Run(TWO, ROOMY)
    number = run.scale(3)
    run.world.held = {number}
    run.until(number, Stage.PREPARING)
    run.step()
    run.cancel(number)
    run.step()
    assert run.ended(number).stage is Stage.CANCELLED and 2 not in run.world.actors
    run.world.held = set()
    run.settle()
    assert run.world.ended == {2}


def test_a_rank_that_stops_admitting_after_the_shrink_was_cancelled_takes_requests_again() -> None:
    run = Run(THREE, ROOMY)
    number = run.drain(2)
    run.until(number, Stage.MOVING)  # it is told, and has not heard it yet
    run.cancel(number)
    run.begin(run.decide())
    assert run.ended(number).stage is Stage.CANCELLED
    run.world.tick()
    assert not run.world.actors[2].admitting
    run.settle()
    assert run.world.actors[2].admitting


def test_a_fill_that_was_given_up_and_ends_late_is_in_nobodys_way() -> None:
    """The next operation wants another expert in the slot: what arrived is freed, and then the slot is filled."""
    run = Run(TWO, ROOMY)
    late = run.rebalance({0: (*TWO[0], (2, 0))})
    run.world.held = {late}
    run.until(late, Stage.FILLING)
    run.step()
    assert run.world.actors[0].filling == {(0, 2)}
    run.cancel(late)
    number = run.rebalance({0: (*TWO[0], (3, 0))})
    run.until(number, Stage.FILLING)
    run.step()
    assert "not free" in run.until_reason(number)
    run.world.held = set()
    while (0, 2) not in run.world.actors[0].pool:
        run.world.tick()
    run.absorb()
    run.world.now += 20.0  # it is time for another attempt, and yet it is not made before the slot was seen free
    wanted = run.decide()
    assert Free(0, ((0, 2),)) in wanted and not any(isinstance(effect, Fill) for effect in wanted)
    run.begin(wanted)
    run.settle()
    assert (run.ended(late).stage, run.ended(number).stage) == (Stage.CANCELLED, Stage.DONE)
    assert (3, 0) in run.homes()[0] and (2, 0) not in run.homes()[0]


# -- Copies that are wrong


def test_a_corrupted_copy_is_reported_and_taken_from_another_source() -> None:
    run = Run(THREE, ROOMY)
    run.world.corrupt = {(0, 0, 0), (2, 0, 0)}  # both copies of expert 0
    number = run.rebalance({0: (*THREE[0], (0, 1))})
    reason = run.until_reason(number)
    assert reason in ("rank 0 slot 0 gave something else", "rank 2 slot 0 gave something else")
    assert run.control.find(number).stage is Stage.FILLING and run.active.generation == 1
    run.settle()
    assert len(run.reasons[number]) == 2, "each of them once"
    done = run.ended(number)
    assert (done.stage, done.reason) == (Stage.DONE, "")
    assert done.moved_bytes == {"checkpoint": EXPERT_BYTES}


def test_without_a_source_left_the_operation_fails_and_says_why() -> None:
    run = Run(THREE, ROOMY)
    run.world.corrupt = {(0, 0, 0), (2, 0, 0), ("checkpoint", 0, 0)}
    number = run.rebalance({0: (*THREE[0], (0, 1)), 1: (*THREE[1], (0, 1))})
    run.settle()
    failed = run.ended(number)
    assert failed.stage is Stage.FAILED
    assert "layer 0 expert 0 on rank 1 slot 2: no source is left" in failed.reason
    assert "the checkpoint gave something else" in failed.reason
    assert run.active.generation == 1 and len(run.world.published) == 1


# -- Effects that fail


@pytest.mark.parametrize("kind", [Prepare, Join, HandOver])
def test_what_fails_again_and_again_before_publication_is_undone(kind: type) -> None:
    run = Run(THREE, ROOMY)
    run.world.failing[kind] = 99
    number = run.drain(2) if kind is HandOver else run.scale(4)
    run.settle()
    failed = run.ended(number)
    assert (failed.stage, failed.reason) == (Stage.FAILED, f"{kind.__name__} was refused")
    assert run.active.generation == 1 and run.active.group.epoch == 1


@pytest.mark.parametrize("kind", [Fill, Publish, Start, effects.Stage, effects.Depart, effects.End])
def test_what_fails_for_a_while_is_tried_again_and_reported_meanwhile(kind: type) -> None:
    run = Run(THREE, ROOMY)
    run.world.failing[kind] = 6
    number = run.drain(2) if kind in (effects.Depart, effects.End) else run.scale(4)
    assert run.until_reason(number) == f"{kind.__name__} was refused"
    run.settle()
    assert (run.ended(number).stage, run.ended(number).reason) == (Stage.DONE, "")


@pytest.mark.parametrize("kind", [effects.Announce, effects.Retire, effects.Free, effects.CloseEpoch, effects.Readmit])
def test_upkeep_that_fails_is_done_in_the_end(kind: type) -> None:
    run = Run(THREE, ROOMY)
    run.world.failing[kind] = 6
    cancelled = run.drain(2)
    run.until(cancelled, Stage.MOVING)
    run.world.tick()
    assert not run.world.actors[2].admitting
    run.cancel(cancelled)
    done = run.rebalance(dict.fromkeys((0, 1), (*SWAPPED[0], (0, 2), (2, 2))))
    run.settle()
    assert (run.ended(cancelled).stage, run.ended(done).stage) == (Stage.CANCELLED, Stage.DONE)


def test_members_that_do_not_meet_try_again_in_another_epoch() -> None:
    run = Run(TWO, ROOMY)
    number = run.scale(3)
    run.until(number, Stage.JOINING)
    run.world.failing[Join] = 1
    run.settle()
    assert run.ended(number).stage is Stage.DONE
    assert sorted(run.world.groups) == [1, 3] or sorted(run.world.groups) == [1, 2, 3]
    assert run.active.group.epoch == 3


def test_an_effect_is_tried_again_after_waits_that_double_up_to_ten_seconds() -> None:
    run, number = SCENES["rebalance"].begin()
    run.come_to(number, Stage.PUBLISHING)
    publish = Publish(number, 3, candidate_in(run.control.find(number)))
    waits = []
    for count in range(1, 8):
        run.control = absorb(run.control, publish, "no", (), 100.0)
        operation = run.control.find(number)
        assert (operation.attempts, operation.reason) == ({"publish": count}, "no")
        assert not any(isinstance(effect, Publish) for effect in run.decide_at(operation.not_before - 0.01))
        assert publish in run.decide_at(operation.not_before)
        waits.append(operation.not_before - 100.0)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert operation.stage is Stage.PUBLISHING


def test_what_ends_after_it_was_given_up_changes_nothing() -> None:
    run, number = SCENES["grow"].begin()
    run.until(number, Stage.JOINING)
    candidate = candidate_in(run.control.find(number))
    other = replace(candidate.group, epoch=77)
    for late in (
        Join(0, number, other, candidate.topology),
        Prepare(2, number),
        HandOver(0, number, ()),
        Start(2, number, 2),
        effects.End(2, number),
        Prepare(9, 99),
        effects.Free(0, ()),
    ):
        assert absorb(run.control, late, "too late", (), 100.0) == run.control
    run.until(number, Stage.SWITCHING)
    for late in (Start(2, number, 2), effects.Stage(0, number, 2), Publish(number, 3, candidate)):
        assert absorb(run.control, late, "too late", (), 100.0) == run.control
    now = absorb(run.control, effects.Stage(0, number, 3), "no", (), 100.0).find(number)
    assert (now.stage, now.reason) == (Stage.SWITCHING, "no")


def test_what_there_are_no_machines_for_is_not_tried_again() -> None:
    run = Run(TWO, ROOMY)
    number = run.scale(3)
    run.control = absorb(run.control, Prepare(2, number), "no room", (), 100.0, refused=True)
    assert run.control.find(number).stage is Stage.UNDOING
    run.settle()
    failed = run.ended(number)
    assert (failed.stage, failed.reason, failed.refused) == (Stage.FAILED, "no room", True)


# -- Ranks that die on the way


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.QUEUED, Stage.FILLING, Stage.JOINING])
def test_a_rank_that_dies_before_it_serves_ends_the_grow_alone(stage: Stage, restart: bool) -> None:
    """The controller sees it die, or comes back and finds it gone; one that is gone while it is made is made again."""
    run, number = SCENES["grow"].begin()
    run.until(number, stage)
    while 2 not in run.world.actors:
        run.world.tick()
    run.world.kill(2)
    run.world.dead.add(2)
    if restart:
        run.crash()
    run.settle()
    ended = run.ended(number)
    if restart and stage is Stage.PREPARING:
        assert ended.stage is Stage.DONE
        return
    assert (ended.stage, ended.reason) == (Stage.FAILED, "rank 2 died before it served")
    assert ranks_of(run.active) == (0, 1) and run.active.group.epoch == 1
    assert run.ended(1).stage is Stage.DONE


# -- Several at once


def test_a_rank_that_is_coming_can_be_sent_away_again() -> None:
    run = Run(TWO, ROOMY)
    grow, shrink = run.scale(3), run.scale(2)
    run.settle()
    assert run.control.find(shrink).ranks == (2,)
    assert [run.ended(number).stage for number in (grow, shrink)] == [Stage.DONE, Stage.DONE]
    assert ranks_of(run.active) == (0, 1)


def test_what_waits_for_a_rank_to_come_keeps_nobody_else_waiting() -> None:
    run = Run(TWO, ROOMY)
    grow = run.scale(3)
    run.world.held = {grow}
    shrink, other = run.scale(2), run.rebalance(SWAPPED)
    run.until(other, Stage.DONE)
    assert [run.control.find(number).stage for number in (grow, shrink)] == [Stage.PREPARING, Stage.QUEUED]
    run.world.held = set()
    run.settle()
    assert ranks_of(run.active) == (0, 1)


@pytest.mark.parametrize("comes", [True, False])
def test_no_shrink_leaves_fewer_ranks_than_the_bound_because_another_operation_is_late_or_cancelled(
    comes: bool,
) -> None:
    run = Run(TWO, ROOMY)
    grow, shrink = run.scale(3, (2, 4)), run.drain(0, fewest=2)
    run.step()
    assert run.control.find(shrink).stage is Stage.QUEUED
    if not comes:
        run.cancel(grow)
    run.settle()
    ended = run.ended(shrink)
    if comes:
        assert (ended.stage, ranks_of(run.active)) == (Stage.DONE, (1, 2))
    else:
        assert (ended.stage, ranks_of(run.active)) == (Stage.FAILED, (0, 1))
        assert ended.reason == "at least 2 of the ranks [0, 1] must stay, 1 would"


def test_a_shrink_whose_rank_never_came_fails_by_name() -> None:
    run = Run(TWO, ROOMY)
    grow, shrink = run.scale(3), run.drain(2)
    run.cancel(grow)
    run.settle()
    assert (run.ended(shrink).stage, run.ended(shrink).reason) == (
        Stage.FAILED,
        "rank 2 is none of the group's [0, 1]",
    )


def test_a_target_that_became_impossible_meanwhile_fails_by_name() -> None:
    run = Run(THREE, ROOMY)
    run.drain(2)
    number = run.rebalance({0: (*TWO[0], (0, 2))})
    run.settle()
    assert run.ended(number).stage is Stage.FAILED
    assert run.ended(number).reason == "layer 0 expert 0: rank must be one of [0, 1], found 2"


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Whatever is asked, cancelled, crashed, killed and corrupted, in any order, over calls that fail and are slow."""

    @initialize(
        seed=st.integers(0, 10_000),
        late=st.sampled_from([0.0, 0.3, 0.6]),
        refused=st.sampled_from([0.0, 0.1]),
        unheard=st.sampled_from([0.0, 0.1]),
        longest=st.sampled_from([1, 5]),
        join_ticks=st.sampled_from([3, 60]),
        capacity=st.integers(3, 5),
    )
    def start(
        self, seed: int, late: float, refused: float, unheard: float, longest: int, join_ticks: int, capacity: int
    ) -> None:
        faults = Faults(refused, unheard, late, longest, join_ticks)
        self.run = Run(THREE, capacity, seed=seed, faults=faults)

    @rule(count=st.integers(1, 12))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.run.step()

    @rule(data=st.data())
    def ask_for_a_plan(self, data: st.DataObject) -> None:
        serving = self.run.serving
        ranks = st.sets(st.sampled_from(serving), min_size=1, max_size=min(2, len(serving)))
        pairs = {layer: [(e, rank) for e in range(4) for rank in sorted(data.draw(ranks))] for layer in (0, 1)}
        self.run.rebalance(pairs)

    @rule(layer=st.integers(0, 2), expert=st.integers(0, 4), count=st.integers(0, 3))
    def ask_for_copies(self, layer: int, expert: int, count: int) -> None:
        self.run.rebalance(ByCounts({(layer, expert): count}))

    @rule(wanted=st.integers(1, 5))
    def ask_for_ranks(self, wanted: int) -> None:
        if wanted != len(self.run.expected):
            self.run.scale(wanted, (1, 5))

    @precondition(lambda self: len(self.run.expected) > 1)
    @rule(data=st.data())
    def ask_a_rank_to_leave(self, data: st.DataObject) -> None:
        self.run.drain(data.draw(st.sampled_from(self.run.expected)))

    @precondition(lambda self: any(one.stage in CANCELLABLE for one in self.run.control.operations))
    @rule(data=st.data())
    def cancel_one(self, data: st.DataObject) -> None:
        allowed = [one.number for one in self.run.control.operations if one.stage in CANCELLABLE]
        self.run.cancel(data.draw(st.sampled_from(allowed)))

    @rule(between=st.booleans())
    def crash(self, between: bool) -> None:
        if between:  # what was decided is saved, and never begun
            self.run.decide_next()
        self.run.crash()

    @precondition(lambda self: self.run.coming)
    @rule(data=st.data())
    def kill_a_rank_that_comes(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.run.coming))
        self.run.world.kill(rank)
        self.run.world.dead.add(rank)

    @rule(rank=st.integers(0, 4), layer=st.integers(0, 1), number=st.integers(0, 3), checkpoint=st.booleans())
    def corrupt(self, rank: int, layer: int, number: int, checkpoint: bool) -> None:
        self.run.world.corrupt.add(("checkpoint" if checkpoint else rank, layer, number))

    @rule()
    def repair(self) -> None:
        self.run.world.corrupt.clear()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.settle()


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
