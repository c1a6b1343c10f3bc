"""The topology and process-group failure lab (0x07I), and the probed path of 0x06I: each mistake made, and refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ray_moe.errors import ConfigError, EvidenceError, PlacementError, TopologyError
from ray_moe.evidence import MeasuredBytes, Speedup
from ray_moe.identity import GlobalRank, ProcessGroupId
from ray_moe.manifest import TopologyManifest
from ray_moe.relations import Capability, RuntimeTopology, require_capabilities
from ray_moe.topology import (
    Domain,
    GroupBinding,
    GroupKind,
    ProcessGroupSpec,
    RouterGroup,
    Topology,
    TopologyGroups,
    derive_groups,
)
from ray_moe.topology_ledger import (
    HierarchicalLedger,
    HierarchicalPath,
    RouteCounts,
    SplitVectors,
    compare,
    fan_out,
    hierarchical_path,
)
from tests.conformance.test_topology_fixture import COUNTS, FLAT, FULL, GROUPS, HIERARCHICAL, RANKS, SPLITS, TOPOLOGY
from tests.conformance.test_topology_fixture import document as topology_document

NODE_0, NODE_1 = TOPOLOGY.domains


def refused(reason: str) -> pytest.RaisesExc[TopologyError]:
    return pytest.raises(TopologyError, match=f"^{reason}: ")


def with_group(kind: GroupKind, peers: tuple[int, ...], domain_id: str | None = None) -> TopologyGroups:
    """The fixture's groups with one of them having other members."""
    bindings = []
    for binding in GROUPS.bindings:
        if (binding.kind, binding.domain_id) == (kind, domain_id):
            spec = dataclasses.replace(binding.spec, peers=tuple(map(GlobalRank, peers)))
            binding = dataclasses.replace(binding, spec=spec)
        bindings.append(binding)
    return TopologyGroups(TOPOLOGY, GROUPS.epoch, tuple(bindings))


def test_fl_06i_03_the_symmetric_memory_path_is_refused_where_the_hardware_is_missing() -> None:
    shipped = Path(__file__).resolve().parents[2] / "cluster_configs" / "topologies" / "nvls.yaml"
    manifest = RuntimeTopology.from_yaml(shipped.read_text())
    assert manifest.to_groups().full.peers == RANKS
    path = manifest.relations.symmetric_memory
    assert path is not None
    require_capabilities("nvls", path.requires, set(Capability))
    for missing in Capability:
        with pytest.raises(TopologyError, match=f"^capability_missing: nvls needs {missing}; probed "):
            require_capabilities("nvls", path.requires, set(Capability) - {missing})
    with refused("capability_missing"):
        require_capabilities("nvls", path.requires, ())
    two_fabrics = topology_document()["domains"]
    relations = manifest.model_dump(mode="json", exclude_none=True) | {"domains": two_fabrics}
    with refused("group_crosses_fabric"):
        RuntimeTopology.parse(relations).to_groups()
    no_fabric = [{"domain_id": "node-0", "member_ranks": [0, 1, 2, 3]}]
    with refused("fabric_unknown"):
        RuntimeTopology.parse(relations | {"domains": no_fabric}).to_groups()


def test_fl_07i_01_splits_indexed_by_global_rank_do_not_transpose_in_a_group_of_another_order() -> None:
    by_rank = {source: tuple(COUNTS.rows(source, destination) for destination in RANKS) for source in RANKS}
    by_source = {rank: tuple(COUNTS.rows(source, rank) for source in RANKS) for rank in RANKS}
    assert all(sum(by_rank[rank]) == sum(SPLITS.send[rank]) for rank in RANKS), "the totals show nothing"
    for send, receive in ((by_rank, SPLITS.receive), (SPLITS.send, by_source), (by_rank, by_source)):
        with refused("splits_not_transposed"):
            SplitVectors(FULL, send, receive)
    with pytest.raises(TypeError, match="source: expected GlobalRank, found int 0"):
        RouteCounts({(0, 1): 2})  # type: ignore[dict-item]


def test_fl_07i_02_a_split_vector_without_its_empty_peers_is_refused() -> None:
    dense = {rank: tuple(rows for rows in SPLITS.send[rank] if rows) for rank in RANKS}
    assert dense[GlobalRank(0)] == (1, 1, 2)
    with refused("split_vector_length"):
        SplitVectors(FULL, dense, SPLITS.receive)
    active = {rank: SPLITS.send[rank] for rank in RANKS[:2]}
    with refused("splits_incomplete"):
        SplitVectors(FULL, active, SPLITS.receive)
    with refused("full_group_incomplete"):
        with_group(GroupKind.FULL_EXPERT_PARALLEL, (0, 1))
    with refused("split_vector_length"):
        RouteCounts.from_peers([[1, 0], [0, 1]], FULL)


def test_fl_07i_03_a_router_group_finds_neither_node_nor_rank_nor_seat() -> None:
    group = RouterGroup(0)
    assert group != GlobalRank(0)
    for mistake in (
        lambda: TOPOLOGY.locate(group),  # type: ignore[arg-type]
        lambda: TOPOLOGY.classify(RANKS[0], group),  # type: ignore[arg-type]
        lambda: hierarchical_path(TOPOLOGY, group, RANKS[0]),  # type: ignore[arg-type]
        lambda: fan_out(TOPOLOGY, [{group}]),  # type: ignore[arg-type]
        lambda: Domain("node-0", (group,)),  # type: ignore[arg-type]
        lambda: ProcessGroupSpec(ProcessGroupId("ep"), 0, (group,)),  # type: ignore[arg-type]
        lambda: RouteCounts({(group, RANKS[0]): 1}),  # type: ignore[dict-item]
    ):
        with pytest.raises(TypeError, match="expected GlobalRank, found RouterGroup"):
            mistake()
    with pytest.raises(PlacementError, match="rank 0 has no seat in group ep-group-0"):
        FULL.peer_slot(group)  # type: ignore[arg-type]
    with refused("group_missing"):
        GROUPS.node_local(group)  # type: ignore[arg-type]


def test_fl_07i_04_a_rank_of_two_nodes_is_refused() -> None:
    with refused("rank_in_two_nodes"):
        Topology("t", (NODE_0, Domain("node-1", (GlobalRank(2), GlobalRank(3), GlobalRank(1)))))
    taken = tuple(dataclasses.replace(path, nic_id="nic-0") for path in NODE_1.nics)
    with refused("nic_in_two_nodes"):
        Topology("t", (NODE_0, dataclasses.replace(NODE_1, nics=taken)))


def test_fl_07i_05_a_relay_outside_its_node_is_refused() -> None:
    with refused("relay_not_member"):
        dataclasses.replace(NODE_0, relay_rank=GlobalRank(3))


def test_fl_07i_06_a_node_local_group_with_a_foreign_rank_is_refused() -> None:
    with refused("local_group_crosses_node"):
        with_group(GroupKind.NODE_LOCAL, (1, 0, 2), "node-0")
    with refused("local_group_incomplete"):
        with_group(GroupKind.NODE_LOCAL, (1,), "node-0")


def test_fl_07i_07_a_relay_group_with_a_rank_that_is_no_relay_is_refused() -> None:
    with refused("relay_group_has_nonrelay"):
        with_group(GroupKind.INTER_NODE_RELAYS, (2, 0, 1))
    with refused("relay_group_incomplete"):
        with_group(GroupKind.INTER_NODE_RELAYS, (2,))


def test_fl_07i_08_groups_of_another_epoch_are_not_the_ones_that_were_bound() -> None:
    rebuilt = dataclasses.replace(FULL, epoch=GROUPS.epoch + 1)
    with refused("collective_epoch_mismatch"):
        GROUPS.require(FULL.process_group_id, rebuilt.epoch)
    mixed = (GroupBinding(GroupKind.FULL_EXPERT_PARALLEL, rebuilt), *GROUPS.bindings[1:])
    with refused("collective_epoch_mismatch"):
        TopologyGroups(TOPOLOGY, GROUPS.epoch, mixed)
    assert {binding.spec.epoch for binding in derive_groups(TOPOLOGY, rebuilt).bindings} == {rebuilt.epoch}


def test_fl_07i_09_a_path_that_ends_at_another_rank_is_refused() -> None:
    planned = hierarchical_path(TOPOLOGY, GlobalRank(1), GlobalRank(3))
    assert planned.holders == (GlobalRank(1), GlobalRank(0), GlobalRank(2), GlobalRank(3))
    with refused("final_rank_changed"):
        dataclasses.replace(planned, holders=(*planned.holders[:3], GlobalRank(2)))
    with refused("origin_changed"):
        HierarchicalPath(planned.destination, planned.source, planned.holders)


def test_fl_07i_10_a_ledger_whose_coalescing_loses_rows_between_nodes_is_refused() -> None:
    one_message_as_one_row = RouteCounts({(GlobalRank(0), GlobalRank(2)): 1})
    with refused("inter_node_payload_differs"):
        compare(FLAT, HierarchicalLedger(one_message_as_one_row, TOPOLOGY, FLAT.row_bytes))
    assert compare(FLAT, HIERARCHICAL).inter_node_round_trip_bytes == FLAT.inter_node.round_trip_bytes


def test_fl_07i_11_a_transport_that_does_not_count_its_relay_hops_is_refused() -> None:
    HIERARCHICAL.check_counted([2, 3, 1], [1, 3, 2])
    for dispatch, combine in (([0, 3, 0], [0, 3, 0]), ([2, 3, 1], [0, 3, 0]), ([3], [3])):
        with refused("relay_rows_differ"):
            HIERARCHICAL.check_counted(dispatch, combine)
    report = compare(FLAT, HIERARCHICAL)
    assert report.added_relay_rows.value == 6
    assert (
        report.hierarchical_intra_node_round_trip_bytes
        == report.flat_intra_node_round_trip_bytes + report.added_relay_bytes
    )


def test_fl_07i_12_fewer_pairs_are_no_speedup() -> None:
    report = compare(FLAT, HIERARCHICAL)
    assert report.hierarchical_inter_node_pairs < report.flat_inter_node_pairs
    with pytest.raises(EvidenceError, match="a speed-up compares two measured times, found int 6"):
        Speedup(report.flat_inter_node_pairs, report.hierarchical_inter_node_pairs)  # type: ignore[arg-type]


def test_fl_07i_13_a_transport_label_fills_no_measured_field() -> None:
    with pytest.raises(EvidenceError, match="MeasuredBytes needs the measurement that gave it, found str"):
        MeasuredBytes(FLAT.inter_node.bytes.value, "rdma")  # type: ignore[arg-type]
    given = topology_document()
    given["domains"][0]["bandwidth_gbps"] = 900
    with pytest.raises(ConfigError, match=r"domains\.0\.bandwidth_gbps: no such field"):
        TopologyManifest.parse(given)
