"""One demand, one cluster, one policy -> one placement, and what it is worth. Pure.

`auto`, `hierarchical` and `global` are the pinned solver and give exactly its maps; the other policies are ours. Where
the pinned solver would assert (counts that do not divide, ranks with different numbers of slots, constraints), `auto`
is `greedy`. Letters: L layers, E experts, S slots, G ranks, C copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.costs import by_rank
from ray_moe.controlplane.eplb import imbalance, rebalance
from ray_moe.controlplane.exact import exact
from ray_moe.controlplane.greedy import greedy
from ray_moe.controlplane.objective import Decode, Objective
from ray_moe.controlplane.placed import SLOT_RULE, Placed, Shape
from ray_moe.controlplane.refine import require_fulfilled, solve
from ray_moe.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Problem:
    """Demand and room. `constrained` says that the pinned solver, which knows no constraints, is no answer."""

    loads_LE: Floats
    shape: Shape
    groups: int
    objective: Objective
    prior: Placed | None = None

    @property
    def experts(self) -> int:
        return self.loads_LE.shape[1]

    @property
    def constrained(self) -> bool:
        return self.objective.min_replicas > 1 or self.objective.anti_affinity != "none"


@dataclass(frozen=True, eq=False)
class Solution:
    """The four maps, padded with -1 where the inverse has no slot, and the rule that decided between equals.

    `phy2log_LS` is the expert of each slot, `phyrank_LS` its number among that expert's copies, `logcnt_LE` copies of
    each expert, `log2phy_LEC` slots by copy number. Slots belong to ranks in order, as many each as the shape says.
    """

    policy: str
    placed: Placed
    phy2log_LS: Ints
    phyrank_LS: Ints
    logcnt_LE: Ints
    log2phy_LEC: Ints
    tie_rule: str


def place(problem: Problem, policy: str) -> Solution:
    """Demand to all four maps. Raises `ConfigError` naming value and bound for what the policy cannot do."""
    if policy == "auto":
        policy = _what_auto_is(problem)
    if policy in ("hierarchical", "global"):
        return _pinned(problem, policy)
    placed = SOLVERS[policy](problem)
    phyrank, log2phy = _numbered(placed)
    return Solution(policy, placed, placed.phy2log_LS, phyrank, placed.counts_LE, log2phy, SLOT_RULE)


def _what_auto_is(problem: Problem) -> str:
    shape, groups = problem.shape, problem.groups
    even_nodes = len(set(np.bincount(shape.node_of_rank_G))) == 1
    if problem.constrained or not shape.is_uniform:
        return "greedy"
    if groups % shape.num_nodes:
        return "global"
    return "hierarchical" if even_nodes and problem.experts % groups == 0 else "greedy"


def _pinned(problem: Problem, policy: str) -> Solution:
    shape = problem.shape
    if problem.constrained:
        raise ConfigError(f"policy {policy} is the pinned solver, which knows neither min_replicas nor anti_affinity")
    if not shape.is_uniform:
        slots = f"{min(shape.slots_by_rank)} to {max(shape.slots_by_rank)}"
        raise ConfigError(f"policy {policy} is the pinned solver: ranks must hold equally many slots, found {slots}")
    maps = rebalance(
        problem.loads_LE,
        shape.num_slots,
        problem.groups,
        shape.num_nodes,
        shape.num_ranks,
        "hierarchical" if policy == "hierarchical" else "global",
    )
    return Solution(
        policy,
        Placed.of(maps, shape),
        maps.phy2log_LS,
        maps.phyrank_LS,
        maps.logcnt_LE,
        maps.padded_log2phy(),
        maps.tie_rule,
    )


def _searched(problem: Problem) -> Placed:
    """What the search finds, or layer by layer what is in place where that is better and may stay."""
    objective, prior = problem.objective, problem.prior
    found = solve(problem.loads_LE, problem.shape, objective, _kept(problem))
    if prior is None or prior.shape != problem.shape:
        return found
    try:
        require_fulfilled(prior, objective)
    except ConfigError:  # a prior may break what is asked now, and then is no answer
        return found
    ours, theirs = (objective.evaluate(problem.loads_LE, each, prior).total for each in (found, prior))
    stays = np.flatnonzero(theirs < ours)
    return found.with_layers(stays, prior.phy2log_LS[stays])


def _kept(problem: Problem) -> Placed | None:
    """What is in place, where the objective counts moves."""
    return problem.prior if problem.objective.counts_moves else None


SOLVERS: dict[str, Callable[[Problem], Placed]] = {
    "greedy": lambda problem: greedy(problem.loads_LE, problem.shape, problem.objective),
    "exact": lambda problem: exact(problem.loads_LE, problem.shape, problem.objective, _kept(problem)),
    "topology": _searched,
    "migration": _searched,
    "phase": _searched,
}


def _numbered(placed: Placed) -> tuple[Ints, Ints]:
    """Copies numbered in the order of their slots: [L, S], and its inverse [L, E, C] padded with -1."""
    slots_LS = np.argsort(placed.phy2log_LS, axis=1, kind="stable")
    experts_LS = np.take_along_axis(placed.phy2log_LS, slots_LS, axis=1)
    first_LE = np.cumsum(placed.counts_LE, axis=1) - placed.counts_LE
    number_LS = np.arange(placed.shape.num_slots) - np.take_along_axis(first_LE, experts_LS, axis=1)
    phyrank_LS = np.empty_like(number_LS)
    np.put_along_axis(phyrank_LS, slots_LS, number_LS, axis=1)
    layers = len(slots_LS)
    log2phy_LEC = np.full((layers, placed.num_experts, int(placed.counts_LE.max())), -1, np.int64)
    log2phy_LEC[np.arange(layers)[:, None], experts_LS, number_LS] = slots_LS
    return phyrank_LS, log2phy_LEC


def objective_of(
    policy: str,
    min_replicas: int,
    anti_affinity: str,
    decode: Decode | None,
    weights: dict[str, float] | None,
) -> Objective:
    """The policy's own weights, unless others are given; raises `ConfigError` as `Objective` does."""
    chosen = WEIGHTS.get(policy, {}) if weights is None else weights
    return Objective(**chosen, decode=decode, min_replicas=min_replicas, anti_affinity=anti_affinity)  # type: ignore[arg-type]


# Balance 1 % better is worth 2 % of the rows crossing nodes, or 10 % of the slots being filled anew from other nodes.
# Activations alone count for phase, since rows of a decode step are few.
WEIGHTS: dict[str, dict[str, float]] = {
    "topology": {"balance": 1.0, "topology": 0.5},
    "migration": {"balance": 1.0, "migration": 0.1},
    "phase": {"balance": 0.0, "phase": 1.0},
}


# -- What it is worth


def unplanned(problem: Problem) -> Placed:
    """What to compare with: the prior, or without one expert after expert, slot after slot, over and over."""
    if problem.prior is not None:
        return problem.prior
    slots = problem.shape.num_slots
    return Placed(
        problem.shape, problem.experts, np.tile(np.arange(slots) % problem.experts, (len(problem.loads_LE), 1))
    )


def ideal_slot_loads(loads_LE: Floats, placed: Placed) -> Floats:
    """[L, S], in the unit of demand: a slot carries its expert's load / copies (specification 0x08C3)."""
    share_LS: Floats = np.take_along_axis(loads_LE / placed.counts_LE, placed.phy2log_LS, axis=1)
    return share_LS


def ideal_rank_loads(loads_LE: Floats, placed: Placed) -> Floats:
    """[L, G], in the unit of demand."""
    return by_rank(ideal_slot_loads(loads_LE, placed), placed.shape)


def balance(loads_LE: Floats, placed: Placed) -> Floats:
    """[L]: largest over mean ideal rank load."""
    return imbalance(ideal_rank_loads(loads_LE, placed))


def rows_across_nodes(loads_LE: Floats, placed: Placed) -> Floats:
    """[L]: share of the rows that cross nodes when they start evenly over the ranks and go to a copy on their own node
    where there is one. Balance alone hides it: copies spread over all nodes even out loads by sending rows far."""
    return Objective().evaluate(loads_LE, placed).topology
