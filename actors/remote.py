"""Every Ray call that makes, names or finds an actor of a cluster.

All actors are detached and named `{cluster}.controller`, `{cluster}.routing`, `{cluster}.expert-{rank}` in namespace
`ray_moe`, so that any process that reaches the Ray cluster can find them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from ray_moe.errors import ConfigError, NotServingError

if TYPE_CHECKING:
    from ray_moe.config import ClusterConfig

NAMESPACE = "ray_moe"


def create_controller(config: ClusterConfig) -> ActorHandle:
    """The controller of a new cluster; `ConfigError` when a cluster of this name already runs."""
    from ray_moe.actors.controller import ControllerActor

    try:
        return _create(ControllerActor, f"{config.name}.controller", 0.0, config)
    except ValueError as error:
        raise ConfigError(
            f"a cluster named {config.name!r} already runs here; `down` it or choose another name"
        ) from error


def create_routing(config: ClusterConfig) -> ActorHandle:
    """The routing actor of `config`'s cluster."""
    from ray_moe.actors.routing import RoutingActor

    return _create(RoutingActor, f"{config.name}.routing", 0.0, config)


def create_expert(config: ClusterConfig, rank: int) -> ActorHandle:
    """The expert actor that is global `rank`."""
    from ray_moe.actors.expert import ExpertActor

    gpus = 1 if config.device == "cuda" else 0
    return _create(ExpertActor, f"{config.name}.expert-{rank}", config.cpus_per_peer, config, rank, gpus=gpus)


def find_controller(cluster: str) -> ActorHandle:
    """The controller of a running cluster; `NotServingError` when there is none."""
    try:
        return ray.get_actor(f"{cluster}.controller", namespace=NAMESPACE)
    except ValueError as error:
        raise NotServingError(f"no cluster named {cluster!r} runs on this Ray cluster") from error


def kill_cluster(cluster: str, but: str = "") -> None:
    """End whatever actors of a cluster are left, except the one named `but`."""
    for found in ray.util.list_named_actors(all_namespaces=True):
        if found["namespace"] != NAMESPACE or found["name"].rpartition(".")[0] != cluster or found["name"] == but:
            continue
        try:
            actor = ray.get_actor(found["name"], namespace=NAMESPACE)
        except ValueError:  # it ended between the two calls
            continue
        kill(actor)


def kill(actor: ActorHandle) -> None:
    """End an actor's process at once; a dead one is fine."""
    ray.kill(actor, no_restart=True)


def _create(kind: type, name: str, cpus: float, *args: Any, gpus: int = 0) -> ActorHandle:
    # No runtime_env: an environment of its own would keep an actor off the worker processes that Ray has started ahead.
    # Nor is one needed: Ray gives a worker with less than two CPUs a single OpenMP thread before it imports the class.
    remote_kind: Any = ray.remote(kind)
    actor: ActorHandle = remote_kind.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=cpus,
        num_gpus=gpus,
        max_restarts=0,
        max_concurrency=1000,
    ).remote(*args)
    return actor
