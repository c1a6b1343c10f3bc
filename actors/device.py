"""A peer's process and its device: whatever GPU Ray has given it is `cuda:0` here, on every thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch

from ray_moe.comm.join import FUSED_WINDOW
from ray_moe.config import ClusterConfig
from ray_moe.engine.decode_graph import decode_sizes
from ray_moe.errors import ConfigError
from ray_moe.kernels.regions import Regions

_KEEPS_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_device(config: ClusterConfig) -> None:
    """Make this process ready for the configuration's device: before anything of CUDA is used.

    Several actors share few cores: one thread each. Products in fp32 are fp32, whatever the environment would have.
    Ray usually hides the other GPUs. Where it is told not to, since NCCL is quicker when it sees them all, this
    process's own is put first, and the others stay in sight. Raises `ConfigError` when Ray has given it no GPU, or CUDA
    is in use already.
    """
    torch.set_num_threads(1)
    if config.device != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if os.environ.get(_KEEPS_ALL) not in ("1", "true", "True"):
        return
    given = [str(number) for number in ray.get_runtime_context().get_accelerator_ids().get("GPU", ())]
    visible = os.environ.get(_VISIBLE)
    seen = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    ordered = ",".join(own_first(given, seen))
    if ordered != visible:
        if torch.cuda.is_initialized():
            raise ConfigError(f"CUDA is in use in this process already: GPU {given[0]} cannot become its first one")
        os.environ[_VISIBLE] = ordered


def own_first(given: Sequence[str], seen: Sequence[str]) -> list[str]:
    """The GPUs in sight, the given one first: ["2"] of ["0", "1", "2"] -> ["2", "0", "1"].

    Raises `ConfigError` unless one is given, and is in sight.
    """
    if len(given) != 1 or given[0] not in seen:
        raise ConfigError(f"a peer takes one GPU of {list(seen)}, Ray has given it {list(given)}")
    return [given[0], *(gpu for gpu in seen if gpu != given[0])]


def step_options(config: ClusterConfig) -> Mapping[str, Any]:
    """How an engine loop keeps its device busy: graphs for decode, and a step ahead of what the host knows.

    Nothing on a CPU, which runs what it is given at once. Decode buckets are graphs of another kind, layer by layer.
    """
    if config.device != "cuda":
        return {}
    sizes = () if config.decode_buckets else decode_sizes(config.max_decode_rows)
    return {"graph_sizes": sizes, "look_ahead": True}


def runs_kernels(config: ClusterConfig) -> bool:
    """Whether layers are run by kernels alone, so that graphs can hold them: on a GPU, in half precision, where nothing
    else was asked for by name."""
    asked = config.decode_buckets or config.adaptive or config.runner != "grouped"
    return config.device == "cuda" and config.dtype != "float32" and not asked


def most_tokens(config: ClusterConfig) -> int:
    """The largest unit of a peer."""
    return max(config.max_prefill_tokens, config.max_decode_rows)


def regions_of(config: ClusterConfig, top_k: int, hidden: int) -> Regions | None:
    """What every peer's window holds for rows of `hidden` elements; None where no rows go over windows.

    Raises `ConfigError` for rows that windows cannot hold.
    """
    if config.transport != FUSED_WINDOW:
        return None
    return Regions.plan(
        config.window_peers,
        most_tokens(config),
        top_k,
        hidden,
        getattr(torch, config.dtype),
        quantized=config.payload == "fp8_block",
        partial=config.gate_location == "expert",
    )
