"""Batches as jobs of a Ray cluster: submitted as people do it, killed anywhere, submitted again, every id once."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.job_server import BIN, ROOT, Shell, experts, shell, until

__all__ = ["shell"]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SCRIPT = ROOT / "cluster_configs" / "jobs" / "batch.sh"


def write_prompts(path: Path, count: int) -> Path:
    rows = [{"id": f"p{i}", "prompt": f"Act {i}", "max_tokens": 16, "ignore_eos": True} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parts(output: Path) -> list[Path]:
    return list(Path(f"{output}.job").glob("part-*.jsonl"))


def rows_done(output: Path) -> int:
    return sum(len(json.loads(part.open().readline())["rows"]) for part in parts(output))


def drivers(shell: Shell, output: Path) -> list[psutil.Process]:
    """The process that runs the batch, not the shells around it."""
    return shell.processes(lambda command: str(output) in command and "batch" in command)


def finished(process: subprocess.Popen[str], seconds: float = 600) -> tuple[int, str]:
    said, _ = process.communicate(timeout=seconds)
    return process.returncode, said


def require_every_id_once(output: Path, count: int) -> list[str]:
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(count)]
    assert all(row["completion_tokens"] == 16 for row in rows)
    assert not Path(f"{output}.errors.jsonl").exists()
    assert parts(output) == []
    return [row["text"] for row in rows]


def kill_and_submit_again(shell: Shell, tmp_path: Path, count: int, after: int) -> None:
    source, output = write_prompts(tmp_path / "in.jsonl", count), tmp_path / "out.jsonl"
    job = (source, output, "--model", "tiny-moe", "--peers", "2", "--concurrency", "8", "--checkpoint-s", "0.2")
    first = shell.start(SCRIPT, *job)

    def begun() -> bool:
        assert first.poll() is None, finished(first)
        return bool(parts(output)) and rows_done(output) >= after

    until(begun, 600)  # seven processes that import torch come first: minutes, where two cores have other work too
    (driver,) = drivers(shell, output)
    driver.send_signal(signal.SIGKILL)
    code, said = finished(first)
    assert code != 0 and "failed" in said
    done = rows_done(output)
    assert after <= done < count and not output.exists()
    code, said = finished(shell.start(SCRIPT, *job))
    assert code == 0, said
    assert f"{count:,} of {count:,} rows answered, {done:,} of them by an earlier run" in said
    require_every_id_once(output, count)
    assert experts(shell) == [], "the job's own cluster ends with it"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_submitted_job_that_is_killed_is_submitted_again_and_every_id_is_answered_once(
    shell: Shell, tmp_path: Path
) -> None:
    kill_and_submit_again(shell, tmp_path, count=200, after=10)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_thousand_prompts_survive_a_kill_midway(shell: Shell, tmp_path: Path) -> None:
    kill_and_submit_again(shell, tmp_path, count=1000, after=400)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_kills_at_random_points_of_driver_and_experts_change_no_answer(shell: Shell, tmp_path: Path) -> None:
    """Ten of each, each at a random time of a random phase: start, loading, reading, generating, ending."""
    count, chance = 400, random.Random(8)
    source, output, untouched = (
        write_prompts(tmp_path / "in.jsonl", count),
        tmp_path / "out.jsonl",
        tmp_path / "a.jsonl",
    )
    options = ("--model", "tiny-moe", "--peers", "2", "--checkpoint-s", "0.5", "--concurrency", "4")
    code, said = finished(shell.start(BIN / "ray-moe", "batch", source, untouched, *options[:-2]))
    assert code == 0, said
    expected = require_every_id_once(untouched, count)

    kills = [*["driver"] * 10, *["expert"] * 10]
    chance.shuffle(kills)
    whole = 0
    process = shell.start(BIN / "ray-moe", "batch", source, output, *options)
    for kill in kills:
        time.sleep(chance.uniform(1, 12))
        if kill == "expert":
            for expert in chance.sample(experts(shell), k=min(1, len(experts(shell)))):
                expert.send_signal(signal.SIGKILL)
        elif process.poll() is None:
            process.send_signal(signal.SIGKILL)
        if process.poll() is None and kill == "expert":
            continue  # it brings its cluster back by itself
        finished(process)
        if output.exists():  # it got through before the kill: another one for the kills that are left
            assert require_every_id_once(output, count) == expected
            whole += 1
            output.unlink()
            shutil.rmtree(f"{output}.job")
        process = shell.start(BIN / "ray-moe", "batch", source, output, *options)
    code, said = finished(process, 600)
    assert code == 0, said
    assert require_every_id_once(output, count) == expected
    assert whole < 5, "most kills should hit a job that runs"
