"""A live cluster as its recordings and its logs have it: the same steps on all ranks, every transition once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ray_moe import cluster as clusters
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import Operation, Stage
from ray_moe.dataplane.spans import Span, nesting
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.trace import RankTrace
from ray_moe.errors import NotServingError
from ray_moe.models import tiny_moe_path
from ray_moe.observe.chrome import timeline
from ray_moe.sdk import Client
from ray_moe.serve.api import openai_api
from ray_moe.serve.generation import Backends, ClusterDoor
from ray_moe.telemetry import TracedRequests

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]  # one cluster for all, on a machine that may be busy

NAME, PROMPT = "traced", tuple(range(40, 60))
GREEDY = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
STEPS = 12
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"


@dataclass(frozen=True)
class Seen:
    """What was recorded and logged; `rebalance`, `grow` and `shrink` in this order, each of them done."""

    at_once: tuple[tuple[RankTrace, ...] | NotServingError, ...]
    ranks: tuple[RankTrace, ...]
    again: tuple[RankTrace, ...]
    operations: tuple[Operation, ...]
    asked: Asked
    commands: dict[str, tuple[str, ...]]
    timeline: dict[str, Any]
    lines: tuple[dict[str, Any], ...]

    def events(self, event: str, **ids: Any) -> list[dict[str, Any]]:
        return [
            line
            for line in self.lines
            if line["event"] == event
            and line["logger"] == "ray_moe.events"
            and all(line.get(name) == value for name, value in ids.items())
        ]


@contextmanager
def load(cluster: Cluster) -> Iterator[None]:
    """Requests on every peer, one after the other, until the block ends."""
    over = threading.Event()

    async def keep(client: Client) -> None:
        while not over.is_set():
            await client.generate(PROMPT, GREEDY)

    async def both() -> None:
        client = Client(cluster.directory())
        await asyncio.gather(keep(client), keep(client))

    thread = threading.Thread(target=lambda: asyncio.run(both()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=60)
        assert not thread.is_alive()


@dataclass(frozen=True)
class Asked:
    """Two requests over HTTP, a stream among them, and their spans."""

    answers: tuple[httpx.Response, ...]
    spans: tuple[ReadableSpan, ...]


def ask_over_http() -> Asked:
    memory = InMemorySpanExporter()
    api = openai_api(Backends(ClusterDoor(NAME)), requests=TracedRequests(SimpleSpanProcessor(memory)))
    body = {"prompt": "The expert", "max_tokens": 12, "ignore_eos": True}

    async def both() -> tuple[httpx.Response, ...]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://here", timeout=60) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            named = body | {"model": model}
            whole = await client.post("/v1/completions", json=named, headers={"traceparent": CALLER})
            stream = await client.post("/v1/completions", json=named | {"stream": True})
            return whole, stream

    return Asked(asyncio.run(both()), memory.get_finished_spans())


def command_lines(folder: Path) -> dict[str, tuple[str, ...]]:
    """What the commands print, in a process of their own."""
    address = f"--address={ray.get_runtime_context().gcs_address}"
    wanted = {
        "trace": ["trace", "--chrome", str(folder / "steps.json"), "--steps", "4", "--seconds", "60", "--json"],
        "top": ["top", "--once", "--json"],
        "drawn": ["top", "--once"],
        "stages": ["history", "--operation", "1"],
    }
    program = "import sys, json\nfrom ray_moe.cli.main import run\n"
    for name, arguments in wanted.items():
        program += f"print('== {name}', flush=True)\nassert run({[*arguments, '--name', NAME, address]!r}) == 0\n"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 0, found.stderr
    parts = [part.splitlines() for part in found.stdout.split("== ")[1:]]
    return {name: tuple(lines) for name, *lines in parts}


def record_at_once(cluster: Cluster) -> tuple[tuple[RankTrace, ...] | NotServingError, ...]:
    """What three who ask at the same time get."""

    def ask(_: int) -> tuple[RankTrace, ...] | NotServingError:
        try:
            return cluster.trace(STEPS, 60.0)
        except NotServingError as error:
            return error

    with ThreadPoolExecutor(3) as threads:
        return tuple(threads.map(ask, range(3)))


def done(cluster: Cluster, number: int | None) -> Operation:
    assert number is not None
    operation = cluster.wait(number, 100.0)
    assert operation.stage is Stage.DONE, operation
    return operation


def until_settled(cluster: Cluster) -> None:
    """One generation is left."""
    deadline = time.monotonic() + 60
    while any(one.state == "DRAINING" for one in cluster.status().generations):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def logged(folder: Path) -> tuple[dict[str, Any], ...]:
    """Every line of the cluster's actors."""
    found = []
    for file in sorted(folder.glob("worker-*.err")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("{") and f'"cluster": "{NAME}"' in line:
                found.append(json.loads(line))
    return tuple(found)


@pytest.fixture(scope="module")
def seen(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("traced")
    config = ClusterConfig(
        name=NAME,
        model=str(tiny_moe_path()),
        peers=2,
        max_peers=3,
        spare_slots=3,
        kv_blocks=64,
        fill_bytes_per_s=1e9,
        log_json=True,
    )
    cluster = clusters.start(config)
    try:
        with load(cluster):
            at_once = record_at_once(cluster)
            ranks = cluster.trace(STEPS, 60.0)
            wanted = (
                lambda: cluster.rebalance(replicas={(layer, 3): 2 for layer in range(4)}, why="a copy of expert 3"),
                lambda: cluster.scale(3),
                lambda: cluster.drain(0),
            )
            operations = []
            for ask in wanted:
                operations.append(done(cluster, ask()))
                until_settled(cluster)
            again = cluster.trace(3, 60.0)
            asked = ask_over_http()
            commands = command_lines(folder)
    finally:
        cluster.stop()
    time.sleep(0.5)  # Ray writes what an actor said last
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    written = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    return Seen(at_once, ranks, again, tuple(operations), asked, commands, written, logged(logs))


def test_all_ranks_record_the_same_steps_and_every_rank_nests_its_spans(seen: Seen) -> None:
    assert [one.rank for one in seen.ranks] == [0, 1]
    numbers = [[step.step for step in one.steps] for one in seen.ranks]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == STEPS
    assert {one.clock.machine for one in seen.ranks} == {seen.ranks[0].clock.machine}
    for first, second in zip(*(one.steps for one in seen.ranks), strict=True):
        assert (first.generation, first.epoch, first.units) == (second.generation, second.epoch, second.units)
        assert first.leads and not second.leads
        for step in (first, second):
            names = {span.name for span, _ in nesting(step.spans)}
            assert {"plan", "agreement", "units", "layer", "counts", "dispatch", "experts", "combine"} <= names
            assert step.left_out == 0
    spans = [span for one in seen.ranks for step in one.steps for span in step.spans if span.name == "layer"]
    assert {span.layer for span in spans} == set(range(4))


def test_of_several_who_ask_at_once_one_has_its_recording_and_nobody_is_locked_out(seen: Seen) -> None:
    made = [one for one in seen.at_once if not isinstance(one, NotServingError)]
    assert made
    assert all([len(one.steps) for one in ranks] == [STEPS, STEPS] for ranks in made)
    refused = {str(one) for one in seen.at_once if isinstance(one, NotServingError)}
    assert refused <= {"rank 0: another recording is under way"}


def test_nobody_has_an_agreement_before_everybody_has_offered_a_record(seen: Seen) -> None:
    """Both ranks are on this machine: one clock."""
    for steps in zip(*(one.steps for one in seen.ranks), strict=True):
        offers, agreed = [], []
        for step in steps:
            times = {span.name: span for span in step.spans if span.layer < 0}
            offers.append(times["offer"].start)
            agreed.append(times["agreement"].end)
        assert min(agreed) >= max(offers)


def test_the_timeline_is_trace_event_json_whose_events_nest_in_every_thread(seen: Seen) -> None:
    document = json.loads(json.dumps(timeline(NAME, [asdict(one) for one in seen.ranks])))
    assert document["otherData"]["steps"] == STEPS
    by_thread: dict[tuple[int, int], list[Span]] = {}
    for event in document["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            start = round(event["ts"] * 1000)
            span = Span(event["name"], start, start + round(event["dur"] * 1000))
            by_thread.setdefault((event["pid"], event["tid"]), []).append(span)
    assert set(by_thread) == {(0, 1), (1, 1)}
    for spans in by_thread.values():
        around = {named[0].name: named[1] for named in nesting(spans)}
        assert {name for name, place in around.items() if place < 0} == {
            span.name for span in spans if span.name.startswith("step ")
        }


def test_ranks_that_came_are_recorded_and_those_that_left_are_not(seen: Seen) -> None:
    assert [one.rank for one in seen.again] == [1, 2]
    assert [len(one.steps) for one in seen.again] == [3, 3]


def test_every_transition_of_an_operation_is_logged_once_and_in_order(seen: Seen) -> None:
    assert [operation.kind for operation in seen.operations] == ["rebalance", "grow", "shrink"]
    for operation in seen.operations:
        told = seen.events("operation", operation=operation.number)
        asked, *edges = told
        assert (asked["from"], asked["by"]) == ("", "ask")
        assert [(line["by"], line["to"]) for line in edges] == [(edge.event, edge.stage) for edge in operation.trail]
        assert [line["from"] for line in edges] == [line["to"] for line in told[:-1]]
        assert edges[-1]["generation"] == operation.last_generation
        assert all(line["actor"] == "controller" for line in told)
    first = seen.events("operation", operation=seen.operations[0].number)
    assert first[0]["why"] == "a copy of expert 3"
    moved = seen.operations[0].moved_bytes
    assert {source: first[-1][f"{source}_bytes"] for source, nbytes in moved.items() if nbytes} == {
        source: nbytes for source, nbytes in moved.items() if nbytes
    }
    assert sum(moved.values()) > 0


def test_every_generation_is_logged_once_on_each_edge_of_its_life(seen: Seen) -> None:
    edges = Counter((line["generation"], line["from"], line["to"]) for line in seen.events("generation"))
    assert set(edges.values()) == {1}
    last = max(operation.last_generation for operation in seen.operations)
    for generation in {number for number, _, _ in edges} - {last}:
        assert {edge[1:] for edge in edges if edge[0] == generation} == {
            ("", "ACTIVE"),
            ("ACTIVE", "DRAINING"),
            ("DRAINING", "RETIRED"),
        }
    assert {edge[1:] for edge in edges if edge[0] == last} == {("", "ACTIVE")}


def test_every_rank_logs_each_generation_that_it_takes_once(seen: Seen) -> None:
    taken = Counter((line["rank"], line["generation"]) for line in seen.events("switch"))
    assert set(taken.values()) == {1}
    rebalance, grow, shrink = (operation.last_generation for operation in seen.operations)
    assert {rank for rank, generation in taken if generation == rebalance} == {0, 1}
    assert {rank for rank, generation in taken if generation == grow} >= {0, 1}
    assert {rank for rank, generation in taken if generation == shrink} >= {1, 2}
    assert all(line["pause_s"] >= 0 for line in seen.events("switch"))


def test_loops_peers_and_the_cluster_tell_their_lives(seen: Seen) -> None:
    loops = {rank: [line["to"] for line in seen.events("loop", rank=rank)] for rank in (0, 1, 2)}
    assert loops == {0: ["serving", "left"], 1: ["serving", "stopped"], 2: ["serving", "stopped"]}
    peers = {rank: [line["to"] for line in seen.events("peer", rank=rank)] for rank in (0, 1, 2)}
    assert peers[0][0] == "serving"
    assert peers[0][-1] == "ended"
    assert peers[2][-1] == "serving"
    assert [line["to"] for line in seen.events("cluster")] == ["serving", "stopped"]


def test_a_line_names_its_actor_and_carries_no_token(seen: Seen) -> None:
    actors = {line["actor"] for line in seen.lines}
    assert {"controller", "routing", "expert-0", "expert-1", "expert-2"} <= actors
    for line in seen.lines:
        assert {"timestamp", "level", "logger", "event", "cluster", "actor", "pid"} <= line.keys()
        assert not {"prompt", "token_ids", "tokens", "key"} & line.keys()


def test_a_request_over_http_is_one_trace_from_its_arrival_to_its_last_token(seen: Seen) -> None:
    whole, stream = seen.asked.answers
    assert (whole.status_code, stream.status_code) == (200, 200)
    last = max(operation.last_generation for operation in seen.operations)
    roots = [span for span in seen.asked.spans if span.name == "POST /v1/completions"]
    for answer, root in zip(seen.asked.answers, roots, strict=True):
        assert answer.headers["traceparent"].split("-")[1:3] == [
            f"{root.context.trace_id:032x}",
            f"{root.context.span_id:016x}",
        ]
        phases = [
            span for span in seen.asked.spans if span.parent is not None and span.parent.span_id == root.context.span_id
        ]
        assert [span.name for span in phases] == ["receive", "prepare", "queue", "first token", "generate"]
        assert all(before.end_time <= after.start_time for before, after in pairwise(phases))
        assert root.start_time <= phases[0].start_time
        assert phases[-1].end_time <= root.end_time
        told = dict(root.attributes)
        assert (told["gen_ai.usage.output_tokens"], told["ray_moe.complete"]) == (12, True)
        assert (told["ray_moe.generation"], told["http.response.status_code"]) == (last, 200)
        assert told["ray_moe.release"] == whole.json()["system_fingerprint"]
        assert not [value for value in told.values() if value == "The expert"]
    assert f"{roots[0].context.trace_id:032x}" == TRACE
    assert f"{roots[0].parent.span_id:016x}" == "b7ad6b7169203331"
    assert roots[1].parent is None


def test_the_commands_show_the_same_cluster(seen: Seen) -> None:
    told = json.loads(seen.commands["trace"][-1])
    assert (told["steps"], told["ranks"], told["truncated"]) == (4, 2, False)
    assert set(told["seconds"]["step"]) == {"1", "2"}
    named = {event["pid"] for event in seen.timeline["traceEvents"]}
    assert named == {1, 2}
    view = json.loads(seen.commands["top"][-1])
    assert [rank["rank"] for rank in view["ranks"]] == [1, 2]
    assert view["placement"]["ranks"] == [1, 2]
    drawn = "\n".join(seen.commands["drawn"])
    assert f"{NAME} is serving" in drawn
    assert "hottest experts" in drawn
    stages = "\n".join(seen.commands["stages"])
    assert "operation 1 (rebalance) is done" in stages
    assert all(stage in stages for stage in ("queued", "filling", "publishing", "switching"))
