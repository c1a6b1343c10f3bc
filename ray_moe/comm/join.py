"""Which group carries an epoch: chosen once, when a peer joins."""

from __future__ import annotations

from ray_moe.comm.gloo import GlooGroup
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.tcp import TcpGroup
from ray_moe.errors import ConfigError
from ray_moe.identity import GlobalRank
from ray_moe.topology import ProcessGroupSpec

_GROUPS: dict[str, type[GlooGroup] | type[TcpGroup]] = {"gloo": GlooGroup, "tcp": TcpGroup}


def join(kind: str, spec: ProcessGroupSpec, rank: GlobalRank, store: StoreAddress, seconds: float) -> ExpertGroup:
    """Take `rank`'s seat in an epoch; returns when all members have, with `seconds` as every later wait's deadline too.

    A peer that is alone needs no group to carry anything, whatever the `kind`. Raises `ConfigError` listing the kinds,
    `PlacementError` for a rank without a seat, `DeadlineError` or `CollectiveError` when the members do not meet.
    """
    if kind not in _GROUPS:
        raise ConfigError(f"group must be one of {', '.join(sorted(_GROUPS))}, found {kind!r}")
    if len(spec) == 1:
        return SoloGroup(spec, rank)
    return _GROUPS[kind](spec, rank, store, seconds)
