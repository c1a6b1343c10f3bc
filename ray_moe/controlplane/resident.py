"""Resident releases: their generations, the leases on them, and what anybody may ask about both (0x0CB).

Each release has its generations and their leases in a `PlacementRegistry` of its own. A generation's number is given
once over all releases, so that a lease, which names its generation, names its release too. Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ray_moe.controlplane.bundles import GenerationEvidence, bundle_digest, generation_evidence
from ray_moe.controlplane.generations import GenerationStatus, LeaseNumbers, PlacementRegistry
from ray_moe.controlplane.release_states import (
    LEASED,
    RESIDENT,
    Note,
    ReleaseRecord,
    ReleaseStatus,
    Stage,
    State,
    advance,
    leave,
)
from ray_moe.errors import GenerationError, ReleaseError, StaleHandleError
from ray_moe.placement import Lease, PlacementSnapshot, ReleaseBundle

LOG_REMEMBERED = 1000


@dataclass
class Release:
    """A bundle, its placements, and what changes about them.

    `prior` is the release that it followed, or leaves in favour of; `held_for` the one whose way back it is.
    `stopped_generation` took new dispatches when it was stopped. `began` is who made it leave.
    """

    bundle: ReleaseBundle
    placements: PlacementRegistry
    state: State = State.BUILT
    stage: Stage = Stage.STAYING
    prior: str | None = None
    held_for: str | None = None
    stopped_generation: int | None = None
    promoted_step: int | None = None
    final: bool = False
    withdrawn: bool = False
    began: Note | None = None
    freed: tuple[PlacementSnapshot, ...] = ()
    records: dict[str, ReleaseRecord] = field(default_factory=dict)  # the latest of each operation

    @property
    def holders(self) -> tuple[str, ...]:
        """Who has a lease on any of its generations, once per lease."""
        return tuple(holder for one in self.placements.live() for holder in self.placements.holders(one.generation))


class ResidentReleases:
    """Leases and generations over all releases of one cluster; at most one release takes new dispatches.

    Whoever used one `PlacementRegistry` finds its operations here. `first_lease_id` numbers leases above those of
    earlier incarnations.
    """

    def __init__(self, *, final_after_steps: int = 1, first_lease_id: int = 1) -> None:
        self._final_after_steps = final_after_steps
        self._numbers = LeaseNumbers(first_lease_id)
        self._releases: dict[str, Release] = {}
        self._dispatching: str | None = None
        self._newest = -1
        self._step: int | None = None
        self._recovering = False
        self._records = 0
        self._log: deque[ReleaseRecord] = deque(maxlen=LOG_REMEMBERED)

    # -- generations and leases

    def publish(self, snapshot: PlacementSnapshot, bundle: ReleaseBundle, note: Note) -> ReleaseRecord:
        """Another generation of a resident release: a rebalance, grow, shrink or heal. `bundle` is what it runs as.

        Reason takes_new_release names a coordinate that a generation cannot change, not_resident a release that is not
        loaded or is leaving; `GenerationError` as `PlacementRegistry.publish`.
        """
        release = self._release(snapshot.release_id)
        if release.state not in RESIDENT or release.stage is not Stage.STAYING:
            raise ReleaseError(
                "not_resident",
                f"release {snapshot.release_id} is {release.state} ({release.stage}): it gets no generation",
            )
        evidence = self._add_generation(release, snapshot, bundle)
        return self._record("publish", snapshot.release_id, note, "", snapshot.generation, evidence)

    def acquire(self, holder: str, generation: int | None = None, *, release_id: str | None = None) -> Lease:
        """A lease for `holder` on the release that takes new dispatches, or on `release_id`: a candidate in shadow or
        canary can be leased beside the serving one.

        Reasons: no_active_release between the two halves of a rollback; not_dispatching for a release that is stopped
        or not that far. `GenerationError` as `PlacementRegistry.acquire`.
        """
        name = self._dispatching if release_id is None else release_id
        if name is None:
            raise ReleaseError("no_active_release", f"{holder} asks for a lease: no release takes new dispatches")
        release = self._release(name)
        if release.state not in LEASED or release.stage is not Stage.STAYING:
            raise ReleaseError(
                "not_dispatching",
                f"{holder} asks for a lease on release {name}, which is {release.state} ({release.stage})",
            )
        return release.placements.acquire(holder, generation)

    def release(self, lease: Lease) -> None:
        """Take a lease back, exactly once, whatever its release does meanwhile; `GenerationError` otherwise."""
        self._of(lease.generation).placements.release(lease)
        self._settle()

    def retire_generation(self, generation: int) -> PlacementSnapshot:
        """Retire a superseded generation of a release that stays, as `PlacementRegistry.retire` does.

        Reason leaves_with_its_release for a generation of a release that is leaving.
        """
        release = self._of(generation)
        if not self._keeps_generations(release):
            raise ReleaseError(
                "leaves_with_its_release",
                f"generation {generation} goes with release {release.bundle.release_id}, which is {release.stage}",
            )
        return release.placements.retire(generation)

    def retirable(self) -> tuple[int, ...]:
        """The generations that `retire_generation` would accept now, ascending."""
        staying = filter(self._keeps_generations, self._releases.values())
        return tuple(sorted(generation for one in staying for generation in one.placements.retirable()))

    def committed_step(self, step: int) -> None:
        """All peers have committed `step`; reports may come late."""
        self._step = step if self._step is None else max(step, self._step)
        for release in self._releases.values():
            release.placements.committed_step(step)

    def release_hold(self, generation: int) -> None:
        """Give up a superseded generation's hold because its slots are needed. Reason held for a release's way back."""
        release = self._of(generation)
        if generation == release.stopped_generation and release.held_for is not None:
            raise ReleaseError("held", f"generation {generation} is the way back of release {release.held_for}")
        release.placements.release_hold(generation)

    # -- after a restart

    def forget_leases(self) -> None:
        """This registry was read back after a restart: nothing is granted, taken back or retired until `rebuild`."""
        self._recovering = True
        for release in self._releases.values():
            release.placements.forget_leases()

    def rebuild(self, leases: Iterable[Lease]) -> None:
        """Take over the leases that the peers still hold; all or nothing, as `PlacementRegistry.rebuild`."""
        for name, release in self._releases.items():
            if release.holders:
                raise GenerationError(f"cannot rebuild: {len(release.holders)} leases of {name} would be forgotten")
        by_release: dict[str, list[Lease]] = {name: [] for name in self._releases}
        seen: dict[int, Lease] = {}
        for lease in leases:
            self.require_live(lease.generation)
            other = seen.setdefault(lease.lease_id, lease)
            if other is not lease:
                raise GenerationError(f"lease {lease.lease_id} is reported twice: by {other.holder} and {lease.holder}")
            by_release[self._of(lease.generation).bundle.release_id].append(lease)
        for name, reported in by_release.items():
            self._releases[name].placements.rebuild(reported)
        self._recovering = False
        self._settle()

    # -- questions

    def dispatching(self) -> ReleaseBundle:
        """The release that takes new dispatches; reason no_active_release when there is none."""
        if self._dispatching is None:
            raise ReleaseError("no_active_release", "no release takes new dispatches")
        return self._releases[self._dispatching].bundle

    def active(self, release_id: str | None = None) -> PlacementSnapshot:
        """The generation for new dispatches, of `release_id` or of the release that takes them."""
        return self._release(release_id or self.dispatching().release_id).placements.active()

    def bundle(self, release_id: str) -> ReleaseBundle:
        return self._release(release_id).bundle

    def release_of(self, generation: int) -> ReleaseBundle:
        """The release that a generation, and so a lease, belongs to."""
        return self._of(generation).bundle

    def require_live(self, generation: int) -> PlacementSnapshot:
        """The snapshot that a pinned handle resolves through; `StaleHandleError` once retired or if never published."""
        for release in self._releases.values():
            if release.placements.knows(generation):
                return release.placements.require_live(generation)
        raise StaleHandleError(f"generation {generation} is unknown or long retired: nothing resolves through it")

    def live(self) -> tuple[PlacementSnapshot, ...]:
        """All snapshots of all releases whose slots must stay as they are, ascending."""
        every = (snapshot for release in self._releases.values() for snapshot in release.placements.live())
        return tuple(sorted(every, key=lambda snapshot: snapshot.generation))

    @property
    def newest(self) -> int:
        """The highest generation that any release has had; -1 before the first."""
        return self._newest

    def holders(self, generation: int) -> tuple[str, ...]:
        return self._of(generation).placements.holders(generation)

    def references(self, generation: int) -> int:
        return len(self.holders(generation))

    def leases_of(self, holder: str) -> tuple[Lease, ...]:
        """The leases that `holder` has on any release; whoever buries a dead holder releases them one by one."""
        return tuple(lease for one in self._releases.values() for lease in one.placements.leases_of(holder))

    def generations(self) -> tuple[GenerationStatus, ...]:
        """One record per generation of any release, ascending."""
        every = (status for release in self._releases.values() for status in release.placements.status())
        return tuple(sorted(every, key=lambda status: status.generation))

    def status(self) -> tuple[ReleaseStatus, ...]:
        """One record per release, in the order in which they were built."""
        return tuple(
            ReleaseStatus(
                release_id=name,
                digest=bundle_digest(one.bundle),
                state=one.state,
                stage=one.stage,
                dispatching=name == self._dispatching,
                held_for=one.held_for,
                prior=one.prior,
                final=one.final,
                withdrawn=one.withdrawn,
                holders=one.holders,
                generations=one.placements.status(),
            )
            for name, one in self._releases.items()
        )

    def log(self) -> tuple[ReleaseRecord, ...]:
        """The latest operations, oldest first."""
        return tuple(self._log)

    # -- details

    def _release(self, release_id: str) -> Release:
        if release_id not in self._releases:
            raise ReleaseError("unknown_release", f"there is no release {release_id}, or it has left long ago")
        return self._releases[release_id]

    def _of(self, generation: int) -> Release:
        for release in self._releases.values():
            if release.placements.knows(generation):
                return release
        raise GenerationError(f"generation {generation} is unknown or long retired")

    @staticmethod
    def _keeps_generations(release: Release) -> bool:
        """It stays, or is held as a way back: only what its placements let go of leaves."""
        return release.stage is Stage.STAYING or release.held_for is not None

    def _add_generation(
        self, release: Release, snapshot: PlacementSnapshot, bundle: ReleaseBundle
    ) -> GenerationEvidence:
        evidence = generation_evidence(release.bundle, bundle, snapshot)
        if snapshot.generation <= self._newest:
            raise GenerationError(
                f"generation {snapshot.generation} cannot be published: it must be greater than {self._newest}"
            )
        latest = max(self.live(), key=lambda one: one.generation, default=snapshot).group
        if snapshot.group.process_group_id == latest.process_group_id and snapshot.group.epoch < latest.epoch:
            raise GenerationError(
                f"generation {snapshot.generation} is for epoch {snapshot.group.epoch} of {latest.process_group_id}, "
                f"which is in epoch {latest.epoch} already"
            )
        _require_own_storage(snapshot, self.live())
        release.placements.publish(snapshot)
        self._newest = snapshot.generation
        return evidence

    def _settle(self) -> None:
        """A release that another one has replaced, and that nobody holds or is held for, has drained."""
        for name, release in self._releases.items():
            idle = release.held_for is None and not release.holders and not self._recovering
            if release.stage is Stage.REPLACED and idle:
                assert release.began is not None
                release.stage = leave(name, release.stage, "drain")
                self._record("drain", name, release.began, "no lease is out")

    def _step_on(self, release_id: str, event: str) -> None:
        release = self._release(release_id)
        release.state = advance(release_id, release.state, event)

    def _record(
        self,
        operation: str,
        release_id: str,
        note: Note,
        detail: str = "",
        generation: int | None = None,
        evidence: GenerationEvidence | None = None,
    ) -> ReleaseRecord:
        self._records += 1
        record = ReleaseRecord(self._records, operation, release_id, note, detail, generation, evidence)
        self._log.append(record)
        self._releases[release_id].records[operation] = record
        return record


def _require_own_storage(snapshot: PlacementSnapshot, live: Iterable[PlacementSnapshot]) -> None:
    """Nothing that is live is overwritten: a storage slot that two generations name holds one expert's parameters."""
    taken = {
        (layer.layer, slot.destination_rank, slot.pool_slot): (slot.parameter_digest, other.generation)
        for other in live
        for layer in other.layers
        for slot in layer.slots
    }
    for layer in snapshot.layers:
        for slot in layer.slots:
            digest, generation = taken.get((layer.layer, slot.destination_rank, slot.pool_slot), ("", 0))
            if digest and slot.parameter_digest and digest != slot.parameter_digest:
                raise GenerationError(
                    f"generation {snapshot.generation} cannot be published: layer {layer.layer} rank "
                    f"{slot.destination_rank} pool slot {slot.pool_slot} holds {digest} for generation {generation}, "
                    f"not {slot.parameter_digest}"
                )
