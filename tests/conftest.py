"""What every test may rely on: no network, one thread per process, one local Ray, and one copy of each tiny model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before any import that reads them. Ray's workers inherit them from this process.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray reads it in this case; as in the Rays that we start
os.environ["RAY_AUTH_MODE"] = (
    "disabled"  # otherwise Ray writes a token into the home directory of whoever runs the tests
)

import pytest
import torch

# Several actors share few cores, and results must not depend on how many there are.
torch.set_num_threads(1)

RAY_NAMESPACE = "ray_moe"


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One Ray on this machine for the whole session, started by the first test that asks for it.

    Four logical CPUs, whatever the machine has; 200 MiB of object store; no dashboard; metrics reported every second.
    `address="local"` keeps the tests out of a cluster that already runs here.
    """
    import ray

    ray.init(
        address="local",
        namespace=RAY_NAMESPACE,
        num_cpus=4,
        object_store_memory=200 * 1024**2,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a model family's name to the directory of its tiny random checkpoint, built once per session.

    The directories are shared: a test that damages a checkpoint copies it first.
    """
    built: dict[tuple[str, bool, int, int], Path] = {}

    def directory_of(name: str, *, packed: bool = False, seed: int = 0, vocab_size: int = 320) -> Path:
        from tests.families import build_family  # imports transformers: seconds that most tests need not spend

        key = (name, packed, seed, vocab_size)
        if key not in built:
            directory = tmp_path_factory.mktemp(name)
            built[key] = build_family(name, directory, packed=packed, seed=seed, vocab_size=vocab_size)
        return built[key]

    return directory_of
