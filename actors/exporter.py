"""How a process exports what it has counted: differences of exact totals, pushed once in a while, series bounded.

Nothing is added to a step: whoever counts goes on counting, and a task of the process reads the totals every
`metrics_every_s`. Labels are checked when a set of them is first seen, and a set that was seen is known by itself. Ray
sends what is pushed here to its node's metrics endpoint, where it

- keeps a counter until the node's Ray ends, also of a process that has ended: sums never fall, and what a process
  counted after its last report is lost with it;
- forgets a gauge that is not renewed within twice its report interval (10 s by default): a process takes its gauges
  along;
- rebuilds a histogram from its buckets, so that its sum is approximate and each observation costs the agent time:
  histograms are samples here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ray.util import metrics as ray_metrics

from ray_moe.metrics import EXPORTED, OTHER, REFUSED, Exported, Kind, check_labels, label

# Observations that a histogram takes of one turn.
SAMPLED = 32
# A gauge that was not renewed for so long is gone from the endpoint, with Ray's own settings.
_GAUGE_KEPT_S = 30.0
# Of a budget: what is kept free for the series that others are folded into.
_SPARE = 8

# A metric and the labels that a push gave.
_Asked = tuple[str, tuple[tuple[str, str], ...]]


class Sink(Protocol):
    """Where pushed values go. Labels are complete."""

    def add(self, metric: Exported, labels: Mapping[str, str], amount: float) -> None:
        """Raise a counter; by 0 to make it known."""

    def set(self, metric: Exported, labels: Mapping[str, str], value: float) -> None:
        """Set a gauge."""

    def observe(self, metric: Exported, labels: Mapping[str, str], value: float) -> None:
        """Enter a value into a histogram."""


class Exporter:
    """One process's. `fixed` are labels that all its series have, where their metrics have them; pushes give the
    others, always in the same order. `budget` is how many series it may export.

    A counter's label that has as many values as it may becomes `other`; any other series beyond a cap is left out. Both
    are counted in `moe_series_refused`, each once. Pushes raise `ConfigError` for labels that are not the metric's.
    """

    def __init__(self, sink: Sink, budget: int, fixed: Mapping[str, str]) -> None:
        self._sink, self._budget, self._fixed = sink, budget, dict(fixed)
        self._labels: dict[_Asked, dict[str, str]] = {}  # as they are exported; empty for what is left out
        self._totals: dict[_Asked, float] = {}  # of counters
        self._set_at: dict[_Asked, float] = {}  # of gauges
        self._shown: dict[str, set[_Asked]] = {}  # by what `only` pushed last
        self._series: dict[str, set[tuple[str, ...]]] = {}  # by metric: values of the labels
        self._refused: set[_Asked] = set()
        self._used, self._now = 0, 0.0
        self.count(REFUSED, 0)

    @property
    def series(self) -> int:
        """How many series this process exports now."""
        return self._used

    def begin(self, now: float) -> None:
        """A round of pushes begins, at `now` seconds of a clock that goes on."""
        self._now = now
        for asked in [asked for asked, at in self._set_at.items() if now - at > _GAUGE_KEPT_S]:
            del self._set_at[asked]
            self._series[asked[0]].discard(tuple(self._labels.pop(asked).values()))
            self._used -= 1
        self._labels = {asked: given for asked, given in self._labels.items() if given}  # there may be room now

    def end(self) -> None:
        """Everything of this round has been pushed."""
        self.count(REFUSED, len(self._refused))

    # ---- pushes ----

    def count(self, name: str, total: float, **labels: str) -> None:
        """A counter's total: what it has grown by is pushed, the first time also nothing."""
        asked = name, tuple(labels.items())
        before = self._totals.get(asked)
        if before == total:
            return
        self._totals[asked] = total
        if given := self._given(asked):
            self._sink.add(EXPORTED[name], given, max(0.0, total - (before or 0.0)))

    def set(self, name: str, value: float, **labels: str) -> None:
        """A gauge's value. One that is not set for a while disappears."""
        self._set((name, tuple(labels.items())), value)

    def only(self, name: str, names: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> None:
        """A gauge by the values of its labels `names`. What was pushed last and is not there any more becomes 0, and
        then disappears."""
        now = {(name, tuple(zip(names, of, strict=True))): value for of, value in values.items()}
        for asked in self._shown.get(name, set()) - now.keys():
            if given := self._labels.get(asked):  # else it was not renewed for so long that it is gone already
                self._sink.set(EXPORTED[name], given, 0.0)
        self._shown[name] = {asked for asked, value in now.items() if self._set(asked, value)}

    def observe(self, name: str, values: Sequence[float], **labels: str) -> None:
        """Values for a histogram: `sampled` ones."""
        if values and (given := self._given((name, tuple(labels.items())))):
            for value in sampled(values):
                self._sink.observe(EXPORTED[name], given, value)

    # ---- caps ----

    def _set(self, asked: _Asked, value: float) -> bool:
        given = self._given(asked)
        if given:
            self._set_at[asked] = self._now
            self._sink.set(EXPORTED[asked[0]], given, value)
        return bool(given)

    def _given(self, asked: _Asked) -> dict[str, str]:
        given = self._labels.get(asked)
        if given is None:
            given = self._labels[asked] = self._admit(*asked)
            if given != self._whole(*asked):
                self._refused.add(asked)
        return given

    def _whole(self, name: str, labels: tuple[tuple[str, str], ...]) -> dict[str, str]:
        given = dict(labels)
        declared = EXPORTED[name].labels if name in EXPORTED else ()
        fixed = {each: self._fixed[each] for each in declared if each in self._fixed}
        return fixed | given

    def _admit(self, name: str, asked: tuple[tuple[str, str], ...]) -> dict[str, str]:
        labels = self._whole(name, asked)
        check_labels(name, labels)
        metric, spare = EXPORTED[name], self._budget // _SPARE
        foldable = [each for each, _ in asked if not label(each).values]
        crowded = [each for each in foldable if self._is_full(metric, each, labels)]
        room = self._budget - (spare if foldable else 0)
        if not crowded and self._enter(metric, labels, room, metric.most):
            return labels
        folded = labels | dict.fromkeys(crowded or foldable, OTHER)
        if metric.kind is Kind.COUNTER and self._enter(metric, folded, self._budget):
            return folded
        return {}

    def _is_full(self, metric: Exported, name: str, labels: Mapping[str, str]) -> bool:
        at = list(labels).index(name)
        values = {series[at] for series in self._series.get(metric.name, ())} - {OTHER}
        return labels[name] not in {*values, OTHER} and len(values) >= label(name).cap

    def _enter(self, metric: Exported, labels: Mapping[str, str], room: int, most: int | None = None) -> bool:
        """Whether a series is exported, or can be from now on."""
        known, series = self._series.setdefault(metric.name, set()), tuple(labels.values())
        if series in known:
            return True
        if self._used + metric.series > room or (most is not None and len(known) >= most):
            return False
        known.add(series)
        self._used += metric.series
        return True


def sampled(values: Sequence[float]) -> Iterable[float]:
    """At most `SAMPLED` of them, evenly spread."""
    if len(values) <= SAMPLED:
        return values
    return [values[index * len(values) // SAMPLED] for index in range(SAMPLED)]


def latest(values: Sequence[float], new: int) -> list[float]:
    """The last `new` of the values that are remembered."""
    return list(values)[-new:] if new > 0 else []


class RaySink:
    """Ray's metrics of this process, made when they are first needed."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}
        self._gauges: dict[str, ray_metrics.Gauge] = {}
        self._histograms: dict[str, ray_metrics.Histogram] = {}

    def add(self, metric: Exported, labels: Mapping[str, str], amount: float) -> None:
        made = self._counters.get(metric.name)
        if made is None:
            made = self._counters[metric.name] = _Counter(metric.name, _told(metric), metric.labels)
        made.add(amount, dict(labels))

    def set(self, metric: Exported, labels: Mapping[str, str], value: float) -> None:
        made = self._gauges.get(metric.name)
        if made is None:
            made = self._gauges[metric.name] = ray_metrics.Gauge(metric.name, _told(metric), metric.labels)
        made.set(value, dict(labels))

    def observe(self, metric: Exported, labels: Mapping[str, str], value: float) -> None:
        made = self._histograms.get(metric.name)
        if made is None:
            made = ray_metrics.Histogram(metric.name, _told(metric), list(metric.bounds), metric.labels)
            self._histograms[metric.name] = made
        made.observe(value, dict(labels))


class _Counter(ray_metrics.Counter):
    """Also takes 0: a counter that exists before the first failure is one that an alert can watch rise."""

    def add(self, amount: float, labels: dict[str, str]) -> None:
        self._record(amount, tags=labels)


def _told(metric: Exported) -> str:
    return f"{metric.help} [{metric.unit}]"
