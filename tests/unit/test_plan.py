"""Plans and layouts: one replica per route, stable order, counts that all peers check, nothing lost or added."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.dataplane.plan import (
    Layout,
    Plan,
    SlotMap,
    agree_layouts,
    expert_order,
    layout_record,
    make_plan,
    plan_assignment,
    refusal_record,
)
from ray_moe.dataplane.policies import TokenHash, policy_named
from ray_moe.errors import (
    CountMismatchError,
    DuplicateExecutionError,
    LostRouteError,
    NotInReplicaSetError,
    PlacementError,
    RoutesError,
)
from ray_moe.identity import LogicalExpertId
from ray_moe.kernels.reference import inverse_of
from ray_moe.placement import ShardCoordinate
from ray_moe.routes import Routes
from ray_moe.topology import Domain, Topology
from tests.layers import CPU, ONE_PEER, World, placement, random_routes, slot_map, spec_of, untimed, worlds

POLICIES = ("token_hash", "locality_first", "least_load", "round_robin", "queue_aware")
POLICY = st.sampled_from(POLICIES)

# Expert 0 twice, manifest order against peer order: slots q0 and q3 hold expert 0 on ranks 1 and 0.
SNAPSHOT = placement([(0, 1), (1, 1), (2, 0), (0, 0)], spec_of((0, 1)))
SLOTS = slot_map(SNAPSHOT, 0)


def plans_of(world: World, policy: str) -> list[Plan]:
    return [
        make_plan(routes, slots, policy_named(policy))
        for routes, slots in zip(world.routes_P, world.slots_P, strict=True)
    ]


def layouts_of(world: World, plans: list[Plan]) -> list[Layout]:
    records = torch.stack([layout_record([plan], 99, 7) for plan in plans])
    return [agree_layouts(records, slots)[0] for slots in world.slots_P]


# -- One origin


@untimed
@given(worlds(), POLICY)
def test_every_route_gets_exactly_one_slot_inside_its_replica_set(world: World, policy: str) -> None:
    layer = world.snapshot.layers[0]
    for routes, plan in zip(world.routes_P, plans_of(world, policy), strict=True):
        assert plan.physical_slot_N.shape == (routes.num_routes,)
        for expert, position in zip(routes.topk_ids.view(-1).tolist(), plan.physical_slot_N.tolist(), strict=True):
            assert position in layer.replicas(LogicalExpertId(expert))


@untimed
@given(worlds(), POLICY)
def test_send_order_is_stable_by_destination_slot_and_semantic_position(world: World, policy: str) -> None:
    for slots, plan in zip(world.slots_P, plans_of(world, policy), strict=True):
        positions = plan.physical_slot_N.tolist()
        expected = sorted(range(len(positions)), key=lambda route: (world.peer_of(positions[route]), positions[route]))
        assert plan.order_N.tolist() == expected
        assert inverse_of(plan.order_N)[plan.order_N].tolist() == list(range(len(positions)))
        in_dispatch_order = sorted(range(slots.num_slots), key=lambda slot: (world.peer_of(slot), slot))
        assert plan.counts_S.tolist() == [positions.count(slot) for slot in in_dispatch_order]


@untimed
@given(worlds())
def test_the_compiled_map_says_what_the_manifest_says(world: World) -> None:
    layer = world.snapshot.layers[0]
    for peer, slots in enumerate(world.slots_P):
        assert slots.my_peer == peer
        assert slots.phy2log_S.tolist() == [slot.logical_expert_id.value for slot in layer.slots]
        assert slots.peer_S.tolist() == [world.peer_of(position) for position in range(len(layer.slots))]
        assert sorted(slots.dispatch_S.tolist()) == list(range(slots.num_slots))
        bounds = slots.peer_bounds_P1
        assert [end - start for start, end in pairwise(bounds)] == [
            slots.peer_S.tolist().count(other) for other in range(slots.num_peers)
        ]
        mine = layer.slots_of(world.snapshot.group.peers[peer])
        assert slots.pool_slots == tuple(slot.pool_slot for slot in mine)
        for expert in range(slots.num_experts):
            start, size = int(slots.replica_offsets_E1[expert]), int(slots.replicas_E[expert])
            replicas = tuple(slots.replica_values_S[start : start + size].tolist())
            assert replicas == layer.replicas(LogicalExpertId(expert))
            assert int(slots.first_replica_E[expert]) == replicas[0]
        assert slots.replicated == (max(slots.replicas_E.tolist()) > 1)


def test_narrow_ids_and_strided_routes_plan_like_the_others() -> None:
    routes = random_routes(3, 5, 2, 3)
    wanted = make_plan(routes, SLOTS, policy_named("token_hash"))
    for ids in (routes.topk_ids.to(torch.int32), routes.topk_ids.t().contiguous().t()):
        plan = make_plan(dataclasses.replace(routes, topk_ids=ids), SLOTS, policy_named("token_hash"))
        assert torch.equal(plan.order_N, wanted.order_N)
        assert torch.equal(plan.physical_slot_N, wanted.physical_slot_N)


@pytest.mark.parametrize(("bad", "named"), [(-1, -1), (3, 3), (2**40, 2**40)])
@pytest.mark.parametrize("homes", [[(0, 0), (1, 0), (2, 0)], [(0, 0), (1, 0), (2, 0), (0, 0)]], ids=["one", "several"])
def test_an_expert_that_the_layer_does_not_have_is_refused(homes: list[tuple[int, int]], bad: int, named: int) -> None:
    routes = Routes(torch.tensor([[0, 2], [bad, 1]]), torch.ones(2, 2))
    with pytest.raises(RoutesError, match=rf"ids must be in \[0, 3\), found {named}"):
        make_plan(routes, slot_map(placement(homes, ONE_PEER), 0), policy_named("token_hash"))


# -- A given assignment

PAIR = Routes(torch.tensor([[0, 1], [2, 0]]), torch.ones(2, 2))


def test_a_given_assignment_is_laid_out_as_it_is() -> None:
    plan = plan_assignment(PAIR, torch.tensor([3, 1, 2, 0]), SLOTS)
    # Peer 0 owns q2 and q3, peer 1 owns q0 and q1: routes 2 and 0 go to peer 0, routes 3 and 1 to peer 1.
    assert plan.order_N.tolist() == [2, 0, 3, 1]
    assert plan.counts_S.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("assignment", "route"),
    [
        ([1, 3, 2, 0], 0),  # routes 0 and 1 trade slots: every count stays right
        ([3, 1, 2, 2], 3),
        ([3, 1, -2, 0], 2),  # would index the right slot from the end
        ([3, 4, 2, 0], 1),
        ([3, 1, 2, 2**40], 3),
    ],
)
def test_a_slot_of_another_expert_is_refused_whatever_the_counts(assignment: list[int], route: int) -> None:
    with pytest.raises(NotInReplicaSetError, match=f"layer 0 generation 1: route {route} wants expert"):
        plan_assignment(PAIR, torch.tensor(assignment), SLOTS)


def test_too_few_or_too_many_slots_are_lost_routes_or_duplicate_execution() -> None:
    with pytest.raises(LostRouteError, match="4 routes were given 3 slots"):
        plan_assignment(PAIR, torch.tensor([3, 1, 2]), SLOTS)
    with pytest.raises(DuplicateExecutionError, match="4 routes were given 5 slots"):
        plan_assignment(PAIR, torch.tensor([3, 1, 2, 0, 0]), SLOTS)


class Meddler(TokenHash):
    """A policy that reroutes: always the slot of expert 2."""

    name = "meddler"

    def choose(self, routes: Routes, slots: SlotMap) -> torch.Tensor:
        return torch.full((routes.num_routes,), 2)


def test_a_policy_that_changes_an_expert_is_refused() -> None:
    with pytest.raises(NotInReplicaSetError, match="route 0 wants expert 0, manifest position 2 of 4"):
        make_plan(PAIR, SLOTS, Meddler())


# -- All origins


@untimed
@given(worlds(), POLICY)
def test_every_route_arrives_once_in_a_segment_of_its_own_expert(world: World, policy: str) -> None:
    plans = plans_of(world, policy)
    layouts = layouts_of(world, plans)
    seen: Counter[tuple[int, int]] = Counter()
    for me, (slots, layout) in enumerate(zip(world.slots_P, layouts, strict=True)):
        arrived: list[tuple[int, int]] = []
        for source, (plan, theirs) in enumerate(zip(plans, layouts, strict=True)):
            start, end = theirs.send_offsets_P1[me : me + 2]
            arrived += [(source, route) for route in plan.order_N[start:end].tolist()]
        assert len(arrived) == sum(layout.recv_counts_P)
        order = expert_order(layout.recv_counts_PS, CPU).tolist()
        segments = [arrived[position] for position in order]
        mine = [slot for slot in range(slots.num_slots) if world.peer_of(slot) == me]
        assert len(layout.expert_offsets_S1) == len(mine) + 1
        for local, position in enumerate(mine):
            rows = segments[layout.expert_offsets_S1[local] : layout.expert_offsets_S1[local + 1]]
            wanted = [
                (source, route)
                for source, plan in enumerate(plans)
                for route, chosen in enumerate(plan.physical_slot_N.tolist())
                if chosen == position
            ]
            assert rows == wanted  # stable by source and by the source's own order
            seen.update(rows)
    everything = {(peer, route) for peer, routes in enumerate(world.routes_P) for route in range(routes.num_routes)}
    assert seen == dict.fromkeys(everything, 1)


@untimed
@given(worlds(), POLICY)
def test_splits_are_one_matrix_read_by_row_and_by_column(world: World, policy: str) -> None:
    plans = plans_of(world, policy)
    layouts = layouts_of(world, plans)
    matrix = [[0] * len(plans) for _ in plans]
    for source, plan in enumerate(plans):
        for position in plan.physical_slot_N.tolist():
            matrix[source][world.peer_of(position)] += 1
    for me, layout in enumerate(layouts):
        assert layout.counts_PP == tuple(map(tuple, matrix))
        assert layout.send_counts_P == tuple(matrix[me])
        assert layout.recv_counts_P == tuple(row[me] for row in matrix)
        assert layout.send_offsets_P1 == tuple(accumulate(matrix[me], initial=0))
        assert layout.send_offsets_P1[-1] == world.routes_P[me].num_routes
        assert tuple(map(sum, layout.recv_counts_PS)) == layout.recv_counts_P
        assert layout.expert_offsets_S1[-1] == sum(layout.recv_counts_P)


@untimed
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 5)).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 4), min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0]
        )
    )
)
def test_the_expert_order_is_a_stable_sort_of_what_arrived_by_slot(counts: list[list[int]]) -> None:
    slots = [slot for source in counts for slot, count in enumerate(source) for _ in range(count)]
    expected = sorted(range(len(slots)), key=lambda position: slots[position])
    assert expert_order(counts, CPU).tolist() == expected


def test_the_expert_orders_worked_example_holds() -> None:
    assert expert_order([[1, 2], [1, 0]], CPU).tolist() == [0, 3, 1, 2]


# -- Refusals before payload


def records() -> torch.Tensor:
    routes = [random_routes(seed, 3, 2, 3) for seed in (1, 2)]
    maps = [slot_map(SNAPSHOT, rank) for rank in (0, 1)]
    return torch.stack(
        [
            layout_record([make_plan(route, slots, policy_named("token_hash"))], 55, 8)
            for route, slots in zip(routes, maps, strict=True)
        ]
    )


def refused_by_all(lines: torch.Tensor, message: str) -> None:
    for rank in (0, 1):
        with pytest.raises(CountMismatchError, match=message):
            agree_layouts(lines, slot_map(SNAPSHOT, rank))


@untimed
@given(st.integers(0, 1), st.integers(0, 6), st.sampled_from([-1, 1, 17]))
def test_any_number_that_changes_in_any_line_is_refused_by_every_peer(peer: int, column: int, change: int) -> None:
    lines = records()
    lines[peer, column] += change
    refused_by_all(lines, "layer 0 generation 1: ")


def test_each_refusal_names_its_reason() -> None:
    for column in (0, 1):
        lines = records()
        lines[1, column] += 1
        refused_by_all(lines, "peer slot [01] is at header/invocation")
    lines = records()
    lines[1, 4] += 1
    refused_by_all(lines, "peer slot 1 accepted 6 routes but its counts sum to 7")
    lines = records()
    lines[0, 3:] = torch.tensor([-1, 7, 0, 0])
    refused_by_all(lines, "peer slot 0 accepted 6 routes but its counts sum to 6")
    lines = records()
    lines[1] = refusal_record(SLOTS, 55, 8)
    refused_by_all(lines, "peer slot 1 refused its own routes")


def test_lines_of_another_shape_than_the_placements_are_refused() -> None:
    refused_by_all(records()[:1], "1 lines of 7 numbers came, 2 peers with 4 slots send 2 lines of 7")
    refused_by_all(records()[:, :6], "2 lines of 6 numbers came")


# -- Placements that cannot be compiled


def test_parts_of_an_expert_are_not_taken_for_replicas() -> None:
    layer = SNAPSHOT.layers[0]
    parts = tuple(
        dataclasses.replace(slot, shard=ShardCoordinate(index, 2))
        for index, slot in enumerate((layer.slots[0], layer.slots[3]))
    )
    split = dataclasses.replace(layer, slots=(parts[0], layer.slots[1], layer.slots[2], parts[1]))
    with pytest.raises(PlacementError, match="slot q0 holds part 0 of 2 of an expert"):
        slot_map(dataclasses.replace(SNAPSHOT, layers=(split,)), 0)


def test_a_rank_without_a_seat_or_a_domain_cannot_compile() -> None:
    with pytest.raises(PlacementError, match="rank 7 has no seat"):
        slot_map(SNAPSHOT, 7)
    seated = placement([(0, 0), (1, 0)], spec_of((0, 1)))
    homeless = dataclasses.replace(seated, topology=Topology("t", (Domain("node-0", spec_of((0,)).peers),)))
    with pytest.raises(PlacementError, match="rank 1 belongs to no domain of topology t"):
        slot_map(homeless, 1)
