"""Topologies, groups, split vectors and relay paths, over random nodes, relays, peer orders and counts."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_moe.errors import TopologyError
from ray_moe.identity import GlobalRank, ProcessGroupId
from ray_moe.topology import (
    Domain,
    GroupBinding,
    GroupKind,
    NicPath,
    ProcessGroupSpec,
    RouteClass,
    Topology,
    TopologyGroups,
    derive_groups,
)
from ray_moe.topology_ledger import (
    FanOut,
    FlatLedger,
    HierarchicalLedger,
    RouteCounts,
    compare,
    fan_out,
    hierarchical_path,
    split_vectors,
)

untimed = settings(max_examples=60, deadline=None)


def ranks(*values: int) -> tuple[GlobalRank, ...]:
    return tuple(map(GlobalRank, values))


def group(name: str, *peers: int, epoch: int = 3) -> ProcessGroupSpec:
    return ProcessGroupSpec(ProcessGroupId(name), epoch, ranks(*peers))


def refused(reason: str) -> pytest.RaisesExc[TopologyError]:
    return pytest.raises(TopologyError, match=f"^{reason}: ")


# -- What holds for every topology


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Topology, ProcessGroupSpec, RouteCounts]:
    """Nodes of any sizes with scattered rank numbers, a relay each, one group in any order, and some counts."""
    numbers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=7, unique=True))
    nodes: dict[int, list[GlobalRank]] = {}
    for number in numbers:
        nodes.setdefault(draw(st.integers(0, 2)), []).append(GlobalRank(number))
    domains = [
        Domain(f"node-{name}", tuple(members), draw(st.sampled_from([None, *members])))
        for name, members in nodes.items()
    ]
    full = ProcessGroupSpec(ProcessGroupId("ep"), 3, tuple(draw(st.permutations(ranks(*numbers)))))
    pairs = st.tuples(st.sampled_from(full.peers), st.sampled_from(full.peers))
    return Topology("t", tuple(domains)), full, RouteCounts(draw(st.dictionaries(pairs, st.integers(0, 4))))


@given(clusters())
@untimed
def test_split_vectors_are_transposes_of_each_other_in_any_peer_order(
    cluster: tuple[Topology, ProcessGroupSpec, RouteCounts],
) -> None:
    _, full, counts = cluster
    splits = split_vectors(counts, full)
    for rank in full.peers:
        assert len(splits.send[rank]) == len(splits.receive[rank]) == len(full)
        for slot, peer in enumerate(full.peers):
            assert splits.send[rank][slot] == counts.by_pair.get((rank, peer), 0)
            assert splits.receive[rank][slot] == splits.send[peer][full.peer_slot(rank)]
    matrix = [splits.send[rank] for rank in full.peers]
    assert split_vectors(RouteCounts.from_peers(matrix, full), full) == splits


@given(clusters())
@untimed
def test_every_path_ends_at_its_destination_and_each_stage_stays_in_its_group(
    cluster: tuple[Topology, ProcessGroupSpec, RouteCounts],
) -> None:
    topology, full, _ = cluster
    groups = derive_groups(topology, full)
    for source in full.peers:
        for destination in full.peers:
            path = hierarchical_path(topology, source, destination)
            gather, exchange, scatter = path.stages
            assert (gather[0], scatter[1]) == (source, destination)
            assert gather[1] == exchange[0] and exchange[1] == scatter[0]
            assert all(rank in groups.local_to(source) for rank in gather)
            assert all(rank in groups.local_to(destination) for rank in scatter)
            if topology.classify(source, destination) is RouteClass.DIFFERENT_NODE:
                assert all(rank in groups.relays for rank in exchange)
            else:
                assert exchange == scatter == (destination, destination)
            assert path.combine.hops == tuple((to, sender) for sender, to in reversed(path.hops))


@given(clusters())
@untimed
def test_classes_share_out_all_rows_and_relays_move_the_same_rows_between_nodes(
    cluster: tuple[Topology, ProcessGroupSpec, RouteCounts],
) -> None:
    topology, _, counts = cluster
    flat, hierarchical = FlatLedger(counts, topology, 6), HierarchicalLedger(counts, topology, 6)
    total = sum(counts.by_pair.values())
    assert sum(traffic.rows.value for traffic in flat.by_class.values()) == total
    assert sum(flat.fractions.values()) == (1 if total else 0)
    for kind, traffic in flat.by_class.items():
        assert traffic.pairs == {
            pair for pair, rows in counts.by_pair.items() if rows and topology.classify(*pair) is kind
        }
    report = compare(flat, hierarchical)
    assert hierarchical.inter_node.rows == flat.inter_node.rows
    # Every relayed row counted one by one, by its hops.
    walked: Counter[bool] = Counter()
    for pair, rows in counts.by_pair.items():
        if topology.classify(*pair) is RouteClass.DIFFERENT_NODE:
            for hop in hierarchical_path(topology, *pair).hops:
                walked[topology.classify(*hop) is RouteClass.DIFFERENT_NODE] += 2 * rows
    assert report.added_relay_rows.value == walked[False]
    assert report.inter_node_round_trip_bytes.value == 6 * walked[True]
    assert report.hierarchical_inter_node_pairs <= report.flat_inter_node_pairs


@given(clusters())
@untimed
def test_derived_groups_follow_the_full_groups_order(
    cluster: tuple[Topology, ProcessGroupSpec, RouteCounts],
) -> None:
    topology, full, _ = cluster
    groups = derive_groups(topology, full)
    assert groups.full == full
    for domain in topology.domains:
        local = groups.node_local(domain.domain_id)
        assert local.process_group_id == ProcessGroupId(f"ep/{domain.domain_id}")
        assert list(local.peers) == sorted(domain.member_ranks, key=full.peer_slot)
    assert groups.relays.process_group_id == ProcessGroupId("ep/relays")
    assert list(groups.relays.peers) == sorted((domain.relay for domain in topology.domains), key=full.peer_slot)
    assert {binding.spec.epoch for binding in groups.bindings} == {full.epoch}


# -- Nodes

NODE_0 = Domain("node-0", ranks(4, 7), fabric_domain="fabric-0", nics=(NicPath(GlobalRank(4), "nic-0"),))
TWO_NODES = Topology("t", (NODE_0, Domain("node-1", ranks(1, 0))))


def test_a_rank_is_located_by_its_node_and_its_position_there() -> None:
    at = TWO_NODES.locate(GlobalRank(0))
    assert (at.domain_id, at.gpu_local_rank, at.relay, at.is_relay) == ("node-1", 1, GlobalRank(1), False)
    assert (at.fabric_domain, at.nic) == ("", None)
    assert TWO_NODES.locate(GlobalRank(4)).nic == NODE_0.nics[0]
    with refused("unknown_rank"):
        TWO_NODES.classify(GlobalRank(4), GlobalRank(5))


@pytest.mark.parametrize(
    ("reason", "nics"),
    [
        ("nic_rank_not_member", (NicPath(GlobalRank(1), "nic-0"),)),
        ("nic_given_twice", (NicPath(GlobalRank(4), "nic-0"), NicPath(GlobalRank(4), "nic-1"))),
        ("nic_via_outside_node", (NicPath(GlobalRank(4), "nic-0", via=GlobalRank(1)),)),
        ("nic_via_not_direct", (NicPath(GlobalRank(4), "nic-0", via=GlobalRank(4)),)),
        ("nic_via_not_direct", (NicPath(GlobalRank(7), "nic-1"), NicPath(GlobalRank(4), "nic-0", via=GlobalRank(7)))),
    ],
)
def test_a_nic_path_that_cannot_be_is_refused(reason: str, nics: tuple[NicPath, ...]) -> None:
    with refused(reason):
        Domain("node-0", ranks(4, 7), nics=nics)


def test_ranks_and_domains_come_once_and_a_node_without_ranks_has_no_relay() -> None:
    with refused("rank_given_twice"):
        Domain("node-0", ranks(1, 1))
    with refused("domain_given_twice"):
        Topology("t", (NODE_0, Domain("node-0", ranks(1))))
    empty = Domain("node-2", ())
    with refused("node_without_ranks"):
        _ = empty.relay
    spared = Topology("t", (*TWO_NODES.domains, empty))
    assert len(derive_groups(spared, group("ep", 0, 4, 1, 7)).bindings) == 4, "full, two nodes, relays"


# -- Groups


def bind(*bindings: GroupBinding) -> TopologyGroups:
    return TopologyGroups(TWO_NODES, 3, bindings)


def test_a_group_comes_once_and_only_a_node_local_group_names_a_node() -> None:
    full = GroupBinding(GroupKind.FULL_EXPERT_PARALLEL, group("ep", 0, 1, 4, 7))
    for other in (full, GroupBinding(GroupKind.FULL_EXPERT_PARALLEL, group("ep-1", 7, 4, 1, 0))):
        with refused("group_given_twice"):
            bind(full, other)
    with refused("node_local_names_its_node"):
        GroupBinding(GroupKind.NODE_LOCAL, group("local", 4, 7))
    with refused("node_local_names_its_node"):
        GroupBinding(GroupKind.INTER_NODE_RELAYS, group("relays", 4, 1), "node-0")
    with refused("unknown_domain"):
        bind(GroupBinding(GroupKind.NODE_LOCAL, group("local", 4, 7), "node-9"))


def test_a_group_that_is_not_bound_is_not_made_up() -> None:
    groups = bind(GroupBinding(GroupKind.FULL_EXPERT_PARALLEL, group("ep", 0, 1, 4, 7)))
    for missing in (
        lambda: groups.relays,
        lambda: groups.node_local("node-0"),
        lambda: groups.require(ProcessGroupId("ep-1"), 3),
    ):
        with refused("group_missing"):
            missing()


def axis(kind: GroupKind, name: str, *peers: int) -> GroupBinding:
    return GroupBinding(kind, group(name, *peers))


EXPERT, TENSOR, BOTH = GroupKind.EXPERT_PARALLEL, GroupKind.TENSOR_PARALLEL, GroupKind.TENSOR_BY_EXPERT
EP = (axis(EXPERT, "ep-0", 0, 4), axis(EXPERT, "ep-1", 1, 7))
TP = (axis(TENSOR, "tp-0", 0, 1), axis(TENSOR, "tp-1", 4, 7))
WHOLE = axis(BOTH, "tp-ep", 0, 1, 4, 7)


def test_expert_and_tensor_axes_meet_in_one_rank_and_make_up_their_product() -> None:
    assert bind(*EP, *TP, WHOLE).require(ProcessGroupId("tp-1"), 3).peers == ranks(4, 7)


@pytest.mark.parametrize(
    ("reason", "bindings"),
    [
        ("axis_groups_overlap", (*EP, axis(EXPERT, "ep-2", 0, 7))),
        ("axes_share_two_ranks", (*EP, axis(TENSOR, "tp-0", 0, 4))),
        ("tensor_by_expert_incomplete", (*EP, TP[0], WHOLE)),
        ("tensor_by_expert_incomplete", (WHOLE,)),
        ("unknown_rank", (axis(EXPERT, "ep-0", 0, 5),)),
    ],
)
def test_axes_that_do_not_make_a_grid_are_refused(reason: str, bindings: tuple[GroupBinding, ...]) -> None:
    with refused(reason):
        bind(*bindings)


# -- Counts and fan-out


def test_rows_of_a_rank_outside_the_group_and_counts_that_are_none_are_refused() -> None:
    with refused("rank_outside_group"):
        split_vectors(RouteCounts.of([(GlobalRank(0), GlobalRank(4))]), group("ep", 0, 1))
    for rows in (-1, True, 1.0):
        with refused("invalid_count"):
            RouteCounts({(GlobalRank(0), GlobalRank(1)): rows})  # type: ignore[dict-item]
    with refused("split_vector_length"):
        RouteCounts.from_peers([[1, 2], [3]], group("ep", 0, 1))


def test_fan_out_counts_ranks_and_nodes_once_per_token() -> None:
    tokens = [ranks(4, 7, 4), ranks(4, 1, 0), ranks(0)]
    assert fan_out(TWO_NODES, tokens) == FanOut(
        tokens=3, mean_ranks=Fraction(6, 3), max_ranks=3, mean_nodes=Fraction(4, 3), max_nodes=2
    )
    assert fan_out(TWO_NODES, []) == FanOut(0, Fraction(0), 0, Fraction(0), 0)
