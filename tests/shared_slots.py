"""A lane without a GPU: slots lie in a file that other processes map, and copies are queued until somebody looks."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ray_moe.kernels.reference_digest import fingerprint
from ray_moe.weights.copy_engine import Check, Copy, Mapping
from ray_moe.weights.slots import Fingerprint, Places


def map_file(path: Path) -> Tensor:
    """The file's bytes, as every process that maps it sees them."""
    with path.open("r+b") as file:
        return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8))


def of_places(places: Places) -> Fingerprint:
    return fingerprint(
        [torch.from_numpy(np.frombuffer((ctypes.c_uint8 * size).from_address(at), np.uint8)) for at, size in places]
    )


@dataclass
class MappedFile:
    data: Tensor
    closed: bool = False

    @property
    def address(self) -> int:
        assert not self.closed
        return self.data.data_ptr()

    def close(self) -> None:
        self.closed = True


class SharedLane:
    """`Lane` and `SlabMemory` in shared memory. A check runs one of the queued copies each time it is looked at."""

    def __init__(self, before_copy: Callable[[int], None] = lambda done: None) -> None:
        self.handle = b""
        self.opened: list[MappedFile] = []
        self.copied: list[int] = []  # bytes of each copy, in order
        self.seconds_per_byte = 1e-9
        self._before_copy = before_copy
        self._queue: deque[Copy] = deque()
        self._memory: Tensor | None = None

    def allocate(self, nbytes: int) -> Tensor:
        number, name = tempfile.mkstemp(prefix="ray-moe-slots-", dir="/dev/shm")
        os.ftruncate(number, nbytes)
        os.close(number)
        self.handle, self._memory = name.encode(), map_file(Path(name))
        return self._memory

    def fingerprint(self, places: Places) -> Fingerprint:
        return of_places(places)

    def open(self, handle: bytes) -> Mapping:
        own = handle == self.handle and self._memory is not None
        mapping = MappedFile(self._memory if own and self._memory is not None else map_file(Path(handle.decode())))
        self.opened.append(mapping)
        return mapping

    def copy(self, copies: Sequence[Copy]) -> None:
        self._queue += copies

    def check(self, slots: Sequence[Places]) -> Check:
        return _Check(self, slots, len(self.copied) + len(self._queue))

    def unlink(self) -> None:
        Path(self.handle.decode()).unlink(missing_ok=True)

    def run_one(self) -> None:
        self._before_copy(len(self.copied))
        into, source, nbytes = self._queue.popleft()
        ctypes.memmove(into, source, nbytes)
        self.copied.append(nbytes)


@dataclass
class _Check:
    lane: SharedLane
    slots: Sequence[Places]
    after: int  # copies
    found: list[Fingerprint] | None = None

    def ready(self) -> bool:
        if len(self.lane.copied) < self.after:
            self.lane.run_one()
        elif self.found is None:
            self.found = [of_places(places) for places in self.slots]
        return self.found is not None

    def fingerprints(self) -> list[Fingerprint]:
        assert self.found is not None
        return self.found

    def copy_seconds(self) -> float:
        return sum(size for places in self.slots for _, size in places) * self.lane.seconds_per_byte
