"""Local search over placements: never worse than the start, and no more moves than the objective pays for.

Deterministic: no seed, no clock; equal choices take the lowest index. `solve` is start and search together.
Letters: L layers, E experts, S slots, G ranks, N nodes, A layers still improving.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_moe.controlplane.greedy import carried, greedy
from ray_moe.controlplane.objective import Objective, Terms, checked_loads
from ray_moe.controlplane.placed import Int64, Placed, Shape, count
from ray_moe.controlplane.search import State, Swaps
from ray_moe.errors import ConfigError

_CEILINGS: tuple[float | None, ...] = (0.9, 0.75, 0.5)
_SLACK, _SLACK_PRIOR = 0.01, 0.02


@dataclass(frozen=True)
class Budget:
    """When `improve` stops, for each layer by itself.

    `rounds` are steps: one changes at most every rank once. A step has to lower the barrier by `gain`, in the barrier's
    unit. A layer whose barrier is at or below `target` times the perfect one is left as it is.
    """

    rounds: int = 400
    gain: float = 1e-4
    target: float = 1.0

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise ConfigError(f"budget: rounds must be >= 0, found {self.rounds}")
        if not self.gain > 0:
            raise ConfigError(f"budget: gain must be > 0, found {self.gain}")
        if not self.target >= 1:
            raise ConfigError(f"budget: target must be >= 1, the perfect balance, found {self.target}")


def solve(
    loads_LE: ArrayLike,
    shape: Shape,
    objective: Objective | None = None,
    prior: Placed | None = None,
    budget: Budget | None = None,
) -> Placed:
    """The best answer at hand, with every constraint fulfilled and every slot filled.

    Without `prior`, `greedy` improved; with it, that placement carried over to `shape` and improved. Layers that end
    more than 1 % above the perfect barrier (2 % with a prior) try again from the most promising of a few greedy starts
    with other numbers of copies, and take that answer where its total is lower. Raises as `greedy` and `improve`.
    """
    objective, budget = objective or Objective(), budget or Budget()
    loads = checked_loads(loads_LE)
    if prior is None:
        best = improve(greedy(loads, shape, objective), loads, objective, budget)
        ceilings, slack = _CEILINGS, _SLACK
    else:
        best = improve(carried(prior, loads, shape, objective), loads, objective, budget, prior)
        ceilings, slack = (None, *_CEILINGS), _SLACK_PRIOR
    perfect = objective.balance + objective.phase
    short = np.nonzero(objective.evaluate(loads, best).barrier > perfect * max(1 + slack, budget.target))[0]
    if not short.size:
        return best

    some, before = objective.of_layers(short), None if prior is None else prior.of_layers(short)
    now = some.evaluate(loads[short], best.of_layers(short), before)
    if prior is not None:
        # At best the search takes half of a fresh start's moves back: where those cost more than can be won, stay.
        moves = some.evaluate(loads[short], greedy(loads[short], shape, some), before).moving
        pays = now.barrier + now.moving - 0.5 * moves > perfect
        short, now = short[pays], now.of_layers(pays)
        if not short.size:
            return best
        some, before = objective.of_layers(short), prior.of_layers(short)
    starts = [greedy(loads[short], shape, some, ceiling) for ceiling in ceilings]
    barriers = np.stack([some.evaluate(loads[short], start).barrier for start in starts])
    first, at = barriers.argmin(axis=0), np.arange(len(short))
    # Experience: the search takes a start's excess down to a third where there is room for it.
    hopeful = barriers[first, at] - perfect < 3 * (now.barrier - perfect)
    again = short[hopeful]
    if not again.size:
        return best
    start = Placed(shape, loads.shape[1], np.stack([each.phy2log_LS for each in starts])[first, at][hopeful])
    some, before = objective.of_layers(again), None if prior is None else prior.of_layers(again)
    other = improve(start, loads[again], some, budget, before)
    better = some.evaluate(loads[again], other, before).total < now.total[hopeful]
    held = best.phy2log_LS.copy()
    held[again[better]] = other.phy2log_LS[better]
    return Placed(shape, loads.shape[1], held)


def improve(
    placed: Placed,
    loads_LE: ArrayLike,
    objective: Objective | None = None,
    budget: Budget | None = None,
    prior: Placed | None = None,
) -> Placed:
    """A placement whose total is at most that of `placed` in every layer; slots that need not change keep their expert.

    `prior` is what migration is counted against, `placed` itself by default. Each layer walks downhill on its barrier,
    beyond the point where a step is worth its moves, and then takes the best total on its way. With a topology
    or resident weight, copies also go elsewhere where that lowers the total. `placed` must fulfil the constraints;
    raises `ConfigError` where it does not, or for loads or a prior of another model.
    """
    objective, budget = objective or Objective(), budget or Budget()
    loads = checked_loads(loads_LE, placed.num_experts, len(placed.phy2log_LS))
    require_fulfilled(placed, objective)
    state = State(placed, loads, objective, prior or placed)
    walk = _Walk(state, objective.evaluate(loads, placed, prior or placed))
    _descend(state, walk, budget)
    if objective.topology or objective.resident:
        _relocate(state, walk)
        _descend(state, walk, budget)
    return Placed(placed.shape, placed.num_experts, walk.best_LS)


class _Walk:
    """The total along the way of each layer, and the best placement so far."""

    def __init__(self, state: State, start: Terms) -> None:
        self.state = state
        self.best_L = start.total.copy()
        self.price_L = start.total - start.barrier
        self.best_LS = state.slots_LS.copy()

    def record(self, layers: Int64) -> None:
        total = self.state.cost_LG[layers].max(axis=1) + self.price_L[layers]
        better = total < self.best_L[layers] - 1e-12
        at = layers[better]
        self.best_L[at], self.best_LS[at] = total[better], self.state.slots_LS[at]


def _descend(state: State, walk: _Walk, budget: Budget) -> None:
    """Lower the largest rank cost of each layer, by the step with the least total, until none lowers it by `gain`."""
    target, gain = budget.target * state.costs.perfect, budget.gain * state.costs.perfect
    active = np.arange(len(state.slots_LS))
    for _ in range(budget.rounds):
        active = active[state.cost_LG[active].max(axis=1) > target]
        if not active.size:
            return
        # Without moves to pay for, copy counts change only where exchanges are at their end.
        pairs = state.pairs(active, gain)
        by_pairs = pairs.peak_A + pairs.price_A
        asked = np.nonzero(np.isinf(by_pairs) | (state.before_LEG is not None))[0]
        recounted = np.zeros(len(active), bool)
        if asked.size:
            recounts = state.recounts(active[asked], gain)
            wins = (recounts.peak_A + recounts.price_A < by_pairs[asked]) & np.isfinite(recounts.peak_A)
            recounted[asked[wins]] = True
            layer = active[recounted]
            state.recount(layer, recounts.slot_A[wins], recounts.expert_A[wins], recounts.cost_AG[wins])
            walk.price_L[layer] += recounts.price_A[wins]
        swapped = ~recounted & np.isfinite(by_pairs)
        _swap(state, walk, active, pairs, swapped)
        rest = np.nonzero(~swapped & ~recounted)[0]
        if rest.size:
            singles = state.singles(active[rest], gain)
            falls = np.isfinite(singles.peak_A)
            _swap(state, walk, active[rest], singles, falls)
            active = active[~np.isin(np.arange(len(active)), rest[~falls])]
        walk.record(active)


def _swap(state: State, walk: _Walk, layers: Int64, swaps: Swaps, chosen_A: NDArray[np.bool_]) -> None:
    of = chosen_A[swaps.at]
    state.swap(layers[swaps.at[of]], swaps.a[of], swaps.b[of], swaps.cost[of])
    walk.price_L[layers[chosen_A]] += swaps.price_A[chosen_A]


def _relocate(state: State, walk: _Walk) -> None:
    """Give copies another place, the most to win first, wherever an exchange of two slots lowers the total: another
    node where their rows start, or a rank that has their expert already."""
    shape = state.shape
    ranks, nodes_G = shape.rank_of_slot_S, shape.node_of_rank_G
    # where an exchange of two slots cannot win anything but balance
    alike = ranks if state.resident_price else nodes_G[ranks]
    won_LEN = state.won_LEN()
    active = np.arange(len(state.slots_LS))
    tried = np.zeros(state.slots_LS.shape, bool)
    while active.size:
        # the slot whose expert has most to win elsewhere
        row = active[:, None]
        experts = state.slots_LS[active]
        most = won_LEN[active].max(axis=2)[np.arange(len(active))[:, None], experts]
        hope = np.where(tried[active], 0.0, most - state.lost(row, experts, ranks))
        slot = hope.argmax(axis=1)
        going = hope[np.arange(len(active)), slot] > 0
        active, slot, experts = active[going], slot[going], experts[going]
        if not active.size:
            return
        row, one = active[:, None], slot[:, None]
        mine, here = state.slots_LS[row, one], ranks[one]
        cost = state.cost_LG[active]
        top = (
            -np.sort(-cost, axis=1)[:, :3]
            if cost.shape[1] > 2
            else np.pad(-np.sort(-cost, axis=1), ((0, 0), (0, 2)))[:, :3]
        )
        moved = state.value_LE[row, mine] - state.value_LE[row, experts]
        cost_here, cost_there = (
            cost[np.arange(len(active))[:, None], here],
            cost[np.arange(len(active))[:, None], ranks],
        )
        peak = np.maximum(cost_here - moved, cost_there + moved)
        # the largest of all other ranks is the first of the three largest that is neither of the two
        both = np.minimum(cost_here, cost_there) >= top[:, 1:2]
        taken = np.where(both, 2, np.maximum(cost_here, cost_there) >= top[:, :1])
        peak = np.maximum(peak, np.take_along_axis(top, taken.astype(np.int64), axis=1))
        change = peak - top[:, :1] + state.price(row, mine, here, ranks) + state.price(row, experts, ranks, here)
        change = np.where((alike == alike[one]) | (experts == mine), np.inf, change)
        best = change.argmin(axis=1)
        at = np.arange(len(active))
        better = change[at, best] < -1e-9
        tried[active[~better], slot[~better]] = True
        layer, a, b = active[better], slot[better], best[better]
        touched = (experts[at, best][better], mine[better, 0])
        price = (change - peak + top[:, :1])[at, best][better]
        state.swap(layer, a, b, moved[at, best][better])
        walk.price_L[layer] += price
        for expert in touched:
            won_LEN[layer, expert] = state.won_LEN(layer, expert)
        walk.record(layer)


def require_fulfilled(placed: Placed, objective: Objective) -> None:
    """Raises `ConfigError` naming the first expert that breaks a constraint."""
    if placed.counts_LE.min() < objective.min_replicas:
        layer, expert = np.argwhere(placed.counts_LE < objective.min_replicas)[0]
        raise ConfigError(
            f"min_replicas: layer {layer} expert {expert} must have at least {objective.min_replicas} copies, "
            f"found {placed.counts_LE[layer, expert]}"
        )
    domains = objective.domains(placed.shape)
    if domains is not None:
        number = int(domains.max()) + 1
        held = count(placed.phy2log_LS * number + domains[placed.shape.rank_of_slot_S], placed.num_experts * number)
        if held.max() > 1:
            layer, at = np.argwhere(held > 1)[0]
            raise ConfigError(
                f"anti_affinity: layer {layer} expert {at // number} may have at most 1 copy "
                f"on {objective.anti_affinity} {at % number}, found {held[layer, at]}"
            )
