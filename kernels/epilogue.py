"""What a product does to its accumulator before it stores it: device functions that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr):
    """`activation.SwiGLU` of fp32 tiles of equal shape; LIMIT None is no clamp."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return (up + SHIFT) * gate * tl.sigmoid(ALPHA * gate)
