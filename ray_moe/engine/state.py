"""Where a peer's loop stands, and what it has counted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

SWITCHES_REMEMBERED = 32
STEPS_REMEMBERED = 128


class LoopState(Enum):
    """Where one peer's loop stands."""

    STARTING = "starting"
    SERVING = "serving"
    SLEEPING = "sleeping"
    LEFT = "left"
    STOPPED = "stopped"
    FAILED = "failed"


# state -> {event: next}. A new epoch that was staged is taken at a boundary while SERVING. LEFT: the other peers went
# on in an epoch without this one. FAILED is final for this loop.
LOOP_TABLE: dict[LoopState, dict[str, LoopState]] = {
    LoopState.STARTING: {"serve": LoopState.SERVING, "fail": LoopState.FAILED},
    LoopState.SERVING: {
        "sleep": LoopState.SLEEPING,
        "leave": LoopState.LEFT,
        "stop": LoopState.STOPPED,
        "fail": LoopState.FAILED,
    },
    LoopState.SLEEPING: {"wake": LoopState.SERVING, "fail": LoopState.FAILED},
    LoopState.LEFT: {},
    LoopState.STOPPED: {},
    LoopState.FAILED: {},
}


@dataclass(frozen=True)
class Switch:
    """One boundary at which this peer took another generation: the first step under it, and the seconds it added."""

    generation: int
    epoch: int
    step: int
    seconds: float


@dataclass
class ReleaseTally:
    """What one release did on one peer: exact totals.

    `steps` ran units of this peer or others under it, the first and the last of them by number; `tokens` were
    delivered. As a shadow it gave `compared` outputs, of which `differing` had another token than the serving release's
    and `broken` were no finite numbers; the largest difference between logits is `max_difference`. `faults` are units
    that it could not run.
    """

    steps: int = 0
    first_step: int = -1
    last_step: int = -1
    tokens: int = 0
    shadow_steps: int = 0
    compared: int = 0
    differing: int = 0
    broken: int = 0
    max_difference: float = 0.0
    faults: int = 0

    def ran(self, step: int, tokens: int) -> None:
        """`step` ran units under this release."""
        self.steps += 1
        self.first_step = step if self.first_step < 0 else self.first_step
        self.last_step = step
        self.tokens += tokens


@dataclass
class LoopCounters:
    """Exact totals since the loop started. `committed_step` is the last step that is done.

    Seconds are wall time of steps that ran a unit: in all, and of it the wait for the next step's agreement after the
    units were done. Bytes are those of epochs that are over. `bare_tokens` are those of `bare_calls` of single layers.
    """

    steps_agreed: int = 0
    committed_step: int = -1
    steps_worked: int = 0
    tokens_emitted: int = 0
    seconds_worked: float = 0.0
    seconds_agreeing: float = 0.0
    bare_calls: int = 0
    bare_tokens: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    switches: deque[Switch] = field(default_factory=lambda: deque(maxlen=SWITCHES_REMEMBERED))
    releases: dict[str, ReleaseTally] = field(default_factory=dict)
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))

    def of_release(self, release_id: str) -> ReleaseTally:
        return self.releases.setdefault(release_id, ReleaseTally())

    def count_work(self, seconds: float) -> None:
        """A step that ran a unit took so long."""
        self.steps_worked += 1
        self.seconds_worked += seconds
        self.step_seconds.append(seconds)

    @property
    def slow_step_seconds(self) -> float:
        """The 95th percentile of the latest working steps, by nearest rank; 0 before the first. A client that streams
        sees it as the time between two tokens."""
        latest = sorted(self.step_seconds)
        return latest[-(-95 * len(latest) // 100) - 1] if latest else 0.0
