"""Live elasticity while things break: copies are wrong or slow, actors die, changes are cancelled. No stream notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ray_moe import cluster as clusters
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import Stage
from ray_moe.models import tiny_moe_path
from ray_moe.weights.checkpoint import Checkpoint
from ray_moe.weights.digest import parameter_digest
from tests.cluster.faults import (
    Expected,
    Load,
    actor_of,
    corrupt_exports,
    corrupt_reads,
    done,
    ended,
    hold,
    inside,
    kill,
    left_over,
    let_go,
    pid_of,
    ranks_of,
    reached,
    reasons_until_ended,
    refuse_publications,
    settled,
    stage_of,
    throttle,
    until,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(local_ray: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks, up to four. Its journal is Ray's store, or a file where a test asks for that."""
    in_file = getattr(request, "param", "") == "file"
    config = ClusterConfig(
        name="faults",
        model=str(tiny_moe_path()),
        peers=2,
        min_peers=2,
        max_peers=4,
        spare_slots=4,
        kv_blocks=256,
        step_deadline_s=20,
        state_file=str(tmp_path_factory.mktemp("journal") / "state") if in_file else None,
    )
    running = clusters.start(config)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> Expected:
    return Expected(cluster.directory(), streams=3, tokens=300)


@pytest.fixture
def load(cluster: Cluster, expected: Expected) -> Iterator[Load]:
    settled(cluster)
    with Load(cluster, expected) as streams:
        yield streams
    settled(cluster)


def replicas_of(cluster: Cluster, expert: int) -> int:
    """Copies of an expert in layer 0."""
    return sum(slot.logical_expert_id.value == expert for slot in cluster.placement().layers[0].slots)


def other_replicas(cluster: Cluster, expert: int = 3) -> dict[tuple[int, int], int]:
    """Two copies of an expert in every layer where there is one, and one where there are two."""
    count = 3 - min(2, replicas_of(cluster, expert))
    return {(layer.layer, expert): count for layer in cluster.placement().layers}


def wider(cluster: Cluster) -> dict[tuple[int, int], int]:
    """Copies that are not there: two of an expert that has one."""
    expert = next(expert for expert in range(12) if replicas_of(cluster, expert) == 1)
    return {(layer.layer, expert): 2 for layer in cluster.placement().layers}


def digests_are_the_checkpoints(cluster: Cluster) -> bool:
    checkpoint = Checkpoint(tiny_moe_path())
    return all(
        slot.parameter_digest
        == parameter_digest(checkpoint.expert(layer.layer, slot.logical_expert_id.value, dtype=torch.float32))
        for layer in cluster.placement().layers
        for slot in layer.slots
    )


# -- Copies


def test_a_corrupted_copy_is_reported_and_fetched_from_another_source(cluster: Cluster, load: Load) -> None:
    before = cluster.placement().generation
    for rank in ranks_of(cluster):
        corrupt_exports(actor_of(cluster, rank), wrong=True)
    try:
        operation, said = reasons_until_ended(cluster, cluster.rebalance(replicas=wider(cluster)))
    finally:
        for rank in ranks_of(cluster):
            corrupt_exports(actor_of(cluster, rank), wrong=False)
    assert operation.stage is Stage.DONE
    assert any("digest" in reason for reason in said), said
    assert operation.moved_bytes.keys() == {"checkpoint"}, "what a peer gave was never used"
    assert cluster.placement().generation == before + 1
    assert digests_are_the_checkpoints(cluster)
    until(lambda: before + 1 in load.generations)


def test_a_copy_that_is_wrong_from_every_source_fails_the_operation_and_nothing_else(
    cluster: Cluster, load: Load
) -> None:
    before = cluster.placement()
    ranks = ranks_of(cluster)
    for rank in ranks:
        corrupt_exports(actor_of(cluster, rank), wrong=True)
        corrupt_reads(actor_of(cluster, rank), wrong=True)
    try:
        operation = ended(cluster, cluster.rebalance(replicas=wider(cluster)))
    finally:
        for rank in ranks:
            corrupt_exports(actor_of(cluster, rank), wrong=False)
            corrupt_reads(actor_of(cluster, rank), wrong=False)
    assert operation.stage is Stage.FAILED
    assert "no source is left" in operation.reason and "digest" in operation.reason
    assert cluster.history()[-1].stage is Stage.FAILED
    assert cluster.placement() == before
    settled(cluster)
    load.flows()
    done(cluster, cluster.rebalance(replicas=wider(cluster)))


def test_a_slow_copy_holds_nobody_up_and_can_be_cancelled(cluster: Cluster, load: Load) -> None:
    before = cluster.placement()
    ranks = ranks_of(cluster)
    for rank in ranks:
        throttle(actor_of(cluster, rank), 20e3)  # the first expert comes at once, others ten seconds after one another
    try:
        number = cluster.rebalance(replicas=wider(cluster))
        reached(cluster, number, Stage.FILLING)
        until(lambda: left_over(cluster).keys() & {f"slots of rank {rank}" for rank in ranks}, what="a first copy")
        load.flows(20)
        assert stage_of(cluster, number) is Stage.FILLING
        assert cluster.status().operations[0].stage == "filling"
        cluster.cancel(number, why="it takes too long")
        operation = ended(cluster, number)
        assert operation.stage is Stage.CANCELLED and "it takes too long" in operation.reason
        settled(cluster)
        # Nothing of it goes on: the same slots can be filled at once.
    finally:
        for rank in ranks:
            throttle(actor_of(cluster, rank), None)
    assert cluster.placement() == before
    load.flows()
    done(cluster, cluster.rebalance(replicas=wider(cluster)))


# -- The controller and the routing actor


def test_a_controller_killed_while_copies_arrive_goes_on_with_them(cluster: Cluster, load: Load) -> None:
    for rank in ranks_of(cluster):
        throttle(actor_of(cluster, rank), 400e3)
    number = cluster.rebalance(replicas=wider(cluster))
    reached(cluster, number, Stage.FILLING)
    controller = actor_of(cluster, "controller")
    pid = pid_of(controller)
    kill(controller)
    assert stage_of(cluster, number) in (Stage.FILLING, Stage.PUBLISHING, Stage.SWITCHING, Stage.DONE)
    assert pid_of(controller) != pid
    load.flows()
    done(cluster, number)
    for rank in ranks_of(cluster):
        throttle(actor_of(cluster, rank), None)
