"""What is where: the frozen records in which the control plane and the data plane meet.

`PlacementSnapshot` is one generation: for each MoE layer a manifest of physical slots. It is validated when it is
built, and never changes. `compatible` is the predicate of specification 0x01D1; `check_assignment` its cardinality
contract. Nothing here needs torch or Ray.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from ray_moe.errors import (
    CompatibilityError,
    DuplicateExecutionError,
    LostRouteError,
    NotInReplicaSetError,
    PlacementError,
)
from ray_moe.identity import (
    CheckpointVersion,
    GlobalRank,
    LogicalExpertId,
    PhysicalSlotId,
    PlacementVersion,
    ReplicaId,
    expect,
)
from ray_moe.topology import ProcessGroupSpec, Topology


@dataclass(frozen=True)
class ShardCoordinate:
    """Which part of one expert a slot holds under expert tensor parallelism; 0 of 1 is the whole expert."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise PlacementError(f"shard index must be in [0, {self.count}), found {self.index}")


@dataclass(frozen=True)
class Slot:
    """One physical slot of one layer (specification 0x02B2).

    `pool_slot` is the storage index in the owner's slot pool; it stays the same across generations that keep the
    weights. `parameter_digest` is empty until the owner has filled the slot and reported what arrived.
    """

    physical_slot_id: PhysicalSlotId
    logical_expert_id: LogicalExpertId
    replica_id: ReplicaId
    destination_rank: GlobalRank
    topology_domain_id: str
    checkpoint_version: CheckpointVersion
    parameter_digest: str
    pool_slot: int
    shard: ShardCoordinate = field(default_factory=ShardCoordinate)

    def __post_init__(self) -> None:
        expect(PhysicalSlotId, self.physical_slot_id, "physical_slot_id")
        expect(LogicalExpertId, self.logical_expert_id, "logical_expert_id")
        expect(ReplicaId, self.replica_id, "replica_id")
        expect(GlobalRank, self.destination_rank, "destination_rank")
        expect(CheckpointVersion, self.checkpoint_version, "checkpoint_version")


def compatible(
    logical_expert: LogicalExpertId,
    slot: Slot,
    checkpoint: CheckpointVersion,
    group: ProcessGroupSpec,
    topology: Topology,
) -> None:
    """The four clauses of specification 0x01D1, in order; raises `CompatibilityError` naming the first that fails."""
    where = f"slot {slot.physical_slot_id}"
    if slot.logical_expert_id != logical_expert:
        raise CompatibilityError(
            "logical_expert_match", f"{where} stores expert {slot.logical_expert_id}, the route wants {logical_expert}"
        )
    if slot.checkpoint_version != checkpoint:
        raise CompatibilityError(
            "checkpoint_match", f"{where} holds {slot.checkpoint_version}, the execution scope is {checkpoint}"
        )
    if slot.destination_rank not in group:
        raise CompatibilityError(
            "rank_in_group", f"{where} is on rank {slot.destination_rank}, outside group {group.process_group_id}"
        )
    owner = topology.owner.get(slot.destination_rank)
    if owner != slot.topology_domain_id:
        raise CompatibilityError(
            "domain_owns_rank",
            f"{where} says domain {slot.topology_domain_id}, rank {slot.destination_rank} belongs to {owner}",
        )


@dataclass(frozen=True)
class LayerPlacement:
    """The slot manifest of one MoE layer. Manifest order is an order of its own: q10 may come before q9.

    Maps over manifest positions: `phy2log` [S] logical expert per slot, `physical_rank` [S] global rank per slot,
    `log2phy_offsets` [E + 1] and `log2phy_values` [S] the replica sets in CSR form.
    """

    layer: int
    num_logical_experts: int
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        ids = [slot.physical_slot_id for slot in self.slots]
        if len(set(ids)) != len(ids):
            raise PlacementError(f"layer {self.layer}: physical slot ids must be unique within a placement")
        homes = [(slot.destination_rank, slot.pool_slot) for slot in self.slots]
        if len(set(homes)) != len(homes):
            raise PlacementError(f"layer {self.layer}: two slots share a pool slot of one rank")
        for slot in self.slots:
            if not 0 <= slot.logical_expert_id.value < self.num_logical_experts:
                raise PlacementError(
                    f"layer {self.layer}: slot {slot.physical_slot_id} stores expert {slot.logical_expert_id}, "
                    f"the layer has {self.num_logical_experts}"
                )
        homeless = set(range(self.num_logical_experts)) - set(self.phy2log)
        if homeless:
            raise PlacementError(f"layer {self.layer}: logical experts without a slot: {sorted(homeless)}")

    @cached_property
    def phy2log(self) -> tuple[int, ...]:
        return tuple(slot.logical_expert_id.value for slot in self.slots)

    @cached_property
    def physical_rank(self) -> tuple[int, ...]:
        return tuple(slot.destination_rank.value for slot in self.slots)

    @cached_property
    def log2phy_values(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self.slots)), key=lambda position: (self.phy2log[position], position)))

    @cached_property
    def log2phy_offsets(self) -> tuple[int, ...]:
        offsets = [0] * (self.num_logical_experts + 1)
        for expert in self.phy2log:
            offsets[expert + 1] += 1
        for expert in range(self.num_logical_experts):
            offsets[expert + 1] += offsets[expert]
        return tuple(offsets)

    def replicas(self, expert: LogicalExpertId) -> tuple[int, ...]:
        """Manifest positions of the slots that hold `expert`; `PlacementError` when the layer has no such expert."""
        if not 0 <= expert.value < self.num_logical_experts:
            raise PlacementError(
                f"layer {self.layer}: logical expert must be in [0, {self.num_logical_experts}), found {expert}"
            )
        start, end = self.log2phy_offsets[expert.value : expert.value + 2]
        return self.log2phy_values[start:end]

    def slots_of(self, rank: GlobalRank) -> tuple[Slot, ...]:
        """The slots that `rank` owns, in manifest order."""
        return tuple(slot for slot in self.slots if slot.destination_rank == rank)


@dataclass(frozen=True)
class PlacementSnapshot:
    """One generation (specification 0x02B2, 0x0CB): immutable, validated whole.

    Raises `CompatibilityError` naming the clause when a slot could not serve its own expert, `PlacementError` when
    replicas of one expert disagree about their parameters or a layer comes twice. A slot that is not filled yet has no
    digest and disagrees with nobody.
    """

    version: PlacementVersion
    generation: int
    release_id: str
    checkpoint_version: CheckpointVersion
    group: ProcessGroupSpec
    topology: Topology
    layers: tuple[LayerPlacement, ...]

    def __post_init__(self) -> None:
        expect(PlacementVersion, self.version, "version")
        expect(CheckpointVersion, self.checkpoint_version, "checkpoint_version")
        if self.generation < 0:
            raise PlacementError(f"generation must be >= 0, found {self.generation}")
        layers = [placement.layer for placement in self.layers]
        if len(set(layers)) != len(layers):
            raise PlacementError(f"every layer must have one manifest, found layers {layers}")
        for placement in self.layers:
            digests: dict[tuple[LogicalExpertId, ShardCoordinate], str] = {}
            for slot in placement.slots:
                compatible(slot.logical_expert_id, slot, self.checkpoint_version, self.group, self.topology)
                if not slot.parameter_digest:
                    continue
                first = digests.setdefault((slot.logical_expert_id, slot.shard), slot.parameter_digest)
                if slot.parameter_digest != first:
                    raise PlacementError(
                        f"layer {placement.layer}: replicas of expert {slot.logical_expert_id} differ in parameter "
                        f"digest: {first!r} and {slot.parameter_digest!r}"
                    )

    @cached_property
    def layer(self) -> Mapping[int, LayerPlacement]:
        """Layer placement by the model's layer index."""
        return {placement.layer: placement for placement in self.layers}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the whole placement in a canonical form; two peers with equal digests run the same maps."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def verified(self) -> bool:
        """True when every slot carries the digest of the parameters that its owner holds."""
        return all(slot.parameter_digest for placement in self.layers for slot in placement.slots)

    @property
    def num_slots(self) -> int:
        return sum(len(placement.slots) for placement in self.layers)

    def with_digests(self, digests: Mapping[tuple[int, int, int], str]) -> PlacementSnapshot:
        """The same placement carrying `digests[(layer, global rank, pool slot)]` as reported by the owners.

        A slot that nobody reports keeps what it has, so a candidate stays unverified until its last fill is reported.
        """
        layers = tuple(
            replace(
                placement,
                slots=tuple(
                    replace(
                        slot,
                        parameter_digest=digests.get(
                            (placement.layer, slot.destination_rank.value, slot.pool_slot), slot.parameter_digest
                        ),
                    )
                    for slot in placement.slots
                ),
            )
            for placement in self.layers
        )
        return replace(self, layers=layers)


def check_assignment(
    placement: LayerPlacement,
    logical_experts: Sequence[LogicalExpertId],
    assignments: Sequence[Iterable[PhysicalSlotId]],
) -> tuple[int, ...]:
    """Exactly one slot inside the replica set for every accepted route (specification 0x01D1).

    `assignments[r]` are the slots given to route `r`. Returns the manifest position per route. Raises `LostRouteError`
    for none, `DuplicateExecutionError` for several, `NotInReplicaSetError` for a slot that stores another expert, also
    when all counts are right.
    """
    position = {slot.physical_slot_id: index for index, slot in enumerate(placement.slots)}
    chosen: list[int] = []
    for route, (expert, slots) in enumerate(zip(logical_experts, assignments, strict=True)):
        given = tuple(slots)
        if not given:
            raise LostRouteError(f"route {route} (expert {expert}) has no assignment")
        if len(given) > 1:
            raise DuplicateExecutionError(f"route {route} (expert {expert}) is assigned to {len(given)} slots")
        if given[0] not in position or position[given[0]] not in placement.replicas(expert):
            raise NotInReplicaSetError(
                f"route {route} wants expert {expert}, slot {given[0]} is not one of its replicas"
            )
        chosen.append(position[given[0]])
    return tuple(chosen)


@dataclass(frozen=True)
class Lease:
    """One holder's reference to a generation: while it is out, the generation cannot retire (specification 0x01D2)."""

    lease_id: int
    holder: str
    generation: int
    epoch: int


@dataclass(frozen=True)
class ReleaseBundle:
    """Everything that must agree for a step to be this release and no other (specification 0x0CA)."""

    release_id: str
    checkpoint_version: CheckpointVersion
    checkpoint_digest: str
    placement_generation: str
    placement_digest: str
    topology_version: str
    process_group_generation: str
    route_abi: str
    dispatch_handle_abi: str
    precision_roles: tuple[tuple[str, str], ...]
    phase_backends: tuple[tuple[str, str], ...]
    graph_manifest_digest: str = ""
    upstream_report_digests: tuple[str, ...] = ()
