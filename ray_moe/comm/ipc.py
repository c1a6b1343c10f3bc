"""Device memory that other processes of the node map: CUDA IPC through cupy.

A mapping outlives the process that made the memory: it stays readable and writable, and harmless, until it is closed
(measured with a killed owner and thousands of kernels in flight). So a peer's death is noticed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ray_moe.errors import ConfigError

Handle = bytes  # as CUDA gives it: 64 of them


@dataclass(eq=False)
class IpcMemory:
    """An allocation of its own, since a handle names a whole allocation: `bytes` uint8 [nbytes], zeroed, at `address`;
    `handle` is what other processes open."""

    bytes: Tensor
    address: int
    handle: Handle
    _free: Callable[[], None]

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> IpcMemory:
        """Raises `ConfigError` for no bytes or a device that is not CUDA; cupy's error when memory is out."""
        runtime = _runtime(nbytes, device)
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # PyTorch's context on the device, before cupy uses it
            pointer = runtime.malloc(nbytes)
            runtime.memset(pointer, 0, nbytes)
            return IpcMemory(
                _as_tensor(pointer, nbytes, device),
                pointer,
                bytes(runtime.ipcGetMemHandle(pointer)),
                lambda: runtime.free(pointer),
            )

    def free(self) -> None:
        """Give the memory back; nothing may use `bytes` any more, here or in a process that has it open."""
        self._free()


@dataclass(eq=False)
class PeerMemory:
    """Another process's `IpcMemory`, mapped here at `address`: `bytes` uint8 [nbytes]."""

    bytes: Tensor
    address: int
    _close: Callable[[], None]

    @staticmethod
    def open(handle: Handle, nbytes: int, device: torch.device) -> PeerMemory:
        """Raises as `IpcMemory.allocate`, and cupy's error when the handle names nothing here."""
        runtime = _runtime(nbytes, device)
        with torch.cuda.device(device):
            torch.cuda.current_stream()
            pointer = runtime.ipcOpenMemHandle(handle)
            return PeerMemory(_as_tensor(pointer, nbytes, device), pointer, lambda: runtime.ipcCloseMemHandle(pointer))

    def close(self) -> None:
        """Unmap it; nothing here may use `bytes` any more."""
        self._close()


def _runtime(nbytes: int, device: torch.device) -> Any:
    if nbytes < 1 or device.type != "cuda":
        raise ConfigError(
            f"memory that processes share must be on cuda, of at least 1 byte, found {nbytes} on {device}"
        )
    import cupy

    return cupy.cuda.runtime


class _Span:
    """An address range as PyTorch takes it, through the CUDA array interface."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


def _as_tensor(pointer: int, nbytes: int, device: torch.device) -> Tensor:
    span = torch.as_tensor(_Span(pointer, nbytes), device=device)
    # PyTorch copies what it takes for another device's.
    assert span.data_ptr() == pointer, f"mapped memory at {pointer:#x} was copied"
    return span
