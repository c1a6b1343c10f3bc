"""Where experts come from, as `load_format` says: safetensors files, or nowhere at all."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from ray_moe.weights.checkpoint import Checkpoint, ExpertLayout, ExpertWeights
from ray_moe.weights.dummy import DummyCheckpoint


class ExpertSource(Protocol):
    """One checkpoint's experts, one at a time; `Checkpoint` says what the methods raise."""

    @property
    def moe_layers(self) -> tuple[int, ...]: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def identity(self) -> str:
        """Names the checkpoint: equal identities are equal weights."""

    def layout(self, layer: int) -> ExpertLayout: ...

    def expert(self, layer: int, expert: int, *, dtype: torch.dtype | None = None) -> ExpertWeights: ...


def open_experts(
    path: Path, load_format: str, *, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> ExpertSource:
    """The experts of the model in `path`; files are read to the host, dummy experts are made on `device`."""
    if load_format == "dummy":
        return DummyCheckpoint(path, device=device, trust_remote_code=trust_remote_code)
    return Checkpoint(path, trust_remote_code=trust_remote_code)
