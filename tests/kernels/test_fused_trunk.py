"""A trunk whose small operations are kernels gives its own logits, and what no kernel agrees with keeps its code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ray_moe.engine.fused_trunk import fuse

LAYERS = 3
# norms of a layer and the last one; routers; attention modules, and those whose products are joined.
TAKEN = {
    "qwen3_moe": {"norm": 4 * LAYERS + 1, "router": LAYERS, "rotary": LAYERS, "products": LAYERS},
    "mixtral": {"norm": 2 * LAYERS + 1, "router": LAYERS, "rotary": LAYERS, "products": LAYERS},
    "gpt_oss": {"norm": 2 * LAYERS + 1, "products": LAYERS},
}


def require_same_logits(folder: Path, family: str, device: str, dtype: torch.dtype) -> None:
    own, fused = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").to(device).eval()
        for _ in range(2)
    )
    taken = fuse(fused)
    assert {name: count for name, count in taken.items() if count} == TAKEN[family]
    ids = torch.arange(3, 15, device=device)[None]
    with torch.inference_mode():
        expected_TV, found_TV = own(ids).logits[0].float(), fused(ids).logits[0].float()
    # A router in half precision often has equal logits, and may choose either: some tokens go another way.
    off_T = (found_TV - expected_TV).norm(dim=1) / expected_TV.norm(dim=1)
    assert float(off_T.median()) < (5e-3 if dtype == torch.float16 else 3e-2)
    assert not any("forward" in vars(module) for module in own.modules()), "other models keep their code"


@pytest.mark.parametrize("family", TAKEN)
def test_a_fused_trunk_gives_its_own_logits(device: torch.device, family_dir: Callable[..., Path], family: str) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    require_same_logits(family_dir(family), family, "cpu", torch.float16)


def test_a_trunk_in_fp32_keeps_its_code(device: torch.device, family_dir: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(family_dir("qwen3_moe"), dtype=torch.float32)
    assert not fuse(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_computes_something_else_keeps_its_code(device: torch.device, family_dir: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(family_dir("qwen3_moe"), dtype=torch.float16)
    norm = model.model.norm
    norm.forward = lambda rows: type(norm).forward(norm, rows) * 1.01
    router = model.model.layers[1].mlp.gate
    router.forward = lambda rows: tuple(part.flip(-1) for part in type(router).forward(router, rows))
    kept = norm.forward, router.forward
    assert fuse(model)["router"] == LAYERS - 1
    assert (norm.forward, router.forward) == kept
    assert isinstance(norm, nn.Module)


@pytest.mark.gpu
@pytest.mark.parametrize("family", TAKEN)
def test_a_gpu_gives_a_fused_trunks_own_logits(family_dir: Callable[..., Path], family: str) -> None:
    require_same_logits(family_dir(family), family, "cuda", torch.bfloat16)
