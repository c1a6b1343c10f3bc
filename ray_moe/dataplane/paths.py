"""A path: the transport, runner and strategy that execute one invocation once its counts are agreed.

`run` takes the strategy's tasks in their order: pack and dispatch, experts, combine, reduce. Letters: T tokens,
D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ray_moe.comm.transports import Transport
from ray_moe.dataplane.chunks import in_chunks
from ray_moe.dataplane.completion import Event, LiveMeter, StagingPool
from ray_moe.dataplane.dispatch import Dispatcher, weighted_sum
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.dataplane.plan import Layout, Plan
from ray_moe.dataplane.rows import ExpertRows, Mode
from ray_moe.dataplane.runners import LayerWeights, Runner
from ray_moe.dataplane.strategies import Strategy

# The always-on expert of a block: called once while routed rows are in flight; the block reads what it left behind.
SharedExpert = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Path:
    """How units are executed; `slot_capacity` is a fixed-shape executable's, None on an eager path."""

    transport: Transport
    runner: Runner
    strategy: Strategy
    slot_capacity: int | None = None
    staging: StagingPool = field(default_factory=StagingPool)

    @property
    def mode(self) -> Mode:
        return self.runner.mode

    def bind(
        self,
        header: HandleHeader,
        coordinates: tuple[int, str, int],
        plans: Sequence[Plan],
        layouts: Sequence[Layout],
        mine: int,
        sealed: str | None,
    ) -> list[DispatchHandle]:
        """One handle for each batch, or for each chunk of the one batch; `coordinates` are (step, unit, layer)."""
        handles: list[DispatchHandle] = []
        meter = LiveMeter()
        for plan, layout in zip(plans, layouts, strict=True):
            for chunk in in_chunks(plan, layout, self.strategy.chunks, mine):
                handles.append(
                    header.bind(
                        *coordinates,
                        len(handles),
                        plan,
                        chunk.layout,
                        mode=self.mode,
                        order_N=chunk.order_N,
                        meter=meter,
                        semantic_digest=sealed,
                    )
                )
        return handles

    def run(
        self,
        hidden: Sequence[Tensor],
        handles: Sequence[DispatchHandle],
        weights: LayerWeights,
        shared: SharedExpert | None = None,
    ) -> Tensor:
        """The weighted sums [T, D] of all batches in their order; `hidden` are the batches' rows [T_b, D]."""
        return Run(self, hidden, handles, weights, shared).finish()


class Run:
    """One invocation under way. Handle j belongs to batch j, or is chunk j of the one batch."""

    def __init__(
        self,
        path: Path,
        hidden: Sequence[Tensor],
        handles: Sequence[DispatchHandle],
        weights: LayerWeights,
        shared: SharedExpert | None,
    ) -> None:
        self._path, self._hidden, self._handles, self._weights, self._shared = path, hidden, handles, weights, shared
        header = handles[0].header
        self._dispatchers = [
            Dispatcher(header, path.transport, path.mode, slot_capacity=path.slot_capacity, staging=path.staging)
            for _ in handles
        ]
        self._packed: dict[int, Tensor] = {}
        self._outputs: dict[int, ExpertRows] = {}
        self._sums: list[Tensor] = []

    def finish(self) -> Tensor:
        for kind, index in self._path.strategy.order:
            TASKS[kind](self, index)
        return self._out()

    def _out(self) -> Tensor:
        return self._sums[0] if len(self._sums) == 1 else torch.cat(self._sums)

    def _plan(self, index: int) -> None:
        """Nothing is left to do: the layer has planned all batches, since their counts travel in one exchange."""

    def _pack(self, index: int) -> None:
        batch = index if len(self._hidden) > 1 else 0
        self._packed[index] = self._dispatchers[index].pack(self._hidden[batch], self._handles[index])

    def _dispatch(self, index: int) -> None:
        self._dispatchers[index].dispatch_a(self._packed.pop(index), self._handles[index])

    def _expert(self, index: int) -> None:
        self._compute(index, self._receive(index))

    def _receive(self, index: int) -> ExpertRows:
        return self._dispatchers[index].dispatch_b()

    def _compute(self, index: int, rows: ExpertRows) -> None:
        self._handles[index].completion.require(Event.EXPERT_INPUT_READY, self._path.runner.name)
        self._outputs[index] = self._path.runner.run(rows, self._weights)

    def _combine(self, index: int) -> None:
        self._dispatchers[index].combine_a(self._outputs.pop(index))

    def _shared_path(self, index: int) -> None:
        if self._shared is not None:
            self._shared()

    def _reduce(self, index: int) -> None:
        parts = [index] if len(self._hidden) > 1 else range(len(self._handles))
        self._sums.append(weighted_sum([(self._handles[part], self._dispatchers[part].combine_b()) for part in parts]))


# Task kinds of `schedule`'s designs.
TASKS: dict[str, Callable[[Run, int], None]] = {
    "plan": Run._plan,
    "pack": Run._pack,
    "dispatch": Run._dispatch,
    "shared_path": Run._shared_path,
    "expert": Run._expert,
    "combine": Run._combine,
    "reduce": Run._reduce,
}
