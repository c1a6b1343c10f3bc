"""Transports: how rows reach the owners of their slots and come back (specification 0x03C).

All give the same result: dispatch returns rows source-major, combine returns them in the sender's own order. They
differ in what crosses the group, and `link_rows` says exactly what that is. Letters: N sent rows, R received rows,
D row width, P peers, C capacity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from ray_moe.comm.exchange import Arrived, Exchange, ExchangeState, StagedExchange, furthest_behind
from ray_moe.comm.group import ExpertGroup
from ray_moe.errors import RunnerError
from ray_moe.evidence import RowSlots

CountMatrix = Sequence[Sequence[int]]
# Index of a part, of how many.
Part = tuple[int, int]
_Move = Callable[[Tensor, CountMatrix], Exchange]


@dataclass(frozen=True)
class LinkRows:
    """Row slots that one direction of an exchange puts on this peer's links.

    `useful_*` are routed rows that leave for, or come from, their other end; the rest of `sent` and `received` is
    padding, rows for others, or rows relayed for others.
    """

    sent: RowSlots
    received: RowSlots
    useful_sent: RowSlots
    useful_received: RowSlots

    @staticmethod
    def of(sent: int, received: int, counts_PP: CountMatrix, peer_slot: int) -> LinkRows:
        """Rows on the links of the peer in `peer_slot`; what is useful of them follows from the counts."""
        kept = counts_PP[peer_slot][peer_slot]
        return LinkRows(
            RowSlots(sent),
            RowSlots(received),
            useful_sent=RowSlots(sum(counts_PP[peer_slot]) - kept),
            useful_received=RowSlots(sum(line[peer_slot] for line in counts_PP) - kept),
        )

    @staticmethod
    def total(parts: Iterable[LinkRows]) -> LinkRows:
        """Several exchanges together."""
        sums = {name: RowSlots(0) for name in ("sent", "received", "useful_sent", "useful_received")}
        for part in parts:
            sums = {name: so_far + getattr(part, name) for name, so_far in sums.items()}
        return LinkRows(**sums)


class Transport(Protocol):
    """A pair of inverses over one group; `counts_PP[source][destination]` is the matrix that all peers agreed on."""

    name: str
    group: ExpertGroup

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Exchange:
        """Submit destination-major rows [N, D] to owners; the payload [R, D] is source-major. `CollectiveError`."""
        ...

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Exchange:
        """The inverse of `dispatch`: [R, D] source-major back to [N, D]. `CollectiveError`."""
        ...

    def link_rows(self, counts_PP: CountMatrix) -> LinkRows:
        """What `dispatch` moves over this peer's links; of the transposed matrix, what `combine` moves."""
        ...

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Payload bytes (sent, received) that the transport's groups have counted so far."""
        ...

    def check(self) -> None:
        """`CollectiveError` when the epoch has broken, for whoever is about to give results away; waits for nothing."""
        ...

    def leave(self) -> None:
        """Behind the epoch's last unit, where all members go on to the next epoch: what others may still read here
        is left as it is until they have."""
        ...

    def close(self) -> None:
        """Drop every group of the transport. May be called twice."""
        ...


class _OverOneGroup(ABC):
    """A transport whose two directions are one operation, of a matrix and of its transpose."""

    def __init__(self, group: ExpertGroup) -> None:
        self.group = group

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Exchange:
        return Arrived(rows_ND) if nothing_crosses(counts_PP) else self._move(rows_ND, counts_PP)

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Exchange:
        return Arrived(rows_RD) if nothing_crosses(counts_PP) else self._move(rows_RD, transposed(counts_PP))

    def link_rows(self, counts_PP: CountMatrix) -> LinkRows:
        sent, received = (0, 0) if nothing_crosses(counts_PP) else self._on_links(counts_PP)
        return LinkRows.of(sent, received, counts_PP, self.group.peer_slot)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        return self.group.bytes_sent, self.group.bytes_received

    def check(self) -> None:
        self.group.check()

    def leave(self) -> None:  # noqa: B027 - here it is nothing: nobody reads what he was not sent
        """See `Transport.leave`."""

    def close(self) -> None:
        self.group.close()

    @abstractmethod
    def _move(self, rows: Tensor, counts_PP: CountMatrix) -> Exchange:
        """Rows in destination-major order to their destinations, source-major there."""

    @abstractmethod
    def _on_links(self, counts_PP: CountMatrix) -> tuple[int, int]:
        """Row slots that `_move` sends to, and receives from, other peers."""


class AllToAllV(_OverOneGroup):
    """Exactly the useful rows, each to its one owner."""

    name = "all_to_all_v"

    def _move(self, rows: Tensor, counts_PP: CountMatrix) -> Exchange:
        mine = self.group.peer_slot
        return self.group.all_to_all_v(rows, counts_PP[mine], [line[mine] for line in counts_PP])

    def _on_links(self, counts_PP: CountMatrix) -> tuple[int, int]:
        mine = self.group.peer_slot
        kept = counts_PP[mine][mine]
        return sum(counts_PP[mine]) - kept, sum(line[mine] for line in counts_PP) - kept


class PaddedAllToAll(_OverOneGroup):
    """Every pair of peers exchanges the same number of row slots: regular, and fit for a fixed-shape executable.

    `capacity` is that number; None takes the fullest pair of each call. Filler rows are zero, belong to nobody, and are
    cut off by the agreed counts. Raises `RunnerError` (`pair_capacity_exceeded`) rather than leave a row behind.
    """

    name = "padded_all_to_all"

    def __init__(self, group: ExpertGroup, capacity: int | None = None) -> None:
        super().__init__(group)
        self.capacity = capacity

    def _move(self, rows: Tensor, counts_PP: CountMatrix) -> Exchange:
        mine, peers = self.group.peer_slot, len(counts_PP)
        capacity = self._capacity(counts_PP)
        sent = padded_positions(counts_PP[mine], capacity, rows.device)
        kept = padded_positions([line[mine] for line in counts_PP], capacity, rows.device)
        padded = rows.new_zeros(peers * capacity, rows.shape[1]).index_copy_(0, sent, rows)
        slots = [capacity] * peers
        return StagedExchange(
            padded, [lambda slab: self.group.all_to_all_v(slab, slots, slots)], lambda got: got.index_select(0, kept)
        )

    def _on_links(self, counts_PP: CountMatrix) -> tuple[int, int]:
        slots = self._capacity(counts_PP) * (len(counts_PP) - 1)
        return slots, slots

    def _capacity(self, counts_PP: CountMatrix) -> int:
        fullest = max(max(line) for line in counts_PP)
        if self.capacity is None:
            return fullest
        if fullest > self.capacity:
            raise RunnerError(
                "pair_capacity_exceeded", f"a pair of peers exchanges {fullest} rows, its capacity is {self.capacity}"
            )
        return self.capacity


class AllGatherFilter(_OverOneGroup):
    """Every row to every peer in one regular shape; each peer keeps what it owns. For few tokens.

    Rows are padded to the largest peer; padding never acquires identity, it is cut off by the agreed counts. Where the
    peer that receives most receives less than the one that sends most sends (the way back from a busy owner), rows are
    summed into their places instead, by a reduce-scatter: each has one peer that has it, and zeros from the others.
    """

    name = "all_gather_filter"

    def _move(self, rows: Tensor, counts_PP: CountMatrix) -> Exchange:
        sent, received = _fullest(counts_PP)
        if received < sent:
            return self._scatter(rows, counts_PP, received)
        padded = rows.new_zeros(sent, rows.shape[1])
        padded[: rows.shape[0]] = rows
        return StagedExchange(padded, [self.group.all_gather], lambda gathered: self._filter(gathered, counts_PP))

    def _scatter(self, rows: Tensor, counts_PP: CountMatrix, capacity: int) -> Exchange:
        """`capacity` places for each destination, in which rows lie source-major."""
        mine, peers = self.group.peer_slot, len(counts_PP)
        starts = [peer * capacity + sum(line[peer] for line in counts_PP[:mine]) for peer in range(peers)]
        places = runs(starts, counts_PP[mine], rows.device)
        slab = rows.new_zeros(peers * capacity, rows.shape[1]).index_copy_(0, places, rows)
        # As integers, rows of every dtype come out bit for bit.
        words_PCW = slab.view(_words_of(slab)).view(peers, capacity, -1)
        received = sum(line[mine] for line in counts_PP)
        return StagedExchange(words_PCW, [self.group.reduce_scatter], lambda summed: summed.view(rows.dtype)[:received])

    def _filter(self, gathered_PCD: Tensor, counts_PP: CountMatrix) -> Tensor:
        mine = self.group.peer_slot
        starts = [sum(line[:mine]) for line in counts_PP]
        return torch.cat(
            [
                rows_CD[start : start + line[mine]]
                for rows_CD, start, line in zip(gathered_PCD, starts, counts_PP, strict=True)
            ]
        )

    def _on_links(self, counts_PP: CountMatrix) -> tuple[int, int]:
        slots = min(_fullest(counts_PP)) * (len(counts_PP) - 1)
        return slots, slots


class Chunked:
    """Any transport in `chunks` exchanges, all in flight at once, each stage of one beside the next stage of another.

    A chunk is a run of every pair's rows, so that both ends know its counts from the whole matrix.
    """

    def __init__(self, inner: Transport, chunks: int) -> None:
        self.name, self.group = f"chunked_{inner.name}", inner.group
        self._inner, self._chunks = inner, chunks

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Exchange:
        return self._move(self._inner.dispatch, rows_ND, counts_PP, counts_PP)

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Exchange:
        return self._move(self._inner.combine, rows_RD, counts_PP, transposed(counts_PP))

    def _move(self, move: _Move, rows: Tensor, counts_PP: CountMatrix, flow_PP: CountMatrix) -> Exchange:
        """`flow_PP` is the matrix as this direction flows: what I send is a row of it, what I receive a column."""
        mine = self.group.peer_slot
        sent, received = flow_PP[mine], [line[mine] for line in flow_PP]
        exchanges, positions = [], []
        for part, piece in self._parts(counts_PP):
            exchanges.append(move(rows.index_select(0, chunk_positions(sent, part, rows.device)), piece))
            positions.append(chunk_positions(received, part, rows.device))
        return _ChunkedExchange(exchanges, positions)

    def link_rows(self, counts_PP: CountMatrix) -> LinkRows:
        return LinkRows.total(self._inner.link_rows(piece) for _, piece in self._parts(counts_PP))

    @property
    def bytes_moved(self) -> tuple[int, int]:
        return self._inner.bytes_moved

    def check(self) -> None:
        self._inner.check()

    def leave(self) -> None:
        self._inner.leave()

    def close(self) -> None:
        self._inner.close()

    def _parts(self, counts_PP: CountMatrix) -> list[tuple[Part, CountMatrix]]:
        parts = [(index, self._chunks) for index in range(self._chunks)]
        return [(part, chunk_counts(counts_PP, part)) for part in parts]


class _ChunkedExchange:
    """Exchanges of one whole; `positions` say where each one's rows belong."""

    __slots__ = ("_exchanges", "_positions", "_rows")

    def __init__(self, exchanges: Sequence[Exchange], positions: Sequence[Tensor]) -> None:
        self._exchanges, self._positions = exchanges, positions
        self._rows: Tensor | None = None

    @property
    def state(self) -> ExchangeState:
        return furthest_behind(self._exchanges)

    def proceed(self) -> bool:
        proceeding = [exchange.proceed() for exchange in self._exchanges]  # every one, not only the first that can
        return any(proceeding)

    def payload(self) -> Tensor:
        if self._rows is None:
            while self.proceed():
                pass
            pieces = [exchange.payload() for exchange in self._exchanges]
            whole = pieces[0].new_empty(sum(map(len, pieces)), pieces[0].shape[1])
            for piece, positions in zip(pieces, self._positions, strict=True):
                whole.index_copy_(0, positions, piece)
            self._rows = whole
        return self._rows

    def complete(self) -> None:
        self.payload()
        for exchange in self._exchanges:
            exchange.complete()


def nothing_crosses(counts_PP: CountMatrix) -> bool:
    """Every row stays with its peer: all know it from the same matrix, so all skip the collective together."""
    return all(sum(line) == line[source] for source, line in enumerate(counts_PP))


def transposed(counts_PP: CountMatrix) -> CountMatrix:
    """What the way back moves."""
    return tuple(zip(*counts_PP, strict=True))


def padded_positions(counts_P: Sequence[int], capacity: int, device: torch.device) -> Tensor:
    """Where consecutive runs of rows lie when each run has room for `capacity`: ([2, 0, 1], 2) -> [0, 1, 4]."""
    starts = [peer * capacity for peer in range(len(counts_P))]
    return runs(starts, counts_P, device)


def chunk_span(rows: int, part: Part) -> tuple[int, int]:
    """Which of consecutive rows are one part: those of n rows differ by one at most and cover all of them."""
    index, parts = part
    return rows * index // parts, rows * (index + 1) // parts


def chunk_counts(counts_PP: CountMatrix, part: Part) -> tuple[tuple[int, ...], ...]:
    """One part of every pair's rows."""
    spans = [[chunk_span(rows, part) for rows in line] for line in counts_PP]
    return tuple(tuple(end - start for start, end in line) for line in spans)


def chunk_positions(counts_P: Sequence[int], part: Part, device: torch.device) -> Tensor:
    """Where one part's rows lie among consecutive runs: of runs [3, 2] and two parts, [0, 3] and [1, 2, 4]."""
    spans = [chunk_span(rows, part) for rows in counts_P]
    starts = [at + start for at, (start, _) in zip(accumulate(counts_P, initial=0), spans, strict=False)]
    return runs(starts, [end - start for start, end in spans], device)


def runs(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Consecutive numbers from each start, written on the device: ([4, 0], [2, 1]) -> [4, 5, 0]."""
    shifts = [start - before for start, before in zip(starts, accumulate(lengths, initial=0), strict=False)]
    shift, length = uploaded([shifts, lengths], device)
    numbers = shift.repeat_interleave(length, output_size=sum(lengths))
    return numbers.add_(torch.arange(numbers.numel(), device=device))


def uploaded(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 on the device; the host does not wait for the copy."""
    # Pinned memory comes from torch's own cache, which keeps it until the copy has been done.
    there = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)


def _fullest(counts_PP: CountMatrix) -> tuple[int, int]:
    """The rows of the peer that sends most, and of the one that receives most."""
    return max(map(sum, counts_PP)), max(map(sum, transposed(counts_PP)))


def _words_of(rows: Tensor) -> torch.dtype:
    """The widest integers that a row consists of."""
    size = rows.shape[1] * rows.element_size()
    return next(dtype for dtype in (torch.int64, torch.int32, torch.uint8) if size % dtype.itemsize == 0)
