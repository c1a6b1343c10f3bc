"""A batch job from the outside."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ray_moe.batch.answers import Answers
from ray_moe.batch.checkpoint import Checkpoint
from ray_moe.batch.driver import Driver, OnProgress
from ray_moe.batch.hosts import Host
from ray_moe.batch.places import Place
from ray_moe.batch.reading import Input
from ray_moe.batch.rows import Defaults
from ray_moe.batch.writing import Form, form_of, write_output
from ray_moe.errors import ConfigError
from ray_moe.serve.generation import Backends, ClusterDoor


@dataclass(frozen=True)
class BatchJob:
    """What a job is. Paths are local, or URIs such as s3://bucket/file.jsonl.

    `source` is a JSONL or Parquet file, or a folder of them; `output` ends in .jsonl or .parquet, and its `errors` lie
    beside it by default. `defaults` are fields of a request for rows that do not have them; rows that draw and have no
    seed get one that follows from `seed` and their id. `model_name` is what rows may call the model, by default its
    own name. `concurrency` requests are in flight, by default as many as keep the engine full; what is done is on disk
    `checkpoint_s` later. `restart` forgets what an earlier run of the job has done.
    """

    source: str
    output: str
    errors: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    model_name: str | None = None
    concurrency: int | None = None
    checkpoint_s: float = 5.0
    restart: bool = False

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; it must be at least 1")
        if self.checkpoint_s <= 0:
            raise ConfigError(f"checkpoint_s is {self.checkpoint_s:g}; it must be more than 0")


@dataclass(frozen=True)
class Summary:
    """How a job ended: of all rows `answered` have an answer in `output`, the others a reason in `errors`.

    `seconds` are those of its last run, which had `rows_before` done already; None for a job that was over before.
    """

    rows: int
    answered: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    output: str
    errors: str | None
    rows_before: int = 0
    seconds: float | None = None


def run(job: BatchJob, host: Host, on_progress: OnProgress = lambda _: None) -> Summary:
    """Run a job to its end, from where an earlier run of it was when it ended in whatever way. Needs a Ray connection.

    Raises `ConfigError` for a job that cannot be, or is another than the one whose output this is, and
    `NotServingError` when the cluster is gone for good: run it again then. Interrupted or ended (SIGINT, SIGTERM), it
    keeps what is done and raises `KeyboardInterrupt`.
    """
    source, form = Input.at(job.source), form_of(job.output)
    output = Place.at(job.output)
    errors = Place.at(job.errors) if job.errors is not None else output.beside(".errors.jsonl")
    checkpoint = _open(job, source, output)
    try:
        if checkpoint.finished is not None:
            return Summary(**{**checkpoint.finished, "seconds": None})
        before, started = checkpoint.totals.done, time.monotonic()
        try:
            host.open()
            _answer(job, host, source, form, checkpoint, on_progress)
        finally:
            host.close()
        write_output(checkpoint.merged(), form, output, errors)
        totals = checkpoint.totals
        summary = Summary(
            rows=totals.done,
            answered=totals.done - totals.errors,
            failed=totals.errors,
            prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.completion_tokens,
            output=str(output),
            errors=str(errors) if totals.errors else None,
            rows_before=before,
            seconds=time.monotonic() - started,
        )
        checkpoint.finish(asdict(summary))
        return summary
    finally:
        checkpoint.close()


def _open(job: BatchJob, source: Input, output: Place) -> Checkpoint:
    folder = output.beside(".job")
    if output.exists and not folder.exists and not job.restart:
        raise ConfigError(f"output {output} exists, and no job of ours wrote it; --restart overwrites it")
    identity = {
        "input": source.identity,
        "defaults": dict(job.defaults),
        "seed": job.seed,
        "model_name": job.model_name,
    }
    checkpoint = Checkpoint.open(folder, identity, restart=job.restart)
    if checkpoint.finished is not None and not output.exists:
        checkpoint.close()
        raise ConfigError(f"the job of {output} is over, and its output is gone; --restart makes it again")
    return checkpoint


def _answer(
    job: BatchJob, host: Host, source: Input, form: Form, checkpoint: Checkpoint, on_progress: OnProgress
) -> None:
    """Every row that is not done yet."""

    async def drive() -> None:
        task = asyncio.current_task()
        if task is not None and threading.current_thread() is threading.main_thread():
            # How Ray stops a job, and Kubernetes a pod; SIGINT is asyncio's own.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        backends = Backends(ClusterDoor(host.name, job.model_name))
        backend = await backends.current()
        checkpoint.require("checkpoint_version", backend.client.directory.facts.checkpoint_version)
        driver = Driver(
            source=source,
            form=form,
            checkpoint=checkpoint,
            host=host,
            defaults=Defaults(backend.model, job.defaults, job.seed),
            answers=Answers(backends),
            concurrency=job.concurrency,
            checkpoint_s=job.checkpoint_s,
            on_progress=on_progress,
        )
        await driver.run()

    try:
        asyncio.run(drive())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
