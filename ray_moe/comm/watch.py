"""The watch over one epoch's collectives on a device: it sees what does not end, since the device itself never tells.

A host that waits for the device is stuck with it, so the watch is a thread of its own. It looks at one collective at a
time, the newest there was when it began to: a communication stream is in order, so all before it end no later.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import torch

from ray_moe.deadline import wait_event

# How often it looks, and how long rows of a peer that has gone may still be on their way to the end.
_LOOK_S, _GRACE_S = 0.02, 0.5
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Watch:
    """Calls `give_up` with the reason, once, and ends: when a collective has been under way for more than `seconds`,
    or when `lost` names a peer that has gone and what is under way does not end.

    `submitted` is the step's thread's; it costs a tuple.
    """

    def __init__(
        self, seconds: float, lost: Callable[[], str | None], give_up: Callable[[str], None], name: str
    ) -> None:
        self._seconds, self._lost, self._give_up = seconds, lost, give_up
        self._newest: tuple[torch.cuda.Event, float, str] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submitted(self, end: torch.cuda.Event, what: str) -> None:
        """The collective submitted last, by its end. Not one that was captured: such an event cannot be looked at."""
        self._newest = (end, time.monotonic(), what)

    def end(self) -> None:
        """The epoch is over; nothing is waited for."""
        self._ended.set()

    @property
    def idle(self) -> bool:
        """All that was submitted has ended. False on a device that has failed, where nothing does in order."""
        try:
            return self._newest is None or self._newest[0].query()
        except RuntimeError:
            return False

    def _run(self) -> None:
        relax_captures()
        watched = ended = None
        gone_since: float | None = None
        while not wait_event(self._ended, _LOOK_S):
            if watched is None:
                watched, gone_since = self._newest, None
                if watched is None or watched is ended:
                    watched = None
                    continue
            end, since, what = watched
            try:
                if end.query():
                    watched, ended = None, watched
                    continue
            except RuntimeError as error:
                self._give_up(f"{what}: the device failed: {error}")
                return
            now, lost = time.monotonic(), self._lost()
            gone_since = None if lost is None else gone_since or now
            if gone_since is not None and now - gone_since > min(_GRACE_S, self._seconds):
                self._give_up(f"{what} does not end: {lost}")
                return
            if now - since > self._seconds:
                self._give_up(f"{what} did not end within {self._seconds:g} s")
                return


def relax_captures() -> None:
    """For this thread: looking at events, and freeing memory, would otherwise end the captures of other threads."""
    mode = ctypes.c_int(_RELAXED)
    failed = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if failed:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode returned {failed}")
