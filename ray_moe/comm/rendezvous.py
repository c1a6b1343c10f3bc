"""Where the members of an epoch find one another: a TCP store that outlives every group built through it.

The store belongs to the controller's current incarnation; a group that is already built never needs it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ray_moe.errors import DeadlineError


@dataclass(frozen=True)
class StoreAddress:
    """Host and port of the epoch's store; travels in the epoch record."""

    host: str
    port: int


class RendezvousStore:
    """The serving end, held by the controller. Port 0 picks a free one."""

    def __init__(self, host: str, seconds: float) -> None:
        self._store = dist.TCPStore(
            host, 0, None, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        self.address = StoreAddress(host, self._store.port)


def connect(address: StoreAddress, prefix: str, seconds: float) -> dist.Store:
    """A member's view of the store under its epoch's prefix; `DeadlineError` when the store does not answer."""
    try:
        store = dist.TCPStore(address.host, address.port, None, is_master=False, timeout=timedelta(seconds=seconds))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise DeadlineError(f"rendezvous store {address.host}:{address.port}", seconds, prefix) from error
    return dist.PrefixStore(prefix, store)
