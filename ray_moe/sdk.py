"""The client side of a generation: choose a peer, keep the prompt and what was delivered, be able to go on elsewhere.

Whoever submits (an HTTP replica, a batch driver, a notebook) uses one `Client` for all its requests, since it balances
by the tokens that it has outstanding on each peer.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors.controller import Directory
from ray_moe.deadline import ray_await, ray_stream
from ray_moe.engine.records import GenerateRequest, StreamRecord
from ray_moe.engine.sampling import SamplingParams, admitted
from ray_moe.errors import PeerLostError


@dataclass(frozen=True)
class Generation:
    """A finished generation. `generations` are the placement generations that its steps ran under, in order."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    generations: tuple[int, ...]


class Client:
    """Generates on a cluster. One event loop; not thread-safe."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._outstanding = dict.fromkeys(range(len(directory.peers)), 0)
        self._running: dict[str, int] = {}
        self._turn = itertools.count(os.getpid())

    async def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prefix_ids: Sequence[int] = (),
        peer: int | None = None,
    ) -> AsyncIterator[StreamRecord]:
        """Records of one generation as steps deliver them; an index that was delivered before never comes again.

        `prefix_ids` are tokens that an earlier submission delivered: with the same prompt and seeded `params` the stream
        goes on exactly there. `peer` picks a peer slot by hand. Raises `RequestError` for a request out of bounds,
        `PeerLostError` when a peer dies, `NotServingError`, `DeadlineError`.
        """
        request = GenerateRequest(
            request_id or f"gen-{uuid.uuid4().hex}", tuple(prompt_ids), admitted(params), tuple(prefix_ids)
        )
        chosen = self._choose() if peer is None else peer
        outstanding = len(request.prompt_ids) + params.max_tokens
        self._outstanding[chosen] += outstanding
        self._running[request.request_id] = chosen
        seconds = self.directory.config.request_deadline_s
        position = len(request.prefix_ids)
        try:
            refs = self.directory.peers[chosen].generate.options(num_returns="streaming").remote(request)
            async for record in ray_stream(refs, seconds, f"next token of {request.request_id}"):
                fresh = record.token_ids[max(0, position - record.index) :] if record.token_ids else ()
                if not fresh and record.finish_reason is None:
                    continue
                position += len(fresh)
                self._outstanding[chosen] -= len(fresh)
                outstanding -= len(fresh)
                yield StreamRecord(
                    record.request_id,
                    position - len(fresh),
                    fresh,
                    record.step,
                    record.generation,
                    record.epoch,
                    record.finish_reason,
                )
        except RayActorError as error:
            config = self.directory.config
            raise PeerLostError(f"rank {chosen} of cluster {config.name!r} died", chosen, 0, 0) from error
        finally:
            self._outstanding[chosen] -= outstanding
            del self._running[request.request_id]

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
        if request_id not in self._running:
            return False
        peer: ActorHandle = self.directory.peers[self._running[request_id]]
        return bool(await ray_await(peer.cancel.remote(request_id), 30.0, f"cancel of {request_id}"))

    def _choose(self) -> int:
        """The peer with the fewest outstanding tokens of ours; ties take turns, starting anywhere."""
        start = next(self._turn)
        peers = len(self._outstanding)
        return min(range(peers), key=lambda peer: (self._outstanding[peer], (peer - start) % peers))
