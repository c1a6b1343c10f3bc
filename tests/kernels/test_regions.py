"""What is added up before anything is taken, against what is taken."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.kernels import decode_layer, fused_layer
from ray_moe.kernels.fused_layer import Workspace
from ray_moe.kernels.regions import Regions, padded_experts, workspace_nbytes
from ray_moe.kernels.tiling import LayerShape

SHAPES = [LayerShape(128, 8, 2048, 768), LayerShape(8, 2, 4096, 14336), LayerShape(60, 4, 2048, 1408)]


def held(thing: Any) -> int:
    """Bytes of all tensors in it."""
    if isinstance(thing, Tensor):
        return thing.nbytes
    if isinstance(thing, dict):
        return sum(held(value) for value in thing.values())
    if is_dataclass(thing):
        return sum(held(getattr(thing, field.name)) for field in fields(thing))
    return 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 37, 512, 8192])
def test_a_workspace_takes_what_was_added_up(shape: LayerShape, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layer, "is_hopper", lambda device: True)
    monkeypatch.setattr(decode_layer, "multiprocessors", lambda device: 132)
    workspace = Workspace(shape, tokens, torch.bfloat16, torch.device("meta"))
    sizes = (shape.num_experts, shape.top_k, shape.hidden, shape.ffn, tokens, 2)
    few = held(workspace.decode) + held(workspace.gemv)
    exact = held(workspace.acts_RF) + held(workspace.maps)
    without_results, counted = workspace_nbytes(*sizes, results=False), workspace_nbytes(*sizes)
    assert exact + few <= without_results <= exact + few + 2**24
    assert counted - without_results == held(workspace.rows_RD)


def test_the_worked_example_of_a_workspace() -> None:
    assert workspace_nbytes(1, 1, 8, 8, 1, 2) == 32 + 1168 + 1152 + 48 + 2**18


def test_counts_of_experts_have_columns_in_powers_of_two() -> None:
    assert [padded_experts(experts) for experts in (1, 32, 33, 128, 129)] == [32, 32, 64, 128, 256]


def test_rows_that_come_as_fp8_have_room_beside_the_window() -> None:
    plain, packed = (Regions.plan(2, 8, 2, 256, torch.bfloat16, quantized=quantized) for quantized in (False, True))
    assert plain.device_nbytes == 2**21
    assert packed.device_nbytes == 2**21 + 16 * 256 * 2
