"""One MoE layer on one device: top-k ids in, weighted sums out, nothing on the host in between.

    route -> gate/up + SwiGLU -> down -> combine        or, for a few tokens, all of it in one launch or three

Launches depend on shapes alone, so that a call can be captured in a CUDA graph and replayed with other routes, gates
and slots. Letters: T tokens, K top-k, N = T * K routes, R rows, E experts, D hidden, F FFN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ray_moe.errors import ConfigError
from ray_moe.kernels import decode_layer, grouped_gemm, warp_gemm
from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.combine import combine
from ray_moe.kernels.decode_layer import DecodeBuffers, DecodeTile
from ray_moe.kernels.epilogue import Home
from ray_moe.kernels.gemv_layer import GemvBuffers, GemvTile, gemv_layer
from ray_moe.kernels.grouped_gemm import Tile
from ray_moe.kernels.launch import is_hopper
from ray_moe.kernels.regions import ROW_BLOCKS
from ray_moe.kernels.routing import RouteMaps, route
from ray_moe.kernels.tiling import (
    GroupedTiles,
    LayerShape,
    Tiling,
    choose,
    sizes_to_compile,
    small_tilings,
)
from ray_moe.kernels.warp_gemm import WarpTile


@dataclass(frozen=True, eq=False)
class Slabs:
    """One layer's storage: gate_up [pool, 2F, D] gate rows first, down [pool, D, F], biases [pool, 2F], [pool, D]."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: SwiGLU


class Workspace:
    """What layers of one shape write beside their results, for at most `max_tokens` tokens.

    A peer runs one layer at a time, so all of its layers share one. Addresses never change: captured graphs hold them.
    Raises `ConfigError` for a shape that the kernels cannot take, naming what must hold.
    """

    def __init__(self, shape: LayerShape, max_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        unfit = misfit(shape, dtype)
        if unfit is not None:
            raise ConfigError(unfit)
        self.shape, self.max_tokens, self.dtype, self.device = shape, max_tokens, dtype, device
        rows = max_tokens * shape.top_k
        self.acts_RF = torch.empty(rows, shape.ffn, dtype=dtype, device=device)
        self.maps = {block: RouteMaps.allocate(rows, shape.num_experts, block, device) for block in ROW_BLOCKS}
        self.decode: dict[DecodeTile, DecodeBuffers] = {}
        self.gemv: dict[GemvTile, GemvBuffers] = {}
        for tiling in small_tilings(shape) if self.hopper else ():
            self.ensure(tiling)

    @cached_property
    def rows_RD(self) -> Tensor:
        """Results of a layer that sums them here; who gives them to others has a place of his own for them."""
        rows = self.max_tokens * self.shape.top_k
        return torch.empty(rows, self.shape.hidden, dtype=self.dtype, device=self.device)

    def ensure(self, tile: DecodeTile | GemvTile) -> None:
        """Room for a way to run few tokens; those of the tables have it."""
        shape, device = self.shape, self.device
        if tile in self.decode or tile in self.gemv:
            return
        if isinstance(tile, GemvTile):
            self.gemv[tile] = GemvBuffers.allocate(tile, shape.top_k, shape.hidden, shape.ffn, self.dtype, device)
        else:
            owners = min(shape.num_experts, tile.columns * shape.top_k)
            self.decode[tile] = DecodeBuffers.allocate(tile, owners, shape.hidden, shape.ffn, device)

    @property
    def hopper(self) -> bool:
        """Whether the kernels for wgmma and the copy engine run here: bf16 on compute capability 9."""
        return self.dtype == torch.bfloat16 and is_hopper(self.device)


def misfit(shape: LayerShape, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take these widths, None where they can: the copy engine wants whole 16-byte units."""
    unit = 16 // dtype.itemsize
    for name, width in (("hidden", shape.hidden), ("ffn", shape.ffn)):
        if width % unit:
            return f"{name} must be a multiple of {unit} for kernels in {dtype}, found {width}"
    return None


class FusedLayer:
    """The launches of one layer over a workspace; its slabs never move.

    `batch_invariant`: a row's result has the same bits whatever else is in the batch, wherever experts lie.
    """

    def __init__(
        self, slabs: Slabs, workspace: Workspace, *, batch_invariant: bool = False, tiling: Tiling | None = None
    ) -> None:
        self.slabs, self.workspace, self._invariant, self._tiling = slabs, workspace, batch_invariant, tiling
        self._descriptors: dict[tuple[str, Any], Any] = {}

    def __call__(self, hidden_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, slots_E: Tensor, out_TD: Tensor) -> None:
        """Write the layer's output for T tokens to `out_TD` [T, D].

        `ids_TK` are logical experts, int32 or int64; one outside [0, E) is nobody's route and adds nothing. `slots_E`
        int32 is the generation's table: each expert's pool slot. Raises `ConfigError` for more tokens than the
        workspace has room for.
        """
        num_tokens, slabs, workspace = hidden_TD.shape[0], self.slabs, self.workspace
        if num_tokens > workspace.max_tokens:
            raise ConfigError(f"a layer takes at most {workspace.max_tokens} tokens here, found {num_tokens}")
        if ids_TK.shape != (num_tokens, workspace.shape.top_k):
            wanted = [num_tokens, workspace.shape.top_k]
            raise ConfigError(f"ids must be {wanted} for these rows and this workspace, found {list(ids_TK.shape)}")
        if num_tokens == 0:
            return
        tiling = self.tiling_of(num_tokens)
        if isinstance(tiling, DecodeTile):
            decode_layer.decode_layer(
                hidden_TD, ids_TK, gates_TK, slots_E, self._weights("gate_up", tiling), self._weights("down", tiling),
                slabs.activation, tiling, workspace.decode[tiling], out_TD,
            )  # fmt: skip
        elif isinstance(tiling, GemvTile):
            gemv_layer(
                hidden_TD, ids_TK, gates_TK, slots_E, slabs.gate_up, slabs.down, slabs.gate_up_bias, slabs.down_bias,
                slabs.activation, tiling, workspace.gemv[tiling], out_TD,
            )  # fmt: skip
        else:
            self.route(ids_TK, tiling)
            self.gate_up(hidden_TD, slots_E, tiling)
            self.down(num_tokens, slots_E, tiling)
            combine(workspace.rows_RD, workspace.maps[tiling.rows].position_N, gates_TK, workspace.shape.top_k, out_TD)

    def experts(
        self, hidden_TD: Tensor, ids_TK: Tensor, slots_E: Tensor, rows_RD: Tensor | None = None,
        position_N: Tensor | None = None, home: tuple[Tensor, int, int] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The experts' results of all routes, before any gate, by the tiles of the batch-invariant mode.

        Returns rows [T * K, D], expert-major, and where route n's lies, int32 [T * K], -1 where it is nobody's: in the
        workspace, or where they are wanted. With `home` (`Home`'s windows, routes and offset) results go there instead.
        """
        shape, workspace, routes = self.workspace.shape, self.workspace, ids_TK.numel()
        tiling = self._tiling or choose(hidden_TD.shape[0], shape, workspace.hopper, batch_invariant=True)
        assert isinstance(tiling, GroupedTiles)
        maps = workspace.maps[tiling.rows]
        if position_N is not None:
            maps = replace(maps, position_N=position_N)
        if rows_RD is None:
            # With a home nothing is written here: launches read the shape and dtype.
            nowhere = workspace.acts_RF[:1, :1].expand(routes, shape.hidden)
            rows_RD = workspace.rows_RD[:routes] if home is None else nowhere
        route(ids_TK.view(-1), shape.num_experts, maps)
        self.gate_up(hidden_TD, slots_E, tiling)
        self.down(hidden_TD.shape[0], slots_E, tiling, rows_RD, None if home is None else Home(maps.source_N, *home))
        return rows_RD, maps.position_N

    def tiling_of(self, num_tokens: int) -> Tiling:
        """How so many tokens are run."""
        workspace = self.workspace
        if self._tiling is not None:
            return self._tiling
        chosen = choose(num_tokens, workspace.shape, workspace.hopper, self._invariant)
        if isinstance(chosen, DecodeTile) and self.slabs.down_bias is not None:  # it adds none
            return choose(num_tokens, workspace.shape, workspace.hopper, batch_invariant=True)
        return chosen

    @property
    def memory(self) -> tuple[int, ...]:
        """What captured launches hold of this layer."""
        return (id(self.workspace), self.slabs.gate_up.data_ptr(), self.slabs.down.data_ptr())

    def compile(self) -> None:
        """Run every way that the tables have for up to `max_tokens` tokens once, with routes that are nobody's."""
        workspace, shape = self.workspace, self.workspace.shape
        slots_E = torch.zeros(shape.num_experts, dtype=torch.int32, device=workspace.device)
        for num_tokens in sizes_to_compile(shape, workspace.max_tokens):
            rows_TD = torch.zeros(num_tokens, shape.hidden, dtype=workspace.dtype, device=workspace.device)
            ids_TK = torch.full((num_tokens, shape.top_k), -1, device=workspace.device)
            self(rows_TD, ids_TK, torch.zeros(ids_TK.shape, device=workspace.device), slots_E, rows_TD)

    # -- The four launches of many tokens, apart so that a benchmark can time each

    def route(self, ids_TK: Tensor, tiling: GroupedTiles) -> None:
        route(ids_TK.view(-1), self.workspace.shape.num_experts, self.workspace.maps[tiling.rows])

    def gate_up(self, hidden_TD: Tensor, slots_E: Tensor, tiling: GroupedTiles) -> None:
        workspace, slabs, tile = self.workspace, self.slabs, tiling.gate_up
        maps, top_k = workspace.maps[tiling.rows], workspace.shape.top_k
        acts_RF = workspace.acts_RF[: hidden_TD.shape[0] * top_k]
        grouped_gemm.gate_up_swiglu(
            hidden_TD, maps.source_N, top_k, maps.tiles, slots_E, self._weights("gate_up", tile), slabs.gate_up_bias,
            slabs.activation, tile, acts_RF,
        )  # fmt: skip

    def down(
        self,
        num_tokens: int,
        slots_E: Tensor,
        tiling: GroupedTiles,
        rows_RD: Tensor | None = None,
        home: Home | None = None,
    ) -> None:
        workspace, bias, tile = self.workspace, self.slabs.down_bias, tiling.down
        rows = num_tokens * workspace.shape.top_k
        acts_RF = workspace.acts_RF[:rows]
        rows_RD = workspace.rows_RD[:rows] if rows_RD is None else rows_RD
        tiles, weights = workspace.maps[tiling.rows].tiles, self._weights("down", tile)
        if isinstance(tile, WarpTile):
            acts = self._descriptor("acts", tile, partial(warp_gemm.rows_descriptor, workspace.acts_RF))
            warp_gemm.down_product(acts, tiles, slots_E, weights, bias, None, tile, rows_RD, home)
        else:
            grouped_gemm.down_product(acts_RF, tiles, slots_E, weights, bias, None, tile, rows_RD, home)

    def _weights(self, name: str, tile: Tile | WarpTile | DecodeTile) -> Any:
        slab = getattr(self.slabs, name)
        if isinstance(tile, DecodeTile):
            build = partial(decode_layer.weights_descriptor, slab)
        elif isinstance(tile, WarpTile):
            build = partial(warp_gemm.down_descriptor, slab)
        else:
            build = partial(getattr(grouped_gemm, f"{name}_descriptor"), slab, tile)
        return self._descriptor(name, tile, build)

    def _descriptor(self, name: str, tile: Any, build: Callable[[], Any]) -> Any:
        """Built when first asked for: their making costs the host microseconds."""
        key = (name, tile)
        if key not in self._descriptors:
            self._descriptors[key] = build()
        return self._descriptors[key]
