"""From an operation and the active generation to the generations on the way: plan, epochs, the next candidate. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ray_moe.controlplane.elastic import as_given, levelled, solved
from ray_moe.controlplane.migrate import Pools, plan_migration
from ray_moe.controlplane.occupancy import Held, Occupancy, Wanted
from ray_moe.controlplane.operations import ByCounts, ByHomes, ByLoads, Kind, Operation, Wave
from ray_moe.controlplane.solve import LayerAssignment, fresh_replica_ids
from ray_moe.errors import PlacementError
from ray_moe.identity import GlobalRank, LogicalExpertId, PhysicalSlotId, PlacementVersion
from ray_moe.placement import LayerPlacement, PlacementSnapshot, Slot
from ray_moe.topology import Domain, ProcessGroupSpec, Topology


@dataclass(frozen=True)
class Storage:
    """Every rank's slot pool: `capacity` slots per layer, of which a plan leaves `spare` free where it can."""

    capacity: int
    spare: int
    expert_bytes: int

    @property
    def room(self) -> int:
        """Slots of a layer that a rank may hold when nothing forces it to hold more."""
        return max(1, self.capacity - self.spare)


def ranks_after(operation: Operation, active: PlacementSnapshot) -> tuple[int, ...]:
    """The group's ranks once the operation is done, in peer-slot order: those that stay keep their order."""
    now = tuple(rank.value for rank in active.group.peers)
    if operation.kind is Kind.GROW:
        return (*now, *(rank for rank in operation.ranks if rank not in now))
    if operation.kind is Kind.SHRINK:
        return tuple(rank for rank in now if rank not in operation.ranks)
    return now


def plan_waves(
    operation: Operation, active: PlacementSnapshot, storage: Storage, topology: Topology
) -> tuple[Wave, ...]:
    """The generations that lead to what the operation asks for; none when that is there already.

    A grow begins its epoch with its first generation, a shrink with its last. `topology` knows all ranks that come.
    Raises `PlacementError` and `ConfigError` when the target is impossible, or cannot be reached for lack of slots.
    """
    ranks = ranks_after(operation, active)
    if not ranks:
        raise PlacementError(f"ranks {list(operation.ranks)} are all there are: at least one must stay")
    wanted = _wanted(operation, active, ranks, storage)
    prior = Occupancy.of(active)
    pools = Pools(
        node_of_rank={rank.value: domain for rank, domain in topology.owner.items()},
        capacity_of_rank={rank.value: storage.capacity for rank in topology.owner},
        expert_bytes={placement.layer: storage.expert_bytes for placement in active.layers},
    )
    plan = plan_migration(prior, wanted, pools)
    waves = [Wave(wave.published) for wave in plan.waves]
    if waves:
        waves[-1] = Wave(plan.target)
    if operation.kind is Kind.REBALANCE:
        return tuple(waves)
    waves = waves or [Wave(prior)]
    at = 0 if operation.kind is Kind.GROW else len(waves) - 1
    waves[at] = replace(waves[at], new_epoch=True)
    return tuple(waves)


def _wanted(operation: Operation, active: PlacementSnapshot, ranks: Sequence[int], storage: Storage) -> Wanted:
    target = operation.target
    if isinstance(target, ByHomes):
        return as_given(active, target.homes, ranks)
    if isinstance(target, ByLoads):
        return solved(active, ranks, storage.room, target.loads_LE)
    counts = target.counts if isinstance(target, ByCounts) else None
    try:
        return levelled(active, ranks, storage.room, counts=counts, loads_LE=operation.loads_LE)
    except PlacementError:
        # Fewer ranks may need the slots that are kept free for moving.
        return levelled(active, ranks, storage.capacity, counts=counts, loads_LE=operation.loads_LE)


def candidate_of(
    wave: Wave, active: PlacementSnapshot, *, ranks: Sequence[int], epoch: int, topology: Topology
) -> PlacementSnapshot:
    """The wave's placement as the generation after `active`: slots that stay keep digest and replica id, others have no
    digest yet. A wave that begins an epoch is of group `ranks` in `epoch`, others of the active one's."""
    group = active.group
    if wave.new_epoch:
        group = ProcessGroupSpec(group.process_group_id, epoch, tuple(map(GlobalRank, ranks)))
    else:
        topology = active.topology
    generation = active.generation + 1
    layers = tuple(
        _layer(placement, wave.occupancy.layers[placement.layer], active, topology) for placement in active.layers
    )
    return replace(
        active,
        version=PlacementVersion(f"placement-v{generation}"),
        generation=generation,
        group=group,
        topology=topology,
        layers=layers,
    )


def _layer(
    before: LayerPlacement, held: Iterable[Held], active: PlacementSnapshot, topology: Topology
) -> LayerPlacement:
    held = tuple(held)
    homes = tuple((LogicalExpertId(one.expert), GlobalRank(one.rank)) for one in held)
    there = {(slot.destination_rank.value, slot.pool_slot, slot.logical_expert_id.value): slot for slot in before.slots}
    kept: dict[int, Slot] = {at: there[one] for at, one in enumerate(held) if one in there}
    assignment = LayerAssignment(before.layer, before.num_logical_experts, homes)
    names = fresh_replica_ids(assignment, kept, active)
    return LayerPlacement(
        before.layer,
        before.num_logical_experts,
        tuple(
            Slot(
                physical_slot_id=PhysicalSlotId(f"q{at}"),
                logical_expert_id=expert,
                replica_id=kept[at].replica_id if at in kept else names[at],
                destination_rank=rank,
                topology_domain_id=topology.owner[rank],
                checkpoint_version=active.checkpoint_version,
                parameter_digest=kept[at].parameter_digest if at in kept else "",
                pool_slot=held[at].pool_slot,
            )
            for at, (expert, rank) in enumerate(homes)
        ),
    )


def with_members(
    topology: Topology, ranks: Sequence[int], node_of: Mapping[int, str], fallback: str = "node"
) -> Topology:
    """`topology` with exactly `ranks`: those that are new go to the domain of their node, `node_of[rank]`.

    A node's domain is one that has a rank of that node already, the smallest where there are several (labels may split
    a node); a node that nobody is on yet becomes a domain of its own. Ranks that are gone take relays and NICs with
    them. Nothing changes, the version included, when the ranks are the same.
    """
    known = {rank.value: domain for rank, domain in topology.owner.items()}
    wanted = set(ranks)
    if wanted == set(known):
        return topology
    members = {
        domain.domain_id: [rank.value for rank in domain.member_ranks if rank.value in wanted]
        for domain in topology.domains
    }
    for rank in ranks:
        if rank in known:
            continue
        beside = {known[other] for other in known if node_of.get(other) == node_of.get(rank)}
        if beside:
            home = min(beside, key=lambda domain: (len(members[domain]), domain))
        else:
            home = f"{fallback}-{len(members)}"
            while home in members:
                home += "x"
        members.setdefault(home, []).append(rank)
        known[rank] = home
    old = {domain.domain_id: domain for domain in topology.domains}
    domains = tuple(
        _domain(old.get(name, Domain(name, ())), tuple(map(GlobalRank, there)))
        for name, there in members.items()
        if there
    )
    return Topology(_next_version(topology.version), domains)


def _domain(old: Domain, members: tuple[GlobalRank, ...]) -> Domain:
    relay = old.relay_rank if old.relay_rank in members else None
    nics = tuple(path for path in old.nics if path.rank in members and (path.via is None or path.via in members))
    return replace(old, member_ranks=members, relay_rank=relay, nics=nics)


def _next_version(version: str) -> str:
    """ "topology-v3" after "topology-v2"; ".1", ".2" and so on after other names."""
    head, _, number = version.rpartition("-v")
    if head and number.isdigit():
        return f"{head}-v{int(number) + 1}"
    head, _, number = version.rpartition(".")
    return f"{head}.{int(number) + 1}" if head and number.isdigit() else f"{version}.1"
