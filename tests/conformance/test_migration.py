"""The migration fixture (0x08F, 0x08G): classes, ledger and order from both ways to complete the unprinted source."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ray_moe.controlplane.execution import MigrationRun
from ray_moe.controlplane.migrate import Pools, plan_migration
from ray_moe.controlplane.migration_plan import EXCLUDED_FROM_PAYLOAD, Copy, MigrationPlan, Publish, Retire, Verify
from ray_moe.controlplane.occupancy import Held, Home, Occupancy, Wanted
from ray_moe.controlplane.solve import PoolSlot
from ray_moe.controlplane.sources import CopyClass

FIXTURE = json.loads((Path(__file__).parent / "data" / "migration.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
CASES: dict[str, dict[str, Any]] = {case["case"]: case for case in DERIVED["source_completions"]}
PRINTED = "expert_0_second_copy_on_rank_2"
EXPERT_BYTES = (
    INPUTS["matrices_per_expert"]
    * INPUTS["hidden_width_elements"]
    * INPUTS["ffn_width_elements"]
    * INPUTS["parameter_element_bytes"]
)
PLAN_POOLS = Pools(
    node_of_rank=dict(enumerate(INPUTS["node_of_rank"])),
    capacity_of_rank=dict.fromkeys(range(4), 4),
    expert_bytes={0: EXPERT_BYTES},
)
CLASSES = {
    "retain": CopyClass.KEEP,
    "same_node_network_copy": CopyClass.SAME_NODE,
    "local_duplicate": CopyClass.SAME_GPU,
}
TARGET = Wanted({0: tuple(Home(entry["rank"], entry["logical_expert_id"]) for entry in INPUTS["target_slots"])})


def source(case: str) -> tuple[Occupancy, dict[tuple[int, int], str]]:
    """The prior occupancy, and the fixture's slot name of each (rank, pool slot)."""
    entries = {entry["slot"]: entry for entry in INPUTS["source_slots_known"]} | CASES[case]["slots"]
    taken: Counter[int] = Counter()
    held, names = [], {}
    for name in sorted(entries):
        rank = entries[name]["rank"]
        names[rank, taken[rank]] = name
        held.append(Held(rank, taken[rank], entries[name]["logical_expert_id"]))
        taken[rank] += 1
    return Occupancy({0: tuple(held)}), names


def planned(case: str) -> MigrationPlan:
    return plan_migration(source(case)[0], TARGET, PLAN_POOLS, max_waves=1)


def place_of(slot: PoolSlot) -> tuple[int, int]:
    return slot.rank.value, slot.pool_slot


def test_an_expert_has_the_printed_bytes() -> None:
    assert EXPERT_BYTES == EXPECTED["expert_bytes"] == 36


def test_the_printed_plan_action_by_action() -> None:
    plan, (_, names) = planned(PRINTED), source(PRINTED)
    found = []
    for copy in (*plan.kept, *(copy for wave in plan.waves for copy in wave.copies)):
        assert isinstance(copy.source, PoolSlot)
        found.append(
            (
                copy.slot.rank.value,
                copy.expert.value,
                copy.kind,
                copy.source.rank.value,
                names.get(place_of(copy.source)),
            )
        )
    printed = []
    for action in EXPECTED["actions"]:
        kind = CLASSES[action["action"]]
        slot = action["source_slot"]
        if kind is CopyClass.SAME_GPU:  # "target state": the slot that holds the first copy on the rank
            slot = {1: None, 2: "q4", 3: "q5"}[action["target_rank"]]
        printed.append((action["target_rank"], action["logical_expert_id"], kind, action["source_rank"], slot))
    assert Counter(found) == Counter(printed)


@pytest.mark.parametrize("case", CASES)
def test_counts_bytes_and_peak_of_both_completions(case: str) -> None:
    ledger, wanted = planned(case).ledger, CASES[case]
    assert ledger.copies[CopyClass.KEEP] == wanted["retained_copies"]
    assert ledger.copies[CopyClass.SAME_NODE] + ledger.copies[CopyClass.CROSS_NODE] == wanted["network_copies"]
    assert ledger.copies[CopyClass.SAME_GPU] == wanted["local_duplicate_copies"]
    assert ledger.copies[CopyClass.HOST_CACHE] == ledger.copies[CopyClass.CHECKPOINT] == 0
    assert ledger.peak_resident.value == wanted["peak_unique_bytes"]
    assert ledger.prior_resident.value == EXPECTED["source_resident_bytes"]
    assert ledger.target_resident.value == EXPECTED["target_resident_bytes"]


def test_the_printed_ledger() -> None:
    plan = planned(PRINTED)
    ledger = plan.ledger
    assert ledger.retained.value == EXPECTED["retained_bytes"]
    assert ledger.copies[CopyClass.SAME_NODE] == EXPECTED["same_node_network_copies"]
    assert ledger.network.value == EXPECTED["network_transfer_bytes"]
    assert ledger.payload[CopyClass.SAME_GPU].value == EXPECTED["local_duplicate_bytes"]
    assert ledger.retired.value == EXPECTED["retired_bytes"]
    assert ledger.moved.value == DERIVED["reserved_new_bytes"]
    assert sum(len(wave.copies) for wave in plan.waves) == EXPECTED["non_retained_target_copies"]
    assert (
        ledger.peak_resident.value == EXPECTED["peak_unique_bytes"] != DERIVED["peak_if_retained_counted_twice_bytes"]
    )


@pytest.mark.parametrize("case", CASES)
def test_the_retired_slots_are_those_that_the_target_does_without(case: str) -> None:
    names = source(case)[1]
    retired = [names[place_of(effect.slot)] for effect in planned(case).effects if isinstance(effect, Retire)]
    assert sorted(retired) == CASES[case]["retired_source_slots"]


def test_a_local_duplicate_waits_for_the_copy_that_it_reads() -> None:
    plan = planned(PRINTED)
    duplicates = {copy.slot.rank.value: copy for copy in plan.waves[0].copies if copy.kind is CopyClass.SAME_GPU}
    # p3 after p2, which is new; p5 and p7 after p4 and p6, which are retained and need no waiting.
    first = next(
        copy for copy in plan.waves[0].copies if copy.slot.rank.value == 1 and copy.kind is CopyClass.SAME_NODE
    )
    assert duplicates[1].after == duplicates[1].source == first.slot
    assert duplicates[2].after is None and duplicates[3].after is None
    run = MigrationRun(plan)
    waiting = next(
        at for at, effect in enumerate(plan.effects) if isinstance(effect, Copy) and effect.after == first.slot
    )
    assert waiting not in run.ready()
    for at in (at for at, effect in enumerate(plan.effects) if getattr(effect, "slot", None) == first.slot):
        run.begin(at)
        run.complete(at)
    assert waiting in run.ready()


def test_five_copies_are_reserved_and_verified_before_the_one_publication_and_three_slots_go_after_it() -> None:
    kinds = [type(effect) for effect in planned(PRINTED).effects]
    assert kinds == [Copy, Verify] * 5 + [Publish] + [Retire] * 3


def test_what_payload_excludes_is_named() -> None:
    named = {name.replace("checkpoint framing", "framing of checkpoints") for name in EXCLUDED_FROM_PAYLOAD}
    excluded = {name.replace("temporaries", "temporary copy buffers") for name in FIXTURE["excluded_from_payload"]}
    assert named == excluded
