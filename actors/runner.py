"""Runs the reconciler's effects on actors: one Ray call each, under a deadline. All are idempotent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from ray_moe.actors.bringup import release_bundle
from ray_moe.actors.remote import create_expert, kill, node_of, release_room, reserve
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.config import ClusterConfig
from ray_moe.controlplane import effects
from ray_moe.controlplane.effects import Effect
from ray_moe.controlplane.fetching import FillOutcome
from ray_moe.controlplane.publication import Storage
from ray_moe.controlplane.release_states import Note
from ray_moe.deadline import ray_await
from ray_moe.engine.records import ModelFacts
from ray_moe.errors import GenerationError, NotAvailableError, NotServingError


class EffectRunner:
    """`peers` is the controller's own table of expert actors: actors that are made enter it, ended ones leave.

    `store` gives the address at which members of an epoch meet.
    """

    def __init__(
        self,
        config: ClusterConfig,
        peers: dict[int, ActorHandle],
        routing: ActorHandle,
        facts: ModelFacts,
        model_path: Path,
        storage: Storage,
        store: Callable[[], StoreAddress],
    ) -> None:
        self._config, self._peers, self._routing = config, peers, routing
        self._facts, self._model_path, self._storage, self._store = facts, model_path, storage, store
        self._coming: dict[int, str | None] = {}  # by rank, where known the node: from `Prepare` until it serves
        self._run: dict[type, Callable[[Any], Awaitable[Any]]] = {
            effects.Prepare: self._prepare,
            effects.Fill: self._fill,
            effects.Join: self._join,
            effects.CloseEpoch: lambda e: self._on(e.rank, "close_epoch", e.epoch),
            effects.HandOver: lambda e: self._on(e.rank, "hand_over", e.to),
            effects.Readmit: lambda e: self._on(e.rank, "readmit"),
            effects.Publish: self._publish,
            effects.Start: self._start,
            effects.Stage: lambda e: self._on(e.rank, "stage", e.generation),
            effects.Depart: lambda e: self._on(e.rank, "depart", e.generation, e.epoch),
            effects.Announce: lambda e: self._on(e.rank, "set_members", e.version, e.members),
            effects.Retire: self._retire,
            effects.Free: lambda e: self._on(e.rank, "free", e.slots),
            effects.End: self._end,
        }

    def serve_as(self, config: ClusterConfig, facts: ModelFacts, model_path: Path) -> None:
        """Another release serves: new ranks run it, and new generations are its own."""
        self._config, self._facts, self._model_path = config, facts, model_path

    async def run(self, effect: Effect) -> Sequence[FillOutcome]:
        """Do what the effect says; a `Fill`'s outcomes. Raises what the actors raise, `RayActorError` for dead ones."""
        result = await self._run[type(effect)](effect)
        return result if isinstance(effect, effects.Fill) else ()

    async def _prepare(self, effect: effects.Prepare) -> None:
        rank = effect.rank
        self._coming.setdefault(rank, None)
        try:
            if rank not in self._peers:
                room = await reserve(self._config, rank)
                self._coming[rank] = node_of(room)
                self._peers[rank] = create_expert(self._config, rank, room)
            capacity, sharers = self._storage.capacity, self._sharers(rank)
            facts: ModelFacts = await self._on(rank, "prepare", self._model_path, capacity, sharers)
        except BaseException:
            self._coming.pop(rank, None)
            raise
        if facts != self._facts:
            raise GenerationError(
                f"rank {rank} loaded checkpoint {facts.checkpoint_version}, the cluster serves "
                f"{self._facts.checkpoint_version}: the model's files changed"
            )

    def _sharers(self, rank: int) -> int:
        """Ranks that come to the node of this one, itself among them; one whose node is not known yet may come there.

        What they take of its memory they have only once they serve.
        """
        here = self._coming[rank]
        return sum(
            None in (here, node) or (node == here and other in self._peers)  # else it has died
            for other, node in self._coming.items()
        )

    async def _fill(self, effect: effects.Fill) -> Sequence[FillOutcome]:
        call: Any = self._actor(effect.rank).fill.remote(effect.orders)
        try:
            outcomes: Sequence[FillOutcome] = await ray_await(
                call, self._config.start_deadline_s, f"fill on rank {effect.rank}"
            )
        except asyncio.CancelledError:  # nobody wants these copies any more
            ray.cancel(call)
            raise
        return outcomes

    async def _join(self, effect: effects.Join) -> None:
        await self._on(effect.rank, "join", effect.group, effect.topology, self._store())

    async def _publish(self, effect: effects.Publish) -> None:
        gone = [rank.value for rank in effect.snapshot.group.peers if rank.value not in self._peers]
        if gone:  # its group could never take a step
            raise NotAvailableError(f"generation {effect.generation} cannot be published: rank {gone[0]} is gone")
        bundle = release_bundle(self._config, effect.snapshot, self._facts)
        what = f"publish generation {effect.generation}"
        note = Note("ray-moe", time.time(), f"operation {effect.operation}")
        call: Any = self._routing.publish.remote(effect.snapshot, bundle, note)
        await ray_await(call, self._config.step_deadline_s, what)

    async def _start(self, effect: effects.Start) -> None:
        await self._on(effect.rank, "serve", self._routing)
        self._coming.pop(effect.rank, None)

    async def _retire(self, effect: effects.Retire) -> None:
        call: Any = self._routing.retire_due.remote(effect.committed_step, effect.through)
        await ray_await(call, self._config.step_deadline_s, "retire generations")

    async def _end(self, effect: effects.End) -> None:
        self._coming.pop(effect.rank, None)
        actor = self._actor(effect.rank)
        call: Any = actor.finish.remote()
        try:
            await ray_await(call, self._config.step_deadline_s, f"finish on rank {effect.rank}")
        finally:
            kill(actor)
            self._peers.pop(effect.rank, None)
            release_room(self._config.name, effect.rank)

    def _actor(self, rank: int) -> ActorHandle:
        if rank not in self._peers:
            raise NotServingError(f"rank {rank} is gone")
        return self._peers[rank]

    async def _on(self, rank: int, method: str, *args: object) -> Any:
        call = getattr(self._actor(rank), method).remote(*args)
        return await ray_await(call, self._config.start_deadline_s, f"{method} on rank {rank}")
