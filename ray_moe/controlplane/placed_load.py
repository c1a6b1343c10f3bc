"""How a placement stands to a demand, small enough for metrics: by groups of layers, and by the hottest experts. Pure.

Letters: L layers, E logical experts, S physical slots, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.eplb import imbalance
from ray_moe.placement import LayerPlacement, PlacementSnapshot

# Groups of consecutive layers, layers whose hottest experts are shown, and how many of them.
GROUPS, LAYERS_SHOWN, HOTTEST = 8, 8, 4
# In place of an expert: all that are not shown.
OTHERS = "other"

Floats = NDArray[np.float64]


def groups(layers: Sequence[int]) -> dict[str, range]:
    """Positions of consecutive layers, in at most `GROUPS` groups of one size (the last may be smaller), by name:
    `0-7`, or `5` for one layer."""
    size = max(1, -(-len(layers) // GROUPS))
    spans = [range(start, min(start + size, len(layers))) for start in range(0, len(layers), size)]
    return {f"{layers[span[0]]}-{layers[span[-1]]}" if len(span) > 1 else str(layers[span[0]]): span for span in spans}


def copies_by_group(placement: PlacementSnapshot) -> dict[tuple[str, ...], float]:
    """(group, `min`, `mean` or `max`) -> copies of an expert in its layers."""
    found: dict[tuple[str, ...], float] = {}
    for name, span in groups([layer.layer for layer in placement.layers]).items():
        copies = np.concatenate([_copies(placement.layers[at]) for at in span])
        found |= {(name, "min"): float(copies.min()), (name, "mean"): float(copies.mean())}
        found[name, "max"] = float(copies.max())
    return found


def imbalance_by_group(placement: PlacementSnapshot, loads_LE: Floats) -> dict[tuple[str, ...], float]:
    """Group -> the fullest rank's load over the mean in its worst layer, an expert's load split evenly over its
    copies; a layer without load is even. `loads_LE` has the placement's layers in their order."""
    ranks = {rank.value: at for at, rank in enumerate(placement.group.peers)}
    rows = np.zeros((len(placement.layers), len(ranks)))
    for at, layer in enumerate(placement.layers):
        rank_S = np.array([ranks[rank] for rank in layer.physical_rank])
        share_E = loads_LE[at] / _copies(layer)
        rows[at] = np.bincount(rank_S, weights=share_E[np.array(layer.phy2log)], minlength=len(ranks))
    worst = imbalance(rows)
    return {
        (name,): float(max(worst[at] for at in span))
        for name, span in groups([layer.layer for layer in placement.layers]).items()
    }


def hottest(placement: PlacementSnapshot, loads_LE: Floats) -> dict[tuple[str, ...], float]:
    """(layer, expert) -> its share of the layer's load, of the hottest experts and of all `other` together, in layers
    evenly spread; nothing of a layer without load."""
    shares: list[tuple[str, dict[int, float]]] = []
    for at in sorted(set(np.linspace(0, len(loads_LE) - 1, LAYERS_SHOWN).round().astype(int).tolist())):
        whole = float(loads_LE[at].sum())
        if whole:
            experts = np.argsort(-loads_LE[at], kind="stable")[:HOTTEST].tolist()
            layer = str(placement.layers[at].layer)
            shares.append((layer, {expert: float(loads_LE[at][expert]) / whole for expert in experts}))
    # First what there always is, then the hottest of every layer: where not all find room, no layer is left out whole.
    found: dict[tuple[str, ...], float] = {
        (layer, OTHERS): max(0.0, 1.0 - sum(of_layer.values())) for layer, of_layer in shares
    }
    for place in range(HOTTEST):
        for layer, of_layer in shares:
            found |= {(layer, str(expert)): share for expert, share in list(of_layer.items())[place : place + 1]}
    return found


def _copies(layer: LayerPlacement) -> NDArray[np.int64]:
    """[E]"""
    return np.diff(np.array(layer.log2phy_offsets))
