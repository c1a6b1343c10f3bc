"""Tokens per second of a cluster beside transformers' own eager model in one process, in the same run."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import ray
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ray_moe import cluster as clusters
from ray_moe.actors.reports import ClusterStatus
from ray_moe.asked import parse_replicas
from ray_moe.bench.model import VOCABULARY, build
from ray_moe.bench.report import Row
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.engine.sampling import SamplingParams
from ray_moe.sdk import Client

PEERS, PROMPT_TOKENS, NEW_TOKENS, REPEATS = 4, 16, 64, 3
REQUESTS_PER_RANK = (1, 8, 32)


def run() -> list[Row]:
    """One row per load: this system and transformers eager, both the best of three interleaved repetitions."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder) / "model")
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
        config = ClusterConfig(
            name="bench", model=str(path), peers=PEERS, replicas=parse_replicas("*:0=2,*:5=2"), kv_blocks=1024
        )
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=PEERS, namespace="ray_moe")
        try:
            cluster = clusters.start(config)
            try:
                return [_compare(cluster, reference.eval(), load) for load in REQUESTS_PER_RANK]
            finally:
                cluster.stop()
        finally:
            ray.shutdown()


def _compare(cluster: Cluster, reference: PreTrainedModel, per_rank: int) -> Row:
    prompts = torch.randint(
        0, VOCABULARY, (PEERS * per_rank, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1)
    )
    asyncio.run(_generate(cluster, prompts.tolist()))  # warm-up: pools are allocated by the first write
    ours, theirs = float("inf"), float("inf")
    before = cluster.status()
    for _ in range(REPEATS):
        ours = min(ours, asyncio.run(_generate(cluster, prompts.tolist())))
        theirs = min(theirs, _eager(reference, prompts))
    step, agreement = _step_times(before, cluster.status())
    tokens = PEERS * per_rank * NEW_TOKENS
    return {
        "peers": PEERS,
        "requests_per_rank": per_rank,
        "tokens_per_s": tokens / ours,
        "transformers_eager_tokens_per_s": tokens / theirs,
        "ratio": theirs / ours,
        "step_ms": step * 1e3,
        "agreement_wait_ms": agreement * 1e3,
        "agreement_share": agreement / step,
    }


async def _generate(cluster: Cluster, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds from the first submission to the last token, at a client."""
    client = Client(cluster.directory())
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    await asyncio.gather(*(client.generate(prompt, params, peer=index % PEERS) for index, prompt in enumerate(prompts)))
    return time.perf_counter() - started


@torch.inference_mode()
def _eager(model: PreTrainedModel, prompts: torch.Tensor) -> float:
    """Seconds for the same tokens as one rectangular batch of one process with one thread."""
    started = time.perf_counter()
    cache, ids = DynamicCache(config=model.config), prompts
    for _ in range(NEW_TOKENS):
        ids = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    return time.perf_counter() - started


def _step_times(before: ClusterStatus, after: ClusterStatus) -> tuple[float, float]:
    """Mean seconds of a working step and of its wait for the next agreement, over all ranks."""
    pairs = list(zip(before.peers, after.peers, strict=True))
    steps = sum(new.steps_worked - old.steps_worked for old, new in pairs)
    worked = sum(new.seconds_worked - old.seconds_worked for old, new in pairs)
    agreeing = sum(new.seconds_agreeing - old.seconds_agreeing for old, new in pairs)
    return worked / steps, agreeing / steps
