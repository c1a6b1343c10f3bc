"""The tables of tiles: what every choice must hold, whatever was fastest."""

from __future__ import annotations

import pytest

from ray_moe.kernels.decode_layer import DecodeTile
from ray_moe.kernels.gemv_layer import GemvTile
from ray_moe.kernels.grouped_gemm import Tile
from ray_moe.kernels.regions import ROW_BLOCKS
from ray_moe.kernels.tiling import GroupedTiles, LayerShape, choose, sizes_to_compile, small_tilings
from ray_moe.kernels.warp_gemm import WarpTile

QWEN = LayerShape(num_experts=128, top_k=8, hidden=2048, ffn=768)
MIXTRAL = LayerShape(num_experts=8, top_k=2, hidden=4096, ffn=14336)
ODD = LayerShape(num_experts=4, top_k=2, hidden=264, ffn=136)
MANY = LayerShape(num_experts=512, top_k=22, hidden=512, ffn=256)
SHAPES = [QWEN, MIXTRAL, ODD, MANY]
TOKENS = [1, 2, 8, 9, 16, 17, 64, 300, 1024, 5000, 20000]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("hopper", "invariant"), [(True, False), (True, True), (False, False)])
def test_both_products_take_the_same_row_tiles_and_the_workspace_has_maps_for_them(
    shape: LayerShape, hopper: bool, invariant: bool
) -> None:
    for tokens in TOKENS:
        tiles = choose(tokens, shape, hopper, invariant)
        if isinstance(tiles, GroupedTiles):
            assert tiles.gate_up.rows == tiles.down.rows
            assert tiles.rows in ROW_BLOCKS


def test_one_token_a_few_and_many_are_run_in_their_own_ways() -> None:
    for shape in (QWEN, MIXTRAL):
        assert isinstance(choose(1, shape), GemvTile)
        assert all(isinstance(choose(tokens, shape), DecodeTile) for tokens in (2, 8))
        assert isinstance(choose(9, shape), GroupedTiles)


def test_rows_per_expert_decide_and_not_tokens() -> None:
    half_the_experts = LayerShape(64, 8, QWEN.hidden, QWEN.ffn)
    for tokens in (32, 256, 1000, 4096):
        assert choose(2 * tokens, QWEN) == choose(tokens, half_the_experts)


def test_tiles_of_a_launch_that_is_mostly_padding_are_computed_as_those_of_its_own_rows() -> None:
    for shape in (QWEN, MIXTRAL):
        few = choose(9, shape, batch_invariant=True)
        assert isinstance(few, GroupedTiles)
        for rows_per_expert in (11, 24, 40):
            tiles = choose(rows_per_expert * shape.num_experts // shape.top_k, shape, batch_invariant=True)
            assert isinstance(tiles, GroupedTiles)
            for tile in (tiles.gate_up, tiles.down):
                assert isinstance(tile, Tile)
                assert tile.short_tail
                assert tile.rows // 2 == few.rows
                assert (tile.tail_stages or tile.stages) == 3


@pytest.mark.parametrize("shape", [QWEN, MIXTRAL, MANY])
def test_the_sizes_to_compile_meet_every_choice_of_the_tables(shape: LayerShape) -> None:
    for hopper in (True, False):
        compiled = {choose(tokens, shape, hopper) for tokens in sizes_to_compile(shape, 8192)}
        assert {choose(tokens, shape, hopper) for tokens in range(1, 8193, 3)} <= compiled
    assert sizes_to_compile(shape, 5)[-1] == 5
    assert sizes_to_compile(shape, 1) == [1]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_batch_invariant_tables_hold_only_products_in_ascending_steps(shape: LayerShape) -> None:
    for tokens in TOKENS:
        assert isinstance(choose(tokens, shape, batch_invariant=True), GroupedTiles)


def test_a_kernel_is_given_only_widths_that_it_can_take() -> None:
    assert small_tilings(ODD) == (choose(1, ODD),), "264 columns are no whole blocks of 128"
    assert not any(isinstance(tile, DecodeTile) for tile in small_tilings(MANY)), "176 routes of 8 tokens"
    for tokens in TOKENS[3:]:
        tiles = choose(tokens, ODD)
        assert isinstance(tiles, GroupedTiles)
        assert not isinstance(tiles.down, WarpTile), "136 is no multiple of 64"
    for tile in small_tilings(MIXTRAL):
        if isinstance(tile, DecodeTile):
            assert MIXTRAL.ffn % (128 * tile.parts) == 0
