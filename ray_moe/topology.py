"""Physical domains and process groups (specification 0x07A to 0x07D, 0x07G).

A *domain* (node) owns global ranks. A *group* orders some ranks into peer slots for one epoch: split vectors, counts
and buffers are indexed by peer slot, never by global rank. What moves between them is `ray_moe.topology_ledger`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product

from ray_moe.errors import PlacementError, TopologyError
from ray_moe.identity import GlobalRank, Identity, ProcessGroupId, expect

# -- Nodes and ranks (0x07A)


@dataclass(frozen=True, order=True, slots=True)
class RouterGroup(Identity):
    """A router's group of logical experts (0x07D): an eligibility rule of the model.

    It says nothing about location: no node, rank or peer slot follows from it, and nothing here accepts one.
    """

    value: int


class RouteClass(StrEnum):
    """How far a row travels (0x07C). A class names a relation of two ranks, never a measured link."""

    SAME_GPU = "same_gpu"
    SAME_NODE_REMOTE_GPU = "same_node_remote_gpu"
    DIFFERENT_NODE = "different_node"


@dataclass(frozen=True)
class NicPath:
    """Which NIC serves `rank`: directly, or through the rank `via` of the same node that is attached to it."""

    rank: GlobalRank
    nic_id: str
    via: GlobalRank | None = None


@dataclass(frozen=True)
class Domain:
    """One physical domain, usually a node, and the ranks it owns; a rank's position is its GPU-local rank.

    `relay_rank` forwards between nodes where a schedule has relays, the first member unless one is named.
    `fabric_domain` names what joins the node's GPUs, empty where nobody has stated it.
    Raises `TopologyError` with reason rank_given_twice, relay_not_member, nic_rank_not_member, nic_given_twice,
    nic_via_outside_node or nic_via_not_direct.
    """

    domain_id: str
    member_ranks: tuple[GlobalRank, ...]
    relay_rank: GlobalRank | None = None
    fabric_domain: str = ""
    nics: tuple[NicPath, ...] = ()

    def __post_init__(self) -> None:
        members = set(self.member_ranks)
        for rank in self.member_ranks:
            expect(GlobalRank, rank, f"domain {self.domain_id} member_ranks")
        if len(members) != len(self.member_ranks):
            raise TopologyError("rank_given_twice", f"domain {self.domain_id} lists {ranks_text(self.member_ranks)}")
        if self.relay_rank is not None and self.relay_rank not in members:
            raise TopologyError(
                "relay_not_member",
                f"relay {self.relay_rank} of {self.domain_id} is none of its ranks {ranks_text(self.member_ranks)}",
            )
        direct = {(path.rank, path.nic_id) for path in self.nics if path.via is None}
        for position, path in enumerate(self.nics):
            where = f"{path.nic_id} of rank {path.rank} in {self.domain_id}"
            if path.rank not in members:
                raise TopologyError("nic_rank_not_member", f"{where}: the ranks are {ranks_text(self.member_ranks)}")
            if any(path.rank == other.rank for other in self.nics[:position]):
                raise TopologyError("nic_given_twice", f"{where}: the rank has a NIC already")
            if path.via is not None and path.via not in members:
                raise TopologyError("nic_via_outside_node", f"{where}: via rank {path.via} of another node")
            if path.via is not None and (path.via, path.nic_id) not in direct:
                raise TopologyError("nic_via_not_direct", f"{where}: via rank {path.via}, which is not attached to it")

    @property
    def relay(self) -> GlobalRank:
        """The rank that forwards for this node. `TopologyError` node_without_ranks when the node has none."""
        if not self.member_ranks:
            raise TopologyError("node_without_ranks", f"{self.domain_id} has no rank that could relay")
        return self.member_ranks[0] if self.relay_rank is None else self.relay_rank


@dataclass(frozen=True)
class RankLocation:
    """Where one rank is; `nic` is None where nobody has stated it."""

    rank: GlobalRank
    domain_id: str
    gpu_local_rank: int
    fabric_domain: str
    nic: NicPath | None
    relay: GlobalRank

    @property
    def is_relay(self) -> bool:
        return self.rank == self.relay


@dataclass(frozen=True)
class Topology:
    """Which domain owns which rank. Its version is no placement's: a moved replica changes the placement alone, a
    rewired rank or NIC the topology alone.

    Raises `TopologyError` with reason rank_in_two_nodes, domain_given_twice or nic_in_two_nodes.
    """

    version: str
    domains: tuple[Domain, ...]

    def __post_init__(self) -> None:
        owners: dict[GlobalRank, str] = {}
        nics: dict[str, str] = {}
        if len({domain.domain_id for domain in self.domains}) != len(self.domains):
            raise TopologyError("domain_given_twice", f"topology {self.version}: domain ids must be distinct")
        for domain in self.domains:
            for rank in domain.member_ranks:
                if rank in owners:
                    raise TopologyError(
                        "rank_in_two_nodes", f"rank {rank} is owned by both {owners[rank]} and {domain.domain_id}"
                    )
                owners[rank] = domain.domain_id
            for path in domain.nics:
                if nics.setdefault(path.nic_id, domain.domain_id) != domain.domain_id:
                    raise TopologyError(
                        "nic_in_two_nodes", f"{path.nic_id} is in both {nics[path.nic_id]} and {domain.domain_id}"
                    )

    @cached_property
    def owner(self) -> dict[GlobalRank, str]:
        """Domain id by global rank."""
        return {rank: domain.domain_id for domain in self.domains for rank in domain.member_ranks}

    @cached_property
    def locations(self) -> dict[GlobalRank, RankLocation]:
        """Every rank's location, node by node."""
        located = {}
        for domain in self.domains:
            nics = {path.rank: path for path in domain.nics}
            for local, rank in enumerate(domain.member_ranks):
                where = (domain.domain_id, local, domain.fabric_domain)
                located[rank] = RankLocation(rank, *where, nics.get(rank), domain.relay)
        return located

    def locate(self, rank: GlobalRank) -> RankLocation:
        """`TypeError` for what is no global rank, `TopologyError` unknown_rank for a rank that no node owns."""
        expect(GlobalRank, rank, "rank")
        if rank not in self.locations:
            raise TopologyError("unknown_rank", f"rank {rank} belongs to no domain of topology {self.version}")
        return self.locations[rank]

    def classify(self, source: GlobalRank, destination: GlobalRank) -> RouteClass:
        """The one class of a row from `source` to `destination`."""
        here, there = self.locate(source), self.locate(destination)
        if here.domain_id != there.domain_id:
            return RouteClass.DIFFERENT_NODE
        return RouteClass.SAME_GPU if source == destination else RouteClass.SAME_NODE_REMOTE_GPU


# -- Groups (0x07B, 0x07G)


@dataclass(frozen=True)
class ProcessGroupSpec:
    """One epoch of a communicator: `peers[s]` is the global rank that sits in peer slot `s`.

    Raises `PlacementError` for an empty group or a rank that sits twice.
    """

    process_group_id: ProcessGroupId
    epoch: int
    peers: tuple[GlobalRank, ...]

    def __post_init__(self) -> None:
        expect(ProcessGroupId, self.process_group_id, "process_group_id")
        for rank in self.peers:
            expect(GlobalRank, rank, "peers")
        if not self.peers or len(set(self.peers)) != len(self.peers):
            raise PlacementError(
                f"group {self.process_group_id}: peers must be distinct and not empty, found {self.peers}"
            )
        if self.epoch < 0:
            raise PlacementError(f"group {self.process_group_id}: epoch must be >= 0, found {self.epoch}")

    def __len__(self) -> int:
        return len(self.peers)

    def __contains__(self, rank: object) -> bool:
        return rank in self._slots

    def peer_slot(self, rank: GlobalRank) -> int:
        """Seat of `rank` in this epoch; raises `PlacementError` when it has none."""
        if rank not in self._slots:
            raise PlacementError(f"rank {rank} has no seat in group {self.process_group_id} epoch {self.epoch}")
        return self._slots[rank]

    @cached_property
    def _slots(self) -> dict[GlobalRank, int]:
        return {rank: slot for slot, rank in enumerate(self.peers)}


class GroupKind(StrEnum):
    """What a group is for. The last three are axes of a layout that shards experts as well (0x07H, 0x0BA)."""

    FULL_EXPERT_PARALLEL = "full_expert_parallel"
    NODE_LOCAL = "node_local"
    INTER_NODE_RELAYS = "inter_node_relays"
    EXPERT_PARALLEL = "expert_parallel"
    TENSOR_PARALLEL = "tensor_parallel"
    TENSOR_BY_EXPERT = "tensor_by_expert"


# Kind -> the refusal for a member too many, and for one too few.
_MEMBER_REASONS: dict[GroupKind, tuple[str, str]] = {
    GroupKind.FULL_EXPERT_PARALLEL: ("full_group_incomplete", "full_group_incomplete"),
    GroupKind.NODE_LOCAL: ("local_group_crosses_node", "local_group_incomplete"),
    GroupKind.INTER_NODE_RELAYS: ("relay_group_has_nonrelay", "relay_group_incomplete"),
}
_AXES, _PRODUCT = (GroupKind.EXPERT_PARALLEL, GroupKind.TENSOR_PARALLEL), GroupKind.TENSOR_BY_EXPERT


@dataclass(frozen=True)
class GroupBinding:
    """A group and its kind; `domain_id` is the node of a node-local group, and None for every other."""

    kind: GroupKind
    spec: ProcessGroupSpec
    domain_id: str | None = None

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.NODE_LOCAL) != (self.domain_id is not None):
            raise TopologyError(
                "node_local_names_its_node",
                f"group {self.spec.process_group_id} of kind {self.kind} names node {self.domain_id}",
            )


@dataclass(frozen=True)
class TopologyGroups:
    """The groups of one collective epoch, checked against a topology. Each has a peer order of its own: equal members
    in another order are another coordinate system.

    Raises `TopologyError` with reason collective_epoch_mismatch, group_given_twice, unknown_domain, unknown_rank,
    full_group_incomplete, local_group_crosses_node, local_group_incomplete, relay_group_has_nonrelay,
    relay_group_incomplete, axis_groups_overlap, axes_share_two_ranks or tensor_by_expert_incomplete.
    """

    topology: Topology
    epoch: int
    bindings: tuple[GroupBinding, ...]

    def __post_init__(self) -> None:
        seen: set[object] = set()
        for binding in self.bindings:
            spec, seat = binding.spec, (binding.kind, binding.domain_id)
            if spec.epoch != self.epoch:
                raise TopologyError(
                    "collective_epoch_mismatch",
                    f"group {spec.process_group_id} is of epoch {spec.epoch}, the collective epoch is {self.epoch}",
                )
            if spec.process_group_id in seen or (binding.kind in _MEMBER_REASONS and seat in seen):
                raise TopologyError("group_given_twice", f"{binding.kind} group {spec.process_group_id}")
            seen |= {spec.process_group_id, seat}
            self._check_members(binding)
        self._check_axes()

    def _check_members(self, binding: GroupBinding) -> None:
        domains = {domain.domain_id: domain for domain in self.topology.domains}
        found, expected = set(binding.spec.peers), set(self.topology.owner)
        if binding.kind is GroupKind.NODE_LOCAL:
            if binding.domain_id not in domains:
                raise TopologyError("unknown_domain", f"topology {self.topology.version} has no {binding.domain_id}")
            expected = set(domains[binding.domain_id].member_ranks)
        elif binding.kind is GroupKind.INTER_NODE_RELAYS:
            expected = {domain.relay for domain in domains.values() if domain.member_ranks}
        foreign, missing = found - expected, expected - found
        too_many, too_few = _MEMBER_REASONS.get(binding.kind, ("unknown_rank", ""))
        if foreign or (missing and too_few):
            raise TopologyError(
                too_many if foreign else too_few,
                f"{binding.kind} group {binding.spec.process_group_id} has ranks {ranks_text(binding.spec.peers)}, "
                f"its ranks are {ranks_text(sorted(expected))}",
            )

    def _check_axes(self) -> None:
        """Along each axis the groups are disjoint, two axes meet in one rank, and their product is whole."""
        axes = {kind: [set(b.spec.peers) for b in self.bindings if b.kind is kind] for kind in (*_AXES, _PRODUCT)}
        for kind, groups in axes.items():
            if sum(map(len, groups)) != len(set().union(*groups)):
                raise TopologyError("axis_groups_overlap", f"a rank is in two {kind} groups: {_lists(groups)}")
        for expert, tensor in product(*(axes[kind] for kind in _AXES)):
            if len(expert & tensor) > 1:
                raise TopologyError("axes_share_two_ranks", f"groups {_lists([expert, tensor])} meet in more than one")
        for whole, kind in product(axes[_PRODUCT], _AXES):
            if set().union(*(group for group in axes[kind] if group <= whole)) != whole:
                raise TopologyError(
                    "tensor_by_expert_incomplete", f"group {_lists([whole])} is not made of whole {kind} groups"
                )

    @cached_property
    def full(self) -> ProcessGroupSpec:
        return self._only(GroupKind.FULL_EXPERT_PARALLEL)

    @cached_property
    def relays(self) -> ProcessGroupSpec:
        return self._only(GroupKind.INTER_NODE_RELAYS)

    def node_local(self, domain_id: str) -> ProcessGroupSpec:
        return self._only(GroupKind.NODE_LOCAL, domain_id)

    def local_to(self, rank: GlobalRank) -> ProcessGroupSpec:
        """The node-local group that `rank` sits in."""
        return self.node_local(self.topology.locate(rank).domain_id)

    def require(self, group_id: ProcessGroupId, epoch: int) -> ProcessGroupSpec:
        """That group, in that epoch; `TopologyError` group_missing or collective_epoch_mismatch."""
        for binding in self.bindings:
            if binding.spec.process_group_id == group_id:
                if epoch != self.epoch:
                    raise TopologyError(
                        "collective_epoch_mismatch", f"group {group_id} is of epoch {self.epoch}, asked for {epoch}"
                    )
                return binding.spec
        raise TopologyError("group_missing", f"topology {self.topology.version} binds no group {group_id}")

    def _only(self, kind: GroupKind, domain_id: str | None = None) -> ProcessGroupSpec:
        for binding in self.bindings:
            if (binding.kind, binding.domain_id) == (kind, domain_id):
                return binding.spec
        of = f" of {domain_id}" if domain_id else ""
        raise TopologyError("group_missing", f"topology {self.topology.version} binds no {kind} group{of}")


def derive_groups(topology: Topology, full: ProcessGroupSpec) -> TopologyGroups:
    """The groups of a hierarchical exchange: `full`, "<full>/<domain id>" for each node, and "<full>/relays".

    Every peer order is full's order restricted to the members. `TopologyError` when `full` leaves a rank out.
    """

    def among(name: str, members: Collection[GlobalRank]) -> ProcessGroupSpec:
        peers = tuple(rank for rank in full.peers if rank in members)
        return ProcessGroupSpec(ProcessGroupId(f"{full.process_group_id}/{name}"), full.epoch, peers)

    whole = TopologyGroups(topology, full.epoch, (GroupBinding(GroupKind.FULL_EXPERT_PARALLEL, full),))
    nodes = [domain for domain in topology.domains if domain.member_ranks]
    local = [
        GroupBinding(GroupKind.NODE_LOCAL, among(node.domain_id, node.member_ranks), node.domain_id) for node in nodes
    ]
    relays = GroupBinding(GroupKind.INTER_NODE_RELAYS, among("relays", {node.relay for node in nodes}))
    return TopologyGroups(topology, full.epoch, (*whole.bindings, *local, relays))


def ranks_text(ranks: Iterable[GlobalRank]) -> str:
    return f"[{', '.join(map(str, ranks))}]"


def _lists(groups: Iterable[Collection[GlobalRank]]) -> str:
    return ", ".join(ranks_text(sorted(group)) for group in groups)
