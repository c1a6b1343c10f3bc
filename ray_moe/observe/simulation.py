"""A simulation for people: a table per cluster, and balance over time as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ray_moe.controlplane.simulate import Report
from ray_moe.observe.png import BLACK, GREY, PALE, SERIES, Canvas, text_width, ticks

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1100, 300, 70, 60, 40
_MOST = 4.0  # of the vertical axis: what is worse is all alike


def render_simulation(document: Mapping[str, Any]) -> RenderableType:
    """Takes the document of `ray-moe simulate`, before there are results."""
    trace, shifts = document["trace"], document["trace"]["shifts"]
    return Group(
        Text(f"trace {trace['name']}: {trace['steps']} steps, {trace['layers']} layers, {trace['experts']} experts"),
        Text(f"shifts at {', '.join(map(str, shifts[:12])) or 'none'}{' ...' if len(shifts) > 12 else ''}"),
        Text(f"times are predictions of the cost model {document['costs']['name']}; nothing is measured", style="dim"),
    )


def render_cluster(cluster: Mapping[str, Any], target: float, grace: int) -> RenderableType:
    table = Table(header_style="bold")
    table.add_column("policy/cadence")
    for heading in (
        *("max/mean, mean", "p95", "worst", f"p95 from {grace} steps after a shift", f"steps until p95 <= {target:g}"),
        *("moved", "of it between nodes", "peak per GPU", "step, ms (predicted)", "over the oracle"),
    ):
        table.add_column(heading, justify="right", max_width=14)
    for one in cluster["contenders"]:
        late, regret = one["p95_settled"], one["regret"]
        table.add_row(
            one["name"],
            f"{one['mean']:.3f}",
            f"{one['p95']:.3f}",
            f"{one['worst']:.2f}",
            "-" if late is None else f"{late:.3f}",
            _settled(one["settled"]),
            decimal(one["moved_bytes"]),
            decimal(one["across_nodes_bytes"]),
            decimal(one["peak_rank_bytes"]),
            f"{one['predicted_step_s'] * 1e3:.3f}",
            "-" if regret is None else f"{regret:+.1%}",
        )
    spare = cluster["spare_slots"]
    experts = cluster["slots"] - spare
    head = f"{cluster['gpus']} GPUs on {cluster['nodes']} nodes, {cluster['slots']} slots per layer"
    head += f" ({spare / experts:.1%} spare)"
    return Group(Text(head, style="bold"), table)


def _settled(shifts: Sequence[Mapping[str, int | None]]) -> str:
    """The slowest shift, and how many never settled."""
    known = [shift["steps"] for shift in shifts if shift["steps"] is not None]
    never = [f"{len(shifts) - len(known)} never"] if len(known) < len(shifts) else []
    return ", ".join([*([f"<= {max(known)}"] if known else []), *never]) or "-"


# -- The picture


def draw(reports: Sequence[Report], target: float) -> bytes:
    """A PNG: largest over mean rank load, the mean of all layers, step by step; one panel per cluster.

    Upright lines are shifts, the level one is `target`.
    """
    canvas = Canvas(_WIDTH + _LEFT + 20, (_HEIGHT + _TOP + _BOTTOM) * len(reports))
    for number, report in enumerate(reports):
        _panel(canvas, (_HEIGHT + _TOP + _BOTTOM) * number + _TOP, report, target)
    return canvas.to_png()


def _panel(canvas: Canvas, top: int, report: Report, target: float) -> None:
    courses = [*report.courses, *([report.oracle] if report.oracle is not None else [])]
    by_course = [course.balance_TL.mean(axis=1) for course in courses]
    high = min(_MOST, max(1.2, *(float(balance_T.max()) for balance_T in by_course)))
    bottom = top + _HEIGHT

    def x_of(step: object) -> np.ndarray:
        return _LEFT + np.asarray(step, float) / max(report.trace.steps - 1, 1) * (_WIDTH - 1)

    def y_of(balance: object) -> np.ndarray:
        return bottom - (np.clip(np.asarray(balance, float), 1, high) - 1) / (high - 1) * (_HEIGHT - 1)

    for tick in ticks(1.0, high):
        canvas.fill(_LEFT, int(y_of(tick)), _WIDTH, 1, PALE)
        canvas.text(8, int(y_of(tick)) - 5, f"{tick:.2f}", GREY)
    for shift in report.trace.shifts:
        canvas.fill(int(x_of(shift)), top, 1, _HEIGHT, GREY)
    canvas.fill(_LEFT, int(y_of(target)), _WIDTH, 1, BLACK)
    for colour, balance_T in zip(_colours(len(courses)), by_course, strict=True):
        canvas.line(x_of(np.arange(len(balance_T))), y_of(balance_T), colour)
    for tick in ticks(0, report.trace.steps - 1, 8):
        canvas.text(int(x_of(tick)) - 8, bottom + 10, f"{tick:.0f}", GREY)

    gpus = report.setting.shape.num_ranks
    canvas.text(8, top - 50, f"{gpus} GPUs  max/mean rank load by step  ({report.trace.name})")
    left = _LEFT
    for colour, course in zip(_colours(len(courses)), courses, strict=True):
        canvas.fill(left, top - 24, 14, 10, colour)
        canvas.text(left + 20, top - 24, course.name)
        left += 44 + text_width(course.name)


def _colours(count: int) -> list[tuple[int, int, int]]:
    return [SERIES[number % len(SERIES)] for number in range(count)]
