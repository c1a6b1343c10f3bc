"""Rows move by index and in and out of padded buffers, bit for bit, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from ray_moe.errors import ConfigError
from ray_moe.kernels import reference, reference_padded
from ray_moe.kernels.permute import pad, permute, unpad, unpermute

POISON = -77.0


def test_worked_examples(device: torch.device) -> None:
    rows_RD = torch.tensor([[5.0], [6.0], [7.0]], device=device).repeat(1, 8)
    index_R = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    permuted_RD = permute(rows_RD, index_R, torch.empty_like(rows_RD))
    assert permuted_RD[:, 0].tolist() == [7, 5, 6]
    assert unpermute(permuted_RD, index_R, torch.empty_like(rows_RD)).equal(rows_RD)

    offsets_S1 = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device=device)
    padded_SCD = pad(rows_RD, offsets_S1, rows_RD.new_full((3, 2, 8), POISON))
    assert padded_SCD[..., 0].tolist() == [[5, POISON], [POISON, POISON], [6, 7]]
    assert unpad(padded_SCD, offsets_S1, torch.empty_like(rows_RD)).equal(rows_RD)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 24), (70, 136), (9, 1032), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
def test_any_width_in_vectors_moves_as_in_torch(
    device: torch.device, rows: int, width: int, dtype: torch.dtype
) -> None:
    rows_ND = torch.randint(0, 200, (rows + 3, width), device=device).to(dtype)
    index_R = torch.randperm(rows + 3, device=device)[:rows].to(torch.int32)
    out_RD = permute(rows_ND, index_R, torch.zeros(rows, width, dtype=dtype, device=device))
    assert out_RD.equal(reference.permute(rows_ND, index_R))
    back_ND = unpermute(out_RD, index_R, torch.zeros_like(rows_ND))
    expected_ND = torch.zeros_like(rows_ND)
    expected_ND[index_R.long()] = rows_ND[index_R.long()]
    assert back_ND.equal(expected_ND)


@pytest.mark.parametrize("count", [0, 1, 6, 9])
def test_rows_past_the_device_count_are_neither_read_nor_written(device: torch.device, count: int) -> None:
    rows_ND = torch.randn(9, 16, device=device)
    index_R = torch.randperm(9, device=device).to(torch.int32)
    count_1 = torch.tensor([count], dtype=torch.int32, device=device)
    out_RD = permute(rows_ND, index_R, torch.full_like(rows_ND, POISON), count_1)
    assert out_RD[:count].equal(rows_ND[index_R[:count].long()]) and bool((out_RD[count:] == POISON).all())
    back_ND = unpermute(out_RD, index_R, torch.full_like(rows_ND, POISON), count_1)
    kept_N = torch.ones(9, dtype=torch.bool, device=device)
    kept_N[index_R[:count].long()] = False
    assert back_ND[~kept_N].equal(rows_ND[~kept_N]) and bool((back_ND[kept_N] == POISON).all())


@pytest.mark.parametrize("counts_S", [[3, 0, 5, 1], [0, 0], [4], [2, 2, 2, 2, 2, 2, 2]])
def test_padding_is_neither_written_nor_read(device: torch.device, counts_S: list[int]) -> None:
    offsets_S1 = reference.exclusive_sum(torch.tensor(counts_S, dtype=torch.int32)).to(device)
    rows_RD = torch.rand(sum(counts_S), 40, device=device) + 1
    padded_SCD = pad(rows_RD, offsets_S1, rows_RD.new_full((len(counts_S), 6, 40), POISON))
    # No row has a zero: the twin's zeros are the padding.
    twin_SCD = reference_padded.pad(rows_RD, offsets_S1, 6)
    assert padded_SCD.equal(torch.where(twin_SCD == 0, POISON, twin_SCD))
    padded_SCD[twin_SCD == 0] = float("nan")
    out_RD = unpad(padded_SCD, offsets_S1, torch.full_like(rows_RD, POISON))
    assert out_RD.equal(rows_RD) and out_RD.equal(reference_padded.unpad(padded_SCD, offsets_S1))


def test_a_width_that_is_no_multiple_of_eight_is_refused(device: torch.device) -> None:
    rows_RD, index_R = torch.zeros(2, 12, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ConfigError, match="vectors of 8 elements, found rows of 12"):
        permute(rows_RD, index_R, rows_RD)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (4097, 4096), (513, 2888), (300_000, 8)])
def test_bf16_rows_keep_their_bits_on_a_gpu(rows: int, width: int) -> None:
    rows_ND = torch.randn(rows, width, device="cuda").bfloat16()
    index_R = torch.randperm(rows, device="cuda").to(torch.int32)
    out_RD = permute(rows_ND, index_R, torch.full_like(rows_ND, float("nan")))
    assert out_RD.equal(rows_ND[index_R.long()])
    assert unpermute(out_RD, index_R, torch.full_like(rows_ND, float("nan"))).equal(rows_ND)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_are_reached_on_a_gpu() -> None:
    rows_ND = torch.zeros(2**31 // 4096 + 2, 4096, dtype=torch.bfloat16, device="cuda")
    rows_ND[-1] = 3
    index_R = torch.tensor([len(rows_ND) - 1], dtype=torch.int32, device="cuda")
    out_RD = permute(rows_ND, index_R, torch.empty(1, 4096, dtype=torch.bfloat16, device="cuda"))
    assert bool((out_RD == 3).all())
    index_R.fill_(len(rows_ND) - 2)
    assert bool((unpermute(out_RD, index_R, rows_ND)[-2] == 3).all())
