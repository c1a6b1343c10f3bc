"""parameter_digest: a name for exact bits, the same wherever and however they are stored."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ray_moe.weights.checkpoint import Checkpoint, ExpertWeights
from ray_moe.weights.digest import parameter_digest
from tests.families import FAMILIES, build_family


def random_weights(dtype: torch.dtype = torch.float32, *, bias: bool = True, seed: int = 0) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"gate_up": (6, 4), "down": (4, 3)}
    if bias:
        shapes |= {"gate_up_bias": (6,), "down_bias": (4,)}
    return ExpertWeights(**{name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()})


def test_the_digest_is_sha256_over_names_dtypes_shapes_and_little_endian_bytes() -> None:
    weights = ExpertWeights(gate_up=torch.tensor([[1.0, -2.0], [0.5, 4.0]]), down=torch.tensor([[3.0], [-0.0]]))
    canonical = b'{"has_gate": true}'
    canonical += b'\n["gate_up", "float32", [2, 2]]\n' + struct.pack("<4f", 1.0, -2.0, 0.5, 4.0)
    canonical += b'\n["down", "float32", [2, 1]]\n' + struct.pack("<2f", 3.0, -0.0)
    assert parameter_digest(weights) == hashlib.sha256(canonical).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equal_weights_have_equal_digests(dtype: torch.dtype) -> None:
    assert parameter_digest(random_weights(dtype)) == parameter_digest(random_weights(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_bit_of_every_tensor_changes_the_digest(dtype: torch.dtype) -> None:
    weights = random_weights(dtype)
    seen = {parameter_digest(weights)}
    flips = 0
    for _, tensor in weights.named_tensors():
        raw = tensor.view(torch.uint8).flatten()
        for position in range(0, raw.numel(), 5):  # every fifth byte, one of its eight bits
            bit = 1 << (position % 8)
            raw[position] ^= bit
            seen.add(parameter_digest(weights))
            raw[position] ^= bit
            flips += 1
    assert len(seen) == flips + 1
    assert parameter_digest(weights) in seen


def test_the_sign_of_zero_counts() -> None:
    zero, minus = torch.zeros(2, 2), -torch.zeros(2, 2)
    down = torch.ones(2, 1)
    assert parameter_digest(ExpertWeights(zero, down)) != parameter_digest(ExpertWeights(minus, down))


def test_shape_dtype_bias_and_gate_count_even_for_equal_bytes() -> None:
    tall = ExpertWeights(gate_up=torch.zeros(4, 2), down=torch.zeros(2, 2))
    variants = [
        tall,
        ExpertWeights(gate_up=torch.zeros(2, 4), down=torch.zeros(4, 1)),
        ExpertWeights(gate_up=torch.zeros(2, 2), down=torch.zeros(2, 2), has_gate=False),
        ExpertWeights(
            gate_up=torch.zeros(4, 2), down=torch.zeros(2, 2), gate_up_bias=torch.zeros(4), down_bias=torch.zeros(2)
        ),
        tall.to(dtype=torch.float16),
        tall.to(dtype=torch.bfloat16),
    ]
    assert len({parameter_digest(weights) for weights in variants}) == len(variants)


def test_swapped_tensors_of_one_shape_change_the_digest() -> None:
    first, second = torch.full((2, 2), 1.0), torch.full((2, 2), 2.0)
    weights = ExpertWeights(first, second, has_gate=False)
    assert parameter_digest(weights) != parameter_digest(replace(weights, gate_up=second, down=first))


@pytest.mark.parametrize("name", FAMILIES)
def test_both_layouts_on_disk_give_the_same_digests_and_no_two_experts_share_one(name: str, tmp_path: Path) -> None:
    original = Checkpoint(build_family(name, tmp_path / "original"))
    packed = Checkpoint(build_family(name, tmp_path / "packed", packed=True))
    digests = {
        (layer, expert): parameter_digest(original.expert(layer, expert))
        for layer in original.moe_layers
        for expert in range(original.num_experts)
    }
    assert len(set(digests.values())) == len(digests)
    for (layer, expert), digest in digests.items():
        assert parameter_digest(packed.expert(layer, expert)) == digest
