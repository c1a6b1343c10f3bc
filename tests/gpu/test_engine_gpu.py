"""One peer's engine on a GPU: transformers' tokens in fp32, its logits in bf16, and the same tokens with graphs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ray_moe.comm.agreement import Agreement
from ray_moe.dataplane.layer import Invocation, LayerCounters
from ray_moe.dataplane.local import Workspaces
from ray_moe.engine.decode_graph import DecodeGraphs
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.engine.unit_runner import UnitRunner
from ray_moe.engine.units import StepPlan
from ray_moe.models import tiny_moe_path
from tests.one_peer import OnePeer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEW_TOKENS = 64
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
LENGTHS = (1, 9, 40, 90, 17, 200)
EXACT = tuple(range(1, len(LENGTHS) + 1))  # a graph for each number of rows: no padding


@pytest.fixture(autouse=True)
def _fp32_is_fp32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def prompts() -> dict[str, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(11)
    return {f"p{n}": tuple(torch.randint(5, 250, (n,), generator=generator).tolist()) for n in LENGTHS}


def peer_of(dtype: torch.dtype, **options: Any) -> OnePeer:
    how = {"device": "cuda", "audit_rate": 0.0, "look_ahead": True, "workspaces": Workspaces(128), **options}
    return OnePeer(tiny_moe_path(), dtype=dtype, **how)


def serve(peer: OnePeer, tokens: int = NEW_TOKENS, during: Any = lambda: None) -> dict[str, list[int]]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    peer.loop.warm_up()
    for name, prompt in prompts().items():  # before the loop runs: then its units are the same every time
        peer.loop.submit(Request(name, prompt, params))
    with peer:
        during()
        peer.outlet.until_ended(*prompts(), seconds=120)
    assert peer.raised is None and not peer.outlet.refusals, (peer.raised, peer.outlet.refusals)
    return {name: peer.outlet.tokens(name) for name in prompts()}


@cache
def transformers_model(dtype: torch.dtype, experts: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_path(), dtype=dtype, experts_implementation=experts)
    return model.to("cuda").eval()


@torch.inference_mode()
def transformers_tokens(prompt: tuple[int, ...]) -> list[int]:
    """One request alone; every token from a forward over all tokens before it."""
    model, ids = transformers_model(torch.float32, "eager"), torch.tensor([prompt], device="cuda")
    out = model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def graphs_of(peer: OnePeer) -> DecodeGraphs:
    (graphs,) = peer.loop._units._graphs.values()
    return graphs


def totals(peer: OnePeer) -> LayerCounters:
    return LayerCounters.total(peer.counters.values())


def test_tokens_in_fp32_are_those_of_transformers_on_this_host() -> None:
    found = serve(peer_of(torch.float32, max_prefill_tokens=64))
    for name, prompt in prompts().items():
        assert found[name] == transformers_tokens(prompt), name
        assert len(set(found[name])) > 4, f"{name} is one token repeated: it shows nothing"


def test_graphs_and_eager_units_give_equal_tokens() -> None:
    eager = peer_of(torch.bfloat16)
    graphed = peer_of(torch.bfloat16, graph_sizes=EXACT)
    expected, found = serve(eager), serve(graphed)
    assert found == expected
    assert totals(eager).replays == 0
    assert totals(graphed).fallbacks == {} and totals(graphed).replays > 0
    assert graphs_of(graphed).captures == len(EXACT) and graphs_of(graphed).failure is None


@torch.inference_mode()
def test_a_padded_graph_gives_the_eager_units_logits_and_the_padding_is_nobodys() -> None:
    peer = peer_of(torch.bfloat16, graph_sizes=(8,), count_routes=True)
    peer.loop.warm_up()
    scheduler, units, view = peer.loop.scheduler, peer.loop._units, peer.loop.view
    for name, prompt in list(prompts().items())[:3]:
        scheduler.submit(Request(name, prompt, GREEDY))
    prefill = scheduler.plan(0).prefill
    assert prefill is not None
    batch = scheduler.materialise(prefill)
    assert batch is not None
    tokens = batch.sampling.sample(units._outputs(view, Invocation(0, "prefill"), batch)).tolist()  # type: ignore[arg-type]
    scheduler.commit(prefill, batch, tokens)
    decode = scheduler.plan(1).decode
    assert decode is not None
    batch = scheduler.materialise(decode)
    assert batch is not None and batch.num_tokens == 3 and peer.route_counts is not None
    units._view, units._invocation = view, Invocation(1, "decode", shadow=True)
    eager_BV = units.forward(batch).float()
    counted = int(peer.route_counts._counts_PLE[1].sum())
    graph_BV = graphs_of(peer).launch(view, 8, batch)
    assert graph_BV is not None
    error = float((graph_BV.float() - eager_BV).norm() / eager_BV.norm())
    assert error < 1e-2, error
    routes = int(peer.route_counts._counts_PLE[1].sum()) - counted
    assert routes == 3 * peer.trunk.top_k * len(peer.trunk.moe_layers)


@torch.inference_mode()
def test_logits_in_bf16_are_as_close_to_fp32_as_those_of_grouped_mm() -> None:
    peer = peer_of(torch.bfloat16, max_prefill_tokens=512, workspaces=Workspaces(512))
    peer.loop.warm_up()
    generator, off = torch.Generator().manual_seed(4), []
    for step in range(24):
        prompt = torch.randint(5, 250, (5 + 9 * step,), generator=generator).tolist()
        ids = torch.tensor([prompt], device="cuda")
        exact, theirs = (
            transformers_model(dtype, experts)(ids).logits[0, -1].float()
            for dtype, experts in ((torch.float32, "eager"), (torch.bfloat16, "grouped_mm"))
        )
        ours = prefill_logits(peer, f"r{step}", tuple(prompt))
        off.append([float((logits - exact).norm() / exact.norm()) for logits in (ours, theirs)])
    # Now and then rounding sends a token to another expert, in either: the median is of those where it does not.
    ours_off, theirs_off = (sorted(values)[len(off) // 2] for values in zip(*off, strict=True))
    assert ours_off < max(2 * theirs_off, 5e-3), f"off fp32: ours {ours_off}, grouped_mm {theirs_off}; all: {off}"


def prefill_logits(peer: OnePeer, name: str, prompt: tuple[int, ...]) -> Tensor:
    scheduler, units = peer.loop.scheduler, peer.loop._units
    scheduler.submit(Request(name, prompt, GREEDY))
    unit = scheduler.plan(0).prefill
    assert unit is not None
    batch = scheduler.materialise(unit)
    logits_BV = units._outputs(peer.loop.view, Invocation(0, "prefill"), batch)
    assert logits_BV is not None
    scheduler.cancel(name)
    return logits_BV[-1].float()


def test_the_next_generation_needs_no_capture_and_changes_nothing() -> None:
    expected = serve(peer_of(torch.bfloat16, graph_sizes=EXACT), 120)
    peer = peer_of(torch.bfloat16, graph_sizes=EXACT)
    switched, at_switch = threading.Event(), []

    def returned(_: GenerationView) -> None:
        at_switch.append(totals(peer).replays)
        switched.set()

    peer.outlet.lease_returned = returned  # type: ignore[method-assign]

    def stage() -> None:
        peer.loop.stage(peer.view(2))
        assert switched.wait(60)

    assert serve(peer, 120, stage) == expected
    assert graphs_of(peer).captures == len(EXACT)
    assert totals(peer).replays > at_switch[0] and totals(peer).fallbacks == {}
    assert peer.loop.view.generation == 2 and graphs_of(peer).is_bound(peer.loop.view)


def test_a_decode_step_waits_for_the_device_nowhere_but_for_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    run, strict_steps = UnitRunner.run, []

    def strict(units: UnitRunner, plan: StepPlan, agreed: Agreement, *more: Any) -> Any:
        if agreed.prefill or not agreed.decode:
            return run(units, plan, agreed, *more)
        strict_steps.append(agreed.step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(units, plan, agreed, *more)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(UnitRunner, "run", strict)
    peer = peer_of(torch.bfloat16, graph_sizes=EXACT)
    serve(peer)
    assert len(strict_steps) > NEW_TOKENS // 2


def test_requests_of_every_kind_share_a_batch() -> None:
    peer = peer_of(torch.bfloat16, graph_sizes=(1, 2, 4, 8, 16, 32), num_blocks=60)
    drawing = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, top_k=50, seed=5, ignore_eos=True)
    peer.loop.warm_up()
    with peer:
        for number, (name, prompt) in enumerate(prompts().items()):
            peer.loop.submit(Request(name, prompt, drawing if number % 2 else GREEDY))
        peer.outlet.until_ended(*prompts(), seconds=120)
    assert peer.raised is None
    for number, name in enumerate(prompts()):
        assert len(peer.outlet.tokens(name)) == (40 if number % 2 else NEW_TOKENS)
    assert peer.loop.scheduler.free_blocks == peer.loop.scheduler.total_blocks
