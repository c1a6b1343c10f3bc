"""The specification's eleven tasks and nine buffers (0x09B to 0x09E), scheduled by the product."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import pytest

from ray_moe.dataplane.schedule import (
    Allocation,
    BufferUse,
    Span,
    Stream,
    Task,
    buffers_of,
    bulk,
    check_release,
    check_schedule,
    chunk_pipeline,
    critical_path,
    execution_order,
    lifetimes,
    list_schedule,
    microbatch_pipeline,
    serialize,
    shared_path,
)
from ray_moe.errors import ScheduleError
from ray_moe.evidence import Units

FIXTURE = json.loads((Path(__file__).parent / "data" / "overlap.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
TASKS = tuple(
    Task(line["task"], Units(line["duration_units"]), line["stream"], tuple(line["predecessors"]))
    for line in INPUTS["tasks_in_submission_order"]
)
BUFFERS = tuple(BufferUse(line["buffer"], line["producer"], tuple(line["consumers"])) for line in INPUTS["buffers"])
OVERLAPPED = list_schedule(TASKS)


def spans_of(table: dict[str, list[int]]) -> dict[str, Span]:
    return {name: Span(Units(start), Units(end)) for name, (start, end) in table.items()}


def test_one_after_another_is_the_printed_serialized_schedule() -> None:
    schedule = serialize(TASKS)
    assert dict(schedule) == spans_of(EXPECTED["serialized_schedule"])
    assert schedule.makespan == Units(EXPECTED["serialized_units"])
    check_schedule(TASKS, schedule)


def test_list_scheduling_gives_the_printed_overlapped_schedule() -> None:
    assert len(TASKS) == EXPECTED["num_tasks"]
    assert dict(OVERLAPPED) == spans_of(EXPECTED["overlapped_schedule"])
    assert OVERLAPPED.makespan == Units(EXPECTED["overlapped_units"])
    check_schedule(TASKS, OVERLAPPED)


def test_what_is_hidden_and_what_intersects_are_two_numbers() -> None:
    assert OVERLAPPED.hidden_units == Units(EXPECTED["hidden_units_optimistic"])
    common = Units(EXPECTED["compute_communication_intersection_units"])
    assert OVERLAPPED.intersection(Stream.COMPUTE, Stream.COMMUNICATION) == common
    assert OVERLAPPED.intersection(Stream.COMMUNICATION, Stream.COMPUTE) == common
    assert serialize(TASKS).intersection(Stream.COMPUTE, Stream.COMMUNICATION) == Units(0)


def test_the_critical_path_is_shorter_than_any_schedule_on_these_streams() -> None:
    assert critical_path(TASKS) == Units(DERIVED["critical_path_units"])
    assert min(makespans_of_all_orders()) == Units(DERIVED["minimum_makespan_units"]) == OVERLAPPED.makespan


def makespans_of_all_orders() -> list[Units]:
    """Every order of every stream's tasks that the dependencies allow, each order fixed by further dependencies."""
    lanes = [[task.name for task in TASKS if task.stream == stream] for stream in Stream]
    found = []
    for orders in product(*map(permutations, lanes)):
        after = {late: early for order in orders for early, late in pairwise(order)}
        fixed = [
            Task(task.name, task.duration, task.stream, (*task.predecessors, *filter(None, [after.get(task.name)])))
            for task in TASKS
        ]
        try:
            found.append(list_schedule(fixed).makespan)
        except ScheduleError as error:
            # The order contradicts a dependency.
            if error.reasons != ("cycle",):
                raise
    return found


def test_the_execution_order_starts_what_the_schedule_starts() -> None:
    assert execution_order(TASKS) == (
        *("route_plan", "pack_0", "shared_path", "pack_1", "dispatch_0", "dispatch_1"),
        *("expert_0", "expert_1", "combine_0", "combine_1", "reduce"),
    )


# -- Buffers


def test_buffers_live_from_their_producers_start_to_their_last_readers_end() -> None:
    assert len(BUFFERS) == EXPECTED["num_buffers"]
    assert lifetimes(BUFFERS, OVERLAPPED) == spans_of(DERIVED["buffer_lifetimes_from_producer_start"])


def test_the_printed_table_counts_most_buffers_from_their_producers_end() -> None:
    printed = EXPECTED["buffer_lifetimes_as_printed"]
    conventions = DERIVED["printed_allocation_convention"]
    buffers = [
        BufferUse(each.name, each.producer, each.consumers, Allocation(conventions[each.name])) for each in BUFFERS
    ]
    assert lifetimes(buffers, OVERLAPPED) == spans_of(
        {name: [line["allocated"], line["last_consumer_end"]] for name, line in printed.items()}
    )
    releases = {name: Units(line["release"]) for name, line in printed.items()}
    check_release(buffers, OVERLAPPED, releases)
    check_release(BUFFERS, OVERLAPPED, releases)


def test_the_nine_buffers_follow_from_the_dependencies_alone() -> None:
    assert sorted(buffers_of(TASKS), key=lambda use: use.name) == sorted(BUFFERS, key=lambda use: use.name)


# -- What must be refused


@pytest.mark.parametrize("case", FIXTURE["negative_cases"], ids=lambda case: case["case"])
def test_a_bad_schedule_is_refused_with_all_its_reasons(case: dict[str, Any]) -> None:
    spans = {**OVERLAPPED, **spans_of(case.get("change", {}))}
    releases = {name: Units(at) for name, at in case.get("buffer_release", {}).items()}

    def check() -> None:
        # Moved tasks move the ends of buffers too: a case checks its schedule or its releases.
        check_schedule(TASKS, spans)
        check_release(BUFFERS, spans, releases)

    with pytest.raises(ScheduleError) as error:
        check()
    assert list(error.value.reasons) == case["expected_reasons"]


# -- Designs

BUILT = {
    "bulk_all_to_all": bulk(),
    "peer_or_chunk_pipeline": chunk_pipeline(2),
    "shared_path_overlap": shared_path(),
    "microbatch_pipeline": microbatch_pipeline(2),
}


@pytest.mark.parametrize("design", FIXTURE["designs"], ids=lambda design: design["design"])
def test_every_design_is_built_and_legal(design: dict[str, str]) -> None:
    tasks = BUILT[design["design"]]
    check_schedule(tasks, list_schedule(tasks))


def test_two_chunks_are_the_fixture_without_its_shared_path() -> None:
    def without(names: Iterable[str]) -> tuple[str, ...]:
        return tuple("plan" if name == "route_plan" else name for name in names if name != "shared_path")

    alone = {
        name: Task(name, task.duration, task.stream, without(task.predecessors))
        for task in TASKS
        for name in without([task.name])
    }
    # The fixture's chunks differ in size, nominal ones do not.
    sized = [dataclasses.replace(task, duration=alone[task.name].duration) for task in chunk_pipeline(2)]
    assert {task.name: task for task in sized} == alone
    assert dict(list_schedule(sized)) == dict(list_schedule(tuple(alone.values())))
