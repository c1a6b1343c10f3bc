"""Ray's own metrics endpoint of a live cluster: every counter is the engines' own count, after an exact course.

The cluster takes exactly N tokens, three rebalances, a grow and a shrink, and two fallbacks of a decode executable.
Its decode bucket takes one token of a rank; a step of two requests does not fit and falls back.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from ray_moe import cluster as clusters
from ray_moe.actors.reports import ClusterStatus
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import Operation, Stage
from ray_moe.deadline import Deadline, pause, ray_get
from ray_moe.engine.records import EngineStatus
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.state import Tallies
from ray_moe.metrics import EXPORTED, SERIES_CAP, Kind
from ray_moe.sdk import Client

pytestmark = pytest.mark.cluster

NAME, SECONDS = "metrics", 180.0
# Requests of 2 tokens each: a prompt step gives the first, one decode step the second.
PROMPT, TOKENS, LAYERS, FALLBACKS = (5, 6, 7, 8), 2, 4, 2
# A rank's counters, and what its status calls them.
COUNTS = {
    "moe_tokens": "tokens_emitted",
    "moe_steps_worked": "steps_worked",
    "moe_rows_local": "rows_local",
    "moe_rows_sent": "rows_sent",
    "moe_rows_received": "rows_received",
    "moe_bytes_sent": "bytes_sent",
    "moe_bytes_received": "bytes_received",
    "moe_bare_calls": "bare_calls",
}
Scraped = dict[tuple[str, frozenset[tuple[str, str]]], float]
# What Ray adds to the labels of a process's metrics.
RAYS = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId", "JobId"}


@dataclass
class Course:
    """What was done, in order, and what was known of it at its end."""

    requests: int
    operations: list[Operation]
    previewed: list[int]  # bytes that a preview announced
    left: EngineStatus  # of the rank that left
    left_tallies: Tallies
    status: ClusterStatus
    tallies: list[Tallies]
    scraped: Scraped


@pytest.fixture(scope="module")
def course(local_ray: None) -> Iterator[Course]:
    config = ClusterConfig(
        name=NAME,
        model="tiny-moe",
        peers=2,
        min_peers=2,
        max_peers=3,
        spare_slots=4,
        decode_buckets="1x64",  # type: ignore[arg-type]
        metrics_every_s=0.5,
    )
    cluster = clusters.start(config)
    try:
        yield run(cluster)
    finally:
        cluster.stop()


def run(cluster: Cluster) -> Course:
    operations, previewed = [], []
    groups, deadline = 0, Deadline(SECONDS)
    while fallbacks(status_of(cluster.status(), 0)) < FALLBACKS:  # a group is one at most: if it comes together
        deadline.check("two decode steps of two requests")
        generate(cluster, requests=2, peer=0)
        groups += 1
    generate(cluster, requests=1, peer=1)  # fits, and is replayed
    for expert in (3, 5, 7):
        replicas = {(layer, expert): 2 for layer in range(LAYERS)}
        previewed.append(sum(cluster.preview(replicas=replicas).payload_bytes.values()))
        operations.append(done(cluster, cluster.rebalance(replicas=replicas)))
    operations.append(done(cluster, cluster.scale(3)))
    generate(cluster, requests=1, peer=2)
    leaving = status_of(cluster.status(), 2)
    left_tallies = tallies(cluster, [2])[0]
    scrape_until(lambda found: of_rank(found, "ray_moe_tokens_total", 2) == leaving.tokens_emitted)
    operations.append(done(cluster, cluster.drain(2)))
    status = cluster.status()
    ranks = [peer.rank for peer in status.peers]
    counted = tallies(cluster, ranks)
    shrunk = ("ray_moe_operations_total", {"kind": "shrink", "outcome": "done"})
    looks = [status]

    def has_settled(found: Scraped) -> bool:
        """Idle steps are agreed on for a moment and send bytes, so a look of the same moment decides."""
        looks[:] = [cluster.status()]
        told = {peer.rank: {name: getattr(peer, of) for name, of in COUNTS.items()} for peer in looks[0].peers}
        return total(found, *shrunk) == 1 and all(counts_of(found, rank) == told[rank] for rank in ranks)

    scraped = scrape_until(has_settled)
    (status,) = looks
    return Course(2 * groups + 2, operations, previewed, leaving, left_tallies, status, counted, scraped)


def fallbacks(peer: EngineStatus) -> int:
    """Decode steps that fell back: each did in every layer."""
    count = sum(peer.fallbacks.values())
    assert count % LAYERS == 0
    return count // LAYERS


def generate(cluster: Cluster, *, requests: int, peer: int) -> None:
    async def all_of_them() -> None:
        client = Client(cluster.directory())
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        at = cluster.directory().ranks.index(peer)
        await asyncio.gather(*(client.generate(PROMPT, params, peer=at) for _ in range(requests)))

    asyncio.run(all_of_them())


def done(cluster: Cluster, number: int | None) -> Operation:
    assert number is not None
    operation = cluster.wait(number, SECONDS)
    assert operation.stage is Stage.DONE, operation.reason
    return operation


def status_of(status: ClusterStatus, rank: int) -> EngineStatus:
    return next(peer for peer in status.peers if peer.rank == rank)


def tallies(cluster: Cluster, ranks: list[int]) -> list[Tallies]:
    actors = dict(cluster.directory().members.peers)
    return [ray_get(actors[rank].tallies.remote(), SECONDS, "tallies") for rank in ranks]


def scrape() -> Scraped:
    """Every series of this cluster at the endpoints of all nodes, without the labels that Ray adds but its process's.
    The Ray may have had other clusters, whose counters it keeps."""
    found: Scraped = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_moe_"):
                    kept = {k: v for k, v in sample.labels.items() if k not in RAYS and not k.startswith("otel_")}
                    if kept.get("cluster", NAME) == NAME and kept.get("release", f"{NAME}-").startswith(f"{NAME}-"):
                        worker = sample.labels["WorkerId"]
                        found[sample.name, frozenset({**kept, "process": worker}.items())] = sample.value
    return found


def scrape_until(there: Callable[[Scraped], bool]) -> Scraped:
    """What is there once it is, which Ray's report interval (10 s) decides."""
    deadline = Deadline(SECONDS)
    while not there(found := scrape()):
        deadline.check("the endpoint", f"{len(found)} series")
        pause(0.5)
    return found


def total(found: Scraped, name: str, labels: Mapping[str, str] | None = None) -> float:
    """The sum over all series of this name that have these labels."""
    asked = set((labels or {}).items())
    return sum(value for (known, has), value in found.items() if known == name and asked <= has)


def counts_of(found: Scraped, rank: int) -> dict[str, float]:
    return {name: of_rank(found, f"ray_{name}_total", rank) for name in COUNTS}


def of_rank(found: Scraped, name: str, rank: int) -> float:
    return total(found, name, {"rank": str(rank)})


# -- Every counter is the engines' own


def test_the_course_was_what_it_says(course: Course) -> None:
    assert [str(operation.kind) for operation in course.operations] == ["rebalance"] * 3 + ["grow", "shrink"]
    assert course.left.tokens_emitted == TOKENS
    fallen = Counter[tuple[str, str]]()
    for told in course.tallies:
        for counts in told.releases.values():
            fallen.update(counts.units.fallbacks)
    assert sum(fallen.values()) == FALLBACKS * len(course.tallies), "both ranks ran them"


def test_tokens_steps_rows_and_bytes_of_each_rank_are_those_of_its_status(course: Course) -> None:
    for peer in course.status.peers:
        assert counts_of(course.scraped, peer.rank) == {name: getattr(peer, of) for name, of in COUNTS.items()}
        seconds = of_rank(course.scraped, "ray_moe_step_seconds_sum_total", peer.rank)
        assert seconds == pytest.approx(peer.seconds_worked, rel=1e-9), "a sum of differences of binary fractions"
    assert total(course.scraped, "ray_moe_tokens_total") == TOKENS * course.requests


def test_a_rank_that_left_keeps_its_counters_and_takes_its_gauges_along(course: Course) -> None:
    assert of_rank(course.scraped, "ray_moe_tokens_total", 2) == course.left.tokens_emitted
    assert of_rank(course.scraped, "ray_moe_steps_worked_total", 2) >= course.left.steps_worked
    gauge = "ray_moe_committed_step"
    scrape_until(lambda found: not any(name == gauge and ("rank", "2") in labels for name, labels in found))


def test_the_specifications_counts_are_sums_over_all_ranks(course: Course) -> None:
    found, told = course.scraped, [*course.tallies, course.left_tallies]
    release = course.status.release_id
    counts = [one.releases[release] for one in told]
    for phase in ("prefill", "decode", "bare"):
        of = {"release": release, "phase": phase}
        attempted = sum(one.routes.attempted[phase] for one in counts)
        assert total(found, "ray_moe_routes_attempted_total", of) == attempted
        assert total(found, "ray_moe_routes_accepted_total", of) == attempted
        assert total(found, "ray_moe_routes_remote_total", of) == sum(one.routes.remote[phase] for one in counts)
        assert total(found, "ray_moe_routes_dropped_total", of) == 0
    # K routes of each of the prompts' and the decoded tokens, in every layer.
    requests, top_k = course.requests, 2
    assert total(found, "ray_moe_routes_attempted_total", {"phase": "decode"}) == requests * top_k * LAYERS
    assert total(found, "ray_moe_routes_attempted_total", {"phase": "prefill"}) == (
        requests * len(PROMPT) * top_k * LAYERS
    )


def test_two_steps_fell_back_on_both_ranks_and_the_others_were_replayed(course: Course) -> None:
    found = course.scraped
    fallen = {"phase": "decode", "reason": "rank_token_capacity_exceeded"}
    assert total(found, "ray_moe_fallback_steps_total", fallen) == FALLBACKS * 2
    assert total(found, "ray_moe_fallback_steps_total") == FALLBACKS * 2
    assert total(found, "ray_moe_graph_fallbacks_total") == FALLBACKS * 2 * LAYERS
    replayed = total(found, "ray_moe_steps_total", {"phase": "decode"}) - FALLBACKS * 2
    assert total(found, "ray_moe_graph_replays_total") == replayed * LAYERS > 0


def test_operations_and_migrated_bytes_are_those_of_the_plans(course: Course) -> None:
    found = course.scraped
    ended = {
        kind: total(found, "ray_moe_operations_total", {"kind": kind, "outcome": "done"})
        for kind in ("rebalance", "grow", "shrink")
    }
    assert ended == {"rebalance": 3, "grow": 1, "shrink": 1}
    assert total(found, "ray_moe_operations_total") == 5
    moved = Counter[str]()
    for operation in course.operations:
        moved.update(operation.moved_bytes)
    for source in ("peer", "checkpoint"):
        assert total(found, "ray_moe_migration_bytes_total", {"source": source}) == moved[source]
    assert [sum(operation.moved_bytes.values()) for operation in course.operations[:3]] == course.previewed
    assert total(found, "ray_moe_switch_pause_seconds_count") == 5


def test_failures_are_exported_before_there_are_any(course: Course) -> None:
    for name in (
        "moe_route_output_mismatches",
        "moe_stale_handle_acceptances",
        "moe_count_conservation_failures",
        "moe_routes_dropped",
        "moe_rank_deaths",
    ):
        series = [value for (known, _), value in course.scraped.items() if known == f"ray_{name}_total"]
        assert series and not any(series)


def test_every_series_is_declared_and_there_are_few(course: Course) -> None:
    suffixes = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    known = {f"ray_{name}{end}" for name, metric in EXPORTED.items() for end in suffixes[metric.kind]}
    assert {name for name, _ in course.scraped} <= known
    assert len(course.scraped) < SERIES_CAP / 4
    assert total(course.scraped, "ray_moe_series_refused_total") == 0
