"""Dispatch and combine: inverses, kept together (specification 0x03C2, 0x03C3).

Dispatch packs origin rows, exchanges them, and repacks what arrives to expert-major segments. Combine walks the same
three permutations back in reverse and sums. Letters: T tokens, N routes, R received rows, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from ray_moe.comm.transports import Transport
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.errors import StaleHandleError
from ray_moe.kernels.reference import permute, unpermute, weighted_combine


def dispatch(hidden_TD: Tensor, handle: DispatchHandle, header: HandleHeader, transport: Transport) -> Tensor:
    """Rows to their slots' owners; returns this peer's rows [R, D] in expert-major order.

    Raises `StaleHandleError` when handle, header and group are not of one generation and epoch,
    `IllegalTransitionError` when the handle was dispatched before, `CollectiveError` when the epoch breaks.
    """
    _fence(handle, header, transport, "dispatch")
    handle.lifetime.advance("submit_dispatch")
    send_rows_ND = permute(hidden_TD, handle.origin_token_N[handle.order_N])
    recv_rows_RD = transport.dispatch(send_rows_ND, handle.counts_PP)
    handle.lifetime.advance("complete_dispatch")
    return permute(recv_rows_RD, handle.expert_order_R)


def combine(rows_RD: Tensor, handle: DispatchHandle, header: HandleHeader, transport: Transport) -> Tensor:
    """Expert outputs back to their origins, then the gate-weighted sum per token; returns [T, D].

    Raises as `dispatch`; a second combine of one handle is an `IllegalTransitionError`.
    """
    _fence(handle, header, transport, "combine")
    handle.lifetime.advance("submit_combine")
    returned_ND = transport.combine(unpermute(rows_RD, handle.expert_order_R), handle.counts_PP)
    handle.lifetime.advance("complete_combine")
    gates_TK = handle.gates_TK if header.abi.gate_location == "origin" else None
    return weighted_combine(permute(returned_ND, handle.inverse_N), gates_TK, handle.top_k, rows_RD.dtype)


def _fence(handle: DispatchHandle, header: HandleHeader, transport: Transport, operation: str) -> None:
    handle.require(header, operation)
    group = transport.group.spec
    if group.epoch != header.epoch or group.process_group_id.value != header.process_group_id:
        raise StaleHandleError(
            f"{operation} of handle {handle.handle_id}: bound to group {header.process_group_id} epoch {header.epoch}, "
            f"the transport runs {group.process_group_id} epoch {group.epoch}"
        )
