"""A plan for people: tables, and a heat map of experts x ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ray_moe.controlplane.placed import Placed
from ray_moe.observe.png import BLACK, GREY, PALE, Canvas, heat, magnified, text_width

_ROWS = 16  # of a table; of more layers the worst are shown, of more ranks none
_SIDE = 640  # pixels of the longer side of a heat map, at least one for each expert and rank


def render_plan(plan: Mapping[str, Any]) -> RenderableType:
    """Takes the document of `ray-moe plan`."""
    parts: list[RenderableType] = [_head(plan), _layers(plan)]
    ranks = len(plan["slots_by_rank"])
    if len(plan["phy2log"]) == 1 and ranks <= _ROWS:
        parts.append(_ranks(plan))
    if plan["migration"] is not None:
        parts.append(_migration(plan["migration"]))
    parts += [Text(note, style="dim") for note in plan["notes"]]
    return Group(*parts)


def _head(plan: Mapping[str, Any]) -> RenderableType:
    asked, used = plan["policy"], plan["policy_used"]
    ranks, nodes = len(plan["slots_by_rank"]), len(set(plan["node_of_rank"]))
    origin = plan["provenance"]
    return Group(
        Text(f"{origin['file']}  sha256 {origin['sha256'][:16]}...  unit: {origin['unit']}", style="bold"),
        Text(
            f"policy {asked}{f' ({used})' if used != asked else ''}: {len(plan['logcnt'][0])} experts in "
            f"{sum(plan['slots_by_rank'])} slots on {ranks} ranks of {nodes} nodes, {len(plan['phy2log'])} layers; "
            f"solved in {plan['solve_ms']:.2f} ms"
        ),
        Text(_memory(plan)),
        Text(_objective(plan["objective"])),
    )


def _objective(objective: Mapping[str, Any]) -> str:
    """The terms that the plan changes, means over the layers."""
    before, after = objective["before"], objective["after"]
    changed = [f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in after if before[name] != after[name]]
    return f"objective: {', '.join(changed) or 'nothing changes'}"


def _memory(plan: Mapping[str, Any]) -> str:
    memory = plan["memory"]
    if memory["unit"] == "bytes":
        return f"resident {decimal(memory['resident'])}, peak {decimal(memory['peak'])}"
    return f"resident {memory['resident']} experts, peak {memory['peak']} (bytes: give expert_bytes)"


def _layers(plan: Mapping[str, Any]) -> RenderableType:
    before, after = np.array(plan["imbalance_before"]), np.array(plan["imbalance"])
    loads, copies = plan["rank_load"], plan["logcnt"]
    table = Table(header_style="bold")
    predicted = plan["predicted"]
    crossed, crossing = np.array(plan["rows_across_nodes_before"]), np.array(plan["rows_across_nodes"])
    headings = ["layer", "max/mean before", "after", "rows across nodes before", "after"]
    headings += ["largest rank load", "mean", "most copies", "of expert"]
    for heading in [*headings, *(["layer, ms (predicted)"] if predicted is not None else [])]:
        table.add_column(heading, justify="right")
    shown = np.sort(np.argsort(-after, kind="stable")[:_ROWS]).tolist()
    for layer in shown:
        most = int(np.argmax(copies[layer]))
        table.add_row(
            str(layer),
            f"{before[layer]:.3f}",
            f"{after[layer]:.3f}",
            f"{crossed[layer]:.1%}",
            f"{crossing[layer]:.1%}",
            f"{max(loads[layer]):.6g}",
            f"{np.mean(loads[layer]):.6g}",
            str(copies[layer][most]),
            str(most),
            *([f"{predicted['layer'][layer] * 1e3:.3f}"] if predicted is not None else []),
        )
    if len(after) > len(shown):
        table.add_section()
        table.add_row(
            "all, mean",
            f"{before.mean():.3f}",
            f"{after.mean():.3f}",
            f"{crossed.mean():.1%}",
            f"{crossing.mean():.1%}",
        )
        table.add_row(
            "all, worst", f"{before.max():.3f}", f"{after.max():.3f}", f"{crossed.max():.1%}", f"{crossing.max():.1%}"
        )
    return table


def _ranks(plan: Mapping[str, Any]) -> RenderableType:
    table = Table(header_style="bold")
    for heading in ("rank", "node", "experts in its slots", "ideal load"):
        table.add_column(heading, justify="left" if heading.startswith("experts") else "right")
    ends = np.cumsum(plan["slots_by_rank"])
    for rank, (end, slots) in enumerate(zip(ends, plan["slots_by_rank"], strict=True)):
        experts = ", ".join(map(str, plan["phy2log"][0][end - slots : end]))
        table.add_row(str(rank), str(plan["node_of_rank"][rank]), experts, f"{plan['rank_load'][0][rank]:.6g}")
    return table


def _migration(migration: Mapping[str, Any]) -> RenderableType:
    table = Table(header_style="bold")
    for heading in ("from the prior", "copies", "payload"):
        table.add_column(heading, justify="left" if heading.startswith("from") else "right")
    for kind, amount in migration["classes"].items():
        payload = "" if amount["bytes"] is None else decimal(amount["bytes"])
        table.add_row(kind.replace("_", " "), str(amount["copies"]), payload)
    waves = {0: "nothing moves", 1: "in one wave"}.get(migration["waves"], f"in {migration['waves']} waves")
    return Group(table, Text(waves))


# -- The heat map


def heat_map(loads_E: NDArray[np.float64], layer: int, before: Placed, after: Placed) -> bytes:
    """A PNG of one layer: what each rank carries of each expert, before and after, and the rank's sum below.

    Colours go from nothing (white) to the largest value of the picture (dark red), for cells and sums apart.
    """
    pictures = [_carried(loads_E, placed, layer) for placed in (before, after)]
    experts = len(loads_E)
    ranks = max(cells.shape[1] for cells in pictures)
    high, wide = max(1, _SIDE // experts), max(1, _SIDE // ranks)
    margin, gap, bar = 64, 48, 24
    panel = max(wide * ranks, text_width("before  max/mean 00.000"))
    canvas = Canvas(margin + 2 * panel + gap + 16, 64 + high * experts + 12 + bar + 40)
    most, largest = max(cells.max() for cells in pictures), max(cells.sum(axis=0).max() for cells in pictures)
    for at, (name, cells) in enumerate(zip(("before", "after"), pictures, strict=True)):
        left, sums = margin + at * (panel + gap), cells.sum(axis=0)
        mean = sums.mean()
        canvas.text(left, 16, f"{name}  max/mean {sums.max() / mean if mean else 1:.3f}")
        canvas.fill(left - 1, 39, wide * cells.shape[1] + 2, high * experts + 2, PALE)
        canvas.image(left, 40, magnified(heat(cells, most), high, wide))
        top = 40 + high * experts + 12
        canvas.fill(left - 1, top - 1, wide * cells.shape[1] + 2, bar + 2, PALE)
        canvas.image(left, top, magnified(heat(sums[None], largest), bar, wide))
        canvas.text(left, top + bar + 10, f"ranks 0 to {cells.shape[1] - 1}", GREY)
    canvas.text(4, 40, "0", GREY)
    canvas.text(4, 40 + high * experts - 10, str(experts - 1), GREY)
    canvas.text(4, 16, f"l {layer}", BLACK)
    canvas.text(4, 40 + high * experts // 2, "expert", GREY)
    canvas.text(4, 40 + high * experts + 18, "sum", GREY)
    return canvas.to_png()


def _carried(loads_E: NDArray[np.float64], placed: Placed, layer: int) -> NDArray[np.float64]:
    """[E, G]: ideal load."""
    held = placed.phy2log_LS[layer]
    cells = np.zeros((len(loads_E), placed.shape.num_ranks))
    np.add.at(cells, (held, placed.shape.rank_of_slot_S), (loads_E / placed.counts_LE[layer])[held])
    return cells
