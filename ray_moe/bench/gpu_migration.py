"""Experts on their way between GPUs, a process for each: how fast, and what a decode step beside them notices.

    python -m ray_moe.bench.gpu_migration [--ranks N] [--out DIR]        migration.json

Every rank pulls from the next one at the same time, by the product's own copy engine, every slot verified. A burst is
compared with one large copy between the same cards, in the same rounds. The step beside paced copies is a CUDA graph of
48 layers of Qwen3-30B-A3B's shape, 32 tokens, timed by events, step after step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pickle
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ray_moe.bench.gpu_layer import environment
from ray_moe.bench.gpu_ranks import Seat, ranks_here, run_ranks
from ray_moe.bench.gpu_shapes import MODELS, Inputs
from ray_moe.bench.report import Row
from ray_moe.comm.copies import copy_async
from ray_moe.comm.rendezvous import connect
from ray_moe.deadline import join_thread, poll
from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.digest import Span, fingerprint_spans, span_table
from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace
from ray_moe.weights.checkpoint import ExpertLayout
from ray_moe.weights.copy_engine import BACKGROUND_SHARE, Copy, CopyEngine, Lender, Loan, Mapping, Pull
from ray_moe.weights.cuda_lane import CudaLane
from ray_moe.weights.digest import parameter_digest
from ray_moe.weights.slots import Fingerprint, MappedSlot, Places, SlotPool

_DEADLINE_S = 60.0
_QWEN, _MIXTRAL = MODELS["qwen3-30b-a3b"], MODELS["mixtral-8x7b"]
_STEP_LAYERS, _STEP_TOKENS = 48, 32
_ROUNDS, _STEPS = 3, 80  # steps alone and beside, in every round
# Experts in use, then room for as many more: layers enough that none is in a cache when its turn comes again.
_LAYERS, _IN_USE = 4, 128
_LENT = 16  # slots of each layer that others pull, again and again


@dataclass(frozen=True, eq=False)
class Copied:
    """A check that finds the same for every slot: what copies cost without."""

    done: torch.cuda.Event
    slots: int

    def ready(self) -> bool:
        return self.done.query()

    def fingerprints(self) -> list[Fingerprint]:
        return [(0, 0)] * self.slots

    def copy_seconds(self) -> float:
        return 0.0


@dataclass(frozen=True, eq=False)
class Unchecked:
    lane: CudaLane

    @property
    def handle(self) -> bytes:
        return self.lane.handle

    def open(self, handle: bytes) -> Mapping:
        return self.lane.open(handle)

    def copy(self, copies: Sequence[Copy]) -> None:
        self.lane.copy(copies)

    def check(self, slots: Sequence[Places]) -> Copied:
        done = torch.cuda.Event()
        done.record(self.lane.copy_stream)
        return Copied(done, len(slots))


@dataclass(eq=False)
class Peer:
    """One rank: its pool, what it lends to others and what it pulls from the next one."""

    seat: Seat
    lane: CudaLane
    pool: SlotPool
    copies: CopyEngine
    loan: Loan
    pulls: list[Pull]

    @property
    def owner(self) -> int:
        return (self.seat.rank + 1) % self.seat.ranks

    @staticmethod
    def start(seat: Seat, name: str, layout: ExpertLayout, layers: int, in_use: int, spare: int, lent: int) -> Peer:
        """Random weights in `in_use` slots of each layer, `lent` of which are given to others for `spare` ones."""
        lane = CudaLane(seat.device, deadline_s=_DEADLINE_S)
        pool = SlotPool(
            tuple(range(layers)), in_use + spare, layout, dtype=torch.bfloat16, device=seat.device, memory=lane
        )
        for layer in pool.layers:
            for tensor in pool.slab(layer).tensors().values():
                tensor[:in_use].normal_(std=0.02)
        torch.cuda.synchronize()
        slots = list(itertools.product(pool.layers, range(lent)))
        for slot in slots:
            pool.begin_fill(*slot)
            pool.commit_fill(*slot)
        store = connect(seat.store, name, _DEADLINE_S)
        store.set(str(seat.rank), pickle.dumps(Lender(pool, lane).lend(slots)).hex())
        theirs = pickle.loads(bytes.fromhex(store.get(str((seat.rank + 1) % seat.ranks)).decode()))
        given = [slot for slot in theirs.slots if isinstance(slot, MappedSlot)]
        # Every lent slot of a layer as often as the layer has room.
        pulls = [
            Pull(layer, in_use + at, given[layer * lent + at % lent], None, at % lent, "the next rank")
            for layer in pool.layers
            for at in range(spare)
        ]
        return Peer(seat, lane, pool, CopyEngine(pool, lane, deadline_s=_DEADLINE_S), theirs, pulls)

    @property
    def nbytes(self) -> int:
        return sum(self.pool.slot_bytes(pull.layer) for pull in self.pulls)

    def pull(self, copies: CopyEngine | None = None, pulls: list[Pull] | None = None) -> None:
        """All of them once; `RuntimeError` when one fails. Their slots are free again."""
        wanted = self.pulls if pulls is None else pulls
        for several in (copies or self.copies).pull(self.owner, self.loan.handle, wanted):
            for pulled in several:
                if pulled.error is not None:
                    raise RuntimeError(f"{wanted[pulled.index]}: {pulled.error}") from pulled.error
                self.pool.release(wanted[pulled.index].layer, wanted[pulled.index].pool_slot)

    def meet(self, what: str) -> None:
        """Go on when all ranks have come."""
        store = connect(self.seat.store, "meetings", _DEADLINE_S)
        store.add(what, 1)
        if not poll(lambda: store.add(what, 0) >= self.seat.ranks, _DEADLINE_S):
            raise RuntimeError(f"rank {self.seat.rank} waits alone for {what}")


def _device_ms(stream: torch.cuda.Stream, enqueue: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    enqueue()
    end.record(stream)
    if not poll(end.query, _DEADLINE_S):
        raise RuntimeError("what was timed did not end")
    return begin.elapsed_time(end)


def burst(peer: Peer, model: str, readers: int) -> Row | None:
    """Flat out, in rounds with one large copy: the first `readers` ranks at once. None for a rank that only lends."""
    mapping, stream = peer.lane.open(peer.loan.handle), torch.cuda.Stream()
    into = peer.pool.slab(0).gate_up[peer.pool.capacity // 2 :]
    whole = min(into.nbytes, 1024**3)

    def large() -> None:
        copy_async([(into.data_ptr(), mapping.address, whole)] * 4, stream)

    copy_rates, pull_rates, busy = [], [], []
    for turn in range(_ROUNDS + 1):
        peer.meet(f"{model} {readers} {turn}: copies")
        peer_copy = 4 * whole / _device_ms(stream, large) / 1e6 if peer.seat.rank < readers else 0.0
        peer.meet(f"{model} {readers} {turn}: pulls")
        began, used = time.perf_counter(), time.thread_time()
        if peer.seat.rank < readers:
            peer.pull()
        seconds = time.perf_counter() - began
        if turn:  # the first one compiles, maps, and brings everything to its usual state
            copy_rates.append(peer_copy)
            pull_rates.append(peer.nbytes / seconds / 1e9)
            busy.append((time.thread_time() - used) / seconds)
    mapping.close()
    if peer.seat.rank >= readers:
        return None
    found, best = statistics.median(pull_rates), statistics.median(copy_rates)
    return {
        "measure": "burst", "slots of": model, "readers": readers, "bytes": peer.nbytes, "slots": len(peer.pulls),
        "gb_per_s": found, "peer_copy_gb_per_s": best, "over_peer_copy": found / best, "goal over_peer_copy": 0.80,
        "host_busy": statistics.median(busy),
    }  # fmt: skip


def verified(peer: Peer) -> Row:
    """One pulled slot, read back and digested on the host; the others were compared on the device."""
    pull = peer.pulls[-1]
    for several in peer.copies.pull(peer.owner, peer.loan.handle, [pull]):
        assert several[0].error is None, several
    digest = parameter_digest(peer.pool.weights(pull.layer, pull.pool_slot))
    assert digest == pull.slot.digest, f"{digest} is not {pull.slot.digest}"
    peer.pool.release(pull.layer, pull.pool_slot)
    return {"measure": "verified by SHA-256", "slots": 1}


def mapping_cost(peer: Peer) -> Row:
    """Opening and closing the next rank's memory, however much that is."""
    opened, closed = [], []
    for _ in range(5):
        began = time.perf_counter()
        mapping = peer.lane.open(peer.loan.handle)
        opened.append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        mapping.close()
        closed.append(1e3 * (time.perf_counter() - began))
    return {
        "measure": "mapping", "bytes": peer.pool.allocated_bytes, "open_ms": statistics.median(opened),
        "open_ms_most": max(opened), "close_ms": statistics.median(closed),
    }  # fmt: skip


def fingerprints(peer: Peer, model: str, slots: int) -> Row:
    """What the device takes for them, of bytes that are in no cache."""
    layer = peer.pool.layers[0]
    tensors = [peer.pool.slab(layer).gate_up, peer.pool.slab(layer).down]
    table, launches = span_table(
        [
            Span(tensor[slot].data_ptr(), tensor[slot].nbytes, index, slot)
            for slot in range(slots)
            for index, tensor in enumerate(tensors)
        ]
    )
    table_N4, sums_M2 = table.to(peer.seat.device), torch.zeros(slots, 2, dtype=torch.int64, device=peer.seat.device)
    flush = torch.empty(256 * 1024**2, dtype=torch.uint8, device=peer.seat.device)
    times = []
    for _ in range(9):
        flush.zero_()
        stream = torch.cuda.current_stream()
        times.append(_device_ms(stream, lambda: fingerprint_spans(table_N4, launches, sums_M2)))
    nbytes, ms = slots * peer.pool.slot_bytes(layer), statistics.median(times)
    return {"measure": "fingerprints", "slots of": model, "slots": slots, "ms": ms, "gb_per_s": nbytes / ms / 1e6}


class Step:
    """A decode step's routed experts, 48 layers in one graph, on a stream of the priority that is asked for."""

    def __init__(self, peer: Peer, priority: int) -> None:
        self.stream = torch.cuda.Stream(priority=priority)
        slabs = [peer.pool.slab(layer) for layer in peer.pool.layers]
        workspace = Workspace(_QWEN, _STEP_TOKENS, torch.bfloat16, peer.seat.device)
        self.layers = [FusedLayer(Slabs(each.gate_up, each.down, None, None, SwiGLU()), workspace) for each in slabs]
        self.inputs = [Inputs.random(_QWEN, _STEP_TOKENS) for _ in slabs]
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.run()

    def run(self) -> None:
        for at in range(_STEP_LAYERS):
            self.inputs[at % _LAYERS].run(self.layers[at % _LAYERS])

    def times(self, steps: int) -> list[float]:
        """Milliseconds of each step, back to back."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        with torch.cuda.stream(self.stream):
            marks[0].record()
            for mark in marks[1:]:
                self.graph.replay()
                mark.record()
        if not poll(marks[-1].query, _DEADLINE_S):
            raise RuntimeError("a step did not end")
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]


class Copying:
    """Pulls again and again on a thread of its own, until `end`."""

    def __init__(self, peer: Peer, copies: CopyEngine, pulls: list[Pull]) -> None:
        self.moved, self.failure = 0, ""
        self._peer, self._copies, self._pulls = peer, copies, pulls
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._began = time.perf_counter()
        self._thread.start()
        # Steps beside it count once the copies run.
        poll(lambda: self.moved > 0 or bool(self.failure), _DEADLINE_S)

    def _run(self) -> None:
        try:
            for at in itertools.cycle(range(0, len(self._pulls), 64)):
                if self._over.is_set():
                    return
                some = self._pulls[at : at + 64]
                self._peer.pull(self._copies, some)
                self.moved += sum(self._peer.pool.slot_bytes(pull.layer) for pull in some)
        except Exception as error:  # noqa: BLE001 - raised where it counts
            self.failure = f"{type(error).__name__}: {error}"

    def end(self) -> float:
        """GB/s; `RuntimeError` when a pull failed."""
        self._over.set()
        join_thread(self._thread, _DEADLINE_S, "the last pulls")
        if self.failure:
            raise RuntimeError(self.failure)
        return self.moved / (time.perf_counter() - self._began) / 1e9


def beside(peer: Peer, what: str, step: Step, copies: CopyEngine, pulls: list[Pull]) -> Row:
    """Steps alone and steps beside copies, round by round, all ranks at once."""
    alone: list[float] = []
    together: list[float] = []
    rates = []
    step.times(5)
    for turn in range(_ROUNDS):
        peer.meet(f"alone {what} {turn}")
        alone += step.times(_STEPS)
        peer.meet(f"beside {what} {turn}")
        copying = Copying(peer, copies, pulls)
        together += step.times(_STEPS)
        rates.append(copying.end())
    row: dict[str, Any] = {"measure": "background", "copies": what, "gb_per_s": statistics.median(rates)}
    for name, of in (("p50", 0.5), ("p99", 0.99)):
        first, second = (_quantile(times, of) for times in (alone, together))
        row |= {f"step_{name}_ms": first, f"step_{name}_ms_beside": second, f"{name}_over_alone": second / first}
    return row | {"goal p99_over_alone": 1.03, "steps": len(alone)}


def _quantile(values: Sequence[float], of: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(of * len(values)) - 1)]


def work(seat: Seat) -> list[Row]:
    torch.manual_seed(seat.rank)
    rows: list[Row] = []

    def add(row: Row | None) -> None:
        if row is None:
            return
        rows.append(row)
        if seat.rank == 0:
            print(json.dumps(row), flush=True)

    qwen = Peer.start(seat, "qwen", ExpertLayout(_QWEN.hidden, _QWEN.ffn), _LAYERS, _IN_USE, _IN_USE, _LENT)
    add(mapping_cost(qwen))
    add(burst(qwen, "qwen3-30b-a3b", 1))
    add(burst(qwen, "qwen3-30b-a3b", seat.ranks))
    add(verified(qwen))
    add(fingerprints(qwen, "qwen3-30b-a3b", 28))
    rate = qwen.copies.rate
    plain = [replace(pull, slot=replace(pull.slot, fingerprint=(0, 0))) for pull in qwen.pulls]
    for name, priority in (("a high priority", -5), ("the usual priority", 0)):
        step = Step(qwen, priority)
        qwen.copies.pace(BACKGROUND_SHARE * rate)
        add(beside(qwen, f"at a quarter, verified; step on a stream of {name}", step, qwen.copies, qwen.pulls))
        if priority:
            unchecked = CopyEngine(qwen.pool, Unchecked(qwen.lane), deadline_s=_DEADLINE_S)
            unchecked.pace(BACKGROUND_SHARE * rate)
            add(beside(qwen, "at a quarter, not verified", step, unchecked, plain))
            flat_out = CopyEngine(qwen.pool, qwen.lane, deadline_s=_DEADLINE_S)
            add(beside(qwen, "flat out, verified", step, flat_out, qwen.pulls))
    mixtral = Peer.start(seat, "mixtral", ExpertLayout(_MIXTRAL.hidden, _MIXTRAL.ffn), 1, 8, 8, 2)
    add(burst(mixtral, "mixtral-8x7b", seat.ranks))
    add(fingerprints(mixtral, "mixtral-8x7b", 1))
    mixtral.meet("the end")  # nobody unmaps what others still read
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ray_moe.bench.gpu_migration")
    parser.add_argument("--out", type=Path, help="folder for the record (default: it is printed)")
    parser.add_argument(
        "--ranks",
        type=int,
        default=ranks_here(),
        help="more than there are GPUs take turns, and times say little",
    )
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        print("migration: takes two GPUs of one host")
        return
    by_rank = run_ranks(work, seconds=180, ranks=options.ranks)
    record = environment() | {
        "command": "python -m ray_moe.bench.gpu_migration",
        "ranks": len(by_rank),
        "gpus": torch.cuda.device_count(),
        "method": f"medians of {_ROUNDS} rounds, both sides in each; steps timed by events, back to back",
        "rows": [{"rank": rank, **row} for rank, rows in enumerate(by_rank) for row in rows],
    }
    text = json.dumps(record, indent=1)
    if options.out is None:
        print(text)
    else:
        (options.out / "migration.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
