"""Verbs that change a running cluster, without one: what they accept and refuse, and how operations look."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from ray_moe.cli.elastic import Seats, homes_in, replica_counts, watching
from ray_moe.cli.main import run
from ray_moe.cli.output import Output
from ray_moe.controlplane.operation_row import OperationRow
from ray_moe.controlplane.operations import ENDED, ByCounts, ByHomes, Kind, Operation, Stage
from ray_moe.controlplane.preview import preview
from ray_moe.controlplane.publication import Storage
from ray_moe.errors import ConfigError
from ray_moe.observe.operations import (
    history_table,
    operations_table,
    progress_line,
    progress_view,
    render_preview,
    summary,
    waits_for,
)
from ray_moe.plans import read_document
from tests.layers import placement, spec_of

VERBS = (["rebalance"], ["scale", "3"], ["drain", "2"], ["cancel", "7"], ["history"])
SEATS = Seats(layers=(1, 3), experts=4, ranks=(0, 2, 5))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was ever started from here, and no Ray has noted its address."""
    monkeypatch.setenv("RAY_MOE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


# ---- what they accept ----


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_every_verb_says_what_it_takes(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb[0], "--help"]) == 0
    shown = capsys.readouterr().out
    common = {"--name", "--address", "--json"}
    assert all(option in shown for option in (common if verb == ["history"] else common | {"--no-wait", "--why"}))


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_where_nothing_runs_that_is_said_with_exit_1(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*verb, "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["type"] == "NotServingError"
    assert shown.err == "error: no cluster named 'default' was started from here, and no Ray to attach to was found\n"


BAD_INPUT = [
    (["scale"], "Missing argument 'N'"),
    (["scale", "two"], "Invalid value for 'N'"),
    (["drain"], r"Missing argument 'RANK\.\.\.'"),
    (["drain", "0", "x"], r"Invalid value for 'RANK\.\.\.'"),
    (["cancel", "it"], "Invalid value for 'OP'"),
    (["history", "--last", "0"], "--last must be >= 1, found 0"),
    (["rebalance", "--replicas", "0:3=2", "--plan", "p.json"], "give one of them"),
    (["rebalance", "--plan", "/nowhere.json"], r"/nowhere\.json: cannot be read"),
    (["scale", "2", "--name", "a/b"], "name is 'a/b'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=lambda case: " ".join(case)[:50])
def test_bad_input_is_one_line_on_stderr_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(rf"error: .*{message}.*\n", shown.err), shown.err


# ---- a placement that somebody gives ----


def test_a_plans_document_is_read_with_its_rows_as_layers_and_its_ranks_as_the_clusters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demand = tmp_path / "demand.json"
    demand.write_text(
        json.dumps(
            {"demand": [[90, 5, 5, 5], [1, 1, 1, 9]], "num_slots": 6, "num_gpus": 3, "num_nodes": 1, "num_groups": 1}
        )
    )
    assert run(["plan", str(demand), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    homes = homes_in(document, "plan.json", SEATS)
    assert list(homes) == [1, 3]
    for row, pairs in zip(document["phy2log"], homes.values(), strict=True):
        assert [expert for expert, _ in pairs] == row
        assert [rank for _, rank in pairs] == [0, 0, 2, 2, 5, 5]


@pytest.mark.parametrize(
    ("text", "source"),
    [('{"3": [[0, 5], [1, 0], [2, 0], [3, 2]]}', "a.json"), ("3: [[0, 5], [1, 0], [2, 0], [3, 2]]", "a")],
)
def test_a_mapping_may_leave_layers_as_they_are(text: str, source: str) -> None:
    assert homes_in(read_document(text, source), source, SEATS) == {3: ((0, 5), (1, 0), (2, 0), (3, 2))}


WHOLE = [[0, 0], [1, 2], [2, 5], [3, 5]]
PLAN = {"phy2log": [[0, 1, 2, 3]] * 2, "slots_by_rank": [2, 1, 1]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], r"f: found \[\], must be what `ray-moe plan --json` prints or a mapping"),
        ({}, "f: found {}, must be"),
        ({"plans": [PLAN, PLAN]}, "f: holds several plans; one is needed"),
        ({"layer": WHOLE}, "f: found 'layer', must be the number of a layer"),
        ({"9" * 5000: WHOLE}, "f: found '9*\\.\\.\\., must be the number of a layer"),
        ({1: WHOLE, "1": WHOLE}, "f: layer 1 is given twice"),
        ({2: WHOLE}, r"f: layer 2 expert 0: layer must be one of \[1, 3\], found 2"),
        ({1: {}}, r"f: layer 1: found {}, must be a list of \[expert, rank\]"),
        ({1: [[0, 0, 0]]}, r"f: layer 1: found \[0, 0, 0\], must be \[expert, rank\]"),
        ({1: [[True, 0]]}, r"f: layer 1: found \[True, 0\], must be \[expert, rank\]"),
        ({1: [[0, -1]]}, r"f: layer 1: found \[0, -1\], must be \[expert, rank\]"),
        ({1: [*WHOLE, [4, 0]]}, r"f: layer 1 expert 4: expert must be in \[0, 4\), found 4"),
        ({1: [*WHOLE, [0, 1]]}, r"f: layer 1 expert 0: rank must be one of \[0, 2, 5\], found 1"),
        ({1: WHOLE[1:3]}, r"f: layer 1: experts without a home: \[0, 3\]"),
        ({**PLAN, "slots_by_rank": [4]}, r"f: plans 1 ranks, the cluster has 3: \[0, 2, 5\]"),
        ({"phy2log": PLAN["phy2log"]}, "f: slots_by_rank: found None, must be a list of whole numbers"),
        ({**PLAN, "phy2log": [[0, 1, 2, 3]]}, "f: phy2log: found 1 layers, the model has 2"),
        ({**PLAN, "phy2log": 7}, "f: phy2log: found 7 layers, the model has 2"),
        ({**PLAN, "phy2log": [[0, 1, 2, 3], [0, 1]]}, r"f: phy2log\[1\]: found \[0, 1\], must be 4 experts"),
        ({**PLAN, "phy2log": [[0, 1, 2, 9]] * 2}, r"f: layer 1 expert 9: expert must be in \[0, 4\), found 9"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_naming_what(document: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        homes_in(document, "f", SEATS)


def test_replicas_are_written_out_over_the_layers_and_refused_by_name() -> None:
    assert replica_counts("*:3=2,1:3=3", SEATS) == {(1, 3): 3, (3, 3): 2}
    for text, message in (
        ("0:3=2", r"replicas: layer 0 expert 3: layer must be one of \[1, 3\], found 0"),
        ("*:4=2", r"replicas: layer 1 expert 4: expert must be in \[0, 4\), found 4"),
        ("1:0=4", r"replicas: layer 1 expert 0: count must be in \[1, 3\], as every copy needs a rank.*found 4"),
        ("1-0", "'1-0' is not LAYER:EXPERT=COUNT"),
    ):
        with pytest.raises(ConfigError, match=message):
            replica_counts(text, SEATS)


# ---- how an operation looks ----


def operation(stage: Stage, kind: Kind = Kind.REBALANCE, **fields: Any) -> dict[str, Any]:
    """A row as `--json` prints it, of an operation asked for at second 1,000."""
    given: dict[str, Any] = {"number": 3, "asked_by": "ann@host", "why": "a hot topic", "asked_at": 1000.0} | fields
    return asdict(OperationRow.of(Operation(kind=kind, stage=stage, **given)))


def drawn(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=240)
    console.print(renderable, highlight=False, markup=False)
    return console.file.getvalue()  # type: ignore[attr-defined]


def cells(renderable: RenderableType) -> list[list[str]]:
    lines = drawn(renderable).splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def test_progress_tells_stage_wave_seconds_bytes_and_the_last_failure() -> None:
    row = operation(
        Stage.FILLING,
        waves=2,
        at=1,
        moved_bytes={"checkpoint": 2_000, "peer": 1_500_000},
        reason="rank 1 slot 4: wrong digest",
    )
    line = (
        "operation 3 (rebalance): filling, wave 2/2, 4.5 s, 1.5 MB from peers, 2.0 kB from the checkpoint, "
        "rank 1 slot 4: wrong digest"
    )
    assert progress_line(row, now=1004.5) == line
    assert drawn(progress_view(row, now=1004.5)).splitlines() == [
        line,
        "waits for copies to arrive in free slots and to be verified",
    ]
    queued = operation(Stage.QUEUED, Kind.SHRINK, ranks=(2,))
    assert progress_line(queued, now=999.0) == "operation 3 (shrink of rank 2): queued, 0.0 s", "clocks may differ"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_view_that_lives_and_a_pipe_one_line_for_each_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [operation(Stage.FILLING), operation(Stage.FILLING), operation(Stage.PUBLISHING)]
    for stderr in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("TERM", "xterm")
        with watching(Output(False, io.StringIO(), stderr)) as draw:
            for row in rows:
                draw(row)
        shown = stderr.getvalue()
        if stderr.isatty():
            assert "waits for the registry to publish" in shown
        else:
            told = [re.sub(r", [\d.]+ s", "", line) for line in shown.splitlines()]
            assert told == ["operation 3 (rebalance): filling", "operation 3 (rebalance): publishing"]


def test_how_it_ended_is_one_line() -> None:
    done = operation(
        Stage.DONE,
        Kind.GROW,
        ranks=(4, 5),
        waves=1,
        ended_at=1002.0,
        moved_bytes={"peer": 64},
        pause_s=0.00123,
        first_generation=7,
        last_generation=8,
    )
    assert summary(done) == (
        "operation 3 (grow by ranks 4, 5) is done: generation 7 -> 8 in one wave, 2.0 s, 64 bytes from peers, "
        "pause 1.2 ms"
    )
    in_place = operation(Stage.DONE, reason="everything is in place already", ended_at=1000.1)
    assert summary(in_place) == "operation 3 (rebalance) is done: everything is in place already"
    failed = operation(Stage.FAILED, reason="layer 0:\nno order")
    assert summary(failed) == "operation 3 (rebalance) has failed: layer 0: no order"
    cancelled = operation(Stage.CANCELLED, reason="cancelled by bob@host: too slow")
    assert summary(cancelled) == "operation 3 (rebalance) was cancelled by bob@host: too slow"
    assert summary(operation(Stage.JOINING)) == "operation 3 (rebalance) is joining"


@pytest.mark.parametrize("stage", list(Stage))
def test_every_open_operation_waits_for_something_and_no_other_does(stage: Stage) -> None:
    row = operation(stage, Kind.SHRINK, ranks=(2,), last_generation=4)
    assert bool(waits_for(row)) is (stage not in ENDED)


def peer(rank: int, generation: int, running: int = 0, waiting: int = 0) -> dict[str, int]:
    return {"rank": rank, "generation": generation, "running": running, "waiting": waiting}


def generation(number: int, state: str, holders: tuple[str, ...] = (), until: int | None = None) -> dict[str, Any]:
    return {
        "generation": number,
        "state": state,
        "holders": holders,
        "held": until is not None,
        "held_until_step": until,
    }


STATUS: dict[str, Any] = {
    "operations": [],
    "peers": [peer(0, 4), peer(1, 3, running=2, waiting=1), peer(2, 3)],
    "generations": [
        generation(2, "RETIRED"),
        generation(3, "DRAINING", ("rank-2", "rank-1"), until=41),
        generation(4, "ACTIVE", ("rank-0",)),
    ],
}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (operation(Stage.PREPARING, Kind.GROW, ranks=(3, 4)), "ranks 3, 4 to start and to load"),
        (operation(Stage.MOVING, Kind.SHRINK, ranks=(1,)), "open requests to go to other ranks: 3 of rank 1"),
        (operation(Stage.SWITCHING, last_generation=4), "ranks 1, 2 to take generation 4 at one agreed step"),
        (
            operation(Stage.DRAINING),
            "generation 3 to retire (held by rank-1, rank-2, held until step 41)",
        ),
        (operation(Stage.QUEUED), "generation 3 to retire (held by rank-1, rank-2, held until step 41)"),
        (operation(Stage.ENDING, Kind.SHRINK, ranks=(1,)), "rank 1 to end"),
    ],
    ids=lambda case: case["stage"] if isinstance(case, dict) else "",
)
def test_status_says_what_an_operation_waits_for(row: dict[str, Any], text: str) -> None:
    assert waits_for(row, STATUS) == text


def test_one_that_is_queued_waits_for_the_one_that_changes_the_placement_then_for_those_asked_for_before() -> None:
    changing = operation(Stage.SWITCHING, number=1)
    before, after = operation(Stage.QUEUED, number=2), operation(Stage.QUEUED, number=4)
    mine = operation(Stage.QUEUED)
    settled: dict[str, Any] = {"generations": [], "peers": []}
    waits = [
        waits_for(mine, {**settled, "operations": others})
        for others in ([changing, before, mine], [before, mine, after], [mine, after])
    ]
    assert waits == [
        "operation 1 (rebalance), which is switching",
        "operation 2 (rebalance), which was asked for before",
        "its turn",
    ]


def test_status_lists_what_is_under_way() -> None:
    row = operation(Stage.SWITCHING, Kind.SHRINK, ranks=(2,), waves=1, last_generation=4, moved_bytes={"peer": 64})
    (line,) = cells(operations_table({**STATUS, "operations": [row]}))
    assert line[:5] == ["3", "shrink of rank 2", "switching", "1/1", "ann@host"]
    assert line[6:] == ["64 bytes from peers", "ranks 1, 2 to take generation 4 at one agreed step", ""]


def test_history_tells_who_when_why_what_it_took_and_how_it_ended() -> None:
    done = operation(
        Stage.DONE,
        Kind.SHRINK,
        ranks=(1, 2),
        waves=2,
        ended_at=1012.34,
        first_generation=3,
        last_generation=5,
        moved_bytes={"peer": 4_000, "checkpoint": 64},
        pause_s=0.0021,
    )
    failed = operation(Stage.FAILED, number=4, ended_at=1001.0, first_generation=5, reason="rank 3 died")
    lines = cells(history_table([done, failed, operation(Stage.QUEUED, number=5)]))
    whens = [line.pop(4) for line in lines]
    assert lines == [
        [
            *("3", "shrink", "1, 2", "ann@host", "a hot topic", "3 -> 5"),
            *("4.0 kB from peers, 64 bytes from the checkpoint", "12.3", "2.1", "done"),
        ],
        ["4", "rebalance", "", "ann@host", "a hot topic", "5", "", "1.0", "", "failed rank 3 died"],
        ["5", "rebalance", "", "ann@host", "a hot topic", "", "", "", "", "queued"],
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", when) for when in whens)


def test_what_somebody_typed_commands_no_terminal() -> None:
    row = operation(Stage.FAILED, why="a\x1b[2J\nb [red]c", reason="d\x07\x9be", ended_at=1001.0)
    (line,) = cells(history_table([row]))
    assert line[5] == "a [2J b [red]c"
    assert line[-1] == "failed d e"


def test_a_preview_tells_waves_sources_memory_and_slots_by_layer() -> None:
    serving = placement(((0, 0), (1, 0), (2, 1), (3, 1)), spec_of((0, 1)), generation=3)
    storage = Storage(3, 0, 1000)
    shown = drawn(render_preview(json.loads(json.dumps(asdict(preview(ByCounts({(0, 0): 2}), serving, storage))))))
    lines = [" ".join(line.replace("│", " ").split()) for line in shown.splitlines()]
    assert lines[:2] == ["from generation 3 in one wave", "resident 4.0 kB, at the most 5.0 kB, in the end 5.0 kB"]
    assert {"keep 4 0 bytes", "same node 1 1.0 kB", "0 5 1 0", "balance: the demand is not known"} <= set(lines)
    loads = preview(ByCounts({(0, 0): 2}), serving, storage, loads_LE=_loads())
    assert ["0", "5", "1", "0", "1.600", "1.000"] in cells(render_preview(asdict(loads)))
    same = preview(ByHomes({0: ((0, 0), (1, 0), (2, 1), (3, 1))}), serving, storage)
    assert drawn(render_preview(asdict(same))).startswith("from generation 3 everything is in place: nothing moves")


def _loads() -> Any:
    import numpy as np

    return np.array([[6.0, 2.0, 1.0, 1.0]])
