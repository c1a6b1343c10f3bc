"""What the automatic deciders share: a decision that carries its reason and numbers, and a memory of recent actions.

Every decider is a frozen policy with `decide(state, observation, now) -> (state, decision)`: state is explicit, `now`
is seconds of any clock that does not go back, and nothing but the past is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ray_moe.errors import ConfigError

HOUR = 3600.0


class Kind(StrEnum):
    HOLD = "hold"
    MOVE = "move"  # to the placement that the observation describes
    GROW = "grow"
    SHRINK = "shrink"
    REPLICATE = "replicate"  # other replica counts


class Reason(StrEnum):
    """Why: the first check that held back, or what was acted on."""

    # held back
    IN_BOUNDS = "in_bounds"  # nothing to act on
    NOT_LASTED = "not_lasted"  # beyond the threshold, not for long enough
    DEMAND_JUMPED = "demand_jumped"  # demand differs from what it was a moment ago, and may be a burst
    BUSY = "busy"  # the last action is still under way
    COOLING_DOWN = "cooling_down"
    ACTION_LIMIT = "action_limit"  # actions in the last hour
    BYTES_LIMIT = "bytes_limit"  # bytes moved in the last hour, with this move
    NOTHING_TO_MOVE = "nothing_to_move"
    GAIN_TOO_SMALL = "gain_too_small"
    COST_TOO_HIGH = "cost_too_high"
    AT_BOUND = "at_bound"  # the smallest or largest number allowed
    NOT_AVAILABLE = "not_available"  # the cluster has no more to give
    UNDER_PRESSURE = "under_pressure"  # copies could go, but requests wait
    # acted on
    IMBALANCE_LASTED = "imbalance_lasted"
    DEMAND_HIGH = "demand_high"
    QUEUE_HIGH = "queue_high"
    LATENCY_HIGH = "latency_high"
    LOAD_LOW = "load_low"
    BELOW_MINIMUM = "below_minimum"
    ABOVE_MAXIMUM = "above_maximum"
    HOT_EXPERTS = "hot_experts"
    COLD_EXPERTS = "cold_experts"
    HOT_AND_COLD_EXPERTS = "hot_and_cold_experts"


@dataclass(frozen=True)
class Decision:
    """`evidence` are the numbers that were compared, by name: a measured value and, as `..._limit`, its bound."""

    kind: Kind
    reason: Reason
    evidence: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:g}" for name, value in self.evidence.items())
        return f"{self.kind}: {self.reason}" + (f" ({numbers})" if numbers else "")


@dataclass(frozen=True)
class Actions:
    """The actions of the last hour as (time, amount), and when the decider was last asked."""

    past: tuple[tuple[float, float], ...] = ()
    asked: float | None = None

    def at(self, now: float) -> Actions:
        """The memory as of `now`. `ConfigError` when time goes back."""
        if self.asked is not None and now < self.asked:
            raise ConfigError(f"now must not go back: {now:g} after {self.asked:g}")
        return Actions(tuple(action for action in self.past if now - action[0] < HOUR), now)

    def with_action(self, now: float, amount: float) -> Actions:
        return Actions((*self.past, (now, amount)), now)

    @property
    def count(self) -> int:
        return len(self.past)

    @property
    def amount(self) -> float:
        return sum(amount for _, amount in self.past)

    def since_last(self, now: float) -> float:
        """Seconds since the last action; infinity when there was none within the hour."""
        return now - self.past[-1][0] if self.past else float("inf")


def require(value: float, name: str, low: float, high: float = float("inf")) -> None:
    """`ConfigError` naming a policy's value that is outside [low, high], or no number."""
    if not low <= value <= high:
        raise ConfigError(f"{name} must be in [{low:g}, {high:g}], found {value:g}")
