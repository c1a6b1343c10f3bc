"""What is wanted and what is seen -> what to do next (DESIGN section 6). Pure: no clock, no I/O, no memory of its own.

`reconcile` first takes in what was seen (a rank that died, a cancelled grow whose actor is gone), then moves every
operation as far as that allows, then lists the effects that are still to be done; the controller runs those that are
not running already and reports each with `absorb`. All effects are idempotent and follow from state and observation
alone, so a controller that has been restarted carries on by calling `reconcile`.

Order of one wave: fill free slots and verify them, join the next epoch where one begins, hand requests over where ranks
leave, publish, stage on every rank, switch at one agreed step; old slots are freed when the old generation has retired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ray_moe.controlplane.effects import (
    Depart,
    Effect,
    End,
    Fill,
    HandOver,
    Join,
    Observed,
    Peer,
    PeerPhase,
    Prepare,
    Publish,
    Start,
)
from ray_moe.controlplane.effects import Stage as StageLease
from ray_moe.controlplane.fetching import Fault, FillOutcome, FromCheckpoint
from ray_moe.controlplane.operations import CANCELLABLE, ControlState, Kind, Operation, Stage
from ray_moe.controlplane.outstanding import (
    candidate_in,
    changes,
    departing,
    fill_orders,
    of_operation,
    orphans,
    ranks_of,
    resident,
    unheard,
    upkeep,
)
from ray_moe.controlplane.publication import Storage, candidate_of, plan_waves, ranks_after, with_members
from ray_moe.errors import ConfigError, PlacementError
from ray_moe.topology import Topology

# An effect that fails is tried again after 0.5 s, 1 s, 2 s, ... up to 10 s; before publication an operation gives up
# after so many failures of one stage.
MAX_ATTEMPTS = 4
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0
_STAGES_OF: dict[type, frozenset[Stage]] = {
    Prepare: frozenset({Stage.PREPARING}),
    Fill: frozenset({Stage.FILLING}),
    Join: frozenset({Stage.JOINING}),
    HandOver: frozenset({Stage.MOVING}),
    Publish: frozenset({Stage.PUBLISHING}),
    Start: frozenset({Stage.SWITCHING}),
    StageLease: frozenset({Stage.SWITCHING}),
    Depart: frozenset({Stage.SWITCHING}),
    End: frozenset({Stage.ENDING, Stage.UNDOING}),
}


def reconcile(
    state: ControlState, seen: Observed, storage: Storage, now: float
) -> tuple[ControlState, tuple[Effect, ...]]:
    """The next state, and every effect that is still to be done under it. Asking again asks for the same effects.

    The state is the one that was given, itself, where nothing changes.
    """
    state = _Round(state, seen, storage, now).run()
    effects = [effect for operation in state.operations for effect in of_operation(operation, seen, state, now)]
    return state, (*effects, *upkeep(state, seen))


def absorb(
    state: ControlState,
    effect: Effect,
    failure: str,
    outcomes: Sequence[FillOutcome],
    now: float,
    *,
    refused: bool = False,
) -> ControlState:
    """Take note of how an effect ended: `failure` is empty when it did what it says. `outcomes` are a `Fill`'s.

    An effect that was `refused`, for want of machines or of a member, was not done, and is not tried again.
    """
    number = getattr(effect, "operation", 0)
    operation = next((one for one in state.operations if one.number == number), None)
    if operation is None:
        return state
    for outcome in outcomes:
        operation = _took(operation, outcome)
    failure = failure or next((outcome.error for outcome in outcomes if outcome.error), "")
    if not failure or not _is_of_now(effect, operation):
        return state.put(operation)
    name = type(effect).__name__.lower()
    count = operation.attempts.get(name, 0) + 1
    operation = replace(
        operation,
        attempts={**operation.attempts, name: count},
        not_before=now + min(_FIRST_RETRY_S * 2 ** (count - 1), _LONGEST_RETRY_S),
        # Why it is undone is what people want to know, also where that takes several attempts.
        reason=operation.reason if operation.stage is Stage.UNDOING else failure,
        refused=refused,
    )
    if isinstance(effect, Join):
        # Whoever joined in vain may still wait in that epoch: the next attempt is another one.
        state, operation = _in_another_epoch(state, operation)
    gives_up = (refused or count >= MAX_ATTEMPTS) and not isinstance(effect, Fill)  # a fill ends when its sources do
    if gives_up and operation.stage in CANCELLABLE:
        operation = replace(operation.take("undo", now), undo_as="failed")
    elif refused and operation.stage is Stage.PUBLISHING:
        operation = replace(operation.take("refused", now), undo_as="failed", refused=False)
    return state.put(operation)


def cancel(state: ControlState, number: int, who: str, now: float) -> ControlState:
    """Undo an operation that has not published; between two waves it stops there. `ConfigError` names its stage."""
    operation = state.find(number)
    if operation.stage not in CANCELLABLE:
        raise ConfigError(
            f"operation {number} is {operation.stage}: only what is {', '.join(sorted(CANCELLABLE))} can be cancelled"
        )
    undone = operation.take("undo", now, reason=f"cancelled by {who}")
    return state.put(replace(undone, undo_as="cancelled"))


# -- Taking in what was seen, and moving on


class _Round:
    """One call of `reconcile`: the state as it changes, and what was seen."""

    def __init__(self, state: ControlState, seen: Observed, storage: Storage, now: float) -> None:
        self.state, self.seen, self.storage, self.now = state, seen, storage, now

    def run(self) -> ControlState:
        for operation in self.state.operations:
            self._bury(operation)
        before = None
        while before is not self.state:  # what one ends, another may wait for
            before = self.state
            for operation in self.state.operations:
                self._advance(operation.number)
        self._settle_members()
        return self.state

    def _bury(self, operation: Operation) -> None:
        """A grow ends with a rank that died on the way; after a restart that is one which is not there any more."""
        if operation.kind is not Kind.GROW or operation.stage not in CANCELLABLE:
            return
        dead = self.seen.lost.intersection(operation.ranks)
        if operation.stage is not Stage.PREPARING:
            dead = dead.union(self._unborn(operation)).difference(self.seen.peers)
        if dead:
            self._undo(operation, "failed", f"rank {min(dead)} died before it served")

    def _advance(self, number: int) -> None:
        """Take every edge that what was seen allows."""
        steps: dict[Stage, Callable[[Operation], bool]] = {
            Stage.PREPARING: self._prepare,
            Stage.QUEUED: self._enter,
            Stage.FILLING: self._fill,
            Stage.JOINING: self._join,
            Stage.MOVING: self._hand_over,
            Stage.PUBLISHING: self._publish,
            Stage.SWITCHING: self._switch,
            Stage.DRAINING: self._drain,
            Stage.ENDING: self._end,
            Stage.UNDOING: self._give_back,
        }
        operation = self.state.find(number)
        while not operation.ended and steps[operation.stage](operation):
            operation = self.state.find(number)
        if operation.ended:
            self.state = self.state.close(operation)

    # Each of these says whether it took an edge.

    def _prepare(self, operation: Operation) -> bool:
        if any(self._phase(rank) is not PeerPhase.LOADED for rank in operation.ranks):
            return False
        return self._take(operation, "prepared")

    def _enter(self, operation: Operation) -> bool:
        """Begin to change the placement, when nobody else does and older generations are out of the way."""
        ready = (one for one in self.state.operations if one.stage is Stage.QUEUED and not self._waits(one))
        first = next(ready, None)
        busy = any(changes(one) for one in self.state.operations)
        if busy or first is None or first.number != operation.number or not self._is_settled(operation):
            return False
        active = self.seen.active
        if operation.kind is Kind.SHRINK and (refusal := self._refusal(operation)):
            return self._undo(operation, "failed", refusal)
        try:
            topology = self._topology((*ranks_of(active), *operation.ranks))
            plan = plan_waves(operation, active, self.storage, topology)
        except (PlacementError, ConfigError) as error:
            return self._undo(operation, "failed", str(error))
        if not plan:
            return self._take(operation, "done", "everything is in place already")
        return self._begin_wave(replace(operation, plan=plan, waves=len(plan), first_generation=active.generation))

    def _waits(self, operation: Operation) -> bool:
        """A shrink that counts on ranks which an operation before it has yet to bring."""
        coming = {
            rank
            for one in self.state.operations
            if one.kind is Kind.GROW and one.number < operation.number and one.stage is not Stage.UNDOING
            for rank in self._unborn(one)
        }
        if operation.kind is not Kind.SHRINK or not coming:
            return False
        left = len(ranks_after(operation, self.seen.active))
        return left < operation.at_least or not coming.isdisjoint(operation.ranks)

    def _refusal(self, operation: Operation) -> str:
        """Why a shrink is not possible any more: what it counted on has not come."""
        group = list(ranks_of(self.seen.active))
        strangers = sorted(set(operation.ranks).difference(group))
        if strangers:
            return f"rank {strangers[0]} is none of the group's {group}"
        left = len(group) - len(operation.ranks)
        if left < operation.at_least:
            return f"at least {operation.at_least} of the ranks {group} must stay, {left} would"
        return ""

    def _begin_wave(self, operation: Operation) -> bool:
        operation = self._with_candidate(operation.take("enter", self.now, ""))
        self.state = self.state.put(replace(operation, bad=frozenset()))
        return True

    def _with_candidate(self, operation: Operation) -> Operation:
        active, epoch, ranks = self.seen.active, 0, ranks_of(self.seen.active)
        if operation.wave.new_epoch:
            epoch = max(self.state.next_epoch, active.group.epoch + 1)
            ranks = ranks_after(operation, active)
            self.state = replace(self.state, next_epoch=epoch + 1)
        topology = self._topology(ranks)
        candidate = candidate_of(operation.wave, active, ranks=ranks, epoch=epoch, topology=topology)
        return replace(operation, candidate=candidate)

    def _fill(self, operation: Operation) -> bool:
        if unheard(self.seen, operation):
            return False
        try:
            missing = fill_orders(operation, self.seen)
        except PlacementError as error:
            return self._undo(operation, "failed", f"{error}; {operation.reason}" if operation.reason else str(error))
        if missing:
            return False
        candidate = candidate_in(operation)
        arrived = {(layer, rank, pool): digest for (rank, layer, pool), digest in resident(self.seen).items()}
        operation = replace(operation, candidate=candidate.with_digests(arrived))
        return self._take(operation, "join" if operation.wave.new_epoch else "publish", "")

    def _join(self, operation: Operation) -> bool:
        epoch, members = candidate_in(operation).group.epoch, ranks_of(candidate_in(operation))
        if any(epoch not in self._peer(rank).epochs for rank in members):
            return False
        return self._take(operation, "move" if operation.kind is Kind.SHRINK else "publish", "")

    def _hand_over(self, operation: Operation) -> bool:
        leaving = [self._peer(rank) for rank in operation.ranks]
        if any(peer.admitting or peer.requests for peer in leaving):
            return False
        return self._take(operation, "publish", "")

    def _publish(self, operation: Operation) -> bool:
        candidate = candidate_in(operation)
        if self.seen.active.generation < candidate.generation:
            return False
        return self._take(replace(operation, last_generation=candidate.generation), "published", "")

    def _switch(self, operation: Operation) -> bool:
        candidate = candidate_in(operation)
        members = [self._peer(rank) for rank in ranks_of(candidate)]
        if any(peer.generation < candidate.generation for peer in members):
            return False
        leaving = departing(operation)
        if any(self._phase(rank) not in (PeerPhase.LEFT, None) for rank in leaving):
            return False
        pauses = [peer.pauses.get(candidate.generation, 0.0) for peer in members]
        operation = replace(operation, pause_s=max(operation.pause_s, *pauses))
        if not operation.is_last_wave:
            return self._take(operation, "next_wave", "")
        return self._take(operation, "end" if leaving else "done", "")

    def _drain(self, operation: Operation) -> bool:
        if not self._is_settled(operation):
            return False
        return self._begin_wave(replace(operation, at=operation.at + 1))

    def _end(self, operation: Operation) -> bool:
        if any(rank in self.seen.peers for rank in operation.ranks):
            return False
        return self._take(operation, "done", "")

    def _give_back(self, operation: Operation) -> bool:
        if operation.kind is Kind.GROW and any(rank in self.seen.peers for rank in self._unborn(operation)):
            return False
        if operation.kind is Kind.SHRINK and any(not self._peer(rank).admitting for rank in operation.ranks):
            return False
        return self._take(operation, operation.undo_as)

    # Details

    def _is_settled(self, operation: Operation) -> bool:
        """One generation is live, no slot is left of an earlier one, and all ranks have said so."""
        return len(self.seen.live) == 1 and not unheard(self.seen, operation) and not orphans(self.state, self.seen)

    def _settle_members(self) -> None:
        """Who takes requests: the group, without ranks that are about to leave it."""
        if not self.seen.live:
            return
        leaving = {
            rank for operation in self.state.operations if operation.stage in _LEAVING for rank in departing(operation)
        }
        members = tuple(rank for rank in ranks_of(self.seen.active) if self._serves(rank) and rank not in leaving)
        if members and members != self.state.members:
            self.state = replace(self.state, members=members, members_version=self.state.members_version + 1)

    def _serves(self, rank: int) -> bool:
        """After a restart a member is one still until it is heard: no rank goes back from serving to starting."""
        phase = self._phase(rank)
        return phase is PeerPhase.SERVING or (phase is PeerPhase.STARTING and rank in self.state.members)

    def _topology(self, ranks: Sequence[int]) -> Topology:
        nodes = {rank: peer.node for rank, peer in self.seen.peers.items()}
        return with_members(self.seen.active.topology, tuple(dict.fromkeys(ranks)), nodes)

    def _take(self, operation: Operation, event: str, reason: str | None = None) -> bool:
        self.state = self.state.put(operation.take(event, self.now, reason))
        return True

    def _undo(self, operation: Operation, undo_as: str, reason: str) -> bool:
        return self._take(replace(operation, undo_as=undo_as), "undo", reason)

    def _peer(self, rank: int) -> Peer:
        return self.seen.peers.get(rank) or Peer(rank, PeerPhase.STARTING)

    def _phase(self, rank: int) -> PeerPhase | None:
        peer = self.seen.peers.get(rank)
        return peer.phase if peer is not None else None

    def _unborn(self, operation: Operation) -> tuple[int, ...]:
        """Ranks of a grow that never came to serve."""
        return tuple(rank for rank in operation.ranks if rank not in ranks_of(self.seen.active))


_LEAVING = frozenset({Stage.MOVING, Stage.PUBLISHING, Stage.SWITCHING, Stage.ENDING})


def _took(operation: Operation, outcome: FillOutcome) -> Operation:
    if outcome.fault is Fault.SOURCE:
        return replace(operation, bad=operation.bad | {outcome.order.attempt})
    kind = "checkpoint" if isinstance(outcome.order.source, FromCheckpoint) else "peer"
    moved = {**operation.moved_bytes, kind: operation.moved_bytes.get(kind, 0) + outcome.nbytes}
    return replace(operation, moved_bytes=moved)


def _is_of_now(effect: Effect, operation: Operation) -> bool:
    """Whether an effect belongs to what the operation tries now, and not to something that it has given up since."""
    if operation.stage not in _STAGES_OF.get(type(effect), ()):
        return False
    if isinstance(effect, Join):
        return effect.group == candidate_in(operation).group
    if isinstance(effect, Start | StageLease | Depart):
        return effect.generation == candidate_in(operation).generation
    return True


def _in_another_epoch(state: ControlState, operation: Operation) -> tuple[ControlState, Operation]:
    """The same candidate in an epoch that nobody has tried to join."""
    candidate = candidate_in(operation)
    epoch = max(state.next_epoch, candidate.group.epoch + 1)
    candidate = replace(candidate, group=replace(candidate.group, epoch=epoch))
    return replace(state, next_epoch=epoch + 1), replace(operation, candidate=candidate)
