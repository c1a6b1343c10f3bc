"""What this host's hardware can do, asked of the hardware: a name in a configuration is no probe."""

from __future__ import annotations

from itertools import permutations

import torch

from ray_moe.relations import Capability

_HOPPER = 9  # compute capability


def probe(device: str) -> frozenset[Capability]:
    """Capabilities that every visible device of this kind has.

    NVLink is taken from peer access between each pair of them, symmetric memory from the driver's multicast support.
    """
    if device != "cuda" or not torch.cuda.is_available():
        return frozenset()
    devices = range(torch.cuda.device_count())
    pairs = list(permutations(devices, 2))
    found = set()
    if all(torch.cuda.get_device_capability(index)[0] >= _HOPPER for index in devices):
        found.add(Capability.HOPPER_OR_NEWER)
    if pairs and all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs):
        found.add(Capability.NVLINK)
    if all(_has_multicast(index) for index in devices):
        found.add(Capability.SYMMETRIC_MEMORY)
    return frozenset(found)


def _has_multicast(index: int) -> bool:
    symmetric = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    if symmetric is None:
        return False
    return bool(symmetric.has_multicast_support(torch._C._autograd.DeviceType.CUDA, index))
