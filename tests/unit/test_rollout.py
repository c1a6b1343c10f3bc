"""The rollout machine: pure, in the printed order, and the same steps again when it is asked again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ray_moe.config import ClusterConfig
from ray_moe.controlplane.candidates import candidate_of, changed_config
from ray_moe.controlplane.drills import control_faults, rehearsed
from ray_moe.controlplane.promotion import FAULTS, PromotionPolicy, unsafe_faults
from ray_moe.controlplane.publication import Storage
from ray_moe.controlplane.release_states import ReleaseStatus, Stage
from ray_moe.controlplane.releases import ReleaseRegistry
from ray_moe.controlplane.rollout import (
    Fill,
    Forget,
    Heard,
    Phase,
    Prepare,
    Register,
    RolesOrder,
    Rollout,
    Seen,
    StageRoles,
    Verify,
    advance,
    report_on,
)
from ray_moe.controlplane.rollout_evidence import Did, Drill
from ray_moe.errors import ConfigError, GenerationError, PlacementError
from tests.releases import NOTE, bundle_of, observed, snapshot_of

CONFIG = ClusterConfig(model="tiny-moe", peers=2)
GOOD = Drill((), True)
ENOUGH = Did(steps=300, first_step=5, last_step=400, tokens=250, shadow_steps=60, compared=120, routes=900)


def rollout_of(**changes: Any) -> Rollout:
    given: dict[str, Any] = {
        "number": 1,
        "release_id": "r1",
        "prior": "r0",
        "config": CONFIG,
        "model": "",
        "asked_by": "ann",
        "why": "faster",
        "asked_at": 1.0,
        "share": 0.25,
        "shadow_rate": 0.5,
        "auto": False,
        "policy": PromotionPolicy(has_graphs=False),
        "candidate": snapshot_of(2, "r1"),
        "drill": GOOD,
    }
    return Rollout(**{**given, **changes})


def status_of(name: str, state: str, stage: Stage = Stage.STAYING, **changes: Any) -> ReleaseStatus:
    given: dict[str, Any] = {"dispatching": False, "held_for": None, "prior": None, "final": False, "withdrawn": False}
    return ReleaseStatus(name, "", state, stage, **{**given, **changes}, holders=(), generations=())


def seen_of(state: str = "", *, roles: int = 0, did: Did | None = None, **changes: Any) -> Seen:
    """Two ranks that plan by `roles`; the candidate in `state`, the prior serving."""
    releases = {"r0": status_of("r0", "ACTIVE", dispatching=True)}
    if state:
        releases["r1"] = status_of("r1", state)
    half = did and dataclasses.replace(did, tokens=did.tokens // 2, compared=did.compared // 2, routes=did.routes // 2)
    ranks = {
        rank: Heard(rank, roles, roles, "r0", 400, 0, frozenset({"checkpoint-1"}), {"r1": half} if half else {})
        for rank in (0, 1)
    }
    return dataclasses.replace(Seen(ranks, (0, 1), releases, settled=True), **changes)


def test_a_candidate_waits_for_what_changes_the_placement() -> None:
    waiting, steps = advance(rollout_of(), seen_of(settled=False), 2.0)
    assert (waiting.phase, steps) == (Phase.WAITING, ())
    assert advance(waiting, seen_of(), 2.0)[0].phase is Phase.VERIFYING


def test_the_same_checkpoint_is_verified_at_once_and_another_one_is_loaded_and_filled_first() -> None:
    rollout, steps = advance(rollout_of(), seen_of(), 2.0)
    assert (rollout.phase, steps) == (Phase.VERIFYING, (Verify(),))
    other = rollout_of(model="/tuned", candidate=None)
    loading, steps = advance(other, seen_of(missing=True), 2.0)
    assert (loading.phase, steps) == (Phase.LOADING, (Prepare(0), Prepare(1)))
    there = dataclasses.replace(loading, checkpoint="checkpoint-1")
    assert advance(there, seen_of(missing=True), 2.0) == (there, (Fill(),))


def test_shadow_canary_and_promotion_each_take_their_evidence() -> None:
    verifying = rollout_of(phase=Phase.VERIFYING)
    assert advance(verifying, seen_of("LOADED"), 2.0)[1] == (Register("shadow", "r1"),)
    shadow, steps = advance(verifying, seen_of("SHADOW"), 2.0)
    order = RolesOrder(1, "r0", "r1", "shadow", 2)
    assert (shadow.roles, steps) == (order, (StageRoles(0, order), StageRoles(1, order)))
    few = dataclasses.replace(ENOUGH, compared=98)
    assert advance(shadow, seen_of("SHADOW", roles=1, did=few), 2.0)[1] == ()
    assert advance(shadow, seen_of("SHADOW", roles=1, did=ENOUGH), 2.0)[1] == (Register("canary", "r1"),)
    canary, _ = advance(shadow, seen_of("CANARY", roles=1, did=ENOUGH), 2.0)
    assert canary.roles == RolesOrder(2, "r0", "r1", "canary", 4)
    seen = seen_of("CANARY", roles=2, did=ENOUGH)
    assert advance(canary, seen, 2.0)[1] == (), "nobody has asked for the promotion"
    for asked in ({"auto": True}, {"wanted": True}):
        assert advance(dataclasses.replace(canary, **asked), seen, 2.0)[1] == (Register("promote", "r1"),)
    active, _ = advance(canary, seen_of("ACTIVE", roles=2, did=ENOUGH), 2.0)
    assert (active.phase, active.roles) == (Phase.ACTIVE, RolesOrder(3, "r1"))


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"tokens": 198}, "canary_samples"),
        ({"compared": 98}, "shadow_samples"),
        ({"steps": 0}, "drop_ratio"),
        ({"faults": 1}, "count_conservation_failures"),
    ],
)
def test_a_promotion_that_lacks_evidence_names_the_check(changes: dict[str, int], failed: str) -> None:
    canary = rollout_of(phase=Phase.CANARY, auto=True)
    report = report_on(canary, seen_of("CANARY", did=dataclasses.replace(ENOUGH, **changes)))
    assert failed in report.failed_checks
    undrilled = report_on(dataclasses.replace(canary, drill=None), seen_of("CANARY", did=ENOUGH))
    assert undrilled.failed_checks == ("faults_ok", "rollback_ok")


def test_a_final_promotion_rests_on_steps_after_it_alone() -> None:
    active = rollout_of(phase=Phase.ACTIVE, marks=ENOUGH, promoted_step=400, roles=RolesOrder(3, "r1"))
    assert "canary_samples" in report_on(active, seen_of("ACTIVE", roles=3, did=ENOUGH)).failed_checks
    later = dataclasses.replace(ENOUGH, steps=600, last_step=700, tokens=500, routes=1800)
    report = report_on(active, seen_of("ACTIVE", roles=3, did=later))
    assert report.promote
    assert report.evidence.cells[0].window.first_step == 401
    assert advance(active, seen_of("ACTIVE", roles=3, did=later), 2.0)[1] == (
        Register("finalise", "r1", report=report),
    )


@pytest.mark.parametrize("fault", [{"differing": 2}, {"faults": 1}])
@pytest.mark.parametrize("phase", [Phase.SHADOW, Phase.CANARY, Phase.ACTIVE])
def test_a_candidate_that_faults_leaves_by_itself(phase: Phase, fault: dict[str, int]) -> None:
    serving = rollout_of(phase=phase, roles=RolesOrder(2, "r0", "r1", "canary", 4))
    state = phase.name
    leaving, steps = advance(serving, seen_of(state, roles=2, did=dataclasses.replace(ENOUGH, **fault)), 2.0)
    assert leaving.phase is Phase.LEAVING
    assert leaving.reason.startswith("automatic: ")
    assert steps == (Register("stop_new_dispatch", "r1"),)


def test_a_rollback_takes_the_printed_order() -> None:
    leaving = rollout_of(phase=Phase.CANARY, roles=RolesOrder(2, "r0", "r1", "canary", 4)).leave("ann: slow", 3.0)

    def at(stage: Stage, roles: int) -> Seen:
        seen = seen_of("CANARY", roles=roles)
        return dataclasses.replace(seen, releases={**seen.releases, "r1": status_of("r1", "CANARY", stage)})

    assert advance(leaving, at(Stage.STAYING, 2), 4.0)[1] == (Register("stop_new_dispatch", "r1"),)
    assert advance(leaving, at(Stage.STOPPED, 2), 4.0)[1] == (Register("activate_prior", "r1"),)
    replaced, steps = advance(leaving, at(Stage.REPLACED, 2), 4.0)
    order = RolesOrder(3, "r0", fresh=True)
    assert (replaced.roles, steps) == (order, (StageRoles(0, order), StageRoles(1, order)))
    assert advance(replaced, at(Stage.REPLACED, 3), 4.0)[1] == (), "leases are still out"
    assert advance(replaced, at(Stage.DRAINED, 3), 4.0)[1] == (Forget("r1"),)
    assert advance(replaced, at(Stage.GRAPHS_RELEASED, 3), 4.0)[1] == (Register("retire", "r1"),)
    assert advance(replaced, at(Stage.RETIRED, 3), 4.0)[1] == (Register("complete", "r1"),)
    assert advance(replaced, at(Stage.COMPLETE, 3), 4.0)[0].ended
    with pytest.raises(GenerationError, match="allows no 'leave'"):
        rollout_of(phase=Phase.RETIRING).leave("too late", 5.0)


def test_a_release_that_the_registry_does_not_know_has_not_left() -> None:
    leaving = rollout_of(phase=Phase.CANARY, roles=RolesOrder(2, "r0", "r1", "canary", 4)).leave("ann: slow", 3.0)
    assert advance(leaving, seen_of(roles=2), 4.0) == (leaving, ())
    retiring = rollout_of(phase=Phase.RETIRING, roles=RolesOrder(3, "r1"))
    alone = {"r1": status_of("r1", "ACTIVE", dispatching=True)}
    assert advance(retiring, seen_of(roles=3, releases=alone), 4.0) == (retiring, ())
    never_loaded = rollout_of(phase=Phase.VERIFYING).leave("ann: no", 3.0)
    assert advance(never_loaded, seen_of(), 4.0)[0].phase is Phase.FAILED


def test_requests_of_another_checkpoint_end_where_they_began() -> None:
    canary = rollout_of(phase=Phase.CANARY, model="/tuned", roles=RolesOrder(2, "r0", "r1", "canary", 4))
    active, _ = advance(canary, seen_of("ACTIVE", roles=2, did=ENOUGH), 2.0)
    assert active.roles == RolesOrder(3, "r1", "r0", "drain", 2)
    busy = seen_of("ACTIVE", roles=3, did=ENOUGH)
    still = dataclasses.replace(busy.ranks[1], open_beside=1)
    assert advance(active, dataclasses.replace(busy, ranks={0: busy.ranks[0], 1: still}), 2.0)[0] == active
    assert advance(active, busy, 2.0)[0].roles == RolesOrder(4, "r1")


def test_the_drills_of_the_control_plane_end_safely() -> None:
    first, second = snapshot_of(1, "r0"), snapshot_of(2, "r1")
    registry = ReleaseRegistry()
    registry.launch(bundle_of(first), first, observed(first), NOTE)
    registry.build(bundle_of(second), NOTE)
    registry.verify("r1", bundle_of(second), NOTE)
    registry.load("r1", second, observed(second), NOTE)
    assert rehearsed(registry, "r1")
    assert control_faults(bundle_of(second), second) == {fault: FAULTS[fault] for fault in ("F01", "F02")}
    safe = {fault: FAULTS[fault] for fault in FAULTS if fault != "F10"}
    assert Drill.of(safe, [{}], rehearsed=True).unsafe_faults == unsafe_faults(FAULTS) == ()
    assert Drill.of(safe, [{}, {"F04": "accepted"}], rehearsed=False).unsafe_faults == ("F04", "F10")


def test_another_checkpoint_takes_free_slots_and_is_refused_with_the_sums_where_there_are_too_few() -> None:
    active = snapshot_of(3)
    beside = candidate_of(active, "r1", 4, "checkpoint-2", Storage(4, 0, 100))
    (before,), (after,) = active.layers, beside.layers
    taken = {(slot.destination_rank, slot.pool_slot) for slot in before.slots}
    assert taken.isdisjoint((slot.destination_rank, slot.pool_slot) for slot in after.slots)
    assert not beside.verified
    assert after.phy2log == before.phy2log
    with pytest.raises(PlacementError, match=r"needs \d slots beside those that serve; of \d, \d are free"):
        candidate_of(active, "r1", 4, "checkpoint-2", Storage(2, 0, 100))


def test_a_release_changes_what_releases_may_change() -> None:
    assert changed_config(CONFIG, {"runner": "block_sparse"}, "").runner == "block_sparse"
    with pytest.raises(ConfigError, match=r"may set transport, .*found kv_blocks"):
        changed_config(CONFIG, {"kv_blocks": 3}, "")
    with pytest.raises(ConfigError, match="hierarchical needs other groups"):
        changed_config(CONFIG, {"transport": "hierarchical"}, "")
    with pytest.raises(ConfigError, match="takes shared experts out"):
        changed_config(CONFIG, {"strategy": "shared_path"}, "")
    with pytest.raises(ConfigError, match="runner"):
        changed_config(CONFIG, {"runner": "sideways"}, "")
