"""Torch twins of the routed layer's kernels: the oracle of their tests, in fp32 whatever the operands are.

Letters: N routes, R rows, T tokens, K top-k, E experts, D hidden, F FFN. `offsets_E1` bounds each expert's rows.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.reference import exclusive_sum


def route_maps(ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(route of each row, row of each route or -1, offsets [E + 1]): expert-major, stable by route.

    Example: E = 3, ids [2, 0, -1, 2] -> [1, 0, 3], [1, 0, -1, 2], [0, 1, 1, 3].
    """
    known_N = (ids_N >= 0) & (ids_N < num_experts)
    routes = known_N.nonzero().flatten()
    source_R = routes[torch.argsort(ids_N[routes], stable=True)]
    position_N = torch.full_like(ids_N, -1)
    position_N[source_R] = torch.arange(len(source_R), dtype=ids_N.dtype, device=ids_N.device)
    return source_R, position_N, exclusive_sum(torch.bincount(ids_N[routes], minlength=num_experts))


def row_tiles(offsets_E1: Tensor, block_rows: int) -> list[tuple[int, int, int]]:
    """(segment, first row, end) of each tile: offsets [0, 3, 3, 4] by 2 -> (0, 0, 3), (0, 2, 3), (2, 3, 4)."""
    bounds = enumerate(pairwise(offsets_E1.tolist()))
    return [(segment, row, end) for segment, (start, end) in bounds for row in range(start, end, block_rows)]


def grouped_gate_up(
    rows_RD: Tensor, offsets_E1: Tensor, slots_E: Tensor, gate_up: Tensor, bias: Tensor | None, activation: SwiGLU
) -> Tensor:
    """SwiGLU of gate and up products of every row, [R, F] fp32.

    Example (D = F = 1, one expert): gate 1, up 2, rows [[3], [1]] -> [[silu(3) * 6], [silu(1) * 2]].
    """
    products_R2F = _grouped(rows_RD, offsets_E1, slots_E, gate_up, bias)
    return activation(*products_R2F.chunk(2, dim=1))


def grouped_down(
    acts_RF: Tensor, offsets_E1: Tensor, slots_E: Tensor, down: Tensor, bias: Tensor | None, gates_R: Tensor | None
) -> Tensor:
    """Down products [R, D] fp32, times `gates_R` where given.

    Example (D = F = 1): down 2, rows [[1], [3]] -> [[2], [6]].
    """
    rows_RD = _grouped(acts_RF, offsets_E1, slots_E, down, bias)
    return rows_RD if gates_R is None else rows_RD * gates_R.float()[:, None]


def gather_combine(rows_RD: Tensor, position_N: Tensor, gates_TK: Tensor | None, top_k: int) -> Tensor:
    """Gate-weighted sums [T, D] fp32; a position of -1 adds nothing.

    Example (K = 2, D = 1): rows [[1], [2], [4]], positions [2, 0], gates [[0.5, 0.25]] -> [[2.25]].
    """
    nothing_1D = rows_RD.new_zeros(1, rows_RD.shape[1])
    rows_TKD = torch.cat((rows_RD, nothing_1D))[position_N.long()].float().view(-1, top_k, rows_RD.shape[1])
    return (rows_TKD if gates_TK is None else rows_TKD * gates_TK.float().unsqueeze(-1)).sum(1)


def routed_layer(
    hidden_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, slots_E: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, activation: SwiGLU,
) -> Tensor:  # fmt: skip
    """The whole layer [T, D] in fp32. Example: one expert of D = F = 1, gate 1, up 2, down 2, hidden 3, gate weight 0.5
    -> 0.5 * 2 * silu(3) * 6."""
    top_k, ids_N = ids_TK.shape[1], ids_TK.reshape(-1).long()
    source_R, position_N, offsets_E1 = route_maps(ids_N, slots_E.numel())
    acts_RF = grouped_gate_up(hidden_TD[source_R // top_k], offsets_E1, slots_E, gate_up, gate_up_bias, activation)
    rows_RD = grouped_down(acts_RF, offsets_E1, slots_E, down, down_bias, None)
    return gather_combine(rows_RD, position_N, gates_TK, top_k)


def _grouped(rows_RI: Tensor, offsets_E1: Tensor, slots_E: Tensor, slab: Tensor, bias: Tensor | None) -> Tensor:
    out_RO = rows_RI.new_zeros(rows_RI.shape[0], slab.shape[1], dtype=torch.float32)
    for slot, (start, end) in zip(slots_E.tolist(), pairwise(offsets_E1.tolist()), strict=True):
        if end > start:
            out_RO[start:end] = rows_RI[start:end].float() @ slab[slot].float().T
            if bias is not None:
                out_RO[start:end] += bias[slot].float()
    return out_RO
