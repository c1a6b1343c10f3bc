"""Attention of one decode token per request over the paged KV cache, and the write that comes before it.

    write_kv                 the unit's keys and values into the pool, side by side
    decode_attention         a program for each request, KV head and split of the context; where a context takes more
                             than one split, a second launch sums them in order: the same bits every time

Lengths and block tables stay on the device and grids depend on shapes alone, so that a launch can be captured in a CUDA
graph and replayed as contexts grow. Letters: B requests, H query heads, G query heads per KV head, D head dim, W blocks
per request, T tokens, S splits. A pool is [positions, H / G, 2 D], a position's key beside its value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ray_moe.errors import ConfigError

# Programs that keep a GPU of 132 multiprocessors busy; beyond as many, a context is not split.
_PROGRAMS = 1056
_MOST_SPLITS = 32
# A split is worth a launch's second pass from so many positions on.
_SMALLEST_SPLIT = 128
LOG2_E = tl.constexpr(1.4426950408889634)
_WIDEST = 256


def decode_attention(
    query_BHD: Tensor,
    pool: Tensor,
    block_table_BW: Tensor,
    kv_len_B: Tensor,
    block_size: int,
    scale: float,
    out_BHD: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    splits: int | None = None,
) -> None:
    """Write each request's attention over its first `kv_len` positions (the last `window` of them) to `out_BHD`.

    Position p of request b is row `table[b, p // block_size] * block_size + p % block_size` of `pool`. Scores are
    `scale * q . k`, bounded by `softcap * tanh(score / softcap)` where one is given; `sinks_H` are logits that take
    weight and give no value. A request of length 0 is a padding row: nothing is read for it and it gets zeros. The last
    dimensions of query and output must be contiguous; tables and lengths are int64. `splits` bounds the splits of a
    context; by default the batch decides.

    Example: one head of D = 1, block_size 2, table [[1, 0]], kv_len [3], pool rows (key, value) (3, 30), (9, 90),
    (1, 10), (2, 20): positions 0, 1, 2 are rows 2, 3, 0 with keys 1, 2, 3. For query 0 all weights are 1/3 and the
    output is (10 + 20 + 30) / 3 = 20; with window 2 it is (20 + 30) / 2 = 25; with a sink of 0 beside, 60 / 4 = 15.

    Raises `ConfigError` for a head dim above 256, or heads that are no multiple of the KV heads.
    """
    batch, heads, dim = query_BHD.shape
    kv_heads = pool.shape[1]
    if dim > _WIDEST or pool.shape[2] != 2 * dim or heads % kv_heads:
        raise ConfigError(
            f"decode attention takes head dims up to {_WIDEST} and whole groups of query heads, found {heads} heads of "
            f"{dim} over a pool of {kv_heads} heads of {pool.shape[2]} / 2"
        )
    if batch == 0:
        return
    group = heads // kv_heads
    splits = splits_of(batch * kv_heads) if splits is None else splits
    wide = max(16, triton.next_power_of_2(dim))
    block = 64 if wide <= 128 else 32
    if splits > 1:
        partial = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=query_BHD.device)
        stats = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=query_BHD.device)
    else:
        partial = stats = out_BHD  # never touched
    shape = {"D": dim, "BD": wide, "WINDOW": window or 0, "BN": block, "SMALLEST": _SMALLEST_SPLIT}
    shape["SINKS"] = sinks_H is not None
    _paged_decode_kernel[(kv_heads, batch, splits)](
        query_BHD, pool, block_table_BW, kv_len_B, sinks_H, out_BHD, partial, stats, scale, softcap or 1.0, heads,
        query_BHD.stride(0), query_BHD.stride(1), out_BHD.stride(0), out_BHD.stride(1), pool.stride(0),
        block_table_BW.stride(0),
        G=group, GP=max(16, triton.next_power_of_2(group)), BS=block_size, SOFTCAP=softcap is not None,
        SPLIT=splits > 1, num_warps=4, num_stages=3, **shape,
    )  # fmt: skip
    if splits > 1:
        _paged_sum_kernel[(heads, batch)](
            kv_len_B, sinks_H, out_BHD, partial, stats, heads, splits, out_BHD.stride(0), out_BHD.stride(1),
            num_warps=4, **shape,
        )  # fmt: skip


def splits_of(programs: int) -> int:
    """The most splits of a context where there are `programs` requests x KV heads: 4 -> 32, 128 -> 8, 1024 -> 1."""
    return max(1, min(_MOST_SPLITS, _PROGRAMS // programs))


def write_kv(key_HTD: Tensor, value_HTD: Tensor, slots_T: Tensor, pool: Tensor) -> None:
    """Store keys and values [H / G, T, .] at rows `slots_T` (int64) of `pool`, each padded with zeros to the pool's D.

    Rows that several tokens name hold one of theirs afterwards. The last dimensions must be contiguous.

    Example: D = 2, one head, keys [[1, 2]], values [[3]], slots [5] -> row 5 of the pool is [1, 2, 3, 0].
    """
    tokens, key_dim = key_HTD.shape[1:]
    if tokens == 0:
        return
    row = pool.shape[1] * pool.shape[2]
    block = min(1024, triton.next_power_of_2(row))
    _kv_write_kernel[(tokens, triton.cdiv(row, block))](
        key_HTD, value_HTD, slots_T, pool, key_HTD.stride(0), key_HTD.stride(1), value_HTD.stride(0),
        value_HTD.stride(1), pool.stride(0),
        ROW=row, D=pool.shape[2] // 2, DK=key_dim, DV=value_HTD.shape[2], BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _share(kv_len_B, b, splits, WINDOW: tl.constexpr, BN: tl.constexpr, SMALLEST: tl.constexpr):
    """Request b's first position, its length, and the positions of a split."""
    length = tl.load(kv_len_B + b).to(tl.int32)
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    each = (length - first + splits - 1) // splits
    each = tl.maximum((each + BN - 1) // BN * BN, SMALLEST)
    return first, length, each


@triton.jit(do_not_specialize=["table_b"])
def _paged_decode_kernel(
    query, pool, table_BW, kv_len_B, sinks_H, out, partial, stats, scale, softcap, H,
    query_b, query_h, out_b, out_h, pool_n, table_b,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, WINDOW: tl.constexpr,
    BN: tl.constexpr, SMALLEST: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    b = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    first, length, each = _share(kv_len_B, b, splits, WINDOW, BN, SMALLEST)
    start = first + split * each
    end = tl.minimum(start + each, length)
    if (start >= end) & (split > 0):
        return
    g = tl.arange(0, GP)
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    head = kv_head * G + g
    rows = (g[:, None] < G) & (d[None, :] < D)
    at = b.to(tl.int64) * query_b + head[:, None] * query_h + d[None, :]
    q = tl.load(query + at, mask=rows, other=0.0)
    most = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, BD), tl.float32)
    # Blocks are looked up one step ahead: the copies of keys and values then wait for no other load.
    table = table_BW + b.to(tl.int64) * table_b
    block = tl.load(table + (start + n) // BS, mask=start + n < end, other=0)
    for base in range(start, end, BN):
        position = base + n
        seen = position < end
        entry = (block * BS + position % BS) * pool_n + kv_head * (2 * D)
        block = tl.load(table + (position + BN) // BS, mask=position + BN < end, other=0)
        mask = seen[:, None] & (d[None, :] < D)
        k = tl.load(pool + entry[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(pool + entry[:, None] + D + d[None, :], mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        score = tl.where(seen[None, :], score * LOG2_E, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        kept = tl.exp2(most - higher)
        total = total * kept + tl.sum(weight, 1)
        acc = acc * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        most = higher
    alone = True
    if SPLIT:
        alone = length - first <= each
    if alone:
        if SINKS:
            sink = tl.load(sinks_H + head, mask=g < G, other=0.0).to(tl.float32) * LOG2_E
            higher = tl.maximum(most, sink)
            kept = tl.exp2(most - higher)
            total = total * kept + tl.exp2(sink - higher)
            acc = acc * kept[:, None]
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        to = out + b.to(tl.int64) * out_b + head[:, None] * out_h + d[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=rows)
    else:
        part = (b.to(tl.int64) * H + head) * splits + split
        tl.store(partial + part[:, None] * D + d[None, :], acc, mask=rows)
        tl.store(stats + part * 2, most, mask=g < G)
        tl.store(stats + part * 2 + 1, total, mask=g < G)


@triton.jit(do_not_specialize=["splits"])
def _paged_sum_kernel(
    kv_len_B, sinks_H, out, partial, stats, H, splits, out_b, out_h, D: tl.constexpr, BD: tl.constexpr,
    WINDOW: tl.constexpr, BN: tl.constexpr, SMALLEST: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program per head of a request: its splits, in order."""
    head = tl.program_id(0)
    b = tl.program_id(1)
    first, length, each = _share(kv_len_B, b, splits, WINDOW, BN, SMALLEST)
    if length - first <= each:  # written already
        return
    d = tl.arange(0, BD)
    acc = tl.zeros((BD,), tl.float32)
    if SINKS:
        most = tl.load(sinks_H + head).to(tl.float32) * LOG2_E
        total = tl.full((), 1.0, tl.float32)
    else:
        most = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
    for split in range((length - first + each - 1) // each):
        part = (b.to(tl.int64) * H + head) * splits + split
        its_most = tl.load(stats + part * 2)
        higher = tl.maximum(most, its_most)
        kept = tl.exp2(most - higher)
        adds = tl.exp2(its_most - higher)
        total = total * kept + tl.load(stats + part * 2 + 1) * adds
        acc = acc * kept + tl.load(partial + part * D + d, mask=d < D, other=0.0) * adds
        most = higher
    to = out + b.to(tl.int64) * out_b + head * out_h + d
    tl.store(to, (acc / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _kv_write_kernel(
    key, value, slots_T, pool, key_h, key_t, value_h, value_t, pool_n, ROW: tl.constexpr, D: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = i // (2 * D)
    d = i % (2 * D)
    k = tl.load(key + head * key_h + t * key_t + d, mask=(i < ROW) & (d < DK), other=0.0)
    v = tl.load(value + head * value_h + t * value_t + d - D, mask=(i < ROW) & (d >= D) & (d < D + DV), other=0.0)
    tl.store(pool + tl.load(slots_T + t) * pool_n + i, tl.where(d < D, k, v), mask=i < ROW)
