"""A cluster whose peer is a GPU, behind HTTP: Ray's actors, the device of each, graphs, a new generation under load."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from json import dumps, loads
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed here: see `make gpu-bundle`")

from ray_moe import cluster  # noqa: E402
from ray_moe.config import ClusterConfig  # noqa: E402
from ray_moe.models import tiny_moe_path  # noqa: E402
from ray_moe.serve import app  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPT = "To be, or not to be"


@dataclass(frozen=True)
class Server:
    url: str
    cluster: cluster.Cluster

    def complete(self, **body: Any) -> str:
        """One completion's text."""
        wanted = {"model": "tiny-moe", "prompt": PROMPT, "temperature": 0, "max_tokens": 32, **body}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", dumps(wanted).encode(), {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            return str(loads(response.read())["choices"][0]["text"])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    ray.init(
        address="local", namespace="ray_moe", num_cpus=4, object_store_memory=200 * 1024**2, include_dashboard=False,
        log_to_driver=False,
    )  # fmt: skip
    try:
        config = ClusterConfig(
            name="gpu", model=str(tiny_moe_path()), peers=1, device="cuda", dtype="bfloat16", kv_blocks=256,
            max_decode_rows=16, audit_rate=0.0,
        )  # fmt: skip
        running = cluster.start(config)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            app.run("gpu", host="127.0.0.1", port=port, seconds=120)
            try:
                yield Server(f"http://127.0.0.1:{port}", running)
            finally:
                app.shutdown()
        finally:
            running.stop()
    finally:
        ray.shutdown()


def test_the_http_endpoint_answers_from_graphs(server: Server) -> None:
    first = server.complete()
    assert first.strip() and server.complete() == first
    (peer,) = server.cluster.status().peers
    assert peer.tokens_emitted >= 64 and peer.replays > 0


def test_streams_at_once_all_end(server: Server) -> None:
    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(lambda seed: server.complete(temperature=0.8, seed=seed), range(12)))
    assert all(texts) and len(set(texts)) > 6
    (peer,) = server.cluster.status().peers
    assert peer.kv_blocks_used == 0
