"""Routing: top-k ids -> a stable expert-major order and the row tiles of grouped products, all on the device.

Nothing is moved: products gather their rows by `source_N`, the combine finds them by `position_N`. Up to a few thousand
routes one launch does everything, a program per expert; beyond that three launches do (count and rank within chunks,
scan over chunks, scatter). Both give the same maps. A route of an expert outside [0, E) is nobody's: it gets no row.
Letters: N routes, R rows, E experts, M row tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ray_moe.errors import ConfigError
from ray_moe.kernels.launch import dependent
from ray_moe.kernels.regions import ROUTE_CHUNK, most_tiles, padded_experts

# One launch reads all ids once for each expert: 5-8 us up to 2,048 routes, some 5 us more for each 4,096 beyond, where
# three launches take 9-11 up to 8,192 and 25 at 131,072.
SMALL_ROUTES = 4096
_LARGE_BLOCK = 4096


@dataclass(frozen=True, eq=False)
class RowTiles:
    """Tiles of a grouped product: tile m is rows `[row_M[m], min(row_M[m] + block_rows, end_M[m]))` of `segment_M[m]`.

    The first `count_1[0]` tiles are valid; launches are sized for `len(segment_M)` and their other programs return.
    """

    segment_M: Tensor
    row_M: Tensor
    end_M: Tensor
    count_1: Tensor
    block_rows: int

    @staticmethod
    def allocate(num_rows: int, num_segments: int, block_rows: int, device: torch.device) -> RowTiles:
        """Room for whatever way `num_rows` rows may be spread over the segments."""
        if block_rows < 1:
            raise ConfigError(f"block_rows must be at least 1, found {block_rows}")
        most = max(1, most_tiles(num_rows, num_segments, block_rows))
        segment_M, row_M, end_M = (torch.empty(most, dtype=torch.int32, device=device) for _ in range(3))
        return RowTiles(segment_M, row_M, end_M, torch.zeros(1, dtype=torch.int32, device=device), block_rows)


@dataclass(frozen=True, eq=False)
class RouteMaps:
    """Where every route's row lies. `source_N[r]` is the route of row r, `position_N[n]` the row of route n, or -1.

    Rows are expert-major, stable by route: those of expert e are `[offsets_E1[e], offsets_E1[e + 1])`.
    """

    source_N: Tensor
    position_N: Tensor
    offsets_E1: Tensor
    tiles: RowTiles
    chunk_counts_EC: Tensor
    rank_N: Tensor

    @staticmethod
    def allocate(num_routes: int, num_experts: int, block_rows: int, device: torch.device) -> RouteMaps:
        def ints(count: int) -> Tensor:
            return torch.empty(max(1, count), dtype=torch.int32, device=device)

        chunks = triton.cdiv(num_routes, ROUTE_CHUNK)
        return RouteMaps(
            ints(num_routes),
            ints(num_routes),
            torch.zeros(num_experts + 1, dtype=torch.int32, device=device),
            RowTiles.allocate(num_routes, num_experts, block_rows, device),
            ints(padded_experts(num_experts) * (chunks + 1)),
            ints(num_routes),
        )


def route(ids_N: Tensor, num_experts: int, maps: RouteMaps) -> None:
    """Fill `maps` for the experts `ids_N` [N], int32 or int64, in semantic order.

    Example: E = 3, block_rows 2, ids [2, 0, -1, 2, 2] -> source [1, 0, 3, 4], position [1, 0, -1, 2, 3],
    offsets [0, 1, 1, 4], tiles (segment, row, end) (0, 0, 1), (2, 1, 4), (2, 3, 4).
    """
    num_routes = ids_N.numel()
    if num_routes == 0:
        maps.tiles.count_1.zero_()
        maps.offsets_E1.zero_()
        return
    tiles, padded = maps.tiles, padded_experts(num_experts)
    outputs = (
        maps.source_N,
        maps.position_N,
        maps.offsets_E1,
        tiles.segment_M,
        tiles.row_M,
        tiles.end_M,
        tiles.count_1,
    )
    shape = {"E": num_experts, "EP": padded, "BM": tiles.block_rows, **dependent(ids_N.device)}
    if num_routes <= SMALL_ROUTES:
        block = min(_LARGE_BLOCK, max(128, triton.next_power_of_2(num_routes)))
        warps = 16 if block > 2048 else 8 if block >= 1024 else 4
        _route_kernel[(num_experts,)](ids_N, *outputs, num_routes, BLOCK=block, num_warps=warps, **shape)
        return
    chunks = triton.cdiv(num_routes, ROUTE_CHUNK)
    totals = maps.chunk_counts_EC[padded * chunks :]
    work = (maps.chunk_counts_EC, maps.rank_N)
    pdl = dependent(ids_N.device)
    _count_kernel[(chunks,)](
        ids_N, *work, num_routes, chunks, E=num_experts, EP=padded, CHUNK=ROUTE_CHUNK, num_warps=4, **pdl
    )
    block = min(1024, max(32, triton.next_power_of_2(chunks)))
    _scan_kernel[(padded,)](maps.chunk_counts_EC, totals, chunks, BLOCK=block, num_warps=4, **pdl)
    _scatter_kernel[(chunks,)](
        ids_N, *work, totals, *outputs, num_routes, chunks, CHUNK=ROUTE_CHUNK, num_warps=4, **shape
    )


@triton.jit
def _write_tiles(segment_M, row_M, end_M, first, e, start, rows, BM: tl.constexpr):
    """The tiles of one segment of `rows` rows from `start`; its first tile is number `first`."""
    i = tl.arange(0, 64)
    num_tiles = (rows + BM - 1) // BM
    for base in range(0, num_tiles, 64):
        mask = base + i < num_tiles
        at = first + base + i
        tl.store(segment_M + at, tl.zeros((64,), tl.int32) + e, mask=mask)
        tl.store(row_M + at, start + (base + i) * BM, mask=mask)
        tl.store(end_M + at, tl.zeros((64,), tl.int32) + start + rows, mask=mask)


@triton.jit
def _route_kernel(
    ids_N, source_N, position_N, offsets_E1, segment_M, row_M, end_M, count_1, N, E: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per expert: it counts all experts, and ranks its own routes."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    experts = tl.arange(0, EP)
    i = tl.arange(0, BLOCK)
    counts = tl.zeros((EP,), tl.int32)
    for base in range(0, N, BLOCK):
        ids = tl.load(ids_N + base + i, mask=base + i < N, other=-1).to(tl.int32)
        known = (ids >= 0) & (ids < E)
        counts += tl.histogram(tl.where(known, ids, 0), EP, mask=known)
    tiles = (counts + BM - 1) // BM
    before = experts < e
    start = tl.sum(tl.where(before, counts, 0))
    mine = tl.sum(tl.where(experts == e, counts, 0))
    tl.store(offsets_E1 + e, start)
    if e == 0:
        tl.store(count_1, tl.sum(tiles))
        tl.store(offsets_E1 + E, tl.sum(counts))
    _write_tiles(segment_M, row_M, end_M, tl.sum(tl.where(before, tiles, 0)), e, start, mine, BM)
    for base in range(0, N, BLOCK):
        mask = base + i < N
        ids = tl.load(ids_N + base + i, mask=mask, other=-1).to(tl.int32)
        hit = (ids == e).to(tl.int32)
        position = start + tl.cumsum(hit, 0) - 1
        tl.store(source_N + position, base + i, mask=hit > 0)
        tl.store(position_N + base + i, position, mask=hit > 0)
        if e == 0:
            tl.store(position_N + base + i, tl.full((BLOCK,), -1, tl.int32), mask=mask & ((ids < 0) | (ids >= E)))
        start += tl.sum(hit)


@triton.jit
def _count_kernel(
    ids_N, chunk_counts_EC, rank_N, N, C, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Per chunk: routes of each expert, and each route's rank among its expert's in the chunk."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    c = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    j = tl.arange(0, CHUNK)
    ids = tl.load(ids_N + c * CHUNK + i, mask=c * CHUNK + i < N, other=-1).to(tl.int32)
    others = tl.load(ids_N + c * CHUNK + j, mask=c * CHUNK + j < N, other=-1).to(tl.int32)
    known = (ids >= 0) & (ids < E)
    counts = tl.histogram(tl.where(known, ids, 0), EP, mask=known)
    tl.store(chunk_counts_EC + tl.arange(0, EP) * C + c, counts)
    earlier = (ids[:, None] == others[None, :]) & (j[None, :] < i[:, None])
    tl.store(rank_N + c * CHUNK + i, tl.sum(earlier.to(tl.int32), 1), mask=c * CHUNK + i < N)


@triton.jit
def _scan_kernel(chunk_counts_EC, totals_E, C, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per expert: counts of its chunks become exclusive sums, in place."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    base = 0
    for first in range(0, C, BLOCK):
        counts = tl.load(chunk_counts_EC + e * C + first + i, mask=first + i < C, other=0)
        tl.store(chunk_counts_EC + e * C + first + i, base + tl.cumsum(counts, 0) - counts, mask=first + i < C)
        base += tl.sum(counts)
    tl.store(totals_E + e, base)


@triton.jit
def _scatter_kernel(
    ids_N, chunk_counts_EC, rank_N, totals_E, source_N, position_N, offsets_E1, segment_M, row_M, end_M, count_1, N, C,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    c = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    experts = tl.arange(0, EP)
    mask = c * CHUNK + i < N
    ids = tl.load(ids_N + c * CHUNK + i, mask=mask, other=-1).to(tl.int32)
    valid = (ids >= 0) & (ids < E)
    known = tl.where(valid, ids, 0)
    counts = tl.load(totals_E + experts)
    starts = tl.cumsum(counts, 0) - counts
    within = tl.load(chunk_counts_EC + known * C + c, mask=valid, other=0)
    rank = tl.load(rank_N + c * CHUNK + i, mask=mask, other=0)
    position = tl.gather(starts, known, 0) + within + rank
    tl.store(source_N + position, c * CHUNK + i, mask=valid)
    tl.store(position_N + c * CHUNK + i, tl.where(valid, position, -1), mask=mask)
    tiles = (counts + BM - 1) // BM
    through = tl.cumsum(tiles, 0)
    total = tl.sum(tiles)
    if c == 0:
        tl.store(count_1, total)
        tl.store(offsets_E1 + experts, starts, mask=experts < E)
        tl.store(offsets_E1 + E, tl.sum(counts))
    j = tl.arange(0, 32)
    for base in range(c * 32, total, C * 32):
        tile = base + j
        e = tl.minimum(tl.sum((through[None, :] <= tile[:, None]).to(tl.int32), 1), EP - 1)
        start = tl.gather(starts, e, 0)
        tl.store(segment_M + tile, e, mask=tile < total)
        tl.store(row_M + tile, start + (tile - tl.gather(through - tiles, e, 0)) * BM, mask=tile < total)
        tl.store(end_M + tile, start + tl.gather(counts, e, 0), mask=tile < total)
