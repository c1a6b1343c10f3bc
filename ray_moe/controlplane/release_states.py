"""What a release may do, and how it leaves: two state tables and the records of both (specification 0x0EA).

    BUILT -> VERIFIED -> LOADED -> SHADOW -> CANARY -> ACTIVE -> DRAINING -> RETIRED
    stop new dispatch -> another release takes it -> drain to zero -> release graphs -> retire -> complete

A rollback takes all steps of the second line; a release that was superseded starts at its third, once the one that
follows it is final.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ray_moe.controlplane.bundles import GenerationEvidence
from ray_moe.controlplane.generations import GenerationStatus
from ray_moe.errors import ReleaseError


class State(StrEnum):
    """What a release may do."""

    BUILT = "BUILT"  # a bundle with its evidence
    VERIFIED = "VERIFIED"  # its digests were recomputed and agree
    LOADED = "LOADED"  # resident on every peer; grants no lease
    SHADOW = "SHADOW"  # leased for sampled steps whose outputs nobody sees
    CANARY = "CANARY"  # leased for a share of the steps
    ACTIVE = "ACTIVE"  # takes new dispatches
    DRAINING = "DRAINING"  # serves the leases that are out, and no other
    RETIRED = "RETIRED"  # nothing resolves through it


# state -> {event: next state}: the printed chain and no edge back. Re-activation and withdrawal are operations of their
# own, logged like any other, and no edges.
TRANSITIONS: dict[State, dict[str, State]] = {
    State.BUILT: {"verify": State.VERIFIED},
    State.VERIFIED: {"load": State.LOADED},
    State.LOADED: {"shadow": State.SHADOW},
    State.SHADOW: {"canary": State.CANARY},
    State.CANARY: {"promote": State.ACTIVE},
    State.ACTIVE: {"stop": State.DRAINING},
    State.DRAINING: {"retire": State.RETIRED},
    State.RETIRED: {},
}
LEASED = (State.SHADOW, State.CANARY, State.ACTIVE)
RESIDENT = (State.LOADED, *LEASED)


def advance(release_id: str, state: State, event: str) -> State:
    """Take one edge of `TRANSITIONS`; `ReleaseError` illegal_transition names release, state and event."""
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise ReleaseError(
            "illegal_transition", f"release {release_id} is {state}: event {event!r} is not allowed there"
        )
    return following


# -- Leaving


class Stage(StrEnum):
    """How far a release has left."""

    STAYING = "STAYING"  # it has not begun to
    STOPPED = "STOPPED"  # grants no lease; nothing else may take new dispatches yet
    REPLACED = "REPLACED"  # another release takes new dispatches, its own handles complete
    DRAINED = "DRAINED"  # no lease is out, and none can be
    GRAPHS_RELEASED = "GRAPHS_RELEASED"  # no peer has a binding of it
    RETIRED = "RETIRED"  # its slots may be freed
    COMPLETE = "COMPLETE"  # everybody has been told


# stage -> (the one event that leads on, next stage, what stands in the way of any later event). Retiring first is a
# use after free, draining before another release serves an outage.
LEAVING: dict[Stage, tuple[str, Stage, str]] = {
    Stage.STAYING: ("stop_new_dispatch", Stage.STOPPED, "not_stopped"),
    Stage.STOPPED: ("activate_prior", Stage.REPLACED, "prior_not_active"),
    Stage.REPLACED: ("drain", Stage.DRAINED, "live_handles"),  # taken when the last lease comes back
    Stage.DRAINED: ("release_graphs", Stage.GRAPHS_RELEASED, "graphs_not_released"),
    Stage.GRAPHS_RELEASED: ("retire", Stage.RETIRED, "not_retired"),
    Stage.RETIRED: ("complete", Stage.COMPLETE, "not_complete"),
}
_PAST = {event: order for order, (event, _, _) in enumerate(LEAVING.values())}


def has_happened(stage: Stage, event: str) -> bool:
    """Whether a release at `stage` is past `event`: doing it again changes nothing."""
    return list(Stage).index(stage) > _PAST[event]


def leave(release_id: str, stage: Stage, event: str, detail: str = "") -> Stage:
    """Take the one edge of `LEAVING`; `ReleaseError` names what stands in the way of an event that comes too early."""
    if has_happened(stage, event):
        return stage
    expected, following, obstacle = LEAVING[stage]
    if event != expected:
        raise ReleaseError(obstacle, f"release {release_id} is {stage}: {event} comes after {expected}{detail}")
    return following


# -- Records


@dataclass(frozen=True)
class Note:
    """Who asked for an operation, when (seconds of the caller's clock), and why."""

    who: str
    when: float
    why: str


@dataclass(frozen=True)
class ReleaseRecord:
    """One line of the registry's log. `detail` says what was found or decided.

    Nobody asks for a drain: its note is that of the operation which began it.
    """

    number: int
    operation: str
    release_id: str
    note: Note
    detail: str = ""
    generation: int | None = None
    evidence: GenerationEvidence | None = None


@dataclass(frozen=True)
class Due:
    """What a leaving release waits for: the controller does it, idempotently, and tells the registry.

    `event` is one of `LEAVING`; for drain there is nothing to do but wait for `holders`, who have the leases that are
    out. `generations` are those whose bindings, or slots, it is about.
    """

    release_id: str
    event: str
    generations: tuple[int, ...]
    holders: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShadowComparison:
    """Sampled steps that ran under both releases, and how many outputs differed by the rule that `rule` names."""

    samples: int
    mismatches: int
    rule: str


@dataclass(frozen=True)
class ReleaseStatus:
    """One release as the registry sees it.

    `dispatching`: it takes the new dispatches that name no release. `held_for`: it stays loaded as that one's way back.
    `withdrawn`: it left without ever having been active.
    """

    release_id: str
    digest: str
    state: str
    stage: Stage
    dispatching: bool
    held_for: str | None
    prior: str | None
    final: bool
    withdrawn: bool
    holders: tuple[str, ...]
    generations: tuple[GenerationStatus, ...]
