"""Documents: what is refused and how, and that records come back from JSON and YAML exactly as they were."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_moe.asked import ReplicaRequest, expand_replicas, parse_replicas
from ray_moe.config import ClusterConfig, load_config
from ray_moe.errors import CompatibilityError, ConfigError, PlacementError, TopologyError
from ray_moe.identity import (
    CheckpointVersion,
    GlobalRank,
    LogicalExpertId,
    PhysicalSlotId,
    PlacementVersion,
    ProcessGroupId,
    ReplicaId,
)
from ray_moe.manifest import PlacementManifest, ReleaseManifest, TopologyManifest
from ray_moe.placement import LayerPlacement, PlacementSnapshot, ReleaseBundle, ShardCoordinate, Slot
from ray_moe.relations import RuntimeTopology
from ray_moe.topology import Domain, GroupKind, NicPath, ProcessGroupSpec, Topology, derive_groups
from ray_moe.topology_ledger import fan_out

ROOT = Path(__file__).resolve().parents[2]


# -- Cluster configuration


def test_the_embedded_configuration_spells_out_every_field_at_its_default() -> None:
    path = ROOT / "cluster_configs" / "local-cpu.yaml"
    assert load_config(path) == ClusterConfig(model="tiny-moe")
    written = {line.split(":")[0] for line in path.read_text().splitlines() if line[:1].isalpha()}
    assert ClusterConfig.model_fields.keys() - written == {"revision", "trust_remote_code"}, "hub models only"


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("peers", 0, "greater than or equal to 1"),
        ("peers", True, "valid integer"),
        ("peers", "4", "valid integer"),
        ("spare_slots", -1, "greater than or equal to 0"),
        ("kv_blocks", 0, "greater than or equal to 1"),
        ("dtype", "int8", "'float32', 'bfloat16' or 'float16'"),
        ("device", "tpu", "'cpu' or 'cuda'"),
        ("transport", "nccl", "'all_to_all_v'"),
        ("runner", "fast", "'grouped'"),
        ("policy", "random", "'token_hash', 'locality_first', 'least_load', 'round_robin' or 'queue_aware'"),
        ("step_deadline_s", 0, "greater than 0"),
        ("request_deadline_s", float("inf"), "finite number"),
        ("audit_rate", 1.5, "less than or equal to 1"),
        ("audit_rate", float("nan"), "finite number"),
        ("final_after_steps", -1, "greater than or equal to 0"),
        ("port", 65536, "less than or equal to 65535"),
        ("name", "two words", "match pattern"),
        ("model", "", "at least 1 character"),
    ],
)
def test_a_value_out_of_bounds_is_refused_on_one_line_with_field_value_and_bound(
    field: str, value: object, bound: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        ClusterConfig.parse({"model": "m", field: value}, "my.yaml")
    message = str(refused.value)
    assert message.startswith(f"my.yaml: {field}: found {value!r}, ")
    assert bound in message
    assert "\n" not in message


def test_all_wrong_fields_are_named_at_once_with_the_field_that_was_probably_meant() -> None:
    with pytest.raises(ConfigError) as refused:
        ClusterConfig.parse({"peer": 2, "port": -1, "zzz": 0})
    assert set(str(refused.value).split("; ")) == {
        "model: required, but not given",
        "port: found -1, input should be greater than or equal to 0",
        "peer: no such field (value 2), did you mean peers?",
        "zzz: no such field (value 0)",
    }


def test_overrides_replace_the_files_fields_and_the_result_is_checked_as_one(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: m\npeers: 2\nstep_deadline_s: 5\n")
    assert load_config(path, {"peers": 3}) == ClusterConfig(model="m", peers=3, step_deadline_s=5.0)
    with pytest.raises(ConfigError, match=r"c\.yaml: peers: found 0"):
        load_config(path, {"peers": 0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peers: [1\n", "not valid YAML at line 2, column 1"),
        ("", "is a mapping of fields, found NoneType"),
        ("- model\n", "is a mapping of fields, found list"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read"):
        load_config(tmp_path / "binary.yaml")


def test_a_configuration_comes_back_from_yaml_and_json_as_it_was() -> None:
    config = ClusterConfig(model="org/m", revision="main", replicas=parse_replicas("*:0=2,1:3=4"), audit_rate=0.1)
    assert ClusterConfig.from_yaml(config.to_yaml()) == config
    assert ClusterConfig.from_json(config.to_json()) == config


# -- Replicas


def test_replicas_are_written_as_text_or_as_a_list() -> None:
    asked = (ReplicaRequest(layer=0, expert=3, count=2), ReplicaRequest(layer="*", expert=1, count=4))
    assert parse_replicas(" 0:3=2, * : 1 = 4 ") == asked
    as_text = ClusterConfig.from_yaml('model: m\nreplicas: "0:3=2,*:1=4"\n')
    as_list = ClusterConfig.from_yaml(
        "model: m\nreplicas: [{layer: 0, expert: 3, count: 2}, {layer: '*', expert: 1, count: 4}]\n"
    )
    assert as_text.replicas == as_list.replicas == asked
    assert parse_replicas("") == parse_replicas("  ") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:3", "'0:3' is not LAYER:EXPERT=COUNT"),
        ("3=2", "'3=2' is not LAYER:EXPERT=COUNT"),
        ("0:3=2,", "'' is not LAYER:EXPERT=COUNT"),
        ("0:*=2", r"'0:\*=2' is not LAYER:EXPERT=COUNT"),
        ("0:3=two", "'0:3=two' is not LAYER:EXPERT=COUNT"),
        ("0:3=1.5", "'0:3=1.5' is not LAYER:EXPERT=COUNT"),
        ("0:3=0", "'0:3=0': count: found 0, input should be greater than or equal to 1"),
        ("0:-3=2", "'0:-3=2': expert: found -3, input should be greater than or equal to 0"),
        ("-1:3=2", "'-1:3=2': layer: found -1, must be a layer index >= 0"),
    ],
)
def test_a_replica_text_that_cannot_be_read_quotes_the_part_and_says_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_replicas(text)
    with pytest.raises(ConfigError, match=message) as refused:
        ClusterConfig.parse({"model": "m", "replicas": text}, "my.yaml")
    assert str(refused.value).startswith("my.yaml: replicas")


def test_a_star_stands_for_every_moe_layer_and_a_numbered_layer_wins_over_it() -> None:
    requests = parse_replicas("1:0=3,*:0=2,2:5=2")
    assert expand_replicas(requests, [1, 3]) == {(1, 0): 3, (3, 0): 2, (2, 5): 2}
    assert expand_replicas([], [1, 3]) == {}


@pytest.mark.parametrize("text", ["1:0=3,1:0=2", "*:0=3,*:0=3"])
def test_one_expert_asked_for_twice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"layer [1*] expert 0 is asked for twice"):
        expand_replicas(parse_replicas(text), [1])


# -- Placement manifest

# Any text a name can be made of, among them what YAML would read as a number, a date, a boolean or nothing.
NAMES = st.one_of(st.text(max_size=8), st.sampled_from(["017", "1e3", "no", "null", "~", "2024-01-01", "a: b", "- x"]))


@st.composite
def node(draw: st.DrawFn, name: str, members: list[GlobalRank]) -> Domain:
    """A node whose relay, fabric and NICs are each stated or not; the first member's NIC serves all that have one."""
    served = members[: draw(st.integers(0, len(members)))]
    return Domain(
        name,
        tuple(members),
        relay_rank=draw(st.sampled_from([None, *members])),
        fabric_domain=draw(NAMES),
        nics=tuple(NicPath(rank, f"nic of {name}", None if rank == served[0] else served[0]) for rank in served),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> PlacementSnapshot:
    num_ranks = draw(st.integers(1, 4))
    peers = draw(st.permutations([GlobalRank(3 * rank) for rank in range(num_ranks)]))
    domains = draw(st.lists(NAMES, min_size=1, max_size=2, unique=True))
    owner = {rank: draw(st.sampled_from(domains)) for rank in peers}
    checkpoint = CheckpointVersion(draw(NAMES.filter(bool)))
    digests = draw(st.lists(NAMES, min_size=3, max_size=3))
    count = draw(st.integers(1, 2))
    nodes = tuple(draw(node(name, [rank for rank in peers if owner[rank] == name])) for name in domains)
    layers = []
    for layer in draw(st.lists(st.integers(0, 9), max_size=3, unique=True)):
        experts = draw(st.permutations([0, 1, 2, *draw(st.lists(st.integers(0, 2), max_size=3))]))
        ids = draw(st.lists(NAMES, min_size=len(experts), max_size=len(experts), unique=True))
        slots = []
        for position, expert in enumerate(experts):
            rank = draw(st.sampled_from(peers))
            index = draw(st.integers(0, count - 1))
            slots.append(
                Slot(
                    physical_slot_id=PhysicalSlotId(ids[position]),
                    logical_expert_id=LogicalExpertId(expert),
                    replica_id=ReplicaId(draw(NAMES)),
                    destination_rank=rank,
                    topology_domain_id=owner[rank],
                    checkpoint_version=checkpoint,
                    parameter_digest=digests[expert] and f"{digests[expert]}/{index}",
                    pool_slot=10 - position,
                    shard=ShardCoordinate(index, count),
                )
            )
        layers.append(LayerPlacement(layer, 3, tuple(slots)))
    return PlacementSnapshot(
        version=PlacementVersion(draw(NAMES)),
        generation=draw(st.integers(0, 2**40)),
        release_id=draw(NAMES),
        checkpoint_version=checkpoint,
        group=ProcessGroupSpec(ProcessGroupId(draw(NAMES)), draw(st.integers(0, 9)), tuple(peers)),
        topology=Topology(draw(NAMES), nodes),
        layers=tuple(layers),
    )


@settings(max_examples=60, deadline=None)
@given(snapshot=snapshots(), state=st.sampled_from(["ACTIVE", "DRAINING", "RETIRED"]), refcount=st.integers(0, 9))
def test_a_snapshot_comes_back_from_json_and_yaml_exactly(
    snapshot: PlacementSnapshot, state: str, refcount: int
) -> None:
    manifest = PlacementManifest.from_snapshot(snapshot, state=state, in_flight_refcount=refcount)
    for again in (PlacementManifest.from_json(manifest.to_json()), PlacementManifest.from_yaml(manifest.to_yaml())):
        assert again == manifest
        assert again.to_snapshot() == snapshot
        assert again.to_snapshot().digest == snapshot.digest


RANKS = (GlobalRank(2), GlobalRank(0))
SNAPSHOT = PlacementSnapshot(
    version=PlacementVersion("placement-v17"),
    generation=17,
    release_id="r1",
    checkpoint_version=CheckpointVersion("checkpoint-0042"),
    group=ProcessGroupSpec(ProcessGroupId("ep-group-0"), 3, RANKS),
    topology=Topology("topology-v3", (Domain("node-0", RANKS),)),
    layers=(
        LayerPlacement(
            5,
            1,
            (
                Slot(
                    physical_slot_id=PhysicalSlotId("q1"),
                    logical_expert_id=LogicalExpertId(0),
                    replica_id=ReplicaId("e0-r1"),
                    destination_rank=GlobalRank(2),
                    topology_domain_id="node-0",
                    checkpoint_version=CheckpointVersion("checkpoint-0042"),
                    parameter_digest="expert-0-state-v42",
                    pool_slot=4,
                ),
            ),
        ),
    ),
)


def document() -> dict[str, Any]:
    return json.loads(PlacementManifest.from_snapshot(SNAPSHOT, state="DRAINING", in_flight_refcount=1).to_json())


def test_the_document_has_the_specifications_shape_and_peers_in_peer_slot_order() -> None:
    assert document() == {
        "placement_version": "placement-v17",
        "generation": 17,
        "state": "DRAINING",
        "process_group_id": "ep-group-0",
        "epoch": 3,
        "member_ranks": [2, 0],
        "checkpoint_version": "checkpoint-0042",
        "release_id": "r1",
        "in_flight_refcount": 1,
        "topology": {"version": "topology-v3", "domains": [{"domain_id": "node-0", "member_ranks": [2, 0]}]},
        "layers": [
            {
                "layer": 5,
                "num_logical_experts": 1,
                "slots": [
                    {
                        "physical_slot_id": "q1",
                        "logical_expert_id": 0,
                        "replica_id": "e0-r1",
                        "destination_rank": 2,
                        "topology_domain_id": "node-0",
                        "parameter_digest": "expert-0-state-v42",
                        "pool_slot": 4,
                        "shard": {"index": 0, "count": 1},
                    }
                ],
            }
        ],
    }


def test_a_slot_of_another_checkpoint_is_refused_by_the_records_own_clause() -> None:
    given_document = document()
    given_document["layers"][0]["slots"][0]["checkpoint_version"] = "checkpoint-0041"
    with pytest.raises(CompatibilityError) as refused:
        PlacementManifest.parse(given_document).to_snapshot()
    assert refused.value.clause == "checkpoint_match"


def test_a_document_that_loses_an_expert_is_refused_by_the_record() -> None:
    given_document = document()
    given_document["layers"][0]["num_logical_experts"] = 2
    with pytest.raises(PlacementError, match=r"layer 5: logical experts without a slot: \[1\]"):
        PlacementManifest.parse(given_document).to_snapshot()


def test_a_misspelt_or_mistyped_entry_is_refused_with_its_path() -> None:
    given_document = document()
    given_document["layers"][0]["slots"][0]["rank"] = 2
    given_document["layers"][0]["slots"][0]["pool_slot"] = "4"
    with pytest.raises(ConfigError) as refused:
        PlacementManifest.parse(given_document, "p.json")
    assert "layers.0.slots.0.rank: no such field (value 2)" in str(refused.value)
    assert "layers.0.slots.0.pool_slot: found '4', input should be a valid integer" in str(refused.value)


def test_a_state_that_the_registry_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="state: found 'BUILT', input should be 'ACTIVE', 'DRAINING' or 'RETIRED'"):
        PlacementManifest.from_snapshot(SNAPSHOT, state="BUILT", in_flight_refcount=0)


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"p\.json: .*invalid JSON"):
        PlacementManifest.from_json("{", "p.json")


# -- Topology manifest and what runtimes ask of one

TOPOLOGIES = ROOT / "cluster_configs" / "topologies"


@settings(max_examples=60, deadline=None)
@given(snapshot=snapshots())
def test_a_topology_and_its_groups_come_back_from_json_and_yaml_exactly(snapshot: PlacementSnapshot) -> None:
    groups = derive_groups(snapshot.topology, snapshot.group)
    manifest = TopologyManifest.from_topology(snapshot.topology, groups)
    for again in (TopologyManifest.from_json(manifest.to_json()), TopologyManifest.from_yaml(manifest.to_yaml())):
        assert again == manifest
        assert again.to_topology() == snapshot.topology
        assert again.to_groups() == groups


def test_groups_are_of_one_named_epoch() -> None:
    group = {"process_group_id": "ep", "kind": "full_expert_parallel", "epoch": 1, "peers": [0]}
    given_document = {
        "version": "t",
        "domains": [{"domain_id": "node-0", "member_ranks": [0]}],
        "groups": [group],
    }
    with pytest.raises(ConfigError, match="collective_epoch: required with groups"):
        TopologyManifest.parse(given_document)
    with pytest.raises(TopologyError, match="collective_epoch_mismatch"):
        TopologyManifest.parse(given_document | {"collective_epoch": 2}).to_groups()
    with pytest.raises(ConfigError, match=r"groups\.0\.kind: found 'ring', input should be 'full_expert_parallel'"):
        TopologyManifest.parse(given_document | {"groups": [group | {"kind": "ring"}]})


def runtime(name: str) -> RuntimeTopology:
    path = TOPOLOGIES / f"{name}.yaml"
    return RuntimeTopology.from_yaml(path.read_text(), str(path))


@pytest.mark.parametrize("name", ["deepep", "megatron", "nvls", "sglang", "deepseek_v3"])
def test_a_shipped_topology_is_valid_names_its_source_and_comes_back_exactly(name: str) -> None:
    manifest = runtime(name)
    assert manifest.to_groups().topology == manifest.to_topology()
    assert all(source.revision and source.statement for source in manifest.relations.sources)
    assert RuntimeTopology.from_yaml(manifest.to_yaml()) == manifest
    assert RuntimeTopology.from_json(manifest.to_json()) == manifest


def test_every_shipped_topology_is_among_those_tested() -> None:
    assert {path.stem for path in TOPOLOGIES.iterdir()} == {"deepep", "megatron", "nvls", "sglang", "deepseek_v3"}


def test_deepep_labels_classes_and_megatron_keeps_three_kinds_of_groups_apart() -> None:
    labels = runtime("deepep").relations.transport_of_class
    assert labels == {"same_node_remote_gpu": "nvlink", "different_node": "rdma"}
    kinds = [binding.kind for binding in runtime("megatron").to_groups().bindings]
    expected = [GroupKind.EXPERT_PARALLEL] * 2 + [GroupKind.TENSOR_PARALLEL] * 2 + [GroupKind.TENSOR_BY_EXPERT]
    assert kinds == expected


def test_sglangs_sizes_go_together_by_backend() -> None:
    relations = runtime("sglang").relations
    for backend, expert_parallel in (("deepep", 8), ("mooncake", 8), ("none", 8), ("none", 2), ("none", 1)):
        relations.require_sizes(backend, expert_parallel, tensor_parallel=8)
    for backend, expert_parallel in (("deepep", 4), ("mooncake", 16), ("none", 3), ("none", 16), ("none", 0)):
        with pytest.raises(
            TopologyError, match=f"sizes_not_supported: backend {backend} with .* {expert_parallel} and"
        ):
            relations.require_sizes(backend, expert_parallel, tensor_parallel=8)
    with pytest.raises(TopologyError, match="unknown_backend: 'ring' is none of"):
        relations.require_sizes("ring", 8, 8)


def test_fan_out_is_compared_with_deepseeks_limit_and_changes_no_route() -> None:
    manifest = runtime("deepseek_v3")
    within, beyond = [GlobalRank(8 * node) for node in range(4)], [GlobalRank(8 * node) for node in range(5)]
    found = [fan_out(manifest.to_topology(), [token]).max_nodes for token in (within, beyond)]
    assert found == [4, 5]
    assert [nodes <= (manifest.relations.max_nodes_per_token or 0) for nodes in found] == [True, False]


# -- Release manifest

BUNDLE = ReleaseBundle(
    release_id="m66-placement-v19-canary-01",
    checkpoint_version=CheckpointVersion("checkpoint-0042"),
    checkpoint_digest="c",
    placement_generation="placement-v19",
    placement_digest="p",
    topology_version="topology-v3",
    process_group_generation="groups-v19-ep4-etp1",
    route_abi="ray_moe.routes/1",
    dispatch_handle_abi="ray_moe.handle/1",
    precision_roles=(("dispatch", "bf16"), ("gate", "fp32"), ("accumulation", "fp32")),
    phase_backends=(("variable_prefill", "grouped-gemm"), ("fixed_bucket_decode", "padded-masked")),
    graph_manifest_digest="g",
    upstream_report_digests=("loop-2", "loop-3"),
)


def test_a_release_bundle_comes_back_from_json_and_yaml_exactly() -> None:
    manifest = ReleaseManifest.from_bundle(BUNDLE)
    assert ReleaseManifest.from_json(manifest.to_json()).to_bundle() == BUNDLE
    assert ReleaseManifest.from_yaml(manifest.to_yaml()).to_bundle() == BUNDLE
    assert ReleaseManifest.model_fields.keys() == {field.name for field in dataclasses.fields(ReleaseBundle)}


def test_a_role_that_comes_twice_cannot_become_a_document() -> None:
    twice = dataclasses.replace(BUNDLE, precision_roles=(("gate", "fp32"), ("gate", "bf16")))
    with pytest.raises(ConfigError, match="precision_roles: 'gate' is given twice: 'fp32' and 'bf16'"):
        ReleaseManifest.from_bundle(twice)


def test_several_peers_need_a_group_that_carries_rows_where_they_are() -> None:
    with pytest.raises(ConfigError, match="group must be nccl for 2 peers on cuda, found tcp"):
        ClusterConfig.parse({"model": "m", "device": "cuda", "peers": 2})
    assert ClusterConfig(model="m", device="cuda", peers=1).device == "cuda"


def test_batch_invariance_is_refused_where_no_products_keep_one_order_of_summation() -> None:
    one_gpu = {"model": "tiny-moe", "peers": 1, "device": "cuda", "dtype": "bfloat16", "audit_rate": 0}
    assert ClusterConfig.parse(one_gpu | {"batch_invariant": True}, "config").batch_invariant
    changes = {
        "device": "cpu", "runner": "block_sparse", "dtype": "float16", "audit_rate": 0.5, "payload": "fp8_row",
        "decode_buckets": "8x32", "gate_location": "expert", "adaptive": "all",
    }  # fmt: skip
    for name, value in changes.items():
        ClusterConfig.parse(one_gpu | {name: value}, "config")
        with pytest.raises(ConfigError, match=rf"batch_invariant needs device=cuda, .*; found {name}="):
            ClusterConfig.parse(one_gpu | {name: value, "batch_invariant": True}, "config")
