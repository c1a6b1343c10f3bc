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

from ray_moe.dataplane.plan import Layout, Plan, expert_order
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
    """What the two ends of an exchange must agree on beyond shapes: the dtypes on the wire and who applies the gate.

    Raises `ConfigError` for a dtype that torch does not have and for another gate location than `origin` or `expert`.
    """

    payload_dtype: str = "float32"
    return_dtype: str = "float32"
    gate_location: str = "origin"
    handle_version: str = "ray_moe.handle/1"

    def __post_init__(self) -> None:
        for role in ("payload_dtype", "return_dtype"):
            if not isinstance(getattr(torch, getattr(self, role), None), torch.dtype):
                raise ConfigError(f"{role} must name a torch dtype, found {getattr(self, role)!r}")
        if self.gate_location not in ("origin", "expert"):
            raise ConfigError(f"gate_location must be 'origin' or 'expert', found {self.gate_location!r}")

    @property
    def payload(self) -> torch.dtype:
        """Dtype of the rows that dispatch sends."""
        return getattr(torch, self.payload_dtype)

    @property
    def returned(self) -> torch.dtype:
        """Dtype of the rows that combine sends back."""
        return getattr(torch, self.return_dtype)


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
        semantic_digest: str | None = None,
    ) -> DispatchHandle:
        """The handle of one invocation: this header, the plan's tensors, and the layout that all peers agreed on.

        Leaves the invocation in DISPATCH_METADATA_READY. Raises `StaleHandleError` when the plan was made under another
        generation.
        """
        if plan.generation != self.generation:
            raise StaleHandleError(f"plan of generation {plan.generation} cannot bind to a lease of {self.generation}")
        lifetime = self.lifetime(step, unit, layer, chunk)
        lifetime.advance("plan")
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
            order_N=plan.order_N,
            gates_TK=plan.routes.topk_weights,
            send_counts_P=layout.send_counts_P,
            send_offsets_P1=layout.send_offsets_P1,
            recv_counts_P=layout.recv_counts_P,
            recv_counts_PS=layout.recv_counts_PS,
            counts_PP=layout.counts_PP,
            expert_offsets_S1=layout.expert_offsets_S1,
            lifetime=lifetime,
        )


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """Everything combine needs, and the coordinates it must be used under (union of 0x01D2 and 0x0CB).

    Origin side: `physical_slot_N` (manifest positions) in semantic order; `order_N` send position -> semantic position
    and its inverse `inverse_N`; `origin_token_N`, `route_slot_N`, `gates_TK`; `send_counts_P` and `send_offsets_P1`
    (exclusive sums with the sentinel) in peer-slot order. Owner side: `recv_counts_P`, `recv_counts_PS` per source and
    local slot, `expert_order_R` expert-major position -> receive position, `expert_offsets_S1` bounds of the local
    slots' segments. `counts_PP[source][destination]` is the matrix that all peers checked.

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
    lifetime: Lifetime

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

    @property
    def arrives_expert_major(self) -> bool:
        """With rows from one source only there is nothing to repack: a source sends in slot order."""
        return sum(map(bool, self.recv_counts_P)) <= 1

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
