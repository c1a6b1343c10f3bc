"""What runtimes ask of a topology (specification 0x07H), as files: relations and labels, none of them a measurement.

`cluster_configs/topologies` holds one file for each runtime that the specification names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from ray_moe.errors import TopologyError
from ray_moe.identity import ProcessGroupId
from ray_moe.manifest import AsTuple, Manifest, Positive, TopologyManifest
from ray_moe.topology import ProcessGroupSpec, RouteClass, Topology, TopologyGroups, ranks_text


class Capability(StrEnum):
    """What a probe of the hardware found; a name in a file is no probe."""

    HOPPER_OR_NEWER = "hopper_or_newer"
    NVLINK = "nvlink"
    SYMMETRIC_MEMORY = "symmetric_memory"


def require_capabilities(path: str, required: Iterable[Capability], probed: Collection[Capability]) -> None:
    """`TopologyError` capability_missing unless the probe found all that `path` requires: shapes do not show it."""
    if missing := [name for name in required if name not in probed]:
        raise TopologyError("capability_missing", f"{path} needs {', '.join(missing)}; probed {sorted(probed)}")


def require_one_fabric(topology: Topology, group: ProcessGroupSpec) -> str:
    """The fabric domain that joins all of `group`; `TopologyError` fabric_unknown or group_crosses_fabric."""
    fabrics = {topology.locate(rank).fabric_domain for rank in group.peers}
    if "" in fabrics or len(fabrics) != 1:
        reason = "fabric_unknown" if "" in fabrics else "group_crosses_fabric"
        raise TopologyError(reason, f"group {group.process_group_id} {ranks_text(group.peers)} is in {sorted(fabrics)}")
    return fabrics.pop()


class SourceManifest(Manifest):
    """Where a relation is stated: a file of one pinned revision, or a report."""

    surface: str
    file: str
    revision: str
    statement: str


class SymmetricMemoryManifest(Manifest):
    """A path over one group that sits in one fabric domain, and what a probe must find before it is selected."""

    process_group_id: str
    requires: AsTuple[Annotated[Capability, Field(strict=False)]]


class RelationsManifest(Manifest):
    """What runtimes establish about topology and groups (0x07H): relations and labels, none of them a measurement.

    `transport_of_class` labels route classes. `backend_sizes` says, by backend, whether the expert-parallel size must
    equal the tensor-parallel size or may be any divisor of it. `max_nodes_per_token` is what fan-out is compared with;
    no route moves for it.
    """

    sources: Annotated[AsTuple[SourceManifest], Field(min_length=1)]
    transport_of_class: dict[Annotated[RouteClass, Field(strict=False)], str] | None = None
    symmetric_memory: SymmetricMemoryManifest | None = None
    backend_sizes: dict[str, Literal["equal", "divides"]] | None = None
    max_nodes_per_token: Positive | None = None

    def require_sizes(self, backend: str, expert_parallel: int, tensor_parallel: int) -> None:
        """`TopologyError` unknown_backend, or sizes_not_supported by that backend."""
        rules = self.backend_sizes or {}
        if backend not in rules:
            raise TopologyError("unknown_backend", f"{backend!r} is none of {sorted(rules)}")
        equal = expert_parallel == tensor_parallel
        divides = expert_parallel > 0 and tensor_parallel % expert_parallel == 0
        if not (equal if rules[backend] == "equal" else divides):
            raise TopologyError(
                "sizes_not_supported",
                f"backend {backend} with expert-parallel size {expert_parallel} and tensor-parallel size "
                f"{tensor_parallel}: the first must {'equal' if rules[backend] == 'equal' else 'divide'} the second",
            )


class RuntimeTopology(TopologyManifest):
    """An example topology of one runtime, and the relations that its source states."""

    relations: RelationsManifest

    def to_groups(self) -> TopologyGroups:
        """As of the topology alone, and the symmetric-memory path's group must be in one fabric domain."""
        groups = super().to_groups()
        if path := self.relations.symmetric_memory:
            require_one_fabric(groups.topology, groups.require(ProcessGroupId(path.process_group_id), groups.epoch))
        return groups
