"""An engine that launches a step before it knows the last one's tokens gives the tokens of one that waits.

A CPU runs what it is given at once; which token comes from where, and what is committed when, is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_moe.engine.generation import GenerationView
from ray_moe.engine.handover import Departing, take_out
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from tests.one_peer import OnePeer

PROMPTS = {f"p{length}": tuple(1 + (7 * i + length) % 250 for i in range(length)) for length in (5, 40, 90, 17)}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def serve(
    peer: OnePeer, params: SamplingParams, during: Callable[[], None] = lambda: None, **request: Any
) -> dict[str, list[int]]:
    with peer:
        for name, prompt in PROMPTS.items():
            peer.loop.submit(Request(name, prompt, params, **request))
        during()
        peer.outlet.until_ended(*PROMPTS)
    assert peer.raised is None and not peer.outlet.refusals
    for name in PROMPTS:
        indices = [record.index for record in peer.outlet.records if record.request_id == name]
        assert indices == list(range(len(indices))), "every token once, in order"
    return {name: peer.outlet.tokens(name) for name in PROMPTS}


@pytest.mark.parametrize("num_blocks", [128, 13], ids=["roomy", "preempting"])
def test_tokens_are_those_of_an_engine_that_waits(family_dir: Callable[..., Path], num_blocks: int) -> None:
    folder = family_dir("qwen3_moe")
    drawing = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    for params in (GREEDY, drawing):
        waiting = OnePeer(folder, num_blocks=num_blocks)
        ahead = OnePeer(folder, num_blocks=num_blocks, look_ahead=True)
        assert serve(ahead, params) == serve(waiting, params)
        for peer in (waiting, ahead):
            assert (peer.loop.scheduler.preemptions > 0) == (num_blocks == 13)
            assert peer.loop.scheduler.free_blocks == peer.loop.scheduler.total_blocks
            assert peer.loop.counters.tokens_emitted == 24 * len(PROMPTS)


def test_a_request_that_ends_by_a_token_is_computed_once_more_and_nobody_hears_of_it(
    family_dir: Callable[..., Path],
) -> None:
    folder = family_dir("qwen3_moe")
    whole = serve(OnePeer(folder), GREEDY)
    # The token that ends each stream somewhere in the middle of it.
    ends = frozenset(tokens[9] for tokens in whole.values())
    params = SamplingParams(max_tokens=24, temperature=0.0)
    expected = {
        name: tokens[: next(at for at, token in enumerate(tokens) if token in ends) + 1]
        for name, tokens in whole.items()
    }
    assert all(len(tokens) <= 10 for tokens in expected.values())
    peer = OnePeer(folder, look_ahead=True)
    assert serve(peer, params, eos_ids=ends) == expected
    assert {reason for name in PROMPTS for reason in peer.outlet.reasons(name)} == {"stop"}


def test_a_lease_goes_back_when_no_step_under_it_is_under_way(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    expected = serve(OnePeer(folder), GREEDY)
    peer = OnePeer(folder, look_ahead=True)
    under_way: list[int] = []
    switched = threading.Event()

    def returned(_: GenerationView) -> None:
        under_way.append(peer.loop._units.steps_in_flight)
        switched.set()

    peer.outlet.lease_returned = returned  # type: ignore[method-assign]

    def stage() -> None:
        peer.loop.stage(peer.view(2))
        assert switched.wait(30)

    assert serve(peer, GREEDY, stage) == expected
    assert under_way == [0]


def test_what_is_handed_over_has_every_token_that_was_launched(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    peer = OnePeer(folder, look_ahead=True)
    departing: list[Departing] = []
    done = threading.Event()

    def hand_over() -> None:
        assert peer.loop._units.steps_in_flight == 0
        departing.extend(take_out(peer.loop.scheduler, peer.loop.cache, None, lambda *_: True))
        done.set()

    with peer:
        peer.loop.submit(Request("p40", PROMPTS["p40"], params))
        with peer.outlet.delivered:
            assert peer.outlet.delivered.wait_for(lambda: len(peer.outlet.records) > 5, timeout=30)
        peer.loop.post(hand_over)
        assert done.wait(30)
    assert peer.raised is None
    (item,) = departing
    assert item.request.prefix_ids == tuple(peer.outlet.tokens("p40"))
    assert item.positions == len(PROMPTS["p40"]) + len(item.request.prefix_ids) - 1


def test_a_cancelled_request_gives_its_blocks_back_and_the_others_go_on(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    long = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    alone = OnePeer(folder)
    with alone:
        alone.loop.submit(Request("p5", PROMPTS["p5"], long))
        alone.outlet.until_ended("p5")
    peer = OnePeer(folder, look_ahead=True)
    with peer:
        for name in ("p5", "p40"):
            peer.loop.submit(Request(name, PROMPTS[name], long))
        with peer.outlet.delivered:
            assert peer.outlet.delivered.wait_for(lambda: len(peer.outlet.tokens("p40")) > 3, timeout=30)
        peer.loop.cancel("p40")
        peer.outlet.until_ended("p5", "p40")
    assert peer.raised is None
    assert peer.outlet.reasons("p40") == ["cancelled"] and len(peer.outlet.tokens("p40")) < 150
    assert peer.outlet.tokens("p5") == alone.outlet.tokens("p5")
    assert peer.loop.scheduler.free_blocks == peer.loop.scheduler.total_blocks
