"""What changes a model's logits before a token is taken: biases, penalties for repetition, a grammar.

All of it follows from a request's parameters and from the tokens that it has generated, so a request that is preempted,
handed over or submitted again is steered as if nothing had happened. `Steering` keeps it up to date token by token;
`SteeringColumns` brings it to the device, once per unit.

Letters: B sampled rows, V vocabulary, A single logits that change, G rows under a grammar, W words of 32 tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ray_moe.engine.sampling import SamplingParams

WORD_TOKENS = 32


class Matcher(Protocol):
    """How far one generation is within a grammar."""

    def take(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens."""

    def fill(self, words_W: np.ndarray) -> None:
        """Write one bit per token, lowest first: whether it may come next. After a failure, only the end may."""

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty as long as it can."""


class Grammar(Protocol):
    """A compiled grammar, for any number of generations."""

    def begin(self) -> Matcher:
        """A generation before its first token."""


class Steering:
    """What is done to one request's logits at its next token."""

    def __init__(self, params: SamplingParams, grammar: Grammar | None) -> None:
        self._params = params
        self._matcher = grammar.begin() if grammar is not None else None
        self._taken = 0
        self._seen: set[int] = set()
        self.deltas: dict[int, float] = dict(params.logit_bias)  # by token id; what is added to its logit

    def advance(self, tokens: Sequence[int], prompt: int) -> None:
        """All tokens that the request has so far, of which the first `prompt` are its prompt; what is known already is
        passed over."""
        fresh, self._taken = tokens[prompt + self._taken :], len(tokens) - prompt
        if self._matcher is not None:
            self._matcher.take(fresh)
        if self._params.penalises:
            for token in fresh:
                first = 0.0 if token in self._seen else self._params.presence_penalty
                self._seen.add(token)
                self.deltas[token] = self.deltas.get(token, 0.0) - first - self._params.frequency_penalty

    @property
    def matcher(self) -> Matcher | None:
        """Where its grammar is; None without one."""
        return self._matcher

    @property
    def failure(self) -> str:
        """Why the grammar cannot be followed any further; empty as long as it can."""
        return self._matcher.failure if self._matcher is not None else ""


@dataclass(frozen=True)
class SteeringColumns:
    """The changes of one unit's sampled rows, on the unit's device."""

    row_A: Tensor  # int64
    token_A: Tensor  # int64
    delta_A: Tensor  # float32; each (row, token) comes once
    guided_G: Tensor  # int64, the rows under a grammar
    words_GW: Tensor  # int32, a bit per token

    @classmethod
    def pack(
        cls, steerings: Sequence[Steering | None], vocab_size: int, device: torch.device | str
    ) -> SteeringColumns | None:
        """Of the sampled rows in order; None when nothing changes any of them."""
        rows, tokens, deltas = array("q"), array("q"), array("f")
        guided: list[tuple[int, Matcher]] = []
        for row, steering in enumerate(steerings):
            if steering is None:
                continue
            rows.extend([row] * len(steering.deltas))
            tokens.extend(steering.deltas)
            deltas.extend(steering.deltas.values())
            if steering.matcher is not None:
                guided.append((row, steering.matcher))
        if not rows and not guided:
            return None
        words_GW = np.zeros((len(guided), -(-vocab_size // WORD_TOKENS)), dtype=np.int32)
        for place, (_, matcher) in enumerate(guided):
            matcher.fill(words_GW[place])
        return cls(
            torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True),
            torch.tensor(tokens, dtype=torch.int64).to(device, non_blocking=True),
            torch.tensor(deltas, dtype=torch.float32).to(device, non_blocking=True),
            torch.tensor([row for row, _ in guided], dtype=torch.int64).to(device, non_blocking=True),
            torch.from_numpy(words_GW).to(device, non_blocking=True),
        )

    def apply(self, logits_BV: Tensor) -> Tensor:
        """The logits with the changes, in float32. Rows without any keep their values; `logits_BV` stays as it is."""
        steered_BV = logits_BV.to(torch.float32, copy=True)
        steered_BV.index_put_((self.row_A, self.token_A), self.delta_A, accumulate=True)
        if len(self.guided_G):
            bit_32 = torch.arange(WORD_TOKENS, dtype=torch.int32, device=logits_BV.device)
            allowed_GV = (((self.words_GW[:, :, None] >> bit_32) & 1) != 0).flatten(1)[:, : logits_BV.shape[1]]
            steered_BV[self.guided_G] = steered_BV[self.guided_G].masked_fill(~allowed_GV, -torch.inf)
        return steered_BV


@dataclass(frozen=True)
class TokenLogprobs:
    """The logarithm of a token's probability as the model gives it, and the likeliest tokens with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(
    logits_BV: Tensor, tokens_B: Tensor, wanted: Sequence[int | None]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """For each row none, or those of the token that was taken; `wanted` are the likeliest tokens asked for, by row.

    Two copies to the host for all rows together.
    """
    rows = [row for row, count in enumerate(wanted) if count is not None]
    if not rows:
        return ((),) * len(wanted)
    row_L = torch.tensor(rows, device=logits_BV.device)
    logprobs_LV = logits_BV[row_L].float().log_softmax(dim=-1)
    most = min(max(count for count in wanted if count is not None), logits_BV.shape[1])
    top = logprobs_LV.topk(most, dim=-1)
    chosen_L1 = logprobs_LV.gather(1, tokens_B[row_L][:, None])
    values = torch.cat([chosen_L1, top.values], dim=1).tolist()
    found: list[tuple[TokenLogprobs, ...]] = [()] * len(wanted)
    for row, (chosen, *likeliest), ids in zip(rows, values, top.indices.tolist(), strict=True):
        pairs = zip(ids[: wanted[row]], likeliest, strict=False)
        found[row] = (TokenLogprobs(chosen, tuple(pairs)),)
    return tuple(found)
