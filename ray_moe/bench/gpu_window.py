"""The exchange through windows and the layer over it, a process for each GPU of one host.

    python -m ray_moe.bench.gpu_window [--out DIR]        exchange.json, scaling.json

Exchanges are replayed from a CUDA graph and checked once; the baseline, NCCL's all-gather and reduce-scatter of the
same tokens, is replayed from a graph of its own in the same rounds. Times are the slowest rank's median.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ray_moe.bench.gpu_layer import environment
from ray_moe.bench.gpu_ranks import Seat, ranks_here, run_ranks
from ray_moe.bench.gpu_shapes import MODELS, Inputs, compile_beforehand, random_slabs
from ray_moe.bench.report import Row
from ray_moe.comm.nccl import NcclGroup
from ray_moe.comm.window import NodeWindow, WindowSeat
from ray_moe.dataplane.windowed import MOST_REPLICAS, WindowedLayer
from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace
from ray_moe.kernels.regions import Part, Regions
from ray_moe.kernels.tiling import LayerShape
from ray_moe.kernels.window import collect, push, wait
from ray_moe.kernels.window_partial import sum_partials, unpack
from ray_moe.routes import Routes

EXCHANGES = ((128, 7168), (16, 2048))  # tokens of each GPU, width; top-8 of 256 experts
_LARGE = (4096, 7168)  # for the wire rate
_REPEATS, _ROUNDS = 50, 7
_TOP_K, _EXPERTS = 8, 256
_DEADLINE_S = 20.0


@dataclass(frozen=True, eq=False)
class Rank:
    """One rank with a window of its own for every width."""

    seat: Seat

    def window(self, shape: LayerShape, capacity: int, epoch: int, packed: bool = False) -> WindowSeat:
        """`packed`: FP8 rows outward and rank-partial sums back."""
        regions = Regions.plan(
            self.seat.ranks, capacity, shape.top_k, shape.hidden, torch.bfloat16, quantized=packed, partial=packed
        )
        window = NodeWindow(regions, self.seat.global_rank, self.seat.device, _DEADLINE_S)
        place = window.join(self.seat.group(epoch), self.seat.store, _DEADLINE_S)
        place.enter()
        return place

    def table(self, experts: int) -> Tensor:
        """Expert e on peer e * P // E, one replica each, slots in the experts' order."""
        owner = torch.arange(experts, dtype=torch.int32) * self.seat.ranks // experts
        slot = torch.arange(experts, dtype=torch.int32) % max(1, experts // self.seat.ranks)
        table = torch.full((2 + MOST_REPLICAS, experts), -1, dtype=torch.int32)
        table[0], table[1], table[2] = torch.where(owner == self.seat.rank, slot, -1), 1, owner
        return table.to(self.seat.device)


class Exchange:
    """push, wait and collect of one unit whose owners answer each route with the row it came with."""

    def __init__(self, rank: Rank, tokens: int, hidden: int, epoch: int, packed: bool = False) -> None:
        self.shape = LayerShape(_EXPERTS, _TOP_K, hidden, 1)
        self.place = rank.window(self.shape, tokens, epoch, packed)
        self.table = rank.table(_EXPERTS)
        self.inputs = Inputs.random(self.shape, tokens)
        self.part = Part(tokens, 0, rank.seat.ranks)

    def begin(self) -> None:
        window = self.place.window
        push(
            self.inputs.hidden_TD,
            self.inputs.ids_TK,
            self.table,
            window.windows_M,
            window.cell,
            window.regions,
            self.part,
        )
        wait(window.memory.bytes, window.cell, window.failure, window.regions, self.part)

    def end(self) -> None:
        window, inputs = self.place.window, self.inputs
        collect(
            inputs.ids_TK, inputs.gates_TK, self.table, window.memory.bytes, window.windows_M, window.cell,
            window.failure, window.regions, self.part, inputs.out_TD,
        )  # fmt: skip

    def both(self) -> None:
        self.begin()
        self.end()

    def answer(self) -> None:
        """Results and positions as an owner of identity experts leaves them."""
        received = self.place.window.received(self.part)
        assert received.position_N is not None
        assert received.results_RD is not None
        flat = received.ids_TK.reshape(-1)
        mine = (flat >= 0).nonzero().squeeze(1)
        received.position_N.fill_(-1)
        received.position_N[mine] = torch.arange(len(mine), dtype=torch.int32, device=flat.device)
        received.results_RD[: len(mine)] = received.rows_TD[mine // _TOP_K]

    def checked(self) -> float:
        """The error of one exchange, step by step, against the tokens' own weighted rows."""
        self.begin()
        self.answer()
        self.end()
        torch.cuda.synchronize()
        self.place.check()
        wanted = self.inputs.hidden_TD.float() * self.inputs.gates_TK.sum(1, keepdim=True)
        return float((self.inputs.out_TD.float() - wanted).norm() / wanted.norm())


def repeated(call: Callable[[], object], repeats: int) -> Callable[[], None]:
    """A graph of `repeats` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph.replay


def rounds_us(replays: Sequence[Callable[[], None]], repeats: int) -> list[list[float]]:
    """Microseconds of one call, by replay and round; rounds take all replays in turn."""
    times: list[list[float]] = [[] for _ in replays]
    for _ in range(_ROUNDS + 1):
        for index, replay in enumerate(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replay()  # all ranks are here now
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            times[index].append(begin.elapsed_time(end) * 1e3 / repeats)
    return [each[1:] for each in times]


class Nccl:
    """All-gather and reduce-scatter of the same tokens, as a captured baseline has them."""

    def __init__(self, seat: Seat, rows: Tensor, epoch: int) -> None:
        self.group = NcclGroup(seat.group(epoch), seat.global_rank, seat.store, _DEADLINE_S, seat.device)
        self._rows, self._summed = rows, rows.new_zeros(seat.ranks, *rows.shape)

    def both(self) -> None:
        self.group.all_gather(self._rows).payload()
        self.group.reduce_scatter(self._summed).payload()


class PackedExchange(Exchange):
    """The same with FP8 rows outward, and each owner's sum of a token's routes back."""

    def __init__(self, rank: Rank, tokens: int, hidden: int, epoch: int) -> None:
        super().__init__(rank, tokens, hidden, epoch, packed=True)
        received = self.place.window.received(self.part)
        self.received, self.rows = received, self.place.window.unpacked(self.part)
        self.results = self.rows.new_zeros(self.part.tokens * _TOP_K, hidden)
        self.positions = torch.full((self.part.tokens * _TOP_K,), -1, dtype=torch.int32, device=rank.seat.device)

    def begin(self) -> None:
        super().begin()
        assert self.received.scales_TB is not None
        unpack(self.received.rows_TD, self.received.scales_TB, self.received.ids_TK, self.rows)

    def answer(self) -> None:
        mine = (self.received.ids_TK.reshape(-1) >= 0).nonzero().squeeze(1)
        self.positions.fill_(-1)
        self.positions[mine] = torch.arange(len(mine), dtype=torch.int32, device=mine.device)
        self.results[: len(mine)] = self.rows[mine // _TOP_K]

    def end(self) -> None:
        window, received = self.place.window, self.received
        assert received.gates_TK is not None
        sum_partials(
            self.results, self.positions, received.ids_TK, received.gates_TK, window.windows_M, window.cell,
            window.regions, self.part,
        )  # fmt: skip
        super().end()


def exchange_rows(seat: Seat) -> list[dict[str, Any]]:
    """This rank's times of every exchange."""
    rank, found = Rank(seat), []
    for epoch, (tokens, hidden) in enumerate(EXCHANGES, 1):
        exchange = Exchange(rank, tokens, hidden, epoch)
        error = exchange.checked()
        baseline = Nccl(seat, exchange.inputs.hidden_TD, 60 + epoch)
        packed = PackedExchange(rank, tokens, hidden, 40 + epoch)
        packed_error = packed.checked()
        calls = (exchange.both, packed.both, baseline.both)
        times = rounds_us([repeated(each, _REPEATS) for each in calls], _REPEATS)
        packed.place.check()
        baseline.group.check()
        baseline.group.close()
        exchange.place.check()
        found.append(
            {"tokens": tokens, "hidden": hidden, "err": error, "us": times[0], "nccl_us": times[2]}
            | {"packed_err": packed_error, "packed_us": times[1]}
        )
    return found


def wire_rows(seat: Seat) -> dict[str, Any]:
    """Bytes to others by a push, beside a copy of the same bytes by the copy engine."""
    rank, (tokens, hidden) = Rank(seat), _LARGE
    exchange = Exchange(rank, tokens, hidden, 10)
    peer = (seat.rank + 1) % seat.ranks
    mine = exchange.place.window.received(exchange.part).rows_TD
    theirs = exchange.place.peer_rows(peer, exchange.part)
    size = mine[:tokens].nbytes

    def copied() -> None:
        mine[:tokens].copy_(theirs[:tokens], non_blocking=True)

    sent = int(((exchange.table[2][exchange.inputs.ids_TK] == peer).any(1)).sum()) * hidden * 2
    push_us, copy_us = rounds_us([repeated(exchange.begin, 5), repeated(copied, 5)], 5)
    exchange.place.check()
    return {"bytes_per_peer": sent, "us": push_us, "copy_us": copy_us, "copy_bytes": size}


def scaling_rows(seat: Seat, model: str, tokens: int) -> dict[str, Any]:
    """The whole layer on one GPU, and over all with as many tokens on each; whole and in parts."""
    shape, rank = MODELS[model], Rank(seat)
    torch.manual_seed(3 + seat.rank)
    pool = random_slabs(shape)
    inputs = Inputs.random(shape, tokens)
    alone = FusedLayer(pool, Workspace(shape, tokens, torch.bfloat16, seat.device))
    share = shape.num_experts // seat.ranks
    own = Slabs(pool.gate_up[:share], pool.down[:share], None, None, pool.activation)
    fused = FusedLayer(own, Workspace(shape, seat.ranks * tokens, torch.bfloat16, seat.device))
    place = rank.window(shape, tokens, 20 + list(MODELS).index(model))
    routes, table = Routes(inputs.ids_TK, inputs.gates_TK), rank.table(shape.num_experts)
    calls: dict[str, Callable[[], object]] = {"alone_us": partial(inputs.run, alone)}
    for parts, pull in ((1, True), (1, False), (2, False), (4, False)):
        layer = WindowedLayer(fused, place, table, parts, pull=pull)
        name = f"parts_{parts}{'_pull' if pull else ''}_us"
        calls[name] = partial(layer.run, inputs.hidden_TD, routes, capacity=tokens)
    replays = [repeated(call, 5) for call in calls.values()]
    times = dict(zip(calls, rounds_us(replays, 5), strict=True))
    place.check()
    return {"model": model, "tokens": tokens, **times}


def padding_rows(seat: Seat, load: int) -> dict[str, Any]:
    """A decode layer replayed at capacity `load`, and at four times that with the same tokens."""
    shape, rank = MODELS["qwen3-30b-a3b"], Rank(seat)
    share = shape.num_experts // seat.ranks
    pool = random_slabs(shape)
    own = Slabs(pool.gate_up[:share], pool.down[:share], None, None, pool.activation)
    fused = FusedLayer(own, Workspace(shape, seat.ranks * 4 * load, torch.bfloat16, seat.device))
    place = rank.window(shape, 4 * load, 30 + load)
    inputs = Inputs.random(shape, 4 * load)
    routes, table = Routes(inputs.ids_TK, inputs.gates_TK), rank.table(shape.num_experts)
    layer, pulling = WindowedLayer(fused, place, table), WindowedLayer(fused, place, table, pull=True)
    few = Routes(inputs.ids_TK[:load].clone(), inputs.gates_TK[:load].clone())
    inputs.ids_TK[load:] = -1
    tight = repeated(lambda: layer.run(inputs.hidden_TD[:load], few, capacity=load, table=table), 20)
    wide = repeated(lambda: layer.run(inputs.hidden_TD, routes, capacity=4 * load, table=table), 20)
    pull = repeated(lambda: pulling.run(inputs.hidden_TD[:load], few, capacity=load, table=table), 20)
    tight_us, wide_us, pull_us = rounds_us([tight, wide, pull], 20)
    place.check()
    return {"tokens": load, "capacity": 4 * load, "tight_us": tight_us, "us": wide_us, "tight_pull_us": pull_us}


def _work(seat: Seat) -> dict[str, Any]:
    return {
        "exchange": exchange_rows(seat),
        "wire": wire_rows(seat),
        "scaling": [scaling_rows(seat, model, 4096) for model in MODELS],
        "padding": [padding_rows(seat, load) for load in (4, 16, 64)],
    }


def slowest(by_rank: Sequence[Sequence[float]]) -> float:
    """The slowest rank's median."""
    return max(statistics.median(times) for times in by_rank)


def _merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of all ranks' rows: lists of times become the slowest median, the rest is the first rank's."""
    return {
        name: slowest([row[name] for row in rows]) if isinstance(value, list) else value
        for name, value in rows[0].items()
    }


def report(found: Sequence[dict[str, Any]], ranks: int) -> tuple[list[Row], list[Row]]:
    """Rows of exchange.json and scaling.json."""
    exchanges: list[Row] = []
    for index in range(len(EXCHANGES)):
        row = _merged([rank["exchange"][index] for rank in found])
        row = {"what": "dispatch + combine", "gpus": ranks, "payload": "bf16", **row}
        row |= {f"nccl_over_{name}": row["nccl_us"] / row[name] for name in ("us", "packed_us")}
        exchanges.append(row)
    wire = _merged([rank["wire"] for rank in found])
    rate, copy_rate = wire["bytes_per_peer"] / wire["us"] / 1e3, wire["copy_bytes"] / wire["copy_us"] / 1e3
    exchanges.append({
        "what": "wire rate of a push", "gpus": ranks, "bytes_per_peer": wire["bytes_per_peer"],
        "gb_per_s": rate * (ranks - 1), "copy_gb_per_s": copy_rate, "rate_over_copy": rate * (ranks - 1) / copy_rate,
    })  # fmt: skip
    scaling: list[Row] = []
    for index, model in enumerate(MODELS):
        row = _merged([rank["scaling"][index] for rank in found])
        scaling.append({"what": "weak scaling", "gpus": ranks, **row} | {
            f"efficiency_{name}": row["alone_us"] / row[f"{name}_us"]
            for name in ("parts_1_pull", "parts_1", "parts_2", "parts_4")
        })  # fmt: skip
        assert row["model"] == model
    for index in range(len(found[0]["padding"])):
        row = _merged([rank["padding"][index] for rank in found])
        scaling.append({"what": "padding tax", "gpus": ranks, **row, "tax": row["us"] / row["tight_us"] - 1})
    return exchanges, scaling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a folder for exchange.json and scaling.json")
    options = parser.parse_args()
    ranks = ranks_here()
    if ranks < 2:
        print("gpu_window: takes two GPUs of one host, found", ranks)
        return
    shapes = [(shape, tokens, None, True) for shape in MODELS.values() for tokens in (4096, 4096 * ranks)]
    compile_beforehand(shapes)
    exchanges, scaling = report(run_ranks(_work, seconds=300), ranks)
    for name, rows in (("exchange", exchanges), ("scaling", scaling)):
        for row in rows:
            print(
                {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True
            )
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            record = environment() | {"command": "python -m ray_moe.bench.gpu_window", "gpus": ranks, "rows": rows}
            (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
