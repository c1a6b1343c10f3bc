"""A placement for any shape: greedy copies and packing, and a placement carried over to another shape.

Deterministic: no seed, no clock; equal choices take the lowest index. Letters: L layers, E experts, S slots, G ranks,
D anti-affinity domains (nodes or ranks), r ranks of a domain.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_moe.controlplane.eplb import rebalance
from ray_moe.controlplane.objective import Float64, Objective, checked_loads, require_same_model
from ray_moe.controlplane.placed import Int64, Placed, Shape
from ray_moe.controlplane.search import Costs


def greedy(
    loads_LE: ArrayLike, shape: Shape, objective: Objective | None = None, ceiling: float | None = None
) -> Placed:
    """Copies to the costliest experts, then each copy, costliest first, to the lightest rank with room.

    Every slot is filled. With a `ceiling`, experts are split only while a copy costs more than that part of a perfect
    rank; further copies go to the cheapest. Fewer, heavier copies can pack better: three of 0.7 do not go on two ranks.
    Where the shape is uniform, nothing but rows counts and no `ceiling` is given, these are the pinned solver's global
    maps, slot for slot. Topology and migration are left to `improve`. Raises `ConfigError` as
    `Objective.require_feasible`, and for loads that are negative or not finite.
    """
    objective = objective or Objective()
    loads = checked_loads(loads_LE)
    layers, experts = loads.shape
    objective.require_feasible(experts, shape)
    domains = objective.domains(shape)
    plain = domains is None and objective.min_replicas == 1 and not objective.phase and ceiling is None
    if plain and shape.is_uniform:
        return Placed.of(rebalance(loads, shape.num_slots, 1, 1, shape.num_ranks, "global"), shape)
    costs = Costs.of(loads, shape, objective)
    if ceiling is None:
        # Activations: a copy of a busy expert adds a whole one. So no more are split than a rank's share asks for.
        ceiling = 1.0 if objective.phase else 0.0
    ceiling *= costs.perfect
    if domains is None:
        counts = np.full((layers, experts), objective.min_replicas)
        _replicate(counts, costs, np.full(layers, shape.num_slots), shape.num_slots, ceiling)
        return _pack(counts, costs, shape)
    counts = _replicate_apart(costs, loads.shape, shape, objective, domains, ceiling)
    return _pack_apart(counts, costs, shape, domains)


def _replicate(counts: Int64, costs: Costs, slots_L: Int64, most: int, ceiling: float) -> None:
    """Raise `counts` until each layer has its slots, no expert above `most`.

    The largest cost per copy gives way first, which is optimal for the largest copy (specification 0x08B). Below
    `ceiling`, a copy goes where it adds least.
    """
    layers, experts = counts.shape
    every, ids = np.arange(layers)[:, None], np.arange(experts)
    value, more = costs.value(every, ids, counts), costs.value(every, ids, counts + 1)
    left_L = slots_L - counts.sum(axis=1)
    active = np.nonzero(left_L > 0)[0]
    while active.size:
        chosen = _next_copy(costs, value[active], more[active], counts[active], counts[active] < most, ceiling)
        counts[active, chosen] += 1
        value[active, chosen] = more[active, chosen]
        more[active, chosen] = costs.value(active, chosen, counts[active, chosen] + 1)
        left_L[active] -= 1
        active = active[left_L[active] > 0]


def _next_copy(
    costs: Costs, value_AE: Float64, more_AE: Float64, counts_AE: Int64, may_AE: NDArray[np.bool_], ceiling: float
) -> Int64:
    """The expert of each row that gets the next copy; `more` is the cost of each of its copies then."""
    worth = np.where(may_AE, value_AE, -np.inf)
    chosen = worth.argmax(axis=1)
    if ceiling > 0:
        added = more_AE if costs.decode is None else (counts_AE + 1) * more_AE - counts_AE * value_AE
        chosen = np.where(worth.max(axis=1) > ceiling, chosen, np.where(may_AE, added, np.inf).argmin(axis=1))
    return chosen


def _pack(counts: Int64, costs: Costs, shape: Shape) -> Placed:
    layers, experts = counts.shape
    value = costs.value(np.arange(layers)[:, None], np.arange(experts), counts)
    items = np.repeat(np.tile(np.arange(experts), layers), counts.ravel()).reshape(layers, -1)
    weights = np.take_along_axis(value, items, axis=1)
    order = np.argsort(-weights, axis=1, kind="stable")
    items, weights = np.take_along_axis(items, order, axis=1), np.take_along_axis(weights, order, axis=1)
    room = np.tile(np.array(shape.slots_by_rank), (layers, 1))
    load = np.where(room > 0, 0.0, np.inf)
    held = np.empty((layers, shape.num_slots), np.int64)
    ends, every = np.cumsum(shape.slots_by_rank), np.arange(layers)
    for item in range(shape.num_slots):
        rank = load.argmin(axis=1)
        held[every, ends[rank] - room[every, rank]] = items[:, item]
        room[every, rank] -= 1
        load[every, rank] = np.where(room[every, rank] > 0, load[every, rank] + weights[:, item], np.inf)
    return Placed(shape, experts, held)


# -- Greedy under anti-affinity


def _replicate_apart(
    costs: Costs, size: tuple[int, int], shape: Shape, objective: Objective, domains: Int64, ceiling: float
) -> Int64:
    """Copies that domains can hold apart: the k most replicated experts have at most sum_d min(slots_d, k) copies.

    (Gale and Ryser.) For domains of equal size that is one copy per domain. For others, an expert that cannot grow
    without breaking it never can again, and the greedy choice stays optimal: the bounds form a polymatroid.
    """
    layers, experts = size
    slots_D = np.zeros(int(domains.max()) + 1, np.int64)
    np.add.at(slots_D, domains, shape.slots_by_rank)
    slots_D = slots_D[slots_D > 0]
    counts = np.full(size, objective.min_replicas)
    if len(set(slots_D.tolist())) == 1:
        _replicate(counts, costs, np.full(layers, shape.num_slots), len(slots_D), ceiling)
        return counts
    bound = np.minimum(slots_D, np.arange(1, experts + 1)[:, None]).sum(axis=1)
    ids = np.arange(experts)
    for layer in range(layers):
        row, at, growing = counts[layer : layer + 1], np.array([[layer]]), np.ones((1, experts), bool)
        while row.sum() < shape.num_slots:
            value, more = costs.value(at, ids, row), costs.value(at, ids, row + 1)
            chosen = _next_copy(costs, value, more, row, growing, ceiling)[0]
            row[0, chosen] += 1
            if (np.cumsum(np.sort(row[0])[::-1]) > bound).any():
                row[0, chosen] -= 1
                growing[0, chosen] = False
    return counts


def _pack_apart(counts: Int64, costs: Costs, shape: Shape, domains: Int64) -> Placed:
    """Expert by expert, costliest copies first, to the domains with most room, the lightest first among equals.

    Taking those with most room never runs into a dead end, whatever the order of experts.
    """
    layers, experts = counts.shape
    every = np.arange(layers)
    value = costs.value(every[:, None], np.arange(experts), counts)
    order = np.argsort(-value, axis=1, kind="stable")
    members = [np.nonzero(domains == domain)[0] for domain in range(int(domains.max()) + 1)]
    width = max(map(len, members))
    ranks_Dr = np.array([np.resize(ranks, width) if len(ranks) else np.zeros(width, np.int64) for ranks in members])
    empty_D = np.array([not len(ranks) for ranks in members])
    room = np.tile(np.array(shape.slots_by_rank), (layers, 1))
    load = np.zeros(room.shape)
    held = np.empty((layers, shape.num_slots), np.int64)
    ends = np.cumsum(shape.slots_by_rank)
    distinct = np.array([len(ranks) for ranks in members])
    for turn in range(experts):
        expert = order[:, turn]
        open_load = np.where(room > 0, load, np.inf)[:, ranks_Dr]  # [L, D, r]
        rank_LD = np.take_along_axis(np.broadcast_to(ranks_Dr, open_load.shape), open_load.argmin(2)[..., None], 2)
        rank_LD = rank_LD[..., 0]
        real = np.arange(width) < distinct[:, None]
        room_LD = np.where(empty_D, 0, (room[:, ranks_Dr] * real).sum(axis=2))
        load_LD = np.where(real, load[:, ranks_Dr], 0.0).sum(axis=2)
        best = np.lexsort((load_LD, -room_LD), axis=1)
        at, nth = np.nonzero(np.arange(best.shape[1]) < counts[every, expert][:, None])
        rank = rank_LD[at, best[at, nth]]
        held[at, ends[rank] - room[at, rank]] = expert[at]
        room[at, rank] -= 1
        load[at, rank] += value[at, expert[at]]
    return Placed(shape, experts, held)


# -- Carrying a placement over to another shape


def carried(prior: Placed, loads_LE: ArrayLike, shape: Shape, objective: Objective | None = None) -> Placed:
    """`prior` in `shape`: every copy on a rank that still has room for it stays; slots that are new or have to give
    way are filled from `loads_LE`. The same placement if it already fits.

    Where keeping copies leaves no way to fulfil the constraints, that layer is `greedy`. Raises as `greedy`, and
    `ConfigError` for a prior of another model.
    """
    objective = objective or Objective()
    loads = checked_loads(loads_LE)
    require_same_model(prior, loads.shape[1], len(loads))
    objective.require_feasible(loads.shape[1], shape)
    domains = objective.domains(shape)
    kept = np.full((len(loads), shape.num_slots), -1)
    old, new = np.cumsum((0, *prior.shape.slots_by_rank)), np.cumsum((0, *shape.slots_by_rank))
    for rank, (had, has) in enumerate(zip(prior.shape.slots_by_rank, shape.slots_by_rank, strict=False)):
        both = min(had, has)
        kept[:, new[rank] : new[rank] + both] = prior.phy2log_LS[:, old[rank] : old[rank] + both]

    costs = Costs.of(loads, shape, objective)
    fresh: Placed | None = None
    for layer, row in enumerate(kept):
        if (
            (row >= 0).all()
            and domains is None
            and np.bincount(row, minlength=loads.shape[1]).min() >= (objective.min_replicas)
        ):
            continue
        if not _refill(row, layer, costs, shape, objective, domains):
            fresh = fresh or greedy(loads, shape, objective)
            row[:] = fresh.phy2log_LS[layer]
    return Placed(shape, loads.shape[1], kept)


def _refill(row: Int64, layer: int, costs: Costs, shape: Shape, objective: Objective, domains: Int64 | None) -> bool:
    """Fill the empty slots (-1) of one layer in place, lifting copies where constraints ask for it; False: no way."""
    experts, at = costs.rows_LE.shape[1], np.array(layer)
    ranks, ids = shape.rank_of_slot_S, np.arange(experts)
    domain_S = np.arange(len(row)) if domains is None else domains[ranks]
    if domains is not None:
        seen: set[tuple[int, int]] = set()
        for slot, expert in enumerate(row.tolist()):
            if (expert, int(domain_S[slot])) in seen:
                row[slot] = -1
            elif expert >= 0:
                seen.add((expert, int(domain_S[slot])))

    # Experts below their least number of copies need room: those lift first that lose least by it.
    counts = np.bincount(row[row >= 0], minlength=experts)
    while np.maximum(objective.min_replicas - counts, 0).sum() > (row < 0).sum():
        spare = counts > objective.min_replicas
        lost = np.where(spare, costs.value(at, ids, np.maximum(counts - 1, 1)), np.inf)
        gone = int(lost.argmin())
        row[np.nonzero(row == gone)[0][-1]] = -1
        counts[gone] -= 1

    wanted = np.maximum(counts, objective.min_replicas)[None]
    one = costs.only(layer)
    most = len(row) if domains is None else len(set(domains.tolist()))
    _replicate(wanted, one, np.array([len(row)]), most, costs.perfect if objective.phase else 0.0)
    value = costs.value(at, ids, wanted[0])
    missing = np.repeat(ids, wanted[0] - counts)
    load = np.bincount(ranks, np.where(row >= 0, value[row], 0.0), shape.num_ranks)
    for expert in missing[np.argsort(-value[missing], kind="stable")].tolist():
        free = row < 0
        if domains is not None:
            free &= ~np.isin(domain_S, domain_S[row == expert])
        if not free.any():
            return False
        slot = int(np.where(free, load[ranks], np.inf).argmin())
        row[slot] = expert
        load[ranks[slot]] += value[expert]
    return True
