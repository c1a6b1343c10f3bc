"""What a step does between two agreements: the agreed units, forwarded through the trunk and committed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ray_moe.comm.agreement import Agreement
from ray_moe.dataplane.layer import Invocation
from ray_moe.engine.blocks import BlockFacts, SharedPath
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.scheduler import Emission, Scheduler
from ray_moe.engine.trunk import Binding, Trunk
from ray_moe.engine.units import StepPlan, UnitBatch
from ray_moe.routes import Routes


class UnitRunner:
    """The trunk of one peer, its MoE blocks bound to whatever generation a step runs under.

    `blocks` are the trunk's MoE blocks as they were probed, `shared` those whose shared expert runs beside the
    exchange. `audit_rate` is the share of steps that are audited.
    """

    def __init__(
        self,
        rank: int,
        trunk: Trunk,
        cache: KVCache,
        scheduler: Scheduler,
        blocks: Mapping[int, BlockFacts],
        shared: Mapping[int, SharedPath],
        audit_rate: float,
    ) -> None:
        self._rank, self._trunk, self._cache, self._scheduler = rank, trunk, cache, scheduler
        self._blocks, self._shared = blocks, shared
        self._audit_every = round(1 / audit_rate) if audit_rate > 0 else 0
        self._view: GenerationView | None = None
        self._invocation = Invocation(0, "decode")
        self._empty_TD = torch.zeros(0, trunk.hidden_size, dtype=trunk.dtype, device=trunk.device)
        trunk.bind(self._experts)

    def run(self, plan: StepPlan, agreed: Agreement, view: GenerationView) -> list[Emission]:
        """The agreed units in order, under `view`; without rows of our own we join each layer with zero tokens."""
        self._view = view
        audit = self._audit_every > 0 and agreed.step % self._audit_every == 0
        emissions: list[Emission] = []
        view.policy.observe(agreed.rows_P)
        for kind, unit in plan.agreed_units(prefill=agreed.prefill, decode=agreed.decode):
            self._invocation = Invocation(agreed.step, kind, audit=audit)
            batch = self._scheduler.materialise(unit) if unit is not None else None
            if batch is None or unit is None:
                self._join_empty(view)
            else:
                tokens = batch.sampling.sample(self.forward(batch)).tolist()
                emissions += self._scheduler.commit(unit, batch, tokens)
        return emissions

    def forward(self, batch: UnitBatch) -> Tensor:
        """Logits [rows that sample, V] of one unit. May be replayed: KV writes go to the same places."""
        output = self._trunk.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.sample_rows,
            ray_moe=self._cache.bind(batch),
        )
        logits: Tensor = output.logits[0]
        return logits

    def _join_empty(self, view: GenerationView) -> None:
        for index, layer in view.layers.items():
            layer.join_empty(self._empty_TD, self._trunk.top_k, self._blocks[index].gate, self._invocation)

    def _experts(self, layer: int, _module: nn.Module) -> Binding:
        """What the trunk's MoE block of `layer` calls."""
        shared = self._shared.get(layer)

        def run(hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
            assert self._view is not None  # the trunk runs inside `run` only
            invocation = self._invocation
            routes = Routes(
                topk_ids_TK,
                topk_weights_TK,
                execution_scope_id=f"s{invocation.step}/{invocation.unit}/l{layer}",
                origin_partition=f"rank-{self._rank}",
            )
            if shared is None:
                return self._view.layers[layer].forward(hidden_TD, routes, invocation)
            shared.begin(hidden_TD)
            out_TD = self._view.layers[layer].forward(hidden_TD, routes, invocation, shared.run)
            shared.end()
            return out_TD

        return run
