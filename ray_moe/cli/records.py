"""What `up` remembers about a cluster for the commands after it: one small file per cluster name.

The folder is `$RAY_MOE_HOME`, else `~/.cache/ray_moe`; only its owner can read it, since it holds the token that the
cluster's Ray asks for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray_moe.errors import ConfigError, RayMoEError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


@dataclass(frozen=True)
class Head:
    """A Ray head that `up` started: the leader of a session of its own. `created` (Unix seconds) tells a later process
    with the same pid apart; `mark` is in the environment of all that it starts."""

    pid: int
    created: float
    log: str
    mark: str = ""


@dataclass(frozen=True)
class Record:
    """Where a cluster runs. `loopback`: its Ray listens on 127.0.0.1 only. `token_file`: the token it asks for."""

    name: str
    address: str
    model: str
    loopback: bool = False
    token_file: str | None = None
    head: Head | None = None
    http_url: str | None = None


def home() -> Path:
    """The folder, made when it is missing."""
    folder = Path(os.environ.get("RAY_MOE_HOME") or Path.home() / ".cache" / "ray_moe")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def path_of(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name is {name!r}; it must be letters, digits, '.', '_' and '-', with a letter or digit first"
        )
    return home() / f"{name}.json"


def load(name: str) -> Record | None:
    """The record of this cluster, or None. `RayMoEError` for a file that is no record."""
    path = path_of(name)
    return _read(path) if path.is_file() else None


def every() -> Iterator[Record]:
    """All records."""
    for path in sorted(home().glob("*.json")):
        yield _read(path)


def at(address: str) -> Record | None:
    """A record of a cluster on the Ray at this address; they all hold the same about that Ray."""
    return next((record for record in every() if record.address == address), None)


def save(record: Record) -> Path:
    """Write it whole or not at all."""
    path = path_of(record.name)
    draft = path.with_suffix(".draft")
    write_private(draft, json.dumps(asdict(record), indent=2))
    draft.replace(path)
    return path


def remove(name: str) -> None:
    path_of(name).unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """A file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _read(path: Path) -> Record:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        head = values.pop("head", None)
        return Record(**values, head=Head(**head) if head else None)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RayMoEError(f"{path} is not a cluster's record ({error}); remove it to forget that cluster") from error
