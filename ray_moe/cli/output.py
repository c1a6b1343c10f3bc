"""What a command prints: the answer on stdout, everything else on stderr; with --json stdout is one JSON document."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, RenderableType

if TYPE_CHECKING:
    from ray_moe.cluster import OnProgress

# A table that goes into a pipe or a file has no terminal whose width it must fit.
_PIPE_WIDTH = 200


@contextmanager
def output(as_json: bool) -> Iterator[Output]:
    """Where one command writes. Until the block ends stdout is the command's own: Ray's driver prints notes about its
    workers there, which its log files hold as well; what goes wrong for us arrives as an exception."""
    answers = Output(as_json, sys.stdout, sys.stderr)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield answers


class Output:
    """A command's answer and what it says meanwhile."""

    def __init__(self, as_json: bool, stdout: TextIO, stderr: TextIO) -> None:
        self.as_json = as_json
        self._stdout = stdout
        self._aside = _console(stderr)
        self._people = self._aside if as_json else _console(stdout)

    @property
    def aside(self) -> Console:
        """Where what goes on meanwhile is drawn."""
        return self._aside

    @property
    def on_terminal(self) -> bool:
        """Whether somebody watches."""
        return self._aside.is_terminal

    def result(self, document: Mapping[str, Any]) -> None:
        """The command's answer for programs; people get theirs by `show` and `text`."""
        if self.as_json:
            print(json.dumps(document), file=self._stdout, flush=True)

    def show(self, renderable: RenderableType) -> None:
        """A part of the answer for people: a table or a line."""
        self._people.print(renderable, highlight=False, markup=False)

    def text(self, piece: str) -> None:
        """A piece of generated text as it comes, without a line end of its own."""
        self._people.file.write(piece)
        self._people.file.flush()

    def say(self, line: str) -> None:
        """What goes on meanwhile."""
        self._aside.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def screen(self, drawn: RenderableType) -> Iterator[Callable[[], None]]:
        """The answer for people, drawn again whenever what this gives is called: over a whole terminal, and four times
        a second besides; where there is none, one below the other."""
        if not self._people.is_terminal:
            yield lambda: self.show(drawn)
            return
        from rich.live import Live

        with Live(drawn, console=self._people, screen=True) as live:
            yield live.refresh

    @contextmanager
    def loading(self) -> Iterator[OnProgress | None]:
        """A progress bar per rank for `cluster.start`, on a terminal only."""
        if not self._aside.is_terminal:
            yield None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("rank {task.fields[rank]}"), TextColumn("{task.description:8}"))
        with Progress(
            *columns, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=self._aside, transient=True
        ) as bars:
            tasks: dict[int, Any] = {}

            def draw(ranks: Mapping[int, Any]) -> None:
                for rank, progress in sorted(ranks.items()):
                    if rank not in tasks:
                        tasks[rank] = bars.add_task("starting", rank=rank, total=None)
                    bars.update(
                        tasks[rank],
                        description=progress.phase,
                        completed=progress.done,
                        total=progress.total or None,
                    )

            yield draw


def log_json_as(command: str, cluster: str, level: str = "info") -> None:
    """What this process's modules log is a JSON document a line, on stderr."""
    from ray_moe.events import configure

    configure(as_json=True, level=level, cluster=cluster, actor=command)


def report(message: str, kind: str, exit_code: int, *, as_json: bool, param: str | None = None) -> None:
    """One line on stderr, and with --json the same as a document on stdout."""
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr, flush=True)
    if as_json:
        error: dict[str, Any] = {"type": kind, "message": line, "exit_code": exit_code}
        print(json.dumps({"error": error | ({"param": param} if param is not None else {})}), flush=True)


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH)
