"""The torch twins of the kernels: the worked examples of their docstrings, and scalar oracles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.kernels.reference import exclusive_sum, inverse_of, permute, stable_order, unpermute, weighted_combine
from tests.layers import untimed

keys = st.lists(st.integers(0, 4), max_size=40)


def test_the_worked_examples_hold() -> None:
    assert exclusive_sum(torch.tensor([2, 1, 0])).tolist() == [0, 2, 3, 3]
    order, counts = stable_order(torch.tensor([2, 0, 2, 1]), 3)
    assert order.tolist() == [1, 3, 0, 2]
    assert counts.tolist() == [1, 1, 2]
    assert inverse_of(torch.tensor([1, 3, 0, 2])).tolist() == [2, 0, 3, 1]
    rows, by = torch.tensor([[5], [6], [7]]), torch.tensor([2, 0, 1])
    assert permute(rows, by).tolist() == [[7], [5], [6]]
    assert unpermute(permute(rows, by), by).tolist() == [[5], [6], [7]]
    gated = weighted_combine(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5, 0.25]]), 2, torch.float32)
    assert gated.tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@untimed
@given(counts=keys)
def test_offsets_are_running_sums_with_a_sentinel_in_the_counts_own_dtype(
    dtype: torch.dtype, counts: list[int]
) -> None:
    offsets = exclusive_sum(torch.tensor(counts, dtype=dtype))
    assert offsets.dtype == dtype
    assert offsets.tolist() == [sum(counts[:end]) for end in range(len(counts) + 1)]


@untimed
@given(keys)
def test_the_order_is_pythons_stable_sort_and_the_counts_are_a_histogram(values: list[int]) -> None:
    order, counts = stable_order(torch.tensor(values, dtype=torch.int64), 5)
    assert order.tolist() == sorted(range(len(values)), key=lambda position: values[position])
    assert counts.tolist() == [values.count(key) for key in range(5)]


@untimed
@given(st.integers(0, 40).flatmap(lambda size: st.permutations(range(size))), st.integers(1, 3))
def test_permuting_and_unpermuting_undo_one_another(order: list[int], width: int) -> None:
    by = torch.tensor(order, dtype=torch.int64)
    rows = torch.randn(len(order), width)
    permuted = permute(rows, by)
    assert permuted.tolist() == [rows[source].tolist() for source in order]
    assert torch.equal(unpermute(permuted, by), rows)
    assert torch.equal(permute(permuted, inverse_of(by)), rows)
    assert torch.equal(inverse_of(inverse_of(by)), by)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_combine_is_the_gated_sum_over_each_tokens_own_rows(tokens: int, top_k: int) -> None:
    rows, gates = torch.randn(tokens * top_k, 3), torch.rand(tokens, top_k)
    expected = torch.zeros(tokens, 3, dtype=torch.float64)
    for token in range(tokens):
        for slot in range(top_k):
            expected[token] += gates[token, slot].double() * rows[token * top_k + slot].double()
    out = weighted_combine(rows, gates, top_k, torch.float32)
    torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=1e-6)


def test_without_gates_combine_is_the_plain_sum() -> None:
    rows = torch.randn(6, 4)
    assert torch.equal(weighted_combine(rows, None, 2, torch.float32), rows.view(3, 2, 4).sum(1))


def test_fp32_gates_weigh_bf16_rows_in_fp32_and_only_the_sum_is_rounded() -> None:
    rows = torch.randn(8, 16).bfloat16()
    gates = torch.rand(4, 2)
    exact = (rows.float().view(4, 2, 16) * gates.unsqueeze(-1)).sum(1)
    out = weighted_combine(rows, gates, 2, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())
    # Rounding the gates first would give other numbers: the test can tell.
    early = weighted_combine(rows, gates.bfloat16(), 2, torch.bfloat16)
    assert not torch.equal(early, exact.bfloat16())


def test_rows_of_a_token_are_summed_in_route_slot_order() -> None:
    # 2^24 + 1 - 2^24 is 0 or 1 in fp32, by the order of its three terms.
    big = 2.0**24
    rows = torch.tensor([[big], [1.0], [-big]])
    assert weighted_combine(rows, torch.ones(1, 3), 3, torch.float32).tolist() == [[0.0]]
    assert weighted_combine(rows[[0, 2, 1]], torch.ones(1, 3), 3, torch.float32).tolist() == [[1.0]]
