"""What every launch needs to know about where it runs."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

# Triton decides when a kernel is defined: set before the first import, never after.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether `device` has wgmma and the bulk copy engine as the Hopper kernels use them (compute capability 9)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of `device`; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def dependent(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that may begin while its predecessor on the stream ends.

    It waits in the kernel, before it touches what any kernel before it wrote. What it reads earlier must have been
    complete when its predecessor let it begin.
    """
    overlaps = not INTERPRETED and is_hopper(device)
    return {"PDL": True, "launch_pdl": True} if overlaps else {"PDL": False}
