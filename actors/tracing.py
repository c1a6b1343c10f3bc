"""Where the steps of a cluster spend their time: recordings of the same steps on all ranks, and sampled steps as spans
of OpenTelemetry.

A recording begins at a step that no rank has reached when it is asked for. Ranks then choose alike by themselves.
It has an id, lasts until it is ended by that id, and ends by itself some time after nobody can want it any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from ray_moe.config import ClusterConfig
from ray_moe.dataplane.spans import nesting
from ray_moe.deadline import Deadline, pause, ray_get, ray_ready, wait_for
from ray_moe.engine.trace import Clock, RankTrace, Recorder, StepTrace, Unread
from ray_moe.errors import NotServingError, RayMoEError

if TYPE_CHECKING:
    from ray_moe.engine.loop import EngineLoop
    from ray_moe.telemetry import FinishedSpans

# How far ahead a recording begins at first, and how often it is tried farther ahead.
_AHEAD, _TRIES = 16, 4
_LOOK_S = 0.1
# How long after its time a recording may still be read; and how long one waits to be told that it has ended.
_MARGIN_S, _END_S = 30.0, 5.0


class StepRecords:
    """What an expert actor offers to whoever asks where its steps spend their time."""

    _config: ClusterConfig
    _engine: EngineLoop | None
    _expiry: asyncio.TimerHandle | None = None

    async def step_reached(self) -> int:
        """The step that runs, or is about to."""
        return self._recorded.counters.committed_step + 1

    async def record_steps(self, recording: str, first: int, steps: int, seconds: float) -> int:
        """Record the first `steps` steps with work from `first` on; returns the step that was reached by then.

        Begins `recording`, or begins it again; it ends by itself some time after its `seconds`. Raises `ConfigError`
        for a number out of bounds, `NotServingError` while another recording is under way.
        """
        loop, events = self._recorded, asyncio.get_running_loop()
        begun: asyncio.Future[int] = events.create_future()

        def begin() -> None:
            free, reached = loop.trace.holder in ("", recording), loop.counters.committed_step + 1
            if free:
                loop.trace.record(first, steps, recording)
            events.call_soon_threadsafe(answer, free, reached)

        def answer(free: bool, reached: int) -> None:
            if free:
                self._let_expire(loop, recording, seconds + _MARGIN_S)
            if begun.done():  # nobody waits any more
                return
            if free:
                begun.set_result(reached)
            else:
                begun.set_exception(NotServingError(f"rank {loop.rank}: another recording is under way"))

        Recorder.check(steps)
        Recorder.check_seconds(seconds)
        loop.post(begin, settled=False)
        return await wait_for(begun, self._config.step_deadline_s, f"recording on rank {loop.rank}")

    async def recording_is_done(self, recording: str) -> bool:
        """Whether all steps that were asked for have come. Raises `NotServingError` once the recording has ended."""
        loop = self._recorded
        done = loop.trace.done
        self._check_held(loop, recording)
        return done

    async def recorded_steps(self, recording: str) -> RankTrace:
        """What was recorded, as far as it has come. Raises `NotServingError` once the recording has ended."""
        loop = self._recorded
        reading = asyncio.to_thread(loop.trace.recorded)  # may be a hundred thousand spans
        steps, done, truncated = await wait_for(reading, self._config.step_deadline_s, "reading a recording")
        self._check_held(loop, recording)  # now: an id that is there has been there all the while
        return RankTrace(loop.rank, socket.gethostname(), Clock.now(), steps, done, truncated)

    async def end_recording(self, recording: str) -> None:
        """Nobody waits for the rest of it. Nothing happens where it has ended, or has not begun."""
        loop = self._recorded
        loop.post(lambda: loop.trace.stop(recording), settled=False)

    def _let_expire(self, loop: EngineLoop, recording: str, seconds: float) -> None:
        def expire() -> None:
            with suppress(RayMoEError):  # a loop that has ended records nothing
                loop.post(lambda: loop.trace.stop(recording), settled=False)

        if self._expiry is not None:  # of a recording that has ended: there is one at a time
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(seconds, expire)

    @staticmethod
    def _check_held(loop: EngineLoop, recording: str) -> None:
        if loop.trace.holder != recording:
            raise NotServingError(f"rank {loop.rank}: the recording has ended")

    @property
    def _recorded(self) -> EngineLoop:
        if self._engine is None:
            raise NotServingError("this peer is not serving yet")
        return self._engine


def record(peers: Mapping[int, ActorHandle], steps: int, seconds: float, asking_s: float) -> tuple[RankTrace, ...]:
    """Record `steps` steps with work on all `peers`, and wait up to `seconds` for them; each question may take
    `asking_s`. Only steps that every rank has are returned, and these may be fewer.

    Raises `ConfigError` for a number out of bounds; `NotServingError` when a rank is lost, when another recording is
    under way, or when steps are faster than questions; `DeadlineError` when a rank does not answer.
    """
    Recorder.check(steps)
    Recorder.check_seconds(seconds)
    recording, deadline = secrets.token_hex(8), Deadline(seconds)
    try:
        _begin(peers, recording, steps, seconds, asking_s)
        while not all(_ask(peers, "recording_is_done", asking_s, recording)) and not deadline.passed:
            pause(min(_LOOK_S, deadline.left + 0.001))
        return common(_ask(peers, "recorded_steps", asking_s, recording))
    finally:
        _end(peers, recording, min(asking_s, _END_S))


def _begin(peers: Mapping[int, ActorHandle], recording: str, steps: int, seconds: float, asking_s: float) -> None:
    ahead = _AHEAD
    for _ in range(_TRIES):
        first = max(_ask(peers, "step_reached", asking_s)) + ahead
        asked = (recording, first, steps, seconds)
        reached = [step for some in _in_order(peers) for step in _ask(some, "record_steps", asking_s, *asked)]
        if max(reached) < first:
            return
        ahead *= 8
    raise NotServingError(f"steps pass faster than ranks answer: {ahead // 8} of them within one question")


def _end(peers: Mapping[int, ActorHandle], recording: str, asking_s: float) -> None:
    for some in reversed(_in_order(peers)):
        # Where it cannot be ended it expires, and whoever recorded has an error of its own, or all that was asked for.
        with suppress(RayMoEError, RayError):
            _ask(some, "end_recording", asking_s, recording)


def _in_order(peers: Mapping[int, ActorHandle]) -> list[dict[int, ActorHandle]]:
    """The lowest rank, then the others: of several who begin at once the one that gets the lowest gets all. It is the
    last to be free again."""
    lowest = min(peers)
    others = {rank: peer for rank, peer in peers.items() if rank != lowest}
    return [{lowest: peers[lowest]}, others] if others else [{lowest: peers[lowest]}]


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
    """What each of `peers` answers. Raises `NotServingError` that names who is lost, and what they raise."""
    calls = {rank: getattr(peer, method).remote(*args) for rank, peer in peers.items()}
    try:
        found: list[Any] = ray_get(list(calls.values()), seconds, f"{method} of ranks {sorted(peers)}")
    except RayActorError as error:
        lost = ", ".join(str(rank) for rank in _lost(calls)) or f"one of {sorted(peers)}"
        raise NotServingError(f"rank {lost} was lost while steps were recorded ({type(error).__name__})") from error
    return found


def _lost(calls: Mapping[int, Any]) -> list[int]:
    """The ranks whose actor is gone, as far as that is known by now."""
    known, lost = ray_ready(list(calls.values()))[0], []
    for rank in sorted(calls):
        if calls[rank] in known:
            try:
                ray_get(calls[rank], _END_S, f"the answer of rank {rank}")
            except RayActorError:
                lost.append(rank)
            except (RayMoEError, RayError):
                continue  # it has an error to tell, and is there
    return lost


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
