"""Torch twins of the block-sparse products, in the dtype of their arguments, one block at a time.

Letters: R blocked rows, S slots, D hidden, F FFN; B row blocks, Z non-zero blocks of P x C elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as functional
from torch import Tensor

from ray_moe.kernels.activation import SwiGLU


def sdd_swiglu(
    rows_RD: Tensor,
    row_indices: Sequence[int],
    column_indices: Sequence[int],
    pool_slots: Sequence[int],
    gate_up: Tensor,
    bias: Tensor | None,
    activation: SwiGLU,
    block_rows: int,
    block_columns: int,
) -> Tensor:
    """Non-zero blocks [Z, P, C] of the activations, each from its own rows and its own columns' weights."""
    ffn = gate_up.shape[1] // 2
    out_ZPC = rows_RD.new_zeros(len(row_indices), block_rows, block_columns)
    for block, (row_block, column_block) in enumerate(zip(row_indices, column_indices, strict=True)):
        slot, columns = _place(column_block, pool_slots, ffn, block_columns)
        rows_PD = rows_RD[row_block * block_rows : (row_block + 1) * block_rows]
        gate, up = (
            functional.linear(rows_PD, weight[columns], None if bias is None else half[columns])
            for weight, half in zip(
                gate_up[slot].chunk(2), (gate_up if bias is None else bias)[slot].chunk(2), strict=True
            )
        )
        out_ZPC[block] = activation(gate, up)
    return out_ZPC


def dsd(
    blocks_ZPC: Tensor,
    row_offsets: Sequence[int],
    column_indices: Sequence[int],
    pool_slots: Sequence[int],
    down: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Rows [B * P, D]: every row block's non-zero blocks times their columns of its slot's down projection."""
    _, block_rows, block_columns = blocks_ZPC.shape
    ffn, outputs = down.shape[2], []
    for start, end in pairwise(row_offsets):
        out_PD = blocks_ZPC.new_zeros(block_rows, down.shape[1])
        for block in range(start, end):
            slot, columns = _place(column_indices[block], pool_slots, ffn, block_columns)
            out_PD += functional.linear(blocks_ZPC[block], down[slot][:, columns])
        slot, _ = _place(column_indices[start], pool_slots, ffn, block_columns)
        outputs.append(out_PD if bias is None else out_PD + bias[slot])
    return torch.cat(outputs)


def _place(column_block: int, pool_slots: Sequence[int], ffn: int, block_columns: int) -> tuple[int, slice]:
    """Pool slot and FFN columns of a block column."""
    local, block = divmod(column_block, ffn // block_columns)
    return pool_slots[local], slice(block * block_columns, (block + 1) * block_columns)
