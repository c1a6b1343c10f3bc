"""Looks at demand and load once a second, and flies the cluster by them if it is told to.

Peers report what their routers asked for; here the reports become an estimate of demand, whoever wants it. With an
`autopilot` in the configuration the pure decider is asked too, and what it wants is asked for like anybody's operation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors.announce import tell_autopilot
from ray_moe.actors.conductor import Conductor
from ray_moe.actors.lookout import Lookout
from ray_moe.config import AutopilotConfig, ClusterConfig
from ray_moe.controlplane import asking
from ray_moe.controlplane.autopilot import (
    AutopilotPolicy,
    AutopilotState,
    Grow,
    RankLoad,
    Rebalance,
    Shrink,
    Signals,
    Wanted,
)
from ray_moe.controlplane.autoscale import RankPolicy, ReplicaPolicy
from ray_moe.controlplane.decisions import Decision
from ray_moe.controlplane.demand import Demand
from ray_moe.controlplane.estimators import Ewma
from ray_moe.controlplane.online import DemandLog, Estimates
from ray_moe.controlplane.operations import ByHomes, Kind
from ray_moe.controlplane.publication import Storage
from ray_moe.controlplane.rebalance import RebalancePolicy
from ray_moe.deadline import ray_await
from ray_moe.engine.records import EngineStatus, ModelFacts
from ray_moe.errors import RayMoEError

if TYPE_CHECKING:
    from ray_moe.dataplane.route_counts import DemandReport

_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0
# Windows of demand, in reports; how long a rank may be late; and what the past weighs against a new window.
_WINDOW_REPORTS, _GRACE_REPORTS, _MEMORY = 2, 8, 0.7


class Pilot:
    """On the controller's event loop. `demand` is the latest estimate, None before the first window is whole."""

    def __init__(
        self,
        config: ClusterConfig,
        facts: ModelFacts,
        storage: Storage,
        peers: dict[int, ActorHandle],
        lookout: Lookout,
        conductor: Conductor,
    ) -> None:
        self._config, self._storage, self._peers = config, storage, peers
        self._lookout, self._conductor = lookout, conductor
        every = max(1, config.demand_every_steps)
        self._log = DemandLog(
            len(facts.moe_layers),
            facts.num_experts,
            facts.checkpoint_version,  # routers are the trunk's: the checkpoint names them
            window_steps=_WINDOW_REPORTS * every,
            grace_steps=_GRACE_REPORTS * every,
        )
        self._heard: dict[int, int] = {}  # by rank: its last report's number
        self._estimates = Estimates(Ewma(_MEMORY))
        self.demand: Demand | None = None
        self._policy = _policy(config, config.autopilot) if config.autopilot is not None else None
        self._state = AutopilotState()
        self._arrivals = _Arrivals()
        self._refused: tuple[float, float] | None = None
        self.decision: Decision | None = None  # what the autopilot said last

    async def rounds(self) -> None:
        """Run until cancelled. What one round finds wrong is logged, and the next one looks again."""
        while True:
            try:
                await self._listen()
                if self._policy is not None:
                    await self._fly(self._policy)
            except (RayMoEError, RayActorError) as error:
                _LOG.warning("demand of %s: %s", self._config.name, error)
            await asyncio.sleep(_LOOK_S)

    async def _listen(self) -> None:
        """Fetch the peers' reports and fold them into the estimate."""
        for snapshot in self._lookout.live:
            self._log.serve(snapshot)
        # A rank that dies meanwhile leaves the controller's table.
        asked = {rank: self._peers[rank] for rank in self._lookout.serving if rank in self._peers}
        found = await asyncio.gather(*(self._reports_of(rank, actor) for rank, actor in asked.items()))
        for rank, reports in zip(asked, found, strict=True):
            for report in reports:
                self._heard[rank] = report.sequence
                dropped = self._log.fold(report)
                if dropped is not None:
                    _LOG.info("a demand report of rank %d was not counted: %s", rank, dropped)
        for window in self._log.take():
            self._estimates.observe(window)
        if self._lookout.live:
            self.demand = self._estimates.estimate(self._lookout.live[-1].checkpoint_version)

    async def _reports_of(self, rank: int, actor: ActorHandle) -> tuple[DemandReport, ...]:
        call: Any = actor.demand.remote(self._heard.get(rank, -1))
        reports: tuple[DemandReport, ...] = await ray_await(
            call, self._config.step_deadline_s, f"demand reports of rank {rank}"
        )
        return reports

    async def _fly(self, policy: AutopilotPolicy) -> None:
        statuses, now = await self._lookout.statuses(), time.monotonic()
        live, control = self._lookout.live, self._conductor.control
        if not live or not statuses:
            return
        members = control.members or self._lookout.serving
        refused = [one.ended_at for one in control.history if one.kind is Kind.GROW and one.refused]
        config = self._config.autopilot
        assert config is not None
        signals = Signals(
            ranks=tuple(
                RankLoad(status.rank, status.waiting, status.running, status.outstanding_tokens)
                for status in statuses
                if status.rank in members
            ),
            tokens_per_second=self._arrivals.per_second(statuses, now),
            latency_seconds=max(
                (status.slow_step_seconds for status in statuses if status.running or status.waiting), default=0.0
            ),
            placement=live[-1],
            storage=self._storage,
            demand=self.demand if config.experts else None,
            refused_at=self._refused_at(refused[-1], now) if refused else None,
            under_way=tuple(f"{one.kind} {one.number}" for one in control.operations),
        )
        before, (self._state, wanted) = self._state, policy.decide(self._state, signals, now)
        tell_autopilot(before, self._state, str(wanted.why))
        self.decision = wanted.why
        self._ask_for(wanted, config)

    def _refused_at(self, wall: float, now: float) -> float:
        """A refusal's time of the wall clock on the monotonic one: the same each time that it is asked for."""
        if self._refused is None or self._refused[0] != wall:
            self._refused = (wall, now - (time.time() - wall))
        return self._refused[1]

    def _ask_for(self, wanted: Wanted, config: AutopilotConfig) -> None:
        conductor, serving = self._conductor, self._lookout.serving
        asker = asking.Asker("autopilot", str(wanted.why), time.time())
        bounds = (self._config.fewest_peers, self._config.most_peers)
        loads_LE = None if self.demand is None else np.asarray(self.demand.loads_LE)
        if isinstance(wanted, Grow) and config.ranks:
            control, operation = asking.scale(
                conductor.control, asker, serving, len(serving) + wanted.ranks, bounds, loads_LE
            )
            if operation is not None:
                conductor.begin(control, operation)
        elif isinstance(wanted, Shrink) and config.ranks:
            conductor.begin(*asking.drain(conductor.control, asker, serving, (wanted.rank,), bounds[0], loads_LE))
        elif isinstance(wanted, Rebalance):
            conductor.begin(*asking.rebalance(conductor.control, asker, ByHomes(wanted.homes)))


class _Arrivals:
    """Tokens that come in per second: those that are still owed, more or less, and those that were made meanwhile."""

    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None
        self._rate = 0.0

    def per_second(self, statuses: tuple[EngineStatus, ...], now: float) -> float:
        """Averaged over a few looks; a rank that came or went makes that look count nothing."""
        total = sum(status.tokens_emitted + status.outstanding_tokens for status in statuses)
        if self._before is not None:
            then, past = self._before
            if now > then and total >= past:
                self._rate = 0.8 * self._rate + 0.2 * (total - past) / (now - then)
        self._before = (now, total)
        return self._rate


def _policy(config: ClusterConfig, wanted: AutopilotConfig) -> AutopilotPolicy:
    """The three policies with the configuration's targets. Raises `ConfigError` as they do."""
    return AutopilotPolicy(
        ranks=RankPolicy(
            min_ranks=config.fewest_peers,
            max_ranks=config.most_peers,
            tokens_per_second_per_rank=wanted.tokens_per_s,
            waiting_per_rank=wanted.waiting,
            latency_seconds=wanted.token_latency_s,
            grow_after_seconds=wanted.grow_after_s,
            shrink_after_seconds=wanted.shrink_after_s,
            cool_down_seconds=wanted.cool_down_s,
            actions_per_hour=240,
        ),
        replicas=ReplicaPolicy(
            slots_per_layer=1,
            num_ranks=config.fewest_peers,
            min_replicas=wanted.min_replicas,
            cool_down_seconds=wanted.cool_down_s,
            actions_per_hour=240,
        ),
        rebalance=RebalancePolicy(
            start_above=wanted.imbalance,
            stop_below=1 + (wanted.imbalance - 1) / 2,
            lasting_seconds=wanted.move_after_s,
            cool_down_seconds=wanted.cool_down_s,
            moves_per_hour=240,
        ),
        unloaded_latency_seconds=wanted.unloaded_token_latency_s,
        settle_seconds=min(wanted.cool_down_s, 10.0),
    )
