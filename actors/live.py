"""How a cluster is watched: what a rank tells of itself at a glance, and the controller's look at all of them.

Nothing is gathered unless somebody asks. However many ask, the ranks are looked at twice a second at most, each by one
call that is not waited for when it is late: what it said last is shown with the time when it said so.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors.cluster_state import ClusterState
from ray_moe.controlplane.effects import PeerPhase
from ray_moe.controlplane.generations import GenerationStatus
from ray_moe.deadline import ray_await
from ray_moe.engine.records import EngineStatus, LoadProgress
from ray_moe.errors import RayMoEError
from ray_moe.observe.live import (
    BalanceView,
    Headline,
    Known,
    LiveView,
    LoadsView,
    PlacementView,
    RankView,
    ReleaseView,
    StepsView,
    SwitchView,
    balance_view,
    generation_views,
    joined,
    loads_view,
    operation_views,
    placement_view,
    steps_after,
)
from ray_moe.observe.survival import FailureView, survival
from ray_moe.placement import PlacementSnapshot

if TYPE_CHECKING:
    from ray_moe.actors.conductor import Conductor
    from ray_moe.actors.lookout import Lookout
    from ray_moe.actors.pilot import Pilot
    from ray_moe.config import ClusterConfig
    from ray_moe.controlplane.demand import Demand
    from ray_moe.engine.loop import EngineLoop

# A look is as good as new for so long, and waits so long for those that it asks; an answer may come to a later look.
_FRESH_S, _LOOK_S = 0.4, 0.3
_ENDED_SHOWN = 32  # operations
_SWITCHES_KEPT = 256

# -- What a rank tells


@dataclass(frozen=True)
class Glimpse:
    """One rank at a glance: its counters once it serves, how far it is before. `steps` are its latest working steps as
    (number, age, seconds), `switches` as (generation, epoch, step, age, seconds): ages in seconds when it answered, so
    that no two machines' clocks need agree."""

    progress: LoadProgress
    status: EngineStatus | None = None
    steps: tuple[tuple[int, float, float], ...] = ()
    switches: tuple[tuple[int, int, int, float, float], ...] = ()


class LiveAnswers:
    """The part of an expert actor that watchers ask."""

    _engine: EngineLoop | None
    _progress: LoadProgress

    if TYPE_CHECKING:

        async def status(self) -> EngineStatus: ...

    async def glimpse(self, known_steps: int) -> Glimpse:
        """This peer now, with those of its working steps that are numbered `known_steps` or above."""
        if self._engine is None:
            return Glimpse(self._progress)
        counters, now = self._engine.counters, perf_counter()
        return Glimpse(
            self._progress,
            await self.status(),
            tuple((n, now - end, seconds) for n, end, seconds in tuple(counters.step_ends) if n >= known_steps),
            tuple((s.generation, s.epoch, s.step, now - s.at, s.seconds) for s in tuple(counters.switches)),
        )


# -- What the controller makes of it


@dataclass
class _Seen:
    """What one rank has told so far."""

    glimpse: Glimpse
    at: float
    steps: StepsView


@dataclass
class _Board:
    """What is kept between two looks."""

    life: str = field(default_factory=lambda: uuid.uuid4().hex)
    looked: float = float("-inf")
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: dict[int, asyncio.Task[Glimpse]] = field(default_factory=dict)
    seen: dict[int, _Seen] = field(default_factory=dict)
    switches: dict[tuple[int, int], SwitchView] = field(default_factory=dict)
    generations: tuple[GenerationStatus, ...] = ()
    about: tuple[object, ...] = ()  # what `survival` is of
    survival: tuple[FailureView, ...] = ()
    placement: PlacementView | None = None
    demand: Demand | None = None
    loads: LoadsView | None = None
    balance: tuple[int, int, BalanceView] | None = None  # of which generation and window


class LiveQuestions:
    """The part of the controller that `/ui` and `ray-moe top` ask."""

    _config: ClusterConfig
    _state: ClusterState
    _failure: str
    _peers: dict[int, ActorHandle]
    _lookout: Lookout
    _routing: ActorHandle | None
    _conductor: Conductor | None
    _pilot: Pilot | None
    _live_board: _Board | None = None

    if TYPE_CHECKING:

        async def resume(self) -> None: ...

    async def live(self, known: Known | None = None) -> LiveView:
        """One look at everything, also while the cluster starts or has lost a rank; without what is `known`."""
        await self.resume()
        if self._live_board is None:
            self._live_board = _Board()
        board = self._live_board
        async with board.looking:
            if time.monotonic() - board.looked > _FRESH_S:
                await self._look_at_ranks(board)
                board.looked = time.monotonic()
        return self._view(board, known if known is not None and known.life == board.life else Known())

    # ---- gathering ----

    async def _look_at_ranks(self, board: _Board) -> None:
        for rank in [rank for rank in board.asked if rank not in self._peers]:
            board.asked.pop(rank).cancel()
        for rank, actor in self._peers.items():
            if rank not in board.asked:
                seen = board.seen.get(rank)
                board.asked[rank] = asyncio.create_task(self._glimpse(rank, actor, _count(seen.steps) if seen else 0))
        registry = asyncio.create_task(self._registry())
        await asyncio.wait({registry, *board.asked.values()}, timeout=_LOOK_S)
        for rank, task in list(board.asked.items()):
            if task.done():
                del board.asked[rank]
                with suppress(RayMoEError, RayActorError):  # it is gone, or late: the lookout's business
                    _take(board, rank, await task)
        if registry.done():
            board.generations = await registry or board.generations
        else:
            registry.cancel()
        await self._see_placement(board)

    async def _glimpse(self, rank: int, actor: ActorHandle, known: int) -> Glimpse:
        call: Any = actor.glimpse.remote(known)
        glimpse: Glimpse = await ray_await(call, self._config.step_deadline_s, f"a glimpse of rank {rank}")
        return glimpse

    async def _registry(self) -> tuple[GenerationStatus, ...]:
        """Empty while the routing actor does not answer, or has not been told what it knew."""
        found: tuple[GenerationStatus, ...] = ()
        if self._routing is not None and self._conductor is not None:
            with suppress(RayMoEError, RayActorError):
                found = await ray_await(self._routing.status.remote(), self._config.step_deadline_s, "the registry")
        return found

    async def _see_placement(self, board: _Board) -> None:
        """What is derived from placement and demand, when these are other ones than last time; beside the event loop:
        it takes a while for tens of thousands of slots."""
        if not self._lookout.live or self._conductor is None:
            return
        active, capacity = self._lookout.live[-1], self._conductor.record.storage.capacity
        if board.placement is None or board.placement.generation != active.generation:
            board.placement = await asyncio.to_thread(placement_view, active, capacity)
        lost, joining = frozenset(self._lookout.lost_serving), frozenset(self._joining(active))
        if board.about != (active.generation, lost, joining):
            journal = self._config.state_file or ""
            board.survival = await asyncio.to_thread(
                survival, active, capacity, lost=lost, joining=joining, journal=journal
            )
            board.about = (active.generation, lost, joining)
        demand = self._pilot.demand if self._pilot is not None else None
        if demand is not None and demand.loads_LE.shape[0] == len(active.layers):
            if demand is not board.demand:
                board.demand, board.loads = demand, await asyncio.to_thread(loads_view, demand)
            assert board.loads is not None
            of = (active.generation, board.loads.end)
            if board.balance is None or board.balance[:2] != of:
                board.balance = (*of, await asyncio.to_thread(balance_view, demand, active))

    def _joining(self, active: PlacementSnapshot) -> list[int]:
        """Ranks that have never served: those of older generations are leaving."""
        group = {rank.value for rank in active.group.peers}
        return [rank for rank in self._peers if rank not in group and rank not in self._lookout.serving]

    # ---- showing ----

    def _view(self, board: _Board, known: Known) -> LiveView:
        ranks = self._ranks(board)
        steps = [board.seen[one.rank].steps for one in ranks if one.rank in board.seen]
        generations = generation_views(board.generations)
        operations: tuple[Any, ...] = ()
        if self._conductor is not None:
            control = self._conductor.control
            operations = (*control.history[-_ENDED_SHOWN:], *control.operations)
        placement, loads = board.placement, board.loads
        return LiveView(
            at=time.time(),
            headline=self._headline(),
            ranks=ranks,
            steps=tuple(steps_after(each, known.steps.get(each.rank, 0)) for each in steps),
            switches=tuple(board.switches.values()),
            generations=generations,
            operations=operation_views(operations, generations, ranks),
            releases=tuple(ReleaseView(one.release_id, str(one.state)) for one in self._lookout.releases),
            balance=board.balance[2] if board.balance is not None else None,
            loads=loads if loads is not None and loads.end != known.loads else None,
            placement=placement if placement is not None and placement.generation != known.generation else None,
            survival=board.survival,
            known=Known(
                board.life,
                placement.generation if placement is not None else -1,
                loads.end if loads is not None else -1,
                {each.rank: _count(each) for each in steps},
            ),
        )

    def _headline(self) -> Headline:
        lookout, record = self._lookout, self._conductor.record if self._conductor is not None else None
        config = record.config or self._config if record is not None else self._config
        epoch, generation = lookout.coordinates
        decision = self._pilot.decision if self._pilot is not None else None
        return Headline(
            name=self._config.name,
            state=self._state.value,
            failure=self._failure or "; ".join(lookout.lost_serving.values()),
            model=config.model,
            release_id=lookout.live[-1].release_id if lookout.live else "",
            generation=generation,
            epoch=epoch,
            group=config.group,
            transport=config.transport,
            runner=config.runner,
            policy=config.policy,
            capacity=record.storage.capacity if record is not None else 0,
            num_experts=record.facts.num_experts if record is not None else 0,
            autopilot=str(decision) if decision is not None else "",
        )

    def _ranks(self, board: _Board) -> tuple[RankView, ...]:
        nodes: Mapping[int, str] = {}
        if self._lookout.live:
            nodes = {rank.value: node for rank, node in self._lookout.live[-1].topology.owner.items()}
        observed = self._lookout.observed().peers
        views = [
            RankView(rank, nodes.get(rank, ""), "lost", detail) for rank, detail in self._lookout.lost_serving.items()
        ]
        for rank in self._peers:
            said, seen = observed.get(rank), board.seen.get(rank)
            leaving = said is not None and said.phase is PeerPhase.SERVING and not said.admitting
            views.append(_rank_view(rank, nodes.get(rank, ""), seen, leaving=leaving))
        return tuple(sorted(views, key=lambda view: view.rank))


def _take(board: _Board, rank: int, glimpse: Glimpse) -> None:
    """Remember what a rank has just told, on the controller's own clock."""
    now = time.time()
    seen = board.seen.get(rank)
    first = glimpse.steps[0][0] if glimpse.steps else _count(seen.steps) if seen else 0
    steps = StepsView(
        rank,
        first,
        tuple(round(now - age, 4) for _, age, _ in glimpse.steps),
        tuple(round(seconds, 6) for _, _, seconds in glimpse.steps),
    )
    board.seen[rank] = _Seen(glimpse, now, joined(seen.steps if seen else None, steps))
    for generation, epoch, step, age, seconds in glimpse.switches:
        board.switches.setdefault(
            (rank, generation), SwitchView(rank, generation, epoch, step, round(now - age, 4), seconds)
        )
    while len(board.switches) > _SWITCHES_KEPT:
        del board.switches[next(iter(board.switches))]


def _count(steps: StepsView) -> int:
    """How many working steps a rank had run when the last of these ended."""
    return steps.first + len(steps.seconds)


def _rank_view(rank: int, node: str, seen: _Seen | None, *, leaving: bool) -> RankView:
    if seen is None or seen.glimpse.status is None:
        progress = seen.glimpse.progress if seen is not None else LoadProgress()
        loading = (progress.phase, progress.done, progress.total)
        return RankView(rank, node, "joining", seen_at=seen.at if seen is not None else 0.0, loading=loading)
    status = seen.glimpse.status
    same = {name: getattr(status, name) for name in _SAME}
    state = "leaving" if leaving else status.state
    return RankView(rank, node, state, status.failure, seen.at, fallbacks=dict(status.fallbacks), **same)


_SAME = (
    *("generation", "epoch", "committed_step", "steps_worked", "seconds_worked", "seconds_agreeing"),
    *("slow_step_seconds", "running", "waiting", "outstanding_tokens", "tokens_emitted", "kv_blocks_used"),
    *("kv_blocks_total", "rows_local", "rows_sent", "rows_received", "bytes_sent", "bytes_received", "replays"),
    "resident_bytes",
)
