"""The engine's attention by kernels gives the tokens of a full recomputation; here they are interpreted, in fp32."""

from __future__ import annotations

import pytest
import torch

from ray_moe.engine import kvcache
from ray_moe.engine.cuda_attention import CudaAttention
from ray_moe.engine.request import Request
from ray_moe.engine.sampling import SamplingParams
from tests.unit.test_engine_parity import GREEDY, prompts, reference, serve


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_decoding_by_kernels_equals_each_request_recomputed_alone(
    device: torch.device, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvcache, "attention_on", lambda _: CudaAttention())
    params = SamplingParams(max_tokens=3, temperature=0)
    requests = [Request(name, prompts()[name], params) for name in ("p5", "p40")]
    tokens, _ = serve(family, requests, num_blocks=64)
    assert tokens == {name: reference(family, name, GREEDY)[:3] for name in ("p5", "p40")}
