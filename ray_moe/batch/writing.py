"""The output: JSON lines or Parquet, by the name of the file, in the order of the input; and the errors file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ray_moe.batch.checkpoint import Entry, json_line
from ray_moe.batch.places import Place
from ray_moe.batch.rows import Ask, Document, answered, columns
from ray_moe.errors import ConfigError

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("response", pa.string()),  # the whole answer as HTTP gives it, as JSON
    ]
)
_GROUP_ROWS = 4096


class Form(ABC):
    """How answers are written. Chosen once, by the name of the output file."""

    @abstractmethod
    def document(self, ask: Ask, answer: Document) -> Document:
        """An answer as the output will have it."""

    @abstractmethod
    def sink(self, stream: BinaryIO) -> Sink:
        """Where documents go."""


class Sink(ABC):
    @abstractmethod
    def write(self, document: Document) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class JsonLines(Form):
    def document(self, ask: Ask, answer: Document) -> Document:
        return answered(ask, answer)

    def sink(self, stream: BinaryIO) -> Sink:
        return _Lines(stream)


class Parquet(Form):
    def document(self, ask: Ask, answer: Document) -> Document:
        return columns(ask, answer)

    def sink(self, stream: BinaryIO) -> Sink:
        return _Table(stream)


def form_of(name: str) -> Form:
    """`ConfigError` for a name with another ending."""
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return JsonLines()
    if name.endswith(".parquet"):
        return Parquet()
    raise ConfigError(f"output {name!r} must end in .jsonl or .parquet")


def write_output(entries: Iterable[Entry], form: Form, output: Place, errors: Place) -> None:
    """Both files, each whole or not at all. Where no row failed there is no errors file."""
    failed = False
    with ExitStack() as stack:
        sink = form.sink(stack.enter_context(output.replacing()))
        wrong: Sink | None = None
        for entry in entries:
            if entry.ok:
                sink.write(dict(entry.document))
                continue
            if wrong is None:
                wrong, failed = _Lines(stack.enter_context(errors.replacing())), True
            wrong.write(dict(entry.document))
        sink.close()
    if not failed:
        errors.remove()  # of an earlier job of this output


class _Lines(Sink):
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, document: Document) -> None:
        self._stream.write(json_line(document))

    def close(self) -> None:
        """A line is whole when it is written."""


class _Table(Sink):
    def __init__(self, stream: BinaryIO) -> None:
        self._writer = pq.ParquetWriter(stream, SCHEMA)
        self._rows: list[dict[str, Any]] = []

    def write(self, document: Document) -> None:
        self._rows.append(document)
        if len(self._rows) == _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows = []

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()
