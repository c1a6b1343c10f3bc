"""Slots between GPUs by the copy engine, a process for each GPU: right bytes or an error; a source that really dies."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_moe.bench.gpu_ranks import Seat, ranks_for_tests, run_ranks
from ray_moe.comm.rendezvous import connect
from ray_moe.deadline import poll
from ray_moe.errors import DigestMismatchError, SlotError
from ray_moe.weights.checkpoint import ExpertLayout, ExpertWeights
from ray_moe.weights.copy_engine import CopyEngine, Lender, Loan, Pull, Pulled
from ray_moe.weights.digest import parameter_digest
from ray_moe.weights.slots import MappedSlot, SlotPool, SlotState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ranks_for_tests() < 2, reason="takes a CUDA device"),
]
SECONDS = 30.0
# Odd sizes, so that slots begin at all kinds of addresses; the largest is Qwen3-30B-A3B's.
LAYOUTS = {
    0: ExpertLayout(hidden=7, ffn=5, has_bias=True),
    3: ExpertLayout(hidden=2048, ffn=768),
    5: ExpertLayout(hidden=72, ffn=33, has_gate=False, has_bias=True),
}
OWN, CAPACITY = 4, 12  # each rank fills its first slots itself
SLOTS = list(itertools.product(LAYOUTS, range(OWN)))


def weights_of(rank: int, layer: int, slot: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * layer + slot)
    layout = LAYOUTS[layer]
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in layout.shapes.items()}
    return ExpertWeights(**tensors, has_gate=layout.has_gate)


class Rank:
    def __init__(self, seat: Seat) -> None:
        from ray_moe.weights.cuda_lane import CudaLane

        self.seat, self.store = seat, connect(seat.store, "copy-engine", SECONDS)
        self.lane = CudaLane(seat.device, deadline_s=SECONDS)
        self.pool = SlotPool(
            tuple(LAYOUTS),
            CAPACITY,
            LAYOUTS.__getitem__,
            dtype=torch.bfloat16,
            device=seat.device,
            memory=self.lane,
        )
        self.lender, self.copies = Lender(self.pool, self.lane), CopyEngine(self.pool, self.lane, deadline_s=SECONDS)
        self.digests = {slot: self.pool.fill(*slot, weights_of(seat.rank, *slot)) for slot in SLOTS}
        self.wrong: list[str] = []

    def say(self, key: str, value: Any = None) -> None:
        self.store.set(key, pickle.dumps(value).hex())

    def hear(self, key: str) -> Any:
        return pickle.loads(bytes.fromhex(self.store.get(key).decode()))  # the store's own deadline

    def expect(self, holds: bool, what: object) -> None:
        if not holds:
            self.wrong.append(f"rank {self.seat.rank}: {what}")

    def pulls(self, loan: Loan, shift: int) -> list[Pull]:
        """What was lent of `SLOTS`, each into the slot `shift` further on."""
        lent = [(place, slot) for place, slot in zip(SLOTS, loan.slots, strict=True) if isinstance(slot, MappedSlot)]
        self.expect(len(lent) == len(SLOTS), f"lent {len(lent)} of {len(SLOTS)} slots")
        return [Pull(layer, at + shift, slot, slot.digest, at, "its peer") for (layer, at), slot in lent]

    def pull(self, owner: int, loan: Loan, pulls: list[Pull]) -> list[Pulled]:
        found = itertools.chain.from_iterable(self.copies.pull(owner, loan.handle, pulls))
        return sorted(found, key=lambda pulled: pulled.index)

    def check(self, owner: int, shift: int) -> None:
        """Every slot against the seed that it was made from, by the bytes that are there now."""
        for layer, at in SLOTS:
            where = f"layer {layer} slot {at + shift} from rank {owner}"
            if self.pool.state(layer, at + shift) is not SlotState.RESIDENT:
                self.expect(False, f"{where} is {self.pool.state(layer, at + shift)}")
                continue
            wanted = parameter_digest(weights_of(owner, layer, at))
            self.expect(self.pool.digest(layer, at + shift) == wanted, f"{where} has another digest on record")
            self.expect(parameter_digest(self.pool.weights(layer, at + shift)) == wanted, f"{where} has other bytes")


def ring(rank: Rank) -> None:
    """Everybody pulls from the next one, flat out, and then from itself."""
    mine, owner = rank.seat.rank, (rank.seat.rank + 1) % rank.seat.ranks
    loan = rank.lender.lend(SLOTS)
    rank.say(f"loan of {mine}", loan)
    theirs = rank.hear(f"loan of {owner}")
    found = rank.pull(owner, theirs, rank.pulls(theirs, OWN))
    rank.expect(found == [Pulled(index) for index in range(len(SLOTS))], found)
    rank.check(owner, OWN)
    rank.expect(rank.copies.rate > 0, "no rate was measured")
    try:
        rank.pool.release(*SLOTS[0])
        rank.expect(False, "a lent slot was released")
    except SlotError as error:
        rank.expect("source in use" in str(error), error)
    own = rank.lender.lend(SLOTS)
    found = rank.pull(mine, own, rank.pulls(own, 2 * OWN))
    rank.expect(all(pulled.error is None for pulled in found), found)
    rank.check(mine, 2 * OWN)
    rank.say(f"{mine} has pulled")
    for other in range(rank.seat.ranks):
        rank.hear(f"{other} has pulled")
    rank.lender.end(loan.number)
    rank.lender.end(own.number)
    for layer, at in SLOTS:
        rank.pool.release(layer, at + OWN)
        rank.pool.release(layer, at + 2 * OWN)


def flipped(rank: Rank) -> None:
    """One bit of the last rank's memory turns over between the loan and the copy, in a bias and in a large matrix."""
    last = rank.seat.ranks - 1
    bad = {SLOTS.index((0, 2)): ("down_bias", 13), SLOTS.index((3, 1)): ("down", 2048 * 768 * 2 - 1)}
    if rank.seat.rank == last:
        loan = rank.lender.lend(SLOTS)
        for flip in (True, False):
            for index, (name, byte) in bad.items():
                layer, at = SLOTS[index]
                rank.pool.slab(layer).tensors()[name][at].view(-1).view(torch.uint8)[byte] ^= 16
            torch.cuda.synchronize()
            rank.say(f"flipped {flip}", loan)
            rank.hear(f"read {flip}")
        rank.lender.end(loan.number)
    elif rank.seat.rank == 0:
        loan = rank.hear("flipped True")
        for pulled in rank.pull(last, loan, rank.pulls(loan, OWN)):
            right = isinstance(pulled.error, DigestMismatchError) if pulled.index in bad else pulled.error is None
            rank.expect(right, f"a flipped bit: {SLOTS[pulled.index]}: {pulled.error}")
        free = {layer: rank.pool.free_slots(layer) for layer in (0, 3)}
        rank.expect(2 + OWN in free[0] and 1 + OWN in free[3], f"free after a flipped bit: {free}")
        rank.say("read True")
        loan = rank.hear("flipped False")
        again = [pull for index, pull in enumerate(rank.pulls(loan, OWN)) if index in bad]
        rank.expect(rank.pull(last, loan, again) == [Pulled(0), Pulled(1)], "not good again")
        rank.check(last, OWN)
        rank.say("read False")


def killed(rank: Rank) -> None:
    """The last rank is killed when a paced pull has brought its first slots; the others arrive after its death."""
    last = rank.seat.ranks - 1
    if rank.seat.rank == last:
        assert rank.wrong == [], rank.wrong
        rank.say("last words", (os.getpid(), rank.lender.lend(SLOTS)))
        rank.hear("begun")
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank.seat.rank == 0:
        pid, loan = rank.hear("last words")
        rank.copies.pace(2e7)
        dead = False
        results: list[Pulled] = []
        for several in rank.copies.pull(last, loan.handle, rank.pulls(loan, 2 * OWN)):
            results += several
            if not dead:
                rank.say("begun")
                dead = poll(lambda: has_died(pid), 10)
                rank.expect(dead, "the source lives on")
                rank.expect(len(results) < len(SLOTS), "the pull was over before the source died")
        rank.expect(len(results) == len(SLOTS), f"{len(results)} results")
        # Measured: the memory outlives its owner. What counts is that no slot is wrong.
        rank.expect(all(pulled.error is None for pulled in results), f"after the source's death: {results}")
        rank.check(last, 2 * OWN)
        rank.copies.keep([])
        torch.cuda.synchronize()


def has_died(pid: int) -> bool:
    """Or is a zombie, whose parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def work(seat: Seat) -> list[str]:
    rank = Rank(seat)
    for part in (ring, flipped, killed):
        part(rank)
    return rank.wrong


def test_slots_arrive_bit_for_bit_or_not_at_all_also_when_the_source_is_killed() -> None:
    ranks = ranks_for_tests()
    wrong = run_ranks(work, ranks=ranks, seconds=90, dying={ranks - 1})
    assert [each or [] for each in wrong] == [[]] * ranks
