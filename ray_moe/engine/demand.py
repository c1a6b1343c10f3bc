"""When a loop reports what its routers asked for: every so many steps, and before it takes another generation."""

from __future__ import annotations

from ray_moe.dataplane.route_counts import RouteCounts
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.records import Outlet


class DemandReporter:
    """On the loop's thread. `every_steps` 0 reports nothing."""

    def __init__(self, rank: int, counts: RouteCounts | None, every_steps: int, outlet: Outlet) -> None:
        self._rank, self._counts, self._every, self._outlet = rank, counts, every_steps, outlet

    def epoch_opened(self, step: int) -> None:
        """`step` is the first of an epoch: a rank that has just joined says nothing about those before it."""
        if self._counts is not None:
            self._counts.begin(step)

    def step_done(self, view: GenerationView, step: int, *, is_last: bool) -> None:
        """`step` ran under `view`, and was the last one under it when `is_last`: a report is of one generation."""
        if self._counts is None or not self._every:
            return
        # All ranks' reports end at the same steps, so that a window is of whole reports.
        if (step + 1) % self._every and not is_last:
            return
        reports = self._counts.harvest(rank=self._rank, generation=view.generation, epoch=view.epoch, last_step=step)
        if reports:
            self._outlet.demand(reports)

    def ended(self) -> None:
        """The loop has ended: what is still being copied from a device is waited for."""
        reports = self._counts.flush() if self._counts is not None and self._every else []
        if reports:
            self._outlet.demand(reports)
