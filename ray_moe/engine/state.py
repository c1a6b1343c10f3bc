"""Where a peer's loop stands, and what it has counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class LoopState(Enum):
    """Where one peer's loop stands."""

    STARTING = "starting"
    SERVING = "serving"
    SLEEPING = "sleeping"
    STOPPED = "stopped"
    FAILED = "failed"


# state -> {event: next}. FAILED is final for this loop: a new epoch gets a new group, not a second life of this one.
LOOP_TABLE: dict[LoopState, dict[str, LoopState]] = {
    LoopState.STARTING: {"serve": LoopState.SERVING, "fail": LoopState.FAILED},
    LoopState.SERVING: {"sleep": LoopState.SLEEPING, "stop": LoopState.STOPPED, "fail": LoopState.FAILED},
    LoopState.SLEEPING: {"wake": LoopState.SERVING, "fail": LoopState.FAILED},
    LoopState.STOPPED: {},
    LoopState.FAILED: {},
}


@dataclass
class LoopCounters:
    """Exact totals since the loop started. Seconds are wall time of steps that ran a unit: in all, and of it the wait
    for the next step's agreement after the units were done."""

    steps_agreed: int = 0
    steps_worked: int = 0
    tokens_emitted: int = 0
    seconds_worked: float = 0.0
    seconds_agreeing: float = 0.0
