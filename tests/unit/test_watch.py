"""The watch over a device's collectives: what it gives up, why, and what it lets be. This test decides what ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ray_moe.comm import watch as module
from ray_moe.comm.watch import Watch


class End:
    """What the device would tell of a collective's end."""

    def __init__(self) -> None:
        self.reached, self.fails, self.looked_at = False, False, threading.Event()

    def query(self) -> bool:
        self.looked_at.set()
        if self.fails:
            raise RuntimeError("an illegal address")
        return self.reached


class Watched:
    """A watch, what it said, and who is lost."""

    def __init__(self, seconds: float) -> None:
        self.said: list[str] = []
        self.lost: str | None = None
        self.gave_up = threading.Event()
        self.watch = Watch(seconds, lambda: self.lost, self._give_up, "watch")
        self.watch.start()

    def _give_up(self, reason: str) -> None:
        self.said.append(reason)
        self.gave_up.set()

    def submit(self, what: str) -> End:
        end: Any = End()
        self.watch.submitted(end, what)
        return end  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "relax_captures", lambda: None)


@pytest.fixture
def patient() -> Iterator[Watched]:
    made = Watched(600.0)
    yield made
    made.watch.end()


def test_a_collective_past_the_deadline_is_given_up_by_name() -> None:
    watched = Watched(0.05)
    watched.submit("all-to-all-v")
    assert watched.gave_up.wait(30)
    assert watched.said == ["all-to-all-v did not end within 0.05 s"]


def test_what_ends_is_let_be_and_the_next_one_is_watched(patient: Watched) -> None:
    assert patient.watch.idle
    first = patient.submit("all-gather")
    assert not patient.watch.idle
    assert first.looked_at.wait(30)
    first.reached = True
    assert patient.watch.idle
    second = patient.submit("reduce-scatter")
    assert second.looked_at.wait(30)
    patient.lost = "the process of peer slot 1 has ended"
    assert patient.gave_up.wait(30)
    assert patient.said == ["reduce-scatter does not end: the process of peer slot 1 has ended"]


def test_a_lost_peer_breaks_nothing_while_nothing_is_under_way(patient: Watched) -> None:
    patient.lost = "peer slot 1 has closed the epoch"
    end = patient.submit("all-to-all-v")
    end.reached = True  # before the grace is over: the rows were on their way
    assert end.looked_at.wait(30)
    assert not patient.gave_up.wait(2 * module._GRACE_S)


def test_a_device_that_failed_is_given_up_at_once(patient: Watched) -> None:
    end = patient.submit("all-gather")
    end.fails = True
    assert not patient.watch.idle
    assert patient.gave_up.wait(30)
    assert patient.said == ["all-gather: the device failed: an illegal address"]
