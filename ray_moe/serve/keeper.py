"""A cluster as a Serve application, for where a Serve configuration is all there is (KubeRay's RayService).

`import_path: ray_moe.serve.keeper:build`, with a cluster configuration's fields as its arguments and no route: it is
RUNNING once the cluster serves, and UNHEALTHY, then started again, when the cluster is gone. The HTTP API is an
application of its own beside it (`ray_moe.serve.app:build`).

A cluster that serves is left alone, also by a redeployment with other arguments and by the application's end: what
changes a running cluster are the verbs of `ray_moe.cluster.Cluster`, which lose no request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray import serve

from ray_moe.cluster import connect, ensure
from ray_moe.config import ClusterConfig

_LOG = logging.getLogger(__name__)


class ClusterKeeper:
    """Brings a cluster up, and says whether it serves."""

    def __init__(self, config: ClusterConfig) -> None:
        self._name = config.name
        running = ensure(config).directory().config
        if running != config:
            _LOG.warning("cluster %r serves already, under another configuration than this application's", self._name)

    def check_health(self) -> None:
        """Raises `NotServingError` or `PeerLostError`; after a few, Serve starts the keeper again."""
        connect(self._name).directory()


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application for a cluster configuration. Raises `ConfigError`."""
    config = ClusterConfig.parse(dict(args), "arguments of ray_moe.serve.keeper:build")
    deployment = serve.deployment(name="Cluster", ray_actor_options={"num_cpus": 0}, health_check_timeout_s=60)
    return deployment(ClusterKeeper).bind(config)
