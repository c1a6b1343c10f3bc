"""The scheduler: which tokens of which requests each step computes, and what comes of them.

Pure bookkeeping: no model, no clock, no peers; the same calls give the same plans. Life of a step:

    plan(n + 1)        before step n has run: rows, positions and blocks, on what is known without step n's tokens
    materialise(unit)  once step n is committed: the token ids, without the rows of requests that are over
    commit(unit, ...)  the sampled tokens; finished requests give their blocks back

`plan` may run one step ahead (more works too); units run, and are committed, in the order of their plans. Because of
that order blocks can change owner at once: a unit that still reads a block runs before any unit that overwrites it.

First come, first served: running requests are always the oldest ones, decodes go first, prompts share what
`max_prefill_tokens` allows. Out of blocks, the youngest running request is preempted and computes its KV again later;
so the oldest always advances, and every request ends.

A request that another engine hands over keeps that order: if it can run at once it is the youngest that runs; if not,
it waits behind the streams that have begun. Who waits is held up by it once, who runs never.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType

import torch

from ray_moe.dataplane.phases import Phase, split_by_phase
from ray_moe.engine.kvcache import BlockAllocator
from ray_moe.engine.request import AdmissionLimits, OpenRequest, Request, RequestEvent, RequestState
from ray_moe.engine.steering import SteeringColumns, TokenLogprobs
from ray_moe.engine.units import Emission, Row, StepPlan, UnitBatch, UnitPlan, pack_unit
from ray_moe.errors import ConfigError, RayMoEError, RequestError

_PHASE = attrgetter("phase")
_NONE: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class Residence:
    """A request that leaves, as another engine takes it, and what it held here: the KV of its first `positions`."""

    request: Request
    blocks: tuple[int, ...]
    positions: int


@dataclass(frozen=True)
class Counts:
    """Open requests that wait for blocks, and those that are running."""

    waiting: int
    running: int


class Scheduler:
    """Continuous batching over paged KV.

    max_prefill_tokens bounds a prefill unit, max_decode_rows the requests that run at a time (and so a decode unit),
    max_positions a request's prompt plus max_tokens. Packed units are put on `device`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_prefill_tokens: int,
        max_decode_rows: int,
        max_positions: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_prefill_tokens < 1 or max_decode_rows < 1:
            raise ConfigError(
                f"max_prefill_tokens is {max_prefill_tokens} and max_decode_rows {max_decode_rows}; both must be >= 1"
            )
        self.limits = AdmissionLimits(num_blocks, block_size, max_positions, vocab_size)
        self.max_prefill_tokens, self.max_decode_rows, self.device = max_prefill_tokens, max_decode_rows, device
        self.preemptions = 0
        self._allocator = BlockAllocator(num_blocks)
        self._tickets = itertools.count()
        self._open: dict[str, OpenRequest] = {}
        # Both oldest first, and everything running is older than everything waiting.
        self._running: list[OpenRequest] = []
        self._waiting: deque[OpenRequest] = deque()

    # ---- submission ----

    def submit(self, request: Request) -> None:
        """Queues a request. Raises RequestError naming the field, its value and its bound; nothing is queued then."""
        self._waiting.append(self._admissible(request))

    def cancel(self, request_id: str) -> bool:
        """Ends a request without another emission and frees its KV; False when no such request is open."""
        opened = self._open.get(request_id)
        if opened is None:
            return False
        self._close(opened, RequestEvent.CANCEL)
        return True

    def drain(self) -> tuple[str, ...]:
        """Cancels every open request and returns their ids, first come first, for an engine that cannot go on."""
        request_ids = tuple(self._open)
        for request_id in request_ids:
            self.cancel(request_id)
        return request_ids

    def requests(self) -> tuple[Request, ...]:
        """The open requests, first come first, each with its committed tokens as prefix: as submitted again."""
        return tuple(opened.resubmission() for opened in self._open.values())

    # ---- hand-over ----

    def hand_over(self, request_id: str) -> Residence | None:
        """Ends a request here, for another engine to adopt; None when no such request is open.

        Call it between two steps. Its rows that have not run never do. Its blocks are free, and hold what they hold
        until the next unit runs.
        """
        opened = self._open.get(request_id)
        if opened is None:
            return None
        # Whose last token is in flight may have given its blocks back: then its KV is gone with them.
        held = Residence(opened.resubmission(), opened.blocks, opened.committed if opened.blocks else 0)
        self._close(opened, RequestEvent.HAND_OVER)
        return held

    def adopt(self, request: Request, positions: int) -> tuple[int, ...]:
        """Takes a request that another engine handed over, with the KV of its first `positions` (0: without).

        Returns the blocks to write that KV to before the next step, or none when there is no KV or no room to run at
        once: it then waits, and computes its KV again. Raises RequestError as `submit`, and unless `positions` leaves
        the last known token to compute.
        """
        known = len(request.prompt_ids) + len(request.prefix_ids)
        if not 0 <= positions < max(known, 1):
            raise RequestError(
                f"KV of {positions} positions came with {known} tokens; it must be of fewer", "positions"
            )
        opened = self._admissible(request)
        needed = self._blocks_to_start(opened)
        if positions == 0 or needed > self._allocator.num_free or len(self._running) >= self.max_decode_rows:
            self._queue_adopted(opened)
            return ()
        opened.blocks = self._allocator.allocate(needed)
        opened.committed = opened.planned = positions
        opened.take(RequestEvent.RESUME if positions == known - 1 else RequestEvent.ADMIT)
        self._running.append(opened)
        return opened.blocks

    def _queue_adopted(self, opened: OpenRequest) -> None:
        behind = len(self._waiting)
        if opened.begun:
            behind = next((place for place, other in enumerate(self._waiting) if not other.begun), behind)
        self._waiting.insert(behind, opened)

    # ---- a step ----

    def plan(self, step: int, checkpoint: str | None = None) -> StepPlan:
        """Plans the next step and takes its blocks; of the requests of one `checkpoint`, where one is named."""
        self._release_settled()
        # Decodes first: they free blocks when they preempt, and a prompt must not take what they need. Whoever was just
        # preempted heads the queue and needs more blocks than it left, so no newcomer gets in at its cost.
        rows = [*self._plan_decode(checkpoint), *self._plan_prefill(checkpoint)]
        units = {unit.phase: UnitPlan(step, unit.phase, unit.rows) for unit in split_by_phase(rows, _PHASE)}
        return StepPlan(step, units.get("prefill"), units.get("decode"))

    def steers(self, plan: StepPlan) -> bool:
        """Whether any row's logits depend on tokens that the host must know: all before it are committed then."""
        found = (self._find(row) for unit in plan.units for row in unit.rows if row.samples)
        return any(opened is not None and opened.steered for opened in found)

    def materialise(self, unit: UnitPlan, in_flight: Mapping[int, int] = _NONE) -> UnitBatch | None:
        """The unit with its token ids, without the rows of requests that finished or were cancelled since it was
        planned; None when no row is left, and then there is nothing to commit.

        A preempted request's row stays: its blocks are intact until the step that was planned at the preemption runs.
        `in_flight` says of the step before, where it is not committed, at which place among its tokens the next one of
        a submission (by ticket) lies: an id of -1 - place stands for it. Raises RayMoEError when any other token is not
        known yet.
        """
        live = [(row, opened) for row in unit.rows if (opened := self._find(row)) is not None]
        if not live:
            return None
        return pack_unit(
            unit.kind,
            [row for row, _ in live],
            [self._tokens_of(row, opened, in_flight) for row, opened in live],
            [opened.request.params for _, opened in live],
            self.limits.block_size,
            self.device,
            SteeringColumns.pack(
                [opened.steer() for row, opened in live if row.samples], self.limits.vocab_size, self.device
            ),
        )

    def commit(
        self,
        unit: UnitPlan,
        batch: UnitBatch | None,
        tokens: Sequence[int],
        logprobs: Sequence[tuple[TokenLogprobs, ...]] = (),
    ) -> list[Emission]:
        """Takes the tokens sampled from `batch.sample_rows`, in order, and says what to deliver.

        `batch` is what `materialise` gave. Rows of requests cancelled after that are ignored. Raises RayMoEError, and
        changes nothing, on another number of tokens, a live row that did not run, or a token out of its turn.
        """
        rows = batch.rows if batch is not None else ()
        sampled = [row for row in rows if row.samples]
        if len(tokens) != len(sampled):
            raise RayMoEError(f"step {unit.step}: {len(tokens)} tokens for {len(sampled)} sampled rows")
        self._check_turn(unit, rows)
        for row in rows:
            if (opened := self._find(row)) is not None and opened.residency == row.residency:
                opened.committed = row.start + row.count
        return [
            self._deliver(opened, int(token), found)
            for row, token, found in zip(sampled, tokens, logprobs or [()] * len(tokens), strict=True)
            if (opened := self._find(row)) is not None
        ]

    @staticmethod
    def _tokens_of(row: Row, opened: OpenRequest, in_flight: Mapping[int, int]) -> Sequence[int]:
        tokens, end = opened.tokens, row.start + row.count
        if len(tokens) >= end:
            return tokens[row.start : end]
        if len(tokens) == end - 1 and row.ticket in in_flight:
            return [*tokens[row.start :], -1 - in_flight[row.ticket]]
        raise RayMoEError(
            f"request {row.request_id!r} needs {end} tokens and {len(tokens)} are known: commit the units before this "
            f"one first"
        )

    # ---- what it knows ----

    @property
    def has_work(self) -> bool:
        """Whether any request is open."""
        return bool(self._open)

    def open_of(self, checkpoint: str) -> int:
        """Open requests of one checkpoint."""
        return sum(opened.is_of(checkpoint) for opened in self._open.values())

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The open requests, first come first."""
        return tuple(self._open)

    @property
    def outstanding_tokens(self) -> int:
        """Positions that the open requests have yet to compute, if each runs to its max_tokens."""
        return sum(opened.request.positions - opened.committed for opened in self._open.values())

    @property
    def counts(self) -> Counts:
        waiting = len(self._waiting)
        return Counts(waiting=waiting, running=len(self._open) - waiting)

    @property
    def free_blocks(self) -> int:
        return self._allocator.num_free

    @property
    def total_blocks(self) -> int:
        return self._allocator.num_blocks

    # ---- planning ----

    def _release_settled(self) -> None:
        # Their last unit runs before the step that is being planned, so this step can have their blocks.
        for opened in [opened for opened in self._running if opened.settled]:
            self._running.remove(opened)
            self._release(opened)

    def _plan_decode(self, checkpoint: str | None) -> list[Row]:
        rows = []
        for opened in list(self._running):
            if not opened.is_of(checkpoint):
                continue
            # The list is a copy: whom an older request preempted meanwhile is waiting now.
            if opened.state is RequestState.DECODE and self._make_room(opened, opened.planned + 1):
                rows.append(self._take(opened, 1, "decode"))
        return rows

    def _plan_prefill(self, checkpoint: str | None) -> list[Row]:
        rows = []
        budget = self.max_prefill_tokens
        for opened in self._running:
            if opened.is_of(checkpoint) and opened.state is RequestState.PREFILL and budget > 0:
                rows.append(self._take(opened, min(opened.expected - opened.planned, budget), "prefill"))
                budget -= rows[-1].count
        while budget > 0 and len(self._running) < self.max_decode_rows:
            # Nobody waits for a turn of another checkpoint: first come, first served holds within each.
            first = next((one for one in self._waiting if one.is_of(checkpoint)), None)
            if first is None or self._blocks_to_start(first) > self._allocator.num_free:
                break
            opened, needed = first, self._blocks_to_start(first)
            self._waiting.remove(opened)
            self._running.append(opened)
            opened.blocks = self._allocator.allocate(needed)
            opened.take(RequestEvent.ADMIT)
            rows.append(self._take(opened, min(opened.expected, budget), "prefill"))
            budget -= rows[-1].count
        return rows

    def _blocks_to_start(self, opened: OpenRequest) -> int:
        # All of its tokens and the next: a prompt that fits by halves would only be preempted over and over.
        return self.limits.blocks_for(min(opened.expected + 1, opened.request.positions))

    def _take(self, opened: OpenRequest, count: int, phase: Phase) -> Row:
        """Plans the request's next `count` tokens; the chunk that reaches its last token samples."""
        row = Row(
            phase=phase,
            request_id=opened.request.request_id,
            ticket=opened.ticket,
            residency=opened.residency,
            start=opened.planned,
            count=count,
            blocks=opened.blocks,
            samples=opened.planned + count == opened.expected,
            index=opened.expected - len(opened.request.prompt_ids),
        )
        opened.planned += count
        if row.samples:
            opened.pending += 1
            if opened.state is RequestState.PREFILL:
                opened.take(RequestEvent.FILL)
        return row

    def _make_room(self, opened: OpenRequest, positions: int) -> bool:
        """Gives the request blocks for so many positions, preempting from the youngest; False when that is itself."""
        needed = self.limits.blocks_for(positions) - len(opened.blocks)
        while needed > self._allocator.num_free:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is opened:
                return False
        if needed > 0:
            opened.blocks += self._allocator.allocate(needed)
        return True

    def _preempt(self, victim: OpenRequest) -> None:
        victim.take(RequestEvent.PREEMPT)
        self._release(victim)
        victim.committed = victim.planned = 0
        victim.residency += 1
        self._waiting.appendleft(victim)
        self.preemptions += 1

    # ---- bookkeeping ----

    def _admissible(self, request: Request) -> OpenRequest:
        if request.request_id in self._open:
            raise RequestError(f"request_id {request.request_id!r} is open already; ids must be unique", "request_id")
        self.limits.check(request)
        opened = self._open[request.request_id] = OpenRequest(request, next(self._tickets))
        return opened

    def _check_turn(self, unit: UnitPlan, rows: tuple[Row, ...]) -> None:
        ran = {row.ticket for row in rows}
        for row in unit.rows:
            opened = self._find(row)
            if opened is None:
                continue
            where = f"step {unit.step}: request {row.request_id!r}"
            if row.ticket not in ran:
                raise RayMoEError(f"{where} is open, yet its row did not run")
            if row.samples and row.index != opened.generated:
                raise RayMoEError(f"{where} is given token {row.index}; its next is {opened.generated}")

    def _deliver(self, opened: OpenRequest, token: int, logprobs: tuple[TokenLogprobs, ...]) -> Emission:
        opened.pending -= 1
        opened.tokens.append(token)
        reason = opened.finish_reason(token)
        if reason is not None:
            self._close(opened, RequestEvent.FINISH)
        return Emission(opened.request.request_id, opened.generated - 1, token, reason, logprobs)

    def _close(self, opened: OpenRequest, event: RequestEvent) -> None:
        queue = self._waiting if opened.state is RequestState.WAITING else self._running
        if opened in queue:  # a settled request is in neither
            queue.remove(opened)
        opened.take(event)
        self._release(opened)
        del self._open[opened.request.request_id]

    def _release(self, opened: OpenRequest) -> None:
        self._allocator.deallocate(opened.blocks)
        opened.blocks = ()

    def _find(self, row: Row) -> OpenRequest | None:
        """The request that the row is for; None when it is over, even if its id is in use again."""
        opened = self._open.get(row.request_id)
        return opened if opened is not None and opened.ticket == row.ticket else None
