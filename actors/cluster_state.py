"""Where a cluster stands, and what may come next."""

from __future__ import annotations

from enum import StrEnum


class ClusterState(StrEnum):
    """Where the cluster stands."""

    STARTING = "starting"
    SERVING = "serving"
    DEGRADED = "degraded"
    STOPPED = "stopped"
    FAILED = "failed"


# state -> {event: next}. DEGRADED: the epoch is broken (a peer died, or failed); calls fail by name.
CLUSTER_TABLE: dict[ClusterState, dict[str, ClusterState]] = {
    ClusterState.STARTING: {
        "serve": ClusterState.SERVING,
        "fail": ClusterState.FAILED,
        "stop": ClusterState.STOPPED,
    },
    ClusterState.SERVING: {"lose_peer": ClusterState.DEGRADED, "stop": ClusterState.STOPPED},
    ClusterState.DEGRADED: {"lose_peer": ClusterState.DEGRADED, "stop": ClusterState.STOPPED},
    ClusterState.FAILED: {"stop": ClusterState.STOPPED},
    ClusterState.STOPPED: {},
}
