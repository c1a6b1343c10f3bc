"""Where the steps of a cluster spend their time: recordings of the same steps on all ranks, and sampled steps as spans
of OpenTelemetry.

A recording begins at a step that no rank has reached when it is asked for. Ranks then choose alike by themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle

from ray_moe.config import ClusterConfig
from ray_moe.dataplane.spans import nesting
from ray_moe.deadline import Deadline, pause, ray_get, wait_for
from ray_moe.engine.trace import Clock, RankTrace, Recorder, StepTrace, Unread
from ray_moe.errors import NotServingError

if TYPE_CHECKING:
    from ray_moe.engine.loop import EngineLoop
    from ray_moe.telemetry import FinishedSpans

# How far ahead a recording begins at first, and how often it is tried farther ahead.
_AHEAD, _TRIES = 16, 4
_LOOK_S = 0.1


class StepRecords:
    """What an expert actor offers to whoever asks where its steps spend their time."""

    _config: ClusterConfig
    _engine: EngineLoop | None

    async def step_reached(self) -> int:
        """The step that runs, or is about to."""
        return self._recorded.counters.committed_step + 1

    async def record_steps(self, first: int, steps: int) -> int:
        """Record the first `steps` steps with work from `first` on; returns the step that was reached by then.

        Raises `ConfigError` for a number out of bounds, `NotServingError` while another recording is under way.
        """
        loop, events = self._recorded, asyncio.get_running_loop()
        begun: asyncio.Future[int] = events.create_future()

        def begin() -> None:
            free, reached = loop.trace.done, loop.counters.committed_step + 1
            if free:
                loop.trace.record(first, steps)
            events.call_soon_threadsafe(answer, free, reached)

        def answer(free: bool, reached: int) -> None:
            if begun.done():  # nobody waits any more
                return
            if free:
                begun.set_result(reached)
            else:
                begun.set_exception(NotServingError(f"rank {loop.rank}: another recording is under way"))

        Recorder.check(steps)
        loop.post(begin, settled=False)
        return await wait_for(begun, self._config.step_deadline_s, f"recording on rank {loop.rank}")

    async def recording_is_done(self) -> bool:
        """Whether all steps that were asked for have come."""
        return self._recorded.trace.done

    async def recorded_steps(self) -> RankTrace:
        """What was recorded, as far as it has come."""
        loop = self._recorded
        reading = asyncio.to_thread(loop.trace.recorded)  # may be a hundred thousand spans
        steps, done, truncated = await wait_for(reading, self._config.step_deadline_s, "reading a recording")
        return RankTrace(loop.rank, socket.gethostname(), Clock.now(), steps, done, truncated)

    async def end_recording(self) -> None:
        """Nobody waits for the rest."""
        loop = self._recorded
        loop.post(loop.trace.stop, settled=False)

    @property
    def _recorded(self) -> EngineLoop:
        if self._engine is None:
            raise NotServingError("this peer is not serving yet")
        return self._engine


def record(peers: Mapping[int, ActorHandle], steps: int, seconds: float, asking_s: float) -> tuple[RankTrace, ...]:
    """Record `steps` steps with work on all `peers`, and wait up to `seconds` for them; each question may take
    `asking_s`. Only steps that every rank has are returned, and these may be fewer.

    Raises `ConfigError` for a number of steps out of bounds, `NotServingError` when steps are faster than questions.
    """
    Recorder.check(steps)
    deadline, ahead = Deadline(seconds), _AHEAD
    for _ in range(_TRIES):
        first = max(_ask(peers, "step_reached", asking_s)) + ahead
        if max(_ask(peers, "record_steps", asking_s, first, steps)) < first:
            break
        _ask(peers, "end_recording", asking_s)
        ahead *= 8
    else:
        raise NotServingError(f"steps pass faster than ranks answer: {ahead // 8} of them within one question")
    try:
        while not all(_ask(peers, "recording_is_done", asking_s)) and not deadline.passed:
            pause(min(_LOOK_S, deadline.left + 0.001))
        return common(_ask(peers, "recorded_steps", asking_s))
    finally:
        _ask(peers, "end_recording", asking_s)


def common(found: list[RankTrace]) -> tuple[RankTrace, ...]:
    """The same with those steps alone that all ranks have."""
    shared = set.intersection(*({step.step for step in one.steps} for one in found)) if found else set()
    return tuple(
        RankTrace(
            one.rank,
            one.node,
            one.clock,
            tuple(step for step in one.steps if step.step in shared),
            one.done,
            one.truncated,
        )
        for one in found
    )


def _ask(peers: Mapping[int, ActorHandle], method: str, seconds: float, *args: object) -> list[Any]:
    calls = [getattr(peer, method).remote(*args) for peer in peers.values()]
    found: list[Any] = ray_get(calls, seconds, f"{method} of ranks {sorted(peers)}")
    return found


# -- Sampled steps


def recorder_of(config: ClusterConfig, rank: int) -> Recorder:
    """A loop's. On the actor's event loop, where sampled steps become spans. Raises `ConfigError`."""
    return Recorder(rank, config.trace_every_steps, _step_sink(config))


def _step_sink(config: ClusterConfig) -> Callable[[Unread], None] | None:
    if not config.trace_every_steps:
        return None
    from ray_moe.telemetry import finished_spans_of  # a fifth of a second that most peers need not spend

    spans = finished_spans_of("ray_moe.expert")
    if spans is None:
        return None
    events = asyncio.get_running_loop()

    def sink(unread: Unread) -> None:
        events.call_soon_threadsafe(lambda: send(spans, config.name, unread.read()))

    return sink


def send(spans: FinishedSpans, cluster: str, trace: StepTrace) -> None:
    """One rank's step as spans, in the trace that all ranks of that step write into."""
    lag = time.time_ns() - perf_counter_ns()
    ids = trace_ids(cluster, trace.epoch, trace.step)
    ours: dict[str, str | int | float | bool] = {
        "ray_moe.cluster": cluster,
        "ray_moe.rank": trace.rank,
        "ray_moe.step": trace.step,
        "ray_moe.release": trace.release_id,
        "ray_moe.generation": trace.generation,
        "ray_moe.epoch": trace.epoch,
    }
    about = {**ours, "ray_moe.rows": trace.rows, "ray_moe.units": ", ".join(trace.units)}
    around = spans.inside(*ids)
    whole = spans.add(f"rank {trace.rank}: step", trace.start + lag, trace.end + lag, about, around)
    inside: list[Any] = []
    for span, outer in nesting([span for span in trace.spans if not span.on_device]):
        attributes = ours if span.layer < 0 else {**ours, "ray_moe.layer": span.layer}
        parent = whole if outer < 0 else inside[outer]
        inside.append(spans.add(span.name, span.start + lag, span.end + lag, attributes, parent))
    for span in trace.spans:
        if span.on_device:
            attributes = {**ours, "ray_moe.device": True}
            spans.add(f"{span.name} on the device", span.start + lag, span.end + lag, attributes, whole)
    if trace.leads:
        spans.add(f"step {trace.step}", trace.start + lag, trace.end + lag, ours, ids=ids)


def trace_ids(cluster: str, epoch: int, step: int) -> tuple[int, int]:
    """Of a step's trace and of the span around all ranks' spans: the same on every rank."""
    told = hashlib.sha256(f"{cluster}/{epoch}/{step}".encode()).digest()
    return int.from_bytes(told[:16], "big") | 1, int.from_bytes(told[16:24], "big") | 1
