"""Dashboards as values, and the JSON that Grafana's own model has for them.

The JSON is of schema 39, which came with Grafana 10.4; later ones bring it up to theirs by themselves. A row's panels
flow from left to right and wrap at 24 columns, so that positions are never written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA = 39
COLUMNS = 24
# Every panel asks the data source that the viewer has chosen at the top of the dashboard.
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


class Shape(StrEnum):
    """How a panel draws; the values are the names of Grafana's panel plugins, all of which come with it."""

    LINES = "timeseries"
    NUMBER = "stat"
    BARS = "bargauge"
    STATES = "state-timeline"
    TABLE = "table"


@dataclass(frozen=True)
class Query:
    """PromQL and what its series are called: `{{rank}}` stands for a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """`unit` is Grafana's name for one. `steps` are (from this value on, colour); the first colour holds below them.

    `names` are texts for values. `stacked` lines add up; `instant` panels show the last value alone.
    """

    title: str
    queries: tuple[Query, ...]
    description: str
    unit: str = "short"
    shape: Shape = Shape.LINES
    width: int = 8
    height: int = 8
    least: float | None = 0
    most: float | None = None
    decimals: int | None = None
    stacked: bool = False
    steps: tuple[tuple[float, str], ...] = ()
    below: str = "green"
    names: Mapping[str, str] = field(default_factory=dict)
    by_name: bool = False

    @property
    def instant(self) -> bool:
        """Whether only the last value is asked for."""
        return self.shape in (Shape.BARS, Shape.TABLE)

    def to_json(self, number: int, x: int, y: int) -> Json:
        """The panel at a place of the grid."""
        return {
            "id": number,
            "type": str(self.shape),
            "title": self.title,
            "description": self.description,
            "datasource": dict(SOURCE),
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [self._target(at, query) for at, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._field_defaults(), "overrides": []},
            "options": self._options(),
            **({"transformations": [self._one_table()]} if self.shape is Shape.TABLE else {}),
        }

    def _target(self, at: int, query: Query) -> Json:
        return {
            "refId": chr(ord("A") + at),
            "datasource": dict(SOURCE),
            "editorMode": "code",
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "instant": self.instant,
            "range": not self.instant,
            **({"format": "table"} if self.shape is Shape.TABLE else {}),
        }

    def _field_defaults(self) -> Json:
        steps: list[Json] = [{"color": self.below if self.steps else "green", "value": None}]
        steps += [{"color": colour, "value": value} for value, colour in self.steps]
        defaults: Json = {
            "unit": self.unit,
            "noValue": "no data",
            "color": {"mode": "thresholds" if self.steps and self.shape is not Shape.LINES else "palette-classic"},
            "thresholds": {"mode": "absolute", "steps": steps},
            "mappings": [self._mapping()] if self.names else [],
        }
        for name, value in (("min", self.least), ("max", self.most), ("decimals", self.decimals)):
            if value is not None:
                defaults[name] = value
        if self.shape is Shape.LINES:
            defaults["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 30 if self.stacked else 8,
                "showPoints": "auto",
                "spanNulls": False,
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "line" if self.steps else "off"},
            }
        elif self.shape is Shape.STATES:
            defaults["custom"] = {"fillOpacity": 70, "lineWidth": 0}
        return defaults

    def _mapping(self) -> Json:
        texts = {value: {"index": at, "text": text} for at, (value, text) in enumerate(self.names.items())}
        return {"type": "value", "options": texts}

    def _options(self) -> Json:
        last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        match self.shape:
            case Shape.LINES:
                legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
                return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
            case Shape.NUMBER:
                return {
                    "reduceOptions": last,
                    "orientation": "auto",
                    "textMode": "name" if self.by_name else "auto",
                    "colorMode": "background" if self.steps else "value",
                    "graphMode": "none" if self.by_name else "area",
                    "justifyMode": "auto",
                }
            case Shape.BARS:
                return {
                    "reduceOptions": last,
                    "orientation": "horizontal",
                    "displayMode": "basic",
                    "showUnfilled": True,
                }
            case Shape.STATES:
                legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
                return {
                    "mergeValues": True,
                    "showValue": "auto",
                    "alignValue": "left",
                    "rowHeight": 0.9,
                    "legend": legend,
                    "tooltip": {"mode": "single", "sort": "none"},
                }
            case Shape.TABLE:
                return {"showHeader": True, "cellHeight": "sm"}

    @staticmethod
    def _one_table() -> Json:
        hidden = ("Time", "__name__", "cluster")
        return {"id": "organize", "options": {"excludeByName": dict.fromkeys(hidden, True), "renameByName": {}}}


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the top of the dashboard: the values of a label. `several` lets one take some or all of them."""

    name: str
    label: str
    query: str
    several: bool = False

    def to_json(self) -> Json:
        return {
            "type": "query",
            "name": self.name,
            "label": self.label,
            "datasource": dict(SOURCE),
            "query": {"qryType": 1, "query": self.query, "refId": f"{self.name}-values"},
            "refresh": 2,  # whenever the time range changes: clusters and ranks come and go
            "sort": 3,
            "multi": self.several,
            "includeAll": self.several,
            **({"allValue": ".*"} if self.several else {}),
            "hide": 0,
            "regex": "",
            "skipUrlSync": False,
            "options": [],
            "current": {"text": "All", "value": "$__all"} if self.several else {},
        }


CLUSTER = Variable("cluster", "Cluster", "label_values(ray_moe_cluster_state, cluster)")
RANK = Variable("rank", "Rank", 'label_values(ray_moe_generation{cluster="$cluster"}, rank)', several=True)


@dataclass(frozen=True)
class Dashboard:
    """One page. `uid` is what makes a second push replace it; `subject` is what its title says after "ray_moe"."""

    uid: str
    subject: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = (CLUSTER,)

    @property
    def title(self) -> str:
        return f"ray_moe: {self.subject}"

    def panels(self) -> Iterator[Panel]:
        """Every panel, from the top."""
        for row in self.rows:
            yield from row.panels

    def to_json(self, links: Sequence[Json] = ()) -> Json:
        """What Grafana's API and its provisioning take."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["ray_moe"],
            "schemaVersion": SCHEMA,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [self._source_variable(), *(each.to_json() for each in self.variables)]},
            "annotations": {"list": [_changes()]},
            "links": [*links],
            "panels": self._placed(),
        }

    def _placed(self) -> list[Json]:
        placed: list[Json] = []
        y = 0
        for row in self.rows:
            heading = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
            placed.append(
                {"id": len(placed) + 1, "type": "row", "title": row.title, "collapsed": False, "gridPos": heading}
                | {"panels": []}
            )
            x, y, tallest = 0, y + 1, 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y, tallest = 0, y + tallest, 0
                placed.append(panel.to_json(len(placed) + 1, x, y))
                x, tallest = x + panel.width, max(tallest, panel.height)
            y += tallest
        return placed

    @staticmethod
    def _source_variable() -> Json:
        return {
            "type": "datasource",
            "name": "datasource",
            "label": "Prometheus",
            "query": "prometheus",
            "refresh": 1,
            "hide": 0,
            "regex": "",
            "multi": False,
            "includeAll": False,
            "options": [],
            "current": {},
        }


# A mark across all panels wherever a new placement generation began to serve.
CHANGES = 'changes(max by (cluster) (ray_moe_generation{cluster="$cluster"})[1m:10s]) > 0'


def _changes() -> Json:
    return {
        "name": "Placement changes",
        "enable": True,
        "iconColor": "purple",
        "datasource": dict(SOURCE),
        "expr": CHANGES,
        "titleFormat": "a new placement generation serves",
        "step": "60s",
    }
