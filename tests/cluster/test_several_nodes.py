"""Peers on several Ray nodes: domains come from Ray, and rows cross between nodes through one relay each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_moe.models import tiny_moe_path
from tests.e2e.matrix import TINY_MOE, prompts_of
from tests.e2e.oracle import Reference

pytestmark = pytest.mark.cluster

PROGRAM_S = 240
TOKENS = 24


@pytest.mark.full
def test_two_raylets_are_two_nodes_and_the_relays_between_them_change_no_token() -> None:
    prompts = prompts_of(TINY_MOE)[:4]
    program = subprocess.run(
        [sys.executable, "-m", "tests.cluster.several_nodes", json.dumps(prompts), str(TOKENS)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-3000:]
    seen = json.loads(program.stdout.splitlines()[-1])
    assert sorted(map(len, seen["domains"].values())) == [2, 2]
    reference = Reference(tiny_moe_path())
    for prompt, tokens in zip(prompts, seen["tokens"], strict=True):
        assert reference.near_ties(prompt, tokens) == 0
    assert all(peer["state"] == "serving" and peer["audited"] for peer in seen["peers"])
    # Every audited token's routes were followed to their slots and back; some reach the other node.
    assert sum(peer["fan_out"]["nodes"] for peer in seen["peers"]) > sum(
        peer["fan_out"]["tokens"] for peer in seen["peers"]
    )
    assert sum(peer["rows_sent"] for peer in seen["peers"]) == sum(peer["rows_received"] for peer in seen["peers"])
