"""Where each new copy reads from: the nearest source that exists, each node entered once per expert.

The classes form a hierarchy, nearest first: a slot of the same GPU, of the same node, of another node, a host cache,
the checkpoint. New copies serve as sources for one another, so that only the first copy of an expert on a rank or node
comes from farther away; that is the least payload of every class at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ray_moe.controlplane.occupancy import Held
from ray_moe.controlplane.solve import PoolSlot
from ray_moe.errors import PlacementError
from ray_moe.identity import GlobalRank


class CopyClass(StrEnum):
    """What a copy of the target takes. A class names a relation of two places, never a measured link."""

    KEEP = "keep"
    SAME_GPU = "same_gpu"
    SAME_NODE = "same_node"
    CROSS_NODE = "cross_node"
    HOST_CACHE = "host_cache"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class HostCache:
    """The host memory of a rank's process."""

    rank: GlobalRank


@dataclass(frozen=True)
class Checkpoint:
    """The model's files."""


Source = PoolSlot | HostCache | Checkpoint


@dataclass(frozen=True)
class Found:
    """A new copy and its source; `fresh` when the source is a copy of the same wave, listed before."""

    held: Held
    kind: CopyClass
    source: Source
    fresh: bool


class SourceFinder:
    """Sources for the waves of one plan; among equally near ranks the one that has been read least is taken."""

    def __init__(
        self,
        node_of_rank: Mapping[int, Hashable],
        host_cached: Mapping[int, Collection[tuple[int, int]]],
        checkpoint: bool,
    ) -> None:
        self._node = node_of_rank
        self._cached = {rank: frozenset(pairs) for rank, pairs in host_cached.items()}
        self._checkpoint = checkpoint
        self._reads: Counter[int] = Counter()

    def find(self, layer: int, published: Iterable[Held], arrivals: Sequence[Held]) -> list[Found]:
        """A source for each arrival, sources before their readers. `PlacementError` naming an expert without one."""
        wanted: dict[int, list[Held]] = {}
        for held in arrivals:
            wanted.setdefault(held.expert, []).append(held)
        holders: dict[int, list[Held]] = {expert: [] for expert in wanted}
        for held in published:
            if held.expert in holders:
                holders[held.expert].append(held)
        return [
            found
            for expert, targets in wanted.items()
            for found in self._for_expert(layer, expert, holders[expert], targets)
        ]

    def _for_expert(self, layer: int, expert: int, holders: list[Held], targets: list[Held]) -> list[Found]:
        found: list[Found] = []
        by_rank: dict[int, tuple[Held, bool]] = {}
        by_node: dict[Hashable, list[tuple[Held, bool]]] = {}

        def offer(held: Held, fresh: bool) -> None:
            if held.rank not in by_rank:
                by_rank[held.rank] = (held, fresh)
                by_node.setdefault(self._node[held.rank], []).append((held, fresh))

        def copy(target: Held, kind: CopyClass, source: Held, fresh: bool) -> None:
            self._reads[source.rank] += 1
            slot = PoolSlot(GlobalRank(source.rank), layer, source.pool_slot)
            found.append(Found(target, kind, slot, fresh))
            offer(target, True)

        for held in holders:
            offer(held, False)
        remaining = list(targets)
        if not by_rank:
            first, kind, source = self._outside(layer, expert, remaining)
            remaining.remove(first)
            found.append(Found(first, kind, source, False))
            offer(first, True)
        # Nearest first; within a class a slot that is resident already, so that nothing waits without need.
        for target in sorted(remaining, key=lambda held: self._distance(held.rank, by_rank, by_node)):
            node = by_node.get(self._node[target.rank])
            if target.rank in by_rank:
                copy(target, CopyClass.SAME_GPU, *by_rank[target.rank])
            elif node:
                copy(target, CopyClass.SAME_NODE, *min(node, key=self._strain))
            else:
                copy(target, CopyClass.CROSS_NODE, *min(by_rank.values(), key=self._strain))
        return found

    def _distance(self, rank: int, by_rank: Mapping[int, object], by_node: Mapping[Hashable, object]) -> int:
        if rank in by_rank:
            return 0
        return 1 if self._node[rank] in by_node else 2

    def _strain(self, source: tuple[Held, bool]) -> tuple[bool, int]:
        held, fresh = source
        return fresh, self._reads[held.rank]

    def _outside(self, layer: int, expert: int, targets: list[Held]) -> tuple[Held, CopyClass, Source]:
        """The first copy of an expert that no pool slot holds: by a rank that caches it, else near one, else any."""
        caches = sorted(rank for rank, pairs in self._cached.items() if (layer, expert) in pairs)
        if caches:
            nodes = {self._node.get(rank): rank for rank in reversed(caches)}
            for held in targets:
                if held.rank in caches:
                    return held, CopyClass.HOST_CACHE, HostCache(GlobalRank(held.rank))
            for held in targets:
                if self._node[held.rank] in nodes:
                    return held, CopyClass.HOST_CACHE, HostCache(GlobalRank(nodes[self._node[held.rank]]))
            return targets[0], CopyClass.HOST_CACHE, HostCache(GlobalRank(caches[0]))
        if self._checkpoint:
            return targets[0], CopyClass.CHECKPOINT, Checkpoint()
        raise PlacementError(
            f"layer {layer}: expert {expert} is in no pool slot and no host cache, and there is no disk"
        )
