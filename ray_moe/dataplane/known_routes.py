"""Handles for calls whose routes are known before any peer has them: a bare layer that somebody else's model calls.

Whoever grants the lease binds the call: replicas are chosen, counts and offsets follow, the routes are sealed. The
handle then is all that its origin needs beside the hidden rows, and `routes_of` reads the routes back from it.

A worked example: one layer, experts 0 and 1 in slots q0 (peer 0) and q1 (peer 1), the origin is peer 0, and two tokens
want (0, 1) and (1, 1). Positions in the manifest are 0 1 1 1, the send order 0 1 2 3, the counts per peer 1 and 3.
Letters: T tokens, K top-k, N = T * K routes, P peers, S slots.
"""

from __future__ import annotations

import torch

from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.dataplane.phases import Phase
from ray_moe.dataplane.plan import SlotMap, agree_layouts, layout_record, make_plan
from ray_moe.dataplane.policies import ReplicaPolicy
from ray_moe.errors import NotInReplicaSetError, StaleHandleError
from ray_moe.routes import Routes

BARE: Phase = "bare"


def bind_known_routes(
    header: HandleHeader, slots: SlotMap, routes: Routes, policy: ReplicaPolicy, number: int
) -> DispatchHandle:
    """The handle of one call of `slots.layer` from the origin `slots.my_peer`, sealed (0x01D2, 0x0CB).

    `number` tells the holder's calls apart and takes the step's place: which step runs it is not known yet. The counts
    are those of this call alone; a step that runs it together with others agrees on their sum. Raises `RoutesError` for
    ids outside [0, E), `StaleHandleError` when slots and header are of two generations.
    """
    if slots.generation != header.generation:
        raise StaleHandleError(f"slots of generation {slots.generation} cannot serve a lease of {header.generation}")
    plan = make_plan(routes, slots, policy)
    mine = layout_record([plan], header.digest64, number)
    lines = torch.zeros(slots.num_peers, mine.numel(), dtype=torch.int64)
    lines[:, :2] = mine[:2]  # the others are in the same scope, and bring no rows
    lines[slots.my_peer] = mine
    (layout,) = agree_layouts(lines, slots)
    return header.bind(number, BARE, slots.layer, 0, plan, layout, semantic_digest=routes.seal())


def routes_of(handle: DispatchHandle, slots: SlotMap, origin: str) -> Routes:
    """The routes that `handle` was bound to, read back from its slots at the origin `origin`.

    Raises `NotInReplicaSetError` for a position that the layer does not have, `StaleHandleError` for another layer, and
    `RoutesError` when they are not the routes that were sealed for this origin.
    """
    if handle.layer != slots.layer:
        raise StaleHandleError(f"handle {handle.handle_id} is for layer {handle.layer}, not for layer {slots.layer}")
    positions_N = handle.physical_slot_N
    if positions_N.numel():
        low, high = (int(bound) for bound in torch.aminmax(positions_N))
        if low < 0 or high >= slots.num_slots:
            raise NotInReplicaSetError(
                f"handle {handle.handle_id}: manifest position {low if low < 0 else high} is outside "
                f"[0, {slots.num_slots})"
            )
    routes = Routes(
        slots.phy2log_S.index_select(0, positions_N.to(slots.phy2log_S.device)).view(-1, handle.top_k),
        handle.gates_TK,
        handle.execution_scope_id,
        origin,
    )
    routes.verify(handle.semantic_digest or "")
    return routes


def call_scope(holder: str, layer: int) -> str:
    """The execution scope of one call, by which its seal differs from that of every other call."""
    return f"{holder}/{BARE}/l{layer}"


def origin_of(rank: int) -> str:
    """How a peer names itself as the origin of routes."""
    return f"rank-{rank}"
