"""What a model will take of a peer's memory, found without taking any: its modules on the meta device.

Letters: T tokens, H heads, D head width.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ray_moe.engine.trunk import top_k_of, trunk_skeleton
from ray_moe.weights.budget import ModelNeeds
from ray_moe.weights.checkpoint import layout_of, read_config
from ray_moe.weights.sources import describe_experts, experts_modules, meta_model, model_class

_PROBE = "ray_moe_shapes"
_TOKENS = 2


def model_needs(path: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> ModelNeeds:
    """From the model's configuration alone. Raises what `load_trunk` raises for one that cannot be served."""
    config = read_config(path, trust_remote_code=trust_remote_code)
    cls = model_class(config, path, trust_remote_code)
    experts = describe_experts(meta_model(config, cls))
    layouts = [layout_of(module) for module in experts]
    skeleton = trunk_skeleton(config, cls, dtype, _PROBE)
    tensors = [*skeleton.parameters(), *skeleton.buffers()]
    text = skeleton.config.get_text_config()
    cached, attention = _attention(skeleton)
    return ModelNeeds(
        trunk=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        slot=sum(layout.nbytes(dtype) for layout in layouts),
        layers=tuple(module.layer for module in experts),
        num_experts=experts[0].num_experts,
        kv_position=cached * dtype.itemsize,
        hidden=int(text.hidden_size),
        ffn=max(layout.ffn for layout in layouts),
        top_k=top_k_of(skeleton),
        vocab=int(text.vocab_size),
        itemsize=dtype.itemsize,
        attention=attention,
        positions=int(text.max_position_embeddings),
    )


def _recorded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    ray_moe: dict[int, tuple[int, int]],
    **__: Any,
) -> tuple[Tensor, None]:
    """Attention that only notes, by layer, what the KV cache would keep of a position, and what it has of a token."""
    heads, kv_heads, out = query.shape[1], key.shape[1], value.shape[-1]
    ray_moe[int(module.layer_idx)] = (  # type: ignore[arg-type]
        kv_heads * 2 * max(key.shape[-1], out),
        heads * (query.shape[-1] + out) + kv_heads * (key.shape[-1] + out),
    )
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


ALL_ATTENTION_FUNCTIONS.register(_PROBE, _recorded)


def _attention(skeleton: Any) -> tuple[int, int]:
    """Elements that the KV cache keeps of one position, over all layers, and that one layer has of a token at once:
    what the attention layers are given, noted while tokens without values go through the model."""
    found: dict[int, tuple[int, int]] = {}
    for _, _, module in experts_modules(skeleton):
        module.ray_moe = lambda hidden_TD, _ids, _weights: hidden_TD  # type: ignore[assignment]
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            skeleton(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1, ray_moe=found)
    except (RuntimeError, NotImplementedError):  # its forward looks at values: as if every head had keys of its own
        text = skeleton.config.get_text_config()
        heads = int(text.num_attention_heads)
        width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        return prod((int(text.num_hidden_layers), heads, 2, width)), 4 * heads * width
    return sum(cached for cached, _ in found.values()), max(of_token for _, of_token in found.values())
