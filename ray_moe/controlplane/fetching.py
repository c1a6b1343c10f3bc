"""Which pool slots of a candidate still need parameters, and where each of them gets them from now.

Pure. `orders` is asked again and again until it says nothing: what ranks report as resident goes in, and so do the
sources that failed. A slot is known by the digest of what it holds, so an order that was carried out twice, or that a
restarted controller gives again, changes nothing. The preference among sources is that of
`ray_moe.controlplane.sources`: the same rank, the same node, another node, the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ray_moe.controlplane.occupancy import Held, Occupancy
from ray_moe.controlplane.solve import PoolSlot
from ray_moe.controlplane.sources import CopyClass, SourceFinder
from ray_moe.errors import PlacementError
from ray_moe.evidence import LogicalBytes
from ray_moe.identity import GlobalRank
from ray_moe.placement import PlacementSnapshot
from ray_moe.topology import Topology

# -- Vocabulary: bulk records with bare integers (global rank, layer, pool slot, logical expert)


@dataclass(frozen=True)
class FromPeer:
    """A resident pool slot of the same layer, on a rank that may be the reader's own."""

    rank: int
    pool_slot: int

    def __str__(self) -> str:
        return f"rank {self.rank} slot {self.pool_slot}"


@dataclass(frozen=True)
class FromCheckpoint:
    """The model's files; `key` names them where a rank has more than one checkpoint open."""

    key: str = ""

    def __str__(self) -> str:
        return f"checkpoint {self.key!r}" if self.key else "the checkpoint"


FillSource = FromPeer | FromCheckpoint


@dataclass(frozen=True)
class FillOrder:
    """Fill one pool slot. `digest` is the checkpoint's for this expert; None when nobody has read it yet."""

    rank: int
    layer: int
    pool_slot: int
    expert: int
    source: FillSource
    digest: str | None

    @property
    def attempt(self) -> Attempt:
        """What `orders` excludes in `bad` once it has failed."""
        return self.rank, self.layer, self.pool_slot, self.source


Attempt = tuple[int, int, int, FillSource]


class Fault(StrEnum):
    """What an order failed for. A source is left out the next time; a slot has to become free first."""

    SOURCE = "source"
    SLOT = "slot"


@dataclass(frozen=True)
class FillOutcome:
    """What became of an order: `digest` of what is resident, or `fault` and `error` and a slot left as it was.

    `nbytes` are bytes of parameters that were moved, 0 for a slot that held them already; `seconds` run from the
    request for them to the verified digest, without the wait for bandwidth.
    """

    order: FillOrder
    digest: str | None
    nbytes: int
    seconds: float
    error: str = ""
    fault: Fault | None = None


# -- What to do next


def orders(
    candidate: PlacementSnapshot,
    serving: PlacementSnapshot | None,
    resident: Mapping[tuple[int, int, int], str],
    lost_ranks: Collection[int] = (),
    bad: Collection[Attempt] = (),
    checkpoint: FromCheckpoint = FromCheckpoint(),
) -> tuple[FillOrder, ...]:
    """An order for every slot of `candidate` that is not resident with its expert's digest, in manifest order.

    `resident[(rank, layer, pool slot)]` is the digest of what each slot holds, `bad` the attempts that have failed.
    Sources are slots of `candidate` or `serving` that are resident with the right digest, since neither is freed
    meanwhile; among equally near ones the rank that this call makes the least use of. A slot that holds something else
    is ordered all the same: whoever carries it out refuses until the slot is free.

    Digests are known from a `serving` placement of the same checkpoint and from `candidate`'s own slots; where they are
    not, the checkpoint is read, and the slot is ordered until `candidate` carries what arrived (`digests_of`).

    Raises `PlacementError` naming layer, expert and rank for a slot on a lost rank, for one without a source left, and
    for one that holds a part of an expert.
    """
    digests = _digests(candidate, serving)
    holders = _holders((candidate, *((serving,) if serving is not None else ())), resident, digests, lost_ranks)
    finder = SourceFinder(_nodes(candidate, serving), {}, checkpoint=True)
    given = []
    for layer, slots in Occupancy.of(candidate).layers.items():
        for target in slots:
            digest = digests.get((layer, target.expert))
            if digest is not None and resident.get((target.rank, layer, target.pool_slot)) == digest:
                continue
            what = f"layer {layer} expert {target.expert} on rank {target.rank} slot {target.pool_slot}"
            if target.rank in lost_ranks:
                raise PlacementError(f"{what}: the rank is lost")
            where = (target.rank, layer, target.pool_slot)
            left = [
                held
                for held in holders.get((layer, target.expert), ())
                if (*where, FromPeer(held.rank, held.pool_slot)) not in bad
            ]
            if not left and (*where, checkpoint) in bad:
                raise PlacementError(f"{what}: no source is left, the last to fail was {checkpoint}")
            (found,) = finder.find(layer, left, [target])
            source: FillSource = checkpoint
            if isinstance(found.source, PoolSlot):
                source = FromPeer(found.source.rank.value, found.source.pool_slot)
            given.append(FillOrder(*where, target.expert, source, digest))
    return tuple(given)


def wanted_digests(candidate: PlacementSnapshot, serving: PlacementSnapshot | None) -> dict[tuple[int, int, int], str]:
    """What each slot of `candidate` is to hold, by (rank, layer, pool slot); empty where nobody has read it yet."""
    digests = _digests(candidate, serving)
    return {
        (slot.destination_rank.value, placement.layer, slot.pool_slot): digests.get(
            (placement.layer, slot.logical_expert_id.value), ""
        )
        for placement in candidate.layers
        for slot in placement.slots
    }


def digests_of(outcomes: Iterable[FillOutcome]) -> dict[tuple[int, int, int], str]:
    """What `PlacementSnapshot.with_digests` takes: (layer, rank, pool slot) -> digest of what is resident now."""
    return {
        (outcome.order.layer, outcome.order.rank, outcome.order.pool_slot): outcome.digest
        for outcome in outcomes
        if outcome.digest is not None
    }


# -- What it took


@dataclass(frozen=True)
class FillEvidence:
    """Copies and payload by class, as carried out; `discarded` arrived too, and was not what it should have been.

    The fields are those of `MigrationLedger`, which says what was planned.
    """

    copies: Mapping[CopyClass, int]
    payload: Mapping[CopyClass, LogicalBytes]
    discarded: LogicalBytes
    errors: tuple[str, ...]


def evidence(outcomes: Iterable[FillOutcome], topology: Topology) -> FillEvidence:
    """Sums `outcomes`; `topology` has all ranks that were read or filled. A slot that was resident before is a keep.

    Raises `TopologyError` for a rank that no node owns.
    """
    copies: Counter[CopyClass] = Counter()
    payload: Counter[CopyClass] = Counter()
    discarded = 0
    errors = []
    for outcome in outcomes:
        if outcome.error:
            errors.append(outcome.error)
            discarded += outcome.nbytes
            continue
        kind = _class_of(outcome.order, topology) if outcome.nbytes else CopyClass.KEEP
        copies[kind] += 1
        payload[kind] += outcome.nbytes
    return FillEvidence(
        {kind: copies[kind] for kind in CopyClass},
        {kind: LogicalBytes(payload[kind]) for kind in CopyClass},
        LogicalBytes(discarded),
        tuple(errors),
    )


def _class_of(order: FillOrder, topology: Topology) -> CopyClass:
    if isinstance(order.source, FromCheckpoint):
        return CopyClass.CHECKPOINT
    if order.source.rank == order.rank:
        return CopyClass.SAME_GPU
    here, there = (topology.locate(GlobalRank(rank)).domain_id for rank in (order.rank, order.source.rank))
    return CopyClass.SAME_NODE if here == there else CopyClass.CROSS_NODE


# -- Details


def _digests(candidate: PlacementSnapshot, serving: PlacementSnapshot | None) -> dict[tuple[int, int], str]:
    """Digest by (layer, expert): `serving` tells those of its checkpoint, `candidate` its own."""
    same = serving is not None and serving.checkpoint_version == candidate.checkpoint_version
    return (_known(serving) if serving is not None and same else {}) | _known(candidate)


def _known(snapshot: PlacementSnapshot) -> dict[tuple[int, int], str]:
    return {
        (placement.layer, slot.logical_expert_id.value): slot.parameter_digest
        for placement in snapshot.layers
        for slot in placement.slots
        if slot.parameter_digest
    }


def _holders(
    snapshots: Iterable[PlacementSnapshot],
    resident: Mapping[tuple[int, int, int], str],
    digests: Mapping[tuple[int, int], str],
    lost_ranks: Collection[int],
) -> dict[tuple[int, int], list[Held]]:
    """(layer, expert) -> the slots that can be read for it, each once."""
    holders: dict[tuple[int, int], dict[Held, None]] = {}
    for snapshot in snapshots:
        for layer, slots in Occupancy.of(snapshot).layers.items():
            for held in slots:
                digest = resident.get((held.rank, layer, held.pool_slot))
                if held.rank in lost_ranks or digest is None or digest != digests.get((layer, held.expert)):
                    continue
                holders.setdefault((layer, held.expert), {})[held] = None
    return {key: list(found) for key, found in holders.items()}


def _nodes(candidate: PlacementSnapshot, serving: PlacementSnapshot | None) -> dict[int, str]:
    """The node of every rank of either placement: a leaving rank is in `serving` alone, and a source all the same."""
    owners = (serving.topology.owner if serving is not None else {}) | candidate.topology.owner
    return {rank.value: domain for rank, domain in owners.items()}
