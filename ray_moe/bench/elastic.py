"""A live cluster that changes under streaming clients: placements, and ranks that come and go; nobody may notice.

    python -m ray_moe.bench elastic [--rebalances N] [--cycles N]

Two clusters of the embedded model, one after the other: `rebalances` on two ranks, then `cycles` of two ranks growing
to four and two random ones of these leaving. Windows in which something changes alternate with control windows in which
nothing does, in the same cluster and under the same load, so that the machine's noise meets both alike. All times are
one client process's own. Every token is compared with a rehearsal on a placement that stood still.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import ray
from ray.exceptions import RayError

from ray_moe import cluster as clusters
from ray_moe.bench.elastic_load import Load, Script, Stream, rehearsed, scripts
from ray_moe.bench.elastic_resident import Change, Sample, settled
from ray_moe.bench.elastic_seen import CONTROL, Window
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import Operation
from ray_moe.errors import RayMoEError
from ray_moe.models import TINY_MOE
from ray_moe.placement import PlacementSnapshot
from ray_moe.sdk import Client

FEWEST, MOST = 2, 4
INTERRUPTED = "interrupted"
# What belongs to a change and comes after its operation has ended: the old generation retires, its slots are freed.
_TAIL_S = 0.3
_OPERATION_S, _DECODING_S = 180.0, 60.0


@dataclass(frozen=True)
class Size:
    """How much load, and how many changes. `lengths` are those of streams in tokens; a control window of a resize lasts
    `control_s`, one of a rebalance as long as the rebalance before it. A change begins when `decoding` streams have
    `left` tokens to come at least."""

    rebalances: int = 100
    cycles: int = 50
    seats: int = 12
    decoding: int = 8
    left: int = 64
    lengths: tuple[int, int] = (200, 600)
    control_s: float = 5.0
    seed: int = 0


@dataclass(frozen=True)
class Event:
    """One change, as it ended. `moved_requests` were open on ranks that left; `peaks` are by rank the most bytes of
    slots so far, (what plans needed, what the pools held)."""

    what: str
    operation: Operation
    seconds: float
    change: Change | None
    peaks: Mapping[int, tuple[int, int]]
    moved_requests: int = 0


@dataclass
class Course:
    """Everything that one phase gave. `stopped_by` says why it ended early."""

    name: str
    size: Size
    asked: int
    config: ClusterConfig
    scripts: Sequence[Script]
    origin: float
    streams: list[Stream] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    epoch_of: dict[int, int] = field(default_factory=dict)
    stopped_by: str = ""


Say = Callable[[str], None]


def measure(size: Size, say: Say = lambda line: print(line, file=sys.stderr, flush=True)) -> Iterator[Course]:
    """Both phases, each on a cluster of its own; the second's tokens are compared with the first one's rehearsal."""
    ray.init(
        address="local",
        namespace="ray_moe",
        num_cpus=MOST,
        object_store_memory=200 * 1024**2,
        include_dashboard=False,
        log_to_driver=False,
    )
    known: tuple[Script, ...] = ()
    try:
        for config, course, rounds in (
            (rebalance_config(), run_rebalances, size.rebalances),
            (resize_config(), run_resizes, size.cycles),
        ):
            if not rounds:
                continue
            with running(config) as cluster:
                known = known or rehearse(cluster, size)
                yield (done := course(cluster, known, size, say))
            if done.stopped_by == INTERRUPTED:
                return
    finally:
        ray.shutdown()


def rebalance_config(name: str = "bench-rebalance") -> ClusterConfig:
    """Room for every expert of a layer to move at once: as many spare slots as a rank holds."""
    return ClusterConfig(
        name=name, model=TINY_MOE, peers=FEWEST, max_peers=MOST, spare_slots=8, kv_blocks=1024, request_deadline_s=120
    )


def resize_config(name: str = "bench-resize") -> ClusterConfig:
    return ClusterConfig(
        name=name,
        model=TINY_MOE,
        peers=FEWEST,
        min_peers=FEWEST,
        max_peers=MOST,
        spare_slots=2,
        kv_blocks=1024,
        request_deadline_s=120,
    )


@contextmanager
def running(config: ClusterConfig) -> Iterator[Cluster]:
    cluster = clusters.start(config)
    try:
        yield cluster
    finally:
        cluster.stop()


def rehearse(cluster: Cluster, size: Size) -> tuple[Script, ...]:
    """Scripts with the tokens that the cluster's placement gives them; nothing else runs."""
    directory = cluster.directory()
    asked = scripts(size.seats, size.lengths[1], directory.facts.vocab_size, size.seed)
    return asyncio.run(rehearsed(Client(directory), asked))


# -- The two phases


def run_rebalances(cluster: Cluster, known: Sequence[Script], size: Size, say: Say) -> Course:
    return asyncio.run(_Phase(cluster, "rebalance", size.rebalances, known, size, say).run(_Phase.rebalance))


def run_resizes(cluster: Cluster, known: Sequence[Script], size: Size, say: Say) -> Course:
    return asyncio.run(_Phase(cluster, "resize", size.cycles, known, size, say).run(_Phase.cycle))


class _Phase:
    """One phase while it runs: rounds of changes and controls under one load. Cluster calls block: on other threads."""

    def __init__(self, cluster: Cluster, name: str, rounds: int, known: Sequence[Script], size: Size, say: Say) -> None:
        directory = cluster.directory()
        self._cluster, self._size, self._say = cluster, size, say
        self._load = Load(Client(directory), known, size.seats, size.lengths, size.seed)
        self._draw = random.Random(size.seed)
        self._expert_bytes = directory.facts.expert_bytes
        self.course = Course(name, size, rounds, directory.config, known, perf_counter(), self._load.streams)
        status, self._active = settled(cluster)
        self._status = status
        self._know(self._active)
        # The most that a plan has needed on each rank so far; what pools held before counts as planned.
        self._planned = {peer.rank: peer.peak_resident_bytes for peer in status.peers}

    async def run(self, one_round: Callable[[_Phase, int], Awaitable[None]]) -> Course:
        # What is there by now is not looked at again: this process's own collections would show as gaps.
        gc.collect()
        gc.freeze()
        self._load.start()
        try:
            for number in range(self.course.asked):
                await one_round(self, number)
        except asyncio.CancelledError:
            self.course.stopped_by = INTERRUPTED
        except (RayMoEError, RayError, _Stuck) as error:
            self.course.stopped_by = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._say(f"{self.course.name}: stopped by {self.course.stopped_by}")
        finally:
            gc.unfreeze()
            await self._load.finish()
        return self.course

    async def rebalance(self, number: int) -> None:
        homes = next_homes(self._active, number, self._draw)
        event = await self._change("rebalance", partial(self._cluster.rebalance, homes=homes, why="bench"))
        await self._control(event.seconds)

    async def cycle(self, number: int) -> None:
        await self._control(self._size.control_s)
        await self._change("grow", partial(self._cluster.scale, MOST, why="bench"))
        await self._control(self._size.control_s)
        leaving = self._draw.sample(self._ranks, len(self._ranks) - FEWEST)
        together = self._draw.random() < 0.5
        for ranks in [leaving] if together else [[rank] for rank in leaving]:
            await self._change("shrink", partial(self._cluster.drain, *ranks, why="bench"), ranks)
        self.course.samples.append(await asyncio.to_thread(Sample.take, self._cluster, self._status, self._active))

    # ---- windows ----

    async def _change(self, what: str, ask: Callable[[], int | None], leaving: Sequence[int] = ()) -> Event:
        """One operation in a window of its own; then, in none, until the cluster has settled."""
        await self._ready()
        before = self._active
        moved_requests = await self._requests_on(leaving)
        start, ranks = perf_counter(), len(self._ranks)
        operation = await self._ended(ask)
        ended = perf_counter()
        await asyncio.sleep(_TAIL_S)
        self.course.windows.append(Window(what, start, perf_counter(), ranks))
        if not operation.ended:
            raise _Stuck(f"operation {operation.number} ({what}) is {operation.stage}: {operation.reason}")
        await self._settle()
        change = Change.between(before, self._active, self._expert_bytes) if operation.waves == 1 else None
        event = Event(
            what,
            operation,
            ended - start,
            change,
            self._peaks(change),
            moved_requests,
        )
        self.course.events.append(event)
        self._say(
            f"{len(self.course.events):4d} {what} {operation.stage} in {event.seconds:.2f} s, ranks {self._ranks}, "
            f"generation {self._active.generation} {operation.reason}"
        )
        return event

    async def _control(self, seconds: float) -> None:
        """As much of nothing, under the same load."""
        await self._ready()
        start, ranks = perf_counter(), len(self._ranks)
        await asyncio.sleep(seconds + _TAIL_S)
        self.course.windows.append(Window(CONTROL, start, perf_counter(), ranks))

    async def _ready(self) -> None:
        if not await self._load.decoding(self._size.decoding, self._size.left, _DECODING_S):
            raise _Stuck(f"fewer than {self._size.decoding} streams decode after {_DECODING_S:g} s")

    async def _ended(self, ask: Callable[[], int | None]) -> Operation:
        number = await asyncio.to_thread(ask)
        if number is None:
            raise _Stuck("the cluster says that nothing has to change")
        return await asyncio.to_thread(self._cluster.wait, number, _OPERATION_S)

    async def _settle(self) -> None:
        self._status, self._active = await asyncio.to_thread(settled, self._cluster)
        self._know(self._active)

    def _know(self, active: PlacementSnapshot) -> None:
        self.course.epoch_of[active.generation] = active.group.epoch

    # ---- details ----

    async def _requests_on(self, ranks: Sequence[int]) -> int:
        if not ranks:
            return 0
        status = await asyncio.to_thread(self._cluster.status)
        return sum(peer.running + peer.waiting for peer in status.peers if peer.rank in ranks)

    @property
    def _ranks(self) -> list[int]:
        return [rank.value for rank in self._active.group.peers]

    def _peaks(self, change: Change | None) -> dict[int, tuple[int, int]]:
        """By rank that is there, (planned, held): the most so far. An unknown plan makes what was held the plan."""
        held = {peer.rank: peer.peak_resident_bytes for peer in self._status.peers}
        for rank, most in held.items():
            needed = most if change is None else change.peak_bytes.get(rank, 0)
            self._planned[rank] = max(self._planned.get(rank, 0), needed)
        return {rank: (self._planned[rank], most) for rank, most in held.items()}


class _Stuck(Exception):
    """The phase cannot go on; what it has so far is told all the same."""


# -- Where experts go


def next_homes(active: PlacementSnapshot, number: int, draw: random.Random) -> dict[int, tuple[tuple[int, int], ...]]:
    """Another plan over the same ranks, by turns from layer to layer: (expert, rank) pairs.

    One layer exchanges all its experts, every copy going to the next rank. In the others two pairs of ranks' experts
    change places, and two experts have a second copy in two of every four plans: a slot for each rank more.
    """
    ranks = [rank.value for rank in active.group.peers]
    following = dict(zip(ranks, [*ranks[1:], *ranks[:1]], strict=True))
    homes = {}
    for at, placement in enumerate(active.layers):
        turn = (number - at) % 4
        on: dict[int, list[int]] = {}
        for expert, rank in zip(placement.phy2log, placement.physical_rank, strict=True):
            on.setdefault(expert, []).append(rank)
        if turn == 0:
            homes[placement.layer] = tuple((expert, following[rank]) for expert in on for rank in on[expert])
            continue
        single = {rank: [expert for expert in on if on[expert] == [rank]] for rank in ranks}
        copied = [expert for expert in on if len(on[expert]) > 1]
        home = {expert: rank for rank in ranks for expert in single[rank]}
        # Of two copies one stays, by turns on each rank.
        home |= {expert: ranks[place % len(ranks)] for place, expert in enumerate(copied)}
        drawn = {rank: draw.sample(single[rank], 3) for rank in ranks}
        for rank, (*going, _) in drawn.items():
            home |= dict.fromkeys(going, following[rank])
        pairs = list(home.items())
        if turn != 3:
            pairs += [(staying, following[rank]) for rank, (*_, staying) in drawn.items()]
        homes[placement.layer] = tuple(pairs)
    return homes
