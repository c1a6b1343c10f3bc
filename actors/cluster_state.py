"""Where a cluster stands, and what may come next."""

from __future__ import annotations

import logging
from enum import StrEnum

from ray_moe.errors import RayMoEError
from ray_moe.events import emit


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
_BAD = (ClusterState.DEGRADED, ClusterState.FAILED)


def advance(cluster: str, state: ClusterState, event: str, reason: str = "") -> ClusterState:
    """Take one edge of `CLUSTER_TABLE`, and log it. Raises `RayMoEError` naming state and event for any other."""
    following = CLUSTER_TABLE[state].get(event)
    if following is None:
        raise RayMoEError(f"cluster {cluster!r}: event {event!r} is illegal in state {state.value}")
    level = logging.ERROR if following in _BAD else logging.INFO
    emit("cluster", state.value, following.value, event, level=level, reason=reason)
    return following
