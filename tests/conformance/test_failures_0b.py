"""Parallel axes in the failure lab of 0x0BE, and 0x0BB: what a layout is, made wrong at load or in a report."""

from __future__ import annotations

import dataclasses

import pytest

from ray_moe.controlplane.bundles import generation_evidence
from ray_moe.controlplane.generations import PlacementRegistry
from ray_moe.controlplane.layouts import expert_layout, group_generation, redistribution, require_layout
from ray_moe.controlplane.promotion import PromotionPolicy, evaluate
from ray_moe.dataplane.dispatch import Dispatcher
from ray_moe.dataplane.plan import SlotMap
from ray_moe.errors import EvidenceError, GenerationError, PlacementError, ReleaseError, StaleHandleError, TopologyError
from ray_moe.evidence import LogicalBytes
from ray_moe.identity import GlobalRank
from tests.conformance.test_lifecycle import HEADER, HIDDEN_TD, alone, bound
from tests.conformance.test_parallel_axes_fixture import ACTIVE, CANDIDATE, RANKS, joined, numbers, sharded, whole
from tests.layers import CPU
from tests.releases import NOTE, bundle_of, cell_of, evidence_of, observed, serving, snapshot_of


def test_fl_0be_01_layouts_of_one_product_are_not_interchanged() -> None:
    assert len(ACTIVE.ranks) == len(CANDIDATE.ranks) == 4
    with pytest.raises(ReleaseError, match=r"^reject_load: ep groups of ep2-etp2 are \[0, 2\] \[1, 3\], joined were"):
        require_layout(CANDIDATE, joined(ACTIVE, whole()), whole())
    with pytest.raises(ReleaseError, match=r"ep groups of ep4-etp1 are \[0, 1, 2, 3\], joined were \[0, 2\] \[1, 3\]"):
        require_layout(ACTIVE, joined(CANDIDATE, sharded()), sharded())
    # A release loads by name too: the coordinate of equal products differs.
    spec = whole().group
    bundles = [
        bundle_of(whole(), process_group_generation=group_generation(spec, each)) for each in (ACTIVE, CANDIDATE)
    ]
    registry = serving(1)
    registry.build(dataclasses.replace(bundles[0], release_id="release-2"), NOTE)
    registry.verify("release-2", dataclasses.replace(bundles[0], release_id="release-2"), NOTE)
    moved = dataclasses.replace(whole(), release_id="release-2")
    with pytest.raises(ReleaseError) as refused:
        registry.load("release-2", moved, observed(moved, bundles[1]), NOTE)
    assert "process_group_generation" in refused.value.mismatched


def test_fl_0be_02_groups_of_neighbours_are_not_taken_for_an_axis() -> None:
    neighbours = [[0, 1], [2, 3]]
    with pytest.raises(TopologyError, match=r"axes_share_two_ranks: groups \[0, 1\], \[0, 1\] meet in more than one"):
        joined(CANDIDATE, sharded(), ep=neighbours)
    with pytest.raises(ReleaseError, match=r"ep groups of ep2-etp2 are .*, joined were \[0, 1\] \[2, 3\]") as refused:
        require_layout(CANDIDATE, joined(CANDIDATE, sharded(), ep=neighbours, etp=[[0, 2], [1, 3]]), sharded())
    assert refused.value.mismatched == ("process_groups",)
    # The right members in another order are another coordinate system.
    with pytest.raises(ReleaseError, match=r"joined were \[1, 3\] \[2, 0\]"):
        require_layout(CANDIDATE, joined(CANDIDATE, sharded(), ep=[[2, 0], [1, 3]]), sharded())
    assert numbers(CANDIDATE.groups("etp")) == neighbours


def test_fl_0be_03_a_placement_is_not_reused_when_etp_has_changed() -> None:
    with pytest.raises(ReleaseError, match=r"layer 0 slot q0 holds part 0 of 1 of expert 0, etp is 2") as refused:
        require_layout(CANDIDATE, joined(CANDIDATE, whole()), whole())
    assert refused.value.mismatched == ("placement",)
    # As the next generation of the release it is refused as well: the unit is part of a placement's identity.
    registry = PlacementRegistry()
    registry.publish(whole())
    with pytest.raises(
        GenerationError, match="generation 20 has expert parts 2, the active one 1: that takes a new rel"
    ):
        registry.publish(sharded())
    assert registry.active().generation == 19


def test_fl_0be_04_combine_refuses_groups_of_another_generation() -> None:
    seat, handle = Dispatcher(HEADER, alone()), bound()
    rows = seat.dispatch(HIDDEN_TD, handle)
    seat.transport = alone(epoch=1)
    with pytest.raises(
        StaleHandleError, match=r"combine of handle .*: bound to group ep-group-0 epoch 0, the transport"
    ):
        seat.combine(rows)
    seat.header = dataclasses.replace(HEADER, epoch=1)
    with pytest.raises(StaleHandleError, match=r"combine of handle .*: its epoch is 0, the scope's is 1"):
        seat.combine(rows)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'epoch'"):
        type(HEADER)(
            **{item.name: getattr(HEADER, item.name) for item in dataclasses.fields(HEADER) if item.name != "epoch"}
        )


def test_fl_0be_05_redistribution_is_no_figure_of_group_sizes() -> None:
    guessed = LogicalBytes(len(RANKS) * 24)  # a hidden row for each rank
    with pytest.raises(EvidenceError, match="96 bytes of redistribution follow from no shard manifest"):
        redistribution(guessed, None)
    assert redistribution(None, None) == "unknown_without_per_rank_shard_manifest"


def test_fl_0be_06_one_phases_evidence_does_not_promote_a_layout_for_all() -> None:
    policy = PromotionPolicy(must_cover=(("phase", "prefill"), ("phase", "decode"), ("ep_etp_layout", ACTIVE.name)))
    prefill = cell_of(cell="prefill", axes=(("phase", "prefill"), ("ep_etp_layout", ACTIVE.name)))
    report = evaluate(policy, evidence_of(cells=(prefill,)))
    assert report.failed_checks == ("coverage: phase=decode",)
    decode = cell_of(axes=(("phase", "decode"), ("ep_etp_layout", ACTIVE.name)))
    assert evaluate(policy, evidence_of(cells=(prefill, decode))).promote


def test_px_0bb_01_a_slot_keeps_its_number_and_not_its_unit() -> None:
    old, new = whole(), sharded()
    assert [slot.physical_slot_id for slot in old.layers[0].slots] == [
        slot.physical_slot_id for slot in new.layers[0].slots
    ]
    registry = PlacementRegistry()
    registry.publish(old)
    with pytest.raises(GenerationError, match="expert parts 2, the active one 1: that takes a new release"):
        registry.publish(new)
    # A part is not compiled as if it were a whole expert.
    with pytest.raises(PlacementError, match="slot q0 holds part 0 of 2 of an expert; whole experts are dispatched"):
        SlotMap.compile(new, new.layers[0], GlobalRank(0), CPU)
    # And another layout of the same ranks is another coordinate of the bundle.
    grown = snapshot_of(2)
    other = bundle_of(
        grown, process_group_generation=group_generation(grown.group, expert_layout(grown.group.peers, etp=2))
    )
    with pytest.raises(
        ReleaseError, match=r"^takes_new_release: .*ep1-etp2, the release's is ep-group-0-e0-ep2-etp1"
    ) as no:
        generation_evidence(bundle_of(snapshot_of(1)), other, grown)
    assert no.value.mismatched == ("process_groups",)
