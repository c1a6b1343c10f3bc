"""Room for copies, and which expert each slot holds (specification 0x08C3), for ranks with any number of slots.

Letters: L layers, E experts, S slots, G ranks, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.eplb import ExpertMaps
from ray_moe.errors import ConfigError

Int64 = NDArray[np.int64]
Tally = NDArray[np.int16]
SLOT_RULE = "copies of an expert are numbered in the order of their slots; arithmetic: float64"


@dataclass(frozen=True)
class Shape:
    """Slots of each rank, and the node each rank is on. Slots are numbered rank by rank.

    Raises `ConfigError` for lists of two lengths, for negative counts or nodes, and where no rank has a slot.
    """

    slots_by_rank: tuple[int, ...]
    node_of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.slots_by_rank) != len(self.node_of_rank):
            raise ConfigError(
                f"slots_by_rank and node_of_rank must name the same ranks, "
                f"found {len(self.slots_by_rank)} and {len(self.node_of_rank)}"
            )
        for name, values in (("slots_by_rank", self.slots_by_rank), ("node_of_rank", self.node_of_rank)):
            if any(value < 0 for value in values):
                raise ConfigError(f"{name} must be >= 0, found {min(values)}")
        if not sum(self.slots_by_rank):
            raise ConfigError("slots_by_rank must hold at least one slot, found 0")

    @staticmethod
    def even(num_slots: int, num_ranks: int, num_nodes: int = 1) -> Shape:
        """Slots over ranks, and ranks over nodes, contiguously; where they do not divide the first ones have one more.

        Raises `ConfigError` for fewer ranks than nodes, fewer slots than ranks, or less than one node.
        """
        if not 1 <= num_nodes <= num_ranks <= num_slots:
            raise ConfigError(
                f"counts must be 1 <= nodes <= ranks <= slots, found {num_nodes}, {num_ranks} and {num_slots}"
            )
        nodes = np.repeat(np.arange(num_nodes), _dealt(num_ranks, num_nodes))
        return Shape(tuple(_dealt(num_slots, num_ranks)), tuple(nodes.tolist()))

    @property
    def num_slots(self) -> int:
        return sum(self.slots_by_rank)

    @property
    def num_ranks(self) -> int:
        return len(self.slots_by_rank)

    @property
    def num_nodes(self) -> int:
        """One more than the largest node; a node between without a rank has no slots."""
        return max(self.node_of_rank) + 1

    @property
    def is_uniform(self) -> bool:
        return len(set(self.slots_by_rank)) == 1

    @cached_property
    def rank_of_slot_S(self) -> Int64:
        return np.repeat(np.arange(self.num_ranks), self.slots_by_rank)

    @cached_property
    def node_of_rank_G(self) -> Int64:
        return np.array(self.node_of_rank, np.int64)

    @cached_property
    def slots_by_node_N(self) -> Int64:
        by_node = np.zeros(self.num_nodes, np.int64)
        np.add.at(by_node, self.node_of_rank_G, self.slots_by_rank)
        return by_node


@dataclass(frozen=True, eq=False)
class Placed:
    """Which expert each slot of each layer holds, [L, S]. Every expert has a slot in every layer.

    Raises `ConfigError` naming layer and expert for an expert without a slot, or an id outside [0, E).
    """

    shape: Shape
    num_experts: int
    phy2log_LS: Int64

    def __post_init__(self) -> None:
        held = self.phy2log_LS
        if held.ndim != 2 or held.shape[1] != self.shape.num_slots or not held.shape[0]:
            raise ConfigError(f"phy2log must be [layers, {self.shape.num_slots} slots], found {list(held.shape)}")
        if held.min() < 0 or held.max() >= self.num_experts:
            bad = held[(held < 0) | (held >= self.num_experts)][0]
            raise ConfigError(f"phy2log: experts must be in [0, {self.num_experts}), found {bad}")
        if not self.counts_LE.all():
            layer, expert = np.argwhere(self.counts_LE == 0)[0]
            raise ConfigError(f"phy2log: layer {layer} expert {expert} must have at least 1 slot, found 0")

    @staticmethod
    def of(maps: ExpertMaps, shape: Shape) -> Placed:
        """The pinned solver's maps; their slots are dealt to the ranks in order, as many each as `shape` says."""
        return Placed(shape, maps.logcnt_LE.shape[1], maps.phy2log_LS)

    @cached_property
    def counts_LE(self) -> Int64:
        """Copies of each expert."""
        return count(self.phy2log_LS, self.num_experts)

    def of_layers(self, layers: Int64) -> Placed:
        return Placed(self.shape, self.num_experts, self.phy2log_LS[layers])

    def with_layers(self, layers: Int64, phy2log_AS: Int64) -> Placed:
        """The same with other slot maps for some of its layers."""
        held = self.phy2log_LS.copy()
        held[layers] = phy2log_AS
        return Placed(self.shape, self.num_experts, held)

    def held_LEG(self) -> Tally:
        """Copies of each expert on each rank."""
        return tally(self.phy2log_LS, self.shape.rank_of_slot_S, self.num_experts, self.shape.num_ranks)

    def held_LEN(self) -> Tally:
        """Copies of each expert on each node."""
        node_S = self.shape.node_of_rank_G[self.shape.rank_of_slot_S]
        return tally(self.phy2log_LS, node_S, self.num_experts, self.shape.num_nodes)

    def to_maps(self) -> ExpertMaps:
        """All maps, for ranks that have equally many slots; raises `ConfigError` for others.

        The inverse is in offsets and values: the slots of layer l and expert e are
        `log2phy_values_LS[l, offsets[l, e]:offsets[l, e + 1]]`, ascending.
        """
        if not self.shape.is_uniform:
            raise ConfigError(
                f"maps without a shape need ranks with equally many slots, "
                f"found {min(self.shape.slots_by_rank)} to {max(self.shape.slots_by_rank)}"
            )
        offsets, values = self.replicas()
        phyrank = np.empty_like(values)
        first = np.take_along_axis(offsets, np.take_along_axis(self.phy2log_LS, values, axis=1), axis=1)
        np.put_along_axis(phyrank, values, np.arange(values.shape[1]) - first, axis=1)
        return ExpertMaps(self.phy2log_LS, phyrank, self.counts_LE, offsets, values, SLOT_RULE)

    def replicas(self) -> tuple[Int64, Int64]:
        """Slots of each expert as CSR: offsets [L, E + 1], and values [L, S] in ascending order for each expert."""
        offsets = np.zeros((len(self.phy2log_LS), self.num_experts + 1), np.int64)
        np.cumsum(self.counts_LE, axis=1, out=offsets[:, 1:])
        return offsets, np.argsort(self.phy2log_LS, axis=1, kind="stable")


def tally(phy2log_LS: Int64, place_S: Int64, num_experts: int, num_places: int) -> Tally:
    """[L, E, places]: copies of each expert in each place, where slot s is in place `place_S[s]`."""
    layers = len(phy2log_LS)
    copies = np.zeros((layers, num_experts, num_places), np.int16)
    at = (phy2log_LS + np.arange(layers)[:, None] * num_experts) * num_places + place_S
    np.add.at(copies.reshape(-1), at.ravel(), np.int16(1))
    return copies


def count(ids_LS: Int64, size: int) -> Int64:
    """[L, size]: how often each id occurs in each row."""
    layers = len(ids_LS)
    flat = ids_LS + np.arange(layers)[:, None] * size
    return np.bincount(flat.ravel(), minlength=layers * size).reshape(layers, size)


def _dealt(items: int, over: int) -> list[int]:
    share, more = divmod(items, over)
    return [share + (at < more) for at in range(over)]
