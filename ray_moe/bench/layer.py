"""The step agreement, and one MoE layer in every way that it can be executed, over four real processes.

Ways are measured in rounds, one after another within a round, so that all of them see the same machine; each figure is
the median over the rounds' medians. Ratios compare two measured times under equal conditions.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ray_moe.bench.model import FFN, HIDDEN, NUM_EXPERTS, TOP_K
from ray_moe.bench.report import Row
from ray_moe.comm.agreement import StepRecord
from ray_moe.comm.join import TRANSPORTS, join_transport
from ray_moe.comm.rendezvous import RendezvousStore, StoreAddress
from ray_moe.comm.transports import Transport
from ray_moe.controlplane.solve import balanced, place, pool_capacity
from ray_moe.dataplane.captured import CapturedDecode, DecodeBucket, Executables
from ray_moe.dataplane.handle import HandleABI, HandleHeader
from ray_moe.dataplane.layer import ExpertLayer, Invocation, LayerCounters
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.phases import Phase
from ray_moe.dataplane.plan import SlotMap
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.runners import RUNNERS, LayerWeights, runner_named
from ray_moe.dataplane.strategies import STRATEGIES, strategy_named
from ray_moe.evidence import Elapsed, Instrument, Measurement, Speedup
from ray_moe.identity import CheckpointVersion, GlobalRank, PlacementVersion, ProcessGroupId
from ray_moe.placement import Lease, PlacementSnapshot
from ray_moe.routes import Routes
from ray_moe.topology import Domain, ProcessGroupSpec, Topology, derive_groups

PEERS, DEADLINE_S = 4, 300.0
TOKENS = (1, 64, 512)
ROUNDS, WARM_UP, CALLS = 5, 3, 20
ARTIFACT = "benchmarks/cpu_layer.json"
PROTOCOL = f"{WARM_UP} warm-ups, {CALLS} calls, median; median of {ROUNDS} interleaved rounds, at rank 0 of {PEERS}"


@dataclass(frozen=True)
class Way:
    """How a layer is executed; a decode bucket makes it a replayed decode unit."""

    group: str = "tcp"
    transport: str = "all_to_all_v"
    chunks: int = 1
    runner: str = "grouped"
    strategy: str = "bulk"
    payload: str = "native"
    shared_expert: bool = False
    replayed: bool = False

    def __str__(self) -> str:
        """Transport and runner, and whatever else is not as usual."""
        parts = [self.transport if self.chunks == 1 else f"{self.transport} in {self.chunks} chunks", self.runner]
        parts += [part for part in (self.group, self.strategy, self.payload) if part not in ("tcp", "bulk", "native")]
        parts += ["with a shared expert"] * self.shared_expert + ["replayed"] * self.replayed
        return ", ".join(parts)


USUAL = Way()
WAYS = (
    *(Way(transport=transport, runner=runner) for transport, runner in product(TRANSPORTS, RUNNERS)),
    *(Way(transport=transport, chunks=2) for transport in TRANSPORTS),
    *(Way(strategy=strategy) for strategy in STRATEGIES if strategy not in ("bulk", "shared_path")),
    *(Way(strategy=strategy, shared_expert=True) for strategy in ("bulk", "shared_path")),
    *(Way(payload=payload) for payload in ("fp8_row", "fp8_block")),
    Way(replayed=True),
    Way(group="gloo"),
)


def run() -> list[Row]:
    """One row per way: p50 in microseconds and its ratio to the usual way for each number of tokens per rank."""
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
    layers = {way: _layer(epoch, way, rank, store) for epoch, way in enumerate(WAYS)}
    times: dict[tuple[Way, int], list[float]] = {(way, tokens): [] for way in WAYS for tokens in TOKENS}
    agreements: dict[str, list[float]] = {"tcp": [], "gloo": []}
    with torch.inference_mode():
        for number in range(ROUNDS):
            for kind, seconds in agreements.items():
                transport = layers[Way(group=kind)].path.transport
                seconds.append(_median(_agreement(transport)))
            for way, tokens in times:
                times[way, tokens].append(_median(_forward(layers[way], way, tokens, number)))
    for layer in layers.values():
        layer.path.transport.close()
    if rank == 0:
        rows.put(_rows(agreements, times))


def _rows(agreements: dict[str, list[float]], times: dict[tuple[Way, int], list[float]]) -> list[Row]:
    rows: list[Row] = [
        {"what": "step agreement", "group": kind, "p50_us": statistics.median(seconds) * 1e6}
        for kind, seconds in agreements.items()
    ]
    elapsed = {key: _elapsed(statistics.median(seconds), key[1]) for key, seconds in times.items()}
    for way in WAYS:
        row: dict[str, Any] = {"what": "MoE layer", "way": str(way), **vars(way)}
        for tokens in TOKENS:
            row[f"p50_us_T{tokens}"] = elapsed[way, tokens].seconds * 1e6
            row[f"over_usual_T{tokens}"] = 1 / Speedup(elapsed[USUAL, tokens], elapsed[way, tokens]).ratio
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> list[Row]:
    """The rows without what `way` says already."""
    return [{name: value for name, value in row.items() if name not in vars(USUAL)} for row in rows]


def _elapsed(seconds: float, tokens: int) -> Elapsed:
    """A ratio of two of these holds shape, peers, placement and load constant, or is refused."""
    conditions = {"tokens per rank": str(tokens), "peers": str(PEERS), "shape": f"D {HIDDEN}, F {FFN}, E {NUM_EXPERTS}"}
    return Elapsed(seconds, Measurement(Instrument.CLOCK, PROTOCOL, ARTIFACT, conditions))


def _median(call: Callable[[], object]) -> float:
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _agreement(transport: Transport) -> Callable[[], object]:
    record = StepRecord(0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0).to_tensor()
    return lambda: transport.group.gather(record).result()


def _forward(layer: ExpertLayer, way: Way, tokens: int, number: int) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.rand(tokens, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
    routes = Routes(ids, torch.rand(tokens, TOP_K, generator=generator))
    unit: Phase = "decode" if way.replayed else "bare"
    invocation = Invocation(number, unit)
    if not way.shared_expert:
        return lambda: layer.forward(hidden, routes, invocation)
    shared = torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, 2 * FFN, bias=False), torch.nn.GLU(), torch.nn.Linear(FFN, HIDDEN, bias=False)
    )
    done: list[Tensor] = []

    def beside() -> None:
        done.append(shared(hidden))

    def both() -> Tensor:
        out = layer.forward(hidden, routes, invocation, beside)
        if not done:  # only the shared path has a place for it
            beside()
        return out + done.pop()

    return both


def _layer(epoch: int, way: Way, rank: int, store: StoreAddress) -> ExpertLayer:
    placement = _placement(epoch)
    transport = join_transport(
        way.group,
        way.transport,
        derive_groups(placement.topology, placement.group),
        GlobalRank(rank),
        store,
        DEADLINE_S,
        chunks=way.chunks,
    )
    slots = SlotMap.compile(placement, placement.layers[0], GlobalRank(rank), torch.device("cpu"))
    capacity = max(slots.pool_slots) + 1
    lease = Lease(rank, f"rank-{rank}", placement.generation, placement.group.epoch)
    header = HandleHeader.grant(lease, placement, HandleABI(payload_format=way.payload))
    weights = LayerWeights(
        gate_up=torch.randn(capacity, 2 * FFN, HIDDEN),
        down=torch.randn(capacity, HIDDEN, FFN),
        gate_up_bias=None,
        down_bias=None,
        pool_slots=slots.pool_slots,
        activation=_swiglu,
    )
    captured = None
    if way.replayed:
        # Wide enough for every load here, so that all of them replay.
        buckets = [DecodeBucket(tokens, PEERS * tokens) for tokens in TOKENS]
        executables = Executables(buckets, torch.device("cpu"))
        captured = CapturedDecode.bind(executables, header, slots, HIDDEN, TOP_K, torch.float32, transport)
        captured.activate()
    path = Path(transport, runner_named(way.runner), strategy_named(way.strategy))
    return ExpertLayer(header, slots, weights, path, policy_named("token_hash"), LayerCounters(), captured)


def _swiglu(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _placement(epoch: int) -> PlacementSnapshot:
    """Two replicated experts of eight, over four ranks on two nodes by label."""
    ranks = tuple(GlobalRank(rank) for rank in range(PEERS))
    assignment = balanced({0: NUM_EXPERTS}, ranks, replicas={(0, 0): 2, (0, 5): 2}, spare_slots=0)
    return place(
        assignment,
        generation=1,
        version=PlacementVersion("placement-v1"),
        release_id="bench",
        checkpoint=CheckpointVersion("random"),
        group=ProcessGroupSpec(ProcessGroupId("bench"), epoch, ranks),
        topology=Topology("topology-v1", (Domain("node-0", ranks[:2]), Domain("node-1", ranks[2:]))),
        prior=None,
        capacity=pool_capacity(assignment),
    )
