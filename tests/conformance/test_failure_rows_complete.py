"""Every failure row of the specification has a test of its own, named by its id."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = {row["id"]: row for row in json.loads((HERE / "data" / "failure_labs.json").read_text())["rows"]}


@cache
def by_row() -> dict[str, list[str]]:
    """Test functions of this folder by the row that they name: `test_fl_04g_01_...` is one of FL-04G-01."""
    found: dict[str, list[str]] = {}
    for file in sorted(HERE.glob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and (named := re.match(r"test_([a-z]{2}_\d\w+_\d\d)_\w", node.name)):
                found.setdefault(named[1].upper().replace("_", "-"), []).append(f"{file.name}::{node.name}")
    return found


def test_the_specification_has_a_hundred_and_forty_rows() -> None:
    assert len(ROWS) == 140


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_a_test_that_is_named_by_its_id(row: str) -> None:
    assert by_row().get(row), f"no test_{row.lower().replace('-', '_')}_... performs: {ROWS[row]['mistake']}"


def test_every_test_that_is_named_by_an_id_names_a_row() -> None:
    unknown = {name: tests for name, tests in by_row().items() if name not in ROWS}
    assert not unknown
