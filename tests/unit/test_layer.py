"""One MoE layer over real peers: equal to the dense oracle however rows travel, refused by all when peers disagree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ray_moe.comm.exchange import Arrived, Exchange
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.join import transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.transports import AllToAllV, CountMatrix, Transport
from ray_moe.dataplane.handle import DispatchHandle, HandleABI, HandleHeader, State
from ray_moe.dataplane.layer import ExpertLayer, Invocation, LayerCounters
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.phases import PHASES
from ray_moe.dataplane.plan import SlotMap
from ray_moe.dataplane.policies import LocalityFirst, TokenHash, policy_named
from ray_moe.dataplane.rows import ExpertRows, SegmentedRows
from ray_moe.dataplane.runners import RUNNERS, Grouped, LayerWeights, runner_named
from ray_moe.dataplane.strategies import STRATEGIES, strategy_named
from ray_moe.errors import (
    CollectiveError,
    ConfigError,
    CountMismatchError,
    HandleError,
    NotInReplicaSetError,
    RayMoEError,
    RoutesError,
    StaleHandleError,
)
from ray_moe.identity import GlobalRank
from ray_moe.routes import Routes
from tests.layers import ONE_PEER, Experts, header_of, layer_on, named, placement, random_routes, slot_map, spec_of
from tests.peers import TRANSPORTS, Peers, peers, transport_over

__all__ = ["peers"]

POLICIES = ("token_hash", "locality_first", "least_load", "round_robin", "queue_aware")


class Way(NamedTuple):
    """How a layer is executed."""

    transport: str = "all_to_all_v"
    runner: str = "grouped"
    policy: str = "token_hash"
    strategy: str = "bulk"


USUAL = Way()
ALL_WAYS = (
    *(Way(transport, runner) for transport, runner in product(TRANSPORTS, RUNNERS)),
    *(Way(policy=policy) for policy in POLICIES[1:]),
    *(Way(transport, strategy=strategy) for transport, strategy in product(TRANSPORTS[:4], STRATEGIES[1:])),
    *(Way(runner=runner, strategy=strategy) for runner, strategy in product(RUNNERS, STRATEGIES[1:])),
)

EXPERTS, TOP_K, HIDDEN, FFN = 6, 2, 8, 5
# By number of peers: (expert, rank) in manifest order. Replicas on one rank and on several, and with three peers a
# rank without any slot.
HOMES = {
    1: [(5, 0), (0, 0), (1, 0), (0, 0), (2, 0), (3, 0), (4, 0)],
    2: [(0, 1), (1, 0), (2, 0), (3, 1), (4, 0), (5, 1), (0, 0), (3, 0)],
    3: [(0, 2), (1, 0), (2, 2), (3, 0), (4, 2), (5, 0), (0, 0)],
    4: [(0, 3), (1, 2), (2, 0), (0, 1), (3, 1), (4, 2), (5, 3), (0, 0), (3, 3), (1, 2)],
}
ORDERS = {1: (0,), 2: (1, 0), 3: (2, 0, 1), 4: (0, 1, 2, 3)}
# fp32 sums of a dozen products of size one, in another order than the oracle's.
FP32: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
# bf16 keeps 8 bits: rows, both products and the result are rounded, each by 2^-9 of values around one.
BF16: dict[str, Any] = {"atol": 4e-2, "rtol": 4e-2}


@dataclass(frozen=True)
class Case:
    """Tokens per peer slot, and the routes that they take."""

    tokens_P: tuple[int, ...]
    routes: str = "random"

    def of(self, peer: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Routes]:
        tokens = self.tokens_P[peer]
        generator = torch.Generator().manual_seed(peer)
        hidden_TD = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
        routes = random_routes(peer, tokens, TOP_K, EXPERTS)
        if self.routes == "one expert":  # both routes of a token, too: they stay two rows
            routes = dataclasses.replace(routes, topk_ids=torch.zeros_like(routes.topk_ids))
        if self.routes == "skewed":
            hot = torch.rand(tokens, generator=generator) < 0.8
            routes.topk_ids[hot] = torch.tensor([0, 3])
        return hidden_TD, routes


def cases(num_peers: int) -> list[Case]:
    busy = (5, 3, 7, 4)[:num_peers]
    return [
        Case(busy),
        Case((0,) * num_peers),
        Case((*busy[:-1], 0)),
        Case((0,) * (num_peers - 1) + (6,)),
        Case(busy, "one expert"),
        Case((9, 0, 12, 1)[:num_peers], "skewed"),
    ]


def weights(bias: bool = True, dtype: torch.dtype = torch.float32) -> Experts:
    return Experts.random(EXPERTS, HIDDEN, FFN, bias=bias, dtype=dtype)


def me(group: ExpertGroup) -> int:
    """This peer's global rank."""
    return group.spec.peers[group.peer_slot].value


def layer_of(
    group: ExpertGroup,
    way: Way = USUAL,
    *,
    experts: Experts | None = None,
    abi: HandleABI | None = None,
) -> ExpertLayer:
    return layer_on(
        placement(HOMES[len(group.spec)], group.spec),
        me(group),
        experts or weights(),
        transport_over(group, way.transport),
        runner_named(way.runner),
        policy_named(way.policy),
        abi,
        way.strategy,
    )


# -- Equal to the dense oracle


def forwards(group: ExpertGroup, ways: Sequence[Way], audit: bool) -> list[tuple[list[Tensor], LayerCounters]]:
    got = []
    for step, way in enumerate(ways):
        layer = layer_of(group, way)
        outs = [
            layer.forward(*case.of(group.peer_slot), Invocation(step, "bare", audit)) for case in cases(len(group.spec))
        ]
        got.append((outs, layer.counters))
    return got


@pytest.mark.parametrize("num_peers", [1, 2, 3, 4])
def test_every_transport_runner_and_policy_gives_the_dense_result(peers: Peers, num_peers: int) -> None:
    got = peers.run(forwards, ALL_WAYS, False, ranks=ORDERS[num_peers])
    for peer, by_way in enumerate(got):
        inputs = [case.of(peer) for case in cases(num_peers)]
        oracle = [weights().dense(hidden, routes) for hidden, routes in inputs]
        for way, (outs, _) in zip(ALL_WAYS, by_way, strict=True):
            for case, out, expected in zip(cases(num_peers), outs, oracle, strict=True):
                torch.testing.assert_close(out, expected, **FP32, msg=named((way, case)))
        # How rows travel changes no bit: the same rows meet in the same order.
        outs_of = dict(zip(ALL_WAYS, (outs for outs, _ in by_way), strict=True))
        for transport, runner in product(TRANSPORTS, RUNNERS):
            pairs = zip(outs_of[Way(runner=runner)], outs_of[Way(transport, runner)], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
    for number in range(len(ALL_WAYS)):
        counters = [by_way[number][1] for by_way in got]
        assert {each.invocations for each in counters} == {len(cases(num_peers))}
        assert sum(each.rows_sent for each in counters) == sum(each.rows_received for each in counters)
        for peer, each in enumerate(counters):
            routes = TOP_K * sum(case.tokens_P[peer] for case in cases(num_peers))
            assert each.rows_local + each.rows_sent == routes


def test_locality_first_keeps_rows_at_home_that_token_hash_sends(peers: Peers) -> None:
    ways = [Way(policy=policy) for policy in ("locality_first", "token_hash")]
    got = peers.run(forwards, ways, False, ranks=ORDERS[4])
    near, hashed = ([by_way[way][1].rows_local for by_way in got] for way in (0, 1))
    assert all(most >= some for most, some in zip(near, hashed, strict=True))
    assert sum(near) > sum(hashed)


@pytest.mark.parametrize("num_peers", [1, 3])
def test_an_audited_invocation_gives_the_same_bits_and_is_counted(peers: Peers, num_peers: int) -> None:
    ways = [*map(Way, TRANSPORTS), *(Way(strategy=strategy) for strategy in STRATEGIES[1:])]
    plain = peers.run(forwards, ways, False, ranks=ORDERS[num_peers])
    audited = peers.run(forwards, ways, True, ranks=ORDERS[num_peers])
    for unseen, seen in zip(plain, audited, strict=True):
        for (outs, counters), (audited_outs, audited_counters) in zip(unseen, seen, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(outs, audited_outs, strict=True))
            assert (counters.audited, audited_counters.audited) == (0, len(cases(num_peers)))


def with_abi(group: ExpertGroup, abi: HandleABI, dtype: torch.dtype) -> tuple[list[Tensor], LayerCounters, int]:
    layer = layer_of(group, experts=weights(dtype=dtype), abi=abi)
    outs = [layer.forward(*case.of(group.peer_slot, dtype), Invocation(0, "decode")) for case in cases(len(group.spec))]
    return outs, layer.counters, group.bytes_sent


@pytest.mark.parametrize("num_peers", [1, 3])
@pytest.mark.parametrize("returned", ["float32", "bfloat16"])
@pytest.mark.parametrize("payload", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", ["origin", "expert"])
def test_every_abi_applies_the_gate_once_and_sends_what_it_says(
    peers: Peers, gate: str, payload: str, returned: str, num_peers: int
) -> None:
    dtype = getattr(torch, payload)
    exact = payload == returned == "float32"
    got = peers.run(with_abi, HandleABI(payload, returned, gate), dtype, ranks=ORDERS[num_peers])
    for peer, (outs, counters, sent) in enumerate(got):
        for case, out in zip(cases(num_peers), outs, strict=True):
            assert out.dtype == dtype
            expected = weights(dtype=dtype).dense(*case.of(peer, dtype))
            torch.testing.assert_close(out.float(), expected, **(FP32 if exact else BF16))
        # Rows out, rows back, and with the gate at the expert one fp32 number beside each row out.
        size = {"float32": 4, "bfloat16": 2}
        out_bytes = HIDDEN * size[payload] + (4 if gate == "expert" else 0)
        assert sent == counters.rows_sent * out_bytes + counters.rows_received * HIDDEN * size[returned]


def some_join_empty(group: ExpertGroup) -> Tensor | None:
    layer = layer_of(group)
    hidden_TD, routes = Case((4, 0, 0)).of(group.peer_slot)
    if group.peer_slot == 0:
        return layer.forward(hidden_TD, routes, Invocation(3, "prefill"))
    layer.join_empty(hidden_TD, TOP_K, torch.float32, Invocation(3, "prefill"))
    return None


def test_peers_without_tokens_join_empty(peers: Peers) -> None:
    out, *nothing = peers.run(some_join_empty, ranks=ORDERS[3])
    torch.testing.assert_close(out, weights().dense(*Case((4, 0, 0)).of(0)), **FP32)
    assert nothing == [None, None]


# -- Peers that disagree


@dataclass(frozen=True)
class Refused:
    """What a forward raised, what it had moved by then, and what the next forward of all peers gave."""

    error: type[Exception]
    message: str
    moved: int
    afterwards: Tensor


def refused(group: ExpertGroup, layer: ExpertLayer, hidden: Tensor, routes: Routes, invocation: Invocation) -> Refused:
    before = group.bytes_sent + group.bytes_received
    with pytest.raises((RayMoEError, ArithmeticError)) as caught:
        layer.forward(hidden, routes, invocation)
    moved = group.bytes_sent + group.bytes_received - before
    healthy = layer_of(group).forward(*Case((2, 2, 2)).of(group.peer_slot), Invocation(9, "bare"))
    return Refused(type(caught.value), str(caught.value), moved, healthy)


def check_all_goes_on(answers: list[Refused]) -> None:
    for peer, answer in enumerate(answers):
        assert answer.moved == 0
        torch.testing.assert_close(answer.afterwards, weights().dense(*Case((2, 2, 2)).of(peer)), **FP32)


def one_is_elsewhere(group: ExpertGroup, how: str) -> Refused:
    """Peer slot 1 runs another invocation, another scope or another placement than the others."""
    layer, invocation = layer_of(group), Invocation(5, "decode")
    if group.peer_slot == 1:
        others: dict[str, Any] = {"step": 6, "unit": "prefill", "audit": True}
        if how in others:
            invocation = dataclasses.replace(invocation, **{how: others[how]})
        elif how == "payload format":
            layer = layer_of(group, abi=HandleABI(payload_format="fp8_row"))
        elif how == "abi":
            layer = layer_of(group, abi=HandleABI(gate_location="expert"))
        else:
            homes = {"generation": HOMES[3], "slots": [*HOMES[3], (4, 1)]}[how]
            other = placement(homes, group.spec, generation=2)
            layer = layer_on(other, me(group), weights(), layer.path.transport, layer.path.runner, layer.policy)
    return refused(group, layer, *Case((2, 2, 2)).of(group.peer_slot), invocation)


@pytest.mark.parametrize("how", ["step", "unit", "audit", "abi", "payload format", "generation", "slots"])
def test_one_peer_elsewhere_makes_all_refuse_before_any_payload_and_the_epoch_goes_on(peers: Peers, how: str) -> None:
    answers = peers.run(one_is_elsewhere, how, ranks=ORDERS[3])
    assert [answer.error for answer in answers] == [CountMismatchError] * 3
    wanted = "differ in length" if how == "slots" else "is at header/invocation"
    assert all(wanted in answer.message for answer in answers)
    check_all_goes_on(answers)


class Dividing(TokenHash):
    """A policy with a bug."""

    name = "dividing"

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        return torch.full((routes.num_routes,), 1 // 0)


class Rerouting(TokenHash):
    """A policy that changes experts: everything to the first slot."""

    name = "rerouting"

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        return torch.zeros(routes.num_routes, dtype=torch.int64)


def one_cannot_plan(group: ExpertGroup, how: str) -> Refused:
    layer = layer_of(group)
    hidden, routes = Case((2, 2, 2)).of(group.peer_slot)
    if group.peer_slot == 1:
        if how == "expert id":
            routes.topk_ids[1, 0] = EXPERTS
        if how == "tokens":
            hidden = hidden[:1]
        if how == "width":
            hidden = hidden[:, :-1]
        if how == "dtype":
            hidden = hidden.double()
        if how == "reroutes":
            layer.policy = Rerouting()
        if how == "bug":
            layer.policy = Dividing()
    return refused(group, layer, hidden, routes, Invocation(5, "decode"))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("expert id", RoutesError, "ids must be in [0, 6), found 6"),
        ("tokens", RoutesError, "hidden must be [2, 8] in torch.float32, found [1, 8] in torch.float32"),
        ("width", RoutesError, "hidden must be [2, 8] in torch.float32, found [2, 7] in torch.float32"),
        ("dtype", RoutesError, "hidden must be [2, 8] in torch.float32, found [2, 8] in torch.float64"),
        ("reroutes", NotInReplicaSetError, "layer 0 generation 1: route"),
        ("bug", ZeroDivisionError, "by zero"),
    ],
)
def test_a_peer_that_cannot_plan_says_why_and_the_others_refuse_with_it(
    peers: Peers, how: str, error: type[Exception], message: str
) -> None:
    answers = peers.run(one_cannot_plan, how, ranks=ORDERS[3])
    assert [answer.error for answer in answers] == [CountMismatchError, error, CountMismatchError]
    assert message in answers[1].message
    assert all("peer slot 1 refused its own routes" in answers[peer].message for peer in (0, 2))
    check_all_goes_on(answers)


class Failing(Grouped):
    """A runner that runs out of something on one peer."""

    def run(self, rows: ExpertRows, weights: LayerWeights) -> SegmentedRows:
        raise MemoryError("no room for the expert output")


def one_fails_in_its_experts(group: ExpertGroup) -> str:
    layer = layer_of(group)
    if group.peer_slot == 0:
        use(layer, runner=Failing())
    try:
        layer.forward(*Case((3, 3)).of(group.peer_slot), Invocation(0, "decode"))
    except (MemoryError, CollectiveError) as error:
        return type(error).__name__  # leaving closes the group, as the engine does
    return "no error"


def test_a_peer_that_fails_between_dispatch_and_combine_frees_the_others_by_closing(peers: Peers) -> None:
    got = peers.run(one_fails_in_its_experts, ranks=ORDERS[2], seconds=600.0)
    assert got == ["MemoryError", "CollectiveError"]


# -- Audits catch what they are for


def alone(transport: Transport | None = None) -> ExpertLayer:
    """A layer of one peer, in this process."""
    layer = layer_of(SoloGroup(ONE_PEER, GlobalRank(0)))
    if transport is not None:
        use(layer, transport=transport)
    return layer


def use(layer: ExpertLayer, **parts: Any) -> None:
    """Another transport or runner, behind the layer's back."""
    layer.path = dataclasses.replace(layer.path, **parts)


class Misplacing(AllToAllV):
    """A wire that hands rows over in another order, on the way out or on the way back, or one of them twice."""

    def __init__(self, how: str) -> None:
        super().__init__(SoloGroup(ONE_PEER, GlobalRank(0)))
        self._how = how

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Exchange:
        if self._how == "twice":
            return Arrived(torch.cat([rows_ND[:1], rows_ND[:1], rows_ND[2:]]))
        return Arrived(rows_ND.flip(0) if self._how == "out" else rows_ND)

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Exchange:
        return Arrived(rows_RD.flip(0) if self._how == "back" else rows_RD)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("out", "its rows of other experts have arrived in its segments"),
        ("twice", "its rows hold a route that has arrived more than once"),
        ("back", "its rows have come back to other places"),
    ],
)
def test_an_audit_catches_a_wire_that_misplaces_rows_with_all_counts_right(how: str, message: str) -> None:
    hidden, routes = Case((4,), "one expert" if how == "twice" else "random").of(0)
    layer = alone(Misplacing(how))
    layer.forward(hidden, routes, Invocation(0, "bare"))  # every count is right: nothing else notices
    with pytest.raises(
        HandleError, match=rf"handle placement-v1/e0/s1/.* of layer 0 \(generation 1, epoch 0\): {message}"
    ):
        layer.forward(hidden, routes, Invocation(1, "bare", audit=True))
    assert layer.counters.audited == 0


class Tampering(Grouped):
    """A runner that changes a gate behind the router's back."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def run(self, rows: ExpertRows, weights: LayerWeights) -> SegmentedRows:
        self._routes.topk_weights[0, 0] += 0.25
        return super().run(rows, weights)


def test_an_audit_catches_routes_that_changed_under_way() -> None:
    hidden, routes = Case((4,)).of(0)
    layer = alone()
    use(layer, runner=Tampering(routes))
    with pytest.raises(RoutesError, match="semantic digest of the routes"):
        layer.forward(hidden, routes, Invocation(0, "bare", audit=True))


class Keeping(HandleHeader):
    """A header that remembers what it bound."""

    def bind(self, *args: Any, **options: Any) -> DispatchHandle:
        handle = super().bind(*args, **options)
        kept.append(handle)
        return handle


kept: list[DispatchHandle] = []


def test_no_handle_stays_in_flight_whether_its_forward_returns_or_raises() -> None:
    layer, (hidden, routes) = alone(), Case((4,)).of(0)
    layer.header = Keeping(**{field.name: getattr(layer.header, field.name) for field in dataclasses.fields(Keeping)})
    use(layer, runner=Failing())
    with pytest.raises(MemoryError):
        layer.forward(hidden, routes, Invocation(0, "bare"))
    assert layer.counters == LayerCounters()
    use(layer, runner=Grouped())
    layer.forward(hidden, routes, Invocation(1, "bare", audit=True))
    use(layer, runner=Tampering(routes))
    with pytest.raises(RoutesError):
        layer.forward(hidden, routes, Invocation(2, "bare", audit=True))
    assert [handle.lifetime.state for handle in kept] == [State.DISPATCH_STATE_RELEASABLE] * 3
    assert [handle.semantic_digest is None for handle in kept] == [True, False, False]
    counted = layer.counters
    assert (counted.invocations, counted.rows_local, counted.audited) == (2, 16, 1)


# -- What a layer refuses to be built from


def test_a_layer_is_built_under_one_generation_and_epoch_only() -> None:
    group = SoloGroup(ONE_PEER, GlobalRank(0))
    snapshot = placement(HOMES[1], ONE_PEER)
    slots = slot_map(snapshot, 0)
    path = Path(transport_named("all_to_all_v", group), Grouped(), strategy_named("bulk"))
    parts = (weights().slabs(slots, snapshot, 0), path, TokenHash())
    header = header_of(snapshot)
    for stale in (dataclasses.replace(header, generation=2), dataclasses.replace(header, epoch=1)):
        with pytest.raises(StaleHandleError, match="layer 0: header of generation"):
            ExpertLayer(stale, slots, *parts, LayerCounters())


def test_a_layer_runs_on_the_peer_that_its_slots_were_compiled_for() -> None:
    snapshot = placement(HOMES[2], spec_of((1, 0)))
    with pytest.raises(StaleHandleError, match="slots compiled for peer 1 of 2, this is peer 0 of 1"):
        layer_on(
            snapshot,
            0,
            weights(),
            transport_named("all_to_all_v", SoloGroup(ONE_PEER, GlobalRank(0))),
            Grouped(),
            LocalityFirst(),
        )


def test_no_two_invocations_of_any_layer_have_one_number() -> None:
    numbers = {
        Invocation(step, unit, audit).number(layer)
        for step, unit, audit, layer in product((0, 1, 2), PHASES, (False, True), (0, 1, 4095))
    }
    assert len(numbers) == 3 * 3 * 2 * 3
    assert Invocation(10**13, "bare", True).number(4095) < 2**63


@pytest.mark.parametrize("unit", ["training", "mixed"])
def test_an_invocation_outside_the_agreements_terms_is_refused(unit: Any) -> None:
    with pytest.raises(ConfigError, match=rf"unit must be one of prefill, decode, bare, found '{unit}'"):
        Invocation(0, unit)


class Stopping(Grouped):
    """A runner that fails where its peer slot is 0."""

    def __init__(self, stops: bool) -> None:
        self._stops = stops

    def run(self, rows: ExpertRows, weights: LayerWeights) -> SegmentedRows:
        if self._stops:
            raise MemoryError("out of memory")
        return super().run(rows, weights)


def one_stops_and_goes_on(group: ExpertGroup) -> list[str]:
    """Six rows of 32 bytes go to slot 0, which fails; its next counts are 24 numbers of 8 bytes: they would fit."""
    first = group.peer_slot == 0
    snapshot = placement([(0, group.spec.peers[0].value)], group.spec)
    experts = Experts.random(1, HIDDEN, FFN)
    layer = layer_on(snapshot, me(group), experts, AllToAllV(group), Stopping(first), policy_named("token_hash"))
    tokens = 0 if first else 3
    routes = Routes(torch.zeros(tokens, TOP_K, dtype=torch.int64), torch.ones(tokens, TOP_K))
    caught = []
    try:
        layer.forward(torch.ones(tokens, HIDDEN), routes, Invocation(0, "bare"))
    except (MemoryError, CollectiveError) as error:
        caught.append(type(error).__name__)
    if first:
        try:
            group.gather_counts(torch.zeros(24, dtype=torch.int64))
        except CollectiveError as error:
            caught.append(type(error).__name__)
    return caught


def test_what_a_peer_does_after_it_stopped_alone_is_never_taken_for_the_rows_that_it_owes(peers: Peers) -> None:
    answers = peers.run(one_stops_and_goes_on, ranks=(0, 1), seconds=20)
    assert answers == [["MemoryError", "CollectiveError"], ["CollectiveError"]]
