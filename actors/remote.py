"""Every Ray call that makes, names or finds an actor of a cluster.

All actors are detached and named `{cluster}.controller`, `{cluster}.routing`, `{cluster}.expert-{rank}` in namespace
`ray_moe`, so that any process that reaches the Ray cluster can find them.
"""

from __future__ import annotations

import shlex
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_moe.deadline import ray_await
from ray_moe.errors import ConfigError, DeadlineError, NotAvailableError, NotServingError

if TYPE_CHECKING:
    from ray_moe.config import ClusterConfig

NAMESPACE = "ray_moe"
# Runs Ray's worker script after lowering the process, so that importing Ray and torch takes no time from peers that
# serve. Ray's own setup hook for a worker is the job's, not one actor's, and comes after importing Ray.
_LOWERED = """
import contextlib, os, runpy, sys
with contextlib.suppress(ImportError):
    from ray_moe.priority import begin_lowered
    begin_lowered()
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# How long Ray may look for room for one more peer, and what a peer that asks for nothing reserves.
_ROOM_S = 10.0
_SMALLEST_CPU = 0.001


def create_controller(config: ClusterConfig) -> ActorHandle:
    """The controller of a new cluster; `ConfigError` when a cluster of this name already runs."""
    from ray_moe.actors.controller import ControllerActor

    try:
        return _create(ControllerActor, f"{config.name}.controller", 0.0, config, max_restarts=-1)
    except ValueError as error:
        raise ConfigError(
            f"a cluster named {config.name!r} already runs here; `down` it or choose another name"
        ) from error


def create_routing(config: ClusterConfig) -> ActorHandle:
    """The routing actor of `config`'s cluster, the one that there is already where there is one."""
    from ray_moe.actors.routing import RoutingActor

    return _create(RoutingActor, f"{config.name}.routing", 0.0, config, max_restarts=-1, get_if_exists=True)


def create_expert(config: ClusterConfig, rank: int, room: PlacementGroup | None = None) -> ActorHandle:
    """The expert actor that is global `rank`; the one of that name where there is one.

    In `room`, which `reserve` gave, it starts beside a cluster that serves: at idle priority, until it serves itself.
    """
    from ray_moe.actors.expert import ExpertActor

    options: dict[str, Any] = {"num_gpus": 1 if config.device == "cuda" else 0, "get_if_exists": True}
    if room is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=0)
        options["runtime_env"] = {"py_executable": f"{shlex.quote(sys.executable)} -c {shlex.quote(_LOWERED)}"}
    return _create(ExpertActor, f"{config.name}.expert-{rank}", config.cpus_per_peer, config, rank, **options)


async def reserve(config: ClusterConfig, rank: int) -> PlacementGroup:
    """Room for one more peer, kept until `release_room`; asked again, the same room.

    Raises `NotAvailableError` when Ray's nodes have none within a few seconds: nothing is left waiting for it then.
    """
    name = f"{config.name}.expert-{rank}"
    wanted = {"CPU": config.cpus_per_peer, "GPU": 1.0 if config.device == "cuda" else 0.0}
    bundle = {kind: amount for kind, amount in wanted.items() if amount} or {"CPU": _SMALLEST_CPU}
    try:
        room = ray.util.get_placement_group(name)
    except ValueError:
        room = ray.util.placement_group([bundle], name=name, lifetime="detached")
    try:
        await ray_await(room.ready(), _ROOM_S, f"room for rank {rank}")
    except DeadlineError as error:
        ray.util.remove_placement_group(room)
        free = {kind: ray.available_resources().get(kind, 0.0) for kind in bundle}
        raise NotAvailableError(f"Ray has no room for another peer: it takes {bundle}, free are {free}") from error
    return room


def node_of(room: PlacementGroup) -> str:
    """The Ray node that a room is on."""
    return str(ray.util.placement_group_table(room)["bundles_to_node_id"][0])


def release_room(cluster: str, rank: int) -> None:
    """Give the room of a rank back; a rank that never had any is fine."""
    try:
        room = ray.util.get_placement_group(f"{cluster}.expert-{rank}")
    except ValueError:
        return
    ray.util.remove_placement_group(room)


def was_restarted() -> bool:
    """Whether Ray has started this actor again after its process died."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def this_actor() -> ActorHandle:
    """A handle on the actor that asks."""
    handle: ActorHandle = ray.get_runtime_context().current_actor
    return handle


def find_controller(cluster: str) -> ActorHandle:
    """The controller of a running cluster; `NotServingError` when there is none."""
    try:
        return ray.get_actor(f"{cluster}.controller", namespace=NAMESPACE)
    except ValueError as error:
        raise NotServingError(f"no cluster named {cluster!r} runs on this Ray cluster") from error


def find_expert(cluster: str, rank: int) -> ActorHandle:
    """The expert actor of a rank; `NotServingError` when there is none."""
    try:
        return ray.get_actor(f"{cluster}.expert-{rank}", namespace=NAMESPACE)
    except ValueError as error:
        raise NotServingError(f"cluster {cluster!r} has no rank {rank}") from error


def find_routing(cluster: str) -> ActorHandle:
    """The routing actor of a cluster; `NotServingError` when there is none."""
    try:
        return ray.get_actor(f"{cluster}.routing", namespace=NAMESPACE)
    except ValueError as error:
        raise NotServingError(f"cluster {cluster!r} has no routing actor: it is over, or has not begun") from error


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
    for room in ray.util.placement_group_table().values():
        name = room["name"]
        if name.rpartition(".")[0] == cluster and room["state"] != "REMOVED" and name != but:
            release_room(cluster, int(name.rpartition("-")[2]))


def kill(actor: ActorHandle) -> None:
    """End an actor's process at once; a dead one is fine."""
    ray.kill(actor, no_restart=True)


def _create(kind: type, name: str, cpus: float, *args: Any, **options: Any) -> ActorHandle:
    # By default no runtime_env: an environment of its own would keep an actor off the worker processes that Ray has
    # started ahead. Nor is one needed: Ray gives a worker with less than two CPUs a single OpenMP thread before it
    # imports the class.
    made_of = _remote(kind).options(
        **{"max_restarts": 0, **options},
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=cpus,
        max_concurrency=1000,
    )
    actor: ActorHandle = made_of.remote(*args)
    return actor


@cache
def _remote(kind: type) -> Any:
    """Each call of `ray.remote` makes another class for Ray, which every process that meets an actor of it keeps."""
    return ray.remote(kind)
