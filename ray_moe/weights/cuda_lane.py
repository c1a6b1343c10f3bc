"""A CUDA device's copy engine, and the memory of its slots that other processes open.

Copies run on a stream of their own and take no multiprocessor; fingerprints run on another one, so that the next
copies do not wait for them. Both have the lowest priority, which is that of PyTorch's usual streams: kernels of a
stream with a higher one come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_moe.comm.copies import PeerAddress, copy_async
from ray_moe.comm.ipc import IpcMemory
from ray_moe.errors import SlotError
from ray_moe.weights.copy_engine import Copy, Mapping, settle
from ray_moe.weights.slots import Fingerprint, Places


@dataclass(eq=False)
class CudaCheck:
    """Fingerprints on their way to the host."""

    done: torch.cuda.Event
    sums_M2: Tensor  # pinned
    device_tensors: tuple[Tensor, ...]  # in use until then
    copies: tuple[torch.cuda.Event, torch.cuda.Event] | None

    def ready(self) -> bool:
        return self.done.query()

    def fingerprints(self) -> list[Fingerprint]:
        return [(first, second) for first, second in self.sums_M2.tolist()]

    def copy_seconds(self) -> float:
        return 0.0 if self.copies is None else self.copies[0].elapsed_time(self.copies[1]) / 1e3


@dataclass(frozen=True)
class OwnAddress:
    address: int

    def close(self) -> None:
        """It was not opened."""


class CudaLane:
    """`Lane` and `SlabMemory` of one device. Copies come from one thread; fingerprints of a pool's own slots from any.

    `deadline_s` bounds the wait for one slot's fingerprint.
    """

    def __init__(self, device: torch.device | str, *, deadline_s: float) -> None:
        device = torch.device(device)
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self.handle = b""
        self._deadline_s = deadline_s
        self._memory: IpcMemory | None = None
        self.copy_stream, self._checks = (torch.cuda.Stream(self.device, priority=0) for _ in range(2))
        self._first_copy: torch.cuda.Event | None = None

    # ---- this process's slots ----

    def allocate(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], zeroed, for as long as this process lives. Raises `SlotError` the second time."""
        if self._memory is not None:
            raise SlotError(
                f"the memory of {self.device}'s slots is allocated already: {len(self._memory.bytes)} bytes"
            )
        torch.cuda.empty_cache()  # what PyTorch holds and does not use
        self._memory = IpcMemory.allocate(nbytes, self.device)
        self.handle = self._memory.handle
        return self._memory.bytes

    def fingerprint(self, places: Places) -> Fingerprint:
        """Of bytes that are complete. Raises `DeadlineError`."""
        (found,) = settle(self._check([places], None), self._deadline_s, f"a slot's fingerprint on {self.device}")
        return found

    # ---- slots of others ----

    def open(self, handle: bytes) -> Mapping:
        if self._memory is not None and handle == self.handle:  # the driver refuses to open what is this process's own
            return OwnAddress(self._memory.bytes.data_ptr())
        return PeerAddress.open(handle, self.device)

    def copy(self, copies: Sequence[Copy]) -> None:
        with torch.cuda.device(self.device):
            if self._first_copy is None:
                self._first_copy = torch.cuda.Event(enable_timing=True)
                self._first_copy.record(self.copy_stream)
            copy_async(copies, self.copy_stream)

    def check(self, slots: Sequence[Places]) -> CudaCheck:
        first, self._first_copy = self._first_copy, None
        if first is None:
            return self._check(slots, None)
        last = torch.cuda.Event(enable_timing=True)
        last.record(self.copy_stream)
        return self._check(slots, (first, last))

    def _check(self, slots: Sequence[Places], copies: tuple[torch.cuda.Event, torch.cuda.Event] | None) -> CudaCheck:
        from ray_moe.kernels.digest import Span, fingerprint_spans, span_table

        spans = [
            Span(address, nbytes, tensor, slot)
            for slot, places in enumerate(slots)
            for tensor, (address, nbytes) in enumerate(places)
        ]
        table, launches = span_table(spans)
        with torch.cuda.device(self.device), torch.cuda.stream(self._checks):
            sums = torch.empty(len(slots), 2, dtype=torch.int64, pin_memory=True)
            table_N4 = table.pin_memory().to(self.device, non_blocking=True)
            sums_M2 = torch.zeros(len(slots), 2, dtype=torch.int64, device=self.device)
            if copies is not None:
                self._checks.wait_event(copies[1])
            fingerprint_spans(table_N4, launches, sums_M2)
            sums.copy_(sums_M2, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._checks)
        return CudaCheck(done, sums, (table_N4, sums_M2), copies)
