"""Attention over the paged cache under transformers' name "ray_moe": what a layer means, and how it is computed.

A layer states its semantics in keywords, in its configuration and, most of all, in a mask that transformers does not
build for us: whatever is not understood is refused. How it is computed is the cache's `Attention`.

Letters: T packed tokens, B requests, N gathered positions, H query heads, G query heads per KV head, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ray_moe.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from ray_moe.engine.kvcache import BoundUnit


@dataclass(frozen=True)
class Scores:
    """How one layer turns dot products into weights."""

    scale: float
    softcap: float | None
    sinks_H: Tensor | None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks_H is None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    ray_moe: BoundUnit | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one packed unit over the paged cache; transformers' attention interface, name "ray_moe".

    query [1, H, T, Dk], key [1, H / G, T, Dk], value [1, H / G, T, Dv]; returns [1, T, H, Dv]. `s_aux` [H] are
    attention sinks (a logit per head that takes weight and gives no value), `softcap` bounds the scaled scores.

    Raises UnsupportedModelError on any other semantics: a mask of the model's own, position biases, sparse selections.
    """
    if ray_moe is None:
        raise ConfigError("attention 'ray_moe' needs the keyword ray_moe=KVCache.bind(batch); got None")
    window = _understood_window(module, attention_mask, dropout, kwargs)
    batch, cache = ray_moe.batch, ray_moe.cache
    if query.shape[0] != 1 or query.shape[2] != batch.num_tokens:
        raise ConfigError(f"attention got queries {tuple(query.shape)} for a unit of {batch.num_tokens} packed tokens")

    value_dim = value.shape[-1]
    scores = Scores(scaling if scaling is not None else key.shape[-1] ** -0.5, softcap, s_aux)
    pool = cache.write(int(module.layer_idx), batch.write_slots, key[0], value[0])  # type: ignore[arg-type]
    query = pad_to(query[0], pool.shape[-1] // 2)
    if batch.kind == "decode":
        out_THD = cache.attention.decode(query, pool, ray_moe, window, scores)
    else:
        out_THD = cache.attention.prefill(query, key[0], value[0], pool, ray_moe, window, scores)
    return out_THD[None, ..., :value_dim], None


ALL_ATTENTION_FUNCTIONS.register("ray_moe", paged_attention)


@dataclass(frozen=True)
class DecodeView:
    """What one decode row per request reads: N positions each, the same for every layer with this window."""

    slots: Tensor  # [B * N]
    mask: Tensor  # bool [B, 1, 1, N]


@dataclass(frozen=True)
class PrefillView:
    """What one request's chunk reads. `whole` means the chunk is all there is: causal attention over its own tokens."""

    first: int  # packed tokens [first, last)
    last: int
    slots: Tensor  # [N]
    mask: Tensor  # bool [last - first, N]
    whole: bool


class Attention(Protocol):
    """How a unit's layers write and attend; a cache has one for its device. A `Scores` is the layer's own.

    Queries [H, T, D] come padded to the pool's D, keys and values [H / G, T, .] as the layer made them.
    """

    def write(self, pool: Tensor, slots_T: Tensor, key_HTD: Tensor, value_HTD: Tensor) -> None:
        """Store the unit's keys and values, padded to the pool's D."""

    def decode(self, query_HBD: Tensor, pool: Tensor, unit: BoundUnit, window: int | None, scores: Scores) -> Tensor:
        """One token per request, [B, H, D]."""

    def prefill(
        self,
        query_HTD: Tensor,
        key_HTD: Tensor,
        value_HTD: Tensor,
        pool: Tensor,
        unit: BoundUnit,
        window: int | None,
        scores: Scores,
    ) -> Tensor:
        """Chunks of prompts, [T, H, D]."""


class TorchAttention:
    """With torch's operations, on any device."""

    def write(self, pool: Tensor, slots_T: Tensor, key_HTD: Tensor, value_HTD: Tensor) -> None:
        dim = pool.shape[-1] // 2
        entry_THD = torch.cat((pad_to(key_HTD, dim), pad_to(value_HTD, dim)), dim=-1).transpose(0, 1)
        pool.index_copy_(0, slots_T, entry_THD)

    def decode(self, query_HBD: Tensor, pool: Tensor, unit: BoundUnit, window: int | None, scores: Scores) -> Tensor:
        """All rows in one gather and one call; a KV head's G query heads take the place of query positions."""
        view = unit.view(window, _decode_view)
        heads, batch, dim = query_HBD.shape
        kv_heads = pool.shape[1]
        entry = pool.index_select(0, view.slots).view(batch, -1, kv_heads, 2 * dim).transpose(1, 2)
        query = query_HBD.transpose(0, 1).reshape(batch, kv_heads, heads // kv_heads, dim)
        sinks = None if scores.sinks_H is None else scores.sinks_H.view(kv_heads, -1, 1)
        out = _attend(query, entry[..., :dim], entry[..., dim:], view.mask, scores, sinks)
        return out.reshape(batch, heads, dim)

    def prefill(
        self,
        query_HTD: Tensor,
        key_HTD: Tensor,
        value_HTD: Tensor,
        pool: Tensor,
        unit: BoundUnit,
        window: int | None,
        scores: Scores,
    ) -> Tensor:
        """Request by request: a prefill unit holds few requests, and their lengths differ too much to pad."""
        heads, tokens, dim = query_HTD.shape
        kv_heads = pool.shape[1]
        sinks = None if scores.sinks_H is None else scores.sinks_H.view(heads, 1, 1)
        out_THD = query_HTD.new_empty(tokens, heads, dim)
        for view in unit.view(window, _prefill_views):
            query = query_HTD[None, :, view.first : view.last]
            if view.whole and scores.plain:
                key = pad_to(key_HTD[None, :, view.first : view.last], dim)
                value = pad_to(value_HTD[None, :, view.first : view.last], dim)
                out = F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, scale=scores.scale, enable_gqa=heads != kv_heads
                )
            else:
                entry = pool.index_select(0, view.slots).transpose(0, 1)
                # Fused kernels that take a mask want as many KV heads as query heads.
                entry = entry.repeat_interleave(heads // kv_heads, dim=0)[None]
                out = _attend(query, entry[..., :dim], entry[..., dim:], view.mask, scores, sinks)
            out_THD[view.first : view.last] = out[0].transpose(0, 1)
        return out_THD


def _decode_view(unit: BoundUnit, window: int | None) -> DecodeView:
    batch, block_size = unit.batch, unit.cache.block_size
    # A unit of padded rows says nothing on the host: it reads the lengths back, which no graph can hold.
    longest = max((row.start + row.count for row in batch.rows), default=0) or max(1, int(batch.kv_len.max()))
    span = longest if window is None else min(longest, window)
    device = batch.kv_len.device
    first_B1 = (batch.kv_len - span).clamp(min=0)[:, None]
    position_BN = first_B1 + torch.arange(span, device=device)
    valid_BN = position_BN < batch.kv_len[:, None]
    # Padding reads the request's own first position: a stranger's inf or NaN would poison the sum even when masked.
    position_BN = torch.where(valid_BN, position_BN, 0)
    slots_BN = batch.block_table.gather(1, position_BN // block_size) * block_size + position_BN % block_size
    return DecodeView(slots=slots_BN.flatten(), mask=valid_BN[:, None, None, :])


def _prefill_views(unit: BoundUnit, window: int | None) -> tuple[PrefillView, ...]:
    batch, block_size = unit.batch, unit.cache.block_size
    views, first = [], 0
    for row, blocks_W in zip(batch.rows, batch.block_table, strict=True):
        end = row.start + row.count
        oldest = 0 if window is None else max(0, row.start - window + 1)
        key_N = torch.arange(oldest, end, device=blocks_W.device)
        query_T1 = torch.arange(row.start, end, device=blocks_W.device)[:, None]
        mask_TN = key_N <= query_T1
        if window is not None:
            mask_TN &= key_N > query_T1 - window
        slots_N = blocks_W[key_N // block_size] * block_size + key_N % block_size
        whole = row.start == 0 and (window is None or end <= window)
        views.append(PrefillView(first, first + row.count, slots_N, mask_TN, whole))
        first += row.count
    return tuple(views)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores, sinks: Tensor | None) -> Tensor:
    """query [B, H, Q, D], key and value [B, H, N, D]; mask broadcasts to [B, H, Q, N] and sinks to [B, H, Q, 1]."""
    if scores.plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scale)
    logits = query @ key.mT * scores.scale
    if scores.softcap is not None:
        logits = (logits / scores.softcap).tanh() * scores.softcap
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = logits.softmax(dim=-1)
    else:
        sink = sinks.to(logits.dtype).expand(*logits.shape[:-1], 1)
        weights = torch.cat((logits, sink), dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value


# Keywords that transformers' models pass along and that change nothing about causal attention without their own cache.
_NEUTRAL_KEYWORDS = frozenset(
    {
        "cache_position",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def _understood_window(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, keywords: dict[str, Any]
) -> int | None:
    """The layer's sliding window in tokens, or None; UnsupportedModelError on semantics that we do not implement.

    Transformers states most attention semantics in a mask that it does not build for us, so whatever is not plain
    causal or sliding attention would otherwise be answered silently wrong.
    """
    config = module.config
    layer_types = getattr(config, "layer_types", None)
    layer_type = layer_types[module.layer_idx] if layer_types else None
    causal = keywords.pop("is_causal", None)
    causal = getattr(module, "is_causal", True) if causal is None else causal
    unknown = [
        name for name, value in keywords.items() if name not in _NEUTRAL_KEYWORDS | {"sliding_window"} and _set(value)
    ]
    reason = None
    if attention_mask is not None:
        reason = "its attention layers bring a mask of their own"
    elif not causal:
        reason = "its attention is not causal"
    elif dropout:
        reason = f"attention dropout is {dropout}, which serving must not apply (is the model in training mode?)"
    elif layer_type is not None and layer_type not in _LAYER_TYPES:
        reason = f"layer {module.layer_idx} is of type {layer_type!r}; known are {sorted(_LAYER_TYPES)}"
    elif unknown:
        reason = f"its attention layers pass {', '.join(sorted(unknown))}, whose meaning is not implemented"
    if reason is not None:
        raise UnsupportedModelError(str(getattr(config, "model_type", type(module).__name__)), reason)
    if "sliding_window" in keywords:
        return keywords["sliding_window"] or None
    # Some families (phimoe, qwen2_moe) say it only in the mask, which follows the configuration.
    slides = layer_type == "sliding_attention" or layer_type is None
    return (getattr(config, "sliding_window", None) or None) if slides else None


def _set(value: object) -> bool:
    return value is not None and value is not False


def pad_to(tensor: Tensor, dim: int) -> Tensor:
    return tensor if tensor.shape[-1] == dim else F.pad(tensor, (0, dim - tensor.shape[-1]))
