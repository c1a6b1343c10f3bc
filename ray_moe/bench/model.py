"""The shape that CPU figures are quoted for: a small Qwen3-MoE with random weights: only the system is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

NUM_EXPERTS, TOP_K, HIDDEN, FFN, VOCABULARY = 8, 2, 64, 48, 320


def build(directory: Path) -> Path:
    """Writes the checkpoint (4 MoE layers, 8 experts, top-2, hidden 64, FFN 48) and returns its folder."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": FFN,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    config = Qwen3MoeConfig(**shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.08)
    model.save_pretrained(directory)
    return directory
