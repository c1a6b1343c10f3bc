"""The job while it runs: rows come in, as many requests are in flight as keep the engine full, answers are kept.

A request that finds its cluster gone is no error of its row: the host brings the cluster back, and it is asked again.
Everything else that goes wrong with a row is an error of that row, and the job goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ray.exceptions import RayError

from ray_moe.batch.answers import Answers
from ray_moe.batch.checkpoint import Checkpoint, Entry, Ids
from ray_moe.batch.hosts import Host, Load
from ray_moe.batch.reading import Input, InputRow
from ray_moe.batch.rows import Ask, Defaults, ask_of, fields_of, id_of, refused
from ray_moe.batch.writing import Form
from ray_moe.deadline import wait_for
from ray_moe.errors import DeadlineError, NotServingError, PeerLostError, RayMoEError, RequestError

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)

# In flight, over what the engines run at a time: whatever ends is followed at once by one that waits there already.
HEADROOM = 1.5
_TICK_S, _LOOK_S = 0.5, 2.0
_READ_AHEAD = 64
_READ_S = 600.0
_TRIES = 3  # of a request whose own deadline passes
_MOST_LOSSES = 3  # of the cluster, with no row done in between


@dataclass(frozen=True)
class Progress:
    """How far a job is. `rows` are those of the input, a guess from what was read so far until `counted`."""

    rows: int = 0
    counted: bool = False
    done: int = 0
    errors: int = 0
    completion_tokens: int = 0
    tokens_per_s: float = 0.0
    load: Load | None = None
    news: str = ""


OnProgress = Callable[[Progress], None]


@dataclass
class Driver:
    """One run of one job; `run` returns when every row is done."""

    source: Input
    form: Form
    checkpoint: Checkpoint
    host: Host
    defaults: Defaults
    answers: Answers
    concurrency: int | None
    checkpoint_s: float
    on_progress: OnProgress

    _in_flight: int = 0
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _restoring: asyncio.Task[None] | None = None
    _losses: int = 0
    _done_at_last_loss: int = -1
    _progress: Progress = field(default_factory=Progress)
    _width: int = 1

    async def run(self) -> None:
        """Raises `NotServingError` when the cluster is gone for good; what is done by then is kept."""
        self._width = self.concurrency or await self._full()
        ticking = asyncio.create_task(self._tick())
        try:
            await self._all_rows()
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
            self.checkpoint.flush()
            self._report()

    async def _all_rows(self) -> None:
        ids = Ids()
        try:
            async with asyncio.TaskGroup() as asking:
                async for row in self._read():
                    entry, ask = self._begin(row, ids)
                    if entry is not None:
                        self.checkpoint.add(entry)
                    if ask is None:
                        continue
                    await self._room()
                    self._in_flight += 1
                    asking.create_task(self._one(ask))
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            ids.close()

    def _begin(self, row: InputRow, ids: Ids) -> tuple[Entry | None, Ask | None]:
        """What a row asks for; or, when it asks for nothing that can be done, why. Neither for a row that is done."""
        custom_id: str | None = None
        is_done = row.number in self.checkpoint.rows
        try:
            fields = fields_of(row.value)
            if fields is None:
                return None, None
            custom_id = id_of(fields, row.number)
            first = ids.first_row(custom_id, row.number)
            if first != row.number:
                raise RequestError(f"id {custom_id!r} is that of row {first} already; ids must be unique", "custom_id")
            if is_done:
                return None, None
            return None, ask_of(fields, row.number, custom_id, self.defaults)
        except RayMoEError as error:
            return (None if is_done else _error_of(row.number, custom_id, error)), None

    async def _one(self, ask: Ask) -> None:
        """One request, until it has an answer or a reason for having none."""
        try:
            for tries in itertools.count(1):
                try:
                    answer = await self.answers.answer(ask)
                    self.checkpoint.add(
                        Entry(
                            ask.number,
                            True,
                            self.form.document(ask, answer),
                            answer["usage"]["prompt_tokens"],
                            answer["usage"]["completion_tokens"],
                        )
                    )
                    return
                except (PeerLostError, NotServingError, RayError) as error:
                    await self._restored(error)
                except DeadlineError as error:
                    if tries >= _TRIES:
                        raise
                    _LOG.warning("row %d is asked again: %s", ask.number, error)
        except (NotServingError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - one row must cost no other, whatever a tokenizer or template raises
            if not isinstance(error, RayMoEError):
                _LOG.exception("row %d", ask.number)
            self.checkpoint.add(_error_of(ask.number, ask.custom_id, error))
        finally:
            self._in_flight -= 1
            self._freed.set()

    # ---- reading ----

    async def _read(self) -> AsyncIterator[InputRow]:
        """Rows, as many at a time as a thread gives; it waits for Ray Data while the requests go on."""
        rows = iter(self.source.rows())
        size = 0
        while batch := await _beside(_take, rows, what="the input's next rows"):
            size += sum(row.size for row in batch)
            last = batch[-1].number
            guess = round(last * max(1.0, self.source.bytes / max(1, size)))
            self._progress = replace(self._progress, rows=last if len(batch) < _READ_AHEAD else guess)
            for row in batch:
                yield row
        self._progress = replace(self._progress, counted=True)

    # ---- how many at a time ----

    async def _room(self) -> None:
        while self._in_flight >= self._width:
            self._freed.clear()
            await self._freed.wait()

    async def _full(self) -> int:
        load = await _beside(self.host.load, what="a look at the engines")
        if load is None:
            return self._width
        self._progress = replace(self._progress, load=load)
        return max(1, round(load.cap * HEADROOM))

    # ---- a cluster that is lost ----

    async def _restored(self, error: Exception) -> None:
        """Return once the cluster serves again; all that find it gone wait for one and the same attempt."""
        if self._restoring is None or self._restoring.done():
            _LOG.warning("the cluster is brought back: %s", error)
            self._restoring = asyncio.create_task(self._restore(str(error)))
        await asyncio.shield(self._restoring)

    async def _restore(self, reason: str) -> None:
        done = self.checkpoint.totals.done
        self._losses = self._losses + 1 if done == self._done_at_last_loss else 1
        self._done_at_last_loss = done
        if self._losses > _MOST_LOSSES:
            raise NotServingError(f"the cluster was lost {self._losses} times without a row done in between: {reason}")
        self._progress = replace(self._progress, news=f"the cluster is lost ({reason}); waiting until it serves again")
        try:
            await asyncio.to_thread(self.host.restore)
        except (RayMoEError, RayError) as error:
            raise NotServingError(f"the cluster is lost ({reason}) and does not come back: {error}") from error
        self._progress = replace(self._progress, news="")

    # ---- meanwhile ----

    async def _tick(self) -> None:
        """Write what is done, look at the engines, say how far the job is."""
        looked = time.monotonic()
        tokens, since = self.checkpoint.totals.completion_tokens, looked
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if self.checkpoint.is_due(self.checkpoint_s):
                await asyncio.to_thread(self.checkpoint.flush)
            if now - looked >= _LOOK_S:
                looked = now
                width = await self._full()
                self._width = self.concurrency or width
                self._freed.set()
                total = self.checkpoint.totals.completion_tokens
                self._progress = replace(self._progress, tokens_per_s=(total - tokens) / (now - since))
            self._report()

    def _report(self) -> None:
        totals = self.checkpoint.totals
        self._progress = replace(
            self._progress, done=totals.done, errors=totals.errors, completion_tokens=totals.completion_tokens
        )
        self.on_progress(self._progress)


def _take(rows: Iterator[InputRow]) -> list[InputRow]:
    return list(itertools.islice(rows, _READ_AHEAD))


async def _beside(work: Callable[..., _T], *args: object, what: str) -> _T:
    return await wait_for(asyncio.to_thread(work, *args), _READ_S, what)


def _error_of(number: int, custom_id: str | None, error: Exception) -> Entry:
    return Entry(number, False, refused(number, custom_id, error))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
