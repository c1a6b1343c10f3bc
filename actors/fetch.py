"""Slots of other ranks of the node, fetched by the copy engine out of memory that these lend.

One call asks for a loan of all slots, one tells that it is over; in between the owner's process does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ray.actor import ActorHandle

from ray_moe.config import ClusterConfig
from ray_moe.controlplane.fetching import FillOrder, FromPeer
from ray_moe.deadline import ray_await
from ray_moe.errors import SlotError
from ray_moe.weights.copy_engine import CopyEngine, Lane, Lender, Loan, Pull, Pulled
from ray_moe.weights.slots import SlotPool

if TYPE_CHECKING:
    from ray_moe.weights.cuda_lane import CudaLane

_LOG = logging.getLogger(__name__)
# A loan lasts so many times as long as its copies should take: they may wait for others, or for a slower pace.
_PATIENCE = 4

# The digest of what is resident now, or why it is not.
Hear = Callable[[FillOrder, str | Exception], None]


def lane_of(config: ClusterConfig) -> CudaLane | None:
    """The copy engine, where a cluster has several GPUs; None elsewhere. It needs cupy."""
    if config.device != "cuda" or max(config.peers, config.max_peers or 1) == 1:
        return None
    from ray_moe.weights.cuda_lane import CudaLane

    return CudaLane(config.device, deadline_s=config.step_deadline_s)


class Fetcher:
    """One rank's: it belongs to the event loop of its actor, which is on `node`; other arguments as `Filler`'s."""

    def __init__(
        self, pool: SlotPool, lane: Lane, peers: Callable[[int], ActorHandle], *, node: str, deadline_s: float
    ) -> None:
        self._node, self._peers, self._deadline_s = node, peers, deadline_s
        self._lender = Lender(pool, lane)
        self._copies = CopyEngine(pool, lane, deadline_s=deadline_s)
        self._ends: dict[int, asyncio.TimerHandle] = {}  # by loan
        self._pulling = asyncio.Lock()

    def pace(self, bytes_per_second: float | None) -> None:
        """As `CopyEngine.pace`."""
        self._copies.pace(bytes_per_second)

    def keep(self, ranks: Collection[int]) -> None:
        """As `CopyEngine.keep`."""
        self._copies.keep(ranks)

    # ---- the owner ----

    def lend(self, slots: Sequence[tuple[int, int]], node: str, seconds: float) -> Loan | None:
        """Resident slots (layer, pool slot) for a reader on `node`, so many seconds at most; None for one elsewhere.

        They are not released before `end_loan`, or the end of that time: a reader that is later finds out by what
        arrives.
        """
        if node != self._node:
            return None
        loan = self._lender.lend(slots)
        self._ends[loan.number] = asyncio.get_running_loop().call_later(seconds, self.end_loan, loan.number)
        return loan

    def end_loan(self, number: int) -> None:
        """The reader has ended. Nothing happens when it was given up before."""
        timer = self._ends.pop(number, None)
        if timer is not None:
            timer.cancel()
            self._lender.end(number)

    # ---- the reader ----

    async def fetch(self, rank: int, orders: Sequence[FillOrder], hear: Hear, queued_bytes: int) -> bool:
        """Fill what `orders` name from slots of `rank`, this one or another; each is heard of once, on this loop.

        False, and nothing was done, where that rank lends none to this one, or its memory cannot be mapped here.
        `queued_bytes` are all that this rank is to fetch now, these among them.
        """
        try:
            loan, end_loan = await self._borrow(rank, orders, queued_bytes)
            if loan is None:
                return False
            lent = list(zip(orders, loan.slots, strict=True))
        except Exception as error:  # noqa: BLE001 - a dead, slow or broken source
            for order in orders:
                hear(order, error)
            return True
        pulls = {
            order: Pull(order.layer, order.pool_slot, slot, order.digest, order.expert, str(order.source))
            for order, slot in lent
            if not isinstance(slot, SlotError)
        }
        unheard = dict(pulls)

        def heard(order: FillOrder, digest: str | Exception) -> None:
            del unheard[order]
            hear(order, digest)

        trouble = await self._pull(rank, loan.handle, pulls, heard, end_loan)
        if trouble is not None and len(unheard) == len(pulls):
            _LOG.warning("rank %d lends memory that cannot be mapped here: %s", rank, trouble)
            return False
        for order, slot in lent:
            refusal = slot if isinstance(slot, SlotError) else trouble if order in unheard else None
            if refusal is not None:
                hear(order, refusal)
        return True

    async def _borrow(
        self, rank: int, orders: Sequence[FillOrder], queued_bytes: int
    ) -> tuple[Loan | None, Callable[[], object]]:
        """A loan of what `orders` read, and how to end it."""
        slots = [(order.layer, order.source.pool_slot) for order in orders if isinstance(order.source, FromPeer)]
        seconds = self._deadline_s + _PATIENCE * self._copies.seconds(queued_bytes)
        if rank == orders[0].rank:
            own = self.lend(slots, self._node, seconds)
            assert own is not None  # it is on its own node
            return own, lambda: self.end_loan(own.number)
        peer = self._peers(rank)
        loan: Loan | None = await ray_await(
            peer.lend_slots.remote(slots, self._node, seconds),
            self._deadline_s,
            f"a loan of {len(slots)} slots of rank {rank}",
        )
        # Nobody waits for the answer: a peer that has died needs to hear nothing.
        return loan, lambda: None if loan is None else peer.end_loan.remote(loan.number)

    async def _pull(
        self,
        rank: int,
        handle: bytes,
        pulls: dict[FillOrder, Pull],
        hear: Hear,
        end_loan: Callable[[], object],
    ) -> Exception | None:
        """What was raised in between: at once, where the memory cannot be mapped."""
        loop, stopped, orders = asyncio.get_running_loop(), threading.Event(), list(pulls)

        def heard(several: list[Pulled]) -> None:
            for pulled in several:
                order = orders[pulled.index]
                hear(order, pulled.error or pulls[order].slot.digest)

        def pull() -> None:
            try:
                for several in self._copies.pull(rank, handle, list(pulls.values()), stopped.is_set):
                    loop.call_soon_threadsafe(heard, several)
            finally:  # in this thread, for whoever waits for it may be gone
                loop.call_soon_threadsafe(end_loan)

        try:
            async with self._pulling:  # one thread of the loop's few
                await asyncio.to_thread(pull)
        except Exception as error:  # noqa: BLE001 - the driver's word for memory that cannot be reached from here
            return error
        finally:
            stopped.set()
        return None
