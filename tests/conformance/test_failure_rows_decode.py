"""The decode rows of 0x05, and those of 0x06 about padding, made against layers and engines with decode executables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.dataplane.captured import CapturedDecode, DecodeBucket, Executables
from ray_moe.dataplane.graphs import NO_EXPERT, Binding, Executable, ExecutableShape
from ray_moe.dataplane.layer import ExpertLayer, Invocation
from ray_moe.dataplane.rows import ExpertRows
from ray_moe.dataplane.runners import LayerWeights, MaskedDecode
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.engine.units import Row, UnitPlan
from ray_moe.errors import BindingError, ConfigError, RoutesError
from ray_moe.routes import Routes
from tests.conformance.test_failure_rows_layer import (
    EXPERTS,
    FP32,
    HIDDEN,
    TOP_K,
    WEIGHTS,
    at,
    layer_of,
    onto_one_expert,
    unit,
)
from tests.layers import CPU, random_routes
from tests.one_peer import OnePeer


def executables(rank_tokens: int, slot_rows: int) -> Executables:
    return Executables([DecodeBucket(rank_tokens, slot_rows)], CPU)


def built(of: Executables) -> Executable[Any]:
    """The one executable of `layer_of`'s layers."""
    (bucket,) = of.buckets
    return of.get(
        0,
        ExecutableShape(
            peer=0,
            num_peers=1,
            num_slots=EXPERTS,
            tokens_per_rank=bucket.rank_tokens,
            rows_per_slot=bucket.slot_rows,
            hidden=HIDDEN,
            top_k=TOP_K,
            activation=torch.float32,
            gate=torch.float32,
        ),
    )


def captured_of(layer: ExpertLayer) -> CapturedDecode:
    assert layer.captured is not None
    return layer.captured


# -- 0x03


def test_pa_03d5_04_a_replay_holds_its_generations_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (hidden, routes) = layer_of(executables=executables(4, 8)), unit()
    captured, run = captured_of(layer), MaskedDecode.run

    def freed(self: MaskedDecode, rows: ExpertRows, weights: LayerWeights) -> ExpertRows:
        captured.free()
        return run(self, rows, weights)

    monkeypatch.setattr(MaskedDecode, "run", freed)
    with pytest.raises(BindingError, match=r"^referenced: binding .* of generation 1 has 1 references"):
        layer.forward(hidden, routes, Invocation(0, "decode"))


# -- 0x05, a layer alone


def decode(layer: ExpertLayer, hidden: Tensor, routes: Routes, step: int = 0) -> Tensor:
    return layer.forward(hidden, routes, Invocation(step, "decode", audit=True))


def eager(hidden: Tensor, routes: Routes) -> Tensor:
    """The same unit without executables."""
    return layer_of().forward(hidden, routes, Invocation(0, "decode"))


def test_fl_05h_01_a_layer_sizes_a_unit_by_its_own_rows() -> None:
    layer, (hidden, routes) = layer_of(executables=executables(4, 8)), unit(2)
    cached = random_routes(0, 700, TOP_K, EXPERTS)  # a route for every cached position
    with pytest.raises(RoutesError, match=r"hidden must be \[700, 8\] in torch.float32, found \[2, 8\]"):
        decode(layer, hidden, cached)
    torch.testing.assert_close(decode(layer, hidden, routes), WEIGHTS.dense(hidden, routes), **FP32)
    assert (layer.counters.replays, layer.counters.rows_local) == (1, 2 * TOP_K)


def test_fl_05h_02_padding_with_real_expert_ids_is_masked_by_the_layer() -> None:
    slots, (hidden, routes) = executables(8, 16), unit(3)
    layer, buffers = layer_of(executables=slots), built(slots).buffers
    buffers.hidden.fill_(1e30)
    buffers.route_ids.fill_(1)
    buffers.gates.fill_(1.0)
    torch.testing.assert_close(decode(layer, hidden, routes), WEIGHTS.dense(hidden, routes), **FP32)
    assert (layer.counters.replays, layer.counters.rows_local) == (1, 3 * TOP_K)
    assert bool((buffers.route_ids[3:] == NO_EXPERT).all())
    assert int((buffers.valid_routes_by_slot).sum()) == 3 * TOP_K


def test_fl_05h_03_validity_of_another_invocation_is_refused_by_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (hidden, routes) = layer_of(executables=executables(4, 8)), unit()
    write = Binding.write_validity
    decode(layer, hidden, routes)
    with monkeypatch.context() as patched:
        patched.setattr(Binding, "write_validity", lambda self, step, *counts: write(self, step - 1, *counts))
        with pytest.raises(BindingError, match=r"^stale_validity: step .* is of step"):
            decode(layer, hidden, routes, step=1)
        patched.setattr(Binding, "write_validity", lambda self, step, *counts: None)
        with pytest.raises(BindingError, match=r"^stale_validity: step .* is not written"):
            decode(layer, hidden, routes, step=2)
    torch.testing.assert_close(decode(layer, hidden, routes, step=3), WEIGHTS.dense(hidden, routes), **FP32)


def test_fl_05h_04_a_layer_of_an_earlier_generation_never_launches() -> None:
    slots, (hidden, routes) = executables(4, 8), unit()
    first = layer_of(at(1), executables=slots)
    second = layer_of(at(2, [(0, 0), (1, 0), (2, 0), (3, 0)]), executables=slots)  # in the cell from here on
    with pytest.raises(BindingError, match=r"^other_generation: .* of generation 1 cannot launch: the cell holds .* 2"):
        decode(first, hidden, routes)
    torch.testing.assert_close(decode(second, hidden, routes), WEIGHTS.dense(hidden, routes), **FP32)
    captured_of(first).free()
    with pytest.raises(BindingError, match=r"^released: .* of generation 1 is free"):
        decode(first, hidden, routes)
    assert list(built(slots).bindings) == [2]
    # The placement changed and its name, which is in the key, stayed.
    same_name = dataclasses.replace(at(3), version=at(2).version)
    with pytest.raises(BindingError, match=r"^key_mismatch: generation 3 has the key of .* of generation 2"):
        layer_of(same_name, executables=slots)


@pytest.mark.parametrize(
    ("bucket", "reason"),
    [(DecodeBucket(2, 16), "rank_token_capacity_exceeded"), (DecodeBucket(8, 4), "expert_route_capacity_exceeded")],
)
def test_fl_05h_05_an_oversize_unit_falls_back_with_all_of_its_rows(bucket: DecodeBucket, reason: str) -> None:
    slots, (hidden, routes) = Executables([bucket], CPU), onto_one_expert(5)
    layer = layer_of(executables=slots)
    assert torch.equal(decode(layer, hidden, routes), eager(hidden, routes))
    assert (layer.counters.fallbacks, layer.counters.replays) == ({reason: 1}, 0)
    assert layer.counters.rows_local == 5 * TOP_K
    assert int(slots.counters.host_submissions) == 0


def test_fl_05h_06_a_layer_executes_units_of_one_phase() -> None:
    slots, (hidden, routes) = executables(8, 16), unit()
    layer = layer_of(executables=slots)
    with pytest.raises(ConfigError, match="unit must be one of prefill, decode, bare, found 'mixed'"):
        layer.forward(hidden, routes, Invocation(0, "mixed"))  # type: ignore[arg-type]
    # Rows that would fit: only their phase keeps them out of the bucket.
    for step, phase in enumerate(("prefill", "bare", "decode")):
        layer.forward(hidden, routes, Invocation(step, phase))  # type: ignore[arg-type]
        assert layer.counters.replays == (phase == "decode")
    prefill, decoding = (
        Row(phase, f"r{index}", index, 0, 0, 1, (0,), True, 0)  # type: ignore[arg-type]
        for index, phase in enumerate(("prefill", "decode"))
    )
    assert UnitPlan(7, "decode", (decoding,)).num_tokens == 1
    with pytest.raises(ConfigError, match="step 7: a decode unit cannot take a prefill row, that of 'r0'"):
        UnitPlan(7, "decode", (decoding, prefill))


@pytest.mark.parametrize("name", ["hidden", "route_ids", "gates", "expert_output", "validity"])
def test_fl_05h_07_a_layer_falls_back_when_a_buffer_has_moved(name: str) -> None:
    slots, (hidden, routes) = executables(4, 8), unit()
    layer = layer_of(executables=slots)
    buffer = getattr(built(slots).buffers, name)
    captured, buffer.data = buffer.data, buffer.data.clone()
    assert torch.equal(decode(layer, hidden, routes), eager(hidden, routes))
    assert (layer.counters.fallbacks, layer.counters.replays) == ({"stable_buffer_unavailable": 1}, 0)
    buffer.data = captured
    decode(layer, hidden, routes, step=1)
    assert layer.counters.replays == 1


def test_fl_05h_08_a_layers_replays_are_host_submissions_alone() -> None:
    slots, (hidden, routes) = executables(4, 8), unit()
    layer = layer_of(executables=slots)
    for step in range(3):
        decode(layer, hidden, routes, step)
    assert (
        (int(slots.counters.host_submissions), slots.counters.device_launches)
        == (layer.counters.replays, None)
        == (3, None)
    )


# -- 0x06I


def test_fl_06i_04_filler_that_is_not_masked_beforehand_is_refused_by_the_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, (hidden, routes), load = layer_of(executables=executables(4, 8)), unit(2), Binding._load

    def unmasked(self: Binding[Any], *given: Tensor) -> None:
        load(self, *given)
        self.executable.buffers.route_ids[given[0].shape[0] :].fill_(1)

    with monkeypatch.context() as patched:
        patched.setattr(Binding, "_load", unmasked)
        with pytest.raises(BindingError, match=r"^unmasked_padding: .* plans 8 routes for 2 tokens of top-k 2; 4 are"):
            decode(layer, hidden, routes)
    torch.testing.assert_close(decode(layer, hidden, routes, step=1), WEIGHTS.dense(hidden, routes), **FP32)


# -- 0x05, the engine

PROMPTS = {name: tuple(range(3, 3 + length)) for name, length in (("a", 40), ("b", 7), ("c", 19), ("d", 11))}
LIMITS = {"a": 16, "b": 12, "c": 12, "d": 12}


def served(folder: Path, buckets: list[DecodeBucket]) -> OnePeer:
    """The engine after four requests, which decode together for a while, and one alone at the end."""
    peer = OnePeer(folder, buckets=buckets)
    for name, prompt in PROMPTS.items():  # before the loop starts, so that they are admitted together
        params = SamplingParams(max_tokens=LIMITS[name], temperature=0.0, ignore_eos=True)
        peer.loop.submit(Request(name, prompt, params))
    with peer:
        peer.outlet.until_ended(*PROMPTS)
    assert peer.raised is None
    return peer


@pytest.fixture(scope="module")
def engines(family_dir: Callable[..., Path]) -> tuple[OnePeer, OnePeer]:
    """(with a bucket for two of the four requests, without executables)"""
    folder = family_dir("qwen3_moe")
    return served(folder, [DecodeBucket(2, 4)]), served(folder, [])


def test_fl_05h_01_the_engine_counts_rows_and_not_cached_context(engines: tuple[OnePeer, OnePeer]) -> None:
    # Each token of a prompt, and each generated one but the last, is a row of one unit.
    tokens = sum(len(PROMPTS[name]) + LIMITS[name] - 1 for name in PROMPTS)
    for peer in engines:
        for counters in peer.counters.values():
            assert counters.rows_local == peer.trunk.top_k * tokens


def test_fl_05h_05_the_engine_gives_the_same_tokens_replayed_and_fallen_back(engines: tuple[OnePeer, OnePeer]) -> None:
    captured, plain = engines
    for counters in captured.counters.values():
        assert counters.replays > 0  # the last request alone
        assert counters.fallbacks["rank_token_capacity_exceeded"] > 0  # all four together
        assert set(counters.fallbacks) == {"rank_token_capacity_exceeded"}
    for name in PROMPTS:
        assert captured.outlet.tokens(name) == plain.outlet.tokens(name)
        assert len(captured.outlet.tokens(name)) == LIMITS[name]


def test_fl_05h_04_the_engines_earlier_generation_never_launches(family_dir: Callable[..., Path]) -> None:
    peer = OnePeer(family_dir("qwen3_moe"), buckets=[DecodeBucket(4, 8)])
    first, second = peer.loop.view, peer.view(2)
    hidden, routes = torch.randn(2, peer.trunk.hidden_size), random_routes(0, 2, peer.trunk.top_k, 8)
    index = next(iter(first.layers))
    with torch.inference_mode():
        expected = first.layers[index].forward(hidden, routes, Invocation(0, "decode"))
        with pytest.raises(BindingError, match=r"^active: .* of generation 1 is in the cell; activate another"):
            first.free()
        second.activate()
        with pytest.raises(BindingError, match=r"^other_generation: .* of generation 1 cannot launch"):
            first.layers[index].forward(hidden, routes, Invocation(1, "decode"))
        assert torch.equal(second.layers[index].forward(hidden, routes, Invocation(1, "decode")), expected)
        first.free()
