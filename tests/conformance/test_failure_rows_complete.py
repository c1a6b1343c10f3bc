"""Every failure row of the chapters 0x03 to 0x0A has a test of its own, named by its id."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = {row["id"]: row for row in json.loads((HERE / "data" / "failure_labs.json").read_text())["rows"]}
# Chapters by the first digits of a section: 0x04G, 0x05H, 0x06I and 0x06F, 0x07I, 0x08K, 0x09F, 0x0AF, and all of 0x03.
CHAPTERS = ("0x03", "0x04", "0x05", "0x06", "0x07", "0x08", "0x09", "0x0A")
OURS = [name for name, row in ROWS.items() if row["section"].startswith(CHAPTERS)]


@cache
def by_row() -> dict[str, list[str]]:
    """Test functions of this folder by the row that they name: `test_fl_04g_01_...` is one of FL-04G-01."""
    found: dict[str, list[str]] = {}
    for file in sorted(HERE.glob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and (named := re.match(r"test_([a-z]{2}_\d\w+_\d\d)_\w", node.name)):
                found.setdefault(named[1].upper().replace("_", "-"), []).append(f"{file.name}::{node.name}")
    return found


def test_the_chapters_have_ninety_five_rows() -> None:
    assert len(OURS) == 95


@pytest.mark.parametrize("row", OURS)
def test_a_row_has_a_test_that_is_named_by_its_id(row: str) -> None:
    assert by_row().get(row), f"no test_{row.lower().replace('-', '_')}_... performs: {ROWS[row]['mistake']}"


def test_every_test_that_is_named_by_an_id_names_a_row() -> None:
    unknown = {name: tests for name, tests in by_row().items() if name not in ROWS}
    assert not unknown
