"""How fast peers without work agree: at a falling rate, then not at all until one of them has something to do.

Every peer counts the same agreed steps since the same start of an epoch, so all of them fall asleep at the same one.
"""

from __future__ import annotations

# The first idle step waits 1 ms, each next one twice as long up to 50 ms; after this many idle steps in a row (about a
# second) all peers stop agreeing and sleep until woken.
_STEPS_BEFORE_SLEEP = 24
_FIRST_S, _LONGEST_S = 0.001, 0.05
# A sleeping peer wakes by itself this often, and wakes the others: a lost wake-up costs no more than this.
SLEEP_HEARTBEAT_S = 30.0


class Pacing:
    """Idle steps in a row, of one epoch."""

    def __init__(self) -> None:
        self._idle_steps = 0

    def seconds_after(self, *, has_work: bool) -> float:
        """How long to wait after an agreed step unless there is news: 0 with work, the heartbeat to sleep."""
        if has_work:
            self._idle_steps = 0
            return 0.0
        self._idle_steps += 1
        if self._idle_steps < _STEPS_BEFORE_SLEEP:
            return min(_FIRST_S * 2 ** (self._idle_steps - 1), _LONGEST_S)
        self._idle_steps = 0
        return SLEEP_HEARTBEAT_S
