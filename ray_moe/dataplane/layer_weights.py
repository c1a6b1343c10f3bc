"""What a runner computes with: one layer's slabs under one generation. Letters: S peer's slots, D hidden, F FFN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ray_moe.kernels.activation import SwiGLU

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The generation's view of one layer's slot pool: which storage index each local slot uses, and the slabs.

    `gate_up` [pool, 2F, D] gate rows first, `down` [pool, D, F], biases [pool, 2F] and [pool, D] or None;
    `pool_slots` [S] in dispatch order. `activation` maps [..., 2F] to [..., F] with the family's own clamps; `form` is
    the same function in numbers, which a kernel applies in registers, or None where it has no such form.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    pool_slots: tuple[int, ...]
    activation: Activation
    generation: int = 0
    form: SwiGLU | None = None

    @cached_property
    def experts(self) -> tuple[tuple[Tensor, Tensor, Tensor | None, Tensor | None], ...]:
        """Each local slot's own (gate_up, down, gate_up bias, down bias): views of the slabs, in dispatch order."""
        return tuple(
            (
                self.gate_up[pool_slot],
                self.down[pool_slot],
                None if self.gate_up_bias is None else self.gate_up_bias[pool_slot],
                None if self.down_bias is None else self.down_bias[pool_slot],
            )
            for pool_slot in self.pool_slots
        )

    @cached_property
    def stack(self) -> slice | Tensor:
        """Indexes a slab by local slot: a view where the pool slots are consecutive, a copy where they are not."""
        first, count = (self.pool_slots or (0,))[0], len(self.pool_slots)
        if self.pool_slots == tuple(range(first, first + count)):
            return slice(first, first + count)
        return torch.tensor(self.pool_slots, device=self.gate_up.device)

    @cached_property
    def slots_S(self) -> Tensor:
        """`pool_slots` as kernels read it: int32 [S] on the slabs' device."""
        return torch.tensor(self.pool_slots, dtype=torch.int32, device=self.gate_up.device)
