"""The client side of a generation: choose a peer, keep the prompt and what was delivered, be able to go on elsewhere.

Whoever submits (an HTTP replica, a batch driver, a notebook) uses one `Client` for all its requests, since it balances
by the tokens that it has outstanding on each peer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from ray_moe.actors.mailbox import POLL_WAIT_S
from ray_moe.actors.reports import Directory
from ray_moe.deadline import ray_await, wait_for
from ray_moe.engine.records import Delivery, GenerateRequest, Refusal, StreamRecord
from ray_moe.engine.sampling import SamplingParams, admitted
from ray_moe.errors import NotServingError, PeerLostError, RayMoEError, RequestError


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
                item = await wait_for(
                    deliveries.get(), self.directory.config.request_deadline_s, f"next token of {request.request_id}"
                )
                if isinstance(item, Refusal):
                    finished = True
                    raise item.error
                fresh = item.token_ids[max(0, position - item.index) :]
                finished = item.finish_reason is not None
                if fresh or finished:
                    yield replace(item, index=position, token_ids=fresh)
                    position += len(fresh)
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


class _Link:
    """One client's connection to one peer: submits its requests, polls for all of them together, sorts what comes."""

    def __init__(self, rank: int, actor: ActorHandle, client: str, directory: Directory) -> None:
        self.outstanding = 0
        self._rank, self._actor, self._client, self._directory = rank, actor, client, directory
        self._deliveries: dict[str, asyncio.Queue[Delivery]] = {}
        self._owed: dict[str, int] = {}
        self._polling: asyncio.Task[None] | None = None

    async def submit(self, request: GenerateRequest) -> asyncio.Queue[Delivery]:
        """Send a request; its deliveries come through the queue. Raises what the peer raises at once."""
        if request.request_id in self._deliveries:
            raise RequestError(f"request_id {request.request_id!r} is already running", "request_id")
        queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self._deliveries[request.request_id] = queue
        self._owe(request.request_id, len(request.prompt_ids) + request.params.max_tokens - len(request.prefix_ids))
        try:
            await self._ask(self._actor.submit.remote(self._client, request), f"submit of {request.request_id}")
        except BaseException as error:
            # Whoever stops waiting for the answer (a cancelled task) may leave a request that has been admitted.
            self.forget(request, cancel=not isinstance(error, RayMoEError))
            raise
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        return queue

    def forget(self, request: GenerateRequest, *, cancel: bool) -> None:
        """The caller is done with a request; `cancel` when the peer is not."""
        if self._deliveries.pop(request.request_id, None) is None:
            return
        self.outstanding -= self._owed.pop(request.request_id)
        if cancel:
            self._actor.cancel.remote(request.request_id)

    def runs(self, request_id: str) -> bool:
        return request_id in self._deliveries

    async def cancel(self, request_id: str) -> bool:
        return bool(await self._ask(self._actor.cancel.remote(request_id), f"cancel of {request_id}"))

    async def _poll(self) -> None:
        """Fetch until no request is left. When the peer is lost, every request of this link ends with its name."""
        try:
            while self._deliveries:
                for item in await self._ask(self._actor.poll.remote(self._client), f"poll of rank {self._rank}"):
                    self._sort(item)
        except (RayMoEError, RayError) as error:
            ours = error if isinstance(error, RayMoEError) else NotServingError(f"rank {self._rank}: {error}")
            for request_id, queue in self._deliveries.items():
                queue.put_nowait(Refusal(request_id, ours))

    def _sort(self, item: Delivery) -> None:
        queue = self._deliveries.get(item.request_id)
        if queue is None:
            return
        if isinstance(item, StreamRecord):
            self._owe(item.request_id, -len(item.token_ids))
        queue.put_nowait(item)

    def _owe(self, request_id: str, tokens: int) -> None:
        self.outstanding += tokens
        self._owed[request_id] = self._owed.get(request_id, 0) + tokens

    async def _ask(self, ref: Any, what: str) -> Any:
        config = self._directory.config
        try:
            return await ray_await(ref, config.step_deadline_s + POLL_WAIT_S, what)
        except RayActorError as error:
            raise PeerLostError(f"rank {self._rank} of cluster {config.name!r} died", self._rank, 0, 0) from error
