"""How long the units of a recorded step take, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ray_moe.dataplane.spans import Spans


class UnitTimes:
    """How long units take: on the host, and on a CUDA device, where the host has long gone on, by its events.

    A unit's time there is known once its step is committed, and placed so that the step's last unit ends when the host
    saw its tokens: how long it took is exact, when it was is not.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._launched: dict[int, list[tuple[str, torch.cuda.Event, torch.cuda.Event]]] = {}  # by step

    @contextmanager
    def unit(self, spans: Spans, step: int, name: str) -> Iterator[None]:
        """Around the launch of a unit."""
        if not self._on_cuda:
            with spans.span(name):
                yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        with spans.span(name):
            yield
        end.record()
        self._launched = {key: units for key, units in self._launched.items() if key >= step - 1}
        self._launched.setdefault(step, []).append((name, begin, end))

    def committed(self, spans: Spans, step: int) -> None:
        """The host has the tokens of `step`."""
        units, now = self._launched.pop(step, []), spans.now()
        for name, begin, end in units:
            last = units[-1][2]
            if not last.query():  # without tokens of this peer's nobody has waited for it
                return
            ended = now - int(end.elapsed_time(last) * 1e6)
            spans.add(name, ended - int(begin.elapsed_time(end) * 1e6), end=ended, on_device=True)
