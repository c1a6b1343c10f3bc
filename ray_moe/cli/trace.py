"""trace: a timeline of the next steps of all ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ray_moe.cli.connection import attached, locate
from ray_moe.cli.options import Address, AsJson, Name
from ray_moe.cli.output import output
from ray_moe.errors import ConfigError, NotServingError


def trace(
    chrome: Annotated[
        Path, typer.Option("--chrome", metavar="FILE", help="Where to write the timeline (ui.perfetto.dev reads it).")
    ],
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="So many steps with work.")] = 20,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="Wait so long for them; then take what has come.")
    ] = 30.0,
    name: Name = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Record where the next steps spend their time, on every rank, and write it as a timeline.

    Costs the recorded steps some microseconds per layer, and others nothing.
    """
    from ray_moe.observe.chrome import timeline, totals, totals_table

    if seconds <= 0:
        raise ConfigError(f"--seconds must be > 0, found {seconds:g}")
    if not chrome.parent.is_dir():
        raise ConfigError(f"--chrome: {chrome.parent} is no folder")
    chosen = name or "default"
    with output(as_json) as out, attached(locate(address, chosen)):
        from ray_moe.cluster import connect

        ranks = [asdict(one) for one in connect(chosen).trace(steps, seconds)]
        found = min((len(one["steps"]) for one in ranks), default=0)
        if not found:
            raise NotServingError(f"no step with work ran within {seconds:g} s: send requests, and try again")
        document = timeline(chosen, ranks)
        chrome.write_text(json.dumps(document), encoding="utf-8")
        told = document["otherData"]
        out.result({"file": str(chrome), "events": len(document["traceEvents"]), **told, "seconds": totals(ranks)})
        out.show(totals_table(ranks))
        if told["truncated"] or told["spans_left_out"]:
            out.say("the recording was full before its end: ask for fewer steps")
        elif found < steps:
            out.say(f"{found} of {steps} steps came within {seconds:g} s")
        out.show(f"{found} steps of {len(ranks)} ranks: {chrome} (open it at ui.perfetto.dev)")
