"""Blocks against a set model, and paged attention against dense attention written out per request in float64."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ray_moe.dataplane.phases import Phase
from ray_moe.engine.attention import paged_attention
from ray_moe.engine.kvcache import BlockAllocator, KVCache
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.units import Row, UnitBatch, pack_unit
from ray_moe.errors import ConfigError, RequestError, SlotError, UnsupportedModelError

# ---- blocks ----


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(num_blocks=st.integers(1, 12), calls=st.lists(st.tuples(st.booleans(), st.integers(0, 13)), max_size=40))
def test_a_block_has_one_owner_and_none_is_lost(num_blocks: int, calls: list[tuple[bool, int]]) -> None:
    allocator = BlockAllocator(num_blocks)
    owned: list[tuple[int, ...]] = []
    for takes, number in calls:
        held = [block for blocks in owned for block in blocks]
        if takes and number <= allocator.num_free:
            owned.append(allocator.allocate(number))
            assert len(owned[-1]) == number
            assert not set(owned[-1]) & set(held)
        elif takes:
            with pytest.raises(
                SlotError, match=f"asked for {number} KV blocks; {num_blocks - len(held)} of {num_blocks}"
            ):
                allocator.allocate(number)
        elif owned:
            allocator.deallocate(owned.pop(number % len(owned)))
        held = [block for blocks in owned for block in blocks]
        assert allocator.num_free == num_blocks - len(held)
    for blocks in owned:
        allocator.deallocate(blocks)
    assert sorted(allocator.allocate(num_blocks)) == list(range(num_blocks))


def test_a_block_given_back_twice_is_named() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    allocator.deallocate(blocks)
    with pytest.raises(SlotError, match="KV block 0 is given back but has no owner"):
        allocator.deallocate(blocks)


# ---- attention ----


@dataclass(frozen=True)
class Layer:
    """One attention layer's semantics and shape."""

    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def keywords(self) -> dict[str, Any]:
        sinks = torch.linspace(-1, 2, self.heads) if self.sinks else None
        return {"sliding_window": self.window, "softcap": self.softcap, "s_aux": sinks, "scaling": 0.31}


LAYERS = {
    "grouped queries": Layer(),
    "one head each": Layer(heads=3, kv_heads=3),
    "sliding window": Layer(window=5),
    "window of one": Layer(window=1),
    "sinks": Layer(sinks=True),
    "sinks and window": Layer(sinks=True, window=6),
    "softcap": Layer(softcap=1.5),
    "wider keys (MLA)": Layer(heads=3, kv_heads=3, key_dim=12, value_dim=8),
    "wider values": Layer(key_dim=4, value_dim=10),
    "sinks and wider keys": Layer(key_dim=12, value_dim=6, sinks=True),
}


def attention_module(layer_idx: int = 0, **config: Any) -> nn.Module:
    module = nn.Module()
    module.layer_idx = layer_idx  # type: ignore[assignment]
    module.config = SimpleNamespace(model_type="toy", **config)  # type: ignore[assignment]
    return module


def dense_attention(layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One request's whole sequence, one query at a time; [H, T, D] each, result [T, H, Dv]."""
    query, key, value = query.double(), key.double(), value.double()
    keywords, group = layer.keywords(), layer.heads // layer.kv_heads
    out = torch.zeros(query.shape[1], layer.heads, layer.value_dim, dtype=torch.float64)
    for head in range(layer.heads):
        for position in range(query.shape[1]):
            oldest = 0 if layer.window is None else max(0, position - layer.window + 1)
            seen = slice(oldest, position + 1)
            scores = key[head // group, seen] @ query[head, position] * keywords["scaling"]
            if layer.softcap:
                scores = (scores / layer.softcap).tanh() * layer.softcap
            if layer.sinks:
                scores = torch.cat((scores, keywords["s_aux"][head : head + 1].double()))
            weights = scores.softmax(-1)[: position + 1 - oldest]
            out[position, head] = weights @ value[head // group, seen]
    return out


class Sequences:
    """Random queries, keys and values of some requests, with their blocks interleaved in one pool."""

    def __init__(self, layer: Layer, lengths: dict[str, int], block_size: int = 4) -> None:
        torch.manual_seed(7)
        self.layer, self.block_size = layer, block_size
        dims = ((layer.heads, layer.key_dim), (layer.kv_heads, layer.key_dim), (layer.kv_heads, layer.value_dim))
        self.tensors = {name: [torch.randn(h, n, d) for h, d in dims] for name, n in lengths.items()}
        self.num_blocks = sum(-(-length // block_size) for length in lengths.values())
        shuffled = torch.randperm(self.num_blocks).tolist()
        self.blocks = {
            name: tuple(shuffled.pop() for _ in range(-(-length // block_size))) for name, length in lengths.items()
        }

    def batch(self, kind: Phase, spans: dict[str, tuple[int, int]]) -> UnitBatch:
        rows = [
            Row(kind, name, 0, 0, start, end - start, self.blocks[name], samples=True, index=0)
            for name, (start, end) in spans.items()
        ]
        tokens = [[0] * row.count for row in rows]
        return pack_unit(kind, rows, tokens, [SamplingParams(temperature=0)] * len(rows), self.block_size)

    def attend(self, cache: KVCache, batch: UnitBatch, module: nn.Module | None = None, **changes: Any) -> Tensor:
        query, key, value = (
            torch.cat(
                [self.tensors[row.request_id][i][:, row.start : row.start + row.count] for row in batch.rows], dim=1
            )[None]
            for i in range(3)
        )
        keywords = self.layer.keywords() | {"ray_moe": cache.bind(batch)} | changes
        out, weights = paged_attention(module or attention_module(), query, key, value, None, **keywords)
        assert weights is None
        return out[0]

    def expected(self, batch: UnitBatch) -> Tensor:
        whole = {name: dense_attention(self.layer, *tensors) for name, tensors in self.tensors.items()}
        return torch.cat([whole[row.request_id][row.start : row.start + row.count] for row in batch.rows]).float()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_chunked_prefill_and_batched_decode_equal_dense_attention(layer: Layer) -> None:
    sequences = Sequences(layer, {"a": 9, "b": 14, "c": 3})
    cache = KVCache(sequences.num_blocks, sequences.block_size)
    units: list[tuple[Phase, dict[str, tuple[int, int]]]] = [
        ("prefill", {"a": (0, 7), "b": (0, 3)}),
        ("prefill", {"b": (3, 10), "c": (0, 1)}),
        ("decode", {"a": (7, 8), "b": (10, 11), "c": (1, 2)}),
        ("decode", {"c": (2, 3), "b": (11, 12)}),
        ("prefill", {"b": (12, 14)}),
        ("decode", {"a": (8, 9)}),
    ]
    for kind, spans in units:
        batch = sequences.batch(kind, spans)
        torch.testing.assert_close(sequences.attend(cache, batch), sequences.expected(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("used", [False, True], ids=["fresh cache", "used cache"])
def test_what_is_read_out_of_one_cache_goes_on_in_another(layer: Layer, used: bool) -> None:
    sequences = Sequences(layer, {"a": 14, "b": 6})
    here, there = (KVCache(sequences.num_blocks, sequences.block_size) for _ in range(2))
    sequences.attend(here, sequences.batch("prefill", {"a": (0, 9), "b": (0, 6)}))
    if used:
        sequences.attend(there, sequences.batch("prefill", {"b": (0, 5)}))
    kv = here.read(sequences.blocks["a"], 9)
    assert [len(entry) for entry in kv.values()] == [9]
    assert sum(entry.nbytes for entry in kv.values()) == 9 * here.position_bytes
    there.check(kv)
    sequences.blocks["a"] = tuple(reversed(sequences.blocks["a"]))
    there.restore(sequences.blocks["a"][:3], kv)
    for kind, spans in (("decode", {"a": (9, 10)}), ("prefill", {"a": (10, 14)})):
        batch = sequences.batch(kind, spans)  # type: ignore[arg-type]
        torch.testing.assert_close(sequences.attend(there, batch), sequences.expected(batch), rtol=1e-5, atol=1e-5)
    if used:
        batch = sequences.batch("decode", {"b": (5, 6)})
        torch.testing.assert_close(sequences.attend(there, batch), sequences.expected(batch), rtol=1e-5, atol=1e-5)


def test_kv_of_another_model_is_refused_by_name() -> None:
    sequences = Sequences(Layer(), {"a": 6})
    here = KVCache(sequences.num_blocks, sequences.block_size)
    assert here.position_bytes == 0
    here.check({0: torch.zeros(3, 1, 2)})  # it has none yet: whatever comes first decides
    sequences.attend(here, sequences.batch("prefill", {"a": (0, 6)}))
    kv = here.read(sequences.blocks["a"], 6)
    with pytest.raises(RequestError, match=r"layers \[0, 1\]; this cache has \[0\]"):
        here.check({**kv, 1: kv[0]})
    with pytest.raises(RequestError, match=r"KV of \(2, 8\) torch.float32 came; this cache has \(2, 16\)"):
        here.check({0: kv[0][..., :8]})
    with pytest.raises(RequestError, match=r"torch.bfloat16 came; .* torch.float32"):
        here.check({0: kv[0].bfloat16()})


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_unit_can_be_forwarded_again(kind: Phase) -> None:
    sequences = Sequences(Layer(), {"a": 9, "b": 6})
    cache = KVCache(sequences.num_blocks, sequences.block_size)
    sequences.attend(cache, sequences.batch("prefill", {"a": (0, 5), "b": (0, 5)}))
    batch = sequences.batch(kind, {"a": (5, 6), "b": (5, 6)})
    first, pool = sequences.attend(cache, batch), cache.pools[0].clone()
    assert torch.equal(sequences.attend(cache, batch), first)
    assert torch.equal(cache.pools[0], pool)


def test_another_requests_nan_never_reaches_a_row() -> None:
    sequences = Sequences(Layer(), {"a": 6, "b": 16, "c": 6})
    sequences.tensors["b"][1][:] = float("nan")
    sequences.tensors["b"][2][:] = float("inf")
    cache = KVCache(sequences.num_blocks, sequences.block_size)
    sequences.attend(cache, sequences.batch("prefill", {"a": (0, 5), "b": (0, 15), "c": (0, 5)}))
    batch = sequences.batch("decode", {"a": (5, 6), "b": (15, 16), "c": (5, 6)})
    out, expected = sequences.attend(cache, batch), sequences.expected(batch)
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], rtol=1e-5, atol=1e-5)
    assert out[1].isnan().all()


def test_the_last_owners_values_in_a_reused_block_are_not_read() -> None:
    sequences = Sequences(Layer(), {"old": 4, "new": 4})
    sequences.blocks["new"] = sequences.blocks["old"]
    sequences.tensors["old"][2][:] = float("nan")
    cache = KVCache(sequences.num_blocks, sequences.block_size)
    sequences.attend(cache, sequences.batch("prefill", {"old": (0, 4)}))
    sequences.attend(cache, sequences.batch("prefill", {"new": (0, 1)}))
    batch = sequences.batch("decode", {"new": (1, 2)})
    torch.testing.assert_close(sequences.attend(cache, batch), sequences.expected(batch), rtol=1e-5, atol=1e-5)


def test_low_precision_keeps_its_dtype_and_sums_in_float32() -> None:
    sequences = Sequences(Layer(sinks=True), {"a": 40})
    sequences.tensors["a"] = [tensor.bfloat16() for tensor in sequences.tensors["a"]]
    cache = KVCache(sequences.num_blocks, sequences.block_size)
    batch = sequences.batch("prefill", {"a": (0, 40)})
    out = sequences.attend(cache, batch)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), sequences.expected(batch), rtol=2e-2, atol=2e-2)


def test_layers_share_a_units_views_and_have_pools_of_their_own() -> None:
    sequences = Sequences(Layer(), {"a": 5})
    cache = KVCache(sequences.num_blocks, sequences.block_size)
    bound = cache.bind(sequences.batch("decode", {"a": (0, 1)}))
    for layer_idx in (0, 3):
        sequences.attend(cache, bound.batch, attention_module(layer_idx), ray_moe=bound)
    assert set(cache.pools) == {0, 3}
    assert cache.pools[0].shape == (8 + 4, 2, 16), "a block more, for padding rows"
    assert [window for _make, window in bound._views] == [None], "made once, for both layers"


def test_a_window_that_only_the_configuration_states_is_obeyed() -> None:
    layer = Layer(window=5)
    sequences = Sequences(layer, {"a": 12})
    batch = sequences.batch("prefill", {"a": (0, 12)})
    configs: list[dict[str, Any]] = [
        {"sliding_window": 5},
        {"sliding_window": 5, "layer_types": ["sliding_attention"]},
    ]
    for config in configs:
        keywords = layer.keywords()
        del keywords["sliding_window"]
        cache = KVCache(sequences.num_blocks, sequences.block_size)
        query, key, value = (tensor[None] for tensor in sequences.tensors["a"])
        out, _ = paged_attention(
            attention_module(**config), query, key, value, None, ray_moe=cache.bind(batch), **keywords
        )
        torch.testing.assert_close(out[0], sequences.expected(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        ({}, {"position_bias": torch.zeros(1)}, "pass position_bias"),
        ({}, {"indices": torch.zeros(1), "block_indices": torch.zeros(1)}, "pass block_indices, indices"),
        ({}, {"output_attentions": True}, "pass output_attentions"),
        ({}, {"is_causal": False}, "not causal"),
        ({}, {"dropout": 0.1}, "dropout is 0.1"),
        ({"layer_types": ["compressed_sparse_attention"]}, {}, "'compressed_sparse_attention'"),
    ],
)
def test_semantics_that_are_not_implemented_are_refused(
    config: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    sequences = Sequences(Layer(), {"a": 3})
    cache = KVCache(sequences.num_blocks, sequences.block_size)
    batch = sequences.batch("prefill", {"a": (0, 3)})
    with pytest.raises(UnsupportedModelError, match=f"'toy' cannot be served: .*{reason}"):
        sequences.attend(cache, batch, attention_module(**config), **changes)
    assert not cache.pools


def test_a_mask_of_the_models_own_is_refused() -> None:
    query, key = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    cache = KVCache(1, 4)
    batch = Sequences(Layer(), {"a": 3}).batch("prefill", {"a": (0, 3)})
    with pytest.raises(UnsupportedModelError, match="mask of their own"):
        paged_attention(attention_module(), query, key, key, torch.zeros(1, 1, 3, 3), ray_moe=cache.bind(batch))


def test_neutral_keywords_of_transformers_pass() -> None:
    sequences = Sequences(Layer(), {"a": 3})
    cache = KVCache(sequences.num_blocks, sequences.block_size)
    batch = sequences.batch("prefill", {"a": (0, 3)})
    out = sequences.attend(
        cache, batch, position_ids=batch.position_ids, use_cache=False, output_router_logits=False, is_causal=None
    )
    torch.testing.assert_close(out, sequences.expected(batch), rtol=1e-5, atol=1e-5)


def test_a_call_without_a_unit_or_with_another_units_tokens_is_refused() -> None:
    sequences = Sequences(Layer(), {"a": 3})
    cache = KVCache(sequences.num_blocks, sequences.block_size)
    batch = sequences.batch("prefill", {"a": (0, 3)})
    with pytest.raises(ConfigError, match="needs the keyword ray_moe"):
        sequences.attend(cache, batch, ray_moe=None)
    other = cache.bind(sequences.batch("prefill", {"a": (0, 2)}))
    with pytest.raises(ConfigError, match="for a unit of 2 packed tokens"):
        sequences.attend(cache, batch, ray_moe=other)


def test_the_attention_is_registered_by_name() -> None:
    assert ALL_ATTENTION_FUNCTIONS["ray_moe"] is paged_attention


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_a_cache_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks is {num_blocks} and block_size {block_size}"):
        KVCache(num_blocks, block_size)
    if num_blocks == 0:
        with pytest.raises(ConfigError, match="num_blocks is 0"):
            BlockAllocator(num_blocks)
