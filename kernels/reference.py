"""Torch twins of the kernels: the oracle of every kernel test, and the CPU implementation.

Letters: T tokens, K top-k, N = T * K routes, R rows, D hidden, F FFN, S slots. All functions are pure and run on any
device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exclusive_sum(counts_S: Tensor) -> Tensor:
    """Offsets with the final sentinel (specification 0x03B): [2, 1, 0] -> [0, 2, 3, 3], in the dtype of the counts."""
    offsets_S1 = counts_S.new_zeros(counts_S.numel() + 1)
    torch.cumsum(counts_S, 0, dtype=counts_S.dtype, out=offsets_S1[1:])
    return offsets_S1


def stable_order(keys_N: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Counting sort by key; equal keys keep their order.

    Returns `order_N` (sorted position -> original) and `counts` [num_keys].
    Example: keys [2, 0, 2, 1] -> order [1, 3, 0, 2], counts [1, 1, 2].
    """
    return torch.argsort(keys_N, stable=True), torch.bincount(keys_N, minlength=num_keys)


def inverse_of(order_N: Tensor) -> Tensor:
    """The inverse permutation (original -> sorted position): [1, 3, 0, 2] -> [2, 0, 3, 1]."""
    positions_N = torch.arange(order_N.numel(), dtype=order_N.dtype, device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, positions_N)


def permute(rows_RD: Tensor, order_R: Tensor) -> Tensor:
    """Row i of the result is row `order_R[i]`: [[5], [6], [7]] by [2, 0, 1] -> [[7], [5], [6]].

    `order_R` may repeat or leave out rows: gathering each token's row once per route is the same operation.
    """
    return rows_RD.index_select(0, order_R)


def unpermute(rows_RD: Tensor, order_R: Tensor) -> Tensor:
    """Puts row i back to position `order_R[i]`: [[7], [5], [6]] by [2, 0, 1] -> [[5], [6], [7]].

    The inverse of `permute` for every permutation o: `unpermute(permute(x, o), o) == x`.
    """
    return torch.empty_like(rows_RD).index_copy_(0, order_R, rows_RD)


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
