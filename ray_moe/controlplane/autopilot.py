"""The automatic decider: how many ranks, how many copies of each expert, and when to move; one change at a time.

Pure; see `ray_moe.controlplane.decisions`. The controller asks once a second:

    state, wanted = policy.decide(state, signals, now)       Grow, Shrink, Rebalance or Hold

`RankPolicy`, `ReplicaPolicy` and `RebalancePolicy` judge what they are made for; here is what makes one decider of
them. Nothing is wanted while anything is under way or has just ended. Ranks come first. Copies are added where that
pays for its moves, so the rebalancer has to agree; copies of cold experts go when they have been cold for as long as an
imbalance has to last, and only where that brings no imbalance about. Letters: L layers, E experts, G ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.autoscale import Load, RankPolicy, RankState, ReplicaPolicy, ReplicaState
from ray_moe.controlplane.decisions import Decision, Kind, Reason, require
from ray_moe.controlplane.demand import Demand
from ray_moe.controlplane.prospects import Prospect, copies_held, imbalance_of, prospect_of
from ray_moe.controlplane.publication import Storage
from ray_moe.controlplane.rebalance import Balance, RebalancePolicy, RebalanceState, demand_change
from ray_moe.errors import ConfigError
from ray_moe.placement import PlacementSnapshot

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Times of a refusal that differ by less are one refusal, carried over from another clock.
_ONE_REFUSAL_S = 1.0

# -- What is seen


@dataclass(frozen=True)
class RankLoad:
    """What one rank that admits requests has to do, as of its last step."""

    rank: int
    waiting: int
    running: int
    outstanding_tokens: int


@dataclass(frozen=True)
class Signals:
    """One look at the cluster.

    `ranks` are those that serve, without those that are coming or going; `under_way` names the operations that are.
    `tokens_per_second` is what arrives, `latency_seconds` the 95th percentile between tokens as engines see it.
    `demand` is a fresh estimate of the serving checkpoint, None while there is none. `available` is how many more ranks
    the cluster could give, None if nobody knows; `refused_at` when a grow last ended for want of resources.
    """

    ranks: tuple[RankLoad, ...]
    tokens_per_second: float
    latency_seconds: float
    placement: PlacementSnapshot
    storage: Storage
    demand: Demand | None = None
    available: int | None = None
    refused_at: float | None = None
    under_way: tuple[str, ...] = ()


# -- What is wanted


@dataclass(frozen=True)
class Grow:
    """So many more ranks."""

    ranks: int
    why: Decision


@dataclass(frozen=True)
class Shrink:
    """Without this rank."""

    rank: int
    why: Decision


@dataclass(frozen=True, eq=False)
class Rebalance:
    """Copies of every expert by (layer, expert), and where they go: (expert, rank) by layer. `moves` copies arrive."""

    counts: Mapping[tuple[int, int], int]
    homes: Mapping[int, tuple[tuple[int, int], ...]]
    moves: int
    why: Decision


@dataclass(frozen=True)
class Hold:
    """Nothing, and why not: what is wanted and cannot be had, else what comes nearest to a change."""

    why: Decision


Wanted = Grow | Shrink | Rebalance | Hold


# -- What is remembered


@dataclass(frozen=True)
class Refusals:
    """Grows in a row that ended for want of resources: how many, the last one's time, and the ranks there were."""

    count: int = 0
    at: float = -math.inf
    ranks: int = 0


@dataclass(frozen=True, eq=False)
class AutopilotState:
    """`decisions` is what each of the three said when last asked: ranks, copies, moves."""

    ranks: RankState = field(default_factory=RankState)
    replicas: ReplicaState | None = None
    rebalance: RebalanceState = field(default_factory=RebalanceState)
    last_under_way: float = -math.inf
    refusals: Refusals = field(default_factory=Refusals)
    demand: Demand | None = None
    due_since: float | None = None
    prospects: tuple[Prospect, ...] = ()
    decisions: tuple[Decision, ...] = ()


# -- The decider


@dataclass(frozen=True)
class AutopilotPolicy:
    """The three policies; `replicas` takes slots per layer and ranks from what is seen, whatever it says itself.

    Latency has a floor, `unloaded_latency_seconds`, that more ranks do not lower: only what is above it counts as
    pressure. `expert_share` is the part of a step that experts take, see `Balance`. For `settle_seconds` after an
    operation nothing is wanted, so that what is seen is the cluster as it is now. After a grow was refused the next one
    waits `retry_seconds`, then twice as long each time up to `retry_most_seconds`. Raises `ConfigError` for values
    outside their bounds.
    """

    ranks: RankPolicy
    replicas: ReplicaPolicy
    rebalance: RebalancePolicy
    unloaded_latency_seconds: float = 0.0
    expert_share: float = 0.5
    settle_seconds: float = 10.0
    retry_seconds: float = 30.0
    retry_most_seconds: float = 600.0

    def __post_init__(self) -> None:
        require(self.ranks.shrink_step, "shrink_step", 1, 1)  # one rank is named at a time
        require(self.replicas.min_replicas, "min_replicas", 1, self.ranks.min_ranks)
        require(self.expert_share, "expert_share", 0.0, 1.0)
        require(self.settle_seconds, "settle_seconds", 0.0)
        require(self.retry_seconds, "retry_seconds", 0.0)
        require(self.retry_most_seconds, "retry_most_seconds", self.retry_seconds)
        if not 0 <= self.unloaded_latency_seconds < self.ranks.latency_seconds:
            raise ConfigError(
                f"unloaded_latency_seconds must be in [0, latency_seconds {self.ranks.latency_seconds:g}), "
                f"found {self.unloaded_latency_seconds:g}"
            )

    def decide(self, state: AutopilotState, seen: Signals, now: float) -> tuple[AutopilotState, Wanted]:
        """The next state and at most one change, which counts as begun. `ConfigError` for signals that contradict."""
        if not seen.ranks:
            raise ConfigError("ranks must name at least one that serves, found none")
        if seen.under_way:
            state = replace(state, last_under_way=now)
        busy = bool(seen.under_way) or now - state.last_under_way < self.settle_seconds

        state, ranks = self._ranks(state, seen, now, busy)
        if ranks.kind is Kind.GROW:
            more = int(ranks.evidence["target_ranks"]) - len(seen.ranks)
            return replace(state, decisions=(ranks,)), Grow(more, ranks)
        if ranks.kind is Kind.SHRINK:
            return replace(state, decisions=(ranks,)), Shrink(_least_busy(seen), ranks)
        if seen.demand is None:
            return replace(state, decisions=(ranks,)), Hold(ranks)
        state, change, others = self._placement(state, seen, seen.demand, ranks.evidence["pressure"], now, busy)
        said = (ranks, *others)
        state = replace(state, decisions=said)
        if change is not None:
            return state, change
        held = (each for each in said if each.kind is Kind.HOLD and each.reason is not Reason.IN_BOUNDS)
        return state, Hold(next(held, ranks))

    # -- Ranks

    def _ranks(self, state: AutopilotState, seen: Signals, now: float, busy: bool) -> tuple[AutopilotState, Decision]:
        state, retry_in = self._refusals(state, seen, now)
        floor, target = self.unloaded_latency_seconds, self.ranks.latency_seconds
        load = Load(
            ranks=len(seen.ranks),
            tokens_per_second=seen.tokens_per_second,
            waiting=float(sum(each.waiting for each in seen.ranks)),
            latency_seconds=target * max(0.0, seen.latency_seconds - floor) / (target - floor),
            available=0 if retry_in > 0 else seen.available,
            busy=busy,
        )
        # As few as hold every expert: below that there is nothing to shrink to.
        fewest = math.ceil(_num_experts(seen) * self.replicas.min_replicas / seen.storage.capacity)
        fewest = min(max(fewest, self.ranks.min_ranks), self.ranks.max_ranks)
        policy = replace(self.ranks, min_ranks=fewest)
        ranks, decision = policy.decide(state.ranks, load, now)
        if decision.reason is Reason.NOT_AVAILABLE and retry_in > 0:
            waits = {"refusals": float(state.refusals.count), "retry_in_seconds": retry_in}
            decision = replace(decision, evidence={**decision.evidence, **waits})
        if decision.reason is Reason.BUSY and not seen.under_way:
            since = {
                "seconds_since_change": now - state.last_under_way,
                "seconds_since_change_limit": self.settle_seconds,
            }
            decision = replace(decision, reason=Reason.COOLING_DOWN, evidence={**decision.evidence, **since})
        return replace(state, ranks=ranks), decision

    def _refusals(self, state: AutopilotState, seen: Signals, now: float) -> tuple[AutopilotState, float]:
        """With a refusal that is news, and the seconds until the next grow may be tried."""
        past = state.refusals
        if seen.refused_at is not None and seen.refused_at > past.at + _ONE_REFUSAL_S:
            past = Refusals(past.count + 1, seen.refused_at, len(seen.ranks))
        elif past.count and len(seen.ranks) > past.ranks:
            past = replace(past, count=0)
        waits = min(self.retry_seconds * 2.0 ** (past.count - 1), self.retry_most_seconds) if past.count else 0.0
        return replace(state, refusals=past), max(0.0, past.at + waits - now)

    # -- Copies and moves

    def _placement(
        self, state: AutopilotState, seen: Signals, demand: Demand, pressure: float, now: float, busy: bool
    ) -> tuple[AutopilotState, Rebalance | None, tuple[Decision, Decision]]:
        """A move that pays, with the copies that are due; else copies of cold experts that may go; else nothing."""
        held_LEG = copies_held(seen.placement)
        counts_LE, loads_LE = held_LEG.sum(axis=2), demand.loads_LE
        if loads_LE.shape != counts_LE.shape:
            raise ConfigError(
                f"demand must be {list(counts_LE.shape)} like the placement, found {list(loads_LE.shape)}"
            )
        state, jump = _with_demand(state, demand)
        before, policy = _as_placed(state.replicas, counts_LE, now), self._replicas(seen)
        after, copies = policy.decide(before, loads_LE, pressure, now)
        # Due whatever they bring: too few copies of an expert at once, copies of cold ones when they stay cold.
        short_LE = counts_LE < policy.min_replicas
        due_LE = np.where(short_LE, after.counts_LE, np.minimum(counts_LE, after.counts_LE))
        due = _due(due_LE - counts_LE)
        due_since = (now if state.due_since is None else state.due_since) if due is not None else None
        state = replace(state, replicas=before, due_since=due_since)

        def begun(
            state: AutopilotState, rebalance: RebalanceState, found: Prospect, new_LE: Ints, why: Decision
        ) -> tuple[AutopilotState, Rebalance]:
            state = replace(state, rebalance=rebalance, replicas=_changed(before, new_LE, now), due_since=None)
            return state, Rebalance(found.counts, found.homes, found.moves, why)

        # The best that could come of a move first: a placement is worked out only where the answer may be yes.
        balance = Balance(imbalance_of(loads_LE, held_LEG), 1.0, self.expert_share, jump, 1, busy)
        rebalance, moving = self.rebalance.decide(state.rebalance, balance, now)
        if moving.kind is Kind.MOVE:
            new_LE = due_LE
            state, found = _prospect(state, seen, demand, new_LE)
            if found.imbalance >= self.rebalance.stop_below:  # only then are more copies worth their room
                new_LE = after.counts_LE
                state, found = _prospect(state, seen, demand, new_LE)
            left = min(found.imbalance, balance.imbalance)
            balance = replace(balance, imbalance_after=left, moved_bytes=found.moved_bytes)
            rebalance, moving = self.rebalance.decide(state.rebalance, balance, now)
            if moving.kind is Kind.MOVE:
                return *begun(state, rebalance, found, new_LE, moving), (copies, moving)
        state = replace(state, rebalance=rebalance)
        if due is None or due_since is None:
            return state, None, (copies, moving)
        is_short = due.reason is Reason.BELOW_MINIMUM
        held_back = self._held_back(rebalance, math.inf if is_short else now - due_since, now, busy)
        if held_back is None:
            state, found = _prospect(state, seen, demand, due_LE)
            held_back = self._costs_too_much(rebalance, found, is_short)
        if held_back is not None:
            return state, None, (held_back, moving)
        actions = rebalance.actions.with_action(now, found.moved_bytes)
        return *begun(state, replace(rebalance, actions=actions), found, due_LE, due), (due, moving)

    def _replicas(self, seen: Signals) -> ReplicaPolicy:
        """The policy for the ranks and slots there are; slots kept free for moves are used where experts need them."""
        ranks, storage = len(seen.placement.group.peers), seen.storage
        least = min(self.replicas.min_replicas, ranks)
        slots = ranks * storage.room
        if slots < _num_experts(seen) * least:
            slots = ranks * storage.capacity
        largest = min(ranks, self.replicas.max_replicas or ranks)
        return replace(
            self.replicas, slots_per_layer=slots, num_ranks=ranks, min_replicas=least, max_replicas=max(largest, least)
        )

    def _held_back(self, state: RebalanceState, lasted: float, now: float, busy: bool) -> Decision | None:
        """Why copies that are due are left for now: what holds back moves holds them back too."""
        policy, actions = self.rebalance, state.actions
        since_jump = math.inf if state.jumped is None else now - state.jumped
        lasting, rest, most = policy.lasting_seconds, policy.cool_down_seconds, float(policy.moves_per_hour)
        return _first_failed(
            (lasted < lasting, Reason.NOT_LASTED, "seconds_cold", lasted, lasting),
            (since_jump < lasting, Reason.DEMAND_JUMPED, "seconds_since_jump", since_jump, lasting),
            (busy, Reason.BUSY, "operations_under_way", 1.0, 0.0),
            (actions.since_last(now) < rest, Reason.COOLING_DOWN, "seconds_since_move", actions.since_last(now), rest),
            (actions.count >= most, Reason.ACTION_LIMIT, "moves_in_the_hour", float(actions.count), most),
        )

    def _costs_too_much(self, state: RebalanceState, found: Prospect, is_short: bool) -> Decision | None:
        """Why copies that are due are not worth it: no seats, an imbalance to bring them back, too many bytes."""
        policy, moved = self.rebalance, state.actions.amount + found.moved_bytes
        uneven, bound = found.imbalance, policy.start_above
        return _first_failed(
            (not found.homes, Reason.AT_BOUND, "seats", 0.0, 1.0),
            (uneven > bound and not is_short, Reason.COST_TOO_HIGH, "imbalance_after", uneven, bound),
            (moved > policy.bytes_per_hour, Reason.BYTES_LIMIT, "bytes_in_the_hour", moved, policy.bytes_per_hour),
        )


# -- Details


def _first_failed(*checks: tuple[bool, Reason, str, float, float]) -> Decision | None:
    for failed, reason, name, value, limit in checks:
        if failed:
            return Decision(Kind.HOLD, reason, {name: value, f"{name}_limit": limit})
    return None


def _least_busy(seen: Signals) -> int:
    """The rank that is missed least: with the least work outstanding, the newest of equals."""
    return min(seen.ranks, key=lambda load: (load.outstanding_tokens, -load.rank)).rank


def _num_experts(seen: Signals) -> int:
    return max(placement.num_logical_experts for placement in seen.placement.layers)


def _with_demand(state: AutopilotState, demand: Demand) -> tuple[AutopilotState, float]:
    """With a demand that is news, and how far it is from the last one."""
    past = state.demand
    if past is None or past.loads_LE.shape != demand.loads_LE.shape:
        return replace(state, demand=demand), 0.0
    if past.provenance.end == demand.provenance.end:
        return state, 0.0
    return replace(state, demand=demand), demand_change(past.loads_LE, demand.loads_LE)


def _as_placed(state: ReplicaState | None, counts_LE: Ints, now: float) -> ReplicaState:
    """The state with the copies that there are, whatever became of those that were wanted."""
    if state is None or state.counts_LE.shape != counts_LE.shape:
        return ReplicaState.start(counts_LE)
    return replace(state, counts_LE=counts_LE, actions=state.actions.at(now))


def _due(change_LE: Ints) -> Decision | None:
    """What copies that come and go whatever they bring come to; None where there are none."""
    added, removed = float(change_LE.clip(min=0).sum()), float((-change_LE).clip(min=0).sum())
    if not added and not removed:
        return None
    reason = Reason.BELOW_MINIMUM if added else Reason.COLD_EXPERTS
    return Decision(Kind.REPLICATE, reason, {"copies_added": added, "copies_removed": removed})


def _changed(state: ReplicaState, counts_LE: Ints, now: float) -> ReplicaState:
    changes_LE = np.abs(counts_LE - state.counts_LE)
    if not changes_LE.any():
        return state
    actions = state.actions.with_action(now, float(changes_LE.sum()))
    return ReplicaState(counts_LE, np.where(changes_LE > 0, now, state.changed_LE), actions)


def _prospect(state: AutopilotState, seen: Signals, demand: Demand, counts_LE: Ints) -> tuple[AutopilotState, Prospect]:
    """What these copies would be worth, remembered: of one look there are at most two that matter."""
    found = prospect_of(seen.placement, seen.storage, demand, counts_LE, state.prospects)
    others = tuple(each for each in state.prospects if each is not found)
    return replace(state, prospects=(*others, found)[-2:]), found
