"""Runners: one function, several physical representations (specification 0x04, 0x06E, 0x06F).

A runner computes SwiGLU-style experts over the rows of one mode, and answers with rows of the same layout. It sees no
gate. Padding rows never acquire identity: they exist only inside a runner. Letters: R rows, S this peer's slots,
C capacity, D hidden, F FFN.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import gcd
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from ray_moe.dataplane.block_sparse import INDEX_BYTES, BlockTopology, align_up, topology_indices
from ray_moe.dataplane.layer_weights import LayerWeights
from ray_moe.dataplane.ledger import DESCRIPTOR_BYTES, MatmulFlops, Padding, swiglu_matmul_flops
from ray_moe.dataplane.precision import aligned_rows
from ray_moe.dataplane.rows import ExpertRows, MaskedRows, Mode, SegmentedRows, require_mode
from ray_moe.errors import ConfigError, RunnerError
from ray_moe.evidence import LogicalBytes, RowSlots

_LOG = logging.getLogger(__name__)

# Rows and the most columns of a sparse block: the block size of MegaBlocks at revision 952db33.
BLOCK_ROWS = BLOCK_COLUMNS = 128

# State of a call in its declared schema: m, n, k and five offsets for each problem; one byte a row of a mask; one
# INT64 count a slot.
MASK_BYTES, COUNT_BYTES = 1, 8


@dataclass(frozen=True)
class Work:
    """What one call of a runner executes and keeps: accounting, and no statement about time (specification 0x04F).

    `state_bytes` is the runner's own state in its declared schema: mask, descriptor table, topology or counts.
    """

    padding: Padding
    hidden: int
    ffn: int
    state_bytes: LogicalBytes

    @property
    def executed(self) -> RowSlots:
        """Useful rows and all padding."""
        return self.padding.executed

    @property
    def utilization(self) -> Fraction:
        """Useful over executed rows; 1 where nothing is executed."""
        return Fraction(int(self.padding.useful), int(self.executed)) if int(self.executed) else Fraction(1)

    @property
    def input_values(self) -> int:
        """Scalars of the executed rows."""
        return int(self.executed) * self.hidden

    @property
    def intermediate_values(self) -> int:
        """Scalars between activation and second projection."""
        return int(self.executed) * self.ffn

    @property
    def matmul_flops(self) -> MatmulFlops:
        """Gate, up and down products at two FLOPs a multiply-add; the activation is not in it."""
        return swiglu_matmul_flops(self.executed, self.hidden, self.ffn)


class Runner(Protocol):
    """Runs every local slot's expert over its own rows.

    `run` takes the rows of its `mode`, empty slots in their places, and returns a new object of the same type and
    layout with the outputs. It raises `StageError` for rows of the other mode, `RunnerError` for rows that are not laid
    out over these slots or do not fit; no row is ever dropped. `work` is the accounting of one call with these counts.
    `fallback` is why torch computes on a CUDA device what kernels should; None where that is not so.
    """

    fallback: str | None

    @property
    def name(self) -> str: ...

    @property
    def mode(self) -> Mode: ...

    def run(self, rows: ExpertRows, weights: LayerWeights) -> ExpertRows: ...

    def work(self, counts_S: Sequence[int], hidden: int, ffn: int) -> Work: ...


class Grouped:
    """One product per non-empty segment, exact rows (0x04C)."""

    name, mode = "grouped", Mode.NORMAL
    fallback: str | None = None

    def run(self, rows: ExpertRows, weights: LayerWeights) -> SegmentedRows:
        segments = _segmented(rows, weights, self.name)
        if segments.rows_RD.shape[0] == 0:
            return SegmentedRows(torch.empty_like(segments.rows_RD), segments.offsets_S1)
        return SegmentedRows(self._experts(segments, weights), segments.offsets_S1)

    def _experts(self, segments: SegmentedRows, weights: LayerWeights) -> Tensor:
        """The outputs of at least one row."""
        rows_RD, activation = segments.rows_RD, weights.activation
        outputs = [
            _affine(activation(_affine(rows_RD[start:end], gate_up, gate_up_bias)), down, down_bias)
            for (gate_up, down, gate_up_bias, down_bias), (start, end) in zip(
                weights.experts, pairwise(segments.offsets_S1), strict=True
            )
            if end > start
        ]
        return torch.cat(outputs)

    def work(self, counts_S: Sequence[int], hidden: int, ffn: int) -> Work:
        active = sum(count > 0 for count in counts_S)
        state = active * DESCRIPTOR_BYTES
        return Work(Padding(useful=RowSlots(sum(counts_S))), hidden, ffn, LogicalBytes(state))


class CapacityPadded:
    """All slots in one batched product, each padded to the capacity, rounded up to a row alignment (0x04B).

    `capacity` None is the fullest segment of each call: nothing overflows. A given capacity under the largest segment
    is refused with `RunnerError`. `ConfigError` for a capacity or alignment under 1.
    """

    name, mode = "capacity_padded", Mode.NORMAL
    fallback: str | None = None

    def __init__(self, capacity: int | None = None, alignment: int = 1) -> None:
        _require_at_least_1(capacity=capacity, alignment=alignment)
        self.capacity, self.alignment = capacity, alignment

    def run(self, rows: ExpertRows, weights: LayerWeights) -> SegmentedRows:
        segments = _segmented(rows, weights, self.name)
        stride = align_up(_capacity(self.capacity, row_counts(segments)), self.alignment)
        if segments.rows_RD.shape[0] == 0:
            return SegmentedRows(torch.empty_like(segments.rows_RD), segments.offsets_S1)
        return SegmentedRows(self._experts(segments, stride, weights), segments.offsets_S1)

    def _experts(self, segments: SegmentedRows, stride: int, weights: LayerWeights) -> Tensor:
        """The outputs of at least one row, computed in a buffer of `stride` rows a slot."""
        rows_RD, counts_S = segments.rows_RD, row_counts(segments)
        count_S = torch.tensor(counts_S, device=rows_RD.device)
        valid_SC = torch.arange(stride, device=rows_RD.device) < count_S[:, None]
        padded_SCD = rows_RD.new_zeros(len(counts_S), stride, rows_RD.shape[1])
        padded_SCD[valid_SC] = rows_RD
        return _batched(padded_SCD, weights)[valid_SC]

    def work(self, counts_S: Sequence[int], hidden: int, ffn: int) -> Work:
        useful, capacity = sum(counts_S), _capacity(self.capacity, counts_S)
        # A call without rows runs no product, whatever the capacity.
        slots, stride = len(counts_S) if useful else 0, align_up(capacity, self.alignment)
        padding = Padding(
            useful=RowSlots(useful),
            capacity_unused=RowSlots(slots * capacity - useful),
            alignment_only=RowSlots(slots * (stride - capacity)),
        )
        return Work(padding, hidden, ffn, LogicalBytes(slots * stride * MASK_BYTES))


class BlockSparse:
    """Dropless block-diagonal products over whole row blocks; the topology follows from each call's counts (0x04D).

    `block_columns` None is the largest power of two up to 128 that divides F. The last topology is kept, and used again
    only under its own generation and counts. `ConfigError` for a block under 1.
    """

    name, mode = "block_sparse", Mode.NORMAL
    fallback: str | None = None

    def __init__(self, block_rows: int = BLOCK_ROWS, block_columns: int | None = None) -> None:
        _require_at_least_1(block_rows=block_rows, block_columns=block_columns)
        self.block_rows, self.block_columns = block_rows, block_columns
        self._last: BlockTopology | None = None

    def run(self, rows: ExpertRows, weights: LayerWeights) -> SegmentedRows:
        segments = _segmented(rows, weights, self.name)
        return self.run_under(self.topology(segments, weights), segments, weights)

    def topology(self, rows: SegmentedRows, weights: LayerWeights) -> BlockTopology:
        """The topology of these segments under the weights' generation."""
        counts_S, ffn, device = row_counts(rows), weights.down.shape[2], rows.rows_RD.device
        last = self._last
        if last is None or last.device != device or not last.serves(weights.generation, counts_S, ffn):
            last = self._last = BlockTopology(
                weights.generation, counts_S, ffn, self.block_rows, self.columns(ffn), device
            )
        return last

    def run_under(self, topology: BlockTopology, rows: SegmentedRows, weights: LayerWeights) -> SegmentedRows:
        """`run` for who keeps a topology; `RunnerError` when it is of another generation, counts or FFN width."""
        topology.require(weights.generation, row_counts(rows), weights.down.shape[2])
        if rows.rows_RD.shape[0] == 0:
            return SegmentedRows(torch.empty_like(rows.rows_RD), rows.offsets_S1)
        return SegmentedRows(self._experts(topology, rows.rows_RD, weights), rows.offsets_S1)

    def _experts(self, topology: BlockTopology, rows_RD: Tensor, weights: LayerWeights) -> Tensor:
        """The outputs of at least one row, computed in whole blocks."""
        experts = weights.experts
        # The hidden matrix is zero outside a slot's own columns: [blocked rows, F] holds its non-zero blocks.
        inner = [
            _affine(panel, experts[slot][0], experts[slot][2])
            for slot, panel in topology.panels(topology.gather(rows_RD))
        ]
        outer = [
            _affine(panel, experts[slot][1], experts[slot][3])
            for slot, panel in topology.panels(weights.activation(torch.cat(inner)))
        ]
        return topology.scatter(torch.cat(outer))

    def work(self, counts_S: Sequence[int], hidden: int, ffn: int) -> Work:
        rows = aligned_rows(counts_S, self.block_rows)
        entries = topology_indices(counts_S, self.block_rows, ffn // self.columns(ffn))
        state = LogicalBytes(entries * INDEX_BYTES)
        padding = Padding(useful=RowSlots(int(rows.useful)), block_fringe=RowSlots(int(rows.waste)))
        return Work(padding, hidden, ffn, state)

    def columns(self, ffn: int) -> int:
        """Columns of a block for this FFN width."""
        return self.block_columns or gcd(ffn, BLOCK_COLUMNS)


class MaskedDecode:
    """One batched product over a capacity-shaped buffer of low-latency rows (0x05C, 0x06E).

    A row beyond its slot's count is computed with the others and stays in the buffer with an undefined value: it has no
    route. `capacity` is C of the buffers that will come, and others are refused; None takes any buffer, and accounts
    for one that just holds the fullest slot. `ConfigError` for a capacity under 1.
    """

    name, mode = "masked_decode", Mode.LOW_LATENCY
    fallback: str | None = None

    def __init__(self, capacity: int | None = None) -> None:
        _require_at_least_1(capacity=capacity)
        self.capacity = capacity

    def run(self, rows: ExpertRows, weights: LayerWeights) -> MaskedRows:
        masked = _masked(rows, weights, self.name)
        capacity = masked.rows_SCD.shape[1]
        if self.capacity not in (None, capacity):
            raise RunnerError("capacity_mismatch", f"the buffer holds {capacity} rows a slot, not {self.capacity}")
        _capacity(capacity, masked.counts_S)
        return MaskedRows(self._experts(masked, weights), masked.counts_S)

    def _experts(self, masked: MaskedRows, weights: LayerWeights) -> Tensor:
        """The outputs [S, C, D]; rows beyond a slot's count may hold anything."""
        return _batched(masked.rows_SCD, weights)

    def work(self, counts_S: Sequence[int], hidden: int, ffn: int) -> Work:
        useful, slots = sum(counts_S), len(counts_S)
        unused = RowSlots(slots * _capacity(self.capacity, counts_S) - useful)
        padding = Padding(useful=RowSlots(useful), capacity_unused=unused)
        return Work(padding, hidden, ffn, LogicalBytes(slots * COUNT_BYTES))


RUNNERS: dict[str, type[Runner]] = {
    runner.name: runner for runner in (Grouped, CapacityPadded, BlockSparse, MaskedDecode)
}


def runner_named(
    name: str,
    *,
    weights: LayerWeights | None = None,
    capacity: int | None = None,
    alignment: int = 1,
    block_rows: int = BLOCK_ROWS,
) -> Runner:
    """Choose a runner once, at construction; each takes the options that it has. `ConfigError` lists the names.

    For `weights` on a CUDA device it is the one that computes with kernels, for weights of their shapes and form alone.
    Where the kernels do not suit them it is the torch runner all the same, which says why in `fallback` and the log.
    """

    def build(classes: Mapping[str, Callable[..., Runner]]) -> Runner:
        options: dict[str, tuple[int | None, ...]] = {
            Grouped.name: (),
            CapacityPadded.name: (capacity, alignment),
            BlockSparse.name: (block_rows,),
            MaskedDecode.name: (capacity,),
        }
        return classes[name](*options[name])

    if name not in RUNNERS:
        raise ConfigError(f"runner must be one of {', '.join(sorted(RUNNERS))}, found {name!r}")
    runner = build(RUNNERS)
    if weights is None or not weights.down.is_cuda:
        return runner
    try:
        from ray_moe.dataplane import gpu_runners
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "triton":
            raise
        runner.fallback = "triton is not installed"
    else:
        runner.fallback = gpu_runners.refusal(runner, weights)
        if runner.fallback is None:
            return build(gpu_runners.GPU_RUNNERS)
    _warn_once(name, runner.fallback)
    return runner


@cache
def _warn_once(name: str, reason: str) -> None:
    """Layers, generations and buckets choose alike: one line for all."""
    _LOG.warning("runner %s computes in torch, without kernels: %s", name, reason)


# -- Shared by the runners


def _affine(rows_nI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    product_nO = functional.linear(rows_nI, weight_OI)
    # The bias is added after rounding, not fused: that is what transformers does, bit for bit in bf16.
    return product_nO if bias_O is None else product_nO + bias_O


def _batched(rows_SCD: Tensor, weights: LayerWeights) -> Tensor:
    inner = torch.bmm(rows_SCD, weights.gate_up[weights.stack].mT)
    if weights.gate_up_bias is not None:
        inner = inner + weights.gate_up_bias[weights.stack, None]
    outer = torch.bmm(weights.activation(inner), weights.down[weights.stack].mT)
    if weights.down_bias is not None:
        outer = outer + weights.down_bias[weights.stack, None]
    return outer


def _segmented(rows: ExpertRows, weights: LayerWeights, who: str) -> SegmentedRows:
    """Normal rows that are laid out over exactly these slots."""
    require_mode(rows, Mode.NORMAL, who)
    assert isinstance(rows, SegmentedRows)
    _require_slots(len(rows.offsets_S1) - 1, weights)
    if rows.offsets_S1[-1] != rows.rows_RD.shape[0]:
        raise RunnerError(
            "segments_do_not_cover_rows",
            f"the segments end at row {rows.offsets_S1[-1]}, there are {rows.rows_RD.shape[0]} rows",
        )
    return rows


def _masked(rows: ExpertRows, weights: LayerWeights, who: str) -> MaskedRows:
    """Low-latency rows that are laid out over exactly these slots."""
    require_mode(rows, Mode.LOW_LATENCY, who)
    assert isinstance(rows, MaskedRows)
    _require_slots(len(rows.counts_S), weights)
    _require_slots(rows.rows_SCD.shape[0], weights)
    return rows


def _require_slots(found: int, weights: LayerWeights) -> None:
    if found != len(weights.pool_slots):
        raise RunnerError(
            "slots_do_not_match_segments",
            f"{found} segments for {len(weights.pool_slots)} slots; a slot without rows keeps its place",
        )


def row_counts(rows: SegmentedRows) -> tuple[int, ...]:
    return tuple(end - start for start, end in pairwise(rows.offsets_S1))


def _capacity(capacity: int | None, counts_S: Sequence[int]) -> int:
    """The capacity of one call; None is the fullest slot's count. `RunnerError` when a slot has more rows."""
    largest = max(counts_S, default=0)
    if capacity is None:
        return largest
    if largest > capacity:
        raise RunnerError(
            "capacity_below_largest_segment",
            f"slot {list(counts_S).index(largest)} has {largest} rows, the capacity is {capacity}; "
            "another runner must take this call, no row is dropped",
        )
    return capacity


def _require_at_least_1(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, found {value}")
