"""PromQL over ray_moe's metrics as Ray's endpoint shows them.

Ray writes `ray_` before every name and `_total` behind a counter's, and labels each series with its worker.
The specification's eight metrics (`ray_moe.metrics`) have no label for the cluster; the controller alone exports them.
They find their cluster through the state that the same worker reports, and keep it for the window after that worker is
gone, so that what was counted last is not lost with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_moe.errors import ConfigError

# What Grafana puts in for a panel's queries: a window that always holds enough samples to make a rate of.
PANEL_WINDOW = "$__rate_interval"
THIS_CLUSTER = 'cluster="$cluster"'


def selector(name: str, *matchers: str) -> str:
    """A gauge's series."""
    return f"ray_{name}{{{', '.join(matchers)}}}" if matchers else f"ray_{name}"


def total(name: str, *matchers: str) -> str:
    """A counter's series."""
    return selector(f"{name}_total", *matchers)


def rate(name: str, *matchers: str, window: str = PANEL_WINDOW) -> str:
    """A counter's increase per second, by series."""
    return f"rate({total(name, *matchers)}[{window}])"


def summed(expression: str, *by: str) -> str:
    """The sum over all series that agree in `by`."""
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def latest(name: str, *by: str, matchers: Sequence[str] = (THIS_CLUSTER,)) -> str:
    """A gauge, one series per value of the labels `by`, however often the process that reports it was replaced."""
    return f"max by ({', '.join(by)}) ({selector(name, *matchers)})" if by else f"max({selector(name, *matchers)})"


def per_second(name: str, *by: str, matchers: Sequence[str] = (THIS_CLUSTER,), window: str = PANEL_WINDOW) -> str:
    """A counter's increase per second over the whole cluster, or by label."""
    return summed(rate(name, *matchers, window=window), *by)


def quantile(share: float, name: str, *by: str, window: str = PANEL_WINDOW) -> str:
    """A quantile of a histogram of this cluster, interpolated inside a bucket. Raises `ConfigError` outside [0, 1]."""
    buckets = f"rate({selector(f'{name}_bucket', THIS_CLUSTER)}[{window}])"
    return f"histogram_quantile({_checked(share)}, {summed(buckets, 'le', *by)})"


def quantile_of_all(share: float, name: str) -> str:
    """A quantile over everything that a histogram of this cluster has seen: for what happens so seldom that hardly any
    window has two of them. Raises `ConfigError` outside [0, 1]."""
    return f"histogram_quantile({_checked(share)}, {summed(selector(f'{name}_bucket', THIS_CLUSTER), 'le')})"


def _checked(share: float) -> float:
    if not 0 <= share <= 1:
        raise ConfigError(f"a quantile must be in [0, 1], found {share}")
    return share


def owner(*matchers: str, window: str = PANEL_WINDOW) -> str:
    """1 for each worker that is a controller, or was within the window, labelled with its cluster."""
    return f"group by (WorkerId, cluster) (last_over_time({selector('moe_cluster_state', *matchers)}[{window}]))"


def owned(expression: str, *matchers: str, window: str = PANEL_WINDOW) -> str:
    """Series of the eight, with the cluster's label."""
    return f"{expression} * on (WorkerId) group_left (cluster) {owner(*matchers, window=window)}"


@dataclass(frozen=True)
class Ratio:
    """One of the specification's ratios (0x0DB) by its counters: `part`, by the labels `by`, over the sum of `whole`
    less `without`, by the labels `over`."""

    part: str
    whole: tuple[str, ...]
    by: tuple[str, ...]
    over: tuple[str, ...] = ("cluster", "release", "phase")
    without: tuple[str, ...] = ()


_TYPE = ("cluster", "release", "phase")
RATIOS: Mapping[str, Ratio] = {
    "moe_route_drop_ratio": Ratio("moe_routes_dropped", ("moe_routes_attempted",), _TYPE),
    # Where counts never leave the devices the host does not know where a route went.
    "moe_remote_route_ratio": Ratio(
        "moe_routes_remote", ("moe_routes_accepted",), _TYPE, without=("moe_routes_windowed",)
    ),
    "moe_inter_node_route_ratio": Ratio(
        "moe_routes_inter_node", ("moe_routes_accepted_by_topology",), (*_TYPE, "topology"), (*_TYPE, "topology")
    ),
    # Of all units of the phase: the ratios of its graphs add up.
    "moe_graph_replay_ratio": Ratio(
        "moe_graph_replays", ("moe_graph_replays", "moe_graph_fallbacks"), (*_TYPE, "graph")
    ),
    "moe_fallback_step_ratio": Ratio("moe_fallback_steps", ("moe_steps",), (*_TYPE, "reason")),
}


def ratio(name: str, *matchers: str, window: str = PANEL_WINDOW) -> str:
    """One of `RATIOS` over what was counted within the window. While nothing is counted there is none."""
    asked = RATIOS[name]

    def gain(counter: str, by: Sequence[str]) -> str:
        return summed(owned(rate(counter, window=window), *matchers, window=window), *by)

    first, *more = (gain(counter, asked.over) for counter in asked.whole)
    whole = first
    for sign, terms in (("+", more), ("-", [gain(counter, asked.over) for counter in asked.without])):
        for term in terms:
            whole = f"{whole} {sign} ({term} or 0 * {first})"
    match = "" if asked.by == asked.over else f" on ({', '.join(asked.over)}) group_left ()"
    return f"{gain(asked.part, asked.by)} /{match} (({whole}) > 0)"


def gained(name: str, *matchers: str, window: str) -> str:
    """How much a counter gained within the window, by series, where it gained anything.

    A series that was born with its first count has no earlier sample to gain over: for one window it counts whole.
    """
    series = total(name, *matchers)
    return f"(increase({series}[{window}]) > 0 or ({series} > 0 unless {series} offset {window}))"


def faults(name: str, *matchers: str, window: str = "10m") -> str:
    """How much one of the specification's counters gained over the whole cluster within the window."""
    return summed(owned(gained(name, window=window), *matchers, window=window), "cluster")
