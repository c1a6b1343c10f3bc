"""Which rank holds which expert, and in which pool slot: an assignment, then a placement that keeps what is there.

Pure. `balanced` is the start rule, which needs no demand. `place` turns any assignment into the snapshot of a new
generation beside the live ones; `fills` is what must be loaded for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ray_moe.errors import ConfigError, PlacementError
from ray_moe.identity import CheckpointVersion, GlobalRank, LogicalExpertId, PhysicalSlotId, PlacementVersion, ReplicaId
from ray_moe.placement import LayerPlacement, PlacementSnapshot, Slot
from ray_moe.topology import ProcessGroupSpec, Topology


@dataclass(frozen=True)
class LayerAssignment:
    """`homes` are (expert, rank) pairs in manifest order, one per physical slot of the layer."""

    layer: int
    num_logical_experts: int
    homes: tuple[tuple[LogicalExpertId, GlobalRank], ...]


@dataclass(frozen=True)
class Assignment:
    """A solver's answer: where each copy of each expert lives, before pool slots are chosen."""

    layers: tuple[LayerAssignment, ...]
    spare_slots: int = 0


@dataclass(frozen=True)
class Fill:
    """Parameters that must be in a pool slot before a generation can be published."""

    rank: GlobalRank
    layer: int
    pool_slot: int
    expert: LogicalExpertId


class PoolSlot(NamedTuple):
    """One piece of weight storage."""

    rank: GlobalRank
    layer: int
    pool_slot: int


# -- The start rule


def balanced(
    num_experts_by_layer: Mapping[int, int],
    ranks: Sequence[GlobalRank],
    *,
    replicas: Mapping[tuple[int, int], int],
    spare_slots: int,
) -> Assignment:
    """Spread every layer evenly over `ranks`; `replicas[layer, expert]` is how many copies there are in all, else 1.

    The ranks' slot counts of a layer differ by one at most. Copies of one expert are on distinct ranks; experts with
    only one copy form contiguous blocks, those of a model without replicas where that comes out level. Homes are listed
    rank by rank, in the order of `ranks`.

    Raises `ConfigError` for more copies than ranks, for a layer or an expert that the model does not have, and for
    counts below their bounds.
    """
    _check_request(num_experts_by_layer, ranks, replicas, spare_slots)
    layers = []
    for layer, num_experts in num_experts_by_layer.items():
        copies = {expert: count for (at, expert), count in sorted(replicas.items()) if at == layer and count > 1}
        homes = _pinned(num_experts, copies, len(ranks)) or _dealt(num_experts, copies, len(ranks))
        pairs = tuple(
            (LogicalExpertId(expert), ranks[seat]) for seat, experts in enumerate(homes) for expert in experts
        )
        layers.append(LayerAssignment(layer, num_experts, pairs))
    return Assignment(tuple(layers), spare_slots)


def _pinned(num_experts: int, copies: Mapping[int, int], num_ranks: int) -> list[list[int]] | None:
    """Sorted experts per seat, every first copy in its contiguous block; None when that does not come out level.

    `copies` are the replicated experts and how often each exists, at most `num_ranks`. Each further copy goes to the
    emptiest seat that has none, the next one after the expert's own where several are: a request for one more copy
    moves nothing else. Example: 4 experts on 2 seats, 2 copies of expert 3: [[0, 1, 3], [2, 3]].
    """
    homes: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in range(num_experts):
        homes[_seat_of(expert, num_experts, num_ranks)].append(expert)
    for expert, count in sorted(copies.items(), key=lambda item: (-item[1], item[0])):
        own = _seat_of(expert, num_experts, num_ranks)
        for _ in range(count - 1):
            free = [seat for seat in range(num_ranks) if expert not in homes[seat]]
            seat = min(free, key=lambda seat: (len(homes[seat]), (seat - own) % num_ranks))
            homes[seat].append(expert)
    loads = [len(experts) for experts in homes]
    return [sorted(experts) for experts in homes] if max(loads) - min(loads) <= 1 else None


def _dealt(num_experts: int, copies: Mapping[int, int], num_ranks: int) -> list[list[int]]:
    """Sorted experts per seat, level for any `copies`; the blocks start wherever the replicated experts leave room.

    Replicated experts are dealt one copy per seat, round and round from where the first of them would live anyway:
    `num_ranks` copies in a row are on distinct seats, and the seats stay level. The rest fills every seat up to its
    share in contiguous blocks. Example: 5 experts on 3 seats, 3 copies of expert 4. The deal gives each seat one. The
    shares of 7 slots are 3 for seat 2, where it started, and 2 for the others: [[0, 4], [1, 4], [2, 3, 4]].
    """
    first = _seat_of(min(copies), num_experts, num_ranks)
    order = [(first + turn) % num_ranks for turn in range(num_ranks)]
    homes: list[list[int]] = [[] for _ in range(num_ranks)]
    deal = [expert for expert, count in copies.items() for _ in range(count)]
    for turn, expert in enumerate(deal):
        homes[order[turn % num_ranks]].append(expert)

    singles = iter(expert for expert in range(num_experts) if expert not in copies)
    total = num_experts - len(copies) + len(deal)
    for seat in range(num_ranks):
        share = total // num_ranks + (order.index(seat) < total % num_ranks)
        homes[seat] += [next(singles) for _ in range(share - len(homes[seat]))]
    return [sorted(experts) for experts in homes]


def _seat_of(expert: int, num_experts: int, num_ranks: int) -> int:
    """The seat whose contiguous block holds `expert` when nothing is replicated: the first ones have one more."""
    size, longer = divmod(num_experts, num_ranks)
    if expert < longer * (size + 1):
        return expert // (size + 1)
    return longer + (expert - longer * (size + 1)) // size


def _check_request(
    num_experts_by_layer: Mapping[int, int],
    ranks: Sequence[GlobalRank],
    replicas: Mapping[tuple[int, int], int],
    spare_slots: int,
) -> None:
    if not ranks or len(set(ranks)) != len(ranks):
        raise ConfigError(f"ranks must be distinct and not empty, found {[rank.value for rank in ranks]}")
    if spare_slots < 0:
        raise ConfigError(f"spare_slots must be >= 0, found {spare_slots}")
    for layer, num_experts in num_experts_by_layer.items():
        if num_experts < 1:
            raise ConfigError(f"layer {layer}: the number of experts must be >= 1, found {num_experts}")
    for (layer, expert), count in replicas.items():
        if layer not in num_experts_by_layer:
            raise ConfigError(f"replicas: layer must be one of {sorted(num_experts_by_layer)}, found {layer}")
        if not 0 <= expert < num_experts_by_layer[layer]:
            raise ConfigError(
                f"replicas: expert of layer {layer} must be in [0, {num_experts_by_layer[layer]}), found {expert}"
            )
        if not 1 <= count <= len(ranks):
            raise ConfigError(
                f"replicas: layer {layer} expert {expert}: count must be in [1, {len(ranks)}], "
                f"as every copy needs a rank of its own, found {count}"
            )


def pool_capacity(assignment: Assignment, spare_slots: int | None = None) -> int:
    """Slots that every rank needs in every layer: the most that one rank holds of one layer, and the spare ones.

    `spare_slots` stands in for the assignment's own number.
    """
    held = max(
        (count for layer in assignment.layers for count in Counter(rank for _, rank in layer.homes).values()), default=0
    )
    return held + (assignment.spare_slots if spare_slots is None else spare_slots)


# -- From an assignment to a generation


def place(
    assignment: Assignment,
    *,
    generation: int,
    version: PlacementVersion,
    release_id: str,
    checkpoint: CheckpointVersion,
    group: ProcessGroupSpec,
    topology: Topology,
    prior: PlacementSnapshot | None,
    capacity: int,
    live: Iterable[PlacementSnapshot] = (),
) -> PlacementSnapshot:
    """The snapshot of `generation`, not yet filled: slots that `prior` does not have carry no parameter digest.

    A rank that holds an expert in `prior` under the same checkpoint keeps pool slot, digest and replica id. Everything
    else goes to the lowest pool slots below `capacity` that neither `prior` nor any other `live` generation uses:
    nothing is overwritten in place. Raises `PlacementError` naming rank, layer, needed and free when there is no room,
    or naming a rank that no domain owns.
    """
    beside = [snapshot for snapshot in (prior, *live) if snapshot is not None]
    same = prior if prior is not None and prior.checkpoint_version == checkpoint else None
    layers = []
    for layer in assignment.layers:
        kept = _keep(layer, same)
        fresh = _fresh_pool_slots(layer, kept, _used(layer.layer, beside), capacity)
        names = fresh_replica_ids(layer, kept, same)
        slots = []
        for position, (expert, rank) in enumerate(layer.homes):
            if rank not in topology.owner:
                raise PlacementError(f"rank {rank} belongs to no domain of topology {topology.version}")
            old = kept.get(position)
            slots.append(
                Slot(
                    physical_slot_id=PhysicalSlotId(f"q{position}"),
                    logical_expert_id=expert,
                    replica_id=old.replica_id if old else names[position],
                    destination_rank=rank,
                    topology_domain_id=topology.owner[rank],
                    checkpoint_version=checkpoint,
                    parameter_digest=old.parameter_digest if old else "",
                    pool_slot=old.pool_slot if old else fresh[position],
                )
            )
        layers.append(LayerPlacement(layer.layer, layer.num_logical_experts, tuple(slots)))
    return PlacementSnapshot(version, generation, release_id, checkpoint, group, topology, tuple(layers))


def fills(snapshot: PlacementSnapshot, prior: PlacementSnapshot | None) -> tuple[Fill, ...]:
    """What must be loaded before `snapshot` can be published: every slot that `prior` does not hold as it is."""
    present = _contents(prior) if prior is not None else {}
    return tuple(
        Fill(slot.destination_rank, placement.layer, slot.pool_slot, slot.logical_expert_id)
        for placement in snapshot.layers
        for slot in placement.slots
        if present.get(_home(placement, slot)) != (slot.logical_expert_id, slot.shard, slot.checkpoint_version)
    )


# -- Details: dictionaries by position are positions in the layer's homes


def _home(placement: LayerPlacement, slot: Slot) -> PoolSlot:
    return PoolSlot(slot.destination_rank, placement.layer, slot.pool_slot)


def _contents(snapshot: PlacementSnapshot) -> dict[PoolSlot, tuple[object, ...]]:
    """What each pool slot of the snapshot holds: expert, shard, checkpoint."""
    return {
        _home(placement, slot): (slot.logical_expert_id, slot.shard, slot.checkpoint_version)
        for placement in snapshot.layers
        for slot in placement.slots
    }


def _keep(layer: LayerAssignment, prior: PlacementSnapshot | None) -> dict[int, Slot]:
    """Slots of `prior` that go on as they are; a rank with two copies of one expert keeps as many as it had."""
    if prior is None or layer.layer not in prior.layer:
        return {}
    held: dict[tuple[LogicalExpertId, GlobalRank], list[Slot]] = {}
    for slot in prior.layer[layer.layer].slots:
        held.setdefault((slot.logical_expert_id, slot.destination_rank), []).append(slot)
    return {position: held[home].pop(0) for position, home in enumerate(layer.homes) if held.get(home)}


def _used(layer: int, snapshots: Iterable[PlacementSnapshot]) -> dict[GlobalRank, set[int]]:
    used: dict[GlobalRank, set[int]] = {}
    for snapshot in snapshots:
        if layer in snapshot.layer:
            for slot in snapshot.layer[layer].slots:
                used.setdefault(slot.destination_rank, set()).add(slot.pool_slot)
    return used


def _fresh_pool_slots(
    layer: LayerAssignment, kept: Mapping[int, Slot], used: Mapping[GlobalRank, set[int]], capacity: int
) -> dict[int, int]:
    """The lowest free pool slots of each rank, by position."""
    wanted: dict[GlobalRank, list[int]] = {}
    for position, (_, rank) in enumerate(layer.homes):
        if position not in kept:
            wanted.setdefault(rank, []).append(position)
    fresh: dict[int, int] = {}
    for rank, positions in wanted.items():
        free = [pool_slot for pool_slot in range(capacity) if pool_slot not in used.get(rank, ())]
        if len(positions) > len(free):
            raise PlacementError(
                f"rank {rank} layer {layer.layer}: {len(positions)} pool slots needed, {len(free)} of {capacity} free"
            )
        fresh |= zip(positions, free, strict=False)
    return fresh


def fresh_replica_ids(
    layer: LayerAssignment, kept: Mapping[int, Slot], prior: PlacementSnapshot | None
) -> dict[int, ReplicaId]:
    """Names for the copies that are new: the lowest number that no copy of the expert has, or had in `prior`."""
    taken = {slot.replica_id for slot in kept.values()}
    if prior is not None and layer.layer in prior.layer:
        taken |= {slot.replica_id for slot in prior.layer[layer.layer].slots}
    names: dict[int, ReplicaId] = {}
    for position, (expert, _) in enumerate(layer.homes):
        if position in kept:
            continue
        number = 0
        while ReplicaId(f"e{expert}-r{number}") in taken:
            number += 1
        names[position] = ReplicaId(f"e{expert}-r{number}")
        taken.add(names[position])
    return names
