"""A rollout: one candidate release on its way into service, or out of it again. Pure: no clock, no I/O.

    WAITING -> LOADING -> VERIFYING -> SHADOW -> CANARY -> ACTIVE -> RETIRING -> DONE
                  any of these but the last two -> LEAVING -> ROLLED_BACK, or FAILED before it was loaded

`advance` takes what was seen and gives the next state and what is still to be done; all of it may be done again. The
order of registry operations is `ray_moe.controlplane.releases`'s, which refuses any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ray_moe.config import ClusterConfig
from ray_moe.controlplane.promotion import PromotionPolicy, PromotionReport, evaluate
from ray_moe.controlplane.release_states import ReleaseStatus, ShadowComparison
from ray_moe.controlplane.release_states import Stage as LeavingStage
from ray_moe.controlplane.rollout_evidence import Did, Drill, evidence_of, sum_of
from ray_moe.errors import GenerationError
from ray_moe.placement import PlacementSnapshot

SHADOW_RULE, BROKEN_RULE = "equal tokens", "finite outputs: another checkpoint gives other tokens"
DRAIN_PERIOD = 2


class Phase(StrEnum):
    WAITING = "waiting"  # a placement operation is changing something
    LOADING = "loading"  # another checkpoint's trunk and experts arrive beside those that serve
    VERIFYING = "verifying"  # every rank compares the bundle with what it has
    SHADOW = "shadow"
    CANARY = "canary"
    ACTIVE = "active"  # promoted; the prior release is held as the way back
    RETIRING = "retiring"  # final; the prior release leaves
    LEAVING = "leaving"  # the candidate leaves
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"  # it never was loaded


_LEAVE = {"leave": Phase.LEAVING}
TRANSITIONS: dict[Phase, dict[str, Phase]] = {
    Phase.WAITING: {"enter": Phase.LOADING, "give_up": Phase.FAILED},
    Phase.LOADING: {"filled": Phase.VERIFYING, **_LEAVE},
    Phase.VERIFYING: {"shadow": Phase.SHADOW, **_LEAVE},
    Phase.SHADOW: {"canary": Phase.CANARY, **_LEAVE},
    Phase.CANARY: {"promote": Phase.ACTIVE, **_LEAVE},
    Phase.ACTIVE: {"finalise": Phase.RETIRING, **_LEAVE},
    Phase.RETIRING: {"done": Phase.DONE},
    Phase.LEAVING: {"rolled_back": Phase.ROLLED_BACK, "failed": Phase.FAILED},
    Phase.DONE: {},
    Phase.ROLLED_BACK: {},
    Phase.FAILED: {},
}
ENDED = frozenset({Phase.DONE, Phase.ROLLED_BACK, Phase.FAILED})


@dataclass(frozen=True)
class RolesOrder:
    """A division of steps by release ids: `main`, and `beside` it a shadow, canary or draining release ("" for none)
    on the steps that `period` divides. `fresh`: the main release has a new generation for it."""

    number: int
    main: str
    beside: str = ""
    part: str = ""
    period: int = 1
    fresh: bool = False


@dataclass(frozen=True)
class Heard:
    """One rank's own word about releases: the roles that it plans by and is ready for, its main release, open requests
    of the release beside it, checkpoints that are loaded, and by release what it did."""

    rank: int
    roles: int
    staged_roles: int
    main: str
    committed_step: int
    open_beside: int
    checkpoints: frozenset[str]
    did: Mapping[str, Did]


@dataclass(frozen=True)
class Seen:
    """One look. `missing` says which slots of the candidate are not filled yet; `settled`: nothing else changes."""

    ranks: Mapping[int, Heard]
    members: tuple[int, ...]
    releases: Mapping[str, ReleaseStatus]
    settled: bool
    missing: bool = False

    @property
    def committed_step(self) -> int:
        return min((heard.committed_step for heard in self.ranks.values()), default=-1)

    def did(self, release_id: str) -> Did:
        """All ranks together."""
        return sum_of(heard.did.get(release_id, Did()) for heard in self.ranks.values())


@dataclass(frozen=True)
class Rollout:
    """`config` is the candidate's, `model` its folder where it is another checkpoint than that of release `prior`.

    `roles` is the division in effect, or on its way. `marks` are what the candidate had done when it was promoted.
    `wanted` is set by whoever asks for the promotion, `because` by what makes it leave.
    """

    number: int
    release_id: str
    prior: str
    config: ClusterConfig
    model: str
    asked_by: str
    why: str
    asked_at: float
    share: float
    shadow_rate: float
    auto: bool
    policy: PromotionPolicy = field(default_factory=PromotionPolicy)
    phase: Phase = Phase.WAITING
    candidate: PlacementSnapshot | None = None
    checkpoint: str = ""
    roles: RolesOrder | None = None
    drill: Drill | None = None
    promoted_step: int = -1
    marks: Did = field(default_factory=Did)
    wanted: bool = False
    because: str = ""
    reason: str = ""
    changed_at: float = 0.0
    ended_at: float = 0.0

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def other_checkpoint(self) -> bool:
        return bool(self.model)

    def take(self, event: str, now: float, reason: str | None = None) -> Rollout:
        """One edge of `TRANSITIONS`; `GenerationError` for any other."""
        following = TRANSITIONS[self.phase].get(event)
        if following is None:
            raise GenerationError(f"a rollout that is {self.phase} allows no {event!r}")
        return replace(
            self,
            phase=following,
            changed_at=now,
            ended_at=now if following in ENDED else 0.0,
            reason=self.reason if reason is None else reason,
        )

    def leave(self, why: str, now: float) -> Rollout:
        """Roll back, or withdraw what never served. `GenerationError` once it is final, or over."""
        event = "give_up" if self.phase is Phase.WAITING else "leave"
        return replace(self.take(event, now, why), because=why)


# -- What is done


@dataclass(frozen=True)
class Prepare:
    """Load the candidate's checkpoint on a rank."""

    rank: int


@dataclass(frozen=True)
class Fill:
    """Read the candidate's experts into free slots of all ranks."""


@dataclass(frozen=True)
class Verify:
    """Build the bundle, verify it, let every rank observe it, load it: a mismatch is a refusal that names it."""


@dataclass(frozen=True)
class Register:
    """One operation of the registry; `report` and `compared` are what it rests on."""

    event: str
    release_id: str
    why: str = field(default="", compare=False)
    compared: ShadowComparison | None = field(default=None, compare=False)
    report: PromotionReport | None = field(default=None, compare=False)


@dataclass(frozen=True)
class StageRoles:
    rank: int
    order: RolesOrder


@dataclass(frozen=True)
class Forget:
    """Drop what a rank has compiled of a release, then tell the registry that its graphs are released."""

    release_id: str
    why: str = field(default="", compare=False)


Step = Prepare | Fill | Verify | Register | StageRoles | Forget


# -- What follows


def advance(rollout: Rollout, seen: Seen, now: float) -> tuple[Rollout, tuple[Step, ...]]:
    """The next state, and every step that it still lacks."""
    while True:
        following = _moved(rollout, seen, now)
        if following is rollout:
            return rollout, tuple(_lacking(rollout, seen))
        rollout = following


def report_on(rollout: Rollout, seen: Seen) -> PromotionReport:
    """The promotion conjunction on what the ranks have counted so far (0x0DC); after a promotion on what came since."""
    did, whole = seen.did(rollout.release_id), None
    if rollout.phase is Phase.ACTIVE:
        whole, did = did, did.since(rollout.marks, rollout.promoted_step)
    return evaluate(rollout.policy, evidence_of(rollout.release_id, did, rollout.drill, whole or did))


def _moved(rollout: Rollout, seen: Seen, now: float) -> Rollout:
    status = seen.releases.get(rollout.release_id)
    state = status.state if status is not None else ""
    if rollout.phase is Phase.WAITING:
        return rollout.take("enter", now) if seen.settled else rollout
    if rollout.phase is Phase.LOADING:
        loaded = not rollout.other_checkpoint or (rollout.candidate is not None and not seen.missing)
        return rollout.take("filled", now) if loaded and rollout.candidate is not None else rollout
    if rollout.phase is Phase.VERIFYING:
        if state != "SHADOW":
            return rollout
        return _divided(rollout.take("shadow", now), seen, "shadow", rollout.shadow_rate)
    if rollout.phase in (Phase.SHADOW, Phase.CANARY, Phase.ACTIVE) and (fault := _fault(rollout, seen)):
        return rollout.leave(f"automatic: {fault}", now)
    if rollout.phase is Phase.SHADOW and state == "CANARY":
        return _divided(rollout.take("canary", now), seen, "canary", rollout.share)
    if rollout.phase is Phase.CANARY and state == "ACTIVE":
        drains = (rollout.prior, "drain", DRAIN_PERIOD) if rollout.other_checkpoint else ("", "", 1)
        order = RolesOrder(_next_number(rollout, seen), rollout.release_id, *drains)
        promoted = replace(rollout, promoted_step=seen.committed_step, marks=seen.did(rollout.release_id), roles=order)
        return promoted.take("promote", now)
    if rollout.phase is Phase.ACTIVE:
        if _is_idle(rollout, seen):
            return replace(rollout, roles=RolesOrder(_next_number(rollout, seen), rollout.release_id))
        if status is not None and status.final:
            return rollout.take("finalise", now)
    if rollout.phase is Phase.RETIRING and _is_complete(rollout.prior, seen):
        return rollout.take("done", now)
    if rollout.phase is Phase.LEAVING:
        return _left(rollout, seen, status, now)
    return rollout


def _left(rollout: Rollout, seen: Seen, status: ReleaseStatus | None, now: float) -> Rollout:
    if status is None:  # whatever has had roles is known until it has left
        return rollout if rollout.roles is not None else rollout.take("failed", now)
    if _is_complete(rollout.release_id, seen):
        return rollout.take("rolled_back" if status.generations else "failed", now)
    prior = seen.releases.get(rollout.prior)
    replaced = status.stage not in (LeavingStage.STAYING, LeavingStage.STOPPED)
    if not replaced or prior is None or not prior.dispatching or rollout.roles is None:
        return rollout
    if rollout.roles.main == rollout.prior and rollout.roles.part in ("", "drain"):
        if _is_idle(rollout, seen):
            return replace(rollout, roles=RolesOrder(_next_number(rollout, seen), rollout.prior))
        return rollout
    # Requests that have begun under another checkpoint end there.
    drains = rollout.other_checkpoint and rollout.roles.part != "shadow"
    beside = (rollout.release_id, "drain", DRAIN_PERIOD) if drains else ("", "", 1)
    order = RolesOrder(_next_number(rollout, seen), rollout.prior, *beside, fresh=True)
    return replace(rollout, roles=order)


def _lacking(rollout: Rollout, seen: Seen) -> Iterator[Step]:
    status = seen.releases.get(rollout.release_id)
    state = status.state if status is not None else ""
    name, why = rollout.release_id, rollout.why
    if rollout.phase is Phase.LOADING:
        unloaded = [rank for rank in seen.members if not _has_checkpoint(rollout, seen, rank)]
        yield from (Prepare(rank) for rank in unloaded)
        if not unloaded:
            yield Fill()
    if rollout.phase is Phase.VERIFYING:
        yield Register("shadow", name, why) if state == "LOADED" else Verify()
    if rollout.roles is not None and not rollout.ended:
        for rank in seen.members:
            if rank in seen.ranks and seen.ranks[rank].staged_roles < rollout.roles.number:
                yield StageRoles(rank, rollout.roles)
    if rollout.phase is Phase.SHADOW and state == "SHADOW":
        compared = _comparison(rollout, seen)
        if compared.samples >= rollout.policy.shadow_samples_min:
            yield Register("canary", name, why, compared=compared)
    if rollout.phase is Phase.CANARY and state == "CANARY" and (rollout.wanted or rollout.auto):
        report = report_on(rollout, seen)
        if report.promote:
            yield Register("promote", name, why, report=report)
    if rollout.phase is Phase.ACTIVE and _settled_in(rollout, seen):
        report = report_on(rollout, seen)
        if report.promote:
            yield Register("finalise", name, "what came after the promotion holds", report=report)
    if rollout.phase is Phase.RETIRING:
        yield from _leaving(seen.releases.get(rollout.prior), "another release has followed")
    if rollout.phase is Phase.LEAVING:
        if status is not None and status.stage is LeavingStage.STAYING:
            yield Register("stop_new_dispatch", name, rollout.because)
        elif status is not None and status.stage is LeavingStage.STOPPED:
            yield Register("activate_prior", name, rollout.because)
        elif rollout.roles is None or _settled_in(rollout, seen):
            yield from _leaving(status, rollout.because)


def _leaving(status: ReleaseStatus | None, why: str) -> Iterator[Step]:
    """The rest of the printed order, once nobody holds a lease any more (0x0EA)."""
    if status is None:
        return
    if status.stage is LeavingStage.DRAINED:
        yield Forget(status.release_id, why)
    elif status.stage is LeavingStage.GRAPHS_RELEASED:
        yield Register("retire", status.release_id, why)
    elif status.stage is LeavingStage.RETIRED:
        yield Register("complete", status.release_id, why)


# -- Details


def _divided(rollout: Rollout, seen: Seen, part: str, share: float) -> Rollout:
    period = max(2 if rollout.other_checkpoint else 1, round(1 / share))
    order = RolesOrder(_next_number(rollout, seen), rollout.prior, rollout.release_id, part, period)
    return replace(rollout, roles=order)


def _next_number(rollout: Rollout, seen: Seen) -> int:
    """Above whatever any rank has heard of."""
    mine = rollout.roles.number if rollout.roles is not None else 0
    return max([mine, *(heard.staged_roles for heard in seen.ranks.values())]) + 1


def _settled_in(rollout: Rollout, seen: Seen) -> bool:
    """Every rank plans by the present roles, and no release drains beside any more."""
    order = rollout.roles
    if order is None or order.part == "drain" or not seen.members:
        return False
    return all(rank in seen.ranks and seen.ranks[rank].roles >= order.number for rank in seen.members)


def _is_idle(rollout: Rollout, seen: Seen) -> bool:
    """A release drains beside on every rank, and no request of its checkpoint is open."""
    order = rollout.roles
    if order is None or order.part != "drain":
        return False
    heard = [seen.ranks.get(rank) for rank in seen.members]
    return all(one is not None and one.roles >= order.number and not one.open_beside for one in heard)


def _has_checkpoint(rollout: Rollout, seen: Seen, rank: int) -> bool:
    if not rollout.other_checkpoint:
        return True
    return bool(rollout.checkpoint) and rank in seen.ranks and rollout.checkpoint in seen.ranks[rank].checkpoints


def _comparison(rollout: Rollout, seen: Seen) -> ShadowComparison:
    did = seen.did(rollout.release_id)
    if rollout.other_checkpoint:
        return ShadowComparison(did.compared, did.broken, BROKEN_RULE)
    return ShadowComparison(did.compared, did.differing, SHADOW_RULE)


def _fault(rollout: Rollout, seen: Seen) -> str:
    """What takes a candidate out by itself."""
    did, compared = seen.did(rollout.release_id), _comparison(rollout, seen)
    if compared.mismatches:
        return f"{compared.mismatches} of {compared.samples} shadow outputs differ by {compared.rule}"
    return f"{did.faults} units that it could not run" if did.faults else ""


def _is_complete(release_id: str, seen: Seen) -> bool:
    status = seen.releases.get(release_id)
    return status is not None and status.stage is LeavingStage.COMPLETE
