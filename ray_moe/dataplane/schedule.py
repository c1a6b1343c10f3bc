"""Overlap is a schedule over tasks, streams and buffers (specification 0x09).

Tasks wait for the completion of their predecessors, a stream runs one task at a time, and a buffer lives until its last
reader has ended. Everything here is pure and in analytical units: it orders work, and it measures nothing. The designs
at the end are what a layer executes, in `execution_order`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import combinations

from ray_moe.errors import ConfigError, EvidenceError, ScheduleError
from ray_moe.evidence import Units

_ORIGIN = Units(0)
_NUMBER = re.compile(r"_([0-9]+)$")


class Stream(StrEnum):
    """The streams of the four designs."""

    CONTROL = "control"
    PACK = "pack"
    COMMUNICATION = "communication"
    COMPUTE = "compute"


@dataclass(frozen=True)
class Task:
    """One piece of work on one stream, which starts when all its predecessors have ended.

    A name is a kind, with a number where there are several: `dispatch_1`, `reduce`. Raises `EvidenceError` for a
    duration that is not in units, such as a time, `ScheduleError` (duration) for one below a unit.
    """

    name: str
    duration: Units
    stream: str
    predecessors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.duration, Units):
            raise EvidenceError(f"task {self.name}: a duration is in Units, found {self.duration!r}")
        if self.duration == _ORIGIN:
            raise ScheduleError(("duration",), f"task {self.name} must take at least 1 unit, found {self.duration}")

    @cached_property
    def kind(self) -> str:
        """`dispatch` of `dispatch_1`, `reduce` of `reduce`."""
        return _NUMBER.sub("", self.name)

    @cached_property
    def index(self) -> int | None:
        """1 of `dispatch_1`, None of `reduce`."""
        number = _NUMBER.search(self.name)
        return None if number is None else int(number[1])


@dataclass(frozen=True)
class Span:
    """Half-open: [start, end)."""

    start: Units
    end: Units

    def __str__(self) -> str:
        return f"[{int(self.start)}, {int(self.end)}) units"


@dataclass(frozen=True, eq=False)
class Schedule(Mapping[str, Span]):
    """The span of each task by name, in the order in which tasks start."""

    tasks: tuple[Task, ...]
    spans: Mapping[str, Span]

    def __getitem__(self, name: str) -> Span:
        return self.spans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def makespan(self) -> Units:
        """The latest end."""
        return max((span.end for span in self.spans.values()), default=_ORIGIN)

    @property
    def hidden_units(self) -> Units:
        """What one task after another would take, less this. A property of the model under its own durations: resources
        that tasks share on a device are not in it, so it is neither a time nor a speed-up."""
        return Units(sum(int(task.duration) for task in self.tasks) - int(self.makespan))

    def intersection(self, stream: str, other: str) -> Units:
        """Units at which both streams run some task."""
        mine, theirs = ([self.spans[task.name] for task in self.tasks if task.stream == s] for s in (stream, other))
        return Units(sum(_common(span, another) for span in mine for another in theirs))


# -- Scheduling


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raises `ScheduleError` with all of duplicate_name, unknown_predecessor and cycle that apply."""
    problems: list[tuple[str, str]] = []
    names = {task.name for task in tasks}
    if len(names) != len(tasks):
        twice = sorted(name for name in names if sum(task.name == name for task in tasks) > 1)
        problems.append(("duplicate_name", f"{', '.join(twice)} named more than once"))
    for task in tasks:
        unknown = [name for name in task.predecessors if name not in names]
        if unknown:
            problems.append(("unknown_predecessor", f"{task.name} waits for {', '.join(unknown)}"))
    try:
        TopologicalSorter({task.name: task.predecessors for task in tasks}).prepare()
    except CycleError as error:
        problems.append(("cycle", " after ".join(reversed(error.args[1]))))
    _refuse(problems)


def serialize(tasks: Sequence[Task]) -> Schedule:
    """One task after another, in submission order where that respects predecessors. Raises as `check_tasks`."""
    check_tasks(tasks)
    spans: dict[str, Span] = {}
    waiting, now = list(tasks), _ORIGIN
    while waiting:
        task = next(task for task in waiting if all(name in spans for name in task.predecessors))
        waiting.remove(task)
        spans[task.name] = Span(now, now + task.duration)
        now += task.duration
    return Schedule(tuple(tasks), spans)


def list_schedule(tasks: Sequence[Task]) -> Schedule:
    """Greedy: at each instant every idle stream starts its first ready task in submission order.

    Some task runs at every instant before the end, so it is never longer than `serialize`. It need not be the shortest.
    Raises as `check_tasks`.
    """
    check_tasks(tasks)
    spans: dict[str, Span] = {}
    idle_from: dict[str, Units] = {}
    waiting, now = list(tasks), _ORIGIN
    while waiting:
        for task in tuple(waiting):
            ready = all(name in spans and spans[name].end <= now for name in task.predecessors)
            if ready and idle_from.get(task.stream, _ORIGIN) <= now:
                waiting.remove(task)
                spans[task.name] = Span(now, now + task.duration)
                idle_from[task.stream] = now + task.duration
        now = min(span.end for span in spans.values() if span.end > now)
    return Schedule(tuple(tasks), spans)


@lru_cache
def execution_order(tasks: tuple[Task, ...]) -> tuple[str, ...]:
    """Names in the order in which `list_schedule` starts them, equal starts in submission order.

    It depends on the tasks alone, so all peers that execute one design launch their collectives in one order. A lookup
    hashes every task: keep the result where it is needed often.
    """
    return tuple(list_schedule(tasks))


def critical_path(tasks: Sequence[Task]) -> Units:
    """The longest chain of durations: no schedule is shorter, on however many streams. Raises as `check_tasks`."""
    check_tasks(tasks)
    durations = {task.name: task.duration for task in tasks}
    predecessors = {task.name: task.predecessors for task in tasks}
    ends: dict[str, Units] = {}
    for name in TopologicalSorter(predecessors).static_order():
        ends[name] = max((ends[before] for before in predecessors[name]), default=_ORIGIN) + durations[name]
    return max(ends.values(), default=_ORIGIN)


def check_schedule(tasks: Sequence[Task], spans: Mapping[str, Span]) -> None:
    """Raises `ScheduleError` with all reasons that apply, in alphabetical order: dependency (a task starts before a
    predecessor has ended), duration, stream_collision; unscheduled when a task has no span. Raises as `check_tasks`."""
    check_tasks(tasks)
    problems = [("unscheduled", f"{task.name} has no span") for task in tasks if task.name not in spans]
    _refuse(problems)
    for task in tasks:
        span = spans[task.name]
        if span.start + task.duration != span.end:
            problems.append(("duration", f"{task.name} takes {task.duration}, scheduled {span}"))
        for name in task.predecessors:
            if span.start < spans[name].end:
                problems.append(("dependency", f"{task.name} {span} waits for {name} {spans[name]}"))
    for task, other in combinations(tasks, 2):
        span, another = spans[task.name], spans[other.name]
        if task.stream == other.stream and _common(span, another):
            problems.append(
                ("stream_collision", f"{task.name} {span} and {other.name} {another} on stream {task.stream}")
            )
    _refuse(problems)


def _common(span: Span, other: Span) -> int:
    """Units in both spans."""
    return max(0, int(min(span.end, other.end)) - int(max(span.start, other.start)))


def _refuse(problems: Sequence[tuple[str, str]]) -> None:
    if problems:
        reasons = sorted({reason for reason, _ in problems})
        raise ScheduleError(reasons, "; ".join(detail for _, detail in problems))


# -- Buffers (0x09D)


class Allocation(StrEnum):
    """From when a buffer occupies memory.

    A producer writes into its buffer while it runs, so memory that is shared out by lifetimes counts from its start.
    PRODUCER_END suits only what a producer hands over in one piece when it ends, out of memory that it holds itself.
    """

    PRODUCER_START = "producer_start"
    PRODUCER_END = "producer_end"


@dataclass(frozen=True)
class BufferUse:
    """A buffer, the task that writes it and all tasks that read it.

    Raises `ScheduleError` (no_consumer) when nobody reads it: it would be free the moment it is full.
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    allocation: Allocation = Allocation.PRODUCER_START

    def __post_init__(self) -> None:
        if not self.consumers:
            raise ScheduleError(("no_consumer",), f"buffer {self.name} of {self.producer} must list its readers")


def lifetimes(buffers: Iterable[BufferUse], spans: Mapping[str, Span]) -> dict[str, Span]:
    """[allocation, end of the last reader) of each buffer.

    Raises `ScheduleError`: unscheduled for a producer or reader without a span, dependency for a reader that starts
    before the producer has ended.
    """
    lives: dict[str, Span] = {}
    problems: list[tuple[str, str]] = []
    for buffer in buffers:
        missing = [name for name in (buffer.producer, *buffer.consumers) if name not in spans]
        if missing:
            problems.append(("unscheduled", f"buffer {buffer.name} names {', '.join(missing)}"))
            continue
        written, reads = spans[buffer.producer], [spans[name] for name in buffer.consumers]
        if min(read.start for read in reads) < written.end:
            problems.append(
                ("dependency", f"buffer {buffer.name} is read before {buffer.producer} {written} has ended")
            )
        start = written.start if buffer.allocation is Allocation.PRODUCER_START else written.end
        lives[buffer.name] = Span(start, max(read.end for read in reads))
    _refuse(problems)
    return lives


def check_release(buffers: Iterable[BufferUse], spans: Mapping[str, Span], releases: Mapping[str, Units]) -> None:
    """Raises `ScheduleError`: early_release for a buffer that is released before its last reader has ended,
    unknown_buffer for a release of none of `buffers`. Raises as `lifetimes`."""
    lives = lifetimes(buffers, spans)
    problems: list[tuple[str, str]] = []
    for name, release in releases.items():
        if name not in lives:
            problems.append(("unknown_buffer", f"{name} is released and was never declared"))
        elif release < lives[name].end:
            problems.append(("early_release", f"{name} is released at {release}, it lives {lives[name]}"))
    _refuse(problems)


# What a task of each kind writes, and the kind that reads it.
_WRITES = {
    "pack": ("send", "dispatch"),
    "dispatch": ("receive", "expert"),
    "expert": ("expert_output", "combine"),
    "shared_path": ("shared_output", "reduce"),
    "combine": ("combined_segment", "reduce"),
}


def buffers_of(tasks: Sequence[Task]) -> tuple[BufferUse, ...]:
    """The buffers of a layer's tasks, read off their dependencies: nobody can forget a reader."""
    uses = []
    for task in tasks:
        if task.kind in _WRITES:
            name, reader = _WRITES[task.kind]
            readers = tuple(after.name for after in tasks if after.kind == reader and task.name in after.predecessors)
            uses.append(BufferUse(_numbered(name, task.index), task.name, readers))
    return tuple(uses)


# -- Four designs of one layer (0x09E)


@dataclass(frozen=True)
class NominalUnits:
    """Assumed units of each task kind. They decide an order of execution and nothing else."""

    plan: int = 1
    pack: int = 1
    dispatch: int = 3
    expert: int = 4
    combine: int = 2
    shared_path: int = 5
    reduce: int = 1


_NOMINAL = NominalUnits()
_STREAMS = {
    "plan": Stream.CONTROL,
    "pack": Stream.PACK,
    "dispatch": Stream.COMMUNICATION,
    "expert": Stream.COMPUTE,
    "combine": Stream.COMMUNICATION,
    "shared_path": Stream.COMPUTE,
    "reduce": Stream.COMPUTE,
}


def bulk(units: NominalUnits = _NOMINAL) -> tuple[Task, ...]:
    """The whole payload of a rank at once: plan, pack_0, dispatch_0, expert_0, combine_0, reduce."""
    return chunk_pipeline(1, units)


def chunk_pipeline(chunks: int, units: NominalUnits = _NOMINAL) -> tuple[Task, ...]:
    """One plan and one reduce; every chunk of the payload packs, goes out, runs and returns by itself.

    The chunk that arrives first runs while the next one is in flight. Raises `ConfigError` for less than one chunk.
    """
    stages = _by_stage([_chain(j, "plan", units) for j in _parts(chunks)])
    returned = [f"combine_{j}" for j in _parts(chunks)]
    return _launch_first([_task("plan", None, [], units), *stages, _task("reduce", None, returned, units)])


def shared_path(units: NominalUnits = _NOMINAL) -> tuple[Task, ...]:
    """`bulk` beside an expert that every token uses: it runs while dispatch_0 is in flight; reduce waits for both."""
    # The shared path needs nothing of pack_0. But one host thread launches and computes, so it has to pack first for
    # dispatch to be in flight.
    shared = _task("shared_path", None, ["plan", "pack_0"], units)
    reduce = _task("reduce", None, ["combine_0", "shared_path"], units)
    return _launch_first([_task("plan", None, [], units), *_chain(0, "plan", units), shared, reduce])


def microbatch_pipeline(batches: int, units: NominalUnits = _NOMINAL) -> tuple[Task, ...]:
    """Whole batches with a plan and a reduce of their own: dispatch_1 is in flight while expert_0 computes.

    Every batch keeps its own activations. Raises `ConfigError` for less than one batch.
    """
    chains = [
        [_task("plan", j, [], units), *_chain(j, f"plan_{j}", units), _task("reduce", j, [f"combine_{j}"], units)]
        for j in _parts(batches)
    ]
    return _launch_first(_by_stage(chains))


def _parts(count: int) -> range:
    if count < 1:
        raise ConfigError(f"chunks and batches must be >= 1, found {count}")
    return range(count)


def _chain(index: int, plan: str, units: NominalUnits) -> list[Task]:
    tasks: list[Task] = []
    for kind in ("pack", "dispatch", "expert", "combine"):
        tasks.append(_task(kind, index, [tasks[-1].name if tasks else plan], units))
    return tasks


def _task(kind: str, index: int | None, predecessors: Iterable[str], units: NominalUnits) -> Task:
    return Task(_numbered(kind, index), Units(getattr(units, kind)), _STREAMS[kind], tuple(predecessors))


def _numbered(kind: str, index: int | None) -> str:
    return kind if index is None else f"{kind}_{index}"


def _by_stage(chains: Sequence[Sequence[Task]]) -> list[Task]:
    """All first tasks, all second tasks, and so on."""
    return [task for stage in zip(*chains, strict=True) for task in stage]


def _launch_first(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Communication is submitted first: what is only launched comes before what keeps the host at the same instant."""
    return tuple(sorted(tasks, key=lambda task: task.stream != Stream.COMMUNICATION))
