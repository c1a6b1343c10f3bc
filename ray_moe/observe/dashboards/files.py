"""What Grafana and Prometheus read from a folder: dashboards, Grafana's provisioning, the rule file, a scrape file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ray_moe.observe.dashboards.pages import documents
from ray_moe.observe.dashboards.rules import Limits, rules

DATA_SOURCE_UID = "ray-moe-prometheus"
# Where Ray's dashboard keeps the addresses of all its nodes' endpoints, on the head.
DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"
RULE_FILE = "ray-moe.rules.yml"


def export_document(limits: Limits, prometheus_url: str, endpoints: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that `export_files` writes, as one document."""
    return {
        "dashboards": documents(),
        "rules": rules(limits),
        "datasources": data_sources(prometheus_url),
        "scrape": scrape(endpoints),
    }


def export_files(
    folder: Path, limits: Limits, prometheus_url: str, dashboards_path: str, endpoints: Sequence[str] = ()
) -> list[Path]:
    """Write the files, and say which. `dashboards_path` is where Grafana will find the folder's `dashboards`,
    `endpoints` is as in `scrape`.

    Raises `OSError` where the folder cannot be written.
    """
    files: dict[str, str] = {
        f"dashboards/{document['uid']}.json": json.dumps(document, indent=2) + "\n" for document in documents()
    }
    files["grafana/provisioning/dashboards/ray-moe.yaml"] = _yaml(providers(dashboards_path))
    files["grafana/provisioning/datasources/ray-moe.yaml"] = _yaml(data_sources(prometheus_url))
    files[f"prometheus/{RULE_FILE}"] = _yaml(rules(limits))
    files["prometheus/prometheus.yml"] = _yaml(scrape(endpoints))
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def providers(dashboards_path: str) -> dict[str, Any]:
    """Grafana's provider: dashboards from a folder, in a folder of their own."""
    provider = {
        "name": "ray_moe",
        "orgId": 1,
        "folder": "ray_moe",
        "folderUid": "ray-moe",
        "type": "file",
        "disableDeletion": False,
        "updateIntervalSeconds": 30,
        "allowUiUpdates": False,
        "options": {"path": dashboards_path, "foldersFromFilesStructure": False},
    }
    return {"apiVersion": 1, "providers": [provider]}


def data_sources(prometheus_url: str) -> dict[str, Any]:
    """Grafana's data source. Its interval is the scrape's, of which `$__rate_interval` is four."""
    source = {
        "name": "ray_moe Prometheus",
        "uid": DATA_SOURCE_UID,
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "jsonData": {"httpMethod": "POST", "timeInterval": "15s"},
    }
    return {"apiVersion": 1, "datasources": [source]}


def scrape(endpoints: Sequence[str] = ()) -> dict[str, Any]:
    """A Prometheus configuration that scrapes these endpoints (HOST:PORT) and evaluates the rules; by default every
    node of the Ray on this machine, as its dashboard, if it runs, knows them."""
    found = (
        {"static_configs": [{"targets": list(endpoints)}]}
        if endpoints
        else {"file_sd_configs": [{"files": [DISCOVERY]}]}
    )
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [RULE_FILE],
        "scrape_configs": [{"job_name": "ray", **found}],
    }


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(document), sort_keys=False, width=1_000_000)
