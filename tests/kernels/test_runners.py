"""The kernels' runners against a loop over segments in fp32: errors are bounded by their norm over the result's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.comm.join import transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.dataplane import gpu_runners, runners
from ray_moe.dataplane.block_sparse import BlockTopology
from ray_moe.dataplane.gpu_runners import (
    GPU_RUNNERS,
    GpuBlockSparse,
    GpuCapacityPadded,
    GpuGrouped,
    GpuMaskedDecode,
    refusal,
)
from ray_moe.dataplane.layer import Invocation
from ray_moe.dataplane.layer_weights import LayerWeights
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.rows import ExpertRows, MaskedRows, Mode, SegmentedRows
from ray_moe.dataplane.runners import RUNNERS, Runner, runner_named
from ray_moe.errors import RunnerError
from ray_moe.identity import GlobalRank
from ray_moe.kernels.activation import SwiGLU
from tests.kernels.expert_rows import ROUTINGS, Shape, error, loop, random_rows, run, segment_counts
from tests.layers import ONE_PEER, Experts, layer_on, placement, random_routes

GPT_OSS = SwiGLU(limit=7.0, alpha=1.702, up_shift=1.0)
# fp32: sums of at most 128 products in another order. Half precision: rows, weights and activations are rounded.
FP32, HALF = 1e-5, 1e-2

# Every runner, with padding of every kind; tests on small tensors take small blocks.
SMALL: dict[str, Callable[[], Runner]] = {
    "grouped": GpuGrouped,
    "capacity_padded": GpuCapacityPadded,
    "capacity_padded, fixed and aligned": lambda: GpuCapacityPadded(capacity=150, alignment=4),
    "block_sparse": lambda: GpuBlockSparse(block_rows=16, block_columns=16),
    "masked_decode": GpuMaskedDecode,
}
every_runner = pytest.mark.parametrize("make", SMALL.values(), ids=SMALL.keys())


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that a runner allocates without a value is NaN at first."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def poison(out: Tensor) -> Tensor:
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: poison(new_empty(*args, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: poison(empty_like(*args, **options)))


# -- One function, on small tensors


@every_runner
@pytest.mark.parametrize("kind", ROUTINGS)
def test_a_runner_is_the_loop_over_segments_for_every_routing(
    make: Callable[[], Runner], kind: str, device: torch.device
) -> None:
    torch.manual_seed(1)
    shape = Shape(slots=5, hidden=72, ffn=48, bias=kind == "zipf")
    weights = shape.weights(torch.float16, device)
    rows = random_rows(segment_counts(kind, 37, shape.slots), shape.hidden, torch.float16, device)
    assert error(run(make(), rows, weights), loop(rows, weights)) < HALF


@every_runner
@pytest.mark.parametrize(
    ("counts", "shape"),
    [
        ([3, 0, 17, 1], Shape(slots=4, hidden=40, ffn=80, bias=True, form=GPT_OSS)),
        ([0, 0, 5, 2, 0, 18], Shape(slots=6, hidden=24, ffn=16, replicas=3)),
        ([145], Shape(slots=1, hidden=8, ffn=48, form=GPT_OSS)),
        ([1, 1, 1], Shape(slots=3, hidden=136, ffn=112, bias=True)),
    ],
    ids=["gpt_oss", "replicas", "one slot", "odd widths"],
)
def test_fp32_rows_equal_the_loop_for_odd_shapes_biases_clamps_and_replicas(
    make: Callable[[], Runner], counts: list[int], shape: Shape
) -> None:
    torch.manual_seed(2)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        pytest.skip("tensor cores round fp32 products to tf32; the interpreter does not")
    weights, rows = shape.weights(torch.float32, device), random_rows(counts, shape.hidden, torch.float32, device)
    assert error(run(make(), rows, weights), loop(rows, weights)) < FP32


@every_runner
@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]], ids=str)
def test_a_call_without_rows_answers_without_rows(
    make: Callable[[], Runner], counts: list[int], device: torch.device
) -> None:
    weights = Shape(slots=len(counts), hidden=16, ffn=16).weights(torch.float16, device)
    rows = random_rows(counts, 16, torch.float16, device)
    assert run(make(), rows, weights).shape == (0, 16)
    assert run(make(), rows, weights, spare=0).shape == (0, 16)


@every_runner
def test_rows_that_were_given_stay_as_they_were_and_new_weights_in_a_slot_are_seen(
    make: Callable[[], Runner], device: torch.device
) -> None:
    torch.manual_seed(3)
    runner, weights = make(), Shape(slots=3, hidden=16, ffn=16).weights(torch.float16, device)
    rows = random_rows([2, 0, 18], 16, torch.float16, device)
    before = rows.rows_RD.clone()
    run(runner, rows, weights)
    assert torch.equal(rows.rows_RD, before)
    weights.down.mul_(2)  # in place: slabs keep their addresses, and the runner keeps its descriptors
    assert error(run(runner, rows, weights), loop(rows, weights)) < HALF
    first, *_, last = weights.pool_slots
    for slots in ((last, last, first), (first, last, first)):  # other generations, over the same slabs
        moved = replace(weights, pool_slots=slots)
        assert error(run(runner, rows, moved), loop(rows, moved)) < HALF
    others = Shape(slots=3, hidden=16, ffn=16, bias=True).weights(torch.float16, device)
    assert error(run(runner, rows, others), loop(rows, others)) < HALF


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.booleans(), st.sampled_from([SwiGLU(), GPT_OSS]))
def test_all_runners_agree_on_the_same_rows(counts: list[int], bias: bool, form: SwiGLU) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = Shape(len(counts), hidden=24, ffn=32, bias=bias, form=form).weights(torch.float16, device)
    rows = random_rows(counts, 24, torch.float16, device)
    wanted_RD = loop(rows, weights)
    outputs = {name: run(make(), rows, weights) for name, make in SMALL.items()}
    assert {name: out.shape for name, out in outputs.items()} == dict.fromkeys(SMALL, rows.rows_RD.shape)
    for name, out_RD in outputs.items():
        assert error(out_RD, outputs["grouped"].float()) < HALF, name
        assert error(out_RD, wanted_RD) < HALF, name


# -- The same runners, otherwise


def test_names_modes_options_and_accounting_are_those_of_the_torch_runners() -> None:
    assert list(GPU_RUNNERS) == list(RUNNERS)
    for name, runner in GPU_RUNNERS.items():
        assert issubclass(runner, RUNNERS[name])
        assert (runner.name, runner.mode, runner.work) == (name, RUNNERS[name].mode, RUNNERS[name].work)


@every_runner
def test_refusals_are_those_of_the_torch_runners(make: Callable[[], Runner], device: torch.device) -> None:
    weights = Shape(slots=3, hidden=16, ffn=16).weights(torch.float16, device)
    with pytest.raises(RunnerError, match=r"^slots_do_not_match_segments: 2 segments for 3 slots"):
        run(make(), random_rows([1, 2], 16, torch.float16, device), weights)


def test_a_capacity_below_the_largest_segment_is_refused_before_any_launch(device: torch.device) -> None:
    weights = Shape(slots=2, hidden=16, ffn=16).weights(torch.float16, device)
    with pytest.raises(RunnerError, match=r"^capacity_below_largest_segment: slot 1 has 5 rows, the capacity is 4"):
        GpuCapacityPadded(capacity=4).run(random_rows([1, 5], 16, torch.float16, device), weights)


@pytest.mark.parametrize("counts", [[3, 0, 1], [16, 33, 0, 0, 1], [0], []], ids=str)
def test_indices_on_the_device_are_the_hosts(counts: list[int], device: torch.device) -> None:
    topology = BlockTopology(0, tuple(counts), 64, 16, 32, device)
    found = topology.device_indices
    assert {index.dtype for index in found} == {torch.int32} and {index.device.type for index in found} == {device.type}
    assert found.row_Z.tolist() == list(topology.row_indices)
    assert found.column_Z.tolist() == list(topology.column_indices)
    assert found.offsets_B1.tolist() == list(topology.row_offsets)
    assert found.transpose_Z.tolist() == list(topology.transpose_indices)
    assert found.positions_R.tolist() == topology.positions_R.tolist()


def test_the_worked_example_of_cutting_segments_into_tiles() -> None:
    found = gpu_runners._cut([0, 8], [5, 1], 4)
    assert [vector.tolist() for vector in found] == [[0, 0, 1], [0, 4, 8], [5, 5, 9], [3]]


@pytest.mark.parametrize("name", GPU_RUNNERS)
def test_a_layer_of_the_product_gives_the_dense_result_over_replicas(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("tensor cores round fp32 products to tf32; the interpreter does not")
    experts, routes = Experts.random(4, 24, 16, bias=True), random_routes(5, 9, 2, 4)
    snapshot = placement([(2, 0), (0, 0), (3, 0), (2, 0), (1, 0), (0, 0)], ONE_PEER)
    transport = transport_named("all_to_all_v", SoloGroup(ONE_PEER, GlobalRank(0)))
    runner: Runner = GpuBlockSparse(16) if name == "block_sparse" else GPU_RUNNERS[name]()
    layer = layer_on(snapshot, 0, experts, transport, runner, policy_named("round_robin"))
    layer.weights = replace(layer.weights, form=SwiGLU())
    hidden_TD = torch.randn(9, 24)
    out_TD = layer.forward(hidden_TD, routes, Invocation(0, "bare", audit=True))
    assert error(out_TD, experts.dense(hidden_TD, routes)) < FP32


# -- What the kernels cannot compute


def misfits() -> dict[str, tuple[str, LayerWeights, str]]:
    def weights(**changes: int) -> LayerWeights:
        return Shape(**{"slots": 2, "hidden": 16, "ffn": 16, **changes}).weights(torch.float16, torch.device("cpu"))

    fits = weights()
    return {
        "no form": ("grouped", replace(fits, form=None), "the activation is no SwiGLU"),
        "width": ("capacity_padded", weights(hidden=20), "widths D = 20 and F = 16 must be multiples of 8"),
        "dtype": (
            "masked_decode",
            replace(fits, down=fits.down.double()),
            "weights are torch.float16 and torch.float64",
        ),
        "strides": ("grouped", replace(fits, down=fits.down.mT), "a slab is not contiguous"),
        "columns": ("block_sparse", weights(ffn=40), "blocks of 128 x 8 must have edges among 16, 32, 64, 128"),
    }


@pytest.mark.parametrize("case", misfits().values(), ids=misfits().keys())
def test_weights_that_the_kernels_cannot_address_are_refused_by_name(case: tuple[str, LayerWeights, str]) -> None:
    name, weights, reason = case
    assert refusal(runner_named(name), weights) == reason
    rows = random_rows([1, 2], weights.down.shape[1], torch.float16, torch.device("cpu"))
    with pytest.raises(RunnerError, match=f"^kernels_do_not_fit: {reason}"):
        run(GPU_RUNNERS[name](), rows, weights)


def test_rows_of_another_dtype_than_the_weights_are_refused(device: torch.device) -> None:
    weights = Shape(slots=1, hidden=16, ffn=16).weights(torch.float16, device)
    with pytest.raises(RunnerError, match=r"rows are torch.float32, weights torch.float16"):
        GpuGrouped().run(random_rows([2], 16, torch.float32, device), weights)


def test_fp32_weights_are_left_to_torch_and_half_precision_is_not() -> None:
    weights = Shape(slots=1, hidden=16, ffn=16).weights(torch.float32, torch.device("cpu"))
    assert refusal(runner_named("grouped"), weights) == "tensor cores would round FP32 products to TF32"
    half = Shape(slots=1, hidden=16, ffn=16).weights(torch.bfloat16, torch.device("cpu"))
    assert [refusal(runner_named(name, block_rows=16), half) for name in RUNNERS] == [None] * 4


def test_on_a_cpu_the_torch_runners_are_chosen_and_say_nothing() -> None:
    weights = Shape(slots=1, hidden=16, ffn=16).weights(torch.bfloat16, torch.device("cpu"))
    chosen = {name: runner_named(name, weights=weights) for name in RUNNERS}
    assert {name: type(runner) for name, runner in chosen.items()} == RUNNERS
    assert [runner.fallback for runner in chosen.values()] == [None] * 4


# -- On a GPU


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_are_chosen_and_torch_takes_over_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    runners._warn_once.cache_clear()
    weights = Shape(slots=2, hidden=64, ffn=64).weights(torch.bfloat16, torch.device("cuda"))
    assert {name: type(runner_named(name, weights=weights)) for name in RUNNERS} == GPU_RUNNERS
    unknown = replace(weights, form=None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            chosen = {name: runner_named(name, weights=unknown) for name in RUNNERS}
    assert {name: type(runner) for name, runner in chosen.items()} == RUNNERS
    assert {runner.fallback for runner in chosen.values()} == {"the activation is no SwiGLU"}
    assert len(caplog.records) == len(RUNNERS)  # once each
    rows = random_rows([3, 4], 64, torch.bfloat16, torch.device("cuda"))
    assert error(run(chosen["grouped"], rows, unknown), loop(rows, weights)) < HALF


# E from 4 to 512, a family with biases and clamps, and widths that no tile divides.
GPU_SHAPES = {
    "qwen3": Shape(slots=128, hidden=2048, ffn=768),
    "gpt_oss": Shape(slots=32, hidden=2880, ffn=2880, bias=True, form=GPT_OSS),
    "512 experts": Shape(slots=512, hidden=1024, ffn=512),
    "odd": Shape(slots=4, hidden=1000, ffn=1072, bias=True, replicas=2),
}
TOP_K = 4
TOKENS = (0, 1, 3, 17, 250, 2048, 16384)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES.keys())
def test_bf16_runners_are_the_loop_for_every_routing_and_size(shape: Shape, kind: str) -> None:
    torch.manual_seed(4)
    device = torch.device("cuda")
    weights = shape.weights(torch.bfloat16, device)
    chosen = {name: runner_named(name, weights=weights) for name in RUNNERS}
    assert {name: type(runner) for name, runner in chosen.items()} == GPU_RUNNERS
    for tokens in TOKENS:
        counts = segment_counts(kind, tokens * TOP_K, shape.slots)
        rows = random_rows(counts, shape.hidden, torch.bfloat16, device)
        wanted_RD = loop(rows, weights)
        # A capacity-shaped buffer of one busy slot among many would not fit.
        padded = max(counts) * shape.slots * shape.hidden < 2**31
        for name, runner in chosen.items():
            if padded or runner.name in ("grouped", "block_sparse"):
                assert error(run(runner, rows, weights), wanted_RD) < HALF, (name, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNNERS)
def test_a_runner_waits_for_nothing_on_the_device(name: str) -> None:
    device = torch.device("cuda")
    weights = Shape(slots=8, hidden=256, ffn=256).weights(torch.bfloat16, device)
    runner = runner_named(name, weights=weights)
    rows = random_rows([5, 0, 300, 7, 1, 1, 0, 90], 256, torch.bfloat16, device)
    calls: list[ExpertRows] = [rows, replace(rows, offsets_S1=(0, 0, 9, 9, 20, 300, 310, 400, 404))]
    if runner.mode is Mode.LOW_LATENCY:
        buffer_SCD = torch.randn(8, 300, 256, device=device).bfloat16()
        calls = [MaskedRows(buffer_SCD, counts) for counts in ((5, 0, 300, 7, 1, 1, 0, 90), (1, 9, 0, 0, 17, 2, 30, 4))]
    runner.run(calls[0], weights)  # compiles, and builds what is kept
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.run(calls[1], weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["grouped", "capacity_padded", "masked_decode"])
def test_a_rows_bits_do_not_depend_on_the_batch(name: str) -> None:
    torch.manual_seed(5)
    device = torch.device("cuda")
    weights = GPU_SHAPES["qwen3"].weights(torch.bfloat16, device)
    own_nD = torch.randn(3, 2048, device=device).bfloat16()
    found = []
    for before, behind in ((0, 0), (1, 2), (9, 20), (40, 90), (700, 1)):
        around = random_rows([before + behind], 2048, torch.bfloat16, device).rows_RD
        rows_RD = torch.cat((around[:before], own_nD, around[before:]))
        rows = SegmentedRows(rows_RD, (0,) * 6 + (rows_RD.shape[0],) * 123)
        found.append(run(runner_named(name, weights=weights), rows, weights)[before : before + 3])
    assert all(torch.equal(out_nD, found[0]) for out_nD in found)
