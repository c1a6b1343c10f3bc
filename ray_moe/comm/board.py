"""Lines between the peers of one node through shared memory: without a network, and hardly ever a system call.

A peer writes its line into a ring of its own: numbers first, their checksum, then the sequence number that makes it
valid. Readers look until they see the number that they wait for, and take the line when the checksum fits, so that no
half-written line is ever read. Each peer holds a lock on the file; the system drops it when the process ends, however
it ends, which is how the others know without asking. Letters: P peers, M numbers of a line.

    word 0 ...                one block for each peer: its process, and whether it has closed the epoch
    then                      one ring for each channel and peer, of entries [sequence, M, checksum, numbers]
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import struct
import threading
import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from ray_moe.comm.frames import require_equal_lengths
from ray_moe.deadline import Deadline, poll
from ray_moe.errors import CollectiveError
from ray_moe.topology import ProcessGroupSpec

_FOLDER = "/dev/shm"
_CONTROL, _COUNTS = range(2)
_CHANNELS = 2
_PID, _CLOSED = range(2)
_BLOCK = 8  # words, a cache line: peers write their own only
_SEQUENCE, _LENGTH, _CHECKSUM, _NUMBERS = range(4)
# Words of one entry; pages that no line has reached take no memory.
_ENTRY = 8192
LONGEST_LINE = _ENTRY - _NUMBERS
# A peer with at most so many results outstanding has read what lies two times as many back, and so have all others:
# for it to have read the newest result that it has, they had written that line. Hence a writer never waits for readers.
IN_FLIGHT = 4
_RING = 2 * IN_FLIGHT
# A peer that is on time answers within the first; the second is how often a late one's process is looked at.
_SPIN_S, _LOOK_S = 100e-6, 2e-3
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process


class Board:
    """One epoch's board, mapped by one peer. Tickets belong to the thread that owns the step; `lost` and `close` may be
    called on any."""

    def __init__(self, file: int, spec: ProcessGroupSpec, peer_slot: int, seconds: float) -> None:
        self._spec, self._peer_slot, self._seconds = spec, peer_slot, seconds
        self._file = file
        self._bytes = memoryview(mmap.mmap(file, _size(len(spec))))
        self._words = self._bytes.cast("q")
        self._sequence = [0] * _CHANNELS
        self._unread: list[dict[int, None]] = [{} for _ in range(_CHANNELS)]
        self._guard = threading.Lock()
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer_slot)
        self._words[_BLOCK * peer_slot + _PID] = os.getpid()

    @staticmethod
    def join(spec: ProcessGroupSpec, peer_slot: int, store: dist.Store, seconds: float) -> Board | None:
        """The board of an epoch whose members meet in `store`; returns when all of them have come.

        None, for all alike, where one of them cannot map what the first one made: it is on another node. The file has
        no name any more by then. Raises `CollectiveError` when a member does not come within `seconds`.
        """
        path, board = "", None
        try:
            if peer_slot == 0:
                path = _create(spec)
                store.set("board", path)
            board = _open(store.get("board").decode(), spec, peer_slot, seconds)
            store.set(f"board-{peer_slot}", str(int(board is not None)))
            answers = [store.get(f"board-{peer}") for peer in range(len(spec))]
        except (OSError, dist.DistError) as error:
            if board is not None:
                board.close()
            raise CollectiveError(f"joining the board: {error}", spec.peers[peer_slot].value, spec.epoch) from error
        finally:
            if path:
                os.unlink(path)
        if board is not None and b"0" in answers:
            board.close()
            return None
        return board

    def gather(self, line: Tensor) -> BoardTicket:
        """Submit this peer's int64 line [M] for the step agreement; waits for nobody.

        Raises `CollectiveError` for more than `IN_FLIGHT` results outstanding and for a line of more than
        `LONGEST_LINE` numbers.
        """
        return BoardTicket(self, _CONTROL, self.submit(_CONTROL, line))

    def gather_counts(self, line: Tensor) -> Tensor:
        """The same for the count exchange, waited for, in an order of its own. [P, M]."""
        return self.collect(_COUNTS, self.submit(_COUNTS, line))

    def lost(self) -> str | None:
        """The first peer that has died or closed the epoch, in words; None while all are there."""
        with self._guard:
            if self._file < 0:
                return "the group is closed"
            for peer in range(len(self._spec)):
                if peer == self._peer_slot:
                    continue
                if self._words[_BLOCK * peer + _CLOSED]:
                    return f"{self._name(peer)} has closed the epoch"
                if not self._holds_lock(peer):
                    return f"the process of {self._name(peer)} has ended"
        return None

    def close(self) -> None:
        """Leave; peers that wait for a line of ours get an error. May be called twice, and beside a ticket's wait."""
        with self._guard:
            if self._file >= 0:
                self._words[_BLOCK * self._peer_slot + _CLOSED] = 1
                os.close(self._file)
                self._file = -1  # the memory stays until nobody looks at it

    # ---- one line ----

    def submit(self, channel: int, line: Tensor) -> int:
        """Write a line; its number. Raises as `gather`."""
        numbers = line.numel()
        sequence = self._sequence[channel] + 1
        unread = self._unread[channel]
        if self._file < 0:
            raise self._error("the group is closed")
        if numbers > LONGEST_LINE:
            raise self._error(f"a line has at most {LONGEST_LINE} numbers, found {numbers}")
        if unread and sequence - next(iter(unread)) >= IN_FLIGHT:
            raise self._error(f"at most {IN_FLIGHT} lines may be in flight, found another one")
        payload = line.contiguous().numpy().data.cast("B")
        at = self._entry(channel, self._peer_slot, sequence)
        begin = 8 * (at + _NUMBERS)
        self._bytes[begin : begin + len(payload)] = payload
        self._words[at + _LENGTH] = numbers
        self._words[at + _CHECKSUM] = zlib.crc32(payload, sequence)
        self._words[at + _SEQUENCE] = sequence
        self._sequence[channel] = sequence
        unread[sequence] = None
        return sequence

    def collect(self, channel: int, sequence: int) -> Tensor:
        """The lines of all peers [P, M], copied. Raises as `Ticket.result`, `CountMismatchError` for several M."""
        deadline = Deadline(self._seconds)
        lines = [self._line(channel, peer, sequence, deadline) for peer in range(len(self._spec))]
        del self._unread[channel][sequence]
        lengths = [len(line) // 8 for line in lines]
        require_equal_lengths(lengths, self._rank, self._spec.epoch)
        return torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.int64).view(len(lines), -1)

    def _line(self, channel: int, peer: int, sequence: int, deadline: Deadline) -> bytes:
        at = self._entry(channel, peer, sequence)
        line = self._read(at, sequence)

        def read() -> bool:
            nonlocal line
            line = self._read(at, sequence)
            return line is not None

        while line is None and not poll(read, min(_LOOK_S, deadline.left), _SPIN_S):
            lost = self.lost()
            if lost is not None and not read():  # what it wrote before it went is there
                raise self._error(lost)
            if deadline.passed:
                raise self._error(f"{self._name(peer)} did not answer within {self._seconds:g} s")
        assert line is not None
        return line

    def _read(self, at: int, sequence: int) -> bytes | None:
        """A line's bytes, once it is whole."""
        if self._words[at + _SEQUENCE] != sequence:
            return None
        numbers = self._words[at + _LENGTH]
        begin = 8 * (at + _NUMBERS)
        line = bytes(self._bytes[begin : begin + 8 * min(max(numbers, 0), LONGEST_LINE)])
        return line if zlib.crc32(line, sequence) == self._words[at + _CHECKSUM] else None

    def _entry(self, channel: int, peer: int, sequence: int) -> int:
        peers = len(self._spec)
        return _BLOCK * peers + ((channel * peers + peer) * _RING + sequence % _RING) * _ENTRY

    def _holds_lock(self, peer: int) -> bool:
        if self._words[_BLOCK * peer + _PID] == os.getpid():
            return True  # a process does not see its own locks
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, peer, 1, 0)
        return bool(_LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)

    @property
    def _rank(self) -> int:
        return self._spec.peers[self._peer_slot].value

    def _name(self, peer: int) -> str:
        return f"peer slot {peer} of {self._spec.process_group_id}"

    def _error(self, detail: str) -> CollectiveError:
        return CollectiveError(detail, self._rank, self._spec.epoch)


class BoardTicket:
    """A gather on its way."""

    __slots__ = ("_board", "_channel", "_sequence")

    def __init__(self, board: Board, channel: int, sequence: int) -> None:
        self._board, self._channel, self._sequence = board, channel, sequence

    def result(self) -> Tensor:
        """As `Ticket.result`: at a peer's death within milliseconds, at its silence by the deadline."""
        return self._board.collect(self._channel, self._sequence)


# ---- joining ----


def _size(peers: int) -> int:
    return 8 * (_BLOCK * peers + _CHANNELS * peers * _RING * _ENTRY)


def _create(spec: ProcessGroupSpec) -> str:
    """A new file of the board's size; its name cannot be another node's."""
    group = re.sub(r"[^A-Za-z0-9.-]", "_", spec.process_group_id.value)
    path = f"{_FOLDER}/ray_moe-{group}-{spec.epoch}-{secrets.token_hex(8)}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(file, _size(len(spec)))
    finally:
        os.close(file)
    return path


def _open(path: str, spec: ProcessGroupSpec, peer_slot: int, seconds: float) -> Board | None:
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None  # another node's
    return Board(file, spec, peer_slot, seconds)
