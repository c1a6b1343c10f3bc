"""What a candidate release is made of: a configuration that differs where releases may, and a placement beside the
serving one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray_moe.config import ClusterConfig
from ray_moe.controlplane.publication import Storage
from ray_moe.errors import ConfigError, PlacementError
from ray_moe.identity import CheckpointVersion, PlacementVersion
from ray_moe.placement import LayerPlacement, PlacementSnapshot, Slot

# What a release may change over the groups that are joined and the KV that is there.
SETTINGS = (
    *("transport", "transport_chunks", "runner", "block_rows", "strategy", "strategy_parts"),
    *("payload", "gate_location", "decode_buckets", "batch_invariant"),
)


def changed_config(serving: ClusterConfig, settings: Mapping[str, Any], model: str) -> ClusterConfig:
    """The candidate's configuration. Raises `ConfigError` for a setting that is not one of `SETTINGS`, for a transport
    that needs groups of its own, and for a strategy that rearranges a trunk which others run as it is."""
    strange = sorted(set(settings) - set(SETTINGS))
    if strange:
        raise ConfigError(f"a release may set {', '.join(SETTINGS)}, found {', '.join(strange)}")
    given = serving.model_dump(mode="json") | {"contract": None} | dict(settings)
    config = ClusterConfig.parse({**given, "model": model or serving.model}, "release")
    if config.transport != serving.transport and "hierarchical" in (config.transport, serving.transport):
        raise ConfigError(
            f"transport {config.transport} needs other groups than {serving.transport}: bring a cluster up"
        )
    if config.strategy == "shared_path" != serving.strategy:
        raise ConfigError("strategy shared_path takes shared experts out of the trunk that serves: bring a cluster up")
    return config


def candidate_of(
    active: PlacementSnapshot, release_id: str, generation: int, checkpoint: str, storage: Storage
) -> PlacementSnapshot:
    """The same homes as another release: the same slots, or with another `checkpoint` free ones, without digests.

    Where copies do not fit beside those that serve, each expert keeps its first. `PlacementError` when that does not
    fit either, with the sums.
    """
    version = PlacementVersion(f"placement-v{generation}")
    named = replace(active, release_id=release_id, generation=generation, version=version)
    if not checkpoint:
        return named
    layers = tuple(_beside(layer, CheckpointVersion(checkpoint), storage.capacity) for layer in active.layers)
    return replace(named, checkpoint_version=CheckpointVersion(checkpoint), layers=layers)


def _beside(layer: LayerPlacement, checkpoint: CheckpointVersion, capacity: int) -> LayerPlacement:
    first: dict[int, Slot] = {}
    for slot in layer.slots:
        first.setdefault(slot.logical_expert_id.value, slot)
    free = {rank: [pool for pool in range(capacity) if pool not in used] for rank, used in _used(layer).items()}
    for wanted in (layer.slots, tuple(first.values())):
        needed = {rank: sum(slot.destination_rank.value == rank for slot in wanted) for rank in free}
        if any(needed[rank] > len(free[rank]) for rank in free):
            continue
        left = {rank: iter(pools) for rank, pools in free.items()}
        slots = tuple(
            replace(
                slot,
                checkpoint_version=checkpoint,
                parameter_digest="",
                pool_slot=next(left[slot.destination_rank.value]),
            )
            for slot in wanted
        )
        return replace(layer, slots=slots)
    rank = next(rank for rank in free if needed[rank] > len(free[rank]))
    raise PlacementError(
        f"layer {layer.layer} rank {rank}: another checkpoint needs {needed[rank]} slots beside those that serve; of "
        f"{capacity}, {len(free[rank])} are free"
    )


def _used(layer: LayerPlacement) -> dict[int, set[int]]:
    used: dict[int, set[int]] = {}
    for slot in layer.slots:
        used.setdefault(slot.destination_rank.value, set()).add(slot.pool_slot)
    return used
