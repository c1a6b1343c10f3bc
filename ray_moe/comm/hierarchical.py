"""The hierarchical transport: through one relay per node, in three stages and three groups (specification 0x07E).

    dispatch   source -> its node's relay        relay -> the other node's relay      relay -> owner
               (or -> owner on the same node)

Combine walks the same path backwards. Between nodes only relays talk, so there are fewer pairs with longer messages;
the same rows cross, and the relay hops are extra. A *block* (s, d) is what source peer s sends to destination peer d;
every peer knows the whole count matrix, so no row carries where it goes. Letters: N sent rows, R received rows, D row
width, P peers; peers are numbered by their slot in the full group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from ray_moe.comm.exchange import Arrived, Exchange, StagedExchange
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.transports import CountMatrix, LinkRows, nothing_crosses, runs
from ray_moe.errors import StaleHandleError
from ray_moe.topology import ProcessGroupSpec, Topology
from ray_moe.topology_ledger import hierarchical_path

_Block = tuple[int, int]
_Holders = Sequence[Sequence[int]]


@dataclass(frozen=True)
class _Hop:
    """One stage at this peer: blocks in the order in which they lie, are sent, and arrive."""

    group: ExpertGroup | None
    held: list[_Block]
    sent: list[_Block]
    arrived: list[_Block]
    send_counts: list[int]
    recv_counts: list[int]


class Hierarchical:
    """Relays over the groups of one collective epoch. `StaleHandleError` when the groups are of different epochs."""

    name = "hierarchical"

    def __init__(
        self, group: ExpertGroup, node_group: ExpertGroup, relay_group: ExpertGroup | None, topology: Topology
    ) -> None:
        self.group = group
        self._groups = [member for member in (group, node_group, relay_group) if member is not None]
        for member in self._groups:
            if member.spec.epoch != group.spec.epoch:
                raise StaleHandleError(
                    f"group {member.spec.process_group_id} is of epoch {member.spec.epoch}, "
                    f"{group.spec.process_group_id} of epoch {group.spec.epoch}"
                )
        self._stage_groups: tuple[ExpertGroup, ExpertGroup | None, ExpertGroup] = (node_group, relay_group, node_group)
        # _held_by[k][s][d]: the peer that holds block (s, d) after stage k of dispatch; stage 0 is its source.
        self._held_by = _held_by(topology, group.spec)

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Exchange:
        return self._move(rows_ND, counts_PP, self._held_by)

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Exchange:
        return self._move(rows_RD, counts_PP, self._held_by[::-1])

    def link_rows(self, counts_PP: CountMatrix) -> LinkRows:
        mine = self.group.peer_slot
        sent = received = 0
        for before, after in pairwise(self._held_by):
            for source, line in enumerate(counts_PP):
                for destination, rows in enumerate(line):
                    leaves, arrives = before[source][destination] == mine, after[source][destination] == mine
                    sent += rows * (leaves and not arrives)
                    received += rows * (arrives and not leaves)
        return LinkRows.of(sent, received, counts_PP, mine)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Over the three groups together: relayed rows count at each hop."""
        return sum(one.bytes_sent for one in self._groups), sum(one.bytes_received for one in self._groups)

    @property
    def node_bytes_sent(self) -> int:
        """Payload that this peer sent to others of its node: to their slots, and to or from the relay."""
        return self._stage_groups[0].bytes_sent

    @property
    def relay_bytes_sent(self) -> int:
        """Payload that this peer sent to other nodes; 0 where it is no relay."""
        relays = self._stage_groups[1]
        return relays.bytes_sent if relays is not None else 0

    def check(self) -> None:
        for member in self._groups:
            member.check()

    def leave(self) -> None:
        """Nobody reads here what he was not sent."""

    def close(self) -> None:
        for member in self._groups:
            member.close()

    def _move(self, rows: Tensor, counts_PP: CountMatrix, path: Sequence[_Holders]) -> Exchange:
        if nothing_crosses(counts_PP):
            return Arrived(rows)
        hops = self._hops(counts_PP, path)
        stages: list[Callable[[Tensor], Exchange]] = []
        lies = hops[0].held
        for hop in hops:
            stages.append(_stage(hop, lies, counts_PP))
            lies = hop.arrived
        # Blocks by source, then by destination: source-major at an owner, destination-major at an origin.
        return StagedExchange(rows, stages, lambda last: _rearranged(last, lies, sorted(lies), counts_PP))

    def _hops(self, counts_PP: CountMatrix, path: Sequence[_Holders]) -> list[_Hop]:
        mine, peers = self.group.peer_slot, range(len(counts_PP))
        blocks = [(s, d) for s in peers for d in peers if counts_PP[s][d]]
        return [
            _hop(mine, blocks, before, after, group, self.group.spec, counts_PP)
            for (before, after), group in zip(pairwise(path), self._stage_groups, strict=True)
        ]


def _held_by(topology: Topology, spec: ProcessGroupSpec) -> tuple[_Holders, ...]:
    paths = [[hierarchical_path(topology, s, d).holders for d in spec.peers] for s in spec.peers]
    return tuple(tuple(tuple(spec.peer_slot(path[stage]) for path in line) for line in paths) for stage in range(4))


def _hop(
    mine: int,
    blocks: Sequence[_Block],
    before: _Holders,
    after: _Holders,
    group: ExpertGroup | None,
    full: ProcessGroupSpec,
    counts_PP: CountMatrix,
) -> _Hop:
    held = [(s, d) for s, d in blocks if before[s][d] == mine]
    if group is None:  # no relay: nothing of ours moves in the relays' stage
        return _Hop(None, held, held, held, [], [])
    seats = [full.peer_slot(rank) for rank in group.spec.peers]
    if all(before[s][d] == after[s][d] for s, d in blocks if before[s][d] in seats):
        return _Hop(None, held, held, held, [], [])  # every member of the group sees that it has nothing to do
    by_seat = [[(s, d) for s, d in held if after[s][d] == seat] for seat in seats]
    from_seat = [[(s, d) for s, d in blocks if before[s][d] == seat and after[s][d] == mine] for seat in seats]
    return _Hop(
        group,
        held,
        sent=[block for run in by_seat for block in run],
        arrived=[block for run in from_seat for block in run],
        send_counts=[sum(counts_PP[s][d] for s, d in run) for run in by_seat],
        recv_counts=[sum(counts_PP[s][d] for s, d in run) for run in from_seat],
    )


def _stage(hop: _Hop, lies: list[_Block], counts_PP: CountMatrix) -> Callable[[Tensor], Exchange]:
    group = hop.group
    if group is None:
        return lambda rows: Arrived(_rearranged(rows, lies, hop.sent, counts_PP))
    return lambda rows: group.all_to_all_v(
        _rearranged(rows, lies, hop.sent, counts_PP), hop.send_counts, hop.recv_counts
    )


def _rearranged(rows: Tensor, lies: list[_Block], wanted: list[_Block], counts_PP: CountMatrix) -> Tensor:
    """Blocks in another order."""
    if lies == wanted:
        return rows
    lengths = [counts_PP[s][d] for s, d in lies]
    starts = dict(zip(lies, accumulate(lengths, initial=0), strict=False))
    index = runs([starts[block] for block in wanted], [counts_PP[s][d] for s, d in wanted], rows.device)
    return rows.index_select(0, index)
