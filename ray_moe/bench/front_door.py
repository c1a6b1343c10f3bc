"""What HTTP costs over the SDK: first token, each token after it, and tokens per second at 1, 16 and 64 streams.

One cluster of two peers with the embedded model; both ways to it are taken in turn, with the same prompts and greedy
tokens, from one client process that reads every stream as it comes.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import httpx
import ray
import torch

from ray_moe import cluster as clusters
from ray_moe.bench.report import Row
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.engine.sampling import SamplingParams
from ray_moe.models import TINY_MOE
from ray_moe.sdk import Client

NAME, PEERS, PROMPT_TOKENS, NEW_TOKENS, REPEATS = "front-door", 2, 16, 64, 3
STREAMS = (1, 16, 64)

# Opens one stream; yields once per token, or per event where one event holds several.
Open = Callable[[Sequence[int]], AsyncIterator[int]]


@dataclass(frozen=True)
class Seen:
    """One stream as its reader saw it: seconds to the first token, then per token; and the tokens."""

    first_s: float
    per_token_s: float
    tokens: int


def run() -> list[Row]:
    """One row per number of streams and way in; medians of the streams of all repetitions, the best tokens per second.

    `over_sdk` is what HTTP adds to the SDK's figures of the same run.
    """
    from ray_moe.serve import app  # imports Ray Serve, which the other benchmarks do without

    torch.set_num_threads(1)
    config = ClusterConfig(name=NAME, model=TINY_MOE, peers=PEERS, kv_blocks=1024)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=PEERS + 2, namespace="ray_moe")
    try:
        cluster = clusters.start(config)
        try:
            port = _free_port()
            app.run(NAME, host="127.0.0.1", port=port, seconds=config.start_deadline_s)
            try:
                return asyncio.run(_rows(cluster, f"http://127.0.0.1:{port}"))
            finally:
                app.shutdown()
        finally:
            cluster.stop()
    finally:
        ray.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _rows(cluster: Cluster, url: str) -> list[Row]:
    rows: list[Row] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as http:
        ways: dict[str, Open] = {"sdk": _sdk(Client(cluster.directory())), "http": _http(http)}
        for open_ in ways.values():
            await _measure(open_, STREAMS[-1])  # warm-up: connections, pools, the first forward of each size
        for streams in STREAMS:
            found: dict[str, list[tuple[float, list[Seen]]]] = {way: [] for way in ways}
            for _ in range(REPEATS):
                for way, open_ in ways.items():
                    found[way].append(await _measure(open_, streams))
            rows += _compared(streams, found)
    return rows


def _compared(streams: int, found: dict[str, list[tuple[float, list[Seen]]]]) -> list[Row]:
    rows: dict[str, dict[str, float]] = {}
    for way, repetitions in found.items():
        seen = [one for _, streams_seen in repetitions for one in streams_seen]
        rows[way] = {
            "first_token_ms": statistics.median(one.first_s for one in seen) * 1e3,
            "per_token_ms": statistics.median(one.per_token_s for one in seen) * 1e3,
            "tokens_per_s": max(sum(one.tokens for one in each) / seconds for seconds, each in repetitions),
        }
    over = {
        "first_token_ms_over_sdk": rows["http"]["first_token_ms"] - rows["sdk"]["first_token_ms"],
        "per_token_ms_over_sdk": rows["http"]["per_token_ms"] - rows["sdk"]["per_token_ms"],
        "share_of_sdk_tokens_per_s": rows["http"]["tokens_per_s"] / rows["sdk"]["tokens_per_s"],
    }
    return [
        {"streams": streams, "way": "sdk", **rows["sdk"]},
        {"streams": streams, "way": "http", **rows["http"], **over},
    ]


async def _measure(open_: Open, streams: int) -> tuple[float, list[Seen]]:
    """Seconds from the first request to the last token of all streams, and what each reader saw."""
    prompts = [[7 + (number + place) % 1000 for place in range(PROMPT_TOKENS)] for number in range(streams)]
    began = time.perf_counter()
    seen = await asyncio.gather(*(_read(open_(prompt)) for prompt in prompts))
    return time.perf_counter() - began, list(seen)


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


def _http(http: httpx.AsyncClient) -> Open:
    async def stream(prompt: Sequence[int]) -> AsyncIterator[int]:
        body = {"model": TINY_MOE, "prompt": list(prompt), "max_tokens": NEW_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        events = 0
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith('data: {"id"'):
                    events += 1
                    yield 1
        if events < NEW_TOKENS:
            yield NEW_TOKENS - events  # tokens that completed no character came with the next one's event

    return stream
