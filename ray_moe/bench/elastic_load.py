"""Streaming clients that never pause, and what they see: every token with its time, step, generation and epoch.

One process and one event loop hold all clients, so that measuring takes as little of the processors as it can. A seat
streams one request after the other; what a request generates is known beforehand, from a placement that stood still.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

from ray.exceptions import RayError

from ray_moe.deadline import Deadline
from ray_moe.engine.records import StreamRecord
from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import RayMoEError
from ray_moe.sdk import Client

_LOOK_S = 0.01


@dataclass(frozen=True)
class Script:
    """A request and its tokens. One that asks for fewer tokens generates the first of them."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    token_ids: tuple[int, ...] = ()


def scripts(count: int, tokens: int, vocabulary: int, seed: int) -> tuple[Script, ...]:
    """Greedy and seeded requests by turns, with prompts of 8 to 40 tokens."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        prompt = tuple(draw.randrange(10, vocabulary) for _ in range(draw.randrange(8, 41)))
        temperature = 0.0 if number % 2 == 0 else 0.8
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed + number, ignore_eos=True)
        found.append(Script(prompt, params))
    return tuple(found)


async def rehearsed(client: Client, asked: Sequence[Script]) -> tuple[Script, ...]:
    """The scripts with the tokens that the placement generates which serves now. Raises what `Client.generate` does."""
    found = await asyncio.gather(*(client.generate(each.prompt_ids, each.params) for each in asked))
    for generation in found:
        assert len(generation.generations) == 1, "the placement changed during the rehearsal"
    return tuple(replace(each, token_ids=generation.token_ids) for each, generation in zip(asked, found, strict=True))


@dataclass(eq=False)
class Stream:
    """One request as its client saw it. Entry i of the arrays belongs to delivery i, and delivery i to `counts[i]`
    tokens, nearly always one. Times are this process's `perf_counter`."""

    script: int
    length: int
    asked_at: float
    times: array[float] = field(default_factory=lambda: array("d"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    generations: array[int] = field(default_factory=lambda: array("q"))
    epochs: array[int] = field(default_factory=lambda: array("q"))
    counts: array[int] = field(default_factory=lambda: array("q"))
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    finish_reason: str = ""
    failure: str = ""

    def take(self, record: StreamRecord, now: float) -> None:
        if record.token_ids:
            if record.index != len(self.token_ids):
                self.failure = f"index {record.index} came after {len(self.token_ids)} tokens"
            self.times.append(now)
            self.steps.append(record.step)
            self.generations.append(record.generation)
            self.epochs.append(record.epoch)
            self.counts.append(len(record.token_ids))
            self.token_ids.extend(record.token_ids)
        self.finish_reason = record.finish_reason or ""

    @property
    def left(self) -> int:
        return self.length - len(self.token_ids)

    def document(self, origin: float) -> dict[str, Any]:
        """For the file of raw timestamps: times in microseconds, each after the first as its distance from the one
        before; the other columns as [value, how many times in a row], steps as their distances."""
        micros = [round((at - origin) * 1e6) for at in self.times]
        columns = {"generations": self.generations, "epochs": self.epochs, "counts": self.counts}
        return {
            "script": self.script,
            "length": self.length,
            "asked_us": round((self.asked_at - origin) * 1e6),
            "times_us": _distances(micros),
            "steps": _runs(_distances(list(self.steps))),
            **{name: _runs(list(values)) for name, values in columns.items()},
            "finish_reason": self.finish_reason,
            "failure": self.failure,
        }


class Load:
    """`seats` streams at all times between `start` and `finish`. Lengths are drawn, so that ends lie apart."""

    def __init__(
        self, client: Client, asked: Sequence[Script], seats: int, lengths: tuple[int, int], seed: int
    ) -> None:
        self.streams: list[Stream] = []
        self._client, self._scripts, self._lengths = client, asked, lengths
        self._draw = random.Random(seed)
        self._open: dict[int, Stream] = {}
        self._seats = range(seats)
        self._finishing = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._sit(seat)) for seat in self._seats]

    async def finish(self) -> None:
        """Begin no further request, and let those that are open come to their end."""
        self._finishing = True
        await asyncio.gather(*self._tasks)

    async def decoding(self, streams: int, left: int, seconds: float) -> bool:
        """Wait until so many streams have had a token and have `left` to come; False when it takes too long."""
        deadline = Deadline(seconds)
        while sum(bool(each.token_ids) and each.left >= left for each in self._open.values()) < streams:
            if deadline.passed:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def _sit(self, seat: int) -> None:
        first = True
        while not self._finishing:
            number = self._draw.randrange(len(self._scripts))
            low, high = self._lengths
            length = self._draw.randint(low, low + (high - low) * (seat + 1) // len(self._seats) if first else high)
            first = False
            stream = Stream(number, length, perf_counter())
            self.streams.append(stream)
            self._open[seat] = stream
            await self._follow(stream, self._scripts[number])

    async def _follow(self, stream: Stream, script: Script) -> None:
        params = replace(script.params, max_tokens=stream.length)
        try:
            async for record in self._client.stream(script.prompt_ids, params):
                stream.take(record, perf_counter())
        except (RayMoEError, RayError) as error:
            stream.failure = f"{type(error).__name__}: {error}"
            await asyncio.sleep(1.0)  # a cluster that refuses everything is not asked as fast as it can refuse


def _distances(values: list[int]) -> list[int]:
    return values[:1] + [after - before for before, after in pairwise(values)]


def _runs(values: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found
