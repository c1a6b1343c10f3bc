"""Grouped FP8 products: gate/up over gathered rows with SwiGLU and quantization in the epilogue, and down.

Both operands are e4m3 with FP32 scales: a row's for every 128 elements of K, a weight's for every 128 x 128 block. The
tensor cores add up 128 products at a time in their own reduced precision; each such sum is scaled and added in FP32.
A program computes two 128-column panels of a row tile from one load of the rows: gate and up, or neighbours of down.
Letters: T tokens, R rows, D hidden, F FFN, S segments, M row tiles, B scale blocks; a slab's M matrices of O x I.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ray_moe.errors import ConfigError
from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.epilogue import swiglu
from ray_moe.kernels.launch import dependent
from ray_moe.kernels.quantize import WEIGHT_BLOCK, fp8_scale, quantize_weights
from ray_moe.kernels.routing import RowTiles

FP8 = torch.float8_e4m3fn
# Columns of a panel and depth of a K step: those of a weight's scale block, whose scale is then one number.
_BLOCK = WEIGHT_BLOCK
_ALIGNMENT = 16


@dataclass(frozen=True)
class Fp8Tile:
    """How a program runs its row tile: warps, and K steps in flight.

    `group` row tiles share their weights in the L2 cache. `short_tail`: a tile at most half full is computed at half
    its height.
    """

    warps: int = 8
    stages: int = 4
    group: int = 8
    short_tail: bool = True


@dataclass(frozen=True, eq=False)
class Fp8Slab:
    """Quantized matrices `data_MOI` and `scales_MBB` [M, ceil(O / 128), ceil(I / 128)]: what `quantize_weights` wrote.

    Gate/up of pool slot p are matrices 2p and 2p + 1 [F, D], down of slot p is matrix p [D, F]. Raises `ConfigError`
    for I that is no multiple of 16: hardware copies of a panel start at 16-byte boundaries.
    """

    data_MOI: Tensor
    scales_MBB: Tensor

    def __post_init__(self) -> None:
        if self.data_MOI.shape[2] % _ALIGNMENT:
            raise ConfigError(f"FP8 products need K in multiples of {_ALIGNMENT}, found {self.data_MOI.shape[2]}")

    @staticmethod
    def of(weights_MOI: Tensor) -> Fp8Slab:
        """Quantize contiguous matrices; a gate/up slab [pool, 2F, D] comes in as [2 * pool, F, D], a view of it."""
        matrices, rows, columns = weights_MOI.shape
        blocks = (matrices, triton.cdiv(rows, _BLOCK), triton.cdiv(columns, _BLOCK))
        data_MOI = torch.empty_like(weights_MOI, dtype=FP8)
        scales_MBB = torch.empty(blocks, dtype=torch.float32, device=weights_MOI.device)
        quantize_weights(weights_MOI, data_MOI, scales_MBB)
        return Fp8Slab(data_MOI, scales_MBB)

    @cached_property
    def panels(self) -> TensorDescriptor:
        """Hardware copies of one panel's K step. Describes the storage, so refills of a slot need no new one."""
        matrices, rows, columns = self.data_MOI.shape
        return TensorDescriptor(self.data_MOI, [matrices * rows, columns], [columns, 1], [_BLOCK, _BLOCK])


def fp8_gate_up(
    data_TD: Tensor,
    scales_TB: Tensor,
    source_N: Tensor | None,
    top_k: int,
    tiles: RowTiles,
    slots_S: Tensor,
    gate_up: Fp8Slab,
    bias: Tensor | None,
    activation: SwiGLU,
    tile: Fp8Tile,
    out_RF: Tensor,
    out_scales_RB: Tensor,
) -> None:
    """Activated rows, quantized: row r is `activation(gate x, up x)` of row x = `source_N[r] // top_k` of the data.

    `source_N` None: the data have the rows in order already. `bias` [pool, 2F] gate first, or None. Rows of no tile
    keep what they held. Twin: `reference_fp8.fp8_gate_up`, quantized.
    Example: D = F = 16, one expert whose gate and up weights are all 1 / 16; the row of ones at scale 1 has gate = up =
    1, so its FFN row is sigmoid(1) = 0.731 throughout: data 448, scale 0.731 / 448.
    """
    _, ffn, hidden = gate_up.data_MOI.shape
    if out_RF.shape[0]:
        _fp8_gate_up_kernel[(tiles.segment_M.numel() * triton.cdiv(ffn, _BLOCK),)](
            data_TD, scales_TB, source_N, slots_S, gate_up.panels, gate_up.scales_MBB, bias, out_RF, out_scales_RB,
            tiles.segment_M, tiles.row_M, tiles.end_M, tiles.count_1,
            D=hidden, F=ffn, TOP_K=top_k, BM=tiles.block_rows, GROUP=tile.group, SHORT_TAIL=tile.short_tail,
            LIMIT=activation.limit, ALPHA=activation.alpha, SHIFT=activation.up_shift,
            num_warps=tile.warps, num_stages=tile.stages, **dependent(out_RF.device),
        )  # fmt: skip


def fp8_down(
    data_RF: Tensor,
    scales_RB: Tensor,
    tiles: RowTiles,
    slots_S: Tensor,
    down: Fp8Slab,
    bias: Tensor | None,
    tile: Fp8Tile,
    out_RD: Tensor,
) -> None:
    """Each row's expert output in the dtype of `out_RD`; `bias` [pool, D] or None. Rows of no tile keep what they held.

    Twin: `reference_fp8.fp8_down`. Example: D = F = 16, one expert whose weights are all 1 / 16; the row of data 448 at
    scale 0.731 / 448 is 0.731 throughout.
    """
    _, hidden, ffn = down.data_MOI.shape
    if out_RD.shape[0]:
        _fp8_down_kernel[(tiles.segment_M.numel() * triton.cdiv(hidden, 2 * _BLOCK),)](
            data_RF, scales_RB, slots_S, down.panels, down.scales_MBB, bias, out_RD,
            tiles.segment_M, tiles.row_M, tiles.end_M, tiles.count_1,
            D=hidden, F=ffn, BM=tiles.block_rows, GROUP=tile.group, SHORT_TAIL=tile.short_tail,
            num_warps=tile.warps, num_stages=tile.stages, **dependent(out_RD.device),
        )  # fmt: skip


@triton.jit
def row_tile(program, segment_M, row_M, end_M, num_tiles, PANELS: tl.constexpr, GROUP: tl.constexpr):
    """(segment, first row, rows left in the segment, panel): GROUP row tiles take a panel before the next panel."""
    group = program // (GROUP * PANELS)
    height = tl.minimum(num_tiles - group * GROUP, GROUP)
    within = program - group * GROUP * PANELS
    tile = group * GROUP + within % height
    row = tl.load(row_M + tile)
    return tl.load(segment_M + tile), row, tl.load(end_M + tile) - row, within // height


@triton.jit
def _two_panels(
    data, scales, panels, first, second, first_scales, second_scales, K: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Rows [BM] (pointers to their data and their scales) times the panels at slab rows first and second."""
    BLOCK: tl.constexpr = 128
    k = tl.arange(0, BLOCK)
    first_sum = tl.zeros((BM, BLOCK), tl.float32)
    second_sum = tl.zeros((BM, BLOCK), tl.float32)
    for block in range((K + BLOCK - 1) // BLOCK):
        at = data[:, None] + (block * BLOCK + k)[None, :]
        if K % BLOCK == 0:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=(block * BLOCK + k < K)[None, :], other=0.0)
        # Scales are asked for before the product is, so that they arrive under it.
        x_scale = tl.load(scales + block)
        first_scale = x_scale * tl.load(first_scales + block)
        second_scale = x_scale * tl.load(second_scales + block)
        first_sum += tl.dot(x, panels.load([first, block * BLOCK]).T) * first_scale[:, None]
        second_sum += tl.dot(x, panels.load([second, block * BLOCK]).T) * second_scale[:, None]
    return first_sum, second_sum


@triton.jit
def swiglu_fp8(
    gate, up, bias, slot, panel, F: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Quotients [BM, 128] that become FP8 data, and their scales [BM], of a panel's fp32 gate and up products."""
    column = panel * 128 + tl.arange(0, 128)
    inside = column < F
    if bias is not None:
        at = bias + slot * 2 * F + column
        gate += tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(at + F, mask=inside, other=0.0).to(tl.float32)[None, :]
    ffn = swiglu(gate, up, LIMIT, ALPHA, SHIFT)
    if F % 128 != 0:
        # Columns past F are products of other weights.
        ffn = tl.where(inside[None, :], ffn, 0.0)
    scale = fp8_scale(tl.max(tl.abs(ffn), axis=1))
    # One division for a row: the last bit of a quotient hardly ever shows in three bits of mantissa.
    return ffn * (1.0 / scale)[:, None], scale


@triton.jit
def _gate_up_tile(
    data, scales, source, panels, panel_scales, bias, out, out_scales, slot, start, rows, panel,
    D: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    D_BLOCKS: tl.constexpr = (D + 127) // 128
    F_BLOCKS: tl.constexpr = (F + 127) // 128
    m = tl.arange(0, BM)
    # Places past the segment read its last row again; their products are dropped.
    origin = start + tl.minimum(m, rows - 1)
    if source is not None:
        origin = tl.load(source + origin) // TOP_K
    gate_scales = panel_scales + (2 * slot * F_BLOCKS + panel) * D_BLOCKS
    gate, up = _two_panels(
        data + origin.to(tl.int64) * D, scales + origin.to(tl.int64) * D_BLOCKS, panels,
        2 * slot * F + panel * 128, (2 * slot + 1) * F + panel * 128, gate_scales, gate_scales + F_BLOCKS * D_BLOCKS,
        D, BM,
    )  # fmt: skip
    quotients, scale = swiglu_fp8(gate, up, bias, slot, panel, F, LIMIT, ALPHA, SHIFT)
    row = (start + m).to(tl.int64)
    column = panel * 128 + tl.arange(0, 128)
    mask = (m < rows)[:, None] & (column < F)[None, :]
    tl.store(out + row[:, None] * F + column[None, :], quotients.to(out.dtype.element_ty), mask=mask)
    tl.store(out_scales + row * F_BLOCKS + panel, scale, mask=m < rows)


@triton.jit
def _fp8_gate_up_kernel(
    data, scales, source, slots, panels, panel_scales, bias, out, out_scales, segment_M, row_M, end_M, count_1,
    D: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr,
    SHORT_TAIL: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    PANELS: tl.constexpr = (F + 127) // 128
    num_tiles = tl.load(count_1)
    if tl.program_id(0) >= num_tiles * PANELS:
        return
    segment, start, rows, panel = row_tile(tl.program_id(0), segment_M, row_M, end_M, num_tiles, PANELS, GROUP)
    slot = tl.load(slots + segment)
    if SHORT_TAIL and rows <= BM // 2:
        _gate_up_tile(data, scales, source, panels, panel_scales, bias, out, out_scales, slot, start, rows, panel,
                      D, F, TOP_K, BM // 2, LIMIT, ALPHA, SHIFT)  # fmt: skip
    else:
        _gate_up_tile(data, scales, source, panels, panel_scales, bias, out, out_scales, slot, start, rows, panel,
                      D, F, TOP_K, BM, LIMIT, ALPHA, SHIFT)  # fmt: skip


@triton.jit
def _down_tile(
    data, scales, panels, panel_scales, bias, out, slot, start, rows, panel,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    D_BLOCKS: tl.constexpr = (D + 127) // 128
    F_BLOCKS: tl.constexpr = (F + 127) // 128
    m = tl.arange(0, BM)
    row = (start + tl.minimum(m, rows - 1)).to(tl.int64)
    # An odd last panel is its own partner; the partner's columns lie past D and are dropped.
    first = 2 * panel
    second = tl.minimum(first + 1, D_BLOCKS - 1)
    left, right = _two_panels(
        data + row * F, scales + row * F_BLOCKS, panels, slot * D + first * 128, slot * D + second * 128,
        panel_scales + (slot * D_BLOCKS + first) * F_BLOCKS, panel_scales + (slot * D_BLOCKS + second) * F_BLOCKS,
        F, BM,
    )  # fmt: skip
    store_panel(left, bias, out, slot, start, rows, first, D, BM)
    store_panel(right, bias, out, slot, start, rows, first + 1, D, BM)


@triton.jit
def store_panel(products, bias, out, slot, start, rows, panel, D: tl.constexpr, BM: tl.constexpr):
    """The rows of a tile's panel of down products, with the bias; a panel past D has no columns."""
    column = panel * 128 + tl.arange(0, 128)
    inside = column < D
    if bias is not None:
        products += tl.load(bias + slot * D + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    m = tl.arange(0, BM)
    at = out + (start + m).to(tl.int64)[:, None] * D + column[None, :]
    tl.store(at, products.to(out.dtype.element_ty), mask=(m < rows)[:, None] & inside[None, :])


@triton.jit
def _fp8_down_kernel(
    data, scales, slots, panels, panel_scales, bias, out, segment_M, row_M, end_M, count_1,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr, SHORT_TAIL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    PANELS: tl.constexpr = (D + 255) // 256
    num_tiles = tl.load(count_1)
    if tl.program_id(0) >= num_tiles * PANELS:
        return
    segment, start, rows, panel = row_tile(tl.program_id(0), segment_M, row_M, end_M, num_tiles, PANELS, GROUP)
    slot = tl.load(slots + segment)
    if SHORT_TAIL and rows <= BM // 2:
        _down_tile(data, scales, panels, panel_scales, bias, out, slot, start, rows, panel, D, F, BM // 2)
    else:
        _down_tile(data, scales, panels, panel_scales, bias, out, slot, start, rows, panel, D, F, BM)
