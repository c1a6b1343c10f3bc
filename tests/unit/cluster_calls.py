"""What a model of an expert actor does with each effect, step by step; see `tests.unit.cluster_model`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray_moe.controlplane import effects
from ray_moe.controlplane.effects import Peer, PeerPhase
from ray_moe.controlplane.fetching import Fault, FillOrder, FillOutcome, FromPeer
from ray_moe.identity import GlobalRank
from ray_moe.placement import Lease, PlacementSnapshot, Slot

if TYPE_CHECKING:
    from tests.unit.cluster_model import Call, World

EXPERT_BYTES = 100
Work = Generator[None, None, Sequence[FillOutcome]]


class Failed(Exception):
    """A call ends with an error."""


def digest_of(layer: int, expert: int) -> str:
    return f"layer-{layer}-expert-{expert}"


def node_of(rank: int) -> str:
    return f"node-{rank % 2}"


def slots_of(snapshot: PlacementSnapshot, rank: int) -> Iterator[tuple[int, Slot]]:
    """(layer, slot) of everything that a placement has on a rank."""
    for placement in snapshot.layers:
        for slot in placement.slots_of(GlobalRank(rank)):
            yield placement.layer, slot


@dataclass
class Actor:
    """One expert actor. `staged` maps generations to their epochs; `departs` is the one at which it leaves."""

    rank: int
    phase: PeerPhase = PeerPhase.STARTING
    pool: dict[tuple[int, int], str] = field(default_factory=dict)
    filling: set[tuple[int, int]] = field(default_factory=set)
    filled_for: dict[tuple[int, int], int] = field(default_factory=dict)  # which operation asked for what is resident
    epochs: set[int] = field(default_factory=set)
    meeting: set[int] = field(default_factory=set)
    staged: dict[int, int] = field(default_factory=dict)
    departs: int = -1
    boundary: int = 0  # the generation that all have agreed to take, until this one does
    leases: dict[int, Lease] = field(default_factory=dict)
    lived: list[tuple[int, int]] = field(default_factory=list)  # (epoch, generation), in the order in which it served
    step: int = -1
    admitting: bool = True
    requests: int = 0
    members: int = 0
    calls: deque[Call] = field(default_factory=deque)  # not begun yet

    @property
    def newest(self) -> int:
        return max(self.staged, default=-1)

    @property
    def epoch(self) -> int:
        return self.lived[-1][0] if self.lived else -1

    @property
    def generation(self) -> int:
        return self.lived[-1][1] if self.lived else -1

    @property
    def serves(self) -> bool:
        return self.phase is PeerPhase.SERVING

    def report(self) -> Peer:
        if self.phase is PeerPhase.STARTING:
            return Peer(self.rank, self.phase)
        return Peer(
            self.rank,
            self.phase,
            node_of(self.rank),
            frozenset(self.epochs),
            self.newest,
            self.generation,
            self.step,
            self.admitting,
            self.requests,
            self.members,
            slots=dict(self.pool),
            pauses={self.generation: 0.001 * self.generation},
        )


# -- Slots


def fill(world: World, effect: effects.Fill) -> Work:
    """Takes the slots that are free at once, then fills one after the other; refuses the others."""
    actor = world.actors[effect.rank]
    found: dict[FillOrder, FillOutcome] = {}
    mine: list[FillOrder] = []
    for order in effect.orders:
        slot = (order.layer, order.pool_slot)
        if slot in actor.filling or actor.pool.get(slot, order.digest) != order.digest:
            found[order] = FillOutcome(order, None, 0, 0.0, f"slot {slot} is not free", Fault.SLOT)
        elif slot in actor.pool:
            found[order] = FillOutcome(order, order.digest, 0, 0.0)
        else:
            actor.filling.add(slot)
            mine.append(order)
    for order in mine:
        yield from world.pause()
        found[order] = _copy(world, actor, order, effect.operation)
    actor.filling.difference_update((order.layer, order.pool_slot) for order in mine)
    return [found[order] for order in effect.orders]


def _copy(world: World, actor: Actor, order: FillOrder, operation: int) -> FillOutcome:
    slot, source = (order.layer, order.pool_slot), order.source
    at: tuple[Any, int, int] = ("checkpoint", order.layer, order.expert)
    arrived = digest_of(order.layer, order.expert)
    if isinstance(source, FromPeer):
        at = (source.rank, order.layer, source.pool_slot)
        giver = world.actors.get(source.rank)
        arrived = giver.pool.get((order.layer, source.pool_slot), "") if giver is not None else ""
    if at in world.corrupt:
        arrived = "something else"
    if arrived != order.digest:
        return FillOutcome(order, None, 0, 0.0, f"{source} gave {arrived or 'nothing'}", Fault.SOURCE)
    assert slot not in actor.pool, f"slot {slot} of rank {actor.rank} is filled while it is resident"
    actor.pool[slot], actor.filled_for[slot] = arrived, operation
    return FillOutcome(order, arrived, EXPERT_BYTES, 0.1)


def free(world: World, effect: effects.Free) -> Work:
    yield from ()
    for slot in effect.slots:
        world.actors[effect.rank].pool.pop(slot, None)
    return ()


# -- Life of an actor


def prepare(world: World, effect: effects.Prepare) -> Work:
    rank = effect.rank
    yield from world.pause()  # room is reserved
    if rank in world.dead:
        raise Failed(f"rank {rank} died")
    actor = world.actors.setdefault(rank, Actor(rank))
    yield from world.pause()
    if world.actors.get(rank) is not actor:
        raise Failed(f"rank {rank} died")
    if actor.phase is PeerPhase.STARTING:
        actor.phase = PeerPhase.LOADED
    return ()


def start(world: World, effect: effects.Start) -> Work:
    actor = world.actors[effect.rank]
    yield from world.pause()
    if actor.phase is PeerPhase.LOADED:
        world.take_lease(actor)
        world.serve(actor, actor.newest)
    return ()


def end(world: World, effect: effects.End) -> Work:
    actor = world.actors.get(effect.rank)
    yield from world.pause()
    if actor is not None and world.actors.get(effect.rank) is actor:
        others = [one for one in world.actors.values() if one.serves]
        assert not actor.serves and not actor.requests, f"rank {actor.rank} serves, and is ended"
        assert all(GlobalRank(actor.rank) not in world.groups[one.epoch] for one in others)
        world.kill(actor.rank)
        world.ended.add(actor.rank)
    return ()


# -- Epochs and generations


def join(world: World, effect: effects.Join) -> Work:
    """Waits until all members wait; `World.tick` lets them in together."""
    actor, epoch = world.actors[effect.rank], effect.group.epoch
    assert world.groups.setdefault(epoch, effect.group) == effect.group, f"epoch {epoch} has two groups"
    if epoch in actor.epochs:
        return ()
    actor.meeting.add(epoch)
    for _ in range(world.faults.join_ticks):
        yield
        if epoch not in actor.meeting:
            return ()
    actor.meeting.discard(epoch)
    raise Failed(f"the members of epoch {epoch} do not meet")


def close_epoch(world: World, effect: effects.CloseEpoch) -> Work:
    yield from ()
    actor = world.actors[effect.rank]
    if effect.epoch not in (actor.epoch, *actor.staged.values()):
        actor.epochs.discard(effect.epoch)
    return ()


def publish(world: World, effect: effects.Publish) -> Work:
    if effect.snapshot.digest not in {known.digest for known in world.registry.live()}:
        world.registry.publish(effect.snapshot)  # which refuses what is not verified, or out of order
        world.published.append(effect.snapshot)
    yield from world.pause()
    return ()


def retire(world: World, effect: effects.Retire) -> Work:
    yield from ()
    world.registry.committed_step(effect.committed_step)
    for status in world.registry.status():
        if status.generation < effect.through and status.held:
            world.registry.release_hold(status.generation)
    for generation in world.registry.retirable():
        world.registry.retire(generation)
    return ()


def stage(world: World, effect: effects.Stage) -> Work:
    actor = world.actors[effect.rank]
    yield from world.pause()
    if actor.newest < effect.generation:
        world.take_lease(actor)
        actor.epochs = {epoch for epoch in actor.epochs if epoch >= actor.epoch}
    return ()


def depart(world: World, effect: effects.Depart) -> Work:
    yield from ()
    actor = world.actors[effect.rank]
    if actor.newest < effect.generation:
        actor.staged[effect.generation], actor.departs = effect.epoch, effect.generation
    return ()


# -- Requests


def hand_over(world: World, effect: effects.HandOver) -> Work:
    actor = world.actors[effect.rank]
    assert effect.to and effect.rank not in effect.to
    actor.admitting = False
    while actor.requests:
        yield from world.pause()
        takers = [world.actors[rank] for rank in effect.to if rank in world.actors and world.actors[rank].admitting]
        if actor.requests:
            actor.requests -= 1
            if takers and world.chance(0.8):
                world.rng.choice(takers).requests += 1
            else:
                world.homeless += 1  # its client submits it again
    return ()


def readmit(world: World, effect: effects.Readmit) -> Work:
    yield from ()
    world.actors[effect.rank].admitting = True
    return ()


def announce(world: World, effect: effects.Announce) -> Work:
    yield from ()
    actor = world.actors[effect.rank]
    actor.members = max(actor.members, effect.version)
    world.told = max(world.told, (effect.version, effect.members))
    return ()


RUN: dict[type, Callable[[World, Any], Work]] = {
    effects.Prepare: prepare,
    effects.Fill: fill,
    effects.Join: join,
    effects.CloseEpoch: close_epoch,
    effects.HandOver: hand_over,
    effects.Readmit: readmit,
    effects.Publish: publish,
    effects.Start: start,
    effects.Stage: stage,
    effects.Depart: depart,
    effects.Announce: announce,
    effects.Retire: retire,
    effects.Free: free,
    effects.End: end,
}
