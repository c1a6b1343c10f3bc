"""What a step runs: a unit as it is planned (rows and blocks; the tokens may be unknown) and as it is packed (tensors).

A step runs at most one prefill unit and one decode unit. All records are frozen; a packed unit can be forwarded any
number of times.

Letters: T packed tokens, B requests, W blocks per request. A write slot is block * block_size + offset.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ray_moe.dataplane.phases import Phase
from ray_moe.engine.request import FinishReason
from ray_moe.engine.sampling import SamplingColumns, SamplingParams
from ray_moe.engine.steering import SteeringColumns, TokenLogprobs
from ray_moe.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """One request's share of one unit: tokens [start, start + count) of it, and where their keys and values live.

    `ticket` is the submission it belongs to (an id can be used again after a cancel), `residency` the number of times
    that submission had been preempted. `index` is the generated token that the row samples, when it `samples`. `phase`
    is the row's provenance: it decides the unit that the row may be in.
    """

    phase: Phase
    request_id: str
    ticket: int
    residency: int
    start: int
    count: int
    blocks: tuple[int, ...]
    samples: bool
    index: int


@dataclass(frozen=True)
class UnitPlan:
    """One phase's share of a step. Raises `ConfigError` for a row of another phase (specification 0x05E)."""

    step: int
    kind: Phase
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if row.phase != self.kind:
                raise ConfigError(
                    f"step {self.step}: a {self.kind} unit cannot take a {row.phase} row, that of {row.request_id!r}"
                )

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True)
class StepPlan:
    """A step's units; they run in this order, and no request is in both."""

    step: int
    prefill: UnitPlan | None
    decode: UnitPlan | None

    @property
    def units(self) -> tuple[UnitPlan, ...]:
        return tuple(unit for unit in (self.prefill, self.decode) if unit is not None)

    def at(self, step: int) -> StepPlan:
        """The same rows as step `step`."""
        if step == self.step:
            return self
        prefill, decode = (unit and replace(unit, step=step) for unit in (self.prefill, self.decode))
        return StepPlan(step, prefill, decode)

    def agreed_units(self, *, prefill: bool, decode: bool) -> list[tuple[Phase, UnitPlan | None]]:
        """The units that all peers run, in order; None where this peer has no rows for one."""
        agreed: list[tuple[Phase, UnitPlan | None]] = []
        if prefill:
            agreed.append(("prefill", self.prefill))
        if decode:
            agreed.append(("decode", self.decode))
        return agreed


@dataclass(frozen=True)
class Emission:
    """One token of one request; `index` counts generated tokens from 0, the prefix included."""

    request_id: str
    index: int
    token_id: int
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the token, where they were asked for


@dataclass(frozen=True)
class UnitBatch:
    """One unit, packed: what a forward needs, and nothing that a forward changes.

    Integer tensors are int64 on the engine's device. `rows` says on the host what the tensors say on the device, so
    that a step reads no sizes back.
    """

    kind: Phase
    rows: tuple[Row, ...]  # B, in packed order
    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    write_slots: Tensor  # [T]
    cu_q: Tensor  # [B + 1], each request's first packed token, with the final sentinel T
    kv_len: Tensor  # [B], positions that the row's last token may see
    block_table: Tensor  # [B, W], padded with 0 (never read: see `_decode_view`)
    sample_rows: Tensor  # packed tokens whose logits are sampled, in row order
    sampling: SamplingColumns  # one entry per sample row
    steering: SteeringColumns | None = None  # None when no sample row's logits change
    logprobs: tuple[int | None, ...] = ()  # one entry per sample row: how many of the likeliest tokens it wants

    def choose(self, logits_BV: Tensor) -> Tensor:
        """The next token of each sample row, int64 [B]."""
        return self.sampling.sample(logits_BV if self.steering is None else self.steering.apply(logits_BV))

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(row.request_id for row in self.rows)


_INTEGER_COLUMNS = (
    *("input_ids", "position_ids", "write_slots", "cu_q", "kv_len", "block_table"),
    *("sample_rows", "top_k", "seed", "index"),
)


def pack_unit(
    kind: Phase,
    rows: Sequence[Row],
    tokens: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    block_size: int,
    device: torch.device | str = "cpu",
    steering: SteeringColumns | None = None,
) -> UnitBatch:
    """Packs rows; `tokens[b]` are the ids of row b, `params[b]` its request's parameters (admitted: with a seed).

    All columns travel as one int64 buffer, hence one copy to the device; but for `steering`, which few units have.
    """
    columns = {name: array("q") for name in _INTEGER_COLUMNS}
    columns["cu_q"].append(0)
    temperature, top_p, min_p = array("d"), array("d"), array("d")
    logprobs: list[int | None] = []
    width = max(len(row.blocks) for row in rows)
    for row, ids, wanted in zip(rows, tokens, params, strict=True):
        end = row.start + row.count
        columns["input_ids"].extend(ids)
        columns["position_ids"].extend(range(row.start, end))
        columns["write_slots"].extend(
            row.blocks[position // block_size] * block_size + position % block_size
            for position in range(row.start, end)
        )
        columns["cu_q"].append(columns["cu_q"][-1] + row.count)
        columns["kv_len"].append(end)
        columns["block_table"].extend(row.blocks)
        columns["block_table"].extend([0] * (width - len(row.blocks)))
        if row.samples:
            columns["sample_rows"].append(columns["cu_q"][-1] - 1)
            columns["top_k"].append(wanted.top_k)
            columns["seed"].append(wanted.seed or 0)  # only a greedy request may come without a seed
            columns["index"].append(row.index)
            temperature.append(wanted.temperature)
            top_p.append(wanted.top_p)
            min_p.append(wanted.min_p)
            logprobs.append(wanted.logprobs)
    columns["temperature"] = array("q", temperature.tobytes())  # the bits travel as int64 and are viewed back below
    columns["top_p"] = array("q", top_p.tobytes())
    columns["min_p"] = array("q", min_p.tobytes())

    buffer = array("q")
    for column in columns.values():
        buffer.extend(column)
    packed = torch.frombuffer(buffer, dtype=torch.int64)
    if torch.device(device).type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)  # else the host waits for the copy
    sizes = [len(column) for column in columns.values()]
    on_device = dict(zip(columns, packed.split(sizes), strict=True))
    return UnitBatch(
        kind=kind,
        rows=tuple(rows),
        input_ids=on_device["input_ids"][None],
        position_ids=on_device["position_ids"][None],
        write_slots=on_device["write_slots"],
        cu_q=on_device["cu_q"],
        kv_len=on_device["kv_len"],
        block_table=on_device["block_table"].view(len(rows), width),
        sample_rows=on_device["sample_rows"],
        sampling=SamplingColumns(
            temperature_B=on_device["temperature"].view(torch.float64),
            top_p_B=on_device["top_p"].view(torch.float64),
            top_k_B=on_device["top_k"],
            seed_B=on_device["seed"],
            index_B=on_device["index"],
            all_greedy=not any(temperature),
            min_p_B=on_device["min_p"].view(torch.float64) if any(min_p) else None,
        ),
        steering=steering,
        logprobs=tuple(logprobs),
    )
