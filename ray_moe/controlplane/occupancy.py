"""Which pool slot of which rank holds which expert, and which rank is to hold which: the two ends of a migration.

Bulk records with bare integers (global rank, pool slot, logical expert); what leaves the planner carries the typed
identities again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ray_moe.controlplane.moves import Copies, Ints
from ray_moe.controlplane.solve import Assignment
from ray_moe.errors import PlacementError
from ray_moe.placement import PlacementSnapshot


class Held(NamedTuple):
    """One pool slot of a layer and the expert in it."""

    rank: int
    pool_slot: int
    expert: int


class Home(NamedTuple):
    """One copy that a rank is to have, in whichever pool slot."""

    rank: int
    expert: int


@dataclass(frozen=True)
class Occupancy:
    """Verified copies of one checkpoint, by the model's layer index. Order within a layer is manifest order.

    Raises `PlacementError` for two experts in one pool slot and for numbers below 0.
    """

    layers: Mapping[int, tuple[Held, ...]]

    def __post_init__(self) -> None:
        for layer, slots in self.layers.items():
            if any(min(held) < 0 for held in slots):
                raise PlacementError(f"layer {layer}: ranks, pool slots and experts must be >= 0")
            if len({held[:2] for held in slots}) != len(slots):
                raise PlacementError(f"layer {layer}: two experts share a pool slot of one rank")

    @classmethod
    def of(cls, snapshot: PlacementSnapshot) -> Occupancy:
        """What a generation holds. `PlacementError` for slots that hold a part of an expert: whole experts move."""
        layers = {}
        for placement in snapshot.layers:
            for slot in placement.slots:
                if slot.shard.count != 1:
                    raise PlacementError(
                        f"layer {placement.layer} slot {slot.physical_slot_id} holds shard {slot.shard.index} of "
                        f"{slot.shard.count}: migration moves whole experts"
                    )
            layers[placement.layer] = tuple(
                Held(slot.destination_rank.value, slot.pool_slot, slot.logical_expert_id.value)
                for slot in placement.slots
            )
        return cls(layers)

    @classmethod
    def from_phy2log(
        cls, phy2log_LS: Sequence[Sequence[int]] | Ints, rank_of_slot: Sequence[int] | Ints, layers: Sequence[int] = ()
    ) -> Occupancy:
        """From a slot map; a rank's slots are its pool slots 0, 1, ... in slot order. `layers` default to 0 to L-1."""
        ranks = [int(rank) for rank in rank_of_slot]
        taken: Counter[int] = Counter()
        pool_slots = []
        for rank in ranks:
            pool_slots.append(taken[rank])
            taken[rank] += 1
        rows = np.asarray(phy2log_LS, np.int64).tolist()
        names = layers or range(len(rows))
        return cls(
            {layer: tuple(map(Held, ranks, pool_slots, experts)) for layer, experts in zip(names, rows, strict=True)}
        )

    def wanted(self) -> Wanted:
        """The same copies on the same ranks, pool slots left open."""
        return Wanted({layer: tuple(Home(h.rank, h.expert) for h in slots) for layer, slots in self.layers.items()})


@dataclass(frozen=True)
class Wanted:
    """What each rank is to hold: a multiset of experts per rank and layer, in manifest order."""

    layers: Mapping[int, tuple[Home, ...]]

    @classmethod
    def of(cls, assignment: Assignment) -> Wanted:
        """A solver's answer before pool slots are chosen."""
        return cls(
            {
                layer.layer: tuple(Home(rank.value, expert.value) for expert, rank in layer.homes)
                for layer in assignment.layers
            }
        )

    @classmethod
    def from_phy2log(
        cls, phy2log_LS: Sequence[Sequence[int]] | Ints, rank_of_slot: Sequence[int] | Ints, layers: Sequence[int] = ()
    ) -> Wanted:
        """From a slot map and the rank of each slot; `layers` default to 0 to L-1."""
        return Occupancy.from_phy2log(phy2log_LS, rank_of_slot, layers).wanted()

    @cached_property
    def copies(self) -> Copies:
        """All copies as arrays; layers are numbered 0, 1, ... in ascending order of the model's index."""
        return _arrays([[(h.rank, h.expert) for h in self.layers[layer]] for layer in sorted(self.layers)])


def copies_of(occupancy: Occupancy, layers: Sequence[int]) -> Copies:
    """The copies as arrays, `layers[i]` as layer i; other layers are left out."""
    return _arrays([[(h.rank, h.expert) for h in occupancy.layers.get(layer, ())] for layer in layers])


def _arrays(by_layer: list[list[tuple[int, int]]]) -> Copies:
    rows = np.array([(at, *pair) for at, pairs in enumerate(by_layer) for pair in pairs], np.int64).reshape(-1, 3)
    return Copies(rows[:, 0], rows[:, 1], rows[:, 2])
