"""The specification's eight rows in six segments (0x04A to 0x04F), through the product's runners."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.dataplane.block_sparse import BlockTopology
from ray_moe.dataplane.ledger import DESCRIPTOR_BYTES
from ray_moe.dataplane.rows import MaskedRows, SegmentedRows
from ray_moe.dataplane.runners import (
    BLOCK_ROWS,
    BlockSparse,
    CapacityPadded,
    Grouped,
    LayerWeights,
    MaskedDecode,
    Runner,
    Work,
)
from ray_moe.errors import RunnerError
from ray_moe.kernels.reference import weighted_combine

DATA = Path(__file__).parent / "data"
FIXTURE = json.loads((DATA / "runners.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
PLACEMENT = json.loads((DATA / INPUTS["placement_fixture"]).read_text())["inputs"]

HIDDEN, FFN = INPUTS["hidden_width_elements"], INPUTS["ffn_width_elements"]
ROWS_BY_SLOT: list[list[str]] = INPUTS["rows_by_slot"]
COUNTS = [len(rows) for rows in ROWS_BY_SLOT]
ROUTES = {route["route_id"]: route for route in PLACEMENT["routes_in_semantic_order"]}
VALUES = {(row["origin_partition"], row["origin_token_row"]): row["values"] for row in PLACEMENT["hidden_rows"]}
CAPACITY, ALIGNMENT = INPUTS["padded"]["capacity_rows"], INPUTS["padded"]["row_alignment_rows"]
BLOCK = (INPUTS["block_sparse"]["block_rows"], INPUTS["block_sparse"]["block_columns"])
# Decimal gates in fp32: relative 2^-23 on sums of two.
TOLERANCE: dict[str, Any] = {"atol": 0.0, "rtol": 1e-6}

PADDED, GROUPED, SPARSE = CapacityPadded(CAPACITY, ALIGNMENT), Grouped(), BlockSparse(*BLOCK)
MASKED = MaskedDecode(CAPACITY)
EVERY: dict[str, Runner] = {runner.name: runner for runner in (PADDED, GROUPED, SPARSE, MASKED)}


# -- The fixture as the product's own inputs


def six_segments() -> SegmentedRows:
    named = [ROUTES[name] for rows in ROWS_BY_SLOT for name in rows]
    rows_RD = [VALUES[route["origin_partition"], route["origin_token_row"]] for route in named]
    return SegmentedRows(torch.tensor(rows_RD, dtype=torch.float32), tuple(accumulate(COUNTS, initial=0)))


def six_buffers() -> MaskedRows:
    buffer_SCD = torch.full((len(COUNTS), CAPACITY, HIDDEN), torch.nan)
    for slot, segment in enumerate(six_segments().rows_RD.split(COUNTS)):
        buffer_SCD[slot, : len(segment)] = segment
    return MaskedRows(buffer_SCD, tuple(COUNTS))


def scaling_experts() -> LayerWeights:
    """E(x) = scale * x: the first projection copies a row into the FFN width, the second scales it on its way back."""
    expert_of = {slot["physical_slot_id"]: slot["logical_expert_id"] for slot in PLACEMENT["slots_in_manifest_order"]}
    num_slots = len(INPUTS["slots_in_order"])
    # Storage runs against dispatch order, so that neither order can pass for the other.
    pool_slots = tuple(reversed(range(num_slots)))
    gate_up, down = torch.zeros(num_slots, 2 * FFN, HIDDEN), torch.zeros(num_slots, HIDDEN, FFN)
    gate_up[:, :HIDDEN] = torch.eye(HIDDEN)
    for slot, pool_slot in zip(INPUTS["slots_in_order"], pool_slots, strict=True):
        scale = INPUTS["expert_scale_by_logical_expert"][expert_of[slot]]
        down[pool_slot, :, :HIDDEN] = scale * torch.eye(HIDDEN)
    return LayerWeights(gate_up, down, None, None, pool_slots, activation=lambda inner: inner[..., :FFN])


def outputs_of(runner: Runner) -> dict[str, Tensor]:
    """What the runner makes of each route's row."""
    out = runner.run(six_buffers() if runner is MASKED else six_segments(), scaling_experts())
    if isinstance(out, SegmentedRows):
        segments: Sequence[Tensor] = out.rows_RD.split(COUNTS)
    else:
        segments = [out.rows_SCD[slot, :count] for slot, count in enumerate(out.counts_S)]
    return {
        name: row
        for names, segment in zip(ROWS_BY_SLOT, segments, strict=True)
        for name, row in zip(names, segment, strict=True)
    }


every_runner = pytest.mark.parametrize("runner", EVERY.values(), ids=EVERY.keys())


# -- One function


@every_runner
def test_every_row_comes_out_of_its_own_expert(runner: Runner) -> None:
    outputs = outputs_of(runner)
    assert sorted(outputs) == sorted(ROUTES)
    for name, row in EXPECTED["sample_expert_outputs"].items():
        assert outputs[name].tolist() == row
    for name, route in ROUTES.items():
        scale = INPUTS["expert_scale_by_logical_expert"][route["logical_expert_id"]]
        values = VALUES[route["origin_partition"], route["origin_token_row"]]
        assert outputs[name].tolist() == [scale * value for value in values]


@every_runner
def test_every_runner_recovers_the_combined_outputs(runner: Runner) -> None:
    outputs = outputs_of(runner)
    rows_ND = torch.stack([outputs[name] for name in ROUTES])  # semantic order: tokens, then route slots
    gates_TK = torch.tensor([route["combine_gate"] for route in ROUTES.values()]).view(-1, PLACEMENT["top_k"])
    combined_TD = weighted_combine(rows_ND, gates_TK, PLACEMENT["top_k"], torch.float32)
    for token, row in zip(EXPECTED["combined_outputs"].values(), combined_TD, strict=True):
        torch.testing.assert_close(row, torch.tensor(token, dtype=torch.float32), **TOLERANCE)


# -- Three ledgers


def ledgers() -> Iterator[tuple[dict[str, Any], Work]]:
    for section, runner in (("padded", PADDED), ("grouped", GROUPED), ("block_sparse", SPARSE)):
        yield EXPECTED[section], runner.work(COUNTS, HIDDEN, FFN)


def test_counts_and_offsets_are_those_of_the_dispatch() -> None:
    assert EXPECTED["counts_rows"] == COUNTS
    assert list(six_segments().offsets_S1) == EXPECTED["offsets_rows"]


def test_executed_rows_values_and_flops_of_each_runner_are_as_printed() -> None:
    for expected, work in ledgers():
        assert work.padding.useful.value == EXPECTED["useful_rows"]
        assert work.executed.value == expected["executed_rows"]
        assert work.utilization == Fraction(*expected["row_utilization"])
        assert work.input_values == expected["input_values"]
        assert work.intermediate_values == expected["intermediate_values"]
        assert int(work.matmul_flops) == expected["matmul_flops"]
    assert int(GROUPED.work(COUNTS, HIDDEN, FFN).matmul_flops) == EXPECTED["useful_matmul_flops"]


def test_capacity_and_alignment_rows_are_two_counters() -> None:
    expected, work = EXPECTED["padded"], PADDED.work(COUNTS, HIDDEN, FFN)
    assert work.padding.useful.value + work.padding.capacity_unused.value == expected["capacity_row_slots"]
    assert work.padding.capacity_unused.value == expected["capacity_unused_rows"]
    assert work.padding.alignment_only.value == expected["alignment_only_rows"]
    assert work.executed.value - work.padding.useful.value == expected["non_useful_rows"]
    assert work.executed.value == len(COUNTS) * expected["stride_rows"]
    assert work.padding.block_fringe.value == 0
    assert work.state_bytes.value == expected["executed_rows"]  # one byte a row of the valid-row mask


def test_the_grouped_runner_has_one_descriptor_for_each_active_slot() -> None:
    expected, declared = EXPECTED["grouped"], INPUTS["grouped"]
    assert len(declared["descriptor_fields"]) * declared["descriptor_field_bytes"] == DESCRIPTOR_BYTES
    assert GROUPED.work(COUNTS, HIDDEN, FFN).state_bytes.value == expected["descriptor_bytes"]
    # A slot without rows has no problem and keeps its place among the counts.
    with_empty = GROUPED.work([0, *COUNTS, 0], HIDDEN, FFN)
    assert with_empty.state_bytes.value == expected["descriptor_bytes"]
    assert with_empty.executed.value == expected["executed_rows"]
    rows_of_each_product: list[int] = []
    weights = scaling_experts()

    def noting(inner: Tensor) -> Tensor:
        rows_of_each_product.append(inner.shape[0])
        return weights.activation(inner)

    GROUPED.run(six_segments(), LayerWeights(weights.gate_up, weights.down, None, None, weights.pool_slots, noting))
    assert rows_of_each_product == expected["problem_m_rows"]


def test_the_three_kinds_of_extra_rows_answer_three_questions() -> None:
    padded, sparse = PADDED.work(COUNTS, HIDDEN, FFN), SPARSE.work(COUNTS, HIDDEN, FFN)
    assert {
        "capacity_padding_slots": padded.padding.useful.value + padded.padding.capacity_unused.value,
        "alignment_padding_executed_slots": padded.executed.value,
        "block_fringe_executed_slots": sparse.executed.value,
    } == EXPECTED["extra_row_contracts"]
    assert sparse.padding.block_fringe.value == EXPECTED["block_sparse"]["fringe_rows"]
    assert sparse.padding.capacity_unused.value == sparse.padding.alignment_only.value == 0


# -- The topology


def vectors(topology: BlockTopology) -> dict[str, list[int]]:
    return {
        "row_offsets": list(topology.row_offsets),
        "column_indices": list(topology.column_indices),
        "row_indices": list(topology.row_indices),
        "transpose_indices": list(topology.transpose_indices),
    }


def test_the_topology_of_the_six_segments_is_as_printed() -> None:
    expected, topology = EXPECTED["block_sparse"], SPARSE.topology(six_segments(), scaling_experts())
    found, offsets = vectors(topology), list(topology.padded_offsets_S1)
    assert offsets == expected["padded_offsets_rows"]
    assert offsets[1:] == DERIVED["padded_bins_inclusive_rows"]
    assert [end - start for start, end in pairwise(offsets)] == expected["padded_rows_by_slot"]
    assert topology.fringe_rows == expected["fringe_rows"]
    assert topology.column_blocks == expected["column_blocks_per_row_block"]
    assert len(found["row_offsets"]) - 1 == expected["row_blocks"]
    assert len(found["column_indices"]) == expected["nonzero_blocks"]
    assert found == {name: DERIVED[name] for name in found}
    assert {f"{name}_count": len(indices) for name, indices in found.items()}.items() <= expected.items()
    assert sum(map(len, found.values())) == expected["topology_index_count"]
    assert SPARSE.work(COUNTS, HIDDEN, FFN).state_bytes.value == expected["topology_bytes"]


def test_the_topology_of_a_slot_with_two_blocks_and_of_one_with_none_is_as_derived() -> None:
    example = DERIVED["multi_block_example"]
    given = example["inputs"]
    topology = BlockTopology(
        17,
        tuple(given["counts_rows"]),
        given["ffn_width_elements"],
        given["block_rows"],
        given["block_columns"],
        torch.device("cpu"),
    )
    assert topology.padded_offsets_S1 == tuple(accumulate(example["padded_rows_by_slot"], initial=0))
    found = vectors(topology)
    assert found == {name: example[name] for name in found}


# -- What is refused, and what is not claimed


@pytest.mark.parametrize("case", FIXTURE["negative_cases"], ids=lambda case: case["case"])
def test_a_negative_case_is_refused_by_its_name(case: dict[str, Any]) -> None:
    assert case["runner"] == "padded"
    small = CapacityPadded(case["change"]["capacity_rows"], ALIGNMENT)
    with pytest.raises(RunnerError) as refused:
        small.run(six_segments(), scaling_experts())
    assert refused.value.reason == case["expected_reason"]
    with pytest.raises(RunnerError) as unplanned:
        small.work(COUNTS, HIDDEN, FFN)
    assert unplanned.value.reason == case["expected_reason"]


def test_the_small_block_is_the_fixtures_and_the_default_is_the_pinned_one() -> None:
    claims = FIXTURE["non_claims"]
    assert BLOCK[0] == claims["toy_block_rows"]
    assert BlockSparse().block_rows == BLOCK_ROWS == claims["production_block_rows_of_pinned_dropless_source"]
