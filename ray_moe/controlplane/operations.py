"""A change of the cluster as a record: what was asked, by whom and why, how far it is, what came of it.

Pure. `ray_moe.controlplane.reconcile` moves operations through `TRANSITIONS`; the whole `ControlState` is one frozen
value, so that a controller that restarts goes on from the last one that was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ray_moe.controlplane.elastic import Loads
from ray_moe.controlplane.fetching import Attempt
from ray_moe.controlplane.occupancy import Occupancy
from ray_moe.errors import GenerationError
from ray_moe.placement import PlacementSnapshot

HISTORY_REMEMBERED = 256
# Of an operation that has ended: its last edges.
_TRAIL_REMEMBERED = 64


class Kind(StrEnum):
    REBALANCE = "rebalance"
    GROW = "grow"
    SHRINK = "shrink"


class Stage(StrEnum):
    """How far an operation is. One at a time is between FILLING and ENDING: only one placement changes at a time."""

    PREPARING = "preparing"  # grow: actors start and load beside everything else
    QUEUED = "queued"  # ready, and another operation is changing the placement
    FILLING = "filling"  # the wave's copies arrive in free slots and are verified
    JOINING = "joining"  # members of the next epoch build its group beside the serving one
    MOVING = "moving"  # shrink: open requests of the leaving ranks go to others
    PUBLISHING = "publishing"
    SWITCHING = "switching"  # staged on every rank; taken at one agreed step
    DRAINING = "draining"  # between two waves: the generation before retires, its slots are freed
    ENDING = "ending"  # shrink: the actors that left end
    UNDOING = "undoing"  # cancelled or failed before publication: what was begun is given back
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


_UNDO = {"undo": Stage.UNDOING}
# stage -> {event: next}. Publication is the point of no return: what was published is brought to its end.
TRANSITIONS: dict[Stage, dict[str, Stage]] = {
    Stage.PREPARING: {"prepared": Stage.QUEUED, **_UNDO},
    Stage.QUEUED: {"enter": Stage.FILLING, "done": Stage.DONE, **_UNDO},
    Stage.FILLING: {"join": Stage.JOINING, "publish": Stage.PUBLISHING, **_UNDO},
    Stage.JOINING: {"move": Stage.MOVING, "publish": Stage.PUBLISHING, **_UNDO},
    Stage.MOVING: {"publish": Stage.PUBLISHING, **_UNDO},
    Stage.PUBLISHING: {"published": Stage.SWITCHING, "refused": Stage.UNDOING},  # a member died: nothing was published
    Stage.SWITCHING: {"next_wave": Stage.DRAINING, "end": Stage.ENDING, "done": Stage.DONE},
    Stage.DRAINING: {"enter": Stage.FILLING, **_UNDO},
    Stage.ENDING: {"done": Stage.DONE},
    Stage.UNDOING: {"cancelled": Stage.CANCELLED, "failed": Stage.FAILED},
    Stage.DONE: {},
    Stage.CANCELLED: {},
    Stage.FAILED: {},
}
ENDED = frozenset({Stage.DONE, Stage.CANCELLED, Stage.FAILED})
# Where an operation holds the right to change the placement.
CHANGING = frozenset(
    {
        Stage.FILLING,
        Stage.JOINING,
        Stage.MOVING,
        Stage.PUBLISHING,
        Stage.SWITCHING,
        Stage.DRAINING,
        Stage.ENDING,
        Stage.UNDOING,
    }
)
CANCELLABLE = frozenset(stage for stage, edges in TRANSITIONS.items() if "undo" in edges)


def advance(stage: Stage, event: str) -> Stage:
    """Take one edge of `TRANSITIONS`; `GenerationError` naming stage and event for any other."""
    following = TRANSITIONS[stage].get(event)
    if following is None:
        raise GenerationError(f"an operation that is {stage} allows no {event!r}")
    return following


@dataclass(frozen=True)
class ByCounts:
    """Copies wanted in all by (layer, expert); experts that are not named keep what they have."""

    counts: Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class ByHomes:
    """A whole plan: by layer, (expert, rank) pairs."""

    homes: Mapping[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, eq=False)
class ByLoads:
    """What the solver makes of a demand [L, E]."""

    loads_LE: Loads


Target = ByCounts | ByHomes | ByLoads


@dataclass(frozen=True)
class Wave:
    """One generation on the way: what it holds, and whether it begins an epoch."""

    occupancy: Occupancy
    new_epoch: bool = False


@dataclass(frozen=True)
class Passed:
    """An edge that an operation took: the `number`th, to `stage`, `at` seconds of the controller's wall clock."""

    number: int
    event: str
    stage: Stage
    at: float
    wave: int = 0


@dataclass(frozen=True)
class Operation:
    """`ranks` are those that come or go; a shrink leaves at least `at_least`. `candidate` is the placement of wave `at`
    of `plan` (from 0).

    `bad` are sources that gave wrong or no parameters, as (rank, layer, pool slot, source); `undo_as` is how it ends
    after UNDOING. Times are seconds of the controller's wall clock; `pause_s` is the longest that a rank's step took
    longer at a switch. `trail` are the edges that it took, the newest last.
    """

    number: int
    kind: Kind
    asked_by: str
    why: str
    asked_at: float
    stage: Stage
    ranks: tuple[int, ...] = ()
    at_least: int = 1
    target: Target | None = None
    loads_LE: Loads | None = field(default=None, compare=False)
    plan: tuple[Wave, ...] = ()
    waves: int = 0  # of the plan, also once it is forgotten
    at: int = 0
    candidate: PlacementSnapshot | None = None
    bad: frozenset[Attempt] = frozenset()
    attempts: Mapping[str, int] = field(default_factory=dict)
    not_before: float = 0.0
    undo_as: str = ""
    refused: bool = False  # for want of machines
    reason: str = ""
    first_generation: int = 0
    last_generation: int = 0
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    pause_s: float = 0.0
    changed_at: float = 0.0
    ended_at: float = 0.0
    trail: tuple[Passed, ...] = field(default=(), compare=False)

    @property
    def ended(self) -> bool:
        return self.stage in ENDED

    @property
    def wave(self) -> Wave:
        return self.plan[self.at]

    @property
    def is_last_wave(self) -> bool:
        return self.at == len(self.plan) - 1

    def take(self, event: str, now: float, reason: str | None = None) -> Operation:
        """The operation after `event`; its attempts start anew."""
        stage = advance(self.stage, event)
        ended_at = now if stage in ENDED else self.ended_at
        number = self.trail[-1].number + 1 if self.trail else 1
        passed = Passed(number, event, stage, now, self.at + 1 if self.plan else 0)
        return replace(
            self,
            stage=stage,
            attempts={},
            not_before=0.0,
            changed_at=now,
            ended_at=ended_at,
            reason=self.reason if reason is None else reason,
            trail=(*self.trail, passed),
        )


@dataclass(frozen=True)
class ControlState:
    """What the controller must not forget. Operations in the order in which they were asked for; ended ones go to
    `history`, the newest last."""

    operations: tuple[Operation, ...] = ()
    history: tuple[Operation, ...] = ()
    next_number: int = 1
    next_rank: int = 0
    next_epoch: int = 1
    members: tuple[int, ...] = ()
    members_version: int = 0

    def find(self, number: int) -> Operation:
        """`GenerationError` for a number that was never given, or is long forgotten."""
        for operation in (*self.operations, *self.history):
            if operation.number == number:
                return operation
        raise GenerationError(f"operation {number} is not known; the next one is {self.next_number}")

    def put(self, operation: Operation) -> ControlState:
        """The state with this version of an open operation."""
        return replace(
            self,
            operations=tuple(operation if one.number == operation.number else one for one in self.operations),
        )

    def close(self, operation: Operation) -> ControlState:
        """The state with an operation that has ended in its history: who asked why, and what came of it, without whole
        placements and loads."""
        trail = operation.trail[-_TRAIL_REMEMBERED:]
        kept = replace(operation, target=None, plan=(), candidate=None, loads_LE=None, bad=frozenset(), trail=trail)
        return replace(
            self,
            operations=tuple(one for one in self.operations if one.number != operation.number),
            history=(*self.history, kept)[-HISTORY_REMEMBERED:],
        )
