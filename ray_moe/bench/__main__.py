"""`python -m ray_moe.bench [NAME ...] [--out FOLDER]`: run the CPU benchmarks, print tables, write JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from ray_moe.bench import engine, layer, payload, planner
from ray_moe.bench.report import Row, show, write

# name -> (title, what gives the rows, what of them people are shown).
BENCHMARKS: dict[str, tuple[str, Callable[[], list[Row]], Callable[[Sequence[Row]], Sequence[Row]]]] = {
    "engine": ("Tokens per second, 4 peers, beside transformers eager in one process", engine.run, lambda rows: rows),
    "layer": ("The step agreement, and one MoE layer in every way, 4 processes", layer.run, layer.table),
    "planner": ("EPLB maps beside the reference's rules, one run", planner.run, lambda rows: rows),
    "payload": ("Dispatch formats on the embedded model's rows: bytes and errors", payload.run, lambda rows: rows),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ray_moe.bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="which to run; all when none is named")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder for the JSON documents")
    given = parser.parse_args()
    for name in given.names or BENCHMARKS:
        title, run, shown = BENCHMARKS[name]
        rows = run()
        show(title, shown(rows))
        write(given.out / f"cpu_{name}.json", rows)


if __name__ == "__main__":
    main()
