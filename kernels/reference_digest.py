"""Torch twin of the fingerprint: the oracle of its tests, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


_PHI, _FIRST, _SECOND, _ODD = map(
    _signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)


def fingerprint(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Of contiguous tensors, a slot's in their order: what `digest.fingerprint_spans` finds for their bytes."""
    sums = torch.zeros(2, dtype=torch.int64)
    for index, tensor in enumerate(tensors):
        if tensor.nbytes:
            sums += _of_span(tensor.contiguous().view(-1).view(torch.uint8), index << 40).cpu()
    return int(sums[0]), int(sums[1])


def _of_span(data: Tensor, key: int) -> Tensor:
    width = math.gcd(data.numel(), 8)
    words = data.view(_INTEGERS[width]) if data.storage_offset() % width == 0 else data.clone().view(_INTEGERS[width])
    word = words.to(torch.int64)
    if 1 < width < 8:
        word &= (1 << 8 * width) - 1
    place = torch.arange(key + 1, key + 1 + word.numel(), device=data.device)
    z = word + place * _PHI
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    z = z ^ _shifted(z, 31)
    y = z * _ODD
    y = y ^ _shifted(y, 32)
    return torch.stack((z.sum(), y.sum()))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings zeros in: torch has no arithmetic on unsigned 64-bit integers."""
    return (words >> bits) & ((1 << 64 - bits) - 1)
