"""Many clients at once, and clients that know nothing of OpenAI: curl, and server-sent events read line by line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.http.server import COMPLETIONS, ENDLESS, GREEDY, MODEL, PROMPT, Server, async_openai, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_sixty_four_streams_at_once_end_without_an_error_and_free_the_cache(server: Server) -> None:
    bodies: list[dict[str, Any]] = [
        {"model": MODEL, "prompt": PROMPT[: 3 + number % 12], "max_tokens": 8 + number % 9, "seed": number}
        for number in range(64)
    ]

    async def stream(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[str, str | None]:
        text, reason = "", None
        async for chunk in await client.completions.create(**body, stream=True):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    async def all_at_once() -> list[tuple[str, str | None]]:
        async with async_openai(server) as client:
            return await asyncio.gather(*(stream(client, body) for body in bodies))

    found = asyncio.run(all_at_once())
    assert all(reason in ("stop", "length") for _, reason in found)
    for number in (0, 21, 42, 63):
        assert found[number][0] == server.openai.completions.create(**bodies[number]).choices[0].text
    wait_until(lambda: server.kv_blocks_used() == 0)


def test_half_of_many_streams_leave_and_the_status_shows_their_cache_free(server: Server) -> None:
    async def leave_after_a_token(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", server.url + COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
            async for _ in response.aiter_lines():
                return

    async def leave() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            await asyncio.gather(*(leave_after_a_token(client) for _ in range(8)))

    asyncio.run(leave())
    wait_until(lambda: server.kv_blocks_used() == 0)
    wait_until(lambda: server.metric("ray_moe_http_running") == 0)
    wait_until(lambda: server.metric("ray_moe_http_cancelled_total") >= 8)


def test_all_choices_of_a_client_that_leaves_end(server: Server) -> None:
    # Long enough to be seen running, however busy the machine is.
    with server.stream(COMPLETIONS, ENDLESS | {"n": 4, "temperature": 1.0, "max_tokens": 1500}) as response:
        lines = response.iter_lines()  # held: httpx leaves when its iterator is collected
        next(lines)
        wait_until(lambda: server.kv_blocks_used() > 0)
    wait_until(lambda: server.kv_blocks_used() == 0)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(server: Server) -> None:
    """While they submit, while they wait for a first token, between two; of whole answers and of streams."""
    chance = random.Random(8)

    async def leave(client: httpx.AsyncClient) -> None:
        body = ENDLESS | {"n": chance.choice((1, 8)), "temperature": 1.0, "stream": chance.random() < 0.7}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.choice((0.01, 0.05, 0.2, 0.6)) * chance.random()):
                async with client.stream("POST", server.url + COMPLETIONS, json=body) as response:
                    async for _ in response.aiter_lines():
                        continue

    async def leave_all() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            for _ in range(4):
                await asyncio.gather(*(leave(client) for _ in range(6)))

    asyncio.run(leave_all())
    wait_until(lambda: server.metric("ray_moe_http_running") == server.metric("ray_moe_http_queued") == 0)
    # A submission can be under way when its caller is gone: what is left of that one ends by its first token.
    assert server.post(COMPLETIONS, GREEDY).status_code == 200
    wait_until(lambda: server.kv_blocks_used() == 0)


def test_curl_gets_an_answer_and_a_stream(server: Server) -> None:
    def curl(body: dict[str, Any]) -> str:
        command = ["curl", "-sS", "--noproxy", "*", "-N", server.url + COMPLETIONS, "-d", json.dumps(body)]
        command += ["-H", "Content-Type: application/json", "-H", "X-Request-Id: curl-1", "-i"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    head, _, body = curl(GREEDY).replace("\r", "").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert [line.lower() for line in head.splitlines()].count("x-request-id: curl-1") == 1
    text = json.loads(body)["choices"][0]["text"]
    *events, done = curl(GREEDY | {"stream": True}).replace("\r", "").partition("\n\n")[2].strip().split("\n\n")
    assert done == "data: [DONE]"
    assert "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events) == text


def test_events_are_read_line_by_line_as_they_come(server: Server) -> None:
    with server.stream(COMPLETIONS, GREEDY) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])
