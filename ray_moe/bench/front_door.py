"""What HTTP costs over the SDK: first token, each token after it, and tokens per second at 1, 16 and 64 streams.

One cluster of two peers with the embedded model; both ways to it are taken in turn, with the same prompts and greedy
tokens, from one client process that reads every stream as it comes. It reads HTTP from the socket and counts events:
what a library takes to parse them is no cost of the server, and on few cores it would be the engine's loss.

Twice: through Serve's own proxy, and with HAProxy before a replica that listens itself (RAY_SERVE_ENABLE_HA_PROXY=1).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]
import ray
import torch

from ray_moe import cluster as clusters
from ray_moe.bench.report import Row
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.deadline import wait_for
from ray_moe.engine.sampling import SamplingParams
from ray_moe.models import TINY_MOE
from ray_moe.sdk import Client

NAME, PEERS, PROMPT_TOKENS, NEW_TOKENS, REPEATS = "front-door", 2, 16, 64, 3
STREAMS = (1, 16, 64)
# What takes requests in -> the environment of the Ray that Serve runs on.
INGRESSES: dict[str, dict[str, str]] = {
    "proxy": {},
    "haproxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"},
}
_EVENT = b'data: {"id"'
_MEASURE_S = 300.0

# Opens one stream; yields how many tokens came, whenever some have.
Open = Callable[[Sequence[int]], AsyncIterator[int]]


@dataclass(frozen=True)
class Seen:
    """One stream as its reader saw it: seconds to the first token, then per token; and the tokens."""

    first_s: float
    per_token_s: float
    tokens: int


@dataclass(frozen=True)
class Measured:
    """One repetition: seconds from the first request to the last token, those that Serve's processes computed, and
    what each reader saw."""

    seconds: float
    door_s: float
    streams: list[Seen]

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.streams)


def run() -> list[Row]:
    """One row per ingress, number of streams and way in; medians of the streams of all repetitions, the best tokens per
    second. What is over the SDK, or a share of it, is so of the SDK's figures of the same run.

    `door_us_per_token` is processor time: it tells ingresses apart on a machine that has other work, too.
    """
    torch.set_num_threads(1)
    return [row for ingress, environment in INGRESSES.items() for row in _rows_of(ingress, environment)]


def _rows_of(ingress: str, environment: dict[str, str]) -> list[Row]:
    from ray_moe.serve import app  # imports Ray Serve, which the other benchmarks do without

    config = ClusterConfig(name=NAME, model=TINY_MOE, peers=PEERS, kv_blocks=1024)
    with _set(environment):
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=PEERS + 2, namespace="ray_moe")
        try:
            cluster = clusters.start(config)
            try:
                port = _free_port()
                app.run(NAME, host="127.0.0.1", port=port, seconds=config.start_deadline_s)
                try:
                    return asyncio.run(_rows(cluster, port, ingress))
                finally:
                    app.shutdown()
            finally:
                cluster.stop()
        finally:
            ray.shutdown()


@contextmanager
def _set(environment: dict[str, str]) -> Iterator[None]:
    """Ray's processes inherit it. Ours has read Serve's settings already, and needs none of these."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _rows(cluster: Cluster, port: int, ingress: str) -> list[Row]:
    rows: list[Row] = []
    ways: dict[str, Open] = {"sdk": _sdk(Client(cluster.directory())), "http": _http(port)}
    for open_ in ways.values():
        await _measure(open_, STREAMS[-1])  # warm-up: connections, pools, the first forward of each size
    for streams in STREAMS:
        found: dict[str, list[Measured]] = {way: [] for way in ways}
        for _ in range(REPEATS):
            for way, open_ in ways.items():
                found[way].append(await wait_for(_measure(open_, streams), _MEASURE_S, f"{streams} streams"))
        rows += [{"ingress": ingress, "streams": streams, **row} for row in _compared(found)]
    return rows


def _compared(found: dict[str, list[Measured]]) -> list[Row]:
    rows: dict[str, dict[str, float]] = {}
    for way, repetitions in found.items():
        seen = [one for repetition in repetitions for one in repetition.streams]
        rows[way] = {
            "first_token_ms": statistics.median(one.first_s for one in seen) * 1e3,
            "per_token_ms": statistics.median(one.per_token_s for one in seen) * 1e3,
            "tokens_per_s": max(one.tokens / one.seconds for one in repetitions),
        }
    over = {
        "first_token_ms_over_sdk": rows["http"]["first_token_ms"] - rows["sdk"]["first_token_ms"],
        "per_token_ms_over_sdk": rows["http"]["per_token_ms"] - rows["sdk"]["per_token_ms"],
        "share_of_sdk_tokens_per_s": rows["http"]["tokens_per_s"] / rows["sdk"]["tokens_per_s"],
        "door_us_per_token": statistics.median(one.door_s / one.tokens * 1e6 for one in found["http"]),
    }
    return [{"way": "sdk", **rows["sdk"]}, {"way": "http", **rows["http"], **over}]


async def _measure(open_: Open, streams: int) -> Measured:
    prompts = [[7 + (number + place) % 1000 for place in range(PROMPT_TOKENS)] for number in range(streams)]
    computed, began = _door_s(), time.perf_counter()
    seen = await asyncio.gather(*(_read(open_(prompt)) for prompt in prompts))
    return Measured(time.perf_counter() - began, _door_s() - computed, list(seen))


def _door_s() -> float:
    """What Serve's processes have computed since they began, in seconds: replica, and whatever stands before it."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if any(part in command for part in ("ServeReplica", "ProxyActor", "haproxy")):
                times = process.cpu_times()
                seconds += times.user + times.system
        except psutil.Error:
            continue  # it has just ended
    return seconds


async def _read(stream: AsyncIterator[int]) -> Seen:
    began = time.perf_counter()
    first, tokens = 0.0, 0
    async for count in stream:
        first = first or time.perf_counter()
        tokens += count
    ended = time.perf_counter()
    return Seen(first - began, (ended - first) / (tokens - 1), tokens)


def _sdk(client: Client) -> Open:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)

    async def stream(prompt: Sequence[int]) -> AsyncIterator[int]:
        async for record in client.stream(prompt, params):
            yield len(record.token_ids)

    return stream


def _http(port: int) -> Open:
    async def stream(prompt: Sequence[int]) -> AsyncIterator[int]:
        body = {"model": TINY_MOE, "prompt": list(prompt), "max_tokens": NEW_TOKENS, "temperature": 0}
        content = json.dumps(body | {"ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + content)
            status = await reader.readline()
            if b" 200 " not in status:
                raise AssertionError(f"{status!r}: {await reader.read()!r}")
            events, rest = 0, b""
            while data := await reader.read(1 << 16):
                found = (rest + data).count(_EVENT)
                rest = (rest + data)[1 - len(_EVENT) :]  # an event may begin in one piece and go on in the next
                events += found
                if found:
                    yield found
        finally:
            writer.close()
        if events < NEW_TOKENS:
            yield NEW_TOKENS - events  # tokens that completed no character came with the next one's event

    return stream
