"""Orders against brute force: every slot is filled from the nearest source that is left; nothing else is touched."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.controlplane.fetching import (
    Attempt,
    Fault,
    FillOrder,
    FillOutcome,
    FromCheckpoint,
    FromPeer,
    digests_of,
    evidence,
    orders,
)
from ray_moe.controlplane.solve import Assignment, LayerAssignment, place
from ray_moe.controlplane.sources import CopyClass
from ray_moe.errors import PlacementError
from ray_moe.evidence import LogicalBytes
from ray_moe.identity import CheckpointVersion, GlobalRank, LogicalExpertId, PlacementVersion, ProcessGroupId
from ray_moe.placement import PlacementSnapshot
from ray_moe.topology import Domain, ProcessGroupSpec, Topology
from tests.layers import untimed

LAYER = 3
CHECKPOINT = CheckpointVersion("checkpoint-1")
CAPACITY = 8
Resident = dict[tuple[int, int, int], str]


def digest(expert: int) -> str:
    return f"digest-{expert}"


def placed(
    homes: list[tuple[int, int]],
    nodes: dict[int, str],
    prior: PlacementSnapshot | None = None,
    checkpoint: CheckpointVersion = CHECKPOINT,
) -> PlacementSnapshot:
    """A placement of (expert, rank) pairs, unverified where `prior` has nothing."""
    count = max(expert for expert, _ in homes) + 1
    pairs = tuple((LogicalExpertId(expert), GlobalRank(rank)) for expert, rank in homes)
    members: dict[str, list[GlobalRank]] = {}
    for rank, node in sorted(nodes.items()):
        members.setdefault(node, []).append(GlobalRank(rank))
    generation = 1 if prior is None else prior.generation + 1
    return place(
        Assignment((LayerAssignment(LAYER, count, pairs),)),
        generation=generation,
        version=PlacementVersion(f"placement-{generation}"),
        release_id="release-1",
        checkpoint=checkpoint,
        group=ProcessGroupSpec(ProcessGroupId("ep-group"), generation, tuple(map(GlobalRank, sorted(nodes)))),
        topology=Topology("topology-1", tuple(Domain(node, tuple(ranks)) for node, ranks in members.items())),
        prior=prior,
        capacity=CAPACITY,
    )


def verified(snapshot: PlacementSnapshot) -> PlacementSnapshot:
    return snapshot.with_digests(
        {
            (at.layer, slot.destination_rank.value, slot.pool_slot): digest(slot.logical_expert_id.value)
            for at in snapshot.layers
            for slot in at.slots
        }
    )


def resident_in(snapshot: PlacementSnapshot) -> Resident:
    return {
        (slot.destination_rank.value, at.layer, slot.pool_slot): slot.parameter_digest
        for at in snapshot.layers
        for slot in at.slots
    }


def done(order: FillOrder) -> FillOutcome:
    return FillOutcome(order, digest(order.expert), 100, 0.5)


SERVING = verified(placed([(0, 0), (1, 1), (0, 2), (2, 2)], {0: "a", 1: "a", 2: "b"}))
RESIDENT = resident_in(SERVING)


def test_a_source_is_the_same_rank_then_the_same_node_then_another_and_the_checkpoint_comes_last() -> None:
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    candidate = placed([(0, 0), (0, 0), (0, 1), (1, 3), (2, 2), (1, 1), (0, 2)], nodes, SERVING)
    bad: set[Attempt] = set()
    found = orders(candidate, SERVING, RESIDENT)
    assert [(order.expert, order.rank, order.source) for order in found] == [
        (0, 0, FromPeer(0, 0)),  # a second copy on the rank itself
        (0, 1, FromPeer(0, 0)),  # the same node
        (1, 3, FromPeer(1, 0)),  # another node
    ]
    assert {order.digest for order in found} == {digest(0), digest(1)}
    for order in found:
        bad.add(order.attempt)
    again = orders(candidate, SERVING, RESIDENT, bad=bad)
    assert [(order.expert, order.rank, order.source) for order in again] == [
        (0, 0, FromPeer(2, 0)),
        (0, 1, FromPeer(2, 0)),
        (1, 3, FromCheckpoint()),
    ]
    bad.update(order.attempt for order in again)
    last = orders(candidate, SERVING, RESIDENT, bad=bad - {again[2].attempt})
    assert [order.source for order in last] == [FromCheckpoint()] * 3
    with pytest.raises(PlacementError, match="layer 3 expert 1 on rank 3 slot 0: no source is left, the last to fail"):
        orders(candidate, SERVING, RESIDENT, bad=bad)


def test_equally_near_sources_share_the_reads() -> None:
    serving = verified(placed([(expert, rank) for expert in range(4) for rank in (0, 1)], {0: "a", 1: "a", 2: "a"}))
    candidate = placed([(expert, rank) for expert in range(4) for rank in (0, 1, 2)], {0: "a", 1: "a", 2: "a"}, serving)
    found = orders(candidate, serving, resident_in(serving))
    assert Counter(order.source.rank for order in found if isinstance(order.source, FromPeer)) == {0: 2, 1: 2}


def test_a_lost_rank_is_no_source_and_no_target() -> None:
    nodes = {0: "a", 1: "a", 2: "b"}
    candidate = placed([(0, 0), (1, 2), (2, 0)], {0: "a", 2: "b"}, SERVING)
    assert [(o.expert, o.source) for o in orders(candidate, SERVING, RESIDENT)] == [
        (1, FromPeer(1, 0)),  # a rank that is leaving serves as a source
        (2, FromPeer(2, 1)),
    ]
    lost = orders(candidate, SERVING, RESIDENT, lost_ranks={1})
    assert [(o.expert, o.source) for o in lost] == [(1, FromCheckpoint()), (2, FromPeer(2, 1))]
    onto_lost = placed([(0, 0), (1, 1), (2, 2), (0, 1)], nodes, SERVING)
    with pytest.raises(PlacementError, match="layer 3 expert 0 on rank 1 slot 1: the rank is lost"):
        orders(onto_lost, SERVING, RESIDENT, lost_ranks={1})


def test_the_first_read_of_a_checkpoint_has_no_digest_until_the_candidate_carries_what_arrived() -> None:
    first = placed([(0, 0), (1, 1), (0, 1)], {0: "a", 1: "a"})
    source = FromCheckpoint("tuned")
    given_out = orders(first, None, {}, checkpoint=source)
    assert [(o.source, o.digest) for o in given_out] == [(source, None)] * 3
    outcomes = [done(order) for order in given_out]
    resident = {o.order.attempt[:3]: o.digest for o in outcomes if o.digest is not None}
    assert orders(first, None, resident, checkpoint=source) == given_out, "nobody knows yet what is right"
    known = first.with_digests(digests_of(outcomes))
    assert known.verified
    assert orders(known, None, resident, checkpoint=source) == ()
    # A third copy is read from a peer: the table is known now.
    more = placed([(0, 0), (1, 1), (0, 1), (1, 0)], {0: "a", 1: "a"}, known)
    assert orders(more, known, resident)[0].source == FromPeer(1, 0)


def test_digests_of_another_checkpoint_are_no_digests_of_this_one() -> None:
    tuned = placed([(0, 0), (1, 1), (2, 2)], {0: "a", 1: "a", 2: "b"}, SERVING, CheckpointVersion("checkpoint-2"))
    assert [(o.source, o.digest) for o in orders(tuned, SERVING, RESIDENT)] == [(FromCheckpoint(), None)] * 3


def test_a_slot_that_holds_something_else_is_ordered_and_is_nobodys_source() -> None:
    candidate = placed([(0, 0), (1, 1), (2, 2), (2, 0)], {0: "a", 1: "a", 2: "b"}, SERVING)
    stale = RESIDENT | {(0, LAYER, 1): "something else", (2, LAYER, 1): "something else"}
    found = orders(candidate, SERVING, stale)
    assert [(o.rank, o.pool_slot, o.source) for o in found] == [(2, 1, FromCheckpoint()), (0, 1, FromCheckpoint())]


def test_orders_and_outcomes_survive_pickling() -> None:
    order = FillOrder(1, LAYER, 2, 0, FromPeer(0, 0), digest(0))
    outcome = FillOutcome(order, None, 0, 0.0, "it is gone", Fault.SOURCE)
    assert pickle.loads(pickle.dumps((order, outcome))) == (order, outcome)
    with pytest.raises(dataclasses.FrozenInstanceError):
        order.rank = 2  # type: ignore[misc]


def test_evidence_counts_what_moved_by_class_and_what_was_thrown_away_apart() -> None:
    def order(rank: int, source: FromPeer | FromCheckpoint) -> FillOrder:
        return FillOrder(rank, LAYER, 5, 0, source, digest(0))

    outcomes = [
        done(order(0, FromPeer(0, 1))),
        done(order(0, FromPeer(1, 1))),
        done(order(1, FromPeer(0, 1))),
        done(order(0, FromPeer(2, 1))),
        done(order(0, FromCheckpoint())),
        FillOutcome(order(0, FromPeer(2, 1)), digest(0), 0, 0.0),
        FillOutcome(order(0, FromPeer(2, 1)), None, 100, 0.1, "other bits", Fault.SOURCE),
        FillOutcome(order(0, FromPeer(2, 1)), None, 0, 9.0, "died", Fault.SOURCE),
    ]
    seen = evidence(outcomes, SERVING.topology)
    assert seen.copies == {
        CopyClass.KEEP: 1,
        CopyClass.SAME_GPU: 1,
        CopyClass.SAME_NODE: 2,
        CopyClass.CROSS_NODE: 1,
        CopyClass.HOST_CACHE: 0,
        CopyClass.CHECKPOINT: 1,
    }
    assert seen.payload == {kind: LogicalBytes(100 * seen.copies[kind]) for kind in CopyClass} | {
        CopyClass.KEEP: LogicalBytes(0)
    }
    assert (seen.discarded, seen.errors) == (LogicalBytes(100), ("other bits", "died"))


# -- Any placements, any failures


@st.composite
def changes(draw: st.DrawFn) -> tuple[PlacementSnapshot, PlacementSnapshot]:
    """A verified serving placement and a candidate on other ranks."""
    nodes = {rank: draw(st.sampled_from("ab")) for rank in range(4)}
    experts = draw(st.integers(1, 3))

    def homes(ranks: list[int]) -> list[tuple[int, int]]:
        first = [(expert, draw(st.sampled_from(ranks))) for expert in range(experts)]
        more = draw(st.lists(st.tuples(st.integers(0, experts - 1), st.sampled_from(ranks)), max_size=3))
        return first + more

    before = draw(st.lists(st.integers(0, 3), min_size=1, unique=True))
    after = draw(st.lists(st.integers(0, 3), min_size=1, unique=True))
    serving = verified(placed(homes(before), {rank: nodes[rank] for rank in before}))
    return serving, placed(homes(after), {rank: nodes[rank] for rank in after}, serving)


@given(change=changes(), choices=st.data())
@untimed
def test_whatever_fails_every_slot_is_filled_from_the_nearest_source_left_or_the_last_one_is_named(
    change: tuple[PlacementSnapshot, PlacementSnapshot], choices: st.DataObject
) -> None:
    serving, candidate = change
    node = {rank.value: name for rank, name in (serving.topology.owner | candidate.topology.owner).items()}
    resident, bad = resident_in(serving), set[Attempt]()
    untouched, expected = dict(resident), resident_in(verified(candidate))
    for _ in range(100):
        if any(isinstance(attempt[3], FromCheckpoint) for attempt in bad):
            # Others may have been filled since, and be sources: refused only if there is none for one of the slots.
            exhausted = [
                attempt
                for attempt in bad
                if isinstance(attempt[3], FromCheckpoint)
                and not any(
                    held == expected[attempt[:3]] and (*attempt[:3], FromPeer(rank, pool_slot)) not in bad
                    for (rank, layer, pool_slot), held in resident.items()
                )
                and attempt[:3] not in resident
            ]
            if exhausted:
                with pytest.raises(PlacementError, match="no source is left, the last to fail was the checkpoint"):
                    orders(candidate, serving, resident, bad=bad)
                return
        found = orders(candidate, serving, resident, bad=bad)
        if not found:
            break
        for order in found:
            assert order.attempt not in bad
            assert (order.rank, order.layer, order.pool_slot) not in untouched, "overwritten in place"
            left = [
                rank
                for (rank, _, pool_slot), held in resident.items()
                if held == order.digest and (*order.attempt[:3], FromPeer(rank, pool_slot)) not in bad
            ]
            distances = [0 if rank == order.rank else 1 if node[rank] == node[order.rank] else 2 for rank in left]
            if isinstance(order.source, FromCheckpoint):
                assert not left
            else:
                assert resident[order.source.rank, order.layer, order.source.pool_slot] == order.digest
                assert distances[left.index(order.source.rank)] == min(distances)
        for order in found:
            if choices.draw(st.booleans(), label="it works"):
                resident[order.rank, order.layer, order.pool_slot] = digest(order.expert)
            else:
                bad.add(order.attempt)
    assert found == ()
    assert expected.items() <= resident.items()
