"""Batches as jobs of a Ray cluster: submitted as people do it, killed anywhere, submitted again, every id once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_moe.cli import head as heads
from ray_moe.cli.records import Head, Record

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cluster_configs" / "jobs" / "batch.sh"


@dataclass(frozen=True)
class Jobs:
    """A Ray with a job server, and what a shell that submits to it has in its environment."""

    record: Record
    environment: dict[str, str]

    def submit(self, *arguments: object) -> subprocess.Popen[str]:
        return self._start(str(SCRIPT), *arguments)

    def run(self, *arguments: object) -> subprocess.Popen[str]:
        """The same without the job server, whose own part takes seconds."""
        return self._start(str(Path(sys.executable).parent / "ray-moe"), "batch", *arguments)

    def _start(self, *command: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(part) for part in command],
            env=self.environment,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self, chosen: Callable[[list[str]], bool]) -> list[psutil.Process]:
        found = []
        for process in heads.processes_of(self._head):
            try:
                if chosen(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue  # it has just ended
        return found

    @property
    def _head(self) -> Head:
        assert self.record.head is not None
        return self.record.head


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    home = tmp_path_factory.mktemp("home")
    environment = {
        **os.environ,
        "RAY_MOE_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_MOE_HOME", "PYTHONPATH", "PATH"):
            patch.setenv(name, environment[name])
        record = heads.start_head("jobs", "tiny-moe", num_cpus=4, dashboard=True, seconds=120)
        assert record.head is not None
        try:
            arguments = psutil.Process(record.head.pid).cmdline()
            port = next(text.partition("=")[2] for text in arguments if text.startswith("--dashboard-port="))
            reach = {"RAY_ADDRESS": record.address, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}"}
            yield Jobs(record, environment | heads.environment_of(record) | reach)
        finally:
            heads.end_head(record)


def write_prompts(path: Path, count: int) -> Path:
    rows = [{"id": f"p{i}", "prompt": f"Act {i}", "max_tokens": 16, "ignore_eos": True} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def until(holds: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)
    return found


def parts(output: Path) -> list[Path]:
    return list(Path(f"{output}.job").glob("part-*.jsonl"))


def rows_done(output: Path) -> int:
    return sum(len(json.loads(part.open().readline())["rows"]) for part in parts(output))


def drivers(jobs: Jobs, output: Path) -> list[psutil.Process]:
    """The process that runs the batch, not the shells around it."""
    return jobs.processes(lambda command: str(output) in command and "batch" in command)


def experts(jobs: Jobs) -> list[psutil.Process]:
    return jobs.processes(lambda command: bool(command) and "ExpertActor" in command[0])


def finished(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    said, _ = process.communicate(timeout=seconds)
    return process.returncode, said


def require_every_id_once(output: Path, count: int) -> list[str]:
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(count)]
    assert all(row["completion_tokens"] == 16 for row in rows)
    assert not Path(f"{output}.errors.jsonl").exists()
    assert parts(output) == []
    return [row["text"] for row in rows]


def kill_and_submit_again(jobs: Jobs, tmp_path: Path, count: int, after: int) -> None:
    source, output = write_prompts(tmp_path / "in.jsonl", count), tmp_path / "out.jsonl"
    job = (source, output, "--model", "tiny-moe", "--peers", "2", "--concurrency", "8", "--checkpoint-s", "0.2")
    first = jobs.submit(*job)
    until(lambda: parts(output) and rows_done(output) >= after)
    (driver,) = drivers(jobs, output)
    driver.send_signal(signal.SIGKILL)
    code, said = finished(first)
    assert code != 0 and "failed" in said
    done = rows_done(output)
    assert after <= done < count and not output.exists()
    code, said = finished(jobs.submit(*job))
    assert code == 0, said
    assert f"{count} of {count} rows answered, {done} of them by an earlier run" in said
    require_every_id_once(output, count)
    assert experts(jobs) == [], "the job's own cluster ends with it"


def test_a_submitted_job_that_is_killed_is_submitted_again_and_every_id_is_answered_once(
    jobs: Jobs, tmp_path: Path
) -> None:
    kill_and_submit_again(jobs, tmp_path, count=60, after=10)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_thousand_prompts_survive_a_kill_midway(jobs: Jobs, tmp_path: Path) -> None:
    kill_and_submit_again(jobs, tmp_path, count=1000, after=400)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_kills_at_random_points_of_driver_and_experts_change_no_answer(jobs: Jobs, tmp_path: Path) -> None:
    """Ten of each, each at a random time of a random phase: start, loading, reading, generating, ending."""
    count, chance = 400, random.Random(8)
    source, output, untouched = (
        write_prompts(tmp_path / "in.jsonl", count),
        tmp_path / "out.jsonl",
        tmp_path / "a.jsonl",
    )
    options = ("--model", "tiny-moe", "--peers", "2", "--checkpoint-s", "0.5", "--concurrency", "4")
    code, said = finished(jobs.run(source, untouched, *options[:-2]))
    assert code == 0, said
    expected = require_every_id_once(untouched, count)

    kills = [*["driver"] * 10, *["expert"] * 10]
    chance.shuffle(kills)
    whole = 0
    process = jobs.run(source, output, *options)
    for kill in kills:
        time.sleep(chance.uniform(1, 12))
        if kill == "expert":
            for expert in chance.sample(experts(jobs), k=min(1, len(experts(jobs)))):
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
        process = jobs.run(source, output, *options)
    code, said = finished(process, 600)
    assert code == 0, said
    assert require_every_id_once(output, count) == expected
    assert whole < 5, "most kills should hit a job that runs"
