"""What a rank exports by itself, and what it tells the controller, which exports the releases' metrics for all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from ray_moe.actors.exporter import Exporter, RaySink, latest
from ray_moe.actors.reports import engine_status
from ray_moe.actors.seats import Seats
from ray_moe.config import ClusterConfig
from ray_moe.dataplane.counters import LayerCounters, topology_name
from ray_moe.engine.loop import EngineLoop
from ray_moe.engine.records import EngineStatus
from ray_moe.engine.state import LoopCounters, ReleaseCounts, Tallies, UnitTally
from ray_moe.errors import NotServingError, RayMoEError
from ray_moe.identity import GlobalRank
from ray_moe.metrics import HISTOGRAM_SEATS, RANK_BUDGET
from ray_moe.weights.slots import SlotPool

_LOG = logging.getLogger(__name__)


class RankExporter:
    """Pushes one rank's totals. Its counters are those of `EngineStatus`, exactly."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._steps = self._gaps = 0

    def push(self, status: EngineStatus, counters: LoopCounters, now: float, *, histograms: bool) -> None:
        """One round. A rank beyond the first seats of its group leaves `histograms` to them."""
        export = self._exporter
        export.begin(now)
        for name, total in _totals(status).items():
            export.count(name, total)
        for name, value in _values(status).items():
            export.set(name, value)
        steps, gaps = counters.steps_worked, counters.gaps_seen
        if histograms:
            export.observe("moe_step_seconds", latest(counters.step_seconds, steps - self._steps))
            export.observe("moe_inter_token_seconds", latest(counters.token_gaps, gaps - self._gaps))
        self._steps, self._gaps = steps, gaps
        export.end()


def _totals(status: EngineStatus) -> Mapping[str, float]:
    return {
        "moe_tokens": status.tokens_emitted,
        "moe_steps_worked": status.steps_worked,
        "moe_step_seconds_sum": status.seconds_worked,
        "moe_agreement_seconds": status.seconds_agreeing,
        "moe_rows_local": status.rows_local,
        "moe_rows_sent": status.rows_sent,
        "moe_rows_received": status.rows_received,
        "moe_bytes_sent": status.bytes_sent,
        "moe_bytes_received": status.bytes_received,
        "moe_bare_calls": status.bare_calls,
    }


def _values(status: EngineStatus) -> Mapping[str, float]:
    return {
        "moe_requests_running": status.running,
        "moe_requests_waiting": status.waiting,
        "moe_outstanding_tokens": status.outstanding_tokens,
        "moe_kv_blocks_used": status.kv_blocks_used,
        "moe_kv_blocks_total": status.kv_blocks_total,
        "moe_slots_resident": sum(status.resident_slots.values()),
        "moe_slot_bytes": status.resident_bytes,
        "moe_generation": status.generation,
        "moe_epoch": status.epoch,
        "moe_committed_step": status.committed_step,
    }


def tallies_of(rank: int, loop: EngineLoop, layers: Mapping[str, LayerCounters]) -> Tallies:
    """What a rank has counted by release; `layers` are the sums over its layers."""
    view, units = loop.view, dict(loop.counters.units)
    slots = next(iter(view.layers.values())).slots
    return Tallies(
        rank=rank,
        release=view.release_id,
        generation=view.generation,
        epoch=view.epoch,
        topology=topology_name(slots.topology, slots.group),
        releases={
            name: ReleaseCounts(counts.routes, counts.fallbacks, units.get(name, UnitTally()).copy())
            for name, counts in layers.items()
        },
    )


class RankMetrics:
    """The expert actor's part in metrics."""

    _config: ClusterConfig
    _rank: GlobalRank
    _engine: EngineLoop | None
    _seats: Seats | None
    _pool: SlotPool | None
    _exporting: asyncio.Task[None] | None = None
    _exports: RankExporter | None = None

    async def tallies(self) -> Tallies:
        """What this rank has counted by release. Raises `NotServingError` before it serves."""
        if self._engine is None or self._seats is None:
            raise NotServingError(f"rank {self._rank} is not serving yet: it has counted nothing")
        return tallies_of(self._rank.value, self._engine, self._seats.by_release)

    def begin_metrics(self) -> None:
        """Export from now on, every `metrics_every_s`; 0 is never."""
        if self._config.metrics_every_s and self._exporting is None:
            fixed = {"cluster": self._config.name, "rank": str(self._rank)}
            self._exports = RankExporter(Exporter(RaySink(), RANK_BUDGET, fixed))
            self._exporting = asyncio.create_task(self._export())

    async def _export(self) -> None:
        while True:
            try:
                self.push_metrics()
            except RayMoEError as error:
                _LOG.warning("metrics of rank %s: %s", self._rank, error)
            except Exception:  # noqa: BLE001 - metrics are wanted most when something unforeseen happens
                _LOG.exception("a round of metrics of rank %s failed", self._rank)
            await asyncio.sleep(self._config.metrics_every_s)

    def push_metrics(self) -> None:
        """Push what has been counted since the last time; also before this rank ends."""
        loop, seats, pool, exports = self._engine, self._seats, self._pool, self._exports
        if loop is None or seats is None or pool is None or exports is None:
            return
        status = engine_status(self._config, loop, pool, LayerCounters.total(seats.all_counters))
        histograms = loop.view.transport.group.peer_slot < HISTOGRAM_SEATS
        exports.push(status, loop.counters, time.monotonic(), histograms=histograms)
