"""The paged KV cache: whose keys and values each block holds, and attention over it under the name "ray_moe".

Flow: the scheduler takes blocks from a `BlockAllocator` and packs rows into a `UnitBatch`; `KVCache.bind` joins it with
the pools and computes, once per unit, what every layer shares; the model is called with `ray_moe=<bound unit>`, and
each attention layer calls `paged_attention`, which writes the unit's keys and values into its pool and attends over it.

Writes go to the positions that the unit names, so the same unit can be forwarded again after a failure. Units run in
the order of their plans: a block freed while a unit that reads it is still to run is overwritten only by a later unit.

Letters: T packed tokens, B requests, W blocks per request, N gathered positions, H query heads, G query heads per KV
head. Sizes are in tokens; a write slot is block * block_size + offset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ray_moe.engine.units import UnitBatch
from ray_moe.errors import ConfigError, RequestError, SlotError, UnsupportedModelError


class BlockAllocator:
    """Hands out KV blocks 0 .. num_blocks - 1; a block has one owner at a time."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks is {num_blocks}; it must be >= 1")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes `count` blocks, least recently used first. Raises SlotError, and takes none, when fewer are free."""
        if not 0 <= count <= len(self._free):
            raise SlotError(f"asked for {count} KV blocks; {len(self._free)} of {self.num_blocks} are free")
        blocks = tuple(self._free.popleft() for _ in range(count))
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def deallocate(self, blocks: Iterable[int]) -> None:
        """Gives blocks back. Raises SlotError on a block that is free already."""
        for block in blocks:
            if self._is_free[block]:
                raise SlotError(f"KV block {block} is given back but has no owner ({self.num_blocks} blocks)")
            self._is_free[block] = True
            self._free.append(block)


class KVCache:
    """One pool per layer: [num_blocks * block_size, KV heads, 2 * head_dim], a position's key beside its value.

    A pool takes its heads, head_dim and dtype from the first key and value that the layer writes. Where key and value
    head dims differ (expanded MLA) the narrower is stored padded with zeros, which changes no dot product and lets one
    gather and one fused kernel serve every model.
    """

    def __init__(self, num_blocks: int, block_size: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"num_blocks is {num_blocks} and block_size {block_size}; both must be >= 1")
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, torch.device(device)
        self.pools: dict[int, Tensor] = {}

    def bind(self, batch: UnitBatch) -> BoundUnit:
        """The unit as the attention layers take it (`ray_moe=`). Bind once, forward any number of times."""
        return BoundUnit(batch, self)

    def write(self, layer: int, slots_T: Tensor, key_HTD: Tensor, value_HTD: Tensor) -> Tensor:
        """Stores the unit's keys and values and returns the layer's pool. Writing the same again changes nothing."""
        head_dim = max(key_HTD.shape[-1], value_HTD.shape[-1])
        entry_THD = torch.cat((_pad_to(key_HTD, head_dim), _pad_to(value_HTD, head_dim)), dim=-1).transpose(0, 1)
        return self._pool_for(layer, entry_THD).index_copy_(0, slots_T, entry_THD)

    # ---- hand-over ----

    @property
    def position_bytes(self) -> int:
        """Bytes of one position's KV over all layers that have written; 0 before the first unit."""
        return sum(pool[0].numel() * pool.element_size() for pool in self.pools.values())

    def read(self, blocks: Sequence[int], positions: int) -> dict[int, Tensor]:
        """A copy on the host of what `blocks` hold: by layer, [positions, KV heads, 2 * head_dim]."""
        slots_N = self._slots(blocks, positions)
        return {layer: pool.index_select(0, slots_N).cpu() for layer, pool in self.pools.items()}

    def restore(self, blocks: Sequence[int], kv: Mapping[int, Tensor]) -> None:
        """The inverse of `read`, into any blocks of any cache of the same model. `check` first: nothing is checked."""
        for layer, entry_NHD in kv.items():
            slots_N = self._slots(blocks, len(entry_NHD))
            self._pool_for(layer, entry_NHD).index_copy_(0, slots_N, entry_NHD.to(self.device))

    def check(self, kv: Mapping[int, Tensor]) -> None:
        """RequestError unless `kv` has the layers, KV heads, head_dim and dtype of this cache, once it has any."""
        if self.pools and set(kv) != set(self.pools):
            raise RequestError(f"KV came for layers {sorted(kv)}; this cache has {sorted(self.pools)}", "kv")
        for layer, pool in self.pools.items():
            entry = kv[layer]
            if entry.shape[1:] != pool.shape[1:] or entry.dtype != pool.dtype:
                raise RequestError(
                    f"layer {layer}: KV of {tuple(entry.shape[1:])} {entry.dtype} came; "
                    f"this cache has {tuple(pool.shape[1:])} {pool.dtype}",
                    "kv",
                )

    def _slots(self, blocks: Sequence[int], positions: int) -> Tensor:
        first_W1 = torch.tensor(blocks, dtype=torch.int64)[:, None] * self.block_size
        return (first_W1 + torch.arange(self.block_size)).flatten()[:positions].to(self.device)

    def _pool_for(self, layer: int, entry_THD: Tensor) -> Tensor:
        pool = self.pools.get(layer)
        if pool is None:
            shape = (self.num_blocks * self.block_size, *entry_THD.shape[1:])
            with torch.inference_mode(False):  # else only code in inference mode could write to it
                pool = torch.zeros(shape, dtype=entry_THD.dtype, device=self.device)
            self.pools[layer] = pool
        return pool


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


@dataclass(frozen=True)
class BoundUnit:
    """A unit and its cache. Views are computed once per sliding window, not once per layer."""

    batch: UnitBatch
    cache: KVCache
    _views: dict[int | None, Any] = field(default_factory=dict, repr=False, compare=False)

    def decode_view(self, window: int | None) -> DecodeView:
        if window not in self._views:
            self._views[window] = _decode_view(self.batch, self.cache.block_size, window)
        view: DecodeView = self._views[window]
        return view

    def prefill_views(self, window: int | None) -> tuple[PrefillView, ...]:
        if window not in self._views:
            block_size = self.cache.block_size
            self._views[window] = tuple(_prefill_views(self.batch, block_size, window))
        views: tuple[PrefillView, ...] = self._views[window]
        return views


def _decode_view(batch: UnitBatch, block_size: int, window: int | None) -> DecodeView:
    longest = max(row.start + row.count for row in batch.rows)
    span = longest if window is None else min(longest, window)
    device = batch.kv_len.device
    first_B1 = (batch.kv_len - span).clamp(min=0)[:, None]
    position_BN = first_B1 + torch.arange(span, device=device)
    valid_BN = position_BN < batch.kv_len[:, None]
    # Padding reads the request's own first position: a stranger's inf or NaN would poison the sum even when masked.
    position_BN = torch.where(valid_BN, position_BN, 0)
    slots_BN = batch.block_table.gather(1, position_BN // block_size) * block_size + position_BN % block_size
    return DecodeView(slots=slots_BN.flatten(), mask=valid_BN[:, None, None, :])


def _prefill_views(batch: UnitBatch, block_size: int, window: int | None) -> Iterable[PrefillView]:
    first = 0
    for row, blocks_W in zip(batch.rows, batch.block_table, strict=True):
        end = row.start + row.count
        oldest = 0 if window is None else max(0, row.start - window + 1)
        key_N = torch.arange(oldest, end, device=blocks_W.device)
        query_T1 = torch.arange(row.start, end, device=blocks_W.device)[:, None]
        mask_TN = key_N <= query_T1
        if window is not None:
            mask_TN &= key_N > query_T1 - window
        yield PrefillView(
            first=first,
            last=first + row.count,
            slots=blocks_W[key_N // block_size] * block_size + key_N % block_size,
            mask=mask_TN,
            whole=row.start == 0 and (window is None or end <= window),
        )
        first += row.count


@dataclass(frozen=True)
class _Scores:
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
    scores = _Scores(scaling if scaling is not None else key.shape[-1] ** -0.5, softcap, s_aux)
    pool = cache.write(int(module.layer_idx), batch.write_slots, key[0], value[0])  # type: ignore[arg-type]
    query = _pad_to(query[0], pool.shape[-1] // 2)
    if batch.kind == "decode":
        out_THD = _attend_decode(query, pool, ray_moe.decode_view(window), scores)
    else:
        out_THD = _attend_prefill(query, key[0], value[0], pool, ray_moe.prefill_views(window), scores)
    return out_THD[None, ..., :value_dim], None


ALL_ATTENTION_FUNCTIONS.register("ray_moe", paged_attention)


def _attend_decode(query_HBD: Tensor, pool: Tensor, view: DecodeView, scores: _Scores) -> Tensor:
    """All rows in one gather and one attention call; a KV head's G query heads take the place of query positions."""
    heads, batch, dim = query_HBD.shape
    kv_heads = pool.shape[1]
    entry = pool.index_select(0, view.slots).view(batch, -1, kv_heads, 2 * dim).transpose(1, 2)
    query = query_HBD.transpose(0, 1).reshape(batch, kv_heads, heads // kv_heads, dim)
    sinks = None if scores.sinks_H is None else scores.sinks_H.view(kv_heads, -1, 1)
    out = _attend(query, entry[..., :dim], entry[..., dim:], view.mask, scores, sinks)
    return out.reshape(batch, heads, dim)


def _attend_prefill(
    query_HTD: Tensor,
    key_HTD: Tensor,
    value_HTD: Tensor,
    pool: Tensor,
    views: tuple[PrefillView, ...],
    scores: _Scores,
) -> Tensor:
    """Request by request: a prefill unit holds few requests, and their lengths differ too much to pad."""
    heads, tokens, dim = query_HTD.shape
    kv_heads = pool.shape[1]
    sinks = None if scores.sinks_H is None else scores.sinks_H.view(heads, 1, 1)
    out_THD = query_HTD.new_empty(tokens, heads, dim)
    for view in views:
        query = query_HTD[None, :, view.first : view.last]
        if view.whole and scores.plain:
            key = _pad_to(key_HTD[None, :, view.first : view.last], dim)
            value = _pad_to(value_HTD[None, :, view.first : view.last], dim)
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


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: _Scores, sinks: Tensor | None) -> Tensor:
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


def _pad_to(tensor: Tensor, dim: int) -> Tensor:
    return tensor if tensor.shape[-1] == dim else F.pad(tensor, (0, dim - tensor.shape[-1]))
