"""What launches sized for four times their rows cost: the experts of one GPU of two, as windows deliver their rows.

    python -m ray_moe.bench.gpu_layer --padding

Two peers' token slots, the rows of each in front and padding behind them; half of the experts are here, routes of the
others are nobody's. `tight` has no padding, `wide` is the same rows in launches for four times as many; `before` are
wide launches by tiles of one height. All in interleaved rounds, from CUDA graphs with a cold L2 cache, the results of
`wide` equal to those of `tight` bit for bit. The second kind of row has no padding at all, and the tiles' own cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ray_moe.bench.gpu_shapes import MODELS, Inputs, random_slabs
from ray_moe.bench.report import Row
from ray_moe.kernels.fused_layer import FusedLayer, Workspace
from ray_moe.kernels.grouped_gemm import Tile
from ray_moe.kernels.routing import route
from ray_moe.kernels.tiling import GroupedTiles, choose
from ray_moe.kernels.timing import graphed, interleaved

_MODEL, _PEERS, _TIMES = "qwen3-30b-a3b", 2, 4
_LOADS = (4, 16, 64, 128)  # tokens of a peer
_FULL = (160, 256, 384, 512, 640)  # tokens of one GPU with all experts: 10 to 40 rows per expert
_ONE_HEIGHT = Tile(32, 128, 128, 4, 3, 1, swapped=True)
_LOWER = Tile(16, 128, 128, 4, 3, 1, swapped=True)
_ROUNDS, _BUDGET_MS = 5, 40
_Experts = Callable[[], tuple[Tensor, Tensor]]


def padding_rows() -> list[Row]:
    """Microseconds of routing and both products, tight and wide, and the share that the padding adds."""
    slabs, shape = random_slabs(MODELS[_MODEL]), MODELS[_MODEL]
    workspace = Workspace(shape, _PEERS * _TIMES * max(_LOADS), torch.bfloat16, torch.device("cuda"))
    layer, before = FusedLayer(slabs, workspace), FusedLayer(slabs, workspace, tiling=_same(_ONE_HEIGHT))
    found: list[Row] = []
    for load in _LOADS:
        tight = Inputs.random(shape, _PEERS * load)
        tight.ids_TK[tight.ids_TK >= shape.num_experts // _PEERS] = -1
        hidden_TD, ids_TK = (_spread(rows, load) for rows in (tight.hidden_TD, tight.ids_TK + 1))
        ids_TK -= 1
        tiles = choose(len(hidden_TD), shape, batch_invariant=True)
        assert isinstance(tiles, GroupedTiles)
        alone = partial(layer.experts, tight.hidden_TD, tight.ids_TK, tight.slots_E)
        padded = partial(layer.experts, hidden_TD, ids_TK, tight.slots_E)
        _require_equal(alone, padded, tight.ids_TK >= 0, ids_TK >= 0)
        calls: dict[str, Callable[[], object]] = {
            "tight_us": alone,
            "us": padded,
            "before_us": partial(before.experts, hidden_TD, ids_TK, tight.slots_E),
            "tight_routing_us": partial(route, tight.ids_TK.view(-1), shape.num_experts, workspace.maps[16]),
            "routing_us": partial(route, ids_TK.view(-1), shape.num_experts, workspace.maps[tiles.rows]),
        }
        times = interleaved([graphed(call) for call in calls.values()], _ROUNDS, _BUDGET_MS)
        us = {name: spread.median * 1e3 for name, spread in zip(calls, times, strict=True)}
        taxes = {"tax": us["us"] / us["tight_us"] - 1, "tax_before": us["before_us"] / us["tight_us"] - 1}
        found.append({"what": "padding", "tokens": load, "capacity": _TIMES * load, **us, **taxes})
        print(_line(found[-1]), flush=True)
    return found + _full_rows(layer, before)


def _full_rows(layer: FusedLayer, before: FusedLayer) -> list[Row]:
    shape = MODELS[_MODEL]
    found: list[Row] = []
    lower = FusedLayer(before.slabs, before.workspace, tiling=_same(_LOWER))
    for tokens in _FULL:
        inputs = Inputs.random(shape, tokens)
        layers = {"us": layer, "one_height_us": before, "lower_us": lower}
        calls = [
            graphed(partial(each.experts, inputs.hidden_TD, inputs.ids_TK, inputs.slots_E)) for each in layers.values()
        ]
        times = interleaved(calls, _ROUNDS, _BUDGET_MS)
        us = {name: spread.median * 1e3 for name, spread in zip(layers, times, strict=True)}
        found.append({"what": "no padding", "tokens": tokens, **us, "over_one_height": us["us"] / us["one_height_us"]})
        print(_line(found[-1]), flush=True)
    return found


def _same(tile: Tile) -> GroupedTiles:
    return GroupedTiles(tile, tile)


def _spread(rows_TX: Tensor, load: int) -> Tensor:
    """Each peer's rows in front of its own token slots, zeros behind them."""
    wide = rows_TX.new_zeros(_PEERS, _TIMES * load, rows_TX.shape[1])
    wide[:, :load] = rows_TX.view(_PEERS, load, -1)
    return wide.flatten(0, 1)


def _require_equal(tight: _Experts, wide: _Experts, real_TK: Tensor, real_wide_TK: Tensor) -> None:
    """Each route's result, by its position. Raises `AssertionError`."""
    results = []
    for call, known_TK in ((tight, real_TK), (wide, real_wide_TK)):
        rows_RD, position_N = call()
        positions = position_N[: known_TK.numel()][known_TK.view(-1)]
        results.append(rows_RD[positions.long()].clone())
    assert torch.equal(*results), "padding changed results"


def _line(row: Row) -> str:
    return " ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{value}" for name, value in row.items())
