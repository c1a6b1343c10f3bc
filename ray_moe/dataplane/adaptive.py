"""Which transport and runner execute a unit: chosen for each by phase and rows, from costs measured while serving.

After Tutel's adaptive switching: every choice computes the same sums, so only time is at stake. All peers must choose
alike, or they would meet in different collectives. So a choice follows from what all of them know: the agreed rows, and
the times of earlier invocations, which travel as one number in each line of the count exchange. Nobody decides for the
others, and nobody is asked.

A worked example, two choices, one try of each after the one that warms up: costs 9, 5 | 9, 4 | then the second is
taken, since 4 < 9, until its cost rises above the first's or the first, tried again now and then, has become cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.phases import Phase
from ray_moe.dataplane.plan import Layout
from ray_moe.errors import ConfigError

# Of one kind of unit: what a phase's units of about so many rows have in common. Rows are bucketed by powers of two.
Kind = tuple[Phase, int]

WARM_UPS, TRIALS = 1, 3  # of each choice, before the cheapest is taken
EXPLORE_EVERY = 64  # units of a kind; then another choice is tried once, since costs change with load and placement
NEWEST_WEIGHT = 0.2  # of the newest cost in a choice's estimate
BETTER_BY = 0.05  # a cheaper choice replaces the one in use when it is cheaper by this share: no flapping
NOT_MEASURED = -1


@dataclass
class _Estimate:
    """Microseconds of one choice for one kind of unit: an exponential average."""

    tried: int = 0
    micros: float = 0.0

    def learn(self, micros: int) -> None:
        self.tried += 1
        if self.tried <= WARM_UPS:
            return
        first = self.tried == WARM_UPS + 1
        self.micros = float(micros) if first else self.micros + NEWEST_WEIGHT * (micros - self.micros)


@dataclass
class _Known:
    """What is known of one kind of unit."""

    estimates: list[_Estimate]
    in_use: int = 0
    units: int = 0


class Chooser:
    """Deterministic: fed with the same units and times, every peer's chooses the same.

    Belongs to one epoch, since the members of the next one have not seen the same. Raises `ConfigError` without a
    choice.
    """

    def __init__(self, choices: int) -> None:
        if choices < 1:
            raise ConfigError(f"adaptive choices must be at least 1, found {choices}")
        self._choices = choices
        self._known: dict[Kind, _Known] = {}

    def choose(self, kind: Kind) -> int:
        """The choice for the next unit of a kind."""
        known = self._known.setdefault(kind, _Known([_Estimate() for _ in range(self._choices)]))
        known.units += 1
        estimates = known.estimates
        untried = min(range(self._choices), key=lambda at: (estimates[at].tried, at))
        if estimates[untried].tried < WARM_UPS + TRIALS:
            return untried
        if known.units % EXPLORE_EVERY == 0:
            others = (at for at in range(self._choices) if at != known.in_use)
            return min(others, key=lambda at: (estimates[at].tried, at), default=known.in_use)
        cheapest = min(range(self._choices), key=lambda at: (estimates[at].micros, at))
        if estimates[cheapest].micros < (1 - BETTER_BY) * estimates[known.in_use].micros:
            known.in_use = cheapest
        return known.in_use

    def learn(self, kind: Kind, choice: int, micros: int) -> None:
        """The slowest peer took so long for a unit of a kind."""
        self._known[kind].estimates[choice].learn(micros)


def kind_of(unit: Phase, layout: Layout) -> Kind:
    """Units alike: one phase, and routes of all peers within a factor of two."""
    return unit, sum(layout.routes_P).bit_length()


class Stopwatch(Protocol):
    """The time of one invocation after another."""

    def start(self) -> None:
        """Forget the last time."""

    def stop(self) -> None: ...

    def micros(self) -> int | None:
        """Microseconds from start to stop; None before a stop, and as long as they are not known."""


class HostStopwatch:
    """Where work is done when a call returns."""

    def __init__(self) -> None:
        self._started = 0.0
        self._seconds: float | None = None

    def start(self) -> None:
        self._started, self._seconds = perf_counter(), None

    def stop(self) -> None:
        self._seconds = perf_counter() - self._started

    def micros(self) -> int | None:
        return None if self._seconds is None else round(self._seconds * 1e6)


class DeviceStopwatch:
    """Events on the current stream: the host neither waits nor is timed.

    They are read when the layer is about to run again, and by then the host has waited for the counts of every layer in
    between, which lie behind them.
    """

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stopped = False

    def start(self) -> None:
        self._stopped = False
        self._begin.record()

    def stop(self) -> None:
        self._end.record()
        self._stopped = True

    def micros(self) -> int | None:
        if not self._stopped or not self._end.query():
            return None
        return round(self._begin.elapsed_time(self._end) * 1e3)


def stopwatch_on(device: torch.device) -> Stopwatch:
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()


@dataclass
class AdaptivePaths:
    """One layer's paths by choice, over a chooser that all layers of an epoch share.

    `annotate` and `choose` are called once for each invocation, in this order; `watch` times it from the agreed counts
    to the sums. A time that is not known by the layer's next invocation is told as such, and no peer learns from it.
    """

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    chooser: Chooser
    watch: Stopwatch = field(default_factory=HostStopwatch)
    _last: tuple[Kind, int] | None = None

    def annotate(self, record: Tensor) -> Tensor:
        """A count-exchange line with what this peer's last invocation took behind it."""
        micros = self.watch.micros() if self._last is not None else None
        return torch.cat([record, record.new_tensor([NOT_MEASURED if micros is None else micros])])

    @staticmethod
    def split(gathered: Tensor) -> tuple[Tensor, Sequence[int]]:
        """The peers' lines without the times, and the times in peer-slot order."""
        return gathered[:, :-1], gathered[:, -1].tolist()

    def choose(self, unit: Phase, layout: Layout, micros_P: Sequence[int]) -> tuple[str, Path]:
        """Learn from the last invocation, as all peers do; the path for this one, and its name."""
        if self._last is not None and NOT_MEASURED not in micros_P:
            self.chooser.learn(*self._last, max(micros_P))
        kind = kind_of(unit, layout)
        choice = self.chooser.choose(kind)
        self._last = kind, choice
        self.watch.start()
        return self.names[choice], self.paths[choice]
