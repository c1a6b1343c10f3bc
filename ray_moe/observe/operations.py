"""Operations for people: how far one is and what it waits for, the history, what a rebalance would take.

Takes documents as `ray-moe ... --json` prints them: `dataclasses.asdict` of an `OperationRow`, of a `ClusterStatus` and
of a `Preview`. Texts that people have typed are shown on one line, without control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ray_moe.controlplane.operations import CHANGING, ENDED, Kind, Stage

_STYLES = {Stage.DONE: "green", Stage.FAILED: "bold red", Stage.CANCELLED: "yellow", Stage.UNDOING: "yellow"}
_SOURCES = {"peer": "peers", "checkpoint": "the checkpoint"}
# Where nothing has been published yet that an operation could still be undone to.
_ELSEWHERE: Mapping[str, Any] = {"operations": (), "generations": (), "peers": ()}

Row = Mapping[str, Any]

# -- One operation


def title(row: Row) -> str:
    """`operation 3 (shrink of rank 2)`."""
    return f"operation {row['number']} ({_kind(row)})"


def progress_line(row: Row, now: float) -> str:
    """Stage, wave, seconds, bytes and, after a failure, its reason, on one line. `now` is the wall clock's time."""
    parts = [
        f"{title(row)}: {row['stage']}",
        _wave(row),
        f"{_seconds(row, now):.1f} s",
        moved(row),
        plain(row["reason"]),
    ]
    return ", ".join(part for part in parts if part)


def progress_view(row: Row, now: float) -> RenderableType:
    """The same of an open operation as a live view draws it, with what it waits for."""
    return Group(Text(progress_line(row, now)), Text(f"waits for {waits_for(row)}", style="dim"))


def summary(row: Row) -> str:
    """How an operation ended, or how far it is: one line."""
    if row["stage"] not in ENDED:
        return f"{title(row)} is {row['stage']}"
    if row["stage"] == Stage.CANCELLED:
        return f"{title(row)} was {plain(row['reason'])}"  # the reason says by whom
    if row["stage"] == Stage.FAILED:
        return f"{title(row)} has failed: {plain(row['reason'])}"
    if not row["waves"]:
        return f"{title(row)} is done: {plain(row['reason']) or 'nothing had to change'}"
    waves = "one wave" if row["waves"] == 1 else f"{row['waves']} waves"
    took = _seconds(row, row["ended_at"])
    parts = [f"generation {_generations(row)} in {waves}", f"{took:.1f} s", moved(row), f"pause {_pause(row)} ms"]
    return f"{title(row)} is done: {', '.join(part for part in parts if part)}"


def moved(row: Row) -> str:
    """`1.2 MB from peers, 3.4 MB from the checkpoint`; empty where nothing was moved."""
    amounts = sorted(row["moved_bytes"].items(), reverse=True)
    return ", ".join(f"{decimal(nbytes)} from {_SOURCES.get(source, source)}" for source, nbytes in amounts if nbytes)


def edges(row: Row) -> list[Row]:
    """The edges that it took as documents: stage before and after, the event, the wave, when, and after how many
    seconds in the stage before. Of one whose first edges are forgotten the first has no stage before."""
    found: list[Row] = []
    number, stage, since = 0, "preparing" if row["kind"] == Kind.GROW else "queued", row["asked_at"]
    for edge in row.get("trail", ()):
        known = edge["number"] == number + 1
        lasted = max(0.0, edge["at"] - since) if known else None
        place = {"operation": row["number"], "kind": row["kind"], "number": edge["number"], "wave": edge["wave"]}
        taken = {"from": stage if known else "", "to": str(edge["stage"]), "by": edge["event"]}
        found.append({**place, **taken, "at": edge["at"], "after_s": lasted})
        number, stage, since = edge["number"], str(edge["stage"]), edge["at"]
    return found


def edge_line(row: Row, edge: Row) -> str:
    """`12:30:01.250 operation 3 (rebalance): filling -> publishing, after 1.20 s, wave 1/2`, and how it ended."""
    clock = datetime.fromtimestamp(edge["at"]).isoformat(sep=" ", timespec="milliseconds")[11:]
    parts = [f"{clock} {title(row)}: {edge['from'] or '...'} -> {edge['to']}"]
    if edge["after_s"] is not None:
        parts.append(f"after {edge['after_s']:.2f} s")
    if row["waves"] > 1 and edge["wave"]:
        parts.append(f"wave {edge['wave']}/{row['waves']}")
    if edge["to"] in ENDED:
        parts += [moved(row), f"pause {_pause(row)} ms" if row["to_generation"] else "", plain(row["reason"])]
    return ", ".join(part for part in parts if part)


def stages_table(row: Row, now: float) -> RenderableType:
    """One operation from its first stage to its last: when each began, how long it lasted, and what ended it."""
    table = _table("stages")
    for heading in ("stage", "began", "seconds", "wave", "ended by"):
        table.add_column(heading, justify="right" if heading in ("seconds", "wave") else "left")
    taken, since = edges(row), row["asked_at"]
    for edge in taken:
        lasted = "" if edge["after_s"] is None else f"{edge['after_s']:.3f}"
        began = "" if edge["after_s"] is None else _clock(since)
        table.add_row(_stage(edge["from"]) if edge["from"] else Text("..."), began, lasted, _of(edge), edge["by"])
        since = edge["at"]
    last = taken[-1]["to"] if taken else row["stage"]
    open_for = "" if row["stage"] in ENDED else f"{max(0.0, now - since):.3f}"
    table.add_row(_stage(last), _clock(since), open_for, "", "")
    return Group(Text(f"{summary(row)}; asked by {plain(row['asked_by'])}: {plain(row['why'])}"), table)


def _of(edge: Row) -> str:
    return str(edge["wave"]) if edge["wave"] else ""


# -- What it waits for


def waits_for(row: Row, status: Row = _ELSEWHERE) -> str:
    """What an open operation waits for, as far as `status` tells; empty once it has ended."""
    if row["stage"] in ENDED:
        return ""
    return _WAITS[Stage(row["stage"])](row, status)


def _for_its_turn(row: Row, status: Row) -> str:
    others = [other for other in status["operations"] if other["number"] != row["number"]]
    for other in others:
        if other["stage"] in CHANGING:
            return f"{title(other)}, which is {other['stage']}"
    for other in others:
        if other["stage"] == Stage.QUEUED and other["number"] < row["number"]:
            return f"{title(other)}, which was asked for before"
    return _for_old_generations(row, status) if _draining(status) else "its turn"


def _for_old_generations(row: Row, status: Row) -> str:
    """Between two waves, or before the first: who keeps the generation before from retiring."""
    rows = _draining(status)
    if not rows:
        return "the generation before to retire and its slots to be freed"
    return ", ".join(f"generation {one['generation']} to retire ({keeps(one)})" for one in rows)


def keeps(generation: Row) -> str:
    """What keeps a generation from retiring: the holders of its leases, or the step that ends its hold."""
    reasons = []
    if generation["holders"]:
        reasons.append(f"held by {', '.join(sorted(generation['holders']))}")
    if generation["held"]:
        until = generation["held_until_step"]
        reasons.append(f"held until {'the next report' if until is None else f'step {until}'}")
    return ", ".join(reasons) or "nobody holds it any more"


def _for_requests(row: Row, status: Row) -> str:
    open_still = [
        f"{peer['running'] + peer['waiting']} of rank {peer['rank']}"
        for peer in status["peers"]
        if peer["rank"] in row["ranks"] and peer["running"] + peer["waiting"]
    ]
    return f"open requests to go to other ranks{': ' * bool(open_still)}{', '.join(open_still)}"


def _for_the_step(row: Row, status: Row) -> str:
    generation = row["to_generation"]
    late = [peer["rank"] for peer in status["peers"] if peer["generation"] < generation]
    who = _ranks(late) if late else "every rank"
    return f"{who} to take generation {generation} at one agreed step"


def _draining(status: Row) -> list[Row]:
    return [one for one in status["generations"] if one["state"] == "DRAINING"]


_WAITS: dict[Stage, Callable[[Row, Row], str]] = {
    Stage.PREPARING: lambda row, _: f"{_ranks(row['ranks'])} to start and to load",
    Stage.QUEUED: _for_its_turn,
    Stage.FILLING: lambda row, _: "copies to arrive in free slots and to be verified",
    Stage.JOINING: lambda row, _: "every member of the next epoch to join its group",
    Stage.MOVING: _for_requests,
    Stage.PUBLISHING: lambda row, _: "the registry to publish",
    Stage.SWITCHING: _for_the_step,
    Stage.DRAINING: _for_old_generations,
    Stage.ENDING: lambda row, _: f"{_ranks(row['ranks'])} to end",
    Stage.UNDOING: lambda row, _: "what was begun to be given back",
}


# -- Tables


def operations_table(status: Row) -> Table:
    """What is under way in a cluster's status."""
    table = _table("operations")
    for heading in ("number", "what", "stage", "wave", "asked by", "asked at", "moved", "waits for", "reason"):
        table.add_column(heading, justify="right" if heading == "number" else "left")
    for row in status["operations"]:
        table.add_row(
            str(row["number"]),
            _kind(row),
            _stage(row["stage"]),
            _wave(row).removeprefix("wave "),
            plain(row["asked_by"]),
            _clock(row["asked_at"]),
            moved(row),
            waits_for(row, status),
            plain(row["reason"]),
        )
    return table


def history_table(rows: Iterable[Row]) -> Table:
    """Who asked for what, when and why, what it took, and how it ended; the newest last."""
    table = _table("history")
    right = ("number", "seconds", "pause ms")
    headings = (
        "number",
        "kind",
        "ranks",
        "who",
        "when",
        "why",
        "generations",
        "moved",
        "seconds",
        "pause ms",
        "outcome",
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    for row in rows:
        outcome = _stage(row["stage"])
        if row["reason"]:
            outcome.append(f" {plain(row['reason'])}", style="default")
        table.add_row(
            str(row["number"]),
            row["kind"],
            ", ".join(map(str, row["ranks"])),
            plain(row["asked_by"]),
            _clock(row["asked_at"]),
            plain(row["why"]),
            _generations(row),
            moved(row),
            f"{_seconds(row, row['ended_at']):.1f}" if row["ended_at"] else "",
            _pause(row) if row["to_generation"] else "",
            outcome,
        )
    return table


def render_preview(preview: Row) -> RenderableType:
    """What a rebalance would take."""
    waves = {0: "everything is in place: nothing moves", 1: "in one wave"}.get(
        preview["waves"], f"in {preview['waves']} waves, each a generation of its own"
    )
    copies = _table("copies by source")
    for heading in ("class", "copies", "payload"):
        copies.add_column(heading, justify="left" if heading == "class" else "right")
    for kind, count in preview["copies"].items():
        copies.add_row(kind.replace("_", " "), str(count), decimal(preview["payload_bytes"][kind]))
    layers = _table("layers")
    known = any(layer["balance_before"] is not None for layer in preview["layers"])
    for heading in ("layer", "slots", "filled anew", "freed", *(("max/mean before", "after") if known else ())):
        layers.add_column(heading, justify="right")
    for layer in preview["layers"]:
        balance = (f"{layer['balance_before']:.3f}", f"{layer['balance_after']:.3f}") if known else ()
        layers.add_row(*(str(layer[field]) for field in ("layer", "slots", "moved", "freed")), *balance)
    resident, peak, target = (decimal(preview[f"{which}resident_bytes"]) for which in ("", "peak_", "target_"))
    return Group(
        Text(f"from generation {preview['generation']} {waves}"),
        Text(f"resident {resident}, at the most {peak}, in the end {target}"),
        copies,
        layers,
        *(() if known else (Text("balance: the demand is not known", style="dim"),)),
    )


# -- Details


def plain(text: str) -> str:
    """On one line, without what a terminal would obey."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def _kind(row: Row) -> str:
    if row["kind"] == Kind.REBALANCE:
        return str(row["kind"])
    return f"{row['kind']} {'by' if row['kind'] == Kind.GROW else 'of'} {_ranks(row['ranks'])}"


def _ranks(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _wave(row: Row) -> str:
    return f"wave {row['wave']}/{row['waves']}" if row["waves"] else ""


def _generations(row: Row) -> str:
    """`3 -> 5`; `3` where nothing was published, nothing where it never began."""
    if not row["from_generation"]:
        return ""
    return (
        f"{row['from_generation']} -> {row['to_generation']}" if row["to_generation"] else str(row["from_generation"])
    )


def _pause(row: Row) -> str:
    return f"{row['pause_s'] * 1e3:.1f}"


def _seconds(row: Row, now: float) -> float:
    """Since it was asked for. Two machines' clocks may differ: never less than 0."""
    return max(0.0, float((row["ended_at"] or now) - row["asked_at"]))


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _stage(stage: str) -> Text:
    return Text(stage, style=_STYLES.get(Stage(stage), ""))


def _table(name: str) -> Table:
    return Table(title=name, title_justify="left", header_style="bold")
