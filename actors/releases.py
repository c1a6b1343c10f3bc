"""What a controller may be asked about releases: build a candidate, promote it, roll it back, tell how they are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray_moe.controlplane.asking import Asker
from ray_moe.controlplane.rollout import Rollout

if TYPE_CHECKING:
    from ray_moe.actors.conductor import Conductor
    from ray_moe.actors.rollouts import Releases, Rollouts


class ReleaseVerbs:
    """The part of the controller that its rollouts answer. `_require_serving` raises where the cluster does not."""

    _rollouts: Rollouts | None

    if TYPE_CHECKING:

        async def _require_serving(self) -> Conductor: ...

    async def release_build(
        self,
        asker: Asker,
        settings: Mapping[str, Any],
        model: str,
        share: float,
        shadow_rate: float,
        auto: bool,
        samples: tuple[int, int],
    ) -> Rollout:
        """Begin a rollout. Raises `ConfigError`."""
        return await (await self._releases()).build(asker, settings, model, share, shadow_rate, auto, samples)

    async def release_promote(self, release_id: str) -> Rollout:
        """Promote the canary. Raises `ReleaseError` not_promoted naming what is missing."""
        return (await self._releases()).promote(release_id)

    async def release_rollback(self, release_id: str, why: str) -> Rollout:
        """Take the candidate out again. Raises `ConfigError`, `GenerationError` when its promotion is final."""
        return (await self._releases()).rollback(release_id, why, time.time())

    async def rollout(self, release_id: str) -> Rollout:
        """How far a rollout is; the latest for an empty id. Raises `ConfigError`."""
        return (await self._releases()).find(release_id)

    async def releases(self) -> Releases:
        """Releases, the log, rollouts, and what is missing for a promotion."""
        return await (await self._releases()).releases()

    async def _releases(self) -> Rollouts:
        await self._require_serving()
        assert self._rollouts is not None
        return self._rollouts
