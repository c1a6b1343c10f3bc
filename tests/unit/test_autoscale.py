"""When to move, how many ranks, how many copies: deciders that neither flap nor chase bursts, and say why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.controlplane import autoscale, rebalance
from ray_moe.controlplane.autoscale import Load, RankPolicy, RankState, ReplicaPolicy, ReplicaState, Trend
from ray_moe.controlplane.decisions import HOUR, Decision, Kind, Reason
from ray_moe.controlplane.rebalance import Balance, Phase, RebalancePolicy, RebalanceState, demand_change
from ray_moe.errors import ConfigError
from tests.layers import untimed

# -- When to move

WINDOW = 10.0
CAREFUL = RebalancePolicy(start_above=1.2, stop_below=1.1, lasting_seconds=30.0, cool_down_seconds=60.0)


def balance(
    imbalance: float, after: float = 1.02, change: float = 0.0, moved: int = 10**9, busy: bool = False
) -> Balance:
    return Balance(imbalance, min(after, imbalance), 0.5, change, moved, busy)


def watched(policy: RebalancePolicy, windows: Sequence[Balance]) -> list[Decision]:
    """One decision per window, nothing fed back."""
    state, decisions = RebalanceState(), []
    for number, seen in enumerate(windows):
        state, decision = policy.decide(state, seen, number * WINDOW)
        decisions.append(decision)
    return decisions


def moved_at(decisions: Sequence[Decision]) -> list[int]:
    return [number for number, decision in enumerate(decisions) if decision.kind is Kind.MOVE]


def test_a_shift_that_lasts_is_acted_upon_once() -> None:
    state, moves, placed = RebalanceState(), [], False
    for number in range(200):
        shifted = number >= 50
        imbalance = 1.6 if shifted and not placed else 1.03
        seen = balance(imbalance, change=0.6 if number == 50 else 0.01)
        state, decision = CAREFUL.decide(state, seen, number * WINDOW)
        if decision.kind is Kind.MOVE:
            moves.append(number)
            placed = True
            assert decision.reason is Reason.IMBALANCE_LASTED
            assert decision.evidence["gain"] == pytest.approx(0.5 * (1 - 1.02 / 1.6))
    assert moves == [53]  # high from window 50 on, and 30 seconds of it seen


@given(st.lists(st.floats(1.11, 1.3), min_size=1, max_size=100))
@untimed
def test_noise_around_the_upper_threshold_moves_nothing_until_it_stays_above(noise: list[float]) -> None:
    decisions = watched(CAREFUL, [balance(value) for value in noise])
    lasting = [at for at in range(3, len(noise)) if min(noise[at - 3 : at + 1]) > 1.2]  # 30 seconds above it
    assert moved_at(decisions)[:1] == lasting[:1]


@given(st.integers(1, 3), st.floats(1.3, 5.0), st.integers(0, 6))
@untimed
def test_a_burst_is_ignored(length: int, height: float, offset: int) -> None:
    burst = [1.0] * (3 + offset) + [height] * length + [1.0] * 10
    decisions = watched(CAREFUL, [balance(value) for value in burst])
    assert moved_at(decisions) == []
    assert {decision.reason for decision in decisions} == {Reason.IN_BOUNDS, Reason.NOT_LASTED}


def test_demand_that_has_just_jumped_is_not_acted_on_even_while_experts_are_being_moved() -> None:
    windows = [balance(1.5)] * 4 + [balance(3.0, change=0.7)] + [balance(3.0)] * 3 + [balance(1.5, change=0.7)]
    policy = dataclasses.replace(CAREFUL, cool_down_seconds=0.0)
    decisions = watched(policy, windows)
    assert moved_at(decisions) == [3, 7]
    assert [decision.reason for decision in decisions[4:7]] == [Reason.DEMAND_JUMPED] * 3
    assert decisions[8].reason is Reason.DEMAND_JUMPED
    assert decisions[4].evidence == {"seconds_since_jump": 0.0, "seconds_since_jump_limit": 30.0}


def test_between_the_thresholds_it_goes_on_and_does_not_start() -> None:
    policy = dataclasses.replace(CAREFUL, lasting_seconds=0.0, cool_down_seconds=0.0)
    assert moved_at(watched(policy, [balance(1.15)] * 5)) == []
    assert moved_at(watched(policy, [balance(1.3), balance(1.15), balance(1.05), balance(1.15)])) == [0, 1]


@given(st.lists(st.tuples(st.floats(1.0, 4.0), st.floats(0.0, 1.0), st.integers(0, 10**11)), max_size=150))
@untimed
def test_moves_and_bytes_of_any_hour_are_bounded_and_moves_keep_their_distance(
    windows: list[tuple[float, float, int]],
) -> None:
    policy = RebalancePolicy(
        lasting_seconds=0.0, jump=1.0, cool_down_seconds=40.0, moves_per_hour=5, bytes_per_hour=2e11
    )
    seen = [balance(imbalance, 1.0, change, moved) for imbalance, change, moved in windows]
    state, times, amounts = RebalanceState(), [], []
    for number, one in enumerate(seen):
        now = number * WINDOW
        state, decision = policy.decide(state, one, now)
        if decision.kind is Kind.MOVE:
            times.append(now)
            amounts.append(one.moved_bytes)
    for start in times:
        inside = [number for number, time in enumerate(times) if start <= time < start + HOUR]
        assert len(inside) <= 5
        assert sum(amounts[number] for number in inside) <= 2e11
    assert all(later - earlier >= 40.0 for earlier, later in pairwise(times))


@given(
    st.lists(st.floats(1.0, 3.0), min_size=1, max_size=40),
    st.lists(st.floats(1.0, 3.0), max_size=20),
    st.lists(st.floats(1.0, 3.0), max_size=20),
)
@untimed
def test_decisions_on_balance_see_only_the_past(past: list[float], one: list[float], other: list[float]) -> None:
    first = watched(CAREFUL, [balance(value) for value in past + one])
    second = watched(CAREFUL, [balance(value) for value in past + other])
    assert first[: len(past)] == second[: len(past)]


LASTING = [balance(1.5)] * 3


@pytest.mark.parametrize(
    ("last", "policy", "reason", "named"),
    [
        (balance(1.5, busy=True), CAREFUL, Reason.BUSY, "moves_under_way"),
        (balance(1.5, moved=0), CAREFUL, Reason.NOTHING_TO_MOVE, "bytes"),
        (balance(1.5, after=1.49), CAREFUL, Reason.GAIN_TOO_SMALL, "gain"),
        (balance(1.5, after=1.5), dataclasses.replace(CAREFUL, min_gain=0.0), Reason.GAIN_TOO_SMALL, "gain"),
        (balance(1.5, moved=10**14), CAREFUL, Reason.COST_TOO_HIGH, "gain_seconds"),
        (balance(1.5), dataclasses.replace(CAREFUL, bytes_per_hour=1.0), Reason.BYTES_LIMIT, "bytes_in_the_hour"),
        (balance(1.05), CAREFUL, Reason.IN_BOUNDS, "imbalance"),
    ],
)
def test_a_hold_names_the_check_and_the_numbers_it_compared(
    last: Balance, policy: RebalancePolicy, reason: Reason, named: str
) -> None:
    decision = watched(policy, [*LASTING, last])[-1]
    assert (decision.kind, decision.reason) == (Kind.HOLD, reason)
    assert set(decision.evidence) == {named, f"{named}_limit"}
    assert str(decision).startswith(f"hold: {reason} ({named} ")


def test_a_second_move_waits_for_the_cool_down_and_for_the_hourly_limit() -> None:
    policy = dataclasses.replace(CAREFUL, moves_per_hour=2)
    decisions = watched(policy, [balance(1.5)] * 500)
    assert moved_at(decisions)[:3] == [3, 9, 363]
    assert decisions[4].reason is Reason.COOLING_DOWN
    assert decisions[20].reason is Reason.ACTION_LIMIT
    assert decisions[20].evidence == {"moves_in_the_hour": 2.0, "moves_in_the_hour_limit": 2.0}


def test_the_change_of_demand_is_the_part_of_routes_that_go_elsewhere() -> None:
    before = np.array([[8.0, 2.0, 0.0], [1.0, 1.0, 1.0]])
    assert demand_change(before, 5 * before) == 0.0
    assert demand_change(before, np.array([[5.0, 2.0, 3.0], [1.0, 1.0, 1.0]])) == pytest.approx(0.3)
    assert demand_change(before, np.array([[0.0, 0.0, 10.0], [0.0, 0.0, 0.0]])) == 1.0
    assert demand_change(np.zeros((1, 2)), np.ones((1, 2))) == 0.0


# -- How many ranks

SCALING = RankPolicy(
    min_ranks=2,
    max_ranks=16,
    tokens_per_second_per_rank=1000.0,
    waiting_per_rank=4.0,
    latency_seconds=0.1,
    cool_down_seconds=60.0,
)


def load(ranks: int, tokens: float, waiting: float = 0.0, latency: float = 0.01, **more: object) -> Load:
    return Load(ranks, tokens, waiting, latency, **more)  # type: ignore[arg-type]


def driven(policy: RankPolicy, tokens: Sequence[float], ranks: int = 4) -> tuple[list[Decision], list[int]]:
    """The cluster does what is decided, at once."""
    state, decisions, sizes = RankState(), [], []
    for number, arriving in enumerate(tokens):
        state, decision = policy.decide(state, load(ranks, arriving), number * WINDOW)
        if decision.kind is not Kind.HOLD:
            ranks = int(decision.evidence["target_ranks"])
        decisions.append(decision)
        sizes.append(ranks)
    return decisions, sizes


def changes(decisions: Sequence[Decision]) -> list[int]:
    return [number for number, decision in enumerate(decisions) if decision.kind is not Kind.HOLD]


def test_a_shift_of_demand_grows_once_and_a_lull_shrinks_step_by_step() -> None:
    decisions, sizes = driven(SCALING, [3500.0] * 20 + [7000.0] * 100 + [1500.0] * 300)
    grown = [number for number in changes(decisions) if decisions[number].kind is Kind.GROW]
    assert [sizes[number] for number in grown] == [7]
    assert grown == [22]  # 15 seconds seen high, in windows of 10
    assert decisions[22].reason is Reason.DEMAND_HIGH
    assert decisions[22].evidence["demand_ratio"] == pytest.approx(7 / 4)
    shrunk = [number for number in changes(decisions) if number > 22]
    assert [sizes[number] for number in shrunk] == [6, 5, 4, 3]  # 1500 on 2 ranks would be above 0.7
    assert {decisions[number].reason for number in shrunk} == {Reason.LOAD_LOW}
    assert min(np.diff([120, *shrunk])) >= 30  # 300 seconds low before each step


@given(st.lists(st.floats(-0.14, 0.14), min_size=20, max_size=150), st.integers(3, 12))
@untimed
def test_noise_in_demand_does_not_flap(noise: list[float], ranks: int) -> None:
    tokens = [ranks * 850.0 * (1 + value) for value in noise]
    decisions, sizes = driven(SCALING, tokens, ranks)
    assert changes(decisions) == [] and set(sizes) == {ranks}


@given(st.lists(st.floats(0.0, 40_000.0), min_size=1, max_size=400))
@untimed
def test_ranks_stay_in_bounds_by_bounded_steps_with_bounded_actions_per_hour(tokens: list[float]) -> None:
    policy = dataclasses.replace(SCALING, grow_after_seconds=0.0, shrink_after_seconds=0.0, actions_per_hour=6)
    decisions, sizes = driven(policy, tokens)
    acted = changes(decisions)
    assert all(2 <= size <= 16 for size in sizes)
    assert all(-1 <= later - earlier <= 4 for earlier, later in zip([4, *sizes], sizes, strict=False))
    for number in acted:
        assert sum(number <= other < number + HOUR / WINDOW for other in acted) <= 6
    assert all(later - earlier >= 6 for earlier, later in pairwise(acted))


@given(st.lists(st.floats(0.0, 20_000.0), min_size=1, max_size=60), st.lists(st.floats(0.0, 20_000.0), max_size=20))
@untimed
def test_decisions_on_ranks_see_only_the_past(past: list[float], future: list[float]) -> None:
    assert driven(SCALING, past)[0] == driven(SCALING, past + future)[0][: len(past)]


@given(st.integers(1, 30), st.integers(2, 16), st.floats(0.0, 30_000.0))
@untimed
def test_constant_demand_comes_to_rest_without_turning_round(length: int, ranks: int, tokens: float) -> None:
    policy = dataclasses.replace(SCALING, grow_after_seconds=0.0, shrink_after_seconds=0.0, actions_per_hour=100)
    decisions, sizes = driven(policy, [tokens] * 20 * length, ranks)
    kinds = {decisions[number].kind for number in changes(decisions)}
    assert len(kinds) <= 1
    if length > 10:
        assert sizes[-1] == sizes[-10]


def test_a_short_burst_of_requests_grows_nothing() -> None:
    decisions, sizes = driven(SCALING, [3500.0] * 10 + [12_000.0] * 2 + [3500.0] * 10)
    assert changes(decisions) == [] and set(sizes) == {4}
    assert decisions[11].reason is Reason.NOT_LASTED


@pytest.mark.parametrize(
    ("seen", "kind", "reason", "target"),
    [
        (load(4, 0.0, waiting=32.0), Kind.GROW, Reason.QUEUE_HIGH, 8),
        (load(4, 0.0, latency=0.15), Kind.GROW, Reason.LATENCY_HIGH, 6),
        (load(4, 9000.0), Kind.GROW, Reason.DEMAND_HIGH, 8),
        (load(4, 9000.0, available=2), Kind.GROW, Reason.DEMAND_HIGH, 6),
        (load(4, 9000.0, available=0), Kind.HOLD, Reason.NOT_AVAILABLE, 8),
        (load(4, 9000.0, busy=True), Kind.HOLD, Reason.BUSY, 8),
        (load(16, 90_000.0), Kind.HOLD, Reason.AT_BOUND, 16),
        (load(2, 0.0), Kind.HOLD, Reason.AT_BOUND, 2),
        (load(1, 800.0), Kind.GROW, Reason.BELOW_MINIMUM, 2),
        (load(20, 15_000.0), Kind.SHRINK, Reason.ABOVE_MAXIMUM, 16),
        (load(4, 3500.0), Kind.HOLD, Reason.IN_BOUNDS, 4),
        (load(4, 0.0), Kind.SHRINK, Reason.LOAD_LOW, 3),
    ],
)
def test_every_decision_on_ranks_carries_its_reason_and_target(
    seen: Load, kind: Kind, reason: Reason, target: int
) -> None:
    policy = dataclasses.replace(SCALING, grow_after_seconds=0.0, shrink_after_seconds=0.0)
    _, decision = policy.decide(RankState(), seen, 100.0)
    assert (decision.kind, decision.reason, decision.evidence["target_ranks"]) == (kind, reason, target)


# -- How many copies

COPIES = ReplicaPolicy(slots_per_layer=12, num_ranks=4, step=3)


def loads(*of_layer: float) -> np.ndarray:
    return np.array([of_layer], np.float64)


def singles(experts: int) -> ReplicaState:
    return ReplicaState.start(np.ones((1, experts), np.int64))


def test_a_hot_expert_gets_copies_until_none_is_hot_and_loses_them_when_it_is_cold() -> None:
    state, decision = COPIES.decide(singles(8), loads(60, 1, 1, 1, 1, 1, 1, 1), 0.5, 0.0)
    assert (decision.kind, decision.reason) == (Kind.REPLICATE, Reason.HOT_EXPERTS)
    assert state.counts_LE.tolist() == [[4, 1, 1, 1, 1, 1, 1, 1]]  # a rank each is the most there can be
    state, decision = COPIES.decide(state, loads(1, 1, 1, 1, 1, 1, 1, 1), 0.5, 30.0)
    assert decision.reason is Reason.COOLING_DOWN
    state, decision = COPIES.decide(state, loads(1, 1, 1, 1, 1, 1, 1, 1), 2.0, 90.0)
    assert decision.reason is Reason.UNDER_PRESSURE
    state, decision = COPIES.decide(state, loads(0, 1, 1, 1, 1, 1, 1, 1), 0.5, 100.0)
    assert (decision.reason, state.counts_LE.tolist()) == (Reason.COLD_EXPERTS, [[1] * 8])


def test_cold_copies_make_room_for_hot_experts_in_one_decision() -> None:
    policy = dataclasses.replace(COPIES, slots_per_layer=6)
    state = ReplicaState.start(np.array([[3, 1, 1, 1]]))
    state, decision = policy.decide(state, loads(1, 1, 1, 20), 0.0, 0.0)
    assert (decision.reason, state.counts_LE.tolist()) == (Reason.HOT_AND_COLD_EXPERTS, [[1, 1, 1, 3]])
    assert decision.evidence["copies_added"] == decision.evidence["copies_removed"] == 2.0


def test_without_a_free_slot_the_wish_is_held_and_named() -> None:
    policy = dataclasses.replace(COPIES, slots_per_layer=4)
    _, decision = policy.decide(singles(4), loads(50, 1, 1, 1), 0.0, 0.0)
    assert (decision.kind, decision.reason, decision.evidence["hot_experts"]) == (Kind.HOLD, Reason.AT_BOUND, 1.0)


@given(st.lists(st.lists(st.floats(0, 100), min_size=6, max_size=6), min_size=1, max_size=60), st.integers(1, 2))
@untimed
def test_copies_stay_in_bounds_by_bounded_steps_and_rest_between_changes(trace: list[list[float]], least: int) -> None:
    policy = ReplicaPolicy(14, 4, least, 3, step=2, actions_per_hour=8)
    state = ReplicaState.start(np.full((1, 6), least))
    changed: dict[int, float] = {}
    acted = []
    for number, window in enumerate(trace):
        before, now = state.counts_LE, number * 25.0
        state, decision = policy.decide(state, np.array([window]), 0.0, now)
        assert (state.counts_LE >= least).all() and (state.counts_LE <= 3).all() and state.counts_LE.sum() <= 14
        delta = state.counts_LE - before
        assert delta.clip(min=0).sum() <= 2 and (-delta).clip(min=0).sum() <= 2
        assert (decision.kind is Kind.REPLICATE) == bool(delta.any())
        for expert in np.flatnonzero(delta[0]).tolist():
            assert now - changed.get(expert, -np.inf) >= policy.cool_down_seconds
            changed[expert] = now
        if delta.any():
            acted.append(now)
    assert all(sum(first <= time < first + HOUR for time in acted) <= 8 for first in acted)


@given(st.lists(st.floats(0.5, 100), min_size=6, max_size=6), st.lists(st.floats(0.9, 1.1), min_size=60, max_size=60))
@untimed
def test_copies_come_to_rest_under_noise_and_no_copy_comes_and_goes(window: list[float], noise: list[float]) -> None:
    policy = ReplicaPolicy(18, 4, step=18, cool_down_seconds=0.0)
    state = singles(6)
    history = []
    for number, factor in enumerate(noise):
        scaled = np.array([window])
        scaled[0, number % 6] *= factor
        state, _ = policy.decide(state, scaled, 0.0, number * 10.0)
        history.append(state.counts_LE[0])
    assert (np.diff(np.array(history), axis=0) >= 0).all()


# -- Tables and bounds


@pytest.mark.parametrize(
    ("table", "advance", "states", "events"),
    [
        (rebalance.TRANSITIONS, rebalance.advance, Phase, ("low", "between", "high", "lasted")),
        (autoscale.TRANSITIONS, autoscale.advance, Trend, ("low", "between", "high", "lasted")),
    ],
)
def test_every_edge_of_a_table_and_no_other_is_allowed(
    table: dict[tuple[str, str], str], advance: Callable[[str, str], str], states: type, events: tuple[str, ...]
) -> None:
    assert {state for state, _ in table} == set(states) == set(table.values())
    for edge in product(states, events):
        if edge in table:
            assert advance(*edge) is table[edge]
        else:
            with pytest.raises(ConfigError, match=f"{edge[0]} .* allows no '{edge[1]}'"):
                advance(*edge)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RebalancePolicy(start_above=1.1, stop_below=1.2), "start_above must be in .1.2, inf., found 1.1"),
        (lambda: RebalancePolicy(stop_below=0.5), "stop_below must be in .1, inf., found 0.5"),
        (lambda: RebalancePolicy(interference=float("nan")), "interference must be in .0, 1., found nan"),
        (lambda: dataclasses.replace(SCALING, max_ranks=1), "max_ranks must be in .2, inf., found 1"),
        (lambda: dataclasses.replace(SCALING, shrink_below=1.0), "shrink_below must be in .0, grow_above 1., found 1"),
        (lambda: dataclasses.replace(SCALING, grow_step=0), "grow_step must be in .1, inf., found 0"),
        (lambda: ReplicaPolicy(8, 4, min_replicas=5), "min_replicas must be in .1, 4., found 5"),
        (lambda: ReplicaPolicy(8, 4, cold=2.5), "cold must be in .0, hot 2., found 2.5"),
        (
            lambda: ReplicaPolicy(3, 4).decide(singles(4), loads(1, 1, 1, 1), 0.0, 0.0),
            "slots_per_layer must be >= 1 copies x 4",
        ),
        (lambda: COPIES.decide(singles(3), loads(1, 1), 0.0, 0.0), "loads must be .1, 3. like the counts"),
        (lambda: CAREFUL.decide(RebalanceState(), balance(0.5), 0.0), "imbalance must be in .1, inf., found 0.5"),
    ],
)
def test_values_outside_their_bounds_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_time_that_goes_back_is_refused() -> None:
    state, _ = CAREFUL.decide(RebalanceState(), balance(1.0), 10.0)
    with pytest.raises(ConfigError, match="now must not go back: 9 after 10"):
        CAREFUL.decide(state, balance(1.0), 9.0)
