"""From the engine's steps to the clients that poll: one mailbox per client, sorted once per step.

Everything here lives on the actor's event loop, except that `Outlet` is called on the engine's thread and hands over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_moe.deadline import wait_for
from ray_moe.engine.records import Delivery, Members, StreamRecord
from ray_moe.errors import DeadlineError, RequestError

if TYPE_CHECKING:
    from ray_moe.dataplane.route_counts import DemandReport
    from ray_moe.engine.generation import GenerationView

# A poll waits at most this long for a first item, then returns empty and is repeated.
POLL_WAIT_S = 10.0
# A client that has not polled for this long is gone.
CLIENT_GONE_S = 40.0


@dataclass(frozen=True)
class Polled:
    """What one poll gives: deliveries in order, and the cluster's members when the client knows an older version."""

    items: tuple[Delivery, ...] = ()
    members: Members | None = None


class Mailbox:
    """Deliveries of one client in order; one poll at a time."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.polled_at = time.monotonic()
        self._items: list[Delivery] = []
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Delivery) -> None:
        self._items.append(item)
        self._news.set()

    def wake(self) -> None:
        """End the poll that waits, if one does: there is something else to tell."""
        self._news.set()

    async def take(self, seconds: float) -> tuple[Delivery, ...]:
        """Everything there is, or whatever comes first within `seconds`; empty when nothing comes, or at a `wake`."""
        self.polled_at = time.monotonic()
        if not self._items and seconds > 0:
            self._news.clear()
            try:
                await wait_for(self._news.wait(), seconds, "a delivery")
            except DeadlineError:
                return ()
        items, self._items = tuple(self._items), []
        return items


class PostOffice:
    """Which request belongs to which client, every client's mailbox, and who the members are.

    A request that another peer hands over is opened here before this peer's engine takes it in. `Moved` closes it on
    the peer that it left; it comes after everything that was delivered there, since a mailbox keeps its order.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        """`cancel` ends a request whose client is gone."""
        self.members: Members | None = None
        self._cancel = cancel
        self._mailboxes: dict[str, Mailbox] = {}
        self._client_of: dict[str, str] = {}

    def open(self, client: str, request_id: str) -> None:
        """Expect deliveries for a request. Raises `RequestError` when one of this id runs already."""
        if request_id in self._client_of:
            raise RequestError(f"request_id {request_id!r} already runs on this peer", "request_id")
        self._client_of[request_id] = client
        mailbox = self.mailbox(client)
        mailbox.open.add(request_id)
        # A client that has had nothing here for long must hear of a request that was handed over before it polls.
        mailbox.polled_at = time.monotonic()

    async def poll(self, client: str, seconds: float, known_members: int) -> Polled:
        """What `client` has not seen: deliveries, members newer than version `known_members`. Waits for a first."""
        items = await self.mailbox(client).take(0.0 if self._newer(known_members) else seconds)
        return Polled(items, self._newer(known_members))

    def set_members(self, members: Members) -> None:
        """Tell every client, the waiting ones now. An older version than the last is late and ignored."""
        if self.members is not None and members.version <= self.members.version:
            return
        self.members = members
        for mailbox in self._mailboxes.values():
            mailbox.wake()

    def _newer(self, known: int) -> Members | None:
        return self.members if self.members is not None and self.members.version > known else None

    @property
    def unfetched(self) -> int:
        """Deliveries that no poll has fetched yet. A peer that leaves waits, within bounds, until there are none."""
        return sum(map(len, self._mailboxes.values()))

    def close(self, request_id: str) -> None:
        """Forget a request; what lies in the mailbox stays there."""
        mailbox = self._mailboxes.get(self._client_of.pop(request_id, ""))
        if mailbox is not None:
            mailbox.open.discard(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._client_of

    def __len__(self) -> int:
        """Requests that are open here."""
        return len(self._client_of)

    def client_of(self, request_id: str) -> str | None:
        """Whose request it is; None when it is not open here."""
        return self._client_of.get(request_id)

    def mailbox(self, client: str) -> Mailbox:
        return self._mailboxes.setdefault(client, Mailbox())

    def deliver(self, items: Sequence[Delivery]) -> None:
        """Sort what one step gave into the mailboxes; a last item closes its request."""
        for item in items:
            client = self._client_of.get(item.request_id)
            if client is None:  # cancelled, and its client gone
                continue
            self._mailboxes[client].put(item)
            if not isinstance(item, StreamRecord) or item.finish_reason is not None:
                self.close(item.request_id)

    async def sweep(self) -> None:
        """Cancel the requests of clients that no longer poll, and forget their mailboxes. Never returns."""
        while True:
            await asyncio.sleep(CLIENT_GONE_S / 4)
            now = time.monotonic()
            for client, mailbox in list(self._mailboxes.items()):
                if now - mailbox.polled_at < CLIENT_GONE_S:
                    continue
                del self._mailboxes[client]
                for request_id in mailbox.open:
                    del self._client_of[request_id]
                    self._cancel(request_id)


class Outlet:
    """The engine loop's way out: every call returns at once and goes on, on the actor's event loop."""

    def __init__(
        self,
        events: asyncio.AbstractEventLoop,
        post_office: PostOffice,
        return_lease: Callable[[int], None],
        wake_peers: Callable[[], None],
        take_demand: Callable[[Sequence[DemandReport]], None],
    ) -> None:
        self._events, self._post_office = events, post_office
        self._return_lease, self._wake_peers, self._take_demand = return_lease, wake_peers, take_demand

    def deliver(self, items: Sequence[Delivery]) -> None:
        if items:
            self._soon(self._post_office.deliver, items)

    def demand(self, reports: Sequence[DemandReport]) -> None:
        self._soon(self._take_demand, reports)

    def lease_returned(self, view: GenerationView) -> None:
        self._soon(self._return_lease, view.lease.generation)

    def wake_peers(self) -> None:
        self._soon(self._wake_peers)

    def _soon(self, call: Callable[..., Any], *args: Any) -> None:
        self._events.call_soon_threadsafe(call, *args)
