"""The HTTP API end to end: Ray Serve, a cluster of two peers, the embedded model, and OpenAI's own client unchanged.

The oracle is the SDK on the same cluster: HTTP may word a generation, but not change it. Greedy unless said otherwise.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from ray_moe.errors import ConfigError, NotServingError
from ray_moe.serve import app
from ray_moe.text import render_chat
from tests.cluster.http.server import (
    CHAT,
    COMPLETIONS,
    ENDLESS,
    GREEDY,
    LONG,
    MESSAGES,
    MODEL,
    NAME,
    PROMPT,
    TOKENIZER,
    Server,
    async_openai,
    error_in,
    free_port,
    text_of,
    wait_until,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


# -- Answers


def test_readiness_and_the_model_list_name_the_model(server: Server) -> None:
    ready = server.ready()
    assert (ready.status_code, ready.json()["model"]) == (200, MODEL)
    assert server.get("/health").json() == {"status": "ok"}
    assert [model.id for model in server.openai.models.list()] == [MODEL]
    assert server.openai.models.retrieve(MODEL).owned_by == "ray_moe"


def test_a_completion_is_what_the_engine_generates_and_its_usage_is_exact(server: Server) -> None:
    prompt_ids = TOKENIZER.encode(PROMPT)
    expected = server.generate(prompt_ids, max_tokens=24, temperature=0)
    answer = server.openai.completions.create(**GREEDY)
    assert answer.choices[0].text == text_of(expected.token_ids)
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == len(prompt_ids) + len(expected.token_ids)
    assert answer.system_fingerprint == server.cluster.status().release_id
    assert answer.object == "text_completion"


def test_a_chat_goes_through_the_models_template(server: Server) -> None:
    prompt_ids = list(render_chat(TOKENIZER, MESSAGES))
    expected = server.generate(prompt_ids, max_tokens=64, temperature=0)
    answer = server.openai.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=64)
    assert answer.choices[0].message.content == text_of(expected.token_ids)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt_ids), len(expected.token_ids))


def test_every_form_of_a_prompt_gives_the_same_answer(server: Server) -> None:
    ids = TOKENIZER.encode(PROMPT)
    answers = [server.post(COMPLETIONS, GREEDY | {"prompt": form}).json() for form in (PROMPT, [PROMPT], ids, [ids])]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert {answer["usage"]["prompt_tokens"] for answer in answers} == {len(ids)}


def test_text_parts_and_a_string_are_the_same_message(server: Server) -> None:
    parts = [{"type": "text", "text": "Who goes "}, {"type": "text", "text": "there?"}]
    body = {"model": MODEL, "temperature": 0, "max_completion_tokens": 8}
    one = server.post(CHAT, body | {"messages": MESSAGES}).json()
    other = server.post(CHAT, body | {"messages": [{"role": "user", "content": parts}]}).json()
    assert one["choices"] == other["choices"]
    assert one["usage"] == other["usage"]


def test_a_generation_that_runs_out_of_tokens_ends_with_length(server: Server) -> None:
    for limit in ("max_tokens", "max_completion_tokens"):
        body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, limit: 5}
        answer = server.post(COMPLETIONS, body).json()
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 5)


def test_a_completion_without_a_limit_has_openais_sixteen_tokens(server: Server) -> None:
    answer = server.post(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, "temperature": 0, "ignore_eos": True}).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 16)


def test_a_chat_without_a_limit_gets_what_fits_after_its_prompt(server: Server) -> None:
    long = [{"role": "user", "content": "word " * 2000}]
    positions = server.cluster.directory().facts.max_positions
    while (prompt_tokens := len(render_chat(TOKENIZER, long))) > positions - 4:
        long[0]["content"] = long[0]["content"][: -5 * max(1, (prompt_tokens - positions) // 8)]
    body = {"model": MODEL, "messages": long, "temperature": 0, "ignore_eos": True}
    answer = server.post(CHAT, body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == positions


def test_seeded_sampling_draws_the_same_text_again_and_other_seeds_draw_others(server: Server) -> None:
    def text(seed: int) -> str:
        body = GREEDY | {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": seed}
        return str(server.post(COMPLETIONS, body).json()["choices"][0]["text"])

    assert text(7) == text(7)
    assert len({text(seed) for seed in (7, 8, 9)}) > 1


# -- Streams


def test_a_streamed_completion_is_the_whole_one_in_pieces(server: Server) -> None:
    whole = server.openai.completions.create(**GREEDY)
    chunks = list(server.openai.completions.create(**GREEDY, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_a_streamed_chat_is_the_whole_one_in_pieces(server: Server) -> None:
    whole = server.openai.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24)
    stream = server.openai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage == whole.usage


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, GREEDY), (CHAT, GREEDY | {"messages": MESSAGES})])
def test_the_events_of_a_stream_are_openais_to_the_letter(server: Server, path: str, body: dict[str, Any]) -> None:
    *events, done = server.events(path, body | {"stream_options": {"include_usage": True}})
    *documents, last = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 1
    assert all(document["usage"] is None for document in documents)
    assert "usage" not in json.loads(server.events(path, body)[0])


def test_a_stream_has_no_more_than_one_event_per_step(server: Server) -> None:
    *events, _ = server.events(COMPLETIONS, GREEDY | {"stream_options": {"include_usage": True}})
    *texts, last = [json.loads(event) for event in events]
    assert 1 < len(texts) <= last["usage"]["completion_tokens"]


def test_eight_streams_at_once_are_equal_to_eight_answers_in_a_row(server: Server) -> None:
    bodies = [GREEDY | {"prompt": PROMPT[: 4 + 2 * i], "max_tokens": 10 + i} for i in range(8)]

    async def stream(client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
        return "".join([c.choices[0].text async for c in await client.completions.create(**body, stream=True)])

    async def all_at_once() -> list[str]:
        async with async_openai(server) as client:
            return await asyncio.gather(*(stream(client, body) for body in bodies))

    assert asyncio.run(all_at_once()) == [server.openai.completions.create(**body).choices[0].text for body in bodies]


def test_the_async_client_gets_the_answers_of_the_sync_one(server: Server) -> None:
    async def ask() -> tuple[str, str | None]:
        async with async_openai(server) as client:
            completion = await client.completions.create(**GREEDY)
            chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24)
            return completion.choices[0].text, chat.choices[0].message.content

    chat = server.openai.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24)
    expected = (server.openai.completions.create(**GREEDY).choices[0].text, chat.choices[0].message.content)
    assert asyncio.run(ask()) == expected


# -- Stop strings


def test_a_stop_string_ends_the_text_before_it_and_frees_the_cache(server: Server) -> None:
    whole = server.post(COMPLETIONS, ENDLESS | {"max_tokens": 40}).json()["choices"][0]["text"]
    # Across tokens, late enough for a stream to have begun, and again in what would come after.
    stop = whole[20:24]
    expected = whole[: whole.index(stop)]
    body = ENDLESS | {"stop": ["no such text", stop]}
    answer = server.post(COMPLETIONS, body).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 40
    *events, done = server.events(COMPLETIONS, body)
    assert done == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == expected
    assert choices[-1]["finish_reason"] == "stop"
    wait_until(lambda: server.kv_blocks_used() == 0)


def test_usage_counts_the_tokens_up_to_the_one_that_completed_the_stop_string(server: Server) -> None:
    ids = server.generate(TOKENIZER.encode(PROMPT), max_tokens=40, temperature=0, ignore_eos=True).token_ids
    stop = text_of(ids)[20:24]
    needed = next(count for count in range(1, 41) if stop in text_of(ids[:count]))
    answer = server.post(COMPLETIONS, ENDLESS | {"stop": stop}).json()
    assert answer["usage"]["completion_tokens"] == needed


# -- Readers that go away


def test_a_client_that_leaves_its_stream_frees_the_cache(server: Server) -> None:
    with server.openai.completions.create(**LONG, stream=True, extra_body={"ignore_eos": True}) as stream:
        for _ in range(3):
            next(stream)
        assert server.kv_blocks_used() > 0
    wait_until(lambda: server.kv_blocks_used() == 0)


def test_a_client_that_gives_up_waiting_for_a_whole_answer_frees_the_cache(server: Server) -> None:
    before = server.tokens_emitted()

    async def give_up() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            asking = asyncio.create_task(client.post(server.url + COMPLETIONS, json=ENDLESS))
            await asyncio.to_thread(wait_until, lambda: server.tokens_emitted() > before)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(give_up())
    wait_until(lambda: server.kv_blocks_used() == 0)
    assert server.tokens_emitted() - before < ENDLESS["max_tokens"]


def test_a_client_that_leaves_while_the_first_token_is_computed_frees_the_cache(server: Server) -> None:
    async def leave_at_once() -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            asking = [asyncio.create_task(client.post(server.url + COMPLETIONS, json=ENDLESS)) for _ in range(4)]
            await asyncio.sleep(0.03)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(leave_at_once())
    # Time for a request that was still on its way to have arrived.
    answer = server.post(COMPLETIONS, GREEDY)
    assert answer.status_code == 200
    wait_until(lambda: server.kv_blocks_used() == 0)


# -- Errors


@pytest.mark.parametrize(
    ("body", "status", "param", "code", "message"),
    [
        ({"model": "gpt-4"}, 404, "model", "model_not_found", 'model is "gpt-4"; this server has "tiny-moe"'),
        ({"prompt": ""}, 400, "prompt", None, "the prompt has 0 tokens; it must have at least 1"),
        ({"prompt": []}, 400, "prompt", None, "the prompt has 0 tokens; it must have at least 1"),
        ({"prompt": [1, 10**9]}, 400, "prompt", None, "prompt holds token id 1000000000; ids must be in [0, "),
        ({"max_tokens": 10**6}, 400, "max_tokens", None, "add up to 10000"),
        ({"n": 9}, 400, "n", None, "n is 9; it must be less than or equal to 8"),
        ({"best_of": 2}, 400, "best_of", None, "best_of is 2; this server supports only 1"),
        ({"logit_bias": {"999999": 1}}, 400, "logit_bias", None, "logit_bias holds token id 999999; ids must be in"),
        ({"temperature": -1}, 400, "temperature", None, "temperature is -1; it must be greater than or equal to 0"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_has_its_status_even_when_a_stream_was_asked_for(
    server: Server, body: dict[str, Any], status: int, param: str, code: str | None, message: str, stream: bool
) -> None:
    response = server.post(COMPLETIONS, {**GREEDY, **body, "stream": stream})
    assert response.status_code == status
    error = error_in(response)
    assert message in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_routes_methods_and_bodies_are_refused_in_openais_shape_through_serve_too(server: Server) -> None:
    answers = [
        httpx.get(f"{server.url}/v1/engines", trust_env=False),
        httpx.put(f"{server.url}/v1/models", trust_env=False),
        httpx.post(f"{server.url}{CHAT}", content="{", headers={"content-type": "application/json"}, trust_env=False),
    ]
    assert [answer.status_code for answer in answers] == [404, 405, 400]
    assert [error_in(answer)["type"] for answer in answers] == ["invalid_request_error"] * 3


def test_the_openai_client_raises_its_own_errors(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.completions.create(**GREEDY | {"model": "gpt-4"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        server.openai.chat.completions.create(model=MODEL, messages=MESSAGES, n=30)
    assert bad.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="it has no embeddings"):
        server.openai.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
        server.openai.completions.create(**GREEDY | {"max_tokens": 0}, stream=True)


def test_a_cluster_that_does_not_run_is_refused_before_anything_is_started(server: Server) -> None:
    with pytest.raises(NotServingError, match="no cluster named 'nowhere'"):
        app.run("nowhere", host="127.0.0.1", port=free_port(), seconds=30)
    assert server.ready().status_code == 200


def test_serve_on_another_address_than_the_running_one_is_refused(server: Server) -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        app.run(NAME, host="127.0.0.1", port=port, seconds=60)
    assert server.ready().status_code == 200
