"""The step agreement: what all peers know about a step before it runs (DESIGN section 4).

Each peer offers one fixed-size record per step. `agree` is pure: the same records give the same `Agreement` on every
peer, or the same refusal. The record of step n + 1 is offered before step n's tokens are known, so the exchange
overlaps step n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from operator import or_
from typing import Literal

import torch
from torch import Tensor

from ray_moe.errors import AgreementError


@dataclass(frozen=True)
class StepRecord:
    """One peer's line. `release64` and `header64` are 63-bit digests; row counts are upper bounds for the step.

    `staged_generation` is the newest generation whose lease this peer holds, `staged_epoch` the newest epoch whose
    group it has joined. `roles` numbers the division of steps among releases that the step was planned under,
    `roles64` digests it, `staged_roles` is the newest one that this peer is ready for. `bare` has a bit for every layer
    that somebody calls alone, which makes one unit more.
    """

    release64: int
    header64: int
    generation: int
    epoch: int
    step: int
    prefill_rows: int
    decode_rows: int
    has_work: int
    stop: int
    staged_generation: int
    staged_epoch: int
    roles: int = 0
    roles64: int = 0
    staged_roles: int = 0
    bare: int = 0

    def to_tensor(self) -> Tensor:
        """int64 [15], on the host: the agreement never touches the device."""
        return torch.tensor(astuple(self), dtype=torch.int64)

    @staticmethod
    def lines(gathered: Tensor) -> tuple[StepRecord, ...]:
        """The peers' records from [P, 15], in peer-slot order."""
        return tuple(StepRecord(*line) for line in gathered.tolist())


@dataclass(frozen=True)
class Agreement:
    """What every peer does in `step`: which units run, in this order, and what takes effect at the boundary before it.

    A unit runs when any peer planned rows for it; the others join with zero rows. `generation` and `epoch` are the ones
    that the step runs under: the minimum over the peers of what they have staged. `roles`, a minimum too, is for the
    steps that are planned from now on: this one is planned already. `bare` are the layers that any peer has calls for.
    `most_prefill_rows` and `most_decode_rows` are the most that any peer planned for the unit: what shapes that all
    peers share are chosen by.
    """

    step: int
    prefill: bool
    decode: bool
    rows_P: tuple[int, ...]
    has_work: bool
    stop: bool
    generation: int
    epoch: int
    roles: int = 0
    bare: int = 0
    most_prefill_rows: int = 0
    most_decode_rows: int = 0

    def most_rows(self, unit: Literal["prefill", "decode", "bare"]) -> int | None:
        """The most rows of any peer in this unit; None for one whose rows the step's records do not say."""
        return {"prefill": self.most_prefill_rows, "decode": self.most_decode_rows}.get(unit)


def agree(records: Sequence[StepRecord], *, opening: bool = False) -> Agreement:
    """Fold the peers' records of one step.

    `opening` is the first agreement of an epoch: members of the last one and members that have just come need not have
    counted the same steps and roles, and go on from the highest (DESIGN section 4). Raises `AgreementError` naming the
    field and the two peer slots that differ.
    """
    if opening:
        first_step = max(record.step for record in records)
        roles = max(record.roles for record in records)
        records = [
            replace(record, step=first_step, roles=roles, staged_roles=max(roles, record.staged_roles))
            for record in records
        ]
    first = records[0]
    for name in ("release64", "header64", "generation", "epoch", "step", "roles", "roles64"):
        for peer, record in enumerate(records):
            if getattr(record, name) != getattr(first, name):
                raise AgreementError(
                    f"step {first.step}: peer slot 0 has {name} {getattr(first, name)}, "
                    f"peer slot {peer} has {getattr(record, name)}"
                )
    for peer, record in enumerate(records):
        if min(record.prefill_rows, record.decode_rows, record.bare) < 0:
            raise AgreementError(f"step {first.step}: peer slot {peer} planned a negative number of rows: {record}")
        if record.staged_generation < record.generation or record.staged_epoch < record.epoch:
            raise AgreementError(f"step {first.step}: peer slot {peer} staged less than it serves: {record}")
        if record.staged_roles < record.roles:
            raise AgreementError(f"step {first.step}: peer slot {peer} staged less than it plans by: {record}")
    return Agreement(
        step=first.step,
        prefill=any(record.prefill_rows for record in records),
        decode=any(record.decode_rows for record in records),
        rows_P=tuple(record.prefill_rows + record.decode_rows for record in records),
        has_work=any(record.has_work for record in records),
        stop=all(record.stop for record in records),
        generation=min(record.staged_generation for record in records),
        epoch=min(record.staged_epoch for record in records),
        roles=min(record.staged_roles for record in records),
        most_prefill_rows=max(record.prefill_rows for record in records),
        most_decode_rows=max(record.decode_rows for record in records),
        bare=reduce(or_, (record.bare for record in records)),
    )
