"""The placement registry: which generation serves, who still uses which, and when one may go (specification 0x02B3).

Pure: no I/O and no clock. Time is the step that the peers have committed. A generation leaves memory by `retire` only,
and only at zero leases, when it is no longer held for a rollback, and when the registry knows all leases that are out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ray_moe.errors import GenerationError, RetirementRefusedError, StaleHandleError
from ray_moe.placement import Lease, PlacementSnapshot


class State(StrEnum):
    """What a generation may still do."""

    ACTIVE = "ACTIVE"  # eligible for new dispatches
    DRAINING = "DRAINING"  # serves the handles that are pinned to it, and no other
    RETIRED = "RETIRED"  # nothing resolves through it any more; its slots may be freed


# state -> {event: next state}. There is no way back: a rollback's re-activation is an operation of its own.
TRANSITIONS: dict[State, dict[str, State]] = {
    State.ACTIVE: {"supersede": State.DRAINING},  # the next generation was published, or its release stopped
    State.DRAINING: {"retire": State.RETIRED},  # zero leases, not held
    State.RETIRED: {},
}


RETIRED_REMEMBERED = 16  # how many retired generations `status` still shows


def advance(generation: int, state: State, event: str) -> State:
    """Take one edge of `TRANSITIONS`; raises `GenerationError` naming generation, state and event."""
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise GenerationError(f"generation {generation} is {state}: event {event!r} is not allowed there")
    return following


@dataclass(frozen=True)
class GenerationStatus:
    """One generation as the registry sees it. `held_until_step` is the committed step that ends its hold.

    `held` with `held_until_step` None means that no step has been reported since its successor was published, or that
    no step ends the hold: it is the way back of a release that is not final.
    """

    generation: int
    version: str
    state: State
    references: int
    holders: tuple[str, ...]
    held: bool
    held_until_step: int | None


@dataclass
class LeaseNumbers:
    """The next lease's number. Registries that share one never give two leases the same."""

    next: int = 1

    def take(self) -> int:
        number, self.next = self.next, self.next + 1
        return number

    def go_beyond(self, number: int) -> None:
        self.next = max(self.next, number + 1)


@dataclass
class _Entry:
    """A snapshot and what about it changes."""

    snapshot: PlacementSnapshot
    state: State = State.ACTIVE
    held: bool = False
    superseded_step: int | None = None  # last step known to be committed when the successor was published
    outlives_steps: bool = False  # the hold ends by `release_hold` alone


class PlacementRegistry:
    """The generations of one release and the leases on them.

    `final_after_steps` is how many committed steps a superseded generation stays held, counted from the publication of
    its successor. A registry that takes over from one that died is built with `recovering=True`, is given the live
    snapshots again by `publish` in ascending order, and neither grants, takes back nor retires anything until `rebuild`
    has told it which leases the peers hold. `first_lease_id` lets it number its leases above those of earlier
    incarnations, or `numbers` share the numbering with other registries.
    """

    def __init__(
        self,
        *,
        final_after_steps: int = 1,
        recovering: bool = False,
        first_lease_id: int = 1,
        numbers: LeaseNumbers | None = None,
    ) -> None:
        if final_after_steps < 0:
            raise GenerationError(f"final_after_steps must be >= 0, found {final_after_steps}")
        self._final_after_steps = final_after_steps
        self._recovering = recovering
        self._numbers = LeaseNumbers(first_lease_id) if numbers is None else numbers
        self._entries: dict[int, _Entry] = {}  # ascending; the latest RETIRED ones stay for `status`
        self._active: int | None = None
        self._step: int | None = None
        self._leases: dict[int, Lease] = {}

    # -- publish, lease, retire

    def publish(self, snapshot: PlacementSnapshot) -> None:
        """Make `snapshot` the generation for new dispatches; the one that served so far drains and is held.

        Raises `GenerationError` when a slot's digest is unverified; when the generation does not come after all that
        were seen; when checkpoint, release or expert unit differ from the latest one's, which takes a new release and
        not a new generation; or when the epoch lies before the latest one's of the same group.
        """
        generation = snapshot.generation
        if not snapshot.verified:
            raise GenerationError(f"generation {generation} cannot be published: {_unverified(snapshot)}")
        if self._entries:
            newest = max(self._entries)
            if generation <= newest:
                raise GenerationError(f"generation {generation} cannot be published: it must be greater than {newest}")
            _require_same_release(snapshot, self._entries[newest].snapshot)
        if self._active is not None:
            self._supersede(self._active, held=self._final_after_steps > 0)
        self._entries[generation] = _Entry(snapshot)
        self._active = generation

    def acquire(self, holder: str, generation: int | None = None) -> Lease:
        """A lease for `holder` on the active generation; the generation cannot retire until it is released.

        Whoever planned under one generation names it, and is refused with `GenerationError` if another one is active by
        now. Also refused before the first publication and before `rebuild`.
        """
        self._require_rebuilt("grant a lease")
        snapshot = self.active()
        if generation is not None and generation != snapshot.generation:
            raise GenerationError(
                f"{holder} asks for generation {generation}, which is {self._describe(generation)}: "
                f"new dispatches go to {snapshot.generation}"
            )
        lease = Lease(self._numbers.take(), holder, snapshot.generation, snapshot.group.epoch)
        self._leases[lease.lease_id] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Take a lease back, exactly once; `GenerationError` names a lease that is not out (any more)."""
        self._require_rebuilt("take a lease back")
        if self._leases.get(lease.lease_id) != lease:
            raise GenerationError(
                f"lease {lease.lease_id} of {lease.holder} on generation {lease.generation} is not out: "
                f"it was released before, or never granted"
            )
        del self._leases[lease.lease_id]

    def retire(self, generation: int) -> PlacementSnapshot:
        """Take a drained generation out of service; returns its snapshot, whose slots may now be freed.

        Raises `RetirementRefusedError` naming the holders while it is leased, held for a rollback, or while the
        registry does not know the leases yet; `GenerationError` when it is not DRAINING.
        """
        entry = self._entry(generation)
        following = advance(generation, entry.state, "retire")
        reasons = self.holders(generation)
        if self._is_held(entry):
            reasons += (self._hold_reason(entry),)
        if self._recovering:
            reasons += ("leases from before the restart",)
        if reasons:
            raise RetirementRefusedError(generation, reasons)
        entry.state = following
        retired = [number for number, one in self._entries.items() if one.state is State.RETIRED]
        for number in retired[:-RETIRED_REMEMBERED]:
            del self._entries[number]
        return entry.snapshot

    def rebuild(self, leases: Iterable[Lease]) -> None:
        """Take over the leases that the peers still hold, after a restart; retirement is possible from here on.

        Every live peer must have been asked. Raises, and changes nothing, when a lease is on a generation that is not
        live (`StaleHandleError`), when two leases share an id, or when this registry has leases out already
        (`GenerationError`).
        """
        reported = tuple(leases)
        if self._leases:
            raise GenerationError(f"cannot rebuild: {len(self._leases)} leases of this registry would be forgotten")
        by_id: dict[int, Lease] = {}
        for lease in reported:
            self.require_live(lease.generation)
            other = by_id.setdefault(lease.lease_id, lease)
            if other is not lease:
                raise GenerationError(f"lease {lease.lease_id} is reported twice: by {other.holder} and {lease.holder}")
        self._leases = by_id
        for lease_id in by_id:
            self._numbers.go_beyond(lease_id)
        self._recovering = False

    def forget_leases(self) -> None:
        """This registry was read back after a restart: which leases are out is unknown until `rebuild`."""
        self._leases = {}
        self._recovering = True

    # -- the two operations of a release that leaves or comes back

    def stop_dispatch(self, *, held: bool) -> int:
        """No generation takes new dispatches from here on; returns the one that did, which drains.

        `held` keeps it as a way back until `release_hold`, whatever steps are committed meanwhile. Raises
        `GenerationError` when none is active.
        """
        generation = self.active().generation
        self._supersede(generation, held=held)
        self._entries[generation].outlives_steps = held
        self._active = None
        return generation

    def reactivate(self, generation: int) -> PlacementSnapshot:
        """Let a held DRAINING generation take new dispatches again: the way back of a rollback.

        An operation of its own and no edge of `TRANSITIONS`; whoever calls it logs it. Raises `GenerationError` while
        another generation takes new dispatches, and for one that is not held.
        """
        entry = self._entry(generation)
        if self._active is not None:
            raise GenerationError(
                f"generation {generation} cannot be re-activated: {self._active} takes new dispatches, stop it first"
            )
        if entry.state is not State.DRAINING or not self._is_held(entry):
            raise GenerationError(
                f"generation {generation} cannot be re-activated: it is {entry.state} and not held for a rollback"
            )
        self._entries[generation] = _Entry(entry.snapshot)
        self._active = generation
        return entry.snapshot

    # -- holds

    def committed_step(self, step: int) -> None:
        """All peers have committed `step`. Reports may come late or out of order: the highest one counts.

        A generation published before any report counts the first one as its publication step.
        """
        self._step = step if self._step is None else max(step, self._step)
        for entry in self._entries.values():
            if entry.held and entry.superseded_step is None:
                entry.superseded_step = self._step

    def release_hold(self, generation: int) -> None:
        """Give up the way back to a DRAINING generation because its slots are needed. Its leases still count."""
        entry = self._entry(generation)
        if entry.state is not State.DRAINING:
            raise GenerationError(f"generation {generation} is {entry.state}: only a DRAINING generation is held")
        entry.held = False

    # -- questions

    def active(self) -> PlacementSnapshot:
        """The generation for new dispatches; `GenerationError` before the first publication and once stopped."""
        if self._active is None:
            if not self._entries:
                raise GenerationError("no placement generation has been published yet")
            raise GenerationError("no placement generation takes new dispatches: the one that did was stopped")
        return self._entries[self._active].snapshot

    def require_live(self, generation: int) -> PlacementSnapshot:
        """The snapshot that a pinned handle resolves through; `StaleHandleError` once RETIRED or if never published."""
        entry = self._entries.get(generation)
        if entry is None or entry.state is State.RETIRED:
            raise StaleHandleError(
                f"generation {generation} is {self._describe(generation)}: nothing resolves through it"
            )
        return entry.snapshot

    def knows(self, generation: int) -> bool:
        """Whether it is live, or one of the latest retired ones."""
        return generation in self._entries

    def live(self) -> tuple[PlacementSnapshot, ...]:
        """All snapshots whose slots must stay as they are, ascending."""
        return tuple(entry.snapshot for entry in self._entries.values() if entry.state is not State.RETIRED)

    def references(self, generation: int) -> int:
        """Leases out on `generation`."""
        return len(self.holders(generation))

    def holders(self, generation: int) -> tuple[str, ...]:
        """Who has a lease on `generation`, in the order of granting, once per lease."""
        self._entry(generation)
        return tuple(lease.holder for lease in self._leases.values() if lease.generation == generation)

    def leases_of(self, holder: str) -> tuple[Lease, ...]:
        """The leases that `holder` has; whoever buries a dead holder releases them one by one."""
        return tuple(lease for lease in self._leases.values() if lease.holder == holder)

    def retirable(self) -> tuple[int, ...]:
        """The generations that `retire` would accept now, ascending."""
        if self._recovering:
            return ()
        leased = {lease.generation for lease in self._leases.values()}
        return tuple(
            generation
            for generation, entry in self._entries.items()
            if entry.state is State.DRAINING and generation not in leased and not self._is_held(entry)
        )

    def status(self) -> tuple[GenerationStatus, ...]:
        """One record per generation, ascending: the live ones and the latest retired ones."""
        return tuple(
            GenerationStatus(
                generation=generation,
                version=entry.snapshot.version.value,
                state=entry.state,
                references=self.references(generation),
                holders=self.holders(generation),
                held=self._is_held(entry),
                held_until_step=self._held_until(entry) if self._is_held(entry) else None,
            )
            for generation, entry in self._entries.items()
        )

    # -- details

    def _entry(self, generation: int) -> _Entry:
        if generation not in self._entries:
            raise GenerationError(f"generation {generation} is {self._describe(generation)}")
        return self._entries[generation]

    def _describe(self, generation: int) -> str:
        return self._entries[generation].state.value if generation in self._entries else "unknown or long retired"

    def _supersede(self, generation: int, *, held: bool) -> None:
        entry = self._entries[generation]
        entry.state = advance(generation, entry.state, "supersede")
        entry.superseded_step, entry.held = self._step, held

    def _held_until(self, entry: _Entry) -> int | None:
        if entry.superseded_step is None or entry.outlives_steps:
            return None
        return entry.superseded_step + self._final_after_steps

    def _is_held(self, entry: _Entry) -> bool:
        until = self._held_until(entry)
        return entry.held and (until is None or self._step is None or self._step < until)

    def _hold_reason(self, entry: _Entry) -> str:
        until = self._held_until(entry)
        when = "the first committed step is reported" if until is None else f"step {until} is committed"
        if entry.outlives_steps:
            when = "the release that follows is final"
        return f"the way back of a rollback until {when}"

    def _require_rebuilt(self, operation: str) -> None:
        if self._recovering:
            raise GenerationError(f"cannot {operation}: the leases from before the restart are not rebuilt yet")


def _require_same_release(candidate: PlacementSnapshot, active: PlacementSnapshot) -> None:
    """What a slot holds, a whole expert or a part of one, is part of a placement's identity (0x0BB)."""
    for name, old, new in (
        ("release_id", active.release_id, candidate.release_id),
        ("checkpoint_version", active.checkpoint_version, candidate.checkpoint_version),
        ("expert parts", _expert_parts(active), _expert_parts(candidate)),
    ):
        if old != new:
            raise GenerationError(
                f"generation {candidate.generation} has {name} {new}, the active one {old}: that takes a new release"
            )
    old_group, new_group = active.group, candidate.group
    if new_group.process_group_id == old_group.process_group_id and new_group.epoch < old_group.epoch:
        raise GenerationError(
            f"generation {candidate.generation} is for epoch {new_group.epoch} of {new_group.process_group_id}, "
            f"which is in epoch {old_group.epoch} already"
        )


def _expert_parts(snapshot: PlacementSnapshot) -> str:
    """Into how many parts a placement cuts its experts: "1" where every slot holds a whole one."""
    return ", ".join(map(str, sorted({slot.shard.count for layer in snapshot.layers for slot in layer.slots})))


def _unverified(snapshot: PlacementSnapshot) -> str:
    missing = [
        f"layer {placement.layer} slot {slot.physical_slot_id} on rank {slot.destination_rank}"
        for placement in snapshot.layers
        for slot in placement.slots
        if not slot.parameter_digest
    ]
    return f"{len(missing)} of {snapshot.num_slots} slots have no verified digest, the first is {missing[0]}"
