"""The expert actor: one peer. A slot pool, a trunk, a share of the requests, and a seat in the group.

The engine loop runs on a thread of its own, in lockstep with the other peers. This actor's event loop serves everybody
else: it admits requests, streams what the loop delivers, fills slots beside the serving ones and stages generations. No
step ever waits for it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from ray.actor import ActorHandle
from transformers.utils.logging import disable_progress_bar

from ray_moe.actors.bringup import backend_of, check_choices, groups_of
from ray_moe.actors.mailbox import Outlet, PostOffice
from ray_moe.actors.routing import Grant
from ray_moe.comm.join import join_transport
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.solve import Fill
from ray_moe.dataplane.graphs import dtype_name
from ray_moe.dataplane.layer import LayerCounters
from ray_moe.deadline import join_thread, ray_await, wait_for
from ray_moe.engine.blocks import BlockFacts, overlap_shared, probe_blocks
from ray_moe.engine.generation import Backend, GenerationView, build_view
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.loop import EngineLoop, LoopState
from ray_moe.engine.records import Delivery, EngineStatus, GenerateRequest, LoadProgress, ModelFacts
from ray_moe.engine.sampling import admitted
from ray_moe.engine.scheduler import Request, Scheduler
from ray_moe.engine.trunk import Trunk, load_trunk
from ray_moe.errors import NotServingError, RayMoEError
from ray_moe.identity import GlobalRank
from ray_moe.topology import ProcessGroupSpec, Topology
from ray_moe.weights.checkpoint import Checkpoint
from ray_moe.weights.slots import SlotPool

_T = TypeVar("_T")
_SWITCH_INTERVAL_S = 0.0002


@dataclass
class _Serving:
    """What exists once the peer has joined a group."""

    backend: Backend
    loop: EngineLoop | None = None
    thread: threading.Thread | None = None


class ExpertActor:
    """Ray actor, one per rank.

    Life: `load`, `allocate`, `fill`, `join`, `serve`; then requests and generations until `stop`.
    """

    def __init__(self, config: ClusterConfig, rank: int) -> None:
        torch.set_num_threads(1)
        # The engine's thread and the event loop share the interpreter; by default one may keep the other out for 5 ms,
        # which is a good part of a step.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._config, self._rank = config, GlobalRank(rank)
        self._dtype = getattr(torch, config.dtype)
        self._progress = LoadProgress()
        self._trunk: Trunk | None = None
        self._blocks: dict[int, BlockFacts] = {}
        self._checkpoint: Checkpoint | None = None
        self._pool: SlotPool | None = None
        self._counters: dict[int, LayerCounters] = {}
        self._serving: _Serving | None = None
        self._leases: dict[int, Grant] = {}  # by generation
        self._routing: ActorHandle | None = None
        self._peers: tuple[ActorHandle, ...] = ()
        self._post_office = PostOffice(cancel=lambda request_id: self._loop.cancel(request_id))
        self._sweeper: asyncio.Task[None] | None = None
        self._filling = asyncio.Lock()

    # ---- one-time work ----

    async def load(self, model: Path) -> ModelFacts:
        """Load the trunk, open the checkpoint; no expert is read. Raises what `load_trunk` and `Checkpoint` raise."""
        return await self._beside(self._load, model)

    def _load(self, model: Path) -> ModelFacts:
        config = self._config
        disable_progress_bar()  # whoever starts the cluster draws its own
        self._progress = LoadProgress("trunk", 0, 1)
        self._trunk = load_trunk(
            model,
            dtype=self._dtype,
            device=config.device,
            attn_implementation="ray_moe",
            trust_remote_code=config.trust_remote_code,
        )
        check_choices(config, self._trunk.hidden_size)
        self._blocks = probe_blocks(self._trunk)
        self._checkpoint = Checkpoint(model, trust_remote_code=config.trust_remote_code)
        self._counters = {layer: LayerCounters() for layer in self._checkpoint.moe_layers}
        self._progress = LoadProgress("trunk", 1, 1)
        return ModelFacts(
            checkpoint_version=self._checkpoint.identity,
            moe_layers=self._checkpoint.moe_layers,
            num_experts=self._checkpoint.num_experts,
            expert_bytes=self._checkpoint.expert_bytes,
            vocab_size=self._trunk.vocab_size,
            max_positions=self._trunk.max_positions,
            gate_dtype=dtype_name(next(iter(self._blocks.values())).gate),
            trunk_parameters=sum(parameter.numel() for parameter in self._trunk.model.parameters()),
        )

    async def allocate(self, capacity: int) -> None:
        """Reserve `capacity` slots per layer; their addresses stay for this actor's life."""
        checkpoint = _present(self._checkpoint, "load the model first")
        self._pool = SlotPool(
            checkpoint.moe_layers, capacity, checkpoint.layout, dtype=self._dtype, device=self._config.device
        )

    async def fill(self, fills: Sequence[Fill]) -> dict[tuple[int, int], str]:
        """Read experts into free slots, beside serving ones; returns the digest by (layer, pool slot) of what arrived.

        When one of them fails, those that this call filled are freed again and the error propagates.
        """
        async with self._filling:
            return await self._beside(self._fill, fills)

    def _fill(self, fills: Sequence[Fill]) -> dict[tuple[int, int], str]:
        pool, checkpoint = _present(self._pool, "allocate first"), _present(self._checkpoint, "load the model first")
        digests: dict[tuple[int, int], str] = {}
        self._progress = LoadProgress("experts", 0, len(fills))
        try:
            for item in fills:
                weights = checkpoint.expert(item.layer, item.expert.value, dtype=self._dtype)
                digests[item.layer, item.pool_slot] = pool.fill(item.layer, item.pool_slot, weights)
                self._progress = LoadProgress("experts", len(digests), len(fills))
        except BaseException:
            for layer, pool_slot in digests:
                pool.release(layer, pool_slot)
            raise
        return digests

    async def free(self, slots: Sequence[tuple[int, int]]) -> None:
        """Free pool slots (layer, pool slot) that no live generation refers to."""
        pool = _present(self._pool, "allocate first")
        for layer, pool_slot in slots:
            pool.release(layer, pool_slot)

    async def join(self, spec: ProcessGroupSpec, topology: Topology, store: StoreAddress) -> None:
        """Take this peer's seats in an epoch; returns when all members have joined. Raises `CollectiveError`."""

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
        self._serving = _Serving(backend_of(config, transport, self._blocks))

    async def serve(self, routing: ActorHandle, peers: Sequence[ActorHandle]) -> None:
        """Acquire a lease on the active generation and start the engine loop under it."""
        config, trunk = self._config, _present(self._trunk, "load the model first")
        serving = _present(self._serving, "join a group first")
        self._routing, self._peers = routing, tuple(peers)
        view = await self._view_of(await self._acquire())
        serving.loop = EngineLoop(
            self._rank.value,
            trunk,
            KVCache(config.kv_blocks, config.block_size, config.device),
            Scheduler(
                num_blocks=config.kv_blocks,
                block_size=config.block_size,
                max_prefill_tokens=config.max_prefill_tokens,
                max_decode_rows=config.max_decode_rows,
                max_positions=trunk.max_positions,
                vocab_size=trunk.vocab_size,
                device=config.device,
            ),
            serving.backend.transport,
            view,
            Outlet(asyncio.get_running_loop(), self._post_office, self._return_lease, self._wake_peers),
            self._blocks,
            shared=overlap_shared(trunk, self._blocks) if config.strategy == "shared_path" else None,
            audit_rate=config.audit_rate,
        )
        serving.thread = threading.Thread(target=serving.loop.run, name=f"engine-{self._rank}", daemon=True)
        serving.thread.start()
        self._sweeper = asyncio.create_task(self._post_office.sweep())
        self._progress = LoadProgress("serving", 1, 1)

    # ---- generations ----

    async def stage(self) -> int:
        """Acquire a lease on the active generation and hold it ready; returns the generation. May be asked again.

        It takes effect at the first step where every peer has staged it. Raises `StaleHandleError` when this peer's
        slots or epoch are not the placement's; the lease is then given back.
        """
        grant = await self._acquire()
        generation = grant.lease.generation
        if generation in self._leases:
            self._require_routing().release.remote(grant.lease)
            return generation
        view = await self._view_of(grant)
        try:
            self._loop.stage(view)
        except RayMoEError:
            self._return_lease(generation)
            raise
        return generation

    async def _acquire(self) -> Grant:
        routing, holder = self._require_routing(), self._holder
        grant: Grant = await ray_await(
            routing.acquire.remote(holder), self._config.step_deadline_s, f"lease for {holder}"
        )
        return grant

    async def _view_of(self, grant: Grant) -> GenerationView:
        """Compile what a lease grants; the lease is this peer's from here on, and goes back when that fails."""
        serving = _present(self._serving, "join a group first")
        self._leases[grant.lease.generation] = grant
        try:
            return await self._beside(self._compile, grant, serving.backend)
        except RayMoEError:
            self._return_lease(grant.lease.generation)
            raise

    def _compile(self, grant: Grant, backend: Backend) -> GenerationView:
        return build_view(
            grant.lease,
            grant.header,
            grant.snapshot,
            self._rank,
            _present(self._trunk, "load the model first"),
            _present(self._pool, "allocate first"),
            backend,
            self._counters,
        )

    def _return_lease(self, generation: int) -> None:
        self._require_routing().release.remote(self._leases.pop(generation).lease)

    # ---- requests ----

    async def submit(self, client: str, request: GenerateRequest) -> None:
        """Admit a request of `client`; what comes of it is fetched by `poll`, the scheduler's refusal too.

        Raises `RequestError` for an id that runs already, `PeerLostError` or `NotServingError` when this peer does not
        serve.
        """
        loop = self._loop
        self._post_office.open(client, request.request_id)
        eos_ids = frozenset(_present(self._trunk, "load the model first").eos_token_ids)
        try:
            loop.submit(
                Request(request.request_id, request.prompt_ids, admitted(request.params), request.prefix_ids, eos_ids)
            )
        except RayMoEError:
            self._post_office.close(request.request_id)
            raise

    async def poll(self, client: str, wait: float) -> tuple[Delivery, ...]:
        """What `client`'s requests have been given since its last poll; waits up to `wait` seconds for a first item.

        One call carries a whole step for all requests of a client: Ray's cost is per call, not per token. A client that
        stops polling is gone, and its requests are cancelled.
        """
        return await self._post_office.mailbox(client).take(wait)

    async def cancel(self, request_id: str) -> bool:
        """End a request: its KV is free within one step. False when it does not run here."""
        if request_id not in self._post_office:
            return False
        self._loop.cancel(request_id)
        return True

    # ---- everything else ----

    def _wake_peers(self) -> None:
        for peer in self._peers:
            peer.wake.remote()

    async def wake(self) -> None:
        """A peer has work."""
        self._loop.wake()

    async def peer_lost(self, detail: str) -> None:
        """Another peer is known to be dead: fail this epoch's requests now."""
        if self._loop.state in (LoopState.SERVING, LoopState.SLEEPING):
            self._loop.break_epoch(detail)

    async def stop(self) -> None:
        """End the loop at the step where all peers were asked to stop."""
        serving = _present(self._serving, "join a group first")
        self._loop.stop()
        thread = _present(serving.thread, "serve first")
        await self._beside(join_thread, thread, self._config.step_deadline_s, f"engine loop of rank {self._rank}")

    async def node(self) -> str:
        """The Ray node that this peer runs on."""
        return str(ray.get_runtime_context().get_node_id())

    async def pid(self) -> int:
        """The process that this peer is."""
        return os.getpid()

    async def progress(self) -> LoadProgress:
        return self._progress

    async def status(self) -> EngineStatus:
        """This peer's counters, from the layers and the scheduler themselves."""
        loop, pool = self._loop, _present(self._pool, "allocate first")
        trunk = _present(self._trunk, "load the model first")
        layers = LayerCounters.total(self._counters.values())
        bytes_sent, bytes_received = _present(self._serving, "join a group first").backend.transport.bytes_moved
        experts = {id(parameter) for module in trunk.experts.values() for parameter in module.parameters()}
        return EngineStatus(
            rank=self._rank.value,
            state=loop.state.value,
            failure=str(loop.failure or ""),
            generation=loop.view.lease.generation,
            epoch=loop.group.spec.epoch,
            steps_agreed=loop.counters.steps_agreed,
            steps_worked=loop.counters.steps_worked,
            seconds_worked=loop.counters.seconds_worked,
            seconds_agreeing=loop.counters.seconds_agreeing,
            waiting=loop.load.waiting,
            running=loop.load.running,
            outstanding_tokens=loop.load.outstanding_tokens,
            tokens_emitted=loop.counters.tokens_emitted,
            kv_blocks_used=loop.load.kv_blocks_used,
            kv_blocks_total=self._config.kv_blocks,
            rows_local=layers.rows_local,
            rows_sent=layers.rows_sent,
            rows_received=layers.rows_received,
            audited=layers.audited,
            bytes_sent=bytes_sent,
            bytes_received=bytes_received,
            replays=layers.replays,
            fallbacks=dict(layers.fallbacks),
            peak_live_bytes=layers.peak_live_bytes,
            fan_out=dict(layers.fan_out),
            resident_slots={layer: pool.capacity - len(pool.free_slots(layer)) for layer in pool.layers},
            trunk_has_experts=bool(experts),
        )

    async def ledgers(self) -> dict[int, dict[str, Any]]:
        """By layer, the ledgers of the last invocation that was audited there, as plain values."""
        found = {layer: counters.ledger for layer, counters in self._counters.items()}
        return {layer: ledger.document() for layer, ledger in found.items() if ledger is not None}

    def _require_routing(self) -> ActorHandle:
        return _present(self._routing, "serve first")

    @property
    def _holder(self) -> str:
        return f"rank-{self._rank}"

    @property
    def _loop(self) -> EngineLoop:
        if self._serving is None or self._serving.loop is None:
            raise NotServingError(f"rank {self._rank} is not serving yet ({self._progress.phase})")
        return self._serving.loop

    async def _beside(self, work: Callable[..., _T], *args: Any) -> _T:
        """Run blocking work on another thread, under the start deadline."""
        return await wait_for(
            asyncio.to_thread(work, *args),
            self._config.start_deadline_s,
            f"{getattr(work, 'func', work).__name__} on rank {self._rank}",
        )


def _present(value: _T | None, hint: str) -> _T:
    if value is None:
        raise NotServingError(f"this peer is not ready: {hint}")
    return value
