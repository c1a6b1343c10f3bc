"""What a number is evidence of (specification 0x03D): five ledgers that can never be added up, and schedule units.

Row slots, logical bytes and live bytes follow from a layout, a representation and a lifetime schedule. Measured bytes
and elapsed time exist only with the measurement that gave them. Each is a type of its own: amounts of one ledger add
up, amounts of two never do, and nothing turns an analytical number into a measured one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from ray_moe.errors import EvidenceError


@dataclass(frozen=True, order=True)
class Amount:
    """A whole number >= 0 of one ledger. Adds up and compares with its own kind alone."""

    value: int

    def __post_init__(self) -> None:
        if type(self.value) is not int or self.value < 0:
            raise EvidenceError(f"{type(self).__name__} must be a whole number >= 0, found {self.value!r}")

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            raise EvidenceError(f"{type(self).__name__} and {type(other).__name__} are two ledgers; they do not add up")
        return type(self)(self.value + other.value)

    def __int__(self) -> int:
        return self.value


class RowSlots(Amount):
    """Useful or padded tensor rows, from a route and layout manifest."""


class LogicalBytes(Amount):
    """Payload that follows from declared shapes and dtypes. Excludes protocol: headers, retransmission, link
    transactions, HBM reads and writes, alignment of transports and allocators."""


class LiveBytes(Amount):
    """Declared buffers that coexist, from a half-open lifetime schedule and its alias rules."""


class Units(Amount):
    """Analytical units of a schedule model. They are no clock time, and nothing formats them as one."""

    def __str__(self) -> str:
        return f"{self.value} units"

    def __format__(self, spec: str) -> str:
        if spec:
            raise EvidenceError(f"schedule units are no clock time; format {spec!r} is for measured values")
        return str(self)


class Instrument(StrEnum):
    """What can measure. A transport's label, a source comment and a schedule's units cannot."""

    CLOCK = "clock"
    GROUP_COUNTER = "group_counter"
    PROFILER = "profiler"


@dataclass(frozen=True)
class Measurement:
    """How a measured value came about.

    `protocol` is warm-up, calls and statistic, `artifact` the recorded run that holds the value, `conditions` what was
    held constant. Raises `EvidenceError` for another source than an instrument, and without protocol or artifact.
    """

    source: Instrument
    protocol: str
    artifact: str
    conditions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.source, Instrument):
            raise EvidenceError(
                f"a measurement comes from one of {', '.join(Instrument)}; {self.source!r} measures nothing"
            )
        for name in ("protocol", "artifact"):
            if not getattr(self, name):
                raise EvidenceError(f"a measurement needs its {name}")


def _require_measured(kind: type, value: object, measurement: object) -> None:
    if not isinstance(measurement, Measurement):
        raise EvidenceError(f"{kind.__name__} needs the measurement that gave it, found {type(measurement).__name__}")
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise EvidenceError(f"{kind.__name__} is a number >= 0 that was measured, found {value!r}")


@dataclass(frozen=True)
class MeasuredBytes:
    """Bytes that hardware or a group's own counters say were moved."""

    value: int
    measurement: Measurement

    def __post_init__(self) -> None:
        _require_measured(type(self), self.value, self.measurement)


@dataclass(frozen=True)
class Elapsed:
    """Seconds of a dependency path by a clock."""

    seconds: float
    measurement: Measurement

    def __post_init__(self) -> None:
        _require_measured(type(self), self.seconds, self.measurement)


@dataclass(frozen=True)
class Speedup:
    """How much faster one measured run is than another under the same conditions.

    Raises `EvidenceError` for anything but two measured times, and when their held conditions differ.
    """

    baseline: Elapsed
    candidate: Elapsed

    def __post_init__(self) -> None:
        for given in (self.baseline, self.candidate):
            if not isinstance(given, Elapsed):
                raise EvidenceError(f"a speed-up compares two measured times, found {type(given).__name__} {given}")
        before, after = self.baseline.measurement.conditions, self.candidate.measurement.conditions
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                raise EvidenceError(
                    f"a speed-up holds its conditions constant: {name} was {before.get(name)!r}, "
                    f"then {after.get(name)!r}"
                )

    @property
    def ratio(self) -> float:
        """Baseline seconds over candidate seconds."""
        return self.baseline.seconds / self.candidate.seconds


@dataclass(frozen=True)
class QualityClaim:
    """A statement about model quality. Support for a format is none: `evaluation` names the artifact that shows it."""

    statement: str
    evaluation: str

    def __post_init__(self) -> None:
        if not self.evaluation:
            raise EvidenceError(f"{self.statement!r} needs an evaluation artifact; a supported format is no evaluation")


@dataclass(frozen=True)
class SourceClaim:
    """What one file of one named library's revision establishes; never a time, and never another library's claim."""

    surface: str
    file: str
    revision: str
    statement: str

    def __post_init__(self) -> None:
        for name in ("surface", "file", "revision"):
            if not getattr(self, name):
                raise EvidenceError(f"a claim about source names its {name}: {self.statement!r}")
