"""The controller actor: brings a cluster up, publishes placements, watches peers, takes the cluster down.

Placement is decided by pure functions of `controlplane`; this file runs what they decide, in this order for every
generation: place, fill beside the serving slots, verify digests, publish, stage on all peers, later retire and free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors.bringup import find_model, release_bundle, seats_of, store_host
from ray_moe.actors.remote import create_expert, create_routing, kill
from ray_moe.actors.reports import ClusterStatus, Directory, cluster_status
from ray_moe.actors.routing import Retired
from ray_moe.comm.rendezvous import RendezvousStore
from ray_moe.config import ClusterConfig, expand_replicas
from ray_moe.controlplane.generations import GenerationStatus
from ray_moe.controlplane.solve import Assignment, PoolSlot, balanced, fills, place, pool_capacity, retired_slots
from ray_moe.deadline import ray_await
from ray_moe.engine.records import EngineStatus, LoadProgress, ModelFacts
from ray_moe.errors import DeadlineError, NotServingError, PeerLostError, RayMoEError
from ray_moe.identity import GlobalRank, PlacementVersion
from ray_moe.placement import CheckpointVersion, PlacementSnapshot
from ray_moe.topology import ProcessGroupSpec, Topology

_LOG = logging.getLogger(__name__)
_TICK_S = 0.5


class ClusterState(StrEnum):
    """Where the cluster stands."""

    STARTING = "starting"
    SERVING = "serving"
    DEGRADED = "degraded"
    STOPPED = "stopped"
    FAILED = "failed"


# state -> {event: next}. DEGRADED: the epoch is broken (a peer died, or failed); calls fail by name.
CLUSTER_TABLE: dict[ClusterState, dict[str, ClusterState]] = {
    ClusterState.STARTING: {
        "serve": ClusterState.SERVING,
        "fail": ClusterState.FAILED,
        "stop": ClusterState.STOPPED,
    },
    ClusterState.SERVING: {"lose_peer": ClusterState.DEGRADED, "stop": ClusterState.STOPPED},
    ClusterState.DEGRADED: {"lose_peer": ClusterState.DEGRADED, "stop": ClusterState.STOPPED},
    ClusterState.FAILED: {"stop": ClusterState.STOPPED},
    ClusterState.STOPPED: {},
}


class ControllerActor:
    """Ray actor; one per cluster."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._state = ClusterState.STARTING
        self._peers: dict[int, ActorHandle] = {}
        self._lost: dict[int, str] = {}
        self._failure = ""  # why the epoch is broken although nobody died
        self._statuses: dict[int, EngineStatus] = {}
        self._routing: ActorHandle | None = None
        self._store: RendezvousStore | None = None
        self._facts: ModelFacts | None = None
        self._model_path = Path()
        self._capacity = 0
        self._publishing = asyncio.Lock()
        self._starting: asyncio.Task[Any] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping: asyncio.Future[None] | None = None

    # ---- up ----

    async def start(self) -> None:
        """Bring the cluster up and serve. On an error everything that was started is ended, and it propagates."""
        self._starting = asyncio.current_task()
        try:
            await self._start()
        except BaseException:
            if self._state is ClusterState.STARTING:  # not when `stop` cancelled us
                self._advance("fail")
            self._kill_all()
            raise
        self._advance("serve")
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(_log_failure)

    async def _start(self) -> None:
        config = self._config
        self._model_path = await asyncio.to_thread(find_model, config)
        self._routing = create_routing(config)
        self._peers = {rank: create_expert(config, rank) for rank in range(config.peers)}
        facts: list[ModelFacts] = await self._all("load", self._model_path)
        self._facts = facts[0]
        nodes: list[str] = await self._all("node")
        first = self._first_placement(facts[0], nodes)
        await self._all("allocate", self._capacity)
        verified = await self._fill(first, prior=None)
        self._store = RendezvousStore(store_host(nodes), config.start_deadline_s)
        await self._all("join", verified.group, verified.topology, self._store.address)
        bundle = release_bundle(config, verified, facts[0])
        await self._ask(self._routing.publish.remote(verified, bundle), "publish the first placement")
        await self._all("serve", self._routing, tuple(self._peers.values()))

    def _first_placement(self, facts: ModelFacts, nodes: Sequence[str]) -> PlacementSnapshot:
        config = self._config
        ranks = tuple(GlobalRank(rank) for rank in self._peers)
        assignment = balanced(
            dict.fromkeys(facts.moe_layers, facts.num_experts),
            ranks,
            replicas=expand_replicas(config.replicas, facts.moe_layers),
            spare_slots=config.spare_slots,
        )
        self._capacity = pool_capacity(assignment)
        group, topology = seats_of(config, nodes)
        return self._place(assignment, generation=1, group=group, topology=topology, prior=None, live=())

    def _place(
        self,
        assignment: Assignment,
        *,
        generation: int,
        group: ProcessGroupSpec,
        topology: Topology,
        prior: PlacementSnapshot | None,
        live: Sequence[PlacementSnapshot],
    ) -> PlacementSnapshot:
        checkpoint = CheckpointVersion(self._require_facts().checkpoint_version)
        return place(
            assignment,
            generation=generation,
            version=PlacementVersion(f"placement-v{generation}"),
            release_id=f"{self._config.name}-{checkpoint.value[:12]}",
            checkpoint=checkpoint,
            group=group,
            topology=topology,
            prior=prior,
            capacity=self._capacity,
            live=live,
        )

    async def _fill(self, candidate: PlacementSnapshot, prior: PlacementSnapshot | None) -> PlacementSnapshot:
        """Load what `candidate` needs beyond `prior`, and return it carrying the digests that its owners report.

        When a peer fails, the slots that the others filled are freed again.
        """
        wanted = fills(candidate, prior)
        ranks = sorted({item.rank.value for item in wanted})
        work = [
            self._ask(
                self._peers[rank].fill.remote([item for item in wanted if item.rank.value == rank]),
                f"fill slots on rank {rank}",
            )
            for rank in ranks
        ]
        results = await asyncio.gather(*work, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            for rank, result in zip(ranks, results, strict=True):
                if isinstance(result, dict):
                    self._peers[rank].free.remote(tuple(result))
            raise failures[0]
        digests = {
            (layer, rank, pool_slot): digest
            for rank, result in zip(ranks, results, strict=True)
            if isinstance(result, dict)
            for (layer, pool_slot), digest in result.items()
        }
        return candidate.with_digests(digests)

    # ---- generations ----

    async def publish(self, replicas: Mapping[tuple[int, int], int]) -> int:
        """Place, fill, verify and publish another generation while requests run; returns its number.

        `replicas[(layer, expert)]` is the wanted number of copies, 1 where absent. The old generation serves until
        every peer has staged the new one, then drains. Raises `ConfigError` for a request out of bounds,
        `PlacementError` when the slot pools have no room for both, and whatever filling raises; the old generation then
        goes on serving.
        """
        async with self._publishing:
            await self._look_at_all()
            routing = self._require_serving()
            await self._all("stage")  # whoever failed to stage the active generation does it now, before the next
            live: tuple[PlacementSnapshot, ...] = await self._ask(routing.live.remote(), "live generations")
            prior = live[-1]
            facts = self._require_facts()
            assignment = balanced(
                dict.fromkeys(facts.moe_layers, facts.num_experts),
                prior.group.peers,
                replicas=replicas,
                spare_slots=self._config.spare_slots,
            )
            candidate = self._place(
                assignment,
                generation=prior.generation + 1,
                group=prior.group,
                topology=prior.topology,
                prior=prior,
                live=live,
            )
            verified = await self._fill(candidate, prior)
            bundle = release_bundle(self._config, verified, facts)
            try:
                await self._ask(routing.publish.remote(verified, bundle), f"publish generation {verified.generation}")
            except RayMoEError:
                await self._free(retired_slots(verified, live))
                raise
            await self._all("stage")
            return verified.generation

    async def _retire(self) -> None:
        """Retire what nobody refers to any more, and free its slots."""
        if self._routing is None or not self._statuses:
            return
        committed = min(status.steps_agreed for status in self._statuses.values())
        due: Retired = await self._ask(self._routing.retire_due.remote(committed), "retire generations")
        for snapshot in due.retired:
            await self._free(retired_slots(snapshot, due.live))

    async def _free(self, slots: Iterable[PoolSlot]) -> None:
        by_rank: dict[int, list[tuple[int, int]]] = {}
        for rank, layer, pool_slot in slots:
            by_rank.setdefault(rank.value, []).append((layer, pool_slot))
        await asyncio.gather(
            *(
                self._ask(self._peers[rank].free.remote(free), f"free slots on rank {rank}")
                for rank, free in by_rank.items()
                if rank not in self._lost
            )
        )

    # ---- health ----

    async def _watch(self) -> None:
        while self._state in (ClusterState.SERVING, ClusterState.DEGRADED):
            try:
                await self._look_at_all()
                if self._state is ClusterState.SERVING and not self._publishing.locked():
                    async with self._publishing:
                        await self._retire()
            except RayMoEError as error:
                # The watch goes on whatever one round of it finds: a later peer's death must still be seen.
                _LOG.warning("watching %s: %s", self._config.name, error)
            await asyncio.sleep(_TICK_S)

    async def _look_at_all(self) -> None:
        await asyncio.gather(*(self._look_at(rank) for rank in self._peers if rank not in self._lost))

    async def _look_at(self, rank: int) -> None:
        try:
            status: EngineStatus = await ray_await(
                self._peers[rank].status.remote(), self._config.step_deadline_s, f"status of rank {rank}"
            )
        except RayActorError:
            await self._bury(rank, f"rank {rank} died")
        except DeadlineError as error:
            await self._bury(rank, f"rank {rank} does not answer: {error}")
        else:
            self._statuses[rank] = status
            if status.failure and self._state is ClusterState.SERVING:
                self._failure = status.failure
                self._advance("lose_peer")

    async def _bury(self, rank: int, detail: str) -> None:
        """A peer is gone: its leases go back, and the survivors fail their calls now, not at the next deadline."""
        if self._state is ClusterState.STOPPED:
            return  # we ended it ourselves
        _LOG.warning("%s", detail)
        self._lost[rank] = detail
        self._statuses.pop(rank, None)
        self._advance("lose_peer")
        for other, peer in self._peers.items():
            if other not in self._lost:
                peer.peer_lost.remote(detail)
        if self._routing is not None:
            await self._ask(self._routing.bury.remote(f"rank-{rank}"), f"release the leases of rank {rank}")

    # ---- questions ----

    async def progress(self) -> dict[int, LoadProgress]:
        """How far each peer is with loading; empty before the peers exist."""
        ranks = [rank for rank in self._peers if rank not in self._lost]
        looks = (self._ask(self._peers[rank].progress.remote(), f"progress of rank {rank}") for rank in ranks)
        return dict(zip(ranks, await asyncio.gather(*looks), strict=True))

    async def directory(self) -> Directory:
        """Peers and model, for clients. Raises `PeerLostError` or `NotServingError` when the cluster cannot serve."""
        self._require_serving()
        return Directory(self._config, self._model_path, self._require_facts(), tuple(self._peers.values()))

    async def status(self) -> ClusterStatus:
        """A fresh look at peers, slots, generations and references."""
        if self._state not in (ClusterState.SERVING, ClusterState.DEGRADED) or self._routing is None:
            raise NotServingError(f"cluster {self._config.name!r} is {self._state.value}")
        await self._look_at_all()
        generations: tuple[GenerationStatus, ...] = await self._ask(self._routing.status.remote(), "registry")
        active: PlacementSnapshot = await self._ask(self._routing.active.remote(), "active generation")
        peers = tuple(self._statuses[rank] for rank in sorted(self._statuses))
        return cluster_status(self._config, self._state.value, active, generations, peers, tuple(sorted(self._lost)))

    async def placement(self) -> PlacementSnapshot:
        """The active placement."""
        active: PlacementSnapshot = await self._ask(self._require_serving().active.remote(), "active generation")
        return active

    # ---- down ----

    async def stop(self) -> None:
        """End the engines at one agreed step, then every actor but this one. A peer that does not follow is killed.

        Whoever asks again waits for the same end.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        in_step = self._state is ClusterState.SERVING
        if self._state is ClusterState.STARTING and self._starting is not None:
            self._starting.cancel()
        self._advance("stop")
        if in_step:
            results = await asyncio.gather(
                *(self._ask(peer.stop.remote(), "stop") for peer in self._peers.values()), return_exceptions=True
            )
            for result in results:
                if isinstance(result, BaseException):
                    _LOG.warning("an engine did not stop in step with the others: %s", result)
        self._kill_all()

    def _kill_all(self) -> None:
        for actor in (*self._peers.values(), *((self._routing,) if self._routing is not None else ())):
            kill(actor)

    # ---- details ----

    async def _all(self, method: str, *args: object) -> list[Any]:
        """Call one method on every live peer at once; the first failure propagates after all have answered."""
        ranks = [rank for rank in self._peers if rank not in self._lost]
        work = (
            self._ask(getattr(self._peers[rank], method).remote(*args), f"{method} on rank {rank}") for rank in ranks
        )
        results = await asyncio.gather(*work, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _ask(self, ref: Any, what: str) -> Any:
        try:
            return await ray_await(ref, self._config.start_deadline_s, what)
        except RayActorError as error:
            # Left as it is, our caller would take it for the death of this actor.
            raise NotServingError(f"cluster {self._config.name!r}: {what}: the actor that was asked is gone") from error

    def _require_facts(self) -> ModelFacts:
        if self._facts is None:
            raise NotServingError(f"cluster {self._config.name!r} has not loaded its model yet")
        return self._facts

    def _require_serving(self) -> ActorHandle:
        status = next(iter(self._statuses.values()), None)
        epoch, generation = (status.epoch, status.generation) if status else (0, 0)
        if self._lost:
            rank, detail = next(iter(self._lost.items()))
            raise PeerLostError(detail, rank, epoch, generation)
        if self._failure:
            raise NotServingError(f"cluster {self._config.name!r}: epoch {epoch} is broken: {self._failure}")
        if self._state is not ClusterState.SERVING or self._routing is None:
            raise NotServingError(f"cluster {self._config.name!r} is {self._state.value}")
        return self._routing

    def _advance(self, event: str) -> None:
        following = CLUSTER_TABLE[self._state].get(event)
        if following is None:
            raise RayMoEError(f"cluster {self._config.name!r}: event {event!r} is illegal in state {self._state.value}")
        self._state = following


def _log_failure(task: asyncio.Task[None]) -> None:
    """Nobody awaits the watch; an error in it must be seen all the same."""
    if not task.cancelled() and task.exception() is not None:
        _LOG.error("the controller stopped watching its peers", exc_info=task.exception())
