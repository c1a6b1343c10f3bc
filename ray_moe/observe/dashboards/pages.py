"""The four dashboards, in the order in which one looks at them, linked to one another."""

from __future__ import annotations

from ray_moe.observe.dashboards.elasticity import ELASTICITY
from ray_moe.observe.dashboards.experts import EXPERTS
from ray_moe.observe.dashboards.latency import LATENCY
from ray_moe.observe.dashboards.model import Dashboard, Json
from ray_moe.observe.dashboards.overview import OVERVIEW

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, EXPERTS, ELASTICITY, LATENCY)

# Grafana finds the others by their tag, wherever they were put.
_LINKS: tuple[Json, ...] = (
    {
        "title": "ray_moe",
        "type": "dashboards",
        "tags": ["ray_moe"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    },
)


def documents() -> list[Json]:
    """Every dashboard as Grafana's JSON."""
    return [dashboard.to_json(_LINKS) for dashboard in DASHBOARDS]
