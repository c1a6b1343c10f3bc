"""One peer's engine on one GPU without Ray, over random weights: what the engine benchmark measures.

The shape is Qwen3-30B-A3B's. Weights are drawn on the device and never hashed: their bytes say nothing about speed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ray_moe.bench.gpu_ranks import Seat
from ray_moe.comm.join import FUSED_WINDOW, join_transport
from ray_moe.comm.transports import Transport
from ray_moe.controlplane.solve import balanced, place, pool_capacity
from ray_moe.dataplane.handle import HandleABI, HandleHeader
from ray_moe.dataplane.layer import LayerCounters
from ray_moe.dataplane.local import Workspaces
from ray_moe.dataplane.route_counts import DemandReport, RouteCounts
from ray_moe.dataplane.strategies import strategy_named
from ray_moe.deadline import join_thread, wait_event
from ray_moe.engine.blocks import probe_blocks
from ray_moe.engine.decode_graph import decode_sizes
from ray_moe.engine.generation import Backend, GenerationView, build_view
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.loop import EngineLoop
from ray_moe.engine.needs import model_needs
from ray_moe.engine.records import Delivery, Refusal
from ray_moe.engine.request import Request
from ray_moe.engine.scheduler import Scheduler
from ray_moe.engine.trunk import Trunk, load_trunk
from ray_moe.errors import DeadlineError, RayMoEError
from ray_moe.identity import CheckpointVersion, GlobalRank, PlacementVersion
from ray_moe.placement import Lease, PlacementSnapshot
from ray_moe.topology import Domain, Topology, derive_groups
from ray_moe.weights.budget import GIB, Sizes, add_up
from ray_moe.weights.dummy import DummyCheckpoint
from ray_moe.weights.slots import SlotPool

BLOCK_SIZE = 16
# Left free on the device: graphs, logits, what a prefill unit allocates.
_RESERVE = 12 * 2**30
_END_S, _STEP_S = 60.0, 20.0
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class EngineSizes:
    """An engine's limits. `layers` below the model's own make a shallower one."""

    max_prefill_tokens: int = 8192
    max_decode_rows: int = 1024
    max_positions: int = 4096
    layers: int = 48
    graphs: bool = True


class Finished:
    """An outlet that only counts."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.failures: list[Exception] = []
        self._left = 0

    def expect(self, requests: int) -> None:
        """`done` is set when so many more have ended."""
        self.done.clear()
        self._left = requests

    def deliver(self, items: Sequence[Delivery]) -> None:
        for item in items:
            if isinstance(item, Refusal):
                self.failures.append(item.error)
            elif getattr(item, "finish_reason", None) is None:
                continue
            self._left -= 1
            if not self._left:
                self.done.set()

    def demand(self, reports: Sequence[DemandReport]) -> None:
        """Nobody asks."""

    def lease_returned(self, view: GenerationView) -> None:
        """There is one generation."""

    def wake_peers(self) -> None:
        """They look themselves, within the idle pace."""


class GpuPeer:
    """Trunk, slots, cache and loop of one rank; `seconds` is what each part of its start took."""

    def __init__(self, folder: Path, seat: Seat, sizes: EngineSizes) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()
        (folder / "config.json").write_text(json.dumps(QWEN3_30B_A3B | {"num_hidden_layers": sizes.layers}))
        device, dtype = seat.device, torch.bfloat16
        self.trunk = load_trunk(folder, dtype=dtype, device=device, attn_implementation="ray_moe", load_format="dummy")
        self._took("trunk")
        experts = DummyCheckpoint(folder, device=device)
        snapshot, capacity = _placement(seat, experts)
        self.pool = SlotPool(experts.moe_layers, capacity, experts.layout, dtype=dtype, device=device)
        _fill(self.pool, snapshot, seat.rank)
        self._took("experts")
        self.counters = {layer: LayerCounters() for layer in experts.moe_layers}
        self.outlet, blocks = Finished(), probe_blocks(self.trunk)
        most_tokens = max(sizes.max_prefill_tokens, sizes.max_decode_rows)
        transport = _transport(seat, snapshot, self.trunk, most_tokens)
        backend = Backend(
            transport, "grouped", "token_hash", strategy_named("bulk"), blocks,
            workspaces=Workspaces(most_tokens),
        )  # fmt: skip
        counts = RouteCounts(experts.moe_layers, experts.num_experts, device)
        lease = Lease(1, f"rank-{seat.rank}", 1, 0)
        header = HandleHeader.grant(lease, snapshot, HandleABI(payload_dtype="bfloat16", return_dtype="bfloat16"))
        parts = (self.trunk, self.pool, backend, self.counters, counts)
        view = build_view(lease, header, snapshot, seat.global_rank, *parts)
        self._took("layers")
        self.kv_blocks = _blocks_that_fit(self.trunk.config, device, sizes)
        self.loop = EngineLoop(
            seat.rank,
            self.trunk,
            KVCache(self.kv_blocks, BLOCK_SIZE, device),
            Scheduler(
                num_blocks=self.kv_blocks,
                block_size=BLOCK_SIZE,
                max_prefill_tokens=sizes.max_prefill_tokens,
                max_decode_rows=sizes.max_decode_rows,
                max_positions=sizes.max_positions,
                vocab_size=self.trunk.vocab_size,
                device=device,
            ),
            view,
            self.outlet,
            blocks,
            route_counts=counts,
            demand_every_steps=256,
            graph_sizes=decode_sizes(sizes.max_decode_rows) if sizes.graphs else (),
            look_ahead=True,
        )
        free = torch.cuda.mem_get_info(device)[0]
        self.loop.warm_up()
        torch.cuda.synchronize(device)
        self._took("graphs")
        kv = (self.kv_blocks + 1) * BLOCK_SIZE * self.loop.cache.position_bytes
        self.memory_gib = _graph_memory(folder, sizes, self.kv_blocks, free - torch.cuda.mem_get_info(device)[0] - kv)
        self._thread = threading.Thread(target=self._run, args=(device,), daemon=True)
        self._raised: BaseException | None = None

    def serve(self, requests: Sequence[Request], seconds: float) -> float:
        """Seconds from the first submission to the last token. Raises `DeadlineError`, and what ended the loop."""
        self.outlet.expect(len(requests))
        started = time.perf_counter()
        self.submit(requests)
        self.until_ended(seconds)
        return time.perf_counter() - started

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.loop.submit(request)

    def until_ended(self, seconds: float) -> None:
        """Until all expected requests have ended."""
        ended = wait_event(self.outlet.done, seconds)
        if self._raised is not None or self.outlet.failures:
            raise RuntimeError("the engine failed") from (self._raised or self.outlet.failures[0])
        if not ended:
            raise DeadlineError("the benchmark's requests", seconds)

    def step_ms(self, steps: int) -> list[float]:
        """The latest working steps, in milliseconds."""
        return [1e3 * seconds for seconds in list(self.loop.counters.step_seconds)[-steps:]]

    def __enter__(self) -> GpuPeer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RayMoEError):  # it has ended already
            self.loop.stop()
        join_thread(self._thread, _END_S, "the engine loop")

    def _run(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            self._raised = error
            self.outlet.done.set()

    def _took(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what], self._since = now - self._since, now


def _transport(seat: Seat, snapshot: PlacementSnapshot, trunk: Trunk, most_tokens: int) -> Transport:
    """Windows between several GPUs, over NCCL for what they do not take."""
    window, name = None, "all_to_all_v"
    if seat.ranks > 1:
        from ray_moe.comm.window import NodeWindow
        from ray_moe.kernels.regions import Regions

        regions = Regions.plan(seat.ranks, most_tokens, trunk.top_k, trunk.hidden_size, trunk.dtype)
        window, name = NodeWindow(regions, seat.global_rank, seat.device, _STEP_S), FUSED_WINDOW
    groups = derive_groups(snapshot.topology, snapshot.group)
    return join_transport("nccl", name, groups, seat.global_rank, seat.store, _END_S, device=seat.device, window=window)


def _placement(seat: Seat, experts: DummyCheckpoint) -> tuple[PlacementSnapshot, int]:
    """Even shares of every layer over all ranks, one node."""
    ranks = tuple(GlobalRank(rank) for rank in range(seat.ranks))
    shares = balanced(dict.fromkeys(experts.moe_layers, experts.num_experts), ranks, replicas={}, spare_slots=0)
    capacity = pool_capacity(shares)
    candidate = place(
        shares,
        generation=1,
        version=PlacementVersion("placement-v1"),
        release_id="bench-1",
        checkpoint=CheckpointVersion(experts.identity),
        group=seat.group(0),
        topology=Topology("topology-v1", (Domain("node-0", ranks),)),
        prior=None,
        capacity=capacity,
    )
    digests = {
        (layer.layer, rank.value, slot.pool_slot): f"random {layer.layer} {slot.logical_expert_id.value}"
        for layer in candidate.layers
        for rank in ranks
        for slot in layer.slots_of(rank)
    }
    return candidate.with_digests(digests), capacity


def _fill(pool: SlotPool, snapshot: PlacementSnapshot, rank: int) -> None:
    torch.manual_seed(rank)
    for layer in snapshot.layers:
        slab = pool.slab(layer.layer)
        for tensor in slab.tensors().values():
            tensor.normal_(0, tensor.shape[-1] ** -0.5)
        for slot in layer.slots_of(GlobalRank(rank)):
            pool.begin_fill(layer.layer, slot.pool_slot)
            pool.commit_mapped_fill(layer.layer, slot.pool_slot, slot.parameter_digest, (0, 0))


def _graph_memory(folder: Path, sizes: EngineSizes, kv_blocks: int, taken: int) -> dict[str, float]:
    """What the warm-up has taken beside the KV cache (libraries' first use is in it), and what a budget counts for its
    graphs."""
    rows = decode_sizes(sizes.max_decode_rows) if sizes.graphs else ()
    counted = add_up(
        model_needs(folder, dtype=torch.bfloat16),
        Sizes(
            peers=1, held=0, spare=0, kv_blocks=kv_blocks, block_size=BLOCK_SIZE, tokens=sizes.max_prefill_tokens,
            decode_rows=sizes.max_decode_rows, graph_rows=rows,
        ),
    )  # fmt: skip
    return {"warm_up": round(taken / GIB, 3), "graphs_counted": round(counted.graphs / GIB, 3)}


def _blocks_that_fit(config: Any, device: torch.device, sizes: EngineSizes) -> int:
    """KV blocks for what is left of the device, and no more than full batches of the longest requests need."""
    torch.cuda.empty_cache()
    position = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 2
    fitting = (torch.cuda.mem_get_info(device)[0] - _RESERVE) // (position * BLOCK_SIZE)
    return int(min(fitting, sizes.max_decode_rows * -(-sizes.max_positions // BLOCK_SIZE)))
