"""Traces: what generators promise, that a seed is a trace, and that committed traces are what their headers say."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_moe.controlplane.traces import GENERATORS, Recipe, Trace
from ray_moe.errors import ConfigError

TRACES = Path(__file__).parent / "data" / "traces"
SMALL = Recipe("drift", 3, 80, 2, 16, 4096, shift_every=25, burst_steps=8, period=40, prompts=3)


def loads_of(trace: Trace) -> np.ndarray:
    return np.stack(list(trace))


@pytest.mark.parametrize("generator", sorted(GENERATORS))
def test_a_committed_trace_is_what_its_recipe_makes_today(generator: str) -> None:
    kept = Trace.from_bytes((TRACES / f"{generator}.npz").read_bytes(), f"{generator}.npz")
    assert kept.recipe is not None and kept.recipe.generator == generator
    again = Trace.generated(kept.recipe)
    assert again.shifts == kept.shifts
    np.testing.assert_array_equal(loads_of(again), loads_of(kept))


@pytest.mark.parametrize("generator", sorted(GENERATORS))
def test_a_seed_is_one_trace_of_whole_routes_and_another_seed_another(generator: str) -> None:
    recipe = replace(SMALL, generator=generator)
    trace = Trace.generated(recipe)
    loads = loads_of(trace)
    assert loads.shape == (80, 2, 16)
    assert (loads >= 0).all() and (loads == np.rint(loads)).all()
    np.testing.assert_array_equal(loads, loads_of(trace))  # iterating starts anew
    assert (loads != loads_of(Trace.generated(replace(recipe, seed=4)))).any()
    # A day has its hours; else every layer of every step has its routes, give or take what sampling does.
    least, most = (2 / 3, 4 / 3) if generator == "diurnal" else (1, 1)
    assert (loads.sum(axis=2) > least * 4096 * 0.85).all() and (loads.sum(axis=2) < most * 4096 * 1.15).all()


def test_more_steps_change_nothing_about_the_first_ones() -> None:
    for generator in GENERATORS:
        short = replace(SMALL, generator=generator)
        long = Trace.generated(replace(short, steps=120))
        np.testing.assert_array_equal(np.stack(list(itertools.islice(long, 80))), loads_of(Trace.generated(short)))


def test_zipf_has_the_shares_of_its_law() -> None:
    recipe = Recipe("zipf", 1, 200, 1, 8, 100_000, exponent=1.0)
    shares = np.sort(loads_of(Trace.generated(recipe)).mean(axis=0)[0])[::-1] / 100_000
    law = 1 / np.arange(1, 9)
    np.testing.assert_allclose(shares, law / law.sum(), rtol=0.01)


def test_drift_changes_most_at_its_shifts() -> None:
    trace = Trace.generated(replace(SMALL, routes=1 << 20))
    loads = loads_of(trace)
    change_T = np.abs(np.diff(loads, axis=0)).sum(axis=(1, 2))
    at_shifts = [change_T[shift - 1] for shift in trace.shifts]
    elsewhere = np.delete(change_T, [shift - 1 for shift in trace.shifts])
    assert trace.shifts and min(at_shifts) > elsewhere.max()


def test_a_burst_begins_and_ends_at_recorded_shifts_and_multiplies_one_expert_of_each_layer() -> None:
    trace = Trace.generated(replace(SMALL, generator="bursts", routes=1 << 22, burst_factor=8.0))
    loads = loads_of(trace)
    start, end = trace.shifts[:2]
    assert end - start == SMALL.burst_steps
    odds = loads / (loads.sum(axis=2, keepdims=True) - loads)
    ratio_LE = odds[start] / odds[start - 1]
    np.testing.assert_allclose(ratio_LE.max(axis=1), 8, rtol=0.1)
    assert ((ratio_LE > 2).sum(axis=1) == 1).all()
    np.testing.assert_allclose(loads[end], loads[start - 1], rtol=0.1)


def test_a_day_ends_as_it_began_and_has_twice_the_routes_at_noon() -> None:
    loads = loads_of(Trace.generated(Recipe("diurnal", 5, 101, 1, 8, 1 << 20, period=100)))
    np.testing.assert_allclose(loads[100], loads[0], rtol=0.05)
    assert loads[50].sum() == pytest.approx(2 * loads[0].sum(), rel=0.02)


def test_a_prompt_mix_is_steady_between_its_shifts() -> None:
    trace = Trace.generated(replace(SMALL, generator="prompt_mix", routes=1 << 22))
    loads = loads_of(trace)
    for start, end in itertools.pairwise([0, *trace.shifts, trace.steps]):
        np.testing.assert_allclose(loads[start:end].std(axis=0) / loads[start:end].mean(axis=0), 0, atol=0.02)


def test_a_long_trace_is_made_step_by_step() -> None:
    recipe = Recipe("drift", 1, 10**9, 58, 256, 1 << 22)
    tracemalloc.start()
    # A billion steps would record two million shifts: the trace of them alone is made here, of a thousand times fewer.
    trace = Trace.generated(replace(recipe, steps=10**6))
    seen = sum(step_LE.sum() for step_LE in itertools.islice(trace, 20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen > 0
    assert peak < 4 << 20  # a step is 119 KB; all of them would be 119 GB


def test_what_was_recorded_comes_back_from_its_file() -> None:
    trace = Trace.recorded(np.arange(24).reshape(3, 2, 4), shifts=(1,), name="observed")
    again = Trace.from_bytes(trace.to_bytes(), "file.npz")
    assert (again.name, again.shifts, again.recipe) == ("observed", (1,), None)
    np.testing.assert_array_equal(loads_of(again), np.arange(24).reshape(3, 2, 4))


def test_what_is_no_trace_is_refused_by_field_value_and_bound() -> None:
    with pytest.raises(ConfigError, match=r"step 1 layer 0 expert 2: found -1, must be a whole number"):
        Trace.recorded([[[1, 2, 3]], [[1, 2, -1]]])
    with pytest.raises(ConfigError, match=r"found 0\.5, must be a whole number"):
        Trace.recorded([[[0.5]]])
    with pytest.raises(ConfigError, match=r"\[steps, layers, experts\], all >= 1, found \[2, 2\]"):
        Trace.recorded([[1, 2], [3, 4]])
    with pytest.raises(ConfigError, match=r"shifts must ascend within \(0, 2\), found \[2\]"):
        Trace.recorded([[[1]], [[1]]], shifts=(2,))
    with pytest.raises(ConfigError, match=r"^x\.npz: not a trace"):
        Trace.from_bytes(b"PK no archive", "x.npz")
    with pytest.raises(ConfigError, match=r"generator: found 'tide', must be one of bursts, diurnal"):
        replace(SMALL, generator="tide")
    with pytest.raises(ConfigError, match=r"shift_share: found 1\.5, must be in \[0, 1\]"):
        replace(SMALL, shift_share=1.5)
    with pytest.raises(ConfigError, match=r"steps: found 0, must be >= 1"):
        replace(SMALL, steps=0)
