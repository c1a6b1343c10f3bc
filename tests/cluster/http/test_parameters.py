"""Sampling parameters, several choices, log probabilities and echo, over HTTP.

The oracles: the SDK on the same cluster, and transformers' own model of the same checkpoint for log probabilities.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_moe.engine.sampling import SamplingParams, choices
from ray_moe.models import tiny_moe_path
from tests.cluster.http.server import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    MESSAGES,
    MODEL,
    PROMPT,
    TOKENIZER,
    Server,
    text_of,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

DRAWN: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 5}


@cache
def logprobs_by_transformers(text: str) -> torch.Tensor:
    """[positions, V]: what follows each token of `text`."""
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_path(), dtype=torch.float32, experts_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENIZER.encode(text)])).logits[0]
    return logits.log_softmax(-1)


def test_every_parameter_reaches_the_engine_as_the_sdk_has_it(server: Server) -> None:
    wire = {"min_p": 0.05, "top_k": 40, "presence_penalty": 0.7, "frequency_penalty": 0.3}
    expected = server.generate(
        TOKENIZER.encode(PROMPT), max_tokens=12, temperature=1.0, seed=5, logit_bias=((260, 2.5),), **wire
    )
    answer = server.post(COMPLETIONS, DRAWN | wire | {"logit_bias": {"260": 2.5}}).json()
    assert answer["choices"][0]["text"] == text_of(expected.token_ids)
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)


def test_a_bias_of_a_hundred_decides_and_one_of_minus_a_hundred_bans(server: Server) -> None:
    wanted = TOKENIZER.encode("x")[0]
    forced = server.post(COMPLETIONS, GREEDY | {"max_tokens": 4, "logit_bias": {str(wanted): 100}}).json()
    assert forced["choices"][0]["text"] == "xxxx"
    first = server.generate(TOKENIZER.encode(PROMPT), max_tokens=1, temperature=0).token_ids[0]
    banned = server.post(COMPLETIONS, GREEDY | {"max_tokens": 1, "logit_bias": {str(first): -100}}).json()
    assert banned["choices"][0]["text"] != text_of((first,))


def test_a_penalty_for_frequency_ends_what_would_repeat_for_ever(server: Server) -> None:
    ids = server.generate(TOKENIZER.encode("ha ha ha ha ha ha"), max_tokens=40, temperature=0, ignore_eos=True)
    penalised = server.generate(
        TOKENIZER.encode("ha ha ha ha ha ha"), max_tokens=40, temperature=0, ignore_eos=True, frequency_penalty=2.0
    )
    assert len(set(penalised.token_ids)) > len(set(ids.token_ids))


def test_choices_are_the_draws_of_derived_seeds_and_the_first_is_the_only_one_of_n_1(server: Server) -> None:
    params = choices(SamplingParams(max_tokens=12, seed=5), 4)
    expected = [
        text_of(server.generate(TOKENIZER.encode(PROMPT), max_tokens=12, seed=one.seed).token_ids) for one in params
    ]
    answer = server.post(COMPLETIONS, DRAWN | {"n": 4}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert len(set(expected)) > 1
    assert server.post(COMPLETIONS, DRAWN).json()["choices"][0]["text"] == expected[0]
    assert answer["usage"]["prompt_tokens"] == len(TOKENIZER.encode(PROMPT))


def test_streamed_choices_are_the_whole_ones_in_pieces(server: Server) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "n": 3, "seed": 3, "max_tokens": 10}
    whole = server.openai.chat.completions.create(**body)
    texts, reasons = ["", "", ""], [None, None, None]
    for chunk in server.openai.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_several_prompts_are_answered_in_order_as_each_alone(server: Server) -> None:
    prompts = [PROMPT, "Good morrow", TOKENIZER.encode("What ho")]
    together = server.post(COMPLETIONS, GREEDY | {"prompt": prompts}).json()
    alone = [server.post(COMPLETIONS, GREEDY | {"prompt": prompt}).json() for prompt in prompts]
    assert [choice["text"] for choice in together["choices"]] == [one["choices"][0]["text"] for one in alone]
    for count in ("prompt_tokens", "completion_tokens"):
        assert together["usage"][count] == sum(one["usage"][count] for one in alone)


@pytest.mark.parametrize("prompt", [PROMPT, TOKENIZER.encode(PROMPT)])
def test_echo_puts_the_prompt_before_the_completion(server: Server, prompt: Any) -> None:
    plain = server.post(COMPLETIONS, GREEDY).json()["choices"][0]["text"]
    body = GREEDY | {"prompt": prompt, "echo": True}
    assert server.post(COMPLETIONS, body).json()["choices"][0]["text"] == PROMPT + plain
    pieces = [json.loads(event)["choices"][0]["text"] for event in server.events(COMPLETIONS, body)[:-1]]
    assert pieces[0] == PROMPT
    assert "".join(pieces) == PROMPT + plain


def test_an_echo_of_what_is_no_token_is_refused(server: Server) -> None:
    answer = server.post(COMPLETIONS, GREEDY | {"prompt": [5, -(2**70)], "echo": True})
    assert answer.status_code == 400
    assert f"prompt holds token id {-(2**70)}" in answer.json()["error"]["message"]


def test_log_probabilities_are_those_of_transformers(server: Server) -> None:
    body = GREEDY | {"logprobs": 3, "max_tokens": 6, "ignore_eos": True}
    answer = server.openai.completions.create(**(body | {"extra_body": {"ignore_eos": body.pop("ignore_eos")}}))
    found, text = answer.choices[0].logprobs, answer.choices[0].text
    assert found is not None
    assert found.tokens is not None and found.token_logprobs is not None and found.top_logprobs is not None
    assert "".join(found.tokens) == text
    assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(6)]
    logprobs_TV = logprobs_by_transformers(PROMPT + text)
    start = len(TOKENIZER.encode(PROMPT)) - 1
    for place, (token, logprob, top) in enumerate(
        zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
    ):
        expected_V = logprobs_TV[start + place]
        assert logprob == pytest.approx(float(expected_V.max()), abs=1e-4)  # fp32, another order of addition
        assert list(top.values()) == pytest.approx(expected_V.topk(3).values.tolist(), abs=1e-4)
        assert top[token] == logprob


def test_log_probabilities_of_a_chat_have_bytes_and_come_with_every_chunk(server: Server) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    body |= {"logprobs": True, "top_logprobs": 2}
    whole = server.openai.chat.completions.create(**body).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert all(len(token.top_logprobs) == 2 for token in whole.logprobs.content)
    said = b"".join(bytes(token.bytes or ()) for token in whole.logprobs.content)
    assert said.decode().startswith(whole.message.content or "-")
    streamed = []
    for chunk in server.openai.chat.completions.create(**body, stream=True):
        streamed += (chunk.choices[0].logprobs.content or []) if chunk.choices[0].logprobs else []
    assert streamed == whole.logprobs.content


def test_a_temperature_or_a_bias_does_not_change_the_log_probabilities(server: Server) -> None:
    def first(**changes: Any) -> float:
        body = GREEDY | {"max_tokens": 1, "logprobs": 1} | changes
        return float(server.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]["token_logprobs"][0])

    token = server.generate(TOKENIZER.encode(PROMPT), max_tokens=1, temperature=0).token_ids[0]
    assert first() == first(temperature=1.5, logit_bias={str(token): 100})


def test_a_chat_refuses_what_only_completions_have(server: Server) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "top_logprobs": 2}
    answer = server.post(CHAT, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "top_logprobs is 2, but logprobs is not true"
