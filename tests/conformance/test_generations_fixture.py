"""The generations fixture (0x02B3, 0x08G, 0x0EA), played on the release registry with leases, headers and executables.

`tests/unit/test_generations.py` plays its two sequences on one release's placements.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ray_moe.controlplane.generations import State as GenerationState
from ray_moe.controlplane.migration_plan import Copy, Publish, Retire, Verify
from ray_moe.controlplane.release_states import LEAVING, TRANSITIONS, Stage, State, advance
from ray_moe.controlplane.releases import ReleaseRegistry
from ray_moe.dataplane.handle import HandleABI, HandleHeader
from ray_moe.dataplane.phases import ElementBytes, ExecutableKey, ExecutableManifest, Fallback, PhaseStep, admit
from ray_moe.errors import GenerationError, ReleaseError, RetirementRefusedError, StaleHandleError
from ray_moe.placement import Lease, PlacementSnapshot
from tests.conformance.test_lifecycle import bound
from tests.conformance.test_migration import PRINTED, planned
from tests.releases import NOTE, bring, bundle_of, observed, serving, snapshot_of

FIXTURE = json.loads((Path(__file__).parent / "data" / "generations.json").read_text())
ROLLBACK = FIXTURE["rollback"]
PRIOR, CANDIDATE = "prior", "candidate"
REASONS: dict[str, tuple[type[Exception], str]] = {
    "live_handles": (RetirementRefusedError, "cannot retire: held by dispatch"),
    "digest_unverified": (GenerationError, "have no verified digest"),
    "not_active": (GenerationError, "new dispatches go to"),
    "generation_mismatch": (StaleHandleError, "combine of handle .*: its placement_version is"),
    "handle_released": (GenerationError, "is not out"),
    "not_draining": (GenerationError, "is ACTIVE: event 'retire' is not allowed"),
}


def number_of(name: str) -> int:
    return int(name.rpartition("v")[2])


# -- Generations of one release


class Replay:
    """Plays the fixture's events on a release registry; a handle's combine is the product's own fence."""

    def __init__(self) -> None:
        self.registry = ReleaseRegistry(final_after_steps=0)
        self.leases: dict[str, Lease] = {}

    def play(self, event: dict[str, Any]) -> None:
        getattr(self, event["op"])(**{key: value for key, value in event.items() if key != "op"})

    def initial(self, generation: str) -> None:
        snapshot = snapshot_of(number_of(generation))
        self.registry.launch(bundle_of(snapshot), snapshot, observed(snapshot), NOTE)

    def publish(self, generation: str, all_slot_digests_verified: bool) -> None:
        snapshot = snapshot_of(number_of(generation))
        if not all_slot_digests_verified:
            snapshot = unverified(snapshot)
        self.registry.publish(snapshot, bundle_of(snapshot), NOTE)

    def acquire(self, handle: str) -> None:
        self.leases[handle] = self.registry.acquire(handle)

    def acquire_generation(self, handle: str, generation: str) -> None:
        self.leases[handle] = self.registry.acquire(handle, number_of(generation))

    def combine(self, handle: str, generation: str) -> None:
        lease = self.leases[handle]
        own = HandleHeader.grant(lease, self.registry.require_live(lease.generation), HandleABI())
        other = self.registry.require_live(number_of(generation))
        scope = HandleHeader.grant(Lease(0, handle, other.generation, other.group.epoch), other, HandleABI())
        dataclasses.replace(bound(), header=own).require(scope, "combine")

    def release(self, handle: str) -> None:
        self.registry.release(self.leases[handle])

    def retire(self, generation: str) -> None:
        self.registry.retire_generation(number_of(generation))


def unverified(snapshot: PlacementSnapshot) -> PlacementSnapshot:
    first, *rest = snapshot.layers[0].slots
    slots = (dataclasses.replace(first, parameter_digest=""), *rest)
    return dataclasses.replace(snapshot, layers=(dataclasses.replace(snapshot.layers[0], slots=slots),))


@pytest.mark.parametrize("sequence", ["placement_transition_v17", "publication_v18_to_v19"])
def test_a_sequence_is_allowed_and_refused_as_printed_inside_a_release(sequence: str) -> None:
    replay = Replay()
    for step in FIXTURE[sequence]:
        event, expected = step["event"], step["expected"]
        if expected["allowed"]:
            replay.play(event)
        else:
            error, message = REASONS[expected["reason"]]
            with pytest.raises(error, match=message):
                replay.play(event)
        found = {one.generation: one for one in replay.registry.generations()}
        for name, state in expected.get("states", {}).items():
            assert found[number_of(name)].state == state
        for name, count in expected.get("refcount", {}).items():
            assert found[number_of(name)].references == count


@pytest.mark.parametrize("state", FIXTURE["inputs"]["generation_states"])
def test_a_generation_in_a_state_accepts_and_serves_what_the_state_means(state: str) -> None:
    meaning = FIXTURE["inputs"]["state_meaning"][state]
    registry = serving(1)
    if state != "ACTIVE":
        registry.publish(snapshot_of(2), bundle_of(snapshot_of(2)), NOTE)
    if state == "RETIRED":
        registry.retire_generation(1)
    assert registry.generations()[0].state is GenerationState(state)

    def possible(call: Any, *args: Any) -> bool:
        try:
            call(*args)
        except (GenerationError, StaleHandleError):
            return False
        return True

    assert possible(registry.acquire, "rank-0", 1) is meaning["accepts_new_dispatch"]
    assert possible(registry.require_live, 1) is meaning["serves_pinned_handles"]
    assert [each.value for each in GenerationState] == FIXTURE["inputs"]["generation_states"]


def test_publication_has_its_stages_in_the_printed_order() -> None:
    order = FIXTURE["publication_stage_order"]
    # What moves experts: its effects need the solved candidate (a plan) and its reserved slots.
    kinds = [type(effect) for effect in planned(PRINTED).effects]
    stage_of = {Copy: "materialize", Verify: "verify_all_slots", Publish: "publish", Retire: "retire_old"}
    first = {stage_of[kind]: kinds.index(kind) for kind in stage_of}
    last_verified = len(kinds) - 1 - kinds[::-1].index(Verify)
    assert first["materialize"] < first["verify_all_slots"] <= last_verified < first["publish"] < first["retire_old"]
    assert [name for name in order if name in first] == sorted(first, key=first.__getitem__)
    # What fences it: publish marks the old one draining, and retirement waits for the last reference.
    replay = Replay()
    replay.play({"op": "initial", "generation": "placement-v18"})
    replay.play({"op": "acquire", "handle": "dispatch-h18"})
    replay.play({"op": "publish", "generation": "placement-v19", "all_slot_digests_verified": True})
    assert replay.registry.generations()[0].state is GenerationState.DRAINING
    with pytest.raises(RetirementRefusedError):
        replay.play({"op": "retire", "generation": "placement-v18"})
    replay.play({"op": "combine", "handle": "dispatch-h18", "generation": "placement-v18"})
    replay.play({"op": "release", "handle": "dispatch-h18"})
    replay.play({"op": "retire", "generation": "placement-v18"})
    assert order[5:] == [
        *("publish", "mark_old_draining", "reject_retire_while_referenced"),
        *("combine_and_release", "retire_old"),
    ]


# -- Releases


@pytest.mark.parametrize("case", FIXTURE["release_transition_cases"], ids=lambda case: f"{case['from']}-{case['to']}")
def test_a_release_transition_exists_exactly_where_it_is_printed(case: dict[str, Any]) -> None:
    state, wanted = State(case["from"]), State(case["to"])
    events = {event for edges in TRANSITIONS.values() for event in edges}
    reached = set()
    for event in events:
        with suppress(ReleaseError):
            reached.add(advance("r", state, event))
    assert (wanted in reached) is case["expected_allowed"]
    assert [each.value for each in State] == FIXTURE["inputs"]["release_states"]


# -- Rollback

KEY = ExecutableKey("ep-group-0", "placement-v19", "checkpoint-1", 4, 2, "bf16", "fp32", "padded", "masked", (4,), (8,))
GRAPH = ExecutableManifest("decode.bucket4.v19", KEY, ElementBytes(2, 4, 4, 2, 4))


class Rollback:
    """The fixture's candidate, active with three handles out, and its events as calls."""

    def __init__(self) -> None:
        self.registry = serving(18, PRIOR)
        bring(self.registry, snapshot_of(19, CANDIDATE))
        self.leases = [
            self.registry.acquire(f"dispatch-h19-{number}")
            for number in range(ROLLBACK["inputs"]["candidate_live_handles"])
        ]
        self.after_the_fence = 0

    def stop(self) -> None:
        self.registry.stop_new_dispatch(CANDIDATE, NOTE)

    def activate_prior(self) -> None:
        self.registry.activate_prior(CANDIDATE, NOTE)

    def release(self) -> None:
        self.registry.release(self.leases.pop())

    def new_dispatch(self) -> None:
        lease = self.registry.acquire("late")
        self.after_the_fence += lease.generation == 19

    def release_graphs(self) -> None:
        self.registry.release_graphs(CANDIDATE, NOTE)

    def retire(self) -> None:
        self.registry.retire(CANDIDATE, NOTE)

    def complete(self) -> None:
        self.registry.complete(CANDIDATE, NOTE)

    def replay_candidate_graph_on_prior(self) -> None:
        """Under the prior's key admission refuses the candidate's executable, whatever its shape."""
        needed = dataclasses.replace(KEY, placement_version=self.registry.active().version.value)
        decision = admit(PhaseStep("decode", needed, (2,), (4,)), GRAPH, buffers_ready=True)
        if isinstance(decision, Fallback):
            raise ReleaseError(decision.reason, "the step runs eagerly")

    @property
    def stage(self) -> Stage:
        return next(one.stage for one in self.registry.status() if one.release_id == CANDIDATE)


@pytest.mark.parametrize("case", ROLLBACK["cases"], ids=lambda case: case["case"])
def test_a_rollback_case_is_allowed_and_refused_by_name(case: dict[str, Any]) -> None:
    rollback = Rollback()
    reasons: list[str | None] = []
    for event in case["events"]:
        try:
            getattr(rollback, event)()
            reasons.append(None)
        except ReleaseError as error:
            reasons.append(error.reason)
    assert [reason is None for reason in reasons] == case["expected_allowed"]
    assert reasons == case.get("expected_reasons", [None] * len(reasons))
    assert (rollback.stage is Stage.COMPLETE) is case["expected_complete"]


def test_the_rollback_is_logged_in_the_printed_order() -> None:
    rollback = Rollback()
    for event in ROLLBACK["cases"][0]["events"]:
        getattr(rollback, event)()
    printed = {
        "stop_new_dispatch": "stop_new_candidate_dispatch",
        "activate_prior": "activate_prior_for_new_dispatch",
        "drain": "drain_candidate_handles_to_zero",
        "release_graphs": "release_candidate_graphs",
        "retire": "retire_candidate",
        "complete": "rollback_complete",
    }
    assert [printed[event] for event, _, _ in LEAVING.values()] == ROLLBACK["expected"]["order"]
    operations = [one.operation for one in rollback.registry.log() if one.release_id == CANDIDATE]
    assert [printed[name] for name in operations if name in printed] == ROLLBACK["expected"]["order"]


def test_no_dispatch_reaches_the_candidate_after_the_fence_and_no_graph_goes_before_its_last_handle() -> None:
    rollback, expected = Rollback(), ROLLBACK["expected"]
    rollback.stop()
    with pytest.raises(ReleaseError, match=r"^not_dispatching"):
        rollback.registry.acquire("late", release_id=CANDIDATE)
    rollback.activate_prior()
    for _ in range(3):
        rollback.new_dispatch()
        with pytest.raises(ReleaseError, match=r"^live_handles"):
            rollback.release_graphs()
        rollback.release()
    assert rollback.after_the_fence == expected["candidate_new_dispatches_after_stop_fence"]
    assert rollback.registry.references(19) == expected["candidate_refcount_before_graph_release"]
    rollback.release_graphs()


def test_coexisting_releases_own_their_placements_leases_and_references() -> None:
    rollback = Rollback()
    assert rollback.registry.holders(18) == ()
    assert len(rollback.registry.holders(19)) == 3
    prior, candidate = rollback.registry.live()
    assert (prior.release_id, candidate.release_id) == (PRIOR, CANDIDATE)
