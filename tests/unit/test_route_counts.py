"""Route counts: exactly what the routers asked for, by layer, expert and phase, on whatever path it is executed."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.join import transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.dataplane.captured import DecodeBucket, Executables
from ray_moe.dataplane.layer import Invocation
from ray_moe.dataplane.phases import Phase
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.route_counts import COUNTED, DemandReport, RouteCounts
from ray_moe.dataplane.runners import Grouped
from ray_moe.errors import ConfigError
from ray_moe.identity import GlobalRank
from ray_moe.routes import Routes
from tests.layers import CPU, ONE_PEER, Experts, layer_on, placement, random_routes, untimed
from tests.peers import Peers, peers

__all__ = ["peers"]

EXPERTS, TOP_K, HIDDEN, FFN = 6, 2, 8, 5
HOMES = {
    1: [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (3, 0)],
    2: [(0, 1), (1, 0), (2, 0), (3, 1), (4, 0), (5, 1), (3, 0)],
    4: [(0, 3), (1, 2), (2, 0), (3, 1), (4, 2), (5, 3), (3, 3)],
}
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def by_hand(routes: list[tuple[int, Phase, torch.Tensor]], layers: list[int]) -> np.ndarray:
    counts = np.zeros((len(COUNTED), len(layers), EXPERTS), np.int64)
    for layer, phase, ids_TK in routes:
        for expert in ids_TK.flatten().tolist():
            counts[COUNTED.index(phase), layers.index(layer), expert] += 1
    return counts


def reports_of(counts: RouteCounts, *last_steps: int) -> Iterator[DemandReport]:
    for last_step in last_steps:
        yield from counts.harvest(rank=3, generation=2, epoch=1, last_step=last_step)
    yield from counts.flush()


# -- Counts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_are_those_of_a_loop_over_all_routes(device: str, dtype: torch.dtype) -> None:
    layers: list[int] = [1, 3, 4]
    units: list[tuple[int, Phase, torch.Tensor]] = []
    counts = RouteCounts(layers, EXPERTS, torch.device(device))
    for step in range(8):
        for phase, tokens in zip(COUNTED, (5, step), strict=True):
            for layer in layers:
                ids_TK = random_routes(step * 10 + layer, tokens, TOP_K, EXPERTS).topk_ids.to(dtype)
                counts.add(layer, phase, ids_TK.to(device))
                units.append((layer, phase, ids_TK))
    (report,) = reports_of(counts, 7)
    assert np.array_equal(report.phase_counts_PLE, by_hand(units, layers))
    assert report.tokens == (40, sum(range(8)))
    assert (report.phase_counts_PLE.sum(axis=2) == TOP_K * np.array(report.tokens)[:, None]).all()


@pytest.mark.parametrize("device", DEVICES)
@given(pauses=st.lists(st.booleans(), min_size=1, max_size=12), late=st.booleans())
@untimed
def test_whenever_it_is_harvested_every_route_is_in_one_report(device: str, pauses: list[bool], late: bool) -> None:
    counts = RouteCounts([0], EXPERTS, torch.device(device), first_step=5 * late)
    counts.begin(2)
    ids_TK = torch.tensor([[0, 3], [3, 1]], device=device)
    reports = []
    for step, pause in enumerate(pauses, start=max(2, 5 * late)):
        counts.add(0, "decode", ids_TK)
        if pause:
            reports += counts.harvest(rank=0, generation=0, epoch=0, last_step=step)
    reports += counts.harvest(rank=0, generation=1, epoch=0, last_step=step)
    reports += counts.flush()
    assert sum(report.phase_counts_PLE[1, 0] for report in reports).tolist() == [
        len(pauses) * count for count in (1, 1, 0, 2, 0, 0)
    ]
    assert [report.sequence for report in reports] == list(range(len(reports)))
    steps = [at for report in reports for at in range(report.first_step, report.last_step + 1)]
    assert steps == list(range(max(2, 5 * late), step + 1))  # each step once
    assert all(report.tokens == (0, 2 * (report.last_step - report.first_step + 1)) for report in reports)


def test_a_bare_call_is_nobodys_demand_and_an_unknown_layer_is_a_mistake() -> None:
    counts = RouteCounts([0], EXPERTS, CPU)
    counts.add(0, "bare", torch.zeros(2, TOP_K, dtype=torch.int64))
    (report,) = reports_of(counts, 0)
    assert not report.phase_counts_PLE.any() and report.tokens == (0, 0)
    with pytest.raises(KeyError):
        counts.add(1, "decode", torch.zeros(2, TOP_K, dtype=torch.int64))


def test_without_a_step_there_is_no_report() -> None:
    counts = RouteCounts([0], EXPERTS, CPU, first_step=4)
    assert [report.last_step for report in reports_of(counts, 3, 4, 4, 6)] == [4, 6]


# -- Through a layer: on every peer and path, real rows only


def _count_steps(group: ExpertGroup, executables: bool) -> DemandReport:
    snapshot = placement(HOMES[len(group.spec)], group.spec)
    layer = layer_on(
        snapshot,
        group.spec.peers[group.peer_slot].value,
        Experts.random(EXPERTS, HIDDEN, FFN),
        transport_named("all_to_all_v", group),
        Grouped(),
        policy_named("token_hash"),
        executables=Executables([DecodeBucket(4, 8)], CPU) if executables else None,
    )
    layer.route_counts = RouteCounts([0], EXPERTS, CPU)
    for step in range(6):
        for unit in ("prefill", "decode", "bare"):
            # Up to 5 tokens: some units fit the bucket, where the others' slots are padding, and some fall back.
            routes = routes_of(step, unit, group.peer_slot)
            layer.forward(torch.ones(routes.num_tokens, HIDDEN), routes, Invocation(step, unit))
    if executables:
        assert layer.counters.replays and layer.counters.fallbacks
    (report,) = layer.route_counts.harvest(rank=group.peer_slot, generation=1, epoch=0, last_step=5)
    return report


def routes_of(step: int, unit: Phase, peer: int) -> Routes:
    return random_routes(100 * step + peer, (step + peer + len(unit)) % 6, TOP_K, EXPERTS)


@pytest.mark.parametrize("executables", [False, True])
@pytest.mark.parametrize("ranks", [(1, 0), (3, 1, 0, 2)])
def test_the_ranks_sums_are_exactly_tokens_times_top_k_also_where_units_are_replayed(
    peers: Peers, ranks: tuple[int, ...], executables: bool
) -> None:
    reports = peers.run(_count_steps, executables, ranks=ranks)
    for unit, counted in zip(COUNTED, sum(report.phase_counts_PLE for report in reports), strict=True):
        routes = [routes_of(step, unit, peer) for step in range(6) for peer in range(len(reports))]
        expected = np.bincount(torch.cat([each.topk_ids.flatten() for each in routes]).numpy(), minlength=EXPERTS)
        assert counted[0].tolist() == expected.tolist()
        tokens = sum(report.tokens[COUNTED.index(unit)] for report in reports)
        assert (tokens, counted.sum()) == (sum(each.num_tokens for each in routes), tokens * TOP_K)


def test_a_layer_on_one_peer_counts_too() -> None:
    report = _count_steps(SoloGroup(ONE_PEER, GlobalRank(0)), executables=True)
    assert report.phase_counts_PLE.sum() == TOP_K * sum(report.tokens) > 0


# -- Reports


def test_a_report_travels_whole_and_no_wider_than_its_largest_count() -> None:
    counts = RouteCounts(range(58), 256, CPU)
    for layer in range(58):
        counts.add(layer, "decode", torch.randint(0, 256, (64, 8), generator=torch.Generator().manual_seed(layer)))
    (report,) = reports_of(counts, 0)
    sent = pickle.dumps(report)
    arrived = pickle.loads(sent)
    assert len(sent) < 2 * 58 * 256 + 1000  # a byte each
    assert arrived.phase_counts_PLE.dtype == np.int64
    assert np.array_equal(arrived.phase_counts_PLE, report.phase_counts_PLE)
    assert {**vars(arrived), "phase_counts_PLE": None} == {**vars(report), "phase_counts_PLE": None}
    with pytest.raises(ValueError, match="read-only"):
        arrived.phase_counts_PLE[0, 0, 0] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last_step": 3}, "last_step not before it, found 0, 4 and 3"),
        ({"sequence": -1}, "found -1, 4 and 9"),
        ({"tokens": (1,)}, r"of the 2 phases prefill, decode, found \[2, 1, 6\] and \(1,\)"),
        ({"phase_counts_PLE": np.zeros((1, 6))}, r"found \[1, 6\]"),
        ({"phase_counts_PLE": np.full((2, 1, 6), -1)}, "counts must be >= 0, found -1"),
    ],
)
def test_a_report_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    values: dict[str, object] = dict.fromkeys(("rank", "sequence", "generation", "epoch"), 0)
    values |= {"first_step": 4, "last_step": 9, "tokens": (0, 0), "phase_counts_PLE": np.zeros((2, 1, 6), np.int64)}
    with pytest.raises(ConfigError, match=message):
        DemandReport(**{**values, **change})  # type: ignore[arg-type]
