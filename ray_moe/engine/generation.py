"""One generation as one peer runs it: a lease, its header, and the layers compiled for it.

A view is built beside the serving one, on the actor's own thread, and takes effect at an agreed step boundary. It is
never changed; the next generation is another view over the same slot pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ray_moe.comm.transports import Transport
from ray_moe.dataplane.adaptive import AdaptivePaths, Chooser, stopwatch_on
from ray_moe.dataplane.captured import CapturedDecode, Executables
from ray_moe.dataplane.completion import StagingPool
from ray_moe.dataplane.handle import HandleHeader
from ray_moe.dataplane.layer import ExpertLayer, LayerCounters
from ray_moe.dataplane.local import DeviceLayer, Workspaces
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.plan import SlotMap
from ray_moe.dataplane.policies import ReplicaPolicy, policy_named
from ray_moe.dataplane.route_counts import RouteCounts
from ray_moe.dataplane.runners import BLOCK_ROWS, LayerWeights, runner_named
from ray_moe.dataplane.strategies import Strategy
from ray_moe.engine.blocks import BlockFacts
from ray_moe.engine.trunk import Trunk
from ray_moe.errors import StaleHandleError
from ray_moe.identity import GlobalRank
from ray_moe.placement import Lease, PlacementSnapshot
from ray_moe.weights.slots import SlotPool


@dataclass(frozen=True)
class GenerationView:
    """What a step runs under. `layers` by the model's layer index, in execution order; they share `policy`.

    `transport` is that of the generation's epoch: views of one epoch share it, or at least its groups. `trunk` is that
    of the generation's checkpoint.
    """

    lease: Lease
    header: HandleHeader
    layers: Mapping[int, ExpertLayer]
    policy: ReplicaPolicy
    transport: Transport
    trunk: Trunk

    @property
    def generation(self) -> int:
        return self.lease.generation

    @property
    def epoch(self) -> int:
        return self.header.epoch

    @property
    def release_id(self) -> str:
        return self.header.release_id

    @property
    def checkpoint(self) -> str:
        return self.header.checkpoint_version

    def activate(self) -> None:
        """Put this generation's bindings into the executables' cells: at a step boundary, on the loop's thread."""
        for captured in self._captured():
            captured.activate()

    def deactivate(self) -> None:
        """Empty the executables' cells: no other generation of the release follows."""
        for captured in self._captured():
            captured.deactivate()

    def free(self) -> None:
        """Give the bindings up; the executables stay. Raises `BindingError` while a cell holds one."""
        for captured in self._captured():
            captured.free()

    def _captured(self) -> list[CapturedDecode]:
        return [layer.captured for layer in self.layers.values() if layer.captured is not None]


@dataclass(frozen=True)
class Departure:
    """What a peer stages that is no member of the generation's epoch: at that boundary it leaves."""

    generation: int
    epoch: int


@dataclass(frozen=True)
class Backend:
    """How a peer executes its layers in one epoch: the same in every generation of it.

    `alternatives` are transport and runner by name, among which `chooser` takes one for each unit; without them it is
    `transport` and `runner` always. `executables` is None without decode buckets. `blocks` are what probing the trunk's
    MoE blocks found. `workspaces` are for layers that the host does not look into; None keeps to the path of handles.
    """

    transport: Transport
    runner: str
    policy: str
    strategy: Strategy
    blocks: Mapping[int, BlockFacts]
    block_rows: int = BLOCK_ROWS
    executables: Executables | None = None
    alternatives: Mapping[str, tuple[Transport, str]] = field(default_factory=dict)
    chooser: Chooser | None = None
    staging: StagingPool = field(default_factory=StagingPool)
    workspaces: Workspaces | None = None

    def local(self, header: HandleHeader, slots: SlotMap, weights: LayerWeights, top_k: int) -> DeviceLayer | None:
        """The layer on devices alone; None beside executables or a chooser, which have paths of their own."""
        if self.workspaces is None or self.executables is not None or self.chooser is not None:
            return None
        return self.workspaces.layer(
            slots, weights, top_k, header.abi, self.transport, self.policy, self.strategy.chunks
        )

    def path(self, weights: LayerWeights) -> Path:
        """A path of its own for one layer; all share the staging buffers, since a peer runs one layer at a time."""
        return self._path(self.transport, self.runner, weights)

    def adaptive_paths(self, weights: LayerWeights) -> AdaptivePaths | None:
        """The alternatives as paths of one layer; None where there is nothing to choose."""
        if self.chooser is None:
            return None
        paths = (self._path(*choice, weights) for choice in self.alternatives.values())
        watch = stopwatch_on(weights.down.device)
        return AdaptivePaths(tuple(self.alternatives), tuple(paths), self.chooser, watch)

    def _path(self, transport: Transport, name: str, weights: LayerWeights) -> Path:
        runner = runner_named(name, weights=weights, block_rows=self.block_rows)
        return Path(transport, runner, self.strategy, staging=self.staging)


def build_view(
    lease: Lease,
    header: HandleHeader,
    snapshot: PlacementSnapshot,
    rank: GlobalRank,
    trunk: Trunk,
    pool: SlotPool,
    backend: Backend,
    counters: Mapping[int, LayerCounters],
    route_counts: RouteCounts | None = None,
) -> GenerationView:
    """Compile `snapshot` for this peer over the slabs of `pool`.

    Raises `StaleHandleError` when lease, header, snapshot and the transport's group are not of one generation and
    epoch, or when a slot's resident parameters are not the ones that the snapshot was verified with.
    """
    group = backend.transport.group.spec
    if not lease.generation == header.generation == snapshot.generation:
        raise StaleHandleError(
            f"lease of generation {lease.generation}, header of {header.generation}, snapshot of {snapshot.generation}"
        )
    if not group.epoch == header.epoch == snapshot.group.epoch or group.peers != snapshot.group.peers:
        raise StaleHandleError(
            f"generation {snapshot.generation} is for epoch {snapshot.group.epoch} of "
            f"{snapshot.group.process_group_id}, this peer runs epoch {group.epoch} of {group.process_group_id}"
        )
    # Of all layers before any executable is bound: the generation may be tried again.
    _require_resident(snapshot, rank, pool)
    layers: dict[int, ExpertLayer] = {}
    policy = policy_named(backend.policy)
    for placement in snapshot.layers:
        slots = SlotMap.compile(snapshot, placement, rank, torch.device(pool.device))
        slab = pool.slab(placement.layer)
        weights = LayerWeights(
            gate_up=slab.gate_up,
            down=slab.down,
            gate_up_bias=slab.gate_up_bias,
            down_bias=slab.down_bias,
            pool_slots=slots.pool_slots,
            activation=trunk.activation(placement.layer),
            generation=snapshot.generation,
            form=trunk.activation_form(placement.layer) if pool.device.type == "cuda" else None,
        )
        path = backend.path(weights)
        if path.runner.fallback is not None:
            counters[placement.layer].torch_runners[path.runner.fallback] += 1
        local = backend.local(header, slots, weights, trunk.top_k)
        layers[placement.layer] = ExpertLayer(
            header=header,
            slots=slots,
            weights=weights,
            path=path,
            policy=policy,
            counters=counters[placement.layer],
            captured=_captured(backend, header, slots, trunk, weights),
            route_counts=route_counts,
            adaptive=backend.adaptive_paths(weights),
            local=local,
        )
    return GenerationView(
        lease=lease, header=header, layers=layers, policy=policy, transport=backend.transport, trunk=trunk
    )


def _require_resident(snapshot: PlacementSnapshot, rank: GlobalRank, pool: SlotPool) -> None:
    for placement in snapshot.layers:
        for slot in placement.slots_of(rank):
            resident = pool.digest(placement.layer, slot.pool_slot)
            if resident != slot.parameter_digest:
                raise StaleHandleError(
                    f"generation {snapshot.generation} layer {placement.layer} slot {slot.physical_slot_id}: "
                    f"resident parameters are {resident}, the placement was verified with {slot.parameter_digest}"
                )


def _captured(
    backend: Backend, header: HandleHeader, slots: SlotMap, trunk: Trunk, weights: LayerWeights
) -> CapturedDecode | None:
    if backend.executables is None:
        return None
    return CapturedDecode.bind(
        backend.executables,
        header,
        slots,
        trunk.hidden_size,
        trunk.top_k,
        backend.blocks[slots.layer].gate,
        backend.transport,
        weights,
    )
