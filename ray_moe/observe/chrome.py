"""A recording of steps as a timeline: Chrome's trace-event format, which Perfetto reads, and a table of the time.

Takes `dataclasses.asdict` of what `Cluster.trace` gives. One process of the timeline is a rank, its threads are the
loop and the device. Ranks of one machine share a clock; those of others are put on it by their wall clocks, and moved
to where what they agreed on is possible: nobody has a step's agreement before everybody has offered a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

Row = Mapping[str, Any]
LOOP, DEVICE = 1, 2  # threads of a rank


def shifts(ranks: Sequence[Row]) -> dict[int, tuple[int, int]]:
    """By rank: nanoseconds that put its times on the first rank's clock, and how far off that can be at the most.

    (0, 0) for those of the first one's machine. Bounds come from the steps that both have; where the wall clocks
    contradict them they give way.
    """
    found: dict[int, tuple[int, int]] = {}
    for one in ranks:
        first = ranks[0]
        if one["clock"]["machine"] == first["clock"]["machine"]:
            found[one["rank"]] = (0, 0)
            continue
        by_wall = _lag(one) - _lag(first)
        bounds = _bounds(first, one)
        if bounds is None:
            found[one["rank"]] = (by_wall, -1)
            continue
        low, high = bounds
        placed = min(max(by_wall, low), high) if low <= high else (low + high) // 2
        found[one["rank"]] = (placed, max(placed - low, high - placed))
    return found


def _lag(rank: Row) -> int:
    return int(rank["clock"]["wall"] - rank["clock"]["monotonic"])


def _bounds(first: Row, other: Row) -> tuple[int, int] | None:
    """The least and the most that other's times can lie behind the first's; None without a step of both."""
    heres, theres = ({step["step"]: _agreeing(step) for step in one["steps"]} for one in (first, other))
    both = [(heres[step], theres[step]) for step in heres.keys() & theres.keys()]
    pairs = [(here, there) for here, there in both if here is not None and there is not None]
    if not pairs:
        return None
    # `there` after it is moved: its agreement comes after our offer, ours after its offer.
    return max(here[0] - there[1] for here, there in pairs), min(here[1] - there[0] for here, there in pairs)


def _agreeing(step: Row) -> tuple[int, int] | None:
    """When a step's record for the next one had not been offered yet, and when all records were there."""
    times = {span["name"]: span for span in step["spans"] if span["layer"] < 0}
    if "offer" not in times or "agreement" not in times:
        return None
    return times["offer"]["start"], times["agreement"]["end"]


def timeline(name: str, ranks: Sequence[Row]) -> dict[str, Any]:
    """The trace-event document of a recording on cluster `name`. Times are microseconds since its first step began."""
    moved = shifts(ranks)
    starts = [step["start"] + moved[one["rank"]][0] for one in ranks for step in one["steps"]]
    origin = min(starts, default=0)
    events: list[dict[str, Any]] = []
    for one in ranks:
        rank, shift = one["rank"], moved[one["rank"]][0] - origin
        events += _names(rank, f"rank {rank} on {one['node']}")
        for step in one["steps"]:
            about = {key: step[key] for key in ("step", "generation", "epoch", "release_id", "rows")}
            about |= {"units": ", ".join(step["units"])}
            events.append(_event(f"step {step['step']}", "step", rank, LOOP, step["start"], step["end"], shift, about))
            for span in step["spans"]:
                thread = DEVICE if span["on_device"] else LOOP
                args = {"step": step["step"], **({"layer": span["layer"]} if span["layer"] >= 0 else {})}
                kind = "device" if span["on_device"] else "layer" if span["layer"] >= 0 else "loop"
                events.append(_event(span["name"], kind, rank, thread, span["start"], span["end"], shift, args))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "cluster": name,
            "ranks": len(ranks),
            "steps": min((len(one["steps"]) for one in ranks), default=0),
            "truncated": any(one["truncated"] for one in ranks),
            "spans_left_out": sum(step["left_out"] for one in ranks for step in one["steps"]),
            "clock_uncertainty_us": {str(rank): off / 1e3 for rank, (_, off) in moved.items()},
        },
    }


def _event(
    name: str, kind: str, rank: int, thread: int, start: int, end: int, shift: int, args: Mapping[str, Any]
) -> dict[str, Any]:
    at, lasted = (start + shift) / 1e3, (end - start) / 1e3
    return {"name": name, "cat": kind, "ph": "X", "ts": at, "dur": lasted, "pid": rank, "tid": thread, "args": args}


def _names(rank: int, title: str) -> list[dict[str, Any]]:
    def said(what: str, thread: int, value: Mapping[str, Any]) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": value}

    return [
        said("process_name", LOOP, {"name": title}),
        said("process_sort_index", LOOP, {"sort_index": rank}),
        said("thread_name", LOOP, {"name": "steps"}),
        said("thread_name", DEVICE, {"name": "device"}),
    ]


# -- Where the time went


def totals(ranks: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Seconds by span and rank, steps as a whole included, in the order in which spans come first."""
    found: dict[str, dict[int, float]] = {"step": {}}
    for one in ranks:
        for step in one["steps"]:
            for name, seconds in (("step", step["end"] - step["start"]), *_host_spans(step)):
                by_rank = found.setdefault(name, {})
                by_rank[one["rank"]] = by_rank.get(one["rank"], 0.0) + seconds / 1e9
    return found


def _host_spans(step: Row) -> Iterable[tuple[str, int]]:
    ordered = sorted(step["spans"], key=lambda span: (span["start"], -span["end"]))
    for span in ordered:
        name = f"{span['name']} (device)" if span["on_device"] else span["name"]
        yield (f"  {name}" if span["layer"] >= 0 else name), span["end"] - span["start"]


def totals_table(ranks: Sequence[Row]) -> Table:
    """Milliseconds of an average step by span (inner ones are part of outer ones), a column per rank."""
    steps = max(1, min((len(one["steps"]) for one in ranks), default=1))
    table = Table(title=f"milliseconds of a step, mean of {steps}", title_justify="left", header_style="bold")
    table.add_column("span")
    numbers = [one["rank"] for one in ranks]
    for rank in numbers:
        table.add_column(f"rank {rank}", justify="right")
    for name, by_rank in totals(ranks).items():
        table.add_row(name, *(f"{by_rank.get(rank, 0.0) / steps * 1e3:.3f}" for rank in numbers))
    return table
