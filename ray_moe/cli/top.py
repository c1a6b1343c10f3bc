"""top: a running cluster as it is now, again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from ray_moe.cli.connection import attached, locate
from ray_moe.cli.options import Address, Name
from ray_moe.cli.output import Output, output
from ray_moe.deadline import Deadline, pause
from ray_moe.errors import ConfigError, DeadlineError

if TYPE_CHECKING:
    from ray_moe.cluster import Cluster
    from ray_moe.observe.live import Known, LiveView

_FASTEST_S, _SLOWEST_S = 0.1, 3600.0
# A controller that does not answer for so long is asked again, or is gone; an older look is said to be old.
_ANSWER_S, _OLD_S = 15.0, 3.0

Look = tuple["LiveView", "LiveView | None", str]


def top(
    once: Annotated[bool, typer.Option("--once", help="One look, and no more.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="S", help="Seconds between two looks.")] = 1.0,
    name: Name = None,
    address: Address = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="A JSON document a line; from the second on without placement and loads that are the same."
        ),
    ] = False,
) -> None:
    """Watch a cluster: ranks, requests, step times, hot experts, what moves. Ctrl-C ends it."""
    if not _FASTEST_S <= every <= _SLOWEST_S:
        raise ConfigError(f"--every must be in [{_FASTEST_S:g}, {_SLOWEST_S:g}] s, found {every:g}")
    chosen = name or "default"
    with output(as_json) as out, attached(locate(address, chosen)):
        from ray_moe.actors.remote import find_controller
        from ray_moe.cluster import Cluster

        cluster = Cluster(chosen, find_controller(chosen), _ANSWER_S)
        try:
            if as_json:
                _stream(cluster, out, every, once)
            else:
                _draw(cluster, out, every, once)
        except KeyboardInterrupt:
            return  # how one leaves it


def _stream(cluster: Cluster, out: Output, every: float, once: bool) -> None:
    """What is new, a line each time."""
    known = None
    while True:
        deadline = Deadline(every)
        try:
            view = cluster.live(known)
        except DeadlineError as error:
            out.say(str(error))
        else:
            known = view.known
            out.result(json.loads(json.dumps(asdict(view))))
            if once:
                return
        pause(deadline.left)


def _draw(cluster: Cluster, out: Output, every: float, once: bool) -> None:
    from ray_moe.observe.top import render_top

    if once:
        before = cluster.live()
        pause(min(every, 1.0))  # rates are between two looks
        out.show(render_top(_again(cluster, before), before))
        return
    screen = _Screen()
    with out.screen(screen) as draw:
        for screen.look in looks(cluster.live, every):
            if not screen.look[2]:
                screen.looked_at = time.monotonic()
            draw()


class _Screen:
    """The last look, and how old it is whenever it is drawn: the controller may not answer for a while."""

    def __init__(self) -> None:
        self.look: Look | None = None
        self.looked_at = 0.0

    def __rich__(self) -> RenderableType:
        from ray_moe.observe.top import render_top

        if self.look is None:
            return "asking the cluster"
        view, before, trouble = self.look
        age = time.monotonic() - self.looked_at
        return render_top(view, before, trouble or (f"{age:.0f} s old" if age > _OLD_S else ""))


def looks(ask: Callable[[Known | None], LiveView], every: float) -> Iterator[Look]:
    """What there is now, the look before it, and why there is nothing newer; one every so many seconds."""
    from ray_moe.observe.live import merged

    view: LiveView | None = None
    before: LiveView | None = None
    while True:
        deadline, trouble = Deadline(every), ""
        try:
            found = ask(view.known if view is not None else None)
        except DeadlineError as error:
            if view is None:
                raise
            trouble = str(error)
        else:
            before, view = view, found if view is None else merged(view, found)
        assert view is not None
        yield view, before, trouble
        pause(deadline.left)


def _again(cluster: Cluster, before: LiveView) -> LiveView:
    from ray_moe.observe.live import merged

    return merged(before, cluster.live(before.known))
