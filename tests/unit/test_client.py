"""The client against scripted peers: the product's own post offices, and a script in the place of each engine.

Peers come, leave, die and hand requests to each other; what one delivers can be held back while another's overtakes it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from ray_moe.actors.mailbox import Polled, PostOffice
from ray_moe.actors.reports import Directory
from ray_moe.config import ClusterConfig
from ray_moe.deadline import wait_for
from ray_moe.engine.records import GenerateRequest, Members, ModelFacts, Moved, Refusal, StreamRecord
from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import DeadlineError, NotServingError, PeerLeavingError, PeerLostError, RequestError
from ray_moe.sdk import Client, Generation

PROMPT = (5, 6, 7)
FACTS = ModelFacts("c", (0,), 8, 1, 320, 512, "float32", 1)


def token_at(index: int) -> int:
    return (17 * index + 3) % 251


class Peer:
    """What a client sees of an expert actor."""

    def __init__(self, cluster: Peers, rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.office = PostOffice(cancel=self.asked_to_cancel)
        self.requests: dict[str, GenerateRequest] = {}  # by wire id: running here
        self.cancels: list[str] = []
        self.polls = 0
        self.leaving = False
        self.refuses: RequestError | None = None
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.admitting = asyncio.Event()
        self.admitting.set()
        self.dead = asyncio.Event()
        calls = (self.submit, self.poll, self.cancel)
        self.handle: Any = SimpleNamespace(
            **{call.__name__: SimpleNamespace(remote=self._remote(call)) for call in calls}
        )

    def _remote(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., asyncio.Future[Any]]:
        async def until_dead(*args: Any) -> Any:
            answer, death = asyncio.ensure_future(call(*args)), asyncio.ensure_future(self.dead.wait())
            try:
                await asyncio.wait((answer, death), return_when=asyncio.FIRST_COMPLETED)
                if self.dead.is_set():
                    raise RayActorError
                return await answer
            finally:
                answer.cancel()
                death.cancel()

        def remote(*args: Any) -> asyncio.Future[Any]:
            # Who stops waiting for a call's answer does not stop the call, and nobody has to wait for it.
            answer = asyncio.shield(asyncio.ensure_future(until_dead(*args)))
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            return answer

        return remote

    async def submit(self, client: str, request: GenerateRequest) -> None:
        if self.leaving:
            raise PeerLeavingError(self.rank)
        if self.refuses is not None:
            await self.admitting.wait()
            raise self.refuses
        self.office.open(client, request.request_id)
        self.requests[request.request_id] = request
        await self.admitting.wait()

    async def poll(self, client: str, wait: float, known_members: int) -> Polled:
        self.polls += 1
        found = await self.office.poll(client, wait, known_members)
        await self.flowing.wait()
        return found

    async def cancel(self, wire_id: str) -> bool:
        self.cancels.append(wire_id)
        if wire_id not in self.office:
            return False
        self.asked_to_cancel(wire_id)
        return True

    def asked_to_cancel(self, wire_id: str) -> None:
        if self.requests.pop(wire_id, None) is not None:
            self.office.deliver([StreamRecord(wire_id, 0, (), 0, 1, 0, "cancelled")])

    # ---- what the script does ----

    def wire(self, name: str) -> str:
        (wire_id,) = [wire_id for wire_id in self.requests if wire_id.startswith(f"{name}~")]
        return wire_id

    def emit(self, wire_id: str, *indices: int, finish: str | None = None, epoch: int = 0) -> None:
        for index in indices:
            reason = finish if index == indices[-1] else None
            self.office.deliver([StreamRecord(wire_id, index, (token_at(index),), index, 1 + epoch, epoch, reason)])

    def hand_over(self, wire_id: str, other: Peer | None, client: str) -> None:
        """Both halves: the other has it before this one says so."""
        request = self.requests.pop(wire_id)
        if other is not None:
            other.office.open(client, wire_id)
            other.requests[wire_id] = request
        self.office.deliver([Moved(wire_id, None if other is None else other.rank)])

    def die(self) -> None:
        self.dead.set()


class Peers:
    """Some peers, and a controller that knows them."""

    def __init__(self, *ranks: int, controller: bool = True, **config: Any) -> None:
        self.config = ClusterConfig(name="scripted", model="none", **{"step_deadline_s": 20, **config})
        self.version = 0
        self.peers: dict[int, Peer] = {}
        self.members: tuple[int, ...] = ()
        self.asked = 0
        self.serving = True
        self._controller: Any = SimpleNamespace(directory=SimpleNamespace(remote=self._remote)) if controller else None
        self.set(*ranks)

    def set(self, *ranks: int) -> Members:
        """Who the members are from now on, as the controller knows; peers hear of it by `tell`."""
        for rank in ranks:
            self.peers.setdefault(rank, Peer(self, rank))
        self.version += 1
        self.members = ranks
        return Members(self.version, tuple((rank, self.peers[rank].handle) for rank in ranks))

    def tell(self, *ranks: int) -> None:
        members = self.set(*ranks)
        for peer in self.peers.values():
            peer.office.set_members(members)

    def directory(self) -> Directory:
        handles = tuple(self.peers[rank].handle for rank in self.members)
        return Directory(self.config, Path("none"), FACTS, handles, self.members, self.version, self._controller)

    def _remote(self) -> asyncio.Future[Directory]:
        async def answer() -> Directory:
            self.asked += 1
            if not self.serving:
                raise PeerLostError("a rank died", 0, 0, 0)
            return self.directory()

        return asyncio.ensure_future(answer())

    def __getitem__(self, rank: int) -> Peer:
        return self.peers[rank]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        await wait_for(test(), 30, "the test")

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    """The scripted side needs a few turns of the event loop, and no time."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("not true in time")


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=4)


def begin(client: Client, name: str, peer: int | None, max_tokens: int = 8) -> asyncio.Task[Generation]:
    return asyncio.create_task(client.generate(PROMPT, params(max_tokens), request_id=name, peer=peer))


def whole(tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple(token_at(index) for index in range(first, tokens))


def test_a_generation_names_the_generations_and_epochs_of_its_steps() -> None:
    async def test() -> None:
        peers = Peers(0)
        task = begin(Client(peers.directory()), "a", None)
        await until(lambda: peers[0].requests)
        wire_id = peers[0].wire("a")
        peers[0].emit(wire_id, 0, 1)
        peers[0].emit(wire_id, 2, 3, 4, epoch=1)
        peers[0].emit(wire_id, 5, 6, 7, finish="length", epoch=3)
        assert await task == Generation("a", whole(8), "length", (1, 2, 4), (0, 1, 3))

    run(test)


def test_a_stream_goes_on_where_its_request_moved() -> None:
    async def test() -> None:
        peers = Peers(0, 2)
        client = Client(peers.directory())
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests)
        wire_id = peers[0].wire("a")
        peers[0].emit(wire_id, 0, 1, 2)
        peers[0].hand_over(wire_id, peers[2], client._name)
        peers[2].emit(wire_id, 3, 4, 5, 6, 7, finish="length", epoch=1)
        assert (await task).token_ids == whole(8)
        assert peers[0].office.unfetched == 0
        await until(lambda: not client._tasks)  # nobody is polled once nothing of ours stays there
        assert not client._wires and not client._named

    run(test)


def test_records_that_overtake_the_peer_before_are_held_and_duplicates_dropped() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        task, other = begin(client, "a", 0), begin(client, "other", 1)
        await until(lambda: peers[0].requests and peers[1].requests)
        await until(lambda: peers[0].polls)
        wire_id = peers[0].wire("a")
        peers[0].flowing.clear()
        peers[0].emit(wire_id, 0, 1, 2)
        peers[0].hand_over(wire_id, peers[1], client._name)
        peers[1].emit(wire_id, 2, 3, 4)
        peers[1].emit(wire_id, 5, 6, 7, finish="length")
        await until(lambda: peers[1].polls >= 2)
        assert not task.done(), "all that follows is here, and what comes first is not"
        peers[0].flowing.set()
        assert (await task).token_ids == whole(8)
        peers[1].emit(peers[1].wire("other"), *range(8), finish="length")
        assert (await other).token_ids == whole(8)

    run(test)


def test_a_second_move_that_is_heard_of_before_the_first_is_followed() -> None:
    async def test() -> None:
        peers = Peers(0, 1, 2)
        client = Client(peers.directory())
        task, other = begin(client, "a", 0), begin(client, "other", 1)
        await until(lambda: peers[0].requests and peers[1].requests)
        await until(lambda: peers[0].polls)
        wire_id = peers[0].wire("a")
        peers[0].flowing.clear()
        peers[0].emit(wire_id, 0, 1)
        peers[0].hand_over(wire_id, peers[1], client._name)
        peers[1].emit(wire_id, 2)
        peers[1].hand_over(wire_id, peers[2], client._name)
        await until(lambda: peers[2].polls)  # peer 1 has said where it went
        peers[2].emit(wire_id, 3, 4, 5)
        peers[0].flowing.set()
        await until(lambda: client._links[0].unused)
        peers[2].emit(wire_id, 6, 7, finish="length")
        assert (await task).token_ids == whole(8)
        peers[1].emit(peers[1].wire("other"), *range(8), finish="length")
        await other

    run(test)


def test_a_request_that_moves_away_and_back_is_followed_both_times() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests)
        wire_id = peers[0].wire("a")
        peers[0].emit(wire_id, 0)
        peers[0].hand_over(wire_id, peers[1], client._name)
        peers[1].emit(wire_id, 1)
        peers[1].hand_over(wire_id, peers[0], client._name)
        peers[0].emit(wire_id, 2, 3, 4, 5, 6, 7, finish="length")
        assert (await task).token_ids == whole(8)

    run(test)


def test_a_request_that_moved_to_a_peer_nobody_told_of_is_found_through_the_controller() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests)
        wire_id = peers[0].wire("a")
        peers.set(1, 7)
        peers[0].hand_over(wire_id, peers[7], client._name)
        peers[7].emit(wire_id, *range(8), finish="length")
        assert (await task).token_ids == whole(8)
        assert peers.asked == 1
        assert set(client._links) == {1, 7}

    run(test)


@pytest.mark.parametrize("how", ["moved to none", "moved to a stranger", "refused by name"])
def test_a_request_that_no_peer_took_over_is_submitted_again_with_what_was_delivered(how: str) -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        stream = client.stream(PROMPT, params(8), request_id="a", prefix_ids=whole(2), peer=0)
        records = [asyncio.create_task(anext(stream))]  # type: ignore[arg-type]
        await until(lambda: peers[0].requests)
        wire_id = peers[0].wire("a")
        peers[0].emit(wire_id, 2, 3)
        if how == "refused by name":
            peers[0].office.deliver([Refusal(wire_id, PeerLeavingError(0))])
        else:
            peers[0].office.deliver([Moved(wire_id, None if how == "moved to none" else 9)])
        peers[0].leaving = True
        found = [await records[0], await anext(stream)]
        rest = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await until(lambda: peers[1].requests)
        again = peers[1].wire("a")
        assert again != wire_id
        assert peers[1].requests[again].prefix_ids == whole(4)
        assert peers[1].requests[again].prompt_ids == PROMPT
        assert peers[1].requests[again].params.seed == 4
        peers[0].emit(wire_id, 4, 5)  # of a submission that is given up
        peers[1].emit(again, 4, 5, 6, 7, finish="length")
        found += [await rest, *[record async for record in stream]]
        assert [(record.index, record.token_ids) for record in found] == [
            (index, (token_at(index),)) for index in range(2, 8)
        ]
        assert {record.request_id for record in found} == {"a"}

    run(test)


def test_a_peer_that_is_leaving_refuses_and_another_gets_the_request() -> None:
    async def test() -> None:
        peers = Peers(0, 1, controller=False)
        client = Client(peers.directory())
        peers[0].leaving = True
        task = begin(client, "a", 0)
        await until(lambda: peers[1].requests)
        peers[1].emit(peers[1].wire("a"), *range(8), finish="length")
        assert (await task).token_ids == whole(8)
        later = [begin(client, f"later-{number}", None) for number in range(4)]
        await until(lambda: len(peers[1].requests) == 5)
        assert not peers[0].requests
        for number, generation in enumerate(later):
            peers[1].emit(peers[1].wire(f"later-{number}"), *range(8), finish="length")
            await generation
        peers[1].leaving = True
        with pytest.raises(NotServingError, match=r"ranks \[0, 1\] are leaving or gone"):
            await client.generate(PROMPT, params(8))

    run(test)


def test_a_client_whose_peers_have_all_gone_while_it_was_idle_finds_the_new_ones() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        peers.set(2, 3)
        peers[0].die()
        peers[1].leaving = True
        tasks = [begin(client, "a", 0), begin(client, "b", 1)]
        await until(lambda: len(peers[2].requests) + len(peers[3].requests) == 2)
        for peer in (peers[2], peers[3]):
            for wire_id in peer.requests:
                peer.emit(wire_id, *range(8), finish="length")
        assert [generation.token_ids for generation in await asyncio.gather(*tasks)] == [whole(8)] * 2

    run(test)


@pytest.mark.parametrize("controller", ["says it is a member", "has lost it", "is not known"])
def test_a_peer_that_died_ends_its_requests_by_name(controller: str) -> None:
    async def test() -> None:
        peers = Peers(0, 1, controller=controller != "is not known")
        peers.serving = controller != "has lost it"
        client = Client(peers.directory())
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests)
        peers[0].emit(peers[0].wire("a"), 0)
        peers[0].die()
        with pytest.raises(PeerLostError, match="rank 0 of cluster 'scripted' died"):
            await task
        with pytest.raises(PeerLostError, match="rank 0 of cluster 'scripted' died"):
            await begin(client, "b", 0)
        assert not peers[1].requests

    run(test)


def test_a_peer_that_ends_before_all_was_fetched_costs_a_new_submission_and_no_token() -> None:
    async def test() -> None:
        peers = Peers(0, 1, 2)
        client = Client(peers.directory())
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests and peers[0].polls)
        wire_id = peers[0].wire("a")
        peers[0].emit(wire_id, 0, 1)
        await until(lambda: peers[0].office.unfetched == 0 and peers[0].polls >= 2)
        peers[0].flowing.clear()
        peers[0].emit(wire_id, 2, 3)
        peers[0].hand_over(wire_id, peers[1], client._name)
        peers.set(1, 2)
        await asyncio.sleep(0.01)
        peers[0].die()
        await until(lambda: any(wire_id != found for peer in (peers[1], peers[2]) for found in peer.requests))
        await until(lambda: wire_id in peers[1].cancels)
        assert wire_id not in peers[1].requests, "what took it over no longer runs"
        (place,) = [peer for peer in (peers[1], peers[2]) if peer.requests]
        again = place.wire("a")
        assert place.requests[again].prefix_ids == whole(2)
        place.emit(again, 2, 3, 4, 5, 6, 7, finish="length")
        assert (await task).token_ids == whole(8)

    run(test)


def test_new_members_are_used_at_once_and_removed_ones_polled_until_they_are_done() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        running = begin(client, "a", 0)
        await until(lambda: peers[0].requests and peers[0].polls)
        peers.tell(1, 5)
        await until(lambda: client._members.version == peers.version)
        later = [begin(client, f"later-{number}", None) for number in range(4)]
        await until(lambda: len(peers[1].requests) == len(peers[5].requests) == 2)
        assert len(peers[0].requests) == 1
        pinned = begin(client, "pinned", 1)
        await until(lambda: len(peers[5].requests) == 3)
        assert peers[5].wire("pinned")
        peers[0].emit(peers[0].wire("a"), *range(8), finish="length")
        assert (await running).token_ids == whole(8)
        await until(lambda: 0 not in client._links)
        for rank in (1, 5):
            for wire_id in peers[rank].requests:
                peers[rank].emit(wire_id, *range(8), finish="length")
        for generation in await asyncio.gather(*later, pinned):
            assert generation.token_ids == whole(8)
        assert peers.asked == 0

    run(test)


def test_a_cancel_follows_its_request() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests and peers[0].polls)
        wire_id = peers[0].wire("a")
        peers[0].emit(wire_id, 0, 1)
        request = peers[0].requests.pop(wire_id)  # taken out, on its way
        assert await client.cancel("a"), "the peer answers for it as long as it has not said where it went"
        peers[0].requests[wire_id] = request
        peers[0].hand_over(wire_id, peers[1], client._name)
        generation = await task
        assert (generation.token_ids, generation.finish_reason) == (whole(2), "cancelled")
        assert peers[1].cancels == [wire_id]
        assert not await client.cancel("a")

    run(test)


def test_a_request_cancelled_while_nobody_has_it_ends_by_that_name() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests and peers[0].polls)
        wire_id = peers[0].wire("a")
        peers[0].emit(wire_id, 0, 1, epoch=2)
        request = peers[0].requests.pop(wire_id)
        assert await client.cancel("a")
        peers[0].requests[wire_id] = request
        peers[0].hand_over(wire_id, None, client._name)
        assert await task == Generation("a", whole(2), "cancelled", (3,), (2,))
        assert not peers[1].requests

    run(test)


def test_a_request_cancelled_while_it_is_submitted_again_is_cancelled_where_it_arrives() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests and peers[0].polls)
        peers[0].leaving = True
        peers[1].admitting.clear()
        peers[0].hand_over(peers[0].wire("a"), None, client._name)
        await until(lambda: peers[1].requests)
        assert await client.cancel("a")
        peers[1].admitting.set()
        assert (await task).finish_reason == "cancelled"
        assert not peers[1].requests

    run(test)


@pytest.mark.parametrize("to", ["peer", "stranger", "none"])
def test_a_stream_closed_while_its_request_moves_is_cancelled_at_both_peers(to: str) -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        stream = client.stream(PROMPT, params(8), request_id="a", peer=0)
        first = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await until(lambda: peers[0].requests)
        wire_id = peers[0].wire("a")
        peers[0].emit(wire_id, 0)
        await first
        request = peers[0].requests.pop(wire_id)  # taken out, on its way
        await stream.aclose()
        await until(lambda: peers[0].cancels == [wire_id])
        if to == "stranger":
            peers.set(0, 1, 4)
        target = {"peer": peers[1], "stranger": peers.peers.get(4), "none": None}[to]
        peers[0].requests[wire_id] = request
        peers[0].hand_over(wire_id, target, client._name)
        await until(lambda: not client._wires)
        if target is not None:
            assert target.cancels == [wire_id]
            assert not target.requests
        assert all(not peer.requests for peer in peers.peers.values())
        await until(lambda: not client._tasks)

    run(test)


def test_a_stream_closed_while_it_is_submitted_again_leaves_nothing_behind() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        stream = client.stream(PROMPT, params(8), request_id="a", peer=0)
        first = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await until(lambda: peers[0].requests)
        peers[0].emit(peers[0].wire("a"), 0)
        await first
        peers[0].leaving = True
        peers[1].admitting.clear()
        peers[0].hand_over(peers[0].wire("a"), None, client._name)
        await until(lambda: peers[1].requests)
        again = peers[1].wire("a")
        await stream.aclose()
        await until(lambda: not client._wires)
        assert again in peers[1].cancels and not peers[1].requests
        peers[1].admitting.set()
        await until(lambda: not client._tasks)

    run(test)


def test_a_submission_that_its_caller_stops_waiting_for_is_cancelled_at_the_peer() -> None:
    async def test() -> None:
        peers = Peers(0)
        client = Client(peers.directory())
        peers[0].admitting.clear()
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not peers[0].requests and not client._wires)
        peers[0].admitting.set()

    run(test)


def test_a_cancellation_that_overtook_its_submission_is_said_again_once_the_peer_has_admitted_it() -> None:
    async def test() -> None:
        peers = Peers(0)
        client = Client(peers.directory())
        peers[0].admitting.clear()
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests)
        wire_id = peers[0].wire("a")
        request = peers[0].requests.pop(wire_id)  # Ray began the later call first: there is nothing to cancel yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: peers[0].cancels == [wire_id])
        assert client._wires, "nobody has confirmed its end"
        peers[0].requests[wire_id] = request
        peers[0].admitting.set()
        await until(lambda: not peers[0].requests and not client._wires)
        assert peers[0].cancels == [wire_id] * 2

    run(test)


@pytest.mark.parametrize("lost", [1, 3])
def test_a_stream_that_was_closed_and_still_delivers_is_cancelled_again(lost: int) -> None:
    async def test() -> None:
        peers = Peers(0)
        client = Client(peers.directory())
        stream = client.stream(PROMPT, params(8), request_id="a", peer=0)
        first = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await until(lambda: peers[0].requests)
        wire_id = peers[0].wire("a")
        peers[0].emit(wire_id, 0)
        await first
        request = peers[0].requests.pop(wire_id)  # what it is told meanwhile is lost
        await stream.aclose()
        for index in range(1, lost + 1):
            await until(lambda said=index: len(peers[0].cancels) == said)
            if index == lost:
                peers[0].requests[wire_id] = request
            peers[0].emit(wire_id, index)
        await until(lambda: not peers[0].requests and not client._wires)
        assert peers[0].cancels == [wire_id] * (lost + 1)

    run(test)


def test_a_submission_that_is_refused_after_its_caller_stopped_waiting_is_forgotten() -> None:
    async def test() -> None:
        peers = Peers(0)
        client = Client(peers.directory())
        peers[0].admitting.clear()
        peers[0].refuses = RequestError("too long", "max_tokens")
        task = begin(client, "a", 0)
        await until(lambda: client._wires)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(client._wires) == 1, "it may have been admitted"
        peers[0].admitting.set()
        await until(lambda: not client._wires and not client._links[0].busy)

    run(test)


def test_a_request_that_a_peer_handed_over_before_it_answered_and_left_is_not_run_twice() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        peers[0].admitting.clear()
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests)
        wire_id = peers[0].wire("a")
        peers[0].hand_over(wire_id, peers[1], client._name)
        peers.set(1)
        peers[0].die()
        await until(lambda: wire_id in peers[1].cancels)
        await until(lambda: len(peers[1].requests) == 1)
        peers[1].emit(peers[1].wire("a"), *range(8), finish="length")
        assert (await task).token_ids == whole(8)

    run(test)


def test_the_request_deadline_holds_across_moves_and_what_is_late_is_cancelled() -> None:
    async def test() -> None:
        peers = Peers(0, 1, request_deadline_s=0.3, step_deadline_s=0.2)
        client = Client(peers.directory())
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests)
        wire_id, here = peers[0].wire("a"), 0
        while not task.done():
            peers[here].hand_over(wire_id, peers[1 - here], client._name)
            here = 1 - here
            await asyncio.sleep(0.05)
        with pytest.raises(DeadlineError, match=r"next token of a did not finish within 0.3 s"):
            await task
        await until(lambda: not client._wires)
        assert not peers[0].requests and not peers[1].requests

    run(test)


def test_an_error_of_the_request_itself_is_raised_and_nothing_else_is_tried() -> None:
    async def test() -> None:
        peers = Peers(0, 1)
        client = Client(peers.directory())
        task = begin(client, "a", 0)
        await until(lambda: peers[0].requests)
        with pytest.raises(RequestError, match="'a' is already running"):
            await client.generate(PROMPT, params(8), request_id="a")
        wire_id = peers[0].wire("a")
        peers[0].office.deliver([Refusal(wire_id, RequestError("too long", "max_tokens"))])
        with pytest.raises(RequestError, match="too long"):
            await task
        assert not peers[1].requests
        assert not client._wires

    run(test)


def test_a_client_of_one_event_loop_after_another_polls_again() -> None:
    peers: list[Peers] = []
    clients: list[Client] = []

    async def first() -> None:
        peers.append(Peers(0))
        clients.append(Client(peers[0].directory()))
        task = begin(clients[0], "never", 0)
        await until(lambda: peers[0][0].polls)
        task.cancel()

    async def second() -> None:
        peer = Peer(peers[0], 0)  # its events belong to a loop, too
        clients[0]._links[0].actor = peer.handle
        task = begin(clients[0], "a", 0)
        await until(lambda: peer.requests)
        peer.emit(peer.wire("a"), *range(8), finish="length")
        assert (await task).token_ids == whole(8)

    run(first)
    run(second)


@pytest.mark.parametrize("seed", range(24))
def test_streams_are_whole_whatever_peers_do(seed: int) -> None:
    """Requests wander at random, some are left to their client, replies are held back, peers leave and callers go."""

    async def test() -> None:
        choose = random.Random(seed)
        peers = Peers(0, 1, 2)
        client = Client(peers.directory())
        tasks = [begin(client, f"r{number}", None, max_tokens=30) for number in range(8)]
        emitted: dict[str, int] = {}
        newest = 2

        def someone_else(peer: Peer) -> Peer | None:
            rank = choose.choice([None, *(rank for rank in peers.members if rank != peer.rank)])
            return None if rank is None else peers[rank]

        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            peer = peers[choose.choice(list(peers.peers))]
            dice = choose.random()
            if dice < 0.08:
                peer.flowing.clear()
            elif dice < 0.25:
                peer.flowing.set()
            elif dice < 0.27 and len(peers.members) > 1 and peer.rank in peers.members:
                # A shrink and a growth: whatever the leaver has goes to others or to nobody, before it is all fetched.
                newest += 1
                peer.leaving = True
                peers.tell(*(rank for rank in peers.members if rank != peer.rank), newest)
                for wire_id in list(peer.requests):
                    peer.hand_over(wire_id, someone_else(peer), client._name)
                if choose.random() < 0.3:
                    peer.die()
            elif dice < 0.35 and peer.requests:
                peer.hand_over(choose.choice(list(peer.requests)), someone_else(peer), client._name)
            elif dice < 0.352:
                choose.choice(tasks[:3]).cancel()
            else:
                for wire_id, request in list(peer.requests.items()):
                    index = emitted.get(wire_id, len(request.prefix_ids))
                    emitted[wire_id] = index + 1
                    peer.emit(wire_id, index, finish="length" if index == 29 else None, epoch=newest)
                    if index == 29:
                        del peer.requests[wire_id]
        for peer in peers.peers.values():
            peer.flowing.set()
        for task in tasks:
            assert task.cancelled() or task.result().token_ids == whole(30)
        await until(lambda: not client._wires)
        assert not any(peer.requests for peer in peers.peers.values()), "what no caller waits for runs nowhere"
        assert not any(link.busy for link in client._links.values())

    run(test)
