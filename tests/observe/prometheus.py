"""A real Prometheus that scrapes this machine's Ray every two seconds, with the rules that the product exports."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml

from ray_moe.observe.dashboards.files import RULE_FILE, scrape
from ray_moe.observe.dashboards.rules import Limits, rules
from tests.tools import require_tool

# One series of an answer: its labels, and its (second, value) pairs without those that are not a number.
Series = tuple[dict[str, str], list[tuple[float, float]]]


class Prometheus:
    """What it knows, by its HTTP API."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=30, trust_env=False)
        self.began = time.time()

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **params: str) -> Any:
        """The `data` of an answer; fails with Prometheus's own words where it refuses."""
        answer = self._client.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def since(self, expr: str, began: float, ended: float | None = None) -> list[Series]:
        """An expression's value at every second between two times; series without any number are left out."""
        times = {"start": str(began), "end": str(ended or time.time()), "step": "1"}
        found = [
            _series(each["metric"], each["values"]) for each in self.get("query_range", query=expr, **times)["result"]
        ]
        return [each for each in found if each[1]]

    def most(self, expr: str, began: float, ended: float | None = None) -> float:
        """The largest value that an expression has had; 0 where it had none."""
        return max((value for _, pairs in self.since(expr, began, ended) for _, value in pairs), default=0.0)

    def alerts(self, cluster: str) -> dict[str, str]:
        """The alerts of a cluster that fire now: their summaries by name. Others may have lived on the same Ray."""
        found = [alert for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"]
        ours = [alert for alert in found if alert["labels"]["cluster"] == cluster]
        return {alert["labels"]["alertname"]: alert["annotations"]["summary"] for alert in ours}

    def fired(self, cluster: str, began: float, ended: float | None = None) -> set[str]:
        """Names of the alerts of a cluster that fired at some time."""
        firing = f'ALERTS{{alertstate="firing", cluster="{cluster}"}}'
        return {labels["alertname"] for labels, _ in self.since(firing, began, ended)}

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with how its last evaluation went."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def up(self) -> bool:
        """Whether it answers, and what it scrapes answers it."""
        try:
            if self._client.get("/-/ready").status_code != httpx.codes.OK:
                return False
            return any(target["health"] == "up" for target in self.get("targets")["activeTargets"])
        except httpx.TransportError:
            return False


@contextmanager
def prometheus(folder: Path, limits: Limits, port: int) -> Iterator[Prometheus]:
    """One on loopback while the block lasts; its data and its log lie in `folder`."""
    targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
    # What Ray's dashboard would write, and the product's own configuration but for its pace.
    (folder / "discovery.json").write_text(json.dumps([{"labels": {"job": "ray"}, "targets": targets}]))
    config = scrape()
    config["global"] = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    (found,) = job["file_sd_configs"]
    found["files"] = [str(folder / "discovery.json")]
    # Ray's own thousands of series take time that few busy cores do not have.
    job["metric_relabel_configs"] = [{"source_labels": ["__name__"], "regex": "ray_moe_.*", "action": "keep"}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / RULE_FILE).write_text(yaml.safe_dump(rules(limits)))
    command = [
        str(require_tool("prometheus")),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
    asked = Prometheus(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 30
        while not asked.up():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, f"no target within 30 s: {(folder / 'log').read_text()}"
            time.sleep(0.2)
        yield asked
    finally:
        asked.close()
        process.terminate()
        process.wait(20)


def _series(labels: dict[str, str], pairs: list[tuple[float, str]]) -> Series:
    numbers = [(second, float(value)) for second, value in pairs]
    return labels, [(second, value) for second, value in numbers if not math.isnan(value)]
