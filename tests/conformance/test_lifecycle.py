"""The lifecycle fixture (0x06B, 0x06F) walked by handles and dispatchers, and rows that their order refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.comm.join import transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.transports import Transport
from ray_moe.dataplane.completion import Event
from ray_moe.dataplane.dispatch import STAGES, Dispatcher, Stage
from ray_moe.dataplane.handle import LIFETIME, DispatchHandle, HandleHeader, Lifetime, State
from ray_moe.dataplane.plan import agree_layouts, layout_record, make_plan
from ray_moe.dataplane.policies import TokenHash
from ray_moe.dataplane.rows import ExpertRows, MaskedRows, Mode, SegmentedRows
from ray_moe.errors import CompletionError, IllegalTransitionError, StageError, StaleHandleError
from ray_moe.identity import GlobalRank
from ray_moe.placement import Lease, PlacementSnapshot
from tests.layers import ONE_PEER, header_of, placement, random_routes, slot_map, spec_of

FIXTURE = json.loads((Path(__file__).parent / "data" / "lifecycle.json").read_text())
INPUTS, EXPECTED = FIXTURE["inputs"], FIXTURE["expected"]
MACHINE = INPUTS["stage_machine"]
# state -> the event that leads there: the forward edges, one each.
EVENT_INTO = {
    following: event for edges in LIFETIME.values() for event, following in edges.items() if event != "abandon"
}

TOKENS, TOP_K, EXPERTS, HIDDEN = 4, 2, 3, 3
HIDDEN_TD = torch.arange(TOKENS * HIDDEN, dtype=torch.float32).view(TOKENS, HIDDEN)
ROUTES = random_routes(1, TOKENS, TOP_K, EXPERTS)


def generation(number: int) -> PlacementSnapshot:
    return placement([(expert, 0) for expert in range(EXPERTS)], ONE_PEER, generation=number)


SNAPSHOT = generation(17)
HEADER = header_of(SNAPSHOT)
NEXT = header_of(generation(18))


def bound(mode: Mode = Mode.NORMAL, header: HandleHeader = HEADER, step: int = 0) -> DispatchHandle:
    """A handle of one peer, ready to dispatch."""
    slots = slot_map(SNAPSHOT, 0)
    plan = make_plan(ROUTES, slots, TokenHash())
    layout = agree_layouts(layout_record([plan], header.digest64, step)[None], slots)[0]
    return header.bind(step, "decode", 0, 0, plan, layout, mode=mode)


def alone(epoch: int = 0) -> Transport:
    return transport_named("all_to_all_v", SoloGroup(spec_of((0,), epoch), GlobalRank(0)))


def as_mode(rows: ExpertRows, mode: Mode) -> ExpertRows:
    """The same rows as the other mode holds them: one slot after another, and every count agrees."""
    if rows.mode is mode:
        return rows
    if isinstance(rows, SegmentedRows):
        counts = tuple(end - start for start, end in zip(rows.offsets_S1, rows.offsets_S1[1:], strict=False))
        buffer_SCD = torch.zeros(len(counts), max(counts), rows.rows_RD.shape[1])
        for slot, segment in enumerate(rows.rows_RD.split(counts)):
            buffer_SCD[slot, : len(segment)] = segment
        return MaskedRows(buffer_SCD, counts)
    segments = [rows.rows_SCD[slot, :count] for slot, count in enumerate(rows.counts_S)]
    offsets = [sum(rows.counts_S[:slot]) for slot in range(len(rows.counts_S) + 1)]
    return SegmentedRows(torch.cat(segments), tuple(offsets))


def gate_sums() -> Tensor:
    """What experts that change nothing combine to."""
    return HIDDEN_TD * ROUTES.topk_weights.sum(1, keepdim=True)


# -- The eight states


def test_the_states_are_the_printed_ones_in_their_order() -> None:
    assert len(State) == EXPECTED["num_states"]
    assert [(state.value, state.name.lower()) for state in State] == [
        (each["index"], each["state"]) for each in INPUTS["dispatch_states"]
    ]


@pytest.mark.parametrize("case", FIXTURE["state_sequence_cases"], ids=lambda case: case["case"])
def test_a_lifetime_takes_a_sequence_up_to_its_first_illegal_state(case: dict[str, Any]) -> None:
    lifetime = Lifetime("placement-v17/h", 17, 0)
    assert lifetime.state is State(case["states"][0])
    for index, number in enumerate(case["states"][1:], start=1):
        event, before = EVENT_INTO[State(number)], lifetime.state
        if index == case["expected_first_illegal_index"]:
            with pytest.raises(IllegalTransitionError, match=f"event '{event}' is illegal in state {before.name}"):
                lifetime.advance(event)
            assert lifetime.state is before
            return
        lifetime.advance(event)
    assert case["expected_first_illegal_index"] is None
    assert lifetime.state is State(case["states"][-1])


def test_a_real_round_passes_through_all_eight_states() -> None:
    seat, seen = Dispatcher(HEADER, alone()), [HEADER.lifetime(0, "decode", 0, 0).state]
    handle = bound()
    seen.append(handle.lifetime.state)
    seat.dispatch_a(seat.pack(HIDDEN_TD, handle), handle)
    seen.append(handle.lifetime.state)
    rows = seat.dispatch_b()
    seen.append(handle.lifetime.state)
    seat.combine_a(rows)  # runs through EXPERT_OUTPUT_READY: outputs are submitted as soon as they are there
    seen += [State.EXPERT_OUTPUT_READY, handle.lifetime.state]
    seat.combine_b()
    seen.append(handle.lifetime.state)
    handle.completion.complete(Event.OUTPUT_READY)
    handle.release()
    assert [*seen, handle.lifetime.state] == list(State)


def combine_before_dispatch_done(seat: Dispatcher, handle: DispatchHandle) -> None:
    seat.dispatch_a(seat.pack(HIDDEN_TD, handle), handle)
    seat.combine_a(SegmentedRows(torch.zeros(TOKENS * TOP_K, HIDDEN), handle.expert_offsets_S1))


def runner_before_rows_ready(seat: Dispatcher, handle: DispatchHandle) -> None:
    seat.dispatch_a(seat.pack(HIDDEN_TD, handle), handle)
    handle.completion.require(Event.EXPERT_INPUT_READY, "the runner")


def release_before_origin_rows(seat: Dispatcher, handle: DispatchHandle) -> None:
    seat.combine_a(seat.dispatch(HIDDEN_TD, handle))
    handle.release()


def dispatch_without_metadata(seat: Dispatcher, handle: DispatchHandle) -> None:
    unplanned = HEADER.lifetime(0, "decode", 0, 0)
    object.__setattr__(handle, "lifetime", unplanned)  # `bind` alone makes handles, and it plans them
    seat.pack(HIDDEN_TD, handle)


# case -> (the call that skips a state, what refuses it)
SKIPPING: dict[str, tuple[Callable[[Dispatcher, DispatchHandle], None], type[Exception], str]] = {
    "combine_before_dispatch_done": (combine_before_dispatch_done, StageError, "combine_a is illegal in stage"),
    "runner_before_rows_ready": (runner_before_rows_ready, CompletionError, "missing_dependency: .* came early"),
    "release_before_origin_rows": (release_before_origin_rows, CompletionError, "handle_released waits for output"),
    "dispatch_without_metadata": (dispatch_without_metadata, IllegalTransitionError, "'submit_dispatch' is illegal"),
}


@pytest.mark.parametrize("case", FIXTURE["state_sequence_cases"], ids=lambda case: case["case"])
def test_the_calls_that_would_skip_a_state_are_refused_in_the_last_legal_one(case: dict[str, Any]) -> None:
    handle, seat = bound(), Dispatcher(HEADER, alone())
    if case["expected_first_illegal_index"] is None:
        torch.testing.assert_close(seat.combine(seat.dispatch(HIDDEN_TD, handle)), gate_sums())
        handle.release()
        assert handle.lifetime.state is State(case["states"][-1])
        return
    skip, error, message = SKIPPING[case["case"]]
    with pytest.raises(error, match=message):
        skip(seat, handle)
    assert handle.lifetime.state is State(case["states"][case["expected_first_illegal_index"] - 1])


# -- The four stages


def test_the_stages_and_their_edges_are_the_printed_ones() -> None:
    edges = [
        [stage.value, operation, following.value]
        for stage, by_operation in STAGES.items()
        for operation, following in by_operation.items()
    ]
    assert (Stage.INITIAL.value, edges) == (MACHINE["initial"], MACHINE["edges"])
    seat, handle = Dispatcher(HEADER, alone()), bound()
    seen = [seat.stage.value]
    seat.dispatch_a(seat.pack(HIDDEN_TD, handle), handle)
    seen.append(seat.stage.value)
    rows = seat.dispatch_b()
    seen.append(seat.stage.value)
    seat.combine_a(rows)
    seen.append(seat.stage.value)
    seat.combine_b()
    assert [*seen, seat.stage.value] == EXPECTED["stage_sequence"]


class Walk:
    """Operations of a case, one after another. A path has one mode, so each mode has its seat, over one transport."""

    def __init__(self) -> None:
        transport = alone()
        self.seats = {mode: Dispatcher(HEADER, transport, mode) for mode in Mode}
        self.seat = self.seats[Mode.NORMAL]
        self.handles: list[DispatchHandle] = []
        self.rows: ExpertRows = SegmentedRows(torch.zeros(0, HIDDEN), (0,) * (EXPERTS + 1))

    def take(self, operation: str, mode: Mode) -> None:
        if operation == "dispatch_a":
            if self.seat.stage is Stage.INITIAL:
                self.seat = self.seats[mode]
            handle = bound(mode, step=len(self.handles))
            self.handles.append(handle)
            self.seat.dispatch_a(self.seat.pack(HIDDEN_TD, handle), handle)
        elif operation == "dispatch_b":
            self.rows = self.seat.dispatch_b()
        elif operation == "combine_a":
            self.seat.combine_a(as_mode(self.rows, mode))
        else:
            self.seat.combine_b()

    def allowed(self, operation: str, mode: Mode) -> bool:
        """Whether it was; a refused one has changed neither stage nor mode, nor the handle in flight."""
        in_flight = self.handles[-1:]
        before = (self.seat, self.seat.stage, self.seat.mode, [each.lifetime.state for each in in_flight])
        try:
            self.take(operation, mode)
        except StageError:
            after = (self.seat, self.seat.stage, self.seat.mode, [each.lifetime.state for each in in_flight])
            assert after == before
            return False
        return True


@pytest.mark.parametrize("case", FIXTURE["stage_cases"], ids=lambda case: case["case"])
def test_a_dispatcher_allows_the_operations_that_the_printed_machine_allows(case: dict[str, Any]) -> None:
    walk = Walk()
    allowed = [walk.allowed(each["op"], Mode(each.get("mode", "normal"))) for each in case["operations"]]
    assert allowed == case["expected_allowed"]
    assert walk.seat.stage is Stage(case["expected_final_stage"])


# -- 0x06F


def test_px_06f_01_combine_before_dispatch_b_is_refused() -> None:
    walk = Walk()
    walk.take("dispatch_a", Mode.NORMAL)
    with pytest.raises(StageError, match="combine_a is illegal in stage AFTER_DISPATCH_A with handle placement-v17"):
        walk.take("combine_a", Mode.NORMAL)
    walk.take("dispatch_b", Mode.NORMAL)
    walk.take("combine_a", Mode.NORMAL)


def test_px_06f_02_two_dispatches_without_a_combine_are_refused() -> None:
    walk = Walk()
    walk.take("dispatch_a", Mode.NORMAL)
    with pytest.raises(StageError, match="dispatch_a is illegal in stage AFTER_DISPATCH_A with handle placement-v17"):
        walk.take("dispatch_a", Mode.NORMAL)
    walk.take("dispatch_b", Mode.NORMAL)
    with pytest.raises(StageError, match="dispatch_a is illegal in stage AFTER_DISPATCH_B with handle placement-v17"):
        walk.take("dispatch_a", Mode.NORMAL)


@pytest.mark.parametrize(("mode", "other"), [(Mode.NORMAL, Mode.LOW_LATENCY), (Mode.LOW_LATENCY, Mode.NORMAL)])
def test_px_06f_03_combine_in_another_mode_than_its_dispatch_is_refused(mode: Mode, other: Mode) -> None:
    walk = Walk()
    walk.take("dispatch_a", mode)
    walk.take("dispatch_b", mode)
    with pytest.raises(StageError, match=f"combine of handle .* takes {mode} rows, found .* of mode {other}"):
        walk.take("combine_a", other)
    walk.take("combine_a", mode)


# -- 0x06I


def test_fl_06i_01_a_dispatcher_without_a_handle_argument_holds_the_state_of_one_call() -> None:
    # `dispatch_b` and the combine take no handle: the seat keeps it, so a second call would overwrite the first.
    seat, first, second = Dispatcher(HEADER, alone()), bound(), bound(step=1)
    rows = seat.dispatch(HIDDEN_TD, first)
    with pytest.raises(StageError, match=f"dispatch_a is illegal .* with handle {first.handle_id} in flight"):
        seat.dispatch(HIDDEN_TD * 7, second)
    assert second.lifetime.state is State.DISPATCH_METADATA_READY
    torch.testing.assert_close(seat.combine(rows), gate_sums())
    torch.testing.assert_close(seat.combine(seat.dispatch(HIDDEN_TD * 7, second)), gate_sums() * 7)


def test_fl_06i_02_a_handle_is_not_used_again_after_its_combine() -> None:
    seat, handle = Dispatcher(HEADER, alone()), bound()
    rows = seat.dispatch(HIDDEN_TD, handle)
    seat.combine(rows)
    with pytest.raises(StageError, match="combine_a is illegal in stage INITIAL"):
        seat.combine_a(rows)
    for released in (False, True):
        if released:
            handle.release()
        for again in (seat, Dispatcher(HEADER, alone())):
            with pytest.raises(IllegalTransitionError, match=f"handle {handle.handle_id}: event 'submit_dispatch'"):
                again.dispatch(HIDDEN_TD, handle)
            assert again.stage is Stage.INITIAL
    with pytest.raises(CompletionError, match="already_complete"):
        handle.release()


def test_fl_06i_06_a_normal_handle_is_refused_by_low_latency_combine() -> None:
    handle, seat = bound(Mode.NORMAL), Dispatcher(HEADER, alone(), Mode.LOW_LATENCY)
    message = f"of handle {handle.handle_id}: it is of mode normal, the dispatcher of low_latency"
    with pytest.raises(StageError, match=f"dispatch {message}"):
        seat.dispatch(HIDDEN_TD, handle)
    assert (seat.stage, handle.lifetime.state) == (Stage.INITIAL, State.DISPATCH_METADATA_READY)
    # Once its rows are out, the handle is still typed: other rows and another dispatcher do not make it fit.
    seat = Dispatcher(HEADER, alone())
    rows = as_mode(seat.dispatch(HIDDEN_TD, handle), Mode.LOW_LATENCY)
    seat.mode = Mode.LOW_LATENCY
    with pytest.raises(StageError, match=f"combine {message}"):
        seat.combine(rows)
    # And of another revision, whatever its mode.
    revised = dataclasses.replace(HEADER, abi=dataclasses.replace(HEADER.abi, handle_version="ray_moe.handle/2"))
    with pytest.raises(StaleHandleError, match=r"its abi is .*handle/1.*, the scope's is .*handle/2"):
        Dispatcher(revised, alone()).dispatch(HIDDEN_TD, bound())


def other_route() -> None:
    bound(header=NEXT)  # routes were planned under generation 17


def other_dispatch() -> None:
    Dispatcher(NEXT, alone()).dispatch(HIDDEN_TD, bound())


def other_combine() -> None:
    seat = Dispatcher(HEADER, alone())
    rows = seat.dispatch(HIDDEN_TD, bound())
    seat.header = NEXT
    seat.combine(rows)


def other_placement() -> None:
    HandleHeader.grant(Lease(1, "rank-0", 17, 0), generation(18), HEADER.abi)


OTHERS = {"route": other_route, "dispatch": other_dispatch, "combine": other_combine, "placement": other_placement}


@pytest.mark.parametrize("where", INPUTS["generation_equality"])
def test_route_dispatch_combine_and_placement_are_of_one_generation(where: str) -> None:
    with pytest.raises(StaleHandleError, match=r"17.*18"):
        OTHERS[where]()


def test_fl_06i_09_a_placement_that_changes_under_a_live_handle_is_refused_at_combine() -> None:
    seat, handle = Dispatcher(HEADER, alone()), bound()
    rows = seat.dispatch(HIDDEN_TD, handle)
    seat.header = NEXT
    with pytest.raises(StaleHandleError, match=f"combine of handle {handle.handle_id}: its placement_version is"):
        seat.combine(rows)
    assert (handle.lifetime.state, seat.stage) == (State.EXPERT_ROWS_READY, Stage.AFTER_DISPATCH_B)
    # The handle pins generation 17: under it, and under no other, the rows still come home.
    seat.header = HEADER
    torch.testing.assert_close(seat.combine(rows), gate_sums())
