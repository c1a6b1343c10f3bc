"""A Ray head of one's own for `up`: it outlives the command, listens on loopback only, and asks for a token.

It is started as the leader of a session of its own and with a mark in its environment, so that `down` can end exactly
what it started: `ray stop` would end every Ray on the machine, and a peer that joins leaves the session.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ray_moe.cli import records
from ray_moe.cli.records import Head, Record
from ray_moe.deadline import Deadline, pause
from ray_moe.errors import ConfigError, NotServingError, RayMoEError
from ray_moe.priority import USUAL_PRIORITY

OBJECT_STORE_BYTES = 200 * 1024**2
# Ray's name for "this machine is a cluster by itself": with it off, every Ray process binds to 127.0.0.1 instead of all
# interfaces. Drivers that connect to such a head need it too, or Ray rewrites 127.0.0.1 to the machine's outer address.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

# What the head starts inherits it, in whatever session that goes on.
MARK = "RAY_MOE_HEAD"

_POLL_S = 0.1
_TERMINATE_S = 20.0
_KILL_S = 10.0


def environment_of(record: Record) -> dict[str, str]:
    """What a driver must have in its environment, before it imports Ray, to reach the record's cluster."""
    environment = dict(LOOPBACK_ONLY) if record.loopback else {}
    if record.token_file is not None:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": record.token_file}
    return environment


def start_head(
    name: str, model: str, *, num_cpus: int, dashboard: bool, seconds: float, metrics_port: int = 0
) -> Record:
    """Start a head for the cluster `name`; its record, saved already, when the head listens. For as long as it runs
    Prometheus can scrape it at `metrics_port`, 0 for a free one.

    Raises `NotServingError` when Ray ends by itself, `DeadlineError` after `seconds`; nothing is left running then.
    """
    deadline = Deadline(seconds)
    port, client_port, dashboard_port, free_port = free_ports(4)
    log = records.home() / f"{name}.log"
    token_file, mark = _token_file(name), secrets.token_hex(8)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--port={port}", f"--ray-client-server-port={client_port}", f"--num-cpus={num_cpus}"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--include-dashboard={str(dashboard).lower()}"]
    command += [f"--dashboard-port={dashboard_port}", f"--metrics-export-port={metrics_port or free_port}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=_head_environment(token_file, mark),
            cwd="/",  # it must not keep somebody's folder in use, nor import what lies there
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    head = Head(process.pid, psutil.Process(process.pid).create_time(), str(log), mark)
    token = str(token_file) if token_file is not None else None
    record = Record(name, f"127.0.0.1:{port}", model, loopback=True, token_file=token, head=head)
    try:
        records.save(record)
        while not (answers("127.0.0.1", port) and _has_raylet(process.pid)):
            if process.poll() is not None:
                raise NotServingError(f"Ray ended with status {process.returncode}: {_last_line(log)} (log: {log})")
            deadline.check("start of Ray", f"log: {log}")
            pause(_POLL_S)
    except BaseException:
        end_head(record, keep_log=True)
        raise
    return record


def end_head(record: Record, *, keep_log: bool = False) -> None:
    """End the head and all that it has started, to the last process, and forget the record.

    Raises `RayMoEError` when processes outlive even SIGKILL; the record is then kept.
    """
    if record.head is not None:
        # `ray start --block` ends its children itself when it is asked to.
        _signal([member for member in processes_of(record.head) if member.pid == record.head.pid], signal.SIGTERM)
        _wait_until_gone(record.head, Deadline(_TERMINATE_S))
        _signal(processes_of(record.head), signal.SIGKILL)
        _wait_until_gone(record.head, Deadline(_KILL_S))
        if left := processes_of(record.head):
            raise RayMoEError(f"Ray processes {sorted(process.pid for process in left)} do not end")
        if record.token_file is not None:
            Path(record.token_file).unlink(missing_ok=True)
        if not keep_log:
            Path(record.head.log).unlink(missing_ok=True)
    records.remove(record.name)


def processes_of(head: Head) -> list[psutil.Process]:
    """The living processes of the head's session, and those that bear its mark.

    Linux reuses no pid while a session bears it.
    """
    session = None if _is_another(head) else head.pid
    return [process for process in psutil.process_iter() if _is_member(process, session, head.mark)]


def free_ports(count: int) -> list[int]:
    """Different TCP ports of 127.0.0.1 that were free just now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def require_free(host: str, port: int) -> None:
    """`ConfigError` when nothing of ours could listen there; port 0 always is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def answers(host: str, port: int, seconds: float = 1.0) -> bool:
    """Whether something accepts TCP connections there."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError:
        return False
    return True


def _token_file(name: str) -> Path | None:
    """A token of the head's own, unless whoever calls has decided about tokens."""
    if any(os.environ.get(variable) for variable in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return None
    path = records.home() / f"{name}.token"
    records.write_private(path, secrets.token_hex(32))
    return path


def _head_environment(token_file: Path | None, mark: str) -> Mapping[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= LOOPBACK_ONLY | USUAL_PRIORITY | {MARK: mark}
    # On SIGTERM Ray would wait up to this long for actors to leave; `down` has stopped ours by then.
    environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    if token_file is not None:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
    elif not environment.get("RAY_AUTH_MODE"):
        environment["RAY_AUTH_MODE"] = "token"
    return environment


def _has_raylet(leader: int) -> bool:
    """The head's own port opens seconds before drivers can be served."""
    try:
        return any(child.name() == "raylet" for child in psutil.Process(leader).children())
    except psutil.Error:
        return False


def _is_another(head: Head) -> bool:
    """Whether the head's pid belongs to a later process."""
    try:
        return bool(psutil.Process(head.pid).create_time() != head.created)
    except psutil.NoSuchProcess:
        return False


def _is_member(process: psutil.Process, session: int | None, mark: str) -> bool:
    try:
        if os.getsid(process.pid) != session and not (mark and process.environ().get(MARK) == mark):
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except (ProcessLookupError, PermissionError, psutil.Error):  # it has ended, or is not ours
        return False


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue  # it ended by itself


def _wait_until_gone(head: Head, deadline: Deadline) -> None:
    while processes_of(head) and not deadline.passed:
        pause(_POLL_S)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"
