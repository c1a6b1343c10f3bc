"""Grouped FP8 products with warps in roles: one group loads, two warpgroups of 64 rows multiply (Hopper, Gluon).

The same products as `fp8_gemm`. A warpgroup scales one panel's sums while the tensor cores work for the other
warpgroup, which a program whose warps all wait together cannot do. A persistent program per multiprocessor takes tiles
of 128 rows by two panels of 128 columns in turn; half a tile without rows costs no multiplications. Letters as there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ray_moe.errors import ConfigError
from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.epilogue import swiglu
from ray_moe.kernels.fp8_gemm import Fp8Slab
from ray_moe.kernels.launch import multiprocessors
from ray_moe.kernels.quantize import fp8_scale
from ray_moe.kernels.routing import RowTiles
from ray_moe.kernels.warp_gemm import tile_at

ROWS, BLOCK = 128, 128
_HALF = gl.constexpr(ROWS // 2)
_BLOCK = gl.constexpr(BLOCK)


@dataclass(frozen=True)
class Fp8WarpTile:
    """K steps in flight, and row tiles that share their weights in the L2 cache."""

    stages: int = 4
    group: int = 8


def panels_descriptor(slab: Fp8Slab) -> TensorDescriptor:
    """Reads one K step of a panel of 128 slab rows. Describes the storage: refills of a slot need no new one."""
    matrices, rows, columns = slab.data_MOI.shape
    return _descriptor(slab.data_MOI.view(matrices * rows, columns), [BLOCK, BLOCK])


def rows_descriptor(data_RK: Tensor) -> TensorDescriptor:
    """Reads one K step of 64 quantized rows."""
    return _descriptor(data_RK, [ROWS // 2, BLOCK])


def fp8_gate_up(
    data_TD: Tensor, scales_TB: Tensor, source_N: Tensor, top_k: int, tiles: RowTiles, slots_S: Tensor,
    gate_up: Fp8Slab, panels: TensorDescriptor, bias: Tensor | None, activation: SwiGLU, tile: Fp8WarpTile,
    out_RF: Tensor, out_scales_RB: Tensor,
) -> None:  # fmt: skip
    """`fp8_gemm.fp8_gate_up`; `panels` reads `gate_up`. `ConfigError` for D no multiple of 128, tiles not of 128."""
    numbers = (activation.limit, activation.alpha, activation.up_shift)
    _launch(data_TD, None, scales_TB, source_N, top_k, tiles, slots_S, gate_up, panels, bias, numbers, tile, out_RF,
            out_scales_RB)  # fmt: skip


def fp8_down(
    data_RF: Tensor, rows: TensorDescriptor, scales_RB: Tensor, tiles: RowTiles, slots_S: Tensor, down: Fp8Slab,
    panels: TensorDescriptor, bias: Tensor | None, tile: Fp8WarpTile, out_RD: Tensor,
) -> None:  # fmt: skip
    """`fp8_gemm.fp8_down`; `rows` reads `data_RF`, `panels` reads `down`. `ConfigError` as above, with F for D."""
    _launch(data_RF, rows, scales_RB, None, 1, tiles, slots_S, down, panels, bias, None, tile, out_RD, None)


def _descriptor(base: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    return TensorDescriptor(base, list(base.shape), list(base.stride()), block, layout)


def _launch(
    data: Tensor, rows: TensorDescriptor | None, scales: Tensor, source: Tensor | None, top_k: int, tiles: RowTiles,
    slots_S: Tensor, slab: Fp8Slab, panels: TensorDescriptor, bias: Tensor | None,
    activation: tuple[float | None, float, float] | None, tile: Fp8WarpTile, out: Tensor, out_scales: Tensor | None,
) -> None:  # fmt: skip
    depth = slab.data_MOI.shape[2]
    if depth % BLOCK or tiles.block_rows != ROWS:
        raise ConfigError(f"tiles of {ROWS} rows and K in {BLOCK}s are needed, found {tiles.block_rows} and {depth}")
    if out.shape[0] == 0:
        return
    programs = multiprocessors(out.device)
    _fp8_warp_kernel[(programs,)](
        data, rows, scales, source, slots_S, panels, slab.scales_MBB, bias, out, out_scales,
        tiles.segment_M, tiles.row_M, tiles.end_M, tiles.count_1,
        N=slab.data_MOI.shape[1], K=depth, TOP_K=top_k, STAGES=tile.stages, GROUP=tile.group, ACTIVATION=activation,
        PROGRAMS=programs, num_warps=4, launch_pdl=True,
    )  # fmt: skip


@gluon.jit
def _panels_of(slot, n, N: gl.constexpr, GATED: gl.constexpr):
    """The two panels of a tile: slab rows and scale rows where they start. Gate and up, or neighbours of down.

    An odd last panel of down is its own partner, whose columns lie past N and are dropped.
    """
    BLOCKS: gl.constexpr = (N + _BLOCK - 1) // _BLOCK
    if GATED:
        row = 2 * slot * N + n * _BLOCK
        scale = 2 * slot * BLOCKS + n
        return row, row + N, scale, scale + BLOCKS
    else:  # noqa: RET505 - a branch not taken must not be compiled
        second = gl.minimum(2 * n + 1, BLOCKS - 1)
        return slot * N + 2 * n * _BLOCK, slot * N + second * _BLOCK, slot * BLOCKS + 2 * n, slot * BLOCKS + second


@gluon.jit
def _multiply(
    a_bufs, w_bufs, full, empty, maps, count_1, scales, source, slots, panel_scales, bias, out, out_scales,
    HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ACTIVATION: gl.constexpr, TILES_N: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows [64 * HALF, 64 * HALF + 64) of every tile. With no valid row it only gives stages back."""
    STEPS: gl.constexpr = K // _BLOCK
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    down_rows: gl.constexpr = gl.SliceLayout(1, layout)
    num_tiles = gl.load(count_1)
    i = gl.arange(0, _HALF, layout=down_rows) + HALF * _HALF
    step = 0
    for p in range(gl.program_id(0), num_tiles * TILES_N, PROGRAMS):
        slot, row, count, n = tile_at(p, num_tiles, maps, slots, TILES_N, GROUP)
        if count > HALF * _HALF:
            _, _, first, second = _panels_of(slot, n, N, ACTIVATION is not None)
            origin = row + gl.minimum(i, count - 1)
            if source is not None:
                origin = gl.load(source + origin) // TOP_K
            at_scales = scales + origin.to(gl.int64) * STEPS
            at_first = panel_scales + first * STEPS
            at_second = panel_scales + second * STEPS
            first_sum = gl.zeros([_HALF, _BLOCK], gl.float32, layout)
            second_sum = gl.zeros([_HALF, _BLOCK], gl.float32, layout)
            scale = gl.load(at_scales)
            first_scale = gl.load(at_first)
            second_scale = gl.load(at_second)
            for block in range(STEPS):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                if source is not None:
                    fence_async_shared()
                a = a_bufs.index(2 * stage + HALF)
                part = gl.zeros([_HALF, _BLOCK], gl.float32, layout)
                part = warpgroup_mma(a, w_bufs.index(2 * stage).permute((1, 0)), part, use_acc=False, is_async=True)
                # The next step's scales arrive while the tensor cores are at work.
                following = gl.minimum(block + 1, STEPS - 1)
                next_scale = gl.load(at_scales + following)
                next_first = gl.load(at_first + following)
                next_second = gl.load(at_second + following)
                part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
                first_sum += part * (scale * first_scale)[:, None]
                # What it accumulates onto is ignored: naming the same registers leaves the others alone.
                part = warpgroup_mma(a, w_bufs.index(2 * stage + 1).permute((1, 0)), part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
                mbarrier.arrive(empty.index(stage), count=1)
                second_sum += part * (scale * second_scale)[:, None]
                scale, first_scale, second_scale = next_scale, next_first, next_second
                step += 1
            if ACTIVATION is not None:
                _store_ffn(first_sum, second_sum, bias, out, out_scales, slot, row, count, n, HALF, N, ACTIVATION)
            else:
                _store_panel(first_sum, bias, out, slot, row, count, 2 * n, HALF, N)
                _store_panel(second_sum, bias, out, slot, row, count, 2 * n + 1, HALF, N)
        else:
            for _ in range(STEPS):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1


@gluon.jit
def _store_ffn(
    gate, up, bias, out, out_scales, slot, row, count, panel, HALF: gl.constexpr, F: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Activation, then FP8 data and the scale of each row's 128 columns."""
    layout: gl.constexpr = gate.type.layout
    column = panel * _BLOCK + gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, layout))
    if bias is not None:
        at_bias = bias + slot * 2 * F + column
        gate += gl.load(at_bias, mask=column < F, other=0.0).to(gl.float32)[None, :]
        up += gl.load(at_bias + F, mask=column < F, other=0.0).to(gl.float32)[None, :]
    ffn = swiglu(gate, up, ACTIVATION[0], ACTIVATION[1], ACTIVATION[2])
    if F % _BLOCK != 0:
        # Columns past F are products of other weights.
        ffn = gl.where((column < F)[None, :], ffn, 0.0)
    scale = fp8_scale(gl.max(gl.abs(ffn), axis=1))
    i = gl.arange(0, _HALF, layout=gl.SliceLayout(1, layout)) + HALF * _HALF
    F_BLOCKS: gl.constexpr = (F + _BLOCK - 1) // _BLOCK
    gl.store(out_scales + (row + i).to(gl.int64) * F_BLOCKS + panel, scale, mask=i < count)
    stored: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    data = gl.convert_layout((ffn * (1.0 / scale)[:, None]).to(gl.float8e4nv), stored)
    i = gl.arange(0, _HALF, layout=gl.SliceLayout(1, stored)) + HALF * _HALF
    column = panel * _BLOCK + gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, stored))
    at = out + (row + i).to(gl.int64)[:, None] * F + column[None, :]
    gl.store(at, data, mask=(i < count)[:, None] & (column < F)[None, :])


@gluon.jit
def _store_panel(products, bias, out, slot, row, count, panel, HALF: gl.constexpr, N: gl.constexpr):
    """One panel of down products, with the bias, in bf16; a panel past N has no columns."""
    column = panel * _BLOCK + gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, products.type.layout))
    if bias is not None:
        products += gl.load(bias + slot * N + column, mask=column < N, other=0.0).to(gl.float32)[None, :]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(products.to(gl.bfloat16), stored)
    i = gl.arange(0, _HALF, layout=gl.SliceLayout(1, stored)) + HALF * _HALF
    column = panel * _BLOCK + gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, stored))
    at = out + (row + i).to(gl.int64)[:, None] * N + column[None, :]
    gl.store(at, values, mask=(i < count)[:, None] & (column < N)[None, :])


@gluon.jit
def _load(
    data, rows, panels, a_bufs, w_bufs, full, empty, source, slots, maps, count_1, N: gl.constexpr, K: gl.constexpr,
    TOP_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, TILES_N: gl.constexpr,
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Panels by the copy engine; rows too where they lie in order, else gathered by ordinary asynchronous copies."""
    num_tiles = gl.load(count_1)
    step = 0
    for p in range(gl.program_id(0), num_tiles * TILES_N, PROGRAMS):
        slot, row, count, n = tile_at(p, num_tiles, maps, slots, TILES_N, GROUP)
        first, second, _, _ = _panels_of(slot, n, N, GATED)
        if source is not None:
            layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
            i = gl.arange(0, _HALF, layout=gl.SliceLayout(1, layout))
            k = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, layout))
            upper = gl.load(source + row + gl.minimum(i, count - 1)) // TOP_K
            lower = gl.load(source + row + gl.minimum(i + _HALF, count - 1)) // TOP_K
            at_upper = data + (upper.to(gl.int64)[:, None] * K + k[None, :])
            at_lower = data + (lower.to(gl.int64)[:, None] * K + k[None, :])
        for block in range(K // _BLOCK):
            stage = step % STAGES
            column = block * _BLOCK
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if source is not None:
                mbarrier.expect(full.index(stage), 2 * _BLOCK * _BLOCK)
            else:
                mbarrier.expect(full.index(stage), (2 * _HALF + 2 * _BLOCK) * _BLOCK)
            tma.async_copy_global_to_shared(panels, [first, column], full.index(stage), w_bufs.index(2 * stage))
            tma.async_copy_global_to_shared(panels, [second, column], full.index(stage), w_bufs.index(2 * stage + 1))
            if source is not None:
                async_copy.async_copy_global_to_shared(a_bufs.index(2 * stage), at_upper + column)
                async_copy.async_copy_global_to_shared(a_bufs.index(2 * stage + 1), at_lower + column)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            else:
                tma.async_copy_global_to_shared(rows, [row, column], full.index(stage), a_bufs.index(2 * stage))
                tma.async_copy_global_to_shared(
                    rows, [row + _HALF, column], full.index(stage), a_bufs.index(2 * stage + 1)
                )
            step += 1


@gluon.jit
def _fp8_warp_kernel(
    data, rows, scales, source, slots, panels, panel_scales, bias, out, out_scales, segment_M, row_M, end_M, count_1,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ACTIVATION: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    gdc_wait()
    GATED: gl.constexpr = ACTIVATION is not None
    GATHERED: gl.constexpr = source is not None
    TILES_N: gl.constexpr = (N + _BLOCK - 1) // _BLOCK if GATED else (N + 2 * _BLOCK - 1) // (2 * _BLOCK)
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HALF, _BLOCK], gl.float8e4nv)
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, _HALF, _BLOCK], a_layout)
    w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, _BLOCK, _BLOCK], panels.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # A gathering producer's 128 threads arrive each for their own copies, beside the one that expects the panels.
        mbarrier.init(full.index(stage), count=129 if GATHERED else 1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    maps = (segment_M, row_M, end_M)
    gl.warp_specialize(
        [
            (_multiply, (a_bufs, w_bufs, full, empty, maps, count_1, scales, source, slots, panel_scales, bias, out,
                         out_scales, gl.constexpr(0), N, K, TOP_K, STAGES, GROUP, ACTIVATION, TILES_N, PROGRAMS)),
            (_multiply, (a_bufs, w_bufs, full, empty, maps, count_1, scales, source, slots, panel_scales, bias, out,
                         out_scales, gl.constexpr(1), N, K, TOP_K, STAGES, GROUP, ACTIVATION, TILES_N, PROGRAMS)),
            (_load, (data, rows, panels, a_bufs, w_bufs, full, empty, source, slots, maps, count_1, N, K, TOP_K,
                     STAGES, GROUP, GATED, TILES_N, PROGRAMS)),
        ],
        [4, 4 if GATHERED else 1],
        [216, 64] if GATHERED else [232, 32],
    )  # fmt: skip
