"""Parallel layouts: which rank sits where along each axis, and what one physical expert is (specification 0x0B).

A product of axis sizes says how many ranks a layout covers and nothing else. Groups follow from coordinates; what a
slot holds follows from ETP; the bytes between two layouts follow from a manifest of shards, or are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from math import prod

from ray_moe.errors import EvidenceError, PlacementError, ReleaseError
from ray_moe.evidence import LogicalBytes
from ray_moe.identity import GlobalRank
from ray_moe.placement import PlacementSnapshot
from ray_moe.topology import GroupKind, ProcessGroupSpec, TopologyGroups

# Axes of the experts' grid, fastest first.
EXPERT_AXES = ("etp", "ep", "edp", "pp")
UNKNOWN_REDISTRIBUTION = "unknown_without_per_rank_shard_manifest"


@dataclass(frozen=True)
class ParallelLayout:
    """Ranks as a grid. `axes` are (name, size), the fastest first: rank `ranks[i]` has the coordinates of number i.

    Raises `PlacementError` for a size below 1, an axis or rank given twice, and ranks that the sizes do not cover.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[GlobalRank, ...]

    def __post_init__(self) -> None:
        names, sizes = [name for name, _ in self.axes], [size for _, size in self.axes]
        if len(set(names)) < len(names) or len(set(self.ranks)) < len(self.ranks):
            raise PlacementError(f"axes and ranks must be distinct, found {names} and {_text(self.ranks)}")
        if min(sizes, default=0) < 1 or prod(sizes) != len(self.ranks):
            raise PlacementError(f"axes {dict(self.axes)} cover {prod(sizes)} ranks, there are {len(self.ranks)}")

    def size(self, axis: str) -> int:
        return dict(self.axes)[axis]

    @cached_property
    def coordinates(self) -> dict[GlobalRank, dict[str, int]]:
        """Coordinate by axis name, of each rank."""
        grid = product(*(range(size) for _, size in reversed(self.axes)))
        names = [name for name, _ in reversed(self.axes)]
        return {rank: dict(zip(names, at, strict=True)) for rank, at in zip(self.ranks, grid, strict=True)}

    def groups(self, axis: str) -> tuple[tuple[GlobalRank, ...], ...]:
        """The groups along `axis`: ranks that differ in that coordinate alone, in its order."""
        members: dict[tuple[int, ...], list[GlobalRank]] = {}
        for rank, at in self.coordinates.items():
            members.setdefault(tuple(place for name, place in at.items() if name != axis), []).append(rank)
        return tuple(sorted(tuple(group) for group in members.values()))

    @property
    def name(self) -> str:
        """For a process-group generation: two layouts with one product have two names."""
        return "-".join(f"{axis}{size}" for axis, size in reversed(self.axes) if axis in ("ep", "etp"))


def expert_layout(ranks: tuple[GlobalRank, ...], *, etp: int = 1) -> ParallelLayout:
    """The experts' grid over `ranks`: parts of one expert on neighbours, as `etp` says, and no copies of the grid."""
    return ParallelLayout((("etp", etp), ("ep", max(1, len(ranks) // etp)), ("edp", 1), ("pp", 1)), ranks)


def group_generation(spec: ProcessGroupSpec, layout: ParallelLayout) -> str:
    """A bundle's `process_group_generation`: group, epoch, and how it divides experts."""
    return f"{spec.process_group_id}-e{spec.epoch}-{layout.name}"


def require_layout(layout: ParallelLayout, groups: TopologyGroups, snapshot: PlacementSnapshot) -> None:
    """What a peer has joined and holds is this layout, group by group and slot by slot (0x0BA, 0x0BB).

    Raises `ReleaseError` reject_load naming process_groups when an expert-parallel or tensor-parallel communicator has
    other members or another order than the layout's coordinates give, and placement when a slot holds another part of
    an expert than ETP says.
    """
    joined = {
        "ep": _joined(groups, GroupKind.EXPERT_PARALLEL)
        or (_joined(groups, GroupKind.FULL_EXPERT_PARALLEL) if layout.size("etp") == 1 else ()),
        "etp": _joined(groups, GroupKind.TENSOR_PARALLEL) or (layout.groups("etp") if layout.size("etp") == 1 else ()),
    }
    for axis, found in joined.items():
        if found != layout.groups(axis):
            raise ReleaseError(
                "reject_load",
                f"{axis} groups of {layout.name} are {_lists(layout.groups(axis))}, joined were {_lists(found)}",
                ("process_groups",),
            )
    for placement in snapshot.layers:
        for slot in placement.slots:
            if slot.shard.count != layout.size("etp"):
                raise ReleaseError(
                    "reject_load",
                    f"layer {placement.layer} slot {slot.physical_slot_id} holds part {slot.shard.index} of "
                    f"{slot.shard.count} of expert {slot.logical_expert_id}, etp is {layout.size('etp')}",
                    ("placement",),
                )


# -- What only a manifest of shards can tell (0x0BC)


@dataclass(frozen=True)
class ShardManifest:
    """The seven things from which redistribution follows. Raises `EvidenceError` naming what is empty."""

    per_rank_shape_and_strides: str
    source_shard_dimension_and_coordinate: str
    destination_shard_dimension_and_coordinate: str
    replication_or_reduction: str
    dtype_and_scale_metadata: str
    padding_sequence_microbatch_shape: str
    peer_order_and_topology: str

    def __post_init__(self) -> None:
        empty = [item.name for item in fields(self) if not getattr(self, item.name)]
        if empty:
            raise EvidenceError(f"a shard manifest needs {', '.join(empty)}")


def redistribution(payload: LogicalBytes | None, manifest: ShardManifest | None) -> LogicalBytes | str:
    """What a report says of bytes between two layouts: a figure with its manifest, else that it is unknown.

    Raises `EvidenceError` for a figure that no manifest gives: sizes of groups give none.
    """
    if manifest is None:
        if payload is not None:
            raise EvidenceError(f"{payload.value} bytes of redistribution follow from no shard manifest")
        return UNKNOWN_REDISTRIBUTION
    if payload is None:
        raise EvidenceError("with a shard manifest redistribution is computed, not unknown")
    return payload


def require_releasable(layout: ParallelLayout, manifest: ShardManifest | None) -> None:
    """A layout of parts of experts stays blocked without its manifest: `ReleaseError` reject_build (0x0CA)."""
    if layout.size("etp") > 1 and manifest is None:
        raise ReleaseError(
            "reject_build",
            f"layout {layout.name} has no per-rank checkpoint-shard manifest",
            ("checkpoint", "placement"),
        )


def _joined(groups: TopologyGroups, kind: GroupKind) -> tuple[tuple[GlobalRank, ...], ...]:
    return tuple(sorted(binding.spec.peers for binding in groups.bindings if binding.kind is kind))


def _text(ranks: tuple[GlobalRank, ...]) -> str:
    return f"[{', '.join(map(str, ranks))}]"


def _lists(groups: tuple[tuple[GlobalRank, ...], ...]) -> str:
    return " ".join(map(_text, groups)) or "none"
