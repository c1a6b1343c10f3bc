"""Counts by workload cell, ratios that keep their denominators, and exact nearest-rank quantiles (0x0D, 0x0DA).

A ratio is evidence only together with what it divides, over which steps, of which cell and release. Two ratios over
different counts never add up, and nothing here is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

from ray_moe.errors import ConfigError, EvidenceError
from ray_moe.evidence import Elapsed, Measurement, Units

NEAREST_RANK = "nearest rank: 1-based index ceil(q*n) of the ascending sample, exact arithmetic"
NO_QUANTILE = "none: a ratio of totals"
SYNTHETIC, MEASURED = "synthetic", "measured"

# Name -> (numerator, denominator), as a cell counts them (0x0D).
RATIOS: Mapping[str, tuple[str, str]] = {
    "drop": ("dropped_routes", "attempted_routes"),
    "remote": ("remote_routes", "accepted_routes"),
    "inter_node": ("inter_node_routes", "accepted_routes"),
    "graph_replay": ("graph_replay_steps", "graph_steps"),
    "fallback": ("graph_fallback_steps", "steps"),
}

# What a benchmark matrix crosses (0x0DC): one balanced prefill batch says nothing about a hot expert's decode.
BENCHMARK_AXES = (
    *("phase", "token_count", "routing_skew", "node_count", "ep_etp_layout"),
    *("payload_dtype", "runner", "placement", "graph_mode"),
)

_COUNTS = (
    *("steps", "attempted_routes", "accepted_routes", "dropped_routes", "remote_routes", "inter_node_routes"),
    *("graph_replay_steps", "graph_fallback_steps"),
)


@dataclass(frozen=True, order=True)
class Window:
    """Committed steps from `first_step` to `last_step`, both included."""

    first_step: int
    last_step: int

    def __post_init__(self) -> None:
        if not 0 <= self.first_step <= self.last_step:
            raise EvidenceError(f"a window of steps ends after its start, found {self.first_step} to {self.last_step}")

    def __or__(self, other: Window) -> Window:
        """The span of both."""
        return Window(min(self.first_step, other.first_step), max(self.last_step, other.last_step))

    def __str__(self) -> str:
        return f"steps {self.first_step} to {self.last_step}"


@dataclass(frozen=True)
class Count:
    """How many of what."""

    of: str
    value: int

    def __post_init__(self) -> None:
        if type(self.value) is not int or self.value < 0:
            raise EvidenceError(f"{self.of} must be a whole number >= 0, found {self.value!r}")


@dataclass(frozen=True)
class Ratio:
    """One count over another. `measurement` is None for synthetic counts, which only exercise the accounting.

    Raises `EvidenceError` for a name that `RATIOS` lacks and for another numerator or denominator than its own.
    """

    name: str
    numerator: Count
    denominator: Count
    release_id: str
    cell: str
    window: Window
    measurement: Measurement | None
    quantile_convention: str = NO_QUANTILE

    def __post_init__(self) -> None:
        if self.name not in RATIOS:
            raise EvidenceError(f"ratio must be one of {', '.join(RATIOS)}, found {self.name!r}")
        if (self.numerator.of, self.denominator.of) != RATIOS[self.name]:
            raise EvidenceError(
                f"the {self.name} ratio is {' over '.join(RATIOS[self.name])}, found {self.numerator.of} over "
                f"{self.denominator.of}: that answers a different question"
            )
        if self.numerator.value > self.denominator.value:
            raise EvidenceError(f"{self.name} ratio: {self} is above 1")

    @property
    def value(self) -> Fraction:
        """Exact. `EvidenceError` when there was nothing to divide by."""
        if self.denominator.value == 0:
            raise EvidenceError(f"{self.name} ratio of {self.cell}, {self.window}: there were 0 {self.denominator.of}")
        return Fraction(self.numerator.value, self.denominator.value)

    @property
    def evidence_class(self) -> str:
        return _class_of(self.measurement)

    def __str__(self) -> str:
        return (
            f"{self.numerator.value} {self.numerator.of} of {self.denominator.value} {self.denominator.of} "
            f"({self.release_id}, {self.cell}, {self.window}, {self.evidence_class})"
        )


@dataclass(frozen=True)
class Cell:
    """What one workload did under one release in one window; `axes` say where it lies in the benchmark matrix.

    `graph_replay_steps` and `graph_fallback_steps` count steps that could have replayed. Raises `EvidenceError` when
    the counts contradict one another, and `ConfigError` for an axis that the matrix does not have.
    """

    release_id: str
    cell: str
    window: Window
    measurement: Measurement | None
    steps: int
    attempted_routes: int
    accepted_routes: int
    dropped_routes: int
    remote_routes: int
    inter_node_routes: int
    graph_replay_steps: int
    graph_fallback_steps: int
    axes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in _COUNTS:
            Count(name, getattr(self, name))
        for axis, _ in self.axes:
            if axis not in BENCHMARK_AXES:
                raise ConfigError(f"cell {self.cell}: axis must be one of {', '.join(BENCHMARK_AXES)}, found {axis!r}")
        if self.accepted_routes + self.dropped_routes != self.attempted_routes:
            raise EvidenceError(
                f"cell {self.cell}: {self.accepted_routes} accepted and {self.dropped_routes} dropped routes are not "
                f"{self.attempted_routes} attempted ones"
            )
        if not self.inter_node_routes <= self.remote_routes <= self.accepted_routes:
            raise EvidenceError(
                f"cell {self.cell}: inter-node routes are remote and remote ones accepted, found "
                f"{self.inter_node_routes}, {self.remote_routes}, {self.accepted_routes}"
            )
        if self.graph_steps > self.steps:
            raise EvidenceError(f"cell {self.cell}: {self.graph_steps} graph steps of {self.steps}")

    @property
    def graph_steps(self) -> int:
        """Steps that replayed or fell back; a step that could do neither is not among them."""
        return self.graph_replay_steps + self.graph_fallback_steps

    @property
    def evidence_class(self) -> str:
        return _class_of(self.measurement)

    def ratio(self, name: str) -> Ratio:
        """The ratio of that name over this cell; `EvidenceError` for a name that `RATIOS` lacks."""
        over = RATIOS.get(name, ("", ""))
        numerator, denominator = (Count(of, getattr(self, of, 0)) for of in over)
        return Ratio(name, numerator, denominator, self.release_id, self.cell, self.window, self.measurement)


def total(cells: Sequence[Cell]) -> Cell:
    """All cells of one release as one, over the span of their windows.

    Raises `EvidenceError` for none, for two releases, and for cells of which some are measured and some synthetic.
    """
    if not cells:
        raise EvidenceError("no workload cell was observed")
    for what in ("release_id", "evidence_class"):
        found = sorted({getattr(cell, what) for cell in cells})
        if len(found) > 1:
            raise EvidenceError(f"cells of two kinds do not add up: {what} {' and '.join(found)}")
    window = cells[0].window
    for cell in cells[1:]:
        window = window | cell.window
    sums: dict[str, Any] = {name: sum(getattr(cell, name) for cell in cells) for name in _COUNTS}
    name = ", ".join(dict.fromkeys(cell.cell for cell in cells))
    return Cell(cells[0].release_id, name, window, _measured_together(cells), **sums)


def _measured_together(cells: Sequence[Cell]) -> Measurement | None:
    given = [cell.measurement for cell in cells if cell.measurement is not None]
    if not given:
        return None
    sources = sorted({one.source for one in given})
    if len(sources) > 1:
        raise EvidenceError(f"cells of two kinds do not add up: measured by {' and '.join(sources)}")
    protocols, artifacts = (dict.fromkeys(getattr(one, name) for one in given) for name in ("protocol", "artifact"))
    return Measurement(given[0].source, "; ".join(protocols), ", ".join(artifacts), given[0].conditions)


def _class_of(measurement: Measurement | None) -> str:
    return SYNTHETIC if measurement is None else MEASURED


# -- Quantiles

SampleT = TypeVar("SampleT", bound=Any)


def nearest_rank(sample: Sequence[SampleT], quantile: Fraction) -> SampleT:
    """The element at 1-based rank ceil(q * n) of the ascending sample, in exact arithmetic.

    Raises `ConfigError` for an empty sample, a quantile outside (0, 1], and one that is no exact fraction: 0.07 times
    100 is above 7 in binary floating point.
    """
    if not isinstance(quantile, Fraction) or not 0 < quantile <= 1:
        raise ConfigError(f"a quantile is an exact fraction in (0, 1], found {quantile!r}")
    if not sample:
        raise ConfigError("a quantile needs at least 1 observation, found 0")
    rank = -(-quantile.numerator * len(sample) // quantile.denominator)
    return sorted(sample)[rank - 1]


@dataclass(frozen=True)
class Quantile:
    """One quantile of one cell: `Units` of a model, or `Elapsed` seconds with the measurement that gave them."""

    quantile: Fraction
    value: Units | Elapsed
    samples: int
    release_id: str
    cell: str
    window: Window
    quantile_convention: str = field(default=NEAREST_RANK)

    @staticmethod
    def of_units(
        sample: Sequence[Units], quantile: Fraction, *, release_id: str, cell: str, window: Window
    ) -> Quantile:
        """Of analytical units, which never are a time."""
        return Quantile(quantile, nearest_rank(sample, quantile), len(sample), release_id, cell, window)

    @staticmethod
    def of_seconds(
        seconds: Sequence[float],
        quantile: Fraction,
        measurement: Measurement,
        *,
        release_id: str,
        cell: str,
        window: Window,
    ) -> Quantile:
        """Of seconds by a clock. Raises `EvidenceError` without the measurement."""
        value = Elapsed(nearest_rank(seconds, quantile), measurement)
        return Quantile(quantile, value, len(seconds), release_id, cell, window)

    @property
    def evidence_class(self) -> str:
        return MEASURED if isinstance(self.value, Elapsed) else SYNTHETIC
