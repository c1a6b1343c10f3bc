"""How much a replica takes on: so many generations at a time, so many requests waiting, and no more."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass

from ray_moe.deadline import wait_for
from ray_moe.errors import RequestError
from ray_moe.serve.problems import OverloadedError

_LONGEST_RETRY_S = 60.0


@dataclass(frozen=True)
class Capacity:
    """Generations at a time, requests that wait for their turn, and for how long (seconds)."""

    max_concurrent: int = 256
    max_queued: int = 256
    queue_timeout_s: float = 60.0


class Gate:
    """First come, first served. Belongs to one event loop."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.running = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._mean_seconds = 1.0  # of a generation, the latest counting most

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def enter(self, generations: int) -> Place:
        """Room for so many generations of one request, to be given back by `Place.leave`.

        Raises `RequestError` for more than there ever is, `OverloadedError` when the queue is full, `DeadlineError`
        when the turn does not come in time.
        """
        capacity = self.capacity
        if generations > capacity.max_concurrent:
            raise RequestError(
                f"the request asks for {generations} generations; this server runs {capacity.max_concurrent} at a time",
                "n",
            )
        if not self._waiting and self.running + generations <= capacity.max_concurrent:
            return self._let_in(generations)
        if len(self._waiting) >= capacity.max_queued:
            raise OverloadedError(
                f"{self.running} generations run and {len(self._waiting)} requests wait; "
                f"this server takes {capacity.max_concurrent} and {capacity.max_queued}",
                self._retry_s,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (generations, turn)
        self._waiting.append(entry)
        try:
            await wait_for(turn, capacity.queue_timeout_s, "the request's turn in the queue")
        except BaseException:
            if turn.done() and not turn.cancelled():  # its turn came as it gave up
                self._leave(generations)
            else:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                self._call_next()
            raise
        return Place(self, generations)

    def _let_in(self, generations: int) -> Place:
        self.running += generations
        return Place(self, generations)

    def _leave(self, generations: int) -> None:
        self.running -= generations
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting:
            generations, turn = self._waiting[0]
            gave_up = turn.done()  # and has not been here yet to say so
            if not gave_up and self.running + generations > self.capacity.max_concurrent:
                return
            self._waiting.popleft()
            if not gave_up:
                self.running += generations
                turn.set_result(None)

    def _finished(self, seconds: float) -> None:
        self._mean_seconds += (seconds - self._mean_seconds) / 8

    @property
    def _retry_s(self) -> float:
        """When the queue will have moved on by one, as far as the latest generations tell."""
        rate = self.capacity.max_concurrent / max(self._mean_seconds, 1e-3)
        return min(max(1.0, math.ceil((self.queued + 1) / rate)), _LONGEST_RETRY_S)


class Place:
    """One request's room in the gate."""

    def __init__(self, gate: Gate, generations: int) -> None:
        self._gate, self.generations = gate, generations
        self._entered = time.monotonic()
        self._left = False

    def leave(self) -> None:
        """Give the room back; a second time is fine."""
        if not self._left:
            self._left = True
            self._gate._finished(time.monotonic() - self._entered)
            self._gate._leave(self.generations)
