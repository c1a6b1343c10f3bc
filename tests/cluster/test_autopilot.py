"""A cluster that changes itself: it grows under load, moves experts where demand is, and shrinks when nobody asks."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from ray_moe import cluster as clusters
from ray_moe.cluster import Cluster
from ray_moe.config import AutopilotConfig, ClusterConfig
from ray_moe.controlplane.operations import Kind, Stage
from ray_moe.engine.sampling import SamplingParams
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client
from tests.cluster.test_cluster import until

pytestmark = pytest.mark.cluster

PROMPT = tuple(range(40, 60))
LONG = SamplingParams(max_tokens=400, temperature=0.7, seed=5, ignore_eos=True)
# Targets that this load is far above, and idling far below, on any machine; seconds instead of minutes.
QUICK = AutopilotConfig(
    tokens_per_s=10.0,
    waiting=2.0,
    token_latency_s=60.0,
    grow_after_s=1.0,
    shrink_after_s=4.0,
    move_after_s=2.0,
    cool_down_s=2.0,
    imbalance=1.05,
)


def kinds(cluster: Cluster) -> Counter[Kind]:
    return Counter(one.kind for one in cluster.history() if one.stage is Stage.DONE)


@pytest.mark.full
def test_a_cluster_grows_under_load_moves_experts_to_level_it_and_shrinks_when_idle(local_ray: None) -> None:
    running = clusters.start(
        ClusterConfig(
            name="pilot",
            model=str(tiny_moe_path()),
            peers=2,
            min_peers=2,
            max_peers=3,
            spare_slots=4,
            step_deadline_s=30,
            demand_every_steps=16,
            autopilot=QUICK,
        )
    )
    try:

        async def load() -> None:
            client = Client(running.directory())
            expected = (await client.generate(PROMPT, LONG)).token_ids

            async def ask() -> None:
                while not (kinds(running)[Kind.GROW] and kinds(running)[Kind.REBALANCE]):
                    assert (await client.generate(PROMPT, LONG)).token_ids == expected

            await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(6))), timeout=120)

        asyncio.run(load())
        until(lambda: kinds(running)[Kind.SHRINK] == 1, seconds=90)
        assert len(running.directory().ranks) == 2
        history = running.history()
        assert {one.asked_by for one in history} == {"autopilot"}
        assert all(one.why for one in history) and not any(one.stage is Stage.FAILED for one in history)
        assert kinds(running)[Kind.GROW] == 1, "it does not flap"
    finally:
        running.stop()
