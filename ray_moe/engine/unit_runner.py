"""What a step does between two agreements: the agreed units, forwarded through the trunk and committed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ray_moe.comm.agreement import Agreement
from ray_moe.dataplane.layer import Invocation
from ray_moe.dataplane.phases import Phase
from ray_moe.engine.blocks import BlockFacts, SharedPath
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.roles import Turn
from ray_moe.engine.scheduler import Emission, Scheduler
from ray_moe.engine.state import LoopCounters, ReleaseTally
from ray_moe.engine.trunk import Binding, Trunk
from ray_moe.engine.units import StepPlan, UnitBatch
from ray_moe.errors import CollectiveError, RayMoEError
from ray_moe.routes import Routes


class UnitRunner:
    """The trunks of one peer, their MoE blocks bound to whatever view a step runs under.

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
        counters: LoopCounters,
    ) -> None:
        self._rank, self._cache, self._scheduler = rank, cache, scheduler
        self._blocks, self._counters = blocks, counters
        self._audit_every = round(1 / audit_rate) if audit_rate > 0 else 0
        self._view: GenerationView | None = None
        self._invocation = Invocation(0, "decode")
        self._empty_TD = torch.zeros(0, trunk.hidden_size, dtype=trunk.dtype, device=trunk.device)
        self.bind(trunk, shared)

    def bind(self, trunk: Trunk, shared: Mapping[int, SharedPath]) -> None:
        """Make a trunk's MoE blocks call the view that a step runs under."""

        def bound(layer: int, _module: nn.Module) -> Binding:
            return self._experts(layer, shared.get(layer))

        trunk.bind(bound)

    def run(self, plan: StepPlan, agreed: Agreement, turn: Turn) -> list[Emission]:
        """The agreed units in order, as `turn` says; without rows of our own we join each layer with zero tokens."""
        audit = self._audit_every > 0 and agreed.step % self._audit_every == 0
        emissions: list[Emission] = []
        for view in (turn.view, turn.shadow):
            if view is not None:
                view.policy.observe(agreed.rows_P)
        units = plan.agreed_units(prefill=agreed.prefill, decode=agreed.decode)
        for kind, unit in units:
            batch = self._scheduler.materialise(unit) if unit is not None else None
            # First the shadow: what it writes into the KV cache is overwritten.
            shadowed = self._shadow(turn.shadow, agreed.step, kind, batch) if turn.shadow is not None else None
            self._view, self._invocation = turn.view, Invocation(agreed.step, kind, audit=audit)
            if batch is None or unit is None:
                self._join_empty(turn.view)
                continue
            logits_BV = self.forward(batch)
            tokens = batch.sampling.sample(logits_BV).tolist()
            if shadowed is not None and turn.shadow is not None:
                tally = self._counters.of_release(turn.shadow.release_id)
                _compare(tally, shadowed, logits_BV, batch.sampling.sample(shadowed).tolist(), tokens)
            emissions += self._scheduler.commit(unit, batch, tokens)
        if units:
            self._counters.of_release(turn.view.release_id).ran(agreed.step, len(emissions))
        return emissions

    def forward(self, batch: UnitBatch) -> Tensor:
        """Logits [rows that sample, V] of one unit. May be replayed: KV writes go to the same places."""
        assert self._view is not None  # units run inside `run` only
        output = self._view.trunk.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.sample_rows,
            ray_moe=self._cache.bind(batch),
        )
        logits: Tensor = output.logits[0]
        return logits

    def _shadow(self, view: GenerationView, step: int, kind: Phase, batch: UnitBatch | None) -> Tensor | None:
        """A unit's logits under a candidate; None without rows. What the candidate cannot run is its fault, and the
        step's own units run all the same, unless the group is broken."""
        self._view, self._invocation = view, Invocation(step, kind, shadow=True)
        tally = self._counters.of_release(view.release_id)
        tally.shadow_steps += 1
        try:
            if batch is not None:
                return self.forward(batch)
            self._join_empty(view)
        except CollectiveError:
            raise
        except RayMoEError:
            tally.faults += 1
        return None

    def _join_empty(self, view: GenerationView) -> None:
        for index, layer in view.layers.items():
            layer.join_empty(self._empty_TD, view.trunk.top_k, self._blocks[index].gate, self._invocation)

    def _experts(self, layer: int, shared: SharedPath | None) -> Binding:
        """What the trunk's MoE block of `layer` calls."""

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


def _compare(
    tally: ReleaseTally, shadow_BV: Tensor, serving_BV: Tensor, shadow_tokens: list[int], tokens: list[int]
) -> None:
    tally.compared += len(tokens)
    tally.differing += sum(one != other for one, other in zip(shadow_tokens, tokens, strict=True))
    if not tokens:
        return
    tally.broken += int((~shadow_BV.isfinite().all(dim=1)).sum())
    tally.max_difference = max(tally.max_difference, float((shadow_BV - serving_BV).abs().max()))
