"""Asking for a change: an operation joins the state, or is refused by name. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ray_moe.controlplane.elastic import Loads
from ray_moe.controlplane.operations import ControlState, Kind, Operation, Stage, Target
from ray_moe.errors import ConfigError


@dataclass(frozen=True)
class Asker:
    """Who asks, why, and when (seconds of the wall clock): what `history` shows."""

    who: str
    why: str
    when: float


def rebalance(state: ControlState, asker: Asker, target: Target) -> tuple[ControlState, Operation]:
    """Another placement over the same ranks."""
    return _add(state, Kind.REBALANCE, Stage.QUEUED, asker, target=target)


def scale(
    state: ControlState,
    asker: Asker,
    serving: Collection[int],
    wanted: int,
    bounds: tuple[int, int],
    loads_LE: Loads | None = None,
) -> tuple[ControlState, Operation | None]:
    """Grow or shrink to `wanted` ranks, those included that are coming or going already; None when it comes to that.

    A shrink takes the newest ranks; `drain` names others. Raises `ConfigError` for a number outside `bounds`.
    """
    fewest, most = bounds
    if not fewest <= wanted <= most:
        raise ConfigError(f"peers must be in [{fewest}, {most}], found {wanted}")
    after = expected_ranks(state, serving)
    if wanted == len(after):
        return state, None
    if wanted < len(after):
        return drain(state, asker, serving, after[wanted:], fewest, loads_LE)
    first = max(state.next_rank, max((*serving, *after), default=-1) + 1)
    ranks = tuple(range(first, first + wanted - len(after)))
    state = replace(state, next_rank=ranks[-1] + 1)
    return _add(state, Kind.GROW, Stage.PREPARING, asker, ranks=ranks, loads_LE=loads_LE)


def drain(
    state: ControlState,
    asker: Asker,
    serving: Collection[int],
    ranks: Collection[int],
    fewest: int,
    loads_LE: Loads | None = None,
) -> tuple[ControlState, Operation]:
    """Take the named ranks out. Raises `ConfigError` for one that is not there or is leaving already, and where fewer
    than `fewest` would stay."""
    after = expected_ranks(state, serving)
    for rank in ranks:
        if rank not in after:
            raise ConfigError(f"rank must be one of {list(after)}, found {rank}")
    if not ranks or len(set(ranks)) != len(ranks):
        raise ConfigError(f"ranks must be distinct and not empty, found {list(ranks)}")
    if len(after) - len(ranks) < fewest:
        raise ConfigError(f"at least {fewest} of the ranks {list(after)} must stay, asked to drain {list(ranks)}")
    return _add(state, Kind.SHRINK, Stage.QUEUED, asker, ranks=tuple(ranks), at_least=fewest, loads_LE=loads_LE)


def expected_ranks(state: ControlState, serving: Collection[int]) -> tuple[int, ...]:
    """The ranks once everything that was asked for is done, oldest first."""
    after = sorted(serving)
    for operation in state.operations:
        if operation.stage is Stage.UNDOING:
            continue
        if operation.kind is Kind.GROW:
            after += [rank for rank in operation.ranks if rank not in after]
        elif operation.kind is Kind.SHRINK:
            after = [rank for rank in after if rank not in operation.ranks]
    return tuple(after)


def _add(
    state: ControlState,
    kind: Kind,
    stage: Stage,
    asker: Asker,
    *,
    ranks: tuple[int, ...] = (),
    at_least: int = 1,
    target: Target | None = None,
    loads_LE: Loads | None = None,
) -> tuple[ControlState, Operation]:
    operation = Operation(
        number=state.next_number,
        kind=kind,
        asked_by=asker.who,
        why=asker.why,
        asked_at=asker.when,
        stage=stage,
        ranks=ranks,
        at_least=at_least,
        target=target,
        loads_LE=loads_LE,
        changed_at=asker.when,
    )
    return (
        replace(state, operations=(*state.operations, operation), next_number=state.next_number + 1),
        operation,
    )
