"""The objective's terms, each against a count by hand or a slow loop, and the constraints that it refuses by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.controlplane.eplb import imbalance, rank_loads, rebalance
from ray_moe.controlplane.objective import Decode, MovePrice, Objective
from ray_moe.controlplane.placed import Placed, Shape
from ray_moe.errors import ConfigError
from tests.layers import untimed

MIGRATION = Path(__file__).parents[1] / "conformance" / "data" / "migration.json"
TWO_BY_TWO = Shape((2, 2, 2, 2), (0, 0, 1, 1))


def placed(shape: Shape, *layers: list[int]) -> Placed:
    return Placed(shape, max(map(max, layers)) + 1, np.array(layers, np.int64))


# -- Shapes and placements


def test_a_shape_whose_counts_do_not_divide_gives_the_first_ranks_one_slot_more() -> None:
    shape = Shape.even(11, 4, 3)
    assert shape == Shape((3, 3, 3, 2), (0, 0, 1, 2))
    assert shape.rank_of_slot_S.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert not shape.is_uniform


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 6), st.integers(0, 2**31))
@untimed
def test_maps_of_a_placement_are_inverse_to_each_other(ranks: int, experts: int, more: int, seed: int) -> None:
    slots = -(-(experts + more) // ranks) * ranks
    random = np.random.default_rng(seed)
    rows = [random.permutation(np.arange(slots) % experts) for _ in range(2)]
    answer = Placed(Shape.even(slots, ranks), experts, np.array(rows))
    maps = answer.to_maps()
    for layer in range(2):
        for slot in range(slots):
            expert, copy = maps.phy2log_LS[layer, slot], maps.phyrank_LS[layer, slot]
            first = maps.log2phy_offsets_L_E1[layer, expert]
            assert maps.log2phy_values_LS[layer, first + copy] == slot
    np.testing.assert_array_equal(maps.logcnt_LE, [np.bincount(row, minlength=experts) for row in rows])


def test_maps_without_a_shape_are_refused_for_ranks_of_different_size() -> None:
    with pytest.raises(ConfigError, match="equally many slots, found 1 to 2"):
        placed(Shape((2, 1), (0, 0)), [0, 1, 2]).to_maps()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shape((1, 2), (0,)), "found 2 and 1"),
        (lambda: Shape((1, -2), (0, 0)), "slots_by_rank must be >= 0, found -2"),
        (lambda: Shape((0, 0), (0, 0)), "at least one slot, found 0"),
        (lambda: Shape.even(3, 4), "found 1, 4 and 3"),
        (lambda: Placed(TWO_BY_TWO, 9, np.arange(8)[None]), "layer 0 expert 8 must have at least 1 slot, found 0"),
        (lambda: Placed(TWO_BY_TWO, 7, np.arange(8)[None]), r"experts must be in \[0, 7\), found 7"),
        (lambda: Placed(TWO_BY_TWO, 7, np.arange(7)[None]), r"\[layers, 8 slots\], found \[1, 7\]"),
        (lambda: Objective(topology=-1.0), "topology must be finite and >= 0, found -1.0"),
        (lambda: Objective(move_price=MovePrice(cross_node=float("nan"))), "move_price.cross_node .* found nan"),
        (lambda: Objective(phase=1.0), "phase 1.0 needs decode"),
        (lambda: Objective(min_replicas=0), "min_replicas must be >= 1, found 0"),
        (lambda: Decode(0, 8), "decode: tokens must be >= 1, found 0"),
    ],
)
def test_bad_input_is_refused_with_value_and_bound(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# -- Terms


@given(st.integers(0, 2**31))
@untimed
def test_balance_is_the_imbalance_of_the_pinned_solver_s_maps(seed: int) -> None:
    loads = np.random.default_rng(seed).gamma(0.5, size=(3, 12))
    maps = rebalance(loads, 16, 1, 1, 4)
    terms = Objective().evaluate(loads, Placed.of(maps, Shape.even(16, 4)))
    np.testing.assert_allclose(terms.balance, imbalance(rank_loads(loads, maps, 4)), rtol=1e-12)
    np.testing.assert_array_equal(terms.total, terms.balance)


def test_a_layer_without_load_is_balanced_and_crosses_nothing() -> None:
    terms = Objective(phase=1.0, decode=Decode(4, 2)).evaluate(np.zeros((1, 4)), placed(TWO_BY_TWO, [0, 1, 2, 3] * 2))
    assert (terms.balance, terms.phase, terms.topology, terms.barrier) == (1, 1, 0, 2)


def test_rows_cross_nodes_only_from_nodes_without_a_copy() -> None:
    # node 0 holds experts 0 and 1, node 1 experts 0 and 2; of expert 1 half of the rows start on node 1.
    answer = placed(TWO_BY_TWO, [0, 1, 0, 1, 2, 0, 2, 2])
    loads = np.array([[4.0, 2.0, 2.0]])
    assert Objective().evaluate(loads, answer).topology == pytest.approx((1 + 1) / 8)
    # All rows start on node 0: those of expert 2 cross, no others.
    assert Objective(origins=[1.0, 0.0]).evaluate(loads, answer).topology == pytest.approx(2 / 8)
    by_expert = np.array([[[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]])
    assert Objective(origins=by_expert).evaluate(loads, answer).topology == 0


def test_origins_that_are_no_shares_are_refused() -> None:
    answer = placed(TWO_BY_TWO, [0, 1] * 4)
    with pytest.raises(ConfigError, match=r"sum to 1, found sums from 1\.5"):
        Objective(origins=[0.5, 1.0]).evaluate(np.ones((1, 2)), answer)
    with pytest.raises(ConfigError, match=r"must be \[2\] or \[1, 2, 2\], found \[3\]"):
        Objective(origins=[0.5, 0.5, 0.0]).evaluate(np.ones((1, 2)), answer)


def test_activated_experts_are_those_that_some_token_of_the_batch_visits() -> None:
    # Two tokens, one expert each: a copy of expert 0 (chance 1/2, two copies) is active with 1 - (3/4)^2 = 7/16, the
    # copies of experts 1 and 2 (chance 1/4) with the same.
    answer = placed(Shape.even(4, 2), [0, 1, 0, 2])
    terms = Objective(phase=1.0, decode=Decode(2, 1)).evaluate(np.array([[2.0, 1.0, 1.0]]), answer)
    unavoidable = (1 - (1 / 2) ** 2) + 2 * (1 - (3 / 4) ** 2)
    assert terms.phase == pytest.approx(2 * 7 / 16 / (unavoidable / 2))
    assert terms.barrier == pytest.approx(terms.balance + terms.phase)


def test_moved_copies_are_the_specification_s_and_priced_by_where_they_come_from() -> None:
    # 0x08F: three copies retained, two from the same node, three duplicated on their own GPU. The two prior slots that
    # are not printed are left out.
    fixture = json.loads(MIGRATION.read_text())
    known = {each["slot"]: each for each in fixture["inputs"]["source_slots_known"]}
    prior = placed(
        Shape((1, 1, 1, 1), tuple(fixture["inputs"]["node_of_rank"])),
        [known[name]["logical_expert_id"] for name in ("q0", "q2", "q4", "q5")],
    )
    target = placed(TWO_BY_TWO, [each["logical_expert_id"] for each in fixture["inputs"]["target_slots"]])
    kinds = Counter(each["action"] for each in fixture["expected"]["actions"])
    loads = np.array([[4.0, 2.0, 1.0, 1.0]])
    # Rank 1 gets expert 0 twice and had none: a placement counts both from the node, where the plan duplicates one.
    assert Objective().evaluate(loads, target, prior).moved == 8 - kinds["retain"]
    terms = Objective(migration=1.0, move_price=MovePrice(0.25, 0.5, 1.0)).evaluate(loads, target, prior)
    assert terms.migration == pytest.approx((2 * 0.25 + 3 * 0.5) / 8)
    assert Objective().evaluate(loads, target, target).moved == 0
    assert Objective().evaluate(loads, target).migration == 0


def test_a_copy_from_nowhere_or_from_a_lost_rank_costs_a_copy_across_nodes() -> None:
    prior = placed(Shape((1, 1, 1), (0, 0, 1)), [0, 1, 2])
    fewer = placed(Shape((2, 1), (0, 0)), [0, 2, 1])
    terms = Objective(migration=1.0).evaluate(np.ones((1, 3)), fewer, prior)
    assert (terms.moved, terms.migration) == (1, pytest.approx(1 / 3))


@given(st.integers(0, 2**31))
@untimed
def test_every_term_agrees_with_a_slow_count(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks, nodes, experts = int(random.integers(1, 6)), int(random.integers(1, 4)), int(random.integers(1, 6))
    shape = Shape(tuple(random.integers(1, 5, ranks)), tuple(random.integers(0, nodes, ranks)))
    experts = min(experts, shape.num_slots)
    rows = [random.permutation(np.arange(shape.num_slots) % experts) for _ in range(2)]
    now, prior = (Placed(shape, experts, np.array([row])) for row in rows)
    loads = random.integers(0, 5, (1, experts)).astype(float)
    price = MovePrice(0.25, 0.5, 1.0)
    origins = random.dirichlet(np.ones(shape.num_nodes))
    terms = Objective(migration=1.0, move_price=price, origins=origins).evaluate(loads, now, prior)

    homes = Counter(zip(rows[0].tolist(), shape.rank_of_slot_S.tolist(), strict=True))
    had = Counter(zip(rows[1].tolist(), shape.rank_of_slot_S.tolist(), strict=True))
    copies = Counter(rows[0].tolist())
    by_rank = [
        sum(loads[0, expert] / copies[expert] * times for (expert, at), times in homes.items() if at == rank)
        for rank in range(ranks)
    ]
    mean = loads.sum() / ranks
    assert terms.balance == pytest.approx(max(by_rank) / mean if mean else 1.0)
    holds = {(expert, shape.node_of_rank[rank]) for expert, rank in homes}
    crossing = sum(
        loads[0, expert] * origins[node]
        for expert in range(experts)
        for node in range(shape.num_nodes)
        if (expert, node) not in holds
    )
    assert terms.topology == pytest.approx(crossing / loads.sum() if mean else 0.0)
    had_node = {(expert, shape.node_of_rank[rank]) for expert, rank in had}
    cost = 0.0
    for (expert, rank), times in homes.items():
        near = price.same_node if (expert, shape.node_of_rank[rank]) in had_node else price.cross_node
        cost += max(times - had[expert, rank], 0) * (price.same_rank if had[expert, rank] else near)
    assert terms.migration == pytest.approx(cost / shape.num_slots)
    assert terms.moved == sum((homes - had).values())
    assert terms.churn == pytest.approx(sum((homes - had).values()) / shape.num_slots)
    assert terms.resident == pytest.approx(len(homes) / shape.num_slots)


def test_the_total_is_the_barrier_and_every_other_term_by_its_weight() -> None:
    now, prior = placed(TWO_BY_TWO, [0, 0, 1, 2, 3, 4, 5, 5]), placed(TWO_BY_TWO, [0, 1, 2, 3, 4, 5, 0, 1])
    objective = Objective(topology=0.5, migration=0.25, resident=2.0, churn=4.0)
    terms = objective.evaluate(np.arange(1.0, 7.0)[None], now, prior)
    assert terms.resident == 6 / 8, "two ranks hold an expert twice"
    assert terms.churn == terms.moved / 8 == 5 / 8, "copies of 0, 1, 3 and both of 5 are new on their rank"
    assert terms.moving == pytest.approx(0.25 * terms.migration + 4.0 * terms.churn)
    assert terms.total == pytest.approx(terms.barrier + 0.5 * terms.topology + 2.0 * 6 / 8 + terms.moving)


# -- Constraints


@pytest.mark.parametrize(
    ("objective", "experts", "message"),
    [
        (Objective(), 9, "min_replicas 1 of each of 9 experts needs 9 slots, found 8"),
        (Objective(min_replicas=3), 3, "min_replicas 3 of each of 3 experts needs 9 slots, found 8"),
        (Objective(anti_affinity="rank"), 1, "rank 0 must have at most 1 slots, one per expert, found 2"),
        (Objective(anti_affinity="node"), 3, "node 0 must have at most 3 slots, one per expert, found 4"),
    ],
)
def test_what_no_placement_can_fulfil_is_refused_with_the_numbers(
    objective: Objective, experts: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        objective.require_feasible(experts, TWO_BY_TWO)


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ([[1.0, -1.0]], "layer 0 expert 1: must be finite and >= 0, found -1.0"),
        ([[np.inf, 1.0]], "layer 0 expert 0: must be finite and >= 0, found inf"),
        ([[1.0, 1.0, 1.0]], r"\[layers, experts\] = \[1, 2\], found \[1, 3\]"),
    ],
)
def test_loads_that_are_none_are_refused(loads: list[list[float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective().evaluate(loads, placed(TWO_BY_TWO, [0, 1] * 4))
