"""Rows of experts, their weights and the fp32 oracle, for tests of runners that compute with kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as functional
from torch import Tensor

from ray_moe.dataplane.layer_weights import LayerWeights
from ray_moe.dataplane.rows import ExpertRows, MaskedRows, Mode, SegmentedRows
from ray_moe.dataplane.runners import Runner
from ray_moe.kernels.activation import SwiGLU

ROUTINGS = ("random", "zipf", "one_hot", "half_empty")


def plain(inner: Tensor, form: SwiGLU) -> Tensor:
    return form(*inner.chunk(2, dim=-1))


@dataclass(frozen=True)
class Shape:
    """S slots of a pool with as many free ones beside; several of them may hold one expert's weights."""

    slots: int
    hidden: int
    ffn: int
    bias: bool = False
    form: SwiGLU | None = None
    replicas: int = 1

    def weights(self, dtype: torch.dtype, device: torch.device) -> LayerWeights:
        """Random weights in pool slots of no order, NaN in every other one."""
        pool, form = self.slots + 3, self.form or SwiGLU()
        order = torch.randperm(pool)[: self.slots].tolist()

        def slab(*sizes: int, scale: float) -> Tensor:
            own = (torch.randn(-(-self.slots // self.replicas), *sizes, device=device) * scale).to(dtype)
            stored = torch.full((pool, *sizes), float("nan"), dtype=dtype, device=device)
            stored[order] = own.repeat_interleave(self.replicas, dim=0)[: self.slots]
            return stored

        return LayerWeights(
            slab(2 * self.ffn, self.hidden, scale=2 * self.hidden**-0.5),
            slab(self.hidden, self.ffn, scale=self.ffn**-0.5),
            slab(2 * self.ffn, scale=0.5) if self.bias else None,
            slab(self.hidden, scale=0.5) if self.bias else None,
            tuple(order),
            activation=lambda inner: plain(inner, form),
            form=form,
        )


def segment_counts(kind: str, rows: int, slots: int) -> list[int]:
    """How many of `rows` rows each slot has."""
    if kind == "one_hot":
        return [rows if slot == slots // 2 else 0 for slot in range(slots)]
    popularity = torch.ones(slots) if kind != "zipf" else 1.0 / torch.arange(1, slots + 1)
    if kind == "half_empty":
        popularity[::2] = 0.0
    drawn = torch.multinomial(popularity, rows, replacement=True) if rows else torch.empty(0, dtype=torch.int64)
    return torch.bincount(drawn, minlength=slots).tolist()


def random_rows(counts: Sequence[int], hidden: int, dtype: torch.dtype, device: torch.device) -> SegmentedRows:
    return SegmentedRows(
        torch.randn(sum(counts), hidden, device=device).to(dtype), tuple(accumulate(counts, initial=0))
    )


def loop(rows: SegmentedRows, weights: LayerWeights) -> Tensor:
    """The oracle: each slot's exact rows in fp32."""
    form = weights.form
    assert form is not None
    out_RD = torch.zeros(rows.rows_RD.shape, device=rows.rows_RD.device)
    for (start, end), own in zip(pairwise(rows.offsets_S1), weights.experts, strict=True):
        if end > start:
            gate_up, down, gate_up_bias, down_bias = (None if one is None else one.float() for one in own)
            assert gate_up is not None and down is not None
            inner = functional.linear(rows.rows_RD[start:end].float(), gate_up, gate_up_bias)
            out_RD[start:end] = functional.linear(plain(inner, form), down, down_bias)
    return out_RD


def run(runner: Runner, rows: SegmentedRows, weights: LayerWeights, spare: int = 3) -> Tensor:
    """The outputs [R, D] of the runner, in whichever mode it works; a masked buffer's padding is NaN."""
    if runner.mode is Mode.NORMAL:
        out = runner.run(rows, weights)
        assert isinstance(out, SegmentedRows) and out.offsets_S1 == rows.offsets_S1
        return out.rows_RD
    counts = [end - start for start, end in pairwise(rows.offsets_S1)]
    hidden = rows.rows_RD.shape[1]
    buffer_SCD = rows.rows_RD.new_full((len(counts), max(counts, default=0) + spare, hidden), float("nan"))
    valid_SC = torch.arange(buffer_SCD.shape[1]) < torch.tensor(counts)[:, None]
    buffer_SCD[valid_SC] = rows.rows_RD
    given_rows: ExpertRows = MaskedRows(buffer_SCD, tuple(counts))
    out = runner.run(given_rows, weights)
    assert isinstance(out, MaskedRows) and out.rows_SCD.shape == buffer_SCD.shape
    return out.rows_SCD[valid_SC]


def error(out_RD: Tensor, wanted_RD: Tensor) -> float:
    """NaN where a row was never written: allocations are poisoned."""
    if wanted_RD.numel() == 0:
        return 0.0
    return float((out_RD.float() - wanted_RD).norm() / wanted_RD.norm())
