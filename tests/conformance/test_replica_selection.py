"""Which copy of an expert takes a route (0x08H): the fixture's choice for every route, by the product's policies."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_moe.cli.main import run
from ray_moe.controlplane.eplb import ExpertMaps, rank_loads, rebalance
from ray_moe.controlplane.objective import Objective, Terms
from ray_moe.controlplane.placed import Placed, Shape
from ray_moe.controlplane.refine import improve
from ray_moe.dataplane.plan import SlotMap, make_plan, plan_assignment
from ray_moe.dataplane.policies import policy_named
from ray_moe.errors import ConfigError, DuplicateExecutionError, NotInReplicaSetError
from ray_moe.identity import GlobalRank, LogicalExpertId, expect
from ray_moe.placement import PlacementSnapshot
from ray_moe.routes import Routes
from tests.layers import placement, slot_map, spec_of

DATA = Path(__file__).parent / "data"
EPLB = json.loads((DATA / "eplb.json").read_text())
INPUTS, SELECTION = EPLB["inputs"], EPLB["derived"]["replica_selection"]
SIX_SLOTS = json.loads((DATA / "placement_v17.json").read_text())["inputs"]
RANKS, SLOTS = INPUTS["num_ranks"], INPUTS["num_physical_slots"]
NODES = {rank: node["node_id"] for node in SIX_SLOTS["nodes"] for rank in node["member_ranks"]}


def maps() -> ExpertMaps:
    return rebalance(INPUTS["load_by_layer"], SLOTS, INPUTS["num_expert_groups"], INPUTS["num_nodes"], RANKS)


def published() -> PlacementSnapshot:
    """The hierarchical maps as the manifest that a cluster would serve: slots are dealt to ranks in order."""
    homes = [(expert, slot * RANKS // SLOTS) for slot, expert in enumerate(maps().phy2log_LS[0].tolist())]
    return placement(homes, spec_of(range(RANKS)), domains=NODES)


def sent_by(rank: int) -> list[dict[str, Any]]:
    return [route for route in SIX_SLOTS["routes_in_semantic_order"] if route["source_rank"] == rank]


def routes_of(rank: int) -> Routes:
    ids = torch.tensor([route["logical_expert_id"] for route in sent_by(rank)]).view(-1, SIX_SLOTS["top_k"])
    return Routes(ids, torch.ones(ids.shape))


class NearestThenLightest:
    """The fixture's policy: same rank, then same node, then any; the least predicted rank load; the lowest slot."""

    name = "nearest_then_lightest"

    def choose(self, routes: Routes, slots: SlotMap) -> torch.Tensor:
        load = [Fraction(*pair) for pair in SELECTION["predicted_rank_load"]]
        peers, domains = slots.peer_S.tolist(), slots.domain_S.tolist()

        def order(slot: int) -> tuple[bool, bool, Fraction, int]:
            return peers[slot] != slots.my_peer, domains[slot] != slots.my_domain, load[peers[slot]], slot

        layer = PUBLISHED.layers[0]
        experts = routes.topk_ids.flatten().tolist()
        return torch.tensor([min(layer.replicas(LogicalExpertId(expert)), key=order) for expert in experts])

    def observe(self, rows_P: Sequence[int]) -> None:
        pass


MAPS, PUBLISHED = maps(), published()
SLOT_MAPS = [slot_map(PUBLISHED, rank) for rank in range(RANKS)]
SOURCES = sorted({route["source_rank"] for route in SIX_SLOTS["routes_in_semantic_order"]})
POLICIES = ("token_hash", "locality_first", "round_robin", "least_load", "queue_aware")


def fixtures_choice(rank: int) -> list[int]:
    return [SELECTION["selected_slot_by_route"][route["route_id"]] for route in sent_by(rank)]


# -- The fixture's selection


def test_the_policy_predicts_with_the_ideal_rank_loads_of_the_map() -> None:
    loads = rank_loads(np.array(INPUTS["load_by_layer"], float), MAPS, RANKS)
    assert loads[0].tolist() == pytest.approx([above / below for above, below in SELECTION["predicted_rank_load"]])


@pytest.mark.parametrize("rank", SOURCES)
def test_the_fixtures_policy_is_a_policy_of_the_product_and_its_choice_is_accepted(rank: int) -> None:
    plan = make_plan(routes_of(rank), SLOT_MAPS[rank], NearestThenLightest())
    assert plan.physical_slot_N.tolist() == fixtures_choice(rank)
    frozen = plan_assignment(routes_of(rank), torch.tensor(fixtures_choice(rank)), SLOT_MAPS[rank])
    assert frozen.counts_S.tolist() == plan.counts_S.tolist()
    assert frozen.counts_S.sum() == len(sent_by(rank))


@pytest.mark.parametrize("rank", SOURCES)
def test_locality_first_goes_as_near_as_the_fixtures_policy(rank: int) -> None:
    slots = SLOT_MAPS[rank]
    chosen = make_plan(routes_of(rank), slots, policy_named("locality_first")).physical_slot_N

    def distance(positions: torch.Tensor) -> list[int]:
        away = (slots.domain_S[positions] != slots.my_domain).long()
        return (away + (slots.peer_S[positions] != rank).long()).tolist()

    assert distance(chosen) == distance(torch.tensor(fixtures_choice(rank)))


# -- Rows of the failure lab


def test_fl_08k_03_a_map_is_no_route_assignment() -> None:
    routes, slots = routes_of(0), SLOT_MAPS[0]
    with pytest.raises(DuplicateExecutionError, match="4 routes were given 8 slots"):
        plan_assignment(routes, slots.phy2log_S, slots)  # the map itself
    ids = routes.topk_ids.flatten()
    with pytest.raises(DuplicateExecutionError, match="4 routes were given 12 slots"):
        plan_assignment(routes, torch.from_numpy(MAPS.padded_log2phy()[0])[ids].flatten(), slots)  # all that it offers
    with pytest.raises(NotInReplicaSetError, match="route 0 wants expert 0, manifest position 0 of 8"):
        plan_assignment(routes, ids, slots)  # experts in the place of slots
    with pytest.raises(ConfigError, match=r"replica policy must be one of .*token_hash, found 'hierarchical'"):
        policy_named("hierarchical")  # the balancer selects nothing
    assert [policy_named(name).name for name in POLICIES] == list(POLICIES)
    # The same map under two selectors is two traffics, which is why one has to be named.
    nearest, turns = (make_plan(routes, slots, policy_named(name)) for name in ("locality_first", "round_robin"))
    assert nearest.counts_S.tolist() != turns.counts_S.tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_fl_08k_04_entries_beyond_the_copy_count_reach_no_plan(policy: str) -> None:
    routes, slots = routes_of(0), SLOT_MAPS[0]
    padded = torch.from_numpy(MAPS.padded_log2phy()[0])
    second = padded[routes.topk_ids.flatten(), 1]
    assert second.tolist().count(-1) == 1  # expert 1 has one copy
    route = second.tolist().index(-1)
    with pytest.raises(NotInReplicaSetError, match=f"route {route} wants expert 1, manifest position -1 of 8 is not"):
        plan_assignment(routes, second, slots)
    for expert, copies in enumerate(MAPS.logcnt_LE[0].tolist()):
        offered = PUBLISHED.layers[0].replicas(LogicalExpertId(expert))
        assert len(offered) == copies and min(offered) >= 0
    assert int(make_plan(routes, slots, policy_named(policy)).physical_slot_N.min()) >= 0


def test_fl_08k_05_the_number_of_a_copy_is_no_rank() -> None:
    slot = PUBLISHED.layers[0].slots[2]  # copy 0 of expert 0, on rank 1
    number = int(MAPS.phyrank_LS[0, 2])
    assert (number, slot.destination_rank) == (0, GlobalRank(1))
    for wrong in (slot.replica_id, number):
        with pytest.raises(TypeError, match="destination_rank: expected GlobalRank, found"):
            dataclasses.replace(slot, destination_rank=wrong)
    with pytest.raises(TypeError, match="rank: expected GlobalRank, found ReplicaId"):
        expect(GlobalRank, slot.replica_id, "rank")
    # Where a row goes is the manifest's word.
    assert SLOT_MAPS[0].peer_S.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] != MAPS.phyrank_LS[0].tolist()


def test_fl_08k_07_better_balance_does_not_hide_lost_locality(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Routes to experts 0 and 1 start on node 0, those to 2 and 3 on node 1; one rank a node, and no spare slot.
    loads, shape = np.array([[3.0, 3.0, 1.0, 1.0]]), Shape.even(4, 2, 2)
    near, spread = (Placed.of(rebalance(loads, 4, groups, 2, 2), shape) for groups in (2, 1))
    origins = np.array([[[1, 0], [1, 0], [0, 1], [0, 1]]])
    objective = Objective(topology=2.0, origins=origins)
    kept, lost = objective.evaluate(loads, near), objective.evaluate(loads, spread, near)
    assert (kept.balance.tolist(), kept.topology.tolist(), kept.moved.tolist()) == ([1.5], [0.0], [0])
    assert (lost.balance.tolist(), lost.topology.tolist(), lost.moved.tolist()) == ([1.0], [0.5], [2])
    assert improve(near, loads, objective).phy2log_LS.tolist() == near.phy2log_LS.tolist()  # refused: 2.0 > 1.5
    for hidden in ("topology", "migration"):
        terms = {field.name: getattr(lost, field.name) for field in dataclasses.fields(lost) if field.name != hidden}
        with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{hidden}'"):
            Terms(**terms)
    # A plan says all three.
    file = tmp_path / "demand.json"
    asked = {"demand": loads.tolist(), "num_slots": 4, "num_groups": 1, "num_nodes": 2, "num_gpus": 2}
    file.write_text(json.dumps({**asked, "policy": "global", "prior": near.phy2log_LS.tolist()}))
    assert run(["plan", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["imbalance_before"], said["imbalance"]) == ([1.5], [1.0])
    assert said["rows_across_nodes_before"] == said["rows_across_nodes"] == [0.5]  # of rows that start evenly
    assert sum(said["migration"]["classes"][kind]["copies"] for kind in ("cross_node", "same_node")) == 2
    assert run(["plan", str(file)]) == 0
    table = capsys.readouterr().out
    assert "across" in table and "from the prior" in table
