"""Bare layers: calls of one MoE layer from somebody else's model, batched into the steps of this engine.

A call comes with its handle, bound by whoever granted its lease. It waits for a step under exactly that scope; all
calls of a layer that wait then are one invocation, and so one execution scope of all peers. Which layers a step runs is
agreed like everything else: each peer offers a bit per layer, and a layer runs when any peer has calls for it.

The loop's thread only, like the scheduler. Letters: T tokens, N routes, D hidden.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from ray_moe.comm.agreement import Agreement
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.dataplane.known_routes import BARE, origin_of, routes_of
from ray_moe.dataplane.layer import ExpertLayer, Invocation
from ray_moe.engine.blocks import BlockFacts
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.roles import Roles, Turn
from ray_moe.engine.state import LoopCounters
from ray_moe.engine.trunk import Trunk
from ray_moe.errors import CollectiveError, RayMoEError, StaleHandleError
from ray_moe.routes import Routes

_LOG = logging.getLogger(__name__)
# An agreement carries one number for the layers. In a model with more MoE layers than this, two share a bit: where one
# of them is called the other runs with zero tokens.
_BITS = 62


@dataclass(frozen=True)
class BareResult:
    """What a call gets: the gate-weighted sums [T, D] on the host, and the step that computed them."""

    out_TD: Tensor
    step: int
    generation: int
    epoch: int


@dataclass(frozen=True, eq=False)
class BareCall:
    """One call. `settle` is called once, on the loop's thread, and must return at once."""

    handle: DispatchHandle
    hidden_TD: Tensor
    settle: Callable[[BareResult | RayMoEError], None]

    @property
    def num_tokens(self) -> int:
        return self.hidden_TD.shape[0]


class BareLayers:
    """The calls that wait on one peer, and how a step runs them.

    A step takes at most `max_tokens` tokens of a layer's calls, first come, first served; one call alone may have more.
    """

    def __init__(
        self,
        rank: int,
        trunk: Trunk,
        blocks: Mapping[int, BlockFacts],
        max_tokens: int,
        audit_rate: float,
        counters: LoopCounters,
    ) -> None:
        self._origin, self._blocks, self._max_tokens, self._counters = origin_of(rank), blocks, max_tokens, counters
        self._empty_TD = torch.zeros(0, trunk.hidden_size, dtype=trunk.dtype, device=trunk.device)
        self._no_positions_N = torch.zeros(0, dtype=torch.int64, device=trunk.device)
        self._audit_every = round(1 / audit_rate) if audit_rate > 0 else 0
        self._waiting: dict[str, BareCall] = {}  # by handle id, first come first
        self._offered: dict[str, int] = {}  # by handle id, the last step that was offered to run it

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._waiting)

    def gate_of(self, layer: int) -> torch.dtype:
        """The dtype of a layer's gates: batched calls share one, and peers without calls answer in it."""
        return self._blocks[layer].gate

    def add(self, call: BareCall) -> None:
        """Queue a call for the next step under its scope."""
        self._waiting[call.handle.handle_id] = call

    def cancel(self, handle_id: str) -> None:
        """Drop a call that has not run; nothing is settled."""
        self._waiting.pop(handle_id, None)
        self._offered.pop(handle_id, None)

    def drain(self, error: RayMoEError) -> None:
        """Refuse every call, for a loop that cannot go on."""
        for call in list(self._waiting.values()):
            self._settle(call, error)

    # ---- a step ----

    def wanted(self, roles: Roles, step: int, main: GenerationView) -> int:
        """The layers that step `step` should run for this peer, a bit each; not for calls that the step before takes.

        Refuses, with `StaleHandleError`, calls whose scope will not come again.
        """
        if not self._waiting:
            return 0
        live = {view.header.digest for view in roles.views(main)}
        for call in list(self._waiting.values()):
            header = call.handle.header
            if header.digest not in live and header.generation <= main.generation:
                self._settle(call, _stale(call, main.header))
        view = _view_of(roles.of_step(step, main))
        called: Counter[int] = Counter()
        for call in self._of(view.header):
            layer, handle_id = call.handle.layer, call.handle.handle_id
            # Offered one step ahead: what the step that is about to run has room for will be gone by then.
            if self._offered.get(handle_id) != step - 1 and (not called[layer] or self._fits(called[layer], call)):
                self._offered[handle_id] = step
                called[layer] += call.num_tokens
        return reduce(or_, (bit for layer, bit in _bits(view) if layer in called), 0)

    def run(self, agreed: Agreement, turn: Turn) -> None:
        """The agreed layers in order; without calls of our own we join each with zero tokens.

        A call that cannot be read is refused alone. What all peers refuse together, before rows move, is the error of
        the calls that were in it; a broken group is the loop's: `CollectiveError`.
        """
        if not agreed.bare:
            return
        view = _view_of(turn)
        audit = self._audit_every > 0 and agreed.step % self._audit_every == 0
        invocation = Invocation(agreed.step, BARE, audit=audit)
        for layer, bit in _bits(view):
            if not agreed.bare & bit:
                continue
            batch = self._batch(layer, view, agreed.step)
            try:
                self._run(view.layers[layer], layer, view.trunk.top_k, invocation, batch)
            except CollectiveError:
                raise
            except RayMoEError as error:
                _LOG.warning("step %d, layer %d, %d bare calls: %r", agreed.step, layer, len(batch.calls), error)
                for call in batch.calls:
                    self._settle(call, error)
        self._counters.units_of(view.release_id).ran(BARE, ())

    def _run(self, layer: ExpertLayer, index: int, top_k: int, invocation: Invocation, batch: _Batch) -> None:
        if not batch.calls:
            layer.assigned(self._no_positions_N).join_empty(self._empty_TD, top_k, self.gate_of(index), invocation)
            return
        hidden_TD, routes, positions_N = batch.packed(self._empty_TD.device)
        out_TD = layer.assigned(positions_N).forward(hidden_TD, routes, invocation).cpu()
        self._counters.bare_calls += len(batch.calls)
        self._counters.bare_tokens += routes.num_tokens
        sizes = [call.num_tokens for call in batch.calls]
        header = layer.header
        for call, mine_TD in zip(batch.calls, out_TD.split(sizes), strict=True):
            self._settle(call, BareResult(mine_TD, invocation.step, header.generation, header.epoch))

    def _batch(self, layer: int, view: GenerationView, step: int) -> _Batch:
        """What waits for a layer under a view's scope, as far as it fits."""
        calls: list[BareCall] = []
        routes: list[Routes] = []
        tokens = 0
        for call in [call for call in self._of(view.header) if call.handle.layer == layer]:
            if calls and not self._fits(tokens, call):
                break
            try:
                routes.append(routes_of(call.handle, view.layers[layer].slots, self._origin))
            except RayMoEError as error:
                self._settle(call, error)
                continue
            calls.append(call)
            tokens += call.num_tokens
        return _Batch(calls, routes, f"s{step}/{BARE}/l{layer}", self._origin)

    def _of(self, header: HandleHeader) -> Iterator[BareCall]:
        return (call for call in self._waiting.values() if call.handle.header.digest == header.digest)

    def _fits(self, tokens: int, call: BareCall) -> bool:
        return tokens + call.num_tokens <= self._max_tokens

    def _settle(self, call: BareCall, outcome: BareResult | RayMoEError) -> None:
        self.cancel(call.handle.handle_id)
        call.settle(outcome)


@dataclass(frozen=True)
class _Batch:
    """The calls of one invocation, in order, and the routes of each."""

    calls: Sequence[BareCall]
    routes: Sequence[Routes]
    scope: str
    origin: str

    def packed(self, device: torch.device) -> tuple[Tensor, Routes, Tensor]:
        """Hidden rows, routes and replica choices of all calls, one behind the other."""
        routes = Routes(
            torch.cat([one.topk_ids for one in self.routes]).to(device),
            torch.cat([one.topk_weights for one in self.routes]).to(device),
            self.scope,
            self.origin,
        )
        hidden_TD = torch.cat([call.hidden_TD for call in self.calls]).to(device)
        positions_N = torch.cat([call.handle.physical_slot_N for call in self.calls]).to(device)
        return hidden_TD, routes, positions_N


def _view_of(turn: Turn) -> GenerationView:
    """The scope that bare calls of a step run under: leases are on what serves, never on a canary beside it."""
    return turn.instead or turn.view


def _bits(view: GenerationView) -> list[tuple[int, int]]:
    return [(layer, 1 << position % _BITS) for position, layer in enumerate(view.layers)]


def _stale(call: BareCall, header: HandleHeader) -> StaleHandleError:
    try:
        call.handle.require(header, "dispatch")
    except StaleHandleError as error:
        return error
    return StaleHandleError(f"dispatch of handle {call.handle.handle_id}: its scope is over")
