"""One look at a running cluster as one frozen document: what `/ui` draws, `ray-moe top` shows and programs read.

    view = cluster.live()                       the whole document
    later = cluster.live(view.known)            without what `view` has already
    view = merged(view, later)                  the whole document again

The parts that are large change seldom, and carry a version: the placement its generation, the loads the end of their
window, each rank's steps their count. Pure: the controller gathers (`ray_moe.actors.live`), this module puts together.
Letters: L MoE layers in execution order, E logical experts, R ranks, C slots of a layer on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ray_moe.controlplane.demand import Demand
from ray_moe.controlplane.generations import GenerationStatus
from ray_moe.controlplane.operation_row import OperationRow
from ray_moe.controlplane.operations import Operation
from ray_moe.observe.operations import waits_for
from ray_moe.observe.survival import FailureView
from ray_moe.placement import PlacementSnapshot

FREE = -1  # in a slot that holds no expert
STEPS_KEPT = 512  # of each rank, in a merged document
_EDGES_SHOWN = 32  # of each operation

# -- The document


@dataclass(frozen=True)
class Known:
    """What a reader has already: the placement's generation, the end of the loads' window, and by rank how many working
    steps. Nothing, by default. `life` names the controller's process that told it, since another one counts anew."""

    life: str = ""
    generation: int = -1
    loads: int = -1
    steps: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Headline:
    """The cluster as a whole. `failure` says why it does not serve, `autopilot` what that decided last; empty for none.

    `generation` and `epoch` are the active ones; `capacity` are a rank's slots of one layer.
    """

    name: str
    state: str
    failure: str
    model: str
    release_id: str
    generation: int
    epoch: int
    group: str
    transport: str
    runner: str
    policy: str
    capacity: int
    num_experts: int
    autopilot: str


@dataclass(frozen=True)
class RankView:
    """One rank: totals since it started, and what it holds now.

    `state` is the loop's (serving, sleeping, ...) for one that serves, joining for one that prepares, lost for one that
    died. `seen_at` is the controller's wall clock when it answered last; 0 for never. `loading` is how far a joining
    rank is: phase, done, total.
    """

    rank: int
    node: str
    state: str
    detail: str = ""
    seen_at: float = 0.0
    loading: tuple[str, int, int] = ("", 0, 0)
    generation: int = 0
    epoch: int = 0
    committed_step: int = -1
    steps_worked: int = 0
    seconds_worked: float = 0.0
    seconds_agreeing: float = 0.0
    slow_step_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    outstanding_tokens: int = 0
    tokens_emitted: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    rows_local: int = 0
    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    replays: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    resident_bytes: int = 0


@dataclass(frozen=True)
class StepsView:
    """The latest working steps of a rank, oldest first: numbers [first, first + n) of those that it has run, the wall
    clock's seconds when each ended, and how long each took, pauses included."""

    rank: int
    first: int
    ended_at: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class SwitchView:
    """One rank took a generation: the wall clock's seconds, the first step under it, and the seconds that it added."""

    rank: int
    generation: int
    epoch: int
    step: int
    at: float
    seconds: float


@dataclass(frozen=True)
class GenerationView:
    """One generation that the registry remembers, and who refers to it."""

    generation: int
    version: str
    state: str
    references: int
    holders: tuple[str, ...]
    held: bool
    held_until_step: int | None


@dataclass(frozen=True)
class OperationView(OperationRow):
    """One operation, open or ended, and what it waits for: empty once ended. Of its trail the latest edges."""

    waits_for: str = ""


@dataclass(frozen=True)
class ReleaseView:
    """One release of the cluster, and where it stands."""

    release_id: str
    state: str


@dataclass(frozen=True)
class LoadsView:
    """How many rows [L][E] each expert was asked for, as the estimate of demand has them: its latest window is of the
    steps [start, end). Rounded to hundredths."""

    start: int
    end: int
    unit: str
    rows_LE: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class BalanceView:
    """What the loads make of the active placement, if every expert's rows split evenly over its copies: by layer the
    busiest rank's rows over the mean rank's [L], and each rank's share of all rows [R]."""

    imbalance: tuple[float, ...]
    rank_share: tuple[float, ...]


@dataclass(frozen=True)
class PlacementView:
    """Where copies live under the active generation. `layers` [L] are the model's layer numbers, `ranks` [R] the
    group's; `slots_RLC` the expert in each pool slot, `FREE` where there is none."""

    generation: int
    version: str
    epoch: int
    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    num_experts: int
    slots_RLC: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class LiveView:
    """One look at a cluster. `at` is the controller's wall clock; compare times of one document with nothing else.

    `placement` and `loads` are None where the reader has them already (`Known`), or nobody does yet; `known` says what
    a reader of this document has then.
    """

    at: float
    headline: Headline
    ranks: tuple[RankView, ...]
    steps: tuple[StepsView, ...]
    switches: tuple[SwitchView, ...]
    generations: tuple[GenerationView, ...]
    operations: tuple[OperationView, ...]
    releases: tuple[ReleaseView, ...]
    balance: BalanceView | None
    loads: LoadsView | None
    placement: PlacementView | None
    survival: tuple[FailureView, ...]
    known: Known


# -- Put together


def placement_view(active: PlacementSnapshot, capacity: int) -> PlacementView:
    """`active` as a table of ranks, layers and `capacity` pool slots each."""
    ranks = tuple(rank.value for rank in active.group.peers)
    row_of = {rank: row for row, rank in enumerate(ranks)}
    slots_RLC = [[[FREE] * capacity for _ in active.layers] for _ in ranks]
    for at, placement in enumerate(active.layers):
        for slot in placement.slots:
            slots_RLC[row_of[slot.destination_rank.value]][at][slot.pool_slot] = slot.logical_expert_id.value
    return PlacementView(
        generation=active.generation,
        version=active.version.value,
        epoch=active.group.epoch,
        layers=tuple(placement.layer for placement in active.layers),
        ranks=ranks,
        nodes=tuple(active.topology.owner[rank] for rank in active.group.peers),
        num_experts=max(placement.num_logical_experts for placement in active.layers),
        slots_RLC=tuple(tuple(map(tuple, layers)) for layers in slots_RLC),
    )


def loads_view(demand: Demand) -> LoadsView:
    """The estimate, without what a reader cannot see."""
    origin = demand.provenance
    rows_LE = tuple(map(tuple, np.round(demand.loads_LE, 2).tolist()))
    return LoadsView(origin.start or 0, origin.end or 0, origin.unit, rows_LE)


def balance_view(demand: Demand, active: PlacementSnapshot) -> BalanceView:
    """An ideal, not traffic: which copy a row takes is the policy's choice. A layer without rows is balanced."""
    ranks = [rank.value for rank in active.group.peers]
    carried_LR = np.zeros((len(active.layers), len(ranks)))
    for at, placement in enumerate(active.layers):
        experts_S = np.asarray(placement.phy2log)
        share_E = demand.loads_LE[at] / np.bincount(experts_S, minlength=demand.loads_LE.shape[1]).clip(min=1)
        rows_S = np.searchsorted(ranks, placement.physical_rank, sorter=np.argsort(ranks))
        np.add.at(carried_LR[at], np.argsort(ranks)[rows_S], share_E[experts_S])
    mean_L = carried_LR.mean(axis=1)
    imbalance_L = np.where(mean_L > 0, carried_LR.max(axis=1) / np.where(mean_L > 0, mean_L, 1), 1.0)
    share_R = carried_LR.sum(axis=0) / max(carried_LR.sum(), 1e-12)
    return BalanceView(tuple(np.round(imbalance_L, 4).tolist()), tuple(np.round(share_R, 5).tolist()))


def generation_views(found: Iterable[GenerationStatus]) -> tuple[GenerationView, ...]:
    return tuple(
        GenerationView(
            generation=one.generation,
            version=one.version,
            state=one.state.value,
            references=one.references,
            holders=one.holders,
            held=one.held,
            held_until_step=one.held_until_step,
        )
        for one in found
    )


def operation_views(
    operations: Sequence[Operation], generations: Sequence[GenerationView], ranks: Sequence[RankView]
) -> tuple[OperationView, ...]:
    """Operations with what the open ones wait for, in the order of their numbers."""
    plain = [_operation_view(operation) for operation in operations]
    status: dict[str, Any] = {
        "operations": [asdict(one) for one in plain if not one.ended_at],
        "generations": [asdict(one) for one in generations],
        "peers": [asdict(one) for one in ranks if one.generation],
    }
    told = [replace(one, waits_for=waits_for(asdict(one), status)) if not one.ended_at else one for one in plain]
    return tuple(sorted(told, key=lambda one: one.number))


def _operation_view(operation: Operation) -> OperationView:
    return OperationView.of(replace(operation, trail=operation.trail[-_EDGES_SHOWN:]))


# -- Read again and again


def merged(before: LiveView, later: LiveView) -> LiveView:
    """`later`, which was asked for with `before.known`, as a whole document."""
    if later.known.life != before.known.life:
        return later
    held = {steps.rank: steps for steps in before.steps}
    return replace(
        later,
        placement=later.placement or before.placement,
        loads=later.loads or before.loads,
        steps=tuple(joined(held.get(steps.rank), steps) for steps in later.steps),
    )


def joined(before: StepsView | None, later: StepsView) -> StepsView:
    """Both stretches of one rank's steps, the latest `STEPS_KEPT`; where some between them are unknown, `later`."""
    if before is None or before.first + len(before.seconds) != later.first:
        return later
    ended_at, seconds = before.ended_at + later.ended_at, before.seconds + later.seconds
    first = later.first + len(later.seconds) - len(seconds[-STEPS_KEPT:])
    return StepsView(later.rank, first, ended_at[-STEPS_KEPT:], seconds[-STEPS_KEPT:])


def steps_after(steps: StepsView, known: int) -> StepsView:
    """Those of them that are numbered `known` or above: what a reader lacks who has seen so many."""
    skip = min(max(0, known - steps.first), len(steps.seconds))
    return StepsView(steps.rank, steps.first + skip, steps.ended_at[skip:], steps.seconds[skip:])
