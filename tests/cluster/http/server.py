"""What the tests over HTTP share: the server under test, as clients see it, and the oracle, which is the SDK."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from ray_moe import cluster
from ray_moe.engine.sampling import SamplingParams
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client, Generation
from ray_moe.text import load_tokenizer

NAME, MODEL = "http", "tiny-moe"
TOKENIZER = load_tokenizer(tiny_moe_path())
PROMPT = "To be, or not to be"
MESSAGES: Any = [{"role": "user", "content": "Who goes there?"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
# Far longer than any test waits for it.
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 1900}
ENDLESS: dict[str, Any] = {**LONG, "ignore_eos": True}


@dataclass(frozen=True)
class Server:
    """A cluster and the address where Serve answers for it."""

    url: str
    cluster: cluster.Cluster

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, trust_env=False)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=60, trust_env=False)

    def ready(self) -> httpx.Response:
        return self.get("/ready")

    def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """What follows `data: ` in each event of a stream."""
        text = self.post(path, {**body, "stream": True}).text
        assert text.endswith("\n\n")
        lines = text.removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") for line in lines)
        return [line.removeprefix("data: ") for line in lines]

    def stream(self, path: str, body: dict[str, Any]) -> AbstractContextManager[httpx.Response]:
        return httpx.stream("POST", self.url + path, json={**body, "stream": True}, timeout=60, trust_env=False)

    def generate(self, prompt_ids: list[int], **params: Any) -> Generation:
        """The oracle."""

        async def once() -> Generation:
            return await Client(self.cluster.directory()).generate(prompt_ids, SamplingParams(**params))

        return asyncio.run(once())

    def metric(self, name: str, **headers: str) -> float:
        """A metric without labels, as Prometheus would read it."""
        lines = self.get("/metrics", **headers).text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def kv_blocks_used(self) -> int:
        return sum(peer.kv_blocks_used for peer in self.cluster.status().peers)

    def tokens_emitted(self) -> int:
        return sum(peer.tokens_emitted for peer in self.cluster.status().peers)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(holds: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def text_of(ids: tuple[int, ...]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def error_in(response: httpx.Response) -> dict[str, Any]:
    """The error, which must have OpenAI's shape to the last field."""
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return error


@asynccontextmanager
async def async_openai(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client
