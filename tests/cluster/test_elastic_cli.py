"""rebalance, scale, drain, cancel, history and release against a cluster that runs: commands as processes, one cluster.

Every test takes the cluster as it finds it, serving on two peers, and leaves it so. Commands take seconds to start: a
rank that comes is suspended while it loads, so that they find its operation under way.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.test_cli import WITHIN_S, Shell, assert_nothing_is_left

pytestmark = pytest.mark.cluster

LAYERS, EXPERTS = range(4), range(16)


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    folder = Path(tempfile.mkdtemp(prefix="moe"))
    yours = Shell(folder)
    size = ("--peers", "2", "--set", "min_peers=2", "--set", "max_peers=3", "--spare-slots", "2")
    try:
        yours.answer("up", "--model", "tiny-moe", "--no-http", *size)
        yield yours
        yours.answer("down")
        assert_nothing_is_left(yours)
    finally:
        for process in yours.processes():
            process.kill()
        shutil.rmtree(folder)


def ranks(shell: Shell) -> list[int]:
    return [peer["rank"] for peer in shell.answer("status")["peers"]]


def history(shell: Shell) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shell.answer("history")["operations"]
    return found


def until_it_is(process: subprocess.Popen[str], stage: str) -> str:
    """Read what a watching command says until its operation has come so far; that line."""
    assert process.stderr is not None
    for line in process.stderr:
        if f": {stage}" in line:
            return line
    raise AssertionError(f"the command ended before the operation was {stage}")


def experts(shell: Shell) -> set[psutil.Process]:
    """The processes of the cluster's ranks."""
    (raylet,) = (process for process in shell.processes() if process.name() == "raylet")
    found = set()
    for process in raylet.children(recursive=True):
        with suppress(psutil.Error):
            if "ExpertActor" in " ".join(process.cmdline()):
                found.add(process)
    return found


@contextmanager
def grow_that_stays_preparing(shell: Shell, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that watches a rank come, and its operation's number. The rank goes on to load after the block."""
    there = experts(shell)
    watching = shell.start("scale", "3", *arguments)
    number = until_it_is(watching, "preparing").split()[1]
    deadline = time.monotonic() + 60
    while not (coming := experts(shell) - there):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for process in coming:
        process.suspend()
    try:
        yield watching, number
    finally:
        for process in coming:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def test_a_dry_run_tells_what_the_rebalance_then_takes_and_changes_nothing(shell: Shell) -> None:
    wanted = ("rebalance", "--replicas", "*:3=2")
    told = shell.answer(*wanted, "--dry-run")
    assert told["waves"] == 1
    assert [layer["moved"] for layer in told["layers"]] == [1, 1, 1, 1]

    done = shell.answer(*wanted, "--why", "expert 3 is asked for most")
    assert (done["kind"], done["stage"], done["why"]) == ("rebalance", "done", "expert 3 is asked for most")
    assert (done["from_generation"], done["to_generation"]) == (told["generation"], told["generation"] + 1)
    assert sum(done["moved_bytes"].values()) == sum(told["payload_bytes"].values()) > 0
    status = shell.answer("status")
    copies = Counter((slot["layer"], slot["expert"]) for slot in status["slots"])
    assert {key for key, count in copies.items() if count == 2} == {(layer, 3) for layer in LAYERS}
    # Of this one wave, since nothing has moved before it.
    assert sum(peer["peak_resident_bytes"] for peer in status["peers"]) == told["peak_resident_bytes"]
    assert [row for row in history(shell) if row["from_generation"] == told["generation"]] == [done]


@pytest.mark.full
def test_a_plan_file_is_carried_out_and_one_that_finds_no_slots_fails_with_its_reason(shell: Shell) -> None:
    status = shell.answer("status")
    first, second = (peer["rank"] for peer in status["peers"])
    file = shell.folder / "homes.json"
    # In layer 2 two experts of each rank change places; the spare slots hold as many.
    held = {slot["expert"]: slot["rank"] for slot in status["slots"] if slot["layer"] == 2}
    moving = [
        *sorted(e for e in EXPERTS if held[e] == first)[2:4],
        *sorted(e for e in EXPERTS if held[e] == second)[2:4],
    ]
    wanted = {e: first + second - rank if e in moving else rank for e, rank in held.items()}
    file.write_text(json.dumps({2: list(wanted.items())}))
    code, stdout, stderr = shell.run("rebalance", "--plan", str(file))
    assert code == 0, stderr
    assert " (rebalance) is done: generation " in stdout
    assert {slot["expert"]: slot["rank"] for slot in shell.answer("status")["slots"] if slot["layer"] == 2} == wanted

    file.write_text(json.dumps({0: [[e, rank] for e in EXPERTS for rank in (first, second)]}))
    code, stdout, stderr = shell.run("rebalance", "--plan", str(file), "--json")
    failed = json.loads(stdout)
    assert (code, failed["stage"]) == (1, "failed")
    assert "pool slots" in failed["reason"]
    assert stderr.splitlines()[-1] == f"error: operation {failed['number']} (rebalance) has failed: {failed['reason']}"

    file.write_text(json.dumps({7: [[0, first]]}))
    code, stdout, stderr = shell.run("rebalance", "--plan", str(file))
    assert (code, stdout) == (2, "")
    assert stderr == f"error: {file}: layer 7 expert 0: layer must be one of [0, 1, 2, 3], found 7\n"


@pytest.mark.full
def test_cancelling_undoes_a_grow_and_whoever_watches_it_is_told_with_exit_1(shell: Shell) -> None:
    before = ranks(shell)
    with grow_that_stays_preparing(shell, "--json") as (watching, number):
        code, table, stderr = shell.run("status")
        assert code == 0, stderr
        assert "to start and to load" in table
        cancelling = shell.start("cancel", number, "--why", "not today", "--json")
        until_it_is(cancelling, "undoing")
    stdout, stderr = cancelling.communicate(timeout=WITHIN_S)
    assert cancelling.returncode == 0, stderr
    cancelled = json.loads(stdout)
    assert (cancelled["stage"], str(cancelled["number"])) == ("cancelled", number)
    assert cancelled["reason"].endswith(": not today")
    stdout, stderr = watching.communicate(timeout=WITHIN_S)
    assert (watching.returncode, json.loads(stdout)) == (1, cancelled)
    last = stderr.splitlines()[-1]
    assert last.startswith(f"error: operation {number} (grow by rank ") and last.endswith(": not today")
    assert ranks(shell) == before

    for wrong, message in (("999", "operation 999 is not known"), (number, f"operation {number} is cancelled: only")):
        code, stdout, stderr = shell.run("cancel", wrong)
        assert (code, stdout, stderr.count("\n")) == (2, "", 1)
        assert stderr.startswith(f"error: {message}")


@pytest.mark.full
def test_ctrl_c_stops_watching_but_the_rank_comes_a_named_one_goes_and_history_tells_it(shell: Shell) -> None:
    before = ranks(shell)
    with grow_that_stays_preparing(shell, "--why", "evening") as (watching, number):
        watching.send_signal(signal.SIGINT)
        _, stderr = watching.communicate(timeout=WITHIN_S)
        assert watching.returncode == 130
        assert f"operation {number} goes on; `ray-moe cancel {number}` undoes it, `ray-moe history` tells" in stderr
        same = shell.answer("scale", "3")
        assert (same["number"], same["stage"]) == (None, "done"), "the rank that is on its way counts"

    code, stdout, stderr = shell.run("drain", str(before[0]))  # begins when the grow has ended
    assert code == 0, stderr
    assert f"(shrink of rank {before[0]}) is done: generation " in stdout
    grown, drained = history(shell)[-2:]
    assert (str(grown["number"]), grown["kind"], grown["stage"]) == (number, "grow", "done")
    assert (drained["kind"], drained["ranks"], drained["stage"]) == ("shrink", before[:1], "done")
    assert ranks(shell) == [before[1], *grown["ranks"]]

    code, table, stderr = shell.run("history", "--last", "2")
    assert code == 0, stderr
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if "│" in line]
    assert [(row[1], row[2], row[5], row[-1]) for row in rows if row[0].isdigit()] == [
        ("grow", str(grown["ranks"][0]), "evening", "done"),
        ("shrink", str(before[0]), "asked for", "done"),
    ]


def test_what_cannot_be_is_one_line_and_exit_2(shell: Shell) -> None:
    (first, second) = ranks(shell)
    for arguments, message in (
        (("scale", "4"), "peers must be in [2, 3], found 4"),
        (("drain", "99"), f"rank must be one of [{first}, {second}], found 99"),
        (("rebalance", "--replicas", "0:16=2"), "replicas: layer 0 expert 16: expert must be in [0, 16), found 16"),
    ):
        code, stdout, stderr = shell.run(*arguments)
        assert (code, stdout, stderr) == (2, "", f"error: {message}\n")


def test_a_release_is_built_shown_not_promoted_too_early_and_rolled_back_with_its_reason(shell: Shell) -> None:
    serving = shell.answer("status")["release_id"]
    built = shell.answer("release", "build", "--set", "runner=block_sparse", "--why", "is it faster?")
    name = built["release_id"]
    assert (built["prior"], built["why"], built["auto"], built["phase"]) == (serving, "is it faster?", False, "waiting")
    deadline = time.monotonic() + WITHIN_S
    while (phase := shell.answer("release", "status")["rollouts"][-1]["phase"]) != "shadow":  # and so it stays, idle
        assert phase in ("waiting", "verifying")
        assert time.monotonic() < deadline

    code, stdout, stderr = shell.run("release", "promote", "--json")
    refused = json.loads(stdout)["error"]
    assert (code, refused["type"], stderr.count("\n")) == (1, "ReleaseError", 1)
    assert refused["message"].startswith("not_promoted: ") and f"release {name} is " in refused["message"]

    gone = shell.answer("release", "rollback", name, "--why", "not today", "--wait", "120")
    assert (gone["release_id"], gone["phase"]) == (name, "rolled_back")
    assert gone["reason"].endswith("not today")
    told = shell.answer("release", "status")
    assert [one["release_id"] for one in told["releases"] if one["dispatching"]] == [serving]
    assert [(one["release_id"], one["reason"]) for one in told["rollouts"]] == [(name, gone["reason"])]


@pytest.mark.full
def test_a_release_is_promoted_by_hand_once_its_evidence_is_there_and_serves(shell: Shell) -> None:
    name = shell.answer(
        *("release", "build", "--set", "transport=all_gather_filter", "--share", "0.5", "--shadow-rate", "0.5")
    )["release_id"]
    deadline = time.monotonic() + WITHIN_S
    while True:  # people ask it things meanwhile, and promote it as soon as they may
        shell.answer("generate", "--prompt", "HAMLET. To be,", "--max-tokens", "300", "--ignore-eos")
        code, stdout, _ = shell.run("release", "promote", "--wait", "30", "--json")
        if code == 0:
            break
        assert json.loads(stdout)["error"]["type"] == "ReleaseError"
        assert time.monotonic() < deadline
    promoted = json.loads(stdout)
    assert (promoted["release_id"], promoted["phase"]) == (name, "active")
    status = shell.answer("status")
    assert (status["release_id"], status["transport"]) == (name, "all_gather_filter")
    code, shown, stderr = shell.run("release", "status")
    assert code == 0, stderr
    assert f"{name}: ACTIVE, takes new dispatches" in shown
    gone = shell.answer("release", "rollback", "--why", "a drill")
    assert gone["phase"] == "rolled_back"
