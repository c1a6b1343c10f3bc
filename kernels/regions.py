"""How much the exchange and the fused layer write, and where in a window: sums and offsets, nothing allocated.

Apart from the launches, so that whoever adds up a device's memory needs no triton. Letters: T tokens, C token slots of
a peer in a unit, K top-k, N = T * K routes, M most peers, E experts, D hidden, F FFN.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ray_moe.errors import ConfigError

SCALE_BLOCK = 128
ROW_BLOCKS = (16, 32, 64, 128)  # heights of row tiles in `tiling`'s tables
ROUTE_CHUNK = 128  # routes that one program counts
_ALIGNMENT = 1024
_DEVICE_PAGE = 2**21  # what cudaMalloc rounds to
# At most so many tokens go by ways of their own, whose partial sums lie apart: depth is cut in four at most, for one
# token at every 2,048 columns. Their programs' lists take less than so many bytes.
_FEW_TOKENS, _FEW_PARTS, _ONE_DEPTH, _LISTS = 8, 4, 2048, 2**18


@dataclass(frozen=True)
class Regions:
    """Byte offsets in every window, alike on all peers; token slots are `max_peers * capacity`.

    rows [M * C, D], ids int32 [M * C, K] (-1: not this peer's), results [M * C * K, D], positions int32 [M * C * K],
    and two flags int64 for every peer. `quantized`: rows are FP8 and have scales fp32 [M * C, D / 128] beside them.
    `partial`: gates fp32 [M * C, K] travel with the ids, and results are one row for each token and peer [M * C, D].
    """

    max_peers: int
    capacity: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    quantized: bool
    partial: bool
    rows: int
    scales: int
    ids: int
    gates: int
    results: int
    positions: int
    arrived: int
    ready: int
    nbytes: int

    @staticmethod
    def plan(
        max_peers: int, capacity: int, top_k: int, hidden: int, dtype: torch.dtype, *, quantized: bool = False,
        partial: bool = False,
    ) -> Regions:  # fmt: skip
        """Raises `ConfigError` for fewer than one of anything, rows that are no whole 16-byte units, and FP8 rows of
        other than whole blocks of 128."""
        for name, value in (("max_peers", max_peers), ("capacity", capacity), ("top_k", top_k), ("hidden", hidden)):
            if value < 1:
                raise ConfigError(f"window {name} must be at least 1, found {value}")
        if hidden * dtype.itemsize % 16:
            raise ConfigError(f"window rows must be whole 16-byte units, found {hidden} elements of {dtype}")
        if quantized and hidden % SCALE_BLOCK:
            raise ConfigError(f"FP8 rows in windows must be whole blocks of {SCALE_BLOCK}, found {hidden} elements")
        tokens, row = max_peers * capacity, hidden * dtype.itemsize
        routes, ints, flags = tokens * top_k, tokens * top_k * 4, max_peers * 8
        sent, scales = (tokens * hidden, tokens * hidden // SCALE_BLOCK * 4) if quantized else (tokens * row, 0)
        gates, results, positions = (ints, tokens * row, 0) if partial else (0, routes * row, ints)
        sizes = (sent, scales, ints, gates, results, positions, flags, flags)
        bounds = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        return Regions(max_peers, capacity, top_k, hidden, dtype, quantized, partial, *bounds)

    @property
    def token_slots(self) -> int:
        """Of all peers."""
        return self.max_peers * self.capacity

    @property
    def device_nbytes(self) -> int:
        """What a window takes of the device: its own allocation, and room beside it for rows that come as FP8."""
        unpacked = self.token_slots * self.hidden * self.dtype.itemsize if self.quantized else 0
        return -(-self.nbytes // _DEVICE_PAGE) * _DEVICE_PAGE + unpacked

    def result_offset(self, part: Part) -> int:
        """Where a part's own routes have their results, once they are `Home`."""
        return self.results + part.start * self.top_k * self.hidden * self.dtype.itemsize

    def view(self, window: Tensor, offset: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """A region of a window's bytes as a tensor of its own shape."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        return window[offset : offset + size].view(dtype).view(shape)


@dataclass(frozen=True, eq=False)
class Part:
    """Which tokens of a unit travel together: `capacity` token slots of every peer, from token slot `first` of the
    regions on. `peers` bounds how many peers there may be when it runs."""

    capacity: int
    first: int
    peers: int

    @property
    def tokens(self) -> int:
        return self.capacity * self.peers

    @property
    def start(self) -> int:
        """The first token of the part, of a peer's own."""
        return self.first // self.peers


def most_tiles(num_rows: int, num_segments: int, block_rows: int) -> int:
    """The most tiles that `num_rows` rows in `num_segments` segments can need: 5 rows in 2 segments by 2 -> 3."""
    started = min(num_rows, num_segments)
    return started + (num_rows - started) // block_rows


def padded_experts(num_experts: int) -> int:
    """Columns of the counts of `num_experts` experts: a power of two, 32 at least."""
    return max(32, 1 << (num_experts - 1).bit_length())


def workspace_nbytes(
    num_experts: int, top_k: int, hidden: int, ffn: int, tokens: int, itemsize: int, *, results: bool = True
) -> int:
    """What `fused_layer.Workspace` takes for `tokens` tokens; a bound, by what few tokens need beside.

    `results`: rows are summed here; those that go home to their origins' windows have no place of their own. Example:
    1 expert, top-1, D = F = 8, 1 token in bf16: 32 bytes of rows, 1,168 of maps, 1,152 + 48 + 262,144 for few tokens.
    """
    rows = tokens * top_k
    ints = sum(
        3 * max(1, rows) + num_experts + 2 + 3 * max(1, most_tiles(rows, num_experts, block))
        + padded_experts(num_experts) * (-(-rows // ROUTE_CHUNK) + 1)
        for block in ROW_BLOCKS
    )  # fmt: skip
    few = _FEW_TOKENS * min(num_experts, _FEW_TOKENS * top_k) * (ffn * itemsize + _FEW_PARTS * hidden * 4)
    one = top_k * (ffn * itemsize + -(-ffn // _ONE_DEPTH) * hidden * 4)
    return rows * (ffn + (hidden if results else 0)) * itemsize + 4 * ints + few + one + _LISTS
