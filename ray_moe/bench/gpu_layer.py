"""The one-GPU expert layer against its roofline, PyTorch's pipeline and itself, on one CUDA device.

    python -m ray_moe.bench.gpu_layer [--tune | --padding] [--models A,B] [--tokens 1,4] [--out DIR]

Timed is what `dataplane/layer.py` calls where one GPU has every expert (hidden rows, ids and gates in, weighted sums
out), replayed from a CUDA graph; the L2 cache is flushed before each run. Every row's result is compared with an fp32
oracle on routes drawn after the capture, with rows and result poisoned first. `--tune` times candidates instead,
`--padding` launches that are mostly padding.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ray_moe.bench import gpu_tune
from ray_moe.bench.gpu_fp8 import fp8_rows
from ray_moe.bench.gpu_padding import padding_rows
from ray_moe.bench.gpu_shapes import (
    MODELS,
    OFF_TABLE,
    TOKENS,
    Inputs,
    compile_beforehand,
    floor_ms,
    poison,
    random_slabs,
    relative_error,
    torch_pipeline,
)
from ray_moe.bench.report import Row
from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace
from ray_moe.kernels.tiling import GroupedTiles, LayerShape
from ray_moe.kernels.timing import graphed, interleaved

ROUNDS = 3
SKEWED = (4096, 16384)  # prefill sizes at which Zipf routing is timed beside uniform
OFF_TOKENS = (3, 37, 777, 5000)
MOST_ERROR = 6e-3  # three bf16 products, about 0.003
_CUDA = torch.device("cuda")


def layer_row(model: str, shape: LayerShape, slabs: Slabs, tokens: int, *, against_torch: bool = True) -> Row:
    """One size: ours, ours batch-invariant, PyTorch's pipeline and, at prefill sizes, Zipf routing; same rounds."""
    workspace, inputs = Workspace(shape, tokens, torch.bfloat16, _CUDA), Inputs.random(shape, tokens)
    layers = {"ms": FusedLayer(slabs, workspace), "invariant_ms": FusedLayer(slabs, workspace, batch_invariant=True)}
    replays = {name: graphed(partial(inputs.run, layer)) for name, layer in layers.items()}
    errors = {name: _checked(shape, slabs, workspace, inputs, replay) for name, replay in replays.items()}
    if against_torch:
        replays["torch_ms"] = graphed(torch_pipeline(slabs, inputs, shape))
    if tokens in SKEWED and against_torch:
        skewed = Inputs.random(shape, tokens, zipf=1.0)
        replays["zipf_ms"] = graphed(partial(skewed.run, layers["ms"]))
        errors["zipf_ms"] = _checked(shape, slabs, workspace, skewed, replays["zipf_ms"], zipf=1.0)
    floor = floor_ms(shape, inputs.ids_TK)
    times = dict(zip(replays, interleaved(list(replays.values()), ROUNDS, _budget(tokens)), strict=True))
    ms = times["ms"].median
    row: dict[str, Any] = {"model": model, "tokens": tokens, "floor_ms": floor, "floor_over_time": floor / ms}
    row |= {name: spread.median for name, spread in times.items()} | {"ms_range": times["ms"].range()}
    row |= {"err": errors["ms"], "invariant_err": errors["invariant_ms"]}
    row["invariant_over_default"] = times["invariant_ms"].median / ms
    if "torch_ms" in times:
        row["torch_over_ours"] = times["torch_ms"].median / ms
    if "zipf_ms" in times:
        row |= {"zipf_over_uniform": times["zipf_ms"].median / ms, "zipf_err": errors["zipf_ms"]}
    return row | _parts(layers["ms"], inputs, shape, slabs, tokens, ms)


def _checked(
    shape: LayerShape, slabs: Slabs, workspace: Workspace, inputs: Inputs, replay: Callable[[], None], zipf: float = 0.0
) -> float:
    """The error of a replay on other routes than it was captured with. Raises `AssertionError` when it is too large."""
    inputs.redraw(shape, zipf)
    poison(workspace)
    replay()
    error = relative_error(slabs, inputs)
    assert error < MOST_ERROR, f"{shape} at {len(inputs.hidden_TD)} tokens is wrong by {error}"
    return error


def _parts(
    layer: FusedLayer, inputs: Inputs, shape: LayerShape, slabs: Slabs, tokens: int, ms: float
) -> dict[str, Any]:
    """Each launch apart, and cuBLAS's two dense products of the same number of rows; each with a replay's 3-5 us."""
    tiling = layer.tiling_of(tokens)
    if not isinstance(tiling, GroupedTiles):
        return {"tiles": str(tiling)}
    calls: dict[str, Callable[[], object]] = {
        "routing_ms": partial(layer.route, inputs.ids_TK, tiling),
        "gate_up_ms": partial(layer.gate_up, inputs.hidden_TD, inputs.slots_E, tiling),
        "down_ms": partial(layer.down, tokens, inputs.slots_E, tiling),
    }
    if tokens >= min(SKEWED):
        workspace = layer.workspace
        rows_RD = inputs.hidden_TD.repeat_interleave(shape.top_k, 0)
        acts_RF = workspace.acts_RF[: len(rows_RD)]
        gate_up, down = slabs.gate_up[0].t(), slabs.down[0].t()
        calls["cublas_gate_up_ms"] = lambda: rows_RD @ gate_up
        calls["cublas_down_ms"] = lambda: acts_RF @ down
    times = dict(zip(calls, interleaved([graphed(call) for call in calls.values()], 1, 30), strict=True))
    found: dict[str, Any] = {name: spread.median for name, spread in times.items()} | {"tiles": str(tiling)}
    found["routing_share"] = found["routing_ms"] / ms
    if "cublas_down_ms" in found:
        found["cublas_products_over_ours"] = (found["cublas_gate_up_ms"] + found["cublas_down_ms"]) / ms
    return found


def _budget(tokens: int) -> int:
    return 40 if tokens <= 4096 else 80


def run(models: Sequence[str], sizes: Sequence[int]) -> list[Row]:
    """The layer's rows, those of shapes outside the tables, and FP8's."""
    shapes = {model: MODELS[model] for model in models}
    jobs = [
        (shape, tokens, None, invariant) for shape in shapes.values() for tokens in sizes for invariant in (False, True)
    ]
    jobs += [(OFF_TABLE, tokens, None, invariant) for tokens in OFF_TOKENS for invariant in (False, True)]
    compile_beforehand(jobs)
    rows: list[Row] = []
    for model, shape in shapes.items():
        slabs = random_slabs(shape)
        for tokens in sizes:
            rows.append(layer_row(model, shape, slabs, tokens))
            print(_line(rows[-1]), flush=True)
        rows += fp8_rows(model, shape, slabs, [tokens for tokens in SKEWED if tokens in sizes])
        del slabs
        torch.cuda.empty_cache()
    slabs = random_slabs(OFF_TABLE)
    name = "outside the tables: E 60, K 4, F 1408, D 2048"
    for tokens in OFF_TOKENS:
        rows.append(layer_row(name, OFF_TABLE, slabs, tokens, against_torch=False))
        print(_line(rows[-1]), flush=True)
    return rows


def _line(row: Row) -> str:
    figures = {
        name: row[name] for name in ("torch_over_ours", "invariant_over_default", "zipf_over_uniform") if name in row
    }
    shown = " ".join(f"{name} {value:.2f}" for name, value in figures.items())
    return (
        f"{row['model'][:12]} T={row['tokens']} {row['ms']:.4f} ms, floor / time {row['floor_over_time']:.3f}, {shown}"
    )


def environment() -> dict[str, Any]:
    """Hardware, versions and date, for whoever reads the record."""
    names = ("torch", "triton")
    return {
        "hardware": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "date": time.strftime("%Y-%m-%d"),
    }


def card() -> Row:
    """What this card reaches by itself, since cards differ by some per cent: a copy of 2 GiB, and cuBLAS's product."""
    source = torch.empty(2**31, dtype=torch.uint8, device=_CUDA)
    target, square = torch.empty_like(source), torch.randn(8192, 8192, device=_CUDA).to(torch.bfloat16)
    copy_ms, product_ms = (
        spread.median for spread in interleaved([partial(target.copy_, source), lambda: square @ square], 3, 60)
    )
    return {
        "what": "the card itself", "copy_tb_per_s": 2 * source.nbytes / copy_ms / 1e9,
        "dense_tflop_per_s": 2 * 8192**3 / product_ms / 1e9,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ray_moe.bench.gpu_layer")
    parser.add_argument("--tune", action="store_true", help="time the candidates of the tile tables instead")
    parser.add_argument("--padding", action="store_true", help="time launches that are mostly padding instead")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", type=Path, help="folder for the record (default: it is printed)")
    options = parser.parse_args(arguments)
    models, sizes = options.models.split(","), [int(size) for size in options.tokens.split(",")]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    name = "tune" if options.tune else "padding" if options.padding else "layer"
    rows = {
        "tune": lambda: gpu_tune.run(models, sizes),
        "padding": padding_rows,
        "layer": lambda: [card(), *run(models, sizes)],
    }[name]()
    record = environment() | {
        "command": "python -m ray_moe.bench.gpu_layer" + (f" --{name}" if name != "layer" else ""),
        "floor": "max(bytes / 4.3 TB/s, FLOPs / 771 TFLOP/s); bytes: weights of the experts used, tokens in and out",
        "method": f"CUDA-graph replay, L2 flushed by a write before each run, median of {ROUNDS} interleaved rounds",
        "rows": rows,
    }
    text = json.dumps(record, indent=1)
    if options.out is None:
        print(text)
    else:
        (options.out / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
