"""What a peer says about its next step, and the agreement that comes of it."""

from __future__ import annotations

from ray_moe.comm.agreement import Agreement, StepRecord, agree
from ray_moe.comm.group import Ticket
from ray_moe.engine.generation import Departure, GenerationView
from ray_moe.engine.roles import Division
from ray_moe.engine.units import StepPlan


class Agreeing:
    """A step record on its way."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def result(self, *, opening: bool = False) -> Agreement:
        """All peers' records, folded; raises as `agree` and the group's ticket do."""
        return agree(StepRecord.lines(self._ticket.result()), opening=opening)


def offer(
    view: GenerationView,
    plan: StepPlan,
    staged: GenerationView | Departure,
    division: Division,
    *,
    has_work: bool,
    stop: bool,
    bare: int,
) -> Agreeing:
    """Send this peer's record to the others. `staged` is the newest generation that it holds, `bare` the layers that it
    has calls for, a bit each."""
    header = view.header
    record = StepRecord(
        release64=header.release64,
        header64=header.digest64,
        generation=header.generation,
        epoch=header.epoch,
        step=plan.step,
        prefill_rows=plan.prefill.num_tokens if plan.prefill else 0,
        decode_rows=plan.decode.num_tokens if plan.decode else 0,
        has_work=int(has_work),
        stop=int(stop),
        staged_generation=staged.generation,
        staged_epoch=staged.epoch,
        roles=division.now.number,
        roles64=division.now.digest64,
        staged_roles=division.newest_staged,
        bare=bare,
    )
    return Agreeing(view.transport.group.gather(record.to_tensor()))
