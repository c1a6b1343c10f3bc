"""What a simulation compares: policies that place experts, each with a cadence and an estimate of demand.

A contender sees a step's loads only after the step; what it decides takes effect when its moves would be over. The
oracle alone is told what comes. Letters: L layers, E experts, S slots, G ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.costs import CostModel, ExpertShape, migration_time
from ray_moe.controlplane.demand import Demand
from ray_moe.controlplane.eplb import Policy, imbalance, rebalance
from ray_moe.controlplane.estimators import Estimator, Ewma, LinearTrend, Quantile, TrailingWindow
from ray_moe.controlplane.moves import Copies, MoveCounts, count_moves, relabel
from ray_moe.controlplane.objective import Objective, rank_sums
from ray_moe.controlplane.placed import Placed, Shape
from ray_moe.controlplane.refine import Budget, improve, solve
from ray_moe.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """The cluster, the model and the prices that all contenders of one simulation share.

    `groups` are the model's expert groups, for the hierarchical reference. The migration-aware policy weighs moved
    copies by `migration_weight`. It lets a layer be until its estimated largest over mean rank load is above
    `act_above`, and then improves it down to `good_enough`; where that ends above `start_again_above`, it also starts
    from nothing. A layer that drifts around `good_enough` would otherwise move a little at every decision.
    """

    shape: Shape
    groups: int
    expert: ExpertShape
    costs: CostModel
    migration_weight: float = 0.1
    good_enough: float = 1.02
    act_above: float = 1.03
    start_again_above: float = 1.05

    @property
    def nodes(self) -> int:
        return self.shape.num_nodes


def estimators(size: int) -> dict[str, Estimator]:
    """Estimators over about `size` steps, before they have seen any."""
    return {
        "window": TrailingWindow(size),
        "ewma": Ewma(1 - 2 / (size + 1)),
        "quantile": Quantile(Fraction(3, 4), size),
        "trend": LinearTrend(max(1, size // 2), level_weight=2 / (size + 1), trend_weight=1 / (size + 1)),
    }


_ROUNDS = 40  # of one decision of the migration-aware policy; a layer that needs more goes on at the next

Solver = Callable[[Floats, Placed, Setting], Placed]


def initial(layers: int, experts: int, setting: Setting) -> Placed:
    """Before anything is known: expert after expert, slot after slot, as many copies each as there is room for."""
    slots = setting.shape.num_slots
    if slots < experts:
        raise ConfigError(f"slots: found {slots}, must be >= the {experts} experts")
    return Placed(setting.shape, experts, np.tile(np.arange(slots) % experts, (layers, 1)))


# -- Policies: demand and what is in place -> what should be


def reference(loads_LE: Floats, prior: Placed, setting: Setting, policy: Policy = "auto") -> Placed:
    """The pinned solver, which does not look at what is in place."""
    shape = setting.shape
    maps = rebalance(loads_LE, shape.num_slots, setting.groups, setting.nodes, shape.num_ranks, policy)
    return Placed.of(maps, shape)


def reference_global(loads_LE: Floats, prior: Placed, setting: Setting) -> Placed:
    """The same over all ranks at once, whatever node they are on."""
    return reference(loads_LE, prior, setting, "global")


def relabelled(loads_LE: Floats, prior: Placed, setting: Setting) -> Placed:
    """The global reference's packs, each node's given to its ranks so that the most copies stay: equal balance."""
    target, shape = reference_global(loads_LE, prior, setting), setting.shape
    groups = [np.flatnonzero(shape.node_of_rank_G == node).tolist() for node in range(setting.nodes)]
    layers = len(target.phy2log_LS)
    rank_LG = relabel(copies_of(prior), copies_of(target), groups, layers, shape.num_ranks).rank_LG
    room = shape.num_slots // shape.num_ranks
    packs_LGC = target.phy2log_LS.reshape(layers, shape.num_ranks, room)
    moved_LGC = np.empty_like(packs_LGC)
    moved_LGC[np.arange(layers)[:, None], rank_LG] = packs_LGC
    return Placed(shape, target.num_experts, moved_LGC.reshape(layers, -1))


def balanced(loads_LE: Floats, prior: Placed, setting: Setting) -> Placed:
    """The least largest rank load that local search finds from the global reference's maps, whatever it moves."""
    return solve(loads_LE, setting.shape)


def migration_aware(loads_LE: Floats, prior: Placed, setting: Setting) -> Placed:
    """What is in place, improved as long as balance gained is worth the copies that move for it.

    Layers that are balanced enough stay (`Setting`); a layer that stays far off takes the relabelled reference,
    improved, if that is worth its moves.
    """
    objective = Objective(migration=setting.migration_weight)
    budget = Budget(_ROUNDS, target=setting.good_enough)
    balance_L = imbalance(rank_sums(loads_LE / prior.counts_LE, prior))
    off = np.flatnonzero(balance_L > setting.act_above)
    if not off.size:
        return prior
    some, before = loads_LE[off], prior.of_layers(off)
    found = improve(before, some, objective, budget)
    terms = objective.evaluate(some, found, before)
    far = np.flatnonzero(terms.balance > setting.start_again_above)
    if far.size:
        loads, was = some[far], before.of_layers(far)
        other = improve(relabelled(loads, was, setting), loads, objective, budget, was)
        better = objective.evaluate(loads, other, was).total < terms.total[far]
        found = found.with_layers(far[better], other.phy2log_LS[better])
    return prior.with_layers(off, found.phy2log_LS)


POLICIES: dict[str, Solver | None] = {
    "static": None,
    "reference": reference,
    "reference_global": reference_global,
    "relabelled": relabelled,
    "balanced": balanced,
    "migration": migration_aware,
}


# -- Moves


@dataclass(frozen=True, eq=False)
class Moves:
    """From one placement to the next, all layers at once.

    `arrivals_G` are new copies by rank. `peak_G` are copies that a rank holds while old and new ones coexist, those of
    both counted once (specification 0x08F).
    """

    counts: MoveCounts
    arrivals_G: Ints
    peak_G: Ints

    @classmethod
    def between(cls, prior: Placed, target: Placed) -> Moves:
        shape = target.shape
        counts = count_moves(copies_of(prior), copies_of(target), shape.node_of_rank_G, len(target.phy2log_LS))
        slots_G = np.array(shape.slots_by_rank) * len(target.phy2log_LS)
        arrivals_G = slots_G - counts.kept_G
        return cls(counts, arrivals_G, slots_G + arrivals_G)

    @property
    def crosses_nodes(self) -> bool:
        return bool(self.counts.cross_node_L.any() or self.counts.loaded_L.any())


def copies_of(placed: Placed) -> Copies:
    return Copies.of(placed.phy2log_LS, placed.shape.rank_of_slot_S)


# -- Contenders


@dataclass(frozen=True)
class Contender:
    """A policy that decides every `cadence` steps from what `estimator` makes of about `window` steps.

    Raises `ConfigError` for an unknown policy or estimator, and for a cadence or window below 1.
    """

    policy: str
    cadence: int
    estimator: str = "window"
    window: int = 25

    def __post_init__(self) -> None:
        if self.estimator not in estimators(self.window):
            raise ConfigError(f"estimator: found {self.estimator!r}, must be one of {', '.join(estimators(1))}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policies: found {self.policy!r}, must be one of {', '.join(POLICIES)}")
        if self.cadence < 1:
            raise ConfigError(f"cadences: found {self.cadence}, must be >= 1")

    @property
    def name(self) -> str:
        return self.policy if POLICIES[self.policy] is None else f"{self.policy}/{self.cadence}"


@dataclass(frozen=True, eq=False)
class Decision:
    """Decided before step `at` from steps before it, in effect from step `active` on."""

    at: int
    active: int
    placed: Placed
    moves: Moves


@dataclass
class Player:
    """A contender in the course of a simulation."""

    contender: Contender
    setting: Setting
    placed: Placed
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._estimator = estimators(self.contender.window)[self.contender.estimator]
        self._solver = POLICIES[self.contender.policy]
        self._next: Decision | None = None

    def before(self, step: int, step_seconds: float) -> Placed:
        """What is in effect at `step`. A new decision waits until the moves of the last one are over: they take as many
        steps as `costs.migration_time` holds steps of `step_seconds`."""
        if self._next is not None and step >= self._next.active:
            self.placed, self._next = self._next.placed, None
        due = self._solver is not None and step > 0 and step % self.contender.cadence == 0
        if due and self._next is None:
            self._next = self._decide(step, step_seconds)
            self.decisions.append(self._next)
        return self.placed

    def after(self, seen: Demand) -> None:
        if self._solver is not None:
            self._estimator = self._estimator.after(seen)

    def _decide(self, step: int, step_seconds: float) -> Decision:
        assert self._solver is not None
        target = self._solver(self._estimator.estimate().loads_LE, self.placed, self.setting)
        moves = Moves.between(self.placed, target)
        takes = migration_time(moves.arrivals_G, moves.crosses_nodes, self.setting.expert, self.setting.costs)
        return Decision(step, step + max(1, math.ceil(takes.seconds / step_seconds)), target, moves)
