"""Where the members of an epoch find one another: a TCP store that outlives every group built through it.

The store belongs to the controller's current incarnation; a group that is already built never needs it again.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch.distributed as dist

from ray_moe.errors import DeadlineError


@dataclass(frozen=True)
class StoreAddress:
    """Host and port of the epoch's store; travels in the epoch record."""

    host: str
    port: int


class RendezvousStore:
    """The serving end, held by the controller: on `host` alone, at a port of its own."""

    def __init__(self, host: str, seconds: float) -> None:
        # Left to itself, torch's store would listen on every interface.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            port,
            None,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.address = StoreAddress(host, port)


def connect(address: StoreAddress, prefix: str, seconds: float) -> dist.Store:
    """A member's view of the store under its epoch's prefix; `DeadlineError` when the store does not answer.

    A process keeps one connection to each store, whatever it joins there.
    """
    try:
        store = _connection(address, seconds)
        try:
            store.num_keys()
        except (dist.DistNetworkError, dist.DistStoreError):
            # The store that this connection led to is gone; another one may listen there by now.
            _connection.cache_clear()
            store = _connection(address, seconds)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise DeadlineError(f"rendezvous store {address.host}:{address.port}", seconds, prefix) from error
    return dist.PrefixStore(prefix, store)


@lru_cache(maxsize=8)
def _connection(address: StoreAddress, seconds: float) -> dist.TCPStore:
    return dist.TCPStore(address.host, address.port, None, is_master=False, timeout=timedelta(seconds=seconds))
