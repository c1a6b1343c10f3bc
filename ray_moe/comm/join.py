"""Which group carries an epoch, and which transport runs over it: chosen once, when a peer joins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ray_moe.comm.gloo import GlooGroup
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.hierarchical import Hierarchical
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.tcp import TcpGroup
from ray_moe.comm.transports import AllGatherFilter, AllToAllV, Chunked, PaddedAllToAll, Transport
from ray_moe.errors import ConfigError
from ray_moe.identity import GlobalRank
from ray_moe.topology import ProcessGroupSpec, TopologyGroups

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


# Over one group each; `hierarchical` needs three.
_OVER_ONE_GROUP: dict[str, Callable[[ExpertGroup], Transport]] = {
    transport.name: transport for transport in (AllToAllV, PaddedAllToAll, AllGatherFilter)
}
TRANSPORTS = (*_OVER_ONE_GROUP, Hierarchical.name)


def transport_named(name: str, group: ExpertGroup, *, chunks: int = 1) -> Transport:
    """A transport over one group that is joined already; `ConfigError` lists the names."""
    if name not in _OVER_ONE_GROUP:
        raise ConfigError(f"transport over one group must be one of {', '.join(_OVER_ONE_GROUP)}, found {name!r}")
    return in_chunks(_OVER_ONE_GROUP[name](group), chunks)


def join_transport(
    kind: str,
    name: str,
    groups: TopologyGroups,
    rank: GlobalRank,
    store: StoreAddress,
    seconds: float,
    *,
    chunks: int = 1,
) -> Transport:
    """Join every group that transport `name` needs in this epoch, and the transport over them.

    `chunks` > 1 sends each exchange in that many pieces. Raises `ConfigError` listing the names, `TopologyError` for a
    group that is not among `groups`, and as `join`; groups that were joined by then are closed again.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"transport must be one of {', '.join(TRANSPORTS)}, found {name!r}")
    with ExitStack() as joined:

        def member_of(one: ProcessGroupSpec) -> ExpertGroup:
            group = join(kind, one, rank, store, seconds)
            joined.callback(group.close)
            return group

        full = member_of(groups.full)
        if name == Hierarchical.name:
            relays = member_of(groups.relays) if rank in groups.relays else None
            transport: Transport = Hierarchical(full, member_of(groups.local_to(rank)), relays, groups.topology)
        else:
            transport = _OVER_ONE_GROUP[name](full)
        joined.pop_all()
    return in_chunks(transport, chunks)


def in_chunks(transport: Transport, chunks: int) -> Transport:
    """`transport` itself, or its chunked variant. `ConfigError` for fewer than one chunk."""
    if chunks < 1:
        raise ConfigError(f"transport chunks must be >= 1, found {chunks}")
    return transport if chunks == 1 else Chunked(transport, chunks)
