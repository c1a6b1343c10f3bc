"""One MoE layer, and the step agreement, between real processes over each group: microseconds per call."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import Queue

import torch
import torch.nn.functional as functional

from ray_moe.bench.model import FFN, HIDDEN, NUM_EXPERTS, TOP_K
from ray_moe.bench.report import Row
from ray_moe.comm.agreement import StepRecord
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.join import join, transport_named
from ray_moe.comm.rendezvous import RendezvousStore, StoreAddress
from ray_moe.controlplane.solve import balanced, place, pool_capacity
from ray_moe.dataplane.handle import HandleABI, HandleHeader
from ray_moe.dataplane.layer import ExpertLayer, Invocation, LayerCounters
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.plan import SlotMap
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.runners import LayerWeights, runner_named
from ray_moe.dataplane.strategies import strategy_named
from ray_moe.identity import CheckpointVersion, GlobalRank, PlacementVersion, ProcessGroupId
from ray_moe.placement import Lease, PlacementSnapshot
from ray_moe.routes import Routes
from ray_moe.topology import Domain, ProcessGroupSpec, Topology

PEERS, WARM_UP, CALLS, DEADLINE_S = 4, 20, 200, 120.0
TOKENS = (0, 1, 64)


def run() -> list[Row]:
    """Rows of (what, group, transport, tokens per rank, p50, mean), as rank 0 sees them."""
    store = RendezvousStore("127.0.0.1", DEADLINE_S)
    context = multiprocessing.get_context("spawn")
    rows: Queue[list[Row]] = context.Queue()
    processes = [context.Process(target=_peer, args=(rank, store.address, rows)) for rank in range(PEERS)]
    for process in processes:
        process.start()
    try:
        return rows.get(timeout=DEADLINE_S)
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


def _peer(rank: int, store: StoreAddress, rows: Queue[list[Row]]) -> None:
    torch.set_num_threads(1)
    measured: list[Row] = []
    for epoch, kind in enumerate(("tcp", "gloo")):
        placement = _placement(epoch)
        group = join(kind, placement.group, GlobalRank(rank), store, DEADLINE_S)
        measured += _over(group, placement, rank, kind)
        group.close()
    if rank == 0:
        rows.put(measured)


def _over(group: ExpertGroup, placement: PlacementSnapshot, rank: int, kind: str) -> list[Row]:
    record = StepRecord(0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0).to_tensor()
    measured: list[Row] = [_timed("step agreement", kind, "gather", 0, lambda _: group.gather(record).result())]
    for transport in ("all_to_all_v", "all_gather_filter"):
        layer = _layer(placement, group, rank, transport)
        for tokens in TOKENS:
            hidden = torch.randn(tokens, HIDDEN)
            ids = torch.rand(tokens, NUM_EXPERTS).argsort(dim=1)[:, :TOP_K].contiguous()
            forward = partial(_forward, layer, hidden, Routes(ids, torch.rand(tokens, TOP_K)))
            measured.append(_timed("MoE layer", kind, transport, tokens, forward))
    return measured


def _forward(layer: ExpertLayer, hidden: torch.Tensor, routes: Routes, call: int) -> None:
    layer.forward(hidden, routes, Invocation(call, "bare"))


def _timed(what: str, group: str, transport: str, tokens: int, call: Callable[[int], object]) -> Row:
    with torch.inference_mode():
        for number in range(WARM_UP):
            call(number)
        seconds = []
        for number in range(CALLS):
            started = time.perf_counter()
            call(WARM_UP + number)
            seconds.append(time.perf_counter() - started)
    return {
        "what": what,
        "group": group,
        "transport": transport,
        "tokens_per_rank": tokens,
        "p50_us": statistics.median(seconds) * 1e6,
        "mean_us": statistics.fmean(seconds) * 1e6,
    }


def _placement(epoch: int) -> PlacementSnapshot:
    ranks = tuple(GlobalRank(rank) for rank in range(PEERS))
    assignment = balanced({0: NUM_EXPERTS}, ranks, replicas={(0, 0): 2, (0, 5): 2}, spare_slots=0)
    return place(
        assignment,
        generation=1,
        version=PlacementVersion("placement-v1"),
        release_id="bench",
        checkpoint=CheckpointVersion("random"),
        group=ProcessGroupSpec(ProcessGroupId("bench"), epoch, ranks),
        topology=Topology("topology-v1", (Domain("node-0", ranks),)),
        prior=None,
        capacity=pool_capacity(assignment),
    )


def _layer(placement: PlacementSnapshot, group: ExpertGroup, rank: int, transport: str) -> ExpertLayer:
    slots = SlotMap.compile(placement, placement.layers[0], GlobalRank(rank), torch.device("cpu"))
    capacity = max(slots.pool_slots) + 1
    lease = Lease(rank, f"rank-{rank}", placement.generation, placement.group.epoch)

    def swiglu(rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return functional.silu(gate) * up

    weights = LayerWeights(
        gate_up=torch.randn(capacity, 2 * FFN, HIDDEN),
        down=torch.randn(capacity, HIDDEN, FFN),
        gate_up_bias=None,
        down_bias=None,
        pool_slots=slots.pool_slots,
        activation=swiglu,
    )
    return ExpertLayer(
        HandleHeader.grant(lease, placement, HandleABI()),
        slots,
        weights,
        Path(transport_named(transport, group), runner_named("grouped"), strategy_named("bulk")),
        policy_named("token_hash"),
        LayerCounters(),
    )
