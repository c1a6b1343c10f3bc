"""batch: a file of requests in, a file of answers out."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_moe.cli.connection import attached, cpus_for, local_ray, locate
from ray_moe.cli.options import (
    Address,
    AsJson,
    ConfigFile,
    Device,
    Dtype,
    LogJson,
    Model,
    Name,
    Peers,
    Replicas,
    Revision,
    Settings,
    SpareSlots,
    TrustRemoteCode,
    cluster_config,
    parse_settings,
)
from ray_moe.cli.output import Output, log_json_as, output
from ray_moe.errors import ConfigError

if TYPE_CHECKING:
    from ray_moe.batch.driver import Progress
    from ray_moe.batch.hosts import Host
    from ray_moe.batch.job import Summary
    from ray_moe.config import ClusterConfig

_SAY_EVERY_S = 10.0


def batch(
    source: Annotated[str, typer.Argument(metavar="IN", help="JSONL or Parquet: a file, a folder, a URI.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="A file to write: .jsonl or .parquet.")],
    errors: Annotated[
        str | None, typer.Option("--errors", metavar="FILE", help="Rows without an answer (default: OUT.errors.jsonl).")
    ] = None,
    default: Annotated[
        list[str] | None,
        typer.Option(
            "--default", metavar="FIELD=VALUE", help="For rows that do not say: max_tokens=64; may be given again."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of rows that draw and have none of their own.")] = 0,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="What rows call the model (default: its own name).")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", help="In flight (default: what keeps the engine full).")
    ] = None,
    checkpoint_s: Annotated[
        float, typer.Option("--checkpoint-s", metavar="SECONDS", help="Answers are on disk so much later.")
    ] = 5.0,
    restart: Annotated[bool, typer.Option("--restart", help="Forget what an earlier run has done.")] = False,
    model: Model = None,
    peers: Peers = None,
    spare_slots: SpareSlots = None,
    replicas: Replicas = None,
    settings: Settings = None,
    config: ConfigFile = None,
    name: Name = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = None,
    log_json: LogJson = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Answer every request of a file, once, and go on where it was when it is run again.

    On a cluster that runs; with --model or --config on one of its own, which ends with it: on the Ray at --address or
    RAY_ADDRESS (as in `ray job submit -- ray-moe batch IN OUT`), else in a Ray of this command alone.
    """
    cluster = {"peers": peers, "spare_slots": spare_slots, "replicas": replicas, "dtype": dtype, "device": device}
    cluster |= {"revision": revision, "trust_remote_code": trust_remote_code}
    own = None
    if model is not None or config is not None:
        if name is not None:
            raise ConfigError(f"--name {name}: a cluster of the job's own is named after its output; leave one out")
        own = cluster_config(
            config, settings, model=model, name=_name_for(target), log_json=log_json or None, **cluster
        )
    elif settings or any(value is not None for value in cluster.values()):
        raise ConfigError("without --model or --config the job uses a cluster that runs, which has its own settings")
    if log_json:
        log_json_as("batch", own.name if own is not None else name or "default")
    defaults = parse_settings(default or (), "--default")
    with output(as_json) as out, _host(own, name or "default", address, out) as host, _drawn(out) as draw:
        # It imports Ray, whose environment is the connection's to set.
        from ray_moe.batch.job import BatchJob, run

        job = BatchJob(
            source=source,
            output=target,
            errors=errors,
            defaults=defaults,
            seed=seed,
            model_name=model_name,
            concurrency=concurrency,
            checkpoint_s=checkpoint_s,
            restart=restart,
        )
        summary = run(job, host, draw)
    out.result(asdict(summary))
    out.show(_said(summary))


@contextmanager
def _host(own: ClusterConfig | None, name: str, address: str | None, out: Output) -> Iterator[Host]:
    """A connection to Ray, and the cluster to use on it."""
    # As in a job of Ray's: whose Ray that is has been said by whoever submitted it.
    given = address or os.environ.get("RAY_ADDRESS") or None
    if own is None:
        with attached(locate(given, name)):
            from ray_moe.batch.hosts import Standing

            yield Standing(name)
        return
    private = given in (None, "local")
    with local_ray(cpus_for(own)) if private else attached(locate(given, own.name)):
        from ray_moe.batch.hosts import Own

        out.say(f"a cluster of {own.peers} peers" + (" in a Ray of its own" if private else f", named {own.name}"))
        yield Own(own)


def _name_for(target: str) -> str:
    """The same output, the same cluster: a job that is run again finds what an earlier run has left behind."""
    place = target if "://" in target else str(Path(target).resolve())
    return f"batch-{hashlib.blake2b(place.encode(), digest_size=6).hexdigest()}"


@contextmanager
def _drawn(out: Output) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on a terminal; elsewhere a line now and then."""
    if not out.on_terminal:
        yield _Lines(out)
        return
    from rich import progress as rich

    columns = (rich.BarColumn(), rich.TaskProgressColumn(), rich.TextColumn("{task.description}"))
    times = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    with rich.Progress(*columns, *times, console=out.aside, transient=True) as bars:
        task = bars.add_task("reading", total=None)

        def draw(progress: Progress) -> None:
            bars.update(task, description=_words(progress), completed=progress.done, total=progress.rows or None)

        yield draw


class _Lines:
    """Progress for a log."""

    def __init__(self, out: Output) -> None:
        self._out, self._said_at, self._news = out, time.monotonic(), ""

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._said_at < _SAY_EVERY_S and progress.news == self._news:
            return
        self._said_at, self._news = now, progress.news
        self._out.say(_words(progress))


def _words(progress: Progress) -> str:
    about = "" if progress.counted or not progress.rows else "about "
    words = f"{progress.done:,} of {about}{progress.rows:,} rows"
    if progress.errors:
        words += f", {progress.errors:,} errors"
    words += f", {progress.tokens_per_s:,.0f} tokens/s"
    if progress.load is not None:
        words += f", {progress.load.running} of {progress.load.cap} running"
    return f"{words}; {progress.news}" if progress.news else words


def _said(summary: Summary) -> str:
    if summary.seconds is None:
        return f"{summary.output} is complete: {summary.answered:,} answers, {summary.failed:,} errors"
    before = f", {summary.rows_before:,} of them by an earlier run" if summary.rows_before else ""
    wrong = f"; {summary.failed:,} errors: {summary.errors}" if summary.errors else ""
    return (
        f"{summary.answered:,} of {summary.rows:,} rows answered{before}, {summary.completion_tokens:,} tokens "
        f"in {summary.seconds:,.0f} s: {summary.output}{wrong}"
    )
