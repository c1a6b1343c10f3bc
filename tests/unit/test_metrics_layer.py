"""What a layer counts for the specification's metrics: by phase and topology, each where it would be noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.comm.exchange import Arrived, Exchange
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.transports import AllToAllV, CountMatrix
from ray_moe.dataplane.counters import LayerCounters, RouteTally, Seat, topology_name
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.dataplane.layer import ExpertLayer, Invocation
from ray_moe.dataplane.plan import agree_layouts, layout_record, make_plan
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.runners import runner_named
from ray_moe.errors import CountMismatchError, HandleError, RoutesError
from ray_moe.identity import GlobalRank
from ray_moe.placement import PlacementSnapshot
from tests.layers import ONE_PEER, Experts, layer_on, placement, random_routes, spec_of
from tests.peers import Peers, peers, transport_over

__all__ = ["peers"]

EXPERTS, TOP_K, HIDDEN, FFN, TOKENS = 6, 2, 8, 5, 7
NODES = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
HOMES = [(expert, expert % 4) for expert in range(EXPERTS)]


def snapshot_of(group: ExpertGroup) -> PlacementSnapshot:
    ranks = [rank.value for rank in group.spec.peers]
    homes = [(expert, ranks[rank % len(ranks)]) for expert, rank in HOMES]
    return placement(homes, group.spec, domains={rank: NODES[rank] for rank in ranks})


def layer_over(group: ExpertGroup, transport: Any = None, strategy: str = "bulk") -> ExpertLayer:
    me = group.spec.peers[group.peer_slot].value
    return layer_on(
        snapshot_of(group),
        me,
        Experts.random(EXPERTS, HIDDEN, FFN),
        transport or transport_over(group, "all_to_all_v"),
        runner_named("grouped"),
        policy_named("token_hash"),
        strategy=strategy,
    )


def alone(transport: Any = None, strategy: str = "bulk") -> ExpertLayer:
    group = SoloGroup(ONE_PEER, GlobalRank(0))
    return layer_over(group, transport or AllToAllV(group), strategy)


def given(seed: int = 0) -> tuple[Tensor, Any]:
    return torch.randn(TOKENS, HIDDEN), random_routes(seed, TOKENS, TOP_K, EXPERTS)


# -- Routes by phase and topology


def three_units(group: ExpertGroup) -> tuple[RouteTally, list[list[int]]]:
    layer, ids = layer_over(group), []
    for step, unit in enumerate(("prefill", "decode", "decode")):
        hidden_TD, routes = given(10 * group.peer_slot + step)
        layer.forward(hidden_TD, routes, Invocation(step, unit))  # type: ignore[arg-type]
        ids.append(routes.topk_ids.flatten().tolist())
    return layer.counters.routes, ids


def test_routes_are_counted_by_phase_and_by_where_their_expert_was(peers: Peers) -> None:
    order = (2, 0, 3, 1)
    owner = {expert: order[rank] for expert, rank in HOMES}
    for peer, (tally, ids) in enumerate(peers.run(three_units, ranks=order)):
        me = order[peer]
        for unit, of_unit in (("prefill", ids[:1]), ("decode", ids[1:])):
            flat = [expert for some in of_unit for expert in some]
            remote = sum(owner[expert] != me for expert in flat)
            away = sum(NODES[owner[expert]] != NODES[me] for expert in flat)
            assert tally.attempted[unit] == tally.accepted[unit, "2x2"] == len(flat)
            assert (tally.remote[unit], tally.inter_node[unit, "2x2"]) == (remote, away)
            assert 0 < away < remote, "the case tells them apart"
        assert tally.attempted.keys() == {"prefill", "decode"}
        assert not (tally.dropped or tally.windowed or tally.mismatches or tally.stale or tally.unconserved)


def test_a_pipeline_counts_a_route_once_whatever_it_is_cut_into() -> None:
    for strategy in ("bulk", "chunk_pipeline", "microbatch_pipeline"):
        layer = alone(strategy=strategy)
        layer.forward(*given(), Invocation(0, "decode"))
        assert (layer.counters.routes.attempted, layer.counters.routes.dropped) == ({"decode": TOKENS * TOP_K}, {})
        assert layer.counters.routes.accepted == {("decode", "1x1"): TOKENS * TOP_K}


def test_a_topology_goes_by_its_nodes_and_their_peers() -> None:
    for ranks, name in (((0,), "1x1"), ((0, 1), "1x2"), ((0, 2), "2x1"), ((0, 1, 2), "2x1-2"), ((3, 1, 2, 0), "2x2")):
        spec = spec_of(ranks)
        snapshot = placement([(0, ranks[0])], spec, domains=NODES)
        assert topology_name(snapshot.topology, spec) == name


# -- What must never rise


def handles_of(layer: ExpertLayer, routes: Any) -> list[DispatchHandle]:
    plans = [make_plan(routes, layer.slots, layer.policy)]
    record = layout_record(plans, layer.header.digest64, 0)
    layouts = agree_layouts(record[None], layer.slots, 1)
    return layer.path.bind(layer.header, (0, "decode", 0), plans, layouts, 0, None)


def test_routes_that_no_handle_carries_are_counted_as_dropped() -> None:
    layer = alone(strategy="chunk_pipeline")
    first, second = handles_of(layer, given()[1])
    seat = Seat.of(layer.slots, layer.header)
    counters = LayerCounters()
    counters.enter([first, second], seat, "decode", TOKENS)
    assert counters.routes.dropped == {}
    counters.enter([first], seat, "decode", TOKENS)
    lost = sum(second.send_counts_P)
    assert 0 < lost < TOKENS * TOP_K
    assert counters.routes.dropped == {"decode": lost}
    assert counters.routes.accepted == {("decode", "1x1"): 2 * TOKENS * TOP_K - lost}


class Other(HandleHeader):
    """A header whose handles say that they are of another generation. Of another epoch the transport would refuse."""

    def bind(self, *args: Any, **options: Any) -> DispatchHandle:
        handle = super().bind(*args, **options)
        return dataclasses.replace(handle, header=dataclasses.replace(handle.header, **CHANGED))


CHANGED: dict[str, Any] = {}


@pytest.mark.parametrize(("changed", "counted"), [({}, {}), ({"generation": 7}, {7: 1})])
def test_a_handle_of_another_generation_that_is_combined_all_the_same_is_counted(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], counted: dict[int, int]
) -> None:
    layer = alone()
    layer.header = Other(**{field.name: getattr(layer.header, field.name) for field in dataclasses.fields(Other)})
    for name, value in changed.items():
        monkeypatch.setitem(CHANGED, name, value)
    layer.forward(*given(), Invocation(0, "decode"))
    assert layer.counters.routes.stale == counted


class Misplacing(AllToAllV):
    """A wire that returns rows to other places."""

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Exchange:
        return Arrived(rows_RD.flip(0))


def test_an_audit_that_finds_rows_in_other_places_counts_a_mismatch() -> None:
    layer = alone(Misplacing(SoloGroup(ONE_PEER, GlobalRank(0))))
    with pytest.raises(HandleError):
        layer.forward(*given(), Invocation(0, "prefill", audit=True))
    assert layer.counters.routes.mismatches == {"prefill": 1}


def test_an_audit_that_finds_routes_changed_counts_a_mismatch() -> None:
    layer, (hidden_TD, routes) = alone(), given()
    run = layer.path.runner.run

    def tampering(*args: Any) -> Any:
        routes.topk_weights[0, 0] += 0.25
        return run(*args)

    layer.path.runner.run = tampering  # type: ignore[method-assign]
    with pytest.raises(RoutesError):
        layer.forward(hidden_TD, routes, Invocation(0, "decode", audit=True))
    assert layer.counters.routes.mismatches == {"decode": 1}


def disagreeing(group: ExpertGroup, how: str) -> tuple[str, dict[int, int]]:
    layer, (hidden_TD, routes) = layer_over(group), given(group.peer_slot)
    if group.peer_slot == 1 and how == "counts":
        gather = layer._gather_counts

        def lying(record: Tensor) -> Tensor:
            return gather(record + (torch.arange(len(record)) == 3))

        layer._gather_counts = lying  # type: ignore[method-assign]
    if group.peer_slot == 1 and how == "refuses":
        routes = dataclasses.replace(routes, topk_ids=routes.topk_ids + EXPERTS)
    try:
        layer.forward(hidden_TD, routes, Invocation(int(how == "step" and group.peer_slot == 1), "decode"))
    except (CountMismatchError, RoutesError) as error:
        return type(error).__name__, dict(layer.counters.routes.unconserved)
    return "", {}


@pytest.mark.parametrize("how", ["counts", "step"])
def test_counts_that_peers_do_not_agree_on_are_a_failure_on_each_of_them(peers: Peers, how: str) -> None:
    for error, found in peers.run(disagreeing, how, ranks=(1, 0)):
        assert (error, list(found.values())) == ("CountMismatchError", [1])


def test_a_peer_that_refuses_its_own_routes_is_no_failure_of_counts(peers: Peers) -> None:
    answers = peers.run(disagreeing, "refuses", ranks=(1, 0))
    assert [error for error, _ in answers] == ["CountMismatchError", "RoutesError"]
    assert [found for _, found in answers] == [{}, {}]


def test_totals_add_up_over_layers_and_leave_them_as_they_are() -> None:
    layers = [LayerCounters(), LayerCounters()]
    for number, layer in enumerate(layers, 1):
        layer.routes.ran("decode", "1x2", attempted=10 * number, accepted=9 * number, remote=4, inter_node=0)
        layer.routes.ran_windowed("prefill", 3)
        layer.fallbacks["audited"] += number
    total = LayerCounters.total(layers)
    assert total.routes.attempted == {"decode": 30, "prefill": 6}
    assert total.routes.dropped == {"decode": 3}
    assert total.routes.windowed == {"prefill": 6}
    assert total.fallbacks == {"audited": 3}
    assert layers[0].routes.attempted == {"decode": 10, "prefill": 3}
