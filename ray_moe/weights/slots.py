"""Room for experts' weights on one device: per-layer slabs whose addresses never change, filled and released by slot.

A runner sees a layer's slab `gate_up [S, 2F, D]`, `down [S, D, F]` and the biases; a placement change fills free slots
beside the ones in use and never touches those. Whoever copies weights out of a slot is a reader of it, and a slot that
is being read is not released. Letters: S slots, D hidden, F ffn.

Where other processes of the node read the slots themselves, all slabs lie in one allocation: opening it costs a reader
milliseconds, however large it is, and a reader opens it once.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from ray_moe.errors import ConfigError, SlotError
from ray_moe.weights.checkpoint import ExpertLayout, ExpertWeights
from ray_moe.weights.digest import parameter_digest


class SlotState(StrEnum):
    FREE = "free"
    FILLING = "filling"
    RESIDENT = "resident"


class SlotEvent(StrEnum):
    BEGIN = "begin"
    COMMIT = "commit"
    ABANDON = "abandon"
    RELEASE = "release"


# There is no way from RESIDENT to FILLING: weights in use are never overwritten in place.
TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.BEGIN): SlotState.FILLING,  # one filler owns the slot's bytes
    (SlotState.FILLING, SlotEvent.COMMIT): SlotState.RESIDENT,  # all bytes have arrived and were digested
    (SlotState.FILLING, SlotEvent.ABANDON): SlotState.FREE,  # a copy failed half way; its bytes mean nothing
    (SlotState.RESIDENT, SlotEvent.RELEASE): SlotState.FREE,  # the generation that used it has retired
}


def advance(state: SlotState, event: SlotEvent) -> SlotState:
    """The state after `event`; raises SlotError for an event that the table does not list."""
    after = TRANSITIONS.get((state, event))
    if after is None:
        allowed = sorted(str(known) for known_state, known in TRANSITIONS if known_state is state)
        raise SlotError(f"a {state} slot allows {', '.join(allowed)}; it was asked to {event}")
    return after


@dataclass(frozen=True)
class Slab:
    """One layer's storage. Only rows of resident slots hold weights; the rest is undefined."""

    gate_up: Tensor  # [S, 2F, D]; [S, F, D] without a gate
    down: Tensor  # [S, D, F]
    gate_up_bias: Tensor | None = None  # [S, 2F]
    down_bias: Tensor | None = None  # [S, D]
    has_gate: bool = True

    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def slot(self, pool_slot: int) -> ExpertWeights:
        """Views of one slot's rows."""
        return ExpertWeights(
            **{name: tensor[pool_slot] for name, tensor in self.tensors().items()}, has_gate=self.has_gate
        )


# 128 bits that tell the bytes of a slot from others on the device (`kernels.digest`).
Fingerprint = tuple[int, int]
# (address on the pool's device, bytes) of each of a slot's tensors, in their canonical order.
Places = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MappedSlot:
    """A resident slot as another process of the node reads it: (offset, bytes) of each tensor in the pool's allocation,
    in their canonical order, and what those bytes are known by."""

    spans: tuple[tuple[int, int], ...]
    digest: str
    fingerprint: Fingerprint


class SlabMemory(Protocol):
    """One allocation that other processes of the node can open."""

    def allocate(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], aligned to `ALIGNMENT`; called once."""
        ...

    def fingerprint(self, places: Places) -> Fingerprint:
        """Of bytes that are complete. Waits for the device, with a deadline."""
        ...


ALIGNMENT = 512


class SlotPool:
    """`capacity` slots in each of `layers`, allocated once, on one device and in one dtype.

    Safe for a filler beside readers: a slot being filled has no readers, and the state table is guarded by a lock that
    is never held during a copy. `layout` is that of every layer, or gives it layer by layer. With `memory`, which is on
    `device`, other processes can read the slots, and each is fingerprinted when it is filled.

    Raises ConfigError: no layers, a layer named twice, or a capacity under one.
    """

    def __init__(
        self,
        layers: Sequence[int],
        capacity: int,
        layout: ExpertLayout | Callable[[int], ExpertLayout],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        memory: SlabMemory | None = None,
    ) -> None:
        if not layers or len(set(layers)) != len(layers):
            raise ConfigError(f"a slot pool needs at least one layer, each once; found {list(layers)}")
        if capacity < 1:
            raise ConfigError(f"a slot pool needs a capacity of at least 1 slot per layer; found {capacity}")
        self.layers, self.capacity, self.dtype = tuple(layers), capacity, dtype
        self._layouts = {layer: layout(layer) if callable(layout) else layout for layer in layers}
        self._slot_bytes = {layer: layout.nbytes(dtype) for layer, layout in self._layouts.items()}
        self._memory, self._base = memory, 0
        self._slabs, self._starts = self._allocate(device)
        self.device = self._slabs[self.layers[0]].gate_up.device
        self._states = {(layer, slot): SlotState.FREE for layer in layers for slot in range(capacity)}
        self._digests: dict[tuple[int, int], str] = {}
        self._fingerprints: dict[tuple[int, int], Fingerprint] = {}
        self._readers: Counter[tuple[int, int]] = Counter()
        self._resident_bytes = self._peak_resident_bytes = 0
        self._lock = threading.Lock()

    def fill(
        self, layer: int, pool_slot: int, weights: ExpertWeights, verify: Callable[[str], None] | None = None
    ) -> str:
        """Copies `weights` into a free slot and makes it resident; returns the digest of the bytes that arrived.

        `verify` is as in `commit_fill`. Whatever it raises leaves the slot free, and so does any other failure of the
        copy. Raises SlotError when the slot is not free (it is left as it is) or the weights have another layout or
        dtype.
        """
        target = self.begin_fill(layer, pool_slot)
        try:
            if (weights.layout, weights.dtype) != (target.layout, target.dtype):
                raise SlotError(
                    f"layer {layer} slot {pool_slot} holds {target.layout} in {target.dtype}; "
                    f"it was given {weights.layout} in {weights.dtype}"
                )
            for (_, into), (_, source) in zip(target.named_tensors(), weights.named_tensors(), strict=True):
                into.copy_(source)
            return self.commit_fill(layer, pool_slot, verify)
        except BaseException:  # whatever stopped the copy, the slot must not stay unusable
            self.abandon_fill(layer, pool_slot)
            raise

    def begin_fill(self, layer: int, pool_slot: int) -> ExpertWeights:
        """Takes a free slot for a copy that writes into the returned views itself; end it by commit or abandon."""
        self._advance(layer, pool_slot, SlotEvent.BEGIN)
        return self._slabs[layer].slot(pool_slot)

    def commit_fill(self, layer: int, pool_slot: int, verify: Callable[[str], None] | None = None) -> str:
        """Digests the bytes that are in the slot and makes it resident. The caller has seen its copy complete.

        `verify` sees the digest first: when it raises, the slot stays as it is, filling, and was never resident.
        """
        self._require(layer, pool_slot, SlotState.FILLING)
        digest = parameter_digest(self._slabs[layer].slot(pool_slot))
        if verify is not None:
            verify(digest)
        # Of the same bytes: a copy that is found to have the one has the other.
        fingerprint = None if self._memory is None else self._memory.fingerprint(self._places(layer, pool_slot))
        self._commit(layer, pool_slot, digest, fingerprint)
        return digest

    def abandon_fill(self, layer: int, pool_slot: int) -> None:
        """Gives a half-filled slot back."""
        self._advance(layer, pool_slot, SlotEvent.ABANDON)

    def release(self, layer: int, pool_slot: int) -> None:
        """Frees a resident slot. The caller knows that no generation refers to it any more.

        Raises SlotError "source in use" while a copy reads it (specification 0x08K): ask again when the copy has ended.
        """
        with self._lock:
            readers = self._readers[layer, pool_slot]
            if readers:
                raise SlotError(f"layer {layer} slot {pool_slot}: source in use: {readers} unfinished copies read it")
            self._step(layer, pool_slot, SlotEvent.RELEASE)
            del self._digests[layer, pool_slot]
            self._fingerprints.pop((layer, pool_slot), None)
            self._resident_bytes -= self._slot_bytes[layer]

    def begin_read(self, layer: int, pool_slot: int) -> ExpertWeights:
        """Views of a resident slot that cannot be released until `end_read`; SlotError if it is not resident."""
        with self._lock:
            self._require(layer, pool_slot, SlotState.RESIDENT)
            self._readers[layer, pool_slot] += 1
        return self._slabs[layer].slot(pool_slot)

    def end_read(self, layer: int, pool_slot: int) -> None:
        """A copy out of the slot has ended; SlotError if none was under way."""
        with self._lock:
            if not self._readers[layer, pool_slot]:
                raise SlotError(f"layer {layer} slot {pool_slot}: no copy reads it")
            self._readers[layer, pool_slot] -= 1

    # ---- the same by address, for copies between processes ----

    def begin_mapped_read(self, layer: int, pool_slot: int) -> MappedSlot:
        """As `begin_read`, for a reader in another process; it too ends by `end_read`.

        Raises SlotError for a pool that no other process can open.
        """
        with self._lock:
            self._require(layer, pool_slot, SlotState.RESIDENT)
            slot = layer, pool_slot
            if slot not in self._fingerprints:
                raise SlotError(f"layer {layer} slot {pool_slot}: no other process can open this pool's memory")
            self._readers[slot] += 1
            spans = tuple((start + pool_slot * nbytes, nbytes) for start, nbytes in self._starts[layer])
            return MappedSlot(spans, self._digests[slot], self._fingerprints[slot])

    def begin_mapped_fill(self, layer: int, pool_slot: int) -> Places:
        """As `begin_fill`, for a copy to addresses; end it by `commit_mapped_fill` or `abandon_fill`."""
        self._advance(layer, pool_slot, SlotEvent.BEGIN)
        return self._places(layer, pool_slot)

    def commit_mapped_fill(self, layer: int, pool_slot: int, digest: str, fingerprint: Fingerprint) -> None:
        """Makes a slot resident whose bytes, all of which have arrived, were found to have `fingerprint`: that of bytes
        whose digest is known."""
        self._commit(layer, pool_slot, digest, fingerprint)

    def weights(self, layer: int, pool_slot: int) -> ExpertWeights:
        """Views of a resident slot's weights (not copies); SlotError if it is not resident."""
        self._require(layer, pool_slot, SlotState.RESIDENT)
        return self._slabs[layer].slot(pool_slot)

    def digest(self, layer: int, pool_slot: int) -> str:
        """The digest that `fill` gave; SlotError if the slot is not resident."""
        with self._lock:  # state and digest belong together
            self._require(layer, pool_slot, SlotState.RESIDENT)
            return self._digests[layer, pool_slot]

    def inventory(self) -> dict[tuple[int, int], str]:
        """(layer, pool slot) of every resident slot -> the digest that `fill` gave."""
        with self._lock:
            return dict(self._digests)

    def slot_bytes(self, layer: int) -> int:
        """Bytes of one slot of the layer."""
        self._check_range(layer, 0)
        return self._slot_bytes[layer]

    def state(self, layer: int, pool_slot: int) -> SlotState:
        self._check_range(layer, pool_slot)
        return self._states[layer, pool_slot]

    def free_slots(self, layer: int) -> tuple[int, ...]:
        """The layer's free slots in ascending order."""
        self._check_range(layer, 0)
        with self._lock:
            return tuple(slot for slot in range(self.capacity) if self._states[layer, slot] is SlotState.FREE)

    def slab(self, layer: int) -> Slab:
        """The layer's whole storage, for kernels; its addresses stay the same for the pool's life."""
        self._check_range(layer, 0)
        return self._slabs[layer]

    @property
    def resident_bytes(self) -> int:
        """Bytes of all resident slots."""
        return self._resident_bytes

    @property
    def peak_resident_bytes(self) -> int:
        """The most that `resident_bytes` ever was."""
        return self._peak_resident_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slabs, filled or not."""
        return sum(self._slot_bytes.values()) * self.capacity

    def _allocate(self, device: torch.device | str) -> tuple[dict[int, Slab], dict[int, tuple[tuple[int, int], ...]]]:
        """The slabs, and by layer where each tensor begins in the one allocation and a slot's bytes of it."""
        starts: dict[int, tuple[tuple[int, int], ...]] = {}
        end = 0
        for layer in self.layers:
            several = []
            for shape in self._layouts[layer].shapes.values():
                nbytes = math.prod(shape) * self.dtype.itemsize
                several.append((end, nbytes))
                end += -(-self.capacity * nbytes // ALIGNMENT) * ALIGNMENT
            starts[layer] = tuple(several)
        arena = None if self._memory is None else self._memory.allocate(end)
        self._base = 0 if arena is None else arena.data_ptr()
        slabs = {}
        for layer, layout in self._layouts.items():
            tensors = {}
            for (name, shape), (start, nbytes) in zip(layout.shapes.items(), starts[layer], strict=True):
                if arena is None:
                    tensors[name] = torch.empty((self.capacity, *shape), dtype=self.dtype, device=device)
                else:
                    span = arena[start : start + self.capacity * nbytes]
                    tensors[name] = span.view(self.dtype).view(self.capacity, *shape)
            slabs[layer] = Slab(**tensors, has_gate=layout.has_gate)
        return slabs, starts

    def _places(self, layer: int, pool_slot: int) -> Places:
        return tuple((self._base + start + pool_slot * nbytes, nbytes) for start, nbytes in self._starts[layer])

    def _commit(self, layer: int, pool_slot: int, digest: str, fingerprint: Fingerprint | None) -> None:
        with self._lock:
            self._step(layer, pool_slot, SlotEvent.COMMIT)
            self._digests[layer, pool_slot] = digest
            if fingerprint is not None:
                self._fingerprints[layer, pool_slot] = fingerprint
            self._resident_bytes += self._slot_bytes[layer]
            self._peak_resident_bytes = max(self._peak_resident_bytes, self._resident_bytes)

    def _advance(self, layer: int, pool_slot: int, event: SlotEvent) -> None:
        with self._lock:
            self._step(layer, pool_slot, event)

    def _step(self, layer: int, pool_slot: int, event: SlotEvent) -> None:
        """One transition; the lock is held."""
        self._check_range(layer, pool_slot)
        try:
            self._states[layer, pool_slot] = advance(self._states[layer, pool_slot], event)
        except SlotError as error:
            raise SlotError(f"layer {layer} slot {pool_slot}: {error}") from None

    def _require(self, layer: int, pool_slot: int, state: SlotState) -> None:
        self._check_range(layer, pool_slot)
        found = self._states[layer, pool_slot]
        if found is not state:
            raise SlotError(f"layer {layer} slot {pool_slot}: expected a {state} slot, found a {found} one")

    def _check_range(self, layer: int, pool_slot: int) -> None:
        if layer not in self._slabs:
            raise SlotError(f"layer {layer} has no slots; the pool has layers {self.layers}")
        if not 0 <= pool_slot < self.capacity:
            raise SlotError(f"layer {layer} slot {pool_slot}: the pool has slots 0 to {self.capacity - 1}")
