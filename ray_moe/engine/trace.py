"""Which steps are recorded, and what becomes of their spans.

Steps are chosen by their agreed number and by what was agreed for them, so that all peers record the same ones: every
so many-th for OpenTelemetry, or the next so many from a step on that somebody asked for. Only steps with work count. A
loop that records nothing asks `Recorder.armed` once a step. Without torch: whoever asks for a recording reads it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

from ray_moe.dataplane.spans import Span, Spans
from ray_moe.errors import ConfigError

if TYPE_CHECKING:
    from ray_moe.comm.agreement import Agreement
    from ray_moe.engine.generation import GenerationView

MOST_STEPS = 256  # of one recording
MOST_SECONDS = 3600.0  # that one may wait for its steps
# What a recording may hold in all; at that many spans it ends early.
_MOST_SPANS = 400_000


@dataclass(frozen=True)
class StepTrace:
    """One step of one peer. Times are nanoseconds of the machine's monotonic clock; `rows` are this peer's own.

    `left_out` are spans that found no room; `leads` is true of one peer of the step.
    """

    rank: int
    step: int
    generation: int
    epoch: int
    release_id: str
    units: tuple[str, ...]
    rows: int
    start: int
    end: int
    spans: tuple[Span, ...] = ()
    left_out: int = 0
    leads: bool = False


@dataclass(frozen=True)
class Clock:
    """A process's clocks, read together: nanoseconds since the epoch and of the monotonic clock, and the machine (the
    boot) that the second is one with."""

    machine: str
    wall: int
    monotonic: int

    @staticmethod
    def now() -> Clock:
        boot = Path("/proc/sys/kernel/random/boot_id")
        machine = boot.read_text(encoding="ascii").strip() if boot.is_file() else str(perf_counter_ns())
        return Clock(machine, time.time_ns(), perf_counter_ns())


@dataclass(frozen=True)
class RankTrace:
    """What one peer has of a recording; `done` where that is all, `truncated` where it ended early for want of room."""

    rank: int
    node: str
    clock: Clock
    steps: tuple[StepTrace, ...]
    done: bool
    truncated: bool = False


@dataclass(frozen=True)
class Unread:
    """A step that was recorded, as its loop leaves it: columns that whoever reads them makes a `StepTrace` of."""

    about: StepTrace  # without its spans
    spans: Spans

    def read(self) -> StepTrace:
        return replace(self.about, spans=tuple(self.spans))


class Recorder:
    """The loop's. `every`th steps go to `sink`, which must return at once; 0 is none."""

    def __init__(self, rank: int, every: int = 0, sink: Callable[[Unread], None] | None = None) -> None:
        self._rank, self._every, self._sink = rank, every if sink is not None else 0, sink
        self._first = self._left = self._spans = 0
        self._asked: list[Unread] = []
        self._truncated = False
        self.holder = ""  # the id of the recording that there is; any thread may look
        self.armed = self._every > 0

    def record(self, first: int, steps: int, holder: str = "") -> None:
        """Keep the first `steps` steps with work from step `first` on, for `holder`; forgets what was kept before.

        On the loop's thread. Raises `ConfigError` for a number out of bounds.
        """
        self.check(steps)
        self.holder = holder
        self._first, self._left, self._spans = first, steps, 0
        self._asked, self._truncated, self.armed = [], False, True

    @staticmethod
    def check(steps: int) -> None:
        """`ConfigError` for a number of steps out of bounds."""
        if not 1 <= steps <= MOST_STEPS:
            raise ConfigError(f"steps must be in [1, {MOST_STEPS}], found {steps}")

    @staticmethod
    def check_seconds(seconds: float, named: str = "seconds") -> None:
        """`ConfigError` for a time out of bounds, or none at all."""
        if not 0 < seconds <= MOST_SECONDS:
            raise ConfigError(f"{named} must be in (0, {MOST_SECONDS:g}], found {seconds:g}")

    def stop(self, holder: str = "") -> None:
        """Nobody waits for the rest of `holder`'s, nor for what is there. Another's goes on. On the loop's thread."""
        if holder == self.holder:
            self.holder, self._left, self._asked, self.armed = "", 0, [], self._every > 0

    @property
    def done(self) -> bool:
        """Whether all that was asked for has come. Any thread."""
        return not self._left

    def recorded(self) -> tuple[tuple[StepTrace, ...], bool, bool]:
        """What was asked for, as far as it has come; whether that is all, and whether it ended early. Any thread."""
        done, truncated = self.done, self._truncated
        return tuple(unread.read() for unread in tuple(self._asked)), done, truncated

    def begin(self, agreed: Agreement) -> Spans | None:
        """For a step that is about to run; None where it is not recorded."""
        if not (agreed.prefill or agreed.decode or agreed.bare) or not (self._sampled(agreed) or self._wanted(agreed)):
            return None
        return Spans()

    def end(self, spans: Spans, agreed: Agreement, view: GenerationView, rows: int) -> None:
        """The step has run under `view`, with so many rows of this peer's."""
        kinds = {"prefill": agreed.prefill, "decode": agreed.decode, "bare": bool(agreed.bare)}
        about = StepTrace(
            rank=self._rank,
            step=agreed.step,
            generation=view.generation,
            epoch=view.epoch,
            release_id=view.release_id,
            units=tuple(kind for kind, ran in kinds.items() if ran),
            rows=rows,
            start=spans.began,
            end=spans.now(),
            left_out=spans.left_out,
            leads=view.transport.group.peer_slot == 0,
        )
        spans.close()
        unread = Unread(about, spans)
        if self._sampled(agreed) and self._sink is not None:
            self._sink(unread)
        if self._wanted(agreed):
            self._asked.append(unread)
            self._spans += len(spans)
            self._left -= 1
            if self._spans > _MOST_SPANS and self._left:
                self._left, self._truncated = 0, True
            self.armed = self._every > 0 or self._left > 0

    def _sampled(self, agreed: Agreement) -> bool:
        return self._every > 0 and agreed.step % self._every == 0

    def _wanted(self, agreed: Agreement) -> bool:
        return self._left > 0 and agreed.step >= self._first


def unmarked(_: str) -> None:
    """What marks a step that is not recorded."""
