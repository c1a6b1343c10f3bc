"""Live elasticity while things break: copies are wrong or slow, actors die, changes are cancelled. Streams go on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest
import ray
import torch

from ray_moe import cluster as clusters
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import Stage
from ray_moe.deadline import ray_get
from ray_moe.engine.records import GenerateRequest
from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import ConfigError, PeerLeavingError
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client
from ray_moe.weights.checkpoint import Checkpoint
from ray_moe.weights.digest import parameter_digest
from tests.cluster.faults import (
    SECONDS,
    Expected,
    Load,
    actor_of,
    corrupt_exports,
    corrupt_reads,
    done,
    ended,
    exists,
    hold,
    kill,
    left_over,
    let_go,
    pid_of,
    ranks_of,
    reached,
    reasons_until_ended,
    refuse_publications,
    report_of,
    requests_in,
    settled,
    stage_of,
    throttle,
    until,
)

pytestmark = pytest.mark.cluster

LONG_PROMPT = tuple(20 + number % 200 for number in range(900))  # takes 29 steps of prefill
BRIEF = SamplingParams(max_tokens=8, temperature=0.7, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster(
    local_ray: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
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
        max_prefill_tokens=32,
        step_deadline_s=20,
        state_file=str(tmp_path_factory.mktemp("journal") / "state") if in_file else None,
    )
    running = clusters.start(config)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> Expected:
    return Expected(cluster.directory(), streams=3, tokens=200)


@pytest.fixture
def load(cluster: Cluster, expected: Expected) -> Iterator[Load]:
    """Three streams that decode during the whole test; before and after it nothing lies about in the cluster."""
    settled(cluster)
    with Load(cluster, expected) as streams:
        yield streams
        streams.flows()
    settled(cluster)


def copies_of(cluster: Cluster, expert: int) -> int:
    """In layer 0; these tests treat all layers alike."""
    return sum(slot.logical_expert_id.value == expert for slot in cluster.placement().layers[0].slots)


def another_placement(cluster: Cluster) -> int:
    """Ask for a second copy of an expert that has one, and for one copy of those that have more."""
    single = next(expert for expert in range(12) if copies_of(cluster, expert) == 1)
    others = [expert for expert in range(12) if copies_of(cluster, expert) > 1]
    wanted = {single: 2, **dict.fromkeys(others, 1)}
    layers = [layer.layer for layer in cluster.placement().layers]
    return cluster.rebalance(replicas={(layer, expert): count for layer in layers for expert, count in wanted.items()})


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
    ranks = ranks_of(cluster)
    for rank in ranks:
        corrupt_exports(actor_of(cluster, rank), wrong=True)
    try:
        operation, said = reasons_until_ended(cluster, another_placement(cluster))
    finally:
        for rank in ranks:
            corrupt_exports(actor_of(cluster, rank), wrong=False)
    assert operation.stage is Stage.DONE
    assert any("digest" in reason for reason in said), said
    assert operation.moved_bytes.keys() == {"checkpoint"}, "what a peer gave was not used"
    assert cluster.placement().generation == before + 1
    assert digests_are_the_checkpoints(cluster)
    until(lambda: before + 1 in load.generations)


def test_a_copy_that_is_wrong_from_every_source_fails_the_operation_and_nothing_else(
    cluster: Cluster, load: Load
) -> None:
    before, ranks = cluster.placement(), ranks_of(cluster)
    for rank in ranks:
        corrupt_exports(actor_of(cluster, rank), wrong=True)
        corrupt_reads(actor_of(cluster, rank), wrong=True)
    try:
        operation = ended(cluster, another_placement(cluster))
    finally:
        for rank in ranks:
            corrupt_exports(actor_of(cluster, rank), wrong=False)
            corrupt_reads(actor_of(cluster, rank), wrong=False)
    assert operation.stage is Stage.FAILED
    assert "no source is left" in operation.reason and "digest" in operation.reason
    assert cluster.history()[-1] == operation
    settled(cluster)
    assert cluster.placement() == before
    load.flows()
    done(cluster, another_placement(cluster))


def test_a_slow_copy_holds_nobody_up_and_can_be_cancelled(cluster: Cluster, load: Load) -> None:
    before, ranks = cluster.placement(), ranks_of(cluster)
    for rank in ranks:
        throttle(actor_of(cluster, rank), 20e3)  # the first expert comes at once, each other one ten seconds later
    number = another_placement(cluster)
    until(lambda: left_over(cluster).keys() & {f"slots of rank {rank}" for rank in ranks}, what="a first copy")
    load.flows(20)
    assert stage_of(cluster, number) is Stage.FILLING
    assert [row.stage for row in cluster.status().operations] == ["filling"]
    cluster.cancel(number, why="it takes too long")
    operation = ended(cluster, number)
    assert operation.stage is Stage.CANCELLED and "it takes too long" in operation.reason
    settled(cluster)
    assert cluster.placement() == before
    for rank in ranks:
        throttle(actor_of(cluster, rank), None)
    # The copies have stopped too: their slots can be filled anew at once.
    operation, said = reasons_until_ended(cluster, another_placement(cluster))
    assert operation.stage is Stage.DONE and said <= {""}, said


# -- The controller and the routing actor


@pytest.mark.full
def test_a_controller_killed_while_copies_arrive_goes_on_with_them(cluster: Cluster, load: Load) -> None:
    sources = [actor_of(cluster, rank) for rank in ranks_of(cluster)]
    for source in sources:
        hold(source, "_filler.export_slots")
    number = another_placement(cluster)
    reached(cluster, number, Stage.FILLING)
    assert killed_and_back(cluster, number) is Stage.FILLING
    load.flows()
    for source in sources:
        let_go(source, "_filler.export_slots")
    done(cluster, number)


def killed_and_back(cluster: Cluster, number: int) -> Stage:
    """Kill the controller; the operation's stage when there is another one, which the same handle reaches."""
    controller = actor_of(cluster, "controller")
    pid, asked_by = pid_of(controller), cluster.operation(number).asked_by
    kill(controller)
    operation = cluster.operation(number)
    assert pid_of(controller) != pid
    assert operation.asked_by == asked_by
    return operation.stage


def restart_and_rebalance(cluster: Cluster, load: Load, *roles: str) -> None:
    """Kill these actors while a switch is half done: one rank has staged the next generation, the other has not."""
    before, history = cluster.placement(), cluster.history()
    slow, fast = ranks_of(cluster)
    hold(actor_of(cluster, slow), "_seats.stage")
    number = another_placement(cluster)
    reached(cluster, number, Stage.SWITCHING)
    until(lambda: report_of(cluster, fast).staged == before.generation + 1)
    kill(*(actor_of(cluster, role) for role in roles))
    load.flows()
    rows = {row.generation: sorted(row.holders) for row in cluster.status().generations if row.state != "RETIRED"}
    both = sorted(f"rank-{rank}" for rank in (slow, fast))
    assert rows == {before.generation: both, before.generation + 1: [f"rank-{fast}"]}
    assert cluster.history()[: len(history)] == history
    let_go(actor_of(cluster, slow), "_seats.stage")
    done(cluster, number)
    settled(cluster)  # the old generation has retired, its slots are free
    assert cluster.placement().generation == before.generation + 1
    done(cluster, another_placement(cluster))


@pytest.mark.full
def test_a_routing_actor_that_is_killed_knows_generations_and_leases_again(cluster: Cluster, load: Load) -> None:
    restart_and_rebalance(cluster, load, "routing")


def test_controller_and_routing_actor_killed_at_once_find_everything_again(cluster: Cluster, load: Load) -> None:
    restart_and_rebalance(cluster, load, "controller", "routing")


# -- Ranks that come


def coming(cluster: Cluster, number: int) -> int:
    """The rank that a grow brings, once it has an actor."""
    (rank,) = cluster.operation(number).ranks
    until(lambda: exists(cluster, rank), what=f"the actor of rank {rank}")
    return rank


def test_a_grow_that_is_cancelled_or_loses_its_rank_while_that_loads_leaves_nothing(
    cluster: Cluster, load: Load
) -> None:
    before = cluster.placement()
    number = cluster.scale(3, why="one more")
    first = coming(cluster, number)
    assert cluster.status().operations[0].stage == "preparing"
    cluster.cancel(number)
    assert ended(cluster, number).stage is Stage.CANCELLED
    settled(cluster)

    number = cluster.scale(3, why="one more")
    second = coming(cluster, number)
    assert second > first, "a rank is never used again"
    kill(actor_of(cluster, second))
    operation = ended(cluster, number)
    assert operation.stage is Stage.FAILED and f"rank {second} died" in operation.reason
    settled(cluster)
    assert cluster.placement() == before and cluster.status().state == "serving"


@pytest.mark.full
def test_a_grow_that_is_cancelled_or_loses_its_rank_while_the_epoch_is_joined_leaves_nothing(
    cluster: Cluster, load: Load
) -> None:
    before, waits = cluster.placement(), actor_of(cluster, ranks_of(cluster)[0])
    hold(waits, "_seats.join")
    number = cluster.scale(3)
    reached(cluster, number, Stage.JOINING)
    cluster.cancel(number)
    assert ended(cluster, number).stage is Stage.CANCELLED
    settled(cluster)

    number = cluster.scale(3)
    rank = coming(cluster, number)
    reached(cluster, number, Stage.JOINING)
    kill(actor_of(cluster, rank))
    operation = ended(cluster, number)
    assert operation.stage is Stage.FAILED and f"rank {rank} died" in operation.reason
    settled(cluster)
    assert cluster.placement() == before

    let_go(waits, "_seats.join")  # it joins epochs that nobody else is in any more
    load.flows()
    done(cluster, cluster.scale(3))
    done(cluster, cluster.drain(ranks_of(cluster)[-1]))


@pytest.mark.full
def test_a_controller_killed_in_every_stage_of_a_grow_brings_it_to_its_end(cluster: Cluster, load: Load) -> None:
    old = ranks_of(cluster)
    for rank in old:
        hold(actor_of(cluster, rank), "_filler.export_slots")
    number = cluster.scale(3)
    rank = coming(cluster, number)
    assert killed_and_back(cluster, number) is Stage.PREPARING

    reached(cluster, number, Stage.FILLING)
    assert killed_and_back(cluster, number) is Stage.FILLING
    hold(actor_of(cluster, old[0]), "_seats.join")
    for other in old:
        let_go(actor_of(cluster, other), "_filler.export_slots")

    reached(cluster, number, Stage.JOINING)
    assert killed_and_back(cluster, number) is Stage.JOINING
    refuse_publications(cluster, refused=True)
    let_go(actor_of(cluster, old[0]), "_seats.join")

    reached(cluster, number, Stage.PUBLISHING)
    until(lambda: "takes nothing now" in cluster.operation(number).reason)
    assert killed_and_back(cluster, number) is Stage.PUBLISHING
    with pytest.raises(ConfigError, match=f"operation {number} is publishing: only what is .* can be cancelled"):
        cluster.cancel(number)
    hold(actor_of(cluster, rank), "_seats.first_view")
    refuse_publications(cluster, refused=False)

    reached(cluster, number, Stage.SWITCHING)
    assert killed_and_back(cluster, number) is Stage.SWITCHING
    load.flows()
    assert load.epochs == {cluster.status().peers[0].epoch}, "the old epoch serves until the new one can"
    let_go(actor_of(cluster, rank), "_seats.first_view")
    done(cluster, number)
    until(lambda: cluster.placement().group.epoch in load.epochs)
    settled(cluster)
    done(cluster, cluster.drain(rank))


# -- Ranks that leave


def test_what_cannot_be_drained_is_refused_by_name(cluster: Cluster) -> None:
    settled(cluster)
    ranks = ranks_of(cluster)
    with pytest.raises(ConfigError, match=rf"at least 2 of the ranks \[{ranks[0]}, {ranks[1]}\] must stay"):
        cluster.drain(ranks[0])
    with pytest.raises(ConfigError, match=rf"rank must be one of \[{ranks[0]}, {ranks[1]}\], found 99"):
        cluster.drain(99)
    with pytest.raises(ConfigError, match=r"peers must be in \[2, 4\], found 5"):
        cluster.scale(5)
    with pytest.raises(ConfigError, match=r"peers must be in \[2, 4\], found 1"):
        cluster.scale(1)
    assert not cluster.status().operations


def test_a_rank_that_leaves_hands_over_what_it_has_begun_and_clients_that_know_it_go_elsewhere(
    cluster: Cluster, load: Load, expected: Expected
) -> None:
    prompts = {"long": asyncio.run(Client(cluster.directory()).generate(LONG_PROMPT, BRIEF)).token_ids}
    done(cluster, cluster.scale(3))
    ranks = ranks_of(cluster)
    assert len(ranks) == 3
    until(lambda: cluster.placement().group.epoch in load.epochs)
    leaving = random.choice(ranks)
    at, actor, old = ranks.index(leaving), actor_of(cluster, leaving), cluster.directory()
    hold(actor, "_reception.hand_over")
    hold(actor, "_seats.depart")
    number = cluster.drain(leaving, why="its machine is needed")
    reached(cluster, number, Stage.MOVING)

    async def streams_on_it() -> list[tuple[int, ...]]:
        # Each has the directory of before: a client that has heard of the change sends nothing there any more.
        early, later, late = Client(old), Client(old), Client(old)
        begun = [asyncio.create_task(early.generate(expected.prompts[0], expected.params[0], peer=at))]
        await there(lambda: "decode" in requests_in(actor))
        begun.append(asyncio.create_task(later.generate(LONG_PROMPT, BRIEF, peer=at)))
        await there(lambda: "prefill" in requests_in(actor))
        await asyncio.to_thread(let_go, actor, "_reception.hand_over")
        await there(lambda: not report_of(cluster, leaving).admitting)
        begun.append(asyncio.create_task(late.generate(LONG_PROMPT, BRIEF, peer=at)))
        return [(await stream).token_ids for stream in begun]

    decoding, prefilling, submitted_late = asyncio.run(streams_on_it())
    assert decoding == expected.tokens[0]
    assert prefilling == submitted_late == prompts["long"]
    assert reached(cluster, number, Stage.SWITCHING).ranks == (leaving,)
    with pytest.raises(PeerLeavingError, match=f"rank {leaving}"):
        ray_get(actor.submit.remote("somebody", GenerateRequest("late", LONG_PROMPT, BRIEF)), SECONDS, "submit")
    load.flows()
    let_go(actor, "_seats.depart")
    assert done(cluster, number).why == "its machine is needed"
    settled(cluster)
    assert set(ranks_of(cluster)) == set(ranks) - {leaving}
    back = asyncio.run(Client(old).generate(LONG_PROMPT, BRIEF, peer=at))
    assert back.token_ids == prompts["long"], "whoever was away during the change is served elsewhere"


async def there(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition)


@pytest.mark.full
def test_a_controller_killed_in_every_stage_of_a_shrink_brings_it_to_its_end(cluster: Cluster, load: Load) -> None:
    done(cluster, cluster.scale(3))
    ranks = ranks_of(cluster)
    leaving = random.choice(ranks)
    stays = next(rank for rank in ranks if rank != leaving)
    for rank in ranks:
        hold(actor_of(cluster, rank), "_filler.export_slots")
    number = cluster.drain(leaving)
    reached(cluster, number, Stage.FILLING)
    assert killed_and_back(cluster, number) is Stage.FILLING
    hold(actor_of(cluster, stays), "_seats.join")
    for rank in ranks:
        let_go(actor_of(cluster, rank), "_filler.export_slots")

    reached(cluster, number, Stage.JOINING)
    assert killed_and_back(cluster, number) is Stage.JOINING
    hold(actor_of(cluster, leaving), "_reception.hand_over")
    let_go(actor_of(cluster, stays), "_seats.join")

    reached(cluster, number, Stage.MOVING)
    assert killed_and_back(cluster, number) is Stage.MOVING
    hold(actor_of(cluster, leaving), "_seats.depart")
    let_go(actor_of(cluster, leaving), "_reception.hand_over")

    reached(cluster, number, Stage.SWITCHING)
    assert killed_and_back(cluster, number) is Stage.SWITCHING
    load.flows()
    let_go(actor_of(cluster, leaving), "_seats.depart")
    done(cluster, number)
    settled(cluster)
    assert leaving not in ranks_of(cluster)


# -- Several at once


@pytest.mark.full
def test_a_grow_is_prepared_while_a_rebalance_runs_and_a_drain_waits_for_both(cluster: Cluster, load: Load) -> None:
    ranks = ranks_of(cluster)
    for rank in ranks:
        throttle(actor_of(cluster, rank), 30e3)
    rebalance = another_placement(cluster)
    reached(cluster, rebalance, Stage.FILLING)
    grow, leaving = cluster.scale(3), random.choice(ranks)
    shrink = cluster.drain(leaving)
    with pytest.raises(ConfigError, match=f"found {leaving}"):
        cluster.drain(leaving)
    reached(cluster, grow, Stage.QUEUED)
    assert [row.stage for row in cluster.status().operations] == ["filling", "queued", "queued"]
    for rank in ranks:
        throttle(actor_of(cluster, rank), None)
    for number in (rebalance, grow, shrink):
        done(cluster, number)
    assert [operation.number for operation in cluster.history()[-3:]] == [rebalance, grow, shrink]
    assert leaving not in ranks_of(cluster) and len(ranks_of(cluster)) == 2


@pytest.mark.full
def test_two_drains_at_once_are_carried_out_one_after_the_other(cluster: Cluster, load: Load) -> None:
    done(cluster, cluster.scale(4))
    first, second, *_ = random.sample(ranks_of(cluster), 4)
    numbers = cluster.drain(first), cluster.drain(second)
    for number in numbers:
        done(cluster, number)
    assert not {first, second} & set(ranks_of(cluster)) and len(ranks_of(cluster)) == 2


@pytest.mark.full
def test_a_grow_beyond_what_ray_has_fails_and_says_what_is_free(cluster: Cluster, load: Load) -> None:
    before, free = cluster.placement(), ray.available_resources()["CPU"]
    somebody_else = ray.util.placement_group([{"CPU": free - 0.375}])  # one rank finds room, two do not
    ray_get(somebody_else.ready(), SECONDS, "room for somebody else")
    operation = ended(cluster, cluster.scale(4))
    assert operation.stage is Stage.FAILED and operation.refused
    assert "no room for another peer: it takes {'CPU': 0.25}, free are {'CPU': 0.125}" in operation.reason
    settled(cluster)
    assert cluster.placement() == before
    ray.util.remove_placement_group(somebody_else)


# -- With a journal of its own


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["file"], indirect=True)
def test_a_cluster_with_a_state_file_is_resumed_from_it(cluster: Cluster, load: Load) -> None:
    restart_and_rebalance(cluster, load, "controller", "routing")
