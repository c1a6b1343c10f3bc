"""The command line for real: commands as processes, from a folder that is not the project's, with an empty home."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ray_moe.cli.demo import reference_tokens

pytestmark = pytest.mark.cluster

WITHIN_S = 200


@dataclass(frozen=True)
class Shell:
    """Runs `ray-moe` as whoever has just installed it: no token, no configuration, no cluster."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        places = {"HOME": str(self.folder), "RAY_MOE_HOME": str(self.folder / "moe"), "RAY_TMPDIR": str(self.folder)}
        return kept | places

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ray_moe.cli.main", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=WITHIN_S)
        return process.returncode, stdout, stderr

    def answer(self, *arguments: str) -> dict[str, Any]:
        """The one JSON document of a command that succeeds."""
        code, stdout, stderr = self.run(*arguments, "--json")
        assert code == 0, stderr
        assert stdout.count("\n") == 1, "stdout is one line of JSON and nothing else"
        return json.loads(stdout)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that a command of this shell has started, directly or not."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("RAY_MOE_HOME") == str(self.folder / "moe")
        except psutil.Error:
            return False


@pytest.fixture
def shell() -> Iterator[Shell]:
    # pytest's own folders are too deep for the names of Ray's sockets.
    folder = Path(tempfile.mkdtemp(prefix="moe"))
    yours = Shell(folder)
    yield yours
    for process in yours.processes():
        process.kill()
    shutil.rmtree(folder)


def assert_nothing_is_left(shell: Shell) -> None:
    deadline = time.monotonic() + 10
    while (left := shell.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    assert not (shell.folder / ".ray").exists(), "no token was written into the home directory"


def test_the_demo_chats_over_http_and_equals_transformers(shell: Shell) -> None:
    made = shell.answer("demo")
    assert made["parity"] is True
    assert made["greedy_token_ids_by_peer"] == [made["reference_token_ids"]] * 4
    assert all(rank["rows_dispatched"] > 0 for rank in made["ranks"])
    assert made["tokens"] == len(made["token_ids"]) > 8
    assert made["text"].strip()
    assert (made["peers"], made["generation"], made["model"]) == (4, 1, "tiny-moe")
    assert [rank["rank"] for rank in made["ranks"]] == [0, 1, 2, 3]
    assert not any(rank["trunk_has_experts"] for rank in made["ranks"])
    # 16 experts in each of 4 layers, and the demo's replicas: one more in every layer, two more in the first.
    assert sum(sum(rank["resident_slots"].values()) for rank in made["ranks"]) == 4 * 16 + 4 + 2
    assert all(rank["rows_sent"] == rank["rows_dispatched"] + rank["rows_computed"] for rank in made["ranks"])
    assert sum(rank["rows_dispatched"] for rank in made["ranks"]) == sum(
        rank["rows_computed"] for rank in made["ranks"]
    )
    act = made["elastic"]
    assert act["token_exact"] is True and act["tokens"] > 0
    assert [change["kind"] for change in act["changes"]] == ["rebalance", "grow", "shrink"]
    assert act["hottest"]["copies"] > act["hottest"]["copies_before"]
    assert act["ranks"] == [1, 2, 3, 4], "rank 4 joined, rank 0 left"
    epochs = [placement["epoch"] for placement in act["placements"]]
    assert epochs == sorted(epochs) and set(epochs) == {0, 1, 2}
    assert_nothing_is_left(shell)


def test_a_cluster_outlives_up_answers_others_and_ends_with_down(shell: Shell) -> None:
    up = shell.answer("up", "--model", "tiny-moe", "--peers", "2", "--replicas", "*:3=2", "--port", "0")
    assert httpx.get(f"{up['http_url']}/health", trust_env=False, timeout=30).status_code == 200
    listening = [line for process in shell.processes() for line in _listens_outside(process) if _is_rays(process)]
    assert listening == [], "Ray's own processes listen on loopback only"

    found = shell.answer("status")
    assert (found["state"], found["name"], found["http_url"]) == ("serving", "default", up["http_url"])
    assert len(found["slots"]) == 4 * 17
    greedy = ("--max-tokens", "12", "--temperature", "0")
    made = shell.answer("generate", "--address", "auto", "--prompt", "KING HENRY:", *greedy)
    assert (made["peers"], made["generation"], made["finish_reason"]) == (2, 1, "length")
    assert made["text"]
    (shell.folder / "in.jsonl").write_text('{"id": "a", "prompt": "Enter Hamlet", "max_tokens": 4}\n')
    batch = shell.answer("batch", "in.jsonl", "out.jsonl")
    assert (batch["answered"], batch["failed"]) == (1, 0)
    assert '"a"' in (shell.folder / "out.jsonl").read_text()
    code, stdout, stderr = shell.run("up", "--model", "tiny-moe", "--json")
    assert code == 2
    assert json.loads(stdout)["error"]["message"].startswith("a cluster named 'default' was started at")
    assert stderr.count("\n") == 1

    assert shell.answer("down") == {"name": "default", "address": up["address"], "stopped": True, "ray_ended": True}
    assert_nothing_is_left(shell)
    assert list((shell.folder / "moe").iterdir()) == []


def _is_rays(process: psutil.Process) -> bool:
    return process.name() in ("gcs_server", "raylet")


def _listens_outside(process: psutil.Process) -> list[str]:
    sockets = [found for found in process.net_connections("tcp") if found.status == psutil.CONN_LISTEN]
    return [f"{process.name()} {found.laddr}" for found in sockets if not found.laddr.ip.endswith("127.0.0.1")]


@pytest.mark.full
def test_generate_brings_its_own_cluster_and_needs_no_tokenizer_for_token_ids(
    shell: Shell, family_dir: Callable[..., Path]
) -> None:
    model = family_dir("qwen3_moe")
    arguments = ("--model", str(model), "--peers", "2", "--prompt-token-ids", "5,17,99,3", "--max-tokens", "10")
    made = shell.answer("generate", *arguments, "--temperature", "0", "--ignore-eos")
    assert made["text"] is None
    assert tuple(made["token_ids"]) == reference_tokens(model, (5, 17, 99, 3), 10)
    assert_nothing_is_left(shell)


@pytest.mark.full
def test_ctrl_c_while_a_cluster_comes_up_ends_everything_and_exits_130(shell: Shell) -> None:
    process = shell.start("up", "--model", "tiny-moe", "--json")
    deadline = time.monotonic() + 60
    while not any(found.name() == "raylet" for found in shell.processes()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert json.loads(stdout)["error"]["type"] == "Interrupted"
    assert stderr.endswith("\nerror: interrupted\n")
    assert list((shell.folder / "moe").glob("*.json")) == []
    assert_nothing_is_left(shell)


def test_a_model_that_cannot_be_served_is_one_line_and_exit_2(shell: Shell) -> None:
    code, stdout, stderr = shell.run("generate", "--model", "/nowhere", "--prompt", "a")
    assert (code, stdout, stderr) == (2, "", "error: model '/nowhere' is not a folder\n")


@pytest.mark.full
def test_a_model_that_does_not_fit_is_one_line_with_the_sums_and_exit_2_and_leaves_nothing(shell: Shell) -> None:
    arguments = ("--model", "tiny-moe", "--peers", "2", "--spare-slots", "2", "--no-http")
    code, stdout, stderr = shell.run("up", *arguments, "--set", "memory_bytes=3145728")
    *_, told = stderr.splitlines()
    assert (code, stdout) == (2, "")
    assert told.startswith("error: rank 0 needs ")
    assert "than its 3 MiB (memory_bytes 3145728): trunk " in told
    assert all(term in told for term in ("expert slots", "2 of them spare", "KV cache", "work buffers"))
    assert_nothing_is_left(shell)
    assert list((shell.folder / "moe").glob("*.json")) == []
