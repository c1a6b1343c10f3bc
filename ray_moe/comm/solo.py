"""The group of one peer: every collective is the identity, on any device, with nobody to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ray_moe.comm.exchange import Arrived
from ray_moe.errors import CollectiveError, PlacementError
from ray_moe.identity import GlobalRank
from ray_moe.topology import ProcessGroupSpec


@dataclass(frozen=True)
class _Answered:
    lines: Tensor

    def result(self) -> Tensor:
        return self.lines


class SoloGroup:
    """One epoch of a single peer. Raises `PlacementError` for a group of more than one."""

    def __init__(self, spec: ProcessGroupSpec, rank: GlobalRank) -> None:
        if len(spec) != 1:
            raise PlacementError(f"a solo group has one peer, {spec.process_group_id} has {len(spec)}")
        self.spec = spec
        self.peer_slot = spec.peer_slot(rank)
        self.bytes_sent = self.bytes_received = 0
        self._rank, self._closed = rank.value, False

    def gather(self, line: Tensor) -> _Answered:
        return _Answered(self.gather_counts(line))

    def gather_counts(self, line: Tensor) -> Tensor:
        self._require_open()
        return line[None]

    def all_to_all_v(self, rows_ND: Tensor, send_counts_P: Sequence[int], recv_counts_P: Sequence[int]) -> Arrived:
        self._require_open()
        if not sum(send_counts_P) == sum(recv_counts_P) == rows_ND.shape[0]:
            raise CollectiveError(
                f"all-to-all-v of {rows_ND.shape[0]} rows: counts are {list(send_counts_P)} and {list(recv_counts_P)}",
                self._rank,
                self.spec.epoch,
            )
        return Arrived(rows_ND)

    def all_gather(self, rows_ND: Tensor) -> Arrived:
        self._require_open()
        return Arrived(rows_ND[None])

    def reduce_scatter(self, rows_PND: Tensor) -> Arrived:
        self._require_open()
        return Arrived(rows_PND[0])

    def check(self) -> None:
        """There is nobody else."""

    def close(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise CollectiveError("the group is closed", self._rank, self.spec.epoch)
