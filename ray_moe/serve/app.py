"""The Ray Serve application: one deployment that speaks OpenAI's HTTP API for one cluster.

`build` is what `serve run` and Serve configuration files import (`import_path: ray_moe.serve.app:build`); `run` and
`shutdown` do the same from Python.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from ray_moe.actors.collector import keep_what_is_loaded
from ray_moe.actors.exporter import Exporter, RaySink
from ray_moe.cluster import connect
from ray_moe.deadline import Deadline, pause
from ray_moe.errors import ConfigError, NotServingError
from ray_moe.events import configure
from ray_moe.metrics import REPLICA_BUDGET
from ray_moe.serve.access import AccessRules
from ray_moe.serve.admission import Capacity
from ray_moe.serve.api import Limits, openai_api
from ray_moe.serve.asking import Bounds
from ray_moe.serve.generation import Backends, ClusterDoor
from ray_moe.serve.keys import API_KEYS, Keys, args_for, with_digests
from ray_moe.serve.schema import AppArgs
from ray_moe.telemetry import requests_of
from ray_moe.text import load_tokenizer

# Ray Serve's own bound on a replica's requests lies so far above ours: what is too much is refused in OpenAI's words,
# and health, metrics and admin routes are answered even then.
_SPARE_REQUESTS = 64

_POLL_S = 0.1
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where to reach what listens everywhere


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application for `args`, the fields of `AppArgs`.

    The cluster need not run yet: until it does, requests are answered 503. Raises `ConfigError` for other arguments,
    for keys that cannot be read, and where there is no API key and `no_auth` does not say that none is needed: what
    address Serve listens on is not known here.
    """
    source = "arguments of ray_moe.serve.app:build"
    parsed = with_digests(AppArgs.parse(dict(args), source))
    if not parsed.api_key_digests and not parsed.no_auth:
        raise ConfigError(
            f"{source}: no API key (api_keys_file, or {API_KEYS} in the environment); set no_auth where none is needed"
        )
    door = ClusterDoor(parsed.cluster, parsed.model_name)
    rules = AccessRules(
        api_keys=None if parsed.no_auth else Keys(parsed.api_key_digests),
        admin_tokens=Keys(parsed.admin_token_digests),
        max_body_bytes=parsed.max_body_bytes,
        echo_request_ids=False,  # Serve's proxy does
    )
    limits = Limits(
        Capacity(parsed.max_concurrent, parsed.max_queued, parsed.queue_timeout_s),
        Bounds(parsed.max_prompt_tokens, parsed.max_tokens),
        parsed.request_timeout_s,
    )

    def api() -> FastAPI:
        configure(as_json=parsed.log_json, cluster=parsed.cluster, actor="http")
        made = openai_api(
            Backends(door),
            limits=limits,
            rules=rules,
            cluster=lambda: connect(door.cluster_name),
            export=Exporter(RaySink(), REPLICA_BUDGET, {"cluster": door.cluster_name}),
            requests=requests_of(),
        )
        keep_what_is_loaded()  # in the replica's process, between whose tokens no full collection may fall
        return made

    deployment = serve.deployment(
        name="OpenAI",
        max_ongoing_requests=parsed.max_concurrent + parsed.max_queued + _SPARE_REQUESTS,
        # It waits for the engine's peers; a CPU of its own would keep small machines from placing it at all.
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=5,
    )
    return deployment(serve.ingress(api)()).bind()


def run(cluster_name: str, *, host: str, port: int, seconds: float, args: AppArgs | None = None) -> None:
    """Serve a running cluster at http://host:port and return once /ready answers there.

    Raises `NotServingError` or `PeerLostError` when the cluster does not serve, `ConfigError` when the address cannot
    be had, the model has no tokenizer or `args_for` refuses, `DeadlineError` after `seconds`. What was started is taken
    down again.
    """
    deadline = Deadline(seconds)
    wanted = args_for(host, args or AppArgs()).model_copy(update={"cluster": cluster_name})
    directory = connect(cluster_name).directory()
    check_tokenizer(directory.model_path, directory.config.trust_remote_code)
    check_address(host, port)
    application = _application(cluster_name)
    try:
        # No request_timeout_s: a generation may last as long as tokens keep coming; the wait for each of them has the
        # cluster's request_deadline_s.
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options={"host": host, "port": port})
        target = serve.RunTarget(build(wanted.model_dump(exclude_none=True)), application, "/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        _wait_until_running(application, deadline)
        _wait_until_ready(host, port, deadline)
    except RayServeException as error:
        shutdown(cluster_name)
        raise ConfigError(f"Ray Serve refuses the application: {error}") from error
    except BaseException:
        shutdown(cluster_name)
        raise


def check_address(host: str, port: int) -> None:
    """`ConfigError` when Ray Serve cannot, or does not, listen there: all applications of a Ray share one address."""
    # HTTP options of a Serve that runs already are not ours to change.
    if serve.status().proxies:
        _require_open(host, port)
    else:
        _require_free(host, port)


def check_tokenizer(model: Path, trust_remote_code: bool) -> None:
    """`ConfigError` for a model without a tokenizer: every answer holds text.

    Of a model whose folder is on other machines nothing is known here.
    """
    if not model.is_dir():
        return
    try:
        load_tokenizer(model, trust_remote_code=trust_remote_code)
    except ConfigError as error:
        raise ConfigError(f"{error}; HTTP needs one, leave it out (--no-http)") from error


def shutdown(cluster_name: str | None = None) -> None:
    """Take down what `run` started, for one cluster or for all; Serve itself too, unless it has other applications."""
    ours = _application("") if cluster_name is None else _application(cluster_name)
    for name in serve.status().applications:
        if name == ours or (cluster_name is None and name.startswith(ours)):
            serve.delete(name)
    if not serve.status().applications:
        serve.shutdown()


def _application(cluster_name: str) -> str:
    return f"ray_moe.{cluster_name}"


def _require_free(host: str, port: int) -> None:
    """The proxy would only retry behind our back. Serve's head node is taken to be this one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _require_open(host: str, port: int) -> None:
    try:
        socket.create_connection((_WILDCARDS.get(host, host), port), timeout=5).close()
    except OSError as error:
        raise ConfigError(
            f"Ray Serve runs on this Ray already, and not on {host}:{port} ({error}); "
            "name its address, or leave HTTP out"
        ) from error


def _wait_until_running(application: str, deadline: Deadline) -> None:
    while True:
        found = serve.status().applications.get(application)
        if found is not None and found.status is ApplicationStatus.RUNNING:
            return
        if found is not None and found.status is ApplicationStatus.DEPLOY_FAILED:
            raise NotServingError(f"Ray Serve could not deploy {application}: {found.message}")
        deadline.check(f"deployment of {application}", found.message if found is not None else "")
        pause(_POLL_S)


def _wait_until_ready(host: str, port: int, deadline: Deadline) -> None:
    address = _WILDCARDS.get(host, host)
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}/ready"
    heard = "no answer"
    # A proxy of the environment knows nothing about this machine's own ports.
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while True:
            try:
                answer = client.get(url)
            except httpx.HTTPError as error:
                heard = repr(error)
            else:
                if answer.status_code == HTTPStatus.OK:
                    return
                heard = answer.text
            deadline.check(f"{url} answering 200", heard)
            pause(_POLL_S)
