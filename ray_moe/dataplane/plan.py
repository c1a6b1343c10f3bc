"""Plan: one compatible replica per route, then counts, offsets and a stable order (specification 0x03B).

`SlotMap` is one layer of a placement compiled to tensors for one peer. `make_plan` is local and pure; `agree_layout`
turns the counts of all peers into the layout that dispatch and combine follow. Letters: T tokens, K top-k, N = T * K
routes, E logical experts, S physical slots, P peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ray_moe.errors import CountMismatchError, NotInReplicaSetError
from ray_moe.identity import GlobalRank
from ray_moe.kernels.reference import stable_order
from ray_moe.placement import LayerPlacement, PlacementSnapshot
from ray_moe.routes import Routes

if TYPE_CHECKING:
    from ray_moe.dataplane.policies import ReplicaPolicy


@dataclass(frozen=True)
class SlotMap:
    """One layer's placement as seen from one peer.

    *Dispatch order* sorts slots by (peer slot of the owner, manifest position); split vectors, counts and segments all
    follow it. `dispatch_S` [S] maps a manifest position to it. `replica_offsets_E1`/`replica_values_S` are the replica
    sets (CSR over manifest positions); `peer_S` and `domain_S` give each slot's peer slot and a domain number.
    `peer_bounds_P1` bounds each peer's slots in dispatch order; `pool_slots` are this peer's own storage indices in
    that order.
    """

    generation: int
    layer: int
    num_experts: int
    my_peer: int
    num_peers: int
    phy2log_S: Tensor
    peer_S: Tensor
    domain_S: Tensor
    my_domain: int
    dispatch_S: Tensor
    replica_offsets_E1: Tensor
    replica_values_S: Tensor
    replicas_E: Tensor
    replicated: bool
    peer_bounds_P1: tuple[int, ...]
    pool_slots: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        return self.peer_bounds_P1[-1]

    @staticmethod
    def compile(snapshot: PlacementSnapshot, placement: LayerPlacement, rank: GlobalRank, device: torch.device) -> SlotMap:
        """Compile `placement` for the peer that is global `rank`; raises `PlacementError` when it has no seat."""
        group, owner = snapshot.group, snapshot.topology.owner
        peers = [group.peer_slot(slot.destination_rank) for slot in placement.slots]
        domains = {name: number for number, name in enumerate(sorted(set(owner.values())))}
        in_dispatch_order = sorted(range(len(peers)), key=lambda position: (peers[position], position))
        dispatch = [0] * len(peers)
        for index, position in enumerate(in_dispatch_order):
            dispatch[position] = index
        per_peer = [peers.count(peer) for peer in range(len(group))]
        mine = group.peer_slot(rank)

        def table(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        offsets = placement.log2phy_offsets
        replicas = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
        return SlotMap(
            generation=snapshot.generation,
            layer=placement.layer,
            num_experts=placement.num_logical_experts,
            my_peer=mine,
            num_peers=len(group),
            phy2log_S=table(placement.phy2log),
            peer_S=table(peers),
            domain_S=table([domains[slot.topology_domain_id] for slot in placement.slots]),
            my_domain=domains[owner[rank]],
            dispatch_S=table(dispatch),
            replica_offsets_E1=table(offsets),
            replica_values_S=table(placement.log2phy_values),
            replicas_E=table(replicas),
            replicated=max(replicas) > 1,
            peer_bounds_P1=tuple(accumulate(per_peer, initial=0)),
            pool_slots=tuple(
                placement.slots[position].pool_slot for position in in_dispatch_order if peers[position] == mine
            ),
        )


@dataclass(frozen=True)
class Plan:
    """What one origin will send, in semantic order and in send order.

    Send order is stable by (destination peer slot, physical slot, semantic position). `counts_S` counts rows per slot
    in dispatch order.
    """

    generation: int
    routes: Routes
    origin_token_N: Tensor
    route_slot_N: Tensor
    physical_slot_N: Tensor
    order_N: Tensor
    inverse_N: Tensor
    counts_S: Tensor


def make_plan(routes: Routes, slots: SlotMap, policy: ReplicaPolicy) -> Plan:
    """Choose a replica for each route by `policy` and lay the routes out for sending.

    Raises `RoutesError` when an expert id is outside [0, E). A policy never changes a route's expert: its choice is
    checked like any other assignment.
    """
    return plan_assignment(routes, policy.choose(routes.checked(slots.num_experts), slots), slots)


def plan_assignment(routes: Routes, physical_slot_N: Tensor, slots: SlotMap) -> Plan:
    """The plan for an assignment that is already made; `physical_slot_N` are manifest positions in semantic order.

    Raises `NotInReplicaSetError` when a route is given a slot of another expert, even when all counts are right.
    """
    ids_N = routes.topk_ids.reshape(-1).to(torch.int64)
    wrong_N = slots.phy2log_S[physical_slot_N] != ids_N
    if bool(wrong_N.any()):
        route = int(wrong_N.nonzero()[0, 0])
        raise NotInReplicaSetError(
            f"layer {slots.layer} generation {slots.generation}: route {route} wants expert {int(ids_N[route])}, "
            f"slot at manifest position {int(physical_slot_N[route])} stores another"
        )
    order_N, inverse_N, counts_S = stable_order(slots.dispatch_S[physical_slot_N], slots.num_slots)
    semantic_N = torch.arange(ids_N.numel(), device=ids_N.device)
    return Plan(
        generation=slots.generation,
        routes=routes,
        origin_token_N=semantic_N // routes.top_k,
        route_slot_N=semantic_N % routes.top_k,
        physical_slot_N=physical_slot_N,
        order_N=order_N,
        inverse_N=inverse_N,
        counts_S=counts_S,
    )


@dataclass(frozen=True)
class Layout:
    """What all peers agreed to move for one invocation; field meanings as in `DispatchHandle`."""

    send_counts_P: tuple[int, ...]
    send_offsets_P1: tuple[int, ...]
    recv_counts_P: tuple[int, ...]
    counts_PP: tuple[tuple[int, ...], ...]
    expert_order_R: Tensor
    expert_offsets_S1: tuple[int, ...]


def layout_record(plan: Plan, header_digest64: int, invocation: int) -> Tensor:
    """This peer's line of the count exchange: header digest, invocation, accepted routes, then counts per slot [3 + S]."""
    prefix = [header_digest64, invocation, plan.routes.num_routes]
    return torch.cat([torch.tensor(prefix, dtype=torch.int64, device=plan.counts_S.device), plan.counts_S])


def agree_layout(records: Tensor, slots: SlotMap) -> Layout:
    """The layout from all peers' `layout_record` lines, `records` [P, 3 + S] in peer-slot order.

    Every peer runs the same checks on the same numbers, so that all refuse together before any payload moves: equal
    header digests and invocations, and counts that sum to the accepted routes (0x01B). Raises `CountMismatchError`.
    """
    lines = records.tolist()
    mine = lines[slots.my_peer]
    for peer, line in enumerate(lines):
        if line[:2] != mine[:2]:
            raise CountMismatchError(
                f"layer {slots.layer} generation {slots.generation}: peer slot {peer} is at header/invocation "
                f"{line[:2]}, peer slot {slots.my_peer} at {mine[:2]}"
            )
        if sum(line[3:]) != line[2] or min(line[3:]) < 0:
            raise CountMismatchError(
                f"layer {slots.layer} generation {slots.generation}: peer slot {peer} accepted {line[2]} routes "
                f"but its counts sum to {sum(line[3:])}"
            )
    bounds = slots.peer_bounds_P1
    counts_PP = tuple(
        tuple(sum(line[3 + start : 3 + end]) for start, end in zip(bounds, bounds[1:], strict=False)) for line in lines
    )
    start, end = bounds[slots.my_peer], bounds[slots.my_peer + 1]
    received_PS = [line[3 + start : 3 + end] for line in lines]
    send_counts_P = counts_PP[slots.my_peer]
    return Layout(
        send_counts_P=send_counts_P,
        send_offsets_P1=tuple(accumulate(send_counts_P, initial=0)),
        recv_counts_P=tuple(row[slots.my_peer] for row in counts_PP),
        counts_PP=counts_PP,
        expert_order_R=_expert_order(received_PS, records.device),
        expert_offsets_S1=tuple(accumulate((sum(column) for column in zip(*received_PS, strict=True)), initial=0)),
    )


def _expert_order(received_PS: list[list[int]], device: torch.device) -> Tensor:
    """Receive positions in expert-major order: stable by (local slot, source peer, send position), 0x03C2."""
    counts_PS = torch.tensor(received_PS, dtype=torch.int64)
    num_peers, num_slots = counts_PS.shape
    slot_R = torch.arange(num_slots).repeat(num_peers).repeat_interleave(counts_PS.view(-1))
    return torch.argsort(slot_R, stable=True).to(device)
