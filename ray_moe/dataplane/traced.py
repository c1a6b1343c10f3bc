"""A layer whose invocations record where their time goes. Made for the steps that are recorded; others know of none.

On a CUDA device spans are of the host, which launches and goes on: what the device does is timed by units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ray_moe.dataplane.handle import DispatchHandle
from ray_moe.dataplane.layer import ExpertLayer, Invocation
from ray_moe.dataplane.local import DeviceLayer
from ray_moe.dataplane.paths import TASKS, Path, Run, SharedExpert
from ray_moe.dataplane.plan import Plan
from ray_moe.dataplane.rows import ExpertRows
from ray_moe.dataplane.runners import LayerWeights
from ray_moe.dataplane.spans import Spans
from ray_moe.routes import Routes


def traced(layers: Mapping[int, ExpertLayer], spans: Spans) -> dict[int, ExpertLayer]:
    """The same layers, recording into `spans`."""
    return {index: TracedLayer(layer, spans) for index, layer in layers.items()}


class TracedLayer(ExpertLayer):
    """Shares everything with the layer that it is made of, its counters too. Spans: layer, and inside it plan, counts
    and those of `TracedRun`; or, where the host looks into nothing, launch."""

    def __init__(self, layer: ExpertLayer, spans: Spans) -> None:
        vars(self).update(vars(layer))
        self._spans = spans

    def forward(
        self, hidden_TD: Tensor, routes: Routes, invocation: Invocation, shared: SharedExpert | None = None
    ) -> Tensor:
        with self._spans.span("layer", self.slots.layer):
            return super().forward(hidden_TD, routes, invocation, shared)

    def _plan(self, hidden_TD: Tensor, batches: Sequence[Routes], invocation: Invocation) -> list[Plan]:
        with self._spans.span("plan", self.slots.layer):
            return super()._plan(hidden_TD, batches, invocation)

    def _gather_counts(self, record: Tensor) -> Tensor:
        with self._spans.span("counts", self.slots.layer):
            return super()._gather_counts(record)

    def _run(self, path: Path, *args: Any) -> Tensor:
        recording = TracedPath(
            path.transport,
            path.runner,
            path.strategy,
            path.slot_capacity,
            path.staging,
            spans=self._spans,
            layer=self.slots.layer,
        )
        return super()._run(recording, *args)

    def _run_on_device(
        self, layer: DeviceLayer, hidden_TD: Tensor, routes: Routes, invocation: Invocation, shared: SharedExpert | None
    ) -> Tensor:
        with self._spans.span("launch", self.slots.layer):
            return super()._run_on_device(layer, hidden_TD, routes, invocation, shared)


@dataclass(frozen=True, eq=False)
class TracedPath(Path):
    """A path whose runs record."""

    spans: Spans = field(default_factory=Spans)
    layer: int = -1

    def run(
        self,
        hidden: Sequence[Tensor],
        handles: Sequence[DispatchHandle],
        weights: LayerWeights,
        shared: SharedExpert | None = None,
    ) -> Tensor:
        return TracedRun(self, hidden, handles, weights, shared).finish()


# Task kinds of `TASKS` -> the span that each is; the experts' task is two.
_SPANS = {"pack": "pack", "dispatch": "dispatch", "combine": "combine", "shared_path": "shared expert"}
_SPANS |= {"reduce": "reduce"}


class TracedRun(Run):
    """Spans: pack, dispatch (rows are on their way), receive (they are here), experts, combine (on their way back),
    reduce (here, and summed)."""

    _path: TracedPath

    def finish(self) -> Tensor:
        for kind, index in self._path.strategy.order:
            if kind not in _SPANS:
                TASKS[kind](self, index)
                continue
            with self._path.spans.span(_SPANS[kind], self._path.layer):
                TASKS[kind](self, index)
        return self._out()

    def _receive(self, index: int) -> ExpertRows:
        with self._path.spans.span("receive", self._path.layer):
            return super()._receive(index)

    def _compute(self, index: int, rows: ExpertRows) -> None:
        with self._path.spans.span("experts", self._path.layer):
            super()._compute(index, rows)
