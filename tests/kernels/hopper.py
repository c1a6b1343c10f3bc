"""Compiles launches for a Hopper GPU on a machine without one: `python -m tests.kernels.hopper tuned` (or `more`).

Every launch goes through its public wrapper with tensors that have a shape and no storage; instead of running, the
kernel is compiled for sm_90 as that launch would compile it. Prints one JSON object: name -> its kernels' resources.
It is a program, and nothing imports it: Triton decides once per process whether kernels are compiled or interpreted,
and here they are made to believe in a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ray_moe.kernels import launch

# Before the kernels are imported, which take these by name.
launch.is_hopper = lambda device: True  # type: ignore[assignment]
launch.multiprocessors = lambda device: 132  # type: ignore[assignment]

from ray_moe.kernels import fp8_warp  # noqa: E402
from ray_moe.kernels.activation import SwiGLU  # noqa: E402
from ray_moe.kernels.attention import decode_attention, write_kv  # noqa: E402
from ray_moe.kernels.block_sparse import BlockIndices, dsd, sdd_swiglu  # noqa: E402
from ray_moe.kernels.digest import fingerprint_spans  # noqa: E402
from ray_moe.kernels.fp8_gemm import Fp8Slab, Fp8Tile, fp8_down, fp8_gate_up  # noqa: E402
from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace  # noqa: E402
from ray_moe.kernels.permute import pad, permute, unpad, unpermute  # noqa: E402
from ray_moe.kernels.quantize import dequantize_rows, quantize_rows, quantize_weights  # noqa: E402
from ray_moe.kernels.regions import Part, Regions  # noqa: E402
from ray_moe.kernels.routing import RowTiles  # noqa: E402
from ray_moe.kernels.tiling import LayerShape  # noqa: E402
from ray_moe.kernels.trunk import rms_norm, rotate, softmax_top_k  # noqa: E402
from ray_moe.kernels.window import CELL_WORDS, collect, push, wait  # noqa: E402
from ray_moe.kernels.window_partial import sum_partials, unpack  # noqa: E402

FP8, BF16, FP32, INT32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32
GPT_OSS = SwiGLU(limit=7.0, alpha=1.702, up_shift=1.0)


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def indices(count: int) -> Tensor:
    return tensor(count, dtype=INT32)


def row_tiles(block_rows: int) -> RowTiles:
    return RowTiles(indices(300), indices(300), indices(300), indices(1), block_rows)


def _slab(matrices: int, rows: int, columns: int) -> Fp8Slab:
    blocks = (matrices, triton.cdiv(rows, 128), triton.cdiv(columns, 128))
    return Fp8Slab(tensor(matrices, rows, columns, dtype=FP8), tensor(*blocks, dtype=FP32))


def _permute() -> None:
    rows, index, offsets, padded = tensor(64, 2880), indices(64), indices(9), tensor(8, 16, 2880)
    permute(rows, index, rows, indices(1))
    unpermute(rows, index, rows)
    pad(rows, offsets, padded)
    unpad(padded, offsets, rows)


def _quantize() -> None:
    rows, data, scales = tensor(64, 2048), tensor(64, 2048, dtype=FP8), tensor(64, 16, dtype=FP32)
    quantize_rows(rows, data, scales)
    dequantize_rows(data, scales, rows)
    weights = tensor(8, 768, 2048)
    quantize_weights(weights, tensor(8, 768, 2048, dtype=FP8), tensor(8, 6, 16, dtype=FP32))


def _digest() -> None:
    fingerprint_spans(tensor(20, 4, dtype=torch.int64), [(8, 18, 786432), (2, 2, 9)], tensor(9, 2, dtype=torch.int64))


def _block_sparse(hidden: int, ffn: int, rows: int, columns: int) -> None:
    entries = BlockIndices(*(indices(100) for _ in range(4)))
    blocks, blocked = tensor(100, rows, columns), tensor(20 * rows, hidden)
    sdd_swiglu(blocked, entries, indices(8), tensor(8, 2 * ffn, hidden), None, SwiGLU(), blocks)
    dsd(blocks, entries, indices(8), tensor(8, hidden, ffn), None, blocked)


def _fp8(
    hidden: int, ffn: int, block_rows: int, tile: Fp8Tile, bias: bool = False, activation: SwiGLU | None = None
) -> None:
    tiles, rows, acts = row_tiles(block_rows), tensor(64, hidden, dtype=FP8), tensor(512, ffn, dtype=FP8)
    scales, act_scales = tensor(64, -(-hidden // 128), dtype=FP32), tensor(512, -(-ffn // 128), dtype=FP32)
    gate_up, down = _slab(16, ffn, hidden), _slab(8, hidden, ffn)
    biases = (tensor(8, 2 * ffn), tensor(8, hidden)) if bias else (None, None)
    fp8_gate_up(
        rows, scales, indices(512), 8, tiles, indices(8), gate_up, biases[0], activation or SwiGLU(), tile,
        acts, act_scales,
    )  # fmt: skip
    fp8_down(acts, act_scales, tiles, indices(8), down, biases[1], tile, tensor(512, hidden))


def _fp8_warp(hidden: int, ffn: int, bias: bool = False, activation: SwiGLU | None = None) -> None:
    tiles, rows, acts = row_tiles(128), tensor(64, hidden, dtype=FP8), tensor(512, ffn, dtype=FP8)
    scales, act_scales = tensor(64, hidden // 128, dtype=FP32), tensor(512, -(-ffn // 128), dtype=FP32)
    gate_up, down = _slab(16, ffn, hidden), _slab(8, hidden, ffn)
    biases = (tensor(8, 2 * ffn), tensor(8, hidden)) if bias else (None, None)
    tile = fp8_warp.Fp8WarpTile()
    fp8_warp.fp8_gate_up(
        rows, scales, indices(512), 8, tiles, indices(8), gate_up, fp8_warp.panels_descriptor(gate_up), biases[0],
        activation or SwiGLU(), tile, acts, act_scales,
    )  # fmt: skip
    fp8_warp.fp8_down(
        acts, fp8_warp.rows_descriptor(acts), act_scales, tiles, indices(8), down, fp8_warp.panels_descriptor(down),
        biases[1], tile, tensor(512, hidden),
    )  # fmt: skip


def _layer(shape: LayerShape, tokens: int, bias: bool = False, activation: SwiGLU | None = None) -> None:
    """The whole routed layer, by whatever tiles so many tokens take."""
    experts, hidden, ffn = shape.num_experts, shape.hidden, shape.ffn
    biases = (tensor(experts, 2 * ffn), tensor(experts, hidden)) if bias else (None, None)
    slabs = Slabs(tensor(experts, 2 * ffn, hidden), tensor(experts, hidden, ffn), *biases, activation or SwiGLU())
    layer = FusedLayer(slabs, Workspace(shape, tokens, BF16, torch.device("meta")))
    rows, gates = tensor(tokens, hidden), tensor(tokens, shape.top_k, dtype=FP32)
    layer(rows, torch.empty(tokens, shape.top_k, dtype=torch.int64, device="meta"), gates, indices(experts), rows)


def _window(hidden: int, tokens: int) -> None:
    regions, part = Regions.plan(4, tokens, 8, hidden, BF16), Part(tokens, 0, 4)
    window, table = tensor(regions.nbytes, dtype=torch.uint8), tensor(6, 128, dtype=INT32)
    addresses, cell, failure = (tensor(size, dtype=torch.int64) for size in (4, CELL_WORDS, 3))
    rows, ids, gates = tensor(tokens, hidden), tensor(tokens, 8, dtype=torch.int64), tensor(tokens, 8, dtype=FP32)
    push(rows, ids, table, addresses, cell, regions, part)
    wait(window, cell, failure, regions, part)
    collect(ids, gates, table, window, addresses, cell, failure, regions, part, rows)


def _partial_window(hidden: int, tokens: int) -> None:
    regions, part = Regions.plan(4, tokens, 8, hidden, BF16, quantized=True, partial=True), Part(tokens, 0, 4)
    window, table = tensor(regions.nbytes, dtype=torch.uint8), tensor(6, 128, dtype=INT32)
    addresses, cell, failure = (tensor(size, dtype=torch.int64) for size in (4, CELL_WORDS, 3))
    rows, ids, gates = tensor(tokens, hidden), tensor(tokens, 8, dtype=torch.int64), tensor(tokens, 8, dtype=FP32)
    push(rows, ids, table, addresses, cell, regions, part, gates)
    all_rows, all_ids = tensor(part.tokens, hidden), tensor(part.tokens, 8, dtype=INT32)
    data, scales = tensor(part.tokens, hidden, dtype=FP8), tensor(part.tokens, hidden // 128, dtype=FP32)
    unpack(data, scales, all_ids, all_rows)
    all_gates, positions = tensor(part.tokens, 8, dtype=FP32), indices(8 * part.tokens)
    sum_partials(all_rows, positions, all_ids, all_gates, addresses, cell, regions, part)
    collect(ids, gates, table, window, addresses, cell, failure, regions, part, rows)


def _trunk(tokens: int, hidden: int, heads: int, kv_heads: int, dim: int, experts: int) -> None:
    rms_norm(tensor(tokens, hidden), tensor(hidden), 1e-6)
    rms_norm(tensor(tokens, heads, dim), tensor(dim), 1e-6)
    query, key = (tensor(tokens, count, dim).transpose(0, 1) for count in (heads, kv_heads))
    rotate(query, key, tensor(tokens, dim), tensor(tokens, dim))
    softmax_top_k(tensor(tokens, experts), 8, renormalise=True, gate_dtype=BF16)


def _attention(
    requests: int, heads: int, kv_heads: int, dim: int, window: int | None = None, sinks: bool = False
) -> None:
    pool, lengths = tensor(1024, kv_heads, 2 * dim), tensor(requests, dtype=torch.int64)
    key = tensor(requests, kv_heads, dim).transpose(0, 1)
    write_kv(key, key, lengths, pool)
    query = tensor(requests, heads, dim)
    table, softcap = tensor(requests, 64, dtype=torch.int64), 30.0 if sinks else None
    decode_attention(
        query, pool, table, lengths, 16, dim**-0.5, query, window=window, softcap=softcap,
        sinks_H=tensor(heads) if sinks else None,
    )  # fmt: skip


def _home(shape: LayerShape, tokens: int) -> None:
    """The experts of a layer over windows, their results going home."""
    experts, hidden, ffn = shape.num_experts, shape.hidden, shape.ffn
    slabs = Slabs(tensor(experts, 2 * ffn, hidden), tensor(experts, hidden, ffn), None, None, SwiGLU())
    layer = FusedLayer(slabs, Workspace(shape, tokens, BF16, torch.device("meta")))
    ids, rows = tensor(tokens, shape.top_k, dtype=INT32), tensor(tokens * shape.top_k, hidden)
    home = (tensor(4, dtype=torch.int64), tokens * shape.top_k // 4, 1024)
    layer.experts(tensor(tokens, hidden), ids, indices(experts), rows, indices(len(rows)), home)


QWEN, MIXTRAL = LayerShape(128, 8, 2048, 768), LayerShape(8, 2, 4096, 14336)
OSS = LayerShape(32, 4, 2944, 2944)

# What every run of the tests compiles, and what `full` adds: other shapes, biases and clamps.
LAUNCHES: dict[str, dict[str, Callable[[], None]]] = {
    "tuned": {
        "permute": _permute,
        "quantize": _quantize,
        "digest": _digest,
        "block_sparse": lambda: _block_sparse(2048, 768, 128, 128),
        "fp8_gemm": lambda: _fp8(2048, 768, 128, Fp8Tile(short_tail=False)),
        "fp8_warp": lambda: _fp8_warp(2048, 768),
        "window": lambda: _window(2048, 16),
        "window with partial sums": lambda: _partial_window(2048, 16),
        **{f"home of {tokens}": partial(_home, QWEN, tokens) for tokens in (16, 64, 256, 4096)},
        "trunk": lambda: _trunk(64, 2048, 32, 4, 128, 128),
        "attention": lambda: _attention(8, 32, 4, 128),
        "attention unsplit": lambda: _attention(512, 32, 4, 128),
        **{f"layer of {tokens}": partial(_layer, QWEN, tokens) for tokens in (1, 8, 16, 64, 256, 4096)},
    },
    "more": {
        "block_sparse mixtral": lambda: _block_sparse(4096, 14336, 128, 128),
        "block_sparse small": lambda: _block_sparse(2880, 1408, 16, 128),
        "fp8_gemm mixtral": lambda: _fp8(4096, 14336, 128, Fp8Tile()),
        "fp8_gemm gpt_oss": lambda: _fp8(2880, 2880, 128, Fp8Tile(), True, GPT_OSS),
        "fp8_gemm few rows": lambda: _fp8(2048, 1408, 64, Fp8Tile(warps=4, stages=2, short_tail=False)),
        "fp8_warp mixtral": lambda: _fp8_warp(4096, 14336),
        **{f"home, mixtral of {tokens}": partial(_home, MIXTRAL, tokens) for tokens in (16, 1024)},
        "window wide": lambda: _window(7168, 1024),
        "fp8_warp bias": lambda: _fp8_warp(2944, 2944, True, GPT_OSS),
        "trunk wide": lambda: _trunk(64, 7168, 128, 128, 192, 384),
        "attention wide": lambda: _attention(8, 16, 16, 256),
        "attention gpt_oss": lambda: _attention(8, 64, 8, 64, window=128, sinks=True),
        "attention mla": lambda: _attention(8, 128, 128, 192),
        **{f"mixtral of {tokens}": partial(_layer, MIXTRAL, tokens) for tokens in (1, 8, 16, 64, 256, 1024, 4096)},
        **{f"gpt_oss of {tokens}": partial(_layer, OSS, tokens, True, GPT_OSS) for tokens in (1, 8, 64, 1024, 8192)},
    },
}


class _Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(kernel: Any) -> dict[str, int | str]:
    """A compiled kernel's name, registers, bytes of spilled registers and shared memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    shared = kernel.metadata.shared
    return {"kernel": kernel.name, "registers": int(found[1]), "spilled": int(found[2]), "shared": shared}


def main(group: str) -> None:
    driver.set_active(_Hopper())
    compiled: list[Any] = []

    def compile_instead(self: JITFunction, grid: object) -> Callable[..., None]:
        return lambda *args, **options: compiled.append(self.warmup(*args, grid=grid, **options))

    JITFunction.__getitem__ = compile_instead
    report = {}
    for name, launched in LAUNCHES[group].items():
        compiled.clear()
        launched()
        report[name] = [resources(kernel) for kernel in compiled]
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "interpreted kernels are not compiled"
    main(sys.argv[1])
