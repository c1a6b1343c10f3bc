"""The autopilot: one change at a time, with its reason; it copes with refusals, and never flaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_moe.bench import autoscale as bench
from ray_moe.controlplane.autopilot import (
    AutopilotPolicy,
    AutopilotState,
    Grow,
    Hold,
    RankLoad,
    Rebalance,
    Shrink,
    Signals,
    Wanted,
)
from ray_moe.controlplane.autoscale import RankPolicy, ReplicaPolicy
from ray_moe.controlplane.decisions import Kind, Reason
from ray_moe.controlplane.demand import ACCEPTED_ROWS, Demand, Provenance
from ray_moe.controlplane.elastic import levelled
from ray_moe.controlplane.prospects import copies_held, imbalance_of, prospect_of
from ray_moe.controlplane.publication import Storage
from ray_moe.controlplane.rebalance import RebalancePolicy
from ray_moe.errors import ConfigError
from ray_moe.placement import PlacementSnapshot
from tests.layers import placement, spec_of, untimed

EXPERTS = 8
STORAGE = Storage(capacity=8, spare=1, expert_bytes=1000)
RANKS = RankPolicy(
    min_ranks=2,
    max_ranks=6,
    tokens_per_second_per_rank=100.0,
    waiting_per_rank=4.0,
    latency_seconds=0.1,
    grow_after_seconds=3.0,
    shrink_after_seconds=20.0,
    cool_down_seconds=5.0,
    grow_step=2,
)
POLICY = AutopilotPolicy(
    ranks=RANKS,
    replicas=ReplicaPolicy(slots_per_layer=1, num_ranks=2, cool_down_seconds=2.0),
    rebalance=RebalancePolicy(lasting_seconds=3.0, cool_down_seconds=5.0, pause_seconds=0.001),
    unloaded_latency_seconds=0.02,
    settle_seconds=2.0,
    retry_seconds=10.0,
    retry_most_seconds=40.0,
)


def placed(counts: Sequence[int], ranks: Sequence[int], generation: int = 1) -> PlacementSnapshot:
    """Copies of each expert on so many ranks, one after the other."""
    homes = [(expert, ranks[(expert + copy) % len(ranks)]) for expert, n in enumerate(counts) for copy in range(n)]
    return placement(homes, spec_of(ranks), generation=generation)


def seen(
    ranks: Sequence[int] = (0, 1),
    *,
    tokens: float = 170.0,
    outstanding: Sequence[int] | None = None,
    loads: Sequence[float] | None = None,
    counts: Sequence[int] = (1,) * EXPERTS,
    at: int = 1,
    **changes: Any,
) -> Signals:
    demand = None
    if loads is not None:
        origin = Provenance(unit=ACCEPTED_ROWS, start=at, end=at + 1)
        demand = Demand(np.array([loads], np.float64), origin)
    work = outstanding or [0] * len(ranks)
    signals = Signals(
        ranks=tuple(RankLoad(rank, 0, 0, tokens) for rank, tokens in zip(ranks, work, strict=True)),
        tokens_per_second=tokens,
        latency_seconds=0.02,
        placement=placed(counts, ranks),
        storage=STORAGE,
        demand=demand,
    )
    return replace(signals, **changes)


def asked(
    looks: Sequence[Signals],
    policy: AutopilotPolicy = POLICY,
    state: AutopilotState | None = None,
    start: float = 100.0,
) -> tuple[AutopilotState, list[Wanted]]:
    """Once a second, nothing fed back."""
    state, changes = state or AutopilotState(), []
    for second, look in enumerate(looks):
        state, change = policy.decide(state, look, start + second)
        changes.append(change)
    return state, changes


def reason(change: Wanted) -> Reason:
    return change.why.reason


# -- Ranks


def test_pressure_that_lasts_grows_by_what_is_needed() -> None:
    _, changes = asked([seen(tokens=390.0)] * 4)
    assert [reason(change) for change in changes[:3]] == [Reason.NOT_LASTED] * 3
    grow = changes[3]
    assert isinstance(grow, Grow)
    assert (grow.ranks, grow.why.reason) == (2, Reason.DEMAND_HIGH)


def test_a_lull_lets_the_rank_go_that_has_least_to_do_and_of_equals_the_newest() -> None:
    for outstanding, leaving in (((9, 3, 5, 3), 7), ((0, 0, 0, 0), 9), ((1, 2, 2, 2), 0)):
        _, changes = asked([seen((0, 4, 9, 7), tokens=100.0, outstanding=outstanding)] * 21)
        shrink = changes[-1]
        assert isinstance(shrink, Shrink)
        assert (shrink.rank, shrink.why.reason) == (leaving, Reason.LOAD_LOW)
        assert all(isinstance(change, Hold) for change in changes[:-1])


def test_fewer_ranks_than_hold_the_experts_are_not_wanted() -> None:
    tight = replace(POLICY, replicas=replace(POLICY.replicas, min_replicas=2), ranks=replace(RANKS, min_ranks=2))
    look = seen((0, 1, 2), tokens=10.0, storage=Storage(capacity=6, spare=1, expert_bytes=1))
    _, changes = asked([look] * 60, tight)  # 16 copies, 12 slots on two ranks
    assert {type(change) for change in changes} == {Hold}
    assert reason(changes[-1]) is Reason.AT_BOUND


def test_latency_counts_above_what_an_idle_rank_takes() -> None:
    at_floor = seen((0, 1, 2), tokens=30.0, latency_seconds=0.02)
    _, changes = asked([at_floor] * 21)
    assert isinstance(changes[-1], Shrink)  # it would not get better with more ranks, nor is it too long
    above = seen((0, 1), tokens=30.0, latency_seconds=0.02 + 1.5 * 0.08)
    _, changes = asked([above] * 4)
    assert isinstance(changes[-1], Grow)
    assert (changes[-1].ranks, reason(changes[-1])) == (1, Reason.LATENCY_HIGH)


def test_while_something_is_under_way_and_just_after_nothing_is_wanted() -> None:
    busy = seen(tokens=400.0, under_way=("grow 3",))
    _, changes = asked([busy] * 10 + [seen(tokens=400.0)] * 3)
    assert [reason(change) for change in changes[3:10]] == [Reason.BUSY] * 7
    assert reason(changes[10]) is Reason.COOLING_DOWN
    assert changes[10].why.evidence["seconds_since_change_limit"] == 2.0
    assert isinstance(changes[11], Grow)  # two seconds after it was last under way


# -- Not available


def test_without_resources_it_keeps_what_it_has_and_says_so() -> None:
    _, changes = asked([seen(tokens=400.0, available=0)] * 30)
    assert {type(change) for change in changes} == {Hold}
    why = changes[-1].why
    assert why.reason is Reason.NOT_AVAILABLE
    assert (why.evidence["ranks"], why.evidence["target_ranks"], why.evidence["available"]) == (2.0, 4.0, 0.0)


def test_it_takes_what_there_is() -> None:
    _, changes = asked([seen(tokens=400.0, available=1)] * 4)
    grow = changes[-1]
    assert isinstance(grow, Grow)
    assert grow.ranks == 1


def test_a_refused_grow_is_tried_again_later_and_later_and_at_once_forgotten_when_ranks_came() -> None:
    state, grown, waits = AutopilotState(), [], set()
    refused_at: float | None = None
    for second in range(190):
        now = 100.0 + second
        # Told every second, and from another clock never to the microsecond the same.
        told = None if refused_at is None else refused_at + 1e-6 * (second % 7)
        state, change = POLICY.decide(state, seen(tokens=400.0, refused_at=told), now)
        if isinstance(change, Grow):
            grown.append(second)
            refused_at = now + 0.5  # the cluster could not say before
        elif reason(change) is Reason.NOT_AVAILABLE:
            waits.add(change.why.evidence["refusals"])
            assert change.why.evidence["retry_in_seconds"] > 0
    assert grown[0] == 3
    assert [later - earlier for earlier, later in pairwise(grown)][:4] == [11, 21, 41, 41]
    assert {1.0, 2.0, 3.0} <= waits
    # Ranks came after all.
    more = seen((0, 1, 2), tokens=600.0, refused_at=refused_at)
    _, changes = asked([more] * 10, state=state, start=300.0)
    assert any(isinstance(change, Grow) for change in changes)


# -- Copies and moves

HOT = [60.0, 1, 1, 1, 1, 1, 1, 1]
EVEN = [10.0] * EXPERTS


def test_a_hot_expert_gets_copies_where_that_evens_the_ranks_out() -> None:
    state, changes = asked([seen(loads=HOT, at=at) for at in range(4)])
    assert [reason(change) for change in changes[:3]] == [Reason.NOT_LASTED] * 3
    change = changes[3]
    assert isinstance(change, Rebalance)
    assert change.counts[0, 0] == 2 and change.why.reason is Reason.IMBALANCE_LASTED
    assert sorted(rank for expert, rank in change.homes[0] if expert == 0) == [0, 1]
    assert change.why.evidence["imbalance_after"] < 1.1 < 1.7 < change.why.evidence["imbalance"]
    assert change.moves == change.why.evidence["bytes"] / STORAGE.expert_bytes >= 1
    assert [decision.kind for decision in state.decisions] == [Kind.HOLD, Kind.REPLICATE, Kind.MOVE]


def test_an_imbalance_without_a_hot_expert_is_moved_away_with_the_copies_there_are() -> None:
    homes = [(expert, 0 if expert < 6 else 1) for expert in range(EXPERTS)]
    look = seen(loads=EVEN, placement=placement(homes, spec_of((0, 1))))
    _, changes = asked([look] * 4)
    change = changes[-1]
    assert isinstance(change, Rebalance)
    assert set(change.counts.values()) == {1} and change.moves == 2


def test_extras_of_cold_experts_go_when_they_have_been_cold_for_long_enough() -> None:
    look = seen((0, 1, 2), loads=[0.0, *[10.0] * 6, 0.0], counts=(3, *(1,) * 7), tokens=250.0)
    _, changes = asked([look] * 4)
    assert [type(change) for change in changes] == [Hold, Hold, Hold, Rebalance]
    change = changes[-1]
    assert isinstance(change, Rebalance)
    assert set(change.counts.values()) == {1} and change.why.reason is Reason.COLD_EXPERTS
    # Under pressure copies stay.
    _, changes = asked([replace(look, tokens_per_second=340.0, available=0)] * 30)
    assert {type(each) for each in changes} == {Hold}


def test_fewer_copies_than_must_be_are_completed_though_all_is_even() -> None:
    policy = replace(POLICY, replicas=replace(POLICY.replicas, min_replicas=2))
    _, changes = asked([seen(loads=EVEN, storage=replace(STORAGE, capacity=9))], policy)
    change = changes[0]
    assert isinstance(change, Rebalance)
    assert set(change.counts.values()) == {2}
    assert all(len({rank for at, rank in change.homes[0] if at == expert}) == 2 for expert in range(EXPERTS))


def test_without_resources_for_ranks_experts_are_moved_all_the_same() -> None:
    state, changes = asked([seen(loads=HOT, tokens=400.0, available=0)] * 4)
    assert isinstance(changes[-1], Rebalance)
    assert state.decisions[0].reason is Reason.NOT_AVAILABLE


def test_an_answer_is_worked_out_once_for_one_question() -> None:
    look = seen(loads=HOT)
    assert look.demand is not None
    counts = np.array([[2, *[1] * 7]])
    first = prospect_of(look.placement, STORAGE, look.demand, counts)
    assert prospect_of(look.placement, STORAGE, look.demand, counts, (first,)) is first
    assert prospect_of(look.placement, STORAGE, look.demand, counts + 1, (first,)) is not first


def test_demand_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"demand must be \[1, 8\] like the placement, found \[1, 2\]"):
        POLICY.decide(AutopilotState(), seen(loads=(1.0, 2.0)), 0.0)
    with pytest.raises(ConfigError, match="at least one that serves"):
        POLICY.decide(AutopilotState(), replace(seen(), ranks=()), 0.0)


@given(
    st.lists(st.integers(0, 100), min_size=6, max_size=6),
    st.lists(st.integers(1, 3), min_size=6, max_size=6),
    st.integers(3, 5),
)
@untimed
def test_imbalance_is_that_of_a_loop_over_all_copies(loads: list[int], counts: list[int], ranks: int) -> None:
    snapshot = placed(counts, range(ranks))
    by_rank = dict.fromkeys(range(ranks), 0.0)
    for slot in snapshot.layers[0].slots:
        expert = slot.logical_expert_id.value
        by_rank[slot.destination_rank.value] += loads[expert] / counts[expert]
    total = sum(by_rank.values())
    expected = max(by_rank.values()) * ranks / total if total else 1.0
    assert imbalance_of(np.array([loads], np.float64), copies_held(snapshot)) == pytest.approx(
        max(1.0, expected), abs=1e-9
    )


# -- No flapping


class Cluster:
    """Does what is wanted, after as long as that takes, and answers for what comes of it."""

    def __init__(self, policy: AutopilotPolicy, ranks: int = 2) -> None:
        self.policy, self.ranks, self.next_rank = policy, tuple(range(ranks)), ranks
        self.placement = placed((1,) * EXPERTS, self.ranks)
        self.backlog = 0.0
        self.state = AutopilotState()
        self.pending: tuple[int, Wanted] | None = None
        self.done: list[tuple[int, Wanted]] = []

    def second(self, now: int, tokens: float, loads: Sequence[float]) -> None:
        if self.pending is not None and now >= self.pending[0]:
            self._finish(self.pending[1], np.array([loads]))
            self.pending = None
        self.backlog = max(0.0, self.backlog + tokens - 100.0 * len(self.ranks))
        look = seen(
            self.ranks,
            tokens=tokens,
            loads=loads,
            at=now,
            placement=self.placement,
            latency_seconds=0.02 + 0.08 * min(2.0, tokens / (120.0 * len(self.ranks))),
            under_way=("one",) if self.pending else (),
        )
        waiting = int(self.backlog / 50 / len(self.ranks))
        look = replace(look, ranks=tuple(replace(each, waiting=waiting) for each in look.ranks))
        self.state, change = self.policy.decide(self.state, look, float(now))
        if not isinstance(change, Hold):
            assert self.pending is None  # one at a time
            self.done.append((now, change))
            self.pending = (now + (4 if isinstance(change, Grow) else 1), change)

    def _finish(self, change: Wanted, loads_LE: np.ndarray) -> None:
        if isinstance(change, Rebalance):
            self._place(change.homes[0])
            return
        if isinstance(change, Grow):
            self.ranks += tuple(range(self.next_rank, self.next_rank + change.ranks))
            self.next_rank += change.ranks
        elif isinstance(change, Shrink):
            self.ranks = tuple(rank for rank in self.ranks if rank != change.rank)
        assert RANKS.min_ranks <= len(self.ranks) <= RANKS.max_ranks
        wanted = levelled(self.placement, self.ranks, STORAGE.room, loads_LE=loads_LE)
        self._place([(home.expert, home.rank) for home in wanted.layers[0]])

    def _place(self, homes: Sequence[tuple[int, int]]) -> None:
        self.placement = placement(homes, spec_of(self.ranks), generation=self.placement.generation + 1)


bursts = st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 900.0), st.integers(0, EXPERTS - 1)), max_size=6)


@given(bursts)
@settings(max_examples=25, deadline=None)
def test_on_any_bursts_changes_keep_their_distance_and_turn_round_no_faster_than_the_policies_allow(
    trace: list[tuple[int, float, int]],
) -> None:
    cluster, now = Cluster(POLICY), 0
    for seconds, tokens, hot in trace:
        loads = [40.0 if expert == hot else 5.0 for expert in range(EXPERTS)]
        for _ in range(seconds):
            cluster.second(now, tokens, loads)
            now += 1
    sizes = [(at, type(change)) for at, change in cluster.done if isinstance(change, Grow | Shrink)]
    for (earlier, was), (later, kind) in pairwise(sizes):
        assert later - earlier >= RANKS.cool_down_seconds
        if (was, kind) == (Grow, Shrink):
            assert later - earlier >= RANKS.shrink_after_seconds
    turns = sum(was is not kind for (_, was), (_, kind) in pairwise(sizes))
    assert turns <= 2 * (now / (RANKS.shrink_after_seconds + RANKS.grow_after_seconds)) + 1
    moves = [at for at, change in cluster.done if isinstance(change, Rebalance)]
    assert all(later - earlier >= POLICY.rebalance.cool_down_seconds for earlier, later in pairwise(moves))


@given(st.floats(0.0, 900.0), st.integers(0, EXPERTS - 1), st.integers(2, 6), st.floats(1.0, 60.0))
@settings(max_examples=10, deadline=None)
def test_on_constant_demand_it_comes_to_rest(tokens: float, hot: int, ranks: int, heat: float) -> None:
    cluster = Cluster(POLICY, ranks)
    loads = [heat if expert == hot else 5.0 for expert in range(EXPERTS)]
    for now in range(220):
        cluster.second(now, tokens, loads)
    assert not [change for at, change in cluster.done if at > 160]
    kinds = {type(change) for _, change in cluster.done} & {Grow, Shrink}
    assert len(kinds) <= 1


@given(bursts, bursts)
@settings(max_examples=10, deadline=None)
def test_it_sees_only_the_past(past: list[tuple[int, float, int]], future: list[tuple[int, float, int]]) -> None:
    def driven(trace: list[tuple[int, float, int]], until: int) -> list[tuple[int, str]]:
        cluster, now = Cluster(POLICY), 0
        for seconds, tokens, hot in trace:
            for _ in range(seconds):
                cluster.second(now, tokens, [40.0 if expert == hot else 5.0 for expert in range(EXPERTS)])
                now += 1
        return [(at, str(change.why)) for at, change in cluster.done if at < until]

    end = sum(seconds for seconds, *_ in past)
    assert driven(past, end) == driven(past + future, end)


# -- The simulated figure

SHORT = bench.Bursts(seed=3, seconds=240.0, calm_s=(40.0, 60.0), burst_s=(50.0, 70.0))


def test_a_trace_is_its_seeds_alone_and_has_the_demand_that_its_recipe_says() -> None:
    trace = bench.Trace.drawn(SHORT)
    assert trace == bench.Trace.drawn(SHORT) != bench.Trace.drawn(replace(SHORT, seed=4))
    expected = SHORT.calm * (SHORT.seconds + sum((end - start) * (factor - 1) for start, end, factor in trace.bursts))
    assert sum(tokens for _, tokens in trace.requests) == pytest.approx(expected, rel=0.05)  # of 5,000 requests
    assert np.mean([tokens for _, tokens in trace.requests]) == pytest.approx(SHORT.mean_tokens, rel=0.05)


def test_a_rank_alone_takes_a_step_for_each_token_and_a_full_one_its_capacity() -> None:
    model = bench.Model()
    recipe = replace(SHORT, seconds=1.0)
    one = bench.fixed(bench.Trace(recipe, (), ((0.0, 100),)), model, 1)
    assert one.latencies == pytest.approx([model.step(1)])
    many = bench.fixed(bench.Trace(recipe, (), ((0.0, 1000),) * 64), model, 1)
    busy = 64 * 1000 / model.capacity
    assert max(many.latencies) * 1000 == pytest.approx(busy, rel=1e-3)
    assert many.rank_seconds == pytest.approx(busy, abs=2 * model.tick_s)


def test_every_request_is_served_once_however_ranks_come_and_go_and_a_joining_rank_costs() -> None:
    trace, model = bench.Trace.drawn(SHORT), bench.Model()
    policy = bench.policy_for(model)
    course = bench.piloted(trace, model, policy)
    assert {what for _, what, _ in course.actions} == {"grow", "shrink"}
    assert len(course.latencies) == len(trace.requests)
    assert all(policy.ranks.min_ranks <= ranks <= policy.ranks.max_ranks for _, ranks in course.sizes)
    edges = [*(at for at, _ in course.sizes), course.rank_seconds]
    shrinks = sum(what == "shrink" for _, what, _ in course.actions)
    end = (
        course.rank_seconds
        - shrinks * model.leave_s
        - sum(ranks * (later - earlier) for (earlier, ranks), later in zip(course.sizes[:-1], edges[1:], strict=False))
    ) / course.sizes[-1][1] + course.sizes[-1][0]
    assert SHORT.seconds <= end <= SHORT.seconds + 60.0  # rank-seconds are those of the sizes over time
    assert bench.flaps(course, trace) == 0


def test_a_turn_counts_as_a_flap_only_where_demand_had_not_turned() -> None:
    trace = bench.Trace(SHORT, (), tuple((at / 10, 10 if at < 600 else 100) for at in range(1200)))
    for times, expected in (((10.0, 40.0), 1), ((10.0, 90.0), 0), ((55.0, 75.0), 0)):
        course = bench.Course(actions=[(times[0], "grow", 1), (times[1], "shrink", -1)])
        assert bench.flaps(course, trace) == expected


# -- Bounds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": replace(RANKS, shrink_step=2)}, r"shrink_step must be in \[1, 1\], found 2"),
        (
            {"replicas": replace(POLICY.replicas, num_ranks=3, min_replicas=3)},
            r"min_replicas must be in \[1, 2\], found 3",
        ),
        ({"expert_share": 1.5}, "expert_share"),
        ({"settle_seconds": -1.0}, "settle_seconds"),
        ({"retry_seconds": 60.0}, r"retry_most_seconds must be in \[60, inf\], found 40"),
        (
            {"unloaded_latency_seconds": 0.1},
            r"unloaded_latency_seconds must be in \[0, latency_seconds 0.1\), found 0.1",
        ),
    ],
)
def test_values_outside_their_bounds_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(POLICY, **change)
