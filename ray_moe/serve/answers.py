"""A request prepared, and all its choices generated together, as the parts that replies are made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from ray_moe.deadline import Deadline
from ray_moe.engine.records import StreamRecord
from ray_moe.engine.steering import TokenLogprobs
from ray_moe.serve.asking import Bounds, ToolUse, Work, grammar_of, prompts_of, tool_use, work_of
from ray_moe.serve.generation import Backend, Backends, Step, TextGeneration
from ray_moe.serve.replies import Choice, Part, Scored, Usage
from ray_moe.serve.schema import ChatRequest, CompletionRequest
from ray_moe.serve.tools import ToolReader


async def prepare(backends: Backends, backend: Backend, body: CompletionRequest | ChatRequest, bounds: Bounds) -> Work:
    """What the engine is to do for a request, found beside the event loop: prompts are tokenized, its format compiled.

    Raises `RequestError` for what the model cannot do, or `bounds` do not allow.
    """
    prompts = await backends.tokenize(backend, lambda: prompts_of(backend.tokenizer, body))
    offers_tools = isinstance(body, ChatRequest) and bool(body.offered_tools)
    form = await backends.tokenize(backend, lambda: backend.tool_form) if offers_tools else None
    tools = tool_use(form, body)
    grammar = grammar_of(body, tools)
    work = work_of(body, prompts, backend.room_after(0), bounds, tools, grammar)
    if grammar is not None:
        await backends.compile(backend, grammar)
    if body.likeliest is not None:
        await backends.name_tokens(backend)
    return work


class Answer:
    """One request's generations, to be closed by whoever started it: what still runs then ends within a step.

    `deadline` bounds the whole answer. `begun` and `complete` are for whoever delivers it to say.
    """

    begun = complete = False

    def __init__(
        self, backends: Backends, backend: Backend, work: Work, request_id: str, deadline: Deadline | None = None
    ) -> None:
        self._backends, self._work = backends, work
        several = len(work.prompts) > 1
        self._generations = [
            TextGeneration(
                backends,
                backend,
                f"{request_id}-{place}" if several else request_id,
                prompt,
                params,
                keep_special=work.tools is not None,
                deadline=deadline,
            )
            for place, (prompt, params) in enumerate(zip(work.prompts, work.params, strict=True))
        ]
        self._voices = [_Voice(place, work, backend.grammars.token_bytes) for place in range(len(work.prompts))]
        self._counts = [0] * len(work.prompts)
        self._readers: list[asyncio.Task[None]] = []

    @property
    def usage(self) -> Usage:
        """What has been delivered so far."""
        return Usage(self._work.prompt_tokens, sum(self._counts))

    @property
    def latest(self) -> StreamRecord | None:
        """The last step of any choice that was read; None before the first."""
        found = [one.latest for one in self._generations if one.latest is not None]
        return max(found, key=lambda record: record.step, default=None)

    async def parts(self) -> AsyncIterator[Part]:
        """Parts of all choices as they come, up to the last one's finish reason. Raises as `TextGeneration.steps`."""
        left = len(self._generations)
        async for place, step in self._steps():
            self._counts[place] = step.completion_tokens
            yield self._voices[place].part(step)
            left -= step.finish_reason is not None
            if not left:
                return

    async def whole(self, on_part: Callable[[], None] | None = None) -> list[Choice]:
        """Every choice from its first part to its last; `on_part` is called at each, of which there are few. Raises as
        `parts`."""
        for generation in self._generations:
            generation.patient = True
        choices = [Choice() for _ in self._generations]
        async for part in self.parts():
            if on_part is not None:
                on_part()
            choices[part.choice].add(part)
        return choices

    def close(self) -> None:
        """End what still runs. Returns at once, so that a cancelled task can call it."""
        for reader in self._readers:
            reader.cancel()
        for generation in self._generations:
            generation.close()

    async def _steps(self) -> AsyncIterator[tuple[int, Step]]:
        if len(self._generations) == 1:
            async for step in self._generations[0].steps():
                yield 0, step
            return
        arrived: asyncio.Queue[tuple[int, Step] | Exception] = asyncio.Queue()

        async def read(place: int, generation: TextGeneration) -> None:
            try:
                async for step in generation.steps():
                    arrived.put_nowait((place, step))
            except Exception as error:  # noqa: BLE001 - whoever reads the parts raises it
                arrived.put_nowait(error)

        self._readers = [self._backends.spawn(read(*item)) for item in enumerate(self._generations)]
        while True:
            item = await arrived.get()  # each generation's own deadline ends it
            if isinstance(item, Exception):
                raise item
            yield item


class _Voice:
    """One choice: its steps in, parts out."""

    def __init__(self, choice: int, work: Work, token_bytes: Callable[[int], bytes]) -> None:
        self._choice, self._token_bytes = choice, token_bytes
        self._scores = work.params[choice].logprobs is not None
        self._reader = _reader(work.tools)

    def part(self, step: Step) -> Part:
        text, reason = step.text, step.finish_reason
        calls: tuple[dict[str, Any], ...] = ()
        if self._reader is not None:
            pieces = [*self._reader.push(text), *(self._reader.finish() if reason is not None else ())]
            text, calls = _sorted_out(pieces)
            reason = "tool_calls" if reason == "stop" and self._reader.calls else reason
        scored = tuple(self._scored(*item) for item in step.tokens) if self._scores else None
        return Part(self._choice, text, calls, scored, reason)

    def _scored(self, token: int, found: TokenLogprobs) -> Scored:
        name = self._token_bytes
        return Scored(name(token), found.logprob, tuple((name(other), logprob) for other, logprob in found.top))


def _reader(tools: ToolUse | None) -> ToolReader | None:
    return None if tools is None else ToolReader(tools.form, tools.tools, several=tools.several)


def _sorted_out(pieces: Iterable[str | dict[str, Any]]) -> tuple[str, tuple[dict[str, Any], ...]]:
    text, calls = "", []
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
        else:
            calls.append(piece)
    return text, tuple(calls)
