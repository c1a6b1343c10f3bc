"""What a new cluster is made of, beside its placement: the model, where its members are and meet, the release."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ray

from ray_moe.dataplane.handle import HandleABI
from ray_moe.identity import GlobalRank
from ray_moe.manifest import ClusterConfig
from ray_moe.models import TINY_MOE, tiny_moe_path
from ray_moe.placement import PlacementSnapshot, ReleaseBundle
from ray_moe.topology import Domain, Topology
from ray_moe.weights.checkpoint import check_supported, read_config, resolve_model


def find_model(config: ClusterConfig) -> Path:
    """The model's folder. A model that cannot be served is refused here, before any peer exists.

    Raises `ConfigError` and `UnsupportedModelError`.
    """
    path = tiny_moe_path() if config.model == TINY_MOE else resolve_model(config.model, revision=config.revision)
    trust = config.trust_remote_code
    check_supported(read_config(path, trust_remote_code=trust), path=path, trust_remote_code=trust)
    return path


def topology_of(ranks: Sequence[GlobalRank], nodes: Sequence[str]) -> Topology:
    """One domain per Ray node, named in order of appearance."""
    distinct = list(dict.fromkeys(nodes))
    members = {node: tuple(rank for rank, at in zip(ranks, nodes, strict=True) if at == node) for node in distinct}
    return Topology("topology-v1", tuple(Domain(f"node-{n}", members[node]) for n, node in enumerate(distinct)))


def store_host(nodes: Sequence[str]) -> str:
    """Where the store listens: on loopback when every peer is on this node, else where other nodes reach it."""
    if set(nodes) == {ray.get_runtime_context().get_node_id()}:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())


def release_bundle(config: ClusterConfig, snapshot: PlacementSnapshot) -> ReleaseBundle:
    """Everything that a step of this release must agree on (specification 0x0CA)."""
    abi = HandleABI(payload_dtype=config.dtype, return_dtype=config.dtype)
    return ReleaseBundle(
        release_id=snapshot.release_id,
        checkpoint_version=snapshot.checkpoint_version,
        checkpoint_digest=snapshot.checkpoint_version.value,
        placement_generation=snapshot.version.value,
        placement_digest=snapshot.digest,
        topology_version=snapshot.topology.version,
        process_group_generation=f"{snapshot.group.process_group_id}-e{snapshot.group.epoch}",
        route_abi="ray_moe.routes/1",
        dispatch_handle_abi=abi.handle_version,
        precision_roles=(
            ("dispatch", config.dtype),
            ("combine", config.dtype),
            ("gate", "router"),
            ("gate_location", abi.gate_location),
        ),
        phase_backends=tuple(
            (phase, f"{config.group}+{config.transport}+{config.runner}") for phase in ("prefill", "decode")
        ),
    )
