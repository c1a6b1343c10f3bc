"""The reference, transformers' own whole model in fp32 with `experts_implementation="eager"`, and the token-exact rule.

Token-exact means equal tokens. A first difference is scored again by the reference in fp64: only when both tokens lie
within `NEAR` of the largest logit is it a near tie, which is counted apart; anything else fails. After a near tie the
reference goes on from the tokens that were found.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ray_moe.weights.sources import experts_modules

NEAR = 1e-5  # of a logit, in fp64


class Reference:
    """Greedy continuations by transformers alone, each computed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = self._load(torch.float32)
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """The next `count` tokens."""
        key = (tuple(prompt), count)
        if key not in self._known:
            self._known[key] = greedy(self.model, prompt, count)
        return self._known[key]

    def near_ties(self, prompt: Sequence[int], found: Sequence[int]) -> int:
        """How many near ties separate `found` from the reference; AssertionError at a difference that is none."""
        found, near, done = tuple(found), 0, 0
        while found[done:] != (expected := self.greedy((*prompt, *found[:done]), len(found) - done)):
            at = next(at for at, token in enumerate(expected) if token != found[done + at])
            context = (*prompt, *found[: done + at])
            logits_V = _last_logits(self._exact, context)
            gap = float(logits_V.max() - logits_V[[expected[at], found[done + at]]].min())
            assert gap < NEAR, (
                f"token {done + at} after a prompt of {len(prompt)}: found {found[done + at]}, the reference has "
                f"{expected[at]}; in fp64 they lie {gap:.3g} below the largest logit, a near tie is under {NEAR}"
            )
            near, done = near + 1, done + at + 1
        return near

    @property
    def trunk_parameters(self) -> int:
        """Parameters that are not a routed expert's."""
        routed = {id(parameter) for _, _, module in experts_modules(self.model) for parameter in module.parameters()}
        return sum(parameter.numel() for parameter in self.model.parameters() if id(parameter) not in routed)

    @property
    def routes_per_position(self) -> int:
        """Top-k times MoE layers."""
        return int(self.model.config.num_experts_per_tok) * len(experts_modules(self.model))

    @cached_property
    def _exact(self) -> PreTrainedModel:
        return self._load(torch.float64)

    def _load(self, dtype: torch.dtype) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, experts_implementation="eager", local_files_only=True
        ).eval()


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` tokens by argmax with transformers' own cache.

    Not `generate`: it would take tokens of the prompt that equal the padding token for padding, and stop at an end of
    sequence.
    """
    tokens = list(prompt)
    cache, fresh = None, tokens
    while len(tokens) < len(prompt) + count:
        output = model(
            input_ids=torch.tensor([fresh]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, fresh = output.past_key_values, [int(output.logits[0, -1].argmax())]
        tokens += fresh
    return tuple(tokens[len(prompt) :])


@torch.inference_mode()
def _last_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits[0, -1]
