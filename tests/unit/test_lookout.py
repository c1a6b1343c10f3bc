"""What the controller takes a silent rank for: one that is dead, or one whose answer it was not there to read."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from ray_moe.actors import lookout as module
from ray_moe.actors.lookout import Lookout
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.effects import Peer, PeerPhase
from tests.releases import serving

DEADLINE_S = 3.0


class Rank:
    """Answers a report by hand."""

    def __init__(self) -> None:
        self.report = self
        self.answers: list[asyncio.Future[Peer]] = []

    def remote(self) -> asyncio.Future[Peer]:
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]


def lookout() -> tuple[Lookout, list[Rank]]:
    live = serving().live()
    ranks = [Rank() for _ in live[-1].group.peers]
    peers: Any = {rank.value: actor for rank, actor in zip(live[-1].group.peers, ranks, strict=True)}
    made = Lookout(ClusterConfig(model="tiny-moe", peers=len(ranks), step_deadline_s=DEADLINE_S), peers)
    made.live = live
    return made, ranks


def test_a_serving_rank_that_does_not_answer_within_the_deadline_has_fallen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "release_room", lambda *_: None)  # there is no Ray that has given any

    async def looks() -> dict[int, str]:
        found, _ = lookout()
        fallen: dict[int, str] = {}
        began = time.monotonic()
        while not fallen and time.monotonic() - began < 4 * DEADLINE_S:
            fallen = await found.look()
        assert time.monotonic() - began >= DEADLINE_S
        return fallen

    fallen = asyncio.run(looks())
    assert fallen
    assert all(f"does not answer within {DEADLINE_S:g} s" in detail for detail in fallen.values())


def test_a_controller_that_was_stopped_for_a_while_takes_no_rank_for_dead() -> None:
    async def looks() -> None:
        found, ranks = lookout()
        assert await found.look() == {}
        time.sleep(DEADLINE_S + 1)  # nothing runs in this process, as after SIGSTOP
        assert await found.look() == {}, "they had no chance to be heard"
        for number, rank in enumerate(ranks):
            rank.answers[-1].set_result(Peer(number, PeerPhase.SERVING))
        assert await found.look() == {}
        assert not found.lost

    asyncio.run(looks())
