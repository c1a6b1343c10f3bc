"""What moves over a topology (specification 0x07B, 0x07C, 0x07E): counts, split vectors, relay paths and their ledgers.

Everything here follows from routes, topology and row width. Rows and bytes are ledger entries and pair counts are
analytical: none of them is a time, and none is a counter of a link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from ray_moe.errors import TopologyError
from ray_moe.evidence import LogicalBytes, RowSlots
from ray_moe.identity import GlobalRank, expect
from ray_moe.topology import ProcessGroupSpec, RouteClass, Topology, ranks_text

Pair = tuple[GlobalRank, GlobalRank]

# -- Counts and splits (0x07B)


@dataclass(frozen=True)
class RouteCounts:
    """Rows by (source, destination) global rank; a pair that is not there has none. Nothing indexes it by position.

    Raises `TopologyError` invalid_count, and `TypeError` for a key that is no pair of global ranks.
    """

    by_pair: Mapping[Pair, int]

    def __post_init__(self) -> None:
        for (source, destination), rows in self.by_pair.items():
            expect(GlobalRank, source, "source")
            expect(GlobalRank, destination, "destination")
            if type(rows) is not int or rows < 0:
                raise TopologyError(
                    "invalid_count", f"rows from {source} to {destination} must be >= 0, found {rows!r}"
                )

    @staticmethod
    def of(routes: Iterable[Pair]) -> RouteCounts:
        return RouteCounts(Counter(routes))

    @staticmethod
    def from_peers(counts_PP: Sequence[Sequence[int]], group: ProcessGroupSpec) -> RouteCounts:
        """From a layout's counts in peer-slot order; `TopologyError` split_vector_length unless P peers sit in it."""
        for line in (counts_PP, *counts_PP):
            _check_length(len(line), group)
        pairs = zip(group.peers, counts_PP, strict=True)
        return RouteCounts({(a, b): rows for a, line in pairs for b, rows in zip(group.peers, line, strict=True)})

    def rows(self, source: GlobalRank, destination: GlobalRank) -> int:
        return self.by_pair.get((source, destination), 0)


@dataclass(frozen=True)
class SplitVectors:
    """Rows that each rank sends to, and receives from, every peer slot of `group`, empty ones too.

    Raises `TopologyError` with reason splits_incomplete, split_vector_length, or splits_not_transposed when what one
    rank sends is not what its peer expects.
    """

    group: ProcessGroupSpec
    send: Mapping[GlobalRank, tuple[int, ...]]
    receive: Mapping[GlobalRank, tuple[int, ...]]

    def __post_init__(self) -> None:
        peers = self.group.peers
        for name, vectors in (("send", self.send), ("receive", self.receive)):
            if set(vectors) != set(peers):
                raise TopologyError(
                    "splits_incomplete", f"{name} splits of {ranks_text(vectors)}, the group is {ranks_text(peers)}"
                )
            for vector in vectors.values():
                _check_length(len(vector), self.group)
        for i, source in enumerate(peers):
            for j, destination in enumerate(peers):
                if self.send[source][j] != self.receive[destination][i]:
                    raise TopologyError(
                        "splits_not_transposed",
                        f"rank {source} sends {self.send[source][j]} rows to peer slot {j}, rank {destination} there "
                        f"expects {self.receive[destination][i]}",
                    )


def split_vectors(counts: RouteCounts, group: ProcessGroupSpec) -> SplitVectors:
    """Every rank's split vectors: send[u][i] = C[u, pi(i)] and receive[v][i] = C[pi(i), v], pi(i) the rank in seat i.

    Raises `TopologyError` rank_outside_group when a counted rank has no seat.
    """
    for pair in counts.by_pair:
        if not all(rank in group for rank in pair):
            raise TopologyError(
                "rank_outside_group", f"rows from {pair[0]} to {pair[1]}: group {group.process_group_id} seats "
                f"{ranks_text(group.peers)}"
            )  # fmt: skip
    return SplitVectors(
        group,
        {rank: tuple(counts.rows(rank, peer) for peer in group.peers) for rank in group.peers},
        {rank: tuple(counts.rows(peer, rank) for peer in group.peers) for rank in group.peers},
    )


def _check_length(length: int, group: ProcessGroupSpec) -> None:
    if length != len(group):
        raise TopologyError(
            "split_vector_length", f"{length} entries for the {len(group)} peers of group {group.process_group_id}"
        )


# -- Paths through relays (0x07E)


@dataclass(frozen=True)
class HierarchicalPath:
    """Who holds the rows from `source` to `destination`: at first, and after each of the three stages.

    Stage 1 is node-local (to the final rank in the same node, else to the source's relay), stage 2 goes from relay to
    relay, stage 3 is node-local (from the destination's relay to the final rank). Raises `TopologyError`
    final_rank_changed or origin_changed: staging never reroutes.
    """

    source: GlobalRank
    destination: GlobalRank
    holders: tuple[GlobalRank, GlobalRank, GlobalRank, GlobalRank]

    def __post_init__(self) -> None:
        for reason, planned, staged in (
            ("origin_changed", self.source, self.holders[0]),
            ("final_rank_changed", self.destination, self.holders[3]),
        ):
            if planned != staged:
                raise TopologyError(
                    reason, f"rows from {self.source} to {self.destination} are staged as {ranks_text(self.holders)}"
                )

    @property
    def stages(self) -> tuple[Pair, Pair, Pair]:
        """(from, to) by stage; equal where the rows stay."""
        first, second, third, last = self.holders
        return (first, second), (second, third), (third, last)

    @property
    def hops(self) -> tuple[Pair, ...]:
        """The stages that move rows from one rank to another."""
        return tuple(stage for stage in self.stages if stage[0] != stage[1])

    @property
    def combine(self) -> HierarchicalPath:
        """The same path backwards."""
        first, second, third, last = self.holders
        return HierarchicalPath(self.destination, self.source, (last, third, second, first))


def hierarchical_path(topology: Topology, source: GlobalRank, destination: GlobalRank) -> HierarchicalPath:
    """The dispatch path; `TopologyError` unknown_rank when a rank is nowhere."""
    here, there = topology.locate(source), topology.locate(destination)
    if here.domain_id == there.domain_id:
        return HierarchicalPath(source, destination, (source, destination, destination, destination))
    return HierarchicalPath(source, destination, (source, here.relay, there.relay, destination))


def hops(topology: Topology, source: GlobalRank, destination: GlobalRank) -> tuple[Pair, ...]:
    """Up to three (from, to) moves of a dispatched row; combine makes the same moves backwards."""
    return hierarchical_path(topology, source, destination).hops


# -- Ledgers (0x07C, 0x07E)


@dataclass(frozen=True)
class Traffic:
    """Rows of one direction, their width, and the directed (from, to) rank pairs that carry any.

    The other direction carries the same rows over the reversed pairs.
    """

    rows: RowSlots
    row_bytes: int
    pairs: frozenset[Pair]

    @property
    def bytes(self) -> LogicalBytes:
        return LogicalBytes(self.rows.value * self.row_bytes)

    @property
    def round_trip_bytes(self) -> LogicalBytes:
        return self.bytes + self.bytes

    @property
    def round_trip_pairs(self) -> frozenset[Pair]:
        return self.pairs | {(to, sender) for sender, to in self.pairs}


@dataclass(frozen=True)
class _Ledger:
    counts: RouteCounts
    topology: Topology
    row_bytes: int

    def _carried(self, moves: Iterable[tuple[Pair, int]]) -> Traffic:
        """What these (from, to) moves of so many rows add up to; a move from a rank to itself is none of them."""
        found = [(move, rows) for move, rows in moves if rows]
        return Traffic(RowSlots(sum(rows for _, rows in found)), self.row_bytes, frozenset(move for move, _ in found))

    def _of(self, kind: RouteClass) -> list[tuple[Pair, int]]:
        return [(pair, rows) for pair, rows in self.counts.by_pair.items() if self.topology.classify(*pair) is kind]


@dataclass(frozen=True)
class FlatLedger(_Ledger):
    """Every row goes from its source to its final rank in one exchange."""

    @cached_property
    def by_class(self) -> Mapping[RouteClass, Traffic]:
        """Dispatch by class; rows of the same GPU are staged but cross no link."""
        return {kind: self._carried(self._of(kind)) for kind in RouteClass}

    @cached_property
    def fractions(self) -> Mapping[RouteClass, Fraction]:
        """Share of the rows by class, summing to one; empty when there are no rows."""
        total = sum(self.counts.by_pair.values())
        return {kind: Fraction(part.rows.value, total) for kind, part in self.by_class.items()} if total else {}

    @property
    def inter_node(self) -> Traffic:
        return self.by_class[RouteClass.DIFFERENT_NODE]

    @property
    def intra_node(self) -> Traffic:
        return self.by_class[RouteClass.SAME_NODE_REMOTE_GPU]


@dataclass(frozen=True)
class HierarchicalLedger(_Ledger):
    """Rows between nodes go through relays; rows inside a node go as in the flat exchange."""

    @cached_property
    def stages(self) -> tuple[Traffic, Traffic, Traffic]:
        """What rows between nodes move in each dispatch stage: to the relay, between relays, to the final rank."""
        paths = [(hierarchical_path(self.topology, *pair), n) for pair, n in self._of(RouteClass.DIFFERENT_NODE)]
        gather, exchange, scatter = (
            self._carried((path.stages[stage], n) for path, n in paths if path.stages[stage] in path.hops)
            for stage in range(3)
        )
        return gather, exchange, scatter

    @property
    def dispatch_stage_rows(self) -> tuple[RowSlots, ...]:
        return tuple(stage.rows for stage in self.stages)

    @property
    def combine_stage_rows(self) -> tuple[RowSlots, ...]:
        return self.dispatch_stage_rows[::-1]

    @property
    def inter_node(self) -> Traffic:
        return self.stages[1]

    @property
    def added_relay_rows(self) -> RowSlots:
        """Row movements inside nodes, both directions, that a flat exchange does not have."""
        gather, _, scatter = self.dispatch_stage_rows
        return gather + scatter + scatter + gather

    @property
    def added_relay_bytes(self) -> LogicalBytes:
        return LogicalBytes(self.added_relay_rows.value * self.row_bytes)

    @property
    def intra_node_round_trip_bytes(self) -> LogicalBytes:
        return self._carried(self._of(RouteClass.SAME_NODE_REMOTE_GPU)).round_trip_bytes + self.added_relay_bytes

    def check_counted(self, dispatch: Sequence[int], combine: Sequence[int]) -> None:
        """Hold a transport's own counts of relayed rows by stage against the ledger.

        Raises `TopologyError` relay_rows_differ when a stage counted other rows, or left them out.
        """
        for name, counted, planned in (
            ("dispatch", dispatch, self.dispatch_stage_rows),
            ("combine", combine, self.combine_stage_rows),
        ):
            if tuple(counted) != tuple(map(int, planned)):
                raise TopologyError(
                    "relay_rows_differ", f"{name} counted {list(counted)} by stage, planned {list(map(int, planned))}"
                )


@dataclass(frozen=True)
class LedgerComparison:
    """The two ledgers of one route relation, side by side; no field of it is a time."""

    inter_node_round_trip_bytes: LogicalBytes
    flat_intra_node_round_trip_bytes: LogicalBytes
    hierarchical_intra_node_round_trip_bytes: LogicalBytes
    added_relay_rows: RowSlots
    added_relay_bytes: LogicalBytes
    flat_inter_node_pairs: int
    hierarchical_inter_node_pairs: int


def compare(flat: FlatLedger, hierarchical: HierarchicalLedger) -> LedgerComparison:
    """Both round trips of the same rows.

    Raises `TopologyError` inter_node_payload_differs when the two carry other bytes between nodes: coalescing changes
    pairs, never useful rows.
    """
    before, after = flat.inter_node.round_trip_bytes, hierarchical.inter_node.round_trip_bytes
    if before != after:
        raise TopologyError(
            "inter_node_payload_differs", f"flat carries {before.value} bytes between nodes, hierarchical {after.value}"
        )
    return LedgerComparison(
        inter_node_round_trip_bytes=before,
        flat_intra_node_round_trip_bytes=flat.intra_node.round_trip_bytes,
        hierarchical_intra_node_round_trip_bytes=hierarchical.intra_node_round_trip_bytes,
        added_relay_rows=hierarchical.added_relay_rows,
        added_relay_bytes=hierarchical.added_relay_bytes,
        flat_inter_node_pairs=len(flat.inter_node.round_trip_pairs),
        hierarchical_inter_node_pairs=len(hierarchical.inter_node.round_trip_pairs),
    )


# -- Fan-out (0x07D, 0x07H)


@dataclass(frozen=True)
class FanOut:
    """Over how many ranks and nodes the routes of one token spread. Measured, and never enforced by moving a route."""

    tokens: int
    mean_ranks: Fraction
    max_ranks: int
    mean_nodes: Fraction
    max_nodes: int


def fan_out(topology: Topology, destinations: Iterable[Collection[GlobalRank]]) -> FanOut:
    """Fan-out of tokens, given each one's destination ranks; all zero without tokens.

    Nodes come from the topology, never from a router's groups. `TopologyError` unknown_rank.
    """
    ranks = [set(token) for token in destinations]
    nodes = [{topology.locate(rank).domain_id for rank in token} for token in ranks]

    def mean_and_max(spread: Sequence[Collection[object]]) -> tuple[Fraction, int]:
        sizes = [len(token) for token in spread]
        return Fraction(sum(sizes), max(len(sizes), 1)), max(sizes, default=0)

    return FanOut(len(ranks), *mean_and_max(ranks), *mean_and_max(nodes))
