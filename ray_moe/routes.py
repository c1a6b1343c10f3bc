"""Routes: the hand-off from a router, sealed by a digest over their semantic columns (specification 0x01A0, 0x03A).

The runtime receives this record. It chooses replicas; it never changes an expert, renormalises a gate, or drops a
route. Letters: T tokens, K top-k, N = T * K routes, E logical experts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_moe.errors import RoutesError

_CANON = "ray_moe.routes/1"


@dataclass(frozen=True)
class Routes:
    """Accepted routes of one origin partition in semantic order (token-major, then route slot).

    `topk_ids` [T, K] int64 logical experts; `topk_weights` [T, K] gates in the router's own dtype, never cast. Route
    `r` has id `first_route_id + r`, origin token `r // K` and route slot `r % K`. Raises `RoutesError` for shapes or
    dtypes that no router gives. The range of the ids is checked against a layer by `checked`.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    execution_scope_id: str = ""
    origin_partition: str = ""
    first_route_id: int = 0

    def __post_init__(self) -> None:
        if self.topk_ids.ndim != 2 or self.topk_ids.shape != self.topk_weights.shape:
            raise RoutesError(
                f"topk_ids and topk_weights must both be [T, K], found {tuple(self.topk_ids.shape)} "
                f"and {tuple(self.topk_weights.shape)}"
            )
        if self.topk_ids.dtype not in (torch.int64, torch.int32) or not self.topk_weights.is_floating_point():
            raise RoutesError(
                f"topk_ids must be int32 or int64 and topk_weights floating point, found {self.topk_ids.dtype} "
                f"and {self.topk_weights.dtype}"
            )

    @property
    def num_tokens(self) -> int:
        return self.topk_ids.shape[0]

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def num_routes(self) -> int:
        return self.topk_ids.numel()

    def checked(self, num_logical_experts: int) -> Routes:
        """These routes, or `RoutesError` naming the first id outside [0, E). Syncs the host once."""
        if self.num_routes:
            low, high = (int(bound) for bound in torch.aminmax(self.topk_ids))
            if low < 0 or high >= num_logical_experts:
                raise RoutesError(
                    f"logical expert ids must be in [0, {num_logical_experts}), found {low if low < 0 else high}"
                )
        return self

    def seal(self) -> str:
        """Canonical SHA-256 over the seven semantic columns; any change of one of them changes it."""
        columns = {
            "canon": _CANON,
            "execution_scope_id": self.execution_scope_id,
            "origin_partition": self.origin_partition,
            "first_route_id": self.first_route_id,
            "num_tokens": self.num_tokens,
            "top_k": self.top_k,
            "gate_dtype": str(self.topk_weights.dtype),
        }
        digest = hashlib.sha256(json.dumps(columns, sort_keys=True, separators=(",", ":")).encode())
        digest.update(_bytes(self.topk_ids.to(torch.int64)))
        digest.update(_bytes(self.topk_weights))
        return digest.hexdigest()

    def verify(self, sealed: str) -> None:
        """Raise `RoutesError` when these are not the routes that were sealed."""
        found = self.seal()
        if found != sealed:
            raise RoutesError(f"semantic digest of the routes is {found[:16]}..., sealed as {sealed[:16]}...")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
