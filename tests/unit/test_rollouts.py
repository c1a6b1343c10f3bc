"""Rollouts and the journal around a routing actor that is started again: the real ones, without Ray between them."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from ray_moe.actors import rollouts as module
from ray_moe.actors import routing as routing_module
from ray_moe.actors.conductor import Conductor
from ray_moe.actors.journal import Journal, Record
from ray_moe.actors.lookout import Lookout
from ray_moe.actors.rollouts import Rollouts
from ray_moe.actors.routing import RoutingActor
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import ControlState
from ray_moe.controlplane.publication import Storage
from ray_moe.controlplane.release_states import State
from ray_moe.controlplane.releases import ReleaseRegistry
from ray_moe.controlplane.rollout import Fill, Heard, Phase, Prepare, Register, RolesOrder, Rollout, Verify
from ray_moe.engine.records import ModelFacts
from ray_moe.errors import NotServingError
from tests.releases import NOTE, bring, bundle_of, observed, report_on, serving, snapshot_of

FACTS = ModelFacts("checkpoint-1", (0,), 2, 100, 320, 64, "torch.float32", 10)
Hook = Callable[[], Awaitable[None]]


class Local:
    """A handle on an actor in this process: what a call gives is awaited as Ray's is."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


class Rank:
    """What rollouts ask of a rank. `asked` runs whenever it is asked about releases."""

    def __init__(self, rank: int) -> None:
        self._rank, self.facts = rank, FACTS
        self.asked: Hook | None = None

    async def releases(self) -> Heard:
        if self.asked is not None:
            await self.asked()
        return Heard(self._rank, 3, 3, "r0", 400, 0, frozenset({"checkpoint-1", "checkpoint-2"}), {})

    async def prepare_release(self, _: Path) -> ModelFacts:
        return self.facts

    async def leases(self) -> tuple[()]:
        return ()


class Gone:
    """A routing actor whose process has died."""

    async def newest(self) -> int:
        raise RayActorError


class World:
    """A controller's parts around one open rollout, as a journal has them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, registry: ReleaseRegistry, **rollout: Any
    ) -> None:
        monkeypatch.setattr(routing_module, "keep_what_is_loaded", lambda: None)  # this process goes on
        monkeypatch.setattr(module, "_IDLE_S", 0.0)
        self._monkeypatch = monkeypatch
        self.config = ClusterConfig(model="tiny-moe", peers=2, state_file=str(folder / "state"))
        self.start_routing(restarted=False)
        configs = {"r0": self.config, "r1": self.config}
        self.routing._registry, self.routing._configs = registry, configs
        given: dict[str, Any] = {
            "number": 1,
            "release_id": "r1",
            "prior": "r0",
            "config": self.config,
            "model": "",
            "asked_by": "ann",
            "why": "faster",
            "asked_at": 1.0,
            "share": 0.25,
            "shadow_rate": 0.5,
            "auto": False,
        }
        self.rollout = Rollout(**{**given, **rollout})
        memory = pickle.dumps((registry, configs))
        self.journal = Journal(self.config)
        live, control = registry.live(), ControlState(next_rank=2)
        self.record = Record(control, Storage(4, 0, 100), FACTS, Path("model"), live, memory, (self.rollout,))
        self.journal.write(self.record)
        self.ranks = [Rank(0), Rank(1)]
        peers: Any = {number: Local(rank) for number, rank in enumerate(self.ranks)}
        self.lookout = Lookout(self.config, peers)
        self.lookout.live = live
        self.conductor = Conductor(
            self.config,
            self.record,
            self.journal,
            peers,
            self.handle(),
            _nothing,
            _nowhere,
            lambda: self.lookout.memory,
        )
        self.rollouts = Rollouts(self.config, peers, self.handle, self.lookout, self.conductor)

    def handle(self) -> Any:
        return Local(self.routing)

    def start_routing(self, *, restarted: bool) -> None:
        self._monkeypatch.setattr(routing_module, "was_restarted", lambda: restarted)
        self.routing: Any = RoutingActor(self.config)

    async def restore(self) -> None:
        """What the controller does about a routing actor that was started again."""
        record = self.journal.read()
        assert record is not None
        await self.lookout.restore(self.handle(), record.live, record.memory)

    async def round(self) -> Rollout | None:
        assert self.rollouts.open is not None
        await self.rollouts._round(self.rollouts.open)
        return self.rollouts.open

    def state_in_the_journal(self) -> str:
        record = self.journal.read()
        assert record is not None
        registry, _ = pickle.loads(record.memory)
        return next(one.state for one in registry.status() if one.release_id == "r1")


async def _nothing() -> None:
    return None


def _nowhere() -> StoreAddress:
    raise AssertionError("no epoch is joined here")


def registry_with(state: State | None) -> ReleaseRegistry:
    registry = serving(1, "r0")
    if state is not None:
        bring(registry, snapshot_of(2, "r1"), state)
    return registry


def verifying() -> tuple[ReleaseRegistry, dict[str, Any]]:
    return registry_with(State.LOADED), {"phase": Phase.VERIFYING, "candidate": snapshot_of(2, "r1")}


def leaving() -> tuple[ReleaseRegistry, dict[str, Any]]:
    registry = registry_with(State.SHADOW)
    registry.stop_new_dispatch("r1", NOTE)
    return registry, {"phase": Phase.LEAVING, "roles": RolesOrder(3, "r0", "r1", "shadow", 2)}


def retiring() -> tuple[ReleaseRegistry, dict[str, Any]]:
    registry = registry_with(State.ACTIVE)
    registry.finalise("r1", report_on("r1"), NOTE)
    return registry, {"phase": Phase.RETIRING, "roles": RolesOrder(3, "r1")}


@pytest.mark.parametrize("situation", [verifying, leaving, retiring])
def test_a_rollout_waits_for_a_registry_that_was_started_again_and_then_goes_on(
    situation: Callable[[], tuple[ReleaseRegistry, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registry, rollout = situation()
    world = World(monkeypatch, tmp_path, registry, **rollout)

    async def story() -> None:
        world.start_routing(restarted=True)
        assert await world.round() == world.rollout
        assert not world.rollouts._running
        assert world.journal.read() == world.record
        await world.restore()
        assert await world.round() == world.rollout
        (step,) = world.rollouts._running
        assert not isinstance(step, Verify), "the registry knows it"

    asyncio.run(story())


@pytest.mark.parametrize(
    "method", ["releases", "newest", "acquire", "publish", "retire_due", "retire", "admit", "register"]
)
def test_a_registry_that_was_started_again_tells_and_changes_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch, tmp_path, registry_with(None))
    snapshot = snapshot_of(2, "r1")
    bundle = bundle_of(snapshot)
    arguments: dict[str, tuple[Any, ...]] = {
        "acquire": ("rank-0",),
        "publish": (snapshot, bundle, NOTE),
        "retire_due": (5,),
        "retire": (1,),
        "admit": (bundle, bundle, snapshot, world.config, observed(snapshot), NOTE),
        "register": (Register("shadow", "r1"), NOTE),
    }

    async def story() -> None:
        world.start_routing(restarted=True)
        with pytest.raises(NotServingError, match="the registry is being restored"):
            await getattr(world.routing, method)(*arguments.get(method, ()))

    asyncio.run(story())


@pytest.mark.parametrize("gone", [True, False])
def test_a_candidate_is_not_given_up_because_the_routing_actor_starts_again(
    gone: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(
        monkeypatch, tmp_path, registry_with(None), phase=Phase.LOADING, model="/tuned", checkpoint="checkpoint-2"
    )

    async def story() -> None:
        world.start_routing(restarted=True)
        if gone:
            world.routing = Gone()
        await world.rollouts._act(Fill())

    asyncio.run(story())
    assert world.rollouts.open is not None
    assert world.rollouts.open.phase is Phase.LOADING
    assert ("is gone" if gone else "being restored") in world.rollouts.open.reason


def test_a_candidate_of_another_architecture_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, tmp_path, registry_with(None), phase=Phase.LOADING, model="/tuned")
    world.ranks[0].facts = dataclasses.replace(FACTS, checkpoint_version="checkpoint-2", num_experts=3)
    asyncio.run(world.rollouts._act(Prepare(0)))
    assert world.rollouts.open is not None
    assert world.rollouts.open.phase is Phase.LEAVING
    assert "other_architecture" in world.rollouts.open.because


def test_a_candidate_that_may_still_be_loaded_has_not_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, tmp_path, registry_with(None), phase=Phase.LEAVING)

    async def story() -> None:
        world.rollouts._running[Verify()] = asyncio.create_task(asyncio.sleep(60))
        assert await world.round() == world.rollout
        world.rollouts._running.clear()
        assert await world.round() is None
        assert world.rollouts.find("r1").phase is Phase.FAILED

    asyncio.run(story())


def test_what_is_decided_is_saved_with_the_registry_that_it_is_decided_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(
        monkeypatch, tmp_path, registry_with(State.LOADED), phase=Phase.VERIFYING, candidate=snapshot_of(2, "r1")
    )

    async def meanwhile() -> None:
        world.ranks[1].asked = None
        await world.routing.register(Register("shadow", "r1"), NOTE)

    async def story() -> None:
        world.ranks[1].asked = meanwhile
        found = await world.round()
        assert found is not None
        assert found.phase is Phase.SHADOW

    asyncio.run(story())
    assert world.state_in_the_journal() == State.SHADOW


def test_a_controller_that_was_started_again_does_not_save_that_the_registry_knew_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch, tmp_path, registry_with(State.SHADOW), phase=Phase.SHADOW)
    assert world.lookout.memory == b"", "nobody has asked the registry yet"
    world.rollouts.rollback("r1", "a drill", 3.0)
    record = world.journal.read()
    assert record is not None
    assert (record.rollouts[-1].phase, record.memory) == (Phase.LEAVING, world.record.memory)


def test_what_could_not_be_saved_is_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    world = World(monkeypatch, folder, registry_with(State.SHADOW), phase=Phase.SHADOW)
    (folder / "state").unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        world.rollouts.rollback("r1", "a drill", 3.0)
    assert world.rollouts.open == world.rollout
    with pytest.raises(FileNotFoundError):
        world.conductor.serve_as(world.config, FACTS, Path("other"))
    assert world.conductor.record == world.record
