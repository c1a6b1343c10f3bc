"""trace: a timeline of the next steps of all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
    from ray_moe.engine.trace import Recorder
    from ray_moe.observe.chrome import timeline, totals, totals_table

    Recorder.check_seconds(seconds, "--seconds")
    chosen = name or "default"
    with output(as_json) as out, _writable(chrome), attached(locate(address, chosen)):
        from ray_moe.cluster import connect

        ranks = [asdict(one) for one in connect(chosen).trace(steps, seconds)]
        found = min((len(one["steps"]) for one in ranks), default=0)
        if not found:
            raise NotServingError(f"no step with work ran within {seconds:g} s: send requests, and try again")
        document = timeline(chosen, ranks)
        try:
            chrome.write_text(json.dumps(document), encoding="utf-8")
        except OSError as error:
            raise _refused(chrome, error) from error
        told = document["otherData"]
        out.result({"file": str(chrome), "events": len(document["traceEvents"]), **told, "seconds": totals(ranks)})
        out.show(totals_table(ranks))
        if told["truncated"] or told["spans_left_out"]:
            out.say("the recording was full before its end: ask for fewer steps")
        elif found < steps:
            out.say(f"{found} of {steps} steps came within {seconds:g} s")
        out.show(f"{found} steps of {len(ranks)} ranks: {chrome} (open it at ui.perfetto.dev)")


@contextmanager
def _writable(chrome: Path) -> Iterator[None]:
    """Around a recording, which must not be lost for want of a file to write it to: `ConfigError` before it begins.

    What the file held stays until there is a timeline; a file that was not there is gone again where none comes.
    """
    try:
        if not chrome.parent.is_dir():
            raise ConfigError(f"--chrome: {chrome.parent} is no folder")
        was_there = os.path.lexists(chrome)
        if not chrome.exists() or chrome.is_file() or chrome.is_dir():  # a pipe or a device may take no second opening
            chrome.open("a", encoding="utf-8").close()
        elif not os.access(chrome, os.W_OK):
            raise ConfigError(f"--chrome: cannot write {chrome}")
    except OSError as error:
        raise _refused(chrome, error) from error
    try:
        yield
    except BaseException:
        if not was_there:
            chrome.unlink(missing_ok=True)
        raise


def _refused(chrome: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--chrome: cannot write {chrome}: {error.strerror or error}")
