"""The specification's two-node topology (0x07): four groups, three route classes, two ledgers, and its refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_moe.dataplane.plan import SlotMap, plan_assignment
from ray_moe.errors import TopologyError
from ray_moe.identity import GlobalRank, ProcessGroupId
from ray_moe.manifest import TopologyManifest
from ray_moe.relations import RuntimeTopology
from ray_moe.topology import RankLocation, RouteClass
from ray_moe.topology_ledger import (
    FlatLedger,
    HierarchicalLedger,
    RouteCounts,
    compare,
    hierarchical_path,
    hops,
    split_vectors,
)
from tests.conformance.test_placement_v17 import ROUTES, SNAPSHOT, routes_of

DATA = Path(__file__).parent / "data"
FIXTURE = json.loads((DATA / "topology.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
EPOCH = INPUTS["collective_epoch"]
ROW_BYTES = INPUTS["hidden_width_elements"] * INPUTS["activation_element_bytes"]


def document() -> dict[str, Any]:
    """The fixture as a topology manifest. The chapter prints no version; the release fixture's is taken."""
    domains: dict[str, dict[str, Any]] = {}
    for entry in INPUTS["ranks"]:
        rank = entry["global_rank"]
        domain = domains.setdefault(
            entry["node_id"],
            {
                "domain_id": entry["node_id"],
                "member_ranks": [],
                "fabric_domain": entry["intra_node_domain"],
                "nics": [],
            },
        )
        assert len(domain["member_ranks"]) == entry["gpu_local_rank"]
        domain["member_ranks"].append(rank)
        domain["nics"].append({"rank": rank, "nic_id": entry["nic"], "via_rank": entry["nic_via_rank"]})
        if entry["node_relay"]:
            domain["relay_rank"] = rank
    groups = [
        {
            "process_group_id": group["process_group_id"],
            "kind": group["kind"],
            "domain_id": group.get("node_id"),
            "epoch": group["collective_epoch"],
            "peers": group["peer_order_global_ranks"],
        }
        for group in INPUTS["process_groups"]
    ]
    return {"version": "topology-v3", "domains": list(domains.values()), "collective_epoch": EPOCH, "groups": groups}


MANIFEST = TopologyManifest.parse(document())
GROUPS = MANIFEST.to_groups()
TOPOLOGY, FULL = GROUPS.topology, GROUPS.full
RANKS = tuple(GlobalRank(entry["global_rank"]) for entry in INPUTS["ranks"])
PAIR = {
    route["route_id"]: (GlobalRank(route["source_rank"]), GlobalRank(route["destination_rank"])) for route in ROUTES
}
COUNTS = RouteCounts.of(PAIR.values())
SPLITS = split_vectors(COUNTS, FULL)
FLAT, HIERARCHICAL = FlatLedger(COUNTS, TOPOLOGY, ROW_BYTES), HierarchicalLedger(COUNTS, TOPOLOGY, ROW_BYTES)


def numbers(pairs: Iterable[tuple[GlobalRank, GlobalRank]]) -> list[list[int]]:
    return [[source.value, destination.value] for source, destination in pairs]


# -- Nodes and groups


def test_every_rank_is_where_the_fixture_puts_it() -> None:
    for entry in INPUTS["ranks"]:
        at = TOPOLOGY.locate(GlobalRank(entry["global_rank"]))
        assert isinstance(at, RankLocation) and at.nic is not None
        assert (at.domain_id, at.gpu_local_rank, at.fabric_domain, at.is_relay) == (
            entry["node_id"],
            entry["gpu_local_rank"],
            entry["intra_node_domain"],
            entry["node_relay"],
        )
        via = None if entry["nic_via_rank"] is None else GlobalRank(entry["nic_via_rank"])
        assert (at.nic.nic_id, at.nic.via) == (entry["nic"], via)


def test_the_fixtures_objects_are_as_many_as_it_says() -> None:
    located = TOPOLOGY.locations.values()
    assert (
        EXPECTED["counts"]
        | {
            "ranks": len(located),
            "nodes": len({at.domain_id for at in located}),
            "nics": len({at.nic and at.nic.nic_id for at in located}),
            "process_groups": len(GROUPS.bindings),
            "routes": sum(COUNTS.by_pair.values()),
            "transport_classes": len(RouteClass),
        }
        == EXPECTED["counts"]
    )


def test_every_group_keeps_its_own_peer_order_in_the_collective_epoch() -> None:
    for group in INPUTS["process_groups"]:
        spec = GROUPS.require(ProcessGroupId(group["process_group_id"]), EPOCH)
        assert [rank.value for rank in spec.peers] == group["peer_order_global_ranks"]
    assert GROUPS.relays == GROUPS.require(ProcessGroupId("ep-relays"), EPOCH)
    assert GROUPS.local_to(GlobalRank(2)) == GROUPS.require(ProcessGroupId("ep-node-1"), EPOCH)


def test_the_document_comes_back_exactly_and_is_the_one_that_ships_for_deepep() -> None:
    assert TopologyManifest.from_topology(TOPOLOGY, GROUPS) == MANIFEST
    for again in (TopologyManifest.from_json(MANIFEST.to_json()), TopologyManifest.from_yaml(MANIFEST.to_yaml())):
        assert again == MANIFEST
        assert again.to_groups() == GROUPS
    shipped = Path(__file__).resolve().parents[2] / "cluster_configs" / "topologies" / "deepep.yaml"
    assert RuntimeTopology.from_yaml(shipped.read_text()).to_groups() == GROUPS


def test_the_topology_has_another_version_than_the_placement_and_neither_follows_from_the_other() -> None:
    moved = dataclasses.replace(SNAPSHOT, topology=dataclasses.replace(SNAPSHOT.topology, version="topology-v4"))
    assert (moved.version, moved.generation) == (SNAPSHOT.version, SNAPSHOT.generation)
    assert moved.topology.version != SNAPSHOT.topology.version
    assert moved.digest != SNAPSHOT.digest


# -- Split vectors


def test_split_vectors_are_in_peer_slot_order() -> None:
    matrix = [[COUNTS.rows(source, destination) for destination in RANKS] for source in RANKS]
    assert matrix == EXPECTED["count_matrix_rows_by_global_rank"]
    assert [list(SPLITS.send[rank]) for rank in RANKS] == EXPECTED["send_splits_rows_by_source_in_peer_order"]
    assert [list(SPLITS.receive[rank]) for rank in RANKS] == DERIVED["receive_splits_rows_by_destination_in_peer_order"]
    assert list(SPLITS.receive[GlobalRank(1)]) == EXPECTED["receive_splits_rows_of_rank_1_in_peer_order"]
    offsets = [list(accumulate(SPLITS.send[rank], initial=0)) for rank in RANKS]
    assert offsets == DERIVED["send_offsets_rows_by_source_in_peer_order"]


def test_a_plan_packs_rows_in_the_groups_peer_order() -> None:
    """The product's planner, with the frozen assignment, over the fixture's permuted group."""
    snapshot = dataclasses.replace(SNAPSHOT, group=FULL)
    manifest = [slot.physical_slot_id.value for slot in SNAPSHOT.layers[0].slots]
    segments: dict[int, list[list[str]]] = {rank.value: [[]] * len(FULL) for rank in RANKS}
    for rank, partition in {(route["source_rank"], route["origin_partition"]) for route in ROUTES}:
        mine = [route for route in ROUTES if route["source_rank"] == rank]
        slots = SlotMap.compile(snapshot, snapshot.layers[0], GlobalRank(rank), torch.device("cpu"))
        chosen = torch.tensor([manifest.index(route["physical_slot_id"]) for route in mine])
        order = plan_assignment(routes_of(partition), chosen, slots).order_N.tolist()
        names = [mine[position]["route_id"] for position in order]
        bounds = [0, *accumulate(SPLITS.send[GlobalRank(rank)])]
        segments[rank] = [names[start:end] for start, end in pairwise(bounds)]
    assert [segments[rank.value] for rank in RANKS] == DERIVED["send_segments_by_source_in_peer_order"]
    received = [
        [name for source in FULL.peers for name in segments[source.value][FULL.peer_slot(rank)]] for rank in RANKS
    ]
    assert received == DERIVED["receive_order_by_destination"]


# -- Classes, paths and ledgers


def test_every_route_has_one_class_and_the_fractions_sum_to_one() -> None:
    by_class = {kind.value: [name for name in PAIR if TOPOLOGY.classify(*PAIR[name]) is kind] for kind in RouteClass}
    assert by_class == EXPECTED["route_ids_by_class"]
    assert FLAT.fractions == {
        RouteClass(name): Fraction(*ratio) for name, ratio in EXPECTED["fraction_by_class"].items()
    }
    assert sum(FLAT.fractions.values()) == 1


def test_the_flat_ledger() -> None:
    assert EXPECTED["row_bytes"] == ROW_BYTES
    found: dict[str, int] = {}
    for name, traffic in (("intra_node", FLAT.intra_node), ("inter_node", FLAT.inter_node)):
        found |= {
            f"{name}_dispatch_rows": traffic.rows.value,
            f"{name}_dispatch_bytes": traffic.bytes.value,
            f"{name}_round_trip_bytes": traffic.round_trip_bytes.value,
            f"{name}_directed_pairs_per_direction": len(traffic.pairs),
        }
    found["inter_node_directed_pairs_dispatch_plus_combine"] = len(FLAT.inter_node.round_trip_pairs)
    assert found == EXPECTED["flat"]


def test_rows_between_nodes_go_through_relays_and_come_back_the_same_way() -> None:
    remote = EXPECTED["route_ids_by_class"]["different_node"]
    assert {name: numbers(hops(TOPOLOGY, *PAIR[name])) for name in remote} == DERIVED["dispatch_hops_by_route"]
    back = {name: numbers(hierarchical_path(TOPOLOGY, *PAIR[name]).combine.hops) for name in remote}
    assert back == DERIVED["combine_hops_by_route"]


def test_the_hierarchical_ledger() -> None:
    assert {
        "dispatch_stage_rows": [rows.value for rows in HIERARCHICAL.dispatch_stage_rows],
        "combine_stage_rows": [rows.value for rows in HIERARCHICAL.combine_stage_rows],
        "inter_node_round_trip_bytes": HIERARCHICAL.inter_node.round_trip_bytes.value,
        "added_relay_rows_round_trip": HIERARCHICAL.added_relay_rows.value,
        "added_relay_bytes_round_trip": HIERARCHICAL.added_relay_bytes.value,
        "inter_node_directed_pairs_dispatch_plus_combine": len(HIERARCHICAL.inter_node.round_trip_pairs),
    } == EXPECTED["hierarchical"]
    total = DERIVED["hierarchical_intra_node_total_round_trip_bytes"]
    assert HIERARCHICAL.intra_node_round_trip_bytes.value == total


def test_both_ledgers_side_by_side() -> None:
    both = compare(FLAT, HIERARCHICAL)
    assert both.inter_node_round_trip_bytes.value == EXPECTED["flat"]["inter_node_round_trip_bytes"]
    assert both.added_relay_bytes.value == EXPECTED["hierarchical"]["added_relay_bytes_round_trip"]
    assert (both.flat_inter_node_pairs, both.hierarchical_inter_node_pairs) == (6, 2)
    assert not any("seconds" in field.name or "latency" in field.name for field in dataclasses.fields(both))


# -- Refusals


@pytest.mark.parametrize("case", FIXTURE["negative_cases"], ids=lambda case: case["case"])
def test_a_negative_case_is_refused_for_its_reason(case: dict[str, Any]) -> None:
    changed, change = copy.deepcopy(document()), case["change"]
    domains = {domain["domain_id"]: domain for domain in changed["domains"]}
    groups = {group["process_group_id"]: group for group in changed["groups"]}
    if "rank_node" in change:
        domains[change["rank_node"]["add_node"]]["member_ranks"].append(change["rank_node"]["rank"])
    elif "relay" in change:
        domains[change["relay"]["node_id"]]["relay_rank"] = change["relay"]["relay_rank"]
    elif "group_members" in change:
        members = change["group_members"]
        groups[members["process_group_id"]]["peers"] = members["peer_order_global_ranks"]
    else:
        groups[change["group_epoch"]["process_group_id"]]["epoch"] = change["group_epoch"]["collective_epoch"]
    with pytest.raises(TopologyError) as refused:
        TopologyManifest.parse(changed).to_groups()
    assert refused.value.reason == case["expected_reason"]
