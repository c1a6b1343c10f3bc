"""Demand on line: the ranks' reports folded exactly once into windows of steps, and estimates of what comes next.

    log.serve(snapshot)                 every generation that is published, before its ranks report
    log.fold(report)                    every report that arrives, in any order, some of them twice or never
    for window in log.take():           whole windows, in order
        estimates.observe(window)

Pure: time is an argument. A report belongs to the window that its last step is in. A window closes when every step of
every rank in it was reported, or when reports from `grace_steps` later are there: then it says what is missing, and
what comes too late is not counted. Letters: P phases (prefill, decode), L layers, E logical experts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.demand import ACCEPTED_ROWS, Demand, Phase, Provenance
from ray_moe.controlplane.estimators import Estimator
from ray_moe.errors import ConfigError
from ray_moe.identity import CheckpointVersion, PlacementVersion
from ray_moe.placement import PlacementSnapshot

Ints = NDArray[np.int64]

PHASES: tuple[Phase, ...] = ("prefill", "decode")
# How many generations a report may be of: more than can be between its last step and its arrival.
_GENERATIONS = 256


class Report(Protocol):
    """What one rank counted in steps [first_step, last_step] of one generation; see `dataplane.route_counts`.

    A rank numbers its reports from 0 on without a gap, and each begins with the step after the last one's end.
    """

    @property
    def rank(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def first_step(self) -> int: ...
    @property
    def last_step(self) -> int: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def phase_counts_PLE(self) -> Ints: ...


class Drop(StrEnum):
    """Why a report was not counted."""

    REPEATED = "repeated"
    LATE = "late"  # its window is closed: it came twice, or its steps are among the missing ones
    UNKNOWN_GENERATION = "unknown_generation"  # never published here, or hundreds of generations ago


@dataclass(frozen=True)
class Missing:
    """Steps [first, last] that a rank ran, or may have run, and whose report was not there in time."""

    rank: int
    first: int
    last: int


@dataclass(frozen=True)
class _Versions:
    generation: int
    epoch: int
    checkpoint: CheckpointVersion
    topology: str
    placement: PlacementVersion


@dataclass(frozen=True, eq=False)
class Window:
    """Steps [start, end) under one checkpoint: routes by phase, layer and expert over `ranks`, `tokens` by phase.

    Versions are those of the newest generation in it. Without any report it holds zeros, no ranks and no versions.
    """

    start: int
    end: int
    counts_PLE: Ints
    tokens: tuple[int, ...]
    ranks: tuple[int, ...]
    missing: tuple[Missing, ...]
    router_version: str
    versions: _Versions | None

    def demand(self, phase: Phase = "mixed") -> Demand:
        """One observation, of one phase or of both. Missing steps are left out, not made up for: the source names them.

        Raises `ConfigError` for a window that nobody reported.
        """
        if self.versions is None:
            raise ConfigError(f"no rank reported on steps [{self.start}, {self.end})")
        counts_LE = self.counts_PLE.sum(axis=0) if phase == "mixed" else self.counts_PLE[PHASES.index(phase)]
        lost = "".join(f", without rank {each.rank} in [{each.first}, {each.last}]" for each in self.missing)
        return Demand(
            counts_LE.astype(np.float64),
            Provenance(
                unit=ACCEPTED_ROWS,
                phase=phase,
                aggregation=f"sum over {len(self.ranks)} ranks",
                router_version=self.router_version,
                checkpoint_version=self.versions.checkpoint,
                topology_version=self.versions.topology,
                placement_version=self.versions.placement,
                start=self.start,
                end=self.end,
                cadence=self.end - self.start,
                source=f"route counts of ranks {', '.join(map(str, self.ranks))}{lost}",
            ),
        )


@dataclass
class _Epoch:
    """Members, and the first and last step that one of their reports was about."""

    ranks: tuple[int, ...]
    first: float = float("inf")
    last: float = float("-inf")


@dataclass
class _Sum:
    """An open window under one checkpoint."""

    counts_PLE: Ints
    tokens: Counter[int]
    ranks: set[int]
    versions: _Versions


@dataclass
class _Rank:
    """What a rank has reported, of what is not closed yet: step ranges by sequence number."""

    begins: float = float("-inf")  # its first step, once its first report is there
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)


class DemandLog:
    """Reports in, windows out; each report counted once or not at all.

    Memory is bounded by `grace_steps`, by the members of the epochs in that time, and by `keep` windows that nobody has
    taken. Raises `ConfigError` for sizes below their bounds.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        router_version: str,
        *,
        window_steps: int,
        grace_steps: int,
        keep: int = 64,
    ) -> None:
        sizes = (("window_steps", window_steps, 1), ("grace_steps", grace_steps, 0), ("keep", keep, 1))
        for name, value, least in sizes:
            if value < least:
                raise ConfigError(f"{name} must be >= {least}, found {value}")
        self._shape = (len(PHASES), num_layers, num_experts)
        self._router, self._size, self._grace = router_version, window_steps, grace_steps
        self._generations: dict[int, _Versions] = {}
        self._epochs: dict[int, _Epoch] = {}
        self._before = float("-inf")  # the last step of epochs that are forgotten
        self._ranks: dict[int, _Rank] = {}
        self._open: dict[tuple[int, CheckpointVersion], _Sum] = {}
        self._next = 0  # the first window that is not closed
        self._newest = -1
        self._closed: deque[Window] = deque(maxlen=keep)
        self.folded, self.dropped = 0, Counter[Drop]()

    def serve(self, snapshot: PlacementSnapshot) -> None:
        """A generation was published: its versions, and the members of its epoch. May be said again."""
        epoch = snapshot.group.epoch
        ranks = tuple(rank.value for rank in snapshot.group.peers)
        self._epochs.setdefault(epoch, _Epoch(ranks))
        self._generations[snapshot.generation] = _Versions(
            snapshot.generation, epoch, snapshot.checkpoint_version, snapshot.topology.version, snapshot.version
        )
        while len(self._generations) > _GENERATIONS:
            del self._generations[min(self._generations)]

    def fold(self, report: Report) -> Drop | None:
        """Count a report; or the reason why it is not counted.

        Raises `ConfigError` for counts of another model, and for a rank or an epoch that its generation does not have.
        """
        versions = self._generations.get(report.generation)
        reason = self._reason_against(report, versions)
        if reason is not None or versions is None:
            reason = reason or Drop.UNKNOWN_GENERATION
            self.dropped[reason] += 1
            return reason
        epoch = self._epochs[versions.epoch]
        if report.epoch != versions.epoch or report.rank not in epoch.ranks:
            raise ConfigError(
                f"rank {report.rank} reports on generation {report.generation} in epoch {report.epoch}; that is in "
                f"epoch {versions.epoch} with ranks {', '.join(map(str, epoch.ranks))}"
            )
        rank = self._ranks.setdefault(report.rank, _Rank())
        rank.steps[report.sequence] = (report.first_step, report.last_step)
        if report.sequence == 0:
            rank.begins = report.first_step
        epoch.first, epoch.last = min(epoch.first, report.first_step), max(epoch.last, report.last_step)
        self._newest = max(self._newest, report.last_step)
        self.folded += 1
        if self._add(report, versions):
            self._close()  # so that few are open, even if nobody takes them
        return None

    def take(self) -> tuple[Window, ...]:
        """The windows that are whole or out of grace and were not taken yet, in order."""
        self._close()
        taken = tuple(self._closed)
        self._closed.clear()
        return taken

    # -- Details

    def _reason_against(self, report: Report, versions: _Versions | None) -> Drop | None:
        if report.phase_counts_PLE.shape != self._shape:
            raise ConfigError(
                f"rank {report.rank} reports counts {list(report.phase_counts_PLE.shape)}, must be {list(self._shape)}"
            )
        if report.last_step // self._size < self._next:
            return Drop.LATE
        rank = self._ranks.get(report.rank)
        if rank is not None and report.sequence in rank.steps:
            return Drop.REPEATED
        return None if versions is not None else Drop.UNKNOWN_GENERATION

    def _add(self, report: Report, versions: _Versions) -> bool:
        """Whether it is the first of its window."""
        key = (report.last_step // self._size, versions.checkpoint)
        first = key not in self._open
        if first:
            self._open[key] = _Sum(np.zeros(self._shape, np.int64), Counter(), set(), versions)
        total = self._open[key]
        total.counts_PLE += report.phase_counts_PLE
        total.tokens.update(dict(enumerate(report.tokens)))
        total.ranks.add(report.rank)
        total.versions = max(total.versions, versions, key=lambda each: each.generation)
        return first

    def _close(self) -> None:
        """Close what is complete or out of grace, from the oldest on."""
        while self._open:
            # Windows without a single report, up to the next one that has some, are closed as one.
            first_open = min(index for index, _ in self._open)
            after = max(first_open, self._next + 1)
            start, end = self._next * self._size, after * self._size
            missing = tuple(self._missing(start, end))
            if self._newest < end - 1 + (self._grace if missing else 0):
                return
            self._closed.extend(self._windows(start, end, missing))
            self._next = after
            self._forget(end)

    def _windows(self, start: int, end: int, missing: tuple[Missing, ...]) -> Iterator[Window]:
        found = [key for key in self._open if key[0] == self._next]
        if not found and missing:
            nothing = np.zeros(self._shape, np.int64)
            yield Window(start, end, nothing, (0,) * len(PHASES), (), missing, self._router, None)
        for key in sorted(found, key=lambda key: self._open[key].versions.generation):
            total = self._open.pop(key)
            total.counts_PLE.flags.writeable = False
            tokens = tuple(total.tokens[phase] for phase in range(len(PHASES)))
            ranks = tuple(sorted(total.ranks))
            yield Window(start, end, total.counts_PLE, tokens, ranks, missing, self._router, total.versions)

    def _missing(self, start: int, end: int) -> Iterator[Missing]:
        """Steps of [start, end) that a member of an epoch may have run and has not reported.

        An epoch lies after all that is reported of those before it, and before all that is reported of those after it.
        """
        after = self._before
        for number in sorted(self._epochs):
            epoch = self._epochs[number]
            following = min((other.first for at, other in self._epochs.items() if at > number), default=float("inf"))
            for rank in epoch.ranks:
                known = self._ranks.get(rank)
                low = max(start, after + 1, known.begins if known is not None else start)
                high = min(end, following) - 1
                yield from _holes(rank, low, high, known.steps.values() if known is not None else ())
            after = max(after, epoch.last)

    def _forget(self, step: int) -> None:
        """What only matters before `step`: epochs that were over by then, what they served, and who left with them."""
        for number in sorted(self._epochs):
            later = min((epoch.first for at, epoch in self._epochs.items() if at > number), default=float("inf"))
            if later <= step:
                self._before = max(self._before, self._epochs.pop(number).last)
        self._generations = {at: each for at, each in self._generations.items() if each.epoch in self._epochs}
        members = {rank for epoch in self._epochs.values() for rank in epoch.ranks}
        self._ranks = {number: rank for number, rank in self._ranks.items() if number in members}
        for rank in self._ranks.values():
            rank.steps = {at: steps for at, steps in rank.steps.items() if steps[1] >= step}


def _holes(rank: int, low: float, high: float, covered: Iterable[tuple[int, int]]) -> Iterator[Missing]:
    """The steps of [low, high] outside the ranges `covered`."""
    for first, last in sorted(covered):
        if low > high:
            return
        if first > low:
            yield Missing(rank, int(low), int(min(first - 1, high)))
        low = max(low, last + 1)
    if low <= high:
        yield Missing(rank, int(low), int(high))


# -- Estimates


class Estimates:
    """An estimator for each checkpoint and phase, fed with windows; those of the last `keep` checkpoints are held.

    A window without routes of a phase is no observation of it: that nobody asks says nothing about who is popular.
    """

    def __init__(self, fresh: Estimator, *, keep: int = 4) -> None:
        self._fresh, self._keep = fresh, keep
        self._held: dict[CheckpointVersion, dict[Phase, Estimator]] = {}

    def observe(self, window: Window) -> None:
        """Raises as the estimator does: for a window that begins before the last one ended, say."""
        if window.versions is None:
            return
        held = self._held.pop(window.versions.checkpoint, {})
        self._held[window.versions.checkpoint] = held  # the newest is the last
        for phase in (*PHASES, "mixed"):
            seen = window.demand(phase)
            if seen.loads_LE.any():
                held[phase] = held.get(phase, self._fresh).after(seen)
        while len(self._held) > self._keep:
            del self._held[next(iter(self._held))]

    def estimate(self, checkpoint: CheckpointVersion, phase: Phase = "mixed") -> Demand | None:
        """What the running model is asked for; None as long as nothing was observed."""
        estimator = self._held.get(checkpoint, {}).get(phase)
        return None if estimator is None else estimator.estimate()
