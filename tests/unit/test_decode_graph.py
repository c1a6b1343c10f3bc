"""Decode units of fixed sizes give the eager engine's tokens; padding is nobody's, and generations share one capture.

Where no GPU is a recorded unit is run again instead of replayed: inputs, padding, tables and counts are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ray_moe.dataplane.layer import Invocation
from ray_moe.dataplane.phases import FallbackReason
from ray_moe.engine.decode_graph import DecodeGraphs, decode_sizes
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.needs import model_needs
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.errors import BindingError, ConfigError
from ray_moe.weights.budget import LAUNCH_BYTES, LAUNCHES_PER_LAYER, Sizes, add_up
from tests.decode_layers import TorchLayer
from tests.one_peer import OnePeer

PREFILL = Invocation(0, "prefill")
PROMPTS = {f"p{length}": tuple(1 + (7 * i + length) % 250 for i in range(length)) for length in (5, 40, 90)}


def graphs_of(peer: OnePeer) -> DecodeGraphs:
    (graphs,) = peer.loop._units._graphs.values()
    return graphs


def graphed(folder: Path, sizes: tuple[int, ...] = (1, 2, 8), **options: object) -> OnePeer:
    how = {"audit_rate": 0.0, "local": TorchLayer.of, "graph_sizes": sizes, **options}
    return OnePeer(folder, **how)  # type: ignore[arg-type]


def serve(
    peer: OnePeer, tokens: int = 12, during: Callable[[], None] = lambda: None, warm: bool = True
) -> dict[str, list[int]]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    if warm:
        peer.loop.warm_up()
    with peer:
        for name, prompt in PROMPTS.items():
            peer.loop.submit(Request(name, prompt, params))
        during()
        peer.outlet.until_ended(*PROMPTS)
    assert peer.raised is None and not peer.outlet.refusals
    return {name: peer.outlet.tokens(name) for name in PROMPTS}


def test_sizes_are_dense_where_a_row_costs_most_and_end_with_the_engines_cap() -> None:
    assert decode_sizes(1) == (1,)
    assert decode_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert decode_sizes(256)[-3:] == (128, 192, 256)
    assert decode_sizes(500)[-5:] == (256, 320, 384, 448, 500)
    with pytest.raises(ConfigError, match="at least 1 row, found 0"):
        decode_sizes(0)


@pytest.mark.parametrize(("family", "look_ahead"), [("qwen3_moe", False), ("qwen3_moe", True), ("deepseek_v3", True)])
def test_graphs_give_the_eager_engines_tokens(family_dir: Callable[..., Path], family: str, look_ahead: bool) -> None:
    folder = family_dir(family)
    eager = serve(OnePeer(folder, audit_rate=0.0))
    peer = graphed(folder, look_ahead=look_ahead)
    assert serve(peer) == eager
    for counters in peer.counters.values():
        assert counters.replays >= 11 and counters.fallbacks == {}
    assert graphs_of(peer).captures == 3
    layer = next(iter(peer.loop.view.layers.values()))
    assert layer.local is not None
    seen = set(layer.local.seen)  # type: ignore[attr-defined]
    assert (8, 3) in seen and (8, 0) in seen, "three rows in a graph of eight, and none when it was captured"


def test_what_graphs_hold_is_what_a_budget_counts(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    peer = graphed(folder)
    peer.loop.warm_up()
    graphs, cache = graphs_of(peer), peer.loop.cache
    assert graphs._inputs is not None and graphs._logits is not None and graphs._cell is not None
    held = [*vars(graphs._inputs).values(), graphs._logits, graphs._cell]
    sizes = Sizes(1, 0, 0, cache.num_blocks, cache.block_size, tokens=8, decode_rows=8, graph_rows=(1, 2, 8))
    needs = model_needs(folder, dtype=torch.float32)
    launches = 3 * len(needs.layers) * LAUNCHES_PER_LAYER * LAUNCH_BYTES
    assert sum(tensor.nbytes for tensor in held) <= add_up(needs, sizes).graphs - launches


def test_a_unit_larger_than_every_graph_falls_back_and_says_why(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    peer = graphed(folder, sizes=(1, 2))
    assert serve(peer) == serve(OnePeer(folder, audit_rate=0.0))
    for counters in peer.counters.values():
        assert set(counters.fallbacks) == {FallbackReason.RANK_TOKEN_CAPACITY}
        assert counters.replays + counters.fallbacks.total() >= 11


def test_audited_steps_and_layers_that_need_the_host_fall_back(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    eager = serve(OnePeer(folder, audit_rate=0.0))
    for options, reason in (({"audit_rate": 1.0}, "audited"), ({"local": None}, FallbackReason.KEY_MISMATCH)):
        peer = graphed(folder, **options)
        assert serve(peer) == eager
        for counters in peer.counters.values():
            assert counters.replays == 0 and set(counters.fallbacks) == {reason}


def test_the_next_generation_needs_no_capture_and_its_table_is_read(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    eager = serve(OnePeer(folder, audit_rate=0.0), 60)
    peer = graphed(folder, look_ahead=True)
    switched, replays = threading.Event(), []

    def returned(_: GenerationView) -> None:
        replays.append(peer.counters[0].replays)
        switched.set()

    peer.outlet.lease_returned = returned  # type: ignore[method-assign]

    def stage() -> None:
        peer.loop.stage(peer.view(2))
        assert switched.wait(30)

    assert serve(peer, 60, stage) == eager
    graphs = graphs_of(peer)
    assert graphs.captures == 3 and peer.counters[0].replays > replays[0]
    assert graphs.is_bound(peer.loop.view) and peer.loop.view.generation == 2


def test_the_table_that_launches_read_is_the_one_in_the_cell(family_dir: Callable[..., Path]) -> None:
    peer = graphed(family_dir("qwen3_moe"), sizes=(2,))
    scheduler, units, view = peer.loop.scheduler, peer.loop._units, peer.loop.view
    with torch.inference_mode():
        peer.loop.warm_up()
        scheduler.submit(Request("p5", PROMPTS["p5"], SamplingParams(max_tokens=4, temperature=0.0)))
        prefill = scheduler.plan(0).prefill
        assert prefill is not None
        batch = scheduler.materialise(prefill)
        scheduler.commit(prefill, batch, batch.sampling.sample(units._outputs(view, PREFILL, batch)).tolist())  # type: ignore[union-attr,arg-type]
        decode = scheduler.plan(1).decode
        assert decode is not None
        batch, graphs = scheduler.materialise(decode), graphs_of(peer)
        logits = [graphs.launch(view, 2, batch).clone()]  # type: ignore[union-attr]
        assert graphs._cell is not None
        graphs._cell.copy_(graphs._cell.flip(1))
        logits.append(graphs.launch(view, 2, batch).clone())  # type: ignore[union-attr]
        graphs.bind(view)
        logits.append(graphs.launch(view, 2, batch).clone())  # type: ignore[union-attr]
    assert torch.equal(logits[0], logits[2]) and not torch.allclose(logits[0], logits[1])


def test_a_binding_of_one_generation_never_launches_under_another(family_dir: Callable[..., Path]) -> None:
    peer = graphed(family_dir("qwen3_moe"))
    first, second = peer.loop.view, peer.view(2)
    with torch.inference_mode():
        peer.loop.warm_up()
        graphs = graphs_of(peer)
        with pytest.raises(BindingError, match=r"generation 2 of epoch 0: the cell holds \(1, 0\)"):
            graphs.launch(second, 1, None)
        graphs.bind(second)
        with pytest.raises(BindingError, match="other_generation"):
            graphs.launch(first, 1, None)
    first.layers[0].local = None
    assert graphs.admit(first, 1) is FallbackReason.KEY_MISMATCH
    with pytest.raises(BindingError, match="key_mismatch"):
        graphs.bind(first)


def test_only_real_rows_are_demand(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    totals = []
    for peer in (OnePeer(folder, audit_rate=0.0, count_routes=True), graphed(folder, count_routes=True)):
        serve(peer)
        counts = sum(report.phase_counts_PLE for report in peer.outlet.reports)
        tokens = [sum(report.tokens[phase] for report in peer.outlet.reports) for phase in (0, 1)]
        assert peer.route_counts is not None
        left_PLE = peer.route_counts._counts_PLE.numpy()
        totals.append((counts + left_PLE, tokens, peer.route_counts._tokens))
    (eager_PLE, eager_tokens, eager_left), (graph_PLE, graph_tokens, graph_left) = totals
    assert (graph_PLE == eager_PLE).all()
    assert graph_PLE[1].sum() == 11 * len(PROMPTS) * graph_PLE.shape[1] * 2
    assert [one + graph_left[name] for one, name in zip(graph_tokens, graph_left, strict=True)] == [
        one + eager_left[name] for one, name in zip(eager_tokens, eager_left, strict=True)
    ]


def test_a_trunk_that_cannot_be_captured_is_served_without_graphs(
    family_dir: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = family_dir("qwen3_moe")
    peer = graphed(folder)

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs_of(peer)._recorder = refuse  # type: ignore[assignment]
    assert serve(peer) == serve(OnePeer(folder, audit_rate=0.0))
    assert "runs without graphs" in caplog.text and graphs_of(peer).captures == 0
    assert set(peer.counters[0].fallbacks) == {FallbackReason.KEY_MISMATCH}
