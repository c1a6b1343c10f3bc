"""Decode units through executables: the eager layer's results, by the smallest bucket that fits, on all peers alike."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.join import transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.dataplane.captured import CapturedDecode, DecodeBucket, Executables
from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.layer import ExpertLayer, Invocation
from ray_moe.dataplane.phases import Fallback, FallbackReason, Phase, Replay
from ray_moe.dataplane.plan import agree_layouts, layout_record, make_plan
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.runners import Grouped
from ray_moe.dataplane.strategies import STRATEGIES
from ray_moe.errors import BindingError, CollectiveError, ConfigError, RoutesError
from ray_moe.identity import GlobalRank
from ray_moe.placement import PlacementSnapshot
from ray_moe.routes import Routes
from tests.layers import (
    CPU,
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
from tests.peers import Peers, peers, peers_of_each_kind, transport_over

__all__ = ["peers", "peers_of_each_kind"]

EXPERTS, TOP_K, HIDDEN, FFN = 6, 2, 8, 5
HOMES = {
    1: [(5, 0), (0, 0), (1, 0), (0, 0), (2, 0), (3, 0), (4, 0)],
    2: [(0, 1), (1, 0), (2, 0), (3, 1), (4, 0), (5, 1), (0, 0), (3, 0)],
    3: [(0, 2), (1, 0), (2, 2), (3, 0), (4, 2), (5, 0), (0, 0)],
    4: [(0, 3), (1, 2), (2, 0), (0, 1), (3, 1), (4, 2), (5, 3), (0, 0), (3, 3), (1, 2)],
}
ORDERS = {1: (0,), 2: (1, 0), 3: (2, 0, 1), 4: (3, 1, 0, 2)}
# Given in another order than that of their sizes.
BUCKETS = (DecodeBucket(4, 6), DecodeBucket(1, 2), DecodeBucket(2, 4))
# fp32 sums of a dozen products of size one, in another order than the oracle's.
FP32: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


@dataclass(frozen=True)
class Case:
    """One unit: its phase, tokens per peer slot, and whether every route wants expert 2, which has one copy."""

    tokens_P: tuple[int, ...]
    unit: Phase = "decode"
    hot: bool = False

    def of(self, peer: int) -> tuple[Tensor, Routes]:
        tokens = self.tokens_P[peer]
        hidden_TD = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(10 * peer + tokens))
        routes = random_routes(peer, tokens, TOP_K, EXPERTS)
        if self.hot:
            routes = dataclasses.replace(routes, topk_ids=torch.full_like(routes.topk_ids, 2))
        return hidden_TD, routes


def cases(num_peers: int) -> list[Case]:
    def spread(*tokens: int) -> tuple[int, ...]:
        return tokens[:num_peers]

    return [
        Case(spread(1, 0, 1, 0)),
        Case(spread(2, 1, 0, 2)),
        Case(spread(3, 4, 0, 1)),
        Case(spread(0, 0, 0, 0)),
        Case(spread(4, 4, 4, 4)),  # of four peers some slot gets more than six rows
        Case(spread(5, 1, 1, 1)),
        Case((*spread(0, 0, 0, 0)[:-1], 1)),
        Case(spread(2, 0, 1, 0), "prefill"),
        Case(spread(1, 1, 1, 1), "bare"),
        Case(spread(1, 0, 0, 0), hot=True),
        Case(spread(4, 0, 0, 0), hot=True),
        Case(spread(2, 1, 0, 2)),
    ]


def weights() -> Experts:
    return Experts.random(EXPERTS, HIDDEN, FFN, bias=True)


def me(group: ExpertGroup) -> int:
    return group.spec.peers[group.peer_slot].value


def executables(buckets: Sequence[DecodeBucket] = BUCKETS) -> Executables:
    return Executables(buckets, CPU)


def layer_with(
    group: ExpertGroup,
    made: Executables | None,
    *,
    snapshot: PlacementSnapshot | None = None,
    abi: HandleABI | None = None,
    strategy: str = "bulk",
) -> ExpertLayer:
    """This peer's layer; `made` None is the eager one."""
    return layer_on(
        snapshot or placement(HOMES[len(group.spec)], group.spec),
        me(group),
        weights(),
        transport_over(group, "all_to_all_v") if len(group.spec) > 1 else transport_named("all_to_all_v", group),
        Grouped(),
        policy_named("token_hash"),
        abi,
        strategy,
        executables=made,
        top_k=TOP_K,
    )


def by_tokens(made: Executables) -> dict[int, Any]:
    """The executables of the layer by their token slots."""
    return {shape.tokens_per_rank: executable for (_, shape), executable in made._built.items()}


# -- Equal to the eager layer, on every peer alike


@dataclass(frozen=True)
class Seen:
    """One unit at one peer: both results, the buckets that were launched, the counters afterwards, the addresses."""

    out: Tensor
    eager: Tensor
    launched: list[int]
    replays: int
    fallbacks: Counter[str]
    submissions: int
    addresses: list[tuple[int, ...]]


def units(group: ExpertGroup, todo: Sequence[Case], filler: float) -> list[Seen]:
    """Each unit through both layers; `filler` lies in every slot of every stable buffer before each."""
    made = executables()
    layer, eager = layer_with(group, made), layer_with(group, None)
    seen = []
    for step, case in enumerate(todo):
        hidden, routes = case.of(group.peer_slot)
        for executable in by_tokens(made).values():
            for floats in (executable.buffers.hidden, executable.buffers.gates, executable.buffers.expert_output):
                floats.fill_(filler)
            executable.buffers.validity.fill_(-1)
        out = layer.forward(hidden, routes, Invocation(step, case.unit, audit=step % 2 == 0))
        seen.append(
            Seen(
                out,
                eager.forward(hidden, routes, Invocation(step, case.unit)),
                [tokens for tokens, each in by_tokens(made).items() if int(each.buffers.validity.max()) >= 0],
                layer.counters.replays,
                Counter(layer.counters.fallbacks),
                int(made.counters.host_submissions),
                [each.buffers.addresses() for each in by_tokens(made).values()],
            )
        )
    return seen


def expected_bucket(case: Case, num_peers: int) -> DecodeBucket | FallbackReason:
    """By hand: the smallest bucket that holds the peers' tokens and the slots' rows, else why the largest does not."""
    snapshot = placement(HOMES[num_peers], spec_of(ORDERS[num_peers]))
    rows_S: Counter[int] = Counter()
    for peer, rank in enumerate(ORDERS[num_peers]):
        plan = make_plan(case.of(peer)[1], slot_map(snapshot, rank), policy_named("token_hash"))
        rows_S.update(plan.physical_slot_N.tolist())
    tokens, rows = max(case.tokens_P), max(rows_S.values(), default=0)
    fitting = [bucket for bucket in BUCKETS if tokens <= bucket.rank_tokens and rows <= bucket.slot_rows]
    if fitting:
        return min(fitting, key=lambda bucket: bucket.rank_tokens)
    largest = max(BUCKETS, key=lambda bucket: bucket.rank_tokens)
    return FallbackReason.RANK_TOKEN_CAPACITY if tokens > largest.rank_tokens else FallbackReason.SLOT_ROUTE_CAPACITY


@pytest.mark.parametrize("num_peers", [1, 2, 3, 4])
def test_a_decode_unit_replays_in_the_smallest_bucket_that_fits_with_the_eager_result(
    peers: Peers, num_peers: int
) -> None:
    todo = cases(num_peers)
    got = peers.run(units, todo, 0.0, ranks=ORDERS[num_peers])
    replays, fallbacks, launched_all = 0, Counter[str](), set[int]()
    for number, case in enumerate(todo):
        decision = expected_bucket(case, num_peers) if case.unit == "decode" else None
        launched = [decision.rank_tokens] if isinstance(decision, DecodeBucket) else []
        replays += len(launched)
        launched_all.update(launched)
        if isinstance(decision, FallbackReason):
            fallbacks[decision] += 1
        for peer in range(num_peers):
            seen = got[peer][number]
            assert seen.launched == launched, (case, peer)
            assert (seen.replays, seen.fallbacks, seen.submissions) == (replays, fallbacks, replays), (case, peer)
            assert seen.addresses == got[peer][0].addresses
            torch.testing.assert_close(seen.out, seen.eager, **FP32, msg=named((case, peer)))
            torch.testing.assert_close(seen.out, weights().dense(*case.of(peer)), **FP32, msg=named((case, peer)))
    assert launched_all == {1, 2, 4}
    assert fallbacks.total() > 0


def test_oversize_decode_units_fall_back_for_both_reasons() -> None:
    reasons = [expected_bucket(case, 4) for case in cases(4)]
    assert {FallbackReason.RANK_TOKEN_CAPACITY, FallbackReason.SLOT_ROUTE_CAPACITY} < set(reasons)


@pytest.mark.parametrize("num_peers", [1, 3])
def test_whatever_lies_in_unused_slots_changes_no_bit(peers: Peers, num_peers: int) -> None:
    clean = peers.run(units, cases(num_peers), 0.0, ranks=ORDERS[num_peers])
    dirty = peers.run(units, cases(num_peers), float("nan"), ranks=ORDERS[num_peers])
    for clean_peer, dirty_peer in zip(clean, dirty, strict=True):
        assert all(torch.equal(one.out, other.out) for one, other in zip(clean_peer, dirty_peer, strict=True))


def some_join_empty(group: ExpertGroup) -> tuple[Tensor | None, int]:
    layer = layer_with(group, executables())
    hidden, routes = Case((2, 0, 0)).of(group.peer_slot)
    if group.peer_slot == 0:
        return layer.forward(hidden, routes, Invocation(0, "decode")), layer.counters.replays
    layer.join_empty(hidden, TOP_K, torch.float32, Invocation(0, "decode"))
    return None, layer.counters.replays


def test_peers_without_tokens_replay_with_the_others(peers: Peers) -> None:
    (out, *counted), *others = peers.run(some_join_empty, ranks=ORDERS[3])
    torch.testing.assert_close(out, weights().dense(*Case((2, 0, 0)).of(0)), **FP32)
    assert counted == [1]
    assert others == [(None, 1)] * 2


def with_abi(group: ExpertGroup, abi: HandleABI) -> tuple[Tensor, Tensor, int]:
    made, case = executables(), Case((2, 1, 0))
    layer, eager = layer_with(group, made, abi=abi), layer_with(group, None, abi=abi)
    outs = [each.forward(*case.of(group.peer_slot), Invocation(0, "decode", audit=True)) for each in (layer, eager)]
    return outs[0], outs[1], layer.counters.replays


@pytest.mark.parametrize(
    "abi", [HandleABI(gate_location="expert"), HandleABI(payload_format="fp8_row", gate_location="expert")], ids=str
)
def test_an_executable_speaks_the_abi_of_its_generation(peers: Peers, abi: HandleABI) -> None:
    for replayed, eager, replays in peers.run(with_abi, abi, ranks=ORDERS[3]):
        torch.testing.assert_close(replayed, eager, **FP32)
        assert replays == 1


def under_a_strategy(group: ExpertGroup, strategy: str, todo: Sequence[Case]) -> tuple[list[Tensor], int, Counter[str]]:
    layer = layer_with(group, executables(), strategy=strategy)
    outs = [
        layer.forward(*case.of(group.peer_slot), Invocation(step, case.unit, audit=True))
        for step, case in enumerate(todo)
    ]
    return outs, layer.counters.replays, layer.counters.fallbacks


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_any_strategy_decode_units_replay_whole_and_others_take_the_strategys_path(
    peers: Peers, strategy: str
) -> None:
    todo = (Case((2, 1, 0)), Case((0, 1, 0)), Case((5, 1, 0)), Case((5, 1, 0), "prefill"), Case((1, 0, 2)))
    for peer, (outs, replays, fallbacks) in enumerate(peers.run(under_a_strategy, strategy, todo, ranks=ORDERS[3])):
        for out, case in zip(outs, todo, strict=True):
            torch.testing.assert_close(out, weights().dense(*case.of(peer)), **FP32, msg=named(case))
        assert (replays, fallbacks) == (3, {FallbackReason.RANK_TOKEN_CAPACITY: 1})


def test_an_executable_takes_no_unit_in_batches() -> None:
    layer = layer_with(solo(), executables())
    plan = make_plan(Case((2,)).of(0)[1], layer.slots, layer.policy)
    layouts = agree_layouts(layout_record([plan, plan], 0, 0)[None], layer.slots, 2)
    whole = captured_of(layer).admit("decode", layouts[:1], TOP_K)
    assert whole == Replay("decode.bucket2.v1")
    assert captured_of(layer).admit("decode", layouts, TOP_K) == Fallback(FallbackReason.KEY_MISMATCH)


# -- Generations


def moved(snapshot: PlacementSnapshot, generation: int, more: Sequence[tuple[int, int]] = ()) -> PlacementSnapshot:
    """Another generation with the manifest backwards, hence the same number of slots, and `more` slots."""
    homes = HOMES[len(snapshot.group)][::-1] if generation % 2 == 0 else HOMES[len(snapshot.group)]
    return placement([*homes, *more], snapshot.group, generation=generation)


def captured_of(layer: ExpertLayer) -> CapturedDecode:
    assert layer.captured is not None
    return layer.captured


def generations(group: ExpertGroup) -> tuple[list[Tensor], list[tuple[int, ...]], int]:
    """The same unit under generations 1, 2 and 3; each is freed once the next is in the cells."""
    made, case = executables(), Case((2, 1, 1))
    first = placement(HOMES[3], group.spec)
    outs, addresses, past = [], [], None
    for generation in (1, 2, 3):
        layer = layer_with(group, made, snapshot=moved(first, generation))
        if past is not None:
            captured_of(past).free()
        outs.append(layer.forward(*case.of(group.peer_slot), Invocation(generation, "decode", audit=True)))
        assert layer.counters.replays == 1
        addresses.append(by_tokens(made)[2].buffers.addresses())
        past = layer
    return outs, addresses, len(made._built)


def test_generations_share_executables_and_every_one_gives_its_own_right_result(peers: Peers) -> None:
    for peer, (outs, addresses, built) in enumerate(peers.run(generations, ranks=ORDERS[3])):
        for out in outs:
            torch.testing.assert_close(out, weights().dense(*Case((2, 1, 1)).of(peer)), **FP32)
        assert len(set(addresses)) == 1
        assert built == len(BUCKETS)


def solo() -> SoloGroup:
    return SoloGroup(ONE_PEER, GlobalRank(0))


def decode(layer: ExpertLayer, step: int) -> Tensor:
    return layer.forward(*Case((2,)).of(0), Invocation(step, "decode"))


def test_two_generations_never_share_a_binding_and_only_the_one_in_the_cells_launches() -> None:
    made, first = executables(), placement(HOMES[1], ONE_PEER)
    one, two = (layer_with(solo(), made, snapshot=moved(first, generation)) for generation in (1, 2))
    assert len(made._built) == len(BUCKETS)
    for executable in by_tokens(made).values():
        assert list(executable.bindings) == [1, 2]
        assert executable.bindings[1].table is not executable.bindings[2].table
        assert executable.active is executable.bindings[2]
    torch.testing.assert_close(decode(two, 0), weights().dense(*Case((2,)).of(0)), **FP32)
    with pytest.raises(BindingError, match="other_generation"):
        decode(one, 1)
    captured_of(one).activate()
    with pytest.raises(BindingError, match="other_generation"):
        decode(two, 2)
    torch.testing.assert_close(decode(one, 3), decode_eagerly(), **FP32)


def decode_eagerly() -> Tensor:
    return decode(layer_with(solo(), None), 0)


def test_a_generation_is_freed_when_another_is_in_the_cells_and_can_be_bound_anew() -> None:
    made, first = executables(), placement(HOMES[1], ONE_PEER)
    one = layer_with(solo(), made, snapshot=first)
    with pytest.raises(BindingError, match="active"):
        captured_of(one).free()
    with pytest.raises(BindingError, match="already_bound"):
        layer_with(solo(), made, snapshot=first)
    two = layer_with(solo(), made, snapshot=moved(first, 2))
    captured_of(one).free()
    with pytest.raises(BindingError, match="released"):
        decode(one, 0)
    with pytest.raises(BindingError, match="released"):
        captured_of(one).free()
    torch.testing.assert_close(decode(two, 1), decode_eagerly(), **FP32)
    again = layer_with(solo(), made, snapshot=first)
    captured_of(two).free()
    torch.testing.assert_close(decode(again, 2), decode_eagerly(), **FP32)
    assert len(made._built) == len(BUCKETS)


def test_a_generation_with_another_number_of_slots_takes_over_and_the_last_one_can_be_freed() -> None:
    """A replica more makes executables of another shape; those of the last shape must not keep it alive."""
    made, first = executables(), placement(HOMES[1], ONE_PEER)
    one = layer_with(solo(), made, snapshot=first)
    decode(one, 0)
    two = layer_with(solo(), made, snapshot=moved(first, 2, more=[(4, 0)]))
    captured_of(one).free()
    torch.testing.assert_close(decode(two, 1), decode_eagerly(), **FP32)
    three = layer_with(solo(), made, snapshot=moved(first, 3))
    captured_of(two).free()
    torch.testing.assert_close(decode(three, 2), decode_eagerly(), **FP32)
    assert len(made._built) == 2 * len(BUCKETS)


def test_buckets_of_equal_token_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="every decode bucket has its own rank_tokens, found 4, 2, 4"):
        executables((DecodeBucket(4, 8), DecodeBucket(2, 4), DecodeBucket(4, 16)))


# -- Failures


class Flaky:
    """An activation that fails while it is told to."""

    failing = False

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        self._inner = inner

    def __call__(self, inner: Tensor) -> Tensor:
        if self.failing:
            raise MemoryError("no room for the hidden rows")
        return self._inner(inner)


def test_a_replay_that_fails_leaves_the_executable_usable_and_holds_nothing() -> None:
    made = executables()
    layer = layer_with(solo(), made)
    flaky = Flaky(layer.weights.activation)
    layer.weights = dataclasses.replace(layer.weights, activation=flaky)
    before = decode(layer, 0)
    flaky.failing = True
    with pytest.raises(MemoryError):
        decode(layer, 1)
    binding = by_tokens(made)[2].bindings[1]
    assert binding.references == 0
    assert binding.table.staging._out == {}
    flaky.failing = False
    assert torch.equal(decode(layer, 2), before)
    assert layer.counters.invocations == 2
    for executable in by_tokens(made).values():
        executable.deactivate()
    captured_of(layer).free()


def one_has_a_moved_buffer(group: ExpertGroup) -> tuple[str, str, Counter[str]]:
    made = executables()
    layer = layer_with(group, made)
    if group.peer_slot == 1:
        for executable in by_tokens(made).values():
            executable.buffers.hidden.set_(executable.buffers.hidden.clone())
    with pytest.raises((BindingError, CollectiveError)) as caught:
        layer.forward(*Case((2, 1, 1)).of(group.peer_slot), Invocation(0, "decode"))
    return type(caught.value).__name__, str(caught.value), layer.counters.fallbacks  # leaving closes the group


def test_a_peer_whose_buffer_moved_says_so_and_never_takes_another_path_than_the_others(
    peers_of_each_kind: Peers,
) -> None:
    answers = peers_of_each_kind.run(one_has_a_moved_buffer, ranks=ORDERS[3])
    assert [name for name, _, _ in answers] == ["CollectiveError", "BindingError", "CollectiveError"]
    assert "stable_buffer_unavailable" in answers[1][1]
    assert all(fallbacks == {} for _, _, fallbacks in answers)


def test_gates_of_another_dtype_than_the_executables_are_refused_by_name() -> None:
    layer = layer_with(solo(), executables())
    hidden, routes = Case((2,)).of(0)
    doubled = dataclasses.replace(routes, topk_weights=routes.topk_weights.double())
    with pytest.raises(RoutesError, match=r"gates must be \[2, 2\] in float32, found \[2, 2\] in torch.float64"):
        layer.forward(hidden, doubled, Invocation(0, "decode"))
    torch.testing.assert_close(decode(layer, 1), decode_eagerly(), **FP32)


def test_the_header_of_a_generation_names_its_executables() -> None:
    made, snapshot = executables(), placement(HOMES[1], ONE_PEER)
    layer_with(solo(), made, snapshot=snapshot)
    header = header_of(snapshot)
    for tokens, executable in by_tokens(made).items():
        manifest = executable.bindings[1].manifest
        assert manifest.executable_id == f"decode.bucket{tokens}.v1"
        assert manifest.key.placement_version == header.placement_version
        assert manifest.key.process_group_id == f"{header.process_group_id}/epoch-{header.epoch}"
