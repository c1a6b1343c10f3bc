"""What a new cluster is made of, beside its placement: the model, where its members are and meet, the release."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import ray
import torch

from ray_moe.actors.device import most_tokens, regions_of
from ray_moe.comm.join import transport_named
from ray_moe.comm.probe import probe
from ray_moe.comm.transports import Transport
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.bundles import build, digest_of
from ray_moe.controlplane.layouts import expert_layout, group_generation, require_releasable
from ray_moe.dataplane.adaptive import Chooser
from ray_moe.dataplane.captured import DecodeBucket, Executables
from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.local import Workspaces
from ray_moe.dataplane.precision import DtypeRoles, break_even_width, codec_named
from ray_moe.dataplane.strategies import strategy_named
from ray_moe.engine.blocks import BlockFacts
from ray_moe.engine.generation import Backend
from ray_moe.engine.records import ModelFacts
from ray_moe.engine.trunk import Trunk
from ray_moe.errors import ConfigError
from ray_moe.identity import CheckpointVersion, GlobalRank, ProcessGroupId
from ray_moe.models import TINY_MOE, tiny_moe_path
from ray_moe.placement import PlacementSnapshot, ReleaseBundle
from ray_moe.relations import require_capabilities
from ray_moe.topology import Domain, GroupKind, ProcessGroupSpec, Topology, TopologyGroups, derive_groups
from ray_moe.weights.checkpoint import check_supported, read_config, resolve_model

if TYPE_CHECKING:
    from ray_moe.comm.window import NodeWindow

# Strategies without parts.
_WHOLE = ("bulk", "shared_path")


def find_model(config: ClusterConfig) -> Path:
    """The model's folder. A model that cannot be served is refused here, before any peer exists.

    Raises `ConfigError` and `UnsupportedModelError`.
    """
    if config.model == TINY_MOE:
        path = tiny_moe_path()
    else:
        path = resolve_model(config.model, revision=config.revision, weights=config.load_format == "safetensors")
    trust = config.trust_remote_code
    check_supported(read_config(path, trust_remote_code=trust), path=path, trust_remote_code=trust)
    return path


def seats_of(config: ClusterConfig, nodes: Sequence[str]) -> tuple[ProcessGroupSpec, Topology]:
    """The first epoch's group and where its ranks are; `nodes` are the Ray nodes of the ranks, in rank order.

    A configuration's own topology goes before its labels, and these before Ray's nodes. Raises `TopologyError`.
    """
    ranks = tuple(GlobalRank(rank) for rank in range(config.peers))
    own = ProcessGroupSpec(ProcessGroupId(f"{config.name}-ep"), 0, ranks)
    if config.topology is None:
        return own, topology_of(ranks, nodes, config.node_labels)
    topology = config.topology.to_topology()
    given = _groups_in(config)
    return (given.full if given is not None and _binds(given, GroupKind.FULL_EXPERT_PARALLEL) else own), topology


def groups_of(config: ClusterConfig, spec: ProcessGroupSpec, topology: Topology) -> TopologyGroups:
    """The node-local and relay groups of an epoch: a configuration's own, peer orders and all, else derived ones.

    Raises `TopologyError`.
    """
    given = _groups_in(config)
    whole = (GroupKind.FULL_EXPERT_PARALLEL, GroupKind.NODE_LOCAL, GroupKind.INTER_NODE_RELAYS)
    if given is not None and _binds(given, *whole) and given.full == spec:
        return given
    return derive_groups(topology, spec)


def _groups_in(config: ClusterConfig) -> TopologyGroups | None:
    return config.topology.to_groups() if config.topology is not None and config.topology.groups else None


def _binds(groups: TopologyGroups, *kinds: GroupKind) -> bool:
    return set(kinds) <= {binding.kind for binding in groups.bindings}


def topology_of(ranks: Sequence[GlobalRank], nodes: Sequence[str], labels: Sequence[str] = ()) -> Topology:
    """One domain per Ray node, named in order of appearance; `labels`, one per rank, name other domains instead."""
    if labels:
        distinct = {label: label for label in labels}
    else:
        distinct = {node: f"node-{number}" for number, node in enumerate(dict.fromkeys(nodes))}
    at = labels or nodes
    members = {
        name: tuple(rank for rank, node in zip(ranks, at, strict=True) if node == key) for key, name in distinct.items()
    }
    return Topology("topology-v1", tuple(Domain(name, ranks_there) for name, ranks_there in members.items()))


def check_choices(config: ClusterConfig, hidden: int) -> None:
    """What a configuration selects must suit this model and this host; `hidden` is the model's width.

    Raises `ConfigError` for a payload that makes rows larger than they are (0x0AB), `TopologyError` for a path whose
    hardware is not here (0x06I): neither shows in shapes.
    """
    dtype = getattr(torch, config.dtype)
    plain, chosen = (codec_named(name, hidden, dtype).row_bytes for name in ("native", config.payload))
    if chosen > plain:
        raise ConfigError(
            f"payload {config.payload} makes a row of {hidden} elements {chosen} bytes, native {plain}; against bf16 "
            f"it is smaller from {break_even_width(config.payload)} elements on"
        )
    relations = getattr(config.topology, "relations", None)
    if relations is not None and relations.symmetric_memory is not None:
        path = f"symmetric memory of group {relations.symmetric_memory.process_group_id}"
        require_capabilities(path, relations.symmetric_memory.requires, probe(config.device))


def backend_of(
    config: ClusterConfig, transport: Transport, blocks: Mapping[int, BlockFacts], workspaces: Workspaces | None
) -> Backend:
    """How a peer of this cluster executes its layers; `workspaces` are `workspaces_of` its configuration."""
    alternatives = {
        choice: (transport_named(name, transport.group, chunks=config.transport_chunks), runner)
        for choice in config.adaptive
        for name, runner in [choice.split("+")]
    }
    buckets = [DecodeBucket(bucket.rank_tokens, bucket.slot_rows) for bucket in config.decode_buckets]
    return Backend(
        transport=transport,
        runner=config.runner,
        policy=config.policy,
        strategy=strategy_named(config.strategy, config.strategy_parts),
        blocks=blocks,
        block_rows=config.block_rows,
        executables=Executables(buckets, torch.device(config.device)) if buckets else None,
        alternatives=alternatives,
        chooser=Chooser(len(alternatives)) if alternatives else None,
        workspaces=workspaces,
    )


def workspaces_of(config: ClusterConfig) -> Workspaces | None:
    """Kernels for the whole layer compute what the grouped runner computes; another runner was asked for by name."""
    if config.runner != "grouped":
        return None
    return Workspaces(most_tokens(config), config.batch_invariant)


def window_of(config: ClusterConfig, rank: GlobalRank, trunk: Trunk) -> NodeWindow | None:
    """This process's window, for all epochs that it will have a seat in; None where no rows go over windows."""
    regions = regions_of(config, trunk.top_k, trunk.hidden_size)
    if regions is None:
        return None
    from ray_moe.comm.window import NodeWindow  # with its launches: not where there is no triton

    return NodeWindow(regions, rank, trunk.device, config.step_deadline_s)


def transport_over(config: ClusterConfig, joined_as: ClusterConfig, seat: Transport) -> Transport:
    """A release's own transport over the groups that this peer has joined for another release's configuration."""
    if (config.transport, config.transport_chunks) == (joined_as.transport, joined_as.transport_chunks):
        return seat
    return transport_named(config.transport, seat.group, chunks=config.transport_chunks)


def handle_abi(config: ClusterConfig) -> HandleABI:
    """What the peers of this cluster put on the wire, and who applies the gate."""
    return HandleABI(
        payload_dtype=config.dtype,
        return_dtype=config.dtype,
        gate_location=config.gate_location,
        payload_format=config.payload,
        exchange="; ".join(f"{phase}: {backend}" for phase, backend in phase_backends(config)),
    )


def store_host(nodes: Sequence[str]) -> str:
    """Where the store listens: on loopback when every peer is on this node, else where other nodes reach it."""
    if set(nodes) == {ray.get_runtime_context().get_node_id()}:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())


def known_nodes(domains: int) -> tuple[str, ...]:
    """The nodes of a cluster whose placement has so many domains: after a restart only their number is known."""
    here = str(ray.get_runtime_context().get_node_id())
    alive = tuple(str(node["NodeID"]) for node in ray.nodes() if node["Alive"])
    return (here,) if domains == 1 or len(alive) == 1 else alive


def release_bundle(
    config: ClusterConfig, snapshot: PlacementSnapshot, facts: ModelFacts, group: ProcessGroupSpec | None = None
) -> ReleaseBundle:
    """Everything that a step of this release must agree on (specification 0x0CA), bound to configuration and model.

    `group` is the one that a peer has joined for this placement, by default the placement's own. Raises `ReleaseError`
    for a placement of parts of experts.
    """
    abi, group = handle_abi(config), group or snapshot.group
    layout = expert_layout(group.peers, etp=max(slot.shard.count for layer in snapshot.layers for slot in layer.slots))
    require_releasable(layout, None)  # a configuration has no way to state a manifest of shards
    checkpoint = CheckpointVersion(facts.checkpoint_version)
    roles = DtypeRoles.of(
        abi.payload_dtype, abi.return_dtype, abi.gate_location, abi.payload_format, gate_dtype=facts.gate_dtype
    )
    stated = ReleaseBundle(
        release_id=snapshot.release_id,
        checkpoint_version=checkpoint,
        checkpoint_digest=checkpoint.value,
        placement_generation=snapshot.version.value,
        placement_digest=snapshot.digest,
        topology_version=snapshot.topology.version,
        process_group_generation=group_generation(group, layout),
        route_abi="ray_moe.routes/1",
        dispatch_handle_abi=abi.handle_version,
        precision_roles=(*asdict(roles).items(), ("gate_location", abi.gate_location)),
        phase_backends=phase_backends(config),
        graph_manifest_digest=digest_of(_graph_manifests(config, snapshot)),
    )
    evidence = {"config.json": config.model_dump_json(), "model.json": json.dumps(asdict(facts))}
    return build(stated, {name: text.encode() for name, text in evidence.items()})


def _graph_manifests(config: ClusterConfig, snapshot: PlacementSnapshot) -> list[dict[str, int]]:
    """What the decode executables of a placement are made for; none without decode buckets."""
    return [
        {"layer": layer.layer, "slots": len(layer.slots), "peers": len(snapshot.group.peers), **bucket.model_dump()}
        for layer in snapshot.layers
        for bucket in config.decode_buckets
    ]


def phase_backends(config: ClusterConfig) -> tuple[tuple[str, str], ...]:
    """(phase, group + transport + runner + strategy); decode names its executables before the path it falls back to."""
    transport = config.transport if config.transport_chunks == 1 else f"{config.transport}/{config.transport_chunks}"
    strategy = config.strategy if config.strategy in _WHOLE else f"{config.strategy}/{config.strategy_parts}"
    chosen = f"[{' | '.join(config.adaptive)}]" if config.adaptive else f"{transport}+{config.runner}"
    eager = f"{config.group}+{chosen}+{strategy}"
    buckets = ",".join(f"{bucket.rank_tokens}x{bucket.slot_rows}" for bucket in config.decode_buckets)
    decode = f"{config.group}+padded_all_to_all+masked_decode[{buckets}], else {eager}" if buckets else eager
    return (("prefill", eager), ("decode", decode))
