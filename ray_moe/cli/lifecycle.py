"""up, down, status: clusters that outlive the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_moe.cli import records
from ray_moe.cli.connection import (
    Target,
    attached,
    cpus_for,
    is_up,
    locate,
    metrics_endpoints,
    running_ray,
    serve_app,
    target_at,
    target_of,
)
from ray_moe.cli.head import end_head, free_ports, require_free, start_head
from ray_moe.cli.options import (
    Address,
    AdminTokensFile,
    ApiKeysFile,
    AsJson,
    ConfigFile,
    Device,
    Dtype,
    LogJson,
    Model,
    Name,
    NoAuth,
    Peers,
    Replicas,
    Revision,
    Settings,
    SpareSlots,
    TrustRemoteCode,
    cluster_config,
)
from ray_moe.cli.output import Output, log_json_as, output
from ray_moe.cli.records import Record
from ray_moe.errors import ConfigError, NotServingError

if TYPE_CHECKING:
    from ray_moe.actors.reports import ClusterStatus
    from ray_moe.config import ClusterConfig
    from ray_moe.serve.schema import AppArgs

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def up(
    model: Model = None,
    peers: Peers = None,
    spare_slots: SpareSlots = None,
    replicas: Replicas = None,
    settings: Settings = None,
    config: ConfigFile = None,
    name: Name = None,
    host: Annotated[str | None, typer.Option("--host", help="HTTP host (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option("--port", help="HTTP port (default: 8000); 0: a free one.")] = None,
    http: Annotated[bool, typer.Option("--http/--no-http", help="Serve OpenAI's HTTP API.")] = True,
    api_keys_file: ApiKeysFile = None,
    admin_tokens_file: AdminTokensFile = None,
    no_auth: NoAuth = False,
    log_json: LogJson = False,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Ray's dashboard, if a local Ray is started.")] = False,
    metrics_port: Annotated[
        int, typer.Option("--metrics-port", help="For Prometheus, of a local Ray that is started; 0: a free one.")
    ] = 0,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Start a cluster that keeps running when this command has ended.

    On the Ray at --address, else on the one that runs on this machine, else on one that it starts here and `down` ends.
    """
    wanted = cluster_config(
        config,
        settings,
        model=model,
        peers=peers,
        spare_slots=spare_slots,
        replicas=replicas,
        name=name,
        host=host,
        port=port,
        dtype=dtype,
        device=device,
        revision=revision,
        trust_remote_code=trust_remote_code,
        log_json=log_json or None,
    )
    if log_json:
        log_json_as("up", wanted.name, wanted.log_level)
    with output(as_json) as out:
        # Before a Ray is started, and minutes before the model is loaded.
        app_args = _app_args(wanted, api_keys_file, admin_tokens_file, no_auth) if http else None
        with _ray_for(wanted, address, http, dashboard, metrics_port, out) as record:
            document, started = _start(wanted, record, app_args, out)
            records.save(started)
        out.result(document)
        at = f", {started.http_url}" if started.http_url is not None else ""
        out.show(f"cluster {wanted.name} serves {wanted.model} on {wanted.peers} peers{at}")
        out.say("for a program of your own: " + " ".join(f"{key}={value}" for key, value in _reach(started).items()))


def down(name: Name = None, address: Address = None, as_json: AsJson = False) -> None:
    """Stop a cluster, its HTTP endpoint, and the local Ray if `up` started that for it."""
    chosen = name or "default"
    with output(as_json) as out:
        record = records.load(chosen)
        target = locate(address, chosen)
        try:
            stopped = _stop(target, chosen, has_http=record is None or record.http_url is not None)
        except NotServingError:
            if record is None or record.head is None:
                raise
            stopped = False  # a Ray of ours can be ended without its consent
        if not stopped and record is None:
            raise NotServingError(f"no cluster named {chosen!r} runs on the Ray at {target.address}")
        ended = _forget(record) if record is not None and record.address == target.address else False
        out.result({"name": chosen, "address": target.address, "stopped": stopped, "ray_ended": ended})
        news = f"cluster {chosen} {'is down' if stopped else 'was down already'}"
        out.show(f"{news}, and so is its Ray" if ended else news)


def status(name: Name = None, address: Address = None, as_json: AsJson = False) -> None:
    """Show a cluster's peers, slots, generations and requests."""
    from ray_moe.observe.status import render_status

    chosen = name or "default"
    with output(as_json) as out:
        target = locate(address, chosen)
        with attached(target):
            from ray_moe.cluster import connect

            document = status_document(connect(chosen).status()) | {"metrics": metrics_endpoints()}
        record = records.load(chosen)
        http_url = record.http_url if record is not None and record.address == target.address else None
        out.result(document | {"address": target.address, "http_url": http_url})
        if not as_json:
            out.show(render_status(document))
            if http_url is not None:
                out.show(f"HTTP: {http_url}")
            out.show(_metrics_line(document["metrics"]))


def _metrics_line(metrics: dict[str, Any]) -> str:
    found = metrics["service_discovery"]
    return f"metrics: {', '.join(metrics['targets']) or 'no endpoint'}" + (f" (all nodes: {found})" if found else "")


def status_document(found: ClusterStatus) -> dict[str, Any]:
    """What `status --json` prints and `render_status` draws; counts by layer are keyed by the layer's number."""
    return asdict(found)


# ---- up ----


@contextmanager
def _ray_for(
    config: ClusterConfig, address: str | None, http: bool, dashboard: bool, metrics_port: int, out: Output
) -> Iterator[Record]:
    """A connection to the Ray that the cluster shall run on, as the cluster's record; a head that was started for it is
    ended again when the block raises."""
    known = records.load(config.name)
    if known is not None and is_up(target_of(known)):
        raise ConfigError(
            f"a cluster named {config.name!r} was started at {known.address}; `down` it or choose another name"
        )
    if known is not None:
        _forget(known)  # its Ray died: what may be left of it goes first
    target = running_ray() if address in (None, "auto") else target_at(str(address))
    if target is not None:
        shared = records.at(target.address) or Record(config.name, target.address, config.model)
        with attached(target):
            yield replace(shared, name=config.name, model=config.model, head=None, http_url=None)
        return
    if http:
        require_free(config.host, config.port)  # on a new Ray nobody else's Serve can have it rightly
    require_free("127.0.0.1", metrics_port)
    out.say("starting Ray on this machine")
    record = start_head(
        config.name,
        config.model,
        num_cpus=cpus_for(config),
        dashboard=dashboard,
        seconds=config.start_deadline_s,
        metrics_port=metrics_port,
    )
    try:
        with attached(target_of(record)):
            yield record
    except BaseException:
        end_head(record, keep_log=True)
        raise


def _app_args(config: ClusterConfig, api_keys: Path | None, admin_tokens: Path | None, no_auth: bool) -> AppArgs:
    """Who may use the HTTP API. Raises `ConfigError` for keys that cannot be read, and for an address that others reach
    without a key."""
    from ray_moe.serve.keys import guarded_args

    found = guarded_args(config.host, api_keys, admin_tokens, no_auth=no_auth)
    return found.model_copy(update={"log_json": config.log_json})


def _start(
    config: ClusterConfig, record: Record, app_args: AppArgs | None, out: Output
) -> tuple[dict[str, Any], Record]:
    from ray_moe import cluster as clusters

    port = config.port or free_ports(1)[0]
    if app_args is not None:
        # Before minutes of loading.
        serve_app().check_address(config.host, port)
        serve_app().check_tokenizer(Path(config.model), config.trust_remote_code)
    out.say(f"starting {config.peers} peers")
    with out.loading() as draw:
        cluster = clusters.start(config, on_progress=draw)
    try:
        url = _serve_http(config, port, app_args) if app_args is not None else None
        found = cluster.status()
    except BaseException:
        cluster.stop()
        raise
    started = replace(record, http_url=url)
    document = {
        "name": config.name,
        "state": found.state,
        "model": config.model,
        "peers": len(found.peers),
        "generation": found.generation,
        "address": record.address,
        "http_url": url,
        "ray_pid": record.head.pid if record.head is not None else None,
        "record": str(records.path_of(config.name)),
        "environment": _reach(started),
    }
    return document, started


def _serve_http(config: ClusterConfig, port: int, args: AppArgs) -> str:
    app = serve_app()
    app.run(config.name, host=config.host, port=port, seconds=config.start_deadline_s, args=args)
    host = _WILDCARDS.get(config.host, config.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _reach(record: Record) -> dict[str, str]:
    """What a driver of one's own needs in its environment."""
    return {"RAY_ADDRESS": record.address, **target_of(record).environment}


# ---- down ----


def _stop(target: Target, name: str, *, has_http: bool) -> bool:
    """False when the cluster, or its Ray, is gone already. Raises `NotServingError` for a Ray that refuses us."""
    if not is_up(target):
        return False
    with attached(target):
        from ray_moe.actors.remote import kill_cluster
        from ray_moe.cluster import connect

        if has_http:
            serve_app().shutdown(name)
        try:
            connect(name).stop()
        except NotServingError:
            kill_cluster(name)  # whom a controller that was killed left behind
            return False
    return True


def _forget(record: Record) -> bool:
    """Remove the record; its head ends with the last cluster on it. Tells whether one ended."""
    heir = next((other for other in records.every() if other.address == record.address and other != record), None)
    if record.head is not None and heir is not None:
        records.save(replace(heir, head=record.head))
        records.remove(record.name)
        return False
    end_head(record)
    return record.head is not None
