"""The pinned EPLB solver (specification 0x08C to 0x08E): the same maps as the reference with its sort made stable.

Pure: a load matrix in, four maps out. Three stages, each for all layers at once: groups of experts to nodes, further
copies within each node, copies to GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_moe.controlplane.packing import Float32, Int64, pack, replicate
from ray_moe.errors import ConfigError

Policy = Literal["auto", "hierarchical", "global"]
SOLVER_REVISION = "d52c72d5b2f2fb4c41afbf8eb21366820239913d"  # of the reference whose maps these are
TIE_RULE = (
    "copies: lowest expert among the largest load / copies; packing: heaviest first, equal weights by ascending index, "
    "to the lowest pack among the lightest with room; one item per pack: identity; arithmetic: float32; "
    f"reference: {SOLVER_REVISION[:8]}"
)
_MAX_TOTAL = float(np.finfo(np.float32).max) / 2  # no sum of a layer's loads overflows, however it is rounded


@dataclass(frozen=True, eq=False)
class ExpertMaps:
    """Where the copies of every layer's experts stand (specification 0x08C3).

    `phy2log_LS` is the expert of each slot, `phyrank_LS` its number among that expert's copies, `logcnt_LE` the copies
    of each expert. The inverse is in offsets and values: the slots of layer l, expert e, by copy number, are
    `log2phy_values_LS[l, offsets[l, e]:offsets[l, e + 1]]`. All int64. `tie_rule` says how equal loads were decided.
    """

    phy2log_LS: Int64
    phyrank_LS: Int64
    logcnt_LE: Int64
    log2phy_offsets_L_E1: Int64
    log2phy_values_LS: Int64
    tie_rule: str = TIE_RULE

    @staticmethod
    def of(phy2log_LS: Int64, phyrank_LS: Int64, logcnt_LE: Int64, tie_rule: str = TIE_RULE) -> ExpertMaps:
        """The maps and their inverse; every (expert, copy number) of a layer must occur once."""
        layers, slots = phy2log_LS.shape
        offsets = np.zeros((layers, logcnt_LE.shape[1] + 1), np.int64)
        np.cumsum(logcnt_LE, axis=1, out=offsets[:, 1:])
        layer_L1 = np.arange(layers)[:, None]
        at = offsets.ravel()[phy2log_LS + layer_L1 * offsets.shape[1]]
        at += phyrank_LS
        at += layer_L1 * slots
        values = np.empty((layers, slots), np.int64)
        values.ravel()[at] = np.arange(slots)
        return ExpertMaps(phy2log_LS, phyrank_LS, logcnt_LE, offsets, values, tie_rule)

    def padded_log2phy(self) -> Int64:
        """[L, E, C], C the most copies of any expert in any layer: slots by copy number, -1 where there is none."""
        layers, experts = self.logcnt_LE.shape
        padded = np.full((layers, experts, int(self.logcnt_LE.max())), -1, np.int64)
        layer = np.arange(layers)[:, None]
        padded[layer, self.phy2log_LS, self.phyrank_LS] = np.arange(self.phy2log_LS.shape[1])
        return padded


def rebalance(
    loads_LE: ArrayLike, num_slots: int, num_groups: int, num_nodes: int, num_gpus: int, policy: Policy = "auto"
) -> ExpertMaps:
    """The reference's maps for [L, E] loads (any unit, >= 0, rounded to float32 as there).

    `auto` is hierarchical where the groups divide evenly over the nodes, and global otherwise: one group on one node.
    Slots are dealt to GPUs contiguously, num_slots / num_gpus each. Raises `ConfigError` naming value and bound for
    loads that are negative, not finite or beyond float32, and for counts that do not divide as the reference asserts.
    """
    loads = _checked(loads_LE)
    layers, experts = loads.shape
    if policy == "global" or (policy == "auto" and num_nodes > 0 and num_groups % num_nodes):
        groups, nodes = 1, 1
    else:
        groups, nodes = num_groups, num_nodes
    _check_counts(experts, num_slots, groups, nodes, num_gpus, policy)

    # Groups to nodes; from here on experts are in the order of their nodes ("m").
    size = experts // groups
    mlog2log = None
    if groups > nodes:
        # Summed in float64 and rounded once: in which order the reference sums is its library's choice.
        running_LGE = np.cumsum(loads.reshape(layers, groups, size), axis=2, dtype=np.float64)
        group_LG = pack(np.asarray(running_LGE[..., -1], np.float32), nodes) - (np.arange(layers) * groups)[:, None]
        mlog2log = (group_LG[:, :, None] * size + np.arange(size)).reshape(layers, experts)
        loads = np.take_along_axis(loads, mlog2log, axis=1)

    # Copies within each node, then copies to its GPUs: a row is one node of one layer.
    loads_NE = loads.reshape(layers * nodes, experts // nodes)
    copies = replicate(loads_NE, num_slots // nodes)
    share_NE = np.divide(loads_NE, copies.logcnt_NE, dtype=np.float32)
    held_NS = pack(share_NE.ravel()[copies.expert_NS], num_gpus // nodes)

    expert_LS = copies.expert_NS.ravel()[held_NS].reshape(layers, num_slots)
    phyrank_LS = copies.phyrank_NS.ravel()[held_NS].reshape(layers, num_slots)
    logcnt_LE = copies.logcnt_NE.reshape(layers, experts)
    base_L1 = (np.arange(layers) * experts)[:, None]
    if mlog2log is None:
        return ExpertMaps.of(expert_LS - base_L1, phyrank_LS, logcnt_LE)
    by_expert_LE = np.empty_like(logcnt_LE)
    np.put_along_axis(by_expert_LE, mlog2log, logcnt_LE, axis=1)
    return ExpertMaps.of(mlog2log.ravel()[expert_LS], phyrank_LS, by_expert_LE)


def require_reproduced(maps: ExpertMaps, again: ExpertMaps) -> None:
    """Whether maps are what the solver gives again for the same loads and counts, under the tie rule stored with them.

    Raises `ConfigError` naming the two tie rules, or the first layer whose copies or order differ.
    """
    if maps.tie_rule != again.tie_rule:
        raise ConfigError(f"the maps were solved under the tie rule {maps.tie_rule!r}, this one is {again.tie_rule!r}")
    for name in ("logcnt_LE", "phy2log_LS", "phyrank_LS"):
        old, new = getattr(maps, name), getattr(again, name)
        if old.shape != new.shape:
            raise ConfigError(f"{name}: the maps have {list(old.shape)}, solving again gives {list(new.shape)}")
        if (old != new).any():
            raise ConfigError(f"{name}: layer {np.argwhere(old != new)[0, 0]} differs from what solving again gives")


def rank_loads(loads_LE: ArrayLike, maps: ExpertMaps, num_gpus: int) -> NDArray[np.float64]:
    """[L, G] ideal loads, in the unit of `loads_LE`: a slot carries its expert's load / copies (specification 0x08C3).

    Slots belong to GPUs contiguously, S / G each; raises `ConfigError` where they do not divide.
    """
    loads = np.asarray(loads_LE, np.float64)
    layers, slots = maps.phy2log_LS.shape
    if loads.shape != maps.logcnt_LE.shape:
        raise ConfigError(f"loads must be [layers, experts] = {list(maps.logcnt_LE.shape)}, found {list(loads.shape)}")
    if num_gpus < 1 or slots % num_gpus:
        raise ConfigError(f"num_gpus must divide the {slots} slots, found {num_gpus}")
    share_LS = np.take_along_axis(loads / maps.logcnt_LE, maps.phy2log_LS, axis=1)
    return share_LS.reshape(layers, num_gpus, -1).sum(axis=2)


def imbalance(rank_loads_LG: ArrayLike) -> NDArray[np.float64]:
    """[L]: largest over mean rank load (Gamma of specification 0x08D), 1.0 for a layer without load."""
    loads = np.asarray(rank_loads_LG, np.float64)
    mean_L = loads.mean(axis=1)
    idle_L = mean_L == 0
    return np.where(idle_L, 1.0, loads.max(axis=1) / np.where(idle_L, 1.0, mean_L))


# -- Checks


def matrix(loads_LE: ArrayLike) -> NDArray[np.float64]:
    """Loads as float64 [L, E]; raises `ConfigError` for anything but a rectangle of numbers that is not empty."""
    try:
        given = np.asarray(loads_LE, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loads must be a rectangle of numbers: {error}") from error
    if given.ndim != 2 or 0 in given.shape:
        raise ConfigError(f"loads must be [layers, experts], both >= 1, found shape {list(given.shape)}")
    return given


def _checked(loads_LE: ArrayLike) -> Float32:
    given = matrix(loads_LE)
    with np.errstate(over="ignore", invalid="ignore"):
        loads = given.astype(np.float32) + np.float32(0)  # -0.0 becomes 0.0
        bad = ~((loads >= 0) & (loads < np.inf))
    if bad.any():
        layer, expert = np.argwhere(bad)[0]
        raise ConfigError(
            f"loads: layer {layer} expert {expert}: must be in [0, {np.finfo(np.float32).max}], "
            f"found {given[layer, expert]}"
        )
    total_L = loads.sum(axis=1, dtype=np.float64)
    if total_L.max() > _MAX_TOTAL:
        raise ConfigError(
            f"loads: layer {total_L.argmax()}: the sum must be <= {_MAX_TOTAL:.3g}, found {total_L.max():.3g}"
        )
    return loads


def _check_counts(experts: int, slots: int, groups: int, nodes: int, gpus: int, policy: str) -> None:
    if policy not in ("auto", "hierarchical", "global"):
        raise ConfigError(f"policy must be auto, hierarchical or global, found {policy!r}")
    for name, value in (("num_groups", groups), ("num_nodes", nodes), ("num_gpus", gpus)):
        if value < 1:
            raise ConfigError(f"{name} must be >= 1, found {value}")
    if slots < experts:
        raise ConfigError(f"num_slots must be >= the {experts} experts, found {slots}")
    for what, value, by, divisor in (
        ("the number of experts", experts, "num_groups", groups),
        ("num_groups", groups, "num_nodes", nodes),
        ("num_gpus", gpus, "num_nodes", nodes),
        ("num_slots", slots, "num_gpus", gpus),
    ):
        if value % divisor:
            raise ConfigError(f"{what} must be a multiple of {by} {divisor}, found {value}")
