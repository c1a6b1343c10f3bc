"""What a rebalance would take: the same plan, bytes and peak as the operation that does it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from ray_moe.controlplane.effects import Observed
from ray_moe.controlplane.operations import ByCounts, ByHomes, ByLoads, Kind, Operation, Stage, Target
from ray_moe.controlplane.preview import LayerPreview, preview
from ray_moe.controlplane.publication import Storage, candidate_of, plan_waves
from ray_moe.errors import ConfigError, PlacementError
from ray_moe.placement import PlacementSnapshot
from tests.layers import placement, spec_of, untimed
from tests.unit.reconciling import memory_peak

SIZE = 100
# Two ranks with two of four experts each, as (expert, rank).
HALVES = ((0, 0), (1, 0), (2, 1), (3, 1))
SWAPPED = ((2, 0), (3, 0), (0, 1), (1, 1))
LOADS_LE = np.array([[6.0, 2.0, 1.0, 1.0]])


def active(homes: Sequence[tuple[int, int]] = HALVES, ranks: Sequence[int] = (0, 1)) -> PlacementSnapshot:
    return placement(homes, spec_of(ranks), generation=3, domains={rank: f"node-{rank // 2}" for rank in ranks})


def peak_of_the_operation(target: Target, serving: PlacementSnapshot, storage: Storage) -> int:
    """Oracle: the reconciler's own figure, wave after wave, each generation retired before the next wave begins."""
    operation = Operation(1, Kind.REBALANCE, "", "", 0.0, Stage.FILLING, target=target)
    ranks = tuple(rank.value for rank in serving.group.peers)
    peak = memory_peak(operation, Observed({}, (serving,)), storage)
    for wave in plan_waves(operation, serving, storage, serving.topology):
        candidate = candidate_of(wave, serving, ranks=ranks, epoch=0, topology=serving.topology)
        now = Operation(1, Kind.REBALANCE, "", "", 0.0, Stage.FILLING, target=target, candidate=candidate)
        peak = max(peak, memory_peak(now, Observed({}, (serving,)), storage))
        serving = candidate
    return peak


def test_one_more_copy_is_one_slot_filled_from_the_same_node_and_evens_out_the_load() -> None:
    found = preview(ByCounts({(0, 0): 2}), active(), Storage(3, 0, SIZE), LOADS_LE)
    # Rank 0 carries 6 + 2 of 10, then 3 + 2: the mean is 5 both times.
    assert found.layers == (LayerPreview(0, slots=5, moved=1, freed=0, balance_before=1.6, balance_after=1.0),)
    assert (found.generation, found.waves) == (3, 1)
    assert {kind: count for kind, count in found.copies.items() if count} == {"keep": 4, "same_node": 1}
    assert {kind: amount for kind, amount in found.payload_bytes.items() if amount} == {"same_node": SIZE}
    assert (found.resident_bytes, found.peak_resident_bytes, found.target_resident_bytes) == (400, 500, 500)


def test_what_moves_across_nodes_is_told_apart() -> None:
    found = preview(ByHomes({0: ((0, 0), (1, 0), (2, 2), (3, 2))}), active(ranks=(0, 1, 2)), Storage(3, 0, SIZE))
    assert {kind: count for kind, count in found.copies.items() if count} == {"keep": 2, "cross_node": 2}


def test_what_is_in_place_takes_nothing() -> None:
    found = preview(ByHomes({0: HALVES}), active(), Storage(3, 1, SIZE))
    assert (found.waves, sum(found.payload_bytes.values()), found.peak_resident_bytes) == (0, 0, 400)
    assert found.layers == (LayerPreview(0, slots=4, moved=0, freed=0, balance_before=None, balance_after=None),)


def test_where_spare_slots_do_not_hold_all_copies_it_takes_waves_and_each_slot_counts_once() -> None:
    target, storage = ByHomes({0: SWAPPED}), Storage(3, 1, SIZE)
    found = preview(target, active(), storage)
    assert found.waves > 1
    assert (found.layers[0].moved, found.layers[0].freed) == (4, 4)
    assert found.peak_resident_bytes == peak_of_the_operation(target, active(), storage) == 600


def test_the_solvers_demand_is_also_what_balance_is_told_by() -> None:
    found = preview(ByLoads(LOADS_LE), active(), Storage(4, 1, SIZE))
    assert found.layers[0].balance_before == 1.6
    assert found.layers[0].balance_after is not None
    assert found.layers[0].balance_after < 1.6


def test_what_cannot_be_is_refused_as_the_operation_would_be() -> None:
    with pytest.raises(PlacementError, match="no order exists"):
        preview(ByHomes({0: SWAPPED}), active(), Storage(2, 0, SIZE))
    with pytest.raises(PlacementError, match=r"rank must be one of \[0, 1\], found 2"):
        preview(ByHomes({0: ((0, 2), (1, 0), (2, 1), (3, 1))}), active(), Storage(3, 0, SIZE))
    with pytest.raises(ConfigError, match=r"layer 0 expert 0: count must be in \[1, 2\].*found 3"):
        preview(ByCounts({(0, 0): 3}), active(), Storage(3, 0, SIZE))


HOMES = st.lists(st.integers(0, 2), min_size=4, max_size=4).map(lambda ranks: tuple(enumerate(ranks)))


@given(HOMES, HOMES, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=2, unique=True))
@untimed
def test_copies_slots_and_peak_agree_with_the_plan(
    before: tuple[tuple[int, int], ...], after: tuple[tuple[int, int], ...], more: list[tuple[int, int]]
) -> None:
    serving = active(before, (0, 1, 2))
    target = ByHomes({0: tuple(dict.fromkeys((*after, *more)))})
    storage = Storage(4, 1, SIZE)
    try:
        found = preview(target, serving, storage)
    except PlacementError:
        reject()
    (layer,) = found.layers
    assert found.copies["keep"] + layer.moved == layer.slots == sum(found.copies.values())
    assert layer.moved - layer.freed == layer.slots - len(before)
    assert sum(found.payload_bytes.values()) == layer.moved * SIZE
    assert found.peak_resident_bytes == peak_of_the_operation(target, serving, storage)
