"""What a step does between two agreements: the agreed units, forwarded through the trunk and committed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ray_moe.comm.agreement import Agreement
from ray_moe.dataplane.layer import Invocation
from ray_moe.dataplane.phases import Phase
from ray_moe.engine.blocks import BlockFacts, SharedPath
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.roles import Turn
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Emission, Scheduler
from ray_moe.engine.state import LoopCounters, ReleaseTally
from ray_moe.engine.steering import logprobs_of
from ray_moe.engine.trunk import Binding, Trunk
from ray_moe.engine.units import Row, StepPlan, UnitBatch, pack_unit
from ray_moe.errors import CollectiveError
from ray_moe.routes import Routes

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ran:
    """The units of a step that ran under one view."""

    view: GenerationView
    emissions: list[Emission] = field(default_factory=list)


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
        self._counted: set[int] | None = None  # layers that counted the routes of a unit that may have to run again
        self._empty_TD = torch.zeros(0, trunk.hidden_size, dtype=trunk.dtype, device=trunk.device)
        self._shared = shared
        self.bind(trunk, shared)

    def bind(self, trunk: Trunk, shared: Mapping[int, SharedPath]) -> None:
        """Make a trunk's MoE blocks call the view that a step runs under."""

        def bound(layer: int, _module: nn.Module) -> Binding:
            return self._experts(layer, shared.get(layer))

        trunk.bind(bound)

    @torch.inference_mode()
    def warm_up(self, trunk: Trunk) -> None:
        """Forward a token and then another through everything but the routed experts, before the first step.

        A first forward allocates the KV pools and touches all their memory: of a peer that joins, in a step that all
        the others wait for. What it leaves there lies in blocks that nobody owns.
        """

        def no_experts(layer: int, _module: nn.Module) -> Binding:
            shared = self._shared.get(layer)

            def run(hidden_TD: Tensor, _topk_ids_TK: Tensor, _topk_weights_TK: Tensor) -> Tensor:
                if shared is not None:
                    shared.begin(hidden_TD)
                    shared.end()
                return torch.zeros_like(hidden_TD)

            return run

        trunk.bind(no_experts)
        size, greedy = self._cache.block_size, SamplingParams(temperature=0.0)
        blocks = tuple(range(min(self._cache.num_blocks, -(-2 // size))))
        kinds: tuple[Phase, ...] = ("prefill", "decode")
        for position, kind in zip(range(len(blocks) * size), kinds, strict=False):
            row = Row(kind, "warm-up", 0, 0, position, 1, blocks, True, position)
            _outputs_of(trunk, self._cache, pack_unit(kind, [row], [[0]], [greedy], size, trunk.device))
        self.bind(trunk, self._shared)

    def run(self, plan: StepPlan, agreed: Agreement, turn: Turn) -> list[Ran]:
        """The agreed units in order, as `turn` says; without rows of our own we join each layer with zero tokens.

        What a canary of the same checkpoint cannot run is its fault, and runs under the view that serves instead, like
        the rest of the step. All peers find that together, or the epoch breaks: a layer refuses on all of them before
        rows move, and where one alone stops while they move it drops the epoch. Requests of another checkpoint can run
        under no other view: what such a canary cannot run is an error of the loop.
        """
        audit = self._audit_every > 0 and agreed.step % self._audit_every == 0
        for view in (turn.view, turn.shadow):
            if view is not None:
                view.policy.observe(agreed.rows_P)
        view = turn.view
        ran: list[Ran] = []
        for kind, unit in plan.agreed_units(prefill=agreed.prefill, decode=agreed.decode):
            batch = self._scheduler.materialise(unit) if unit is not None else None
            # First the shadow: what it writes into the KV cache is overwritten.
            shadowed = self._shadow(turn.shadow, agreed.step, kind, batch) if turn.shadow is not None else None
            logits_BV, done, invocation = None, False, Invocation(agreed.step, kind, audit=audit)
            if turn.instead is not None and view is turn.view:
                self._counted = set()
                logits_BV, done = self._try(view, invocation, batch)
                if not done:
                    view = turn.instead
                    view.policy.observe(agreed.rows_P)
            if not done:
                logits_BV = self._outputs(view, invocation, batch)
            self._counted = None
            if not ran or ran[-1].view is not view:
                ran.append(Ran(view))
            if logits_BV is None or batch is None or unit is None:
                continue
            tokens_B = batch.choose(logits_BV)
            logprobs = logprobs_of(logits_BV, tokens_B, batch.logprobs)
            tokens = tokens_B.tolist()
            if shadowed is not None and turn.shadow is not None:
                tally = self._counters.of_release(turn.shadow.release_id)
                _compare(tally, shadowed, logits_BV, batch.choose(shadowed).tolist(), tokens)
            ran[-1].emissions.extend(self._scheduler.commit(unit, batch, tokens, logprobs))
        for part in ran:
            self._counters.of_release(part.view.release_id).ran(agreed.step, len(part.emissions))
        return ran

    def forward(self, batch: UnitBatch) -> Tensor:
        """Logits [rows that sample, V] of one unit. May be replayed: KV writes go to the same places."""
        assert self._view is not None  # units run inside `run` only
        return _outputs_of(self._view.trunk, self._cache, batch)

    def _shadow(self, view: GenerationView, step: int, kind: Phase, batch: UnitBatch | None) -> Tensor | None:
        """A unit's logits under a candidate; None without rows. What the candidate cannot run is its fault, and the
        step's own units run all the same."""
        self._counters.of_release(view.release_id).shadow_steps += 1
        return self._try(view, Invocation(step, kind, shadow=True), batch)[0]

    def _try(self, view: GenerationView, invocation: Invocation, batch: UnitBatch | None) -> tuple[Tensor | None, bool]:
        """`_outputs` under a candidate, and whether it ran. A broken group is no fault of its: `CollectiveError`."""
        try:
            return self._outputs(view, invocation, batch), True
        except CollectiveError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a candidate does, the release that serves goes on
            self._counters.of_release(view.release_id).faults += 1
            where = f"rank {self._rank}: step {invocation.step}, {invocation.unit}, release {view.release_id}"
            _LOG.warning("%s: %r", where, error)
        return None, False

    def _outputs(self, view: GenerationView, invocation: Invocation, batch: UnitBatch | None) -> Tensor | None:
        """A unit's logits under a view; None without rows."""
        self._view, self._invocation = view, invocation
        if batch is not None:
            return self.forward(batch)
        self._join_empty(view)
        return None

    def _join_empty(self, view: GenerationView) -> None:
        for index, layer in view.layers.items():
            layer.join_empty(self._empty_TD, view.trunk.top_k, self._blocks[index].gate, self._invocation)

    def _experts(self, layer: int, shared: SharedPath | None) -> Binding:
        """What the trunk's MoE block of `layer` calls."""

        def run(hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
            assert self._view is not None  # the trunk runs inside `run` only
            invocation, counted = self._invocation, self._counted
            if counted is not None and layer in counted:
                invocation = replace(invocation, shadow=True)  # a route is one demand, however often it is tried
            routes = Routes(
                topk_ids_TK,
                topk_weights_TK,
                execution_scope_id=f"s{invocation.step}/{invocation.unit}/l{layer}",
                origin_partition=f"rank-{self._rank}",
            )
            if shared is None:
                out_TD = self._view.layers[layer].forward(hidden_TD, routes, invocation)
            else:
                shared.begin(hidden_TD)
                out_TD = self._view.layers[layer].forward(hidden_TD, routes, invocation, shared.run)
                shared.end()
            if counted is not None:
                counted.add(layer)
            return out_TD

        return run


def _outputs_of(trunk: Trunk, cache: KVCache, batch: UnitBatch) -> Tensor:
    output = trunk.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.sample_rows,
        ray_moe=cache.bind(batch),
    )
    logits: Tensor = output.logits[0]
    return logits


def _compare(
    tally: ReleaseTally, shadow_BV: Tensor, serving_BV: Tensor, shadow_tokens: list[int], tokens: list[int]
) -> None:
    tally.compared += len(tokens)
    tally.differing += sum(one != other for one, other in zip(shadow_tokens, tokens, strict=True))
    if not tokens:
        return
    tally.broken += int((~shadow_BV.isfinite().all(dim=1)).sum())
    tally.max_difference = max(tally.max_difference, float((shadow_BV - serving_BV).abs().max()))
