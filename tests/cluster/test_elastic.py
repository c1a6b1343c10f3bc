"""The elastic benchmark's own harness, small: 5 rebalances and a cycle of two resizes under 12 streams. Nothing here
depends on how fast the machine is."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_moe.bench.elastic import (
    FEWEST,
    MOST,
    Course,
    Size,
    rebalance_config,
    rehearse,
    run_rebalances,
    run_resizes,
    running,
)
from ray_moe.bench.elastic_rows import RAW, store
from ray_moe.bench.elastic_seen import across, disorders, failures, inexact
from ray_moe.controlplane.operations import Stage

pytestmark = pytest.mark.cluster

SIZE = Size(rebalances=5, cycles=1, left=24, lengths=(100, 160), control_s=0.3)


@pytest.fixture(scope="module")
def courses(local_ray: None) -> Iterator[dict[str, Course]]:
    """Both phases, one after the other on one cluster."""
    lines: list[str] = []
    with running(rebalance_config("elastic")) as cluster:
        known = rehearse(cluster, SIZE)
        phases = (run_rebalances, run_resizes)
        yield {course.name: course for course in (phase(cluster, known, SIZE, lines.append) for phase in phases)}


@pytest.mark.parametrize("name", ["rebalance", "resize"])
def test_no_request_notices(courses: dict[str, Course], name: str) -> None:
    course = courses[name]
    assert course.stopped_by == ""
    assert {event.operation.stage for event in course.events} == {Stage.DONE}
    assert failures(course.streams) == []
    assert inexact(course.streams, course.scripts) == []
    assert disorders(course.streams, course.epoch_of) == []
    temperatures = {course.scripts[stream.script].params.temperature for stream in course.streams}
    assert temperatures == {0.0, 0.8}, "greedy and seeded streams"


def test_each_rebalance_moves_a_tenth_of_every_layer_under_eight_streams_whose_next_step_uses_other_slots(
    courses: dict[str, Course],
) -> None:
    course = courses["rebalance"]
    assert len(course.events) == SIZE.rebalances
    for event in course.events:
        assert event.change is not None
        assert min(event.change.moved.values()) >= 0.1
        # In a layer of which no physical slot stays, whatever a token routes to is served by another slot.
        assert event.change.replaced
        assert across(course.streams, event.operation.last_generation) >= 8


def test_ranks_come_and_any_of_them_leave_with_their_requests(courses: dict[str, Course]) -> None:
    course = courses["resize"]
    grow, *shrinks = course.events
    assert (grow.what, grow.operation.ranks) == ("grow", (2, 3))
    leaving = {rank for event in shrinks for rank in event.operation.ranks}
    assert len(leaving) == MOST - FEWEST
    assert sum(event.moved_requests for event in shrinks) > 0
    assert set(course.samples[0].peers) == set(range(MOST)) - leaving
    assert len(set(course.epoch_of.values())) == 1 + len(course.events), "each resize begins an epoch"
    for event in course.events:
        assert across(course.streams, event.operation.last_generation) >= 8


def test_memory_peaks_where_the_plan_said_and_nothing_is_left_behind(courses: dict[str, Course]) -> None:
    for course in courses.values():
        for event in course.events:
            assert all(planned == held for planned, held in event.peaks.values()), event.peaks
    (sample,) = courses["resize"].samples
    assert sample.resident_slots == sample.placement_slots
    assert sample.live_generations == 1
    assert sample.actors == FEWEST + 2, "experts, controller, routing"
    assert sample.rooms == sum(rank >= FEWEST for rank in sample.peers), "room is reserved for ranks that came"
    assert all(peer["epochs"] <= 2 for peer in sample.peers.values())
    assert sample.processes["experts"]["processes"] == FEWEST


def test_the_rows_and_the_raw_timestamps_are_written_with_their_counts(
    courses: dict[str, Course], tmp_path: Path
) -> None:
    store(list(courses.values()), tmp_path)
    document = json.loads((tmp_path / "elastic.json").read_text())
    assert {"hardware", "versions", "command", "date", "rows"} <= document.keys()
    rebalance, resize = document["rows"]
    assert (rebalance["name"], rebalance["events"], rebalance["complete"]) == ("rebalance", SIZE.rebalances, True)
    assert (resize["name"], resize["cycles"], resize["complete"]) == ("resize", SIZE.cycles, True)
    for row in document["rows"]:
        assert (row["failed_requests"], row["token_exact"]) == (0, True)
        assert min(row[name] for name in ("max_gap_s", "p999_gap_s", "control_p999_gap_s", "control_median_s")) > 0
    raw = json.loads(gzip.decompress((tmp_path / RAW).read_bytes()))
    times = [time for course in raw["courses"] for stream in course["streams"] for time in stream["times_us"]]
    assert len(times) == sum(len(stream.times) for course in courses.values() for stream in course.streams)
