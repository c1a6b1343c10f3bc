"""Slots filled beside a serving engine: pulled from peers or read from the checkpoint, verified, one outcome each.

An expert actor owns a `Filler`, and answers its peers as a `SlotGiver`. Waiting is the event loop's; copying, hashing
and reading are done by one other thread at a time, slot by slot, so that the engine's thread finds a free core.

Between GPUs of a node the copy engine fetches slots from the peer's memory, for which the peer lends them; else a peer
sends copies of them through the object store.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TypeVar

from ray.actor import ActorHandle

from ray_moe.actors.fetch import Fetcher
from ray_moe.controlplane.fetching import Fault, FillOrder, FillOutcome, FromCheckpoint, FromPeer
from ray_moe.deadline import ray_await
from ray_moe.errors import DigestMismatchError, NotServingError, RayMoEError, SlotError
from ray_moe.weights.checkpoint import ExpertWeights
from ray_moe.weights.copy_engine import Lane, Loan
from ray_moe.weights.digest import parameter_digest
from ray_moe.weights.slots import SlotPool, SlotState
from ray_moe.weights.transfer import SlotBytes, Throttle, copy_slot, export_slot, import_slot

_T = TypeVar("_T")
# One answer of a peer holds that much, or one expert: it bounds what a fill takes of Ray's object store, per source.
CHUNK_BYTES = 64 * 1024**2

_Settle = Callable[[FillOutcome], None]
ReadExpert = Callable[[str, int, int], ExpertWeights]


class Filler:
    """Fills the slots of one rank's pool.

    Args:
        pool: where to. read: (checkpoint key, layer, expert) -> weights, called on another thread.
        peers: the actor of a rank; it answers `export_slots` as this class does.
        bytes_per_second: the cap for what this rank takes in and gives out together; None for none.
        deadline_s: how long a peer may take to answer, besides the time that its answer takes at the cap.
        node, lane: where this rank is, and what fetches slots from the memory of others there; None for nothing.
    """

    def __init__(
        self,
        pool: SlotPool,
        read: ReadExpert,
        peers: Callable[[int], ActorHandle],
        *,
        bytes_per_second: float | None = None,
        deadline_s: float,
        chunk_bytes: int = CHUNK_BYTES,
        node: str = "",
        lane: Lane | None = None,
    ) -> None:
        self._pool, self._read, self._peers = pool, read, peers
        self._throttle = Throttle(bytes_per_second)
        self._deadline_s, self._chunk_bytes = deadline_s, chunk_bytes
        self._filling: set[tuple[int, int]] = set()
        self._thread = asyncio.Lock()
        self._fetcher = None if lane is None else Fetcher(pool, lane, peers, node=node, deadline_s=deadline_s)

    def pace(self, bytes_per_second: float | None) -> None:
        """Another cap from here on: an engine begins to serve in this process."""
        self._throttle = Throttle(bytes_per_second)
        if self._fetcher is not None:
            self._fetcher.pace(bytes_per_second)

    def keep(self, ranks: Collection[int]) -> None:
        """Let go of the memory of all other ranks: what a dead process had is not free before."""
        if self._fetcher is not None:
            self._fetcher.keep(ranks)

    async def fill(
        self, orders: Sequence[FillOrder], report: Callable[[FillOutcome], None] | None = None
    ) -> tuple[FillOutcome, ...]:
        """Carry out orders for this rank; an outcome for each, in their order, and to `report` as soon as it is known.

        A failed order stops no other and raises nothing: its slot is free again, and the outcome says whether source
        or slot was at fault. A source that does not answer, or answers with an error, is given up for this call. An
        order that was carried out before is done at once; one whose slot another call is filling is refused.
        """
        outcomes: dict[FillOrder, FillOutcome] = {}
        mine: set[tuple[int, int]] = set()

        def settle(outcome: FillOutcome) -> None:
            outcomes[outcome.order] = outcome
            if report is not None:
                report(outcome)

        by_source: dict[int | FromCheckpoint, list[FillOrder]] = {}
        for order in dict.fromkeys(orders):
            settled = self._settled(order)
            if settled is not None:
                settle(settled)
                continue
            mine.add((order.layer, order.pool_slot))
            self._filling.add((order.layer, order.pool_slot))
            source = order.source.rank if isinstance(order.source, FromPeer) else order.source
            by_source.setdefault(source, []).append(order)
        try:
            async with asyncio.TaskGroup() as group:
                for source, several in sorted(by_source.items(), key=_after_own):
                    group.create_task(self._take(source, several, settle))
        finally:
            self._filling -= mine
        return tuple(outcomes[order] for order in orders)

    async def export_slots(self, slots: Sequence[tuple[int, int]]) -> tuple[SlotBytes | SlotError, ...]:
        """Copies of resident slots (layer, pool slot) for a peer; the error for each that cannot be given."""
        given: list[SlotBytes | SlotError] = []
        for layer, pool_slot in slots:
            try:
                await asyncio.sleep(self._throttle.reserve(self._pool.slot_bytes(layer)))
                given.append(await self._beside(partial(export_slot, self._pool, layer, pool_slot)))
            except SlotError as error:  # the one who asked reports it
                given.append(error)
        return tuple(given)

    def lend_slots(self, slots: Sequence[tuple[int, int]], node: str, seconds: float) -> Loan | None:
        """As `Fetcher.lend`; None too where nothing is lent."""
        return None if self._fetcher is None else self._fetcher.lend(slots, node, seconds)

    def end_loan(self, number: int) -> None:
        if self._fetcher is not None:
            self._fetcher.end_loan(number)

    # ---- sources ----

    async def _take(self, source: int | FromCheckpoint, orders: Sequence[FillOrder], settle: _Settle) -> None:
        if isinstance(source, FromCheckpoint):
            await self._take_here(orders, settle)
        elif not await self._fetch(source, orders, settle):
            own = source == orders[0].rank
            await (self._take_here(orders, settle) if own else self._pull(source, orders, settle))

    async def _fetch(self, rank: int, orders: Sequence[FillOrder], settle: _Settle) -> bool:
        """Orders that read the memory of one rank's slots, all settled; False, and nothing is done, where none can."""
        if self._fetcher is None:
            return False
        started = time.monotonic()

        def hear(order: FillOrder, digest: str | Exception) -> None:
            if isinstance(digest, Exception):
                settle(self._failed(order, digest, started))
            else:
                settle(FillOutcome(order, digest, self._pool.slot_bytes(order.layer), time.monotonic() - started))

        # Others may be fetched first.
        nbytes = sum(self._pool.slot_bytes(layer) for layer, _ in self._filling)
        return await self._fetcher.fetch(rank, orders, hear, nbytes)

    async def _pull(self, rank: int, orders: Sequence[FillOrder], settle: _Settle) -> None:
        """Orders that read one peer's slots."""
        chunks = list(self._chunks(orders))
        for at, chunk in enumerate(chunks):
            nbytes = sum(self._pool.slot_bytes(order.layer) for order, _ in chunk)
            started = time.monotonic()
            try:
                answer: tuple[SlotBytes | SlotError, ...] = await ray_await(
                    self._peers(rank).export_slots.remote([(order.layer, slot) for order, slot in chunk]),
                    self._deadline_s + self._throttle.seconds(nbytes),
                    f"{len(chunk)} slots of rank {rank}",
                )
                arrived = list(zip(chunk, answer, strict=True))
            except Exception as error:  # noqa: BLE001 - a dead, slow or broken source: the next chunk would fare no better
                for order, _ in itertools.chain(*chunks[at:]):
                    settle(self._failed(order, error, started))
                return
            for (order, _), given in arrived:
                # Slot by slot, so that a serving engine beside it is never kept waiting for a whole answer.
                await asyncio.sleep(self._throttle.reserve(self._pool.slot_bytes(order.layer)))
                await self._one(order, partial(self._import, order, given), started, settle)
            del answer, arrived, given  # their memory in the object store, before the next chunk takes more

    def _chunks(self, orders: Sequence[FillOrder]) -> Iterator[list[tuple[FillOrder, int]]]:
        """(order, the peer's slot) in order, as many as fit in one answer."""
        chunk: list[tuple[FillOrder, int]] = []
        size = 0
        for order in orders:
            assert isinstance(order.source, FromPeer)  # they were grouped by it
            nbytes = self._pool.slot_bytes(order.layer)
            if chunk and size + nbytes > self._chunk_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append((order, order.source.pool_slot))
            size += nbytes
        yield chunk

    async def _take_here(self, orders: Sequence[FillOrder], settle: _Settle) -> None:
        """Orders that read this rank's own slots, or a checkpoint."""
        for order in orders:
            await asyncio.sleep(self._throttle.reserve(self._pool.slot_bytes(order.layer)))
            await self._one(order, partial(self._read_here, order), time.monotonic(), settle)

    # ---- one slot, on the thread ----

    def _import(self, order: FillOrder, given: SlotBytes | SlotError) -> tuple[str, int]:
        """The digest of what is resident, and bytes moved."""
        if isinstance(given, SlotError):
            raise given
        return self._put(order, given.weights())

    def _read_here(self, order: FillOrder) -> tuple[str, int]:
        layer, pool_slot, source = order.layer, order.pool_slot, order.source
        if isinstance(source, FromPeer):
            digest = copy_slot(self._pool, layer, source.pool_slot, pool_slot, order.digest, expert=order.expert)
            return digest, self._pool.slot_bytes(layer)
        weights = self._read(source.key, layer, order.expert).to(dtype=self._pool.dtype)
        if order.digest is None and self._pool.state(layer, pool_slot) is SlotState.RESIDENT:
            # Filled by an earlier call that nobody heard the end of: only the checkpoint can tell whether it is right.
            expected, found = parameter_digest(weights), self._pool.digest(layer, pool_slot)
            if found != expected:
                raise DigestMismatchError(layer, pool_slot, order.expert, "an earlier fill", expected, found)
            return found, 0
        return self._put(order, weights)

    def _put(self, order: FillOrder, weights: ExpertWeights) -> tuple[str, int]:
        layer, pool_slot = order.layer, order.pool_slot
        digest = import_slot(
            self._pool, layer, pool_slot, weights, order.digest, expert=order.expert, source=str(order.source)
        )
        return digest, weights.nbytes

    # ---- outcomes ----

    def _settled(self, order: FillOrder) -> FillOutcome | None:
        """The outcome of an order that needs no work, or cannot be carried out now."""
        slot = (order.layer, order.pool_slot)
        where = f"layer {order.layer} slot {order.pool_slot} of rank {order.rank}"
        try:
            state = self._pool.state(*slot)
            if state is SlotState.FILLING or slot in self._filling:
                return _refused(order, f"{where}: filling, by another call")
            if state is SlotState.FREE or order.digest is None:
                return None
            found = self._pool.digest(*slot)
        except SlotError as error:
            return _refused(order, str(error))
        if found == order.digest:
            return FillOutcome(order, found, 0, 0.0)
        return _refused(order, f"{where}: resident with digest {found}, expected {order.digest}: free it first")

    async def _one(
        self, order: FillOrder, work: Callable[[], tuple[str, int]], started: float, settle: _Settle
    ) -> None:
        try:
            digest, nbytes = await self._beside(work)
        except Exception as error:  # noqa: BLE001 - whatever one copy does, it is reported, and the other orders go on
            settle(self._failed(order, error, started))
        else:
            settle(FillOutcome(order, digest, nbytes, time.monotonic() - started))

    def _failed(self, order: FillOrder, error: Exception, started: float) -> FillOutcome:
        free = self._pool.state(order.layer, order.pool_slot) is SlotState.FREE
        arrived = self._pool.slot_bytes(order.layer) if isinstance(error, DigestMismatchError) and free else 0
        text = str(error) if isinstance(error, RayMoEError) else f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        return FillOutcome(order, None, arrived, seconds, text, Fault.SOURCE if free else Fault.SLOT)

    async def _beside(self, work: Callable[[], _T]) -> _T:
        async with self._thread:
            return await asyncio.to_thread(work)


def _after_own(given: tuple[int | FromCheckpoint, Sequence[FillOrder]]) -> tuple[bool, int]:
    """Sources are fetched one after another, and readers that all began with the same one would share its link."""
    source, orders = given
    if isinstance(source, FromCheckpoint):
        return True, 0
    return source < orders[0].rank, source


class SlotGiver:
    """What an actor with a `Filler` answers its peers that fill their own slots."""

    _filler: Filler | None = None

    async def export_slots(self, slots: Sequence[tuple[int, int]]) -> tuple[SlotBytes | Exception, ...]:
        return await self._given.export_slots(slots)

    async def lend_slots(self, slots: Sequence[tuple[int, int]], node: str, seconds: float) -> Loan | None:
        return self._given.lend_slots(slots, node, seconds)

    async def end_loan(self, number: int) -> None:
        self._given.end_loan(number)

    @property
    def _given(self) -> Filler:
        if self._filler is None:
            raise NotServingError("this peer is not ready: allocate first")
        return self._filler


def _refused(order: FillOrder, error: str) -> FillOutcome:
    return FillOutcome(order, None, 0, 0.0, error, Fault.SLOT)
