"""What a rebalance would take, before anybody asks for it: waves, copies, bytes, memory, balance. Pure.

The plan is the one that the reconciler would make of the same target and the same active generation; an operation that
changes the placement in between leads to another one. Letters: L layers, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.elastic import Loads
from ray_moe.controlplane.eplb import imbalance
from ray_moe.controlplane.migrate import Pools, plan_migration
from ray_moe.controlplane.occupancy import Held, Occupancy
from ray_moe.controlplane.operations import ByLoads, Kind, Operation, Stage, Target
from ray_moe.controlplane.publication import Storage, plan_waves
from ray_moe.placement import PlacementSnapshot


@dataclass(frozen=True)
class LayerPreview:
    """One layer: slots of the new placement, those of them that are filled anew, and slots that are freed.

    `balance_before` and `balance_after` are largest over mean ideal rank load; None where the demand is not known.
    """

    layer: int
    slots: int
    moved: int
    freed: int
    balance_before: float | None
    balance_after: float | None


@dataclass(frozen=True)
class Preview:
    """`copies` and `payload_bytes` by class of source (`ray_moe.controlplane.sources.CopyClass`), whole experts.

    Resident bytes are those of pool slots on all ranks, each slot counted once: now, at the most, and in the end.
    """

    generation: int  # the active one, from which it was computed
    waves: int
    copies: Mapping[str, int]
    payload_bytes: Mapping[str, int]
    resident_bytes: int
    peak_resident_bytes: int
    target_resident_bytes: int
    layers: tuple[LayerPreview, ...]


def preview(target: Target, active: PlacementSnapshot, storage: Storage, loads_LE: Loads | None = None) -> Preview:
    """What bringing `active` to `target` over the same ranks takes. Nothing is changed.

    `loads_LE` is the demand, rows in the order of the layers; that of a `ByLoads` target goes before it. Raises
    `PlacementError` and `ConfigError` as `plan_waves` does.
    """
    if isinstance(target, ByLoads):
        loads_LE = target.loads_LE
    operation = Operation(0, Kind.REBALANCE, "", "", 0.0, Stage.QUEUED, target=target, loads_LE=loads_LE)
    waves = plan_waves(operation, active, storage, active.topology)
    prior = Occupancy.of(active)
    final = waves[-1].occupancy if waves else prior
    # Once more from its two ends: the waves say what each generation holds, the plan also where copies come from.
    pools = Pools(
        node_of_rank={rank.value: domain for rank, domain in active.topology.owner.items()},
        capacity_of_rank={rank.value: storage.capacity for rank in active.topology.owner},
        expert_bytes={placement.layer: storage.expert_bytes for placement in active.layers},
    )
    plan = plan_migration(prior, final.wanted(), pools)
    moved = Counter(copy.slot.layer for wave in plan.waves for copy in wave.copies)
    freed = Counter(slot.layer for wave in plan.waves for slot, _ in wave.retired)
    ranks = tuple(rank.value for rank in active.group.peers)
    layers = []
    for at, placement in enumerate(active.layers):
        layer, loads_E = placement.layer, None if loads_LE is None else loads_LE[at]
        layers.append(
            LayerPreview(
                layer=layer,
                slots=len(final.layers[layer]),
                moved=moved[layer],
                freed=freed[layer],
                balance_before=_balance(prior.layers[layer], ranks, loads_E),
                balance_after=_balance(final.layers[layer], ranks, loads_E),
            )
        )
    return Preview(
        generation=active.generation,
        waves=len(waves),
        copies={str(kind): count for kind, count in plan.ledger.copies.items()},
        payload_bytes={str(kind): amount.value for kind, amount in plan.ledger.payload.items()},
        resident_bytes=plan.ledger.prior_resident.value,
        peak_resident_bytes=plan.ledger.peak_resident.value,
        target_resident_bytes=plan.ledger.target_resident.value,
        layers=tuple(layers),
    )


def _balance(held: tuple[Held, ...], ranks: tuple[int, ...], loads_E: NDArray[np.float64] | None) -> float | None:
    if loads_E is None:
        return None
    copies = Counter(slot.expert for slot in held)
    load: dict[int, float] = dict.fromkeys(ranks, 0.0)
    for slot in held:
        load[slot.rank] += float(loads_E[slot.expert]) / copies[slot.expert]
    return float(imbalance([list(load.values())])[0])
