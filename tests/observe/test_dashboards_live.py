"""A real Prometheus scrapes a live cluster under load: every query of every page has data, pages move with their
causes, alerts are silent until something stalls, and fire then.

One cluster and one history for all tests, in this order: at rest; requests over HTTP, one refused, one left, and over
the SDK; a rebalance; a rebalance that cannot go on, and its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from ray_moe import cluster as clusters
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.operations import Operation, Stage
from ray_moe.metrics import METRICS
from ray_moe.models import tiny_moe_path
from ray_moe.observe.dashboards.pages import DASHBOARDS
from ray_moe.observe.dashboards.rules import Limits, alerts
from ray_moe.serve import app
from tests.cluster.faults import Expected, Load, actor_of, done, kill, ranks_of, throttle, until
from tests.cluster.http.server import free_port
from tests.observe.prometheus import Prometheus, prometheus
from tests.promql import panel_queries, series_in, substituted
from tests.tools import require_tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

require_tool("prometheus")

NAME = "observed"
# As the product's, but noticing within seconds. All decode steps may fall back: the executables are chosen too small.
LIMITS = Limits(window=10, hold=2, stall=10, operation=8, drain=30, imbalance_hold=20, missing=30, fallback=1.01)
# A panel's window here. Grafana makes it four scrapes long; a busy machine misses some.
WINDOW = "10s"


@dataclass
class History:
    """The cluster, its Prometheus, and when what was done."""

    cluster: Cluster
    prometheus: Prometheus
    url: str
    expected: Expected
    times: dict[str, float] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)

    def mark(self, name: str) -> None:
        """What follows begins now."""
        self.times[name] = time.time()

    def panel(self, dashboard: str, title: str, number: int = 0) -> str:
        """A panel's query with this cluster chosen."""
        (found,) = (
            each for each in panel_queries() if (each.dashboard, each.panel, each.number) == (dashboard, title, number)
        )
        return substituted(found.expr, NAME, window=WINDOW, range_="10m")


@pytest.fixture(scope="module")
def history(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    config = ClusterConfig(
        name=NAME,
        model=str(tiny_moe_path()),
        peers=2,
        spare_slots=3,
        kv_blocks=256,
        decode_buckets="2x16",  # three streams a peer do not fit: they fall back
        demand_every_steps=8,
        metrics_every_s=1,
        audit_rate=0.1,
    )
    running = clusters.start(config)
    port = free_port()
    try:
        expected = Expected(running.directory(), 6, 120)
        app.run(NAME, host="127.0.0.1", port=port, seconds=120)
        try:
            with prometheus(tmp_path_factory.mktemp("prometheus"), LIMITS, free_port()) as asked:
                made = History(running, asked, f"http://127.0.0.1:{port}", expected)
                live(made)
                yield made
        finally:
            app.shutdown()
    finally:
        running.stop()


def live(history: History) -> None:
    """Rest, load, a rebalance under load."""
    history.mark("rest")
    time.sleep(5)
    history.mark("load")
    ask_over_http(history.url)
    with Load(history.cluster, history.expected) as load:
        load.flows(30)
        time.sleep(3)
        ask_over_http(history.url)  # once more: what is there for the first time has no rate yet
        time.sleep(2)
        history.mark("rebalance")
        number = history.cluster.rebalance(replicas={(layer, 3): 2 for layer in range(4)})
        history.operations.append(done(history.cluster, number))
        load.flows(10)
        time.sleep(4)
        history.mark("loaded")


def ask_over_http(url: str) -> None:
    """Answers that end, one that is refused, and one whose reader goes away."""
    body = {"model": "tiny-moe", "prompt": "To be, or not to be", "temperature": 0, "max_tokens": 12}
    for _ in range(4):
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200
    unknown = {**body, "model": "another"}
    assert httpx.post(f"{url}/v1/completions", json=unknown, timeout=60, trust_env=False).status_code == 404
    endless = {**body, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=60, trust_env=False) as answer:
        next(answer.iter_lines())


def test_every_series_of_every_alert_has_had_data_and_every_rule_was_evaluated(history: History) -> None:
    empty = []
    for alert in alerts(LIMITS):
        for name, matched in series_in(alert.expr):
            matchers = ", ".join(f'{label}=~"{value}"' for label, value in matched.items())
            if not history.prometheus.since(f"ray_{name}{{{matchers}}}", history.times["rest"]):
                empty.append(f"{alert.name}: ray_{name}{{{matchers}}}")
    assert empty == []
    assert [rule for rule in history.prometheus.rules() if rule["health"] != "ok"] == []


def test_the_specifications_eight_are_recorded_over_the_cluster(history: History) -> None:
    for name, metric in METRICS.items():
        found = history.prometheus.since(f'{name}{{cluster="{NAME}"}}', history.times["rest"])
        assert found, name
        for labels, pairs in found:
            assert set(labels) == {"__name__", "cluster", *metric.labels}
            if metric.denominator is not None:
                assert all(0 <= value <= 1 for _, value in pairs), (name, labels)
    assert history.prometheus.most("moe_remote_route_ratio", history.times["load"]) > 0
    assert history.prometheus.most("moe_fallback_step_ratio", history.times["load"]) > 0
    assert history.prometheus.most("moe_route_drop_ratio", history.times["rest"]) == 0


def test_no_alert_fired_while_it_rested_served_and_changed(history: History) -> None:
    assert history.prometheus.fired(NAME, history.times["rest"], history.times["loaded"]) == set()


# Dashboard, panel, query: what was done last when it moved.
MOVES = (
    ("ray-moe-overview", "Tokens per second, by rank", 0, "rest", "load"),
    ("ray-moe-overview", "HTTP requests per second", 0, "rest", "load"),
    ("ray-moe-overview", "Placement generation", 0, "load", "rebalance"),
    ("ray-moe-experts", "Rows per second, by rank", 1, "rest", "load"),
    ("ray-moe-experts", "Copies per expert", 0, "load", "rebalance"),
    ("ray-moe-experts", "Slots in use, by rank", 0, "load", "rebalance"),
    ("ray-moe-elasticity", "Migrated so far", 0, "load", "rebalance"),
    ("ray-moe-elasticity", "Operations that ended in the time range", 0, "load", "rebalance"),
    ("ray-moe-elasticity", "Generation and epoch, by rank", 0, "load", "rebalance"),
    ("ray-moe-latency", "Steps per second, by phase", 0, "rest", "load"),
    ("ray-moe-latency", "Fallback steps per second, by reason", 0, "rest", "load"),
    ("ray-moe-latency", "Tokens over HTTP per second", 1, "rest", "load"),
)


@pytest.mark.parametrize(("dashboard", "title", "number", "before", "cause"), MOVES)
def test_a_panel_moves_with_its_cause(
    history: History, dashboard: str, title: str, number: int, before: str, cause: str
) -> None:
    names = list(history.times)
    expr = history.panel(dashboard, title, number)
    quiet = history.prometheus.most(expr, history.times[before] + 2, history.times[cause])
    after = history.times[names[names.index(cause) + 1]]
    moved = history.prometheus.most(expr, history.times[cause], after + 4)
    assert moved > quiet, f"{title}: {quiet} before, {moved} after"


def test_at_least_two_panels_of_every_page_were_shown_to_move() -> None:
    shown = [dashboard for dashboard, *_ in MOVES]
    assert all(shown.count(dashboard.uid) >= 2 for dashboard in DASHBOARDS)


def test_the_migrated_bytes_of_the_page_are_those_of_the_operations(history: History) -> None:
    moved = sum(sum(operation.moved_bytes.values()) for operation in history.operations)
    assert moved > 0
    expr = f"sum({history.panel('ray-moe-elasticity', 'Migrated so far')})"
    until(lambda: history.prometheus.most(expr, history.times["rest"]) == moved, 15, what=f"{moved} bytes")


def test_a_rebalance_that_cannot_go_on_wakes_somebody_and_nothing_else_does(history: History) -> None:
    cluster = history.cluster
    for rank in ranks_of(cluster):
        throttle(actor_of(cluster, rank), 1e3)
    history.mark("stall")
    number = cluster.rebalance(replicas={(layer, 5): 2 for layer in range(4)})
    try:
        summary = until(lambda: history.prometheus.alerts(NAME).get("RayMoEOperationStalled"), 90, what="the alert")
        assert summary.startswith(f"{NAME}: a rebalance is open for ")
        assert cluster.operation(number).stage is Stage.FILLING
    finally:
        cluster.cancel(number, why="it stalls")
        for rank in ranks_of(cluster):
            throttle(actor_of(cluster, rank), None)
    assert cluster.wait(number, 60).stage is Stage.CANCELLED
    until(lambda: not history.prometheus.alerts(NAME), 30, what="silence")
    assert history.prometheus.fired(NAME, history.times["stall"]) == {"RayMoEOperationStalled"}


def test_every_query_of_every_page_has_had_data(history: History) -> None:
    empty: dict[str, str] = {}

    def all_there() -> bool:
        empty.clear()
        for asked in panel_queries():  # the stall included: a change is seldom under way for longer than a scrape
            expr = substituted(asked.expr, NAME, window=WINDOW, range_="10m")
            if not history.prometheus.since(expr, history.times["rest"]):
                empty[str(asked)] = expr
        return not empty

    try:
        until(all_there, 15)
    except AssertionError:
        raise AssertionError("\n".join(f"{where}: {expr}" for where, expr in empty.items())) from None


@pytest.mark.full
def test_a_rank_that_dies_wakes_somebody(history: History) -> None:
    kill(actor_of(history.cluster, 1))
    until(
        lambda: history.prometheus.alerts(NAME).keys() == {"RayMoERankLost", "RayMoENotServing"}, 60, what="both alerts"
    )
