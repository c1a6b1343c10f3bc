"""Where a peer's loop stands, and what it has counted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import NamedTuple

from ray_moe.dataplane.counters import RouteTally
from ray_moe.errors import RayMoEError

SWITCHES_REMEMBERED = 32
STEPS_REMEMBERED = 128
STEPS_SHOWN = 512


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


def advance(rank: int, state: LoopState, event: str) -> LoopState:
    """Take one edge of `LOOP_TABLE`; `RayMoEError` naming rank, state and event for any other."""
    following = LOOP_TABLE[state].get(event)
    if following is None:
        raise RayMoEError(f"rank {rank}: loop event {event!r} is illegal in state {state.value}")
    return following


@dataclass(frozen=True)
class Switch:
    """One boundary at which this peer took another generation: the first step under it, the seconds it added, and when
    that was on `perf_counter`'s clock."""

    generation: int
    epoch: int
    step: int
    seconds: float
    at: float = field(default_factory=perf_counter, compare=False)


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
class UnitTally:
    """Steps that ran a unit under one release, by phase, and those in which one of its layers fell back, by phase and
    the reason of the first that did."""

    steps: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)

    def ran(self, phase: str, fell_back: Sequence[str]) -> None:
        """A unit of `phase` ran; `fell_back` are its layers' reasons, in order."""
        self.steps[phase] += 1
        if fell_back:
            self.fallbacks[phase, fell_back[0]] += 1

    def copy(self) -> UnitTally:
        """As it is now: another thread may count on."""
        return UnitTally(Counter(dict(self.steps)), Counter(dict(self.fallbacks)))


class _Gave(NamedTuple):
    """The last step that gave tokens: how many there were in all then, which step it was, and when it ended."""

    tokens: int
    steps_agreed: int
    ended: float


@dataclass
class LoopCounters:
    """Exact totals since the loop started. `committed_step` is the last step that is done.

    Seconds are wall time of steps that ran a unit: in all, and of it the wait for the next step's agreement after the
    units were done. `step_ends` are the latest of them: number, end on `perf_counter`'s clock, seconds. Bytes are those
    of epochs that are over. `bare_tokens` are those of `bare_calls` of single layers. `token_gaps` are the latest
    seconds between the ends of two steps in a row that both gave tokens: `gaps_seen` of them in all.
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
    units: dict[str, UnitTally] = field(default_factory=dict)
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    token_gaps: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    gaps_seen: int = 0
    step_ends: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=STEPS_SHOWN))
    _gave: _Gave = field(default_factory=lambda: _Gave(0, -2, 0.0), repr=False)

    def of_release(self, release_id: str) -> ReleaseTally:
        return self.releases.setdefault(release_id, ReleaseTally())

    def units_of(self, release_id: str) -> UnitTally:
        found = self.units.get(release_id)
        if found is None:
            found = self.units[release_id] = UnitTally()
        return found

    def count_work(self, seconds: float) -> None:
        """A step that ran a unit took so long."""
        ended = perf_counter()
        self.step_ends.append((self.steps_worked, ended, seconds))
        self.steps_worked += 1
        self.seconds_worked += seconds
        self.step_seconds.append(seconds)
        if self.tokens_emitted > self._gave.tokens:
            if self.steps_agreed == self._gave.steps_agreed + 1:
                self.token_gaps.append(ended - self._gave.ended)
                self.gaps_seen += 1
            self._gave = _Gave(self.tokens_emitted, self.steps_agreed, ended)

    @property
    def slow_step_seconds(self) -> float:
        """The 95th percentile of the latest working steps, by nearest rank; 0 before the first. A client that streams
        sees it as the time between two tokens."""
        latest = sorted(self.step_seconds)
        return latest[-(-95 * len(latest) // 100) - 1] if latest else 0.0


@dataclass(frozen=True)
class ReleaseCounts:
    """What one release did on one peer, or on several together, for metrics: what became of its routes, layer
    invocations that were not replayed by reason, and steps as `UnitTally` has them."""

    routes: RouteTally = field(default_factory=RouteTally)
    fallbacks: Counter[str] = field(default_factory=Counter)
    units: UnitTally = field(default_factory=UnitTally)


@dataclass(frozen=True)
class Tallies:
    """One peer's counts by release, and the scope that it serves now."""

    rank: int
    release: str
    generation: int
    epoch: int
    topology: str
    releases: dict[str, ReleaseCounts]
