"""Failure rows that completion and evidence refuse: buffers before their last reader, numbers for what they are not.

Each test performs one row's mistake and expects the refusal by name.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.dataplane.completion import Completion, Event, StagingPool, check_events
from ray_moe.dataplane.ledger import DeviceLaunches, HostSubmissions, RouteRows, check_buffers, swiglu_matmul_flops
from ray_moe.errors import CompletionError, EvidenceError
from ray_moe.evidence import (
    Elapsed,
    Instrument,
    MeasuredBytes,
    Measurement,
    QualityClaim,
    RowSlots,
    SourceClaim,
    Speedup,
    Units,
)
from tests.conformance.test_bytes import BUFFERS, COUNTS_PP, EPOCHS, HIDDEN, NODES, ROWS, SCHEMA

CPU = torch.device("cpu")


def reached(event: Event) -> Completion:
    """An invocation in which `event` is the last that is complete."""
    completion = Completion("placement-v17/h-3")
    for each in list(Event)[: list(Event).index(event) + 1]:
        completion.complete(each)
    return completion


def staged(completion: Completion, pool: StagingPool, name: str, until: Event) -> Tensor:
    """Rows of one in a staging buffer that `completion` holds until `until`."""
    rows_RD = pool.take(8, 3, torch.bfloat16, CPU).fill_(1)
    completion.hold(name, rows_RD.nbytes, until, partial(pool.give_back, rows_RD))
    return rows_RD


def refuses_until(until: Event, before: Event, name: str) -> None:
    """With `before` complete, a buffer held until `until` cannot be had again; with `until` complete it can."""
    assert list(Event).index(until) == list(Event).index(before) + 1
    completion, pool = reached(before), StagingPool()
    rows_RD = staged(completion, pool, name, until)
    with pytest.raises(CompletionError, match=f"h-3: buffer '{name}' has readers until {until}") as error:
        completion.release(name)
    assert error.value.reason == "released_before_last_reader"
    pool.take(8, 3, torch.bfloat16, CPU).fill_(2)  # a later step's rows
    assert (rows_RD == 1).all()
    completion.complete(until)
    completion.release(name)
    assert pool.take(8, 3, torch.bfloat16, CPU).data_ptr() == rows_RD.data_ptr()


# -- Premature actions (0x03D5) and what a return means (0x03D4)


def test_pa_03d5_01_send_rows_overwritten_once_the_submit_returned_are_refused() -> None:
    refuses_until(Event.DISPATCH_COMPLETE, Event.DISPATCH_PACKED, "packed_send_payload")


def test_pa_03d5_02_a_receive_buffer_freed_before_repacking_ended_is_refused() -> None:
    refuses_until(Event.EXPERT_INPUT_READY, Event.DISPATCH_COMPLETE, "source_major_receive")


def test_pa_03d5_03_an_expert_output_recycled_during_combine_is_refused() -> None:
    refuses_until(Event.COMBINE_COMPLETE, Event.EXPERT_COMPLETE, "expert_output_return_payload")


def test_px_03d4_01_the_return_of_a_dispatch_call_taken_as_completion_is_refused() -> None:
    completion = reached(Event.DISPATCH_PACKED)  # the submit call has returned; it makes nothing complete
    with pytest.raises(CompletionError, match=r"^missing_dependency: .*h-3: the repack came early, dispatch_complete"):
        completion.require(Event.DISPATCH_COMPLETE, "the repack")
    with pytest.raises(CompletionError, match=r"^missing_dependency: .*expert_input_ready waits for dispatch_complete"):
        completion.complete(Event.EXPERT_INPUT_READY)
    completion.complete(Event.DISPATCH_COMPLETE)
    completion.require(Event.DISPATCH_COMPLETE, "the repack")


# -- Planned lifetimes and events (0x03D5)


def changed(name: str, **change: Any) -> list[Any]:
    return [dataclasses.replace(buffer, **change) if buffer.name == name else buffer for buffer in BUFFERS]


def test_px_03d5_01_a_send_buffer_released_early_is_refused() -> None:
    with pytest.raises(CompletionError, match=r"^released_before_last_reader: buffer 'packed_send_payload' ends at "):
        check_buffers(changed("packed_send_payload", live_until=EPOCHS[Event.DISPATCH_COMPLETE] - 1), EPOCHS)


def test_px_03d5_02_a_handle_released_early_is_refused() -> None:
    with pytest.raises(CompletionError, match=r"^released_before_last_reader: buffer 'route_handle' ends at epoch 8"):
        check_buffers(changed("route_handle", live_until=EPOCHS[Event.OUTPUT_READY]), EPOCHS)
    completion = reached(Event.COMBINE_COMPLETE)
    with pytest.raises(CompletionError, match=r"^missing_dependency: .*handle_released waits for output_ready"):
        completion.complete(Event.HANDLE_RELEASED)


@pytest.mark.parametrize("event", [event for event, node in NODES.items() if node.after])
def test_px_03d5_03_a_missing_dependency_is_refused(event: Event) -> None:
    without = {**NODES, event: dataclasses.replace(NODES[event], after=())}
    with pytest.raises(
        CompletionError, match=f"^missing_dependency: {event} does not wait for {NODES[event].after[0]}"
    ):
        check_events(without)


@pytest.mark.parametrize("event", [event for event in Event if event is not Event.HANDLE_RELEASED])
def test_px_03d5_04_a_cycle_is_refused(event: Event) -> None:
    node = NODES[event]
    cyclic = {**NODES, event: dataclasses.replace(node, after=(*node.after, Event.HANDLE_RELEASED))}
    with pytest.raises(CompletionError, match=r"^cycle: .*handle_released"):
        check_events(cyclic, EPOCHS)


@pytest.mark.parametrize("event", [event for event, node in NODES.items() if node.after])
def test_px_03d5_05_an_epoch_that_is_not_after_its_dependency_is_refused(event: Event) -> None:
    before = NODES[event].after[0]
    with pytest.raises(CompletionError, match=f"^epoch_before_dependency: {event} is at epoch .* {before} "):
        check_events(NODES, {**EPOCHS, event: EPOCHS[before]})


def test_px_03d5_06_two_live_buffers_in_one_alias_group_are_refused() -> None:
    shared = changed("local_expert_input", alias_group="expert_output_return_payload")
    with pytest.raises(
        CompletionError, match=r"^live_alias_overlap: buffers 'local_expert_input' \[3, 5\) and 'expert"
    ):
        check_buffers(shared, EPOCHS)


# -- What a report may claim

CLOCK = Measurement(Instrument.CLOCK, "3 warm-ups, median of 20", "run-1", {"nodes": "2", "tokens": "64"})
MEASURED = Elapsed(0.003, CLOCK)


def no_latency(before: Any, after: Any, found: str) -> None:
    """Neither number fills a latency field, and the two make no speed-up."""
    for given in (before, after):
        with pytest.raises(EvidenceError, match=r"^Elapsed needs the measurement that gave it, found NoneType$"):
            Elapsed(given, None)  # type: ignore[arg-type]
    for pair in ((before, after), (before, MEASURED), (MEASURED, after)):
        with pytest.raises(EvidenceError, match=f"^a speed-up compares two measured times, found {found} "):
            Speedup(*pair)


def test_px_03d1_01_staging_bytes_reported_as_network_bytes_are_refused() -> None:
    staging, remote = SCHEMA.staging_dispatch(ROWS.staged, HIDDEN), SCHEMA.remote_dispatch(ROWS, HIDDEN)
    assert int(staging) > int(remote)
    with pytest.raises(EvidenceError, match=r"^RemoteBytes and StagingBytes are two ledgers; they do not add up$"):
        remote + staging  # type: ignore[operator]
    with pytest.raises(EvidenceError, match=r"^MeasuredBytes needs the measurement that gave it, found NoneType$"):
        MeasuredBytes(int(staging), None)  # type: ignore[arg-type]
    # Rows that stay are staged and never remote.
    stay = RouteRows.of([[sum(line) if peer == own else 0 for peer in range(4)] for own, line in enumerate(COUNTS_PP)])
    assert int(SCHEMA.staging_dispatch(stay.staged, HIDDEN)) == int(staging)
    assert int(SCHEMA.remote_logical(stay, HIDDEN)) == 0


def test_fl_04g_07_a_block_size_without_its_scope_is_refused() -> None:
    pinned = SourceClaim("MegaBlocks", "megablocks/layers/dmoe.py", "952db33", "blocks have 128 rows")
    toy = "blocks have 2 rows"
    for scope in ("surface", "file", "revision"):  # a fixture's constant has none of the three
        with pytest.raises(EvidenceError, match=f"^a claim about source names its {scope}: 'blocks have 2 rows'$"):
            dataclasses.replace(pinned, statement=toy, **{scope: ""})


def test_fl_04g_08_fewer_flops_reported_as_lower_latency_are_refused() -> None:
    padded, grouped = (swiglu_matmul_flops(RowSlots(rows), 3, 4) for rows in (24, 8))
    assert int(grouped) < int(padded)
    no_latency(padded, grouped, "MatmulFlops")


def test_fl_05h_08_a_graph_launch_booked_as_a_kernel_is_refused() -> None:
    replay = HostSubmissions(1)
    with pytest.raises(EvidenceError, match=r"^DeviceLaunches and HostSubmissions are two ledgers"):
        DeviceLaunches(0) + replay  # type: ignore[operator]
    with pytest.raises(TypeError):
        assert replay >= DeviceLaunches(1)  # type: ignore[operator]


def test_fl_05h_09_a_control_item_ratio_quoted_as_a_latency_gain_is_refused() -> None:
    eager, replayed = 34, 12
    no_latency(eager, replayed, "int")
    no_latency(Fraction(eager, replayed), Fraction(1), "Fraction")


def test_fl_06i_05_a_claim_about_one_surface_citing_anothers_source_is_refused() -> None:
    legacy = SourceClaim("DeepEP legacy buffer", "deep_ep/buffer.py", "abc123", "combine is asynchronous")
    with pytest.raises(EvidenceError, match=r"^a claim about source names its file: 'combine is asynchronous'$"):
        SourceClaim("DeepEP V2 buffer", "", legacy.revision, legacy.statement)
    assert legacy != dataclasses.replace(legacy, surface="DeepEP V2 buffer")  # two surfaces, two records


def test_fl_06i_10_a_source_comment_as_a_latency_result_is_refused() -> None:
    comment = SourceClaim("DeepEP", "deep_ep/buffer.py", "abc123", "dispatch takes 77 us")
    with pytest.raises(EvidenceError, match=r"^Elapsed needs the measurement that gave it, found SourceClaim$"):
        Elapsed(77e-6, comment)  # type: ignore[arg-type]
    with pytest.raises(EvidenceError, match=r"'deep_ep/buffer.py' measures nothing$"):
        Measurement(comment.file, comment.statement, "run-1")  # type: ignore[arg-type]


def test_fl_07i_12_a_smaller_pair_count_quoted_as_a_latency_gain_is_refused() -> None:
    no_latency(RowSlots(56), RowSlots(22), "RowSlots")
    relayed = Elapsed(0.002, dataclasses.replace(CLOCK, conditions={"nodes": "4", "tokens": "64"}))
    with pytest.raises(EvidenceError, match=r"^a speed-up holds its conditions constant: nodes was '2', then '4'$"):
        Speedup(MEASURED, relayed)


def test_fl_07i_13_a_transport_label_as_a_measured_number_is_refused() -> None:
    with pytest.raises(EvidenceError, match=r"^MeasuredBytes needs the measurement that gave it, found str$"):
        MeasuredBytes(900_000_000_000, "NVLink")  # type: ignore[arg-type]
    with pytest.raises(EvidenceError, match=r"^a measurement comes from one of .*; 'NVLink' measures nothing$"):
        Measurement("NVLink", protocol="one call", artifact="run-1")  # type: ignore[arg-type]


def test_fl_09f_05_schedule_units_printed_as_milliseconds_are_refused() -> None:
    with pytest.raises(EvidenceError, match=r"^schedule units are no clock time; format '.1f' is for measured values$"):
        f"{Units(15):.1f} ms"
    assert f"{Units(15)}" == "15 units"
    no_latency(Units(22), Units(15), "Units")


def test_fl_09f_06_a_shorter_schedule_quoted_as_a_speed_up_is_refused() -> None:
    serial, overlapped = Units(22), Units(15)
    with pytest.raises(EvidenceError, match=r"^a speed-up compares two measured times, found Units 22 units$"):
        Speedup(serial, overlapped)  # type: ignore[arg-type]
    assert Speedup(Elapsed(0.004, CLOCK), Elapsed(0.002, CLOCK)).ratio == 2.0


def test_fl_0af_07_a_supported_format_declared_quality_safe_is_refused() -> None:
    with pytest.raises(EvidenceError, match=r"^'fp8 is quality-safe' needs an evaluation artifact; a supported format"):
        QualityClaim("fp8 is quality-safe", evaluation="")
