"""Metrics as they are exported: exact differences of totals, labels of the schema only, and never too many series."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ray_moe.actors.cluster_metrics import Changes, push_placement, push_ranks
from ray_moe.actors.cluster_state import ClusterState
from ray_moe.actors.exporter import SAMPLED, Exporter
from ray_moe.actors.rank_metrics import RankExporter
from ray_moe.actors.release_metrics import ReleaseTotals
from ray_moe.controlplane.demand import Demand, Provenance
from ray_moe.controlplane.effects import Observed, Peer, PeerPhase
from ray_moe.controlplane.operations import ControlState, Kind, Operation, Stage
from ray_moe.controlplane.placed_load import OTHERS, copies_by_group, groups, hottest, imbalance_by_group
from ray_moe.dataplane.counters import RouteTally
from ray_moe.dataplane.phases import PHASES, FallbackReason
from ray_moe.engine.records import EngineStatus
from ray_moe.engine.state import LoopCounters, ReleaseCounts, Tallies, UnitTally
from ray_moe.errors import ConfigError
from ray_moe.metrics import (
    CAPPED_RANKS,
    CAPPED_REPLICAS,
    CONTROLLER_BUDGET,
    EXPORTED,
    HISTOGRAM_SEATS,
    LABELS,
    METRICS,
    OTHER,
    RANK_BUDGET,
    RANK_SERIES,
    REFUSED,
    REPLICA_BUDGET,
    SERIES_CAP,
    Exported,
    label,
)
from ray_moe.metrics import (
    Kind as MetricKind,
)
from ray_moe.placement import PlacementSnapshot
from ray_moe.serve.counters import Counters, Timing
from tests.layers import placement, spec_of

Series = tuple[str, tuple[str, ...]]


@dataclass
class Recorder:
    """A sink that keeps what it is given, as an endpoint would show it."""

    counters: Counter[Series] = field(default_factory=Counter)
    gauges: dict[Series, float] = field(default_factory=dict)
    histograms: dict[Series, list[float]] = field(default_factory=dict)
    pushes: int = 0

    def add(self, metric: Exported, labels: Mapping[str, str], amount: float) -> None:
        assert amount >= 0
        self.counters[self._series(metric, MetricKind.COUNTER, labels)] += amount  # type: ignore[assignment]

    def set(self, metric: Exported, labels: Mapping[str, str], value: float) -> None:
        self.gauges[self._series(metric, MetricKind.GAUGE, labels)] = value

    def observe(self, metric: Exported, labels: Mapping[str, str], value: float) -> None:
        self.histograms.setdefault(self._series(metric, MetricKind.HISTOGRAM, labels), []).append(value)

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        """Values of one counter or gauge by their labels, in the metric's order."""
        every = {**self.counters, **self.gauges}
        return {labels: value for (known, labels), value in every.items() if known == name}

    @property
    def series(self) -> int:
        """As Prometheus counts them."""
        known = [*self.counters, *self.gauges, *self.histograms]
        return sum(EXPORTED[name].series for name, _ in known)

    def _series(self, metric: Exported, kind: MetricKind, labels: Mapping[str, str]) -> Series:
        self.pushes += 1
        assert metric.kind is kind
        assert labels.keys() == set(metric.labels), "complete, and nothing else"
        return metric.name, tuple(labels[name] for name in metric.labels)


def exporter(budget: int = 400, **fixed: str) -> tuple[Exporter, Recorder]:
    sink = Recorder()
    return Exporter(sink, budget, {"cluster": "c", **fixed}), sink


# -- The table


def test_every_count_of_a_ratio_is_a_counter_and_every_ratio_a_gauge_with_its_labels() -> None:
    for name, metric in METRICS.items():
        for count in metric.counts:
            assert EXPORTED[count].kind is MetricKind.COUNTER
            assert set(EXPORTED[count].labels) <= set(metric.labels)
        if metric.denominator is not None:
            assert (EXPORTED[name].kind, EXPORTED[name].labels) == (MetricKind.GAUGE, metric.labels)
        else:
            assert EXPORTED[metric.counts[0]].labels == metric.labels


def test_every_metric_says_what_it_is_and_has_bounded_labels_only() -> None:
    for name, metric in EXPORTED.items():
        assert name.startswith("moe_") and metric.unit and metric.help.endswith(".")
        assert all(0 < label(each).cap <= 64 for each in metric.labels)
        assert list(metric.bounds) == sorted(metric.bounds)
        assert bool(metric.bounds) is (metric.kind is MetricKind.HISTOGRAM)
        assert not {"request", "token", "prompt", "user", "key"} & set(metric.labels)


# -- Pushes


def test_a_counter_is_there_before_it_counts_and_then_rises_by_what_its_total_has() -> None:
    export, sink = exporter(rank="0")
    for total in (0, 0, 3, 3, 10):
        export.count("moe_tokens", total)
        assert sink.of("moe_tokens") == {("c", "0"): total}
    before = sink.pushes
    export.count("moe_tokens", 10)
    assert sink.pushes == before, "nothing has changed"


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("moe_tokens", {"request": "r-1"}),
        ("moe_routes_attempted", {"release": "r"}),
        ("moe_routes_attempted", {"release": "r", "phase": "the prompt"}),
        ("moe_routes_attempted", {"release": "r" * 200, "phase": "decode"}),
        ("moe_speed", {}),
    ],
)
def test_labels_that_are_not_the_metrics_own_are_refused(name: str, labels: dict[str, str]) -> None:
    export, sink = exporter(rank="0")
    before = sink.pushes
    with pytest.raises(ConfigError):
        export.count(name, 1, **labels)
    assert sink.pushes == before


def test_a_label_with_too_many_values_becomes_other_and_the_sum_stays_exact() -> None:
    export, sink = exporter()
    cap = LABELS["release"].cap
    for total in (1, 5):
        for number in range(cap + 4):
            export.count("moe_steps", total * (number + 1), release=f"r{number}", phase="decode")
        export.end()
    found = sink.of("moe_steps")
    assert len(found) == cap + 1
    assert found[OTHER, "decode"] == 5 * sum(range(cap + 1, cap + 5))
    assert sum(found.values()) == 5 * sum(range(1, cap + 5))
    assert sink.of(REFUSED) == {("c",): 4}, "each once"


def test_a_gauge_beyond_a_cap_is_left_out_until_another_has_disappeared() -> None:
    export, sink = exporter()
    cap = label("layer_group").cap
    export.begin(0.0)
    for number in range(cap + 1):
        export.set("moe_imbalance", 1.0, layer_group=str(number))
    export.end()
    assert len(sink.of("moe_imbalance")) == cap
    assert sink.of(REFUSED) == {("c",): 1}
    used = export.series
    export.begin(100.0)  # nobody has renewed them
    export.set("moe_imbalance", 1.0, layer_group=str(cap))
    assert ("c", str(cap)) in sink.of("moe_imbalance")
    assert export.series == used - cap + 1


def test_what_a_gauge_no_longer_has_is_zero_once() -> None:
    export, sink = exporter()
    names = ("layer", "expert")
    export.only("moe_expert_load_share", names, {("0", "1"): 0.5, ("0", "2"): 0.25})
    export.only("moe_expert_load_share", names, {("0", "1"): 0.75})
    assert sink.of("moe_expert_load_share") == {("c", "0", "1"): 0.75, ("c", "0", "2"): 0.0}
    before = sink.pushes
    export.only("moe_expert_load_share", names, {("0", "1"): 0.75})
    assert sink.pushes == before + 1


def test_what_a_gauge_had_before_a_long_pause_is_gone_already() -> None:
    export, sink = exporter()
    export.begin(0.0)
    export.only("moe_expert_load_share", ("layer", "expert"), {("0", "1"): 0.5})
    export.begin(1000.0)  # the process was stopped for a while
    export.only("moe_expert_load_share", ("layer", "expert"), {("0", "2"): 0.25})
    assert sink.of("moe_expert_load_share")["c", "0", "2"] == 0.25


def test_a_histogram_takes_a_bounded_number_of_observations_evenly_spread() -> None:
    export, sink = exporter(rank="0")
    export.observe("moe_step_seconds", [])
    assert sink.histograms == {}
    export.observe("moe_step_seconds", [float(number) for number in range(1000)])
    (taken,) = sink.histograms.values()
    assert len(taken) == SAMPLED
    assert {round(after - before, -1) for before, after in pairwise(taken)} == {30.0}


def test_no_process_exports_more_than_its_budget_and_failures_still_have_a_place() -> None:
    export, sink = exporter(budget=24)
    for number in range(100):
        for phase in PHASES:
            export.count("moe_routes_inter_node", 1, release=f"r{number}", phase=phase, topology=f"{number}x2")
    export.end()
    assert export.series == sink.series <= 24
    assert sum(sink.of("moe_routes_inter_node").values()) == 300, "folded, not lost"


# -- A rank


def status_of(rank: int, **changes: Any) -> EngineStatus:
    numbers = {each.name: 0 for each in dataclasses.fields(EngineStatus) if each.default is dataclasses.MISSING}
    given = {**numbers, "rank": rank, "state": "serving", "failure": "", "resident_slots": {0: 3, 1: 4}, **changes}
    return EngineStatus(**{name: value for name, value in given.items() if name in EngineStatus.__dataclass_fields__})


def busy(steps: int) -> LoopCounters:
    counters = LoopCounters()
    for _ in range(steps):
        counters.steps_agreed += 1
        counters.tokens_emitted += 2
        counters.count_work(0.02)
    return counters


def test_a_rank_exports_its_status_number_for_number_and_is_21_series_beside_its_histograms() -> None:
    export, sink = exporter(RANK_BUDGET, rank="5")
    rank, counters = RankExporter(export), busy(40)
    status = status_of(5, tokens_emitted=80, bytes_sent=7, seconds_worked=0.8, kv_blocks_total=64, resident_bytes=9)
    rank.push(status, counters, 0.0, histograms=False)
    found = {name: value for (name, labels), value in {**sink.counters, **sink.gauges}.items() if labels[0] == "c"}
    assert (found["moe_tokens"], found["moe_bytes_sent"], found["moe_step_seconds_sum"]) == (80, 7, 0.8)
    assert (found["moe_kv_blocks_total"], found["moe_slots_resident"], found["moe_slot_bytes"]) == (64, 7, 9)
    assert sink.series == export.series == RANK_SERIES
    rank.push(status, busy(60), 5.0, histograms=True)
    assert sink.series == RANK_BUDGET
    assert len(sink.histograms["moe_step_seconds", ("c", "5")]) == 20, "those since the last round, pushed or not"


def test_the_time_between_tokens_is_of_steps_in_a_row_that_gave_some() -> None:
    counters = LoopCounters()
    for gives in (True, True, False, True, True, True):
        counters.steps_agreed += 1
        counters.tokens_emitted += gives
        counters.count_work(0.01)
    assert counters.gaps_seen == len(counters.token_gaps) == 3
    counters.steps_agreed += 2  # a step without work lies between
    counters.tokens_emitted += 1
    counters.count_work(0.01)
    assert counters.gaps_seen == 3


# -- Releases


def counts_of(factor: int = 1, *, failures: int = 0, generation: int = 1) -> ReleaseCounts:
    routes = RouteTally()
    routes.ran("decode", "1x2", attempted=10 * factor, accepted=10 * factor, remote=4 * factor, inter_node=factor)
    routes.ran_windowed("prefill", 5 * factor)
    routes.replays["decode-8"] += 6 * factor
    if failures:
        routes.stale[generation] += failures
        routes.unconserved[0] += failures
        routes.mismatches["decode"] += failures
    units = UnitTally(Counter(decode=4 * factor), Counter({("decode", "graph_key_mismatch"): factor}))
    return ReleaseCounts(routes, Counter(audited=2 * factor), units)


def told(rank: int, counts: ReleaseCounts, generation: int = 1, epoch: int = 0) -> Tallies:
    return Tallies(rank, "r", generation, epoch, "1x2", {"r": counts})


def pushed(totals: ReleaseTotals) -> Recorder:
    export, sink = exporter(CONTROLLER_BUDGET)
    totals.push(export)
    return sink


def test_releases_are_exported_as_sums_over_ranks_with_their_ratios() -> None:
    totals = ReleaseTotals()
    for rank in (0, 1):
        totals.take(told(rank, counts_of(1)))
        totals.take(told(rank, counts_of(3)))
    sink = pushed(totals)
    assert sink.of("moe_routes_attempted") == {("r", "decode"): 60, ("r", "prefill"): 30, ("r", "bare"): 0}
    assert sink.of("moe_routes_accepted") == sink.of("moe_routes_attempted")
    assert sink.of("moe_routes_accepted_by_topology")["r", "decode", "1x2"] == 60
    assert sink.of("moe_routes_windowed") == {("r", "prefill"): 30}
    assert sink.of("moe_remote_route_ratio") == {("r", "decode"): 0.4}
    assert sink.of("moe_inter_node_route_ratio") == {("r", "decode", "1x2"): 0.1}
    assert sink.of("moe_route_drop_ratio") == {("r", "decode"): 0.0, ("r", "prefill"): 0.0}
    assert sink.of("moe_graph_replays") == {("r", "decode", "decode-8"): 36}
    assert sink.of("moe_graph_fallbacks") == {("r", "decode", "none"): 12}
    assert sink.of("moe_graph_replay_ratio") == {("r", "decode", "decode-8"): 0.75}
    assert sink.of("moe_steps")["r", "decode"] == 24
    assert sink.of("moe_fallback_steps")["r", "decode", "graph_key_mismatch"] == 6
    assert sink.of("moe_fallback_step_ratio")["r", "decode", "graph_key_mismatch"] == 0.25


def test_every_failure_counter_is_there_at_zero_from_the_start() -> None:
    totals = ReleaseTotals()
    totals.take(told(0, ReleaseCounts()))
    sink = pushed(totals)
    for name in ("moe_routes_dropped", "moe_route_output_mismatches"):
        assert sink.of(name) == {("r", phase): 0 for phase in PHASES}
    assert sink.of("moe_stale_handle_acceptances") == {("r", "1"): 0}
    assert sink.of("moe_count_conservation_failures") == {("r", "0"): 0}
    assert all(("r", "decode", reason) in sink.of("moe_fallback_steps") for reason in list(FallbackReason)[1:])


def test_a_rank_that_leaves_keeps_its_part_of_the_sums() -> None:
    totals, (export, sink) = ReleaseTotals(), exporter(CONTROLLER_BUDGET)
    for rank in (0, 1):
        totals.take(told(rank, counts_of(2)))
    totals.push(export)
    totals.keep({0})
    totals.take(told(0, counts_of(3)))
    totals.push(export)
    assert sink.of("moe_routes_attempted")["r", "decode"] == 50


def test_a_controller_that_goes_on_counts_from_what_it_first_hears_but_repeats_failures() -> None:
    totals = ReleaseTotals(restarted=True)
    totals.take(told(0, counts_of(2, failures=1)))
    totals.take(told(0, counts_of(3, failures=1)))
    sink = pushed(totals)
    assert sink.of("moe_routes_attempted")["r", "decode"] == 10
    assert sink.of("moe_stale_handle_acceptances") == {("r", "1"): 1}


def test_the_names_of_generations_do_not_grow_without_end_and_no_failure_is_lost() -> None:
    totals, (export, sink) = ReleaseTotals(), exporter(CONTROLLER_BUDGET)
    for generation in range(1, 40):
        totals.take(told(0, counts_of(1, failures=1, generation=30), generation, epoch=generation))
        totals.push(export)
    export.end()
    found = sink.of("moe_stale_handle_acceptances")
    assert sum(found.values()) == 1
    assert len(found) == LABELS["placement_generation"].cap + 1
    assert sink.of(REFUSED) == {("c",): 0}, "a bounded name is no refusal"


# -- Operations


def operation(number: int, kind: Kind, stage: Stage, **changes: Any) -> Operation:
    return Operation(number, kind, "me", "why", 100.0, stage, **changes)


def test_operations_are_counted_once_with_the_bytes_and_slots_they_moved() -> None:
    changes, (export, sink) = Changes(ControlState(), expert_bytes=10), exporter(CONTROLLER_BUDGET)
    under_way = operation(1, Kind.REBALANCE, Stage.FILLING, moved_bytes={"peer": 20})
    waiting = operation(2, Kind.GROW, Stage.PREPARING)
    changes.take(ControlState(operations=(under_way, waiting)))
    changes.push(export, now=107.0)
    assert sink.of("moe_migration_bytes") == {("c", "peer"): 20, ("c", "checkpoint"): 0}
    assert sink.of("moe_operations_open")["c", "rebalance", "filling"] == 1
    assert sink.of("moe_operation_age_seconds") == {("c", "rebalance"): 7, ("c", "grow"): 7, ("c", "shrink"): 0}
    moved = {"peer": 30, "checkpoint": 10}
    done = operation(1, Kind.REBALANCE, Stage.DONE, moved_bytes=moved, waves=1, pause_s=0.02)
    failed = operation(2, Kind.GROW, Stage.FAILED, moved_bytes={})
    for _ in range(2):
        changes.take(ControlState(history=(done, failed)))
        changes.push(export, now=110.0)
    assert sink.of("moe_migration_bytes") == {("c", "peer"): 30, ("c", "checkpoint"): 10}
    assert sink.of("moe_migration_slots") == {("c",): 4}
    ended = {labels: value for labels, value in sink.of("moe_operations").items() if value}
    assert ended == {("c", "rebalance", "done"): 1, ("c", "grow", "failed"): 1}
    assert len(sink.of("moe_operations")) == 9, "all of them from the start"
    assert sink.histograms == {("moe_switch_pause_seconds", ("c",)): [0.02]}
    assert not any(sink.of("moe_operations_open").values())


def test_what_another_controller_has_exported_is_not_counted_again() -> None:
    past = operation(1, Kind.SHRINK, Stage.DONE, moved_bytes={"peer": 50}, waves=1, pause_s=1.0)
    going = operation(2, Kind.REBALANCE, Stage.FILLING, moved_bytes={"peer": 20})
    changes = Changes(ControlState(history=(past,), operations=(going,)), expert_bytes=10)
    changes.take(ControlState(history=(past,), operations=(dataclasses.replace(going, moved_bytes={"peer": 40}),)))
    export, sink = exporter(CONTROLLER_BUDGET)
    changes.push(export, now=0.0)
    assert sink.of("moe_migration_bytes")["c", "peer"] == 20
    assert not any(sink.of("moe_operations").values()) and sink.histograms == {}


# -- Placement and demand


def many_layers(layers: int, experts: int, ranks: int) -> PlacementSnapshot:
    """Every expert once, the first of each layer on every rank."""
    homes = [(expert, expert % ranks) for expert in range(experts)] + [(0, rank) for rank in range(1, ranks)]
    one = placement(homes, spec_of(range(ranks)))
    named = tuple(dataclasses.replace(one.layers[0], layer=3 + number) for number in range(layers))
    return dataclasses.replace(one, layers=named)


def test_layers_go_by_groups_of_which_there_are_few() -> None:
    assert groups([0, 1, 2, 3]) == {str(layer): range(layer, layer + 1) for layer in range(4)}
    many = groups(range(3, 64))
    assert len(many) == 8 and next(iter(many)) == "3-10" and list(many)[-1] == "59-63"
    assert [at for span in many.values() for at in span] == list(range(61))


def test_copies_imbalance_and_hottest_experts_are_those_of_a_count_by_hand() -> None:
    snapshot = many_layers(2, 4, 2)  # expert 0 on both ranks, 2 on rank 0, 1 and 3 on rank 1
    loads = np.array([[8.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    copies = copies_by_group(snapshot)
    assert (copies["3", "min"], copies["3", "mean"], copies["3", "max"]) == (1, 1.25, 2)
    assert imbalance_by_group(snapshot, loads) == {("3",): 8 / 7, ("4",): 1.0}
    shares = hottest(snapshot, loads)
    assert shares["3", "0"] == 8 / 14 and shares["3", OTHERS] == 0.0
    assert {layer for layer, _ in shares} == {"3"}, "a layer without load has no shares"


# -- How many series


def crowded_releases(turn: int, rank: int) -> Tallies:
    """Three releases that do everything there is to do, over more generations and topologies than may be named."""
    releases = {}
    for release in range(3):
        counts = ReleaseCounts()
        for phase in PHASES:
            for topology in range(turn % 12):
                counts.routes.ran(phase, f"{topology}x8", attempted=9, accepted=8, remote=5, inter_node=2)
            counts.routes.mismatches[phase] += 1
            counts.units.ran(phase, list(FallbackReason)[release : release + 1])
        counts.routes.replays.update({f"decode-{graph}": 3 for graph in range(6)})
        counts.routes.stale[turn] += 1
        counts.routes.unconserved[turn] += 1
        releases[f"release-{release}"] = counts
    return Tallies(rank, "release-0", turn, turn, "8x8", releases)


def controllers_series(turns: int) -> Recorder:
    """A controller's life over 61 layers x 256 experts whose demand never stays the same."""
    export, sink = exporter(CONTROLLER_BUDGET)
    snapshot, totals = many_layers(61, 256, 64), ReleaseTotals()
    changes, generator = Changes(ControlState(), 10), np.random.default_rng(1)
    peers = {rank: Peer(rank, PeerPhase.SERVING, committed_step=100) for rank in range(CAPPED_RANKS)}
    for turn in range(1, turns + 1):
        export.begin(5.0 * turn)
        totals.take(crowded_releases(turn, 0))
        totals.push(export)
        push_ranks(export, ClusterState.SERVING, Observed(peers, (snapshot,)), tuple(peers))
        for state in ("BUILT", "VERIFIED", "LOADED", "SHADOW", "CANARY", "ACTIVE", "DRAINING", "RETIRED"):
            export.set("moe_releases", 1, state=state)
        for name in ("moe_generations_live", "moe_drain_age_seconds"):
            export.set(name, 1)
        done = operation(turn, Kind.GROW, Stage.DONE, waves=1, pause_s=0.1, moved_bytes={"peer": 100 * turn})
        changes.take(ControlState(history=(done,)))
        changes.push(export, 0.0)
        demand = Demand(generator.random((61, 256)) ** 4, Provenance(start=0, end=50))
        push_placement(export, snapshot, demand, Observed(peers, (snapshot,)))
        export.end()
        assert export.series <= CONTROLLER_BUDGET
    return sink


def replicas_series() -> Recorder:
    """An HTTP replica that is asked for everything, with every outcome."""
    export, sink = exporter(REPLICA_BUDGET)
    counters = Counters(lambda: 1.0, lambda: 2.0)
    for number in range(50):
        counters.requests.labels(f"/v1/{number}", 200 + number % 7).inc()
        counters.refusals.labels(f"Error{number}").inc()
    for _ in range(100):
        timing = Timing(counters, 3)
        timing.token()
        timing.end(5, complete=True)
    counters.push(export, 0.0)
    assert sum(sink.of("moe_http_requests").values()) == 50
    assert sum(sink.of("moe_http_refusals").values()) == 50
    assert export.series == sink.series <= REPLICA_BUDGET
    return sink


def test_64_ranks_of_61_layers_with_256_experts_and_two_replicas_stay_below_2000_series() -> None:
    ranks = 0
    for number in range(CAPPED_RANKS):
        export, sink = exporter(RANK_BUDGET, rank=str(number))
        resident = dict.fromkeys(range(61), 5)
        status = status_of(number, resident_slots=resident)
        RankExporter(export).push(status, busy(200), 0.0, histograms=number < HISTOGRAM_SEATS)
        assert sink.of(REFUSED) == {("c",): 0}
        ranks += sink.series
    controller = controllers_series(3)
    whole = ranks + controller.series + CAPPED_REPLICAS * replicas_series().series
    assert whole <= SERIES_CAP
    budgets = CAPPED_RANKS * RANK_SERIES + HISTOGRAM_SEATS * (RANK_BUDGET - RANK_SERIES) + CONTROLLER_BUDGET
    assert whole <= budgets + CAPPED_REPLICAS * REPLICA_BUDGET <= SERIES_CAP
    assert any(labels[2] == OTHERS for labels in controller.of("moe_expert_load_share"))


def test_a_controller_stays_within_its_budget_however_long_it_lives() -> None:
    sink = controllers_series(40)
    shown = sink.of("moe_expert_load_share")
    assert {labels[1] for labels in shown} == {str(3 + at) for at in (0, 9, 17, 26, 34, 43, 51, 60)}
    assert sum(sink.of("moe_stale_handle_acceptances").values()) == 3 * 40, "folded, not lost"
    assert sink.of("moe_operations")["c", "grow", "done"] == 40


def test_an_http_replica_exports_what_its_own_page_says() -> None:
    export, sink = exporter(REPLICA_BUDGET)
    counters = Counters(lambda: 3.0, lambda: 4.0)
    counters.requests.labels("/v1/chat/completions", 200).inc(5)
    counters.requests.labels("/admin/status", 200).inc(1)
    counters.requests.labels("/admin/scale", 200).inc(1)
    Timing(counters, 11).end(7, complete=False)
    counters.push(export, 0.0)
    counters.push(export, 5.0)
    assert sink.of("moe_http_requests") == {
        ("c", "/v1/completions", "200"): 0,
        ("c", "/v1/chat/completions", "200"): 5,
        ("c", "/admin", "200"): 2,
    }
    for name, value in (("prompt_tokens", 11), ("completion_tokens", 7), ("cancelled", 1)):
        assert sink.of(f"moe_http_{name}") == {("c",): value}
        assert f"ray_moe_http_{name}_total {float(value)}" in counters.text().decode()
    assert (sink.of("moe_http_running"), sink.of("moe_http_queued")) == ({("c",): 3.0}, {("c",): 4.0})
