"""The trunk's fused operations give what transformers' own operations give, rounding and all."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ray_moe.kernels import reference_trunk
from ray_moe.kernels.trunk import _grouped_rows, rms_norm, rotate, softmax_top_k

# One unit in the last place of the result; in fp32 as many as the order of a sum makes.
ULP = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}


# A norm's product may be rounded to a neighbour; times a weight, that may be two units away.
NORM_ULPS = {True: 2, False: 1}
# Gates in fp32: an approximate exp2 of a rounded exponent and two approximate divisions; 1.7e-6 at worst, 2^-19.
GATE_ULPS = 2


def require_close(found: Tensor, expected: Tensor, *, share: float = 0.02, ulps: int = 1) -> None:
    """Within some units in the last place, and equal but for a `share` of the elements."""
    ulp = ulps * ULP[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=ulp, atol=ulp * 1e-3)
    if expected.dtype != torch.float32 and expected.numel():
        assert float((found != expected).float().mean()) <= share


def test_worked_examples(device: torch.device) -> None:
    rows = torch.tensor([[3.0, 4.0]], device=device)
    weight = torch.tensor([1.0, 2.0], device=device)
    assert rms_norm(rows, weight, 0.0)[0].tolist() == pytest.approx([0.8485, 2.2627], abs=1e-4)

    query, cos, sin = torch.tensor([[[1.0, 2.0]]], device=device), torch.zeros(1, 2), torch.ones(1, 2)
    turned, _ = rotate(query, query, cos.to(device), sin.to(device))
    assert turned.tolist() == [[[-2.0, 1.0]]]

    logits = torch.tensor([[0.0, math.log(3), 0.0]], device=device)
    for renormalise, expected in ((False, [0.6, 0.2]), (True, [0.75, 0.25])):
        gates, ids = softmax_top_k(logits, 2, renormalise=renormalise, gate_dtype=torch.float32)
        assert ids.tolist() == [[1, 0]] and gates[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(5, 2048), (3, 4, 128), (1, 1, 96), (0, 64), (70, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norms_are_those_of_transformers(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = (torch.randn(*shape, device=device) * 3).to(dtype)
    weight = torch.rand(shape[-1], device=device).to(dtype) + 0.5
    for rounded in (True, False):
        found = rms_norm(rows, weight, 1e-6, rounded=rounded)
        expected = reference_trunk.rms_norm(rows, weight, 1e-6, rounded=rounded)
        require_close(found, expected, ulps=NORM_ULPS[rounded])


def test_norms_read_columns_of_a_wider_matrix_in_place(device: torch.device) -> None:
    wide = torch.randn(2, 5, 7 * 16 + 3 * 16 + 8, device=device).half()
    weight = torch.rand(16, device=device).half() + 0.5
    heads, last = wide[..., :112].view(2, 5, 7, 16), wide[..., 112:160].view(2, 5, 3, 16)
    for rows in (heads, last, wide[..., 160:168], heads[:1], heads[:, :1], heads[:, :, 2], heads.transpose(1, 2)):
        own = weight[: rows.shape[-1]]
        found = rms_norm(rows, own, 1e-6)
        assert found.is_contiguous() and found.shape == rows.shape
        assert torch.equal(found, rms_norm(rows.contiguous(), own, 1e-6))
    assert [_grouped_rows(rows) for rows in (heads, last, wide, heads[:1, :1])] == [(7, 168), (3, 168), (10, 0), (7, 0)]
    assert _grouped_rows(heads.transpose(1, 2)) == (0, 0), "copied"


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 2, 16), (32, 4, 128), (3, 3, 24), (17, 17, 8)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rotary_embeddings_are_those_of_transformers(
    device: torch.device, heads: int, key_heads: int, dim: int, dtype: torch.dtype
) -> None:
    tokens = 3
    query = torch.randn(tokens, heads, dim, device=device).to(dtype).transpose(0, 1)
    key = torch.randn(tokens, key_heads, dim, device=device).to(dtype).transpose(0, 1)
    angle = torch.rand(tokens, dim, device=device) * 100
    parts = (query, key, angle.cos().to(dtype), angle.sin().to(dtype))
    for one, expected in zip(rotate(*parts), reference_trunk.rotate(*parts), strict=True):
        assert torch.equal(one, expected), "every operation is rounded once, in torch and here"
        assert one.stride() == (dim, (heads + key_heads) * dim, 1)


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (8, 2), (5, 3), (60, 4), (1, 1)])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_routers_choose_as_in_torch_and_the_lower_expert_of_equal_ones(
    device: torch.device, experts: int, top_k: int, renormalise: bool, dtype: torch.dtype
) -> None:
    logits = torch.randn(9, experts, device=device).to(dtype)
    logits[0] = 1.0  # all are equal
    logits[1] = (logits[1] * 2).round()  # many are
    how = {"renormalise": renormalise, "gate_dtype": dtype}
    gates, ids = softmax_top_k(logits, top_k, **how)  # type: ignore[arg-type]
    expected_gates, expected_ids = reference_trunk.softmax_top_k(logits, top_k, **how)  # type: ignore[arg-type]
    require_close(gates, expected_gates, share=0.2)
    assert torch.equal(ids, expected_ids)
    assert ids[0].tolist() == list(range(top_k))
    _, lost_ids = softmax_top_k(torch.full_like(logits, torch.nan), top_k, **how)  # type: ignore[arg-type]
    assert bool(((lost_ids >= 0) & (lost_ids < experts)).all()), "whoever counts routes is given experts"


# The program's own process compiles kernels; here they are interpreted.
_COMPILE_ROTARY = """
import json
from tests.kernels import hopper

hopper.resources = lambda kernel: {"kernel": kernel.name, "contracted": kernel.asm["ptx"].count("fma.")}
hopper.LAUNCHES = {
    str(dtype): {
        "rotary": lambda dtype=dtype: hopper.rotate(
            *(hopper.tensor(64, heads, 128, dtype=dtype).transpose(0, 1) for heads in (32, 4)),
            *(hopper.tensor(64, 128, dtype=dtype) for _ in range(2)),
        )
    }
    for dtype in (hopper.BF16, hopper.torch.float16, hopper.FP32)
}
for group in hopper.LAUNCHES:
    hopper.main(group)
    print()
"""


def test_a_rotary_embedding_contracts_no_product_and_sum_on_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", _COMPILE_ROTARY], env=environment, cwd=Path(__file__).parents[2], capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    reports = [json.loads(line) for line in found.stdout.splitlines()]
    assert reports == [{"rotary": [{"kernel": "_rotary_kernel", "contracted": 0}]}] * 3


@pytest.mark.gpu
def test_a_gpu_rounds_as_transformers_does_in_bf16() -> None:
    rows = torch.randn(64, 32, 128, device="cuda").bfloat16()
    weight = torch.rand(128, device="cuda").bfloat16() + 0.5
    for rounded in (True, False):
        found = rms_norm(rows, weight, 1e-6, rounded=rounded)
        expected = reference_trunk.rms_norm(rows, weight, 1e-6, rounded=rounded)
        require_close(found, expected, share=0.001, ulps=NORM_ULPS[rounded])
    query, key = (torch.randn(40, heads, 128, device="cuda").bfloat16().transpose(0, 1) for heads in (32, 4))
    angle = torch.rand(40, 128, device="cuda") * 1000
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    for one, expected in zip(rotate(query, key, cos, sin), reference_trunk.rotate(query, key, cos, sin), strict=True):
        assert torch.equal(one, expected)
    logits = torch.randn(256, 128, device="cuda").bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        gates, ids = softmax_top_k(logits, 8, renormalise=True, gate_dtype=dtype)
        expected_gates, expected_ids = reference_trunk.softmax_top_k(logits, 8, renormalise=True, gate_dtype=dtype)
        require_close(gates, expected_gates, ulps=GATE_ULPS if dtype == torch.float32 else 1)
        assert torch.equal(logits.gather(1, ids), logits.gather(1, expected_ids)), "equal logits may be any of them"
