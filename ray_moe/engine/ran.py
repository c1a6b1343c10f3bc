"""What the units of a step gave."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_moe.engine.generation import GenerationView
from ray_moe.engine.records import StreamRecord
from ray_moe.engine.units import Emission


@dataclass(frozen=True)
class Ran:
    """The units of a step that ran under one view, and what they gave."""

    view: GenerationView
    step: int
    emissions: list[Emission] = field(default_factory=list)

    def records(self) -> list[StreamRecord]:
        """As their readers get it."""
        where = (self.step, self.view.generation, self.view.epoch)
        return [
            StreamRecord(item.request_id, item.index, (item.token_id,), *where, item.finish_reason, item.logprobs)
            for item in self.emissions
        ]
