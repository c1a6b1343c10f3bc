"""Releases in the tables and the text of 0x0C to 0x0E: faults, closures and rollbacks, each made, and refused."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.comm.group import ExpertGroup
from ray_moe.controlplane.bundles import build
from ray_moe.controlplane.promotion import FAULTS, Gate, PromotionPolicy, evaluate
from ray_moe.controlplane.ratios import Quantile, Window, total
from ray_moe.controlplane.release_states import ShadowComparison, Stage, State
from ray_moe.controlplane.releases import ReleaseRegistry
from ray_moe.dataplane.captured import CapturedDecode, DecodeBucket, Executables
from ray_moe.dataplane.completion import EVENTS, Event, check_events
from ray_moe.dataplane.dispatch import Dispatcher
from ray_moe.dataplane.handle import DispatchHandle, HandleABI, HandleHeader
from ray_moe.dataplane.layer import ExpertLayer, Invocation
from ray_moe.dataplane.plan import agree_layouts, layout_record, make_plan
from ray_moe.dataplane.policies import TokenHash
from ray_moe.dataplane.precision import QuantizedRows, codec_named
from ray_moe.dataplane.rows import ExpertRows, SegmentedRows
from ray_moe.dataplane.runners import CapacityPadded, Grouped, LayerWeights
from ray_moe.dataplane.schedule import bulk
from ray_moe.dataplane.strategies import Strategy
from ray_moe.errors import (
    BindingError,
    CompletionError,
    ConfigError,
    CountMismatchError,
    EvidenceError,
    GenerationError,
    HandleError,
    PlacementError,
    RayMoEError,
    ReleaseError,
    RoutesError,
    ScheduleError,
    StaleHandleError,
)
from ray_moe.evidence import Elapsed, RowSlots, Units
from ray_moe.identity import GlobalRank, LogicalExpertId
from ray_moe.placement import PlacementSnapshot
from tests.conformance.test_failure_rows_decode import captured_of, decode, executables
from tests.conformance.test_failure_rows_layer import (
    FP32,
    WEIGHTS,
    assert_dense,
    at,
    layer_of,
    onto_one_expert,
    unit,
)
from tests.conformance.test_failure_rows_peers import HIDDEN, TOP_K
from tests.conformance.test_lifecycle import HEADER, HIDDEN_TD, alone, bound
from tests.layers import CPU, layer_on, placement, random_routes, slot_map
from tests.peers import Peers, peers, transport_over
from tests.releases import NOTE, bring, bundle_of, cell_of, evidence_of, observed, report_on, serving, snapshot_of

__all__ = ["peers"]

PRIOR, CANDIDATE = "release-1", "release-2"


def rolled_out(handles: int = 0) -> ReleaseRegistry:
    """A candidate that has just become active, with so many leases out."""
    registry = serving(18, PRIOR)
    bring(registry, snapshot_of(19, CANDIDATE))
    for number in range(handles):
        registry.acquire(f"dispatch-{number}")
    return registry


# -- 0x0E: ten faults, each with its one safe outcome


def test_fi_0e_01_a_report_whose_hash_has_drifted_refuses_the_build() -> None:
    reports = {"parity.json": b"{}", "faults.json": b"[]"}
    reviewed = build(bundle_of(snapshot_of(1)), reports).upstream_report_digests
    with pytest.raises(ReleaseError, match=r"report faults.json was .*, is ") as refused:
        build(bundle_of(snapshot_of(1)), {**reports, "faults.json": b"[ ]"}, reviewed)
    assert (refused.value.reason, refused.value.mismatched) == (FAULTS["F01"], ("faults.json",))
    # And between build and load, where it is computed again.
    registry, snapshot = serving(1), snapshot_of(2, CANDIDATE)
    registry.build(build(bundle_of(snapshot), reports), NOTE)
    with pytest.raises(ReleaseError, match=r"^reject_build: release release-2: upstream_report_digests is"):
        registry.verify(CANDIDATE, build(bundle_of(snapshot), {**reports, "parity.json": b""}), NOTE)
    with pytest.raises(ReleaseError, match=r"^illegal_transition: release release-2 is BUILT: event 'load'"):
        registry.load(CANDIDATE, snapshot, observed(snapshot), NOTE)


def test_fi_0e_02_communicators_of_another_generation_refuse_the_load() -> None:
    registry, snapshot = serving(1), snapshot_of(2, CANDIDATE)
    bring(registry, snapshot, State.VERIFIED)
    rebuilt = observed(snapshot) | {1: bundle_of(snapshot, process_group_generation="ep-group-0-e1-ep2-etp1")}
    with pytest.raises(ReleaseError, match="rank 1: process_group_generation is ep-group-0-e1") as refused:
        registry.load(CANDIDATE, snapshot, rebuilt, NOTE)
    assert (refused.value.reason, refused.value.mismatched) == (FAULTS["F02"], ("process_group_generation",))
    with pytest.raises(ReleaseError, match=r"^not_dispatching"):
        registry.acquire("rank-0", release_id=CANDIDATE)


def layer_over(group: ExpertGroup) -> ExpertLayer:
    """Two replicas of expert 0 over two peers."""
    snapshot = placement([(0, 0), (1, 1), (0, 1)], group.spec)
    rank = group.spec.peers[group.peer_slot].value
    return layer_on(snapshot, rank, TWO_EXPERTS, transport_over(group, "all_to_all_v"), Grouped(), TokenHash())


TWO_EXPERTS = dataclasses.replace(
    WEIGHTS,
    gate_up=WEIGHTS.gate_up[:2],
    down=WEIGHTS.down[:2],
    gate_up_bias=None,
    down_bias=None,
)


def disagreeing(group: ExpertGroup, how: str) -> list[Any]:
    """Peer slot 1 announces, or does, something else than it should; then both run a healthy unit."""
    layer, gather = layer_over(group), group.gather_counts
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(group.peer_slot))
    routes = random_routes(group.peer_slot, 4, TOP_K, 2)
    spoilt = routes
    if group.peer_slot == 1 and how == "counts":

        def announce(record: Tensor) -> Tensor:
            record = record.clone()
            record[3] += 1  # one row more to the first slot than it accepted routes for
            return gather(record)

        layer.path.transport.group.gather_counts = announce  # type: ignore[method-assign]
    if group.peer_slot == 1 and how == "local check":
        spoilt = dataclasses.replace(routes, topk_ids=routes.topk_ids + 5)
    before, raised = group.bytes_sent + group.bytes_received, ""
    try:
        layer.forward(hidden, spoilt, Invocation(0, "decode"))
    except RayMoEError as error:
        raised = f"{type(error).__name__}: {error}"
    moved = group.bytes_sent + group.bytes_received - before
    layer.path.transport.group.gather_counts = gather  # type: ignore[method-assign]
    out = layer.forward(hidden, routes, Invocation(1, "decode"))
    return [raised, moved, float((out - TWO_EXPERTS.dense(hidden, routes)).abs().max())]


def test_fi_0e_03_counts_that_disagree_abort_every_peer_before_any_payload(peers: Peers) -> None:
    for raised, moved, away in peers.run(disagreeing, "counts", ranks=(0, 1)):
        assert raised.startswith(
            "CountMismatchError: layer 0 generation 1: peer slot 1 accepted 8 routes but its counts"
        )
        assert moved == 0
        assert away < 1e-5  # the group is as good as before


def test_px_0e_01_no_peer_enters_the_exchange_before_all_have_agreed(peers: Peers) -> None:
    # A peer that refuses its own routes says so in the count exchange: nobody is left in a collective without it.
    first, second = peers.run(disagreeing, "local check", ranks=(0, 1))
    assert first[0].startswith("CountMismatchError: layer 0 generation 1: peer slot 1 refused its own routes")
    assert second[0].startswith("RoutesError: logical expert ids must be in [0, 2)")
    assert first[1] == second[1] == 0
    assert max(first[2], second[2]) < 1e-5
    # No handle, and so no exchange, without the lines of all peers.
    snapshot = snapshot_of(1)
    slots = slot_map(snapshot, 0)
    record = layout_record([make_plan(random_routes(0, 2, 2, 2), slots, TokenHash())], 1, 0)
    with pytest.raises(CountMismatchError, match="1 lines of 6 numbers came, 2 peers with 3 slots send 2 lines of 6"):
        agree_layouts(record[None], slots)


class Damaging(HandleHeader):
    """Binds handles of which two entries of the inverse are swapped."""

    def bind(self, *args: Any, **options: Any) -> DispatchHandle:
        handle = super().bind(*args, **options)
        handle.inverse_N[[0, 1]] = handle.inverse_N[[1, 0]]
        return handle


def test_fi_0e_04_a_damaged_inverse_is_refused_before_the_output_is_seen() -> None:
    layer, (hidden, routes) = layer_of(), unit()
    healthy = layer.header
    layer.header = Damaging(**{each.name: getattr(healthy, each.name) for each in dataclasses.fields(HandleHeader)})
    with pytest.raises(HandleError, match="its inverse route does not follow from its routes"):
        layer.forward(hidden, routes, Invocation(0, "bare", audit=True))
    assert layer.counters.invocations == 0
    layer.header = healthy
    assert_dense(layer, hidden, routes)


def test_fi_0e_05_a_stale_handle_is_refused_and_its_routes_are_planned_again() -> None:
    old, new, (hidden, routes) = at(17), at(18), unit()
    registry = serving_of(old)
    stale = HandleHeader.grant(registry.acquire("rank-0"), old, HandleABI())
    registry.publish(new, bundle_of(new), NOTE)
    lease = registry.acquire("rank-0")
    layer = layer_of(new)
    layer.header = stale
    with pytest.raises(StaleHandleError, match="plan of generation 18 cannot bind to a lease of 17"):
        layer.forward(hidden, routes, Invocation(0, "bare"))
    layer.header = HandleHeader.grant(lease, registry.require_live(lease.generation), HandleABI())
    assert_dense(layer, hidden, routes)
    with pytest.raises(StaleHandleError, match=r"dispatch of handle .*: its placement_version is placement-v17"):
        Dispatcher(dataclasses.replace(HEADER, placement_version="placement-v18"), alone()).dispatch(HIDDEN_TD, bound())


def serving_of(snapshot: PlacementSnapshot) -> ReleaseRegistry:
    registry = ReleaseRegistry(final_after_steps=0)
    registry.launch(bundle_of(snapshot), snapshot, observed(snapshot), NOTE)
    return registry


def test_fi_0e_06_another_graph_key_is_a_counted_eager_fallback() -> None:
    layer, (hidden, routes) = layer_of(executables=executables(8, 16)), unit()
    captured = captured_of(layer)
    captured._scope = dataclasses.replace(captured._scope, placement_version="placement-v0")
    torch.testing.assert_close(decode(layer, hidden, routes), WEIGHTS.dense(hidden, routes), **FP32)
    assert (layer.counters.fallbacks, layer.counters.replays) == ({"graph_key_mismatch": 1}, 0)
    assert FAULTS["F06"] == "explicit_eager_fallback"


@pytest.mark.parametrize("scales", [2, 4], ids=["too few", "too many"])
def test_fi_0e_07_scales_that_do_not_number_the_rows_never_reach_an_expert(scales: int) -> None:
    rows_ND = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    held = QuantizedRows.of(rows_ND, 8)
    with pytest.raises(HandleError, match=rf"\[3, 8\] data take \[3, 1\] scales, found \[{scales}, 1\]"):
        QuantizedRows(held.data_ND, torch.ones(scales, 1), 8)
    # On the wire a row has its scale: without it the payload has another width, and nothing is decoded.
    codec = codec_named("fp8_row", 8, torch.float32)
    with pytest.raises(HandleError, match=r"takes rows \[N, 12\] in torch.uint8, found \[3, 8\]"):
        codec.decode(codec.encode(rows_ND)[:, :8], torch.float32)


class Drifting(Grouped):
    """Another representation of the same experts that gives other sums."""

    def run(self, rows: ExpertRows, weights: LayerWeights) -> SegmentedRows:
        out = super().run(rows, weights)
        return SegmentedRows(out.rows_RD * 1.01, out.offsets_S1)


def compared(candidate: Any) -> ShadowComparison:
    """The serving runner and the candidate's on the same units."""
    differ = 0
    for seed in range(4):
        hidden, routes = unit(seed=seed)
        outputs = [
            layer_of(runner=each).forward(hidden, routes, Invocation(0, "bare")) for each in (Grouped(), candidate)
        ]
        differ += not torch.allclose(*outputs, **FP32)
    return ShadowComparison(4, differ, "fp32 within 1e-5")


def test_fi_0e_08_runners_that_disagree_block_the_canary() -> None:
    registry = serving(1)
    bring(registry, snapshot_of(2, CANDIDATE), State.SHADOW)
    with pytest.raises(ReleaseError, match="release-2: 4 of 4 shadow outputs differ by fp32 within 1e-5") as refused:
        registry.canary(CANDIDATE, compared(Drifting()), NOTE)
    assert refused.value.reason == FAULTS["F08"]
    with pytest.raises(ReleaseError, match=r"^illegal_transition: release release-2 is SHADOW: event 'promote'"):
        registry.promote(CANDIDATE, report_on(CANDIDATE), NOTE)
    registry.canary(CANDIDATE, compared(CapacityPadded()), NOTE)


def test_fi_0e_09_a_schedule_without_a_completion_edge_is_refused() -> None:
    for event, node in EVENTS.items():
        for before in node.after:
            lacking = EVENTS | {event: dataclasses.replace(node, after=tuple(e for e in node.after if e != before))}
            with pytest.raises(CompletionError, match=f"^missing_dependency: {event} does not wait for {before}"):
                check_events(lacking)
    with pytest.raises(CompletionError, match=r"^missing_dependency: the schedule has no event combine_complete"):
        check_events({event: node for event, node in EVENTS.items() if event is not Event.COMBINE_COMPLETE})
    # As a strategy of the engine it is not built: nothing reads what its dispatch writes.
    lacking_tasks = tuple(
        dataclasses.replace(task, predecessors=("pack_0",)) if task.kind == "expert" else task for task in bulk()
    )
    with pytest.raises(ScheduleError, match="no_consumer: buffer receive_0 of dispatch_0"):
        Strategy("lacking", lacking_tasks)


def test_fi_0e_10_a_faulting_candidate_is_rolled_back_to_its_loaded_prior() -> None:
    registry = rolled_out(handles=3)
    failing = report_on(CANDIDATE, route_output_mismatches=1)
    with pytest.raises(ReleaseError, match=r"^not_promoted: release release-2: failed route_output_mismatches"):
        registry.finalise(CANDIDATE, failing, NOTE)
    # What is due leads through the whole rollback, whoever asks.
    registry.stop_new_dispatch(CANDIDATE, dataclasses.replace(NOTE, why=failing.failed_checks[0]))
    done = ["stop_new_dispatch"]
    while due := registry.due():
        (waits,) = due
        done.append(waits.event)
        if waits.event == "drain":
            assert registry.acquire("new work").generation == 18  # the prior serves before the candidate has drained
            for lease in [one for holder in waits.holders for one in registry.leases_of(holder)]:
                registry.release(lease)
        else:
            getattr(registry, waits.event)(CANDIDATE, NOTE)
    assert done == ["stop_new_dispatch", "activate_prior", "drain", "release_graphs", "retire", "complete"]
    assert registry.dispatching().release_id == PRIOR
    assert [snapshot.generation for snapshot in registry.live()] == [18]
    assert registry.log()[-1].operation == "complete"
    assert "route_output_mismatches" in {record.note.why for record in registry.log()}


# -- 0x0EB


def test_fc_0eb_01_a_logical_expert_id_is_no_gpu() -> None:
    snapshot = snapshot_of(1)
    expert: Any = LogicalExpertId(1)
    with pytest.raises(TypeError, match="destination_rank: expected GlobalRank, found LogicalExpertId"):
        dataclasses.replace(snapshot.layers[0].slots[0], destination_rank=expert)
    with pytest.raises(PlacementError, match="rank 1 has no seat in group ep-group-0 epoch 0"):
        snapshot.group.peer_slot(expert)
    # The device comes from the placement alone: expert 0 of this one runs on both ranks.
    homes = {snapshot.layers[0].slots[at].destination_rank for at in snapshot.layers[0].replicas(LogicalExpertId(0))}
    assert homes == {GlobalRank(0), GlobalRank(1)}


def test_fc_0eb_02_combine_has_no_map_but_its_handles() -> None:
    seat = Dispatcher(HEADER, alone())
    rows = seat.dispatch(HIDDEN_TD, bound())
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        seat.combine(rows, slot_map(snapshot_of(18), 0))  # type: ignore[call-arg]
    seat.header = dataclasses.replace(HEADER, placement_digest="another map of the same version")
    with pytest.raises(StaleHandleError, match=r"combine of handle .*: its placement_digest is"):
        seat.combine(rows)


def test_fc_0eb_03_token_ids_do_not_index_rows_in_expert_order() -> None:
    layer, (hidden, routes) = layer_of(), unit()

    class ByToken(HandleHeader):
        def bind(self, *args: Any, **options: Any) -> DispatchHandle:
            handle = super().bind(*args, **options)
            return dataclasses.replace(handle, order_N=handle.origin_token_N)

    layer.header = ByToken(**{each.name: getattr(layer.header, each.name) for each in dataclasses.fields(HandleHeader)})
    with pytest.raises(HandleError, match=r"rows of other experts have arrived|inverse route does not follow"):
        layer.forward(hidden, routes, Invocation(0, "bare", audit=True))


def test_fc_0eb_04_alignment_rows_are_no_drops() -> None:
    work = CapacityPadded(capacity=3, alignment=4).work([1, 3, 0], HIDDEN, 5)
    assert (work.padding.dropped, work.padding.alignment_only) == (RowSlots(0), RowSlots(3))
    with pytest.raises(
        EvidenceError, match="dropped_routes over attempted_routes, found alignment_rows over attempted"
    ):
        dataclasses.replace(
            cell_of().ratio("drop"),
            numerator=dataclasses.replace(cell_of().ratio("drop").numerator, of="alignment_rows"),
        )
    with pytest.raises(EvidenceError, match="797 accepted and 0 dropped routes are not 800 attempted ones"):
        cell_of(accepted_routes=797)  # three fillers booked as routes that are missing
    assert total([cell_of()]).ratio("drop").value == 0


def test_fc_0eb_05_a_fallback_keeps_all_routes() -> None:
    hidden, routes = onto_one_expert(5)
    layer = layer_of(executables=Executables([DecodeBucket(2, 16)], CPU))
    torch.testing.assert_close(decode(layer, hidden, routes), WEIGHTS.dense(hidden, routes), **FP32)
    assert layer.counters.fallbacks == {"rank_token_capacity_exceeded": 1}
    assert layer.counters.rows_local == routes.num_routes
    # Clipped to what the executable holds, the rows do not fit their routes.
    with pytest.raises(RoutesError, match=r"hidden must be \[5, 8\] in torch.float32, found \[2, 8\]"):
        decode(layer, hidden[:2], routes, step=1)


def test_fc_0eb_06_the_gate_has_one_owner() -> None:
    with pytest.raises(ConfigError, match="gate_location"):
        HandleABI(gate_location="both")
    hidden, routes = unit()
    once = WEIGHTS.dense(hidden, routes)
    for location in ("origin", "expert"):
        layer = layer_of()
        layer.header = dataclasses.replace(layer.header, abi=HandleABI(gate_location=location))
        torch.testing.assert_close(layer.forward(hidden, routes, Invocation(0, "bare")), once, **FP32)
    # Two owners are two ABIs: where dispatch says one and combine the other, combine refuses.
    seat = Dispatcher(HEADER, alone())
    rows = seat.dispatch(HIDDEN_TD, bound())
    seat.header = dataclasses.replace(HEADER, abi=HandleABI(gate_location="expert"))
    with pytest.raises(StaleHandleError, match=r"combine of handle .*: its abi is .*origin.*, the scope's is .*expert"):
        seat.combine(rows)


def test_fc_0eb_07_replicas_agree_before_they_are_published() -> None:
    registry, candidate = serving(18), snapshot_of(19, beside=4)
    first, *others = candidate.layers[0].slots
    missing = dataclasses.replace(
        candidate,
        layers=(
            dataclasses.replace(candidate.layers[0], slots=(dataclasses.replace(first, parameter_digest=""), *others)),
        ),
    )
    with pytest.raises(
        GenerationError, match="generation 19 cannot be published: 1 of 3 slots have no verified digest"
    ):
        registry.publish(missing, bundle_of(missing), NOTE)
    with pytest.raises(PlacementError, match="replicas of expert 0 differ in parameter digest"):
        missing.with_digests({(0, first.destination_rank.value, first.pool_slot): "stale"})
    assert registry.active().generation == 18
    registry.publish(candidate, bundle_of(candidate), NOTE)


def test_fc_0eb_08_a_stopped_candidate_accepts_no_dispatch() -> None:
    registry = rolled_out()
    lease = registry.acquire("rank-0")
    registry.stop_new_dispatch(CANDIDATE, NOTE)
    with pytest.raises(
        ReleaseError, match=r"^not_dispatching: rank-1 asks for a lease on release release-2, which is DR"
    ):
        registry.acquire("rank-1", release_id=CANDIDATE)
    with pytest.raises(ReleaseError, match=r"^not_dispatching"):
        registry.acquire("rank-0", 19, release_id=CANDIDATE)  # nor by naming the generation that one has a lease on
    registry.activate_prior(CANDIDATE, NOTE)
    assert registry.acquire("rank-1").generation == 18
    registry.release(lease)
    assert registry.due()[0].event == "release_graphs"  # it drains


def test_fc_0eb_09_graphs_outlive_the_handles_on_them() -> None:
    registry = rolled_out(handles=1)
    registry.stop_new_dispatch(CANDIDATE, NOTE)
    registry.activate_prior(CANDIDATE, NOTE)
    with pytest.raises(ReleaseError, match=r"^live_handles: .*; held by dispatch-0"):
        registry.release_graphs(CANDIDATE, NOTE)
    # On a peer: a binding in use is not freed either.
    layer = layer_of(executables=executables(4, 8))
    captured: CapturedDecode = captured_of(layer)
    (binding,) = captured._bindings.values()
    binding.acquire()
    with pytest.raises(BindingError, match=r"^referenced: binding .* has 1 references"):
        captured.free()
    binding.release()


def test_fc_0eb_10_synthetic_units_are_no_latency() -> None:
    units = Quantile.of_units(
        [Units(4), Units(24)], Fraction(95, 100), release_id=CANDIDATE, cell="decode", window=Window(0, 1)
    )
    gate = PromotionPolicy(gates=(Gate("p95", "latency", 0.25),))
    with pytest.raises(EvidenceError, match="gate p95 is about latency: Units shows none"):
        evaluate(gate, evidence_of(CANDIDATE, readings=(("p95", units),)))
    with pytest.raises(EvidenceError, match="Elapsed needs the measurement that gave it"):
        Elapsed(24.0, units)  # type: ignore[arg-type]
    with pytest.raises(EvidenceError, match="schedule units are no clock time"):
        f"{units.value:.1f} ms"
    assert str(units.value) == "24 units"
    synthetic = evidence_of(CANDIDATE, cells=(cell_of(CANDIDATE, measurement=None),))
    assert evaluate(PromotionPolicy(), synthetic).failed_checks == ("evidence_class",)


# -- 0x0EA


def test_px_0ea_01_a_candidate_is_not_retired_first() -> None:
    registry = rolled_out(handles=1)
    steps = (("not_stopped", "stop_new_dispatch"), ("prior_not_active", "activate_prior"), ("live_handles", None))
    for reason, then in steps:
        with pytest.raises(ReleaseError) as refused:
            registry.retire(CANDIDATE, NOTE)
        assert refused.value.reason == reason
        if then is not None:
            getattr(registry, then)(CANDIDATE, NOTE)
    registry.release(registry.leases_of("dispatch-0")[0])
    with pytest.raises(ReleaseError, match=r"^graphs_not_released"):
        registry.retire(CANDIDATE, NOTE)
    registry.release_graphs(CANDIDATE, NOTE)
    assert [snapshot.generation for snapshot in registry.retire(CANDIDATE, NOTE)] == [19]


def test_px_0ea_02_nobody_waits_for_zero_before_the_prior_is_active() -> None:
    registry = rolled_out(handles=1)
    registry.stop_new_dispatch(CANDIDATE, NOTE)
    registry.release(registry.leases_of("dispatch-0")[0])
    with pytest.raises(
        ReleaseError, match=r"^prior_not_active: release release-2 is STOPPED: release_graphs comes after"
    ):
        registry.release_graphs(CANDIDATE, NOTE)  # at zero handles already: new work still has nowhere to go
    with pytest.raises(ReleaseError, match=r"^no_active_release"):
        registry.acquire("rank-0")
    assert [one.event for one in registry.due()] == ["activate_prior"]
    registry.activate_prior(CANDIDATE, NOTE)
    assert registry.acquire("rank-0").generation == 18
    assert next(one.stage for one in registry.status() if one.release_id == CANDIDATE) is Stage.DRAINED


def test_px_0ea_03_the_candidates_graph_does_not_run_under_the_prior() -> None:
    slots, (hidden, routes) = executables(4, 8), unit()
    prior = layer_of(at(18), executables=slots)
    candidate = layer_of(at(19, [(0, 0), (1, 0), (2, 0), (3, 0)]), executables=slots)
    torch.testing.assert_close(decode(candidate, hidden, routes), WEIGHTS.dense(hidden, routes), **FP32)
    captured_of(prior).activate()  # the prior takes new dispatches again
    with pytest.raises(
        BindingError, match=r"^other_generation: .* of generation 19 cannot launch: the cell holds .* 18"
    ):
        decode(candidate, hidden, routes, step=1)
    own, prior.captured = prior.captured, candidate.captured
    with pytest.raises(BindingError, match=r"^other_generation"):
        decode(prior, hidden, routes, step=2)  # its bucket has the same shape
    prior.captured = own
    torch.testing.assert_close(decode(prior, hidden, routes, step=3), WEIGHTS.dense(hidden, routes), **FP32)
