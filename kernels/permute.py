"""Moving rows: by an index, and between expert-major rows and capacity-padded buffers. Inverses stand side by side.

Letters: R rows, N rows on the other side of an index, S slots, C capacity, D hidden. Rows are contiguous, of one dtype,
and a multiple of 8 elements wide, so that they move in vectors. A row past the device's own row count is neither read
nor written. Rows keep their bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ray_moe.errors import ConfigError
from ray_moe.kernels.launch import dependent

_TILE_ELEMENTS = 4096
_WIDTH_MULTIPLE = 8


def permute(rows_ND: Tensor, index_R: Tensor, out_RD: Tensor, count_1: Tensor | None = None) -> Tensor:
    """Row i of `out_RD` is row `index_R[i]`: [[5], [6], [7]] by [2, 0, 1] -> [[7], [5], [6]] (eight columns of each).

    `index_R` int32 may repeat or leave out rows. With `count_1` (int32, on the device) only the first `count_1[0]` rows
    are written. Returns `out_RD`. Raises `ConfigError` for a width that is no multiple of 8.
    """
    return _move(rows_ND, index_R, out_RD, count_1, gather=True)


def unpermute(rows_RD: Tensor, index_R: Tensor, out_ND: Tensor, count_1: Tensor | None = None) -> Tensor:
    """Row i goes to row `index_R[i]` of `out_ND`: [[7], [5], [6]] by [2, 0, 1] -> [[5], [6], [7]].

    The inverse of `permute` for a permutation; no index may occur twice. Rows of `out_ND` that no index names keep what
    they held. With `count_1` only the first `count_1[0]` rows are read. Raises `ConfigError` as `permute` does.
    """
    return _move(rows_RD, index_R, out_ND, count_1, gather=False)


def pad(rows_RD: Tensor, offsets_S1: Tensor, out_SCD: Tensor) -> Tensor:
    """Slot s's rows, `offsets_S1[s]` to `offsets_S1[s + 1]`, to the start of `out_SCD[s]`; the padding is not written.

    Rows [[5], [6], [7]] with offsets [0, 1, 1, 3] and C = 2 -> [[[5], [?]], [[?], [?]], [[6], [7]]]. No slot has more
    than C rows: the caller has refused such a call, a kernel cannot. `ConfigError` as for `permute`.
    """
    return _repack(rows_RD, offsets_S1, out_SCD, padded_SCD=out_SCD, gather=True)


def unpad(rows_SCD: Tensor, offsets_S1: Tensor, out_RD: Tensor) -> Tensor:
    """The inverse of `pad`: the rows of every slot in expert-major order; the padding is not read.

    [[[5], [?]], [[?], [?]], [[6], [7]]] with offsets [0, 1, 1, 3] -> [[5], [6], [7]].
    """
    return _repack(rows_SCD, offsets_S1, out_RD, padded_SCD=rows_SCD, gather=False)


def _move(rows: Tensor, index_R: Tensor, out: Tensor, count_1: Tensor | None, *, gather: bool) -> Tensor:
    width, num_rows = _vectors(rows), index_R.numel()
    tile_rows, tile_width = _tile(rows.shape[1])
    if num_rows:
        grid = (triton.cdiv(num_rows, tile_rows), triton.cdiv(rows.shape[1], tile_width))
        _move_kernel[grid](
            rows, index_R, out, count_1, num_rows, width, GATHER=gather, ROWS=tile_rows, WIDTH=tile_width, num_warps=4,
            **dependent(out.device),
        )  # fmt: skip
    return out


def _repack(rows: Tensor, offsets_S1: Tensor, out: Tensor, *, padded_SCD: Tensor, gather: bool) -> Tensor:
    slots, capacity, width = padded_SCD.shape
    tile_rows, tile_width = _tile(width)
    if slots and capacity:
        grid = (triton.cdiv(capacity, tile_rows), triton.cdiv(width, tile_width), slots)
        _repack_kernel[grid](
            rows, offsets_S1, out, capacity, _vectors(padded_SCD), GATHER=gather, ROWS=tile_rows, WIDTH=tile_width,
            num_warps=4, **dependent(out.device),
        )  # fmt: skip
    return out


def _vectors(rows: Tensor) -> int:
    width = rows.shape[-1]
    if width % _WIDTH_MULTIPLE:
        raise ConfigError(f"rows move in vectors of {_WIDTH_MULTIPLE} elements, found rows of {width}")
    return width // _WIDTH_MULTIPLE


def _tile(width: int) -> tuple[int, int]:
    """(rows, columns) of one program's tile: few whole rows, or 1024 columns at a time."""
    columns = min(1024, triton.next_power_of_2(width))
    return _TILE_ELEMENTS // columns, columns


@triton.jit
def _move_kernel(
    rows, index, out, count, num_rows, vectors, GATHER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if count is not None:
        num_rows = tl.minimum(num_rows, tl.load(count))
    if tl.program_id(0) * ROWS >= num_rows:
        return
    # Multiplying here shows the compiler that every row starts at a multiple of 8 elements.
    width = vectors * 8
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    other = tl.load(index + row, mask=row < num_rows, other=0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    if GATHER:
        source, target = other, row.to(tl.int64)
    else:
        source, target = row.to(tl.int64), other
    values = tl.load(rows + source[:, None] * width + column[None, :], mask=mask)
    tl.store(out + target[:, None] * width + column[None, :], values, mask=mask)


@triton.jit
def _repack_kernel(
    rows, offsets, out, capacity, vectors, GATHER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.program_id(2)
    start = tl.load(offsets + slot)
    count = tl.minimum(tl.load(offsets + slot + 1) - start, capacity)
    if tl.program_id(0) * ROWS >= count:
        return
    width = vectors * 8
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (place < count)[:, None] & (column < width)[None, :]
    exact = (start + place).to(tl.int64)
    padded = slot.to(tl.int64) * capacity + place
    if GATHER:
        source, target = exact, padded
    else:
        source, target = padded, exact
    values = tl.load(rows + source[:, None] * width + column[None, :], mask=mask)
    tl.store(out + target[:, None] * width + column[None, :], values, mask=mask)
