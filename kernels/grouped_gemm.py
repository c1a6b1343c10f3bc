"""Grouped products over expert-major rows: gate/up with gathered rows and SwiGLU, then down (Triton, any CUDA device).

Weights lie in slabs with the gate's rows first. A tensor descriptor with strides (slot, column of F, half, D) reads
gate and up rows alternately, so that one accumulator holds both and SwiGLU needs no exchange between threads.
The slot of a segment is read from the generation's table on the device. Letters: N routes, R rows, S segments, M tiles,
D hidden, F FFN.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.epilogue import Home, at_home, home_arguments, swiglu
from ray_moe.kernels.launch import dependent
from ray_moe.kernels.regions import most_tiles
from ray_moe.kernels.routing import RowTiles


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows x columns x depth of a program's tile, its warps, and stages in flight.

    `group` row tiles share their weights in the L2 cache. `swapped`: weights are the tensor cores' M side, for few
    rows. `short_tail`: a tile at most half full is computed at half its height, with `tail_stages` in flight (None: as
    many). `copied_rows`: rows in order come by the copy engine, not by pointers.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    swapped: bool = False
    short_tail: bool = False
    copied_rows: bool = False
    tail_stages: int | None = None


def gate_up_descriptor(gate_up: Tensor, tile: Tile) -> TensorDescriptor:
    """Reads [columns / 2 gate and up rows alternately, depth] of a slab [pool, 2F, D] in canonical storage."""
    pool, rows, hidden = gate_up.shape
    return TensorDescriptor(
        gate_up,
        [pool, rows // 2, 2, hidden],
        [rows * hidden, hidden, rows // 2 * hidden, 1],
        [1, tile.columns // 2, 2, tile.depth],
    )


def down_descriptor(down: Tensor, tile: Tile) -> TensorDescriptor:
    """Reads [columns rows, depth] of a slab [pool, D, F]."""
    return TensorDescriptor(down, list(down.shape), list(down.stride()), [1, tile.columns, tile.depth])


def gate_up_swiglu(
    hidden_TD: Tensor,
    source_N: Tensor | None,
    top_k: int,
    tiles: RowTiles,
    slots_S: Tensor,
    weights: TensorDescriptor,
    bias: Tensor | None,
    activation: SwiGLU,
    tile: Tile,
    out_RF: Tensor,
) -> None:
    """Row r of `out_RF` = SwiGLU of gate and up products of row `source_N[r] // top_k` of `hidden_TD`.

    `source_N` None: `hidden_TD` has the rows in order already. Rows of no tile are left as they are. fp32 accumulation
    over D in ascending steps of `tile.depth`. Twin: `reference_grouped.grouped_gate_up`.
    Example (D = F = 1, one expert): gate 1, up 2, hidden [[1], [3]], source [1, 0] -> [silu(3) * 6, silu(1) * 2].
    """
    _launch(hidden_TD, source_N, top_k, tiles, slots_S, weights, bias, None, activation, tile, out_RF)


def down_product(
    acts_RF: Tensor,
    tiles: RowTiles,
    slots_S: Tensor,
    weights: TensorDescriptor,
    bias: Tensor | None,
    gates_R: Tensor | None,
    tile: Tile,
    out_RD: Tensor,
    home: Home | None = None,
) -> None:
    """Row r of `out_RD` = down product of row r of `acts_RF`, times `gates_R[r]` where the ABI's gate is at the expert.

    With `home` each row goes to its route's place in its origin's window. Twin: `reference_grouped.grouped_down`.
    Example (D = F = 1): down 2, rows [[1], [3]] -> [[2], [6]].
    """
    _launch(acts_RF, None, 1, tiles, slots_S, weights, bias, gates_R, None, tile, out_RD, home)


def _launch(
    rows: Tensor, source: Tensor | None, top_k: int, tiles: RowTiles, slots_S: Tensor, weights: TensorDescriptor,
    bias: Tensor | None, gates_R: Tensor | None, activation: SwiGLU | None, tile: Tile, out: Tensor,
    home: Home | None = None,
) -> None:  # fmt: skip
    width, depth = out.shape[1] * (2 if activation is not None else 1), rows.shape[1]
    if out.shape[0] == 0:
        return
    blocks = triton.cdiv(width, tile.columns)
    whole = half = None
    if tile.copied_rows and source is None:
        whole, half = (
            TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [height, tile.depth])
            for height in (tile.rows, tile.rows // 2)
        )
    _grouped_kernel[(most_tiles(out.shape[0], slots_S.numel(), tile.rows) * blocks,)](
        rows, whole, half, source, slots_S, weights, bias, gates_R, out, home_arguments(home),
        tiles.segment_M, tiles.row_M, tiles.end_M, tiles.count_1,
        N=width, K=depth, TOP_K=top_k, BM=tile.rows, BN=tile.columns, BK=tile.depth, GROUP=tile.group,
        GATED=activation is not None, ACTIVATION=_numbers(activation), SWAPPED=tile.swapped,
        SHORT_TAIL=tile.short_tail, STAGES=tile.stages, TAIL_STAGES=tile.tail_stages or tile.stages,
        EVEN_K=depth % tile.depth == 0,
        num_warps=tile.warps, num_stages=tile.stages, **dependent(out.device),
    )  # fmt: skip


def _numbers(activation: SwiGLU | None) -> tuple[float | None, float, float] | None:
    return None if activation is None else (activation.limit, activation.alpha, activation.up_shift)


@triton.jit
def _grouped_kernel(
    rows, rows_whole, rows_half, source, slots, weights, bias, gates, out, home, segment_M, row_M, end_M, count_1,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, SWAPPED: tl.constexpr,
    SHORT_TAIL: tl.constexpr, STAGES: tl.constexpr, TAIL_STAGES: tl.constexpr, EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per (row tile, column block), in groups of row tiles; programs beyond the valid tiles return."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    num_tiles = tl.load(count_1)
    program = tl.program_id(0)
    if program >= num_tiles * BLOCKS:
        return
    group = program // (GROUP * BLOCKS)
    height = tl.minimum(num_tiles - group * GROUP, GROUP)
    within = program - group * GROUP * BLOCKS
    m = group * GROUP + within % height
    n = within // height
    row = tl.load(row_M + m)
    count = tl.minimum(tl.load(end_M + m) - row, BM)
    slot = tl.load(slots + tl.load(segment_M + m))
    if SHORT_TAIL:
        if count <= BM // 2:
            _tile(rows, rows_half, source, weights, bias, gates, out, home, slot, row, count, n, N, K, TOP_K, BM // 2,
                  BN, BK, GATED, ACTIVATION, SWAPPED, EVEN_K, TAIL_STAGES)  # fmt: skip
        else:
            _tile(rows, rows_whole, source, weights, bias, gates, out, home, slot, row, count, n, N, K, TOP_K, BM, BN,
                  BK, GATED, ACTIVATION, SWAPPED, EVEN_K, STAGES)  # fmt: skip
    else:
        _tile(rows, rows_whole, source, weights, bias, gates, out, home, slot, row, count, n, N, K, TOP_K, BM, BN, BK,
              GATED, ACTIVATION, SWAPPED, EVEN_K, STAGES)  # fmt: skip


@triton.jit
def _tile(
    rows, rows_desc, source, weights, bias, gates, out, home, slot, row, count, n, N: tl.constexpr, K: tl.constexpr,
    TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, SWAPPED: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + count) of one segment by columns [n * BN, (n + 1) * BN), and the epilogue."""
    WIDTH: tl.constexpr = N // 2 if GATED else N
    i = tl.arange(0, BM)
    k = tl.arange(0, BK)
    origin = row + tl.minimum(i, count - 1)
    if source is not None:
        origin = tl.load(source + origin) // TOP_K
    at = rows + origin.to(tl.int64)[:, None] * K + k[None, :]
    if SWAPPED:
        total = tl.zeros((BN, BM), tl.float32)
    else:
        total = tl.zeros((BM, BN), tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        if rows_desc is not None:
            a = rows_desc.load([row, first])
        elif EVEN_K:
            a = tl.load(at)
        else:
            a = tl.load(at, mask=(first + k < K)[None, :], other=0.0)
        if GATED:
            w = weights.load([slot, n * (BN // 2), 0, first]).reshape((BN, BK))
        else:
            w = weights.load([slot, n * BN, first]).reshape((BN, BK))
        if SWAPPED:
            total = tl.dot(w, a.T, total)
        else:
            total = tl.dot(a, w.T, total)
        at += BK
    if SWAPPED:
        total = total.T
    if GATED:
        gate, up = tl.split(total.reshape((BM, BN // 2, 2)))
        column = n * (BN // 2) + tl.arange(0, BN // 2)
        inside = column < WIDTH
        if bias is not None:
            at_bias = bias + slot.to(tl.int64) * N + column
            gate += tl.load(at_bias, mask=inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(at_bias + WIDTH, mask=inside, other=0.0).to(tl.float32)[None, :]
        result = swiglu(gate, up, ACTIVATION[0], ACTIVATION[1], ACTIVATION[2])
    else:
        column = n * BN + tl.arange(0, BN)
        inside = column < WIDTH
        result = total
        if bias is not None:
            result += tl.load(bias + slot.to(tl.int64) * N + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if gates is not None:
            result *= tl.load(gates + row + i, mask=i < count, other=0.0).to(tl.float32)[:, None]
    if home is None:
        target = out + (row + i).to(tl.int64)[:, None] * WIDTH + column[None, :]
    else:
        target = at_home(home, row + i, i < count, WIDTH, out.dtype.element_ty)[:, None] + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(i < count)[:, None] & inside[None, :])
