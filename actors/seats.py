"""A peer's place in the cluster over time: seats in epochs, leases on generations, and the views compiled from both.

One epoch serves; at times the next one is joined beside it. A lease is this peer's from the moment it is granted until
its view has run its last step, or until compiling it failed. All methods are the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle

from ray_moe.actors.bringup import (
    backend_of,
    groups_of,
    release_bundle,
    transport_over,
    window_of,
    workspaces_of,
)
from ray_moe.actors.memory import require_room
from ray_moe.actors.model import LoadedModel, load_model
from ray_moe.actors.routing import Grant
from ray_moe.comm.join import join_transport
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.comm.transports import Transport
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.layouts import expert_layout, require_layout
from ray_moe.controlplane.rollout import Did, Heard, RolesOrder
from ray_moe.dataplane.layer import LayerCounters
from ray_moe.dataplane.local import Workspaces
from ray_moe.dataplane.route_counts import RouteCounts
from ray_moe.deadline import ray_await, wait_for
from ray_moe.engine.blocks import overlap_shared
from ray_moe.engine.generation import Backend, Departure, GenerationView, build_view
from ray_moe.engine.loop import EngineLoop
from ray_moe.engine.records import ModelFacts
from ray_moe.engine.roles import Beside, Part, Roles
from ray_moe.errors import NotServingError, RayMoEError, ReleaseError
from ray_moe.identity import GlobalRank
from ray_moe.placement import Lease, PlacementSnapshot, ReleaseBundle
from ray_moe.topology import ProcessGroupSpec, Topology
from ray_moe.weights.slots import SlotPool

if TYPE_CHECKING:
    from ray_moe.comm.window import NodeWindow

# Runs blocking work off the event loop: what an actor calls `_beside`.
RunBeside = Callable[..., Awaitable[Any]]


class Seats:
    """`model` and `pool` are what views are compiled over; `add_model` brings another checkpoint beside it."""

    def __init__(
        self,
        config: ClusterConfig,
        rank: GlobalRank,
        beside: RunBeside,
        model: LoadedModel,
        pool: SlotPool,
        counters: Mapping[int, LayerCounters],
        route_counts: RouteCounts,
    ) -> None:
        self._config, self._rank, self._beside = config, rank, beside
        self._models = {model.facts.checkpoint_version: model}
        self._paths: dict[Path, LoadedModel] = {}
        self._loading: dict[Path, asyncio.Task[None]] = {}
        self._pool, self._route_counts = pool, route_counts
        self._first_counters: Mapping[int, LayerCounters] | None = counters
        self._counters: dict[str, Mapping[int, LayerCounters]] = {}  # by release
        self._transports: dict[int, Transport] = {}  # by epoch
        self._joined_as: dict[int, ClusterConfig] = {}
        self._backends: dict[tuple[int, str], Backend] = {}  # by epoch and release
        self._window: NodeWindow | None = None
        self._workspaces: dict[tuple[int, bool], Workspaces] = {}  # whose addresses captured launches hold
        self._views: dict[int, GenerationView] = {}  # by generation, of leases that are out
        self._joining: dict[int, asyncio.Task[None]] = {}
        self._grants: dict[int, Grant] = {}  # by generation
        self._routing: ActorHandle | None = None
        self._staging = asyncio.Lock()

    # ---- epochs ----

    @property
    def epochs(self) -> frozenset[int]:
        """Epochs that this peer could serve."""
        return frozenset(self._transports)

    @property
    def neighbours(self) -> frozenset[int]:
        """Ranks of all epochs that this peer has a seat in: those it may have to call."""
        return frozenset(rank.value for seat in self._transports.values() for rank in seat.group.spec.peers)

    def group(self, epoch: int) -> ProcessGroupSpec:
        """The group that was joined for an epoch; `NotServingError` without a seat in it."""
        return self._seat(epoch).group.spec

    def _seat(self, epoch: int) -> Transport:
        if epoch not in self._transports:
            raise NotServingError(f"rank {self._rank} has no seat in epoch {epoch}; it has in {sorted(self.epochs)}")
        return self._transports[epoch]

    async def join(self, spec: ProcessGroupSpec, topology: Topology, store: StoreAddress) -> None:
        """Take the seats of an epoch; returns when all its members have. Asked again, it waits for the same end.

        Raises `CollectiveError` or `DeadlineError` when they do not meet.
        """
        if spec.epoch in self._transports:
            return
        task = self._joining.get(spec.epoch)
        if task is None:
            task = asyncio.create_task(self._join(spec, topology, store))
            self._joining[spec.epoch] = task
            task.add_done_callback(lambda _: self._joining.pop(spec.epoch, None))
        await asyncio.shield(task)

    async def _join(self, spec: ProcessGroupSpec, topology: Topology, store: StoreAddress) -> None:
        config = self._config
        self._joined_as[spec.epoch] = config
        self._transports[spec.epoch] = await self._beside(
            partial(
                join_transport,
                chunks=config.transport_chunks,
                device=self._pool.device,
                window=self._window_for(config),
            ),
            config.group,
            config.transport,
            groups_of(config, spec, topology),
            self._rank,
            store,
            config.step_deadline_s,
        )

    def _window_for(self, config: ClusterConfig) -> NodeWindow | None:
        """Of the model that came first: epochs come and go, a window stays, and with it what was captured over it."""
        if self._window is None:
            self._window = window_of(config, self._rank, next(iter(self._models.values())).trunk)
        return self._window

    def _workspaces_for(self, config: ClusterConfig) -> Workspaces | None:
        made = workspaces_of(config)
        return made if made is None else self._workspaces.setdefault((made.max_tokens, made.batch_invariant), made)

    def close(self, epoch: int) -> None:
        """Give an epoch up: peers that wait in it get an error at once. One that was never joined is fine."""
        transport = self._transports.pop(epoch, None)
        if transport is not None:
            transport.close()

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
            # The loop has closed the groups of past epochs.
            now = loop.view.epoch
            self._transports = {epoch: one for epoch, one in self._transports.items() if epoch >= now}
            self._backends = {key: one for key, one in self._backends.items() if key[0] >= now}

    async def depart(self, loop: EngineLoop, generation: int, epoch: int) -> None:
        """Leave at the step at which the others take `generation`, which is of an epoch without this peer."""
        async with self._staging:
            if loop.newest_staged.generation < generation:
                loop.stage(Departure(generation, epoch))

    # ---- releases beside one another ----

    def model(self, checkpoint: str) -> LoadedModel:
        """`NotServingError` for a checkpoint that is not loaded here."""
        if checkpoint not in self._models:
            raise NotServingError(f"rank {self._rank} has not loaded checkpoint {checkpoint}")
        return self._models[checkpoint]

    async def add_model(self, loop: EngineLoop, path: Path) -> ModelFacts:
        """Load another checkpoint; asked again, the same one, also while it is being loaded.

        Raises `NotAvailableError` where it does not fit beside what this peer holds, and what `load_model` raises.
        """
        if path not in self._paths:
            task = self._loading.get(path)
            if task is None:
                task = self._loading[path] = asyncio.create_task(self._add_model(loop, path))
                task.add_done_callback(lambda _: self._loading.pop(path, None))
            # Loading cannot be stopped: whoever waits too long for it finds it under way when he asks again.
            await wait_for(asyncio.shield(task), self._config.start_deadline_s, f"load_model on rank {self._rank}")
        return self._paths[path].facts

    async def _add_model(self, loop: EngineLoop, path: Path) -> None:
        config = self._config
        model = await asyncio.to_thread(self._load_beside, path, self._sharers(), self._held(loop))
        shared = overlap_shared(model.trunk, model.blocks) if config.strategy == "shared_path" else {}
        loop.know(model.trunk, shared)
        self._paths[path] = self._models[model.facts.checkpoint_version] = model

    def _load_beside(self, path: Path, sharers: int, held: int) -> LoadedModel:
        who = f"another checkpoint on rank {self._rank}"
        require_room(self._config, path, None, who=who, sharers=sharers, held=held)
        return load_model(self._config, path)

    def _sharers(self) -> int:
        """Peers of this node: all of them load it at the same time."""
        snapshot = max(self._grants.values(), key=lambda grant: grant.lease.generation).snapshot
        node = snapshot.topology.owner
        return sum(node[rank] == node[self._rank] for rank in snapshot.group.peers)

    def _held(self, loop: EngineLoop) -> int:
        """Bytes that stay here beside what is loaded."""
        trunks, cache = sum(model.trunk.nbytes for model in self._models.values()), loop.cache
        return trunks + self._pool.allocated_bytes + cache.num_blocks * cache.block_size * cache.position_bytes

    def observe(self, config: ClusterConfig, snapshot: PlacementSnapshot) -> ReleaseBundle:
        """What this peer makes of a release. Raises `NotServingError` without the checkpoint, or the epoch's seat, and
        `ReleaseError` where the group that was joined, or what a slot holds, is not the placement's layout."""
        facts, epoch = self.model(snapshot.checkpoint_version.value).facts, snapshot.group.epoch
        joined = self.group(epoch)
        groups = groups_of(self._joined_as[epoch], joined, snapshot.topology)
        require_layout(expert_layout(snapshot.group.peers), groups, snapshot)
        return release_bundle(config, snapshot, facts, joined)

    async def stage_roles(self, loop: EngineLoop, order: RolesOrder) -> None:
        """Hold views for a division of steps among releases. Raises as `stage`."""
        async with self._staging:
            if loop.division.newest >= order.number:
                return
            main = None if loop.view.release_id == order.main and not order.fresh else await self._view(order.main)
            beside = None
            if order.beside:
                beside = Beside(await self._view(order.beside), Part(order.part), order.period)
            loop.stage_roles(Roles(order.number, main, beside))
            if main is not None:  # the next epoch's groups are joined for what serves then
                self._config = self._grants[main.generation].config

    async def _view(self, release_id: str) -> GenerationView:
        """A view of a release: of its generation for new dispatches, or the one at hand where it takes none."""
        try:
            return await self._view_of(await self._acquire(release_id))
        except ReleaseError:
            held = [view for view in self._views.values() if view.release_id == release_id]
            if not held:
                raise
            return held[-1]

    def forget(self, loop: EngineLoop, release_id: str) -> None:
        """Drop backends of a release that leaves, and checkpoints that no other release here is of."""
        in_use = {view.release_id for view in self._views.values()}
        if release_id in in_use:
            raise NotServingError(f"rank {self._rank} still has a view of release {release_id}")
        self._backends = {key: one for key, one in self._backends.items() if key[1] != release_id}
        kept = {view.checkpoint for view in self._views.values()} | {loop.view.checkpoint}
        loop.trunk = self.model(loop.view.checkpoint).trunk
        self._models = {name: model for name, model in self._models.items() if name in kept}
        self._paths = {path: one for path, one in self._paths.items() if one.facts.checkpoint_version in kept}

    def heard(self, loop: EngineLoop) -> Heard:
        """What the controller needs to know of releases here."""
        totals = self.by_release
        return Heard(
            rank=self._rank.value,
            roles=loop.division.now.number,
            staged_roles=loop.division.newest,
            main=loop.view.release_id,
            committed_step=loop.counters.committed_step,
            open_beside=loop.load.beside,
            checkpoints=frozenset(self._models),
            did={
                name: Did(
                    **asdict(tally),
                    **_routes_of(totals.get(name, LayerCounters())),
                )
                for name, tally in tuple(loop.counters.releases.items())
            },
        )

    @property
    def by_release(self) -> dict[str, LayerCounters]:
        """The sums over the layers, copied."""
        return {name: LayerCounters.total(layers.values()) for name, layers in self._counters.items()}

    @property
    def all_counters(self) -> list[LayerCounters]:
        """Of every layer under every release."""
        return [counters for layers in self._counters.values() for counters in layers.values()]

    async def _acquire(self, release_id: str | None = None) -> Grant:
        holder, routing = f"rank-{self._rank}", self._require_routing()
        grant: Grant = await ray_await(
            routing.acquire.remote(holder, release_id), self._config.step_deadline_s, f"lease for {holder}"
        )
        held = self._grants.setdefault(grant.lease.generation, grant)
        if held is not grant:  # one per generation is enough
            routing.release.remote(grant.lease)
        return held

    async def _view_of(self, grant: Grant) -> GenerationView:
        """Compile what a lease grants, once; the lease goes back when that fails."""
        generation = grant.lease.generation
        if generation not in self._views:
            try:
                self._views[generation] = await self._beside(self._compile, grant)
            except RayMoEError:
                self.return_lease(generation)
                raise
        return self._views[generation]

    def _compile(self, grant: Grant) -> GenerationView:
        epoch, release_id = grant.header.epoch, grant.header.release_id
        seat, model = self._seat(epoch), self.model(grant.header.checkpoint_version)
        backend = self._backends.get((epoch, release_id))
        if backend is None:
            transport = transport_over(grant.config, self._joined_as[epoch], seat)
            backend = self._backends[epoch, release_id] = backend_of(
                grant.config, transport, model.blocks, self._workspaces_for(grant.config)
            )
        if release_id not in self._counters:
            fresh = {layer: LayerCounters() for layer in model.facts.moe_layers}
            self._counters[release_id], self._first_counters = self._first_counters or fresh, None
        return build_view(
            grant.lease,
            grant.header,
            grant.snapshot,
            self._rank,
            model.trunk,
            self._pool,
            backend,
            self._counters[release_id],
            self._route_counts,
        )

    def return_lease(self, generation: int) -> None:
        """No local handle of the generation is left."""
        self._views.pop(generation, None)
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


def _routes_of(total: LayerCounters) -> dict[str, int]:
    """Fields of `Did`."""
    routes = total.routes
    return {
        "routes": routes.attempted.total(),
        "dropped_routes": routes.dropped.total(),
        "remote_routes": routes.remote.total(),
        "inter_node_routes": routes.inter_node.total(),
        "replays": total.replays,
        "fallbacks": total.fallbacks.total(),
        "mismatches": routes.mismatches.total(),
        "stale_handles": routes.stale.total(),
        "unconserved": routes.unconserved.total(),
    }
