"""Random layers and routings for tests of the routed layer's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace
from ray_moe.kernels.reference_grouped import routed_layer
from ray_moe.kernels.tiling import LayerShape, Tiling

ROUTINGS = ("random", "zipf", "one_hot", "holes")


def routing(kind: str, tokens: int, shape: LayerShape, device: torch.device) -> Tensor:
    """Distinct experts per token [T, K] int64; `holes` has routes that are nobody's, `one_hot` one expert for all."""
    scores = torch.rand(tokens, shape.num_experts, device=device)
    if kind == "zipf":
        popularity = 1.0 / torch.arange(1, shape.num_experts + 1, device=device)
        scores = scores.log() / -popularity.div(popularity.sum()) * -1.0
    if kind == "one_hot":
        scores[:, shape.num_experts // 2] = 2.0 if tokens else 0.0
        scores[:, 1 :: max(2, shape.num_experts // 8)] += 1.0
    ids = scores.topk(shape.top_k, dim=1).indices
    if kind == "holes":
        ids[torch.rand(ids.shape, device=device) < 0.4] = -1
    return ids


def slabs(
    shape: LayerShape, dtype: torch.dtype, device: torch.device, *, spare: int = 2, biases: bool = False,
    activation: SwiGLU | None = None,
) -> Slabs:  # fmt: skip
    pool = shape.num_experts + spare

    def make(*sizes: int, scale: float) -> Tensor:
        return (torch.randn(*sizes, device=device) * scale).to(dtype)

    return Slabs(
        make(pool, 2 * shape.ffn, shape.hidden, scale=shape.hidden**-0.5),
        make(pool, shape.hidden, shape.ffn, scale=shape.ffn**-0.5),
        make(pool, 2 * shape.ffn, scale=0.5) if biases else None,
        make(pool, shape.hidden, scale=0.5) if biases else None,
        activation or SwiGLU(),
    )


def table(shape: LayerShape, pool: int, device: torch.device) -> Tensor:
    """Each expert's pool slot, in no order."""
    return torch.randperm(pool, device=device)[: shape.num_experts].to(torch.int32)


def relative_error(
    shape: LayerShape, weights: Slabs, ids_TK: Tensor, *, tiling: Tiling | None = None, batch_invariant: bool = False,
    gates: torch.dtype = torch.float32, workspace: Workspace | None = None,
) -> float:  # fmt: skip
    """Norm of the error over the norm of the fp32 twin, on fresh inputs, with every buffer poisoned first."""
    tokens, device, dtype = ids_TK.shape[0], weights.down.device, weights.down.dtype
    hidden = torch.randn(tokens, shape.hidden, device=device).to(dtype)
    weight = torch.rand(tokens, shape.top_k, device=device).to(gates)
    slots = table(shape, weights.down.shape[0], device)
    workspace = workspace or Workspace(shape, max(1, tokens), dtype, device)
    poison(workspace)
    out = torch.full_like(hidden, float("nan"))
    FusedLayer(weights, workspace, tiling=tiling, batch_invariant=batch_invariant)(hidden, ids_TK, weight, slots, out)
    wanted = routed_layer(
        hidden, ids_TK, weight, slots, weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias,
        weights.activation,
    )  # fmt: skip
    if not tokens:
        return 0.0
    return float((out.float() - wanted).norm() / wanted.norm().clamp_min(1e-20))


def poison(workspace: Workspace) -> None:
    """NaN where rows go, and maps that point nowhere."""
    for buffer in (workspace.acts_RF, workspace.rows_RD):
        buffer.fill_(float("nan"))
    for maps in workspace.maps.values():
        for ints in (maps.source_N, maps.position_N, maps.tiles.segment_M, maps.tiles.row_M, maps.tiles.end_M):
            ints.fill_(2**30)
    for gemv in workspace.gemv.values():
        gemv.acts_KF.fill_(float("nan"))
        gemv.sums_KD.fill_(float("nan"))
    for buffers in workspace.decode.values():
        buffers.acts.fill_(float("nan"))
        buffers.outs.fill_(float("nan"))
