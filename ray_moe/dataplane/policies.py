"""Replica choice: which copy of an already chosen expert runs a route (specification 0x08H).

A policy is asked only where some expert has several replicas. It may look at counts, domains and queues; it can never
change the expert, and `plan_assignment` checks that it did not. Letters: N routes, E experts, S slots, P peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ray_moe.dataplane.plan import SlotMap, flat_ids
from ray_moe.errors import ConfigError
from ray_moe.routes import Routes


class ReplicaPolicy(Protocol):
    """Chooses exactly one replica per route."""

    name: str

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        """Manifest positions [N] int64 in semantic order, each inside its route's replica set."""
        ...

    def observe(self, rows_P: Sequence[int]) -> None:
        """Rows that each peer slot planned for the step that begins, as the step agreement gave them."""
        ...


class _Indifferent:
    """A policy whose choice does not depend on what other peers do."""

    def observe(self, rows_P: Sequence[int]) -> None:
        """Nothing to learn from it."""


class TokenHash(_Indifferent):
    """A fixed hash of (origin, token, route slot, expert): stateless, replayable, evenly spread. The default."""

    name = "token_hash"

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        ids_N, base_N, replicas_N = _replica_sets(routes, slots)
        return slots.replica_values_S[base_N + _hash(ids_N, slots.my_peer) % replicas_N]


class LocalityFirst(_Indifferent):
    """A replica on this peer, else in this peer's domain, else anywhere; ties by token hash."""

    name = "locality_first"

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        ids_N, base_N, replicas_N = _replica_sets(routes, slots)
        distance_S = 2 - (slots.domain_S == slots.my_domain).long() - (slots.peer_S == slots.my_peer).long()
        candidates = _Candidates(ids_N, base_N, replicas_N, slots)
        spread = (candidates.replica_C - _hash(ids_N, slots.my_peer)[candidates.route_C]) % candidates.count_C
        return candidates.cheapest(distance_S[candidates.position_C] * (slots.num_slots + 1) + spread)


class RoundRobin(_Indifferent):
    """The j-th route to an expert takes replica j, starting at this peer's own offset."""

    name = "round_robin"

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        ids_N, base_N, replicas_N = _replica_sets(routes, slots)
        turn_N = _occurrence(ids_N, slots.num_experts) + slots.my_peer
        return slots.replica_values_S[base_N + turn_N % replicas_N]


class LeastLoad(_Indifferent):
    """Fills each expert's least loaded replicas first, counting the rows this unit must send to each peer anyway.

    Experts are filled independently: rows of one replicated expert do not weigh on another's choice, only rows without
    a choice do. Equal loads are taken in turn from a replica that differs by expert and by peer, so that peers that do
    not see one another's rows do not all start at the same one.
    """

    name = "least_load"

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        return self._fill(routes, slots, torch.zeros(slots.num_peers, dtype=torch.int64, device=slots.peer_S.device))

    def _fill(self, routes: Routes, slots: SlotMap, load_P: Tensor) -> Tensor:
        """Water-filling without a loop over rows.

        The j-th route to expert e goes where the (j+1)-th smallest of the keys `load(replica) + 0, + 1, ...` lies:
        exactly what sending the expert's routes to its least loaded replica one after the other would do.
        """
        ids_N, base_N, replicas_N = _replica_sets(routes, slots)
        forced_N = slots.peer_S[slots.replica_values_S[base_N]][replicas_N == 1]
        load_P = load_P + torch.bincount(forced_N, minlength=slots.num_peers)
        candidates = _Candidates(ids_N, base_N, replicas_N, slots)
        turn_C = _occurrence(ids_N, slots.num_experts)[candidates.route_C]
        key_C = load_P[slots.peer_S[candidates.position_C]] + turn_C
        # Per expert, the candidates (turn t, replica a) sorted by (key, tie): the first n_e of them are taken.
        expert_C = ids_N[candidates.route_C]
        tie_C = (candidates.replica_C - expert_C - slots.my_peer) % candidates.count_C
        width = int(key_C.max()) + 1 if key_C.numel() else 1
        order_C = torch.argsort((expert_C * width + key_C) * slots.num_slots + tie_C)
        rank_C = _occurrence(expert_C[order_C], slots.num_experts)
        wanted_E = torch.bincount(ids_N, minlength=slots.num_experts)
        taken = order_C[rank_C < wanted_E[expert_C[order_C]]]
        chosen_N = torch.empty_like(ids_N)
        chosen_N[torch.argsort(ids_N, stable=True)] = candidates.position_C[taken]
        return chosen_N


class QueueAware(LeastLoad):
    """Least load on top of the rows that peers announced for this step (`observe`)."""

    name = "queue_aware"

    def __init__(self) -> None:
        self._queued: tuple[int, ...] = ()

    def observe(self, rows_P: Sequence[int]) -> None:
        """Planned rows per peer slot, as the step agreement gave them."""
        self._queued = tuple(rows_P)

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        queued = self._queued if len(self._queued) == slots.num_peers else (0,) * slots.num_peers
        return self._fill(routes, slots, torch.tensor(queued, dtype=torch.int64, device=slots.peer_S.device))


class Assigned(_Indifferent):
    """The choices that calls with known routes came with: [N] manifest positions, by route id."""

    name = "assigned"

    def __init__(self, physical_slot_N: Tensor) -> None:
        self._physical_slot_N = physical_slot_N

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        return self._physical_slot_N[routes.first_route_id : routes.first_route_id + routes.num_routes]


_POLICIES: dict[str, type[ReplicaPolicy]] = {
    policy.name: policy for policy in (TokenHash, LocalityFirst, RoundRobin, LeastLoad, QueueAware)
}


def policy_named(name: str) -> ReplicaPolicy:
    """A fresh policy object; `ConfigError` lists the names."""
    if name not in _POLICIES:
        raise ConfigError(f"replica policy must be one of {', '.join(sorted(_POLICIES))}, found {name!r}")
    return _POLICIES[name]()


class _Candidates:
    """All (route, replica) pairs flattened: C = sum of replica counts over routes."""

    def __init__(self, ids_N: Tensor, base_N: Tensor, replicas_N: Tensor, slots: SlotMap) -> None:
        route_N = torch.arange(ids_N.numel(), device=ids_N.device)
        self.route_C = route_N.repeat_interleave(replicas_N)
        start_N = torch.cumsum(replicas_N, 0) - replicas_N
        self.replica_C = torch.arange(self.route_C.numel(), device=ids_N.device) - start_N[self.route_C]
        self.position_C = slots.replica_values_S[base_N[self.route_C] + self.replica_C]
        self.count_C = replicas_N[self.route_C]
        self._start_N = start_N

    def cheapest(self, cost_C: Tensor) -> Tensor:
        """The position of the cheapest candidate of each route [N]."""
        width = int(cost_C.max()) + 1 if cost_C.numel() else 1
        order_C = torch.argsort(self.route_C * width + cost_C)
        return self.position_C[order_C[self._start_N]]


def _replica_sets(routes: Routes, slots: SlotMap) -> tuple[Tensor, Tensor, Tensor]:
    ids_N = flat_ids(routes)
    return ids_N, slots.replica_offsets_E1[ids_N], slots.replicas_E[ids_N]


def _occurrence(keys_N: Tensor, num_keys: int) -> Tensor:
    """How many equal keys stand before each position: [3, 1, 3, 3, 1] -> [0, 0, 1, 2, 1]."""
    order_N = torch.argsort(keys_N, stable=True)
    counts = torch.bincount(keys_N, minlength=num_keys)
    start = torch.cumsum(counts, 0) - counts
    out_N = torch.empty_like(keys_N)
    out_N[order_N] = torch.arange(keys_N.numel(), device=keys_N.device) - start[keys_N[order_N]]
    return out_N


def _hash(ids_N: Tensor, salt: int) -> Tensor:
    """A 31-bit Fibonacci hash of (position, expert, salt): no state, the same on every device.

    The multiplier is 2^64 over the golden ratio, as a signed integer; the product wraps, and its high bits are kept.
    """
    start = salt * 1_000_003
    key_N = torch.arange(start, start + ids_N.numel(), device=ids_N.device).add_(ids_N, alpha=40503)
    return key_N.mul_(-7046029254386353131).bitwise_right_shift_(33).bitwise_and_(0x7FFFFFFF)
