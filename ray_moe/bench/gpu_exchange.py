"""NCCL's exchanges and the agreement of a node's peers, a process for each GPU of one host.

    python -m ray_moe.bench.gpu_exchange [--out DIR]        nccl.json

Exchanges go through `comm.nccl`, as the product sends them. Those that a graph can hold are replayed from one; a copy
of the same bytes by the copy engine, from each rank's neighbour, takes its turn in the same rounds. Times are the
slowest rank's median. The agreement is timed on the host, alone and while the device computes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ray_moe.bench.gpu_layer import environment
from ray_moe.bench.gpu_ranks import Seat, ranks_here, run_ranks
from ray_moe.bench.report import Row
from ray_moe.comm.agreement import StepRecord
from ray_moe.comm.ipc import IpcMemory, PeerMemory
from ray_moe.comm.join import join
from ray_moe.comm.nccl import NcclGroup
from ray_moe.comm.rendezvous import connect

TOKENS = ((128, 7168), (16, 2048))  # of each GPU, and their width
WIRE_MIB = (8, 32, 128)  # to each peer
_REPEATS, _ROUNDS = 20, 7
_AGREEMENTS, _WARM_UP = 2000, 200
_DEADLINE_S = 30.0


class Rank:
    """One rank's group, and the timing that all of them take part in."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        group = join("nccl", seat.group(1), seat.global_rank, seat.store, _DEADLINE_S, seat.device)
        assert isinstance(group, NcclGroup)
        self.group = group

    def rounds_us(self, calls: dict[str, Callable[[], object]], repeats: int, *, graphs: bool = True) -> dict[str, Any]:
        """Microseconds of one call, by name and round; rounds take all calls in turn, and all ranks together."""
        runs = {name: (_graphed if graphs else _repeated)(call, repeats) for name, call in calls.items()}
        times: dict[str, Any] = {name: [] for name in calls}
        for _ in range(_ROUNDS + 1):
            for name, run in runs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.group.gather_counts(torch.zeros(1, dtype=torch.int64))
                run()  # the ranks are level on the device behind this one
                begin.record()
                run()
                end.record()
                self.group.settle()
                times[name].append(begin.elapsed_time(end) * 1e3 / repeats)
        return {name: rounds[1:] for name, rounds in times.items()}


def _repeated(call: Callable[[], object], repeats: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeats):
            call()

    return run


def _graphed(call: Callable[[], object], repeats: int) -> Callable[[], None]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _repeated(call, repeats)()
    return graph.replay


# ---- what is measured ----


def wire(rank: Rank, mib: int) -> Row:
    """An all-to-all-v with so much for each peer, beside the copy engine's pull of as much from the next rank."""
    seat, rows = rank.seat, mib * 1024**2 // 8192
    even = [0 if peer == seat.rank else rows for peer in range(seat.ranks)]
    sent = torch.full((sum(even), 4096), float(seat.rank), dtype=torch.bfloat16, device=seat.device)
    own = IpcMemory.allocate(mib * 1024**2, seat.device)
    store = connect(seat.store, f"wire-{mib}", _DEADLINE_S)
    store.set(str(seat.rank), own.handle.hex())
    neighbour = bytes.fromhex(store.get(str((seat.rank + 1) % seat.ranks)).decode())
    theirs, target = PeerMemory.open(neighbour, own.bytes.numel(), seat.device), torch.empty_like(own.bytes)

    def exchange() -> Tensor:
        return rank.group.all_to_all_v(sent, even, even).payload()

    got = exchange().view(seat.ranks - 1, -1)[:, 0].tolist()
    assert got == [peer for peer in range(seat.ranks) if peer != seat.rank], f"rank {seat.rank} received {got}"
    times = rank.rounds_us(
        {"us": exchange, "copy_us": partial(target.copy_, theirs.bytes, non_blocking=True)}, repeats=5
    )
    theirs.close()
    return {"what": "all-to-all-v", "mib_per_peer": mib, **times}


def gather_scatter(rank: Rank, tokens: int, width: int) -> Row:
    """All-gather of the tokens and reduce-scatter of as many rows of every peer: what windows are compared with."""
    rows = torch.ones(tokens, width, dtype=torch.bfloat16, device=rank.seat.device)

    def both() -> Tensor:
        gathered = rank.group.all_gather(rows).payload()
        return rank.group.reduce_scatter(gathered).payload()

    assert bool((both() == rank.seat.ranks).all()), f"rank {rank.seat.rank}: sums of ones are wrong"
    times = rank.rounds_us({"us": both}, _REPEATS) | {
        "eager_us": rank.rounds_us({"": both}, _REPEATS, graphs=False)[""]
    }
    return {"what": "all-gather + reduce-scatter", "tokens": tokens, "width": width, **times}


def small(rank: Rank, rows: int, width: int) -> Row:
    """A small all-to-all-v, replayed and eager."""
    peers = rank.seat.ranks
    sent = torch.ones(peers * rows, width, dtype=torch.bfloat16, device=rank.seat.device)

    def exchange() -> Tensor:
        return rank.group.all_to_all_v(sent, [rows] * peers, [rows] * peers).payload()

    times = rank.rounds_us({"us": exchange}, _REPEATS)
    times["eager_us"] = rank.rounds_us({"": exchange}, _REPEATS, graphs=False)[""]
    return {"what": "small all-to-all-v", "rows_per_peer": rows, "width": width, **times}


def agreement(rank: Rank, *, beside: bool) -> Row:
    """The step agreement on the host, from the line to all lines; `beside`: under a step of a millisecond or two."""
    record = StepRecord(0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0).to_tensor()
    matrix = torch.randn(4096, 4096, device=rank.seat.device, dtype=torch.bfloat16)
    step = _graphed(lambda: matrix @ matrix, 8)
    times: list[float] = []
    for number in range(_AGREEMENTS + _WARM_UP):
        if beside:
            if number % 16 == 0:
                rank.group.settle()
            step()
        rank.group.gather_counts(torch.zeros(1, dtype=torch.int64))  # all begin together
        started = time.perf_counter()
        rank.group.gather(record).result()
        times.append((time.perf_counter() - started) * 1e6)
    rank.group.settle()
    return {"what": "agreement", "beside_a_step": beside, **_percentiles(times[_WARM_UP:])}


def counts(rank: Rank, slots: int) -> Row:
    """The count exchange of a layer with so many slots: from a line on the device to all lines on the host."""
    line = torch.zeros(slots, dtype=torch.int64, device=rank.seat.device)
    times = []
    for _ in range(_AGREEMENTS + _WARM_UP):
        started = time.perf_counter()
        rank.group.gather_counts(line)
        times.append((time.perf_counter() - started) * 1e6)
    return {"what": "count exchange", "slots": slots, **_percentiles(times[_WARM_UP:])}


def _percentiles(times: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(times)
    return {"p50_us": [ordered[len(ordered) // 2]], "p99_us": [ordered[len(ordered) * 99 // 100]]}


@torch.inference_mode()
def _work(seat: Seat) -> list[Row]:
    rank = Rank(seat)
    rows = [agreement(rank, beside=beside) for beside in (False, True)]
    rows.append(counts(rank, slots=160))
    rows += [gather_scatter(rank, tokens, width) for tokens, width in TOKENS]
    rows += [small(rank, 16, 2048), small(rank, 128, 7168)]
    rows += [wire(rank, mib) for mib in WIRE_MIB]
    rank.group.close()
    return rows


def report(found: Sequence[Sequence[Row]], ranks: int) -> list[Row]:
    """The ranks' rows as one: the slowest median of each time; rates in GB/s, out of one GPU to all others."""
    rows: list[Row] = []
    for by_rank in zip(*found, strict=True):
        row: dict[str, Any] = {"gpus": ranks} | {
            name: max(statistics.median(each[name]) for each in by_rank) if isinstance(value, list) else value
            for name, value in by_rank[0].items()
        }
        if "copy_us" in row:
            size = row["mib_per_peer"] * 1024**2 / 1e3
            row["gb_per_s"], row["copy_gb_per_s"] = size * (ranks - 1) / row["us"], size / row["copy_us"]
            row["rate_over_copy"] = row["gb_per_s"] / row["copy_gb_per_s"]
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ray_moe.bench.gpu_exchange")
    parser.add_argument("--out", type=Path, help="folder for the record (default: it is only printed)")
    options = parser.parse_args(arguments)
    ranks = ranks_here()
    if ranks < 2:
        print(f"gpu_exchange: takes two GPUs of one host, found {ranks}")
        return
    rows = report(run_ranks(_work, seconds=240), ranks)
    for row in rows:
        print({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        record = environment() | {"command": "python -m ray_moe.bench.gpu_exchange", "rows": rows}
        (options.out / "nccl.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
