"""The embedded model: a checkpoint small enough to live in the package, so that no command needs a download."""

from __future__ import annotations

from pathlib import Path

# The name that stands for the embedded model wherever a model is asked for.
TINY_MOE = "tiny-moe"


def tiny_moe_path() -> Path:
    """Directory of `tiny-moe`, a Hugging Face checkpoint (Qwen3-MoE architecture, bf16) that ships with the package."""
    return Path(__file__).resolve().parent / TINY_MOE
