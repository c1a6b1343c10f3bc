"""What placement is solved for: loads of experts with their origin (specification 0x08A).

Pure. Letters: L layers, E experts, S slots, G GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_moe.controlplane.eplb import ExpertMaps, matrix, rank_loads
from ray_moe.errors import ConfigError
from ray_moe.identity import CheckpointVersion, PlacementVersion

Floats = NDArray[np.float64]
Phase = Literal["prefill", "decode", "mixed"]
ACCEPTED_ROWS, ASSUMED_ROUTES = "accepted_rows", "routes (assumed)"


@dataclass(frozen=True)
class Provenance:
    """Where loads come from (specification 0x08A). Empty text and None mean that it is not known.

    `window` is how many observations are in it and [start, end) the iterations they cover. `lag` is how many iterations
    before `end` the loads describe on average, by whole observations; below zero for a prediction. `cadence` is the
    iterations from one renewal to the next.
    """

    unit: str = ""
    window: int = 1
    phase: Phase | None = None
    aggregation: str = ""
    router_version: str = ""
    checkpoint_version: CheckpointVersion | None = None
    topology_version: str = ""
    placement_version: PlacementVersion | None = None
    start: int | None = None
    end: int | None = None
    lag: float = 0.0
    cadence: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"window must be >= 1 observation, found {self.window}")
        if self.start is not None and self.end is not None and not self.start < self.end:
            raise ConfigError(f"start must be before end, found [{self.start}, {self.end})")

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the fields that are not known, of those that say which workload this is."""
        return tuple(name for name in _REQUIRED if getattr(self, name) in ("", None))


_REQUIRED = (
    *("unit", "phase", "aggregation", "router_version", "checkpoint_version"),
    *("topology_version", "placement_version", "start", "end"),
)


@dataclass(frozen=True, eq=False)
class Demand:
    """`loads_LE`, float64 [L, E], finite and >= 0, in the provenance's unit; a read-only copy of what was given."""

    loads_LE: Floats
    provenance: Provenance

    def __post_init__(self) -> None:
        loads = matrix(self.loads_LE).copy()
        bad = ~((loads >= 0) & (loads < np.inf))
        if bad.any():
            layer, expert = (int(at) for at in np.argwhere(bad)[0])
            raise ConfigError(
                f"loads: layer {layer} expert {expert}: must be finite and >= 0, found {loads[layer, expert]}"
            )
        loads.flags.writeable = False
        object.__setattr__(self, "loads_LE", loads)

    @staticmethod
    def stamped(loads_LE: ArrayLike, name: str, sha256: str) -> Demand:
        """Loads of a bare file: its name and digest are all that is known, and that they are routes is assumed."""
        source = f"{name} sha256:{sha256}"
        return Demand(matrix(loads_LE), Provenance(unit=ASSUMED_ROUTES, aggregation="as given", source=source))


def require(demand: Demand, checkpoint_version: CheckpointVersion) -> None:
    """Let only evidence about the running model decide: `ConfigError` for missing provenance or another checkpoint."""
    origin = demand.provenance
    if origin.missing:
        raise ConfigError(f"demand {origin.source or 'matrix'} lacks provenance: {', '.join(origin.missing)}")
    if origin.checkpoint_version != checkpoint_version:
        raise ConfigError(f"demand is of checkpoint {origin.checkpoint_version}, the model is {checkpoint_version}")


# -- What a placement would make of it


@dataclass(frozen=True, eq=False)
class IdealLoads:
    """What slots [L, S] and ranks [L, G] carry if every expert's load splits evenly over its copies, in `unit`.

    An ideal, not traffic: which copy a route takes is the replica policy's choice. Rows are not time either; seconds
    come from a cost model (`costs.layer_times` of the slots' rows), with kernel, dispatch and combine apart.
    """

    slot_LS: Floats
    rank_LG: Floats
    unit: str


def ideal_loads(demand: Demand, maps: ExpertMaps, num_gpus: int) -> IdealLoads:
    """Raises `ConfigError` where demand and maps differ in shape or GPUs do not divide the slots."""
    rank_LG = rank_loads(demand.loads_LE, maps, num_gpus)
    share_LE = demand.loads_LE / maps.logcnt_LE
    slot_LS = np.take_along_axis(share_LE, maps.phy2log_LS, axis=1)
    return IdealLoads(slot_LS, rank_LG, f"ideal {demand.provenance.unit}")
