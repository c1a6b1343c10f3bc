"""The routing actor: the registry of releases and their generations, leases, and the headers that leases grant.

It is the only place that knows which release and generation take new dispatches and who still refers to old ones.
Nothing here blocks, and no step ever waits for it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_moe.actors.announce import RegistryTold, log_as
from ray_moe.actors.bringup import handle_abi
from ray_moe.actors.collector import keep_what_is_loaded
from ray_moe.actors.remote import was_restarted
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.drills import control_faults, disagreement, rehearsed
from ray_moe.controlplane.generations import GenerationStatus
from ray_moe.controlplane.release_states import Note, ReleaseRecord, ReleaseStatus, State
from ray_moe.controlplane.releases import ReleaseRegistry
from ray_moe.controlplane.rollout import Register
from ray_moe.dataplane.handle import DispatchHandle, HandleHeader
from ray_moe.dataplane.known_routes import bind_known_routes, call_scope, origin_of
from ray_moe.dataplane.plan import SlotMap
from ray_moe.dataplane.policies import policy_named
from ray_moe.errors import ConfigError, GenerationError, NotServingError, PeerLeavingError, ReleaseError
from ray_moe.identity import GlobalRank
from ray_moe.placement import Lease, PlacementSnapshot, ReleaseBundle
from ray_moe.routes import Routes


@dataclass(frozen=True)
class Grant:
    """What a lease gives its holder: the header to bind handles with, the placement it names, and the configuration of
    its release."""

    lease: Lease
    header: HandleHeader
    snapshot: PlacementSnapshot
    config: ClusterConfig


@dataclass(frozen=True)
class Registered:
    """What the registry knows: generations whose slots must stay, the one for new dispatches last, and its release.

    `recovering` while a registry that was restarted has not been told what it knew. `changes` counts operations;
    `memory` is what `restore` takes, `releases` are how they stand in it: both for an asker that knows another count.
    """

    live: tuple[PlacementSnapshot, ...]
    release: ReleaseBundle | None
    recovering: bool
    changes: int = 0
    memory: bytes | None = None
    releases: tuple[ReleaseStatus, ...] = ()


class RoutingActor:
    """Ray actor around the pure `ReleaseRegistry`, with the configuration of each release.

    Ray starts it again when its process dies. Until `restore` has told it what it knew and which leases are out, it
    grants, changes and tells nothing: `NotServingError`. No step waits for that.
    """

    def __init__(self, config: ClusterConfig) -> None:
        log_as(config, "routing")
        self._told = RegistryTold()
        self._registry = ReleaseRegistry(final_after_steps=config.final_after_steps)
        self._recovering = was_restarted()
        self._configs: dict[str, ClusterConfig] = {}
        keep_what_is_loaded()
        self._changes = time.time_ns()  # another number than that of an earlier process
        self._calls: dict[int, tuple[Lease, float]] = {}  # by lease id: leases of calls, and when they run out
        self._slots: dict[tuple[int, int, int], SlotMap] = {}  # by generation, layer and rank

    async def restore(self, memory: bytes, leases: Sequence[Lease]) -> None:
        """After a restart: what a `Registered` had as its memory, and the leases that the peers hold."""
        if not self._recovering:
            return
        registry, configs = pickle.loads(memory)
        registry.forget_leases()
        registry.rebuild(leases)
        self._registry, self._configs, self._recovering = registry, configs, False
        self._told.take_over(registry)
        self._changes += 1

    # ---- generations and leases ----

    async def launch(
        self,
        snapshot: PlacementSnapshot,
        bundle: ReleaseBundle,
        config: ClusterConfig,
        observed: Mapping[int, ReleaseBundle],
        note: Note,
    ) -> None:
        """The first release of a cluster. Raises `ReleaseError` naming what differs on which rank."""
        self._registry.launch(bundle, snapshot, observed, note)
        self._configs[bundle.release_id] = config
        self._changed()

    async def publish(self, snapshot: PlacementSnapshot, bundle: ReleaseBundle, note: Note) -> None:
        """Make a verified placement the active generation of its release; nothing changes where it is that already.

        Raises `GenerationError` when it is not verified or not newer, `ReleaseError` when it takes a new release.
        """
        self._require_known()
        if snapshot.digest not in {known.digest for known in self._registry.live()}:
            self._registry.publish(snapshot, bundle, note)
            self._changed()

    async def acquire(self, holder: str, release_id: str | None = None) -> Grant:
        """A lease on the generation for new dispatches, or on that of a candidate in shadow or canary.

        Raises `GenerationError` where there is none.
        """
        self._require_known()
        lease = self._registry.acquire(holder, release_id=release_id)
        self._changes += 1
        return self._grant(lease)

    def _grant(self, lease: Lease) -> Grant:
        snapshot = self._registry.require_live(lease.generation)
        config = self._configs[snapshot.release_id]
        return Grant(lease, HandleHeader.grant(lease, snapshot, handle_abi(config)), snapshot, config)

    # ---- calls of single layers, whose routes are known: their handles are bound here ----

    async def bind(
        self, call: str, rank: int, layer: int, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> DispatchHandle:
        """A lease for one call of `layer` from the origin `rank`, and the handle that it is combined by, once.

        `call` is the caller's own name for it.

        The lease goes back by `release_call`, or runs out after the release's `call_lease_s`. Raises `ConfigError` for
        a layer without routed experts, `RoutesError` for routes that no router gives, `PeerLeavingError` for a rank
        that is not in the group of new dispatches, and what `acquire` raises.

        What is known of such leases is not worth a peer's step: a registry that was started again has forgotten them,
        which costs nothing, since a call only ever runs under a view for which its peer holds a lease of its own.
        """
        self._require_known()
        self._expire()
        holder = f"call-{call}"
        lease = self._registry.acquire(holder)
        try:
            grant = self._grant(lease)
            slots = self._slots_of(grant.snapshot, layer, rank)
            routes = Routes(topk_ids_TK, topk_weights_TK, call_scope(holder, layer), origin_of(rank))
            handle = bind_known_routes(grant.header, slots, routes, policy_named(grant.config.policy), lease.lease_id)
        except BaseException:
            self._registry.release(lease)
            raise
        self._calls[lease.lease_id] = (lease, time.monotonic() + grant.config.call_lease_s)
        return handle

    async def release_call(self, lease_id: int, holder: str) -> None:
        """A call was combined, refused or given up. One whose lease has run out, or is forgotten, is fine."""
        held = self._calls.get(lease_id)
        if held is not None and held[0].holder == holder:
            self._take_back(held[0])

    def _slots_of(self, snapshot: PlacementSnapshot, layer: int, rank: int) -> SlotMap:
        key = (snapshot.generation, layer, rank)
        if key not in self._slots:
            placements = {placement.layer: placement for placement in snapshot.layers}
            if layer not in placements:
                raise ConfigError(f"layer must be one with routed experts, of {sorted(placements)}, found {layer}")
            if GlobalRank(rank) not in snapshot.group.peers:
                raise PeerLeavingError(rank)
            live = {one.generation for one in self._registry.live()}
            self._slots = {old: slots for old, slots in self._slots.items() if old[0] in live}
            self._slots[key] = SlotMap.compile(snapshot, placements[layer], GlobalRank(rank), torch.device("cpu"))
        return self._slots[key]

    def _expire(self) -> None:
        """Take back the leases of calls that have run out."""
        now = time.monotonic()
        for lease in [lease for lease, until in self._calls.values() if until <= now]:
            self._take_back(lease)

    def _take_back(self, lease: Lease) -> None:
        del self._calls[lease.lease_id]
        with suppress(GenerationError):  # the registry was started again meanwhile
            self._registry.release(lease)
            # Only a generation that drains, or a release that leaves, goes on by it.
            self._changes += all(lease.generation != one.generation for one in self._dispatching())

    def _dispatching(self) -> tuple[PlacementSnapshot, ...]:
        with suppress(GenerationError):
            return (self._registry.active(),)
        return ()

    async def release(self, lease: Lease) -> None:
        """Take a lease back, exactly once; `GenerationError` otherwise."""
        self._registry.release(lease)
        self._changed()

    async def bury(self, holder: str) -> int:
        """Release everything that a dead holder had; returns how many leases that were."""
        leases = self._registry.leases_of(holder)
        for lease in leases:
            self._registry.release(lease)
        if leases:
            self._changed()
        return len(leases)

    async def retire_due(self, committed_step: int, through: int = 0) -> tuple[PlacementSnapshot, ...]:
        """Retire every draining generation that nobody refers to and that is final by `committed_step`.

        The slots of those before generation `through` are needed: they are held no longer, unless as the way back of a
        release. Returns what retired.
        """
        self._require_known()
        self._expire()
        self._registry.committed_step(committed_step)
        for status in self._registry.generations():
            if status.generation < through and status.held:
                with suppress(ReleaseError):  # `held` by a release
                    self._registry.release_hold(status.generation)
        retired = tuple(self._registry.retire_generation(generation) for generation in self._registry.retirable())
        if retired:
            self._changed()
        return retired

    async def retire(self, generation: int) -> None:
        """Retire one generation, or `RetirementRefusedError` naming its holders."""
        self._require_known()
        self._registry.retire_generation(generation)
        self._changed()

    # ---- releases ----

    async def admit(
        self,
        bundle: ReleaseBundle,
        recomputed: ReleaseBundle,
        snapshot: PlacementSnapshot,
        config: ClusterConfig,
        observed: Mapping[int, ReleaseBundle],
        note: Note,
    ) -> tuple[bool, dict[str, str]]:
        """Build, verify and load a candidate, as far as that is still to do. Returns whether a rollback from it goes
        through, and how the faults ended that the control plane must refuse; both on copies.

        Raises `ReleaseError` naming what drifted, or which coordinates of which rank are not the bundle's.
        """
        self._require_known()
        registry, name = self._registry, bundle.release_id
        self._changes += 1
        if name not in self._states():
            registry.build(bundle, note)
            self._told.tell(registry)
        if self._states()[name] == State.BUILT:
            registry.verify(name, recomputed, note)
            self._told.tell(registry)
        if self._states()[name] == State.VERIFIED:
            registry.load(name, snapshot, observed, note)
        self._configs[name] = config
        faults = control_faults(bundle, snapshot)
        if self._states()[name] == State.LOADED:
            faults["F08"] = disagreement(self._copy(), name)
        self._told.tell(registry)
        return rehearsed(self._copy(), name), faults

    def _copy(self) -> ReleaseRegistry:
        copy: ReleaseRegistry = pickle.loads(pickle.dumps(self._registry))
        return copy

    async def register(
        self, step: Register, note: Note, fresh: tuple[PlacementSnapshot, ReleaseBundle] | None = None
    ) -> None:
        """One operation of a rollout. `fresh` is the prior release's placement again, under a new number, for when it
        takes over. Raises `ReleaseError` for what comes too early."""
        self._require_known()
        registry, name = self._registry, step.release_id
        if step.event == "canary":
            assert step.compared is not None
            registry.canary(name, step.compared, note)
        elif step.event in ("promote", "finalise"):
            assert step.report is not None
            getattr(registry, step.event)(name, step.report, note)
        elif step.event == "stop_new_dispatch":
            registry.stop_new_dispatch(name, note, across_checkpoints=True)
        elif step.event == "activate_prior":
            waits = self._states(dispatching=True)
            registry.activate_prior(name, note, fresh if not waits else None)
            self._told.tell(registry)
            if waits and fresh is not None and registry.active().generation < fresh[0].generation:
                registry.publish(*fresh, note)  # numbers only go up: the candidate's was the highest
        else:
            getattr(registry, step.event)(name, note)
        self._changed()

    async def newest(self) -> int:
        """The highest generation that any release has had."""
        self._require_known()
        return self._registry.newest

    async def releases(self) -> tuple[tuple[ReleaseStatus, ...], tuple[ReleaseRecord, ...]]:
        """Every release, and the log of what was done with them."""
        self._require_known()
        return self._registry.status(), self._registry.log()

    def _states(self, *, dispatching: bool = False) -> dict[str, str]:
        return {one.release_id: one.state for one in self._registry.status() if one.dispatching or not dispatching}

    # ---- questions ----

    async def active(self) -> PlacementSnapshot:
        """The placement for new dispatches; `GenerationError` where there is none."""
        return self._registry.active()

    async def registered(self, known_changes: int = -1) -> Registered:
        """Live generations and the release, and what else there is to remember."""
        self._expire()
        live, release = self._registry.live(), None
        with suppress(ReleaseError):  # between the two halves of a rollback no release takes new dispatches
            release = self._registry.dispatching()
            last = release.release_id
            live = tuple(sorted(live, key=lambda one: (one.release_id == last, one.generation)))
        if self._changes == known_changes:
            return Registered(live, release, self._recovering, self._changes)
        memory = pickle.dumps((self._registry, self._configs))
        return Registered(live, release, self._recovering, self._changes, memory, self._registry.status())

    async def status(self) -> tuple[GenerationStatus, ...]:
        """Every generation with its state, references and holders."""
        return self._registry.generations()

    def _changed(self) -> None:
        """Generations or releases may stand elsewhere than before."""
        self._changes += 1
        self._told.tell(self._registry)

    def _require_known(self) -> None:
        """An empty registry must not answer as if nothing had ever been there."""
        if self._recovering:
            raise NotServingError("the registry is being restored")
