"""Headers, handles and their lifetime: one generation, one epoch, combined exactly once."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from ray_moe.comm.join import transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.transports import Transport
from ray_moe.dataplane.dispatch import Dispatcher, Stage, weighted_sum
from ray_moe.dataplane.handle import LIFETIME, DispatchHandle, HandleABI, HandleHeader, Lifetime, State
from ray_moe.dataplane.plan import agree_layouts, layout_record, make_plan
from ray_moe.dataplane.policies import TokenHash
from ray_moe.errors import (
    CompletionError,
    ConfigError,
    HandleError,
    IllegalTransitionError,
    StageError,
    StaleHandleError,
)
from ray_moe.identity import GlobalRank
from ray_moe.placement import Lease
from tests.layers import ONE_PEER, header_of, placement, random_routes, slot_map, spec_of

SNAPSHOT = placement([(0, 0), (1, 0), (2, 0)], ONE_PEER, generation=17)
HEADER = header_of(SNAPSHOT)
FORWARD = (
    "plan",
    "submit_dispatch",
    "complete_dispatch",
    "run_experts",
    "submit_combine",
    "complete_combine",
    "release",
)
EVENTS = (*FORWARD, "abandon")

# Every field that peers of a step share, with another value for it.
SHARED: dict[str, Any] = {
    "release_id": "release-2",
    "checkpoint_version": "checkpoint-2",
    "placement_version": "placement-v18",
    "generation": 18,
    "process_group_id": "ep-group-1",
    "epoch": 1,
    "placement_digest": "another",
    "abi": HandleABI(gate_location="expert"),
}
ABI = {
    "payload_dtype": "bfloat16",
    "return_dtype": "bfloat16",
    "gate_location": "expert",
    "payload_format": "fp8_row",
    "exchange": "tcp+hierarchical",
    "handle_version": "ray_moe.handle/2",
}


def bound(header: HandleHeader = HEADER, tokens: int = 4) -> DispatchHandle:
    """A handle of one peer, ready to dispatch."""
    slots = slot_map(SNAPSHOT, 0)
    plan = make_plan(random_routes(1, tokens, 2, 3), slots, TokenHash())
    layout = agree_layouts(layout_record([plan], header.digest64, 0)[None], slots)[0]
    return header.bind(5, "decode", 0, 0, plan, layout)


def alone(epoch: int = 0) -> Transport:
    return transport_named("all_to_all_v", SoloGroup(spec_of((0,), epoch), GlobalRank(0)))


# -- Lifetime


def reached(state: State) -> Lifetime:
    lifetime = Lifetime("placement-v17/h", 17, 3)
    for event in FORWARD[: state.value]:
        lifetime.advance(event)
    return lifetime


def test_the_forward_edges_walk_the_eight_states_in_order() -> None:
    assert [reached(state).state for state in State] == list(State)
    assert [state.value for state in State] == list(range(8))
    assert set(LIFETIME) == set(State)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", list(State), ids=lambda state: state.name)
def test_every_pair_of_state_and_event_is_an_edge_of_the_table_or_refused_by_name(state: State, event: str) -> None:
    lifetime = reached(state)
    if event == "abandon" and state is not State.DISPATCH_STATE_RELEASABLE:
        following = State.DISPATCH_STATE_RELEASABLE
    elif EVENTS.index(event) == state.value and event != "abandon":
        following = State(state.value + 1)
    else:
        with pytest.raises(IllegalTransitionError) as refused:
            lifetime.advance(event)
        error = refused.value
        assert (error.handle_id, error.state, error.event) == ("placement-v17/h", state.name, event)
        assert (error.generation, error.epoch) == (17, 3)
        assert str(error) == (
            f"handle placement-v17/h: event {event!r} is illegal in state {state.name} (generation 17, epoch 3)"
        )
        assert lifetime.state is state
        assert event not in LIFETIME[state]
        return
    lifetime.advance(event)
    assert lifetime.state is following
    assert LIFETIME[state][event] is following


@pytest.mark.parametrize(
    ("states", "first_illegal"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], None),
        ([0, 1, 2, 5], 3),  # combine before its dispatch is done
        ([0, 1, 2, 4], 3),  # runner before rows are ready
        ([0, 1, 2, 3, 4, 5, 7], 6),  # release before origin rows
        ([0, 2], 1),  # dispatch without metadata
    ],
)
def test_the_specifications_sequences_are_legal_up_to_the_printed_state(
    states: list[int], first_illegal: int | None
) -> None:
    forward = {state: set(edges.values()) - {State.DISPATCH_STATE_RELEASABLE} for state, edges in LIFETIME.items()}
    forward[State.ORIGIN_ROWS_READY] = {State.DISPATCH_STATE_RELEASABLE}
    illegal = [
        index for index in range(1, len(states)) if State(states[index]) not in forward[State(states[index - 1])]
    ]
    assert (illegal[0] if illegal else None) == first_illegal


# -- Combined exactly once, under its own scope


def test_a_handle_is_dispatched_once_and_combined_once() -> None:
    handle, transport, hidden = bound(), alone(), torch.randn(4, 3)
    seat, other_seat = Dispatcher(HEADER, transport), Dispatcher(HEADER, transport)
    rows = seat.dispatch(hidden, handle)
    with pytest.raises(IllegalTransitionError, match="'submit_dispatch' is illegal in state EXPERT_ROWS_READY"):
        other_seat.pack(hidden, handle)
    out = seat.combine(rows)
    torch.testing.assert_close(out, hidden * handle.gates_TK.sum(1, keepdim=True))
    with pytest.raises(StageError, match="combine_a is illegal in stage INITIAL"):
        seat.combine_a(rows)
    with pytest.raises(IllegalTransitionError, match="'submit_dispatch' is illegal in state ORIGIN_ROWS_READY"):
        other_seat.dispatch(hidden, handle)
    handle.release()
    with pytest.raises(CompletionError, match="handle_released is complete already"):
        handle.release()
    with pytest.raises(IllegalTransitionError, match="DISPATCH_STATE_RELEASABLE"):
        other_seat.pack(hidden, handle)


def test_a_handle_is_not_released_before_its_output_is_ready() -> None:
    handle, seat = bound(), Dispatcher(HEADER, alone())
    rows = seat.dispatch(torch.randn(4, 3), handle)
    with pytest.raises(CompletionError, match="handle_released waits for output_ready"):
        handle.release()
    seat.combine(rows)
    handle.release()
    assert handle.lifetime.state is State.DISPATCH_STATE_RELEASABLE


def test_a_sum_over_a_part_of_a_plans_handles_is_refused() -> None:
    handle, seat = bound(), Dispatcher(HEADER, alone())
    rows = seat.dispatch(torch.randn(4, 3), handle)
    seat.combine_a(rows)
    half = dataclasses.replace(handle, order_N=handle.order_N[:3])
    with pytest.raises(HandleError, match="the handles to sum cover 3 of 8 routes"):
        weighted_sum([(half, seat.combine_b()[:3])])


@pytest.mark.parametrize("name", SHARED)
def test_another_scope_than_the_handles_own_is_refused_naming_the_coordinate(name: str) -> None:
    handle, other = bound(), dataclasses.replace(HEADER, **{name: SHARED[name]})
    before = handle.lifetime.state
    with pytest.raises(StaleHandleError, match=f"dispatch of handle placement-v17/.*: its {name} is"):
        Dispatcher(other, alone()).dispatch(torch.randn(4, 3), handle)
    assert handle.lifetime.state is before


@pytest.mark.parametrize("name", SHARED)
def test_a_scope_that_changes_between_dispatch_and_combine_is_refused(name: str) -> None:
    handle, seat = bound(), Dispatcher(HEADER, alone())
    rows = seat.dispatch(torch.randn(4, 3), handle)
    seat.header = dataclasses.replace(HEADER, **{name: SHARED[name]})
    with pytest.raises(StaleHandleError, match=f"combine of handle placement-v17/.*: its {name} is"):
        seat.combine(rows)
    assert (handle.lifetime.state, seat.stage) == (State.EXPERT_ROWS_READY, Stage.AFTER_DISPATCH_B)


@pytest.mark.parametrize("name", ["holder", "lease_id"])
def test_another_holders_lease_on_the_same_scope_is_the_same_scope(name: str) -> None:
    others: dict[str, Any] = {"holder": "rank-9", "lease_id": 9}
    other = dataclasses.replace(HEADER, **{name: others[name]})
    handle, hidden = bound(), torch.randn(4, 3)
    Dispatcher(other, alone()).dispatch(hidden, handle)
    assert handle.lifetime.state is State.EXPERT_ROWS_READY


def test_a_transport_of_another_epoch_is_refused() -> None:
    with pytest.raises(
        StaleHandleError, match=r"bound to group ep-group-0 epoch 0, the transport runs ep-group-0 epoch 4"
    ):
        Dispatcher(HEADER, alone(epoch=4)).dispatch(torch.randn(4, 3), bound())


def test_rows_of_another_dtype_than_the_abi_says_are_refused() -> None:
    with pytest.raises(HandleError, match=r"payload is torch\.float32, found torch\.bfloat16"):
        Dispatcher(HEADER, alone()).dispatch(torch.randn(4, 3).bfloat16(), bound())


def test_a_plan_of_another_generation_cannot_bind() -> None:
    slots = slot_map(SNAPSHOT, 0)
    plan = make_plan(random_routes(1, 2, 2, 3), slots, TokenHash())
    layout = agree_layouts(layout_record([plan], 0, 0)[None], slots)[0]
    with pytest.raises(StaleHandleError, match="plan of generation 17 cannot bind to a lease of 18"):
        dataclasses.replace(HEADER, generation=18).bind(0, "decode", 0, 0, plan, layout)


# -- Records


def test_a_handle_carries_the_union_of_both_definitions() -> None:
    handle = bound(dataclasses.replace(HEADER, abi=HandleABI(handle_version="ray_moe.handle/9")))
    header = handle.header
    # 0x01D2: contract version, scope id, placement, checkpoint, group and epoch, handle id, route count and inverse
    assert (header.abi.handle_version, handle.execution_scope_id) == ("ray_moe.handle/9", "")
    assert (header.placement_version, header.checkpoint_version) == ("placement-v17", "checkpoint-1")
    assert (header.process_group_id, header.epoch) == ("ep-group-0", 0)
    assert handle.handle_id == "placement-v17/e0/s5/decode/l0/c0@rank-0"
    assert handle.route_count == 8
    # 0x0CB: release, generation, origin token, route slot, inverse, counts, expert offsets, gates, completion
    assert (header.release_id, header.generation) == ("release-1", 17)
    assert handle.origin_token_N.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert handle.route_slot_N.tolist() == [0, 1] * 4
    assert handle.inverse_N[handle.order_N].tolist() == list(range(8))
    assert handle.send_counts_P == handle.recv_counts_P == (8,)
    assert handle.expert_offsets_S1[-1] == sum(map(sum, handle.recv_counts_PS)) == 8
    assert torch.equal(handle.gates_TK, random_routes(1, 4, 2, 3).topk_weights)
    assert handle.lifetime.state is State.DISPATCH_METADATA_READY


def test_handle_and_header_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        bound().step = 6  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        HEADER.generation = 18  # type: ignore[misc]
    assert HEADER.digest == dataclasses.replace(HEADER).digest


@pytest.mark.parametrize("name", SHARED)
def test_the_digest_changes_with_every_shared_coordinate(name: str) -> None:
    other = dataclasses.replace(HEADER, **{name: SHARED[name]})
    assert getattr(other, name) != getattr(HEADER, name)
    assert other.digest != HEADER.digest
    assert other.digest64 != HEADER.digest64


@pytest.mark.parametrize("name", ABI)
def test_the_digest_changes_with_every_part_of_the_abi(name: str) -> None:
    assert HEADER.digest != dataclasses.replace(HEADER, abi=HandleABI(**{name: ABI[name]})).digest


def test_every_field_of_header_and_abi_is_either_shared_or_the_holders_own() -> None:
    assert {field.name for field in dataclasses.fields(HEADER)} == {*SHARED, "lease_id", "holder"}
    assert {field.name for field in dataclasses.fields(HandleABI)} == set(ABI)


def test_the_digest_leaves_out_the_holder_and_its_lease() -> None:
    assert dataclasses.replace(HEADER, lease_id=8, holder="rank-7").digest == HEADER.digest


def test_the_short_digest_fits_a_signed_integer_of_64_bits() -> None:
    shorts = [dataclasses.replace(HEADER, generation=generation).digest64 for generation in range(64)]
    assert all(0 <= short < 2**63 for short in shorts)
    assert len(set(shorts)) == 64
    assert torch.tensor(shorts, dtype=torch.int64).tolist() == shorts


def test_a_header_travels_as_its_fields_and_is_digested_where_it_arrives() -> None:
    fresh = dataclasses.replace(HEADER)
    unread = pickle.dumps(fresh)
    digest = fresh.digest
    assert pickle.dumps(fresh) == unread
    arrived = pickle.loads(unread)
    assert arrived == fresh
    assert arrived.digest == digest
    forged = copy.copy(fresh)
    object.__setattr__(forged, "generation", 99)
    assert forged.digest != digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_location": "router"}, "gate_location must be 'origin' or 'expert', found 'router'"),
        ({"payload_dtype": "float31"}, "payload_dtype must name a torch dtype, found 'float31'"),
        ({"return_dtype": "nn"}, "return_dtype must name a torch dtype, found 'nn'"),
    ],
)
def test_an_abi_that_nobody_can_speak_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HandleABI(**change)


def test_a_lease_on_another_generation_or_epoch_grants_no_header() -> None:
    lease = Lease(1, "rank-0", SNAPSHOT.generation + 1, SNAPSHOT.group.epoch)
    with pytest.raises(StaleHandleError, match="lease 1 is on generation 18 epoch 0, the placement is generation 17"):
        HandleHeader.grant(lease, SNAPSHOT, HandleABI())
