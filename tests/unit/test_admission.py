"""Who may come in: the queue before the engine, keys, request ids and the size of bodies, over the ASGI application."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.errors import ConfigError, DeadlineError, NotServingError, RequestError
from ray_moe.serve.access import AccessRules
from ray_moe.serve.admission import Capacity, Gate, Place
from ray_moe.serve.api import openai_api
from ray_moe.serve.generation import Backend, Backends
from ray_moe.serve.keys import ADMIN_TOKENS, API_KEYS, Keys, args_for, digest_of, read_keys
from ray_moe.serve.problems import OverloadedError
from ray_moe.serve.schema import AppArgs
from tests.layers import untimed

KEY, ADMIN = "0123456789abcdef", "fedcba9876543210"


# -- The queue


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_run_wait_in_order_and_are_refused_beyond() -> None:
    async def scene() -> None:
        gate, came = Gate(Capacity(2, 2, 60)), []

        async def enter(name: str, generations: int = 1) -> Place:
            place = await gate.enter(generations)
            came.append(name)
            return place

        first, second = await enter("a"), await enter("b")
        waiting = [asyncio.create_task(enter(name)) for name in "cd"]
        await settle()
        assert (gate.running, gate.queued) == (2, 2)
        with pytest.raises(OverloadedError, match="2 generations run and 2 requests wait; this server takes 2 and 2"):
            await gate.enter(1)
        second.leave()
        await settle()
        assert came == ["a", "b", "c"]
        second.leave()  # a second time is fine
        await settle()
        assert (gate.running, gate.queued) == (2, 1)
        first.leave()
        places = [await task for task in waiting]
        for place in places:
            place.leave()
        assert (came, gate.running, gate.queued) == (list("abcd"), 0, 0)

    asyncio.run(scene())


def test_a_large_request_is_not_overtaken_by_small_ones_and_one_larger_than_all_is_refused() -> None:
    async def scene() -> None:
        gate = Gate(Capacity(3, 9, 60))
        small = await gate.enter(1)
        large = asyncio.create_task(gate.enter(3))
        await settle()
        behind = asyncio.create_task(gate.enter(1))
        await settle()
        assert (gate.running, gate.queued) == (1, 2)
        small.leave()
        (await large).leave()
        (await behind).leave()
        with pytest.raises(RequestError, match="asks for 4 generations; this server runs 3 at a time"):
            await gate.enter(4)

    asyncio.run(scene())


def test_a_turn_that_does_not_come_in_time_is_a_deadline_error_and_leaves_nothing_behind() -> None:
    async def scene() -> None:
        gate = Gate(Capacity(1, 5, 0.01))
        place = await gate.enter(1)
        with pytest.raises(DeadlineError, match="turn in the queue"):
            await gate.enter(1)
        assert (gate.running, gate.queued) == (1, 0)
        place.leave()
        assert gate.running == 0

    asyncio.run(scene())


@untimed
@given(events=st.lists(st.tuples(st.sampled_from(["enter", "leave", "give up"]), st.integers(0, 7)), max_size=40))
def test_whatever_comes_leaves_or_gives_up_the_count_is_right(events: list[tuple[str, int]]) -> None:
    async def scene() -> None:
        gate = Gate(Capacity(3, 4, 60))
        tasks: list[asyncio.Task[Place]] = []
        for event, number in events:
            if event == "enter":
                tasks.append(asyncio.create_task(gate.enter(number % 3 + 1)))
            elif tasks:
                task = tasks[number % len(tasks)]
                if event == "give up" or not task.done():
                    task.cancel()
                elif not task.cancelled() and task.exception() is None:
                    task.result().leave()
                    tasks.remove(task)
            await settle()
            assert 0 <= gate.running <= 3 and 0 <= gate.queued <= 4
            inside = [task for task in tasks if task.done() and not task.cancelled() and task.exception() is None]
            assert gate.running == sum(task.result().generations for task in inside)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for place in done:
            if isinstance(place, Place):
                place.leave()
        await settle()
        assert (gate.running, gate.queued) == (0, 0)

    asyncio.run(scene())


# -- Keys


def test_keys_come_from_a_file_and_the_environment_and_stay_as_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text(f"# ours\n\n{KEY}\n  {ADMIN}  \n")
    monkeypatch.setenv(API_KEYS, f"{KEY}, another-one-of-16")
    keys = Keys(read_keys(str(tmp_path / "keys"), API_KEYS))
    assert [keys.accept(key) for key in (KEY, ADMIN, "another-one-of-16", "", KEY + "x")] == [True] * 3 + [False] * 2
    assert len(keys.digests) == 3 and KEY not in repr(keys)
    assert not Keys().accept("")


@pytest.mark.parametrize("text", ["short", "with a blank in it", "übergroßer-schlüssel", "0123456789abcde\x07"])
def test_a_key_that_could_be_guessed_or_not_be_sent_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n{text}\n")
    with pytest.raises(ConfigError, match=r"keys: key 2 has \d+ characters") as refused:
        read_keys(str(tmp_path / "keys"), API_KEYS)
    assert text not in str(refused.value)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="/nowhere/keys: keys cannot be read: FileNotFoundError"):
        read_keys("/nowhere/keys", API_KEYS)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org"])
def test_an_address_that_others_reach_needs_a_key_or_the_word_that_none_is_needed(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"others can reach, and there is no API key: .*--no-auth"):
        args_for(host, AppArgs())
    assert args_for(host, AppArgs(no_auth=True)).no_auth
    monkeypatch.setenv(API_KEYS, KEY)
    found = args_for(host, AppArgs())
    assert (found.no_auth, found.api_key_digests) == (False, (digest_of(KEY),))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.0.1"])
def test_a_loopback_address_needs_none_and_takes_one_that_is_given(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert args_for(host, AppArgs()).no_auth
    monkeypatch.setenv(API_KEYS, KEY)
    monkeypatch.setenv(ADMIN_TOKENS, ADMIN)
    found = args_for(host, AppArgs())
    assert not found.no_auth
    assert found.admin_token_digests == (digest_of(ADMIN),)


# -- The application


class ShutDoor:
    """No cluster behind it."""

    def find(self) -> Backend:
        raise NotServingError("no cluster here")

    def knock(self) -> None:
        raise NotServingError("no cluster here")


def ask(method: str, path: str, rules: AccessRules, **request: Any) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(openai_api(Backends(ShutDoor()), rules=rules), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, **request)

    return asyncio.run(once())


LOCKED = AccessRules(Keys((digest_of(KEY),)), Keys((digest_of(ADMIN),)), max_body_bytes=100)


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/models", None, 401),
        ("/v1/models", "Bearer wrong", 401),
        ("/v1/models", f"Basic {KEY}", 401),
        ("/v1/models", f"Bearer {ADMIN}", 401),
        ("/v1/models", f"Bearer {KEY}", 503),
        ("/v1/models", f"bearer {KEY}", 503),
        ("/v1", None, 401),
        ("/v1x", None, 404),
        ("/metrics", None, 401),
        ("/metrics", f"Bearer {ADMIN}", 200),
        ("/admin/status", f"Bearer {KEY}", 401),
        ("/health", None, 200),
        ("/ready", None, 503),
        ("/openapi.json", None, 200),
    ],
)
def test_each_route_opens_to_its_own_keys(path: str, key: str | None, status: int) -> None:
    headers = {} if key is None else {"authorization": key}
    answer = ask("GET", path, LOCKED, headers=headers)
    assert answer.status_code == status
    assert KEY not in answer.text and ADMIN not in answer.text


def test_without_an_admin_token_admin_routes_are_off_whatever_is_sent() -> None:
    for headers in ({}, {"authorization": "Bearer "}, {"authorization": f"Bearer {KEY}"}):
        assert ask("GET", "/admin/status", AccessRules(), headers=headers).status_code == 403


def test_a_body_with_or_without_a_length_ends_at_its_bound() -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}

    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 10

    for content in (b" " * 101, pieces()):
        answer = ask("POST", "/v1/completions", LOCKED, headers=headers, content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the request body is too large; this server takes 100 bytes"
    assert ask("POST", "/v1/completions", LOCKED, headers=headers, content=b" " * 100).status_code == 400


@pytest.mark.parametrize(
    ("sent", "status"), [("a", 200), ("A.b:c/d-1_2", 200), ("x" * 129, 400), ("a b", 400), ("é", 400)]
)
def test_a_request_id_comes_back_or_is_refused(sent: str, status: int) -> None:
    answer = ask("GET", "/health", AccessRules(), headers={"x-request-id": sent.encode()})
    assert answer.status_code == status
    (returned,) = answer.headers.get_list("x-request-id")
    assert (returned == sent) == (status == 200)


def test_every_answer_has_a_request_id_of_its_own_and_behind_serve_its_proxy_gives_it() -> None:
    ids = {ask("GET", "/health", AccessRules()).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert "x-request-id" not in ask("GET", "/health", AccessRules(echo_request_ids=False)).headers


def test_the_document_names_every_failure_and_no_422() -> None:
    document = ask("GET", "/openapi.json", LOCKED).json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
    generating = document["paths"]["/v1/chat/completions"]["post"]
    assert set(generating["responses"]) == {"200", *map(str, (400, 401, 404, 413, 415, 429, 503, 504))}
    assert generating["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]
