"""The ledgers of one audited invocation, as a table: five kinds of numbers that are never added up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text


def render_ledger(rank: int, ledger: Mapping[str, Any]) -> RenderableType:
    """Takes one layer's document of `Cluster.ledgers` (`InvocationLedger.document`)."""
    scope = (
        f"layer {ledger['layer']}, step {ledger['step']}, {ledger['unit']} unit{' replayed' * ledger['replayed']}, "
        f"generation {ledger['generation']}, epoch {ledger['epoch']}, as rank {rank} accounts for it"
    )
    way = f"{ledger['transport']} + {ledger['runner']} + {ledger['strategy']}, payload {ledger['payload']}"
    table = Table(header_style="bold")
    for heading, justify in (("ledger", "left"), ("what", "left"), ("amount", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for ledger_name, entries in _entries(ledger):
        for number, (what, amount) in enumerate(entries):
            table.add_row(ledger_name if number == 0 else "", what, amount)
        table.add_section()
    return Group(Text(scope), Text(way, style="dim"), table)


def _entries(ledger: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    group, out, back, spread = ledger["group_rows"], ledger["out"], ledger["back"], ledger["fan_out"]
    work: list[Mapping[str, Any]] = ledger["work"]
    hierarchy = ledger["hierarchy"]
    yield (
        "row slots",
        [
            ("useful rows of the group, local and remote", f"{group['local']} and {group['remote']}"),
            *((f"of them {kind.replace('_', ' ')}", str(rows)) for kind, rows in ledger["by_class"].items()),
            ("on this peer's links out and back, sent", f"{out['sent']} and {back['sent']}"),
            ("of them useful", f"{out['useful_sent']} and {back['useful_sent']}"),
            (
                "a uniform padded exchange would reserve",
                f"{ledger['padded_row_slots']} ({ledger['padded_over_useful']:.2f} a useful row)",
            ),
            ("executed by this peer's runner", str(sum(part["executed"] for part in work))),
            *(
                (f"of them {name.replace('_', ' ')}", str(sum(part["padding"][name] for part in work)))
                for name in ("useful", "capacity_unused", "alignment_only", "block_fringe")
            ),
            ("ranks and nodes that a token reaches", f"{spread['mean_ranks']:.2f} and {spread['mean_nodes']:.2f}"),
        ],
    )
    yield (
        "logical bytes",
        [
            ("remote payload of this peer, out and back", _both(ledger["dispatch_payload"], ledger["combine_payload"])),
            ("remote payload of the group, both ways", decimal(ledger["remote"])),
            ("staged by the group, both ways", decimal(ledger["staging"])),
            ("kept by origins to bring rows back", decimal(ledger["handle"])),
            ("count, split and offset tables", decimal(ledger["control"])),
            ("between nodes, flat or through relays", decimal(hierarchy["inter_node_round_trip_bytes"])),
            ("that relays would add within nodes", decimal(hierarchy["added_relay_bytes"])),
        ],
    )
    yield "live bytes", [("held at once by this peer, most", decimal(ledger["live_peak"]))]
    yield (
        "measured bytes",
        [("this peer's groups, sent and received", _both(ledger["sent"]["value"], ledger["received"]["value"]))],
    )
    yield "elapsed", [("this peer's clock", f"{ledger['elapsed']['seconds'] * 1e3:.2f} ms")]


def _both(first: int, second: int) -> str:
    return f"{decimal(first)} and {decimal(second)}"
