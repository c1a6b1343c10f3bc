"""What kernels do to a sum in registers, and where it goes: device functions that several of them share."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Home:
    """Where the rows of routes go that came from other GPUs: back to their origins' windows, wherever those are mapped.

    Row r is that of route n = `source_N[r]`. Each peer has `routes` of them, so that it is route n % routes of the peer
    in slot n // routes, whose window begins at `windows_M[n // routes]`; its rows lie there from byte `offset` on.
    """

    source_N: Tensor
    windows_M: Tensor
    routes: int
    offset: int


def home_arguments(home: Home | None) -> tuple[Tensor, Tensor, int, int] | None:
    """As launches take it."""
    return None if home is None else (home.source_N, home.windows_M, home.routes, home.offset)


@triton.jit
def at_home(home, r, mask, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """Pointers to the places of rows `r`, each of `WIDTH` elements in whole 16-byte units."""
    source, windows, routes, offset = home
    n = tl.load(source + r, mask=mask, other=0)
    peer = n // routes
    place = (
        tl.load(windows + peer, mask=mask, other=0)
        + offset
        + (n - peer * routes).to(tl.int64) * (WIDTH * (dtype.primitive_bitwidth // 8))
    )
    return tl.multiple_of(place.to(tl.pointer_type(dtype)), 16)


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
