"""Scheduler, paged KV and sampling around real transformers models, against those models' own full recomputation.

fp32, tiny random weights. The oracle has no cache: every token comes from a fresh forward over the whole sequence with
transformers' own attention.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ray_moe.engine import attention
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.request import Request
from ray_moe.engine.sampling import SamplingColumns, SamplingParams, sample
from ray_moe.engine.scheduler import Scheduler
from ray_moe.engine.units import StepPlan, UnitBatch

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # wide enough that attention decides the next token
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **BASE | {"head_dim": 16},
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=8,
        norm_topk_prob=True,
    ),
    "deepseek_v3": DeepseekV3Config(
        **BASE | {"num_key_value_heads": 4},
        intermediate_size=96,
        moe_intermediate_size=48,
        n_routed_experts=8,
        n_shared_experts=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "gpt_oss": GptOssConfig(**BASE, intermediate_size=48, num_local_experts=8, head_dim=16, sliding_window=32),
}
NEW_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def model_of(family: str, attention: str, device: str = "cpu") -> Any:
    torch.manual_seed(5)
    config = copy.deepcopy(CONFIGS[family])  # from_config writes the attention's name into it
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager", dtype=torch.float32
    )
    return model.eval().requires_grad_(False).to(device)


@cache
def prompts() -> dict[str, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(6)
    lengths = {"p5": 5, "p40": 40, "p300": 300}
    return {name: tuple(torch.randint(3, 320, (n,), generator=generator).tolist()) for name, n in lengths.items()}


@cache
def reference(family: str, name: str, params: SamplingParams) -> list[int]:
    """One request alone, each token from a forward over all tokens before it."""
    tokens = list(prompts()[name])
    for index in range(NEW_TOKENS):
        output = model_of(family, "eager")(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=1)
        temperature_B, top_p_B = torch.tensor([[params.temperature], [params.top_p]], dtype=torch.float64)
        top_k_B, seed_B, index_B = torch.tensor([[params.top_k], [params.seed or 0], [index]])
        tokens += sample(output.logits[0], temperature_B, top_p_B, top_k_B, seed_B, index_B).tolist()
    return tokens[-NEW_TOKENS:]


def forward(model: Any, kv_cache: KVCache, batch: UnitBatch) -> Tensor:
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.sample_rows,
        ray_moe=kv_cache.bind(batch),
    )
    logits_BV: Tensor = output.logits[0]
    return logits_BV


def serve(
    family: str, requests: list[Request], *, num_blocks: int, replay: bool = False, device: str = "cpu"
) -> tuple[dict[str, list[int]], Scheduler]:
    """The engine loop in small: step n + 1 is planned before step n runs."""
    model = model_of(family, "ray_moe", device)
    block_size = 16
    kv_cache = KVCache(num_blocks, block_size, device)
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_prefill_tokens=64,
        max_decode_rows=8,
        max_positions=512,
        vocab_size=320,
        device=device,
    )
    for request in requests:
        scheduler.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    prefixes = {request.request_id: len(request.prefix_ids) for request in requests}
    plans: deque[StepPlan] = deque([scheduler.plan(0)])
    while scheduler.has_work:
        assert plans[0].step < 500
        plans.append(scheduler.plan(plans[0].step + 1))
        for unit in plans.popleft().units:
            batch = scheduler.materialise(unit)
            if batch is None:
                continue
            logits_BV = forward(model, kv_cache, batch)
            if replay:
                assert torch.equal(forward(model, kv_cache, batch), logits_BV)
            for emission in scheduler.commit(unit, batch, batch.sampling.sample(logits_BV).tolist()):
                assert emission.index == prefixes[emission.request_id] + len(tokens[emission.request_id])
                tokens[emission.request_id].append(emission.token_id)
    assert scheduler.free_blocks == scheduler.total_blocks
    assert set(kv_cache.pools) == set(range(BASE["num_hidden_layers"]))  # every layer did attend through the cache
    return tokens, scheduler


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("num_blocks", [64, 25], ids=["roomy", "preempting"])
def test_concurrent_chunked_generation_equals_each_request_recomputed_alone(family: str, num_blocks: int) -> None:
    requests = [Request(name, prompt, GREEDY) for name, prompt in prompts().items()]
    tokens, scheduler = serve(family, requests, num_blocks=num_blocks)
    assert tokens == {name: reference(family, name, GREEDY) for name in prompts()}
    assert (scheduler.preemptions > 0) == (num_blocks == 25)
    assert all(len(set(stream)) > NEW_TOKENS // 3 for stream in tokens.values())  # no stream is one token repeated


def test_sampled_generation_with_replayed_forwards_equals_each_request_recomputed_alone() -> None:
    params = {
        name: SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.95, top_k=40, seed=seed)
        for seed, name in enumerate(prompts())
    }
    requests = [Request(name, prompt, params[name]) for name, prompt in prompts().items()]
    tokens, _ = serve("qwen3_moe", requests, num_blocks=25, replay=True)
    assert tokens == {name: reference("qwen3_moe", name, params[name]) for name in prompts()}


def test_a_request_resubmitted_with_its_prefix_continues_its_stream() -> None:
    whole = reference("gpt_oss", "p40", GREEDY)
    resubmitted = Request("p40", prompts()["p40"], GREEDY, prefix_ids=tuple(whole[:9]))
    tokens, _ = serve("gpt_oss", [resubmitted], num_blocks=8)
    assert tokens["p40"] == whole[9:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", CONFIGS)
def test_a_cuda_device_generates_what_the_cpu_generates(family: str) -> None:
    requests = [Request(name, prompt, GREEDY) for name, prompt in prompts().items()]
    tokens, _ = serve(family, requests, num_blocks=25, device="cuda")
    assert tokens == {name: reference(family, name, GREEDY) for name in prompts()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_reads_nothing_back_from_a_cuda_device_but_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing, views, attention and sampling run with every synchronisation turned into an error; the model's own eager
    experts, which do synchronise, are not part of that path."""
    attend = attention.paged_attention

    def strict_attention(*arguments: Any, **keywords: Any) -> Any:
        with no_synchronisation():
            return attend(*arguments, **keywords)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "ray_moe", strict_attention)
    monkeypatch.setattr(Scheduler, "materialise", without_synchronisation(Scheduler.materialise))
    monkeypatch.setattr(SamplingColumns, "sample", without_synchronisation(SamplingColumns.sample))
    drawing = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, top_k=50, seed=1)
    for params in (GREEDY, drawing):
        requests = [Request(name, prompt, params) for name, prompt in prompts().items()]
        tokens, _ = serve("gpt_oss", requests, num_blocks=64, device="cuda")
        assert all(len(stream) == params.max_tokens for stream in tokens.values())


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def without_synchronisation(function: Callable[..., Any]) -> Callable[..., Any]:
    def strict(*arguments: Any) -> Any:
        with no_synchronisation():
            return function(*arguments)

    return strict
