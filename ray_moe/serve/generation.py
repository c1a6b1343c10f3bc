"""Generations as text: the cluster as one Serve replica knows it, and requests that end when their reader does."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from ray_moe.cluster import connect
from ray_moe.deadline import Deadline, wait_for
from ray_moe.engine.records import StreamRecord
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.steering import TokenLogprobs
from ray_moe.errors import ConfigError, DeadlineError, NotServingError, PeerLostError, RequestError
from ray_moe.guidance import Grammars
from ray_moe.sdk import Client
from ray_moe.serve.tools import ToolForm
from ray_moe.text import TextStream, load_tokenizer

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)

# How long a replica looks for its cluster before it answers 504.
_LOOK_UP_S = 60.0


@dataclass(frozen=True)
class Backend:
    """A running cluster and its model, as found at `since` (Unix seconds)."""

    client: Client
    tokenizer: PreTrainedTokenizerBase
    model: str
    release_id: str
    since: int

    @property
    def request_deadline_s(self) -> float:
        return self.client.directory.config.request_deadline_s

    @property
    def metrics_every_s(self) -> float:
        return self.client.directory.config.metrics_every_s

    def room_after(self, prompt_tokens: int) -> int:
        """How many tokens can follow a prompt of this size: positions end, and so does a peer's KV cache.

        The last token is delivered, not computed on, so it needs no KV.
        """
        config, facts = self.client.directory.config, self.client.directory.facts
        return min(facts.max_positions, config.kv_blocks * config.block_size + 1) - prompt_tokens

    @cached_property
    def grammars(self) -> Grammars:
        """For refusing what cannot be followed, and for the bytes of tokens; the peers compile for themselves."""
        end = self.tokenizer.eos_token_id
        return Grammars(lambda: self.tokenizer, self.client.directory.facts.vocab_size, () if end is None else (end,))

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How its chat template writes calls of tools; None when it writes none that can be read."""
        return ToolForm.of(self.tokenizer)


class Door(Protocol):
    """How a replica finds its cluster. They block, and raise `NotServingError`, `PeerLostError`, `DeadlineError`."""

    def find(self) -> Backend:
        """Look the cluster up; also raises `ConfigError` for a model without a tokenizer."""

    def knock(self) -> None:
        """Return when the cluster says that it serves."""


@dataclass(frozen=True)
class ClusterDoor:
    """The cluster of this name on this Ray cluster; its model is shown as `model_name`."""

    cluster_name: str
    model_name: str | None = None

    def find(self) -> Backend:
        cluster = connect(self.cluster_name)
        directory = cluster.directory()
        tokenizer = load_tokenizer(directory.model_path, trust_remote_code=directory.config.trust_remote_code)
        name = self.model_name or Path(directory.config.model).name
        return Backend(Client(directory), tokenizer, name, cluster.placement().release_id, int(time.time()))

    def knock(self) -> None:
        connect(self.cluster_name).directory()


class Backends:
    """The current `Backend`. A cluster that failed is looked up again by the next request, so that one which comes back
    is served again without a redeployment."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._current: Backend | None = None
        self._lookup: asyncio.Task[Backend] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        # One thread: tokenizers are not made to be used by several at a time.
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")

    async def current(self) -> Backend:
        """Raises `NotServingError`, `PeerLostError` or `DeadlineError` while the cluster cannot serve."""
        if self._current is not None:
            return self._current
        if self._lookup is None or self._lookup.done():
            self._lookup = self.spawn(self._look_up())
        # Shared by all who wait: one of them who gives up must not cancel it.
        return await asyncio.shield(self._lookup)

    async def check(self) -> Backend:
        """The backend, after the cluster has said that it serves; raises as `current`."""
        backend = await self.current()
        try:
            await wait_for(asyncio.to_thread(self._door.knock), _LOOK_UP_S, "asking the cluster")
        except (PeerLostError, NotServingError):
            self.failed(backend)
            raise
        return backend

    async def _look_up(self) -> Backend:
        try:
            self._current = await wait_for(asyncio.to_thread(self._door.find), _LOOK_UP_S, "looking up the cluster")
        except ConfigError as error:
            # The cluster's own configuration, not the request's.
            raise NotServingError(f"the model cannot be served over HTTP: {error}") from error
        return self._current

    def failed(self, backend: Backend) -> None:
        """A request failed because the cluster, or a part of it, is gone."""
        if self._current is backend:
            self._current = None

    async def tokenize(self, backend: Backend, work: Callable[[], _T]) -> _T:
        """Run `work`, which uses the backend's tokenizer, beside the event loop: a prompt may be megabytes."""
        loop = asyncio.get_running_loop()
        return await wait_for(
            loop.run_in_executor(self._tokenizing, work), backend.request_deadline_s, "tokenizing the prompt"
        )

    async def name_tokens(self, backend: Backend) -> None:
        """Make the bytes of tokens known: for a large vocabulary, a second's work the first time."""
        work = asyncio.to_thread(backend.grammars.token_bytes, 0)
        await wait_for(work, backend.request_deadline_s, "reading the tokenizer")

    async def compile(self, backend: Backend, grammar: str) -> None:
        """Raises `RequestError` for a grammar that the peers will not be able to follow. What is
        refused here costs them nothing."""
        await wait_for(
            asyncio.to_thread(backend.grammars.compile, grammar), backend.request_deadline_s, "compiling the format"
        )

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run to the end whatever becomes of the caller. The loop itself holds tasks weakly.

        In a context of its own: Ray keeps there which request is running, and cancelling a request cancels every actor
        call that was made in its name, the one that ends its generation and the polls that it shares among them.
        """
        task = asyncio.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@dataclass(frozen=True)
class Step:
    """What is new after one engine step: text that is certain (may be empty), its tokens with their log probabilities
    where these were asked for, all tokens so far, why it ended."""

    text: str
    completion_tokens: int
    finish_reason: str | None
    tokens: tuple[tuple[int, TokenLogprobs], ...] = ()


class TextGeneration:
    """One generation as text, to be closed by whoever started it: that frees its KV within a step if it still runs.

    It runs in a task of its own, because a reader may be cancelled anywhere and must still be able to end it. With
    `keep_special` special tokens are text, all but the one that ends it. It ends with `DeadlineError` at `deadline`.

    A `patient` reader wants the first step and the last: what comes between them is not looked at until then, unless
    there are stop strings to look for.
    """

    patient = False

    def __init__(
        self,
        backends: Backends,
        backend: Backend,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        keep_special: bool = False,
        deadline: Deadline | None = None,
    ) -> None:
        self.request_id = request_id
        self._backends, self._backend, self._deadline = backends, backend, deadline
        self._text = TextStream(backend.tokenizer, params.stop, keep_special=keep_special)
        self._keep_special, self._stops = keep_special, bool(params.stop)
        self._arrived: deque[StreamRecord | None] = deque()  # None is the last
        self.latest: StreamRecord | None = None  # that was read
        self._news = asyncio.Event()
        self._pump = backends.spawn(self._run(prompt_ids, params))

    async def steps(self) -> AsyncIterator[Step]:
        """Steps up to and including the one with a finish reason, `stop` when a stop string was found. What came while
        its reader was busy is one step, so that a replica with more streams than it can keep up with says fewer words.

        Raises as `Client.stream`.
        """
        tokens = 0
        while True:
            records = await self._next()
            count, text, reason = self._read(records)
            tokens += count
            scored = [pair for record in records for pair in zip(record.token_ids, record.logprobs, strict=False)]
            yield Step(text, tokens, reason, tuple(scored[:count]))
            if reason is not None:
                return

    def _read(self, records: Sequence[StreamRecord]) -> tuple[int, str, str | None]:
        """Their tokens, up to the one that completed a stop string; the text that is certain after them; why it ended.

        All of them are decoded at once, or one by one where it matters which one completes a stop string.
        """
        reason = records[-1].finish_reason
        tokens = [token for record in records for token in record.token_ids]
        # The token that ends it is counted, and no text.
        said = tokens[:-1] if self._keep_special and reason == "stop" else tokens
        text = "" if self._stops else self._text.push(said)
        for count, token in enumerate(said if self._stops else (), 1):
            text += self._text.push((token,))
            if self._text.stopped:
                return count, text, "stop"
        if reason is not None:
            text += self._text.finish()
        return len(tokens), text, "stop" if self._text.stopped else reason

    async def _next(self) -> list[StreamRecord]:
        """What has arrived, once there is something; an error that follows it is raised the next time."""
        if self._deadline is not None:
            self._deadline.check(self.request_id)
        if not self._arrived:
            await self._wait()
        records: list[StreamRecord] = []
        while self._arrived:
            record = self._arrived[0]
            if record is None or record.finish_reason in ("cancelled", "failed"):
                break
            records.append(record)
            self._arrived.popleft()
        if records:
            self.latest = records[-1]
            return records
        if record is None:
            await self._pump  # raises what ended it
            raise NotServingError(f"{self.request_id} ended without a finish reason")
        if record.finish_reason == "cancelled":
            raise NotServingError(f"{self.request_id} was cancelled by the cluster")
        raise RequestError(f"the output's format became too complex after {record.index} tokens", "response_format")

    async def _wait(self) -> None:
        """Until something has arrived. Raises `DeadlineError`."""
        self._news.clear()
        if self.patient and self._deadline is None:
            await self._news.wait()  # the client has a deadline for each token, and ends its stream then
            return
        seconds = self._backend.request_deadline_s
        if self._deadline is not None:
            seconds = self._deadline.left if self.patient else min(seconds, self._deadline.left)
        try:
            await wait_for(self._news.wait(), seconds, f"next step of {self.request_id}")
        except DeadlineError:
            if self._deadline is not None:
                self._deadline.check(self.request_id)
            raise

    def close(self) -> None:
        """End the generation if it still runs. Returns at once, so that a cancelled task can call it."""
        # Wherever its stream is, it closes: the client then follows the request until no peer has it, and says again
        # that it is to end for as long as tokens come.
        self._pump.cancel()

    async def _run(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        begun = False
        try:
            async for record in self._backend.client.stream(prompt_ids, params, request_id=self.request_id):
                self._arrived.append(record)
                if not (begun and self.patient) or self._stops or record.finish_reason is not None:
                    self._news.set()
                begun = True
        except (PeerLostError, NotServingError):
            self._backends.failed(self._backend)
            raise
        finally:
            self._arrived.append(None)
            self._news.set()
