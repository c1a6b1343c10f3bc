"""The routed layer's kernels, alone and together, against fp32 twins: bounds are relative norms of the error."""

from __future__ import annotations

import math

import pytest
import torch

from ray_moe.errors import ConfigError
from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.combine import combine
from ray_moe.kernels.epilogue import Home
from ray_moe.kernels.fused_layer import FusedLayer, Workspace
from ray_moe.kernels.gemv_layer import GemvTile
from ray_moe.kernels.grouped_gemm import Tile, down_descriptor, down_product, gate_up_descriptor, gate_up_swiglu
from ray_moe.kernels.reference import weighted_combine
from ray_moe.kernels.reference_grouped import gather_combine, grouped_down, grouped_gate_up, route_maps, routed_layer
from ray_moe.kernels.tiling import GroupedTiles, LayerShape
from tests.kernels.layers import ROUTINGS, relative_error, routing, slabs
from tests.kernels.segments import row_tiles

GPT_OSS = SwiGLU(limit=7.0, alpha=1.702, up_shift=1.0)
FP32, TF32, BF16 = 1e-5, 4e-3, 6e-3  # operands keep 24, 11 and 8 bits; three products and a sum follow
SHAPE = LayerShape(num_experts=6, top_k=3, hidden=72, ffn=40)
SMALL = Tile(16, 32, 16, 4, 2)


def test_the_worked_examples_of_the_twins() -> None:
    one = torch.ones(1, 1, 1)
    gate_up, down = torch.tensor([[[1.0], [2.0]]]), 2 * one
    offsets, slots = torch.tensor([0, 2]), torch.zeros(1, dtype=torch.int32)
    rows = torch.tensor([[3.0], [1.0]])
    silu = [x / (1 + math.exp(-x)) for x in (3.0, 1.0)]
    wanted = torch.tensor([[silu[0] * 6], [silu[1] * 2]])
    torch.testing.assert_close(grouped_gate_up(rows, offsets, slots, gate_up, None, SwiGLU()), wanted)
    assert grouped_down(torch.tensor([[1.0], [3.0]]), offsets, slots, down, None, None).tolist() == [[2.0], [6.0]]
    combined = gather_combine(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, 0]), torch.tensor([[0.5, 0.25]]), 2)
    assert combined.tolist() == [[2.25]]
    layer = routed_layer(
        rows[:1], torch.tensor([[0]]), torch.tensor([[0.5]]), slots, gate_up, down, None, None, SwiGLU()
    )
    torch.testing.assert_close(layer, torch.tensor([[0.5 * 2 * silu[0] * 6]]))
    source, position, offsets = route_maps(torch.tensor([2, 0, -1, 2]), 3)
    assert (source.tolist(), position.tolist(), offsets.tolist()) == ([1, 0, 3], [1, 0, -1, 2], [0, 1, 1, 3])


def test_the_worked_examples_of_swiglu() -> None:
    gate, up = torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0])
    torch.testing.assert_close(SwiGLU()(gate, up), torch.tensor([0.0, 2 / (1 + math.exp(-1))]))
    clamped = GPT_OSS(torch.tensor([9.0]), torch.tensor([-9.0]))
    torch.testing.assert_close(clamped, torch.tensor([-6 * 7 / (1 + math.exp(-1.702 * 7))]))


def test_the_worked_example_of_combine(device: torch.device) -> None:
    rows = torch.zeros(3, 8, device=device)
    rows[:, 0] = torch.tensor([1.0, 2.0, 4.0])
    out = torch.full((1, 8), float("nan"), device=device)
    positions = torch.tensor([2, 0], dtype=torch.int32, device=device)
    combine(rows, positions, torch.tensor([[0.5, 0.25]], device=device), 2, out)
    assert out[0, 0].item() == 2.25
    combine(rows, torch.tensor([-1, 1], dtype=torch.int32, device=device), None, 2, out)
    assert out[0, 0].item() == 2.0


@pytest.mark.parametrize("gates", [torch.float16, torch.float32])
def test_gates_weigh_rows_in_the_dtype_that_both_promote_to(gates: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(9)
    rows, weight = torch.randn(12, 16).half(), torch.rand(4, 3).to(gates)
    out = torch.empty(4, 16, dtype=torch.float16)
    combine(rows, torch.arange(12, dtype=torch.int32), weight, 3, out)
    assert torch.equal(out, weighted_combine(rows, weight, 3, torch.float16))


@pytest.mark.parametrize(
    "tile",
    [
        SMALL,
        Tile(16, 32, 16, 4, 2, swapped=True),
        Tile(32, 64, 32, 4, 2, short_tail=True, group=2),
        Tile(16, 32, 16, 4, 2, short_tail=True, copied_rows=True),
        Tile(32, 32, 16, 4, 2, swapped=True, short_tail=True, tail_stages=3),
    ],
    ids=["plain", "swapped", "short_tail", "copied_rows", "swapped_tail"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_equal_their_twins(tile: Tile, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    weights = slabs(SHAPE, dtype, device, biases=True, activation=GPT_OSS)
    offsets = [0, 5, 5, 38, 39, 39, 41]
    tiles = row_tiles(offsets, tile.rows, 3, device)
    slots = torch.tensor([7, 0, 3, 2, 5, 1], dtype=torch.int32, device=device)
    tokens = torch.randn(20, SHAPE.hidden, device=device).to(dtype)
    source = torch.randint(0, 60, (41,), dtype=torch.int32, device=device)
    acts = torch.full((41, SHAPE.ffn), float("nan"), dtype=dtype, device=device)
    gate_up_swiglu(
        tokens, source, 3, tiles, slots, gate_up_descriptor(weights.gate_up, tile), weights.gate_up_bias,
        weights.activation, tile, acts,
    )  # fmt: skip
    bounds = torch.tensor(offsets)
    wanted = grouped_gate_up(tokens[source // 3], bounds, slots, weights.gate_up, weights.gate_up_bias, GPT_OSS)
    bound = {torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(acts.float(), wanted, rtol=bound, atol=bound)
    gates = torch.rand(41, device=device)
    rows = torch.full((41, SHAPE.hidden), float("nan"), dtype=dtype, device=device)
    down_product(acts, tiles, slots, down_descriptor(weights.down, tile), weights.down_bias, gates, tile, rows)
    wanted = grouped_down(acts, bounds, slots, weights.down, weights.down_bias, gates)
    torch.testing.assert_close(rows.float(), wanted, rtol=bound, atol=bound)


def test_rows_go_home_to_the_windows_of_their_origins(device: torch.device) -> None:
    torch.manual_seed(12)
    weights = slabs(SHAPE, torch.float32, device)
    offsets, routes = [0, 5, 5, 9, 9, 9, 12], 8
    tiles = row_tiles(offsets, SMALL.rows, 3, device)
    slots = torch.tensor([7, 0, 3, 2, 5, 1], dtype=torch.int32, device=device)
    acts = torch.randn(12, SHAPE.ffn, device=device)
    source = torch.randperm(2 * routes, device=device)[:12].to(torch.int32)
    windows = [torch.full((4 + routes, SHAPE.hidden), float("nan"), device=device) for _ in range(2)]
    addresses = torch.tensor([window.data_ptr() for window in windows], device=device)
    home = Home(source, addresses, routes, 4 * SHAPE.hidden * 4)
    out, descriptor = torch.zeros(12, SHAPE.hidden, device=device), down_descriptor(weights.down, SMALL)
    down_product(acts, tiles, slots, descriptor, None, None, SMALL, out, home)
    wanted = grouped_down(acts, torch.tensor(offsets), slots, weights.down, None, None)
    places = torch.stack(windows)[:, 4:].reshape(2 * routes, SHAPE.hidden)
    torch.testing.assert_close(places[source.long()], wanted, rtol=1e-5, atol=1e-5)
    assert int(places.isnan().any(1).sum()) == 2 * routes - 12
    assert not out.any()


@pytest.mark.parametrize("kind", ROUTINGS)
def test_a_whole_layer_equals_its_twin(kind: str, device: torch.device) -> None:
    torch.manual_seed(2)
    weights = slabs(SHAPE, torch.float32, device, biases=True, activation=GPT_OSS)
    ids = routing(kind, 11, SHAPE, device)
    tiling = GroupedTiles(Tile(16, 32, 16, 4, 2), Tile(16, 32, 16, 4, 2, copied_rows=True))
    assert relative_error(SHAPE, weights, ids, tiling=tiling) < FP32


def test_the_portable_tiles_equal_the_twin_and_one_token_takes_its_own_kernel(device: torch.device) -> None:
    torch.manual_seed(3)
    weights = slabs(SHAPE, torch.float32, device)
    assert relative_error(SHAPE, weights, routing("random", 5, SHAPE, device)) < FP32
    gemv = GemvTile(pairs=4, depth=32, warps=4, rows=16, down_depth=32, down_warps=4)
    workspace = Workspace(SHAPE, 4, torch.float32, device)
    workspace.ensure(gemv)
    for kind in ("random", "holes"):
        ids = routing(kind, 1, SHAPE, device)
        assert relative_error(SHAPE, weights, ids, tiling=gemv, workspace=workspace) < FP32


def test_no_tokens_launch_nothing_and_too_many_are_refused(device: torch.device) -> None:
    weights = slabs(SHAPE, torch.float32, device)
    assert relative_error(SHAPE, weights, routing("random", 0, SHAPE, device)) == 0.0
    layer = FusedLayer(weights, Workspace(SHAPE, 2, torch.float32, device))
    hidden, ids = torch.zeros(3, SHAPE.hidden, device=device), routing("random", 3, SHAPE, device)
    with pytest.raises(ConfigError, match="at most 2 tokens here, found 3"):
        layer(hidden, ids, torch.zeros(3, 3, device=device), torch.zeros(6, dtype=torch.int32, device=device), hidden)


def test_compiling_beforehand_leaves_a_layer_that_computes(device: torch.device) -> None:
    torch.manual_seed(10)
    weights, workspace = slabs(SHAPE, torch.float32, device), Workspace(SHAPE, 4, torch.float32, device)
    FusedLayer(weights, workspace).compile()
    assert relative_error(SHAPE, weights, routing("random", 4, SHAPE, device), workspace=workspace) < FP32


def test_ids_of_another_shape_are_refused(device: torch.device) -> None:
    layer = FusedLayer(slabs(SHAPE, torch.float32, device), Workspace(SHAPE, 2, torch.float32, device))
    hidden, ids = torch.zeros(2, SHAPE.hidden, device=device), torch.zeros(2, 2, dtype=torch.int32, device=device)
    with pytest.raises(ConfigError, match=r"ids must be \[2, 3\] for these rows and this workspace, found \[2, 2\]"):
        layer(hidden, ids, torch.zeros(2, 2, device=device), torch.zeros(6, dtype=torch.int32, device=device), hidden)


def test_rows_that_are_no_whole_copy_units_are_refused(device: torch.device) -> None:
    with pytest.raises(ConfigError, match=r"ffn must be a multiple of 4 for kernels in torch\.float32, found 42"):
        Workspace(LayerShape(4, 2, 64, 42), 2, torch.float32, device)


# -- On a GPU: bf16, full ranges


QWEN = LayerShape(128, 8, 2048, 768)
MIXTRAL_NARROW = LayerShape(8, 2, 4096, 4608)  # wide enough for the other column of the table, quick to make
SHAPES = {
    "qwen": QWEN,
    "mixtral": MIXTRAL_NARROW,
    "odd": LayerShape(60, 4, 2048, 1408),
    "few": LayerShape(4, 2, 264, 136),
    "many": LayerShape(512, 10, 512, 256),
    "gpt_oss": LayerShape(32, 4, 2880, 2880),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ROUTINGS)
def test_every_size_and_routing_equals_the_twin_on_a_gpu(kind: str, name: str) -> None:
    torch.manual_seed(4)
    shape, device = SHAPES[name], torch.device("cuda")
    activation = GPT_OSS if name == "gpt_oss" else SwiGLU()
    weights = slabs(shape, torch.bfloat16, device, biases=name == "gpt_oss", activation=activation)
    workspace = Workspace(shape, 4096, torch.bfloat16, device)
    for tokens in (0, 1, 2, 7, 8, 9, 16, 17, 37, 64, 200, 777, 1024, 4096):
        ids = routing(kind, tokens, shape, device)
        error = relative_error(shape, weights, ids, workspace=workspace)
        assert error < BF16, (tokens, error)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen", "mixtral"])
def test_16384_tokens_equal_the_twin_on_a_gpu(name: str) -> None:
    torch.manual_seed(5)
    shape, device = SHAPES[name], torch.device("cuda")
    weights = slabs(shape, torch.bfloat16, device)
    workspace = Workspace(shape, 16384, torch.bfloat16, device)
    for kind in ("random", "zipf", "one_hot"):
        assert relative_error(shape, weights, routing(kind, 16384, shape, device), workspace=workspace) < BF16


@pytest.mark.gpu
@pytest.mark.parametrize("gates", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("top_k", [1, 8])
def test_one_expert_per_token_and_gates_of_every_dtype_on_a_gpu(top_k: int, gates: torch.dtype) -> None:
    torch.manual_seed(11)
    shape, device = LayerShape(128, top_k, 2048, 768), torch.device("cuda")
    weights = slabs(shape, torch.bfloat16, device)
    for tokens in (1, 3, 8, 16, 300):
        error = relative_error(shape, weights, routing("random", tokens, shape, device), gates=gates)
        assert error < (BF16 if gates is torch.float32 else 2 * BF16), tokens  # the product is rounded to 8 bits too


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_take_portable_tiles_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    shape, device = SHAPES["odd"], torch.device("cuda")
    weights = slabs(shape, dtype, device)
    for tokens in (1, 37, 500):  # fp32 products are tf32's there
        assert relative_error(shape, weights, routing("random", tokens, shape, device)) < TF32


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 16, 64, 256])
def test_a_captured_layer_follows_other_routes_gates_and_slots(tokens: int) -> None:
    torch.manual_seed(7)
    device = torch.device("cuda")
    weights = slabs(QWEN, torch.bfloat16, device)
    workspace = Workspace(QWEN, tokens, torch.bfloat16, device)
    layer = FusedLayer(weights, workspace)
    hidden = torch.randn(tokens, 2048, device=device).to(torch.bfloat16)
    ids, gates = routing("random", tokens, QWEN, device), torch.rand(tokens, 8, device=device)
    slots, out = torch.arange(128, device=device, dtype=torch.int32), torch.empty_like(hidden)
    layer(hidden, ids, gates, slots, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(hidden, ids, gates, slots, out)
    for kind in (*ROUTINGS, "random"):
        hidden.copy_(torch.randn_like(hidden))
        ids.copy_(routing(kind, tokens, QWEN, device))
        gates.copy_(torch.rand_like(gates))
        slots.copy_(torch.randperm(130, device=device)[:128])
        out.fill_(float("nan"))
        graph.replay()
        wanted = routed_layer(hidden, ids, gates, slots, weights.gate_up, weights.down, None, None, weights.activation)
        assert float((out.float() - wanted).norm() / wanted.norm()) < BF16, kind
        first = out.clone()
        graph.replay()
        assert torch.equal(first, out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen", torch.bfloat16), ("mixtral", torch.bfloat16), ("qwen", torch.float16)]
)
def test_in_batch_invariant_mode_a_row_has_the_same_bits_in_every_batch_and_placement(
    name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(8)
    shape, device = SHAPES[name], torch.device("cuda")
    weights = slabs(shape, dtype, device, spare=0)
    total = 4096
    hidden = torch.randn(total, shape.hidden, device=device).to(dtype)
    ids, gates = routing("zipf", total, shape, device), torch.rand(total, shape.top_k, device=device)

    def run(chosen: torch.Tensor, slots: torch.Tensor, slab_order: torch.Tensor) -> torch.Tensor:
        moved = type(weights)(
            weights.gate_up[slab_order].contiguous(), weights.down[slab_order].contiguous(), None, None, SwiGLU()
        )
        layer = FusedLayer(moved, Workspace(shape, total, dtype, device), batch_invariant=True)
        out = torch.full((len(chosen), shape.hidden), float("nan"), device=device, dtype=dtype)
        layer(hidden[chosen].contiguous(), ids[chosen].contiguous(), gates[chosen].contiguous(), slots, out)
        return out

    plain = torch.arange(shape.num_experts, device=device)
    everything = run(torch.arange(total, device=device), plain.int(), plain)
    order = torch.randperm(shape.num_experts, device=device)
    inverse = torch.argsort(order)  # expert e lies in the slot that `order` filled with it
    for count in (1, 3, 16, 17, 64, 333, 1024):
        chosen = torch.randperm(total, device=device)[:count]
        assert torch.equal(run(chosen, plain.int(), plain), everything[chosen]), count
        assert torch.equal(run(chosen, inverse.int(), order), everything[chosen]), count
