"""Every kernel compiles for sm_90 as its wrapper launches it, and keeps its numbers in registers; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Shared memory of a thread block on sm_90.
SHARED_BYTES = 227 * 1024
# The portable FP8 program has two sums of 64 numbers and a third of products in each thread, and spills a few of its
# addresses; `fp8_warp`, which the large shapes take, does not.
SPILLED = {"_fp8_gate_up_kernel": 144, "_fp8_down_kernel": 144}


def _require_resources(group: str, cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "tests.kernels.hopper", group]
    found = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report
    for name, kernels in report.items():
        assert kernels, name
        for kernel in kernels:
            assert kernel["spilled"] <= SPILLED.get(kernel["kernel"], 0), (name, kernel)
            assert kernel["shared"] <= SHARED_BYTES, (name, kernel)


def test_kernels_compile_for_hopper_without_spilling(tmp_path: Path) -> None:
    _require_resources("tuned", tmp_path)


@pytest.mark.full
def test_other_shapes_biases_and_clamps_compile_too(tmp_path: Path) -> None:
    _require_resources("more", tmp_path)
