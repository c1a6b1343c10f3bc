"""Peers whose processes outlive a cluster: importing torch and transformers takes seconds, a tiny model takes none.

A cluster over a pool is the product's own controller, routing actor, expert actors, engines and groups; the only thing
replaced is where a process comes from. `cluster.start` is tested on its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import pytest
import ray
from ray.actor import ActorHandle

from ray_moe.actors import controller as controllers
from ray_moe.actors import startup
from ray_moe.actors.controller import ControllerActor
from ray_moe.actors.expert import ExpertActor
from ray_moe.actors.routing import RoutingActor
from ray_moe.config import ClusterConfig
from ray_moe.deadline import ray_get
from ray_moe.engine.scheduler import Scheduler

START_S = 240.0  # importing takes each process five seconds of a core, and others may want the cores too


class PooledPeer(ExpertActor):
    """An expert actor that can begin again as the same rank of another cluster."""

    async def renew(self, config: ClusterConfig, peers: Sequence[ActorHandle]) -> None:
        """Forget model, slots, group and requests; the engine of the cluster before must have stopped."""
        if self._thread is not None:
            assert not self._thread.is_alive(), f"the engine of {self._config.name!r} still runs"
        if self._sweeper is not None:
            self._sweeper.cancel()
        ExpertActor.__init__(self, config, self._rank.value)
        self._actors = dict(enumerate(peers))  # these bear no names of the cluster's

    async def preemptions(self) -> int:
        """How often this peer's scheduler took blocks back from a running request."""
        scheduler: Scheduler = self._loop.scheduler
        return scheduler.preemptions


class PooledRouting(RoutingActor):
    """A routing actor that can begin again with empty registries."""

    async def renew(self, config: ClusterConfig, _: Sequence[ActorHandle]) -> None:
        RoutingActor.__init__(self, config)


class PeerPool:
    """`size` peer processes and a routing process on the Ray that is connected."""

    def __init__(self, size: int) -> None:
        config = ClusterConfig(name="pool", model="none yet")
        peer = ray.remote(PooledPeer).options(num_cpus=0.25, max_concurrency=1000)
        self.routing = ray.remote(PooledRouting).options(num_cpus=0, max_concurrency=1000).remote(config)
        self.peers: list[ActorHandle] = [peer.remote(config, rank) for rank in range(size)]
        members = (self.routing, *self.peers)
        ray_get([actor.renew.remote(config, self.peers) for actor in members], START_S, "pool")

    @asynccontextmanager
    async def serving(self, config: ClusterConfig) -> AsyncIterator[ControllerActor]:
        """A running cluster of `config.peers` ranks of this pool, as its controller; stopped in step at the end."""
        members = (self.routing, *self.peers[: config.peers])
        ray_get([actor.renew.remote(config, self.peers) for actor in members], START_S, "renewal of the pool")
        with self._provisioning():
            controller = ControllerActor(config)
            await controller.start()
            try:
                yield controller
            finally:
                await controller.stop()

    @contextmanager
    def _provisioning(self) -> Iterator[None]:
        """The controller takes its actors from here instead of making them, and leaves their processes alone."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(controllers, "create_routing", lambda config: self.routing)
            patch.setattr(startup, "create_expert", lambda config, rank: self.peers[rank])
            patch.setattr(controllers, "kill", lambda actor: None)
            # The controller lives in this process, which is no actor.
            patch.setattr(controllers, "was_restarted", lambda: False)
            patch.setattr(controllers, "this_actor", lambda: None)
            yield

    def close(self) -> None:
        for actor in (self.routing, *self.peers):
            ray.kill(actor)
