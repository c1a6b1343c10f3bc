"""The one-sided exchange, its peers in one process: every wait is over before it begins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ray_moe.dataplane.precision import QuantizedRows
from ray_moe.errors import ConfigError
from ray_moe.kernels.reference import weighted_combine
from ray_moe.kernels.reference_grouped import route_maps
from ray_moe.kernels.regions import Part, Regions
from ray_moe.kernels.window import COLLECTS, EPOCH_SHIFT, FAILED, PUSHES, WAITS, collect, push, wait
from ray_moe.kernels.window_partial import sum_partials, unpack
from tests.kernels.windows import HEARD, Peers

E, K, D = 6, 3, 40
EPOCH = 1 << EPOCH_SHIFT


def owners(num_peers: int, replicas: int = 1) -> Tensor:
    """A table [2 + R, E]: expert e has replicas on peers e, e + 1, ... modulo P."""
    table = torch.full((2 + replicas, E), -1, dtype=torch.int32)
    table[0], table[1] = torch.arange(E), replicas
    for replica in range(replicas):
        table[2 + replica] = (torch.arange(E) + replica) % num_peers
    return table


def exchange(
    peers: Peers,
    tokens: list[int],
    part: Part,
    table: Tensor,
    *,
    holes: bool = False,
    home: bool = False,
) -> None:
    """Push, compute and collect of every peer, checked against the sum that each would have by itself."""
    device, dtype = peers.addresses_M.device, peers.regions.dtype
    scale_E = torch.arange(1, E + 1, device=device).to(dtype)
    units = []
    for peer, count in enumerate(tokens):
        hidden = torch.randn(count, D, device=device).to(dtype)
        ids = torch.rand(count, E, device=device).topk(K, dim=1).indices
        if holes:
            ids[torch.rand(ids.shape, device=device) < 0.4] = -1
        gates = torch.rand(count, K, device=device)
        units.append((hidden, ids, gates))
        push(hidden, ids, table, peers.addresses_M, peers.cells[peer], peers.regions, part)
    peers.hear_everybody()
    for peer in range(len(tokens)):
        wait(peers.windows[peer], peers.cells[peer], peers.failures[peer], peers.regions, part)
        peers.compute(peer, part, scale_E, home=home)
    for peer, (hidden, ids, gates) in enumerate(units):
        out = torch.full_like(hidden, float("nan"))
        collect(
            ids, gates, table, peers.windows[peer], peers.addresses_M, peers.cells[peer], peers.failures[peer],
            peers.regions, part, out, pull=not home,
        )  # fmt: skip
        results = hidden[:, None] * scale_E[ids][:, :, None] * (ids >= 0)[:, :, None]
        wanted = weighted_combine(results.reshape(-1, D).to(dtype), gates, K, dtype)
        assert torch.equal(out, wanted), peer


def test_the_worked_example_of_push(device: torch.device) -> None:
    regions = Regions.plan(2, 2, 2, 8, torch.float32)
    peers = Peers.make(2, regions, device)
    table = torch.tensor([[0, 0], [1, 1], [1, 0]], dtype=torch.int32)
    part = Part(1, 0, 2)
    push(torch.ones(1, 8), torch.tensor([[0, 1]]), table, peers.addresses_M, peers.cells[0], regions, part)
    assert [peers.ids(peer, part)[0].tolist() for peer in (0, 1)] == [[-1, 1], [0, -1]]
    assert [peers.rows(peer, part)[0, 0].item() for peer in (0, 1)] == [1.0, 1.0]


@pytest.mark.parametrize("home", [False, True], ids=["pulled", "pushed home"])
@pytest.mark.parametrize("num_peers", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_token_gets_back_the_weighted_sum_of_its_experts(
    num_peers: int, dtype: torch.dtype, home: bool, device: torch.device
) -> None:
    torch.manual_seed(1)
    peers = Peers.make(num_peers, Regions.plan(3, 8, K, D, dtype), device)
    for tokens in ([5, 0, 7], [8, 8, 8], [0, 0, 0], [1, 3, 2]):
        exchange(peers, tokens[:num_peers], Part(8, 0, 3), owners(num_peers), home=home)
    exchange(peers, [4, 4, 4][:num_peers], Part(4, 0, num_peers), owners(num_peers), holes=True, home=home)


@pytest.mark.parametrize("quantized", [False, True], ids=["rows as they are", "fp8 rows"])
def test_owners_sum_what_they_computed_for_a_token_and_one_row_goes_home(quantized: bool, device: torch.device) -> None:
    torch.manual_seed(5)
    width, part, table = 256, Part(6, 0, 2), owners(2, 2)
    regions = Regions.plan(2, 6, K, width, torch.float32, quantized=quantized, partial=True)
    peers, scale_E = Peers.make(2, regions, device), torch.arange(1.0, E + 1)
    units = []
    for peer, tokens in enumerate((5, 6)):
        hidden, gates = torch.randn(tokens, width), torch.rand(tokens, K)
        ids = torch.rand(tokens, E).topk(K, dim=1).indices
        ids[torch.rand(ids.shape) < 0.3] = -1
        units.append((hidden, ids, gates))
        push(hidden, ids, table, peers.addresses_M, peers.cells[peer], regions, part, gates)
    peers.hear_everybody()
    for peer in range(2):
        wait(peers.windows[peer], peers.cells[peer], peers.failures[peer], regions, part)
        ids_TK = peers.ids(peer, part)
        gates_TK = regions.view(peers.windows[peer], regions.gates, torch.float32, 12, K)
        rows_TD = torch.full((12, width), float("nan"))
        if quantized:
            data = regions.view(peers.windows[peer], regions.rows, torch.float8_e4m3fn, 12, width)
            unpack(data, regions.view(peers.windows[peer], regions.scales, torch.float32, 12, 2), ids_TK, rows_TD)
        else:
            rows_TD = peers.rows(peer, part)
        ids_N = ids_TK.reshape(-1).long()
        source, position_N, _ = route_maps(ids_N, E)
        results = rows_TD[source.long() // K] * scale_E[ids_N[source.long()]][:, None]
        sum_partials(results, position_N.int(), ids_TK, gates_TK, peers.addresses_M, peers.cells[peer], regions, part)
    for peer, (hidden, ids, gates) in enumerate(units):
        out = torch.full_like(hidden, float("nan"))
        collect(
            ids, gates, table, peers.windows[peer], peers.addresses_M, peers.cells[peer], peers.failures[peer], regions,
            part, out,
        )  # fmt: skip
        sent = QuantizedRows.of(hidden, 128).dequantized(torch.float32) if quantized else hidden
        wanted = sent * (gates * scale_E[ids] * (ids >= 0)).sum(1, keepdim=True)
        # The rounding to FP8, one instruction on a GPU, is approximate in the interpreter.
        assert float((out - wanted).norm() / wanted.norm()) < (0.1 if quantized else 1e-6)


def test_the_worked_examples_of_partial_sums(device: torch.device) -> None:
    row = torch.full((1, 128), float("nan"))
    unpack(torch.full((1, 128), 2.0).to(torch.float8_e4m3fn), torch.tensor([[0.5]]), torch.tensor([[-1, 3]]), row)
    assert row.unique().tolist() == [1.0]
    regions = Regions.plan(1, 1, 2, 4, torch.float32, partial=True)
    peers, results = Peers.make(1, regions, device), torch.tensor([[3.0], [5.0]]).expand(2, 4).contiguous()
    positions, ids = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    gates, part = torch.tensor([[1.0, 2.0]]), Part(1, 0, 1)
    sum_partials(results, positions, ids, gates, peers.addresses_M, peers.cells[0], regions, part)
    assert regions.view(peers.windows[0], regions.results, torch.float32, 4).tolist() == [13.0] * 4


def test_a_part_of_a_unit_has_token_slots_of_its_own(device: torch.device) -> None:
    torch.manual_seed(2)
    peers = Peers.make(2, Regions.plan(2, 8, K, D, torch.float32), device)
    for first, home in ((0, False), (8, True), (4, False)):
        exchange(peers, [3, 4], Part(4, first, 2), owners(2), home=home)
    assert [peers.cells[0][word.value].item() - EPOCH for word in (PUSHES, WAITS, COLLECTS)] == [3, 3, 3]


def test_replicas_are_chosen_as_the_token_hash_policy_chooses_them(device: torch.device) -> None:
    from ray_moe.dataplane.policies import _hash

    torch.manual_seed(4)
    peers, table, part = Peers.make(3, Regions.plan(3, 16, K, D, torch.float32), device), owners(3, 2), Part(16, 0, 3)
    exchange(peers, [9, 16, 4], part, table)
    ids = torch.rand(16, E).topk(K, dim=1).indices
    push(torch.randn(16, D), ids, table, peers.addresses_M, peers.cells[2], peers.regions, part)
    replica_TK = (_hash(ids.reshape(-1), 2) % 2).view(16, K)
    owner_TK = (ids + replica_TK) % 3
    for peer in range(3):
        seen = peers.ids(peer, part).view(3, 16, K)[2]
        assert torch.equal(seen.long(), torch.where(owner_TK == peer, ids, -1)), peer


def test_flags_carry_the_epoch_and_only_grow(device: torch.device) -> None:
    regions, part = Regions.plan(2, 4, K, D, torch.float32), Part(4, 0, 2)
    peers = Peers.make(2, regions, device)
    flags = regions.view(peers.windows[1], regions.arrived, torch.int64, 2)
    unit = (torch.randn(2, D), torch.zeros(2, K, dtype=torch.int64), owners(2), peers.addresses_M)
    push(*unit, peers.cells[0], regions, part)
    push(*unit, peers.cells[0], regions, part)
    assert flags.tolist() == [EPOCH + 2, 0]
    flags[0] = HEARD  # a later epoch's
    push(*unit, peers.cells[0], regions, part)
    assert flags[0].item() == HEARD


def test_a_failed_cell_moves_and_tells_nothing(device: torch.device) -> None:
    regions, part = Regions.plan(2, 4, K, D, torch.float32), Part(4, 0, 2)
    peers = Peers.make(2, regions, device)
    peers.cells[0][FAILED.value] = 2
    before = [window.clone() for window in peers.windows]
    ids, out = torch.zeros(2, K, dtype=torch.int64), torch.full((2, D), float("nan"))
    push(torch.randn(2, D), ids, owners(2), peers.addresses_M, peers.cells[0], regions, part)
    collect(
        ids, torch.rand(2, K), owners(2), peers.windows[0], peers.addresses_M, peers.cells[0], peers.failures[0],
        regions, part, out,
    )  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(before, peers.windows, strict=True))
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4, 2, 8), "window max_peers must be at least 1, found 0"),
        ((2, 4, 0, 8), "window top_k must be at least 1, found 0"),
        ((2, 4, 2, 6), r"window rows must be whole 16-byte units, found 6 elements of torch\.float32"),
    ],
)
def test_windows_of_impossible_sizes_are_refused(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Regions.plan(*sizes, torch.float32)
