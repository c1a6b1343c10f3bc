"""What a step does between two agreements: the agreed units, forwarded through the trunk and committed.

On a CUDA device nobody waits for a step: it is launched, and committed while the device runs the next one, whose rows
take the tokens that the host does not know yet on the device. A row whose request turns out to have ended is computed
for nothing. Whoever needs all steps committed asks for it (`settle`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ray_moe.comm.agreement import Agreement
from ray_moe.dataplane.layer import ExpertLayer, Invocation
from ray_moe.dataplane.phases import FallbackReason, Phase
from ray_moe.dataplane.spans import Spans
from ray_moe.dataplane.traced import traced
from ray_moe.deadline import poll
from ray_moe.engine.blocks import BlockFacts, SharedPath
from ray_moe.engine.decode_graph import DecodeGraphs, recorder_on
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.ran import Ran
from ray_moe.engine.roles import Turn
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Scheduler
from ray_moe.engine.state import LoopCounters, ReleaseTally
from ray_moe.engine.steering import TokenLogprobs, logprobs_of
from ray_moe.engine.trunk import Binding, Trunk
from ray_moe.engine.unit_times import UnitTimes
from ray_moe.engine.units import Row, StepPlan, UnitBatch, UnitPlan, pack_unit
from ray_moe.errors import CollectiveError, DeadlineError
from ray_moe.routes import Routes

_LOG = logging.getLogger(__name__)


# A device that has not done a step after so long never will.
_STEP_S = 120.0
_SPIN_S = 100e-6


@dataclass(frozen=True)
class _Sampled:
    """A unit that has been launched: the tokens of its rows that sample, on the device; log probabilities, where they
    were asked for, are on the host."""

    unit: UnitPlan
    batch: UnitBatch
    tokens_B: Tensor
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]


@dataclass(frozen=True)
class _InFlight:
    """A step that is not committed: by view what it launched, in order, and all of its tokens."""

    step: int
    parts: tuple[tuple[GenerationView, list[_Sampled]], ...]
    tokens_N: Tensor  # on the device
    host_N: Tensor  # the same; there once `copied` is
    copied: torch.cuda.Event | None

    @staticmethod
    def of(step: int, parts: Sequence[tuple[GenerationView, list[_Sampled]]], device: torch.device) -> _InFlight:
        sampled = [one.tokens_B for _, launched in parts for one in launched]
        tokens_N = torch.cat(sampled) if sampled else torch.empty(0, dtype=torch.int64, device=device)
        if device.type != "cuda" or not sampled:
            return _InFlight(step, tuple(parts), tokens_N, tokens_N, None)
        host_N = torch.empty(tokens_N.shape, dtype=torch.int64, pin_memory=True)
        host_N.copy_(tokens_N, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _InFlight(step, tuple(parts), tokens_N, host_N, copied)

    @property
    def places(self) -> dict[int, int]:
        """By submission: where its token lies among the step's."""
        rows = (row for _, launched in self.parts for one in launched for row in one.batch.rows if row.samples)
        return {row.ticket: place for place, row in enumerate(rows)}

    def tokens(self) -> list[int]:
        """All tokens, waited for."""
        if self.copied is not None and not poll(self.copied.query, _STEP_S, _SPIN_S):
            raise DeadlineError(f"step {self.step} on the device", _STEP_S)
        return self.host_N.tolist()


class UnitRunner:
    """The trunks of one peer, their MoE blocks bound to whatever view a step runs under.

    `blocks` are the trunk's MoE blocks as they were probed, `shared` those whose shared expert runs beside the
    exchange. `audit_rate` is the share of steps that are audited. Decode units are replayed from graphs of
    `graph_sizes` rows where the layers can be; `ahead`: a step is committed when the next one has been launched.
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
        graph_sizes: Sequence[int] = (),
        ahead: bool = False,
    ) -> None:
        self._rank, self._cache, self._scheduler = rank, cache, scheduler
        self._blocks, self._counters = blocks, counters
        self._audit_every = round(1 / audit_rate) if audit_rate > 0 else 0
        self._view: GenerationView | None = None
        self._layers: Mapping[int, ExpertLayer] = {}  # the view's, or such as record
        self._spans: Spans | None = None  # of a step that is recorded
        self._times = UnitTimes(cache.device)
        self._invocation = Invocation(0, "decode")
        self._counted: set[int] | None = None  # layers that counted the routes of a unit that may have to run again
        self._empty_TD = torch.zeros(0, trunk.hidden_size, dtype=trunk.dtype, device=trunk.device)
        self._shared, self._ahead = shared, ahead
        self._in_flight: _InFlight | None = None
        self._graph_sizes, self._recorder = graph_sizes, recorder_on(cache.device) if graph_sizes else None
        self._graphs: dict[int, DecodeGraphs] = {}  # by trunk
        self.bind(trunk, shared)

    def bind(self, trunk: Trunk, shared: Mapping[int, SharedPath]) -> None:
        """Make a trunk's MoE blocks call the view that a step runs under."""

        def bound(layer: int, _module: nn.Module) -> Binding:
            return self._experts(layer, shared.get(layer))

        trunk.bind(bound)
        self._graphs = {key: graphs for key, graphs in self._graphs.items() if not graphs.forgotten}
        if self._recorder is not None:
            made = self._graphs.get(id(trunk.model))
            if made is None:
                made = DecodeGraphs(trunk, self._cache, self._graph_sizes, shared, self._recorder)
                self._graphs[id(trunk.model)] = made

    @torch.inference_mode()
    def warm_up(self, trunk: Trunk, view: GenerationView) -> None:
        """Forward a token and then another through everything but the routed experts, before the first step; then
        capture all graphs, under `view`.

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
        graphs = self._graphs.get(id(trunk.model))
        if graphs is not None and not isinstance(graphs.admit(view, 1), FallbackReason):
            graphs.bind(view)
            for rows in reversed(graphs.sizes):  # smaller graphs find room in what larger ones took
                self._capture(graphs, view, rows)

    def run(self, plan: StepPlan, agreed: Agreement, turn: Turn, spans: Spans | None = None) -> list[Ran]:
        """The agreed units in order, as `turn` says; without rows of our own we join each layer with zero tokens.
        Returns what has been committed: this step, or, where a step is committed later, those before it. A step that is
        recorded has `spans`.

        What a canary of the same checkpoint cannot run is its fault, and runs under the view that serves instead, like
        the rest of the step. All peers find that together, or the epoch breaks: a layer refuses on all of them before
        rows move, and where one alone stops while they move it drops the epoch. Requests of another checkpoint can run
        under no other view: what such a canary cannot run is an error of the loop.
        """
        self._spans = spans
        audit = self._audit_every > 0 and agreed.step % self._audit_every == 0
        for view in (turn.view, turn.shadow):
            if view is not None:
                view.policy.observe(agreed.rows_P)
        view = turn.view
        ahead = self._ahead and turn.shadow is None and turn.instead is None and not self._scheduler.steers(plan)
        ran = [] if ahead else self.settle()
        parts: list[tuple[GenerationView, list[_Sampled]]] = []
        for kind, unit in plan.agreed_units(prefill=agreed.prefill, decode=agreed.decode):
            batch = self._materialise(unit) if unit is not None else None
            # First the shadow: what it writes into the KV cache is overwritten.
            shadowed = self._shadow(turn.shadow, agreed.step, kind, batch) if turn.shadow is not None else None
            invocation = Invocation(agreed.step, kind, audit=audit, most_rows=agreed.most_rows(kind))
            logits_BV, done = None, False
            if turn.instead is not None and view is turn.view:
                self._counted = set()
                logits_BV, done = self._try(view, invocation, batch)
                if not done:
                    view = turn.instead
                    view.policy.observe(agreed.rows_P)
            if not done:
                logits_BV = self._outputs(view, invocation, batch)
            self._counted = None
            self._counters.units_of(view.release_id).ran(kind, invocation.fell_back)
            if not parts or parts[-1][0] is not view:
                parts.append((view, []))
            if logits_BV is None or batch is None or unit is None:
                continue
            tokens_B = batch.choose(logits_BV)
            if shadowed is not None and turn.shadow is not None:
                tally = self._counters.of_release(turn.shadow.release_id)
                _compare(tally, shadowed, logits_BV, batch.choose(shadowed).tolist(), tokens_B.tolist())
            logprobs = logprobs_of(logits_BV, tokens_B, batch.logprobs)
            parts[-1][1].append(_Sampled(unit, batch, tokens_B, logprobs))
        launched = _InFlight.of(agreed.step, parts, self._cache.device) if parts else None
        ran += self.settle()  # the step before, while the device runs this one
        self._in_flight = launched
        return ran if ahead else ran + self.settle()

    @property
    def steps_in_flight(self) -> int:
        """Steps that are launched and not committed."""
        return int(self._in_flight is not None)

    def settle(self) -> list[Ran]:
        """Wait for what is launched, and commit it."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        if self._spans is None:
            return self._commit(step)
        with self._spans.span("commit"):
            ran = self._commit(step)
        self._times.committed(self._spans, step.step)
        return ran

    def _commit(self, step: _InFlight) -> list[Ran]:
        tokens, start, ran = step.tokens(), 0, []
        for view, launched in step.parts:
            view.transport.check()  # a launch that gave up waiting for a peer has ended too
            part = Ran(view, step.step)
            for one in launched:
                end = start + one.tokens_B.numel()
                part.emissions.extend(self._scheduler.commit(one.unit, one.batch, tokens[start:end], one.logprobs))
                start = end
            self._counters.of_release(view.release_id).ran(step.step, len(part.emissions))
            ran.append(part)
        return ran

    def drop(self) -> None:
        """Nobody will know what is launched: the loop has failed."""
        self._in_flight = None

    def _materialise(self, unit: UnitPlan) -> UnitBatch | None:
        """The unit with its tokens; those of the step in flight come to their places on the device."""
        before = self._in_flight
        if before is None:
            return self._scheduler.materialise(unit)
        batch = self._scheduler.materialise(unit, before.places)
        if batch is None or not len(before.tokens_N):
            return batch
        known = batch.input_ids >= 0
        sampled = before.tokens_N[(-1 - batch.input_ids).clamp(min=0)]
        return replace(batch, input_ids=torch.where(known, batch.input_ids, sampled))

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
        self._view, self._invocation, self._layers = view, invocation, view.layers
        if self._spans is None:
            return self._compute(view, invocation, batch)
        self._layers = traced(view.layers, self._spans)
        name = f"shadow {invocation.unit}" if invocation.shadow else invocation.unit
        with self._times.unit(self._spans, invocation.step, name):
            return self._compute(view, invocation, batch)

    def _compute(self, view: GenerationView, invocation: Invocation, batch: UnitBatch | None) -> Tensor | None:
        if invocation.unit == "decode" and self._counted is None and not invocation.shadow:
            graphs = self._graphs.get(id(view.trunk.model))
            if graphs is not None and (rows := self._admitted(graphs, view, invocation, batch)):
                return graphs.launch(view, rows, batch)
        if batch is not None:
            return self.forward(batch)
        self._join_empty(view)
        return None

    def _admitted(
        self, graphs: DecodeGraphs, view: GenerationView, invocation: Invocation, batch: UnitBatch | None
    ) -> int:
        """The rows of the graph that takes the decode unit; 0 where it falls back, which is counted."""
        most = invocation.most_rows or (0 if batch is None else batch.num_tokens)
        decision: int | str = "audited" if invocation.audit else graphs.admit(view, most)
        if isinstance(decision, int):
            if not graphs.is_bound(view):
                graphs.bind(view)
            if decision in graphs.captured or self._capture(graphs, view, decision):
                return decision
            decision = FallbackReason.KEY_MISMATCH
        for layer in view.layers.values():
            layer.counters.fallbacks[decision] += 1
        invocation.fell_back.append(decision)
        return 0

    def _capture(self, graphs: DecodeGraphs, view: GenerationView, rows: int) -> bool:
        """Whether the graph of so many rows could be captured. A trunk that cannot be is served without graphs."""
        if graphs.failure is not None:
            return False
        try:
            graphs.capture(view, rows)
        except RuntimeError as error:
            graphs.failure = repr(error)
            _LOG.warning("rank %d: %s runs without graphs: %r", self._rank, view.release_id, error)
        return graphs.failure is None

    def _join_empty(self, view: GenerationView) -> None:
        for index, layer in self._layers.items():
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
                out_TD = self._layers[layer].forward(hidden_TD, routes, invocation)
            else:
                shared.begin(hidden_TD)
                out_TD = self._layers[layer].forward(hidden_TD, routes, invocation, shared.run)
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
