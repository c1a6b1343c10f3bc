"""Transports: how rows reach the owners of their slots and come back (specification 0x03C).

All give the same result: dispatch returns rows source-major, combine returns them in the sender's own order. They
differ in what crosses the group. Letters: N sent rows, R received rows, D hidden, P peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ray_moe.comm.group import ExpertGroup
from ray_moe.errors import ConfigError

CountMatrix = Sequence[Sequence[int]]


class Transport(Protocol):
    """A pair of inverses over one group; `counts_PP[source][destination]` is the matrix that all peers agreed on."""

    name: str
    group: ExpertGroup

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Tensor:
        """Destination-major rows [N, D] to owners; the result [R, D] is source-major. Raises `CollectiveError`."""
        ...

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Tensor:
        """The inverse of `dispatch`: [R, D] source-major back to [N, D]. Raises `CollectiveError`."""
        ...


class AllToAllV:
    """Exactly the useful rows, each to its one owner."""

    name = "all_to_all_v"

    def __init__(self, group: ExpertGroup) -> None:
        self.group = group

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Tensor:
        if _nothing_crosses(counts_PP):
            return rows_ND
        sent, received = _splits(counts_PP, self.group.peer_slot)
        return self.group.all_to_all_v(rows_ND, sent, received)

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Tensor:
        if _nothing_crosses(counts_PP):
            return rows_RD
        sent, received = _splits(counts_PP, self.group.peer_slot)
        return self.group.all_to_all_v(rows_RD, received, sent)


class AllGatherFilter:
    """Every row to every peer in one regular shape; each peer keeps what it owns. For few tokens.

    Rows are padded to the largest peer; padding never acquires identity, it is cut off by the agreed counts.
    """

    name = "all_gather_filter"

    def __init__(self, group: ExpertGroup) -> None:
        self.group = group

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Tensor:
        return self._gather_and_filter(rows_ND, counts_PP)

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Tensor:
        return self._gather_and_filter(rows_RD, tuple(zip(*counts_PP, strict=True)))

    def _gather_and_filter(self, rows: Tensor, counts_PP: CountMatrix) -> Tensor:
        mine = self.group.peer_slot
        if _nothing_crosses(counts_PP):
            return rows
        capacity = max(sum(line) for line in counts_PP)
        padded = rows.new_zeros(capacity, rows.shape[1])
        padded[: rows.shape[0]] = rows
        gathered = self.group.all_gather(padded)
        kept = []
        for peer, line in enumerate(counts_PP):
            start = sum(line[:mine])
            kept.append(gathered[peer, start : start + line[mine]])
        return torch.cat(kept)


_TRANSPORTS: dict[str, type[AllToAllV] | type[AllGatherFilter]] = {
    transport.name: transport for transport in (AllToAllV, AllGatherFilter)
}


def transport_named(name: str, group: ExpertGroup) -> Transport:
    """Choose a transport once, at construction; `ConfigError` lists the names."""
    if name not in _TRANSPORTS:
        raise ConfigError(f"transport must be one of {', '.join(sorted(_TRANSPORTS))}, found {name!r}")
    return _TRANSPORTS[name](group)


def _nothing_crosses(counts_PP: CountMatrix) -> bool:
    """Every row stays with its peer: all know it from the same matrix, so all skip the collective together."""
    return all(sum(line) == line[source] for source, line in enumerate(counts_PP))


def _splits(counts_PP: CountMatrix, peer: int) -> tuple[Sequence[int], Sequence[int]]:
    """(rows I send to each peer, rows I receive from each peer): a row and a column of the matrix."""
    return counts_PP[peer], [line[peer] for line in counts_PP]
