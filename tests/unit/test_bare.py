"""Bare layers in one peer's engine: calls with known routes, bound as the routing actor binds them. No Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ray_moe.comm.agreement import agree
from ray_moe.dataplane.handle import DispatchHandle, HandleABI, HandleHeader
from ray_moe.dataplane.known_routes import bind_known_routes, call_scope, origin_of, routes_of
from ray_moe.dataplane.plan import SlotMap, make_plan
from ray_moe.dataplane.policies import Assigned, policy_named
from ray_moe.engine.bare import BareCall, BareResult
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.errors import (
    NotInReplicaSetError,
    NotServingError,
    RayMoEError,
    RoutesError,
    StaleHandleError,
)
from ray_moe.identity import GlobalRank
from ray_moe.placement import Lease
from ray_moe.routes import Routes
from ray_moe.weights.sources import experts_modules
from tests.layers import CPU, placement, spec_of
from tests.one_peer import OnePeer
from tests.unit.test_agreement import peer as record

FAMILY = "qwen3_moe"
FP32 = {"rtol": 1e-4, "atol": 1e-5}  # two orders of fp32 sums
HIDDEN, EXPERTS, TOP_K = 64, 8, 2


def rows(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden [T, 64], distinct ids [T, 2] and gates [T, 2]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    return hidden, ids, torch.rand(tokens, TOP_K, generator=generator)


@dataclass
class Caller:
    """Makes calls of one peer's layers, and keeps what comes of them."""

    peer: OnePeer
    outcomes: dict[int, BareResult | RayMoEError] = field(default_factory=dict)
    settled: threading.Condition = field(default_factory=threading.Condition)
    _number: int = 0

    def bind(self, layer: int, ids: Tensor, gates: Tensor, generation: int = 1) -> DispatchHandle:
        self._number += 1
        header = self.peer.loop.view.header
        holder = f"call-{self._number}"
        lease = Lease(self._number, holder, generation, 0)
        snapshot = self.peer._placed
        assert snapshot is not None
        snapshot = replace(snapshot, generation=generation)
        header = HandleHeader.grant(lease, snapshot, header.abi)
        slots = SlotMap.compile(snapshot, snapshot.layers[layer], GlobalRank(0), CPU)
        routes = Routes(ids, gates, call_scope(holder, layer), origin_of(0))
        return bind_known_routes(header, slots, routes, policy_named("token_hash"), self._number)

    def call(self, handle: DispatchHandle, hidden: Tensor) -> int:
        number = len(self.outcomes) + 1000 * self._number

        def settle(outcome: BareResult | RayMoEError) -> None:
            with self.settled:
                assert number not in self.outcomes, "settled once"
                self.outcomes[number] = outcome
                self.settled.notify_all()

        self.peer.loop.post(lambda: self.peer.loop.bare.add(BareCall(handle, hidden, settle)))
        return number

    def outcome(self, number: int, seconds: float = 20) -> BareResult | RayMoEError:
        with self.settled:
            assert self.settled.wait_for(lambda: number in self.outcomes, timeout=seconds)
        return self.outcomes[number]


@pytest.fixture
def peer(family_dir: Callable[..., Path]) -> OnePeer:
    return OnePeer(family_dir(FAMILY))


def own_forward(folder: Path, layer: int, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The oracle: the experts module of the model as transformers runs it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module = {index: module for index, _, module in experts_modules(model)}[layer]
    with torch.no_grad():
        return module(*given)


ON_BOTH = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
        ),
    ],
)


def results(caller: Caller, numbers: Sequence[int]) -> list[BareResult]:
    found = [caller.outcome(number) for number in numbers]
    assert all(isinstance(one, BareResult) for one in found), found
    return found  # type: ignore[return-value]


@ON_BOTH
def test_a_call_is_the_modules_own_forward(family_dir: Callable[..., Path], device: str) -> None:
    peer = OnePeer(family_dir(FAMILY), device=device)
    caller = Caller(peer)
    with peer:
        for layer, tokens in ((0, 1), (1, 7), (2, 300)):
            given = rows(tokens, seed=layer)
            number = caller.call(caller.bind(layer, *given[1:]), given[0])
            (result,) = results(caller, [number])
            torch.testing.assert_close(result.out_TD, own_forward(family_dir(FAMILY), layer, given), **FP32)
            assert (result.generation, result.epoch) == (1, 0)
    assert peer.raised is None
    assert (peer.loop.counters.bare_calls, peer.loop.counters.bare_tokens) == (3, 308)


def test_calls_that_wait_together_are_one_invocation_and_each_gets_its_own_rows(
    peer: OnePeer, family_dir: Callable[..., Path]
) -> None:
    caller, given = Caller(peer), [rows(tokens, seed=tokens) for tokens in (3, 1, 8, 5)]
    numbers = [caller.call(caller.bind(1, *one[1:]), one[0]) for one in given]  # before the loop runs: all wait
    with peer:
        found = results(caller, numbers)
    assert len({result.step for result in found}) == 1, "one step took them all"
    assert peer.counters[1].invocations + peer.counters[1].local == 1, "and one invocation"
    for one, result in zip(given, found, strict=True):
        torch.testing.assert_close(result.out_TD, own_forward(family_dir(FAMILY), 1, one), **FP32)


def test_a_step_takes_so_many_tokens_of_a_layer_and_the_rest_waits_for_the_next(peer: OnePeer) -> None:
    caller, given = Caller(peer), [rows(100, seed=seed) for seed in range(3)]  # a unit takes 128
    numbers = [caller.call(caller.bind(0, *one[1:]), one[0]) for one in given]
    with peer:
        found = results(caller, numbers)
    steps = [result.step for result in found]
    assert steps == sorted(set(steps)), "first come, first served"


def test_calls_run_beside_requests_and_no_token_changes(peer: OnePeer) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    caller, prompt = Caller(peer), tuple(range(1, 40))
    with peer:
        peer.loop.submit(Request("alone", prompt, params))
        peer.outlet.until_ended("alone")
        peer.loop.submit(Request("beside", prompt, params))
        for turn in range(40):
            given = rows(9, seed=turn)
            results(caller, [caller.call(caller.bind(turn % 3, *given[1:]), given[0])])
        peer.outlet.until_ended("beside")
    assert peer.outlet.tokens("beside") == peer.outlet.tokens("alone")
    assert peer.loop.load.kv_blocks_used == 0


def test_a_handle_of_a_generation_that_is_over_is_refused_and_the_loop_goes_on(peer: OnePeer) -> None:
    caller, given = Caller(peer), rows(4)
    old = caller.bind(0, *given[1:])
    with peer:
        peer.loop.stage(peer.view(2))
        fresh = caller.bind(0, *given[1:], generation=2)  # waits for the generation if it comes first
        results(caller, [caller.call(fresh, given[0])])
        refused = caller.outcome(caller.call(old, given[0]))
        assert isinstance(refused, StaleHandleError)
        assert "generation" in str(refused) or "placement_version" in str(refused)
        results(caller, [caller.call(caller.bind(0, *given[1:], generation=2), given[0])])
    assert peer.raised is None


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda handle: replace(handle, physical_slot_N=handle.physical_slot_N.flip(0)), RoutesError),
        (lambda handle: replace(handle, physical_slot_N=handle.physical_slot_N + 99), NotInReplicaSetError),
        (lambda handle: replace(handle, gates_TK=handle.gates_TK + 1), RoutesError),
        (lambda handle: replace(handle, semantic_digest=None), RoutesError),
    ],
    ids=["other_experts", "no_such_slot", "other_gates", "unsealed"],
)
def test_a_handle_that_was_tampered_with_is_refused_alone(
    peer: OnePeer, spoil: Callable[[DispatchHandle], DispatchHandle], error: type[RayMoEError]
) -> None:
    caller, given = Caller(peer), rows(4)
    good = caller.call(caller.bind(0, *given[1:]), given[0])
    bad = caller.call(spoil(caller.bind(0, *given[1:])), given[0])
    with peer:
        results(caller, [good])
        assert isinstance(caller.outcome(bad), error)
    assert peer.raised is None, "one caller's nonsense ends nobody's epoch"


def test_a_loop_that_ends_refuses_the_calls_that_wait(peer: OnePeer) -> None:
    caller, given = Caller(peer), rows(4)
    with peer:
        waiting = caller.call(caller.bind(0, *given[1:], generation=9), given[0])  # a generation that never comes
        peer.loop.stop()
        assert isinstance(caller.outcome(waiting), NotServingError)


# ---- binding


def test_a_bound_handle_carries_the_whole_scope_and_gives_its_routes_back() -> None:
    snapshot = placement([(0, 0), (1, 1), (2, 0), (3, 1), (1, 0)], spec_of([0, 1]))
    slots = SlotMap.compile(snapshot, snapshot.layers[0], GlobalRank(1), CPU)
    lease = Lease(7, "call-a", snapshot.generation, snapshot.group.epoch)
    header = HandleHeader.grant(lease, snapshot, HandleABI())
    ids, gates = torch.tensor([[0, 1], [3, 2], [1, 0]]), torch.rand(3, 2)
    routes = Routes(ids, gates, call_scope("call-a", 0), origin_of(1))
    handle = bind_known_routes(header, slots, routes, policy_named("token_hash"), lease.lease_id)
    assert handle.semantic_digest == routes.seal()
    assert (handle.header.release_id, handle.header.generation, handle.unit) == ("release-1", 1, "bare")
    assert sum(handle.send_counts_P) == handle.route_count == 6
    assert handle.counts_PP[0] == (0, 0), "the other peer brings no rows to this call"
    assert handle.counts_PP[1] == handle.send_counts_P
    assert torch.equal(handle.order_N[handle.inverse_N], torch.arange(6))
    back = routes_of(handle, slots, origin_of(1))
    assert torch.equal(back.topk_ids, ids)
    for part in (back, replace(back, topk_ids=ids[1:], topk_weights=gates[1:], first_route_id=2)):
        chosen = make_plan(part, slots, Assigned(handle.physical_slot_N)).physical_slot_N
        assert torch.equal(chosen, handle.physical_slot_N[part.first_route_id :]), "a step keeps the handle's replicas"
    with pytest.raises(RoutesError, match="sealed as"):
        routes_of(handle, slots, origin_of(0))
    with pytest.raises(RoutesError, match=r"must be in \[0, 4\), found 4"):
        bind_known_routes(header, slots, replace(routes, topk_ids=ids + 1), policy_named("token_hash"), 8)


def test_a_layer_runs_when_any_peer_has_calls_for_it() -> None:
    assert agree([record(bare=0b0101), record(), record(bare=0b0110)]).bare == 0b0111
    assert agree([record(), record()]).bare == 0
