"""A peer's GPU comes first among those in sight, so that one name means it on every thread."""

from __future__ import annotations

import pytest

from ray_moe.actors.device import own_first, step_options
from ray_moe.config import ClusterConfig
from ray_moe.errors import ConfigError


def test_the_given_gpu_comes_first_and_the_others_stay_in_sight() -> None:
    assert own_first(["2"], ["0", "1", "2"]) == ["2", "0", "1"]
    assert own_first(["0"], ["0", "1"]) == ["0", "1"]
    assert own_first(["7"], ["4", "7"]) == ["7", "4"]


@pytest.mark.parametrize("given", [[], ["3"], ["0", "1"]])
def test_a_peer_without_exactly_one_gpu_in_sight_is_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"a peer takes one GPU of \['0', '1'\], Ray has given it"):
        own_first(given, ["0", "1"])


def test_a_gpu_steps_ahead_in_graphs_up_to_the_engines_cap_and_a_cpu_does_not() -> None:
    assert step_options(ClusterConfig(model="tiny-moe", peers=1)) == {}
    options = step_options(ClusterConfig(model="tiny-moe", peers=1, device="cuda", max_decode_rows=20))
    assert options == {"graph_sizes": (1, 2, 4, 8, 16, 20), "look_ahead": True}
