"""Block-sparse products over the topology's own indices, against products of each slot's exact rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from ray_moe.dataplane.block_sparse import BlockTopology
from ray_moe.errors import ConfigError
from ray_moe.kernels import reference_sparse
from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.block_sparse import BlockIndices, dsd, sdd_swiglu

GPT_OSS = SwiGLU(limit=7.0, alpha=1.702, up_shift=1.0)


def _indices(topology: BlockTopology) -> BlockIndices:
    vectors = (topology.row_indices, topology.column_indices, topology.row_offsets, topology.transpose_indices)
    return BlockIndices(*(torch.tensor(vector, dtype=torch.int32, device=topology.device) for vector in vectors))


class Case:
    def __init__(
        self,
        counts_S: list[int],
        hidden: int,
        ffn: int,
        blocks: tuple[int, int],
        device: torch.device,
        *,
        dtype: torch.dtype,
        bias: bool,
    ) -> None:
        pool = len(counts_S) + 2
        self.blocks = blocks
        self.topology = BlockTopology(0, tuple(counts_S), ffn, *blocks, device)
        self.pool_slots = torch.randperm(pool)[: len(counts_S)].tolist()
        self.slots_S = torch.tensor(self.pool_slots, dtype=torch.int32, device=device)
        self.rows_RD = torch.randn(sum(counts_S), hidden, device=device).to(dtype)
        self.gate_up = (torch.randn(pool, 2 * ffn, hidden, device=device) * hidden**-0.5).to(dtype)
        self.down = (torch.randn(pool, hidden, ffn, device=device) * ffn**-0.5).to(dtype)
        self.gate_up_bias = torch.randn(pool, 2 * ffn, device=device).to(dtype) if bias else None
        self.down_bias = torch.randn(pool, hidden, device=device).to(dtype) if bias else None

    def run(self, activation: SwiGLU) -> tuple[Tensor, Tensor]:
        """(non-zero blocks [Z, P, C], exact rows [R, D]) into poisoned buffers."""
        indices = _indices(self.topology)
        blocked_RD = self.topology.gather(self.rows_RD)
        blocks_ZPC = blocked_RD.new_full((len(self.topology.row_indices), *self.blocks), float("nan"))
        sdd_swiglu(blocked_RD, indices, self.slots_S, self.gate_up, self.gate_up_bias, activation, blocks_ZPC)
        out_RD = torch.full_like(blocked_RD, float("nan"))
        dsd(blocks_ZPC, indices, self.slots_S, self.down, self.down_bias, out_RD)
        return blocks_ZPC, self.topology.scatter(out_RD)

    def expected(self, activation: SwiGLU) -> Tensor:
        """The same experts over each slot's exact rows, in FP32."""
        offsets = [0, *torch.tensor(self.topology.counts_S).cumsum(0).tolist()]
        outputs = []
        for slot, (start, end) in zip(self.pool_slots, pairwise(offsets), strict=True):
            biases = [None if bias is None else bias[slot].float() for bias in (self.gate_up_bias, self.down_bias)]
            gate, up = functional.linear(self.rows_RD[start:end].float(), self.gate_up[slot].float(), biases[0]).chunk(
                2, dim=1
            )
            outputs.append(functional.linear(activation(gate, up), self.down[slot].float(), biases[1]))
        return torch.cat(outputs)


def test_worked_examples(device: torch.device) -> None:
    topology = BlockTopology(0, (16,), 16, 16, 16, device)
    slots_S = torch.zeros(1, dtype=torch.int32, device=device)
    quarters = torch.full((16, 16), 0.25, device=device)
    blocks_ZPC = torch.empty(1, 16, 16, device=device)
    sdd_swiglu(quarters, _indices(topology), slots_S, quarters.repeat(1, 2, 1), None, SwiGLU(), blocks_ZPC)
    sigmoid = torch.sigmoid(torch.tensor(1.0)).item()
    assert blocks_ZPC.flatten().tolist() == pytest.approx([sigmoid] * 256, rel=1e-6)
    out_RD = torch.empty(16, 16, device=device)
    dsd(blocks_ZPC, _indices(topology), slots_S, torch.full((1, 16, 16), 1 / 16, device=device), None, out_RD)
    assert out_RD.flatten().tolist() == pytest.approx([sigmoid] * 256, rel=1e-6)


@pytest.mark.parametrize(
    ("counts_S", "hidden", "ffn", "blocks", "bias", "activation"),
    [
        ([3, 0, 17], 40, 32, (16, 16), False, SwiGLU()),
        ([33, 5, 0, 64], 72, 96, (32, 32), True, GPT_OSS),
        ([0, 0, 1], 16, 128, (64, 128), True, SwiGLU()),
    ],
)
def test_products_are_those_of_the_twins_and_of_the_exact_rows(
    device: torch.device,
    counts_S: list[int],
    hidden: int,
    ffn: int,
    blocks: tuple[int, int],
    bias: bool,
    activation: SwiGLU,
) -> None:
    case = Case(counts_S, hidden, ffn, blocks, device, dtype=torch.float32, bias=bias)
    blocks_ZPC, out_RD = case.run(activation)
    topology = case.topology
    twin_ZPC = reference_sparse.sdd_swiglu(
        topology.gather(case.rows_RD), topology.row_indices, topology.column_indices, case.pool_slots, case.gate_up,
        case.gate_up_bias, activation, *blocks,
    )  # fmt: skip
    # FP32 sums of the same products in another order.
    torch.testing.assert_close(blocks_ZPC, twin_ZPC, rtol=1e-4, atol=1e-5)
    twin_RD = reference_sparse.dsd(
        twin_ZPC, topology.row_offsets, topology.column_indices, case.pool_slots, case.down, case.down_bias
    )
    torch.testing.assert_close(out_RD, topology.scatter(twin_RD), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out_RD, case.expected(activation), rtol=1e-4, atol=1e-5)


def test_no_rows_are_no_blocks(device: torch.device) -> None:
    case = Case([0, 0], 32, 32, (16, 16), device, dtype=torch.float32, bias=False)
    blocks_ZPC, out_RD = case.run(SwiGLU())
    assert blocks_ZPC.shape == (0, 16, 16) and out_RD.shape == (0, 32)


@pytest.mark.parametrize("blocks", [(8, 16), (16, 8), (48, 16)])
def test_blocks_that_tensor_cores_cannot_multiply_are_refused(device: torch.device, blocks: tuple[int, int]) -> None:
    case = Case([3], 32, 48, blocks, device, dtype=torch.float32, bias=False)
    with pytest.raises(ConfigError, match=f"powers of two from 16 on, found {8 if 8 in blocks else 48}"):
        case.run(SwiGLU())


# Relative RMS error against FP32 of two chained bf16 products with a bf16 activation between them.
BF16_ERROR = 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts_S", "hidden", "ffn", "blocks", "bias", "activation"),
    [
        ([300, 0, 1, 128, 129, 64], 2048, 768, (128, 128), False, SwiGLU()),
        ([1000, 24], 4096, 1792, (128, 128), False, SwiGLU()),
        ([65, 400, 7], 2880, 2880, (128, 64), True, GPT_OSS),
        ([5] * 60, 2048, 1408, (16, 128), False, SwiGLU()),
        ([90, 3], 1000, 96, (64, 32), True, SwiGLU()),
    ],
)
def test_bf16_products_on_a_gpu(
    counts_S: list[int], hidden: int, ffn: int, blocks: tuple[int, int], bias: bool, activation: SwiGLU
) -> None:
    case = Case(counts_S, hidden, ffn, blocks, torch.device("cuda"), dtype=torch.bfloat16, bias=bias)
    _, out_RD = case.run(activation)
    expected_RD = case.expected(activation)
    assert float((out_RD.float() - expected_RD).norm() / expected_RD.norm()) < BF16_ERROR
