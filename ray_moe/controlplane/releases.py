"""The release registry: how a release comes into service and leaves it (specification 0x0C, 0x0DC, 0x0EA).

    build -> verify -> load -> shadow -> canary -> promote -> finalise        the prior is held until the last of them
    stop_new_dispatch -> activate_prior -> (leases come back) -> release_graphs -> retire -> complete

Pure: no I/O and no clock. The controller does what `due` says, and tells the registry.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray_moe.controlplane.bundles import bundle_digest, carried_by, mismatches, require_loadable
from ray_moe.controlplane.generations import PlacementRegistry
from ray_moe.controlplane.promotion import PromotionReport
from ray_moe.controlplane.release_states import (
    LEAVING,
    Due,
    Note,
    ReleaseRecord,
    ShadowComparison,
    Stage,
    State,
    advance,
    has_happened,
    leave,
)
from ray_moe.controlplane.resident import Release, ResidentReleases
from ray_moe.errors import GenerationError, ReleaseError
from ray_moe.placement import PlacementSnapshot, ReleaseBundle

GONE_REMEMBERED = 16  # how many releases that have left `status` still shows


class ReleaseRegistry(ResidentReleases):
    """The releases of one cluster, from bundle to retirement.

    An event that has happened already is no error and no second record, so that effects may be retried; one that comes
    early raises `ReleaseError`, whose `reason` says what is missing. What changes a release takes a `Note` for the log.
    """

    # -- from a bundle to a release that serves

    def build(self, bundle: ReleaseBundle, note: Note) -> ReleaseRecord:
        """Take a bundle in (`bundles.build` binds it to its evidence). Reason known_release for an id that was used."""
        if bundle.release_id in self._releases:
            raise ReleaseError("known_release", f"release {bundle.release_id} exists: another bundle takes another id")
        placements = PlacementRegistry(final_after_steps=self._final_after_steps, numbers=self._numbers)
        self._releases[bundle.release_id] = Release(bundle, placements)
        return self._record("build", bundle.release_id, note, bundle_digest(bundle))

    def verify(self, release_id: str, recomputed: ReleaseBundle, note: Note) -> ReleaseRecord:
        """`recomputed` was built again from the same evidence. Reason reject_build names the fields that drifted."""
        release = self._require_next(release_id, "verify")
        drifted = mismatches(release.bundle, carried_by(recomputed))
        if drifted:
            told, names = "; ".join(map(str, drifted)), tuple(one.field for one in drifted)
            raise ReleaseError("reject_build", f"release {release_id}: {told}", names)
        self._step_on(release_id, "verify")
        return self._record("verify", release_id, note)

    def load(
        self, release_id: str, snapshot: PlacementSnapshot, observed: Mapping[int, ReleaseBundle], note: Note
    ) -> ReleaseRecord:
        """The release is resident on every peer of `snapshot`, each of which observes `observed[rank]`.

        Reason reject_load names every rank and field that differs; `GenerationError` for an unverified slot, and for a
        generation that any release has had.
        """
        release = self._require_next(release_id, "load")
        require_loadable(release.bundle, snapshot, observed)
        evidence = self._add_generation(release, snapshot, release.bundle)
        self._step_on(release_id, "load")
        return self._record("load", release_id, note, "", snapshot.generation, evidence)

    def shadow(self, release_id: str, note: Note) -> ReleaseRecord:
        """From here on it is leased for sampled steps, beside the release that serves."""
        self._require_next(release_id, "shadow")
        self._step_on(release_id, "shadow")
        return self._record("shadow", release_id, note)

    def canary(self, release_id: str, compared: ShadowComparison, note: Note) -> ReleaseRecord:
        """From here on it is leased for a share of the steps.

        Reason block_canary with mismatches between the shadow's outputs and the serving release's, or without samples.
        """
        self._require_next(release_id, "canary")
        if compared.samples < 1 or compared.mismatches:
            raise ReleaseError(
                "block_canary",
                f"release {release_id}: {compared.mismatches} of {compared.samples} shadow outputs differ "
                f"by {compared.rule}",
            )
        self._step_on(release_id, "canary")
        return self._record("canary", release_id, note, f"{compared.samples} shadow samples agree by {compared.rule}")

    def promote(self, release_id: str, report: PromotionReport, note: Note) -> ReleaseRecord:
        """It takes new dispatches; the release that did drains, held as the way back.

        Reasons: not_promoted, naming the failed checks; other_release for another's report; prior_not_final while the
        serving release still has a way back of its own.
        """
        candidate = self._require_next(release_id, "promote")
        self._require_passed(release_id, report)
        if self._dispatching is None:
            raise ReleaseError("no_active_release", f"release {release_id}: no release serves that it could follow")
        prior = self._release(self._dispatching)
        if prior.prior is not None and not prior.final:
            raise ReleaseError(
                "prior_not_final",
                f"release {self._dispatching} is not final: {prior.prior} is still held for it",
            )
        prior.state, prior.began = advance(self._dispatching, prior.state, "stop"), note
        prior.stopped_generation, prior.held_for = prior.placements.stop_dispatch(held=True), release_id
        for event in ("stop_new_dispatch", "activate_prior"):
            prior.stage = leave(self._dispatching, prior.stage, event)
        candidate.prior, candidate.promoted_step = self._dispatching, self._step
        self._step_on(release_id, "promote")
        self._dispatching = release_id
        record = self._record("promote", release_id, note, f"after {candidate.prior}, which is held")
        prior.records["stop_new_dispatch"] = prior.records["activate_prior"] = record  # what has stopped it
        return record

    def finalise(self, release_id: str, report: PromotionReport, note: Note) -> ReleaseRecord:
        """Its promotion is final: the prior release is not held any more, and leaves once it has drained.

        `report` covers steps after the promotion; reason early_report otherwise, and not_promoted as `promote` has it.
        """
        release = self._release(release_id)
        if release.state is not State.ACTIVE or release.prior is None:
            raise ReleaseError("not_promoted", f"release {release_id} is {release.state} and has no prior to let go")
        self._require_passed(release_id, report)
        begun = min(cell.window.first_step for cell in report.evidence.cells)
        if release.promoted_step is not None and begun <= release.promoted_step:
            raise ReleaseError(
                "early_report",
                f"release {release_id} was promoted after step {release.promoted_step}, the report begins at {begun}",
            )
        if release.final:
            return release.records["finalise"]
        prior = self._release(release.prior)
        assert prior.stopped_generation is not None
        prior.placements.release_hold(prior.stopped_generation)
        prior.held_for, prior.began, release.final = None, note, True
        record = self._record("finalise", release_id, note, f"{release.prior} is not held any more")
        self._settle()
        return record

    def launch(
        self, bundle: ReleaseBundle, snapshot: PlacementSnapshot, observed: Mapping[int, ReleaseBundle], note: Note
    ) -> ReleaseRecord:
        """The first release of a cluster, through every state: nothing serves that it could be compared with.

        Reason not_first when another release is there; else as `build` and `load`, and then no release is left behind.
        """
        release_id = bundle.release_id
        if self._releases:
            raise ReleaseError("not_first", f"release {release_id} follows {', '.join(self._releases)}")
        self.build(bundle, note)
        try:
            self.verify(release_id, bundle, note)
            self.load(release_id, snapshot, observed, note)
        except GenerationError:
            del self._releases[release_id]
            raise
        for event in ("shadow", "canary", "promote"):
            self._step_on(release_id, event)
        self._dispatching = release_id
        return self._record("launch", release_id, note, "the first release: no other serves beside it")

    # -- how a release leaves

    def stop_new_dispatch(self, release_id: str, note: Note, *, across_checkpoints: bool = False) -> ReleaseRecord:
        """The fence that begins a rollback: no lease on the candidate from here on.

        It may be in any state before DRAINING; one that never was active is withdrawn in the same order. Reasons:
        prior_not_loaded when no other release could take over; other_checkpoint when requests have begun under it and
        the prior serves another checkpoint, unless the caller says that they may go on there.
        """
        candidate = self._release(release_id)
        if has_happened(candidate.stage, "stop_new_dispatch"):
            return candidate.records["stop_new_dispatch"]
        name = self._way_back(release_id, candidate, across_checkpoints)
        candidate.stage = leave(release_id, candidate.stage, "stop_new_dispatch")
        candidate.prior, candidate.began = name, note
        if candidate.placements.live():
            candidate.placements.stop_dispatch(held=False)
        if candidate.state is State.ACTIVE:
            candidate.state = advance(release_id, candidate.state, "stop")
            self._dispatching = None
        return self._record("stop_new_dispatch", release_id, note, f"in favour of {name}")

    def activate_prior(
        self, release_id: str, note: Note, fresh: tuple[PlacementSnapshot, ReleaseBundle] | None = None
    ) -> ReleaseRecord:
        """The prior of a stopped candidate takes new dispatches: an operation of its own on what was held, no edge.

        Its held generation does, or a `fresh` one (and what it runs as) when the group has changed since: reason
        other_group. Reason not_stopped before the fence.
        """
        candidate = self._release(release_id)
        if has_happened(candidate.stage, "activate_prior"):
            return candidate.records["activate_prior"]
        following = leave(release_id, candidate.stage, "activate_prior")
        assert candidate.prior is not None
        generation = self._reactivate(candidate, self._release(candidate.prior), fresh)
        candidate.stage = following
        detail = f"{candidate.prior} takes new dispatches"
        record = self._record("activate_prior", release_id, note, detail, generation)
        self._settle()
        return record

    def release_graphs(self, release_id: str, note: Note) -> ReleaseRecord:
        """No peer has a binding of the release any more.

        Reasons not_stopped, prior_not_active, live_handles, and held while it is a way back.
        """
        return self._leave(release_id, "release_graphs", note)

    def retire(self, release_id: str, note: Note) -> tuple[PlacementSnapshot, ...]:
        """Take the release out of service; returns the snapshots whose slots may be freed, until it is `complete`.

        Reasons as `release_graphs`, and graphs_not_released.
        """
        release = self._release(release_id)
        if has_happened(release.stage, "retire"):
            return release.freed
        if self._recovering:
            raise ReleaseError(
                "unknown_leases", f"release {release_id}: the leases are not rebuilt after a restart yet"
            )
        self._leave(release_id, "retire", note)
        if release.state is State.DRAINING:
            self._step_on(release_id, "retire")
        else:
            release.withdrawn = True  # it was never active, and the table knows no way out for it
        release.freed = release.placements.live()
        for snapshot in release.freed:
            release.placements.release_hold(snapshot.generation)
            release.placements.retire(snapshot.generation)
        return release.freed

    def complete(self, release_id: str, note: Note) -> ReleaseRecord:
        """Its slots are free. Reason not_retired, and those of the steps before."""
        record = self._leave(release_id, "complete", note)
        self._release(release_id).freed = ()
        gone = [name for name, one in self._releases.items() if one.stage is Stage.COMPLETE and name != release_id]
        for name in gone[
            : 1 - GONE_REMEMBERED
        ]:  # never this one, however long ago it was built: who asked looks for it
            del self._releases[name]
        return record

    def due(self) -> tuple[Due, ...]:
        """What every leaving release waits for; the controller does it, again if need be, and tells this registry."""
        return tuple(
            Due(
                release_id=name,
                event=LEAVING[one.stage][0],
                generations=tuple(snapshot.generation for snapshot in one.freed or one.placements.live()),
                holders=one.holders,
            )
            for name, one in self._releases.items()
            if one.stage in LEAVING and one.stage is not Stage.STAYING and one.held_for is None
        )

    # -- details

    def _require_next(self, release_id: str, event: str) -> Release:
        release = self._release(release_id)
        if release.stage is not Stage.STAYING:
            raise ReleaseError("is_leaving", f"release {release_id} is {release.stage}: event {event!r} comes too late")
        advance(release_id, release.state, event)
        return release

    def _require_passed(self, release_id: str, report: PromotionReport) -> None:
        if report.release_id != release_id:
            raise ReleaseError("other_release", f"the report is on {report.release_id}, asked for was {release_id}")
        if not report.promote:
            failed = ", ".join(report.failed_checks)
            raise ReleaseError("not_promoted", f"release {release_id}: failed {failed}", report.failed_checks)

    def _way_back(self, release_id: str, candidate: Release, across_checkpoints: bool) -> str:
        """The release that takes over from a candidate that stops."""
        name = candidate.prior if candidate.state is State.ACTIVE else self._dispatching
        prior = self._releases.get(name or "")
        loaded = prior is not None and (prior.held_for == release_id or name == self._dispatching)
        if name is None or prior is None or not loaded or name == release_id:
            raise ReleaseError("prior_not_loaded", f"release {release_id} has no loaded release to go back to")
        theirs, own = prior.bundle.checkpoint_version, candidate.bundle.checkpoint_version
        begun = candidate.state in (State.CANARY, State.ACTIVE)  # a shadow's outputs reach nobody
        if begun and theirs != own and not across_checkpoints:
            raise ReleaseError(
                "other_checkpoint",
                f"release {name} serves checkpoint {theirs}, {release_id} {own}: going back must be asked for",
                ("checkpoint_version",),
            )
        return name

    def _reactivate(
        self, candidate: Release, prior: Release, fresh: tuple[PlacementSnapshot, ReleaseBundle] | None
    ) -> int:
        """Returns the generation for new dispatches. A candidate that never was active leaves its prior as it is."""
        if self._dispatching is not None:
            return self.active().generation
        assert prior.stopped_generation is not None
        if fresh is not None:
            self._add_generation(prior, *fresh)
            prior.placements.release_hold(prior.stopped_generation)
        else:
            held, now = prior.placements.require_live(prior.stopped_generation), candidate.placements.live()[-1]
            if held.group != now.group:
                raise ReleaseError(
                    "other_group",
                    f"generation {held.generation} of release {held.release_id} is for epoch {held.group.epoch}, the "
                    f"cluster is in epoch {now.group.epoch}: it needs a fresh generation",
                    ("process_group_generation",),
                )
            prior.placements.reactivate(prior.stopped_generation)
        prior.state, prior.stage = State.ACTIVE, Stage.STAYING  # no edge of either table
        prior.held_for = prior.stopped_generation = prior.began = None
        self._dispatching = prior.bundle.release_id
        return prior.placements.active().generation

    def _leave(self, release_id: str, event: str, note: Note) -> ReleaseRecord:
        release = self._release(release_id)
        if has_happened(release.stage, event):
            return release.records[event]
        if release.held_for is not None:
            raise ReleaseError("held", f"release {release_id} is the way back of {release.held_for}: {event} waits")
        holders = f"; held by {', '.join(release.holders)}" if release.holders else ""
        release.stage = leave(release_id, release.stage, event, holders)
        return self._record(event, release_id, note)
