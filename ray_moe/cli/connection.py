"""How a command reaches Ray: a private one for as long as the command runs, or one that runs already.

Ray reads its environment when it is imported, so everything here that imports it has set that first.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ray_moe.cli import records
from ray_moe.cli.head import LOOPBACK_ONLY, OBJECT_STORE_BYTES, answers, environment_of
from ray_moe.cli.records import Record
from ray_moe.errors import ConfigError, NotServingError
from ray_moe.priority import USUAL_PRIORITY

if TYPE_CHECKING:
    from ray_moe.config import ClusterConfig

_LOCALHOST = ("localhost", "127.0.0.1", "::1")
_ANSWER_S = 5.0


@dataclass(frozen=True)
class Target:
    """A Ray cluster to connect to, and what the environment must say for it."""

    address: str
    environment: Mapping[str, str] = field(default_factory=dict)


def cpus_for(config: ClusterConfig) -> int:
    """Logical CPUs of a Ray of our own: all there are, and enough for as many peers as the cluster may grow to."""
    peers = config.peers if config.max_peers is None else config.max_peers
    return max(os.cpu_count() or 1, math.ceil(peers * config.cpus_per_peer) + 1)


@contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """A Ray of this process alone, gone when the block ends. It listens on loopback and asks for a token."""
    environment = LOOPBACK_ONLY | USUAL_PRIORITY
    if not any(os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        # Left to itself, Ray would write a token into the home directory.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    _prepare(environment)
    import ray

    ray.init(
        address="local",
        namespace="ray_moe",
        num_cpus=num_cpus,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def attached(target: Target) -> Iterator[None]:
    """A connection to a Ray that runs.

    Raises `NotServingError` when nothing answers there or it refuses us, `ConfigError` for what is no address.
    """
    _prepare(target.environment)
    host, port = _reached(target)
    if not answers(host, port, _ANSWER_S):  # Ray itself would try for minutes
        raise NotServingError(f"no Ray answers at {host}:{port}")
    import ray

    try:
        ray.init(address=target.address, namespace="ray_moe", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise NotServingError(f"cannot connect to Ray at {target.address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def locate(address: str | None, name: str) -> Target:
    """Where a cluster runs: the address that was given; else, and for "auto", where `up` put the cluster of this name;
    else the Ray that runs on this machine. Raises `NotServingError` when there is none of them."""
    if address is not None and address != "auto":
        return target_at(address)
    record = records.load(name)
    if record is not None:
        return target_of(record)
    running = running_ray()
    if running is None:
        raise NotServingError(f"no cluster named {name!r} was started from here, and no Ray to attach to was found")
    return running


def target_at(address: str) -> Target:
    """This address, with what is known about it."""
    record = records.at(address)
    return target_of(record) if record is not None else Target(address, _token_if_there_is_one())


def target_of(record: Record) -> Target:
    """The Ray that the record's cluster was started on."""
    return Target(record.address, environment_of(record) or _token_if_there_is_one())


def running_ray() -> Target | None:
    """RAY_ADDRESS; else the Ray that `ray start` noted on this machine, if it still answers."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto", "local"):
        return target_at(address)
    note = Path(_temporary()) / "ray" / "ray_current_cluster"
    if not note.is_file():
        return None
    address = note.read_text(encoding="utf-8").strip()
    host, port = _parse(address)
    target = target_at(address)
    # Only heads of ours listen on loopback alone; one that we have no record of cannot be reached.
    known = host not in _LOCALHOST or _is_loopback_only(target)
    return target if known and answers(host, port) else None


def is_up(target: Target) -> bool:
    """Whether that Ray answers."""
    _prepare(target.environment)
    return answers(*_reached(target), _ANSWER_S)


def serve_app() -> ModuleType:
    """`ray_moe.serve.app`, once Ray is connected, without Serve's running commentary."""
    from ray_moe.serve import app

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return app


def metrics_endpoints() -> dict[str, Any]:
    """Where Prometheus scrapes what the connected Ray's nodes export: `targets` as HOST:PORT, one a node, and the
    `service_discovery` file that Ray keeps up to date beside its dashboard, None where this machine has none."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"] and node.get("MetricsExportPort", 0) > 0]
    session = Path(_temporary()) / "ray" / ray.get_runtime_context().get_session_name()
    file = session / "prom_metrics_service_discovery.json"
    return {
        "targets": sorted(_address(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes),
        "service_discovery": str(file) if file.is_file() else None,
    }


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _temporary() -> str:
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def _reached(target: Target) -> tuple[str, int]:
    """Host and port where Ray will look."""
    host, port = _parse(target.address)
    if host in _LOCALHOST and not _is_loopback_only(target):
        import ray

        host = ray.util.get_node_ip_address()
    return host, port


def _is_loopback_only(target: Target) -> bool:
    return LOOPBACK_ONLY.items() <= target.environment.items()


def _token_if_there_is_one() -> dict[str, str]:
    """Ray looks for the user's token by itself only where it also finds the address by itself."""
    if os.environ.get("RAY_AUTH_MODE"):
        return {}
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return {"RAY_AUTH_MODE": "token"} if named or (Path.home() / ".ray" / "auth_token").is_file() else {}


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"address is {address!r}; it must be HOST:PORT of a Ray head, or auto")
    return host.strip("[]"), int(port)


def _prepare(environment: Mapping[str, str]) -> None:
    # A program that has imported Ray already has settled this: half of a change would be worse than none.
    if "ray" not in sys.modules:
        if "RAY_AUTH_TOKEN_PATH" in environment:
            os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray would prefer it
        os.environ.update(environment)
