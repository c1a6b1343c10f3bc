"""Torch twins of the trunk's kernels: what transformers' modules write out, operation by operation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(rows_RD: Tensor, weight_D: Tensor, eps: float, *, rounded: bool = True) -> Tensor:
    wide = rows_RD.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed.to(rows_RD.dtype) if rounded else (weight_D * normed).to(rows_RD.dtype)


def rotate(query_HTD: Tensor, key_HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(rows_HTD: Tensor) -> Tensor:
        low, high = rows_HTD.chunk(2, dim=-1)
        return rows_HTD * cos_TD + torch.cat((-high, low), dim=-1) * sin_TD

    return rotated(query_HTD), rotated(key_HTD)


def softmax_top_k(
    logits_TE: Tensor, top_k: int, *, renormalise: bool, gate_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    gates_TK, ids_TK = logits_TE.softmax(dim=-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    gates_TK, ids_TK = gates_TK[:, :top_k], ids_TK[:, :top_k]
    if renormalise:
        gates_TK = gates_TK / gates_TK.sum(dim=-1, keepdim=True)
    return gates_TK.to(gate_dtype), ids_TK
