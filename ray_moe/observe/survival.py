"""Which single failures a cluster survives, what each would cost, and from where its experts come back. Pure.

What is said is what happens today. The controller, the routing actor and a rank that only prepares are replaced while
requests go on. A rank that serves takes its epoch with it: requests fail by name and their clients submit them again,
and the cluster has to be brought up again (one that Serve's keeper watches comes back by itself). What that rank held
is then in other ranks' slots, or in the checkpoint alone; and the ranks that are left have room for every expert, or
have not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from ray_moe.placement import PlacementSnapshot

_Copy = tuple[int, int, int]  # layer, expert, shard


class Kind(StrEnum):
    """What fails."""

    RANK = "rank"
    NODE = "node"
    CONTROLLER = "controller"
    ROUTING = "routing"
    HEAD = "head"


class Outcome(StrEnum):
    """What requests see of it."""

    UNNOTICED = "unnoticed"  # streams go on
    RESTART = "restart"  # the epoch ends; the ranks that are left have slots for every expert
    TOO_SMALL = "too_small"  # the epoch ends; they have not: another rank is needed first


@dataclass(frozen=True)
class FailureView:
    """One failure. `costs` and `comes_back` are sentences for people, the numbers what they are made of.

    Of `copies` that fail, `elsewhere` are of experts that other ranks hold too; `only_here` are the experts of which
    every copy fails: the checkpoint alone has them. To hold these as well the ranks that are left would give up
    `displaced` second copies, and lack `slots_missing` slots, over all layers.
    """

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    outcome: Outcome
    costs: str
    comes_back: str
    copies: int = 0
    elsewhere: int = 0
    only_here: int = 0
    displaced: int = 0
    slots_missing: int = 0


def survival(
    active: PlacementSnapshot, capacity: int, *, joining: Collection[int] = (), lost: Collection[int] = (), journal: str
) -> tuple[FailureView, ...]:
    """Every single failure of what is there: ranks, nodes with several of them, actors, Ray's head.

    `capacity` are a rank's slots of one layer. Ranks that are `lost` already hold nothing; those that are `joining` are
    of no group yet. `journal` names the file that the controller's journal is in, empty for Ray's own store.
    """
    holdings = _Holdings(active, capacity, lost)
    nodes: dict[str, list[int]] = defaultdict(list)
    for rank in holdings.ranks:
        nodes[holdings.node_of[rank]].append(rank)
    return (
        *(holdings.failure(Kind.RANK, f"rank {rank}", (rank,)) for rank in holdings.ranks),
        *(_joining(rank) for rank in sorted(joining)),
        *(
            holdings.failure(Kind.NODE, node, tuple(ranks))
            for node, ranks in nodes.items()
            if len(ranks) > 1  # with one rank it is that rank's failure
        ),
        _controller(journal),
        _ROUTING,
        _HEAD,
    )


class _Holdings:
    """Who holds which copies, of the ranks that live."""

    def __init__(self, active: PlacementSnapshot, capacity: int, lost: Collection[int]) -> None:
        self._capacity = capacity
        self.ranks = tuple(rank.value for rank in active.group.peers if rank.value not in lost)
        self.node_of = {rank.value: node for rank, node in active.topology.owner.items()}
        self._held: dict[int, list[_Copy]] = {rank: [] for rank in self.ranks}
        self._holders: dict[_Copy, set[int]] = defaultdict(set)
        everywhere: set[_Copy] = set()
        for placement in active.layers:
            for slot in placement.slots:
                copy = (placement.layer, slot.logical_expert_id.value, slot.shard.index)
                everywhere.add(copy)
                if (rank := slot.destination_rank.value) in self._held:
                    self._held[rank].append(copy)
                    self._holders[copy].add(rank)
        self._used = {rank: Counter(layer for layer, _, _ in held) for rank, held in self._held.items()}
        self._wanted = Counter(layer for layer, _, _ in everywhere)
        self._gone = Counter(
            layer for layer, expert, shard in everywhere if (layer, expert, shard) not in self._holders
        )

    def failure(self, kind: Kind, name: str, ranks: tuple[int, ...]) -> FailureView:
        failing, left = set(ranks), [rank for rank in self.ranks if rank not in ranks]
        copies = [copy for rank in ranks for copy in self._held[rank]]
        only_here = {copy for copy in copies if self._holders[copy] <= failing}
        alone = Counter(layer for layer, _, _ in only_here)
        displaced = missing = 0
        room = len(left) * self._capacity
        for layer, wanted in self._wanted.items():
            used, unheld = sum(self._used[rank][layer] for rank in left), alone[layer] + self._gone[layer]
            missing += max(0, wanted - room)
            second_copies = used - (wanted - unheld)
            displaced += max(0, min(unheld - (room - used), second_copies))
        elsewhere = sum(copy not in only_here for copy in copies)
        outcome = Outcome.TOO_SMALL if missing else Outcome.RESTART
        return FailureView(
            kind=kind,
            name=name,
            ranks=ranks,
            outcome=outcome,
            costs=_EPOCH_ENDS,
            comes_back=_comes_back(elsewhere, len(only_here), displaced, missing, left),
            copies=len(copies),
            elsewhere=elsewhere,
            only_here=len(only_here),
            displaced=displaced,
            slots_missing=missing,
        )


_EPOCH_ENDS = (
    "The epoch ends: open requests fail by name and their clients submit them again; the cluster has to be brought up "
    "again, which a Serve keeper does by itself."
)


def _comes_back(elsewhere: int, only_here: int, displaced: int, missing: int, left: Iterable[int]) -> str:
    parts = []
    if elsewhere:
        parts.append(f"{_copies(elsewhere)} held by other ranks too")
    if only_here:
        parts.append(f"{_copies(only_here)} held nowhere else: from the checkpoint")
    held = ", ".join(parts) or "it holds no expert"
    if not list(left):
        return f"{held}; no rank is left"
    if missing:
        return f"{held}; the ranks that are left lack {missing} {'slot' if missing == 1 else 'slots'}"
    if displaced:
        return f"{held}; {displaced} second {'copy' if displaced == 1 else 'copies'} would have to give way"
    return f"{held}; the ranks that are left have room"


def _copies(count: int) -> str:
    return "1 copy is" if count == 1 else f"{count:,} copies are"


def _joining(rank: int) -> FailureView:
    return FailureView(
        Kind.RANK,
        f"rank {rank} (joining)",
        (rank,),
        Outcome.UNNOTICED,
        "Nobody is served by it yet: its operation fails or goes on without it, requests go on.",
        "it holds nothing that is needed",
    )


_RAYS_STORE = "the store of Ray's head"


def _controller(journal: str) -> FailureView:
    return FailureView(
        Kind.CONTROLLER,
        "controller",
        (),
        Outcome.UNNOTICED,
        "Requests go on; status and changes wait until Ray has started it again, and go on where they were.",
        f"from its journal in {journal or _RAYS_STORE}",
    )


_ROUTING = FailureView(
    Kind.ROUTING,
    "routing actor",
    (),
    Outcome.UNNOTICED,
    "Requests go on under the leases that ranks hold; layer calls and switches wait until Ray has started it again.",
    "from the controller's journal and the leases that ranks hold",
)


_HEAD = FailureView(
    Kind.HEAD,
    "Ray's head",
    (),
    Outcome.RESTART,
    "Every actor ends with it, unless Ray is set up to keep its state elsewhere; all that is open fails.",
    "from the checkpoint, as a new cluster",
)
