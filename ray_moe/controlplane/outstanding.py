"""Which effects a state still asks for, given what was seen. Pure; see `ray_moe.controlplane.reconcile`.

Reports may be old, and a rank begins what it is asked in the order in which it was asked. So a slot is filled only once
it was seen free: a `Free` that an old report asks for again comes before the `Fill`, and never meets what that brought.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ray_moe.controlplane.effects import (
    Announce,
    CloseEpoch,
    Depart,
    Effect,
    End,
    Fill,
    Free,
    HandOver,
    Join,
    Observed,
    Peer,
    PeerPhase,
    Prepare,
    Publish,
    Readmit,
    Retire,
    Start,
)
from ray_moe.controlplane.effects import Stage as StageLease
from ray_moe.controlplane.fetching import FillOrder, orders, wanted_digests
from ray_moe.controlplane.operations import CHANGING, ControlState, Kind, Operation, Stage
from ray_moe.placement import PlacementSnapshot


def of_operation(operation: Operation, seen: Observed, state: ControlState, now: float) -> Iterator[Effect]:
    """What the operation's stage still lacks; nothing while it waits to try again."""
    if now < operation.not_before:
        return
    number, stage = operation.number, operation.stage
    if stage is Stage.PREPARING:
        for rank in operation.ranks:
            if rank not in seen.peers or seen.peers[rank].phase is PeerPhase.STARTING:
                yield Prepare(rank, number)
    elif stage is Stage.FILLING:
        yield from _fills(operation, seen)
    elif stage is Stage.JOINING:
        candidate = candidate_in(operation)
        for peer in _there(seen, ranks_of(candidate)):
            if candidate.group.epoch not in peer.epochs:
                yield Join(peer.rank, number, candidate.group, candidate.topology)
    elif stage is Stage.MOVING:
        for peer in _there(seen, operation.ranks):
            if peer.admitting or peer.requests:
                yield HandOver(peer.rank, number, state.members)
    elif stage is Stage.PUBLISHING:
        candidate = candidate_in(operation)
        if seen.active.generation < candidate.generation:
            yield Publish(number, candidate.generation, candidate)
    elif stage is Stage.SWITCHING:
        yield from _switch_effects(operation, seen)
    elif stage is Stage.ENDING:
        for peer in _there(seen, operation.ranks):
            yield End(peer.rank, number)
    elif stage is Stage.UNDOING and operation.kind is Kind.GROW:
        for peer in _there(seen, operation.ranks):
            if peer.rank not in ranks_of(seen.active):
                yield End(peer.rank, number)


def _fills(operation: Operation, seen: Observed) -> Iterator[Effect]:
    """One `Fill` per rank; a slot that holds something else is freed first (`orphans`)."""
    if unheard(seen, operation):
        return
    there = resident(seen)
    by_rank: dict[int, list[FillOrder]] = {}
    for order in fill_orders(operation, seen):
        if order.digest is None or (order.rank, order.layer, order.pool_slot) not in there:
            by_rank.setdefault(order.rank, []).append(order)
    for peer in _there(seen, by_rank):
        yield Fill(peer.rank, operation.number, tuple(by_rank[peer.rank]))


def _switch_effects(operation: Operation, seen: Observed) -> Iterator[Effect]:
    """Ranks that have come start first: from the step on at which the others switch, they wait for these."""
    candidate = candidate_in(operation)
    number, generation = operation.number, candidate.generation
    members = _there(seen, ranks_of(candidate))
    if any(peer.phase is not PeerPhase.SERVING for peer in members):
        yield from (Start(peer.rank, number, generation) for peer in members if peer.phase is PeerPhase.LOADED)
        return
    for peer in members:
        if peer.staged < generation:
            yield StageLease(peer.rank, number, generation)
    for peer in _there(seen, departing(operation)):
        if peer.staged < generation:
            yield Depart(peer.rank, number, generation, candidate.group.epoch)


def upkeep(state: ControlState, seen: Observed) -> Iterator[Effect]:
    """What holds whatever is under way: clients know the members, nothing stays that nobody needs."""
    if not seen.live:
        return
    if len(seen.live) > 1:
        needed = any(one.stage in (Stage.QUEUED, Stage.DRAINING) for one in state.operations)
        yield Retire(seen.active.generation if needed else 0, _committed(seen))
    for rank in _strays(state, seen):
        yield End(rank)
    unused = orphans(state, seen)
    wanted = {one.candidate.group.epoch for one in state.operations if one.candidate and one.stage in CHANGING}
    for rank, peer in seen.peers.items():
        if peer.phase is PeerPhase.SERVING:
            if peer.members < state.members_version:
                yield Announce(rank, state.members_version, state.members)
            if rank in state.members and not peer.admitting:
                yield Readmit(rank)
        for epoch in sorted(peer.epochs - wanted - {snapshot.group.epoch for snapshot in seen.live}):
            yield CloseEpoch(rank, epoch)
        if rank in unused:
            yield Free(rank, unused[rank])


def orphans(state: ControlState, seen: Observed) -> dict[int, tuple[tuple[int, int], ...]]:
    """By rank, resident slots that no live generation refers to, and none that is being made either; or it does, but
    wants something else in it: a fill that was given up may end late."""
    used = {
        (slot.destination_rank.value, placement.layer, slot.pool_slot)
        for snapshot in seen.live
        for placement in snapshot.layers
        for slot in placement.slots
    }
    wanted: dict[tuple[int, int, int], str] = {}
    for operation in state.operations:
        if operation.candidate is not None and operation.stage is not Stage.UNDOING:
            wanted |= wanted_digests(operation.candidate, seen.active)
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for rank, peer in seen.peers.items():
        unused = []
        for slot, digest in peer.slots.items():
            where = (rank, *slot)
            if where not in used and wanted.get(where) not in (digest, ""):
                unused.append(slot)
        if unused:
            found[rank] = tuple(sorted(unused))
    return found


# -- Details


def _there(seen: Observed, ranks: Iterable[int]) -> list[Peer]:
    """Those of `ranks` that exist."""
    return [seen.peers[rank] for rank in ranks if rank in seen.peers]


def _strays(state: ControlState, seen: Observed) -> tuple[int, ...]:
    """Actors of no live group that no open operation brings in or takes out: a cancelled grow can leave one."""
    needed = {rank for snapshot in seen.live for rank in ranks_of(snapshot)}
    needed |= {rank for operation in state.operations for rank in operation.ranks}
    return tuple(rank for rank in seen.peers if rank not in needed)


def _committed(seen: Observed) -> int:
    """The last step that all serving ranks have done."""
    steps = [peer.committed_step for peer in seen.peers.values() if peer.phase is PeerPhase.SERVING]
    return min(steps, default=-1)


def unheard(seen: Observed, operation: Operation) -> bool:
    """Whether a rank has yet to say what it holds: after a restart nothing is known before it has."""
    ranks = (*ranks_of(seen.active), *operation.ranks)
    return any(peer.phase is PeerPhase.STARTING for peer in _there(seen, ranks))


def fill_orders(operation: Operation, seen: Observed) -> tuple[FillOrder, ...]:
    """What the current wave still lacks, with a source for each. `PlacementError` where no source is left."""
    return orders(candidate_in(operation), seen.active, resident(seen), seen.lost, operation.bad)


def resident(seen: Observed) -> dict[tuple[int, int, int], str]:
    """Digest by (rank, layer, pool slot), as the ranks say themselves."""
    return {
        (rank, layer, pool_slot): digest
        for rank, peer in seen.peers.items()
        for (layer, pool_slot), digest in peer.slots.items()
    }


def changes(operation: Operation) -> bool:
    return operation.candidate is not None and operation.stage in CHANGING


def candidate_in(operation: Operation) -> PlacementSnapshot:
    assert operation.candidate is not None
    return operation.candidate


def departing(operation: Operation) -> tuple[int, ...]:
    """Ranks that leave with the current wave."""
    return operation.ranks if operation.kind is Kind.SHRINK and operation.wave.new_epoch else ()


def ranks_of(snapshot: PlacementSnapshot) -> tuple[int, ...]:
    return tuple(rank.value for rank in snapshot.group.peers)
