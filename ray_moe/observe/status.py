"""The status of a cluster as tables for a terminal.

Takes the document that `ray-moe status --json` prints (`dataclasses.asdict` of a `ClusterStatus`), so that what people
and programs see cannot differ, and a saved document can be shown again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ray_moe.observe.operations import operations_table

_STYLES = {
    "serving": "green",
    "ACTIVE": "green",
    "degraded": "bold red",
    "DRAINING": "yellow",
    "failed": "bold red",
    "broken": "bold red",
    "stopped": "dim",
    "RETIRED": "dim",
}


def render_status(status: Mapping[str, Any]) -> RenderableType:
    """Headline, peers, slots, generations, operations under way; a lost rank is a row of its own."""
    return Group(
        _headline(status),
        peers_table(status["peers"], status["lost"]),
        exchange_table(status["peers"]),
        slots_table(status["slots"], status["lost"]),
        generations_table(status["generations"]),
        *((operations_table(status),) if status["operations"] else ()),
    )


def _headline(status: Mapping[str, Any]) -> Text:
    line = Text.assemble((status["name"], "bold"), " is ", _state(status["state"]), f"  {status['model']}")
    line.append(f"\nrelease {status['release_id']}, generation {status['generation']}, epoch {status['epoch']}, ")
    line.append(
        f"replicas by {status['policy']}, payload {status['payload']}, gate at {status['gate_location']}", "dim"
    )
    if status["contract"]:
        line.append(f", contract {status['contract']}", "dim")
    prefill, decode = status["backends"]["prefill"], status["backends"]["decode"]
    phases = {"prefill and decode": prefill} if prefill == decode else {"prefill": prefill, "decode": decode}
    for phase, backend in phases.items():
        line.append(f"\n{phase}: {backend}", "dim")
    if alone := sum(peer["local"] for peer in status["peers"]):
        line.append(f"\n{alone:,} layer invocations on one device alone", "dim")
    for reason in sorted({reason for peer in status["peers"] for reason in peer["torch_runners"]}):
        line.append(f"\nexperts are computed by torch, not by kernels: {reason}", "yellow")
    return line


def peers_table(peers: Iterable[Mapping[str, Any]], lost: Iterable[int]) -> Table:
    """One row per rank: what it is doing, and its exact totals since it started."""
    table = _table("peers")
    for heading in ("rank", "state", "generation", "running", "waiting", "tokens out", "KV blocks"):
        table.add_column(heading, justify="left" if heading == "state" else "right")
    table.add_column("steps", justify="right")
    rows: dict[int, tuple[RenderableType, ...]] = {rank: (str(rank), Text("lost", "bold red")) for rank in lost}
    for peer in peers:
        state = _state(peer["state"])
        if peer["failure"]:
            state.append(f" {peer['failure']}", style="red")
        rows[peer["rank"]] = (
            str(peer["rank"]),
            state,
            str(peer["generation"]),
            str(peer["running"]),
            str(peer["waiting"]),
            str(peer["tokens_emitted"]),
            f"{peer['kv_blocks_used']}/{peer['kv_blocks_total']}",
            f"{peer['steps_worked']}/{peer['steps_agreed']}",
        )
    for _, row in sorted(rows.items()):
        table.add_row(*row)
    return table


def exchange_table(peers: Iterable[Mapping[str, Any]]) -> Table:
    """What crossed between peers: rows by whether they left their peer, bytes as the groups counted them; what became
    of decode units; and, of audited tokens, how many ranks and nodes one of them reaches."""
    table = _table("exchange")
    for heading in ("rank", "rows local", "rows sent", "rows received", "bytes sent", "bytes received"):
        table.add_column(heading, justify="right")
    table.add_column("live, most", justify="right")
    table.add_column("decode replayed", justify="right")
    table.add_column("fell back")
    table.add_column("ranks, nodes a token", justify="right")
    for peer in peers:
        tokens = peer["fan_out"].get("tokens", 0)
        reached = ", ".join(f"{peer['fan_out'][what] / tokens:.2f}" for what in ("ranks", "nodes")) if tokens else ""
        table.add_row(
            str(peer["rank"]),
            str(peer["rows_local"]),
            str(peer["rows_sent"]),
            str(peer["rows_received"]),
            decimal(peer["bytes_sent"]),
            decimal(peer["bytes_received"]),
            decimal(peer["peak_live_bytes"]),
            str(peer["replays"]),
            ", ".join(f"{reason} {count}" for reason, count in sorted(peer["fallbacks"].items())),
            reached,
        )
    return table


def slots_table(slots: Iterable[Mapping[str, Any]], lost: Iterable[int] = ()) -> Table:
    """Logical experts by layer and rank. An expert that has other copies is marked with their number: 3x2."""
    slots = list(slots)
    copies = Counter((slot["layer"], slot["expert"]) for slot in slots)
    ranks = sorted({slot["rank"] for slot in slots})
    held: dict[tuple[int, int], list[int]] = {}
    for slot in slots:
        held.setdefault((slot["layer"], slot["rank"]), []).append(slot["expert"])
    table = _table("slots (3x2: two copies of expert 3)")
    table.add_column("layer", justify="right")
    for rank in ranks:
        table.add_column(f"rank {rank}", style="red" if rank in lost else "")
    table.add_column("replicas", justify="right")
    for layer in sorted({slot["layer"] for slot in slots}):
        extra = sum(count - 1 for (at, _), count in copies.items() if at == layer)
        cells = (_experts(layer, sorted(held.get((layer, rank), ())), copies) for rank in ranks)
        table.add_row(str(layer), *cells, str(extra))
    return table


def generations_table(generations: Iterable[Mapping[str, Any]]) -> Table:
    """One row per generation that the registry remembers: its state, and who still refers to it."""
    table = _table("generations")
    for heading in ("generation", "version", "state", "references", "holders", "held until step"):
        table.add_column(heading, justify="right" if heading in ("generation", "references") else "left")
    for row in generations:
        until = row["held_until_step"]
        held = ("the next report" if until is None else str(until)) if row["held"] else ""
        table.add_row(
            str(row["generation"]),
            row["version"],
            _state(row["state"]),
            str(row["references"]),
            ", ".join(sorted(row["holders"])),
            held,
        )
    return table


def _experts(layer: int, experts: list[int], copies: Mapping[tuple[int, int], int]) -> str:
    """`0-2 3x2 5`: neighbours without other copies are drawn together."""
    parts: list[str] = []
    run: list[int] = []
    for expert in experts:
        single = copies[layer, expert] == 1
        if run and (not single or expert != run[-1] + 1):
            parts.append(_run(run))
            run = []
        if single:
            run.append(expert)
        else:
            parts.append(f"{expert}x{copies[layer, expert]}")
    return " ".join([*parts, *([_run(run)] if run else [])])


def _run(experts: list[int]) -> str:
    return str(experts[0]) if len(experts) == 1 else f"{experts[0]}-{experts[-1]}"


# An engine that sleeps has nothing to do and wakes with the next request.
_WORDS = {"sleeping": "idle"}


def _state(state: str) -> Text:
    return Text(_WORDS.get(state, state), style=_STYLES.get(state, ""))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="bold")
