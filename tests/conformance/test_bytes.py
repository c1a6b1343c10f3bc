"""The specification's byte ledger, lifetimes, events and descriptors (0x03D to 0x03D6, 0x04C, 0x04E) as printed."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from ray_moe import evidence
from ray_moe.dataplane.completion import EVENTS, Event, EventNode, Stream, check_events
from ray_moe.dataplane.ledger import (
    DESCRIPTOR_BYTES,
    DESCRIPTOR_FIELDS,
    EXCLUDED,
    Buffer,
    ByteSchema,
    MatmulFlops,
    Padding,
    ProblemDescriptor,
    RouteRows,
    SlabStrides,
    allocated_bytes,
    check_buffers,
    check_problems,
    describe_problems,
    live_bytes,
    peak,
    reservation_ratio,
    swiglu_matmul_flops,
    uniform_padded,
)
from ray_moe.errors import CompletionError, ConfigError, EvidenceError, RunnerError
from ray_moe.evidence import Elapsed, Instrument, LiveBytes, LogicalBytes, MeasuredBytes, Measurement, RowSlots

DATA = Path(__file__).parent / "data"
FIXTURE = json.loads((DATA / "bytes.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
LARGER = FIXTURE["larger_example"]
RUNNERS = json.loads((DATA / "runners.json").read_text())
COUNTS_PP = json.loads((DATA / "dispatch.json").read_text())["expected"]["count_matrix_rows"]

SCHEMA = ByteSchema(
    activation_bytes=INPUTS["activation_element_bytes"],
    output_bytes=INPUTS["output_element_bytes"],
    coordinate_bytes=INPUTS["coordinate_bytes"],
    metadata_field_bytes=INPUTS["transport_metadata_field_bytes"],
    dispatch_metadata_fields=INPUTS["dispatch_metadata_fields_per_remote_row"],
    combine_metadata_fields=INPUTS["combine_metadata_fields_per_remote_row"],
    handle_fields=INPUTS["handle_fields_per_route"],
    handle_field_bytes=INPUTS["handle_field_bytes"],
)
ROWS = RouteRows.of(COUNTS_PP)
HIDDEN, PEERS, LOCAL_SLOTS = INPUTS["hidden_width_elements"], INPUTS["num_ranks"], INPUTS["local_slots_by_rank"]
MIB = 2**20


def buffer_of(line: dict[str, Any]) -> Buffer:
    after = line["released_after"]
    return Buffer(
        name=line["buffer"],
        size=LiveBytes(line["size_bytes"]),
        live_from=line["live_from_epoch"],
        live_until=line["live_until_epoch"],
        released_after=None if after == "downstream_consumer" else Event(after),
        alias_group=line["alias_group"],
    )


BUFFERS = tuple(buffer_of(line) for line in INPUTS["buffers_half_open"])
NODES = {
    Event(line["event"]): EventNode(Stream(line["stream"]), tuple(map(Event, line["after"])))
    for line in INPUTS["event_graph"]
}
EPOCHS = {Event(name): epoch for name, epoch in DERIVED["event_epochs"].items()}


# -- Rows and logical bytes (0x03D1, 0x03D2)


def test_the_default_schema_is_the_printed_one_and_another_can_be_chosen() -> None:
    assert ByteSchema() == SCHEMA
    assert INPUTS["gate_bytes"] == SCHEMA.handle_field_bytes
    fp8 = dataclasses.replace(SCHEMA, activation_bytes=1, dispatch_metadata_fields=0)
    assert fp8.remote_logical(ROWS, HIDDEN) == SCHEMA.remote_combine(ROWS, HIDDEN) + fp8.remote_dispatch(
        ROWS, HIDDEN
    ) + SCHEMA.combine_metadata(ROWS)
    assert int(fp8.remote_dispatch(ROWS, HIDDEN)) * 2 == EXPECTED["remote_dispatch_payload_bytes"]


@pytest.mark.parametrize("value", [-1, 2.0, True])
def test_a_schema_field_that_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="activation_bytes must be a whole number >= 0, found"):
        ByteSchema(activation_bytes=value)


def test_rows_are_local_or_remote() -> None:
    assert int(ROWS.staged) == INPUTS["useful_rows"] == INPUTS["num_tokens"] * INPUTS["top_k"]
    assert int(ROWS.remote) == INPUTS["remote_rows"]
    assert int(ROWS.local) == INPUTS["useful_rows"] - INPUTS["remote_rows"]


def test_staging_counts_all_rows_and_remote_payload_the_remote_ones() -> None:
    assert int(SCHEMA.staging_dispatch(ROWS.staged, HIDDEN)) == EXPECTED["staging_dispatch_bytes"]
    assert int(SCHEMA.staging_combine(ROWS.staged, HIDDEN)) == EXPECTED["staging_combine_bytes"]
    assert int(SCHEMA.remote_dispatch(ROWS, HIDDEN)) == EXPECTED["remote_dispatch_payload_bytes"]
    assert int(SCHEMA.remote_combine(ROWS, HIDDEN)) == EXPECTED["remote_combine_payload_bytes"]


def test_wire_metadata_handle_state_and_control_tables_are_three_accounts() -> None:
    assert int(SCHEMA.dispatch_metadata(ROWS)) == EXPECTED["dispatch_metadata_bytes"]
    assert int(SCHEMA.combine_metadata(ROWS)) == EXPECTED["combine_metadata_bytes"]
    assert int(SCHEMA.route_handle(ROWS.staged)) == EXPECTED["route_handle_bytes"]
    assert int(SCHEMA.count_matrix(PEERS)) == EXPECTED["count_matrix_bytes"]
    assert int(SCHEMA.send_offsets(PEERS)) == EXPECTED["send_offsets_bytes"]
    assert int(SCHEMA.receive_splits(PEERS)) == EXPECTED["receive_splits_bytes"]
    offsets = SCHEMA.local_expert_offsets(LOCAL_SLOTS)
    assert int(offsets) == EXPECTED["local_expert_offsets_bytes"]
    assert int(offsets) == EXPECTED["local_expert_offset_entries"] * SCHEMA.coordinate_bytes
    accounts = [SCHEMA.dispatch_metadata(ROWS), SCHEMA.route_handle(ROWS.staged), offsets]
    for one in accounts:
        assert isinstance(one, LogicalBytes)
        for other in accounts:
            if other is not one:
                with pytest.raises(EvidenceError, match="are two ledgers"):
                    one + other


def test_remote_logical_bytes_exclude_protocol_and_say_what_that_is() -> None:
    assert int(SCHEMA.remote_logical(ROWS, HIDDEN)) == EXPECTED["remote_logical_bytes_excluding_protocol"]
    assert sorted(EXCLUDED) == sorted(FIXTURE["excluded_from_remote_logical_bytes"])


def test_the_larger_shape_follows_from_the_same_formulas() -> None:
    given, expected = LARGER["inputs"], LARGER["expected"]
    peers, hidden = 4, given["hidden_width_elements"]
    routed = given["num_tokens"] * given["top_k"]
    rows = RouteRows.of([[routed // peers**2] * peers for _ in range(peers)])  # evenly spread: 3 of 4 rows leave
    assert Fraction(int(rows.remote), int(rows.staged)) == Fraction(*given["remote_fraction"])
    schema = ByteSchema(activation_bytes=given["element_bytes"], output_bytes=given["element_bytes"])
    out, back = schema.staging_dispatch(rows.staged, hidden), schema.staging_combine(rows.staged, hidden)
    assert int(out) == LARGER["derived"]["staging_one_direction_bytes"] == expected["staging_one_direction_mib"] * MIB
    assert int(out + back) == expected["staging_round_trip_mib"] * MIB
    remote = schema.remote_dispatch(rows, hidden) + schema.remote_combine(rows, hidden)
    assert int(remote) == LARGER["derived"]["remote_row_payload_bytes"] == expected["remote_row_payload_mib"] * MIB


def test_the_last_two_ledgers_stay_empty_without_a_measurement() -> None:
    types: dict[str, Any] = {
        "row_slots": evidence.RowSlots,
        "logical_bytes": LogicalBytes,
        "live_allocation_bytes": LiveBytes,
        "measured_fabric_or_hbm_bytes": MeasuredBytes,
        "elapsed_time": Elapsed,
    }
    assert [line["ledger"] for line in FIXTURE["ledger_kinds"]] == list(types)
    for line in FIXTURE["ledger_kinds"]:
        ledger = types[line["ledger"]]
        if line["claimed_by_oracle"]:
            assert int(ledger(7)) == 7
        else:
            with pytest.raises(EvidenceError, match=f"{ledger.__name__} needs the measurement that gave it"):
                ledger(7, None)
            assert (
                ledger(7, Measurement(Instrument.PROFILER, "10 calls, median", "run-1")).measurement.artifact == "run-1"
            )


# -- Lifetimes (0x03D3)


def test_the_printed_buffers_have_the_sizes_of_the_formulas() -> None:
    rows, tokens = ROWS.staged, RowSlots(INPUTS["num_tokens"])
    # The lifetime table holds metadata of all staged rows, the wire's account of the remote ones.
    every = RouteRows(local=RowSlots(0), remote=rows)
    sizes = {
        "input_hidden": SCHEMA.staging_dispatch(tokens, HIDDEN),
        "route_handle": SCHEMA.route_handle(rows),
        "count_matrix": SCHEMA.count_matrix(PEERS),
        "send_offsets": SCHEMA.send_offsets(PEERS),
        "receive_splits": SCHEMA.receive_splits(PEERS),
        "packed_send_payload": SCHEMA.staging_dispatch(rows, HIDDEN),
        "send_metadata": SCHEMA.dispatch_metadata(every),
        "source_major_receive": SCHEMA.staging_dispatch(rows, HIDDEN),
        "local_expert_offsets": SCHEMA.local_expert_offsets(LOCAL_SLOTS),
        "local_expert_input": SCHEMA.staging_dispatch(rows, HIDDEN),
        "expert_output_return_payload": SCHEMA.staging_combine(rows, HIDDEN),
        "return_metadata": SCHEMA.combine_metadata(every),
        "returned_source_order_rows": SCHEMA.staging_combine(rows, HIDDEN),
        "output_hidden": SCHEMA.staging_combine(tokens, HIDDEN),
    }
    assert {buffer.name: int(buffer.size) for buffer in BUFFERS} == {name: int(size) for name, size in sizes.items()}


def test_sum_and_peak_are_two_numbers_and_the_peak_names_its_first_epoch() -> None:
    assert len(BUFFERS) == EXPECTED["num_buffers"]
    assert int(allocated_bytes(BUFFERS)) == EXPECTED["buffer_sum_bytes"]
    assert peak(BUFFERS) == (LiveBytes(EXPECTED["peak_live_bytes"]), EXPECTED["peak_epoch"])
    assert list(map(int, live_bytes(BUFFERS))) == DERIVED["live_bytes_by_epoch"]
    with pytest.raises(EvidenceError, match=r"^LiveBytes and LogicalBytes are two ledgers"):
        peak(BUFFERS)[0] + allocated_bytes(BUFFERS)  # type: ignore[operator]


def test_the_first_of_two_equal_peaks_is_named_and_no_buffers_have_none() -> None:
    twice = [Buffer(f"b{start}", LiveBytes(8), start, start + 1, None) for start in (3, 1)]
    assert peak(twice) == (LiveBytes(8), 1)
    assert peak([]) == (LiveBytes(0), 0)
    assert live_bytes([]) == ()


@pytest.mark.parametrize("interval", [(3, 3), (3, 2), (-1, 2)])
def test_an_interval_that_is_empty_or_before_epoch_0_is_refused(interval: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"'b' must have 0 <= live_from < live_until, found \["):
        Buffer("b", LiveBytes(1), *interval, None)


# -- Events (0x03D4, 0x03D5)


def test_the_table_of_events_is_the_printed_graph() -> None:
    assert EVENTS == NODES
    assert list(EVENTS) == list(Event) == list(NODES)
    assert {node.stream for node in EVENTS.values()} == set(Stream)


def test_the_printed_schedule_passes() -> None:
    check_events(NODES)
    check_events(NODES, EPOCHS)
    check_buffers(BUFFERS, EPOCHS)
    assert all(buffer.live_until == EPOCHS[buffer.released_after] for buffer in BUFFERS if buffer.released_after)
    check_events({**NODES, Event.OUTPUT_READY: EventNode(Stream.OUTPUT, tuple(Event)[:6])}, EPOCHS)  # more waits


def refused(change: dict[str, Any]) -> None:
    """The printed schedule with one change, through the check that it concerns."""
    if "buffer" in change:
        lines = [line | change if line["buffer"] == change["buffer"] else line for line in INPUTS["buffers_half_open"]]
        check_buffers([buffer_of(line) for line in lines], EPOCHS)
    elif "event" in change:
        event = Event(change["event"])
        after = tuple(map(Event, change["after"]))
        check_events({**NODES, event: dataclasses.replace(NODES[event], after=after)}, EPOCHS)
    else:
        check_events(NODES, {**EPOCHS, Event(change["event_epoch"]): change["epoch"]})


@pytest.mark.parametrize("case", FIXTURE["negative_cases"], ids=lambda case: case["case"])
def test_one_change_is_refused_for_its_own_reason(case: dict[str, Any]) -> None:
    with pytest.raises(CompletionError) as error:
        refused(case["change"])
    assert error.value.reason == case["expected_reason"]
    named = next(case["change"][key] for key in ("buffer", "event", "event_epoch") if key in case["change"])
    assert named in error.value.detail


@pytest.mark.parametrize("event", list(Event))
def test_a_schedule_without_one_of_the_events_or_its_epoch_is_refused(event: Event) -> None:
    without = {name: node for name, node in NODES.items() if name is not event}
    with pytest.raises(CompletionError, match=f"^missing_dependency: the schedule has no event {event}$"):
        check_events(without)
    epochs = {name: epoch for name, epoch in EPOCHS.items() if name is not event}
    with pytest.raises(CompletionError, match=f"^missing_dependency: {event} has no epoch$"):
        check_events(NODES, epochs)
    held = [buffer for buffer in BUFFERS if buffer.released_after is event]
    if held:
        with pytest.raises(CompletionError, match=f"^missing_dependency: buffer '{held[0].name}' waits for {event}"):
            check_buffers(held, epochs)


def test_an_alias_is_reused_once_its_first_life_has_ended() -> None:
    reused = [
        Buffer("first", LiveBytes(8), 1, 3, None, "shared"),
        Buffer("second", LiveBytes(8), 3, 5, None, "shared"),
        Buffer("apart", LiveBytes(8), 1, 5, None, "another"),
        Buffer("alone", LiveBytes(8), 1, 5, None),
    ]
    check_buffers(reused, EPOCHS)
    check_buffers(reused[::-1], EPOCHS)
    with pytest.raises(CompletionError, match=r"'first' \[1, 4\) and 'second' \[3, 5\) .* alias group 'shared'"):
        check_buffers([dataclasses.replace(reused[0], live_until=4), *reused[1:]], EPOCHS)


# -- Padding (0x03D6, 0x04E)


def test_uniform_padding_reserves_four_times_the_useful_rows() -> None:
    padded = uniform_padded(COUNTS_PP)
    assert int(padded) == EXPECTED["uniform_padded_row_slots"]
    out, back = SCHEMA.staging_dispatch(padded, HIDDEN), SCHEMA.staging_combine(padded, HIDDEN)
    assert int(out) == EXPECTED["uniform_padded_direction_bytes"]
    assert int(out + back) == EXPECTED["uniform_padded_round_trip_bytes"]
    useful = SCHEMA.staging_dispatch(ROWS.staged, HIDDEN) + SCHEMA.staging_combine(ROWS.staged, HIDDEN)
    assert int(useful) == EXPECTED["useful_staging_round_trip_bytes"]
    ratio = reservation_ratio(COUNTS_PP)
    assert ratio == Fraction(*EXPECTED["padded_over_useful_ratio"]) == Fraction(int(out + back), int(useful))
    assert reservation_ratio([[0, 0], [0, 0]]) == 1


def test_three_paddings_and_drops_are_four_counters() -> None:
    expected, useful = RUNNERS["expected"], RowSlots(RUNNERS["expected"]["useful_rows"])
    padded = Padding(
        useful=useful,
        capacity_unused=RowSlots(expected["padded"]["capacity_unused_rows"]),
        alignment_only=RowSlots(expected["padded"]["alignment_only_rows"]),
    )
    sparse = Padding(useful=useful, block_fringe=RowSlots(expected["block_sparse"]["fringe_rows"]))
    exact = Padding(useful=useful)
    assert int(padded.executed) == expected["padded"]["executed_rows"]
    assert int(sparse.executed) == expected["block_sparse"]["executed_rows"]
    assert int(exact.executed) == expected["grouped"]["executed_rows"]
    # A drop is no row: it changes the semantic contract and no count of executed rows.
    assert dataclasses.replace(padded, dropped=RowSlots(3)).executed == padded.executed
    assert dataclasses.replace(padded, dropped=RowSlots(3)) != padded


def test_swiglu_flops_follow_from_executed_rows() -> None:
    expected, ffn = RUNNERS["expected"], RUNNERS["inputs"]["ffn_width_elements"]
    for runner in ("padded", "grouped", "block_sparse"):
        rows = RowSlots(expected[runner]["executed_rows"])
        assert swiglu_matmul_flops(rows, HIDDEN, ffn) == MatmulFlops(expected[runner]["matmul_flops"])
    useful = RowSlots(expected["useful_rows"])
    assert int(swiglu_matmul_flops(useful, HIDDEN, ffn)) == expected["useful_matmul_flops"]


# -- Grouped problems (0x04C): six slots in one pool, stored against their order, so that neither passes for the other

OFFSETS = RUNNERS["expected"]["offsets_rows"]
POOL_SLOTS = (5, 4, 3, 2, 1, 0)
STRIDES = SlabStrides.dense(HIDDEN, RUNNERS["inputs"]["ffn_width_elements"])


def test_the_descriptor_has_the_eight_printed_fields() -> None:
    grouped = RUNNERS["inputs"]["grouped"]
    assert list(DESCRIPTOR_FIELDS) == grouped["descriptor_fields"]
    assert len(DESCRIPTOR_FIELDS) * grouped["descriptor_field_bytes"] == DESCRIPTOR_BYTES
    problems = describe_problems(OFFSETS, POOL_SLOTS, STRIDES)
    assert len(problems) * DESCRIPTOR_BYTES == RUNNERS["expected"]["grouped"]["descriptor_bytes"]
    assert [problem.m for problem in problems] == RUNNERS["expected"]["grouped"]["problem_m_rows"]
    check_problems(problems, OFFSETS, POOL_SLOTS, STRIDES)


def test_a_descriptor_is_its_slots_own_by_hand() -> None:
    # D 3, F 4: a slot is 24 elements of gate_up (12 gate, 12 up), 12 of down; slot 1 is empty, slot 2 in pool slot 1.
    problems = describe_problems((0, 2, 2, 5), (2, 0, 1), STRIDES)
    assert problems == (
        ProblemDescriptor(0, 2, 4, 3, 0, 48, 60, 24, 0),
        ProblemDescriptor(2, 3, 4, 3, 6, 24, 36, 12, 6),
    )
    assert problems[1].words == (3, 4, 3, 6, 24, 36, 12, 6)
    apart = SlabStrides(HIDDEN, 4, gate_up=100, down=50)
    assert describe_problems((0, 1), (3,), apart)[0].words == (1, 4, 3, 0, 300, 312, 150, 0)


@pytest.mark.parametrize("field", ["gate_weight_offset", "up_weight_offset", "down_weight_offset"])
def test_a_descriptor_with_another_slots_weights_is_refused(field: str) -> None:
    problems = list(describe_problems(OFFSETS, POOL_SLOTS, STRIDES))
    problems[3] = dataclasses.replace(problems[3], **{field: getattr(problems[2], field)})
    with pytest.raises(RunnerError, match=f"^descriptor_of_another_slot: slot 3 .pool slot 2. has {field} "):
        check_problems(problems, OFFSETS, POOL_SLOTS, STRIDES)


@pytest.mark.parametrize("field", ["m", "n", "k", "input_offset", "output_offset"])
def test_a_descriptor_with_another_segments_rows_is_refused(field: str) -> None:
    problems = list(describe_problems(OFFSETS, POOL_SLOTS, STRIDES))
    problems[3] = dataclasses.replace(problems[3], **{field: getattr(problems[3], field) + 1})
    with pytest.raises(RunnerError, match=f"^descriptor_of_another_segment: slot 3 .* has {field} "):
        check_problems(problems, OFFSETS, POOL_SLOTS, STRIDES)


def test_an_empty_slot_skips_its_descriptor_but_neither_its_offset_nor_its_identity() -> None:
    counts = [2, 0, 1]
    offsets = list(accumulate(counts, initial=0))
    problems = describe_problems(offsets, (0, 1, 2), STRIDES)
    assert [problem.slot for problem in problems] == [0, 2]
    check_problems(problems, offsets, (0, 1, 2), STRIDES)
    squeezed = [0, 2, 3]
    for check in (
        lambda: describe_problems(squeezed, (0, 1, 2), STRIDES),
        lambda: check_problems(problems, squeezed, (0, 1, 2), STRIDES),
    ):
        with pytest.raises(RunnerError, match=r"^offsets_not_full_length: 3 slots have 4 offsets, .* found 3$"):
            check()
    # What such a squeezed table describes: the second problem as slot 1's, with slot 1's weights.
    shifted = describe_problems(squeezed, (0, 1), STRIDES)
    with pytest.raises(RunnerError, match=r"^segment_without_descriptor: "):
        check_problems(shifted, offsets, (0, 1, 2), STRIDES)
    relabelled = [shifted[0], dataclasses.replace(shifted[1], slot=2)]
    with pytest.raises(RunnerError, match=r"^descriptor_of_another_slot: slot 2 "):
        check_problems(relabelled, offsets, (0, 1, 2), STRIDES)
