"""Runners: one function in several representations, equal to a loop over rows."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.dataplane.runners import CapacityPadded, Grouped, LayerWeights, Runner, runner_named
from ray_moe.errors import ConfigError
from tests.layers import Experts, placement, slot_map, spec_of, swiglu, untimed

HIDDEN, FFN = 6, 5
RUNNERS = ("grouped", "capacity_padded")


def pool(slots: tuple[int, ...], *, bias: bool = False, dtype: torch.dtype = torch.float32) -> LayerWeights:
    """Weights in the named pool slots, NaN in every other one."""
    experts = Experts.random(max(slots, default=0) + 2, HIDDEN, FFN, bias=bias, dtype=dtype)
    unused = [slot for slot in range(experts.down.shape[0]) if slot not in slots]
    for tensor in (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias):
        if tensor is not None:
            tensor[unused] = torch.nan
    return LayerWeights(
        experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias, slots, activation=swiglu
    )


def offsets_of(counts: list[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))


def loop(rows_RD: Tensor, offsets: tuple[int, ...], weights: LayerWeights) -> Tensor:
    """The oracle: one row at a time, in fp32."""
    out_RD = torch.zeros(rows_RD.shape)
    for local, pool_slot in enumerate(weights.pool_slots):
        for row in range(offsets[local], offsets[local + 1]):
            inner = weights.gate_up[pool_slot].float() @ rows_RD[row].float()
            if weights.gate_up_bias is not None:
                inner = inner + weights.gate_up_bias[pool_slot].float()
            outer = weights.down[pool_slot].float() @ swiglu(inner)
            if weights.down_bias is not None:
                outer = outer + weights.down_bias[pool_slot].float()
            out_RD[row] = outer
    return out_RD


@pytest.mark.parametrize("name", RUNNERS)
@untimed
@given(
    st.lists(st.integers(0, 5), max_size=5).flatmap(
        lambda counts: st.tuples(st.just(counts), st.permutations(range(len(counts) + 1)), st.booleans())
    )
)
def test_a_runner_is_the_loop_over_rows(name: str, case: tuple[list[int], list[int], bool]) -> None:
    counts, slots, bias = case
    weights, offsets = pool(tuple(slots[: len(counts)]), bias=bias), offsets_of(counts)
    rows = torch.randn(sum(counts), HIDDEN)
    out = runner_named(name).run(rows, offsets, weights)
    assert out.shape == rows.shape
    torch.testing.assert_close(out, loop(rows, offsets, weights), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0], [4], [0, 3, 0], [3, 0, 1]], ids=str)
@pytest.mark.parametrize("name", RUNNERS)
def test_segments_may_be_empty_at_any_place(name: str, counts: list[int]) -> None:
    weights, offsets = pool(tuple(range(len(counts)))), offsets_of(counts)
    rows = torch.randn(sum(counts), HIDDEN)
    out = runner_named(name).run(rows, offsets, weights)
    torch.testing.assert_close(out, loop(rows, offsets, weights), atol=1e-5, rtol=1e-5)


# bf16 has 8 bits: two roundings of 2^-9 each on sums of about six products of size one.
BF16: dict[str, Any] = {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("name", RUNNERS)
def test_bf16_rows_stay_bf16_and_near_the_fp32_loop(name: str, bias: bool) -> None:
    weights, offsets = pool((2, 0, 1), bias=bias, dtype=torch.bfloat16), offsets_of([3, 0, 5])
    rows = torch.randn(8, HIDDEN).bfloat16()
    out = runner_named(name).run(rows, offsets, weights)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), loop(rows, offsets, weights), **BF16)


@pytest.mark.parametrize("runner", [Grouped(), CapacityPadded()], ids=RUNNERS)
def test_a_bias_is_added_to_the_rounded_product_as_transformers_does(runner: Runner) -> None:
    weights = pool((0,), bias=True, dtype=torch.bfloat16)
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    rows = torch.randn(64, HIDDEN).bfloat16()
    inner = functional.linear(rows, weights.gate_up[0]) + weights.gate_up_bias[0]
    expected = functional.linear(swiglu(inner), weights.down[0]) + weights.down_bias[0]
    assert torch.equal(runner.run(rows, (0, 64), weights), expected)
    # A fused bias rounds once less, and the rows here can tell.
    fused = functional.linear(swiglu(inner), weights.down[0], weights.down_bias[0])
    assert not torch.equal(fused, expected)


@pytest.mark.parametrize("name", RUNNERS)
def test_the_families_own_activation_is_used(name: str) -> None:
    def clamped(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return gate.clamp(max=0.1) * (up + 1)

    plain = pool((1, 0))
    weights = LayerWeights(plain.gate_up, plain.down, None, None, (1, 0), activation=clamped)
    rows = torch.randn(4, HIDDEN)
    out = runner_named(name).run(rows, (0, 3, 4), weights)
    for row, pool_slot in enumerate((1, 1, 1, 0)):
        expected = clamped(rows[row] @ plain.gate_up[pool_slot].T) @ plain.down[pool_slot].T
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 3, 4), (4, 1, 0), ()], ids=str)
def test_a_new_weight_in_a_slot_is_seen_whatever_the_slots_order(slots: tuple[int, ...]) -> None:
    weights, offsets = pool(slots), offsets_of([2] * len(slots))
    rows = torch.randn(2 * len(slots), HIDDEN)
    for name in RUNNERS:
        runner_named(name).run(rows, offsets, weights)
    weights.down.mul_(2)  # the slabs keep their addresses: whoever fills a slot does so under everybody's views
    for name in RUNNERS:
        out = runner_named(name).run(rows, offsets, weights)
        torch.testing.assert_close(out, loop(rows, offsets, weights), atol=1e-5, rtol=1e-5)


def test_consecutive_slots_are_read_where_they_lie_and_others_are_gathered() -> None:
    consecutive, scattered = pool((1, 2, 3)), pool((3, 0, 1))
    assert consecutive.gate_up[consecutive.stack].data_ptr() == consecutive.gate_up[1].data_ptr()
    assert torch.equal(scattered.gate_up[scattered.stack], scattered.gate_up[[3, 0, 1]])


def test_local_slots_are_in_dispatch_order_whatever_the_pool_slots() -> None:
    snapshot = placement([(2, 0), (0, 1), (1, 0)], spec_of((0, 1)))
    slots = slot_map(snapshot, 0)
    experts = Experts.random(3, HIDDEN, FFN)
    weights = experts.slabs(slots, snapshot, 0)
    assert weights.pool_slots == (1, 0)
    assert [torch.equal(weights.experts[local][1], experts.down[expert]) for local, expert in ((0, 2), (1, 1))] == [
        True,
        True,
    ]


def test_runners_are_named_and_an_unknown_name_lists_them() -> None:
    assert [runner_named(name).name for name in RUNNERS] == list(RUNNERS)
    with pytest.raises(ConfigError, match=r"capacity_padded, grouped, found 'walking'"):
        runner_named("walking")
