"""What the controller may be asked to do, one frozen record each; and what it has seen.

Every effect is idempotent: done again, it finds that it is done. So a controller that has lost its memory of what was
under way may simply run what the reconciler still asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ray_moe.controlplane.fetching import FillOrder
from ray_moe.placement import PlacementSnapshot
from ray_moe.topology import ProcessGroupSpec, Topology

# -- What is done


@dataclass(frozen=True)
class Prepare:
    """Make the actor of a rank, load trunk and slot pool there at idle priority."""

    rank: int
    operation: int


@dataclass(frozen=True)
class Fill:
    """Bring verified parameters into free slots of one rank."""

    rank: int
    operation: int
    orders: tuple[FillOrder, ...] = field(compare=False)


@dataclass(frozen=True)
class Join:
    """Take this rank's seats in an epoch, beside the one that serves."""

    rank: int
    operation: int
    group: ProcessGroupSpec
    topology: Topology = field(compare=False)


@dataclass(frozen=True)
class CloseEpoch:
    """Give up an epoch that was joined and will not be used."""

    rank: int
    epoch: int


@dataclass(frozen=True)
class HandOver:
    """Admit no more requests, and hand those that are open to other ranks."""

    rank: int
    operation: int
    to: tuple[int, ...]


@dataclass(frozen=True)
class Readmit:
    """Take requests again: the rank stays after all."""

    rank: int


@dataclass(frozen=True)
class Publish:
    """Make a verified placement the one for new dispatches."""

    operation: int
    generation: int
    snapshot: PlacementSnapshot = field(compare=False)


@dataclass(frozen=True)
class Start:
    """Begin to serve on a rank that has joined: its lease, its loop, normal priority."""

    rank: int
    operation: int
    generation: int


@dataclass(frozen=True)
class Stage:
    """Hold a lease on the active generation ready."""

    rank: int
    operation: int
    generation: int


@dataclass(frozen=True)
class Depart:
    """Leave at the boundary at which the others take `generation`, which is of an epoch without this rank."""

    rank: int
    operation: int
    generation: int
    epoch: int


@dataclass(frozen=True)
class Announce:
    """Tell a rank, and through it its clients, who takes requests."""

    rank: int
    version: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Retire:
    """Retire generations that nobody refers to. `through` > 0 gives up the hold on those before it for their slots."""

    through: int
    committed_step: int = field(compare=False)


@dataclass(frozen=True)
class Free:
    """Free pool slots (layer, pool slot) that no live generation refers to."""

    rank: int
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class End:
    """End the actor of a rank, after its clients have fetched what it has for them. Operation 0: nobody's any more."""

    rank: int
    operation: int = 0


Effect = (
    Prepare
    | Fill
    | Join
    | CloseEpoch
    | HandOver
    | Readmit
    | Publish
    | Start
    | Stage
    | Depart
    | Announce
    | Retire
    | Free
    | End
)


# -- What is seen


class PeerPhase(StrEnum):
    """How far a peer's process is, as it says itself."""

    STARTING = "starting"  # exists; trunk or slots are not there yet
    LOADED = "loaded"
    SERVING = "serving"
    LEFT = "left"


@dataclass(frozen=True)
class Peer:
    """One rank's own word. `slots` are its resident pool slots, (layer, pool slot) to digest.

    `epochs` are those it holds seats in; `staged` the newest generation it is ready for, `generation` the one it
    serves, -1 before the first; `committed_step` is its last one. `requests` are open here, `members` is the version of
    the membership that it knows. `failure` says why its engine does not run any more.
    """

    rank: int
    phase: PeerPhase
    node: str = ""
    epochs: frozenset[int] = frozenset()
    staged: int = -1
    generation: int = -1
    committed_step: int = -1
    admitting: bool = True
    requests: int = 0
    members: int = 0
    failure: str = ""
    slots: Mapping[tuple[int, int], str] = field(default_factory=dict)
    pauses: Mapping[int, float] = field(default_factory=dict)  # seconds added at the switch to a generation


@dataclass(frozen=True)
class Observed:
    """One look: peers that exist and answer, ranks that died, live generations in ascending order."""

    peers: Mapping[int, Peer]
    live: tuple[PlacementSnapshot, ...]
    lost: frozenset[int] = frozenset()

    @property
    def active(self) -> PlacementSnapshot:
        return self.live[-1]
