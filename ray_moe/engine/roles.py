"""Which release runs which step: the main view, and for a time a second one beside it (DESIGN section 4).

A candidate release is first a shadow: on sampled steps it computes what the main view computes, and nobody sees its
outputs. As a canary it runs a share of the steps for real. After a promotion the release before it is the one beside,
until the requests that began under it have ended. What a step runs under follows from its number and from what all
peers have agreed on, and a step never runs under two views.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from ray_moe.engine.generation import GenerationView
from ray_moe.errors import StaleHandleError


class Part(StrEnum):
    """What the second view is there for."""

    SHADOW = "shadow"  # computes sampled steps first; its outputs are compared and dropped
    CANARY = "canary"  # runs every so many steps
    DRAIN = "drain"  # runs every other step for the requests of its own checkpoint, and admits none


@dataclass(frozen=True)
class Beside:
    """The second view and its steps: those whose number `period` divides. `StaleHandleError` for a period < 1."""

    view: GenerationView
    part: Part
    period: int

    def __post_init__(self) -> None:
        if self.period < 1:
            raise StaleHandleError(f"every how many steps a release runs must be >= 1, found {self.period}")


@dataclass(frozen=True)
class Roles:
    """One division of steps. `main` None leaves the main view as it is; a number replaces all lower ones."""

    number: int = 0
    main: GenerationView | None = None
    beside: Beside | None = None

    @cached_property
    def digest64(self) -> int:
        """What all peers must share about the second view; 0 without one."""
        if self.beside is None:
            return 0
        told = f"{self.beside.view.header.digest} {self.beside.part} {self.beside.period}"
        return _number(told)

    def of_step(self, step: int, main: GenerationView) -> Turn:
        """What step `step` runs under."""
        beside = self.beside
        if beside is None:
            return Turn(main)
        apart = beside.part is not Part.SHADOW and beside.view.checkpoint != main.checkpoint
        if step % beside.period:
            return Turn(main, None, main.checkpoint if apart else None)
        if beside.part is Part.SHADOW:
            return Turn(main, beside.view)
        if apart:
            return Turn(beside.view, None, beside.view.checkpoint)
        return Turn(beside.view, instead=main if beside.part is Part.CANARY else None)

    def checkpoint_of(self, request_id: str, main: GenerationView) -> str:
        """The checkpoint that a new request keeps to its end, by its id alone: a canary's gets one in `period`."""
        beside = self.beside
        if beside is None or beside.part is not Part.CANARY or _number(request_id.partition("~")[0]) % beside.period:
            return main.checkpoint
        return beside.view.checkpoint

    def views(self, main: GenerationView) -> tuple[GenerationView, ...]:
        """The views that are in use."""
        return (main,) if self.beside is None else (main, self.beside.view)


@dataclass(frozen=True)
class Turn:
    """What one step runs under. `checkpoint` is the one whose requests it plans; None for all of them. `instead` runs
    what a canary of the same checkpoint cannot."""

    view: GenerationView
    shadow: GenerationView | None = None
    checkpoint: str | None = None
    instead: GenerationView | None = None


class Division:
    """The roles that steps are planned by, and those that are held until all peers have them."""

    def __init__(self) -> None:
        self.now = Roles()
        self.newest = 0  # for other threads, which may see it a moment before it counts
        self._staged: dict[int, Roles] = {0: self.now}

    @property
    def newest_staged(self) -> int:
        return max(self._staged)

    def announce(self, roles: Roles, main: GenerationView) -> None:
        """Check what is to be staged, beside `main`. `StaleHandleError` for older roles, or for another epoch's."""
        if roles.number <= self.newest:
            raise StaleHandleError(f"roles {roles.number} come before roles {self.newest}, which are staged")
        for view in roles.views(roles.main or main):
            if view.epoch != main.epoch:
                raise StaleHandleError(
                    f"roles {roles.number} name generation {view.generation} of epoch {view.epoch}, this peer runs "
                    f"epoch {main.epoch}"
                )

    def stage(self, roles: Roles) -> None:
        self._staged[roles.number] = roles

    def take(self, number: int) -> Roles:
        """The agreed roles; a peer that has just come never staged what the others had before."""
        if number != self.now.number:
            self.now = self._staged.get(number) or Roles(number)
            self._staged = {key: one for key, one in self._staged.items() if key > number} | {number: self.now}
        return self.now


def hand_on(before: Sequence[GenerationView], now: Sequence[GenerationView]) -> list[GenerationView]:
    """Between two steps: bind what has come and free what has gone. Returns what has gone; its leases can go back."""
    for view in now:
        if view not in before:
            view.activate()
    gone = [view for view in before if view not in now]
    for view in gone:
        if view.release_id not in {one.release_id for one in now}:
            view.deactivate()
        view.free()
    return gone


def _number(text: str) -> int:
    """63 bits that are the same in every process."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) >> 1
