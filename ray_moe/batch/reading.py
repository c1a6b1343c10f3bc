"""The input as a stream of rows, through Ray Data: bounded memory, any file system, JSONL and Parquet.

Rows are numbered from 1 in the order of the files' names and of the rows in them; the same input gives the same
numbers. Lines of JSON come as they are, since one that is no JSON must cost no other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pyarrow as pa
import ray.data
from pyarrow import fs
from ray.data import DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata

from ray_moe.batch.places import Place
from ray_moe.errors import ConfigError

JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET = (".parquet",)
FORMATS = {"JSON lines": JSONL, "Parquet": PARQUET}

_BATCH_ROWS = 64
_FILES_AT_ONCE = 2
_BLOCK_BYTES = 1 << 20
_READ_AHEAD_BYTES = 64 << 20  # of the object store, over all blocks


@dataclass(frozen=True)
class InputRow:
    """Row `number`: a line of a JSONL file, or the fields of a Parquet row. `size` is its share of `Input.bytes`."""

    number: int
    value: bytes | dict[str, Any]
    size: int


@dataclass(frozen=True)
class Input:
    """The files of one job, all of one format."""

    place: Place
    files: tuple[fs.FileInfo, ...]
    is_parquet: bool

    @classmethod
    def at(cls, text: str) -> Input:
        """A file, or the files of a folder. `ConfigError` when there is none, or of both formats."""
        place = Place.at(text)
        info = place.info()
        if info.type is fs.FileType.NotFound:
            raise ConfigError(f"input {text} does not exist")
        of_a_folder = info.type is fs.FileType.Directory
        files = [file for file in place.files() if _format_of(file.path)] if of_a_folder else [info]
        formats = {_format_of(file.path) for file in files}
        if formats == set() or formats == {None}:
            raise ConfigError(f"input {text}: no file whose name ends in {', '.join(JSONL + PARQUET)}")
        if len(formats) > 1:
            raise ConfigError(
                f"input {text} holds {' and '.join(sorted(map(str, formats)))}; give one format at a time"
            )
        return cls(place, tuple(files), formats == {"Parquet"})

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def identity(self) -> list[list[object]]:
        """What must be the same when a job is taken up again."""
        return [[file.path, file.size, file.mtime_ns] for file in self.files]

    def rows(self) -> Iterator[InputRow]:
        """All rows, in order. Blocks while nothing is there yet; needs a Ray connection."""
        dataset = _dataset(self)
        number, of_a_row = 0, None
        for batch in dataset.iter_batches(batch_size=_BATCH_ROWS, batch_format="pyarrow", prefetch_batches=1):
            assert isinstance(batch, pa.Table)
            for value in batch.to_pylist():
                number += 1
                if self.is_parquet:
                    of_a_row = of_a_row or max(1, batch.nbytes // len(batch))
                    yield InputRow(number, value, of_a_row)
                else:
                    yield InputRow(number, value["line"], len(value["line"]))


def _format_of(path: str) -> str | None:
    return next((name for name, endings in FORMATS.items() if path.lower().endswith(endings)), None)


def _dataset(source: Input) -> ray.data.Dataset:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=_READ_AHEAD_BYTES
    )
    context.target_max_block_size = 8 * _BLOCK_BYTES
    paths = [file.path for file in source.files]
    # Reading waits for disks; a CPU of its own might not be free on a Ray whose peers have them all.
    at_once = min(len(paths), _FILES_AT_ONCE)
    if source.is_parquet:
        return ray.data.read_parquet(
            paths, filesystem=source.place.system, partitioning=None, num_cpus=0, concurrency=at_once
        )
    lines = LineDatasource(source.place.system, paths)
    return ray.data.read_datasource(lines, num_cpus=0, concurrency=at_once, override_num_blocks=len(paths))


class LineDatasource(Datasource):
    """Lines of files as they are, in one binary column; a file is read once, from its beginning, a block at a time."""

    def __init__(self, system: fs.FileSystem, paths: list[str]) -> None:
        super().__init__()
        self._system, self._paths = system, paths

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        return [
            ReadTask(
                partial(_blocks, self._system, path),
                BlockMetadata(num_rows=None, size_bytes=None, input_files=(path,), exec_stats=None),
                per_task_row_limit=per_task_row_limit,
            )
            for path in self._paths
        ]


def _blocks(system: fs.FileSystem, path: str) -> Iterator[pa.Table]:
    lines: list[bytes] = []
    held = 0
    with system.open_input_stream(path, compression="detect", buffer_size=_BLOCK_BYTES) as stream:
        for line in _lines(cast(Any, stream)):
            lines.append(line)
            held += len(line)
            if held >= _BLOCK_BYTES:
                yield _block(lines)
                lines, held = [], 0
    if lines:
        yield _block(lines)


def _lines(stream: Any) -> Iterator[bytes]:
    """Lines with their ends; the last may have none. Arrow's own readline goes byte by byte."""
    rest = b""
    while piece := stream.read(_BLOCK_BYTES):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line + b"\n"
    if rest:
        yield rest


def _block(lines: list[bytes]) -> pa.Table:
    return pa.table({"line": pa.array(lines, pa.large_binary())})
