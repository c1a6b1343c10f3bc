"""The cluster that a job runs on: one that stands and is somebody's, or one of the job's own.

Both are found again when they fail. Everything here blocks, and needs a Ray connection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ray.exceptions import RayError

from ray_moe import cluster as clusters
from ray_moe.actors.remote import kill_cluster
from ray_moe.cluster import OnProgress
from ray_moe.config import ClusterConfig
from ray_moe.deadline import Deadline, pause
from ray_moe.errors import RayMoEError

_LOOK_S = 1.0


@dataclass(frozen=True)
class Load:
    """What the engines hold: requests that run, those that wait, and how many may run at a time."""

    running: int
    waiting: int
    cap: int


class Host(ABC):
    """Where a job's requests go."""

    name: str

    @abstractmethod
    def open(self) -> None:
        """Return once the cluster serves. Raises `ConfigError`, `NotServingError` and their kin."""

    @abstractmethod
    def restore(self) -> None:
        """A request found the cluster gone: return once it serves again. Raises when it does not come back."""

    @abstractmethod
    def close(self) -> None:
        """The job is over."""

    def load(self) -> Load | None:
        """A look at the engines; None where nobody answers."""
        try:
            cluster = clusters.connect(self.name)
            peers, rows = cluster.status().peers, cluster.directory().config.max_decode_rows
        except (RayMoEError, RayError):
            return None
        return Load(sum(peer.running for peer in peers), sum(peer.waiting for peer in peers), rows * len(peers))


class Standing(Host):
    """A cluster that somebody runs, and goes on running. When it fails, the job waits `patience_s` for it."""

    def __init__(self, name: str, patience_s: float = 300.0) -> None:
        self.name, self._patience_s = name, patience_s

    def open(self) -> None:
        clusters.connect(self.name).directory()

    def restore(self) -> None:
        deadline = Deadline(self._patience_s)
        while True:
            try:
                self.open()
                return
            except (RayMoEError, RayError) as error:
                deadline.check(f"return of cluster {self.name!r}", str(error))
                pause(_LOOK_S)

    def close(self) -> None:
        """It goes on."""


class Own(Host):
    """A cluster of the job's own, ended with it: the one that an earlier run has left behind, else a new one."""

    def __init__(self, config: ClusterConfig, on_progress: OnProgress | None = None) -> None:
        self.name, self._config, self._on_progress = config.name, config, on_progress

    def open(self) -> None:
        """Start it, unless an earlier run of the job has left it behind."""
        try:
            left = clusters.connect(self.name).directory().config
        except (RayMoEError, RayError):
            left = None
        if left != self._config:
            self.close()
        clusters.ensure(self._config, self._on_progress)

    def restore(self) -> None:
        self.open()

    def close(self) -> None:
        try:
            clusters.connect(self.name).stop()
        except (RayMoEError, RayError):
            kill_cluster(self.name)
