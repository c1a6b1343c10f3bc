"""The specification's eight routes over four ranks (0x03A to 0x03E), through the product and four real peers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.join import transport_named
from ray_moe.dataplane.audit import check_handles
from ray_moe.dataplane.dispatch import Dispatcher, to_experts
from ray_moe.dataplane.handle import DispatchHandle, HandleABI
from ray_moe.dataplane.layer import ExpertLayer, Invocation, LayerCounters
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.plan import SlotMap, agree_layouts, layout_record, plan_assignment
from ray_moe.dataplane.policies import TokenHash, policy_named
from ray_moe.dataplane.rows import ExpertRows, MaskedRows, SegmentedRows
from ray_moe.dataplane.runners import RUNNERS as RUNNER_CLASSES
from ray_moe.dataplane.runners import LayerWeights, runner_named
from ray_moe.dataplane.strategies import STRATEGIES, strategy_named
from ray_moe.errors import CountMismatchError, HandleError
from ray_moe.identity import GlobalRank
from ray_moe.placement import PlacementSnapshot
from ray_moe.routes import Routes
from ray_moe.topology import ProcessGroupSpec
from tests.conformance.test_placement_v17 import INPUTS, ROUTES, SNAPSHOT, routes_of
from tests.layers import header_of, named, placement, slot_map, spec_of
from tests.peers import TRANSPORTS, Peers, transport_over
from tests.peers import peers_of_each_kind as peers

__all__ = ["peers"]

FIXTURE = json.loads((pathlib.Path(__file__).parent / "data" / "dispatch.json").read_text())
EXPECTED, DERIVED = FIXTURE["expected"], FIXTURE["derived"]
ORDER = tuple(FIXTURE["inputs"]["peer_order_global_ranks"])
PERMUTED = (2, 0, 3, 1)
PARTITION = {part["source_rank"]: part["origin_partition"] for part in INPUTS["partitions"]}
NAMES = [route["route_id"] for route in ROUTES]
SCALES, HIDDEN, TOP_K = INPUTS["expert_scale_by_logical_expert"], INPUTS["hidden_width_elements"], INPUTS["top_k"]

RUNNERS = tuple(RUNNER_CLASSES)
POLICIES = ("token_hash", "locality_first", "least_load", "round_robin", "queue_aware")
# Decimal gates in fp32: relative 2^-23 on sums of two.
TOLERANCE: dict[str, Any] = {"atol": 0.0, "rtol": 1e-6}


# -- The fixture as the product's own inputs


def routes_at(rank: int) -> Routes:
    """What the router hands over on `rank`; ranks 2 and 3 own no partition and keep their seats all the same."""
    if rank in PARTITION:
        return routes_of(PARTITION[rank])
    return Routes(torch.zeros(0, TOP_K, dtype=torch.int64), torch.zeros(0, TOP_K))


def hidden_at(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = [row["values"] for row in INPUTS["hidden_rows"] if row["origin_partition"] == PARTITION.get(rank)]
    return torch.tensor(rows, dtype=dtype).view(-1, HIDDEN)


def assignment_at(rank: int) -> Tensor:
    """The frozen assignment as manifest positions."""
    manifest = [slot.physical_slot_id.value for slot in SNAPSHOT.layers[0].slots]
    chosen = [manifest.index(route["physical_slot_id"]) for route in ROUTES if route["source_rank"] == rank]
    return torch.tensor(chosen, dtype=torch.int64)


def combined_at(rank: int) -> Tensor:
    tokens = [f"{PARTITION[rank]}.t{token}" for token in (0, 1)] if rank in PARTITION else []
    return torch.tensor([EXPECTED["combined_outputs"][token] for token in tokens]).view(-1, HIDDEN)


def names_from(rank: int, semantic: Tensor) -> list[str]:
    mine = [route["route_id"] for route in ROUTES if route["source_rank"] == rank]
    return [mine[position] for position in semantic.tolist()]


def scaling_experts(snapshot: PlacementSnapshot, rank: int, dtype: torch.dtype = torch.float32) -> LayerWeights:
    """Experts that multiply a row by 1, 2, 3 or 4: the first projection copies the row, the second scales it."""
    slots = snapshot.layers[0].slots_of(GlobalRank(rank))
    identity = torch.eye(HIDDEN, dtype=dtype)
    down = torch.empty(len(slots), HIDDEN, HIDDEN, dtype=dtype)
    for slot in slots:
        down[slot.pool_slot] = identity * SCALES[slot.logical_expert_id.value]
    copies = torch.cat([identity, torch.zeros_like(identity)]).expand(len(slots), 2 * HIDDEN, HIDDEN)
    pool_slots = tuple(slot.pool_slot for slot in slots)
    return LayerWeights(copies, down, None, None, pool_slots, activation=lambda inner: inner[..., :HIDDEN])


def under(spec: ProcessGroupSpec) -> PlacementSnapshot:
    """placement-v17 in one epoch of its group."""
    return dataclasses.replace(SNAPSHOT, group=spec)


# -- Step by step, with the frozen assignment


@dataclass(frozen=True)
class Trace:
    """Everything that one rank sees of the invocation, routes by name."""

    counts: list[list[int]]
    send_offsets: list[int]
    sent: list[str]
    inverse: list[int]
    receive_splits: list[int]
    received: list[str]
    expert_major: list[str]
    expert_offsets: list[int]
    slots: list[str]
    outputs: dict[str, list[float]]
    combined: Tensor
    origin: list[tuple[int, int]]
    rows_sent: int


def valid_rows(rows: ExpertRows) -> Tensor:
    """Expert-major rows [R, D], from either mode."""
    if isinstance(rows, MaskedRows):
        return torch.cat([slot[:count] for slot, count in zip(rows.rows_SCD, rows.counts_S, strict=True)])
    return rows.rows_RD


def trace(group: ExpertGroup, transport_name: str, runner: str) -> Trace:
    rank = group.spec.peers[group.peer_slot].value
    snapshot = under(group.spec)
    transport = transport_over(group, transport_name, snapshot.topology)
    header, slots = header_of(snapshot, rank), slot_map(snapshot, rank)
    plan = plan_assignment(routes_at(rank), assignment_at(rank), slots)
    invocation = Invocation(1, "bare").number(0)
    layout = agree_layouts(group.gather_counts(layout_record([plan], header.digest64, invocation)), slots)[0]
    executor = runner_named(runner)
    handle = header.bind(1, "bare", 0, 0, plan, layout, mode=executor.mode)
    dispatcher = Dispatcher(header, transport, executor.mode)

    before = transport.bytes_moved[0]
    rows = dispatcher.dispatch(hidden_at(rank), handle)
    rows_sent = (transport.bytes_moved[0] - before) // (HIDDEN * 4)
    rows = executor.run(rows, scaling_experts(snapshot, rank))
    outputs = valid_rows(rows)
    combined = dispatcher.combine(rows)

    numbers = torch.tensor([NAMES.index(name) for name in names_from(rank, handle.order_N)]).view(-1, 1)
    arrived = transport.dispatch(numbers.to(torch.int64), handle.counts_PP).payload()
    expert_major = [NAMES[int(number)] for number in to_experts(arrived, handle)]
    return Trace(
        counts=[list(row) for row in handle.counts_PP],
        send_offsets=list(handle.send_offsets_P1),
        sent=names_from(rank, handle.order_N),
        inverse=handle.inverse_N.tolist(),
        receive_splits=list(handle.recv_counts_P),
        received=[NAMES[int(number)] for number in arrived],
        expert_major=expert_major,
        expert_offsets=list(handle.expert_offsets_S1),
        slots=[slot.physical_slot_id.value for slot in snapshot.layers[0].slots_of(GlobalRank(rank))],
        outputs=dict(zip(expert_major, outputs.tolist(), strict=True)),
        combined=combined,
        origin=list(zip(handle.origin_token_N.tolist(), handle.route_slot_N.tolist(), strict=True)),
        rows_sent=rows_sent,
    )


@pytest.fixture(scope="module", params=list(product(TRANSPORTS, RUNNERS)), ids=" ".join)
def traces(request: pytest.FixtureRequest, peers: Peers) -> list[Trace]:
    """All four ranks, in rank order, for each transport and runner."""
    transport, runner = request.param
    return peers.run(trace, transport, runner, ranks=ORDER)


def split(names: list[str], offsets: list[int]) -> list[list[str]]:
    return [names[start:end] for start, end in pairwise(offsets)]


def test_the_eight_routes_move_exactly_as_printed(traces: list[Trace]) -> None:
    for rank, seen in enumerate(traces):
        assert seen.counts == EXPECTED["count_matrix_rows"]
        assert seen.send_offsets == EXPECTED["send_offsets_rows_by_source"][rank]
        assert seen.send_offsets[-1] == DERIVED["row_sums_rows"][rank]
        assert split(seen.sent, seen.send_offsets) == EXPECTED["send_segments_by_source"][rank]
        assert seen.receive_splits == EXPECTED["receive_splits_rows_by_destination"][rank]
        assert sum(seen.receive_splits) == DERIVED["column_sums_rows"][rank]
        assert seen.received == EXPECTED["receive_order_by_destination"][rank]
        local = EXPECTED["local_expert_by_destination"][rank]
        assert seen.slots == local["slots"]
        assert seen.expert_offsets == local["offsets_rows"]
        assert split(seen.expert_major, seen.expert_offsets) == local["rows"]
        assert list(map(len, split(seen.expert_major, seen.expert_offsets))) == local["counts_rows"]
    assert sum(map(sum, traces[0].counts)) == EXPECTED["total_rows"] == EXPECTED["native_all_to_all_v_row_slots"]
    assert max(map(max, traces[0].counts)) == EXPECTED["max_peer_split_rows"]
    assert len(traces) ** 2 == EXPECTED["peer_cells"]


def test_all_three_positions_of_every_route_are_as_derived(traces: list[Trace]) -> None:
    positions = {
        name: {
            "source_send_position": next(seen.sent.index(name) for seen in traces if name in seen.sent),
            "destination_receive_position": next(seen.received.index(name) for seen in traces if name in seen.received),
            "local_expert_position": next(
                seen.expert_major.index(name) for seen in traces if name in seen.expert_major
            ),
        }
        for name in NAMES
    }
    assert positions == DERIVED["positions_by_route"]


def test_the_inverse_brings_all_routes_back_to_semantic_order(traces: list[Trace]) -> None:
    packed = [name for seen in traces for name in seen.sent]
    starts = [sum(len(seen.sent) for seen in traces[:rank]) for rank in range(4)]
    inverse = [start + place for start, seen in zip(starts, traces, strict=True) for place in seen.inverse]
    assert inverse == DERIVED["inverse_permutation_semantic_to_packed"]
    assert [packed[place] for place in inverse] == EXPECTED["round_trip_order"] == NAMES
    origins = [(route["origin_token_row"], route["route_slot"]) for route in ROUTES]
    assert [origin for seen in traces for origin in seen.origin] == origins


def test_experts_give_the_derived_rows_and_combine_the_printed_tokens(traces: list[Trace]) -> None:
    outputs = {name: row for seen in traces for name, row in seen.outputs.items()}
    assert outputs == DERIVED["expert_output_rows"]
    for rank, seen in enumerate(traces):
        torch.testing.assert_close(seen.combined, combined_at(rank), **TOLERANCE)


def test_all_to_all_v_sends_the_remote_rows_and_no_others(peers: Peers) -> None:
    traces = peers.run(trace, "all_to_all_v", "grouped", ranks=ORDER)
    assert sum(seen.rows_sent for seen in traces) == DERIVED["remote_rows"]
    assert sum(traces[rank].counts[rank][rank] for rank in range(4)) == DERIVED["local_rows"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_peer_order_permutes_the_splits_and_nothing_else(peers: Peers, transport: str) -> None:
    plain = peers.run(trace, transport, "grouped", ranks=ORDER)
    permuted = dict(zip(PERMUTED, peers.run(trace, transport, "grouped", ranks=PERMUTED), strict=True))
    # By peer slot, so (rank 2, rank 0, rank 3, rank 1): the packing of chapter 0x07's order.
    assert permuted[0].send_offsets == [0, 1, 2, 2, 4]
    assert split(permuted[0].sent, permuted[0].send_offsets) == [["r03"], ["r00"], [], ["r02", "r01"]]
    assert split(permuted[1].sent, permuted[1].send_offsets) == [["r06"], ["r05"], ["r04"], ["r07"]]
    for rank in range(4):
        assert permuted[rank].receive_splits == [plain[rank].receive_splits[source] for source in PERMUTED]
        assert permuted[rank].expert_major == plain[rank].expert_major
        assert torch.equal(permuted[rank].combined, plain[rank].combined)
        torch.testing.assert_close(permuted[rank].combined, combined_at(rank), **TOLERANCE)


# -- Whole layers, with every policy


class Frozen(TokenHash):
    """The fixture's own assignment as a policy."""

    name = "frozen"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def choose(self, routes: Routes, slots: SlotMap) -> Tensor:
        """A batch's part of it: a unit may come in several, and its first route says where the batch begins."""
        first = routes.first_route_id - routes_at(self._rank).first_route_id
        return assignment_at(self._rank)[first : first + routes.num_routes]


WAYS = [
    *product(TRANSPORTS, RUNNERS, (Frozen.name,), ("bulk",)),
    *product(("all_to_all_v",), ("grouped",), POLICIES, ("bulk",)),
    *product(("all_to_all_v", "hierarchical"), ("grouped", "masked_decode"), (Frozen.name,), STRATEGIES[1:]),
]


def whole_layers(group: ExpertGroup, abi: HandleABI) -> list[tuple[Tensor, LayerCounters]]:
    rank = group.spec.peers[group.peer_slot].value
    snapshot, got = under(group.spec), []
    over = {name: transport_over(group, name, snapshot.topology) for name in TRANSPORTS}
    for step, (transport, runner, policy, strategy) in enumerate(WAYS):
        layer = ExpertLayer(
            header_of(snapshot, rank, abi),
            slot_map(snapshot, rank),
            scaling_experts(snapshot, rank, abi.payload),
            Path(over[transport], runner_named(runner), strategy_named(strategy)),
            Frozen(rank) if policy == Frozen.name else policy_named(policy),
            LayerCounters(),
        )
        out = layer.forward(hidden_at(rank, abi.payload), routes_at(rank), Invocation(step, "bare", audit=True))
        got.append((out, layer.counters))
    return got


@pytest.mark.parametrize("gate", ["origin", "expert"])
@pytest.mark.parametrize("ranks", [ORDER, PERMUTED], ids=str)
def test_every_transport_runner_and_policy_combines_to_the_printed_tokens(
    peers: Peers, ranks: tuple[int, ...], gate: str
) -> None:
    for rank, got in zip(ranks, peers.run(whole_layers, HandleABI(gate_location=gate), ranks=ranks), strict=True):
        for way, (out, counters) in zip(WAYS, got, strict=True):
            torch.testing.assert_close(out, combined_at(rank), **TOLERANCE, msg=named(way))
            assert (counters.invocations, counters.audited) == (1, 1)
            assert counters.rows_local + counters.rows_sent == DERIVED["row_sums_rows"][rank]


def test_a_bf16_payload_changes_no_result(peers: Peers) -> None:
    for rank, got in enumerate(peers.run(whole_layers, HandleABI("bfloat16", "bfloat16"), ranks=ORDER)):
        for out, _ in got:
            assert torch.equal(out, combined_at(rank).bfloat16())


# -- Two ranks whose keys collide (0x03E)

TWO = FIXTURE["two_rank_trace"]


def two_ranks(group: ExpertGroup) -> tuple[int, list[list[int]], list[tuple[int, ...]]]:
    rank = group.peer_slot
    snapshot = placement(list(enumerate(TWO["inputs"]["expert_owner_rank"])), group.spec)
    header, slots = header_of(snapshot, rank), slot_map(snapshot, rank)
    ids = torch.tensor(TWO["inputs"]["expert_choices_by_rank_and_token"][rank])
    routes = Routes(ids, torch.ones(ids.shape))
    plan = plan_assignment(routes, ids.view(-1), slots)  # one slot per expert, in expert order
    layout = agree_layouts(group.gather_counts(layout_record([plan], header.digest64, 0)), slots)[0]
    handle = header.bind(0, "bare", 0, 0, plan, layout)
    keys = torch.stack([torch.full_like(handle.order_N, rank), handle.origin_token_N, handle.route_slot_N], dim=1)
    return handle.route_count, [list(row) for row in handle.counts_PP], [(*key,) for key in keys.tolist()]


def test_only_rank_token_and_route_slot_together_name_a_row(peers: Peers) -> None:
    got = peers.run(two_ranks, ranks=tuple(range(TWO["inputs"]["num_ranks"])))
    assert [routed for routed, _, _ in got] == TWO["expected"]["routed_rows_per_rank"]
    assert all(counts == TWO["expected"]["count_matrix_rows"] for _, counts, _ in got)
    keys = [key for _, _, keys in got for key in keys]
    assert len(set(keys)) == TWO["derived"]["distinct_keys_full_identity"]
    assert len({(rank, token) for rank, token, _ in keys}) == TWO["derived"]["distinct_keys_rank_and_token"]
    assert len({token for _, token, _ in keys}) == TWO["derived"]["distinct_keys_token_only"]


# -- One change at a time is refused by name

SPEC = spec_of(ORDER)


def handle_at(rank: int) -> DispatchHandle:
    """Rank's handle of the frozen invocation, from the four ranks' own count lines."""
    snapshot = under(SPEC)
    maps = [slot_map(snapshot, each) for each in ORDER]
    plans = [plan_assignment(routes_at(each), assignment_at(each), maps[each]) for each in ORDER]
    header = header_of(snapshot, rank)
    records = torch.stack([layout_record([plan], header.digest64, 0) for plan in plans])
    return header.bind(0, "bare", 0, 0, plans[rank], agree_layouts(records, maps[rank])[0])


def changed(rank: int, name: str, value: Any) -> DispatchHandle:
    return dataclasses.replace(handle_at(rank), **{name: value})


def swapped_inverse() -> DispatchHandle:
    handle = handle_at(0)
    handle.inverse_N[[1, 2]] = handle.inverse_N[[2, 1]]
    return handle


# What changes -> (rank, the handle with the change); each is the printed value but for one entry.
MISTAKES: dict[str, tuple[int, Callable[[], DispatchHandle]]] = {
    "count": (0, lambda: changed(0, "send_counts_P", (1, 1, 2, 0))),
    "offset": (0, lambda: changed(0, "send_offsets_P1", (0, 1, 2, 4, 4))),
    "stable_order": (0, lambda: changed(0, "order_N", torch.tensor([0, 1, 2, 3]))),
    "split_vector": (1, lambda: changed(1, "recv_counts_P", (1, 2, 0, 0))),
    "local_slot_offset": (1, lambda: changed(1, "expert_offsets_S1", (0, 1, 3))),
    "inverse_route": (0, swapped_inverse),
}


@pytest.mark.parametrize("rank", ORDER)
def test_the_unchanged_handles_pass(rank: int) -> None:
    check_handles([handle_at(rank)], slot_map(under(SPEC), rank))


@pytest.mark.parametrize("mistake", [name for name in FIXTURE["single_change_rejections"] if name != "combined_value"])
def test_a_single_change_in_a_handle_is_refused_by_name(mistake: str) -> None:
    rank, handle = MISTAKES[mistake]
    with pytest.raises(HandleError, match=f"its {mistake.replace('_', ' ')} does not follow from its routes"):
        check_handles([handle()], slot_map(under(SPEC), rank))


def test_a_single_changed_count_in_a_line_is_refused_by_every_rank() -> None:
    maps = [slot_map(under(SPEC), rank) for rank in ORDER]
    plans = [plan_assignment(routes_at(rank), assignment_at(rank), maps[rank]) for rank in ORDER]
    records = torch.stack([layout_record([plan], 1, 0) for plan in plans])
    records[0, 3 + 1] -= 1  # r02 is no longer announced to q1
    for slots in maps:
        with pytest.raises(CountMismatchError, match="peer slot 0 accepted 4 routes but its counts sum to 3"):
            agree_layouts(records, slots)


def with_a_mistake(group: ExpertGroup, mistake: str) -> Tensor:
    """The frozen invocation with one change under way, on the rank where it shows."""
    rank = group.peer_slot
    snapshot, transport = under(group.spec), transport_named("all_to_all_v", group)
    header, slots = header_of(snapshot, rank), slot_map(snapshot, rank)
    plan = plan_assignment(routes_at(rank), assignment_at(rank), slots)
    layout = agree_layouts(group.gather_counts(layout_record([plan], header.digest64, 0)), slots)[0]
    handle = header.bind(0, "bare", 0, 0, plan, layout)
    if mistake == "stable_order" and rank == 0:
        handle.order_N[[1, 2]] = handle.order_N[[2, 1]]
    dispatcher = Dispatcher(header, transport)
    rows = dispatcher.dispatch(hidden_at(rank), handle)
    assert isinstance(rows, SegmentedRows)
    if mistake == "local_slot_offset" and rank == 1:
        rows = SegmentedRows(rows.rows_RD, (0, 1, 3))
    rows = runner_named("grouped").run(rows, scaling_experts(snapshot, rank))
    assert isinstance(rows, SegmentedRows)
    if mistake == "local_slot_offset":
        rows = SegmentedRows(rows.rows_RD, handle.expert_offsets_S1)
    if mistake == "inverse_route" and rank == 0:
        handle.order_N[[0, 1]] = handle.order_N[[1, 0]]
    if mistake == "combined_value" and rank == 0:
        rows.rows_RD[0, 0] += 1
    return dispatcher.combine(rows)


@pytest.mark.parametrize("mistake", ["stable_order", "local_slot_offset", "inverse_route", "combined_value"])
def test_what_shapes_and_counts_cannot_show_changes_the_printed_result(peers: Peers, mistake: str) -> None:
    got = torch.cat(peers.run(with_a_mistake, mistake, ranks=ORDER))
    printed = torch.cat([combined_at(rank) for rank in ORDER])
    assert got.shape == printed.shape
    assert not torch.allclose(got, printed, **TOLERANCE)
    healthy = torch.cat(peers.run(with_a_mistake, "none", ranks=ORDER))
    torch.testing.assert_close(healthy, printed, **TOLERANCE)
