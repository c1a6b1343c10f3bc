"""What kernels do to a sum in registers: device functions that several of them share."""

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


@triton.jit
def weighted(row, gate, rows_dtype: tl.constexpr):
    """`row` (fp32, an expert's row as `rows_dtype` holds it) times `gate`, in the promoted dtype of the two, as fp32.

    Rows and gates of one half-precision dtype give products of that dtype, as transformers does (0x03C3).
    """
    product = row * gate.to(tl.float32)
    if gate.dtype == rows_dtype:
        product = product.to(rows_dtype).to(tl.float32)
    return product
