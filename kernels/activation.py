"""Gated activations of expert FFNs as numbers, so that a kernel can apply them in registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SwiGLU:
    """`(up + up_shift) * gate * sigmoid(alpha * gate)`, after clamping gate to at most `limit` and |up| to it.

    The defaults are plain SwiGLU; gpt_oss has limit 7, alpha 1.702, up_shift 1.
    Example: gate 0, up 5 -> 0; gate 1, up 2 -> 2 * sigmoid(1) = 1.4621; under gpt_oss gate 9, up -9 clamp to 7, -7.
    """

    limit: float | None = None
    alpha: float = 1.0
    up_shift: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """The torch twin, elementwise in the dtype of its arguments."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.up_shift) * gate * torch.sigmoid(self.alpha * gate)
