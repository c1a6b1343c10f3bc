"""An operation as documents have it: what status, history and the live page say of it, in plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ray_moe.controlplane.operations import Operation, Passed


@dataclass(frozen=True)
class OperationRow:
    """One operation, for people. Times are seconds of the wall clock, 0 for what has not happened; `trail` are the
    edges that it took, the newest last."""

    number: int
    kind: str
    stage: str
    ranks: tuple[int, ...]
    asked_by: str
    why: str
    asked_at: float
    changed_at: float
    ended_at: float
    wave: int
    waves: int
    from_generation: int
    to_generation: int
    moved_bytes: dict[str, int]
    pause_s: float
    reason: str
    trail: tuple[Passed, ...] = ()

    @classmethod
    def of(cls, operation: Operation) -> Self:
        return cls(
            number=operation.number,
            kind=operation.kind.value,
            stage=operation.stage.value,
            ranks=operation.ranks,
            asked_by=operation.asked_by,
            why=operation.why,
            asked_at=operation.asked_at,
            changed_at=operation.changed_at,
            ended_at=operation.ended_at,
            wave=operation.at + 1 if operation.waves else 0,
            waves=operation.waves,
            from_generation=operation.first_generation,
            to_generation=operation.last_generation,
            moved_bytes=dict(operation.moved_bytes),
            pause_s=operation.pause_s,
            reason=operation.reason,
            trail=operation.trail,
        )
