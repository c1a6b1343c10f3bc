"""The placement registry: one active generation, no lease lost, retirement only when nothing can resolve any more."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ray_moe.controlplane.generations import RETIRED_REMEMBERED, TRANSITIONS, PlacementRegistry, State, advance
from ray_moe.errors import GenerationError, RetirementRefusedError, StaleHandleError
from ray_moe.identity import (
    CheckpointVersion,
    GlobalRank,
    LogicalExpertId,
    PhysicalSlotId,
    PlacementVersion,
    ProcessGroupId,
    ReplicaId,
)
from ray_moe.placement import LayerPlacement, Lease, PlacementSnapshot, Slot
from ray_moe.topology import Domain, ProcessGroupSpec, Topology

CHECKPOINT = CheckpointVersion("checkpoint-0042")
RANK = GlobalRank(0)


def generation(number: int, *, verified: bool = True, epoch: int = 0, release_id: str = "r1") -> PlacementSnapshot:
    """Generation `number`: one expert in one slot of one layer."""
    slot = Slot(
        physical_slot_id=PhysicalSlotId("q0"),
        logical_expert_id=LogicalExpertId(0),
        replica_id=ReplicaId("e0-r0"),
        destination_rank=RANK,
        topology_domain_id="node-0",
        checkpoint_version=CHECKPOINT,
        parameter_digest="d" if verified else "",
        pool_slot=0,
    )
    return PlacementSnapshot(
        version=PlacementVersion(f"placement-v{number}"),
        generation=number,
        release_id=release_id,
        checkpoint_version=CHECKPOINT,
        group=ProcessGroupSpec(ProcessGroupId("ep-group-0"), epoch, (RANK,)),
        topology=Topology("t", (Domain("node-0", (RANK,)),)),
        layers=(LayerPlacement(0, 1, (slot,)),),
    )


def registry_of(*numbers: int, final_after_steps: int = 0) -> PlacementRegistry:
    registry = PlacementRegistry(final_after_steps=final_after_steps)
    for number in numbers:
        registry.publish(generation(number))
    return registry


def states(registry: PlacementRegistry) -> dict[int, str]:
    return {one.generation: one.state.value for one in registry.status()}


# -- The state table


@pytest.mark.parametrize(("state", "event"), list(product(State, ["supersede", "retire", "reactivate"])))
def test_only_the_two_printed_edges_exist(state: State, event: str) -> None:
    legal = {(State.ACTIVE, "supersede"): State.DRAINING, (State.DRAINING, "retire"): State.RETIRED}
    if (state, event) in legal:
        assert advance(17, state, event) is legal[state, event]
    else:
        with pytest.raises(GenerationError, match=f"generation 17 is {state.value}: event '{event}' is not allowed"):
            advance(17, state, event)
    assert TRANSITIONS.keys() == set(State)


# -- The specification's own sequences


def test_the_eight_step_fence_of_the_specification() -> None:
    registry = PlacementRegistry(final_after_steps=0)
    registry.publish(generation(17))  # 1. v17 is active
    assert states(registry) == {17: "ACTIVE"}
    handle = registry.acquire("dispatch-h17")  # 2. h17 acquires one reference
    assert registry.references(17) == 1
    registry.publish(generation(18))  # 3. v18 becomes active, 4. v17 drains
    assert states(registry) == {17: "DRAINING", 18: "ACTIVE"}
    assert registry.acquire("dispatch-h18").generation == 18
    with pytest.raises(RetirementRefusedError) as refused:  # 5. retirement is denied
        registry.retire(17)
    assert refused.value.generation == 17
    assert refused.value.holders == ("dispatch-h17",)
    pinned = registry.require_live(handle.generation)  # 6. combine uses v17 metadata, not the active entry
    assert pinned == generation(17) != registry.active()
    registry.release(handle)  # 7. the handle releases its reference
    assert registry.references(17) == 0
    assert registry.retire(17) == generation(17)  # 8. retirement is allowed
    assert states(registry) == {17: "RETIRED", 18: "ACTIVE"}
    with pytest.raises(StaleHandleError, match="generation 17 is RETIRED"):
        registry.require_live(17)


FIXTURE = json.loads((Path(__file__).parents[1] / "conformance" / "data" / "generations.json").read_text())
# The fixture's reasons as this registry words them.
REASONS = {
    "live_handles": (RetirementRefusedError, "cannot retire: held by dispatch"),
    "digest_unverified": (GenerationError, "have no verified digest"),
    "not_active": (GenerationError, "new dispatches go to"),
    "handle_released": (GenerationError, "is not out"),
    "not_draining": (GenerationError, "is ACTIVE: event 'retire' is not allowed"),
}


class Replay:
    """Plays fixture events on the product's registry; handles are leases by name."""

    def __init__(self) -> None:
        self.registry = PlacementRegistry(final_after_steps=0)
        self.leases: dict[str, Lease] = {}

    def play(self, event: dict) -> None:
        number = int(event.get("generation", "v0").rpartition("v")[2])
        match event["op"]:
            case "initial":
                self.registry.publish(generation(number))
            case "publish":
                self.registry.publish(generation(number, verified=event["all_slot_digests_verified"]))
            case "acquire":
                self.leases[event["handle"]] = self.registry.acquire(event["handle"])
            case "acquire_generation":
                self.leases[event["handle"]] = self.registry.acquire(event["handle"], number)
            case "combine":
                assert self.registry.require_live(self.leases[event["handle"]].generation).generation == number
            case "release":
                self.registry.release(self.leases[event["handle"]])
            case "retire":
                self.registry.retire(number)
            case other:
                raise AssertionError(f"unknown op {other}")


@pytest.mark.parametrize("sequence", ["placement_transition_v17", "publication_v18_to_v19"])
def test_the_fixtures_sequences_are_allowed_and_refused_as_printed(sequence: str) -> None:
    replay = Replay()
    for step in FIXTURE[sequence]:
        event, expected = step["event"], step["expected"]
        reason = expected.get("reason")
        if reason == "generation_mismatch":
            continue  # no registry operation: the handle itself refuses another generation than its own
        if expected["allowed"]:
            replay.play(event)
        else:
            error, message = REASONS[reason]
            with pytest.raises(error, match=message):
                replay.play(event)
        for name, state in expected.get("states", {}).items():
            assert states(replay.registry)[int(name.rpartition("v")[2])] == state
        for name, count in expected.get("refcount", {}).items():
            assert replay.registry.references(int(name.rpartition("v")[2])) == count


# -- Publication


def test_an_unverified_slot_is_named_and_nothing_changes() -> None:
    registry = registry_of(1)
    with pytest.raises(
        GenerationError, match="1 of 1 slots have no verified digest, the first is layer 0 slot q0 on rank 0"
    ):
        registry.publish(generation(2, verified=False))
    assert states(registry) == {1: "ACTIVE"}


@pytest.mark.parametrize("number", [1, 3, 4])
def test_a_generation_that_does_not_come_after_all_others_is_refused(number: int) -> None:
    registry = registry_of(3, 4)
    with pytest.raises(GenerationError, match=f"generation {number} cannot be published: it must be greater than 4"):
        registry.publish(generation(number))
    assert states(registry) == {3: "DRAINING", 4: "ACTIVE"}


def test_another_release_or_checkpoint_is_not_a_new_generation() -> None:
    registry = registry_of(1)
    with pytest.raises(GenerationError, match="has release_id r2, the active one r1: that takes a new release"):
        registry.publish(generation(2, release_id="r2"))
    other = CheckpointVersion("checkpoint-0043")
    layer = generation(2).layers[0]
    slots = tuple(dataclasses.replace(slot, checkpoint_version=other) for slot in layer.slots)
    changed = dataclasses.replace(
        generation(2), checkpoint_version=other, layers=(dataclasses.replace(layer, slots=slots),)
    )
    with pytest.raises(GenerationError, match="has checkpoint_version checkpoint-0043, the active one checkpoint-0042"):
        registry.publish(changed)
    assert states(registry) == {1: "ACTIVE"}


def test_a_placement_for_an_epoch_that_has_passed_is_refused() -> None:
    registry = PlacementRegistry()
    registry.publish(generation(1, epoch=2))
    with pytest.raises(GenerationError, match="is for epoch 1 of ep-group-0, which is in epoch 2 already"):
        registry.publish(generation(2, epoch=1))
    registry.publish(generation(2, epoch=3))
    assert registry.acquire("peer-0").epoch == 3


# -- Leases


def test_nothing_is_granted_before_the_first_publication() -> None:
    with pytest.raises(GenerationError, match="no placement generation has been published yet"):
        PlacementRegistry().acquire("peer-0")


def test_leases_are_unique_and_carry_generation_and_epoch() -> None:
    registry = registry_of(5)
    leases = [registry.acquire("peer-0"), registry.acquire("peer-0", 5)]
    assert [(lease.holder, lease.generation, lease.epoch) for lease in leases] == [("peer-0", 5, 0)] * 2
    assert leases[0].lease_id < leases[1].lease_id
    assert registry.holders(5) == ("peer-0", "peer-0")


@pytest.mark.parametrize("number", [1, 3])
def test_only_the_active_generation_is_leased(number: int) -> None:
    with pytest.raises(GenerationError, match=f"peer-0 asks for generation {number}, .*: new dispatches go to 2"):
        registry_of(1, 2).acquire("peer-0", number)


def test_a_lease_is_released_exactly_once_and_only_as_it_was_granted() -> None:
    registry = registry_of(1)
    lease = registry.acquire("peer-0")
    for forged in (
        dataclasses.replace(lease, lease_id=99),
        dataclasses.replace(lease, holder="peer-1"),
        dataclasses.replace(lease, generation=2),
    ):
        with pytest.raises(GenerationError, match=f"lease {forged.lease_id} of {forged.holder} .* is not out"):
            registry.release(forged)
    assert registry.references(1) == 1
    registry.release(lease)
    with pytest.raises(GenerationError, match="lease 1 of peer-0 on generation 1 is not out: it was released before"):
        registry.release(lease)
    assert registry.references(1) == 0


def test_a_dead_holders_leases_can_be_found_and_returned() -> None:
    registry = registry_of(1)
    dead = [registry.acquire("peer-1"), registry.acquire("peer-1")]
    survivor = registry.acquire("peer-0")
    registry.publish(generation(2))
    assert registry.leases_of("peer-1") == tuple(dead)
    for lease in registry.leases_of("peer-1"):
        registry.release(lease)
    assert registry.holders(1) == ("peer-0",)
    registry.release(survivor)
    assert registry.retirable() == (1,)


# -- Holds and retirement


def test_a_superseded_generation_is_held_for_final_after_steps() -> None:
    registry = registry_of(1, final_after_steps=2)
    registry.committed_step(10)
    registry.publish(generation(2))
    for step in (10, 11, 5):  # reports may come late
        registry.committed_step(step)
        with pytest.raises(RetirementRefusedError, match="the way back of a rollback until step 12 is committed"):
            registry.retire(1)
        assert registry.retirable() == ()
    assert registry.status()[0].held_until_step == 12
    registry.committed_step(12)
    assert registry.retirable() == (1,)
    assert not registry.status()[0].held
    registry.retire(1)


def test_a_hold_is_counted_from_the_step_of_publication_when_the_next_report_skips_steps() -> None:
    registry = registry_of(1, final_after_steps=2)
    registry.committed_step(10)
    registry.publish(generation(2))
    registry.committed_step(13)
    assert registry.retirable() == (1,)


def test_without_a_report_the_first_one_counts_as_the_step_of_publication() -> None:
    registry = registry_of(1, 2, final_after_steps=1)
    with pytest.raises(RetirementRefusedError, match="until the first committed step is reported"):
        registry.retire(1)
    assert (registry.status()[0].held, registry.status()[0].held_until_step) == (True, None)
    registry.committed_step(7)
    assert registry.status()[0].held_until_step == 8
    registry.committed_step(8)
    registry.retire(1)


def test_a_hold_is_given_up_at_once_when_the_slots_are_needed_but_leases_still_count() -> None:
    registry = registry_of(1, final_after_steps=100)
    lease = registry.acquire("peer-0")
    registry.publish(generation(2))
    with pytest.raises(RetirementRefusedError) as refused:
        registry.retire(1)
    assert len(refused.value.holders) == 2, "the lease and the hold"
    registry.release_hold(1)
    with pytest.raises(RetirementRefusedError) as refused:
        registry.retire(1)
    assert refused.value.holders == ("peer-0",)
    registry.release(lease)
    registry.retire(1)


def test_only_a_draining_generation_has_a_hold_to_give_up() -> None:
    registry = registry_of(1, 2)
    registry.retire(1)
    for number, state in ((1, "RETIRED"), (2, "ACTIVE"), (3, "unknown")):
        with pytest.raises(GenerationError, match=f"generation {number} is {state}"):
            registry.release_hold(number)


def test_retiring_what_is_not_draining_is_refused() -> None:
    registry = registry_of(1, 2)
    registry.retire(1)
    for number, state in ((1, "RETIRED"), (2, "ACTIVE"), (3, "unknown")):
        with pytest.raises(GenerationError, match=f"generation {number} is {state}"):
            registry.retire(number)


def test_what_is_live_and_what_is_shown_stays_bounded() -> None:
    registry = registry_of(0)
    for number in range(1, 2 * RETIRED_REMEMBERED):
        registry.publish(generation(number))
        registry.retire(number - 1)
    newest = 2 * RETIRED_REMEMBERED - 1
    assert [snapshot.generation for snapshot in registry.live()] == [newest]
    assert len(registry.status()) == RETIRED_REMEMBERED + 1
    with pytest.raises(StaleHandleError, match="generation 0 is unknown or long retired"):
        registry.require_live(0)
    with pytest.raises(GenerationError, match=f"must be greater than {newest}"):
        registry.publish(generation(0))


# -- After a restart


def test_after_a_restart_nothing_is_retired_before_the_peers_have_reported_their_leases() -> None:
    before = registry_of(1)
    leases = [before.acquire("peer-0"), before.acquire("peer-1")]
    before.publish(generation(2))
    leases.append(before.acquire("peer-0"))

    after = PlacementRegistry(final_after_steps=0, recovering=True)
    for snapshot in before.live():
        after.publish(snapshot)
    with pytest.raises(RetirementRefusedError, match="leases from before the restart"):
        after.retire(1)
    assert after.retirable() == ()
    with pytest.raises(GenerationError, match="cannot grant a lease"):
        after.acquire("peer-2")
    with pytest.raises(GenerationError, match="cannot take a lease back"):
        after.release(leases[0])

    after.rebuild(leases)
    assert after.holders(1) == ("peer-0", "peer-1")
    with pytest.raises(RetirementRefusedError, match="held by peer-0, peer-1"):
        after.retire(1)
    assert after.acquire("peer-2").lease_id > max(lease.lease_id for lease in leases)
    for lease in leases[:2]:
        after.release(lease)
    after.retire(1)


def test_a_rebuild_that_contradicts_itself_or_the_placements_changes_nothing() -> None:
    def recovering() -> PlacementRegistry:
        registry = PlacementRegistry(final_after_steps=0, recovering=True)
        registry.publish(generation(1))
        registry.publish(generation(2))
        return registry

    registry = recovering()
    with pytest.raises(StaleHandleError, match="generation 7 is unknown"):
        registry.rebuild([Lease(1, "peer-0", 1, 0), Lease(2, "peer-0", 7, 0)])
    with pytest.raises(GenerationError, match="lease 1 is reported twice: by peer-0 and peer-1"):
        registry.rebuild([Lease(1, "peer-0", 1, 0), Lease(1, "peer-1", 1, 0)])
    assert registry.references(1) == 0
    with pytest.raises(RetirementRefusedError, match="before the restart"):
        registry.retire(1)

    registry.rebuild([])
    lease = registry.acquire("peer-0")
    with pytest.raises(GenerationError, match="1 leases of this registry would be forgotten"):
        registry.rebuild([])
    assert registry.leases_of("peer-0") == (lease,)


def test_an_incarnation_can_number_its_leases_above_all_earlier_ones() -> None:
    registry = PlacementRegistry(recovering=True, first_lease_id=1000)
    registry.publish(generation(1))
    registry.rebuild([Lease(7, "peer-0", 1, 0)])
    assert registry.acquire("peer-0").lease_id == 1000


# -- Any order of events


class RegistryMachine(RuleBasedStateMachine):
    """Random events against a model that is only counts: live generations, leases out, holds by step."""

    @initialize(final_after_steps=st.integers(0, 3))
    def start(self, final_after_steps: int) -> None:
        self.final_after_steps = final_after_steps
        self.registry = PlacementRegistry(final_after_steps=final_after_steps)
        self.active: int | None = None
        self.draining: dict[int, int | None] = {}  # generation -> step of its successor's publication
        self.given_up: set[int] = set()
        self.retired: set[int] = set()
        self.out: list[Lease] = []
        self.past: list[Lease] = []
        self.step: int | None = None

    @rule(gap=st.integers(1, 3))
    def publish(self, gap: int) -> None:
        number = (self.active or 0) + gap
        self.registry.publish(generation(number))
        if self.active is not None:
            self.draining[self.active] = self.step
        self.active = number

    @precondition(lambda self: self.active is not None)
    @rule(back=st.integers(0, 2))
    def publish_an_old_one(self, back: int) -> None:
        with pytest.raises(GenerationError):
            self.registry.publish(generation(max(0, self.active - back)))

    @precondition(lambda self: self.active is not None)
    @rule(peer=st.integers(0, 2))
    def acquire(self, peer: int) -> None:
        lease = self.registry.acquire(f"peer-{peer}")
        assert lease.generation == self.active
        assert lease.lease_id not in {other.lease_id for other in self.out + self.past}
        self.out.append(lease)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.out))
        self.registry.release(lease)
        self.out.remove(lease)
        self.past.append(lease)

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        with pytest.raises(GenerationError):
            self.registry.release(data.draw(st.sampled_from(self.past)))

    @rule(step=st.integers(0, 20))
    def commit(self, step: int) -> None:
        self.registry.committed_step(step)
        self.step = max(step, -1 if self.step is None else self.step)
        self.draining = {number: self.step if at is None else at for number, at in self.draining.items()}

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def give_up_hold(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.draining)))
        self.registry.release_hold(number)
        self.given_up.add(number)

    @rule(number=st.integers(0, 30))
    def retire(self, number: int) -> None:
        if self.may_retire(number):
            self.registry.retire(number)
            del self.draining[number]
            self.retired.add(number)
        else:
            kind = RetirementRefusedError if number in self.draining else GenerationError
            with pytest.raises(kind):
                self.registry.retire(number)

    @rule()
    def restart(self) -> None:
        """A new incarnation learns placements and leases; the holds start over, as no report is known to it."""
        successor = PlacementRegistry(final_after_steps=self.final_after_steps, recovering=True)
        for snapshot in self.registry.live():
            successor.publish(snapshot)
        assert successor.retirable() == ()
        successor.rebuild(self.out)
        self.registry = successor
        self.step = None
        self.draining = dict.fromkeys(self.draining)
        self.given_up.clear()
        self.past.clear()  # ids above all that are out may be given again

    def may_retire(self, number: int) -> bool:
        if number not in self.draining or any(lease.generation == number for lease in self.out):
            return False
        since = self.draining[number]
        final = since is not None and self.step is not None and self.step >= since + self.final_after_steps
        return self.final_after_steps == 0 or final or number in self.given_up

    @invariant()
    def exactly_one_generation_is_active_after_the_first_publication(self) -> None:
        active = [one.generation for one in self.registry.status() if one.state is State.ACTIVE]
        assert active == ([] if self.active is None else [self.active])

    @invariant()
    def no_lease_is_lost(self) -> None:
        for number in [*self.draining, *([self.active] if self.active is not None else [])]:
            holders = sorted(lease.holder for lease in self.out if lease.generation == number)
            assert sorted(self.registry.holders(number)) == holders
            assert self.registry.references(number) == len(holders)

    @invariant()
    def every_leased_generation_resolves_and_no_retired_one_does(self) -> None:
        for lease in self.out:
            assert self.registry.require_live(lease.generation).generation == lease.generation
        for number in self.retired:
            with pytest.raises(StaleHandleError):
                self.registry.require_live(number)

    @invariant()
    def what_is_called_retirable_is_what_may_retire(self) -> None:
        assert self.registry.retirable() == tuple(number for number in sorted(self.draining) if self.may_retire(number))


TestAnyOrderOfEvents = RegistryMachine.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
