"""Layers over windows, a process for each GPU, against the fp32 twin of one device; a peer that really dies."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ray_moe.bench.gpu_ranks import Seat, ranks_for_tests, run_ranks
from ray_moe.errors import CollectiveError
from ray_moe.routes import Routes
from tests.kernels.layers import ROUTINGS, routing, slabs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ranks_for_tests() < 2, reason="takes a CUDA device")]
BF16 = 6e-3


class Bench:
    """One rank's layer: expert e is on peer e % P, every third one on its neighbour too; slots are in no order."""

    def __init__(
        self, seat: Seat, capacity: int, limit_s: float = 20.0, quantized: bool = False, partial: bool = False
    ) -> None:
        from ray_moe.comm.window import NodeWindow
        from ray_moe.kernels.activation import SwiGLU
        from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace
        from ray_moe.kernels.regions import Regions
        from ray_moe.kernels.tiling import LayerShape

        self.seat, self.shape = seat, LayerShape(32, 4, 512, 256)
        torch.manual_seed(0)
        self.all = slabs(self.shape, torch.bfloat16, seat.device, spare=0)
        torch.manual_seed(100 + seat.rank)
        order = torch.randperm(32, device=seat.device)
        self.inverse = torch.argsort(order).tolist()
        own = Slabs(self.all.gate_up[order].contiguous(), self.all.down[order].contiguous(), None, None, SwiGLU())
        most = seat.ranks
        regions = Regions.plan(most, capacity, 4, 512, torch.bfloat16, quantized=quantized, partial=partial)
        self.window = NodeWindow(regions, seat.global_rank, seat.device, limit_s)
        self.fused = FusedLayer(own, Workspace(self.shape, most * capacity, torch.bfloat16, seat.device))

    def layer(self, group: object, *, parts: int = 1, shift: int = 0, pull: bool = False):  # type: ignore[no-untyped-def]
        from ray_moe.dataplane.windowed import WindowedLayer

        place = self.window.join(group, self.seat.store, 30)  # type: ignore[arg-type]
        return WindowedLayer(self.fused, place, self.table(len(place.spec), place.peer_slot, shift), parts, pull=pull)

    def table(self, peers: int, mine: int, shift: int = 0) -> Tensor:
        columns = []
        for expert in range(32):
            owners = [(expert + shift) % peers]
            if expert % 3 == 0 and peers > 1:
                owners.append((expert + shift + 1) % peers)
            here = self.inverse[expert] if mine in owners else -1
            columns.append([here, len(owners), *owners, *[-1] * (8 - len(owners))])
        return torch.tensor(columns, dtype=torch.int32, device=self.seat.device).T.contiguous()

    def unit(self, kind: str, tokens: int) -> tuple[Tensor, Routes]:
        device = self.seat.device
        hidden = torch.randn(tokens, 512, device=device).to(torch.bfloat16)
        return hidden, Routes(routing(kind, tokens, self.shape, device), torch.rand(tokens, 4, device=device))

    def error(self, out: Tensor, hidden: Tensor, routes: Routes, real: int | None = None) -> float:
        from ray_moe.kernels.reference_grouped import routed_layer

        slots = torch.arange(32, device=hidden.device)
        wanted = routed_layer(
            hidden, routes.topk_ids, routes.topk_weights, slots, self.all.gate_up, self.all.down, None, None,
            self.all.activation,
        )[:real]  # fmt: skip
        return float((out[:real].float() - wanted).norm() / wanted.norm().clamp_min(1e-20))


def _sizes(seat: Seat) -> list[str]:
    bench, wrong = Bench(seat, 1024), []
    layers = [bench.layer(seat.group(1)), bench.layer(seat.group(2), parts=3), bench.layer(seat.group(3), pull=True)]
    for number, layer in enumerate(layers):
        if number:
            layers[number - 1].seat.leave()
        for kind in (*ROUTINGS, "nothing"):
            for most in (1, 5, 64, 1000):
                hidden, routes = bench.unit("random" if kind == "nothing" else kind, max(0, most - 3 * seat.rank))
                if kind == "nothing":
                    routes = Routes(torch.full_like(routes.topk_ids, -1), routes.topk_weights)
                out = layer.run(hidden, routes, capacity=most)
                torch.cuda.synchronize()
                layer.seat.check()
                error = bench.error(out, hidden, routes) if len(hidden) else 0.0
                if not error < BF16 or not out.isfinite().all():
                    wrong.append(f"{kind}, {len(hidden)} tokens, parts {layer.parts}, pull {layer.pull}: {error}")
    return wrong


def _packed(seat: Seat) -> list[str]:
    from ray_moe.dataplane.precision import QuantizedRows

    wrong = []
    for number, (quantized, partial) in enumerate(((True, True), (False, True), (True, False)), 1):
        bench = Bench(seat, 300, quantized=quantized, partial=partial)
        layer = bench.layer(seat.group(number), parts=2)
        layer = replace(layer, pipelined_from=200)
        for kind in ROUTINGS:
            for most in (1, 40, 290):
                hidden, routes = bench.unit(kind, max(0, most - 3 * seat.rank))
                out = layer.run(hidden, routes, capacity=most)
                torch.cuda.synchronize()
                layer.seat.check()
                sent = hidden
                if quantized:
                    sent = QuantizedRows.of(hidden.cpu(), 128).dequantized(torch.bfloat16).to(hidden.device)
                error = bench.error(out, sent, routes) if len(hidden) else 0.0
                # A tie between two FP8 numbers may go either way; unquantized rows would be 0.026 off.
                if not error < (2 * BF16 if quantized else BF16) or not out.isfinite().all():
                    wrong.append(f"{kind}, {len(hidden)} tokens, fp8 {quantized}, partial {partial}: {error}")
    return wrong


def test_fp8_rows_and_partial_sums_equal_the_twin_of_what_was_sent() -> None:
    assert run_ranks(_packed, ranks=ranks_for_tests(), seconds=120) == [[]] * ranks_for_tests()


def test_every_routing_and_size_equals_the_twin() -> None:
    assert run_ranks(_sizes, ranks=ranks_for_tests(), seconds=150) == [[]] * ranks_for_tests()


def _captured(seat: Seat) -> list[str]:
    bench, wrong = Bench(seat, 64), []
    layer = bench.layer(seat.group(1))
    hidden, routes = bench.unit("random", 64)
    cell = layer.table_XE.clone()

    def run() -> Tensor:
        return layer.run(hidden, routes, capacity=64, table=cell)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replayed(what: str, real: int, kind: str) -> None:
        other, others = bench.unit(kind, 64)
        hidden.copy_(other)
        routes.topk_ids.copy_(others.topk_ids)
        routes.topk_weights.copy_(others.topk_weights)
        routes.topk_ids[real:] = -1  # padding
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        layer.seat.check()
        error = bench.error(out, hidden, routes, real) if real else 0.0
        if not error < BF16 or not out[:real].isfinite().all() or out[real:].any():
            wrong.append(f"{what}, {kind}, {real} tokens: {error}")

    for kind in ROUTINGS:
        for real in (64, 17 + seat.rank, 1, 0):
            replayed("epoch 1", real, kind)
    cell.copy_(bench.table(seat.ranks, seat.rank, shift=1))
    replayed("another placement", 40, "zipf")
    # Another epoch, its peers in another order: nothing is captured again.
    following = bench.layer(seat.group(2, list(reversed(range(seat.ranks)))))
    layer.seat.leave()
    following.seat.enter()
    cell.copy_(following.table_XE)
    for kind in ROUTINGS:
        replayed("epoch 2", 33, kind)
    return wrong


def test_what_is_captured_serves_other_routes_counts_placements_and_epochs() -> None:
    assert run_ranks(_captured, ranks=ranks_for_tests(), seconds=120) == [[]] * ranks_for_tests()


def _death(seat: Seat) -> str:
    bench = Bench(seat, 16, limit_s=1.0)
    layer = bench.layer(seat.group(1))
    hidden, routes = bench.unit("random", 16)
    cell = layer.table_XE.clone()
    layer.run(hidden, routes, capacity=16, table=cell)
    torch.cuda.synchronize()
    layer.seat.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run(hidden, routes, capacity=16, table=cell)
    if seat.rank == seat.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    try:
        layer.seat.check()
    except CollectiveError as error:
        said = str(error)
    else:
        return "nothing was noticed"
    survivors = bench.layer(seat.group(2, range(seat.ranks - 1)))
    survivors.seat.enter()
    cell.copy_(survivors.table_XE)
    graph.replay()
    torch.cuda.synchronize()
    survivors.seat.check()
    error = bench.error(out, hidden, routes)
    return said if error < BF16 else f"the survivors are wrong by {error}"


def test_a_killed_peer_is_named_within_the_limit_and_survivors_go_on_with_what_they_captured() -> None:
    ranks = ranks_for_tests()
    *said, nothing = run_ranks(_death, ranks=ranks, seconds=90, dying=[ranks - 1])
    assert nothing is None
    for rank, text in enumerate(said):
        assert text == (
            f"the rows of rank {ranks - 1} (peer slot {ranks - 1}) have not come within 1 s, "
            f"in exchange 2 of the epoch (rank {rank}, epoch 1)"
        )
