"""Experts as a service, what is slow to show: eight families as transformers models; peers that leave, come and die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

import ray_moe
from ray_moe import cluster as clusters
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import Stage
from ray_moe.errors import NotServingError, PeerLostError
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client, connect
from ray_moe.weights.sources import experts_modules
from tests.cluster.test_experts_service import FP32, own, rows
from tests.families import FAMILIES

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.full]

IDS = torch.tensor([[5 + 7 * place % 250 for place in range(40)], [3 + 11 * place % 250 for place in range(40)]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_of_its_local_model(
    local_ray: None, family_dir: Callable[..., Path], family: str
) -> None:
    folder = family_dir(family)
    local = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    running = clusters.start(ClusterConfig(name=f"plugin-{family}", model=str(folder), peers=2, kv_blocks=64))
    try:
        ray_moe.register(running)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="ray_moe")
        assert not any(list(module.parameters()) for _, _, module in experts_modules(model))
        with torch.no_grad():
            logits, expected = model.eval()(IDS).logits, local(IDS).logits
        torch.testing.assert_close(logits, expected, **FP32)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    finally:
        ray_moe.unregister()
        running.stop()


def test_calls_go_on_while_peers_leave_and_come_and_no_result_changes(local_ray: None) -> None:
    config = ClusterConfig(
        name="moving", model=str(tiny_moe_path()), peers=3, min_peers=2, max_peers=3, spare_slots=4, kv_blocks=64
    )
    running = clusters.start(config)
    try:

        async def calls() -> int:
            client, done = Client(running.directory()), 0

            def change() -> None:
                assert running.wait(running.drain(1), 120).stage is Stage.DONE
                number = running.scale(3)
                assert number is not None
                assert running.wait(number, 120).stage is Stage.DONE

            changing = asyncio.create_task(asyncio.to_thread(change))
            while not changing.done() or done < 20:
                given = rows(1 + done % 9, seed=done)
                out = await client.experts(done % 4).forward(*given)
                torch.testing.assert_close(out, own(done % 4, given), **FP32)
                done += 1
            await changing
            return done

        assert asyncio.run(calls()) >= 20
        assert all(row.references == 3 for row in running.status().generations if row.state == "ACTIVE")
    finally:
        running.stop()


def test_a_peer_that_dies_ends_the_calls_by_name(local_ray: None) -> None:
    running = clusters.start(ClusterConfig(name="dying", model=str(tiny_moe_path()), peers=2, kv_blocks=64))
    try:
        with connect(cluster="dying") as client:
            layer = client.experts(0)
            layer.forward(*rows(3))
            peer = ray.get_actor("dying.expert-1", namespace="ray_moe")
            os.kill(ray.get(peer.pid.remote(), timeout=20), signal.SIGKILL)
            for _ in range(4):  # on the dead peer, and on the one that has lost it
                with pytest.raises((PeerLostError, NotServingError), match=r"rank \d|dying"):
                    layer.forward(*rows(3))
    finally:
        running.stop()
