"""Schedules: random graphs against their own constraints, buffers against their readers, and the four designs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.dataplane.schedule import (
    Allocation,
    BufferUse,
    NominalUnits,
    Schedule,
    Span,
    Stream,
    Task,
    buffers_of,
    bulk,
    check_release,
    check_schedule,
    check_tasks,
    chunk_pipeline,
    critical_path,
    execution_order,
    lifetimes,
    list_schedule,
    microbatch_pipeline,
    serialize,
    shared_path,
)
from ray_moe.errors import ConfigError, EvidenceError, ScheduleError
from ray_moe.evidence import Speedup, Units
from tests.layers import untimed

DESIGNS = {
    "bulk": bulk(),
    "chunk_pipeline_2": chunk_pipeline(2),
    "chunk_pipeline_5": chunk_pipeline(5),
    "shared_path": shared_path(),
    "microbatch_pipeline_2": microbatch_pipeline(2),
    "microbatch_pipeline_4": microbatch_pipeline(4),
}
designs = pytest.mark.parametrize("tasks", DESIGNS.values(), ids=DESIGNS.keys())


def span(start: int, end: int) -> Span:
    return Span(Units(start), Units(end))


def task(name: str, units: int, stream: str, *predecessors: str) -> Task:
    return Task(name, Units(units), stream, predecessors)


def reasons(error: pytest.ExceptionInfo[ScheduleError]) -> list[str]:
    return list(error.value.reasons)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Task, ...]:
    """Acyclic graphs on up to three streams, submitted in any order."""
    tasks: list[Task] = []
    for number in range(draw(st.integers(0, 9))):
        before = draw(st.sets(st.sampled_from([known.name for known in tasks]), max_size=3)) if tasks else set()
        stream = draw(st.sampled_from(("pack", "communication", "compute")))
        tasks.append(task(f"t_{number}", draw(st.integers(1, 6)), stream, *sorted(before)))
    return tuple(draw(st.permutations(tasks)))


# -- Random graphs


@given(graphs())
@untimed
def test_a_list_schedule_is_legal_and_lies_between_the_critical_path_and_one_after_another(
    tasks: tuple[Task, ...],
) -> None:
    overlapped, serial = list_schedule(tasks), serialize(tasks)
    check_schedule(tasks, overlapped)
    check_schedule(tasks, serial)
    assert critical_path(tasks) <= overlapped.makespan <= serial.makespan
    assert int(serial.makespan) == sum(int(each.duration) for each in tasks)
    assert overlapped.makespan + overlapped.hidden_units == serial.makespan


@given(graphs())
@untimed
def test_at_no_instant_does_an_idle_stream_leave_a_ready_task_waiting(tasks: tuple[Task, ...]) -> None:
    schedule = list_schedule(tasks)
    for each in tasks:
        ready = max((int(schedule[name].end) for name in each.predecessors), default=0)
        same = [schedule[other.name] for other in tasks if other.stream == each.stream and other != each]
        for instant in range(ready, int(schedule[each.name].start)):
            assert any(int(one.start) <= instant < int(one.end) for one in same)


@given(graphs())
@untimed
def test_the_execution_order_is_by_start_then_by_submission_and_keeps_every_dependency(tasks: tuple[Task, ...]) -> None:
    schedule, order = list_schedule(tasks), execution_order(tasks)
    submitted = [each.name for each in tasks]
    assert order == tuple(sorted(submitted, key=lambda name: (schedule[name].start, submitted.index(name))))
    for each in tasks:
        assert all(order.index(name) < order.index(each.name) for name in each.predecessors)
    assert execution_order(tuple(dataclasses.replace(each) for each in tasks)) is order


@given(graphs(), st.sampled_from(Allocation))
@untimed
def test_a_buffer_lives_through_all_its_readers_and_from_its_producers_start_if_it_is_not_handed_over(
    tasks: tuple[Task, ...], allocation: Allocation
) -> None:
    schedule = list_schedule(tasks)
    readers = {each.name: tuple(after.name for after in tasks if each.name in after.predecessors) for each in tasks}
    buffers = [BufferUse(f"of_{name}", name, after, allocation) for name, after in readers.items() if after]
    lives = lifetimes(buffers, schedule)
    for buffer in buffers:
        life, written = lives[buffer.name], schedule[buffer.producer]
        assert life.start == (written.end if allocation is Allocation.PRODUCER_END else written.start)
        for name in buffer.consumers:
            assert life.start <= schedule[name].start and schedule[name].end <= life.end
        assert life.end in [schedule[name].end for name in buffer.consumers]
    check_release(buffers, schedule, {name: life.end for name, life in lives.items()})
    for name, life in lives.items():
        with pytest.raises(ScheduleError) as error:
            check_release(buffers, schedule, {name: Units(int(life.end) - 1)})
        assert reasons(error) == ["early_release"]


# -- Tasks that no schedule can have


def test_a_graph_is_refused_with_all_its_reasons() -> None:
    tasks = [
        task("a", 1, "pack", "b"),
        task("b", 1, "pack", "a"),
        task("c", 1, "compute", "nobody"),
        task("d", 1, "compute"),
        task("d", 2, "compute"),
    ]
    for refuses in (check_tasks, serialize, list_schedule, critical_path):
        with pytest.raises(ScheduleError, match=r"d named more than once; c waits for nobody; .* after ") as error:
            refuses(tasks)
        assert reasons(error) == ["cycle", "duplicate_name", "unknown_predecessor"]


def test_a_task_that_waits_for_itself_is_a_cycle() -> None:
    with pytest.raises(ScheduleError, match="cycle: a after a"):
        check_tasks([task("a", 1, "pack", "a")])


def test_a_duration_is_at_least_one_unit_and_never_a_time() -> None:
    with pytest.raises(ScheduleError, match="duration: task a must take at least 1 unit, found 0 units"):
        task("a", 0, "pack")
    milliseconds: Any = 1.5
    with pytest.raises(EvidenceError, match=r"task a: a duration is in Units, found 1\.5"):
        Task("a", milliseconds, "pack")


def test_spans_that_end_where_others_start_do_not_collide() -> None:
    tasks = [task("a", 2, "pack"), task("b", 2, "pack")]
    check_schedule(tasks, {"a": span(2, 4), "b": span(0, 2)})
    with pytest.raises(ScheduleError, match=r"a \[1, 3\) units and b \[0, 2\) units on stream pack") as error:
        check_schedule(tasks, {"a": span(1, 3), "b": span(0, 2)})
    assert reasons(error) == ["stream_collision"]


def test_a_task_without_a_span_is_named() -> None:
    with pytest.raises(ScheduleError, match="unscheduled: b has no span"):
        check_schedule([task("a", 1, "pack"), task("b", 1, "pack")], {"a": span(0, 1)})


# -- Buffers that nobody can hold


def test_a_buffer_lists_its_readers() -> None:
    with pytest.raises(ScheduleError, match="no_consumer: buffer send_0 of pack_0 must list its readers"):
        BufferUse("send_0", "pack_0", ())


def test_a_buffer_of_unknown_tasks_and_a_reader_that_does_not_wait_are_both_named() -> None:
    spans = {"pack_0": span(0, 2), "dispatch_0": span(1, 3)}
    buffers = [BufferUse("send_0", "pack_0", ("dispatch_0",)), BufferUse("send_1", "pack_1", ("dispatch_0",))]
    with pytest.raises(ScheduleError, match=r"send_0 is read before pack_0.*; buffer send_1 names pack_1") as error:
        lifetimes(buffers, spans)
    assert reasons(error) == ["dependency", "unscheduled"]


def test_a_release_of_an_unknown_buffer_is_refused() -> None:
    with pytest.raises(ScheduleError, match="unknown_buffer: send_9 is released and was never declared"):
        check_release([], {}, {"send_9": Units(1)})


# -- Units are not time


def test_a_schedule_is_printed_in_units_and_never_as_a_time() -> None:
    schedule = list_schedule(bulk())
    assert f"{schedule.makespan}" == "12 units"
    assert f"{schedule['dispatch_0']}" == "[2, 5) units"
    for amount in (schedule.makespan, schedule.hidden_units, schedule["dispatch_0"].start):
        with pytest.raises(EvidenceError, match="no clock time"):
            f"{amount:.1f} ms"


def test_two_timelines_are_no_speed_up() -> None:
    serial: Any = serialize(shared_path()).makespan
    overlapped: Any = list_schedule(shared_path()).makespan
    with pytest.raises(EvidenceError, match="compares two measured times, found Units"):
        Speedup(serial, overlapped)


# -- The four designs


@designs
def test_a_design_is_legal_names_kinds_and_numbers_and_reads_every_buffer_it_writes(tasks: tuple[Task, ...]) -> None:
    schedule = list_schedule(tasks)
    check_schedule(tasks, schedule)
    kinds = {"plan", "pack", "dispatch", "expert", "combine", "shared_path", "reduce"}
    for each in tasks:
        assert each.kind in kinds
        assert each.name == (each.kind if each.index is None else f"{each.kind}_{each.index}")
    buffers = buffers_of(tasks)
    assert {buffer.producer for buffer in buffers} == {
        each.name for each in tasks if each.kind not in ("plan", "reduce")
    }
    assert len(lifetimes(buffers, schedule)) == len(buffers)


@designs
def test_no_expert_starts_before_its_own_dispatch_and_no_sum_before_all_it_sums(tasks: tuple[Task, ...]) -> None:
    by_name = {each.name: each for each in tasks}

    def all_before(name: str) -> set[str]:
        direct = set(by_name[name].predecessors)
        return direct.union(*map(all_before, direct))

    for each in tasks:
        if each.kind == "expert":
            assert f"dispatch_{each.index}" in all_before(each.name)
        if each.kind == "combine":
            assert each.predecessors == (f"expert_{each.index}",)
        if each.kind == "reduce":
            summed = {other.name for other in tasks if other.kind in ("combine", "shared_path")}
            mine = {name for name in summed if each.index is None or by_name[name].index == each.index}
            assert mine <= all_before(each.name)


def test_bulk_is_one_chain() -> None:
    assert execution_order(bulk()) == ("plan", "pack_0", "dispatch_0", "expert_0", "combine_0", "reduce")
    assert list_schedule(bulk()).hidden_units == Units(0)
    assert set(bulk()) == set(chunk_pipeline(1))


def test_a_chunk_computes_while_the_next_is_in_flight_and_returns_while_that_computes() -> None:
    order = execution_order(chunk_pipeline(2))
    assert order == (
        *("plan", "pack_0", "dispatch_0", "pack_1", "dispatch_1"),
        *("expert_0", "combine_0", "expert_1", "combine_1", "reduce"),
    )
    schedule = list_schedule(chunk_pipeline(2))
    assert schedule["expert_0"].start < schedule["dispatch_1"].end
    assert schedule.intersection(Stream.COMPUTE, Stream.COMMUNICATION) == Units(3 + 2)


def test_the_shared_path_runs_while_the_dispatch_is_in_flight() -> None:
    order = execution_order(shared_path())
    assert order == ("plan", "pack_0", "dispatch_0", "shared_path", "expert_0", "combine_0", "reduce")
    assert list_schedule(shared_path()).hidden_units > Units(0)
    use = {buffer.name: buffer.consumers for buffer in buffers_of(shared_path())}
    assert use["send_0"] == ("dispatch_0",)
    assert use["shared_output"] == ("reduce",)


def test_a_whole_batch_computes_while_the_next_is_in_flight_and_sums_by_itself() -> None:
    order = execution_order(microbatch_pipeline(2))
    launched = [order.index(name) for name in ("dispatch_0", "dispatch_1", "expert_0", "combine_0", "expert_1")]
    assert launched == sorted(launched)
    schedule = list_schedule(microbatch_pipeline(2))
    assert schedule["expert_0"].start < schedule["dispatch_1"].end
    assert {each.name for each in microbatch_pipeline(2) if each.kind in ("plan", "reduce")} == {
        *("plan_0", "plan_1", "reduce_0", "reduce_1")
    }


@pytest.mark.parametrize("parts", [0, -1])
def test_a_design_of_no_parts_is_refused(parts: int) -> None:
    for design in (chunk_pipeline, microbatch_pipeline):
        with pytest.raises(ConfigError, match=f"chunks and batches must be >= 1, found {parts}"):
            design(parts)


def test_nominal_units_are_parameters_and_change_the_order_only() -> None:
    slow = NominalUnits(dispatch=9)
    assert list_schedule(chunk_pipeline(2, slow))["dispatch_0"] == span(2, 11)
    assert sorted(execution_order(chunk_pipeline(2, slow))) == sorted(execution_order(chunk_pipeline(2)))


def test_a_schedule_is_a_mapping() -> None:
    schedule = serialize(bulk())
    assert isinstance(schedule, Schedule)
    assert (len(schedule), next(iter(schedule)), "pack_1" in schedule) == (6, "plan", False)
    assert dict(serialize([])) == {} and serialize([]).makespan == Units(0)
