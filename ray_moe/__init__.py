"""ray_moe: a Ray-based elastic expert-serving cluster for Mixture-of-Experts models."""

from typing import Any

__version__ = "0.1.0"

_OVER_HTTP = ("MoEClient", "AsyncMoEClient")
_IN_A_CLUSTER = ("connect", "ClusterClient", "Client")
_IN_TRANSFORMERS = ("register", "unregister", "load_trunk")


def __getattr__(name: str) -> Any:
    """What people import from here, loaded when it is asked for: the HTTP clients need neither Ray nor torch."""
    if name in _OVER_HTTP:
        from ray_moe import http_client

        return getattr(http_client, name)
    if name in _IN_A_CLUSTER:
        from ray_moe import sdk

        return getattr(sdk, name)
    if name in _IN_TRANSFORMERS:
        from ray_moe import plugin

        return getattr(plugin, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_OVER_HTTP, *_IN_A_CLUSTER, *_IN_TRANSFORMERS]
