"""release build, status, promote, rollback: bring another release of the model into service beside the one that serves.

A candidate differs in how it executes (`--set`) or in its checkpoint (`--model`). It is compared as a shadow, serves a
share as a canary, and takes over when it is promoted; a fault takes it out by itself. Exit code 1 when it ended
otherwise than asked, with the reason on one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_moe.cli.connection import attached, locate
from ray_moe.cli.options import Address, AsJson, Name
from ray_moe.cli.output import Output, output
from ray_moe.errors import ConfigError

if TYPE_CHECKING:
    from ray_moe.cluster import Cluster
    from ray_moe.controlplane.rollout import Rollout

_FAILED = 1

release = typer.Typer(help="Roll another release out beside the one that serves, or back.", no_args_is_help=True)

Release = Annotated[str, typer.Argument(metavar="[RELEASE]", help="Its id (default: the latest rollout's).")]
Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="What the log shows as the reason.")]
Wait = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", help="Wait so long for what was asked; 0 not at all.")
]


@release.command()
def build(
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Another setting, for example runner=block_sparse; repeat."),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="PATH", help="Another checkpoint of the same architecture and tokenizer.")
    ] = "",
    share: Annotated[float, typer.Option("--share", help="The share of steps that the canary serves.")] = 0.1,
    shadow_rate: Annotated[
        float, typer.Option("--shadow-rate", help="The share of steps that the shadow computes.")
    ] = 0.1,
    auto: Annotated[bool, typer.Option("--auto", help="Promote it as soon as every check passes.")] = False,
    wait: Wait = 0.0,
    why: Why = "asked for",
    name: Name = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Build a candidate release, verify and load it; it becomes a shadow, then a canary."""
    given = settings_in(settings or [])
    with output(as_json) as out, attached(locate(address, name or "default")):
        cluster = _connect(name)
        rollout = cluster.release_build(
            settings=given, model=model, share=share, shadow_rate=shadow_rate, auto=auto, why=why
        )
        _tell(out, _followed(cluster, rollout, ("done",) if auto else ("canary",), wait))


@release.command()
def status(name: Name = None, address: Address = None, as_json: AsJson = False) -> None:
    """Show releases, what was done with them, and what a promotion still lacks."""
    with output(as_json) as out, attached(locate(address, name or "default")):
        found = _connect(name).releases()
        out.result(
            {
                "releases": [asdict(one) for one in found.releases],
                "rollouts": [document(one) for one in found.rollouts],
                "log": [_line(asdict(one)) for one in found.log],
                "checks": [asdict(check) for check in found.report.checks] if found.report is not None else [],
            }
        )
        if as_json:
            return
        for one in found.releases:
            serves = (
                ", takes new dispatches" if one.dispatching else f", held for {one.held_for}" if one.held_for else ""
            )
            out.show(f"{one.release_id}: {one.state}{serves}; generations {_numbers(one.generations)}")
        for rollout in found.rollouts:
            out.show(summary(document(rollout)))
        for check in found.report.checks if found.report is not None else ():
            out.show(f"  {'ok  ' if check.passed else 'open'} {check.name}: {check.found} ({check.bound})")


@release.command()
def promote(
    release_id: Release = "", wait: Wait = 30.0, name: Name = None, address: Address = None, as_json: AsJson = False
) -> None:
    """Promote the canary; refused with every check that does not pass."""
    with output(as_json) as out, attached(locate(address, name or "default")):
        cluster = _connect(name)
        _tell(out, _followed(cluster, cluster.release_promote(release_id), ("active",), wait))


@release.command()
def rollback(
    release_id: Release = "",
    wait: Wait = 30.0,
    why: Why = "asked for",
    name: Name = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Take the candidate out in order; the release before it serves on."""
    with output(as_json) as out, attached(locate(address, name or "default")):
        cluster = _connect(name)
        rollout = _followed(cluster, cluster.release_rollback(release_id, why=why), (), wait)
        _tell(out, rollout, wanted=("rolled_back", "failed", "leaving"))


# -- Details


def settings_in(pairs: list[str]) -> dict[str, str]:
    """FIELD=VALUE each. Raises `ConfigError` for anything else, and for a field that comes twice."""
    found: dict[str, str] = {}
    for pair in pairs:
        field, separator, value = pair.partition("=")
        if not separator or not field or field in found:
            raise ConfigError(f"--set takes FIELD=VALUE, each field once, found {pair!r}")
        found[field] = value
    return found


def document(rollout: Rollout) -> dict[str, Any]:
    """What people and programs see of a rollout."""
    return {
        "number": rollout.number,
        "release_id": rollout.release_id,
        "prior": rollout.prior,
        "phase": rollout.phase.value,
        "model": rollout.model,
        "share": rollout.share,
        "shadow_rate": rollout.shadow_rate,
        "auto": rollout.auto,
        "asked_by": rollout.asked_by,
        "why": rollout.why,
        "asked_at": rollout.asked_at,
        "changed_at": rollout.changed_at,
        "ended_at": rollout.ended_at,
        "reason": rollout.reason,
    }


def summary(row: Mapping[str, Any]) -> str:
    """One line."""
    reason = f": {row['reason']}" if row["reason"] else ""
    return f"rollout of {row['release_id']} after {row['prior']} is {row['phase']}{reason}"


def _connect(name: str | None) -> Cluster:
    from ray_moe.cluster import connect

    return connect(name or "default")


def _followed(cluster: Cluster, rollout: Rollout, phases: tuple[str, ...], seconds: float) -> Rollout:
    return cluster.wait_rollout(phases, seconds, rollout.release_id) if seconds > 0 else rollout


def _tell(out: Output, rollout: Rollout, wanted: tuple[str, ...] = ()) -> None:
    row = document(rollout)
    out.result(row)
    if row["phase"] in ("failed", "rolled_back") and row["phase"] not in wanted:
        out.say(f"error: {summary(row)}")
        raise typer.Exit(_FAILED)
    out.show(summary(row))


def _numbers(generations: tuple[Any, ...]) -> str:
    return ", ".join(f"{one.generation} {one.state}" for one in generations) or "none"


def _line(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("number", "operation", "release_id", "note", "detail", "generation")}
