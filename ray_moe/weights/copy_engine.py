"""Slots pulled out of the pools of other processes of the node: one-sided copies, verified where they arrive.

The owner lends its slots (`Lender`): what a reader needs to know of each, and a promise not to release it until the
reader gives it back or has been silent for too long. The reader (`CopyEngine`) copies from the owner's memory into
free slots of its own and publishes none of them before the fingerprint of what arrived is the one that the owner took
beside the digest when it filled the slot. So whatever becomes of the owner, or of its slot, meanwhile, a reader ends
with the right bytes or with an error.

    lend -> begin fill -> copy -> fingerprint -> commit or abandon -> give back

What enqueues the copies is a `Lane`: of a CUDA device in `weights.cuda_lane`.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ray_moe.deadline import pause, poll
from ray_moe.errors import DeadlineError, DigestMismatchError, RayMoEError, SlotError
from ray_moe.weights.slots import Fingerprint, MappedSlot, Places, SlotPool
from ray_moe.weights.transfer import Throttle

# Of the rate that copies were measured at, while an engine serves beside them and no other cap is set.
BACKGROUND_SHARE = 0.25

# Flat out, so much is enqueued before the device has to be looked at: batches long enough to hide what a batch costs
# the host, several in flight so that the copies never wait for it.
_BATCH_BYTES, _BATCH_SLOTS, _BATCHES = 256 * 1024**2, 64, 3
# Paced, the engine beside it sees pieces of this size (40 us at 400 GB/s) and the pauses between them.
_PIECE_BYTES = 16 * 1024**2
# Whoever wakes up takes the interpreter from the engine, so a shorter pause is owed, and taken with the next one.
_SHORTEST_PAUSE_S = 1e-3
# A paced batch is over in about so long: no slot waits longer than that for the others of its batch.
_PACED_BATCH_S = 0.05
_UNMEASURED = 10e9  # bytes per second, on the slow side


# (into, source, bytes): two addresses, the second one in a mapping.
Copy = tuple[int, int, int]


class Check(Protocol):
    """Fingerprints under way, of copies and in the order of the slots that they were asked for."""

    def ready(self) -> bool: ...

    def fingerprints(self) -> list[Fingerprint]:
        """Once it is ready."""
        ...

    def copy_seconds(self) -> float:
        """How long the device took from the first of the copies to the last."""
        ...


class Mapping(Protocol):
    """Another process's memory, mapped here."""

    @property
    def address(self) -> int: ...

    def close(self) -> None: ...


class Lane(Protocol):
    """What copies into one device, in the order in which it is asked to, beside everything else there."""

    @property
    def handle(self) -> bytes:
        """By which other processes open the memory that this process's slots lie in; empty before it is allocated."""
        ...

    def open(self, handle: bytes) -> Mapping: ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Enqueue."""
        ...

    def check(self, slots: Sequence[Places]) -> Check:
        """Enqueue, after all copies so far."""
        ...


def settle(check: Check, seconds: float, what: str) -> list[Fingerprint]:
    """Wait for `check`. Raises `DeadlineError`."""
    if not poll(check.ready, seconds):
        raise DeadlineError(what, seconds)
    return check.fingerprints()


# ---- the owner ----


@dataclass(frozen=True)
class Loan:
    """Slots that will not be released until the loan has ended, as `Lane.open(handle)` reaches them; an error for each
    that cannot be lent."""

    number: int
    handle: bytes
    slots: tuple[MappedSlot | SlotError, ...]


class Lender:
    """Loans of one pool's slots. Not thread-safe: it belongs to an event loop."""

    def __init__(self, pool: SlotPool, lane: Lane) -> None:
        self._pool, self._lane = pool, lane
        self._numbers = itertools.count()
        self._lent: dict[int, list[tuple[int, int]]] = {}

    def lend(self, slots: Sequence[tuple[int, int]]) -> Loan:
        """Slots as (layer, pool slot)."""
        number = next(self._numbers)
        lent: list[tuple[int, int]] = []
        given: list[MappedSlot | SlotError] = []
        for layer, pool_slot in slots:
            try:
                given.append(self._pool.begin_mapped_read(layer, pool_slot))
                lent.append((layer, pool_slot))
            except SlotError as error:  # the one who asked reports it
                given.append(error)
        self._lent[number] = lent
        return Loan(number, self._lane.handle, tuple(given))

    def end(self, number: int) -> None:
        """The reader has all it came for, or is no longer waited for. An ended loan may be ended again."""
        for layer, pool_slot in self._lent.pop(number, ()):
            self._pool.end_read(layer, pool_slot)


# ---- the reader ----


@dataclass(frozen=True)
class Pull:
    """Fill a free slot from a lent one. `digest` is the expert's; None takes the owner's word for it."""

    layer: int
    pool_slot: int
    slot: MappedSlot
    digest: str | None
    expert: int
    source: str


@dataclass(frozen=True)
class Pulled:
    """What became of a pull, by its place among those that were asked for: resident, or `error` says why not."""

    index: int
    error: Exception | None = None


@dataclass(eq=False)
class _Batch:
    """Copies that were enqueued together, and what has failed of them by now."""

    started: list[tuple[int, Pull]] = field(default_factory=list)
    failed: list[Pulled] = field(default_factory=list)
    nbytes: int = 0
    paced: bool = False
    check: Check | None = None


class CopyEngine:
    """Fills the slots of one pool from those of other processes. One pull runs at a time, on its caller's thread.

    A slot that is free has no readers on the device either: it was released after the last step that used it had ended.
    A slot becomes resident after the host has seen its copy complete, so whatever is launched then reads what arrived.

    `deadline_s` bounds the wait for what has been enqueued.
    """

    def __init__(self, pool: SlotPool, lane: Lane, *, deadline_s: float) -> None:
        self._pool, self._lane, self._deadline_s = pool, lane, deadline_s
        self._pulling = threading.Lock()
        self._mapped: dict[int, tuple[bytes, Mapping]] = {}  # by rank
        self._kept: Collection[int] | None = None
        self._rate = 0.0
        self._serving = False
        self._cap: float | None = None
        self._throttle = Throttle(None)

    @property
    def rate(self) -> float:
        """Bytes per second of the fastest batch so far that ran flat out; 0 before there was one."""
        return self._rate

    def pace(self, bytes_per_second: float | None) -> None:
        """From here on an engine serves beside it: at this rate, or at `BACKGROUND_SHARE` of what is measured."""
        self._serving, self._cap = True, bytes_per_second
        self._throttle = Throttle(bytes_per_second or BACKGROUND_SHARE * self._rate or None)

    def seconds(self, nbytes: int) -> float:
        """About how long so many bytes take."""
        return nbytes / (self._throttle.bytes_per_second or self._rate or _UNMEASURED)

    def keep(self, ranks: Collection[int]) -> None:
        """Close what is mapped of other ranks: as long as it is, a dead process's memory is not free again."""
        self._kept = ranks
        self._close_others()

    def pull(
        self, rank: int, handle: bytes, pulls: Sequence[Pull], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Pulled]]:
        """Carry out pulls from `rank`'s memory; what became of them, as soon as it is known, all that were begun.

        Whatever one pull fails for, its slot is free again and the others go on, but for two: after a `DeadlineError`,
        or an error of the device, bytes may still be written, so these slots stay `filling`. Nothing more is begun
        once `stopped` says so. Raises the lane's error when `handle` cannot be opened; then no slot was touched.
        """
        try:
            with self._pulling:
                yield from self._pull(self._mapping(rank, handle), pulls, stopped)
        finally:
            self._close_others()

    def _pull(self, mapping: Mapping, pulls: Sequence[Pull], stopped: Callable[[], bool]) -> Iterator[list[Pulled]]:
        under_way: deque[_Batch] = deque()
        left = deque(enumerate(pulls))
        try:
            while left and not stopped():
                # Without a rate there is no pace yet, so the first batch is waited for, and measured.
                while len(under_way) == (1 if self._serving and not self._paced else _BATCHES):
                    yield self._finish(under_way.popleft())
                under_way.append(self._start(mapping, self._next_batch(left)))
                while under_way and _is_over(under_way[0]):
                    yield self._finish(under_way.popleft())
        finally:
            # Also when nobody takes the results any more: a slot must not stay as it is while it is written.
            last = [self._finish(batch) for batch in under_way]
        yield from last

    def _next_batch(self, left: deque[tuple[int, Pull]]) -> list[tuple[int, Pull]]:
        most = min(_BATCH_BYTES, _PACED_BATCH_S * (self._throttle.bytes_per_second or math.inf))
        batch: list[tuple[int, Pull]] = []
        nbytes = 0
        while left and len(batch) < _BATCH_SLOTS:
            nbytes += self._pool.slot_bytes(left[0][1].layer)
            if batch and nbytes > most:
                break
            batch.append(left.popleft())
        return batch

    def _start(self, mapping: Mapping, pulls: Iterable[tuple[int, Pull]]) -> _Batch:
        batch = _Batch(paced=self._paced)
        places = []
        for index, pull in pulls:
            try:
                into = self._begin(pull)
            except RayMoEError as error:
                batch.failed.append(Pulled(index, error))
                continue
            batch.started.append((index, pull))
            places.append(into)
        copies = [
            (address, mapping.address + offset, nbytes)
            for (_, pull), into in zip(batch.started, places, strict=True)
            for (address, nbytes), (offset, _) in zip(into, pull.slot.spans, strict=True)
        ]
        batch.nbytes = sum(nbytes for _, _, nbytes in copies)
        try:
            if copies:
                self._copy(copies)
                batch.check = self._lane.check(places)
        except Exception as error:  # noqa: BLE001 - the device's; what it has begun may still write
            batch.failed += [Pulled(index, error) for index, _ in batch.started]
            batch.started.clear()
        return batch

    def _begin(self, pull: Pull) -> Places:
        """Takes the slot, after what can be known without a copy."""
        slot, where = pull.slot, f"layer {pull.layer} slot {pull.pool_slot}"
        if pull.digest is not None and slot.digest != pull.digest:
            raise SlotError(f"{where}: {pull.source} holds digest {slot.digest}, expected {pull.digest}")
        into = self._pool.begin_mapped_fill(pull.layer, pull.pool_slot)
        sizes, given = [nbytes for _, nbytes in into], [nbytes for _, nbytes in slot.spans]
        if sizes != given:
            self._pool.abandon_fill(pull.layer, pull.pool_slot)
            raise SlotError(f"{where} has tensors of {sizes} bytes; {pull.source} has some of {given}")
        return into

    def _copy(self, copies: Sequence[Copy]) -> None:
        if not self._paced:
            self._lane.copy(copies)
            return
        due: list[Copy] = []
        for into, source, nbytes in copies:
            for at in range(0, nbytes, _PIECE_BYTES):
                size = min(_PIECE_BYTES, nbytes - at)
                wait = self._throttle.reserve(size)
                if wait > _SHORTEST_PAUSE_S:
                    self._lane.copy(due)
                    due = []
                    pause(wait)
                due.append((into + at, source + at, size))
        self._lane.copy(due)

    def _finish(self, batch: _Batch) -> list[Pulled]:
        done = batch.failed
        if batch.check is None or not batch.started:
            return done
        try:
            what = f"copies of {len(batch.started)} slots, {batch.nbytes} bytes"
            found = settle(batch.check, self._deadline_s, what)
        except Exception as error:  # noqa: BLE001 - too late, or the device's; bytes may still be written
            return done + [Pulled(index, error) for index, _ in batch.started]
        if not batch.paced:
            self._measure(batch.nbytes, batch.check.copy_seconds())
        for (index, pull), fingerprint in zip(batch.started, found, strict=True):
            done.append(Pulled(index, self._commit(pull, fingerprint)))
        return done

    def _commit(self, pull: Pull, fingerprint: Fingerprint) -> Exception | None:
        slot = pull.slot
        if fingerprint == slot.fingerprint:
            self._pool.commit_mapped_fill(pull.layer, pull.pool_slot, slot.digest, fingerprint)
            return None
        self._pool.abandon_fill(pull.layer, pull.pool_slot)
        expected = f"{slot.digest} (fingerprint {shown(slot.fingerprint)})"
        found = f"other bytes (fingerprint {shown(fingerprint)})"
        return DigestMismatchError(pull.layer, pull.pool_slot, pull.expert, pull.source, expected, found)

    # ---- pace ----

    @property
    def _paced(self) -> bool:
        return self._throttle.bytes_per_second is not None

    def _measure(self, nbytes: int, seconds: float) -> None:
        if seconds > 0:
            self._rate = max(self._rate, nbytes / seconds)
        if self._serving and self._cap is None:
            self._throttle = Throttle(BACKGROUND_SHARE * self._rate)

    # ---- mappings ----

    def _mapping(self, rank: int, handle: bytes) -> Mapping:
        known = self._mapped.get(rank)
        if known is not None:
            if known[0] == handle:
                return known[1]
            self._mapped.pop(rank)[1].close()  # another process has the rank now
        mapping = self._lane.open(handle)
        self._mapped[rank] = handle, mapping
        return mapping

    def _close_others(self) -> None:
        """Unless a pull is under way, which does so when it ends."""
        if self._kept is None or not self._pulling.acquire(blocking=False):
            return
        try:
            for rank in self._mapped.keys() - set(self._kept):
                self._mapped.pop(rank)[1].close()
        finally:
            self._pulling.release()


def _is_over(batch: _Batch) -> bool:
    return batch.check is None or batch.check.ready()


def shown(fingerprint: Fingerprint) -> str:
    """As 32 hexadecimal digits."""
    return "".join(f"{part & (1 << 64) - 1:016x}" for part in fingerprint)
