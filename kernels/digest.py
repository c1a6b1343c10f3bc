"""A 128-bit fingerprint of bytes on a device: what arrived is compared with what was sent, without the host.

It is a sum over words, so that programs may add their shares in any order, and the result is the same for every launch:

    x = word + (key + i + 1) * PHI,   z = splitmix64's finalizer of x,   y = shifted(z * ODD)
    fingerprint = (sum of z, sum of y), both modulo 2^64

over word i = 0, 1, ... of a span; `key` keeps a slot's tensors apart. Words are little-endian, zero-extended, and as
wide as the greatest of 8, 4, 2 and 1 bytes that divides the span's length.

It protects against what goes wrong by accident: a copy that is torn or not complete, a source that was released and
filled again meanwhile, a wrong address, flipped bits. z depends on its word one to one, so spans that differ in one
word always have two fingerprints; others share one by chance, once in 2^128. It does not protect against somebody who
chooses bytes: peers trust each other, and a checkpoint is known by its SHA-256.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# Of a program: 16 KiB of 8-byte words. Programs are short and take few registers, so that kernels with a higher
# priority get multiprocessors soon.
_WORDS, _ROUNDS = 512, 4
_TENSOR_KEY = 1 << 40  # more words than a span has


class Span(NamedTuple):
    """Bytes at an address of the device; `tensor` is the span's place in its slot, and `result` the slot's."""

    address: int
    nbytes: int
    tensor: int
    result: int


def span_table(spans: Sequence[Span]) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """What `fingerprint_spans` takes, on the CPU: int64 [N, 4] and the launches (word bytes, spans, most words).

    Spans of equally wide words follow each other. Raises `ValueError` for an address that is no multiple of its words'
    width. Example: a span of 24 bytes at 4096, tensor 1 of result 0 -> [[4096, 3, 2^40, 0]], [(8, 1, 3)].
    """
    by_width: dict[int, list[tuple[int, int, int, int]]] = {}
    for address, nbytes, tensor, result in spans:
        width = math.gcd(nbytes, 8)
        if address % width:
            raise ValueError(f"a span of {nbytes} bytes must begin at a multiple of {width}, found {address}")
        by_width.setdefault(width, []).append((address, nbytes // width, tensor * _TENSOR_KEY, result))
    rows = [row for several in by_width.values() for row in several]
    launches = [(width, len(several), max(row[1] for row in several)) for width, several in by_width.items()]
    # By way of numpy, which reads nested tuples several times faster.
    return torch.from_numpy(np.array(rows, np.int64).reshape(len(rows), 4)), launches


def fingerprint_spans(table_N4: Tensor, launches: Sequence[tuple[int, int, int]], sums_M2: Tensor) -> None:
    """Adds every span's fingerprint to the row of `sums_M2` [M, 2] int64 that it names; M results, zeros before.

    `table_N4` lies on the device. The bytes must not be written meanwhile.
    Example: one span of the two words 1 and 2 with key 0 -> [[5823844796812131075, -1345504342728340673]].
    """
    first = 0
    for width, spans, most_words in launches:
        grid = (max(1, triton.cdiv(most_words, _WORDS * _ROUNDS)), spans)
        _fingerprint_kernel[grid](
            table_N4[first : first + spans], sums_M2, BYTES=width, WORDS=_WORDS, ROUNDS=_ROUNDS, num_warps=4
        )
        first += spans


@triton.jit
def _fingerprint_kernel(table, sums, BYTES: tl.constexpr, WORDS: tl.constexpr, ROUNDS: tl.constexpr):
    row = table + tl.program_id(1) * 4
    words = tl.load(row + 1)
    first = tl.program_id(0).to(tl.int64) * (WORDS * ROUNDS)
    if first < words:
        address, key, result = tl.load(row), tl.load(row + 2), tl.load(row + 3)
        if BYTES == 8:
            span = address.to(tl.pointer_type(tl.uint64))
        elif BYTES == 4:
            span = address.to(tl.pointer_type(tl.uint32))
        elif BYTES == 2:
            span = address.to(tl.pointer_type(tl.uint16))
        else:
            span = address.to(tl.pointer_type(tl.uint8))
        z_sum = tl.zeros((WORDS,), tl.uint64)
        y_sum = tl.zeros((WORDS,), tl.uint64)
        for turn in range(ROUNDS):
            place = first + turn * WORDS + tl.arange(0, WORDS)
            mask = place < words
            word = tl.load(span + place, mask=mask, other=0).to(tl.uint64)
            z = word + (key + place + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB
            z = z ^ (z >> 31)
            y = z * 0xD6E8FEB86659FD93
            y = y ^ (y >> 32)
            z_sum += tl.where(mask, z, 0)
            y_sum += tl.where(mask, y, 0)
        tl.atomic_add(sums + result * 2, tl.sum(z_sum.to(tl.int64, bitcast=True), axis=0), sem="relaxed")
        tl.atomic_add(sums + result * 2 + 1, tl.sum(y_sum.to(tl.int64, bitcast=True), axis=0), sem="relaxed")
