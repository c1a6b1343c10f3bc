"""The client side of a generation: choose a peer, keep the prompt and what was delivered, be able to go on elsewhere.

Whoever submits (an HTTP replica, a batch driver, a notebook) uses one `Client` for all its requests, since it balances
by the tokens that it has outstanding on each peer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from ray_moe.actors.mailbox import POLL_WAIT_S
from ray_moe.actors.reports import Directory
from ray_moe.deadline import ray_await
from ray_moe.engine.records import Delivery, GenerateRequest, Refusal, StreamRecord
from ray_moe.engine.sampling import SamplingParams, admitted
from ray_moe.errors import DeadlineError, NotServingError, PeerLostError, RayMoEError, RequestError


@dataclass(frozen=True)
class Generation:
    """A finished generation. `generations` are the placement generations that its steps ran under, in order."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    generations: tuple[int, ...]


class Client:
    """Generates on a cluster. Belongs to one event loop; not thread-safe."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        name = f"client-{uuid.uuid4().hex}"
        self._links = [_Link(rank, actor, name, directory) for rank, actor in enumerate(directory.peers)]
        self._turn = itertools.count(os.getpid())

    async def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prefix_ids: Sequence[int] = (),
        peer: int | None = None,
    ) -> AsyncGenerator[StreamRecord, None]:
        """Records of one generation as steps deliver them; an index that was delivered before never comes again.

        `prefix_ids` are tokens that an earlier submission delivered: with the same prompt and seeded `params` the
        stream goes on exactly there. `peer` picks a peer slot by hand. Closing the iterator cancels the request. Raises
        `RequestError` out of bounds, `PeerLostError` when a peer dies, `NotServingError`, `DeadlineError`.
        """
        request = GenerateRequest(
            request_id or f"gen-{uuid.uuid4().hex}", tuple(prompt_ids), admitted(params), tuple(prefix_ids)
        )
        link = self._links[self._choose() if peer is None else peer]
        deliveries = await link.submit(request)
        position, finished = len(request.prefix_ids), False
        try:
            while not finished:
                item = await deliveries.get()  # the link refuses it when its deadline passes
                if isinstance(item, Refusal):
                    finished = not isinstance(item.error, DeadlineError)
                    raise item.error
                finished = item.finish_reason is not None
                if item.index != position:
                    fresh = item.token_ids[max(0, position - item.index) :]
                    item = replace(item, index=position, token_ids=fresh)
                if item.token_ids or finished:
                    position += len(item.token_ids)
                    yield item
        finally:
            link.forget(request, cancel=not finished)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prefix_ids: Sequence[int] = (),
        peer: int | None = None,
    ) -> Generation:
        """The whole generation at once; `token_ids` do not repeat `prefix_ids`. Raises as `stream`."""
        tokens: list[int] = []
        generations: list[int] = []
        name, reason = request_id or f"gen-{uuid.uuid4().hex}", "cancelled"
        async for record in self.stream(prompt_ids, params, request_id=name, prefix_ids=prefix_ids, peer=peer):
            tokens += record.token_ids
            if record.token_ids and (not generations or generations[-1] != record.generation):
                generations.append(record.generation)
            reason = record.finish_reason or reason
        return Generation(name, tuple(tokens), reason, tuple(generations))

    async def cancel(self, request_id: str) -> bool:
        """End a request of this client; its KV is free within one step. False when it is not running."""
        for link in self._links:
            if link.runs(request_id):
                return await link.cancel(request_id)
        return False

    def _choose(self) -> int:
        """The peer with the fewest outstanding tokens of ours; ties take turns, starting anywhere."""
        start, peers = next(self._turn), len(self._links)
        return min(range(peers), key=lambda peer: (self._links[peer].outstanding, (peer - start) % peers))


@dataclass
class _Open:
    """One request of a link: where its deliveries go, the tokens still to come, when the last delivery came.

    `wire_id` names this submission to the peer: a caller may use a request id again while the peer still ends the last
    request of that name.
    """

    wire_id: str
    deliveries: asyncio.Queue[Delivery]
    owed: int
    heard_at: float


class _Link:
    """One client's connection to one peer: submits its requests, polls for all of them together, sorts what comes."""

    def __init__(self, rank: int, actor: ActorHandle, client: str, directory: Directory) -> None:
        self._rank, self._actor, self._client, self._config = rank, actor, client, directory.config
        self._open: dict[str, _Open] = {}
        self._names: dict[str, str] = {}  # request id by wire id
        self._polling: asyncio.Task[None] | None = None

    @property
    def outstanding(self) -> int:
        """Tokens that this link's requests have yet to compute, if each runs to its max_tokens."""
        return sum(request.owed for request in self._open.values())

    async def submit(self, request: GenerateRequest) -> asyncio.Queue[Delivery]:
        """Send a request; its deliveries come through the queue. Raises what the peer raises at once."""
        name = request.request_id
        if name in self._open:
            raise RequestError(f"request_id {name!r} is already running", "request_id")
        owed = len(request.prompt_ids) + request.params.max_tokens - len(request.prefix_ids)
        opened = _Open(f"{name}~{uuid.uuid4().hex[:12]}", asyncio.Queue(), owed, time.monotonic())
        self._open[name], self._names[opened.wire_id] = opened, name
        try:
            submission = replace(request, request_id=opened.wire_id)
            await self._ask(self._actor.submit.remote(self._client, submission), f"submit of {name}")
        except BaseException as error:
            # Whoever stops waiting for the answer (a cancelled task, a deadline) may leave a request that was admitted.
            refused = isinstance(error, (RequestError, NotServingError, PeerLostError))
            self.forget(request, cancel=not refused)
            raise
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        return opened.deliveries

    def forget(self, request: GenerateRequest, *, cancel: bool) -> None:
        """The caller is done with a request; `cancel` when the peer is not."""
        opened = self._open.pop(request.request_id, None)
        if opened is None:
            return
        del self._names[opened.wire_id]
        if cancel:
            self._actor.cancel.remote(opened.wire_id)

    def runs(self, request_id: str) -> bool:
        return request_id in self._open

    async def cancel(self, request_id: str) -> bool:
        wire_id = self._open[request_id].wire_id
        return bool(await self._ask(self._actor.cancel.remote(wire_id), f"cancel of {request_id}"))

    async def _poll(self) -> None:
        """Fetch until no request is left. When the peer is lost, every request of this link ends with its name."""
        wait = min(POLL_WAIT_S, self._config.step_deadline_s / 2)  # so that a peer which hangs is noticed in time
        try:
            while self._open:
                items = await self._ask(self._actor.poll.remote(self._client, wait), f"poll of rank {self._rank}")
                now = time.monotonic()
                for item in items:
                    self._sort(item, now)
                self._refuse_overdue(now)
        except (RayMoEError, RayError) as error:
            ours = error if isinstance(error, RayMoEError) else NotServingError(f"rank {self._rank}: {error}")
            for name, opened in self._open.items():
                opened.deliveries.put_nowait(Refusal(name, ours))

    def _sort(self, item: Delivery, now: float) -> None:
        name = self._names.get(item.request_id)
        if name is None:  # of a submission that its caller has given up
            return
        opened, item = self._open[name], replace(item, request_id=name)
        if isinstance(item, StreamRecord):
            opened.owed -= len(item.token_ids)
        opened.heard_at = now
        opened.deliveries.put_nowait(item)

    def _refuse_overdue(self, now: float) -> None:
        """One deadline for all requests, looked at once per poll: a timer per token would cost more than the token."""
        seconds = self._config.request_deadline_s
        for name, opened in self._open.items():
            if now - opened.heard_at > seconds:
                opened.heard_at = now
                opened.deliveries.put_nowait(Refusal(name, DeadlineError(f"next token of {name}", seconds)))

    async def _ask(self, ref: Any, what: str) -> Any:
        peer = f"rank {self._rank} of cluster {self._config.name!r}"
        try:
            return await ray_await(ref, self._config.step_deadline_s, what)
        except RayActorError as error:
            raise PeerLostError(f"{peer} died", self._rank, 0, 0) from error
        except DeadlineError as error:
            raise PeerLostError(f"{peer} does not answer: {error}", self._rank, 0, 0) from error
