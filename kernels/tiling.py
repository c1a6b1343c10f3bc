"""Which tiles a layer of a shape and size is run with: plain tables, measured on one H200, nothing tuned at start-up.

The tables follow rows per expert, the mean over the experts. `python -m ray_moe.bench.gpu_layer --tune` measures their
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from ray_moe.kernels.decode_layer import MOST_ROUTES, DecodeTile
from ray_moe.kernels.gemv_layer import GemvTile
from ray_moe.kernels.grouped_gemm import Tile
from ray_moe.kernels.warp_gemm import DEPTH as WARP_DEPTH
from ray_moe.kernels.warp_gemm import WarpTile


@dataclass(frozen=True)
class LayerShape:
    """E logical experts, K of them for each token, and the widths D and F."""

    num_experts: int
    top_k: int
    hidden: int
    ffn: int


@dataclass(frozen=True)
class GroupedTiles:
    """Tiles of the two products; both take the same row tiles."""

    gate_up: Tile
    down: Tile | WarpTile

    @property
    def rows(self) -> int:
        return self.gate_up.rows


Tiling = GemvTile | DecodeTile | GroupedTiles

# One token: products on the CUDA cores.
_ONE_TOKEN = GemvTile(pairs=4, depth=2048, warps=4, rows=4, down_depth=2048, down_warps=2)
# Few rows: weights are the tensor cores' M side, since it has 64 rows at least.
_SKINNY = Tile(16, 128, 128, 4, 3, group=1, swapped=True)
_SKINNIEST = Tile(16, 64, 256, 4, 3, group=1, swapped=True)
# Tiles with no more rows than `_SKINNY` has are computed as its own, and either way two programs share a
# multiprocessor, with 90 and 111 KB: a launch sized for four times its rows runs like one that is not. It costs down's
# whole tiles one stage.
_LOW_GATE_UP = Tile(32, 128, 128, 4, 3, group=1, swapped=True, short_tail=True)
_LOW_DOWN = Tile(32, 128, 128, 4, 2, group=1, swapped=True, short_tail=True, tail_stages=3)
_TALL = Tile(128, 256, 64, 8, 4, short_tail=True)
_TALLEST = Tile(128, 256, 64, 8, 4, group=16, short_tail=True)

# Up to so many rows per expert -> tiles, on Hopper in bf16. A narrow FFN leaves down few steps, which warps in roles
# hide better; a wide one takes its rows by the copy engine.
_NARROW_FFN = 4096
_BY_ROWS: tuple[tuple[float, GroupedTiles, GroupedTiles], ...] = (  # most rows, narrow FFN, wide FFN
    (2, GroupedTiles(_SKINNIEST, _SKINNY), GroupedTiles(_SKINNY, _SKINNY)),
    (10, GroupedTiles(_SKINNY, _SKINNY), GroupedTiles(_SKINNY, _SKINNY)),
    (40, GroupedTiles(_LOW_GATE_UP, _LOW_DOWN), GroupedTiles(_LOW_GATE_UP, _LOW_DOWN)),
    (80, GroupedTiles(_TALL, WarpTile(group=1)), GroupedTiles(_TALL, replace(_TALL, copied_rows=True))),
    (320, GroupedTiles(_TALLEST, WarpTile(group=16)), GroupedTiles(_TALL, replace(_TALL, copied_rows=True))),
    (inf, GroupedTiles(_TALLEST, WarpTile(group=16)), GroupedTiles(_TALLEST, replace(_TALLEST, copied_rows=True))),
)
# Elsewhere, and in other dtypes: smaller tiles, for less shared memory.
_PORTABLE: tuple[tuple[float, GroupedTiles], ...] = (
    (16, GroupedTiles(Tile(16, 64, 64, 4, 2, group=1), Tile(16, 64, 64, 4, 2, group=1))),
    (inf, GroupedTiles(Tile(64, 64, 32, 4, 3), Tile(64, 64, 32, 4, 3))),
)


def choose(num_tokens: int, shape: LayerShape, hopper: bool = True, batch_invariant: bool = False) -> Tiling:
    """The tiles for `num_tokens` tokens. `hopper`: bf16 on compute capability 9, else the portable ones.

    `batch_invariant` leaves out what sums in an order of its own: every tile of `_BY_ROWS` multiplies by wgmma in
    ascending steps of D and F, and gives a row the same bits.
    """
    rows = num_tokens * shape.top_k / shape.num_experts
    if not hopper:
        return _PORTABLE[-1][1] if batch_invariant else next(tiles for most, tiles in _PORTABLE if rows <= most)
    if not batch_invariant:
        for small in small_tilings(shape):
            if num_tokens <= (1 if isinstance(small, GemvTile) else small.columns):
                return small
    narrow = shape.ffn <= _NARROW_FFN and shape.ffn % WARP_DEPTH == 0
    return next(one if narrow else other for most, one, other in _BY_ROWS if rows <= most)


def sizes_to_compile(shape: LayerShape, max_tokens: int) -> list[int]:
    """Numbers of tokens that meet every line of the tables, up to `max_tokens` and that itself."""
    lines = [most for most, *_ in _BY_ROWS] + [most for most, _ in _PORTABLE]
    most = [1, 8] + [int(rows * shape.num_experts / shape.top_k) for rows in lines if rows < inf]
    return sorted({tokens for tokens in (*most, max_tokens) if 1 <= tokens <= max_tokens})


def small_tilings(shape: LayerShape) -> tuple[GemvTile | DecodeTile, ...]:
    """What a few tokens take on Hopper, fewest first; a tile's columns are the most tokens that take it."""
    wanted = (2, 1) if shape.ffn <= _NARROW_FFN else (4, 2, 1)
    parts = [parts for parts in wanted if shape.ffn % (128 * parts) == 0]
    if shape.hidden % 128 or not parts or 8 * shape.top_k > MOST_ROUTES:
        return (_ONE_TOKEN,)
    return _ONE_TOKEN, DecodeTile(8, parts[0])
