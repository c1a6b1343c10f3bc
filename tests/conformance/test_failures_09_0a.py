"""The failure labs of schedules (0x09F) and of precision (0x0AF): each mistake is made, and refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.ledger import RouteRows
from ray_moe.dataplane.precision import (
    DtypeRoles,
    QuantizedRows,
    aligned_rows,
    codec_named,
    compare_selection,
    error_report,
    gate_location_named,
    payload_bytes,
    smaller_format,
)
from ray_moe.dataplane.schedule import (
    BufferUse,
    Span,
    buffers_of,
    check_release,
    check_schedule,
    chunk_pipeline,
    list_schedule,
    serialize,
    shared_path,
)
from ray_moe.errors import ConfigError, EvidenceError, HandleError, ScheduleError
from ray_moe.evidence import Elapsed, LogicalBytes, QualityClaim, RowSlots, Speedup, Units

CHUNKS = chunk_pipeline(2)
SHARED = shared_path()
# Four peers, six rows of which change peers and two stay.
COUNTS_PP = [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]


# -- 0x09F


def test_fl_09f_01_an_expert_that_starts_at_dispatch_launch_is_refused() -> None:
    schedule = list_schedule(CHUNKS)
    launched = schedule["dispatch_1"].start
    early = {**schedule, "expert_1": Span(launched, launched + Units(4))}
    with pytest.raises(ScheduleError, match=r"expert_1 .* waits for dispatch_1") as error:
        check_schedule(CHUNKS, early)
    assert "dependency" in error.value.reasons


def test_fl_09f_02_two_communication_tasks_that_share_a_unit_are_refused() -> None:
    schedule = list_schedule(CHUNKS)
    first = schedule["dispatch_0"]
    together = {**schedule, "dispatch_1": Span(Units(int(first.end) - 1), Units(int(first.end) + 2))}
    with pytest.raises(ScheduleError, match=r"dispatch_0 .* and dispatch_1 .* on stream communication") as error:
        check_schedule(CHUNKS, together)
    assert error.value.reasons == ("stream_collision",)


def test_fl_09f_03_a_send_buffer_that_is_released_after_packing_is_refused() -> None:
    schedule = list_schedule(CHUNKS)
    with pytest.raises(ScheduleError, match="early_release: send_1 is released at 3 units"):
        check_release(buffers_of(CHUNKS), schedule, {"send_1": schedule["pack_1"].end})
    check_release(buffers_of(CHUNKS), schedule, {"send_1": schedule["dispatch_1"].end})


def test_fl_09f_04_a_shared_output_that_is_released_at_its_producers_end_is_refused() -> None:
    schedule = list_schedule(SHARED)
    with pytest.raises(ScheduleError, match="early_release: shared_output"):
        check_release(buffers_of(SHARED), schedule, {"shared_output": schedule["shared_path"].end})
    # The reduction is listed without anybody's help, and a buffer without a reader cannot be declared.
    assert {use.name: use.consumers for use in buffers_of(SHARED)}["shared_output"] == ("reduce",)
    with pytest.raises(ScheduleError, match="no_consumer: buffer shared_output"):
        BufferUse("shared_output", "shared_path", ())


def test_fl_09f_05_schedule_units_cannot_be_printed_as_milliseconds() -> None:
    makespan: Any = list_schedule(CHUNKS).makespan
    with pytest.raises(EvidenceError, match="no clock time"):
        f"{makespan:.2f} ms"
    with pytest.raises(EvidenceError, match="Elapsed needs the measurement that gave it"):
        Elapsed(int(makespan) / 1000, makespan)


def test_fl_09f_06_a_timeline_is_no_speed_up() -> None:
    before: Any = serialize(CHUNKS).makespan
    after: Any = list_schedule(CHUNKS).makespan
    with pytest.raises(EvidenceError, match="a speed-up compares two measured times, found Units"):
        Speedup(before, after)


# -- 0x0AF


def test_fl_0af_01_fp8_bytes_include_their_scales() -> None:
    with pytest.raises(ConfigError, match="fp8 rows and no others have scales: dispatch 'fp8', scales 'none'"):
        DtypeRoles(dispatch="fp8")
    data_alone = LogicalBytes(6 * 16)
    for name in ("fp8_row", "fp8_block"):
        assert payload_bytes(name, RowSlots(6), 16) == data_alone + LogicalBytes(6 * 4)
        assert codec_named(name, 16, torch.bfloat16).row_bytes == 16 + 4


def test_fl_0af_02_scales_that_do_not_follow_their_rows_are_refused() -> None:
    rows_ND = torch.tensor([[1.0, 2.0], [30.0, 40.0], [500.0, 600.0]])
    order_N, held = torch.tensor([2, 0, 1]), QuantizedRows.of(rows_ND, 2)
    # One destination's segment of the data beside all scales in token order.
    with pytest.raises(HandleError, match="scale rows must equal payload rows"):
        QuantizedRows(held.permuted(order_N).data_ND[:2], held.scales_NB, 2)
    # What travels is one row: no operation on it can leave a scale behind.
    codec = codec_named("fp8_row", 2, torch.float32)
    wire_NW = codec.encode(rows_ND)
    for segment in (order_N[:2], order_N[2:]):
        arrived_ND = codec.decode(wire_NW[segment], torch.float32)
        assert torch.equal(arrived_ND, codec.decode(wire_NW, torch.float32)[segment])
    with pytest.raises(HandleError, match=r"takes rows \[N, 6\] in torch.uint8, found \[3, 2\]"):
        codec.decode(wire_NW[:, :2], torch.float32)


def test_fl_0af_03_fp8_is_not_taken_to_be_smaller_at_width_three() -> None:
    assert smaller_format(RowSlots(6), 3) == "bf16"
    for name in ("fp8_row", "fp8_block"):
        assert payload_bytes(name, RowSlots(6), 3) > payload_bytes("bf16", RowSlots(6), 3)
        assert smaller_format(RowSlots(6), 16, ("bf16", name)) == name


def test_fl_0af_04_runner_fringe_is_no_remote_row() -> None:
    remote: Any = RouteRows.of(COUNTS_PP).remote
    aligned = aligned_rows([2, 2, 1, 1, 1, 1], 4)
    assert (remote, int(aligned.waste)) == (RowSlots(6), 16)
    with pytest.raises(EvidenceError, match="RowSlots and RunnerRows are two ledgers"):
        remote + aligned.waste
    with pytest.raises(EvidenceError, match="RunnerRows and RowSlots are two ledgers"):
        aligned.waste + remote
    with pytest.raises(EvidenceError, match="payload is counted from routed rows, found RunnerRows"):
        payload_bytes("bf16", aligned.executed, 3)


def test_fl_0af_05_a_gate_on_the_experts_input_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found 'input'; .* E\(gx\) is not gE\(x\)"):
        gate_location_named("input")
    with pytest.raises(ConfigError, match="gate_location"):
        HandleABI(gate_location="input")


def test_fl_0af_06_a_router_is_compared_by_the_experts_it_selects() -> None:
    # Logits move by less than bf16's half last place, 2^-8 at 2; token 1's experts 1 and 2 become a tie and swap.
    logits_TE = torch.tensor([[3.0, 1.0, 0.5], [3.0, 2.001, 2.002]])
    lower_TE = logits_TE.bfloat16()
    assert (lower_TE.float() - logits_TE).abs().max() < 2**-8
    assert compare_selection(logits_TE, lower_TE, top_k=2).tolist() == [1]
    assert compare_selection(logits_TE, logits_TE.clone(), top_k=2).tolist() == []


def test_fl_0af_07_a_supported_format_is_no_quality_claim() -> None:
    report = error_report(
        torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), codec_named("fp8_row", 64, torch.float32)
    )
    assert 0 < report.relative_rms < 1 / 16
    with pytest.raises(EvidenceError, match="needs an evaluation artifact; a supported format is no evaluation"):
        QualityClaim(f"{report.codec} keeps the model's quality", evaluation="")
