"""One MoE layer, in order. READ FIRST.

    routes -> plan -> (counts agreed by all peers) -> dispatch -> experts -> combine

Every invocation runs under exactly one header: one release, placement generation, group and epoch. All peers of the
group call `forward` for the same layer of the same unit, with zero tokens when they have none. Letters: T tokens,
K top-k, R received rows, D hidden, S physical slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ray_moe.comm.transports import Transport
from ray_moe.dataplane.audit import check_handle, trace_routes
from ray_moe.dataplane.dispatch import combine, dispatch
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.dataplane.plan import Plan, SlotMap, agree_layout, layout_record, make_plan, refusal_record
from ray_moe.dataplane.policies import ReplicaPolicy
from ray_moe.dataplane.runners import LayerWeights, Runner
from ray_moe.errors import ConfigError, RoutesError, StaleHandleError
from ray_moe.routes import Routes

# The unit kinds of the step agreement, numbered for the count exchange.
UNIT_KINDS = {"prefill": 0, "decode": 1, "bare": 2}


@dataclass
class LayerCounters:
    """Exact totals since the layer was built. Remote rows crossed to another peer; local ones did not."""

    invocations: int = 0
    rows_local: int = 0
    rows_sent: int = 0
    rows_received: int = 0
    audited: int = 0


@dataclass(frozen=True)
class Invocation:
    """Which execution of a layer this is: step id, unit kind, chunk of the unit, and whether it is audited.

    Raises `ConfigError` for a unit that the step agreement does not know, and for a chunk outside [0, 256).
    """

    step: int
    unit: str
    chunk: int = 0
    audit: bool = False

    def __post_init__(self) -> None:
        if self.unit not in UNIT_KINDS or not 0 <= self.chunk < 256:
            raise ConfigError(
                f"unit must be one of {', '.join(UNIT_KINDS)} and chunk in [0, 256), "
                f"found {self.unit!r} and {self.chunk}"
            )

    def number(self, layer: int) -> int:
        """A number that all peers must agree on before payload moves."""
        coordinates = (self.step * len(UNIT_KINDS) + UNIT_KINDS[self.unit]) * 4096 + layer
        return (coordinates * 256 + self.chunk) * 2 + self.audit


class ExpertLayer:
    """One MoE layer of one generation on one peer.

    Raises `StaleHandleError` when header, slots and transport are not of one generation, group and seat.
    """

    def __init__(
        self,
        header: HandleHeader,
        slots: SlotMap,
        weights: LayerWeights,
        transport: Transport,
        runner: Runner,
        policy: ReplicaPolicy,
        counters: LayerCounters,
    ) -> None:
        group = transport.group
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
        self.transport, self.runner, self.policy = transport, runner, policy
        self.counters = counters

    def forward(self, hidden_TD: Tensor, routes: Routes, invocation: Invocation) -> Tensor:
        """Gate-weighted sum of the routed experts for each token, [T, D], same dtype as `hidden_TD`.

        Raises `RoutesError` for hidden rows that do not fit the routes and for ids outside [0, E), `HandleError` when
        an audit finds a mistake, `CollectiveError` when the epoch breaks; `CountMismatchError` on every peer when they
        disagree, and on the others when one of them could not plan. When it raises, its handle is abandoned, not left
        in flight.
        """
        sealed = routes.seal() if invocation.audit else None
        plan = self._plan(hidden_TD, routes, invocation)
        record = layout_record(plan, self.header.digest64, invocation.number(self.slots.layer))
        layout = agree_layout(self.transport.group.gather_counts(record), self.slots)
        handle = self.header.bind(
            invocation.step,
            invocation.unit,
            self.slots.layer,
            invocation.chunk,
            plan,
            layout,
            semantic_digest=sealed,
        )
        try:
            rows_RD = dispatch(hidden_TD, handle, self.header, self.transport)
            rows_RD = self.runner.run(rows_RD, handle.expert_offsets_S1, self.weights)
            handle.lifetime.advance("run_experts")
            out_TD = combine(rows_RD, handle, self.header, self.transport)
            if sealed is not None:
                self._audit(handle, routes, sealed)
        except BaseException:
            handle.lifetime.advance("abandon")
            raise
        handle.lifetime.advance("release")
        self._count(handle.send_counts_P, handle.recv_counts_P)
        return out_TD

    def _plan(self, hidden_TD: Tensor, routes: Routes, invocation: Invocation) -> Plan:
        try:
            expected = (routes.num_tokens, self.weights.down.shape[1])
            if tuple(hidden_TD.shape) != expected or hidden_TD.dtype != self.header.abi.payload:
                raise RoutesError(
                    f"layer {self.slots.layer}: hidden must be {list(expected)} in {self.header.abi.payload}, "
                    f"found {list(hidden_TD.shape)} in {hidden_TD.dtype}"
                )
            return make_plan(routes, self.slots, self.policy)
        except Exception:
            # The others wait for our counts. Told so, they refuse this invocation too, and the epoch can go on.
            refusal = refusal_record(self.slots, self.header.digest64, invocation.number(self.slots.layer))
            self.transport.group.gather_counts(refusal)
            raise

    def _audit(self, handle: DispatchHandle, routes: Routes, sealed: str) -> None:
        trace_routes(handle, self.slots, self.transport)
        check_handle(handle, self.slots)
        routes.verify(sealed)
        self.counters.audited += 1

    def join_empty(self, hidden_TD: Tensor, top_k: int, invocation: Invocation) -> None:
        """Take part with zero tokens; `hidden_TD` [0, D] gives dtype and device."""
        empty_ids = torch.zeros(0, top_k, dtype=torch.int64, device=hidden_TD.device)
        empty_gates = torch.zeros(0, top_k, dtype=torch.float32, device=hidden_TD.device)
        self.forward(hidden_TD, Routes(empty_ids, empty_gates), invocation)

    def _count(self, sent_P: tuple[int, ...], received_P: tuple[int, ...]) -> None:
        mine = self.slots.my_peer
        self.counters.invocations += 1
        self.counters.rows_local += sent_P[mine]
        self.counters.rows_sent += sum(sent_P) - sent_P[mine]
        self.counters.rows_received += sum(received_P) - received_P[mine]
