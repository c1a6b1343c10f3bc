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
from ray_moe.dataplane.dispatch import combine, dispatch
from ray_moe.dataplane.handle import HandleHeader
from ray_moe.dataplane.plan import SlotMap, agree_layout, layout_record, make_plan
from ray_moe.dataplane.policies import ReplicaPolicy
from ray_moe.dataplane.runners import LayerWeights, Runner
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
    """Which execution of a layer this is: step id, unit kind, chunk of the unit, and whether routes are sealed."""

    step: int
    unit: str
    chunk: int = 0
    audit: bool = False

    def number(self, layer: int) -> int:
        """A number that all peers must agree on before payload moves."""
        return ((self.step * len(UNIT_KINDS) + UNIT_KINDS[self.unit]) * 4096 + layer) * 256 + self.chunk


class ExpertLayer:
    """One MoE layer of one generation on one peer."""

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
        self.header, self.slots, self.weights = header, slots, weights
        self.transport, self.runner, self.policy = transport, runner, policy
        self.counters = counters

    def forward(self, hidden_TD: Tensor, routes: Routes, invocation: Invocation) -> Tensor:
        """Gate-weighted sum of the routed experts for each token, [T, D], same dtype as `hidden_TD`.

        Raises `RoutesError` for ids outside [0, E), `CountMismatchError` on every peer when peers disagree,
        `CollectiveError` when the epoch breaks. When it raises, its handle is abandoned, not left in flight.
        """
        sealed = routes.seal() if invocation.audit else None
        plan = make_plan(routes, self.slots, self.policy)
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
        except BaseException:
            handle.lifetime.advance("abandon")
            raise
        if sealed is not None:
            routes.verify(sealed)
            self.counters.audited += 1
        handle.lifetime.advance("release")
        self._count(handle.send_counts_P, handle.recv_counts_P)
        return out_TD

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
