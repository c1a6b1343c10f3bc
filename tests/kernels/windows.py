"""Peers of one process whose windows are ordinary tensors, and what owners would compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ray_moe.kernels.reference_grouped import route_maps
from ray_moe.kernels.regions import Part, Regions
from ray_moe.kernels.window import CELL_WORDS, EPOCH_SHIFT, LIMIT, MINE, PEERS

HEARD = 1 << 60  # more than any flag that is waited for


@dataclass(eq=False)
class Peers:
    """P peers, each with a window, a cell and a place for failures, in epoch 1."""

    regions: Regions
    windows: list[Tensor]
    addresses_M: Tensor
    cells: list[Tensor]
    failures: list[Tensor]

    @staticmethod
    def make(num_peers: int, regions: Regions, device: torch.device, limit_ns: int = 10**9) -> Peers:
        windows = [torch.zeros(regions.nbytes, dtype=torch.uint8, device=device) for _ in range(num_peers)]
        addresses = [window.data_ptr() for window in windows] + [0] * (regions.max_peers - num_peers)
        cells = []
        for mine in range(num_peers):
            cell = torch.zeros(CELL_WORDS, dtype=torch.int64, device=device)
            cell[PEERS.value], cell[MINE.value], cell[LIMIT.value] = num_peers, mine, limit_ns
            cell[3:6] = 1 << EPOCH_SHIFT
            cells.append(cell)
        failures = [torch.zeros(3, dtype=torch.int64) for _ in range(num_peers)]
        return Peers(regions, windows, torch.tensor(addresses, device=device), cells, failures)

    def ids(self, peer: int, part: Part) -> Tensor:
        """What the window of `peer` has in the part's token slots [peers * C, K]."""
        regions = self.regions
        slots = regions.max_peers * regions.capacity
        whole = regions.view(self.windows[peer], regions.ids, torch.int32, slots, regions.top_k)
        return whole[part.first : part.first + part.tokens]

    def rows(self, peer: int, part: Part) -> Tensor:
        regions = self.regions
        whole = regions.view(
            self.windows[peer], regions.rows, regions.dtype, regions.max_peers * regions.capacity, regions.hidden
        )
        return whole[part.first : part.first + part.tokens]

    def compute(self, peer: int, part: Part, scale_E: Tensor, *, home: bool = False) -> None:
        """The owner's experts: expert e multiplies a row by `scale_E[e]`. Results lie expert-major, or go home."""
        regions = self.regions
        ids_N = self.ids(peer, part).reshape(-1).long()
        source_R, position_N, _ = route_maps(ids_N, len(scale_E))
        slots = regions.max_peers * regions.capacity * regions.top_k
        results = regions.view(self.windows[peer], regions.results, regions.dtype, slots, regions.hidden)
        positions = regions.view(self.windows[peer], regions.positions, torch.int32, slots)
        if home:
            routes = part.capacity * regions.top_k
            for n in (ids_N >= 0).nonzero().flatten().tolist():
                origin = regions.view(self.windows[n // routes], regions.results, regions.dtype, slots, regions.hidden)
                row_D = self.rows(peer, part)[n // regions.top_k] * scale_E[ids_N[n]].to(regions.dtype)
                origin[part.start * regions.top_k + n % routes] = row_D
            return
        start = part.first * regions.top_k
        rows_RD = self.rows(peer, part)[source_R.long() // regions.top_k]
        results[start : start + len(source_R)] = rows_RD * scale_E[ids_N[source_R.long()]][:, None].to(regions.dtype)
        positions[start : start + len(position_N)] = position_N.int()

    def hear_everybody(self) -> None:
        """Flags as they are once every peer has told."""
        for window in self.windows:
            for region in (self.regions.arrived, self.regions.ready):
                self.regions.view(window, region, torch.int64, self.regions.max_peers).fill_(HEARD)
