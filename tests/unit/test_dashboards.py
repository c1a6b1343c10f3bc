"""Dashboards and rules: every query is of metrics that exist, Grafana's own model reads every document, alerts fire on
their cause and on nothing else (in Prometheus's own evaluator), and a push is complete, repeatable and discreet."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from enum import EnumType
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as grafana_model
from grafana_foundation_sdk.models import units as grafana_units

from ray_moe.cli.main import run
from ray_moe.errors import ConfigError, RayMoEError
from ray_moe.metrics import EXPORTED, METRICS, Kind
from ray_moe.observe.dashboards.files import export_document, export_files, scrape
from ray_moe.observe.dashboards.grafana import Grafana
from ray_moe.observe.dashboards.model import COLUMNS
from ray_moe.observe.dashboards.pages import DASHBOARDS, documents
from ray_moe.observe.dashboards.queries import RATIOS, quantile
from ray_moe.observe.dashboards.rules import Limits, alerts, recordings, rules
from tests.grafana_twin import TOKEN, Twin, grafana
from tests.promql import panel_queries, series_in, substituted
from tests.tools import require_tool

ROOT = Path(__file__).resolve().parents[2]
ALERTS = alerts(Limits())
_UNITS = {value for name, value in vars(grafana_units).items() if isinstance(value, str) and not name.startswith("_")}
_SUFFIXES = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket",)}
# What Ray adds to every series, and Prometheus to every bucket.
_ADDED = {"WorkerId", "le"}
# Exported for others: the ratios are computed here from their counters, as Prometheus's own windows want them.
_NOT_SHOWN = {
    *RATIOS,
    "moe_committed_step",  # for scripts that wait for a step
    "moe_series_refused",  # a fault of the exporter itself; `ray-moe status` has it
}


def all_queries() -> Iterator[tuple[str, str]]:
    yield from ((str(asked), asked.expr) for asked in panel_queries())
    yield from ((alert.name, alert.expr) for alert in ALERTS)
    yield from ((rule["record"], rule["expr"]) for rule in recordings(Limits()))


# -- Queries


def metric_of(series: str) -> str:
    """The declared metric behind a series' name; fails where there is none with a name of its kind."""
    for metric in EXPORTED.values():
        if series in {metric.name + suffix for suffix in _SUFFIXES[metric.kind]}:
            return metric.name
    raise AssertionError(f"no exported metric has series {series}")


@pytest.mark.parametrize(("where", "expr"), list(all_queries()), ids=lambda value: value if "/" in value else None)
def test_every_query_asks_for_metrics_that_are_exported_by_labels_that_they_have(where: str, expr: str) -> None:
    found = list(series_in(expr))
    assert found, where
    labels: set[str] = set(_ADDED)
    for series, matched in found:
        metric = EXPORTED[metric_of(series)]
        assert set(matched) <= {*metric.labels, *_ADDED}, f"{where}: {series}"
        labels |= set(metric.labels)
    for grouped in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", expr):
        assert {label.strip() for label in grouped.split(",") if label.strip()} <= labels, where


def test_every_exported_metric_is_on_a_page_or_in_an_alert() -> None:
    used = {metric_of(series) for _, expr in all_queries() for series, _ in series_in(expr)}
    assert set(EXPORTED) - used == _NOT_SHOWN


def test_legends_name_labels_that_their_query_keeps() -> None:
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels():
            for query in panel.queries:
                kept = {
                    label.strip()
                    for grouped in re.findall(r"by \(([^)]*)\)", query.expr)
                    for label in grouped.split(",")
                }
                assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= kept, f"{panel.title}: {query.legend}"


def test_ratios_are_of_the_counts_that_the_specification_names() -> None:
    assert set(RATIOS) == {metric.name for metric in METRICS.values() if metric.denominator is not None}
    for name, ratio in RATIOS.items():
        assert {ratio.part, *ratio.whole} == set(METRICS[name].counts)
        assert set(ratio.by) == {"cluster", *METRICS[name].labels}


def test_the_recording_rules_have_the_names_of_the_eight_and_their_labels_with_the_cluster() -> None:
    found = {rule["record"]: rule["expr"] for rule in recordings(Limits())}
    assert found.keys() == METRICS.keys()
    for name, expr in found.items():
        first = re.match(r"sum by \(([^)]*)\)", expr)
        assert first is not None
        assert set(first[1].split(", ")) == {"cluster", *METRICS[name].labels}


def test_a_quantile_outside_its_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a quantile must be in \[0, 1\], found 99"):
        quantile(99, "moe_step_seconds")


# -- Grafana's model


def test_grafanas_own_model_reads_every_field_of_every_dashboard() -> None:
    register_default_plugins()
    for document in documents():
        read = grafana_model.Dashboard.from_json(json.loads(json.dumps(document)))
        again = json.loads(JSONEncoder(sort_keys=True).encode(read))
        assert list(lost(document, again, document["uid"])) == []
        assert list(strange_values(read, document["uid"])) == []


def strange_values(read: Any, at: str) -> Iterator[str]:
    """Values in a document that Grafana's model has read which are none of those that it lists for their field."""
    if isinstance(read, list):
        for number, each in enumerate(read):
            yield from strange_values(each, f"{at}[{number}]")
        return
    kind = type(read)
    if not kind.__module__.startswith("grafana_foundation_sdk.models") or isinstance(kind, EnumType):
        return
    hints = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]))
    for name, value in vars(read).items():
        choices = typing.get_args(hints[name]) or (hints[name],)
        listed = {one.value for each in choices if isinstance(each, EnumType) for one in each}
        if name == "unit":
            listed = _UNITS
        if isinstance(value, str | int) and listed and value not in listed:
            yield f"{at}.{name}: {value!r}"
        yield from strange_values(value, f"{at}.{name}")


def lost(given: Any, kept: Any, at: str) -> Iterator[str]:
    """What of `given` is not in `kept`, or is another value there."""
    # Of annotations the model has what all data sources share; these two are the Prometheus plugin's.
    own = {"titleFormat", "step"} if at.endswith("annotations.list[0]") else set()
    if isinstance(given, Mapping):
        for name, value in given.items():
            if name not in own:
                if not isinstance(kept, Mapping) or name not in kept:
                    # The encoder leaves out what is null; so does Grafana for the first step of thresholds.
                    if value is not None:
                        yield f"{at}.{name}"
                else:
                    yield from lost(value, kept[name], f"{at}.{name}")
    elif isinstance(given, list):
        if not isinstance(kept, list) or len(kept) != len(given):
            yield at
        else:
            for number, (one, other) in enumerate(zip(given, kept, strict=True)):
                yield from lost(one, other, f"{at}[{number}]")
    elif given != kept:
        yield f"{at}: {given!r} became {kept!r}"


def test_a_field_or_a_value_that_grafana_does_not_have_would_be_noticed() -> None:
    register_default_plugins()
    document = documents()[0]
    document["panels"][1]["fieldConfg"] = {}
    document["panels"][1]["options"]["graphMode"] = "areas"
    document["panels"][1]["fieldConfig"]["defaults"]["unit"] = "furlongs"
    read = grafana_model.Dashboard.from_json(document)
    assert list(lost(document, json.loads(JSONEncoder().encode(read)), "d")) == ["d.panels[1].fieldConfg"]
    assert sorted(strange_values(read, "d")) == [
        "d.panels[1].field_config.defaults.unit: 'furlongs'",
        "d.panels[1].options.graph_mode: 'areas'",
    ]


def test_panels_lie_beside_one_another_on_the_grid_with_ids_of_their_own() -> None:
    for document in documents():
        places = [panel["gridPos"] for panel in document["panels"]]
        assert len({panel["id"] for panel in document["panels"]}) == len(places)
        assert all(place["x"] + place["w"] <= COLUMNS for place in places)
        for one, other in combinations(places, 2):
            assert (
                one["x"] + one["w"] <= other["x"]
                or other["x"] + other["w"] <= one["x"]
                or one["y"] + one["h"] <= other["y"]
                or other["y"] + other["h"] <= one["y"]
            ), document["uid"]
        assert 0 < len(document["uid"]) <= 40


def test_every_panel_says_what_it_shows_and_asks_the_data_source_that_was_chosen() -> None:
    for document in documents():
        names = {variable["name"] for variable in document["templating"]["list"]}
        assert {"datasource", "cluster"} <= names
        for panel in document["panels"]:
            if panel["type"] == "row":
                continue
            assert panel["description"].endswith(".") and panel["targets"]
            for target in panel["targets"]:
                assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
                used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval", "__range"}
                assert used <= names, panel["title"]


def test_every_metric_is_asked_for_one_cluster_only() -> None:
    for asked in panel_queries():
        if asked.panel == "variable cluster":
            continue
        assert 'cluster="$cluster"' in asked.expr, str(asked)


# -- Prometheus's own reading and evaluation


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        [require_tool("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_reads_the_rules_the_scrape_file_and_every_panels_query(tmp_path: Path) -> None:
    export_files(tmp_path, Limits(), "http://localhost:9090", "/dashboards")
    assert f"{len(ALERTS) + len(METRICS)} rules found" in promtool(
        "check", "rules", tmp_path / "prometheus/ray-moe.rules.yml"
    )
    assert "SUCCESS" in promtool("check", "config", tmp_path / "prometheus/prometheus.yml")
    as_rules = [
        {"record": f"query:{number}", "expr": substituted(asked.expr, "c")}
        for number, asked in enumerate(panel_queries())
    ]
    queries = tmp_path / "queries.yml"
    queries.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": as_rules}]}))
    assert f"{len(as_rules)} rules found" in promtool("check", "rules", queries)


# A cluster that serves, as 15-second samples for 100 minutes. `c` is its controller's worker, `r` a rank's.
_C, _R = 'cluster="a", WorkerId="c"', 'cluster="a", rank="0", WorkerId="r"'
_P = 'release="r1", phase="decode", WorkerId="c"'
HEALTHY: dict[str, str] = {
    f'ray_moe_cluster_state{{{_C}, state="serving"}}': "1x400",
    f'ray_moe_cluster_state{{{_C}, state="degraded"}}': "0x400",
    f'ray_moe_cluster_state{{{_C}, state="stopped"}}': "0x400",
    f'ray_moe_ranks{{{_C}, state="serving"}}': "1x400",
    f'ray_moe_ranks{{{_C}, state="lost"}}': "0x400",
    f"ray_moe_rank_deaths_total{{{_C}}}": "0x400",
    f"ray_moe_requests_running{{{_R}}}": "3x400",
    f"ray_moe_requests_waiting{{{_R}}}": "2x400",
    f"ray_moe_steps_worked_total{{{_R}}}": "0+100x400",
    f"ray_moe_tokens_total{{{_R}}}": "0+300x400",
    f"ray_moe_kv_blocks_used{{{_R}}}": "60x400",
    f"ray_moe_kv_blocks_total{{{_R}}}": "64x400",
    f'ray_moe_operation_age_seconds{{{_C}, kind="rebalance"}}': "0x400",
    f'ray_moe_operations_total{{{_C}, kind="grow", outcome="done"}}': "0+1x400",
    f'ray_moe_operations_total{{{_C}, kind="grow", outcome="failed"}}': "0x400",
    f'ray_moe_migration_bytes_total{{{_C}, source="peer"}}': "0x400",
    f"ray_moe_drain_age_seconds{{{_C}}}": "0x400",
    f'ray_moe_imbalance{{{_C}, layer_group="0-7"}}': "1.2x400",
    f"ray_moe_routes_attempted_total{{{_P}}}": "0+2400x400",
    f"ray_moe_routes_dropped_total{{{_P}}}": "0x400",
    f"ray_moe_route_output_mismatches_total{{{_P}}}": "0x400",
    f"ray_moe_steps_total{{{_P}}}": "0+100x400",
    f'ray_moe_fallback_steps_total{{{_P}, reason="capacity"}}': "0+10x400",
    'ray_moe_stale_handle_acceptances_total{release="r1", placement_generation="1", WorkerId="c"}': "0x400",
    'ray_moe_count_conservation_failures_total{release="r1", process_group_generation="0", WorkerId="c"}': "0x400",
}
_NEW_EPOCH = 'release="r1", process_group_generation="1", WorkerId="c"'
_MOVES = {f'ray_moe_migration_bytes_total{{{_C}, source="peer"}}': "0x120 0+1000x280"}
_CLIMBS = {f'ray_moe_operation_age_seconds{{{_C}, kind="rebalance"}}': "0x120 0+15x280"}
# Alert -> what goes wrong at minute 30, and the minute at which it has to have been noticed.
CAUSES: dict[str, tuple[dict[str, str], float]] = {
    "RayMoERankLost": ({f"ray_moe_rank_deaths_total{{{_C}}}": "0x120 1x280"}, 31),
    "RayMoENotServing": ({f'ray_moe_cluster_state{{{_C}, state="degraded"}}': "0x120 1x280"}, 32),
    "RayMoEStepsStalled": ({f"ray_moe_steps_worked_total{{{_R}}}": "0+100x120 12000x280"}, 33),
    "RayMoERoutesDropped": ({f"ray_moe_routes_dropped_total{{{_P}}}": "0x120 3x280"}, 31),
    "RayMoERouteOutputMismatch": ({f"ray_moe_route_output_mismatches_total{{{_P}}}": "0x120 1x280"}, 31),
    # A series that is born with its first count, under labels that did not exist before.
    "RayMoECountsNotConserved": (
        {f"ray_moe_count_conservation_failures_total{{{_NEW_EPOCH}}}": "_x120 1x280"},
        31,
    ),
    "RayMoEStaleHandleAccepted": (
        {'ray_moe_stale_handle_acceptances_total{release="r1", placement_generation="2", WorkerId="c"}': "_x120 1x280"},
        31,
    ),
    "RayMoEOperationStalled": (_CLIMBS, 42),
    "RayMoEOperationSlow": (_CLIMBS | _MOVES, 92),
    "RayMoEOperationFailed": (
        {f'ray_moe_operations_total{{{_C}, kind="grow", outcome="failed"}}': "0x120 1x280"},
        31,
    ),
    "RayMoEDrainTooOld": ({f"ray_moe_drain_age_seconds{{{_C}}}": "0x120 0+15x280"}, 47),
    "RayMoEImbalance": ({f'ray_moe_imbalance{{{_C}, layer_group="0-7"}}': "1.2x120 1.8x280"}, 61),
    "RayMoEFallbackSteps": ({f'ray_moe_fallback_steps_total{{{_P}, reason="capacity"}}': "0+10x120 1200+50x280"}, 40),
    "RayMoEKVCacheFull": ({f"ray_moe_kv_blocks_used{{{_R}}}": "60x120 64x280"}, 36),
    "RayMoEMetricsMissing": (
        {series: values.split("x")[0] + "x120" for series, values in HEALTHY.items() if "cluster_state" in series},
        42,
    ),
}


def firing(folder: Path, changes: Mapping[str, str], minute: float, expected: tuple[str, ...]) -> None:
    """Assert that, with these series, exactly these alerts fire then."""
    (folder / "rules.yml").write_text(yaml.safe_dump(rules()))
    fires = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected]
    question = 'count by (alertname) (count by (alertname, cluster) (ALERTS{alertstate="firing", cluster="a"}))'
    case = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in {**HEALTHY, **changes}.items()],
        "promql_expr_test": [{"expr": question, "eval_time": f"{int(minute * 60)}s", "exp_samples": fires}],
    }
    test = folder / "test.yml"
    test.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "30s", "tests": [case]}))
    promtool("test", "rules", test)


@pytest.mark.parametrize("name", [alert.name for alert in ALERTS])
def test_an_alert_fires_on_its_cause_and_no_other_with_it(name: str, tmp_path: Path) -> None:
    changes, minute = CAUSES[name]
    firing(tmp_path, changes, minute, (name,))


@pytest.mark.parametrize("minute", [1, 30, 99])
def test_no_alert_fires_on_a_cluster_that_serves(minute: int, tmp_path: Path) -> None:
    firing(tmp_path, {}, minute, ())


def test_an_idle_cluster_is_no_stall(tmp_path: Path) -> None:
    idle = {
        f"ray_moe_requests_running{{{_R}}}": "0x400",
        f"ray_moe_steps_worked_total{{{_R}}}": "100x400",
        f"ray_moe_tokens_total{{{_R}}}": "100x400",
        f'ray_moe_imbalance{{{_C}, layer_group="0-7"}}': "1.8x400",  # of a demand that nothing renews
    }
    firing(tmp_path, idle, 90, ())


def test_an_operation_that_moves_bytes_is_no_stall(tmp_path: Path) -> None:
    firing(tmp_path, _CLIMBS | _MOVES, 42, ())


def test_a_cluster_that_was_taken_down_is_not_missed(tmp_path: Path) -> None:
    down = {
        series: "0x118 1x2" if "stopped" in series else f"{'1' if 'serving' in series else '0'}x120"
        for series in HEALTHY
        if "cluster_state" in series
    }
    firing(tmp_path, down, 42, ())


def test_a_controllers_last_count_outlives_it_by_a_window(tmp_path: Path) -> None:
    dies = {series: values.split("x")[0] + "x121" for series, values in HEALTHY.items() if "cluster_state" in series}
    firing(tmp_path, dies | {f"ray_moe_routes_dropped_total{{{_P}}}": "0x119 3x2"}, 33, ("RayMoERoutesDropped",))


def test_another_limit_changes_its_alert_and_an_unknown_one_is_refused() -> None:
    other = {alert.name: alert.expr for alert in alerts(Limits.of({"drain": 77}))}
    assert {alert.name for alert in ALERTS if other[alert.name] != alert.expr} == {"RayMoEDrainTooOld"}
    assert "> 77" in other["RayMoEDrainTooOld"]
    with pytest.raises(ConfigError, match=r"a limit is one of window, .*; found 'drian'"):
        Limits.of({"drian": 1})
    with pytest.raises(ConfigError, match="limit drain must be a number > 0, found -1"):
        Limits.of({"drain": -1})
    with pytest.raises(ConfigError, match=r"limit window must be whole seconds, found 1\.5"):
        Limits.of({"window": 1.5})


# -- Files


def test_named_endpoints_are_scraped_instead_of_those_that_rays_dashboard_finds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["dashboards", "export", "--scrape", "127.0.0.1:9100", "--scrape", "gpu-2:9100"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["scrape"]["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9100", "gpu-2:9100"]}]
    assert "file_sd_configs" not in job
    assert run(["dashboards", "export", "--scrape", "http://x:9100"]) == 2
    assert "--scrape is 'http://x:9100'; it must be HOST:PORT" in capsys.readouterr().err


def test_files_and_the_document_on_stdout_are_the_same_things(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dashboards", "export"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(export_document(Limits(), "http://localhost:9090")))
    assert run(["dashboards", "export", "--out", str(tmp_path / "x"), "--json"]) == 0
    written = [Path(path) for path in json.loads(capsys.readouterr().out)["files"]]
    assert {path.name for path in written} == {path.name for path in (tmp_path / "x").rglob("*") if path.is_file()}
    assert [json.loads(path.read_text()) for path in written if path.suffix == ".json"] == printed["dashboards"]
    assert yaml.safe_load((tmp_path / "x/prometheus/ray-moe.rules.yml").read_text()) == printed["rules"]
    assert yaml.safe_load((tmp_path / "x/prometheus/prometheus.yml").read_text()) == scrape()
    provisioning = tmp_path / "x/grafana/provisioning"
    assert yaml.safe_load((provisioning / "datasources/ray-moe.yaml").read_text()) == printed["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/ray-moe.yaml").read_text())["providers"]
    assert Path(provider["options"]["path"]) == (tmp_path / "x/dashboards").resolve()


def test_what_cannot_be_written_or_asked_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    assert run(["dashboards", "export", "--out", str(tmp_path / "taken")]) == 1
    assert capsys.readouterr().err == f"error: cannot write to {tmp_path / 'taken'}: Not a directory\n"
    assert run(["dashboards", "export", "--set", "drian=3"]) == 2
    assert "a limit is one of window" in capsys.readouterr().err


# -- Push


@pytest.fixture
def twin() -> Iterator[Twin]:
    with grafana() as running:
        yield running


def test_a_push_makes_its_folder_and_all_dashboards_and_a_second_one_changes_nothing(twin: Twin) -> None:
    first = Grafana(twin.url, TOKEN).push(documents(), "ray_moe")
    assert twin.folders == {"ray-moe": "ray_moe"}
    assert [pushed.uid for pushed in first] == [dashboard.uid for dashboard in DASHBOARDS]
    for document in documents():
        kept = twin.dashboards[document["uid"]]
        assert kept["dashboard"] == {**document, "id": None}
        assert (kept["folder"], kept["version"]) == ("ray-moe", 1)
    assert Grafana(twin.url, TOKEN).push(documents(), "ray_moe") == first
    changed = documents()
    changed[0]["title"] = "another"
    assert [pushed.version for pushed in Grafana(twin.url, TOKEN).push(changed, "ray_moe")] == [2, 1, 1, 1]
    assert len(twin.folders) == 1 and len(twin.dashboards) == len(DASHBOARDS)


def test_a_folder_is_found_by_uid_or_title_and_never_made_by_a_slip(twin: Twin) -> None:
    twin.folders.update({"abc": "Team, with spaces", "ray-moe": "renamed"})
    for wanted in ("abc", "Team, with spaces"):
        Grafana(twin.url, TOKEN).push(documents()[:1], wanted)
        assert twin.dashboards[DASHBOARDS[0].uid]["folder"] == "abc"
    Grafana(twin.url, TOKEN).push(documents()[:1], "ray_moe")
    assert twin.dashboards[DASHBOARDS[0].uid]["folder"] == "ray-moe", "the folder of an earlier push, renamed since"
    with pytest.raises(ConfigError, match="has no folder 'Taem'; found 'Team, with spaces', 'renamed'"):
        Grafana(twin.url, TOKEN).push(documents(), "Taem")
    assert len(twin.folders) == 2


@pytest.mark.parametrize("unseen", [403, 404])
def test_a_folder_inside_another_is_found_by_uid_and_one_that_is_not_there_is_made_or_named(
    twin: Twin, unseen: int
) -> None:
    twin.inner, twin.unseen = {"inner": "Below"}, unseen
    Grafana(twin.url, TOKEN).push(documents()[:1], "inner")
    assert twin.dashboards[DASHBOARDS[0].uid]["folder"] == "inner"
    with pytest.raises(ConfigError, match="has no folder 'outer'; found none"):
        Grafana(twin.url, TOKEN).push(documents(), "outer")
    Grafana(twin.url, TOKEN).push(documents()[:1], "ray_moe")
    assert twin.folders == {"ray-moe": "ray_moe"}


def test_a_grafana_below_a_path_is_reached() -> None:
    with grafana("/tools/grafana") as below:
        for url in (below.url, f"{below.url}/"):
            assert len(Grafana(url, TOKEN).push(documents(), "ray_moe")) == len(DASHBOARDS)
        with pytest.raises(ConfigError, match=r"has no folders \(404\); is this its address, sub-path included\?"):
            Grafana(below.url.removesuffix("/tools/grafana"), TOKEN).push(documents(), "ray_moe")


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (401, ConfigError, r"does not know this token \(401\)"),
        (403, ConfigError, r"may not write folders of Grafana at .* \(403\); a service account needs role Editor"),
        (400, ConfigError, "refuses folders: Bad Input"),
        (412, ConfigError, "refuses folders: Client Error 412: out of order"),
        (500, RayMoEError, "failed at folders: Server Error 500: out of order"),
        (502, RayMoEError, "failed at folders: Server Error 502: out of order"),
    ],
)
def test_each_refusal_of_grafana_is_one_line_that_says_what_to_do(
    twin: Twin, status: int, kind: type[RayMoEError], said: str
) -> None:
    twin.failing = (status, {"message": "out of order"})
    with pytest.raises(kind, match=said) as refused:
        Grafana(twin.url, TOKEN).push(documents(), "ray_moe")
    assert isinstance(refused.value, ConfigError) == (kind is ConfigError), "whose fault it is decides the exit code"
    assert TOKEN not in str(refused.value)


def test_a_login_page_is_not_taken_for_grafana(twin: Twin) -> None:
    twin.html = "<html>Please log in</html>"
    with pytest.raises(RayMoEError, match="answers, but not as Grafana's API does"):
        Grafana(twin.url, TOKEN).push(documents(), "ray_moe")


def test_the_command_takes_its_token_from_the_environment_and_shows_it_nowhere(
    twin: Twin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", f"{TOKEN}\n")
    assert run(["dashboards", "push", "--url", twin.url, "--json"]) == 0
    answer = capsys.readouterr()
    assert [each["uid"] for each in json.loads(answer.out)["dashboards"]] == [dashboard.uid for dashboard in DASHBOARDS]
    assert run(["dashboards", "push", "--url", twin.url]) == 0
    answer = capsys.readouterr()
    assert "ray_moe: overview (version 1): /d/ray-moe-overview/ray-moe-overview" in answer.out
    said = answer.out + answer.err
    for code, lines, arguments in (
        (0, 0, ["--help"]),
        (1, 1, ["--url", "http://127.0.0.1:9"]),
        (2, 1, ["--url", twin.url, "--folder", "none"]),
        (2, 1, ["--url", "ftp://x"]),
        (2, 1, ["--url", twin.url, "--token", f"{TOKEN}\nX-Other: 1"]),
        (2, 1, ["--url", twin.url, "--token", f"{TOKEN}x"]),
    ):
        assert run(["dashboards", "push", *arguments]) == code, arguments
        answer = capsys.readouterr()
        assert len(answer.err.splitlines()) == lines, answer.err
        said += answer.out + answer.err
    assert TOKEN not in said


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("grafana:3000", r"--url must be http://HOST\[:PORT\]\[/PATH\] or https://..., found 'grafana:3000'"),
        ("http://", "--url must be http://"),
        ("http://host:99999", "--url is no address: Port out of range"),
        ("http://user:pass@host", "must not hold a user or password"),
        ("ftp://user:pass@host", "found 'host'"),
        ("http://host/?orgId=1", "must end with Grafana's path"),
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Grafana(url, TOKEN)
    assert "pass@" not in str(refused.value)


def test_no_token_is_refused_with_what_to_give() -> None:
    with pytest.raises(ConfigError, match="no token: give one by --token or GRAFANA_TOKEN"):
        Grafana("http://127.0.0.1:9", " \n")


def test_grafanas_client_is_behind_one_module_which_only_a_push_imports() -> None:
    users = {
        path.relative_to(ROOT)
        for path in (ROOT / "ray_moe").rglob("*.py")
        if re.search(r"^\s*(from|import) grafana_client", path.read_text(), re.MULTILINE)
    }
    assert users == {Path("ray_moe/observe/dashboards/grafana.py")}
    check = "import sys, ray_moe.cli.main, ray_moe.observe.dashboards.files; sys.exit('grafana_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0
