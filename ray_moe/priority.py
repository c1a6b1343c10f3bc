"""A process that loads beside a serving one takes only the processor time that nobody else wants, until it serves too.

Linux knows priorities of threads, not of processes, and lets an unprivileged thread lower its own but rarely raise it
again (RLIMIT_NICE). `lower` lowers the whole process, and only by a means that can be undone here.

Where the kernel divides processor time among sessions first (autogroup), a thread that is idle within its session still
spends the session's time, and beside a third session that is busy the others in it wait for a second at a time. So a
process that begins lowered leaves its session, and lowers the one that it gets.

There is no such thing as one lowered thread in a process that serves: it would keep the interpreter's lock for as long
as nobody lets it run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ray_moe.deadline import Deadline, join_thread, pause

_LOG = logging.getLogger(__name__)

# In a Ray of our own peers serve at usual priority. Ray's default, nice 15, leaves them a thirtieth of a core beside
# any process that starts at nice 0, as every worker of Ray does.
USUAL_PRIORITY = {"RAY_worker_niceness": "0"}
_PROBE_S = 10.0
_NICEST = 19
_AUTOGROUP = Path("/proc/self/autogroup")
# The kernel takes ten changes of a session a second, of all processes together. To be low is of use only while others
# serve; to stay so costs everybody.
_LOWER_S, _RAISE_S, _AGAIN_S = 1.0, 5.0, 0.05


class Means(StrEnum):
    """How a priority was lowered. SCHED_IDLE yields to every other thread; nice 19 keeps a share of about 1.5 %."""

    IDLE = "SCHED_IDLE"
    NICE = "nice 19"
    NONE = "unchanged"


@dataclass(frozen=True)
class Lowered:
    """What `lower` did; `restore` undoes it for all threads, also for those that were started meanwhile."""

    means: Means
    usual: int = 0
    prior: dict[int, int] = field(default_factory=dict)  # by thread, of those that were lowered

    def restore(self) -> None:
        """Back to the priorities before. May be called again; threads that were low before stay so."""
        if self.means is Means.NONE:
            return
        # A thread that is started by a low one is low, so look again until none is left.
        while low := [thread for thread in _threads() if self._is_ours(thread)]:
            for thread in low:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    _set(self.means, thread, self.prior.get(thread, self.usual))

    def _is_ours(self, thread: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            lowest = _lowest(self.means)
            return _get(self.means, thread) == lowest and self.prior.get(thread, self.usual) != lowest
        return False


def lower() -> Lowered:
    """Lower all threads of this process, and those that they start, by the first means that can be undone.

    `means` is NONE, and nothing was changed, when none can be undone here, or when this process is at it already.
    """
    for means in (Means.IDLE, Means.NICE):
        usual = _get(means, threading.get_native_id())
        if usual == _lowest(means) or not _can_be_undone(means):
            continue
        prior = _priorities(means)
        while high := [thread for thread, value in _priorities(means).items() if value != _lowest(means)]:
            for thread in high:
                with contextlib.suppress(ProcessLookupError):
                    _set(means, thread, _lowest(means))
        return Lowered(means, usual, prior)
    return Lowered(Means.NONE)


_begun: list[tuple[Lowered, int | None]] = []  # what was lowered, and the nice value of the session that it left


def begin_lowered() -> None:
    """`lower` for a process that has just started, in a session of its own, until `restore_process`."""
    lowered = lower()
    _begun.append((lowered, _leave_session() if lowered.means is not Means.NONE else None))


def restore_process() -> Means:
    """Undo `begin_lowered`; returns what was used. NONE, and nothing is changed, in a process that did not begin so."""
    means = _begun[0][0].means if _begun else Means.NONE
    while _begun:
        lowered, session_nice = _begun.pop()
        if session_nice is not None:
            _raise_session(session_nice)
        lowered.restore()
    return means


# -- Sessions


def _leave_session() -> int | None:
    """Go into a session of its own, which takes what other sessions leave. Returns the nice value of the one that was
    left; None where that is not possible: without autogroups, and for the leader of a process group."""
    try:
        usual = int(_AUTOGROUP.read_text().split()[-1])  # "/autogroup-7 nice 0"
        os.setsid()
    except (OSError, ValueError, IndexError):
        return None
    _weigh_session(_NICEST, _LOWER_S)  # where that is refused, this work is done at a low priority all the same
    return usual


def _raise_session(usual: int) -> None:
    """Back to the nice value of the session that was left, or to 0, which anybody may have."""
    if not any(_weigh_session(nice, _RAISE_S) for nice in dict.fromkeys((usual, 0))):
        _LOG.warning("process %d serves in a session at nice %d: the kernel refuses %d", os.getpid(), _NICEST, usual)


def _weigh_session(nice: int, seconds: float) -> bool:
    """Give this session a nice value; False where that is refused, or not taken for so many `seconds`."""
    deadline = Deadline(seconds)
    while True:
        try:
            _AUTOGROUP.write_text(str(nice))
        except BlockingIOError:  # one change too many this second
            if deadline.passed:
                return False
            pause(_AGAIN_S)
        except OSError:
            return False
        else:
            return True


# -- One means on one thread: the kernel takes a thread's id where the names say process


def _lowest(means: Means) -> int:
    return os.SCHED_IDLE if means is Means.IDLE else _NICEST


def _get(means: Means, thread: int) -> int:
    return os.sched_getscheduler(thread) if means is Means.IDLE else os.getpriority(os.PRIO_PROCESS, thread)


def _set(means: Means, thread: int, value: int) -> None:
    if means is Means.IDLE:
        os.sched_setscheduler(thread, value, os.sched_param(0))
    else:
        os.setpriority(os.PRIO_PROCESS, thread, value)


def _can_be_undone(means: Means) -> bool:
    """Tried on a thread that ends at once: the rule depends on privileges, limits and the kernel."""
    undone = []

    def attempt() -> None:
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # then it cannot
            before = _get(means, thread)
            _set(means, thread, _lowest(means))
            _set(means, thread, before)
            undone.append(_get(means, thread) == before)

    probe = threading.Thread(target=attempt, name="priority-probe", daemon=True)
    probe.start()
    join_thread(probe, _PROBE_S, "trying a priority")
    return undone == [True]


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _priorities(means: Means) -> dict[int, int]:
    found = {}
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):
            found[thread] = _get(means, thread)
    return found
