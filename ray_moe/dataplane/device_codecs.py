"""FP8 payloads by one launch each way, into and out of the wire's own rows, on a CUDA device with triton.

The bytes mean what those of `precision.Fp8Block` mean: either end may use either. Letters: N rows, D hidden, W width on
the wire.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ray_moe.dataplane.precision import FP8, Fp8Block, PayloadCodec, codec_named
from ray_moe.errors import HandleError

_SCALE_BYTES = torch.float32.itemsize


def codec_on(name: str, width: int, dtype: torch.dtype, device: torch.device) -> PayloadCodec:
    """Choose a codec once for rows [N, width] in `dtype` on `device`; `ConfigError` lists the names."""
    codec = codec_named(name, width, dtype)
    # Scales begin behind a row's data: where that is no multiple of their size, no launch can write them.
    if device.type != "cuda" or not isinstance(codec, Fp8Block) or width % _SCALE_BYTES:
        return codec
    try:
        return LaunchedFp8(codec)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "triton":
            raise
        return codec


class LaunchedFp8(Fp8Block):
    """`codec` by kernels. `HandleError` as it raises it."""

    def __init__(self, codec: Fp8Block) -> None:
        from ray_moe.kernels.quantize import dequantize_rows, quantize_rows

        super().__init__(codec.width, codec.block)
        self.name = codec.name
        self._quantize, self._dequantize = quantize_rows, dequantize_rows

    def encode(self, rows_ND: Tensor) -> Tensor:
        if rows_ND.dim() != 2 or rows_ND.shape[1] != self.width:
            raise HandleError(f"codec {self.name} takes rows [N, {self.width}], found {list(rows_ND.shape)}")
        wire_NW = torch.empty(rows_ND.shape[0], self.wire_width, dtype=torch.uint8, device=rows_ND.device)
        self._quantize(rows_ND.contiguous(), *self._parts(wire_NW), self.block)
        return wire_NW

    def decode(self, wire_NW: Tensor, dtype: torch.dtype) -> Tensor:
        if wire_NW.dim() != 2 or wire_NW.shape[1] != self.wire_width or wire_NW.dtype != torch.uint8:
            raise HandleError(
                f"codec {self.name} takes rows [N, {self.wire_width}] in torch.uint8, found {list(wire_NW.shape)} in "
                f"{wire_NW.dtype}"
            )
        rows_ND = torch.empty(wire_NW.shape[0], self.width, dtype=dtype, device=wire_NW.device)
        self._dequantize(*self._parts(wire_NW.contiguous()), rows_ND, self.block)
        return rows_ND

    def _parts(self, wire_NW: Tensor) -> tuple[Tensor, Tensor]:
        """Data and scales where they lie in the rows."""
        return wire_NW[:, : self.width].view(FP8), wire_NW[:, self.width :].view(torch.float32)
