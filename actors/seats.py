"""A peer's place in the cluster over time: seats in epochs, leases on generations, and the views compiled from both.

One epoch serves; at times the next one is joined beside it. A lease is this peer's from the moment it is granted until
its view has run its last step, or until compiling it failed. All methods are the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from ray.actor import ActorHandle

from ray_moe.actors.bringup import backend_of, groups_of
from ray_moe.actors.routing import Grant
from ray_moe.comm.join import join_transport
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.config import ClusterConfig
from ray_moe.dataplane.layer import LayerCounters
from ray_moe.dataplane.route_counts import RouteCounts
from ray_moe.deadline import ray_await
from ray_moe.engine.blocks import BlockFacts
from ray_moe.engine.generation import Backend, Departure, GenerationView, build_view
from ray_moe.engine.loop import EngineLoop
from ray_moe.engine.trunk import Trunk
from ray_moe.errors import NotServingError, RayMoEError
from ray_moe.identity import GlobalRank
from ray_moe.placement import Lease
from ray_moe.topology import ProcessGroupSpec, Topology
from ray_moe.weights.slots import SlotPool

# Runs blocking work off the event loop: what an actor calls `_beside`.
Beside = Callable[..., Awaitable[Any]]


class Seats:
    """`trunk`, `pool` and `blocks` are what views are compiled over."""

    def __init__(
        self,
        config: ClusterConfig,
        rank: GlobalRank,
        beside: Beside,
        trunk: Trunk,
        pool: SlotPool,
        blocks: Mapping[int, BlockFacts],
        counters: Mapping[int, LayerCounters],
        route_counts: RouteCounts,
    ) -> None:
        self._config, self._rank, self._beside = config, rank, beside
        self._trunk, self._pool, self._blocks = trunk, pool, blocks
        self._counters, self._route_counts = counters, route_counts
        self._backends: dict[int, Backend] = {}
        self._joining: dict[int, asyncio.Task[None]] = {}
        self._grants: dict[int, Grant] = {}  # by generation
        self._routing: ActorHandle | None = None
        self._staging = asyncio.Lock()

    # ---- epochs ----

    @property
    def epochs(self) -> frozenset[int]:
        """Epochs that this peer could serve."""
        return frozenset(self._backends)

    def group(self, epoch: int) -> ProcessGroupSpec:
        """The group that was joined for an epoch; `NotServingError` without a seat in it."""
        if epoch not in self._backends:
            raise NotServingError(f"rank {self._rank} has no seat in epoch {epoch}; it has in {sorted(self._backends)}")
        return self._backends[epoch].transport.group.spec

    async def join(self, spec: ProcessGroupSpec, topology: Topology, store: StoreAddress) -> None:
        """Take the seats of an epoch; returns when all its members have. Asked again, it waits for the same end.

        Raises `CollectiveError` or `DeadlineError` when they do not meet.
        """
        if spec.epoch in self._backends:
            return
        task = self._joining.get(spec.epoch)
        if task is None:
            task = asyncio.create_task(self._join(spec, topology, store))
            self._joining[spec.epoch] = task
            task.add_done_callback(lambda _: self._joining.pop(spec.epoch, None))
        await asyncio.shield(task)

    async def _join(self, spec: ProcessGroupSpec, topology: Topology, store: StoreAddress) -> None:
        config = self._config
        transport = await self._beside(
            partial(join_transport, chunks=config.transport_chunks),
            config.group,
            config.transport,
            groups_of(config, spec, topology),
            self._rank,
            store,
            config.step_deadline_s,
        )
        self._backends[spec.epoch] = backend_of(config, transport, self._blocks)

    def close(self, epoch: int) -> None:
        """Give an epoch up: peers that wait in it get an error at once. One that was never joined is fine."""
        backend = self._backends.pop(epoch, None)
        if backend is not None:
            backend.transport.close()

    # ---- generations ----

    async def first_view(self, routing: ActorHandle) -> GenerationView:
        """The active generation, for a loop that begins. Raises as `stage`."""
        self._routing = routing
        return await self._view_of(await self._acquire())

    async def stage(self, loop: EngineLoop, generation: int) -> None:
        """Hold a lease on the active generation, at least `generation`, ready for the step at which all peers do.

        Raises `StaleHandleError` when this peer's slots or epoch are not the placement's; the lease is then given back.
        """
        async with self._staging:
            if loop.newest_staged.generation >= generation:
                return
            view = await self._view_of(await self._acquire())
            try:
                loop.stage(view)
            except RayMoEError:
                self.return_lease(view.generation)
                raise
            for past in [epoch for epoch in self._backends if epoch < loop.view.epoch]:
                del self._backends[past]  # the loop has closed its groups

    async def depart(self, loop: EngineLoop, generation: int, epoch: int) -> None:
        """Leave at the step at which the others take `generation`, which is of an epoch without this peer."""
        async with self._staging:
            if loop.newest_staged.generation < generation:
                loop.stage(Departure(generation, epoch))

    async def _acquire(self) -> Grant:
        holder, routing = f"rank-{self._rank}", self._require_routing()
        grant: Grant = await ray_await(
            routing.acquire.remote(holder), self._config.step_deadline_s, f"lease for {holder}"
        )
        held = self._grants.setdefault(grant.lease.generation, grant)
        if held is not grant:  # one per generation is enough
            routing.release.remote(grant.lease)
        return held

    async def _view_of(self, grant: Grant) -> GenerationView:
        """Compile what a lease grants; the lease goes back when that fails."""
        try:
            view: GenerationView = await self._beside(self._compile, grant)
        except RayMoEError:
            self.return_lease(grant.lease.generation)
            raise
        return view

    def _compile(self, grant: Grant) -> GenerationView:
        epoch = grant.header.epoch
        if epoch not in self._backends:
            raise NotServingError(f"rank {self._rank} has no seat in epoch {epoch}; it has in {sorted(self._backends)}")
        return build_view(
            grant.lease,
            grant.header,
            grant.snapshot,
            self._rank,
            self._trunk,
            self._pool,
            self._backends[epoch],
            self._counters,
            self._route_counts,
        )

    def return_lease(self, generation: int) -> None:
        """No local handle of the generation is left."""
        grant = self._grants.pop(generation, None)
        if grant is not None:
            self._require_routing().release.remote(grant.lease)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """What this peer holds, for a registry that has lost its memory."""
        return tuple(grant.lease for grant in self._grants.values())

    def _require_routing(self) -> ActorHandle:
        if self._routing is None:
            raise NotServingError(f"rank {self._rank} does not serve yet: it knows no routing actor")
        return self._routing
