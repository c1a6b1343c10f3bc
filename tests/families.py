"""Tiny random models of eight families behind transformers' experts interface, saved as real sharded checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# huggingface_hub reads it when it is imported; no test may ask the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.utils.logging import disable_progress_bar

torch.set_num_threads(1)  # tiny matrices; several test processes share the cores
disable_progress_bar()

LAYERS, EXPERTS, TOP_K, HIDDEN, FFN = 3, 8, 2, 64, 48
BOS, EOS, PAD = 256, 257, 258  # behind the 256 byte tokens

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_DENSE = {"intermediate_size": 96, "moe_intermediate_size": FFN}  # dense layers beside the MoE ones
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_SHARED = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}

_FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"intermediate_size": FFN, "num_local_experts": EXPERTS, "head_dim": 16}),
    "qwen2_moe": (Qwen2MoeConfig, {**_DENSE, "num_experts": EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": (Qwen3MoeConfig, {**_DENSE, "num_experts": EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "olmoe": (OlmoeConfig, {"intermediate_size": FFN, "num_experts": EXPERTS}),
    "deepseek_v2": (DeepseekV2Config, {**_DENSE, **_MLA, **_SHARED, "n_group": 2, "topk_group": 1}),
    "deepseek_v3": (DeepseekV3Config, {**_DENSE, **_MLA, **_SHARED, "n_group": 2, "topk_group": 1}),
    "glm4_moe": (Glm4MoeConfig, {**_DENSE, **_SHARED, "head_dim": 16, "n_group": 1, "topk_group": 1}),
    "gpt_oss": (
        GptOssConfig,
        {
            "intermediate_size": FFN,
            "num_local_experts": EXPERTS,
            "head_dim": 16,
            "sliding_window": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
}
FAMILIES = tuple(_FAMILIES)
MOE_LAYERS = {name: (1, 2) if "first_k_dense_replace" in extra else (0, 1, 2) for name, (_, extra) in _FAMILIES.items()}


def family_config(name: str, *, vocab_size: int = 320) -> PretrainedConfig:
    cls, extra = _FAMILIES[name]
    return cls(**{**_COMMON, **extra, "vocab_size": vocab_size})


def build_model(
    config: PretrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 0.08
) -> PreTrainedModel:
    """Random normal weights: matrices with `std`, wide enough for well spread routes; biases with 0.02."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name or parameter_name.endswith("sinks"):
                parameter.normal_(0, 0.02, generator=generator)
            elif parameter.ndim >= 2:
                parameter.normal_(0, std, generator=generator)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):  # DeepSeek's load balancing: it changes the selection
                buffer.normal_(0, 0.02, generator=generator)
    return model.eval()


def save_model(model: PreTrainedModel, directory: str | Path, *, packed: bool = False) -> Path:
    """Several shards; the family's published names, or (`packed`) transformers' own stacked ones."""
    model.save_pretrained(directory, max_shard_size="150KB", save_original_format=not packed)
    return Path(directory)


def build_family(
    name: str,
    directory: str | Path,
    *,
    packed: bool = False,
    seed: int = 0,
    vocab_size: int = 320,
    dtype: torch.dtype = torch.float32,
    change: Callable[[PretrainedConfig], None] | None = None,
) -> Path:
    """Makes and saves one family's tiny model; `change` may edit its configuration first. Returns the folder."""
    config = family_config(name, vocab_size=vocab_size)
    if change is not None:
        change(config)
    return save_model(build_model(config, seed=seed, dtype=dtype), directory, packed=packed)
