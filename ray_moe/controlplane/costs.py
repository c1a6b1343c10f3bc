"""What a step takes by a stated model: predicted seconds of rank loads, never a measurement (specification 0x02D).

A rank's time in one layer is `kernel + dispatch + combine`, and a layer is over when its slowest rank is:

  kernel    = kernel_fixed + sum over its slots of max(weight bytes / memory rate, FLOPs of padded rows / FLOP rate)
  dispatch  = exchange_fixed + max(bytes within the node / exchange rate, bytes between nodes / inter-node rate)
  combine   = the same back

so that equal rows need not mean equal times: a slot that is used at all reads its weights, and a segment is rounded up
to whole tiles. Letters: L layers, S slots, G ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.placed import Shape
from ray_moe.errors import ConfigError, EvidenceError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, order=True)
class Predicted:
    """Seconds that a cost model gives; no clock was read (`evidence.Elapsed`). Adds up with its own kind only."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < float("inf"):
            raise EvidenceError(f"predicted seconds must be finite and >= 0, found {self.seconds!r}")

    def __add__(self, other: Predicted) -> Predicted:
        if type(other) is not Predicted:
            raise EvidenceError(f"a prediction and {type(other).__name__} do not add up")
        return Predicted(self.seconds + other.seconds)


@dataclass(frozen=True)
class Constant:
    """A figure of a cost model and where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class CostModel:
    """The constants of one kind of GPU and its links; each is > 0, fractions are at most 1. `ConfigError`."""

    name: str
    flops_per_s: Constant
    memory_bytes_per_s: Constant
    compute_fraction: Constant
    memory_fraction: Constant
    kernel_fixed_s: Constant
    tile_rows: Constant
    exchange_fixed_s: Constant
    exchange_bytes_per_s: Constant
    inter_node_bytes_per_s: Constant
    peer_copy_bytes_per_s: Constant

    def __post_init__(self) -> None:
        for constant in CONSTANTS:
            value, bound = getattr(self, constant).value, 1 if constant.endswith("_fraction") else float("inf")
            if not 0 < value <= bound:
                raise ConfigError(f"{constant}: found {value}, must be in (0, {bound}]")


CONSTANTS = tuple(field.name for field in fields(CostModel) if field.name != "name")


@dataclass(frozen=True)
class ExpertShape:
    """A SwiGLU expert of hidden width D and FFN width F: 3 D F elements, 6 D F FLOPs a row; rows of D elements travel.

    Raises `ConfigError` naming the field, its value and its bound.
    """

    hidden: int
    ffn: int
    weight_bytes: float = 2
    row_bytes: float = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(f"{field.name}: found {getattr(self, field.name)}, must be > 0")

    @property
    def expert_bytes(self) -> int:
        """Parameter payload of one expert of one layer, without the metadata of any allocator or file."""
        return round(3 * self.hidden * self.ffn * self.weight_bytes)

    @property
    def flops_per_row(self) -> int:
        return 6 * self.hidden * self.ffn


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Predicted seconds [L, G] by term."""

    kernel_LG: Floats
    dispatch_LG: Floats
    combine_LG: Floats

    @property
    def barrier_L(self) -> Floats:
        """Of each layer's slowest rank, for which the others wait."""
        return (self.kernel_LG + self.dispatch_LG + self.combine_LG).max(axis=1)

    @property
    def step(self) -> Predicted:
        """All MoE layers, one after the other; attention and everything else of a step is not in it."""
        return Predicted(float(self.barrier_L.sum()))


def layer_times(rows_LS: Floats, shape: Shape, expert: ExpertShape, model: CostModel) -> LayerTimes:
    """Times of rows by slot. A rank receives its slots' rows from all ranks alike and sends an even share of all,
    each route as a row of its own. Raises `ConfigError` for another number of slots than `shape` has."""
    if rows_LS.ndim != 2 or rows_LS.shape[1] != shape.num_slots:
        raise ConfigError(f"rows must be [layers, {shape.num_slots} slots], found {list(rows_LS.shape)}")

    tile = model.tile_rows.value
    padded_LS = np.ceil(rows_LS / tile) * tile
    compute_LS = padded_LS * (expert.flops_per_row / (model.flops_per_s.value * model.compute_fraction.value))
    read = expert.expert_bytes / (model.memory_bytes_per_s.value * model.memory_fraction.value)
    kernel_LG = by_rank(np.where(rows_LS > 0, np.maximum(compute_LS, read), 0), shape)
    kernel_LG += model.kernel_fixed_s.value

    received_LG = by_rank(rows_LS, shape)
    sent_L1 = received_LG.mean(axis=1, keepdims=True)
    here_G = np.bincount(shape.node_of_rank_G)[shape.node_of_rank_G]  # ranks of the same node
    seconds_per_byte_G = np.maximum(
        (here_G - 1) / shape.num_ranks / model.exchange_bytes_per_s.value,
        (shape.num_ranks - here_G) / shape.num_ranks / model.inter_node_bytes_per_s.value,
    )
    exchange_LG = np.maximum(received_LG, sent_L1) * (expert.hidden * expert.row_bytes) * seconds_per_byte_G
    if shape.num_ranks > 1:
        exchange_LG += model.exchange_fixed_s.value
    return LayerTimes(kernel_LG, exchange_LG, exchange_LG)


def by_rank(values_LS: Floats, shape: Shape) -> Floats:
    """[L, G]: sums over the slots of each rank."""
    sums = np.zeros((len(values_LS), shape.num_slots + 1))
    np.cumsum(values_LS, axis=1, out=sums[:, 1:])
    ends = np.cumsum(shape.slots_by_rank)
    return sums[:, ends] - sums[:, ends - np.array(shape.slots_by_rank)]


def migration_time(arrivals_G: Ints, crosses_nodes: bool, expert: ExpertShape, model: CostModel) -> Predicted:
    """Until the rank with the most new copies has them all, one after the other over its slowest link in use."""
    rate = model.peer_copy_bytes_per_s.value
    if crosses_nodes:
        rate = min(rate, model.inter_node_bytes_per_s.value)
    return Predicted(int(arrivals_G.max(initial=0)) * expert.expert_bytes / rate)
