"""What other copies of experts would be worth: a level placement with them, its moves and its balance. Pure.

Letters: L layers, E experts, G peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.demand import Demand
from ray_moe.controlplane.elastic import levelled
from ray_moe.controlplane.publication import Storage
from ray_moe.errors import PlacementError
from ray_moe.placement import PlacementSnapshot

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Prospect:
    """A placement that is not there: `counts` copies by (layer, expert), `homes` (expert, rank) by layer, `moves`
    copies that would arrive, and the imbalance that would be left. Without homes there is no such placement.

    `key` says which question it answers.
    """

    key: tuple[object, ...]
    counts: Mapping[tuple[int, int], int]
    homes: Mapping[int, tuple[tuple[int, int], ...]]
    moves: int
    moved_bytes: int
    imbalance: float


def prospect_of(
    placement: PlacementSnapshot, storage: Storage, demand: Demand, counts_LE: Ints, known: Iterable[Prospect] = ()
) -> Prospect:
    """The level placement for `demand` with copies [L, E]; the one of `known` that answers the same question."""
    key = (placement.generation, demand.provenance.end, counts_LE.tobytes())
    for prospect in known:
        if prospect.key == key:
            return prospect
    layers, ranks = placement.layers, [rank.value for rank in placement.group.peers]
    counts_LE = np.minimum(counts_LE, len(ranks))  # a rank of its own for each copy
    counts = {
        (layer.layer, expert): count
        for layer, row in zip(layers, counts_LE.tolist(), strict=True)
        for expert, count in enumerate(row)
    }
    fits = counts_LE.sum(axis=1).max() <= len(ranks) * storage.room
    room = storage.room if fits else storage.capacity
    held_LEG = copies_held(placement)
    try:
        wanted = levelled(placement, ranks, room, counts=counts, loads_LE=demand.loads_LE)
    except PlacementError:  # these copies find no seats: there is nothing that a move could bring
        return Prospect(key, {}, {}, 0, 0, imbalance_of(demand.loads_LE, held_LEG))
    seat, target_LEG = {rank: at for at, rank in enumerate(ranks)}, np.zeros_like(held_LEG)
    for at, layer in enumerate(layers):
        for home in wanted.layers[layer.layer]:
            target_LEG[at, home.expert, seat[home.rank]] += 1
    moves = int(np.maximum(target_LEG - held_LEG, 0).sum())
    homes = {at: tuple((home.expert, home.rank) for home in found) for at, found in wanted.layers.items()}
    bytes_moved = moves * storage.expert_bytes
    return Prospect(key, counts, homes, moves, bytes_moved, imbalance_of(demand.loads_LE, target_LEG))


def copies_held(placement: PlacementSnapshot) -> Ints:
    """[L, E, G]: copies of each expert on each peer."""
    seat = {rank.value: at for at, rank in enumerate(placement.group.peers)}
    experts = max(layer.num_logical_experts for layer in placement.layers)
    held_LEG = np.zeros((len(placement.layers), experts, len(seat)), np.int64)
    for at, layer in enumerate(placement.layers):
        np.add.at(held_LEG[at], (np.array(layer.phy2log), np.array([seat[rank] for rank in layer.physical_rank])), 1)
    return held_LEG


def imbalance_of(loads_LE: Floats, held_LEG: Ints) -> float:
    """Largest over mean rank load, each layer by its load: layers run one after the other, each as long as its fullest
    rank. A load is split evenly over an expert's copies; 1 without any load."""
    share_LE = loads_LE / np.maximum(held_LEG.sum(axis=2), 1)
    rank_LG = np.einsum("le,leg->lg", share_LE, held_LEG)
    mean = float(rank_LG.mean(axis=1).sum())
    return max(1.0, float(rank_LG.max(axis=1).sum()) / mean) if mean > 0 else 1.0
