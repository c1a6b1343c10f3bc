"""A cluster from the outside: start one, find one, ask it, publish a placement, take it down.

Every function needs a Ray connection (`ray.init` or a driver that Ray started); what it starts is detached and lives
until `Cluster.stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors.remote import create_controller, find_controller, kill_cluster
from ray_moe.actors.reports import ClusterStatus, Directory
from ray_moe.config import ClusterConfig
from ray_moe.deadline import Deadline, pause, ray_get, ray_ready
from ray_moe.engine.records import LoadProgress
from ray_moe.errors import ConfigError, NotServingError
from ray_moe.placement import PlacementSnapshot

_POLL_S = 0.1

OnProgress = Callable[[Mapping[int, LoadProgress]], None]


class Cluster:
    """A handle on a running cluster; any number of processes may hold one."""

    def __init__(self, name: str, controller: ActorHandle, seconds: float = 60.0) -> None:
        self.name = name
        self._controller, self._seconds = controller, seconds

    def status(self) -> ClusterStatus:
        """Peers, slots, generations, references. Raises `NotServingError`."""
        return cast(ClusterStatus, self._ask("status"))

    def directory(self) -> Directory:
        """What a client needs (`ray_moe.sdk.Client`). Raises `PeerLostError` or `NotServingError`."""
        return cast(Directory, self._ask("directory"))

    def placement(self) -> PlacementSnapshot:
        """The active placement."""
        return cast(PlacementSnapshot, self._ask("placement"))

    def ledgers(self, rank: int = 0) -> dict[int, dict[str, Any]]:
        """By MoE layer, the ledgers of the last audited invocation as peer `rank` accounts for it, as plain values.

        `ray_moe.dataplane.invocation_ledger.InvocationLedger` says what the fields are. A layer that was not audited
        yet is left out. Raises `ConfigError` for a rank that the cluster does not have, `NotServingError`.
        """
        peers = self.directory().peers
        if not 0 <= rank < len(peers):
            raise ConfigError(f"rank must be in [0, {len(peers)}), found {rank}")
        found = ray_get(peers[rank].ledgers.remote(), self._seconds, f"ledgers of rank {rank}")
        return cast(dict[int, dict[str, Any]], found)

    def publish(self, replicas: Mapping[tuple[int, int], int]) -> int:
        """Publish another generation while requests run; `replicas[(layer, expert)]` copies, 1 where absent.

        Returns the generation's number once every peer has staged it; it serves from the next agreed step on. Raises
        `ConfigError` or `PlacementError`; the old generation then goes on serving.
        """
        return cast(int, self._ask("publish", dict(replicas)))

    def stop(self) -> None:
        """End the cluster: engines at one agreed step, then all actors. A cluster that is already gone is fine."""
        try:
            self._ask("stop")
        except (NotServingError, RayActorError):
            return
        finally:
            kill_cluster(self.name)

    def _ask(self, method: str, *args: object) -> object:
        try:
            ref = getattr(self._controller, method).remote(*args)
            return ray_get(ref, self._seconds, f"{method} of cluster {self.name!r}")
        except RayActorError as error:
            raise NotServingError(f"the controller of cluster {self.name!r} is gone") from error


def start(config: ClusterConfig, on_progress: OnProgress | None = None) -> Cluster:
    """Start a cluster and return once it serves.

    `on_progress` is called a few times a second with each rank's `LoadProgress`. Raises `ConfigError`,
    `UnsupportedModelError`, `CheckpointError` and their kin as the peers do, `DeadlineError` after
    `config.start_deadline_s`; nothing is left running then.
    """
    controller = create_controller(config)
    kill_cluster(config.name, but=f"{config.name}.controller")  # whom an earlier controller that was killed left behind
    cluster = Cluster(config.name, controller, config.start_deadline_s)
    deadline = Deadline(config.start_deadline_s)
    try:
        started: ray.ObjectRef = controller.start.remote()
        while not ray_ready([started])[0]:
            deadline.check(f"start of cluster {config.name!r}")
            if on_progress is not None:
                on_progress(ray_get(controller.progress.remote(), deadline.left + 1, "progress"))
            pause(_POLL_S)
        ray_get(started, deadline.left + 1, f"start of cluster {config.name!r}")
    except RayActorError as error:
        cluster.stop()
        raise NotServingError(f"cluster {config.name!r} was stopped while it started") from error
    except BaseException:
        # The controller ends its actors when its own start fails; here the caller was interrupted or ran out of time.
        cluster.stop()
        raise
    return cluster


def connect(name: str = "default") -> Cluster:
    """A handle on a cluster that runs on this Ray cluster; `NotServingError` when there is none of this name."""
    return Cluster(name, find_controller(name))
