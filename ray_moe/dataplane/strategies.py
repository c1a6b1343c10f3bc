"""How one invocation of a layer overlaps communication with computation (specification 0x09E).

A strategy is one of the four designs of `schedule`: how many batches and chunks there are, and the order in which this
thread takes the tasks. Communication tasks are only submitted in that order; whoever needs their rows waits for them.
The order depends on the design alone, so that every peer submits its exchanges in the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ray_moe.dataplane.schedule import (
    Schedule,
    Task,
    buffers_of,
    bulk,
    check_release,
    check_schedule,
    check_tasks,
    chunk_pipeline,
    execution_order,
    lifetimes,
    list_schedule,
    microbatch_pipeline,
    shared_path,
)
from ray_moe.errors import ConfigError


@dataclass(frozen=True)
class Strategy:
    """`batches` are planned apart and have sums of their own; `chunks` share a plan and one sum.

    Raises `ScheduleError` for tasks that cannot be ordered.
    """

    name: str
    tasks: tuple[Task, ...]
    batches: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        check_tasks(self.tasks)
        check_schedule(self.tasks, self.schedule)
        buffers = buffers_of(self.tasks)
        check_release(
            buffers, self.schedule, {name: life.end for name, life in lifetimes(buffers, self.schedule).items()}
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The model behind the order: units, not time. `hidden_units` is what overlaps in it, at best."""
        return list_schedule(self.tasks)

    @cached_property
    def order(self) -> tuple[tuple[str, int], ...]:
        """(kind, index) of the tasks in the order in which they are taken."""
        by_name = {task.name: task for task in self.tasks}
        ordered = (by_name[name] for name in execution_order(self.tasks))
        return tuple((task.kind, task.index or 0) for task in ordered)


_STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "bulk": lambda parts: Strategy("bulk", bulk()),
    "chunk_pipeline": lambda parts: Strategy("chunk_pipeline", chunk_pipeline(parts), chunks=parts),
    "shared_path": lambda parts: Strategy("shared_path", shared_path()),
    "microbatch_pipeline": lambda parts: Strategy("microbatch_pipeline", microbatch_pipeline(parts), batches=parts),
}
STRATEGIES = tuple(_STRATEGIES)


def strategy_named(name: str, parts: int = 2) -> Strategy:
    """Choose a strategy once, at construction; `parts` is the number of chunks or batches of the two pipelines.

    Raises `ConfigError` listing the names, and for less than one part.
    """
    if name not in _STRATEGIES:
        raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}, found {name!r}")
    return _STRATEGIES[name](parts)
