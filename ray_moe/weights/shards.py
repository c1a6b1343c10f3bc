"""What lies in a folder of safetensors shards, by their headers: names, dtypes, shapes, completeness, identity."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_moe.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_LENGTH_BYTES = 8  # a shard begins with its header's length, little-endian (safetensors format)
_SAMPLE_BYTES = 64 * 1024
_TENSOR_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk; `dtype` is safetensors' name for it (`F32`, `BF16`, `F8_E4M3`, ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardIndex:
    """Every tensor of a checkpoint by its name on disk.

    `identity` is a SHA-256 over the configuration, every shard's name, size and header, the first and last 64 KiB of
    its data and the first bytes of every tensor, so that two fine-tunes of one model differ although their headers are
    equal, also where only some of their tensors differ.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    identity: str


def read_index(folder: Path) -> ShardIndex:
    """Reads the index (or the single file) and all headers of `folder`.

    Raises CheckpointError naming file and key: no safetensors, a shard that is absent, truncated or longer than its
    header says, a header that cannot be read, or a tensor that the index lists and its shard lacks.
    """
    files = _weight_map(folder)
    digest = hashlib.sha256(json.dumps(_config(folder), sort_keys=True).encode())
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(files.values())):
        file = folder / name
        listed = sorted(key for key, owner in files.items() if owner == name)
        header, data_start = _read_header(file, listed[0])
        for key in listed:
            if key not in header:
                raise CheckpointError(str(file), key, "a tensor that the index lists", "no such tensor in the shard")
            tensors[key] = StoredTensor(file, str(header[key]["dtype"]), tuple(header[key]["shape"]))
        digest.update(json.dumps([name, file.stat().st_size, header], sort_keys=True).encode())
        digest.update(_data_sample(file, data_start, sorted(entry["data_offsets"] for entry in header.values())))
    return ShardIndex(folder, tensors, digest.hexdigest())


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from a single file's own header."""
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            return {str(key): str(file) for key, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(str(index), "weight_map", "a JSON object of tensor to file", repr(error)) from error
    if (folder / SINGLE_NAME).is_file():
        header, _ = _read_header(folder / SINGLE_NAME, SINGLE_NAME)
        return dict.fromkeys(header, SINGLE_NAME)
    raise CheckpointError(str(folder), INDEX_NAME, f"{INDEX_NAME} or {SINGLE_NAME}", "neither")


def _config(folder: Path) -> Any:
    file = folder / "config.json"
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(str(file), "config.json", "a readable JSON configuration", repr(error)) from error


def _read_header(file: Path, key: str) -> tuple[dict[str, dict[str, Any]], int]:
    """The header's tensors and where the data begins; `key` is the tensor to blame if there is no header at all."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES + length:
                raise CheckpointError(str(file), key, f"a header of {length} bytes", f"a file of {size} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items()}
    except OSError as error:
        raise CheckpointError(str(file), key, "a safetensors shard", error.strerror or repr(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(str(file), key, "a safetensors header", repr(error)) from error
    data_start = _LENGTH_BYTES + length
    expected = data_start + max(ends.values(), default=0)
    if size != expected:
        cut = min((name for name in ends if data_start + ends[name] > size), key=lambda name: ends[name], default=key)
        raise CheckpointError(str(file), cut, f"a shard of {expected} bytes", f"{size} bytes")
    return header, data_start


def _data_sample(file: Path, data_start: int, spans: Sequence[Sequence[int]]) -> bytes:
    with file.open("rb") as stream:
        stream.seek(data_start)
        sample = stream.read(_SAMPLE_BYTES)
        for begin, end in spans:
            stream.seek(data_start + begin)
            sample += stream.read(min(_TENSOR_SAMPLE_BYTES, end - begin))
        stream.seek(max(data_start, os.fstat(stream.fileno()).st_size - _SAMPLE_BYTES))
        return sample + stream.read(_SAMPLE_BYTES)
