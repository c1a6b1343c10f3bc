"""What the controller tells ranks that come: how many others of their node ask for memory at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_moe.actors import runner
from ray_moe.actors.runner import EffectRunner
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.config import ClusterConfig
from ray_moe.controlplane import effects
from ray_moe.controlplane.publication import Storage
from ray_moe.engine.records import ModelFacts
from ray_moe.errors import NotAvailableError

FACTS = ModelFacts("checkpoint-1", (0,), 4, 100, 320, 64, "float32", 1000)


class Rank:
    """An actor that answers everything and remembers what `prepare` was told."""

    def __init__(self) -> None:
        self.sharers: list[int] = []
        self.full = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._answer(method, args))

    async def _answer(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "prepare":
            self.sharers.append(args[2])
            if self.full:
                raise NotAvailableError("no room")
            return FACTS
        return None


def test_ranks_that_come_to_one_node_are_counted_until_they_serve_fail_or_die(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {1: "a", 2: "a", 3: "b", 4: "a", 5: "a", 6: "a"}
    ranks = {rank: Rank() for rank in nodes}

    async def reserve(config: ClusterConfig, rank: int) -> int:
        await asyncio.sleep(0)
        return rank

    monkeypatch.setattr(runner, "reserve", reserve)
    monkeypatch.setattr(runner, "node_of", lambda room: nodes[room])
    monkeypatch.setattr(runner, "create_expert", lambda config, rank, room: ranks[rank])
    monkeypatch.setattr(runner, "release_room", lambda cluster, rank: None)
    monkeypatch.setattr(runner, "kill", lambda actor: None)
    config = ClusterConfig(model="m")
    peers: dict[int, Any] = {}
    routing: Any = Rank()
    under_test = EffectRunner(
        config, peers, routing, FACTS, Path("m"), Storage(4, 1, 100), lambda: StoreAddress("127.0.0.1", 1)
    )

    async def prepare(*coming: int) -> list[int]:
        results = await asyncio.gather(
            *(under_test.run(effects.Prepare(rank, 1)) for rank in coming), return_exceptions=True
        )
        assert all(result == () or isinstance(result, NotAvailableError) for result in results), results
        return [ranks[rank].sharers[-1] for rank in coming]

    async def course() -> None:
        first, second, third = await prepare(1, 2, 3)
        assert first >= 2 and second >= 2, "one whose node is not known yet may come there"
        assert third >= 1
        assert await prepare(3) == [1]
        ranks[4].full = True
        assert await prepare(4) == [3]
        await under_test.run(effects.Start(1, 1, 2))
        assert await prepare(5) == [2], "rank 4 was refused, rank 1 has what it takes"
        del peers[2]  # as when it has died
        await under_test.run(effects.End(5))
        assert await prepare(6) == [1]

    asyncio.run(course())
