"""Slots fetched out of the memory of real actors of the same node, whatever becomes of these meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from ray_moe.actors.fill import Filler, SlotGiver
from ray_moe.controlplane.fetching import Fault, FillOrder, FillOutcome, FromCheckpoint, FromPeer
from ray_moe.deadline import ray_get
from ray_moe.errors import SlotError
from ray_moe.models import tiny_moe_path
from ray_moe.weights.checkpoint import Checkpoint, ExpertWeights
from ray_moe.weights.copy_engine import Loan
from ray_moe.weights.digest import parameter_digest
from ray_moe.weights.slots import SlotPool
from tests.shared_slots import SharedLane

pytestmark = pytest.mark.cluster

SECONDS = 60.0
CAPACITY = 8


class Rank(SlotGiver):
    """A rank with a pool whose memory others of its node map, and a filler over it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.checkpoint = Checkpoint(Path(tiny_moe_path()))
        self.lane = SharedLane()
        self.pool = SlotPool(
            self.checkpoint.moe_layers,
            CAPACITY,
            self.checkpoint.layout,
            dtype=self.checkpoint.dtype,
            memory=self.lane,
        )
        self.exported = 0

    async def meet(self, peers: dict[int, Any], node: str = "a", deadline_s: float = 20.0) -> str:
        """Begin a test: peers by rank, an empty pool. The name of this rank's memory."""
        for layer, pool_slot in self.pool.inventory():
            self.pool.release(layer, pool_slot)
        self._filler = Filler(
            self.pool,
            lambda key, layer, expert: self.read(layer, expert),
            peers.__getitem__,
            deadline_s=deadline_s,
            node=node,
            lane=self.lane,
        )
        self.exported = 0
        return self.lane.handle.decode()

    def read(self, layer: int, expert: int) -> ExpertWeights:
        return self.checkpoint.expert(layer, expert)

    async def fill(self, orders: Sequence[FillOrder]) -> tuple[FillOutcome, ...]:
        return await self._given.fill(orders)

    async def fill_and_give_up(self, orders: Sequence[FillOrder], seconds: float) -> int:
        """Cancel a fill half way; how many of its slots are resident once what had begun has ended."""
        task = asyncio.create_task(self._given.fill(orders))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(1.0)
        return len(self.pool.inventory())

    async def export_slots(self, slots: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        self.exported += len(slots)
        return await super().export_slots(slots)

    async def how_many_exported(self) -> int:
        return self.exported

    async def resident_digests(self) -> dict[tuple[int, int], str]:
        """Of the bytes that are there now."""
        return {slot: parameter_digest(self.pool.weights(*slot)) for slot in self.pool.inventory()}

    async def free(self, layer: int, pool_slot: int) -> str:
        try:
            self.pool.release(layer, pool_slot)
        except SlotError as error:
            return str(error)
        return ""


class DiesWhenItHasLent(Rank):
    async def lend_slots(self, slots: Sequence[tuple[int, int]], node: str, seconds: float) -> Loan | None:
        loan = await super().lend_slots(slots, node, seconds)
        # After the answer has left, and before the reader has begun with what it names.
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGKILL)
        return loan


class CopiesSlowly(Rank):
    """Its source is dead before the first byte moves."""

    def __init__(self) -> None:
        super().__init__()
        self.lane._before_copy = self.wait_a_moment

    def wait_a_moment(self, copied: int) -> None:
        if copied == 0:
            signal.sigtimedwait([], 1.0)


class Dies(Rank):
    async def lend_slots(self, slots: Sequence[tuple[int, int]], node: str, seconds: float) -> Loan | None:
        os.kill(os.getpid(), signal.SIGKILL)
        return None


class LendsForAMoment(Rank):
    """Its loans end at once, and it fills the first slot again before the reader can have read it."""

    async def lend_slots(self, slots: Sequence[tuple[int, int]], node: str, seconds: float) -> Loan | None:
        loan = await super().lend_slots(slots, node, seconds)
        assert loan is not None
        self._given.end_loan(loan.number)
        layer, pool_slot = slots[0]
        self.pool.release(layer, pool_slot)
        self.pool.fill(layer, pool_slot, self.read(layer, 15))
        return loan


class NamesMemoryThatIsNotThere(Rank):
    async def lend_slots(self, slots: Sequence[tuple[int, int]], node: str, seconds: float) -> Loan | None:
        loan = await super().lend_slots(slots, node, seconds)
        assert loan is not None
        return Loan(loan.number, b"/dev/shm/not-there", loan.slots)


def ask(method: Any, *args: Any) -> Any:
    return ray_get(method.remote(*args), SECONDS, "an actor of the test")


def started(kind: type[Rank]) -> Any:
    return ray.remote(kind).options(num_cpus=0, max_concurrency=100).remote()


@pytest.fixture(scope="module")
def met() -> Iterator[Any]:
    """Actors as ranks 0, 1, ..., on the nodes that are given for them, each with an empty pool."""
    names: list[str] = []

    def meet(*actors: Any, nodes: str = "aaa") -> tuple[Any, ...]:
        for actor, node in zip(actors, nodes, strict=False):
            names.append(ask(actor.meet, dict(enumerate(actors)), node))
        return actors

    yield meet
    for name in names:
        Path(name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def two(local_ray: None) -> tuple[Any, Any]:
    return started(Rank), started(Rank)


@pytest.fixture(scope="module")
def layer() -> int:
    return Checkpoint(Path(tiny_moe_path())).moe_layers[0]


@pytest.fixture(scope="module")
def expert_bytes() -> int:
    return Checkpoint(Path(tiny_moe_path())).expert_bytes


def first_read(actor: Any, rank: int, layer: int, experts: Sequence[int]) -> dict[int, str]:
    given = [FillOrder(rank, layer, slot, expert, FromCheckpoint(), None) for slot, expert in enumerate(experts)]
    outcomes = ask(actor.fill, given)
    assert [outcome.error for outcome in outcomes] == [""] * len(given)
    return {outcome.order.expert: outcome.digest for outcome in outcomes}


def orders(layer: int, digests: dict[int, str], rank: int = 1) -> list[FillOrder]:
    """Experts into slots 0, 1, ... of rank 0 from the same slots of `rank`."""
    return [
        FillOrder(0, layer, slot, expert, FromPeer(rank, slot), digest)
        for slot, (expert, digest) in enumerate(digests.items())
    ]


def test_slots_are_fetched_from_a_peer_of_the_node_and_from_ones_own(
    two: tuple[Any, Any], met: Any, layer: int, expert_bytes: int
) -> None:
    reader, peer = met(*two)
    digests = first_read(peer, 1, layer, [5, 3, 1])
    wanted = orders(layer, digests)
    outcomes = ask(reader.fill, wanted)
    assert [outcome.order for outcome in outcomes] == wanted
    assert all((o.digest, o.nbytes, o.error) == (o.order.digest, expert_bytes, "") for o in outcomes)
    assert all(outcome.seconds > 0 for outcome in outcomes)
    beside = FillOrder(0, layer, 6, 5, FromPeer(0, 0), digests[5])
    (outcome,) = ask(reader.fill, [beside])
    assert (outcome.digest, outcome.nbytes, outcome.error) == (digests[5], expert_bytes, "")
    found = ask(reader.resident_digests)
    assert found == {(layer, slot): digest for slot, digest in enumerate(digests.values())} | {(layer, 6): digests[5]}
    assert ask(peer.how_many_exported) == 0
    for actor, slot in ((peer, 0), (reader, 0)):
        assert ask(actor.free, layer, slot) == "", "no copy holds on to its source"


def test_a_slot_that_cannot_be_lent_fails_alone_and_one_that_holds_another_expert_too(
    two: tuple[Any, Any], met: Any, layer: int
) -> None:
    reader, peer = met(*two)
    digests = first_read(peer, 1, layer, [5, 3])
    wanted = [*orders(layer, digests), FillOrder(0, layer, 5, 9, FromPeer(1, 7), "a digest")]
    wanted[1] = FillOrder(0, layer, 1, 9, FromPeer(1, 1), "another digest")
    outcomes = ask(reader.fill, wanted)
    assert [(o.digest, o.fault) for o in outcomes] == [(digests[5], None), (None, Fault.SOURCE), (None, Fault.SOURCE)]
    assert "rank 1 slot 1 holds digest" in outcomes[1].error
    assert "expected a resident slot, found a free one" in outcomes[2].error
    assert (outcomes[1].nbytes, outcomes[2].nbytes) == (0, 0)


def test_between_nodes_and_where_memory_cannot_be_mapped_slots_come_through_the_object_store(
    two: tuple[Any, Any], met: Any, layer: int
) -> None:
    reader, peer = met(*two, nodes="ab")
    digests = first_read(peer, 1, layer, [5, 3])
    assert [o.digest for o in ask(reader.fill, orders(layer, digests))] == list(digests.values())
    assert ask(peer.how_many_exported) == 2
    reader, peer = met(two[0], started(NamesMemoryThatIsNotThere))
    digests = first_read(peer, 1, layer, [5, 3])
    wanted = [*orders(layer, digests), FillOrder(0, layer, 5, 9, FromPeer(1, 7), "a digest")]
    assert [o.digest for o in ask(reader.fill, wanted)] == [*digests.values(), None]
    assert ask(peer.how_many_exported) == 3
    assert ask(peer.free, layer, 0) == "", "the loan has ended"


def test_a_source_that_dies_after_it_has_lent_gives_right_bytes_all_the_same(
    local_ray: None, met: Any, layer: int
) -> None:
    reader, peer = met(started(CopiesSlowly), started(DiesWhenItHasLent))
    digests = first_read(peer, 1, layer, [5, 3])
    assert [(o.digest, o.error) for o in ask(reader.fill, orders(layer, digests))] == [
        (digest, "") for digest in digests.values()
    ]
    assert ask(reader.resident_digests) == {(layer, slot): digest for slot, digest in enumerate(digests.values())}


def test_a_source_that_is_dead_when_it_is_asked_fails_its_orders_and_no_other(
    two: tuple[Any, Any], met: Any, layer: int
) -> None:
    reader, _, peer = met(two[0], started(Dies), two[1])
    digests = first_read(peer, 2, layer, [5, 3])
    first, second = orders(layer, digests, rank=2)
    outcomes = ask(reader.fill, [FillOrder(0, layer, 0, 5, FromPeer(1, 0), first.digest), second])
    assert [(o.digest, o.fault) for o in outcomes] == [(None, Fault.SOURCE), (digests[3], None)]
    assert ask(reader.fill, [first])[0].digest == digests[5]


def test_a_slot_that_was_filled_again_under_a_reader_is_refused_by_its_bytes(
    two: tuple[Any, Any], met: Any, layer: int, expert_bytes: int
) -> None:
    reader, peer = met(two[0], started(LendsForAMoment))
    digests = first_read(peer, 1, layer, [5, 3])
    outcomes = ask(reader.fill, orders(layer, digests))
    assert [(o.digest, o.fault, o.nbytes) for o in outcomes] == [
        (None, Fault.SOURCE, expert_bytes),
        (digests[3], None, expert_bytes),
    ]
    assert "expert 5 from rank 1 slot 0: expected parameter digest" in outcomes[0].error
    assert ask(reader.resident_digests) == {(layer, 1): digests[3]}


def test_a_fill_that_is_given_up_gives_its_loan_back(two: tuple[Any, Any], met: Any, layer: int) -> None:
    reader, peer = met(started(CopiesSlowly), two[1])
    digests = first_read(peer, 1, layer, [5, 3])
    assert ask(reader.fill_and_give_up, orders(layer, digests), 0.5) == 2, "what was begun has ended well"
    assert ask(peer.free, layer, 0) == ""
