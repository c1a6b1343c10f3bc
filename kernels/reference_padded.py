"""Torch twins of `permute.pad` and `permute.unpad`. Letters: R rows, S slots, C capacity, D hidden."""

from __future__ import annotations

import torch
from torch import Tensor


def pad(rows_RD: Tensor, offsets_S1: Tensor, capacity: int) -> Tensor:
    """Each slot's rows at the start of its capacity, zeros behind them.

    Example (D = 1): rows [[5], [6]] with offsets [0, 0, 2] and C = 3 -> [[[0], [0], [0]], [[5], [6], [0]]].
    """
    padded_SCD = rows_RD.new_zeros(offsets_S1.numel() - 1, capacity, rows_RD.shape[1])
    padded_SCD[_valid(offsets_S1, capacity)] = rows_RD
    return padded_SCD


def unpad(rows_SCD: Tensor, offsets_S1: Tensor) -> Tensor:
    """The inverse of `pad`: every slot's rows in expert-major order."""
    return rows_SCD[_valid(offsets_S1, rows_SCD.shape[1])]


def _valid(offsets_S1: Tensor, capacity: int) -> Tensor:
    return torch.arange(capacity, device=offsets_S1.device) < offsets_S1.diff()[:, None]
