"""Requests of one peer: admitted, cancelled, handed over to another peer, adopted from one. All on the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ray.actor import ActorHandle
from ray.exceptions import RayError

from ray_moe.actors.mailbox import PostOffice
from ray_moe.config import ClusterConfig
from ray_moe.deadline import ray_await, wait_for
from ray_moe.engine.handover import Departing, take_in, take_out, worth_moving
from ray_moe.engine.loop import EngineLoop
from ray_moe.engine.records import GenerateRequest, Moved, StreamRecord
from ray_moe.engine.request import Request
from ray_moe.engine.sampling import admitted
from ray_moe.errors import DeadlineError, PeerLeavingError, RayMoEError
from ray_moe.guidance import Grammars
from ray_moe.text import load_tokenizer

_T = TypeVar("_T")
# What KV moves at between actors of one host through Ray's object store, to weigh it against computing it again.
KV_BYTES_PER_S = 500e6


class Reception:
    """What stands between clients and an engine loop that serves. `model` is the folder of its tokenizer."""

    def __init__(
        self, config: ClusterConfig, rank: int, loop: EngineLoop, post_office: PostOffice, model: Path
    ) -> None:
        self._config, self._rank, self._loop, self._post_office = config, rank, loop, post_office
        self._eos_ids = frozenset(loop.trunk.eos_token_ids)
        self._grammars = Grammars(
            lambda: load_tokenizer(model, trust_remote_code=config.trust_remote_code),
            loop.trunk.vocab_size,
            self._eos_ids,
        )
        self._compiling: set[str] = set()
        self.admitting = True

    async def submit(self, client: str, request: GenerateRequest) -> None:
        """Queue a request of `client`. Raises `PeerLeavingError`, `RequestError` for an id that runs already or for a
        grammar that cannot be compiled, and why the loop has ended."""
        if not self.admitting:
            raise PeerLeavingError(self._rank)
        self._post_office.open(client, request.request_id)
        wanted = Request(
            request.request_id, request.prompt_ids, admitted(request.params), request.prefix_ids, self._eos_ids
        )
        try:
            if wanted.params.grammar is not None:
                wanted = await self._with_grammar(wanted)
                if wanted.request_id not in self._post_office:  # it was cancelled meanwhile
                    return
                if not self.admitting:
                    raise PeerLeavingError(self._rank)
            self._loop.submit(wanted)
        except RayMoEError:
            self._post_office.close(request.request_id)
            raise

    def cancel(self, request_id: str) -> bool:
        """End a request: its KV is free within one step. False when it does not run here."""
        if request_id not in self._post_office:
            return False
        if request_id in self._compiling:
            view, step = self._loop.view, self._loop.counters.committed_step
            self._post_office.deliver([StreamRecord(request_id, 0, (), step, view.generation, view.epoch, "cancelled")])
        else:
            self._loop.cancel(request_id)
        return True

    # ---- from peer to peer: inverse operations ----

    async def hand_over(self, peers: Sequence[tuple[int, ActorHandle]]) -> int:
        """Admit nothing more, and give every open request to one of `peers`; returns how many were adopted.

        A request that no peer takes goes back to its client, who submits it again with the tokens it has.
        """
        self.admitting = False
        loop, config = self._loop, self._config
        departing = await self._at_boundary(lambda: take_out(loop.scheduler, loop.cache, None, self._is_worth_moving))
        # The longest first, each to the peer that has been given the least.
        given: Counter[int] = Counter()
        actors = dict(peers)
        choices: list[tuple[Departing, int]] = []
        for item in sorted(departing, key=lambda item: -_tokens_left(item)):
            rank = min(actors, key=lambda rank: (given[rank], rank)) if actors else -1
            given[rank] += _tokens_left(item)
            choices.append((item, rank))

        async def offer(item: Departing, rank: int) -> bool:
            client = self._post_office.client_of(item.request_id)
            if client is None:  # it has been given up meanwhile
                return False
            taken = False
            if rank >= 0:
                try:
                    taken = await ray_await(
                        actors[rank].adopt.remote(client, item),
                        config.step_deadline_s,
                        f"adoption of a request by rank {rank}",
                    )
                except (RayError, RayMoEError):
                    taken = False  # the client submits it again, wherever it is welcome
            self._post_office.deliver([Moved(item.request_id, rank if taken else None)])
            return taken

        return sum(await asyncio.gather(*(offer(item, rank) for item, rank in choices)))

    async def adopt(self, client: str, departing: Departing) -> bool:
        """Go on with a request of another peer under the same id, for the same client; False when this peer leaves.

        Raises `RequestError` when it can never be served here.
        """
        if not self.admitting:
            return False
        loop = self._loop
        if departing.request.params.grammar is not None:
            departing = replace(departing, request=await self._with_grammar(departing.request))
            if not self.admitting:
                return False
        self._post_office.open(client, departing.request_id)
        try:
            await self._at_boundary(lambda: take_in(loop.scheduler, loop.cache, departing))
        except DeadlineError:
            raise  # it may run by now; its client hears of it either way
        except RayMoEError:
            self._post_office.close(departing.request_id)
            raise
        return True

    def readmit(self) -> None:
        """This peer stays after all."""
        self.admitting = True

    # ---- details ----

    async def _with_grammar(self, request: Request) -> Request:
        """The request with its grammar compiled, on a thread of its own: no step waits for it."""
        grammar = request.params.grammar
        assert grammar is not None
        self._compiling.add(request.request_id)
        try:
            compiled = await wait_for(
                asyncio.to_thread(self._grammars.compile, grammar),
                self._config.request_deadline_s,
                f"compiling the grammar of {request.request_id}",
            )
        finally:
            self._compiling.discard(request.request_id)
        return replace(request, grammar=compiled)

    async def _at_boundary(self, work: Callable[[], _T]) -> _T:
        """Run `work` on the loop's thread between two steps; its `RayMoEError` propagates."""
        events = asyncio.get_running_loop()
        done: asyncio.Future[_T] = events.create_future()

        def settle(result: _T | None, error: RayMoEError | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result = work()
            except RayMoEError as error:
                events.call_soon_threadsafe(settle, None, error)
            else:
                events.call_soon_threadsafe(settle, result, None)

        self._loop.post(run)
        return await wait_for(done, self._config.step_deadline_s, f"a step boundary of rank {self._rank}")

    def _is_worth_moving(self, positions: int, kv_bytes: int) -> bool:
        """Replaying takes whole steps; those that this peer has seen say how long they are."""
        counters, config = self._loop.counters, self._config
        if not counters.steps_worked:
            return False
        tokens_per_s = config.max_prefill_tokens * counters.steps_worked / max(counters.seconds_worked, 1e-9)
        return worth_moving(
            positions, kv_bytes, bytes_per_second=KV_BYTES_PER_S, prefill_tokens_per_second=tokens_per_s
        )


def _tokens_left(item: Departing) -> int:
    request = item.request
    return request.params.max_tokens - len(request.prefix_ids)
