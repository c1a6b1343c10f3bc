"""The whole layer on the one device that has all of its experts: no rows travel, so no counts are agreed.

Ids, gates and hidden rows go in, weighted sums come out, and nothing waits for the device in between. The slot table is
the generation's own. Audited invocations take the path of handles instead, which checks every route on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.layer_weights import LayerWeights
from ray_moe.dataplane.plan import SlotMap
from ray_moe.errors import ConfigError
from ray_moe.routes import Routes

if TYPE_CHECKING:
    from ray_moe.kernels.fused_layer import FusedLayer


@dataclass(frozen=True)
class Workspaces:
    """The buffers that a peer's layers write, one set for each shape: it runs one layer at a time.

    `max_tokens` is the largest unit that takes this path.
    """

    max_tokens: int
    batch_invariant: bool = False
    _by_shape: dict[Any, Any] = field(default_factory=dict)

    def layer(self, slots: SlotMap, weights: LayerWeights, top_k: int, abi: HandleABI) -> LocalLayer | None:
        """The layer on this device alone; None where that is not possible, and units go by the path of handles.

        It takes one peer, a CUDA device with triton, half-precision rows as they are, gates at the origin, and an
        activation that kernels have. Raises `ConfigError` where `batch_invariant` was asked for and is not possible.
        """
        made = self._layer(slots, weights, top_k, abi)
        if made is None and self.batch_invariant:
            raise ConfigError(
                f"batch_invariant: the kernels cannot take layer {slots.layer}, {weights.down.dtype} on "
                f"{weights.down.device.type} with D {weights.down.shape[1]} and F {weights.down.shape[2]}"
            )
        return made

    def _layer(self, slots: SlotMap, weights: LayerWeights, top_k: int, abi: HandleABI) -> LocalLayer | None:
        down = weights.down
        plain = (abi.payload_format, abi.gate_location) == ("native", "origin") and abi.payload == down.dtype
        if slots.num_peers > 1 or not down.is_cuda or weights.form is None or not plain:
            return None
        if down.dtype not in (torch.bfloat16, torch.float16):
            return None
        try:
            from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace, misfit
            from ray_moe.kernels.tiling import LayerShape
        except ModuleNotFoundError as missing:
            if missing.name != "triton":
                raise
            return None
        shape = LayerShape(slots.num_experts, top_k, down.shape[1], down.shape[2])
        if misfit(shape, down.dtype) is not None:
            return None
        key = (shape, down.dtype)
        new = key not in self._by_shape
        if new:
            self._by_shape[key] = Workspace(shape, self.max_tokens, down.dtype, down.device)
        slabs = Slabs(weights.gate_up, down, weights.gate_up_bias, weights.down_bias, weights.form)
        fused = FusedLayer(slabs, self._by_shape[key], batch_invariant=self.batch_invariant)
        if new:
            fused.compile()  # now, and not in the middle of a step
        return LocalLayer(fused, slot_table(slots))


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

    def run(self, hidden_TD: Tensor, routes: Routes) -> Tensor:
        """Weighted sums [T, D]. That ids are in [0, E) is the router's promise here: an audit checks it on the host."""
        out_TD = torch.empty_like(hidden_TD, memory_format=torch.contiguous_format)
        ids_TK, gates_TK = routes.topk_ids.contiguous(), routes.topk_weights.contiguous()
        self.fused(hidden_TD.contiguous(), ids_TK, gates_TK, self.slots_E, out_TD)
        return out_TD
