"""Wrong entries in handles (0x03) and wrong peer orders (0x07), made in whole layers over real peers and refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.comm.exchange import Exchange
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.transports import AllToAllV, CountMatrix
from ray_moe.dataplane.audit import check_handles
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.dataplane.layer import ExpertLayer, Invocation, LayerCounters
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.plan import agree_layouts, layout_record, plan_assignment
from ray_moe.dataplane.policies import TokenHash
from ray_moe.dataplane.runners import Grouped
from ray_moe.dataplane.strategies import strategy_named
from ray_moe.errors import CountMismatchError, HandleError, StaleHandleError
from ray_moe.routes import Routes
from tests.conformance.test_dispatch import (
    FIXTURE,
    MISTAKES,
    ORDER,
    PERMUTED,
    SPEC,
    TWO,
    Frozen,
    assignment_at,
    combined_at,
    handle_at,
    hidden_at,
    routes_at,
    scaling_experts,
    under,
    with_a_mistake,
)
from tests.layers import Experts, header_of, layer_on, placement, slot_map
from tests.peers import Peers, peers, transport_over

__all__ = ["peers"]

EXPERTS, TOP_K, HIDDEN, FFN = 4, 2, 8, 5
WEIGHTS = Experts.random(EXPERTS, HIDDEN, FFN, bias=True)
# fp32 sums of a dozen products of size one, in another order than the oracle's.
FP32: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


# -- One wrong entry in a handle of the eight routes, under way in a whole layer (0x03)


def entries_of(wrong: DispatchHandle, handle: DispatchHandle) -> DispatchHandle:
    names = ("send_counts_P", "send_offsets_P1", "order_N", "recv_counts_P", "expert_offsets_S1")
    changed = dataclasses.replace(handle, **{name: getattr(wrong, name) for name in names})
    changed.inverse_N.copy_(wrong.inverse_N)
    return changed


def fixtures_mistake(name: str) -> tuple[int, Callable[[DispatchHandle], DispatchHandle]]:
    rank, wrong = MISTAKES[name]
    return rank, lambda handle: entries_of(wrong(), handle)


def source_major(handle: DispatchHandle) -> DispatchHandle:
    """The receive buffer taken as expert-major."""
    handle.expert_order_R.copy_(torch.arange(handle.expert_order_R.numel()))
    return handle


def by_token(handle: DispatchHandle) -> DispatchHandle:
    """Positions rebuilt from the token id: both routes of a token get one place."""
    return dataclasses.replace(handle, order_N=handle.origin_token_N)


def by_global_rank(handle: DispatchHandle) -> DispatchHandle:
    """Global ranks taken for peer slots."""
    counts = tuple(handle.send_counts_P[PERMUTED.index(rank)] for rank in ORDER)
    return dataclasses.replace(handle, send_counts_P=counts)


def without_empty_peers(handle: DispatchHandle) -> DispatchHandle:
    return dataclasses.replace(handle, send_counts_P=tuple(filter(None, handle.send_counts_P)))


# What changes -> (the rank that does it, the change).
CHANGES: dict[str, tuple[int, Callable[[DispatchHandle], DispatchHandle]]] = {
    "none": (0, lambda handle: handle),
    **{name: fixtures_mistake(name) for name in MISTAKES},
    "source_major": (1, source_major),
    "by_token": (0, by_token),
    "without_empty_peers": (0, without_empty_peers),
    "by_global_rank": (0, by_global_rank),
}


def fixture_layer(group: ExpertGroup, change: Callable[[DispatchHandle], DispatchHandle]) -> ExpertLayer:
    """The eight routes' layer on this peer; every handle that it binds is changed."""
    rank = group.spec.peers[group.peer_slot].value
    snapshot = under(group.spec)

    class Changed(HandleHeader):
        def bind(self, *args: Any, **options: Any) -> DispatchHandle:
            return change(super().bind(*args, **options))

    header = header_of(snapshot, rank)
    return ExpertLayer(
        Changed(**{each.name: getattr(header, each.name) for each in dataclasses.fields(HandleHeader)}),
        slot_map(snapshot, rank),
        scaling_experts(snapshot, rank),
        Path(transport_over(group, "all_to_all_v"), Grouped(), strategy_named("bulk")),
        Frozen(rank),
        LayerCounters(),
    )


def audited(group: ExpertGroup, names: Sequence[str]) -> list[str | Tensor]:
    """One audited forward for each change: its output, or what was refused. All peers stay in step."""
    mine = group.spec.peers[group.peer_slot].value
    got: list[str | Tensor] = []
    for step, name in enumerate(names):
        rank, change = CHANGES[name]
        layer = fixture_layer(group, change if rank == mine else lambda handle: handle)
        try:
            got.append(layer.forward(hidden_at(mine), routes_at(mine), Invocation(step, "bare", audit=True)))
        except HandleError as error:
            got.append(str(error))
    return got


IN_ORDER = ("none", *MISTAKES, "source_major", "by_token", "without_empty_peers")
IN_ANOTHER = ("none", "by_global_rank")


@pytest.fixture(scope="module")
def seen(peers: Peers) -> dict[str, list[str | Tensor]]:
    """What each of the four ranks saw, by change; the group's order is that of the global ranks."""
    return dict(zip(IN_ORDER, map(list, zip(*peers.run(audited, IN_ORDER, ranks=ORDER), strict=True)), strict=True))


def refused_alone(seen: list[str | Tensor], rank: int, what: str) -> None:
    """The rank with the mistake refused its own handle by name; the others' rows were right all the same."""
    assert f"@rank-{rank} of layer 0 (generation 17, epoch " in str(seen[rank])
    assert f"): {what}" in str(seen[rank])
    for other in ORDER:
        if other != rank:
            torch.testing.assert_close(seen[other], combined_at(other))


def refuses_entry(seen: dict[str, list[str | Tensor]], name: str) -> None:
    """Through the layers, and by the entry's own name where nothing else has noticed before."""
    rank, wrong = MISTAKES[name]
    what = f"its {name.replace('_', ' ')} does not follow from its routes"
    refused_alone(seen[name], rank, what)
    with pytest.raises(HandleError, match=what):
        check_handles([wrong()], slot_map(under(SPEC), rank))


def test_px_03a1_01_a_rank_without_partition_keeps_its_seat_in_every_vector(
    seen: dict[str, list[str | Tensor]],
) -> None:
    for rank in (2, 3):
        handle = handle_at(rank)
        assert handle.send_counts_P == (0, 0, 0, 0)
        assert len(handle.recv_counts_P) == len(handle.counts_PP) == len(handle.recv_counts_PS) == len(ORDER)
        torch.testing.assert_close(seen["none"][rank], combined_at(rank))
    maps = [slot_map(under(SPEC), rank) for rank in ORDER]
    plans = [plan_assignment(routes_at(rank), assignment_at(rank), maps[rank]) for rank in ORDER]
    records = torch.stack([layout_record([plan], 1, 0) for plan in plans])
    with pytest.raises(CountMismatchError, match="2 lines of 9 numbers came, 4 peers with 6 slots send 4 lines of 9"):
        agree_layouts(records[:2], maps[0])


def two_of_four(group: ExpertGroup) -> str:
    """The two ranks that have partitions, as a group of their own under the placement of all four."""
    rank = group.spec.peers[group.peer_slot].value
    snapshot, path = under(SPEC), Path(AllToAllV(group), Grouped(), strategy_named("bulk"))
    header = dataclasses.replace(header_of(snapshot, rank), epoch=group.spec.epoch)
    try:
        ExpertLayer(
            header, slot_map(snapshot, rank), scaling_experts(snapshot, rank), path, Frozen(rank), LayerCounters()
        )
    except StaleHandleError as error:
        return str(error)
    return "built"


def test_px_03a1_01_a_group_without_the_ranks_that_have_no_partition_is_refused(peers: Peers) -> None:
    for slot, message in enumerate(peers.run(two_of_four, ranks=(0, 1))):
        assert f"slots compiled for peer {slot} of 4, this is peer {slot} of 2" in message


def test_px_03c1_01_the_receive_buffer_taken_as_expert_major_is_refused_by_the_layer(
    seen: dict[str, list[str | Tensor]],
) -> None:
    assert "@rank-1 of layer 0" in str(seen["source_major"][1])
    assert "its rows of other experts have arrived in its segments" in str(seen["source_major"][1])
    # Its origin got finite rows of the right shape, of other experts.
    wrong, right = seen["source_major"][0], combined_at(0)
    assert isinstance(wrong, Tensor) and wrong.shape == right.shape and bool(wrong.isfinite().all())
    assert not torch.allclose(wrong, right)


def test_px_03c2_01_positions_that_are_rebuilt_from_the_token_id_are_refused(
    seen: dict[str, list[str | Tensor]],
) -> None:
    assert "its inverse route does not follow from its routes" in str(seen["by_token"][0])
    assert "its rows of other experts have arrived in its segments" in str(seen["by_token"][1])  # an owner sees it too


def test_px_03c3_01_one_changed_count_is_refused(seen: dict[str, list[str | Tensor]]) -> None:
    refuses_entry(seen, "count")


def test_px_03c3_02_one_changed_offset_is_refused(seen: dict[str, list[str | Tensor]]) -> None:
    refuses_entry(seen, "offset")


def test_px_03c3_03_another_stable_order_is_refused(seen: dict[str, list[str | Tensor]]) -> None:
    assert "its stable order does not follow from its routes" in str(seen["stable_order"][0])
    assert "its rows of other experts have arrived in its segments" in str(seen["stable_order"][1])
    rank, wrong = MISTAKES["stable_order"]
    with pytest.raises(HandleError, match="its stable order does not follow"):
        check_handles([wrong()], slot_map(under(SPEC), rank))


def test_px_03c3_04_one_changed_split_is_refused(seen: dict[str, list[str | Tensor]]) -> None:
    refuses_entry(seen, "split_vector")


def test_px_03c3_05_one_changed_local_slot_offset_is_refused(seen: dict[str, list[str | Tensor]]) -> None:
    # The trace sees a row in a segment of another expert before the offsets themselves are recomputed.
    refused_alone(seen["local_slot_offset"], 1, "its rows of other experts have arrived in its segments")
    rank, wrong = MISTAKES["local_slot_offset"]
    with pytest.raises(HandleError, match="its local slot offset does not follow from its routes"):
        check_handles([wrong()], slot_map(under(SPEC), rank))


def test_px_03c3_06_one_changed_inverse_entry_is_refused(seen: dict[str, list[str | Tensor]]) -> None:
    refuses_entry(seen, "inverse_route")


def test_px_03c3_07_one_changed_combined_value_is_no_token_major_result(peers: Peers) -> None:
    got = torch.cat(peers.run(with_a_mistake, "combined_value", ranks=ORDER))
    with pytest.raises(AssertionError, match=r"Mismatched elements: 1 / 12"):
        torch.testing.assert_close(got, torch.cat([combined_at(rank) for rank in ORDER]))


# -- Two ranks whose tokens have the same numbers (0x03E)


class ByToken(AllToAllV):
    """A wire that returns rows by token id: to whoever has a token of that number, and not to their origin."""

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Exchange:
        first, second = rows_RD.split([line[self.group.peer_slot] for line in counts_PP])
        return super().combine(torch.cat([second, first]), counts_PP)


def returned_by_token(group: ExpertGroup) -> tuple[float, str]:
    """How far the sums are from the dense ones without an audit, and what an audit says."""
    inputs, rank = TWO["inputs"], group.peer_slot
    ids = torch.tensor(inputs["expert_choices_by_rank_and_token"][rank])
    hidden, routes = (
        torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(rank)),
        Routes(ids, torch.ones(2, 2)),
    )
    snapshot = placement(list(enumerate(inputs["expert_owner_rank"])), group.spec)
    layer = layer_on(snapshot, rank, WEIGHTS, ByToken(group), Grouped(), TokenHash())
    wrong = layer.forward(hidden, routes, Invocation(0, "bare"))
    with pytest.raises(HandleError) as refused:
        layer.forward(hidden, routes, Invocation(1, "bare", audit=True))
    return float((wrong - WEIGHTS.dense(hidden, routes)).abs().max()), str(refused.value)


def test_px_03e_01_rows_combined_by_token_id_alone_are_refused(peers: Peers) -> None:
    for away, message in peers.run(returned_by_token, ranks=(0, 1)):
        assert away > 0.1  # every shape and count is right, and the result is not
        assert "its rows have come back to other places" in message


# -- 0x07


def test_fl_07i_01_a_layer_gives_the_same_bits_in_every_peer_order(
    peers: Peers, seen: dict[str, list[str | Tensor]]
) -> None:
    permuted = dict(zip(PERMUTED, peers.run(audited, IN_ANOTHER, ranks=PERMUTED), strict=True))
    for rank in ORDER:
        assert torch.equal(permuted[rank][0], seen["none"][rank])
    # Counts by global rank have the right sum and the right length.
    refused_alone([permuted[rank][1] for rank in ORDER], 0, "its count does not follow from its routes")


def test_fl_07i_02_a_layers_peers_without_rows_keep_their_axes(seen: dict[str, list[str | Tensor]]) -> None:
    handle = handle_at(0)
    assert handle.send_counts_P == tuple(FIXTURE["expected"]["count_matrix_rows"][0]) == (1, 2, 1, 0)
    refused_alone(seen["without_empty_peers"], 0, "its count does not follow from its routes")
