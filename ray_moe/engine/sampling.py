"""Sampling: a pure, vectorised function of logits, seed and token index.

A token drawn anywhere (another peer, another batch, a second try after a failure) is the same token, because nothing
here has state and no row sees another. Two choices make that exact rather than likely:

- the random number of token `index` under `seed` is a hash of the two (SplitMix64; Steele, Lea and Flood, "Fast
  splittable pseudorandom number generators", OOPSLA 2014), in int64 arithmetic that wraps alike on every device;
- probabilities become integer weights before they are summed. Integer sums do not depend on the order of addition,
  which a device picks by the shape of the whole batch; floating-point sums do.

Letters: B rows (one per sampled token), V vocabulary.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ray_moe.errors import RequestError

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
MOST_LOGPROBS = 20
MOST_BIASES = 1024
_BIAS, _PENALTY = 100.0, 2.0  # the largest, either way


@dataclass(frozen=True)
class SamplingParams:
    """How one request generates.

    temperature 0 is greedy; top_k 0 is off; min_p cuts what is less likely than that share of the likeliest token;
    top_p is the nucleus of what top_k and min_p left; seed None means "pick one at admission" (`admitted`); stop
    strings are watched by whoever holds the tokenizer; ignore_eos generates past the model's end-of-sequence tokens.

    logit_bias, as (token id, bias), is added to the logits, and the penalties are taken from those of tokens that were
    generated before: presence_penalty once, frequency_penalty per time. `grammar` (in llguidance's notation) allows
    only tokens that go on within it. logprobs asks for the logarithm of each token's probability, as the model gives
    it before any of these, beside so many of the likeliest tokens'.

    Raises RequestError naming the field, its value and its bound.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        _require(
            _is_real(self.temperature) and 0 <= self.temperature <= sys.float_info.max,
            "temperature",
            self.temperature,
            "a finite number >= 0",
        )
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _require(
            _is_int(self.top_k) and 0 <= self.top_k <= SEED_MAX, "top_k", self.top_k, "a 64-bit integer >= 0 (0 is off)"
        )
        _require(
            self.seed is None or (_is_int(self.seed) and SEED_MIN <= self.seed <= SEED_MAX),
            "seed",
            self.seed,
            "a 64-bit signed integer",
        )
        _require(
            isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            "stop",
            self.stop,
            "a tuple of non-empty strings",
        )
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "a bool")
        _require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            _require_within(getattr(self, name), _PENALTY, name)
        if self.logit_bias:
            self._check_bias()
        _require(
            self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= MOST_LOGPROBS),
            "logprobs",
            self.logprobs,
            f"an integer in [0, {MOST_LOGPROBS}]",
        )
        if self.grammar is not None:
            _require(isinstance(self.grammar, str) and bool(self.grammar), "grammar", self.grammar, "a grammar's text")
            # A grammar says where the text ends, and the end-of-sequence token is how.
            _require(not self.ignore_eos, "ignore_eos", self.ignore_eos, "false for an output in a given format")

    def _check_bias(self) -> None:
        tokens = [token for token, _ in self.logit_bias]
        _require(len(tokens) <= MOST_BIASES, "logit_bias", len(tokens), f"at most {MOST_BIASES} tokens")
        _require(len(set(tokens)) == len(tokens), "logit_bias", self.logit_bias, "of distinct tokens")
        for token, bias in self.logit_bias:
            _require(_is_int(token) and token >= 0, "logit_bias", token, "by token ids >= 0")
            _require_within(bias, _BIAS, "logit_bias")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens that were generated before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def steered(self) -> bool:
        """Whether the model's logits are changed before a token is taken."""
        return self.penalises or bool(self.logit_bias) or self.grammar is not None


def admitted(params: SamplingParams) -> SamplingParams:
    """The parameters with a seed. Whoever admits a request keeps them, so that a second try draws the same tokens."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(63))


def choices(params: SamplingParams, count: int) -> tuple[SamplingParams, ...]:
    """`count` requests that draw independently. The first is `params` itself; where it has a seed, the others have
    seeds that follow from it, so that the same seed gives the same choices again."""
    if params.seed is None:
        return (params,) * count
    return (params, *(replace(params, seed=_derived(params.seed, choice)) for choice in range(1, count)))


def _derived(seed: int, choice: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class SamplingColumns:
    """The sampling parameters of one unit's sampled rows, as columns on the unit's device.

    `all_greedy` is known to the host, so that choosing the short path costs no device round trip.
    """

    temperature_B: Tensor  # float64
    top_p_B: Tensor  # float64
    top_k_B: Tensor  # int64
    seed_B: Tensor  # int64
    index_B: Tensor  # int64, the sampled token's index in its request's generation
    all_greedy: bool
    min_p_B: Tensor | None = None  # float64; None when no row has one

    def sample(self, logits_BV: Tensor) -> Tensor:
        """Next token ids, int64 [B]; see `sample`."""
        return sample(
            logits_BV,
            self.temperature_B,
            self.top_p_B,
            self.top_k_B,
            self.seed_B,
            self.index_B,
            all_greedy=self.all_greedy,
            min_p_B=self.min_p_B,
        )


def sample(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    top_k_B: Tensor,
    seed_B: Tensor,
    index_B: Tensor,
    *,
    all_greedy: bool | None = None,
    min_p_B: Tensor | None = None,
) -> Tensor:
    """Next token ids, int64 [B], on the logits' device.

    A row with temperature 0 is the argmax (lowest id among equals). Any other row is the inverse CDF, at the uniform
    number of (seed, index), of its softmax at that temperature, sorted by falling logit (ties by token id), cut to the
    first top_k and to what is at least min_p times as likely as the first, and then to the shortest prefix that holds
    top_p of what these left.

    logits [B, V] floating point; temperature, top_p, min_p [B] floating point; top_k, seed, index [B] int64. The draw
    needs float64 on the device. Without `all_greedy` the device is asked whether any row draws (one synchronisation).
    """
    greedy_B = logits_BV.argmax(dim=-1)
    if all_greedy is None:
        all_greedy = not bool((temperature_B > 0).any())
    if all_greedy:
        return greedy_B
    drawn_B = _draw(logits_BV, temperature_B, top_p_B, top_k_B, min_p_B, uniform(seed_B, index_B))
    return torch.where(temperature_B > 0, drawn_B, greedy_B)


# The likeliest token weighs 2^42, so that a vocabulary of up to 2^20 tokens sums within int64. What weighs nothing is
# less likely than 2^-42 of the likeliest and is never drawn.
_WEIGHT_OF_BEST = 2.0**42


def _draw(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    top_k_B: Tensor,
    min_p_B: Tensor | None,
    uniform_B: Tensor,
) -> Tensor:
    ranked_BV, token_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    ranked_BV = ranked_BV.double()
    # Greedy rows come through too (a branch per row would cost a synchronisation); 1 keeps them finite.
    temperature_B1 = torch.where(temperature_B > 0, temperature_B, 1.0).double()[:, None]
    weight_BV = (((ranked_BV - ranked_BV[:, :1]) / temperature_B1).exp() * _WEIGHT_OF_BEST).long()

    rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    eligible_BV = (rank_V < top_k_B[:, None]) | (top_k_B[:, None] == 0)
    if min_p_B is not None:
        eligible_BV &= weight_BV.double() >= min_p_B.double()[:, None] * _WEIGHT_OF_BEST
    weight_BV = weight_BV * eligible_BV
    cdf_BV = weight_BV.cumsum(dim=-1)

    nucleus_B1 = top_p_B.double()[:, None] * cdf_BV[:, -1:].double()
    in_nucleus_BV = (cdf_BV - weight_BV).double() < nucleus_B1
    kept_B = torch.where(in_nucleus_BV, cdf_BV, 0).amax(dim=-1)

    # uniform < 1, yet the product can round up to the whole mass; the last kept token owns that edge.
    target_B = torch.minimum((uniform_B * kept_B.double()).long(), kept_B - 1)
    drawn_B1 = torch.searchsorted(cdf_BV, target_B[:, None], right=True).clamp(max=logits_BV.shape[-1] - 1)
    return token_BV.gather(-1, drawn_B1).squeeze(-1)


def uniform(seed_B: Tensor, index_B: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) with 53 random bits, float64 [B]: a hash of (seed, index), equal on every device."""
    bits_B = mix(mix(seed_B) + (index_B + 1) * _GAMMA)
    return _shift_right(bits_B, 11).double() * 2.0**-53


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


# SplitMix64's constants, as the signed integers that have the same 64 bits.
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def mix(word: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 words: every input bit reaches every output bit."""
    word = (word ^ _shift_right(word, 30)) * _MIX_1
    word = (word ^ _shift_right(word, 27)) * _MIX_2
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    # torch's >> keeps the sign of an int64; the mask makes it the logical shift of an unsigned word.
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _require(holds: bool, param: str, value: object, bound: str) -> None:
    if not holds:
        raise RequestError(f"{param} is {value!r}; it must be {bound}", param=param)


def _require_within(value: object, bound: float, param: str) -> None:
    _require(_is_real(value) and -bound <= value <= bound, param, value, f"a number in [{-bound:g}, {bound:g}]")  # type: ignore[operator]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
