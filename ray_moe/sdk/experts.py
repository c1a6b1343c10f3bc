"""Experts as a service: one MoE layer of a running cluster, called by somebody else's model code.

    hidden [T, D], topk_ids and topk_weights [T, K]  ->  a bound handle from the routing actor  ->  a peer, whose next
    step runs it together with all other calls of that layer  ->  gate-weighted sums [T, D], combined once

The caller has a router and a residual stream of its own; gates are applied as they come, never renormalised.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError
from torch import Tensor

from ray_moe.actors.calls import LayerOutput, Rows
from ray_moe.actors.remote import find_routing
from ray_moe.dataplane.handle import DispatchHandle
from ray_moe.deadline import Deadline, ray_await
from ray_moe.errors import (
    ConfigError,
    GenerationError,
    NotServingError,
    PeerLeavingError,
    PeerLostError,
    RayMoEError,
    RequestError,
    StaleHandleError,
)
from ray_moe.routes import Routes

if TYPE_CHECKING:
    from ray_moe.sdk.client import Client

_AGAIN_S = 0.05


@dataclass(frozen=True)
class _Part:
    """What one call brings: at most as many tokens as a unit takes."""

    hidden_TD: Tensor
    topk_ids_TK: Tensor
    topk_weights_TK: Tensor


@dataclass(frozen=True)
class _Sent:
    """A call that a peer has taken in."""

    rank: int
    actor: ActorHandle
    handle_id: str
    num_tokens: int


class Calls:
    """One client's calls of single layers: which peer takes them, and what stays out there."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._routing: ActorHandle | None = None
        self._tokens: Counter[int] = Counter()  # outstanding, by rank

    @property
    def client(self) -> Client:
        return self._client

    async def run(self, layer: int, part: _Part) -> Tensor:
        """One call, whole. It goes on elsewhere, or under the next generation, as long as no peer has computed it."""
        rows, deadline = Rows.of(part.hidden_TD), self._patience()
        while True:
            rank, actor = await self._choose()
            try:
                handle = await self._bind(layer, rank, part, deadline)
                with _Counted(self._tokens, rank, part.hidden_TD.shape[0]):
                    return await self._combined(rank, actor, handle.handle_id, actor.run_call.remote(handle, rows))
            except (StaleHandleError, PeerLeavingError) as error:
                await self._try_again(error, deadline)

    async def send(self, layer: int, part: _Part) -> _Sent:
        """One call, up to the peer that has taken it in."""
        rows, deadline = Rows.of(part.hidden_TD), self._patience()
        while True:
            rank, actor = await self._choose()
            try:
                handle = await self._bind(layer, rank, part, deadline)
                await self._ask(rank, actor.dispatch_call.remote(handle, rows), "dispatch")
            except PeerLeavingError as error:
                await self._try_again(error, deadline)
            else:
                sent = _Sent(rank, actor, handle.handle_id, part.hidden_TD.shape[0])
                self._tokens[rank] += sent.num_tokens
                return sent

    async def fetch(self, sent: _Sent) -> Tensor:
        """What a call that was sent gives, once."""
        try:
            return await self._combined(
                sent.rank, sent.actor, sent.handle_id, sent.actor.combine_call.remote(sent.handle_id)
            )
        finally:
            self._tokens[sent.rank] = max(0, self._tokens[sent.rank] - sent.num_tokens)

    async def _combined(self, rank: int, actor: ActorHandle, handle_id: str, answer: Any) -> Tensor:
        try:
            output: LayerOutput = await self._ask(rank, answer, f"layer call {handle_id}")
        except asyncio.CancelledError:
            actor.abandon_call.remote(handle_id)
            raise
        return output.rows.tensor()

    async def _choose(self) -> tuple[int, ActorHandle]:
        """The peer with the fewest outstanding tokens of our calls."""
        peers = self._client.admitting
        if not peers:
            await self._client.refresh()
            peers = self._client.admitting
        if not peers:
            raise NotServingError(f"no peer of cluster {self._name!r} takes calls: all are leaving or gone")
        rank = min(peers, key=lambda rank: (self._tokens[rank], rank))
        return rank, peers[rank]

    async def _bind(self, layer: int, rank: int, part: _Part, deadline: Deadline) -> DispatchHandle:
        call = uuid.uuid4().hex
        while True:
            if not ray.is_initialized():  # a remote call would start another Ray of its own
                raise NotServingError(f"cluster {self._name!r}: this process is not connected to its Ray any more")
            self._routing = self._routing or find_routing(self._name)
            asked: Any = self._routing.bind.remote(call, rank, layer, part.topk_ids_TK, part.topk_weights_TK)
            try:
                bound: DispatchHandle = await ray_await(asked, deadline.left + _AGAIN_S, f"a handle for layer {layer}")
                return bound
            except PeerLeavingError:
                raise
            except (ActorUnavailableError, NotServingError, GenerationError) as error:
                # Ray starts the routing actor again, its registry is being restored, or one release follows another.
                if deadline.passed:
                    raise NotServingError(f"cluster {self._name!r} grants no handle: {error}") from error
                await asyncio.sleep(_AGAIN_S)
            except RayActorError as error:
                self._routing = None
                raise NotServingError(f"cluster {self._name!r} is gone: {error}") from error

    async def _ask(self, rank: int, answer: Any, what: str) -> Any:
        config = self._client.directory.config
        peer = f"rank {rank} of cluster {self._name!r}"
        try:
            return await ray_await(answer, config.call_lease_s + config.step_deadline_s, what)
        except RayActorError as error:
            raise PeerLostError(f"{peer} died during {what}", rank, 0, 0) from error

    async def _try_again(self, error: RayMoEError, deadline: Deadline) -> None:
        """Nothing was computed: the members, or the generation, are other ones by now."""
        if deadline.passed:
            raise error
        if isinstance(error, PeerLeavingError):
            await self._client.refresh()
        await asyncio.sleep(_AGAIN_S)

    def _patience(self) -> Deadline:
        """How long a call that nobody has computed is tried again."""
        return Deadline(self._client.directory.config.step_deadline_s)

    @property
    def _name(self) -> str:
        return self._client.directory.config.name


class Experts:
    """The routed experts of one layer. `ConfigError` for a layer that has none.

    Everything is checked here before anything is sent: `RequestError` names the tensor, what it is and what it must be.
    More tokens than a unit takes are cut into several calls.
    """

    def __init__(self, calls: Calls, layer: int) -> None:
        facts = calls.client.directory.facts
        if layer not in facts.moe_layers:
            raise ConfigError(f"layer must be one with routed experts, of {facts.moe_layers}, found {layer}")
        self.layer, self._calls = layer, calls

    async def forward(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Gate-weighted sums [T, D] of the routed experts, like `hidden_TD` in dtype and device; zero tokens are fine.

        `hidden_TD` [T, D] in the cluster's dtype, `topk_ids_TK` [T, K] int32 or int64, `topk_weights_TK` [T, K] in the
        dtype of the model's router. Raises `RequestError`, `NotServingError` once the cluster is gone, `PeerLostError`
        when a peer dies, `DeadlineError`.
        """
        parts = self._parts(hidden_TD, topk_ids_TK, topk_weights_TK)
        return await _gathered([self._calls.run(self.layer, part) for part in parts], hidden_TD)

    async def dispatch(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> ExpertsCall:
        """Begin, and go on with other work while the cluster computes; `combine` the result once.

        Raises as `forward`.
        """
        parts = self._parts(hidden_TD, topk_ids_TK, topk_weights_TK)
        sent = await asyncio.gather(*(self._calls.send(self.layer, part) for part in parts))
        return ExpertsCall(self._calls, tuple(sent), hidden_TD)

    def _parts(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> list[_Part]:
        directory = self._calls.client.directory
        self._check(hidden_TD, topk_ids_TK, topk_weights_TK)
        if not hidden_TD.shape[0]:
            return []
        most = directory.config.max_prefill_tokens
        host = (hidden_TD.detach().cpu(), topk_ids_TK.detach().cpu(), topk_weights_TK.detach().cpu())
        return [_Part(*cut) for cut in zip(*(tensor.split(most) for tensor in host), strict=True)]

    def _check(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> None:
        facts, config = self._calls.client.directory.facts, self._calls.client.directory.config
        _require("hidden", hidden_TD, ("T", facts.hidden_size), (config.dtype,))
        tokens = hidden_TD.shape[0]
        _require("topk_ids", topk_ids_TK, (tokens, facts.top_k), ("int64", "int32"))
        _require("topk_weights", topk_weights_TK, (tokens, facts.top_k), (facts.gate_dtype.removeprefix("torch."),))
        try:
            Routes(topk_ids_TK, topk_weights_TK).checked(facts.num_experts)
        except ValueError as error:
            raise RequestError(str(error), "topk_ids") from error


class ExpertsCall:
    """A call that has been sent. Whoever neither combines nor abandons it leaves the output to the lease's end."""

    def __init__(self, calls: Calls, sent: Sequence[_Sent], hidden_TD: Tensor) -> None:
        self._calls, self._sent, self._hidden_TD = calls, sent, hidden_TD

    @property
    def handle_ids(self) -> tuple[str, ...]:
        return tuple(sent.handle_id for sent in self._sent)

    async def combine(self) -> Tensor:
        """The result, once. Raises `IllegalTransitionError` the second time, `LeaseExpiredError` after the lease,
        `StaleHandleError` where another generation came before a step could run it: then call again.
        """
        return await _gathered([self._calls.fetch(sent) for sent in self._sent], self._hidden_TD)

    def abandon(self) -> None:
        """Nobody will combine it: the output goes now."""
        for sent in self._sent:
            sent.actor.abandon_call.remote(sent.handle_id)


class _Counted:
    """Tokens of a call while it is out."""

    def __init__(self, tokens: Counter[int], rank: int, count: int) -> None:
        self._tokens, self._rank, self._count = tokens, rank, count

    def __enter__(self) -> None:
        self._tokens[self._rank] += self._count

    def __exit__(self, *_: object) -> None:
        self._tokens[self._rank] -= self._count


async def _gathered(work: Sequence[Coroutine[Any, Any, Tensor]], like_TD: Tensor) -> Tensor:
    """All parts in order, where and as the hidden rows are."""
    parts = await asyncio.gather(*work)
    if not parts:
        return torch.zeros_like(like_TD)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(like_TD.device)


def _require(name: str, tensor: Tensor, shape: tuple[int | str, int], dtypes: tuple[str, ...]) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    rows, width = shape
    fits = tensor.ndim == 2 and tensor.shape[1] == width and (isinstance(rows, str) or tensor.shape[0] == rows)
    if not fits or dtype not in dtypes:
        raise RequestError(
            f"{name} must be [{rows}, {width}] in {' or '.join(dtypes)}, found {list(tensor.shape)} in {dtype}", name
        )
