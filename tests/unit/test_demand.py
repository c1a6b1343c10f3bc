"""Demand and its estimators: provenance, what each computes, and that none of them sees the future."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from ray_moe.controlplane.demand import ACCEPTED_ROWS, Demand, Phase, Provenance, ideal_loads, require
from ray_moe.controlplane.eplb import rebalance
from ray_moe.controlplane.estimators import (
    Estimator,
    Ewma,
    KernelTime,
    LinearTrend,
    PhaseHistograms,
    Quantile,
    TrailingWindow,
)
from ray_moe.errors import ConfigError
from ray_moe.identity import CheckpointVersion, PlacementVersion
from tests.layers import untimed

CHECKPOINT = CheckpointVersion("checkpoint-1")
STEPS = 100  # iterations per observation
ORIGIN = Provenance(
    unit=ACCEPTED_ROWS,
    phase="decode",
    aggregation="count",
    router_version="router-1",
    checkpoint_version=CHECKPOINT,
    topology_version="topology-1",
    placement_version=PlacementVersion("placement-v1"),
)


def observed(loads: Any, at: int, **origin: Any) -> Demand:
    """The observation of the `at`-th interval of `STEPS` iterations."""
    return Demand(np.array(loads, float), replace(ORIGIN, start=at * STEPS, end=at * STEPS + STEPS, **origin))


def after_all(estimator: Any, trace: Any, **origin: Any) -> Any:
    for at, loads in enumerate(trace):
        estimator = estimator.after(observed(loads, at, **origin))
    return estimator


def line(rows: Any) -> Any:
    """A kernel that takes 10 whatever it gets and 1 per row: a row is dearer in a small segment."""
    return np.where(rows > 0, 10 + rows, 0)


ESTIMATORS: dict[str, Estimator] = {
    "trailing": TrailingWindow(3),
    "quantile": Quantile(Fraction(1, 2), 3),
    "moving": Ewma(0.75),
    "trend": LinearTrend(2),
    "phases": PhaseHistograms(3),
    "kernel time": KernelTime(TrailingWindow(3), "line", line),
}


# -- Only the past


@pytest.mark.parametrize("name", ESTIMATORS)
@given(seed=st.integers(0, 999), past=st.integers(1, 6))
@untimed
def test_estimates_of_traces_that_differ_only_in_the_future_are_equal(name: str, seed: int, past: int) -> None:
    rng = np.random.default_rng(seed)
    common, futures = rng.integers(0, 50, (past, 2, 4)), rng.integers(0, 50, (2, 4, 2, 4))
    estimates = []
    for future in futures:
        estimator = ESTIMATORS[name]
        for at, loads in enumerate([*common, *future]):
            estimator = estimator.after(observed(loads, at))
            if at == past - 1:
                kept = estimator
        estimates.append(kept.estimate())  # asked for after the future was fed to its successors
    assert_array_equal(estimates[0].loads_LE, estimates[1].loads_LE)
    assert estimates[0].provenance == estimates[1].provenance


@pytest.mark.parametrize("name", ESTIMATORS)
def test_changing_what_was_observed_changes_no_estimate(name: str) -> None:
    loads = np.ones((1, 3))
    estimator = ESTIMATORS[name].after(Demand(loads, replace(ORIGIN, start=0, end=STEPS)))
    before = estimator.estimate().loads_LE.copy()
    loads[:] = 7
    assert_array_equal(estimator.estimate().loads_LE, before)
    with pytest.raises(ValueError, match="read-only"):
        estimator.estimate().loads_LE[0, 0] = 1


# -- What each computes, its lag and its cadence


def test_a_trailing_window_forgets_what_is_older() -> None:
    estimate = after_all(TrailingWindow(2), [[[100, 0]], [[1, 4]], [[3, 0]]]).estimate()
    assert estimate.loads_LE.tolist() == [[2, 2]]
    origin = estimate.provenance
    assert (origin.window, origin.aggregation, origin.start, origin.end) == (2, "mean of 2", 100, 300)
    assert (origin.lag, origin.cadence) == (50, 100), "half of it is one observation old"
    assert (origin.unit, origin.phase, origin.checkpoint_version) == (ACCEPTED_ROWS, "decode", CHECKPOINT)


def test_a_moving_estimate_weighs_by_age() -> None:
    trace = np.random.default_rng(0).integers(0, 9, (6, 2, 3)).astype(float)
    estimate = after_all(Ewma(0.5), trace).estimate()
    weights = np.array([0.5**5, *(0.5 ** (5 - k + 1) for k in range(1, 6))])
    assert_allclose(estimate.loads_LE, np.tensordot(weights, trace, 1), rtol=1e-14)
    assert estimate.provenance.lag == pytest.approx(STEPS * weights @ np.arange(5, -1, -1), rel=1e-14)
    assert (estimate.provenance.window, estimate.provenance.start, estimate.provenance.end) == (6, 0, 600)
    assert estimate.provenance.cadence == STEPS


def test_the_quantile_is_by_nearest_rank_and_exact() -> None:
    trace = [[[load]] for load in range(1, 101)]
    hundred = after_all(Quantile(Fraction(7, 100), 100), trace).estimate()
    assert hundred.loads_LE.tolist() == [[7]], "ceil(0.07 * 100) in binary floating point is 8"
    assert after_all(Quantile(Fraction(1), 100), trace).estimate().loads_LE.tolist() == [[100]]
    assert after_all(Quantile(Fraction(1, 2), 4), trace).estimate().loads_LE.tolist() == [[98]]
    assert hundred.provenance.aggregation == "quantile 7/100 of 100"
    assert hundred.provenance.lag == 49.5 * STEPS


def test_a_linear_trend_is_read_ahead() -> None:
    estimator = after_all(LinearTrend(3, 1.0, 1.0), [[[100]], [[110]], [[120]]])
    estimate = estimator.estimate()
    assert estimate.loads_LE.tolist() == [[150]]
    assert estimate.provenance.lag == -3 * STEPS, "it speaks of three observations after the last"
    assert estimate.provenance.aggregation.endswith("3 ahead, at most 2 times the level")


def test_a_prediction_is_clipped_at_zero_and_at_a_multiple_of_the_level() -> None:
    estimate = after_all(LinearTrend(9, 1.0, 1.0, most=1.5), [[[100, 10]], [[50, 100]]]).estimate()
    assert estimate.loads_LE.tolist() == [[0, 150]]


def test_phases_are_counted_apart() -> None:
    estimator = PhaseHistograms(2)
    phases: tuple[Phase, ...] = ("prefill", "decode", "decode", "decode")
    for at, phase in enumerate(phases):
        estimator = estimator.after(observed([[10**at, 0]], at, phase=phase))
    assert estimator.estimate("prefill").loads_LE.tolist() == [[1, 0]]
    decode = estimator.estimate("decode")
    assert decode.loads_LE.tolist() == [[1100, 0]]
    assert (decode.provenance.phase, decode.provenance.window, decode.provenance.lag) == ("decode", 2, 50)
    both = estimator.estimate()
    assert both.loads_LE.tolist() == [[1101, 0]]
    assert (both.provenance.phase, both.provenance.window) == ("mixed", 3)
    assert (both.provenance.start, both.provenance.end, both.provenance.lag) == (0, 400, (300 + 100 + 0) / 3)


def test_kernel_time_prices_each_segment_before_it_averages() -> None:
    estimate = after_all(KernelTime(TrailingWindow(2), "line", line), [[[1000, 0]], [[0, 1000]]]).estimate()
    assert estimate.loads_LE.tolist() == [[10, 10]], "ten rows an iteration in one of two: not the price of five"
    assert estimate.provenance.unit == "predicted seconds, line"
    level = after_all(KernelTime(TrailingWindow(2), "line", line), [[[200, 1800]]]).estimate()
    assert level.loads_LE.tolist() == [[12, 28]], "nine times the rows are not nine times the time"


def test_the_placement_may_change_while_one_observes_and_the_newest_is_named() -> None:
    later = PlacementVersion("placement-v2")
    estimator = Ewma(0.5).after(observed([[1]], 0)).after(observed([[1]], 1, placement_version=later))
    assert estimator.estimate().provenance.placement_version == later


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimate_of_known_observations_may_decide(name: str) -> None:
    require(after_all(ESTIMATORS[name], [[[1, 2]], [[3, 4]]]).estimate(), CHECKPOINT)


# -- Refusals


@pytest.mark.parametrize("name", [*ESTIMATORS])
def test_observations_of_another_workload_are_refused(name: str) -> None:
    estimator = ESTIMATORS[name].after(observed([[1, 2]], 3))
    for change, message in (
        ({"checkpoint_version": CheckpointVersion("checkpoint-2")}, "checkpoint_version changed from checkpoint-1 to"),
        ({"router_version": "router-2"}, "router_version changed from router-1 to router-2: begin a new estimate"),
    ):
        with pytest.raises(ConfigError, match=message):
            estimator.after(observed([[1, 2]], 4, **change))
    with pytest.raises(ConfigError, match=r"loads must be \[1, 2\] as before, found \[1, 3\]"):
        estimator.after(observed([[1, 2, 3]], 4))
    with pytest.raises(ConfigError, match="an observation must begin at 400 or later, found 300"):
        estimator.after(observed([[1, 2]], 3))
    with pytest.raises(ConfigError, match="needs the interval of iterations"):
        ESTIMATORS[name].after(Demand(np.ones((1, 2)), ORIGIN))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_there_is_no_estimate_of_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match="nothing was observed yet"):
        ESTIMATORS[name].estimate()


def test_a_single_phase_is_not_averaged_with_another() -> None:
    with pytest.raises(ConfigError, match="phase changed from decode to prefill"):
        TrailingWindow(2).after(observed([[1]], 0)).after(observed([[1]], 1, phase="prefill"))
    with pytest.raises(ConfigError, match="need observations of prefill or decode, found mixed"):
        PhaseHistograms(2).after(observed([[1]], 0, phase="mixed"))
    with pytest.raises(ConfigError, match="nothing was observed yet"):
        PhaseHistograms(2).after(observed([[1]], 0)).estimate("prefill")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrailingWindow(0), "size must be >= 1, found 0"),
        (lambda: Quantile(Fraction(1, 2), 0), "size must be >= 1, found 0"),
        (lambda: Quantile(Fraction(0), 3), r"q must be a Fraction in \(0, 1\], found Fraction\(0, 1\)"),
        (lambda: Quantile(0.5, 3), r"q must be a Fraction in \(0, 1\], found 0.5"),  # type: ignore[arg-type]
        (lambda: Ewma(1.0), r"beta must be in \[0, 1\), found 1.0"),
        (lambda: LinearTrend(0), "horizon must be >= 1, found 0"),
        (lambda: LinearTrend(1, 0.0), r"level_weight must be in \(0, 1\], found 0.0"),
        (lambda: LinearTrend(1, 0.5, 1.5), r"trend_weight must be in \(0, 1\], found 1.5"),
        (lambda: LinearTrend(1, most=math.inf), "most must be finite and >= 1, found inf"),
        (lambda: PhaseHistograms(0), "size must be >= 1, found 0"),
        (lambda: Provenance(window=0), "window must be >= 1 observation, found 0"),
        (lambda: Provenance(start=5, end=5), r"start must be before end, found \[5, 5\)"),
        (lambda: Demand(np.ones(3), ORIGIN), r"loads must be \[layers, experts\], both >= 1, found shape \[3\]"),
        (lambda: Demand(np.array([[1, -2.0]]), ORIGIN), "layer 0 expert 1: must be finite and >= 0, found -2.0"),
        (lambda: Demand(np.array([[1, np.nan]]), ORIGIN), "layer 0 expert 1: must be finite and >= 0, found nan"),
    ],
)
def test_values_out_of_bounds_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_ideal_loads_of_another_shape_are_refused() -> None:
    maps = rebalance([[1, 2]], 4, 1, 1, 2)
    with pytest.raises(ConfigError, match=r"loads must be \[layers, experts\] = \[1, 2\], found \[1, 3\]"):
        ideal_loads(observed([[1, 2, 3]], 0), maps, 2)
