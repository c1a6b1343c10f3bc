"""What the conductor waits for before it decides on a look."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ray_moe.controlplane.effects import Fill, Observed, Peer, PeerPhase
from ray_moe.controlplane.fetching import FillOrder, FromPeer
from tests.unit.test_rollouts import World, registry_with


def test_a_fill_that_a_report_shows_to_be_over_is_heard_before_its_operation_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch, tmp_path, registry_with(None))
    conductor = world.conductor
    order = FillOrder(1, 0, 7, 3, FromPeer(0, 2), "digest")
    fill = Fill(1, 5, (order,))

    def seen(slots: dict[tuple[int, int], str]) -> Observed:
        return Observed({1: Peer(1, PeerPhase.SERVING, slots=slots)}, conductor.record.live)

    async def story() -> None:
        answering = conductor._running[fill] = asyncio.create_task(asyncio.sleep(0.3))
        await conductor._hear_of_fills(seen({}))
        assert not answering.done(), "a fill that goes on holds no round up"
        await conductor._hear_of_fills(seen({(0, 7): "digest"}))
        assert answering.done(), "its answer says how many bytes it moved"

    asyncio.run(story())
