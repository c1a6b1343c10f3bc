"""How long device work takes: replayed from a CUDA graph, with a cold L2 cache, by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from triton.testing import do_bench


@dataclass(frozen=True)
class Spread:
    """Milliseconds: the median of the rounds' medians, the least and the most of them."""

    median: float
    least: float
    most: float

    def range(self) -> dict[str, float]:
        return {"least": self.least, "most": self.most}

    @staticmethod
    def of(rounds: Sequence[float]) -> Spread:
        return Spread(statistics.median(rounds), min(rounds), max(rounds))


def graphed(call: Callable[[], object]) -> Callable[[], None]:
    """`call`, run once to compile it and then captured; what is returned replays it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay() -> None:
        graph.replay()

    replay.kept = call  # type: ignore[attr-defined]  # what it closes over must live as long as the graph
    return replay


def median_ms(replay: Callable[[], object], budget_ms: int) -> float:
    """The median of as many runs as fit about `budget_ms`; the L2 cache is flushed before each."""
    return float(do_bench(replay, warmup=max(5, budget_ms // 8), rep=budget_ms, return_mode="median"))


def interleaved(replays: Sequence[Callable[[], object]], rounds: int, budget_ms: int) -> list[Spread]:
    """All of them in each round, one after another, so that all see the same card in the same state."""
    measured: list[list[float]] = [[] for _ in replays]
    for _ in range(rounds):
        for index, replay in enumerate(replays):
            measured[index].append(median_ms(replay, budget_ms))
    return [Spread.of(each) for each in measured]
