"""The admin routes: a cluster's verbs over HTTP, for whoever holds the admin token.

Changes answer 202 with the number of an operation, which `/admin/operations/{number}` follows. All calls go to the
cluster's controller, beside the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter

from ray_moe.asked import ReplicaRequest, expand_replicas
from ray_moe.cluster import Cluster
from ray_moe.controlplane.operation_row import OperationRow
from ray_moe.controlplane.rollout import Rollout
from ray_moe.deadline import wait_for
from ray_moe.errors import ConfigError
from ray_moe.manifest import AsTuple, Manifest, Natural, Positive
from ray_moe.serve.openapi import failures
from ray_moe.serve.replies import Document

_T = TypeVar("_T")
_CALL_S = 70.0  # the cluster's own calls give up before
_WHY = "asked for over HTTP"


class ScaleBody(Manifest):
    """How many peers there shall be."""

    peers: Positive
    why: str = _WHY


class DrainBody(Manifest):
    """Ranks that shall leave."""

    ranks: AsTuple[Natural]
    why: str = _WHY


class Home(Manifest):
    """Where one copy of an expert shall live."""

    layer: Natural
    expert: Natural
    rank: Natural


class RebalanceBody(Manifest):
    """Copies in all of some experts, or every copy's home in some layers; with neither, what suits the demand."""

    replicas: AsTuple[ReplicaRequest] | None = None
    homes: AsTuple[Home] | None = None
    why: str = _WHY


class CancelBody(Manifest):
    """Why an operation is not wanted any more."""

    why: str = _WHY


class ReleaseBody(Manifest):
    """The release that is meant; by default the latest candidate."""

    release_id: str = ""
    why: str = _WHY


def admin_routes(find: Callable[[], Cluster]) -> APIRouter:
    """Routes below /admin over the cluster that `find` gives, whose errors are theirs too."""
    router = APIRouter(prefix="/admin", tags=["admin"], responses=failures(400, 401, 403, 409, 413, 415, 503, 504))

    async def ask(question: Callable[[Cluster], _T]) -> _T:
        return await wait_for(asyncio.to_thread(lambda: question(find())), _CALL_S, "asking the cluster")

    async def row_of(number: int) -> Document:
        return asdict(OperationRow.of(await ask(lambda cluster: cluster.operation(number))))

    @router.get("/status")
    async def status() -> Document:
        """Peers, slots, generations, operations."""
        return asdict(await ask(Cluster.status))

    @router.get("/placement")
    async def placement() -> Document:
        """Which expert is where, under the active generation."""
        active, found = await ask(lambda cluster: (cluster.placement(), cluster.status()))
        return {
            "generation": active.generation,
            "version": active.version.value,
            "release_id": active.release_id,
            "checkpoint": active.checkpoint_version.value,
            "epoch": active.group.epoch,
            "ranks": [rank.value for rank in active.group.peers],
            "slots": [asdict(slot) for slot in found.slots],
        }

    @router.get("/operations")
    async def operations() -> Document:
        """Operations that are open, and those that have ended."""
        return {"operations": [asdict(OperationRow.of(each)) for each in await ask(Cluster.history)]}

    @router.get("/operations/{number}", responses=failures(404))
    async def operation(number: int) -> Document:
        """How far an operation is."""
        return await row_of(number)

    @router.post("/operations/{number}/cancel", status_code=HTTPStatus.ACCEPTED, responses=failures(404))
    async def cancel(number: int, body: CancelBody) -> Document:
        """Undo an operation that has published nothing."""
        await ask(lambda cluster: cluster.cancel(number, why=body.why))
        return await row_of(number)

    @router.post("/scale", status_code=HTTPStatus.ACCEPTED)
    async def scale(body: ScaleBody) -> Document:
        """Grow or shrink; `operation` is null where that is what there is, or will be."""
        return {"operation": await ask(lambda cluster: cluster.scale(body.peers, why=body.why))}

    @router.post("/drain", status_code=HTTPStatus.ACCEPTED)
    async def drain(body: DrainBody) -> Document:
        """Let ranks leave; their experts and requests go to others first."""
        return {"operation": await ask(lambda cluster: cluster.drain(*body.ranks, why=body.why))}

    @router.post("/rebalance", status_code=HTTPStatus.ACCEPTED)
    async def rebalance(body: RebalanceBody) -> Document:
        """Another placement over the same ranks."""
        return {"operation": await ask(lambda cluster: cluster.rebalance(**_target(cluster, body), why=body.why))}

    @router.post("/preview")
    async def preview(body: RebalanceBody) -> Document:
        """What the same rebalance would take. Nothing changes."""
        return asdict(await ask(lambda cluster: cluster.preview(**_target(cluster, body))))

    @router.get("/releases")
    async def releases() -> Document:
        """Every release, the log of what was done with them, and rollouts."""
        found = await ask(Cluster.releases)
        return {
            "releases": [asdict(release) for release in found.releases],
            "log": [asdict(record) for record in found.log],
            "rollouts": [_rollout(each) for each in found.rollouts],
        }

    @router.post("/releases/promote", status_code=HTTPStatus.ACCEPTED)
    async def promote(body: ReleaseBody) -> Document:
        """Promote the canary."""
        return _rollout(await ask(lambda cluster: cluster.release_promote(body.release_id)))

    @router.post("/releases/rollback", status_code=HTTPStatus.ACCEPTED)
    async def rollback(body: ReleaseBody) -> Document:
        """Take the candidate out again."""
        return _rollout(await ask(lambda cluster: cluster.release_rollback(body.release_id, why=body.why)))

    return router


def _target(cluster: Cluster, body: RebalanceBody) -> Mapping[str, Any]:
    """Arguments of `rebalance` and `preview`. Raises `ConfigError` for what the cluster does not have."""
    directory = cluster.directory()
    layers, experts = directory.facts.moe_layers, directory.facts.num_experts
    ranks = directory.members.ranks
    asked: list[ReplicaRequest | Home] = [*(body.replicas or ()), *(body.homes or ())]
    for each in asked:
        if each.layer != "*" and each.layer not in layers:
            raise ConfigError(f"layer is {each.layer}; it must be one of {list(layers)}")
        if each.expert >= experts:
            raise ConfigError(f"expert is {each.expert}; it must be in [0, {experts})")
    homes: dict[int, list[tuple[int, int]]] = {}
    for home in body.homes or ():
        if home.rank not in ranks:
            raise ConfigError(f"rank is {home.rank}; it must be one of {list(ranks)}")
        homes.setdefault(home.layer, []).append((home.expert, home.rank))
    return {
        "replicas": None if body.replicas is None else expand_replicas(body.replicas, layers),
        "homes": None if body.homes is None else homes,
    }


def _rollout(rollout: Rollout) -> Document:
    names = ("number", "release_id", "prior", "model", "share", "shadow_rate", "auto", "asked_by", "why", "reason")
    return {**{name: getattr(rollout, name) for name in names}, "phase": rollout.phase.value}
