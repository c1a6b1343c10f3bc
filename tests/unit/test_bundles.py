"""Bundles: bound to their evidence, complete, and compared field by field before anything loads."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from ray_moe.controlplane.bundles import (
    COORDINATE_OF,
    COORDINATES,
    FOLLOWS_GENERATION,
    ReleaseError,
    build,
    bundle_digest,
    carried_by,
    generation_evidence,
    mismatches,
    report_digest,
    require_loadable,
)
from ray_moe.controlplane.layouts import expert_layout, group_generation
from ray_moe.placement import ReleaseBundle
from tests.releases import bundle_of, observed, snapshot_of

SNAPSHOT = snapshot_of(1)
BUNDLE = bundle_of(SNAPSHOT)
REPORTS = {"parity.json": b"{}", "faults.json": b"[]"}
FIELDS = [item.name for item in dataclasses.fields(ReleaseBundle)]


def other(field: str) -> Any:
    """Another value of the field's own type."""
    value = getattr(BUNDLE, field)
    if isinstance(value, tuple):
        return (*value, value[0]) if field == "upstream_report_digests" else (("else", "where"),)
    return dataclasses.replace(value, value="other") if dataclasses.is_dataclass(value) else f"other {value}"


# -- Building


def test_every_field_is_of_a_coordinate_but_the_id_and_the_evidence() -> None:
    assert [name for name in FIELDS if name not in COORDINATE_OF] == ["release_id", "upstream_report_digests"]
    assert set(FOLLOWS_GENERATION) < set(COORDINATES)


# An identity is never empty by type, and a release may rest on no report.
@pytest.mark.parametrize(
    "field", [name for name in FIELDS if isinstance(getattr(BUNDLE, name), str)] + ["phase_backends"]
)
def test_a_bundle_that_leaves_something_unstated_is_not_built(field: str) -> None:
    value = getattr(BUNDLE, field)
    with pytest.raises(ReleaseError, match=f"^reject_build: .* does not state {field}") as refused:
        build(dataclasses.replace(BUNDLE, **{field: type(value)()}), {})
    assert refused.value.mismatched == (field,)


def test_a_bundle_binds_the_digest_of_every_report_in_one_order() -> None:
    built = build(BUNDLE, REPORTS)
    assert built.upstream_report_digests == (report_digest("faults.json", b"[]"), report_digest("parity.json", b"{}"))
    assert built == build(BUNDLE, dict(reversed(REPORTS.items())))
    assert bundle_digest(built) != bundle_digest(build(BUNDLE, {"parity.json": b"{}"}))


@pytest.mark.parametrize(
    ("reports", "names", "message"),
    [
        ({**REPORTS, "parity.json": b"{ }"}, ("parity.json",), "report parity.json was 44136fa.*, is "),
        ({"parity.json": b"{}"}, ("faults.json",), "report faults.json is missing"),
        ({**REPORTS, "extra.json": b""}, ("extra.json",), "report extra.json was not reviewed"),
    ],
)
def test_evidence_that_changed_since_its_review_refuses_the_build(
    reports: dict[str, bytes], names: tuple[str, ...], message: str
) -> None:
    pinned = build(BUNDLE, REPORTS).upstream_report_digests
    assert build(BUNDLE, REPORTS, pinned).upstream_report_digests == pinned
    with pytest.raises(ReleaseError, match=f"^reject_build: release release-1: {message}") as refused:
        build(BUNDLE, reports, pinned)
    assert refused.value.mismatched == names


@pytest.mark.parametrize("field", FIELDS)
def test_a_change_of_any_field_is_another_bundle(field: str) -> None:
    changed = dataclasses.replace(BUNDLE, **{field: other(field)})
    assert bundle_digest(changed) != bundle_digest(BUNDLE)
    (found,) = mismatches(BUNDLE, carried_by(changed))
    assert (found.field, found.coordinate) == (field, COORDINATE_OF.get(field, field))
    assert mismatches(BUNDLE, {field: getattr(BUNDLE, field)}) == ()


def test_the_order_of_roles_says_nothing_and_an_unknown_field_is_refused() -> None:
    turned = dataclasses.replace(BUNDLE, precision_roles=BUNDLE.precision_roles[::-1])
    assert mismatches(BUNDLE, carried_by(turned)) == ()
    with pytest.raises(ReleaseError, match=r"^unknown_coordinate: a bundle has no weather"):
        mismatches(BUNDLE, {"weather": "fine"})
    # A bare text is no checkpoint version, whatever it spells.
    assert mismatches(BUNDLE, {"checkpoint_version": BUNDLE.checkpoint_version.value}) != ()


def test_a_refusal_travels_between_processes_whole() -> None:
    error = ReleaseError("reject_load", "rank 1 differs", ["route_abi"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason, again.mismatched) == (str(error), "reject_load", ("route_abi",))


# -- Loading


@pytest.mark.parametrize("field", FIELDS)
def test_one_peer_that_differs_in_one_field_refuses_the_load(field: str) -> None:
    seen = observed(SNAPSHOT) | {1: dataclasses.replace(BUNDLE, **{field: other(field)})}
    with pytest.raises(ReleaseError, match=f"^reject_load: release release-1 cannot load: rank 1: {field} is") as found:
        require_loadable(BUNDLE, SNAPSHOT, seen)
    assert found.value.mismatched == (field,)
    require_loadable(BUNDLE, SNAPSHOT, observed(SNAPSHOT))


def test_a_peer_that_has_not_reported_refuses_the_load() -> None:
    with pytest.raises(ReleaseError, match="rank 0 has not reported"):
        require_loadable(BUNDLE, SNAPSHOT, {1: BUNDLE})


def test_every_peer_and_field_that_differs_is_named_at_once() -> None:
    seen = {
        0: dataclasses.replace(BUNDLE, route_abi="ray_moe.routes/2"),
        1: dataclasses.replace(BUNDLE, checkpoint_digest="c", topology_version="t"),
    }
    with pytest.raises(
        ReleaseError, match=r"rank 0: route_abi is .*; rank 1: checkpoint_digest is c, .*; rank 1: topo"
    ):
        require_loadable(BUNDLE, SNAPSHOT, seen)


def test_a_placement_other_than_the_bundles_refuses_the_load() -> None:
    moved = snapshot_of(1, homes=((0, 1), (1, 0), (0, 0)))
    with pytest.raises(ReleaseError, match="its placement: placement_digest is") as refused:
        require_loadable(BUNDLE, moved, observed(moved, BUNDLE))
    assert refused.value.mismatched == ("placement_digest",)


# -- Generations of one release


@pytest.mark.parametrize("field", FIELDS)
def test_a_generation_changes_where_experts_are_and_nothing_else(field: str) -> None:
    changed = dataclasses.replace(BUNDLE, **{field: other(field)})
    if COORDINATE_OF.get(field) not in FOLLOWS_GENERATION:
        with pytest.raises(ReleaseError, match=r"^takes_new_release: .* takes a new release") as refused:
            generation_evidence(BUNDLE, changed, SNAPSHOT)
        assert refused.value.mismatched == (COORDINATE_OF.get(field, field),)
    elif field in ("process_group_generation", "graph_manifest_digest"):  # "other ..." has the same etp
        assert getattr(generation_evidence(BUNDLE, changed, SNAPSHOT), field) == getattr(changed, field)
    else:  # what the snapshot itself says
        with pytest.raises(ReleaseError, match=f"^other_placement: .*{field} is"):
            generation_evidence(BUNDLE, changed, SNAPSHOT)


def test_a_group_generation_names_group_epoch_and_how_it_divides_experts() -> None:
    spec = snapshot_of(1, epoch=3).group
    assert group_generation(spec, expert_layout(spec.peers)) == "ep-group-0-e3-ep2-etp1"
    assert group_generation(spec, expert_layout(spec.peers, etp=2)) == "ep-group-0-e3-ep1-etp2"
