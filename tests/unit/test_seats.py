"""A peer's seats and second checkpoints without a cluster: whom it must be able to call, and what is loaded once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_moe.actors import expert, seats
from ray_moe.actors.expert import ExpertActor
from ray_moe.actors.model import LoadedModel, load_model
from ray_moe.actors.routing import Grant
from ray_moe.actors.seats import Seats
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.config import ClusterConfig
from ray_moe.dataplane.handle import HandleABI, HandleHeader
from ray_moe.dataplane.route_counts import RouteCounts
from ray_moe.errors import DeadlineError, NotAvailableError
from ray_moe.identity import GlobalRank
from ray_moe.placement import Lease
from ray_moe.topology import Domain, Topology
from tests.layers import placement, spec_of
from tests.one_peer import RANK, OnePeer

NOWHERE = StoreAddress("127.0.0.1", 1)


async def beside(work: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(work, *args)


def seats_of(peer: OnePeer, config: ClusterConfig) -> Seats:
    """Of a peer that serves generation 1 of what it has loaded."""
    model = load_model(config, Path(config.model))
    counts = RouteCounts(model.facts.moe_layers, model.facts.num_experts, torch.device("cpu"))
    made = Seats(config, RANK, beside, model, peer.pool, peer.counters, counts)
    snapshot = placement([(0, 0)], spec_of([0]))
    lease = Lease(1, "rank-0", 1, 0)
    made._grants[1] = Grant(lease, HandleHeader.grant(lease, snapshot, HandleABI()), snapshot, config)
    return made


@pytest.fixture
def node_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An expert actor outside of Ray; epochs are joined at once."""
    interval = sys.getswitchinterval()
    monkeypatch.setattr(expert.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node-0"))
    monkeypatch.setattr(expert, "find_expert", lambda cluster, rank: f"{cluster}.expert-{rank}")
    monkeypatch.setattr(
        seats,
        "join_transport",
        lambda group, transport, groups, rank, store, seconds, **_: SimpleNamespace(
            group=SimpleNamespace(spec=groups.full)
        ),
    )
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("node_of_its_own")
def test_ranks_of_an_epoch_that_is_joined_and_not_yet_served_stay_known(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    config = ClusterConfig(name="mine", model=str(folder))
    actor = ExpertActor(config, 0)
    actor._seats = seats_of(OnePeer(folder), config)

    async def join(epoch: int, ranks: list[int]) -> None:
        topology = Topology("t", (Domain("node-0", tuple(map(GlobalRank, ranks))),))
        await actor.join(spec_of(ranks, epoch), topology, NOWHERE)

    async def course() -> None:
        await join(0, [0, 1])
        await join(1, [0, 1, 2])
        await actor.set_members(1, [0, 1])  # of the serving epoch: rank 2 takes requests later
        assert actor._actors.keys() == {0, 1, 2}
        actor._my_seats._transports.pop(1)
        await actor.set_members(2, [0, 1])
        assert actor._actors.keys() == {0, 1}

    asyncio.run(course())


def test_a_checkpoint_that_takes_too_long_is_loaded_once_and_there_when_asked_again(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = family_dir("qwen3_moe"), family_dir("qwen3_moe", seed=1)
    config = ClusterConfig(model=str(folder), start_deadline_s=0.5)
    peer, goes_on = OnePeer(folder), threading.Event()
    made = seats_of(peer, config)
    loads: list[Path] = []

    def slow(config: ClusterConfig, path: Path) -> LoadedModel:
        loads.append(path)
        assert goes_on.wait(60)
        return load_model(config, path)

    monkeypatch.setattr(seats, "load_model", slow)

    async def course() -> None:
        for _ in range(2):
            with pytest.raises(DeadlineError, match="load_model on rank 0"):
                await made.add_model(peer.loop, other)
        goes_on.set()
        while True:
            try:
                facts = await made.add_model(peer.loop, other)
            except DeadlineError:
                continue
            break
        assert made.model(facts.checkpoint_version).facts == facts
        assert await made.add_model(peer.loop, other) == facts

    asyncio.run(course())
    assert loads == [other]


def test_a_checkpoint_that_does_not_fit_beside_what_is_held_is_refused_and_may_be_tried_again(
    family_dir: Callable[..., Path],
) -> None:
    folder, other = family_dir("qwen3_moe"), family_dir("qwen3_moe", seed=1)
    peer = OnePeer(folder)
    config = ClusterConfig(model=str(folder), max_prefill_tokens=16)
    roomy = seats_of(peer, config)
    held = roomy._held(peer.loop)
    trunk = peer.trunk.nbytes
    assert held == trunk + peer.pool.allocated_bytes, "no KV is there before a first step"
    made = seats_of(peer, config.model_copy(update={"memory_bytes": held + trunk}))
    for _ in range(2):
        with pytest.raises(NotAvailableError, match=rf"^another checkpoint on rank 0 needs .* holds {held}\)"):
            asyncio.run(made.add_model(peer.loop, other))
