"""Sampling against a scalar reference in plain Python, and the properties that make a stream repeatable."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from ray_moe.engine.sampling import SamplingParams, admitted, mix, sample, uniform
from ray_moe.errors import RequestError

MASK = 2**64 - 1


def reference_mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def reference_uniform(seed: int, index: int) -> float:
    state = (reference_mix(seed & MASK) + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    return (reference_mix(state) >> 11) / 2**53


def reference_sample(logits: list[float], params: SamplingParams, index: int) -> int:
    """Softmax, sort, top-k, renormalise, top-p, inverse CDF: the textbook order, in floating point."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.greedy:
        return order[0]
    weights = [math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order]
    weights = weights[: params.top_k or None]
    nucleus, mass = [], 0.0
    for weight in weights:
        if mass >= params.top_p * sum(weights):
            break
        nucleus.append(weight)
        mass += weight
    assert params.seed is not None
    target, mass = reference_uniform(params.seed, index) * sum(nucleus), 0.0
    for token, weight in zip(order, nucleus, strict=False):
        mass += weight
        if mass > target:
            return token
    return order[len(nucleus) - 1]


def sample_rows(logits_BV: Tensor, params: list[SamplingParams], indices: list[int]) -> list[int]:
    return sample(
        logits_BV,
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.seed or 0 for p in params]),
        torch.tensor(indices),
    ).tolist()


def drawn(logits: list[float], params: SamplingParams, count: int) -> list[int]:
    """`count` tokens of one request, all from the same logits."""
    return sample_rows(torch.tensor([logits]).expand(count, -1), [params] * count, list(range(count)))


MIXED_PARAMS = [
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    for temperature in (0.0, 0.3, 1.0, 2.5)
    for top_p in (0.2, 0.9, 1.0)
    for top_k in (0, 1, 7, 1000)
    for seed in (0, -5, 2**63 - 1)
]


def test_a_mixed_batch_equals_the_scalar_reference() -> None:
    torch.manual_seed(0)
    logits_BV = torch.randn(len(MIXED_PARAMS), 97) * 3
    indices = [row * 37 for row in range(len(MIXED_PARAMS))]
    expected = [
        reference_sample(logits.tolist(), params, index)
        for logits, params, index in zip(logits_BV, MIXED_PARAMS, indices, strict=True)
    ]
    assert sample_rows(logits_BV, MIXED_PARAMS, indices) == expected


def test_the_hash_is_splitmix64() -> None:
    # The first two outputs of SplitMix64 seeded with 0, from its authors' reference implementation.
    gamma = torch.tensor([0x9E3779B97F4A7C15 - 2**64, 2 * 0x9E3779B97F4A7C15 & MASK])
    assert [word & MASK for word in mix(gamma).tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_uniform_equals_unbounded_integers_and_stays_below_one() -> None:
    seeds = [0, 1, -1, 2**62, -(2**63), 2**63 - 1]
    for index in (0, 1, 12345, 2**40):
        found = uniform(torch.tensor(seeds), torch.tensor([index] * len(seeds))).tolist()
        assert found == [reference_uniform(seed, index) for seed in seeds]
        assert all(0 <= number < 1 for number in found)


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(1)
    logits_BV = torch.randn(len(MIXED_PARAMS), 1031)
    indices = list(range(len(MIXED_PARAMS)))
    together = sample_rows(logits_BV, MIXED_PARAMS, indices)
    alone = [sample_rows(logits_BV[b : b + 1], [MIXED_PARAMS[b]], [indices[b]])[0] for b in indices]
    assert together == alone


def test_the_same_seed_and_index_draw_the_same_token_and_others_do_not() -> None:
    params = SamplingParams(seed=11)
    first = drawn([0.0] * 50, params, 200)
    assert first == drawn([0.0] * 50, params, 200)
    assert len(set(first)) > 40  # indices differ
    assert first != drawn([0.0] * 50, SamplingParams(seed=12), 200)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_frequencies_follow_the_softmax_by_chi_square(seed: int) -> None:
    logits, temperature, count = [1.5, 0.0, -0.5, 1.0, 0.25, -2.0], 0.8, 20_000
    weights = [math.exp(logit / temperature) for logit in logits]
    found = Counter(drawn(logits, SamplingParams(temperature=temperature, seed=seed), count))
    expected = [count * weight / sum(weights) for weight in weights]
    chi_square = sum((found[token] - mean) ** 2 / mean for token, mean in enumerate(expected))
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded by chance once in 1000


def test_top_k_keeps_exactly_k_and_breaks_ties_by_token_id() -> None:
    logits = [0.0, 1.0, 1.0, 1.0, -1.0]
    for top_k, kept in (
        (1, {1}),
        (2, {1, 2}),
        (3, {1, 2, 3}),
        (4, {0, 1, 2, 3}),
        (5, {0, 1, 2, 3, 4}),
        (9, set(range(5))),
    ):
        assert set(drawn(logits, SamplingParams(top_k=top_k, seed=3), 2000)) == kept


def test_top_p_keeps_the_shortest_prefix_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    for top_p, kept in ((1e-9, 1), (0.5 - 1e-6, 1), (0.5 + 1e-6, 2), (0.75 + 1e-6, 3), (0.875 + 1e-6, 4), (1.0, 4)):
        assert set(drawn(logits, SamplingParams(top_p=top_p, seed=4), 2000)) == set(range(kept))


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the first two, 0.4 is 57 %: a nucleus of 0.5 is one token. Of all four it would be two.
    assert set(drawn(logits, SamplingParams(top_k=2, top_p=0.5, seed=5), 500)) == {0}
    assert set(drawn(logits, SamplingParams(top_p=0.5, seed=5), 500)) == {0, 1}


def test_impossible_tokens_are_never_drawn_and_tiny_temperatures_are_greedy() -> None:
    assert set(drawn([0.0, -math.inf, 0.0], SamplingParams(seed=6), 1000)) == {0, 2}
    assert set(drawn([3.0, 3.1, -9.0], SamplingParams(temperature=5e-324, seed=6), 100)) == {1}


def test_greedy_takes_the_lowest_of_equal_tokens_and_an_empty_batch_is_empty() -> None:
    greedy = SamplingParams(temperature=0)
    assert sample_rows(torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]]), [greedy] * 2, [0, 0]) == [1, 0]
    assert sample_rows(torch.empty(0, 5), [], []) == []


def test_low_precision_logits_draw_what_their_exact_values_draw() -> None:
    torch.manual_seed(2)
    logits_BV = torch.randn(len(MIXED_PARAMS), 64).bfloat16()
    indices = list(range(len(MIXED_PARAMS)))
    assert sample_rows(logits_BV, MIXED_PARAMS, indices) == sample_rows(logits_BV.float(), MIXED_PARAMS, indices)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_draws_what_the_cpu_draws() -> None:
    torch.manual_seed(3)
    logits_BV = torch.randn(len(MIXED_PARAMS), 32_000)
    columns = [
        torch.tensor([getattr(params, name) for params in MIXED_PARAMS], dtype=dtype)
        for name, dtype in (
            ("temperature", torch.float64),
            ("top_p", torch.float64),
            ("top_k", torch.int64),
            ("seed", torch.int64),
        )
    ]
    columns.append(torch.arange(len(MIXED_PARAMS)))
    on_cpu = sample(logits_BV, *columns)
    on_cuda = sample(logits_BV.cuda(), *[column.cuda() for column in columns])
    assert on_cuda.cpu().tolist() == on_cpu.tolist()


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("max_tokens", 0, ">= 1"),
        ("max_tokens", True, "an integer"),
        ("temperature", -0.1, ">= 0"),
        ("temperature", math.nan, ">= 0"),
        ("temperature", math.inf, "finite"),
        ("temperature", 10**400, "finite"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.0001, "(0, 1]"),
        ("top_k", -1, ">= 0"),
        ("top_k", 2**63, "64-bit"),
        ("seed", 2**63, "64-bit"),
        ("seed", 1.5, "64-bit"),
        ("stop", "END", "tuple of non-empty strings"),
        ("stop", ("",), "tuple of non-empty strings"),
        ("ignore_eos", 1, "a bool"),
    ],
)
def test_a_bad_parameter_is_refused_by_name_value_and_bound(field: str, value: object, bound: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert f"{field} is {value!r}" in str(caught.value)
    assert bound in str(caught.value)


def test_admission_gives_a_seed_once() -> None:
    params = admitted(SamplingParams())
    assert params.seed is not None
    assert admitted(params) is params
    assert len({admitted(SamplingParams()).seed for _ in range(8)}) == 8
