"""Drills on a copy of the registry: the ordered rollback, and the faults that the control plane must refuse (0x0E)."""

from __future__ import annotations

from dataclasses import replace

from ray_moe.controlplane.bundles import build, require_loadable
from ray_moe.controlplane.release_states import Note, ReleaseStatus, ShadowComparison, Stage
from ray_moe.controlplane.releases import ReleaseRegistry
from ray_moe.errors import ReleaseError
from ray_moe.placement import PlacementSnapshot, ReleaseBundle

_NOTE = Note("drill", 0.0, "rehearsed on a copy")


def rehearsed(copy: ReleaseRegistry, release_id: str) -> bool:
    """Whether a candidate that is loaded leaves in the printed order, and the release that serves is left as it was."""
    before = copy.active()
    lease = None
    try:
        copy.shadow(release_id, _NOTE)
        lease = copy.acquire("drill", release_id=release_id)
    except ReleaseError:
        pass  # it is further than that already
    copy.stop_new_dispatch(release_id, _NOTE, across_checkpoints=True)
    copy.activate_prior(release_id, _NOTE)
    if lease is not None:
        try:
            copy.release_graphs(release_id, _NOTE)
            return False
        except ReleaseError as error:
            if error.reason != "live_handles":
                return False
        copy.release(lease)
    if _of(copy, release_id).stage is not Stage.DRAINED:
        return False
    copy.release_graphs(release_id, _NOTE)
    copy.retire(release_id, _NOTE)
    copy.complete(release_id, _NOTE)
    return copy.active() == before


def control_faults(bundle: ReleaseBundle, snapshot: PlacementSnapshot) -> dict[str, str]:
    """What becomes of a drifted report, another group generation, and runners that disagree."""
    found = {
        "F01": _refusal(lambda: build(bundle, {"config.json": b"drifted"}, bundle.upstream_report_digests)),
    }
    other = replace(bundle, process_group_generation=f"{bundle.process_group_generation}-other")
    ranks = [rank.value for rank in snapshot.group.peers]
    found["F02"] = _refusal(lambda: require_loadable(bundle, snapshot, dict.fromkeys(ranks, other)))
    return found


def disagreement(copy: ReleaseRegistry, release_id: str) -> str:
    """F08 on a copy in which the candidate is loaded."""
    copy.shadow(release_id, _NOTE)
    return _refusal(lambda: copy.canary(release_id, ShadowComparison(100, 1, "equal tokens"), _NOTE))


def _refusal(act: object) -> str:
    try:
        act()  # type: ignore[operator]
    except ReleaseError as error:
        return error.reason
    return "accepted"


def _of(copy: ReleaseRegistry, release_id: str) -> ReleaseStatus:
    return next(status for status in copy.status() if status.release_id == release_id)
