"""The post office: one mailbox per client in order, members told once, requests that come from other peers and go."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from ray_moe.actors import mailbox as mailboxes
from ray_moe.actors.mailbox import Polled, PostOffice
from ray_moe.deadline import wait_for
from ray_moe.engine.records import Members, Moved, Refusal, StreamRecord
from ray_moe.errors import NotServingError, RequestError

SOON = 5.0


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(wait_for(test, 20, "the test"))


def office() -> tuple[PostOffice, list[str]]:
    cancelled: list[str] = []
    return PostOffice(cancelled.append), cancelled


def record(request_id: str, index: int, finish: str | None = None) -> StreamRecord:
    return StreamRecord(request_id, index, (index,), index, 1, 0, finish)


def test_a_poll_gives_everything_in_order_and_only_to_the_client_it_is_for() -> None:
    async def test() -> None:
        post, _ = office()
        post.open("ann", "a")
        post.open("bob", "b")
        post.deliver([record("a", 0), record("b", 0), record("nobody", 0)])
        post.deliver([record("a", 1, "length")])
        assert post.unfetched == 3
        assert await post.poll("ann", SOON, 0) == Polled((record("a", 0), record("a", 1, "length")))
        assert post.unfetched == 1
        assert "a" not in post and "b" in post
        assert await post.poll("ann", 0.01, 0) == Polled()

    run(test())


def test_moved_closes_a_request_behind_everything_that_was_delivered_here() -> None:
    async def test() -> None:
        post, _ = office()
        post.open("ann", "a")
        with pytest.raises(RequestError, match="'a' already runs on this peer"):
            post.open("ann", "a")
        post.deliver([record("a", 0)])
        post.deliver([Moved("a", 3)])
        post.deliver([record("a", 1)])  # of a step that ran on: it is not this peer's any more
        assert post.unfetched == 2
        assert (await post.poll("ann", SOON, 0)).items == (record("a", 0), Moved("a", 3))
        post.open("ann", "a")  # and back again
        post.deliver([record("a", 7), Refusal("a", NotServingError("over"))])
        assert "a" not in post
        assert [type(item) for item in (await post.poll("ann", SOON, 0)).items] == [StreamRecord, Refusal]
        assert post.unfetched == 0

    run(test())


def test_a_poll_that_waits_hears_of_new_members_at_once_and_each_version_is_told_once() -> None:
    async def test() -> None:
        post, _ = office()
        first, second = Members(1, ((0, "a"), (1, "b"))), Members(2, ((0, "a"), (2, "c")))
        waiting = [asyncio.create_task(post.poll(client, 60, 0)) for client in ("ann", "bob")]
        await asyncio.sleep(0)
        post.set_members(first)
        assert await asyncio.gather(*waiting) == [Polled((), first)] * 2
        assert await post.poll("ann", 0.01, 1) == Polled()
        post.set_members(second)
        post.set_members(first)  # late
        post.open("ann", "a")
        post.deliver([record("a", 0)])
        assert await post.poll("ann", 60, 1) == Polled((record("a", 0),), second)
        assert await post.poll("cid", 60, 0) == Polled((), second), "a client that waits for nothing hears of it, too"
        assert second.ranks == (0, 2)

    run(test())


def test_members_that_no_poll_waited_for_do_not_end_a_later_one_early() -> None:
    async def test() -> None:
        post, _ = office()
        post.open("ann", "a")
        post.set_members(Members(1, ()))
        poll = asyncio.create_task(post.poll("ann", 60, 1))
        await asyncio.sleep(0.02)
        assert not poll.done()
        post.deliver([record("a", 0)])
        assert (await poll).items == (record("a", 0),)

    run(test())


def test_a_client_that_polls_no_more_is_gone_unless_a_request_has_just_been_handed_over_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        post, cancelled = office()
        post.open("gone", "old")
        post.mailbox("quiet")  # it has had nothing here, and so has not polled
        for name in ("gone", "quiet"):
            post.mailbox(name).polled_at -= 1000
        post.open("quiet", "adopted")
        monkeypatch.setattr(mailboxes, "CLIENT_GONE_S", 0.5)
        sweeper = asyncio.create_task(post.sweep())
        await asyncio.sleep(0.2)
        assert cancelled == ["old"]
        assert "adopted" in post and "old" not in post
        sweeper.cancel()

    run(test())
