"""Promotion: ratios keep their denominators, quantiles are exact, and no check makes up for another."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.controlplane.promotion import (
    FAULTS,
    Gate,
    MeasuredNumber,
    PromotionPolicy,
    Reading,
    evaluate,
    unsafe_faults,
)
from ray_moe.controlplane.ratios import (
    NEAREST_RANK,
    RATIOS,
    Count,
    Quantile,
    Ratio,
    Window,
    nearest_rank,
    total,
)
from ray_moe.errors import ConfigError, EvidenceError
from ray_moe.evidence import Elapsed, Instrument, MeasuredBytes, Measurement, Units
from ray_moe.metrics import LABEL_LENGTH, LABELS, METRICS, check_labels
from tests.layers import untimed
from tests.releases import COUNTED, POLICY, cell_of, evidence_of

CLOCK = Measurement(Instrument.CLOCK, "every inter-token gap of 64 streams", "runs/gaps.json")
WHERE: dict[str, Any] = {"release_id": "release-1", "cell": "decode", "window": Window(0, 99)}


# -- Ratios


def test_a_ratio_says_what_it_divides_over_which_steps_and_on_what_evidence() -> None:
    ratio = cell_of(dropped_routes=2, accepted_routes=798, cell="hot").ratio("drop")
    assert ratio.value == Fraction(1, 400)
    assert str(ratio) == "2 dropped_routes of 800 attempted_routes (release-1, hot, steps 0 to 99, measured)"
    assert ratio.quantile_convention == "none: a ratio of totals"


@pytest.mark.parametrize("name", RATIOS)
def test_a_ratio_takes_its_own_numerator_and_denominator_only(name: str) -> None:
    top, bottom = (Count(of, 1) for of in RATIOS[name])
    assert Ratio(name, top, bottom, measurement=COUNTED, **WHERE).value == 1
    for other in {count for pair in RATIOS.values() for count in pair} - {bottom.of}:
        with pytest.raises(EvidenceError, match=f"the {name} ratio is .* over {bottom.of}, found .* over {other}"):
            Ratio(name, top, Count(other, 1), measurement=COUNTED, **WHERE)


def test_a_ratio_without_anything_to_divide_by_has_no_value() -> None:
    empty = cell_of(graph_replay_steps=0).ratio("graph_replay")
    with pytest.raises(EvidenceError, match=r"graph_replay ratio of decode, steps 0 to 99: there were 0 graph_steps"):
        _ = empty.value


def test_an_unknown_ratio_and_one_above_one_are_refused() -> None:
    with pytest.raises(EvidenceError, match=r"ratio must be one of drop, remote, .*, found 'speed'"):
        cell_of().ratio("speed")
    with pytest.raises(EvidenceError, match=r"drop ratio: 3 dropped_routes of 2 .* is above 1"):
        Ratio("drop", Count("dropped_routes", 3), Count("attempted_routes", 2), measurement=None, **WHERE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropped_routes": 1}, "800 accepted and 1 dropped routes are not 800 attempted ones"),
        ({"inter_node_routes": 401}, "inter-node routes are remote and remote ones accepted, found 401, 400, 800"),
        ({"remote_routes": 801}, "found 0, 801, 800"),
        ({"graph_fallback_steps": 1}, "101 graph steps of 100"),
        ({"steps": -1}, "steps must be a whole number >= 0, found -1"),
        ({"steps": 1.5}, "steps must be a whole number >= 0, found 1.5"),
    ],
)
def test_counts_that_contradict_one_another_make_no_cell(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        cell_of(**changes)


def test_cells_of_two_releases_or_of_two_evidence_classes_do_not_add_up() -> None:
    with pytest.raises(EvidenceError, match="release_id release-1 and release-2"):
        total([cell_of(), cell_of("release-2")])
    with pytest.raises(EvidenceError, match="evidence_class measured and synthetic"):
        total([cell_of(), cell_of(measurement=None)])
    with pytest.raises(EvidenceError, match="measured by clock and group_counter"):
        total([cell_of(), cell_of(measurement=CLOCK)])
    with pytest.raises(EvidenceError, match="no workload cell was observed"):
        total([])


def test_a_total_spans_its_windows_and_names_its_artifacts() -> None:
    other = dataclasses.replace(COUNTED, artifact="runs/more.json")
    whole = total([cell_of(), cell_of(cell="prefill", window=Window(200, 299), measurement=other)])
    assert (whole.window, whole.steps, whole.cell) == (Window(0, 299), 200, "decode, prefill")
    assert whole.measurement == dataclasses.replace(COUNTED, artifact="runs/counters.json, runs/more.json")
    with pytest.raises(EvidenceError, match="a window of steps ends after its start, found 5 to 4"):
        Window(5, 4)


# -- Quantiles


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=40), st.integers(1, 60), st.integers(1, 60))
@untimed
def test_nearest_rank_is_the_smallest_value_that_the_share_of_the_sample_does_not_exceed(
    sample: list[int], numerator: int, denominator: int
) -> None:
    quantile = Fraction(min(numerator, denominator), denominator)
    found = nearest_rank(sample, quantile)
    at_most = sum(value <= found for value in sample)
    below = sum(value < found for value in sample)
    assert found in sample
    assert Fraction(at_most, len(sample)) >= quantile > Fraction(below, len(sample))


def test_a_quantile_is_an_exact_fraction_of_something() -> None:
    # 0.07 * 100 is 7.000000000000001: its ceiling would be the eighth.
    with pytest.raises(ConfigError, match=r"an exact fraction in \(0, 1\], found 0.07"):
        nearest_rank(list(range(100)), 0.07)  # type: ignore[arg-type]
    for outside in (Fraction(0), Fraction(101, 100)):
        with pytest.raises(ConfigError, match="an exact fraction in"):
            nearest_rank([1], outside)
    with pytest.raises(ConfigError, match="a quantile needs at least 1 observation, found 0"):
        nearest_rank([], Fraction(1, 2))


def test_units_of_a_model_and_seconds_of_a_clock_stay_apart() -> None:
    units = Quantile.of_units([Units(3), Units(1)], Fraction(1), **WHERE)
    seconds = Quantile.of_seconds([0.2, 0.1], Fraction(1, 2), CLOCK, **WHERE)
    assert (units.value, units.evidence_class) == (Units(3), "synthetic")
    assert (seconds.value, seconds.evidence_class) == (Elapsed(0.1, CLOCK), "measured")
    assert units.quantile_convention == seconds.quantile_convention == NEAREST_RANK
    with pytest.raises(EvidenceError, match="Elapsed needs the measurement that gave it"):
        Quantile.of_seconds([0.2], Fraction(1), None, **WHERE)  # type: ignore[arg-type]


# -- The conjunction

BREAKS: dict[str, dict[str, Any]] = {
    "hash_ok": {"drifted": ("parity.json",)},
    "manifest_ok": {"mismatched": ("process_group_generation",)},
    "faults_ok": {"unsafe_faults": ("F03",)},
    "rollback_ok": {"rollback_rehearsed": False},
    "shadow_samples": {"shadow_samples": 99},
    "canary_samples": {"canary_samples": 199},
    "drop_ratio": {"cells": (cell_of(accepted_routes=795, dropped_routes=5),)},
    "fallback_ratio": {"cells": (cell_of(graph_replay_steps=84, graph_fallback_steps=16),)},
    "route_output_mismatches": {"route_output_mismatches": 1},
    "stale_handle_acceptances": {"stale_handle_acceptances": 1},
    "count_conservation_failures": {"count_conservation_failures": 1},
    "evidence_class": {"cells": (cell_of(measurement=None),)},
}


def test_evidence_at_every_limit_promotes() -> None:
    report = evaluate(POLICY, evidence_of())
    assert report.promote
    assert [check.name for check in report.checks] == list(BREAKS)


@pytest.mark.parametrize("name", BREAKS)
def test_one_check_that_fails_is_named_and_blocks_alone(name: str) -> None:
    plenty = {"shadow_samples": 100_000, "canary_samples": 100_000}
    report = evaluate(POLICY, evidence_of(**{**plenty, **BREAKS[name]}))
    assert not report.promote
    assert report.failed_checks == (name,)


@given(st.sets(st.sampled_from(sorted(set(BREAKS) - {"drop_ratio", "fallback_ratio", "evidence_class"}))))
@untimed
def test_all_checks_that_fail_are_named(broken: set[str]) -> None:
    changes: dict[str, Any] = {}
    for name in broken:
        changes |= BREAKS[name]
    report = evaluate(POLICY, evidence_of(**changes))
    assert set(report.failed_checks) == broken
    assert report.promote == (not broken)


def test_no_cells_are_no_passed_ratios() -> None:
    report = evaluate(POLICY, evidence_of(cells=()))
    assert report.failed_checks == ("drop_ratio", "fallback_ratio", "evidence_class")
    idle = cell_of(attempted_routes=0, accepted_routes=0, remote_routes=0, steps=0, graph_replay_steps=0)
    assert evaluate(POLICY, evidence_of(cells=(idle,))).failed_checks == ("drop_ratio", "fallback_ratio")


def test_a_report_keeps_every_input_and_cannot_be_changed() -> None:
    evidence = evidence_of()
    report = evaluate(POLICY, evidence)
    assert (report.policy, report.evidence, report.release_id) == (POLICY, evidence, "release-1")
    for record, field in ((report, "checks"), (report.evidence, "canary_samples"), (report.policy, "gates")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)


def test_evidence_of_another_releases_cells_is_refused() -> None:
    with pytest.raises(EvidenceError, match="cell decode is of release release-2, the evidence release-1"):
        evidence_of(cells=(cell_of("release-2"),))


def test_coverage_is_asked_for_by_axis() -> None:
    policy = PromotionPolicy(must_cover=(("phase", "prefill"), ("phase", "decode"), ("routing_skew", "hot")))
    one = cell_of(axes=(("phase", "prefill"), ("routing_skew", "uniform")))
    report = evaluate(policy, evidence_of(cells=(one,)))
    assert report.failed_checks == ("coverage: phase=decode", "coverage: routing_skew=hot")
    both = (one, cell_of(axes=(("phase", "decode"), ("routing_skew", "hot"))))
    assert evaluate(policy, evidence_of(cells=both)).promote
    with pytest.raises(ConfigError, match=r"must_cover: axis must be one of phase, .*, found 'weather'"):
        PromotionPolicy(must_cover=(("weather", "fine"),))
    with pytest.raises(ConfigError, match=r"cell decode: axis must be one of phase, .*, found 'weather'"):
        cell_of(axes=(("weather", "fine"),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop_ratio_max": 0.005}, r"drop_ratio_max must be a fraction in \[0, 1\], found 0.005"),
        ({"fallback_ratio_max": Fraction(3, 2)}, r"fallback_ratio_max must be a fraction in \[0, 1\]"),
        ({"shadow_samples_min": 0}, "shadow_samples_min must be >= 1, found 0"),
        ({"gates": (Gate("a", "slo", 1), Gate("a", "memory", 1))}, "every gate has its own name, found a, a"),
    ],
)
def test_a_policy_with_a_limit_that_is_none_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromotionPolicy(**changes)


# -- Measured gates

GATES: list[tuple[str, float, Reading, Reading]] = [
    ("latency", 0.25, Elapsed(0.25, CLOCK), Elapsed(0.26, CLOCK)),
    (
        *("latency", 0.25),
        Quantile.of_seconds([0.1, 0.25, 9.0], Fraction(1, 2), CLOCK, **WHERE),
        Quantile.of_seconds([0.1, 0.25, 9.0], Fraction(1), CLOCK, **WHERE),
    ),
    ("throughput", 100, MeasuredNumber(100, "tokens/s", CLOCK), MeasuredNumber(99.9, "tokens/s", CLOCK)),
    ("memory", 4096, MeasuredBytes(4096, COUNTED), MeasuredBytes(4097, COUNTED)),
    ("parity", 0, MeasuredNumber(0, "tokens", COUNTED), MeasuredNumber(1, "tokens", COUNTED)),
    ("quality", 0.7, MeasuredNumber(0.7, "accuracy", COUNTED), MeasuredNumber(0.69, "accuracy", COUNTED)),
    ("slo", 0.999, MeasuredNumber(0.999, "share", CLOCK), MeasuredNumber(float("nan"), "share", CLOCK)),
]


@pytest.mark.parametrize(("kind", "limit", "at_limit", "beyond"), GATES, ids=lambda value: str(value)[:20])
def test_a_configured_gate_is_part_of_the_conjunction(kind: str, limit: float, at_limit: Any, beyond: Any) -> None:
    policy = PromotionPolicy(gates=(Gate("ours", kind, limit),))
    assert evaluate(policy, evidence_of(readings=(("ours", at_limit),))).promote
    for readings in ((("ours", beyond),), (("another", at_limit),), ()):
        assert evaluate(policy, evidence_of(readings=readings)).failed_checks == ("ours",)


def test_a_reading_that_shows_something_else_is_refused_and_not_failed() -> None:
    units: Any = Units(3)
    for kind, reading in (
        ("latency", units),
        ("latency", Quantile.of_units([units], Fraction(1), **WHERE)),
        ("latency", MeasuredNumber(0.1, "s", CLOCK)),
        ("memory", MeasuredNumber(1, "bytes", COUNTED)),
        ("throughput", Elapsed(1.0, CLOCK)),
    ):
        with pytest.raises(EvidenceError, match=f"gate ours is about {kind}: .* shows none"):
            evaluate(PromotionPolicy(gates=(Gate("ours", kind, 1),)), evidence_of(readings=(("ours", reading),)))
    with pytest.raises(EvidenceError, match="a number in tokens/s needs the measurement that gave it"):
        MeasuredNumber(1.0, "tokens/s", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"gate ours: kind must be one of latency, .*, found 'beauty'"):
        Gate("ours", "beauty", 1)


# -- Faults


def test_a_fault_that_was_not_injected_or_ended_otherwise_is_unsafe() -> None:
    assert unsafe_faults(FAULTS) == ()
    assert unsafe_faults({}) == tuple(FAULTS)
    assert unsafe_faults({**FAULTS, "F06": "reject_load"}) == ("F06",)
    with pytest.raises(ConfigError, match=r"faults are F01, .*, found F11"):
        unsafe_faults({"F11": "reject_load"})


# -- Metrics


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_takes_exactly_its_labels(metric: str) -> None:
    labels = {name: (LABELS[name].values or ("release-1",))[0] for name in METRICS[metric].labels}
    check_labels(metric, labels)
    for name in labels:
        with pytest.raises(ConfigError, match=f"label '{name}' is missing"):
            check_labels(metric, {key: value for key, value in labels.items() if key != name})
    with pytest.raises(ConfigError, match="label 'expert' is outside its schema"):
        check_labels(metric, {**labels, "expert": "7"})


def test_label_values_are_bounded_too() -> None:
    with pytest.raises(ConfigError, match="label phase must be one of prefill, decode, bare, found 'a prompt'"):
        check_labels("moe_route_drop_ratio", {"release": "r", "phase": "a prompt"})
    for value in ("", "x" * (LABEL_LENGTH + 1)):
        with pytest.raises(ConfigError, match=f"label release must have 1 to {LABEL_LENGTH} characters, found"):
            check_labels("moe_route_drop_ratio", {"release": value, "phase": "decode"})
    with pytest.raises(ConfigError, match=r"metric must be one of .*, found 'moe_speed'"):
        check_labels("moe_speed", {})
    assert all(label.cap >= max(1, len(label.values)) for label in LABELS.values())
