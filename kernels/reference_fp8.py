"""Torch twins of the FP8 kernels: `quantize` and `fp8_gemm`, products in FP32.

Letters: N rows, D width or hidden, F FFN, R rows, B scale blocks, S segments; a slab's M matrices of O x I.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as functional
from torch import Tensor

from ray_moe.kernels.activation import SwiGLU

FP8 = torch.float8_e4m3fn
_BLOCK = 128
_FP8_MAX = torch.finfo(FP8).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize_rows(rows_ND: Tensor, block: int = _BLOCK) -> tuple[Tensor, Tensor]:
    """FP8 data [N, D] and FP32 scales [N, ceil(D / block)] of rows; [448, -224, 0, 1] in twos: scales [1, 1 / 448]."""
    width = rows_ND.shape[1]
    rows_NBG = functional.pad(rows_ND.float(), (0, -width % block)).unflatten(1, (-1, block))
    scales_NB = _scales(rows_NBG.abs().amax(dim=2))
    return (rows_NBG / scales_NB[..., None]).flatten(1)[:, :width].to(FP8), scales_NB


def dequantize_rows(data_ND: Tensor, scales_NB: Tensor, block: int = _BLOCK) -> Tensor:
    """The numbers that the data and scales stand for, in FP32."""
    return data_ND.float() * scales_NB.repeat_interleave(block, dim=1)[:, : data_ND.shape[1]]


def quantize_weights(weights_MOI: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 data [M, O, I] and FP32 scales [M, ceil(O / 128), ceil(I / 128)] of matrices."""
    _, rows, columns = weights_MOI.shape
    padded = functional.pad(weights_MOI.float(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.unflatten(1, (-1, _BLOCK)).unflatten(3, (-1, _BLOCK))
    scales_MBB = _scales(blocks.abs().amax(dim=(2, 4)))
    data = (blocks / scales_MBB[:, :, None, :, None]).flatten(3).flatten(1, 2)
    return data[:, :rows, :columns].to(FP8), scales_MBB


def dequantize_weights(data_MOI: Tensor, scales_MBB: Tensor) -> Tensor:
    """The numbers that the data and scales stand for, in FP32."""
    _, rows, columns = data_MOI.shape
    scales = scales_MBB.repeat_interleave(_BLOCK, dim=1).repeat_interleave(_BLOCK, dim=2)
    return data_MOI.float() * scales[:, :rows, :columns]


def fp8_gate_up(
    rows_RD: Tensor,
    gate_up_PFD: Tensor,
    bias: Tensor | None,
    pool_slots: Sequence[int],
    offsets_S1: Sequence[int],
    activation: SwiGLU,
) -> Tensor:
    """Activated rows [R, F] of dequantized rows and weights [2 * pool, F, D], before they are quantized again."""
    outputs = []
    for (start, end), slot in zip(pairwise(offsets_S1), pool_slots, strict=True):
        gate, up = (functional.linear(rows_RD[start:end], gate_up_PFD[2 * slot + half]) for half in (0, 1))
        if bias is not None:
            gate_bias, up_bias = bias[slot].float().chunk(2)
            gate, up = gate + gate_bias, up + up_bias
        outputs.append(activation(gate, up))
    return torch.cat(outputs)


def fp8_down(
    rows_RF: Tensor, down_PDF: Tensor, bias: Tensor | None, pool_slots: Sequence[int], offsets_S1: Sequence[int]
) -> Tensor:
    """Expert outputs [R, D] of dequantized rows and weights [pool, D, F]."""
    outputs = []
    for (start, end), slot in zip(pairwise(offsets_S1), pool_slots, strict=True):
        out = functional.linear(rows_RF[start:end], down_PDF[slot])
        outputs.append(out if bias is None else out + bias[slot].float())
    return torch.cat(outputs)


def _scales(amax: Tensor) -> Tensor:
    return (amax / _FP8_MAX).clamp_min(_SMALLEST_SCALE).masked_fill(amax == 0, 1.0)
