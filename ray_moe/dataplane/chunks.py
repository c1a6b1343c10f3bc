"""Runs of one plan's rows, so that several exchanges of it can be in flight (specification 0x09E).

A chunk is the same share of every pair of peers' rows. Both ends derive it from the layout that they agreed on:
nothing more is exchanged. Letters: N routes, R received rows, S this peer's slots, P peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from ray_moe.comm.transports import Part, chunk_counts, chunk_positions, chunk_span
from ray_moe.dataplane.plan import Layout, Plan


@dataclass(frozen=True, eq=False)
class Chunk:
    """One run: `order_N` maps its send positions to semantic positions, `layout` is what its exchange moves."""

    order_N: Tensor
    layout: Layout


def in_chunks(plan: Plan, layout: Layout, chunks: int, mine: int) -> tuple[Chunk, ...]:
    """The chunks of the peer in slot `mine`, in order; together they are the whole, each row in exactly one."""
    if chunks == 1:
        return (Chunk(plan.order_N, layout),)
    return tuple(_chunk(plan, layout, (index, chunks), mine) for index in range(chunks))


def _chunk(plan: Plan, layout: Layout, part: Part, mine: int) -> Chunk:
    counts_PP = chunk_counts(layout.counts_PP, part)
    recv_counts_PS = tuple(_share(counts_S, part) for counts_S in layout.recv_counts_PS)
    positions = chunk_positions(layout.send_counts_P, part, plan.order_N.device)
    return Chunk(
        plan.order_N.index_select(0, positions),
        Layout(
            send_counts_P=counts_PP[mine],
            send_offsets_P1=tuple(accumulate(counts_PP[mine], initial=0)),
            recv_counts_P=tuple(row[mine] for row in counts_PP),
            recv_counts_PS=recv_counts_PS,
            counts_PP=counts_PP,
            expert_offsets_S1=tuple(accumulate(map(sum, zip(*recv_counts_PS, strict=True)), initial=0)),
            slot_rows_S=layout.slot_rows_S,
            routes_P=layout.routes_P,
        ),
    )


def _share(counts_S: Sequence[int], part: Part) -> tuple[int, ...]:
    """How many of a source's rows for each slot lie in its part: of [2, 3] the first half is [2, 0]."""
    start, end = chunk_span(sum(counts_S), part)
    bounds = [min(max(edge, start), end) for edge in accumulate(counts_S, initial=0)]
    return tuple(after - before for before, after in pairwise(bounds))
