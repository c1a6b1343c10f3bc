"""What one client has waiting on one peer: filled by the engine's steps, emptied by the client's polls."""

from __future__ import annotations

import asyncio
import time

from ray_moe.deadline import wait_for
from ray_moe.engine.records import Delivery
from ray_moe.errors import DeadlineError

# A poll waits this long for a first item, then returns empty and is repeated.
POLL_WAIT_S = 10.0
# A client that has not polled for this long is gone.
CLIENT_GONE_S = 40.0


class Mailbox:
    """Deliveries of one client in order. Lives on the actor's event loop; one poll at a time."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.polled_at = time.monotonic()
        self._items: list[Delivery] = []
        self._filled = asyncio.Event()

    def put(self, item: Delivery) -> None:
        self._items.append(item)
        self._filled.set()

    async def take(self, seconds: float) -> tuple[Delivery, ...]:
        """Everything there is, or whatever comes first within `seconds`; empty when nothing comes."""
        if not self._items:
            try:
                await wait_for(self._filled.wait(), seconds, "a delivery")
            except DeadlineError:
                return ()
        items, self._items = tuple(self._items), []
        self._filled.clear()
        return items
