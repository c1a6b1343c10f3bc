"""Where the time of one step goes: named intervals of one thread, as columns.

Times are nanoseconds of `perf_counter_ns`, which is one clock for all processes of a machine. Spans of a thread nest:
one that begins inside another ends inside it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns

# A step of 61 layers, two units and 16 chunks each has some 14,000.
MOST_SPANS = 20_000


@dataclass(frozen=True)
class Span:
    """One interval. `layer` is the model's layer index, -1 for none; `on_device`: the device's time, not the host's."""

    name: str
    start: int
    end: int
    layer: int = -1
    on_device: bool = False


class Spans:
    """What one step records; what comes after `most` is counted and left out. Belongs to the step's thread."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._most = most
        self._names: list[str] = []
        self._starts, self._ends = array("q"), array("q")
        self._layers, self._on_device = array("i"), array("b")
        self.left_out = 0
        self._closed = False
        self.began = self._mark = self.now()

    now = staticmethod(perf_counter_ns)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Span]:
        columns = zip(self._names, self._starts, self._ends, self._layers, self._on_device, strict=True)
        return (Span(name, start, end, layer, bool(device)) for name, start, end, layer, device in columns)

    def add(self, name: str, start: int, layer: int = -1, end: int | None = None, *, on_device: bool = False) -> None:
        """An interval that began at `start` and ends now, or at `end`."""
        end = self.now() if end is None else end
        if len(self._names) >= self._most:
            self.left_out += not self._closed
            return
        self._names.append(name)
        self._starts.append(start)
        self._ends.append(end)
        self._layers.append(layer)
        self._on_device.append(on_device)

    def close(self) -> None:
        """The step is over: what comes now is none of it."""
        self._closed, self._most = True, 0

    def mark(self, name: str) -> None:
        """An interval from the last mark, at first from the beginning, to now."""
        start, self._mark = self._mark, self.now()
        self.add(name, start, end=self._mark)

    @contextmanager
    def span(self, name: str, layer: int = -1) -> Iterator[None]:
        """An interval around a block, however it ends."""
        start = self.now()
        try:
            yield
        finally:
            self.add(name, start, layer)


def nesting(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """The spans of one thread from outside to inside, each with the place of the one around it; -1 for none.

    [a 0-9, b 1-4, c 5-8, d 6-7] is [(a, -1), (b, 0), (c, 0), (d, 2)]. Raises `ValueError` where one begins inside
    another and ends outside.
    """
    found: list[tuple[Span, int]] = []
    around: list[int] = []
    # Of two that share an interval the later one was recorded when it was over, so it is the one around.
    order = sorted(range(len(spans)), key=lambda place: (spans[place].start, -spans[place].end, -place))
    for span in (spans[place] for place in order):
        while around and found[around[-1]][0].end <= span.start:
            around.pop()
        if around and span.end > (outer := found[around[-1]][0]).end:
            raise ValueError(f"{span} begins inside {outer} and ends outside")
        found.append((span, around[-1] if around else -1))
        around.append(len(found) - 1)
    return found
