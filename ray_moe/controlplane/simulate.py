"""Replay demand over a cluster and compare policies: balance over time, moved bytes, memory, predicted time, regret.

Pure and deterministic: the same trace and setting give the same report. Nothing here is measured; loads are ideal (an
expert's routes split evenly over its copies), and times are `costs` predictions that leave out what a migration takes
from the steps beside it. Letters: T steps, L layers, E experts, S slots, G ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from ray_moe.controlplane.contenders import Contender, Decision, Player, Setting, initial
from ray_moe.controlplane.costs import Predicted, by_rank, layer_times
from ray_moe.controlplane.demand import ASSUMED_ROUTES, Demand, Provenance
from ray_moe.controlplane.eplb import imbalance
from ray_moe.controlplane.greedy import greedy
from ray_moe.controlplane.placed import Placed
from ray_moe.controlplane.traces import Trace
from ray_moe.evidence import LiveBytes, LogicalBytes

Floats = NDArray[np.float64]
ORACLE = "oracle"
TAIL = Fraction(95, 100)


@dataclass(frozen=True, eq=False)
class Course:
    """One contender's way through a trace. `balance_TL` is largest over mean ideal rank load of each step and layer,
    `seconds_T` the predicted time of the MoE layers of each step."""

    name: str
    policy: str
    cadence: int
    estimator: str
    balance_TL: Floats
    seconds_T: Floats
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, eq=False)
class Report:
    """All courses over one trace, the oracle's among them unless it was left out."""

    trace: Trace
    setting: Setting
    courses: tuple[Course, ...]
    oracle: Course | None


def simulate(trace: Trace, setting: Setting, contenders: Sequence[Contender], oracle_every: int = 1) -> Report:
    """One pass over `trace` with all contenders.

    The oracle solves before every `oracle_every` steps with the sum of exactly these steps, and moves in no time; 0
    leaves it out. Raises `ConfigError` where the slots do not hold the experts, or for what a policy refuses.
    """
    start = initial(trace.layers, trace.experts, setting)
    players = [Player(contender, setting, start) for contender in contenders]
    # The last row is the oracle's.
    balance = np.empty((len(players) + 1, trace.steps, trace.layers))
    seconds = np.empty((len(players) + 1, trace.steps))
    step = 0
    for block in _blocks(trace, oracle_every or 1):
        foreseen = greedy(np.sum(block, axis=0), setting.shape) if oracle_every else None
        for loads_LE in block:
            for at, player in enumerate(players):
                placed = player.before(step, seconds[at, step - 1])
                balance[at, step], seconds[at, step] = _outcome(loads_LE, placed, setting)
            if foreseen is not None:
                balance[-1, step], seconds[-1, step] = _outcome(loads_LE, foreseen, setting)
            seen = Demand(loads_LE, Provenance(unit=ASSUMED_ROUTES, start=step, end=step + 1, source=trace.name))
            for player in players:
                player.after(seen)
            step += 1
    courses = tuple(
        Course(
            c.name, c.policy, c.cadence, f"{c.estimator} {c.window}", balance[at], seconds[at], tuple(player.decisions)
        )
        for at, player in enumerate(players)
        for c in (player.contender,)
    )
    seeing = Course(ORACLE, ORACLE, oracle_every, "the future", balance[-1], seconds[-1], ()) if oracle_every else None
    return Report(trace, setting, courses, seeing)


def _blocks(trace: Iterable[Floats], size: int) -> Iterator[list[Floats]]:
    steps = iter(trace)
    while block := list(islice(steps, size)):
        yield block


def _outcome(loads_LE: Floats, placed: Placed, setting: Setting) -> tuple[Floats, float]:
    rows_LS = np.take_along_axis(loads_LE / placed.counts_LE, placed.phy2log_LS, axis=1)
    times = layer_times(rows_LS, setting.shape, setting.expert, setting.costs)
    return imbalance(by_rank(rows_LS, setting.shape)), times.step.seconds


# -- Summaries


@dataclass(frozen=True)
class Summary:
    """A course in figures. Balance is over all steps and layers; quantiles are by nearest rank (specification 0x0DA).

    `settled` holds the start of the trace and each shift, if more than `grace` steps pass to the next one, and with it
    the fewest steps after which the 95th percentile of balance up to the next shift is within `target`; None where it
    never is. `p95_settled` is that percentile from `grace` steps after each of them on. `moved` is payload between
    ranks or from outside, `duplicated` within a GPU.
    `regret` is predicted time over the oracle's, less 1.
    """

    name: str
    policy: str
    cadence: int
    estimator: str
    mean: float
    p95: float
    worst: float
    p95_settled: float | None
    settled: tuple[tuple[int, int | None], ...]
    decisions: int
    moved: LogicalBytes
    across_nodes: LogicalBytes
    duplicated: LogicalBytes
    kept: LiveBytes
    resident: LiveBytes
    peak_rank: LiveBytes
    step: Predicted
    step_p95: Predicted
    regret: float | None


def summarise(report: Report, target: float = 1.10, grace: int = 200) -> tuple[Summary, ...]:
    """The contenders in their order, then the oracle."""
    everyone = [*report.courses, *([report.oracle] if report.oracle is not None else [])]
    return tuple(_summary(course, report, target, grace) for course in everyone)


def _summary(course: Course, report: Report, target: float, grace: int) -> Summary:
    setting, layers = report.setting, report.trace.layers
    size = setting.expert.expert_bytes
    moves = [decision.moves for decision in course.decisions]
    cross = sum(int((m.counts.cross_node_L + m.counts.loaded_L).sum()) for m in moves)
    within = sum(int(m.counts.same_node_L.sum()) for m in moves)
    resting = max(setting.shape.slots_by_rank) * layers
    spans = [(start, end) for start, end in _spans(report.trace) if start + grace < end]
    late = [course.balance_TL[start + grace : end].ravel() for start, end in spans]
    return Summary(
        name=course.name,
        policy=course.policy,
        cadence=course.cadence,
        estimator=course.estimator,
        mean=float(course.balance_TL.mean()),
        p95=quantile(course.balance_TL, TAIL),
        worst=float(course.balance_TL.max()),
        p95_settled=quantile(np.concatenate(late), TAIL) if late else None,
        settled=tuple((start, settling(course.balance_TL[start:end], target)) for start, end in spans),
        decisions=len(course.decisions),
        moved=LogicalBytes((cross + within) * size),
        across_nodes=LogicalBytes(cross * size),
        duplicated=LogicalBytes(sum(int(m.counts.same_gpu_L.sum()) for m in moves) * size),
        kept=LiveBytes(sum(int(m.counts.kept_L.sum()) for m in moves) * size),
        resident=LiveBytes(setting.shape.num_slots * layers * size),
        peak_rank=LiveBytes(max([resting, *(int(m.peak_G.max()) for m in moves)]) * size),
        step=Predicted(float(course.seconds_T.mean())),
        step_p95=Predicted(quantile(course.seconds_T, TAIL)),
        regret=_regret(course, report.oracle),
    )


def _regret(course: Course, oracle: Course | None) -> float | None:
    return None if oracle is None else float(course.seconds_T.sum() / oracle.seconds_T.sum() - 1)


def quantile(values: Floats, q: Fraction) -> float:
    """By nearest rank: the ceil(q n)-th smallest (specification 0x0DA)."""
    at = -(-q.numerator * values.size // q.denominator) - 1
    return float(np.partition(values, at, axis=None)[at])


def settling(balance_TL: Floats, target: float) -> int | None:
    """The fewest steps to leave out at the beginning so that the 95th percentile of all the rest is <= target."""
    within_T = (balance_TL <= target).sum(axis=1)[::-1].cumsum()[::-1]
    total_T = balance_TL.shape[1] * np.arange(len(balance_TL), 0, -1)
    enough = within_T * TAIL.denominator >= total_T * TAIL.numerator
    return int(enough.argmax()) if enough.any() else None


def _spans(trace: Trace) -> Iterator[tuple[int, int]]:
    """From the start, and from each shift, to the next."""
    edges = [0, *trace.shifts, trace.steps]
    yield from pairwise(edges)
