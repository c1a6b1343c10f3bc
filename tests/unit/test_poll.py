"""Looking at what cannot notify: until it is there, or the time is over, with and without spinning."""

from __future__ import annotations

import time

import pytest

from ray_moe.deadline import poll


class After:
    """True from the n-th look on."""

    def __init__(self, looks: int) -> None:
        self.looks, self.left = 0, looks

    def __call__(self) -> bool:
        self.looks += 1
        return self.looks >= self.left


@pytest.mark.parametrize("spin", [0.0, 10.0])
@pytest.mark.parametrize("looks", [1, 2, 40])
def test_what_comes_in_time_is_seen_at_the_first_look_that_finds_it(looks: int, spin: float) -> None:
    ready = After(looks)
    assert poll(ready, 60.0, spin)
    assert ready.looks == looks


@pytest.mark.parametrize("spin", [0.0, 10.0])
def test_what_does_not_come_is_told_once_the_time_is_over(spin: float) -> None:
    ready, started = After(10**9), time.monotonic()
    assert not poll(ready, 0.02, spin)
    assert time.monotonic() - started >= 0.02
    assert ready.looks > 1


def test_without_time_there_is_one_look() -> None:
    ready = After(2)
    assert not poll(ready, 0.0, 1.0)
    assert ready.looks == 1
