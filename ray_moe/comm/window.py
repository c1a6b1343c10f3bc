"""A process's window and its seats: device memory that the peers of one node write and read without being asked.

    window = NodeWindow(regions, rank, device, seconds)      once for each process; captured launches hold its addresses
    seat = window.join(spec, store, seconds)                 once for each epoch: every member's window mapped here
    seat.enter()                                             at a step boundary, on the stream: the launches' peers
    seat.leave()                                             behind the epoch's last launch, where all members get there

An epoch change rewrites the cell and the list of windows that launches read. A member that dies leaves its window
mapped, and harmless; that it tells nothing any more is what a launch finds, within the limit, and `check` says.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.ipc import IpcMemory, PeerMemory
from ray_moe.comm.rendezvous import StoreAddress, connect
from ray_moe.comm.transports import AllToAllV
from ray_moe.errors import CollectiveError, ConfigError
from ray_moe.identity import GlobalRank, ProcessGroupId
from ray_moe.kernels.regions import SCALE_BLOCK, Part, Regions
from ray_moe.kernels.window import CELL_WORDS, EPOCH_SHIFT, PHASES, collect, push, wait
from ray_moe.topology import ProcessGroupSpec

# What a member shows the others: its window's size, top-k and row bytes, and the handle.
_CARD = struct.Struct("<qqqq64s")


@dataclass(frozen=True, eq=False)
class Received:
    """A part's regions of the own window; T = P * C token slots, N = T * K.

    `rows_TD` are FP8 where regions are quantized, with `scales_TB`. `gates_TK` is there where returns are partial sums,
    `results_RD` and `position_N` where they are not.
    """

    rows_TD: Tensor
    scales_TB: Tensor | None
    ids_TK: Tensor
    gates_TK: Tensor | None
    results_RD: Tensor | None
    position_N: Tensor | None


@dataclass(eq=False)
class NodeWindow:
    """One process's window. `limit_s` is the longest that a launch waits for a peer.

    Raises `ConfigError` as `IpcMemory.allocate`.
    """

    regions: Regions
    rank: GlobalRank
    device: torch.device
    limit_s: float
    memory: IpcMemory = field(init=False)
    cell: Tensor = field(init=False)
    windows_M: Tensor = field(init=False)
    failure: Tensor = field(init=False)
    stream: torch.cuda.Stream = field(init=False)  # for exchanges beside the experts
    _received: dict[tuple[int, int], Received] = field(default_factory=dict, init=False)
    _unpacked: Tensor | None = field(default=None, init=False)
    _mapped: dict[bytes, PeerMemory] = field(default_factory=dict, init=False)
    _entered: WindowSeat | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.memory = IpcMemory.allocate(self.regions.nbytes, self.device)
        self.cell = torch.zeros(CELL_WORDS, dtype=torch.int64, device=self.device)
        self.windows_M = torch.zeros(self.regions.max_peers, dtype=torch.int64, device=self.device)
        self.stream = torch.cuda.Stream(self.device)
        # Launches write it, and only when they give up; the host reads it without asking the device.
        self.failure = torch.zeros(len(("peer", "phase", "value")), dtype=torch.int64).pin_memory()

    def alone(self) -> WindowSeat:
        """A seat that nobody else has to know of, in epoch 0: for trying launches before any epoch is entered."""
        spec = ProcessGroupSpec(ProcessGroupId("window-alone"), 0, (self.rank,))
        addresses = [self.memory.address] + [0] * (self.regions.max_peers - 1)
        return WindowSeat(self, spec, 0, torch.tensor(addresses))

    @property
    def is_entered(self) -> bool:
        """Whether launches are some epoch's already."""
        return self._entered is not None

    def join(self, spec: ProcessGroupSpec, address: StoreAddress, seconds: float) -> WindowSeat:
        """Map every member's window; returns when all members have shown theirs.

        Raises `PlacementError` for a rank without a seat, `ConfigError` for more members than windows have room for or
        members whose windows differ in size, `CollectiveError` when one does not come within `seconds`.
        """
        mine = spec.peer_slot(self.rank)
        if len(spec) > self.regions.max_peers:
            raise ConfigError(f"windows have room for {self.regions.max_peers} peers, found {len(spec)}")
        store = connect(address, f"{spec.process_group_id}/epoch-{spec.epoch}/window", seconds)
        regions = self.regions
        sizes = (regions.nbytes, regions.capacity, regions.top_k, regions.hidden * regions.dtype.itemsize)
        try:
            store.set(str(mine), _CARD.pack(*sizes, self.memory.handle))  # type: ignore[arg-type]  # takes bytes too
            cards = [_CARD.unpack(store.get(str(peer))) for peer in range(len(spec))]
        except (dist.DistError, RuntimeError) as error:
            raise CollectiveError(f"showing windows: {error}", self.rank.value, spec.epoch) from error
        for peer, (*theirs, _) in enumerate(cards):
            if tuple(theirs) != sizes:
                raise ConfigError(
                    f"windows of one group are alike: rank {self.rank} has (bytes, tokens, top-k, row bytes) {sizes}, "
                    f"rank {spec.peers[peer]} {tuple(theirs)}"
                )
        addresses = [self._address(card[-1]) for card in cards]
        return WindowSeat(self, spec, mine, torch.tensor(addresses + [0] * (regions.max_peers - len(spec))))

    def received(self, part: Part) -> Received:
        """Views of the own window; the same every time."""
        key = (part.first, part.tokens)
        if key not in self._received:
            self._received[key] = self._views(part)
        return self._received[key]

    def unpacked(self, part: Part) -> Tensor:
        """Room for a part's rows [P * C, D] in the dtype that experts take, where they come as FP8."""
        slots = self.regions.max_peers * self.regions.capacity
        if self._unpacked is None:
            self._unpacked = torch.empty(slots, self.regions.hidden, dtype=self.regions.dtype, device=self.device)
        return self._unpacked[part.first : part.first + part.tokens]

    def _views(self, part: Part) -> Received:
        regions, top_k, slots = self.regions, self.regions.top_k, self.regions.max_peers * self.regions.capacity
        tokens, routes = slice(part.first, part.first + part.tokens), slice(part.first * top_k, None)

        def view(offset: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return regions.view(self.memory.bytes, offset, dtype, *shape)

        sent = torch.float8_e4m3fn if regions.quantized else regions.dtype
        partial, scales = regions.partial, regions.hidden // SCALE_BLOCK
        return Received(
            view(regions.rows, sent, slots, regions.hidden)[tokens],
            view(regions.scales, torch.float32, slots, scales)[tokens] if regions.quantized else None,
            view(regions.ids, torch.int32, slots, top_k)[tokens],
            view(regions.gates, torch.float32, slots, top_k)[tokens] if partial else None,
            None if partial else view(regions.results, regions.dtype, slots * top_k, regions.hidden)[routes],
            None if partial else view(regions.positions, torch.int32, slots * top_k)[routes],
        )

    def _address(self, handle: bytes) -> int:
        if handle == self.memory.handle:
            return self.memory.address
        if handle not in self._mapped:
            self._mapped[handle] = PeerMemory.open(handle, self.regions.nbytes, self.device)
        return self._mapped[handle].address

    def bytes_at(self, address: int) -> Tensor:
        """The window that begins at `address`, the own one or one that is mapped here."""
        known: list[IpcMemory | PeerMemory] = [self.memory, *self._mapped.values()]
        return next(one.bytes for one in known if one.address == address)

    def close(self) -> None:
        """Unmap the others' windows and give the own one back: nothing is launched any more, here or by them."""
        for peer in self._mapped.values():
            peer.close()
        self._mapped.clear()
        self.memory.free()


class FusedWindow(AllToAllV):
    """The transport of an epoch over windows. Units that the host looks into (audited ones, those that no kernel takes)
    go as exact rows over `group`, like those of `AllToAllV`; all others never come here: `dataplane.windowed`."""

    name = "fused_window"

    def __init__(self, group: ExpertGroup, seat: WindowSeat) -> None:
        super().__init__(group)
        self.seat = seat

    def leave(self) -> None:
        self.seat.leave()

    def check(self) -> None:
        super().check()
        self.seat.check()


@dataclass(eq=False)
class WindowSeat:
    """A process's seat in one epoch over windows. All methods are the step's thread's."""

    window: NodeWindow
    spec: ProcessGroupSpec
    peer_slot: int
    _addresses_M: Tensor

    def enter(self) -> None:
        """From here on, in the order of the current stream, launches are this epoch's. Entered again, it goes on."""
        window = self.window
        if window._entered is self:
            return
        window._entered = self
        base = self.spec.epoch << EPOCH_SHIFT
        words = [len(self.spec), self.peer_slot, round(window.limit_s * 1e9), base, base, base]
        window.failure.zero_()
        window.windows_M.copy_(self._addresses_M)
        window.cell.copy_(torch.tensor(words + [0] * (CELL_WORDS - len(words))))

    def leave(self) -> None:
        """Behind what was launched: nobody's launches use this window for this epoch any more. All members call it."""
        window, regions = self.window, self.window.regions
        nothing = torch.empty(0, regions.hidden, dtype=regions.dtype, device=window.device)
        ids = torch.empty(0, regions.top_k, dtype=torch.int64, device=window.device)
        gates = torch.empty(0, regions.top_k, device=window.device)
        table = torch.zeros(3, 1, dtype=torch.int32, device=window.device)
        part = Part(1, 0, len(self.spec))
        push(nothing, ids, table, window.windows_M, window.cell, regions, part)
        wait(window.memory.bytes, window.cell, window.failure, regions, part)
        collect(
            ids,
            gates,
            table,
            window.memory.bytes,
            window.windows_M,
            window.cell,
            window.failure,
            regions,
            part,
            nothing,
        )

    def peer_rows(self, peer: int, part: Part) -> Tensor:
        """A part's rows [P * C, D] in the window of the peer in slot `peer`."""
        regions, window = self.window.regions, self.window.bytes_at(int(self._addresses_M[peer]))
        slots = regions.max_peers * regions.capacity
        rows = regions.view(window, regions.rows, regions.dtype, slots, regions.hidden)
        return rows[part.first : part.first + part.tokens]

    def check(self) -> None:
        """`CollectiveError` naming the peer, once a launch has given up waiting for one; reads host memory alone.

        What such a launch should have brought is not there: whoever reads results of launches asks here first, when
        they are complete.
        """
        peer, phase, value = self.window.failure.tolist()
        if peer:
            raise CollectiveError(
                f"the {PHASES[phase]} of rank {self.spec.peers[peer - 1]} (peer slot {peer - 1}) have not come within "
                f"{self.window.limit_s:g} s, in exchange {value & ((1 << EPOCH_SHIFT) - 1)} of the epoch",
                self.window.rank.value,
                self.spec.epoch,
            )
