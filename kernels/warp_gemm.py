"""The down product with warps in roles: one warp loads, two warpgroups of 64 rows multiply (Hopper, Gluon).

What `grouped_gemm.down_product` computes, for many rows: a persistent program per multiprocessor takes tiles of 128
rows by 256 columns in turn, so that one tile's epilogue hides behind the next one's loads, and a tile at most half full
costs half its multiplications. Letters: R rows, S segments, M row tiles, D hidden, F FFN.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ray_moe.kernels.epilogue import Home, home_arguments
from ray_moe.kernels.launch import multiprocessors
from ray_moe.kernels.routing import RowTiles

ROWS, COLUMNS, DEPTH = 128, 256, 64
_STAGES = 4  # of 48 KiB: weights and rows of one step, in 227 KiB
_HALF = gl.constexpr(ROWS // 2)
_DEPTH = gl.constexpr(DEPTH)


@dataclass(frozen=True)
class WarpTile:
    """`group` row tiles share their weights in the L2 cache."""

    group: int = 8

    @property
    def rows(self) -> int:
        return ROWS


def rows_descriptor(rows: Tensor) -> TensorDescriptor:
    """Reads 64 rows of a matrix [R, F]."""
    return _descriptor(rows, [ROWS // 2, DEPTH])


def down_descriptor(down: Tensor) -> TensorDescriptor:
    """Reads 256 rows of a slab [pool, D, F]."""
    return _descriptor(down, [1, COLUMNS, DEPTH])


def _descriptor(base: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(base, list(base.shape), list(base.stride()), block, layout)


def down_product(
    rows: TensorDescriptor,
    tiles: RowTiles,
    slots_S: Tensor,
    weights: TensorDescriptor,
    bias: Tensor | None,
    gates_R: Tensor | None,
    tile: WarpTile,
    out_RD: Tensor,
    home: Home | None = None,
) -> None:
    """`grouped_gemm.down_product` in bf16 of the rows that `rows` reads; F a multiple of 64."""
    if out_RD.shape[0] == 0:
        return
    programs = multiprocessors(out_RD.device)
    _down_kernel[(programs,)](
        rows, slots_S, weights, bias, gates_R, out_RD, home_arguments(home),
        tiles.segment_M, tiles.row_M, tiles.end_M, tiles.count_1,
        N=out_RD.shape[1], K=rows.shape[1], STAGES=_STAGES, GROUP=tile.group, PROGRAMS=programs, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip


@gluon.jit
def tile_at(p, num_tiles, maps, slots, BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    """The p-th tile: its pool slot, first row, rows left in its segment, and column block."""
    segment_M, row_M, end_M = maps
    group = p // (GROUP * BLOCKS)
    height = gl.minimum(num_tiles - group * GROUP, GROUP)
    within = p - group * GROUP * BLOCKS
    m = group * GROUP + within % height
    row = gl.load(row_M + m)
    return gl.load(slots + gl.load(segment_M + m)), row, gl.load(end_M + m) - row, within // height


@gluon.jit
def _at_home(home, r, mask, WIDTH: gl.constexpr):
    """`epilogue.at_home` in this language."""
    source, windows, routes, offset = home
    n = gl.load(source + r, mask=mask, other=0)
    peer = n // routes
    place = gl.load(windows + peer, mask=mask, other=0) + offset + (n - peer * routes).to(gl.int64) * (WIDTH * 2)
    return gl.multiple_of(place.to(gl.pointer_type(gl.bfloat16)), 16)


@gluon.jit
def _multiply(
    shared,
    maps,
    count_1,
    slots,
    bias,
    gates,
    out,
    home,
    HALF: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """A warpgroup: rows [64 * HALF, 64 * HALF + 64) of every tile. With no valid row it only gives stages back."""
    a_bufs, w_bufs, full, empty = shared
    BN: gl.constexpr = w_bufs.shape[2]
    BLOCKS: gl.constexpr = (N + BN - 1) // BN
    STEPS: gl.constexpr = K // _DEPTH
    HB: gl.constexpr = BN // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HB, HB // 8], [4, 1], [1, 0])
    num_tiles = gl.load(count_1)
    i = gl.arange(0, _HALF, layout=gl.SliceLayout(1, stored)) + HALF * _HALF
    column = gl.arange(0, HB, layout=gl.SliceLayout(0, stored))
    step = 0
    for p in range(gl.program_id(0), num_tiles * BLOCKS, PROGRAMS):
        slot, row, count, n = tile_at(p, num_tiles, maps, slots, BLOCKS, GROUP)
        if count > HALF * _HALF:
            total = gl.zeros([_HALF, BN], gl.float32, layout)
            for k in range(STEPS):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                w = w_bufs.index(stage).reshape((BN, _DEPTH)).permute((1, 0))
                total = warpgroup_mma(a_bufs.index(2 * stage + HALF), w, total, is_async=True)
                # This step's product may still run; the last step's has ended, and its stage can be filled again.
                total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                step += 1
            total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
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
            mask = (i < count)[:, None]
            c = n * BN + column
            if home is None:
                at = out + (row + i).to(gl.int64)[:, None] * N + c[None, :]
            else:
                at = _at_home(home, row + i, i < count, N)[:, None] + c[None, :]
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
    rows,
    weights,
    shared,
    slots,
    maps,
    count_1,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """One warp: rows and weights of every step, by the copy engine."""
    a_bufs, w_bufs, full, empty = shared
    BN: gl.constexpr = w_bufs.shape[2]
    BLOCKS: gl.constexpr = (N + BN - 1) // BN
    num_tiles = gl.load(count_1)
    step = 0
    for p in range(gl.program_id(0), num_tiles * BLOCKS, PROGRAMS):
        slot, row, _, n = tile_at(p, num_tiles, maps, slots, BLOCKS, GROUP)
        for block in range(K // _DEPTH):
            stage = step % STAGES
            column = block * _DEPTH
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (2 * _HALF + BN) * _DEPTH * 2)
            tma.async_copy_global_to_shared(rows, [row, column], full.index(stage), a_bufs.index(2 * stage))
            tma.async_copy_global_to_shared(rows, [row + _HALF, column], full.index(stage), a_bufs.index(2 * stage + 1))
            tma.async_copy_global_to_shared(weights, [slot, n * BN, column], full.index(stage), w_bufs.index(stage))
            step += 1


@gluon.jit
def _down_kernel(
    rows,
    slots,
    weights,
    bias,
    gates,
    out,
    home,
    segment_M,
    row_M,
    end_M,
    count_1,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    gdc_launch_dependents()
    gdc_wait()
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HALF, _DEPTH], gl.bfloat16)
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, _HALF, _DEPTH], a_layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + weights.block_shape, weights.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    maps = (segment_M, row_M, end_M)
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    shared = (a_bufs, w_bufs, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (shared, maps, count_1, slots, bias, gates, out, home, upper, N, K, STAGES, GROUP, PROGRAMS)),
            (_multiply, (shared, maps, count_1, slots, bias, gates, out, home, lower, N, K, STAGES, GROUP, PROGRAMS)),
            (_load, (rows, weights, shared, slots, maps, count_1, N, K, STAGES, GROUP, PROGRAMS)),
        ],
        [4, 1],
        [232, 32],
    )
