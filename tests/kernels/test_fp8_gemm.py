"""Grouped FP8 products against FP32 products of the same dequantized numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ray_moe.errors import ConfigError
from ray_moe.kernels import fp8_warp, reference_fp8
from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.fp8_gemm import Fp8Slab, Fp8Tile, fp8_down, fp8_gate_up
from ray_moe.kernels.fp8_warp import Fp8WarpTile
from ray_moe.kernels.routing import RowTiles
from tests.kernels.segments import row_tiles

FP8 = torch.float8_e4m3fn
TILE = Fp8Tile()
GPT_OSS = SwiGLU(limit=7.0, alpha=1.702, up_shift=1.0)


def _slab(weights_MOI: Tensor) -> Fp8Slab:
    """Quantized by the twin: the interpreter's casts to FP8 are approximate."""
    return Fp8Slab(*reference_fp8.quantize_weights(weights_MOI))


def _int32(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_worked_examples(device: torch.device) -> None:
    ones_TD = torch.full((1, 16), 1.0, device=device)
    gate_up = Fp8Slab((torch.ones(2, 16, 16, device=device) / 16).to(FP8), torch.ones(2, 1, 1, device=device))
    tiles, slots_S = row_tiles([0, 1], 16, 0, device), _int32([0], device)
    data_RF, scales_RB = torch.empty(1, 16, device=device), torch.empty(1, 1, device=device)
    fp8_gate_up(
        ones_TD.to(FP8), ones_TD[:, :1].clone(), None, 1, tiles, slots_S, gate_up, None, SwiGLU(), TILE,
        data_RF, scales_RB,
    )  # fmt: skip
    sigmoid = torch.sigmoid(torch.tensor(1.0)).item()
    assert data_RF.flatten().tolist() == pytest.approx([448.0] * 16, rel=1e-6)
    assert scales_RB.item() == pytest.approx(sigmoid / 448, rel=1e-6)

    down, out_RD = Fp8Slab(gate_up.data_MOI[:1], gate_up.scales_MBB[:1]), torch.empty(1, 16, device=device)
    fp8_down(data_RF.to(FP8), scales_RB, tiles, slots_S, down, None, TILE, out_RD)
    assert out_RD.flatten().tolist() == pytest.approx([sigmoid] * 16, rel=1e-6)


class Case:
    """Random rows, weights and routes of one shape, quantized by the twins."""

    def __init__(
        self,
        counts_S: list[int],
        hidden: int,
        ffn: int,
        device: torch.device,
        *,
        top_k: int = 2,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        segments, rows = len(counts_S), sum(counts_S)
        pool = segments + 2
        self.offsets_S1 = [0, *torch.tensor(counts_S).cumsum(0).tolist()]
        self.pool_slots = torch.randperm(pool)[:segments].tolist()
        self.slots_S = _int32(self.pool_slots, device)
        self.top_k = top_k
        self.source_N = torch.randperm(rows, device=device).to(torch.int32)
        tokens = -(-rows // top_k)
        self.data_TD, self.scales_TB = reference_fp8.quantize_rows(
            torch.randn(tokens, hidden, device=device) * 2.0 ** torch.randint(-3, 4, (tokens, 1), device=device)
        )
        self.gate_up = _slab(torch.randn(2 * pool, ffn, hidden, device=device) * hidden**-0.5)
        self.down = _slab(torch.randn(pool, hidden, ffn, device=device) * ffn**-0.5)
        self.gate_up_bias = torch.randn(pool, 2 * ffn, device=device).to(dtype) if bias else None
        self.down_bias = torch.randn(pool, hidden, device=device).to(dtype) if bias else None

    def expected_ffn(self, activation: SwiGLU) -> Tensor:
        rows_TD = reference_fp8.dequantize_rows(self.data_TD, self.scales_TB)
        weights = reference_fp8.dequantize_weights(self.gate_up.data_MOI, self.gate_up.scales_MBB)
        rows_RD = rows_TD[self.source_N.long() // self.top_k]
        return reference_fp8.fp8_gate_up(
            rows_RD, weights, self.gate_up_bias, self.pool_slots, self.offsets_S1, activation
        )

    def expected_down(self, data_RF: Tensor, scales_RB: Tensor) -> Tensor:
        rows_RF = reference_fp8.dequantize_rows(data_RF, scales_RB)
        weights = reference_fp8.dequantize_weights(self.down.data_MOI, self.down.scales_MBB)
        return reference_fp8.fp8_down(rows_RF, weights, self.down_bias, self.pool_slots, self.offsets_S1)


@pytest.mark.parametrize(
    ("counts_S", "hidden", "ffn", "bias", "activation"),
    [
        ([3, 0, 17], 144, 144, False, SwiGLU()),
        ([33, 5], 256, 128, True, GPT_OSS),
        ([0, 0, 1], 32, 272, True, SwiGLU()),
    ],
)
def test_both_products_are_those_of_the_dequantized_numbers(
    device: torch.device, counts_S: list[int], hidden: int, ffn: int, bias: bool, activation: SwiGLU
) -> None:
    case = Case(counts_S, hidden, ffn, device, bias=bias)
    rows = sum(counts_S)
    tiles = row_tiles(case.offsets_S1, 32, 2, device)
    # FP32 data: the interpreter's casts to FP8 are approximate, so this is what is cast on a GPU.
    data_RF = torch.full((rows + 1, ffn), float("nan"), device=device)
    scales_RB = torch.full((rows + 1, -(-ffn // 128)), float("nan"), device=device)
    fp8_gate_up(
        case.data_TD, case.scales_TB, case.source_N, case.top_k, tiles, case.slots_S, case.gate_up, case.gate_up_bias,
        activation, TILE, data_RF, scales_RB,
    )  # fmt: skip
    expected_RF = case.expected_ffn(activation)
    # FP32 sums of the same products in another order, relative to the largest number of a block.
    torch.testing.assert_close(
        reference_fp8.dequantize_rows(data_RF[:rows], scales_RB[:rows]), expected_RF, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(scales_RB[:rows], reference_fp8.quantize_rows(expected_RF)[1], rtol=1e-4, atol=1e-8)
    assert bool(data_RF[rows].isnan().all()) and bool(scales_RB[rows].isnan().all())

    quantized_RF, scales_RB = reference_fp8.quantize_rows(expected_RF)
    out_RD = torch.full((rows + 1, hidden), float("nan"), device=device)
    fp8_down(quantized_RF, scales_RB, tiles, case.slots_S, case.down, case.down_bias, TILE, out_RD)
    torch.testing.assert_close(out_RD[:rows], case.expected_down(quantized_RF, scales_RB), rtol=1e-4, atol=1e-4)
    assert bool(out_RD[rows].isnan().all())


def test_no_tile_is_no_work(device: torch.device) -> None:
    case = Case([0, 0], 32, 32, device)
    tiles = row_tiles(case.offsets_S1, 16, 3, device)
    out_RD = torch.full((4, 32), float("nan"), device=device)
    data_RF, scales_RB = torch.empty(4, 32, device=device).to(FP8), torch.ones(4, 1, device=device)
    fp8_down(data_RF, scales_RB, tiles, case.slots_S, case.down, None, TILE, out_RD)
    assert bool(out_RD.isnan().all())


@pytest.mark.parametrize(("block_rows", "hidden"), [(64, 128), (128, 144)])
def test_warps_in_roles_refuse_other_tiles_and_depths(device: torch.device, block_rows: int, hidden: int) -> None:
    case = Case([3], hidden, 128, device)
    with pytest.raises(ConfigError, match=f"128 rows and K in 128s are needed, found {block_rows} and {hidden}"):
        fp8_warp.fp8_gate_up(
            case.data_TD, case.scales_TB, case.source_N, 1, row_tiles([0, 3], block_rows, 0, device), case.slots_S,
            case.gate_up, fp8_warp.panels_descriptor(case.gate_up), None, SwiGLU(), Fp8WarpTile(), case.data_TD,
            case.scales_TB,
        )  # fmt: skip


def test_a_depth_that_hardware_copies_cannot_start_at_is_refused(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="multiples of 16, found 24"):
        Fp8Slab(torch.empty(1, 32, 24, dtype=FP8, device=device), torch.empty(1, 1, 1, device=device))


# Relative RMS error against FP32: what FP8 data and the tensor cores' own sums leave of products of the same numbers.
PRODUCT_ERROR = 3e-3
# The same with the activation quantized once more: three mantissa bits are an RMS error of 2.6 %.
QUANTIZED_ERROR = 3.5e-2


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def _products_on_a_gpu(case: Case, tiles: RowTiles, activation: SwiGLU, run: Fp8Tile | Fp8WarpTile) -> None:
    """Both products of `case` into poisoned buffers that are one row too long, each against FP32."""
    rows, hidden, ffn = case.offsets_S1[-1], case.gate_up.data_MOI.shape[2], case.gate_up.data_MOI.shape[1]
    data_RF = torch.full((rows + 1, ffn), float("nan"), device="cuda").to(FP8)
    scales_RB = torch.full((rows + 1, -(-ffn // 128)), float("nan"), device="cuda")
    out_RD = torch.full((rows + 1, hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    routed = (case.data_TD, case.scales_TB, case.source_N, case.top_k, tiles, case.slots_S, case.gate_up)
    if isinstance(run, Fp8Tile):
        fp8_gate_up(*routed, case.gate_up_bias, activation, run, data_RF, scales_RB)
        fp8_down(data_RF, scales_RB, tiles, case.slots_S, case.down, case.down_bias, run, out_RD)
    else:
        panels = fp8_warp.panels_descriptor(case.gate_up)
        fp8_warp.fp8_gate_up(*routed, panels, case.gate_up_bias, activation, run, data_RF, scales_RB)
        acts, panels = fp8_warp.rows_descriptor(data_RF), fp8_warp.panels_descriptor(case.down)
        fp8_warp.fp8_down(data_RF, acts, scales_RB, tiles, case.slots_S, case.down, panels, case.down_bias, run, out_RD)

    expected_RF = case.expected_ffn(activation)
    found_RF = reference_fp8.dequantize_rows(data_RF[:rows], scales_RB[:rows])
    assert _relative(scales_RB[:rows], reference_fp8.quantize_rows(expected_RF)[1]) < PRODUCT_ERROR
    for start, end in pairwise(case.offsets_S1):
        assert end == start or _relative(found_RF[start:end], expected_RF[start:end]) < QUANTIZED_ERROR
    assert bool(scales_RB[rows].isnan().all()) and bool(data_RF[rows].float().isnan().all())

    expected_RD = case.expected_down(data_RF[:rows], scales_RB[:rows])
    for start, end in pairwise(case.offsets_S1):
        assert end == start or _relative(out_RD[start:end], expected_RD[start:end]) < PRODUCT_ERROR
    assert bool(out_RD[rows].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts_S", "hidden", "ffn", "bias", "activation"),
    [
        ([300, 0, 1, 128, 129, 64], 2048, 768, False, SwiGLU()),
        ([1000, 24], 4096, 1792, False, SwiGLU()),
        ([65, 400, 7], 2880, 2880, True, GPT_OSS),
        ([5] * 60, 2048, 1408, False, SwiGLU()),
    ],
)
@pytest.mark.parametrize(
    ("block_rows", "tile"),
    [(128, Fp8Tile()), (128, Fp8Tile(short_tail=False, stages=3)), (64, Fp8Tile(warps=4, stages=2, short_tail=False))],
)
def test_fp8_products_on_a_gpu(
    counts_S: list[int], hidden: int, ffn: int, bias: bool, activation: SwiGLU, block_rows: int, tile: Fp8Tile
) -> None:
    device = torch.device("cuda")
    case = Case(counts_S, hidden, ffn, device, bias=bias, dtype=torch.bfloat16, top_k=4)
    _products_on_a_gpu(case, row_tiles(case.offsets_S1, block_rows, 5, device), activation, tile)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts_S", "hidden", "ffn", "bias", "activation"),
    [
        ([300, 0, 1, 128, 129, 64], 2048, 768, False, SwiGLU()),
        ([1000, 24], 4096, 1792, True, GPT_OSS),
        ([5] * 60, 2176, 1408, False, SwiGLU()),
        ([0, 0, 3], 128, 128, True, SwiGLU()),
    ],
)
@pytest.mark.parametrize("tile", [Fp8WarpTile(), Fp8WarpTile(stages=2, group=1)])
def test_fp8_products_with_warps_in_roles_on_a_gpu(
    counts_S: list[int], hidden: int, ffn: int, bias: bool, activation: SwiGLU, tile: Fp8WarpTile
) -> None:
    device = torch.device("cuda")
    case = Case(counts_S, hidden, ffn, device, bias=bias, dtype=torch.bfloat16, top_k=4)
    _products_on_a_gpu(case, row_tiles(case.offsets_S1, 128, 5, device), activation, tile)


@pytest.mark.gpu
def test_a_replayed_graph_follows_the_routes_of_its_buffers() -> None:
    device, capacity = torch.device("cuda"), 1024
    first, second = (Case(counts, 512, 256, device, top_k=1) for counts in ([200, 0, 56], [1, 700, 1]))
    buffers = Case([capacity // 2, 0, capacity // 2], 512, 256, device, top_k=1)
    tiles = row_tiles(buffers.offsets_S1, 128, 16, device)
    data_RF = torch.empty(capacity, 256, dtype=FP8, device=device)
    scales_RB = torch.empty(capacity, 2, device=device)
    panels = fp8_warp.panels_descriptor(buffers.gate_up)

    def product() -> None:
        fp8_warp.fp8_gate_up(
            buffers.data_TD, buffers.scales_TB, buffers.source_N, 1, tiles, buffers.slots_S, buffers.gate_up, panels,
            None, SwiGLU(), Fp8WarpTile(), data_RF, scales_RB,
        )  # fmt: skip

    product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product()
    for case in (first, second):
        rows = case.offsets_S1[-1]
        buffers.data_TD[:rows].copy_(case.data_TD)
        buffers.scales_TB[:rows].copy_(case.scales_TB)
        buffers.source_N[:rows].copy_(case.source_N)
        cut = row_tiles(case.offsets_S1, 128, tiles.row_M.numel(), device)
        for name in ("segment_M", "row_M", "end_M", "count_1"):
            held = getattr(tiles, name)
            held.copy_(getattr(cut, name)[: held.numel()])
        scales_RB.fill_(float("nan"))
        graph.replay()
        case.gate_up, case.pool_slots = buffers.gate_up, buffers.pool_slots
        found_RF = reference_fp8.dequantize_rows(data_RF[:rows], scales_RB[:rows])
        assert _relative(found_RF, case.expected_ffn(SwiGLU())) < QUANTIZED_ERROR
        assert bool(scales_RB[rows:].isnan().all())
