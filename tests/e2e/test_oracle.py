"""The token-exact rule itself, on a reference that has two tokens with the same logit everywhere."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.oracle import Reference
from tests.families import build_model, family_config, save_model

PROMPT = tuple(range(40, 60))
TOKENS = 12


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Token 319 gets the logits of the first token that the model generates."""
    model = build_model(family_config("mixtral"), std=0.22)
    with torch.no_grad():
        first = int(model(input_ids=torch.tensor([PROMPT])).logits[0, -1].argmax())
        model.lm_head.weight[319] = model.lm_head.weight[first]
    return Reference(save_model(model, tmp_path_factory.mktemp("oracle")))


def test_the_tokens_of_the_reference_are_exact(reference: Reference) -> None:
    assert reference.near_ties(PROMPT, reference.greedy(PROMPT, TOKENS)) == 0


def test_the_cached_continuation_equals_whole_forwards(reference: Reference) -> None:
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(TOKENS):
            tokens.append(
                int(reference.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    assert tuple(tokens[len(PROMPT) :]) == reference.greedy(PROMPT, TOKENS)


def test_an_equal_logit_is_a_near_tie_and_the_rest_follows_what_was_found(reference: Reference) -> None:
    other = (319, *reference.greedy((*PROMPT, 319), TOKENS - 1))
    assert other[0] != reference.greedy(PROMPT, TOKENS)[0]
    assert reference.near_ties(PROMPT, other) == 1


def test_any_other_token_fails_wherever_it_stands(reference: Reference) -> None:
    expected = reference.greedy(PROMPT, TOKENS)
    for position in (0, TOKENS // 2, TOKENS - 1):
        found = list(expected)
        found[position] = next(token for token in range(300) if token not in expected)
        with pytest.raises(AssertionError, match=f"token {position} after a prompt of {len(PROMPT)}: found"):
            reference.near_ties(PROMPT, tuple(found))


def test_a_near_tie_does_not_excuse_what_comes_after_it(reference: Reference) -> None:
    other = [319, *reference.greedy((*PROMPT, 319), TOKENS - 1)]
    other[-1] = next(token for token in range(300) if token not in other)
    with pytest.raises(AssertionError, match=f"token {TOKENS - 1} after"):
        reference.near_ties(PROMPT, tuple(other))
