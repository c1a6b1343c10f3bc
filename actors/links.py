"""A client's side of the peers' protocol: a link per peer, and per request the stream that its records make up.

A request can be handed from peer to peer while it runs. Each peer's mailbox keeps its order, but nothing orders two
peers' mailboxes: what the next peer delivers can be fetched before the last of what the previous one delivered, and a
`Moved` before the one that led to it. So records are put in order by their index (`OpenStream`), and stays are counted
per peer, where one that is over before it is known to have begun counts -1 (`Link`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.config import ClusterConfig
from ray_moe.deadline import ray_await
from ray_moe.engine.records import GenerateRequest, Refusal, StreamRecord
from ray_moe.errors import DeadlineError, PeerLostError, RayMoEError


@dataclass(eq=False)
class OpenStream:
    """One request of a client, wherever it runs.

    `wire_id` names its present submission to the peers: each submission has its own, so that whatever an earlier one
    still delivers belongs to nobody. `tokens` are the prefix and everything passed on; `heard_at` (monotonic seconds)
    is when its last record came. It has `ended` once nothing more will be passed on. Once `abandoned` its caller is
    gone, and it is only followed until no peer has it.
    """

    request: GenerateRequest
    heard_at: float
    wire_id: str = ""
    ended: bool = False
    cancelling: bool = False
    abandoned: bool = False
    submitting: bool = False
    resubmission: asyncio.Task[None] | None = None
    tokens: list[int] = field(init=False)
    deliveries: asyncio.Queue[StreamRecord | Refusal] = field(default_factory=asyncio.Queue)
    _early: dict[int, StreamRecord] = field(default_factory=dict)  # by index: they overtook what comes before them
    _last: tuple[int, int, int] = (0, 0, 0)  # step, generation and epoch

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prefix_ids)

    @property
    def owed(self) -> int:
        """Tokens still to compute, if it runs to its max_tokens."""
        if self.abandoned:
            return 0
        return len(self.request.prompt_ids) + self.request.params.max_tokens - len(self.tokens)

    def submission(self, wire_id: str) -> GenerateRequest:
        """The request as a peer that knows nothing of it can go on with it."""
        self.wire_id = wire_id
        self._early.clear()
        return replace(self.request, request_id=wire_id, prefix_ids=tuple(self.tokens))

    def take(self, record: StreamRecord) -> None:
        """Pass on what continues the stream, hold what is ahead of it, drop what it already has."""
        if not record.token_ids and record.finish_reason is not None:  # cancelled: it has no place among the tokens
            self._pass_on(record, ())
            return
        self._early[record.index] = record
        while self._early and min(self._early) <= len(self.tokens):
            following = self._early.pop(min(self._early))
            fresh = following.token_ids[len(self.tokens) - following.index :]
            if fresh or following.finish_reason is not None:
                self._pass_on(following, fresh)

    def end_cancelled(self) -> None:
        """Its caller cancelled it while no peer had it."""
        step, generation, epoch = self._last
        self._pass_on(StreamRecord("", 0, (), step, generation, epoch, "cancelled"), ())

    def refuse(self, error: RayMoEError) -> None:
        """End it with an error; after `DeadlineError` it is its caller who gives it up."""
        self.ended = not isinstance(error, DeadlineError)
        self.deliveries.put_nowait(Refusal(self.request.request_id, error))

    def _pass_on(self, record: StreamRecord, fresh: tuple[int, ...]) -> None:
        position = len(self.tokens)
        self.tokens += fresh
        self.ended = record.finish_reason is not None
        self._last = (record.step, record.generation, record.epoch)
        logprobs = record.logprobs[max(0, len(record.token_ids) - len(fresh)) :]
        name = self.request.request_id
        self.deliveries.put_nowait(replace(record, request_id=name, index=position, token_ids=fresh, logprobs=logprobs))


class Link:
    """One client's connection to one peer, and the submissions (by wire id) that stay there."""

    def __init__(self, rank: int, actor: ActorHandle, config: ClusterConfig) -> None:
        self.rank, self.actor = rank, actor
        self.leaving = False  # it said so itself
        self.polling: asyncio.Task[None] | None = None
        self._config = config
        self._stays: Counter[str] = Counter()

    def arrive(self, wire_id: str) -> None:
        """A stay begins here."""
        self._count(wire_id, 1)

    def depart(self, wire_id: str) -> None:
        """A stay has ended here."""
        self._count(wire_id, -1)

    def forget(self, wire_id: str) -> None:
        del self._stays[wire_id]  # a Counter takes that for what it does not have, too

    def holds(self, wire_id: str) -> bool:
        """Whether more can come from here for this submission."""
        return self._stays[wire_id] > 0

    @property
    def held(self) -> list[str]:
        return [wire_id for wire_id, stays in self._stays.items() if stays > 0]

    @property
    def busy(self) -> bool:
        return any(stays > 0 for stays in self._stays.values())

    @property
    def unused(self) -> bool:
        """Nothing stays here, and nothing is known of a stay that others have yet to speak of."""
        return not self._stays and (self.polling is None or self.polling.done())

    def cancel(self, wire_id: str) -> None:
        """Ask for a submission's end; whether it came shows in what is polled."""
        self.actor.cancel.remote(wire_id)

    async def ask(self, ref: Any, what: str) -> Any:
        """Await a call's answer. Raises what the peer raises, `PeerLostError` when it is dead or does not answer."""
        peer = f"rank {self.rank} of cluster {self._config.name!r}"
        try:
            return await ray_await(ref, self._config.step_deadline_s, what)
        except RayActorError as error:
            raise PeerLostError(f"{peer} died", self.rank, 0, 0) from error
        except DeadlineError as error:
            raise PeerLostError(f"{peer} does not answer: {error}", self.rank, 0, 0) from error

    def _count(self, wire_id: str, stays: int) -> None:
        self._stays[wire_id] += stays
        if self._stays[wire_id] == 0:
            del self._stays[wire_id]
