"""The digest that a slot's weights are known by: it is equal for equal bits of equal shape and dtype, and only then."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from ray_moe.weights.checkpoint import ExpertWeights

_INTEGERS = {1: (torch.uint8, "u1"), 2: (torch.int16, "<i2"), 4: (torch.int32, "<i4"), 8: (torch.int64, "<i8")}


def parameter_digest(weights: ExpertWeights) -> str:
    """SHA-256 (hex) over every present tensor: a line of its name, dtype and shape, then its raw little-endian bytes.

    It is a property of the canonical representation, so it is the same for every on-disk layout and every device; it
    is of bits, so 0.0 and -0.0 differ. Reading weights on a GPU copies them to the host.
    """
    digest = hashlib.sha256(json.dumps({"has_gate": weights.has_gate}).encode())
    for name, tensor in weights.named_tensors():
        line = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        digest.update(f"\n{json.dumps(line)}\n".encode())
        digest.update(_little_endian(tensor))
    return digest.hexdigest()


def _little_endian(tensor: Tensor) -> memoryview:
    integer, byte_order = _INTEGERS[tensor.dtype.itemsize]
    values = tensor.detach().cpu().contiguous().view(integer).numpy()  # NumPy has no bfloat16: same bits as integers
    return values.astype(byte_order, copy=False).data.cast("B")
