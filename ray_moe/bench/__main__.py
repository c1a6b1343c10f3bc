"""`python -m ray_moe.bench [NAME ...] [--out FOLDER]`: run the CPU benchmarks, print tables, write JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ray_moe.bench import engine, layer
from ray_moe.bench.report import Row, show, write

BENCHMARKS: dict[str, tuple[str, Callable[[], list[Row]]]] = {
    "engine": ("Tokens per second, 4 peers, beside transformers eager in one process", engine.run),
    "layer": ("One MoE layer and the step agreement, 4 processes, over each group", layer.run),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ray_moe.bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="which to run; all when none is named")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder for the JSON documents")
    given = parser.parse_args()
    for name in given.names or BENCHMARKS:
        title, run = BENCHMARKS[name]
        rows = run()
        show(title, rows)
        write(given.out / f"cpu_{name}.json", rows)


if __name__ == "__main__":
    main()
