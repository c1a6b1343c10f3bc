"""A cluster from the outside: start one, find one, ask it, publish a placement, take it down.

Every function needs a Ray connection (`ray.init` or a driver that Ray started); what it starts is detached and lives
until `Cluster.stop`.
"""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError

from ray_moe.actors.remote import create_controller, find_controller, kill_cluster
from ray_moe.actors.reports import ClusterStatus, Directory
from ray_moe.actors.rollouts import Releases
from ray_moe.actors.tracing import record
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.asking import Asker
from ray_moe.controlplane.operations import ByCounts, ByHomes, Operation, Stage, Target
from ray_moe.controlplane.preview import Preview
from ray_moe.controlplane.rollout import Rollout
from ray_moe.deadline import Deadline, pause, ray_get, ray_ready
from ray_moe.engine.records import LoadProgress
from ray_moe.engine.trace import RankTrace
from ray_moe.errors import ConfigError, NotServingError, PeerLostError, PlacementError
from ray_moe.observe.live import Known, LiveView
from ray_moe.placement import PlacementSnapshot

_POLL_S = 0.1
_WAIT_S = 10.0  # one question to the controller about an operation waits so long at most

OnProgress = Callable[[Mapping[int, LoadProgress]], None]


class Cluster:
    """A handle on a running cluster; any number of processes may hold one."""

    def __init__(self, name: str, controller: ActorHandle, seconds: float = 60.0) -> None:
        self.name = name
        self._controller, self._seconds = controller, seconds

    def status(self) -> ClusterStatus:
        """Peers, slots, generations, references. Raises `NotServingError`."""
        return cast(ClusterStatus, self._ask("status"))

    def live(self, known: Known | None = None) -> LiveView:
        """One look at everything that changes: ranks, steps, loads, placement, operations, which failures it survives.

        Without `known` a whole document; with a `LiveView`'s own, only what is new (`ray_moe.observe.live.merged`).
        Answers also while the cluster starts and after it has lost a rank. Raises `NotServingError`.
        """
        return cast(LiveView, self._ask("live", known))

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
        directory = self.directory()
        peers = dict(directory.members.peers)
        if rank not in peers:
            raise ConfigError(f"rank must be one of {sorted(peers)}, found {rank}")
        found = ray_get(peers[rank].ledgers.remote(), self._seconds, f"ledgers of rank {rank}")
        return cast(dict[int, dict[str, Any]], found)

    def trace(self, steps: int, seconds: float) -> tuple[RankTrace, ...]:
        """Where the next `steps` steps with work spend their time, on every rank; waits up to `seconds` for them.

        The same steps of all ranks; fewer where fewer have run. One recording at a time: `NotServingError` while there
        is another. Raises `ConfigError` for a number out of bounds, `NotServingError` or `PeerLostError` when a rank is
        lost, `DeadlineError` when one does not answer.
        """
        return record(dict(self.directory().members.peers), steps, seconds, self._seconds)

    def publish(self, replicas: Mapping[tuple[int, int], int]) -> int:
        """Publish another generation while requests run; `replicas[(layer, expert)]` copies, 1 where absent.

        Returns the number of the generation that every peer serves then: a new one, or the one there is where it is
        what was asked for. Raises `ConfigError` or `PlacementError`; the old generation then goes on serving.
        """
        number = cast(int, self._ask("publish", self._asker("publish"), dict(replicas)))
        operation = self.wait(number, self._seconds)
        if operation.stage is not Stage.DONE:
            raise PlacementError(operation.reason or f"operation {number} is still {operation.stage}")
        return operation.last_generation or self.status().generation

    # ---- changes: each returns the number of an operation, which `wait`, `operation` and `cancel` take ----

    def rebalance(
        self,
        *,
        replicas: Mapping[tuple[int, int], int] | None = None,
        homes: Mapping[int, Sequence[tuple[int, int]]] | None = None,
        why: str = "asked for",
    ) -> int:
        """Ask for another placement over the same ranks.

        `replicas[(layer, expert)]` are copies in all; experts that it does not name keep theirs. `homes[layer]` is a
        whole plan instead: (expert, rank) pairs. With neither, the placement that suits the demand of the last minutes.
        Raises `ConfigError` for both, or when there is no demand yet.
        """
        return cast(int, self._ask("rebalance", self._asker(why), _target(replicas, homes)))

    def preview(
        self,
        *,
        replicas: Mapping[tuple[int, int], int] | None = None,
        homes: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    ) -> Preview:
        """What `rebalance` with the same arguments would take, from the placement that is active now; nothing changes.

        Raises `ConfigError` as `rebalance` does, and `PlacementError` for what an operation would end with as failed.
        """
        return cast(Preview, self._ask("preview", _target(replicas, homes)))

    def scale(self, peers: int, *, why: str = "asked for") -> int | None:
        """Ask for so many peers; None where that is what there is, or will be. Raises `ConfigError` out of bounds."""
        return cast("int | None", self._ask("scale", self._asker(why), peers))

    def drain(self, *ranks: int, why: str = "asked for") -> int:
        """Ask the named ranks to leave: their experts and requests go to others first. Raises `ConfigError`."""
        return cast(int, self._ask("drain", self._asker(why), ranks))

    def cancel(self, number: int, *, why: str = "") -> None:
        """Undo an operation that has published nothing. Raises `ConfigError`, `GenerationError` for an unknown one."""
        who = self._asker(why).who
        self._ask("cancel", number, f"{who}: {why}" if why else who)

    def operation(self, number: int) -> Operation:
        """How far an operation is. Raises `GenerationError` for one that is unknown, or long forgotten."""
        return cast(Operation, self._ask("operation", number))

    def wait(self, number: int, seconds: float, on_look: Callable[[Operation], None] | None = None) -> Operation:
        """The operation once it has ended, or as it is after `seconds`; `on_look` is called after each look at it."""
        deadline = Deadline(seconds)
        while True:
            operation = cast(Operation, self._ask("wait", number, min(deadline.left, _WAIT_S)))
            if on_look is not None:
                on_look(operation)
            if operation.ended or deadline.passed:
                return operation

    def history(self) -> tuple[Operation, ...]:
        """Operations that have ended and those that are open: who asked, when, why, what it took."""
        return cast("tuple[Operation, ...]", self._ask("history"))

    # ---- releases ----

    def release_build(
        self,
        *,
        settings: Mapping[str, Any] | None = None,
        model: str = "",
        share: float = 0.1,
        shadow_rate: float = 0.1,
        auto: bool = False,
        samples: tuple[int, int] = (100, 200),
        why: str = "asked for",
    ) -> Rollout:
        """Begin to roll a candidate release out: other `settings`, or another checkpoint's `model` folder.

        It is a shadow on `shadow_rate` of the steps, then a canary on `share` of them, and promoted by
        `release_promote`, or with `auto` by itself; `samples` are the outputs compared and the tokens delivered that
        each takes at least. Raises `ConfigError`.
        """
        asker = self._asker(why)
        return cast(
            Rollout,
            self._ask("release_build", asker, dict(settings or {}), model, share, shadow_rate, auto, samples),
        )

    def release_promote(self, release_id: str = "") -> Rollout:
        """Promote the canary. Raises `ReleaseError` not_promoted naming every check that fails."""
        return cast(Rollout, self._ask("release_promote", release_id))

    def release_rollback(self, release_id: str = "", *, why: str = "asked for") -> Rollout:
        """Take the candidate out, whether it serves by now or not. Raises `ConfigError`, `GenerationError`."""
        return cast(Rollout, self._ask("release_rollback", release_id, f"{self._asker(why).who}: {why}"))

    def releases(self) -> Releases:
        """Every release, the log of what was done with them, rollouts, and the latest promotion report."""
        return cast("Releases", self._ask("releases"))

    def rollout(self, release_id: str = "") -> Rollout:
        """How far a rollout is; by default the latest. Raises `ConfigError`."""
        return cast(Rollout, self._ask("rollout", release_id))

    def wait_rollout(self, phases: Sequence[str], seconds: float, release_id: str = "") -> Rollout:
        """The rollout once it is in one of `phases`, or has ended, or as it is after `seconds`."""
        deadline = Deadline(seconds)
        while True:
            rollout = self.rollout(release_id)
            if rollout.phase in phases or rollout.ended or deadline.passed:
                return rollout
            pause(_POLL_S)

    def _asker(self, why: str) -> Asker:
        return Asker(f"{getpass.getuser()}@{socket.gethostname()}", why, time.time())

    def stop(self) -> None:
        """End the cluster: engines at one agreed step, then all actors. A cluster that is already gone is fine."""
        try:
            self._ask("stop")
        except (NotServingError, RayActorError):
            return
        finally:
            kill_cluster(self.name)

    def _ask(self, method: str, *args: object) -> object:
        """Ask the controller; while Ray starts it again after its process died, ask again."""
        deadline = Deadline(self._seconds)
        while True:
            try:
                ref = getattr(self._controller, method).remote(*args)
                return ray_get(ref, deadline.left + 0.1, f"{method} of cluster {self.name!r}")
            except ActorUnavailableError as error:
                if deadline.passed:
                    raise NotServingError(f"the controller of cluster {self.name!r} does not come back") from error
                pause(_POLL_S)
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


def ensure(config: ClusterConfig, on_progress: OnProgress | None = None) -> Cluster:
    """The cluster of this name if it serves, whatever has become of its configuration; else a new one in its place.

    Raises as `start`.
    """
    try:
        cluster = connect(config.name)
        cluster.directory()
    except (NotServingError, PeerLostError):
        kill_cluster(config.name)  # what is left of it
        return start(config, on_progress)
    return cluster


def connect(name: str = "default") -> Cluster:
    """A handle on a cluster that runs on this Ray cluster; `NotServingError` when there is none of this name."""
    return Cluster(name, find_controller(name))


def _target(
    replicas: Mapping[tuple[int, int], int] | None, homes: Mapping[int, Sequence[tuple[int, int]]] | None
) -> Target | None:
    if replicas is not None and homes is not None:
        raise ConfigError("replicas and homes both say where experts shall live; give one of them")
    if replicas is not None:
        return ByCounts(dict(replicas))
    if homes is not None:
        return ByHomes({layer: tuple((expert, rank) for expert, rank in homes[layer]) for layer in homes})
    return None
