"""Programs that some tests need and that no Python package brings: Prometheus, a browser.

A machine without them skips those tests with one line that says so. Where RAY_MOE_REQUIRE_TOOLS=1 is set, as in
`.ci/run`, what is missing is a failure: a test that never runs shows nothing.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

REQUIRE_TOOLS = "RAY_MOE_REQUIRE_TOOLS"

# Program -> the Debian package that has it. Debian puts some where only root's PATH looks.
PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
}
_ALSO = "/usr/bin:/usr/local/bin:/usr/sbin"


def find_tool(name: str) -> Path | None:
    """Where a program is, or None."""
    found = shutil.which(name) or shutil.which(name, path=_ALSO)
    return Path(found) if found else None


def require_tool(name: str) -> Path:
    """Where a program is. Without it the calling test, or its whole module, is skipped; or fails if tools are required.

    May be called while a module is imported, in a fixture and in a test.
    """
    path = find_tool(name)
    if path is not None:
        return path
    reason = f"{name} is not installed (Debian: apt-get install {PACKAGES.get(name, name)})"
    if os.environ.get(REQUIRE_TOOLS) == "1":
        pytest.fail(f"{reason}, and {REQUIRE_TOOLS}=1 does not let its tests be skipped", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
