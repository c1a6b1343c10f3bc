"""How many routes each expert was given, by layer and phase: counted where they start, read once in a while.

    counts.add(layer, phase, topk_ids_TK)     one operation on the device for each layer, nothing is read back
    counts.harvest(...)                       at a step boundary: reports of what was counted since the last one

A rank counts the real rows of its own tokens, whichever path executes them, so that over all ranks every layer has
exactly tokens x top-k routes. Letters: P phases, L MoE layers in execution order, E logical experts, T tokens, K top-k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ray_moe.dataplane.phases import Phase
from ray_moe.errors import ConfigError

Ints = NDArray[np.int64]

# The units that requests are made of. A bare layer call is nobody's demand: whoever makes it has a router of his own.
COUNTED: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, eq=False)
class DemandReport:
    """What one rank's routers asked for in steps [first_step, last_step], all of one generation.

    `phase_counts_PLE` int64 are routes by phase (in the order of `COUNTED`), layer and expert; `tokens` the real tokens
    of each phase. A rank numbers its reports from 0 on, each beginning where the last one ended, so that a lost or
    repeated one is noticed. The array is taken over, not copied; pickled, it is as narrow as its largest count. Raises
    `ConfigError` for negative numbers, an empty range of steps, and counts or tokens of another shape.
    """

    rank: int
    sequence: int
    generation: int
    epoch: int
    first_step: int
    last_step: int
    tokens: tuple[int, ...]
    phase_counts_PLE: Ints

    def __post_init__(self) -> None:
        counts = np.asarray(self.phase_counts_PLE, np.int64).view()
        if counts.ndim != 3 or counts.shape[0] != len(COUNTED) or len(self.tokens) != len(COUNTED):
            raise ConfigError(
                f"counts and tokens must be of the {len(COUNTED)} phases {', '.join(COUNTED)}, "
                f"found {list(counts.shape)} and {self.tokens}"
            )
        if self.sequence < 0 or not 0 <= self.first_step <= self.last_step:
            raise ConfigError(
                f"sequence and first_step must be >= 0 and last_step not before it, "
                f"found {self.sequence}, {self.first_step} and {self.last_step}"
            )
        if counts.size and counts.min() < 0:
            raise ConfigError(f"counts must be >= 0, found {counts.min()}")
        counts.flags.writeable = False
        object.__setattr__(self, "phase_counts_PLE", counts)

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        largest = int(self.phase_counts_PLE.max(initial=0))
        values["phase_counts_PLE"] = self.phase_counts_PLE.astype(np.min_scalar_type(largest))
        return DemandReport, tuple(values.values())


class RouteCounts:
    """One rank's counts. Used on the engine loop's thread only.

    `moe_layers` are the model's layer indices, in execution order; the first step that is counted is `first_step`.
    """

    def __init__(
        self, moe_layers: Sequence[int], num_experts: int, device: torch.device, *, first_step: int = 0
    ) -> None:
        # One tensor at a stable address. The loop's stream orders what is added, copied and zeroed.
        self._counts_PLE = torch.zeros(len(COUNTED), len(moe_layers), num_experts, dtype=torch.int64, device=device)
        # Unknown layers are a mistake and fail as a key; bare calls are known, and pass.
        self._rows: dict[tuple[Phase, int], Tensor | None] = {("bare", layer): None for layer in moe_layers}
        self._rows |= {
            (phase, layer): row_E
            for phase, rows_LE in zip(COUNTED, self._counts_PLE, strict=True)
            for layer, row_E in zip(moe_layers, rows_LE, strict=True)
        }
        first_E = torch.arange(len(moe_layers), device=device) * num_experts
        self._first_L11 = first_E[:, None, None]  # where each layer's experts begin among one phase's counts
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._ones: dict[int, Tensor] = {}  # by number of routes: a view costs as much as counting with it
        self._first_layer, self._tokens = moe_layers[0], dict.fromkeys(COUNTED, 0)
        self._first_step, self._sequence = first_step, 0
        self._take: Callable[[Tensor], _Taken] = _cloned if device.type == "cpu" else _PinnedCopies()
        self._copying: deque[tuple[_Header, _Taken]] = deque()

    def add(self, layer: int, phase: Phase, topk_ids_TK: Tensor) -> None:
        """Count a unit's routes [T, K], real rows only; ids are in [0, E), as the plan has checked."""
        row_E, routes = self._rows[phase, layer], topk_ids_TK.numel()
        if row_E is None or not routes:
            return
        ones_N = self._ones.get(routes)
        if ones_N is None:
            ones_N = self._ones[routes] = self._one.expand(routes)
        # Not bincount: on a device it reads the largest id back.
        row_E.index_add_(0, topk_ids_TK.reshape(-1), ones_N)
        if layer == self._first_layer:  # every layer sees the same tokens
            self._tokens[phase] += topk_ids_TK.shape[0]

    def add_unit(self, phase: Phase, ids_LTK: Tensor) -> None:
        """Count the routes of all layers of a unit, in execution order, int64 [L, T, K]; ids below 0 are nobody's.

        It touches the device only, at stable addresses, so that it can be captured: each replay counts again what the
        ids are then. The unit's tokens are the host's to say (`add_tokens`).
        """
        counts = self._counts_PLE[COUNTED.index(phase)].view(-1)
        places_N = (ids_LTK.clamp(min=0) + self._first_L11).view(-1)
        counts.index_add_(0, places_N, (ids_LTK >= 0).view(-1).long())

    def add_tokens(self, phase: Phase, tokens: int) -> None:
        """Count the real tokens of a unit whose routes the device counts."""
        self._tokens[phase] += tokens

    def begin(self, step: int) -> None:
        """The epoch's first step was agreed: a rank that joined has nothing to say about those before it."""
        self._first_step = max(self._first_step, step)

    def harvest(self, *, rank: int, generation: int, epoch: int, last_step: int) -> list[DemandReport]:
        """End the current report with `last_step` and begin the next; at a boundary, before a switch of generations.

        Returns the reports that are complete, oldest first: on the CPU this one, on a device those whose copies have
        arrived, which at the latest is the next call's business. Waits for nothing. Without a step since the last call
        it begins none.
        """
        if last_step >= self._first_step:
            tokens = tuple(self._tokens.values())
            header = _Header(rank, self._sequence, generation, epoch, self._first_step, last_step, tokens)
            self._copying.append((header, self._take(self._counts_PLE)))
            self._counts_PLE.zero_()
            self._sequence, self._first_step = self._sequence + 1, last_step + 1
            self._tokens = dict.fromkeys(COUNTED, 0)
        done = []
        while self._copying and self._copying[0][1].arrived():
            header, taken = self._copying.popleft()
            done.append(DemandReport(**vars(header), phase_counts_PLE=taken.counts()))
        return done

    def flush(self) -> list[DemandReport]:
        """The reports that are still being copied, waited for: when the loop ends."""
        left = [DemandReport(**vars(header), phase_counts_PLE=taken.counts()) for header, taken in self._copying]
        self._copying.clear()
        return left


@dataclass(frozen=True)
class _Header:
    rank: int
    sequence: int
    generation: int
    epoch: int
    first_step: int
    last_step: int
    tokens: tuple[int, ...]


# -- From the device to the host


class _Taken(Protocol):
    """Counts as they were at a boundary."""

    def arrived(self) -> bool:
        """Whether `counts` returns at once."""

    def counts(self) -> Ints:
        """[P, L, E], the caller's own; called once."""


def _cloned(counts_PLE: Tensor) -> _Taken:
    return _Cloned(counts_PLE.numpy().copy())


@dataclass(frozen=True, eq=False)
class _Cloned:
    counts_PLE: Ints

    def arrived(self) -> bool:
        return True

    def counts(self) -> Ints:
        return self.counts_PLE


class _PinnedCopies:
    """Copies that are under way while the device goes on; their buffers are used again."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def __call__(self, counts_PLE: Tensor) -> _Taken:
        pinned_PLE = self._free.pop() if self._free else torch.empty_like(counts_PLE, device="cpu", pin_memory=True)
        pinned_PLE.copy_(counts_PLE, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _PinnedCopy(pinned_PLE, copied, self._free)


@dataclass(frozen=True, eq=False)
class _PinnedCopy:
    pinned_PLE: Tensor
    copied: torch.cuda.Event
    free: list[Tensor]

    def arrived(self) -> bool:
        return bool(self.copied.query())

    def counts(self) -> Ints:
        self.copied.synchronize()
        counts: Ints = self.pinned_PLE.numpy().copy()
        self.free.append(self.pinned_PLE)
        return counts
