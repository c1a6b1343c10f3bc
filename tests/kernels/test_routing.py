"""Routing maps: expert-major, stable, complete, and the same from one launch and from three."""

from __future__ import annotations

import pytest
import torch

from ray_moe.errors import ConfigError
from ray_moe.kernels import routing
from ray_moe.kernels.reference_grouped import route_maps, row_tiles
from ray_moe.kernels.regions import most_tiles
from ray_moe.kernels.routing import RouteMaps, RowTiles, route


def check(ids: torch.Tensor, experts: int, block_rows: int) -> None:
    maps = RouteMaps.allocate(ids.numel(), experts, block_rows, ids.device)
    for ints in (maps.source_N, maps.position_N, maps.offsets_E1):
        ints.fill_(-7)
    route(ids, experts, maps)
    source, position, offsets = route_maps(ids.long(), experts)
    assert torch.equal(maps.source_N[: len(source)].long(), source)
    assert torch.equal(maps.position_N[: ids.numel()].long(), position)
    assert torch.equal(maps.offsets_E1.long(), offsets)
    check_tiles(maps.tiles, offsets, block_rows)


def check_tiles(tiles: RowTiles, offsets: torch.Tensor, block_rows: int) -> None:
    wanted = row_tiles(offsets, block_rows)
    count = int(tiles.count_1)
    assert count == len(wanted) <= len(tiles.segment_M)
    found = zip(
        tiles.segment_M[:count].tolist(), tiles.row_M[:count].tolist(), tiles.end_M[:count].tolist(), strict=True
    )
    assert list(found) == wanted


def test_the_worked_example_of_routing(device: torch.device) -> None:
    maps = RouteMaps.allocate(5, 3, 2, device)
    route(torch.tensor([2, 0, -1, 2, 2], device=device), 3, maps)
    assert maps.source_N[:4].tolist() == [1, 0, 3, 4]
    assert maps.position_N.tolist() == [1, 0, -1, 2, 3]
    assert maps.offsets_E1.tolist() == [0, 1, 1, 4]
    tiles = maps.tiles
    assert list(zip(tiles.segment_M.tolist(), tiles.row_M.tolist(), tiles.end_M.tolist(), strict=True))[:3] == [
        (0, 0, 1),
        (2, 1, 4),
        (2, 3, 4),
    ]


def test_the_worked_example_of_tiles() -> None:
    assert row_tiles(torch.tensor([0, 3, 3, 4]), 2) == [(0, 0, 3), (0, 2, 3), (2, 3, 4)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("routes", "experts", "block_rows"), [(1, 4, 16), (24, 5, 2), (300, 60, 128), (129, 40, 16)])
def test_one_launch_makes_the_twins_maps(
    routes: int, experts: int, block_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(routes)
    check(torch.randint(-1, experts + 1, (routes,), device=device, dtype=dtype), experts, block_rows)


@pytest.mark.parametrize(("routes", "experts", "block_rows"), [(300, 5, 16), (513, 33, 128), (128, 4, 2)])
def test_three_launches_make_the_twins_maps(
    routes: int, experts: int, block_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(routes)
    monkeypatch.setattr(routing, "SMALL_ROUTES", 0)
    check(torch.randint(-1, experts + 1, (routes,), device=device, dtype=torch.int32), experts, block_rows)


@pytest.mark.parametrize("small_routes", [0, 2048])
def test_all_routes_to_one_expert_are_its_rows_in_order(
    small_routes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "SMALL_ROUTES", small_routes)
    check(torch.full((200,), 3, dtype=torch.int32, device=device), 6, 16)
    check(torch.full((200,), -1, dtype=torch.int32, device=device), 6, 16)


def test_no_routes_make_no_tiles(device: torch.device) -> None:
    maps = RouteMaps.allocate(8, 4, 16, device)
    route(torch.zeros(8, dtype=torch.int32, device=device), 4, maps)
    route(torch.zeros(0, dtype=torch.int32, device=device), 4, maps)
    assert int(maps.tiles.count_1) == 0
    assert maps.offsets_E1.tolist() == [0] * 5


def test_the_most_tiles_hold_any_spread_of_rows() -> None:
    assert most_tiles(5, 2, 2) == 3  # 1 and 4 rows
    for rows in range(12):
        for first in range(rows + 1):
            assert -(-first // 4) - (-(rows - first) // 4) <= most_tiles(rows, 2, 4)


def test_a_tile_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_rows must be at least 1, found 0"):
        RowTiles.allocate(4, 2, 0, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [4, 60, 128, 256, 512])
@pytest.mark.parametrize("routes", [1, 2048, 2049, 131072])
def test_maps_of_every_size_are_the_twins_on_a_gpu(routes: int, experts: int) -> None:
    torch.manual_seed(routes)
    ids = torch.randint(-1, experts, (routes,), device="cuda", dtype=torch.int32)
    check(ids, experts, 128)
    check(torch.where(torch.rand_like(ids, dtype=torch.float32) < 0.9, 1, ids).int(), experts, 16)
