"""A cluster and its HTTP API from a Serve configuration: up, redeployed under a stream, healed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.job_server import BIN, ROOT, Shell, experts, shell, until

__all__ = ["shell"]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.full]

KEY = "sixteen-characters-at-least"


@pytest.fixture
def service(tmp_path: Path) -> dict[str, Any]:
    """cluster_configs/serve/service.yaml for this machine: a port and a file of keys of its own, and one replica."""
    configured: dict[str, Any] = yaml.safe_load((ROOT / "cluster_configs" / "serve" / "service.yaml").read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        configured["http_options"] = {"host": "127.0.0.1", "port": probe.getsockname()[1]}
    configured["proxy_location"] = "HeadOnly"
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    cluster, api = configured["applications"]
    cluster["args"] |= {"peers": 2, "spare_slots": 0}
    api["args"] |= {"api_keys_file": str(keys), "admin_tokens_file": str(keys)}
    return configured


def deploy(shell: Shell, folder: Path, configured: dict[str, Any]) -> None:
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(configured))
    subprocess.run([BIN / "serve", "deploy", str(file)], env=shell.environment, check=True, timeout=120)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=20, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def model_of(url: str) -> str | None:
    try:
        answer = httpx.get(f"{url}/v1/models", headers=BEARER, timeout=20, trust_env=False)
    except httpx.HTTPError:
        return None
    return str(answer.json()["data"][0]["id"]) if answer.status_code == 200 else None


BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.mark.timeout(900)
def test_a_service_comes_up_redeploys_under_a_stream_and_comes_back_after_an_expert_dies(
    shell: Shell, tmp_path: Path, service: dict[str, Any]
) -> None:
    url = f"http://127.0.0.1:{service['http_options']['port']}"
    deploy(shell, tmp_path, service)
    until(lambda: is_ready(url), 300)
    assert httpx.get(f"{url}/v1/models", timeout=20, trust_env=False).status_code == 401
    assert model_of(url) == "tiny-moe"

    body = {"model": "tiny-moe", "prompt": "To be", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    events: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=BEARER, timeout=300, trust_env=False
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(timeout=60)
    service["applications"][1]["args"]["model_name"] = "tiny-two"
    deploy(shell, tmp_path, service)
    reader.join(timeout=300)
    assert not reader.is_alive()
    *chunks, done = events
    assert done == "[DONE]"
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length", (
        "the replica that left finished its stream"
    )
    until(lambda: model_of(url) == "tiny-two", 300)

    before = {process.pid for process in experts(shell)}
    assert len(before) == 2
    experts(shell)[0].send_signal(signal.SIGKILL)
    until(lambda: not is_ready(url), 120)
    until(lambda: is_ready(url), 300)
    after = {process.pid for process in experts(shell)}
    assert len(after) == 2
    assert not before & after, "the keeper started the whole cluster again"
    subprocess.run([BIN / "serve", "shutdown", "-y"], env=shell.environment, check=True, timeout=120)
