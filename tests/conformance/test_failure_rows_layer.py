"""Rows of 0x03 and 0x04 made against a whole layer or engine of one peer: each is refused by name, or harmless.

The other rows: `test_failure_rows_decode.py`, `_order.py` and `_peers.py`; against single modules `test_failures_*.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path as Folder
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.transports import AllToAllV
from ray_moe.controlplane.generations import PlacementRegistry
from ray_moe.dataplane.block_sparse import BlockTopology
from ray_moe.dataplane.captured import Executables
from ray_moe.dataplane.completion import Event
from ray_moe.dataplane.dispatch import Dispatcher, weighted_sum
from ray_moe.dataplane.handle import DispatchHandle, HandleABI, HandleHeader
from ray_moe.dataplane.layer import ExpertLayer, Invocation, LayerCounters
from ray_moe.dataplane.ledger import SlabStrides, check_problems, describe_problems
from ray_moe.dataplane.policies import TokenHash
from ray_moe.dataplane.rows import ExpertRows, MaskedRows, SegmentedRows
from ray_moe.dataplane.runners import BlockSparse, CapacityPadded, Grouped, LayerWeights, MaskedDecode, Runner
from ray_moe.engine.generation import build_view
from ray_moe.errors import (
    CompletionError,
    CountMismatchError,
    HandleError,
    RetirementRefusedError,
    RunnerError,
    StaleHandleError,
)
from ray_moe.identity import GlobalRank
from ray_moe.placement import PlacementSnapshot
from ray_moe.routes import Routes
from tests.conformance.test_lifecycle import HEADER, HIDDEN_TD, alone, bound
from tests.layers import ONE_PEER, Experts, layer_on, placement, random_routes
from tests.one_peer import RANK, OnePeer

EXPERTS, TOP_K, HIDDEN, FFN = 4, 2, 8, 5
HOMES = [(2, 0), (0, 0), (3, 0), (1, 0)]
WEIGHTS = Experts.random(EXPERTS, HIDDEN, FFN, bias=True)
# fp32 sums of a dozen products of size one, in another order than the oracle's.
FP32: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def at(generation: int, homes: list[tuple[int, int]] = HOMES) -> PlacementSnapshot:
    return placement(homes, ONE_PEER, generation=generation)


def layer_of(
    snapshot: PlacementSnapshot | None = None, runner: Runner | None = None, *, executables: Executables | None = None
) -> ExpertLayer:
    transport = AllToAllV(SoloGroup(ONE_PEER, GlobalRank(0)))
    return layer_on(snapshot or at(1), 0, WEIGHTS, transport, runner or Grouped(), TokenHash(), executables=executables)


def use(layer: ExpertLayer, **parts: Any) -> None:
    """Another runner, strategy or transport, behind the layer's back."""
    layer.path = dataclasses.replace(layer.path, **parts)


def unit(tokens: int = 4, seed: int = 3) -> tuple[Tensor, Routes]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, HIDDEN, generator=generator), random_routes(seed, tokens, TOP_K, EXPERTS)


def onto_one_expert(tokens: int) -> tuple[Tensor, Routes]:
    """Every token's first route goes to expert 0."""
    hidden, routes = unit(tokens)
    return hidden, dataclasses.replace(routes, topk_ids=torch.tensor([[0, 1]] * tokens))


def watched(layer: ExpertLayer) -> list[DispatchHandle]:
    """The handles that the layer binds from now on."""
    kept: list[DispatchHandle] = []

    class Watched(HandleHeader):
        def bind(self, *args: Any, **options: Any) -> DispatchHandle:
            kept.append(super().bind(*args, **options))
            return kept[-1]

    layer.header = Watched(**{each.name: getattr(layer.header, each.name) for each in dataclasses.fields(HandleHeader)})
    return kept


class Doing(Grouped):
    """A runner that does something else first, with rows out and none back."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def run(self, rows: ExpertRows, weights: LayerWeights) -> SegmentedRows:
        self._act()
        return super().run(rows, weights)


def assert_dense(layer: ExpertLayer, hidden: Tensor, routes: Routes, step: int = 9) -> None:
    """The layer still takes these very rows, all of them."""
    out = layer.forward(hidden, routes, Invocation(step, "bare", audit=True))
    torch.testing.assert_close(out, WEIGHTS.dense(hidden, routes), **FP32)


# -- 0x03


def test_pa_03d5_04_a_generation_retires_after_its_handles_outputs_are_ready() -> None:
    registry = PlacementRegistry(final_after_steps=0)
    registry.publish(at(17))
    lease = registry.acquire("rank-0")
    layer, (hidden, routes) = layer_of(at(17)), unit()
    layer.header = HandleHeader.grant(lease, registry.active(), HandleABI())

    def move_on() -> None:
        registry.publish(at(18))
        registry.retire(17)

    use(layer, runner=Doing(move_on))
    with pytest.raises(RetirementRefusedError, match="generation 17 cannot retire: held by rank-0"):
        layer.forward(hidden, routes, Invocation(0, "bare"))
    # The handle is held until output-ready in its turn, and the lease until its handles are.
    kept = watched(layer)
    use(layer, runner=Doing(lambda: kept[-1].release()))
    with pytest.raises(CompletionError, match=r"^missing_dependency: .*handle_released waits for output_ready"):
        layer.forward(hidden, routes, Invocation(1, "bare"))
    use(layer, runner=Grouped())
    assert_dense(layer, hidden, routes)
    registry.release(lease)
    assert registry.retire(17) == at(17)
    with pytest.raises(StaleHandleError, match="generation 17 is RETIRED"):
        registry.require_live(17)


def test_px_03c1_01_the_receive_buffer_is_no_expert_input() -> None:
    handle, seat = bound(), Dispatcher(HEADER, alone())
    source_major = seat.transport.dispatch(seat.pack(HIDDEN_TD, handle), handle.counts_PP).payload()
    with pytest.raises(CompletionError, match=r"^missing_dependency: .* grouped came early, expert_input_ready"):
        handle.completion.require(Event.EXPERT_INPUT_READY, "grouped")
    assert source_major.shape[0] == handle.expert_offsets_S1[-1]  # its shape would not have told


class Returning(Grouped):
    """A runner that answers with other rows than it should."""

    def __init__(self, change: Callable[[SegmentedRows], SegmentedRows]) -> None:
        self._change = change

    def run(self, rows: ExpertRows, weights: LayerWeights) -> SegmentedRows:
        return self._change(super().run(rows, weights))


def summed_by_token(rows: SegmentedRows) -> SegmentedRows:
    """Two rows of one segment as one: whoever keys by rank and token takes them for the same."""
    end = rows.offsets_S1[-1]
    merged = torch.cat([rows.rows_RD[: end - 2], rows.rows_RD[end - 2 :].sum(0, keepdim=True)])
    return SegmentedRows(merged, tuple(min(offset, end - 1) for offset in rows.offsets_S1))


def test_px_03e_02_two_routes_of_a_token_stay_two_rows_until_the_sum() -> None:
    hidden, routes = unit()
    routes = dataclasses.replace(routes, topk_ids=torch.ones_like(routes.topk_ids))  # both routes in one segment
    layer = layer_of(runner=Returning(summed_by_token))
    with pytest.raises(CountMismatchError, match=r"combine of handle .*: rows lie at \[.*7\], dispatch gave \[.*8\]"):
        layer.forward(hidden, routes, Invocation(0, "bare"))
    use(layer, runner=Grouped())
    assert_dense(layer, hidden, routes)


def test_px_03e_02_rows_reduced_before_the_gates_are_refused_by_the_sum() -> None:
    handle, seat = bound(), Dispatcher(HEADER, alone())
    seat.combine_a(seat.dispatch(HIDDEN_TD, handle))
    reduced_TD = seat.combine_b().view(*HIDDEN_TD.shape[:1], -1, HIDDEN_TD.shape[1]).sum(1)
    with pytest.raises(HandleError, match="cover 4 of 8 routes"):
        weighted_sum([(handle, reduced_TD)])


# -- 0x04


def test_fl_04g_01_a_layer_under_a_capacity_below_its_largest_segment_is_refused() -> None:
    hidden, routes = onto_one_expert(3)
    layer = layer_of(runner=CapacityPadded(capacity=1))
    with pytest.raises(RunnerError, match=r"^capacity_below_largest_segment: slot 1 has 3 rows, the capacity is 1"):
        layer.forward(hidden, routes, Invocation(0, "bare"))
    assert layer.counters == LayerCounters()  # nothing was executed, not even the rows that fit
    use(layer, runner=MaskedDecode(), slot_capacity=1)
    with pytest.raises(RunnerError, match=r"^slot_capacity_exceeded: .*a slot has 3 rows, its capacity is 1"):
        layer.forward(hidden, routes, Invocation(1, "bare"))
    for runner in (CapacityPadded(), CapacityPadded(capacity=3), Grouped()):
        use(layer, runner=runner, slot_capacity=None)
        assert_dense(layer, hidden, routes)


def with_filler(rows: SegmentedRows) -> SegmentedRows:
    """Two rows of padding left in the last segment, as if they were somebody's."""
    return SegmentedRows(torch.cat([rows.rows_RD, rows.rows_RD[:2]]), (*rows.offsets_S1[:-1], rows.offsets_S1[-1] + 2))


def into_the_next_segment(rows: SegmentedRows) -> SegmentedRows:
    """The first slot's last row counted as the second slot's."""
    first, *others = rows.offsets_S1[1:]
    return SegmentedRows(rows.rows_RD, (0, first - 1, *others))


@pytest.mark.parametrize("change", [with_filler, into_the_next_segment])
def test_fl_04g_02_a_runners_filler_or_other_segments_are_refused_at_combine(
    change: Callable[[SegmentedRows], SegmentedRows],
) -> None:
    layer, (hidden, routes) = layer_of(runner=Returning(change)), onto_one_expert(4)
    routes = dataclasses.replace(routes, topk_ids=torch.tensor([[2, 1]] * 4))
    with pytest.raises(CountMismatchError, match=r"combine of handle placement-v1/.*: rows lie at .*, dispatch gave"):
        layer.forward(hidden, routes, Invocation(0, "bare"))


class Widening(MaskedDecode):
    """Takes one free row of the buffer for a valid one."""

    def run(self, rows: ExpertRows, weights: LayerWeights) -> MaskedRows:
        out = super().run(rows, weights)
        return MaskedRows(out.rows_SCD, (out.counts_S[0] + 1, *out.counts_S[1:]))


def test_fl_04g_02_a_row_beyond_the_mask_is_refused_at_combine() -> None:
    layer, (hidden, routes) = layer_of(runner=Widening()), onto_one_expert(4)
    with pytest.raises(CountMismatchError, match=r"rows lie at \[0, 1, .*\], dispatch gave \[0, 0, 4, 4, 8\]"):
        layer.forward(hidden, routes, Invocation(0, "bare"))


@pytest.mark.parametrize("extra", [2, -1])
def test_fl_04g_02_filler_behind_the_last_segment_is_refused_at_combine(extra: int) -> None:
    def change(rows: SegmentedRows) -> SegmentedRows:
        filled = torch.cat([rows.rows_RD, rows.rows_RD[:2]])
        return SegmentedRows(filled[: len(rows.rows_RD) + extra], rows.offsets_S1)

    layer, (hidden, routes) = layer_of(runner=Returning(change)), unit()
    with pytest.raises(CountMismatchError, match=rf"combine of handle .*: {8 + extra} rows came back, dispatch gave 8"):
        layer.forward(hidden, routes, Invocation(0, "bare"))


class Cropping(MaskedDecode):
    """Returns less of the buffer than it was given: the second slot's rows would be read as the first one's."""

    def run(self, rows: ExpertRows, weights: LayerWeights) -> MaskedRows:
        out = super().run(rows, weights)
        return MaskedRows(out.rows_SCD[:, :1], out.counts_S)


def test_fl_04g_02_a_buffer_without_room_for_its_counts_is_refused_at_combine() -> None:
    layer, (hidden, routes) = layer_of(runner=Cropping()), onto_one_expert(4)
    with pytest.raises(CountMismatchError, match=r"a buffer of 4 x 1 rows came back for counts \[0, 4, 0, 4\]"):
        layer.forward(hidden, routes, Invocation(0, "bare"))


def test_fl_04g_03_a_layers_descriptors_follow_its_own_slots() -> None:
    layer, (hidden, routes) = layer_of(), unit()
    kept, weights = watched(layer), layer.weights
    layer.forward(hidden, routes, Invocation(0, "bare"))
    strides = SlabStrides(HIDDEN, FFN, weights.gate_up.stride(0), weights.down.stride(0))
    offsets = kept[0].expert_offsets_S1
    own = describe_problems(offsets, weights.pool_slots, strides)
    check_problems(own, offsets, layer.slots.pool_slots, strides)
    # Storage is numbered against manifest order: by position, finite weights of a foreign expert.
    by_position = describe_problems(offsets, tuple(range(EXPERTS)), strides)
    with pytest.raises(RunnerError, match=r"^descriptor_of_another_slot: slot 0 \(pool slot 3\) has gate_weight_offs"):
        check_problems(by_position, offsets, layer.slots.pool_slots, strides)


def test_fl_04g_03_an_engine_builds_no_view_over_another_experts_weights(family_dir: Callable[..., Folder]) -> None:
    peer = OnePeer(family_dir("qwen3_moe"))
    placed, view = peer._placed, peer.loop.view
    assert placed is not None
    first, second, *others = placed.layers[0].slots
    slots = (
        dataclasses.replace(first, pool_slot=second.pool_slot),
        dataclasses.replace(second, pool_slot=first.pool_slot),
        *others,
    )
    wrong = dataclasses.replace(placed, layers=(dataclasses.replace(placed.layers[0], slots=slots), *placed.layers[1:]))
    where = f"generation 1 layer {placed.layers[0].layer} slot {first.physical_slot_id}"
    with pytest.raises(StaleHandleError, match=f"{where}: resident parameters are .*, the placement was verified with"):
        build_view(view.lease, view.header, wrong, RANK, peer.trunk, peer.pool, peer.backend, peer.counters)
    again = build_view(view.lease, view.header, placed, RANK, peer.trunk, peer.pool, peer.backend, peer.counters)
    assert {layer.weights.generation for layer in again.layers.values()} == {1}


class KeepingTopology(BlockSparse):
    """Builds its block topology once, and follows it ever after."""

    kept: BlockTopology | None = None

    def topology(self, rows: SegmentedRows, weights: LayerWeights) -> BlockTopology:
        self.kept = self.kept or super().topology(rows, weights)
        return self.kept


def test_fl_04g_06_a_topology_does_not_outlive_its_counts_or_its_generation() -> None:
    (hidden, routes), moved = onto_one_expert(4), [(0, 0), (2, 0), (1, 0), (3, 0)]
    before, after = layer_of(at(17)), layer_of(at(18, moved))
    for layer in (before, after):
        layer.weights = dataclasses.replace(layer.weights, generation=layer.header.generation)
    runner = KeepingTopology(block_rows=2)
    for layer in (before, after):
        use(layer, runner=runner)
    assert_dense(before, hidden, routes)
    with pytest.raises(RunnerError, match=r"^stale_topology: built for generation 17.*used under generation 18"):
        after.forward(hidden, routes, Invocation(0, "bare"))
    with pytest.raises(RunnerError, match=r"^stale_topology: .*counts \[0, 4, 0, 4\].* counts \[4, 0, 0, 4\]"):
        before.forward(hidden, dataclasses.replace(routes, topk_ids=torch.tensor([[2, 1]] * 4)), Invocation(1, "bare"))
    # On its own the runner follows both, back and forth.
    runner_itself = BlockSparse(block_rows=2)
    for step, layer in enumerate((before, after, before)):
        use(layer, runner=runner_itself)
        assert_dense(layer, hidden, routes, step)
