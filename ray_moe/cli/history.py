"""history: who changed the cluster, when and why, and what it took; as a table, stage by stage, or as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ray_moe.cli.connection import attached, locate
from ray_moe.cli.options import Address, AsJson, Name
from ray_moe.cli.output import Output, output
from ray_moe.deadline import pause
from ray_moe.errors import ConfigError, DeadlineError

_LOOK_S = 0.5

Row = Mapping[str, Any]


def history(
    last: Annotated[
        int | None, typer.Option("--last", metavar="N", help="The last N operations (default: all known).")
    ] = None,
    number: Annotated[
        int | None, typer.Option("--operation", metavar="N", help="One operation, from stage to stage.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Every step of every operation from now on, as it happens; Ctrl-C ends it.")
    ] = False,
    name: Name = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Show the operations that have ended and those under way, the newest last."""
    from ray_moe.observe.operations import history_table, stages_table

    if last is not None and last < 1:
        raise ConfigError(f"--last must be >= 1, found {last}")
    if sum((last is not None, number is not None, watch)) > 1:
        raise ConfigError("--last, --operation and --watch show different things: give one of them")
    chosen = name or "default"
    with output(as_json) as out, attached(locate(address, chosen)):
        from ray_moe.cluster import connect
        from ray_moe.controlplane.operation_row import OperationRow

        cluster = connect(chosen)
        if number is not None:
            row = asdict(OperationRow.of(cluster.operation(number)))
            out.result({"name": chosen, "operation": row})
            out.show(stages_table(row, time.time()))
            return

        def rows() -> list[dict[str, Any]]:
            return [asdict(OperationRow.of(operation)) for operation in cluster.history()]

        if watch:
            _watch(rows, out)
            return
        found = rows() if last is None else rows()[-last:]
        out.result({"name": chosen, "operations": found})
        if as_json:
            return
        if found:
            out.show(history_table(found))
        else:
            out.show(f"cluster {chosen} has not been changed since it came up")


def _watch(rows: Callable[[], list[dict[str, Any]]], out: Output) -> None:
    from ray_moe.observe.operations import edge_line

    try:
        for row, edge in news(rows, lambda: pause(_LOOK_S)):
            out.result(edge)
            if not out.as_json:
                out.show(edge_line(row, edge))
    except KeyboardInterrupt:
        return  # how one leaves it


def news(rows: Callable[[], list[dict[str, Any]]], rest: Callable[[], None]) -> Iterator[tuple[Row, Row]]:
    """Edges that operations take after this begins, in the order of time, each once; `rest` comes between two looks."""
    from ray_moe.observe.operations import edges

    told: dict[int, int] = {row["number"]: len_of(row) for row in rows()}
    while True:
        rest()
        try:
            found = rows()
        except DeadlineError:
            continue  # a controller that starts again answers later, and has forgotten nothing
        fresh = [(row, edge) for row in found for edge in edges(row) if edge["number"] > told.get(row["number"], 0)]
        told |= {row["number"]: len_of(row) for row in found}
        yield from sorted(fresh, key=lambda pair: (pair[1]["at"], pair[1]["operation"], pair[1]["number"]))


def len_of(row: Row) -> int:
    """How many edges an operation has taken, those that are forgotten included."""
    return int(row["trail"][-1]["number"]) if row["trail"] else 0
