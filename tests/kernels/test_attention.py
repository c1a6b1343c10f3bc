"""Paged decode attention equals the plain softmax over each request's own positions, whatever the context's splits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ray_moe.errors import ConfigError
from ray_moe.kernels import reference_attention
from ray_moe.kernels.attention import decode_attention, splits_of, write_kv

BLOCK = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass
class Paged:
    """Requests whose blocks lie scattered in one pool; what no request owns is NaN."""

    query_BHD: Tensor
    pool: Tensor
    table_BW: Tensor
    kv_len_B: Tensor

    @staticmethod
    def random(lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str) -> Paged:
        generator = torch.Generator().manual_seed(sum(lengths) + dim)
        width = max(1, max(-(-length // BLOCK) for length in lengths))
        blocks = torch.randperm(len(lengths) * width + 3, generator=generator)[: len(lengths) * width]
        pool = torch.full(((len(lengths) * width + 3) * BLOCK, kv_heads, 2 * dim), torch.nan)
        table_BW = blocks.view(len(lengths), width)
        for row, length in enumerate(lengths):
            for position in range(length):
                slot = int(table_BW[row, position // BLOCK]) * BLOCK + position % BLOCK
                pool[slot] = torch.randn(kv_heads, 2 * dim, generator=generator)
        query_BHD = torch.randn(len(lengths), heads, dim, generator=generator) * 2
        return Paged(
            query_BHD.to(device, dtype), pool.to(device, dtype), table_BW.to(device), torch.tensor(lengths).to(device)
        )

    def require_equal(self, *, splits: int | None = None, window: int | None = None, **how: object) -> None:
        """The kernel's output beside the twin's, within the tolerance of the dtype."""
        dtype, dim = self.query_BHD.dtype, self.query_BHD.shape[2]
        parts = (self.query_BHD, self.pool, self.table_BW, self.kv_len_B, BLOCK, dim**-0.5)
        out_BHD = torch.full_like(self.query_BHD, torch.nan)
        decode_attention(*parts, out_BHD, window=window, splits=splits, **how)  # type: ignore[arg-type]
        expected_BHD = reference_attention.decode_attention(*parts, window=window, **how)  # type: ignore[arg-type]
        torch.testing.assert_close(out_BHD, expected_BHD, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_worked_examples(device: torch.device) -> None:
    pool = torch.tensor([[3.0, 30], [9, 90], [1, 10], [2, 20]], device=device)[:, None]
    query_BHD = torch.zeros(1, 1, 1, device=device)
    table_BW, kv_len_B = torch.tensor([[1, 0]], device=device), torch.tensor([3], device=device)
    for how, expected in (({}, 20.0), ({"window": 2}, 25.0), ({"sinks_H": torch.zeros(1, device=device)}, 15.0)):
        out_BHD = torch.empty_like(query_BHD)
        decode_attention(query_BHD, pool, table_BW, kv_len_B, 2, 1.0, out_BHD, **how)  # type: ignore[arg-type]
        assert float(out_BHD) == pytest.approx(expected, rel=1e-6)

    pool = torch.full((6, 1, 4), -1.0, device=device)
    key_HTD, value_HTD = torch.tensor([[[1.0, 2.0]]], device=device), torch.tensor([[[3.0]]], device=device)
    write_kv(key_HTD, value_HTD, torch.tensor([5], device=device), pool)
    assert pool[5, 0].tolist() == [1, 2, 3, 0] and bool((pool[:5] == -1).all())
    assert [splits_of(programs) for programs in (4, 128, 1024, 10**6)] == [32, 8, 1, 1]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (8, 1, 64), (3, 3, 24), (2, 1, 256)])
def test_every_request_attends_to_its_own_positions_and_nothing_else(
    device: torch.device, heads: int, kv_heads: int, dim: int
) -> None:
    for dtype in (torch.float32, torch.float16):
        paged = Paged.random([1, 40, 0, 16, 7], heads, kv_heads, dim, dtype, str(device))
        paged.require_equal(splits=1)
        assert not bool(paged.query_BHD.isnan().any())


@pytest.mark.parametrize("splits", [2, 5])
def test_a_context_in_splits_is_the_same_context(device: torch.device, splits: int) -> None:
    paged = Paged.random([300, 129, 128, 3, 0], 4, 2, 16, torch.float32, str(device))
    paged.require_equal(splits=splits)
    paged.require_equal(splits=splits, window=200)


def test_windows_sinks_and_softcaps_mean_what_they_mean_in_the_twin(device: torch.device) -> None:
    sinks_H = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device)
    paged = Paged.random([1, 45, 200, 0], 4, 2, 16, torch.float32, str(device))
    for splits in (1, 2):
        paged.require_equal(splits=splits, window=32)
        paged.require_equal(splits=splits, sinks_H=sinks_H)
        paged.require_equal(splits=splits, softcap=5.0)
        paged.require_equal(splits=splits, window=170, softcap=5.0, sinks_H=sinks_H)


def test_queries_come_as_transposed_views_and_tables_as_wider_ones(device: torch.device) -> None:
    paged = Paged.random([20, 33], 4, 2, 16, torch.float32, str(device))
    wide_BW = torch.full((2, 9), 10**6, device=device)
    wide_BW[:, : paged.table_BW.shape[1]] = paged.table_BW
    paged.table_BW = wide_BW
    paged.query_BHD = paged.query_BHD.transpose(0, 1).contiguous().transpose(0, 1)
    paged.require_equal()


@pytest.mark.parametrize(
    ("kv_heads", "key_dim", "value_dim", "dim"), [(2, 16, 16, 16), (3, 24, 8, 24), (40, 5, 16, 16)]
)
def test_keys_and_values_are_stored_side_by_side(
    device: torch.device, kv_heads: int, key_dim: int, value_dim: int, dim: int
) -> None:
    slots_T = torch.tensor([7, 0, 4], device=device)
    key = torch.randn(3, kv_heads, key_dim, device=device).transpose(0, 1)
    value = torch.randn(3, kv_heads, value_dim, device=device).transpose(0, 1)
    pool = torch.full((9, kv_heads, 2 * dim), -7.0, device=device)
    expected = pool.clone()
    reference_attention.write_kv(key, value, slots_T, expected)
    write_kv(key, value, slots_T, pool)
    assert torch.equal(pool, expected)


def test_heads_that_do_not_fit_are_refused(device: torch.device) -> None:
    pool, lengths = torch.zeros(16, 2, 32, device=device), torch.ones(1, dtype=torch.int64, device=device)
    query_BHD = torch.zeros(1, 3, 16, device=device)
    with pytest.raises(ConfigError, match="3 heads of 16 over a pool of 2 heads of 32 / 2"):
        decode_attention(query_BHD, pool, lengths[None], lengths, BLOCK, 1.0, query_BHD)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 4, 128), (8, 8, 64), (16, 16, 192), (8, 2, 256), (4, 2, 16)]
)
def test_a_gpu_attends_as_the_twin_in_half_precision(heads: int, kv_heads: int, dim: int) -> None:
    sinks_H = torch.randn(heads, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        paged = Paged.random([700, 1, 0, 129, 48], heads, kv_heads, dim, dtype, "cuda")
        for splits in (None, 1, 3):
            paged.require_equal(splits=splits)
        paged.require_equal(window=160)
        paged.require_equal(sinks_H=sinks_H, softcap=30.0)


@pytest.mark.gpu
def test_a_captured_launch_follows_the_lengths_on_the_device() -> None:
    paged = Paged.random([600, 64], 8, 2, 64, torch.bfloat16, "cuda")
    whole_B = paged.kv_len_B.clone()
    out_BHD = torch.empty_like(paged.query_BHD)
    parts = (paged.query_BHD, paged.pool, paged.table_BW, paged.kv_len_B, BLOCK, 0.125)
    decode_attention(*parts, out_BHD)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(*parts, out_BHD)
    for lengths in ([600, 64], [5, 0], [257, 33]):
        paged.kv_len_B.copy_(torch.tensor(lengths))
        graph.replay()
        expected_BHD = reference_attention.decode_attention(*parts)
        torch.testing.assert_close(out_BHD, expected_BHD, rtol=2e-2, atol=2e-2)
    assert whole_B.tolist() == [600, 64]
