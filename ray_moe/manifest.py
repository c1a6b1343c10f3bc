"""The files that people and tools write and read: cluster configuration, placement manifest, release manifest.

This is an edge: pydantic checks what comes in, and the frozen records of `ray_moe.placement` go on from here. Every
refusal is one `ConfigError` on one line that names the field, the value and the bound.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
from ray_moe.topology import Domain, ProcessGroupSpec, Topology

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser, where PyYAML was built with it
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_T = TypeVar("_T")
# JSON and YAML know only lists; the records hold tuples.
_Tuple = Annotated[tuple[_T, ...], BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)]
_Natural = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0)]

_REPLICA = re.compile(r"(\*|-?\d+)\s*:\s*(-?\d+)\s*=\s*(-?\d+)", re.ASCII)


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
        return cls.parse(_read_yaml(text, source), source)

    def to_json(self, indent: int | None = 2) -> str:
        return self.model_dump_json(indent=indent, exclude_none=True)

    def to_yaml(self) -> str:
        return yaml.dump(self.model_dump(mode="json", exclude_none=True), Dumper=_Dumper, sort_keys=False)


# -- Cluster configuration


class ReplicaRequest(Manifest):
    """`count` copies in all (the first one included) of a logical expert, in one layer or in every MoE layer ("*")."""

    layer: Annotated[int | Literal["*"], BeforeValidator(lambda given: _layer_from(given))]
    expert: _Natural
    count: _Positive


def parse_replicas(text: str) -> tuple[ReplicaRequest, ...]:
    """Read "LAYER:EXPERT=COUNT,..."; LAYER may be "*" for every MoE layer. An empty text asks for nothing.

    >>> parse_replicas("0:3=2")
    (ReplicaRequest(layer=0, expert=3, count=2),)
    """
    requests = []
    for part in (part.strip() for part in text.split(",")) if text.strip() else ():
        match = _REPLICA.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"replicas: {part!r} is not LAYER:EXPERT=COUNT in whole numbers, for example 0:3=2 or *:3=2"
            )
        layer, expert, count = match.groups()
        values = {"layer": layer if layer == "*" else int(layer), "expert": int(expert), "count": int(count)}
        requests.append(ReplicaRequest.parse(values, f"replicas {part!r}"))
    return tuple(requests)


def expand_replicas(requests: Iterable[ReplicaRequest], layers: Iterable[int]) -> dict[tuple[int, int], int]:
    """Copies by (layer, expert), with "*" written out over `layers`; a layer named by number wins over "*".

    Raises `ConfigError` when two requests name the same layer and expert. Whether these exist is the solver's check.
    """
    asked: dict[tuple[int | str, int], int] = {}
    for request in requests:
        if (request.layer, request.expert) in asked:
            raise ConfigError(f"replicas: layer {request.layer} expert {request.expert} is asked for twice")
        asked[request.layer, request.expert] = request.count
    layers = tuple(layers)
    everywhere = {(layer, expert): count for (at, expert), count in asked.items() if at == "*" for layer in layers}
    return everywhere | {(at, expert): count for (at, expert), count in asked.items() if isinstance(at, int)}


class ClusterConfig(Manifest):
    """Everything that `ray-moe up` decides. Times are seconds; `spare_slots` are per peer and MoE layer."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "default"
    model: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    trust_remote_code: bool = False
    peers: _Positive = 4
    spare_slots: _Natural = 0
    replicas: Annotated[
        _Tuple[ReplicaRequest],
        BeforeValidator(lambda given: parse_replicas(given) if isinstance(given, str) else given),
    ] = ()
    cpus_per_peer: Annotated[float, Field(ge=0)] = 0.25

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    kv_blocks: _Positive = 512
    block_size: _Positive = 16
    max_prefill_tokens: _Positive = 256
    max_decode_rows: _Positive = 64

    group: Literal["tcp", "gloo"] = "tcp"
    transport: Literal["all_to_all_v", "all_gather_filter"] = "all_to_all_v"
    runner: Literal["grouped", "capacity_padded"] = "grouped"
    policy: Literal["token_hash", "locality_first", "least_load", "round_robin", "queue_aware"] = "token_hash"

    step_deadline_s: _Seconds = 30.0
    start_deadline_s: _Seconds = 300.0
    request_deadline_s: _Seconds = 600.0
    audit_rate: Annotated[float, Field(ge=0, le=1)] = 1 / 256
    final_after_steps: _Natural = 1

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000

    @model_validator(mode="after")
    def _carried(self) -> Self:
        if self.peers > 1 and self.device == "cuda":
            raise ValueError(f"peers must be 1 on cuda, found {self.peers}: rows travel between peers on CPU only")
        return self


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ClusterConfig:
    """Read a YAML (or JSON) file; `overrides` replace its fields, and the result is checked as one.

    Raises `ConfigError` naming the file, and the field, value and bound where the file could be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    values = _read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a cluster configuration is a mapping of fields, found {type(values).__name__}")
    return ClusterConfig.parse({**values, **(overrides or {})}, str(path))


# -- Placement manifest (specification 0x02B2)


class ShardManifest(Manifest):
    index: _Natural = 0
    count: _Positive = 1


class SlotManifest(Manifest):
    """One physical slot. `checkpoint_version` is written only in a file whose slots could disagree about it."""

    physical_slot_id: str
    logical_expert_id: _Natural
    replica_id: str
    destination_rank: _Natural
    topology_domain_id: str
    checkpoint_version: str | None = None
    parameter_digest: str
    pool_slot: _Natural
    shard: ShardManifest = ShardManifest()


class LayerManifest(Manifest):
    layer: _Natural
    num_logical_experts: _Positive
    slots: _Tuple[SlotManifest]


class DomainManifest(Manifest):
    domain_id: str
    member_ranks: _Tuple[_Natural]


class TopologyManifest(Manifest):
    version: str
    domains: _Tuple[DomainManifest]


class PlacementManifest(Manifest):
    """One placement generation as a document. `member_ranks` are in peer-slot order; slots in manifest order."""

    placement_version: str
    generation: _Natural
    state: Literal["ACTIVE", "DRAINING", "RETIRED"]
    process_group_id: str
    epoch: _Natural
    member_ranks: _Tuple[_Natural]
    checkpoint_version: str
    release_id: str
    in_flight_refcount: _Natural
    topology: TopologyManifest
    layers: _Tuple[LayerManifest]

    @classmethod
    def from_snapshot(cls, snapshot: PlacementSnapshot, *, state: str, in_flight_refcount: int) -> PlacementManifest:
        """`state` and `in_flight_refcount` are the registry's: a snapshot itself never changes."""
        domains = [
            {"domain_id": domain.domain_id, "member_ranks": [rank.value for rank in domain.member_ranks]}
            for domain in snapshot.topology.domains
        ]
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
                "topology": {"version": snapshot.topology.version, "domains": domains},
                "layers": layers,
            }
        )

    def to_snapshot(self) -> PlacementSnapshot:
        """The frozen record; its own validation applies (`CompatibilityError`, `PlacementError`)."""
        domains = tuple(Domain(domain.domain_id, _ranks(domain.member_ranks)) for domain in self.topology.domains)
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
            topology=Topology(self.topology.version, domains),
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


def _ranks(values: tuple[int, ...]) -> tuple[GlobalRank, ...]:
    return tuple(GlobalRank(value) for value in values)


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
    upstream_report_digests: _Tuple[str] = ()

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


def _read_yaml(text: str, source: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # PyYAML's own text spans lines and quotes the file
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source + ': ' if source else ''}not valid YAML{where}: {problem}") from error


def _layer_from(given: object) -> object:
    if given == "*" or (type(given) is int and given >= 0):
        return given
    raise ValueError(f'found {_short(given)}, must be a layer index >= 0 or "*" for every MoE layer')


def _one_line(error: ValidationError, document: type[BaseModel], source: str) -> str:
    """`peers: found 0, input should be greater than or equal to 1; ...`"""
    reasons = []
    for issue in error.errors(include_url=False):
        field = ".".join(str(part) for part in issue["loc"])
        found, bound = _short(issue["input"]), issue["msg"][:1].lower() + issue["msg"][1:]
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


def _short(value: object) -> str:
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
