"""Transports over real groups: rows reach their owners and come back, whatever crosses the links; and what crosses."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ray_moe.comm.exchange import EXCHANGE_TABLE, Arrived, ExchangeState, StagedExchange, WaitedExchange
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.hierarchical import Hierarchical
from ray_moe.comm.join import FUSED_WINDOW, join_transport, transport_named
from ray_moe.comm.join import TRANSPORTS as NAMES
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.transports import (
    CountMatrix,
    PaddedAllToAll,
    Transport,
    chunk_counts,
    chunk_positions,
    nothing_crosses,
    transposed,
)
from ray_moe.errors import CollectiveError, CompletionError, ConfigError, RunnerError, StaleHandleError, TopologyError
from ray_moe.evidence import LogicalBytes
from ray_moe.identity import GlobalRank
from ray_moe.topology import Domain, GroupBinding, GroupKind, Topology, TopologyGroups, derive_groups
from ray_moe.topology_ledger import FlatLedger, HierarchicalLedger, RouteCounts, compare
from tests.layers import CPU, ONE_PEER, spec_of
from tests.peers import TRANSPORTS, Peers, transport_over, two_nodes
from tests.peers import peers_of_each_kind as peers

__all__ = ["peers"]

WIDTH = 3
ROW_BYTES = WIDTH * 4
# By number of peers: a peer that sends nothing, one that receives nothing, pairs without rows, one that sends all.
MATRICES: dict[int, list[CountMatrix]] = {
    4: [
        ((1, 2, 0, 3), (0, 0, 0, 0), (2, 0, 0, 1), (4, 1, 0, 0)),
        ((1, 2, 1, 0), (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0)),
        ((0, 0, 0, 40), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
        ((2, 3, 0, 0), (1, 0, 0, 0), (0, 0, 5, 1), (0, 0, 2, 2)),
        ((3, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 2)),
        ((0,) * 4,) * 4,
    ],
    3: [((1, 2, 3), (3, 2, 1), (0, 4, 0)), ((0, 0, 0), (7, 0, 0), (0, 9, 0))],
    1: [((5,),)],
}
ORDERS = {4: (2, 0, 3, 1), 3: (1, 2, 0), 1: (0,)}


def rows_of(source: int, counts_P: tuple[int, ...]) -> Tensor:
    """Rows [N, 3] that say where they come from, where they go, and which of the pair they are."""
    rows = [(source, destination, row) for destination, count in enumerate(counts_P) for row in range(count)]
    return torch.tensor(rows, dtype=torch.float32).view(-1, WIDTH)


@dataclass(frozen=True)
class Trip:
    """One dispatch and combine: what arrived and came back, bytes that the groups counted and that the ledger says."""

    arrived: Tensor
    returned: Tensor
    moved: tuple[int, int]
    said: tuple[LogicalBytes, LogicalBytes]
    useful: tuple[int, int]


def trips(group: ExpertGroup, name: str) -> list[Trip]:
    transport, me = transport_over(group, name), group.peer_slot
    return [trip(transport, me, counts_PP) for counts_PP in MATRICES[len(group.spec)]]


def trip(transport: Transport, me: int, counts_PP: CountMatrix) -> Trip:
    before = transport.bytes_moved
    arrived = transport.dispatch(rows_of(me, counts_PP[me]), counts_PP).payload()
    returned = transport.combine(arrived * 2, counts_PP).payload()
    moved = tuple(now - then for now, then in zip(transport.bytes_moved, before, strict=True))
    out, back = transport.link_rows(counts_PP), transport.link_rows(transposed(counts_PP))
    said = tuple(LogicalBytes(int(rows) * ROW_BYTES) for rows in (out.sent + back.sent, out.received + back.received))
    return Trip(arrived, returned, moved, said, (int(out.useful_sent), int(out.useful_received)))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_peers", [1, 3, 4])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_rows_reach_their_owners_source_major_and_come_back_in_order(peers: Peers, name: str, num_peers: int) -> None:
    for me, by_matrix in enumerate(peers.run(trips, name, ranks=ORDERS[num_peers])):
        for counts_PP, seen in zip(MATRICES[num_peers], by_matrix, strict=True):
            expected = [(source, me, row) for source in range(num_peers) for row in range(counts_PP[source][me])]
            assert [tuple(map(int, row)) for row in seen.arrived.tolist()] == expected
            assert torch.equal(seen.returned, rows_of(me, counts_PP[me]) * 2)
            # The ledger is exact: what the groups counted is what the matrix says.
            assert seen.moved == tuple(map(int, seen.said))
            assert seen.useful[0] == sum(counts_PP[me]) - counts_PP[me][me]
            if nothing_crosses(counts_PP):
                assert seen.moved == (0, 0)


# -- The way back from a busy owner

# Owner 1 has all rows of all origins: gathering them back would take three times what summing them into place takes.
BUSY: dict[str, CountMatrix] = {"back": ((0, 4, 0), (0, 4, 0), (0, 4, 0)), "out": ((4, 4, 4), (0, 0, 0), (0, 0, 0))}
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


def busy_owner(group: ExpertGroup, counts_PP: CountMatrix) -> list[tuple[Tensor, Tensor, int]]:
    transport, me, found = transport_over(group, "all_gather_filter"), group.peer_slot, []
    for dtype in DTYPES:
        rows = (torch.arange(3 * sum(counts_PP[me])).view(-1, 3) - 100 * me).to(torch.uint8).to(dtype)
        rows[:1] = -0.0 if dtype.is_floating_point else 255
        before = group.bytes_received
        arrived = transport.dispatch(rows, counts_PP).payload()
        out_bytes = group.bytes_received - before
        found.append((transport.combine(arrived, counts_PP).payload(), rows, out_bytes))
    return found


@pytest.mark.parametrize("way", BUSY)
def test_rows_of_a_busy_owner_are_summed_into_their_places_bit_for_bit(peers: Peers, way: str) -> None:
    for found in peers.run(busy_owner, BUSY[way], ranks=ORDERS[3]):
        for dtype, (returned, rows, out_bytes) in zip(DTYPES, found, strict=True):
            assert torch.equal(returned.contiguous().view(torch.uint8), rows.view(torch.uint8))
            # The most that a peer sends, or receives if that is less, to and from each of two others.
            assert out_bytes == 2 * 4 * 3 * dtype.itemsize


# -- What crosses between nodes


def counted(group: ExpertGroup, counts_PP: CountMatrix) -> tuple[int, int]:
    """Payload bytes that this peer put on (intra-node, inter-node) links over one round trip."""
    transport = transport_over(group, "hierarchical")
    assert isinstance(transport, Hierarchical)
    trip(transport, group.peer_slot, counts_PP)
    return transport.node_bytes_sent, transport.relay_bytes_sent


@pytest.mark.parametrize("counts_PP", MATRICES[4][:4], ids=str)
def test_between_nodes_the_hierarchy_moves_what_the_flat_exchange_moves(peers: Peers, counts_PP: CountMatrix) -> None:
    spec = spec_of(ORDERS[4])
    topology = two_nodes(spec)
    counts = RouteCounts.from_peers(counts_PP, spec)
    flat, hierarchical = (ledger(counts, topology, ROW_BYTES) for ledger in (FlatLedger, HierarchicalLedger))
    compare(flat, hierarchical)  # refuses a hierarchy that is said to move fewer rows between nodes
    intra, inter = zip(*peers.run(counted, counts_PP, ranks=ORDERS[4]), strict=True)
    assert sum(inter) == int(flat.inter_node.round_trip_bytes) == int(hierarchical.inter_node.round_trip_bytes)
    assert sum(intra) == int(hierarchical.intra_node_round_trip_bytes)
    assert sum(intra) == int(flat.intra_node.round_trip_bytes) + int(hierarchical.added_relay_bytes)


def test_groups_of_two_epochs_make_no_hierarchy() -> None:
    now, later = (SoloGroup(spec_of((0,), epoch), GlobalRank(0)) for epoch in (3, 4))
    with pytest.raises(StaleHandleError, match="ep-group-0 is of epoch 4, ep-group-0 of epoch 3"):
        Hierarchical(now, later, None, Topology("t", (Domain("node-0", ONE_PEER.peers),)))


# -- Several at once, and the three moments of each


def in_flight(group: ExpertGroup, name: str) -> list[list[str]]:
    """Three exchanges submitted before the first is waited for."""
    transport, me = transport_over(group, name), group.peer_slot
    matrices = MATRICES[4][:3]
    exchanges = [transport.dispatch(rows_of(me, counts_PP[me]), counts_PP) for counts_PP in matrices]
    states = [[exchange.state.value for exchange in exchanges]]
    for counts_PP, exchange in zip(matrices, exchanges, strict=True):
        expected = torch.cat([rows_of(s, counts_PP[s])[rows_of(s, counts_PP[s])[:, 1] == me] for s in range(4)])
        assert torch.equal(exchange.payload(), expected)
    states.append([exchange.state.value for exchange in exchanges])
    for exchange in exchanges:
        exchange.complete()
    return [*states, [exchange.state.value for exchange in exchanges]]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_several_exchanges_are_in_flight_and_each_says_which_moment_it_has_reached(peers: Peers, name: str) -> None:
    for states in peers.run(in_flight, name, ranks=(0, 1, 2, 3)):
        assert states[0] == ["submitted"] * 3
        assert states[2] == ["complete"] * 3
        # A peer that sends nothing in the last stage of an exchange is through with it as soon as its rows are here.
        assert set(states[1]) == {"payload_available"} or "hierarchical" in name
        assert set(states[1]) <= {"payload_available", "complete"}


def larger_than_the_connections_hold(group: ExpertGroup) -> bool:
    """Two exchanges of 16 MiB to each peer in flight at once: nobody reads before everybody has submitted both."""
    me, size = group.peer_slot, len(group.spec)
    rows = torch.arange(size, dtype=torch.float32).repeat_interleave(1024)[:, None].expand(-1, 4096) + 10 * me
    both = [group.all_to_all_v(rows.contiguous() + more, [1024] * size, [1024] * size) for more in (0, 100)]
    expected = (torch.arange(size, dtype=torch.float32) * 10 + me).repeat_interleave(1024)
    right = [bool((both[k].payload() == expected[:, None] + 100 * k).all()) for k in (1, 0)]
    for exchange in both:
        exchange.complete()
    return all(right)


def test_large_exchanges_in_flight_do_not_wait_for_one_another(peers: Peers) -> None:
    assert peers.run(larger_than_the_connections_hold, ranks=(0, 1, 2)) == [True] * 3


def counts_behind_rows(group: ExpertGroup) -> list[int]:
    """Rows that one peer sends and nobody waits for the leaving of; then a line of counts, which queues behind them."""
    me = group.peer_slot
    sent, received = ([0, 2048], [0, 0]) if me == 0 else ([0, 0], [2048, 0])
    group.all_to_all_v(torch.zeros(sum(sent), 4096), sent, received).payload()
    return group.gather_counts(torch.tensor([me])).flatten().tolist()


def test_counts_reach_a_peer_behind_rows_that_the_connection_did_not_take_at_once(peers: Peers) -> None:
    assert peers.run(counts_behind_rows, ranks=(0, 1), seconds=20.0) == [[0, 1]] * 2


def one_leaves_between_counts_and_rows(group: ExpertGroup) -> str:
    transport = transport_over(group, "hierarchical")
    group.gather_counts(torch.tensor([group.peer_slot]))
    counts_PP = ((1, 1, 1, 1),) * 4
    try:
        if group.peer_slot == 0:
            return "left"
        transport.combine(transport.dispatch(torch.zeros(4, 2), counts_PP).payload(), counts_PP).payload()
    except CollectiveError as error:
        return str(error)
    finally:
        transport.close()
    return "no error"


def test_a_relay_that_leaves_frees_its_node_and_the_other_one_by_name(peers: Peers) -> None:
    left, *said = peers.run(one_leaves_between_counts_and_rows, ranks=(0, 1, 2, 3), seconds=600.0)
    assert left == "left"
    assert all("ep-group-0/" in message or "closed" in message for message in said), said


def test_every_pair_of_state_and_event_is_an_edge_or_refused() -> None:
    for state, edges in EXCHANGE_TABLE.items():
        for event in ("rows_arrived", "rows_left", "break"):
            exchange = WaitedExchange(lambda: torch.zeros(0), lambda: None)
            exchange.state = state
            if event in edges:
                exchange._advance(event)
                assert exchange.state is edges[event]
            else:
                with pytest.raises(CompletionError, match=f"{event!r} is illegal in state {state.value}"):
                    exchange._advance(event)


def test_a_broken_exchange_stays_broken_and_says_so() -> None:
    def lost() -> Tensor:
        raise CollectiveError("peer slot 1 closed its connection", 0, 3)

    exchange = StagedExchange(
        torch.zeros(1), [Arrived, lambda _: WaitedExchange(lost, lambda: None)], lambda rows: rows
    )
    assert exchange.state is ExchangeState.SUBMITTED
    with pytest.raises(CollectiveError):
        exchange.payload()
    assert exchange.state is ExchangeState.BROKEN


# -- Parts, capacities, names


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_parts_of_a_matrix_cover_every_pairs_rows_once(parts: int) -> None:
    for counts_PP in MATRICES[4]:
        pieces = [chunk_counts(counts_PP, (part, parts)) for part in range(parts)]
        for source in range(4):
            assert [sum(column) for column in zip(*(piece[source] for piece in pieces), strict=True)] == list(
                counts_PP[source]
            )
            positions = [chunk_positions(counts_PP[source], (part, parts), CPU) for part in range(parts)]
            assert sorted(torch.cat(positions).tolist()) == list(range(sum(counts_PP[source])))
            assert [len(each) for each in positions] == [sum(piece[source]) for piece in pieces]
            assert all(bool((each.diff() > 0).all()) for each in positions)


def test_more_rows_than_a_pairs_capacity_are_refused_and_none_is_left_behind() -> None:
    group = SoloGroup(ONE_PEER, GlobalRank(0))
    padded = PaddedAllToAll(group, capacity=2)
    counts_PP = ((0, 3), (0, 0))
    with pytest.raises(
        RunnerError, match="pair_capacity_exceeded: a pair of peers exchanges 3 rows, its capacity is 2"
    ):
        padded.dispatch(torch.zeros(3, 2), counts_PP)


def test_an_unknown_transport_or_a_chunk_too_few_is_refused_listing_what_there_is() -> None:
    group, store = SoloGroup(ONE_PEER, GlobalRank(0)), StoreAddress("127.0.0.1", 1)
    groups = derive_groups(Topology("t", (Domain("node-0", ONE_PEER.peers),)), ONE_PEER)
    for name in set(NAMES) - {FUSED_WINDOW}:  # which takes GPUs
        assert join_transport("tcp", name, groups, GlobalRank(0), store, 1.0).name == name
    with pytest.raises(ConfigError, match=f"one of {', '.join(NAMES)}, found 'carrier_pigeon'"):
        join_transport("tcp", "carrier_pigeon", groups, GlobalRank(0), store, 1.0)
    with pytest.raises(ConfigError, match="all_to_all_v, padded_all_to_all, all_gather_filter, found 'hierarchical'"):
        transport_named("hierarchical", group)
    with pytest.raises(ConfigError, match="transport chunks must be >= 1, found 0"):
        transport_named("all_to_all_v", group, chunks=0)


def test_a_hierarchy_without_its_groups_is_refused_and_leaves_nothing_joined() -> None:
    topology, store = Topology("t", (Domain("node-0", ONE_PEER.peers),)), StoreAddress("127.0.0.1", 1)
    alone = TopologyGroups(topology, 0, (GroupBinding(GroupKind.FULL_EXPERT_PARALLEL, ONE_PEER),))
    with pytest.raises(TopologyError, match="group_missing: topology t binds no inter_node_relays group"):
        join_transport("tcp", "hierarchical", alone, GlobalRank(0), store, 1.0)
    assert join_transport("tcp", "all_to_all_v", alone, GlobalRank(0), store, 1.0).name == "all_to_all_v"


def test_parts_of_a_run_follow_one_another() -> None:
    bounds = [chunk_counts(((7,),), (part, 3))[0][0] for part in range(3)]
    assert bounds == [2, 2, 3] and all(later >= earlier for earlier, later in pairwise(bounds))
