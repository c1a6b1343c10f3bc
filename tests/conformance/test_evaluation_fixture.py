"""The evaluation fixture (0x0D to 0x0DC): cells, five ratios, quantiles, metrics and the promotion gate."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ray_moe.controlplane.promotion import FAULTS, ZERO_COUNTERS, PromotionPolicy, evaluate
from ray_moe.controlplane.ratios import (
    BENCHMARK_AXES,
    NEAREST_RANK,
    RATIOS,
    Cell,
    Count,
    Quantile,
    Ratio,
    Window,
    nearest_rank,
    total,
)
from ray_moe.dataplane.phases import PHASES, FallbackReason
from ray_moe.errors import ConfigError, EvidenceError
from ray_moe.evidence import Units
from ray_moe.metrics import LABELS, METRICS, check_labels
from tests.releases import evidence_of, fraction

DATA = Path(__file__).parent / "data"
FIXTURE = json.loads((DATA / "evaluation.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
RELEASE, WINDOW = "m66-placement-v19-canary-01", Window(0, 239)
CELLS = [Cell(release_id=RELEASE, window=WINDOW, measurement=None, **cell) for cell in INPUTS["cells"]]
THRESHOLDS = INPUTS["thresholds"]
POLICY = PromotionPolicy(
    shadow_samples_min=THRESHOLDS["shadow_samples_min"],
    canary_samples_min=THRESHOLDS["canary_samples_min"],
    drop_ratio_max=fraction(THRESHOLDS["drop_ratio_max"]),
    fallback_ratio_max=fraction(THRESHOLDS["fallback_ratio_max"]),
    accept_synthetic=True,  # the fixture's cells only exercise the accounting
)


def test_the_four_cells_add_up_to_the_printed_totals() -> None:
    whole = total(CELLS)
    assert {name: getattr(whole, name) for name in EXPECTED["totals"]} == EXPECTED["totals"]
    assert whole.cell == ", ".join(cell["cell"] for cell in INPUTS["cells"])


@pytest.mark.parametrize("name", EXPECTED["ratios"])
def test_a_ratio_has_its_printed_terms_and_value(name: str) -> None:
    ratio = total(CELLS).ratio(name)
    assert [ratio.numerator.value, ratio.denominator.value] == EXPECTED["ratios"][name]
    assert ratio.value == fraction(EXPECTED["ratios"][name])
    assert round(float(ratio.value), 6) == EXPECTED["ratios_rounded"][name]
    assert EXPECTED["ratios"].keys() == RATIOS.keys()


def test_remote_routes_over_attempted_ones_are_refused() -> None:
    numerator, denominator = DERIVED["wrong_denominator_remote_over_attempted"]
    with pytest.raises(EvidenceError, match="remote_routes over accepted_routes, found remote_routes over attempted"):
        Ratio(
            "remote",
            Count("remote_routes", numerator),
            Count("attempted_routes", denominator),
            RELEASE,
            "all",
            WINDOW,
            None,
        )


def test_the_fixture_quantiles_are_units_by_nearest_rank() -> None:
    assert INPUTS["quantile_convention"] == NEAREST_RANK
    sample = [Units(value) for value in DERIVED["constructed_sample_units"]]
    assert len(sample) == INPUTS["num_observations"]
    for name, quantile in (("p50", Fraction(1, 2)), ("p95", Fraction(95, 100)), ("max", Fraction(1))):
        found = Quantile.of_units(sample, quantile, release_id=RELEASE, cell="all", window=WINDOW)
        assert found.value == Units(EXPECTED["quantiles_units"][name])
        assert sorted(sample)[DERIVED["quantile_ranks"][name] - 1] == found.value
        assert (found.evidence_class, found.samples) == ("synthetic", 20)


@pytest.mark.parametrize(
    "case", FIXTURE["quantile_cases"], ids=lambda case: f"{len(case['sample'])} {case['quantile']}"
)
def test_a_quantile_case_is_exact(case: dict[str, Any]) -> None:
    assert nearest_rank(case["sample"], fraction(case["quantile"])) == case["expected"]


def gate_evidence(change: dict[str, Any]) -> Any:
    """The reference with one change, as cells and lists instead of ratios and flags."""
    given = {**DERIVED["gate_reference"], **change}
    dropped, attempted = given["drop_ratio"]
    fallback, steps = given["fallback_ratio"]
    cell = Cell(
        *(RELEASE, "all", WINDOW, None, steps, attempted, attempted - dropped, dropped, 0, 0, steps - fallback),
        fallback,
    )
    return evidence_of(
        RELEASE,
        drifted=() if given["hash_ok"] else ("loop-2",),
        mismatched=() if given["manifest_ok"] else ("placement_digest",),
        unsafe_faults=() if given["faults_ok"] else ("F04",),
        rollback_rehearsed=given["rollback_ok"],
        shadow_samples=given["shadow_samples"],
        canary_samples=given["canary_samples"],
        cells=(cell,),
        **{name: given[name] for name in ZERO_COUNTERS},
    )


@pytest.mark.parametrize("case", FIXTURE["gate_cases"], ids=lambda case: case["case"])
def test_the_gate_promotes_or_names_what_failed(case: dict[str, Any]) -> None:
    report = evaluate(POLICY, gate_evidence(case["change"]))
    assert report.promote is case["expected_promote"]
    assert list(report.failed_checks) == case["expected_failed_checks"]


def test_the_fixtures_own_cells_pass_the_gate_and_show_no_production_release() -> None:
    assert list(ZERO_COUNTERS) == THRESHOLDS["zero_counters"]
    evidence = evidence_of(RELEASE, cells=tuple(CELLS))
    assert evaluate(POLICY, evidence).promote is EXPECTED["promote"] is True
    real = dataclasses.replace(POLICY, accept_synthetic=False)
    assert evaluate(real, evidence).failed_checks == ("evidence_class",)


def test_the_eight_metrics_have_their_printed_terms_and_labels() -> None:
    printed = {row["metric"]: (row["numerator"], row["denominator"], row["labels"]) for row in FIXTURE["metric_schema"]}
    assert {
        name: (metric.numerator, metric.denominator, list(metric.labels)) for name, metric in METRICS.items()
    } == printed
    assert {label for metric in METRICS.values() for label in metric.labels} == LABELS.keys()
    assert LABELS["phase"].values == PHASES
    assert LABELS["reason"].cap >= len(FallbackReason)


def test_px_0db_01_request_token_and_prompt_labels_are_refused_by_name() -> None:
    for name, metric in METRICS.items():
        labels = {label: (LABELS[label].values or ("x",))[0] for label in metric.labels}
        for forbidden in FIXTURE["forbidden_labels"]:
            with pytest.raises(ConfigError, match=f"metric {name}: label '{forbidden}' is outside its schema"):
                check_labels(name, {**labels, forbidden: "17"})


def test_a_result_carries_the_seven_required_fields_and_the_matrix_its_nine_axes() -> None:
    names = {"workload_cell": "cell", "observation_window": "window"}
    ratio = total(CELLS).ratio("drop")
    for field in FIXTURE["result_required_fields"]:
        assert getattr(ratio, names.get(field, field)) not in (None, "")
    assert list(BENCHMARK_AXES) == FIXTURE["benchmark_axes"]


def test_the_ten_faults_have_their_declared_outcomes() -> None:
    faults = json.loads((DATA / "faults.json").read_text())
    printed = {row["id"]: row["required_outcome"] for row in faults["expected"]["faults"]}
    assert dict(FAULTS) == printed
    assert list(FAULTS.values()) == faults["inputs"]["outcome_codes"]
    assert len(set(FAULTS.values())) == faults["expected"]["num_faults"]
