"""Dispatch and combine: inverses, kept together (specification 0x03C2, 0x03C3).

Dispatch packs origin rows, exchanges them, and repacks what arrives to expert-major segments. Combine walks the same
three permutations back in reverse and sums. Letters: T tokens, K top-k, N = T * K routes, R received rows, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ray_moe.comm.transports import Transport
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.errors import HandleError, StaleHandleError
from ray_moe.kernels.reference import permute, unpermute, weighted_combine


def dispatch(hidden_TD: Tensor, handle: DispatchHandle, header: HandleHeader, transport: Transport) -> Tensor:
    """Rows to their slots' owners; returns this peer's rows [R, D] in expert-major order.

    Raises `StaleHandleError` when handle, header and group are not of one generation and epoch, `HandleError` when the
    rows have another dtype than the ABI's payload, `IllegalTransitionError` when the handle was dispatched before,
    `CollectiveError` when the epoch breaks.
    """
    _fence(handle, header, transport, "dispatch")
    if hidden_TD.dtype != header.abi.payload:
        raise HandleError(
            f"dispatch of handle {handle.handle_id}: the ABI's payload is {header.abi.payload}, found {hidden_TD.dtype}"
        )
    handle.lifetime.advance("submit_dispatch")
    # Semantic order is token-major, so route r is one of token r // K.
    send_rows_ND = permute(hidden_TD, handle.order_N // handle.top_k)
    rows_RD = to_experts(transport.dispatch(send_rows_ND, handle.counts_PP), handle)
    handle.lifetime.advance("complete_dispatch")
    return rows_RD


def combine(rows_RD: Tensor, handle: DispatchHandle, header: HandleHeader, transport: Transport) -> Tensor:
    """Expert outputs back to their origins, then the gate-weighted sum per token: [T, D] in the payload's dtype.

    Raises as `dispatch`; a second combine of one handle is an `IllegalTransitionError`.
    """
    _fence(handle, header, transport, "combine")
    handle.lifetime.advance("submit_combine")
    gates_TK: Tensor | None = handle.gates_TK
    if header.abi.gate_location == "expert":
        rows_RD, gates_TK = rows_RD * _gates_R1(handle, transport), None
    returned_ND = transport.combine(to_senders(rows_RD.to(header.abi.returned), handle), handle.counts_PP)
    handle.lifetime.advance("complete_combine")
    return weighted_combine(unpermute(returned_ND, handle.order_N), gates_TK, handle.top_k, header.abi.payload)


def to_experts(arrived_RD: Tensor, handle: DispatchHandle) -> Tensor:
    """Source-major to expert-major."""
    return arrived_RD if handle.arrives_expert_major else permute(arrived_RD, handle.expert_order_R)


def to_senders(rows_RD: Tensor, handle: DispatchHandle) -> Tensor:
    """Expert-major to source-major: the inverse of `to_experts`."""
    return rows_RD if handle.arrives_expert_major else unpermute(rows_RD, handle.expert_order_R)


def _gates_R1(handle: DispatchHandle, transport: Transport) -> Tensor:
    """The gates of this peer's rows, along the rows' own path. In fp32: routers differ in dtype, a wire may not."""
    gates_N1 = handle.gates_TK.reshape(-1, 1).to(torch.float32)
    return to_experts(transport.dispatch(permute(gates_N1, handle.order_N), handle.counts_PP), handle)


def _fence(handle: DispatchHandle, header: HandleHeader, transport: Transport, operation: str) -> None:
    handle.require(header, operation)
    group = transport.group.spec
    if group.epoch != header.epoch or group.process_group_id.value != header.process_group_id:
        raise StaleHandleError(
            f"{operation} of handle {handle.handle_id}: bound to group {header.process_group_id} epoch {header.epoch}, "
            f"the transport runs {group.process_group_id} epoch {group.epoch}"
        )
