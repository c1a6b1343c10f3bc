"""Rollouts of candidate releases: looks at what ranks and registry say, asks the pure machine, and does what it lacks.

One rollout is open at a time. While it is, its placement counts as live, so that operations on the placement wait; and
it waits for those that have begun. Everything that is done may be done again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors.announce import tell_rollout
from ray_moe.actors.bringup import find_model, release_bundle
from ray_moe.actors.conductor import Conductor
from ray_moe.actors.lookout import Lookout
from ray_moe.config import ClusterConfig
from ray_moe.controlplane import rollout as machine
from ray_moe.controlplane.asking import Asker
from ray_moe.controlplane.candidates import candidate_of, changed_config
from ray_moe.controlplane.fetching import FillOutcome, FromCheckpoint, digests_of, orders
from ray_moe.controlplane.outstanding import changes, resident
from ray_moe.controlplane.promotion import PromotionPolicy, PromotionReport
from ray_moe.controlplane.release_states import Note, ReleaseRecord, ReleaseStatus
from ray_moe.controlplane.rollout import Heard, Phase, Rollout, Seen, Step
from ray_moe.controlplane.rollout_evidence import Drill
from ray_moe.deadline import ray_await
from ray_moe.engine.records import ModelFacts
from ray_moe.errors import ConfigError, NotServingError, PeerLostError, RayMoEError, ReleaseError
from ray_moe.placement import PlacementSnapshot, ReleaseBundle

_LOG = logging.getLogger(__name__)
_BUSY_S, _IDLE_S = 0.05, 0.5
_KEPT = 16


@dataclass(frozen=True)
class Releases:
    """What people and programs see: every release, the registry's log, and the rollouts, the latest last."""

    releases: tuple[ReleaseStatus, ...]
    log: tuple[ReleaseRecord, ...]
    rollouts: tuple[Rollout, ...]
    report: PromotionReport | None


class Rollouts:
    """On the controller's event loop. `peers` is the controller's own table of expert actors."""

    def __init__(
        self,
        config: ClusterConfig,
        peers: Mapping[int, ActorHandle],
        routing: Callable[[], ActorHandle],
        lookout: Lookout,
        conductor: Conductor,
    ) -> None:
        self._base, self._peers, self._routing = config, peers, routing
        self._lookout, self._conductor = lookout, conductor
        self._rollouts = conductor.record.rollouts
        self._running: dict[Step, asyncio.Task[None]] = {}
        self._seen: Seen | None = None
        self._reserve()

    async def rounds(self) -> None:
        """Run rounds until cancelled."""
        while True:
            try:
                if self.open is not None:
                    await self._round(self.open)
            except (RayMoEError, RayActorError, OSError) as error:
                _LOG.warning("a rollout of %s: %s", self._base.name, error)
            await asyncio.sleep(_BUSY_S if self.open is not None else _IDLE_S)

    # ---- what is asked for ----

    @property
    def open(self) -> Rollout | None:
        """The rollout that is under way."""
        return self._rollouts[-1] if self._rollouts and not self._rollouts[-1].ended else None

    async def build(
        self,
        asker: Asker,
        settings: Mapping[str, Any],
        model: str,
        share: float,
        shadow_rate: float,
        auto: bool,
        samples: tuple[int, int],
    ) -> Rollout:
        """Begin a rollout. Raises `ConfigError` for what no release of this cluster can be, or while one is open."""
        registered = await self._lookout.registered(self._routing())
        if registered.recovering:
            raise NotServingError("the registry is being restored: ask again")
        if registered.release is None:
            raise ConfigError("no release takes new dispatches yet")
        if self.open is not None:
            raise ConfigError(f"release {self.open.release_id} is {self.open.phase}: one rollout at a time")
        serving = self._conductor.record.config or self._base
        config = changed_config(serving, settings, model)
        if model:
            find_model(config)
        elif config == serving:
            raise ConfigError("the release is to differ from the one that serves in a setting, or in its model")
        for name, rate in (("share", share), ("shadow_rate", shadow_rate)):
            if not 0 < rate <= (0.5 if model else 1):
                raise ConfigError(f"{name} must be in (0, {0.5 if model else 1:g}], found {rate:g}")
        number = max([0, *(one.number for one in self._rollouts)]) + 1
        rollout = Rollout(
            number,
            f"{self._base.name}-r{number}",
            registered.release.release_id,
            config,
            model,
            asker.who,
            asker.why,
            asker.when,
            share,
            shadow_rate,
            auto,
            policy=PromotionPolicy(*samples, has_graphs=bool(config.decode_buckets)),
            changed_at=asker.when,
        )
        self._save(rollout)
        return rollout

    def promote(self, release_id: str) -> Rollout:
        """Ask for the promotion. Raises `ReleaseError` not_promoted naming the checks that fail now."""
        rollout = self._require_open(release_id)
        if rollout.phase is not Phase.CANARY or self._seen is None:
            raise ReleaseError("not_promoted", f"release {rollout.release_id} is {rollout.phase}, and no canary")
        report = machine.report_on(rollout, self._seen)
        if not report.promote:
            told = "; ".join(f"{one.name}: {one.found}, must be {one.bound}" for one in report.checks if not one.passed)
            raise ReleaseError("not_promoted", f"release {rollout.release_id}: {told}", report.failed_checks)
        self._save(replace(rollout, wanted=True))
        return self._rollouts[-1]

    def rollback(self, release_id: str, why: str, now: float) -> Rollout:
        """Take the candidate out, whether it serves by now or not. `GenerationError` once its promotion is final."""
        self._save(self._require_open(release_id).leave(why, now))
        return self._rollouts[-1]

    async def releases(self) -> Releases:
        releases, log = await self._ask_routing("the registry's releases", "releases")
        judged = self.open is not None and self.open.phase in (Phase.SHADOW, Phase.CANARY, Phase.ACTIVE)
        report = machine.report_on(self.open, self._seen) if judged and self.open and self._seen else None
        return Releases(releases, log, self._rollouts, report)

    def find(self, release_id: str) -> Rollout:
        """The rollout of a release, by default the latest; `ConfigError` when there is none."""
        for rollout in reversed(self._rollouts):
            if release_id in ("", rollout.release_id):
                return rollout
        raise ConfigError(f"there is no rollout of a release {release_id}" if release_id else "nothing was rolled out")

    def _require_open(self, release_id: str) -> Rollout:
        rollout = self.find(release_id)
        if rollout.ended:
            raise ConfigError(f"the rollout of release {rollout.release_id} is {rollout.phase}")
        return rollout

    # ---- a round ----

    async def _round(self, rollout: Rollout) -> None:
        seen = await self._look(rollout)
        if seen is None or self.open is None or self.open.number != rollout.number:
            return
        self._seen = seen
        if self.open.phase is Phase.LEAVING and any(isinstance(step, machine.Verify) for step in self._running):
            return  # the registry may still be told of it
        following, steps = machine.advance(self.open, seen, time.time())
        if following.phase is Phase.DONE:
            path = find_model(following.config) if following.model else self._conductor.record.model_path
            self._conductor.serve_as(following.config, self._facts_of(following), path)
        self._save(following)
        for step in steps:
            if step not in self._running:
                self._running[step] = asyncio.create_task(self._act(step))

    async def _look(self, rollout: Rollout) -> Seen | None:
        """None while a registry that was started again has not been told what it knew.

        The registry is asked last: what is decided is saved with the memory that it is decided on.
        """
        members = [rank.value for rank in self._lookout.live[-1].group.peers]
        said = await asyncio.gather(
            *(self._ask(rank, "releases") for rank in members if rank in self._peers), return_exceptions=True
        )
        if (await self._lookout.registered(self._routing())).recovering:
            return None
        live = self._lookout.live
        operations = self._conductor.control.operations
        return Seen(
            ranks={heard.rank: heard for heard in said if isinstance(heard, Heard)},
            members=tuple(rank.value for rank in live[-1].group.peers),
            releases={one.release_id: one for one in self._lookout.releases},
            settled=len(live) == 1 and not any(changes(operation) for operation in operations),
            missing=rollout.candidate is None or not rollout.candidate.verified,
        )

    async def _act(self, step: Step) -> None:
        try:
            await self._do(step)
        except (RayMoEError, RayActorError, OSError) as error:
            self._failed(step, error)
            await asyncio.sleep(_IDLE_S)  # nobody counts its attempts
        finally:
            self._running.pop(step, None)

    def _failed(self, step: Step, error: Exception) -> None:
        text = str(error).partition("\n")[0]
        _LOG.warning("a rollout of %s: %s: %s", self._base.name, type(step).__name__, text)
        rollout = self.open
        if rollout is None:
            return
        if _is_final(step, error) and rollout.phase in (Phase.LOADING, Phase.VERIFYING):
            self._save(rollout.leave(text, time.time()))
        else:
            self._save(replace(rollout, reason=text))

    async def _do(self, step: Step) -> None:
        rollout = self._require_open("")
        if isinstance(step, machine.Prepare):
            await self._prepare(rollout, step.rank)
        elif isinstance(step, machine.Fill):
            await self._fill(rollout)
        elif isinstance(step, machine.Verify):
            await self._verify(rollout)
        elif isinstance(step, machine.StageRoles):
            await self._ask(step.rank, "stage_roles", step.order)
        elif isinstance(step, machine.Forget):
            members = [rank.value for rank in self._lookout.live[-1].group.peers]
            await asyncio.gather(*(self._ask(rank, "forget_release", step.release_id) for rank in members))
            await self._register(machine.Register("release_graphs", step.release_id, step.why), rollout)
        else:
            await self._register(step, rollout)

    async def _prepare(self, rollout: Rollout, rank: int) -> None:
        path = await asyncio.to_thread(find_model, rollout.config)
        facts: ModelFacts = await self._ask(rank, "prepare_release", path)
        serving = self._conductor.record.facts
        if replace(facts, checkpoint_version="") != replace(serving, checkpoint_version=""):
            raise ReleaseError("other_architecture", f"{rollout.model} is {facts}, the cluster serves {serving}")
        if facts.checkpoint_version == serving.checkpoint_version:
            raise ConfigError(f"{rollout.model} is the checkpoint that the cluster serves already")
        self._save(replace(self._require_open(""), checkpoint=facts.checkpoint_version))

    async def _fill(self, rollout: Rollout) -> None:
        candidate = rollout.candidate
        if candidate is None:
            candidate = await self._candidate(rollout)
            self._save(replace(self._require_open(""), candidate=candidate))
        if candidate.verified:
            return
        source = FromCheckpoint(rollout.checkpoint)
        wanted = orders(candidate, None, resident(self._lookout.observed()), checkpoint=source)
        ranks = sorted({order.rank for order in wanted})
        found: list[tuple[FillOutcome, ...]] = await asyncio.gather(
            *(self._ask(rank, "fill", tuple(order for order in wanted if order.rank == rank)) for rank in ranks)
        )
        outcomes = [outcome for some in found for outcome in some]
        broken = next((outcome for outcome in outcomes if outcome.error), None)
        if broken is not None:
            raise ConfigError(f"layer {broken.order.layer} expert {broken.order.expert}: {broken.error}")
        self._save(replace(self._require_open(""), candidate=candidate.with_digests(digests_of(outcomes))))

    async def _candidate(self, rollout: Rollout) -> PlacementSnapshot:
        storage = self._conductor.record.storage
        return candidate_of(
            self._lookout.live[-1], rollout.release_id, await self._next_generation(), rollout.checkpoint, storage
        )

    async def _next_generation(self) -> int:
        """Above all that any release has had; nothing else publishes while a rollout is open."""
        newest: int = await self._ask_routing("the newest generation", "newest")
        return newest + 1

    async def _verify(self, rollout: Rollout) -> None:
        candidate = rollout.candidate
        assert candidate is not None
        bundle = release_bundle(rollout.config, candidate, self._facts_of(rollout))
        recomputed = release_bundle(rollout.config, candidate, self._facts_of(rollout))
        members = [rank.value for rank in candidate.group.peers]
        said = await asyncio.gather(*(self._ask(rank, "observe", rollout.config, candidate) for rank in members))
        observed: dict[int, ReleaseBundle] = dict(zip(members, said, strict=True))
        admitted = (bundle, recomputed, candidate, rollout.config, observed, _note(rollout, rollout.why))
        rehearsed, control = await self._ask_routing("verify and load a release", "admit", *admitted)
        drills = await asyncio.gather(*(self._ask(rank, "drill") for rank in members))
        self._save(replace(self._require_open(""), drill=Drill.of(control, drills, rehearsed=rehearsed)))

    async def _register(self, step: machine.Register, rollout: Rollout) -> None:
        fresh = None
        if step.event == "activate_prior":
            held = max(
                (one for one in self._lookout.live if one.release_id == rollout.prior), key=lambda one: one.generation
            )
            number = await self._next_generation()
            again = replace(held, generation=number, version=type(held.version)(f"placement-v{number}"))
            record = self._conductor.record
            fresh = (again, release_bundle(record.config or self._base, again, record.facts))
        what = f"{step.event} of release {step.release_id}"
        await self._ask_routing(what, "register", step, _note(rollout, step.why), fresh)
        _LOG.info("release %s: %s: %s", step.release_id, step.event, step.why)

    # ---- details ----

    async def _ask_routing(self, what: str, method: str, *args: object) -> Any:
        call = getattr(self._routing(), method).remote(*args)
        try:
            return await ray_await(call, self._base.step_deadline_s, what)
        except RayActorError as error:  # Ray starts it again
            raise NotServingError(f"{what}: the routing actor of {self._base.name!r} is gone") from error

    def _facts_of(self, rollout: Rollout) -> ModelFacts:
        serving = self._conductor.record.facts
        return replace(serving, checkpoint_version=rollout.checkpoint) if rollout.other_checkpoint else serving

    async def _ask(self, rank: int, method: str, *args: object) -> Any:
        if rank not in self._peers:
            raise PeerLostError(f"rank {rank} is gone", rank, *self._lookout.coordinates)
        call = getattr(self._peers[rank], method).remote(*args)
        return await ray_await(call, self._base.start_deadline_s, f"{method} on rank {rank}")

    def _save(self, rollout: Rollout) -> None:
        if self._rollouts and self._rollouts[-1] == rollout:
            return
        others = tuple(one for one in self._rollouts if one.number != rollout.number)
        rollouts = (*others, rollout)[-_KEPT:]
        self._conductor.keep_rollouts(rollouts)
        tell_rollout(self._rollouts[-1] if self._rollouts else None, rollout)
        self._rollouts = rollouts
        self._reserve()

    def _reserve(self) -> None:
        """What the open rollout fills must not be taken for slots that nobody needs."""
        rollout = self.open
        held = rollout is not None and rollout.candidate is not None and rollout.phase in _RESERVING
        self._lookout.reserved = (rollout.candidate,) if held and rollout is not None and rollout.candidate else ()


_RESERVING = (Phase.LOADING, Phase.VERIFYING, Phase.SHADOW, Phase.CANARY, Phase.ACTIVE)


def _is_final(step: Step, error: Exception) -> bool:
    """Whether a candidate that is not loaded yet never will be. What somebody does not know yet, he may soon."""
    if isinstance(error, NotServingError):
        return False
    loading = isinstance(step, machine.Prepare | machine.Fill)
    return loading or (isinstance(step, machine.Verify) and isinstance(error, ReleaseError))


def _note(rollout: Rollout, why: str) -> Note:
    return Note(rollout.asked_by, time.time(), why)
