"""Attention over the paged cache on a CUDA device: our kernels for decode, flash attention for prompts.

Decode reads lengths and block tables on the device, so that its launches can be captured. A prefill unit is one launch
for all of its requests; chunks with a prefix gather the positions that they may see first. What these kernels do not
have (bounded scores and sinks in prompts, other dtypes and head dims) torch's operations compute.

Letters: T packed tokens, B requests, N gathered positions, H query heads, G query heads per KV head, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ray_moe.dataplane.uploads import upload
from ray_moe.engine.attention import Scores, TorchAttention, pad_to
from ray_moe.kernels.attention import decode_attention, write_kv

if TYPE_CHECKING:
    from ray_moe.engine.kvcache import BoundUnit

_WIDEST = 256


@dataclass(frozen=True)
class FlashView:
    """A prefill unit as flash attention takes it. `slots_N` are the positions that its requests may see, in packed
    order; None where the unit brings all of them itself."""

    cu_q: Tensor  # int32 [B + 1]
    cu_k: Tensor  # int32 [B + 1]
    most_q: int
    most_k: int
    slots_N: Tensor | None

    @staticmethod
    def of(unit: BoundUnit, window: int | None) -> FlashView:
        rows, block_size = unit.batch.rows, unit.cache.block_size
        cu_q = np.cumsum([0, *(row.count for row in rows)], dtype=np.int32)
        most_q = max(row.count for row in rows)
        device = unit.cache.device
        if all(row.start == 0 for row in rows):
            (cu_q_B,) = upload([cu_q], device)
            return FlashView(cu_q_B, cu_q_B, most_q, most_q, None)
        slots: list[np.ndarray] = []
        for row in rows:
            oldest = 0 if window is None else max(0, row.start - window + 1)
            positions = np.arange(oldest, row.start + row.count)
            blocks = np.asarray(row.blocks, np.int64)
            slots.append((blocks[positions // block_size] * block_size + positions % block_size).astype(np.int32))
        counts = [len(each) for each in slots]
        cu_k = np.cumsum([0, *counts], dtype=np.int32)
        cu_q_B, cu_k_B, slots_N = upload([cu_q, cu_k, np.concatenate(slots)], device)
        return FlashView(cu_q_B, cu_k_B, most_q, max(counts), slots_N)


class CudaAttention:
    """Implements `Attention`."""

    def __init__(self) -> None:
        self._torch = TorchAttention()

    def write(self, pool: Tensor, slots_T: Tensor, key_HTD: Tensor, value_HTD: Tensor) -> None:
        write_kv(_rows(key_HTD), _rows(value_HTD), slots_T, pool)

    def decode(self, query_HBD: Tensor, pool: Tensor, unit: BoundUnit, window: int | None, scores: Scores) -> Tensor:
        heads, batch, dim = query_HBD.shape
        if dim > _WIDEST:
            return self._torch.decode(query_HBD, pool, unit, window, scores)
        out_BHD = query_HBD.new_empty(batch, heads, dim)
        decode_attention(
            _rows(query_HBD).transpose(0, 1), pool, unit.batch.block_table, unit.batch.kv_len, unit.cache.block_size,
            scores.scale, out_BHD, window=window, softcap=scores.softcap, sinks_H=scores.sinks_H,
        )  # fmt: skip
        return out_BHD

    def prefill(
        self,
        query_HTD: Tensor,
        key_HTD: Tensor,
        value_HTD: Tensor,
        pool: Tensor,
        unit: BoundUnit,
        window: int | None,
        scores: Scores,
    ) -> Tensor:
        dim = query_HTD.shape[2]
        half = query_HTD.dtype in (torch.bfloat16, torch.float16)
        if not (half and scores.plain and dim % 8 == 0 and dim <= _WIDEST):
            return self._torch.prefill(query_HTD, key_HTD, value_HTD, pool, unit, window, scores)
        view = unit.view(window, FlashView.of)
        if view.slots_N is None:
            key_NHD, value_NHD = (pad_to(_rows(rows), dim).transpose(0, 1) for rows in (key_HTD, value_HTD))
        else:
            entry_NHD = pool.index_select(0, view.slots_N)
            key_NHD, value_NHD = entry_NHD[..., :dim], entry_NHD[..., dim:]
        # Causal from the end: a chunk's last token sees all of its positions.
        sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        out_THD: Tensor = torch.ops.aten._flash_attention_forward(
            _rows(query_HTD).transpose(0, 1), key_NHD, value_NHD, view.cu_q, view.cu_k, view.most_q, view.most_k,
            0.0, True, False, scale=scores.scale, **sides,
        )[0]  # fmt: skip
        return out_THD


def _rows(rows_HTD: Tensor) -> Tensor:
    """With a contiguous last dimension, as the kernels want it."""
    return rows_HTD if rows_HTD.stride(-1) == 1 else rows_HTD.contiguous()
