"""Logs: one document per transition, with what `EVENTS` declares and nothing else."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_moe.actors.announce import PeersTold, RegistryTold, log_as, tell_operations
from ray_moe.actors.cluster_state import CLUSTER_TABLE, ClusterState
from ray_moe.actors.cluster_state import advance as advance_cluster
from ray_moe.cli.lifecycle import _app_args
from ray_moe.cli.options import cluster_config
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.effects import PeerPhase
from ray_moe.controlplane.operations import ControlState, Kind, Operation, Stage
from ray_moe.controlplane.release_states import Note
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.errors import RayMoEError
from ray_moe.events import EVENTS, configure, emit, formatter
from ray_moe.models import TINY_MOE
from tests import releases
from tests.one_peer import OnePeer


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What has been logged so far, as JSON."""
    package, stream = logging.getLogger("ray_moe"), io.StringIO()
    before = (package.level, list(package.handlers))
    configure(as_json=True, level="debug", stream=stream, cluster="c", actor="test")
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    package.setLevel(before[0])
    package.handlers[:] = before[1]


Lines = Callable[[], list[dict[str, Any]]]


# -- The form


def test_a_line_says_when_who_what_and_with_which_ids(lines: Lines) -> None:
    emit("loop", "starting", "serving", "serve", rank=3, step=7, reason="")
    (line,) = lines()
    assert line.pop("timestamp").endswith("Z")
    assert line.pop("pid") > 0
    assert line == {
        "level": "info",
        "logger": "ray_moe.events",
        "event": "loop",
        "cluster": "c",
        "actor": "test",
        "from": "starting",
        "to": "serving",
        "by": "serve",
        "rank": 3,
        "step": 7,
    }


def test_what_modules_say_in_words_has_the_same_form(lines: Lines) -> None:
    log = logging.getLogger("ray_moe.engine.anything")
    log.warning("rank %d is slow\nreally", 3)
    try:
        raise ValueError("it broke")
    except ValueError:
        log.exception("in a round")
    plain, failed = lines()
    assert (plain["event"], plain["level"], plain["cluster"]) == ("rank 3 is slow\nreally", "warning", "c")
    assert failed["exception"].splitlines()[-1] == "ValueError: it broke"


def test_without_json_a_line_is_for_people_with_the_same_fields() -> None:
    record = logging.LogRecord("ray_moe.events", logging.INFO, "", 0, "loop", None, None)
    record.fields = {"from": "starting", "to": "serving", "by": "serve", "rank": 3}
    text = formatter(as_json=False, identity={"actor": "expert-3"}).format(record)
    assert "\x1b" not in text
    for part in ("[info", "loop", "from=starting", "to=serving", "rank=3", "actor=expert-3"):
        assert part in text


@pytest.mark.parametrize("field", ["prompt", "token_ids", "key", "authorization"])
def test_an_event_takes_no_field_that_is_not_declared(field: str) -> None:
    for event, declared in EVENTS.items():
        assert field not in declared
        with pytest.raises(KeyError, match=f"event '{event}' has no field '{field}'"):
            emit(event, "", "", "", **{field: "secret"})
    with pytest.raises(KeyError):
        emit("handle", "", "", "")


def test_a_long_reason_is_cut(lines: Lines) -> None:
    emit("cluster", "serving", "degraded", "lose_peer", reason="x" * 10_000)
    assert len(lines()[0]["reason"]) == 500


def test_lines_below_the_level_cost_nothing_and_are_not_written(lines: Lines) -> None:
    logging.getLogger("ray_moe").setLevel("INFO")
    emit("loop", "serving", "sleeping", "sleep", level=logging.DEBUG, rank=0)
    assert lines() == []


# -- What is told


def test_a_loop_tells_each_of_its_transitions_once(lines: Lines, family_dir: Callable[..., Path]) -> None:
    with OnePeer(family_dir("qwen3_moe")) as peer:
        peer.loop.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)))
        peer.loop.stage(peer.view(2))
        peer.outlet.until_ended("a")
    loop = [line for line in lines() if line["event"] == "loop"]
    kept = [(line["from"], line["to"], line["by"]) for line in loop if line["level"] != "debug"]
    assert kept == [("starting", "serving", "serve"), ("serving", "stopped", "stop")]
    assert all(line["rank"] == 0 and line["release"] == "alone-1" for line in loop)
    (switch,) = [line for line in lines() if line["event"] == "switch"]
    assert (switch["from"], switch["to"], switch["by"]) == ("generation 1", "generation 2", "stage")
    assert (switch["generation"], switch["epoch"]) == (2, 0)
    assert switch["pause_s"] == round(peer.loop.counters.switches[0].seconds, 6)


def test_a_loop_that_fails_says_why(lines: Lines, family_dir: Callable[..., Path]) -> None:
    with OnePeer(family_dir("qwen3_moe")) as peer:
        peer.loop.break_epoch("rank 1 died")
        peer.thread.join(timeout=30)
    (failed,) = [line for line in lines() if line["event"] == "loop" and line["by"] == "fail"]
    assert (failed["level"], failed["to"]) == ("error", "failed")
    assert "rank 1 died" in failed["reason"]


def test_every_edge_of_the_cluster_is_told_and_nothing_else_is_allowed(lines: Lines) -> None:
    for state, edges in CLUSTER_TABLE.items():
        for event, following in edges.items():
            assert advance_cluster("c", state, event, "why") is following
            line = lines()[-1]
            assert (line["from"], line["to"], line["by"], line["reason"]) == (state, following, event, "why")
    assert len(lines()) == sum(len(edges) for edges in CLUSTER_TABLE.values())
    with pytest.raises(RayMoEError, match="event 'serve' is illegal in state stopped"):
        advance_cluster("c", ClusterState.STOPPED, "serve")


def operation(number: int = 1, kind: Kind = Kind.REBALANCE) -> Operation:
    stage = Stage.PREPARING if kind is Kind.GROW else Stage.QUEUED
    return Operation(number, kind, "me@here", "because", 1.0, stage, ranks=(4,) if kind is Kind.GROW else ())


def test_an_operation_that_takes_several_edges_between_two_saves_tells_each(lines: Lines) -> None:
    asked = ControlState(operations=(operation(),))
    tell_operations(ControlState(), asked)
    moving = operation().take("enter", 2.0).take("publish", 3.0)
    tell_operations(asked, asked.put(moving))
    ended = replace(moving, last_generation=9, pause_s=0.25).take("published", 4.0).take("done", 5.0)
    closed = asked.put(moving).close(ended)
    tell_operations(asked.put(moving), closed)
    tell_operations(closed, closed)
    told = [(line["from"], line["to"], line["by"]) for line in lines()]
    assert told == [
        ("", "queued", "ask"),
        ("queued", "filling", "enter"),
        ("filling", "publishing", "publish"),
        ("publishing", "switching", "published"),
        ("switching", "done", "done"),
    ]
    assert {line["operation"] for line in lines()} == {1}
    assert (lines()[0]["asked_by"], lines()[0]["why"]) == ("me@here", "because")
    assert (lines()[-1]["generation"], lines()[-1]["pause_s"]) == (9, 0.25)
    assert [passed.number for passed in closed.history[0].trail] == [1, 2, 3, 4]


def test_an_operation_that_is_asked_for_and_ends_at_once_tells_both(lines: Lines) -> None:
    failed = operation(2, Kind.GROW).take("undo", 2.0, "no room").take("failed", 3.0)
    tell_operations(ControlState(), ControlState(history=(failed,)))
    told = [(line["from"], line["to"], line["level"]) for line in lines()]
    assert told == [
        ("", "preparing", "info"),
        ("preparing", "undoing", "warning"),
        ("undoing", "failed", "warning"),
    ]
    assert lines()[0]["ranks"] == [4]
    assert lines()[-1]["reason"] == "no room"


def test_a_rank_is_told_when_it_says_something_else_than_before(lines: Lines) -> None:
    told = PeersTold()
    for phase in (PeerPhase.STARTING, PeerPhase.LOADED, PeerPhase.LOADED, PeerPhase.SERVING, PeerPhase.SERVING):
        told.said(3, phase, 0)
    told.lost(3, "rank 3 died")
    told.said(4, PeerPhase.LEFT, 2)
    told.ended(4)
    found = [(line["rank"], line["from"], line["to"], line["level"]) for line in lines()]
    assert found == [
        (3, "", "starting", "info"),
        (3, "starting", "loaded", "info"),
        (3, "loaded", "serving", "info"),
        (3, "serving", "lost", "error"),
        (4, "", "left", "info"),
        (4, "left", "ended", "info"),
    ]


def test_the_registry_tells_generations_and_releases_as_they_change(lines: Lines) -> None:
    told = RegistryTold()
    registry = releases.serving()
    told.tell(registry)
    launched = lines()
    assert {line["event"] for line in launched} == {"release", "generation"}
    following = releases.snapshot_of(2, beside=10)
    registry.publish(following, releases.bundle_of(following), Note("operator", 1.0, "operation 7"))
    told.tell(registry)
    published = lines()[len(launched) :]
    registry.retire_generation(1)
    told.tell(registry)
    retired = lines()[len(launched) + len(published) :]
    told.tell(registry)
    assert [(line["event"], line["by"]) for line in published] == [
        ("release", "publish"),
        ("generation", "publish"),
        ("generation", "publish"),
    ]
    assert (published[0]["asked_by"], published[0]["why"], published[0]["generation"]) == ("operator", "operation 7", 2)
    edges = [(line["generation"], line["from"], line["to"]) for line in lines() if line["event"] == "generation"]
    assert edges == [(1, "", "ACTIVE"), (1, "ACTIVE", "DRAINING"), (2, "", "ACTIVE"), (1, "DRAINING", "RETIRED")]
    assert [line["by"] for line in retired] == ["retire"]


def test_a_release_that_comes_up_and_one_that_leaves_tell_every_step(lines: Lines) -> None:
    registry, told = releases.serving(), RegistryTold()
    told.take_over(registry)
    assert lines() == []
    snapshot = releases.snapshot_of(2, "release-2", beside=10)
    bundle, note = releases.bundle_of(snapshot), releases.NOTE
    steps: list[Callable[[], object]] = [
        lambda: registry.build(bundle, note),
        lambda: registry.verify("release-2", bundle, note),
        lambda: registry.load("release-2", snapshot, releases.observed(snapshot), note),
        lambda: registry.shadow("release-2", note),
        lambda: registry.canary("release-2", releases.SAME, note),
        lambda: registry.promote("release-2", releases.report_on("release-2"), note),
    ]
    for step in steps:
        step()
        told.tell(registry)
    own = [
        (line["from"], line["to"])
        for line in lines()
        if line.get("release") == "release-2" and line["event"] == "release"
    ]
    assert own == [
        ("", "BUILT"),
        ("BUILT", "VERIFIED"),
        ("VERIFIED", "LOADED"),
        ("LOADED", "SHADOW"),
        ("SHADOW", "CANARY"),
        ("CANARY", "ACTIVE"),
    ]


def test_a_registry_that_was_started_again_tells_nothing_twice(lines: Lines) -> None:
    registry, told = releases.serving(), RegistryTold()
    told.take_over(registry)
    told.tell(registry)
    assert lines() == []


def test_the_option_reaches_actors_and_replicas() -> None:
    config = cluster_config(None, None, model=TINY_MOE, log_json=True)
    assert (config.log_json, config.log_level) == (True, "info")
    assert _app_args(config, None, None, no_auth=False).log_json
    assert not _app_args(cluster_config(None, None, model=TINY_MOE), None, None, no_auth=False).log_json


def test_an_actor_logs_as_its_cluster_wants_it(capsys: pytest.CaptureFixture[str], lines: Lines) -> None:
    log_as(ClusterConfig(model="m", name="mine", log_json=True, log_level="warning"), "expert-7")
    logging.getLogger("ray_moe.actors.x").info("not this")
    logging.getLogger("ray_moe.actors.x").warning("this")
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["cluster"], line["actor"]) for line in told] == [("this", "mine", "expert-7")]
    assert lines() == []  # the later one replaces the earlier
