"""Rank-partial returns over windows: an owner sums what it computed for a token, and one row goes home, not K.

    push (with gates) -> wait -> unpack -> experts -> sum_partials -> collect

For ABIs whose gate is at the expert. Sums are in fp32 over an owner's routes in route-slot order, rounded once to the
rows' dtype, and in fp32 over owners in peer-slot order. Letters as in `window`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ray_moe.kernels.launch import dependent, multiprocessors
from ray_moe.kernels.regions import Part, Regions
from ray_moe.kernels.window import FAILED, MINE

_BLOCK = 1024
_WAVES = 8


def unpack(data_TD: Tensor, scales_TB: Tensor, ids_TK: Tensor, out_TD: Tensor) -> None:
    """Rows of FP8 data times scales, of tokens that have a route here; the others are left as they are.

    Example, blocks of 128: data 2 throughout, scale 0.5, ids [[-1, 3]] -> a row of ones.
    """
    tokens, hidden = out_TD.shape
    chunks = triton.cdiv(hidden, _BLOCK)
    programs = max(1, min(tokens * chunks, _WAVES * multiprocessors(out_TD.device)))
    _unpack_kernel[(programs,)](
        data_TD, scales_TB, ids_TK, out_TD, tokens, D=hidden, K=ids_TK.shape[1],
        KP=triton.next_power_of_2(ids_TK.shape[1]), BLOCK=_BLOCK, CHUNKS=chunks, num_warps=4,
        **dependent(out_TD.device),
    )  # fmt: skip


def sum_partials(
    rows_RD: Tensor, position_N: Tensor, ids_TK: Tensor, gates_TK: Tensor, windows_M: Tensor, cell: Tensor,
    regions: Regions, part: Part,
) -> None:  # fmt: skip
    """Token slot p * C + t: its gated results here, summed, go to row mine * C + t of the window of peer p.

    Example (K = 2, D = 1): results [[3], [5]], positions [0, 1], gates [[1, 2]] -> 13.
    """
    chunks = triton.cdiv(regions.hidden, _BLOCK)
    programs = max(1, min(part.tokens * chunks, _WAVES * multiprocessors(cell.device)))
    _sum_kernel[(programs,)](
        rows_RD, position_N, ids_TK, gates_TK, windows_M, cell, part.capacity, part.first, part.tokens,
        RESULTS=regions.results, D=regions.hidden, K=regions.top_k, KP=triton.next_power_of_2(regions.top_k),
        BLOCK=_BLOCK, CHUNKS=chunks, num_warps=4, **dependent(cell.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _unpack_kernel(
    data, scales, ids, out, T, D: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    k = tl.arange(0, KP)
    for item in range(tl.program_id(0), T * CHUNKS, tl.num_programs(0)):
        t = tl.cast(item // CHUNKS, tl.int64)
        e = tl.load(ids + t * K + k, mask=k < K, other=-1)
        if tl.max(e) >= 0:
            d = (item % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(data + t * D + d, mask=d < D, other=0.0).to(tl.float32)
            scale = tl.load(scales + t * (D // 128) + d // 128, mask=d < D, other=0.0)
            tl.store(out + t * D + d, (value * scale).to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["C", "first", "T"])
def _sum_kernel(
    rows, position, ids, gates, windows, cell, C, first, T, RESULTS: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(cell + FAILED) != 0:
        return
    mine = tl.load(cell + MINE)
    k_all = tl.arange(0, KP)
    for item in range(tl.program_id(0), T * CHUNKS, tl.num_programs(0)):
        t = item // CHUNKS
        peer = t // C
        e = tl.load(ids + t * K + k_all, mask=k_all < K, other=-1)
        if tl.max(e) >= 0:
            d = (item % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for k in tl.static_range(K):
                r = tl.load(position + t * K + k)
                result = tl.load(rows + r.to(tl.int64) * D + d, mask=(d < D) & (r >= 0), other=0.0).to(tl.float32)
                total += result * tl.load(gates + t * K + k)
            base = tl.load(windows + peer) + RESULTS
            home = tl.multiple_of(base.to(tl.pointer_type(rows.dtype.element_ty)), 16)
            tl.store(home + (first + mine * C + t - peer * C) * D + d, total.to(rows.dtype.element_ty), mask=d < D)
