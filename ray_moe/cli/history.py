"""history: who changed the cluster, when and why, and what it took."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ray_moe.cli.connection import attached, locate
from ray_moe.cli.options import Address, AsJson, Name
from ray_moe.cli.output import output
from ray_moe.errors import ConfigError


def history(
    last: Annotated[
        int | None, typer.Option("--last", metavar="N", help="The last N operations (default: all known).")
    ] = None,
    name: Name = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Show the operations that have ended and those under way, the newest last."""
    from ray_moe.observe.operations import history_table

    if last is not None and last < 1:
        raise ConfigError(f"--last must be >= 1, found {last}")
    chosen = name or "default"
    with output(as_json) as out, attached(locate(address, chosen)):
        from ray_moe.actors.reports import OperationRow
        from ray_moe.cluster import connect

        found = connect(chosen).history()
        rows = [asdict(OperationRow.of(operation)) for operation in (found if last is None else found[-last:])]
        out.result({"name": chosen, "operations": rows})
        if as_json:
            return
        if rows:
            out.show(history_table(rows))
        else:
            out.show(f"cluster {chosen} has not been changed since it came up")
