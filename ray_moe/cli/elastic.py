"""rebalance, scale, drain, cancel: change a cluster that runs. Each is an operation that others can watch and undo.

Exit codes beside those of every verb: 1 when the operation fails or is cancelled, with its reason on one line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer
from rich.console import Console

from ray_moe.cli.connection import attached, locate
from ray_moe.cli.options import Address, AsJson, Name, Replicas
from ray_moe.cli.output import Output, output
from ray_moe.cli.plan import read
from ray_moe.errors import ConfigError, GenerationError

if TYPE_CHECKING:
    from ray_moe.cluster import Cluster
    from ray_moe.controlplane.operations import Operation

_LOOK_S = 0.2  # between two looks at an operation that is watched
_FAILED = 1

Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Watch the operation to its end; Ctrl-C stops watching, and no more.")
]
Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="What `history` shows as the reason.")]
_ASKED_FOR = "asked for"

Homes = dict[int, tuple[tuple[int, int], ...]]


def rebalance(
    replicas: Replicas = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="What `plan --json` printed, its ranks being this cluster's in ascending order; or a mapping from "
            "layers to lists of (expert, rank) pairs: layers that it does not name stay as they are.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what it would take; change nothing and ask for nothing.")
    ] = False,
    wait: Wait = True,
    why: Why = _ASKED_FOR,
    name: Name = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Place experts anew over the same ranks while requests run; by default as the demand of the last minutes asks."""
    from ray_moe.observe.operations import render_preview

    if replicas is not None and plan is not None:
        raise ConfigError("--replicas and --plan both say where experts shall live; give one of them")
    text = read(plan) if plan is not None else ""
    with _verb(name, address, as_json) as verb:
        wanted: dict[str, Any] = {}
        if replicas is not None:
            wanted["replicas"] = replica_counts(replicas, seats_of(verb.cluster))
        elif plan is not None:
            from ray_moe.plans import read_document

            wanted["homes"] = homes_in(read_document(text, str(plan)), str(plan), seats_of(verb.cluster))
        if dry_run:
            document = asdict(verb.cluster.preview(**wanted))
            verb.out.result(document)
            if not as_json:
                verb.out.show(render_preview(document))
            return
        verb.follow(verb.cluster.rebalance(**wanted, why=why), wait)


def scale(
    peers: Annotated[int, typer.Argument(metavar="N", help="Peers wanted, those included that come or go already.")],
    wait: Wait = True,
    why: Why = _ASKED_FOR,
    name: Name = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Grow or shrink to N peers while requests run."""
    with _verb(name, address, as_json) as verb:
        number = verb.cluster.scale(peers, why=why)
        if number is not None:
            verb.follow(number, wait)
            return
        reason = f"{peers} peers are what there is, counting those that come or go already"
        verb.out.result({"number": None, "kind": "scale", "stage": "done", "peers": peers, "reason": reason})
        verb.out.show(f"nothing to do: {reason}")


def drain(
    ranks: Annotated[list[int], typer.Argument(metavar="RANK...", help="Ranks that shall leave.")],
    wait: Wait = True,
    why: Why = _ASKED_FOR,
    name: Name = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Take the named ranks out: their experts and their requests go to others first."""
    with _verb(name, address, as_json) as verb:
        verb.follow(verb.cluster.drain(*ranks, why=why), wait)


def cancel(
    number: Annotated[int, typer.Argument(metavar="OP", help="The operation's number.")],
    wait: Wait = True,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="What `history` shows beside who it was.")] = "",
    name: Name = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Undo an operation that has not published; between two waves it stops there."""
    with _verb(name, address, as_json) as verb:
        try:
            verb.cluster.cancel(number, why=why)
        except GenerationError as error:  # there is no such operation: what was asked is wrong
            raise ConfigError(str(error)) from error
        verb.follow(number, wait, wanted="cancelled")


# -- One operation, watched


@dataclass(frozen=True)
class Verb:
    """A verb that has found its cluster. `suffix` are the options that find it again."""

    cluster: Cluster
    out: Output
    suffix: str

    def follow(self, number: int, wait: bool, wanted: str = "done") -> None:
        """Print the operation as it ends, or with `wait` False as it is; exit code 1 when it ends otherwise."""
        from ray_moe.observe.operations import summary

        operation = self._watch(number) if wait else self.cluster.operation(number)
        row = _document(operation)
        self.out.result(row)
        if operation.ended and row["stage"] != wanted:
            self.out.say(f"error: {summary(row)}")
            raise typer.Exit(_FAILED)
        self.out.show(summary(row))
        if not operation.ended:
            self.out.say(self._ways(number))

    def _watch(self, number: int) -> Operation:
        try:
            with watching(self.out) as draw:
                while True:
                    operation = self.cluster.wait(number, _LOOK_S)
                    if operation.ended:
                        return operation
                    draw(_document(operation))
        except KeyboardInterrupt:
            self.out.say(f"operation {number} goes on; {self._ways(number)}")
            raise

    def _ways(self, number: int) -> str:
        return f"`ray-moe cancel {number}{self.suffix}` undoes it, `ray-moe history{self.suffix}` tells how it ends"


@contextmanager
def _verb(name: str | None, address: str | None, as_json: bool) -> Iterator[Verb]:
    chosen = name or "default"
    options = {"--name": name, "--address": address}
    suffix = "".join(f" {option} {value}" for option, value in options.items() if value is not None)
    with output(as_json) as out, attached(locate(address, chosen)):
        from ray_moe.cluster import connect

        yield Verb(connect(chosen), out, suffix)


def _document(operation: Operation) -> dict[str, Any]:
    from ray_moe.controlplane.operation_row import OperationRow

    return asdict(OperationRow.of(operation))


@contextmanager
def watching(out: Output) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """On a terminal a line that lives; elsewhere a line for every stage, wave and failure."""
    from ray_moe.observe.operations import progress_line, progress_view

    console = Console(stderr=True)
    if console.is_terminal:
        from rich.live import Live

        with Live(console=console, transient=True, refresh_per_second=8) as live:
            yield lambda row: live.update(progress_view(row, time.time()))
        return
    told: list[tuple[Any, ...]] = []

    def tell(row: Mapping[str, Any]) -> None:
        now = (row["stage"], row["wave"], row["reason"])
        if now not in told[-1:]:
            told.append(now)
            out.say(progress_line(row, time.time()))

    yield tell


# -- What is asked for, checked against the cluster


@dataclass(frozen=True)
class Seats:
    """What a placement has to fit: MoE layers, experts of each, and the ranks there are or will be, ascending."""

    layers: tuple[int, ...]
    experts: int
    ranks: tuple[int, ...]


def seats_of(cluster: Cluster) -> Seats:
    """Ranks on their way in count: what is asked for now is done after they have come."""
    from ray_moe.controlplane.operations import Kind

    directory = cluster.directory()
    coming = {
        rank
        for operation in cluster.history()
        if operation.kind is Kind.GROW and not operation.ended
        for rank in operation.ranks
    }
    ranks = coming.union(rank for rank, _ in directory.members.peers)
    return Seats(directory.facts.moe_layers, directory.facts.num_experts, tuple(sorted(ranks)))


def replica_counts(text: str, seats: Seats) -> dict[tuple[int, int], int]:
    """LAYER:EXPERT=COUNT,... by (layer, expert). Raises `ConfigError` for what the cluster does not have."""
    from ray_moe.asked import expand_replicas, parse_replicas

    counts = expand_replicas(parse_replicas(text), seats.layers)
    for (layer, expert), count in counts.items():
        _check(f"replicas: layer {layer} expert {expert}", layer, expert, seats)
        if count > len(seats.ranks):
            raise ConfigError(
                f"replicas: layer {layer} expert {expert}: count must be in [1, {len(seats.ranks)}], as every copy "
                f"needs a rank of its own, found {count}"
            )
    return counts


def homes_in(document: object, source: str, seats: Seats) -> Homes:
    """(expert, rank) pairs by layer, of a plan's document or of a mapping. `ConfigError` naming `source` and what does
    not fit."""
    from ray_moe.manifest import shown

    if not isinstance(document, dict) or not document:
        raise ConfigError(
            f"{source}: found {shown(document)}, must be what `ray-moe plan --json` prints or a mapping from layers to "
            "lists of [expert, rank]"
        )
    if "plans" in document:
        raise ConfigError(f"{source}: holds several plans; one is needed")
    homes = _planned(document, source, seats) if "phy2log" in document else _mapped(document, source)
    for layer, pairs in homes.items():
        for expert, rank in pairs:
            _check(f"{source}: layer {layer} expert {expert}", layer, expert, seats)
            if rank not in seats.ranks:
                raise ConfigError(
                    f"{source}: layer {layer} expert {expert}: rank must be one of {list(seats.ranks)}, found {rank}"
                )
        homeless = sorted(set(range(seats.experts)).difference(expert for expert, _ in pairs))
        if homeless:
            raise ConfigError(f"{source}: layer {layer}: experts without a home: {homeless}")
    return homes


def _check(what: str, layer: int, expert: int, seats: Seats) -> None:
    if layer not in seats.layers:
        raise ConfigError(f"{what}: layer must be one of {list(seats.layers)}, found {layer}")
    if not 0 <= expert < seats.experts:
        raise ConfigError(f"{what}: expert must be in [0, {seats.experts}), found {expert}")


def _planned(document: Mapping[Any, Any], source: str, seats: Seats) -> Homes:
    """Row i of a plan is the i-th MoE layer, its rank g the g-th rank."""
    from ray_moe.manifest import shown

    rows, slots = document["phy2log"], document.get("slots_by_rank")
    if not _is_row(slots):
        raise ConfigError(f"{source}: slots_by_rank: found {shown(slots)}, must be a list of whole numbers >= 0")
    if len(slots) != len(seats.ranks):
        raise ConfigError(
            f"{source}: plans {len(slots)} ranks, the cluster has {len(seats.ranks)}: {list(seats.ranks)}"
        )
    if not isinstance(rows, list) or len(rows) != len(seats.layers):
        found = len(rows) if isinstance(rows, list) else shown(rows)
        raise ConfigError(f"{source}: phy2log: found {found} layers, the model has {len(seats.layers)}")
    rank_of_slot = [rank for rank, count in zip(seats.ranks, slots, strict=True) for _ in range(count)]
    for at, row in enumerate(rows):
        if not _is_row(row) or len(row) != len(rank_of_slot):
            raise ConfigError(f"{source}: phy2log[{at}]: found {shown(row)}, must be {len(rank_of_slot)} experts")
    return {layer: tuple(zip(row, rank_of_slot, strict=True)) for layer, row in zip(seats.layers, rows, strict=True)}


def _mapped(document: Mapping[Any, Any], source: str) -> Homes:
    from ray_moe.manifest import shown

    homes: Homes = {}
    for key, pairs in document.items():
        text = str(key)
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise ConfigError(f"{source}: found {shown(key)}, must be the number of a layer")
        layer = int(text)
        if layer in homes:
            raise ConfigError(f"{source}: layer {layer} is given twice")
        if not isinstance(pairs, list) or not pairs:
            raise ConfigError(f"{source}: layer {layer}: found {shown(pairs)}, must be a list of [expert, rank]")
        for pair in pairs:
            if not _is_row(pair) or len(pair) != 2:
                raise ConfigError(f"{source}: layer {layer}: found {shown(pair)}, must be [expert, rank]")
        homes[layer] = tuple((expert, rank) for expert, rank in pairs)
    return homes


def _is_row(value: object) -> TypeGuard[list[int]]:
    """A list of whole numbers >= 0; a truth value is none."""
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
