"""The group of one peer: every collective is the identity, so nothing is copied and nothing waits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ray_moe.errors import CollectiveError
from ray_moe.identity import GlobalRank
from ray_moe.topology import ProcessGroupSpec


class SoloGroup:
    """An epoch with one member. Raises `CollectiveError` where a real group would: after `close`, for split vectors
    that do not fit the rows.
    """

    def __init__(self, spec: ProcessGroupSpec, rank: GlobalRank) -> None:
        if len(spec) != 1:
            raise CollectiveError(f"a group of one peer cannot seat {len(spec)}", rank.value, spec.epoch)
        self.spec = spec
        self.peer_slot = spec.peer_slot(rank)
        self.bytes_sent = 0
        self.bytes_received = 0
        self._rank, self._closed = rank.value, False

    def gather(self, line: Tensor) -> _Arrived:
        return _Arrived(self._open(line).unsqueeze(0))

    def gather_counts(self, line: Tensor) -> Tensor:
        return self._open(line).unsqueeze(0)

    def all_to_all_v(self, rows_ND: Tensor, send_counts_P: Sequence[int], recv_counts_P: Sequence[int]) -> Tensor:
        if not [rows_ND.shape[0]] == list(send_counts_P) == list(recv_counts_P):
            raise CollectiveError(
                f"all-to-all-v of {rows_ND.shape[0]} rows to oneself: sends {send_counts_P}, receives {recv_counts_P}",
                self._rank,
                self.spec.epoch,
            )
        return self._open(rows_ND)

    def all_gather(self, rows_ND: Tensor) -> Tensor:
        return self._open(rows_ND).unsqueeze(0)

    def close(self) -> None:
        self._closed = True

    def _open(self, given: Tensor) -> Tensor:
        if self._closed:
            raise CollectiveError("the group is closed", self._rank, self.spec.epoch)
        return given


class _Arrived:
    """A gather that had nobody to wait for."""

    def __init__(self, lines: Tensor) -> None:
        self._lines = lines

    def result(self) -> Tensor:
        return self._lines
