"""A controller over the model of a cluster: observe, reconcile, act, as the product does it; and what must hold.

`Run.step` is one round. After each, `check` looks at what must be true at every moment, and `check_settled` at what
must be true once everything that was asked for has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ray_moe.controlplane import asking
from ray_moe.controlplane.asking import Asker
from ray_moe.controlplane.effects import Effect, Observed, Peer, PeerPhase
from ray_moe.controlplane.occupancy import Occupancy
from ray_moe.controlplane.operations import ByHomes, ControlState, Operation, Stage, Target
from ray_moe.controlplane.outstanding import candidate_in, changes, departing, ranks_of
from ray_moe.controlplane.publication import Storage
from ray_moe.controlplane.reconcile import absorb, cancel, reconcile
from ray_moe.controlplane.solve import Assignment, LayerAssignment, place
from ray_moe.identity import CheckpointVersion, GlobalRank, LogicalExpertId, PlacementVersion, ProcessGroupId
from ray_moe.placement import PlacementSnapshot
from ray_moe.topology import Domain, ProcessGroupSpec, Topology
from tests.unit.cluster_calls import EXPERT_BYTES, digest_of, node_of, slots_of
from tests.unit.cluster_model import CALM, Call, Faults, World

Homes = Mapping[int, Sequence[tuple[int, int]]]  # by layer, (expert, rank)
Slots = frozenset[tuple[int, int, int]]  # (rank, layer, pool slot)
_LEAVING = (Stage.MOVING, Stage.PUBLISHING, Stage.SWITCHING, Stage.ENDING)
_UNDONE = (Stage.UNDOING, Stage.CANCELLED, Stage.FAILED)
_ROUNDS_AT_MOST = 600


def memory_peak(operation: Operation, seen: Observed, storage: Storage) -> int:
    """Bytes of the pool slots that are resident at once at the most during the operation's current wave.

    Those of every live generation and the candidate's, each slot counted once (specification 0x08F).
    """
    slots = {
        (layer.layer, slot.destination_rank, slot.pool_slot)
        for snapshot in (*seen.live, *((operation.candidate,) if operation.candidate else ()))
        for layer in snapshot.layers
        for slot in layer.slots
    }
    return len(slots) * storage.expert_bytes


def first_placement(homes: Homes, capacity: int) -> PlacementSnapshot:
    """Generation 1 in epoch 1, verified."""
    ranks = sorted({rank for pairs in homes.values() for _, rank in pairs})
    nodes: dict[str, tuple[GlobalRank, ...]] = {}
    for rank in ranks:
        nodes[node_of(rank)] = (*nodes.get(node_of(rank), ()), GlobalRank(rank))
    layers = [
        LayerAssignment(
            layer,
            1 + max(expert for expert, _ in pairs),
            tuple((LogicalExpertId(expert), GlobalRank(rank)) for expert, rank in pairs),
        )
        for layer, pairs in homes.items()
    ]
    placed = place(
        Assignment(tuple(layers)),
        generation=1,
        version=PlacementVersion("placement-v1"),
        release_id="release-1",
        checkpoint=CheckpointVersion("checkpoint-1"),
        group=ProcessGroupSpec(ProcessGroupId("ep-group"), 1, tuple(map(GlobalRank, ranks))),
        topology=Topology("topology-v1", tuple(Domain(name, members) for name, members in nodes.items())),
        prior=None,
        capacity=capacity,
    )
    return placed.with_digests(
        {
            (layer, rank, slot.pool_slot): digest_of(layer, slot.logical_expert_id.value)
            for rank in ranks
            for layer, slot in slots_of(placed, rank)
        }
    )


class Run:
    """`control` is what the controller has saved; what it remembers besides is lost in a `crash`."""

    def __init__(
        self,
        homes: Homes,
        capacity: int,
        *,
        spare: int = 1,
        seed: int = 0,
        faults: Faults = CALM,
        final_after_steps: int = 1,
    ) -> None:
        first = first_placement(homes, capacity)
        self.world = World(first, seed, faults, final_after_steps)
        self.storage = Storage(capacity, spare, EXPERT_BYTES)
        self.control = ControlState(next_rank=1 + max(ranks_of(first)), next_epoch=2)
        self.seen_stages: dict[int, list[Stage]] = {}  # by operation, each once in a row
        self.reasons: dict[int, list[str]] = {}
        self.seen_members: list[tuple[int, ...]] = []
        self.broken = False  # a serving rank died: nothing is changed any more
        self._forget()
        self._figure: tuple[tuple[int, int], Slots, int] = ((0, 0), frozenset(), 0)

    def _forget(self) -> None:
        self.running: dict[Effect, Call] = {}
        self._said: dict[int, Peer] = {}
        self._asked: dict[int, Peer] = {}
        self._lost: set[int] = set()

    # -- what is asked for

    def rebalance(self, target: Target | Homes) -> int:
        wanted = ByHomes({at: tuple(pairs) for at, pairs in target.items()}) if isinstance(target, Mapping) else target
        return self._asked_for(asking.rebalance(self.control, self._asker, wanted))

    def scale(self, wanted: int, bounds: tuple[int, int] = (1, 8), homes: Homes | None = None) -> int:
        """`homes`: where everything shall live once the ranks are there."""
        control, operation = asking.scale(self.control, self._asker, self.serving, wanted, bounds)
        assert operation is not None
        return self._asked_for((control, operation), homes)

    def drain(self, *ranks: int, fewest: int = 1, homes: Homes | None = None) -> int:
        return self._asked_for(asking.drain(self.control, self._asker, self.serving, ranks, fewest), homes)

    def cancel(self, number: int) -> None:
        self._save(cancel(self.control, number, "somebody", self.world.now))

    def _asked_for(self, asked: tuple[ControlState, Operation], homes: Homes | None = None) -> int:
        control, operation = asked
        if homes is not None:
            target = ByHomes({at: tuple(pairs) for at, pairs in homes.items()})
            control = control.put(replace(operation, target=target))
        self._save(control)
        return operation.number

    @property
    def _asker(self) -> Asker:
        return Asker("somebody", "a test", self.world.now)

    @property
    def serving(self) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, actor in self.world.actors.items() if actor.serves))

    @property
    def expected(self) -> tuple[int, ...]:
        """The ranks once everything that was asked for is done."""
        return asking.expected_ranks(self.control, self.serving)

    @property
    def coming(self) -> list[int]:
        """Actors that no generation knows yet."""
        known = {rank for snapshot in self.world.registry.live() for rank in ranks_of(snapshot)}
        return sorted(set(self.world.actors) - known)

    # -- rounds

    def step(self) -> None:
        """The world goes on, then the controller: takes in what has ended, looks, decides, saves, begins."""
        self.begin(self.decide_next())

    def decide_next(self) -> tuple[Effect, ...]:
        """A round up to what is to be begun."""
        self.world.tick()
        self.check()
        self.absorb()
        wanted = self.decide()
        self.check()
        return wanted

    def absorb(self) -> None:
        for effect, call in [(effect, call) for effect, call in self.running.items() if call.ended]:
            del self.running[effect]
            self._save(absorb(self.control, effect, call.failure, call.outcomes, self.world.now))

    def decide(self) -> tuple[Effect, ...]:
        seen = self._look()
        if seen is None:
            return ()
        control, wanted = reconcile(self.control, seen, self.storage, self.world.now)
        again, same = reconcile(control, seen, self.storage, self.world.now)
        assert again is control and same == wanted, "asked again it says something else"
        self._save(control)
        return wanted

    def decide_at(self, now: float) -> tuple[Effect, ...]:
        """What would be begun at that time."""
        before, self.world.now = self.world.now, now
        wanted = self.decide()
        self.world.now = before
        return wanted

    def begin(self, wanted: Sequence[Effect]) -> None:
        for effect in wanted:
            if effect not in self.running:
                self.running[effect] = self.world.submit(effect)

    def crash(self) -> None:
        """The controller dies, and is started again with what it has saved."""
        self.world.forget_controller()
        self._forget()

    def _look(self) -> Observed | None:
        """Reports are what a rank said when it was asked, which may be a while ago; the registry is asked first."""
        world, live = self.world, self.world.registry.live()
        if world.chance(world.faults.late / 3):
            world.tick()
        for rank in [rank for rank in world.dead if rank not in self._lost]:
            if not world.chance(world.faults.late):
                self._lost.add(rank)
        there = (*world.actors, *(rank for rank in world.dead if rank not in self._lost))
        self.broken = self.broken or not set(ranks_of(live[-1])) <= set(there)
        for rank, actor in world.actors.items():
            self._asked.setdefault(rank, actor.report())
            if not world.chance(world.faults.late):
                self._said[rank] = self._asked.pop(rank)
        if self.broken:
            return None
        peers = {rank: self._said.get(rank, Peer(rank, PeerPhase.STARTING)) for rank in there}
        return Observed(peers, live, frozenset(self._lost))

    def _save(self, control: ControlState) -> None:
        before, self.control = self.control, control
        assert control.next_epoch >= before.next_epoch and control.next_rank >= before.next_rank
        version = before.members_version + (control.members != before.members)
        assert control.members_version == version, "a version of the members is theirs alone"
        if control.members != before.members:
            self.seen_members.append(control.members)
        for operation in (*control.history, *control.operations):
            stages = self.seen_stages.setdefault(operation.number, [])
            if not stages or stages[-1] is not operation.stage:
                stages.append(operation.stage)
            reasons = self.reasons.setdefault(operation.number, [])
            if operation.reason and operation.reason not in reasons:
                reasons.append(operation.reason)

    # -- until

    def until(self, number: int, stage: Stage) -> None:
        """Go on until the operation is in that stage, and what that takes was begun."""
        self.begin(self.come_to(number, stage))

    def come_to(self, number: int, stage: Stage) -> tuple[Effect, ...]:
        """Go on until the operation is in that stage; what is to be begun then."""
        for _ in range(_ROUNDS_AT_MOST):
            wanted = self.decide_next()
            if self.control.find(number).stage is stage:
                return wanted
            self.begin(wanted)
        raise AssertionError(f"operation {number} is {self.control.find(number)}, and does not come to {stage}")

    def until_reason(self, number: int) -> str:
        """Go on until the operation says what is wrong."""
        for _ in range(_ROUNDS_AT_MOST):
            self.step()
            if self.control.find(number).reason:
                return self.control.find(number).reason
        raise AssertionError(f"operation {number} has no reason")

    def settle(self) -> None:
        """No more faults: go on until everything that was asked for has ended, and nothing is done any more."""
        self.world.faults = replace(CALM, late=self.world.faults.late / 2)
        quiet = 0
        for _ in range(_ROUNDS_AT_MOST):
            self.step()
            busy = self.control.operations or self.running or self.world.begun or len(self.world.registry.live()) > 1
            quiet = 0 if busy else quiet + 1
            if quiet > 3 or self.broken:
                break
        else:
            raise AssertionError(f"this does not end: {self.control.operations}, {list(self.running)}")
        if not self.broken:
            self.check_settled()

    # -- what must hold

    @property
    def active(self) -> PlacementSnapshot:
        return self.world.registry.active()

    @property
    def figure(self) -> int:
        """Bytes that the wave under way, or the last one, holds resident at the most."""
        return self._figure[2]

    @property
    def changing(self) -> list[Operation]:
        return [operation for operation in self.control.operations if changes(operation)]

    def check(self) -> None:
        world, live = self.world, self.world.registry.live()
        assert len(self.changing) <= 1, "two operations change the placement"
        for snapshot in live:
            for rank in ranks_of(snapshot):
                if rank not in world.actors:  # it has left, and nobody serves what it was in, or it died
                    users = [
                        one for one in world.actors.values() if one.serves and one.generation == snapshot.generation
                    ]
                    assert rank not in world.ended or not users
                    continue
                for layer, slot in slots_of(snapshot, rank):
                    found = world.actors[rank].pool.get((layer, slot.pool_slot))
                    assert found == slot.parameter_digest, f"{snapshot.generation}: {layer} {slot} holds {found}"
        for actor in world.actors.values():
            assert actor.lived == sorted(set(actor.lived)), "an epoch or a generation comes again"
            assert actor.members <= self.control.members_version
        self._check_members()
        self._check_memory()
        open_now = sum(actor.requests for actor in world.actors.values())
        assert world.opened == world.finished + open_now + world.homeless, "a request is lost"

    def _check_members(self) -> None:
        """Serving ranks of the active group that are not leaving, all of which the controller has heard of."""
        control = self.control
        leaving = {rank for one in control.operations if one.stage in _LEAVING for rank in departing(one)}
        assert not leaving.intersection(control.members)
        for rank in control.members:
            assert rank not in self.world.actors or self.world.actors[rank].serves, f"{rank} does not serve"

    def _check_memory(self) -> None:
        """No more than the figure, but for what operations that were undone have left and may still bring."""
        if self.changing and self.changing[0].stage is not Stage.UNDOING:
            operation = self.changing[0]
            name = (operation.number, operation.at)
            if name != self._figure[0]:
                seen = Observed({}, self.world.registry.live())
                named = frozenset(
                    (rank, layer, slot.pool_slot)
                    for snapshot in (*seen.live, candidate_in(operation))
                    for rank in ranks_of(snapshot)
                    for layer, slot in slots_of(snapshot, rank)
                )
                figure = memory_peak(operation, seen, self.storage)
                assert figure == len(named) * EXPERT_BYTES
                self._figure = (name, named, figure)
        if not self._figure[0][0]:
            return
        for rank, actor in self.world.actors.items():
            for slot in actor.pool:
                if (rank, *slot) not in self._figure[1]:
                    asked_for = self.control.find(actor.filled_for.get(slot, 0) or self._figure[0][0])
                    assert asked_for.stage in _UNDONE, f"{slot} of rank {rank} is beyond the figure: {asked_for}"

    def check_settled(self) -> None:
        world, active, control = self.world, self.active, self.control
        ranks = ranks_of(active)
        assert not control.operations and control.members == ranks
        assert world.registry.live() == (active,) and active.verified
        assert tuple(sorted(world.actors)) == tuple(sorted(ranks)), "a stray actor"
        assert [one.generation for one in world.published] == list(range(1, active.generation + 1))
        for rank, actor in world.actors.items():
            assert actor.serves and actor.admitting and actor.members == control.members_version
            assert actor.generation == active.generation and actor.epoch == active.group.epoch
            assert set(actor.pool) == {(layer, slot.pool_slot) for layer, slot in slots_of(active, rank)}, "orphans"
            assert not actor.filling and not actor.meeting and list(actor.leases) == [active.generation]
            assert actor.epochs == {active.group.epoch}, "an epoch that nobody needs"
        for epoch in world.groups:  # who was in an epoch served the same generations of it, in the same order
            served = [[g for e, g in actor.lived if e == epoch] for actor in world.actors.values()]
            longest = max(served, key=len)
            assert all(one == longest[: len(one)] for one in served)

    def ended(self, number: int) -> Operation:
        """The operation, which has ended."""
        operation = self.control.find(number)
        assert operation.ended, operation
        return operation

    def homes(self) -> dict[int, set[tuple[int, int]]]:
        """By layer, the (expert, rank) pairs of the active placement."""
        layers = Occupancy.of(self.active).layers
        return {layer: {(held.expert, held.rank) for held in slots} for layer, slots in layers.items()}
