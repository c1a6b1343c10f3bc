"""Which models are served: hub ids and folders, families that are refused by name, code that is not trusted."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from torch import nn
from transformers import DeepseekV32Config, LlamaConfig, PretrainedConfig, Qwen3NextConfig, T5Config

from ray_moe.engine.trunk import load_trunk
from ray_moe.errors import ConfigError, UnsupportedModelError
from ray_moe.weights.checkpoint import Checkpoint, check_supported, resolve_model
from tests.families import EXPERTS, FAMILIES, build_family, family_config


def fp8(config: PretrainedConfig) -> PretrainedConfig:
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return config


def scaled(config: PretrainedConfig, rope_type: str) -> PretrainedConfig:
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    return config


UNSUPPORTED: dict[str, tuple[PretrainedConfig, str, str]] = {
    "linear attention": (
        Qwen3NextConfig(num_hidden_layers=4, num_experts=8),
        "qwen3_next",
        r"layer_types contain \['linear_attention'\]",
    ),
    "sparse attention": (DeepseekV32Config(num_hidden_layers=4), "deepseek_v32", "deepseek_sparse_attention"),
    "dense": (LlamaConfig(num_hidden_layers=1), "llama", "no MoE block behind transformers' experts interface"),
    "encoder-decoder": (T5Config(), "t5", "encoder-decoder"),
    "dynamic rope": (scaled(family_config("mixtral"), "dynamic"), "mixtral", r"\(dynamic\) depends on what shares the"),
    "fp8": (fp8(family_config("deepseek_v3")), "deepseek_v3", r"weights are quantised \(fp8\)"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_family_that_cannot_work_is_refused_by_name_and_reason(case: str) -> None:
    config, family, reason = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_supported(config)
    assert caught.value.family == family


def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixture_of_everything"}))
    with pytest.raises(
        UnsupportedModelError, match=r"'mixture_of_everything' cannot be served: transformers .* does not know"
    ):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_eight_families_are_supported(name: str) -> None:
    check_supported(family_config(name))


def test_a_quantised_checkpoint_is_refused_before_any_tensor_is_looked_for(tmp_path: Path) -> None:
    config = family_config("gpt_oss")
    config.save_pretrained(tmp_path)
    quantised = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(UnsupportedModelError, match=r"gpt_oss.*quantised \(mxfp4\)"):
        Checkpoint(tmp_path)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model, as huggingface_hub lays it out, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--tiny--mixtral"
    commit = "0123456789abcdef0123456789abcdef01234567"
    build_family("mixtral", repository / "snapshots" / commit)
    for reference in ("main", "v1"):
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
    return repository / "snapshots" / commit


def test_a_hub_id_resolves_to_its_snapshot_in_the_cache(hub_cache: Path) -> None:
    assert resolve_model("tiny/mixtral") == hub_cache
    assert resolve_model("tiny/mixtral", revision="v1") == hub_cache
    assert resolve_model("tiny/mixtral", revision=hub_cache.name) == hub_cache
    assert Checkpoint(resolve_model("tiny/mixtral")).num_experts == EXPERTS


def test_a_model_folder_resolves_to_itself(tmp_path: Path) -> None:
    folder = build_family("mixtral", tmp_path)
    assert resolve_model(folder) == resolve_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("name", "revision"),
    [("tiny/absent", None), ("tiny/mixtral", "v2"), ("no such folder / at all", None), ("", None)],
)
def test_what_is_neither_a_folder_nor_a_known_hub_id_is_a_clear_error(
    name: str, revision: str | None, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # "" names the working directory, which is no model folder
    with pytest.raises(ConfigError, match=r"neither a folder nor a hub model|not a model folder") as caught:
        resolve_model(name, revision=revision)
    assert name in str(caught.value)
    assert revision is None or revision in str(caught.value)


def test_a_revision_of_a_folder_and_a_folder_without_a_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    with pytest.raises(ConfigError, match="revision 'v1' needs a hub id"):
        resolve_model(tmp_path, revision="v1")


CUSTOM_CODE = """
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import use_experts_implementation


class HalvingConfig(Qwen3MoeConfig):
    model_type = "halving_moe"


@use_experts_implementation
class HalvingExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        sizes = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(sizes[0], 2 * sizes[1], sizes[2]))
        self.down_proj = nn.Parameter(torch.empty(sizes[0], sizes[2], sizes[1]))
        self.num_experts = sizes[0]

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * up / 2

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise RuntimeError("only an experts implementation runs these")


class HalvingForCausalLM(Qwen3MoeForCausalLM):
    config_class = HalvingConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts = HalvingExperts(config)
"""


def test_code_in_the_folder_runs_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = build_family("qwen3_moe", tmp_path / "halving", packed=True)
    (folder / "modeling_halving.py").write_text(CUSTOM_CODE)
    classes = {"AutoConfig": "HalvingConfig", "AutoModelForCausalLM": "HalvingForCausalLM"}
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "halving_moe",
        "auto_map": {auto: f"modeling_halving.{name}" for auto, name in classes.items()},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for refused in (Checkpoint, lambda path: load_trunk(path, dtype=torch.float32, attn_implementation="eager")):
        with pytest.raises(ConfigError, match="'halving_moe' runs code of its own; set trust_remote_code"):
            refused(folder)

    checkpoint = Checkpoint(folder, trust_remote_code=True)
    trunk = load_trunk(folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=True)
    trunk.bind(lambda _layer, _module: lambda hidden_TD, _ids, _weights: torch.zeros_like(hidden_TD))
    assert isinstance(trunk.experts[1], nn.Module)
    assert torch.equal(trunk.activation(1)(torch.full((1, 96), 3.0)), torch.full((1, 48), 4.5))
    assert checkpoint.expert(1, 7).gate_up.shape == (96, 64)
    with torch.no_grad():
        assert trunk.model(torch.zeros(1, 3, dtype=torch.int64)).logits.isfinite().all()
