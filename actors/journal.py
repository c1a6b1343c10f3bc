"""What the controller must find again after its process died: in Ray's internal key-value store, or in a file.

The key-value store lives as long as Ray's head does. A `state_file` of the configuration outlives that too; it is
replaced atomically, so that a crash leaves the old record or the new one.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

from ray.experimental import internal_kv

from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import ControlState
from ray_moe.controlplane.publication import Storage
from ray_moe.controlplane.rollout import Rollout
from ray_moe.engine.records import ModelFacts
from ray_moe.placement import PlacementSnapshot

_NAMESPACE = b"ray_moe"


@dataclass(frozen=True)
class Record:
    """The control state, and what it was decided on. `live` are the generations that were live, `memory` is all that
    the routing actor's registry must know again."""

    control: ControlState
    storage: Storage
    facts: ModelFacts
    model_path: Path
    live: tuple[PlacementSnapshot, ...]
    memory: bytes = b""
    rollouts: tuple[Rollout, ...] = ()
    config: ClusterConfig | None = None  # of the release that serves, where a rollout has changed it


class Journal:
    """The last record of one cluster. Only the cluster's own controller writes it, and nobody else can reach it: it is
    read with pickle."""

    def __init__(self, config: ClusterConfig) -> None:
        self._key = f"{config.name}.controller".encode()
        self._file = Path(config.state_file) if config.state_file else None

    def write(self, record: Record) -> None:
        """Replace the record, whole or not at all. Raises `OSError` for a file that cannot be written."""
        data = pickle.dumps(record)
        if self._file is None:
            internal_kv._internal_kv_put(self._key, data, overwrite=True, namespace=_NAMESPACE)
            return
        beside = self._file.with_suffix(self._file.suffix + ".new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._file)

    def read(self) -> Record | None:
        """The last record; None when there is none."""
        data: bytes | None
        if self._file is None:
            data = internal_kv._internal_kv_get(self._key, namespace=_NAMESPACE)
        else:
            data = self._file.read_bytes() if self._file.exists() else None
        if not data:
            return None
        record = pickle.loads(data)
        assert isinstance(record, Record)
        return record

    def erase(self) -> None:
        """The cluster has ended: nothing is to be resumed."""
        if self._file is None:
            internal_kv._internal_kv_del(self._key, namespace=_NAMESPACE)
        else:
            self._file.unlink(missing_ok=True)
