"""The axis fixture (0x0B): groups from coordinates, the expert unit as identity, bytes that nobody guesses."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ray_moe.controlplane.layouts import (
    EXPERT_AXES,
    UNKNOWN_REDISTRIBUTION,
    ParallelLayout,
    ShardManifest,
    expert_layout,
    redistribution,
    require_layout,
    require_releasable,
)
from ray_moe.errors import EvidenceError, PlacementError, ReleaseError
from ray_moe.evidence import LogicalBytes
from ray_moe.identity import GlobalRank, ProcessGroupId
from ray_moe.placement import PlacementSnapshot, ShardCoordinate, Slot
from ray_moe.topology import GroupBinding, GroupKind, ProcessGroupSpec, TopologyGroups
from tests.layers import placement, spec_of

FIXTURE = json.loads((Path(__file__).parent / "data" / "parallel_axes.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
RANKS = tuple(map(GlobalRank, INPUTS["global_ranks"]))
LAYOUTS: dict[str, dict[str, Any]] = {layout["layout"]: layout for layout in INPUTS["layouts"]}
ATTENTION_AXES = ("tp", "cp", "dp", "pp")


def experts(name: str, ranks: tuple[GlobalRank, ...] = RANKS) -> ParallelLayout:
    sizes = LAYOUTS[name]["moe"]
    return ParallelLayout(tuple((axis, sizes[axis]) for axis in EXPERT_AXES), ranks)


ACTIVE, CANDIDATE = experts("active"), experts("candidate")
ATTENTION = ParallelLayout(tuple((axis, LAYOUTS["active"]["attention"][axis]) for axis in ATTENTION_AXES), RANKS)


def numbers(groups: tuple[tuple[GlobalRank, ...], ...]) -> list[list[int]]:
    return [[rank.value for rank in group] for group in groups]


def joined(layout: ParallelLayout, snapshot: PlacementSnapshot, **other: list[list[int]]) -> TopologyGroups:
    """What peers of a layout join; `other` says which groups of an axis they join instead."""
    kinds = {"ep": GroupKind.EXPERT_PARALLEL, "etp": GroupKind.TENSOR_PARALLEL}
    bindings = [
        GroupBinding(kind, ProcessGroupSpec(ProcessGroupId(f"{axis}-{number}"), 0, tuple(map(GlobalRank, ranks))))
        for axis, kind in kinds.items()
        for number, ranks in enumerate(other.get(axis, numbers(layout.groups(axis))))
    ]
    return TopologyGroups(snapshot.topology, 0, tuple(bindings))


def whole() -> PlacementSnapshot:
    """One complete copy of an expert on each rank."""
    return placement([(expert, expert) for expert in range(4)], spec_of(range(4)), generation=19)


def sharded() -> PlacementSnapshot:
    """Two experts in two parts each, one over each ETP group."""
    snapshot = placement([(0, 0), (0, 1), (1, 2), (1, 3)], spec_of(range(4)), generation=20)
    (layer,) = snapshot.layers
    slots = tuple(
        dataclasses.replace(slot, shard=ShardCoordinate(index, 2), parameter_digest=f"{slot.parameter_digest}.{index}")
        for slot, index in zip(layer.slots, (0, 1, 0, 1), strict=True)
    )
    return dataclasses.replace(snapshot, layers=(dataclasses.replace(layer, slots=slots),))


def test_both_layouts_cover_four_ranks_and_have_other_groups() -> None:
    for name, layout in (("active", ACTIVE), ("candidate", CANDIDATE)):
        assert len(layout.ranks) == prod(LAYOUTS[name]["moe"].values()) == EXPECTED["moe_world_ranks"][name]
        assert len(ATTENTION.ranks) == prod(LAYOUTS[name]["attention"].values()) == EXPECTED["attention_world_ranks"]
        for axis in ("ep", "etp"):
            assert numbers(layout.groups(axis)) == EXPECTED[name][f"{axis}_groups"]
    coordinates = [[CANDIDATE.coordinates[rank][axis] for axis in ("ep", "etp")] for rank in RANKS]
    assert coordinates == EXPECTED["candidate"]["coordinates_ep_etp_by_rank"]
    assert numbers(CANDIDATE.groups("edp")) == DERIVED["edp_groups_candidate"]
    assert numbers(ATTENTION.groups("tp")) == DERIVED["attention_tp_groups"]
    assert numbers(ATTENTION.groups("dp")) == DERIVED["attention_dp_groups"]
    assert (ACTIVE.name, CANDIDATE.name) == ("ep4-etp1", "ep2-etp2")
    assert (expert_layout(RANKS), expert_layout(RANKS, etp=2)) == (ACTIVE, CANDIDATE)


@pytest.mark.parametrize("sizes", list(product((1, 2, 3), (1, 2), (1, 2))))
def test_groups_of_an_axis_partition_the_ranks_and_meet_those_of_another_in_one(sizes: tuple[int, int, int]) -> None:
    etp, ep, edp = sizes
    ranks = tuple(map(GlobalRank, range(etp * ep * edp)))
    layout = ParallelLayout((("etp", etp), ("ep", ep), ("edp", edp)), ranks)
    for axis, size in layout.axes:
        assert {len(group) for group in layout.groups(axis)} == {size}
        assert sorted(rank for group in layout.groups(axis) for rank in group) == list(ranks)
    for one, other in product(layout.groups("ep"), layout.groups("etp")):
        assert len(set(one) & set(other)) <= 1


def test_a_layout_that_does_not_cover_its_ranks_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"axes .* cover 6 ranks, there are 4"):
        ParallelLayout((("etp", 2), ("ep", 3)), RANKS)
    with pytest.raises(PlacementError, match="axes and ranks must be distinct"):
        ParallelLayout((("ep", 2), ("ep", 2)), RANKS)
    with pytest.raises(PlacementError, match="cover 0 ranks"):
        ParallelLayout((("ep", 0),), ())


def test_each_layout_loads_on_its_own_groups_and_expert_unit() -> None:
    assert EXPECTED["active"]["physical_expert_unit"] == "complete_copy_per_rank"
    assert EXPECTED["candidate"]["physical_expert_unit"] == "copy_sharded_over_etp_group"
    require_layout(ACTIVE, joined(ACTIVE, whole()), whole())
    require_layout(CANDIDATE, joined(CANDIDATE, sharded()), sharded())
    full = TopologyGroups(
        whole().topology, 0, (GroupBinding(GroupKind.FULL_EXPERT_PARALLEL, whole().group),)
    )  # what a cluster of whole experts joins
    require_layout(ACTIVE, full, whole())


def test_placement_v19_is_not_reused_for_the_candidate() -> None:
    assert EXPECTED["placement_v19_reusable_for_candidate"] is False
    with pytest.raises(ReleaseError, match=r"^reject_load: layer 0 slot q0 holds part 0 of 1 of expert 0, etp is 2"):
        require_layout(CANDIDATE, joined(CANDIDATE, whole()), whole())


def test_the_identity_of_a_part_has_its_shard_digest_and_group_beyond_that_of_a_whole_copy() -> None:
    carried = {item.name for item in dataclasses.fields(Slot)}
    assert {"logical_expert_id", "destination_rank", "parameter_digest"} < set(EXPECTED["complete_copy_identity"])
    names = {"replica_rank": "replica_id", "shard_coordinate": "shard", "shard_digest": "parameter_digest"}
    mapped = {names.get(name, name) for name in EXPECTED["complete_copy_identity"]}
    assert mapped <= carried
    # ETP group and collective generation are the group's: the snapshot carries its id and epoch for all slots.
    scope = {"etp_group", "collective_generation"}
    assert {names.get(name, name) for name in EXPECTED["sharded_copy_identity"]} - scope <= carried
    assert {"group"} <= {item.name for item in dataclasses.fields(PlacementSnapshot)}


def test_redistribution_is_unknown_without_the_seven_fields() -> None:
    assert redistribution(None, None) == EXPECTED["attention_to_moe_redistribution_bytes"] == UNKNOWN_REDISTRIBUTION
    fields = {item.name: "stated" for item in dataclasses.fields(ShardManifest)}
    printed = [name.replace(" vs ", "_or_") for name in EXPECTED["redistribution_manifest_fields"]]
    assert list(fields) == printed
    assert redistribution(LogicalBytes(24), ShardManifest(**fields)) == LogicalBytes(24)
    for name in fields:
        with pytest.raises(EvidenceError, match=f"a shard manifest needs {name}"):
            ShardManifest(**{**fields, name: ""})
    with pytest.raises(EvidenceError, match="computed, not unknown"):
        redistribution(None, ShardManifest(**fields))
    require_releasable(CANDIDATE, ShardManifest(**fields))
