"""FP8 e4m3 with block scales: rows with a scale for every `block` elements, weights with one for every 128 x 128.

A number is its FP8 datum times the FP32 scale of its block, scale = amax / 448. A block of zeros has scale 1, no scale
is zero or subnormal, and a block with a number that is not finite decodes to NaN: rows get the very numbers of
`dataplane.precision.QuantizedRows`. The last block of a row, and of a weight's rows and columns, may be shorter.
Letters: N rows, D width, B scale blocks of a row; M matrices of O rows and I columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ray_moe.kernels.launch import dependent

WEIGHT_BLOCK = 128
_TILE_ELEMENTS = 4096


def quantize_rows(rows_ND: Tensor, data_ND: Tensor, scales_NB: Tensor, block: int = 128) -> None:
    """Write the FP8 data and FP32 scales of the rows, each of which is quantized by itself.

    Data and scales may be column ranges of one packed buffer: only their last stride must be 1.
    Example, a row [448, -224, 0, 1] in blocks of 2: scales [1, 1 / 448], data [448, -224, 0, 448].
    """
    _by_blocks(_quantize_rows_kernel, rows_ND, data_ND, scales_NB, block)


def dequantize_rows(data_ND: Tensor, scales_NB: Tensor, out_ND: Tensor, block: int = 128) -> None:
    """Data times scale in FP32, rounded to the dtype of `out_ND`; strides as for `quantize_rows`.

    Example: data [448, -224, 0, 448] with scales [1, 1 / 448] in blocks of 2 -> [448, -224, 0, 1].
    """
    _by_blocks(_dequantize_rows_kernel, out_ND, data_ND, scales_NB, block)


def quantize_weights(weights_MOI: Tensor, data_MOI: Tensor, scales_MOI: Tensor) -> None:
    """Write the FP8 data of contiguous matrices and `scales_MOI` [M, ceil(O / 128), ceil(I / 128)].

    Gate and up projections that share a slab are two matrices: their rows are scaled apart whatever F is.
    Example: a matrix of 130 equal rows [448, ..., 448, 2] of 129 columns -> scales [[1, 1 / 224], [1, 1 / 224]], data
    448 throughout.
    """
    matrices, rows, columns = weights_MOI.shape
    grid = (triton.cdiv(columns, WEIGHT_BLOCK), triton.cdiv(rows, WEIGHT_BLOCK), matrices)
    if matrices:
        _quantize_weights_kernel[grid](
            weights_MOI, data_MOI, scales_MOI, rows, columns, BLOCK=WEIGHT_BLOCK, num_warps=8,
            **dependent(data_MOI.device),
        )  # fmt: skip


def _by_blocks(kernel: triton.JITFunction, rows_ND: Tensor, data_ND: Tensor, scales_NB: Tensor, block: int) -> None:
    (rows, width), columns = rows_ND.shape, triton.next_power_of_2(block)
    blocks = triton.cdiv(width, block)
    units = max(1, _TILE_ELEMENTS // columns)
    if rows:
        kernel[(triton.cdiv(rows * blocks, units),)](
            rows_ND, data_ND, scales_NB, rows * blocks, width,
            rows_ND.stride(0), data_ND.stride(0), scales_NB.stride(0),
            BLOCK=block, BLOCKS=blocks, COLUMNS=columns, UNITS=units, num_warps=4, **dependent(data_ND.device),
        )  # fmt: skip


@triton.jit
def fp8_scale(amax):
    """The scale of blocks with these largest magnitudes, elementwise; correctly rounded, as torch divides on a CPU."""
    smallest_normal = 1.1754943508222875e-38
    scale = tl.maximum(tl.div_rn(amax, 448.0), smallest_normal)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def _row_blocks(
    num_units, width, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr
):
    """Row [UNITS], scale block [UNITS], column [UNITS, COLUMNS] and mask of this program's blocks, in memory order."""
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    row, block = (unit // BLOCKS).to(tl.int64), unit % BLOCKS
    place = tl.arange(0, COLUMNS)[None, :]
    column = block[:, None] * BLOCK + place
    return row, block, column, (unit < num_units)[:, None] & (place < BLOCK) & (column < width)


@triton.jit
def _quantize_rows_kernel(
    rows, data, scales, num_units, width, rows_stride, data_stride, scales_stride, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, block, column, mask = _row_blocks(num_units, width, BLOCK, BLOCKS, COLUMNS, UNITS)
    values = tl.load(rows + row[:, None] * rows_stride + column, mask=mask, other=0.0).to(tl.float32)
    # The largest of numbers among which is a NaN need not be one.
    broken = tl.max((values != values).to(tl.int32), axis=1) > 0
    scale = tl.where(broken, float("nan"), fp8_scale(tl.max(tl.abs(values), axis=1)))
    quotients = tl.div_rn(values, scale[:, None])
    tl.store(data + row[:, None] * data_stride + column, quotients.to(data.dtype.element_ty), mask=mask)
    tl.store(scales + row * scales_stride + block, scale, mask=row * BLOCKS + block < num_units)


@triton.jit
def _dequantize_rows_kernel(
    out, data, scales, num_units, width, out_stride, data_stride, scales_stride, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, block, column, mask = _row_blocks(num_units, width, BLOCK, BLOCKS, COLUMNS, UNITS)
    values = tl.load(data + row[:, None] * data_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales + row * scales_stride + block, mask=row * BLOCKS + block < num_units, other=1.0)
    tl.store(out + row[:, None] * out_stride + column, (values * scale[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_weights_kernel(weights, data, scales, rows, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    place = (matrix * rows + row)[:, None] * columns + column[None, :]
    values = tl.load(weights + place, mask=mask, other=0.0).to(tl.float32)
    broken = tl.max(tl.max((values != values).to(tl.int32), axis=1), axis=0) > 0
    amax = tl.max(tl.max(tl.abs(values), axis=1, keep_dims=True), axis=0, keep_dims=True)
    scale = tl.where(broken, float("nan"), fp8_scale(amax))
    quotients = tl.div_rn(values, scale)
    tl.store(data + place, quotients.to(data.dtype.element_ty), mask=mask)
    block = (matrix * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(scales + block, tl.sum(tl.sum(scale, axis=1), axis=0))
