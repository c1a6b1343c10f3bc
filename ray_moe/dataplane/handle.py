"""Handles: one immutable record per invocation, one lifetime, combined exactly once (0x01D2, 0x06B, 0x0CB).

A lease gives a `HandleHeader`. `HandleHeader.bind` is the only constructor of a `DispatchHandle`; it may be called many
times, each handle is combined once. Letters: N routes of this origin, K top-k, P peers, S slots, R received rows.
Tensors live on the layer's device; row counts that collectives need are host integers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ray_moe.comm.transports import nothing_crosses
from ray_moe.dataplane.completion import Completion, Event, LiveMeter
from ray_moe.dataplane.plan import Layout, Plan, expert_order
from ray_moe.dataplane.precision import codec_named, gate_location_named
from ray_moe.dataplane.rows import Mode
from ray_moe.errors import ConfigError, IllegalTransitionError, StaleHandleError
from ray_moe.kernels.reference import inverse_of
from ray_moe.placement import Lease, PlacementSnapshot


class State(Enum):
    """The eight lifetime states of specification 0x06B."""

    ROUTER_OUTPUT = 0
    DISPATCH_METADATA_READY = 1
    DISPATCH_IN_FLIGHT = 2
    EXPERT_ROWS_READY = 3
    EXPERT_OUTPUT_READY = 4
    COMBINE_IN_FLIGHT = 5
    ORIGIN_ROWS_READY = 6
    DISPATCH_STATE_RELEASABLE = 7


# state -> {event: next state}. The seven forward edges are the specification's; `abandon` is ours: when an epoch breaks
# under an invocation nothing will ever complete it, and its references must still be given back.
LIFETIME: dict[State, dict[str, State]] = {
    State.ROUTER_OUTPUT: {"plan": State.DISPATCH_METADATA_READY, "abandon": State.DISPATCH_STATE_RELEASABLE},
    State.DISPATCH_METADATA_READY: {
        "submit_dispatch": State.DISPATCH_IN_FLIGHT,
        "abandon": State.DISPATCH_STATE_RELEASABLE,
    },
    State.DISPATCH_IN_FLIGHT: {
        "complete_dispatch": State.EXPERT_ROWS_READY,
        "abandon": State.DISPATCH_STATE_RELEASABLE,
    },
    State.EXPERT_ROWS_READY: {"run_experts": State.EXPERT_OUTPUT_READY, "abandon": State.DISPATCH_STATE_RELEASABLE},
    State.EXPERT_OUTPUT_READY: {"submit_combine": State.COMBINE_IN_FLIGHT, "abandon": State.DISPATCH_STATE_RELEASABLE},
    State.COMBINE_IN_FLIGHT: {"complete_combine": State.ORIGIN_ROWS_READY, "abandon": State.DISPATCH_STATE_RELEASABLE},
    State.ORIGIN_ROWS_READY: {"release": State.DISPATCH_STATE_RELEASABLE, "abandon": State.DISPATCH_STATE_RELEASABLE},
    State.DISPATCH_STATE_RELEASABLE: {},
}


class Lifetime:
    """The only part of a handle that changes: where its invocation stands."""

    def __init__(self, handle_id: str, generation: int, epoch: int) -> None:
        self.handle_id, self.generation, self.epoch = handle_id, generation, epoch
        self.state = State.ROUTER_OUTPUT

    def advance(self, event: str) -> None:
        """Take one edge of `LIFETIME`; `IllegalTransitionError` names handle, state, event, generation and epoch."""
        following = LIFETIME[self.state].get(event)
        if following is None:
            raise IllegalTransitionError(self.handle_id, self.state.name, event, self.generation, self.epoch)
        self.state = following


@dataclass(frozen=True)
class HandleABI:
    """What the two ends of an exchange must agree on beyond shapes: what is on the wire and who applies the gate.

    `payload_format` is how dispatch represents rows of `payload_dtype` (`precision.codec_named`), `exchange` names what
    carries them and in which order: peers that differ in it would run other collectives. Raises `ConfigError`
    for a dtype that torch does not have, an unknown format, and another gate location than `origin` or `expert`.
    """

    payload_dtype: str = "float32"
    return_dtype: str = "float32"
    gate_location: str = "origin"
    payload_format: str = "native"
    exchange: str = ""
    handle_version: str = "ray_moe.handle/1"

    def __post_init__(self) -> None:
        for role in ("payload_dtype", "return_dtype"):
            if not isinstance(getattr(torch, getattr(self, role), None), torch.dtype):
                raise ConfigError(f"{role} must name a torch dtype, found {getattr(self, role)!r}")
        gate_location_named(self.gate_location)
        codec_named(self.payload_format, 1, self.payload)

    @property
    def payload(self) -> torch.dtype:
        """Dtype of the rows that dispatch sends."""
        return getattr(torch, self.payload_dtype)

    @property
    def returned(self) -> torch.dtype:
        """Dtype of the rows that combine sends back."""
        return getattr(torch, self.return_dtype)


ROUTE_HANDLE = "route_handle"

# A header's fields that name its holder; the others are one step's common ground.
_HOLDERS_OWN = ("lease_id", "holder")


@dataclass(frozen=True)
class HandleHeader:
    """The execution scope that one lease grants: every coordinate that dispatch and combine must share."""

    release_id: str
    checkpoint_version: str
    placement_version: str
    generation: int
    process_group_id: str
    epoch: int
    placement_digest: str
    abi: HandleABI
    lease_id: int
    holder: str

    @staticmethod
    def grant(lease: Lease, snapshot: PlacementSnapshot, abi: HandleABI) -> HandleHeader:
        """What `lease` entitles its holder to bind. `StaleHandleError` when it is on another generation or epoch."""
        if (lease.generation, lease.epoch) != (snapshot.generation, snapshot.group.epoch):
            raise StaleHandleError(
                f"lease {lease.lease_id} is on generation {lease.generation} epoch {lease.epoch}, the placement is "
                f"generation {snapshot.generation} epoch {snapshot.group.epoch}"
            )
        return HandleHeader(
            release_id=snapshot.release_id,
            checkpoint_version=snapshot.checkpoint_version.value,
            placement_version=snapshot.version.value,
            generation=snapshot.generation,
            process_group_id=snapshot.group.process_group_id.value,
            epoch=snapshot.group.epoch,
            placement_digest=snapshot.digest,
            abi=abi,
            lease_id=lease.lease_id,
            holder=lease.holder,
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over what all peers of a step must share: everything but the holder and its lease."""
        shared = {name: value for name, value in asdict(self).items() if name not in _HOLDERS_OWN}
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()

    @cached_property
    def digest64(self) -> int:
        """The first 63 bits of `digest`, for fixed-size records of integers."""
        return int(self.digest[:16], 16) >> 1

    @cached_property
    def release64(self) -> int:
        """63 bits of the release id's SHA-256, for the same records."""
        return int(hashlib.sha256(self.release_id.encode()).hexdigest()[:16], 16) >> 1

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: whoever receives a header digests what has arrived, not what the sender had."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def lifetime(self, step: int, unit: str, layer: int, chunk: int) -> Lifetime:
        """A fresh lifetime, in state ROUTER_OUTPUT, for one invocation under this header."""
        name = f"{self.placement_version}/e{self.epoch}/s{step}/{unit}/l{layer}/c{chunk}@{self.holder}"
        return Lifetime(name, self.generation, self.epoch)

    def bind(
        self,
        step: int,
        unit: str,
        layer: int,
        chunk: int,
        plan: Plan,
        layout: Layout,
        *,
        mode: Mode = Mode.NORMAL,
        order_N: Tensor | None = None,
        meter: LiveMeter | None = None,
        semantic_digest: str | None = None,
    ) -> DispatchHandle:
        """The handle of one invocation: this header, the plan's tensors, and the layout that all peers agreed on.

        `mode` types the handle: only a dispatcher of that mode takes it. `order_N` is given for a chunk of the plan's
        rows, whose layout then is `layout`; the handles of one invocation share a `meter`. Leaves the invocation in
        DISPATCH_METADATA_READY. Raises `StaleHandleError` when the plan was made under another generation.
        """
        if plan.generation != self.generation:
            raise StaleHandleError(f"plan of generation {plan.generation} cannot bind to a lease of {self.generation}")
        lifetime = self.lifetime(step, unit, layer, chunk)
        lifetime.advance("plan")
        completion = Completion(lifetime.handle_id, meter)
        completion.complete(Event.ROUTE_READY)
        order_N = plan.order_N if order_N is None else order_N
        held = plan.physical_slot_N.nbytes + order_N.nbytes + plan.routes.topk_weights.nbytes
        completion.hold(ROUTE_HANDLE, held, Event.HANDLE_RELEASED)
        return DispatchHandle(
            header=self,
            handle_id=lifetime.handle_id,
            step=step,
            unit=unit,
            layer=layer,
            chunk=chunk,
            execution_scope_id=plan.routes.execution_scope_id,
            semantic_digest=semantic_digest,
            route_count=plan.routes.num_routes,
            top_k=plan.routes.top_k,
            physical_slot_N=plan.physical_slot_N,
            order_N=order_N,
            gates_TK=plan.routes.topk_weights,
            send_counts_P=layout.send_counts_P,
            send_offsets_P1=layout.send_offsets_P1,
            recv_counts_P=layout.recv_counts_P,
            recv_counts_PS=layout.recv_counts_PS,
            counts_PP=layout.counts_PP,
            expert_offsets_S1=layout.expert_offsets_S1,
            mode=mode,
            lifetime=lifetime,
            completion=completion,
        )


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """Everything combine needs, and the coordinates it must be used under (union of 0x01D2 and 0x0CB).

    Origin side: `physical_slot_N` (manifest positions) in semantic order; `order_N` send position -> semantic position
    (of a chunk: for its own rows) and its inverse `inverse_N`; `origin_token_N`, `route_slot_N`, `gates_TK`;
    `send_counts_P` and `send_offsets_P1` (exclusive sums with the sentinel) in peer-slot order. Owner side:
    `recv_counts_P`, `recv_counts_PS` per source and local slot, `expert_order_R` expert-major position -> receive
    position, `expert_offsets_S1` bounds of the local slots' segments. `counts_PP[source][destination]` is the matrix
    that all peers checked. `mode` says which dispatchers take it.

    What follows from other fields is made when it is first asked for.
    """

    header: HandleHeader
    handle_id: str
    step: int
    unit: str
    layer: int
    chunk: int
    execution_scope_id: str
    semantic_digest: str | None
    route_count: int
    top_k: int
    physical_slot_N: Tensor
    order_N: Tensor
    gates_TK: Tensor
    send_counts_P: tuple[int, ...]
    send_offsets_P1: tuple[int, ...]
    recv_counts_P: tuple[int, ...]
    recv_counts_PS: tuple[tuple[int, ...], ...]
    counts_PP: tuple[tuple[int, ...], ...]
    expert_offsets_S1: tuple[int, ...]
    mode: Mode
    lifetime: Lifetime
    completion: Completion

    @cached_property
    def origin_token_N(self) -> Tensor:
        return torch.arange(self.route_count, device=self.order_N.device) // self.top_k

    @cached_property
    def route_slot_N(self) -> Tensor:
        return torch.arange(self.route_count, device=self.order_N.device) % self.top_k

    @cached_property
    def inverse_N(self) -> Tensor:
        return inverse_of(self.order_N)

    @cached_property
    def expert_order_R(self) -> Tensor:
        return expert_order(self.recv_counts_PS, self.order_N.device)

    @cached_property
    def crosses(self) -> bool:
        """Whether any peer sends a row to another one: known alike to all of them."""
        return not nothing_crosses(self.counts_PP)

    @property
    def arrives_expert_major(self) -> bool:
        """With rows from one source only there is nothing to repack: a source sends in slot order."""
        return sum(map(bool, self.recv_counts_P)) <= 1

    def release(self) -> None:
        """The output is ready and nobody reads this handle any more: the last of its events and states.

        Raises `CompletionError` or `IllegalTransitionError` before that.
        """
        self.completion.complete(Event.HANDLE_RELEASED)
        self.completion.release(ROUTE_HANDLE)
        self.lifetime.advance("release")

    def abandon(self) -> None:
        """Give back whatever the invocation holds: it will never be completed. No second time is an error."""
        if self.lifetime.state is not State.DISPATCH_STATE_RELEASABLE:
            self.lifetime.advance("abandon")
            self.completion.abandon()

    def require(self, header: HandleHeader, operation: str) -> None:
        """The fence of 0x02B3: everything that peers of a step share is the handle's own, or `StaleHandleError`."""
        if header.digest == self.header.digest:
            return
        for name in (item.name for item in fields(header) if item.name not in _HOLDERS_OWN):
            mine, theirs = getattr(self.header, name), getattr(header, name)
            if mine != theirs:
                raise StaleHandleError(
                    f"{operation} of handle {self.handle_id}: its {name} is {mine}, the scope's is {theirs}"
                )
