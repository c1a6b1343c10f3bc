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
    return ModelNeeds(
        trunk=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        slot=sum(layout.nbytes(dtype) for layout in layouts),
        layers=tuple(module.layer for module in experts),
        num_experts=experts[0].num_experts,
        kv_position=_kv_position(skeleton) * dtype.itemsize,
        hidden=int(text.hidden_size),
        ffn=max(layout.ffn for layout in layouts),
        top_k=top_k_of(skeleton),
        vocab=int(text.vocab_size),
        itemsize=dtype.itemsize,
    )


def _recorded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, ray_moe: dict[int, int], **__: Any
) -> tuple[Tensor, None]:
    """Attention that only notes what the KV cache would keep of a position: elements by layer."""
    ray_moe[int(module.layer_idx)] = key.shape[1] * 2 * max(key.shape[-1], value.shape[-1])  # type: ignore[arg-type]
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


ALL_ATTENTION_FUNCTIONS.register(_PROBE, _recorded)


def _kv_position(skeleton: Any) -> int:
    """Elements that the KV cache keeps of one position, over all layers: what the attention layers are given, noted
    while tokens without values go through the model."""
    found: dict[int, int] = {}
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
        return prod((int(text.num_hidden_layers), heads, 2, width))
    return sum(found.values())
