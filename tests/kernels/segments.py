"""Row tiles as the routing kernels cut them, for tests of kernels that walk them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ray_moe.kernels.routing import RowTiles


def row_tiles(offsets_S1: Sequence[int], rows: int, spare: int, device: torch.device) -> RowTiles:
    """Tiles of `rows` rows of each segment in order, and `spare` entries past their count that no kernel may follow."""
    tiles = [
        (segment, row, end)
        for segment, (start, end) in enumerate(pairwise(offsets_S1))
        for row in range(start, end, rows)
    ]
    maps = torch.tensor([*tiles, *[(2**30,) * 3] * spare], dtype=torch.int32, device=device).reshape(-1, 3)
    count_1 = torch.tensor([len(tiles)], dtype=torch.int32, device=device)
    segment_M, row_M, end_M = (maps[:, column].contiguous() for column in range(3))
    return RowTiles(segment_M, row_M, end_M, count_1, rows)
