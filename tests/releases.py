"""Releases to test with: placements and bundles that belong together, evidence that passes, a registry in any state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ray_moe.controlplane.bundles import build, digest_of
from ray_moe.controlplane.layouts import expert_layout, group_generation
from ray_moe.controlplane.promotion import FAULTS, PromotionEvidence, PromotionPolicy, PromotionReport, evaluate
from ray_moe.controlplane.promotion import unsafe_faults as unsafe
from ray_moe.controlplane.ratios import Cell, Window
from ray_moe.controlplane.release_states import Note, ShadowComparison, State
from ray_moe.controlplane.releases import ReleaseRegistry
from ray_moe.evidence import Instrument, Measurement
from ray_moe.identity import CheckpointVersion
from ray_moe.placement import PlacementSnapshot, ReleaseBundle
from tests.layers import placement, spec_of

NOTE = Note("operator", 12.5, "a test")
COUNTED = Measurement(Instrument.GROUP_COUNTER, "every step of the window", "runs/counters.json")
SAME = ShadowComparison(samples=120, mismatches=0, rule="equal tokens")
POLICY = PromotionPolicy()
HOMES = ((0, 0), (1, 1), (0, 1))


def snapshot_of(
    generation: int,
    release_id: str = "release-1",
    *,
    epoch: int = 0,
    homes: Sequence[tuple[int, int]] = HOMES,
    checkpoint: str = "checkpoint-1",
    beside: int = 0,
) -> PlacementSnapshot:
    """Two experts on two ranks, expert 0 with a copy on each, unless `homes` says otherwise.

    `beside` moves everything that many storage slots on.
    """
    whole = placement(homes, spec_of([0, 1], epoch), generation=generation)
    version = CheckpointVersion(checkpoint)
    (layer,) = whole.layers
    slots = tuple(
        dataclasses.replace(slot, checkpoint_version=version, pool_slot=slot.pool_slot + beside) for slot in layer.slots
    )
    return dataclasses.replace(
        whole,
        release_id=release_id,
        checkpoint_version=version,
        layers=(dataclasses.replace(layer, slots=slots),),
    )


def bundle_of(snapshot: PlacementSnapshot, **changes: Any) -> ReleaseBundle:
    """What peers that run `snapshot` make of themselves."""
    bundle = ReleaseBundle(
        release_id=snapshot.release_id,
        checkpoint_version=snapshot.checkpoint_version,
        checkpoint_digest=f"digest of {snapshot.checkpoint_version}",
        placement_generation=snapshot.version.value,
        placement_digest=snapshot.digest,
        topology_version=snapshot.topology.version,
        process_group_generation=group_generation(snapshot.group, expert_layout(snapshot.group.peers)),
        route_abi="ray_moe.routes/1",
        dispatch_handle_abi="ray_moe.handle/1",
        precision_roles=(("dispatch", "bf16"), ("gate", "fp32")),
        phase_backends=(("prefill", "all_to_all_v+grouped"), ("decode", "padded_all_to_all+masked_decode")),
        graph_manifest_digest=digest_of([]),
    )
    return dataclasses.replace(build(bundle, {"parity.json": b"{}"}), **changes)


def observed(snapshot: PlacementSnapshot, bundle: ReleaseBundle | None = None) -> dict[int, ReleaseBundle]:
    return {rank.value: bundle or bundle_of(snapshot) for rank in snapshot.group.peers}


def cell_of(release_id: str = "release-1", **changes: Any) -> Cell:
    """A hundred decode steps that all replayed, and dropped nothing."""
    given: dict[str, Any] = {
        "release_id": release_id,
        "cell": "decode",
        "window": Window(0, 99),
        "measurement": COUNTED,
        "steps": 100,
        "attempted_routes": 800,
        "accepted_routes": 800,
        "dropped_routes": 0,
        "remote_routes": 400,
        "inter_node_routes": 0,
        "graph_replay_steps": 100,
        "graph_fallback_steps": 0,
    }
    return Cell(**{**given, **changes})


def evidence_of(release_id: str = "release-1", **changes: Any) -> PromotionEvidence:
    """Evidence that passes at the minimum of samples."""
    given: dict[str, Any] = {
        "release_id": release_id,
        "drifted": (),
        "mismatched": (),
        "unsafe_faults": unsafe(FAULTS),
        "rollback_rehearsed": True,
        "shadow_samples": 100,
        "canary_samples": 200,
        "cells": (cell_of(release_id),),
        "route_output_mismatches": 0,
        "stale_handle_acceptances": 0,
        "count_conservation_failures": 0,
    }
    return PromotionEvidence(**{**given, **changes})


def report_on(release_id: str, *, first_step: int = 0, **changes: Any) -> PromotionReport:
    cells = (cell_of(release_id, window=Window(first_step, first_step + 99)),)
    return evaluate(POLICY, evidence_of(release_id, **{"cells": cells, **changes}))


def serving(generation: int = 1, release_id: str = "release-1", **options: Any) -> ReleaseRegistry:
    """A registry whose first release serves."""
    registry = ReleaseRegistry(**{"final_after_steps": 0, **options})
    snapshot = snapshot_of(generation, release_id)
    registry.launch(bundle_of(snapshot), snapshot, observed(snapshot), NOTE)
    return registry


def bring(registry: ReleaseRegistry, snapshot: PlacementSnapshot, until: State = State.ACTIVE) -> str:
    """Walk the release of `snapshot` up to a state, as whoever rolls it out does."""
    name, bundle = snapshot.release_id, bundle_of(snapshot)
    steps = {
        State.BUILT: lambda: registry.build(bundle, NOTE),
        State.VERIFIED: lambda: registry.verify(name, bundle, NOTE),
        State.LOADED: lambda: registry.load(name, snapshot, observed(snapshot), NOTE),
        State.SHADOW: lambda: registry.shadow(name, NOTE),
        State.CANARY: lambda: registry.canary(name, SAME, NOTE),
        State.ACTIVE: lambda: registry.promote(name, report_on(name), NOTE),
    }
    for state, step in steps.items():
        step()
        if state is until:
            break
    return name


def fraction(pair: Sequence[int]) -> Fraction:
    return Fraction(*pair)
