"""The group of GPUs: NCCL through cupy, one communicator for each epoch, one communication stream for each device.

Nothing here makes the host wait for the device but `gather_counts` and `settle`. A collective is submitted behind what
the caller's current stream holds; `payload` puts its end before whatever that stream is given next. So rows are read
and overwritten in stream order, and a host that runs ahead is never held up.

NCCL does not notice that a peer has died: a watch does, and aborts the communicator. Streams go on then, over rows that
never came, so whoever gives results away asks `check` first. Letters: P peers, N rows, D row width, M numbers of a
line.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ray_moe.comm.board import Board
from ray_moe.comm.exchange import Arrived, Exchange, WaitedExchange
from ray_moe.comm.frames import gather_in_frames
from ray_moe.comm.group import Ticket
from ray_moe.comm.rendezvous import StoreAddress, connect
from ray_moe.comm.tcp import TcpGroup
from ray_moe.comm.watch import Watch, relax_captures
from ray_moe.deadline import Deadline, poll, wait_event
from ray_moe.errors import CollectiveError, ConfigError
from ray_moe.identity import GlobalRank
from ray_moe.topology import ProcessGroupSpec

# ncclDataType_t and ncclRedOp_t. What is only moved is moved as bytes.
_BYTES, _SUM = 1, 0
_SUMMED = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
# The device is asked again at once for the first; the second is how often the host sees that the epoch broke meanwhile.
_SPIN_S, _LOOK_S = 200e-6, 2e-3
_ABORT_S = 5.0
# How long a submission that is under way may take to return before its communicator is aborted.
_SUBMIT_S = 0.5
# NCCL's own error is the first; cupy looks its words up, and has none for a remote error or one in progress.
_NCCL_ERRORS = (RuntimeError, KeyError)


class NcclGroup:
    """One epoch over NCCL, on `device` (default: the thread's current one). Joining blocks until all peers have joined
    or `seconds` have passed, the deadline of every later collective too.

    Lines go over a board where all peers are on one node; else the step agreement goes over TCP and counts over the
    devices, and everywhere when `on_board` is False. An exchange is waited for with `payload`, on the stream that its
    rows belong to, before it is dropped. What a graph replays is counted once, when it is captured.

    Raises `PlacementError` when `rank` has no seat, `ConfigError` without CUDA or cupy, `DeadlineError` when the store
    does not answer, `CollectiveError` when a peer does not come.
    """

    def __init__(
        self,
        spec: ProcessGroupSpec,
        rank: GlobalRank,
        store: StoreAddress,
        seconds: float,
        device: torch.device | None = None,
        *,
        on_board: bool = True,
    ) -> None:
        self.spec = spec
        self.peer_slot = spec.peer_slot(rank)
        self.bytes_sent = 0
        self.bytes_received = 0
        self._rank, self._seconds = rank.value, seconds
        self._others = [peer for peer in range(len(spec)) if peer != self.peer_slot]
        self._nccl = _library()
        self.device = _numbered(device)
        self._stream = communication_stream(self.device)
        self._guard, self._submitting = threading.Lock(), threading.Lock()
        self._broken: str | None = None
        self._communicator: Any = None
        members = connect(store, f"{spec.process_group_id}/epoch-{spec.epoch}", seconds)
        board = Board.join(spec, self.peer_slot, members, seconds) if on_board else None
        self._lines: Board | TcpGroup = board if board is not None else TcpGroup(spec, rank, store, seconds)
        self._gather_lines = self._gather_over_devices if board is None else self._gather_on(board)
        self._watch = Watch(seconds, self._lines.lost, self._break, f"nccl-watch-{spec.epoch}")
        try:
            self._communicator = self._join(members)
            self._warm_up()
        except BaseException:
            self.close()
            raise
        self._watch.start()

    # ---- the group's methods ----

    def gather(self, line: Tensor) -> Ticket:
        self._require_open()
        return self._lines.gather(line)

    def gather_counts(self, line: Tensor) -> Tensor:
        """Lines come back on the host, whatever device they were given on."""
        self._require_open()
        return self._gather_lines(line)

    def all_to_all_v(self, rows_ND: Tensor, send_counts_P: Sequence[int], recv_counts_P: Sequence[int]) -> Exchange:
        if sum(send_counts_P) != rows_ND.shape[0]:
            raise self._error(
                f"all-to-all-v of {rows_ND.shape[0]} rows: the send counts {list(send_counts_P)} sum to "
                f"{sum(send_counts_P)}"
            )
        communicator, mine, rows_ND = self._require_open(), self.peer_slot, rows_ND.contiguous()
        out = rows_ND.new_empty(sum(recv_counts_P), rows_ND.shape[1])
        row_bytes = rows_ND.shape[1] * rows_ND.element_size()
        # Both sides know the counts: a pair without rows exchanges nothing at all.
        send_at, recv_at = (list(accumulate(counts, initial=0)) for counts in (send_counts_P, recv_counts_P))

        def pieces(rows: Tensor, at: Sequence[int], counts_P: Sequence[int]) -> list[tuple[int, int, int]]:
            start = rows.data_ptr()
            return [
                (start + at[peer] * row_bytes, counts_P[peer] * row_bytes, peer)
                for peer in self._others
                if counts_P[peer]
            ]

        sent, received = pieces(rows_ND, send_at, send_counts_P), pieces(out, recv_at, recv_counts_P)

        def collective(stream: int) -> None:
            for pointer, size, peer in sent:
                communicator.send(pointer, size, _BYTES, peer, stream)
            for pointer, size, peer in received:
                communicator.recv(pointer, size, _BYTES, peer, stream)

        end = self._submit(collective, "all-to-all-v") if sent or received else None
        out[recv_at[mine] : recv_at[mine + 1]].copy_(rows_ND[send_at[mine] : send_at[mine + 1]])
        self.bytes_sent += sum(size for _, size, _ in sent)
        self.bytes_received += sum(size for _, size, _ in received)
        return self._exchange(end, rows_ND, out)

    def all_gather(self, rows_ND: Tensor) -> Exchange:
        rows_ND = rows_ND.contiguous()
        out = rows_ND.new_empty(len(self.spec), *rows_ND.shape)
        communicator, size = self._require_open(), rows_ND.nbytes
        source, target = rows_ND.data_ptr(), out.data_ptr()

        def collective(stream: int) -> None:
            communicator.allGather(source, target, size, _BYTES, stream)

        self._count(size)
        return self._exchange(self._submit(collective, "all-gather") if size else None, rows_ND, out)

    def reduce_scatter(self, rows_PND: Tensor) -> Exchange:
        if rows_PND.dtype not in _SUMMED:
            raise ConfigError(f"reduce-scatter sums {', '.join(map(str, _SUMMED))}, found {rows_PND.dtype}")
        rows_PND = rows_PND.contiguous()
        out = rows_PND.new_empty(rows_PND.shape[1:])
        communicator, count, kind = self._require_open(), out.numel(), _SUMMED[rows_PND.dtype]
        source, target = rows_PND.data_ptr(), out.data_ptr()

        def collective(stream: int) -> None:
            communicator.reduceScatter(source, target, count, kind, _SUM, stream)

        self._count(out.nbytes)
        return self._exchange(self._submit(collective, "reduce-scatter") if count else None, rows_PND, out)

    def check(self) -> None:
        self._require_open()

    def settle(self) -> None:
        """Wait on the host until the device has done what the current stream holds, and `check`."""
        self._wait(torch.cuda.current_stream(self.device).record_event(), "the work of a step")

    def close(self) -> None:
        """Drop the epoch, without waiting for the others; who waits for us gets an error within a second."""
        self._give_up("the group is closed", orderly=True)

    # ---- collectives ----

    def _submit(self, collective: Callable[[int], None], what: str) -> torch.cuda.Event:
        """Behind what the current stream holds; returns the end."""
        self._stream.wait_event(torch.cuda.current_stream(self.device).record_event())
        try:
            with self._submitting:  # an abort frees what is submitted to
                self._require_open()
                self._nccl.groupStart()
                try:
                    collective(self._stream.cuda_stream)
                finally:
                    self._nccl.groupEnd()
        except _NCCL_ERRORS as error:
            self._break(f"submitting {what}: {error!r}")
            raise self._error(f"submitting {what}: {error!r}") from error
        end = self._stream.record_event()
        if not torch.cuda.is_current_stream_capturing():
            self._watch.submitted(end, what)
        return end

    def _exchange(self, end: torch.cuda.Event | None, rows: Tensor, out: Tensor) -> Exchange:
        """NCCL tells of one moment only: at its end the rows have come and gone. The exchange keeps both alive."""
        if end is None:
            return Arrived(out)
        sent = [rows]

        def arrive() -> Tensor:
            self._require_open()
            torch.cuda.current_stream(self.device).wait_event(end)
            sent.clear()
            return out

        return WaitedExchange(arrive, lambda: None)

    def _count(self, size: int) -> None:
        """Of a collective in which every peer gives and takes `size` bytes to and from each other one."""
        self.bytes_sent += size * len(self._others)
        self.bytes_received += size * len(self._others)

    def _gather_on(self, board: Board) -> Callable[[Tensor], Tensor]:
        return lambda line: board.gather_counts(self._on_host(line, "this peer's count line"))

    def _gather_over_devices(self, line: Tensor) -> Tensor:
        """Lines of several nodes, which no board joins."""

        def gather(frame: Tensor) -> Tensor:
            there = frame.to(self.device).contiguous()
            out, communicator, size = there.new_empty(len(self.spec), there.numel()), self._require_open(), there.nbytes
            end = self._submit(
                lambda stream: communicator.allGather(there.data_ptr(), out.data_ptr(), size, _BYTES, stream), "counts"
            )
            torch.cuda.current_stream(self.device).wait_event(end)
            return self._on_host(out, "the peers' count lines")

        return gather_in_frames(line, gather, self._rank, self.spec.epoch)

    # ---- what the host waits for ----

    def _on_host(self, line: Tensor, what: str) -> Tensor:
        if not line.is_cuda:
            return line
        host = torch.empty(line.shape, dtype=line.dtype, pin_memory=True)
        host.copy_(line, non_blocking=True)
        self._wait(torch.cuda.current_stream(self.device).record_event(), what)
        return host

    def _wait(self, end: torch.cuda.Event, what: str) -> None:
        """Until the device gets there. `CollectiveError` when the epoch breaks or the deadline passes before that."""
        deadline = Deadline(self._seconds)
        while not poll(end.query, min(_LOOK_S, deadline.left), _SPIN_S):
            self._require_open()
            if deadline.passed:
                self._break(f"{what} did not come within {self._seconds:g} s")
        self._require_open()

    # ---- the end of an epoch ----

    def _break(self, detail: str) -> None:
        """On whichever thread it is seen first; the others are told."""
        self._give_up(detail, orderly=False)

    def _give_up(self, detail: str, orderly: bool) -> None:
        with self._guard:
            if self._broken is not None:
                return
            self._broken = detail
            communicator, self._communicator = self._communicator, None
        self._watch.end()
        self._lines.close()
        orderly = orderly and self._watch.idle  # what is in flight ends by an abort alone
        if communicator is not None:
            self._part(communicator.destroy if orderly else communicator.abort, wait=not orderly)

    def _part(self, part: Callable[[], None], wait: bool) -> None:
        """Beside the caller: either way of parting waits until no graph refers to the communicator, and destroying it
        until the node's other peers have done so or are gone."""
        parted = threading.Event()

        def run() -> None:
            # A submission that does not return is aborted all the same: nothing else would end it.
            alone = poll(partial(self._submitting.acquire, blocking=False), _SUBMIT_S)
            try:
                relax_captures()
                with torch.cuda.device(self.device):
                    part()
            finally:
                parted.set()
                if alone:
                    self._submitting.release()

        threading.Thread(target=run, name=f"nccl-part-{self.spec.epoch}", daemon=True).start()
        if wait:
            wait_event(parted, _ABORT_S)  # by then the streams are free; what is left to do needs nobody

    def _require_open(self) -> Any:
        if self._broken is not None:
            raise self._error(self._broken)
        return self._communicator

    def _error(self, detail: str) -> CollectiveError:
        return CollectiveError(detail, self._rank, self.spec.epoch)

    # ---- joining ----

    def _join(self, members: dist.Store) -> Any:
        """The communicator. All members are here by now: whoever made lines has met them."""
        made: list[Any] = []
        done = threading.Event()

        def join() -> None:
            try:
                relax_captures()
                if self.peer_slot == 0:
                    members.set("nccl-id", self._nccl.get_unique_id())
                with torch.cuda.device(self.device):
                    made.append(self._nccl.NcclCommunicator(len(self.spec), members.get("nccl-id"), self.peer_slot))
            except Exception as error:  # noqa: BLE001 - whoever waits for this thread raises it
                made.append(error)
            done.set()

        # NCCL's own wait has no deadline: a peer that dies in here would keep this thread for ever.
        threading.Thread(target=join, name=f"nccl-join-{self.spec.epoch}", daemon=True).start()
        if not wait_event(done, self._seconds):
            raise self._error(f"joining the group: NCCL did not connect the peers within {self._seconds:g} s")
        if isinstance(made[0], Exception):
            raise self._error(f"joining the group: {made[0]}") from made[0]
        return made[0]

    def _warm_up(self) -> None:
        """Connect every pair now: first use takes up to a second. On streams of its own, since another epoch's
        collectives may be under way on the communication stream, and peers would meet there in different orders."""
        serving, self._stream = self._stream, torch.cuda.Stream(self.device)
        peers = len(self.spec)
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            rows = torch.zeros(peers, 256, dtype=torch.bfloat16, device=self.device)
            self.all_to_all_v(rows, [1] * peers, [1] * peers).payload()
            self.all_gather(rows).payload()
            self.reduce_scatter(rows).payload()
            self.settle()
        self._stream = serving
        self.bytes_sent = self.bytes_received = 0


@cache
def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream that all groups on `device` submit to: communicators on two streams can wait for one another's
    turn on the device. It goes before computation where both could run."""
    return torch.cuda.Stream(device, priority=-1)


def _library() -> Any:
    """cupy's NCCL. NVLink multicast stays off unless the process was started with it on."""
    if not torch.cuda.is_available():
        raise ConfigError("group nccl needs a CUDA device, found none")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    try:
        from cupy.cuda import nccl
    except ImportError as missing:
        raise ConfigError(f"group nccl needs cupy: {missing}") from missing
    if not nccl.available:
        raise ConfigError("group nccl needs cupy with NCCL, found cupy without it")
    return nccl


def _numbered(device: torch.device | None) -> torch.device:
    index = None if device is None else device.index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)
