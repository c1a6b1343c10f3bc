"""Runners whose products are kernels: the modes, options, refusals and accounting of `runners`, another arithmetic.

`runners.runner_named` chooses and imports them, where triton is; nothing else does. Products accumulate in FP32 and add
biases before they round. Host integers of a call go to the device in one copy, and nothing waits for the device.
Letters: R rows, S this peer's slots, M row tiles, C capacity, D hidden, F FFN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_moe.dataplane.block_sparse import BlockTopology
from ray_moe.dataplane.layer_weights import LayerWeights
from ray_moe.dataplane.rows import MaskedRows, SegmentedRows
from ray_moe.dataplane.runners import BlockSparse, CapacityPadded, Grouped, MaskedDecode, Runner, row_counts
from ray_moe.dataplane.uploads import Ints, upload
from ray_moe.errors import RunnerError
from ray_moe.kernels import grouped_gemm, warp_gemm
from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.block_sparse import BlockIndices, dsd, sdd_swiglu
from ray_moe.kernels.grouped_gemm import Tile
from ray_moe.kernels.launch import is_hopper
from ray_moe.kernels.permute import pad, permute, unpad, unpermute
from ray_moe.kernels.routing import RowTiles
from ray_moe.kernels.tiling import GroupedTiles, LayerShape, choose
from ray_moe.kernels.warp_gemm import WarpTile

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows move in vectors of so many elements, and the copy engine takes strides in multiples of 16 bytes.
_WIDTH_MULTIPLE, _STRIDE_BYTES = 8, 16
# Edges of a sparse block: powers of two that tensor cores multiply and whose sums fit the registers of eight warps.
_EDGES = (16, 32, 64, 128)


def refusal(runner: Runner, weights: LayerWeights) -> str | None:
    """Why the kernels' twin of `runner` should not compute with `weights` on their device; None where it should."""
    unfit = _misfit(weights)
    if unfit is None and isinstance(runner, BlockSparse):
        unfit = _block_misfit(runner, weights)
    if unfit is None and weights.down.dtype is torch.float32:
        return "tensor cores would round FP32 products to TF32"
    return unfit


class GpuGrouped(Grouped):
    """Two launches over the row tiles of all segments."""

    def __init__(self) -> None:
        self._products = _Products()

    def _experts(self, segments: SegmentedRows, weights: LayerWeights) -> Tensor:
        counts_S = row_counts(segments)
        tiles = self._products.tiles_for(counts_S, weights)
        maps = upload(_cut(segments.offsets_S1[:-1], counts_S, tiles.rows), weights.down.device)
        return self._products.run(segments.rows_RD.contiguous(), maps, tiles, weights)


class GpuCapacityPadded(CapacityPadded):
    """Padded to the capacity as the torch runner does; tiles of padding alone are not computed."""

    def __init__(self, capacity: int | None = None, alignment: int = 1) -> None:
        super().__init__(capacity, alignment)
        self._products = _Products()

    def _experts(self, segments: SegmentedRows, stride: int, weights: LayerWeights) -> Tensor:
        rows_RD, counts_S = segments.rows_RD.contiguous(), row_counts(segments)
        tiles = self._products.tiles_for(counts_S, weights)
        starts_S = range(0, len(counts_S) * stride, stride)
        offsets_S1, *maps = upload(
            [np.asarray(segments.offsets_S1, np.int32), *_cut(starts_S, counts_S, tiles.rows)], rows_RD.device
        )
        padded_SCD = pad(rows_RD, offsets_S1, rows_RD.new_empty(len(counts_S), stride, rows_RD.shape[1]))
        out_SCD = self._products.run(padded_SCD.flatten(0, 1), maps, tiles, weights).view(padded_SCD.shape)
        return unpad(out_SCD, offsets_S1, torch.empty_like(rows_RD))


class GpuBlockSparse(BlockSparse):
    """A sampled product per non-zero block, then a product per row block over its non-zero blocks."""

    def _experts(self, topology: BlockTopology, rows_RD: Tensor, weights: LayerWeights) -> Tensor:
        _require(_misfit(weights) or _block_misfit(self, weights))
        form = _form(weights, rows_RD)
        row_Z, column_Z, offsets_B1, transpose_Z, positions_R = topology.device_indices
        indices, slots_S = BlockIndices(row_Z, column_Z, offsets_B1, transpose_Z), weights.slots_S
        blocked_RD = rows_RD = rows_RD.contiguous()
        if topology.fringe_rows:
            # The fringe holds whatever was there: a block's rows do not mix.
            blocked_RD = rows_RD.new_empty(topology.padded_offsets_S1[-1], rows_RD.shape[1])
            unpermute(rows_RD, positions_R, blocked_RD)
        blocks_ZPC = rows_RD.new_empty(row_Z.numel(), topology.block_rows, topology.block_columns)
        sdd_swiglu(blocked_RD, indices, slots_S, weights.gate_up, weights.gate_up_bias, form, blocks_ZPC)
        out_RD = torch.empty_like(blocked_RD)
        dsd(blocks_ZPC, indices, slots_S, weights.down, weights.down_bias, out_RD)
        return permute(out_RD, positions_R, torch.empty_like(rows_RD)) if topology.fringe_rows else out_RD


class GpuMaskedDecode(MaskedDecode):
    """The products of valid rows where they lie in the buffer; what no route owns is neither used nor written."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._products = _Products()

    def _experts(self, masked: MaskedRows, weights: LayerWeights) -> Tensor:
        slots, capacity, _ = masked.rows_SCD.shape
        if not any(masked.counts_S):
            return torch.empty_like(masked.rows_SCD)
        tiles = self._products.tiles_for(masked.counts_S, weights)
        maps = upload(_cut(range(0, slots * capacity, capacity), masked.counts_S, tiles.rows), masked.rows_SCD.device)
        rows_RD = masked.rows_SCD.contiguous().flatten(0, 1)
        return self._products.run(rows_RD, maps, tiles, weights).view(masked.rows_SCD.shape)


GPU_RUNNERS: dict[str, type[Runner]] = {
    runner.name: runner for runner in (GpuGrouped, GpuCapacityPadded, GpuBlockSparse, GpuMaskedDecode)
}


class _Products:
    """Both products over row tiles. A layer's descriptors are kept for as long as the weights stay the same."""

    def __init__(self) -> None:
        self._weights: LayerWeights | None = None
        self._slabs: dict[GroupedTiles, tuple[Any, Any]] = {}

    def tiles_for(self, counts_S: Sequence[int], weights: LayerWeights) -> GroupedTiles:
        """The tiles for the mean of the slots that have rows: one busy slot of many is a large product.

        First of a call: raises `RunnerError` for weights that the kernels cannot address.
        """
        if weights is not self._weights:
            _require(_misfit(weights))
            self._weights, self._slabs = weights, {}
        rows, active = sum(counts_S), sum(count > 0 for count in counts_S)
        _, hidden, ffn = weights.down.shape
        hopper = weights.down.dtype is torch.bfloat16 and is_hopper(weights.down.device)
        # Batch-invariant: no tiling of another kind for up to 16 tokens, and a row's bits are its own.
        chosen = choose(rows, LayerShape(active, 1, hidden, ffn), hopper, batch_invariant=True)
        assert isinstance(chosen, GroupedTiles)
        return chosen

    def run(self, rows_RD: Tensor, maps: Sequence[Tensor], tiles: GroupedTiles, weights: LayerWeights) -> Tensor:
        """Outputs [R, D] of the rows that the tiles cover; the others are left as they were allocated."""
        segment_M, row_M, end_M, count_1 = maps
        row_tiles, slots_S = RowTiles(segment_M, row_M, end_M, count_1, tiles.rows), weights.slots_S
        gate_up, down = self._descriptors(tiles, weights)
        form = _form(weights, rows_RD)
        acts_RF, out_RD = rows_RD.new_empty(rows_RD.shape[0], weights.down.shape[2]), torch.empty_like(rows_RD)
        assert isinstance(tiles.gate_up, Tile)
        grouped_gemm.gate_up_swiglu(
            rows_RD, None, 1, row_tiles, slots_S, gate_up, weights.gate_up_bias, form, tiles.gate_up, acts_RF
        )
        bias = weights.down_bias
        if isinstance(tiles.down, WarpTile):
            acts = warp_gemm.rows_descriptor(acts_RF)
            warp_gemm.down_product(acts, row_tiles, slots_S, down, bias, None, tiles.down, out_RD)
        else:
            grouped_gemm.down_product(acts_RF, row_tiles, slots_S, down, bias, None, tiles.down, out_RD)
        return out_RD

    def _descriptors(self, tiles: GroupedTiles, weights: LayerWeights) -> tuple[Any, Any]:
        if tiles not in self._slabs:
            assert isinstance(tiles.gate_up, Tile)
            self._slabs[tiles] = (
                grouped_gemm.gate_up_descriptor(weights.gate_up, tiles.gate_up),
                warp_gemm.down_descriptor(weights.down)
                if isinstance(tiles.down, WarpTile)
                else grouped_gemm.down_descriptor(weights.down, tiles.down),
            )
        return self._slabs[tiles]


def _cut(starts_S: Sequence[int], counts_S: Sequence[int], block_rows: int) -> list[Ints]:
    """The host's vectors of `RowTiles`: segments of `counts_S` rows from `starts_S`, which need not follow each other.

    Example: starts [0, 8], counts [5, 1] by 4 -> segments [0, 0, 1], rows [0, 4, 8], ends [5, 5, 9], count [3].
    """
    start_S, count_S = np.asarray(starts_S, np.int32), np.asarray(counts_S, np.int32)
    tiles_S = -(-count_S // block_rows)
    segment_M = np.repeat(np.arange(count_S.size, dtype=np.int32), tiles_S)
    first_S = np.cumsum(tiles_S, dtype=np.int32) - tiles_S
    row_M = np.repeat(start_S - first_S * block_rows, tiles_S) + np.arange(segment_M.size, dtype=np.int32) * block_rows
    return [segment_M, row_M, np.repeat(start_S + count_S, tiles_S), np.array([segment_M.size], np.int32)]


def _form(weights: LayerWeights, rows_RD: Tensor) -> SwiGLU:
    """The activation in numbers of weights that are known to fit; `RunnerError` for rows of another dtype."""
    if rows_RD.dtype != weights.down.dtype:
        _require(f"rows are {rows_RD.dtype}, weights {weights.down.dtype}")
    assert weights.form is not None
    return weights.form


def _require(misfit: str | None) -> None:
    if misfit is not None:
        raise RunnerError("kernels_do_not_fit", misfit)


def _misfit(weights: LayerWeights) -> str | None:
    """Why no kernel can compute with these weights, on any device."""
    gate_up, down = weights.gate_up, weights.down
    if weights.form is None:
        return "the activation is no SwiGLU"
    if down.dtype not in _DTYPES or gate_up.dtype != down.dtype:
        return f"weights are {gate_up.dtype} and {down.dtype}"
    _, hidden, ffn = down.shape
    multiple = max(_WIDTH_MULTIPLE, _STRIDE_BYTES // down.dtype.itemsize)
    if hidden % multiple or ffn % multiple:
        return f"widths D = {hidden} and F = {ffn} must be multiples of {multiple}"
    if not all(
        slab is None or slab.is_contiguous() for slab in (gate_up, down, weights.gate_up_bias, weights.down_bias)
    ):
        return "a slab is not contiguous"
    return None


def _block_misfit(runner: BlockSparse, weights: LayerWeights) -> str | None:
    edges = runner.block_rows, runner.columns(weights.down.shape[2])
    if any(edge not in _EDGES for edge in edges):
        return f"blocks of {edges[0]} x {edges[1]} must have edges among {', '.join(map(str, _EDGES))}"
    return None
