"""Which effects of a migration may run now, and what has been done: the order constraints of a plan, enforced.

Pure: whoever runs effects asks `ready`, then reports `begin` and `complete` or `fail`. Any number may run at a time.
The state is which effects are done, so that a restarted controller goes on with `MigrationRun(plan, done)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from ray_moe.controlplane.migration_plan import Copy, Effect, Load, MigrationPlan, Publish, Retire, Verify
from ray_moe.controlplane.occupancy import Held, Occupancy
from ray_moe.controlplane.solve import PoolSlot
from ray_moe.errors import ScheduleError


class Status(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"


# An effect that was done is never undone: what a later one needs to be true stays true.
TRANSITIONS: dict[tuple[Status, str], Status] = {
    (Status.PENDING, "begin"): Status.RUNNING,  # all that it depends on is done
    (Status.RUNNING, "complete"): Status.DONE,
    (Status.RUNNING, "fail"): Status.PENDING,  # to be tried again; a slot that failed to verify is filled again first
}


def advance(status: Status, event: str) -> Status:
    """Take one edge of `TRANSITIONS`; `ScheduleError` not_allowed naming status and event."""
    following = TRANSITIONS.get((status, event))
    if following is None:
        raise ScheduleError(("not_allowed",), f"an effect that is {status} allows no {event!r}")
    return following


class MigrationRun:
    """One execution of a plan. Effects are named by their position in `plan.effects`.

    `done` are the positions that were done before a restart; what was running then runs again.
    """

    def __init__(self, plan: MigrationPlan, done: Iterable[int] = ()) -> None:
        self.plan = plan
        self._status = [Status.PENDING] * len(plan.effects)
        for position in done:
            self._status[position] = Status.DONE
        self._needs = _dependencies(plan.effects)

    @property
    def done(self) -> tuple[int, ...]:
        return tuple(at for at, status in enumerate(self._status) if status is Status.DONE)

    @property
    def finished(self) -> bool:
        return all(status is Status.DONE for status in self._status)

    def ready(self) -> tuple[int, ...]:
        """Pending effects whose dependencies are done, in plan order."""
        return tuple(at for at, status in enumerate(self._status) if status is Status.PENDING and not self._unmet(at))

    def begin(self, position: int) -> Effect:
        """Start an effect. `ScheduleError` with the reasons why it may not run yet (see `_dependencies`)."""
        following = advance(self._status[position], "begin")
        unmet = self._unmet(position)
        if unmet:
            effect, first = self.plan.effects[position], self.plan.effects[unmet[0][0]]
            raise ScheduleError(
                tuple(dict.fromkeys(reason for _, reason in unmet)),
                f"{_text(effect)} waits for {len(unmet)} effects, the first is {_text(first)}",
            )
        self._status[position] = following
        return self.plan.effects[position]

    def complete(self, position: int) -> None:
        """The effect did what it says; a `Verify` found the digest that the checkpoint has."""
        self._status[position] = advance(self._status[position], "complete")

    def fail(self, position: int) -> None:
        """The effect has to run again. A slot whose digest is wrong has to be filled again before."""
        effect = self.plan.effects[position]
        self._status[position] = advance(self._status[position], "fail")
        if isinstance(effect, Verify):
            for at, status in self._needs[position].items():
                if status == "not_filled":
                    self._status[at] = Status.PENDING

    def published(self) -> Occupancy:
        """The generation that serves new dispatches now."""
        served = self.plan.prior
        for at in self.done:
            effect = self.plan.effects[at]
            if isinstance(effect, Publish):
                served = self.plan.waves[effect.wave - 1].published
        return served

    def resident(self) -> Occupancy:
        """What pool slots hold in full now: those that were verified, and those that were not freed."""
        layers = {layer: dict.fromkeys(slots) for layer, slots in self.plan.prior.layers.items()}
        for at in self.done:
            effect = self.plan.effects[at]
            if isinstance(effect, Verify):
                layers.setdefault(effect.slot.layer, {})[_held(effect)] = None
            elif isinstance(effect, Retire):
                del layers[effect.slot.layer][_held(effect)]
        return Occupancy({layer: tuple(slots) for layer, slots in layers.items()})

    def _unmet(self, position: int) -> list[tuple[int, str]]:
        return [(at, reason) for at, reason in self._needs[position].items() if self._status[at] is not Status.DONE]


def _dependencies(effects: tuple[Effect, ...]) -> list[dict[int, str]]:
    """By effect: the effects that must be done first, and the reason that `begin` gives when one is not.

    slots_in_use: what the wave before gives up must have been freed, which keeps to the plan's peak.
    source_unverified: the copy that is read must have verified. not_filled: only what has arrived is verified.
    unverified: a generation is published once every slot of its wave is verified. out_of_order: generations follow one
    another. unpublished: a slot is freed after the publication that does without it. source_in_use: and after every
    copy that reads it has verified.
    """
    needs: list[dict[int, str]] = []
    filled: dict[PoolSlot, int] = {}
    verified: dict[PoolSlot, int] = {}
    freed: list[int] = []
    readers: dict[PoolSlot, list[PoolSlot]] = {}
    wave: list[int] = []
    publications: list[int] = []
    for at, effect in enumerate(effects):
        before: dict[int, str] = {}
        if isinstance(effect, Load | Copy):
            if publications:
                before[publications[-1]] = "out_of_order"
            before |= dict.fromkeys(freed, "slots_in_use")
            if isinstance(effect, Copy):
                readers.setdefault(effect.source, []).append(effect.slot)
                if effect.after is not None:
                    before[verified[effect.after]] = "source_unverified"
            filled[effect.slot] = at
        elif isinstance(effect, Verify):
            before[filled[effect.slot]] = "not_filled"
            verified[effect.slot] = at
            wave.append(at)
        elif isinstance(effect, Publish):
            before |= dict.fromkeys(freed, "slots_in_use") | dict.fromkeys(wave, "unverified")
            if publications:
                before[publications[-1]] = "out_of_order"
            publications.append(at)
            wave, freed = [], []
        else:
            before[publications[-1]] = "unpublished"
            before |= {verified[slot]: "source_in_use" for slot in readers.pop(effect.slot, ())}
            freed.append(at)
        needs.append(before)
    return needs


def _held(effect: Verify | Retire) -> Held:
    return Held(effect.slot.rank.value, effect.slot.pool_slot, effect.expert.value)


def _text(effect: Effect) -> str:
    name = type(effect).__name__.lower()
    if isinstance(effect, Publish):
        return f"{name} of wave {effect.wave}"
    return f"{name} of layer {effect.slot.layer} rank {effect.slot.rank} pool slot {effect.slot.pool_slot}"
