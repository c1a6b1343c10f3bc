"""The engine benchmark's profile of a decode step is exact, wherever in a step the watch begins and ends."""

from __future__ import annotations

import pytest

from ray_moe.bench.gpu_engine import Span, whole_steps

LAYERS, STEPS, PERIOD_US = 2, 4, 100.0
# (name, start, end) in each of a step's two layers, and one copy after them.
LAYER = (("_paged_decode_kernel", 0.0, 10.0), ("_gate_up_kernel", 12.0, 30.0), ("nvjet_sm90_tst", 25.0, 35.0))


def timeline() -> list[Span]:
    spans = []
    for step in range(STEPS):
        for layer in range(LAYERS):
            origin = step * PERIOD_US + layer * 40.0
            spans += [Span(name, origin + start, origin + end) for name, start, end in LAYER]
        spans.append(Span("Memcpy DtoH", step * PERIOD_US + 90.0, step * PERIOD_US + 95.0))
    return spans


@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_a_step_is_the_mean_of_whole_steps_and_counts_what_overlaps_once(cut: int) -> None:
    spans = timeline()
    watched = spans[cut : len(spans) - 2]
    found = whole_steps(watched[::-1], LAYERS)  # in no order
    assert found is not None
    # Of 4 steps the last is cut: 3 are whole from its first mark, 3 from the second layer's on, 2 from the next step's.
    assert found["watched_steps"] == {0: 3, 1: 3, 3: 3, 6: 2}[cut]
    assert found["watched_step_ms"] == pytest.approx(0.1)
    # Two layers of 10 + 23 us (18 + 10, of which 5 at once), and a copy of 5.
    assert found["busy_ms"] == pytest.approx(0.071)
    assert found["device_ms"] == {"attention": 0.02, "experts": 0.036, "products": 0.02, "rest": 0.005}
    assert found["launches_per_step"] == 7
    assert next(iter(found["slowest"].items())) == ("_gate_up_kernel", 0.036)


def test_less_than_a_whole_step_says_nothing() -> None:
    assert whole_steps([], LAYERS) is None
    assert whole_steps(timeline()[:7], LAYERS) is None
