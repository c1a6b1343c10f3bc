"""What a cluster configuration can select beyond single fields: contracts, decode buckets, nodes by label."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from ray_moe.actors.bringup import (
    backend_of,
    check_choices,
    groups_of,
    handle_abi,
    phase_backends,
    seats_of,
    topology_of,
)
from ray_moe.asked import BucketRequest
from ray_moe.comm.join import TRANSPORTS, transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.config import CONTRACTS, ClusterConfig
from ray_moe.dataplane.runners import RUNNERS
from ray_moe.dataplane.strategies import STRATEGIES
from ray_moe.errors import ConfigError, TopologyError
from ray_moe.identity import GlobalRank
from tests.layers import ONE_PEER

# The five eras of specification 0x00A, and what each contract here is made of.
ERAS = {
    "sparse_conditional": "tcp+all_gather_filter+grouped+bulk",
    "expert_parallel": "tcp+all_to_all_v+capacity_padded+bulk",
    "static_capacity": "tcp+padded_all_to_all+capacity_padded+bulk",
    "dropless": "tcp+all_to_all_v+block_sparse+bulk",
    "low_latency": "tcp+all_to_all_v+grouped+bulk",
}


def config(**values: object) -> ClusterConfig:
    return ClusterConfig.parse({"model": "tiny-moe", **values})


@pytest.mark.parametrize("contract", ERAS)
def test_a_historical_contract_is_a_transport_and_a_runner_by_name(contract: str) -> None:
    chosen = config(contract=contract)
    backends = dict(phase_backends(chosen))
    assert backends["prefill"] == ERAS[contract]
    decode = "tcp+padded_all_to_all+masked_decode[8x32,32x128], else "
    assert backends["decode"] == (decode if contract == "low_latency" else "") + ERAS[contract]
    # Only the last is phase-specific: decode has executables of its own.
    buckets = backend_of(
        chosen, transport_named("all_to_all_v", SoloGroup(ONE_PEER, GlobalRank(0))), {}, None
    ).executables
    assert (buckets is not None) == (contract == "low_latency")


def test_there_are_the_five_contracts_of_the_specification_and_no_more() -> None:
    assert tuple(ERAS) == tuple(CONTRACTS)
    with pytest.raises(ConfigError, match="contract: found 'steam'"):
        config(contract="steam")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_comes_back_from_yaml_and_contradicts_no_field_that_agrees_with_it(contract: str) -> None:
    chosen = config(contract=contract)
    assert ClusterConfig.from_yaml(chosen.to_yaml()) == chosen
    assert config(contract=contract, **CONTRACTS[contract]) == chosen


def test_a_field_that_a_contract_sets_otherwise_is_refused_naming_both() -> None:
    with pytest.raises(ConfigError, match="contract 'dropless' sets runner to 'block_sparse', found 'grouped'"):
        config(contract="dropless", runner="grouped")


def test_buckets_are_written_as_text_or_as_a_list() -> None:
    wanted = (BucketRequest(rank_tokens=4, slot_rows=8), BucketRequest(rank_tokens=16, slot_rows=32))
    assert config(decode_buckets="4x8, 16x32").decode_buckets == wanted
    assert config(decode_buckets=[bucket.model_dump() for bucket in wanted]).decode_buckets == wanted
    assert config(decode_buckets="").decode_buckets == ()


def test_two_buckets_of_one_size_and_audits_rarer_than_can_be_counted_are_refused() -> None:
    with pytest.raises(ConfigError, match="every decode bucket has its own rank_tokens, found 1, 1"):
        config(decode_buckets="1x1,1x2")
    with pytest.raises(ConfigError, match="audit_rate: found 5e-324, must be 0 or at least 1e-06"):
        config(audit_rate=5e-324)


@pytest.mark.parametrize("text", ["4", "4:8", "x8", "0x8", "4x0", "4x8x2", 4])
def test_a_bucket_that_cannot_be_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="decode_buckets"):
        config(decode_buckets=text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "cuda"}, "group must be nccl for 2 peers on cuda, found tcp"),
        ({"device": "cuda", "group": "gloo"}, "group must be nccl for 2 peers on cuda, found gloo"),
        ({"group": "nccl"}, "group must be tcp or gloo for 2 peers on cpu, found nccl"),
        ({"device": "cuda", "peers": 1, "max_peers": 3}, "group must be nccl for 3 peers on cuda, found tcp"),
        ({"group": "carrier_pigeon"}, "group: found 'carrier_pigeon'"),
    ],
)
def test_a_group_that_does_not_carry_rows_of_the_device_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**{"peers": 2, **values})


def test_peers_on_cuda_are_joined_by_nccl_and_one_alone_needs_nothing() -> None:
    assert phase_backends(config(peers=2, device="cuda", group="nccl"))[0][1].startswith("nccl+all_to_all_v")
    assert config(peers=1, device="cuda").group == "tcp"


def test_nodes_are_rays_own_or_the_labels_that_a_configuration_gives() -> None:
    ranks = tuple(GlobalRank(rank) for rank in range(4))
    real = topology_of(ranks, ["b2", "a1", "b2", "a1"])
    assert {domain.domain_id: [rank.value for rank in domain.member_ranks] for domain in real.domains} == {
        "node-0": [0, 2],
        "node-1": [1, 3],
    }
    labelled = topology_of(ranks, ["b2"] * 4, config(node_labels=["left", "right", "right", "left"]).node_labels)
    assert {domain.domain_id: [rank.value for rank in domain.member_ranks] for domain in labelled.domains} == {
        "left": [0, 3],
        "right": [1, 2],
    }
    with pytest.raises(ConfigError, match="node_labels must name the node of each of 4 peers, found 2"):
        config(node_labels=["a", "b"])


TOPOLOGIES = Path(__file__).parents[2] / "cluster_configs" / "topologies"
TWO_NODES = {
    "version": "two-nodes",
    "domains": [
        {"domain_id": "left", "member_ranks": [0, 1], "relay_rank": 1},
        {"domain_id": "right", "member_ranks": [2, 3]},
    ],
    "collective_epoch": 12,
    "groups": [
        {"process_group_id": "ep", "kind": "full_expert_parallel", "epoch": 12, "peers": [2, 0, 3, 1]},
        {"process_group_id": "l", "kind": "node_local", "domain_id": "left", "epoch": 12, "peers": [1, 0]},
        {"process_group_id": "r", "kind": "node_local", "domain_id": "right", "epoch": 12, "peers": [3, 2]},
        {"process_group_id": "relays", "kind": "inter_node_relays", "epoch": 12, "peers": [2, 1]},
    ],
}


def test_a_topology_document_gives_the_groups_their_peer_orders_relays_and_epoch() -> None:
    chosen = config(topology=TWO_NODES)
    group, topology = seats_of(chosen, ["somewhere"] * 4)
    assert (group.epoch, [rank.value for rank in group.peers]) == (12, [2, 0, 3, 1])
    groups = groups_of(chosen, group, topology)
    assert [rank.value for rank in groups.local_to(GlobalRank(0)).peers] == [1, 0]
    assert [rank.value for rank in groups.relays.peers] == [2, 1]
    assert ClusterConfig.from_yaml(chosen.to_yaml()) == chosen
    # In another epoch, or without groups of its own, they are derived from the domains.
    later = dataclasses.replace(group, epoch=13)
    assert groups_of(chosen, later, topology).epoch == 13
    bare = config(topology={"version": "t", "domains": TWO_NODES["domains"]})
    group, topology = seats_of(bare, ["somewhere"] * 4)
    assert (group.epoch, [rank.value for rank in group.peers]) == (0, [0, 1, 2, 3])
    assert [rank.value for rank in groups_of(bare, group, topology).relays.peers] == [1, 2]


@pytest.mark.parametrize("name", ["deepep", "megatron", "sglang", "deepseek_v3", "nvls"])
def test_a_shipped_topology_is_selected_by_its_path(name: str) -> None:
    path = TOPOLOGIES / f"{name}.yaml"
    document = yaml.safe_load(path.read_text())
    peers = sum(len(domain["member_ranks"]) for domain in document["domains"])
    assert config(topology=str(path), peers=peers) == config(topology=document, peers=peers)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topology": "no/such.yaml"}, "topology no/such.yaml: cannot be read"),
        ({"topology": "/dev/null"}, "topology /dev/null: a topology is a mapping of fields, found NoneType"),
        ({"topology": {**TWO_NODES, "groups": [{**TWO_NODES["groups"][0], "peers": [2, 2]}]}}, "must be distinct"),  # type: ignore[index]
        ({"topology": {**TWO_NODES, "groups": [{**TWO_NODES["groups"][0], "kind": "ful"}]}}, r"^topology: .*kind"),  # type: ignore[index]
        ({"topology": TWO_NODES, "peers": 3}, r"topology must place ranks 0 to 2, found \[0, 1, 2, 3\]"),
        ({"topology": TWO_NODES, "node_labels": ["a"] * 4}, "node_labels and topology both say where ranks are"),
        (
            {"topology": {**TWO_NODES, "groups": [{**TWO_NODES["groups"][0], "peers": [2, 0]}]}},  # type: ignore[index]
            "topology: full_group_incomplete",
        ),
    ],
)
def test_a_topology_that_does_not_fit_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**values)


def test_a_path_whose_hardware_is_missing_is_refused_before_anything_is_loaded_on_it() -> None:
    with pytest.raises(TopologyError, match="capability_missing: symmetric memory of group ep-nvls needs hopper"):
        check_choices(config(topology=str(TOPOLOGIES / "nvls.yaml")), hidden=128)


def test_a_payload_that_makes_rows_larger_is_refused_with_both_sizes() -> None:
    check_choices(config(payload="fp8_row", dtype="bfloat16"), hidden=5)
    with pytest.raises(ConfigError, match=r"payload fp8_row makes a row of 3 elements 7 bytes, native 6; .* from 5"):
        check_choices(config(payload="fp8_row", dtype="bfloat16"), hidden=3)


def test_every_transport_runner_and_strategy_of_the_product_can_be_selected_and_shows_in_the_backends() -> None:
    gpus = {"device": "cuda", "group": "nccl", "dtype": "bfloat16"}
    for field, names in (("transport", TRANSPORTS), ("runner", RUNNERS), ("strategy", STRATEGIES)):
        for name in names:
            needed = gpus if name == "fused_window" else {}
            assert name in dict(phase_backends(config(**{field: name}, **needed)))["decode"]
    assert "all_to_all_v/3" in dict(phase_backends(config(transport_chunks=3)))["prefill"]


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"group": "tcp", "peers": 1}, "group=tcp"),
        ({"dtype": "float32"}, "dtype=float32"),
        ({"transport_chunks": 2}, "transport_chunks=2"),
    ],
)
def test_windows_are_refused_where_they_cannot_be(wrong: dict[str, object], found: str) -> None:
    fit = {"device": "cuda", "group": "nccl", "dtype": "bfloat16", "transport": "fused_window", "peers": 2}
    assert config(**fit, max_peers=4).window_peers == 4
    with pytest.raises(ConfigError, match=f"transport fused_window needs .*, found {found}"):
        config(**fit | wrong)


def test_payload_and_gate_location_are_part_of_the_handles_abi() -> None:
    abi = handle_abi(config(payload="fp8_block", gate_location="expert", dtype="bfloat16"))
    assert (abi.payload_format, abi.gate_location, abi.payload_dtype) == ("fp8_block", "expert", "bfloat16")
