"""The state of a placement search, and its steps: exchanges of two slots, and a slot that takes another expert.

All layers move at once, each by itself; arrays are per layer, and a step names the layers it changes. Rank costs are in
units of the objective's barrier: 1 is a perfectly balanced rank. Letters: L layers, E experts, S slots, G ranks,
N nodes, A layers of a step, K pairs of ranks, Q proposals; s the most slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.objective import Decode, Float64, Objective, chance_LE, perfect, rank_sums, surviving
from ray_moe.controlplane.placed import Int64, Placed, Shape, Tally, tally

_FEW_RANKS = 64  # above that, a recount looks at fewer proposals, as each is evaluated on every rank


@dataclass(frozen=True, eq=False)
class Costs:
    """What one copy costs its rank, by layer, expert and number of copies."""

    rows_LE: Float64
    chance_LE: Float64
    active_weight_L: Float64
    perfect: float  # a rank's cost in the perfectly balanced cluster
    decode: Decode | None

    @staticmethod
    def of(loads_LE: Float64, shape: Shape, objective: Objective) -> Costs:
        rows = objective.balance * loads_LE / perfect(loads_LE.sum(axis=1), shape)[:, None]
        if not objective.phase or objective.decode is None:
            return Costs(rows, rows, np.zeros(len(rows)), objective.balance, None)
        chance = chance_LE(loads_LE, objective.decode)
        alone = objective.decode.active(chance, 1).sum(axis=1)
        scale = objective.balance + objective.phase
        return Costs(rows, chance, objective.phase / perfect(alone, shape), scale, objective.decode)

    def only(self, layer: int) -> Costs:
        at = slice(layer, layer + 1)
        return Costs(self.rows_LE[at], self.chance_LE[at], self.active_weight_L[at], self.perfect, self.decode)

    def value(self, layer: Int64, expert: Int64, copies: Int64) -> Float64:
        """Cost of each of `copies` copies; the arguments broadcast."""
        rows: Float64 = self.rows_LE[layer, expert] / copies
        if self.decode is None:
            return rows
        return rows + self.active_weight_L[layer] * self.decode.active(self.chance_LE[layer, expert], copies)


class Swaps(NamedTuple):
    """Exchanges: row `at` of the step's layers, slots `a` and `b`, and `cost` that moves from a's rank to b's."""

    at: Int64
    a: Int64
    b: Int64
    cost: Float64
    price_A: Float64
    peak_A: Float64  # largest rank cost after the step; infinite where it does not fall


class Recounts(NamedTuple):
    """For each layer of the step, `slot` takes `expert`; the rank costs that follow."""

    slot_A: Int64
    expert_A: Int64
    cost_AG: Float64
    price_A: Float64
    peak_A: Float64


class State:
    """One placement of every layer, and what a step needs to know about it; steps change it in place."""

    def __init__(self, placed: Placed, loads_LE: Float64, objective: Objective, prior: Placed | None) -> None:
        shape = self.shape = placed.shape
        self.costs = Costs.of(loads_LE, shape, objective)
        self.slots_LS = placed.phy2log_LS.copy()
        self.counts_LE = placed.counts_LE.copy()
        layers, experts = self.counts_LE.shape
        self.value_LE = self.costs.value(np.arange(layers)[:, None], np.arange(experts), self.counts_LE)
        self.held_LEG = placed.held_LEG()
        self.cost_LG = rank_sums(self.value_LE, placed)

        self.min_replicas = objective.min_replicas
        self.by_node_alone = objective.anti_affinity == "node"
        self.domains_G = objective.domains(shape)
        # slots of each rank; ranks with fewer repeat their last one, and `room` says which are real
        width = np.arange(max(shape.slots_by_rank))
        sizes, ends = np.array(shape.slots_by_rank), np.cumsum(shape.slots_by_rank)
        self.room_Gs: NDArray[np.bool_] | None = None if shape.is_uniform else width < sizes[:, None]
        self.table_Gs = np.minimum((ends - sizes)[:, None] + width, np.maximum(ends - 1, 0)[:, None])

        self.before_LEG: Tally | None = None
        self.resident_price = objective.resident / shape.num_slots
        if objective.counts_moves and prior is not None:
            self.move_price, self.move_weight = objective.move_price, objective.migration / shape.num_slots
            self.churn_price = objective.churn / shape.num_slots
            slots, ranks = surviving(prior, placed)
            self.before_LEG = tally(slots, ranks, experts, shape.num_ranks)
            self.before_LEN = tally(slots, shape.node_of_rank_G[ranks], experts, shape.num_nodes)
        self.near_LEN: Float64 | None = None
        self.node_LEN = placed.held_LEN() if objective.topology or self.by_node_alone else None
        if objective.topology:
            sums = loads_LE.sum(axis=1, keepdims=True)
            share = objective.topology * loads_LE / np.where(sums == 0, 1.0, sums)
            self.near_LEN = share[:, :, None] * objective.origins_LEN(layers, experts, shape)

    # -- What a change costs

    @property
    def _priced(self) -> bool:
        places = (self.before_LEG, self.near_LEN, self.domains_G)
        return self.resident_price > 0 or any(each is not None for each in places)

    def enter(self, layer: Int64, expert: Int64, rank: Int64) -> Float64 | float:
        """Price of one more copy of `expert` on `rank`."""
        if self.before_LEG is None and not self.resident_price:
            return 0.0
        held = self.held_LEG[layer, expert, rank]
        alone = self.resident_price * (held == 0)
        if self.before_LEG is None:
            return alone
        before = self.before_LEG[layer, expert, rank]
        return alone + np.where(held >= before, self._move(layer, expert, rank, before), 0.0)

    def leave(self, layer: Int64, expert: Int64, rank: Int64) -> Float64 | float:
        """Price of one copy of `expert` less on `rank`: what `enter` had counted, if it did, comes back."""
        if self.before_LEG is None and not self.resident_price:
            return 0.0
        held = self.held_LEG[layer, expert, rank]
        alone = self.resident_price * (held == 1)
        if self.before_LEG is None:
            return -alone
        before = self.before_LEG[layer, expert, rank]
        return -alone - np.where(held > before, self._move(layer, expert, rank, before), 0.0)

    def _move(self, layer: Int64, expert: Int64, rank: Int64, before: Tally) -> Float64:
        on_node = self.before_LEN[layer, expert, self.shape.node_of_rank_G[rank]]
        return self.move_weight * self.move_price.of(before, on_node) + self.churn_price

    def price(self, layer: Int64, expert: Int64, source: Int64, target: Int64) -> Float64 | float:
        """Price of a copy that goes from rank `source` to `target`; infinite where a constraint forbids it."""
        total = self.enter(layer, expert, target) + self.leave(layer, expert, source)
        if self.domains_G is None and self.near_LEN is None:
            return total
        nodes_G = self.shape.node_of_rank_G
        if self.near_LEN is not None and self.node_LEN is not None:
            here, there = nodes_G[source], nodes_G[target]
            lost = self.near_LEN[layer, expert, here] * (self.node_LEN[layer, expert, here] == 1)
            won = self.near_LEN[layer, expert, there] * (self.node_LEN[layer, expert, there] == 0)
            total = total + np.where(here == there, 0.0, lost - won)
        if self.domains_G is not None:
            same = self.domains_G[source] == self.domains_G[target]
            total = np.where(~same & self._in_domain(layer, expert, target), np.inf, total)
        return total

    def won_LEN(self, *at: Int64) -> Float64:
        """Topology won by a copy on each node, for `at` (layers, experts) or for all."""
        if self.near_LEN is None or self.node_LEN is None:
            return np.zeros((*self.counts_LE[at].shape, 1))
        return np.where(self.node_LEN[at] == 0, self.near_LEN[at], 0.0)

    def lost(self, layer: Int64, expert: Int64, rank: Int64) -> Float64:
        """Topology lost by a copy that leaves `rank`, less the storage that it frees if another rank has its expert."""
        frees = (self.held_LEG[layer, expert, rank] == 1) & (self.counts_LE[layer, expert] > 1)
        lost = -self.resident_price * frees
        if self.near_LEN is not None and self.node_LEN is not None:
            node = self.shape.node_of_rank_G[rank]
            lost = lost + self.near_LEN[layer, expert, node] * (self.node_LEN[layer, expert, node] == 1)
        return lost

    def _in_domain(self, layer: Int64, expert: Int64, rank: Int64) -> NDArray[np.bool_]:
        if self.by_node_alone and self.node_LEN is not None:
            return self.node_LEN[layer, expert, self.shape.node_of_rank_G[rank]] > 0
        return self.held_LEG[layer, expert, rank] > 0

    # -- Proposals

    def pairs(self, layers: Int64, gain: float) -> Swaps:
        """The best exchange between the hottest and the coldest rank, the second hottest and second coldest, ...

        Only ranks in the upper half between mean and maximum give: those below need not move for the maximum to fall.
        """
        cost = self.cost_LG[layers]
        order = np.argsort(cost, axis=1, kind="stable")
        peak, mean = cost.max(axis=1), cost.mean(axis=1)
        number = (cost > (0.5 * (peak + mean))[:, None]).sum(axis=1)
        # two exchanges at once could bring two copies of one expert to one node, unseen by each other's price
        pairs = 1 if self.node_LEN is not None else max(int(number.max()), 1)
        pairs = max(min(pairs, self.shape.num_ranks // 2), 1)
        hot, cold = order[:, ::-1][:, :pairs], order[:, :pairs]
        wanted = np.arange(pairs) < np.maximum(number, 1)[:, None]
        a, b, moved, price = self._exchange(layers, hot, cold, self.table_Gs[cold], self._room(cold), gain)
        found = wanted & np.isfinite(price)
        at, k = np.nonzero(found)
        after: Float64 = cost.copy()
        after[at, hot[at, k]] -= moved[at, k]
        after[at, cold[at, k]] += moved[at, k]
        return self._swaps(found, a, b, moved, price, after, peak - gain)

    def singles(self, layers: Int64, gain: float) -> Swaps:
        """The best exchange of the hottest rank with any slot of the layer."""
        cost = self.cost_LG[layers]
        hot = cost.argmax(axis=1)[:, None]
        ranks = np.broadcast_to(self.shape.rank_of_slot_S, (len(layers), 1, self.shape.num_slots))
        every = np.broadcast_to(np.arange(self.shape.num_slots), ranks.shape)
        a, b, moved, price = self._exchange(layers, hot, ranks, every, None, gain)
        found = np.isfinite(price)
        at = np.nonzero(found[:, 0])[0]
        after = cost.copy()
        after[at, hot[at, 0]] -= moved[at, 0]
        after[at, self.shape.rank_of_slot_S[b[at, 0]]] += moved[at, 0]
        return self._swaps(found, a, b, moved, price, after, cost.max(axis=1) - gain)

    def _exchange(
        self,
        layers: Int64,
        hot: Int64,
        cold: Int64,
        slots_b: Int64,
        room_b: NDArray[np.bool_] | None,
        gain: float,
    ) -> tuple[Int64, Int64, Float64, Float64]:
        """For each pair [A, K] the slots, the cost moved, and the price of the best exchange; infinite: none helps."""
        slots_a, room_a = self.table_Gs[hot], self._room(hot)
        layer = layers[:, None, None]
        expert_a, expert_b = self.slots_LS[layer, slots_a], self.slots_LS[layer, slots_b]
        cold_b = cold if cold.ndim == 3 else cold[:, :, None]  # the rank of each slot b
        cost_a = self.cost_LG[layer, hot[:, :, None]]
        moved = self.value_LE[layer, expert_a][..., None] - self.value_LE[layer, expert_b][:, :, None, :]
        score = np.maximum(cost_a[..., None] - moved, self.cost_LG[layer, cold_b][:, :, None, :] + moved)
        score[score >= cost_a[..., None] - gain] = np.inf
        price: Float64 | None = None
        if self._priced:
            wide = layers[:, None, None, None]
            hot_wide = hot[:, :, None, None]
            if cold.ndim == 2:
                out = self.price(layer, expert_a, hot[:, :, None], cold[:, :, None])
                back = self.price(layer, expert_b, cold[:, :, None], hot[:, :, None])
                price = np.asarray(out)[..., None] + np.asarray(back)[:, :, None, :]
            else:
                out = self.price(wide, expert_a[..., None], hot_wide, cold[:, :, None, :])
                back = self.price(layer, expert_b, cold, hot[:, :, None])
                price = out + np.asarray(back)[:, :, None, :]
            score += price
        if room_a is not None:
            score[~room_a] = np.inf
        if room_b is not None:
            score[~np.broadcast_to(room_b[:, :, None, :], score.shape)] = np.inf
        flat = score.reshape(*score.shape[:2], -1)
        best = flat.argmin(axis=2)[..., None]
        a, b = np.divmod(best, score.shape[3])
        taken = np.take_along_axis(flat, best, axis=2)[..., 0]
        paid = np.zeros(taken.shape) if price is None else _pick(price, best)
        return (
            np.take_along_axis(slots_a, a, axis=2)[..., 0],
            np.take_along_axis(slots_b, b, axis=2)[..., 0],
            _pick(moved, best),
            np.where(np.isfinite(taken), paid, np.inf),
        )

    def _room(self, ranks: Int64) -> NDArray[np.bool_] | None:
        return None if self.room_Gs is None else self.room_Gs[ranks]

    @staticmethod
    def _swaps(
        found: NDArray[np.bool_], a: Int64, b: Int64, moved: Float64, price: Float64, after: Float64, bound: Float64
    ) -> Swaps:
        at, k = np.nonzero(found)
        peak = after.max(axis=1)
        paid = np.where(found, price, 0.0).sum(axis=1)
        return Swaps(at, a[at, k], b[at, k], moved[at, k], paid, np.where(peak <= bound, peak, np.inf))

    def recounts(self, layers: Int64, gain: float) -> Recounts:
        """The best of a few changes of copy counts.

        Either one of the hottest rank's heaviest experts gets a copy elsewhere, in place of an expert that can spare
        one, or one of its heaviest spare copies makes way for an expert that costs least.
        """
        cost = self.cost_LG[layers]
        hot = cost.argmax(axis=1)
        counts, values = self.counts_LE[layers], self.value_LE[layers]
        experts, every = np.arange(counts.shape[1]), layers[:, None]
        here = self.slots_LS[every, self.table_Gs[hot]]
        spare = counts > self.min_replicas
        fewer = np.where(spare, self.costs.value(every, experts, np.maximum(counts - 1, 1)), np.inf)
        more = self.costs.value(every, experts, counts + 1)
        looks = 3 if self.shape.num_ranks <= _FEW_RANKS else 2
        donors, cheap = _least(fewer, looks), _least(more, looks)
        weight = np.take_along_axis(values, here, axis=1)
        heavy = np.take_along_axis(here, _least(-weight, looks), axis=1)
        weight_spare = np.where(np.take_along_axis(spare, here, axis=1), weight, -1.0)
        shed = np.take_along_axis(here, _least(-weight_spare, looks), axis=1)

        add = np.concatenate([_outer(heavy, donors)[0], _outer(cheap, shed)[0]], axis=1)
        drop = np.concatenate([_outer(heavy, donors)[1], _outer(cheap, shed)[1]], axis=1)
        rows = np.arange(len(layers))[:, None]
        held_add, held_drop = self.held_LEG[every, add], self.held_LEG[every, drop]  # [A, Q, G]
        # the coldest rank that has the one and not yet the other; the hottest where it sheds
        fits = (held_drop > 0) & (held_add == 0)
        elsewhere = heavy.shape[1] * donors.shape[1]
        fits[:, elsewhere:] &= (np.arange(cost.shape[1]) == hot[:, None])[:, None, :]
        enter = self.enter(every[..., None], add[..., None], np.arange(cost.shape[1]))
        rank = np.where(fits, cost[:, None, :] + enter, np.inf).argmin(axis=2)
        valid = np.take_along_axis(fits, rank[..., None], axis=2)[..., 0] & spare[rows, drop] & (add != drop)
        if self.domains_G is not None:
            domain = self.domains_G[rank]
            same = self.domains_G[None, None, :] == domain[..., None]
            valid &= ~((held_add > 0) & same).any(axis=2)

        value_add, value_drop = more[rows, add], np.where(valid, fewer[rows, drop], 0.0)
        after = cost[:, None, :] + held_add * (value_add - values[rows, add])[..., None]
        after += held_drop * (value_drop - values[rows, drop])[..., None]
        np.put_along_axis(
            after,
            rank[..., None],
            np.take_along_axis(after, rank[..., None], axis=2) + (value_add - value_drop)[..., None],
            axis=2,
        )
        price = np.zeros(add.shape) + self.enter(every, add, rank) + self.leave(every, drop, rank)
        if self.near_LEN is not None and self.node_LEN is not None:
            node = self.shape.node_of_rank_G[rank]
            price -= self.near_LEN[every, add, node] * (self.node_LEN[every, add, node] == 0)
            price += self.near_LEN[every, drop, node] * (self.node_LEN[every, drop, node] == 1)
        peak = np.where(valid, after.max(axis=2), np.inf)
        peak[peak > (cost.max(axis=1) - gain)[:, None]] = np.inf
        q = (peak + price).argmin(axis=1)[:, None]
        chosen_rank, chosen_drop = rank[rows, q], drop[rows, q]
        on_rank = self.slots_LS[every, self.table_Gs[chosen_rank[:, 0]]] == chosen_drop
        slot = self.table_Gs[chosen_rank[:, 0], on_rank.argmax(axis=1)]
        return Recounts(slot, add[rows, q][:, 0], after[rows, q][:, 0], price[rows, q][:, 0], peak[rows, q][:, 0])

    # -- Steps

    def swap(self, layer: Int64, a: Int64, b: Int64, cost: Float64) -> None:
        """Exchange slots; within a layer the ranks of all slots given are distinct."""
        expert_a, expert_b = self.slots_LS[layer, a], self.slots_LS[layer, b]
        rank_a, rank_b = self.shape.rank_of_slot_S[a], self.shape.rank_of_slot_S[b]
        self.slots_LS[layer, a], self.slots_LS[layer, b] = expert_b, expert_a
        self.cost_LG[layer, rank_a] -= cost
        self.cost_LG[layer, rank_b] += cost
        self._hold(layer, expert_a, rank_a, rank_b)
        self._hold(layer, expert_b, rank_b, rank_a)

    def _hold(self, layer: Int64, expert: Int64, source: Int64, target: Int64) -> None:
        self.held_LEG[layer, expert, source] -= 1
        self.held_LEG[layer, expert, target] += 1
        if self.node_LEN is not None:
            nodes_G = self.shape.node_of_rank_G
            np.add.at(self.node_LEN, (layer, expert, nodes_G[source]), -1)
            np.add.at(self.node_LEN, (layer, expert, nodes_G[target]), 1)

    def recount(self, layer: Int64, slot: Int64, expert: Int64, cost_AG: Float64) -> None:
        """One slot of each layer takes another expert."""
        gone, rank = self.slots_LS[layer, slot], self.shape.rank_of_slot_S[slot]
        self.slots_LS[layer, slot] = expert
        self.cost_LG[layer] = cost_AG
        for who, by in ((gone, -1), (expert, 1)):
            self.counts_LE[layer, who] += by
            self.value_LE[layer, who] = self.costs.value(layer, who, self.counts_LE[layer, who])
            self.held_LEG[layer, who, rank] += by
            if self.node_LEN is not None:
                self.node_LEN[layer, who, self.shape.node_of_rank_G[rank]] += by


def _pick(values: Float64, best: Int64) -> Float64:
    return np.take_along_axis(values.reshape(*values.shape[:2], -1), best, axis=2)[..., 0]


def _least(values: Float64, number: int) -> Int64:
    """Indices of the smallest of each row, ascending, the lowest index first among equals."""
    number = min(number, values.shape[1])
    return np.argsort(values, axis=1, kind="stable")[:, :number]


def _outer(left: Int64, right: Int64) -> tuple[Int64, Int64]:
    shape = (*left.shape, right.shape[1])
    first = np.broadcast_to(left[:, :, None], shape).reshape(len(left), -1)
    return first, np.broadcast_to(right[:, None, :], shape).reshape(len(left), -1)
