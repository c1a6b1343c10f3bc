"""All waiting goes through here: every wait has a deadline and names what it waited for.

A test bans `ray.get`, `Event.wait`, `Queue.get`, `Work.wait` and their friends everywhere else. Ray is imported only
by the functions that need it, so that the data plane can wait without Ray.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ray_moe.errors import CollectiveError, DeadlineError

if TYPE_CHECKING:
    import torch.distributed as dist

_T = TypeVar("_T")
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


class Deadline:
    """A point on the monotonic clock shared by several waits in a row."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def check(self, what: str, where: str = "") -> None:
        """Raise `DeadlineError` once the deadline has passed."""
        if self.passed:
            raise DeadlineError(what, self.seconds, where)


def wait_event(event: threading.Event, seconds: float) -> bool:
    """Wait until `event` is set or `seconds` have passed; tells which. For pacing, where running out is no error."""
    return event.wait(timeout=seconds)


def join_thread(thread: threading.Thread, seconds: float, what: str) -> None:
    """Join, or `DeadlineError`."""
    thread.join(timeout=seconds)
    if thread.is_alive():
        raise DeadlineError(what, seconds)


def pause(seconds: float) -> None:
    """Sleep between two looks at something that cannot notify; the caller owns the deadline."""
    time.sleep(seconds)


def poll(ready: Callable[[], bool], seconds: float, spin: float = 0.0) -> bool:
    """Look at something that cannot notify until it is `ready`, or `seconds` have passed; tells which.

    Looks again at once for `spin` seconds, then ever less often, once a millisecond in the end.
    """
    if ready():
        return True
    start = now = time.monotonic()
    while now - start < min(spin, seconds):
        os.sched_yield()  # on few cores whoever is waited for may need this one
        if ready():
            return True
        now = time.monotonic()
    pause_s = _SHORTEST_PAUSE_S
    while now - start < seconds:
        time.sleep(min(pause_s, max(0.0, seconds - (now - start))))
        if ready():
            return True
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        now = time.monotonic()
    return False


def wait_work(work: dist.Work, seconds: float, what: str, rank: int, epoch: int) -> None:
    """Wait for a collective. `CollectiveError` when a peer died (connection lost) or the deadline passed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise CollectiveError(f"{what}: {_reason(error)}", rank, epoch) from error


def receive(link: socket.socket, views: list[memoryview], what: str, rank: int, epoch: int) -> list[memoryview]:
    """Receive once into `views`, in order; returns what is still to be filled. Waits under the connection's timeout.

    `CollectiveError` names `what` when it closes, fails or does not answer in time.
    """
    try:
        taken = link.recvmsg_into(views)[0]
    except TimeoutError as error:
        raise CollectiveError(f"{what} did not answer within {link.gettimeout():g} s", rank, epoch) from error
    except OSError as error:
        raise CollectiveError(f"{what}: {error.strerror or error}", rank, epoch) from error
    if not taken:
        raise CollectiveError(f"{what} closed its connection", rank, epoch)
    return after(taken, views)


def send(link: socket.socket, views: list[memoryview], what: str, rank: int, epoch: int) -> list[memoryview]:
    """Send what the connection takes of `views`; returns what is still to be sent. Errors as in `receive`."""
    try:
        return after(link.sendmsg(views), views)
    except TimeoutError as error:
        raise CollectiveError(f"{what} did not read within {link.gettimeout():g} s", rank, epoch) from error
    except OSError as error:
        raise CollectiveError(f"{what}: {error.strerror or error}", rank, epoch) from error


def ready(
    reading: Sequence[socket.socket], writing: Sequence[socket.socket], seconds: float
) -> tuple[set[socket.socket], set[socket.socket]]:
    """The connections that can be read and written without waiting; both empty when none can within `seconds`."""
    links = {link.fileno(): link for link in (*reading, *writing)}
    poller = select.poll()
    for number, link in links.items():
        poller.register(number, select.POLLIN * (link in reading) | select.POLLOUT * (link in writing))
    found = poller.poll(max(0.0, seconds) * 1000)
    # An error or a hang-up counts as both: the call that follows says what it is.
    readable = {links[number] for number, events in found if events & ~select.POLLOUT}
    return readable, {links[number] for number, events in found if events & ~select.POLLIN}


def after(done: int, views: list[memoryview]) -> list[memoryview]:
    """What is left of consecutive `views` after their first `done` bytes. Empty views are dropped."""
    left = []
    for view in views:
        if done < len(view):
            left.append(view[done:])
        done = max(0, done - len(view))
    return left


async def wait_for(awaitable: Awaitable[_T], seconds: float, what: str) -> _T:
    """Await with a deadline; `DeadlineError` names `what`. A timeout raised inside is not taken for ours."""
    # Not asyncio.wait_for: until Python 3.12 it loses a cancellation that arrives together with the result.
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineError(what, seconds) from error


def wait_future(future: Future[_T], seconds: float, what: str) -> _T:
    """The result of work on another thread; cancelled where nobody waits for it any more. `DeadlineError`."""
    try:
        return future.result(timeout=seconds)
    except TimeoutError as error:
        if future.done() and not future.cancelled():  # raised inside: it is not ours
            raise
        raise DeadlineError(what, seconds) from error
    finally:
        future.cancel()


def ray_get(refs: Any, seconds: float, what: str) -> Any:
    """`ray.get` with a deadline. The product's own errors arrive by the name they were raised with."""
    import ray

    try:
        return ray.get(refs, timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineError(what, seconds) from error
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from error


async def ray_await(ref: Awaitable[_T], seconds: float, what: str) -> _T:
    """Await an object reference with a deadline; errors as in `ray_get`."""
    import ray

    try:
        return await wait_for(ref, seconds, what)
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from error


def ray_ready(refs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split refs into (ready, pending) without blocking."""
    import ray

    if not refs:
        return [], []
    return ray.wait(list(refs), num_returns=len(refs), timeout=0)


def _cause(error: Any) -> BaseException:
    """What the remote side raised, when it is an exception of its own; Ray's wrapper otherwise."""
    return error.cause if isinstance(error.cause, Exception) else error


def _reason(error: BaseException) -> str:
    """The first sentence of a library's error, without the source location that it begins with."""
    text = re.sub(r"^\[[^\]]*:\d+\]\s*", "", " ".join(str(error).split()))
    return text.split(". ")[0][:200] or type(error).__name__
