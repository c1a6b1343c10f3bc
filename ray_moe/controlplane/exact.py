"""The best placement of small instances, by branch and bound: the oracle for the heuristics (specification 0x08I)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from ray_moe.controlplane.objective import Float64, Objective, checked_loads, require_same_model
from ray_moe.controlplane.placed import Placed, Shape
from ray_moe.controlplane.search import Costs
from ray_moe.errors import ConfigError

MOST_SLOTS, MOST_RANKS = 12, 4


def exact(loads_LE: ArrayLike, shape: Shape, objective: Objective | None = None, prior: Placed | None = None) -> Placed:
    """A placement with the least total in every layer, all constraints fulfilled.

    Raises `ConfigError` for more than 12 slots or 4 ranks, naming both, and as `Objective.require_feasible`.
    """
    objective = objective or Objective()
    loads = checked_loads(loads_LE)
    if shape.num_slots > MOST_SLOTS or shape.num_ranks > MOST_RANKS:
        raise ConfigError(
            f"exact solves at most {MOST_SLOTS} slots on {MOST_RANKS} ranks, "
            f"found {shape.num_slots} on {shape.num_ranks}"
        )
    objective.require_feasible(loads.shape[1], shape)
    if prior is not None:
        require_same_model(prior, loads.shape[1], len(loads))
    rows = []
    for layer in range(len(loads)):
        at = np.array([layer])
        before = None if prior is None else prior.of_layers(at)
        rows.append(_Layer(loads[layer : layer + 1], shape, objective.of_layers(at), before).solve())
    return Placed(shape, loads.shape[1], np.array(rows, np.int64))


class _Layer:
    """The search tree of one layer: copy counts, then the ranks of each copy, costliest first."""

    def __init__(self, loads_1E: Float64, shape: Shape, objective: Objective, prior: Placed | None) -> None:
        self.loads, self.shape, self.objective, self.prior = loads_1E, shape, objective, prior
        self.experts = loads_1E.shape[1]
        self.costs = Costs.of(loads_1E, shape, objective)
        self.domains = objective.domains(shape)
        # With nothing but rank costs in the total, ranks with equal load, room and content are alike.
        self.alike = not (objective.topology or objective.resident or (objective.counts_moves and prior is not None))
        self.best, self.held = np.inf, list[int]()

    def solve(self) -> list[int]:
        most = self.shape.num_slots if self.domains is None else len(set(self.domains.tolist()))
        bounded = []
        for counts in _compositions(self.shape.num_slots, self.experts, self.objective.min_replicas, most):
            value = self.costs.value(np.array(0), np.arange(self.experts), np.array(counts))
            bound = max(float(value.max()), float(value @ counts) / self.shape.num_ranks)
            bounded.append((bound, counts, value))
        for bound, counts, value in sorted(bounded, key=lambda each: each[:2]):
            if bound >= self.best:
                break
            order = np.argsort(-value, kind="stable")
            items = [int(expert) for expert in order for _ in range(counts[expert])]
            self._place(items, value.tolist(), [[] for _ in self.shape.slots_by_rank], [0.0] * self.shape.num_ranks)
        return self.held

    def _place(self, items: list[int], value: list[float], held: list[list[int]], load: list[float]) -> None:
        depth = sum(map(len, held))
        if depth == len(items):
            self._judge(held, max(load))
            return
        expert = items[depth]
        # Copies of one expert go to ranks in ascending order, as their own order makes no difference.
        again = depth > 0 and items[depth - 1] == expert
        first = max(rank for rank, experts in enumerate(held) if expert in experts) if again else 0
        seen = set()
        for rank in range(first, len(held)):
            after = load[rank] + value[expert]
            if len(held[rank]) == self.shape.slots_by_rank[rank] or max(*load, after) >= self.best:
                continue
            if not self._allowed(expert, rank, held):
                continue
            state = (tuple(held[rank]), self.shape.slots_by_rank[rank], load[rank])
            if self.alike and self.domains is None and not again:
                if state in seen:
                    continue
                seen.add(state)
            before = load[rank]
            held[rank].append(expert)
            load[rank] = after
            self._place(items, value, held, load)
            held[rank].pop()
            load[rank] = before

    def _allowed(self, expert: int, rank: int, held: list[list[int]]) -> bool:
        if self.domains is None:
            return True
        return not any(
            expert in experts for other, experts in enumerate(held) if self.domains[other] == self.domains[rank]
        )

    def _judge(self, held: list[list[int]], barrier: float) -> None:
        flat = [expert for experts in held for expert in experts]
        total = barrier
        if not self.alike:
            placed = Placed(self.shape, self.experts, np.array([flat], np.int64))
            total = float(self.objective.evaluate(self.loads, placed, self.prior).total[0])
        if total < self.best:
            self.best, self.held = total, flat


def _compositions(total: int, parts: int, least: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as `parts` numbers from `least` to `most`."""
    if parts == 0:
        if total == 0:
            yield ()
        return
    low = max(least, total - most * (parts - 1))
    for head in range(low, min(most, total - least * (parts - 1)) + 1):
        for tail in _compositions(total - head, parts - 1, least, most):
            yield (head, *tail)
