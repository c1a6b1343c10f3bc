"""Priorities of real processes and threads, as the kernel tells them; each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from ray_moe import priority
from ray_moe.priority import Means

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
    if not os.path.exists("/proc/self/autogroup"):
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
