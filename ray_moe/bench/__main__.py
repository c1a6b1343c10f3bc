"""`python -m ray_moe.bench [NAME ...] [--out FOLDER]`: run the CPU benchmarks, print tables, write JSON.

`elastic` takes half an hour and runs only when it is named.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ray_moe.bench import autoscale, batch, elastic_rows, engine, front_door, layer, metrics, payload, planner
from ray_moe.bench.elastic import Size
from ray_moe.bench.report import Row, show, write
from ray_moe.priority import USUAL_PRIORITY

# name -> (title, what gives the rows, what of them people are shown).
BENCHMARKS: dict[str, tuple[str, Callable[[], list[Row]], Callable[[Sequence[Row]], Sequence[Row]]]] = {
    "engine": ("Tokens per second, 4 peers, beside transformers eager in one process", engine.run, lambda rows: rows),
    "layer": ("The step agreement, and one MoE layer in every way, 4 processes", layer.run, layer.table),
    "planner": ("EPLB maps beside the reference's rules, one run", planner.run, lambda rows: rows),
    "autoscale": ("The autopilot beside fixed clusters, SIMULATED", autoscale.run, autoscale.table),
    "batch": ("A batch job beside the engine alone, 2 peers", batch.run, lambda rows: rows),
    "front-door": ("HTTP beside the SDK, 2 peers, one client process", front_door.run, lambda rows: rows),
    "metrics": ("A step with and without the export of metrics, 2 peers, in turns", metrics.run, lambda rows: rows),
    "payload": ("Dispatch formats on the embedded model's rows: bytes and errors", payload.run, lambda rows: rows),
}
FRONT_DOORS = frozenset({"batch", "front-door", "metrics"})  # their records are called by their names alone
ELASTIC = "elastic"


def main() -> None:
    os.environ |= USUAL_PRIORITY  # for the Rays that the benchmarks start
    parser = argparse.ArgumentParser(prog="python -m ray_moe.bench", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        choices=[[], *BENCHMARKS, ELASTIC],
        help=f"which to run; all but {ELASTIC} when none is named",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder for the JSON documents")
    parser.add_argument("--rebalances", type=int, default=Size.rebalances, help=f"of {ELASTIC}")
    parser.add_argument("--cycles", type=int, default=Size.cycles, help=f"of {ELASTIC}: two ranks to four and back")
    given = parser.parse_args()
    for name in given.names or BENCHMARKS:
        if name == ELASTIC:
            rows = elastic_rows.run(Size(rebalances=given.rebalances, cycles=given.cycles), given.out)
            for row in rows:
                show(f"Live changes under streaming clients: {row['name']}", elastic_rows.table(row))
            continue
        title, run, shown = BENCHMARKS[name]
        rows = run()
        show(title, shown(rows))
        write(given.out / f"{name.replace('-', '_') if name in FRONT_DOORS else f'cpu_{name}'}.json", rows)


if __name__ == "__main__":
    main()
