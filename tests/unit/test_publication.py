"""From an operation to the generations on the way: whole plans, what a candidate keeps, topologies that follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.controlplane.occupancy import Held, Occupancy
from ray_moe.controlplane.operations import ByCounts, ByHomes, ByLoads, Kind, Operation, Stage, Target, Wave
from ray_moe.controlplane.outstanding import ranks_of
from ray_moe.controlplane.publication import Storage, candidate_of, plan_waves, ranks_after, with_members
from ray_moe.errors import ConfigError, PlacementError
from ray_moe.identity import GlobalRank
from ray_moe.placement import PlacementSnapshot
from ray_moe.topology import Domain, NicPath, Topology
from tests.layers import untimed
from tests.unit.reconciling import Homes, first_placement

ROOMY = Storage(capacity=8, spare=1, expert_bytes=10)
TWO_RANKS: Homes = {0: [(0, 0), (1, 0), (2, 1), (3, 1)], 5: [(0, 1), (1, 0), (2, 1), (3, 0)]}
SWAPPED: dict[int, tuple[tuple[int, int], ...]] = {0: ((0, 1), (1, 1), (2, 0), (3, 0))}


def operation(kind: Kind, *ranks: int, target: Target | None = None) -> Operation:
    return Operation(1, kind, "somebody", "a test", 0.0, Stage.QUEUED, ranks=ranks, target=target)


def grown(topology: Topology, *ranks: int) -> Topology:
    known = [rank.value for rank in topology.owner]
    return with_members(topology, (*known, *ranks), {rank: f"machine-{rank % 2}" for rank in (*known, *ranks)})


def homes_of(occupancy: Occupancy, layer: int) -> set[tuple[int, int]]:
    return {(held.expert, held.rank) for held in occupancy.layers[layer]}


# -- Ranks and waves


def test_ranks_that_stay_keep_their_order_and_new_ones_come_last() -> None:
    active = first_placement(TWO_RANKS, 8)
    active = replace(active, group=replace(active.group, peers=(GlobalRank(1), GlobalRank(0))))
    assert ranks_after(operation(Kind.REBALANCE), active) == (1, 0)
    assert ranks_after(operation(Kind.GROW, 7, 4), active) == (1, 0, 7, 4)
    assert ranks_after(operation(Kind.GROW, 0, 4), active) == (1, 0, 4)
    assert ranks_after(operation(Kind.SHRINK, 1), active) == (0,)


def test_a_rebalance_takes_one_wave_where_there_is_room_and_none_where_nothing_changes() -> None:
    active = first_placement(TWO_RANKS, 8)
    (wave,) = plan_waves(operation(Kind.REBALANCE, target=ByHomes(SWAPPED)), active, ROOMY, active.topology)
    assert not wave.new_epoch
    assert homes_of(wave.occupancy, 0) == set(SWAPPED[0])
    assert homes_of(wave.occupancy, 5) == set(TWO_RANKS[5])
    assert plan_waves(operation(Kind.REBALANCE, target=ByCounts({})), active, ROOMY, active.topology) == ()


def test_a_grow_begins_its_epoch_with_the_first_wave_and_a_shrink_with_the_last() -> None:
    """One spare slot: two waves each, and every one of them holds every expert."""
    active, tight = first_placement(TWO_RANKS, 3), Storage(capacity=3, spare=1, expert_bytes=10)
    swapped = {layer: tuple((expert, 1 - rank) for expert, rank in pairs) for layer, pairs in TWO_RANKS.items()}
    grow = plan_waves(operation(Kind.GROW, 2, target=ByHomes(swapped)), active, tight, grown(active.topology, 2))
    assert [wave.new_epoch for wave in grow] == [True, False]
    three = first_placement({layer: [*pairs, (0, 2)] for layer, pairs in TWO_RANKS.items()}, 3)
    shrink = plan_waves(operation(Kind.SHRINK, 2, target=ByHomes(swapped)), three, tight, three.topology)
    assert [wave.new_epoch for wave in shrink] == [False, True]
    for wave in (*grow, *shrink):
        for layer in TWO_RANKS:
            assert {expert for expert, _ in homes_of(wave.occupancy, layer)} == {0, 1, 2, 3}
    assert all(homes_of(waves[-1].occupancy, 0) == set(swapped[0]) for waves in (grow, shrink))


def test_ranks_come_and_go_also_where_no_copy_moves() -> None:
    active = first_placement({0: [(0, 0)]}, 4)
    (wave,) = plan_waves(operation(Kind.GROW, 1), active, ROOMY, grown(active.topology, 1))
    assert wave == Wave(Occupancy.of(active), new_epoch=True)
    lone = replace(active, group=replace(active.group, peers=(GlobalRank(0), GlobalRank(1))))
    lone = replace(lone, topology=grown(active.topology, 1))
    (wave,) = plan_waves(operation(Kind.SHRINK, 1), lone, ROOMY, lone.topology)
    assert wave == Wave(Occupancy.of(active), new_epoch=True)


def test_fewer_ranks_take_the_spare_slots_before_a_shrink_is_refused() -> None:
    active = first_placement(TWO_RANKS, 4)
    (wave,) = plan_waves(operation(Kind.SHRINK, 1), active, Storage(4, 1, 10), active.topology)
    assert homes_of(wave.occupancy, 0) == {(expert, 0) for expert in range(4)}
    with pytest.raises(PlacementError, match="layer 0: 4 experts need as many slots, 1 ranks with 3 each have 3"):
        plan_waves(operation(Kind.SHRINK, 1), active, Storage(3, 1, 10), active.topology)
    with pytest.raises(PlacementError, match=r"ranks \[0, 1\] are all there are: at least one must stay"):
        plan_waves(operation(Kind.SHRINK, 0, 1), active, ROOMY, active.topology)


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (ByCounts({(0, 9): 1}), ConfigError, r"expert of layer 0 must be in \[0, 4\), found 9"),
        (ByHomes({0: ((0, 4),)}), PlacementError, r"rank must be one of \[0, 1\], found 4"),
        (ByLoads(np.ones((1, 4))), ConfigError, r"loads must be \[layers, experts\] = \[2, 4\], found"),
        (ByHomes({0: tuple((e, 0) for e in range(4))}), PlacementError, "layer 0 rank 0: 2 new copies need pool slots"),
    ],
)
def test_a_target_that_cannot_be_is_refused_by_name(target: Target, error: type[Exception], message: str) -> None:
    active = first_placement(TWO_RANKS, 3)
    with pytest.raises(error, match=message):
        plan_waves(operation(Kind.REBALANCE, target=target), active, Storage(3, 1, 10), active.topology)


@pytest.mark.parametrize(("capacity", "spare", "room"), [(8, 1, 7), (3, 0, 3), (2, 2, 1), (1, 4, 1)])
def test_room_is_what_spare_slots_leave_and_one_slot_at_least(capacity: int, spare: int, room: int) -> None:
    assert Storage(capacity, spare, 10).room == room


# -- The candidate


def candidate(
    active: PlacementSnapshot, wave: Wave, *, ranks: tuple[int, ...] = (), epoch: int = 0
) -> PlacementSnapshot:
    return candidate_of(wave, active, ranks=ranks, epoch=epoch, topology=grown(active.topology, *ranks))


def test_what_stays_keeps_digest_and_name_and_what_comes_is_unverified_until_its_digest_arrives() -> None:
    active = first_placement(TWO_RANKS, 8)
    (wave,) = plan_waves(operation(Kind.REBALANCE, target=ByCounts({(0, 2): 2})), active, ROOMY, active.topology)
    made = candidate(active, wave)
    assert (made.generation, made.version.value) == (2, "placement-v2")
    assert (made.group, made.topology) == (active.group, active.topology)
    assert set(Occupancy.of(made).layers[5]) == set(Occupancy.of(active).layers[5])
    before = {(s.destination_rank, s.pool_slot): s for s in active.layer[0].slots}
    (new,) = [slot for slot in made.layer[0].slots if (slot.destination_rank, slot.pool_slot) not in before]
    assert (new.logical_expert_id.value, new.destination_rank.value, new.parameter_digest) == (2, 0, "")
    assert new.replica_id.value == "e2-r1" and not made.verified
    for slot in made.layer[0].slots:
        old = before.get((slot.destination_rank, slot.pool_slot))
        if old is not None:
            assert (slot.replica_id, slot.parameter_digest) == (old.replica_id, old.parameter_digest)
    whole = made.with_digests({(0, 0, new.pool_slot): "layer-0-expert-2"})
    assert whole.verified
    # And back: nothing is left of the copy, and the generation goes on counting.
    (back,) = plan_waves(operation(Kind.REBALANCE, target=ByCounts({(0, 2): 1})), whole, ROOMY, whole.topology)
    again = candidate(whole, back)
    assert again.generation == 3 and again.verified
    assert homes_of(Occupancy.of(again), 0) == set(TWO_RANKS[0])


def test_a_slot_that_another_expert_takes_over_keeps_neither_digest_nor_name() -> None:
    active = first_placement({0: [(0, 0), (1, 0)]}, 4)
    held = (Held(0, 0, 1), Held(0, 1, 0))
    made = candidate(active, Wave(Occupancy({0: held})))
    assert [slot.parameter_digest for slot in made.layers[0].slots] == ["", ""]
    names = {slot.replica_id for slot in active.layers[0].slots}
    assert names.isdisjoint({slot.replica_id for slot in made.layers[0].slots})


def test_a_wave_that_begins_an_epoch_is_of_the_new_group_and_topology() -> None:
    active = first_placement(TWO_RANKS, 8)
    (wave,) = plan_waves(operation(Kind.GROW, 2), active, ROOMY, grown(active.topology, 2))
    made = candidate(active, wave, ranks=(0, 1, 2), epoch=4)
    assert (made.group.epoch, ranks_of(made)) == (4, (0, 1, 2))
    assert made.group.process_group_id == active.group.process_group_id
    assert made.topology.version == "topology-v2"
    assert {slot.destination_rank.value for slot in made.layer[0].slots} == {0, 1, 2}


# -- Topologies


def topology(version: str = "topology-v1") -> Topology:
    """Two nodes; rank 1 relays for the first and reaches the network through rank 0's NIC."""
    nics = (NicPath(GlobalRank(0), "nic-0"), NicPath(GlobalRank(1), "nic-0", via=GlobalRank(0)))
    first = Domain("node-0", (GlobalRank(0), GlobalRank(1)), GlobalRank(1), "fabric", nics)
    return Topology(version, (first, Domain("node-1", (GlobalRank(2),))))


NODES = {0: "a", 1: "a", 2: "b"}


def members(found: Topology) -> dict[str, list[int]]:
    return {domain.domain_id: [rank.value for rank in domain.member_ranks] for domain in found.domains}


def test_the_same_ranks_are_the_same_topology() -> None:
    before = topology()
    assert with_members(before, (2, 0, 1), NODES) is before


@pytest.mark.parametrize(
    ("node", "home"),
    [("a", {"node-0": [0, 1, 7], "node-1": [2]}), ("b", {"node-0": [0, 1], "node-1": [2, 7]})],
)
def test_a_rank_that_comes_joins_the_domain_of_its_node(node: str, home: dict[str, list[int]]) -> None:
    found = with_members(topology(), (0, 1, 2, 7), NODES | {7: node})
    assert members(found) == home
    assert found.domains[0].relay_rank == GlobalRank(1) and found.domains[0].nics == topology().domains[0].nics


def test_ranks_of_a_new_node_share_a_new_domain_whose_name_is_free() -> None:
    found = with_members(topology(), (0, 1, 2, 7, 8, 9), NODES | {7: "c", 8: "c", 9: "d"})
    assert members(found) == {"node-0": [0, 1], "node-1": [2], "node-2": [7, 8], "node-3": [9]}
    taken = Topology("t", (Domain("node-1", (GlobalRank(0),)),))
    assert members(with_members(taken, (0, 1), {0: "a", 1: "b"})) == {"node-1": [0], "node-1x": [1]}


def test_where_labels_split_a_node_the_smallest_of_its_domains_takes_the_rank() -> None:
    split = Topology(
        "t", tuple(Domain(f"half-{at}", tuple(map(GlobalRank, some))) for at, some in enumerate([(0, 1), (2,)]))
    )
    assert members(with_members(split, (0, 1, 2, 3), dict.fromkeys(range(4), "a"))) == {
        "half-0": [0, 1],
        "half-1": [2, 3],
    }


def test_ranks_that_go_take_relay_and_nics_with_them_and_an_empty_node_goes() -> None:
    without_relay = with_members(topology(), (0, 2), NODES)
    assert (without_relay.domains[0].relay_rank, without_relay.domains[0].relay) == (None, GlobalRank(0))
    assert without_relay.domains[0].nics == (NicPath(GlobalRank(0), "nic-0"),)
    without_nic = with_members(topology(), (1, 2), NODES)
    assert without_nic.domains[0].relay_rank == GlobalRank(1)
    assert without_nic.domains[0].nics == (), "the NIC's own rank is gone, so nobody reaches it through that"
    assert without_nic.domains[0].fabric_domain == "fabric"
    assert members(with_members(topology(), (0, 1), NODES)) == {"node-0": [0, 1]}


@pytest.mark.parametrize(
    ("version", "after"),
    [
        ("topology-v1", "topology-v2"),
        ("topology-v09", "topology-v10"),
        ("rack-plan", "rack-plan.1"),
        ("rack-plan.9", "rack-plan.10"),
        ("a.b", "a.b.1"),
        ("-v1", "-v1.1"),
    ],
)
def test_versions_go_on_counting(version: str, after: str) -> None:
    assert with_members(topology(version), (0, 1), NODES).version == after


@untimed
@given(st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=5))
def test_whoever_comes_and_goes_the_topology_has_exactly_the_ranks_that_are_there(groups: list[set[int]]) -> None:
    nodes = {rank: f"machine-{rank % 3}" for rank in range(10)}
    found, versions = with_members(topology(), tuple(range(10)), nodes), ["topology-v2"]
    for ranks in groups:
        after = with_members(found, tuple(sorted(ranks)), nodes)
        assert {rank.value for rank in after.owner} == ranks
        assert all(domain.member_ranks for domain in after.domains)
        assert (after is found) == (ranks == {rank.value for rank in found.owner})
        stay = set(after.owner) & set(found.owner)
        assert all(after.owner[rank] == found.owner[rank] for rank in stay), "who stays, stays where it is"
        if after is not found:
            versions.append(after.version)
        found = after
    assert len(set(versions)) == len(versions)
