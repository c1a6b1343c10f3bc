"""The engine of one peer with decode executables: the eager engine's tokens, across generations, nothing built anew."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_moe.dataplane.captured import DecodeBucket
from ray_moe.engine.generation import GenerationView, build_view
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.errors import StaleHandleError
from ray_moe.kernels.activation import SwiGLU
from tests.one_peer import RANK, OnePeer

PROMPTS = {f"p{length}": tuple(1 + (7 * i + length) % 250 for i in range(length)) for length in (5, 40, 90)}
ENGINE_BUCKETS = (DecodeBucket(1, 1), DecodeBucket(4, 4))


def serve(peer: OnePeer, tokens: int, during: Callable[[], None] = lambda: None) -> dict[str, list[int]]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    with peer:
        for name, prompt in PROMPTS.items():
            peer.loop.submit(Request(name, prompt, params))
        during()
        peer.outlet.until_ended(*PROMPTS)
    assert peer.raised is None
    return {name: peer.outlet.tokens(name) for name in PROMPTS}


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        *(("qwen3_moe", strategy) for strategy in ("bulk", "chunk_pipeline", "microbatch_pipeline")),
        *((family, "shared_path") for family in ("qwen2_moe", "deepseek_v3")),
        *((family, "bulk") for family in ("deepseek_v3", "gpt_oss")),
    ],
)
def test_an_engine_with_executables_gives_the_eager_engines_tokens(
    family_dir: Callable[..., Path], family: str, strategy: str
) -> None:
    folder = family_dir(family)
    eager = serve(OnePeer(folder), 12)
    peer = OnePeer(folder, strategy=strategy, buckets=ENGINE_BUCKETS)
    assert serve(peer, 12) == eager
    # What lets kernels compute the layers where there is a GPU; on a CPU nobody asks for it.
    assert {layer.weights.form for layer in peer.loop.view.layers.values()} == {None}
    forms = {peer.trunk.activation_form(layer) for layer in peer.loop.view.layers}
    assert forms == {SwiGLU(7.0, 1.702, 1.0) if family == "gpt_oss" else SwiGLU()}
    for counters in peer.counters.values():
        decode_units = counters.replays + counters.fallbacks.total()
        assert 11 <= decode_units < counters.invocations, "prompts never replay"
        assert counters.fallbacks == {}


def test_replays_go_on_under_the_next_generation_and_build_nothing_anew(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    eager = serve(OnePeer(folder), 60)
    peer = OnePeer(folder, buckets=ENGINE_BUCKETS)
    made = peer.backend.executables
    assert made is not None
    built = len(made._built)
    assert built == len(ENGINE_BUCKETS) * len(peer.counters)
    at_switch: list[int] = []
    switched = threading.Event()

    def returned(view: GenerationView) -> None:
        at_switch.append(peer.counters[0].replays)
        switched.set()

    peer.outlet.lease_returned = returned  # type: ignore[method-assign]

    def stage_another() -> None:
        peer.loop.stage(peer.view(2))
        assert switched.wait(30)

    assert serve(peer, 60, stage_another) == eager
    assert len(at_switch) == 1
    assert peer.counters[0].replays > at_switch[0]
    assert peer.loop.view.lease.generation == 2
    assert len(made._built) == built
    assert all(list(executable.bindings) == [2] for executable in made._built.values())


def test_a_view_that_could_not_be_compiled_binds_nothing_and_can_be_tried_again(
    family_dir: Callable[..., Path],
) -> None:
    peer = OnePeer(family_dir("qwen3_moe"), buckets=ENGINE_BUCKETS)
    view = peer.view(2)
    view.free()
    good, parts = peer._placed, (RANK, peer.trunk, peer.pool, peer.backend, peer.counters)
    assert good is not None
    last = good.layers[-1]
    broken_slot = dataclasses.replace(last.slots[-1], parameter_digest="of other weights")
    broken = dataclasses.replace(
        good, layers=(*good.layers[:-1], dataclasses.replace(last, slots=(*last.slots[:-1], broken_slot)))
    )
    with pytest.raises(StaleHandleError, match="the placement was verified with of other weights"):
        build_view(view.lease, view.header, broken, *parts)
    again = build_view(view.lease, view.header, good, *parts)
    peer.loop.view.activate()
    again.free()
