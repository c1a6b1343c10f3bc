"""From one placement to another: which copies stay, where the others come from, in which order, and what it takes.

Pure. `plan_migration` compares what pool slots hold with what ranks are to hold and returns a frozen `MigrationPlan`
(specification 0x08F, 0x08G): every copy of the target with its class and source, waves where spare slots do not hold
all new copies at once, and a ledger that keeps payload by class, retained state and peak apart. `MigrationPlan.effects`
is the same as records for an executor; `ray_moe.controlplane.execution` says which of them may run.

Copies that stay on their rank stay in their pool slot, free slots alone are filled, and a slot is freed only after the
publication of a generation that does without it, which comes after all copies of its wave are verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from ray_moe.controlplane.migration_plan import MigrationLedger, MigrationPlan, PlannedWave, TargetCopy
from ray_moe.controlplane.moves import Matching, relabel
from ray_moe.controlplane.occupancy import Held, Home, Occupancy, Wanted, copies_of
from ray_moe.controlplane.solve import PoolSlot
from ray_moe.controlplane.sources import CopyClass, SourceFinder
from ray_moe.controlplane.waves import LayerChange, NoOrder, Wave, order_waves, spare_slots_needed
from ray_moe.errors import PlacementError
from ray_moe.evidence import LiveBytes, LogicalBytes
from ray_moe.identity import GlobalRank, LogicalExpertId

# -- What goes in


@dataclass(frozen=True)
class Pools:
    """The ranks' storage. `capacity_of_rank` is pool slots per layer, `expert_bytes` bytes of one expert by layer.

    `host_cached` are the (layer, expert) pairs in each rank's host memory; `checkpoint` says whether every expert can
    be loaded from disk.
    """

    node_of_rank: Mapping[int, Hashable]
    capacity_of_rank: Mapping[int, int]
    expert_bytes: Mapping[int, int]
    host_cached: Mapping[int, Collection[tuple[int, int]]] = field(default_factory=dict)
    checkpoint: bool = True


# -- The plan


def plan_migration(
    prior: Occupancy,
    target: Wanted,
    pools: Pools,
    *,
    beside: Iterable[Occupancy] = (),
    relabel_within_node: bool = False,
    max_waves: int | None = None,
) -> MigrationPlan:
    """The fewest copies that bring `prior` to `target`.

    `beside` are other live generations: their slots are neither filled nor freed, nor read. Slots of a rank that is
    gone, or of another checkpoint, belong in none of `prior`'s layers. With `relabel_within_node`, ranks of one node
    with pools of one size swap their packs, layer by layer, so that the most copies stay. `max_waves=1` refuses plans
    that publish generations on the way, after which there is no way back to `prior`.

    Raises `PlacementError` naming layer, rank and number when the target drops an expert or a layer, is larger than a
    pool, finds no source, takes more than `max_waves`, or cannot be reached for lack of spare slots.
    """
    others = tuple(beside)
    _check(prior, target, pools, others)
    matchings: frozenset[Matching] = frozenset()
    if relabel_within_node:
        target, matchings = _relabelled(prior, target, pools)
    diffs = {layer: _diff(layer, prior, target, pools, others) for layer in target.layers}
    waves_by_layer = {layer: _ordered(layer, diff, pools) for layer, diff in diffs.items()}
    count = max(map(len, waves_by_layer.values()), default=0)
    if max_waves is not None and count > max_waves:
        layer = max(waves_by_layer, key=lambda layer: len(waves_by_layer[layer]))
        raise PlacementError(
            f"layer {layer}: {_shortage(diffs[layer].change)} takes {count} waves, allowed {max_waves}"
        )

    published = {layer: list(prior.layers.get(layer, ())) for layer in target.layers}
    finder = SourceFinder(pools.node_of_rank, pools.host_cached, pools.checkpoint)
    waves: list[PlannedWave] = []
    for number in range(1, count + 1):
        step = {layer: ordered[number - 1] for layer, ordered in waves_by_layer.items() if len(ordered) >= number}
        waves.append(_planned(number, step, diffs, published, finder, pools))
    final = Occupancy({layer: _in_wanted_order(layer, target, published[layer]) for layer in target.layers})
    kept = tuple(
        TargetCopy(slot, LogicalExpertId(held.expert), CopyClass.KEEP, slot, LogicalBytes(0), 0)
        for layer, diff in diffs.items()
        for held in diff.kept
        for slot in (_slot(layer, held),)
    )
    return MigrationPlan(prior, final, kept, tuple(waves), _ledger(prior, final, kept, waves, others, pools), matchings)


@dataclass(frozen=True)
class _Diff:
    kept: tuple[Held, ...]
    pinned: tuple[Held, ...]  # the target does without them, another live generation does not
    change: LayerChange


def _diff(layer: int, prior: Occupancy, target: Wanted, pools: Pools, beside: tuple[Occupancy, ...]) -> _Diff:
    held = prior.layers.get(layer, ())
    wanted = Counter(target.layers[layer])
    kept: list[Held] = []
    surplus: list[Held] = []
    for slot in held:
        home = Home(slot.rank, slot.expert)
        (kept if wanted[home] > 0 else surplus).append(slot)
        wanted[home] -= 1
    missing = []
    have = Counter(Home(slot.rank, slot.expert) for slot in kept)
    for home in target.layers[layer]:
        if have[home] > 0:
            have[home] -= 1
        else:
            missing.append(home)
    elsewhere = {slot[:2] for other in beside for slot in other.layers.get(layer, ())}
    used: dict[int, set[int]] = {}
    for rank, pool_slot in {*elsewhere, *(slot[:2] for slot in held)}:
        used.setdefault(rank, set()).add(pool_slot)
    ranks = {home.rank for home in missing}
    free = {
        rank: tuple(slot for slot in range(pools.capacity_of_rank[rank]) if slot not in used.get(rank, ()))
        for rank in sorted(ranks)
    }
    old = tuple(slot for slot in surplus if slot[:2] not in elsewhere)
    pinned = tuple(slot for slot in surplus if slot[:2] in elsewhere)
    copies = Counter(slot.expert for slot in held)
    return _Diff(tuple(kept), pinned, LayerChange(tuple(missing), old, free, copies))


def _ordered(layer: int, diff: _Diff, pools: Pools) -> tuple[Wave, ...]:
    leaving = Counter(held.rank for held in diff.change.old)
    missing = Counter(home.rank for home in diff.change.missing)
    for rank, count in missing.items():
        room = len(diff.change.free[rank]) + leaving[rank]
        if count > room:
            raise PlacementError(
                f"layer {layer} rank {rank}: {count} new copies need pool slots; of {pools.capacity_of_rank[rank]}, "
                f"{room} are free or become free"
            )
    waves = order_waves(diff.change)
    if isinstance(waves, NoOrder):
        extent = "no order exists" if waves.exhaustive else "no order was found"
        raise PlacementError(f"layer {layer}: {extent} in which {_shortage(diff.change)}")
    if not diff.pinned:
        return waves
    *before, last = waves or (Wave((), ()),)
    return (*before, Wave(last.arrivals, (*last.departures, *diff.pinned)))


def _shortage(change: LayerChange) -> str:
    """Which ranks lack room, and how many more slots would do."""
    missing = Counter(home.rank for home in change.missing)
    short = [(rank, count, len(change.free[rank])) for rank, count in sorted(missing.items())]
    text = ", ".join(
        f"rank {rank} fills {count} pool slots with {free} free" for rank, count, free in short if count > free
    )
    extra = spare_slots_needed(change)
    if not extra:
        return text
    needs = ", ".join(f"{count} more on rank {rank}" for rank, count in extra.items())
    return f"{text}; enough would be: {needs}"


def _planned(
    number: int,
    step: Mapping[int, Wave],
    diffs: Mapping[int, _Diff],
    published: dict[int, list[Held]],
    finder: SourceFinder,
    pools: Pools,
) -> PlannedWave:
    """One wave of all layers; `published` goes on to the generation that it ends with."""
    copies: list[TargetCopy] = []
    retired: list[tuple[PoolSlot, LogicalExpertId]] = []
    for layer, wave in step.items():
        payload = LogicalBytes(pools.expert_bytes[layer])
        for found in finder.find(layer, published[layer], wave.arrivals):
            slot, expert = _slot(layer, found.held), LogicalExpertId(found.held.expert)
            after = found.source if found.fresh and isinstance(found.source, PoolSlot) else None
            copies.append(TargetCopy(slot, expert, found.kind, found.source, payload, number, after))
        gone = set(wave.departures)
        published[layer] = [held for held in published[layer] if held not in gone] + list(wave.arrivals)
        freed = gone.difference(diffs[layer].pinned)
        retired += [(_slot(layer, held), LogicalExpertId(held.expert)) for held in wave.departures if held in freed]
    occupancy = Occupancy({layer: tuple(slots) for layer, slots in published.items()})
    return PlannedWave(number, tuple(copies), occupancy, tuple(retired))


def _relabelled(prior: Occupancy, target: Wanted, pools: Pools) -> tuple[Wanted, frozenset[Matching]]:
    equals: dict[tuple[Hashable, int], list[int]] = {}
    for rank in sorted(pools.node_of_rank):
        equals.setdefault((pools.node_of_rank[rank], pools.capacity_of_rank[rank]), []).append(rank)
    layers = sorted(target.layers)
    found = relabel(
        copies_of(prior, layers), target.copies, list(equals.values()), len(layers), max(pools.node_of_rank) + 1
    )
    rank_LG = found.rank_LG.tolist()
    homes = {
        layer: tuple(Home(rank_LG[at][home.rank], home.expert) for home in target.layers[layer])
        for at, layer in enumerate(layers)
    }
    return Wanted(homes), found.methods


def _in_wanted_order(layer: int, target: Wanted, published: list[Held]) -> tuple[Held, ...]:
    """The slots in the manifest order of the target."""
    slots: dict[Home, list[Held]] = {}
    for held in published:
        slots.setdefault(Home(held.rank, held.expert), []).append(held)
    return tuple(slots[home].pop(0) for home in target.layers[layer])


def _slot(layer: int, held: Held) -> PoolSlot:
    return PoolSlot(GlobalRank(held.rank), layer, held.pool_slot)


# -- Bytes


def _ledger(
    prior: Occupancy,
    target: Occupancy,
    kept: tuple[TargetCopy, ...],
    waves: list[PlannedWave],
    beside: tuple[Occupancy, ...],
    pools: Pools,
) -> MigrationLedger:
    def size(slots: Iterable[PoolSlot]) -> int:
        return sum(pools.expert_bytes[slot.layer] for slot in slots)

    def resident(*occupancies: Occupancy) -> int:
        distinct = {(layer, *held[:2]) for o in occupancies for layer, slots in o.layers.items() for held in slots}
        return sum(pools.expert_bytes[layer] for layer, _, _ in distinct)

    copies = [*kept, *(copy for wave in waves for copy in wave.copies)]
    counts = Counter(copy.kind for copy in copies)
    payload = Counter[CopyClass]()
    for copy in copies:
        payload[copy.kind] += copy.payload.value
    now = peak = resident(prior, *beside)
    for wave in waves:
        now += size(copy.slot for copy in wave.copies)
        peak = max(peak, now)
        now -= size(slot for slot, _ in wave.retired)
    return MigrationLedger(
        copies={kind: counts[kind] for kind in CopyClass},
        payload={kind: LogicalBytes(payload[kind]) for kind in CopyClass},
        retained=LiveBytes(size(copy.slot for copy in kept)),
        retired=LiveBytes(sum(size(slot for slot, _ in wave.retired) for wave in waves)),
        prior_resident=LiveBytes(resident(prior)),
        target_resident=LiveBytes(resident(target)),
        peak_resident=LiveBytes(peak),
    )


# -- Refusals


def _check(prior: Occupancy, target: Wanted, pools: Pools, beside: tuple[Occupancy, ...]) -> None:
    dropped = sorted(set(prior.layers) - set(target.layers))
    if dropped:
        raise PlacementError(f"the target drops layers {dropped}")
    for layer, homes in target.layers.items():
        if pools.expert_bytes.get(layer, 0) <= 0:
            raise PlacementError(f"layer {layer}: expert_bytes must be > 0, found {pools.expert_bytes.get(layer)}")
        homeless = {held.expert for held in prior.layers.get(layer, ())} - {home.expert for home in homes}
        if homeless:
            raise PlacementError(f"layer {layer}: the target has no copy of experts {sorted(homeless)}")
        named = {home.rank for home in homes} | {held.rank for held in prior.layers.get(layer, ())}
        unknown = {rank for rank in named if rank not in pools.node_of_rank or rank not in pools.capacity_of_rank}
        if unknown:
            raise PlacementError(f"layer {layer}: ranks {sorted(unknown)} have no node or no pool capacity")
    for occupancy in (prior, *beside):
        for layer, slots in occupancy.layers.items():
            for rank, pool_slot, _ in slots:
                if pool_slot >= pools.capacity_of_rank.get(rank, pool_slot + 1):
                    raise PlacementError(
                        f"layer {layer} rank {rank}: pool slot {pool_slot} is in use, capacity is "
                        f"{pools.capacity_of_rank[rank]}"
                    )
