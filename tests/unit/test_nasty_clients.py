"""Clients that break things: the HTTP application behind a real server, over a scripted engine, and bytes on a socket.

Whatever comes, the answer is one of OpenAI's errors, or the server's own 400 where it is no HTTP; the next client is
served as if nothing had been; and whoever goes away has its generation ended.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from ray_moe.engine.records import StreamRecord
from ray_moe.engine.sampling import SamplingParams
from ray_moe.models import tiny_moe_path
from ray_moe.serve.access import AccessRules
from ray_moe.serve.api import openai_api
from ray_moe.serve.generation import Backend, Backends
from ray_moe.text import load_tokenizer

TOKENIZER = load_tokenizer(tiny_moe_path())
BODY: dict[str, Any] = {"model": "m", "prompt": "a", "max_tokens": 3}
MOST = 1 << 20


class Engine:
    """Generates one text over and over; `running` counts what it works on."""

    def __init__(self) -> None:
        config = SimpleNamespace(request_deadline_s=20.0, metrics_every_s=0.0, kv_blocks=1 << 20, block_size=16)
        self.directory = SimpleNamespace(config=config, facts=SimpleNamespace(max_positions=1 << 20, vocab_size=2048))
        self.running = self.begun = 0
        self._ids = TOKENIZER.encode("naïve 漢字 🚀 and so on ", add_special_tokens=False)

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str
    ) -> AsyncIterator[StreamRecord]:
        self.running += 1
        self.begun += 1
        try:
            for index in range(params.max_tokens):
                await asyncio.sleep(0.001)
                reason = "length" if index == params.max_tokens - 1 else None
                token = self._ids[index % len(self._ids)]
                yield StreamRecord(request_id, index, (token,), index, 1, 1, reason)
        finally:
            self.running -= 1


@dataclass(frozen=True)
class Served:
    port: int
    engine: Engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def say(self, data: bytes, *, then_close_output: bool = False) -> bytes:
        """What comes back for these bytes, up to the end of the connection."""
        answer = b""
        with self.connect() as link:
            try:
                link.sendall(data)
                if then_close_output:
                    link.shutdown(socket.SHUT_WR)
                while piece := link.recv(1 << 16):
                    answer += piece
            except ConnectionError:
                pass  # it has said what it had to say
        return answer

    def works(self) -> None:
        answer = httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=20, trust_env=False)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = Engine()
    backend = Backend(engine, TOKENIZER, "m", "r", 0)  # type: ignore[arg-type]
    door: Any = SimpleNamespace(find=lambda: backend, knock=lambda: None)
    api = openai_api(Backends(door), rules=AccessRules(max_body_bytes=MOST))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(api, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield Served(listening.getsockname()[1], engine)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listening.close()


def until(holds: Any) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def request(content: bytes, headers: str = "", length: int | None = None) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}{headers}Content-Length: {len(content) if length is None else length}\r\n\r\n".encode() + content


def chunked(chunks: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks


def body(**fields: Any) -> bytes:
    return json.dumps(BODY | fields).encode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def message_of(answer: bytes) -> str:
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"model":"m","prompt":"\xff\xfe"}', "must be JSON in UTF-8"),
        (b'{"model":"m","prompt":"\\ud800"}', "half a surrogate pair"),
        (b'{"model":"m","prompt":"a","stop":"\\udc00"}', "half a surrogate pair"),
        (b'{"model":"m","prompt":"a","temperature":NaN}', "temperature is NaN"),
        (b'{"model":"m","prompt":"a","temperature":1e999}', "temperature is Infinity"),
        (b'{"model":"m","prompt":"a","logit_bias":{"5":-Infinity}}', "must be a finite number"),
        (b'{"model":"m","prompt":"a","max_tokens":' + b"9" * 5000 + b"}", "cannot be read"),
        (b'{"model":"m","prompt":[' + b"9" * 30 + b'],"echo":true}', "ids must be in [0, 2048)"),
        (b"[" * 100_000 + b"]" * 100_000, "of reasonable depth"),
        (b'{"model":"m","prompt":"a","x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", "of reasonable depth"),
        (b"", "body is required"),
        (b"null", "must be a JSON object"),
        (b'{"model":"m","pro', "is not JSON"),
        (body(max_tokens=0), "max_tokens is 0"),
        (body(max_tokens=True), "max_tokens is true"),
        (body(n=9), "n is 9"),
        (body(n=0), "n is 0"),
        (body(stop=""), 'stop is ""'),
        (body(stop=["a"] * 5), "the most is 4"),
        (body(logit_bias={"\u0665": 1}), "keys are token ids"),
        (body(logit_bias={"5": 101}), "less than or equal to 100"),
        (body(logit_bias={str(token): 1 for token in range(2000)}), "at most 1024 tokens"),
        (body(prompt=["a"] * 65), "the most is 64"),
        (body(prompt=[True]), "a list of integer token ids"),
        (body(prompt=[5, "a"]), "a list of integer token ids"),
        (body(seed=2**63), "64-bit signed integer"),
        (body(top_p=0), "top_p is 0"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_nonsense_is_refused_in_one_sentence_before_anything_runs(served: Served, content: bytes, says: str) -> None:
    begun = served.engine.begun
    answer = served.say(request(content))
    assert status_of(answer) == 400
    assert says in message_of(answer)
    assert served.engine.begun == begun


@pytest.mark.parametrize(
    "data",
    [
        chunked(b"zz\r\n{}\r\n0\r\n\r\n"),
        chunked(b"-5\r\n{}\r\n0\r\n\r\n"),
        request(b"{}", length=-1),
        request(b"{}", "Transfer-Encoding: chunked\r\n"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /" + b"a" * MOST + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
    ],
    ids=["chunk-size", "negative-chunk", "negative-length", "two-lengths", "tls", "long-target", "version"],
)
def test_what_is_no_http_is_400_and_the_next_client_is_served(served: Served, data: bytes) -> None:
    assert status_of(served.say(data)) == 400
    served.works()


@pytest.mark.parametrize("data", [request(b"{}", length=100), chunked(b"64\r\n{}")], ids=["short-body", "short-chunk"])
def test_a_body_that_never_ends_is_given_up_with_its_client(served: Served, data: bytes) -> None:
    begun = served.engine.begun
    assert served.say(data, then_close_output=True) == b""
    served.works()
    assert served.engine.begun == begun + 1


@pytest.mark.parametrize(
    "data", [request(b"a" * (10 * MOST)), request(b"", length=10**12), chunked(b"a00000\r\n" + b"a" * 0xA00000)]
)
def test_ten_megabytes_are_413_however_they_are_sent(served: Served, data: bytes) -> None:
    answer = served.say(data)
    assert answer == b"" or status_of(answer) == 413, "its reader may have been cut off while it still wrote"
    served.works()


def test_the_last_of_two_equal_keys_counts(served: Served) -> None:
    answer = served.say(request(b'{"model":"x","model":"m","prompt":"a","max_tokens":9,"max_tokens":2}'))
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2


def test_a_request_that_comes_byte_by_byte_is_a_request(served: Served) -> None:
    with served.connect() as link:
        for byte in request(body()):
            link.sendall(bytes([byte]))
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("stop", ["ve 漢", "字 🚀", "🚀", "ï"])
def test_a_stop_string_ends_the_text_wherever_tokens_end(served: Served, stop: str) -> None:
    text = "naïve 漢字 🚀 and so on "
    fields = {"prompt": "a", "max_tokens": 200, "stop": stop}
    whole = httpx.post(f"{served.url}/v1/completions", json=BODY | fields, timeout=20, trust_env=False).json()
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (text.partition(stop)[0], "stop")
    streamed = served.say(request(body(**fields, stream=True))).decode()
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith('data: {"id"')]
    assert "".join(event["choices"][0]["text"] for event in events) == text.partition(stop)[0]
    until(lambda: served.engine.running == 0)


def test_who_does_not_read_keeps_nobody_waiting_and_is_ended_when_it_goes(served: Served) -> None:
    links = [served.connect() for _ in range(4)]
    for link in links:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.sendall(request(body(max_tokens=10**5, stream=True)))
    until(lambda: served.engine.running == 4)
    served.works()
    for link in links:
        link.close()
    until(lambda: served.engine.running == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_who_closes_its_side_is_taken_to_have_left(served: Served, stream: bool) -> None:
    with served.connect() as link:
        link.sendall(request(body(max_tokens=10**5, n=4, stream=stream)))
        until(lambda: served.engine.running == 4)
        link.shutdown(socket.SHUT_WR)
        until(lambda: served.engine.running == 0)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_look_without_a_body_is_a_look(served: Served, path: str) -> None:
    answer = httpx.head(served.url + path, trust_env=False)
    assert (answer.status_code, answer.content) == (200, b"")
