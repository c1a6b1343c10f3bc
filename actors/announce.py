"""What the control plane's records say about transitions, told to the log: each of them once, by whoever saved it."""

from __future__ import annotations

import logging
from typing import Any

from ray_moe.config import ClusterConfig
from ray_moe.controlplane.autopilot import AutopilotState
from ray_moe.controlplane.effects import PeerPhase
from ray_moe.controlplane.operations import ControlState, Kind, Operation, Stage
from ray_moe.controlplane.release_states import ReleaseStatus
from ray_moe.controlplane.release_states import Stage as LeavingStage
from ray_moe.controlplane.releases import ReleaseRegistry
from ray_moe.controlplane.rollout import Rollout
from ray_moe.events import configure, emit


def log_as(config: ClusterConfig, actor: str) -> None:
    """Write this process's log as its cluster wants it; every line says the cluster and the actor."""
    configure(as_json=config.log_json, level=config.log_level, cluster=config.name, actor=actor)


def tell_operations(before: ControlState, after: ControlState) -> None:
    """Every edge that operations took from one saved state to the next; first of all, that they were asked for."""
    known = {one.number: one for one in (*before.operations, *before.history)}
    # One that ends goes to the history, which forgets the oldest and keeps the order in which they ended.
    for one in (*after.history, *after.operations):
        earlier = known.get(one.number)
        if one is not earlier:
            _tell_operation(earlier, one)


def _tell_operation(earlier: Operation | None, now: Operation) -> None:
    stage = earlier.stage.value if earlier is not None else ""
    ids: dict[str, Any] = {"operation": now.number, "kind": now.kind.value}
    if earlier is None:
        begun = _begun_in(now).value
        asked: dict[str, Any] = {"asked_by": now.asked_by, "why": now.why}
        asked |= {"ranks": now.ranks} if now.ranks else {}
        emit("operation", "", begun, "ask", **ids, **asked)
        stage = begun
    told = earlier.trail[-1].number if earlier is not None and earlier.trail else 0
    for edge in now.trail:
        if edge.number <= told:
            continue
        with_it = {"wave": edge.wave, "waves": now.waves} if edge.wave else {}
        if edge is now.trail[-1]:
            with_it |= _outcome(now)
        level = logging.WARNING if edge.stage in (Stage.FAILED, Stage.UNDOING) else logging.INFO
        emit("operation", stage, edge.stage.value, edge.event, level=level, **ids, **with_it)
        stage = edge.stage.value


def _begun_in(operation: Operation) -> Stage:
    """The stage that it was asked for in."""
    return Stage.PREPARING if operation.kind is Kind.GROW else Stage.QUEUED


def _outcome(now: Operation) -> dict[str, Any]:
    """What is known once its latest edge is taken."""
    found: dict[str, Any] = {"reason": now.reason, "generation": now.last_generation or now.first_generation}
    if now.ended:
        found |= {f"{source}_bytes": nbytes for source, nbytes in now.moved_bytes.items()}
        found |= {"pause_s": now.pause_s}
    return {name: value for name, value in found.items() if value}


class PeersTold:
    """Ranks as the controller sees them."""

    def __init__(self) -> None:
        self._phases: dict[int, str] = {}

    def said(self, rank: int, phase: PeerPhase, generation: int) -> None:
        """A rank's report."""
        before = self._phases.get(rank, "")
        if before != phase.value:
            self._phases[rank] = phase.value
            emit("peer", before, phase.value, "report", rank=rank, generation=generation)

    def lost(self, rank: int, detail: str) -> None:
        """A rank died, or does not answer."""
        before = self._phases.pop(rank, "")
        emit("peer", before, "lost", "lose", level=logging.ERROR, rank=rank, reason=detail)

    def ended(self, rank: int) -> None:
        """A rank's actor was ended on purpose."""
        before = self._phases.pop(rank, "")
        emit("peer", before, "ended", "end", rank=rank)


class RegistryTold:
    """What operations on the registry changed: generations by their states, releases by the registry's own log."""

    def __init__(self) -> None:
        self._generations: dict[int, str] = {}
        self._releases: dict[str, str] = {}
        self._records = 0

    def take_over(self, registry: ReleaseRegistry) -> None:
        """What an earlier process has told already."""
        self._generations = {one.generation: one.state.value for one in registry.generations()}
        self._releases = {one.release_id: _stands(one) for one in registry.status()}
        self._records = max((record.number for record in registry.log()), default=0)

    def tell(self, registry: ReleaseRegistry) -> None:
        """After an operation."""
        operation = ""
        states = {one.release_id: _stands(one) for one in registry.status()}
        for record in registry.log():
            if record.number <= self._records:
                continue
            self._records, operation = record.number, record.operation
            release = record.release_id
            before, now = self._releases.get(release, ""), states.get(release, "")
            ids: dict[str, Any] = {"release": release, "detail": record.detail}
            ids |= {"asked_by": record.note.who, "why": record.note.why}
            ids |= {} if record.generation is None else {"generation": record.generation}
            emit("release", before, now, operation, **ids)
        self._releases = states
        snapshots = {one.generation: one for one in registry.live()}
        found = {status.generation: status.state.value for status in registry.generations()}
        for generation, now in found.items():
            before = self._generations.get(generation, "")
            if before == now:
                continue
            where: dict[str, Any] = {"generation": generation}
            if generation in snapshots:
                where |= {"epoch": snapshots[generation].group.epoch, "release": snapshots[generation].release_id}
            emit("generation", before, now, operation or "retire", **where)
        self._generations = found


def _stands(release: ReleaseStatus) -> str:
    """`CANARY`; `ACTIVE, STOPPED` for one that is leaving."""
    return str(release.state) if release.stage is LeavingStage.STAYING else f"{release.state}, {release.stage}"


def tell_rollout(before: Rollout | None, now: Rollout) -> None:
    """A rollout's phase, where it is another one."""
    phase = before.phase.value if before is not None and before.number == now.number else ""
    if phase != now.phase.value:
        emit("rollout", phase, now.phase.value, "advance", release=now.release_id, reason=now.reason)


def tell_autopilot(before: AutopilotState, now: AutopilotState, why: str) -> None:
    """What it makes of the load, for whoever debugs: what comes of it is an operation, with the same reason."""
    if before.ranks.trend is not now.ranks.trend:
        emit("autopilot", before.ranks.trend, now.ranks.trend, "ranks", level=logging.DEBUG, reason=why)
    if before.rebalance.phase is not now.rebalance.phase:
        emit("autopilot", before.rebalance.phase, now.rebalance.phase, "experts", level=logging.DEBUG, reason=why)
