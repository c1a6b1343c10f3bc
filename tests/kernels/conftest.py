"""Kernels run as they are on a CUDA host, and under Triton's interpreter, on CPU tensors, everywhere else."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it wherever a kernel is defined, its own library functions included.
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # transformers imports triton: what test modules imported before this one defined is not interpreted yet.
    for name in [name for name in sys.modules if name.startswith(("triton.language", "ray_moe.kernels"))]:
        for attribute, value in list(vars(sys.modules[name]).items()):
            if isinstance(value, JITFunction):
                setattr(sys.modules[name], attribute, InterpretedFunction(value.fn))


@pytest.fixture
def device() -> torch.device:
    """The CPU: tests without the `gpu` mark bound their errors by the interpreter's exact fp32, not a GPU's TF32."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted only where no GPU is")
    return torch.device("cpu")
