"""What a configuration may ask for beside numbers and names: replicas of experts, fixed shapes of decode units."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator

from ray_moe.errors import ConfigError
from ray_moe.manifest import Manifest, Natural, Positive, shown

_BUCKET = re.compile(r"(\d+)\s*x\s*(\d+)", re.ASCII)
_REPLICA = re.compile(r"(\*|-?\d+)\s*:\s*(-?\d+)\s*=\s*(-?\d+)", re.ASCII)


class ReplicaRequest(Manifest):
    """`count` copies in all (the first one included) of a logical expert, in one layer or in every MoE layer ("*")."""

    layer: Annotated[int | Literal["*"], BeforeValidator(lambda given: _layer_from(given))]
    expert: Natural
    count: Positive


def parse_replicas(text: str) -> tuple[ReplicaRequest, ...]:
    """Read "LAYER:EXPERT=COUNT,..."; LAYER may be "*" for every MoE layer. An empty text asks for nothing.

    >>> parse_replicas("0:3=2")
    (ReplicaRequest(layer=0, expert=3, count=2),)
    """
    requests = []
    for part in (part.strip() for part in text.split(",")) if text.strip() else ():
        match = _REPLICA.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"replicas: {part!r} is not LAYER:EXPERT=COUNT in whole numbers, for example 0:3=2 or *:3=2"
            )
        layer, expert, count = match.groups()
        values = {"layer": layer if layer == "*" else int(layer), "expert": int(expert), "count": int(count)}
        requests.append(ReplicaRequest.parse(values, f"replicas {part!r}"))
    return tuple(requests)


def expand_replicas(requests: Iterable[ReplicaRequest], layers: Iterable[int]) -> dict[tuple[int, int], int]:
    """Copies by (layer, expert), with "*" written out over `layers`; a layer named by number wins over "*".

    Raises `ConfigError` when two requests name the same layer and expert. Whether these exist is the solver's check.
    """
    asked: dict[tuple[int | str, int], int] = {}
    for request in requests:
        if (request.layer, request.expert) in asked:
            raise ConfigError(f"replicas: layer {request.layer} expert {request.expert} is asked for twice")
        asked[request.layer, request.expert] = request.count
    layers = tuple(layers)
    everywhere = {(layer, expert): count for (at, expert), count in asked.items() if at == "*" for layer in layers}
    return everywhere | {(at, expert): count for (at, expert), count in asked.items() if isinstance(at, int)}


class BucketRequest(Manifest):
    """One fixed-shape decode executable: token slots of a peer, and rows of a physical slot over all peers."""

    rank_tokens: Positive
    slot_rows: Positive


def parse_buckets(text: str) -> tuple[BucketRequest, ...]:
    """Read "RANK_TOKENSxSLOT_ROWS,..."; an empty text asks for none.

    >>> parse_buckets("4x8")
    (BucketRequest(rank_tokens=4, slot_rows=8),)
    """
    buckets = []
    for part in (part.strip() for part in text.split(",")) if text.strip() else ():
        match = _BUCKET.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"decode_buckets: {part!r} is not RANK_TOKENSxSLOT_ROWS in whole numbers, for example 4x8"
            )
        tokens, rows = map(int, match.groups())
        buckets.append(BucketRequest.parse({"rank_tokens": tokens, "slot_rows": rows}, f"decode_buckets {part!r}"))
    return tuple(buckets)


def _layer_from(given: object) -> object:
    if given == "*" or (type(given) is int and given >= 0):
        return given
    raise ValueError(f'found {shown(given)}, must be a layer index >= 0 or "*" for every MoE layer')
