"""What the garbage collector does in a process that keeps what it has loaded; each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def in_a_process(program: str) -> str:
    prelude = """
        import gc, weakref
        from ray_moe.actors.collector import forget_what_has_gone, keep_what_is_loaded
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


def test_what_is_kept_does_not_put_off_the_next_full_collection() -> None:
    found = in_a_process("""
        loaded = [[] for _ in range(400_000)]
        keep_what_is_loaded()
        full = []
        gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
        for _ in range(300_000):
            cycle = []
            cycle.append(cycle)
        print("start" in full)
    """)
    assert found.split() == ["True"]


def test_cycles_that_were_kept_are_freed_once_they_are_dropped_and_the_rest_is_kept_again() -> None:
    found = in_a_process("""
        class Trunk:
            pass

        first, second = Trunk(), Trunk()
        first.block, second.block = first, second
        keep_what_is_loaded()
        gone, there = weakref.ref(first), weakref.ref(second)
        del first
        gc.collect()
        print(gone() is None)
        forget_what_has_gone()
        print(gone() is None, there() is second, gc.get_freeze_count() > 0)
    """)
    assert found.split() == ["False", "True", "True", "True"]
