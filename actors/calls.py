"""Calls of single layers on one peer: from a bound handle to the output that is combined once. All on the event loop.

    dispatch: accepted -> (a step computes it, with all that wait) -> combine: the output leaves, the lease goes back

A call's handle walks the lifetime of every handle (`dataplane.handle.LIFETIME`), and this peer's copy is the one that
counts: a second combine finds it released. Whoever never combines, because it forgot or because it died, loses the
output when its lease has run out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from ray.actor import ActorHandle
from torch import Tensor

from ray_moe.actors.reception import Reception
from ray_moe.config import ClusterConfig
from ray_moe.dataplane.completion import EVENTS, Event
from ray_moe.dataplane.handle import DispatchHandle
from ray_moe.dataplane.known_routes import BARE
from ray_moe.deadline import wait_for
from ray_moe.engine.bare import BareCall, BareResult
from ray_moe.engine.loop import EngineLoop
from ray_moe.errors import (
    LeaseExpiredError,
    NotServingError,
    PeerLeavingError,
    RayMoEError,
    RequestError,
    StaleHandleError,
)

# Handles that are over and whose second use is still refused by name; older ones are unknown.
_REMEMBERED = 1024
# What a layer's invocation completes between binding and release, in order.
_IN_A_STEP = tuple(event for event in EVENTS if event not in (Event.ROUTE_READY, Event.HANDLE_RELEASED))


@dataclass(frozen=True)
class Rows:
    """A host tensor in the form that Ray's object store carries without pickling it."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    @staticmethod
    def of(tensor: Tensor) -> Rows:
        """Of any device; its autograd history stays behind."""
        host = tensor.detach().cpu().contiguous()
        flat = host.reshape(-1).view(torch.uint8) if host.numel() else torch.empty(0, dtype=torch.uint8)
        return Rows(str(host.dtype).removeprefix("torch."), tuple(host.shape), flat.numpy())

    def tensor(self) -> Tensor:
        """A copy that its owner may write."""
        return torch.from_numpy(self.data.copy()).view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class LayerOutput:
    """The gate-weighted sums [T, D] of one call, and the step, generation and epoch that computed them."""

    rows: Rows
    step: int
    generation: int
    epoch: int


@dataclass(eq=False)
class _Open:
    """A call that is not combined yet."""

    handle: DispatchHandle
    expiry: asyncio.TimerHandle
    outcome: asyncio.Future[BareResult] = field(default_factory=asyncio.Future)


class CallDesk:
    """What stands between callers of single layers and an engine loop that serves. `routing` granted their leases."""

    def __init__(
        self, config: ClusterConfig, rank: int, loop: EngineLoop, reception: Reception, routing: ActorHandle
    ) -> None:
        self._config, self._rank, self._loop = config, rank, loop
        self._reception, self._routing = reception, routing
        self._open: dict[str, _Open] = {}
        self._over: OrderedDict[str, Callable[[], RayMoEError | None]] = OrderedDict()

    @property
    def uncombined(self) -> int:
        """Calls whose output nobody has fetched yet."""
        return len(self._open)

    def dispatch(self, handle: DispatchHandle, rows: Rows) -> None:
        """Take a call in: the next step under its scope runs it.

        Raises `PeerLeavingError`, `IllegalTransitionError` for a handle that was dispatched before, `RequestError` for
        rows that are not of this layer, and why the loop has ended. Then the handle's lease goes back.
        """
        name = handle.handle_id
        self._require_new(handle)
        try:
            if not self._reception.admitting:
                raise PeerLeavingError(self._rank)
            hidden_TD = rows.tensor()
            self._check(handle, hidden_TD)
            handle.lifetime.advance("submit_dispatch")
            events, seconds = asyncio.get_running_loop(), self._config.call_lease_s
            opened = _Open(handle, events.call_later(seconds, self._expire, name))

            def settle(outcome: BareResult | RayMoEError) -> None:
                events.call_soon_threadsafe(self._settle, opened, outcome)

            self._open[name] = opened
            self._loop.post(lambda: self._loop.bare.add(BareCall(handle, hidden_TD, settle)), settled=False)
        except BaseException:
            self._forget(handle)
            raise

    async def combine(self, handle_id: str) -> LayerOutput:
        """The output of a call, exactly once; waits for it while the lease lasts.

        Raises `IllegalTransitionError` the second time, `LeaseExpiredError`, `StaleHandleError` for a handle that is
        unknown here or whose generation was over before a step could run it, and what refused the call.
        """
        opened = self._open.get(handle_id)
        if opened is None:
            raise self._refusal(handle_id)
        result = await wait_for(
            asyncio.shield(opened.outcome), self._config.call_lease_s + 1, f"step of handle {handle_id}"
        )
        handle = opened.handle
        handle.lifetime.advance("submit_combine")  # of two that waited, the second ends here
        handle.lifetime.advance("complete_combine")
        handle.release()
        self._remember(handle_id, lambda: handle.lifetime.advance("submit_combine"))
        self._forget(handle)
        return LayerOutput(Rows.of(result.out_TD), result.step, result.generation, result.epoch)

    def abandon(self, handle_id: str) -> None:
        """The caller gives a call up; one that is over is fine."""
        opened = self._open.get(handle_id)
        if opened is not None:
            opened.handle.abandon()
            self._remember(handle_id, lambda: opened.handle.lifetime.advance("submit_combine"))
            self._drop(opened, StaleHandleError(f"handle {handle_id} was given up by its caller"))

    # ---- details ----

    def _require_new(self, handle: DispatchHandle) -> None:
        """A handle of this name that is open or over cannot be dispatched again."""
        opened = self._open.get(handle.handle_id)
        if opened is not None:
            opened.handle.lifetime.advance("submit_dispatch")  # illegal in any state that it can be in
        if handle.handle_id in self._over:
            raise self._refusal(handle.handle_id)

    def _check(self, handle: DispatchHandle, hidden_TD: Tensor) -> None:
        trunk, abi = self._loop.trunk, handle.header.abi
        if handle.unit != BARE or handle.layer not in self._loop.view.layers:
            raise RequestError(f"layer must be one of {tuple(self._loop.view.layers)}, found {handle.layer}", "layer")
        expected = (handle.route_count // handle.top_k, trunk.hidden_size)
        if tuple(hidden_TD.shape) != expected or hidden_TD.dtype != abi.payload:
            raise RequestError(
                f"hidden must be {list(expected)} in {abi.payload}, found {list(hidden_TD.shape)} in {hidden_TD.dtype}",
                "hidden",
            )
        if handle.top_k != trunk.top_k:
            raise RequestError(f"topk_ids must have {trunk.top_k} columns, found {handle.top_k}", "topk_ids")
        gate = self._loop.bare.gate_of(handle.layer)
        if handle.gates_TK.dtype != gate:
            raise RequestError(f"topk_weights must be {gate}, found {handle.gates_TK.dtype}", "topk_weights")
        most = self._loop.scheduler.max_prefill_tokens
        if expected[0] > most:
            raise RequestError(f"a call brings at most {most} tokens, found {expected[0]}: split it", "hidden")

    def _settle(self, opened: _Open, outcome: BareResult | RayMoEError) -> None:
        if opened.outcome.done():  # it was given up, or its lease ran out
            return
        if isinstance(outcome, BareResult):
            for event in _IN_A_STEP:
                opened.handle.completion.complete(event)
            opened.handle.lifetime.advance("complete_dispatch")
            opened.handle.lifetime.advance("run_experts")
            opened.outcome.set_result(outcome)
            return
        opened.handle.abandon()
        self._remember(opened.handle.handle_id, lambda: outcome)
        _fail(opened.outcome, outcome)
        self._forget(opened.handle)

    def _expire(self, handle_id: str) -> None:
        opened = self._open.get(handle_id)
        if opened is not None:
            error = LeaseExpiredError(handle_id, self._config.call_lease_s)
            opened.handle.abandon()
            self._remember(handle_id, lambda: error)
            self._drop(opened, error)

    def _drop(self, opened: _Open, error: RayMoEError) -> None:
        name = opened.handle.handle_id
        if not opened.outcome.done():
            _fail(opened.outcome, error)
        self._forget(opened.handle)
        try:
            self._loop.post(lambda: self._loop.bare.cancel(name), settled=False)
        except RayMoEError:
            return  # the loop has ended, and with it every call

    def _remember(self, handle_id: str, refuse: Callable[[], RayMoEError | None]) -> None:
        self._over[handle_id] = refuse
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def _refusal(self, handle_id: str) -> RayMoEError:
        refuse = self._over.get(handle_id)
        error = refuse() if refuse is not None else None
        return error or StaleHandleError(
            f"rank {self._rank} holds no handle {handle_id}: it never came, or is long over"
        )

    def _forget(self, handle: DispatchHandle) -> None:
        """The call is over: its output goes, and its lease goes back."""
        opened = self._open.pop(handle.handle_id, None)
        if opened is not None:
            opened.expiry.cancel()
        self._routing.release_call.remote(handle.header.lease_id, handle.header.holder)


class LayerCalls:
    """What an expert actor offers to callers of single layers; `CallDesk` says what it raises."""

    _calls: CallDesk | None = None

    async def dispatch_call(self, handle: DispatchHandle, rows: Rows) -> None:
        """Take a call in."""
        self._open_desk.dispatch(handle, rows)

    async def combine_call(self, handle_id: str) -> LayerOutput:
        """Its output, once."""
        return await self._open_desk.combine(handle_id)

    async def run_call(self, handle: DispatchHandle, rows: Rows) -> LayerOutput:
        """Both, for whoever has nothing to do in between."""
        self._open_desk.dispatch(handle, rows)
        return await self._open_desk.combine(handle.handle_id)

    async def abandon_call(self, handle_id: str) -> None:
        """Nobody will combine it."""
        self._open_desk.abandon(handle_id)

    @property
    def _open_desk(self) -> CallDesk:
        if self._calls is None:
            raise NotServingError("this peer is not serving yet")
        return self._calls


def _fail(outcome: asyncio.Future[BareResult], error: RayMoEError) -> None:
    outcome.set_exception(error)
    outcome.exception()  # nobody needs to be waiting for it
