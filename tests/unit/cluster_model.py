"""A pure model of the cluster that the reconciler changes: everything outside the controller, and what goes wrong.

`World` has actors with slots, epochs, leases and requests, the real registry, and calls on their way. Calls are
generators that yield where they take time; an actor begins its calls in the order in which they were made. Nothing
happens but by `tick`, and all chance is one generator's, so that a seed repeats a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ray_moe.controlplane import effects
from ray_moe.controlplane.effects import Effect, PeerPhase
from ray_moe.controlplane.fetching import FillOutcome
from ray_moe.controlplane.generations import PlacementRegistry
from ray_moe.controlplane.outstanding import ranks_of
from ray_moe.placement import Lease, PlacementSnapshot
from ray_moe.topology import ProcessGroupSpec
from tests.unit.cluster_calls import RUN, Actor, Failed, Work, slots_of

OWN = effects.Prepare | effects.End  # what the controller does itself, beside calling the actor


@dataclass
class Call:
    """One effect on its way."""

    effect: Effect
    work: Work | None = None
    unheard: bool = False
    ended: bool = False
    failure: str = ""
    outcomes: tuple[FillOutcome, ...] = ()

    def end(self, failure: str = "", outcomes: Sequence[FillOutcome] = ()) -> None:
        self.ended, self.failure, self.outcomes = True, failure, tuple(outcomes)
        if self.unheard and not failure:
            self.failure, self.outcomes = "no answer in time", ()


@dataclass
class Faults:
    """`refused` calls fail at once, `unheard` ones are taken to have failed and did all they should: probabilities.

    With `late` an actor begins none of its calls in a tick, and a report does not come with a look. `longest` are ticks
    that a call may take wherever it takes time, `join_ticks` those after which a join gives up.
    """

    refused: float = 0.0
    unheard: float = 0.0
    late: float = 0.0
    longest: int = 1
    join_ticks: int = 60


CALM = Faults()


class World:
    """`corrupt` are sources of wrong parameters: (rank, layer, pool slot), or ("checkpoint", layer, expert).

    `failing` is how many calls of a kind fail from now on, `held` are operations whose calls do not go on once begun,
    `slow` are ranks that do not come to their next boundary.
    """

    def __init__(self, first: PlacementSnapshot, seed: int, faults: Faults, final_after_steps: int) -> None:
        self.rng, self.faults, self.now = Random(seed), faults, 1000.0
        self.registry = PlacementRegistry(final_after_steps=final_after_steps)
        self.registry.publish(first)
        self.published = [first]
        self.groups: dict[int, ProcessGroupSpec] = {first.group.epoch: first.group}
        self.actors: dict[int, Actor] = {}
        self.dead: set[int] = set()  # and the controller that made them is still there
        self.ended: set[int] = set()
        self.begun: list[Call] = []
        self.own: deque[Call] = deque()
        self.to_registry: deque[Call] = deque()
        self.corrupt: set[tuple[Any, int, int]] = set()
        self.failing: dict[type, int] = {}
        self.held: set[int] = set()
        self.slow: set[int] = set()
        self.returning: list[Lease] = []
        self.told: tuple[int, tuple[int, ...]] = (0, ranks_of(first))  # the members that clients know
        self.opened = self.finished = self.homeless = 0  # requests
        for rank in ranks_of(first):
            actor = self.actors[rank] = Actor(rank, PeerPhase.LOADED, epochs={first.group.epoch})
            for layer, slot in slots_of(first, rank):
                actor.pool[layer, slot.pool_slot] = slot.parameter_digest
            self.take_lease(actor)
            self.serve(actor, first.generation)

    # -- time

    def tick(self) -> None:
        """A moment: calls begin and go on, engines step, clients come and go."""
        self.now += self.rng.uniform(0.2, 1.0)
        while self.own:
            self._begin(self.own.popleft())
        for queue in (self.to_registry, *(actor.calls for actor in self.actors.values())):
            if not self.chance(self.faults.late):
                while queue:
                    self._begin(queue.popleft())
        for call in list(self.begun):
            if not call.ended and getattr(call.effect, "operation", 0) not in self.held:
                self._go_on(call)
        self.begun = [call for call in self.begun if not call.ended]
        self._meet()
        while self.returning:
            self.registry.release(self.returning.pop())
        self._step_engines()
        self._serve_clients()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def submit(self, effect: Effect) -> Call:
        """Give an effect to the actor whose it is."""
        call = Call(effect)
        if isinstance(effect, OWN):
            self.own.append(call)
        elif isinstance(effect, effects.Publish | effects.Retire):
            self.to_registry.append(call)
        elif effect.rank in self.actors:
            self.actors[effect.rank].calls.append(call)
        else:
            assert effect.rank in self.dead, f"there is nobody for {effect}"
            call.end(f"rank {effect.rank} died")
        return call

    def forget_controller(self) -> None:
        """It died: what it does itself stops; the calls that actors have go on, and nobody hears of their end."""
        self.own.clear()
        self.begun = [call for call in self.begun if not isinstance(call.effect, OWN)]
        self.dead.clear()

    def kill(self, rank: int) -> None:
        """The actor's process is gone."""
        actor = self.actors.pop(rank)
        for call in (*actor.calls, *self.begun):
            if getattr(call.effect, "rank", None) == rank and not isinstance(call.effect, effects.End):
                call.end(f"rank {rank} died")
        self.finished += actor.requests
        for lease in actor.leases.values():
            self.registry.release(lease)

    def pause(self) -> Generator[None, None, None]:
        for _ in range(max(self.rng.randint(0, self.faults.longest), bool(self.held))):
            yield

    def _begin(self, call: Call) -> None:
        kind = type(call.effect)
        fails = self.failing.get(kind, 0) > 0
        if fails or self.chance(self.faults.refused):
            self.failing[kind] = self.failing.get(kind, 0) - fails
            call.end(f"{kind.__name__} was refused")
            return
        call.unheard = self.chance(self.faults.unheard)
        call.work = RUN[type(call.effect)](self, call.effect)
        self._go_on(call)
        if not call.ended:
            self.begun.append(call)

    def _go_on(self, call: Call) -> None:
        assert call.work is not None
        try:
            next(call.work)
        except StopIteration as done:
            call.end(outcomes=done.value)
        except Failed as error:
            call.end(str(error))

    def _meet(self) -> None:
        for epoch, group in self.groups.items():
            members = [self.actors[rank.value] for rank in group.peers if rank.value in self.actors]
            if len(members) == len(group) and all(epoch in actor.meeting | actor.epochs for actor in members):
                for actor in members:
                    if epoch in actor.meeting:
                        actor.meeting.remove(epoch)
                        actor.epochs.add(epoch)

    # -- engines and clients

    def _step_engines(self) -> None:
        """One agreed step in every epoch. Each member takes an agreed boundary when it comes to it, all at the same
        step; who has served already never waits for somebody who has not begun."""
        for epoch in sorted({actor.epoch for actor in self.actors.values() if actor.serves}):
            group = [self.actors.get(rank.value) for rank in self.groups[epoch].peers]
            here = [actor for actor in group if actor is not None and actor.serves and actor.epoch == epoch]
            waited_for = [actor for actor in group if actor is not None and actor not in here]
            if len(here) == len(group) and not any(actor.boundary for actor in here):
                agreed, step = min(actor.newest for actor in here), 1 + max(actor.step for actor in here)
                for actor in here:
                    actor.step, actor.boundary = step, agreed * (agreed > actor.generation)
            elif len(here) + len(waited_for) == len(group) and not any(actor.boundary for actor in here):
                new = all(len(actor.lived) == 1 for actor in here)
                assert new or all(actor.boundary for actor in waited_for), f"epoch {epoch} waits for its members"
        for actor in self.actors.values():
            if actor.boundary and actor.rank not in self.slow and not self.chance(self.faults.late / 2):
                generation, actor.boundary = actor.boundary, 0
                self._switch(actor, generation)

    def _switch(self, actor: Actor, generation: int) -> None:
        for old in [old for old in actor.staged if old < generation]:
            del actor.staged[old]
            self.returning.append(actor.leases.pop(old))
        if actor.departs == generation:
            assert not actor.requests, f"rank {actor.rank} leaves {actor.requests} requests behind"
            actor.phase = PeerPhase.LEFT
        else:
            self.serve(actor, generation)

    def serve(self, actor: Actor, generation: int) -> None:
        actor.phase = PeerPhase.SERVING
        actor.lived.append((actor.staged[generation], generation))
        assert actor.epoch in actor.epochs, f"rank {actor.rank} serves epoch {actor.epoch}, which it has not joined"

    def take_lease(self, actor: Actor) -> None:
        snapshot = self.registry.active()
        if snapshot.group.epoch not in actor.epochs:
            raise Failed(f"rank {actor.rank} has no seat in epoch {snapshot.group.epoch}")
        actor.leases[snapshot.generation] = self.registry.acquire(f"rank-{actor.rank}")
        actor.staged[snapshot.generation] = snapshot.group.epoch

    def _serve_clients(self) -> None:
        if self.chance(0.4):
            self.opened += 1
            self.homeless += 1
        for _ in range(self.homeless):
            actor = self.actors.get(self.rng.choice(self.told[1]))
            if actor is not None and actor.serves and actor.admitting:
                actor.requests += 1
                self.homeless -= 1
        for actor in self.actors.values():
            if actor.serves and actor.requests and self.chance(0.3):
                actor.requests -= 1
                self.finished += 1
