"""Chunks and the other strategies of a path: worked examples, the order of one call, and what a failure leaves behind.

Letters: T tokens, K top-k, S slots, P peers, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.comm.exchange import Exchange, ExchangeState
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.join import transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.transports import CountMatrix, LinkRows, Transport
from ray_moe.dataplane.audit import check_handles
from ray_moe.dataplane.chunks import Chunk, in_chunks
from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.layer import ExpertLayer, Invocation
from ray_moe.dataplane.plan import Layout, Plan, agree_layouts, layout_record, plan_assignment
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.rows import ExpertRows
from ray_moe.dataplane.runners import Grouped, LayerWeights, Runner, runner_named
from ray_moe.dataplane.strategies import STRATEGIES, strategy_named
from ray_moe.errors import CollectiveError, ConfigError, HandleError
from ray_moe.identity import GlobalRank
from ray_moe.routes import Routes
from tests.layers import (
    ONE_PEER,
    Experts,
    header_of,
    layer_on,
    named,
    placement,
    random_routes,
    slot_map,
    spec_of,
)
from tests.peers import Peers, peers, transport_over

__all__ = ["peers"]

# fp32 sums of a dozen products of size one, in another order than the oracle's.
FP32: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
EXPERTS, TOP_K, HIDDEN, FFN = 3, 2, 8, 5


# -- By hand

# Two peers; experts 0 and 2 on peer 0, expert 1 on peer 1. Dispatch order: 0, 2 | 1.
WORKED = placement([(0, 0), (1, 1), (2, 0)], spec_of((0, 1)))
# What each peer's six and two routes want, in semantic order.
WANTED = ([0, 1, 2, 0, 1, 0], [1, 2])


def worked(chunks: int) -> tuple[list[Plan], list[Layout], list[tuple[Chunk, ...]]]:
    slots = [slot_map(WORKED, peer) for peer in (0, 1)]
    plans = []
    for peer, experts in enumerate(WANTED):
        ids_TK = torch.tensor(experts).view(-1, TOP_K)
        routes = Routes(ids_TK, torch.ones(ids_TK.shape))
        plans.append(plan_assignment(routes, ids_TK.flatten(), slots[peer]))  # expert e lies at manifest position e
    records = torch.stack([layout_record([plan], 0, 0) for plan in plans])
    layouts = [agree_layouts(records, each)[0] for each in slots]
    return plans, layouts, [in_chunks(plans[peer], layouts[peer], chunks, peer) for peer in (0, 1)]


def test_two_chunks_of_a_small_plan_are_those_written_down_here() -> None:
    plans, layouts, parts = worked(2)
    # Peer 0 sends routes 0, 3, 5 (slot 0) and 2 (slot 2) to itself, 1 and 4 to peer 1; each pair's rows are halved.
    assert plans[0].order_N.tolist() == [0, 3, 5, 2, 1, 4]
    assert [part.order_N.tolist() for part in parts[0]] == [[0, 3, 1], [5, 2, 4]]
    # Peer 1 sends route 1 to peer 0 and route 0 to itself: of one row the second half is everything.
    assert [part.order_N.tolist() for part in parts[1]] == [[], [1, 0]]
    assert [part.layout.counts_PP for part in parts[0]] == [((2, 1), (0, 0)), ((2, 1), (1, 1))]
    assert [part.layout.counts_PP for part in parts[1]] == [part.layout.counts_PP for part in parts[0]]
    # At peer 0, by source and slot (0, then 2).
    assert [part.layout.recv_counts_PS for part in parts[0]] == [((2, 0), (0, 0)), ((1, 1), (0, 1))]
    assert [part.layout.expert_offsets_S1 for part in parts[0]] == [(0, 2, 2), (0, 1, 3)]
    assert [part.layout.recv_counts_PS for part in parts[1]] == [((1,), (0,)), ((1,), (1,))]
    assert all(part.layout.slot_rows_S == layouts[0].slot_rows_S == (3, 2, 3) for part in parts[0])


def test_one_chunk_is_the_plan_itself_and_more_chunks_than_rows_leave_some_empty() -> None:
    plans, layouts, parts = worked(1)
    assert [
        (part.order_N is plan.order_N, part.layout is layout)
        for (part,), plan, layout in zip(parts, plans, layouts, strict=True)
    ] == [(True, True)] * 2
    _, _, parts = worked(9)
    assert [len(part.order_N) for part in parts[1]] == [0] * 8 + [2]
    # Nine parts of the four rows that stay and of the two that go.
    assert [len(part.order_N) for part in parts[0]] == [0, 0, 1, 0, 2, 0, 1, 0, 2]


@pytest.mark.parametrize("name", ["chunk_pipeline", "microbatch_pipeline"])
def test_a_pipeline_of_no_parts_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="chunks and batches must be >= 1, found 0"):
        strategy_named(name, 0)


def test_an_audit_catches_chunks_that_cover_a_route_twice() -> None:
    plans, _, parts = worked(2)
    slots, header = slot_map(WORKED, 0), header_of(WORKED)
    handles = [
        header.bind(0, "bare", 0, index, plans[0], part.layout, order_N=part.order_N)
        for index, part in enumerate(parts[0])
    ]
    check_handles(handles, slots)
    twice = dataclasses.replace(handles[1], order_N=torch.tensor([5, 2, 1]))
    with pytest.raises(HandleError, match="its inverse route does not follow from its routes"):
        check_handles([handles[0], twice], slots)
    with pytest.raises(HandleError, match="its count does not follow from its routes"):
        check_handles(handles[:1], slots)
    turned = dataclasses.replace(handles[1], order_N=torch.tensor([2, 5, 4]))
    with pytest.raises(HandleError, match="its stable order does not follow from its routes"):
        check_handles([handles[0], turned], slots)


# -- Strategies over real peers, beside what the layer's tests run


@dataclass(frozen=True)
class Way:
    strategy: str
    parts: int
    runner: str
    gate_location: str
    transport: str = "all_to_all_v"


WAYS = [
    Way(strategy, parts, runner, gate)
    for (strategy, parts), runner, gate in product(
        [("chunk_pipeline", 3), ("chunk_pipeline", 7), ("microbatch_pipeline", 7), ("shared_path", 1)],
        ["grouped", "masked_decode"],
        ["origin", "expert"],
    )
] + [
    Way("chunk_pipeline", 3, "masked_decode", "expert", transport)
    for transport in ("padded_all_to_all", "hierarchical", "chunked_hierarchical")
]
HOMES = [(0, 2), (1, 0), (2, 1), (0, 1)]
TOKENS = [(3, 0, 1), (5, 2, 4), (0, 0, 0), (1, 0, 0)]


def weights() -> Experts:
    return Experts.random(EXPERTS, HIDDEN, FFN, bias=True)


def inputs(peer: int, tokens: int) -> tuple[Tensor, Routes]:
    hidden_TD = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(peer + 10 * tokens))
    return hidden_TD, random_routes(peer + tokens, tokens, TOP_K, EXPERTS)


def layer_of(group: ExpertGroup, way: Way, transport: Transport, runner: Runner | None = None) -> ExpertLayer:
    ranks = [rank.value for rank in group.spec.peers]
    homes = [(expert, ranks[at % len(ranks)]) for expert, at in HOMES]
    return layer_on(
        placement(homes, group.spec), ranks[group.peer_slot], weights(), transport,
        runner or runner_named(way.runner), policy_named("round_robin"),
        HandleABI(gate_location=way.gate_location), way.strategy, way.parts,
    )  # fmt: skip


def forwards(group: ExpertGroup, ways: Sequence[Way]) -> list[tuple[list[Tensor], int]]:
    """The outputs, and how many staging buffers stayed out."""
    got = []
    for way in ways:
        layer = layer_of(group, way, transport_over(group, way.transport))
        outs = [
            layer.forward(*inputs(group.peer_slot, tokens_P[group.peer_slot]), Invocation(step, "decode", audit=True))
            for step, tokens_P in enumerate(TOKENS)
        ]
        got.append((outs, len(layer.path.staging._out)))
    return got


def test_more_parts_than_tokens_masked_rows_and_gates_at_the_expert_give_the_dense_result(peers: Peers) -> None:
    for peer, by_way in enumerate(peers.run(forwards, WAYS, ranks=(1, 2, 0))):
        for way, (outs, staged) in zip(WAYS, by_way, strict=True):
            assert staged == 0
            for out, tokens_P in zip(outs, TOKENS, strict=True):
                expected = weights().dense(*inputs(peer, tokens_P[peer]))
                torch.testing.assert_close(out, expected, **FP32, msg=named((way, tokens_P)))


# -- Between submission and wait


class Observed:
    """An exchange that says when it is waited for."""

    def __init__(self, inner: Exchange, seen: list[str], name: str) -> None:
        self._inner, self._seen, self._name = inner, seen, name

    @property
    def state(self) -> ExchangeState:
        return self._inner.state

    def payload(self) -> Tensor:
        self._seen.append(f"{self._name} awaited")
        return self._inner.payload()

    def complete(self) -> None:
        self._inner.complete()

    def proceed(self) -> bool:
        return self._inner.proceed()


class Observing:
    """A transport that says when an exchange is submitted and waited for."""

    def __init__(self, inner: Transport) -> None:
        self.name, self.group = inner.name, inner.group
        self._inner = inner
        self.seen: list[str] = []

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Exchange:
        return self._observed(self._inner.dispatch(rows_ND, counts_PP), "dispatch")

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Exchange:
        return self._observed(self._inner.combine(rows_RD, counts_PP), "combine")

    def _observed(self, exchange: Exchange, name: str) -> Exchange:
        self.seen.append(f"{name} submitted")
        return Observed(exchange, self.seen, name)

    def link_rows(self, counts_PP: CountMatrix) -> LinkRows:
        return self._inner.link_rows(counts_PP)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        return self._inner.bytes_moved

    def close(self) -> None:
        self._inner.close()


# One call of a layer on the shared path.
IN_ORDER = ["dispatch submitted", "shared", "dispatch awaited", "combine submitted", "combine awaited"]


def order_of_a_layer(
    group: ExpertGroup, name: str, strategy: str, tokens: int, gate_location: str = "origin"
) -> list[str]:
    transport = Observing(transport_over(group, name))
    layer = layer_of(group, Way(strategy, 2, "grouped", gate_location), transport)
    layer.forward(*inputs(group.peer_slot, tokens), Invocation(0, "bare"), lambda: transport.seen.append("shared"))
    return transport.seen


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("name", ["all_to_all_v", "hierarchical", "chunked"])
def test_the_shared_expert_runs_between_submission_and_wait(peers: Peers, name: str, tokens: int) -> None:
    assert peers.run(order_of_a_layer, name, "shared_path", tokens, ranks=(1, 0)) == [IN_ORDER] * 2


def test_a_strategy_without_a_place_for_it_leaves_the_shared_expert_to_its_block(peers: Peers) -> None:
    without = [what for what in IN_ORDER if what != "shared"]
    assert peers.run(order_of_a_layer, "all_to_all_v", "bulk", 4, ranks=(1, 0)) == [without] * 2


def test_with_gates_at_the_expert_both_exchanges_are_submitted_before_either_is_awaited(peers: Peers) -> None:
    seen = peers.run(order_of_a_layer, "all_to_all_v", "shared_path", 4, "expert", ranks=(1, 0))
    assert (
        seen
        == [
            [
                "dispatch submitted",
                "dispatch submitted",
                "shared",
                "dispatch awaited",
                "dispatch awaited",
                *IN_ORDER[-2:],
            ]
        ]
        * 2
    )


def test_chunks_are_all_submitted_before_the_first_is_awaited(peers: Peers) -> None:
    for gate, exchanges in (("origin", 1), ("expert", 2)):
        for seen in peers.run(order_of_a_layer, "all_to_all_v", "chunk_pipeline", 4, gate, ranks=(1, 0)):
            assert seen[: 2 * exchanges] == ["dispatch submitted"] * 2 * exchanges
            assert "dispatch submitted" not in seen[2 * exchanges :]


# -- What a failure leaves behind


class Failing(Grouped):
    """A runner that runs out of memory at its n-th call."""

    def __init__(self, at: int) -> None:
        self._left = at

    def run(self, rows: ExpertRows, weights: LayerWeights) -> Any:
        self._left -= 1
        if self._left < 0:
            raise MemoryError("no room for the expert output")
        return super().run(rows, weights)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_a_failing_runner_no_staging_buffer_stays_out_and_the_layer_goes_on(strategy: str, at: int) -> None:
    group = SoloGroup(ONE_PEER, GlobalRank(0))
    way = Way(strategy, 3, "grouped", "expert")
    layer = layer_of(group, way, transport_named("all_to_all_v", group), Failing(at))
    hidden_TD, routes = inputs(0, 4)
    calls = 1 if strategy in ("bulk", "shared_path") else 3
    if at < calls:
        with pytest.raises(MemoryError):
            layer.forward(hidden_TD, routes, Invocation(0, "bare"))
    assert layer.path.staging._out == {}
    assert layer.counters.invocations == 0
    layer.path = dataclasses.replace(layer.path, runner=Grouped())
    torch.testing.assert_close(
        layer.forward(hidden_TD, routes, Invocation(1, "bare", audit=True)), weights().dense(hidden_TD, routes), **FP32
    )


def one_fails(group: ExpertGroup, strategy: str, at: int) -> tuple[str, int]:
    runner = Failing(at) if group.peer_slot == 0 else Grouped()
    layer = layer_of(group, Way(strategy, 2, "grouped", "origin"), transport_over(group, "all_to_all_v"), runner)
    try:
        layer.forward(*inputs(group.peer_slot, 4), Invocation(0, "bare"))
    except (MemoryError, CollectiveError) as error:
        return type(error).__name__, len(layer.path.staging._out)  # leaving closes the group, as the engine does
    return "no error", len(layer.path.staging._out)


@pytest.mark.parametrize(("strategy", "at"), [("bulk", 0), ("chunk_pipeline", 0), ("chunk_pipeline", 1)])
def test_when_one_peer_fails_no_peers_staging_buffers_stay_out(peers: Peers, strategy: str, at: int) -> None:
    assert peers.run(one_fails, strategy, at, ranks=(0, 1)) == [("MemoryError", 0), ("CollectiveError", 0)]
