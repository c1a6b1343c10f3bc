"""Audits of one invocation: what sampled steps prove beyond the checks of the hot path.

`check_handles` recomputes what the handles say from what they were made of. `trace_routes` sends every route's identity
along the rows' own path and back. Letters: N routes, n rows of one handle, R received rows, P peers, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ray_moe.comm.exchange import Exchange
from ray_moe.comm.transports import Transport
from ray_moe.dataplane.completion import EVENTS, Event, check_events
from ray_moe.dataplane.dispatch import to_experts, to_senders
from ray_moe.dataplane.handle import DispatchHandle
from ray_moe.dataplane.ledger import Buffer, check_buffers, peak
from ray_moe.dataplane.plan import Plan, SlotMap, expert_order
from ray_moe.errors import HandleError
from ray_moe.evidence import LiveBytes
from ray_moe.kernels.reference import permute, stable_order
from ray_moe.topology_ledger import FanOut, RouteCounts, fan_out, split_vectors


def audit(handles: Sequence[DispatchHandle], plans: Sequence[Plan], slots: SlotMap, transport: Transport) -> FanOut:
    """Everything below, for the handles of one invocation (one each for a plan, or the chunks of the one plan).

    All peers take part. Raises `HandleError` naming the handle and what is wrong with it.
    """
    check_lifetimes(handles)
    for handle in handles:
        trace_routes(handle, slots, transport)
    per_plan = len(handles) // len(plans)
    for index in range(len(plans)):
        check_handles(handles[index * per_plan : (index + 1) * per_plan], slots)
    _check_splits(handles, slots)
    ranks = slots.group.peers
    return fan_out(
        slots.topology,
        [
            {ranks[peer] for peer in peers}
            for plan in plans
            for peers in slots.peer_S[plan.physical_slot_N].view(-1, plan.routes.top_k).tolist()
        ],
    )


def _check_splits(handles: Sequence[DispatchHandle], slots: SlotMap) -> None:
    """Splits derived through global ranks equal those in peer-slot order (0x07B)."""
    me = slots.group.peers[slots.my_peer]
    for handle in handles:
        splits = split_vectors(RouteCounts.from_peers(handle.counts_PP, slots.group), slots.group)
        if (splits.send[me], splits.receive[me]) != (handle.send_counts_P, handle.recv_counts_P):
            raise _refusal(handle, slots, "split vector")


def check_handles(handles: Sequence[DispatchHandle], slots: SlotMap) -> None:
    """Recount, and recompute every order, offset and split; `HandleError` names the first part that disagrees.

    `handles` are those of one plan. `slots` is the placement that they were bound under, as this peer compiled it.
    """
    mine, whole = slots.my_peer, handles[0]
    keys_N = slots.dispatch_S[whole.physical_slot_N]
    order_N, counts_S = stable_order(keys_N, slots.num_slots)
    sent = [int(counts_S[start:end].sum()) for start, end in pairwise(slots.peer_bounds_P1)]
    if sum(sent) != whole.route_count or [sum(each) for each in _columns(handles)] != sent:
        raise _refusal(whole, slots, "count")
    at_N = torch.empty_like(order_N).index_copy_(0, order_N, torch.arange(order_N.numel(), device=order_N.device))
    covered = torch.cat([handle.order_N for handle in handles])
    if not torch.equal(covered.sort().values, torch.arange(whole.route_count, device=covered.device)):
        raise _refusal(whole, slots, "inverse route")
    for handle in handles:
        _check_one(handle, slots, at_N, mine)


def _columns(handles: Sequence[DispatchHandle]) -> list[tuple[int, ...]]:
    return list(zip(*(handle.send_counts_P for handle in handles), strict=True))


def _check_one(handle: DispatchHandle, slots: SlotMap, at_N: Tensor, mine: int) -> None:
    """`at_N` is the send position that the whole plan gives each route: a handle's rows keep that order."""
    received_S = [sum(column) for column in zip(*handle.recv_counts_PS, strict=True)]
    positions_n = at_N[handle.order_N]
    parts = {
        "offset": handle.send_offsets_P1 == tuple(accumulate(handle.send_counts_P, initial=0)),
        "stable order": bool((positions_n.diff() > 0).all()),
        "split vector": handle.counts_PP[mine] == handle.send_counts_P
        and tuple(row[mine] for row in handle.counts_PP) == handle.recv_counts_P
        and tuple(map(sum, handle.recv_counts_PS)) == handle.recv_counts_P
        and _destinations(handle, slots) == list(handle.send_counts_P),
        "inverse route": handle.order_N.numel() < handle.route_count
        or torch.equal(permute(handle.order_N, handle.inverse_N), _counting(handle.route_count, at_N)),
        "local slot offset": handle.expert_offsets_S1 == tuple(accumulate(received_S, initial=0)),
        "local slot order": torch.equal(
            handle.expert_order_R, expert_order(handle.recv_counts_PS, handle.order_N.device)
        ),
    }
    for part, agrees in parts.items():
        if not agrees:
            raise _refusal(handle, slots, part)


def _destinations(handle: DispatchHandle, slots: SlotMap) -> list[int]:
    peers_n = slots.peer_S[handle.physical_slot_N[handle.order_N]]
    return torch.bincount(peers_n, minlength=slots.num_peers).tolist()


def check_lifetimes(handles: Sequence[DispatchHandle]) -> list[Buffer]:
    """The events of each handle came in their order, and no buffer ended before its last reader (0x03D4, 0x03D5).

    Returns all buffers of the invocation. An account of its own beside what refused on the way; the handles themselves
    are still held. Raises `CompletionError`, and `HandleError` when the buffers' peak is not what was counted.
    """
    buffers: list[Buffer] = []
    for handle in handles:
        lives = handle.completion.lives()
        epochs = {**handle.completion.epochs, Event.HANDLE_RELEASED: max(life.until for life in lives)}
        check_events(EVENTS, epochs)
        own = [Buffer(life.name, LiveBytes(life.nbytes), life.since, life.until, life.last_reader) for life in lives]
        check_buffers(own, epochs)
        buffers += own
    counted = handles[0].completion.peak_bytes
    if peak(buffers)[0] != counted:
        raise HandleError(
            f"handle {handles[0].handle_id}: the invocation's buffers hold {peak(buffers)[0].value} bytes at most, "
            f"{counted.value} were counted"
        )
    return buffers


def trace_routes(handle: DispatchHandle, slots: SlotMap, transport: Transport) -> None:
    """Each route must reach a segment of its own expert exactly once, and come back to its own place (0x01B).

    Two exchanges of [*, 3] int64 rows, in which all peers take part: (expert's slot in dispatch order, source peer
    slot, semantic position). Raises `HandleError` after both, so that the peers stay in step.
    """
    positions_n = handle.order_N
    identity_n3 = torch.stack(
        [
            slots.dispatch_S[handle.physical_slot_N[positions_n]],
            torch.full_like(positions_n, slots.my_peer),
            positions_n,
        ],
        dim=1,
    )
    arrived_R3 = to_experts(_exchanged(transport.dispatch(identity_n3, handle.counts_PP)), handle)
    returned_n3 = _exchanged(transport.combine(to_senders(arrived_R3, handle), handle.counts_PP))
    if not torch.equal(arrived_R3[:, 0], _segments(handle, slots)):
        raise _refusal(handle, slots, "rows", "of other experts have arrived in its segments")
    if len(torch.unique(arrived_R3[:, 1:], dim=0)) != len(arrived_R3):
        raise _refusal(handle, slots, "rows", "hold a route that has arrived more than once")
    if not torch.equal(returned_n3, identity_n3):
        raise _refusal(handle, slots, "rows", "have come back to other places")


def _exchanged(exchange: Exchange) -> Tensor:
    rows = exchange.payload()
    exchange.complete()
    return rows


def _segments(handle: DispatchHandle, slots: SlotMap) -> Tensor:
    """The slot, in dispatch order, whose segment each expert-major row lies in [R]."""
    start, end = slots.peer_bounds_P1[slots.my_peer], slots.peer_bounds_P1[slots.my_peer + 1]
    rows_S = torch.tensor(handle.expert_offsets_S1, device=handle.order_N.device).diff()
    return torch.arange(start, end, device=handle.order_N.device).repeat_interleave(rows_S)


def _counting(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _refusal(
    handle: DispatchHandle, slots: SlotMap, part: str, what: str = "does not follow from its routes"
) -> HandleError:
    return HandleError(
        f"handle {handle.handle_id} of layer {slots.layer} (generation {slots.generation}, "
        f"epoch {handle.header.epoch}): its {part} {what}"
    )
