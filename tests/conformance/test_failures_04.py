"""The mistakes of the runner failure lab (0x04G), and those of 0x06I that a runner meets, each refused or harmless."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from ray_moe.dataplane.block_sparse import BlockTopology
from ray_moe.dataplane.ledger import MatmulFlops
from ray_moe.dataplane.rows import MaskedRows, Mode, SegmentedRows
from ray_moe.dataplane.runners import (
    BLOCK_ROWS,
    RUNNERS,
    BlockSparse,
    CapacityPadded,
    Grouped,
    LayerWeights,
    MaskedDecode,
    Runner,
    runner_named,
)
from ray_moe.errors import EvidenceError, RunnerError, StageError
from ray_moe.evidence import Elapsed, LogicalBytes, Measurement, RowSlots, SourceClaim, Speedup
from ray_moe.routes import Routes
from tests.layers import Experts, placement, slot_map, spec_of, swiglu

HIDDEN, FFN = 4, 2
CPU = torch.device("cpu")
NORMAL = [name for name, runner in RUNNERS.items() if runner_named(name).mode is Mode.NORMAL]


def weights_of(num_slots: int) -> LayerWeights:
    experts = Experts.random(num_slots, HIDDEN, FFN, bias=True)
    slots = tuple(range(num_slots))
    return LayerWeights(experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias, slots, swiglu)


def segments(*counts: int) -> SegmentedRows:
    return SegmentedRows(torch.randn(sum(counts), HIDDEN), tuple(accumulate(counts, initial=0)))


def masked(rows: SegmentedRows, capacity: int, filler: float) -> MaskedRows:
    """The same rows in buffers whose free rows hold `filler`."""
    counts = tuple(end - start for start, end in pairwise(rows.offsets_S1))
    buffer_SCD = torch.full((len(counts), capacity, HIDDEN), filler)
    for slot, segment in enumerate(rows.rows_RD.split(counts)):
        buffer_SCD[slot, : len(segment)] = segment
    return MaskedRows(buffer_SCD, counts)


def valid(rows: MaskedRows) -> Tensor:
    return torch.cat([rows.rows_SCD[slot, :count] for slot, count in enumerate(rows.counts_S)])


def test_fl_04g_01_capacity_below_the_largest_segment_is_refused() -> None:
    rows, weights = segments(1, 3, 0), weights_of(3)
    reason = r"^capacity_below_largest_segment: slot 1 has 3 rows, the capacity is 2"
    with pytest.raises(RunnerError, match=reason):
        CapacityPadded(capacity=2).run(rows, weights)
    with pytest.raises(RunnerError, match=reason):
        CapacityPadded(capacity=2).work([1, 3, 0], HIDDEN, FFN)
    # An alignment that makes room is no capacity: what a kernel rounds up to admits nobody.
    with pytest.raises(RunnerError, match=reason):
        CapacityPadded(capacity=2, alignment=4).run(rows, weights)
    overfull = MaskedRows(torch.zeros(3, 2, HIDDEN), (1, 3, 0))
    with pytest.raises(RunnerError, match=reason):
        MaskedDecode().run(overfull, weights)
    # Another runner takes the same rows, all of them.
    assert Grouped().run(rows, weights).rows_RD.shape[0] == 4


@pytest.mark.parametrize("runner", [Grouped(), CapacityPadded(8, 4), BlockSparse(2)], ids=lambda runner: runner.name)
def test_fl_04g_02_a_padded_row_never_leaves_a_runner(runner: Runner) -> None:
    weights, rows = dataclasses.replace(weights_of(3), gate_up_bias=None), segments(1, 3, 0)
    executed: list[Tensor] = []

    def poisoning(inner: Tensor) -> Tensor:
        executed.append(inner)
        # Zeros go in as padding alone, and come out as NaN.
        return swiglu(inner).masked_fill((inner == 0).all(dim=-1, keepdim=True), torch.nan)

    out = runner.run(rows, dataclasses.replace(weights, activation=poisoning))
    assert isinstance(out, SegmentedRows)
    assert (out.rows_RD.shape, out.offsets_S1) == (rows.rows_RD.shape, rows.offsets_S1)
    assert out.rows_RD.isfinite().all()
    filler = sum(int((inner == 0).all(dim=-1).sum()) for inner in executed)
    work = runner.work([1, 3, 0], HIDDEN, FFN)
    assert filler == work.executed.value - work.padding.useful.value


def test_fl_04g_02_a_masked_buffers_filler_stays_beyond_the_counts() -> None:
    weights, rows = weights_of(3), segments(1, 3, 0)
    out = MaskedDecode().run(masked(rows, 5, torch.nan), weights)
    assert out.counts_S == (1, 3, 0)
    assert torch.equal(valid(out), valid(MaskedDecode().run(masked(rows, 5, 0.0), weights)))
    assert valid(out).isfinite().all()


@pytest.mark.parametrize("name", NORMAL)
def test_fl_04g_03_weights_follow_from_the_slot_that_the_placement_names(name: str) -> None:
    # Storage is numbered against manifest order: whoever reads it by position reads another expert's weights.
    snapshot = placement([(2, 0), (0, 1), (1, 0), (2, 1), (0, 0)], spec_of((0, 1)))
    experts = Experts.random(3, HIDDEN, FFN)
    for rank in (0, 1):
        here = [slot for slot in snapshot.layers[0].slots if slot.destination_rank.value == rank]
        weights = experts.slabs(slot_map(snapshot, rank), snapshot, rank)
        rows = segments(*[1] * len(here))
        out = runner_named(name).run(rows, weights)
        assert isinstance(out, SegmentedRows)
        named = torch.tensor([[slot.logical_expert_id.value] for slot in here])
        own_RD = experts.dense(rows.rows_RD, Routes(named, torch.ones(named.shape)))
        torch.testing.assert_close(out.rows_RD, own_RD, atol=1e-5, rtol=1e-5)
        shifted = dataclasses.replace(weights, pool_slots=weights.pool_slots[::-1])
        wrong = runner_named(name).run(rows, shifted)
        assert isinstance(wrong, SegmentedRows)
        assert wrong.rows_RD.isfinite().all()  # finite, and foreign: only the slot's own identity can tell
        assert not torch.allclose(wrong.rows_RD, out.rows_RD, atol=1e-3)


@pytest.mark.parametrize("name", RUNNERS)
def test_fl_04g_04_an_empty_slot_that_is_left_out_of_the_offsets_is_refused(name: str) -> None:
    runner, weights = runner_named(name), weights_of(3)
    kept, left_out = segments(2, 0, 1), segments(2, 1)
    refusal = r"^slots_do_not_match_segments: 2 segments for 3 slots"
    if runner.mode is Mode.NORMAL:
        out = runner.run(kept, weights)
        assert isinstance(out, SegmentedRows)
        assert out.offsets_S1 == (0, 2, 2, 3)
        with pytest.raises(RunnerError, match=refusal):
            runner.run(left_out, weights)
    else:
        assert runner.run(masked(kept, 2, 0.0), weights) is not None
        with pytest.raises(RunnerError, match=refusal):
            runner.run(masked(left_out, 2, 0.0), weights)


def test_fl_04g_05_bins_of_raw_counts_refuse_rows_gathered_by_rounded_ones() -> None:
    counts, rows_RD = (3, 1), torch.randn(4, HIDDEN)
    raw = BlockTopology(1, counts, FFN, 1, 1, CPU)
    rounded = BlockTopology(1, counts, FFN, 2, 1, CPU)
    blocked_RD = rounded.gather(rows_RD)
    with pytest.raises(RunnerError, match=r"^bins_disagree_with_gather: 6 rows were gathered, the last bin ends at 4"):
        raw.panels(blocked_RD)
    # One rounded vector: the last bin is the number of gathered rows, and no fringe row is a neighbour's data.
    assert rounded.padded_offsets_S1[-1] == blocked_RD.shape[0] == 6
    assert [panel.shape[0] for _, panel in rounded.panels(blocked_RD)] == [4, 2]
    assert rounded.positions_R.tolist() == [0, 1, 2, 4]


def test_fl_04g_06_a_topology_under_other_counts_or_another_generation_is_refused() -> None:
    runner, weights = BlockSparse(block_rows=2), dataclasses.replace(weights_of(2), generation=17)
    kept = runner.topology(segments(3, 1), weights)
    assert runner.run_under(kept, segments(3, 1), weights).rows_RD.shape[0] == 4
    # The same number of rows and of blocks: shapes alone would not tell.
    with pytest.raises(RunnerError, match=r"^stale_topology: .*counts \[3, 1\].*counts \[1, 3\]"):
        runner.run_under(kept, segments(1, 3), weights)
    with pytest.raises(RunnerError, match=r"^stale_topology: built for generation 17.*generation 18"):
        runner.run_under(kept, segments(3, 1), dataclasses.replace(weights, generation=18))
    # On its own the runner follows the counts of each call.
    for counts in ((3, 1), (1, 3), (3, 1)):
        rows = segments(*counts)
        torch.testing.assert_close(
            runner.run(rows, weights).rows_RD, Grouped().run(rows, weights).rows_RD, atol=1e-5, rtol=1e-5
        )


def test_fl_04g_07_a_librarys_block_size_needs_its_file_and_revision() -> None:
    small = BlockSparse(block_rows=2)
    assert (small.block_rows, BlockSparse().block_rows) == (2, BLOCK_ROWS)
    with pytest.raises(EvidenceError, match="a claim about source names its file"):
        SourceClaim("MegaBlocks", "", "", f"blocks of {small.block_rows} rows")


def test_fl_04g_08_fewer_flops_are_no_speed_up() -> None:
    padded, grouped = CapacityPadded(3, 2).work([2, 1], HIDDEN, FFN), Grouped().work([2, 1], HIDDEN, FFN)
    assert grouped.matmul_flops < padded.matmul_flops
    with pytest.raises(EvidenceError, match="a speed-up compares two measured times, found MatmulFlops"):
        Speedup(padded.matmul_flops, grouped.matmul_flops)  # type: ignore[arg-type]
    with pytest.raises(EvidenceError, match="a speed-up compares two measured times, found Work"):
        Speedup(padded, grouped)  # type: ignore[arg-type]
    with pytest.raises(EvidenceError, match="Elapsed needs the measurement that gave it, found Work"):
        Elapsed(float(int(grouped.matmul_flops)), grouped)  # type: ignore[arg-type]
    for value in (padded.executed, padded.utilization, padded.input_values, padded.matmul_flops, padded.state_bytes):
        assert isinstance(value, int | Fraction | RowSlots | LogicalBytes | MatmulFlops)
        assert not isinstance(value, Elapsed | Measurement)


@pytest.mark.parametrize("filler", [torch.nan, torch.inf, 1e30], ids=str)
def test_fl_06i_04_unmasked_filler_gets_no_useful_work(filler: float) -> None:
    weights, rows = weights_of(3), segments(1, 3, 0)
    runner = MaskedDecode(capacity=4)
    assert torch.equal(
        valid(runner.run(masked(rows, 4, filler), weights)), valid(runner.run(masked(rows, 4, 0.0), weights))
    )
    work = runner.work([1, 3, 0], HIDDEN, FFN)
    assert (work.padding.useful, work.executed, work.padding.capacity_unused) == (
        RowSlots(4),
        RowSlots(12),
        RowSlots(8),
    )


@pytest.mark.parametrize("name", RUNNERS)
def test_fl_06i_07_a_runner_refuses_the_rows_of_the_other_mode_whatever_their_shapes(name: str) -> None:
    runner, weights = runner_named(name), weights_of(1)
    # One slot with as many rows as it has room: every width, count and value agrees.
    normal = segments(3)
    low_latency = MaskedRows(normal.rows_RD[None], (3,))
    mine, other = (normal, low_latency) if runner.mode is Mode.NORMAL else (low_latency, normal)
    assert type(runner.run(mine, weights)) is type(mine)
    with pytest.raises(StageError, match=rf"^{name} takes {runner.mode} rows, found {type(other).__name__}"):
        runner.run(other, weights)
