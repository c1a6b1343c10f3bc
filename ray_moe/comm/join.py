"""Which group carries an epoch, and which transport runs over it: chosen once, when a peer joins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from ray_moe.comm.gloo import GlooGroup
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.hierarchical import Hierarchical
from ray_moe.comm.nccl import NcclGroup
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.tcp import TcpGroup
from ray_moe.comm.transports import AllGatherFilter, AllToAllV, Chunked, PaddedAllToAll, Transport
from ray_moe.errors import ConfigError
from ray_moe.identity import GlobalRank
from ray_moe.topology import ProcessGroupSpec, TopologyGroups

if TYPE_CHECKING:
    from ray_moe.comm.window import NodeWindow

_Join = Callable[[ProcessGroupSpec, GlobalRank, StoreAddress, float, torch.device | None], ExpertGroup]
# kind -> (where the rows are that it carries, how to join).
_GROUPS: dict[str, tuple[str, _Join]] = {
    "gloo": ("cpu", lambda spec, rank, store, seconds, device: GlooGroup(spec, rank, store, seconds)),
    "tcp": ("cpu", lambda spec, rank, store, seconds, device: TcpGroup(spec, rank, store, seconds)),
    "nccl": ("cuda", NcclGroup),
}


def join(
    kind: str,
    spec: ProcessGroupSpec,
    rank: GlobalRank,
    store: StoreAddress,
    seconds: float,
    device: torch.device | None = None,
) -> ExpertGroup:
    """Take `rank`'s seat in an epoch; returns when all members have, with `seconds` as every later wait's deadline too.

    A peer that is alone needs no group to carry anything, whatever the `kind`. `device` is where rows are; by default
    the only one of CPU groups, and of others the thread's current one. Raises `ConfigError` listing the kinds and for
    a kind that does not carry rows of the device, `PlacementError` for a rank without a seat, `DeadlineError` or
    `CollectiveError` when the members do not meet.
    """
    if kind not in _GROUPS:
        raise ConfigError(f"group must be one of {', '.join(sorted(_GROUPS))}, found {kind!r}")
    if len(spec) == 1:
        return SoloGroup(spec, rank)
    carries, enter = _GROUPS[kind]
    if device is not None and device.type != carries:
        raise ConfigError(f"group {kind} carries rows between peers on {carries}, found peers on {device.type}")
    return enter(spec, rank, store, seconds, device)


# Over one group each; `hierarchical` needs three.
_OVER_ONE_GROUP: dict[str, Callable[[ExpertGroup], Transport]] = {
    transport.name: transport for transport in (AllToAllV, PaddedAllToAll, AllGatherFilter)
}
FUSED_WINDOW = "fused_window"
TRANSPORTS = (*_OVER_ONE_GROUP, Hierarchical.name, FUSED_WINDOW)


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
    device: torch.device | None = None,
    window: NodeWindow | None = None,
) -> Transport:
    """Join every group that transport `name` needs in this epoch, and the transport over them; `device` as for `join`.

    `chunks` > 1 sends each exchange in that many pieces; `window` is this process's, for the transport over windows.
    Raises `ConfigError` listing the names, `TopologyError` for a
    group that is not among `groups`, and as `join`; groups that were joined by then are closed again.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"transport must be one of {', '.join(TRANSPORTS)}, found {name!r}")
    with ExitStack() as joined:

        def member_of(one: ProcessGroupSpec) -> ExpertGroup:
            group = join(kind, one, rank, store, seconds, device)
            joined.callback(group.close)
            return group

        full = member_of(groups.full)
        if name == Hierarchical.name:
            relays = member_of(groups.relays) if rank in groups.relays else None
            transport: Transport = Hierarchical(full, member_of(groups.local_to(rank)), relays, groups.topology)
        elif name == FUSED_WINDOW:
            transport = _over_windows(full, window, store, seconds)
        else:
            transport = _OVER_ONE_GROUP[name](full)
        joined.pop_all()
    return in_chunks(transport, chunks)


def _over_windows(full: ExpertGroup, window: NodeWindow | None, store: StoreAddress, seconds: float) -> Transport:
    if window is None:
        raise ConfigError(f"transport {FUSED_WINDOW} needs this process's window")
    from ray_moe.comm.window import FusedWindow  # with its launches: not where there is no triton

    return FusedWindow(full, window.join(full.spec, store, seconds))


def in_chunks(transport: Transport, chunks: int) -> Transport:
    """`transport` itself, or its chunked variant. `ConfigError` for fewer than one chunk."""
    if chunks < 1:
        raise ConfigError(f"transport chunks must be >= 1, found {chunks}")
    return transport if chunks == 1 else Chunked(transport, chunks)
