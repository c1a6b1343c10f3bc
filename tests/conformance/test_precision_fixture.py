"""The specification's precision scenario (0x0A): six remote rows of placement-v17 through the product's own codecs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ray_moe.dataplane.ledger import RouteRows
from ray_moe.dataplane.precision import (
    FP8,
    DtypeRoles,
    QuantizedRows,
    aligned_rows,
    break_even_width,
    codec_named,
    num_blocks,
    payload_bytes,
    smaller_format,
)
from ray_moe.evidence import LogicalBytes
from ray_moe.kernels.reference import weighted_combine

DATA = Path(__file__).parent / "data"
FIXTURE = json.loads((DATA / "precision.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
COUNTS_PP = json.loads((DATA / "dispatch.json").read_text())["expected"]["count_matrix_rows"]
REMOTE = RouteRows.of(COUNTS_PP).remote


def test_the_remote_rows_are_those_of_the_routes() -> None:
    assert int(REMOTE) == INPUTS["remote_rows"]


@pytest.mark.parametrize("line", EXPECTED["payload_table"], ids=lambda line: str(line["width_elements"]))
def test_the_payload_table(line: dict[str, int]) -> None:
    width = line["width_elements"]
    assert payload_bytes("bf16", REMOTE, width) == LogicalBytes(line["bf16_bytes"])
    assert payload_bytes("fp8_row", REMOTE, width) == LogicalBytes(line["fp8_scale_per_row_bytes"])
    assert payload_bytes("fp8_block", REMOTE, width) == LogicalBytes(line["fp8_scale_per_block_bytes"])


@pytest.mark.parametrize("line", EXPECTED["payload_table"], ids=lambda line: str(line["width_elements"]))
def test_what_the_codecs_send_has_the_size_of_the_table(line: dict[str, int]) -> None:
    width = line["width_elements"]
    rows_ND = torch.ones(int(REMOTE), width, dtype=torch.bfloat16)
    sizes = {
        name: codec_named(name, width, torch.bfloat16).encode(rows_ND).nbytes
        for name in ("native", "fp8_row", "fp8_block")
    }
    assert sizes == {
        "native": line["bf16_bytes"],
        "fp8_row": line["fp8_scale_per_row_bytes"],
        "fp8_block": line["fp8_scale_per_block_bytes"],
    }


def test_data_and_scales_of_the_width_three_rows() -> None:
    quantized = QuantizedRows.of(torch.ones(int(REMOTE), 3), block=3)
    assert quantized.data_ND.nbytes == EXPECTED["width_3_fp8_data_bytes"]
    assert quantized.scales_NB.nbytes == EXPECTED["width_3_scale_bytes"]


@pytest.mark.parametrize("width", INPUTS["widths_elements"])
def test_blocks_and_scale_shapes(width: int) -> None:
    block = INPUTS["scale_block_elements"]
    assert num_blocks(width, block) == DERIVED["blocks_per_row_by_width"][str(width)]
    by_row = QuantizedRows.of(torch.ones(int(REMOTE), width), block=width)
    shapes = EXPECTED["scale_tensor_shapes_per_row"]
    assert list(by_row.data_ND.shape) == [shapes["source_activation"][0], width]
    assert list(by_row.scales_NB.shape) == shapes["source_scale"]
    by_block = QuantizedRows.of(torch.ones(int(REMOTE), width), block)
    assert list(by_block.scales_NB.shape) == [int(REMOTE), DERIVED["blocks_per_row_by_width"][str(width)]]


def test_element_widths() -> None:
    assert torch.bfloat16.itemsize == INPUTS["bf16_element_bytes"]
    assert FP8.itemsize == INPUTS["fp8_element_bytes"]
    assert QuantizedRows.of(torch.ones(1, 1), 1).scales_NB.itemsize == INPUTS["scale_bytes"]


def test_fp8_breaks_even_at_width_four_and_is_smaller_from_five_on() -> None:
    assert break_even_width("fp8_row") == DERIVED["smallest_width_where_fp8_per_row_is_smaller_elements"]
    equal = DERIVED["break_even_width_elements"]
    assert payload_bytes("fp8_row", REMOTE, equal) == payload_bytes("bf16", REMOTE, equal)
    assert [smaller_format(REMOTE, width) for width in (3, equal, equal + 1)] == ["bf16", "bf16", "fp8_row"]
    # A second block costs four bytes when the first has long paid for both.
    assert break_even_width("fp8_block") == equal + 1


def test_alignment_executes_local_rows_and_adds_no_remote_ones() -> None:
    alignment, aligned = EXPECTED["alignment"], aligned_rows(INPUTS["rows_by_slot"], INPUTS["row_alignment_rows"])
    assert int(aligned.useful) == alignment["useful_rows"] == INPUTS["useful_rows"]
    assert int(aligned.executed) == alignment["executed_rows"]
    assert int(aligned.waste) == alignment["waste_rows"]
    assert list(map(int, aligned.executed_S)) == alignment["executed_rows_by_slot"]
    assert int(RouteRows.of(COUNTS_PP).remote) == alignment["remote_rows_unchanged"]


def test_the_six_roles() -> None:
    printed = EXPECTED["dtype_roles"]
    for codec, dispatch in (("native", "bf16"), ("fp8_row", "fp8 with fp32 scales")):
        roles = asdict(DtypeRoles.of("bfloat16", "bfloat16", "origin", codec))
        scales = roles.pop("scales")
        sent = roles.pop("dispatch") + ("" if scales == "none" else f" with {scales} scales")
        assert sent == dispatch
        assert sent in printed["dispatch_activation"].split(" or ")
        assert roles == {
            "router": printed["router_logits_and_topk"],
            "expert_arithmetic": printed["expert_arithmetic"],
            "returned_row": printed["returned_expert_row"],
            "gate": printed["route_gate"],
            "accumulation": printed["token_accumulation"],
        }


def test_the_gate_follows_the_expert() -> None:
    case = DERIVED["gate_position"]
    x, gate = torch.tensor([[float(case["x"])]]), torch.tensor([[case["gate"]]])
    assert case["expert"] == torch.square.__name__
    at_origin = weighted_combine(torch.square(x), gate, 1, torch.float32)
    at_expert = weighted_combine(torch.square(x) * gate, None, 1, torch.float32)
    at_input = weighted_combine(torch.square(x * gate), None, 1, torch.float32)
    assert at_origin.item() == at_expert.item() == case["gate_after_expert"]
    assert at_input.item() == case["gate_before_expert"] != case["gate_after_expert"]


def test_scales_follow_their_rows_through_the_permutation() -> None:
    case = DERIVED["scale_permutation"]
    data_ND = torch.tensor(case["quantized_rows"], dtype=torch.float32).to(FP8)
    quantized = QuantizedRows(data_ND, torch.tensor(case["scale_by_row"])[:, None], block=data_ND.shape[1])
    order_N = torch.tensor(case["packed_position_to_row"])
    correct = torch.tensor(case["correct_dequantized"], dtype=torch.float32)
    assert torch.equal(quantized.permuted(order_N).dequantized(torch.float32), correct)
    # On the wire there is nothing to permute apart.
    arrived = codec_named("fp8_row", data_ND.shape[1], torch.bfloat16).decode(quantized.pack()[order_N], torch.float32)
    assert torch.equal(arrived, correct)
    # The mistake has the same shapes and other values.
    wrong = QuantizedRows(quantized.permuted(order_N).data_ND, quantized.scales_NB, quantized.block)
    assert wrong.dequantized(torch.float32).tolist() == case["token_major_scale_wrong"]
