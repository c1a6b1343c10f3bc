"""What other threads want done on the loop's thread, between two steps, and what wakes the loop for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ray_moe.deadline import wait_event


class Inbox:
    """Actions in the order in which they were posted. `post` and `wake` are for any thread, the rest is the loop's."""

    def __init__(self) -> None:
        self._actions: deque[tuple[Callable[[], None], bool]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self.closed = False

    def __len__(self) -> int:
        return len(self._actions)

    def post(self, action: Callable[[], None], *, settled: bool) -> bool:
        """Queue an action; `settled`: for when every step is committed. False once the inbox is closed."""
        with self._lock:
            if self.closed:
                return False
            self._actions.append((action, settled))
        self._wake.set()
        return True

    def take(self, settle: Callable[[], None]) -> None:
        """Run what is there; `settle` commits every step."""
        while self._actions:
            action, settled = self._actions.popleft()
            if settled:
                settle()
            action()

    def close(self) -> None:
        """Nothing comes in from here on; what is in can still be taken."""
        with self._lock:
            self.closed = True

    def wake(self) -> None:
        """There is news that is no action."""
        self._wake.set()

    def sleep(self, seconds: float) -> None:
        """Until there is news, or `seconds` have passed."""
        wait_event(self._wake, seconds)

    def look(self) -> None:
        """What has come so far is known: the next `sleep` waits for what comes after."""
        self._wake.clear()
