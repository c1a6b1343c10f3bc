"""What exporting metrics adds to a step: one cluster that exports beside one that does not, in turns, in one run.

The exporter is no part of a step; it takes time from the interpreter that the steps share with it. Both clusters are of
two peers and serve the same requests, a few seconds each in turn, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import ray
import torch

from ray_moe import cluster as clusters
from ray_moe.actors.exporter import SAMPLED, Exporter, RaySink
from ray_moe.actors.rank_metrics import RankExporter
from ray_moe.bench.model import VOCABULARY, build
from ray_moe.bench.report import Row
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.engine.records import EngineStatus
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.state import LoopCounters
from ray_moe.metrics import RANK_BUDGET
from ray_moe.sdk import Client

PEERS, REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 2, 16, 16, 96
ROUNDS = 16
# The default, and as often as anybody would.
EVERY_S = (5.0, 1.0)


def run() -> list[Row]:
    """One row per interval: mean seconds of a working step with and without, their ratio, and its spread by rounds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder) / "model")
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2 * PEERS, namespace="ray_moe")
        try:
            silent = clusters.start(_config("silent", path, 0.0))
            try:
                return [_compare(silent, path, every_s) for every_s in EVERY_S]
            finally:
                silent.stop()
        finally:
            ray.shutdown()


def _config(name: str, path: Path, every_s: float) -> ClusterConfig:
    return ClusterConfig(name=name, model=str(path), peers=PEERS, kv_blocks=1024, metrics_every_s=every_s)


def _compare(silent: Cluster, path: Path, every_s: float) -> Row:
    exporting = clusters.start(_config(f"exporting-{every_s:g}", path, every_s))
    try:
        for each in (silent, exporting):
            _load(each)
        pairs = []
        for turn in range(ROUNDS):  # who goes first changes: what one leaves behind meets the other as often
            order = (silent, exporting) if turn % 2 else (exporting, silent)
            took = {id(each): _load(each) for each in order}
            pairs.append((took[id(silent)], took[id(exporting)]))
    finally:
        exporting.stop()
    ratios = [ours / theirs for theirs, ours in pairs]
    without, with_it = (statistics.fmean(side) for side in zip(*pairs, strict=True))
    spread, push = statistics.stdev(ratios) / len(ratios) ** 0.5, _push_seconds(every_s)
    return {
        "metrics_every_s": every_s,
        "peers": PEERS,
        "requests": REQUESTS,
        "rounds": ROUNDS,
        "step_ms_without": without * 1e3,
        "step_ms_with": with_it * 1e3,
        "ratio": statistics.median(ratios),
        "standard_error": spread,
        "push_ms": push * 1e3,
        "push_share_of_a_core": push / every_s,
    }


def _load(cluster: Cluster) -> float:
    """Mean seconds of a working step over one round of requests, on all ranks."""
    before = cluster.status()
    asyncio.run(_generate(cluster))
    pairs = list(zip(before.peers, cluster.status().peers, strict=True))
    steps = sum(new.steps_worked - old.steps_worked for old, new in pairs)
    return sum(new.seconds_worked - old.seconds_worked for old, new in pairs) / steps


async def _generate(cluster: Cluster) -> None:
    client = Client(cluster.directory())
    prompts = torch.randint(0, VOCABULARY, (REQUESTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    jobs = (client.generate(prompt, params, peer=at % PEERS) for at, prompt in enumerate(prompts.tolist()))
    await asyncio.gather(*jobs)


def _push_seconds(every_s: float) -> float:
    """CPU seconds of one round of a rank's pushes into Ray's own metrics, everything changed since the last one."""
    rank = RankExporter(Exporter(RaySink(), RANK_BUDGET, {"cluster": "bench", "rank": "0"}))
    counters, rounds, took = LoopCounters(), 50, 0.0
    for turn in range(1, rounds + 1):
        for _ in range(SAMPLED):
            counters.steps_agreed += 1
            counters.tokens_emitted += 1
            counters.count_work(0.01)
        numbers: dict[str, Any] = {item.name: turn for item in fields(EngineStatus) if item.type in ("int", "float")}
        status = EngineStatus(state="serving", failure="", **numbers)
        began = time.process_time()
        rank.push(status, counters, turn * every_s, histograms=True)
        took += time.process_time() - began
    return took / rounds
