"""FP8 rows and weights: the numbers of the payload codec, whichever device quantizes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ray_moe.dataplane.precision import Fp8Block, QuantizedRows, num_blocks
from ray_moe.kernels import reference_fp8
from ray_moe.kernels.quantize import dequantize_rows, quantize_rows, quantize_weights

FP8 = torch.float8_e4m3fn
TINY = torch.finfo(torch.float32).tiny
# What a row can be made of: scales from the smallest to near the largest, zeros, and a block with one number in it.
MAGNITUDES = (0.0, 1e-42, 1e-37, 1e-5, 1.0, 3e4)


def _rows(rows: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    magnitudes = torch.tensor(MAGNITUDES, device=device)[torch.randint(len(MAGNITUDES), (rows, width), device=device)]
    smooth = torch.randn(rows, width, device=device) * 2.0 ** torch.randint(-9, 9, (rows, 1), device=device)
    mixed = torch.where(torch.rand(rows, 1, device=device) < 0.5, smooth, smooth * magnitudes)
    mixed[:, : width // 2] *= torch.rand(rows, 1, device=device) < 0.8
    return mixed.to(dtype)


def _quantized(rows_ND: Tensor, block: int, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    (rows, width), device = rows_ND.shape, rows_ND.device
    data_ND = torch.empty(rows, width, dtype=dtype, device=device)
    scales_NB = torch.full((rows, num_blocks(width, block)), float("nan"), device=device)
    quantize_rows(rows_ND, data_ND, scales_NB, block)
    return data_ND, scales_NB


def test_worked_examples(device: torch.device) -> None:
    rows_ND = torch.tensor([[448.0, -224.0, 0.0, 1.0]], device=device)
    data_ND, scales_NB = _quantized(rows_ND, 2)
    assert data_ND.float().tolist() == [[448, -224, 0, 448]]
    assert scales_NB.tolist() == torch.tensor([[1.0, 1 / 448]]).tolist()
    out_ND = torch.empty_like(rows_ND)
    dequantize_rows(data_ND, scales_NB, out_ND, 2)
    assert out_ND.tolist() == rows_ND.tolist()

    weights_MOI = torch.full((1, 130, 129), 448.0, device=device)
    weights_MOI[:, :, 128] = 2
    data_MOI = torch.empty_like(weights_MOI, dtype=FP8)
    scales_MBB = torch.empty(1, 2, 2, device=device)
    quantize_weights(weights_MOI, data_MOI, scales_MBB)
    assert scales_MBB.tolist() == torch.tensor([[[1, 1 / 224], [1, 1 / 224]]]).tolist()
    assert bool((data_MOI.float() == 448).all())


@pytest.mark.parametrize(
    ("rows", "width", "block"), [(7, 256, 128), (40, 136, 128), (3, 8, 128), (5, 104, 40), (0, 16, 8)]
)
def test_scales_and_quotients_are_the_codecs_bit_for_bit(
    device: torch.device, rows: int, width: int, block: int
) -> None:
    rows_ND = _rows(rows, width, device)
    # FP32 data are the quotients before their last rounding, which is one instruction on a GPU and approximate in the
    # interpreter.
    quotients_ND, scales_NB = _quantized(rows_ND, block, torch.float32)
    expected = QuantizedRows.of(rows_ND.cpu(), block)
    assert scales_NB.cpu().equal(expected.scales_NB)
    assert quotients_ND.cpu().to(FP8).view(torch.uint8).equal(expected.data_ND.view(torch.uint8))
    assert not rows or float(scales_NB.min()) >= TINY


def test_the_twins_are_the_codec_too() -> None:
    rows_ND = _rows(9, 200, torch.device("cpu"))
    data_ND, scales_NB = reference_fp8.quantize_rows(rows_ND, 64)
    expected = QuantizedRows.of(rows_ND, 64)
    assert scales_NB.equal(expected.scales_NB)
    assert data_ND.view(torch.uint8).equal(expected.data_ND.view(torch.uint8))
    assert reference_fp8.dequantize_rows(data_ND, scales_NB, 64).equal(expected.dequantized(torch.float32))


# inf / inf and inf * 0, which the interpreter leaves to numpy.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_block_with_a_number_that_is_not_finite_decodes_to_nan_and_no_other_does(
    device: torch.device, bad: float
) -> None:
    rows_ND = torch.ones(3, 32, device=device)
    rows_ND[1, 5] = bad
    quotients_ND, scales_NB = _quantized(rows_ND, 16, torch.float32)
    out_ND = torch.empty_like(rows_ND)
    dequantize_rows(quotients_ND, scales_NB, out_ND, 16)
    assert bool(out_ND[1, :16].isnan().all())
    out_ND[1, :16] = 1
    assert out_ND.equal(torch.ones_like(out_ND))


def test_data_and_scales_are_written_into_one_packed_row(device: torch.device) -> None:
    # Numbers that need no rounding: the interpreter's casts to FP8 lose a carry.
    patterns_ND = torch.randint(0, 127, (6, 72), dtype=torch.uint8, device=device)
    patterns_ND[:, ::32] = 126
    rows_ND = patterns_ND.view(FP8).float() * 2.0 ** torch.randint(-9, 9, (6, 1), device=device)
    codec = Fp8Block(72, block=32)
    wire_NW = torch.full((6, codec.wire_width), 0xA5, dtype=torch.uint8, device=device)
    quantize_rows(rows_ND, wire_NW[:, :72].view(FP8), wire_NW[:, 72:].view(torch.float32), 32)
    assert wire_NW.cpu().equal(codec.encode(rows_ND.cpu()))
    out_ND = torch.empty_like(rows_ND)
    dequantize_rows(wire_NW[:, :72].view(FP8), wire_NW[:, 72:].view(torch.float32), out_ND, 32)
    assert out_ND.equal(rows_ND)


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (40, 300), (130, 16)])
def test_a_weight_block_has_the_scale_of_its_largest_magnitude(device: torch.device, rows: int, columns: int) -> None:
    weights_MOI = torch.randn(2, rows, columns, device=device)
    expected_data, expected_scales = reference_fp8.quantize_weights(weights_MOI.cpu())
    quotients_MOI, scales_MBB = torch.empty_like(weights_MOI), torch.empty_like(expected_scales, device=device)
    quantize_weights(weights_MOI, quotients_MOI, scales_MBB)
    assert scales_MBB.cpu().equal(expected_scales)
    assert quotients_MOI.cpu().to(FP8).view(torch.uint8).equal(expected_data.view(torch.uint8))
    # Half a step of each number's binade: 1 / 16 of it, or of the scale's subnormals.
    restored = reference_fp8.dequantize_weights(expected_data, expected_scales)
    bound = weights_MOI.cpu().abs() / 16 + expected_scales.max() / 1024
    assert bool(((restored - weights_MOI.cpu()).abs() <= bound).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "width", "block"), [(1, 2048, 128), (4097, 4096, 128), (300, 2888, 128), (77, 2048, 2048), (5, 7168, 7168)]
)
def test_fp8_rows_are_the_codecs_bit_for_bit_on_a_gpu(dtype: torch.dtype, rows: int, width: int, block: int) -> None:
    rows_ND = _rows(rows, width, torch.device("cuda"), dtype).clamp(-6e4, 6e4)
    data_ND, scales_NB = _quantized(rows_ND, block)
    expected = QuantizedRows.of(rows_ND.cpu(), block)
    assert scales_NB.cpu().equal(expected.scales_NB)
    assert data_ND.cpu().view(torch.uint8).equal(expected.data_ND.view(torch.uint8))
    out_ND = torch.full_like(rows_ND, float("nan"))
    dequantize_rows(data_ND, scales_NB, out_ND, block)
    assert out_ND.cpu().equal(expected.dequantized(dtype))


@pytest.mark.gpu
def test_fp8_weights_are_the_twins_bit_for_bit_on_a_gpu() -> None:
    weights_MOI = torch.randn(3, 704, 2048, device="cuda").bfloat16()
    expected_data, expected_scales = reference_fp8.quantize_weights(weights_MOI.cpu())
    data_MOI, scales_MBB = torch.empty_like(weights_MOI, dtype=FP8), torch.empty_like(expected_scales, device="cuda")
    quantize_weights(weights_MOI, data_MOI, scales_MBB)
    assert scales_MBB.cpu().equal(expected_scales)
    assert data_MOI.cpu().view(torch.uint8).equal(expected_data.view(torch.uint8))
