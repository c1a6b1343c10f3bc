"""Slots pulled out of another pool's memory: right bytes or an error, whatever happens between the copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.errors import DeadlineError, DigestMismatchError, SlotError
from ray_moe.weights import copy_engine
from ray_moe.weights.checkpoint import ExpertLayout, ExpertWeights
from ray_moe.weights.copy_engine import BACKGROUND_SHARE, CopyEngine, Lender, Loan, Pull, Pulled
from ray_moe.weights.digest import parameter_digest
from ray_moe.weights.slots import ALIGNMENT, MappedSlot, SlotPool, SlotState
from tests.layers import untimed
from tests.shared_slots import SharedLane

# Odd sizes: 140, 70, 20 and 14 bytes in half precision, so that slots begin at all kinds of addresses.
LAYOUTS = {1: ExpertLayout(hidden=7, ffn=5, has_bias=True), 4: ExpertLayout(hidden=8, ffn=6)}
OWNER = 3


def make_weights(seed: int, layer: int = 1, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in LAYOUTS[layer].shapes.items()}
    return ExpertWeights(**tensors)


class Node:
    """Two ranks of a node: an owner, and a reader that copies out of the owner's memory."""

    def __init__(self, before_copy: Callable[[int], None] = lambda done: None, deadline_s: float = 5.0) -> None:
        self.owner_lane, self.lane = SharedLane(), SharedLane(before_copy)
        self.owner, self.pool = (
            SlotPool(tuple(LAYOUTS), 4, LAYOUTS.__getitem__, dtype=torch.bfloat16, memory=lane)
            for lane in (self.owner_lane, self.lane)
        )
        self.lender = Lender(self.owner, self.owner_lane)
        self.copies = CopyEngine(self.pool, self.lane, deadline_s=deadline_s)

    def fill_owner(self, slots: list[tuple[int, int]]) -> dict[tuple[int, int], str]:
        return {slot: self.owner.fill(*slot, make_weights(10 * slot[0] + slot[1], slot[0])) for slot in slots}

    def pulls(self, loan: Loan, slots: list[tuple[int, int]]) -> list[Pull]:
        """The first of the lent slots, `slots`, into the slots of the same numbers."""
        return [
            Pull(layer, at, slot, slot.digest, 0, f"rank {OWNER} slot {at}")
            for (layer, at), slot in zip(slots, loan.slots, strict=False)
            if isinstance(slot, MappedSlot)
        ]

    def pull(self, loan: Loan, pulls: list[Pull]) -> list[Pulled]:
        several = self.copies.pull(OWNER, loan.handle, pulls)
        return sorted(itertools.chain.from_iterable(several), key=lambda pulled: pulled.index)

    def close(self) -> None:
        self.owner_lane.unlink()
        self.lane.unlink()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()


ALL = [(layer, slot) for layer in LAYOUTS for slot in range(4)]


def test_pulled_slots_are_the_owners_bit_for_bit(node: Node) -> None:
    digests = node.fill_owner(ALL)
    loan = node.lender.lend(ALL)
    assert node.pull(loan, node.pulls(loan, ALL)) == [Pulled(index) for index in range(len(ALL))]
    assert node.pool.inventory() == digests
    for slot in ALL:
        assert (
            parameter_digest(node.pool.weights(*slot)) == digests[slot] == parameter_digest(node.owner.weights(*slot))
        )
    # What was pulled can be lent on.
    lent, again = Lender(node.pool, node.lane).lend(ALL), node.lender.lend(ALL)
    assert lent.slots == again.slots


def test_all_slabs_lie_apart_in_one_allocation_at_their_alignment(node: Node) -> None:
    ends = 0
    for layer in node.pool.layers:
        for name, tensor in node.pool.slab(layer).tensors().items():
            assert tensor.data_ptr() % ALIGNMENT == 0, name
            assert tensor.data_ptr() >= ends, name
            ends = tensor.data_ptr() + tensor.nbytes
    node.fill_owner(ALL)
    plain = SlotPool(tuple(LAYOUTS), 4, LAYOUTS.__getitem__, dtype=torch.bfloat16)
    for slot in ALL:
        assert plain.fill(*slot, make_weights(10 * slot[0] + slot[1], slot[0])) == node.owner.digest(*slot)
    with pytest.raises(SlotError, match="layer 1 slot 2: no other process can open this pool's memory"):
        plain.begin_mapped_read(1, 2)


def test_a_lent_slot_is_not_released_before_the_loan_ends(node: Node) -> None:
    node.fill_owner([(1, 0), (1, 1)])
    loan, other = node.lender.lend([(1, 0), (1, 1), (1, 2), (9, 0)]), node.lender.lend([(1, 0)])
    refused = [str(slot) for slot in loan.slots if isinstance(slot, SlotError)]
    assert refused == [
        "layer 1 slot 2: expected a resident slot, found a free one",
        "layer 9 has no slots; the pool has layers (1, 4)",
    ]
    with pytest.raises(SlotError, match="layer 1 slot 0: source in use: 2 unfinished"):
        node.owner.release(1, 0)
    node.lender.end(loan.number)
    node.lender.end(loan.number)
    node.owner.release(1, 1)
    with pytest.raises(SlotError, match="source in use: 1 unfinished"):
        node.owner.release(1, 0)
    node.lender.end(other.number)
    node.owner.release(1, 0)


@given(at=st.integers(0, 243), bit=st.integers(0, 7))
@untimed
def test_one_bit_that_flips_on_the_way_is_found_in_whichever_byte(at: int, bit: int) -> None:
    node = Node()
    try:
        node.fill_owner([(1, 1)])
        loan = node.lender.lend([(1, 1)])
        (pull,) = node.pulls(loan, [(1, 1)])
        starts = [(offset, size) for offset, size in pull.slot.spans]
        assert sum(size for _, size in starts) == 244
        for offset, size in starts:
            if at < size:
                node.owner_lane.open(loan.handle)
                node.owner_lane.opened[-1].data[offset + at] ^= 1 << bit
                break
            at -= size
        (pulled,) = node.pull(loan, [pull])
        assert isinstance(pulled.error, DigestMismatchError)
        assert "layer 1 slot 1: expert 0 from rank 3 slot 1: expected parameter digest" in str(pulled.error)
        assert node.pool.state(1, 1) is SlotState.FREE
    finally:
        node.close()


def test_a_source_that_is_released_and_filled_again_between_the_copies_is_never_taken_for_the_old_one() -> None:
    """The loan ran out under a slow reader; its four copies of the slot take bytes of both experts."""
    node = Node(lambda done: refill() if done == 2 else None)

    def refill() -> None:
        node.lender.end(loan.number)
        node.owner.release(1, 0)
        node.owner.fill(1, 0, make_weights(99))

    node.fill_owner([(1, 0), (1, 1)])
    loan = node.lender.lend([(1, 0), (1, 1)])
    first, second = node.pull(loan, node.pulls(loan, [(1, 0), (1, 1)]))
    assert isinstance(first.error, DigestMismatchError)
    assert second.error is None, "one slot's trouble is not another's"
    assert node.pool.inventory() == {(1, 1): node.owner.digest(1, 1)}
    node.close()


def test_what_cannot_be_right_is_refused_before_a_byte_moves(node: Node) -> None:
    node.fill_owner([(1, 0), (4, 0)])
    kept = node.pool.fill(1, 1, make_weights(5))
    loan = node.lender.lend([(1, 0), (4, 0)])
    good, other = node.pulls(loan, [(1, 0), (4, 0)])
    wrong = [
        Pull(1, 1, good.slot, good.digest, 0, "rank 3 slot 0"),  # resident
        Pull(1, 2, good.slot, "another", 0, "rank 3 slot 0"),
        Pull(1, 3, other.slot, None, 0, "rank 3 slot 0"),  # another layer's sizes
    ]
    found = node.pull(loan, [*wrong, Pull(1, 0, good.slot, None, 0, "rank 3 slot 0")])
    assert [type(pulled.error) for pulled in found] == [SlotError, SlotError, SlotError, type(None)]
    assert "a resident slot allows release" in str(found[0].error)
    assert f"rank 3 slot 0 holds digest {good.digest}, expected another" in str(found[1].error)
    assert "has tensors of [140, 70, 20, 14] bytes; rank 3 slot 0 has some of [192, 96]" in str(found[2].error)
    assert (node.pool.digest(1, 1), node.pool.free_slots(1)) == (kept, (2, 3))
    assert node.lane.copied == [140, 70, 20, 14]


def test_copies_that_do_not_end_leave_their_slots_out_of_use() -> None:
    """Bytes may still arrive: nobody gets the slots, and nobody is told that they are right."""
    late = Node(deadline_s=0.05)
    late.fill_owner(ALL)
    loan = late.lender.lend(ALL)
    late.lane.run_one = lambda: None  # type: ignore[method-assign]
    found = late.pull(loan, late.pulls(loan, ALL[:2]))
    assert [type(pulled.error) for pulled in found] == [DeadlineError] * 2
    assert "copies of 2 slots, 488 bytes" in str(found[0].error)
    assert [late.pool.state(*slot) for slot in ALL[:3]] == [SlotState.FILLING, SlotState.FILLING, SlotState.FREE]
    late.close()


def test_an_error_of_the_device_is_every_slots_of_the_batch(node: Node) -> None:
    def broken(copies: object) -> None:
        raise RuntimeError("an illegal address")

    node.fill_owner(ALL)
    loan = node.lender.lend(ALL)
    node.lane.copy = broken  # type: ignore[method-assign]
    found = node.pull(loan, node.pulls(loan, ALL[:2]))
    assert [str(pulled.error) for pulled in found] == ["an illegal address"] * 2
    assert node.pool.inventory() == {}


def test_a_pull_that_is_stopped_ends_what_it_has_begun(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    monkeypatch.setattr(copy_engine, "_BATCH_SLOTS", 2)
    digests = node.fill_owner(ALL)
    loan = node.lender.lend(ALL)
    looks = iter([False, False, True])
    several = list(node.copies.pull(OWNER, loan.handle, node.pulls(loan, ALL), lambda: next(looks)))
    assert [[pulled.index for pulled in some] for some in several] == [[0, 1], [2, 3]]
    assert node.pool.inventory() == {slot: digests[slot] for slot in ALL[:4]}
    # And so does one whose results nobody takes.
    loan = node.lender.lend(ALL[4:])
    unheard = node.copies.pull(OWNER, loan.handle, node.pulls(loan, ALL[4:]))
    next(unheard)
    del unheard
    assert node.pool.inventory() == digests


def test_a_mapping_is_opened_once_and_closed_when_its_owner_has_gone(node: Node) -> None:
    node.fill_owner(ALL)
    loan = node.lender.lend(ALL)
    for slot in (0, 1):
        node.pull(loan, [node.pulls(loan, ALL)[slot]])
    assert [mapping.closed for mapping in node.lane.opened] == [False]
    node.copies.keep([OWNER, 5])
    assert [mapping.closed for mapping in node.lane.opened] == [False]
    node.copies.keep([5])
    assert [mapping.closed for mapping in node.lane.opened] == [True]
    # Another process with that rank has other memory.
    node.copies.keep([OWNER])
    node.pull(loan, [node.pulls(loan, ALL)[2]])
    other = Node()
    other.fill_owner(ALL)
    theirs = other.lender.lend(ALL)
    node.pull(theirs, [other.pulls(theirs, ALL)[3]])
    assert [mapping.closed for mapping in node.lane.opened] == [True, True, False]
    assert len(node.pool.inventory()) == 4
    other.close()


def test_members_change_while_a_pull_is_under_way(node: Node) -> None:
    digests = node.fill_owner(ALL)
    loan = node.lender.lend(ALL)
    node.lane._before_copy = lambda done: node.copies.keep([5])
    assert all(pulled.error is None for pulled in node.pull(loan, node.pulls(loan, ALL)))
    assert node.pool.inventory() == digests
    assert [mapping.closed for mapping in node.lane.opened] == [True], "when the pull had ended"


def test_beside_an_engine_copies_take_a_quarter_of_what_they_were_measured_at(
    monkeypatch: pytest.MonkeyPatch, node: Node
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(copy_engine, "pause", pauses.append)
    monkeypatch.setattr(copy_engine, "_PIECE_BYTES", 64)
    node.lane.seconds_per_byte = 1e-4  # 10 kB/s, so 2.5 kB/s beside an engine
    node.fill_owner(ALL)
    loan = node.lender.lend(ALL)
    pulls = node.pulls(loan, ALL)
    assert node.copies.seconds(10) == 10 / 10e9, "nothing is known yet"
    node.pull(loan, pulls[:1])
    assert (node.copies.rate, pauses) == (pytest.approx(10e3), [])
    assert node.lane.copied == [140, 70, 20, 14], "flat out, each tensor is one copy"
    node.copies.pace(None)
    assert node.copies.seconds(2500) == pytest.approx(1.0)
    node.pull(loan, pulls[1:3])
    assert node.lane.copied[4:] == [64, 64, 12, 64, 6, 20, 14] * 2
    # The pauses are not slept here, so each is the wait for all that went before: 474 bytes before the last.
    assert max(pauses) == pytest.approx((2 * 244 - 14) / (BACKGROUND_SHARE * 10e3), rel=0.1)
    node.copies.pace(1e12)
    pauses.clear()
    node.pull(loan, pulls[3:4])
    assert pauses == [], "a cap that is given is the one that is kept"


def test_the_first_batch_beside_an_engine_is_measured_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch, node: Node
) -> None:
    monkeypatch.setattr(copy_engine, "pause", lambda seconds: None)
    monkeypatch.setattr(copy_engine, "_BATCH_SLOTS", 1)
    node.fill_owner(ALL)
    loan = node.lender.lend(ALL)
    node.copies.pace(None)
    rates = [node.copies.rate for _ in node.copies.pull(OWNER, loan.handle, node.pulls(loan, ALL))]
    assert rates == [pytest.approx(1e9)] * len(ALL)
    assert node.copies.seconds(250) == pytest.approx(1e-6)
