"""The documents that people and tools write and read: placement, topology and release manifests.

This is an edge: pydantic checks what comes in, and the frozen records of `ray_moe.placement` go on from here. Every
refusal is one `ConfigError` on one line that names the field, the value and the bound.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ray_moe.errors import ConfigError
from ray_moe.identity import (
    CheckpointVersion,
    GlobalRank,
    LogicalExpertId,
    PhysicalSlotId,
    PlacementVersion,
    ProcessGroupId,
    ReplicaId,
)
from ray_moe.placement import LayerPlacement, PlacementSnapshot, ReleaseBundle, ShardCoordinate, Slot
from ray_moe.topology import Domain, GroupBinding, GroupKind, NicPath, ProcessGroupSpec, Topology, TopologyGroups

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser, where PyYAML was built with it
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_T = TypeVar("_T")
# JSON and YAML know only lists; the records hold tuples.
AsTuple = Annotated[tuple[_T, ...], BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Manifest(BaseModel):
    """A document: unknown fields, and values of another type than the field's, are refused rather than converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, values: object, source: str = "") -> Self:
        """The document with these values; `ConfigError` prefixed with `source` when it is not valid."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_one_line(error, cls, source)) from error

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Self:
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(_one_line(error, cls, source)) from error

    @classmethod
    def from_yaml(cls, text: str, source: str = "") -> Self:
        return cls.parse(read_yaml(text, source), source)

    def to_json(self, indent: int | None = 2) -> str:
        return self.model_dump_json(indent=indent, exclude_none=True)

    def to_yaml(self) -> str:
        return yaml.dump(self.model_dump(mode="json", exclude_none=True), Dumper=_Dumper, sort_keys=False)


# -- Topology manifest (specification 0x07A, 0x07G)


class NicManifest(Manifest):
    rank: Natural
    nic_id: str
    via_rank: Natural | None = None


class DomainManifest(Manifest):
    """One node. `relay_rank` is its first member, and its fabric and NICs are not stated, where they are left out."""

    domain_id: str
    member_ranks: AsTuple[Natural]
    relay_rank: Natural | None = None
    fabric_domain: str | None = None
    nics: AsTuple[NicManifest] | None = None


class GroupManifest(Manifest):
    """One group in one collective epoch; `peers` are global ranks in peer-slot order."""

    process_group_id: str
    kind: Annotated[GroupKind, Field(strict=False)]
    domain_id: str | None = None
    epoch: Natural
    peers: AsTuple[Natural]


class TopologyManifest(Manifest):
    """A topology as a document; with `groups`, those of one `collective_epoch`."""

    version: str
    domains: AsTuple[DomainManifest]
    collective_epoch: Natural | None = None
    groups: AsTuple[GroupManifest] | None = None

    @model_validator(mode="after")
    def _groups_have_an_epoch(self) -> Self:
        if self.groups is not None and self.collective_epoch is None:
            raise ValueError(f"collective_epoch: required with groups, of which there are {len(self.groups)}")
        return self

    @classmethod
    def from_topology(cls, topology: Topology, groups: TopologyGroups | None = None) -> TopologyManifest:
        """The document of a topology, and of groups bound to it."""
        return cls(
            version=topology.version,
            domains=tuple(map(_domain_document, topology.domains)),
            collective_epoch=None if groups is None else groups.epoch,
            groups=None if groups is None else tuple(map(_group_document, groups.bindings)),
        )

    def to_topology(self) -> Topology:
        """The frozen record; its own validation applies (`TopologyError`)."""
        return Topology(self.version, tuple(_domain_record(domain) for domain in self.domains))

    def to_groups(self) -> TopologyGroups:
        """The groups, checked against the topology (`TopologyError`); without `groups` there are none to bind."""
        bindings = tuple(_group_record(group) for group in self.groups or ())
        return TopologyGroups(self.to_topology(), self.collective_epoch or 0, bindings)


def _domain_document(domain: Domain) -> DomainManifest:
    nics = tuple(
        NicManifest(rank=path.rank.value, nic_id=path.nic_id, via_rank=_value(path.via)) for path in domain.nics
    )
    return DomainManifest(
        domain_id=domain.domain_id,
        member_ranks=tuple(rank.value for rank in domain.member_ranks),
        relay_rank=_value(domain.relay_rank),
        fabric_domain=domain.fabric_domain or None,
        nics=nics or None,
    )


def _domain_record(domain: DomainManifest) -> Domain:
    nics = tuple(NicPath(GlobalRank(nic.rank), nic.nic_id, _rank(nic.via_rank)) for nic in domain.nics or ())
    relay, fabric = _rank(domain.relay_rank), domain.fabric_domain or ""
    return Domain(domain.domain_id, _ranks(domain.member_ranks), relay, fabric, nics)


def _group_document(binding: GroupBinding) -> GroupManifest:
    return GroupManifest(
        process_group_id=binding.spec.process_group_id.value,
        kind=binding.kind,
        domain_id=binding.domain_id,
        epoch=binding.spec.epoch,
        peers=tuple(rank.value for rank in binding.spec.peers),
    )


def _group_record(group: GroupManifest) -> GroupBinding:
    spec = ProcessGroupSpec(ProcessGroupId(group.process_group_id), group.epoch, _ranks(group.peers))
    return GroupBinding(group.kind, spec, group.domain_id)


def _ranks(values: tuple[int, ...]) -> tuple[GlobalRank, ...]:
    return tuple(GlobalRank(value) for value in values)


def _value(rank: GlobalRank | None) -> int | None:
    return None if rank is None else rank.value


def _rank(value: int | None) -> GlobalRank | None:
    return None if value is None else GlobalRank(value)


# -- Placement manifest (specification 0x02B2)


class ShardManifest(Manifest):
    index: Natural = 0
    count: Positive = 1


class SlotManifest(Manifest):
    """One physical slot. `checkpoint_version` is written only in a file whose slots could disagree about it."""

    physical_slot_id: str
    logical_expert_id: Natural
    replica_id: str
    destination_rank: Natural
    topology_domain_id: str
    checkpoint_version: str | None = None
    parameter_digest: str
    pool_slot: Natural
    shard: ShardManifest = ShardManifest()


class LayerManifest(Manifest):
    layer: Natural
    num_logical_experts: Positive
    slots: AsTuple[SlotManifest]


class PlacementManifest(Manifest):
    """One placement generation as a document. `member_ranks` are in peer-slot order; slots in manifest order."""

    placement_version: str
    generation: Natural
    state: Literal["ACTIVE", "DRAINING", "RETIRED"]
    process_group_id: str
    epoch: Natural
    member_ranks: AsTuple[Natural]
    checkpoint_version: str
    release_id: str
    in_flight_refcount: Natural
    topology: TopologyManifest
    layers: AsTuple[LayerManifest]

    @classmethod
    def from_snapshot(cls, snapshot: PlacementSnapshot, *, state: str, in_flight_refcount: int) -> PlacementManifest:
        """`state` and `in_flight_refcount` are the registry's: a snapshot itself never changes."""
        layers = [
            {
                "layer": placement.layer,
                "num_logical_experts": placement.num_logical_experts,
                "slots": [_slot_document(slot) for slot in placement.slots],
            }
            for placement in snapshot.layers
        ]
        return cls.parse(
            {
                "placement_version": snapshot.version.value,
                "generation": snapshot.generation,
                "state": str(state),
                "process_group_id": snapshot.group.process_group_id.value,
                "epoch": snapshot.group.epoch,
                "member_ranks": [rank.value for rank in snapshot.group.peers],
                "checkpoint_version": snapshot.checkpoint_version.value,
                "release_id": snapshot.release_id,
                "in_flight_refcount": in_flight_refcount,
                "topology": TopologyManifest.from_topology(snapshot.topology),
                "layers": layers,
            }
        )

    def to_snapshot(self) -> PlacementSnapshot:
        """The frozen record; its own validation applies (`CompatibilityError`, `PlacementError`)."""
        layers = tuple(
            LayerPlacement(
                layer.layer,
                layer.num_logical_experts,
                tuple(_slot_record(slot, self.checkpoint_version) for slot in layer.slots),
            )
            for layer in self.layers
        )
        return PlacementSnapshot(
            version=PlacementVersion(self.placement_version),
            generation=self.generation,
            release_id=self.release_id,
            checkpoint_version=CheckpointVersion(self.checkpoint_version),
            group=ProcessGroupSpec(ProcessGroupId(self.process_group_id), self.epoch, _ranks(self.member_ranks)),
            topology=self.topology.to_topology(),
            layers=layers,
        )


def _slot_document(slot: Slot) -> dict[str, Any]:
    return {
        "physical_slot_id": slot.physical_slot_id.value,
        "logical_expert_id": slot.logical_expert_id.value,
        "replica_id": slot.replica_id.value,
        "destination_rank": slot.destination_rank.value,
        "topology_domain_id": slot.topology_domain_id,
        "parameter_digest": slot.parameter_digest,
        "pool_slot": slot.pool_slot,
        "shard": {"index": slot.shard.index, "count": slot.shard.count},
    }


def _slot_record(slot: SlotManifest, checkpoint_version: str) -> Slot:
    return Slot(
        physical_slot_id=PhysicalSlotId(slot.physical_slot_id),
        logical_expert_id=LogicalExpertId(slot.logical_expert_id),
        replica_id=ReplicaId(slot.replica_id),
        destination_rank=GlobalRank(slot.destination_rank),
        topology_domain_id=slot.topology_domain_id,
        checkpoint_version=CheckpointVersion(
            checkpoint_version if slot.checkpoint_version is None else slot.checkpoint_version
        ),
        parameter_digest=slot.parameter_digest,
        pool_slot=slot.pool_slot,
        shard=ShardCoordinate(slot.shard.index, slot.shard.count),
    )


# -- Release manifest (specification 0x0CA)


class ReleaseManifest(Manifest):
    """A release bundle as a document; roles and backends are mappings here and keep their order."""

    release_id: str
    checkpoint_version: str
    checkpoint_digest: str
    placement_generation: str
    placement_digest: str
    topology_version: str
    process_group_generation: str
    route_abi: str
    dispatch_handle_abi: str
    precision_roles: dict[str, str]
    phase_backends: dict[str, str]
    graph_manifest_digest: str = ""
    upstream_report_digests: AsTuple[str] = ()

    @classmethod
    def from_bundle(cls, bundle: ReleaseBundle) -> ReleaseManifest:
        """Raises `ConfigError` when a role or a phase comes twice: the document could hold only one of them."""
        values = {name: getattr(bundle, name) for name in cls.model_fields}
        values["checkpoint_version"] = bundle.checkpoint_version.value
        for name in ("precision_roles", "phase_backends"):
            values[name] = _unique(values[name], f"release {bundle.release_id}: {name}")
        return cls.parse(values)

    def to_bundle(self) -> ReleaseBundle:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values["checkpoint_version"] = CheckpointVersion(self.checkpoint_version)
        values["precision_roles"] = tuple(self.precision_roles.items())
        values["phase_backends"] = tuple(self.phase_backends.items())
        return ReleaseBundle(**values)


def _unique(pairs: Sequence[tuple[str, str]], field: str) -> dict[str, str]:
    for position, (key, value) in enumerate(pairs):
        if key in dict(pairs[:position]):
            raise ConfigError(f"{field}: {key!r} is given twice: {dict(pairs[:position])[key]!r} and {value!r}")
    return dict(pairs)


# -- Reading text, wording refusals


def read_yaml(text: str, source: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # PyYAML's own text spans lines and quotes the file
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source + ': ' if source else ''}not valid YAML{where}: {problem}") from error
    except (ValueError, RecursionError) as error:  # a date or a number that is none, or lists too deep
        raise ConfigError(f"{source + ': ' if source else ''}not valid YAML: {error}") from error


def _one_line(error: ValidationError, document: type[BaseModel], source: str) -> str:
    """`peers: found 0, input should be greater than or equal to 1; ...`"""
    reasons = []
    for issue in error.errors(include_url=False):
        field = ".".join(str(part) for part in issue["loc"])
        found, bound = shown(issue["input"]), issue["msg"][:1].lower() + issue["msg"][1:]
        if issue["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, document.model_fields, n=1)
            reasons.append(f"{field}: no such field (value {found})" + (f", did you mean {near[0]}?" if near else ""))
        elif issue["type"] == "missing":
            reasons.append(f"{field}: required, but not given")
        elif issue["type"] == "value_error":
            text = str(issue["ctx"]["error"])
            reasons.append(text if text.startswith(field) else f"{field}: {text}")
        else:
            reasons.append(f"{field}: found {found}, {bound}" if field else f"found {found}, {bound}")
    return (f"{source}: " if source else "") + "; ".join(reasons).replace("\n", " ")


def shown(value: object) -> str:
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
