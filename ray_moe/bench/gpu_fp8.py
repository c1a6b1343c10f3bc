"""FP8 expert products (e4m3, scales of 128 blocks) against our bf16 ones, on the same routes and in the same rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ray_moe.bench.gpu_shapes import Inputs
from ray_moe.bench.report import Row
from ray_moe.kernels import fp8_warp
from ray_moe.kernels.fp8_gemm import Fp8Slab
from ray_moe.kernels.fp8_warp import Fp8WarpTile
from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace
from ray_moe.kernels.quantize import quantize_rows
from ray_moe.kernels.reference_fp8 import dequantize_rows
from ray_moe.kernels.tiling import GroupedTiles, LayerShape
from ray_moe.kernels.timing import graphed, interleaved

_FP8, _BLOCK, _ROUNDS = torch.float8_e4m3fn, 128, 3
TILE = Fp8WarpTile(stages=4, group=8)


def fp8_rows(model: str, shape: LayerShape, slabs: Slabs, sizes: Sequence[int]) -> list[Row]:
    """Per size: quantization of the tokens and both products in FP8 over both products in bf16, and the error."""
    gate_up = Fp8Slab.of(slabs.gate_up.view(2 * shape.num_experts, shape.ffn, shape.hidden))
    down = Fp8Slab.of(slabs.down)
    panels = fp8_warp.panels_descriptor(gate_up), fp8_warp.panels_descriptor(down)
    return [_row(model, shape, slabs, tokens, gate_up, down, panels) for tokens in sizes]


def _row(
    model: str, shape: LayerShape, slabs: Slabs, tokens: int, gate_up: Fp8Slab, down: Fp8Slab, panels: tuple
) -> Row:
    inputs, top_k = Inputs.random(shape, tokens), shape.top_k
    workspace = Workspace(shape, tokens, torch.bfloat16, torch.device("cuda"))
    layer = FusedLayer(slabs, workspace)
    tiling = layer.tiling_of(tokens)
    assert isinstance(tiling, GroupedTiles)
    layer.route(inputs.ids_TK, tiling)
    maps = workspace.maps[tiling.rows]
    routes = tokens * top_k
    data_TD = torch.empty(tokens, shape.hidden, dtype=_FP8, device="cuda")
    scales_TB = torch.empty(tokens, shape.hidden // _BLOCK, device="cuda")
    data_RF = torch.empty(routes, shape.ffn, dtype=_FP8, device="cuda")
    scales_RB = torch.full((routes, shape.ffn // _BLOCK), float("nan"), device="cuda")
    rows_RD = torch.full((routes, shape.hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    rows = fp8_warp.rows_descriptor(data_RF)

    def products() -> None:
        quantize_rows(inputs.hidden_TD, data_TD, scales_TB)
        fp8_warp.fp8_gate_up(
            data_TD, scales_TB, maps.source_N, top_k, maps.tiles, inputs.slots_E, gate_up, panels[0], None,
            slabs.activation, TILE, data_RF, scales_RB,
        )  # fmt: skip
        fp8_warp.fp8_down(data_RF, rows, scales_RB, maps.tiles, inputs.slots_E, down, panels[1], None, TILE, rows_RD)

    def plain() -> None:
        layer.gate_up(inputs.hidden_TD, inputs.slots_E, tiling)
        layer.down(tokens, inputs.slots_E, tiling)

    replays = [graphed(products), graphed(plain)]
    ours, bf16 = interleaved(replays, _ROUNDS, 60)
    assert bool(rows_RD.isfinite().all())
    error = (rows_RD.float() - workspace.rows_RD[:routes].float()).norm() / workspace.rows_RD[:routes].float().norm()
    quantized = dequantize_rows(data_TD, scales_TB)
    drift = (quantized - inputs.hidden_TD.float()).norm() / inputs.hidden_TD.float().norm()
    return {
        "what": "FP8 products", "model": model, "tokens": tokens, "fp8_ms": ours.median, "bf16_ms": bf16.median,
        "bf16_over_fp8": bf16.median / ours.median, "err_against_bf16": float(error),
        "err_of_quantized_tokens": float(drift), "tile": str(TILE),
    }  # fmt: skip
