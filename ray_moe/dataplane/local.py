"""Layers that the host does not look into, and the one device that has all experts: no rows travel there.

Ids, gates and hidden rows go in, weighted sums come out, and nothing waits for the device in between. The slot table is
the generation's own. Audited invocations take the path of handles instead, which checks every route on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.layer_weights import LayerWeights
from ray_moe.dataplane.plan import SlotMap
from ray_moe.errors import ConfigError
from ray_moe.routes import Routes

if TYPE_CHECKING:
    from ray_moe.comm.transports import Transport
    from ray_moe.kernels.fused_layer import FusedLayer


class DeviceLayer(Protocol):
    """One layer of one generation that the host does not look into: `LocalLayer`, `windowed.WindowedLayer`."""

    @property
    def table(self) -> Tensor:
        """The generation's table, of one shape for all layers and generations; published, never written again."""

    @property
    def memory(self) -> tuple[int, ...]:
        """What captured launches hold beside the table: layers with the same can take each other's place in them."""

    def takes(self, hidden_TD: Tensor, routes: Routes) -> bool:
        """Whether it runs such units: the same on every peer."""

    def enter(self) -> None:
        """Before launches under this layer's epoch, in the order of the stream."""

    def run(
        self,
        hidden_TD: Tensor,
        routes: Routes,
        *,
        capacity: int,
        table: Tensor | None = None,
        shared: Callable[[], None] | None = None,
    ) -> Tensor:
        """Weighted sums [T, D] of a unit of which no peer has more than `capacity` tokens. `table` is read instead of
        the generation's own: a graph's cell. `shared` may be called once, where rows are on their way."""


@dataclass(frozen=True)
class Workspaces:
    """The buffers that a peer's layers write, one set for each shape: it runs one layer at a time.

    `max_tokens` is the largest unit of a peer. A process keeps one of these for all its epochs, so that what was
    captured over it serves every one of them.
    """

    max_tokens: int
    batch_invariant: bool = False
    _by_shape: dict[Any, Any] = field(default_factory=dict)

    def layer(
        self,
        slots: SlotMap,
        weights: LayerWeights,
        top_k: int,
        abi: HandleABI,
        transport: Transport | None = None,
        policy: str = "",
        parts: int = 1,
    ) -> DeviceLayer | None:
        """The layer on devices alone; None where that is not possible, and units go by the path of handles.

        It takes a CUDA device with triton, half-precision rows and an activation that kernels have; besides, one peer
        that gets rows as they are and gates at the origin, or an epoch over windows that are made for the ABI, and a
        `policy` and placement as `replica_table` has them. `parts`: `WindowedLayer`. The same on every peer. Raises
        `ConfigError` where `batch_invariant` was asked for and is not possible.
        """
        made = self._layer(slots, weights, top_k, abi, transport, policy, parts)
        if made is None and self.batch_invariant:
            raise ConfigError(
                f"batch_invariant: the kernels cannot take layer {slots.layer}, {weights.down.dtype} on "
                f"{weights.down.device.type} with D {weights.down.shape[1]} and F {weights.down.shape[2]}"
            )
        return made

    def _layer(
        self,
        slots: SlotMap,
        weights: LayerWeights,
        top_k: int,
        abi: HandleABI,
        transport: Transport | None,
        policy: str,
        parts: int,
    ) -> DeviceLayer | None:
        down = weights.down
        if not down.is_cuda or weights.form is None or abi.payload != down.dtype:
            return None
        if down.dtype not in (torch.bfloat16, torch.float16):
            return None
        try:
            from ray_moe.dataplane.windowed import WindowedLayer, replica_table, seat_for, try_launches
            from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace, misfit
            from ray_moe.kernels.tiling import LayerShape
        except ModuleNotFoundError as missing:
            if missing.name != "triton":
                raise
            return None
        shape = LayerShape(slots.num_experts, top_k, down.shape[1], down.shape[2])
        if misfit(shape, down.dtype) is not None:
            return None
        seat = table_XE = None
        if slots.num_peers > 1:
            seat, table_XE = seat_for(transport, shape, abi), replica_table(slots, policy)
            if seat is None or table_XE is None:
                return None
        elif (abi.payload_format, abi.gate_location) != ("native", "origin"):
            return None
        slabs = Slabs(weights.gate_up, down, weights.gate_up_bias, weights.down_bias, weights.form)
        tokens = self.max_tokens if seat is None else seat.window.regions.token_slots
        key = (shape, down.dtype, tokens)
        new = key not in self._by_shape
        if new:
            self._by_shape[key] = Workspace(shape, tokens, down.dtype, down.device)
        fused = FusedLayer(slabs, self._by_shape[key], batch_invariant=self.batch_invariant)
        # A new shape's launches are compiled now, and not in the middle of a step.
        if seat is None or table_XE is None:
            if new:
                fused.compile()
            return LocalLayer(fused, slot_table(slots))
        if new:
            try_launches(fused, seat.window)
        return WindowedLayer(fused, seat, table_XE, parts, PIPELINED_FROM)


# Fewer tokens than this go in one piece, whatever the strategy: a piece must be worth its launches.
PIPELINED_FROM = 1024


def slot_table(slots: SlotMap) -> Tensor:
    """Each expert's pool slot, int32 [E], for a peer that has all experts.

    Of an expert's replicas on one device the first is taken, whatever the policy: all hold the same parameters.
    """
    in_dispatch_order = slots.dispatch_S.index_select(0, slots.first_replica_E)
    pool_slots_S = torch.tensor(slots.pool_slots, dtype=torch.int32, device=in_dispatch_order.device)
    return pool_slots_S.index_select(0, in_dispatch_order)


@dataclass(frozen=True, eq=False)
class LocalLayer:
    """One layer of one generation."""

    fused: FusedLayer
    slots_E: Tensor

    def takes(self, hidden_TD: Tensor, routes: Routes) -> bool:
        """Whether the unit fits the buffers."""
        workspace = self.fused.workspace
        return hidden_TD.shape[0] <= workspace.max_tokens and routes.top_k == workspace.shape.top_k

    @property
    def table(self) -> Tensor:
        """What launches read of the generation: `slots_E`."""
        return self.slots_E

    @property
    def memory(self) -> tuple[int, ...]:
        """What captured launches hold, beside the table: layers with the same can take each other's place in them."""
        return self.fused.memory

    def enter(self) -> None:
        """Before launches of this epoch: nobody else has to know."""

    def run(
        self,
        hidden_TD: Tensor,
        routes: Routes,
        *,
        capacity: int | None = None,
        table: Tensor | None = None,
        shared: Callable[[], None] | None = None,
    ) -> Tensor:
        """Weighted sums [T, D]. That ids are in [0, E), or -1 for nobody's routes, is the router's promise here: an
        audit checks it on the host.

        `table` is read instead of the generation's own: a graph's cell. `capacity`, the most tokens of any peer, says
        nothing where there is one; nor is there an exchange for `shared` to run beside.
        """
        out_TD = torch.empty_like(hidden_TD, memory_format=torch.contiguous_format)
        ids_TK, gates_TK = routes.topk_ids.contiguous(), routes.topk_weights.contiguous()
        self.fused(hidden_TD.contiguous(), ids_TK, gates_TK, self.slots_E if table is None else table, out_TD)
        return out_TD
