"""One-sided copies between processes of a node by the copy engine: CUDA IPC through cupy, by address.

Addresses, because PyTorch asks the driver which device an address lies on, and may take memory of another card for its
own to bring here. Opening and closing hold the interpreter's lock for as long as the driver takes (cupy does not let
it go), so a mapping is kept for as long as its owner may be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_DEVICE_TO_DEVICE = 3


@dataclass(frozen=True)
class PeerAddress:
    """Another process's allocation, mapped here from `address` on. It stays so when that process dies, until `close`:
    then its memory is free for others."""

    address: int

    @staticmethod
    def open(handle: bytes, device: torch.device) -> PeerAddress:
        """Map what `handle` (64 bytes) names. Raises cupy's error when it names nothing that `device` can reach."""
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # PyTorch's context on the device, before cupy uses it
            return PeerAddress(_runtime().ipcOpenMemHandle(handle))

    def close(self) -> None:
        """Unmap it; no copy out of it may be under way."""
        _runtime().ipcCloseMemHandle(self.address)


def copy_async(copies: Sequence[tuple[int, int, int]], stream: torch.cuda.Stream) -> None:
    """Enqueue copies (into, source, bytes) between addresses that this process has mapped; no kernel runs for them."""
    copy, queue = _runtime().memcpyAsync, stream.cuda_stream
    for into, source, nbytes in copies:
        copy(into, source, nbytes, _DEVICE_TO_DEVICE, queue)


def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime
