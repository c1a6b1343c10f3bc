"""What dispatch hands to a runner, and a runner to combine: one type per mode (specification 0x06E, 0x06F).

Equal widths do not make the two interchangeable: a runner takes the type that it was written for and refuses the other.
Letters: R rows, S this peer's slots, C capacity of a slot, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from ray_moe.errors import StageError


class Mode(StrEnum):
    """How rows lie between dispatch and combine."""

    NORMAL = "normal"
    LOW_LATENCY = "low_latency"


@dataclass(frozen=True, eq=False)
class SegmentedRows:
    """Normal mode: exact rows [R, D], expert-major; slot s owns `[offsets_S1[s], offsets_S1[s + 1])`.

    `offsets_S1` has an entry for every slot, empty ones too, and the sentinel R.
    """

    rows_RD: Tensor
    offsets_S1: tuple[int, ...]

    mode = Mode.NORMAL


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """Low-latency mode: a capacity-shaped buffer [S, C, D]; row c of slot s is valid where `c < counts_S[s]`.

    Rows beyond a slot's count belong to nobody: they have no route, and combine never reads them. `counts_S` are host
    integers here; a captured executable keeps them on the device beside the buffer.
    """

    rows_SCD: Tensor
    counts_S: tuple[int, ...]

    mode = Mode.LOW_LATENCY


ExpertRows = SegmentedRows | MaskedRows


def require_mode(rows: ExpertRows, mode: Mode, who: str) -> None:
    """`StageError` when `who` is given the rows of another mode, whatever their shapes."""
    if rows.mode is not mode:
        raise StageError(f"{who} takes {mode} rows, found {type(rows).__name__} of mode {rows.mode}")
