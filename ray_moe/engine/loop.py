"""The lockstep engine loop of one peer: agree, run units, commit, switch generations at step boundaries.

One thread runs `run`; every other thread talks to it through `post`. The loop does no Ray and no I/O: what leaves it
goes through `Outlet`, and the group carries what peers exchange. While step n runs, the record of step n + 1 is
already on its way (one step of look-ahead), so the agreement costs no time of its own.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor, nn

from ray_moe.comm.agreement import Agreement, StepRecord, agree
from ray_moe.comm.group import Ticket
from ray_moe.comm.transports import Transport
from ray_moe.dataplane.layer import Invocation
from ray_moe.deadline import wait_event
from ray_moe.engine.blocks import BlockFacts, SharedPath
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.records import Load, Outlet, Refusal, StreamRecord
from ray_moe.engine.scheduler import Emission, Request, Scheduler
from ray_moe.engine.state import LOOP_TABLE, LoopCounters, LoopState
from ray_moe.engine.trunk import Binding, Trunk
from ray_moe.engine.units import StepPlan, UnitBatch
from ray_moe.errors import (
    AgreementError,
    CollectiveError,
    NotServingError,
    PeerLostError,
    RayMoEError,
    RequestError,
    StaleHandleError,
)
from ray_moe.routes import Routes

# Idle pacing: the first idle step waits 1 ms, each next one twice as long up to 50 ms; after this many idle steps in a
# row (about a second) all peers stop agreeing and sleep until woken. All count the same agreed steps, so all fall
# asleep at the same one.
_IDLE_STEPS_BEFORE_SLEEP = 24
_IDLE_FIRST_S, _IDLE_LONGEST_S = 0.001, 0.05
# A sleeping peer wakes by itself this often, and wakes the others: a lost wake-up costs no more than this.
_SLEEP_HEARTBEAT_S = 30.0


class EngineLoop:
    """One peer's engine. Constructed with the first generation's view; `run` returns when stopped or failed.

    `blocks` are the trunk's MoE blocks as they were probed, `shared` those whose shared expert runs beside the
    exchange.
    """

    def __init__(
        self,
        rank: int,
        trunk: Trunk,
        cache: KVCache,
        scheduler: Scheduler,
        transport: Transport,
        view: GenerationView,
        outlet: Outlet,
        blocks: Mapping[int, BlockFacts],
        *,
        shared: Mapping[int, SharedPath] | None = None,
        audit_rate: float = 0.0,
    ) -> None:
        self._blocks, self._shared = blocks, shared or {}
        self.rank, self.trunk, self.cache, self.scheduler = rank, trunk, cache, scheduler
        self.transport, self.group = transport, transport.group
        self.view, self.outlet = view, outlet
        self.state = LoopState.STARTING
        self.failure: RayMoEError | None = None
        self.counters = LoopCounters()
        self.load = self._look_at_load()
        self._staged: dict[int, GenerationView] = {view.lease.generation: view}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._stop = False
        self._idle_steps = 0
        self._audit_every = round(1 / audit_rate) if audit_rate > 0 else 0
        self._invocation = Invocation(0, "decode")
        self._empty_TD = torch.zeros(0, trunk.hidden_size, dtype=trunk.dtype, device=trunk.device)
        self._top_k = trunk.top_k
        view.activate()
        trunk.bind(self._experts)

    # ---- the loop ----

    @torch.inference_mode()
    def run(self) -> None:
        """Serve until every peer wants to stop. A broken epoch, or our own error, fails all open requests by name."""
        try:
            self._advance("serve")
            plan = self.scheduler.plan(0)
            agreed = self._offer(plan).result()
            while not agreed.stop:
                self._pace(agreed)
                started = perf_counter()
                self._take_inbox()
                next_plan = self.scheduler.plan(agreed.step + 1)
                ticket = self._offer(next_plan)
                self._deliver(self._execute(plan, agreed))
                executed = perf_counter()
                self.counters.steps_agreed += 1
                worked, agreed, plan = agreed.prefill or agreed.decode, ticket.result(), next_plan
                self._switch(agreed)
                self.load = self._look_at_load()
                if worked:
                    self.counters.steps_worked += 1
                    self.counters.seconds_worked += perf_counter() - started
                    self.counters.seconds_agreeing += perf_counter() - executed
            self._advance("stop")
            self._give_up(NotServingError(f"rank {self.rank} was stopped"))
        except (CollectiveError, AgreementError) as error:
            self._fail(PeerLostError(str(error), self.rank, self.group.spec.epoch, self.view.lease.generation))
        except Exception as error:
            # A bug in a step must not leave callers waiting: they get its name, and the actor's log the traceback.
            self._fail(NotServingError(f"rank {self.rank} failed in step {self.counters.steps_agreed}: {error!r}"))
            raise
        finally:
            self.transport.close()  # every group of it: who waits in a node's or the relays' is freed too

    def _offer(self, plan: StepPlan) -> _Agreeing:
        header = self.view.header
        record = StepRecord(
            release64=_digest64(header.release_id),
            header64=header.digest64,
            generation=header.generation,
            epoch=header.epoch,
            step=plan.step,
            prefill_rows=plan.prefill.num_tokens if plan.prefill else 0,
            decode_rows=plan.decode.num_tokens if plan.decode else 0,
            has_work=int(self.scheduler.has_work),
            stop=int(self._stop),
            staged_generation=max(self._staged),
            staged_epoch=self.group.spec.epoch,
        )
        return _Agreeing(self.group.gather(record.to_tensor()))

    def _execute(self, plan: StepPlan, agreed: Agreement) -> list[Emission]:
        """The agreed units in order; without rows of our own we join each layer with zero tokens."""
        audit = self._audit_every > 0 and agreed.step % self._audit_every == 0
        emissions: list[Emission] = []
        self.view.policy.observe(agreed.rows_P)
        for kind, unit in plan.agreed_units(prefill=agreed.prefill, decode=agreed.decode):
            self._invocation = Invocation(agreed.step, kind, audit=audit)
            batch = self.scheduler.materialise(unit) if unit is not None else None
            if batch is None or unit is None:
                self._join_empty()
            else:
                tokens = batch.sampling.sample(self.forward(batch)).tolist()
                emissions += self.scheduler.commit(unit, batch, tokens)
        return emissions

    def forward(self, batch: UnitBatch) -> Tensor:
        """Logits [rows that sample, V] of one unit. May be replayed: KV writes go to the same places."""
        output = self.trunk.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.sample_rows,
            ray_moe=self.cache.bind(batch),
        )
        return output.logits[0]

    def _join_empty(self) -> None:
        for index, layer in self.view.layers.items():
            layer.join_empty(self._empty_TD, self._top_k, self._blocks[index].gate, self._invocation)

    def _experts(self, layer: int, _module: nn.Module) -> Binding:
        """What the trunk's MoE block of `layer` calls: the layer of whatever generation this step runs under."""
        shared = self._shared.get(layer)

        def run(hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
            invocation = self._invocation
            routes = Routes(
                topk_ids_TK,
                topk_weights_TK,
                execution_scope_id=f"s{invocation.step}/{invocation.unit}/l{layer}",
                origin_partition=f"rank-{self.rank}",
            )
            if shared is None:
                return self.view.layers[layer].forward(hidden_TD, routes, invocation)
            shared.begin(hidden_TD)
            out_TD = self.view.layers[layer].forward(hidden_TD, routes, invocation, shared.run)
            shared.end()
            return out_TD

        return run

    def _switch(self, agreed: Agreement) -> None:
        """Take the agreed generation at this boundary. No local handle of an earlier one is left: steps are whole."""
        if agreed.generation == self.view.lease.generation:
            return
        self.view = self._staged[agreed.generation]
        self.view.activate()
        for generation in sorted(generation for generation in self._staged if generation < agreed.generation):
            past = self._staged.pop(generation)
            past.free()
            self.outlet.lease_returned(past)

    def _pace(self, agreed: Agreement) -> None:
        """Idle peers agree at a falling rate, then sleep until woken.

        `_idle_steps` counts agreed steps, so it is the same number on every peer: all fall asleep at the same step, and
        whoever wakes, for whatever reason, wakes the others, since none can agree alone.
        """
        if agreed.has_work:
            self._idle_steps = 0
            return
        self._idle_steps += 1
        slept = False
        if self._idle_steps == _IDLE_STEPS_BEFORE_SLEEP:
            self._idle_steps = 0
            if not self._has_news():
                self._sleep()
                slept = True
        elif not self._has_news():
            wait_event(self._wake, min(_IDLE_FIRST_S * 2 ** (self._idle_steps - 1), _IDLE_LONGEST_S))
        self._wake.clear()
        if slept or self._has_news():
            self.outlet.wake_peers()

    def _sleep(self) -> None:
        self._advance("sleep")
        wait_event(self._wake, _SLEEP_HEARTBEAT_S)
        self._advance("wake")

    # ---- from other threads ----

    def submit(self, request: Request) -> None:
        """Queue a request for the next plan. A request that cannot be admitted is refused through the outlet."""

        def admit() -> None:
            try:
                self.scheduler.submit(request)
            except RayMoEError as error:
                self.outlet.deliver([Refusal(request.request_id, error)])
            except Exception as error:  # noqa: BLE001 - one caller's nonsense must not end every peer's epoch
                unreadable = RequestError(f"the request cannot be read: {error!r}")
                self.outlet.deliver([Refusal(request.request_id, unreadable)])

        self.post(admit)

    def cancel(self, request_id: str) -> None:
        """Free the request's KV within one step; its stream ends with finish_reason `cancelled`."""

        def drop() -> None:
            if self.scheduler.cancel(request_id):
                lease, step = self.view.lease, self.counters.steps_agreed
                self.outlet.deliver([StreamRecord(request_id, 0, (), step, lease.generation, lease.epoch, "cancelled")])

        self.post(drop)

    def stage(self, view: GenerationView) -> None:
        """Hold `view` until all peers have staged it. `StaleHandleError` for another epoch or an old generation."""
        if view.header.epoch != self.group.spec.epoch:
            raise StaleHandleError(
                f"generation {view.lease.generation} is for epoch {view.header.epoch}, not this loop's"
            )
        if view.lease.generation <= max(self._staged):
            raise StaleHandleError(f"generation {view.lease.generation} is not newer than {max(self._staged)}")

        def add() -> None:
            self._staged[view.lease.generation] = view

        self.post(add)

    def break_epoch(self, detail: str) -> None:
        """Somebody else saw a peer die: give the epoch up now instead of at the next collective's deadline."""

        def give_up() -> None:
            if not self._closed:  # else it is given up already
                raise CollectiveError(detail, self.rank, self.group.spec.epoch)

        self.post(give_up)

    def stop(self) -> None:
        """Ask to stop; the loop ends at the step where every peer has asked."""

        def set_stop() -> None:
            self._stop = True

        self.post(set_stop)

    def wake(self) -> None:
        """A peer has work."""
        self._wake.set()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread before the next plan; raises the failure's name once the loop has ended."""
        with self._lock:
            if self._closed:
                raise self.failure or NotServingError(f"rank {self.rank} is {self.state.value}")
            self._inbox.append(action)
        self._wake.set()

    # ---- details ----

    def _look_at_load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            waiting=scheduler.counts.waiting,
            running=scheduler.counts.running,
            outstanding_tokens=scheduler.outstanding_tokens,
            kv_blocks_used=scheduler.total_blocks - scheduler.free_blocks,
        )

    def _has_news(self) -> bool:
        return bool(self._inbox) or self.scheduler.has_work

    def _take_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _deliver(self, emissions: Sequence[Emission]) -> None:
        if not emissions:
            return
        self.counters.tokens_emitted += len(emissions)
        lease, step = self.view.lease, self.counters.steps_agreed
        self.outlet.deliver(
            [
                StreamRecord(
                    item.request_id,
                    item.index,
                    (item.token_id,),
                    step,
                    lease.generation,
                    lease.epoch,
                    item.finish_reason,
                )
                for item in emissions
            ]
        )

    def _fail(self, error: RayMoEError) -> None:
        self.failure = error
        self._advance("fail")
        self._give_up(error)

    def _give_up(self, error: RayMoEError) -> None:
        """No request may be left waiting: close the inbox first, then refuse what is in it and what was running."""
        with self._lock:
            self._closed = True
        self._take_inbox()
        self.outlet.deliver([Refusal(request_id, error) for request_id in self.scheduler.drain()])
        self.load = self._look_at_load()

    def _advance(self, event: str) -> None:
        following = LOOP_TABLE[self.state].get(event)
        if following is None:
            raise RayMoEError(f"rank {self.rank}: loop event {event!r} is illegal in state {self.state.value}")
        self.state = following


class _Agreeing:
    """A step record on its way, and the agreement that comes of it."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def result(self) -> Agreement:
        return agree(StepRecord.lines(self._ticket.result()))


def _digest64(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) >> 1
