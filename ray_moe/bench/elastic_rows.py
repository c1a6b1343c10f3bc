"""From the courses of `ray_moe.bench.elastic` to `elastic.json`, and the clients' timestamps beside it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ray_moe.bench.elastic import Course, Event, Size, measure
from ray_moe.bench.elastic_resident import first_and_last, growth_of_survivors
from ray_moe.bench.elastic_seen import (
    CONTROL,
    Gaps,
    Window,
    across,
    disorders,
    failures,
    gaps_of,
    inexact,
    longest_gap,
    switch_gaps,
)
from ray_moe.bench.report import Row, provenance, write
from ray_moe.controlplane.operations import Stage

RAW = "elastic_raw.json.gz"
_SHOWN = 5  # examples of what went wrong
_METHOD = {
    "gaps": "seconds between two deliveries of a stream at its client; a gap belongs to the window in which it ends",
    "windows": "a change's reaches from its request to 0.3 s after its end; control windows lie between them",
    "token_exact": "against the same requests, greedy and seeded, on a placement that stood still",
    "slots of the next step": "in every rebalance one layer keeps none of its physical slots (rank and pool slot), so "
    "that whatever a stream's token routes to in that layer is served by another slot than the step before",
    "switch gaps": "from a stream's last delivery of one generation to its first of the next",
    "peaks": "most bytes of resident slots of each rank so far, beside the most that plans needed there",
    "memory": "means over the first and the last cycles, between changes; processes on this machine by kind",
}


def run(size: Size, out: Path) -> list[Row]:
    """Measure; write `elastic.json` and the raw timestamps under `out` after each phase. Returns the rows."""
    courses: list[Course] = []
    for course in measure(size):
        courses.append(course)
        rows = store(courses, out)
    return rows if courses else []


def store(courses: Sequence[Course], out: Path) -> list[Row]:
    """Both files under `out`; returns the rows."""
    rows = [row_of(course) for course in courses]
    raw = {**provenance(), "courses": [raw_of(course) for course in courses]}
    out.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(out / RAW, "wb", mtime=0) as file:
        file.write(json.dumps(raw, separators=(",", ":")).encode())
    write(out / "elastic.json", rows, method=_METHOD, raw=RAW)
    return rows


def table(row: Row) -> list[Row]:
    """What people are shown: a line for each plain value."""
    return [{"figure": name, "value": value} for name, value in row.items() if not isinstance(value, dict | list)]


def row_of(course: Course) -> Row:
    """Counts and judgements first, then gaps beside the control's, then what is of this course alone."""
    streams, windows = course.streams, course.windows
    failed, wrong = failures(streams), inexact(streams, course.scripts)
    disordered = disorders(streams, course.epoch_of)
    changing = [window for window in windows if window.what != CONTROL]
    control = [window for window in windows if window.what == CONTROL]
    switches = switch_gaps(streams)
    undone = [event for event in course.events if event.operation.stage is not Stage.DONE]
    rounds = len(course.samples) if course.name == "resize" else len(course.events)
    return {
        "name": course.name,
        "events": len(course.events),
        "rounds": rounds,
        "rounds_asked": course.asked,
        "complete": rounds == course.asked and not course.stopped_by,
        "stopped_by": course.stopped_by,
        "streams": course.size.seats,
        "requests": len(streams),
        "tokens": sum(len(stream.token_ids) for stream in streams),
        "failed_requests": len(failed),
        "failures": failed[:_SHOWN],
        "token_exact": not wrong,
        "inexact_streams": len(wrong),
        "inexact": wrong[:_SHOWN],
        "one_generation_and_epoch_per_token_in_order": not disordered,
        "disorders": disordered[:_SHOWN],
        "operations_not_done": [f"{event.operation.stage}: {event.operation.reason}" for event in undone][:_SHOWN],
        **_gap_columns(gaps_of(streams, changing), gaps_of(streams, control)),
        "switch_gap_median_s": median(switches) if switches else None,
        "switch_gap_max_s": max(switches, default=None),
        "max_gap_anywhere_s": longest_gap(streams),
        "operation_median_s": median(event.seconds for event in course.events) if course.events else None,
        "operation_max_s": max((event.seconds for event in course.events), default=None),
        "pause_max_s": max((event.operation.pause_s for event in course.events), default=None),
        "moved_bytes": sum(sum(event.operation.moved_bytes.values()) for event in course.events),
        "peak_as_planned": all(needed == held for event in course.events for needed, held in event.peaks.values()),
        "peak_bytes": max((held for event in course.events for _, held in event.peaks.values()), default=0),
        "planned_peak_bytes": max((needed for event in course.events for needed, _ in event.peaks.values()), default=0),
        **_OWN_COLUMNS[course.name](course),
        "config": course.config.model_dump(mode="json", exclude_defaults=True),
    }


def _gap_columns(changing: Gaps | None, control: Gaps | None) -> dict[str, Any]:
    if changing is None or control is None:
        return {}
    extra = (changing.p999 - control.p999) / control.median
    return {**changing.columns(), **control.columns("control_"), "extra_steps_at_p999": extra}


def _of_rebalances(course: Course) -> dict[str, Any]:
    changes = [event.change for event in course.events if event.change is not None]
    crossed = [_across(course, event) for event in course.events]
    return {
        "streams_across_a_switch_min": min(crossed, default=0),
        "moved_share_of_a_layer_min": min((min(change.moved.values()) for change in changes), default=0.0),
        "rebalances_with_other_slots_at_the_next_step": sum(
            bool(change.replaced) and streams > 0
            for change, streams in zip((event.change for event in course.events), crossed, strict=True)
            if change is not None
        ),
    }


def _of_resizes(course: Course) -> dict[str, Any]:
    by_change: dict[str, list[Window]] = {}
    control_by_ranks: dict[int, list[Window]] = {}
    for window in course.windows:
        if window.what == CONTROL:
            control_by_ranks.setdefault(window.ranks, []).append(window)
        else:
            by_change.setdefault(window.what, []).append(window)
    return {
        "cycles": len(course.samples),
        "ranks_used": len({rank for sample in course.samples for rank in sample.peers}),
        "moved_requests": sum(event.moved_requests for event in course.events),
        "streams_across_a_switch_min": min((_across(course, event) for event in course.events), default=0),
        "by_change": {what: _columns(course, windows) for what, windows in by_change.items()},
        "control_by_ranks": {ranks: _columns(course, windows) for ranks, windows in control_by_ranks.items()},
        "memory": first_and_last(course.samples),
        "rss_growth_of_survivors": growth_of_survivors(course.samples),
    }


def _columns(course: Course, windows: Sequence[Window]) -> dict[str, Any]:
    found = gaps_of(course.streams, windows)
    return found.columns() if found is not None else {}


_OWN_COLUMNS: dict[str, Callable[[Course], dict[str, Any]]] = {"rebalance": _of_rebalances, "resize": _of_resizes}


def _across(course: Course, event: Event) -> int:
    return across(course.streams, event.operation.last_generation)


def raw_of(course: Course) -> dict[str, Any]:
    """Everything that the row was made of."""
    return {
        "name": course.name,
        "scripts": [
            {"prompt_ids": list(script.prompt_ids), "token_ids": list(script.token_ids)} for script in course.scripts
        ],
        "windows": [
            [window.what, window.ranks, *(round((at - course.origin) * 1e6) for at in (window.start, window.end))]
            for window in course.windows
        ],
        "events": [_plain(event) for event in course.events],
        "memory": [sample.numbers() | {"peers": sample.peers} for sample in course.samples],
        "streams": [stream.document(course.origin) for stream in course.streams],
    }


def _plain(event: Event) -> dict[str, Any]:
    operation, change = event.operation, event.change
    return {
        "what": event.what,
        "number": operation.number,
        "stage": operation.stage.value,
        "reason": operation.reason,
        "ranks": list(operation.ranks),
        "generations": [operation.first_generation, operation.last_generation],
        "waves": operation.waves,
        "seconds": round(event.seconds, 4),
        "pause_s": round(operation.pause_s, 5),
        "moved_bytes": dict(operation.moved_bytes),
        "moved_requests": event.moved_requests,
        "moved_share_by_layer": dict(change.moved) if change is not None else None,
        "replaced_layers": list(change.replaced) if change is not None else None,
        "peaks_planned_and_held": {rank: list(peaks) for rank, peaks in event.peaks.items()},
    }
