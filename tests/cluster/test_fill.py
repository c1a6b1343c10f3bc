"""Slots filled between real actors: from peers and from a checkpoint, whatever one source does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from ray_moe.actors.fill import Filler
from ray_moe.controlplane.fetching import Fault, FillOrder, FillOutcome, FillSource, FromCheckpoint, FromPeer
from ray_moe.deadline import ray_get
from ray_moe.models import tiny_moe_path
from ray_moe.weights.checkpoint import Checkpoint, ExpertWeights
from ray_moe.weights.slots import SlotPool
from ray_moe.weights.transfer import SlotBytes

pytestmark = pytest.mark.cluster

SECONDS = 60.0
CAPACITY = 6


class Holder:
    """A rank with nothing but a pool. Its chunks are small, so that a fill takes several answers."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.checkpoint = Checkpoint(Path(tiny_moe_path()))
        self.pool = SlotPool(self.checkpoint.moe_layers, CAPACITY, self.checkpoint.layout, dtype=self.checkpoint.dtype)

    async def meet(self, peers: dict[int, Any], deadline_s: float, bytes_per_second: float | None = None) -> None:
        """Begin a test: peers by rank, an empty pool."""
        for layer, pool_slot in self.pool.inventory():
            self.pool.release(layer, pool_slot)
        self.filler = Filler(
            self.pool,
            self.read,
            peers.__getitem__,
            bytes_per_second=bytes_per_second,
            deadline_s=deadline_s,
            chunk_bytes=2 * self.checkpoint.expert_bytes,
        )

    def read(self, key: str, layer: int, expert: int) -> ExpertWeights:
        assert key == ""
        return self.checkpoint.expert(layer, expert)

    async def fill(self, orders: Sequence[FillOrder]) -> tuple[FillOutcome, ...]:
        return await self.filler.fill(orders)

    async def fill_reporting(self, orders: Sequence[FillOrder]) -> tuple[tuple[FillOutcome, ...], list[FillOutcome]]:
        heard: list[FillOutcome] = []
        return await self.filler.fill(orders, heard.append), heard

    async def fill_twice(self, orders: Sequence[FillOrder]) -> tuple[tuple[FillOutcome, ...], ...]:
        return tuple(await asyncio.gather(self.filler.fill(orders), self.filler.fill(orders)))

    async def fill_and_give_up(self, orders: Sequence[FillOrder], seconds: float) -> tuple[int, ...]:
        """Cancel a fill half way; the layer's free slots once what had begun has ended."""
        task = asyncio.create_task(self.filler.fill(orders))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.5)
        return self.pool.free_slots(orders[0].layer)

    async def export_slots(self, slots: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        return await self.filler.export_slots(slots)

    async def inventory(self) -> dict[tuple[int, int], str]:
        return self.pool.inventory()

    async def free(self, layer: int, pool_slot: int) -> None:
        self.pool.release(layer, pool_slot)


class FlipsABit(Holder):
    """The last slot of its every answer differs in one bit."""

    async def export_slots(self, slots: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        given = list(await super().export_slots(slots))
        assert isinstance(given[-1], SlotBytes)
        given[-1].tensors["down"][0, 0] ^= 1
        return tuple(given)


class IsSlow(Holder):
    async def export_slots(self, slots: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        await asyncio.sleep(30)
        return await super().export_slots(slots)


class Dies(Holder):
    async def export_slots(self, slots: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        os.kill(os.getpid(), signal.SIGKILL)
        return ()


class TalksNonsense(Holder):
    async def export_slots(self, slots: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        return (None,)


def ask(method: Any, *args: Any) -> Any:
    return ray_get(method.remote(*args), SECONDS, "an actor of the test")


def started(kind: type[Holder]) -> Any:
    return ray.remote(kind).options(num_cpus=0, max_concurrency=100).remote()


@pytest.fixture(scope="module")
def honest(local_ray: None) -> tuple[Any, Any]:
    """Two actors for all tests: they import torch once. Ray ends them when their handles go."""
    return started(Holder), started(Holder)


def met(*actors: Any, deadline_s: float = 20.0) -> tuple[Any, ...]:
    """The actors as ranks 0, 1, ..., each with an empty pool."""
    for actor in actors:
        ask(actor.meet, dict(enumerate(actors)), deadline_s)
    return actors


@pytest.fixture(scope="module")
def layer() -> int:
    return Checkpoint(Path(tiny_moe_path())).moe_layers[0]


@pytest.fixture(scope="module")
def expert_bytes() -> int:
    return Checkpoint(Path(tiny_moe_path())).expert_bytes


def first_read(actor: Any, rank: int, layer: int, experts: Sequence[int]) -> dict[int, str]:
    """Experts into slots 0, 1, ... from the checkpoint; digest by expert."""
    given = [FillOrder(rank, layer, slot, expert, FromCheckpoint(), None) for slot, expert in enumerate(experts)]
    outcomes = ask(actor.fill, given)
    assert [outcome.error for outcome in outcomes] == [""] * len(given)
    return {outcome.order.expert: outcome.digest for outcome in outcomes}


def orders(layer: int, digests: dict[int, str], source: FillSource | None = None, rank: int = 0) -> list[FillOrder]:
    """Experts into slots 0, 1, ... of `rank`; without a source, from the same slots of rank 1."""
    return [
        FillOrder(rank, layer, slot, expert, source or FromPeer(1, slot), digest)
        for slot, (expert, digest) in enumerate(digests.items())
    ]


def test_slots_are_filled_from_a_peer_in_several_answers_and_a_second_call_moves_nothing(
    honest: tuple[Any, Any], layer: int, expert_bytes: int
) -> None:
    reader, peer = met(*honest)
    digests = first_read(peer, 1, layer, [5, 3, 1, 0, 2])
    wanted = orders(layer, digests)
    outcomes, heard = ask(reader.fill_reporting, wanted)
    assert [outcome.order for outcome in outcomes] == wanted
    assert heard == list(outcomes)
    assert all((o.digest, o.nbytes, o.error, o.fault) == (o.order.digest, expert_bytes, "", None) for o in outcomes)
    assert all(outcome.seconds > 0 for outcome in outcomes)
    expected = {(layer, slot): digest for slot, digest in enumerate(digests.values())}
    assert ask(reader.inventory) == expected
    again = ask(reader.fill, wanted)
    assert [(o.digest, o.nbytes, o.error) for o in again] == [(order.digest, 0, "") for order in wanted]
    # The same rank, the checkpoint's table known by now.
    digest = digests[5]
    beside = FillOrder(0, layer, 5, 5, FromPeer(0, 0), digest)
    assert [(o.digest, o.nbytes, o.error) for o in ask(reader.fill, [beside])] == [(digest, expert_bytes, "")]
    ask(reader.free, layer, 5)
    from_disk = FillOrder(0, layer, 5, 5, FromCheckpoint(), digest)
    assert [(o.digest, o.nbytes, o.error) for o in ask(reader.fill, [from_disk])] == [(digest, expert_bytes, "")]
    ask(peer.free, layer, 0)  # no copy holds on to its source


def test_a_first_read_that_is_asked_for_again_is_compared_with_the_checkpoint(
    honest: tuple[Any, Any], layer: int
) -> None:
    reader, _ = met(*honest)
    digests = first_read(reader, 0, layer, [4])
    again = FillOrder(0, layer, 0, 4, FromCheckpoint(), None)
    other = FillOrder(0, layer, 0, 5, FromCheckpoint(), None)
    same, different = ask(reader.fill, [again])[0], ask(reader.fill, [other])[0]
    assert (same.digest, same.nbytes, same.error) == (digests[4], 0, "")
    assert (different.digest, different.nbytes, different.fault) == (None, 0, Fault.SLOT)
    assert "expert 5 from an earlier fill: expected parameter digest" in different.error


def test_a_flipped_bit_fails_its_own_order_alone_and_another_source_makes_it_good(
    honest: tuple[Any, Any], layer: int, expert_bytes: int
) -> None:
    reader, liar, other = met(honest[0], started(FlipsABit), honest[1])
    digests = first_read(liar, 1, layer, [5, 3, 1])
    first_read(other, 2, layer, [5, 3, 1])
    outcomes = ask(reader.fill, orders(layer, digests))
    # Two answers, of two slots and of one: the last of each is wrong.
    assert [outcome.fault for outcome in outcomes] == [None, Fault.SOURCE, Fault.SOURCE]
    bad = outcomes[1]
    assert (bad.digest, bad.nbytes) == (None, expert_bytes)
    assert f"layer {layer} slot 1: expert 3 from rank 1 slot 1: expected parameter digest {digests[3]}" in bad.error
    assert ask(reader.inventory) == {(layer, 0): digests[5]}, "what did not verify was never resident"
    retried = [FillOrder(0, layer, slot, e, FromPeer(2, slot), digests[e]) for slot, e in ((1, 3), (2, 1))]
    assert [outcome.error for outcome in ask(reader.fill, retried)] == ["", ""]
    assert ask(reader.inventory) == {(layer, slot): digests[expert] for slot, expert in enumerate([5, 3, 1])}


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (IsSlow, "2 slots of rank 1 did not finish within 2 s"),
        (Dies, "ActorDiedError"),
        (TalksNonsense, "ValueError: zip"),
    ],
    ids=["slow", "dies", "nonsense"],
)
def test_a_source_that_fails_is_given_up_and_the_orders_from_others_go_on(
    honest: tuple[Any, Any], layer: int, kind: type[Holder], error: str
) -> None:
    reader, failing, other = met(honest[0], started(kind), honest[1], deadline_s=2.0)
    digests = first_read(failing, 1, layer, [5, 3, 1])
    digest = first_read(other, 2, layer, [0])[0]
    begin = time.monotonic()
    mixed = [*orders(layer, digests), FillOrder(0, layer, 3, 0, FromPeer(2, 0), digest)]
    outcomes = ask(reader.fill, mixed)
    assert time.monotonic() - begin < 20, "one deadline, not one for every answer"
    assert [outcome.fault for outcome in outcomes] == [Fault.SOURCE] * 3 + [None]
    assert all(error in outcome.error and outcome.nbytes == 0 for outcome in outcomes[:3])
    assert ask(reader.inventory) == {(layer, 3): digest}
    assert [o.error for o in ask(reader.fill, orders(layer, digests, FromCheckpoint()))] == [""] * 3


def test_a_slot_that_the_peer_does_not_hold_fails_alone(honest: tuple[Any, Any], layer: int) -> None:
    reader, peer = met(*honest)
    digests = first_read(peer, 1, layer, [5, 3, 1])
    ask(peer.free, layer, 0)
    outcomes = ask(reader.fill, orders(layer, digests))
    assert [outcome.fault for outcome in outcomes] == [Fault.SOURCE, None, None]
    assert outcomes[0].error == f"layer {layer} slot 0: expected a resident slot, found a free one"


def test_a_slot_that_holds_something_else_or_is_being_filled_is_refused_and_left_as_it_is(
    honest: tuple[Any, Any], layer: int
) -> None:
    reader, peer = met(*honest)
    digests = first_read(peer, 1, layer, [5, 3])
    held = first_read(reader, 0, layer, [7])
    before = ask(reader.inventory)
    refused, _ = ask(reader.fill, orders(layer, digests))
    assert (refused.fault, refused.nbytes) == (Fault.SLOT, 0)
    assert refused.error.endswith(f"resident with digest {held[7]}, expected {digests[5]}: free it first")
    assert before.items() <= ask(reader.inventory).items()
    ask(reader.free, layer, 1)
    beyond = FillOrder(0, layer, CAPACITY, 5, FromPeer(1, 0), digests[5])
    assert [(o.fault, o.nbytes) for o in ask(reader.fill, [beyond])] == [(Fault.SLOT, 0)]
    ask(reader.free, layer, 0)
    first, second = ask(reader.fill_twice, orders(layer, digests))
    assert [outcome.error for outcome in first] == ["", ""]
    assert [outcome.fault for outcome in second] == [Fault.SLOT] * 2
    assert all("filling, by another call" in outcome.error for outcome in second)


def test_a_cap_spreads_a_fill_over_time_and_a_fill_given_up_leaves_its_slots_free(
    honest: tuple[Any, Any], layer: int, expert_bytes: int
) -> None:
    reader, peer = met(*honest)
    digests = first_read(peer, 1, layer, [5, 3, 1, 0, 2])
    ask(reader.meet, {0: reader, 1: peer}, 20.0, 2.0 * expert_bytes)
    wanted = orders(layer, digests)
    free = ask(reader.fill_and_give_up, wanted, 0.75)  # two experts are here, one of them after half a second
    assert free == (2, 3, 4, 5)
    begin = time.monotonic()
    outcomes = ask(reader.fill, wanted)
    # Of five experts, two are here; the others come half a second apart.
    assert time.monotonic() - begin >= 0.9  # a lower bound: the cap is a promise
    assert [outcome.nbytes for outcome in outcomes] == [0, 0, *[expert_bytes] * 3]
