"""Precision is data plus metadata (specification 0x0A): roles, payload codecs, and what each of them costs.

A codec turns rows into what travels and back. FP8 rows carry their scales inside the row, so one permutation, one split
vector and one handle move both. Letters: N rows, D hidden, B scale blocks of a row, G elements of a block, W wire
width, T tokens, E experts, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from ray_moe.errors import ConfigError, EvidenceError, HandleError
from ray_moe.evidence import LogicalBytes, RowSlots

FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max
_SCALE_BYTES = torch.float32.itemsize
# Below the smallest normal number a scale has too few bits left to be divided by.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny

# -- Roles: one representation for each place where a number is held (0x0AE)

_ROUNDED = ("fp32", "bf16", "fp16")
_REPRESENTATIONS: dict[str, tuple[str, ...]] = {
    "router": _ROUNDED,
    "dispatch": (*_ROUNDED, "fp8"),
    "scales": ("none", "fp32"),
    "expert_arithmetic": (*_ROUNDED, "backend_owned"),
    "returned_row": _ROUNDED,
    "gate": _ROUNDED,
    "accumulation": _ROUNDED,
}
_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def gate_location_named(name: str) -> str:
    """Where the gate is applied: `origin` after the return, `expert` before it. `ConfigError` for any other place."""
    if name not in ("origin", "expert"):
        reason = "the gate follows the expert, which is not linear: E(gx) is not gE(x)"
        raise ConfigError(f"gate_location must be 'origin' or 'expert', found {name!r}; {reason}")
    return name


@dataclass(frozen=True)
class DtypeRoles:
    """The representation of every role in one layer; the defaults are the policy of 0x0AE with a BF16 payload.

    Raises `ConfigError` for a representation that its role does not have, and for FP8 rows without FP32 scales or
    scales without FP8 rows.
    """

    router: str = "fp32"
    dispatch: str = "bf16"
    scales: str = "none"
    expert_arithmetic: str = "backend_owned"
    returned_row: str = "bf16"
    gate: str = "fp32"
    accumulation: str = "fp32"

    def __post_init__(self) -> None:
        for role in (item.name for item in fields(self)):
            _require_name(role, getattr(self, role), _REPRESENTATIONS[role])
        if (self.dispatch == "fp8") != (self.scales == "fp32"):
            raise ConfigError(f"fp8 rows and no others have scales: dispatch {self.dispatch!r}, scales {self.scales!r}")

    @staticmethod
    def of(
        payload_dtype: str,
        return_dtype: str,
        gate_location: str,
        codec: str,
        *,
        router_dtype: str = "float32",
        gate_dtype: str = "float32",
    ) -> DtypeRoles:
        """The roles under a handle ABI and a codec, dtypes by their torch names.

        A gate at the origin is multiplied and summed in the wider dtype of rows and gates, so that is the accumulation;
        rows that were weighted at the expert are summed as they came back.
        """
        payload, returned = _short_name("payload_dtype", payload_dtype), _short_name("return_dtype", return_dtype)
        gate = _short_name("gate_dtype", gate_dtype)
        quantized = _require_name("codec", codec, _CODECS) != Native.name
        widest = returned if returned == gate else "fp32"
        return DtypeRoles(
            router=_short_name("router_dtype", router_dtype),
            dispatch="fp8" if quantized else payload,
            scales="fp32" if quantized else "none",
            returned_row=returned,
            gate=gate,
            accumulation=widest if gate_location_named(gate_location) == "origin" else returned,
        )


def _short_name(role: str, dtype: str) -> str:
    return _SHORT_NAMES[_require_name(role, dtype, _SHORT_NAMES)]


def _require_name(role: str, name: str, names: Collection[str]) -> str:
    if name not in names:
        raise ConfigError(f"{role} must be one of {', '.join(names)}, found {name!r}")
    return name


def _require_positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name} must be >= 1, found {value}")
    return value


# -- Row ledgers: what travels and what a runner executes are counted apart (0x0AD)


class RunnerRows(RowSlots):
    """Rows that a runner executes, fringe included. The fringe never travels: no codec counts a payload of these."""


@dataclass(frozen=True)
class AlignedRows:
    """What a runner executes when every slot's segment is rounded up to whole multiples of its row alignment."""

    useful: RunnerRows
    executed: RunnerRows
    waste: RunnerRows
    executed_S: tuple[RunnerRows, ...]


def aligned_rows(counts_S: Sequence[int], alignment: int) -> AlignedRows:
    """Each slot's rows rounded up: [2, 0, 5] aligned to 4 executes [4, 0, 8]. `ConfigError` for less than one row."""
    _require_positive("row alignment", alignment)
    executed_S = tuple(RunnerRows(-(-rows // alignment) * alignment) for rows in counts_S)
    useful, executed = sum(counts_S), sum(map(int, executed_S))
    return AlignedRows(RunnerRows(useful), RunnerRows(executed), RunnerRows(executed - useful), executed_S)


# -- Codecs: rows to what travels and back (0x0AB)


class PayloadCodec(Protocol):
    """How rows travel. Each row is encoded by itself, so encoding commutes with every permutation and split of rows."""

    name: str
    width: int
    wire_dtype: torch.dtype
    wire_width: int
    row_bytes: int

    def encode(self, rows_ND: Tensor) -> Tensor:
        """Rows [N, D] to wire rows [N, W] in `wire_dtype`. `HandleError` when D is not the codec's width."""

    def decode(self, wire_NW: Tensor, dtype: torch.dtype) -> Tensor:
        """Wire rows [N, W] to rows [N, D] in `dtype`. `HandleError` for another width or dtype than the codec's."""

    def payload(self, rows: RowSlots) -> LogicalBytes:
        """Logical bytes of so many routed rows, scales included. `EvidenceError` for a runner's rows and numbers."""
        if not isinstance(rows, RowSlots) or isinstance(rows, RunnerRows):
            raise EvidenceError(f"payload is counted from routed rows, found {type(rows).__name__} {rows!r}")
        return LogicalBytes(int(rows) * self.row_bytes)


class Native(PayloadCodec):
    """Rows travel as they are: no copy, no conversion."""

    name = "native"

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width = self.wire_width = _require_positive("width", width)
        self.wire_dtype = dtype
        self.row_bytes = width * dtype.itemsize

    def encode(self, rows_ND: Tensor) -> Tensor:
        _require_rows(self.name, rows_ND, self.width, self.wire_dtype)
        return rows_ND

    def decode(self, wire_NW: Tensor, dtype: torch.dtype) -> Tensor:
        _require_rows(self.name, wire_NW, self.width, self.wire_dtype)
        return wire_NW.to(dtype)


class Fp8Block(PayloadCodec):
    """FP8 data with one FP32 scale for every `block` elements of a row; the last block of a row may be shorter.

    One wire row of bytes: [D bytes of data | 4 * B bytes of scales]. Values are those of `QuantizedRows.of`.
    """

    name = "fp8_block"
    wire_dtype = torch.uint8

    def __init__(self, width: int, block: int = 128) -> None:
        self.width, self.block = _require_positive("width", width), _require_positive("block", block)
        self.wire_width = self.row_bytes = width + num_blocks(width, block) * _SCALE_BYTES

    def encode(self, rows_ND: Tensor) -> Tensor:
        _require_rows(self.name, rows_ND, self.width, None)
        return QuantizedRows.of(rows_ND, self.block).pack()

    def decode(self, wire_NW: Tensor, dtype: torch.dtype) -> Tensor:
        return QuantizedRows.unpack(wire_NW, self.width, self.block).dequantized(dtype)


class Fp8Row(Fp8Block):
    """FP8 data with one FP32 scale for each row."""

    name = "fp8_row"

    def __init__(self, width: int) -> None:
        super().__init__(width, block=width)


_CODECS: dict[str, Callable[[int, torch.dtype], PayloadCodec]] = {
    Native.name: Native,
    Fp8Row.name: lambda width, dtype: Fp8Row(width),
    Fp8Block.name: lambda width, dtype: Fp8Block(width),
}


def codec_named(name: str, width: int, dtype: torch.dtype) -> PayloadCodec:
    """Choose a codec once, at construction, for rows [N, width] in `dtype`; `ConfigError` lists the names."""
    return _CODECS[_require_name("codec", name, _CODECS)](width, dtype)


# -- Quantized rows (0x0AC)


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """FP8 data [N, D] and the FP32 scales [N, B] of the same rows, B = ceil(D / block).

    An element is its data times the scale of its block. Raises `HandleError` when the scales are not one for each block
    of each row, whatever would broadcast.
    """

    data_ND: Tensor
    scales_NB: Tensor
    block: int

    def __post_init__(self) -> None:
        for name, tensor, dtype in (("data", self.data_ND, FP8), ("scales", self.scales_NB, torch.float32)):
            if tensor.dtype != dtype or tensor.dim() != 2:
                raise HandleError(f"quantized {name} must be 2-d {dtype}, found {list(tensor.shape)} in {tensor.dtype}")
        (rows, width), scales = self.data_ND.shape, list(self.scales_NB.shape)
        if scales != [rows, num_blocks(width, self.block)]:
            raise HandleError(
                f"scale rows must equal payload rows, with a scale for every {self.block} elements: "
                f"{[rows, width]} data take {[rows, num_blocks(width, self.block)]} scales, found {scales}"
            )

    @staticmethod
    def of(rows_ND: Tensor, block: int) -> QuantizedRows:
        """Quantize: scale = amax / 448 of each block, data = element / scale, rounded to the nearest FP8 number.

        FP8 keeps three mantissa bits: an element x of a block moves by at most max(|x| / 16, scale / 1024), the latter
        where x / scale is subnormal, hence by at most amax / 28 (unless amax < 2^-117, where scales end). A block of
        zeros gets scale 1 and stays zero. One with an element that is not finite becomes NaN throughout.
        """
        num_rows, width = rows_ND.shape
        data_ND = torch.empty(num_rows, width, dtype=FP8, device=rows_ND.device)
        scales_NB = torch.empty(num_rows, num_blocks(width, block), dtype=torch.float32, device=rows_ND.device)
        for columns, blocks, shape_BG in _spans(width, block):
            part_NBG = rows_ND[:, columns].unflatten(1, shape_BG)
            amax_NB = part_NBG.abs().amax(dim=2).to(torch.float32)
            # Both steps keep a NaN. An infinite scale is decoded by multiplying it with zeros and NaNs.
            scale_NB = (amax_NB / _FP8_MAX).clamp_min(_SMALLEST_SCALE).masked_fill(amax_NB == 0, 1.0)
            scales_NB[:, blocks] = scale_NB
            data_ND[:, columns].unflatten(1, shape_BG).copy_(part_NBG / scale_NB.unsqueeze(2))
        return QuantizedRows(data_ND, scales_NB, block)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Rows [N, D]: the product in FP32, then rounded to `dtype`."""
        rows_ND = _fp8_values(self.data_ND)
        for columns, blocks, shape_BG in _spans(rows_ND.shape[1], self.block):
            rows_ND[:, columns].unflatten(1, shape_BG).mul_(self.scales_NB[:, blocks].unsqueeze(2))
        return rows_ND.to(dtype)

    def permuted(self, order_N: Tensor) -> QuantizedRows:
        """Row i of the result is row `order_N[i]`, with its own scales."""
        # Gathers have no FP8 kernel on every device; bytes move alike.
        data_ND = self.data_ND.view(torch.uint8).index_select(0, order_N).view(FP8)
        return QuantizedRows(data_ND, self.scales_NB.index_select(0, order_N), self.block)

    def pack(self) -> Tensor:
        """The wire form, [N, D + 4 * B] bytes: a row's data, then its scales."""
        return torch.cat([self.data_ND.view(torch.uint8), self.scales_NB.view(torch.uint8)], dim=1)

    @staticmethod
    def unpack(wire_NW: Tensor, width: int, block: int) -> QuantizedRows:
        """The inverse of `pack`; the data is a view. `HandleError` for wire rows of another width or dtype."""
        wire_width = width + num_blocks(width, block) * _SCALE_BYTES
        _require_rows(f"of {width} elements in blocks of {block}", wire_NW, wire_width, torch.uint8)
        # A copy: scales start at byte D of a row, which need not be a multiple of four.
        scales_NB = wire_NW[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return QuantizedRows(wire_NW[:, :width].view(FP8), scales_NB, block)


def num_blocks(width: int, block: int) -> int:
    """Scale blocks of a row: 129 elements in blocks of 128 have 2."""
    return -(-width // block)


@lru_cache
def _spans(width: int, block: int) -> tuple[tuple[slice, slice, tuple[int, int]], ...]:
    """At most two ranges of a row's columns, their blocks, and their shape [B, G]: whole blocks, then the ragged one.

    Example: 5 elements in blocks of 2 are columns 0:4 as [2, 2] and columns 4:5 as [1, 1].
    """
    whole, rest = divmod(width, block)
    regular = (slice(0, whole * block), slice(0, whole), (whole, block))
    ragged = (slice(whole * block, width), slice(whole, whole + 1), (1, rest))
    return tuple(span for span in (regular, ragged) if 0 not in span[2])


def _fp8_values(data_ND: Tensor) -> Tensor:
    """FP8 to FP32 by table: torch's own conversion takes five times as long on a CPU."""
    indices = data_ND.view(torch.uint8).to(torch.int32).reshape(-1)
    return _fp8_table(data_ND.device).index_select(0, indices).view(data_ND.shape)


@lru_cache
def _fp8_table(device: torch.device) -> Tensor:
    """The value of each of the 256 bit patterns."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(FP8).to(torch.float32)


def _require_rows(name: str, rows: Tensor, width: int, dtype: torch.dtype | None) -> None:
    if rows.dim() != 2 or rows.shape[1] != width or (dtype is not None and rows.dtype != dtype):
        found = f"found {list(rows.shape)} in {rows.dtype}"
        raise HandleError(f"codec {name} takes rows [N, {width}] in {dtype or 'any dtype'}, {found}")


# -- Choosing a format: computed payloads and measured errors, no assumptions (0x0AB, 0x0AE)

_FORMATS: dict[str, Callable[[int], PayloadCodec]] = {
    "bf16": lambda width: Native(width, torch.bfloat16),
    Fp8Row.name: Fp8Row,
    Fp8Block.name: Fp8Block,
}


def payload_bytes(format: str, rows: RowSlots, width: int) -> LogicalBytes:
    """Logical bytes of `rows` rows of `width` elements as bf16, fp8_row or fp8_block; scales are part of them."""
    return _FORMATS[_require_name("format", format, _FORMATS)](width).payload(rows)


def smaller_format(rows: RowSlots, width: int, formats: Sequence[str] = tuple(_FORMATS)) -> str:
    """The format with the least payload; of equal ones the first, and bf16 is listed first because it is exact."""
    return min(formats, key=lambda name: payload_bytes(name, rows, width))


def break_even_width(format: str) -> int:
    """The smallest width at which `format` has less payload than bf16. `ConfigError` for bf16 itself."""
    _require_name("format", format, (Fp8Row.name, Fp8Block.name))
    one = RowSlots(1)
    return next(width for width in count(1) if payload_bytes(format, one, width) < payload_bytes("bf16", one, width))


@dataclass(frozen=True)
class ErrorReport:
    """How far a codec moved certain rows. No statement about quality: `evidence.QualityClaim` takes an evaluation."""

    codec: str
    rows: RowSlots
    max_abs: float
    relative_rms: float


def error_report(rows_ND: Tensor, codec: PayloadCodec) -> ErrorReport:
    """Measure one round trip in float64; `relative_rms` is ||x - x'|| / ||x||, 0 for rows that are all zero.

    Both are NaN when a row has an element that is not finite.
    """
    exact_ND = rows_ND.to(torch.float64)
    error_ND = codec.decode(codec.encode(rows_ND), torch.float32).to(torch.float64) - exact_ND
    max_abs = float(error_ND.abs().max()) if error_ND.numel() else 0.0
    norm, moved = float(exact_ND.norm()), float(error_ND.norm())
    return ErrorReport(codec.name, RowSlots(len(rows_ND)), max_abs, moved / norm if norm else moved)


def compare_selection(logits_TE: Tensor, other_TE: Tensor, top_k: int) -> Tensor:
    """Tokens, ascending, whose selected expert sets differ between two routers' logits, each compared in its own dtype.

    A change of the router's precision is judged by this and not by how far logits moved: top-k is discrete. Of equal
    logits the lower expert id is selected. `ConfigError` for logits of two shapes and for `top_k` outside [1, E].
    """
    shape, other = list(logits_TE.shape), list(other_TE.shape)
    if len(shape) != 2 or shape != other:
        raise ConfigError(f"both logits must be [T, E] of one shape, found {shape} and {other}")
    if not 1 <= top_k <= shape[1]:
        raise ConfigError(f"top_k must be in [1, {shape[1]}], found {top_k}")
    orders_TE = (torch.argsort(each_TE, dim=1, descending=True, stable=True) for each_TE in (logits_TE, other_TE))
    selected_TK, others_TK = (order_TE[:, :top_k].sort(dim=1).values for order_TE in orders_TE)
    return (selected_TK != others_TK).any(dim=1).nonzero().squeeze(1)
