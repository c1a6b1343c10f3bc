"""What a loop tells the log: its own transitions, and the generations that it takes."""

from __future__ import annotations

import logging

from ray_moe.engine.generation import Departure, GenerationView
from ray_moe.engine.state import LoopState, Switch
from ray_moe.events import emit

# Idle peers fall asleep and wake all the time: for whoever debugs.
_LEVELS = {"fail": logging.ERROR, "sleep": logging.DEBUG, "wake": logging.DEBUG}


def tell_transition(
    rank: int, before: LoopState, after: LoopState, by: str, view: GenerationView, step: int, failure: object
) -> None:
    """The loop of a rank is in another state, after `step`; `failure` is why, None for what is as it should be."""
    emit(
        "loop",
        before.value,
        after.value,
        by,
        level=_LEVELS.get(by, logging.INFO),
        rank=rank,
        generation=view.generation,
        epoch=view.epoch,
        step=step,
        release=view.release_id,
        reason="" if failure is None else str(failure),
    )


def tell_switch(
    rank: int, past: GenerationView, following: GenerationView | Departure, switch: Switch, by: str
) -> None:
    """A rank runs another generation from the step of `switch` on: a staged one, or the main one of new roles."""
    emit(
        "switch",
        f"generation {past.generation}",
        f"generation {switch.generation}",
        by,
        rank=rank,
        generation=switch.generation,
        epoch=switch.epoch,
        step=switch.step,
        release=following.release_id if isinstance(following, GenerationView) else "",
        pause_s=round(switch.seconds, 6),
    )
