"""The live document for a terminal: what `ray-moe top` draws, once a second.

    render_top(view)                  one look
    render_top(view, before)          with rates, from what happened between two looks

It says what to look at first: what is wrong, who is busy, which experts are hot, what moves and what waits for what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ray_moe.observe.live import FREE, BalanceView, LiveView, LoadsView, OperationView, PlacementView, RankView
from ray_moe.observe.operations import moved, plain, title
from ray_moe.observe.survival import Outcome

HOTTEST, ENDED_SHOWN, SWITCHES_SHOWN = 6, 3, 3
RANKS_SHOWN = 24  # those that do not serve, then the busiest
_BLOCKS = "▁▂▃▄▅▆▇█"
# Where a layer's busiest rank is drawn as high as it gets: twice the mean.
_HIGHEST = 2.0
_STYLES = {
    **dict.fromkeys(("serving", "SERVING", "done"), "green"),
    **dict.fromkeys(("degraded", "failed", "lost"), "bold red"),
    **dict.fromkeys(("joining", "undoing", "cancelled", "DRAINING"), "yellow"),
    **dict.fromkeys(("sleeping", "idle", "stopped"), "dim"),
}
_WORDS = {"sleeping": "idle"}
_WELL = ("serving", "sleeping")
_BAR_WIDTH = 10
_STALE_S = 3.0


def render_top(view: LiveView, before: LiveView | None = None, trouble: str = "") -> RenderableType:
    """A screen. `before` is an earlier look, for rates; `trouble` says why this one is old, empty where it is not."""
    return Group(
        *((Text(f"not up to date: {plain(trouble)}", "bold red"),) if trouble else ()),
        _headline(view, before),
        ranks_table(view, before),
        *_experts(view),
        *_operations(view),
        *_generations(view),
        _survival(view),
    )


# -- The cluster and its ranks


def _headline(view: LiveView, before: LiveView | None) -> Text:
    head = view.headline
    line = Text.assemble(
        (head.name, "bold"),
        " is ",
        _state(head.state),
        f"  {head.model}, release {head.release_id}, generation {head.generation}, epoch {head.epoch}",
        (f"  {datetime.fromtimestamp(view.at):%H:%M:%S}", "dim"),
    )
    if head.failure:
        line.append(f"\n{plain(head.failure)}", "red")
    running, waiting = (sum(getattr(rank, name) for rank in view.ranks) for name in ("running", "waiting"))
    line.append(f"\n{running} requests run, {waiting} wait")
    rate = _rate(view, before)
    if rate is not None:
        line.append(f", {rate:,.0f} tokens/s")
    if head.autopilot:
        line.append(f"\nautopilot: {plain(head.autopilot)}", "dim")
    return line


def _rate(view: LiveView, before: LiveView | None) -> float | None:
    """Tokens per second of the ranks that are in both looks."""
    if before is None or view.at <= before.at:
        return None
    then = {rank.rank: rank.tokens_emitted for rank in before.ranks}
    new = sum(max(0, rank.tokens_emitted - then[rank.rank]) for rank in view.ranks if rank.rank in then)
    return new / (view.at - before.at)


def ranks_table(view: LiveView, before: LiveView | None = None) -> Table:
    """A row per rank: what it does, how long its steps take, and how full it is."""
    table = _table("ranks")
    right = ("rank", "running", "waiting", "tokens/s", "step ms", "slowest ms", "agreeing", "rows sent", "load", "KV")
    for heading in ("rank", "state", *right[1:], "experts", "node"):
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=heading != "state")
    then = {rank.rank: rank for rank in before.ranks} if before is not None else {}
    recent = {steps.rank: steps.seconds[-128:] for steps in view.steps}
    shares = _shares(view)
    shown = sorted(view.ranks, key=lambda one: (one.state in _WELL, -one.outstanding_tokens, one.rank))
    for rank in sorted(shown[:RANKS_SHOWN], key=lambda one: one.rank):
        steps, rows = recent.get(rank.rank, ()), rank.rows_local + rank.rows_sent
        past = then.get(rank.rank)
        tokens = "" if past is None else f"{_per_second(rank, past, view, before):,.0f}"
        slowest = sorted(steps)[-(-95 * len(steps) // 100) - 1] if steps else 0.0
        table.add_row(
            str(rank.rank),
            _rank_state(rank, view.at),
            str(rank.running),
            Text(str(rank.waiting), "yellow" if rank.waiting else ""),
            tokens,
            f"{sum(steps) / len(steps) * 1e3:.1f}" if steps else "",
            f"{slowest * 1e3:.1f}" if steps else "",
            f"{rank.seconds_agreeing / rank.seconds_worked:.0%}" if rank.seconds_worked else "",
            f"{rank.rows_sent / rows:.0%}" if rows else "",
            shares.get(rank.rank, ""),
            f"{rank.kv_blocks_used / rank.kv_blocks_total:.0%}" if rank.kv_blocks_total else "",
            decimal(rank.resident_bytes) if rank.resident_bytes else "",
            rank.node[:12],
        )
    if len(shown) > RANKS_SHOWN:
        table.caption = f"and {len(shown) - RANKS_SHOWN} ranks that are less busy"
    return table


def _per_second(rank: RankView, past: RankView, view: LiveView, before: LiveView | None) -> float:
    seconds = view.at - before.at if before is not None else 0.0
    return max(0, rank.tokens_emitted - past.tokens_emitted) / seconds if seconds > 0 else 0.0


def _rank_state(rank: RankView, now: float) -> Text:
    text = _state(rank.state)
    phase, done, total = rank.loading
    if rank.state == "joining" and phase:
        text.append(f" {phase} {done}/{total}" if total else f" {phase}")
    if rank.detail:
        text.append(f" {plain(rank.detail)}", "red")
    if rank.seen_at and now - rank.seen_at > _STALE_S and rank.state != "lost":
        text.append(f" silent for {now - rank.seen_at:.0f} s", "yellow")
    return text


def _shares(view: LiveView) -> dict[int, str]:
    """By rank, how much of the mean rank's rows it carries: 1.25x."""
    if view.balance is None or view.placement is None:
        return {}
    share = dict(zip(view.placement.ranks, view.balance.rank_share, strict=True))
    return {rank: f"{part * len(share):.2f}x" for rank, part in share.items()}


# -- Experts


def _experts(view: LiveView) -> Iterable[RenderableType]:
    if view.placement is None:
        return
    if view.balance is not None:
        yield balance_line(view.balance, view.placement)
    if view.loads is not None:
        yield hottest_table(view.loads, view.placement)


def balance_line(balance: BalanceView, placement: PlacementView) -> Text:
    """Every layer's imbalance as a bar, with the worst one's number; bars are full at twice the mean."""
    worst = max(range(len(balance.imbalance)), key=lambda place: balance.imbalance[place])
    bars = "".join(_block((value - 1) / (_HIGHEST - 1)) for value in balance.imbalance)
    text = Text.assemble(("imbalance of layers ", "bold"), (bars, "cyan"))
    text.append(f"  worst: layer {placement.layers[worst]}, busiest rank {balance.imbalance[worst]:.2f}x the mean")
    return text


def hottest_table(loads: LoadsView, placement: PlacementView, most: int = HOTTEST) -> Table:
    """The experts that were asked for most, of those above their layer's mean, and where their copies are."""
    table = _table("hottest experts")
    for heading in ("layer", "expert", "of its layer", "", "x mean", "copies", "on ranks"):
        table.add_column(heading, justify="left" if heading in ("", "on ranks") else "right")
    found: list[tuple[float, float, int, int]] = []
    for place, rows_E in enumerate(loads.rows_LE):
        total = sum(rows_E)
        if not total:
            continue
        parts = ((rows / total, expert) for expert, rows in enumerate(rows_E))
        found += [(part * len(rows_E), part, place, expert) for part, expert in parts if part * len(rows_E) > 1]
    hottest = sorted(found, key=lambda one: (-one[0], one[2:]))[:most]
    for times, share, place, expert in hottest:
        ranks = Counter(
            rank
            for rank, layers in zip(placement.ranks, placement.slots_RLC, strict=True)
            for held in layers[place]
            if held == expert != FREE
        )
        bar = Bar(hottest[0][0], 0.0, times, width=_BAR_WIDTH, color="cyan")
        layer, where = str(placement.layers[place]), ", ".join(map(str, sorted(ranks)))
        table.add_row(layer, str(expert), f"{share:.1%}", bar, f"{times:.1f}", str(sum(ranks.values())), where)
    return table


# -- What changes


def _operations(view: LiveView) -> Iterable[RenderableType]:
    opened = [one for one in view.operations if not one.ended_at]
    ended = [one for one in view.operations if one.ended_at][-ENDED_SHOWN:]
    if not opened and not ended:
        return
    table = _table("operations")
    for heading in ("what", "stage", "for", "moved", "pause ms", "asked by", "waits for, or why it ended"):
        table.add_column(heading, justify="right" if heading in ("for", "pause ms") else "left")
    for one in (*reversed(ended), *opened):
        table.add_row(*_operation(one, view.at))
    yield table


def _operation(one: OperationView, now: float) -> Sequence[RenderableType]:
    row = asdict(one)
    stage = _state(one.stage)
    if one.waves > 1:
        stage.append(f" {one.wave}/{one.waves}", "dim")
    lasted = max(0.0, (one.ended_at or now) - one.asked_at)
    pause = f"{one.pause_s * 1e3:.1f}" if one.to_generation else ""
    about = plain(one.reason) if one.ended_at else one.waits_for
    return title(row), stage, f"{lasted:.1f} s", moved(row), pause, plain(one.asked_by), about


def _generations(view: LiveView) -> Iterable[RenderableType]:
    draining = [one for one in view.generations if one.state == "DRAINING"]
    for one in draining:
        text = Text(f"generation {one.generation} drains", "yellow")
        text.append(f": {one.references} leases, of {', '.join(sorted(set(one.holders))) or 'nobody'}")
        yield text
    latest = sorted({one.generation for one in view.switches})[-SWITCHES_SHOWN:]
    for generation in latest:
        taken = [one for one in view.switches if one.generation == generation]
        longest, ago = max(one.seconds for one in taken), view.at - max(one.at for one in taken)
        line = f"generation {generation} was taken by {len(taken)} ranks {ago:.0f} s ago, "
        yield Text(f"{line}at step {min(one.step for one in taken)}; it added {longest * 1e3:.1f} ms", "dim")


def _survival(view: LiveView) -> Text:
    bad = [one for one in view.survival if one.outcome is Outcome.TOO_SMALL]
    alone = [one for one in view.survival if one.only_here]
    if bad:
        names = ", ".join(one.name for one in bad)
        return Text(f"would need another rank to come back: the loss of {names}", "yellow")
    if alone:
        names = ", ".join(f"{one.name} ({one.only_here} experts)" for one in alone)
        return Text(f"would come back from the checkpoint, in part: the loss of {names}", "dim")
    return Text("every expert has a copy on another rank", "green") if view.survival else Text("")


# -- Details


def _block(part: float) -> str:
    return _BLOCKS[min(len(_BLOCKS) - 1, max(0, int(part * len(_BLOCKS))))]


def _state(state: str) -> Text:
    return Text(_WORDS.get(state, state), _STYLES.get(state, ""))


def _table(name: str) -> Table:
    return Table(title=name, title_justify="left", header_style="bold")
