"""Weights without files: the same everywhere and always, of sensible size, for every family."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from ray_moe.engine.trunk import load_trunk
from ray_moe.errors import ConfigError
from ray_moe.weights.checkpoint import Checkpoint
from ray_moe.weights.digest import parameter_digest
from ray_moe.weights.dummy import DummyCheckpoint, fill
from ray_moe.weights.formats import open_experts
from ray_moe.weights.slots import SlotPool
from tests.families import EXPERTS, FAMILIES, MOE_LAYERS, build_family, family_config


def expected_by_hand(name: str, count: int) -> list[float]:
    """The first values of a tensor, in Python's integers."""

    def scrambled(word: int) -> int:
        word ^= word >> 15
        word = word * 0x2C1B3C6D & 0xFFFFFFFF
        word ^= word >> 12
        word = word * 0x297A2D39 & 0xFFFFFFFF
        return word ^ (word >> 15)

    key = int.from_bytes(hashlib.sha256(f"ray_moe.dummy/1 {name} 0".encode()).digest()[:4], "little")
    return [(scrambled(scrambled(place) ^ key) >> 8) / 2**23 - 1 for place in range(count)]


def test_values_are_a_function_of_name_and_place() -> None:
    made = fill(torch.empty(3, 5), "golden", 3**-0.5)
    assert made.flatten().tolist() == pytest.approx(expected_by_hand("golden", 15), abs=1e-7)
    longer = fill(torch.empty(3_000_000), "golden", 3**-0.5)
    assert torch.equal(longer[:15], made.flatten()), "whatever the size"
    assert torch.equal(
        fill(torch.empty(15, dtype=torch.bfloat16), "golden", 1.0), fill(torch.empty(15), "golden", 1.0).bfloat16()
    )


def test_values_have_the_mean_and_deviation_asked_for_and_chunks_and_names_are_unlike() -> None:
    one, two = (fill(torch.empty(2**21), name, 0.25).double() for name in ("one", "two"))
    assert abs(float(one.mean())) < 1e-3
    assert float(one.std()) == pytest.approx(0.25, rel=1e-3)
    pairs = {
        "names": (one, two),
        "chunks": (one[: 2**20], one[2**20 :]),
        "neighbours": (one[:-1], one[1:]),
        "rows": (one[:-2048], one[2048:]),
    }
    for what, (left, right) in pairs.items():
        assert abs(float(torch.corrcoef(torch.stack((left, right)))[0, 1])) < 5e-3, what


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_have_the_layout_of_files_and_one_digest_each(family: str, tmp_path: Path) -> None:
    files = Checkpoint(build_family(family, tmp_path / "files"))
    family_config(family).save_pretrained(tmp_path / "dummy")
    made, again = (DummyCheckpoint(tmp_path / "dummy") for _ in range(2))
    assert (made.moe_layers, made.num_experts) == (MOE_LAYERS[family], EXPERTS)
    digests = set()
    for layer in made.moe_layers:
        assert made.layout(layer) == files.layout(layer)
        for expert in range(EXPERTS):
            weights = made.expert(layer, expert)
            assert weights.layout == files.layout(layer)
            digests.add(parameter_digest(weights))
            assert parameter_digest(again.expert(layer, expert)) in digests
    assert len(digests) == EXPERTS * len(made.moe_layers)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trunk_without_files_has_the_tensors_of_one_with_files(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tmp_path / "dummy"
    family_config(family).save_pretrained(folder)
    files = load_trunk(build_family(family, tmp_path / "files"), dtype=dtype, attn_implementation="eager")
    made, again = (load_trunk(folder, dtype=dtype, attn_implementation="eager", load_format="dummy") for _ in range(2))
    assert made.trunk_parameter_names == files.trunk_parameter_names
    assert (made.moe_layers, made.top_k, made.eos_token_ids) == (files.moe_layers, files.top_k, files.eos_token_ids)
    theirs = dict([*files.model.named_parameters(), *files.model.named_buffers()])
    second = dict([*again.model.named_parameters(), *again.model.named_buffers()])
    for name, tensor in [*made.model.named_parameters(), *made.model.named_buffers()]:
        assert (tensor.shape, tensor.dtype, tensor.device) == (
            theirs[name].shape,
            theirs[name].dtype,
            theirs[name].device,
        ), name
        assert torch.equal(tensor, second[name]), name
        assert tensor.isfinite().all(), name
        if "rotary" in name or "norm" in name:
            assert torch.equal(tensor, theirs[name]), name


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    config = family_config("qwen3_moe")
    config.tie_word_embeddings = True
    config.save_pretrained(tmp_path)
    trunk = load_trunk(tmp_path, dtype=torch.float32, attn_implementation="eager", load_format="dummy")
    assert trunk.model.lm_head.weight is trunk.model.model.embed_tokens.weight


def test_a_slot_is_filled_with_the_bits_that_its_expert_has_in_the_pools_dtype(tmp_path: Path) -> None:
    family_config("gpt_oss").save_pretrained(tmp_path)
    experts = open_experts(tmp_path, "dummy")
    pool = SlotPool(experts.moe_layers, 2, experts.layout, dtype=torch.bfloat16)
    layer = experts.moe_layers[1]
    wide, narrow = experts.expert(layer, 3), experts.expert(layer, 3, dtype=torch.bfloat16)
    digest = pool.fill(layer, 1, narrow)
    assert digest == parameter_digest(wide.to(dtype=torch.bfloat16))
    assert pool.fill(layer, 0, experts.expert(layer, 4, dtype=torch.bfloat16)) != digest


def test_the_identity_is_of_the_configuration_wherever_it_lies(tmp_path: Path) -> None:
    for name in ("here", "there", "other"):
        family_config("olmoe", vocab_size=321 if name == "other" else 320).save_pretrained(tmp_path / name)
    here, there, other = (DummyCheckpoint(tmp_path / name).identity for name in ("here", "there", "other"))
    assert here == there != other


def test_an_expert_or_layer_out_of_range_is_refused(tmp_path: Path) -> None:
    family_config("deepseek_v3").save_pretrained(tmp_path)
    experts = DummyCheckpoint(tmp_path)
    with pytest.raises(ConfigError, match="expert 8 of layer 1: the layer has experts 0 to 7"):
        experts.expert(1, EXPERTS)
    with pytest.raises(ConfigError, match=r"layer 0 has no routed experts; the layers that have are \(1, 2\)"):
        experts.expert(0, 0)


@pytest.mark.gpu
def test_a_gpu_makes_the_same_bits(tmp_path: Path) -> None:
    family_config("gpt_oss").save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        on_cpu, on_gpu = (
            DummyCheckpoint(tmp_path, device=device).expert(1, 2, dtype=dtype) for device in ("cpu", "cuda")
        )
        assert parameter_digest(on_cpu) == parameter_digest(on_gpu)
