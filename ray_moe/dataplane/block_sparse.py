"""Block-diagonal topology of dropless block-sparse products (specification 0x04D).

Each slot's rows are rounded up to whole blocks, and the blocks of all slots form one block-diagonal matrix [row blocks,
S * F / block_columns]. Everything here follows from one rounded count vector: where rows are gathered to, where a
slot's blocks end, and which blocks are non-zero. Letters: R rows, S this peer's slots, D hidden, F FFN; B row blocks,
Z non-zero blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ray_moe.dataplane.uploads import Ints, upload
from ray_moe.errors import ConfigError, RunnerError

# A block-sparse kernel reads row offsets, column, row and transpose indices as INT32.
INDEX_BYTES = 4


class DeviceIndices(NamedTuple):
    """`BlockTopology`'s index vectors and positions, int32 on the device."""

    row_Z: Tensor
    column_Z: Tensor
    offsets_B1: Tensor
    transpose_Z: Tensor
    positions_R: Tensor


def align_up(rows: int, multiple: int) -> int:
    """The least multiple that is not below `rows`: (3, 2) -> 4, (0, 2) -> 0."""
    return -(-rows // multiple) * multiple


@dataclass(frozen=True, eq=False)
class BlockTopology:
    """The non-zero blocks for one count vector under one key, in row-major order.

    `key` names what the topology was built for besides its shape: the placement generation. Slot s owns the block
    columns [s * F / block_columns, (s + 1) * F / block_columns). The index vectors are what a block-sparse kernel
    reads: a sparse output (SDD) takes row and column indices, a sparse input (DSD) row offsets and column indices, a
    transposed one the transpose indices. Raises `ConfigError` for blocks under 1 and for column blocks that do not
    divide F.

    Example, counts [3, 0, 1], 2 x 2 blocks, F = 4: rounded [4, 0, 2], row_offsets [0, 2, 4, 6], column_indices
    [0, 1, 0, 1, 4, 5], row_indices [0, 0, 1, 1, 2, 2], transpose_indices [0, 2, 1, 3, 4, 5].
    """

    key: Hashable
    counts_S: tuple[int, ...]
    ffn: int
    block_rows: int
    block_columns: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.block_rows < 1 or self.block_columns < 1 or self.ffn % self.block_columns:
            raise ConfigError(
                f"block rows and columns must be at least 1 and columns must divide the FFN width {self.ffn}, "
                f"found {self.block_rows} x {self.block_columns}"
            )

    # -- One rounded count vector

    @cached_property
    def padded_offsets_S1(self) -> tuple[int, ...]:
        """Where each slot's blocked rows start, with the sentinel: the number of blocked rows."""
        return tuple(accumulate((align_up(count, self.block_rows) for count in self.counts_S), initial=0))

    @cached_property
    def positions_R(self) -> Tensor:
        """Each useful row's place among the blocked rows [R] int64; no fringe row has an entry."""
        return self._host_positions_R.to(self.device)

    @cached_property
    def _host_positions_R(self) -> Tensor:
        starts = accumulate(self.counts_S, initial=0)
        shifts = [padded - start for padded, start in zip(self.padded_offsets_S1, starts, strict=True)]
        counts_S = torch.tensor(self.counts_S, dtype=torch.int64)
        shift_R = torch.tensor(shifts[:-1], dtype=torch.int64).repeat_interleave(counts_S)
        return shift_R + torch.arange(shift_R.numel())

    @cached_property
    def fringe_rows(self) -> int:
        """Blocked rows that complete a block and are nobody's."""
        return self.padded_offsets_S1[-1] - sum(self.counts_S)

    @property
    def column_blocks(self) -> int:
        """Non-zero blocks in each row block: a slot's whole FFN width."""
        return self.ffn // self.block_columns

    # -- The non-zero blocks, as host integers: the products are planned there

    @cached_property
    def row_offsets(self) -> tuple[int, ...]:
        """First non-zero block of each row block, and the sentinel Z: [B + 1]."""
        return tuple(block * self.column_blocks for block in range(self._row_blocks + 1))

    @cached_property
    def column_indices(self) -> tuple[int, ...]:
        """Block column of each non-zero block [Z]."""
        wide = self.column_blocks
        return tuple(
            column
            for slot, (start, end) in enumerate(pairwise(self.padded_offsets_S1))
            for _ in range(start, end, self.block_rows)
            for column in range(slot * wide, (slot + 1) * wide)
        )

    @cached_property
    def row_indices(self) -> tuple[int, ...]:
        """Row block of each non-zero block [Z]."""
        return tuple(block for block in range(self._row_blocks) for _ in range(self.column_blocks))

    @cached_property
    def transpose_indices(self) -> tuple[int, ...]:
        """Non-zero blocks in column-major order [Z]."""
        return tuple(sorted(range(len(self.column_indices)), key=self.column_indices.__getitem__))

    @property
    def _row_blocks(self) -> int:
        return self.padded_offsets_S1[-1] // self.block_rows

    # -- The same on the device, for kernels

    @cached_property
    def device_indices(self) -> DeviceIndices:
        """The index vectors and positions as int32 on the device, in one copy; equal to the host's."""
        wide, row_B = self.column_blocks, np.arange(self._row_blocks, dtype=np.int32)
        blocks_S = np.diff(self.padded_offsets_S1) // self.block_rows
        slot_B = np.repeat(np.arange(len(self.counts_S), dtype=np.int32), blocks_S)
        column_Z = np.add.outer(slot_B * wide, np.arange(wide, dtype=np.int32)).ravel()
        vectors: list[Ints] = [
            np.repeat(row_B, wide),
            column_Z,
            np.arange(self._row_blocks + 1, dtype=np.int32) * wide,
            np.argsort(column_Z, kind="stable").astype(np.int32),
            self._host_positions_R.to(torch.int32).numpy(),
        ]
        return DeviceIndices(*upload(vectors, self.device))

    # -- Use

    def require(self, key: Hashable, counts_S: Sequence[int], ffn: int) -> None:
        """`RunnerError` unless the topology was built for exactly this: old coordinates address other rows."""
        if not self.serves(key, counts_S, ffn):
            raise RunnerError(
                "stale_topology",
                f"built for generation {self.key}, counts {list(self.counts_S)} and FFN width {self.ffn}, used under "
                f"generation {key}, counts {list(counts_S)} and FFN width {ffn}",
            )

    def serves(self, key: Hashable, counts_S: Sequence[int], ffn: int) -> bool:
        """Whether the topology was built for this key, count vector and FFN width."""
        return self.key == key and self.counts_S == tuple(counts_S) and self.ffn == ffn

    def gather(self, rows_RD: Tensor) -> Tensor:
        """Rows [R, D] into whole blocks, zeros in the fringe; the rows themselves where there is no fringe."""
        if not self.fringe_rows:
            return rows_RD
        return rows_RD.new_zeros(self.padded_offsets_S1[-1], rows_RD.shape[1]).index_copy_(0, self.positions_R, rows_RD)

    def scatter(self, blocked_RD: Tensor) -> Tensor:
        """The useful rows [R, D] out of their blocks, the inverse of `gather`; the fringe stays behind."""
        if not self.fringe_rows:
            return blocked_RD
        return blocked_RD.index_select(0, self.positions_R)

    def panels(self, blocked_RI: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(slot, that slot's whole blocks of rows): the operands of one product, in row order, as views.

        Raises `RunnerError` when the rows were not gathered by these bins.
        """
        if blocked_RI.shape[0] != self.padded_offsets_S1[-1]:
            raise RunnerError(
                "bins_disagree_with_gather",
                f"{blocked_RI.shape[0]} rows were gathered, the last bin ends at {self.padded_offsets_S1[-1]}",
            )
        slots, rows = self._panels
        return zip(slots, blocked_RI.split(rows), strict=True)

    @cached_property
    def _panels(self) -> tuple[list[int], list[int]]:
        # Consecutive row blocks over the same block columns share their weights: one product instead of many.
        slot_B = (self.column_indices[block] // self.column_blocks for block in self.row_offsets[:-1])
        runs = [(slot, sum(1 for _ in blocks)) for slot, blocks in groupby(slot_B)]
        return [slot for slot, _ in runs], [blocks * self.block_rows for _, blocks in runs]


def topology_indices(counts_S: Sequence[int], block_rows: int, column_blocks: int) -> int:
    """Entries of the four index vectors together, without building them: B + 1 + 3 * Z."""
    row_blocks = sum(align_up(count, block_rows) for count in counts_S) // block_rows
    return row_blocks + 1 + 3 * row_blocks * column_blocks
