"""Dashboards' and alerts' queries as a Prometheus without Grafana takes them, and the names that occur in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ray_moe.observe.dashboards.model import CHANGES
from ray_moe.observe.dashboards.pages import DASHBOARDS

_SERIES = re.compile(r"\bray_(moe_\w+)(?:\{([^}]*)\})?")


@dataclass(frozen=True)
class Asked:
    """One query and where it is: dashboard, panel, number in the panel."""

    dashboard: str
    panel: str
    number: int
    expr: str

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel} / {self.number}"


def panel_queries() -> Iterator[Asked]:
    """Every query of every dashboard, of its variables and its annotation too, with Grafana's variables in them."""
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels():
            for number, query in enumerate(panel.queries):
                yield Asked(dashboard.uid, panel.title, number, query.expr)
        for variable in dashboard.variables:
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.query)
            assert found is not None, variable.query
            yield Asked(dashboard.uid, f"variable {variable.name}", 0, f"count by ({found[2]}) ({found[1]})")
        yield Asked(dashboard.uid, "annotation", 0, CHANGES)


def substituted(expr: str, cluster: str, *, window: str = "5m", range_: str = "1h") -> str:
    """As Grafana would send it with this cluster chosen, and all of everything else."""
    values = {"$__rate_interval": window, "$__range": range_, "$cluster": cluster, "$rank": ".*", "$layer": ".*"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def series_in(expr: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """(name without `ray_`, matched labels) of every series that a query asks for."""
    for name, matchers in _SERIES.findall(expr):
        yield name, dict(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"([^\"]*)\"", matchers))
