"""Which transport and runner execute a unit: chosen for each by phase and rows, from costs measured while serving.

After Tutel's adaptive switching: every choice computes the same sums, so only time is at stake. All peers must choose
alike, or they would meet in different collectives. So a choice follows from what all of them know: the agreed rows, and
the times of earlier invocations, which travel as one number in each line of the count exchange. Nobody decides for the
others, and nobody is asked.

A worked example, two choices, one try of each after the one that warms up: costs 9, 5 | 9, 4 | then the second is
taken, since 4 < 9, until its cost rises above the first's or the first, tried again now and then, has become cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.phases import Phase
from ray_moe.dataplane.plan import Layout
from ray_moe.errors import ConfigError

# Of one kind of unit: what a phase's units of about so many rows have in common. Rows are bucketed by powers of two.
Kind = tuple[Phase, int]

WARM_UPS, TRIALS = 1, 3  # of each choice, before the cheapest is taken
EXPLORE_EVERY = 64  # units of a kind; then another choice is tried once, since costs change with load and placement
NEWEST_WEIGHT = 0.2  # of the newest cost in a choice's estimate
BETTER_BY = 0.05  # a cheaper choice replaces the one in use when it is cheaper by this share: no flapping
NOT_MEASURED = -1


@dataclass
class _Estimate:
    """Microseconds of one choice for one kind of unit: an exponential average."""

    tried: int = 0
    micros: float = 0.0

    def learn(self, micros: int) -> None:
        self.tried += 1
        if self.tried <= WARM_UPS:
            return
        first = self.tried == WARM_UPS + 1
        self.micros = float(micros) if first else self.micros + NEWEST_WEIGHT * (micros - self.micros)


@dataclass
class _Known:
    """What is known of one kind of unit."""

    estimates: list[_Estimate]
    in_use: int = 0
    units: int = 0


class Chooser:
    """Deterministic: fed with the same units and times, every peer's chooses the same.

    Belongs to one epoch, since the members of the next one have not seen the same. Raises `ConfigError` without a
    choice.
    """

    def __init__(self, choices: int) -> None:
        if choices < 1:
            raise ConfigError(f"adaptive choices must be at least 1, found {choices}")
        self._choices = choices
        self._known: dict[Kind, _Known] = {}

    def choose(self, kind: Kind) -> int:
        """The choice for the next unit of a kind."""
        known = self._known.setdefault(kind, _Known([_Estimate() for _ in range(self._choices)]))
        known.units += 1
        estimates = known.estimates
        untried = min(range(self._choices), key=lambda at: (estimates[at].tried, at))
        if estimates[untried].tried < WARM_UPS + TRIALS:
            return untried
        if known.units % EXPLORE_EVERY == 0:
            others = (at for at in range(self._choices) if at != known.in_use)
            return min(others, key=lambda at: (estimates[at].tried, at), default=known.in_use)
        cheapest = min(range(self._choices), key=lambda at: (estimates[at].micros, at))
        if estimates[cheapest].micros < (1 - BETTER_BY) * estimates[known.in_use].micros:
            known.in_use = cheapest
        return known.in_use

    def learn(self, kind: Kind, choice: int, micros: int) -> None:
        """The slowest peer took so long for a unit of a kind."""
        self._known[kind].estimates[choice].learn(micros)


def kind_of(unit: Phase, layout: Layout) -> Kind:
    """Units alike: one phase, and routes of all peers within a factor of two."""
    return unit, sum(layout.routes_P).bit_length()


@dataclass
class AdaptivePaths:
    """One layer's paths by choice, over a chooser that all layers of an epoch share.

    `annotate` and `choose` are called once for each invocation, in this order, then `measured`.
    """

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    chooser: Chooser
    _last: tuple[Kind, int] | None = None
    _micros: int = NOT_MEASURED

    def annotate(self, record: Tensor) -> Tensor:
        """A count-exchange line with what this peer's last invocation took behind it."""
        return torch.cat([record, record.new_tensor([self._micros])])

    @staticmethod
    def split(gathered: Tensor) -> tuple[Tensor, Sequence[int]]:
        """The peers' lines without the times, and the times in peer-slot order."""
        return gathered[:, :-1], gathered[:, -1].tolist()

    def choose(self, unit: Phase, layout: Layout, micros_P: Sequence[int]) -> tuple[str, Path]:
        """Learn from the last invocation, as all peers do; the path for this one, and its name."""
        if self._last is not None and NOT_MEASURED not in micros_P:
            self.chooser.learn(*self._last, max(micros_P))
        kind = kind_of(unit, layout)
        choice = self.chooser.choose(kind)
        self._last, self._micros = (kind, choice), NOT_MEASURED
        return self.names[choice], self.paths[choice]

    def measured(self, seconds: float) -> None:
        """What this invocation took here, from the agreed counts to the sums."""
        self._micros = round(seconds * 1e6)
