"""The release registry: one release takes new dispatches, a way back is held until final, and leaving has one order."""

from __future__ import annotations

import dataclasses
import pickle
from itertools import product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ray_moe.controlplane.generations import PlacementRegistry
from ray_moe.controlplane.generations import State as GenerationState
from ray_moe.controlplane.release_states import LEAVING, TRANSITIONS, ShadowComparison, Stage, State, advance, leave
from ray_moe.controlplane.releases import GONE_REMEMBERED, ReleaseRegistry
from ray_moe.errors import GenerationError, ReleaseError, RetirementRefusedError, StaleHandleError
from ray_moe.placement import Lease
from tests.releases import NOTE, SAME, bring, bundle_of, observed, report_on, serving, snapshot_of

FIRST, SECOND, THIRD = "release-1", "release-2", "release-3"


def status(registry: ReleaseRegistry, release_id: str) -> Any:
    return next(one for one in registry.status() if one.release_id == release_id)


def refused(reason: str, call: Any, *args: Any, **options: Any) -> ReleaseError:
    with pytest.raises(ReleaseError) as caught:
        call(*args, **options)
    assert caught.value.reason == reason, caught.value
    return caught.value


# -- The two tables


@pytest.mark.parametrize(
    ("state", "event"), list(product(State, ["verify", "load", "shadow", "canary", "promote", "stop", "retire"]))
)
def test_only_the_seven_printed_edges_exist(state: State, event: str) -> None:
    edges = dict(
        zip(list(State)[:-1], ["verify", "load", "shadow", "canary", "promote", "stop", "retire"], strict=True)
    )
    if edges.get(state) == event:
        assert advance("r", state, event) is list(State)[list(State).index(state) + 1]
    else:
        with pytest.raises(ReleaseError, match=f"release r is {state}: event '{event}' is not allowed there"):
            advance("r", state, event)
    assert TRANSITIONS.keys() == set(State)


@pytest.mark.parametrize(("stage", "event"), list(product(Stage, [event for event, _, _ in LEAVING.values()])))
def test_leaving_takes_one_edge_at_a_time_and_repeats_nothing(stage: Stage, event: str) -> None:
    order = [event for event, _, _ in LEAVING.values()]
    at, due = order.index(event), list(Stage).index(stage)
    if at < due:
        assert leave("r", stage, event) is stage
    elif at == due:
        assert leave("r", stage, event) is list(Stage)[due + 1]
    else:
        refused(LEAVING[stage][2], leave, "r", stage, event)


# -- Into service


def test_a_release_walks_from_bundle_to_active_and_every_step_is_logged_with_who_when_and_why() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND))
    operations = [(one.operation, one.release_id) for one in registry.log()]
    assert operations == [
        *(("build", FIRST), ("verify", FIRST), ("load", FIRST), ("launch", FIRST)),
        *((each, SECOND) for each in ("build", "verify", "load", "shadow", "canary", "promote")),
    ]
    assert [one.number for one in registry.log()] == list(range(1, 11))
    assert {one.note for one in registry.log()} == {NOTE}
    assert registry.log()[6].evidence is not None
    assert registry.dispatching().release_id == SECOND
    prior = status(registry, FIRST)
    assert (prior.state, prior.stage, prior.held_for) == (State.DRAINING, Stage.REPLACED, SECOND)


@pytest.mark.parametrize("until", list(State)[:-2])
def test_every_event_but_the_next_is_refused_in_each_state_and_changes_nothing(until: State) -> None:
    registry, snapshot = serving(), snapshot_of(2, SECOND)
    bring(registry, snapshot, until)
    before = status(registry, SECOND)
    calls = {
        "verify": (registry.verify, SECOND, bundle_of(snapshot), NOTE),
        "load": (registry.load, SECOND, snapshot, observed(snapshot), NOTE),
        "shadow": (registry.shadow, SECOND, NOTE),
        "canary": (registry.canary, SECOND, SAME, NOTE),
        "promote": (registry.promote, SECOND, report_on(SECOND), NOTE),
    }
    for event, call in calls.items():
        if event not in TRANSITIONS[until]:
            refused("illegal_transition", *call)
    assert status(registry, SECOND) == before


def test_a_cluster_has_one_first_release_and_an_id_is_used_once() -> None:
    registry, snapshot = serving(), snapshot_of(2, SECOND)
    refused("not_first", registry.launch, bundle_of(snapshot), snapshot, observed(snapshot), NOTE)
    bring(registry, snapshot, State.BUILT)
    refused("known_release", registry.build, bundle_of(snapshot, route_abi="ray_moe.routes/2"), NOTE)


def test_a_first_release_that_cannot_load_leaves_nothing_behind() -> None:
    registry, snapshot = ReleaseRegistry(), snapshot_of(1)
    wrong = observed(snapshot) | {1: bundle_of(snapshot, checkpoint_digest="another")}
    error = refused("reject_load", registry.launch, bundle_of(snapshot), snapshot, wrong, NOTE)
    assert error.mismatched == ("checkpoint_digest",)
    refused("no_active_release", registry.acquire, "rank-0")
    registry.launch(bundle_of(snapshot), snapshot, observed(snapshot), NOTE)
    assert registry.acquire("rank-0").generation == 1


def test_digests_that_drift_between_build_and_verification_are_named() -> None:
    registry, snapshot = serving(), snapshot_of(2, SECOND)
    bring(registry, snapshot, State.BUILT)
    drifted = bundle_of(snapshot, upstream_report_digests=("parity.json:0",))
    error = refused("reject_build", registry.verify, SECOND, drifted, NOTE)
    assert error.mismatched == ("upstream_report_digests",)
    assert status(registry, SECOND).state is State.BUILT


def test_shadow_outputs_that_differ_or_were_never_compared_block_the_canary() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND), State.SHADOW)
    for compared in (ShadowComparison(120, 1, "equal tokens"), ShadowComparison(0, 0, "equal tokens")):
        refused("block_canary", registry.canary, SECOND, compared, NOTE)
    assert status(registry, SECOND).state is State.SHADOW


def test_only_a_report_that_passes_and_is_its_own_promotes() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND), State.CANARY)
    error = refused("not_promoted", registry.promote, SECOND, report_on(SECOND, canary_samples=199), NOTE)
    assert error.mismatched == ("canary_samples",)
    refused("other_release", registry.promote, SECOND, report_on(FIRST), NOTE)
    assert registry.dispatching().release_id == FIRST


# -- Leases on two releases


def test_a_candidate_is_leased_beside_the_serving_release_from_shadow_on() -> None:
    registry, snapshot = serving(), snapshot_of(2, SECOND)
    bring(registry, snapshot, State.LOADED)
    refused("not_dispatching", registry.acquire, "rank-0", release_id=SECOND)
    registry.shadow(SECOND, NOTE)
    both = registry.acquire("rank-0"), registry.acquire("rank-0", release_id=SECOND)
    assert [registry.release_of(lease.generation).release_id for lease in both] == [FIRST, SECOND]
    assert both[0].lease_id < both[1].lease_id  # one numbering over all releases
    assert registry.leases_of("rank-0") == both
    assert [snapshot.generation for snapshot in registry.live()] == [1, 2]
    for lease in both:
        registry.release(lease)
    with pytest.raises(GenerationError, match="is not out"):
        registry.release(both[0])


def test_new_dispatches_move_with_the_promotion_and_pinned_ones_stay() -> None:
    registry = serving()
    pinned = registry.acquire("rank-0")
    bring(registry, snapshot_of(2, SECOND))
    assert registry.acquire("rank-0").generation == 2
    refused("not_dispatching", registry.acquire, "rank-0", release_id=FIRST)
    assert registry.require_live(pinned.generation).release_id == FIRST
    registry.release(pinned)


# -- Generations inside a release


def test_a_rebalance_keeps_the_release_and_leaves_its_evidence_in_the_log() -> None:
    registry, moved = serving(), snapshot_of(2, homes=((0, 1), (1, 0), (0, 0)), epoch=1, beside=2)
    record = registry.publish(moved, bundle_of(moved), NOTE)
    assert record.evidence is not None
    assert (record.generation, record.evidence.verified_slots) == (2, 3)
    assert record.evidence.placement_digest == moved.digest
    fixed = {"checkpoint_digest", "route_abi", "dispatch_handle_abi", "precision_roles", "phase_backends"}
    assert fixed <= set(record.evidence.unchanged)
    assert "placement_digest" not in record.evidence.unchanged
    assert registry.dispatching().placement_generation == "placement-v1"  # the release is what was built
    assert registry.acquire("rank-0").generation == 2


@pytest.mark.parametrize(
    ("field", "value", "coordinate"),
    [
        ("checkpoint_digest", "other weights", "checkpoint"),
        ("route_abi", "ray_moe.routes/2", "abis"),
        ("dispatch_handle_abi", "ray_moe.handle/2", "abis"),
        ("precision_roles", (("dispatch", "fp8"), ("gate", "fp32")), "dtype_roles"),
        ("phase_backends", (("prefill", "hierarchical+grouped"),), "phase_backends"),
        ("upstream_report_digests", (), "upstream_report_digests"),
    ],
)
def test_what_a_generation_cannot_change_takes_a_new_release(field: str, value: Any, coordinate: str) -> None:
    registry, moved = serving(), snapshot_of(2)
    changed = bundle_of(moved, **{field: value})
    error = refused("takes_new_release", registry.publish, moved, changed, NOTE)
    assert error.mismatched == (coordinate,)
    assert f"{coordinate} takes a new release" in str(error)
    assert registry.active().generation == 1


def test_another_checkpoint_under_the_same_release_id_takes_a_new_release() -> None:
    registry, moved = serving(), snapshot_of(2, checkpoint="checkpoint-2")
    error = refused("takes_new_release", registry.publish, moved, bundle_of(moved), NOTE)
    assert error.mismatched == ("checkpoint",)


def test_a_bundle_that_describes_another_placement_is_refused() -> None:
    registry, moved = serving(), snapshot_of(2)
    error = refused("other_placement", registry.publish, moved, bundle_of(snapshot_of(2, homes=((0, 0), (1, 0)))), NOTE)
    assert error.mismatched == ("placement_digest",)


def test_generation_numbers_are_given_once_over_all_releases() -> None:
    registry = serving(5)
    bring(registry, snapshot_of(6, SECOND), State.VERIFIED)
    again = snapshot_of(5, SECOND)
    bundle = dataclasses.replace(bundle_of(snapshot_of(6, SECOND)))
    with pytest.raises(ReleaseError, match="placement_generation is placement-v5"):
        registry.load(SECOND, again, observed(again, bundle), NOTE)
    later = snapshot_of(5)
    with pytest.raises(GenerationError, match="generation 5 cannot be published: it must be greater than 5"):
        registry.publish(later, bundle_of(later), NOTE)


def test_no_generation_overwrites_what_a_live_one_reads() -> None:
    registry = serving()
    overwriting = snapshot_of(2, SECOND, homes=((0, 0), (0, 1), (1, 1)))
    bring(registry, overwriting, State.VERIFIED)
    with pytest.raises(
        GenerationError, match="rank 1 pool slot 1 holds weights-of-1 for generation 1, not weights-of-0"
    ):
        registry.load(SECOND, overwriting, observed(overwriting), NOTE)
    assert status(registry, SECOND).state is State.VERIFIED


def test_no_release_gets_a_generation_for_an_epoch_that_has_passed() -> None:
    registry, grown = serving(), snapshot_of(2, epoch=3)
    registry.publish(grown, bundle_of(grown), NOTE)
    bring(registry, candidate := snapshot_of(3, SECOND, epoch=2), State.VERIFIED)
    with pytest.raises(GenerationError, match="is for epoch 2 of ep-group-0, which is in epoch 3 already"):
        registry.load(SECOND, candidate, observed(candidate), NOTE)


def test_a_superseded_generation_of_a_serving_release_retires_as_before() -> None:
    registry = serving(final_after_steps=1)
    lease = registry.acquire("rank-0")
    registry.committed_step(10)
    registry.publish(snapshot_of(2), bundle_of(snapshot_of(2)), NOTE)
    with pytest.raises(RetirementRefusedError, match="rank-0, the way back of a rollback until step 11"):
        registry.retire_generation(1)
    registry.release(lease)
    registry.committed_step(11)
    assert registry.retirable() == (1,)
    assert registry.retire_generation(1).generation == 1
    with pytest.raises(StaleHandleError):
        registry.require_live(1)
    assert [one.state for one in registry.generations()] == [GenerationState.RETIRED, GenerationState.ACTIVE]


# -- Final


def test_the_prior_stays_loaded_until_the_promotion_is_final_and_then_leaves_in_order() -> None:
    registry = serving()
    pinned = registry.acquire("rank-0")
    registry.committed_step(1000)
    bring(registry, snapshot_of(2, SECOND))
    registry.committed_step(5000)
    assert registry.due() == ()
    assert registry.retirable() == ()
    refused("held", registry.release_hold, 1)
    for call in (registry.release_graphs, registry.retire):
        refused("held", call, FIRST, NOTE)
    with pytest.raises(RetirementRefusedError, match="the way back of a rollback until the release that follows is"):
        registry.retire_generation(1)

    refused("early_report", registry.finalise, SECOND, report_on(SECOND, first_step=1000), NOTE)
    refused(
        "not_promoted", registry.finalise, SECOND, report_on(SECOND, first_step=1001, stale_handle_acceptances=1), NOTE
    )
    final = registry.finalise(SECOND, report_on(SECOND, first_step=1001), NOTE)
    assert registry.finalise(SECOND, report_on(SECOND, first_step=1001), NOTE) == final

    (due,) = registry.due()
    assert (due.release_id, due.event, due.holders) == (FIRST, "drain", ("rank-0",))
    refused("live_handles", registry.release_graphs, FIRST, NOTE)
    registry.release(pinned)
    assert [(one.event, one.generations) for one in registry.due()] == [("release_graphs", (1,))]
    refused("leaves_with_its_release", registry.retire_generation, 1)
    refused("graphs_not_released", registry.retire, FIRST, NOTE)
    registry.release_graphs(FIRST, NOTE)
    freed = registry.retire(FIRST, NOTE)
    assert [snapshot.generation for snapshot in freed] == [1]
    assert registry.retire(FIRST, NOTE) == freed  # until the slots are free
    assert [(one.event, one.generations) for one in registry.due()] == [("complete", (1,))]
    registry.complete(FIRST, NOTE)
    assert registry.due() == () == registry.retire(FIRST, NOTE)
    assert status(registry, FIRST).state is State.RETIRED
    refused("prior_not_loaded", registry.stop_new_dispatch, SECOND, NOTE)  # final: there is no way back


def test_one_way_back_at_a_time() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND))
    bring(registry, snapshot_of(3, THIRD), State.CANARY)
    refused("prior_not_final", registry.promote, THIRD, report_on(THIRD), NOTE)
    registry.finalise(SECOND, report_on(SECOND), NOTE)
    registry.promote(THIRD, report_on(THIRD), NOTE)
    assert status(registry, SECOND).held_for == THIRD
    registry.release(registry.acquire("rank-0"))
    assert status(registry, SECOND).stage is Stage.REPLACED  # nobody leases it, and it does not drain: it is held


# -- Rollback


def test_a_rollback_brings_the_prior_back_while_the_candidates_handles_complete() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND))
    handles = [registry.acquire(f"rank-{rank}") for rank in (0, 1, 0)]
    registry.stop_new_dispatch(SECOND, NOTE)
    refused("not_dispatching", registry.acquire, "rank-0", release_id=SECOND)
    refused("no_active_release", registry.acquire, "rank-0")
    assert [one.event for one in registry.due()] == ["activate_prior"]
    registry.activate_prior(SECOND, NOTE)
    assert registry.acquire("rank-0").generation == 1
    back = status(registry, FIRST)
    assert (back.state, back.stage, back.held_for, back.dispatching) == (State.ACTIVE, Stage.STAYING, None, True)
    for lease in handles:
        assert registry.require_live(lease.generation).release_id == SECOND
        error = refused("live_handles", registry.release_graphs, SECOND, NOTE)
        assert lease.holder in str(error)
        registry.release(lease)
    registry.release_graphs(SECOND, NOTE)
    assert [snapshot.generation for snapshot in registry.retire(SECOND, NOTE)] == [2]
    registry.complete(SECOND, NOTE)
    rolled = [one.operation for one in registry.log() if one.release_id == SECOND][6:]
    assert rolled == ["stop_new_dispatch", "activate_prior", "drain", "release_graphs", "retire", "complete"]
    # The release that came back can be followed and rolled back to again.
    bring(registry, snapshot_of(3, THIRD))
    registry.stop_new_dispatch(THIRD, NOTE)
    registry.activate_prior(THIRD, NOTE)
    assert registry.dispatching().release_id == FIRST


def test_every_event_of_a_rollback_can_be_repeated_and_is_logged_once() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND))
    registry.release(registry.acquire("rank-0"))
    for event in (
        registry.stop_new_dispatch, registry.activate_prior, registry.release_graphs, registry.retire, registry.complete
    ):  # fmt: skip
        first = event(SECOND, NOTE)
        assert event(SECOND, dataclasses.replace(NOTE, who="the controller, restarted")) == first
    operations = [one.operation for one in registry.log() if one.release_id == SECOND]
    assert len(operations) == len(set(operations))


@pytest.mark.parametrize("until", list(State)[:5])
def test_a_candidate_that_never_was_active_is_withdrawn_in_the_same_order(until: State) -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND), until)
    leases = [registry.acquire("rank-0", release_id=SECOND)] if until in (State.SHADOW, State.CANARY) else []
    registry.stop_new_dispatch(SECOND, NOTE)
    assert registry.acquire("rank-0").generation == 1  # the serving release never stopped
    registry.activate_prior(SECOND, NOTE)
    if leases:
        refused("live_handles", registry.release_graphs, SECOND, NOTE)
        registry.release(leases[0])
    registry.release_graphs(SECOND, NOTE)
    registry.retire(SECOND, NOTE)
    registry.complete(SECOND, NOTE)
    gone = status(registry, SECOND)
    assert (gone.state, gone.withdrawn) == (until, True)  # no edge of the table was invented
    assert [snapshot.generation for snapshot in registry.live()] == [1]


def test_a_stopped_candidate_goes_no_further() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND), State.CANARY)
    registry.stop_new_dispatch(SECOND, NOTE)
    refused("not_dispatching", registry.acquire, "rank-0", release_id=SECOND)
    refused("is_leaving", registry.promote, SECOND, report_on(SECOND), NOTE)
    later = snapshot_of(3, SECOND)
    refused("not_resident", registry.publish, later, bundle_of(later), NOTE)


def test_the_only_release_cannot_be_stopped() -> None:
    registry = serving()
    refused("prior_not_loaded", registry.stop_new_dispatch, FIRST, NOTE)
    assert registry.acquire("rank-0").generation == 1


def test_going_back_across_checkpoints_must_be_asked_for_once_requests_have_begun() -> None:
    registry, other = serving(), snapshot_of(2, SECOND, checkpoint="checkpoint-2")
    bring(registry, other)
    error = refused("other_checkpoint", registry.stop_new_dispatch, SECOND, NOTE)
    assert error.mismatched == ("checkpoint_version",)
    assert registry.acquire("rank-0").generation == 2  # nothing was stopped
    registry.stop_new_dispatch(SECOND, NOTE, across_checkpoints=True)
    registry.activate_prior(SECOND, NOTE)
    assert registry.active().checkpoint_version.value == "checkpoint-1"


def test_a_shadows_other_checkpoint_hinders_nobody() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND, checkpoint="checkpoint-2"), State.SHADOW)
    registry.stop_new_dispatch(SECOND, NOTE)
    assert registry.dispatching().release_id == FIRST


def test_a_prior_whose_group_is_gone_comes_back_under_a_fresh_generation() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND))
    grown = snapshot_of(3, SECOND, epoch=1)
    registry.publish(grown, bundle_of(grown), NOTE)
    registry.stop_new_dispatch(SECOND, NOTE)
    error = refused("other_group", registry.activate_prior, SECOND, NOTE)
    assert error.mismatched == ("process_group_generation",)
    refused("no_active_release", registry.acquire, "rank-0")
    fresh = snapshot_of(4, FIRST, epoch=1)
    registry.activate_prior(SECOND, NOTE, (fresh, bundle_of(fresh)))
    lease = registry.acquire("rank-0")
    assert (lease.generation, lease.epoch) == (4, 1)
    assert registry.retirable() == (1,)  # what was held is not needed any more


# -- After a restart


def test_a_registry_that_was_read_back_goes_on_where_it_was_once_the_leases_are_known() -> None:
    before = serving()
    bring(before, snapshot_of(2, SECOND))
    leases = [before.acquire("rank-0"), before.acquire("rank-1")]
    before.stop_new_dispatch(SECOND, NOTE)
    before.activate_prior(SECOND, NOTE)

    after: ReleaseRegistry = pickle.loads(pickle.dumps(before))
    after.forget_leases()
    with pytest.raises(GenerationError, match="cannot grant a lease"):
        after.acquire("rank-0")
    with pytest.raises(GenerationError, match="cannot take a lease back"):
        after.release(leases[0])
    refused("live_handles", after.release_graphs, SECOND, NOTE)  # unknown leases may be out
    with pytest.raises(StaleHandleError, match="generation 9 is unknown"):
        after.rebuild([*leases, Lease(9, "rank-0", 9, 0)])
    with pytest.raises(GenerationError, match="lease 1 is reported twice: by rank-0 and rank-1"):
        after.rebuild([Lease(1, "rank-0", 1, 0), Lease(1, "rank-1", 2, 0)])
    after.rebuild(leases)
    assert after.acquire("rank-2").lease_id > max(lease.lease_id for lease in leases)
    for lease in leases:
        after.release(lease)
    after.release_graphs(SECOND, NOTE)
    assert [snapshot.generation for snapshot in after.retire(SECOND, NOTE)] == [2]
    with pytest.raises(GenerationError, match="1 leases of release-1 would be forgotten"):
        after.rebuild([])


def test_a_drained_release_is_not_retired_before_the_leases_are_known_again() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND))
    registry.stop_new_dispatch(SECOND, NOTE)
    registry.activate_prior(SECOND, NOTE)
    registry.release_graphs(SECOND, NOTE)
    registry.forget_leases()
    refused("unknown_leases", registry.retire, SECOND, NOTE)
    registry.rebuild([])
    registry.retire(SECOND, NOTE)


def test_nothing_counts_as_drained_before_the_leases_are_known_again() -> None:
    registry = serving()
    bring(registry, snapshot_of(2, SECOND))
    lease = registry.acquire("rank-0")
    registry.stop_new_dispatch(SECOND, NOTE)
    registry.forget_leases()
    registry.activate_prior(SECOND, NOTE)
    assert status(registry, SECOND).stage is Stage.REPLACED
    registry.rebuild([lease])
    refused("live_handles", registry.release_graphs, SECOND, NOTE)
    registry.release(lease)
    assert status(registry, SECOND).stage is Stage.DRAINED


def test_what_is_shown_of_releases_that_are_gone_stays_bounded() -> None:
    registry = serving()
    for number in range(2, GONE_REMEMBERED + 6):
        name = bring(registry, snapshot_of(number, f"release-{number}"), State.LOADED)
        for event in (registry.stop_new_dispatch, registry.activate_prior, registry.release_graphs, registry.retire):
            event(name, NOTE)
        registry.complete(name, NOTE)
    assert len(registry.status()) == GONE_REMEMBERED + 1
    refused("unknown_release", registry.shadow, SECOND, NOTE)
    # The one that has served all the while was built before them all, and leaves last.
    newest = bring(registry, snapshot_of(100, "release-100"))
    registry.finalise(newest, report_on(newest), NOTE)
    for event in (registry.release_graphs, registry.retire, registry.complete):
        event(FIRST, NOTE)
    assert status(registry, FIRST).stage is Stage.COMPLETE
    assert len(registry.status()) == GONE_REMEMBERED + 1


# -- The operations that a placement registry has for it


def placements_of(*numbers: int) -> PlacementRegistry:
    registry = PlacementRegistry(final_after_steps=0)
    for number in numbers:
        registry.publish(snapshot_of(number))
    return registry


def test_a_stopped_generation_drains_held_or_not_and_a_held_one_comes_back() -> None:
    registry = placements_of(1)
    lease = registry.acquire("rank-0")
    assert registry.stop_dispatch(held=True) == 1
    with pytest.raises(GenerationError, match="no placement generation takes new dispatches"):
        registry.acquire("rank-0")
    registry.committed_step(10_000)
    with pytest.raises(RetirementRefusedError, match="until the release that follows is final"):
        registry.retire(1)
    assert (registry.status()[0].held, registry.status()[0].held_until_step) == (True, None)
    assert registry.reactivate(1).generation == 1
    assert registry.references(1) == 1
    registry.release(lease)
    registry.stop_dispatch(held=False)
    assert registry.retirable() == (1,)


def test_only_a_held_generation_comes_back_and_only_when_no_other_dispatches() -> None:
    registry = placements_of(1, 2)
    with pytest.raises(GenerationError, match="generation 1 cannot be re-activated: 2 takes new dispatches, stop it"):
        registry.reactivate(1)
    registry.stop_dispatch(held=False)
    for number in (1, 2):
        with pytest.raises(
            GenerationError, match=f"generation {number} cannot be re-activated: it is DRAINING and not"
        ):
            registry.reactivate(number)
    registry.retire(1)
    with pytest.raises(GenerationError, match="it is RETIRED and not held"):
        registry.reactivate(1)
    registry.publish(snapshot_of(3))  # a fresh one takes over
    assert registry.active().generation == 3


# -- Any order of events


class ReleasesMachine(RuleBasedStateMachine):
    """Random events of two candidates beside a serving release; whatever is refused changes nothing."""

    @initialize()
    def start(self) -> None:
        self.registry = serving()
        self.number = 1
        self.names = [FIRST]
        self.out: list[Lease] = []

    def attempt(self, call: Any, *args: Any, **options: Any) -> Any:
        before = self.registry.status(), self.registry.log()
        try:
            return call(*args, **options)
        except GenerationError:
            assert (self.registry.status(), self.registry.log()) == before
            return None

    @precondition(lambda self: len(self.names) < 4)
    @rule(until=st.sampled_from(list(State)[:5]))
    def candidate(self, until: State) -> None:
        self.number += 1
        self.names.append(bring(self.registry, snapshot_of(self.number, f"release-{self.number}"), until))

    @rule(data=st.data(), event=st.sampled_from(["shadow", "release_graphs", "complete", "stop_new_dispatch"]))
    def event(self, data: st.DataObject, event: str) -> None:
        self.attempt(getattr(self.registry, event), data.draw(st.sampled_from(self.names)), NOTE)

    @rule(data=st.data())
    def canary(self, data: st.DataObject) -> None:
        self.attempt(self.registry.canary, data.draw(st.sampled_from(self.names)), SAME, NOTE)

    @rule(data=st.data(), event=st.sampled_from(["promote", "finalise"]))
    def with_report(self, data: st.DataObject, event: str) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.attempt(getattr(self.registry, event), name, report_on(name), NOTE)

    @rule(data=st.data())
    def activate_prior(self, data: st.DataObject) -> None:
        self.attempt(self.registry.activate_prior, data.draw(st.sampled_from(self.names)), NOTE)

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names))
        if self.attempt(self.registry.retire, name, NOTE):
            assert not status(self.registry, name).holders

    @rule(data=st.data(), named=st.booleans())
    def acquire(self, data: st.DataObject, named: bool) -> None:
        name = data.draw(st.sampled_from(self.names)) if named else None
        lease = self.attempt(self.registry.acquire, "rank-0", release_id=name)
        if lease is not None:
            assert lease.lease_id not in {other.lease_id for other in self.out}
            self.out.append(lease)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.out))
        self.registry.release(lease)
        self.out.remove(lease)

    @invariant()
    def every_lease_resolves_and_none_is_lost(self) -> None:
        for lease in self.out:
            assert self.registry.require_live(lease.generation).generation == lease.generation
        assert sorted(holder for one in self.registry.status() for holder in one.holders) == ["rank-0"] * len(self.out)

    @invariant()
    def at_most_one_release_takes_new_dispatches_and_it_is_active(self) -> None:
        dispatching = [one for one in self.registry.status() if one.dispatching]
        assert len(dispatching) <= 1
        assert all(one.state is State.ACTIVE and one.stage is Stage.STAYING for one in dispatching)
        if not dispatching:  # between the two halves of a rollback, and never otherwise
            assert "activate_prior" in [one.event for one in self.registry.due()]

    @invariant()
    def a_release_without_graphs_has_no_lease(self) -> None:
        past = list(Stage)[list(Stage).index(Stage.DRAINED) :]
        assert not any(one.holders for one in self.registry.status() if one.stage in past)


TestAnyOrderOfReleases = ReleasesMachine.TestCase
TestAnyOrderOfReleases.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
