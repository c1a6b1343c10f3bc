"""One MoE layer, in order. READ FIRST.

    routes -> plan -> (counts agreed by all peers) -> admit -> dispatch -> experts -> combine
    routes -> local                  where the host looks into nothing: one GPU has every expert, or windows carry rows

Every invocation runs under exactly one header: one release, placement generation, group and epoch. All peers of the
group call `forward` for the same layer of the same unit, with zero tokens when they have none. How the last three are
executed is the path's: `paths.py` for units of any size, `captured.py` for decode units that fit a fixed shape.
Letters: T tokens, K top-k, R received rows, D hidden, S physical slots.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ray_moe.comm.transports import chunk_span
from ray_moe.dataplane.adaptive import AdaptivePaths
from ray_moe.dataplane.audit import audit
from ray_moe.dataplane.captured import CapturedDecode
from ray_moe.dataplane.counters import LayerCounters, Seat
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.dataplane.invocation_ledger import InvocationLedger, Meter, take
from ray_moe.dataplane.local import DeviceLayer
from ray_moe.dataplane.paths import Path, SharedExpert
from ray_moe.dataplane.phases import PHASES, Fallback, Phase, Replay, UnitAccount
from ray_moe.dataplane.plan import (
    Layout,
    Plan,
    SlotMap,
    agree_layouts,
    has_refusal,
    layout_record,
    make_plan,
    refusal_record,
)
from ray_moe.dataplane.policies import Assigned, ReplicaPolicy
from ray_moe.dataplane.route_counts import RouteCounts
from ray_moe.dataplane.runners import LayerWeights
from ray_moe.dataplane.strategies import strategy_named
from ray_moe.errors import ConfigError, CountMismatchError, HandleError, RoutesError, StaleHandleError
from ray_moe.routes import Routes
from ray_moe.topology_ledger import FanOut

_WHOLE = strategy_named("bulk")


@dataclass(frozen=True)
class Invocation:
    """Which execution of a layer this is: step id, unit kind, whether it is audited, and whether it is the `shadow` of
    another one: then its routes are no demand. `most_rows` is the most tokens that any peer has in it, as they agreed;
    None leaves it to this peer's own. `fell_back` takes why layers did not replay it.

    Raises `ConfigError` for a unit that the step agreement does not know.
    """

    step: int
    unit: Phase
    audit: bool = False
    shadow: bool = False
    most_rows: int | None = None
    fell_back: list[str] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        if self.unit not in PHASES:
            raise ConfigError(f"unit must be one of {', '.join(PHASES)}, found {self.unit!r}")

    def number(self, layer: int) -> int:
        """A number that all peers must agree on before payload moves."""
        return ((self.step * len(PHASES) + PHASES.index(self.unit)) * 4096 + layer) * 2 + self.audit


class ExpertLayer:
    """One MoE layer of one generation on one peer.

    `local` takes what it can, unless it is audited; `captured` replays decode units that fit; every other unit takes
    `path`, or what `adaptive` chooses. `route_counts`
    is the rank's, for all layers and generations. Raises `StaleHandleError` when header, slots and transport are not of
    one generation, group and seat.
    """

    def __init__(
        self,
        header: HandleHeader,
        slots: SlotMap,
        weights: LayerWeights,
        path: Path,
        policy: ReplicaPolicy,
        counters: LayerCounters,
        captured: CapturedDecode | None = None,
        route_counts: RouteCounts | None = None,
        adaptive: AdaptivePaths | None = None,
        local: DeviceLayer | None = None,
    ) -> None:
        group = path.transport.group
        if (header.generation, header.epoch) != (slots.generation, group.spec.epoch):
            raise StaleHandleError(
                f"layer {slots.layer}: header of generation {header.generation} epoch {header.epoch}, "
                f"slots of generation {slots.generation}, group in epoch {group.spec.epoch}"
            )
        if (slots.my_peer, slots.num_peers) != (group.peer_slot, len(group.spec)):
            raise StaleHandleError(
                f"layer {slots.layer}: slots compiled for peer {slots.my_peer} of {slots.num_peers}, "
                f"this is peer {group.peer_slot} of {len(group.spec)}"
            )
        self.header, self.slots, self.weights = header, slots, weights
        self.path, self.captured, self.local = path, captured, local
        self.policy, self.counters, self.route_counts, self.adaptive = policy, counters, route_counts, adaptive
        self._seat = Seat.of(slots, header)

    def forward(
        self, hidden_TD: Tensor, routes: Routes, invocation: Invocation, shared: SharedExpert | None = None
    ) -> Tensor:
        """Gate-weighted sum of the routed experts for each token, [T, D], same dtype as `hidden_TD`.

        `shared` is called at most once, while routed rows are in flight, by a strategy that has a place for it. Raises
        `RoutesError` for hidden rows that do not fit the routes and, but on devices alone and unaudited, for ids
        outside [0, E), `HandleError` when an audit
        finds a mistake, `CollectiveError` when the epoch breaks; `CountMismatchError` on every peer when they disagree,
        and on the others when one of them could not plan. When it raises, its handles are abandoned, not left in
        flight.
        """
        if self.local is not None and not invocation.audit and self.local.takes(hidden_TD, routes):
            return self._run_on_device(self.local, hidden_TD, routes, invocation, shared)
        sealed = routes.seal() if invocation.audit else None
        eager = self._eager_path(invocation.unit)
        batches = _batches(routes, eager.strategy.batches)
        plans = self._plan(hidden_TD, batches, invocation)
        number = invocation.number(self.slots.layer)
        gathered = self._gather_counts(layout_record(plans, self.header.digest64, number))
        if self.adaptive is not None:
            gathered, micros_P = self.adaptive.split(gathered)
        layouts = self._agree(gathered, len(batches))
        if self.adaptive is not None:
            name, chosen = self.adaptive.choose(invocation.unit, layouts[0], micros_P)
            self.counters.choices[f"{invocation.unit}: {name}"] += 1
            eager = replace(chosen, strategy=eager.strategy)

        begun = False

        def run(path: Path, hidden_TD: Tensor) -> Tensor:
            nonlocal begun
            begun = True
            rows = [hidden_TD] if len(batches) == 1 else hidden_TD.split([batch.num_tokens for batch in batches])
            return self._run(path, rows, plans, layouts, invocation, sealed, shared)

        decision = self._admit(invocation, layouts, routes.top_k)
        if self.captured is not None and isinstance(decision, Replay):
            try:
                out_TD = self.captured.replay(decision, number, hidden_TD, routes, layouts[0], run)
            except BaseException:
                if not begun:
                    self._stop_alone()
                raise
        elif self.adaptive is not None:
            out_TD = run(eager, hidden_TD)
            self.adaptive.watch.stop()
        else:
            out_TD = run(eager, hidden_TD)
        if sealed is not None:
            self._verify(routes, sealed, invocation)
        if self.route_counts is not None and not invocation.shadow:
            self.route_counts.add(self.slots.layer, invocation.unit, routes.topk_ids)
        return out_TD

    def assigned(self, physical_slot_N: Tensor) -> ExpertLayer:
        """This layer under replica choices that are made already, by route id from 0; each is checked as any other.

        Between several peers its invocations go by handles: only there are counts agreed that no step record says.
        """
        layer = copy.copy(self)
        layer.policy = Assigned(physical_slot_N)
        if self.slots.num_peers > 1:
            layer.local = None
        return layer

    def _eager_path(self, unit: Phase) -> Path:
        """An executable takes a unit whole: with executables a decode unit is planned whole, replayed or not."""
        if self.captured is None or unit != "decode" or self.path.strategy.batches == 1:
            return self.path
        return replace(self.path, strategy=_WHOLE)

    def _run_on_device(
        self, layer: DeviceLayer, hidden_TD: Tensor, routes: Routes, invocation: Invocation, shared: SharedExpert | None
    ) -> Tensor:
        try:
            self._require_hidden(hidden_TD, routes.num_tokens)
            capacity = max(1, routes.num_tokens if invocation.most_rows is None else invocation.most_rows)
            out_TD = layer.run(hidden_TD, routes, capacity=capacity, shared=shared)
        except BaseException:
            self._stop_alone()
            raise
        if self.route_counts is not None and not invocation.shadow:
            self.route_counts.add(self.slots.layer, invocation.unit, routes.topk_ids)
        self.count_on_device(invocation.unit, routes.num_routes)
        return out_TD

    def count_on_device(self, unit: Phase, routes: int) -> None:
        """Enter an invocation with so many routes of this peer's, which the host did not look into."""
        counters = self.counters
        counters.invocations += 1
        if self.slots.num_peers > 1:
            counters.windowed += 1
            counters.routes.ran_windowed(unit, routes)
        else:
            counters.local += 1
            counters.rows_local += routes
            counters.routes.ran(unit, self._seat.topology, attempted=routes, accepted=routes, remote=0, inter_node=0)

    def _require_hidden(self, hidden_TD: Tensor, num_tokens: int) -> None:
        expected = (num_tokens, self.weights.down.shape[1])
        if tuple(hidden_TD.shape) != expected or hidden_TD.dtype != self.header.abi.payload:
            raise RoutesError(
                f"layer {self.slots.layer}: hidden must be {list(expected)} in {self.header.abi.payload}, "
                f"found {list(hidden_TD.shape)} in {hidden_TD.dtype}"
            )

    def _plan(self, hidden_TD: Tensor, batches: Sequence[Routes], invocation: Invocation) -> list[Plan]:
        try:
            self._require_hidden(hidden_TD, sum(batch.num_tokens for batch in batches))
            return [make_plan(batch, self.slots, self.policy) for batch in batches]
        except Exception:
            # The others wait for our counts. Told so, they refuse this invocation too, and the epoch can go on.
            number = invocation.number(self.slots.layer)
            refusal = refusal_record(self.slots, self.header.digest64, number, len(batches))
            self._gather_counts(refusal)
            raise

    def _gather_counts(self, record: Tensor) -> Tensor:
        if self.adaptive is not None:
            record = self.adaptive.annotate(record)
        return self.path.transport.group.gather_counts(record)

    def _agree(self, gathered: Tensor, batches: int) -> tuple[Layout, ...]:
        try:
            return agree_layouts(gathered, self.slots, batches)
        except CountMismatchError:
            if not has_refusal(gathered):  # whoever refuses its own routes has counted nothing
                self.counters.routes.unconserved[self.header.epoch] += 1
            raise

    def _verify(self, routes: Routes, sealed: str, invocation: Invocation) -> None:
        try:
            routes.verify(sealed)
        except RoutesError:
            self.counters.routes.mismatches[invocation.unit] += 1
            raise
        self.counters.audited += 1

    def _admit(self, invocation: Invocation, layouts: Sequence[Layout], top_k: int) -> Replay | None:
        """The executable that takes this unit, the same on every peer; None for the eager path."""
        if self.captured is None or invocation.unit != "decode":
            return None
        decision = self.captured.admit(invocation.unit, layouts, top_k)
        if isinstance(decision, Fallback):
            self.counters.fallbacks[decision.reason] += 1
            invocation.fell_back.append(decision.reason)
            return None
        self.counters.replays += 1
        self.counters.routes.replays[decision.executable_id] += 1
        return decision

    def _run(
        self,
        path: Path,
        hidden: Sequence[Tensor],
        plans: Sequence[Plan],
        layouts: Sequence[Layout],
        invocation: Invocation,
        sealed: str | None,
        shared: SharedExpert | None,
    ) -> Tensor:
        coordinates = (invocation.step, invocation.unit, self.slots.layer)
        handles: list[DispatchHandle] = []
        moving = True
        try:
            handles = path.bind(self.header, coordinates, plans, layouts, self.slots.my_peer, sealed)
            meter = Meter(path.transport, handles[0].handle_id)
            out_TD = path.run(hidden, handles, self.weights, shared)
            moving = False
            if invocation.audit:
                measured = meter.read()
                fan_out = self._audit(handles, plans, path, invocation)
                account = self._account(invocation, layouts, path) if self.captured is not None else None
                self._enter(take(path, handles, layouts, self.slots, self.weights, fan_out, account, measured))
        except BaseException as error:
            if isinstance(error, CountMismatchError):
                self.counters.routes.unconserved[self.header.epoch] += 1
            if moving:
                self._stop_alone()
            for handle in handles:
                handle.abandon()
            raise
        for handle in handles:
            handle.release()
        self.counters.enter(handles, self._seat, invocation.unit, sum(rows_TD.shape[0] for rows_TD in hidden))
        return out_TD

    def _audit(
        self, handles: Sequence[DispatchHandle], plans: Sequence[Plan], path: Path, invocation: Invocation
    ) -> FanOut:
        try:
            return audit(handles, plans, self.slots, path.transport)
        except HandleError:
            self.counters.routes.mismatches[invocation.unit] += 1
            raise

    def _stop_alone(self) -> None:
        """The others send and wait for rows that were agreed: what this peer does next must not meet them by chance."""
        if self.slots.num_peers > 1:
            self.path.transport.close()

    def _account(self, invocation: Invocation, layouts: Sequence[Layout], path: Path) -> UnitAccount:
        assert self.captured is not None
        submitted = 1 if path.slot_capacity is not None else len(path.strategy.order)
        return self.captured.account(invocation.unit, layouts, submitted)

    def _enter(self, ledger: InvocationLedger) -> None:
        self.counters.ledger = ledger
        spread = ledger.fan_out
        self.counters.fan_out["tokens"] += spread.tokens
        self.counters.fan_out["ranks"] += int(spread.mean_ranks * spread.tokens)
        self.counters.fan_out["nodes"] += int(spread.mean_nodes * spread.tokens)

    def join_empty(self, hidden_TD: Tensor, top_k: int, gate: torch.dtype, invocation: Invocation) -> None:
        """Take part with zero tokens; `hidden_TD` [0, D] gives dtype and device, `gate` is the router's dtype."""
        empty_ids = torch.zeros(0, top_k, dtype=torch.int64, device=hidden_TD.device)
        empty_gates = torch.zeros(0, top_k, dtype=gate, device=hidden_TD.device)
        self.forward(hidden_TD, Routes(empty_ids, empty_gates), invocation)


def _batches(routes: Routes, parts: int) -> list[Routes]:
    """The unit's tokens as its strategy takes them; all peers cut as many batches, empty ones too."""
    if parts == 1:
        return [routes]
    spans = [chunk_span(routes.num_tokens, (index, parts)) for index in range(parts)]
    return [
        replace(
            routes,
            topk_ids=routes.topk_ids[start:end],
            topk_weights=routes.topk_weights[start:end],
            first_route_id=routes.first_route_id + start * routes.top_k,
        )
        for start, end in spans
    ]
