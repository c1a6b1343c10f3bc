"""Grouped products with warps in roles: one loads, two warpgroups of 64 rows multiply (Hopper, Gluon).

The same products as `grouped_gemm`, for many rows: a persistent program per multiprocessor takes tiles of 128 rows by
256 columns in turn, so that one tile's epilogue hides behind the next one's loads, and a tile at most half full costs
half its multiplications. Letters as there.
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

from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.epilogue import swiglu
from ray_moe.kernels.launch import multiprocessors
from ray_moe.kernels.routing import RowTiles

ROWS, COLUMNS, DEPTH = 128, 256, 64
_HALF = gl.constexpr(ROWS // 2)


@dataclass(frozen=True)
class WarpTile:
    """`group` row tiles share their weights in the L2 cache; `deep` keeps one product in flight while waiting."""

    stages: int = 4
    group: int = 8
    deep: bool = True
    rows: int = ROWS
    columns: int = COLUMNS


def rows_descriptor(rows: Tensor) -> TensorDescriptor:
    """Reads 64 rows of a matrix [R, K]."""
    return _descriptor(rows, list(rows.shape), list(rows.stride()), [ROWS // 2, DEPTH])


def gate_up_descriptor(gate_up: Tensor) -> TensorDescriptor:
    """Reads 128 gate and 128 up rows alternately out of a slab [pool, 2F, D] in canonical storage."""
    pool, rows, hidden = gate_up.shape
    shape, strides = [pool, rows // 2, 2, hidden], [rows * hidden, hidden, rows // 2 * hidden, 1]
    return _descriptor(gate_up, shape, strides, [1, COLUMNS // 2, 2, DEPTH])


def down_descriptor(down: Tensor) -> TensorDescriptor:
    """Reads 256 rows of a slab [pool, D, F]."""
    return _descriptor(down, list(down.shape), list(down.stride()), [1, COLUMNS, DEPTH])


def _descriptor(base: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(base, shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def gate_up_swiglu(
    hidden_TD: Tensor, source_N: Tensor, top_k: int, tiles: RowTiles, slots_S: Tensor, weights: TensorDescriptor,
    bias: Tensor | None, activation: SwiGLU, tile: WarpTile, out_RF: Tensor,
) -> None:  # fmt: skip
    """`grouped_gemm.gate_up_swiglu` in bf16; D a multiple of 64."""
    numbers = (activation.limit, activation.alpha, activation.up_shift)
    width = 2 * out_RF.shape[1]
    _launch(hidden_TD, None, source_N, top_k, tiles, slots_S, weights, bias, None, numbers, tile, out_RF, width)


def down_product(
    acts_RF: Tensor, rows: TensorDescriptor, tiles: RowTiles, slots_S: Tensor, weights: TensorDescriptor,
    bias: Tensor | None, gates_R: Tensor | None, tile: WarpTile, out_RD: Tensor,
) -> None:  # fmt: skip
    """`grouped_gemm.down_product` in bf16; F a multiple of 64. `rows` reads `acts_RF`."""
    _launch(acts_RF, rows, None, 1, tiles, slots_S, weights, bias, gates_R, None, tile, out_RD, out_RD.shape[1])


def _launch(
    rows: Tensor, rows_desc: TensorDescriptor | None, source: Tensor | None, top_k: int, tiles: RowTiles,
    slots_S: Tensor, weights: TensorDescriptor, bias: Tensor | None, gates_R: Tensor | None,
    activation: tuple[float | None, float, float] | None, tile: WarpTile, out: Tensor, width: int,
) -> None:  # fmt: skip
    if out.shape[0] == 0:
        return
    programs = multiprocessors(out.device)
    _warp_kernel[(programs,)](
        rows, rows_desc, source, slots_S, weights, bias, gates_R, out,
        tiles.segment_M, tiles.row_M, tiles.end_M, tiles.count_1,
        N=width, K=rows.shape[1], TOP_K=top_k, STAGES=tile.stages, GROUP=tile.group, ACTIVATION=activation,
        DEEP=tile.deep, PROGRAMS=programs, num_warps=4, launch_pdl=True,
    )  # fmt: skip


@gluon.jit
def _tile_at(p, num_tiles, maps, slots, BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    """The p-th tile: its pool slot, first row, valid rows, and column block."""
    segment_M, row_M, end_M = maps
    group = p // (GROUP * BLOCKS)
    height = gl.minimum(num_tiles - group * GROUP, GROUP)
    within = p - group * GROUP * BLOCKS
    m = group * GROUP + within % height
    row = gl.load(row_M + m)
    return gl.load(slots + gl.load(segment_M + m)), row, gl.load(end_M + m) - row, within // height


@gluon.jit
def _multiply(
    a_bufs, w_bufs, full, empty, maps, count_1, slots, bias, gates, out, HALF: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ACTIVATION: gl.constexpr, GATHERED: gl.constexpr,
    DEEP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows [64 * HALF, 64 * HALF + 64) of every tile. With no valid row it only gives stages back."""
    BN: gl.constexpr = w_bufs.shape[1] * w_bufs.shape[2] * (w_bufs.shape[3] if ACTIVATION is not None else 1)
    BK: gl.constexpr = a_bufs.shape[2]
    BLOCKS: gl.constexpr = (N + BN - 1) // BN
    STEPS: gl.constexpr = K // BK
    HB: gl.constexpr = BN // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HB, HB // 8], [4, 1], [1, 0])
    num_tiles = gl.load(count_1)
    i = gl.arange(0, _HALF, layout=gl.SliceLayout(1, stored)) + HALF * _HALF
    column = gl.arange(0, HB, layout=gl.SliceLayout(0, stored))
    step = 0
    for p in range(gl.program_id(0), num_tiles * BLOCKS, PROGRAMS):
        slot, row, count, n = _tile_at(p, num_tiles, maps, slots, BLOCKS, GROUP)
        if count > HALF * _HALF:
            total = gl.zeros([_HALF, BN], gl.float32, layout)
            for k in range(STEPS):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                if GATHERED:
                    fence_async_shared()
                w = w_bufs.index(stage).reshape((BN, BK)).permute((1, 0))
                total = warpgroup_mma(a_bufs.index(2 * stage + HALF), w, total, is_async=True)
                if DEEP:
                    total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                else:
                    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
                    mbarrier.arrive(empty.index(stage), count=1)
                step += 1
            if DEEP:
                total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            mask = (i < count)[:, None]
            if ACTIVATION is not None:
                WIDTH: gl.constexpr = N // 2
                c = n * HB + column
                gate, up = gl.split(total.reshape([_HALF, HB, 2]))
                if bias is not None:
                    plain: gl.constexpr = gl.SliceLayout(0, gate.type.layout)
                    at_bias = bias + slot.to(gl.int64) * N + n * HB + gl.arange(0, HB, layout=plain)
                    inside = n * HB + gl.arange(0, HB, layout=plain) < WIDTH
                    gate += gl.load(at_bias, mask=inside, other=0.0).to(gl.float32)[None, :]
                    up += gl.load(at_bias + WIDTH, mask=inside, other=0.0).to(gl.float32)[None, :]
                result = swiglu(gate, up, ACTIVATION[0], ACTIVATION[1], ACTIVATION[2]).to(gl.bfloat16)
                at = out + (row + i).to(gl.int64)[:, None] * WIDTH + c[None, :]
                gl.store(at, gl.convert_layout(result, stored), mask=mask & (c < WIDTH)[None, :])
            else:
                if bias is not None:
                    across: gl.constexpr = gl.SliceLayout(0, layout)
                    at_bias = bias + slot.to(gl.int64) * N + n * BN + gl.arange(0, BN, layout=across)
                    inside = n * BN + gl.arange(0, BN, layout=across) < N
                    total += gl.load(at_bias, mask=inside, other=0.0).to(gl.float32)[None, :]
                if gates is not None:
                    down: gl.constexpr = gl.SliceLayout(1, layout)
                    j = gl.arange(0, _HALF, layout=down) + HALF * _HALF
                    total *= gl.load(gates + row + j, mask=j < count, other=0.0).to(gl.float32)[:, None]
                # Two halves of the columns, one after another, through shared memory of half the size.
                left, right = gl.split(total.to(gl.bfloat16).reshape([_HALF, 2, HB]).permute((0, 2, 1)))
                c = n * BN + column
                at = out + (row + i).to(gl.int64)[:, None] * N + c[None, :]
                gl.store(at, gl.convert_layout(left, stored), mask=mask & (c < N)[None, :])
                gl.store(at + HB, gl.convert_layout(right, stored), mask=mask & (c + HB < N)[None, :])
        else:
            for _ in range(STEPS):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1


@gluon.jit
def _load(
    rows, rows_desc, weights, a_bufs, w_bufs, full, empty, source, slots, maps, count_1, N: gl.constexpr,
    K: gl.constexpr, TOP_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr,
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Weights by the copy engine; rows too where they lie in order, else gathered by ordinary asynchronous copies."""
    BN: gl.constexpr = w_bufs.shape[1] * w_bufs.shape[2] * (w_bufs.shape[3] if GATED else 1)
    BK: gl.constexpr = a_bufs.shape[2]
    BLOCKS: gl.constexpr = (N + BN - 1) // BN
    STEPS: gl.constexpr = K // BK
    num_tiles = gl.load(count_1)
    step = 0
    for p in range(gl.program_id(0), num_tiles * BLOCKS, PROGRAMS):
        slot, row, count, n = _tile_at(p, num_tiles, maps, slots, BLOCKS, GROUP)
        if source is not None:
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BK, BK // 8], [4, 1], [1, 0])
            i = gl.arange(0, _HALF, layout=gl.SliceLayout(1, layout))
            k = gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
            upper = gl.load(source + row + gl.minimum(i, count - 1)) // TOP_K
            lower = gl.load(source + row + gl.minimum(i + _HALF, count - 1)) // TOP_K
            at_upper = rows + (upper[:, None] * K + k[None, :])
            at_lower = rows + (lower[:, None] * K + k[None, :])
        for block in range(STEPS):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if source is not None:
                mbarrier.expect(full.index(stage), BN * BK * 2)
            else:
                mbarrier.expect(full.index(stage), (2 * _HALF + BN) * BK * 2)
            w_buf = w_bufs.index(stage)
            if GATED:
                at_weights = [slot, n * (BN // 2), 0, block * BK]
            else:
                at_weights = [slot, n * BN, block * BK]
            tma.async_copy_global_to_shared(weights, at_weights, full.index(stage), w_buf)
            if source is not None:
                async_copy.async_copy_global_to_shared(a_bufs.index(2 * stage), at_upper + block * BK)
                async_copy.async_copy_global_to_shared(a_bufs.index(2 * stage + 1), at_lower + block * BK)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            else:
                column = block * BK
                tma.async_copy_global_to_shared(rows_desc, [row, column], full.index(stage), a_bufs.index(2 * stage))
                tma.async_copy_global_to_shared(
                    rows_desc, [row + _HALF, column], full.index(stage), a_bufs.index(2 * stage + 1)
                )
            step += 1


@gluon.jit
def _warp_kernel(
    rows, rows_desc, source, slots, weights, bias, gates, out, segment_M, row_M, end_M, count_1, N: gl.constexpr,
    K: gl.constexpr, TOP_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ACTIVATION: gl.constexpr,
    DEEP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    gdc_wait()
    GATED: gl.constexpr = ACTIVATION is not None
    GATHERED: gl.constexpr = source is not None
    BK: gl.constexpr = 64
    w_shape: gl.constexpr = weights.block_shape
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HALF, BK], gl.bfloat16)
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, _HALF, BK], a_layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + w_shape, weights.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # A gathering producer's 128 threads arrive each for their own copies, beside the one that expects the weights.
        mbarrier.init(full.index(stage), count=129 if GATHERED else 1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    maps = (segment_M, row_M, end_M)
    gl.warp_specialize(
        [
            (_multiply, (a_bufs, w_bufs, full, empty, maps, count_1, slots, bias, gates, out, gl.constexpr(0), N, K,
                         STAGES, GROUP, ACTIVATION, GATHERED, DEEP, PROGRAMS)),
            (_multiply, (a_bufs, w_bufs, full, empty, maps, count_1, slots, bias, gates, out, gl.constexpr(1), N, K,
                         STAGES, GROUP, ACTIVATION, GATHERED, DEEP, PROGRAMS)),
            (_load, (rows, rows_desc, weights, a_bufs, w_bufs, full, empty, source, slots, maps, count_1, N, K, TOP_K,
                     STAGES, GROUP, GATED, PROGRAMS)),
        ],
        [4, 4 if GATHERED else 1],
        [216, 64] if GATHERED else [232, 32],
    )  # fmt: skip
