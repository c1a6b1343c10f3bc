"""One connection to each other peer, and the collectives that follow one another on it, numbered.

Every message is a frame: (number of the collective, bytes of payload), then the payload. Peers that run different
collectives, or expect different sizes, are told so instead of waiting for one another. Several collectives may be in
flight: what a connection does not take at once goes out while this peer waits, and what arrives is read in order.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from ray_moe.deadline import Deadline, ready, receive, send
from ray_moe.errors import CollectiveError

_HEADER = struct.Struct("<qq")
# A line of counts is far below this; a longer one is no line of counts.
_LONGEST_LINE = 1 << 26


@dataclass(slots=True)
class _Frame:
    """A frame that is on its way out, or due to come in: the views that are left of it."""

    sequence: int
    size: int
    header: bytearray
    left: list[memoryview]


class Channel:
    """Connections by peer slot. `seconds` is every wait's deadline; errors name `group`, `rank` and `epoch`."""

    def __init__(self, links: Mapping[int, socket.socket], seconds: float, group: str, rank: int, epoch: int) -> None:
        self._links, self._seconds, self._group, self._rank, self._epoch = links, seconds, group, rank, epoch
        self._unsent: dict[int, deque[_Frame]] = {peer: deque() for peer in links}
        self._due: dict[int, deque[_Frame]] = {peer: deque() for peer in links}
        self.sequence = 0

    def submit(self, out: Mapping[int, memoryview], into: Mapping[int, memoryview]) -> int:
        """Start the next collective: `out` goes to its peers as far as they take it, `into` is due from them.

        Returns its number. Waits for nothing once other collectives are in flight.
        """
        self.sequence += 1
        in_flight = any(self._due.values())
        for peer, view in into.items():
            header = bytearray(_HEADER.size)
            self._due[peer].append(_Frame(self.sequence, len(view), header, [memoryview(header), view]))
        for peer, view in out.items():
            frame = [memoryview(_HEADER.pack(self.sequence, len(view))), view]
            # A peer that waits for our earlier frames reads them; one that computes may not, and we must not wait.
            if not self._unsent[peer] and (not in_flight or ready([], [self._links[peer]], 0.0)[1]):
                frame = send(self._links[peer], frame, self._name(peer), self._rank, self._epoch)
            if frame:
                self._unsent[peer].append(_Frame(self.sequence, len(view), bytearray(), frame))
        return self.sequence

    def receive(self, sequence: int) -> None:
        """Wait until every frame that was due up to collective `sequence` is here."""
        deadline = Deadline(self._seconds)
        while any(self._unsent.values()) and any(self._has(self._due[peer], sequence) for peer in self._links):
            self._progress(sequence, deadline)
        for peer, due in self._due.items():
            while self._has(due, sequence):
                self._read(peer)

    def flush(self, sequence: int) -> None:
        """Wait until the connections have taken every frame up to collective `sequence`."""
        deadline = Deadline(self._seconds)
        while any(self._has(unsent, sequence) for unsent in self._unsent.values()):
            self._progress(self.sequence, deadline)

    def line(self, peer: int, sequence: int) -> memoryview:
        """A peer's frame of whatever size, of the collective `sequence`."""
        if any(self._unsent.values()):
            self.flush(self.sequence)  # our own line may wait behind rows that the connections did not take yet
        while self._due[peer]:
            self._read(peer)
        header = bytearray(_HEADER.size)
        self._fill(peer, header)
        found, size = _HEADER.unpack(header)
        if found != sequence or not 0 <= size <= _LONGEST_LINE:
            raise self._mismatch(peer, found, size, sequence, min(max(size, 0), _LONGEST_LINE))
        payload = bytearray(size)
        self._fill(peer, payload)
        return memoryview(payload)

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _progress(self, sequence: int, deadline: Deadline) -> None:
        """One look at who can be written to and read from.

        Both, whichever we wait for: two peers that send more than their connections hold must not wait for one another.
        """
        writing = [peer for peer, unsent in self._unsent.items() if unsent]
        reading = [peer for peer, due in self._due.items() if self._has(due, sequence)]
        links = self._links
        readable, writable = ready([links[peer] for peer in reading], [links[peer] for peer in writing], deadline.left)
        if not readable and not writable:
            raise self._error(f"{', '.join(map(self._name, writing))} did not read within {self._seconds:g} s")
        for peer in writing:
            if links[peer] in writable:
                self._write(peer)
        for peer in reading:
            if links[peer] in readable:
                self._read(peer)

    def _write(self, peer: int) -> None:
        frame = self._unsent[peer][0]
        frame.left = send(self._links[peer], frame.left, self._name(peer), self._rank, self._epoch)
        if not frame.left:
            self._unsent[peer].popleft()

    def _read(self, peer: int) -> None:
        """Receive once into the oldest frame that is due from `peer`."""
        frame = self._due[peer][0]
        frame.left = receive(self._links[peer], frame.left, self._name(peer), self._rank, self._epoch)
        if len(frame.left) > 1:
            return  # the header is not whole yet
        found, size = _HEADER.unpack(frame.header)
        if (found, size) != (frame.sequence, frame.size):
            raise self._mismatch(peer, found, size, frame.sequence, frame.size)
        if not frame.left:
            self._due[peer].popleft()

    def _fill(self, peer: int, buffer: bytearray) -> None:
        views = [memoryview(buffer)] if buffer else []
        while views:
            views = receive(self._links[peer], views, self._name(peer), self._rank, self._epoch)

    @staticmethod
    def _has(frames: deque[_Frame], sequence: int) -> bool:
        return bool(frames) and frames[0].sequence <= sequence

    def _mismatch(self, peer: int, found: int, size: int, sequence: int, expected: int) -> CollectiveError:
        return self._error(
            f"{self._name(peer)} is at collective {found} with {size} bytes, this peer at {sequence} with {expected}"
        )

    def _name(self, peer: int) -> str:
        return f"peer slot {peer} of {self._group}"

    def _error(self, detail: str) -> CollectiveError:
        return CollectiveError(detail, self._rank, self._epoch)
