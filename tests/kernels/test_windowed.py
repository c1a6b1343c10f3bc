"""Placements as launches over windows read them: every route goes where the policy of the path of handles sends it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.windowed import MOST_REPLICAS, replica_table
from ray_moe.kernels.regions import Part, Regions
from ray_moe.kernels.window import push
from tests.kernels.windows import Peers
from tests.layers import World, placement, slot_map, spec_of, worlds

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where no GPU is")
@pytest.mark.parametrize("policy", ["token_hash", "locality_first"])
@settings(max_examples=15, deadline=None)
@given(world=worlds(max_tokens=4))
def test_a_push_chooses_the_replicas_that_the_policy_chooses(policy: str, world: World) -> None:
    tables = [replica_table(slots, policy) for slots in world.slots_P]
    if any(table is None for table in tables):
        assert all(table is None for table in tables), "peers disagree on whether launches can read the placement"
        return
    count, top_k = len(world.slots_P), world.routes_P[0].top_k
    part, regions = Part(4, 0, count), Regions.plan(count, 4, top_k, 4, torch.float32)
    peers = Peers.make(count, regions, CPU)
    for mine, (slots, routes, table) in enumerate(zip(world.slots_P, world.routes_P, tables, strict=True)):
        assert table is not None
        hidden = torch.randn(routes.num_tokens, 4)
        push(hidden, routes.topk_ids, table, peers.addresses_M, peers.cells[mine], regions, part)
        owner_N = slots.peer_S[policy_named(policy).choose(routes, slots)]
        for peer in range(count):
            wanted_N = torch.where(owner_N == peer, routes.topk_ids.reshape(-1), -1)
            seen = peers.ids(peer, part)[4 * mine : 4 * mine + routes.num_tokens]
            assert torch.equal(seen.reshape(-1).long(), wanted_N), (mine, peer)


@pytest.mark.parametrize("policy", ["token_hash", "locality_first"])
def test_a_table_has_the_pool_slot_of_every_expert_that_is_here(policy: str) -> None:
    snapshot = placement([(0, 0), (1, 1), (0, 1), (2, 0), (1, 0)], spec_of([1, 0]))
    for rank in (0, 1):
        slots = slot_map(snapshot, rank)
        table = replica_table(slots, policy)
        assert table is not None
        here = {
            slot.logical_expert_id.value: slot.pool_slot
            for slot in reversed(snapshot.layers[0].slots_of(snapshot.group.peers[slots.my_peer]))
        }
        assert table[0].tolist() == [here.get(expert, -1) for expert in range(3)]
        assert table.shape == (2 + MOST_REPLICAS, 3)


@pytest.mark.parametrize("policy", ["least_load", "round_robin", "queue_aware"])
def test_policies_that_look_at_other_routes_have_no_table(policy: str) -> None:
    assert replica_table(slot_map(placement([(0, 0), (1, 1)], spec_of([0, 1])), 0), policy) is None


def test_more_replicas_than_a_table_holds_leave_the_placement_to_handles() -> None:
    snapshot = placement([(0, rank % 2) for rank in range(MOST_REPLICAS + 1)], spec_of([0, 1]))
    assert replica_table(slot_map(snapshot, 0), "token_hash") is None
