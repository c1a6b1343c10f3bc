"""Placements for any shape: against brute force, against the pinned solver, and against the constraints they keep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.controlplane.eplb import imbalance, rank_loads, rebalance
from ray_moe.controlplane.exact import exact
from ray_moe.controlplane.greedy import carried, greedy
from ray_moe.controlplane.objective import AntiAffinity, Decode, Float64, MovePrice, Objective
from ray_moe.controlplane.placed import Placed, Shape, count
from ray_moe.controlplane.refine import Budget, improve, solve
from ray_moe.errors import ConfigError
from tests.layers import untimed

EVEN_PRICE = MovePrice(1.0, 1.0, 1.0)


def zipf(exponent: float, seed: int, layers: int, experts: int, rows: int = 1 << 18) -> Float64:
    """Rows drawn from Zipf shares, the experts of each layer in an order of its own."""
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, experts + 1) ** exponent
    return random.multinomial(rows, [random.permutation(shares / shares.sum()) for _ in range(layers)]).astype(float)


@dataclass(frozen=True)
class Case:
    loads: Float64
    shape: Shape
    objective: Objective


@st.composite
def cases(draw: st.DrawFn, most_slots: int = 40, most_ranks: int = 8, most_experts: int = 16) -> Case:
    """Any shape and objective that is feasible: unequal ranks, ranks without slots, every constraint and term."""
    ranks = draw(st.integers(1, most_ranks))
    slots = draw(st.lists(st.integers(0, max(1, most_slots // ranks)), min_size=ranks, max_size=ranks))
    slots[0] = max(slots[0], 1)
    nodes = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    shape = Shape(tuple(slots), tuple(nodes))
    apart: AntiAffinity = draw(st.sampled_from(["none", "rank", "node"]))
    largest = {"none": 1, "rank": max(slots), "node": int(shape.slots_by_node_N.max())}[apart]
    experts = draw(st.integers(largest, max(largest, min(shape.num_slots, most_experts))))
    least = draw(st.integers(1, max(1, shape.num_slots // experts)))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    loads = random.gamma(0.5, size=(2, experts)) * (random.random((2, experts)) < 0.9)
    weights = {
        name: draw(st.sampled_from([0.0, 0.3, 1.0])) for name in ("topology", "migration", "phase", "resident", "churn")
    }
    balance = draw(st.sampled_from([1.0, 1.0, 0.0]))
    objective = Objective(
        balance=balance, decode=Decode(8, 2), min_replicas=least, anti_affinity=apart, move_price=EVEN_PRICE, **weights
    )
    return Case(loads, shape, objective)


def assert_fulfilled(placed: Placed, objective: Objective) -> None:
    assert placed.phy2log_LS.shape[1] == placed.shape.num_slots
    assert placed.counts_LE.min() >= objective.min_replicas
    held_LEG = placed.held_LEG()
    np.testing.assert_array_equal(held_LEG.sum(axis=(0, 1)), np.multiply(placed.shape.slots_by_rank, len(held_LEG)))
    if objective.anti_affinity != "none":
        assert (held_LEG if objective.anti_affinity == "rank" else placed.held_LEN()).max() == 1


# -- Constraints hold, and nothing gets worse


@given(cases())
@untimed
def test_every_start_fulfils_the_constraints_and_the_search_keeps_them_without_raising_the_total(case: Case) -> None:
    start = greedy(case.loads, case.shape, case.objective)
    assert_fulfilled(start, case.objective)
    better = improve(start, case.loads, case.objective)
    assert_fulfilled(better, case.objective)
    before, after = (case.objective.evaluate(case.loads, placed, start).total for placed in (start, better))
    assert (after <= before + 1e-9).all()
    best = solve(case.loads, case.shape, case.objective)
    assert_fulfilled(best, case.objective)
    again = solve(case.loads, case.shape, case.objective)
    np.testing.assert_array_equal(best.phy2log_LS, again.phy2log_LS)


@given(cases(), cases())
@untimed
def test_a_placement_carries_over_to_any_other_shape_under_any_constraint(case: Case, other: Case) -> None:
    experts = case.loads.shape[1]
    prior = greedy(case.loads, case.shape)
    objective = other.objective
    try:
        objective.require_feasible(experts, other.shape)
    except ConfigError:
        objective = Objective()
    if experts > other.shape.num_slots:
        return
    loads = case.loads[::-1]
    start = carried(prior, loads, other.shape, objective)
    assert_fulfilled(start, objective)
    best = solve(loads, other.shape, objective, prior)
    assert_fulfilled(best, objective)
    totals = [objective.evaluate(loads, placed, prior).total for placed in (best, start)]
    assert (totals[0] <= totals[1] + 1e-9).all()


def test_a_start_that_breaks_a_constraint_is_refused_with_layer_and_expert() -> None:
    twice = Placed(Shape.even(4, 2), 3, np.array([[0, 0, 1, 2]]))
    with pytest.raises(ConfigError, match="layer 0 expert 0 may have at most 1 copy on rank 0, found 2"):
        improve(twice, np.ones((1, 3)), Objective(anti_affinity="rank"))
    with pytest.raises(ConfigError, match="layer 0 expert 1 must have at least 2 copies, found 1"):
        improve(twice, np.ones((1, 3)), Objective(min_replicas=2))
    for budget in ({"gain": 0.0}, {"rounds": -1}, {"target": 0.5}):
        with pytest.raises(ConfigError, match=f"budget: {next(iter(budget))} must be"):
            Budget(**budget)


# -- Against the optimum


def brute_force(loads: Float64, shape: Shape, objective: Objective, prior: Placed | None) -> float:
    experts = loads.shape[1]
    every = np.array(list(product(range(experts), repeat=shape.num_slots)))
    every = every[count(every, experts).min(axis=1) >= objective.min_replicas]
    domains = objective.domains(shape)
    if domains is not None:
        where = domains[shape.rank_of_slot_S]
        size = int(domains.max()) + 1
        every = every[count(every * size + where, experts * size).max(axis=1) == 1]
    at = np.zeros(len(every), np.int64)
    origins = objective.origins if objective.origins is None or np.ndim(objective.origins) == 1 else None
    same = replace(objective, origins=origins)
    totals = same.evaluate(loads[at], Placed(shape, experts, every), None if prior is None else prior.of_layers(at))
    return float(totals.total.min())


@given(cases(most_slots=6, most_ranks=3, most_experts=3))
@untimed
def test_branch_and_bound_finds_what_brute_force_finds(case: Case) -> None:
    if case.shape.num_slots > 6:
        return
    loads, objective = case.loads[:1], case.objective
    prior = greedy(case.loads[1:], case.shape, objective)
    for before in (None, prior):
        found = objective.evaluate(loads, exact(loads, case.shape, objective, before), before)
        assert found.total[0] == pytest.approx(brute_force(loads, case.shape, objective, before), abs=1e-9)


@given(st.integers(0, 2**31))
@untimed
def test_balance_is_within_a_quarter_of_the_optimum_on_small_instances_and_near_it_on_average(seed: int) -> None:
    random = np.random.default_rng(seed)
    loads = random.gamma(0.5, size=(32, 6))
    shape = Shape((3, 3, 3), (0, 0, 0)) if seed % 2 else Shape((4, 3, 2), (0, 0, 0))
    best = Objective().evaluate(loads, exact(loads, shape)).balance
    ratio = Objective().evaluate(loads, solve(loads, shape)).balance / best
    assert ratio.min() >= 1 - 1e-9
    assert ratio.max() <= 1.25
    assert ratio.mean() <= 1.06


def test_exact_refuses_what_it_cannot_enumerate() -> None:
    with pytest.raises(ConfigError, match="at most 12 slots on 4 ranks, found 16 on 2"):
        exact(np.ones((1, 4)), Shape.even(16, 2))


# -- Against the pinned solver


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 12), st.integers(0, 2**31))
@untimed
def test_the_greedy_start_is_the_pinned_solver_where_it_applies_and_the_search_is_never_worse(
    ranks: int, experts: int, more: int, seed: int
) -> None:
    slots = -(-(experts + more) // ranks) * ranks
    loads = np.random.default_rng(seed).gamma(0.5, size=(3, experts))
    maps, shape = rebalance(loads, slots, 1, 1, ranks), Shape.even(slots, ranks)
    np.testing.assert_array_equal(greedy(loads, shape).phy2log_LS, maps.phy2log_LS)
    ours = Objective().evaluate(loads, solve(loads, shape)).balance
    assert (ours <= imbalance(rank_loads(loads, maps, ranks)) + 1e-9).all()


@pytest.mark.parametrize("exponent", [1.2, 1.4])
def test_skewed_demand_is_spread_strictly_better_than_by_the_pinned_solver_with_the_same_slots(exponent: float) -> None:
    loads, shape = zipf(exponent, 0, 12, 256), Shape.even(288, 32)
    theirs = imbalance(rank_loads(loads, rebalance(loads, 288, 1, 1, 32), 32))
    ours = Objective().evaluate(loads, solve(loads, shape)).balance
    assert (ours < theirs).all()
    assert ours.max() <= 1.005
    assert theirs.mean() >= {1.2: 1.01, 1.4: 1.15}[exponent]


def test_counts_that_do_not_divide_are_spread_as_evenly_as_those_that_do() -> None:
    shape = Shape.even(291, 7, 2)
    assert set(shape.slots_by_rank) == {41, 42}
    balance = Objective().evaluate(zipf(1.0, 1, 6, 257), solve(zipf(1.0, 1, 6, 257), shape)).balance
    assert balance.max() <= 1.005


def test_a_rank_with_few_slots_still_gets_its_share_of_the_load() -> None:
    shape = Shape((2, 8, 8, 14), (0, 0, 1, 1))
    loads = zipf(0.6, 2, 4, 24)
    assert Objective().evaluate(loads, solve(loads, shape)).balance.max() <= 1.05


def test_half_of_all_rows_for_one_expert_bound_a_layer_with_one_expert_per_rank_unless_it_is_replicated() -> None:
    loads = np.array([[7.0, 1, 1, 1, 1, 1, 1, 1]])
    one_each = greedy(loads, Shape.even(8, 8))
    assert Objective().evaluate(loads, improve(one_each, loads)).balance == pytest.approx(4.0)  # 7 of 14 on 1 of 8
    # With 14 ranks the hot expert has seven copies, one per rank: the barrier is gone.
    assert Objective().evaluate(loads, solve(loads, Shape.even(14, 14))).balance == pytest.approx(1.0)


# -- Migration, topology, phase


def drifting(seed: int, steps: int, layers: int = 6, experts: int = 256) -> list[Float64]:
    """Zipf 1.0 shares whose logarithms walk by 0.1 a step; drawn rows."""
    random = np.random.default_rng(seed)
    order = np.stack([random.permutation(experts) for _ in range(layers)])
    logs = -np.log1p(order)
    demands = []
    for _ in range(steps):
        logs = logs + 0.1 * random.normal(size=logs.shape)
        shares = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
        demands.append(random.multinomial(1 << 18, shares).astype(float))
    return demands


@pytest.mark.parametrize(("ranks", "factor"), [(8, 8.0), (32, 3.0)])
def test_drifting_demand_is_followed_at_equal_balance_with_a_fraction_of_the_pinned_solver_s_moves(
    ranks: int, factor: float
) -> None:
    shape, objective = Shape.even(288, ranks, 4), Objective(migration=0.02, move_price=EVEN_PRICE)
    ours = theirs = None
    moves, excess = np.zeros(2), np.zeros(2)
    for loads in drifting(3, 6):
        next_theirs = Placed.of(rebalance(loads, 288, 1, 1, ranks), shape)
        next_ours = solve(loads, shape, objective, ours)
        if ours is not None and theirs is not None:
            for at, (now, before) in enumerate(((next_ours, ours), (next_theirs, theirs))):
                terms = objective.evaluate(loads, now, before)
                moves[at] += terms.moved.sum()
                excess[at] += terms.balance.mean() - 1
        ours, theirs = next_ours, next_theirs
    assert excess[0] <= excess[1]
    assert moves[1] >= factor * moves[0] > 0


def test_demand_that_does_not_change_moves_nothing_and_a_weight_too_high_for_any_gain_neither() -> None:
    before, after = zipf(1.0, 4, 3, 64), zipf(1.0, 5, 3, 64)
    shape = Shape.even(80, 8, 2)
    prior = solve(before, shape)
    stays = solve(after, shape, Objective(migration=1e4), prior)
    np.testing.assert_array_equal(stays.phy2log_LS, prior.phy2log_LS)
    settled = solve(before, shape, Objective(migration=0.01), prior)
    assert Objective().evaluate(before, settled, prior).moved.sum() <= 2


def test_a_churn_weight_counts_moves_wherever_they_come_from() -> None:
    before, after, shape = zipf(0.9, 4, 3, 64), zipf(0.9, 5, 3, 64), Shape.even(72, 8, 2)
    prior = solve(before, shape)
    free = solve(after, shape, Objective(migration=1e-6), prior)
    held = solve(after, shape, Objective(churn=0.5), prior)
    moved = [Objective().evaluate(after, each, prior).moved.sum() for each in (free, held)]
    assert moved[1] < moved[0] / 2, moved
    stays = solve(after, shape, Objective(churn=1e4), prior)
    np.testing.assert_array_equal(stays.phy2log_LS, prior.phy2log_LS)


def test_a_resident_weight_brings_copies_together_where_balance_allows_it() -> None:
    loads, shape = np.array([[8.0, 8.0, 4.0, 4.0, 4.0, 4.0]]), Shape.even(8, 2)
    apart = Placed(shape, 6, np.array([[0, 1, 2, 3, 0, 1, 4, 5]]))
    together = improve(apart, loads, Objective(resident=0.1))
    before, after = (Objective().evaluate(loads, each) for each in (apart, together))
    assert (before.balance, before.resident) == (1.0, 1.0)
    assert (after.balance, after.resident) == (1.0, 6 / 8)

    loads, shape = zipf(1.2, 7, 2, 64), Shape.even(96, 8, 2)
    free = Objective().evaluate(loads, solve(loads, shape))
    kept = Objective().evaluate(loads, solve(loads, shape, Objective(resident=0.5)))
    assert (kept.resident < 0.9 * free.resident).all(), (kept.resident, free.resident)
    assert (kept.balance < free.balance + 0.02).all(), (kept.balance, free.balance)


def test_a_lost_rank_moves_what_it_held_and_a_new_one_takes_its_share() -> None:
    loads, objective = zipf(0.8, 6, 3, 60), Objective(migration=0.02, move_price=EVEN_PRICE)
    prior = solve(loads, Shape.even(72, 8, 2))
    fewer = solve(loads, Shape((10,) * 7, (0, 0, 0, 0, 1, 1, 1)), objective, prior)
    terms = objective.evaluate(loads, fewer, prior)
    assert terms.balance.max() <= 1.05
    assert terms.moved.max() <= 35  # of 70 slots; a fresh solve moves about 60
    more = solve(loads, Shape.even(81, 9, 2), objective, prior)
    terms = objective.evaluate(loads, more, prior)
    assert terms.balance.max() <= 1.05
    assert terms.moved.max() <= 40


def test_a_topology_weight_brings_copies_to_the_nodes_where_their_rows_start() -> None:
    random = np.random.default_rng(7)
    loads, shape = zipf(0.8, 7, 3, 64), Shape.even(96, 8, 4)
    origins = random.dirichlet(np.full(4, 0.3), size=(3, 64))
    plain, local = Objective(origins=origins), Objective(topology=1.0, origins=origins)
    before = plain.evaluate(loads, solve(loads, shape, plain))
    after = local.evaluate(loads, solve(loads, shape, local))
    assert (after.total < before.barrier + before.topology).all()
    assert after.topology.mean() <= 0.5 * before.topology.mean()
    assert after.balance.max() <= 1.1


def test_decode_gives_busy_experts_fewer_copies_than_prefill_and_activates_fewer_experts_on_the_busiest_rank() -> None:
    loads, shape, decode = zipf(1.0, 8, 4, 64), Shape.even(96, 8), Decode(tokens=64, top_k=8)
    prefill = Objective(decode=decode)
    for_decode = Objective(balance=0.0, phase=1.0, decode=decode)
    by_rows, by_active = solve(loads, shape, prefill), solve(loads, shape, for_decode)
    hottest = loads.argmax(axis=1)[:, None]
    copies = [np.take_along_axis(placed.counts_LE, hottest, axis=1) for placed in (by_rows, by_active)]
    assert (copies[1] < copies[0]).all()
    rows, active = prefill.evaluate(loads, by_rows), prefill.evaluate(loads, by_active)
    assert (active.phase < rows.phase).all()
    assert (rows.balance < active.balance).all()


def test_a_target_and_a_budget_end_the_search_early() -> None:
    loads, shape = zipf(1.4, 9, 4, 256), Shape.even(288, 32)
    start = greedy(loads, shape)
    np.testing.assert_array_equal(improve(start, loads, budget=Budget(rounds=0)).phy2log_LS, start.phy2log_LS)
    np.testing.assert_array_equal(improve(start, loads, budget=Budget(target=2.0)).phy2log_LS, start.phy2log_LS)
