"""Where experts start, and how a placement changes without touching what still serves."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_moe.controlplane.solve import (
    Assignment,
    Fill,
    LayerAssignment,
    PoolSlot,
    balanced,
    fills,
    place,
    pool_capacity,
)
from ray_moe.errors import CompatibilityError, ConfigError, PlacementError
from ray_moe.identity import CheckpointVersion, GlobalRank, LogicalExpertId, PlacementVersion, ProcessGroupId
from ray_moe.placement import PlacementSnapshot
from ray_moe.topology import Domain, ProcessGroupSpec, Topology
from tests.layers import retired_slots

CHECKPOINT = CheckpointVersion("checkpoint-0042")


def ranks_of(count: int) -> tuple[GlobalRank, ...]:
    """Ranks of a group in no particular order: 10, 11, ... from the end."""
    return tuple(GlobalRank(10 + rank) for rank in reversed(range(count)))


def assignment_of(*homes: tuple[int, int], layer: int = 0, experts: int | None = None) -> Assignment:
    """One layer with an (expert, rank) pair per slot."""
    pairs = tuple((LogicalExpertId(expert), GlobalRank(rank)) for expert, rank in homes)
    return Assignment((LayerAssignment(layer, experts or 1 + max(expert for expert, _ in homes), pairs),))


def placed(
    assignment: Assignment,
    generation: int,
    prior: PlacementSnapshot | None,
    capacity: int,
    live: tuple[PlacementSnapshot, ...] = (),
    checkpoint: CheckpointVersion = CHECKPOINT,
) -> PlacementSnapshot:
    """`place` on all ranks that the assignment names, one node."""
    ranks = tuple(sorted({rank for layer in assignment.layers for _, rank in layer.homes}))
    return place(
        assignment,
        generation=generation,
        version=PlacementVersion(f"placement-v{generation}"),
        release_id="r1",
        checkpoint=checkpoint,
        group=ProcessGroupSpec(ProcessGroupId("ep-group-0"), 0, ranks),
        topology=Topology("t", (Domain("node-0", ranks),)),
        prior=prior,
        capacity=capacity,
        live=live,
    )


def filled(snapshot: PlacementSnapshot) -> PlacementSnapshot:
    """As the owners would report it: the digest names expert and layer."""
    return snapshot.with_digests(
        {
            (layer.layer, slot.destination_rank.value, slot.pool_slot): f"{slot.logical_expert_id}@{layer.layer}"
            for layer in snapshot.layers
            for slot in layer.slots
        }
    )


def experts_by_rank(assignment: Assignment, ranks: tuple[GlobalRank, ...]) -> list[list[int]]:
    homes = assignment.layers[0].homes
    return [[expert.value for expert, home in homes if home == rank] for rank in ranks]


# -- The start rule


def test_without_replicas_every_rank_has_a_contiguous_block() -> None:
    ranks = ranks_of(4)
    even = balanced({3: 16}, ranks, replicas={}, spare_slots=0)
    assert experts_by_rank(even, ranks) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    uneven = balanced({3: 6}, ranks, replicas={}, spare_slots=0)
    assert experts_by_rank(uneven, ranks) == [[0, 1], [2, 3], [4], [5]]


def test_the_examples_in_the_docstrings() -> None:
    ranks = ranks_of(2)
    assert experts_by_rank(balanced({0: 4}, ranks, replicas={(0, 3): 2}, spare_slots=0), ranks) == [[0, 1, 3], [2, 3]]
    ranks = ranks_of(3)
    dealt = balanced({0: 5}, ranks, replicas={(0, 4): 3}, spare_slots=0)
    assert experts_by_rank(dealt, ranks) == [[0, 4], [1, 4], [2, 3, 4]]


def test_one_more_copy_of_one_expert_is_one_load_and_moves_nothing() -> None:
    ranks = ranks_of(4)
    for expert in range(16):
        first = filled(placed(balanced({0: 16}, ranks, replicas={}, spare_slots=1), 1, None, capacity=5))
        second = placed(balanced({0: 16}, ranks, replicas={(0, expert): 2}, spare_slots=1), 2, first, capacity=5)
        assert [load.expert.value for load in fills(second, first)] == [expert]
        assert not retired_slots(first, [second])


def test_a_single_replicated_expert_starts_where_it_would_live_anyway() -> None:
    ranks = ranks_of(4)
    asked = balanced({0: 16}, ranks, replicas={(0, 13): 2}, spare_slots=0)
    assert [seat for seat, experts in enumerate(experts_by_rank(asked, ranks)) if 13 in experts] == [0, 3]


def test_replicas_of_every_expert_fill_every_rank_evenly() -> None:
    ranks = ranks_of(3)
    asked = balanced({0: 3}, ranks, replicas={(0, 0): 2, (0, 1): 2, (0, 2): 2}, spare_slots=0)
    assert [len(set(experts)) for experts in experts_by_rank(asked, ranks)] == [2, 2, 2]


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[int, int], tuple[GlobalRank, ...], dict[tuple[int, int], int]]:
    num_ranks = draw(st.integers(1, 9))
    layers = draw(st.dictionaries(st.integers(0, 5), st.integers(1, 20), min_size=1, max_size=3))
    replicas = {
        (layer, draw(st.integers(0, experts - 1))): draw(st.integers(1, num_ranks))
        for layer, experts in layers.items()
        for _ in range(draw(st.integers(0, 6)))
    }
    return layers, ranks_of(num_ranks), replicas


@settings(max_examples=150, deadline=None)
@given(request=requests(), spare_slots=st.integers(0, 3))
def test_the_start_rule_is_level_with_distinct_replicas_and_contiguous_blocks(
    request: tuple[dict[int, int], tuple[GlobalRank, ...], dict[tuple[int, int], int]], spare_slots: int
) -> None:
    layers, ranks, replicas = request
    assignment = balanced(layers, ranks, replicas=replicas, spare_slots=spare_slots)
    assert {layer.layer: layer.num_logical_experts for layer in assignment.layers} == layers
    for layer in assignment.layers:
        homes = [(expert.value, rank) for expert, rank in layer.homes]
        copies = {expert: replicas.get((layer.layer, expert), 1) for expert in range(layer.num_logical_experts)}
        assert Counter(expert for expert, _ in homes) == copies
        assert len(set(homes)) == len(homes), "copies of one expert share a rank"
        load = Counter(rank for _, rank in homes)
        assert max(load.values()) == -(-len(homes) // len(ranks)), "the bound is ceil(slots / peers)"
        assert max(load.values()) - min(load[rank] for rank in ranks) <= 1
        # Homes are listed rank by rank, so contiguous blocks in rank order are one ascending run.
        singles = [expert for expert, _ in homes if copies[expert] == 1]
        assert singles == sorted(singles)
        assert [rank for _, rank in homes] == [rank for rank in ranks for _ in range(load[rank])]


@pytest.mark.parametrize(
    ("layers", "ranks", "replicas", "spare_slots", "message"),
    [
        ({0: 4}, (), {}, 0, r"ranks must be distinct and not empty, found \[\]"),
        ({0: 4}, (1, 1), {}, 0, r"ranks must be distinct and not empty, found \[1, 1\]"),
        ({0: 4}, (0,), {}, -1, "spare_slots must be >= 0, found -1"),
        ({0: 0}, (0,), {}, 0, "layer 0: the number of experts must be >= 1, found 0"),
        ({1: 4, 3: 4}, (0, 1), {(0, 0): 2}, 0, r"layer must be one of \[1, 3\], found 0"),
        ({0: 4}, (0, 1), {(0, 4): 2}, 0, r"expert of layer 0 must be in \[0, 4\), found 4"),
        ({0: 4}, (0, 1), {(0, 3): 3}, 0, r"layer 0 expert 3: count must be in \[1, 2\].*, found 3"),
        ({0: 4}, (0, 1), {(0, 3): 0}, 0, r"layer 0 expert 3: count must be in \[1, 2\].*, found 0"),
    ],
)
def test_a_request_out_of_bounds_is_refused_with_value_and_bound(
    layers: dict[int, int],
    ranks: tuple[int, ...],
    replicas: dict[tuple[int, int], int],
    spare_slots: int,
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        balanced(layers, [GlobalRank(rank) for rank in ranks], replicas=replicas, spare_slots=spare_slots)


def test_the_pool_has_room_for_the_fullest_rank_of_any_layer_and_the_spare_slots() -> None:
    assignment = balanced({0: 6, 1: 9}, ranks_of(4), replicas={}, spare_slots=2)
    assert pool_capacity(assignment) == 3 + 2
    assert pool_capacity(assignment, spare_slots=0) == 3


# -- The first placement


def test_the_first_placement_numbers_slots_in_manifest_order_and_fills_everything() -> None:
    snapshot = placed(assignment_of((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (3, 3)), 17, None, capacity=2)
    slots = snapshot.layers[0].slots
    assert [slot.physical_slot_id.value for slot in slots] == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert [slot.replica_id.value for slot in slots] == ["e0-r0", "e0-r1", "e1-r0", "e1-r1", "e2-r0", "e3-r0"]
    assert [slot.pool_slot for slot in slots] == [0, 0, 1, 0, 1, 0]
    assert not snapshot.verified
    assert fills(snapshot, None) == tuple(
        Fill(slot.destination_rank, 0, slot.pool_slot, slot.logical_expert_id) for slot in slots
    )


def test_too_small_a_pool_is_refused_with_rank_layer_needed_and_free() -> None:
    with pytest.raises(PlacementError, match="rank 1 layer 4: 2 pool slots needed, 1 of 1 free"):
        placed(assignment_of((0, 0), (1, 1), (2, 1), layer=4), 1, None, capacity=1)


def test_a_rank_outside_topology_or_group_is_refused_by_name() -> None:
    assignment = assignment_of((0, 0), (1, 1))
    whole = placed(assignment, 1, None, capacity=1)
    arguments = {
        "generation": 1,
        "version": whole.version,
        "release_id": "r1",
        "checkpoint": CHECKPOINT,
        "prior": None,
        "capacity": 1,
    }
    with pytest.raises(PlacementError, match="rank 1 belongs to no domain of topology t"):
        place(
            assignment,
            group=whole.group,
            topology=Topology("t", (Domain("node-0", (GlobalRank(0),)),)),
            **arguments,
        )
    with pytest.raises(CompatibilityError) as refused:
        place(
            assignment,
            group=ProcessGroupSpec(ProcessGroupId("g"), 0, (GlobalRank(0),)),
            topology=whole.topology,
            **arguments,
        )
    assert refused.value.clause == "rank_in_group"


# -- A placement beside the one that serves


def test_an_expert_that_stays_keeps_pool_slot_digest_and_replica_id() -> None:
    first = filled(placed(assignment_of((0, 0), (1, 0), (2, 1)), 1, None, capacity=3))
    # Expert 0 gains a copy on rank 1, expert 1 moves to rank 1, expert 2 stays; manifest order changes as well.
    second = placed(assignment_of((2, 1), (1, 1), (0, 1), (0, 0)), 2, first, capacity=3)
    stays, moved, copy, original = second.layers[0].slots
    assert (stays.pool_slot, stays.parameter_digest, stays.replica_id.value) == (0, "2@0", "e2-r0")
    assert (original.pool_slot, original.parameter_digest, original.replica_id.value) == (0, "0@0", "e0-r0")
    assert (moved.pool_slot, moved.parameter_digest, moved.replica_id.value) == (1, "", "e1-r1")
    assert (copy.pool_slot, copy.parameter_digest, copy.replica_id.value) == (2, "", "e0-r1")
    assert fills(second, first) == (
        Fill(GlobalRank(1), 0, 1, LogicalExpertId(1)),
        Fill(GlobalRank(1), 0, 2, LogicalExpertId(0)),
    )
    assert retired_slots(first, [second]) == {PoolSlot(GlobalRank(0), 0, 1)}
    assert not retired_slots(first, [second, first])


def test_two_experts_that_trade_places_need_a_spare_slot_each() -> None:
    first = filled(placed(assignment_of((0, 0), (1, 1)), 1, None, capacity=2))
    swapped = assignment_of((1, 0), (0, 1))
    assert [slot.pool_slot for slot in placed(swapped, 2, first, capacity=2).layers[0].slots] == [1, 1]
    with pytest.raises(PlacementError, match="rank 0 layer 0: 1 pool slots needed, 0 of 1 free"):
        placed(swapped, 2, first, capacity=1)


def test_slots_of_older_live_generations_are_not_overwritten_either() -> None:
    first = filled(placed(assignment_of((0, 0), (1, 1)), 1, None, capacity=2))
    second = filled(placed(assignment_of((0, 1), (1, 1)), 2, first, capacity=2))
    third = assignment_of((1, 0), (0, 1))
    assert placed(third, 3, second, capacity=2).layers[0].slots[0].pool_slot == 0, "free once generation 1 is retired"
    assert placed(third, 3, second, capacity=2, live=(first,)).layers[0].slots[0].pool_slot == 1


def test_another_checkpoint_keeps_nothing_and_overwrites_nothing() -> None:
    assignment = assignment_of((0, 0), (1, 1))
    first = filled(placed(assignment, 1, None, capacity=2))
    second = placed(assignment, 2, first, capacity=2, checkpoint=CheckpointVersion("checkpoint-0043"))
    assert [slot.pool_slot for slot in second.layers[0].slots] == [1, 1]
    assert len(fills(second, first)) == 2
    assert retired_slots(first, [second]) == {PoolSlot(GlobalRank(0), 0, 0), PoolSlot(GlobalRank(1), 0, 0)}


def test_two_copies_on_one_rank_are_kept_one_by_one() -> None:
    first = filled(placed(assignment_of((0, 0), (0, 0)), 1, None, capacity=3))
    second = placed(assignment_of((0, 0), (0, 0), (0, 0)), 2, first, capacity=3)
    assert [slot.pool_slot for slot in second.layers[0].slots] == [0, 1, 2]
    assert len(fills(second, first)) == 1


def random_assignment(source: random.Random, layers: int, experts: int, ranks: int, most: int) -> Assignment:
    """Every expert at least once, further copies anywhere, no rank above `most` slots of a layer."""
    chosen = []
    for layer in range(layers):
        room = [rank for rank in range(ranks) for _ in range(most)]
        source.shuffle(room)
        extra = source.randint(0, len(room) - experts)
        wanted = [*range(experts), *(source.randrange(experts) for _ in range(extra))]
        source.shuffle(wanted)
        pairs = tuple((LogicalExpertId(expert), GlobalRank(room.pop())) for expert in wanted)
        chosen.append(LayerAssignment(layer, experts, pairs))
    return Assignment(tuple(chosen))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), spare=st.integers(0, 3))
def test_over_many_changes_every_live_generation_always_reads_its_own_experts(seed: int, spare: int) -> None:
    """The oracle is the memory itself: pool slots hold what was last loaded, and only loads and frees change them."""
    source = random.Random(seed)
    most = 3
    memory: dict[PoolSlot, tuple[int, str]] = {}
    live: list[PlacementSnapshot] = []
    checkpoint = CHECKPOINT
    for generation in range(1, 7):
        if source.random() < 0.1:
            checkpoint = CheckpointVersion(f"checkpoint-{generation}")
        assignment = random_assignment(source, layers=2, experts=4, ranks=3, most=most)
        prior = live[-1] if live else None
        try:
            candidate = placed(assignment, generation, prior, most + spare, tuple(live[:-1]), checkpoint)
        except PlacementError:
            # No room: what still serves is as it was. Drain all but the active generation, and go on.
            while len(live) > 1:
                old = live.pop(0)
                for home in retired_slots(old, live):
                    del memory[home]
            continue
        for load in fills(candidate, prior):
            home = PoolSlot(load.rank, load.layer, load.pool_slot)
            assert home not in memory, "overwritten in place"
            assert load.pool_slot < most + spare
            memory[home] = (load.expert.value, checkpoint.value)
        for layer in candidate.layers:
            for slot in layer.slots:
                assert bool(slot.parameter_digest) != (
                    Fill(slot.destination_rank, layer.layer, slot.pool_slot, slot.logical_expert_id)
                    in fills(candidate, prior)
                )
        live.append(filled(candidate))
        for snapshot in live:
            for layer in snapshot.layers:
                for slot in layer.slots:
                    home = PoolSlot(slot.destination_rank, layer.layer, slot.pool_slot)
                    assert memory[home] == (slot.logical_expert_id.value, snapshot.checkpoint_version.value)
    while live:
        old = live.pop(0)
        for home in retired_slots(old, live):
            del memory[home]
    assert memory == {}, "storage that nothing refers to was not given back"


def test_with_as_many_spare_slots_as_a_rank_holds_any_change_fits_beside_the_serving_placement() -> None:
    ranks = ranks_of(3)
    first = balanced({0: 7}, ranks, replicas={(0, 2): 3}, spare_slots=0)
    capacity = 2 * pool_capacity(first)
    held = filled(placed(first, 1, None, capacity))
    mirrored = dict(zip(ranks, reversed(ranks), strict=True))
    layer = first.layers[0]
    moved = dataclasses.replace(
        first,
        layers=(dataclasses.replace(layer, homes=tuple((expert, mirrored[rank]) for expert, rank in layer.homes)),),
    )
    after = placed(moved, 2, held, capacity)
    stayed = sum(home in layer.homes for home in moved.layers[0].homes)
    assert len(fills(after, held)) == len(layer.homes) - stayed
