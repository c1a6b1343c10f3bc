"""A second release beside the one that serves, on one peer: shadow, canary, promotion, way back; no Ray."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_moe.dataplane.captured import DecodeBucket
from ray_moe.dataplane.layer import ExpertLayer
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.roles import Beside, Part, Roles
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.errors import RunnerError, StaleHandleError
from tests.e2e.oracle import Reference
from tests.one_peer import OnePeer

LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
PROMPTS = {f"p{length}": tuple(1 + (7 * i + length) % 250 for i in range(length)) for length in (5, 40, 150)}


@pytest.fixture
def peer(family_dir: Callable[..., Path]) -> OnePeer:
    return OnePeer(family_dir("qwen3_moe"), buckets=[DecodeBucket(2, 4), DecodeBucket(8, 16)])


def another(peer: OnePeer, generation: int, **backend: object) -> GenerationView:
    """The same slots as another release, which executes them otherwise."""
    given = peer.backend
    peer.backend = dataclasses.replace(
        given, **{"runner": "block_sparse", "block_rows": 4, "executables": None} | backend
    )
    try:
        view = peer.view(generation)
    finally:
        peer.backend = given
    return dataclasses.replace(view, header=dataclasses.replace(view.header, release_id="alone-2"))


def submit_all(peer: OnePeer) -> None:
    for name, prompt in PROMPTS.items():
        peer.loop.submit(Request(name, prompt, LONG))


def last(peer: OnePeer) -> int:
    """The generation of the newest record."""
    return peer.outlet.records[-1].generation if peer.outlet.records else -1


def require_exact(peer: OnePeer, folder: Path) -> None:
    assert peer.raised is None
    reference = Reference(folder)
    for name, prompt in PROMPTS.items():
        assert tuple(peer.outlet.tokens(name)) == reference.greedy(prompt, LONG.max_tokens)


def test_a_shadow_computes_sampled_steps_and_nobody_sees_its_outputs(
    peer: OnePeer, family_dir: Callable[..., Path]
) -> None:
    candidate = another(peer, 2)
    with peer:
        peer.loop.stage_roles(Roles(1, None, Beside(candidate, Part.SHADOW, 3)))
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
    require_exact(peer, family_dir("qwen3_moe"))
    tally = peer.loop.counters.releases["alone-2"]
    assert {record.generation for record in peer.outlet.records} == {1}
    assert (tally.tokens, tally.steps, tally.faults) == (0, 0, 0)
    assert tally.compared >= tally.shadow_steps > 10
    assert tally.differing == tally.broken == 0
    assert tally.max_difference < 1e-4


def test_a_shadow_that_computes_something_else_is_counted_and_changes_no_token(
    peer: OnePeer, family_dir: Callable[..., Path]
) -> None:
    candidate = another(peer, 2)
    for layer in candidate.layers.values():
        layer.weights = dataclasses.replace(layer.weights, down=layer.weights.down.roll(1, 0))
    with peer:
        peer.loop.stage_roles(Roles(1, None, Beside(candidate, Part.SHADOW, 2)))
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
    require_exact(peer, family_dir("qwen3_moe"))
    tally = peer.loop.counters.releases["alone-2"]
    assert 0 < tally.differing <= tally.compared
    assert tally.max_difference > 1e-3


def test_a_canary_runs_its_share_of_the_steps_and_no_token_changes(
    peer: OnePeer, family_dir: Callable[..., Path]
) -> None:
    candidate = another(peer, 2)
    with peer:
        peer.loop.stage_roles(Roles(1, None, Beside(candidate, Part.CANARY, 4)))
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
    require_exact(peer, family_dir("qwen3_moe"))
    generations = {record.step: record.generation for record in peer.outlet.records}
    assert set(generations.values()) == {1, 2}
    late = {step: generation for step, generation in generations.items() if step > min(generations) + 4}
    assert all((generation == 2) == (step % 4 == 0) for step, generation in late.items())
    assert peer.loop.counters.releases["alone-2"].tokens == sum(
        record.generation == 2 for record in peer.outlet.records
    )


@pytest.mark.parametrize("error", [RunnerError("a_tile", "a bug"), ZeroDivisionError("a bug")], ids=type)
def test_what_a_canary_cannot_run_is_its_fault_and_the_release_that_serves_runs_it(
    peer: OnePeer, family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    candidate = another(peer, 2)
    once, units = ExpertLayer.forward, 0

    def broken(layer: ExpertLayer, *given: Any) -> torch.Tensor:
        """Every third unit of the candidate stops in its last layer."""
        nonlocal units
        if layer is list(candidate.layers.values())[-1]:
            units += 1
            if units % 3 == 0:
                raise error
        return once(layer, *given)

    monkeypatch.setattr(ExpertLayer, "forward", broken)
    with peer:
        peer.loop.stage_roles(Roles(1, None, Beside(candidate, Part.CANARY, 2)))
        submit_all(peer)
        peer.outlet.until_ended(*PROMPTS)
    require_exact(peer, family_dir("qwen3_moe"))
    tally = peer.loop.counters.releases["alone-2"]
    assert tally.faults == units // 3 > 5
    assert tally.tokens == sum(record.generation == 2 for record in peer.outlet.records) > 0
    assert {record.generation for record in peer.outlet.records if record.step % 2 == 0} == {1, 2}


def test_a_candidate_is_promoted_and_rolled_back_under_load_and_every_lease_goes_back_once(
    peer: OnePeer, family_dir: Callable[..., Path]
) -> None:
    candidate, again = another(peer, 2), peer.view(3)
    first = peer.loop.view

    def wait_for(number: int, generation: int) -> None:
        deadline = time.monotonic() + 20
        while peer.loop.division.now.number != number or last(peer) != generation:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    with peer:
        submit_all(peer)
        peer.loop.stage_roles(Roles(1, None, Beside(candidate, Part.CANARY, 2)))
        wait_for(1, 2)
        peer.loop.stage_roles(Roles(2, candidate))
        wait_for(2, 2)
        assert peer.loop.view is candidate
        peer.loop.stage_roles(Roles(3, again))
        wait_for(3, 3)
        peer.outlet.until_ended(*PROMPTS)
    require_exact(peer, family_dir("qwen3_moe"))
    assert peer.outlet.returned == [first.generation, candidate.generation]
    order = [record.generation for record in peer.outlet.records]
    assert order[0] == 1 and order[-1] == 3


def test_roles_of_another_epoch_or_an_older_number_are_refused(peer: OnePeer) -> None:
    candidate = another(peer, 2)
    strange = dataclasses.replace(candidate, header=dataclasses.replace(candidate.header, epoch=7))
    with peer:
        with pytest.raises(StaleHandleError, match="epoch 7, this peer runs epoch 0"):
            peer.loop.stage_roles(Roles(1, None, Beside(strange, Part.SHADOW, 1)))
        peer.loop.stage_roles(Roles(1, None, Beside(candidate, Part.SHADOW, 1)))
        with pytest.raises(StaleHandleError, match="roles 1 come before roles 1"):
            peer.loop.stage_roles(Roles(1))
    with pytest.raises(StaleHandleError, match=">= 1, found 0"):
        Beside(candidate, Part.SHADOW, 0)


def test_requests_of_two_checkpoints_never_share_a_step(peer: OnePeer) -> None:
    view = another(peer, 2)
    other = dataclasses.replace(view, header=dataclasses.replace(view.header, checkpoint_version="other"))
    roles = Roles(1, None, Beside(other, Part.CANARY, 3))
    with peer:
        peer.loop.stage_roles(roles)
        while peer.loop.division.now.number != 1:
            time.sleep(0.002)
        names = [f"r{number}" for number in range(12)]
        for name in names:
            peer.loop.submit(Request(name, PROMPTS["p5"], LONG))
        peer.outlet.until_ended(*names)
    pinned = {name: roles.checkpoint_of(name, peer.loop.view) for name in names}
    assert set(pinned.values()) == {peer.checkpoint.identity, "other"}
    for name in names:
        generations = {record.generation for record in peer.outlet.records if record.request_id == name}
        assert generations == ({2} if pinned[name] == "other" else {1})
        assert len(peer.outlet.tokens(name)) == LONG.max_tokens
