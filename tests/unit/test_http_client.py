"""The HTTP clients against a real server that answers from a script: typed errors, and what is never sent twice."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe import http_client
from ray_moe.errors import ConfigError, NotServingError, RayMoEError
from ray_moe.http_client import (
    AnswerTimeoutError,
    AsyncMoEClient,
    AuthenticationError,
    BadRequestError,
    BrokenAnswerError,
    ClientError,
    DeadlineExceededError,
    MoEClient,
    NotFoundError,
    RateLimitedError,
    Retries,
    ServerFailedError,
    StatusError,
    UnavailableError,
    UnreachableError,
)
from ray_moe.http_client.failures import retry_after
from tests.layers import untimed

QUICK = Retries(most=2, first_s=0.01, longest_s=0.02)
DOCUMENT = {
    "id": "cmpl-1",
    "model": "m",
    "choices": [{"index": 0, "text": "be", "finish_reason": "stop", "logprobs": None}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
CHAT = [{"role": "user", "content": "x"}]
Headers = dict[str, str]


@dataclass
class Script:
    """What the server answers, in order, and what it was asked. An answer of None closes the connection."""

    answers: list[tuple[int, Headers, bytes] | None] = field(default_factory=list)
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    pause_s: float = 0.0
    url: str = ""

    def says(self, status: int, body: object = None, **headers: str) -> Script:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.append((status, named, raw))
        return self

    def streams(self, *events: object, complete: bool = True) -> Script:
        lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
        body = "".join([*lines, *(["data: [DONE]\n\n"] if complete else [])]).encode()
        return self.says(200, body, content_type="text/event-stream")


@pytest.fixture
def script() -> Iterator[Script]:
    told = Script()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            told.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            time.sleep(told.pause_s)
            answer = told.answers.pop(0)
            if answer is None:
                self.close_connection = True
                return
            status, headers, content = answer
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


class Both:
    """The sync client, and the async one behind the same calls."""

    def __init__(self, url: str, kind: str, **options: Any) -> None:
        options = {"model": "m", "retries": QUICK, "timeout": 10.0, **options}
        self.url, self.kind, self.options = url, kind, options

    def complete(self, **parameters: Any) -> Any:
        if self.kind == "sync":
            with MoEClient(self.url, **self.options) as client:
                return client.complete("to", **parameters)

        async def asked() -> Any:
            async with AsyncMoEClient(self.url, **self.options) as client:
                return await client.complete("to", **parameters)

        return asyncio.run(asked())

    def chunks(self, *, chat: bool = False) -> tuple[list[Any], BaseException | None]:
        """What came, and how it ended."""
        got: list[Any] = []
        try:
            if self.kind == "sync":
                with MoEClient(self.url, **self.options) as client:
                    for chunk in client.stream_chat(CHAT) if chat else client.stream_complete("to"):
                        got.append(chunk)
            else:
                asyncio.run(self._async(got, chat))
        except RayMoEError as error:
            return got, error
        return got, None

    async def _async(self, got: list[Any], chat: bool) -> None:
        async with AsyncMoEClient(self.url, **self.options) as client:
            stream = await client.stream_chat(CHAT) if chat else await client.stream_complete("to")
            async for chunk in stream:
                got.append(chunk)


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, script: Script) -> Callable[..., Both]:
    return lambda **options: Both(script.url, request.param, **options)


def error(message: str, kind: str = "server_error", **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None, **more}}


def event(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def test_a_request_carries_model_parameters_key_and_id(script: Script, client: Callable[..., Both]) -> None:
    script.says(200, DOCUMENT)
    found = client(api_key="a-secret-key-0123").complete(max_tokens=3, top_k=5, request_id="mine")
    assert (found.text, found.usage["total_tokens"], found.raw) == ("be", 2, DOCUMENT)
    ((path, headers, body),) = script.asked
    assert path == "/v1/completions"
    assert json.loads(body) == {"model": "m", "prompt": "to", "max_tokens": 3, "top_k": 5}
    assert (headers["authorization"], headers["x-request-id"]) == ("Bearer a-secret-key-0123", "mine")


def test_the_key_comes_from_the_environment_and_is_in_no_representation(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_MOE_API_KEY", "from-the-environment")
    script.says(200, {"data": [{"id": "theirs"}]}).says(200, DOCUMENT)
    with MoEClient(script.url) as client:
        client.complete("to")
        assert client.model == "theirs"
        assert "from-the-environment" not in repr(client) + str(vars(client))
    assert script.asked[0][1]["authorization"] == "Bearer from-the-environment"


@pytest.mark.parametrize(
    ("status", "kind", "also"),
    [
        (400, BadRequestError, ConfigError),
        (401, AuthenticationError, StatusError),
        (403, AuthenticationError, StatusError),
        (404, NotFoundError, ConfigError),
        (413, BadRequestError, ConfigError),
        (415, BadRequestError, ConfigError),
        (429, RateLimitedError, StatusError),
        (500, ServerFailedError, StatusError),
        (502, ServerFailedError, StatusError),
        (503, UnavailableError, NotServingError),
        (504, DeadlineExceededError, StatusError),
    ],
)
def test_every_status_has_a_type_and_is_sent_once(
    script: Script, client: Callable[..., Both], status: int, kind: type[StatusError], also: type[RayMoEError]
) -> None:
    script.says(status, error("why", param="seed", code="c"), x_request_id="r-1")
    with pytest.raises(kind) as raised:
        client().complete()
    found = raised.value
    assert isinstance(found, also)
    assert (found.status, found.message, found.param, found.code) == (status, "why", "seed", "c")
    assert str(found) == f"{status}: why (request r-1)"
    assert len(script.asked) == 1
    again = pickle.loads(pickle.dumps(found))
    assert (type(again), str(again), again.param) == (kind, str(found), "seed")


def test_an_error_that_is_not_ours_is_told_as_it_is(script: Script, client: Callable[..., Both]) -> None:
    script.says(502, b"<html>bad gateway</html>")
    with pytest.raises(ServerFailedError, match="502: <html>bad gateway</html>"):
        client().complete()


@pytest.mark.parametrize("status", [429, 503])
def test_what_says_when_to_come_back_is_asked_again_no_earlier(
    script: Script, client: Callable[..., Both], status: int
) -> None:
    script.says(status, error("full"), retry_after="0.3").says(200, DOCUMENT)
    began = time.monotonic()
    assert client().complete().text == "be"
    assert time.monotonic() - began >= 0.3
    assert len(script.asked) == 2


def test_retries_end(script: Script, client: Callable[..., Both]) -> None:
    for _ in range(4):
        script.says(503, error("not yet"), retry_after="0")
    with pytest.raises(UnavailableError, match="not yet"):
        client().complete()
    assert len(script.asked) == 1 + QUICK.most


def test_a_wait_that_patience_does_not_cover_is_not_begun(script: Script, client: Callable[..., Both]) -> None:
    script.says(429, error("full"), retry_after="3600")
    with pytest.raises(RateLimitedError) as raised:
        client().complete()
    assert raised.value.retry_after == 3600
    assert len(script.asked) == 1


def test_a_connection_that_breaks_after_the_request_is_not_tried_again(
    script: Script, client: Callable[..., Both]
) -> None:
    script.answers.append(None)
    with pytest.raises(BrokenAnswerError, match="broke"):
        client().complete()
    assert len(script.asked) == 1


def test_an_answer_that_is_late_is_not_asked_for_again(script: Script, client: Callable[..., Both]) -> None:
    script.says(200, DOCUMENT).pause_s = 1.0
    with pytest.raises(AnswerTimeoutError, match="in time"):
        client(timeout=0.2).complete()
    assert len(script.asked) == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_refused_connection_is_tried_again_until_somebody_listens(script: Script, kind: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    waits: list[float] = []

    def chance() -> float:
        waits.append(0.5)
        return 0.5

    with pytest.raises(UnreachableError, match="cannot be reached") as raised:
        Both(nobody, kind, retries=Retries(2, 0.01, 0.02, chance)).complete()
    assert isinstance(raised.value, NotServingError)
    assert len(waits) == 2, "each wait is a random part"


@pytest.mark.parametrize("body", [b"nonsense", b"[]", b"{}", b'{"choices": [{}]}'])
def test_an_answer_that_is_none_is_named(script: Script, client: Callable[..., Both], body: bytes) -> None:
    script.says(200, body)
    with pytest.raises(BrokenAnswerError):
        client().complete()


# ---- streams


def test_a_stream_gives_its_chunks_and_its_usage(script: Script, client: Callable[..., Both]) -> None:
    script.streams(event("to "), event("be"), event("", "stop"), {"choices": [], "usage": {"total_tokens": 7}})
    chunks, failed = client().chunks()
    assert failed is None
    assert "".join(chunk.text for chunk in chunks) == "to be"
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop", None]
    assert chunks[-1].usage == {"total_tokens": 7}


def test_a_chat_streams_deltas(script: Script, client: Callable[..., Both]) -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "Nay"}, {}]
    script.streams(*({"choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in deltas))
    chunks, failed = client().chunks(chat=True)
    assert failed is None
    assert ["".join(chunk.text for chunk in chunks), chunks[0].delta] == ["Nay", deltas[0]]


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (error("rank 1 died", code="peer_lost"), UnavailableError),
        (error("too late", code="deadline_exceeded"), DeadlineExceededError),
        (error("odd", "invalid_request_error"), BadRequestError),
        (error("what"), ServerFailedError),
        ("{nonsense", BrokenAnswerError),
    ],
)
def test_a_stream_that_fails_midway_raises_after_what_came_and_is_not_tried_again(
    script: Script, client: Callable[..., Both], last: object, kind: type[ClientError]
) -> None:
    script.streams(event("to "), last)
    chunks, failed = client().chunks()
    assert [chunk.text for chunk in chunks] == ["to "]
    assert isinstance(failed, kind)
    assert len(script.asked) == 1


def test_a_stream_that_just_ends_is_not_taken_for_whole(script: Script, client: Callable[..., Both]) -> None:
    script.streams(event("to "), complete=False)
    chunks, failed = client().chunks()
    assert len(chunks) == 1
    assert isinstance(failed, BrokenAnswerError)


def test_a_stream_is_asked_for_again_as_long_as_it_has_not_begun(script: Script, client: Callable[..., Both]) -> None:
    script.says(429, error("full"), retry_after="0").streams(event("be", "stop"))
    chunks, failed = client().chunks()
    assert (failed, [chunk.text for chunk in chunks], len(script.asked)) == (None, ["be"], 2)


# ---- pure parts


@untimed
@given(st.integers(0, 5), st.floats(0, 1, exclude_max=True), st.floats(0.0, 100.0))
def test_a_wait_is_bounded_by_policy_and_patience(tried: int, chance: float, left: float) -> None:
    policy = Retries(3, 0.5, 2.0, lambda: chance)
    wait = policy.delay(tried, UnreachableError("nobody"), left)
    if tried >= 3:
        assert wait is None
    elif wait is not None:
        assert 0 <= wait <= min(2.0, 0.5 * 2**tried)
        assert wait < left
    assert policy.delay(0, ServerFailedError(500, "what", retry_after=0.0), left) is None
    assert policy.delay(0, BrokenAnswerError("broke"), left) is None


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after("3") == 3.0
    assert retry_after("-3") == retry_after("Thu, 01 Jan 1970 00:00:00 GMT") == 0.0
    later = retry_after("Fri, 31 Dec 2999 23:59:59 GMT")
    assert later is not None
    assert later > 1e9
    assert retry_after(None) is retry_after("soon") is retry_after("nan") is None


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url must be"):
        MoEClient(url)
    with pytest.raises(ConfigError, match="timeout must be > 0"):
        MoEClient("http://host:1/v1", timeout=0)
    with pytest.raises(ConfigError, match="found -1"):
        Retries(most=-1)


def test_the_clients_load_neither_torch_nor_ray() -> None:
    loaded = "print(sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    program = f"import ray_moe, sys; ray_moe.MoEClient; {loaded}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
    assert set(http_client.__all__) <= set(dir(http_client))
