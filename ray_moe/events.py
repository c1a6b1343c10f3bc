"""Logs: one event per state transition with the ids of what changed, and the form that all lines of a process take.

`emit` is called where a table of states is advanced; `EVENTS` says which events there are and what they carry: ids,
names of states, counts and reasons. No event has a field for a prompt, a token or a key. What modules log besides, in
words, comes out in the same form.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from structlog.types import EventDict, Processor, WrappedLogger

Value = str | int | float | bool | tuple[int, ...]

LEVELS = ("debug", "info", "warning", "error")
EVENT_LOGGER = "ray_moe.events"
_PACKAGE = logging.getLogger("ray_moe")
_LOG = logging.getLogger(EVENT_LOGGER)
# A reason may hold what somebody typed, or another process's error.
_LONGEST_TEXT = 500

# Event -> what it carries besides from, to and by (states before and after, and what led from one to the other).
EVENTS: dict[str, frozenset[str]] = {
    # A peer's engine loop (LOOP_TABLE); `reason` names a failure.
    "loop": frozenset({"rank", "step", "generation", "epoch", "release", "reason"}),
    # A peer's step boundary: from one generation to the next, by `stage` or `roles`.
    "switch": frozenset({"rank", "step", "generation", "epoch", "release", "pause_s"}),
    # The cluster (CLUSTER_TABLE).
    "cluster": frozenset({"reason"}),
    # A rank as the controller sees it.
    "peer": frozenset({"rank", "generation", "reason"}),
    # A change of the cluster; its first event has no `from`.
    "operation": frozenset(
        {"operation", "kind", "ranks", "wave", "waves", "generation", "asked_by", "why", "reason", "peer_bytes"}
        | {"checkpoint_bytes", "pause_s"}
    ),
    # A placement generation in the registry.
    "generation": frozenset({"generation", "epoch", "release"}),
    # An operation on a release: `by` is its name, who asked for it and why come along.
    "release": frozenset({"release", "generation", "asked_by", "why", "detail"}),
    # How far a release's rollout is.
    "rollout": frozenset({"release", "reason"}),
    # What the autopilot makes of the load, `by` ranks or experts.
    "autopilot": frozenset({"reason"}),
}


def emit(event: str, before: str, after: str, by: str, *, level: int = logging.INFO, **ids: Value) -> None:
    """Log one transition. Raises `KeyError` for an event or a field that `EVENTS` does not have."""
    unknown = ids.keys() - EVENTS[event]
    if unknown:
        raise KeyError(f"event {event!r} has no field {sorted(unknown)[0]!r}")
    if not _LOG.isEnabledFor(level):
        return
    told = {name: value[:_LONGEST_TEXT] if isinstance(value, str) else value for name, value in ids.items()}
    fields = {"from": before, "to": after, "by": by, **{name: value for name, value in told.items() if value != ""}}
    _LOG.log(level, event, extra={"fields": fields})


def configure(*, as_json: bool, level: str = "info", stream: TextIO | None = None, **identity: Value) -> None:
    """Write what this process's modules log to `stream` (stderr): a JSON document a line, or lines for people.

    Every line says `identity`, for example the cluster and the actor. For processes of our own, whose stderr is nobody
    else's; called again, it replaces what it did.
    """
    handler = logging.StreamHandler(stream) if stream is not None else _Stderr()
    handler.setFormatter(formatter(as_json=as_json, identity={**identity, "pid": os.getpid()}))
    for former in [one for one in _PACKAGE.handlers if type(one.formatter) is type(handler.formatter)]:
        _PACKAGE.removeHandler(former)
    _PACKAGE.addHandler(handler)
    _PACKAGE.setLevel(level.upper())


class _Stderr(logging.Handler):
    """Whatever stderr is when a line is written."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as logging's own handlers: a line that cannot be written ends nobody's step
            self.handleError(record)


def formatter(*, as_json: bool, identity: Mapping[str, Value]) -> logging.Formatter:
    """The form of a line. As JSON: timestamp (UTC), level, logger, event, the event's fields, exception, identity."""
    import structlog  # an engine that nobody configures needs none, on a host of kernels alone for example

    def complete(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
        record: logging.LogRecord = line["_record"]
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        head = {"timestamp": when.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name}
        return {**head, **line, **getattr(record, "fields", {}), **identity}

    ending: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_json:
        ending += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        ending.append(structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0, exception_formatter=plain))
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=[complete], processors=ending)
