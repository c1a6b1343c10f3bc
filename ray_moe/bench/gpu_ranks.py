"""A process for each GPU of this host, for what several GPUs do together: benchmarks, and tests that are alike.

On a host of one GPU tests may have two processes take turns on it: slow, and right all the same.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from ray_moe.comm.rendezvous import RendezvousStore, StoreAddress
from ray_moe.deadline import Deadline
from ray_moe.identity import GlobalRank, ProcessGroupId
from ray_moe.topology import ProcessGroupSpec

MOST_RANKS = 4


@dataclass(frozen=True)
class Seat:
    """One process's place: rank r has GPU r, where there are as many; `store` is where epochs meet."""

    rank: int
    ranks: int
    store: StoreAddress

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    @property
    def global_rank(self) -> GlobalRank:
        return GlobalRank(self.rank)

    def group(self, epoch: int, members: Collection[int] | None = None) -> ProcessGroupSpec:
        """An epoch of `members`, in their order; all ranks by default."""
        ranks = range(self.ranks) if members is None else members
        return ProcessGroupSpec(ProcessGroupId("gpu-ranks"), epoch, tuple(GlobalRank(rank) for rank in ranks))


def ranks_here() -> int:
    """How many GPUs are used of those that are here."""
    return min(MOST_RANKS, torch.cuda.device_count())


def ranks_for_tests() -> int:
    """The same, but two ranks on one GPU; none without a GPU."""
    return max(2, ranks_here()) if torch.cuda.is_available() else 0


def run_ranks(
    work: Callable[..., Any], *args: Any, seconds: float, ranks: int | None = None, dying: Collection[int] = ()
) -> list[Any]:
    """`work(seat, *args)` in a process for each rank; its results in their order, None of those that are to die.

    `RuntimeError` with every failed rank's traceback, or naming who did not end within `seconds`; no process outlives
    the call.
    """
    count = ranks_here() if ranks is None else ranks
    store, deadline = RendezvousStore("127.0.0.1", seconds), Deadline(seconds)
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for rank in range(count):
        pipe, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, Seat(rank, count, store.address), work, args))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(pipe)
    try:
        results = [_result(pipe, rank, deadline, rank in dying) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join(timeout=10)
    failures = [text for failed, text in results if failed]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [value for _, value in results]


def _result(pipe: Connection, rank: int, deadline: Deadline, dies: bool) -> tuple[bool, Any]:
    try:
        if pipe.poll(deadline.left):
            failed, value = pipe.recv()
            return failed, f"rank {rank}:\n{value}" if failed else value
    except EOFError:
        return (False, None) if dies else (True, f"rank {rank} died")
    return True, f"rank {rank} did not end in time"


def _child(pipe: Connection, seat: Seat, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        torch.cuda.set_device(seat.device)
        pipe.send((False, work(seat, *args)))
    except Exception:  # noqa: BLE001 - whoever started this process gets it, word for word
        pipe.send((True, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # a communicator or a mapping that is left must not keep the process
