"""Dispatch and combine: inverses, kept together (specification 0x03C2, 0x03C3, 0x03D4, 0x06F).

A `Dispatcher` walks one handle at a time through four stages. Dispatch packs origin rows, exchanges them, and repacks
what arrives to expert-major rows; combine walks the same permutations back. Between the two halves of each, the rows
are on their way and this thread may do something else. Letters: T tokens, K top-k, N = T * K routes, n rows that one
handle sends, R received rows, S this peer's slots, C slot capacity, D hidden, W width on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ray_moe.comm.exchange import Exchange
from ray_moe.comm.transports import Transport, padded_positions
from ray_moe.dataplane.completion import Event, StagingPool
from ray_moe.dataplane.device_codecs import codec_on
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.dataplane.precision import PayloadCodec
from ray_moe.dataplane.rows import ExpertRows, MaskedRows, Mode, SegmentedRows, require_mode
from ray_moe.errors import CountMismatchError, HandleError, RunnerError, StageError, StaleHandleError
from ray_moe.kernels.reference import permute, unpermute, weighted_combine


class Stage(Enum):
    """Where a dispatcher stands (specification 0x06F)."""

    INITIAL = "INITIAL"
    AFTER_DISPATCH_A = "AFTER_DISPATCH_A"
    AFTER_DISPATCH_B = "AFTER_DISPATCH_B"
    AFTER_COMBINE_A = "AFTER_COMBINE_A"


# stage -> {operation: next}. A dispatcher's fields hold the inverse of what is in flight, so a second dispatch before
# the combine would overwrite what the first one needs (0x06C).
STAGES: dict[Stage, dict[str, Stage]] = {
    Stage.INITIAL: {"dispatch_a": Stage.AFTER_DISPATCH_A},
    Stage.AFTER_DISPATCH_A: {"dispatch_b": Stage.AFTER_DISPATCH_B},
    Stage.AFTER_DISPATCH_B: {"combine_a": Stage.AFTER_COMBINE_A},
    Stage.AFTER_COMBINE_A: {"combine_b": Stage.INITIAL},
}

SEND, RECEIVE, INPUT = "packed_send_payload", "source_major_receive", "local_expert_input"
OUTPUT, RETURNED = "expert_output_return_payload", "returned_source_order_rows"


class Dispatcher:
    """One seat for a handle in flight, over one transport, in one mode.

    `slot_capacity` is C of low-latency mode; None takes the fullest slot of each call. `staging` lends the packed send
    rows and gets them back once nobody reads them. Every method raises `StageError` out of turn, leaving stage and
    handle as they were, and `CollectiveError` when the epoch breaks.
    """

    def __init__(
        self,
        header: HandleHeader,
        transport: Transport,
        mode: Mode = Mode.NORMAL,
        *,
        slot_capacity: int | None = None,
        staging: StagingPool | None = None,
    ) -> None:
        self.header, self.transport, self.mode, self.slot_capacity = header, transport, mode, slot_capacity
        self.stage = Stage.INITIAL
        self._staging = staging if staging is not None else StagingPool()
        self._handle: DispatchHandle | None = None
        self._exchange: Exchange | None = None
        self._gates: Exchange | None = None
        self._gates_R1: Tensor | None = None
        self._codec: PayloadCodec | None = None

    # ---- the four stages ----

    def pack(self, hidden_TD: Tensor, handle: DispatchHandle) -> Tensor:
        """The handle's rows [n, W] as they go on the wire, in send order. The first step of its dispatch.

        Raises `StaleHandleError` when handle, header and group are not of one generation and epoch, `StageError` for a
        handle of the other mode, `HandleError` when the rows have another dtype than the ABI's payload,
        `IllegalTransitionError` when the handle was dispatched before.
        """
        self._fence(handle, "dispatch")
        if hidden_TD.dtype != self.header.abi.payload:
            raise HandleError(
                f"dispatch of handle {handle.handle_id}: the ABI's payload is {self.header.abi.payload}, "
                f"found {hidden_TD.dtype}"
            )
        handle.lifetime.advance("submit_dispatch")
        codec = self._codec_of(hidden_TD.shape[1], hidden_TD.device)
        wire_TW = codec.encode(hidden_TD)
        send_nW = self._staging.take(handle.order_N.numel(), codec.wire_width, codec.wire_dtype, hidden_TD.device)
        # With nothing to send to others the packed rows are also what arrives, and the experts read them.
        last_reader = Event.DISPATCH_COMPLETE if handle.crosses else Event.EXPERT_COMPLETE
        handle.completion.hold(SEND, send_nW.nbytes, last_reader, partial(self._staging.give_back, send_nW))
        # Semantic order is token-major, so route r is one of token r // K. Scales lie in the rows and move with them.
        torch.index_select(wire_TW, 0, handle.order_N // handle.top_k, out=send_nW)
        handle.completion.complete(Event.DISPATCH_PACKED)
        return send_nW

    def dispatch_a(self, send_nW: Tensor, handle: DispatchHandle) -> None:
        """Submit packed rows to their slots' owners. `CompletionError` when the handle's rows are not packed."""
        following = self._following("dispatch_a")
        handle.completion.require(Event.DISPATCH_PACKED, "the exchange")
        self._handle, self.stage = handle, following
        self._exchange = self.transport.dispatch(send_nW, handle.counts_PP)
        if self.header.abi.gate_location == "expert":
            self._gates = self._send_gates(handle)

    def dispatch_b(self) -> ExpertRows:
        """Wait for this peer's rows and repack them expert-major, in the type of the dispatcher's mode.

        Raises `CountMismatchError` when other rows have arrived than the peers agreed on: before any expert computes.
        """
        following, handle, exchange = self._in_flight("dispatch_b")
        arrived_RW = exchange.payload()
        if arrived_RW.shape[0] != handle.expert_offsets_S1[-1]:
            raise CountMismatchError(
                f"handle {handle.handle_id}: {arrived_RW.shape[0]} rows have arrived, "
                f"{handle.expert_offsets_S1[-1]} were agreed"
            )
        exchange.complete()
        if self._gates is not None:
            self._gates_R1 = to_experts(self._gates.payload(), handle)
            self._gates.complete()
        done = handle.completion
        done.complete(Event.DISPATCH_COMPLETE)
        done.hold(RECEIVE, arrived_RW.nbytes, Event.EXPERT_INPUT_READY)
        if handle.crosses:  # else what has arrived is what was packed
            done.release(SEND)
        assert self._codec is not None
        rows = self._laid_out(self._codec.decode(to_experts(arrived_RW, handle), self.header.abi.payload), handle)
        done.complete(Event.EXPERT_INPUT_READY)
        done.release(RECEIVE)
        done.hold(INPUT, arrived_RW.nbytes, Event.EXPERT_COMPLETE)
        handle.lifetime.advance("complete_dispatch")
        self.stage = following
        return rows

    def combine_a(self, rows: ExpertRows) -> None:
        """Submit the experts' outputs to their origins.

        Raises `StageError` for rows of the other mode, `StaleHandleError` when the handle's generation or epoch is no
        longer the dispatcher's, `CountMismatchError` for another number of rows than dispatch gave.
        """
        following, handle, _ = self._in_flight("combine_a")
        require_mode(rows, self.mode, f"combine of handle {handle.handle_id}")
        self._fence(handle, "combine")
        outputs_RD = self._unlaid(rows, handle)
        if self._gates_R1 is not None:
            outputs_RD = outputs_RD * self._gates_R1
        done = handle.completion
        done.complete(Event.EXPERT_COMPLETE)
        done.release(INPUT)
        if not handle.crosses:
            done.release(SEND)
        handle.lifetime.advance("run_experts")
        handle.lifetime.advance("submit_combine")
        back_RD = to_senders(outputs_RD.to(self.header.abi.returned), handle)
        done.hold(OUTPUT, back_RD.nbytes, Event.COMBINE_COMPLETE)
        self._exchange = self.transport.combine(back_RD, handle.counts_PP)
        self.stage = following

    def combine_b(self) -> Tensor:
        """Wait for the returned rows [n, D], in the handle's send order; the seat is free again."""
        following, handle, exchange = self._in_flight("combine_b")
        returned_nD = exchange.payload()
        exchange.complete()
        done = handle.completion
        done.complete(Event.COMBINE_COMPLETE)
        done.release(OUTPUT)
        done.hold(RETURNED, returned_nD.nbytes, Event.OUTPUT_READY)
        handle.lifetime.advance("complete_combine")
        self.stage = following
        self._handle = self._exchange = self._gates = self._gates_R1 = None
        return returned_nD

    # ---- both halves at once ----

    def dispatch(self, hidden_TD: Tensor, handle: DispatchHandle) -> ExpertRows:
        """`pack`, `dispatch_a` and `dispatch_b`."""
        self._following("dispatch_a")
        self.dispatch_a(self.pack(hidden_TD, handle), handle)
        return self.dispatch_b()

    def combine(self, rows: ExpertRows) -> Tensor:
        """`combine_a`, `combine_b` and the weighted sum of the one handle: [T, D] in the payload's dtype."""
        self.combine_a(rows)
        handle = self._handle
        returned_nD = self.combine_b()
        assert handle is not None
        return weighted_sum([(handle, returned_nD)])

    # ---- details ----

    def _codec_of(self, width: int, device: torch.device) -> PayloadCodec:
        if self._codec is None or self._codec.width != width:
            self._codec = codec_on(self.header.abi.payload_format, width, self.header.abi.payload, device)
        return self._codec

    def _send_gates(self, handle: DispatchHandle) -> Exchange:
        """Submit the rows' gates, along the rows' own path. In fp32: routers differ in dtype, a wire may not."""
        gates_N1 = handle.gates_TK.reshape(-1, 1).to(torch.float32)
        return self.transport.dispatch(permute(gates_N1, handle.order_N), handle.counts_PP)

    def _laid_out(self, rows_RD: Tensor, handle: DispatchHandle) -> ExpertRows:
        offsets_S1 = handle.expert_offsets_S1
        if self.mode is Mode.NORMAL:
            return SegmentedRows(rows_RD, offsets_S1)
        counts_S = tuple(end - start for start, end in pairwise(offsets_S1))
        capacity = self._capacity(counts_S, handle)
        rows_SCD = rows_RD.new_zeros(len(counts_S), capacity, rows_RD.shape[1])
        rows_SCD.view(-1, rows_RD.shape[1]).index_copy_(
            0, padded_positions(counts_S, capacity, rows_RD.device), rows_RD
        )
        return MaskedRows(rows_SCD, counts_S)

    def _unlaid(self, rows: ExpertRows, handle: DispatchHandle) -> Tensor:
        """The inverse of `_laid_out`: valid rows only, expert-major."""
        offsets_S1 = rows.offsets_S1 if isinstance(rows, SegmentedRows) else tuple(accumulate(rows.counts_S, initial=0))
        if offsets_S1 != handle.expert_offsets_S1:
            raise CountMismatchError(
                f"combine of handle {handle.handle_id}: rows lie at {list(offsets_S1)}, dispatch gave "
                f"{list(handle.expert_offsets_S1)}"
            )
        if isinstance(rows, SegmentedRows):
            if rows.rows_RD.shape[0] != offsets_S1[-1]:
                raise CountMismatchError(
                    f"combine of handle {handle.handle_id}: {rows.rows_RD.shape[0]} rows came back, dispatch gave "
                    f"{offsets_S1[-1]}"
                )
            return rows.rows_RD
        slots, capacity, width = rows.rows_SCD.shape
        if slots != len(rows.counts_S) or capacity < max(rows.counts_S, default=0):
            raise CountMismatchError(
                f"combine of handle {handle.handle_id}: a buffer of {slots} x {capacity} rows came back for counts "
                f"{list(rows.counts_S)}"
            )
        flat = rows.rows_SCD.reshape(-1, width)
        return flat.index_select(0, padded_positions(rows.counts_S, capacity, flat.device))

    def _capacity(self, counts_S: Sequence[int], handle: DispatchHandle) -> int:
        fullest = max(counts_S, default=0)
        if self.slot_capacity is None:
            return fullest
        if fullest > self.slot_capacity:
            raise RunnerError(
                "slot_capacity_exceeded",
                f"handle {handle.handle_id}: a slot has {fullest} rows, its capacity is {self.slot_capacity}",
            )
        return self.slot_capacity

    def _fence(self, handle: DispatchHandle, operation: str) -> None:
        handle.require(self.header, operation)
        if handle.mode is not self.mode:
            raise StageError(
                f"{operation} of handle {handle.handle_id}: it is of mode {handle.mode}, the dispatcher of {self.mode}"
            )
        group = self.transport.group.spec
        if group.epoch != self.header.epoch or group.process_group_id.value != self.header.process_group_id:
            raise StaleHandleError(
                f"{operation} of handle {handle.handle_id}: bound to group {self.header.process_group_id} epoch "
                f"{self.header.epoch}, the transport runs {group.process_group_id} epoch {group.epoch}"
            )

    def _following(self, operation: str) -> Stage:
        following = STAGES[self.stage].get(operation)
        if following is None:
            open_handle = f" with handle {self._handle.handle_id} in flight" if self._handle is not None else ""
            raise StageError(f"{operation} is illegal in stage {self.stage.value}{open_handle}")
        return following

    def _in_flight(self, operation: str) -> tuple[Stage, DispatchHandle, Exchange]:
        following = self._following(operation)
        assert self._handle is not None
        assert self._exchange is not None
        return following, self._handle, self._exchange


def weighted_sum(parts: Sequence[tuple[DispatchHandle, Tensor]]) -> Tensor:
    """The gate-weighted sum per token over the handles of one plan: [T, D] in the payload's dtype (0x03C3).

    `parts` are handles with their returned rows [n, D]; together they must cover every route. Raises `HandleError` when
    they do not, and `CompletionError` when one of them is not combined yet.
    """
    handle, returned_nD = parts[0]
    abi = handle.header.abi
    covered = sum(rows_nD.shape[0] for _, rows_nD in parts)
    if covered != handle.route_count:
        raise HandleError(
            f"handle {handle.handle_id}: the handles to sum cover {covered} of {handle.route_count} routes"
        )
    if len(parts) == 1:
        rows_ND = unpermute(returned_nD, handle.order_N)
    else:
        rows_ND = returned_nD.new_empty(handle.route_count, returned_nD.shape[1])
        for one, rows in parts:
            rows_ND.index_copy_(0, one.order_N, rows)
    gates_TK = None if abi.gate_location == "expert" else handle.gates_TK
    out_TD = weighted_combine(rows_ND, gates_TK, handle.top_k, abi.payload)
    for one, _ in parts:
        one.completion.complete(Event.OUTPUT_READY)
        one.completion.release(RETURNED)
    return out_TD


def to_experts(arrived_RD: Tensor, handle: DispatchHandle) -> Tensor:
    """Source-major to expert-major."""
    return arrived_RD if handle.arrives_expert_major else permute(arrived_RD, handle.expert_order_R)


def to_senders(rows_RD: Tensor, handle: DispatchHandle) -> Tensor:
    """Expert-major to source-major: the inverse of `to_experts`."""
    return rows_RD if handle.arrives_expert_major else unpermute(rows_RD, handle.expert_order_R)
