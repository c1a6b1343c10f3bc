"""Layers that multiply the same rows do so at once, give what they gave, and go apart where rows differ."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_moe.engine.joined_products import Joined, join_products

HALVES = [torch.bfloat16, torch.float16]


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype, *, bias: bool = False, inputs: tuple[int, int, int] = (32, 32, 32)) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, outputs, bias=bias, dtype=dtype)
            for width, outputs in zip(inputs, (48, 16, 24), strict=True)
        )
        self.requires_grad_(False)

    def forward(self, rows: Tensor, other: Tensor | None = None) -> list[Tensor]:
        return [self.q_proj(rows), self.k_proj(rows if other is None else other), self.v_proj(rows)]


def joined_of(module: Attention) -> Joined:
    joined: Joined = module.q_proj.forward.func.__self__  # type: ignore[attr-defined]
    return joined


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns of every product from now on."""
    columns, own = [], F.linear

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        columns.append(weight.shape[0])
        return own(rows, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    return columns


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_three_products_are_one_and_give_what_they_gave(
    dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    module, rows = Attention(dtype, bias=bias), torch.randn(1, 5, 32).to(dtype)
    before, state = module(rows), {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert join_products(module)
    columns = counted(monkeypatch)
    for _ in range(2):
        for found, expected in zip(module(rows), before, strict=True):
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
    assert columns == [88, 88]
    joined = joined_of(module)
    assert joined._rows is None and not joined._left, "no rows are held between two forwards"
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    held = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert len(held) == (2 if bias else 1), "weights lie in one matrix, biases in one vector"


def test_a_layer_that_is_given_other_rows_multiplies_by_itself_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    module, rows, other = Attention(torch.bfloat16), *torch.randn(2, 4, 32).bfloat16()
    before = module(rows, other)
    assert join_products(module)
    for _ in range(2):
        for found, expected in zip(module(rows, other), before, strict=True):
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
    columns = counted(monkeypatch)
    module(rows)
    assert columns == [48, 16, 24]


def test_a_forward_that_was_broken_off_leaves_nothing_wrong_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    module, rows, other = Attention(torch.float16), *torch.randn(2, 4, 32).half()
    before = module(other)
    assert join_products(module)
    module.q_proj(rows)  # and then something raised
    columns = counted(monkeypatch)
    for found, expected in zip(module(other), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-9, atol=1e-3)
    assert columns == [88]


def test_what_is_not_alike_keeps_its_products() -> None:
    assert not join_products(Attention(torch.float32))
    assert not join_products(Attention(torch.bfloat16, inputs=(32, 16, 32)))
    mixed = Attention(torch.bfloat16)
    mixed.k_proj = nn.Linear(32, 16, bias=True, dtype=torch.bfloat16)
    assert not join_products(mixed)
    hooked = Attention(torch.bfloat16)
    hooked.v_proj.forward = lambda rows: rows
    assert not join_products(hooked)
    assert not join_products(nn.Linear(4, 4))
    broken = Attention(torch.bfloat16)
    broken.k_proj.weight.data[3, 5] = torch.nan
    assert not join_products(broken)


def test_gate_and_up_of_a_dense_block_are_one() -> None:
    block = nn.Module()
    block.gate_proj, block.up_proj = (nn.Linear(16, 24, bias=False, dtype=torch.bfloat16) for _ in range(2))
    block.requires_grad_(False)
    rows = torch.randn(3, 16).bfloat16()
    gate, up = block.gate_proj(rows), block.up_proj(rows)
    assert join_products(block)
    torch.testing.assert_close(block.gate_proj(rows), gate, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(block.up_proj(rows), up, rtol=2**-7, atol=1e-3)
