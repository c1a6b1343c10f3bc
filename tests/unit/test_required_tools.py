"""A test that needs a program which is not there is skipped with one line, or fails where programs are required."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tools import REQUIRE_TOOLS, require_tool


def test_a_program_that_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert require_tool(Path(sys.executable).name) == Path(sys.executable)


def test_without_it_the_test_is_skipped_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRE_TOOLS, raising=False)
    with pytest.raises(
        pytest.skip.Exception, match=r"^no-such-tool is not installed \(Debian: apt-get install no-such-tool\)$"
    ):
        require_tool("no-such-tool")


def test_where_tools_are_required_it_fails_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_TOOLS, "1")
    with pytest.raises(
        pytest.fail.Exception, match=r"no-such-tool is not installed .* does not let its tests be skipped"
    ):
        require_tool("no-such-tool")
