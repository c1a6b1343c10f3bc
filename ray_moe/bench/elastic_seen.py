"""What the streams' records say: gaps in windows of time, tokens against the rehearsal, the order of switches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from ray_moe.bench.elastic_load import Script, Stream
from ray_moe.controlplane.simulate import quantile

P50, P999 = Fraction(1, 2), Fraction(999, 1000)
CONTROL = "control"


@dataclass(frozen=True)
class Window:
    """A stretch of `perf_counter` time, in which `what` was under way; `CONTROL` when nothing was."""

    what: str
    start: float
    end: float
    ranks: int  # that served at its start

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Gaps:
    """Seconds between two deliveries of a stream, those that ended in one kind of window.

    `first_token` is the longest that a request which got its first token there had waited for it.
    """

    seconds: float
    gaps: int
    median: float
    p999: float
    longest: float
    first_token: float

    def columns(self, prefix: str = "") -> dict[str, Any]:
        return {
            f"{prefix}median_s": self.median,
            f"{prefix}p999_gap_s": self.p999,
            f"{prefix}max_gap_s": self.longest,
            f"{prefix}max_first_token_s": self.first_token,
            f"{prefix}gaps": self.gaps,
            f"{prefix}seconds": self.seconds,
        }


def gaps_of(streams: Iterable[Stream], windows: Iterable[Window]) -> Gaps | None:
    """A gap belongs to the window in which it ended. None where there is none."""
    windows = sorted(windows, key=lambda window: window.start)
    starts = [window.start for window in windows]

    def is_inside(at: float) -> bool:
        place = bisect_right(starts, at) - 1
        return place >= 0 and at < windows[place].end

    found: list[float] = []
    first = 0.0
    for stream in streams:
        found += [after - before for before, after in pairwise(stream.times) if is_inside(after)]
        if stream.times and is_inside(stream.times[0]):
            first = max(first, stream.times[0] - stream.asked_at)
    if not found:
        return None
    values = np.array(found)
    seconds = sum(window.seconds for window in windows)
    return Gaps(seconds, len(found), quantile(values, P50), quantile(values, P999), float(values.max()), first)


def longest_gap(streams: Iterable[Stream]) -> float:
    """In or out of windows."""
    return max((after - before for stream in streams for before, after in pairwise(stream.times)), default=0.0)


def failures(streams: Iterable[Stream]) -> list[str]:
    """Requests that ended with an error, were cut off, or did not give as many tokens as they were asked for."""
    return [
        f"script {stream.script}, {len(stream.token_ids)} of {stream.length} tokens, "
        f"{stream.finish_reason or 'no end'}: {stream.failure or 'no error'}"
        for stream in streams
        if stream.failure or stream.finish_reason != "length" or stream.left
    ]


def inexact(streams: Iterable[Stream], asked: Sequence[Script]) -> list[str]:
    """Streams with a token that is not the rehearsal's, by their first one."""
    found = []
    for stream in streams:
        expected = asked[stream.script].token_ids
        at = next(
            (at for at, (ours, right) in enumerate(zip(stream.token_ids, expected, strict=False)) if ours != right),
            None,
        )
        if at is not None:
            found.append(f"script {stream.script}, token {at}: {stream.token_ids[at]} instead of {expected[at]}")
    return found


def disorders(streams: Iterable[Stream], epoch_of: Mapping[int, int]) -> list[str]:
    """Deliveries that break the order of switches. A delivery has one generation and one epoch; beyond that:

    - along a stream steps ascend, and neither epoch nor generation ever goes back;
    - all streams' deliveries of one step are of one generation and epoch, on whichever rank they were made;
    - a generation is of the epoch that it was published for, `epoch_of[generation]`.
    """
    found: list[str] = []
    of_step: dict[int, tuple[int, int]] = {}
    for stream in streams:
        before = (-1, -1, -1)
        for step, epoch, generation in _coordinates(stream):
            if step <= before[0] or epoch < before[1] or generation < before[2]:
                found.append(f"(step, epoch, generation) {(step, epoch, generation)} after {before}")
            before = (step, epoch, generation)
            known = of_step.setdefault(step, (epoch, generation))
            if known != (epoch, generation):
                found.append(f"step {step}: (epoch, generation) {(epoch, generation)} and {known}")
            if epoch_of.get(generation, epoch) != epoch:
                found.append(f"generation {generation} ran in epoch {epoch}, it is of epoch {epoch_of[generation]}")
    return found


def across(streams: Iterable[Stream], generation: int) -> int:
    """Streams that had a delivery right before the switch to `generation` and one at or after it."""
    return sum(
        any(before < generation <= after for before, after in pairwise(stream.generations)) for stream in streams
    )


def switch_gaps(streams: Iterable[Stream]) -> list[float]:
    """Seconds from a stream's last delivery of one generation to its first of the next, over all streams."""
    return [
        after - before
        for stream in streams
        for (before, old), (after, new) in pairwise(zip(stream.times, stream.generations, strict=True))
        if new != old
    ]


def _coordinates(stream: Stream) -> Iterator[tuple[int, int, int]]:
    return zip(stream.steps, stream.epochs, stream.generations, strict=True)
