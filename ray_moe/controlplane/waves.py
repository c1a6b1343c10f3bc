"""In which order copies arrive and old slots go, when a layer's spare slots do not hold all new copies at once.

One layer at a time, since pools are per layer. A wave fills free slots, is verified and published as a generation of
its own, and only then are slots freed that the published one does without. Every expert that was there keeps a copy in
every published generation, and an old copy is given up early only where its slot is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ray_moe.controlplane.occupancy import Held, Home

SEARCHED_COPIES = 24  # larger layers are not searched: the number of states grows with the subsets of new copies
SEARCH_LIMIT = 20_000  # states that a search visits before it gives up
PROBED_RANKS = 8  # waiting ranks for which one more slot is tried out


@dataclass(frozen=True)
class LayerChange:
    """What has to happen in one layer.

    `missing` copies in manifest order; `old` slots that the target does without and that no other generation uses;
    `free` pool slots by rank, ascending; `copies` of each expert in the published generation.
    """

    missing: tuple[Home, ...]
    old: tuple[Held, ...]
    free: Mapping[int, tuple[int, ...]]
    copies: Mapping[int, int]


@dataclass(frozen=True)
class Wave:
    """Slots to fill, and slots that the generation which is published then does without."""

    arrivals: tuple[Held, ...]
    departures: tuple[Held, ...]


@dataclass(frozen=True)
class NoOrder:
    """No order was found; `exhaustive` tells that there is none. `waiting` maps ranks to copies that cannot arrive."""

    exhaustive: bool
    waiting: Mapping[int, int]


def order_waves(change: LayerChange) -> tuple[Wave, ...] | NoOrder:
    """Waves that end at the target; one wave whenever the free slots suffice, none when nothing changes."""
    if not change.missing and not change.old:
        return ()
    waves = _greedy(change)
    if not isinstance(waves, NoOrder):
        return waves
    steps = _search(change)
    return _grouped(change, steps) if steps else NoOrder(steps is not None, waves.waiting)


def spare_slots_needed(change: LayerChange) -> dict[int, int]:
    """Extra pool slots by rank that are enough where copies get stuck, empty where they do not.

    One on one of the waiting ranks where that is seen to do, else one on each, else what a single wave takes.
    """
    stuck = _greedy(change)
    if not isinstance(stuck, NoOrder):
        return {}
    missing = Counter(home.rank for home in change.missing)
    short = {rank: missing[rank] - len(change.free.get(rank, ())) for rank in sorted(stuck.waiting)}
    attempts = [*({rank: 1} for rank in tuple(short)[:PROBED_RANKS]), dict.fromkeys(short, 1)]
    for extra in attempts:
        if not isinstance(_greedy(_with_spare(change, extra)), NoOrder):
            return extra
    return {
        rank: missing[rank] - len(change.free.get(rank, ()))
        for rank in sorted(missing)
        if missing[rank] > len(change.free.get(rank, ()))
    }


def _with_spare(change: LayerChange, extra: Mapping[int, int]) -> LayerChange:
    """As if the ranks had more pool slots; the numbers of the slots only have to be new."""
    free = dict(change.free)
    beyond = (
        1
        + max((held.pool_slot for held in change.old), default=0)
        + max(map(max, filter(None, free.values())), default=0)
    )
    for rank, count in extra.items():
        free[rank] = (*free.get(rank, ()), *range(beyond, beyond + count))
    return LayerChange(change.missing, change.old, free, change.copies)


# -- All at once where there is room, else as much as fits


class _Room:
    """The state between waves: free slots, what is missing and old by rank, copies published by expert."""

    def __init__(self, change: LayerChange) -> None:
        self.free = {rank: list(slots) for rank, slots in change.free.items()}
        self.missing: dict[int, list[int]] = {}
        for home in change.missing:
            self.missing.setdefault(home.rank, []).append(home.expert)
        self.old: dict[int, list[Held]] = {}
        for held in change.old:
            self.old.setdefault(held.rank, []).append(held)
        self.copies = Counter(change.copies)

    def short(self, rank: int) -> int:
        """Slots that `rank` lacks for what it still misses."""
        return len(self.missing.get(rank, ())) - len(self.free.get(rank, ()))

    def fits(self) -> bool:
        return all(self.short(rank) <= 0 for rank in self.missing)

    def fill(self, rank: int, expert: int) -> Held:
        """The lowest free slot of the rank takes the expert."""
        self.missing[rank].remove(expert)
        self.copies[expert] += 1
        return Held(rank, self.free[rank].pop(0), expert)

    def give_up(self, held: Held) -> Held:
        self.old[held.rank].remove(held)
        self.copies[held.expert] -= 1
        return held

    def freed(self, departures: Iterable[Held]) -> None:
        for held in departures:
            self.free.setdefault(held.rank, []).append(held.pool_slot)
            self.free[held.rank].sort()

    def last(self) -> Wave:
        arrivals = [self.fill(rank, expert) for rank in self.missing for expert in tuple(self.missing[rank])]
        return Wave(tuple(arrivals), tuple(held for rank in self.old for held in self.old[rank]))


def _greedy(change: LayerChange) -> tuple[Wave, ...] | NoOrder:
    room = _Room(change)
    waves: list[Wave] = []
    while not room.fits():
        arrivals = []
        unlocks = _unlocks(room)
        for rank, missing in room.missing.items():
            count = min(len(missing), len(room.free.get(rank, ())))
            first = sorted(missing, key=lambda expert: -unlocks[expert])[:count] if count else ()
            arrivals += [room.fill(rank, expert) for expert in first]
        departures = []
        for rank in room.missing:
            for _ in range(room.short(rank)):
                spare = [held for held in room.old.get(rank, ()) if room.copies[held.expert] > 1]
                if not spare:
                    break
                departures.append(room.give_up(max(spare, key=lambda held: room.copies[held.expert])))
        if not arrivals and not departures:
            return NoOrder(
                False, {rank: len(missing) for rank, missing in room.missing.items() if room.short(rank) > 0}
            )
        room.freed(departures)
        waves.append(Wave(tuple(arrivals), tuple(departures)))
    return (*waves, room.last())


def _unlocks(room: _Room) -> Counter[int]:
    """By expert: how many slots, on ranks that lack room, can be freed once one more copy of it has arrived."""
    return Counter(
        held.expert
        for rank, slots in room.old.items()
        if room.short(rank) > 0
        for held in slots
        if room.copies[held.expert] == 1
    )


# -- Where that gets stuck: a depth-first search over single arrivals and departures

_Step = tuple[str, int, int]  # "fill" or "free", rank, expert


def _search(change: LayerChange) -> list[_Step] | None:
    """Steps after which the rest fits at once; an empty list when there is none, None when that is open."""
    if len(change.missing) > SEARCHED_COPIES:
        return None
    ranks = sorted({home.rank for home in change.missing})
    missing = {rank: Counter(h.expert for h in change.missing if h.rank == rank) for rank in ranks}
    old = {rank: Counter(h.expert for h in change.old if h.rank == rank) for rank in ranks}
    free = {rank: len(change.free.get(rank, ())) for rank in ranks}
    copies = Counter(change.copies)
    path: list[_Step] = []
    seen: set[tuple[tuple[int, ...], ...]] = set()

    def state() -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(table[rank].elements())) for table in (missing, old) for rank in ranks)

    def moves() -> list[_Step]:
        blocked = [rank for rank in ranks if missing[rank].total() > free[rank]]
        if not blocked:
            return []
        harmless = [("fill", r, e) for r in ranks if r not in blocked for e in missing[r] if missing[r][e]]
        if harmless:  # the rank has room for all that it misses, so an arrival there takes nothing from anyone
            return harmless[:1]
        fills = [("fill", r, e) for r in blocked if free[r] for e in missing[r] if missing[r][e]]
        return fills + [("free", r, e) for r in blocked for e in old[r] if old[r][e] and copies[e] > 1]

    def take(step: _Step, sign: int) -> None:
        kind, rank, expert = step
        fill = kind == "fill"
        (missing if fill else old)[rank][expert] -= sign
        free[rank] += -sign if fill else sign
        copies[expert] += sign if fill else -sign

    seen.add(state())
    trail = [moves()]
    while trail:
        if all(missing[rank].total() <= free[rank] for rank in ranks):
            return path
        if not trail[-1]:
            trail.pop()
            if path:
                take(path.pop(), -1)
            continue
        step = trail[-1].pop()
        take(step, 1)
        if state() in seen:
            take(step, -1)
            continue
        seen.add(state())
        if len(seen) > SEARCH_LIMIT:
            return None
        path.append(step)
        trail.append(moves())
    return []


def _grouped(change: LayerChange, steps: list[_Step]) -> tuple[Wave, ...]:
    """Consecutive arrivals, then consecutive departures, make a wave."""
    room = _Room(change)
    waves: list[Wave] = []
    arrivals: list[Held] = []
    departures: list[Held] = []
    for kind, rank, expert in steps:
        if kind == "fill":
            if departures:
                room.freed(departures)
                waves.append(Wave(tuple(arrivals), tuple(departures)))
                arrivals, departures = [], []
            arrivals.append(room.fill(rank, expert))
        else:
            departures.append(room.give_up(next(held for held in room.old[rank] if held.expert == expert)))
    room.freed(departures)
    waves.append(Wave(tuple(arrivals), tuple(departures)))
    return (*waves, room.last())
