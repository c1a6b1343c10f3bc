"""What the controller sees of its actors: reports that are asked for without waiting for the slow ones, and who fell.

A rank that serves must answer: the others wait for its steps. One that only prepares may take its time, and may die
without breaking anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError

from ray_moe.actors.announce import PeersTold
from ray_moe.actors.remote import release_room
from ray_moe.actors.routing import Registered
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.effects import Observed, Peer, PeerPhase
from ray_moe.controlplane.release_states import ReleaseStatus
from ray_moe.deadline import Deadline, ray_await
from ray_moe.engine.records import EngineStatus, LoadProgress
from ray_moe.errors import GenerationError, NotServingError
from ray_moe.placement import Lease, PlacementSnapshot

# A look does not wait longer than this for a rank that is busy; it uses what the rank said last.
_LOOK_S = 0.5
_AGAIN_S = 0.1
# Looks follow each other within a second.
_AWAY_S = 2.0


@dataclass
class _Asked:
    """A report that is on its way."""

    since: float
    task: asyncio.Task[Peer]


class Lookout:
    """Over the controller's own table of expert actors by rank; a rank that died leaves it."""

    def __init__(self, config: ClusterConfig, peers: dict[int, ActorHandle]) -> None:
        self._config, self._peers = config, peers
        self._asked: dict[int, _Asked] = {}
        self._said: dict[int, Peer] = {}
        self._looked_at = time.monotonic()
        self._told = PeersTold()
        self.lost: dict[int, str] = {}  # everybody who died, with the reason
        self.lost_serving: dict[int, str] = {}
        self.live: tuple[PlacementSnapshot, ...] = ()
        self.reserved: tuple[PlacementSnapshot, ...] = ()  # of a rollout, before it is loaded
        self.memory = b""  # what a routing actor that was started again must be told
        self.releases: tuple[ReleaseStatus, ...] = ()  # as `memory` has them
        self._changes = -1

    async def registered(self, routing: ActorHandle) -> Registered:
        """What the registry knows; while Ray starts the routing actor again, this waits for it.

        Raises `NotServingError` when it does not come back.
        """
        deadline = Deadline(self._config.step_deadline_s)
        while True:
            try:
                found: Registered = await ray_await(
                    routing.registered.remote(self._changes), deadline.left + _LOOK_S, "the registry's generations"
                )
            except RayActorError as error:
                if deadline.passed or not isinstance(error, ActorUnavailableError):
                    raise NotServingError(f"the routing actor of {self._config.name!r} is gone: {error}") from error
                await asyncio.sleep(_AGAIN_S)
                continue
            if not found.recovering:
                self.live = found.live
                if found.memory is not None:
                    self._changes, self.memory, self.releases = found.changes, found.memory, found.releases
            return found

    async def restore(self, routing: ActorHandle, live: tuple[PlacementSnapshot, ...], memory: bytes) -> None:
        """Tell a registry that was started again what it knew, and which leases the ranks hold on what was `live`.

        Raises `NotServingError` when it dies again meanwhile.
        """
        held = await self._leases(live)
        await self._tell(routing.restore.remote(memory, held), "restore the registry")
        # What a rank gave back meanwhile went to nobody, or to the registry before it knew of it.
        for lease in set(held).difference(await self._leases(live)):
            with suppress(GenerationError):  # this registry has taken it back already
                await self._tell(routing.release.remote(lease), f"lease {lease.lease_id} of {lease.holder}")

    async def _tell(self, call: Any, what: str) -> None:
        try:
            await ray_await(call, self._config.step_deadline_s, what)
        except RayActorError as error:
            raise NotServingError(f"{what}: the routing actor of {self._config.name!r} is gone") from error

    async def look(self) -> dict[int, str]:
        """Ask everybody for a report, and take what is there. Returns the serving ranks that have just fallen."""
        now = time.monotonic()
        for rank in [rank for rank in self._said if rank not in self._peers]:
            del self._said[rank]
            if rank not in self.lost:
                self._told.ended(rank)
        for rank, actor in self._peers.items():
            if rank not in self._asked:
                self._asked[rank] = _Asked(now, asyncio.create_task(_report(actor)))
        serving = self.serving
        waited = [self._asked[rank].task for rank in serving if rank in self._asked]
        if waited:
            await asyncio.wait(waited, timeout=_LOOK_S)
        self._excuse_ourselves(time.monotonic())
        fallen = {rank: f"rank {rank} is gone" for rank in self._absent()}
        for rank, detail in fallen.items():
            self._told.lost(rank, detail)
        self.lost |= fallen
        self.lost_serving |= fallen
        for rank, asked in list(self._asked.items()):
            detail = self._take(rank, asked)
            if not detail:
                continue
            self.lost[rank] = detail
            self._told.lost(rank, detail)
            self._peers.pop(rank, None)
            release_room(self._config.name, rank)
            if rank in serving:
                fallen[rank] = self.lost_serving[rank] = detail
        return fallen

    def _excuse_ourselves(self, now: float) -> None:
        """After we were away, as a process that was stopped for a while: their answers may lie unread."""
        if now - self._looked_at > max(self._config.step_deadline_s / 2, _AWAY_S):
            for asked in self._asked.values():
                asked.since = now
        self._looked_at = now

    def _take(self, rank: int, asked: _Asked) -> str:
        """Take a report that has come; why the rank is lost, if it is."""
        if not asked.task.done():
            late = time.monotonic() - asked.since > self._config.step_deadline_s
            if not (late and rank in self.serving):
                return ""
            asked.task.cancel()
            del self._asked[rank]
            return f"rank {rank} does not answer within {self._config.step_deadline_s:g} s"
        del self._asked[rank]
        error = asked.task.exception()
        if error is None:
            said = self._said[rank] = asked.task.result()
            self._told.said(rank, said.phase, said.generation)
            return ""
        if rank not in self._peers:  # it was ended meanwhile
            return ""
        if isinstance(error, RayActorError):
            return f"rank {rank} died"
        raise error

    def _absent(self) -> list[int]:
        """Members of the active group that nobody has found, after a restart say."""
        active = [rank.value for rank in self.live[-1].group.peers] if self.live else []
        return [rank for rank in active if rank not in self._peers and rank not in self.lost]

    @property
    def serving(self) -> tuple[int, ...]:
        """Ranks whose steps others wait for: those of the active group, and of older ones that have not left yet."""
        if not self.live:
            return ()
        ranks = [rank.value for rank in self.live[-1].group.peers]
        for snapshot in self.live[:-1]:
            for rank in snapshot.group.peers:
                said = self._said.get(rank.value)
                if rank.value not in ranks and said is not None and said.phase is PeerPhase.SERVING:
                    ranks.append(rank.value)
        return tuple(rank for rank in ranks if rank in self._peers)

    @property
    def failure(self) -> str:
        """Why an engine that answers does not run any more; empty when all do."""
        return next((said.failure for said in self._said.values() if said.failure), "")

    @property
    def coordinates(self) -> tuple[int, int]:
        """Epoch and generation that serve."""
        return (self.live[-1].group.epoch, self.live[-1].generation) if self.live else (0, 0)

    def observed(self) -> Observed:
        """The last look. A rank that has not answered yet is starting."""
        peers = {rank: self._said.get(rank, Peer(rank, PeerPhase.STARTING)) for rank in self._peers}
        known = {snapshot.generation for snapshot in self.live}
        coming = tuple(snapshot for snapshot in self.reserved if snapshot.generation not in known)
        return Observed(peers, (*coming, *self.live), frozenset(self.lost))

    async def _leases(self, live: Iterable[PlacementSnapshot]) -> tuple[Lease, ...]:
        """What living ranks hold; only those of the `live` generations' groups can hold any."""
        ranks = {rank.value for snapshot in live for rank in snapshot.group.peers}
        found = await self._all(sorted(ranks.intersection(self._peers)), "leases")
        return tuple(lease for some in found for lease in some)

    async def progress(self) -> dict[int, LoadProgress]:
        """How far each peer is with loading."""
        ranks = list(self._peers)
        return dict(zip(ranks, await self._all(ranks, "progress"), strict=True))

    async def statuses(self) -> tuple[EngineStatus, ...]:
        """Of every rank that serves, in the order of ranks; one of the active group may be about to begin."""
        begun = [rank for rank in self.serving if rank not in self._said or self._said[rank].phase is PeerPhase.SERVING]
        found = await self._all(sorted(begun), "status")
        return tuple(found)

    async def _all(self, ranks: Iterable[int], method: str) -> list[Any]:
        calls: Mapping[int, Any] = {rank: getattr(self._peers[rank], method).remote() for rank in ranks}
        asks = (
            ray_await(call, self._config.start_deadline_s, f"{method} of rank {rank}") for rank, call in calls.items()
        )
        try:
            return list(await asyncio.gather(*asks))
        except RayActorError as error:
            raise NotServingError(
                f"cluster {self._config.name!r}: {method}: an actor that was asked is gone"
            ) from error


async def _report(actor: ActorHandle) -> Peer:
    # Its own deadline is the lookout's: a rank that starts may take minutes, one that serves only a step deadline.
    said: Peer = await actor.report.remote()
    return said
