"""Experts' weights on their way from one slot to another: paced, copied out as plain bytes, verified on arrival.

All of it runs beside a serving engine in the same process. What takes long is a copy or a hash of one whole tensor, and
releases the interpreter's lock; torch's own pickling would hold it for all of a tensor, so weights travel as NumPy
arrays, which pickle passes on by reference.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ray_moe.errors import ConfigError, DigestMismatchError
from ray_moe.weights.checkpoint import ExpertWeights
from ray_moe.weights.slots import SlotPool


class Throttle:
    """A bandwidth cap that several threads share; None is no cap.

    Bytes are paid for after they moved: the first ones go at once, and whoever comes next waits until those before it
    would have passed at the cap's rate. Time without transfers is not saved up.

    Raises ConfigError for a cap that is not above 0.
    """

    def __init__(self, bytes_per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ConfigError(f"bytes_per_second must be > 0, found {bytes_per_second}")
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """Books `nbytes`; returns the seconds that the caller has to let pass before it moves them."""
        if self.bytes_per_second is None:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self.bytes_per_second
        return start - now

    def seconds(self, nbytes: int) -> float:
        """How long `nbytes` take at the cap's rate."""
        return 0.0 if self.bytes_per_second is None else nbytes / self.bytes_per_second


@dataclass(frozen=True)
class SlotBytes:
    """A slot's weights for another process: each tensor's raw bytes, uint8 with the last axis in bytes.

    `tensors` may be read-only, as those are that come out of an object store.
    """

    tensors: Mapping[str, NDArray[np.uint8]]
    dtype: torch.dtype
    has_gate: bool

    def weights(self) -> ExpertWeights:
        """The weights in host memory of their own. Raises ConfigError when they do not fit together."""
        # A copy, because torch has no tensors over read-only memory.
        tensors = {name: torch.from_numpy(np.array(array)).view(self.dtype) for name, array in self.tensors.items()}
        return ExpertWeights(**tensors, has_gate=self.has_gate)


def export_slot(pool: SlotPool, layer: int, pool_slot: int) -> SlotBytes:
    """A copy of a resident slot; the slot cannot be released meanwhile. SlotError if it is not resident."""
    source = pool.begin_read(layer, pool_slot)
    try:
        tensors = {
            name: tensor.detach().to("cpu", copy=True).view(torch.uint8).numpy()
            for name, tensor in source.named_tensors()
        }
        return SlotBytes(tensors, source.dtype, source.has_gate)
    finally:
        pool.end_read(layer, pool_slot)


def import_slot(
    pool: SlotPool, layer: int, pool_slot: int, weights: ExpertWeights, digest: str | None, *, expert: int, source: str
) -> str:
    """Copies `weights` into a free slot, which becomes resident when the bytes that arrived have `digest`; returns it.

    None takes what comes, for the first read of a checkpoint. `expert` and `source` are for the error's message.

    Raises DigestMismatchError, after which the slot is free again and was never resident; SlotError as in
    `SlotPool.fill`.
    """

    def verify(found: str) -> None:
        if digest is not None and found != digest:
            raise DigestMismatchError(layer, pool_slot, expert, source, digest, found)

    return pool.fill(layer, pool_slot, weights, verify)


def copy_slot(pool: SlotPool, layer: int, source: int, pool_slot: int, digest: str | None, *, expert: int) -> str:
    """Fills a slot from another one of the same pool and layer, without a copy in between; errors as in `import_slot`.

    The source cannot be released meanwhile.
    """
    weights = pool.begin_read(layer, source)
    try:
        return import_slot(pool, layer, pool_slot, weights, digest, expert=expert, source=f"slot {source} beside it")
    finally:
        pool.end_read(layer, source)
