"""What every benchmark writes: where and how it was measured, then rows; and one table for people."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]
_PAPER = 240  # columns, where no terminal sets them
_PACKAGES = ("torch", "ray", "transformers")


def provenance() -> dict[str, Any]:
    """Hardware, versions, command and date of this run."""
    return {
        "hardware": f"{_processor()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "command": " ".join(["python", "-m", "ray_moe.bench", *sys.argv[1:]]),
        "date": date.today().isoformat(),
    }


def write(path: Path, rows: Sequence[Row], **notes: Any) -> None:
    """One JSON document: provenance, notes, rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(), **notes, "rows": list(rows)}, indent=1) + "\n")


def show(title: str, rows: Sequence[Row]) -> None:
    """The rows as a table, columns in order of first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_cell(row.get(name, "")) for name in columns))
    console = Console()
    Console(width=None if console.is_terminal else _PAPER).print(table)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
