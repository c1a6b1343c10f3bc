"""The client side of a generation: choose a peer, keep the prompt and what was delivered, be able to go on elsewhere.

Whoever submits (an HTTP replica, a batch driver, a notebook) uses one `Client` for all its requests, since it balances
by the tokens that it has outstanding on each peer.

Peers come and go while streams run. Every poll says who the members are when that has changed: a new one is used at
once, one that leaves gets no new request, and is polled until nothing of ours stays there. A request that moves is
polled where it went; one that nobody took over is submitted again with its tokens as prefix. Callers see none of it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from ray_moe.actors.links import Link, OpenStream
from ray_moe.actors.mailbox import POLL_WAIT_S, Polled
from ray_moe.actors.reports import Directory
from ray_moe.deadline import ray_await
from ray_moe.engine.records import Delivery, GenerateRequest, Members, Moved, Refusal, StreamRecord
from ray_moe.engine.sampling import SamplingParams, admitted
from ray_moe.errors import DeadlineError, NotServingError, PeerLeavingError, PeerLostError, RayMoEError, RequestError
from ray_moe.sdk.experts import Calls, Experts


@dataclass(frozen=True)
class Generation:
    """A finished generation. `generations` and `epochs` are those that its steps ran under, in order."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    generations: tuple[int, ...]
    epochs: tuple[int, ...]


class Client:
    """Generates on a cluster. Belongs to one event loop; not thread-safe."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._name = f"client-{uuid.uuid4().hex}"
        self._links: dict[int, Link] = {}  # by rank: the members, and who left but still has something of ours
        self._members = Members(-1, ())
        self._named: dict[str, OpenStream] = {}  # by the caller's request id
        self._wires: dict[str, OpenStream] = {}  # by wire id; abandoned ones too, until they have ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._look_again_at = 0.0  # for overdue requests
        self._turn = itertools.count(os.getpid())
        self._calls = Calls(self)
        self._learn(directory.members)

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
        stream goes on exactly there. `peer` picks a peer by hand, as an index into the members. Closing the iterator
        cancels the request. Raises `RequestError` out of bounds, `PeerLostError` when a peer dies, `NotServingError`,
        `DeadlineError`.
        """
        name = request_id or f"gen-{uuid.uuid4().hex}"
        if name in self._named:
            raise RequestError(f"request_id {name!r} is already running", "request_id")
        request = GenerateRequest(name, tuple(prompt_ids), admitted(params), tuple(prefix_ids))
        opened = self._named[name] = OpenStream(request, time.monotonic())
        finished = False
        try:
            await self._place(opened, None if peer is None else self._link_of(peer))
            while not finished:
                item = await opened.deliveries.get()  # whatever polls refuses it when its deadline passes
                if isinstance(item, Refusal):
                    raise item.error
                finished = item.finish_reason is not None
                yield item
        finally:
            self._close(opened)

    def _link_of(self, peer: int) -> Link:
        ranks = self._members.ranks
        if not 0 <= peer < len(ranks):
            raise RequestError(f"peer must be in [0, {len(ranks)}), found {peer}; members are {list(ranks)}", "peer")
        return self._links[ranks[peer]]

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
        epochs: list[int] = []
        name, reason = request_id or f"gen-{uuid.uuid4().hex}", "cancelled"
        async for record in self.stream(prompt_ids, params, request_id=name, prefix_ids=prefix_ids, peer=peer):
            tokens += record.token_ids
            if record.token_ids:
                _note(generations, record.generation)
                _note(epochs, record.epoch)
            reason = record.finish_reason or reason
        return Generation(name, tuple(tokens), reason, tuple(generations), tuple(epochs))

    async def cancel(self, request_id: str) -> bool:
        """End a request of this client; its KV is free within one step. False when it is not running."""
        opened = self._named.get(request_id)
        if opened is None:
            return False
        # First the flag, then the calls: a request that moves meanwhile is cancelled where it arrives.
        opened.cancelling = True
        asked = (
            link.ask(link.actor.cancel.remote(opened.wire_id), f"cancel of {request_id}") for link in self._at(opened)
        )
        moving = opened.resubmission is not None and not opened.resubmission.done()
        opened.cancelling = any(await asyncio.gather(*asked)) or moving
        return opened.cancelling

    def experts(self, layer: int) -> Experts:
        """One MoE layer of the cluster, to be called by itself; `ConfigError` for a layer without routed experts."""
        return Experts(self._calls, layer)

    @property
    def admitting(self) -> dict[int, ActorHandle]:
        """The peers that take new work, by rank, as far as this client knows."""
        links = (self._links[rank] for rank in self._members.ranks)
        return {link.rank: link.actor for link in links if not link.leaving}

    # ---- placing a request ----

    async def _place(self, opened: OpenStream, link: Link | None = None) -> None:
        """Submit to `link`, else to the best peer; to another one when that peer is leaving or has left."""
        tried: set[int] = set()
        while True:
            link = link or self._choose(tried)
            try:
                await self._submit(opened, link)
                return
            except (PeerLeavingError, PeerLostError) as error:
                if link.rank in self._members.ranks:
                    await self.refresh()
                if isinstance(error, PeerLostError):
                    if link.rank in self._members.ranks:
                        raise  # it has not left: it died
                    self._cancel_everywhere(opened.wire_id)  # it may have admitted the request, and handed it over
                link.leaving = True
                tried.add(link.rank)
                link = None

    async def _submit(self, opened: OpenStream, link: Link) -> None:
        name, wire_id = opened.request.request_id, f"{opened.request.request_id}~{uuid.uuid4().hex[:12]}"
        submission = opened.submission(wire_id)
        self._wires[wire_id] = opened
        link.arrive(wire_id)
        opened.submitting = True
        answer = self._spawn(link.ask(link.actor.submit.remote(self._name, submission), f"submit of {name}"))
        try:
            await asyncio.shield(answer)
        except (RequestError, NotServingError, PeerLostError):
            if wire_id not in self._wires:
                return  # the answer was lost, the request was not: it has moved on since
            self._forget(wire_id)
            raise
        except asyncio.CancelledError:
            # Whoever stops waiting for the answer may leave a request that was admitted: `_close` cancels it, and it is
            # followed like any other unless the answer, when it comes, says that it never was.
            answer.add_done_callback(partial(self._settle, link, wire_id))
            raise
        finally:
            opened.submitting = False
        if opened.cancelling:
            link.cancel(wire_id)
        self._keep_polling(link)

    def _settle(self, link: Link, wire_id: str, answer: asyncio.Task[None]) -> None:
        if not answer.cancelled() and answer.exception() is not None:
            self._forget(wire_id)
        elif wire_id in self._wires:
            link.cancel(wire_id)  # the one before may have overtaken the submission: Ray orders no two calls here

    def _choose(self, tried: set[int]) -> Link:
        """The peer with the fewest outstanding tokens of ours; ties take turns, starting anywhere."""
        links = [self._links[rank] for rank in self._members.ranks if rank not in tried]
        links = [link for link in links if not link.leaving]
        if not links:
            name, ranks = self.directory.config.name, list(self._members.ranks)
            raise NotServingError(f"no peer of cluster {name!r} admits requests: ranks {ranks} are leaving or gone")
        start = next(self._turn)
        outstanding = [sum(self._wires[wire_id].owed for wire_id in link.held) for link in links]
        return links[min(range(len(links)), key=lambda place: (outstanding[place], (place - start) % len(links)))]

    def _close(self, opened: OpenStream) -> None:
        """The caller is done with a request. What still runs is cancelled, and followed until it has ended."""
        del self._named[opened.request.request_id]
        if opened.resubmission is not None:
            opened.resubmission.cancel()
        opened.abandoned, opened.heard_at = True, time.monotonic()
        for link in self._at(opened):
            link.cancel(opened.wire_id)
            if link.polling is None:  # one that was cancelled belongs to an event loop that is closing
                self._keep_polling(link)

    def _at(self, opened: OpenStream) -> list[Link]:
        return [link for link in self._links.values() if link.holds(opened.wire_id)]

    def _forget(self, wire_id: str) -> None:
        self._wires.pop(wire_id, None)
        for link in self._links.values():
            link.forget(wire_id)

    # ---- what the peers deliver ----

    def _keep_polling(self, link: Link) -> None:
        if link.polling is None or link.polling.done():
            link.polling = self._spawn(self._poll(link))

    async def _poll(self, link: Link) -> None:
        """Fetch until nothing of ours stays there."""
        config = self.directory.config
        wait = min(POLL_WAIT_S, config.step_deadline_s / 2)  # so that a peer which hangs is noticed in time
        try:
            while link.busy:
                polled: Polled = await link.ask(
                    link.actor.poll.remote(self._name, wait, self._members.version), f"poll of rank {link.rank}"
                )
                if polled.members is not None:
                    self._learn(polled.members)
                now = time.monotonic()
                for item in polled.items:
                    self._sort(link, item, now)
                self._refuse_overdue(now)
        except (RayMoEError, RayError) as error:
            # A submission whose answer is still to come hears of it by that answer.
            lost = [wire_id for wire_id in link.held if not self._wires[wire_id].submitting]
            link.polling = None
            await self._lose(link, lost, error)
        else:
            link.polling = None
        self._prune()

    def _sort(self, link: Link, item: Delivery, now: float) -> None:
        opened = self._wires.get(item.request_id)
        if opened is None:  # of a submission that is over, or was given up
            return
        leaving = isinstance(item, Refusal) and isinstance(item.error, PeerLeavingError)
        if isinstance(item, Moved) or leaving:
            link.depart(item.request_id)
            self._follow(opened, item.rank if isinstance(item, Moved) else None)
            return
        opened.heard_at = now
        if isinstance(item, Refusal):
            opened.refuse(item.error)
        else:
            opened.take(item)
        if opened.ended:
            self._forget(item.request_id)
        elif opened.abandoned or opened.cancelling:
            link.cancel(item.request_id)  # it still runs: what was said before was lost, or is on its way

    def _follow(self, opened: OpenStream, rank: int | None) -> None:
        """A stay has ended, and another begins on `rank`, if any."""
        if rank is not None and rank not in self._links:
            self._spawn(self._follow_to_stranger(opened, opened.wire_id, rank))
            return
        if rank is not None:
            link = self._links[rank]
            link.arrive(opened.wire_id)
            if link.holds(opened.wire_id):
                if opened.cancelling or opened.abandoned:
                    link.cancel(opened.wire_id)
                self._keep_polling(link)
        if not self._at(opened):
            self._start_over(opened)

    async def _follow_to_stranger(self, opened: OpenStream, wire_id: str, rank: int) -> None:
        await self.refresh()
        if wire_id not in self._wires:
            return
        if rank in self._links:
            self._follow(opened, rank)
        else:
            self._start_over(opened)

    def _start_over(self, opened: OpenStream) -> None:
        """No peer that we know of has the request, or one has left with a part of it: go on from what was passed on."""
        self._forget(opened.wire_id)
        self._cancel_everywhere(opened.wire_id)  # a peer may have adopted it without anybody hearing of that
        if opened.abandoned:
            return
        if opened.cancelling:
            opened.end_cancelled()
        else:
            opened.resubmission = self._spawn(self._resubmit(opened))

    async def _resubmit(self, opened: OpenStream) -> None:
        try:
            await self._place(opened)
        except (RayMoEError, RayError) as error:
            opened.refuse(error if isinstance(error, RayMoEError) else NotServingError(str(error)))

    def _cancel_everywhere(self, wire_id: str) -> None:
        for link in self._links.values():
            link.cancel(wire_id)

    async def _lose(self, link: Link, lost: list[str], error: RayMoEError | RayError) -> None:
        """A peer cannot be polled. Requests go on elsewhere if it has left, and end with its name if it is lost."""
        if isinstance(error, PeerLostError):
            await self.refresh()
        left = isinstance(error, PeerLostError) and link.rank not in self._members.ranks
        ours = error if isinstance(error, RayMoEError) else NotServingError(f"rank {link.rank}: {error}")
        for wire_id in lost:
            opened = self._wires.get(wire_id)
            if opened is None:
                continue
            if left:
                self._start_over(opened)
            else:
                self._forget(wire_id)
                opened.refuse(ours)

    def _refuse_overdue(self, now: float) -> None:
        """One deadline for all requests, looked at between polls: a timer per token would cost more than the token."""
        seconds = self.directory.config.request_deadline_s
        if now < self._look_again_at:
            return
        self._look_again_at = now + seconds / 100
        for wire_id, opened in list(self._wires.items()):
            if now - opened.heard_at <= seconds:
                continue
            opened.heard_at = now
            if opened.abandoned:
                self._forget(wire_id)
            else:
                opened.refuse(DeadlineError(f"next token of {opened.request.request_id}", seconds))

    # ---- who the peers are ----

    def _learn(self, members: Members) -> None:
        if members.version <= self._members.version:
            return
        self._members = members
        for rank, actor in members.peers:
            self._links.setdefault(rank, Link(rank, actor, self.directory.config)).leaving = False
        self._prune()

    def _prune(self) -> None:
        gone = [rank for rank, link in self._links.items() if link.unused and rank not in self._members.ranks]
        for rank in gone:
            del self._links[rank]

    async def refresh(self) -> None:
        """Ask the controller who the members are; what is known stays as it is when it cannot say."""
        controller, seconds = self.directory.controller, self.directory.config.step_deadline_s
        if controller is None:
            return
        try:
            self.directory = await ray_await(controller.directory.remote(), seconds, "directory")
        except (RayMoEError, RayError):
            return  # a cluster that has lost a peer, or is over: whoever asked knows only that nobody has left
        self._learn(self.directory.members)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """The event loop holds its tasks weakly, so they are kept here until they are done."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _note(seen: list[int], number: int) -> None:
    if seen[-1:] != [number]:
        seen.append(number)
