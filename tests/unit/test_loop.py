"""The engine loop of one peer, whole: a real trunk, real slots, a group of one; no Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ray_moe.comm.hierarchical import Hierarchical
from ray_moe.comm.solo import SoloGroup
from ray_moe.dataplane.captured import DecodeBucket
from ray_moe.engine.loop import EngineLoop, LoopState
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.engine.state import LOOP_TABLE
from ray_moe.engine.unit_runner import UnitRunner
from ray_moe.errors import CollectiveError, NotServingError, PeerLostError, RayMoEError, RequestError, StaleHandleError
from ray_moe.topology import Domain, Topology
from tests import one_peer
from tests.e2e.oracle import Reference
from tests.one_peer import GROUP, RANK, OnePeer

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = {f"p{length}": tuple(1 + (7 * i + length) % 250 for i in range(length)) for length in (5, 40, 300)}


@pytest.fixture
def peer(family_dir: Callable[..., Path]) -> OnePeer:
    return OnePeer(family_dir("qwen3_moe"))


def submit_all(peer: OnePeer, params: SamplingParams = GREEDY) -> None:
    for name, prompt in PROMPTS.items():
        peer.loop.submit(Request(name, prompt, params))


ON_BOTH = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
        ),
    ],
)


@ON_BOTH
@pytest.mark.parametrize(
    ("runner", "strategy", "payload"),
    [
        ("block_sparse", "shared_path", "native"),
        ("masked_decode", "chunk_pipeline", "native"),
        ("capacity_padded", "microbatch_pipeline", "native"),
        ("grouped", "bulk", "fp8_block"),
    ],
)
def test_every_runner_strategy_and_decode_executable_runs_on_every_device(
    family_dir: Callable[..., Path], runner: str, strategy: str, payload: str, device: str
) -> None:
    folder, buckets = family_dir("qwen2_moe"), [DecodeBucket(2, 4), DecodeBucket(8, 16)]
    with OnePeer(
        folder, device=device, runner=runner, strategy=strategy, payload=payload, buckets=buckets, block_rows=4
    ) as peer:
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
    assert peer.raised is None
    assert all(counters.replays and counters.audited == counters.invocations for counters in peer.counters.values())
    for name, prompt in PROMPTS.items():
        assert len(peer.outlet.tokens(name)) == GREEDY.max_tokens
        if payload == "native":
            assert Reference(folder).near_ties(prompt, tuple(peer.outlet.tokens(name))) == 0


@ON_BOTH
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_one_peer_gives_the_tokens_of_transformers(family_dir: Callable[..., Path], family: str, device: str) -> None:
    folder = family_dir(family)
    reference = Reference(folder)
    with OnePeer(folder, device=device) as peer:
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
    assert peer.raised is None
    for name, prompt in PROMPTS.items():
        assert reference.near_ties(prompt, tuple(peer.outlet.tokens(name))) == 0
        assert peer.outlet.reasons(name) == ["length"]
    assert all(counters.audited == counters.invocations > 0 for counters in peer.counters.values())
    assert peer.loop.load.kv_blocks_used == 0


def test_every_forward_can_be_replayed_without_changing_a_token(
    peer: OnePeer, family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = UnitRunner.forward
    differences: list[float] = []

    def twice(loop: UnitRunner, batch: object) -> torch.Tensor:
        first = once(loop, batch)  # type: ignore[arg-type]
        second = once(loop, batch)  # type: ignore[arg-type]
        differences.append(float((first - second).abs().max()) if first.numel() else 0.0)
        return second

    monkeypatch.setattr(UnitRunner, "forward", twice)
    with peer:
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
    assert differences
    assert max(differences) == 0.0
    reference = Reference(family_dir("qwen3_moe"))
    for name, prompt in PROMPTS.items():
        assert tuple(peer.outlet.tokens(name)) == reference.greedy(prompt, GREEDY.max_tokens)


def test_records_number_their_tokens_and_name_step_generation_and_epoch(peer: OnePeer) -> None:
    with peer:
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
    for name in PROMPTS:
        own = [record for record in peer.outlet.records if record.request_id == name]
        assert [record.index for record in own] == list(range(GREEDY.max_tokens))
        steps = [record.step for record in own]
        assert steps == sorted(set(steps)), "one record per step"
        assert {(record.generation, record.epoch) for record in own} == {(1, 0)}


def test_a_staged_generation_takes_effect_at_a_boundary_and_the_old_lease_goes_back_once(peer: OnePeer) -> None:
    with peer:
        submit_all(peer, SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
        second = peer.view(2)
        peer.loop.stage(second)
        peer.outlet.until_ended(*PROMPTS)
        with pytest.raises(StaleHandleError, match="generation 2 of epoch 0 comes before generation 2"):
            peer.loop.stage(second)
    assert peer.outlet.returned == [1]
    by_step: dict[int, set[int]] = {}
    for record in peer.outlet.records:
        by_step.setdefault(record.step, set()).add(record.generation)
    assert all(len(generations) == 1 for generations in by_step.values()), "no step mixes two generations"
    order = [next(iter(by_step[step])) for step in sorted(by_step)]
    assert order == sorted(order)
    assert order[-1] == 2


def test_a_cancelled_request_ends_by_that_name_and_its_blocks_are_free(peer: OnePeer) -> None:
    with peer:
        peer.loop.submit(
            Request("long", PROMPTS["p40"], SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
        )
        while not peer.outlet.tokens("long"):
            time.sleep(0.005)
        peer.loop.cancel("long")
        peer.outlet.until_ended("long")
        assert peer.outlet.reasons("long") == ["cancelled"]
        peer.loop.submit(Request("next", PROMPTS["p5"], GREEDY))
        peer.outlet.until_ended("next")
    assert peer.loop.load.kv_blocks_used == 0
    assert len(peer.outlet.tokens("long")) < 400


def test_a_request_that_cannot_be_admitted_is_refused_and_the_others_go_on(peer: OnePeer) -> None:
    with peer:
        peer.loop.submit(Request("bad", (99_999,), GREEDY))
        peer.loop.submit(Request("good", PROMPTS["p5"], GREEDY))
        peer.outlet.until_ended("bad", "good")
    assert isinstance(peer.outlet.refusals["bad"], RequestError)
    assert "99999" in str(peer.outlet.refusals["bad"])
    assert len(peer.outlet.tokens("good")) == GREEDY.max_tokens


def test_an_error_inside_a_step_ends_every_request_by_name_and_refuses_later_ones(
    peer: OnePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: UnitRunner, batch: object) -> torch.Tensor:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(UnitRunner, "forward", broken)
    with peer:
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
        peer.thread.join(timeout=20)
        assert peer.loop.state is LoopState.FAILED
        with pytest.raises(NotServingError, match="a bug"):
            peer.loop.submit(Request("late", PROMPTS["p5"], GREEDY))
    assert isinstance(peer.raised, ZeroDivisionError)
    assert all("a bug" in str(peer.outlet.refusals[name]) for name in PROMPTS)


def test_a_peer_that_others_saw_die_breaks_the_epoch_here_too(peer: OnePeer) -> None:
    with peer:
        submit_all(peer, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        peer.loop.break_epoch("rank 7 died")
        peer.outlet.until_ended(*PROMPTS)
        peer.thread.join(timeout=20)
    for name in PROMPTS:
        error = peer.outlet.refusals[name]
        assert isinstance(error, PeerLostError)
        assert "rank 7 died" in str(error)
        assert (error.rank, error.epoch, error.generation) == (0, 0, 1)


def test_an_idle_loop_sleeps_and_a_request_wakes_it(peer: OnePeer) -> None:
    with peer:
        deadline = time.monotonic() + 20
        while peer.loop.state is not LoopState.SLEEPING:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        steps = peer.loop.counters.steps_agreed
        time.sleep(0.3)
        assert peer.loop.counters.steps_agreed == steps
        peer.loop.submit(Request("r", PROMPTS["p5"], GREEDY))
        peer.outlet.until_ended("r")
    assert peer.loop.state is LoopState.STOPPED


def test_stopping_refuses_what_is_still_running(peer: OnePeer) -> None:
    with peer:
        submit_all(peer, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        peer.loop.stop()
        peer.outlet.until_ended(*PROMPTS)
    assert all(isinstance(peer.outlet.refusals[name], NotServingError) for name in PROMPTS)


@pytest.mark.parametrize("state", LoopState)
@pytest.mark.parametrize("event", ["serve", "sleep", "wake", "stop", "fail"])
def test_the_loop_takes_exactly_the_edges_of_its_table(
    family_dir: Callable[..., Path], state: LoopState, event: str, shared_loop: EngineLoop
) -> None:
    shared_loop.state = state
    expected = LOOP_TABLE[state].get(event)
    if expected is None:
        with pytest.raises(RayMoEError, match=f"{event!r} is illegal in state {state.value}"):
            shared_loop._advance(event)
        assert shared_loop.state is state
    else:
        shared_loop._advance(event)
        assert shared_loop.state is expected


@pytest.fixture(scope="module")
def shared_loop(family_dir: Callable[..., Path]) -> EngineLoop:
    return OnePeer(family_dir("qwen3_moe")).loop


def test_a_loop_that_ends_closes_every_group_of_its_transport(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers of a node or among the relays wait in groups of their own: they must hear of the end, too."""
    groups = [SoloGroup(GROUP, RANK) for _ in range(3)]
    topology = Topology("t1", (Domain("node-0", (RANK,)),))
    monkeypatch.setattr(one_peer, "transport_named", lambda name, group: Hierarchical(*groups, topology))
    with OnePeer(family_dir("qwen3_moe")) as peer:
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
    for group in groups:
        with pytest.raises(CollectiveError, match="the group is closed"):
            group.all_gather(torch.zeros(1, 1))


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared_path"])
def test_a_warmed_up_engine_has_its_kv_pools_before_the_first_step_and_makes_no_other_token(
    family_dir: Callable[..., Path], shared: bool
) -> None:
    folder = family_dir("qwen2_moe" if shared else "qwen3_moe")
    peer = OnePeer(folder, strategy="shared_path" if shared else "bulk")
    peer.loop.warm_up()
    pools = {layer: pool.data_ptr() for layer, pool in peer.loop.cache.pools.items()}
    assert len(pools) == peer.loop.trunk.config.num_hidden_layers
    with peer:
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
    assert peer.raised is None
    assert {layer: pool.data_ptr() for layer, pool in peer.loop.cache.pools.items()} == pools
    reference = Reference(folder)
    for name, prompt in PROMPTS.items():
        assert tuple(peer.outlet.tokens(name)) == reference.greedy(prompt, GREEDY.max_tokens)
