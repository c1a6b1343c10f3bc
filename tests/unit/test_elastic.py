"""Where copies shall live: within the room there is, every expert somewhere, no expert twice on a rank, few moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ray_moe.controlplane.elastic import Loads, as_given, even_homes, levelled, solved
from ray_moe.controlplane.occupancy import Home, Wanted
from ray_moe.errors import ConfigError, PlacementError
from ray_moe.placement import PlacementSnapshot
from tests.layers import untimed
from tests.unit.reconciling import Homes, first_placement

LAYERS = (0, 3)


@dataclass(frozen=True)
class Case:
    """A placement of two layers, and as many slots of a layer as its fullest rank holds."""

    homes: Homes
    ranks: tuple[int, ...]
    experts: int

    @property
    def serving(self) -> PlacementSnapshot:
        return first_placement(self.homes, self.held)

    @property
    def held(self) -> int:
        return max(count for pairs in self.homes.values() for count in Counter(rank for _, rank in pairs).values())

    @property
    def counts(self) -> dict[tuple[int, int], int]:
        return {
            (layer, expert): count
            for layer, pairs in self.homes.items()
            for expert, count in Counter(expert for expert, _ in pairs).items()
        }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to five ranks, up to eight experts with up to three copies each, spread in any way."""
    count, experts = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    homes: dict[int, list[tuple[int, int]]] = {}
    for layer in LAYERS:
        subsets = st.sets(st.integers(0, count - 1), min_size=1, max_size=min(3, count))
        homes[layer] = [(expert, rank) for expert in range(experts) for rank in sorted(draw(subsets))]
    there = {rank for pairs in homes.values() for _, rank in pairs}
    homes[LAYERS[0]] += [(0, rank) for rank in range(count) if rank not in there]
    return Case(homes, tuple(range(count)), experts)


def even(experts: int, ranks: Sequence[int], copies: Mapping[int, int]) -> Case:
    """The start rule's placement, which is level."""
    replicas = {(layer, expert): count for layer in LAYERS for expert, count in copies.items()}
    homes = even_homes(dict.fromkeys(LAYERS, experts), ranks, replicas)
    return Case(homes, tuple(ranks), experts)


def loads_for(case: Case) -> st.SearchStrategy[Loads]:
    row = st.lists(st.integers(0, 1000), min_size=case.experts, max_size=case.experts)
    return st.lists(row, min_size=len(LAYERS), max_size=len(LAYERS)).map(lambda rows: np.array(rows, np.float64))


def check(wanted: Wanted, case: Case, ranks: Sequence[int], room: int) -> None:
    """What every answer keeps."""
    assert tuple(wanted.layers) == LAYERS
    for homes in wanted.layers.values():
        assert {home.expert for home in homes} == set(range(case.experts)), "every expert has a copy"
        assert {home.rank for home in homes} <= set(ranks)
        assert len(set(homes)) == len(homes), "no expert is twice on a rank"
        assert max(Counter(home.rank for home in homes).values()) <= room


def moved(wanted: Wanted, case: Case, layer: int) -> int:
    """Copies that their rank does not hold yet."""
    return len(set(wanted.layers[layer]) - {Home(rank, expert) for expert, rank in case.homes[layer]})


def per_rank(wanted: Wanted, layer: int) -> Counter[int]:
    return Counter(home.rank for home in wanted.layers[layer])


# -- levelled


@untimed
@given(st.data(), cases())
def test_levelled_fits_keeps_every_expert_and_gives_the_copies_asked_for(data: st.DataObject, case: Case) -> None:
    stay = data.draw(st.sets(st.sampled_from(case.ranks), min_size=1))
    ranks = [*sorted(stay), *range(len(case.ranks), len(case.ranks) + data.draw(st.integers(0, 2)))]
    room = data.draw(st.integers(1, case.held + 1))
    keys = st.tuples(st.sampled_from(LAYERS), st.integers(0, case.experts - 1))
    asked = data.draw(st.dictionaries(keys, st.integers(1, len(ranks)), max_size=4))
    loads = data.draw(st.none() | loads_for(case))
    named = {layer: sum(count for (at, _), count in asked.items() if at == layer) for layer in LAYERS}
    least = {layer: named[layer] + case.experts - sum(at == layer for at, _ in asked) for layer in LAYERS}
    if max(least.values()) > len(ranks) * room:
        with pytest.raises(PlacementError, match=rf"need as many slots, {len(ranks)} ranks with {room} each have"):
            levelled(case.serving, ranks, room, counts=asked, loads_LE=loads)
        return
    wanted = levelled(case.serving, ranks, room, counts=asked, loads_LE=loads)
    check(wanted, case, ranks, room)
    for layer in LAYERS:
        copies = Counter(home.expert for home in wanted.layers[layer])
        for expert in range(case.experts):
            had = min(case.counts[layer, expert], len(ranks))
            assert copies[expert] == asked.get((layer, expert), copies[expert])
            assert copies[expert] <= max(had, asked.get((layer, expert), 0)), "nobody asked for more"
            if sum(copies.values()) < len(ranks) * room:
                assert copies[expert] == asked.get((layer, expert), had), "there was room for all"


@untimed
@given(st.data(), cases())
def test_levelled_once_more_moves_nothing(data: st.DataObject, case: Case) -> None:
    ranks = [*case.ranks, *range(len(case.ranks), len(case.ranks) + data.draw(st.integers(0, 2)))]
    loads = data.draw(st.none() | loads_for(case))
    once = levelled(case.serving, ranks, case.held, loads_LE=loads)
    homes = {layer: [(home.expert, home.rank) for home in found] for layer, found in once.layers.items()}
    assume({rank for pairs in homes.values() for _, rank in pairs} == set(ranks))
    again = levelled(first_placement(homes, case.held), ranks, case.held, loads_LE=loads)
    assert again == once


@untimed
@given(st.integers(1, 6), st.data())
def test_a_rank_that_comes_takes_its_share_and_nothing_else_moves(peers: int, data: st.DataObject) -> None:
    case = even(data.draw(st.integers(peers, 16)), range(peers), {})
    wanted = levelled(case.serving, range(peers + 1), case.held + 1)
    check(wanted, case, range(peers + 1), case.held)
    for layer in LAYERS:
        held = per_rank(wanted, layer)
        assert moved(wanted, case, layer) == held[peers] <= -(-case.experts // (peers + 1))
        assert max(held.values()) - min(held[rank] for rank in range(peers + 1)) <= 1


@untimed
@given(st.integers(2, 6), st.data())
def test_a_rank_that_goes_leaves_its_copies_to_the_others_and_nothing_else_moves(
    peers: int, data: st.DataObject
) -> None:
    case, gone = even(data.draw(st.integers(peers, 16)), range(peers), {}), data.draw(st.integers(0, peers - 1))
    stay = [rank for rank in range(peers) if rank != gone]
    room = -(-case.experts // len(stay))
    wanted = levelled(case.serving, stay, room)
    check(wanted, case, stay, room)
    for layer in LAYERS:
        assert moved(wanted, case, layer) == sum(rank == gone for _, rank in case.homes[layer])
        assert max(per_rank(wanted, layer).values()) - min(per_rank(wanted, layer).values()) <= 1


@untimed
@given(st.data(), cases())
def test_a_rank_that_goes_moves_no_more_than_it_had_and_levelling_takes(data: st.DataObject, case: Case) -> None:
    """With replicas too: what moves besides, levelling the ranks that were there would move as well."""
    assume(len(case.ranks) > 1)
    stay = sorted(set(case.ranks) - {data.draw(st.sampled_from(case.ranks))})
    room = max(len(pairs) for pairs in case.homes.values())
    beside = levelled(case.serving, case.ranks, room)
    wanted = levelled(case.serving, stay, room)
    for layer in LAYERS:
        on_it = sum(rank not in stay for _, rank in case.homes[layer])
        assert moved(wanted, case, layer) <= on_it + moved(beside, case, layer) + len(stay)


def test_without_need_nothing_moves() -> None:
    case = even(6, (0, 1, 2), {1: 2})
    wanted = levelled(case.serving, case.ranks, case.held)
    assert all(moved(wanted, case, layer) == 0 for layer in LAYERS)


def test_two_copies_on_one_rank_are_spread_over_two() -> None:
    serving = first_placement({0: [(0, 0), (0, 0), (1, 1)]}, 3)
    for wanted in (levelled(serving, (0, 1), 2), solved(serving, (0, 1), 2, np.ones((1, 2)))):
        assert len(set(wanted.layers[0])) == len(wanted.layers[0])
        assert {home.rank for home in wanted.layers[0] if home.expert == 0} == {0, 1}


def test_loads_decide_who_gives_and_a_heavy_expert_gets_a_rank_with_little_else() -> None:
    case = Case(dict.fromkeys(LAYERS, ((0, 0), (1, 0), (2, 1), (3, 1))), (0, 1), 4)
    loads = np.array([[9.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 9.0]])
    wanted = levelled(case.serving, case.ranks, 3, loads_LE=loads)
    assert {home.expert for home in wanted.layers[0] if home.rank == 0} == {0}
    assert {home.expert for home in wanted.layers[3] if home.rank == 1} == {3}


def test_a_copy_that_only_crowded_ranks_lack_makes_way_there() -> None:
    # Rank 1 alone has room, and has expert 0: it takes another one over, so that rank 0 can hold expert 0 too.
    homes = ((1, 0), (2, 0), (0, 1))
    case = Case(dict.fromkeys(LAYERS, homes), (0, 1), 3)
    wanted = levelled(case.serving, case.ranks, 2, counts={(0, 0): 2})
    check(wanted, case, case.ranks, 2)
    assert [home.rank for home in wanted.layers[0] if home.expert == 0] == [0, 1]
    assert moved(wanted, case, 0) == 2


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({(1, 0): 1}, r"replicas: layer must be one of \[0, 3\], found 1"),
        ({(0, 4): 1}, r"replicas: expert of layer 0 must be in \[0, 4\), found 4"),
        ({(3, -1): 1}, r"replicas: expert of layer 3 must be in \[0, 4\), found -1"),
        ({(0, 1): 0}, r"replicas: layer 0 expert 1: count must be in \[1, 2\], .* found 0"),
        ({(0, 1): 3}, r"replicas: layer 0 expert 1: count must be in \[1, 2\], .* found 3"),
    ],
)
def test_copies_that_cannot_be_are_refused_by_name(counts: dict[tuple[int, int], int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        levelled(even(4, (0, 1), {}).serving, (0, 1), 4, counts=counts)


def test_copies_asked_for_by_name_are_refused_where_they_do_not_fit() -> None:
    serving = even(4, (0, 1), {}).serving
    with pytest.raises(PlacementError, match="layer 3: 6 copies need as many slots, 2 ranks with 2 each have 4"):
        levelled(serving, (0, 1), 2, counts={(3, 0): 2, (3, 1): 2})
    with pytest.raises(PlacementError, match="layer 0: 4 experts need as many slots, 1 ranks with 3 each have 3"):
        levelled(serving, (0,), 3)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 4), (2, 3), (2, 5)])
def test_loads_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    serving = even(4, (0, 1), {}).serving
    for answer in (
        lambda: levelled(serving, (0, 1), 4, loads_LE=np.ones(shape)),
        lambda: solved(serving, (0, 1), 4, np.ones(shape)),
    ):
        with pytest.raises(ConfigError, match=r"loads must be \[layers, experts\]"):
            answer()


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_loads_that_are_no_loads_are_refused(value: float) -> None:
    loads = np.ones((2, 4))
    loads[1, 2] = value
    with pytest.raises(ConfigError, match=r"layer 1 expert 2: must be finite and >= 0, found"):
        levelled(even(4, (0, 1), {}).serving, (0, 1), 4, loads_LE=loads)


# -- solved


@untimed
@given(st.data(), cases())
def test_solved_uses_every_slot_that_can_hold_another_expert(data: st.DataObject, case: Case) -> None:
    loads = data.draw(loads_for(case))
    slots = data.draw(st.integers(1, case.held + 1))
    if len(case.ranks) * slots < case.experts:
        with pytest.raises(PlacementError, match=f"{case.experts} experts need as many slots"):
            solved(case.serving, case.ranks, slots, loads)
        return
    wanted = solved(case.serving, case.ranks, slots, loads)
    check(wanted, case, case.ranks, slots)
    for layer in LAYERS:
        assert set(per_rank(wanted, layer).values()) == {min(slots, case.experts)}


def test_solved_gives_the_hot_expert_the_copies() -> None:
    case = even(4, (0, 1, 2), {})
    wanted = solved(case.serving, case.ranks, 2, np.array([[90.0, 5.0, 5.0, 5.0], [5.0, 5.0, 5.0, 90.0]]))
    for layer, hot in ((0, 0), (3, 3)):
        assert Counter(home.expert for home in wanted.layers[layer])[hot] == 3


def test_solved_moves_little_where_ranks_hold_fewer_copies_than_they_shall() -> None:
    """7 experts on 3 ranks with room for 3 each: two slots are free, and nothing but them has to change."""
    case = even(7, (0, 1, 2), {})
    wanted = solved(case.serving, case.ranks, 3, np.full((2, 7), 10.0))
    for layer in LAYERS:
        assert moved(wanted, case, layer) <= 3


# -- as_given


def test_a_plan_that_is_given_is_taken_and_other_layers_stay() -> None:
    case = even(4, (0, 1), {})
    wanted = as_given(case.serving, {3: [(0, 1), (1, 1), (2, 0), (3, 0), (0, 0)]}, case.ranks)
    assert wanted.layers[3] == (Home(1, 0), Home(1, 1), Home(0, 2), Home(0, 3), Home(0, 0))
    assert wanted.layers[0] == tuple(Home(rank, expert) for expert, rank in case.homes[0])


@pytest.mark.parametrize(
    ("homes", "message"),
    [
        ({2: []}, r"layer must be one of \[0, 3\], found 2"),
        ({0: [(0, 2)]}, r"layer 0 expert 0: rank must be one of \[0, 1\], found 2"),
        ({0: [(4, 0)]}, r"layer 0: expert must be in \[0, 4\), found 4"),
        ({3: [(0, 0), (1, 0), (3, 1)]}, r"layer 3: logical experts without a slot: \[2\]"),
        ({0: [(0, 0), (1, 0), (2, 1), (3, 1), (2, 1)]}, "layer 0 expert 2: rank 1 must have at most 1 copy, found 2"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(homes: dict[int, list[tuple[int, int]]], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        as_given(even(4, (0, 1), {}).serving, homes, (0, 1))


def test_even_homes_are_the_start_rules() -> None:
    assert even_homes({0: 4}, (2, 5), {(0, 3): 2}) == {0: ((0, 2), (1, 2), (3, 2), (2, 5), (3, 5))}
    with pytest.raises(ConfigError, match=r"count must be in \[1, 2\]"):
        even_homes({0: 4}, (2, 5), {(0, 3): 3})
