"""What the controller exports: the releases' metrics, as sums over all ranks, and what only it knows of the cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors.cluster_state import ClusterState
from ray_moe.actors.conductor import Conductor
from ray_moe.actors.exporter import Exporter
from ray_moe.actors.lookout import Lookout
from ray_moe.actors.pilot import Pilot
from ray_moe.actors.release_metrics import ReleaseTotals
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.demand import Demand
from ray_moe.controlplane.effects import Observed, PeerPhase
from ray_moe.controlplane.generations import GenerationStatus
from ray_moe.controlplane.generations import State as GenerationState
from ray_moe.controlplane.operations import ControlState, Kind, Stage
from ray_moe.controlplane.placed_load import copies_by_group, hottest, imbalance_by_group
from ray_moe.controlplane.release_states import State as ReleaseState
from ray_moe.deadline import ray_await
from ray_moe.engine.state import Tallies
from ray_moe.errors import RayMoEError
from ray_moe.placement import PlacementSnapshot

_LOG = logging.getLogger(__name__)
# An actor that does not say what it has counted within this time is asked again in the next round.
_ASK_S = 2.0
_OUTCOMES = (Stage.DONE, Stage.FAILED, Stage.CANCELLED)
_OPEN = tuple(stage for stage in Stage if stage not in _OUTCOMES)
_SOURCES = ("peer", "checkpoint")
_RANK_STATES = ("serving", "joining", "lost")


class ClusterExporter:
    """On the controller's event loop. `restarted`: what was counted before another process has exported."""

    def __init__(
        self,
        config: ClusterConfig,
        exporter: Exporter,
        peers: Mapping[int, ActorHandle],
        routing: Callable[[], ActorHandle],
        lookout: Lookout,
        conductor: Conductor,
        pilot: Pilot,
        state: Callable[[], ClusterState],
        *,
        restarted: bool,
    ) -> None:
        self._config, self._exporter, self._peers, self._routing = config, exporter, peers, routing
        self._lookout, self._conductor, self._pilot, self._state = lookout, conductor, pilot, state
        self._releases = ReleaseTotals(restarted=restarted)
        record = conductor.record
        self._changes = Changes(record.control, record.storage.expert_bytes)
        self._draining: dict[int, float] = {}  # generation -> since when, on the monotonic clock

    async def rounds(self) -> None:
        """Run until cancelled. What one round finds wrong is logged, and the next one looks again."""
        while self._config.metrics_every_s:
            try:
                await self._round()
            except (RayMoEError, RayActorError) as error:
                _LOG.warning("metrics of %s: %s", self._config.name, error)
            except Exception:  # noqa: BLE001 - metrics are wanted most when something unforeseen happens
                _LOG.exception("a round of metrics of %s failed", self._config.name)
            await asyncio.sleep(self._config.metrics_every_s)

    async def _round(self) -> None:
        # A rank that dies meanwhile leaves the controller's table.
        told = await asyncio.gather(*(self._tallies(rank, actor) for rank, actor in self._peers.items()))
        generations: tuple[GenerationStatus, ...] | None = await self._ask(self._routing().status.remote(), "registry")
        export, now = self._exporter, time.monotonic()
        export.begin(now)
        for tallies in told:
            if tallies is not None:
                self._releases.take(tallies)
        self._releases.keep(self._peers)
        self._releases.push(export)
        seen = self._lookout.observed()
        push_ranks(export, self._state(), seen, self._lookout.serving)
        releases = Counter(release.state for release in self._lookout.releases)
        for state in ReleaseState:
            export.set("moe_releases", releases[state], state=state)
        if generations is not None:
            self._push_generations(generations, now)
        self._changes.take(self._conductor.control)
        self._changes.push(export, time.time())
        if seen.live:
            push_placement(export, seen.live[-1], self._pilot.demand, seen)
        export.end()

    async def _tallies(self, rank: int, actor: ActorHandle) -> Tallies | None:
        found: Tallies | None = await self._ask(actor.tallies.remote(), f"what rank {rank} has counted")
        return found

    async def _ask(self, call: Any, what: str) -> Any:
        """The answer; None from an actor that is gone, busy, or not serving yet."""
        try:
            return await ray_await(call, _ASK_S, what)
        except (RayMoEError, RayActorError) as error:
            _LOG.debug("metrics: %s", error)
            return None

    def _push_generations(self, generations: tuple[GenerationStatus, ...], now: float) -> None:
        live = [one for one in generations if one.state is not GenerationState.RETIRED]
        draining = [one.generation for one in live if one.state is GenerationState.DRAINING and not one.held]
        self._draining = {generation: self._draining.get(generation, now) for generation in draining}
        age = now - min(self._draining.values(), default=now)
        self._exporter.set("moe_generations_live", len(live))
        self._exporter.set("moe_drain_age_seconds", age)


def push_ranks(export: Exporter, state: ClusterState, seen: Observed, serving: tuple[int, ...]) -> None:
    """Where the cluster and its ranks stand."""
    for each in ClusterState:
        export.set("moe_cluster_state", each is state, state=each)
    joining = sum(
        peer.phase in (PeerPhase.STARTING, PeerPhase.LOADED) for rank, peer in seen.peers.items() if rank not in serving
    )
    for name, count in zip(_RANK_STATES, (len(serving), joining, len(seen.lost)), strict=True):
        export.set("moe_ranks", count, state=name)
    export.count("moe_rank_deaths", len(seen.lost))


def push_placement(export: Exporter, active: PlacementSnapshot, demand: Demand | None, seen: Observed) -> None:
    """How the active placement stands to the demand, if there is an estimate."""
    export.only("moe_expert_replicas", ("layer_group", "stat"), copies_by_group(active))
    if demand is None:
        return
    export.only("moe_imbalance", ("layer_group",), imbalance_by_group(active, demand.loads_LE))
    export.only("moe_expert_load_share", ("layer", "expert"), hottest(active, demand.loads_LE))
    if demand.provenance.end is not None:
        step = max((peer.committed_step for peer in seen.peers.values()), default=-1)
        export.set("moe_demand_age_steps", max(0, step + 1 - demand.provenance.end))


class Changes:
    """Operations as totals. `control` is what there was before: another process has exported it, or nobody."""

    def __init__(self, control: ControlState, expert_bytes: int) -> None:
        self._expert_bytes = expert_bytes
        self._moved = {one.number: dict(one.moved_bytes) for one in (*control.history, *control.operations)}
        self._over = {one.number for one in control.history}
        self._control = control
        self._bytes: Counter[str] = Counter()
        self._slots = 0
        self._ended: Counter[tuple[str, str]] = Counter()
        self._pauses: list[float] = []

    def take(self, control: ControlState) -> None:
        """The control state as it is now."""
        self._control = control
        every = (*control.history, *control.operations)
        for one in every:
            before = self._moved.get(one.number, {})
            for source, amount in one.moved_bytes.items():
                grown = amount - before.get(source, 0)
                self._bytes[source] += grown
                self._slots += grown // self._expert_bytes
            self._moved[one.number] = dict(one.moved_bytes)
        for one in control.history:
            if one.number not in self._over:
                self._ended[one.kind, one.stage] += 1
                if one.stage is Stage.DONE and one.waves:
                    self._pauses.append(one.pause_s)
        self._over = {one.number for one in control.history}
        kept = {one.number for one in every}
        self._moved = {number: moved for number, moved in self._moved.items() if number in kept}

    def push(self, export: Exporter, now: float) -> None:
        """`now` on the wall clock, as operations have their times."""
        for kind in Kind:
            for outcome in _OUTCOMES:
                export.count("moe_operations", self._ended[kind, outcome], kind=kind, outcome=outcome)
            asked = [one.asked_at for one in self._control.operations if one.kind is kind]
            export.set("moe_operation_age_seconds", max(0.0, now - min(asked, default=now)), kind=kind)
            stages = Counter(one.stage for one in self._control.operations if one.kind is kind)
            for stage in _OPEN:
                export.set("moe_operations_open", stages[stage], kind=kind, stage=stage)
        for source in _SOURCES:
            export.count("moe_migration_bytes", self._bytes[source], source=source)
        export.count("moe_migration_slots", self._slots)
        export.observe("moe_switch_pause_seconds", self._pauses)
        self._pauses = []
