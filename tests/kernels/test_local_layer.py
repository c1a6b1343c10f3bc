"""A layer that one device computes alone equals the layer by handles, under the same placement and beside the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ray_moe.comm.join import transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.layer import ExpertLayer, Invocation, LayerCounters
from ray_moe.dataplane.layer_weights import LayerWeights
from ray_moe.dataplane.local import LocalLayer, Workspaces, slot_table
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.plan import SlotMap
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.route_counts import RouteCounts
from ray_moe.dataplane.runners import runner_named
from ray_moe.dataplane.strategies import strategy_named
from ray_moe.errors import RoutesError
from ray_moe.identity import GlobalRank
from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace
from ray_moe.kernels.tiling import LayerShape
from ray_moe.routes import Routes
from tests.layers import ONE_PEER, Experts, header_of, placement, random_routes

EXPERTS, TOP_K, HIDDEN, FFN = 5, 2, 48, 24
SHAPE = LayerShape(EXPERTS, TOP_K, HIDDEN, FFN)
# Two replicas of expert 1; pool slots run against manifest order.
HOMES = [(0, 0), (1, 0), (2, 0), (1, 0), (3, 0), (4, 0)]


@pytest.fixture
def group() -> Iterator[SoloGroup]:
    group = SoloGroup(ONE_PEER, GlobalRank(0))
    yield group
    group.close()


def local_layer(
    group: SoloGroup, homes: list[tuple[int, int]], device: torch.device, dtype: torch.dtype, *, generation: int = 1
) -> ExpertLayer:
    snapshot = placement(homes, ONE_PEER, generation=generation)
    slots = SlotMap.compile(snapshot, snapshot.layers[0], GlobalRank(0), device)
    experts = Experts.random(EXPERTS, HIDDEN, FFN, bias=True, dtype=dtype)
    weights = experts.slabs(slots, snapshot, 0)
    moved = {name: getattr(weights, name).to(device) for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
    weights = replace(weights, **moved, form=SwiGLU())
    slabs = Slabs(**moved, activation=SwiGLU())
    abi = HandleABI(payload_dtype=str(dtype).removeprefix("torch."), return_dtype=str(dtype).removeprefix("torch."))
    header = header_of(snapshot, 0, abi)
    fused = FusedLayer(slabs, Workspace(SHAPE, 16, dtype, device))
    path = Path(transport_named("all_to_all_v", group), runner_named("grouped"), strategy_named("bulk"))
    counts = RouteCounts([0], EXPERTS, device=device)
    return ExpertLayer(
        header, slots, weights, path, policy_named("token_hash"), LayerCounters(), route_counts=counts,
        local=LocalLayer(fused, slot_table(slots)),
    )  # fmt: skip


def unit(seed: int, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, Routes]:
    torch.manual_seed(seed)
    routes = random_routes(seed, tokens, TOP_K, EXPERTS)
    hidden = torch.randn(tokens, HIDDEN).to(device, dtype)
    return hidden, Routes(routes.topk_ids.to(device), routes.topk_weights.to(device))


def test_what_a_device_computes_alone_equals_the_path_of_handles(group: SoloGroup, device: torch.device) -> None:
    layer = local_layer(group, HOMES, device, torch.float32)
    for tokens in (0, 1, 9):
        hidden, routes = unit(tokens, tokens, device, torch.float32)
        alone = layer.forward(hidden, routes, Invocation(tokens, "prefill"))
        by_handles = layer.forward(hidden, routes, Invocation(tokens, "prefill", audit=True))
        torch.testing.assert_close(alone, by_handles, rtol=1e-5, atol=1e-5)
    counters = layer.counters
    assert (counters.invocations, counters.local, counters.audited) == (6, 3, 3)
    assert counters.rows_local == 2 * (0 + 1 + 9) * TOP_K


def test_generations_of_one_pool_take_turns_and_each_reads_its_own_slots(
    group: SoloGroup, device: torch.device
) -> None:
    first = local_layer(group, HOMES, device, torch.float32)
    assert first.local is not None
    # A slot is filled beside the serving ones, and the next generation's expert 3 is served from there.
    spare = int(first.weights.down.shape[0]) - 1
    for slab in (first.weights.gate_up, first.weights.down, first.weights.gate_up_bias, first.weights.down_bias):
        assert slab is not None
        slab[spare] = 2.0 * slab[int(first.local.slots_E[3])]
    slots_E = first.local.slots_E.clone()
    slots_E[3] = spare
    later = LocalLayer(first.local.fused, slots_E)
    hidden, routes = unit(3, 7, device, torch.float32)
    before, after = first.local.run(hidden, routes), later.run(hidden, routes)
    chosen_T = (routes.topk_ids == 3).any(1)
    assert 0 < int(chosen_T.sum()) < 7
    assert torch.equal(before[~chosen_T], after[~chosen_T])
    assert not torch.isclose(before[chosen_T], after[chosen_T]).all(1).any()
    assert torch.equal(first.local.run(hidden, routes), before)


def test_units_that_do_not_fit_the_buffers_go_by_handles(group: SoloGroup, device: torch.device) -> None:
    layer = local_layer(group, HOMES, device, torch.float32)
    hidden, routes = unit(4, 17, device, torch.float32)
    layer.forward(hidden, routes, Invocation(0, "prefill"))
    assert (layer.counters.invocations, layer.counters.local) == (1, 0)


def test_demand_is_counted_once_and_a_shadow_is_none(group: SoloGroup, device: torch.device) -> None:
    layer = local_layer(group, HOMES, device, torch.float32)
    hidden, routes = unit(5, 6, device, torch.float32)
    assert layer.route_counts is not None
    layer.route_counts.begin(0)
    layer.forward(hidden, routes, Invocation(0, "decode"))
    layer.forward(hidden, routes, Invocation(0, "decode", shadow=True))
    reports = [*layer.route_counts.harvest(rank=0, generation=1, epoch=0, last_step=0), *layer.route_counts.flush()]
    assert sum(int(report.phase_counts_PLE.sum()) for report in reports) == 6 * TOP_K


def test_rows_that_do_not_fit_the_routes_are_refused(group: SoloGroup, device: torch.device) -> None:
    layer = local_layer(group, HOMES, device, torch.float32)
    hidden, routes = unit(6, 4, device, torch.float32)
    with pytest.raises(RoutesError, match=r"hidden must be \[4, 48\] in torch\.float32, found \[3, 48\]"):
        layer.forward(hidden[:3], routes, Invocation(0, "prefill"))


def test_a_cpu_and_several_peers_have_no_such_layer() -> None:
    for homes, peers in ((HOMES, 1), ([(0, 0), (1, 1)], 2)):
        spec = ONE_PEER if peers == 1 else replace(ONE_PEER, peers=(GlobalRank(0), GlobalRank(1)))
        snapshot = placement(homes, spec)
        slots = SlotMap.compile(snapshot, snapshot.layers[0], GlobalRank(0), torch.device("cpu"))
        weights = Experts.random(EXPERTS, HIDDEN, FFN).slabs(slots, snapshot, 0)
        assert Workspaces(8).layer(slots, replace(weights, form=SwiGLU()), TOP_K, HandleABI()) is None


@pytest.mark.gpu
def test_a_gpu_computes_alone_what_it_computes_by_handles(group: SoloGroup) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    layer = local_layer(group, HOMES, device, dtype)
    for tokens in (0, 1, 5, 16):
        hidden, routes = unit(tokens, tokens, device, dtype)
        alone = layer.forward(hidden, routes, Invocation(tokens, "prefill"))
        by_handles = layer.forward(hidden, routes, Invocation(tokens, "prefill", audit=True))
        # The path of handles rounds to bf16 after each product, so single elements that cancel may differ by more.
        assert float((alone - by_handles).float().norm()) <= 1e-2 * float(by_handles.float().norm())
    assert layer.counters.local == 4


@pytest.mark.gpu
def test_workspaces_choose_the_layer_on_a_gpu_and_say_no_otherwise() -> None:
    device = torch.device("cuda")
    snapshot = placement(HOMES, ONE_PEER)
    slots = SlotMap.compile(snapshot, snapshot.layers[0], GlobalRank(0), device)

    def weights(dtype: torch.dtype, hidden: int = HIDDEN) -> LayerWeights:
        made = Experts.random(EXPERTS, hidden, FFN, dtype=dtype).slabs(slots, snapshot, 0)
        return replace(made, gate_up=made.gate_up.to(device), down=made.down.to(device), form=SwiGLU())

    half = HandleABI(payload_dtype="bfloat16", return_dtype="bfloat16")
    spaces = Workspaces(8)
    assert spaces.layer(slots, weights(torch.bfloat16), TOP_K, half) is not None
    refused = [
        (weights(torch.float32), HandleABI()),  # tensor cores would round to TF32
        (weights(torch.bfloat16, hidden=44), half),  # rows of 88 bytes
        (replace(weights(torch.bfloat16), form=None), half),
        (weights(torch.bfloat16), replace(half, gate_location="expert")),
        (weights(torch.bfloat16), replace(half, payload_format="fp8_row")),
    ]
    for made, abi in refused:
        assert spaces.layer(slots, made, TOP_K, abi) is None
