"""Combine: each token gathers its K rows and sums them, gate-weighted, in route-slot order in fp32 (deterministic)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ray_moe.kernels.epilogue import weighted
from ray_moe.kernels.launch import dependent

_WIDEST = 2048


def combine(rows_RD: Tensor, position_N: Tensor, gates_TK: Tensor | None, top_k: int, out_TD: Tensor) -> None:
    """`out_TD[t]` = sum over k of `gates_TK[t, k] * rows_RD[position_N[t * K + k]]`; a position of -1 adds nothing.

    Products in the promoted dtype of rows and gates, sums in fp32, cast to `out_TD`'s dtype (specification 0x03C3).
    `gates_TK` None: the gate was applied at the expert. Twin: `reference_grouped.gather_combine`.
    Example (K = 2, D = 1): rows [[1], [2], [4]], positions [2, 0], gates [[0.5, 0.25]] -> [[2.25]].
    """
    num_tokens, hidden = out_TD.shape
    if num_tokens == 0:
        return
    # Few tokens are cut finer, so that there are programs enough.
    block = min(triton.next_power_of_2(hidden), _WIDEST if num_tokens >= 256 else 512)
    _combine_kernel[(num_tokens, triton.cdiv(hidden, block))](
        rows_RD, position_N, gates_TK, out_TD, hidden, TOP_K=top_k, BLOCK=block, num_warps=4, **dependent(out_TD.device)
    )


@triton.jit
def _combine_kernel(
    rows_RD, position_N, gates_TK, out_TD, D, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(position_N + t * TOP_K + k)
        value = tl.load(rows_RD + row.to(tl.int64) * D + d, mask=(d < D) & (row >= 0), other=0.0).to(tl.float32)
        if gates_TK is not None:
            value = weighted(value, tl.load(gates_TK + t * TOP_K + k), rows_RD.dtype.element_ty)
        total += value
    tl.store(out_TD + t.to(tl.int64) * D + d, total.to(out_TD.dtype.element_ty), mask=d < D)
