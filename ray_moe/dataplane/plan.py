"""Plan: one compatible replica per route, then counts, offsets and a stable order (specification 0x03B).

`SlotMap` is one layer of a placement compiled to tensors for one peer. `make_plan` is local and pure; `agree_layout`
turns the counts of all peers into the layout that dispatch and combine follow. Letters: T tokens, K top-k, N = T * K
routes, E logical experts, S physical slots, P peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ray_moe.comm.transports import runs, uploaded
from ray_moe.errors import (
    CountMismatchError,
    DuplicateExecutionError,
    LostRouteError,
    NotInReplicaSetError,
    PlacementError,
)
from ray_moe.identity import GlobalRank
from ray_moe.kernels.reference import stable_order
from ray_moe.placement import LayerPlacement, PlacementSnapshot
from ray_moe.routes import Routes
from ray_moe.topology import ProcessGroupSpec, Topology

if TYPE_CHECKING:
    from ray_moe.dataplane.policies import ReplicaPolicy

# A refused invocation accepts no routes; no plan does less than that.
_REFUSED = -1


@dataclass(frozen=True, eq=False)
class SlotMap:
    """One layer's placement as seen from one peer.

    *Dispatch order* sorts slots by (peer slot of the owner, manifest position); split vectors, counts and segments all
    follow it. `dispatch_S` [S] maps a manifest position to it. `replica_offsets_E1`/`replica_values_S` are the replica
    sets (CSR over manifest positions), `replicas_E` their sizes, `first_replica_E` the first of each; `peer_S` and
    `domain_S` give each slot's peer slot and a domain number.
    `peer_bounds_P1` bounds each peer's slots in dispatch order; `pool_slots` are this peer's own storage indices in
    that order. `group` and `topology` are the placement's own.
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
    first_replica_E: Tensor
    replicated: bool
    peer_bounds_P1: tuple[int, ...]
    pool_slots: tuple[int, ...]
    group: ProcessGroupSpec
    topology: Topology

    @property
    def num_slots(self) -> int:
        return self.peer_bounds_P1[-1]

    @property
    def most_slots(self) -> int:
        """The slots of the peer that has the most."""
        return max(end - start for start, end in pairwise(self.peer_bounds_P1))

    @staticmethod
    def compile(
        snapshot: PlacementSnapshot, placement: LayerPlacement, rank: GlobalRank, device: torch.device
    ) -> SlotMap:
        """Compile `placement` for the peer that is global `rank`.

        Raises `PlacementError` when the rank has no seat or no domain, and for slots that hold a part of an expert: two
        parts are no replicas of one another.
        """
        group, owner = snapshot.group, snapshot.topology.owner
        mine = group.peer_slot(rank)
        if rank not in owner:
            raise PlacementError(f"rank {rank} belongs to no domain of topology {snapshot.topology.version}")
        for slot in placement.slots:
            if slot.shard.count != 1:
                raise PlacementError(
                    f"layer {placement.layer}: slot {slot.physical_slot_id} holds part {slot.shard.index} of "
                    f"{slot.shard.count} of an expert; whole experts are dispatched"
                )
        peers = [group.peer_slot(slot.destination_rank) for slot in placement.slots]
        domains = {name: number for number, name in enumerate(sorted(set(owner.values())))}
        in_dispatch_order = sorted(range(len(peers)), key=lambda position: (peers[position], position))
        dispatch = [0] * len(peers)
        for index, position in enumerate(in_dispatch_order):
            dispatch[position] = index
        per_peer = [peers.count(peer) for peer in range(len(group))]

        def table(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        offsets = placement.log2phy_offsets
        replicas = [end - start for start, end in pairwise(offsets)]
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
            first_replica_E=table([placement.log2phy_values[start] for start in offsets[:-1]]),
            replicated=max(replicas) > 1,
            peer_bounds_P1=tuple(accumulate(per_peer, initial=0)),
            pool_slots=tuple(
                placement.slots[position].pool_slot for position in in_dispatch_order if peers[position] == mine
            ),
            group=group,
            topology=snapshot.topology,
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """What one origin will send: `physical_slot_N` (manifest positions) in semantic order, and the order to send it in.

    `order_N` maps send position to semantic position, stable by (destination peer slot, physical slot, semantic
    position). `counts_S` counts rows per slot in dispatch order.
    """

    generation: int
    routes: Routes
    physical_slot_N: Tensor
    order_N: Tensor
    counts_S: Tensor


def make_plan(routes: Routes, slots: SlotMap, policy: ReplicaPolicy) -> Plan:
    """Choose a replica for each route by `policy` and lay the routes out for sending.

    Raises `RoutesError` when an expert id is outside [0, E). A policy never changes a route's expert: its choice is
    checked like any other assignment.
    """
    routes.checked(slots.num_experts)
    if not slots.replicated:
        return _lay_out(routes, slots.first_replica_E.index_select(0, flat_ids(routes)), slots)
    return plan_assignment(routes, policy.choose(routes, slots), slots)


def plan_assignment(routes: Routes, physical_slot_N: Tensor, slots: SlotMap) -> Plan:
    """The plan for an assignment that is already made; `physical_slot_N` are manifest positions in semantic order.

    Raises `LostRouteError` or `DuplicateExecutionError` when there are fewer or more positions than routes, and
    `NotInReplicaSetError` when a route is given a slot of another expert, even when all counts are right.
    """
    ids_N = flat_ids(routes)
    where = f"layer {slots.layer} generation {slots.generation}"
    if physical_slot_N.shape != ids_N.shape:
        kind = LostRouteError if physical_slot_N.numel() < ids_N.numel() else DuplicateExecutionError
        raise kind(f"{where}: {ids_N.numel()} routes were given {physical_slot_N.numel()} slots")
    inside_N = physical_slot_N.clamp(0, slots.num_slots - 1)
    stored_N = slots.phy2log_S.index_select(0, inside_N)
    if not (torch.equal(stored_N, ids_N) and torch.equal(inside_N, physical_slot_N)):
        route = int(((stored_N != ids_N) | (inside_N != physical_slot_N)).nonzero()[0, 0])
        raise NotInReplicaSetError(
            f"{where}: route {route} wants expert {int(ids_N[route])}, manifest position "
            f"{int(physical_slot_N[route])} of {slots.num_slots} is not one of its replicas"
        )
    return _lay_out(routes, physical_slot_N, slots)


def _lay_out(routes: Routes, physical_slot_N: Tensor, slots: SlotMap) -> Plan:
    order_N, counts_S = stable_order(slots.dispatch_S.index_select(0, physical_slot_N), slots.num_slots)
    return Plan(slots.generation, routes, physical_slot_N, order_N, counts_S)


def flat_ids(routes: Routes) -> Tensor:
    """Logical experts [N] int64 in semantic order."""
    return routes.topk_ids.reshape(-1).to(torch.int64)


@dataclass(frozen=True, eq=False)
class Layout:
    """What all peers agreed to move for one invocation; field meanings as in `DispatchHandle`.

    `slot_rows_S` are the rows of each slot in dispatch order, over all peers; `routes_P` the routes of each origin.
    """

    send_counts_P: tuple[int, ...]
    send_offsets_P1: tuple[int, ...]
    recv_counts_P: tuple[int, ...]
    recv_counts_PS: tuple[tuple[int, ...], ...]
    counts_PP: tuple[tuple[int, ...], ...]
    expert_offsets_S1: tuple[int, ...]
    slot_rows_S: tuple[int, ...]
    routes_P: tuple[int, ...]


def layout_record(plans: Sequence[Plan], header_digest64: int, invocation: int) -> Tensor:
    """This peer's line of the count exchange [2 + B * (1 + S)] for a unit in B batches.

    Header digest and invocation, then per batch its accepted routes and its counts per slot.
    """
    device = plans[0].counts_S.device
    parts = [uploaded([header_digest64, invocation, plans[0].routes.num_routes], device), plans[0].counts_S]
    for plan in plans[1:]:
        parts += [uploaded([plan.routes.num_routes], device), plan.counts_S]
    return torch.cat(parts)


def refusal_record(slots: SlotMap, header_digest64: int, invocation: int, batches: int = 1) -> Tensor:
    """The line of a peer that cannot plan: `agree_layouts` refuses the invocation on every peer that reads it."""
    line = [header_digest64, invocation] + ([_REFUSED] + [0] * slots.num_slots) * batches
    return torch.tensor(line, dtype=torch.int64, device=slots.dispatch_S.device)


def has_refusal(records: Tensor) -> bool:
    """Whether one of the lines that came is a `refusal_record`."""
    return records.shape[1] > 2 and bool((records[:, 2] == _REFUSED).any())


def agree_layouts(records: Tensor, slots: SlotMap, batches: int = 1) -> tuple[Layout, ...]:
    """The layout of each batch from all peers' `layout_record` lines, `records` [P, 2 + B * (1 + S)] by peer slot.

    Every peer runs the same checks on the same numbers, so that all refuse together before any payload moves: equal
    header digests and invocations, no refusal, and counts that sum to the accepted routes (0x01B). Raises
    `CountMismatchError`.
    """
    lines = records.tolist()
    width = 1 + slots.num_slots
    _check_scope(lines, slots, 2 + batches * width)
    starts = range(2, 2 + batches * width, width)
    return tuple(_layout([line[start : start + width] for line in lines], slots) for start in starts)


def _layout(lines: list[list[int]], slots: SlotMap) -> Layout:
    """One batch's, from lines of (accepted routes, counts per slot)."""
    _check_counts(lines, slots)
    bounds, mine = slots.peer_bounds_P1, slots.my_peer
    spans = [slice(1 + start, 1 + end) for start, end in pairwise(bounds)]
    counts_PP = tuple(tuple(sum(line[span]) for span in spans) for line in lines)
    recv_counts_PS = tuple(tuple(line[spans[mine]]) for line in lines)
    return Layout(
        send_counts_P=counts_PP[mine],
        send_offsets_P1=tuple(accumulate(counts_PP[mine], initial=0)),
        recv_counts_P=tuple(row[mine] for row in counts_PP),
        recv_counts_PS=recv_counts_PS,
        counts_PP=counts_PP,
        expert_offsets_S1=tuple(accumulate(map(sum, zip(*recv_counts_PS, strict=True)), initial=0)),
        slot_rows_S=tuple(map(sum, zip(*(line[1:] for line in lines), strict=True))),
        routes_P=tuple(line[0] for line in lines),
    )


def _check_scope(lines: list[list[int]], slots: SlotMap, width: int) -> None:
    where = f"layer {slots.layer} generation {slots.generation}"
    if len(lines) != slots.num_peers or len(lines[0]) != width:
        raise CountMismatchError(
            f"{where}: {len(lines)} lines of {len(lines[0])} numbers came, {slots.num_peers} peers with "
            f"{slots.num_slots} slots send {slots.num_peers} lines of {width}"
        )
    mine = lines[slots.my_peer]
    for peer, line in enumerate(lines):
        if line[:2] != mine[:2]:
            raise CountMismatchError(
                f"{where}: peer slot {peer} is at header/invocation {line[:2]}, peer slot {slots.my_peer} at {mine[:2]}"
            )


def _check_counts(lines: list[list[int]], slots: SlotMap) -> None:
    where = f"layer {slots.layer} generation {slots.generation}"
    for peer, line in enumerate(lines):
        if line[0] == _REFUSED:
            raise CountMismatchError(f"{where}: peer slot {peer} refused its own routes; its error says why")
        if sum(line[1:]) != line[0] or min(line[1:]) < 0:
            raise CountMismatchError(
                f"{where}: peer slot {peer} accepted {line[0]} routes but its counts sum to {sum(line[1:])}"
            )


def expert_order(recv_counts_PS: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Receive positions in expert-major order [R]: stable by (local slot, source peer, send position), 0x03C2.

    Rows arrive source-major, each source's in slot order. Example: source 0 sends 1 and 2 rows to the two slots,
    source 1 sends 1 and 0: [[1, 2], [1, 0]] -> [0, 3, 1, 2].
    """
    num_peers, num_slots = len(recv_counts_PS), len(recv_counts_PS[0])
    counts = list(chain.from_iterable(recv_counts_PS))
    arrived_at = list(accumulate(counts, initial=0))
    blocks = [source * num_slots + slot for slot in range(num_slots) for source in range(num_peers)]
    # Rows of equal (slot, source) move as one block.
    return runs([arrived_at[block] for block in blocks], [counts[block] for block in blocks], device)
