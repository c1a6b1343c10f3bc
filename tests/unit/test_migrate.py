"""Migration plans against brute force: nothing is moved that could stay, and no published generation is ever harmed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.controlplane import moves, waves
from ray_moe.controlplane.execution import TRANSITIONS, MigrationRun, Status, advance
from ray_moe.controlplane.migrate import Pools, _diff, plan_migration
from ray_moe.controlplane.migration_plan import Copy, Load, MigrationPlan, Publish, Retire, Verify
from ray_moe.controlplane.moves import Copies, Matching, count_moves, relabel
from ray_moe.controlplane.occupancy import Held, Home, Occupancy, Wanted, copies_of
from ray_moe.controlplane.solve import Assignment, PoolSlot, balanced, fills, place, pool_capacity
from ray_moe.controlplane.sources import Checkpoint, CopyClass, HostCache
from ray_moe.errors import ConfigError, PlacementError, ScheduleError
from ray_moe.identity import CheckpointVersion, GlobalRank, LogicalExpertId, PlacementVersion, ProcessGroupId
from ray_moe.placement import PlacementSnapshot
from ray_moe.topology import Domain, ProcessGroupSpec, Topology
from tests.layers import retired_slots, untimed

EXPERT_BYTES = {0: 100, 1: 7}


def slot(rank: int, layer: int, pool_slot: int) -> PoolSlot:
    return PoolSlot(GlobalRank(rank), layer, pool_slot)


def one_layer(*held: tuple[int, int, int]) -> Occupancy:
    return Occupancy({0: tuple(Held(*entry) for entry in held)})


def wanted(*homes: tuple[int, int]) -> Wanted:
    """(rank, expert) pairs of one layer."""
    return Wanted({0: tuple(Home(*home) for home in homes)})


def pools(nodes: Sequence[int], capacity: int | Sequence[int], **more: object) -> Pools:
    per_rank = [capacity] * len(nodes) if isinstance(capacity, int) else capacity
    return Pools(dict(enumerate(nodes)), dict(enumerate(per_rank)), EXPERT_BYTES, **more)  # type: ignore[arg-type]


def by_target(plan: MigrationPlan) -> dict[tuple[int, int], tuple[CopyClass, object]]:
    """(rank, expert) -> class and source, for targets without duplicates."""
    copies = [*plan.kept, *(copy for wave in plan.waves for copy in wave.copies)]
    return {(copy.slot.rank.value, copy.expert.value): (copy.kind, copy.source) for copy in copies}


# -- An executor that knows nothing of plans: storage, digests and the published map, checked at each effect


def executed(plan: MigrationPlan, order: Iterable[int]) -> Occupancy:
    """Run the effects in `order` on a model of the pools; every step must leave the published generation intact."""
    storage: dict[PoolSlot, int] = {
        slot(held.rank, layer, held.pool_slot): held.expert
        for layer, slots in plan.prior.layers.items()
        for held in slots
    }
    verified = set(storage)
    had = {layer: {held.expert for held in slots} for layer, slots in plan.prior.layers.items()}
    serving = plan.prior
    peak = resident = plan.ledger.prior_resident.value
    for position in order:
        effect = plan.effects[position]
        if isinstance(effect, Load | Copy):
            assert effect.slot not in storage, "overwritten in place"
            if isinstance(effect, Copy):
                assert effect.source in verified
                assert storage[effect.source] == effect.expert.value
            storage[effect.slot] = effect.expert.value
            resident += EXPERT_BYTES[effect.slot.layer]
            peak = max(peak, resident)
        elif isinstance(effect, Verify):
            assert storage[effect.slot] == effect.expert.value
            verified.add(effect.slot)
        elif isinstance(effect, Publish):
            serving = plan.waves[effect.wave - 1].published
        else:
            assert storage.pop(effect.slot) == effect.expert.value
            verified.discard(effect.slot)
            resident -= EXPERT_BYTES[effect.slot.layer]
        for layer, slots in serving.layers.items():
            for held in slots:
                at = slot(held.rank, layer, held.pool_slot)
                assert at in verified and storage[at] == held.expert, "a serving slot was harmed"
            assert had.get(layer, set()) <= {held.expert for held in slots}, "a serving generation lacks an expert"
    assert peak == plan.ledger.peak_resident.value
    return serving


def multiset(occupancy: Occupancy | Wanted) -> dict[int, Counter[tuple[int, int]]]:
    return {layer: Counter((h.rank, h.expert) for h in held) for layer, held in occupancy.layers.items()}


# -- Random problems


@st.composite
def problems(draw: st.DrawFn, spare: int | None = None) -> tuple[Occupancy, Wanted, Pools]:
    """Two placements of up to 5 experts on up to 4 ranks, any slots and duplicates; `spare` None: always room."""
    num_ranks, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    layers = draw(st.integers(1, 2))
    prior: dict[int, tuple[Held, ...]] = {}
    target: dict[int, tuple[Home, ...]] = {}
    largest = 0
    for layer in range(layers):
        ranks = st.integers(0, num_ranks - 1)
        extra = st.lists(st.tuples(ranks, st.integers(0, num_experts - 1)), max_size=4)
        old = [(draw(ranks), expert) for expert in range(num_experts)] + draw(extra)
        new = [(draw(ranks), expert) for expert in range(num_experts)] + draw(extra)
        taken: Counter[int] = Counter()
        held = []
        for rank, expert in draw(st.permutations(old)):
            held.append(Held(rank, taken[rank], expert))
            taken[rank] += 1
        prior[layer] = tuple(held)
        target[layer] = tuple(Home(*home) for home in draw(st.permutations(new)))
        both = Counter(rank for rank, _ in new)
        most = max(taken[rank] + both[rank] if spare is None else max(taken[rank], both[rank]) for rank in range(4))
        largest = max(largest, most + (spare or 0))
    nodes = [draw(st.integers(0, 1)) for _ in range(num_ranks)]
    return Occupancy(prior), Wanted(target), pools(nodes, largest)


def fewest_moves(prior: Occupancy, target: Wanted) -> int:
    """Over all ways to match target copies with prior slots of the same rank and expert: the fewest left over."""
    total = 0
    for layer, homes in target.layers.items():
        held = [(h.rank, h.expert) for h in prior.layers[layer]]
        size = max(len(held), len(homes))
        padded = held + [(-1, -1)] * (size - len(held))
        best = size
        for chosen in itertools.permutations(padded, len(homes)):
            best = min(best, sum(tuple(home) != source for home, source in zip(homes, chosen, strict=True)))
        total += best
    return total


def least_payload(layer: int, prior: Occupancy, target: Wanted, nodes: Mapping[int, object]) -> Counter[CopyClass]:
    """Kruskal over the distances of all holders and targets of an expert, as an oracle for the classes."""
    classes: Counter[CopyClass] = Counter()
    for expert in {home.expert for home in target.layers[layer]}:
        have = [held.rank for held in prior.layers[layer] if held.expert == expert]
        left = Counter(have)
        new = []
        for home in target.layers[layer]:
            if home.expert == expert:
                if left[home.rank] > 0:
                    left[home.rank] -= 1
                    classes[CopyClass.KEEP] += 1
                else:
                    new.append(home.rank)
        ranks = have + new
        joined = list(range(len(ranks)))
        for at in range(len(have)):
            joined[at] = 0

        def distance(one: int, other: int, ranks: list[int] = ranks) -> int:
            return 0 if ranks[one] == ranks[other] else 1 if nodes[ranks[one]] == nodes[ranks[other]] else 2

        for one, other in sorted(itertools.combinations(range(len(ranks)), 2), key=lambda pair: distance(*pair)):
            if joined[one] != joined[other]:
                kinds = (CopyClass.SAME_GPU, CopyClass.SAME_NODE, CopyClass.CROSS_NODE)
                classes[kinds[distance(one, other)]] += 1
                joined = [joined[one] if label == joined[other] else label for label in joined]
    return classes


@given(problems())
@untimed
def test_a_plan_with_room_reaches_the_target_in_one_wave_with_the_least_payload_of_every_class(
    problem: tuple[Occupancy, Wanted, Pools],
) -> None:
    prior, target, given_pools = problem
    plan = plan_migration(prior, target, given_pools, max_waves=1)
    assert multiset(executed(plan, range(len(plan.effects)))) == multiset(target)
    assert multiset(plan.target) == multiset(target)
    oracle = {layer: least_payload(layer, prior, target, given_pools.node_of_rank) for layer in target.layers}
    for kind in (CopyClass.SAME_GPU, CopyClass.SAME_NODE, CopyClass.CROSS_NODE):
        assert plan.ledger.payload[kind].value == sum(oracle[at][kind] * EXPERT_BYTES[at] for at in oracle)
    assert plan.ledger.retained.value == sum(oracle[at][CopyClass.KEEP] * EXPERT_BYTES[at] for at in oracle)
    assert plan.ledger.payload[CopyClass.KEEP].value == 0
    new = plan.ledger.moved.value
    assert plan.ledger.peak_resident.value == plan.ledger.prior_resident.value + new
    assert plan.ledger.target_resident.value == plan.ledger.retained.value + new
    assert plan.ledger.retired.value == plan.ledger.prior_resident.value - plan.ledger.retained.value


@given(problems())
@untimed
def test_no_plan_with_fewer_moves_exists_for_the_target(problem: tuple[Occupancy, Wanted, Pools]) -> None:
    prior, target, given_pools = problem
    small = {layer for layer in target.layers if max(len(prior.layers[layer]), len(target.layers[layer])) <= 6}
    prior = Occupancy({layer: prior.layers[layer] for layer in small})
    target = Wanted({layer: target.layers[layer] for layer in small})
    plan = plan_migration(prior, target, given_pools)
    assert sum(len(wave.copies) for wave in plan.waves) == fewest_moves(prior, target)


@given(problems(spare=1), st.randoms(use_true_random=False))
@untimed
def test_with_one_spare_slot_on_every_rank_every_order_that_a_run_allows_keeps_all_generations_whole(
    problem: tuple[Occupancy, Wanted, Pools], random: object
) -> None:
    prior, target, given_pools = problem
    plan = plan_migration(prior, target, given_pools)
    run, order = MigrationRun(plan), []
    while not run.finished:
        position = random.choice(run.ready())  # type: ignore[attr-defined]
        run.begin(position)
        run.complete(position)
        order.append(position)
    served = executed(plan, order)
    assert multiset(served) == multiset(target)
    assert run.published().layers == served.layers
    assert multiset(run.resident()) == multiset(target)
    assert sum(len(wave.copies) for wave in plan.waves) == sum(
        (multiset(target)[at] - multiset(prior)[at]).total() for at in target.layers
    )


@given(problems(spare=0))
@untimed
def test_without_spare_slots_a_plan_is_sound_or_its_refusal_is_true(problem: tuple[Occupancy, Wanted, Pools]) -> None:
    prior, target, given_pools = problem
    if not all(reachable(layer, prior, target, given_pools) for layer in target.layers):
        with pytest.raises(PlacementError, match="no order exists"):
            plan_migration(prior, target, given_pools)
        return
    plan = plan_migration(prior, target, given_pools)
    assert multiset(executed(plan, range(len(plan.effects)))) == multiset(target)
    assert plan.ledger.peak_resident.value <= sum(
        EXPERT_BYTES[layer] * sum(given_pools.capacity_of_rank.values()) for layer in target.layers
    )


def reachable(layer: int, prior: Occupancy, target: Wanted, given_pools: Pools) -> bool:
    """Every sequence of single copies of the target and removals of redundant old copies, breadth first."""
    goal = Counter(tuple(home) for home in target.layers[layer])
    start = Counter((held.rank, held.expert) for held in prior.layers[layer])
    frontier, seen = [start], {frozenset(start.items())}
    while frontier:
        now = frontier.pop()
        if now == goal:
            return True
        room = Counter(given_pools.capacity_of_rank)
        room.subtract(Counter(rank for rank, _ in now.elements()))
        copies = Counter(expert for _, expert in now.elements())
        following = [now + Counter([home]) for home in goal - now if room[home[0]] > 0]
        following += [now - Counter([home]) for home in now - goal if copies[home[1]] > 1]
        for state in following:
            key = frozenset(state.items())
            if key not in seen:
                seen.add(key)
                frontier.append(state)
    return False


# -- Waves and the lack of them


def test_a_swap_between_full_ranks_has_no_order_and_the_refusal_says_what_would_do() -> None:
    prior, target = one_layer((0, 0, 0), (1, 0, 1)), wanted((0, 1), (1, 0))
    with pytest.raises(
        PlacementError, match=r"layer 0: no order exists .*rank 0 fills 1 pool slots with 0 free.*1 more on rank 0$"
    ):
        plan_migration(prior, target, pools([0, 0], 1))


def test_the_one_spare_slot_that_a_refusal_asks_for_is_enough() -> None:
    prior, target = one_layer((0, 0, 0), (1, 0, 1)), wanted((0, 1), (1, 0))
    plan = plan_migration(prior, target, pools([0, 0], [2, 1]))
    assert [len(wave.copies) for wave in plan.waves] == [1, 1]
    executed(plan, range(len(plan.effects)))
    # Rank 1's expert arrives beside rank 0's, is published, leaves its old slot, and makes room there.
    assert plan.effects[2:4] == (Publish(1, False), Retire(1, slot(1, 0, 0), LogicalExpertId(1)))
    assert plan.ledger.peak_resident.value == 300


def test_a_redundant_replica_makes_room_before_the_first_copy() -> None:
    prior = one_layer((0, 0, 0), (1, 0, 0), (1, 1, 1))
    plan = plan_migration(prior, wanted((0, 0), (0, 1)), pools([0, 0], 2))
    assert len(plan.waves) == 1
    full = plan_migration(one_layer((0, 0, 0), (1, 0, 0)), wanted((0, 0), (1, 0)), pools([0, 0], 1))
    assert full.waves == () and full.effects == ()
    prior = one_layer((0, 0, 0), (1, 0, 0), (2, 0, 1))
    plan = plan_migration(prior, wanted((0, 1), (1, 0), (2, 1)), pools([0, 0, 0], 1))
    assert [len(wave.copies) for wave in plan.waves] == [0, 1]
    executed(plan, range(len(plan.effects)))


def test_a_plan_that_publishes_on_the_way_is_refused_where_the_way_back_must_stay() -> None:
    prior, target = one_layer((0, 0, 0), (1, 0, 1)), wanted((0, 1), (1, 0))
    with pytest.raises(PlacementError, match="takes 2 waves, allowed 1"):
        plan_migration(prior, target, pools([0, 0], [2, 1]), max_waves=1)


def test_the_search_finds_an_order_where_taking_copies_as_they_come_gets_stuck() -> None:
    # Giving up its expert 3 leaves rank 0 one slot: expert 0 in it helps nobody there, expert 1 sets off a chain.
    prior = one_layer((2, 0, 0), (1, 0, 1), (0, 0, 2), (2, 1, 3), (0, 1, 3))
    target = wanted((0, 0), (0, 1), (1, 2), (2, 3), (2, 3))
    given_pools = pools([0, 0, 0], [2, 1, 2])
    change = _diff(0, prior, target, given_pools, ()).change
    assert isinstance(waves._greedy(change), waves.NoOrder)
    plan = plan_migration(prior, target, given_pools)
    assert multiset(executed(plan, range(len(plan.effects)))) == multiset(target)


def test_a_large_layer_without_room_is_refused_without_a_search_and_the_stated_slots_are_enough() -> None:
    ranks = range(40)
    prior = one_layer(*((rank, 0, rank) for rank in ranks))
    # Two rings of 20 ranks, each of which needs a slot of its own to turn.
    target = wanted(*((rank, 20 * (rank // 20) + (rank + 1) % 20) for rank in ranks))
    change = _diff(0, prior, target, pools([0] * 40, 1), ()).change
    extra = waves.spare_slots_needed(change)
    assert extra == dict.fromkeys(ranks, 1)
    with pytest.raises(PlacementError, match="1 more on rank 39"):
        plan_migration(prior, target, pools([0] * 40, 1))
    assert len(plan_migration(prior, target, pools([0] * 40, 2)).waves) == 1
    two = [2 if rank in (0, 20) else 1 for rank in ranks]
    assert len(plan_migration(prior, target, pools([0] * 40, two)).waves) == 20


# -- Sources


def test_a_lost_expert_comes_from_the_nearest_host_cache_else_from_the_checkpoint() -> None:
    prior, target = one_layer((0, 0, 0)), wanted((0, 0), (0, 1), (2, 1), (1, 2))
    cached = {2: {(0, 1)}, 1: {(1, 2)}}
    found = by_target(plan_migration(prior, target, pools([0, 0, 1], 3, host_cached=cached)))
    assert found[2, 1] == (CopyClass.HOST_CACHE, HostCache(GlobalRank(2)))
    assert found[0, 1] == (CopyClass.CROSS_NODE, slot(2, 0, 0))  # once it is in a slot, that is nearer than a cache
    assert found[1, 2] == (CopyClass.CHECKPOINT, Checkpoint())  # the cache has this expert of another layer only
    assert found[0, 0] == (CopyClass.KEEP, slot(0, 0, 0))
    with pytest.raises(PlacementError, match="expert 2 is in no pool slot and no host cache"):
        plan_migration(prior, target, pools([0, 0, 1], 3, host_cached=cached, checkpoint=False))


def test_a_node_is_entered_once_per_expert_and_equal_sources_share_the_reads() -> None:
    prior = one_layer((0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 1))
    target = wanted((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (3, 0), (2, 1))
    plan = plan_migration(prior, target, pools([0, 0, 1, 1], 4))
    copies = plan.waves[0].copies
    kinds = [(copy.kind, copy.after is not None) for copy in copies if copy.expert.value == 0]
    assert kinds == [(CopyClass.CROSS_NODE, False), (CopyClass.SAME_NODE, True), (CopyClass.SAME_GPU, True)]
    crossed = [
        copy.source.rank.value
        for copy in copies
        if isinstance(copy.source, PoolSlot) and copy.kind is CopyClass.CROSS_NODE
    ]
    assert sorted(crossed) == [0, 1]


# -- Beside other generations, and with the product's own placements


def test_slots_of_another_live_generation_are_neither_filled_nor_freed_and_count_once_at_the_peak() -> None:
    prior = one_layer((0, 0, 0), (0, 1, 1))
    beside = one_layer((0, 1, 1), (0, 2, 0))
    plan = plan_migration(prior, wanted((0, 0), (1, 1)), pools([0, 0], 4), beside=[beside])
    assert [effect for effect in plan.effects if isinstance(effect, Retire)] == []  # slot 1 is still in use elsewhere
    assert multiset(plan.target) == multiset(wanted((0, 0), (1, 1)))
    assert plan.ledger.peak_resident.value == 400  # three slots before, one copy beside them
    grown = plan_migration(prior, wanted((0, 0), (0, 1), (0, 1)), pools([0, 0], 4), beside=[beside])
    assert grown.waves[0].copies[0].slot == slot(0, 0, 3)


CHECKPOINT = CheckpointVersion("checkpoint-1")
RANKS = tuple(GlobalRank(rank) for rank in range(4))
TOPOLOGY = Topology("topology-1", (Domain("node-0", RANKS[:2]), Domain("node-1", RANKS[2:])))


def placed(
    assignment: Assignment, prior: PlacementSnapshot | None, generation: int, capacity: int
) -> PlacementSnapshot:
    snapshot = place(
        assignment,
        generation=generation,
        version=PlacementVersion(f"v{generation}"),
        release_id="release-1",
        checkpoint=CHECKPOINT,
        group=ProcessGroupSpec(ProcessGroupId("ep"), 0, RANKS),
        topology=TOPOLOGY,
        prior=prior,
        capacity=capacity,
    )
    digests = {(at.layer, s.destination_rank.value, s.pool_slot): "d" for at in snapshot.layers for s in at.slots}
    return snapshot.with_digests(digests)


@given(st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 6)), st.integers(1, 4), max_size=6))
@untimed
def test_a_plan_fills_and_frees_the_very_slots_of_the_placement_that_the_cluster_would_make(
    replicas: dict[tuple[int, int], int],
) -> None:
    experts = {0: 7, 1: 7}
    first = balanced(experts, RANKS, replicas={}, spare_slots=0)
    second = balanced(experts, RANKS, replicas=replicas, spare_slots=0)
    capacity = 2 * pool_capacity(second)
    before = placed(first, None, 1, capacity)
    after = placed(second, before, 2, capacity)
    plan = plan_migration(Occupancy.of(before), Wanted.of(second), pools([0, 0, 1, 1], capacity))
    copies = {(copy.slot, copy.expert) for wave in plan.waves for copy in wave.copies}
    assert copies == {(slot(f.rank.value, f.layer, f.pool_slot), f.expert) for f in fills(after, before)}
    freed = {effect.slot for effect in plan.effects if isinstance(effect, Retire)}
    assert freed == retired_slots(before, [after])
    assert plan.target.layers == Occupancy.of(after).layers


# -- Relabelling


@given(st.integers(0, 10_000), st.integers(2, 5))
@untimed
def test_relabelled_ranks_keep_as_much_as_the_best_of_all_permutations(seed: int, size: int) -> None:
    generator = np.random.default_rng(seed)
    prior, target = generator.integers(0, 4, (2, 1, 3 * size))
    rank_of_slot = np.repeat(np.arange(size), 3)
    found = relabel(Copies.of(prior, rank_of_slot), Copies.of(target, rank_of_slot), [range(size)], 1, size)

    def kept(ranks: Sequence[int]) -> int:
        homes = Counter((ranks[rank], int(e)) for rank, e in zip(rank_of_slot, target[0], strict=True))
        return (homes & Counter((int(r), int(e)) for r, e in zip(rank_of_slot, prior[0], strict=True))).total()

    best = max(kept(ranks) for ranks in itertools.permutations(range(size)))
    assert kept(found.rank_LG[0].tolist()) == best
    assert kept(moves._hungarian(_weights_of(prior, target, size))[0].tolist()) == best
    assert best >= kept(moves._greedy_swaps(_weights_of(prior, target, size))[0].tolist()) >= kept(range(size))
    assert found.methods == {Matching.SUBSETS}


def _weights_of(prior: np.ndarray, target: np.ndarray, size: int) -> np.ndarray:
    packs = [[Counter(row[3 * at : 3 * at + 3].tolist()) for at in range(size)] for row in (prior[0], target[0])]
    return np.array([[[(new & old).total() for old in packs[0]] for new in packs[1]]], np.int64)


@pytest.mark.parametrize(("size", "method"), [(9, Matching.HUNGARIAN), (65, Matching.GREEDY_SWAPS)])
def test_larger_groups_find_a_pure_renaming_and_say_how(size: int, method: Matching) -> None:
    generator = np.random.default_rng(size)
    prior = np.stack([generator.permutation(2 * size) for _ in range(3)])
    renamed = np.stack([row.reshape(size, 2)[generator.permutation(size)].ravel() for row in prior])
    rank_of_slot = np.repeat(np.arange(size), 2)
    before, after = Copies.of(prior, rank_of_slot), Copies.of(renamed, rank_of_slot)
    found = relabel(before, after, [range(size)], 3, size)
    assert count_moves(before, found.copies, np.zeros(size), 3).moved_L.tolist() == [0, 0, 0]
    assert found.methods == {method}


def test_a_plan_relabels_only_equal_ranks_of_one_node() -> None:
    prior = one_layer((0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 0, 3))
    target = wanted((0, 1), (1, 0), (2, 3), (3, 2))
    plan = plan_migration(prior, target, pools([0, 0, 1, 1], [2, 2, 2, 3]), relabel_within_node=True)
    assert plan.matchings == {Matching.SUBSETS}
    found = by_target(plan)
    assert found[0, 0][0] is CopyClass.KEEP and found[1, 1][0] is CopyClass.KEEP  # swapped back
    assert found[2, 3][0] is CopyClass.SAME_NODE and found[3, 2][0] is CopyClass.SAME_NODE  # pools of two sizes


def test_ranks_that_stay_equal_are_not_renamed() -> None:
    copies = Copies.of(np.array([[0, 0, 0, 1]]), np.arange(4))
    assert relabel(copies, copies, [range(4)], 1, 4).rank_LG.tolist() == [[0, 1, 2, 3]]


def test_groups_that_share_a_rank_are_refused() -> None:
    copies = Copies.of(np.array([[0, 1]]), np.arange(2))
    with pytest.raises(ConfigError, match="disjoint"):
        relabel(copies, copies, [[0, 1], [1]], 1, 2)


@given(problems())
@untimed
def test_counting_moves_in_arrays_agrees_with_planning_them(problem: tuple[Occupancy, Wanted, Pools]) -> None:
    prior, target, given_pools = problem
    lost = Occupancy({layer: tuple(h for h in held if h.expert != 0) for layer, held in prior.layers.items()})
    plan = plan_migration(lost, target, given_pools)
    layers = sorted(target.layers)
    nodes = np.array([given_pools.node_of_rank[rank] for rank in sorted(given_pools.node_of_rank)])
    counts = count_moves(copies_of(lost, layers), target.copies, nodes, len(layers))
    planned = plan.ledger.copies
    assert counts.kept_L.sum() == planned[CopyClass.KEEP]
    assert counts.same_gpu_L.sum() == planned[CopyClass.SAME_GPU]
    assert counts.same_node_L.sum() == planned[CopyClass.SAME_NODE]
    assert counts.cross_node_L.sum() == planned[CopyClass.CROSS_NODE]
    assert counts.loaded_L.sum() == planned[CopyClass.CHECKPOINT] + planned[CopyClass.HOST_CACHE]


# -- Running a plan


def test_a_slot_that_fails_to_verify_is_filled_again_and_nothing_is_published_before() -> None:
    plan = plan_migration(one_layer((0, 0, 0)), wanted((0, 0), (1, 0)), pools([0, 0], 1))
    run = MigrationRun(plan)
    assert run.ready() == (0,)
    run.begin(0)
    assert run.ready() == ()
    run.complete(0)
    run.begin(1)
    run.fail(1)
    assert run.ready() == (0,)
    with pytest.raises(ScheduleError, match="not_filled: verify of layer 0 rank 1 pool slot 0"):
        run.begin(1)
    for position in (0, 1, 2):
        run.begin(position)
        run.complete(position)
    assert run.finished and multiset(run.published()) == multiset(wanted((0, 0), (1, 0)))


def test_a_run_goes_on_after_a_restart_with_what_was_done() -> None:
    plan = plan_migration(one_layer((0, 0, 0)), wanted((0, 0), (1, 0)), pools([0, 0], 1))
    run = MigrationRun(plan)
    run.begin(0)
    run.complete(0)
    run.begin(1)
    again = MigrationRun(plan, run.done)
    assert again.ready() == (1,)
    assert again.published().layers == plan.prior.layers


def test_every_edge_of_an_effect_and_no_other_is_allowed() -> None:
    for status, event in itertools.product(Status, ("begin", "complete", "fail")):
        if (status, event) in TRANSITIONS:
            assert advance(status, event) is TRANSITIONS[status, event]
        else:
            with pytest.raises(ScheduleError, match="not_allowed"):
                advance(status, event)


# -- Refusals


@pytest.mark.parametrize(
    ("prior", "target", "capacity", "message"),
    [
        (one_layer((0, 0, 0), (0, 1, 1)), wanted((0, 0)), 2, r"layer 0: the target has no copy of experts \[1\]"),
        (
            one_layer((0, 0, 0)),
            wanted((0, 0), (0, 0), (0, 0)),
            2,
            "layer 0 rank 0: 2 new copies need pool slots; of 2, 1",
        ),
        (one_layer((0, 0, 0)), wanted((9, 0)), 2, r"ranks \[9\] have no node or no pool capacity"),
        (one_layer((0, 5, 0)), wanted((0, 0)), 2, "pool slot 5 is in use, capacity is 2"),
        (one_layer((0, 0, 0)), Wanted({}), 2, r"the target drops layers \[0\]"),
        (Occupancy({}), Wanted({7: (Home(0, 0),)}), 2, "layer 7: expert_bytes must be > 0, found None"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    prior: Occupancy, target: Wanted, capacity: int, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        plan_migration(prior, target, pools([0, 0], capacity))


def test_two_experts_in_one_slot_are_refused() -> None:
    with pytest.raises(PlacementError, match="share a pool slot"):
        one_layer((0, 0, 0), (0, 0, 1))
