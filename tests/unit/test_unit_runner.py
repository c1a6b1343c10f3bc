"""A canary that cannot run a unit: the view that serves runs it, and every route is one demand all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ray_moe.dataplane.route_counts import RouteCounts
from ray_moe.engine.request import Request
from ray_moe.engine.roles import Beside, Part, Roles
from ray_moe.engine.sampling import SamplingParams
from tests.one_peer import OnePeer

PROMPT = (1, 2, 3, 4, 5)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def run_alone(peer: OnePeer) -> list[int]:
    with peer:
        peer.loop.submit(Request("one", PROMPT, GREEDY))
        peer.outlet.until_ended("one")
    assert peer.outlet.refusals == {}
    return peer.outlet.tokens("one")


@pytest.mark.parametrize("failing", ["first", "last", "none"])
def test_routes_of_units_that_a_canary_gave_up_are_counted_once(family_dir: Callable[..., Path], failing: str) -> None:
    folder = family_dir("qwen3_moe")
    expected = run_alone(OnePeer(folder))
    peer = OnePeer(folder)
    layers = peer.checkpoint.moe_layers
    counts = RouteCounts(layers, peer.checkpoint.num_experts, torch.device("cpu"))
    canary = peer.view(2)
    for view in (peer.loop.view, canary):
        for layer in view.layers.values():
            layer.route_counts = counts

    def broken(*_: object, **__: object) -> torch.Tensor:
        raise ArithmeticError("a candidate's fault")

    if failing != "none":
        canary.layers[layers[0] if failing == "first" else layers[-1]].forward = broken  # type: ignore[method-assign]
    peer.loop.stage_roles(Roles(1, None, Beside(canary, Part.CANARY, 1)))
    assert run_alone(peer) == expected
    steps = len(PROMPT) + len(expected) - 1  # the last token is not fed back
    (report,) = counts.harvest(rank=0, generation=1, epoch=0, last_step=peer.loop.counters.committed_step)
    assert sum(report.tokens) == steps
    assert report.phase_counts_PLE.sum(axis=(0, 2)).tolist() == [steps * peer.trunk.top_k] * len(layers)
    faults = peer.loop.counters.of_release(canary.release_id).faults
    assert (faults > 0) == (failing != "none")
