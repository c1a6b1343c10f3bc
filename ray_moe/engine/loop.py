"""The lockstep engine loop of one peer: agree, run units, commit, switch generations at step boundaries.

One thread runs `run`; every other thread talks to it through `post`. The loop does no Ray and no I/O: what leaves it
goes through `Outlet`, and the group carries what peers exchange. While step n runs, the record of step n + 1 is
already on its way, so the agreement costs no time of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from ray_moe.comm.agreement import Agreement
from ray_moe.comm.transports import Transport
from ray_moe.dataplane.route_counts import RouteCounts
from ray_moe.engine.bare import BareLayers
from ray_moe.engine.blocks import BlockFacts, SharedPath
from ray_moe.engine.demand import DemandReporter
from ray_moe.engine.generation import Departure, GenerationView
from ray_moe.engine.inbox import Inbox
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.offer import Agreeing, offer
from ray_moe.engine.pacing import SLEEP_HEARTBEAT_S, Pacing
from ray_moe.engine.ran import Ran
from ray_moe.engine.records import Load, Outlet, Refusal, StreamRecord
from ray_moe.engine.roles import Division, Roles, hand_on
from ray_moe.engine.scheduler import Request, Scheduler
from ray_moe.engine.state import LoopCounters, LoopState, Switch, advance
from ray_moe.engine.told import tell_switch, tell_transition
from ray_moe.engine.trace import Recorder, unmarked
from ray_moe.engine.trunk import Trunk
from ray_moe.engine.unit_runner import UnitRunner
from ray_moe.engine.units import StepPlan
from ray_moe.errors import (
    AgreementError,
    CollectiveError,
    NotServingError,
    PeerLeavingError,
    PeerLostError,
    RayMoEError,
    RequestError,
    StaleHandleError,
)


class EngineLoop:
    """One peer's engine. Constructed with the first generation's view; `run` returns when stopped or failed.

    `blocks` are the trunk's MoE blocks as they were probed, `shared` those whose shared expert runs beside the
    exchange. What `route_counts` counted is reported every `demand_every_steps` steps. Decode units are replayed from
    graphs of `graph_sizes` rows; `look_ahead` commits a step when the next one is launched. `trace` says which steps
    are recorded.
    """

    def __init__(
        self,
        rank: int,
        trunk: Trunk,
        cache: KVCache,
        scheduler: Scheduler,
        view: GenerationView,
        outlet: Outlet,
        blocks: Mapping[int, BlockFacts],
        *,
        shared: Mapping[int, SharedPath] | None = None,
        audit_rate: float = 0.0,
        route_counts: RouteCounts | None = None,
        demand_every_steps: int = 0,
        graph_sizes: Sequence[int] = (),
        look_ahead: bool = False,
        trace: Recorder | None = None,
    ) -> None:
        self.rank, self.trunk, self.cache, self.scheduler = rank, trunk, cache, scheduler
        self.view, self.outlet = view, outlet
        self.state = LoopState.STARTING
        self.failure: RayMoEError | None = None
        self.counters = LoopCounters()
        self._staged: dict[int, GenerationView | Departure] = {view.generation: view}
        self._newest: GenerationView | Departure = view
        self.division = Division()
        self._left_behind: list[Transport] = []  # of past epochs: a peer may still be reading from them
        self._inbox = Inbox()
        self._stop = False
        self.trace = trace or Recorder(rank)
        self.load = self._look_at_load()
        self._pacing = Pacing()
        self._units = UnitRunner(
            rank, trunk, cache, scheduler, blocks, shared or {}, audit_rate, self.counters, graph_sizes, look_ahead
        )
        self.bare = BareLayers(rank, trunk, blocks, scheduler.max_prefill_tokens, audit_rate, self.counters)
        self._demand = DemandReporter(rank, route_counts, demand_every_steps, outlet)
        view.activate()

    def warm_up(self) -> None:
        """Before `run`, on any thread: what a first step would otherwise keep all peers waiting for."""
        self._units.warm_up(self.trunk, self.view)

    # ---- the loop ----

    @torch.inference_mode()
    def run(self) -> None:
        """Serve until every peer wants to stop. A broken epoch, or our own error, fails all open requests by name."""
        try:
            self._advance("serve")
            agreed, plan = self._open_epoch(self._plan(0))
            while not agreed.stop:
                self._pace(agreed)
                started = perf_counter()
                spans = self.trace.begin(agreed) if self.trace.armed else None
                mark = spans.mark if spans is not None else unmarked
                main, roles, step = self.view, self.division.now, agreed
                turn = roles.of_step(agreed.step, main)  # as it was planned
                self._take_roles(agreed.roles)
                self._inbox.take(self._settle)
                next_plan = self._plan(agreed.step + 1)
                mark("plan")
                ticket = self._offer(next_plan)
                mark("offer")
                self._deliver(self._units.run(plan, agreed, turn, spans))
                mark("units")
                self.bare.run(agreed, turn)
                mark("bare layers")
                self.counters.committed_step = agreed.step - self._units.steps_in_flight
                if self.division.now is not roles:
                    self._settle()  # a view that goes may be what the device runs
                ended = hand_on(roles.views(main), self.division.now.views(self.view))
                while ended:  # no name may keep the last view, and with it a checkpoint's trunk, alive
                    self.outlet.lease_returned(ended.pop(0))
                executed = perf_counter()
                self.counters.steps_agreed += 1
                ran, agreed = plan, ticket.result()
                plan = next_plan
                mark("agreement")
                self._demand.step_done(main, step.step, is_last=agreed.generation != main.generation)
                self._close_left_behind()
                while agreed.generation != self.view.generation:
                    agreed, plan = self._switch(agreed, plan)
                    mark("switch")
                self.load = self._look_at_load()
                if spans is not None:
                    self.trace.end(spans, step, turn.view, sum(unit.num_tokens for unit in ran.units))
                if step.prefill or step.decode or step.bare:
                    self.counters.count_work(perf_counter() - started)
                    self.counters.seconds_agreeing += perf_counter() - executed
            self._settle()
            self._advance("stop")
            self._give_up(NotServingError(f"rank {self.rank} was stopped"))
        except _Left:
            self._advance("leave")
            self._give_up(PeerLeavingError(self.rank))
        except (CollectiveError, AgreementError) as error:
            self._fail(PeerLostError(str(error), self.rank, self.view.epoch, self.view.generation))
        except Exception as error:
            # A bug in a step must not leave callers waiting: they get its name, and the actor's log the traceback.
            self._fail(NotServingError(f"rank {self.rank} failed in step {self.counters.steps_agreed}: {error!r}"))
            raise
        finally:
            self._demand.ended()
            if self.state is not LoopState.LEFT:  # the others may still be reading our last line: see `close`
                self.close()

    def _open_epoch(self, plan: StepPlan) -> tuple[Agreement, StepPlan]:
        """The first agreement of an epoch. Members that have just come take up the others' count of steps; what a plan
        is for does not depend on its number."""
        agreed = self._offer(plan).result(opening=True)
        self._pacing = Pacing()
        self._demand.epoch_opened(agreed.step)
        return agreed, plan.at(agreed.step)

    def _plan(self, step: int) -> StepPlan:
        return self.scheduler.plan(step, self.division.now.of_step(step, self.view).checkpoint)

    def _offer(self, plan: StepPlan) -> Agreeing:
        staged, has_work = self._staged[max(self._staged)], self.scheduler.has_work or len(self.bare) > 0
        bare = self.bare.wanted(self.division.now, plan.step, self.view)
        return offer(self.view, plan, staged, self.division, has_work=has_work, stop=self._stop, bare=bare)

    def _take_roles(self, number: int) -> None:
        """Plan by the agreed roles from here on. The step at hand is planned already, and runs as it was."""
        main = self.division.take(number).main
        if main is not None and main.generation > self.view.generation:
            past, self.view, self._newest = self.view, main, main
            self._staged = {main.generation: main}
            step = self.counters.committed_step + 1
            tell_switch(self.rank, past, main, Switch(main.generation, main.epoch, step, 0.0), "roles")

    def _switch(self, agreed: Agreement, plan: StepPlan) -> tuple[Agreement, StepPlan]:
        """Take the agreed generation at this boundary; no local handle of an earlier one is left: steps are whole.

        Where it is of another epoch, the step is agreed anew there, `plan` and all; `_Left` without a seat in it.
        """
        started = perf_counter()
        self._settle()
        past, following = self.view, self._staged[agreed.generation]
        if following.epoch != past.epoch:
            past.transport.leave()
        if isinstance(following, GenerationView):
            self.view = following
            following.activate()
        for generation in sorted(generation for generation in self._staged if generation < agreed.generation):
            old = self._staged.pop(generation)
            if isinstance(old, GenerationView):
                if old.epoch == following.epoch:  # else its executables go with its epoch, whole
                    old.free()
                self.outlet.lease_returned(old)
        if isinstance(following, Departure):
            raise _Left
        if following.epoch != past.epoch:
            self._left_behind.append(past.transport)
            agreed, plan = self._open_epoch(plan)
        switch = Switch(following.generation, following.epoch, agreed.step, perf_counter() - started)
        self.counters.switches.append(switch)
        tell_switch(self.rank, past, following, switch, "stage")
        return agreed, plan

    def _close_left_behind(self) -> None:
        """An agreement in the new epoch says that all its members have left the old one."""
        while self._left_behind:
            past = self._left_behind.pop()
            sent, received = past.bytes_moved
            self.counters.bytes_sent += sent
            self.counters.bytes_received += received
            past.close()

    def _pace(self, agreed: Agreement) -> None:
        """Wait after a step without work. Whoever wakes, for whatever reason, wakes the others: none agrees alone."""
        seconds = self._pacing.seconds_after(has_work=agreed.has_work)
        if not seconds:
            return
        self._settle()
        slept = False
        if not self._has_news():
            slept = seconds == SLEEP_HEARTBEAT_S
            if slept:
                self._advance("sleep")
            self._inbox.sleep(seconds)
            if slept:
                self._advance("wake")
        self._inbox.look()
        if slept or self._has_news():
            self.outlet.wake_peers()

    # ---- from other threads ----

    def submit(self, request: Request) -> None:
        """Queue a request for the next plan. A request that cannot be admitted is refused through the outlet."""

        def admit() -> None:
            try:
                pinned = request.checkpoint or self.division.now.checkpoint_of(request.request_id, self.view)
                self.scheduler.submit(replace(request, checkpoint=pinned))
            except RayMoEError as error:
                self.outlet.deliver([Refusal(request.request_id, error)])
            except Exception as error:  # noqa: BLE001 - one caller's nonsense must not end every peer's epoch
                unreadable = RequestError(f"the request cannot be read: {error!r}")
                self.outlet.deliver([Refusal(request.request_id, unreadable)])

        self.post(admit, settled=False)

    def cancel(self, request_id: str) -> None:
        """Free the request's KV within one step; its stream ends with finish_reason `cancelled`."""

        def drop() -> None:
            if self.scheduler.cancel(request_id):
                where = (self.counters.committed_step, self.view.generation, self.view.epoch)
                self.outlet.deliver([StreamRecord(request_id, 0, (), *where, "cancelled")])

        self.post(drop, settled=False)

    def stage(self, following: GenerationView | Departure) -> None:
        """Hold what comes next until all peers have staged it. `StaleHandleError` for an older generation or epoch."""
        newest = self._newest
        if following.generation <= newest.generation or following.epoch < newest.epoch:
            raise StaleHandleError(
                f"generation {following.generation} of epoch {following.epoch} comes before generation "
                f"{newest.generation} of epoch {newest.epoch}, which is staged"
            )

        def add() -> None:
            self._staged[following.generation] = following

        self.post(add)
        self._newest = following

    def stage_roles(self, roles: Roles) -> None:
        """Hold a division of steps until all peers have it. Raises as `Division.announce`."""
        self.division.announce(roles, self.view)
        self.post(lambda: self.division.stage(roles))
        self.division.newest = roles.number

    def know(self, trunk: Trunk, shared: Mapping[int, SharedPath]) -> None:
        """Another checkpoint's trunk, before a view of that checkpoint is staged."""
        self.post(lambda: self._units.bind(trunk, shared))

    @property
    def newest_staged(self) -> GenerationView | Departure:
        """What `stage` was given last; for other threads, which may see it a moment before it counts."""
        return self._newest

    @property
    def has_left(self) -> bool:
        """The others go on in an epoch without this peer."""
        return self.state is LoopState.LEFT

    @property
    def epochs_in_use(self) -> frozenset[int]:
        """Epochs whose groups are still needed here, as another thread may see it a moment late."""
        behind = (past.group.spec.epoch for past in tuple(self._left_behind))
        return frozenset((self.view.epoch, self._newest.epoch, *behind))

    def break_epoch(self, detail: str) -> None:
        """Somebody else saw a peer die: give the epoch up now instead of at the next collective's deadline."""

        def give_up() -> None:
            if not self._inbox.closed:  # else it is given up already
                raise CollectiveError(detail, self.rank, self.view.epoch)

        self.post(give_up)

    def stop(self) -> None:
        """Ask to stop; the loop ends at the step where every peer has asked."""

        def set_stop() -> None:
            self._stop = True

        self.post(set_stop)

    def wake(self) -> None:
        """A peer has work."""
        self._inbox.wake()

    def close(self) -> None:
        """Drop the epoch's groups: who waits in a node's or the relays' is freed too.

        A loop that left keeps them until its owner knows that the others have switched.
        """
        self._close_left_behind()
        self.view.transport.close()

    def post(self, action: Callable[[], None], *, settled: bool = True) -> None:
        """Run `action` on the loop's thread before the next plan, by default with every step committed; raises the
        failure's name once the loop has ended."""
        if not self._inbox.post(action, settled=settled):
            raise self.failure or NotServingError(f"rank {self.rank} is {self.state.value}")

    # ---- details ----

    def _look_at_load(self) -> Load:
        scheduler, beside = self.scheduler, self.division.now.beside
        return Load(
            waiting=scheduler.counts.waiting,
            running=scheduler.counts.running,
            outstanding_tokens=scheduler.outstanding_tokens,
            kv_blocks_used=scheduler.total_blocks - scheduler.free_blocks,
            beside=scheduler.open_of(beside.view.checkpoint) if beside is not None else 0,
        )

    def _has_news(self) -> bool:
        return bool(self._inbox) or self.scheduler.has_work or len(self.bare) > 0

    def _settle(self) -> None:
        """Commit what the device still runs: what comes next must not find a step under way."""
        behind = self._units.steps_in_flight
        self._deliver(self._units.settle())
        self.counters.committed_step += behind

    def _deliver(self, parts: Sequence[Ran]) -> None:
        for part in parts:
            records = part.records()
            if records:
                self.counters.tokens_emitted += len(records)
                self.outlet.deliver(records)

    def _fail(self, error: RayMoEError) -> None:
        self._units.drop()
        self.failure = error
        self._advance("fail")
        self._give_up(error)

    def _give_up(self, error: RayMoEError) -> None:
        """No request may be left waiting: close the inbox first, then refuse what is in it and what was running."""
        self._inbox.close()
        self._inbox.take(self._settle)
        self.outlet.deliver([Refusal(request_id, error) for request_id in self.scheduler.drain()])
        self.bare.drain(error)
        self.load = self._look_at_load()

    def _advance(self, event: str) -> None:
        before, self.state = self.state, advance(self.rank, self.state, event)
        step = self.counters.committed_step
        tell_transition(self.rank, before, self.state, event, self.view, step, self.failure)


class _Left(Exception):
    """The others go on in an epoch without this peer."""
