"""Releases rolled out in a cluster under load: shadow, canary, promotion, rollback, another checkpoint."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError
from safetensors.torch import load_file, save_file

from ray_moe import cluster as clusters
from ray_moe.actors.bringup import release_bundle
from ray_moe.actors.routing import Registered
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import Stage
from ray_moe.controlplane.release_states import Note
from ray_moe.controlplane.rollout import Phase, Rollout, Step
from ray_moe.deadline import ray_get
from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import ConfigError, ReleaseError
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client
from tests.cluster.faults import actor_of, inside, kill, let_go, pid_of, until
from tests.e2e.oracle import Reference

pytestmark = pytest.mark.cluster

PROMPT = tuple(range(40, 60))
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
FEW = (40, 60)  # outputs compared, tokens delivered: enough here, and soon there
WAIT_S = 120.0


@pytest.fixture(scope="module")
def cluster(local_ray: None) -> Iterator[Cluster]:
    config = ClusterConfig(
        name="releases", model=str(tiny_moe_path()), peers=2, spare_slots=10, kv_blocks=256, step_deadline_s=30
    )
    running = clusters.start(config)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other experts."""
    folder = tmp_path_factory.mktemp("tuned") / "model"
    shutil.copytree(tiny_moe_path(), folder)
    generator = torch.Generator().manual_seed(1)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, tensor in weights.items():
            if "experts" in name:
                noise = torch.randn(tensor.shape, generator=generator)
                weights[name] = (tensor.float() + 0.05 * noise).to(tensor.dtype)
        save_file(weights, file, metadata={"format": "pt"})
    return folder


class Load:
    """Streams that begin again whenever they end; `seen` counts whole answers, `generations` what they ran under."""

    def __init__(self, cluster: Cluster, params: SamplingParams = GREEDY) -> None:
        self._client, self._params = Client(cluster.directory()), params
        self.seen: Counter[tuple[int, ...]] = Counter()
        self.generations: dict[tuple[int, ...], set[tuple[int, ...]]] = {}

    async def during(self, work: Callable[[], Awaitable[None]], streams: int = 4) -> None:
        stop = asyncio.Event()

        async def one() -> None:
            while not stop.is_set():
                result = await self._client.generate(PROMPT, self._params)
                self.seen[result.token_ids] += 1
                self.generations.setdefault(result.token_ids, set()).add(result.generations)

        tasks = [asyncio.create_task(one()) for _ in range(streams)]
        try:
            await work()
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    async def answers(self, number: int = 4) -> None:
        """Wait until so many more answers are whole."""
        wanted = self.seen.total() + number
        while self.seen.total() < wanted:
            await asyncio.sleep(0.05)


async def reached(cluster: Cluster, *phases: Phase) -> Rollout:
    rollout = await asyncio.to_thread(cluster.wait_rollout, phases, WAIT_S)
    assert rollout.phase in phases, (rollout.phase, rollout.reason)
    return rollout


async def built(cluster: Cluster, **given: Any) -> None:
    rates = {"share": 0.5, "shadow_rate": 0.5, "samples": FEW}
    await asyncio.to_thread(lambda: cluster.release_build(**{**rates, **given}))


def promoted(cluster: Cluster) -> bool:
    """Ask for the promotion; refused as long as it lacks evidence."""
    try:
        cluster.release_promote()
    except ReleaseError as error:
        if error.reason == "not_promoted":
            return False
        raise
    return True


def operations(cluster: Cluster, release_id: str) -> list[str]:
    return [record.operation for record in cluster.releases().log if record.release_id == release_id]


def oracle(folder: Path) -> tuple[int, ...]:
    return tuple(Reference(folder).greedy(PROMPT, GREEDY.max_tokens))


def test_another_runner_and_transport_go_through_shadow_and_canary_and_no_token_changes(cluster: Cluster) -> None:
    load, before = Load(cluster), cluster.status().generation

    async def rollout() -> None:
        await built(cluster, settings={"runner": "block_sparse", "transport": "all_gather_filter"})
        await reached(cluster, Phase.CANARY)
        with pytest.raises(ConfigError, match="one rollout at a time"):
            await built(cluster, settings={"runner": "capacity_padded"})
        while not await asyncio.to_thread(promoted, cluster):
            await asyncio.sleep(0.2)
        await reached(cluster, Phase.DONE)
        await load.answers()

    asyncio.run(load.during(rollout))
    assert set(load.seen) == {oracle(tiny_moe_path())}
    (generations,) = load.generations.values()
    assert (before + 1,) in generations and len(set().union(*generations)) == 2
    name = cluster.rollout().release_id
    status = cluster.status()
    assert (status.release_id, status.runner, status.transport) == (name, "block_sparse", "all_gather_filter")
    assert operations(cluster, name) == ["build", "verify", "load", "shadow", "canary", "promote", "finalise"]


def test_an_active_release_is_rolled_back_under_load_in_the_printed_order(cluster: Cluster) -> None:
    load, serving = Load(cluster), cluster.status().release_id

    async def rollout() -> None:
        await built(cluster, settings={"runner": "grouped"}, auto=True)
        await reached(cluster, Phase.ACTIVE)
        await asyncio.to_thread(lambda: cluster.release_rollback(why="a drill"))
        await reached(cluster, Phase.ROLLED_BACK)
        await load.answers()

    asyncio.run(load.during(rollout))
    assert set(load.seen) == {oracle(tiny_moe_path())}
    assert operations(cluster, cluster.rollout().release_id)[-6:] == [
        *("stop_new_dispatch", "activate_prior", "drain", "release_graphs", "retire", "complete")
    ]
    assert cluster.status().release_id == serving


def test_a_candidate_with_other_outputs_leaves_by_itself_and_the_placement_can_change_again(cluster: Cluster) -> None:
    load, serving = Load(cluster, DRAWN), cluster.status().release_id
    expected = asyncio.run(Client(cluster.directory()).generate(PROMPT, DRAWN)).token_ids

    async def rollout() -> None:
        await built(cluster, settings={"payload": "fp8_row"}, samples=(10_000, 60))
        rolled_back = await reached(cluster, Phase.ROLLED_BACK)
        assert "shadow outputs differ by equal tokens" in rolled_back.reason
        number = await asyncio.to_thread(lambda: cluster.rebalance(replicas={(layer, 3): 2 for layer in range(4)}))
        operation = await asyncio.to_thread(cluster.wait, number, WAIT_S)
        assert (operation.stage, operation.reason) == (Stage.DONE, "")

    asyncio.run(load.during(rollout))
    assert set(load.seen) == {expected}
    assert cluster.status().release_id == serving


def test_a_candidate_that_a_rank_observes_otherwise_is_refused_at_load_by_coordinate(cluster: Cluster) -> None:
    routing = ray.get_actor("releases.routing", namespace="ray_moe")
    grant_status, _ = ray.get(routing.releases.remote(), timeout=30)
    serving = next(one for one in grant_status if one.dispatching)
    active, config = cluster.placement(), cluster.directory().config
    candidate = dataclasses.replace(active, release_id="strange", generation=active.generation + 50)
    bundle = release_bundle(config, candidate, cluster.directory().facts)
    for field, value in (("process_group_generation", "other-e9"), ("dispatch_handle_abi", "ray_moe.handle/2")):
        named = dataclasses.replace(bundle, release_id=f"strange-{field}")
        placed = dataclasses.replace(candidate, release_id=named.release_id)
        named = dataclasses.replace(named, placement_digest=placed.digest)
        said = {0: named, 1: dataclasses.replace(named, **{field: value})}
        with pytest.raises(ReleaseError, match=f"rank 1: {field} is {value}") as refused:
            ray.get(routing.admit.remote(named, named, placed, config, said, Note("test", 0.0, "")), timeout=30)
        assert (refused.value.reason, refused.value.mismatched) == ("reject_load", (field,))
    assert next(one for one in ray.get(routing.releases.remote(), timeout=30)[0] if one.dispatching) == serving


def test_another_checkpoint_is_rolled_out_back_and_out_again_and_no_answer_mixes_two(
    cluster: Cluster, tuned: Path
) -> None:
    load, old, new = Load(cluster), oracle(tiny_moe_path()), oracle(tuned)
    assert old != new

    async def rollout() -> None:
        await built(cluster, model=str(tuned))
        await reached(cluster, Phase.CANARY)
        while not (load.seen[old] and load.seen[new]):
            await load.answers(1)
        await asyncio.to_thread(lambda: cluster.release_rollback(why="a drill"))
        await reached(cluster, Phase.ROLLED_BACK)
        await load.answers()
        before = load.seen[new]
        await load.answers(8)
        assert load.seen[new] == before, "new requests get the old model's tokens"
        await built(cluster, model=str(tuned), auto=True)
        await reached(cluster, Phase.DONE)
        await load.answers()
        before = load.seen[old]
        await load.answers(8)
        assert load.seen[old] == before, "new requests get the new model's tokens"

    asyncio.run(load.during(rollout, streams=6))
    assert set(load.seen) == {old, new}
    number = cluster.rebalance(replicas={(layer, 5): 2 for layer in range(4)})
    assert cluster.wait(number, WAIT_S).stage is Stage.DONE, "copies of the new checkpoint's experts"
    assert asyncio.run(Client(cluster.directory()).generate(PROMPT, GREEDY)).token_ids == new


@pytest.mark.full
@pytest.mark.parametrize("roles", [("controller",), ("routing",), ("controller", "routing")], ids="+".join)
def test_a_rollout_goes_on_when_the_control_plane_is_killed_in_each_phase(
    cluster: Cluster, roles: tuple[str, ...]
) -> None:
    load, before = Load(cluster), asyncio.run(Client(cluster.directory()).generate(PROMPT, GREEDY)).token_ids
    serving = cluster.status()
    other = "grouped" if serving.runner == "capacity_padded" else "capacity_padded"

    async def killed() -> None:
        await asyncio.to_thread(killed_and_back, cluster, roles)

    async def held(*names: str) -> None:
        await asyncio.to_thread(inside, actor_of(cluster, "controller"), hold_steps, names)

    async def let_go_of_steps() -> None:
        if "controller" not in roles:  # with its process it has gone
            await asyncio.to_thread(let_go, actor_of(cluster, "controller"), "_rollouts._do")

    async def rollout() -> None:
        await built(cluster, settings={"runner": other})
        await reached(cluster, Phase.SHADOW, Phase.CANARY)
        await killed()
        await reached(cluster, Phase.CANARY)
        await killed()
        while not await asyncio.to_thread(promoted, cluster):
            await asyncio.sleep(0.2)
        await reached(cluster, Phase.ACTIVE, Phase.RETIRING, Phase.DONE)
        await killed()
        await reached(cluster, Phase.DONE)
        await load.answers()
        await held("forget")
        await built(cluster, settings={"runner": serving.runner}, auto=True)
        await reached(cluster, Phase.RETIRING)
        await killed()
        await let_go_of_steps()
        await reached(cluster, Phase.DONE)
        await load.answers()
        await held("forget", "finalise")
        await built(cluster, settings={"runner": other}, auto=True)
        await reached(cluster, Phase.ACTIVE)
        await asyncio.to_thread(lambda: cluster.release_rollback(why="a drill"))
        await reached(cluster, Phase.LEAVING)
        await killed()
        await let_go_of_steps()
        await reached(cluster, Phase.ROLLED_BACK)
        await load.answers()

    asyncio.run(load.during(rollout))
    assert set(load.seen) == {before}
    status = cluster.status()
    assert (status.runner, status.state) == (serving.runner, "serving")
    assert [one.dispatching for one in cluster.releases().releases].count(True) == 1
    assert len([one for one in status.generations if one.state != "RETIRED"]) == 1


def killed_and_back(cluster: Cluster, roles: Sequence[str]) -> None:
    """kill -9 of these actors at once; returns when Ray has started them again and the registry knows what it knew."""
    before = {role: pid_of(actor_of(cluster, role)) for role in roles}
    kill(*(actor_of(cluster, role) for role in roles))

    def back() -> bool:
        try:
            others = all(pid_of(actor_of(cluster, role)) != pid for role, pid in before.items())
            known: Registered = ray_get(actor_of(cluster, "routing").registered.remote(), WAIT_S, "the registry")
        except RayActorError:
            return False
        return others and not known.recovering

    until(back, WAIT_S)


def hold_steps(controller: Any, names: Sequence[str]) -> None:
    """Steps of rollouts by these names wait inside the controller until its `_rollouts._do` is let go."""
    rollouts = controller._rollouts
    work, gate = rollouts._do, asyncio.Event()

    async def held(step: Step) -> None:
        if getattr(step, "event", type(step).__name__.lower()) in names:
            await gate.wait()
        await work(step)

    held.gate = gate  # type: ignore[attr-defined]
    rollouts._do = held
