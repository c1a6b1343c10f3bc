"""Runners: one function, several physical representations (specification 0x04).

A runner computes SwiGLU-style experts over expert-major segments. Padding rows never acquire identity: they exist only
inside a runner. Letters: R rows, S this peer's slots, C capacity, D hidden, F FFN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from ray_moe.errors import ConfigError

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
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
        out_RD = torch.empty_like(rows_RD)
        for local, pool_slot in enumerate(weights.pool_slots):
            start, end = offsets_S1[local], offsets_S1[local + 1]
            if start == end:
                continue
            inner = functional.linear(rows_RD[start:end], weights.gate_up[pool_slot])
            if weights.gate_up_bias is not None:
                inner = inner + weights.gate_up_bias[pool_slot]
            # The bias is added after rounding, not fused: that is what transformers does, bit for bit in bf16.
            outer = functional.linear(weights.activation(inner), weights.down[pool_slot])
            out_RD[start:end] = outer if weights.down_bias is None else outer + weights.down_bias[pool_slot]
        return out_RD


class CapacityPadded:
    """All slots in one batched product, each padded to the fullest segment of this call: nothing overflows."""

    name = "capacity_padded"

    def run(self, rows_RD: Tensor, offsets_S1: Sequence[int], weights: LayerWeights) -> Tensor:
        counts = [end - start for start, end in zip(offsets_S1, offsets_S1[1:], strict=False)]
        capacity = max(counts, default=0)
        if capacity == 0:
            return torch.empty_like(rows_RD)
        count_S = torch.tensor(counts, device=rows_RD.device)
        valid_SC = torch.arange(capacity, device=rows_RD.device) < count_S[:, None]
        padded_SCD = rows_RD.new_zeros(len(counts), capacity, rows_RD.shape[1])
        padded_SCD[valid_SC] = rows_RD
        pool = torch.tensor(weights.pool_slots, device=rows_RD.device)
        inner = torch.bmm(padded_SCD, weights.gate_up[pool].mT)
        if weights.gate_up_bias is not None:
            inner = inner + weights.gate_up_bias[pool, None]
        outer = torch.bmm(weights.activation(inner), weights.down[pool].mT)
        if weights.down_bias is not None:
            outer = outer + weights.down_bias[pool, None]
        return outer[valid_SC]


_RUNNERS: dict[str, type[Grouped] | type[CapacityPadded]] = {runner.name: runner for runner in (Grouped, CapacityPadded)}


def runner_named(name: str) -> Runner:
    """Choose a runner once, at construction; `ConfigError` lists the names."""
    if name not in _RUNNERS:
        raise ConfigError(f"runner must be one of {', '.join(sorted(_RUNNERS))}, found {name!r}")
    return _RUNNERS[name]()
