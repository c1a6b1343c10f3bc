"""What a layer counts: its invocations, and what became of its routes, each where it is noticed (0x0DB)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ray_moe.topology import ProcessGroupSpec, Topology

if TYPE_CHECKING:
    from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
    from ray_moe.dataplane.invocation_ledger import InvocationLedger
    from ray_moe.dataplane.plan import SlotMap


@dataclass
class RouteTally:
    """Exact totals over layers and steps.

    By phase: routes `attempted` in invocations that completed; of them `dropped`, that no handle carried; `remote`,
    for another peer; `windowed`, of which only the device knows where they went; audited invocations with `mismatches`.
    By phase and topology: routes `accepted`, but windowed ones, and those for another node. By graph: `replays`. By
    generation: `stale` handles that were combined under another scope than theirs. By epoch: invocations on whose
    counts this peer found the peers to differ.
    """

    # In the order in which they are read: `ran` writes in the other one, so that a copy that is made meanwhile never
    # has more of a part than of the whole.
    inter_node: Counter[tuple[str, str]] = field(default_factory=Counter)
    remote: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    windowed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[tuple[str, str]] = field(default_factory=Counter)
    attempted: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    stale: Counter[int] = field(default_factory=Counter)
    unconserved: Counter[int] = field(default_factory=Counter)

    def ran(self, phase: str, topology: str, *, attempted: int, accepted: int, remote: int, inter_node: int) -> None:
        """An invocation has completed: this peer's routes in it."""
        self.attempted[phase] += attempted
        self.accepted[phase, topology] += accepted
        if accepted != attempted:
            self.dropped[phase] += attempted - accepted
        if remote:
            self.remote[phase] += remote
        if inter_node:
            self.inter_node[phase, topology] += inter_node

    def ran_windowed(self, phase: str, routes: int) -> None:
        """One of which the host has seen nothing but how many routes it had."""
        self.attempted[phase] += routes
        self.windowed[phase] += routes

    def take(self, other: RouteTally) -> None:
        """Add another one's counts."""
        for name, counts in vars(other).items():
            getattr(self, name).update(dict(counts))  # a copy: another thread counts on


@dataclass(frozen=True)
class Seat:
    """Where a layer's invocations run: the scope of all its handles, its peer slot, the topology by name, and the peer
    slots on other nodes."""

    generation: int
    epoch: int
    peer: int
    topology: str
    elsewhere: tuple[int, ...]

    @staticmethod
    def of(slots: SlotMap, header: HandleHeader) -> Seat:
        owner, group = slots.topology.owner, slots.group
        here = owner[group.peers[slots.my_peer]]
        elsewhere = tuple(slot for slot, rank in enumerate(group.peers) if owner[rank] != here)
        return Seat(header.generation, header.epoch, slots.my_peer, topology_name(slots.topology, group), elsewhere)


def topology_name(topology: Topology, group: ProcessGroupSpec) -> str:
    """Nodes x peers of a node, of those nodes that have any: `2x4`, or `2x3-4` where they have 3 and 4."""
    owner = topology.owner
    on = sorted(Counter(owner[rank] for rank in group.peers).values())
    return f"{len(on)}x{on[0]}" if on[0] == on[-1] else f"{len(on)}x{on[0]}-{on[-1]}"


@dataclass
class LayerCounters:
    """Exact totals since the layer was built; each counts one thing.

    Remote rows crossed to another peer, local ones did not. Invocations that the host did not look into were `local`,
    on one device alone, or `windowed`. Decode units were replayed, or fell back for a reason.
    `peak_live_bytes` is the most that one invocation held in named buffers. `fan_out` counts audited tokens, and the
    ranks and nodes that their routes reached; `choices` counts units by phase and adaptive path; `torch_runners` counts
    generations whose experts torch computes on a CUDA device, by why kernels do not; `ledger` is the last audited
    invocation's; `routes` says what became of this peer's.
    """

    invocations: int = 0
    local: int = 0
    windowed: int = 0
    rows_local: int = 0
    rows_sent: int = 0
    rows_received: int = 0
    audited: int = 0
    replays: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    peak_live_bytes: int = 0
    fan_out: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    torch_runners: Counter[str] = field(default_factory=Counter)
    ledger: InvocationLedger | None = None
    routes: RouteTally = field(default_factory=RouteTally)

    @staticmethod
    def total(layers: Iterable[LayerCounters]) -> LayerCounters:
        """All layers together; the largest of the peaks, since a peer runs one layer at a time."""
        total = LayerCounters()
        for layer in layers:
            for name, value in vars(layer).items():
                if isinstance(value, Counter):
                    getattr(total, name).update(dict(value))
                elif name not in ("peak_live_bytes", "ledger", "routes"):
                    setattr(total, name, getattr(total, name) + value)
            total.routes.take(layer.routes)
            total.peak_live_bytes = max(total.peak_live_bytes, layer.peak_live_bytes)
        return total

    def enter(self, handles: Sequence[DispatchHandle], seat: Seat, phase: str, tokens: int) -> None:
        """An invocation over `tokens` of this peer's has completed, by what its handles carried."""
        carried = local = away = 0
        for handle in handles:
            sent_P, received_P = handle.send_counts_P, handle.recv_counts_P
            carried += sum(sent_P)
            local += sent_P[seat.peer]
            self.rows_received += sum(received_P) - received_P[seat.peer]
            self.peak_live_bytes = max(self.peak_live_bytes, int(handle.completion.peak_bytes))
            for peer in seat.elsewhere:
                away += sent_P[peer]
            header = handle.header
            if header.generation != seat.generation or header.epoch != seat.epoch:
                self.routes.stale[header.generation] += 1
        self.invocations += 1
        self.rows_local += local
        self.rows_sent += carried - local
        attempted, remote = tokens * handles[0].top_k, carried - local
        self.routes.ran(phase, seat.topology, attempted=attempted, accepted=carried, remote=remote, inter_node=away)
