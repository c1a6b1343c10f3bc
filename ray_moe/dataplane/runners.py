"""Runners: one function, several physical representations (specification 0x04).

A runner computes SwiGLU-style experts over expert-major segments. Padding rows never acquire identity: they exist only
inside a runner. Letters: R rows, S this peer's slots, C capacity, D hidden, F FFN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from ray_moe.errors import ConfigError

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The generation's view of one layer's slot pool: which storage index each local slot uses, and the slabs.

    `gate_up` [pool, 2F, D] gate rows first, `down` [pool, D, F], biases [pool, 2F] and [pool, D] or None;
    `pool_slots` [S] in dispatch order. `activation` maps [R, 2F] to [R, F] with the family's own clamps.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    pool_slots: tuple[int, ...]
    activation: Activation

    @cached_property
    def experts(self) -> tuple[tuple[Tensor, Tensor, Tensor | None, Tensor | None], ...]:
        """Each local slot's own (gate_up, down, gate_up bias, down bias): views of the slabs, in dispatch order."""
        return tuple(
            (
                self.gate_up[pool_slot],
                self.down[pool_slot],
                None if self.gate_up_bias is None else self.gate_up_bias[pool_slot],
                None if self.down_bias is None else self.down_bias[pool_slot],
            )
            for pool_slot in self.pool_slots
        )

    @cached_property
    def stack(self) -> slice | Tensor:
        """Indexes a slab by local slot: a view where the pool slots are consecutive, a copy where they are not."""
        first, count = (self.pool_slots or (0,))[0], len(self.pool_slots)
        if self.pool_slots == tuple(range(first, first + count)):
            return slice(first, first + count)
        return torch.tensor(self.pool_slots, device=self.gate_up.device)


class Runner(Protocol):
    """Runs every local slot's expert over its own segment."""

    name: str

    def run(self, rows_RD: Tensor, offsets_S1: Sequence[int], weights: LayerWeights) -> Tensor:
        """Rows [R, D] in expert-major order, segment s is `[offsets_S1[s], offsets_S1[s + 1])`; result [R, D]."""
        ...


class Grouped:
    """One product per non-empty segment, exact rows."""

    name = "grouped"

    def run(self, rows_RD: Tensor, offsets_S1: Sequence[int], weights: LayerWeights) -> Tensor:
        outputs = [
            self._expert(rows_RD[start:end], weights.activation, *expert)
            for expert, (start, end) in zip(weights.experts, pairwise(offsets_S1), strict=True)
            if end > start
        ]
        return torch.cat(outputs) if outputs else rows_RD.new_empty(0, rows_RD.shape[1])

    @staticmethod
    def _expert(
        rows_nD: Tensor,
        activation: Activation,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        inner = functional.linear(rows_nD, gate_up)
        # Biases are added after rounding, not fused: that is what transformers does, bit for bit in bf16.
        if gate_up_bias is not None:
            inner = inner + gate_up_bias
        outer = functional.linear(activation(inner), down)
        return outer if down_bias is None else outer + down_bias


class CapacityPadded:
    """All slots in one batched product, each padded to the fullest segment of this call: nothing overflows."""

    name = "capacity_padded"

    def run(self, rows_RD: Tensor, offsets_S1: Sequence[int], weights: LayerWeights) -> Tensor:
        counts = [end - start for start, end in pairwise(offsets_S1)]
        capacity = max(counts, default=0)
        if capacity == 0:
            return torch.empty_like(rows_RD)
        count_S = torch.tensor(counts, device=rows_RD.device)
        valid_SC = torch.arange(capacity, device=rows_RD.device) < count_S[:, None]
        padded_SCD = rows_RD.new_zeros(len(counts), capacity, rows_RD.shape[1])
        padded_SCD[valid_SC] = rows_RD
        inner = torch.bmm(padded_SCD, weights.gate_up[weights.stack].mT)
        if weights.gate_up_bias is not None:
            inner = inner + weights.gate_up_bias[weights.stack, None]
        outer = torch.bmm(weights.activation(inner), weights.down[weights.stack].mT)
        if weights.down_bias is not None:
            outer = outer + weights.down_bias[weights.stack, None]
        return outer[valid_SC]


_RUNNERS: dict[str, type[Grouped] | type[CapacityPadded]] = {
    runner.name: runner for runner in (Grouped, CapacityPadded)
}


def runner_named(name: str) -> Runner:
    """Choose a runner once, at construction; `ConfigError` lists the names."""
    if name not in _RUNNERS:
        raise ConfigError(f"runner must be one of {', '.join(sorted(_RUNNERS))}, found {name!r}")
    return _RUNNERS[name]()
