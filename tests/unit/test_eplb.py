"""The EPLB solver beside a slow transcription of the pinned reference's rules: four equal maps, ties included."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ray_moe.bench.planner import reference_maps
from ray_moe.controlplane.eplb import ExpertMaps, imbalance, rank_loads, rebalance
from ray_moe.controlplane.packing import pack, replicate
from ray_moe.errors import ConfigError
from tests.layers import untimed

# -- The oracle: one layer, one copy and one item at a time


class Counts(NamedTuple):
    experts: int
    slots: int
    groups: int
    nodes: int
    gpus: int


def balanced_packing(weights: list[np.float32], packs: int) -> list[tuple[int, int]]:
    """(pack, place) of each item."""
    room = len(weights) // packs
    if room == 1:
        return [(item, 0) for item in range(len(weights))]
    where = [(-1, -1)] * len(weights)
    load, held = [np.float32(0)] * packs, [0] * packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):  # stable
        chosen = min((p for p in range(packs) if held[p] < room), key=lambda p: load[p])  # the first of the lightest
        where[item] = (chosen, held[chosen])
        load[chosen] = np.float32(load[chosen] + weights[item])
        held[chosen] += 1
    return where


def replicate_experts(weights: list[np.float32], slots: int) -> tuple[list[int], list[int], list[int]]:
    """Expert and copy number of each physical copy, and copies of each expert."""
    phy2log, phyrank, count = list(range(len(weights))), [0] * len(weights), [1] * len(weights)
    for _ in range(len(weights), slots):
        ratios = [weight / np.float32(copies) for weight, copies in zip(weights, count, strict=True)]
        expert = ratios.index(max(ratios))
        phy2log.append(expert)
        phyrank.append(count[expert])
        count[expert] += 1
    return phy2log, phyrank, count


def rebalance_layer(load: list[float], c: Counts) -> tuple[list[int], list[int], list[int]]:
    """phy2log, phyrank and logcnt of one layer, hierarchical; the global policy is one group and one node."""
    weights = [np.float32(value) for value in load]
    size, per_node, room = c.experts // c.groups, c.groups // c.nodes, c.slots // c.gpus
    sums = [np.float32(sum(float(w) for w in weights[g * size : (g + 1) * size])) for g in range(c.groups)]
    groups_at = {node * per_node + place: g for g, (node, place) in enumerate(balanced_packing(sums, c.nodes))}

    phy2log, phyrank, logcnt = [], [], [0] * c.experts
    for node in range(c.nodes):
        experts = [groups_at[node * per_node + k] * size + e for k in range(per_node) for e in range(size)]
        owner, number, count = replicate_experts([weights[e] for e in experts], c.slots // c.nodes)
        for expert, copies in zip(experts, count, strict=True):
            logcnt[expert] = copies
        shares = [weights[experts[local]] / np.float32(count[local]) for local in owner]
        places = balanced_packing(shares, c.gpus // c.nodes)
        copy_at = {gpu * room + place: copy for copy, (gpu, place) in enumerate(places)}
        phy2log += [experts[owner[copy_at[at]]] for at in range(len(owner))]
        phyrank += [number[copy_at[at]] for at in range(len(owner))]
    return phy2log, phyrank, logcnt


def oracle(loads: NDArray[Any], c: Counts) -> tuple[NDArray[np.int64], ...]:
    """The reference's four maps: phy2log, phyrank, logcnt and the padded log2phy."""
    if c.groups % c.nodes:
        c = c._replace(groups=1, nodes=1)
    by_layer = [rebalance_layer(row, c) for row in loads]
    phy2log, phyrank, logcnt = (np.array(part) for part in zip(*by_layer, strict=True))
    padded = np.full((*logcnt.shape, logcnt.max()), -1)
    for layer in range(len(loads)):
        for slot in range(c.slots):
            padded[layer, phy2log[layer, slot], phyrank[layer, slot]] = slot
    return phy2log, phyrank, logcnt, padded


def maps_of(maps: ExpertMaps) -> tuple[NDArray[np.int64], ...]:
    return maps.phy2log_LS, maps.phyrank_LS, maps.logcnt_LE, maps.padded_log2phy()


def assert_equal_maps(loads: NDArray[Any], c: Counts) -> None:
    ours, theirs = maps_of(rebalance(loads, c.slots, c.groups, c.nodes, c.gpus)), oracle(loads, c)
    for name, mine, expected in zip(("phy2log", "phyrank", "logcnt", "log2phy"), ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, expected, err_msg=f"{name} of {c}")
        assert mine.dtype == np.int64


# -- Equal to the oracle


def draw_loads(rng: np.random.Generator, kind: int, layers: int, experts: int) -> NDArray[np.float64]:
    """Loads of one kind: small whole numbers (many ties), some zero, all zero or equal, smooth, steep, wide, tiny."""
    shape = (layers, experts)
    match kind:
        case 0:
            return rng.integers(0, 4, shape).astype(float)
        case 1:
            return rng.integers(1, 12, shape).astype(float)
        case 2:
            return rng.gamma(0.5, size=shape) * (rng.random(shape) < 0.6)
        case 3:
            return np.full(shape, float(rng.integers(0, 3)))
        case 4:
            return rng.gamma(0.5, size=shape) * 1000
        case 5:
            return rng.permuted(np.tile(1 / np.arange(1.0, experts + 1) ** rng.uniform(0.5, 3), (layers, 1)), axis=1)
        case 6:
            return 2.0 ** rng.integers(-120, 100, shape)
        case 7:
            return rng.integers(0, 50, shape) * 2.0**-149  # float32's smallest numbers
        case _:
            return rng.integers(0, 2, shape) * 10.0 ** rng.integers(0, 3, (layers, 1))


KINDS = 9


def test_two_thousand_random_inputs_with_ties_give_the_reference_maps() -> None:
    rng = np.random.default_rng(0)
    for case in range(2000):
        nodes = int(rng.integers(1, 4))
        groups = int(nodes * rng.integers(1, 4)) if case % 3 else int(rng.integers(1, 6))
        local = groups % nodes == 0  # otherwise global: only GPUs and slots must divide
        gpus = int((nodes if local else 1) * rng.integers(1, 5))
        experts = int(groups * rng.integers(1, 5))
        slots = int(-(-experts // gpus) + rng.integers(0, 4)) * gpus
        loads = draw_loads(rng, case % KINDS, int(rng.integers(1, 4)), experts)
        assert_equal_maps(loads, Counts(experts, slots, groups, nodes, gpus))


@pytest.mark.parametrize("kind", range(KINDS))
@pytest.mark.parametrize(
    "counts",
    [
        Counts(64, 96, 8, 4, 16),
        Counts(64, 96, 8, 1, 8),
        Counts(64, 96, 1, 3, 4),
        Counts(32, 512, 1, 2, 128),
        Counts(40, 640, 4, 2, 320),
        Counts(16, 512, 1, 1, 256),
        Counts(128, 160, 8, 1, 8),
        Counts(3, 4000, 1, 1, 2),
    ],
    ids=str,
)
def test_larger_instances_give_the_reference_maps(counts: Counts, kind: int) -> None:
    assert_equal_maps(draw_loads(np.random.default_rng(kind), kind, 2, counts.experts), counts)


@given(st.data())
@untimed
def test_any_shape_and_any_load_gives_the_reference_maps(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 3))
    groups, gpus = nodes * data.draw(st.integers(1, 3)), nodes * data.draw(st.integers(1, 3))
    experts = groups * data.draw(st.integers(1, 3))
    slots = gpus * (-(-experts // gpus) + data.draw(st.integers(0, 3)))
    load = st.one_of(st.integers(0, 3).map(float), st.floats(0, 2.0**100, width=32))
    rows = data.draw(st.lists(st.lists(load, min_size=experts, max_size=experts), min_size=1, max_size=3))
    assert_equal_maps(np.array(rows), Counts(experts, slots, groups, nodes, gpus))


def test_the_benchmarks_transcription_is_the_oracle() -> None:
    rng = np.random.default_rng(5)
    for kind in range(KINDS - 2):
        for counts in (Counts(24, 36, 6, 2, 12), Counts(24, 36, 6, 1, 4), Counts(24, 36, 5, 2, 4)):
            loads = draw_loads(rng, kind, 3, 24)
            theirs = reference_maps(loads, counts.slots, counts.groups, counts.nodes, counts.gpus)
            for mine, expected in zip(theirs, oracle(loads, counts), strict=True):
                np.testing.assert_array_equal(mine, expected, err_msg=f"{counts}, loads {kind}")


# -- Its rules, one by one


def test_the_first_expert_gets_the_next_copy_on_a_tie() -> None:
    copies = replicate(np.array([[4, 2]], np.float32), 4)
    assert copies.logcnt_NE.tolist() == [[3, 1]]
    assert (copies.expert_NS.tolist(), copies.phyrank_NS.tolist()) == ([[0, 1, 0, 0]], [[0, 0, 1, 2]])


def test_without_any_load_every_further_copy_is_the_first_experts() -> None:
    assert replicate(np.zeros((1, 3), np.float32), 6).logcnt_NE.tolist() == [[4, 1, 1]]


def test_one_item_per_pack_is_the_identity_without_sorting() -> None:
    assert pack(np.array([[2, 6]], np.float32), 2).tolist() == [[0, 1]]
    assert pack(np.array([[2, 6]], np.float32), 1).tolist() == [[1, 0]], "one pack: in the order of arrival"


def test_a_full_pack_takes_no_more_however_light() -> None:
    assert pack(np.array([[8, 1, 1, 1]], np.float32), 2).tolist() == [[0, 3, 1, 2]]


def test_items_without_weight_go_to_the_lightest_pack_even_where_it_already_has_one() -> None:
    assert pack(np.array([[0, 0, 0, 5]], np.float32), 2).tolist() == [[3, 2, 0, 1]]


def test_quotients_and_loads_are_rounded_to_float32() -> None:
    """2**24 + 1 has no float32: both experts weigh the same and the first wins; in float64 the second would."""
    loads = np.array([[2.0**24, 2.0**24 + 1]])
    assert rebalance(loads, 3, 1, 1, 1).logcnt_LE.tolist() == [[2, 1]]


def test_the_inverse_is_as_wide_as_the_most_copies_and_padded_with_minus_one() -> None:
    maps = rebalance([[4, 2, 1, 1]], 8, 2, 2, 4)
    assert maps.padded_log2phy().tolist() == [[[2, 3, 1], [0, -1, -1], [4, 5, -1], [6, 7, -1]]]
    assert maps.log2phy_offsets_L_E1.tolist() == [[0, 3, 4, 6, 8]]
    assert maps.log2phy_values_LS.tolist() == [[2, 3, 1, 0, 4, 5, 6, 7]]


def test_global_may_be_asked_for_where_groups_would_divide() -> None:
    loads = np.random.default_rng(3).gamma(0.5, size=(2, 16))
    asked, natural = rebalance(loads, 24, 4, 2, 8, "global"), rebalance(loads, 24, 1, 1, 8)
    for mine, expected in zip(maps_of(asked), maps_of(natural), strict=True):
        np.testing.assert_array_equal(mine, expected)


# -- Rank loads


def test_rank_loads_add_up_to_the_demand_and_zero_load_is_balanced() -> None:
    loads = np.array([[4.0, 2, 1, 1], [0, 0, 0, 0]])
    maps = rebalance(loads, 8, 2, 2, 4)
    ranks = rank_loads(loads, maps, 4)
    np.testing.assert_allclose(ranks[0], [10 / 3, 8 / 3, 1, 1], rtol=1e-15)
    np.testing.assert_allclose(imbalance(ranks), [5 / 3, 1], rtol=1e-15)


# -- Refusals


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((2, 1, 1, 1), "num_slots must be >= the 4 experts, found 2"),
        ((8, 3, 3, 3), "the number of experts must be a multiple of num_groups 3, found 4"),
        ((8, 2, 2, 3), "num_gpus must be a multiple of num_nodes 2, found 3"),
        ((8, 1, 1, 3), "num_slots must be a multiple of num_gpus 3, found 8"),
        ((8, 0, 1, 1), "num_groups must be >= 1, found 0"),
        ((8, 1, 0, 1), "num_nodes must be >= 1, found 0"),
        ((8, 1, 1, 0), "num_gpus must be >= 1, found 0"),
    ],
)
def test_counts_that_do_not_divide_are_refused_by_name(counts: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rebalance([[4, 2, 1, 1]], *counts)


def test_hierarchical_is_refused_where_groups_do_not_divide_over_nodes() -> None:
    with pytest.raises(ConfigError, match="num_groups must be a multiple of num_nodes 2, found 1"):
        rebalance([[4, 2, 1, 1]], 8, 1, 2, 4, "hierarchical")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e39])
def test_loads_that_no_reference_could_order_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"loads: layer 0 expert 1: must be in \[0, 3.4"):
        rebalance([[4, value]], 2, 1, 1, 1)


def test_layers_whose_sum_float32_could_not_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loads: layer 1: the sum must be <= 1.7e\+38, found 6e\+38"):
        rebalance([[1, 1], [3e38, 3e38]], 2, 1, 1, 1)


@pytest.mark.parametrize("loads", [[[1, 2], [3]], [["many", 2]], [[None, 2]], [[{}, 2]]], ids=str)
def test_what_is_no_rectangle_of_numbers_is_refused(loads: Any) -> None:
    with pytest.raises(ConfigError, match=r"loads must be a rectangle of numbers|must be in"):
        rebalance(loads, 2, 1, 1, 1)


def test_another_shape_of_loads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loads must be \[layers, experts\], both >= 1, found shape \[3\]"):
        rebalance([1, 2, 3], 4, 1, 1, 1)
    with pytest.raises(ConfigError, match="num_gpus must divide the 4 slots, found 3"):
        rank_loads([[1, 2]], rebalance([[1, 2]], 4, 1, 1, 1), 3)
