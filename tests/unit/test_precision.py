"""Payload codecs against torch's own FP8 cast, row ledgers, roles, and what is compared before a format is chosen."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.dataplane.precision import (
    FP8,
    DtypeRoles,
    Fp8Block,
    Fp8Row,
    Native,
    PayloadCodec,
    QuantizedRows,
    RunnerRows,
    aligned_rows,
    break_even_width,
    codec_named,
    compare_selection,
    error_report,
    gate_location_named,
    payload_bytes,
    smaller_format,
)
from ray_moe.errors import ConfigError, EvidenceError, HandleError
from ray_moe.evidence import LogicalBytes, RowSlots
from tests.layers import untimed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The divisions and the product round in fp32, each by a last place of an element, which moves by 1 / 28 of it at most.
ROUNDINGS = 1 + 28 * 2**-22


def rows_of(seed: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different magnitudes, and among the elements of a row too."""
    generator = torch.Generator().manual_seed(seed)
    spread_ND = torch.randn(rows, width, generator=generator) * 3 + torch.randn(rows, 1, generator=generator) * 2
    return (torch.randn(rows, width, generator=generator) * spread_ND.clamp(-9, 9).exp2()).to(dtype)


def codecs_of(width: int, block: int) -> tuple[Fp8Block, Fp8Block, Fp8Block]:
    return Fp8Row(width), Fp8Block(width), Fp8Block(width, block)


def blocks_of(rows_ND: Tensor, block: int) -> tuple[Tensor, ...]:
    return rows_ND.float().split(block, dim=1)


def by_torch(rows_ND: Tensor, block: int) -> Tensor:
    """The oracle: each block divided by amax / 448, cast by torch, cast back and multiplied."""
    parts = []
    for part_NG in blocks_of(rows_ND, block):
        amax_N1 = part_NG.abs().amax(dim=1, keepdim=True)
        scale_N1 = torch.where(amax_N1 == 0, torch.ones_like(amax_N1), amax_N1 / 448)
        parts.append((part_NG / scale_N1).to(FP8).float() * scale_N1)
    return torch.cat(parts, dim=1)


rows_and_widths = given(
    st.integers(0, 9999), st.integers(0, 5), st.integers(1, 300), st.integers(1, 300), st.sampled_from(DTYPES)
)


# -- Round trips


@rows_and_widths
@untimed
def test_a_round_trip_gives_what_torchs_own_cast_gives(
    seed: int, rows: int, width: int, block: int, dtype: torch.dtype
) -> None:
    rows_ND = rows_of(seed, rows, width, dtype)
    for codec in codecs_of(width, block):
        wire_NW = codec.encode(rows_ND)
        assert (wire_NW.dtype, tuple(wire_NW.shape)) == (torch.uint8, (rows, codec.wire_width))
        assert torch.equal(codec.decode(wire_NW, torch.float32), by_torch(rows_ND, codec.block))
        assert torch.equal(codec.decode(wire_NW, dtype), by_torch(rows_ND, codec.block).to(dtype))


@rows_and_widths
@untimed
def test_an_element_moves_by_half_a_last_place_of_fp8(
    seed: int, rows: int, width: int, block: int, dtype: torch.dtype
) -> None:
    # e4m3 keeps three mantissa bits: half a last place of y = x / scale is at most |y| / 16. Below 2^-6 its numbers are
    # 2^-9 apart, so y moves by up to 2^-10. No |y| is above 448, and half a last place is at most 16 there: amax / 28.
    rows_ND = rows_of(seed, rows, width, dtype)
    for codec in codecs_of(width, block):
        back_ND = codec.decode(codec.encode(rows_ND), torch.float32)
        for part_NG, back_NG in zip(blocks_of(rows_ND, codec.block), blocks_of(back_ND, codec.block), strict=True):
            amax_N1 = part_NG.abs().amax(dim=1, keepdim=True)
            moved_NG = (back_NG - part_NG).abs()
            assert (moved_NG <= torch.maximum(part_NG.abs() / 16, amax_N1 / 448 / 1024) * ROUNDINGS).all()
            assert (moved_NG <= amax_N1 / 28 * ROUNDINGS).all()


@rows_and_widths
@untimed
def test_permuting_wire_rows_permutes_rows_and_nothing_else(
    seed: int, rows: int, width: int, block: int, dtype: torch.dtype
) -> None:
    rows_ND = rows_of(seed, rows, width, dtype)
    order_N = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    for codec in (Native(width, dtype), *codecs_of(width, block)):
        wire_NW = codec.encode(rows_ND)
        assert torch.equal(codec.encode(rows_ND[order_N]), wire_NW[order_N])
        assert torch.equal(codec.decode(wire_NW[order_N], dtype), codec.decode(wire_NW, dtype)[order_N])
    quantized = QuantizedRows.of(rows_ND, block)
    assert torch.equal(quantized.permuted(order_N).pack(), quantized.pack()[order_N])


@rows_and_widths
@untimed
def test_a_split_of_wire_rows_decodes_to_the_split_of_rows(
    seed: int, rows: int, width: int, block: int, dtype: torch.dtype
) -> None:
    rows_ND, cut = rows_of(seed, rows, width, dtype), rows // 2
    for codec in (Native(width, dtype), *codecs_of(width, block)):
        wire_NW = codec.encode(rows_ND)
        parts = [codec.decode(part, dtype) for part in (wire_NW[:cut], wire_NW[cut:])]
        assert torch.equal(torch.cat(parts), codec.decode(wire_NW, dtype))


@pytest.mark.parametrize("width", [1, 3, 127, 128, 129, 256, 300])
def test_packed_rows_unpack_to_the_same_data_and_scales(width: int) -> None:
    quantized = QuantizedRows.of(rows_of(width, 4, width), 128)
    again = QuantizedRows.unpack(quantized.pack(), width, 128)
    assert torch.equal(again.data_ND.view(torch.uint8), quantized.data_ND.view(torch.uint8))
    assert torch.equal(again.scales_NB, quantized.scales_NB)


@pytest.mark.parametrize("width", [1, 100, 128])
def test_up_to_a_blocks_width_both_fp8_codecs_send_the_same_bytes_and_beyond_it_they_do_not(width: int) -> None:
    rows_ND = rows_of(width, 4, width)
    assert torch.equal(Fp8Row(width).encode(rows_ND), Fp8Block(width).encode(rows_ND))
    wider = rows_of(width, 4, width + 128)
    assert Fp8Row(width + 128).encode(wider).shape != Fp8Block(width + 128).encode(wider).shape


def test_a_block_confines_the_damage_of_a_large_element_that_a_row_does_not() -> None:
    rows_ND = torch.full((1, 256), 2.0**-9)
    rows_ND[0, 0] = 448.0
    by_row, by_block = (
        codec.decode(codec.encode(rows_ND), torch.float32) for codec in (Fp8Row(256), Fp8Block(256, 128))
    )
    assert by_row[0, 255] == by_block[0, 255] == 2.0**-9
    small = rows_ND.clone()
    small[0, 1:] = 2.0**-11
    by_row, by_block = (codec.decode(codec.encode(small), torch.float32) for codec in (Fp8Row(256), Fp8Block(256)))
    assert by_row[0, 255] == 0
    assert by_block[0, 127] == 0 and by_block[0, 128] == 2.0**-11


def test_native_rows_are_neither_copied_nor_converted() -> None:
    rows_ND = rows_of(0, 3, 8, torch.bfloat16)
    codec = codec_named("native", 8, torch.bfloat16)
    assert codec.encode(rows_ND) is rows_ND
    assert codec.decode(rows_ND, torch.bfloat16) is rows_ND
    assert (codec.wire_dtype, codec.wire_width, codec.row_bytes) == (torch.bfloat16, 8, 16)


def test_all_256_patterns_dequantize_as_torch_converts_them() -> None:
    data_ND = torch.arange(256, dtype=torch.uint8).view(16, 16).view(FP8)
    rows_ND = QuantizedRows(data_ND, torch.ones(16, 1), block=16).dequantized(torch.float32)
    assert torch.equal(rows_ND.nan_to_num(nan=-1e9), data_ND.float().nan_to_num(nan=-1e9))
    # Data whose rows are not contiguous, as a transposition leaves them.
    turned = QuantizedRows(data_ND.view(torch.uint8).T.view(FP8), torch.ones(16, 1), block=16)
    assert torch.equal(turned.dequantized(torch.float32).nan_to_num(nan=-1e9), rows_ND.T.nan_to_num(nan=-1e9))


# -- The edges of a scale


def test_a_block_of_zeros_has_scale_one_and_stays_zero() -> None:
    rows_ND = torch.zeros(2, 130)
    rows_ND[1, 0] = 7.0
    quantized = QuantizedRows.of(rows_ND, 128)
    assert quantized.scales_NB.tolist() == [[1.0, 1.0], [7.0 / 448, 1.0]]
    assert torch.equal(quantized.dequantized(torch.float32), rows_ND)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_an_element_that_is_not_finite_is_nan_throughout_and_its_neighbours_are_not(bad: float) -> None:
    rows_ND = rows_of(1, 3, 256)
    rows_ND[1, 130] = bad
    back_ND = Fp8Block(256).decode(Fp8Block(256).encode(rows_ND), torch.float32)
    assert back_ND[1, 128:].isnan().all()
    back_ND[1, 128:] = 0.0
    expected_ND = by_torch(rows_ND, 128)
    expected_ND[1, 128:] = 0.0
    assert torch.equal(back_ND, expected_ND)


@pytest.mark.parametrize("exponent", [-149, -140, -130, -126, -118, -117, 0, 100, 127])
def test_the_smallest_and_the_largest_rows_neither_overflow_nor_become_nan(exponent: int) -> None:
    rows_ND = torch.tensor([[1.0, -1.5, 0.0]]).double().mul(2.0**exponent).float()
    back_ND = Fp8Row(3).decode(Fp8Row(3).encode(rows_ND), torch.float32)
    # 2^-136 is half a step of the smallest scale, 2^-126.
    assert ((back_ND - rows_ND).abs() <= torch.maximum(rows_ND.abs() / 16, torch.tensor(2.0**-136))).all()


# -- Quantized rows that are held apart


def test_scales_that_are_not_one_for_each_block_of_each_row_are_refused_even_where_they_would_broadcast() -> None:
    data_ND = torch.zeros(3, 130).to(FP8)
    for shape in ((1, 2), (2, 2), (3, 1), (3, 3)):
        with pytest.raises(HandleError, match=r"scale rows must equal payload rows.*\[3, 2\]"):
            QuantizedRows(data_ND, torch.ones(shape), 128)


def test_quantized_rows_of_another_dtype_or_rank_are_refused() -> None:
    with pytest.raises(HandleError, match=r"quantized data must be 2-d torch.float8_e4m3fn, found .* torch.float32"):
        QuantizedRows(torch.zeros(2, 4), torch.ones(2, 1), 4)
    with pytest.raises(HandleError, match=r"quantized scales must be 2-d torch.float32, found .* torch.bfloat16"):
        QuantizedRows(torch.zeros(2, 4).to(FP8), torch.ones(2, 1, dtype=torch.bfloat16), 4)
    with pytest.raises(HandleError, match=r"quantized scales must be 2-d .* found \[2\]"):
        QuantizedRows(torch.zeros(2, 4).to(FP8), torch.ones(2), 4)


@pytest.mark.parametrize("codec", [Native(8, torch.bfloat16), Fp8Row(8), Fp8Block(8, 3)], ids=lambda codec: codec.name)
def test_rows_and_wire_rows_of_another_width_or_dtype_are_refused(codec: PayloadCodec) -> None:
    with pytest.raises(HandleError, match=r"takes rows \[N, 8\].*found \[2, 9\]"):
        codec.encode(torch.zeros(2, 9, dtype=torch.bfloat16))
    wire_NW = codec.encode(torch.zeros(2, 8, dtype=torch.bfloat16))
    with pytest.raises(
        HandleError, match=rf"takes rows \[N, {codec.wire_width}\].*found \[2, {codec.wire_width - 1}\]"
    ):
        codec.decode(wire_NW[:, :-1], torch.float32)
    with pytest.raises(HandleError, match=rf"in {codec.wire_dtype}, found .* in torch.int16"):
        codec.decode(wire_NW.to(torch.int16), torch.float32)


def test_codecs_are_chosen_by_name_and_an_unknown_name_lists_them() -> None:
    for name in ("native", "fp8_row", "fp8_block"):
        codec = codec_named(name, 256, torch.bfloat16)
        assert (codec.name, codec.width) == (name, 256)
    with pytest.raises(ConfigError, match="codec must be one of native, fp8_row, fp8_block, found 'fp4'"):
        codec_named("fp4", 256, torch.bfloat16)
    with pytest.raises(ConfigError, match="width must be >= 1, found 0"):
        codec_named("fp8_row", 0, torch.bfloat16)
    with pytest.raises(ConfigError, match="block must be >= 1, found 0"):
        Fp8Block(8, block=0)


# -- Bytes and rows


@given(st.integers(0, 99), st.integers(1, 9000))
@untimed
def test_payload_is_data_and_scales(rows: int, width: int) -> None:
    slots = RowSlots(rows)
    assert payload_bytes("bf16", slots, width) == LogicalBytes(rows * width * 2)
    assert payload_bytes("fp8_row", slots, width) == LogicalBytes(rows * width + rows * 4)
    assert payload_bytes("fp8_block", slots, width) == LogicalBytes(
        rows * width + rows * (width // 128 + (width % 128 > 0)) * 4
    )
    sizes = {name: int(payload_bytes(name, slots, width)) for name in ("bf16", "fp8_row", "fp8_block")}
    assert sizes[smaller_format(slots, width)] == min(sizes.values())


@pytest.mark.parametrize("name", ["native", "fp8_row", "fp8_block"])
@pytest.mark.parametrize("width", [1, 5, 129])
def test_a_codecs_payload_is_the_size_of_what_it_sends(name: str, width: int) -> None:
    codec = codec_named(name, width, torch.bfloat16)
    wire_NW = codec.encode(rows_of(0, 3, width, torch.bfloat16))
    assert codec.payload(RowSlots(3)) == LogicalBytes(wire_NW.numel() * wire_NW.element_size())


def test_payload_is_counted_from_rows_of_routes_alone() -> None:
    with pytest.raises(EvidenceError, match="payload is counted from routed rows, found RunnerRows"):
        Fp8Row(16).payload(RunnerRows(24))
    bare: Any = 6
    with pytest.raises(EvidenceError, match="payload is counted from routed rows, found int 6"):
        Fp8Row(16).payload(bare)


def test_the_smaller_of_chosen_formats_is_compared_and_equal_ones_stay_exact() -> None:
    rows = RowSlots(6)
    assert smaller_format(rows, 4) == "bf16"
    assert smaller_format(rows, 7168) == "fp8_row"
    assert smaller_format(rows, 7168, ("bf16", "fp8_block")) == "fp8_block"
    with pytest.raises(ConfigError, match="format must be one of bf16, fp8_row, fp8_block, found 'fp32'"):
        smaller_format(rows, 4, ("fp32",))
    with pytest.raises(ConfigError, match="format must be one of fp8_row, fp8_block, found 'bf16'"):
        break_even_width("bf16")


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 16))
@untimed
def test_aligned_segments_cover_their_rows_with_less_than_one_step_of_waste(counts: list[int], alignment: int) -> None:
    aligned = aligned_rows(counts, alignment)
    for rows, executed in zip(counts, aligned.executed_S, strict=True):
        assert int(executed) % alignment == 0
        assert rows <= int(executed) < rows + alignment
    assert aligned.useful + aligned.waste == aligned.executed
    assert (int(aligned.useful), int(aligned.executed)) == (sum(counts), sum(map(int, aligned.executed_S)))


def test_an_alignment_below_one_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="row alignment must be >= 1, found 0"):
        aligned_rows([1], 0)


# -- Roles


def test_roles_follow_from_an_abi_and_a_codec() -> None:
    assert asdict(DtypeRoles.of("bfloat16", "bfloat16", "origin", "native")) == asdict(DtypeRoles())
    quantized = DtypeRoles.of("float32", "bfloat16", "expert", "fp8_block", router_dtype="bfloat16")
    assert asdict(quantized) == {
        "router": "bf16",
        "dispatch": "fp8",
        "scales": "fp32",
        "expert_arithmetic": "backend_owned",
        "returned_row": "bf16",
        "gate": "fp32",
        # Rows that come back weighted are summed as they are.
        "accumulation": "bf16",
    }
    assert DtypeRoles.of("bfloat16", "bfloat16", "origin", "native", gate_dtype="bfloat16").accumulation == "bf16"
    assert DtypeRoles.of("bfloat16", "float16", "origin", "native", gate_dtype="bfloat16").accumulation == "fp32"


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"gate": "fp8"}, "gate must be one of fp32, bf16, fp16, found 'fp8'"),
        ({"returned_row": "float32"}, "returned_row must be one of fp32, bf16, fp16, found 'float32'"),
        ({"accumulation": "backend_owned"}, "accumulation must be one of"),
        ({"dispatch": "fp8"}, "fp8 rows and no others have scales: dispatch 'fp8', scales 'none'"),
        ({"scales": "fp32"}, "fp8 rows and no others have scales: dispatch 'bf16', scales 'fp32'"),
        ({"dispatch": "fp8", "scales": "bf16"}, "scales must be one of none, fp32, found 'bf16'"),
    ],
)
def test_a_representation_that_a_role_does_not_have_is_refused(roles: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DtypeRoles(**roles)


def test_roles_of_an_abi_refuse_unknown_dtypes_codecs_and_gate_locations_by_name() -> None:
    with pytest.raises(ConfigError, match="payload_dtype must be one of float32, bfloat16, float16, found 'int8'"):
        DtypeRoles.of("int8", "bfloat16", "origin", "native")
    with pytest.raises(ConfigError, match="codec must be one of native, fp8_row, fp8_block, found 'fp8'"):
        DtypeRoles.of("bfloat16", "bfloat16", "origin", "fp8")
    with pytest.raises(ConfigError, match="gate_location must be 'origin' or 'expert', found 'input'"):
        DtypeRoles.of("bfloat16", "bfloat16", "input", "native")


def test_the_gate_is_at_the_origin_or_at_the_expert() -> None:
    assert [gate_location_named(name) for name in ("origin", "expert")] == ["origin", "expert"]


# -- Evidence before a change


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_error_report_measures_one_round_trip(dtype: torch.dtype) -> None:
    rows_ND = rows_of(3, 5, 200, dtype)
    for codec in (Fp8Row(200), Fp8Block(200)):
        error_ND = by_torch(rows_ND, codec.block).double() - rows_ND.double()
        report = error_report(rows_ND, codec)
        assert (report.codec, report.rows, report.max_abs) == (codec.name, RowSlots(5), float(error_ND.abs().max()))
        expected = float((error_ND.square().mean() / rows_ND.double().square().mean()).sqrt())
        assert report.relative_rms == pytest.approx(expected, rel=1e-12)  # float64, another order of sums
        assert 0 < report.relative_rms < 1 / 16


def test_rows_that_travel_exactly_have_no_error_nor_have_zeros_nor_no_rows() -> None:
    for rows_ND, codec in (
        (rows_of(0, 2, 8), Native(8, torch.float32)),
        (torch.zeros(2, 8), Fp8Row(8)),
        (torch.zeros(0, 8), Fp8Row(8)),
    ):
        report = error_report(rows_ND, codec)
        assert (report.max_abs, report.relative_rms) == (0.0, 0.0)


def test_selections_are_compared_as_sets() -> None:
    logits_TE = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    # Token 0 has its two experts in the other order, token 1 another second expert, token 2 only ties.
    other_TE = torch.tensor([[2.0, 3.0, 1.0], [3.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    assert compare_selection(logits_TE, other_TE, 2).tolist() == [1]
    assert compare_selection(logits_TE, other_TE, 1).tolist() == [0]
    assert compare_selection(logits_TE, other_TE, 3).tolist() == []
    assert compare_selection(torch.zeros(0, 3), torch.zeros(0, 3), 2).tolist() == []


@given(st.integers(0, 9999), st.integers(0, 8), st.integers(1, 12), st.data())
@untimed
def test_tokens_whose_sets_differ_are_found_whatever_the_order(seed: int, tokens: int, experts: int, data: Any) -> None:
    top_k = data.draw(st.integers(1, experts))
    logits_TE = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    other_TE = logits_TE.bfloat16()

    def selected(row_E: list[float]) -> set[int]:
        return set(sorted(range(experts), key=lambda expert: (-row_E[expert], expert))[:top_k])

    pairs = zip(logits_TE.tolist(), other_TE.tolist(), strict=True)
    differing = [token for token, (mine, theirs) in enumerate(pairs) if selected(mine) != selected(theirs)]
    assert compare_selection(logits_TE, other_TE, top_k).tolist() == differing


def test_of_many_equal_logits_the_lowest_ids_are_selected() -> None:
    # Sorts keep few equal elements in order by chance, and not this many.
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randint(0, 3, (8, 256), generator=generator).float()
    # Strictly lower logits by id, without any tie: the same selection if ties go to the lower id.
    untied_TE = logits_TE - torch.arange(256) / 1024
    assert compare_selection(logits_TE, untied_TE, 100).tolist() == []


def test_logits_of_two_shapes_and_a_top_k_beyond_the_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"both logits must be \[T, E\] of one shape, found \[2, 3\] and \[2, 4\]"):
        compare_selection(torch.zeros(2, 3), torch.zeros(2, 4), 1)
    with pytest.raises(ConfigError, match=r"top_k must be in \[1, 3\], found 4"):
        compare_selection(torch.zeros(2, 3), torch.zeros(2, 3), 4)
