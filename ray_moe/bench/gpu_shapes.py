"""Layers of full size for benchmarks on one GPU: random weights, random routing, an fp32 oracle, the roofline."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.decode_layer import DecodeTile
from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace
from ray_moe.kernels.gemv_layer import GemvTile
from ray_moe.kernels.tiling import LayerShape, Tiling

# Both measured on one H200: a large copy, and an 8192^3 bf16 product of random numbers.
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 771e12
MODELS = {
    "qwen3-30b-a3b": LayerShape(num_experts=128, top_k=8, hidden=2048, ffn=768),
    "mixtral-8x7b": LayerShape(num_experts=8, top_k=2, hidden=4096, ffn=14336),
}
OFF_TABLE = LayerShape(num_experts=60, top_k=4, hidden=2048, ffn=1408)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_SAMPLE = 256  # tokens that the oracle computes


def random_slabs(shape: LayerShape) -> Slabs:
    def make(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16).mul_(0.02)

    gate_up = make(shape.num_experts, 2 * shape.ffn, shape.hidden)
    return Slabs(gate_up, make(shape.num_experts, shape.hidden, shape.ffn), None, None, SwiGLU())


@dataclass(frozen=True, eq=False)
class Inputs:
    """hidden [T, D] bf16, ids [T, K] int64, gates [T, K] fp32, the slot table, and room for the result."""

    hidden_TD: Tensor
    ids_TK: Tensor
    gates_TK: Tensor
    slots_E: Tensor
    out_TD: Tensor

    @staticmethod
    def random(shape: LayerShape, tokens: int, zipf: float = 0.0) -> Inputs:
        """Experts drawn without replacement, all alike or by a Zipf law of the given exponent."""
        hidden = torch.randn(tokens, shape.hidden, device="cuda").to(torch.bfloat16)
        popularity = torch.arange(1, shape.num_experts + 1, device="cuda", dtype=torch.float64) ** -zipf
        chances = popularity[torch.randperm(shape.num_experts, device="cuda")].expand(tokens, -1)
        ids = torch.multinomial(chances, shape.top_k) if tokens else torch.zeros(0, shape.top_k, device="cuda").long()
        gates = torch.softmax(torch.randn(tokens, shape.top_k, device="cuda"), -1)
        slots = torch.randperm(shape.num_experts, device="cuda").to(torch.int32)
        return Inputs(hidden, ids, gates, slots, torch.full_like(hidden, float("nan")))

    def redraw(self, shape: LayerShape, zipf: float = 0.0) -> None:
        """Other numbers at the same addresses, and a poisoned result."""
        other = Inputs.random(shape, len(self.hidden_TD), zipf)
        for name in ("hidden_TD", "ids_TK", "gates_TK", "slots_E", "out_TD"):
            getattr(self, name).copy_(getattr(other, name))

    def run(self, layer: FusedLayer) -> None:
        layer(self.hidden_TD, self.ids_TK, self.gates_TK, self.slots_E, self.out_TD)


def relative_error(slabs: Slabs, inputs: Inputs) -> float:
    """Of `out_TD` against fp32, over at most 256 tokens drawn at random; infinite when any element is not finite."""
    if not bool(inputs.out_TD.isfinite().all()):
        return float("inf")
    chosen = torch.randperm(len(inputs.hidden_TD), device="cuda")[:_SAMPLE]
    rows, ids, gates = inputs.hidden_TD[chosen].float(), inputs.ids_TK[chosen], inputs.gates_TK[chosen]
    wanted, ffn = torch.zeros_like(rows), slabs.down.shape[2]
    for expert in ids.unique().tolist():
        token, k = (ids == expert).nonzero(as_tuple=True)
        slot = int(inputs.slots_E[expert])
        products = rows[token] @ slabs.gate_up[slot].float().T
        acts = slabs.activation(products[:, :ffn], products[:, ffn:])
        wanted.index_add_(0, token, (acts @ slabs.down[slot].float().T) * gates[token, k][:, None])
    return float((inputs.out_TD[chosen].float() - wanted).norm() / wanted.norm())


def poison(workspace: Workspace) -> None:
    """NaN into every buffer that a row passes through."""
    buffers = [workspace.acts_RF, workspace.rows_RD]
    buffers += [part for each in workspace.decode.values() for part in (each.acts, each.outs)]
    buffers += [part for each in workspace.gemv.values() for part in (each.acts_KF, each.sums_KD)]
    for buffer in buffers:
        buffer.fill_(float("nan"))


def floor_ms(shape: LayerShape, ids_TK: Tensor) -> float:
    """The larger of the times to multiply and to move: weights of the experts that are used once, tokens in and out."""
    tokens, active = ids_TK.shape[0], int(ids_TK.unique().numel())
    flops = 6 * tokens * shape.top_k * shape.ffn * shape.hidden
    moved = active * 3 * shape.ffn * shape.hidden * 2 + tokens * shape.hidden * 4
    return max(flops / FLOPS_PER_S, moved / BYTES_PER_S) * 1e3


def torch_pipeline(slabs: Slabs, inputs: Inputs, shape: LayerShape) -> Callable[[], Tensor]:
    """Sort, gather, `torch._grouped_mm`, SwiGLU, `torch._grouped_mm`, index_add: what transformers does by default."""
    experts = torch.arange(shape.num_experts, device="cuda")

    def call() -> Tensor:
        flat = inputs.ids_TK.reshape(-1)
        ids, source = flat.sort(stable=True)
        ends = torch.searchsorted(ids, experts, right=True).to(torch.int32)
        token = source // shape.top_k
        products = torch._grouped_mm(inputs.hidden_TD[token], slabs.gate_up.transpose(1, 2), offs=ends)
        gate, up = products.chunk(2, dim=1)
        rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, slabs.down.transpose(1, 2), offs=ends)
        weighted = (rows * inputs.gates_TK.reshape(-1)[source][:, None]).to(torch.bfloat16)
        return torch.zeros_like(inputs.hidden_TD).index_add_(0, token, weighted)

    return call


Job = tuple[LayerShape, int, Tiling | None, bool]


def compile_beforehand(jobs: Sequence[Job]) -> None:
    """Compile each job's launches into Triton's cache, several at a time; a job is shape, tokens, tiles, invariance."""
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1)) as pool:
        for problem in pool.imap_unordered(_compile, jobs, chunksize=1):
            if problem:
                print(problem, flush=True)


def _compile(job: Job) -> str:
    shape, tokens, tiles, invariant = job
    try:
        pool = Slabs(
            torch.empty(shape.num_experts, 2 * shape.ffn, shape.hidden, device="cuda", dtype=torch.bfloat16),
            torch.empty(shape.num_experts, shape.hidden, shape.ffn, device="cuda", dtype=torch.bfloat16),
            None, None, SwiGLU(),
        )  # fmt: skip
        workspace = Workspace(shape, tokens, torch.bfloat16, torch.device("cuda"))
        if isinstance(tiles, DecodeTile | GemvTile):
            workspace.ensure(tiles)
        Inputs.random(shape, tokens).run(FusedLayer(pool, workspace, tiling=tiles, batch_invariant=invariant))
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a candidate may not fit; whoever times it meets the same error
        return f"cannot compile {job}: {type(error).__name__}: {str(error)[:200]}"
    return ""
