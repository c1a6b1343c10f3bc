"""Release bundles: built with their evidence, compared coordinate by coordinate, refused by name (0x0C, 0x0CA).

A release is one compatibility object: checkpoint, placement, topology, process groups, ABIs, dtype roles, phase
backends and graph manifests belong together. Nothing here reads a file: whoever asks brings the bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ray_moe.errors import ReleaseError
from ray_moe.placement import PlacementSnapshot, ReleaseBundle

# The eight coordinates of a release and the bundle's fields that state them, in the order of specification 0x0C.
COORDINATES: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("checkpoint_version", "checkpoint_digest"),
    "placement": ("placement_generation", "placement_digest"),
    "topology": ("topology_version",),
    "process_groups": ("process_group_generation",),
    "abis": ("route_abi", "dispatch_handle_abi"),
    "dtype_roles": ("precision_roles",),
    "phase_backends": ("phase_backends",),
    "graph_manifests": ("graph_manifest_digest",),
}
COORDINATE_OF: Mapping[str, str] = {field: name for name, stated in COORDINATES.items() for field in stated}

# What a new generation of the same release may change: where experts are, and what names placement and group.
FOLLOWS_GENERATION = ("placement", "topology", "process_groups", "graph_manifests")

_FIELDS = tuple(item.name for item in fields(ReleaseBundle))


def digest_of(document: Any) -> str:
    """SHA-256 of a JSON document in canonical form, for example of the graph manifests, as plain mappings."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def bundle_digest(bundle: ReleaseBundle) -> str:
    """One digest over everything that the bundle binds; its evidence is part of it."""
    return digest_of(asdict(bundle))


# -- Building


def report_digest(name: str, content: bytes) -> str:
    """How a bundle names an upstream report: "NAME:SHA-256"."""
    return f"{name}:{hashlib.sha256(content).hexdigest()}"


def build(bundle: ReleaseBundle, reports: Mapping[str, bytes], pinned: Sequence[str] | None = None) -> ReleaseBundle:
    """`bundle` bound to the reports that it rests on: for a running system the files and records of its evidence.

    `pinned` are the report digests that were reviewed. Raises `ReleaseError` reject_build when a report has changed, is
    missing or is new since then, and when the bundle leaves a coordinate unstated.
    """
    unstated = [name for name in _FIELDS if name != "upstream_report_digests" and not getattr(bundle, name)]
    if unstated:
        where = f"release {bundle.release_id or '(without id)'}"
        raise ReleaseError("reject_build", f"{where} does not state {', '.join(unstated)}", unstated)
    found = tuple(report_digest(name, reports[name]) for name in sorted(reports))
    if pinned is not None:
        _require_pinned(bundle.release_id, found, pinned)
    return replace(bundle, upstream_report_digests=found)


def _require_pinned(release_id: str, found: Sequence[str], pinned: Sequence[str]) -> None:
    now, then = (dict(one.rsplit(":", 1) for one in digests) for digests in (found, pinned))
    problems = dict.fromkeys(then.keys() - now.keys(), "is missing")
    problems |= dict.fromkeys(now.keys() - then.keys(), "was not reviewed")
    problems |= {
        name: f"was {then[name]}, is {now[name]}" for name in then.keys() & now.keys() if then[name] != now[name]
    }
    if problems:
        told = "; ".join(f"report {name} {problems[name]}" for name in sorted(problems))
        raise ReleaseError("reject_build", f"release {release_id}: {told}", sorted(problems))


# -- Comparing


@dataclass(frozen=True)
class Mismatch:
    """A field of a bundle that somebody carries with another value."""

    field: str
    expected: object
    found: object

    @property
    def coordinate(self) -> str:
        """The release's coordinate that the field states; for its id and its evidence the field itself."""
        return COORDINATE_OF.get(self.field, self.field)

    def __str__(self) -> str:
        return f"{self.field} is {self.found}, the release's is {self.expected}"


def carried_by(bundle: ReleaseBundle) -> dict[str, object]:
    """All fields of a bundle, as `mismatches` takes them."""
    return {name: getattr(bundle, name) for name in _FIELDS}


def mismatches(bundle: ReleaseBundle, carried: Mapping[str, object]) -> tuple[Mismatch, ...]:
    """The fields that an object (handle, snapshot, graph, a peer) carries with other values than `bundle`.

    What it does not carry is not compared. Raises `ReleaseError` unknown_coordinate for a field that no bundle has.
    """
    unknown = [name for name in carried if name not in _FIELDS]
    if unknown:
        raise ReleaseError("unknown_coordinate", f"a bundle has no {', '.join(unknown)}", unknown)
    return tuple(
        Mismatch(name, getattr(bundle, name), carried[name])
        for name in _FIELDS
        if name in carried and not _equal(getattr(bundle, name), carried[name])
    )


def _equal(one: object, other: object) -> bool:
    """Roles and backends are mappings in all but type: their order says nothing."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return sorted(one) == sorted(other)
    return type(one) is type(other) and one == other


def require_loadable(bundle: ReleaseBundle, snapshot: PlacementSnapshot, observed: Mapping[int, ReleaseBundle]) -> None:
    """What every peer really runs is this release, and every peer of the group has said so.

    `observed` is by global rank: the bundle that the peer makes of its own checkpoint, placement, group, ABIs, roles,
    backends and graphs. Raises `ReleaseError` reject_load naming each rank and field that differs.
    """
    ranks = [rank.value for rank in snapshot.group.peers]
    silent = [rank for rank in ranks if rank not in observed]
    found = {rank: mismatches(bundle, carried_by(observed[rank])) for rank in ranks if rank in observed}
    told = [f"rank {rank} has not reported" for rank in silent]
    told += [f"rank {rank}: {one}" for rank, several in found.items() for one in several]
    told += [f"its placement: {one}" for one in mismatches(bundle, carried_by_placement(snapshot))]
    if told:
        names = [one.field for several in found.values() for one in several]
        names += [one.field for one in mismatches(bundle, carried_by_placement(snapshot))]
        detail = f"release {bundle.release_id} cannot load: {'; '.join(told)}"
        raise ReleaseError("reject_load", detail, tuple(dict.fromkeys(names)))


def carried_by_placement(snapshot: PlacementSnapshot) -> dict[str, object]:
    """The release coordinates that a placement carries (0x0CB)."""
    return {
        "release_id": snapshot.release_id,
        "checkpoint_version": snapshot.checkpoint_version,
        "placement_generation": snapshot.version.value,
        "placement_digest": snapshot.digest,
        "topology_version": snapshot.topology.version,
    }


# -- A generation inside a release


@dataclass(frozen=True)
class GenerationEvidence:
    """Why a generation is no new release: what was compared and stayed the same, and how many slots were verified."""

    generation: int
    placement_digest: str
    process_group_generation: str
    topology_version: str
    graph_manifest_digest: str
    verified_slots: int
    unchanged: tuple[str, ...]


def _etp(process_group_generation: str) -> str:
    """Into how many parts a group's generation says that it cuts an expert; "" where it says nothing."""
    found = re.search(r"-etp(\d+)$", process_group_generation)
    return found[1] if found else ""


def generation_evidence(
    release: ReleaseBundle, bundle: ReleaseBundle, snapshot: PlacementSnapshot
) -> GenerationEvidence:
    """The evidence that `snapshot`, which runs as `bundle`, is another generation of `release`.

    Raises `ReleaseError` takes_new_release naming the coordinates that a generation cannot change, and
    other_placement when `bundle` does not describe `snapshot`.
    """
    may_change = [name for coordinate in FOLLOWS_GENERATION for name in COORDINATES[coordinate]]
    fixed = {name: value for name, value in carried_by(bundle).items() if name not in may_change}
    changed = mismatches(release, fixed)
    groups = release.process_group_generation, bundle.process_group_generation
    if _etp(groups[0]) != _etp(groups[1]):  # more or fewer peers are a generation, parts of experts are not (0x0BB)
        changed += (Mismatch("process_group_generation", *groups),)
    where = f"generation {snapshot.generation} of release {release.release_id}"
    if changed:
        names = tuple(dict.fromkeys(one.coordinate for one in changed))
        told = "; ".join(map(str, changed))
        raise ReleaseError("takes_new_release", f"{where}: {told}: {', '.join(names)} takes a new release", names)
    other = mismatches(bundle, carried_by_placement(snapshot))
    if other:
        told, names = "; ".join(map(str, other)), tuple(one.field for one in other)
        raise ReleaseError("other_placement", f"{where}: {told}", names)
    return GenerationEvidence(
        generation=snapshot.generation,
        placement_digest=snapshot.digest,
        process_group_generation=bundle.process_group_generation,
        topology_version=bundle.topology_version,
        graph_manifest_digest=bundle.graph_manifest_digest,
        verified_slots=sum(bool(slot.parameter_digest) for layer in snapshot.layers for slot in layer.slots),
        unchanged=tuple(fixed),
    )
