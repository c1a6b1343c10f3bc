"""Inside a cluster: whole generations (`Client`), bare expert layers (`Experts`), and both without asyncio (`connect`).

Callers are trusted: tensors travel through Ray's object store. From outside there is `ray_moe.http_client`.
"""

from ray_moe.sdk.client import Client, Generation
from ray_moe.sdk.connection import ClusterClient, connect
from ray_moe.sdk.experts import Experts, ExpertsCall

__all__ = ["Client", "ClusterClient", "Experts", "ExpertsCall", "Generation", "connect"]
