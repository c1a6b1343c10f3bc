"""Torch twins of the kernels: the oracle of every kernel test, and the CPU implementation.

Letters: T tokens, K top-k, N = T * K routes, R rows, D hidden, F FFN, S slots. All functions are pure and run on any
device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exclusive_sum(counts_S: Tensor) -> Tensor:
    """Offsets with the final sentinel (specification 0x03B): [2, 1, 0] -> [0, 2, 3, 3]."""
    offsets = counts_S.new_zeros(counts_S.numel() + 1)
    torch.cumsum(counts_S, 0, out=offsets[1:])
    return offsets


def stable_order(keys_N: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counting sort by key.

    Returns `order_N` (sorted position -> original), `inverse_N` (original -> sorted position) and `counts` [num_keys].
    Example: keys [2, 0, 2, 1] -> order [1, 3, 0, 2], inverse [2, 0, 3, 1], counts [1, 1, 2].
    """
    order_N = torch.argsort(keys_N, stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.numel(), device=keys_N.device)
    return order_N, inverse_N, torch.bincount(keys_N, minlength=num_keys)


def permute(rows_RD: Tensor, order_R: Tensor) -> Tensor:
    """Row i of the result is row `order_R[i]`. Inverse of `unpermute` with the same order."""
    return rows_RD.index_select(0, order_R)


def unpermute(rows_RD: Tensor, order_R: Tensor) -> Tensor:
    """Puts row i back to position `order_R[i]`: `unpermute(permute(x, o), o) == x` for every permutation o."""
    out = torch.empty_like(rows_RD)
    out[order_R] = rows_RD
    return out


def weighted_combine(rows_ND: Tensor, gates_TK: Tensor | None, top_k: int, dtype: torch.dtype) -> Tensor:
    """Gate-weighted sum over the K rows of each token, in route-slot order (specification 0x03C3).

    `rows_ND` [T * K, D] in semantic order. The product is taken in the promoted dtype of rows and gates (fp32 gates
    stay fp32), summed over K there, then cast to `dtype`. `gates_TK` None: the gate was applied at the expert.
    Example (K = 2, D = 1): rows [[1], [2]], gates [[0.5, 0.25]] -> [[1.0]].
    """
    rows_TKD = rows_ND.view(-1, top_k, rows_ND.shape[-1])
    if gates_TK is not None:
        rows_TKD = rows_TKD * gates_TK.unsqueeze(-1)
    return rows_TKD.sum(dim=1).to(dtype)
