"""Where files are: a local path, or a URI of a file system that Arrow knows (s3://, gs://, abfs://, hdfs://)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from pyarrow import ArrowException, fs

from ray_moe.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """A file or a folder, which need not exist."""

    system: fs.FileSystem
    path: str

    @classmethod
    def at(cls, text: str) -> Place:
        """`ConfigError` for a URI that no file system here takes."""
        if "://" not in text:
            return cls(fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(text)))
        try:
            system, path = fs.FileSystem.from_uri(text)
        except (ArrowException, ValueError, OSError, ImportError) as error:
            raise ConfigError(f"{text} cannot be used: {str(error).splitlines()[0]}") from error
        return cls(system, path)

    def __str__(self) -> str:
        return self.path if self.is_local else f"{self.system.type_name}:{self.path}"

    @property
    def is_local(self) -> bool:
        return isinstance(self.system, fs.LocalFileSystem)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def inside(self, name: str) -> Place:
        return Place(self.system, f"{self.path}/{name}")

    def beside(self, suffix: str) -> Place:
        return Place(self.system, self.path + suffix)

    def info(self) -> fs.FileInfo:
        return self.system.get_file_info(self.path)

    @property
    def exists(self) -> bool:
        return self.info().type is not fs.FileType.NotFound

    def files(self) -> list[fs.FileInfo]:
        """The files right inside this folder, by name; none where there is no folder."""
        selector = fs.FileSelector(self.path, allow_not_found=True)
        found = [info for info in self.system.get_file_info(selector) if info.type is fs.FileType.File]
        return sorted(found, key=lambda info: info.path)

    def make_folder(self) -> None:
        self.system.create_dir(self.path, recursive=True)

    def remove(self) -> None:
        """A file, or a folder with all that is in it; nothing where nothing is."""
        kind = self.info().type
        if kind is fs.FileType.Directory:
            self.system.delete_dir(self.path)
        elif kind is not fs.FileType.NotFound:
            self.system.delete_file(self.path)

    def read(self) -> bytes:
        with self.system.open_input_stream(self.path, compression=None) as stream:
            return cast(bytes, stream.read())

    def write(self, content: bytes) -> None:
        """All of it, or nothing."""
        with self.replacing() as sink:
            sink.write(content)

    @contextmanager
    def replacing(self) -> Iterator[BinaryIO]:
        """A file to write; under its name what was there stays until the block has ended well.

        On disk before it has the name. An object store shows an object when its upload ends, and has no other way.
        """
        if not self.is_local:
            with self.system.open_output_stream(self.path, compression=None) as stream:
                yield stream
            return
        draft = Path(f"{self.path}.{secrets.token_hex(4)}.draft")
        try:
            with draft.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)
