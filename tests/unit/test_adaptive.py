"""Transport and runner chosen unit by unit: every peer chooses alike, the cheapest wins, and the sums do not notice."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.join import transport_named
from ray_moe.dataplane.adaptive import (
    BETTER_BY,
    EXPLORE_EVERY,
    NOT_MEASURED,
    TRIALS,
    WARM_UPS,
    AdaptivePaths,
    Chooser,
    HostStopwatch,
    stopwatch_on,
)
from ray_moe.dataplane.layer import ExpertLayer, Invocation
from ray_moe.dataplane.runners import runner_named
from ray_moe.errors import ConfigError, RoutesError
from tests.layers import untimed
from tests.peers import Peers, peers
from tests.unit.test_layer import FP32, Case, layer_of, weights

__all__ = ["peers"]

DECODE = ("decode", 5)
CHOICES = ("all_to_all_v+grouped", "padded_all_to_all+masked_decode", "all_gather_filter+capacity_padded")


def run(chooser: Chooser, costs: list[int], units: int, kind: tuple = DECODE) -> list[int]:  # type: ignore[type-arg]
    """The choices for so many units in a row, where choice c costs `costs[c]`."""
    made = []
    for _ in range(units):
        choice = chooser.choose(kind)
        chooser.learn(kind, choice, costs[choice])
        made.append(choice)
    return made


def test_every_choice_is_tried_equally_often_before_the_cheapest_is_taken() -> None:
    tries = WARM_UPS + TRIALS
    made = run(Chooser(3), [9, 5, 7], 3 * tries + 10)
    assert sorted(made[: 3 * tries]) == [0] * tries + [1] * tries + [2] * tries
    assert set(made[3 * tries :]) == {1}


def test_what_a_warm_up_took_does_not_count() -> None:
    chooser = Chooser(2)
    seen = [0, 0]
    for _ in range(20):
        choice = chooser.choose(DECODE)
        seen[choice] += 1
        slow_start = choice == 1 and seen[1] <= WARM_UPS
        chooser.learn(DECODE, choice, 10_000 if slow_start else [9, 5][choice])
    assert chooser.choose(DECODE) == 1


def test_kinds_of_units_are_judged_apart() -> None:
    chooser = Chooser(2)
    assert run(chooser, [9, 5], 20)[-1] == 1
    assert run(chooser, [5, 9], 20, ("prefill", 9))[-1] == 0
    assert chooser.choose(DECODE) == 1


def test_a_choice_that_has_become_cheaper_is_found_by_trying_it_now_and_then() -> None:
    chooser = Chooser(2)
    assert run(chooser, [9, 5], 30)[-1] == 1
    made = run(chooser, [1, 5], 12 * EXPLORE_EVERY)
    assert made.count(0) > 0 and made[-1] == 0


def test_a_choice_that_is_hardly_cheaper_does_not_take_over() -> None:
    chooser = Chooser(2)
    assert run(chooser, [100, 120], 40)[-1] == 0
    nearly = round(100 * (1 - BETTER_BY / 2))
    made = run(chooser, [100, nearly], 12 * EXPLORE_EVERY)
    assert made.count(1) <= 12, "only tried"


@untimed
@given(st.data())
def test_peers_that_see_the_same_units_and_times_choose_the_same(data: st.DataObject) -> None:
    ours, theirs = Chooser(3), Chooser(3)
    for _ in range(data.draw(st.integers(1, 200))):
        kind = (data.draw(st.sampled_from(["prefill", "decode"])), data.draw(st.integers(0, 3)))
        choice = ours.choose(kind)  # type: ignore[arg-type]
        assert theirs.choose(kind) == choice  # type: ignore[arg-type]
        if data.draw(st.booleans()):
            micros = data.draw(st.integers(0, 10_000))
            ours.learn(kind, choice, micros)  # type: ignore[arg-type]
            theirs.learn(kind, choice, micros)  # type: ignore[arg-type]


def test_without_a_choice_there_is_nothing_to_choose() -> None:
    with pytest.raises(ConfigError, match="at least 1, found 0"):
        Chooser(0)


# -- Over real peers


def adaptive_layer(group: ExpertGroup) -> ExpertLayer:
    layer = layer_of(group)
    paths = []
    for choice in CHOICES:
        transport, runner = choice.split("+")
        paths.append(
            dataclasses.replace(layer.path, transport=transport_named(transport, group), runner=runner_named(runner))
        )
    layer.adaptive = AdaptivePaths(CHOICES, tuple(paths), Chooser(len(CHOICES)))
    return layer


def serve_units(group: ExpertGroup, units: int) -> tuple[dict[str, int], float, list[int]]:
    """Choices made, the largest difference to the dense oracle, and the times that came with the counts."""
    layer, worst, times = adaptive_layer(group), 0.0, []
    learn = layer.adaptive.chooser.learn  # type: ignore[union-attr]
    layer.adaptive.chooser.learn = lambda kind, choice, micros: (times.append(micros), learn(kind, choice, micros))  # type: ignore
    for step in range(units):
        hidden_TD, routes = Case((5, 3, 7, 4)[: len(group.spec)]).of(group.peer_slot)
        out_TD: Tensor = layer.forward(hidden_TD, routes, Invocation(step, "decode"))
        expected = weights().dense(hidden_TD, routes)
        torch.testing.assert_close(out_TD, expected, **FP32)
        worst = max(worst, float((out_TD - expected).abs().max()))
    return dict(layer.counters.choices), worst, times


def test_all_peers_take_every_path_alike_and_the_sums_are_the_oracles(peers: Peers) -> None:
    units = 3 * (WARM_UPS + TRIALS) + 8
    results = peers.run(serve_units, units, ranks=(2, 0, 1))
    choices, _, times = results[0]
    assert sum(choices.values()) == units and len(choices) == len(CHOICES)
    assert len(times) == units - 1 and NOT_MEASURED not in times
    for other in results[1:]:
        assert (other[0], other[2]) == (choices, times), "the same times reach every peer, so they choose alike"


def refuse_once(group: ExpertGroup) -> tuple[str, int]:
    """One peer cannot plan its second unit: all refuse it, and go on choosing alike."""
    layer = adaptive_layer(group)
    failure = ""
    for step in range(6):
        hidden_TD, routes = Case((5, 3, 7)[: len(group.spec)]).of(group.peer_slot)
        if step == 1 and group.peer_slot == 1:
            hidden_TD = hidden_TD[:, :-1]
        try:
            layer.forward(hidden_TD, routes, Invocation(step, "decode"))
        except Exception as error:  # noqa: BLE001 - reported to the test
            failure = type(error).__name__
    return failure, sum(layer.counters.choices.values())


def test_a_unit_that_a_peer_refuses_is_refused_by_all_and_the_next_one_runs(peers: Peers) -> None:
    results = peers.run(refuse_once, ranks=(2, 0, 1))
    assert [failure for failure, _ in results] == ["CountMismatchError", RoutesError.__name__, "CountMismatchError"]
    assert {made for _, made in results} == {5}


@dataclasses.dataclass
class LateWatch:
    """A device that is not there yet whenever the layer runs again, on one peer, for its first units."""

    late: int
    stops: int = 0

    def start(self) -> None: ...

    def stop(self) -> None:
        self.stops += 1

    def micros(self) -> int | None:
        return None if self.stops <= self.late else 100 + self.stops


def serve_with_a_late_device(group: ExpertGroup, units: int, late: int) -> tuple[list[int], int]:
    layer, times = adaptive_layer(group), []
    assert layer.adaptive is not None
    layer.adaptive.watch = LateWatch(late if group.peer_slot == 1 else 0)
    learn = layer.adaptive.chooser.learn
    layer.adaptive.chooser.learn = lambda kind, choice, micros: (times.append(micros), learn(kind, choice, micros))  # type: ignore
    for step in range(units):
        hidden_TD, routes = Case((5, 3, 7)[: len(group.spec)]).of(group.peer_slot)
        layer.forward(hidden_TD, routes, Invocation(step, "decode"))
    return times, sum(layer.counters.choices.values())


def test_a_time_that_one_device_does_not_know_yet_is_learnt_by_nobody(peers: Peers) -> None:
    results = peers.run(serve_with_a_late_device, 8, 3, ranks=(2, 0, 1))
    assert results == [([104, 105, 106, 107], 8)] * 3


def test_a_watch_forgets_what_was_not_stopped() -> None:
    watch = HostStopwatch()
    assert watch.micros() is None
    watch.start()
    assert watch.micros() is None
    watch.stop()
    first = watch.micros()
    assert first is not None and first >= 0
    assert watch.micros() == first
    watch.start()
    assert watch.micros() is None
    assert isinstance(stopwatch_on(torch.device("cpu")), HostStopwatch)
