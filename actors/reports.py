"""What the controller tells others: a directory for clients, a status for people. Frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ray.actor import ActorHandle

from ray_moe.actors.bringup import phase_backends
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.generations import GenerationStatus
from ray_moe.engine.records import EngineStatus, ModelFacts
from ray_moe.placement import PlacementSnapshot


@dataclass(frozen=True)
class Directory:
    """What a client needs to talk to the cluster: who the peers are and which model they run."""

    config: ClusterConfig
    model_path: Path
    facts: ModelFacts
    peers: tuple[ActorHandle, ...]


@dataclass(frozen=True)
class SlotRow:
    """One physical slot, for people."""

    layer: int
    slot: str
    expert: int
    replica: str
    rank: int
    pool_slot: int


@dataclass(frozen=True)
class ClusterStatus:
    """What `ray-moe status` shows. `peers` holds the engines that answered, `lost` the ranks that are dead.

    `backends` says by phase what executes its units.
    """

    name: str
    state: str
    model: str
    release_id: str
    generation: int
    epoch: int
    group: str
    transport: str
    runner: str
    strategy: str
    payload: str
    gate_location: str
    contract: str | None
    backends: dict[str, str]
    policy: str
    peers: tuple[EngineStatus, ...]
    lost: tuple[int, ...]
    generations: tuple[GenerationStatus, ...]
    slots: tuple[SlotRow, ...]


def cluster_status(
    config: ClusterConfig,
    state: str,
    active: PlacementSnapshot,
    generations: tuple[GenerationStatus, ...],
    peers: tuple[EngineStatus, ...],
    lost: tuple[int, ...],
) -> ClusterStatus:
    """Put one look at a cluster together. `generation` is the oldest that a peer still serves."""
    return ClusterStatus(
        name=config.name,
        state=state,
        model=config.model,
        release_id=active.release_id,
        generation=min((peer.generation for peer in peers), default=active.generation),
        epoch=active.group.epoch,
        group=config.group,
        transport=config.transport,
        runner=config.runner,
        strategy=config.strategy,
        payload=config.payload,
        gate_location=config.gate_location,
        contract=config.contract,
        backends=dict(phase_backends(config)),
        policy=config.policy,
        peers=peers,
        lost=lost,
        generations=generations,
        slots=tuple(
            SlotRow(
                layer=placement.layer,
                slot=slot.physical_slot_id.value,
                expert=slot.logical_expert_id.value,
                replica=slot.replica_id.value,
                rank=slot.destination_rank.value,
                pool_slot=slot.pool_slot,
            )
            for placement in active.layers
            for slot in placement.slots
        ),
    )
