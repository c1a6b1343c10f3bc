"""Observe, reconcile, act: one round of the controller at a time, over a control state that survives it.

`tick` looks at everything without blocking on what is slow, asks the pure reconciler what is to be done, saves what was
decided and only then starts the effects that are not running yet. An effect that ends is taken note of, and the next
round begins at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors.announce import tell_operations
from ray_moe.actors.journal import Journal, Record
from ray_moe.actors.runner import EffectRunner
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.effects import Effect, Fill, Observed
from ray_moe.controlplane.fetching import FillOutcome
from ray_moe.controlplane.operations import ControlState, Operation, Stage
from ray_moe.controlplane.reconcile import absorb, cancel, reconcile
from ray_moe.controlplane.rollout import Rollout
from ray_moe.deadline import Deadline, wait_for
from ray_moe.engine.records import ModelFacts
from ray_moe.errors import DeadlineError, NotAvailableError, RayMoEError

_LOG = logging.getLogger(__name__)
# Between two rounds: while something changes, and while nothing does.
_BUSY_TICK_S, _IDLE_TICK_S = 0.06, 0.5
# For the answer of a fill that a report shows to be over.
_ANSWER_S = 2.0


class Conductor:
    """Belongs to the controller's event loop. `record` is the state to begin with, as a journal keeps it.

    `peers` is the controller's own table of expert actors, which effects change; `look` gives an observation, None when
    the cluster cannot be changed now; `store` says where members of an epoch meet, `memory` what a registry that was
    started again must know, empty before anybody has asked it.
    """

    def __init__(
        self,
        config: ClusterConfig,
        record: Record,
        journal: Journal,
        peers: dict[int, ActorHandle],
        routing: ActorHandle,
        look: Callable[[], Awaitable[Observed | None]],
        store: Callable[[], StoreAddress],
        memory: Callable[[], bytes],
    ) -> None:
        self._config, self._record, self._journal, self._look = config, record, journal, look
        self._memory = memory
        self._runner = EffectRunner(
            record.config or config, peers, routing, record.facts, record.model_path, record.storage, store
        )
        self._running: dict[Effect, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._round_over = asyncio.Condition()

    @property
    def control(self) -> ControlState:
        """Operations, history, members: as of the last round."""
        return self._record.control

    async def rounds(self) -> None:
        """Run rounds until cancelled. What one of them finds wrong is logged, and the next one looks again."""
        while True:
            try:
                await self._round()
            except RayMoEError as error:
                _LOG.warning("watching %s: %s", self._config.name, error)
            async with self._round_over:
                self._round_over.notify_all()
            busy = bool(self.control.operations or self._running)
            with suppress(DeadlineError):  # no news: time for another look
                await wait_for(self._news.wait(), _BUSY_TICK_S if busy else _IDLE_TICK_S, "news")
            self._news.clear()

    async def _round(self) -> None:
        seen = await self._look()
        if seen is None or not seen.live:
            return
        await self._hear_of_fills(seen)
        control, effects = reconcile(self.control, seen, self._record.storage, time.time())
        self._save(control, seen, self._memory())
        self._give_up()
        for effect in effects:
            if effect not in self._running:
                self._running[effect] = asyncio.create_task(self._act(effect))

    async def _hear_of_fills(self, seen: Observed) -> None:
        """A report may show slots as filled before the fill itself has answered: what it moved is counted first, since
        reconciling on the report would end the operation, and give that answer up."""
        filled = [
            task
            for effect, task in self._running.items()
            if isinstance(effect, Fill) and effect.rank in seen.peers and _is_over(effect, seen)
        ]
        if filled:
            await asyncio.wait(filled, timeout=_ANSWER_S)

    def _give_up(self) -> None:
        """End copies that nobody wants any more: they would take slots and bandwidth for as long as they last."""
        filling = {operation.number for operation in self.control.operations if operation.stage is Stage.FILLING}
        for effect, task in self._running.items():
            if isinstance(effect, Fill) and effect.operation not in filling:
                task.cancel()

    async def _act(self, effect: Effect) -> None:
        """Run one effect to its end, and take note of it."""
        failure, refused, of_operation = "", False, bool(getattr(effect, "operation", 0))
        outcomes: tuple[FillOutcome, ...] = ()
        try:
            outcomes = tuple(await self._runner.run(effect))
        except (RayMoEError, RayActorError, OSError) as error:
            failure, refused = str(error).partition("\n")[0], isinstance(error, NotAvailableError)
            _LOG.warning("%s: %s: %s", self._config.name, type(effect).__name__, failure)
            if not of_operation:  # nobody counts its attempts
                await asyncio.sleep(_IDLE_TICK_S)
        finally:
            del self._running[effect]
            if of_operation:
                self._news.set()
        self._save(absorb(self.control, effect, failure, outcomes, time.time(), refused=refused))

    def _save(self, control: ControlState, seen: Observed | None = None, memory: bytes | None = None) -> None:
        """Save, then believe: whatever is done is done under a state that a restart would find."""
        live = seen.live if seen is not None else self._record.live
        memory = memory or self._record.memory
        if control is self.control and live == self._record.live and memory == self._record.memory:
            return
        self._keep(replace(self._record, control=control, live=live, memory=memory))

    def _keep(self, record: Record) -> None:
        self._journal.write(record)
        before, self._record = self._record, record
        tell_operations(before.control, record.control)

    # ---- releases ----

    @property
    def record(self) -> Record:
        """All that a restart would find."""
        return self._record

    def keep_rollouts(self, rollouts: tuple[Rollout, ...]) -> None:
        """Save how far rollouts are, and the registry that this was decided on."""
        self._keep(replace(self._record, rollouts=rollouts, memory=self._memory() or self._record.memory))

    def serve_as(self, config: ClusterConfig, facts: ModelFacts, model_path: Path) -> None:
        """Another release serves from here on: what comes new is made for it."""
        self._keep(replace(self._record, config=config, facts=facts, model_path=model_path))
        self._runner.serve_as(config, facts, model_path)

    # ---- what is asked for ----

    def begin(self, control: ControlState, operation: Operation) -> int:
        """Take an operation that `asking` made of the present control state; its number."""
        self._save(control)
        self._news.set()
        return operation.number

    def cancel(self, number: int, who: str) -> None:
        """Undo what has not been published yet. Raises `ConfigError`, `GenerationError` for an unknown number."""
        self._save(cancel(self.control, number, who, time.time()))
        self._news.set()

    async def wait(self, number: int, seconds: float) -> Operation:
        """An operation once it has ended, or as it is after `seconds`. `GenerationError` for an unknown number."""
        deadline = Deadline(seconds)
        while not (operation := self.control.find(number)).ended and not deadline.passed:
            async with self._round_over:
                with suppress(DeadlineError):
                    await wait_for(self._round_over.wait(), deadline.left + 0.01, "a round")
        return operation

    def stop(self) -> None:
        """Forget everything: the cluster ends."""
        self._journal.erase()
        for task in self._running.values():
            task.cancel()


def _is_over(fill: Fill, seen: Observed) -> bool:
    slots = seen.peers[fill.rank].slots
    return all((order.layer, order.pool_slot) in slots for order in fill.orders)
