"""What a placement is worth: one objective of declared, normalised terms (specification 0x08I).

`Objective` is the terms and hard constraints by which placements of one `Shape` are compared. Every term is a pure
number: relative to the perfectly balanced cluster, or a share of all rows or of all slots. Letters: L layers,
E experts, S slots, G ranks, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_moe.controlplane.placed import Int64, Placed, Shape
from ray_moe.errors import ConfigError

Float64 = NDArray[np.float64]
AntiAffinity = Literal["none", "rank", "node"]


@dataclass(frozen=True)
class Decode:
    """A decode step: `tokens` of a batch, each routed to `top_k` distinct experts in proportion to the loads.

    With p = min(1, top_k W_e / sum W) the chance that a token visits expert e, one of its c copies is active, so that
    its weights are read, with probability 1 - (1 - p / c)^tokens: tokens choose copies evenly and independently.
    """

    tokens: int
    top_k: int

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("top_k", self.top_k)):
            if value < 1:
                raise ConfigError(f"decode: {name} must be >= 1, found {value}")

    def active(self, chance: Float64, copies: Int64 | int) -> Float64:
        """Probability that one copy is active, for experts visited with `chance`."""
        with np.errstate(divide="ignore"):  # log1p(-1) is -inf: always active
            return -np.expm1(self.tokens * np.log1p(-chance / copies))


@dataclass(frozen=True)
class MovePrice:
    """What one moved copy counts, by where its parameters come from; 1 is a copy across nodes, or from outside.

    The defaults are the orders of magnitude between device memory, a node's links and a network. Pass measured ratios.
    """

    same_rank: float = 0.02
    same_node: float = 0.1
    cross_node: float = 1.0

    def of(self, on_rank: NDArray[np.signedinteger], on_node: NDArray[np.signedinteger]) -> Float64:
        """Price of copies that move in, where so many are on their rank, and on their node, already."""
        return np.where(on_rank > 0, self.same_rank, np.where(on_node > 0, self.same_node, self.cross_node))


@dataclass(frozen=True, eq=False)
class Terms:
    """Every term of an objective for every layer, [L] each; smaller is better, see `Objective`."""

    balance: Float64
    phase: Float64
    topology: Float64
    migration: Float64
    resident: Float64
    churn: Float64
    barrier: Float64
    moving: Float64  # what moves add to the total: `migration` and `churn` by their weights
    total: Float64
    moved: Int64  # copies that the prior placement does not hold on their rank, unweighed

    def of_layers(self, layers: Int64 | NDArray[np.bool_]) -> Terms:
        return Terms(*(getattr(self, each.name)[layers] for each in fields(self)))


@dataclass(frozen=True, eq=False)
class Objective:
    """Weights (0 ignores a term), and constraints that no answer breaks.

    - `balance`: largest over mean ideal rank load, an expert's load split evenly over its copies. 1 is perfect.
    - `phase`: largest number of experts that a `decode` step activates on a rank, over sum_e active(e, 1 copy) / G: the
      activations that no placement can avoid, spread evenly. 1 is perfect. Prefill weighs tokens, which is `balance`.
    - `topology`: share of the rows that cross nodes when a row goes to a copy on its own node where there is one.
      `origins` are shares of where rows start, [N], or [L, E, N] by expert; the default is evenly over the ranks.
    - `migration`: moved copies priced by `move_price`, over all slots. A copy moves if its rank holds fewer of the
      expert in the prior placement. 1 is every copy from another node; 0 without a prior.
    - `resident`: distinct experts of each rank, over all slots: copies of one expert on one rank share their storage.
      1 is no copy beside another; smaller leaves a rank room for caches, or for old and new copies at once.
    - `churn`: the share of slots that a move fills anew, wherever from: each is new bindings and colder caches.

    The barrier is max over ranks of (`balance` x its load ratio + `phase` x its activation ratio): one rank has to be
    slow in the sum of both. total = barrier + the other terms, each times its weight of the same
    name. In the specification's J, lambda_1 to lambda_5 are `balance`, `topology`, `migration`, `resident`, `churn`.

    `min_replicas` is the least copies of every expert; `anti_affinity` allows at most one copy of an expert per rank or
    per node. Raises `ConfigError` for weights that are negative or not finite, and for a phase weight without `decode`.
    """

    balance: float = 1.0
    phase: float = 0.0
    topology: float = 0.0
    migration: float = 0.0
    resident: float = 0.0
    churn: float = 0.0
    decode: Decode | None = None
    origins: ArrayLike | None = None
    move_price: MovePrice = MovePrice()
    min_replicas: int = 1
    anti_affinity: AntiAffinity = "none"

    def __post_init__(self) -> None:
        for name in ("balance", "phase", "topology", "migration", "resident", "churn"):
            _check_weight(name, getattr(self, name))
        for name in ("same_rank", "same_node", "cross_node"):
            _check_weight(f"move_price.{name}", getattr(self.move_price, name))
        if self.phase and self.decode is None:
            raise ConfigError(f"phase {self.phase} needs decode: the tokens of a batch and top_k, found None")
        if self.min_replicas < 1:
            raise ConfigError(f"min_replicas must be >= 1, found {self.min_replicas}")
        if self.anti_affinity not in ("none", "rank", "node"):
            raise ConfigError(f"anti_affinity must be none, rank or node, found {self.anti_affinity!r}")

    def of_layers(self, layers: Int64) -> Objective:
        """The same for some of the layers: origins by expert are by layer too."""
        if self.origins is None or np.ndim(self.origins) == 1:
            return self
        return replace(self, origins=np.asarray(self.origins)[layers])

    @property
    def counts_moves(self) -> bool:
        """Whether what is in place makes a difference."""
        return self.migration > 0 or self.churn > 0

    def domains(self, shape: Shape) -> Int64 | None:
        """[G]: the domain of each rank inside which an expert may have one copy only; None where copies are free."""
        return {"none": None, "rank": np.arange(shape.num_ranks), "node": shape.node_of_rank_G}[self.anti_affinity]

    def require_feasible(self, num_experts: int, shape: Shape) -> None:
        """Raises `ConfigError` naming the constraint and both numbers where no placement can fulfil it.

        These bounds suffice: with equally many copies of every expert, give or take one, a placement exists.
        """
        needed = num_experts * self.min_replicas
        if needed > shape.num_slots:
            raise ConfigError(
                f"min_replicas {self.min_replicas} of each of {num_experts} experts needs {needed} slots, "
                f"found {shape.num_slots}"
            )
        domains = self.domains(shape)
        if domains is not None:
            slots_D = np.zeros(int(domains.max()) + 1, np.int64)
            np.add.at(slots_D, domains, shape.slots_by_rank)
            if slots_D.max() > num_experts:
                raise ConfigError(
                    f"anti_affinity: {self.anti_affinity} {slots_D.argmax()} must have at most {num_experts} slots, "
                    f"one per expert, found {slots_D.max()}"
                )

    def origins_LEN(self, layers: int, num_experts: int, shape: Shape) -> Float64:
        """Shares by node, summing to 1; raises `ConfigError` for another shape, or shares that do not."""
        if self.origins is None:
            given = np.bincount(shape.node_of_rank_G, minlength=shape.num_nodes) / shape.num_ranks
        else:
            given = np.asarray(self.origins, np.float64)
        full = (layers, num_experts, shape.num_nodes)
        if given.shape not in (full, full[2:]):
            raise ConfigError(f"origins must be {list(full[2:])} or {list(full)}, found {list(given.shape)}")
        if not (given >= 0).all() or not np.allclose(given.sum(axis=-1), 1, atol=1e-6):
            raise ConfigError(f"origins must be >= 0 and sum to 1, found sums from {given.sum(axis=-1).min()}")
        return np.broadcast_to(given, full)

    def evaluate(self, loads_LE: ArrayLike, placed: Placed, prior: Placed | None = None) -> Terms:
        """All terms of `placed` under [L, E] `loads_LE`; `prior` is where parameters are now."""
        loads = checked_loads(loads_LE, placed.num_experts, len(placed.phy2log_LS))
        shape = placed.shape
        share_LE = loads / placed.counts_LE
        rows_LG = rank_sums(share_LE, placed) / perfect(loads.sum(axis=1), shape)[:, None]
        active_LG = np.zeros_like(rows_LG)
        if self.decode is not None:
            chance = chance_LE(loads, self.decode)
            alone_L = self.decode.active(chance, 1).sum(axis=1)
            active_LG = rank_sums(self.decode.active(chance, placed.counts_LE), placed)
            active_LG /= perfect(alone_L, shape)[:, None]
        idle_L = loads.sum(axis=1) == 0
        rows_LG[idle_L], active_LG[idle_L] = 1.0, float(self.decode is not None)

        on_LEN = (placed.held_LEN() > 0).astype(np.float64)
        near_LE = np.einsum("len,len->le", on_LEN, self.origins_LEN(len(loads), loads.shape[1], shape))
        topology = (loads * (1 - near_LE)).sum(axis=1) / np.where(idle_L, 1.0, loads.sum(axis=1))

        moved, migration = np.zeros(len(loads), np.int64), np.zeros(len(loads))
        if prior is not None:
            at, before, near = _moves(placed, prior)
            np.add.at(moved, at, 1)
            np.add.at(migration, at, self.move_price.of(before, near) / shape.num_slots)
        barrier = (self.balance * rows_LG + self.phase * active_LG).max(axis=1)
        stored = np.sort(placed.phy2log_LS * shape.num_ranks + shape.rank_of_slot_S, axis=1)
        resident = (1 + np.count_nonzero(np.diff(stored), axis=1)) / shape.num_slots
        churn = moved / shape.num_slots
        moving = self.migration * migration + self.churn * churn
        total = barrier + self.topology * topology + self.resident * resident + moving
        balance, phase = rows_LG.max(axis=1), active_LG.max(axis=1)
        return Terms(balance, phase, topology, migration, resident, churn, barrier, moving, total, moved)


# -- What the search shares with the evaluation


def perfect(sums_L: Float64, shape: Shape) -> Float64:
    """[L]: each rank's part of a sum in the perfectly balanced cluster, 1 for a layer that has none."""
    return np.where(sums_L == 0, 1.0, sums_L / shape.num_ranks)


def chance_LE(loads_LE: Float64, decode: Decode) -> Float64:
    """Probability that one token visits each expert."""
    sums_L = loads_LE.sum(axis=1, keepdims=True)
    chance: Float64 = np.minimum(1.0, decode.top_k * loads_LE / np.where(sums_L == 0, 1.0, sums_L))
    return chance


def surviving(prior: Placed, placed: Placed) -> tuple[Int64, Int64]:
    """Slots of `prior` on ranks that `placed` has too, [L, slots], and their ranks: lost ranks are no source.

    Raises `ConfigError` for another number of layers or experts.
    """
    require_same_model(prior, placed.num_experts, len(placed.phy2log_LS))
    alive = prior.shape.rank_of_slot_S < placed.shape.num_ranks
    return prior.phy2log_LS[:, alive], prior.shape.rank_of_slot_S[alive]


def _moves(placed: Placed, prior: Placed) -> tuple[Int64, Int64, Int64]:
    """For each copy that its rank does not hold in `prior`: layer, and the copies there on its rank and its node."""
    shape, (slots, ranks) = placed.shape, surviving(prior, placed)

    def keys(phy2log_LS: Int64, place_S: Int64, places: int) -> Int64:
        layer = np.arange(len(phy2log_LS))[:, None]
        return np.sort(((layer * placed.num_experts + phy2log_LS) * places + place_S).ravel())

    def occurring(wanted: Int64, among: Int64) -> Int64:
        return np.searchsorted(among, wanted, "right") - np.searchsorted(among, wanted, "left")

    here = keys(placed.phy2log_LS, shape.rank_of_slot_S, shape.num_ranks)
    nth = np.arange(len(here)) - np.searchsorted(here, here, "left")
    before = occurring(here, keys(slots, ranks, shape.num_ranks))
    moved = nth >= before
    expert_of_layer, rank = np.divmod(here[moved], shape.num_ranks)
    near = expert_of_layer * shape.num_nodes + shape.node_of_rank_G[rank]
    on_node = occurring(near, keys(slots, shape.node_of_rank_G[ranks], shape.num_nodes))
    return expert_of_layer // placed.num_experts, before[moved], on_node


def require_same_model(prior: Placed, num_experts: int, layers: int) -> None:
    found = (len(prior.phy2log_LS), prior.num_experts)
    if found != (layers, num_experts):
        raise ConfigError(f"prior must have [layers, experts] = {[layers, num_experts]}, found {list(found)}")


def checked_loads(loads_LE: ArrayLike, num_experts: int | None = None, layers: int | None = None) -> Float64:
    """Loads as float64 [L, E]; raises `ConfigError` for another shape, and for values outside [0, infinity)."""
    loads = np.asarray(loads_LE, np.float64)
    if loads.ndim != 2 or 0 in loads.shape:
        raise ConfigError(f"loads must be [layers, experts], both >= 1, found shape {list(loads.shape)}")
    if num_experts is not None and loads.shape != (layers, num_experts):
        raise ConfigError(f"loads must be [layers, experts] = {[layers, num_experts]}, found {list(loads.shape)}")
    bad = ~((loads >= 0) & (loads < np.inf))
    if bad.any():
        layer, expert = np.argwhere(bad)[0]
        raise ConfigError(
            f"loads: layer {layer} expert {expert}: must be finite and >= 0, found {loads[layer, expert]}"
        )
    return loads


def rank_sums(value_LE: Float64, placed: Placed) -> Float64:
    """[L, G]: the sum over each rank's slots, where a slot has its expert's value."""
    layers, ranks = len(value_LE), placed.shape.num_ranks
    at = placed.shape.rank_of_slot_S + np.arange(layers)[:, None] * ranks
    values = np.take_along_axis(value_LE, placed.phy2log_LS, axis=1)
    return np.bincount(at.ravel(), values.ravel(), layers * ranks).reshape(layers, ranks).astype(np.float64, copy=False)


def _check_weight(name: str, value: float) -> None:
    if not 0 <= value < np.inf:
        raise ConfigError(f"objective: {name} must be finite and >= 0, found {value}")
