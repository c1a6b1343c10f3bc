"""The whole layer on several GPUs of one node: rows go through windows, counts stay on the devices.

    push -> wait -> route, gate/up, down over everybody's rows, each result home by the epilogue -> collect

Nothing waits for the host in between, so that units are replayed from graphs with whatever routes they have. All peers
run the same parts: `capacity`, the most tokens that any of them has in the unit, comes from the step agreement. Audited
invocations take the path of handles. Letters: T tokens, C token slots of a peer, K top-k, P peers, E experts, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ray_moe.comm.transports import Transport
from ray_moe.comm.window import FusedWindow, NodeWindow, WindowSeat
from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.plan import SlotMap
from ray_moe.errors import RoutesError
from ray_moe.kernels.fused_layer import FusedLayer
from ray_moe.kernels.regions import Part
from ray_moe.kernels.tiling import LayerShape, sizes_to_compile
from ray_moe.kernels.window import collect, push, wait
from ray_moe.kernels.window_partial import sum_partials, unpack
from ray_moe.routes import Routes

# An expert's replicas that the device can choose among; a placement with more takes the path of handles.
MOST_REPLICAS = 8
_DEVICE_POLICIES = ("token_hash", "locality_first")
_PAYLOADS, _QUANTIZED = ("native", "fp8_block"), ("fp8_block",)


def replica_table(slots: SlotMap, policy: str) -> Tensor | None:
    """One layer's placement as launches read it, int32 [2 + MOST_REPLICAS, E]; None, on every peer, where they cannot.

    Row 0 is this peer's pool slot of each expert (its first replica here), or -1; row 1 the number of replicas that
    routes choose among, row 2 + j the peer slot of replica j. They choose as `policy` does, by token hash; for
    `locality_first` an expert with a replica here has no other, and all replicas must lie in one domain.
    """
    if policy not in _DEVICE_POLICIES:
        return None
    peer_S, domain_S = slots.peer_S.tolist(), slots.domain_S.tolist()
    dispatch_S, values = slots.dispatch_S.tolist(), slots.replica_values_S.tolist()
    mine, first_slot = slots.my_peer, slots.peer_bounds_P1[slots.my_peer]
    columns = []
    for start, end in pairwise(slots.replica_offsets_E1.tolist()):
        positions = values[start:end]
        local_only = policy == "locality_first"
        if len(positions) > MOST_REPLICAS or (local_only and len({domain_S[position] for position in positions}) > 1):
            return None
        own = [position for position in positions if peer_S[position] == mine]
        if local_only and own:
            positions = own[:1]
        pool_slot = slots.pool_slots[dispatch_S[own[0]] - first_slot] if own else -1
        peers = [peer_S[position] for position in positions]
        columns.append([pool_slot, len(peers), *peers, *[-1] * (MOST_REPLICAS - len(peers))])
    return torch.tensor(columns, dtype=torch.int32, device=slots.peer_S.device).T.contiguous()


def seat_for(transport: Transport | None, shape: LayerShape, abi: HandleABI) -> WindowSeat | None:
    """The epoch's seat over windows, where these are made for such rows; None where it has none, or others."""
    if not isinstance(transport, FusedWindow) or abi.payload_format not in _PAYLOADS:
        return None
    regions = transport.seat.window.regions
    wanted = (shape.top_k, shape.hidden, abi.payload, abi.payload_format in _QUANTIZED, abi.gate_location == "expert")
    found = (regions.top_k, regions.hidden, regions.dtype, regions.quantized, regions.partial)
    return transport.seat if wanted == found else None


def try_launches(fused: FusedLayer, window: NodeWindow) -> None:
    """Run every way that the tables have for units that fit, alone and without routes, unless an epoch is under way."""
    if window.is_entered:
        return
    regions, experts = window.regions, fused.workspace.shape.num_experts
    table_XE = torch.zeros(2 + MOST_REPLICAS, experts, dtype=torch.int32, device=window.device)
    layer = WindowedLayer(fused, window.alone(), table_XE)
    for slots in sizes_to_compile(fused.workspace.shape, regions.token_slots):
        tokens = max(1, slots // regions.max_peers)
        hidden = torch.zeros(tokens, regions.hidden, dtype=regions.dtype, device=window.device)
        ids = torch.full((tokens, regions.top_k), -1, device=window.device)
        for gates in (torch.float32, regions.dtype):
            layer.run(hidden, Routes(ids, torch.zeros(ids.shape, dtype=gates, device=window.device)), capacity=tokens,
                      table=table_XE)  # fmt: skip


@dataclass(frozen=True, eq=False)
class WindowedLayer:
    """One layer of one generation. A unit of at least `pipelined_from` tokens goes in `parts` pieces, each of them
    exchanged beside the experts of another."""

    fused: FusedLayer
    seat: WindowSeat
    table_XE: Tensor
    parts: int = 1
    pipelined_from: int = 0
    pull: bool = False

    @property
    def table(self) -> Tensor:
        """What launches read of the generation."""
        return self.table_XE

    @property
    def memory(self) -> tuple[int, ...]:
        """What captured launches hold, beside the table: layers with the same can take each other's place in them."""
        return (id(self.seat.window), *self.fused.memory)

    def enter(self) -> None:
        """Before launches of this epoch, in the order of the stream."""
        self.seat.enter()

    def takes(self, hidden_TD: Tensor, routes: Routes) -> bool:
        """Whether windows are made for such rows: the same on every peer. Sizes are `run`'s to refuse."""
        regions = self.seat.window.regions
        return hidden_TD.dtype == regions.dtype and routes.top_k == regions.top_k

    def run(
        self,
        hidden_TD: Tensor,
        routes: Routes,
        *,
        capacity: int,
        table: Tensor | None = None,
        shared: Callable[[], None] | None = None,
    ) -> Tensor:
        """Weighted sums [T, D] of T <= `capacity` tokens; all peers of the epoch run it, with the same `capacity`.

        `table` is read instead of the generation's own: a graph's cell, and what is captured then serves every epoch.
        `shared` runs while rows are on their way. A row without a route becomes zero. Raises `RoutesError` for more
        tokens than `capacity`, or a capacity that windows have no slots for.
        """
        regions, num_tokens = self.seat.window.regions, hidden_TD.shape[0]
        if not max(1, num_tokens) <= capacity <= regions.capacity:
            raise RoutesError(
                f"a unit of {num_tokens} tokens here and at most {capacity} on any peer does not fit windows with room "
                f"for {regions.capacity}"
            )
        self.seat.enter()
        unit = _Unit(
            layer=self,
            hidden_TD=hidden_TD.contiguous(),
            ids_TK=routes.topk_ids.contiguous(),
            gates_TK=routes.topk_weights.contiguous(),
            table_XE=self.table_XE if table is None else table,
            peers=len(self.seat.spec) if table is None else regions.max_peers,
            out_TD=torch.empty_like(hidden_TD, memory_format=torch.contiguous_format),
        )
        parts = self.parts if table is None and capacity >= max(2, self.pipelined_from) else 1
        tokens = -(-capacity // parts)
        if parts > 1 and parts * tokens * unit.peers <= regions.max_peers * regions.capacity:
            unit.run_pipelined(parts, tokens, shared)
        else:
            unit.run_whole(capacity, shared)
        return unit.out_TD


@dataclass(frozen=True, eq=False)
class _Unit:
    """One invocation under way."""

    layer: WindowedLayer
    hidden_TD: Tensor
    ids_TK: Tensor
    gates_TK: Tensor
    table_XE: Tensor
    peers: int
    out_TD: Tensor

    def run_whole(self, capacity: int, shared: Callable[[], None] | None) -> None:
        part = Part(capacity, 0, self.peers)
        self._push(part, 0)
        if shared is not None:
            shared()
        self._experts(part)
        self._collect(part, 0)

    def run_pipelined(self, parts: int, tokens: int, shared: Callable[[], None] | None) -> None:
        """Exchanges on a stream of their own, in one order on all peers: every push, then every collect."""
        window = self.layer.seat.window
        compute, exchange = torch.cuda.current_stream(), window.stream
        pieces = [(Part(tokens, index * tokens * self.peers, self.peers), index * tokens) for index in range(parts)]
        exchange.wait_stream(compute)
        with torch.cuda.stream(exchange):
            for piece in pieces:
                self._push(*piece)
        if shared is not None:
            shared()
        for part, start in pieces:
            self._experts(part)
            exchange.wait_stream(compute)
            with torch.cuda.stream(exchange):
                self._collect(part, start)
        compute.wait_stream(exchange)

    def _push(self, part: Part, start: int) -> None:
        window, end = self.layer.seat.window, start + part.capacity
        push(
            self.hidden_TD[start:end], self.ids_TK[start:end], self.table_XE, window.windows_M, window.cell,
            window.regions, part, self.gates_TK[start:end],
        )  # fmt: skip

    def _experts(self, part: Part) -> None:
        window, experts = self.layer.seat.window, self.layer.fused.experts
        regions, received = window.regions, window.received(part)
        wait(window.memory.bytes, window.cell, window.failure, regions, part)
        rows_TD, ids_TK, slots_E = received.rows_TD, received.ids_TK, self.table_XE[0]
        if received.scales_TB is not None:
            rows_TD = window.unpacked(part)
            unpack(received.rows_TD, received.scales_TB, ids_TK, rows_TD)
        if received.gates_TK is not None:
            rows_RD, position_N = experts(rows_TD, ids_TK, slots_E)
            sum_partials(
                rows_RD, position_N, ids_TK, received.gates_TK, window.windows_M, window.cell, regions, part
            )  # fmt: skip
        elif self.layer.pull:
            experts(rows_TD, ids_TK, slots_E, received.results_RD, received.position_N)
        else:
            home = (window.windows_M, part.capacity * regions.top_k, regions.result_offset(part))
            experts(rows_TD, ids_TK, slots_E, home=home)

    def _collect(self, part: Part, start: int) -> None:
        window, end = self.layer.seat.window, start + part.capacity
        ids_TK, out_TD, own = self.ids_TK[start:end], self.out_TD[start:end], window.memory.bytes
        collect(
            ids_TK, self.gates_TK[start:end], self.table_XE, own, window.windows_M, window.cell, window.failure,
            window.regions, part, out_TD, pull=self.layer.pull,
        )  # fmt: skip
