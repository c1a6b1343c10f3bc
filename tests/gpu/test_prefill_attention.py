"""Prompts through flash attention equal torch's own operations, whole and in chunks, with windows."""

from __future__ import annotations

import pytest
import torch

from ray_moe.engine.attention import Scores, TorchAttention
from ray_moe.engine.cuda_attention import CudaAttention
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.units import Row, UnitBatch, pack_unit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GREEDY = SamplingParams(temperature=0.0)
BLOCK = 16


def unit_of(chunks: list[tuple[int, int]]) -> UnitBatch:
    """A prefill unit of chunks (first position, tokens), each request with blocks of its own, last ones first."""
    rows, free = [], 200
    for number, (start, count) in enumerate(chunks):
        needed = -(-(start + count) // BLOCK)
        blocks = tuple(range(free - 1, free - needed - 1, -1))
        free -= needed
        rows.append(Row("prefill", f"r{number}", number, 0, start, count, blocks, True, 0))
    return pack_unit("prefill", rows, [[0] * row.count for row in rows], [GREEDY] * len(rows), BLOCK, "cuda")


@pytest.mark.parametrize("chunks", [[(0, 5), (0, 130), (0, 1)], [(64, 40), (0, 33), (17, 1)], [(300, 70)]])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim"), [(8, 2, 64, 64), (4, 4, 24, 16), (32, 4, 128, 128)]
)
@pytest.mark.parametrize("window", [None, 24])
def test_flash_attention_is_attention(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int, key_dim: int, value_dim: int, window: int | None
) -> None:
    torch.manual_seed(3)
    cache, batch = KVCache(200, BLOCK, "cuda"), unit_of(chunks)
    assert isinstance(cache.attention, CudaAttention)
    bound, dtype, tokens = cache.bind(batch), torch.bfloat16, batch.num_tokens
    query = torch.randn(tokens, heads, key_dim, device="cuda", dtype=dtype).transpose(0, 1)
    key = torch.randn(tokens, kv_heads, key_dim, device="cuda", dtype=dtype).transpose(0, 1)
    value = torch.randn(tokens, kv_heads, value_dim, device="cuda", dtype=dtype).transpose(0, 1)
    pool = cache.write(0, batch.write_slots, key, value)
    earlier = torch.randn_like(pool)
    earlier[batch.write_slots] = pool[batch.write_slots]
    pool.copy_(earlier)
    scores = Scores(key_dim**-0.5, None, None)
    parts = (query, key, value, pool, bound, window, scores)
    found, expected = cache.attention.prefill(*parts), TorchAttention().prefill(*parts)
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert [make for make, _ in bound._views] and any("FlashView" in make.__qualname__ for make, _ in bound._views)
