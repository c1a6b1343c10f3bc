"""What ranks counted under a candidate release, as the evidence that its promotion rests on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from ray_moe.controlplane.promotion import PromotionEvidence, unsafe_faults
from ray_moe.controlplane.ratios import Cell, Window
from ray_moe.evidence import Instrument, Measurement


@dataclass(frozen=True)
class Did:
    """What one release did, exact totals: see `ray_moe.engine.state.ReleaseTally`. Routes are those of its layers, by
    their origin; `replays` and `fallbacks` are layer invocations of decode units that could have replayed. Audited
    invocations with `mismatches`, `stale_handles` that were combined and invocations that were `unconserved` are as
    `ray_moe.dataplane.counters.RouteTally` counts them."""

    steps: int = 0
    first_step: int = -1
    last_step: int = -1
    tokens: int = 0
    shadow_steps: int = 0
    compared: int = 0
    differing: int = 0
    broken: int = 0
    max_difference: float = 0.0
    faults: int = 0
    routes: int = 0
    remote_routes: int = 0
    replays: int = 0
    fallbacks: int = 0
    dropped_routes: int = 0
    inter_node_routes: int = 0
    mismatches: int = 0
    stale_handles: int = 0
    unconserved: int = 0

    def since(self, before: Did, step: int) -> Did:
        """What was done after `step`, when `before` had been."""
        changes = {
            item.name: getattr(self, item.name) - getattr(before, item.name)
            for item in fields(Did)
            if item.name not in ("first_step", "last_step", "max_difference")
        }
        return Did(**changes, first_step=step + 1, last_step=self.last_step, max_difference=self.max_difference)


@dataclass(frozen=True)
class Drill:
    """What was tried on the candidate before it served: faults that did not end safely, and whether the ordered
    rollback went through."""

    unsafe_faults: tuple[str, ...]
    rollback_rehearsed: bool

    @staticmethod
    def of(control: Mapping[str, str], peers: Iterable[Mapping[str, str]], *, rehearsed: bool) -> Drill:
        """What the control plane refused, what each peer did, and the rollback on a copy of the registry."""
        safe = {"F10": "roll_back_to_prior_generation" if rehearsed else "accepted"} | dict(control)
        unsafe = {fault for found in peers for fault in unsafe_faults({**safe, **found})}
        return Drill(tuple(sorted(unsafe)), rehearsed)


def sum_of(several: Iterable[Did]) -> Did:
    """All ranks together; they run the same steps, so that these are not added up."""
    parts = list(several)
    if not parts:
        return Did()
    alike = ("steps", "shadow_steps")
    begun = [part.first_step for part in parts if part.first_step >= 0]
    sums = {
        item.name: sum(getattr(part, item.name) for part in parts)
        for item in fields(Did)
        if item.name not in (*alike, "first_step", "last_step", "max_difference")
    }
    return Did(
        **sums,
        **{name: max(getattr(part, name) for part in parts) for name in alike},
        first_step=min(begun, default=-1),
        last_step=max(part.last_step for part in parts),
        max_difference=max(part.max_difference for part in parts),
    )


def evidence_of(release_id: str, did: Did, drill: Drill | None, whole: Did) -> PromotionEvidence:
    """`did` is the window that the cells are about, `whole` everything that the candidate has done.

    Digests and manifests were compared when it was loaded, which it would not have passed otherwise.
    """
    cells: tuple[Cell, ...] = ()
    if did.steps > 0 and did.last_step >= did.first_step >= 0:
        counted = Measurement(
            Instrument.GROUP_COUNTER, "every step under the release, on every rank", "peers' counters"
        )
        graph_steps = min(did.steps, did.replays + did.fallbacks)
        replayed = graph_steps * did.replays // max(1, did.replays + did.fallbacks)
        cells = (
            Cell(
                release_id=release_id,
                cell="live",
                window=Window(did.first_step, did.last_step),
                measurement=counted,
                steps=did.steps,
                attempted_routes=did.routes,
                accepted_routes=did.routes - did.dropped_routes,
                dropped_routes=did.dropped_routes,
                remote_routes=did.remote_routes,
                inter_node_routes=did.inter_node_routes,
                graph_replay_steps=replayed,
                graph_fallback_steps=graph_steps - replayed,
            ),
        )
    return PromotionEvidence(
        release_id=release_id,
        drifted=(),
        mismatched=(),
        unsafe_faults=drill.unsafe_faults if drill is not None else ("no drill",),
        rollback_rehearsed=drill is not None and drill.rollback_rehearsed,
        shadow_samples=whole.compared,
        canary_samples=did.tokens,
        cells=cells,
        route_output_mismatches=did.mismatches,
        stale_handle_acceptances=did.stale_handles,
        # A unit that could not be run may have failed for its counts.
        count_conservation_failures=max(did.faults, did.unconserved),
    )
