"""The EPLB solver beside a transcription of the pinned reference (commit d52c72d5) in the library that it uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ray_moe.bench.report import Row
from ray_moe.controlplane.eplb import imbalance, rank_loads, rebalance

# layers, experts, slots, groups, nodes, GPUs
SHAPES = (
    (48, 128, 160, 8, 1, 8),
    (58, 256, 288, 8, 1, 8),
    (58, 256, 288, 8, 4, 32),
    (61, 256, 320, 8, 1, 32),
    (61, 256, 320, 8, 4, 32),
    (58, 256, 4096, 8, 128, 1024),
    (58, 256, 5120, 8, 128, 1024),
)
REPEATS, SLOW_ABOVE = 20, 1024  # repetitions of the solver; the transcription runs once, up to so many slots
SEED = 0
T = TypeVar("T")


def run() -> list[Row]:
    """One row per shape: milliseconds from the load matrix to all four maps, best of some for ours, one for the other.

    Loads are Gamma(0.5). `equal` is whether both gave the same maps; left out where the transcription takes minutes.
    """
    torch.set_num_threads(1)
    rows: list[Row] = []
    for layers, experts, slots, groups, nodes, gpus in SHAPES:
        loads = np.random.default_rng(SEED).gamma(0.5, size=(layers, experts)) * 1000
        maps, solve_ms = _best(lambda: rebalance(loads, slots, groups, nodes, gpus), REPEATS)  # noqa: B023
        row: dict[str, Any] = {
            "layers": layers,
            "experts": experts,
            "slots": slots,
            "nodes": nodes,
            "gpus": gpus,
            "solve_ms": solve_ms,
            "imbalance": float(imbalance(rank_loads(loads, maps, gpus)).mean()),
        }
        if slots <= SLOW_ABOVE:
            theirs, reference_ms = _best(lambda: reference_maps(loads, slots, groups, nodes, gpus), 1)  # noqa: B023
            ours = (maps.phy2log_LS, maps.phyrank_LS, maps.logcnt_LE, maps.padded_log2phy())
            row["transcription_ms"], row["ratio"] = reference_ms, reference_ms / solve_ms
            row["equal"] = all(np.array_equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
        rows.append(row)
    return rows


def _best(call: Callable[[], T], repeats: int) -> tuple[T, float]:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - started)
    return result, best * 1e3


# -- The transcription: what the reference does, as it does it, with a stable sort


def reference_maps(
    loads_LE: NDArray[np.float64], num_slots: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[NDArray[np.int64], ...]:
    """phy2log, phyrank, logcnt and the padded log2phy."""
    loads = torch.from_numpy(loads_LE).float()
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    phy2log, phyrank, logcnt = _hierarchical(loads, num_slots, num_groups, num_nodes, num_gpus)
    width = int(logcnt.max())
    log2phy = torch.full((*loads.shape, width), -1)
    slots = torch.arange(num_slots).expand(phy2log.shape)
    log2phy.view(len(loads), -1).scatter_(-1, phy2log * width + phyrank, slots)
    return phy2log.numpy(), phyrank.numpy(), logcnt.numpy(), log2phy.numpy()


def _hierarchical(loads: Tensor, slots: int, groups: int, nodes: int, gpus: int) -> tuple[Tensor, Tensor, Tensor]:
    layers, experts = loads.shape
    size, groups_per_node, slots_per_gpu = experts // groups, groups // nodes, slots // gpus

    node, place = _balanced_packing(loads.unflatten(-1, (groups, size)).sum(-1), nodes)
    first = (node * groups_per_node + place) * size
    log2mlog = (first.unsqueeze(-1) + torch.arange(size)).flatten(-2)
    mlog2log = _inverse(log2mlog)

    local = loads.gather(-1, mlog2log).view(-1, experts // nodes)
    phy2mlog, phyrank, mlogcnt = _replicate_experts(local, slots // nodes)

    gpu, place = _balanced_packing((local / mlogcnt).gather(-1, phy2mlog), gpus // nodes)
    pphy2phy = _inverse(gpu * slots_per_gpu + place)
    pphy2mlog = phy2mlog.gather(-1, pphy2phy).view(layers, nodes, -1)
    pphy2mlog = (pphy2mlog + torch.arange(0, experts, experts // nodes).view(1, -1, 1)).flatten(-2)
    phy2log = mlog2log.gather(-1, pphy2mlog)
    return phy2log, phyrank.gather(-1, pphy2phy).view(layers, -1), mlogcnt.view(layers, -1).gather(-1, log2mlog)


def _balanced_packing(weights: Tensor, packs: int) -> tuple[Tensor, Tensor]:
    rows, items = weights.shape
    room = items // packs
    if room == 1:
        return torch.arange(items).expand(rows, items), torch.zeros(rows, items, dtype=torch.int64)
    order = weights.sort(dim=-1, descending=True, stable=True).indices
    pack, place = torch.full((rows, items), -1), torch.full((rows, items), -1)
    for row in range(rows):
        load, held = [torch.tensor(0.0)] * packs, [0] * packs
        for item in order[row]:
            chosen = min((p for p in range(packs) if held[p] < room), key=load.__getitem__)
            pack[row, item], place[row, item] = chosen, held[chosen]
            load[chosen] = load[chosen] + weights[row, item]
            held[chosen] += 1
    return pack, place


def _replicate_experts(weights: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, experts = weights.shape
    phy2log = torch.arange(slots).repeat(rows, 1)
    phyrank = torch.zeros(rows, slots, dtype=torch.int64)
    logcnt, row = torch.ones(rows, experts, dtype=torch.int64), torch.arange(rows)
    for slot in range(experts, slots):
        chosen = (weights / logcnt).max(dim=-1).indices
        phy2log[:, slot] = chosen
        phyrank[:, slot] = logcnt[row, chosen]
        logcnt[row, chosen] += 1
    return phy2log, phyrank, logcnt


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    return inverse.scatter_(1, permutation, torch.arange(permutation.shape[1]).expand(permutation.shape))
