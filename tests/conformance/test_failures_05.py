"""The mistakes of 0x05H, and padding of 0x06I, made against phases and executables; each is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ray_moe.dataplane.graphs import NO_EXPERT, Binding, Executable, ExecutableShape, HostCounters, Launch
from ray_moe.dataplane.ledger import DeviceLaunches
from ray_moe.dataplane.phases import (
    Buckets,
    ControlRatio,
    ExecutableKey,
    Fallback,
    FallbackReason,
    PhaseStep,
    PhaseUnit,
    Replay,
    account_for,
    admit,
    split_by_phase,
)
from ray_moe.errors import BindingError, ConfigError, EvidenceError, RoutesError
from ray_moe.evidence import Elapsed, Speedup

PEERS, SLOTS, TOP_K, HIDDEN = 2, 3, 2, 4
KEY = ExecutableKey(
    process_group_id="ep-group-0",
    placement_version="placement-v17",
    checkpoint_version="checkpoint-0042",
    hidden_width=HIDDEN,
    top_k=TOP_K,
    activation_dtype="float32",
    gate_dtype="float32",
    dispatch_backend="padded_all_to_all",
    runner_backend="masked_decode",
    rank_token_capacities=(4,) * PEERS,
    slot_route_capacities=(4,) * SLOTS,
)
NEXT_KEY = replace(KEY, placement_version="placement-v18")


@pytest.fixture
def binding() -> Binding[str]:
    """Peer 0's bucket of four tokens, with generation 17 in its cell."""
    shape = ExecutableShape(
        peer=0,
        num_peers=PEERS,
        num_slots=SLOTS,
        tokens_per_rank=4,
        rows_per_slot=4,
        hidden=HIDDEN,
        top_k=TOP_K,
        activation=torch.float32,
        gate=torch.float32,
    )
    executable: Executable[str] = Executable(shape, torch.device("cpu"), HostCounters())
    bound = executable.bind(17, KEY, "table-v17")
    executable.activate(bound)
    return bound


def rows_of(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(tokens, HIDDEN), torch.ones(tokens, TOP_K, dtype=torch.int64), torch.full((tokens, TOP_K), 0.5)


def doubled(launch: Launch[str]) -> Tensor:
    return launch.buffers.hidden * 2


def never(launch: Launch[str]) -> Tensor:
    raise AssertionError("a refused launch must not reach its body")


def test_fl_05h_01_cached_context_as_the_token_count_is_refused(binding: Binding[str]) -> None:
    contexts, routes = (700, 1300), (2, 2, 2)  # two and one requests decode one token each
    with pytest.raises(RoutesError, match="6 routes for 2000 tokens of this invocation; top-k 2 makes 4000"):
        PhaseStep("decode", KEY, contexts, routes)
    with pytest.raises(RoutesError, match="6 routes for 2000 tokens"):
        binding.write_validity(1, contexts, routes)
    assert admit(PhaseStep("decode", KEY, (2, 1), routes), binding.manifest, True) == Replay("decode.bucket4.v17")


def test_fl_05h_02_padding_with_real_expert_ids_names_no_expert_in_the_body(binding: Binding[str]) -> None:
    buffers = binding.executable.buffers
    buffers.route_ids.fill_(1)
    buffers.gates.fill_(1.0)
    seen: list[tuple[list[list[int]], list[list[float]]]] = []

    def body(launch: Launch[str]) -> Tensor:
        seen.append((launch.buffers.route_ids[2:].tolist(), launch.buffers.gates[2:].tolist()))
        launch.require_routes(int((launch.buffers.route_ids != NO_EXPERT).sum()))
        return launch.buffers.hidden * 2

    binding.write_validity(1, (2, 1), (2, 2, 2))
    binding.launch(1, *rows_of(2), body)
    assert seen == [([[NO_EXPERT] * TOP_K] * 2, [[0.0] * TOP_K] * 2)]


def test_fl_05h_03_counts_of_an_earlier_step_are_stale_validity(binding: Binding[str]) -> None:
    binding.write_validity(1, (2, 1), (2, 2, 2))
    binding.launch(1, *rows_of(2), doubled)
    for step, why in ((2, "step 2: .* not written"), (1, "step 1: .* not written")):
        with pytest.raises(BindingError, match=f"stale_validity: {why}") as caught:
            binding.launch(step, *rows_of(2), never)
        assert caught.value.reason == "stale_validity"
    binding.write_validity(2, (2, 1), (2, 2, 2))
    with pytest.raises(BindingError, match=r"stale_validity: step 3: .* of step 2"):
        binding.launch(3, *rows_of(2), never)
    binding.write_validity(3, (2, 1), (2, 2, 2))
    with pytest.raises(BindingError, match=r"stale_validity: step 3: .* says 2 tokens here, found 3"):
        binding.launch(3, *rows_of(3), never)


def test_fl_05h_04_another_placement_is_a_fallback_and_never_a_launch(binding: Binding[str]) -> None:
    step = PhaseStep("decode", NEXT_KEY, (2, 1), (2, 2, 2))
    mismatch = Fallback(FallbackReason("graph_key_mismatch"))
    assert admit(step, binding.manifest, True) == mismatch
    buckets = Buckets((binding.manifest,))
    assert buckets.choose("decode", NEXT_KEY.scope, (2, 1), (2, 2, 2), lambda name: True) == mismatch
    executable = binding.executable
    with pytest.raises(BindingError, match="key_mismatch"):
        executable.bind(18, KEY, "table-v18")  # the placement changed and the key stayed
    executable.activate(executable.bind(18, NEXT_KEY, "table-v18"))
    with pytest.raises(BindingError) as caught:
        binding.launch(1, *rows_of(2), never)
    assert caught.value.reason == "other_generation"


def test_fl_05h_05_an_oversize_step_falls_back_with_all_rows_and_is_never_cut(binding: Binding[str]) -> None:
    step = PhaseStep("decode", KEY, (5, 1), (4, 4, 4))
    decision = admit(step, binding.manifest, True)
    assert decision == Fallback(FallbackReason("rank_token_capacity_exceeded"))
    account = account_for(step, binding.manifest, decision, host_submissions=7, control_items=0)
    assert (account.rows.dispatch_slots.value, account.rows.runner_rows.value) == (6, 12)
    with pytest.raises(BindingError, match=r"rank_token_capacity_exceeded: .* holds 4, found 5"):
        binding.write_validity(1, step.rank_tokens, step.slot_routes)
    with pytest.raises(BindingError, match=r"rank_token_capacity_exceeded: .* holds 4 tokens, found 5"):
        binding.launch(1, *rows_of(5), never)
    hot = PhaseStep("decode", KEY, (3, 0), (5, 1, 0))
    assert admit(hot, binding.manifest, True) == Fallback(FallbackReason("expert_route_capacity_exceeded"))
    with pytest.raises(BindingError, match=r"expert_route_capacity_exceeded: .* holds 4, found 5"):
        binding.write_validity(1, hot.rank_tokens, hot.slot_routes)
    with pytest.raises(RoutesError, match="rank_tokens must have 2 entries, found 1"):
        PhaseStep("decode", KEY, (3,), (2, 2, 2))  # a vector cut to what is compared


def test_fl_05h_06_merged_phases_are_no_unit(binding: Binding[str]) -> None:
    rows = [("decode", 0), ("prefill", 1), ("decode", 2)]
    with pytest.raises(ConfigError, match=r"an execution unit has one phase of .*, found 'mixed'"):
        PhaseUnit("mixed", tuple(rows))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="found 'mixed'"):
        split_by_phase(rows, lambda row: "mixed")  # type: ignore[arg-type, return-value]
    merged = PhaseStep("mixed", KEY, (2, 1), (2, 2, 2))
    assert admit(merged, binding.manifest, True) == Fallback(FallbackReason("phase_not_decode"))
    units = split_by_phase(rows, lambda row: row[0])  # type: ignore[arg-type, return-value]
    assert {unit.phase: unit.rows for unit in units} == {"prefill": (rows[1],), "decode": (rows[0], rows[2])}


@pytest.mark.parametrize(
    "name", ["hidden", "route_ids", "gates", "expert_output", "step_metadata", "valid_routes_by_slot", "validity"]
)
def test_fl_05h_07_a_moved_buffer_is_not_ready(binding: Binding[str], name: str) -> None:
    executable = binding.executable
    step = PhaseStep("decode", KEY, (2, 1), (2, 2, 2))
    assert admit(step, binding.manifest, executable.buffers_ready) == Replay("decode.bucket4.v17")
    binding.write_validity(1, step.rank_tokens, step.slot_routes)
    buffer = getattr(executable.buffers, name)
    captured = buffer.data
    buffer.data = captured.clone()
    assert not executable.buffers_ready
    unavailable = Fallback(FallbackReason("stable_buffer_unavailable"))
    assert admit(step, binding.manifest, executable.buffers_ready) == unavailable
    with pytest.raises(BindingError, match="stable_buffer_unavailable"):
        binding.launch(1, *rows_of(2), never)
    buffer.data = captured
    assert executable.buffers_ready


def test_fl_05h_08_a_launch_is_no_count_of_kernels(binding: Binding[str]) -> None:
    counters = binding.executable.counters
    binding.write_validity(1, (2, 1), (2, 2, 2))
    binding.launch(1, *rows_of(2), doubled)
    assert (int(counters.host_submissions), counters.device_launches) == (1, None)
    counters.add_device_launches(DeviceLaunches(17))
    assert (int(counters.host_submissions), counters.device_launches) == (1, DeviceLaunches(17))


def test_fl_05h_09_a_control_ratio_is_no_time() -> None:
    before, after = ControlRatio(12, 10), ControlRatio(34, 112)
    assert after.value < before.value
    assert before.evidence == "analytical"
    with pytest.raises(EvidenceError, match="compares two measured times, found ControlRatio"):
        Speedup(before, after)  # type: ignore[arg-type]
    with pytest.raises(EvidenceError, match="needs the measurement"):
        Elapsed(float(before.value), before)  # type: ignore[arg-type]


def test_fl_06i_04_a_body_that_plans_padding_is_refused(binding: Binding[str]) -> None:
    def unmasked(launch: Launch[str]) -> Tensor:
        counts_E = torch.bincount(launch.buffers.route_ids.clamp(min=0).flatten())
        launch.require_routes(int(counts_E.sum()))
        return launch.buffers.hidden

    binding.write_validity(1, (2, 1), (2, 2, 2))
    with pytest.raises(BindingError, match=r"unmasked_padding: .* plans 8 routes for 2 tokens of top-k 2; 4 are valid"):
        binding.launch(1, *rows_of(2), unmasked)
