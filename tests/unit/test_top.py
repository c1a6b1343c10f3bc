"""`ray-moe top` and `history` from documents: what is drawn, what is told as it happens, each thing once."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from ray_moe.cli.history import news
from ray_moe.cli.main import run
from ray_moe.cli.output import Output
from ray_moe.cli.top import _Screen, looks
from ray_moe.controlplane.operation_row import OperationRow
from ray_moe.controlplane.operations import Kind, Operation, Stage
from ray_moe.errors import DeadlineError, NotServingError
from ray_moe.observe.live import (
    FREE,
    BalanceView,
    GenerationView,
    Headline,
    Known,
    LiveView,
    LoadsView,
    OperationView,
    PlacementView,
    RankView,
    StepsView,
    SwitchView,
)
from ray_moe.observe.operations import edge_line, edges, stages_table
from ray_moe.observe.survival import FailureView, Outcome
from ray_moe.observe.survival import Kind as FailureKind
from ray_moe.observe.top import RANKS_SHOWN, render_top

HEAD = Headline("c", "serving", "", "tiny", "c-1", 5, 2, "tcp", "all_to_all_v", "grouped", "token_hash", 3, 4, "")
PLACEMENT = PlacementView(
    5, "v5", 2, (1, 3), (0, 2), ("n", "n"), 4,
    slots_RLC=(((0, 1, FREE), (0, 1, 2)), ((2, 3, 0), (2, 3, FREE))),
)  # fmt: skip
LOADS = LoadsView(0, 64, "steps", ((70.0, 10.0, 10.0, 10.0), (25.0, 25.0, 25.0, 25.0)))


def view_of(**changes: Any) -> LiveView:
    ranks = (
        RankView(0, "node-a", "serving", running=3, waiting=2, outstanding_tokens=50, tokens_emitted=1000,
                 rows_local=60, rows_sent=40, kv_blocks_used=16, kv_blocks_total=64, seconds_worked=10.0,
                 seconds_agreeing=1.0, seen_at=100.0, resident_bytes=2_000_000),
        RankView(2, "node-a", "sleeping", seen_at=100.0),
    )  # fmt: skip
    made = LiveView(
        at=100.0,
        headline=HEAD,
        ranks=ranks,
        steps=(StepsView(0, 7, (99.0, 99.5), (0.010, 0.030)),),
        switches=(),
        generations=(),
        operations=(),
        releases=(),
        balance=BalanceView((1.0, 1.75), (0.7, 0.3)),
        loads=LOADS,
        placement=PLACEMENT,
        survival=(),
        known=Known(),
    )
    return replace(made, **changes)


def text_of(drawn: RenderableType, width: int = 220) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(drawn)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def row_of(text: str, beginning: str) -> str:
    (line,) = [line for line in text.splitlines() if line.strip("│ ").startswith(beginning)]
    return line


# -- top


def test_a_screen_says_who_is_busy_and_how_long_steps_take() -> None:
    text = text_of(render_top(view_of()))
    assert "c is serving  tiny, release c-1, generation 5, epoch 2" in text
    assert "3 requests run, 2 wait" in text
    busy = [cell.strip() for cell in row_of(text, "0 ").strip("│").split("│")]
    assert busy == ["0", "serving", "3", "2", "", "20.0", "30.0", "10%", "40%", "1.40x", "25%", "2.0 MB", "node-a"]
    assert "idle" in row_of(text, "2 ")


def test_rates_are_of_what_happened_between_two_looks() -> None:
    before = view_of(at=98.0)
    after = view_of(ranks=(replace(before.ranks[0], tokens_emitted=1500), before.ranks[1]))
    text = text_of(render_top(after, before))
    assert "250 tokens/s" in text
    assert "250" in row_of(text, "0 ")
    assert "tokens/s" not in text_of(render_top(after)).splitlines()[1]


def test_the_hottest_experts_come_first_with_their_copies() -> None:
    text = text_of(render_top(view_of()))
    hottest = next(line for line in text.splitlines() if "70.0%" in line)
    cells = [cell.strip() for cell in hottest.strip("│").split("│")]
    assert (cells[0], cells[1], cells[2], cells[4], cells[5], cells[6]) == ("1", "0", "70.0%", "2.8", "2", "0, 2")
    assert "worst: layer 3, busiest rank 1.75x the mean" in text


def test_what_changes_and_what_it_waits_for_is_said() -> None:
    opened = OperationView(
        4,
        "grow",
        "joining",
        (3,),
        "me",
        "more",
        90.0,
        95.0,
        0.0,
        1,
        2,
        5,
        0,
        {"peer": 1_500_000},
        0.0,
        "",
        waits_for="everybody to join",
    )
    ended = replace(
        opened, number=3, kind="rebalance", stage="failed", ended_at=80.0, asked_at=70.0, reason="no room", waits_for=""
    )
    switches = tuple(SwitchView(rank, 5, 2, 640, 60.0 + rank, 0.004 * (rank + 1)) for rank in (0, 2))
    draining = GenerationView(4, "v4", "DRAINING", 1, ("rank-2",), False, None)
    text = text_of(
        render_top(view_of(operations=(ended, opened), switches=switches, generations=(draining,))), width=250
    )
    assert all(
        part in text
        for part in ("operation 4 (grow by rank 3)", "joining 1/2", "1.5 MB from peers", "everybody to join")
    )
    assert all(part in text for part in ("operation 3 (rebalance", "failed", "no room"))
    assert "generation 4 drains: 1 leases, of rank-2" in text
    assert "generation 5 was taken by 2 ranks 38 s ago, at step 640; it added 12.0 ms" in text


def test_what_is_wrong_is_said_first_and_texts_cannot_command_the_terminal() -> None:
    head = replace(HEAD, state="degraded", failure="rank 1 \x1b[2Jdied\nbadly")
    lost = RankView(1, "node-b", "lost", detail="rank 1 died")
    silent = replace(view_of().ranks[0], seen_at=90.0)
    text = text_of(render_top(view_of(headline=head, ranks=(silent, lost)), trouble="9 s old"))
    assert text.splitlines()[0].startswith("not up to date: 9 s old")
    assert "\x1b[2J" not in text
    assert "rank 1 [2Jdied badly" in text
    assert "silent for 10 s" in text
    assert "lost rank 1 died" in text


def test_a_joining_rank_says_how_far_it_is() -> None:
    joining = RankView(3, "node-b", "joining", loading=("experts", 12, 64))
    assert "joining experts 12/64" in text_of(render_top(view_of(ranks=(joining,))))


@pytest.mark.parametrize(
    ("outcome", "only_here", "said"),
    [
        (Outcome.TOO_SMALL, 3, "would need another rank to come back: the loss of rank 2"),
        (Outcome.RESTART, 3, "would come back from the checkpoint, in part: the loss of rank 2 (3 experts)"),
        (Outcome.RESTART, 0, "every expert has a copy on another rank"),
    ],
)
def test_which_single_loss_would_hurt_is_one_line(outcome: Outcome, only_here: int, said: str) -> None:
    failure = FailureView(FailureKind.RANK, "rank 2", (2,), outcome, "", "", only_here=only_here)
    assert said in text_of(render_top(view_of(survival=(failure,))))


def test_of_many_ranks_the_busiest_and_the_broken_are_shown() -> None:
    ranks = [RankView(rank, "n", "serving", outstanding_tokens=rank) for rank in range(60)]
    ranks[1] = RankView(1, "n", "lost")
    text = text_of(render_top(view_of(ranks=tuple(ranks), balance=None)))
    rows = [[cell.strip() for cell in line.split("│")[1:]] for line in text.splitlines() if line.startswith("│")]
    shown = [int(row[0]) for row in rows if row[1] in ("serving", "lost")]
    assert shown == [1, *range(60 - RANKS_SHOWN + 1, 60)]
    assert f"and {60 - RANKS_SHOWN} ranks that are less busy" in text


def test_a_cluster_that_has_just_begun_is_drawn_too() -> None:
    bare = view_of(placement=None, loads=None, balance=None, steps=(), ranks=())
    assert "0 requests run, 0 wait" in text_of(render_top(bare))


def test_looks_ask_for_what_is_new_and_stay_with_the_last_one_when_nobody_answers() -> None:
    answers: list[LiveView | Exception] = [
        view_of(known=Known(generation=5)),
        DeadlineError("live of cluster 'c'", 15),
        view_of(at=101.0, placement=None, loads=None, known=Known(generation=5)),
    ]
    asked: list[Known | None] = []

    def ask(known: Known | None) -> LiveView:
        asked.append(known)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = looks(ask, 0.0)
    first, silent, second = next(found), next(found), next(found)
    assert asked == [None, Known(generation=5), Known(generation=5)]
    assert (first[0].at, first[1], first[2]) == (100.0, None, "")
    assert silent[0] is first[0]
    assert "live of cluster 'c'" in silent[2]
    assert (second[0].at, second[0].placement, second[1]) == (101.0, PLACEMENT, first[0])


def test_a_cluster_that_is_gone_ends_top() -> None:
    def ask(_: Known | None) -> LiveView:
        raise NotServingError("the controller of cluster 'c' is gone")

    with pytest.raises(NotServingError):
        next(looks(ask, 0.0))


def test_without_a_terminal_every_look_is_printed_below_the_last() -> None:
    stdout = io.StringIO()
    out, screen = Output(False, stdout, io.StringIO()), _Screen()
    with out.screen(screen) as draw:
        draw()
        screen.look, screen.looked_at = (view_of(), None, ""), float("inf")
        draw()
    assert stdout.getvalue().startswith("asking the cluster\nc is serving")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["top", "--every", "0"], "--every must be in [0.1, 3600] s, found 0"),
        (["top", "--every", "nan"], "--every must be in [0.1, 3600] s, found nan"),
        (["top", "--every", "inf"], "--every must be in [0.1, 3600] s, found inf"),
        (["history", "--watch", "--last", "3"], "give one of them"),
        (["trace", "--chrome", "/nowhere/x.json"], "/nowhere is no folder"),
        (["trace", "--chrome", "x.json", "--seconds", "0"], "--seconds must be in (0, 3600], found 0"),
        (["trace", "--chrome", "x.json", "--seconds", "nan"], "--seconds must be in (0, 3600], found nan"),
        (["trace", "--chrome", "x.json", "--seconds", "inf"], "--seconds must be in (0, 3600], found inf"),
        (["trace"], "Missing option '--chrome'"),
    ],
)
def test_what_is_asked_wrongly_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


# -- history


def done() -> Operation:
    asked = Operation(3, Kind.REBALANCE, "me@here", "hot experts", 100.0, Stage.QUEUED)
    filling = replace(asked, waves=1, first_generation=4).take("enter", 100.5)
    switching = replace(filling.take("publish", 102.0), last_generation=5).take("published", 102.25)
    return replace(switching, moved_bytes={"peer": 2_000_000}, pause_s=0.003).take("done", 102.5)


def test_the_edges_of_an_operation_say_how_long_each_stage_lasted() -> None:
    found = edges(asdict(OperationRow.of(done())))
    assert [(edge["from"], edge["to"], edge["after_s"]) for edge in found] == [
        ("queued", "filling", 0.5),
        ("filling", "publishing", 1.5),
        ("publishing", "switching", 0.25),
        ("switching", "done", 0.25),
    ]


def test_of_an_operation_whose_first_edges_are_forgotten_the_rest_is_told() -> None:
    row = asdict(OperationRow.of(done()))
    row["trail"] = row["trail"][2:]
    first, second = edges(row)
    assert (first["from"], first["to"], first["after_s"]) == ("", "switching", None)
    assert (second["from"], second["after_s"]) == ("switching", 0.25)


def test_one_operation_is_shown_stage_by_stage() -> None:
    text = text_of(stages_table(asdict(OperationRow.of(done())), 200.0))
    assert "operation 3 (rebalance) is done" in text
    assert "asked by me@here: hot experts" in text
    stages = [line.strip("│ ").split()[0] for line in text.splitlines() if line.startswith("│")]
    assert stages == ["queued", "filling", "publishing", "switching", "done"]
    assert "1.500" in row_of(text, "filling")


def test_the_last_edge_of_an_operation_says_what_it_took() -> None:
    row = asdict(OperationRow.of(done()))
    line = edge_line(row, edges(row)[-1])
    assert "operation 3 (rebalance): switching -> done, after 0.25 s, 2.0 MB from peers, pause 3.0 ms" in line


def test_every_edge_is_told_once_and_those_of_before_are_not() -> None:
    whole = asdict(OperationRow.of(done()))
    half = whole | {"trail": whole["trail"][:2], "stage": Stage.PUBLISHING}
    other = whole | {"number": 4, "asked_at": 101.0}
    states: Iterator[list[dict[str, Any]] | None] = iter([[half], None, [half], [whole, other], [whole, other]])

    def rows() -> list[dict[str, Any]]:
        found = next(states, None)
        if found is None:
            raise DeadlineError("history of cluster 'c'", 60)
        return found

    looks_left = iter(range(4))

    def rest() -> None:
        if next(looks_left, None) is None:
            raise KeyboardInterrupt

    found: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(news(rows, rest))
    told = [(edge["operation"], edge["to"]) for _, edge in found]
    expected = [(4, "filling"), (4, "publishing"), (3, "switching"), (4, "switching"), (3, "done"), (4, "done")]
    assert sorted(told) == sorted(expected)
    assert [edge for edge in told if edge[0] == 3] == [(3, "switching"), (3, "done")]
