"""Bringing a cluster up: actors, model, first placement, first epoch, first generation, engines; in this order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors.bringup import release_bundle, seats_of
from ray_moe.actors.memory import Room, slots_held, spare_slots
from ray_moe.actors.remote import create_expert
from ray_moe.asked import expand_replicas
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.effects import Peer
from ray_moe.controlplane.fetching import FillOutcome, digests_of, orders
from ray_moe.controlplane.publication import Storage
from ray_moe.controlplane.release_states import Note
from ray_moe.controlplane.solve import balanced, place
from ray_moe.deadline import ray_await
from ray_moe.engine.records import ModelFacts
from ray_moe.errors import CheckpointError, NotServingError
from ray_moe.identity import CheckpointVersion, GlobalRank, PlacementVersion
from ray_moe.placement import PlacementSnapshot, ReleaseBundle


@dataclass(frozen=True)
class Loaded:
    """What peers with a trunk and empty slots say, and the placement that is to be filled."""

    facts: ModelFacts
    storage: Storage
    first: PlacementSnapshot
    nodes: tuple[str, ...]


class Startup:
    """`peers` is the controller's own table: it can watch the progress of those that are there already."""

    def __init__(self, config: ClusterConfig, peers: dict[int, ActorHandle]) -> None:
        self._config, self._peers = config, peers

    async def load(self, model_path: Path) -> Loaded:
        """Make the actors, load trunks, size and reserve the slot pools.

        Raises `ConfigError` with the sums, before anything is loaded, when a rank has too little memory.
        """
        config = self._config
        self._peers.update({rank: create_expert(config, rank) for rank in range(config.peers)})
        rooms: dict[int, Room] = dict(zip(self._peers, await self._all("room"), strict=True))
        spare = await asyncio.to_thread(spare_slots, config, model_path, rooms)
        facts: list[ModelFacts] = await self._all("prepare", model_path)
        reports: list[Peer] = await self._all("report")
        nodes = tuple(report.node for report in reports)
        first, storage = _first_placement(config, facts[0], nodes, spare)
        await self._all("prepare", model_path, storage.capacity)
        return Loaded(facts[0], storage, first, nodes)

    async def fill(self, candidate: PlacementSnapshot) -> PlacementSnapshot:
        """Read every slot of the first placement from the checkpoint; the placement with the digests of what arrived.

        Raises `CheckpointError` when a slot cannot be read, `PlacementError` when copies of one expert differ.
        """
        wanted = orders(candidate, None, {})
        ranks = sorted({order.rank for order in wanted})
        found: list[Sequence[FillOutcome]] = await asyncio.gather(
            *(self._ask(rank, "fill", tuple(order for order in wanted if order.rank == rank)) for rank in ranks)
        )
        outcomes = [outcome for some in found for outcome in some]
        for outcome in outcomes:
            if outcome.error:
                where = f"layer {outcome.order.layer} expert {outcome.order.expert}"
                raise CheckpointError(self._config.model, where, "readable parameters", outcome.error)
        return candidate.with_digests(digests_of(outcomes))

    async def open(
        self, verified: PlacementSnapshot, facts: ModelFacts, routing: ActorHandle, store: StoreAddress
    ) -> None:
        """Join the first epoch, launch the first release, start the engines."""
        await self._all("join", verified.group, verified.topology, store)
        bundle = release_bundle(self._config, verified, facts)
        seconds = self._config.start_deadline_s
        said = await self._all("observe", self._config, verified)
        observed: dict[int, ReleaseBundle] = dict(zip(self._peers, said, strict=True))
        note = Note("ray-moe", time.time(), "the cluster comes up")
        call: Any = routing.launch.remote(verified, bundle, self._config, observed, note)
        await ray_await(call, seconds, "launch the first release")
        await self._all("serve", routing)

    async def _all(self, method: str, *args: object) -> list[Any]:
        """Call one method on every peer at once; the first failure propagates after all have answered."""
        work = (self._ask(rank, method, *args) for rank in self._peers)
        results = await asyncio.gather(*work, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _ask(self, rank: int, method: str, *args: object) -> Any:
        try:
            call = getattr(self._peers[rank], method).remote(*args)
            return await ray_await(call, self._config.start_deadline_s, f"{method} on rank {rank}")
        except RayActorError as error:
            # Left as it is, the controller's caller would take it for the controller's death.
            raise NotServingError(f"cluster {self._config.name!r}: rank {rank} died in {method}") from error


def _first_placement(
    config: ClusterConfig, facts: ModelFacts, nodes: Sequence[str], spare: int
) -> tuple[PlacementSnapshot, Storage]:
    """Even shares of every layer, and pools that hold the model on the fewest peers that the cluster may shrink to."""
    ranks = tuple(GlobalRank(rank) for rank in range(config.peers))
    assignment = balanced(
        dict.fromkeys(facts.moe_layers, facts.num_experts),
        ranks,
        replicas=expand_replicas(config.replicas, facts.moe_layers),
        spare_slots=spare,
    )
    capacity = slots_held(config, facts.moe_layers, facts.num_experts) + spare
    group, topology = seats_of(config, nodes)
    checkpoint = CheckpointVersion(facts.checkpoint_version)
    snapshot = place(
        assignment,
        generation=1,
        version=PlacementVersion("placement-v1"),
        release_id=f"{config.name}-{checkpoint.value[:12]}",
        checkpoint=checkpoint,
        group=group,
        topology=topology,
        prior=None,
        capacity=capacity,
    )
    return snapshot, Storage(capacity, spare, facts.expert_bytes)
