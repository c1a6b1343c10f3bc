"""Dropless block-sparse products: sdd (rows x weights -> non-zero blocks) and dsd (non-zero blocks x weights -> rows).

Every slot's rows fill whole row blocks, so that the hidden activations of all slots are one block-diagonal matrix
[row blocks, S * F / block columns], of which only the non-zero blocks are stored. Which they are is
`dataplane.block_sparse.BlockTopology`; its index vectors are read on the device. Letters: R blocked rows, S slots,
D hidden, F FFN; B row blocks, Z non-zero blocks of P x C elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ray_moe.errors import ConfigError
from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.epilogue import swiglu
from ray_moe.kernels.launch import dependent

# The least edge of a block that tensor cores multiply.
_LEAST_EDGE = 16
_DEPTH = 64
_GROUP = 8


@dataclass(frozen=True, eq=False)
class BlockIndices:
    """The topology's index vectors, int32 on the device, as `BlockTopology` names them.

    Non-zero blocks are numbered in row-major order: block z is at (`row_Z[z]`, `column_Z[z]`), row block b owns
    [`offsets_B1[b]`, `offsets_B1[b + 1]`), and `transpose_Z` lists the blocks in column-major order.
    """

    row_Z: Tensor
    column_Z: Tensor
    offsets_B1: Tensor
    transpose_Z: Tensor


def sdd_swiglu(
    rows_RD: Tensor,
    indices: BlockIndices,
    slots_S: Tensor,
    gate_up: Tensor,
    bias: Tensor | None,
    activation: SwiGLU,
    out_ZPC: Tensor,
) -> None:
    """Block z of the result is `activation` of its rows' products with its columns' gate and up rows.

    `rows_RD` [B * P, D], `gate_up` [pool, 2F, D] gate rows first, `bias` [pool, 2F] or None. A block row's fringe is
    computed from whatever lies there. fp32 accumulation over D in ascending steps. Twin: `reference_sparse.sdd_swiglu`.
    Raises `ConfigError` for block edges that are no powers of two from 16 on.
    Example (D = 16, P = C = F = 16, one slot, one block): rows, gate and up all 1 / 4 -> blocks of sigmoid(1) = 0.731.
    """
    blocks, block_rows, block_columns = out_ZPC.shape
    _require_edges(block_rows, block_columns)
    _, width, hidden = gate_up.shape
    if blocks:
        _sdd_kernel[(blocks,)](
            rows_RD, indices.row_Z, indices.column_Z, indices.transpose_Z, slots_S, gate_up, bias, out_ZPC,
            D=hidden, F=width // 2, P=block_rows, C=block_columns, BK=_depth(hidden),
            LIMIT=activation.limit, ALPHA=activation.alpha, SHIFT=activation.up_shift,
            num_warps=_warps(block_rows * block_columns * 2), num_stages=3, **dependent(out_ZPC.device),
        )  # fmt: skip


def dsd(
    blocks_ZPC: Tensor, indices: BlockIndices, slots_S: Tensor, down: Tensor, bias: Tensor | None, out_RD: Tensor
) -> None:
    """Row block b of `out_RD` [B * P, D]: the sum over its non-zero blocks times their columns of `down` [pool, D, F].

    `bias` [pool, D] or None. fp32 accumulation over the blocks in ascending order. Twin: `reference_sparse.dsd`. Raises
    `ConfigError` as `sdd_swiglu` does.
    Example (D = 16, P = C = F = 16, one slot, one block): blocks of 0.731, weights 1 / 16 -> rows of 0.731.
    """
    _, block_rows, block_columns = blocks_ZPC.shape
    _require_edges(block_rows, block_columns)
    _, hidden, ffn = down.shape
    row_blocks = out_RD.shape[0] // block_rows
    columns = max(_LEAST_EDGE, min(256 if block_rows == 128 else 128, triton.next_power_of_2(hidden)))
    if row_blocks:
        _dsd_kernel[(row_blocks * triton.cdiv(hidden, columns),)](
            blocks_ZPC, indices.column_Z, indices.offsets_B1, slots_S, down, bias, out_RD, row_blocks,
            D=hidden, F=ffn, P=block_rows, C=block_columns, BN=columns, BK=min(_DEPTH, block_columns), GROUP=_GROUP,
            num_warps=_warps(block_rows * columns), num_stages=3, **dependent(out_RD.device),
        )  # fmt: skip


def _require_edges(*edges: int) -> None:
    for edge in edges:
        if edge < _LEAST_EDGE or edge & (edge - 1):
            raise ConfigError(f"a block's edges must be powers of two from {_LEAST_EDGE} on, found {edge}")


def _depth(hidden: int) -> int:
    return min(_DEPTH, max(_LEAST_EDGE, triton.next_power_of_2(hidden)))


def _warps(accumulated: int) -> int:
    """Eight warps where four would spill the sums: more than 128 numbers a thread."""
    return 8 if accumulated > 128 * 128 else 4


@triton.jit
def _sdd_kernel(
    rows, row_Z, column_Z, transpose_Z, slots, gate_up, bias, out,
    D: tl.constexpr, F: tl.constexpr, P: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per non-zero block, in column-major order: neighbours share their weights in the L2 cache."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    WIDE: tl.constexpr = F // C
    block = tl.load(transpose_Z + tl.program_id(0))
    row_block = tl.load(row_Z + block)
    column_block = tl.load(column_Z + block)
    slot = tl.load(slots + column_block // WIDE).to(tl.int64)
    column = column_block % WIDE * C + tl.arange(0, C)
    i = tl.arange(0, P)
    k = tl.arange(0, BK)
    at = rows + (row_block * P + i).to(tl.int64)[:, None] * D + k[None, :]
    at_gate = gate_up + (slot * 2 * F + column)[None, :] * D + k[:, None]
    gate = tl.zeros((P, C), tl.float32)
    up = tl.zeros((P, C), tl.float32)
    for first in range(0, D, BK):
        inside = first + k < D
        x = tl.load(at, mask=inside[None, :], other=0.0)
        gate = tl.dot(x, tl.load(at_gate, mask=inside[:, None], other=0.0), gate)
        up = tl.dot(x, tl.load(at_gate + F * D, mask=inside[:, None], other=0.0), up)
        at += BK
        at_gate += BK
    if bias is not None:
        at_bias = bias + slot * 2 * F + column
        gate += tl.load(at_bias).to(tl.float32)[None, :]
        up += tl.load(at_bias + F).to(tl.float32)[None, :]
    ffn = swiglu(gate, up, LIMIT, ALPHA, SHIFT)
    target = out + (block.to(tl.int64) * P + i)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(target, ffn.to(out.dtype.element_ty))


@triton.jit
def _dsd_kernel(
    blocks, column_Z, offsets_B1, slots, down, bias, out, row_blocks,
    D: tl.constexpr, F: tl.constexpr, P: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (row block, column block of D), in groups of row blocks that share their weights in L2."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    WIDE: tl.constexpr = F // C
    PANELS: tl.constexpr = (D + BN - 1) // BN
    group = tl.program_id(0) // (GROUP * PANELS)
    height = tl.minimum(row_blocks - group * GROUP, GROUP)
    within = tl.program_id(0) - group * GROUP * PANELS
    row_block = group * GROUP + within % height
    i = tl.arange(0, P)
    k = tl.arange(0, BK)
    column = within // height * BN + tl.arange(0, BN)
    inside = column < D
    first_block = tl.load(offsets_B1 + row_block)
    slot = tl.load(slots + tl.load(column_Z + first_block) // WIDE).to(tl.int64)
    at_rows = down + (slot * D + column)[None, :] * F
    total = tl.zeros((P, BN), tl.float32)
    for step in range((tl.load(offsets_B1 + row_block + 1) - first_block) * (C // BK)):
        block = first_block + step // (C // BK)
        first = step % (C // BK) * BK
        x = tl.load(blocks + (block.to(tl.int64) * P + i)[:, None] * C + (first + k)[None, :])
        ffn = tl.load(column_Z + block) % WIDE * C + first + k
        total = tl.dot(x, tl.load(at_rows + ffn[:, None], mask=inside[None, :], other=0.0), total)
    if bias is not None:
        total += tl.load(bias + slot * D + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = out + (row_block * P + i).to(tl.int64)[:, None] * D + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[None, :])
