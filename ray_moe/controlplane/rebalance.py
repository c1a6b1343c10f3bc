"""When to move experts: only for an imbalance that lasts, and only where the gain pays for the move.

Pure; see `ray_moe.controlplane.decisions`. The placement to move to, and what it costs, come with the observation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.decisions import Actions, Decision, Kind, Reason, require
from ray_moe.errors import ConfigError


class Phase(StrEnum):
    CALM = "calm"
    SUSPECT = "suspect"  # above the upper threshold, not yet for `lasting_seconds`
    ACTIVE = "active"  # may move until the imbalance is below the lower threshold


# Where the imbalance is: "high" above the upper threshold, "lasted" above it for long enough, "low" below the lower
# one, "between". A burst ends in CALM from SUSPECT; ACTIVE is left by success only.
TRANSITIONS: dict[tuple[Phase, str], Phase] = {
    (Phase.CALM, "low"): Phase.CALM,
    (Phase.CALM, "between"): Phase.CALM,
    (Phase.CALM, "high"): Phase.SUSPECT,
    (Phase.SUSPECT, "low"): Phase.CALM,
    (Phase.SUSPECT, "between"): Phase.CALM,
    (Phase.SUSPECT, "high"): Phase.SUSPECT,
    (Phase.SUSPECT, "lasted"): Phase.ACTIVE,
    (Phase.ACTIVE, "low"): Phase.CALM,
    (Phase.ACTIVE, "between"): Phase.ACTIVE,
    (Phase.ACTIVE, "high"): Phase.ACTIVE,
}


def advance(phase: Phase, event: str) -> Phase:
    """Take one edge of `TRANSITIONS`; `ConfigError` naming phase and event for any other."""
    following = TRANSITIONS.get((phase, event))
    if following is None:
        raise ConfigError(f"a {phase} rebalancer allows no {event!r}")
    return following


@dataclass(frozen=True)
class Balance:
    """One window. Imbalances are max over mean of the ranks' load, >= 1: as placed, and as it would be after the move.

    `expert_share` is the part of a step that experts take, in [0, 1]. `demand_change` is how far this window's demand
    is from the previous window's, see `demand_change`. `moved_bytes` is what the move takes.
    """

    imbalance: float
    imbalance_after: float
    expert_share: float
    demand_change: float
    moved_bytes: int
    busy: bool = False


@dataclass(frozen=True)
class RebalanceState:
    phase: Phase = Phase.CALM
    high_since: float | None = None  # None in CALM
    jumped: float | None = None  # when demand last changed abruptly
    actions: Actions = field(default_factory=Actions)


@dataclass(frozen=True)
class RebalancePolicy:
    """Thresholds are imbalances, durations seconds. Raises `ConfigError` for values outside their bounds.

    The gain is the time that steps would save within `horizon_seconds`: experts wait for the fullest rank, so their
    share shrinks by after / before. The cost is `interference` (the part of a second that a second of copying takes
    from steps) times the seconds of copying at `bytes_per_second`, and `pause_seconds`.
    """

    start_above: float = 1.2
    stop_below: float = 1.1
    lasting_seconds: float = 30.0
    jump: float = 0.25
    cool_down_seconds: float = 60.0
    moves_per_hour: int = 30
    bytes_per_hour: float = float("inf")
    min_gain: float = 0.01
    gain_over_cost: float = 2.0
    horizon_seconds: float = 300.0
    bytes_per_second: float = 10e9
    interference: float = 0.1
    pause_seconds: float = 0.01

    def __post_init__(self) -> None:
        require(self.stop_below, "stop_below", 1.0)
        require(self.start_above, "start_above", self.stop_below)
        require(self.bytes_per_second, "bytes_per_second", 1.0)
        require(self.moves_per_hour, "moves_per_hour", 1)
        require(self.interference, "interference", 0.0, 1.0)
        require(self.jump, "jump", 0.0, 1.0)
        require(self.min_gain, "min_gain", 0.0, 1.0)
        for name in ("lasting_seconds", "cool_down_seconds", "bytes_per_hour", "gain_over_cost", "horizon_seconds"):
            require(getattr(self, name), name, 0.0)
        require(self.pause_seconds, "pause_seconds", 0.0)

    def decide(self, state: RebalanceState, seen: Balance, now: float) -> tuple[RebalanceState, Decision]:
        """MOVE, or HOLD with the first check that held back. A MOVE counts as done: the caller starts it."""
        require(seen.imbalance, "imbalance", 1.0)
        require(seen.expert_share, "expert_share", 0.0, 1.0)
        state = self._observed(state, seen, now)
        held = self._held_back(state, seen, now)
        if held is not None:
            return state, held
        gain, cost = self._gain(seen), self._cost_seconds(seen)
        evidence = {
            "imbalance": seen.imbalance,
            "imbalance_after": seen.imbalance_after,
            "gain": gain,
            "gain_seconds": gain * self.horizon_seconds,
            "cost_seconds": cost,
            "bytes": float(seen.moved_bytes),
        }
        moved = replace(state, actions=state.actions.with_action(now, seen.moved_bytes))
        return moved, Decision(Kind.MOVE, Reason.IMBALANCE_LASTED, evidence)

    def _observed(self, state: RebalanceState, seen: Balance, now: float) -> RebalanceState:
        actions = state.actions.at(now)
        high, low = seen.imbalance > self.start_above, seen.imbalance < self.stop_below
        phase = advance(state.phase, "high" if high else "low" if low else "between")
        since = None if phase is Phase.CALM else now if state.high_since is None else state.high_since
        if phase is Phase.SUSPECT and since is not None and now - since >= self.lasting_seconds:
            phase = advance(phase, "lasted")
        jumped = now if seen.demand_change > self.jump else state.jumped
        return RebalanceState(phase, since, jumped, actions)

    def _held_back(self, state: RebalanceState, seen: Balance, now: float) -> Decision | None:
        """The checks in order: what is seen, what was done lately, what the move would bring."""
        since_high = now - (now if state.high_since is None else state.high_since)
        since_jump = float("inf") if state.jumped is None else now - state.jumped
        gain, cost = self._gain(seen), self._cost_seconds(seen)
        worth = gain * self.horizon_seconds
        bytes_after = state.actions.amount + seen.moved_bytes
        checks = (
            (state.phase is Phase.CALM, Reason.IN_BOUNDS, "imbalance", seen.imbalance, self.start_above),
            (state.phase is Phase.SUSPECT, Reason.NOT_LASTED, "seconds_high", since_high, self.lasting_seconds),
            (
                since_jump < self.lasting_seconds,
                Reason.DEMAND_JUMPED,
                "seconds_since_jump",
                since_jump,
                self.lasting_seconds,
            ),
            (seen.busy, Reason.BUSY, "moves_under_way", 1.0, 0.0),
            (
                state.actions.since_last(now) < self.cool_down_seconds,
                Reason.COOLING_DOWN,
                "seconds_since_move",
                state.actions.since_last(now),
                self.cool_down_seconds,
            ),
            (seen.moved_bytes == 0, Reason.NOTHING_TO_MOVE, "bytes", 0.0, 0.0),
            (gain < self.min_gain or gain <= 0, Reason.GAIN_TOO_SMALL, "gain", gain, self.min_gain),
            (
                worth < self.gain_over_cost * cost,
                Reason.COST_TOO_HIGH,
                "gain_seconds",
                worth,
                self.gain_over_cost * cost,
            ),
            (
                state.actions.count >= self.moves_per_hour,
                Reason.ACTION_LIMIT,
                "moves_in_the_hour",
                float(state.actions.count),
                float(self.moves_per_hour),
            ),
            (
                bytes_after > self.bytes_per_hour,
                Reason.BYTES_LIMIT,
                "bytes_in_the_hour",
                bytes_after,
                self.bytes_per_hour,
            ),
        )
        for failed, reason, name, value, limit in checks:
            if failed:
                return Decision(Kind.HOLD, reason, {name: value, f"{name}_limit": limit})
        return None

    def _gain(self, seen: Balance) -> float:
        """The part of a step that the move saves."""
        return seen.expert_share * (1.0 - seen.imbalance_after / seen.imbalance)

    def _cost_seconds(self, seen: Balance) -> float:
        return self.interference * seen.moved_bytes / self.bytes_per_second + self.pause_seconds


def demand_change(previous_LE: NDArray[np.float64], current_LE: NDArray[np.float64]) -> float:
    """How far one window's demand [L, E] is from another's: the part of a layer's routes, in [0, 1], that go to other
    experts, for the layer where that is largest. Totals do not count; a layer without routes in either has not changed.
    """
    totals = [window.sum(axis=1, keepdims=True) for window in (previous_LE, current_LE)]
    shares = [
        np.divide(window, total, out=np.zeros(window.shape), where=total > 0)
        for window, total in zip((previous_LE, current_LE), totals, strict=True)
    ]
    both = ((totals[0] > 0) & (totals[1] > 0))[:, 0]
    distance = 0.5 * np.abs(shares[0] - shares[1]).sum(axis=1)
    return float(distance[both].max(initial=0.0))
