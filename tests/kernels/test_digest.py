"""A slot's fingerprint: the twin's, whatever the launch; another one for other bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.kernels import reference_digest
from ray_moe.kernels.digest import Span, fingerprint_spans, span_table
from tests.layers import untimed

PHI, FIRST, SECOND, ODD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93
WHOLE = (1 << 64) - 1


def _found(slots: list[list[Tensor]]) -> list[tuple[int, int]]:
    """By the kernel, all slots in one table."""
    device = slots[0][0].device
    spans = [
        Span(tensor.data_ptr(), tensor.nbytes, place, slot)
        for slot, tensors in enumerate(slots)
        for place, tensor in enumerate(tensors)
    ]
    table, launches = span_table(spans)
    sums_M2 = torch.zeros(len(slots), 2, dtype=torch.int64, device=device)
    fingerprint_spans(table.to(device), launches, sums_M2)
    return [(first, second) for first, second in sums_M2.tolist()]


def _random(nbytes: int, device: torch.device) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


def _in_plain_integers(words: list[int], key: int) -> tuple[int, int]:
    sums = [0, 0]
    for index, word in enumerate(words):
        z = (word + (key + index + 1) * PHI) & WHOLE
        z = ((z ^ z >> 30) * FIRST) & WHOLE
        z = ((z ^ z >> 27) * SECOND) & WHOLE
        z ^= z >> 31
        y = (z * ODD) & WHOLE
        sums = [sums[0] + z, sums[1] + (y ^ y >> 32)]
    first, second = ((total & WHOLE) - ((total & 1 << 63) << 1) for total in sums)
    return first, second


def test_worked_examples(device: torch.device) -> None:
    table, launches = span_table([Span(4096, 24, 1, 0)])
    assert (table.tolist(), launches) == ([[4096, 3, 1 << 40, 0]], [(8, 1, 3)])
    words = torch.tensor([1, 2], device=device)
    assert _found([[words]]) == [(5823844796812131075, -1345504342728340673)]
    assert _in_plain_integers([1, 2], 0) == (5823844796812131075, -1345504342728340673)


@given(data=st.binary(min_size=1, max_size=200), key=st.integers(0, 3))
@untimed
def test_the_twin_is_the_definition(data: bytes, key: int) -> None:
    width = next(width for width in (8, 4, 2, 1) if len(data) % width == 0)
    words = [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]
    before = [torch.zeros(0, dtype=torch.uint8)] * key
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert reference_digest.fingerprint([*before, tensor]) == _in_plain_integers(words, key << 40)


# Around a program's 16 KiB, and words of every width.
@pytest.mark.parametrize("nbytes", [1, 6, 12, 4096, 16384 - 8, 16384, 16384 + 8, 3 * 16384 + 4, 16386, 8193])
def test_the_kernel_finds_what_its_twin_does(device: torch.device, nbytes: int) -> None:
    slots = [[_random(nbytes, device), _random(2 * nbytes, device)] for _ in range(2)]
    assert _found(slots) == [reference_digest.fingerprint(tensors) for tensors in slots]


def test_slots_of_odd_sizes_share_one_table(device: torch.device) -> None:
    """bf16 tensors whose bytes are no multiple of 8, the second slot of each slab, biases of 6 bytes."""
    slab = torch.randn(3, 10, 7, device=device).bfloat16()
    bias = torch.randn(3, 3, device=device).bfloat16()
    slots = [[slab[slot], bias[slot]] for slot in range(3)]
    assert _found(slots) == [reference_digest.fingerprint(tensors) for tensors in slots]
    with pytest.raises(ValueError, match="24 bytes must begin at a multiple of 8, found 4"):
        span_table([Span(4, 24, 0, 0)])


def test_bits_order_and_place_of_tensors_all_count(device: torch.device) -> None:
    data, other = _random(4096, device), _random(4096, device)
    known = [_found([[data, other]])[0]]
    for byte in (0, 7, 2000, 4095):
        for bit in (0, 7):
            changed = data.clone()
            changed[byte] ^= 1 << bit
            known += _found([[changed, other], [data, other[:4088]]])
    swapped = data.clone()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    known += _found([[swapped, other], [other, data], [data.roll(8), other], [data, data], [other, other]])
    known += _found([[torch.zeros_like(data), other], [other, torch.zeros_like(data)]])
    assert len(set(known)) == len(known) - 7, "but the seven repetitions of the shortened one"


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [2, 12, 65544, 9437184, 352321536])
def test_the_kernel_finds_what_its_twin_does_on_a_gpu(nbytes: int) -> None:
    slots = [[_random(nbytes, torch.device("cuda")), _random(6, torch.device("cuda"))] for _ in range(2)]
    assert _found(slots) == [reference_digest.fingerprint(tensors) for tensors in slots]
