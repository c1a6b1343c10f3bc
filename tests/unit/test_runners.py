"""Runners: one function in several representations, equal to a loop over rows; and the accounting of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.dataplane.block_sparse import BlockTopology
from ray_moe.dataplane.rows import ExpertRows, MaskedRows, Mode, SegmentedRows
from ray_moe.dataplane.runners import (
    RUNNERS,
    BlockSparse,
    CapacityPadded,
    Grouped,
    LayerWeights,
    MaskedDecode,
    Runner,
    runner_named,
)
from ray_moe.errors import ConfigError, RunnerError
from tests.layers import Experts, placement, slot_map, spec_of, swiglu, untimed

HIDDEN, FFN = 6, 4
# fp32: sums of at most six products of size one, a few roundings of 2^-24 each.
FP32: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
# bf16 has 8 bits: two roundings of 2^-9 each on sums of about six products of size one. fp16 has 11.
BF16: dict[str, Any] = {"atol": 2e-2, "rtol": 2e-2}

# Every runner, with padding of every kind.
EVERY: dict[str, Runner] = {
    "grouped": Grouped(),
    "capacity_padded": CapacityPadded(),
    "capacity_padded, fixed and aligned": CapacityPadded(capacity=19, alignment=4),
    "block_sparse": BlockSparse(),
    "block_sparse, small blocks": BlockSparse(block_rows=2, block_columns=2),
    "masked_decode": MaskedDecode(),
}
every_runner = pytest.mark.parametrize("runner", EVERY.values(), ids=EVERY.keys())


def pool(slots: tuple[int, ...], *, bias: bool = False, dtype: torch.dtype = torch.float32) -> LayerWeights:
    """Weights in the named pool slots, NaN in every other one."""
    experts = Experts.random(max(slots, default=0) + 2, HIDDEN, FFN, bias=bias, dtype=dtype)
    unused = [slot for slot in range(experts.down.shape[0]) if slot not in slots]
    for tensor in (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias):
        if tensor is not None:
            tensor[unused] = torch.nan
    return LayerWeights(
        experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias, slots, activation=swiglu
    )


def offsets_of(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))


def random_rows(counts: Sequence[int], dtype: torch.dtype = torch.float32) -> SegmentedRows:
    return SegmentedRows(torch.randn(sum(counts), HIDDEN).to(dtype), offsets_of(counts))


def masked(rows: SegmentedRows, *, spare: int = 2, filler: float = torch.nan) -> MaskedRows:
    """The same rows in a buffer with room for `spare` more in each slot, all of it poisoned."""
    counts = [end - start for start, end in pairwise(rows.offsets_S1)]
    buffer_SCD = rows.rows_RD.new_full((len(counts), max(counts, default=0) + spare, rows.rows_RD.shape[1]), filler)
    for slot, (start, end) in enumerate(pairwise(rows.offsets_S1)):
        buffer_SCD[slot, : end - start] = rows.rows_RD[start:end]
    return MaskedRows(buffer_SCD, tuple(counts))


def run(runner: Runner, rows: SegmentedRows, weights: LayerWeights) -> Tensor:
    """The outputs [R, D] of the runner, in whichever mode it works; layout and type stay as they were given."""
    given_rows: ExpertRows = masked(rows) if runner.mode is Mode.LOW_LATENCY else rows
    out = runner.run(given_rows, weights)
    assert type(out) is type(given_rows)
    if isinstance(out, SegmentedRows):
        assert out.offsets_S1 == rows.offsets_S1
        return out.rows_RD
    assert isinstance(given_rows, MaskedRows)
    assert (out.counts_S, out.rows_SCD.shape) == (given_rows.counts_S, given_rows.rows_SCD.shape)
    valid = [out.rows_SCD[slot, :count] for slot, count in enumerate(out.counts_S)]
    return torch.cat(valid) if valid else torch.empty_like(rows.rows_RD)


def loop(rows: SegmentedRows, weights: LayerWeights) -> Tensor:
    """The oracle: one row at a time, in fp32."""
    out_RD = torch.zeros(rows.rows_RD.shape)
    for local, pool_slot in enumerate(weights.pool_slots):
        for row in range(rows.offsets_S1[local], rows.offsets_S1[local + 1]):
            inner = weights.gate_up[pool_slot].float() @ rows.rows_RD[row].float()
            if weights.gate_up_bias is not None:
                inner = inner + weights.gate_up_bias[pool_slot].float()
            outer = weights.down[pool_slot].float() @ swiglu(inner)
            if weights.down_bias is not None:
                outer = outer + weights.down_bias[pool_slot].float()
            out_RD[row] = outer
    return out_RD


# -- One function


@every_runner
@untimed
@given(
    st.lists(st.integers(0, 5), max_size=5).flatmap(
        lambda counts: st.tuples(st.just(counts), st.permutations(range(len(counts) + 1)), st.booleans())
    )
)
def test_a_runner_is_the_loop_over_rows(runner: Runner, case: tuple[list[int], list[int], bool]) -> None:
    counts, slots, bias = case
    weights, rows = pool(tuple(slots[: len(counts)]), bias=bias), random_rows(counts)
    out = run(runner, rows, weights)
    assert out.shape == rows.rows_RD.shape
    torch.testing.assert_close(out, loop(rows, weights), **FP32)


SHAPES = {
    "no slots": [],
    "one empty slot": [0],
    "no rows": [0, 0, 0],
    "one slot": [4],
    "one-hot": [0, 0, 7, 0],
    "skewed": [17, 1, 0, 2],
    "empty first": [0, 3, 1],
    "empty last": [3, 1, 0],
    "whole blocks": [2, 4, 2],
}


@every_runner
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("counts", SHAPES.values(), ids=SHAPES.keys())
def test_segments_may_be_empty_or_skewed_at_any_place(runner: Runner, bias: bool, counts: list[int]) -> None:
    weights, rows = pool(tuple(reversed(range(len(counts)))), bias=bias), random_rows(counts)
    torch.testing.assert_close(run(runner, rows, weights), loop(rows, weights), **FP32)


@every_runner
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rows_keep_their_dtype_and_stay_near_the_fp32_loop(
    runner: Runner, bias: bool, dtype: torch.dtype
) -> None:
    weights, rows = pool((2, 0, 1), bias=bias, dtype=dtype), random_rows([3, 0, 5], dtype)
    out = run(runner, rows, weights)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), loop(rows, weights), **BF16)


@every_runner
def test_a_bias_is_added_to_the_rounded_product_as_transformers_does(runner: Runner) -> None:
    weights = pool((0,), bias=True, dtype=torch.bfloat16)
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    rows = random_rows([19], torch.bfloat16)
    inner = functional.linear(rows.rows_RD, weights.gate_up[0]) + weights.gate_up_bias[0]
    expected = functional.linear(swiglu(inner), weights.down[0]) + weights.down_bias[0]
    assert torch.equal(run(runner, rows, weights), expected)
    # A fused bias rounds once less, and the rows here can tell.
    fused = functional.linear(swiglu(inner), weights.down[0], weights.down_bias[0])
    assert not torch.equal(fused, expected)


@every_runner
def test_the_families_own_activation_is_used(runner: Runner) -> None:
    def clamped(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return gate.clamp(max=0.1) * (up + 1)

    plain, rows = pool((1, 0)), random_rows([3, 1])
    out = run(runner, rows, replace(plain, activation=clamped))
    for row, pool_slot in enumerate((1, 1, 1, 0)):
        expected = clamped(rows.rows_RD[row] @ plain.gate_up[pool_slot].T) @ plain.down[pool_slot].T
        torch.testing.assert_close(out[row], expected, **FP32)


@every_runner
def test_the_rows_that_were_given_are_left_as_they_were(runner: Runner) -> None:
    weights, rows = pool((0, 1), bias=True), random_rows([2, 4])
    before = rows.rows_RD.clone()
    run(runner, rows, weights)
    assert torch.equal(rows.rows_RD, before)


# -- Which weights


@every_runner
@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 3, 4), (4, 1, 0), ()], ids=str)
def test_a_new_weight_in_a_slot_is_seen_whatever_the_slots_order(runner: Runner, slots: tuple[int, ...]) -> None:
    weights, rows = pool(slots), random_rows([2] * len(slots))
    run(runner, rows, weights)
    weights.down.mul_(2)  # the slabs keep their addresses: whoever fills a slot does so under everybody's views
    torch.testing.assert_close(run(runner, rows, weights), loop(rows, weights), **FP32)


def test_consecutive_slots_are_read_where_they_lie_and_others_are_gathered() -> None:
    consecutive, scattered = pool((1, 2, 3)), pool((3, 0, 1))
    assert consecutive.gate_up[consecutive.stack].data_ptr() == consecutive.gate_up[1].data_ptr()
    assert torch.equal(scattered.gate_up[scattered.stack], scattered.gate_up[[3, 0, 1]])


def test_local_slots_are_in_dispatch_order_whatever_the_pool_slots() -> None:
    snapshot = placement([(2, 0), (0, 1), (1, 0)], spec_of((0, 1)))
    slots = slot_map(snapshot, 0)
    experts = Experts.random(3, HIDDEN, FFN)
    weights = experts.slabs(slots, snapshot, 0)
    assert weights.pool_slots == (1, 0)
    assert [torch.equal(weights.experts[local][1], experts.down[expert]) for local, expert in ((0, 2), (1, 1))] == [
        True,
        True,
    ]


# -- Topology


def topology_of(counts: Sequence[int], block_rows: int, block_columns: int, ffn: int = FFN) -> BlockTopology:
    return BlockTopology(1, tuple(counts), ffn, block_rows, block_columns, torch.device("cpu"))


@untimed
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_the_topology_is_the_dense_block_diagonal_matrix(counts: list[int], block_rows: int, columns: int) -> None:
    topology = topology_of(counts, block_rows, columns)
    per_slot = FFN // columns
    row_blocks = [slot for slot, count in enumerate(counts) for _ in range(-(-count // block_rows))]
    dense = [[column // per_slot == slot for column in range(len(counts) * per_slot)] for slot in row_blocks]
    nonzero = [(row, column) for row, line in enumerate(dense) for column, there in enumerate(line) if there]
    assert list(zip(topology.row_indices, topology.column_indices, strict=True)) == nonzero
    starts = topology.row_offsets
    assert [list(topology.column_indices[a:b]) for a, b in pairwise(starts)] == [
        [column for column, there in enumerate(line) if there] for line in dense
    ]
    by_column = sorted(nonzero, key=lambda block: (block[1], block[0]))
    assert [nonzero[block] for block in topology.transpose_indices] == by_column


@untimed
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 4))
def test_scatter_undoes_gather_and_the_fringe_is_zero(counts: list[int], block_rows: int) -> None:
    topology, rows_RD = topology_of(counts, block_rows, 1), torch.rand(sum(counts), HIDDEN) + 1
    blocked_RD = topology.gather(rows_RD)
    assert blocked_RD.shape[0] == topology.padded_offsets_S1[-1] == sum(counts) + topology.fringe_rows
    assert torch.equal(topology.scatter(blocked_RD), rows_RD)
    assert int((blocked_RD == 0).all(dim=1).sum()) == topology.fringe_rows
    panels = dict(topology.panels(blocked_RD))
    assert list(panels) == [slot for slot, count in enumerate(counts) if count]
    for slot, panel in panels.items():
        assert panel.shape[0] % block_rows == 0
        assert torch.equal(panel[: counts[slot]], rows_RD[sum(counts[:slot]) :][: counts[slot]])


def test_a_topology_is_used_again_only_under_its_own_generation_and_counts() -> None:
    runner, weights, rows = BlockSparse(block_rows=2), pool((0, 1)), random_rows([3, 1])
    kept = runner.topology(rows, weights)
    assert runner.topology(random_rows([3, 1]), weights) is kept
    assert runner.topology(rows, replace(weights, generation=1)) is not kept
    assert runner.topology(random_rows([1, 3]), weights).counts_S == (1, 3)


@pytest.mark.parametrize(("ffn", "columns"), [(768, 128), (32, 32), (200, 8), (11, 1)])
def test_a_column_block_divides_the_ffn_width_unless_one_is_given(ffn: int, columns: int) -> None:
    weights = replace(pool((0,)), down=torch.zeros(1, HIDDEN, ffn))
    assert BlockSparse().topology(random_rows([1]), weights).block_columns == columns
    with pytest.raises(ConfigError, match=rf"divide the FFN width {ffn}, found 128 x 7"):
        BlockSparse(block_columns=7).topology(random_rows([1]), weights)


# -- Accounting


@every_runner
@untimed
@given(st.lists(st.integers(0, 19), max_size=5))
def test_executed_rows_are_the_useful_rows_and_the_padding_of_each_kind(runner: Runner, counts: list[int]) -> None:
    runner = MaskedDecode(capacity=19) if isinstance(runner, MaskedDecode) else runner
    work = runner.work(counts, HIDDEN, FFN)
    padding = work.padding.capacity_unused.value + work.padding.alignment_only.value + work.padding.block_fringe.value
    assert work.padding.useful.value == sum(counts)
    assert work.executed.value == sum(counts) + padding
    assert work.utilization == (Fraction(sum(counts), work.executed.value) if work.executed.value else 1)
    assert work.input_values == work.executed.value * HIDDEN
    assert work.intermediate_values == work.executed.value * FFN
    assert int(work.matmul_flops) == 6 * work.executed.value * HIDDEN * FFN


@every_runner
@pytest.mark.parametrize("counts", SHAPES.values(), ids=SHAPES.keys())
def test_as_many_rows_reach_the_activation_as_are_accounted_for(runner: Runner, counts: list[int]) -> None:
    weights, executed = pool(tuple(range(len(counts)))), 0

    def counting(inner: Tensor) -> Tensor:
        nonlocal executed
        executed += inner.numel() // inner.shape[-1]
        return swiglu(inner)

    run(runner, random_rows(counts), replace(weights, activation=counting))
    accountant = MaskedDecode(max(counts, default=0) + 2) if isinstance(runner, MaskedDecode) else runner
    assert accountant.work(counts, HIDDEN, FFN).executed.value == executed


@untimed
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_topology_bytes_are_those_of_the_index_vectors(counts: list[int], block_rows: int, columns: int) -> None:
    topology = topology_of(counts, block_rows, columns)
    vectors = (topology.row_offsets, topology.column_indices, topology.row_indices, topology.transpose_indices)
    work = BlockSparse(block_rows, columns).work(counts, HIDDEN, FFN)
    assert work.state_bytes.value == 4 * sum(map(len, vectors))
    assert work.padding.block_fringe.value == topology.fringe_rows


# -- Choice and refusals


def test_runners_are_named_and_an_unknown_name_lists_them() -> None:
    assert [runner_named(name).name for name in RUNNERS] == list(RUNNERS)
    assert {name: type(runner_named(name)) for name in RUNNERS} == RUNNERS
    with pytest.raises(ConfigError, match=r"block_sparse, capacity_padded, grouped, masked_decode, found 'walking'"):
        runner_named("walking")


def test_each_runner_takes_the_options_that_it_has() -> None:
    chosen = {name: runner_named(name, capacity=5, alignment=4, block_rows=16) for name in RUNNERS}
    counts = [1, 5, 0]
    executed = {name: runner.work(counts, HIDDEN, FFN).executed.value for name, runner in chosen.items()}
    assert executed == {"grouped": 6, "capacity_padded": 3 * 8, "block_sparse": 2 * 16, "masked_decode": 3 * 5}


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("capacity_padded", "capacity"),
        ("capacity_padded", "alignment"),
        ("block_sparse", "block_rows"),
        ("masked_decode", "capacity"),
    ],
)
def test_an_option_under_its_bound_is_named(name: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be at least 1, found 0"):
        runner_named(name, **{option: 0})


@every_runner
def test_rows_for_more_or_fewer_slots_are_refused(runner: Runner) -> None:
    for counts in ([1, 2], [1, 0, 2, 0]):
        with pytest.raises(RunnerError, match=rf"^slots_do_not_match_segments: {len(counts)} segments for 3 slots"):
            run(runner, random_rows(counts), pool((0, 1, 2)))


@pytest.mark.parametrize("name", [name for name in RUNNERS if name != "masked_decode"])
def test_rows_beyond_the_last_segment_are_refused_not_dropped(name: str) -> None:
    rows = SegmentedRows(torch.randn(5, HIDDEN), (0, 2, 4))
    with pytest.raises(RunnerError, match=r"^segments_do_not_cover_rows: the segments end at row 4, there are 5 rows"):
        runner_named(name).run(rows, pool((0, 1)))


def test_a_masked_runner_of_one_capacity_takes_no_buffer_of_another() -> None:
    rows, weights = masked(random_rows([1, 3]), spare=1), pool((0, 1))
    assert MaskedDecode(4).run(rows, weights).counts_S == (1, 3)
    with pytest.raises(RunnerError, match=r"^capacity_mismatch: the buffer holds 4 rows a slot, not 8"):
        MaskedDecode(8).run(rows, weights)


def test_a_masked_runner_that_knows_no_capacity_accounts_for_the_fullest_slots() -> None:
    assert MaskedDecode().work([1, 3], HIDDEN, FFN).executed.value == 2 * 3
