"""Where copies shall live when ranks come or go, or when other copy counts are wanted: few moves, then even loads.

Pure. `levelled` keeps what is in place wherever that is compatible with level ranks; `solved` asks the solver that
weighs balance against moves, for the ranks there are; `as_given` takes somebody's own plan. All give a `Wanted`, which
`ray_moe.controlplane.migrate` brings about wave by wave. Letters: L layers, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.objective import checked_loads
from ray_moe.controlplane.occupancy import Home, Wanted
from ray_moe.controlplane.placed import Placed, Shape
from ray_moe.controlplane.planning import Problem, objective_of, place
from ray_moe.controlplane.solve import balanced
from ray_moe.errors import ConfigError, PlacementError
from ray_moe.identity import GlobalRank
from ray_moe.placement import LayerPlacement, PlacementSnapshot

# How many times per copy levelling may move one: each move lowers the fullest of two ranks, so few are ever needed.
_MOVES_PER_COPY = 4

Loads = NDArray[np.float64]


def levelled(
    serving: PlacementSnapshot,
    ranks: Sequence[int],
    room: int,
    *,
    counts: Mapping[tuple[int, int], int] | None = None,
    loads_LE: Loads | None = None,
) -> Wanted:
    """Every copy on one of `ranks`, at most `room` of a layer on each, loads level, as few moved as that takes.

    `counts[layer, expert]` are copies wanted in all; experts that it does not name keep what they have, as far as there
    are ranks and room. A copy carries its expert's load / copies; without `loads_LE` (rows in the order of the layers)
    all experts count the same. Raises `PlacementError` naming layer, needed and available when the experts do not fit,
    `ConfigError` for more copies than ranks, a layer or an expert that is not there, and loads of another shape.
    """
    _require_known(serving, counts or {})
    if loads_LE is not None:
        _require_loads(serving, loads_LE)
    layers = {}
    for at, placement in enumerate(serving.layers):
        loads = np.ones(placement.num_logical_experts) if loads_LE is None else loads_LE[at]
        wanted = _counts(placement, ranks, room, counts)
        layers[placement.layer] = _Levelling(placement, ranks, room, wanted, loads).homes()
    return Wanted(layers)


def solved(serving: PlacementSnapshot, ranks: Sequence[int], slots_per_rank: int, loads_LE: Loads) -> Wanted:
    """The migration-aware solver's answer with every rank's `slots_per_rank` in use, layer by layer.

    Copies follow the loads, at most one of an expert on each rank. Raises `ConfigError` for loads of another shape,
    `PlacementError` when the experts do not fit, and what the solver raises.
    """
    _require_loads(serving, loads_LE)
    node_of = {domain: number for number, domain in enumerate(dict.fromkeys(serving.topology.owner.values()))}
    owner = {rank.value: node_of[domain] for rank, domain in serving.topology.owner.items()}
    layers = {}
    for at, placement in enumerate(serving.layers):
        slots = min(slots_per_rank, placement.num_logical_experts)
        shape = Shape(tuple(slots for _ in ranks), tuple(owner[rank] for rank in ranks))
        problem = Problem(
            loads_LE[at : at + 1],
            shape,
            groups=1,
            objective=objective_of("migration", 1, "rank", None, None),
            prior=_in_place(placement, ranks, shape, loads_LE[at]),
        )
        phy2log = place(problem, "migration").placed.phy2log_LS[0].tolist()
        layers[placement.layer] = tuple(Home(ranks[slot // slots], expert) for slot, expert in enumerate(phy2log))
    return Wanted(layers)


def as_given(
    serving: PlacementSnapshot, homes: Mapping[int, Iterable[tuple[int, int]]], ranks: Sequence[int]
) -> Wanted:
    """`homes[layer]` are (expert, rank) pairs; a layer that is not named stays as it is.

    Raises `PlacementError` for a layer or rank that is not there, an expert out of range, without a copy, or twice on
    one rank.
    """
    known = {placement.layer: placement for placement in serving.layers}
    layers = {}
    for layer in homes:
        if layer not in known:
            raise PlacementError(f"layer must be one of {sorted(known)}, found {layer}")
    for layer, placement in known.items():
        if layer not in homes:
            layers[layer] = _homes_of(placement)
            continue
        pairs = tuple(homes[layer])
        for expert, rank in pairs:
            if rank not in ranks:
                raise PlacementError(f"layer {layer} expert {expert}: rank must be one of {list(ranks)}, found {rank}")
            if not 0 <= expert < placement.num_logical_experts:
                raise PlacementError(
                    f"layer {layer}: expert must be in [0, {placement.num_logical_experts}), found {expert}"
                )
        for (expert, rank), count in Counter(pairs).items():
            if count > 1:
                raise PlacementError(
                    f"layer {layer} expert {expert}: rank {rank} must have at most 1 copy, found {count}"
                )
        missing = set(range(placement.num_logical_experts)) - {expert for expert, _ in pairs}
        if missing:
            raise PlacementError(f"layer {layer}: logical experts without a slot: {sorted(missing)}")
        layers[layer] = tuple(Home(rank, expert) for expert, rank in pairs)
    return Wanted(layers)


def even_homes(
    num_experts_by_layer: Mapping[int, int], ranks: Sequence[int], replicas: Mapping[tuple[int, int], int]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """The start rule's placement (`solve.balanced`), (expert, rank) pairs by layer. Raises `ConfigError` as it does."""
    seats = tuple(map(GlobalRank, ranks))
    assignment = balanced(num_experts_by_layer, seats, replicas=replicas, spare_slots=0)
    return {
        layer.layer: tuple((expert.value, rank.value) for expert, rank in layer.homes) for layer in assignment.layers
    }


# -- Details


def _require_known(serving: PlacementSnapshot, counts: Iterable[tuple[int, int]]) -> None:
    experts = {placement.layer: placement.num_logical_experts for placement in serving.layers}
    for layer, expert in counts:
        if layer not in experts:
            raise ConfigError(f"replicas: layer must be one of {sorted(experts)}, found {layer}")
        if not 0 <= expert < experts[layer]:
            raise ConfigError(f"replicas: expert of layer {layer} must be in [0, {experts[layer]}), found {expert}")


def _require_loads(serving: PlacementSnapshot, loads_LE: Loads) -> None:
    for placement in serving.layers:
        checked_loads(loads_LE, placement.num_logical_experts, len(serving.layers))


def _homes_of(placement: LayerPlacement) -> tuple[Home, ...]:
    return tuple(Home(slot.destination_rank.value, slot.logical_expert_id.value) for slot in placement.slots)


def _in_place(placement: LayerPlacement, ranks: Sequence[int], shape: Shape, loads: Loads) -> Placed:
    """What is there as the solver sees it, as little changed as `shape` takes. The slots that a rank is to have besides
    are counted as the heaviest experts': whatever comes there moves."""
    room = shape.slots_by_rank[0]
    fitted = _Levelling(placement, ranks, room, _counts(placement, ranks, room, None), loads, level=False)
    heaviest = sorted(range(placement.num_logical_experts), key=lambda expert: (-loads[expert], expert))
    experts: list[int] = []
    for rank in ranks:
        there = [home.expert for home in fitted.homes() if home.rank == rank]
        others = [expert for expert in heaviest if expert not in there]
        experts += there + others[: room - len(there)]
    return Placed(shape, placement.num_logical_experts, np.array([experts], np.int64))


def _counts(
    placement: LayerPlacement, ranks: Sequence[int], room: int, asked: Mapping[tuple[int, int], int] | None
) -> list[int]:
    """Copies of each expert: those asked for; else those there are, fewer where they find no room."""
    layer, experts = placement.layer, placement.num_logical_experts
    available = len(ranks) * room
    if experts > available:
        raise PlacementError(
            f"layer {layer}: {experts} experts need as many slots, {len(ranks)} ranks with {room} each have {available}"
        )
    copies = Counter(placement.phy2log)
    counts = [min(copies[expert], len(ranks)) for expert in range(experts)]
    named = set()
    for (at, expert), count in (asked or {}).items():
        if at != layer:
            continue
        if not 1 <= count <= len(ranks):
            raise ConfigError(
                f"replicas: layer {layer} expert {expert}: count must be in [1, {len(ranks)}], as every copy needs a "
                f"rank of its own, found {count}"
            )
        counts[expert] = count
        named.add(expert)
    # Copies that nobody asked for by name go first, from the experts that have the most.
    while sum(counts) > available:
        loose = [expert for expert in range(experts) if counts[expert] > 1 and expert not in named]
        if not loose:
            raise PlacementError(
                f"layer {layer}: {sum(counts)} copies need as many slots, {len(ranks)} ranks with {room} each have "
                f"{available}"
            )
        counts[max(loose, key=lambda expert: (counts[expert], expert))] -= 1
    return counts


class _Levelling:
    """One layer: experts by rank, and the load of each rank."""

    def __init__(
        self,
        placement: LayerPlacement,
        ranks: Sequence[int],
        room: int,
        counts: Sequence[int],
        loads: Loads,
        *,
        level: bool = True,
    ) -> None:
        self._ranks, self._room = list(ranks), room
        # A little for every copy, so that ranks level their slots where loads say nothing.
        floor = max(float(loads.sum()), 1.0) / (1000 * len(counts))
        self._share = [(float(load) / count) + floor for load, count in zip(loads, counts, strict=True)]
        self._on: dict[int, list[int]] = {rank: [] for rank in ranks}
        for home in _homes_of(placement):
            if home.rank in self._on and home.expert not in self._on[home.rank]:
                self._on[home.rank].append(home.expert)
        self._trim(counts)
        self._complete(counts)
        self._level(even=level)

    def homes(self) -> tuple[Home, ...]:
        return tuple(Home(rank, expert) for rank in self._ranks for expert in sorted(self._on[rank]))

    def _load(self, rank: int) -> float:
        return sum(self._share[expert] for expert in self._on[rank])

    def _holders(self, expert: int) -> list[int]:
        return [rank for rank in self._ranks if expert in self._on[rank]]

    def _trim(self, counts: Sequence[int]) -> None:
        for expert, count in enumerate(counts):
            for _ in range(len(self._holders(expert)) - count):
                fullest = max(self._holders(expert), key=lambda rank: (self._load(rank), rank))
                self._on[fullest].remove(expert)

    def _complete(self, counts: Sequence[int]) -> None:
        """Copies that are missing, heaviest first, each to the rank with the least load that has none of its expert."""
        missing = [expert for expert, count in enumerate(counts) for _ in range(count - len(self._holders(expert)))]
        for expert in sorted(missing, key=lambda expert: (-self._share[expert], expert)):
            open_to = [
                rank for rank in self._ranks if expert not in self._on[rank] and len(self._on[rank]) < self._room
            ]
            if not open_to:
                self._make_way(expert)
                continue
            lightest = min(open_to, key=lambda rank: (self._load(rank), len(self._on[rank]), rank))
            self._on[lightest].append(expert)

    def _make_way(self, expert: int) -> None:
        """Ranks with room all have a copy: one of them takes over another expert from a rank that has none.

        There is one: copies that are still missing leave room somewhere, and a rank with room lacks an expert of any
        rank without.
        """
        for giver in self._ranks:
            if expert in self._on[giver]:
                continue
            for other in list(self._on[giver]):
                for taker in self._ranks:
                    if len(self._on[taker]) < self._room and other not in self._on[taker]:
                        self._on[giver].remove(other)
                        self._on[taker].append(other)
                        self._on[giver].append(expert)
                        return
        raise AssertionError(f"no rank can take a copy of expert {expert}: {self._on}, {self._room} slots each")

    def _level(self, *, even: bool) -> None:
        total = sum(map(len, self._on.values()))
        for _ in range(_MOVES_PER_COPY * total):
            if not (self._move(over_room=True) or (even and self._move(over_room=False))):
                return

    def _move(self, *, over_room: bool) -> bool:
        """One copy from a full rank to the lightest that can take it; only where that makes the fuller one lighter."""
        givers = sorted(self._ranks, key=lambda rank: (-self._load(rank), rank))
        if over_room:
            givers = [rank for rank in givers if len(self._on[rank]) > self._room]
        for giver in givers[:1]:
            for taker in sorted(self._ranks, key=lambda rank: (self._load(rank), rank)):
                gap = self._load(giver) - self._load(taker)
                if taker == giver or len(self._on[taker]) >= self._room:
                    continue
                movable = [
                    expert
                    for expert in self._on[giver]
                    if expert not in self._on[taker] and (over_room or self._share[expert] < gap * (1 - 1e-9))
                ]
                if movable:
                    best = min(movable, key=lambda expert: (abs(gap / 2 - self._share[expert]), expert))
                    self._on[giver].remove(best)
                    self._on[taker].append(best)
                    return True
        return False
