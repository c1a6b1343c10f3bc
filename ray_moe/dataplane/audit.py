"""Audits of one invocation: what sampled steps prove beyond the checks of the hot path.

`check_handle` recomputes what a handle says from what it was made of. `trace_routes` sends every route's identity
along the rows' own path and back. Letters: N routes, R received rows, P peers, S slots.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ray_moe.comm.transports import Transport
from ray_moe.dataplane.dispatch import to_experts, to_senders
from ray_moe.dataplane.handle import DispatchHandle
from ray_moe.dataplane.plan import SlotMap, expert_order
from ray_moe.errors import HandleError
from ray_moe.kernels.reference import permute, stable_order, unpermute


def check_handle(handle: DispatchHandle, slots: SlotMap) -> None:
    """Recount, and recompute every order, offset and split; `HandleError` names the first part that disagrees.

    `slots` is the placement that the handle was bound under, as this peer compiled it.
    """
    mine = slots.my_peer
    keys_N = slots.dispatch_S[handle.physical_slot_N]
    order_N, counts_S = stable_order(keys_N, slots.num_slots)
    sent = [int(counts_S[start:end].sum()) for start, end in pairwise(slots.peer_bounds_P1)]
    positions_N = torch.arange(handle.route_count, device=handle.order_N.device)
    received_S = [sum(column) for column in zip(*handle.recv_counts_PS, strict=True)]
    parts = {
        "count": list(handle.send_counts_P) == sent and sum(sent) == handle.route_count,
        "offset": handle.send_offsets_P1 == tuple(accumulate(sent, initial=0)),
        "stable order": torch.equal(handle.order_N, order_N),
        "split vector": handle.counts_PP[mine] == handle.send_counts_P
        and tuple(row[mine] for row in handle.counts_PP) == handle.recv_counts_P
        and tuple(map(sum, handle.recv_counts_PS)) == handle.recv_counts_P,
        "local slot offset": handle.expert_offsets_S1 == tuple(accumulate(received_S, initial=0)),
        "local slot order": torch.equal(handle.expert_order_R, expert_order(handle.recv_counts_PS, keys_N.device)),
        "inverse route": torch.equal(permute(handle.order_N, handle.inverse_N), positions_N),
    }
    for part, agrees in parts.items():
        if not agrees:
            raise _refusal(handle, slots, f"its {part} does not follow from its routes")


def trace_routes(handle: DispatchHandle, slots: SlotMap, transport: Transport) -> None:
    """Each route must reach a segment of its own expert exactly once, and come back to its own place (0x01B).

    Two exchanges of [*, 3] int64 rows, in which all peers take part: (expert's slot in dispatch order, source peer
    slot, semantic position). Raises `HandleError` after both, so that the peers stay in step.
    """
    positions_N = torch.arange(handle.route_count, device=handle.order_N.device)
    identity_N3 = torch.stack(
        [slots.dispatch_S[handle.physical_slot_N], torch.full_like(positions_N, slots.my_peer), positions_N], dim=1
    )
    arrived_R3 = to_experts(transport.dispatch(permute(identity_N3, handle.order_N), handle.counts_PP), handle)
    returned_N3 = unpermute(transport.combine(to_senders(arrived_R3, handle), handle.counts_PP), handle.order_N)
    slot_R = _segments(handle, slots)
    if not torch.equal(arrived_R3[:, 0], slot_R):
        raise _refusal(handle, slots, "rows of other experts have arrived in its segments")
    if len(torch.unique(arrived_R3[:, 1:], dim=0)) != len(arrived_R3):
        raise _refusal(handle, slots, "a route has arrived more than once")
    if not torch.equal(returned_N3, identity_N3):
        raise _refusal(handle, slots, "its routes have come back to other places")


def _segments(handle: DispatchHandle, slots: SlotMap) -> Tensor:
    """The slot, in dispatch order, whose segment each expert-major row lies in [R]."""
    start, end = slots.peer_bounds_P1[slots.my_peer], slots.peer_bounds_P1[slots.my_peer + 1]
    rows_S = torch.tensor(handle.expert_offsets_S1, device=handle.order_N.device).diff()
    return torch.arange(start, end, device=handle.order_N.device).repeat_interleave(rows_S)


def _refusal(handle: DispatchHandle, slots: SlotMap, what: str) -> HandleError:
    return HandleError(
        f"handle {handle.handle_id} of layer {slots.layer} (generation {slots.generation}, "
        f"epoch {handle.header.epoch}): {what}"
    )
