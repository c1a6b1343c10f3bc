"""A cluster of 61 layers of 256 experts on 64 ranks as a live document, by the product's own builders.

No machine here runs one. What it is made of is made up, and drifts; what is made of that is what a controller makes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ray_moe.controlplane.demand import Demand, Provenance
from ray_moe.controlplane.operations import Kind, Operation, Stage
from ray_moe.identity import (
    CheckpointVersion,
    GlobalRank,
    LogicalExpertId,
    PhysicalSlotId,
    PlacementVersion,
    ProcessGroupId,
    ReplicaId,
)
from ray_moe.observe.live import (
    GenerationView,
    Headline,
    Known,
    LiveView,
    PlacementView,
    RankView,
    StepsView,
    SwitchView,
    balance_view,
    loads_view,
    operation_views,
    placement_view,
    steps_after,
)
from ray_moe.observe.survival import FailureView, survival
from ray_moe.placement import LayerPlacement, PlacementSnapshot, Slot
from ray_moe.topology import Domain, ProcessGroupSpec, Topology

CHECKPOINT = CheckpointVersion("large-1")


def snapshot(
    layers: int, experts: int, ranks: int, *, per_node: int, copies: int, generation: int
) -> PlacementSnapshot:
    """Experts dealt out to ranks in turn, then `copies` second copies a layer of experts that differ by generation."""
    nodes = {rank: f"node-{rank // per_node}" for rank in range(ranks)}
    members = {node: [rank for rank in range(ranks) if nodes[rank] == node] for node in dict.fromkeys(nodes.values())}
    placed = []
    for layer in range(layers):
        chance = np.random.default_rng([layer, generation])
        homes = [(expert, (expert + layer) % ranks) for expert in range(experts)]
        for number, expert in enumerate(chance.permutation(experts)[:copies].tolist()):
            rank = number % ranks
            homes.append((expert, rank if (expert + layer) % ranks != rank else (rank + 1) % ranks))
        used = [0] * ranks
        slots = []
        for number, (expert, rank) in enumerate(homes):
            slots.append(
                Slot(
                    PhysicalSlotId(f"{layer}.{number}"),
                    LogicalExpertId(expert),
                    ReplicaId(f"r{number}"),
                    GlobalRank(rank),
                    nodes[rank],
                    CHECKPOINT,
                    f"digest-{layer}-{expert}",
                    used[rank],
                )
            )
            used[rank] += 1
        placed.append(LayerPlacement(layer, experts, tuple(slots)))
    return PlacementSnapshot(
        PlacementVersion(f"placement-v{generation}"),
        generation,
        "large-0123456789ab",
        CHECKPOINT,
        ProcessGroupSpec(ProcessGroupId("g"), 0, tuple(map(GlobalRank, range(ranks)))),
        Topology("t", tuple(Domain(node, tuple(map(GlobalRank, owned))) for node, owned in members.items())),
        tuple(placed),
    )


@dataclass
class LargeCluster:
    """Answers `live` as `Cluster` does. A rebalance takes effect every `switch_every_s`."""

    layers: int = 61
    experts: int = 256
    ranks: int = 64
    per_node: int = 8
    copies: int = 64
    capacity: int = 7
    step_s: float = 0.011
    switch_every_s: float = 20.0

    def __post_init__(self) -> None:
        self.began = time.time()  # may be put back: steps and switches are counted from here
        self.chance = np.random.default_rng(7)
        self.popular_LE = self.chance.lognormal(0, 0.7, (self.layers, self.experts))
        self.placed: dict[int, tuple[PlacementSnapshot, PlacementView, tuple[FailureView, ...]]] = {}

    def live(self, known: Known) -> LiveView:
        now = time.time()
        generation = 1 + int((now - self.began) / self.switch_every_s)
        active, placement, failures = self._placed(generation)
        drift_LE = 1 + 0.5 * np.sin(now / 30 + np.arange(self.experts)[None] / 9 + np.arange(self.layers)[:, None])
        end = int((now - self.began) / self.step_s) // 64 * 64
        window = Provenance(unit="rows", start=max(0, end - 64), end=max(1, end))
        demand = Demand(self.popular_LE * drift_LE * 900, window)
        ranks, steps = tuple(self._rank(rank, generation, now) for rank in range(self.ranks)), self._steps(now)
        generations = tuple(
            GenerationView(g, f"placement-v{g}", "ACTIVE" if g == generation else "RETIRED", 0, (), False, None)
            for g in range(max(1, generation - 3), generation + 1)
        )
        loads = loads_view(demand)
        counts = {each.rank: each.first + len(each.seconds) for each in steps}
        return LiveView(
            at=now,
            headline=Headline(
                *("large", "serving", "", "/models/deepseek-like-61x256", active.release_id, generation, 0),
                *("nccl", "fused_window", "grouped", "token_hash", self.capacity, self.experts, "hold: in_bounds"),
            ),
            ranks=ranks,
            steps=tuple(steps_after(each, known.steps.get(each.rank, 0)) for each in steps),
            switches=tuple(
                SwitchView(rank, g, 0, g * 1000, self._taken(g), 0.0021 + 0.0004 * (rank + g % 5))
                for g in range(max(2, generation - 8), generation + 1)
                for rank in range(4)
            ),
            generations=generations,
            operations=operation_views(
                [self._operation(g) for g in range(max(2, generation - 11), generation + 1)], generations, ranks
            ),
            releases=(),
            balance=balance_view(demand, active),
            loads=None if known.loads == loads.end else loads,
            placement=None if known.generation == generation else placement,
            survival=failures,
            known=Known("large", generation, loads.end, counts),
        )

    def _placed(self, generation: int) -> tuple[PlacementSnapshot, PlacementView, tuple[FailureView, ...]]:
        if generation not in self.placed:
            sizes = (self.layers, self.experts, self.ranks)
            active = snapshot(*sizes, per_node=self.per_node, copies=self.copies, generation=generation)
            view = placement_view(active, self.capacity)
            self.placed[generation] = (active, view, survival(active, self.capacity, journal=""))
        return self.placed[generation]

    def _taken(self, generation: int) -> float:
        return self.began + (generation - 1) * self.switch_every_s

    def _operation(self, generation: int) -> Operation:
        at = self._taken(generation)
        return Operation(
            *(generation - 1, Kind.REBALANCE, "autopilot", "imbalance_lasted: 1.62 > 1.3", at - 6.5, Stage.DONE),
            waves=1,
            first_generation=generation - 1,
            last_generation=generation,
            moved_bytes={"peer": 3_400_000_000, "checkpoint": 88_000_000},
            pause_s=0.0043,
            changed_at=at,
            ended_at=at + 0.4,
        )

    def _rank(self, rank: int, generation: int, now: float) -> RankView:
        done = int((now - self.began) / self.step_s)
        return RankView(
            *(rank, f"node-{rank // self.per_node}", "serving", "", now),
            generation=generation,
            committed_step=done,
            steps_worked=done,
            seconds_worked=done * self.step_s,
            seconds_agreeing=done * self.step_s * 0.03,
            slow_step_seconds=self.step_s * 1.2,
            running=60 + rank % 5,
            outstanding_tokens=9000,
            tokens_emitted=done * 62,
            kv_blocks_used=3000 + 20 * rank,
            kv_blocks_total=8192,
            bytes_sent=done * 40_000_000,
            resident_bytes=61 * 5 * 44_000_000,
        )

    def _steps(self, now: float) -> tuple[StepsView, ...]:
        """The latest of every rank, in lockstep: now and then one takes long."""
        last = int((now - self.began) / self.step_s)
        numbers = range(max(0, last - 128), last)
        ends = tuple(self.began + n * self.step_s for n in numbers)
        return tuple(
            StepsView(
                rank,
                numbers.start,
                ends,
                tuple(
                    self.step_s * (4.5 if n % 731 == 0 else 0.92 + 0.16 * ((n * 7919 + rank) % 101) / 101)
                    for n in numbers
                ),
            )
            for rank in range(self.ranks)
        )
