"""The trunk: everything but the routed experts, equal to the whole model once something computes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, NemotronHConfig, PreTrainedModel, Qwen3NextConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from ray_moe.engine import trunk as trunk_module
from ray_moe.engine.trunk import Binding, Trunk, activation_form, experts_activation, load_trunk
from ray_moe.errors import CheckpointError, ConfigError, NotServingError, UnsupportedModelError
from ray_moe.kernels.activation import SwiGLU
from ray_moe.weights.checkpoint import Checkpoint, read_config
from ray_moe.weights.shards import INDEX_NAME
from ray_moe.weights.sources import experts_modules, model_class
from tests.families import EOS, FAMILIES, HIDDEN, MOE_LAYERS, TOP_K, build_family, family_config
from tests.one_peer import OnePeer

FP32_TOLERANCE = 1e-5  # largest difference of a logit; logits are of size 1, and summation orders may differ


def local_experts(checkpoint: Checkpoint, trunk: Trunk) -> Callable[[int, nn.Module], Binding]:
    """Computes every expert here from its canonical weights; the gate is applied in the router's dtype, then summed."""

    def make_binding(layer: int, _module: nn.Module) -> Binding:
        experts = [checkpoint.expert(layer, expert) for expert in range(checkpoint.num_experts)]
        activation = trunk.activation(layer)

        def compute(hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
            rows_TKD = hidden_TD.new_empty((*topk_ids_TK.shape, hidden_TD.shape[-1]))
            for expert, weights in enumerate(experts):
                token, route_slot = torch.where(topk_ids_TK == expert)
                rows = F.linear(hidden_TD[token], weights.gate_up)
                rows = rows if weights.gate_up_bias is None else rows + weights.gate_up_bias
                rows = F.linear(activation(rows), weights.down)
                rows_TKD[token, route_slot] = rows if weights.down_bias is None else rows + weights.down_bias
            return (rows_TKD * topk_weights_TK.unsqueeze(-1)).sum(dim=1).to(hidden_TD.dtype)

        return compute

    return make_binding


def eager_trunk(folder: Path, dtype: torch.dtype) -> Trunk:
    return load_trunk(folder, dtype=dtype, attn_implementation="eager")  # gpt_oss takes no other of transformers' own


def bound_trunk(folder: Path, dtype: torch.dtype) -> Trunk:
    trunk = eager_trunk(folder, dtype)
    trunk.bind(local_experts(Checkpoint(folder), trunk))
    return trunk


def whole_model(folder: Path, dtype: torch.dtype, experts: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation=experts, attn_implementation="eager"
    ).eval()


def prompts(length: int = 40) -> Tensor:
    return torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("packed", [False, True], ids=["original", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_whole_models_in_fp32(name: str, packed: bool, tmp_path: Path) -> None:
    folder = build_family(name, tmp_path, packed=packed)
    with torch.no_grad():
        expected = whole_model(folder, torch.float32, "eager")(prompts()).logits
        found = bound_trunk(folder, torch.float32).model(prompts()).logits
    assert expected.std() > 0.1  # a model that says something
    torch.testing.assert_close(found, expected, rtol=0, atol=FP32_TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_logits_equal_transformers_grouped_mm_bit_for_bit(name: str, tmp_path: Path) -> None:
    folder = build_family(name, tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = whole_model(folder, torch.bfloat16, "grouped_mm")(prompts()).logits
        found = bound_trunk(folder, torch.bfloat16).model(prompts()).logits
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("packed", [False, True], ids=["original", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_trunk_holds_every_tensor_but_the_routed_experts(name: str, packed: bool, tmp_path: Path) -> None:
    folder = build_family(name, tmp_path, packed=packed)
    trunk = eager_trunk(folder, torch.float32)
    model = whole_model(folder, torch.float32, "eager")
    routed = {
        f"{module_name}.{leaf}" for _, module_name, module in experts_modules(model) for leaf in module.state_dict()
    }
    assert set(trunk.trunk_parameter_names) == set(model.state_dict()) - routed
    assert len(routed) == len(MOE_LAYERS[name]) * (4 if name == "gpt_oss" else 2)
    for key, tensor in trunk.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key]), key
    assert not any(parameter.requires_grad for parameter in trunk.model.parameters())
    assert not trunk.model.training


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoints_tensors_go_to_their_device_one_by_one(name: str, tmp_path: Path) -> None:
    """Seen on the device that holds nothing: what had been read on the host first would still be there."""
    folder = build_family(name, tmp_path)
    config = read_config(folder)
    cls = model_class(config, folder, False)
    model = trunk_module._read_trunk(folder, config, cls, torch.float32, "eager", torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_the_trunk_loads_although_no_expert_tensor_can_be_read(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path / "whole")
    expected = eager_trunk(folder, torch.float32).model.state_dict()
    stripped = Path(shutil.copytree(folder, tmp_path / "stripped"))
    index = json.loads((stripped / INDEX_NAME).read_text())
    for file in set(index["weight_map"].values()):
        tensors = {key: tensor for key, tensor in load_file(stripped / file).items() if ".experts." not in key}
        save_file(tensors, stripped / file, metadata={"format": "pt"})
    index["weight_map"] = {key: file for key, file in index["weight_map"].items() if ".experts." not in key}
    (stripped / INDEX_NAME).write_text(json.dumps(index))
    found = eager_trunk(stripped, torch.float32).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_trunk_describes_its_model(name: str, tmp_path: Path) -> None:
    trunk = eager_trunk(build_family(name, tmp_path, vocab_size=300), torch.bfloat16)
    assert trunk.moe_layers == MOE_LAYERS[name]
    assert (trunk.vocab_size, trunk.hidden_size, trunk.top_k, trunk.max_positions) == (300, HIDDEN, TOP_K, 512)
    assert trunk.eos_token_ids == (EOS,)
    assert (trunk.dtype, trunk.device.type) == (torch.bfloat16, "cpu")


def test_several_end_tokens_come_from_the_generation_configuration(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [257, 300]}))
    assert eager_trunk(folder, torch.float32).eos_token_ids == (257, 300)


def test_bindings_get_what_the_router_gives_and_can_be_replaced(tmp_path: Path) -> None:
    trunk = eager_trunk(build_family("mixtral", tmp_path), torch.bfloat16)
    calls: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def make_binding(layer: int, module: nn.Module) -> Binding:
        assert module is trunk.experts[layer]

        def record(hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
            calls.append((layer, hidden_TD, topk_ids_TK, topk_weights_TK))
            return torch.zeros_like(hidden_TD)

        return record

    trunk.bind(make_binding)
    with torch.no_grad():
        silent = trunk.model(prompts(5)).logits
    assert [layer for layer, *_ in calls] == [0, 1, 2]
    for _, hidden_TD, topk_ids_TK, topk_weights_TK in calls:
        assert hidden_TD.shape == (10, HIDDEN)
        assert topk_ids_TK.shape == topk_weights_TK.shape == (10, TOP_K)
        assert topk_ids_TK.dtype is torch.int64
        assert (hidden_TD.dtype, topk_weights_TK.dtype) == (torch.bfloat16, torch.float32)  # never cast on the way
    trunk.bind(lambda _layer, _module: lambda hidden_TD, _ids, _weights: torch.ones_like(hidden_TD))
    with torch.no_grad():
        assert not torch.equal(trunk.model(prompts(5)).logits, silent)
    assert len(calls) == 3


def test_two_trunks_in_one_process_keep_their_own_bindings(tmp_path: Path) -> None:
    folder = build_family("olmoe", tmp_path)
    first, second = (eager_trunk(folder, torch.float32) for _ in range(2))
    first.bind(local_experts(Checkpoint(folder), first))
    with torch.no_grad():
        first.model(prompts(3))
        with pytest.raises(NotServingError, match=r"'model\.layers\.0\.mlp\.experts' has no binding"):
            second.model(prompts(3))


def test_an_unbound_module_of_somebody_elses_model_raises_by_its_class(tmp_path: Path) -> None:
    model = whole_model(build_family("mixtral", tmp_path), torch.float32, "ray_moe")
    with torch.no_grad(), pytest.raises(NotServingError, match="'MixtralExperts' has no binding"):
        model(prompts(3))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_activation_is_the_modules_own_over_gate_first_rows(name: str, tmp_path: Path) -> None:
    folder = build_family(name, tmp_path)
    trunk = eager_trunk(folder, torch.float32)
    module: Any = experts_modules(whole_model(folder, torch.float32, "eager"))[-1][2]
    layer = trunk.moe_layers[-1]
    gate_RF, up_RF = 12 * torch.randn(2, 50, 48, generator=torch.Generator().manual_seed(3))  # beyond every clamp
    own = torch.cat((gate_RF, up_RF), dim=-1)
    if not module.is_concatenated:
        own = torch.empty_like(own)
        own[:, 0::2], own[:, 1::2] = gate_RF, up_RF
    found = trunk.activation(layer)(torch.cat((gate_RF, up_RF), dim=-1))
    assert found.shape == (50, 48)
    assert torch.equal(found, module._apply_gate(own))
    if name == "gpt_oss":
        gate_RF, up_RF = gate_RF.clamp(max=7.0), up_RF.clamp(-7.0, 7.0)
        torch.testing.assert_close(found, (up_RF + 1) * gate_RF * torch.sigmoid(1.702 * gate_RF))
    else:
        torch.testing.assert_close(found, F.silu(gate_RF) * up_RF)
    assert trunk.activation_form(layer) == (SwiGLU(7.0, 1.702, 1.0) if name == "gpt_oss" else SwiGLU())
    for refused in (trunk.activation, trunk.activation_form):
        with pytest.raises(ConfigError, match="layer 7 has no routed experts"):
            refused(7)


@pytest.mark.parametrize(
    "gating",
    [
        lambda gate, up: F.gelu(gate) * up,
        lambda gate, up: F.silu(gate) * up.clamp(-20, 20),
        lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up,
        lambda gate, up: gate.clamp(max=8.0) * torch.sigmoid(1.702 * gate.clamp(max=8.0)) * (up.clamp(-8, 8) + 1),
    ],
    ids=["gelu", "another clamp", "without clamps", "another limit"],
)
def test_an_activation_has_a_form_only_by_its_values(gating: Callable[[Tensor, Tensor], Tensor]) -> None:
    module: Any = torch.nn.Module()
    module.has_gate, module.is_concatenated, module.limit, module.alpha = True, True, 7.0, 1.702
    module._apply_gate = lambda rows: gating(*rows.chunk(2, dim=-1))
    assert activation_form(module) is None


def test_a_form_is_looked_for_once_and_not_at_all_for_peers_without_kernels(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[torch.nn.Module] = []

    def look(experts: torch.nn.Module) -> SwiGLU | None:
        looked.append(experts)
        return activation_form(experts)

    monkeypatch.setattr("ray_moe.engine.trunk.activation_form", look)
    peer = OnePeer(family_dir("qwen3_moe"))
    assert looked == [], "a generation on the CPU"
    assert {layer.weights.form for layer in peer.loop.view.layers.values()} == {None}
    layer = peer.trunk.moe_layers[0]
    assert peer.trunk.activation_form(layer) == peer.trunk.activation_form(layer) == SwiGLU()
    assert looked == [peer.trunk.experts[layer]]


def test_experts_without_a_gate_only_apply_their_activation() -> None:
    module = NemotronHExperts(NemotronHConfig(hidden_size=8, moe_intermediate_size=6, n_routed_experts=2))
    rows_RF = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(experts_activation(module)(rows_RF), F.relu(rows_RF).square())
    assert activation_form(module) is None


def test_an_unregistered_attention_implementation_is_named_before_loading(tmp_path: Path) -> None:
    family_config("mixtral").save_pretrained(tmp_path)  # no weights: nothing can have been loaded
    with pytest.raises(ConfigError, match=r"attention implementation 'paged_by_nobody' is not registered; .*sdpa"):
        load_trunk(tmp_path, dtype=torch.float32, attn_implementation="paged_by_nobody")


def test_an_attention_implementation_that_the_family_does_not_take_is_named_before_loading(tmp_path: Path) -> None:
    family_config("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="gpt_oss cannot use attention implementation 'sdpa'"):
        load_trunk(tmp_path, dtype=torch.float32, attn_implementation="sdpa")


def test_another_attention_implementation_gives_the_same_logits(tmp_path: Path) -> None:
    folder = build_family("glm4_moe", tmp_path)
    expected = bound_trunk(folder, torch.float32)
    found = load_trunk(folder, dtype=torch.float32, attn_implementation="sdpa")
    found.bind(local_experts(Checkpoint(folder), found))
    with torch.no_grad():
        logits = [trunk.model(prompts()).logits for trunk in (expected, found)]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=FP32_TOLERANCE)


def test_an_unservable_family_is_refused_before_loading(tmp_path: Path) -> None:
    Qwen3NextConfig(num_hidden_layers=4, num_experts=8).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'qwen3_next' cannot be served: its layer_types"):
        eager_trunk(tmp_path, torch.float32)


def change_tensor(folder: Path, key: str, change: Callable[[Tensor], Tensor | None]) -> Path:
    shard = folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][key]
    tensors = load_file(shard)
    changed = change(tensors.pop(key))
    if changed is None:
        index = json.loads((folder / INDEX_NAME).read_text())
        del index["weight_map"][key]
        (folder / INDEX_NAME).write_text(json.dumps(index))
    else:
        tensors[key] = changed
    save_file(tensors, shard, metadata={"format": "pt"})
    return shard


NORM = "model.layers.1.input_layernorm.weight"


def test_a_missing_tensor_of_the_trunk_is_an_error_and_not_random(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    change_tensor(folder, NORM, lambda _: None)
    with pytest.raises(CheckpointError, match=r"expected a tensor of the trunk, found no such tensor") as caught:
        eager_trunk(folder, torch.float32)
    assert caught.value.key == NORM


def test_a_tensor_of_the_trunk_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    change_tensor(folder, NORM, lambda tensor: tensor[:60])
    with pytest.raises(CheckpointError, match=r"expected shape \(64,\), found shape \(60,\)") as caught:
        eager_trunk(folder, torch.float32)
    assert caught.value.key == NORM


def test_a_truncated_shard_of_the_trunk_names_file_and_key(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    shard = change_tensor(folder, NORM, lambda tensor: tensor)
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 4)
    with pytest.raises(CheckpointError, match="expected a shard of") as caught:
        eager_trunk(folder, torch.float32)
    assert caught.value.file == str(shard)
