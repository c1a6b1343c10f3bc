"""Where steps spend their time: what is recorded, of which steps, and the timeline that is made of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors import tracing
from ray_moe.actors.tracing import StepRecords, common, record, send
from ray_moe.cli.main import run as command
from ray_moe.config import ClusterConfig
from ray_moe.dataplane.spans import Span, Spans, nesting
from ray_moe.deadline import poll, wait_future
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.engine.trace import MOST_SECONDS, MOST_STEPS, Clock, RankTrace, Recorder, StepTrace
from ray_moe.errors import ConfigError, NotServingError
from ray_moe.observe.chrome import DEVICE, LOOP, shifts, timeline, totals
from ray_moe.telemetry import FinishedSpans
from tests.layers import untimed
from tests.one_peer import OnePeer

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
INSIDE_A_LAYER = ["plan", "counts", "pack", "dispatch", "receive", "experts", "combine", "reduce"]


def run(peer: OnePeer, *, first: int = 0, steps: int = 0) -> list[int]:
    """The tokens of one request; with `steps` the loop records so many from `first` on."""
    if steps:
        peer.loop.trace.record(first, steps)
    with peer:
        peer.loop.submit(Request("a", tuple(range(1, 30)), GREEDY))
        peer.outlet.until_ended("a")
    assert peer.raised is None
    return peer.outlet.tokens("a")


# -- What is recorded


def test_a_recorded_step_says_what_every_layer_did_in_order(family_dir: Callable[..., Path]) -> None:
    peer = OnePeer(family_dir("qwen3_moe"), audit_rate=0.0)
    run(peer, steps=4)
    steps, done, truncated = peer.loop.trace.recorded()
    assert (len(steps), done, truncated) == (4, True, False)
    assert [step.units for step in steps] == [("prefill",), ("decode",), ("decode",), ("decode",)]
    assert [step.rows for step in steps] == [29, 1, 1, 1]
    for step in steps:
        assert (step.generation, step.epoch, step.release_id, step.leads) == (1, 0, "alone-1", True)
        named = nesting(step.spans)
        assert all(step.start <= span.start <= span.end <= step.end for span, _ in named)
        outer = [span.name for span, around in named if around < 0]
        assert outer == ["plan", "offer", "units", "bare layers", "agreement"]
        units = [place for place, (span, _) in enumerate(named) if span.name in ("prefill", "decode")]
        assert [named[place][0].name for place in units] == list(step.units)
        layers = [place for place, (span, around) in enumerate(named) if span.name == "layer" and around == units[0]]
        assert [named[place][0].layer for place in layers] == list(peer.checkpoint.moe_layers)
        for place in layers:
            assert [span.name for span, around in named if around == place] == INSIDE_A_LAYER
        assert any(span.name == "commit" for span in step.spans)


@pytest.mark.parametrize("strategy", ["chunk_pipeline", "microbatch_pipeline", "shared_path"])
def test_spans_nest_whatever_order_a_strategy_takes_its_tasks_in(
    family_dir: Callable[..., Path], strategy: str
) -> None:
    peer = OnePeer(family_dir("qwen2_moe"), strategy=strategy, audit_rate=0.5)
    run(peer, steps=3)
    steps, _, _ = peer.loop.trace.recorded()
    assert len(steps) == 3
    for step in steps:
        names = {span.name for span, _ in nesting(step.spans)}
        assert names >= {*INSIDE_A_LAYER, "layer", "agreement"}
        assert ("shared expert" in names) == (strategy == "shared_path")


def test_recording_changes_no_token_and_no_count(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    plain, recorded = OnePeer(folder), OnePeer(folder)
    assert run(plain) == run(recorded, steps=MOST_STEPS)
    assert plain.loop.trace.recorded()[0] == ()
    for layer, counters in plain.counters.items():
        assert counters.invocations == recorded.counters[layer].invocations > 0
        assert counters.rows_local == recorded.counters[layer].rows_local > 0


def test_sampled_steps_are_those_whose_number_the_period_divides(family_dir: Callable[..., Path]) -> None:
    peer, found = OnePeer(family_dir("qwen3_moe")), []
    peer.loop.trace = Recorder(0, 3, lambda unread: found.append(unread.read()))
    run(peer)
    worked = peer.loop.counters.steps_worked
    assert worked >= 6
    assert found
    assert all(trace.step % 3 == 0 and trace.units for trace in found)
    assert len(found) <= worked // 2


def test_without_a_sink_nothing_is_sampled() -> None:
    assert not Recorder(0, 3).armed


@pytest.mark.parametrize("steps", [0, MOST_STEPS + 1])
def test_a_number_of_steps_out_of_bounds_is_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=rf"steps must be in \[1, {MOST_STEPS}\], found {steps}"):
        Recorder(0).record(5, steps)


def test_a_recording_that_nobody_waits_for_any_more_ends() -> None:
    recorder = Recorder(0)
    recorder.record(5, 3, "a")
    assert recorder.armed
    recorder.stop("a")
    assert not recorder.armed
    assert recorder.recorded() == ((), True, False)


def test_a_recording_is_ended_by_its_own_id_alone() -> None:
    recorder = Recorder(0)
    recorder.record(5, 3, "a")
    for other in ("b", ""):
        recorder.stop(other)
        assert (recorder.armed, recorder.done, recorder.holder) == (True, False, "a")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), MOST_SECONDS + 1])
def test_a_time_out_of_bounds_is_refused_before_anybody_is_asked(seconds: float) -> None:
    with pytest.raises(ConfigError, match=rf"seconds must be in \(0, {MOST_SECONDS:g}\], found {seconds:g}"):
        record({}, 1, seconds, 1.0)


def test_spans_without_room_are_counted() -> None:
    spans = Spans(most=2)
    for name in ("a", "b", "c"):
        spans.mark(name)
    assert [span.name for span in spans] == ["a", "b"]
    assert spans.left_out == 1


def test_what_comes_after_a_step_is_none_of_it() -> None:
    spans = Spans()
    spans.mark("a")
    spans.close()
    spans.mark("b")
    assert ([span.name for span in spans], spans.left_out) == (["a"], 0)


def test_nesting_finds_the_span_around_each() -> None:
    a, b, c, d = Span("a", 0, 9), Span("b", 1, 4), Span("c", 5, 8), Span("d", 6, 7)
    assert nesting([b, d, c, a]) == [(a, -1), (b, 0), (c, 0), (d, 2)]
    assert nesting([Span("a", 0, 4), Span("b", 4, 6)]) == [(Span("a", 0, 4), -1), (Span("b", 4, 6), -1)]
    inner, outer = Span("inner", 1, 3), Span("outer", 1, 3)
    assert nesting([inner, outer]) == [(outer, -1), (inner, 0)]


def test_a_span_that_begins_inside_another_and_ends_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="begins inside"):
        nesting([Span("a", 0, 5), Span("b", 3, 7)])


class Actor(StepRecords):
    """What asks a loop for recordings, around one of this process."""

    def __init__(self, peer: OnePeer) -> None:
        self._config, self._engine = ClusterConfig(model="m"), peer.loop


FAR = 10**6


def test_a_recording_is_one_askers_until_it_is_ended(family_dir: Callable[..., Path]) -> None:
    peer = OnePeer(family_dir("qwen3_moe"))
    actor = Actor(peer)

    async def asked() -> None:
        assert await actor.record_steps("a", FAR, 2, 60.0) < FAR
        assert not await actor.recording_is_done("a")
        with pytest.raises(NotServingError, match="rank 0: another recording is under way"):
            await actor.record_steps("b", FAR, 1, 60.0)
        for steps, seconds in ((0, 60.0), (1, float("nan"))):
            with pytest.raises(ConfigError):
                await actor.record_steps("a", FAR, steps, seconds)
        await actor.end_recording("b")
        assert not await actor.recording_is_done("a")
        await actor.end_recording("a")
        assert await actor.record_steps("b", 0, 1, 60.0) >= 0
        with pytest.raises(NotServingError, match="rank 0: the recording has ended"):
            await actor.recording_is_done("a")
        peer.loop.submit(Request("a", (1, 2, 3), GREEDY))
        while not await actor.recording_is_done("b"):
            await asyncio.sleep(0.01)
        with pytest.raises(NotServingError, match="another recording is under way"):  # it is not read yet
            await actor.record_steps("a", FAR, 1, 60.0)
        with pytest.raises(NotServingError, match="rank 0: the recording has ended"):
            await actor.recorded_steps("a")
        found = await actor.recorded_steps("b")
        assert (found.rank, found.done, len(found.steps)) == (0, True, 1)

    with peer:
        asyncio.run(asked())
    assert peer.raised is None


def test_a_recording_whose_asker_is_gone_ends_by_itself(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_MARGIN_S", 0.05)
    peer = OnePeer(family_dir("qwen3_moe"))
    actor = Actor(peer)

    async def asked() -> None:
        await actor.record_steps("a", FAR, 2, 0.05)
        assert not await actor.recording_is_done("a")
        while peer.loop.trace.armed:
            await asyncio.sleep(0.01)
        await actor.record_steps("b", FAR, 2, 60.0)

    with peer:
        asyncio.run(asyncio.wait_for(asked(), 30.0))
    assert peer.loop.trace.holder == "b"


# -- Recordings of several ranks


class Handle:
    """An actor's handle as Ray has it, for one of this process; `gone_at` is what it is asked when it dies."""

    def __init__(self, actor: Actor, events: asyncio.AbstractEventLoop) -> None:
        self.actor, self._events, self._gone = actor, events, False
        self.gone_at = ""

    @property
    def trace(self) -> Recorder:
        assert self.actor._engine is not None
        return self.actor._engine.trace

    def ended(self) -> bool:
        return poll(lambda: not self.trace.armed and not self.trace.holder, 30.0)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._ask(method, args))

    def _ask(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        self._gone = self._gone or method == self.gone_at
        if self._gone:
            dead: Future[Any] = Future()
            dead.set_exception(RayActorError(error_msg="The actor died\nover\nmany lines"))
            return dead
        return asyncio.run_coroutine_threadsafe(getattr(self.actor, method)(*args), self._events)


def answers_of(calls: Any, seconds: float, what: str) -> Any:
    """`ray_get` for these."""
    return [wait_future(call, seconds, what) for call in calls] if isinstance(calls, list) else calls.result(seconds)


@contextmanager
def two_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Handle, Handle]]:
    """Ranks 0 and 1, each with a loop of its own that has nothing to do."""
    monkeypatch.setattr(tracing, "ray_get", answers_of)
    monkeypatch.setattr(tracing, "ray_ready", lambda calls: ([one for one in calls if one.done()], []))
    events, first, second = asyncio.new_event_loop(), OnePeer(folder), OnePeer(folder)
    second.loop.rank = 1
    thread = threading.Thread(target=events.run_forever)
    thread.start()
    try:
        with first, second:
            yield Handle(Actor(first), events), Handle(Actor(second), events)
    finally:
        events.call_soon_threadsafe(events.stop)
        thread.join(30.0)
        events.close()


def as_peers(*handles: Handle) -> Mapping[int, ActorHandle]:
    return {rank: cast(ActorHandle, handle) for rank, handle in enumerate(handles)}


def test_a_recording_that_one_rank_refuses_is_ended_on_those_that_had_begun_and_on_no_other(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(family_dir("qwen3_moe"), monkeypatch) as (first, second):
        second.record_steps.remote("other", FAR, 2, 60.0).result(30.0)
        with pytest.raises(NotServingError, match="rank 1: another recording is under way"):
            record(as_peers(first, second), 2, 5.0, 30.0)
        assert first.ended()
        assert (second.trace.armed, second.trace.holder) == (True, "other")


def test_of_recordings_that_begin_at_once_one_is_made_and_the_others_are_told(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, found = threading.Barrier(3), []

    def ask(peers: Mapping[int, ActorHandle]) -> None:
        together.wait(30.0)
        try:
            found.append(len(record(peers, 2, 0.5, 30.0)))
        except NotServingError as error:
            found.append(str(error))

    with two_ranks(family_dir("qwen3_moe"), monkeypatch) as handles:
        threads = [threading.Thread(target=ask, args=(as_peers(*handles),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert all(handle.ended() for handle in handles)
    assert len(found) == 3
    assert 2 in found
    assert set(found) <= {2, "rank 0: another recording is under way"}


@pytest.mark.parametrize("gone_at", ["step_reached", "record_steps", "recording_is_done", "recorded_steps"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_lost_meanwhile_is_named_and_the_others_stop_recording(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, gone_at: str, lost: int
) -> None:
    with two_ranks(family_dir("qwen3_moe"), monkeypatch) as handles:
        handles[lost].gone_at = gone_at
        with pytest.raises(NotServingError) as raised:
            record(as_peers(*handles), 2, 0.05, 30.0)
        assert str(raised.value) == f"rank {lost} was lost while steps were recorded (RayActorError)"
        assert handles[1 - lost].ended()


def test_what_was_recorded_is_there_although_a_rank_is_lost_right_after(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(family_dir("qwen3_moe"), monkeypatch) as (first, second):
        second.gone_at = "end_recording"
        assert [one.rank for one in record(as_peers(first, second), 2, 0.05, 30.0)] == [0, 1]
        assert first.ended()


# -- The command

NOBODY = ["--address", "127.0.0.1:9"]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, reason in ((tmp_path, "Is a directory"), (tmp_path / ("x" * 300), "File name too long")):
        assert command(["trace", "--chrome", str(file), *NOBODY]) == 2
        assert capsys.readouterr().err == f"error: --chrome: cannot write {file}: {reason}\n"


def test_without_a_recording_the_file_is_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}", encoding="utf-8")
    for file in (old, new):
        assert command(["trace", "--chrome", str(file), *NOBODY]) == 1
        assert "no Ray answers at " in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text(encoding="utf-8") == "{}"


# -- The timeline


def step_of(rank: int, number: int, begin: int, offered: int, agreed: int, **changes: Any) -> StepTrace:
    spans = (Span("plan", begin, offered), Span("offer", offered, offered + 1), Span("agreement", agreed - 2, agreed))
    made = StepTrace(rank, number, 3, 1, "r1", ("decode",), 2, begin, agreed + 5, spans)
    return replace(made, **changes)


def documents(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    return [asdict(one) for one in ranks]


def test_a_timeline_has_a_process_per_rank_and_a_thread_for_the_device() -> None:
    device = Span("decode", 20, 30, on_device=True)
    layer = Span("experts", 21, 25, layer=4)
    steps = [step_of(rank, 7, 10 + rank, 20, 40) for rank in (0, 2)]
    steps[1] = replace(steps[1], spans=(*steps[1].spans, device, layer))
    clock = Clock("m", 1000, 10)
    found = timeline("c", documents([RankTrace(step.rank, "host", clock, (step,), True) for step in steps]))
    json.dumps(found)
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 2}
    assert min(event["ts"] for event in events) == 0.0
    on_device = [event for event in events if event["tid"] == DEVICE]
    assert [(event["name"], event["pid"], event["ts"], event["dur"]) for event in on_device] == [
        ("decode", 2, 0.01, 0.01)
    ]
    experts = next(event for event in events if event["name"] == "experts")
    assert (experts["args"], experts["tid"]) == ({"step": 7, "layer": 4}, LOOP)
    whole = next(event for event in events if event["name"] == "step 7")
    assert whole["args"] == {"step": 7, "generation": 3, "epoch": 1, "release_id": "r1", "rows": 2, "units": "decode"}
    names = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0 on host", "rank 2 on host"]
    assert found["otherData"]["clock_uncertainty_us"] == {"0": 0.0, "2": 0.0}


def test_time_is_summed_by_span_and_rank() -> None:
    step = step_of(0, 1, 0, 10, 50)
    found = totals(documents([RankTrace(0, "h", Clock("m", 0, 0), (step, replace(step, step=2)), True)]))
    assert found["step"][0] == pytest.approx(2 * 55e-9)
    assert found["agreement"][0] == pytest.approx(2 * 2e-9)


def test_only_steps_that_all_ranks_have_are_kept() -> None:
    clock = Clock("m", 0, 0)
    first = RankTrace(0, "h", clock, tuple(step_of(0, number, 0, 1, 2) for number in (4, 5, 6)), True)
    second = RankTrace(1, "h", clock, tuple(step_of(1, number, 0, 1, 2) for number in (5, 6, 7)), False)
    found = common([first, second])
    assert [[step.step for step in one.steps] for one in found] == [[5, 6], [5, 6]]
    assert [one.done for one in found] == [True, False]


@untimed
@given(
    behind=st.integers(-(10**12), 10**12),
    wrong=st.integers(-(10**9), 10**9),
    offers=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=8),
    waits=st.tuples(st.integers(0, 500), st.integers(0, 500)),
)
def test_another_machines_times_are_put_where_what_was_agreed_is_possible(
    behind: int, wrong: int, offers: list[tuple[int, int]], waits: tuple[int, int]
) -> None:
    """Rank 1's clock is `behind` that of rank 0, and its wall clock is off by `wrong`: the truth is within what is said
    to be the uncertainty, and the result contradicts no agreement."""
    ranks: list[list[StepTrace]] = [[], []]
    for number, times in enumerate(offers):
        begun = 10_000 * number
        all_there = begun + max(times)
        for rank, shift in ((0, 0), (1, -behind)):
            offered, agreed = begun + times[rank] + shift, all_there + waits[rank] + shift
            ranks[rank].append(step_of(rank, number, begun + shift, offered, agreed))
    clocks = (Clock("here", 10**15, 0), Clock("there", 10**15 + behind + wrong, 0))
    found = documents([RankTrace(rank, "h", clocks[rank], tuple(ranks[rank]), True) for rank in (0, 1)])
    placed, off = shifts(found)[1]
    assert abs(placed - behind) <= off
    for here, there in zip(*ranks, strict=True):
        assert there.spans[2].end + placed >= here.spans[1].start
        assert here.spans[2].end >= there.spans[1].start + placed


# -- OpenTelemetry


def test_the_spans_of_one_step_on_all_ranks_are_one_trace(family_dir: Callable[..., Path]) -> None:
    memory = InMemorySpanExporter()
    spans = FinishedSpans(SimpleSpanProcessor(memory), "test")
    peer = OnePeer(family_dir("qwen3_moe"), audit_rate=0.0)
    run(peer, steps=2)
    for step in peer.loop.trace.recorded()[0]:
        for rank in (0, 1):
            send(spans, "c", replace(step, rank=rank, leads=rank == 0))
    found = memory.get_finished_spans()
    traces = {span.context.trace_id for span in found}
    assert len(traces) == 2
    for trace in traces:
        own = [span for span in found if span.context.trace_id == trace]
        (root,) = [span for span in own if span.parent is None]
        assert root.name.startswith("step ")
        ranks = [span for span in own if span.parent is not None and span.parent.span_id == root.context.span_id]
        assert [span.name for span in ranks] == ["rank 0: step", "rank 1: step"]
        ids = {span.context.span_id: span for span in own}
        experts = [span for span in own if span.name == "experts"]
        assert len(experts) == 2 * len(peer.checkpoint.moe_layers)
        for span in experts:
            assert ids[span.parent.span_id].name == "layer"
            assert span.attributes["ray_moe.layer"] in peer.checkpoint.moe_layers
            assert {"ray_moe.release", "ray_moe.generation", "ray_moe.epoch", "ray_moe.rank"} <= set(span.attributes)
        assert all(span.start_time <= span.end_time for span in own)
