"""ledger: what one audited invocation of a layer moved, computed and held."""

from __future__ import annotations

from typing import Annotated

import typer

from ray_moe.cli.connection import attached, locate
from ray_moe.cli.options import Address, AsJson, Name
from ray_moe.cli.output import output
from ray_moe.errors import ConfigError, NotServingError


def ledger(
    layer: Annotated[
        int | None, typer.Option("--layer", metavar="N", help="An MoE layer (default: the first).")
    ] = None,
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="The peer that accounts.")] = 0,
    name: Name = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Show the ledgers of the last audited invocation of a layer (audit_rate says how often that is)."""
    from ray_moe.observe.ledger import render_ledger

    chosen = name or "default"
    with output(as_json) as out:
        with attached(locate(address, chosen)):
            from ray_moe.cluster import connect

            found = connect(chosen).ledgers(rank)
        if not found:
            raise NotServingError(f"rank {rank} of cluster {chosen!r} has audited no invocation yet; send it a request")
        wanted = min(found) if layer is None else layer
        if wanted not in found:
            raise ConfigError(f"layer must be one of {', '.join(map(str, sorted(found)))}, found {wanted}")
        out.result(found[wanted])
        if not as_json:
            out.show(render_ledger(rank, found[wanted]))
