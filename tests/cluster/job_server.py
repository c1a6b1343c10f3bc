"""A Ray with a dashboard, as people submit jobs and deploy to it, and the processes on it."""

from __future__ import annotations

import os
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

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Shell:
    """A Ray with a dashboard, and what a shell that uses it has in its environment."""

    record: Record
    environment: dict[str, str]

    def start(self, *command: object) -> subprocess.Popen[str]:
        """A command in that shell."""
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
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    home = tmp_path_factory.mktemp("home")
    environment = {
        **os.environ,
        "RAY_MOE_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_MOE_HOME", "PYTHONPATH", "PATH"):
            patch.setenv(name, environment[name])
        record = heads.start_head("shell", "tiny-moe", num_cpus=4, dashboard=True, seconds=300)
        assert record.head is not None
        try:
            arguments = psutil.Process(record.head.pid).cmdline()
            port = next(text.partition("=")[2] for text in arguments if text.startswith("--dashboard-port="))
            dashboard = f"http://127.0.0.1:{port}"
            reach = {"RAY_ADDRESS": record.address, "RAY_API_SERVER_ADDRESS": dashboard}
            reach |= {"RAY_DASHBOARD_ADDRESS": dashboard}
            yield Shell(record, environment | heads.environment_of(record) | reach)
        finally:
            heads.end_head(record)


def experts(shell: Shell) -> list[psutil.Process]:
    return shell.processes(lambda command: bool(command) and "ExpertActor" in command[0])


def until(holds: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)
    return found
