"""A layer that the host does not look into, in torch: the seam of decode graphs where no GPU is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ray_moe.dataplane.layer import ExpertLayer
from ray_moe.dataplane.layer_weights import LayerWeights
from ray_moe.dataplane.local import slot_table
from ray_moe.routes import Routes


@dataclass(frozen=True, eq=False)
class TorchLayer:
    """`LocalLayer`'s twin over a layer's own slabs; `largest` is the most rows that it was given."""

    weights: LayerWeights
    slots_E: Tensor
    seen: list[tuple[int, int]]  # rows and real rows of each call

    @staticmethod
    def of(layer: ExpertLayer) -> Any:
        return TorchLayer(layer.weights, slot_table(layer.slots), [])

    @property
    def table(self) -> Tensor:
        return self.slots_E

    @property
    def memory(self) -> tuple[int, ...]:
        return (self.weights.gate_up.data_ptr(), self.weights.down.data_ptr())

    def enter(self) -> None:
        """Nobody else has to know."""

    def takes(self, hidden_TD: Tensor, routes: Routes) -> bool:
        """Only graphs call it, so that eager units are what they are without it."""
        return False

    def run(
        self, hidden_TD: Tensor, routes: Routes, *, capacity: int, table: Tensor | None = None, shared: object = None
    ) -> Tensor:
        assert table is not None and capacity == hidden_TD.shape[0] and shared is None
        valid_TK = routes.topk_ids >= 0
        self.seen.append((hidden_TD.shape[0], int(valid_TK[:, 0].sum())))
        assert bool((valid_TK == valid_TK[:, :1]).all())
        slots_TK = table[routes.topk_ids.clamp(min=0)].long()
        weights = self.weights
        rows_TK = torch.einsum("td,tkfd->tkf", hidden_TD, weights.gate_up[slots_TK])
        acts_TKF = weights.activation(rows_TK)
        out_TKD = torch.einsum("tkf,tkdf->tkd", acts_TKF, weights.down[slots_TK])
        return (out_TKD * (routes.topk_weights * valid_TK)[..., None]).sum(1)
