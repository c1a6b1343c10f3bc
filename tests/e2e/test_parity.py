"""Greedy tokens equal transformers' own model's, whatever serves them: families, peers, replicas, loads, transports.

The oracle, and what "equal" means, is in `oracle.py`; the cells are in `matrix.py`. The whole matrix is marked `full`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator

import pytest
import torch

from ray_moe import cluster as clusters
from ray_moe.sdk import Client
from ray_moe.weights.sources import experts_modules
from tests.e2e.matrix import (
    FULL_CELLS,
    GREEDY,
    MODELS,
    NEAR_TIES_PER_TOKEN,
    SCARCE_BLOCKS,
    TINY_MOE,
    TOKENS,
    Cell,
    Lab,
    keys,
    prompts_of,
    read_record,
    settled,
    write_record,
)
from tests.e2e.oracle import greedy
from tests.e2e.pool import PeerPool
from tests.families import FAMILIES

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def lab(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    pool = PeerPool(4)
    yield Lab(pool, tmp_path_factory.mktemp("parity"))
    pool.close()


@pytest.mark.parametrize("model", FAMILIES)
def test_four_peers_with_replicas_give_the_reference_tokens(lab: Lab, model: str) -> None:
    lab.run(Cell(model, 4, replicas=True), loads=["concurrent"])


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_fewer_peers_give_the_reference_tokens_too(lab: Lab, peers: int) -> None:
    lab.run(Cell(TINY_MOE, peers, replicas=peers > 1), loads=["concurrent"])


# One cell for everything that a configuration can select; every family meets each of them in the full matrix.
@pytest.mark.parametrize(
    "cell",
    [
        Cell("qwen2_moe", 4, True, "hierarchical", "block_sparse", strategy="shared_path"),
        Cell("deepseek_v3", 4, True, "padded_all_to_all", "masked_decode", strategy="chunk_pipeline"),
        Cell("mixtral", 4, True, "all_gather_filter", strategy="microbatch_pipeline", gate_location="expert", chunks=2),
        Cell(TINY_MOE, 4, True, decode_buckets="1x3,2x5"),
    ],
    ids=str,
)
def test_every_choice_of_the_configuration_gives_the_reference_tokens(lab: Lab, cell: Cell) -> None:
    rows = lab.run(cell, loads=["concurrent"])
    assert all((row.replays > 0) == bool(cell.decode_buckets) for row in rows)


# Each starts processes of its own, which is most of its time: in CI the largest alone.
@pytest.mark.parametrize("peers", [*(pytest.param(peers, marks=pytest.mark.full) for peers in (1, 2, 3)), 4])
def test_a_started_cluster_gives_the_reference_tokens(lab: Lab, peers: int) -> None:
    reference, prompts = lab.reference(TINY_MOE), prompts_of(TINY_MOE)
    cluster = clusters.start(Cell(TINY_MOE, peers, replicas=peers > 1).config(reference.folder))

    async def all_at_once() -> list[tuple[int, ...]]:
        client = Client(cluster.directory())
        found = await asyncio.gather(*(client.generate(prompt, GREEDY) for prompt in prompts))
        return [generation.token_ids for generation in found]

    try:
        found = asyncio.run(all_at_once())
        status = asyncio.run(settled(lambda: asyncio.to_thread(cluster.status)))
    finally:
        cluster.stop()
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == TOKENS
        assert reference.near_ties(prompt, tokens) == 0
    assert len(status.peers) == peers
    assert all((peer.rows_sent > 0) == (peers > 1) for peer in status.peers)


@pytest.mark.parametrize("model", MODELS)
def test_the_reference_tokens_tell_experts_apart(lab: Lab, model: str) -> None:
    """Swapping two experts' down projections in one layer changes them: parity would not survive a wrong slot."""
    reference, prompts = lab.reference(model), prompts_of(model)
    swapped = copy.deepcopy(reference.model)
    _, _, experts = experts_modules(swapped)[-1]
    with torch.no_grad():
        experts.down_proj[[0, 5]] = experts.down_proj[[5, 0]]
    for prompt in prompts:
        expected = reference.greedy(prompt, TOKENS)
        assert greedy(swapped, prompt, TOKENS) != expected
        assert len(set(expected)) > TOKENS // 8  # no loop that hides what came before it


@pytest.mark.full
@pytest.mark.parametrize("cell", FULL_CELLS, ids=str)
def test_every_cell_gives_the_reference_tokens(lab: Lab, cell: Cell) -> None:
    rows = lab.run(cell)
    assert (sum(row.preemptions for row in rows) > 0) == (cell.kv_blocks == SCARCE_BLOCKS)
    # With buckets, prompts one after another always fit, and several at once do not while all of them run.
    assert all((row.replays > 0) == bool(cell.decode_buckets) for row in rows)
    assert (sum(row.fallbacks for row in rows) > 0) == bool(cell.decode_buckets)


def test_near_ties_are_at_most_one_in_ten_thousand_tokens(lab: Lab) -> None:
    assert lab.rows
    assert sum(row.near_ties for row in lab.rows) <= NEAR_TIES_PER_TOKEN * sum(row.tokens for row in lab.rows)


@pytest.mark.full
def test_the_whole_matrix_is_recorded(lab: Lab) -> None:
    by_key = {row.key: row for row in lab.rows}
    missing = [key for key in keys(FULL_CELLS) if key not in by_key]
    assert not missing, "cells that did not run or failed"
    write_record([by_key[key] for key in keys(FULL_CELLS)])


def test_the_committed_record_has_every_cell_and_all_are_token_exact() -> None:
    _, rows = read_record()
    assert [row.key for row in rows] == keys(FULL_CELLS)
    assert sum(row.near_ties for row in rows) <= NEAR_TIES_PER_TOKEN * sum(row.tokens for row in rows)
    assert all(row.token_exact or row.near_ties for row in rows)
