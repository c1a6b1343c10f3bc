"""The expert actor: one peer. A slot pool, a trunk, a share of the requests, and seats in the groups of epochs.

The engine loop runs on a thread of its own, in lockstep with the other peers. This actor's event loop serves everybody
else: it admits requests and hands them over, streams what the loop delivers, fills slots beside the serving ones, joins
the next epoch beside the serving one and stages generations. No step ever waits for it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from ray.actor import ActorHandle

from ray_moe.actors.announce import log_as
from ray_moe.actors.calls import CallDesk, LayerCalls
from ray_moe.actors.collector import forget_what_has_gone, keep_what_is_loaded
from ray_moe.actors.device import step_options, take_device
from ray_moe.actors.fetch import lane_of
from ray_moe.actors.fill import Filler, SlotGiver
from ray_moe.actors.live import LiveAnswers
from ray_moe.actors.mailbox import Outlet, Polled, PostOffice
from ray_moe.actors.memory import Room, require_room, room_on
from ray_moe.actors.model import LoadedModel, load_model, scheduler_of
from ray_moe.actors.rank_metrics import RankMetrics
from ray_moe.actors.reception import Reception
from ray_moe.actors.remote import find_expert
from ray_moe.actors.reports import engine_status, peer_report
from ray_moe.actors.seats import Seats
from ray_moe.actors.tracing import StepRecords, recorder_of
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.effects import Peer
from ray_moe.controlplane.fetching import FillOrder, FillOutcome, FromPeer
from ray_moe.controlplane.rollout import Heard, RolesOrder
from ray_moe.dataplane.drill import drill
from ray_moe.dataplane.layer import LayerCounters
from ray_moe.dataplane.route_counts import DemandReport, RouteCounts
from ray_moe.deadline import Deadline, join_thread, wait_for
from ray_moe.engine.blocks import overlap_shared
from ray_moe.engine.handover import Departing
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.loop import EngineLoop, LoopState
from ray_moe.engine.records import EngineStatus, GenerateRequest, LoadProgress, Members, ModelFacts
from ray_moe.errors import NotServingError
from ray_moe.identity import GlobalRank
from ray_moe.placement import Lease, PlacementSnapshot, ReleaseBundle
from ray_moe.priority import restore_process
from ray_moe.topology import ProcessGroupSpec, Topology
from ray_moe.weights.checkpoint import ExpertWeights
from ray_moe.weights.slots import SlotPool

_T = TypeVar("_T")
_SWITCH_INTERVAL_S = 0.0002
# A rank that has left waits so long for its clients to fetch what they were given there.
_FETCH_S, _FETCH_POLL_S = 10.0, 0.02
# Demand reports that a controller has not asked for yet; older ones are lost, and known to be.
_REPORTS_KEPT = 64


class ExpertActor(SlotGiver, LayerCalls, LiveAnswers, StepRecords, RankMetrics):
    """Ray actor, one per rank. What a method has done already it does not do twice.

    Life: `prepare`, `fill`, `join`, `serve`; then requests, generations and epochs until `stop`, or until it leaves:
    `hand_over`, `depart`, `finish`.
    """

    def __init__(self, config: ClusterConfig, rank: int) -> None:
        log_as(config, f"expert-{rank}")
        take_device(config)
        # The engine's thread and the event loop share the interpreter; by default one may keep the other out for 5 ms,
        # which is a good part of a step.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._config, self._rank = config, GlobalRank(rank)
        self._node = str(ray.get_runtime_context().get_node_id())
        self._dtype = getattr(torch, config.dtype)
        self._progress = LoadProgress()
        self._model: LoadedModel | None = None
        self._pool: SlotPool | None = None
        self._seats: Seats | None = None
        self._counters: dict[int, LayerCounters] = {}
        self._engine: EngineLoop | None = None
        self._thread: threading.Thread | None = None
        self._reception: Reception | None = None
        self._post_office = PostOffice(cancel=lambda request_id: self._loop.cancel(request_id))
        self._sweeper: asyncio.Task[None] | None = None
        self._one_time = asyncio.Lock()  # load, allocate, serve
        self._route_counts: RouteCounts | None = None
        self._demand: deque[DemandReport] = deque(maxlen=_REPORTS_KEPT)
        self._actors: dict[int, ActorHandle] = {}

    # ---- one-time work ----

    async def room(self) -> Room:
        """What memory is free for this peer."""
        return await self._beside(room_on, self._node, self._config.device)

    async def prepare(self, model: Path, capacity: int | None = None, sharers: int = 1) -> ModelFacts:
        """Load the trunk, open the checkpoint, reserve `capacity` slots per layer; no expert is read.

        Without a capacity the slots are left for another call, and `room` was asked before; with one this peer is one
        of `sharers` that come to its node. Raises what `require_room`, `load_model` and `SlotPool` raise.
        """
        async with self._one_time:
            if self._model is None:
                await self._beside(self._load, model, capacity, sharers)
            if self._pool is None and capacity is not None:
                await self._beside(self._allocate, capacity)
        return self._loaded.facts

    def _load(self, model: Path, capacity: int | None, sharers: int) -> None:
        self._progress = LoadProgress("trunk", 0, 1)
        if capacity is not None:
            require_room(self._config, model, capacity, sharers=sharers, who=f"rank {self._rank}")
        self._model = load_model(self._config, model)
        self._counters = {layer: LayerCounters() for layer in self._model.facts.moe_layers}
        self._progress = LoadProgress("trunk", 1, 1)

    def _allocate(self, capacity: int) -> None:
        """Slots whose addresses stay for this actor's life."""
        config, model, checkpoint = self._config, self._loaded, self._loaded.checkpoint
        lane, seconds = lane_of(config), config.step_deadline_s
        self._pool = SlotPool(
            checkpoint.moe_layers, capacity, checkpoint.layout, dtype=self._dtype, device=config.device, memory=lane
        )
        self._filler = Filler(
            self._pool, self._read_expert, self._actor_of, deadline_s=seconds, node=self._node, lane=lane
        )
        self._route_counts = RouteCounts(checkpoint.moe_layers, checkpoint.num_experts, torch.device(config.device))
        self._seats = Seats(config, self._rank, self._beside, model, self._pool, self._counters, self._route_counts)

    def _read_expert(self, key: str, layer: int, expert: int) -> ExpertWeights:
        model = self._my_seats.model(key) if key else self._loaded
        return model.checkpoint.expert(layer, expert, dtype=self._dtype)

    async def fill(self, orders: Sequence[FillOrder]) -> tuple[FillOutcome, ...]:
        """Bring verified experts into free slots, beside serving ones; what became of each order, in their order."""
        done = 0

        def count(_: FillOutcome) -> None:
            nonlocal done
            done += 1
            self._progress = LoadProgress("experts", done, len(orders))

        self._progress = LoadProgress("experts", 0, len(orders))
        await self._meet([order.source.rank for order in orders if isinstance(order.source, FromPeer)])
        return await _present(self._filler, "allocate first").fill(orders, count)

    async def free(self, slots: Sequence[tuple[int, int]]) -> None:
        """Free pool slots (layer, pool slot) that no live generation refers to; those that are free stay free."""
        pool = _present(self._pool, "allocate first")
        resident = pool.inventory()
        for slot in slots:
            if slot in resident:
                pool.release(*slot)

    async def serve(self, routing: ActorHandle) -> None:
        """Acquire a lease on the active generation and start the engine loop under it, at normal priority."""
        async with self._one_time:
            if self._engine is None:
                await self._serve(routing)

    async def _serve(self, routing: ActorHandle) -> None:
        config, model, seats = self._config, self._loaded, self._my_seats
        trunk = model.trunk
        view = await seats.first_view(routing)
        engine = EngineLoop(
            self._rank.value,
            trunk,
            KVCache(config.kv_blocks, config.block_size, config.device),
            scheduler_of(config, trunk),
            view,
            Outlet(
                asyncio.get_running_loop(), self._post_office, seats.return_lease, self._wake_peers, self._demand.extend
            ),
            model.blocks,
            shared=overlap_shared(trunk, model.blocks) if config.strategy == "shared_path" else None,
            audit_rate=config.audit_rate,
            route_counts=self._route_counts,
            demand_every_steps=config.demand_every_steps,
            trace=recorder_of(config, self._rank.value),
            **step_options(config),
        )
        await self._beside(engine.warm_up)
        self._engine = engine
        self._reception = Reception(config, self._rank.value, engine, self._post_office, model.path)
        self._calls = CallDesk(config, self._rank.value, engine, self._reception, routing)
        _present(self._filler, "allocate first").pace(config.fill_cap)
        keep_what_is_loaded()
        restore_process()  # from here on others wait for this peer's steps
        self._thread = threading.Thread(target=engine.run, name=f"engine-{self._rank}", daemon=True)
        self._thread.start()
        self._sweeper = asyncio.create_task(self._post_office.sweep())
        self.begin_metrics()
        self._progress = LoadProgress("serving", 1, 1)

    # ---- epochs and generations: `Seats` says what they raise ----

    async def observe(self, config: ClusterConfig, snapshot: PlacementSnapshot) -> ReleaseBundle:
        """What this peer makes of a release, of the checkpoint that it has loaded and the group that it has joined."""
        return self._my_seats.observe(config, snapshot)

    async def prepare_release(self, model: Path) -> ModelFacts:
        """Load another checkpoint beside the one that serves; no expert is read."""
        async with self._one_time:
            return await self._my_seats.add_model(self._loop, model)

    async def stage_roles(self, order: RolesOrder) -> None:
        """Hold leases and views for a division of steps among releases, for the step at which all peers do."""
        await self._my_seats.stage_roles(self._loop, order)

    async def forget_release(self, release_id: str) -> None:
        """Drop what is compiled for a release that leaves, its executables with it."""
        before = self._loaded.facts
        self._my_seats.forget(self._loop, release_id)
        self._model = self._my_seats.model(self._loop.view.checkpoint)
        if self._model.facts != before:
            forget_what_has_gone()

    async def drill(self) -> dict[str, str]:
        """How faults end that are made on copies of what this peer serves."""
        index, layer = next(iter(self._loop.view.layers.items()))
        return drill(layer, self._loaded.trunk.top_k, self._loaded.blocks[index].gate)

    async def releases(self) -> Heard:
        """What releases have done here, and which of them this peer serves."""
        return self._my_seats.heard(self._loop)

    async def join(self, spec: ProcessGroupSpec, topology: Topology, store: StoreAddress) -> None:
        """Take this peer's seats in an epoch; returns when all members have."""
        await self._my_seats.join(spec, topology, store)
        await self._meet([rank.value for rank in spec.peers])

    async def close_epoch(self, epoch: int) -> None:
        """Give up an epoch that was joined and will not be used, or is over."""
        if self._engine is None or epoch not in self._engine.epochs_in_use:
            self._my_seats.close(epoch)

    async def stage(self, generation: int) -> None:
        """Hold a lease on the active generation, at least `generation`, for the step at which all peers do."""
        await self._my_seats.stage(self._loop, generation)

    async def depart(self, generation: int, epoch: int) -> None:
        """Leave at the step at which the others take `generation`, which is of an epoch without this peer."""
        await self._my_seats.depart(self._loop, generation, epoch)

    async def leases(self) -> tuple[Lease, ...]:
        """What this peer holds, for a registry that has lost its memory."""
        return self._seats.leases if self._seats is not None else ()

    # ---- requests: `Reception` says what they raise ----

    async def submit(self, client: str, request: GenerateRequest) -> None:
        """Admit a request of `client`; what comes of it is fetched by `poll`, the scheduler's refusal too."""
        await self._desk.submit(client, request)

    async def poll(self, client: str, wait: float, known_members: int) -> Polled:
        """What `client`'s requests have been given since its last poll; waits up to `wait` seconds for a first item.

        One call carries a whole step for all requests of a client: Ray's cost is per call, not per token. A client that
        stops polling is gone, and its requests are cancelled.
        """
        return await self._post_office.poll(client, wait, known_members)

    async def cancel(self, request_id: str) -> bool:
        """End a request: its KV is free within one step. False when it does not run here."""
        return self._desk.cancel(request_id)

    async def hand_over(self, to: Sequence[int]) -> int:
        """Admit nothing more, and give every open request to one of the ranks `to`; how many these took."""
        await self._meet(to)
        return await self._desk.hand_over([(rank, self._actor_of(rank)) for rank in to])

    async def adopt(self, client: str, departing: Departing) -> bool:
        """Go on with a request that another peer hands over; False when this one leaves too."""
        return await self._desk.adopt(client, departing)

    async def readmit(self) -> None:
        """Take requests again."""
        self._desk.readmit()

    async def set_members(self, version: int, ranks: Sequence[int]) -> None:
        """Tell clients who takes requests."""
        await self._meet(ranks)
        self._post_office.set_members(Members(version, tuple((rank, self._actor_of(rank)) for rank in ranks)))
        kept = {*ranks, *self._my_seats.neighbours}
        self._actors = {rank: actor for rank, actor in self._actors.items() if rank in kept}
        if self._filler is not None:
            self._filler.keep(ranks)

    async def finish(self) -> None:
        """After leaving: wait until clients have fetched what they were given here, within bounds; drop the groups."""
        deadline = Deadline(_FETCH_S)
        while (self._post_office.unfetched or (self._calls and self._calls.uncombined)) and not deadline.passed:
            await asyncio.sleep(_FETCH_POLL_S)
        self.push_metrics()
        if self._engine is not None and self._engine.has_left:
            self._engine.close()

    # ---- everything else ----

    def _wake_peers(self) -> None:
        for rank in self._loop.view.transport.group.spec.peers:
            if rank != self._rank:
                self._actor_of(rank.value).wake.remote()

    async def wake(self) -> None:
        """A peer has work."""
        self._loop.wake()

    async def peer_lost(self, detail: str) -> None:
        """Another peer is known to be dead: fail this epoch's requests now."""
        if self._loop.state in (LoopState.SERVING, LoopState.SLEEPING):
            self._loop.break_epoch(detail)

    async def stop(self) -> None:
        """End the loop at the step where all peers were asked to stop."""
        self._loop.stop()
        thread = _present(self._thread, "serve first")
        await self._beside(join_thread, thread, self._config.step_deadline_s, f"engine loop of rank {self._rank}")

    async def pid(self) -> int:
        """The process that this peer is."""
        return os.getpid()

    async def progress(self) -> LoadProgress:
        return self._progress

    async def report(self, inventory: bool = True) -> Peer:
        """How far this peer is, for the reconciler; with the digests of its resident slots where they are asked for."""
        held = self._pool.inventory() if inventory and self._pool is not None else {}
        epochs = self._seats.epochs if self._seats is not None else None
        return peer_report(self._rank.value, self._node, epochs, self._engine, self._reception, self._post_office, held)

    async def demand(self, after: int) -> tuple[DemandReport, ...]:
        """The kept reports of what this peer's routers asked for, those numbered above `after`."""
        return tuple(report for report in self._demand if report.sequence > after)

    async def status(self) -> EngineStatus:
        """This peer's counters, from the layers and the scheduler themselves."""
        layers = LayerCounters.total(self._my_seats.all_counters)
        return engine_status(self._config, self._loop, _present(self._pool, "allocate first"), layers)

    async def ledgers(self) -> dict[int, dict[str, Any]]:
        """By layer, the ledgers of the last invocation that was audited there, as plain values."""
        found = {layer: counters.ledger for layer, counters in self._counters.items()}
        return {layer: ledger.document() for layer, ledger in found.items() if ledger is not None}

    async def _meet(self, ranks: Sequence[int]) -> None:
        """Find actors, beside: Ray asks another process for each, and what that takes, all clients here would wait."""
        for rank in set(ranks).difference(self._actors):
            with suppress(NotServingError):  # whoever calls it hears of that
                self._actors[rank] = await self._beside(find_expert, self._config.name, rank)

    def _actor_of(self, rank: int) -> ActorHandle:
        """Another rank's actor; `NotServingError` when there is none."""
        if rank not in self._actors:
            self._actors[rank] = find_expert(self._config.name, rank)
        return self._actors[rank]

    @property
    def _loop(self) -> EngineLoop:
        if self._engine is None:
            raise NotServingError(f"rank {self._rank} is not serving yet ({self._progress.phase})")
        return self._engine

    @property
    def _desk(self) -> Reception:
        if self._reception is None:
            raise NotServingError(f"rank {self._rank} is not serving yet ({self._progress.phase})")
        return self._reception

    @property
    def _loaded(self) -> LoadedModel:
        return _present(self._model, "load the model first")

    @property
    def _my_seats(self) -> Seats:
        return _present(self._seats, "allocate first")

    async def _beside(self, work: Callable[..., _T], *args: Any) -> _T:
        """Run blocking work on another thread, under the start deadline."""
        what = f"{getattr(work, 'func', work).__name__} on rank {self._rank}"
        return await wait_for(asyncio.to_thread(work, *args), self._config.start_deadline_s, what)


def _present(value: _T | None, hint: str) -> _T:
    if value is None:
        raise NotServingError(f"this peer is not ready: {hint}")
    return value
