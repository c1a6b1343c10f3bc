"""Torch twins of the attention kernels, request by request, in fp32 at least.

Letters: B requests, H query heads, G query heads per KV head, D head dim, W blocks per request, N positions, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention(
    query_BHD: Tensor,
    pool: Tensor,
    block_table_BW: Tensor,
    kv_len_B: Tensor,
    block_size: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """What `attention.decode_attention` writes, in the query's dtype."""
    heads, dim = query_BHD.shape[1:]
    out_BHD = torch.zeros_like(query_BHD)
    wide = torch.promote_types(query_BHD.dtype, torch.float32)
    for row, length in enumerate(kv_len_B.tolist()):
        if not length:
            continue
        first = 0 if window is None else max(0, length - window)
        position_N = torch.arange(first, length, device=pool.device)
        slots_N = block_table_BW[row][position_N // block_size] * block_size + position_N % block_size
        entry_NHD = pool[slots_N].to(wide).repeat_interleave(heads // pool.shape[1], dim=1)
        score_HN = torch.einsum("hd,nhd->hn", query_BHD[row].to(wide), entry_NHD[..., :dim]) * scale
        if softcap is not None:
            score_HN = softcap * (score_HN / softcap).tanh()
        if sinks_H is not None:
            score_HN = torch.cat((score_HN, sinks_H.to(wide)[:, None]), dim=1)
        weight_HN = score_HN.softmax(dim=1)[:, : len(position_N)]
        out_BHD[row] = torch.einsum("hn,nhd->hd", weight_HN, entry_NHD[..., dim:]).to(out_BHD.dtype)
    return out_BHD


def write_kv(key_HTD: Tensor, value_HTD: Tensor, slots_T: Tensor, pool: Tensor) -> None:
    """What `attention.write_kv` stores."""
    dim = pool.shape[2] // 2
    for at, rows_HTD in ((0, key_HTD), (dim, value_HTD)):
        padded = torch.nn.functional.pad(rows_HTD, (0, dim - rows_HTD.shape[2]))
        pool[slots_T, :, at : at + dim] = padded.transpose(0, 1)
