"""Estimates of demand from the past (specification 0x08I): the solver consumes a matrix and predicts nothing itself.

Pure. An estimator is a frozen value that `after` an observation is another one. An estimate follows from what was
observed alone, and says in its provenance how it was made, how far behind it is and how often it is renewed. A burst
can make any of them obsolete before a migration ends. Letters: L layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Protocol, Self, TypeVar

import numpy as np

from ray_moe.controlplane.demand import ACCEPTED_ROWS, ASSUMED_ROUTES, Demand, Floats, Phase, Provenance
from ray_moe.errors import ConfigError, EvidenceError

S = TypeVar("S", bound=Sized)


class Estimator(Protocol):
    """Sees observations in the order of time.

    `after` raises `EvidenceError` for another unit than before, and `ConfigError` for another checkpoint, router, phase
    or shape and for an observation that begins before the last one ended. `estimate` raises `ConfigError` as long as
    nothing was observed.
    """

    def after(self, seen: Demand) -> Self: ...

    def estimate(self) -> Demand: ...


@dataclass(frozen=True, eq=False)
class TrailingWindow:
    """The mean of the last `size` observations."""

    size: int
    seen: tuple[Demand, ...] = ()

    def __post_init__(self) -> None:
        _at_least_one("size", self.size)

    def after(self, seen: Demand) -> Self:
        return replace(self, seen=_window(self.seen, seen, self.size))

    def estimate(self) -> Demand:
        loads = np.mean(_loads(_some(self.seen)), axis=0)
        return _over(self.seen, loads, f"mean of {len(self.seen)}")


@dataclass(frozen=True, eq=False)
class Quantile:
    """The `q`-quantile by nearest rank, x_(ceil(q n)) (specification 0x0DA), of each expert's last `size` loads.

    `q` is exact, in (0, 1]: in binary floating point 0.07 * 100 is more than 7.
    """

    q: Fraction
    size: int
    seen: tuple[Demand, ...] = ()

    def __post_init__(self) -> None:
        _at_least_one("size", self.size)
        if not isinstance(self.q, Fraction) or not 0 < self.q <= 1:
            raise ConfigError(f"q must be a Fraction in (0, 1], found {self.q!r}")

    def after(self, seen: Demand) -> Self:
        return replace(self, seen=_window(self.seen, seen, self.size))

    def estimate(self) -> Demand:
        rank = math.ceil(self.q * len(_some(self.seen)))
        loads = np.sort(_loads(self.seen), axis=0)[rank - 1]
        return _over(self.seen, loads, f"quantile {self.q} of {len(self.seen)}")


@dataclass(frozen=True, eq=False)
class Ewma:
    """beta * previous + (1 - beta) * current, `beta` in [0, 1); the first observation is taken as it is."""

    beta: float
    mean: Demand | None = None
    last: Demand | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ConfigError(f"beta must be in [0, 1), found {self.beta}")

    def after(self, seen: Demand) -> Self:
        how = f"moving estimate, beta {self.beta:g}"
        if self.mean is None or self.last is None:
            return replace(self, mean=_over((seen,), seen.loads_LE, how), last=seen)
        _check_follows(self.last, seen)
        loads = self.beta * self.mean.loads_LE + (1 - self.beta) * seen.loads_LE
        lag = self.beta * (self.mean.provenance.lag + _cadence(self.last, seen))
        return replace(self, mean=_extended(self.mean, self.last, seen, loads, how, lag), last=seen)

    def estimate(self) -> Demand:
        return _known(self.mean)


@dataclass(frozen=True, eq=False)
class LinearTrend:
    """Holt's level and trend, read `horizon` observations ahead: the one estimator that predicts.

    `level_weight` and `trend_weight` in (0, 1] are the shares of the newest observation. A prediction is never below
    zero nor above `most` times the level, so that one burst cannot run away.
    """

    horizon: int
    level_weight: float = 0.5
    trend_weight: float = 0.2
    most: float = 2.0
    level: Demand | None = None
    trend_LE: Floats | None = None
    last: Demand | None = None

    def __post_init__(self) -> None:
        _at_least_one("horizon", self.horizon)
        for name, value in (("level_weight", self.level_weight), ("trend_weight", self.trend_weight)):
            if not 0 < value <= 1:
                raise ConfigError(f"{name} must be in (0, 1], found {value}")
        if not 1 <= self.most < math.inf:
            raise ConfigError(f"most must be finite and >= 1, found {self.most}")

    def after(self, seen: Demand) -> Self:
        how = f"level and trend, weights {self.level_weight:g} and {self.trend_weight:g}"
        if self.level is None or self.trend_LE is None or self.last is None:
            level = _over((seen,), seen.loads_LE, how)
            return replace(self, level=level, trend_LE=np.zeros_like(seen.loads_LE), last=seen)
        _check_follows(self.last, seen)
        was = self.level.loads_LE
        loads = self.level_weight * seen.loads_LE + (1 - self.level_weight) * (was + self.trend_LE)
        np.maximum(loads, 0, out=loads)
        trend_LE = self.trend_weight * (loads - was) + (1 - self.trend_weight) * self.trend_LE
        return replace(
            self, level=_extended(self.level, self.last, seen, loads, how, 0.0), trend_LE=trend_LE, last=seen
        )

    def estimate(self) -> Demand:
        level = _known(self.level)
        assert self.trend_LE is not None
        loads = np.clip(level.loads_LE + self.horizon * self.trend_LE, 0, self.most * level.loads_LE)
        origin = level.provenance
        ahead = f"{origin.aggregation}, {self.horizon} ahead, at most {self.most:g} times the level"
        return Demand(loads, replace(origin, aggregation=ahead, lag=-float(self.horizon * origin.cadence)))


@dataclass(frozen=True, eq=False)
class PhaseHistograms:
    """Counts by phase, each over its own last `size` observations: decode is not planned from prefill's rows."""

    size: int
    seen: Mapping[Phase, tuple[Demand, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        _at_least_one("size", self.size)

    def after(self, seen: Demand) -> Self:
        """Raises `ConfigError` for an observation that is not of one phase."""
        phase = seen.provenance.phase
        if phase not in ("prefill", "decode"):
            raise ConfigError(f"phase histograms need observations of prefill or decode, found {phase}")
        window = _window(self.seen.get(phase, ()), seen, self.size)
        return replace(self, seen=MappingProxyType({**self.seen, phase: window}))

    def estimate(self, phase: Phase = "mixed") -> Demand:
        """The sums of one phase, or of both for `mixed`; `ConfigError` for a phase that was never observed."""
        windows = [window for name, window in self.seen.items() if phase in (name, "mixed")]
        parts = [_over(window, np.sum(_loads(window), axis=0), "") for window in _some(windows)]
        origins = [part.provenance for part in parts]
        newest = max(origins, key=_end)
        count = sum(origin.window for origin in origins)
        origin = replace(
            newest,
            phase=phase,
            window=count,
            aggregation=f"count of {count}",
            start=min(part_start for part_start, _ in map(_interval, parts)),
            lag=sum((_end(newest) - _end(part) + part.lag) * part.window for part in origins) / count,
        )
        return Demand(np.sum(_loads(parts), axis=0), origin)


@dataclass(frozen=True, eq=False)
class KernelTime:
    """Another estimator of predicted seconds per iteration, by the named cost of a segment of n rows.

    `seconds_of_rows` gives seconds for rows of the same shape, 0 for none. Equal rows need not cost the same: small
    segments are dearer per row, which is why every observation is priced before any are averaged.
    """

    seconds: Estimator
    cost_name: str
    seconds_of_rows: Callable[[Floats], Floats]

    def after(self, seen: Demand) -> Self:
        """Raises `EvidenceError` for another unit than rows."""
        if seen.provenance.unit not in (ACCEPTED_ROWS, ASSUMED_ROUTES):
            raise EvidenceError(f"a segment's cost is a function of rows, found loads in {seen.provenance.unit!r}")
        start, end = _interval(seen)
        seconds = self.seconds_of_rows(seen.loads_LE / (end - start))
        priced = Demand(seconds, replace(seen.provenance, unit=f"predicted seconds, {self.cost_name}"))
        return replace(self, seconds=self.seconds.after(priced))

    def estimate(self) -> Demand:
        return self.seconds.estimate()


# -- Details


def _window(window: tuple[Demand, ...], seen: Demand, size: int) -> tuple[Demand, ...]:
    if window:
        _check_follows(window[-1], seen)
    else:
        _interval(seen)
    return (*window, seen)[-size:]


def _check_follows(last: Demand, seen: Demand) -> None:
    """Whether both are observations of one workload, one after the other."""
    if last.provenance.unit != seen.provenance.unit:
        raise EvidenceError(
            f"loads in {last.provenance.unit!r} and in {seen.provenance.unit!r} are two ledgers; they do not add up"
        )
    for name in ("checkpoint_version", "router_version", "phase"):
        old, new = getattr(last.provenance, name), getattr(seen.provenance, name)
        if old != new:
            raise ConfigError(f"{name} changed from {old} to {new}: begin a new estimate")
    if last.loads_LE.shape != seen.loads_LE.shape:
        raise ConfigError(f"loads must be {list(last.loads_LE.shape)} as before, found {list(seen.loads_LE.shape)}")
    if _interval(seen)[0] < _interval(last)[1]:
        raise ConfigError(f"an observation must begin at {_interval(last)[1]} or later, found {_interval(seen)[0]}")


def _over(seen: tuple[Demand, ...], loads_LE: Floats, aggregation: str) -> Demand:
    """Loads made of these observations alike; versions are the newest one's."""
    (start, _), (_, end) = _interval(seen[0]), _interval(seen[-1])
    lag = sum(end - _interval(demand)[1] for demand in seen) / len(seen)
    cadence = _cadence(seen[-2] if len(seen) > 1 else None, seen[-1])
    newest = seen[-1].provenance
    return Demand(
        loads_LE,
        replace(newest, window=len(seen), aggregation=aggregation, start=start, end=end, lag=lag, cadence=cadence),
    )


def _extended(before: Demand, last: Demand, seen: Demand, loads_LE: Floats, aggregation: str, lag: float) -> Demand:
    """A running estimate after one more observation."""
    origin = replace(
        seen.provenance, window=before.provenance.window + 1, start=before.provenance.start, aggregation=aggregation
    )
    return Demand(loads_LE, replace(origin, lag=lag, cadence=_cadence(last, seen)))


def _cadence(last: Demand | None, seen: Demand) -> int:
    start, end = _interval(seen)
    return end - (start if last is None else _interval(last)[1])


def _interval(demand: Demand) -> tuple[int, int]:
    origin = demand.provenance
    if origin.start is None or origin.end is None:
        raise ConfigError(f"an observation needs the interval of iterations that it covers, found {origin}")
    return origin.start, origin.end


def _end(origin: Provenance) -> int:
    assert origin.end is not None
    return origin.end


def _loads(seen: Iterable[Demand]) -> list[Floats]:
    return [demand.loads_LE for demand in seen]


def _some(seen: S) -> S:
    if not seen:
        raise ConfigError("nothing was observed yet")
    return seen


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be >= 1, found {value}")


def _known(estimate: Demand | None) -> Demand:
    if estimate is None:
        raise ConfigError("nothing was observed yet")
    return estimate
