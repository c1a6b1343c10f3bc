"""The trunk's small operations, one launch each: root-mean-square norm, rotary embedding, top-k of a router's softmax.

A decode step is thousands of launches on a few rows when each of these is five to ten of them. They round to the rows'
dtype where transformers' own code rounds. In half precision a rotary embedding equals its result bit for bit. A norm's
sum and a softmax's have another order, its exp and divisions are the GPU's approximate ones, and all that is in fp32:
now and then the rounding that follows goes to the neighbouring number. Letters: R rows, D width, T tokens, H heads,
E experts, K top-k.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program that takes several narrow rows.
_ELEMENTS = 2048
# Heads of a program that turns them.
_HEADS = 16


def rms_norm(rows_RD: Tensor, weight_D: Tensor, eps: float, *, rounded: bool = True) -> Tensor:
    """`weight * (x * rsqrt(mean(x^2) + eps))` in fp32; any leading dimensions, the result contiguous.

    Rows may be columns of a wider matrix, cut into heads: no copy is made of rows of which those next to one another
    follow at D, in groups at one distance.

    `rounded`: the product is rounded to the rows' dtype before it is weighted, as most families have it. A result in
    half precision is within one unit in the last place of torch's; within two where `rounded`: a neighbour of the
    product, times a weight, may be two units away.

    Example (eps 0): rows [[3, 4]], weight [1, 2] -> x / sqrt(12.5) = [0.8485, 1.1314] -> [0.8485, 2.2627].
    """
    width = rows_RD.shape[-1]
    count = rows_RD.numel() // width if width else 0
    group, stride = _grouped_rows(rows_RD)
    if not group:
        rows_RD, group, stride = rows_RD.contiguous(), max(1, count), 0
    out_RD = torch.empty_like(rows_RD, memory_format=torch.contiguous_format)
    if count:
        wide = triton.next_power_of_2(width)
        block = max(1, _ELEMENTS // wide)
        _norm_kernel[(triton.cdiv(count, block),)](
            rows_RD, weight_D, out_RD, count, group, stride, eps, D=width, BD=wide, BR=block, ROUNDED=rounded,
            num_warps=8 if wide >= 4096 else 4,
        )  # fmt: skip
    return out_RD


def _grouped_rows(rows: Tensor) -> tuple[int, int]:
    """How many rows follow one another at the width, and two such groups' distance; 0 where rows lie otherwise."""
    if rows.ndim < 2 or rows.stride(-1) != 1 or rows.numel() == 0:
        return 0, 0
    sizes, strides = list(rows.shape[:-1]), list(rows.stride()[:-1])
    group, expected = 1, rows.shape[-1]
    while sizes and (sizes[-1] == 1 or strides[-1] == expected):
        group *= sizes.pop()
        strides.pop()
        expected = group * rows.shape[-1]
    outer = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    if not outer:
        return group, 0
    for (_, stride), (size, inner) in pairwise(outer):
        if stride != size * inner:
            return 0, 0
    return group, outer[-1][1]


def rotate(query_HTD: Tensor, key_HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries [H, T, D] and keys, halves rotated: `x * cos + (-x2, x1) * sin`.

    Both products are rounded to the rows' dtype, then their sum: the result is that of torch's operations, bit for bit.
    Results are [H, T, D] views of [T, H, D]. The last dimensions must be contiguous. Example: x [1, 2], cos [0, 0],
    sin [1, 1] -> [-2, 1].
    """
    heads, tokens, dim = query_HTD.shape
    key_heads = key_HTD.shape[0]
    out_THD = query_HTD.new_empty(tokens, heads + key_heads, dim)
    if tokens:
        block = min(_HEADS, triton.next_power_of_2(heads + key_heads))
        _rotary_kernel[(tokens, triton.cdiv(heads + key_heads, block))](
            query_HTD, key_HTD, cos_TD, sin_TD, out_THD, query_HTD.stride(0), query_HTD.stride(1), key_HTD.stride(0),
            key_HTD.stride(1), cos_TD.stride(0), sin_TD.stride(0),
            H=heads, KH=key_heads, D=dim, BH=block, HALF=dim // 2,
            BD=triton.next_power_of_2(dim // 2), num_warps=4,
            # A rounded product and the sum after it are narrowed to the rows' dtype, and then contracted to one
            # multiply-add that leaves a product unrounded.
            enable_fp_fusion=False,
        )  # fmt: skip
    both_HTD = out_THD.transpose(0, 1)
    return both_HTD[:heads], both_HTD[heads:]


def softmax_top_k(
    logits_TE: Tensor, top_k: int, *, renormalise: bool, gate_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The `top_k` largest of each row's softmax in fp32, by falling value: gates in `gate_dtype`, ids int64.

    Of equal values the lower expert comes first. `renormalise`: each row's gates are divided by their sum, before they
    are rounded. In fp32 they are within 2^-19 of torch's, relatively. Example: logits [0, ln 3, 0] and top-2 -> ids
    [1, 0], gates [0.6, 0.2], renormalised [0.75, 0.25].
    """
    tokens, experts = logits_TE.shape
    gates_TK = logits_TE.new_empty(tokens, top_k, dtype=gate_dtype)
    ids_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    if tokens:
        _top_k_kernel[(tokens,)](
            logits_TE, gates_TK, ids_TK, logits_TE.stride(0), E=experts, BE=triton.next_power_of_2(experts), K=top_k,
            BK=triton.next_power_of_2(top_k), RENORMALISE=renormalise, num_warps=1 if experts <= 256 else 4,
        )  # fmt: skip
    return gates_TK, ids_TK


@triton.jit(do_not_specialize=["R", "group"])
def _norm_kernel(
    rows_RD, weight_D, out_RD, R, group, stride, eps, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    mask = (r[:, None] < R) & (d[None, :] < D)
    at = r[:, None] * D + d[None, :]
    from_at = (r // group)[:, None] * stride + (r % group)[:, None] * D + d[None, :]
    x = tl.load(rows_RD + from_at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    normed = x * scale[:, None]
    if ROUNDED:
        normed = normed.to(rows_RD.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_RD + at, (weight[None, :] * normed).to(out_RD.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_kernel(
    query, key, cos_TD, sin_TD, out_THD, query_h, query_t, key_h, key_t, cos_t, sin_t,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One program per token and some of its heads: queries, then keys."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    half = d < HALF
    q_mask = (h[:, None] < H) & half[None, :]
    k_mask = (h[:, None] >= H) & (h[:, None] < H + KH) & half[None, :]
    q_at = query + t * query_t + h[:, None] * query_h + d[None, :]
    k_at = key + t * key_t + (h[:, None] - H) * key_h + d[None, :]
    dtype = out_THD.dtype.element_ty
    low = tl.load(q_at, mask=q_mask, other=0.0) + tl.load(k_at, mask=k_mask, other=0.0)
    high = tl.load(q_at + HALF, mask=q_mask, other=0.0) + tl.load(k_at + HALF, mask=k_mask, other=0.0)
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    cos_low = tl.load(cos_TD + t * cos_t + d, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_TD + t * sin_t + d, mask=half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_TD + t * cos_t + HALF + d, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_TD + t * sin_t + HALF + d, mask=half, other=0.0).to(tl.float32)[None, :]
    out_low = (low * cos_low).to(dtype).to(tl.float32) + (-high * sin_low).to(dtype).to(tl.float32)
    out_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    to = out_THD + (t * (H + KH) + h[:, None]) * D + d[None, :]
    mask = (h[:, None] < H + KH) & half[None, :]
    tl.store(to, out_low.to(dtype), mask=mask)
    tl.store(to + HALF, out_high.to(dtype), mask=mask)


@triton.jit
def _top_k_kernel(
    logits_TE, gates_TK, ids_TK, logits_t, E: tl.constexpr, BE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    RENORMALISE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    k = tl.arange(0, BK)
    logits = tl.load(logits_TE + t * logits_t + e, mask=e < E, other=float("-inf")).to(tl.float32)
    weight = tl.exp(logits - tl.max(logits, 0))
    left = tl.where(e < E, weight / tl.sum(weight, 0), -1.0)
    gates = tl.zeros((BK,), tl.float32)
    ids = tl.zeros((BK,), tl.int32)
    for i in tl.static_range(K):
        best = tl.max(left, 0)
        # Not argmax, which may give any of equal ones. Of NaN none is equal, and the last expert stands for it.
        first = tl.minimum(tl.min(tl.where(left == best, e, BE), 0), E - 1)
        gates = tl.where(k == i, best, gates)
        ids = tl.where(k == i, first, ids)
        left = tl.where(e == first, -1.0, left)
    if RENORMALISE:
        gates = gates / tl.sum(gates, 0)
    tl.store(gates_TK + t * K + k, gates.to(gates_TK.dtype.element_ty), mask=k < K)
    tl.store(ids_TK + t * K + k, ids.to(tl.int64), mask=k < K)
