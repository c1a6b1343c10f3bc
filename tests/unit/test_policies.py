"""Replica policies: each stays inside replica sets, each is deterministic, each does what its name says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.dataplane.plan import SlotMap
from ray_moe.dataplane.policies import LeastLoad, LocalityFirst, QueueAware, RoundRobin, TokenHash, policy_named
from ray_moe.errors import ConfigError
from ray_moe.identity import LogicalExpertId
from ray_moe.routes import Routes
from tests.layers import World, placement, slot_map, spec_of, untimed, worlds

POLICIES = ("token_hash", "locality_first", "least_load", "round_robin", "queue_aware")


def replicas_of(world: World, route: int, peer: int) -> tuple[int, ...]:
    expert = int(world.routes_P[peer].topk_ids.view(-1)[route])
    return world.snapshot.layers[0].replicas(LogicalExpertId(expert))


def all_to(expert: int, routes: int) -> Routes:
    return Routes(torch.full((routes, 1), expert), torch.ones(routes, 1))


@pytest.mark.parametrize("name", POLICIES)
@untimed
@given(world=worlds())
def test_every_choice_is_inside_the_replica_set_and_the_same_again(name: str, world: World) -> None:
    for peer, slots in enumerate(world.slots_P):
        chosen = policy_named(name).choose(world.routes_P[peer], slots)
        assert chosen.dtype == torch.int64
        for route, position in enumerate(chosen.tolist()):
            assert position in replicas_of(world, route, peer)
        assert torch.equal(policy_named(name).choose(world.routes_P[peer], slots), chosen)


@untimed
@given(worlds(max_tokens=10))
def test_locality_first_takes_its_own_peer_then_its_own_domain(world: World) -> None:
    layer = world.snapshot.layers[0]
    owner = world.snapshot.topology.owner
    for peer, slots in enumerate(world.slots_P):
        my_domain = owner[world.snapshot.group.peers[peer]]

        def distance(position: int, peer: int = peer, my_domain: str = my_domain) -> int:
            if world.peer_of(position) == peer:
                return 0
            return 1 if layer.slots[position].topology_domain_id == my_domain else 2

        for route, position in enumerate(LocalityFirst().choose(world.routes_P[peer], slots).tolist()):
            assert distance(position) == min(map(distance, replicas_of(world, route, peer)))


def test_locality_first_spreads_over_replicas_that_are_equally_near() -> None:
    homes = [(0, 1), (0, 2), (0, 3), (1, 0)]
    far = slot_map(placement(homes, spec_of((0, 1, 2, 3))), 0)
    used = Counter(LocalityFirst().choose(all_to(0, 300), far).tolist())
    assert set(used) == {0, 1, 2}
    assert min(used.values()) > 70  # a third is 100


def greedy(world: World, peer: int, queued: list[int]) -> list[int]:
    """Each expert's routes one after the other to its least loaded replica.

    Loads start from what is queued and from the routes that have no choice; ties go round from (expert + peer).
    """
    routes = world.routes_P[peer].topk_ids.view(-1).tolist()
    sets = [replicas_of(world, route, peer) for route in range(len(routes))]
    forced = list(queued)
    for replicas in sets:
        if len(replicas) == 1:
            forced[world.peer_of(replicas[0])] += 1
    chosen, taken = [], Counter[int]()
    for expert, replicas in zip(routes, sets, strict=True):
        costs = [
            (forced[world.peer_of(replica)] + taken[replica], (index - expert - peer) % len(replicas))
            for index, replica in enumerate(replicas)
        ]
        best = replicas[costs.index(min(costs))]
        taken[best] += len(replicas) > 1
        chosen.append(best)
    return chosen


@untimed
@given(worlds(max_tokens=12))
def test_least_load_is_the_scalar_greedy_choice(world: World) -> None:
    for peer, slots in enumerate(world.slots_P):
        expected = greedy(world, peer, [0] * slots.num_peers)
        assert LeastLoad().choose(world.routes_P[peer], slots).tolist() == expected


@untimed
@given(worlds(max_tokens=12), st.data())
def test_queue_aware_is_least_load_on_top_of_what_peers_announced(world: World, data: st.DataObject) -> None:
    for peer, slots in enumerate(world.slots_P):
        queued = data.draw(st.lists(st.integers(0, 8), min_size=slots.num_peers, max_size=slots.num_peers))
        policy = QueueAware()
        unaware = policy.choose(world.routes_P[peer], slots)
        assert torch.equal(unaware, LeastLoad().choose(world.routes_P[peer], slots))
        policy.observe(queued)
        assert policy.choose(world.routes_P[peer], slots).tolist() == greedy(world, peer, queued)
        policy.observe([*queued, 1])  # of a group with another number of peers: it says nothing about this one
        assert torch.equal(policy.choose(world.routes_P[peer], slots), unaware)


# Experts 0 and 1 on both peers; expert 2 on peer 0 only.
TWO = placement([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)], spec_of((0, 1)))


def peers_chosen(choice: Tensor, slots: SlotMap) -> list[int]:
    return slots.peer_S[choice].tolist()


def test_least_load_counts_the_rows_that_have_no_choice() -> None:
    slots = slot_map(TWO, 0)
    routes = Routes(torch.tensor([[2], [2], [0], [0], [0]]), torch.ones(5, 1))
    # Two rows must go to peer 0, so expert 0's first two go to peer 1.
    assert peers_chosen(LeastLoad().choose(routes, slots), slots) == [0, 0, 1, 1, 0]


def test_peers_and_experts_do_not_all_start_at_the_same_replica() -> None:
    one_each = Routes(torch.tensor([[0], [1]]), torch.ones(2, 1))
    first = [peers_chosen(LeastLoad().choose(one_each, slot_map(TWO, rank)), slot_map(TWO, rank)) for rank in (0, 1)]
    assert first == [[0, 1], [1, 0]]


def test_round_robin_takes_turns_from_an_offset_of_its_own() -> None:
    homes = [(0, 0), (0, 1), (0, 0), (1, 1)]
    for rank, turns in ((0, [0, 1, 2, 0, 1]), (1, [1, 2, 0, 1, 2])):
        slots = slot_map(placement(homes, spec_of((0, 1))), rank)
        assert RoundRobin().choose(all_to(0, 5), slots).tolist() == turns
    interleaved = Routes(torch.tensor([[0], [1], [0], [1], [0]]), torch.ones(5, 1))
    slots = slot_map(placement(homes, spec_of((0, 1))), 0)
    assert RoundRobin().choose(interleaved, slots).tolist() == [0, 3, 1, 3, 2]


@pytest.mark.parametrize("copies", [2, 3, 4])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("rank", [0, 1])
def test_token_hash_spreads_evenly_over_replicas(copies: int, top_k: int, rank: int) -> None:
    experts = max(8, top_k)
    homes = [(expert, copy % 2) for expert in range(experts) for copy in range(copies)]
    slots = slot_map(placement(homes, spec_of((0, 1))), rank)
    generator = torch.Generator().manual_seed(copies)
    ids = torch.rand(4000, experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    chosen = TokenHash().choose(Routes(ids, torch.ones(4000, top_k)), slots)
    counts_EC = torch.bincount(chosen, minlength=experts * copies).view(experts, copies)
    assert torch.equal(counts_EC.sum(1), torch.bincount(ids.view(-1), minlength=experts))
    # Six standard deviations of a fair draw: under a tenth of all rows of a copy, under a third of one expert's.
    for counts in (counts_EC.sum(0), *counts_EC):
        rows = int(counts.sum())
        spread = 6 * (rows * (1 / copies) * (1 - 1 / copies)) ** 0.5
        assert float((counts - rows / copies).abs().max()) < spread


def test_token_hash_tells_tokens_experts_and_origins_apart() -> None:
    def choices(routes: Routes, rank: int) -> list[int]:
        slots = slot_map(TWO, rank)
        return peers_chosen(TokenHash().choose(routes, slots), slots)

    assert 0 < sum(choices(all_to(0, 64), 0)) < 64
    assert choices(all_to(0, 64), 0) != choices(all_to(1, 64), 0)
    assert choices(all_to(0, 64), 0) != choices(all_to(0, 64), 1)


def test_policies_are_named_and_an_unknown_name_lists_them() -> None:
    assert [policy_named(name).name for name in POLICIES] == list(POLICIES)
    with pytest.raises(ConfigError, match=r"locality_first, queue_aware, round_robin, token_hash, found 'coin'"):
        policy_named("coin")
