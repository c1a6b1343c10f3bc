"""What crosses the links (0x07, 0x0A): rows made in whole layers over real peers, each refused by name, or harmless."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.comm.exchange import Exchange
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.hierarchical import Hierarchical
from ray_moe.comm.transports import AllToAllV, CountMatrix
from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.layer import Invocation
from ray_moe.dataplane.policies import TokenHash
from ray_moe.dataplane.precision import codec_named
from ray_moe.dataplane.runners import BlockSparse, CapacityPadded, Grouped, Runner
from ray_moe.errors import ConfigError, HandleError, RayMoEError, TopologyError
from ray_moe.evidence import RowSlots
from ray_moe.routes import Routes
from ray_moe.topology_ledger import FlatLedger, HierarchicalLedger, RouteCounts, compare
from tests.conformance.test_dispatch import (
    ORDER,
)
from tests.conformance.test_failure_rows_peers import EXPERTS, FFN, FP32, HIDDEN, TOP_K, WEIGHTS
from tests.layers import layer_on, placement, random_routes, spec_of
from tests.peers import Peers, peers, transport_over, two_nodes
from tests.unit.test_transports import ROW_BYTES, rows_of

__all__ = ["peers"]

# -- 0x07


def hierarchical_over(group: ExpertGroup) -> Hierarchical:
    transport = transport_over(group, "hierarchical")
    assert isinstance(transport, Hierarchical)
    return transport


def diverted(group: ExpertGroup, ids: tuple[int, int]) -> list[str]:
    """Expert e lies on peer e. The relay of the second node delivers what was for peer 2 to peer 3, and back."""
    rank, transport = group.peer_slot, hierarchical_over(group)
    snapshot = placement([(expert, expert) for expert in range(EXPERTS)], group.spec)
    layer = layer_on(snapshot, rank, WEIGHTS, transport, Grouped(), TokenHash())
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(rank))
    routes = Routes(torch.tensor([ids] * 3), torch.full((3, 2), 0.5))
    got = []
    for step in range(2):
        if step == 1:
            *staged, final = transport._held_by
            swapped = tuple((first, second, fourth, third) for first, second, third, fourth in final)
            transport._held_by = (*staged, swapped)
        try:
            out = layer.forward(hidden, routes, Invocation(step, "bare", audit=True))
            torch.testing.assert_close(out, WEIGHTS.dense(hidden, routes), **FP32)
            got.append("right")
        except RayMoEError as error:
            got.append(f"{type(error).__name__}: {error}")
    return got


def test_fl_07i_09_a_row_that_is_staged_to_another_owner_is_refused(peers: Peers) -> None:
    # As many rows for one as for the other: counts, shapes and the way back are right.
    healthy, swapped = zip(*peers.run(diverted, (2, 3), ranks=ORDER), strict=True)
    assert healthy == ("right",) * 4
    assert swapped[:2] == ("right",) * 2  # their own rows come home
    for refusal in swapped[2:]:
        assert "its rows of other experts have arrived in its segments" in refusal


def test_fl_07i_09_rows_that_the_owner_did_not_agree_to_are_refused_before_any_expert_runs(peers: Peers) -> None:
    healthy, swapped = zip(*peers.run(diverted, (0, 2), ranks=ORDER), strict=True)
    assert healthy == ("right",) * 4
    assert "CountMismatchError" in swapped[2] and "0 rows have arrived, 12 were agreed" in swapped[2]
    assert "CountMismatchError" in swapped[3] and "12 rows have arrived, 0 were agreed" in swapped[3]


# Between the two nodes only, so that every stage has relayed rows and no others.
CROSSING: CountMatrix = ((0, 0, 3, 1), (0, 0, 2, 0), (1, 0, 0, 0), (0, 4, 0, 0))
SPEC_OF_TWO_NODES = spec_of(ORDER)


class CountingStage:
    """One stage's group, and the rows that this peer sent to others in it."""

    def __init__(self, group: ExpertGroup) -> None:
        self.spec, self._group, self.rows = group.spec, group, 0

    def all_to_all_v(self, rows_ND: Tensor, send_counts_P: Sequence[int], recv_counts_P: Sequence[int]) -> Exchange:
        self.rows += sum(send_counts_P) - send_counts_P[self._group.peer_slot]
        return self._group.all_to_all_v(rows_ND, send_counts_P, recv_counts_P)


def staged_rows(group: ExpertGroup) -> tuple[list[int], list[int], int]:
    """Rows that this peer sent in each stage of dispatch, and of combine; bytes that it sent between nodes."""
    transport: Any = hierarchical_over(group)
    counted = []
    rows = rows_of(group.peer_slot, tuple(CROSSING[group.peer_slot]))
    for move in ("dispatch", "combine"):
        stages = [each and CountingStage(each) for each in transport._stage_groups]
        groups, transport._stage_groups = transport._stage_groups, stages
        rows = getattr(transport, move)(rows, CROSSING).payload()
        transport._stage_groups = groups
        counted.append([each.rows if each else 0 for each in stages])
    return counted[0], counted[1], transport.relay_bytes_sent


def test_fl_07i_10_the_relays_move_between_nodes_what_the_flat_exchange_moves(peers: Peers) -> None:
    topology, counts = two_nodes(SPEC_OF_TWO_NODES), RouteCounts.from_peers(CROSSING, SPEC_OF_TWO_NODES)
    flat = FlatLedger(counts, topology, ROW_BYTES)
    hierarchical = HierarchicalLedger(counts, topology, ROW_BYTES)
    between = sum(relayed for _, _, relayed in peers.run(staged_rows, ranks=ORDER))
    assert between == int(compare(flat, hierarchical).inter_node_round_trip_bytes) == 2 * 11 * ROW_BYTES
    # Six pairs become two messages; whoever books a message as a row loses routes.
    as_messages: CountMatrix = ((0, 0, 1, 0), (0,) * 4, (1, 0, 0, 0), (0,) * 4)
    coalesced = HierarchicalLedger(RouteCounts.from_peers(as_messages, SPEC_OF_TWO_NODES), topology, ROW_BYTES)
    with pytest.raises(TopologyError, match=r"^inter_node_payload_differs: "):
        compare(flat, coalesced)


def test_fl_07i_11_the_relay_hops_of_every_stage_are_in_the_ledger(peers: Peers) -> None:
    counts = RouteCounts.from_peers(CROSSING, SPEC_OF_TWO_NODES)
    ledger = HierarchicalLedger(counts, two_nodes(SPEC_OF_TWO_NODES), ROW_BYTES)
    out, back, _ = zip(*peers.run(staged_rows, ranks=ORDER), strict=True)
    dispatch, combine = ([sum(stage) for stage in zip(*rows, strict=True)] for rows in (out, back))
    ledger.check_counted(dispatch, combine)
    assert int(ledger.added_relay_rows) == dispatch[0] + dispatch[2] + combine[0] + combine[2] > 0
    for hidden in ([0, dispatch[1], 0], dispatch[1:2]):
        with pytest.raises(TopologyError, match=r"^relay_rows_differ: dispatch counted"):
            ledger.check_counted(hidden, combine)


# -- 0x0A

PRECISION_HOMES = [(2, 1), (0, 0), (3, 0), (1, 1)]
RUNNERS: tuple[Callable[[], Runner], ...] = (Grouped, lambda: CapacityPadded(alignment=16), lambda: BlockSparse(8))
FORMATS = ("native", "fp8_row", "fp8_block")
TOKENS = {0: 5, 1: 3}


def scaled(rank: int) -> tuple[Tensor, Routes]:
    """Rows of sizes from 1 to 10^4: a row under another row's scale would be far off."""
    tokens = TOKENS[rank]
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(rank))
    return hidden * 10.0 ** torch.arange(tokens)[:, None], random_routes(rank, tokens, TOP_K, EXPERTS)


@dataclasses.dataclass(frozen=True)
class Sent:
    """One forward: its sums, the rows that changed peers, and the payload bytes that the group counted."""

    out: Tensor
    rows_sent: int
    rows_received: int
    bytes_sent: int


def forward_under(group: ExpertGroup, abi: HandleABI, runner: int, hidden: Tensor, routes: Routes, step: int) -> Sent:
    rank = group.spec.peers[group.peer_slot].value
    layer = layer_on(
        placement(PRECISION_HOMES, group.spec), rank, WEIGHTS, AllToAllV(group), RUNNERS[runner](), TokenHash(), abi
    )
    before = group.bytes_sent
    out = layer.forward(hidden, routes, Invocation(step, "bare"))
    return Sent(out, layer.counters.rows_sent, layer.counters.rows_received, group.bytes_sent - before)


def in_every_format(group: ExpertGroup) -> dict[str, Sent]:
    """By format (and `quantized <format>`: the same rows, quantized before a native layer), runner and gate."""
    hidden, routes = scaled(group.spec.peers[group.peer_slot].value)
    got: dict[str, Sent] = {}

    def run(name: str, abi: HandleABI, runner: int = 0, rows: Tensor = hidden) -> None:
        got[name] = forward_under(group, abi, runner, rows, routes, len(got))

    for name in FORMATS:
        codec = codec_named(name, HIDDEN, torch.float32)
        run(name, HandleABI(payload_format=name))
        run(f"quantized {name}", HandleABI(), rows=codec.decode(codec.encode(hidden), torch.float32))
    for index in range(len(RUNNERS)):
        run(f"runner {index}", HandleABI(payload_format="fp8_row"), index)
    run("gate at expert", HandleABI(gate_location="expert"))
    return got


@pytest.fixture(scope="module")
def sent(peers: Peers) -> dict[int, dict[str, Sent]]:
    """By rank; the group's order is (1, 0)."""
    return dict(zip((1, 0), peers.run(in_every_format, ranks=(1, 0)), strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_fl_0af_01_the_groups_bytes_include_the_scales(sent: dict[int, dict[str, Sent]], name: str) -> None:
    codec = codec_named(name, HIDDEN, torch.float32)
    for by_name in sent.values():
        seen = by_name[name]
        assert seen.rows_sent > 0
        dispatched = seen.bytes_sent - seen.rows_received * HIDDEN * 4  # rows come back as fp32
        assert dispatched == int(codec.payload(RowSlots(seen.rows_sent)))
        if name != "native":  # one block is the whole row here: a scale of four bytes beside a byte for each element
            assert dispatched == seen.rows_sent * (HIDDEN + 4) > seen.rows_sent * HIDDEN


@pytest.mark.parametrize("name", FORMATS)
def test_fl_0af_02_scales_move_with_their_rows_through_dispatch(sent: dict[int, dict[str, Sent]], name: str) -> None:
    codec = codec_named(name, HIDDEN, torch.float32)
    for rank, by_name in sent.items():
        assert torch.equal(by_name[name].out, by_name[f"quantized {name}"].out)
        hidden, routes = scaled(rank)
        oracle = WEIGHTS.dense(codec.decode(codec.encode(hidden), torch.float32), routes)
        torch.testing.assert_close(by_name[name].out, oracle, **FP32)


class WithoutScales(AllToAllV):
    """A wire that carries the data alone."""

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Exchange:
        return super().dispatch(rows_ND[:, :HIDDEN].contiguous(), counts_PP)


def dispatched_without_scales(group: ExpertGroup) -> str:
    rank = group.spec.peers[group.peer_slot].value
    abi, snapshot = HandleABI(payload_format="fp8_row"), placement(PRECISION_HOMES, group.spec)
    layer = layer_on(snapshot, rank, WEIGHTS, WithoutScales(group), Grouped(), TokenHash(), abi)
    with pytest.raises(HandleError) as refused:
        layer.forward(*scaled(rank), Invocation(0, "bare"))
    return str(refused.value)


def test_fl_0af_02_rows_that_arrive_without_their_scales_are_refused(peers: Peers) -> None:
    for message in peers.run(dispatched_without_scales, ranks=(1, 0)):
        assert "takes rows [N, 12] in torch.uint8, found [" in message


def test_fl_0af_04_a_runners_padding_is_on_no_link(sent: dict[int, dict[str, Sent]]) -> None:
    counts_S = [3, 5, 4, 4]
    assert [int(runner().work(counts_S, HIDDEN, FFN).executed) for runner in RUNNERS] == [16, 64, 32]
    for by_name in sent.values():
        exact, padded, blocked = (by_name[f"runner {index}"] for index in range(len(RUNNERS)))
        for other in (padded, blocked):
            assert (other.rows_sent, other.rows_received) == (exact.rows_sent, exact.rows_received)
            assert other.bytes_sent == exact.bytes_sent
            torch.testing.assert_close(other.out, exact.out, **FP32)


def test_fl_0af_05_the_gate_follows_the_expert_wherever_it_is_applied(sent: dict[int, dict[str, Sent]]) -> None:
    with pytest.raises(ConfigError, match=r"gate_location must be 'origin' or 'expert', found 'input'; .*E\(gx\)"):
        HandleABI(gate_location="input")
    for rank, by_name in sent.items():
        torch.testing.assert_close(by_name["gate at expert"].out, by_name["native"].out, **FP32)
        hidden, routes = scaled(rank)
        # Another algebra is another model: each token's own gates on its input, and none after the expert.
        ones = torch.ones(len(hidden), 1)
        before = sum(
            WEIGHTS.dense(hidden * routes.topk_weights[:, k : k + 1], Routes(routes.topk_ids[:, k : k + 1], ones))
            for k in range(TOP_K)
        )
        assert not torch.allclose(torch.as_tensor(before), by_name["native"].out, **FP32)
