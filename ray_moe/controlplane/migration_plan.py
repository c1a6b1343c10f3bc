"""A migration as records: what each copy of the target takes, wave by wave, its ledger, and effects for an executor.

`ray_moe.controlplane.migrate` makes a `MigrationPlan`; `ray_moe.controlplane.execution` tells which effects may run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ray_moe.controlplane.moves import Matching
from ray_moe.controlplane.occupancy import Occupancy
from ray_moe.controlplane.solve import PoolSlot
from ray_moe.controlplane.sources import Checkpoint, CopyClass, HostCache, Source
from ray_moe.evidence import LiveBytes, LogicalBytes
from ray_moe.identity import LogicalExpertId

# What payload figures leave out (0x08F); they are parameters of whole experts and nothing else.
EXCLUDED_FROM_PAYLOAD = (
    "allocator data",
    "checkpoint framing",
    "optimizer state",
    "protocol overhead",
    "temporary copy buffers",
)


@dataclass(frozen=True)
class TargetCopy:
    """One copy of the target, or of a generation on the way to it.

    `wave` is the wave that fills it, 0 for a copy that is kept. `after` is the slot of the same wave that must be
    verified before this one may read it.
    """

    slot: PoolSlot
    expert: LogicalExpertId
    kind: CopyClass
    source: Source
    payload: LogicalBytes
    wave: int
    after: PoolSlot | None = None


@dataclass(frozen=True)
class PlannedWave:
    """Slots to fill; what is published once they are verified; slots that may be freed once that has drained."""

    number: int
    copies: tuple[TargetCopy, ...]  # a copy comes after the one that it reads
    published: Occupancy
    retired: tuple[tuple[PoolSlot, LogicalExpertId], ...]


@dataclass(frozen=True)
class MigrationLedger:
    """Copies and payload by class, and resident state. Payload moves; state stays: two ledgers that never add up.

    `payload` excludes what `EXCLUDED_FROM_PAYLOAD` names. `peak_resident` counts a pool slot once however many
    generations share it, and includes those of other live generations.
    """

    copies: Mapping[CopyClass, int]
    payload: Mapping[CopyClass, LogicalBytes]
    retained: LiveBytes
    retired: LiveBytes
    prior_resident: LiveBytes
    target_resident: LiveBytes
    peak_resident: LiveBytes

    @property
    def network(self) -> LogicalBytes:
        """Payload between ranks, of one node or of two."""
        return self.payload[CopyClass.SAME_NODE] + self.payload[CopyClass.CROSS_NODE]

    @property
    def moved(self) -> LogicalBytes:
        """Payload of everything that is not kept."""
        return LogicalBytes(sum(amount.value for amount in self.payload.values()))


@dataclass(frozen=True)
class MigrationPlan:
    """`matchings` are the methods that assigned packs to ranks, empty when the target's own ranks were taken."""

    prior: Occupancy
    target: Occupancy
    kept: tuple[TargetCopy, ...]
    waves: tuple[PlannedWave, ...]
    ledger: MigrationLedger
    matchings: frozenset[Matching] = frozenset()

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """Wave by wave: fill and verify slots, publish, retire. Any order that `after` and the waves allow is right."""
        return tuple(effect for wave in self.waves for effect in _effects(wave, wave is self.waves[-1]))


# -- What an executor does


@dataclass(frozen=True)
class Load:
    """Fill a free slot from a host cache or from the checkpoint."""

    wave: int
    slot: PoolSlot
    expert: LogicalExpertId
    source: HostCache | Checkpoint
    payload: LogicalBytes


@dataclass(frozen=True)
class Copy:
    """Fill a free slot from another one; `after` is the slot whose `Verify` must come first."""

    wave: int
    slot: PoolSlot
    expert: LogicalExpertId
    source: PoolSlot
    payload: LogicalBytes
    after: PoolSlot | None


@dataclass(frozen=True)
class Verify:
    """Compare the slot's parameter digest with the checkpoint's for this expert."""

    wave: int
    slot: PoolSlot
    expert: LogicalExpertId


@dataclass(frozen=True)
class Publish:
    """Make the wave's occupancy the generation for new dispatches; `final` when it is the target."""

    wave: int
    final: bool


@dataclass(frozen=True)
class Retire:
    """Free a slot that the published generation does without; earlier generations that use it have drained."""

    wave: int
    slot: PoolSlot
    expert: LogicalExpertId


Effect = Load | Copy | Verify | Publish | Retire


def _effects(wave: PlannedWave, final: bool) -> Iterable[Effect]:
    for copy in wave.copies:
        if isinstance(copy.source, PoolSlot):
            yield Copy(wave.number, copy.slot, copy.expert, copy.source, copy.payload, copy.after)
        else:
            yield Load(wave.number, copy.slot, copy.expert, copy.source, copy.payload)
        yield Verify(wave.number, copy.slot, copy.expert)
    yield Publish(wave.number, final)
    for slot, expert in wave.retired:
        yield Retire(wave.number, slot, expert)
