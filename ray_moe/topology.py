"""Physical domains and process groups (specification 0x07A, 0x07B).

A *domain* (node) owns global ranks. A *group* orders some ranks into peer slots for one epoch: split vectors, counts
and buffers are indexed by peer slot, never by global rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ray_moe.errors import PlacementError
from ray_moe.identity import GlobalRank, ProcessGroupId, expect


@dataclass(frozen=True)
class Domain:
    """One physical domain, usually a node, and the ranks it owns."""

    domain_id: str
    member_ranks: tuple[GlobalRank, ...]

    def __post_init__(self) -> None:
        for rank in self.member_ranks:
            expect(GlobalRank, rank, f"domain {self.domain_id} member_ranks")


@dataclass(frozen=True)
class Topology:
    """Which domain owns which rank. Raises `PlacementError` when two domains claim one rank."""

    version: str
    domains: tuple[Domain, ...]

    def __post_init__(self) -> None:
        owners: dict[GlobalRank, str] = {}
        for domain in self.domains:
            for rank in domain.member_ranks:
                if rank in owners:
                    raise PlacementError(f"rank {rank} is owned by both {owners[rank]} and {domain.domain_id}")
                owners[rank] = domain.domain_id

    @cached_property
    def owner(self) -> dict[GlobalRank, str]:
        """Domain id by global rank."""
        return {rank: domain.domain_id for domain in self.domains for rank in domain.member_ranks}


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
