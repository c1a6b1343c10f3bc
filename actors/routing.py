"""The routing actor: the registries of releases and placements, leases, and the headers that leases grant.

It is the only place that knows which generation is active and who still refers to an old one. Nothing here blocks, and
no step ever waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ray

from ray_moe.actors.bringup import handle_abi
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.generations import GenerationStatus, PlacementRegistry
from ray_moe.dataplane.handle import HandleHeader
from ray_moe.errors import GenerationError
from ray_moe.placement import Lease, PlacementSnapshot, ReleaseBundle


@dataclass(frozen=True)
class Grant:
    """What a lease gives its holder: the header to bind handles with, and the placement it names."""

    lease: Lease
    header: HandleHeader
    snapshot: PlacementSnapshot


@dataclass(frozen=True)
class Registered:
    """What the registry knows: generations whose slots must stay, ascending, and the release that is served.

    `recovering` while a registry that was restarted has not been told who holds leases.
    """

    live: tuple[PlacementSnapshot, ...]
    release: ReleaseBundle | None
    recovering: bool


class RoutingActor:
    """Ray actor around the pure `PlacementRegistry`; one release at a time.

    Ray starts it again when its process dies. It then grants and retires nothing until `restore` has told it which
    generations are live and which leases are out; no step waits for that.
    """

    def __init__(self, config: ClusterConfig) -> None:
        recovering = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._registry = PlacementRegistry(final_after_steps=config.final_after_steps, recovering=recovering)
        self._recovering = recovering
        self._abi = handle_abi(config)
        self._release: ReleaseBundle | None = None

    async def restore(self, live: Sequence[PlacementSnapshot], release: ReleaseBundle, leases: Sequence[Lease]) -> None:
        """After a restart: the live generations in ascending order, and the leases that the peers hold on them."""
        if not self._recovering:
            return
        known = {snapshot.generation for snapshot in self._registry.live()}
        for snapshot in live:
            if snapshot.generation not in known:
                self._registry.publish(snapshot)
        self._registry.rebuild(leases)
        self._release, self._recovering = release, False

    async def publish(self, snapshot: PlacementSnapshot, release: ReleaseBundle) -> None:
        """Make a verified placement the active generation of `release`; nothing changes where it is that already.

        Raises `GenerationError` when it is not verified, not newer, or belongs to another release or checkpoint.
        """
        coordinates = (release.release_id, release.checkpoint_version, release.dispatch_handle_abi)
        if coordinates != (snapshot.release_id, snapshot.checkpoint_version, self._abi.handle_version):
            raise GenerationError(
                f"generation {snapshot.generation} is of release {snapshot.release_id}, checkpoint "
                f"{snapshot.checkpoint_version}, ABI {self._abi.handle_version}; the bundle says {coordinates}"
            )
        if snapshot.digest not in {known.digest for known in self._registry.live()}:
            self._registry.publish(snapshot)
        self._release = release

    async def acquire(self, holder: str) -> Grant:
        """A lease on the active generation, with its header. `GenerationError` before the first publication."""
        lease = self._registry.acquire(holder)
        snapshot = self._registry.require_live(lease.generation)
        return Grant(lease, HandleHeader.grant(lease, snapshot, self._abi), snapshot)

    async def release(self, lease: Lease) -> None:
        """Take a lease back, exactly once; `GenerationError` otherwise."""
        self._registry.release(lease)

    async def bury(self, holder: str) -> int:
        """Release everything that a dead holder had; returns how many leases that were."""
        leases = self._registry.leases_of(holder)
        for lease in leases:
            self._registry.release(lease)
        return len(leases)

    async def retire_due(self, committed_step: int, through: int = 0) -> tuple[PlacementSnapshot, ...]:
        """Retire every draining generation that nobody refers to and that is final by `committed_step`.

        The slots of those before generation `through` are needed: they are held no longer. Returns what retired.
        """
        self._registry.committed_step(committed_step)
        for status in self._registry.status():
            if status.generation < through and status.held:
                self._registry.release_hold(status.generation)
        return tuple(self._registry.retire(generation) for generation in self._registry.retirable())

    async def retire(self, generation: int) -> None:
        """Retire one generation, or `RetirementRefusedError` naming its holders."""
        self._registry.retire(generation)

    async def active(self) -> PlacementSnapshot:
        """The active placement; `GenerationError` before the first publication."""
        return self._registry.active()

    async def registered(self) -> Registered:
        """Live generations and the release."""
        return Registered(self._registry.live(), self._release, self._recovering)

    async def status(self) -> tuple[GenerationStatus, ...]:
        """Every generation with its state, references and holders."""
        return self._registry.status()
