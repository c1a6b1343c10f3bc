"""What the controller tells others: a directory for clients, a status for people. Frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ray.actor import ActorHandle

from ray_moe.actors.bringup import phase_backends
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.effects import Peer, PeerPhase
from ray_moe.controlplane.generations import GenerationStatus
from ray_moe.controlplane.operation_row import OperationRow
from ray_moe.controlplane.operations import Operation
from ray_moe.engine.records import EngineStatus, Members, ModelFacts
from ray_moe.placement import PlacementSnapshot

if TYPE_CHECKING:
    from ray_moe.actors.mailbox import PostOffice
    from ray_moe.actors.reception import Reception
    from ray_moe.dataplane.layer import LayerCounters
    from ray_moe.engine.loop import EngineLoop
    from ray_moe.weights.slots import SlotPool


@dataclass(frozen=True)
class Directory:
    """What a client needs to talk to the cluster: who the peers are and which model they run.

    `ranks` are those of `peers`, in their order; 0, 1, 2, ... when there are none. `members_version` numbers this set
    of peers. Whoever holds an old directory asks `controller` for a new one.
    """

    config: ClusterConfig
    model_path: Path
    facts: ModelFacts
    peers: tuple[ActorHandle, ...]
    ranks: tuple[int, ...] = ()
    members_version: int = 0
    controller: ActorHandle | None = None

    @property
    def members(self) -> Members:
        """The peers as clients are told about them when they change."""
        ranks = self.ranks or range(len(self.peers))
        return Members(self.members_version, tuple(zip(ranks, self.peers, strict=True)))


def engine_status(config: ClusterConfig, loop: EngineLoop, pool: SlotPool, layers: LayerCounters) -> EngineStatus:
    """One peer's counters; `layers` are the sums over its layers."""
    counters, load = loop.counters, loop.load
    sent, received = loop.view.transport.bytes_moved
    experts = {id(parameter) for module in loop.trunk.experts.values() for parameter in module.parameters()}
    return EngineStatus(
        rank=loop.rank,
        state=loop.state.value,
        failure=str(loop.failure or ""),
        generation=loop.view.generation,
        epoch=loop.view.epoch,
        committed_step=counters.committed_step,
        steps_agreed=counters.steps_agreed,
        steps_worked=counters.steps_worked,
        seconds_worked=counters.seconds_worked,
        seconds_agreeing=counters.seconds_agreeing,
        slow_step_seconds=counters.slow_step_seconds,
        waiting=load.waiting,
        running=load.running,
        outstanding_tokens=load.outstanding_tokens,
        tokens_emitted=counters.tokens_emitted,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_total=config.kv_blocks,
        rows_local=layers.rows_local,
        rows_sent=layers.rows_sent,
        rows_received=layers.rows_received,
        audited=layers.audited,
        bytes_sent=counters.bytes_sent + sent,
        bytes_received=counters.bytes_received + received,
        replays=layers.replays,
        fallbacks=dict(layers.fallbacks),
        choices=dict(layers.choices),
        local=layers.local,
        torch_runners=dict(layers.torch_runners),
        peak_live_bytes=layers.peak_live_bytes,
        fan_out=dict(layers.fan_out),
        resident_slots={layer: pool.capacity - len(pool.free_slots(layer)) for layer in pool.layers},
        resident_bytes=pool.resident_bytes,
        peak_resident_bytes=pool.peak_resident_bytes,
        trunk_has_experts=bool(experts),
        bare_calls=counters.bare_calls,
        bare_tokens=counters.bare_tokens,
    )


def peer_report(
    rank: int,
    node: str,
    epochs: frozenset[int] | None,
    loop: EngineLoop | None,
    reception: Reception | None,
    post_office: PostOffice,
    slots: dict[tuple[int, int], str],
) -> Peer:
    """What the reconciler sees of one peer; `epochs` is None as long as it has no slots, `loop` before it serves."""
    if loop is None or reception is None:
        phase = PeerPhase.STARTING if epochs is None else PeerPhase.LOADED
        return Peer(rank, phase, node, epochs=epochs or frozenset(), slots=slots)
    members = post_office.members
    return Peer(
        rank,
        PeerPhase.LEFT if loop.has_left else PeerPhase.SERVING,
        node,
        epochs=epochs or frozenset(),
        staged=loop.newest_staged.generation,
        generation=loop.view.generation,
        committed_step=loop.counters.committed_step,
        admitting=reception.admitting,
        requests=len(post_office),
        members=members.version if members is not None else 0,
        failure=str(loop.failure or ""),
        slots=slots,
        pauses={switch.generation: switch.seconds for switch in tuple(loop.counters.switches)},
    )


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
    operations: tuple[OperationRow, ...] = ()


def cluster_status(
    config: ClusterConfig,
    state: str,
    active: PlacementSnapshot,
    generations: tuple[GenerationStatus, ...],
    peers: tuple[EngineStatus, ...],
    lost: tuple[int, ...],
    operations: tuple[Operation, ...],
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
        operations=tuple(map(OperationRow.of, operations)),
    )
