"""How many ranks, and how many copies of each expert: from demand, queue and latency, within bounds and step by step.

Pure; see `ray_moe.controlplane.decisions`. `RankPolicy` grows and shrinks the group of peers; `ReplicaPolicy` says how
many copies each expert should have in it. When to move what is there is `ray_moe.controlplane.rebalance`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.decisions import Actions, Decision, Kind, Reason, require
from ray_moe.errors import ConfigError

# -- Ranks


class Trend(StrEnum):
    STEADY = "steady"
    RISING = "rising"  # too few ranks, since a moment
    FALLING = "falling"  # too many


# "high", "low" or "between" is where the pressure is. To turn round, the trend starts anew.
TRANSITIONS: dict[tuple[Trend, str], Trend] = {
    (Trend.STEADY, "high"): Trend.RISING,
    (Trend.STEADY, "between"): Trend.STEADY,
    (Trend.STEADY, "low"): Trend.FALLING,
    (Trend.RISING, "high"): Trend.RISING,
    (Trend.RISING, "between"): Trend.STEADY,
    (Trend.RISING, "low"): Trend.FALLING,
    (Trend.FALLING, "high"): Trend.RISING,
    (Trend.FALLING, "between"): Trend.STEADY,
    (Trend.FALLING, "low"): Trend.FALLING,
}


def advance(trend: Trend, event: str) -> Trend:
    """Take one edge of `TRANSITIONS`; `ConfigError` naming trend and event for any other."""
    following = TRANSITIONS.get((trend, event))
    if following is None:
        raise ConfigError(f"a {trend} trend allows no {event!r}")
    return following


@dataclass(frozen=True)
class Load:
    """One window of a group of `ranks` peers. `available` is how many more the cluster could give, None if unknown.

    `tokens_per_second` is what arrives, `waiting` requests that are not admitted yet, `latency_seconds` the latency
    that has a target (say the p95 between tokens).
    """

    ranks: int
    tokens_per_second: float
    waiting: float
    latency_seconds: float
    available: int | None = None
    busy: bool = False


@dataclass(frozen=True)
class RankState:
    trend: Trend = Trend.STEADY
    since: float = 0.0
    actions: Actions = field(default_factory=Actions)


@dataclass(frozen=True)
class RankPolicy:
    """The number of ranks follows the pressure, the largest of three ratios that should be at most 1: tokens per second
    of a rank, requests waiting per rank, and latency, each over its target.

    Above `grow_above` for `grow_after_seconds` it grows to where the pressure would be `grow_above`; where fewer ranks
    would still stay below `shrink_below` for `shrink_after_seconds`, it shrinks to them. A pressure is taken to be
    shared among ranks. Raises `ConfigError` for values outside their bounds.
    """

    min_ranks: int
    max_ranks: int
    tokens_per_second_per_rank: float
    waiting_per_rank: float
    latency_seconds: float
    grow_above: float = 1.0
    shrink_below: float = 0.7
    grow_after_seconds: float = 15.0
    shrink_after_seconds: float = 300.0
    grow_step: int = 4
    shrink_step: int = 1
    cool_down_seconds: float = 60.0
    actions_per_hour: int = 20

    def __post_init__(self) -> None:
        require(self.min_ranks, "min_ranks", 1)
        require(self.max_ranks, "max_ranks", self.min_ranks)
        require(self.grow_above, "grow_above", 1e-9)
        if not 0 < self.shrink_below < self.grow_above:
            raise ConfigError(
                f"shrink_below must be in (0, grow_above {self.grow_above:g}), found {self.shrink_below:g}"
            )
        for name in ("tokens_per_second_per_rank", "waiting_per_rank", "latency_seconds"):
            require(getattr(self, name), name, 1e-9)
        for name in ("grow_step", "shrink_step", "actions_per_hour"):
            require(getattr(self, name), name, 1)
        for name in ("grow_after_seconds", "shrink_after_seconds", "cool_down_seconds"):
            require(getattr(self, name), name, 0.0)

    def decide(self, state: RankState, seen: Load, now: float) -> tuple[RankState, Decision]:
        """GROW or SHRINK with `ranks` and `target_ranks` in the evidence, or HOLD with what held back."""
        require(seen.ranks, "ranks", 1)
        ratios = self._ratios(seen)
        cause = max(ratios, key=lambda reason: ratios[reason])
        pressure = ratios[cause]
        fewer = math.ceil(seen.ranks * pressure / self.shrink_below)
        event = "high" if pressure > self.grow_above else "low" if fewer < seen.ranks else "between"
        trend = advance(state.trend, event)
        since = state.since if trend is state.trend else now
        state = RankState(trend, since, state.actions.at(now))

        if trend is Trend.RISING:
            wanted = min(math.ceil(seen.ranks * pressure / self.grow_above), seen.ranks + self.grow_step)
        elif trend is Trend.FALLING:
            wanted, cause = max(fewer, seen.ranks - self.shrink_step), Reason.LOAD_LOW
        else:
            wanted, cause = seen.ranks, Reason.IN_BOUNDS
        target = min(max(wanted, self.min_ranks), self.max_ranks)
        if not self.min_ranks <= seen.ranks <= self.max_ranks:
            cause = Reason.BELOW_MINIMUM if seen.ranks < self.min_ranks else Reason.ABOVE_MAXIMUM
        evidence = {
            "pressure": pressure,
            **{f"{reason.removesuffix('_high')}_ratio": ratio for reason, ratio in ratios.items()},
            "ranks": float(seen.ranks),
            "target_ranks": float(target),
        }
        held = self._held_back(state, seen, target, wanted, now)
        if held is not None:
            reason, numbers = held
            return state, Decision(Kind.HOLD, reason, {**evidence, **numbers})
        if seen.available is not None:
            target = min(target, seen.ranks + seen.available)
            evidence["target_ranks"] = float(target)
        acted = replace(state, since=now, actions=state.actions.with_action(now, target - seen.ranks))
        return acted, Decision(Kind.GROW if target > seen.ranks else Kind.SHRINK, cause, evidence)

    def _ratios(self, seen: Load) -> dict[Reason, float]:
        return {
            Reason.DEMAND_HIGH: seen.tokens_per_second / (seen.ranks * self.tokens_per_second_per_rank),
            Reason.QUEUE_HIGH: seen.waiting / (seen.ranks * self.waiting_per_rank),
            Reason.LATENCY_HIGH: seen.latency_seconds / self.latency_seconds,
        }

    def _held_back(
        self, state: RankState, seen: Load, target: int, wanted: int, now: float
    ) -> tuple[Reason, dict[str, float]] | None:
        grows = target > seen.ranks
        lasting = self.grow_after_seconds if grows else self.shrink_after_seconds
        outside = not self.min_ranks <= seen.ranks <= self.max_ranks  # bounds changed: nothing to wait for
        lasted, last = now - state.since, state.actions.since_last(now)
        if target == seen.ranks:
            return (
                (Reason.IN_BOUNDS, {}) if wanted == seen.ranks else (Reason.AT_BOUND, {"wanted_ranks": float(wanted)})
            )
        if not outside and lasted < lasting:
            return Reason.NOT_LASTED, {"seconds": lasted, "seconds_limit": lasting}
        if seen.busy:
            return Reason.BUSY, {}
        if last < self.cool_down_seconds:
            return Reason.COOLING_DOWN, {
                "seconds_since_action": last,
                "seconds_since_action_limit": self.cool_down_seconds,
            }
        if state.actions.count >= self.actions_per_hour:
            limit = float(self.actions_per_hour)
            return Reason.ACTION_LIMIT, {"actions_in_the_hour": float(state.actions.count), "actions_limit": limit}
        if grows and seen.available == 0:
            return Reason.NOT_AVAILABLE, {"available": 0.0}
        return None


# -- Copies of each expert


@dataclass(frozen=True, eq=False)
class ReplicaState:
    """The copies that each expert should have [L, E] int64, and when that last changed [L, E] in seconds."""

    counts_LE: NDArray[np.int64]
    changed_LE: NDArray[np.float64]
    actions: Actions = field(default_factory=Actions)

    @classmethod
    def start(cls, counts_LE: NDArray[np.int64]) -> ReplicaState:
        return cls(counts_LE, np.full(counts_LE.shape, -np.inf))


@dataclass(frozen=True)
class ReplicaPolicy:
    """Copies by load. The measure is the fair load of one slot, a layer's load over `slots_per_layer`: a copy that
    carries more than `hot` times that is worth another one; a copy without which the expert's others would carry less
    than `cold` times that can go. `cold` < `hot` keeps the two apart.

    At most `slots_per_layer` copies in all and `max_replicas` of one expert (a rank each); never fewer than
    `min_replicas`. A decision adds or removes at most `step` copies per layer. An expert that changed within
    `cool_down_seconds` is left alone. Raises `ConfigError` for values outside their bounds.
    """

    slots_per_layer: int
    num_ranks: int
    min_replicas: int = 1
    max_replicas: int | None = None
    hot: float = 2.0
    cold: float = 1.0
    step: int = 8
    cool_down_seconds: float = 60.0
    actions_per_hour: int = 30

    def __post_init__(self) -> None:
        require(self.num_ranks, "num_ranks", 1)
        require(self.min_replicas, "min_replicas", 1, self.num_ranks)
        require(self.largest, "max_replicas", self.min_replicas, self.num_ranks)
        if not 0 < self.cold < self.hot:
            raise ConfigError(f"cold must be in (0, hot {self.hot:g}), found {self.cold:g}")
        for name in ("slots_per_layer", "step", "actions_per_hour"):
            require(getattr(self, name), name, 1)
        require(self.cool_down_seconds, "cool_down_seconds", 0.0)

    @property
    def largest(self) -> int:
        """Most copies of one expert."""
        return self.num_ranks if self.max_replicas is None else self.max_replicas

    def decide(
        self, state: ReplicaState, loads_LE: NDArray[np.float64], pressure: float, now: float
    ) -> tuple[ReplicaState, Decision]:
        """REPLICATE with new counts in the state, or HOLD. Under `pressure` > 1 (see `RankPolicy`) no copy goes."""
        counts_LE = state.counts_LE
        if loads_LE.shape != counts_LE.shape:
            raise ConfigError(f"loads must be {counts_LE.shape} like the counts, found {loads_LE.shape}")
        if self.min_replicas * counts_LE.shape[1] > self.slots_per_layer:
            raise ConfigError(
                f"slots_per_layer must be >= {self.min_replicas} copies x {counts_LE.shape[1]} experts, "
                f"found {self.slots_per_layer}"
            )
        rested_LE = now - state.changed_LE >= self.cool_down_seconds
        new_LE = np.stack(
            [self._layer(*row, pressure > 1.0) for row in zip(counts_LE, loads_LE, rested_LE, strict=True)]
        )
        added, removed = np.maximum(new_LE - counts_LE, 0), np.maximum(counts_LE - new_LE, 0)
        evidence = {"copies_added": float(added.sum()), "copies_removed": float(removed.sum()), "pressure": pressure}
        actions = state.actions.at(now)
        if not added.any() and not removed.any():
            reason, numbers = self._why_not(counts_LE, loads_LE, rested_LE)
        elif actions.count >= self.actions_per_hour:
            reason = Reason.ACTION_LIMIT
            numbers = {
                "actions_in_the_hour": float(actions.count),
                "actions_in_the_hour_limit": float(self.actions_per_hour),
            }
        else:
            changed_LE = np.where(new_LE != counts_LE, now, state.changed_LE)
            reason = Reason.HOT_AND_COLD_EXPERTS
            if not (added.any() and removed.any()):
                reason = Reason.HOT_EXPERTS if added.any() else Reason.COLD_EXPERTS
            actions = actions.with_action(now, float((added + removed).sum()))
            return ReplicaState(new_LE, changed_LE, actions), Decision(Kind.REPLICATE, reason, evidence)
        return replace(state, actions=actions), Decision(Kind.HOLD, reason, {**evidence, **numbers})

    def _why_not(
        self, counts_LE: NDArray[np.int64], loads_LE: NDArray[np.float64], rested_LE: NDArray[np.bool_]
    ) -> tuple[Reason, dict[str, float]]:
        """Which wish was not granted, where no count changes."""
        fair_L1 = loads_LE.sum(axis=1, keepdims=True) / self.slots_per_layer
        hot_LE = loads_LE / counts_LE > self.hot * fair_L1
        spare_LE = counts_LE > self.min_replicas
        cold_LE = spare_LE & (loads_LE / np.maximum(counts_LE - 1, 1) < self.cold * fair_L1)
        wishes = {"hot_experts": float(hot_LE.sum()), "cold_experts": float(cold_LE.sum())}
        if (hot_LE & rested_LE).any():
            return Reason.AT_BOUND, wishes
        if ((hot_LE | cold_LE) & ~rested_LE).any():
            return Reason.COOLING_DOWN, wishes
        return (Reason.UNDER_PRESSURE if cold_LE.any() else Reason.IN_BOUNDS), wishes

    def _layer(
        self, counts: NDArray[np.int64], loads: NDArray[np.float64], rested: NDArray[np.bool_], pressed: bool
    ) -> NDArray[np.int64]:
        """New counts [E] of one layer: cold copies go first, so that hot experts find room."""
        counts = counts.copy()
        fair = loads.sum() / self.slots_per_layer
        for _ in range(self.step):
            rest = np.where(counts > self.min_replicas, loads / np.maximum(counts - 1, 1), np.inf)
            rest[~rested] = np.inf
            coldest = int(rest.argmin())
            if pressed or rest[coldest] >= self.cold * fair:
                break
            counts[coldest] -= 1
        for _ in range(self.step):
            heat = np.where(rested & (counts < self.largest), loads / counts, -np.inf)
            short = np.flatnonzero(rested & (counts < self.min_replicas))
            hottest = int(short[0]) if len(short) else int(heat.argmax())
            if counts.sum() >= self.slots_per_layer or not (len(short) or heat[hottest] > self.hot * fair):
                break
            counts[hottest] += 1
        return counts
