"""A batch job beside the engine alone: the same requests on the same cluster of two peers, in turns.

The engine alone is the SDK with every prompt tokenized and submitted at once. The job reads a file through Ray Data,
tokenizes, words answers, keeps its checkpoint and writes the output; its time is from its first look at the input to
its last file. `running` is what the engines' counters say of the job: tokens per working step, over what may run.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from ray_moe import cluster as clusters
from ray_moe.batch.hosts import Standing
from ray_moe.batch.job import BatchJob
from ray_moe.batch.job import run as run_batch
from ray_moe.bench.report import Row
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.engine.sampling import SamplingParams
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client
from ray_moe.text import load_tokenizer

PEERS, PROMPTS, NEW_TOKENS, REPEATS = 2, 1600, 64, 3
_NAME = "bench-batch"


def run() -> list[Row]:
    """One row per repetition, then their medians."""
    config = ClusterConfig(name=_NAME, model=str(tiny_moe_path()), peers=PEERS)
    prompts = [f"Act {index}, scene {index % 7}. To be, or not to be" for index in range(PROMPTS)]
    tokenizer = load_tokenizer(tiny_moe_path())
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=4, namespace="ray_moe")
    try:
        cluster = clusters.start(config)
        try:
            with tempfile.TemporaryDirectory() as folder:
                source = _written(Path(folder) / "in.jsonl", prompts)
                _engine(cluster, ids[:128])  # warm-up: pools are allocated by the first write
                rows = [_compare(cluster, source, ids, repeat) for repeat in range(REPEATS)]
        finally:
            cluster.stop()
    finally:
        ray.shutdown()
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "run"}
    return [*rows, {"run": "median", **medians}]


def _written(path: Path, prompts: Sequence[str]) -> Path:
    fields = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    path.write_text("".join(json.dumps({"prompt": prompt, **fields}) + "\n" for prompt in prompts))
    return path


def _compare(cluster: Cluster, source: Path, ids: Sequence[Sequence[int]], repeat: int) -> dict[str, Any]:
    tokens = len(ids) * NEW_TOKENS
    alone = _engine(cluster, ids)
    before = cluster.status().peers
    started = time.perf_counter()
    summary = run_batch(BatchJob(str(source), f"{source}.{repeat}.jsonl"), Standing(_NAME))
    taken = time.perf_counter() - started
    if summary.completion_tokens != tokens:
        raise AssertionError(f"the job made {summary.completion_tokens} tokens of {tokens}")
    pairs = list(zip(before, cluster.status().peers, strict=True))
    emitted = sum(new.tokens_emitted - old.tokens_emitted for old, new in pairs)
    steps = sum(new.steps_worked - old.steps_worked for old, new in pairs)
    return {
        "run": repeat + 1,
        "engine_tokens_per_s": tokens / alone,
        "batch_tokens_per_s": tokens / taken,
        "ratio": alone / taken,
        "running": emitted / steps / ClusterConfig(model="any").max_decode_rows,
    }


def _engine(cluster: Cluster, ids: Sequence[Sequence[int]]) -> float:
    """Seconds from the first submission to the last token."""

    async def all_at_once() -> float:
        client = Client(cluster.directory())
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        await asyncio.gather(*(client.generate(prompt, params) for prompt in ids))
        return time.perf_counter() - started

    return asyncio.run(all_at_once())
