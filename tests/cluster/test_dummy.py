"""Clusters of weights without files: the same tokens whoever holds the experts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from ray_moe import cluster as clusters
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import Stage
from ray_moe.engine.sampling import SamplingParams
from ray_moe.sdk import Client
from ray_moe.weights.dummy import DummyCheckpoint

pytestmark = pytest.mark.cluster

PROMPT = tuple(range(40, 60))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
EXPERTS, LAYERS = 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration and nothing else: no weights, no tokenizer."""
    path = tmp_path_factory.mktemp("dummy")
    Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        vocab_size=320,
    ).save_pretrained(path)
    assert sorted(file.name for file in path.iterdir()) == ["config.json"]
    return path


def tokens_of(cluster: Cluster, peer: int = 0) -> tuple[int, ...]:
    client = Client(cluster.directory())
    return asyncio.run(client.generate(PROMPT, GREEDY, peer=peer)).token_ids


@pytest.mark.full
def test_one_peer_two_peers_moved_experts_and_other_peers_give_the_same_tokens(local_ray: None, folder: Path) -> None:
    alone = clusters.start(ClusterConfig(name="dummy-1", model=str(folder), load_format="dummy", peers=1, kv_blocks=32))
    try:
        expected = tokens_of(alone)
        assert tokens_of(alone) == expected
        assert len(set(expected)) > 4, "values of many sizes: not one token for ever"
    finally:
        alone.stop()

    config = ClusterConfig(
        name="dummy-2", model=str(folder), load_format="dummy", peers=2, spare_slots="auto", kv_blocks=32
    )
    pair = clusters.start(config)
    try:
        assert [tokens_of(pair, peer) for peer in range(2)] == [expected] * 2
        before = pair.placement()
        assert pair.directory().facts.checkpoint_version == DummyCheckpoint(folder).identity
        # The last expert of each peer changes places, and the first gets a second copy.
        halves = [*range(EXPERTS // 2)], [*range(EXPERTS // 2, EXPERTS)]
        halves[0][-1], halves[1][-1] = halves[1][-1], halves[0][-1]
        homes = [(expert, rank) for rank in range(2) for expert in halves[rank]] + [(0, 1)]
        number = pair.rebalance(homes=dict.fromkeys(range(LAYERS), homes))
        assert pair.wait(number, 60).stage is Stage.DONE
        after = pair.placement()
        assert [tokens_of(pair, peer) for peer in range(2)] == [expected] * 2
        for old, new in zip(before.layers, after.layers, strict=True):
            digests = {slot.logical_expert_id: slot.parameter_digest for slot in old.slots}
            assert {slot.logical_expert_id for slot in new.slots} == set(digests)
            assert all(slot.parameter_digest == digests[slot.logical_expert_id] for slot in new.slots)
            assert len(new.slots) == EXPERTS + 1
        # A third comes, and the first leaves.
        grown = pair.scale(3)
        assert grown is not None and pair.wait(grown, 120).stage is Stage.DONE
        assert pair.wait(pair.drain(0), 60).stage is Stage.DONE
        assert pair.directory().ranks == (1, 2)
        assert [tokens_of(pair, peer) for peer in range(2)] == [expected] * 2
    finally:
        pair.stop()
