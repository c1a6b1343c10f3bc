"""One cluster of two peers, and Ray Serve before it, for all tests over HTTP; the last of them, by name, ends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ray_moe import cluster
from ray_moe.config import ClusterConfig
from ray_moe.models import tiny_moe_path
from ray_moe.serve import app
from tests.cluster.http.server import NAME, Server, free_port


@pytest.fixture(scope="package")
def server(local_ray: None) -> Iterator[Server]:
    running = cluster.start(ClusterConfig(name=NAME, model=str(tiny_moe_path()), peers=2, kv_blocks=256))
    port = free_port()
    try:
        app.run(NAME, host="127.0.0.1", port=port, seconds=120)
        try:
            yield Server(f"http://127.0.0.1:{port}", running)
        finally:
            app.shutdown()
    finally:
        running.stop()
