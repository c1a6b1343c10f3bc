"""A MoE layer of one token: matrix-vector products on the CUDA cores (Triton), three launches that overlap.

    gate/up of every (slot, few columns) -> down of every (slot, few rows) -> sum over slots

Down's weights are in registers before it waits for gate/up. Weights are read once and marked so in the L2 cache: they
evict each other and not what the next layer needs. Letters: K top-k, D hidden, F FFN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.epilogue import swiglu, weighted
from ray_moe.kernels.launch import dependent


@dataclass(frozen=True)
class GemvTile:
    """`pairs` of gate and up rows of a program, `depth` of a step; `rows` of down's and `down_depth` of its part."""

    pairs: int
    depth: int
    warps: int
    rows: int
    down_depth: int
    down_warps: int


@dataclass(frozen=True, eq=False)
class GemvBuffers:
    acts_KF: Tensor
    sums_KD: Tensor

    @staticmethod
    def allocate(
        tile: GemvTile, top_k: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device
    ) -> GemvBuffers:
        parts = triton.cdiv(ffn, tile.down_depth)
        return GemvBuffers(
            torch.empty(top_k, ffn, dtype=dtype, device=device),
            torch.empty(top_k * parts, hidden, dtype=torch.float32, device=device),
        )


def gemv_layer(
    hidden_1D: Tensor,
    ids_1K: Tensor,
    gates_1K: Tensor,
    slots_E: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: SwiGLU,
    tile: GemvTile,
    buffers: GemvBuffers,
    out_1D: Tensor,
) -> None:
    """`out_1D` [1, D] = the gate-weighted sum of the token's K experts; an id outside [0, E) adds nothing."""
    top_k, hidden, ffn = ids_1K.shape[1], hidden_1D.shape[1], buffers.acts_KF.shape[1]
    parts = triton.cdiv(ffn, tile.down_depth)
    pdl = dependent(out_1D.device)
    _gate_up_kernel[(triton.cdiv(ffn, tile.pairs), top_k)](
        hidden_1D, ids_1K, slots_E, gate_up, gate_up_bias, buffers.acts_KF, slots_E.numel(), D=hidden, F=ffn,
        PAIRS=tile.pairs,
        BK=tile.depth, ACTIVATION=(activation.limit, activation.alpha, activation.up_shift), num_warps=tile.warps,
        **pdl,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, tile.rows), top_k * parts)](
        buffers.acts_KF, ids_1K, slots_E, down, down_bias, buffers.sums_KD, slots_E.numel(), D=hidden, F=ffn,
        ROWS=tile.rows,
        BK=tile.down_depth, PARTS=parts, num_warps=tile.down_warps, **pdl,
    )  # fmt: skip
    _sum_kernel[(triton.cdiv(hidden, 128),)](
        buffers.sums_KD, gates_1K, out_1D, D=hidden, TOP_K=top_k, PARTS=parts, BLOCK=128, num_warps=1, **pdl
    )


@triton.jit
def _gate_up_kernel(
    hidden, ids, slots, weights, bias, acts, E, D: tl.constexpr, F: tl.constexpr, PAIRS: tl.constexpr, BK: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # only now: down reads ids and slots before it waits
    k = tl.program_id(1)
    expert = tl.load(ids + k).to(tl.int32)
    if (expert < 0) | (expert >= E):
        return
    slot = tl.load(slots + expert).to(tl.int64)
    row = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    column = tl.arange(0, BK)
    at = weights + (slot * 2 * F + row)[:, None] * D + column[None, :]
    inside = (row < F)[:, None]
    gate = tl.zeros((PAIRS, BK), tl.float32)
    up = tl.zeros((PAIRS, BK), tl.float32)
    for first in tl.static_range(0, D, BK):
        mask = inside & (first + column < D)[None, :]
        w_gate = tl.load(at + first, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w_up = tl.load(at + F * D + first, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = tl.load(hidden + first + column, mask=first + column < D, other=0.0).to(tl.float32)[None, :]
        gate += w_gate * x
        up += w_up * x
    gate, up = tl.sum(gate, 1), tl.sum(up, 1)
    if bias is not None:
        gate += tl.load(bias + slot * 2 * F + row, mask=row < F, other=0.0).to(tl.float32)
        up += tl.load(bias + slot * 2 * F + F + row, mask=row < F, other=0.0).to(tl.float32)
    result = swiglu(gate, up, ACTIVATION[0], ACTIVATION[1], ACTIVATION[2])
    tl.store(acts + k * F + row, result.to(acts.dtype.element_ty), mask=row < F)


@triton.jit
def _down_kernel(
    acts, ids, slots, weights, bias, sums, E, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (rows, slot, part of F), all of its weights in registers."""
    k = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    expert = tl.load(ids + k).to(tl.int32)
    known = (expert >= 0) & (expert < E)
    slot = tl.load(slots + tl.where(known, expert, 0)).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = part * BK + tl.arange(0, BK)
    mask = (row < D)[:, None] & (column < F)[None, :] & known
    w = tl.load(
        weights + (slot * D + row)[:, None] * F + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(acts + k * F + column, mask=(column < F) & known, other=0.0).to(tl.float32)
    total = tl.sum(w.to(tl.float32) * x[None, :], 1)
    if bias is not None:
        if (part == 0) & known:
            total += tl.load(bias + slot * D + row, mask=row < D, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(1).to(tl.int64) * D + row, total, mask=row < D)


@triton.jit
def _sum_kernel(
    sums, gates, out, D: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        value = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            value += tl.load(sums + (k * PARTS + part) * D + d, mask=d < D, other=0.0)
        # Rounded to the payload's dtype, as an expert's row is on every path.
        row = value.to(out.dtype.element_ty).to(tl.float32)
        total += weighted(row, tl.load(gates + k), out.dtype.element_ty)
    tl.store(out + d, total.to(out.dtype.element_ty), mask=d < D)
