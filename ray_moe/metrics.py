"""Metrics by name: what is counted over what, and which bounded labels tell series apart (specification 0x0DB).

Declarations only. Actors and serve export them, and check every set of labels here before they do: a label outside the
schema would make the observability system a second unbounded workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_moe.errors import ConfigError


@dataclass(frozen=True)
class Label:
    """How many values a label may take in one process at a time; `values` where they are known beforehand."""

    cap: int
    values: tuple[str, ...] = ()


LABELS: Mapping[str, Label] = {
    "release": Label(cap=8),
    "phase": Label(cap=3, values=("prefill", "decode", "bare")),
    "topology": Label(cap=8),
    "graph": Label(cap=64),  # one for each captured executable
    "reason": Label(cap=16),  # why a step did not replay
    "placement_generation": Label(cap=32),
    "process_group_generation": Label(cap=32),
}
# Longer than any value that names a release, a generation or a reason; prompts are not.
LABEL_LENGTH = 128


@dataclass(frozen=True)
class Metric:
    """A ratio of two counts, or a counter where `denominator` is None. Ratios are exported as their two counts."""

    name: str
    numerator: str
    denominator: str | None
    labels: tuple[str, ...]


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("moe_route_drop_ratio", "dropped routes", "attempted routes", ("release", "phase")),
        Metric("moe_remote_route_ratio", "remote routes", "accepted routes", ("release", "phase")),
        Metric("moe_inter_node_route_ratio", "inter-node routes", "accepted routes", ("release", "phase", "topology")),
        Metric("moe_graph_replay_ratio", "graph replays", "replay + fallback", ("release", "phase", "graph")),
        Metric("moe_fallback_step_ratio", "fallback steps", "all steps", ("release", "phase", "reason")),
        Metric("route_output_mismatch_counter", "mismatches", None, ("release", "phase")),
        Metric("stale_handle_acceptance_counter", "accepted stale handles", None, ("release", "placement_generation")),
        Metric("count_conservation_counter", "failures", None, ("release", "process_group_generation")),
    )
}


def check_labels(metric: str, labels: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless `metric` exists and `labels` are exactly its own, with values that they may have."""
    if metric not in METRICS:
        raise ConfigError(f"metric must be one of {', '.join(METRICS)}, found {metric!r}")
    asked = METRICS[metric].labels
    for name in labels:
        if name not in asked:
            raise ConfigError(f"metric {metric}: label {name!r} is outside its schema: {', '.join(asked)}")
    for name in asked:
        if name not in labels:
            raise ConfigError(f"metric {metric}: label {name!r} is missing")
        value, known = labels[name], LABELS[name].values
        if known and value not in known:
            raise ConfigError(f"metric {metric}: label {name} must be one of {', '.join(known)}, found {value[:40]!r}")
        if not 0 < len(value) <= LABEL_LENGTH:
            raise ConfigError(
                f"metric {metric}: label {name} must have 1 to {LABEL_LENGTH} characters, found {len(value)}"
            )
