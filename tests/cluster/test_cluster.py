"""A cluster of real actors: generations change under load, requests are cancelled and continued, peers are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from ray_moe import cluster as clusters
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import (
    ConfigError,
    GenerationError,
    NotServingError,
    PeerLostError,
    PlacementError,
    RayMoEError,
    RequestError,
)
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client

pytestmark = pytest.mark.cluster

PROMPT = tuple(range(40, 60))
GREEDY = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster(local_ray: None) -> Iterator[Cluster]:
    config = ClusterConfig(
        name="behaviour",
        model=str(tiny_moe_path()),
        peers=3,
        spare_slots=2,
        kv_blocks=64,
        step_deadline_s=20,
        audit_rate=1.0,
    )
    running = clusters.start(config)
    yield running
    running.stop()


def until(condition, seconds: float = 20.0) -> None:
    """Poll a condition of the running system; fails when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} s: {condition}"
        time.sleep(0.05)


def test_a_second_generation_is_published_while_requests_run_and_no_token_changes(cluster: Cluster) -> None:
    client = Client(cluster.directory())

    async def alone() -> tuple[int, ...]:
        return (await client.generate(PROMPT, GREEDY)).token_ids

    async def across_a_publication() -> list:
        streams = [asyncio.create_task(client.generate(PROMPT, GREEDY, peer=peer)) for peer in range(3)]
        await asyncio.sleep(0.5)
        assert not any(stream.done() for stream in streams)
        published = await asyncio.to_thread(cluster.publish, {(layer, 3): 2 for layer in range(4)})
        results = await asyncio.gather(*streams)
        assert all(published in result.generations for result in results), "the new generation served the same streams"
        return results

    async def both() -> None:
        before = cluster.status().generation
        expected = await alone()
        results = await across_a_publication()
        for result in results:
            assert result.token_ids == expected
            assert result.generations == (before, before + 1), "old handles finish on theirs, then one switch for all"

    asyncio.run(both())
    until(lambda: [row.state for row in cluster.status().generations][-2:] == ["RETIRED", "ACTIVE"])
    active = cluster.placement()
    assert {len(layer.replicas(type(layer.slots[0].logical_expert_id)(3))) for layer in active.layers} == {2}
    in_use = {
        (slot.destination_rank.value, layer.layer, slot.pool_slot) for layer in active.layers for slot in layer.slots
    }

    def freed() -> bool:
        resident = sum(sum(peer.resident_slots.values()) for peer in cluster.status().peers)
        return resident == len(in_use)

    until(freed)


def test_a_placement_without_room_is_refused_by_name_and_the_old_generation_serves_on(cluster: Cluster) -> None:
    before = cluster.status().generation
    with pytest.raises(
        PlacementError, match=r"layer \d+ rank \d+: \d+ new copies need pool slots; of \d+, \d+ are free"
    ):
        cluster.publish({(layer, expert): 3 for layer in range(4) for expert in range(12)})
    with pytest.raises(ConfigError, match=r"count must be in \[1, 3\]"):
        cluster.publish({(0, 0): 4})
    assert cluster.status().generation == before
    client = Client(cluster.directory())
    assert len(asyncio.run(client.generate(PROMPT, GREEDY)).token_ids) == GREEDY.max_tokens


def test_a_generation_in_use_cannot_be_retired_and_its_holders_are_named(cluster: Cluster) -> None:
    routing = ray.get_actor("behaviour.routing", namespace="ray_moe")
    active = cluster.placement().generation
    with pytest.raises(GenerationError):
        _ask(routing.retire.remote(active))
    row = next(row for row in cluster.status().generations if row.generation == active)
    assert row.references == 3 and sorted(row.holders) == ["rank-0", "rank-1", "rank-2"]


def test_a_cancelled_request_ends_by_that_name_and_frees_its_kv(cluster: Cluster) -> None:
    client = Client(cluster.directory())

    async def run() -> None:
        long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        stream = client.stream(PROMPT, long, request_id="to-cancel")
        seen = [await anext(stream)]
        assert await client.cancel("to-cancel")
        seen += [record async for record in stream]
        assert seen[-1].finish_reason == "cancelled"
        assert sum(len(record.token_ids) for record in seen) < 400
        assert not await client.cancel("to-cancel"), "it is not running any more"

    asyncio.run(run())
    until(lambda: all(peer.kv_blocks_used == 0 for peer in cluster.status().peers))


def test_closing_a_stream_cancels_its_request(cluster: Cluster) -> None:
    client = Client(cluster.directory())

    async def run() -> None:
        stream = client.stream(PROMPT, SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    until(lambda: all(peer.running + peer.waiting == 0 for peer in cluster.status().peers))
    until(lambda: all(peer.kv_blocks_used == 0 for peer in cluster.status().peers))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stream_can_be_continued_on_another_peer_from_what_was_delivered(
    cluster: Cluster, temperature: float
) -> None:
    client = Client(cluster.directory())
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=11, ignore_eos=True)

    async def run() -> None:
        whole = await client.generate(PROMPT, params, peer=0)
        delivered: list[int] = []
        stream = client.stream(PROMPT, params, peer=1)
        async for record in stream:
            delivered += record.token_ids
            if len(delivered) >= 20:
                break
        await stream.aclose()
        rest = [record async for record in client.stream(PROMPT, params, prefix_ids=delivered, peer=2)]
        assert rest[0].index == len(delivered)
        assert tuple(delivered) + tuple(t for record in rest for t in record.token_ids) == whole.token_ids
        assert rest[-1].finish_reason == "length"

    asyncio.run(run())


def test_requests_choose_the_peer_with_the_fewest_outstanding_tokens(cluster: Cluster) -> None:
    client = Client(cluster.directory())
    before = {peer.rank: peer.tokens_emitted for peer in cluster.status().peers}

    async def run() -> None:
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        await asyncio.gather(*(client.generate(PROMPT, params) for _ in range(9)))

    asyncio.run(run())
    assert {peer.rank: peer.tokens_emitted - before[peer.rank] for peer in cluster.status().peers} == dict.fromkeys(
        range(3), 60
    )


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), GREEDY, "0 tokens; it must have at least 1"),
        ((99999,), GREEDY, "99999"),
        (PROMPT, SamplingParams(max_tokens=5000), "5000.*1024|5000.*2048"),
    ],
)
def test_a_request_out_of_bounds_is_refused_with_value_and_bound(
    cluster: Cluster, prompt: tuple[int, ...], params: SamplingParams, message: str
) -> None:
    client = Client(cluster.directory())
    with pytest.raises(RequestError, match=message):
        asyncio.run(client.generate(prompt, params))


@pytest.mark.full
def test_a_request_id_can_be_used_again_at_once_and_gets_its_own_tokens(cluster: Cluster) -> None:
    client = Client(cluster.directory())
    other = tuple(range(100, 130))

    async def run() -> None:
        expected = (await client.generate(other, GREEDY)).token_ids
        for _ in range(5):
            stream = client.stream(PROMPT, SamplingParams(max_tokens=400, temperature=0.0), request_id="again", peer=0)
            await anext(stream)
            await stream.aclose()
            again = await client.generate(other, GREEDY, request_id="again", peer=0)
            assert (again.token_ids, again.finish_reason) == (expected, "length")

    asyncio.run(run())


@pytest.mark.parametrize("prompt", [("a", "b"), (40.0, 41.5), (None,)], ids=str)
def test_a_prompt_that_is_no_token_ids_is_its_callers_problem_alone(cluster: Cluster, prompt: tuple[object]) -> None:
    client = Client(cluster.directory())
    with pytest.raises(RequestError, match="token id"):
        asyncio.run(client.generate(prompt, GREEDY))  # type: ignore[arg-type]
    assert len(asyncio.run(client.generate(PROMPT, GREEDY)).token_ids) == GREEDY.max_tokens


def test_idle_peers_fall_asleep_and_wake_for_the_next_request(cluster: Cluster) -> None:
    until(lambda: all(peer.state == "sleeping" for peer in cluster.status().peers))
    steps = [peer.steps_agreed for peer in cluster.status().peers]
    time.sleep(0.5)
    assert [peer.steps_agreed for peer in cluster.status().peers] == steps, "a sleeping cluster agrees on nothing"
    client = Client(cluster.directory())
    assert len(asyncio.run(client.generate(PROMPT, GREEDY)).token_ids) == GREEDY.max_tokens


def test_every_invocation_was_audited_and_every_peer_sent_remote_rows(cluster: Cluster) -> None:
    for peer in cluster.status().peers:
        assert peer.audited > 0 and peer.rows_sent > 0 and peer.rows_received > 0
        assert not peer.trunk_has_experts
    slots = cluster.status().slots
    for layer in range(4):
        of_layer = [row for row in slots if row.layer == layer]
        for rank in range(3):
            assert sum(row.rank == rank for row in of_layer) <= -(-len(of_layer) // 3)


def test_a_killed_peer_fails_running_calls_by_name_and_later_ones_too(local_ray: None) -> None:
    config = ClusterConfig(name="mortal", model=str(tiny_moe_path()), peers=2, step_deadline_s=10)
    running = clusters.start(config)
    try:
        directory = running.directory()
        client = Client(directory)
        victim = ray.get_actor("mortal.expert-1", namespace="ray_moe")
        pid = _ask(victim.pid.remote())

        async def run() -> list[BaseException]:
            params = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
            streams = [asyncio.create_task(client.generate(PROMPT, params, peer=peer)) for peer in (0, 1)]
            await asyncio.sleep(1.0)
            os.kill(pid, signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), timeout=20)

        survivor, dead = asyncio.run(run())
        assert isinstance(survivor, PeerLostError) and survivor.epoch == 0 and survivor.generation == 1
        assert isinstance(dead, PeerLostError) and "rank 1" in str(dead)
        with pytest.raises(RayMoEError, match="rank 1"):
            asyncio.run(Client(directory).generate(PROMPT, GREEDY, peer=1))
        until(lambda: running.status().state == "degraded")
        assert running.status().lost == (1,)
        with pytest.raises(PeerLostError):
            running.directory()
        with pytest.raises((PeerLostError, NotServingError)):
            asyncio.run(Client(directory).generate(PROMPT, GREEDY, peer=0))
        with pytest.raises(PeerLostError, match="rank 1 died"):
            running.publish({})
    finally:
        with ThreadPoolExecutor(2) as both:
            for stopped in [both.submit(running.stop) for _ in range(2)]:
                stopped.result(timeout=60)


@pytest.mark.full
def test_a_peer_that_hangs_fails_running_calls_by_name_within_the_step_deadline(local_ray: None) -> None:
    running = clusters.start(ClusterConfig(name="hung", model=str(tiny_moe_path()), peers=2, step_deadline_s=4))
    pid = 0
    try:
        client = Client(running.directory())
        pid = _ask(ray.get_actor("hung.expert-1", namespace="ray_moe").pid.remote())

        async def run() -> list[BaseException]:
            params = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
            streams = [asyncio.create_task(client.generate(PROMPT, params, peer=peer)) for peer in (0, 1)]
            await asyncio.sleep(1.0)
            os.kill(pid, signal.SIGSTOP)
            return await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), timeout=20)

        survivor, stopped = asyncio.run(run())
        assert isinstance(survivor, PeerLostError)
        assert isinstance(stopped, PeerLostError)
        assert "rank 1" in str(stopped)
    finally:
        os.kill(pid, signal.SIGCONT)
        running.stop()


def test_a_cluster_that_cannot_start_leaves_nothing_running(local_ray: None) -> None:
    with pytest.raises(ConfigError, match="no-such-model"):
        clusters.start(ClusterConfig(name="broken", model="/no-such-model", peers=2))
    with pytest.raises(NotServingError):
        clusters.connect("broken")
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    assert not [name for name in names if name.startswith("broken.")]


def _ask(ref: object) -> object:
    try:
        return ray.get(ref, timeout=20)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
