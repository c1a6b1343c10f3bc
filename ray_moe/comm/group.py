"""The seam between transports and whatever carries bytes: one epoch of an expert-parallel group.

A group lives for one epoch. When a member dies the epoch is broken: every pending and later call raises
`CollectiveError`, the group is closed, and the next epoch is another object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ray_moe.comm.exchange import Exchange
from ray_moe.topology import ProcessGroupSpec


class Ticket(Protocol):
    """A submitted gather. `result` may be called once, on the thread that owns the step."""

    def result(self) -> Tensor:
        """[P, M] lines in peer-slot order. Raises `CollectiveError` when a peer is lost or the deadline passes."""
        ...


class ExpertGroup(Protocol):
    """Collectives of one epoch, all in peer-slot order; peers must call them in the same order.

    `bytes_sent` and `bytes_received` count the payload that crossed to and from other peers, exactly.
    """

    spec: ProcessGroupSpec
    peer_slot: int
    bytes_sent: int
    bytes_received: int

    def gather(self, line: Tensor) -> Ticket:
        """Submit this peer's int64 line [M] for the step agreement; it may be in flight beside any payload collective.

        M is the same on every peer: the record has a fixed size.
        """
        ...

    def gather_counts(self, line: Tensor) -> Tensor:
        """The same for the count exchange, waited for and in order with the payload collectives. [P, M].

        Raises `CountMismatchError` on every peer when their lines differ in length, `CollectiveError`.
        """
        ...

    def all_to_all_v(self, rows_ND: Tensor, send_counts_P: Sequence[int], recv_counts_P: Sequence[int]) -> Exchange:
        """Submit rows to their peers: `rows_ND` is destination-major, the payload [sum(recv_counts), D] source-major.

        Several may be in flight, on every peer in the same order. `rows_ND` must stay as it is until the exchange is
        complete. Peers with a zero count keep their place. Raises `CollectiveError`.
        """
        ...

    def all_gather(self, rows_ND: Tensor) -> Exchange:
        """Submit equally sized rows of all peers; the payload is [P, N, D]. Raises `CollectiveError`."""
        ...

    def reduce_scatter(self, rows_PND: Tensor) -> Exchange:
        """Submit rows [P, N, D] for every peer; the payload [N, D] is the sum of all peers' rows for this one.

        Raises `CollectiveError`.
        """
        ...

    def check(self) -> None:
        """`CollectiveError` when the epoch has broken: asked when results are complete, before they are given away.

        Waits for nothing. On a device that goes on with rows which never came, nothing else would tell.
        """
        ...

    def close(self) -> None:
        """Drop the epoch; peers that still wait in it get an error at once. May be called twice."""
        ...
