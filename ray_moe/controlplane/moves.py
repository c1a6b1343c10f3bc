"""How far two placements are apart, and which rank should take which pack so that least moves. Arrays over all layers.

A *pack* is what one rank holds of one layer. Ranks that are equal for the objective (of one node, with equal pools)
may swap their packs without any effect on balance; `relabel` picks the assignment of packs to ranks that keeps the
most copies where they are. `count_moves` says what remains to be moved, by class, without planning it.

Letters: C copies, L layers, G ranks, E experts, n ranks of one group, B problems of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ray_moe.errors import ConfigError

Ints = NDArray[np.int64]

SUBSETS_UP_TO = 8  # 2^n subsets for a whole batch of problems at once: 256 steps of numpy
HUNGARIAN_UP_TO = 64  # n^2 steps of numpy for each problem


@dataclass(frozen=True, eq=False)
class Copies:
    """One entry per copy: layer_C, rank_C and expert_C, all int64 [C] and >= 0. Order means nothing."""

    layer_C: Ints
    rank_C: Ints
    expert_C: Ints

    @classmethod
    def of(cls, phy2log_LS: Ints, rank_of_slot: Ints) -> Copies:
        """From a slot map [L, S] and the rank of each slot, [S] or [L, S]."""
        phy2log_LS = np.asarray(phy2log_LS, np.int64)
        rank_LS = np.broadcast_to(np.asarray(rank_of_slot, np.int64), phy2log_LS.shape)
        layer_LS = np.broadcast_to(np.arange(len(phy2log_LS))[:, None], phy2log_LS.shape)
        return cls(layer_LS.ravel(), rank_LS.ravel(), phy2log_LS.ravel())


# -- What a change costs


@dataclass(frozen=True, eq=False)
class MoveCounts:
    """Copies of the target by what they take, int64 [L]; together they are all copies of the target.

    `loaded` copies have no source in any pool slot: a host cache or the checkpoint gives the first one of an expert.
    `kept_G` are the kept ones by rank, over all layers.
    """

    kept_L: Ints
    same_gpu_L: Ints
    same_node_L: Ints
    cross_node_L: Ints
    loaded_L: Ints
    kept_G: Ints

    @property
    def moved_L(self) -> Ints:
        """Everything that is not kept."""
        return self.same_gpu_L + self.same_node_L + self.cross_node_L + self.loaded_L


def count_moves(prior: Copies, target: Copies, node_of_rank: Ints, num_layers: int) -> MoveCounts:
    """The fewest moves of each class that turn `prior` into `target` when spare slots suffice for all at once.

    A rank keeps what it has. Its further copies are duplicates of one; the first one comes from its node where that
    has or gets the expert, so that each node is crossed into once per expert. `node_of_rank` is int64 [G].
    Example: expert 0 on rank 0; wanted twice on rank 1 of the same node and once on rank 2 of another: one same-node
    copy, one duplicate and one cross-node copy.
    """
    node_of_rank = np.asarray(node_of_rank, np.int64)
    num_ranks, num_nodes = len(node_of_rank), int(node_of_rank.max(initial=0)) + 1
    num_experts = int(max(prior.expert_C.max(initial=0), target.expert_C.max(initial=0))) + 1

    def counted(copies: Copies) -> tuple[Ints, Ints]:
        return _distinct((copies.layer_C * num_experts + copies.expert_C) * num_ranks + copies.rank_C)

    def on_nodes(keys: Ints) -> Ints:
        function, rank = np.divmod(keys, num_ranks)
        return _distinct(function * num_nodes + node_of_rank[rank])[0]

    def by_layer(keys: Ints, per_layer: int, weights: Ints | None = None) -> Ints:
        return np.bincount(keys // per_layer, weights, minlength=num_layers).astype(np.int64)

    had, had_count = counted(prior)
    want, want_count = counted(target)
    had_of_want = _lookup(want, had, had_count)
    kept = np.minimum(want_count, had_of_want)
    first = want[had_of_want == 0]  # ranks that do not have the expert yet
    had_node, first_node = on_nodes(had), on_nodes(first)
    entered = first_node[~_among(first_node, had_node)]  # nodes that do not have it yet
    absent, _ = _distinct(entered // num_nodes)
    absent = absent[~_among(absent, had_node // num_nodes)]  # experts that no rank has

    first_L = by_layer(first, num_experts * num_ranks)
    entered_L = by_layer(entered, num_experts * num_nodes)
    loaded_L = by_layer(absent, num_experts)
    kept_L = by_layer(want, num_experts * num_ranks, kept)
    wanted_L = by_layer(want, num_experts * num_ranks, want_count)
    kept_G = np.bincount(want % num_ranks, kept, minlength=num_ranks).astype(np.int64)
    duplicates_L = wanted_L - kept_L - first_L
    return MoveCounts(kept_L, duplicates_L, first_L - entered_L, entered_L - loaded_L, loaded_L, kept_G)


def _distinct(keys: Ints) -> tuple[Ints, Ints]:
    """The distinct keys, ascending, and how often each occurs."""
    keys = np.sort(keys)
    starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    return keys[starts], np.diff(starts, append=len(keys))


def _position(keys: Ints, table: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Where `keys` are in the ascending `table`, which is not empty, and which of them are there at all."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys


def _among(keys: Ints, table: Ints) -> NDArray[np.bool_]:
    return _position(keys, table)[1] if len(table) else np.zeros(len(keys), bool)


def _lookup(keys: Ints, table: Ints, values: Ints) -> Ints:
    """`values` at the positions of `keys` in the ascending `table`, 0 for keys that are not there."""
    if not len(table):
        return np.zeros(len(keys), np.int64)
    at, found = _position(keys, table)
    return np.where(found, values[at], 0)


# -- Which rank takes which pack


class Matching(StrEnum):
    """How packs were assigned to ranks. The first two are exact; the last is a lower bound on what can be kept."""

    SUBSETS = "subsets"
    HUNGARIAN = "hungarian"
    GREEDY_SWAPS = "greedy_swaps"


@dataclass(frozen=True, eq=False)
class Relabelled:
    """`rank_LG[l, g]` is the rank that takes the pack which the target gave to rank g; `methods` is what found it."""

    copies: Copies
    rank_LG: Ints
    methods: frozenset[Matching]


def relabel(
    prior: Copies, target: Copies, groups: Sequence[Sequence[int]], num_layers: int, num_ranks: int
) -> Relabelled:
    """Swap whole packs inside each of `groups` (disjoint lists of ranks), layer by layer, to keep the most copies.

    Exact for groups of up to 64 ranks. Among equally good assignments the one that renames the fewest ranks is taken.
    Raises `ConfigError` for a rank in two groups or outside [0, G).
    """
    members = [rank for group in groups for rank in group]
    if len(set(members)) != len(members) or not all(0 <= rank < num_ranks for rank in members):
        raise ConfigError(f"groups must be disjoint with ranks in [0, {num_ranks}), found {[list(g) for g in groups]}")
    group_G = np.full(num_ranks, -1)
    for number, group in enumerate(groups):
        group_G[list(group)] = number
    pairs = _overlaps(prior, target, group_G)
    rank_LG = np.tile(np.arange(num_ranks), (num_layers, 1))
    methods = set()
    for size in sorted({len(group) for group in groups if len(group) > 1}):
        group_Nn = np.array([group for group in groups if len(group) == size], np.int64)
        method = Matching.GREEDY_SWAPS
        if size <= HUNGARIAN_UP_TO:
            method = Matching.SUBSETS if size <= SUBSETS_UP_TO else Matching.HUNGARIAN
        methods.add(method)
        # Large matrices are built for one layer at a time; small ones for all layers in one batch.
        span = num_layers if size <= SUBSETS_UP_TO else 1
        for start in range(0, num_layers, span):
            weights_Bnn = _weights(pairs, group_Nn, num_ranks, start, span)
            taken_Bn = SOLVERS[method](weights_Bnn)
            ranks_LNn = np.take_along_axis(np.tile(group_Nn, (span, 1)), taken_Bn, axis=1).reshape(
                span, *group_Nn.shape
            )
            rank_LG[start : start + span, group_Nn.ravel()] = ranks_LNn.reshape(span, -1)
    moved = Copies(target.layer_C, rank_LG[target.layer_C, target.rank_C], target.expert_C)
    return Relabelled(moved, rank_LG, frozenset(methods))


def _overlaps(prior: Copies, target: Copies, group_G: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(layer, target rank, prior rank, copies that would be kept) for all pairs of a group that share an expert."""
    num_experts = int(max(prior.expert_C.max(initial=0), target.expert_C.max(initial=0))) + 1
    num_ranks, num_groups = len(group_G), int(group_G.max(initial=0)) + 1

    def counted(copies: Copies) -> tuple[Ints, Ints, Ints]:
        inside = np.flatnonzero(group_G[copies.rank_C] >= 0)
        rank = copies.rank_C[inside]
        function = copies.layer_C[inside] * num_experts + copies.expert_C[inside]
        keys, counts = _distinct((function * num_groups + group_G[rank]) * num_ranks + rank)
        return keys // num_ranks, keys % num_ranks, counts

    had_function, had_rank, had_count = counted(prior)  # of a group
    function, rank, count = counted(target)
    start = np.searchsorted(had_function, function, "left")
    partners = np.searchsorted(had_function, function, "right") - start
    row = np.repeat(np.arange(len(function)), partners)
    at = np.arange(len(row)) - np.repeat(np.cumsum(partners) - partners, partners) + start[row]
    layer = function[row] // (num_experts * num_groups)
    return layer, rank[row], had_rank[at], np.minimum(count[row], had_count[at])


def _weights(pairs: tuple[Ints, Ints, Ints, Ints], group_Nn: Ints, num_ranks: int, start: int, span: int) -> Ints:
    """[B, n, n] with B = span x N: copies kept when the pack of row i goes to the rank of column j.

    Scaled so that staying with one's own rank decides between equals and nothing else.
    """
    num_groups, size = group_Nn.shape
    group_G, seat_G = np.full(num_ranks, -1), np.zeros(num_ranks, np.int64)
    group_G[group_Nn] = np.arange(num_groups)[:, None]
    seat_G[group_Nn] = np.arange(size)
    layer, pack, rank, kept = pairs
    inside = (group_G[pack] >= 0) & (layer >= start) & (layer < start + span)
    weights = np.zeros((span * num_groups, size, size), np.int64)
    problem = (layer[inside] - start) * num_groups + group_G[pack[inside]]
    np.add.at(weights, (problem, seat_G[pack[inside]], seat_G[rank[inside]]), kept[inside])
    return weights * (size + 1) + np.eye(size, dtype=np.int64)


# -- Maximum-weight assignment: weights [B, n, n] -> column of each row [B, n]


def _by_subsets(weights_Bnn: Ints) -> Ints:
    """Exact: the best way to give the first k rows the columns of a subset of size k, over all subsets."""
    batch, size, _ = weights_Bnn.shape
    best = np.zeros((1 << size, batch), np.int64)
    last = np.zeros((1 << size, batch), np.int64)
    for subset in range(1, 1 << size):
        columns = [column for column in range(size) if subset >> column & 1]
        totals = np.stack([best[subset ^ 1 << column] + weights_Bnn[:, len(columns) - 1, column] for column in columns])
        choice = totals.argmax(axis=0)
        best[subset] = np.take_along_axis(totals, choice[None], axis=0)[0]
        last[subset] = np.array(columns)[choice]
    taken = np.zeros((batch, size), np.int64)
    subset_B = np.full(batch, (1 << size) - 1)
    for row in reversed(range(size)):
        taken[:, row] = last[subset_B, np.arange(batch)]
        subset_B ^= 1 << taken[:, row]
    return taken


def _hungarian(weights_Bnn: Ints) -> Ints:
    """Exact: shortest augmenting paths with potentials, one row after another; index 0 is the root of each path."""
    batch, size, _ = weights_Bnn.shape
    taken = np.zeros((batch, size), np.int64)
    for problem in range(batch):
        cost = weights_Bnn[problem].max() - weights_Bnn[problem]
        infinite = np.int64(1) << 60
        row_price, column_price = np.zeros(size + 1, np.int64), np.zeros(size + 1, np.int64)
        owner = np.zeros(size + 1, np.int64)  # row of each column, 0 while it has none
        for row in range(1, size + 1):
            owner[0], column = row, 0
            slack = np.full(size + 1, infinite)
            came_from = np.zeros(size + 1, np.int64)
            seen = np.zeros(size + 1, bool)
            while owner[column] != 0:
                seen[column] = True
                at = owner[column]
                reduced = cost[at - 1] - row_price[at] - column_price[1:]
                closer = ~seen[1:] & (reduced < slack[1:])
                slack[1:][closer] = reduced[closer]
                came_from[1:][closer] = column
                nearest = int(np.where(seen[1:], infinite, slack[1:]).argmin()) + 1
                step = slack[nearest]
                row_price[owner[seen]] += step
                column_price[seen] -= step
                slack[~seen] -= step
                column = nearest
            while column:
                owner[column] = owner[came_from[column]]
                column = came_from[column]
        taken[problem, owner[1:] - 1] = np.arange(size)
    return taken


def _greedy_swaps(weights_Bnn: Ints) -> Ints:
    """Heaviest pair first, then sweeps of swaps that gain, until none does; never below leaving all where it is."""
    batch, size, _ = weights_Bnn.shape
    taken = np.zeros((batch, size), np.int64)
    rows = np.arange(size)
    for problem, weights in enumerate(weights_Bnn):
        chosen = _greedy(weights)
        if weights[rows, chosen].sum() < weights[rows, rows].sum():
            chosen = rows.copy()
        while True:
            now = weights[rows, chosen]
            crossed = weights[:, chosen]  # [i, j]: row i with the column of row j
            gain = np.triu(crossed + crossed.T - now[:, None] - now[None, :], 1)
            first, second = np.nonzero(gain > 0)
            if not len(first):
                break
            touched: set[int] = set()
            for pair in np.argsort(-gain[first, second], kind="stable"):
                one, other = int(first[pair]), int(second[pair])
                if touched.isdisjoint((one, other)):  # every swap of a sweep still gains what was computed for it
                    touched |= {one, other}
                    chosen[one], chosen[other] = chosen[other], chosen[one]
        taken[problem] = chosen
    return taken


def _greedy(weights: Ints) -> Ints:
    size = len(weights)
    chosen = np.full(size, -1)
    free = np.ones(size, bool)
    first, second = np.nonzero(weights)
    for pair in np.argsort(-weights[first, second], kind="stable"):
        row, column = first[pair], second[pair]
        if chosen[row] < 0 and free[column]:
            chosen[row] = column
            free[column] = False
    chosen[chosen < 0] = np.flatnonzero(free)
    return chosen


SOLVERS = {Matching.SUBSETS: _by_subsets, Matching.HUNGARIAN: _hungarian, Matching.GREEDY_SWAPS: _greedy_swaps}
