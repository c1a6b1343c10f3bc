"""The CPU group by default: a mesh of plain TCP connections, driven by the thread that computes.

A collective of a few kilobytes between processes that share cores costs what its thread switches cost. Gloo hands each
operation to a worker and an event thread; here the engine's own thread sends to every peer and then receives from every
peer (measured for four processes on two cores: 0.09 against 1.2 ms). Two connections per pair of peers, so that the
step agreement may be in flight beside the layers' exchanges without an order between them.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ray_moe.comm.channel import Channel
from ray_moe.comm.exchange import Exchange, WaitedExchange, exchanged_sums
from ray_moe.comm.frames import require_equal_lengths
from ray_moe.comm.rendezvous import StoreAddress, connect
from ray_moe.deadline import Deadline, receive
from ray_moe.errors import CollectiveError
from ray_moe.identity import GlobalRank
from ray_moe.topology import ProcessGroupSpec

_HELLO = struct.Struct("<32sqq")
_PAYLOAD, _CONTROL = 0, 1
# A member says its hello with its first packet; who is silent for longer is none.
_HELLO_S = 5.0


class TcpGroup:
    """One epoch over TCP. Joining blocks until all peers have joined or `seconds` have passed, the deadline of every
    later collective too.

    Raises `PlacementError` when `rank` has no seat, `DeadlineError` when the store does not answer, `CollectiveError`
    when a peer does not come.
    """

    def __init__(self, spec: ProcessGroupSpec, rank: GlobalRank, store: StoreAddress, seconds: float) -> None:
        self.spec = spec
        self.peer_slot = spec.peer_slot(rank)
        self.bytes_sent = 0
        self.bytes_received = 0
        self._rank, self._seconds = rank.value, seconds
        self._others = [slot for slot in range(len(spec)) if slot != self.peer_slot]
        links = _join(spec, self.peer_slot, store, seconds, self._rank)
        self._channels = [
            Channel(by_peer, seconds, spec.process_group_id.value, self._rank, spec.epoch) for by_peer in links
        ]

    def gather(self, line: Tensor) -> _TcpTicket:
        """Sends at once; the answers wait in the connections until `result`."""
        return _TcpTicket(self, self._begin(_CONTROL, line), line)

    def gather_counts(self, line: Tensor) -> Tensor:
        return self.collect(_PAYLOAD, self._begin(_PAYLOAD, line), line)

    def collect(self, number: int, sequence: int, line: Tensor) -> Tensor:
        """The lines of all peers [P, M] of one gather; any of them may turn out to have another length than ours."""
        channel = self._open(number)
        lines = line.new_empty(len(self.spec), line.numel())
        lines[self.peer_slot] = line
        lengths = [line.numel()] * len(self.spec)
        for peer in self._others:
            frame = channel.line(peer, sequence)
            lengths[peer] = len(frame) // line.element_size()
            if lengths[peer] == line.numel():
                bytes_of(lines[peer])[:] = frame
        require_equal_lengths(lengths, self._rank, self.spec.epoch)
        return lines

    def all_to_all_v(self, rows_ND: Tensor, send_counts_P: Sequence[int], recv_counts_P: Sequence[int]) -> Exchange:
        if sum(send_counts_P) != rows_ND.shape[0]:
            raise CollectiveError(
                f"all-to-all-v of {rows_ND.shape[0]} rows: the send counts {list(send_counts_P)} sum to "
                f"{sum(send_counts_P)}",
                self._rank,
                self.spec.epoch,
            )
        out = rows_ND.new_empty(sum(recv_counts_P), rows_ND.shape[1])
        sent, received = rows_ND.contiguous().split(list(send_counts_P)), out.split(list(recv_counts_P))
        received[self.peer_slot].copy_(sent[self.peer_slot])
        # Both sides know the counts: a pair without rows exchanges nothing at all.
        return self._submit(
            out,
            {peer: bytes_of(sent[peer]) for peer in self._others if send_counts_P[peer]},
            {peer: bytes_of(received[peer]) for peer in self._others if recv_counts_P[peer]},
        )

    def all_gather(self, rows_ND: Tensor) -> Exchange:
        out = rows_ND.new_empty(len(self.spec), *rows_ND.shape)
        out[self.peer_slot] = rows_ND
        mine = bytes_of(rows_ND.contiguous())
        return self._submit(
            out, dict.fromkeys(self._others, mine), {peer: bytes_of(out[peer]) for peer in self._others}
        )

    def reduce_scatter(self, rows_PND: Tensor) -> Exchange:
        return exchanged_sums(rows_PND, self.all_to_all_v)

    def check(self) -> None:
        """A payload that is here has come whole: what broke has been raised."""

    def lost(self) -> str | None:
        """None: a connection tells of its peer's end when it is read, and not before."""
        return None

    def close(self) -> None:
        """Drop the epoch: peers that wait in it see the connections end at once."""
        channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _begin(self, number: int, line: Tensor) -> int:
        # Lines always fit: a peer is at most one collective ahead, and the connections hold many lines.
        return self._open(number).submit(dict.fromkeys(self._others, bytes_of(line)), {})

    def _submit(self, out: Tensor, sent: Mapping[int, memoryview], received: Mapping[int, memoryview]) -> Exchange:
        channel = self._open(_PAYLOAD)
        sequence = channel.submit(sent, received)
        self.bytes_sent += sum(map(len, sent.values()))
        self.bytes_received += sum(map(len, received.values()))

        def arrive() -> Tensor:
            self._open(_PAYLOAD).receive(sequence)
            return out

        return WaitedExchange(arrive, lambda: self._open(_PAYLOAD).flush(sequence))

    def _open(self, number: int) -> Channel:
        if not self._channels:
            raise CollectiveError("the group is closed", self._rank, self.spec.epoch)
        return self._channels[number]


class _TcpTicket:
    """A gather on its way."""

    def __init__(self, group: TcpGroup, sequence: int, line: Tensor) -> None:
        self._group, self._sequence, self._line = group, sequence, line

    def result(self) -> Tensor:
        return self._group.collect(_CONTROL, self._sequence, self._line)


# ---- joining ----


def _join(
    spec: ProcessGroupSpec, mine: int, address: StoreAddress, seconds: float, rank: int
) -> list[dict[int, socket.socket]]:
    """Connections by channel and peer slot. Lower slots listen, higher ones call and prove that they know the epoch."""
    deadline = Deadline(seconds)
    store = connect(address, f"{spec.process_group_id}/epoch-{spec.epoch}", seconds)
    links: list[dict[int, socket.socket]] = [{}, {}]
    try:
        with socket.create_server((_own_address(address), 0), backlog=2 * len(spec)) as listener:
            host, port = listener.getsockname()[:2]
            store.set(f"address-{mine}", f"{host} {port}")
            if mine == 0:
                store.set("secret", secrets.token_hex(16))
            secret = store.get("secret")
            for peer in range(mine):
                there, at = store.get(f"address-{peer}").decode().split()
                for channel in (_PAYLOAD, _CONTROL):
                    link = socket.create_connection((there, int(at)), timeout=deadline.left + 0.1)
                    link.sendall(_HELLO.pack(secret, mine, channel))
                    links[channel][peer] = _tuned(link, seconds)
            while sum(map(len, links)) < 2 * (len(spec) - 1):
                listener.settimeout(deadline.left + 0.1)
                link, _ = listener.accept()
                known, peer, channel = _hello(link, min(deadline.left, _HELLO_S) + 0.1)
                if not secrets.compare_digest(known, secret) or peer not in range(mine + 1, len(spec)):
                    link.close()  # a stranger
                    continue
                links[channel][peer] = _tuned(link, seconds)
    except (OSError, dist.DistError, CollectiveError) as error:
        for link in (link for by_peer in links for link in by_peer.values()):
            link.close()
        raise CollectiveError(f"joining the group: {error}", rank, spec.epoch) from error
    return links


def _hello(link: socket.socket, seconds: float) -> tuple[bytes, int, int]:
    """Secret, peer slot and channel of whoever calls; a secret that fits nobody when it says nothing in time."""
    link.settimeout(seconds)
    hello = bytearray(_HELLO.size)
    views = [memoryview(hello)]
    try:
        while views:
            views = receive(link, views, "a caller", -1, -1)
    except CollectiveError:
        return b"", -1, -1
    secret, peer, channel = _HELLO.unpack(hello)
    return secret, peer, channel


def _own_address(store: StoreAddress) -> str:
    """This host's address on the way to the store: where its peers can reach it too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))
        return str(probe.getsockname()[0])


def _tuned(link: socket.socket, seconds: float) -> socket.socket:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.settimeout(seconds)
    return link


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor: what is received into it is in the tensor."""
    view: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return view
