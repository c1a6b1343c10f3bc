"""Priorities of real processes and threads, as the kernel tells them; each in a process of its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_moe import priority
from ray_moe.priority import Lowered, Means

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the scheduler's interface is Linux's")


def in_a_process(program: str) -> str:
    """What a program prints that has a second thread, and starts a third whenever it asks."""
    prelude = """
        import os, resource, threading
        from ray_moe import priority
        from ray_moe.priority import Means

        def thread(stop):
            started = threading.Event()
            threading.Thread(target=lambda: (started.set(), stop.wait(20)), daemon=True).start()
            started.wait(20)

        def seen(kind=os.sched_getscheduler):
            # Of the threads that Python knows: one that has ended may still be in /proc for a moment.
            return sorted({kind(thread.native_id) for thread in threading.enumerate()})

        def nice(tid):
            return os.getpriority(os.PRIO_PROCESS, tid)

        stop = threading.Event()
        thread(stop)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def may_undo() -> bool:
    return priority._can_be_undone(Means.IDLE)


def test_a_lowered_process_is_low_in_all_threads_and_comes_back_in_all_threads() -> None:
    if not may_undo():
        pytest.skip("this process may not leave SCHED_IDLE; the test below shows what happens then")
    found = in_a_process("""
        print(seen() == [os.SCHED_OTHER])
        lowered = priority.lower()
        print(lowered.means is Means.IDLE, seen() == [os.SCHED_IDLE])
        thread(stop)
        print(threading.active_count() == 3, seen() == [os.SCHED_IDLE])
        print(priority.lower().means is Means.NONE or "nice")
        lowered.restore()
        print(seen() == [os.SCHED_OTHER])
        lowered.restore()
    """)
    assert found.split() == ["True", "True", "True", "True", "True", "nice", "True"]


def test_a_process_that_begins_lowered_is_restored_when_it_says_so_and_never_twice() -> None:
    if not may_undo():
        pytest.skip("this process may not leave SCHED_IDLE")
    found = in_a_process("""
        print(priority.restore_process() is Means.NONE, seen() == [os.SCHED_OTHER])
        priority.begin_lowered()
        thread(stop)
        print(seen() == [os.SCHED_IDLE])
        print(priority.restore_process() is Means.IDLE, seen() == [os.SCHED_OTHER])
        print(priority.restore_process() is Means.NONE, seen() == [os.SCHED_OTHER])
    """)
    assert found.split() == ["True"] * 7


def test_a_process_that_begins_lowered_has_a_session_of_its_own_that_yields_to_others_until_it_is_restored() -> None:
    if not may_undo():
        pytest.skip("this process may not leave SCHED_IDLE")
    group = Path("/proc/self/autogroup")
    if not group.exists() or not group.read_text():  # it is there and empty where autogroups are turned off
        pytest.skip("this kernel does not divide time among sessions")
    found = in_a_process("""
        def group():
            return open("/proc/self/autogroup").read().split()
        before = group()
        priority.begin_lowered()
        lowered = group()
        print(os.getsid(0) == os.getpid(), lowered[0] != before[0], lowered[2])
        priority.restore_process()
        print(group() == [lowered[0], *before[1:]])
        priority.begin_lowered()  # it leads its session by now
        print(group() == [lowered[0], *before[1:]])
    """)
    assert found.split() == ["True", "True", "19", "True", "True"]


class Autogroup:
    """The file in which the kernel takes a session's nice value, or answers with an error."""

    def __init__(self, answer: Callable[[int], Exception | None]) -> None:
        self._answer, self.nice = answer, 19

    def write_text(self, text: str) -> None:
        error = self._answer(int(text))
        if error is not None:
            raise error
        self.nice = int(text)


def restored_from(usual: int, group: Autogroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "_AUTOGROUP", group)
    monkeypatch.setattr(priority, "_begun", [(Lowered(Means.NONE), usual)])
    priority.restore_process()


def test_a_session_that_may_not_have_its_old_nice_value_again_gets_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = Autogroup(lambda nice: PermissionError() if nice < 0 else None)
    restored_from(-5, group, monkeypatch)
    assert group.nice == 0
    assert not caplog.records


def test_a_session_is_raised_although_the_kernel_is_asked_too_often_for_more_than_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = iter([BlockingIOError()] * 25)
    group = Autogroup(lambda _: next(busy, None))
    restored_from(0, group, monkeypatch)
    assert group.nice == 0


def test_a_session_that_stays_low_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = Autogroup(lambda _: PermissionError())
    with caplog.at_level(logging.WARNING):
        restored_from(0, group, monkeypatch)
    assert [record.getMessage() for record in caplog.records] == [
        f"process {os.getpid()} serves in a session at nice 19: the kernel refuses 0"
    ]


def test_a_thread_that_was_low_before_stays_low() -> None:
    if not may_undo():
        pytest.skip("this process may not leave SCHED_IDLE")
    found = in_a_process("""
        ids = []
        def low():
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            ids.append(threading.get_native_id())
            stop.wait(20)
        threading.Thread(target=low, daemon=True).start()
        while not ids: pass
        priority.lower().restore()
        print(os.sched_getscheduler(ids[0]) == os.SCHED_IDLE, seen() == [os.SCHED_OTHER, os.SCHED_IDLE])
    """)
    assert found.split() == ["True", "True"]


def test_without_the_right_to_come_back_a_process_is_left_as_it_is() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a user's rights to give away")
    found = in_a_process("""
        resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
        os.setgid(65534)
        os.setuid(65534)
        lowered = priority.lower()
        print(lowered.means is Means.NONE, seen() == [os.SCHED_OTHER], seen(nice) == [0])
        lowered.restore()
        priority.begin_lowered()
        print(os.getsid(0) != os.getpid(), priority.restore_process() is Means.NONE)
    """)
    assert found.split() == ["True"] * 5


def test_with_a_limit_that_allows_it_an_unprivileged_process_comes_back() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a user's rights to give away")
    found = in_a_process("""
        try:
            resource.setrlimit(resource.RLIMIT_NICE, (20, 20))
        except ValueError:
            print("no")
            raise SystemExit
        os.setgid(65534)
        os.setuid(65534)
        lowered = priority.lower()
        print(lowered.means is Means.IDLE, seen() == [os.SCHED_IDLE])
        lowered.restore()
        print(seen() == [os.SCHED_OTHER])
    """)
    if found.split() == ["no"]:
        pytest.skip("this user may not raise limits")
    assert found.split() == ["True"] * 3
