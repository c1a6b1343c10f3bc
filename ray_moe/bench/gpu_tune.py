"""Candidates for the tables of `kernels/tiling.py`, timed in interleaved rounds on one routing per size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ray_moe.bench.gpu_shapes import (
    MODELS,
    Inputs,
    compile_beforehand,
    floor_ms,
    poison,
    random_slabs,
    relative_error,
)
from ray_moe.bench.report import Row
from ray_moe.kernels.decode_layer import DecodeTile
from ray_moe.kernels.fused_layer import FusedLayer, Workspace
from ray_moe.kernels.gemv_layer import GemvTile
from ray_moe.kernels.grouped_gemm import Tile
from ray_moe.kernels.tiling import GroupedTiles, Tiling
from ray_moe.kernels.timing import graphed, interleaved
from ray_moe.kernels.warp_gemm import WarpTile

_WRONG = 1e-2


def candidates(rows: float, tokens: int, ffn: int) -> list[Tiling]:
    """What is worth timing for so many rows per expert."""
    skinny, skinny64 = (Tile(16, columns, 128, 4, stages, 1, swapped=True) for columns, stages in ((128, 3), (64, 4)))
    if tokens == 1:
        return [
            DecodeTile(8, 2),
            DecodeTile(8, 4 if ffn > 4096 else 3),
            GemvTile(4, 2048, 4, 8, 1024, 4),
            GemvTile(4, 2048, 4, 4, 2048, 2),
            GemvTile(2, 2048, 2, 8, 1024, 4),
        ]
    if tokens <= 16:
        parts = (2, 4) if ffn > 4096 else (1, 2)
        decode = [DecodeTile(8 if tokens <= 8 else 16, part) for part in parts]
        deep, wide = Tile(16, 64, 256, 4, 3, 1, swapped=True), Tile(16, 128, 128, 4, 4, 1, swapped=True)
        return [*decode, GroupedTiles(skinny, skinny), GroupedTiles(skinny64, skinny64), GroupedTiles(deep, skinny),
                GroupedTiles(deep, deep), GroupedTiles(wide, skinny)]  # fmt: skip
    if rows <= 10:
        deep = Tile(16, 128, 256, 4, 2, 1, swapped=True)
        return [GroupedTiles(skinny, skinny), GroupedTiles(deep, skinny), GroupedTiles(deep, deep),
                GroupedTiles(skinny64, skinny64)]  # fmt: skip
    if rows <= 40:
        low, lower = Tile(32, 128, 128, 4, 3, 1), Tile(32, 128, 128, 4, 3, 1, swapped=True)
        wide = Tile(32, 256, 128, 8, 2, 1)
        tail, tail_down = (
            Tile(32, 128, 128, 4, stages, 1, swapped=True, short_tail=True, tail_stages=3) for stages in (3, 2)
        )
        return [GroupedTiles(low, low), GroupedTiles(lower, low), GroupedTiles(wide, low), GroupedTiles(skinny, skinny),
                GroupedTiles(tail, tail), GroupedTiles(tail, tail_down), GroupedTiles(lower, lower)]  # fmt: skip
    tall, copied = (Tile(128, 256, 64, 8, 4, 8, short_tail=True, copied_rows=copied) for copied in (False, True))
    if rows <= 80:
        return [GroupedTiles(tall, WarpTile(group=1)), GroupedTiles(tall, copied)]
    found: list[Tiling] = []
    for group in (8, 16, 32):
        tail = Tile(128, 256, 64, 8, 4, group, short_tail=True)
        found += [
            GroupedTiles(tail, WarpTile(group=group)),
            GroupedTiles(tail, Tile(128, 256, 64, 8, 4, group, short_tail=True, copied_rows=True)),
        ]
    whole = Tile(128, 256, 64, 8, 4, 16)
    return [*found, GroupedTiles(whole, WarpTile(group=16))]


def run(models: Sequence[str], sizes: Sequence[int], rounds: int = 3, budget_ms: int = 60) -> list[Row]:
    """One row per candidate: median, spread and floor over time."""
    plans = {
        (model, tokens): candidates(tokens * MODELS[model].top_k / MODELS[model].num_experts, tokens, MODELS[model].ffn)
        for model in models
        for tokens in sizes
    }
    compile_beforehand([(MODELS[m], t, tiles, False) for (m, t), each in plans.items() for tiles in each])
    found: list[Row] = []
    for model in models:
        slabs, shape = random_slabs(MODELS[model]), MODELS[model]
        for tokens in sizes:
            workspace, inputs = (
                Workspace(shape, tokens, torch.bfloat16, torch.device("cuda")),
                Inputs.random(shape, tokens),
            )
            replays, kept = [], []
            for tiles in plans[model, tokens]:
                if not isinstance(tiles, GroupedTiles):
                    workspace.ensure(tiles)
                layer = FusedLayer(slabs, workspace, tiling=tiles)
                poison(workspace)
                inputs.run(layer)
                error = relative_error(slabs, inputs)
                if error < _WRONG:
                    replays.append(graphed(partial(inputs.run, layer)))
                    kept.append(tiles)
                else:
                    print(f"wrong: {model} {tokens} {tiles}: {error}", flush=True)
            floor = floor_ms(shape, inputs.ids_TK)
            for tiles, spread in zip(kept, interleaved(replays, rounds, budget_ms), strict=True):
                share = {"floor_over_time": floor / spread.median, "tiles": str(tiles)}
                found.append({"model": model, "tokens": tokens, "ms": spread.median, **spread.range(), **share})
        del slabs
        torch.cuda.empty_cache()
    return found
