"""The controller actor: brings a cluster up, watches it, and carries out what the reconciler asks for.

What shall be is decided by pure functions of `controlplane`, and done by the `Conductor`, round after round; this actor
is how others reach it, and what becomes of the cluster as a whole. Ray starts it again when its process dies; it then
goes on from the journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_moe.actors.announce import log_as
from ray_moe.actors.bringup import find_model, known_nodes, store_host
from ray_moe.actors.cluster_metrics import ClusterExporter
from ray_moe.actors.cluster_state import ClusterState, advance
from ray_moe.actors.collector import keep_what_is_loaded
from ray_moe.actors.conductor import Conductor
from ray_moe.actors.exporter import Exporter, RaySink
from ray_moe.actors.journal import Journal, Record
from ray_moe.actors.live import LiveQuestions
from ray_moe.actors.lookout import Lookout
from ray_moe.actors.pilot import Pilot
from ray_moe.actors.releases import ReleaseVerbs
from ray_moe.actors.remote import create_routing, find_expert, kill, this_actor, was_restarted
from ray_moe.actors.reports import ClusterStatus, Directory, cluster_status
from ray_moe.actors.rollouts import Rollouts
from ray_moe.actors.startup import Startup
from ray_moe.comm.rendezvous import RendezvousStore, StoreAddress
from ray_moe.config import ClusterConfig
from ray_moe.controlplane import asking
from ray_moe.controlplane.effects import Observed
from ray_moe.controlplane.elastic import even_homes
from ray_moe.controlplane.generations import GenerationStatus
from ray_moe.controlplane.operations import ByHomes, ByLoads, ControlState, Operation, Target
from ray_moe.controlplane.preview import Preview, preview
from ray_moe.deadline import ray_await
from ray_moe.engine.records import LoadProgress
from ray_moe.errors import ConfigError, NotServingError, PeerLostError, RayMoEError
from ray_moe.metrics import CONTROLLER_BUDGET
from ray_moe.placement import PlacementSnapshot

_LOG = logging.getLogger(__name__)


class ControllerActor(ReleaseVerbs, LiveQuestions):
    """Ray actor; one per cluster."""

    def __init__(self, config: ClusterConfig) -> None:
        log_as(config, "controller")
        self._config = config
        self._state = ClusterState.STARTING
        self._peers: dict[int, ActorHandle] = {}
        self._lookout = Lookout(config, self._peers)
        self._failure = ""  # why the epoch is broken although nobody died
        self._routing: ActorHandle | None = None
        self._store: RendezvousStore | None = None
        self._journal = Journal(config)
        self._record: Record | None = None  # what the cluster was brought up with, or found after a restart
        self._conductor: Conductor | None = None
        self._starting: asyncio.Task[None] | None = None
        self._pilot: Pilot | None = None
        self._rollouts: Rollouts | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Future[None] | None = None
        self._restarted = was_restarted()
        self._resuming = asyncio.Lock()
        if self._restarted:  # nobody else might ask for it; Ray drops calls of our own before it has told of our return
            self._watching.append(asyncio.ensure_future(self.resume()))

    # ---- up ----

    async def start(self) -> None:
        """Bring the cluster up and serve. On an error everything that was started is ended, and it propagates."""
        self._starting = asyncio.current_task()
        try:
            await self._start()
        except BaseException:
            if self._state is ClusterState.STARTING:  # not when `stop` cancelled us
                self._advance("fail")
            self._kill_all()
            raise
        self._serve()

    async def _start(self) -> None:
        config = self._config
        model_path = await asyncio.to_thread(find_model, config)
        self._routing = create_routing(config)
        startup = Startup(config, self._peers)
        loaded = await startup.load(model_path)
        verified = await startup.fill(loaded.first)
        self._store = RendezvousStore(store_host(loaded.nodes), config.start_deadline_s)
        await startup.open(verified, loaded.facts, self._routing, self._store.address)
        control = ControlState(next_rank=config.peers, next_epoch=verified.group.epoch + 1)
        await self._lookout.registered(self._routing)
        self._record = Record(control, loaded.storage, loaded.facts, model_path, (verified,), self._lookout.memory)
        self._journal.write(self._record)

    async def resume(self) -> None:
        """Go on after this process was started again: from the journal, with the actors that are there.

        Whoever asks for anything waits for this first.
        """
        if self._restarted:
            async with self._resuming:
                if self._state is ClusterState.STARTING:
                    await self._resume()

    async def _resume(self) -> None:
        record = await asyncio.to_thread(self._journal.read)
        if record is None:
            return  # it died before the cluster served: whoever starts it gives up, and ends what is left
        self._record, self._routing = record, create_routing(self._config)
        for rank in range(record.control.next_rank):
            with suppress(NotServingError):  # it left, or it was never made
                self._peers[rank] = find_expert(self._config.name, rank)
        active = record.live[-1]
        self._lookout.live, self._lookout.memory = record.live, record.memory
        domains = len(active.topology.domains)
        self._store = RendezvousStore(store_host(known_nodes(domains)), self._config.start_deadline_s)
        _LOG.warning("the controller of %s goes on after a restart", self._config.name)
        self._serve()

    def _serve(self) -> None:
        known = self._known
        self._conductor = Conductor(
            self._config,
            known,
            self._journal,
            self._peers,
            self._require_routing(),
            self._look,
            self._store_address,
            lambda: self._lookout.memory,
        )
        self._pilot = Pilot(self._config, known.facts, known.storage, self._peers, self._lookout, self._conductor)
        self._advance("serve")
        keep_what_is_loaded()
        self._rollouts = Rollouts(self._config, self._peers, self._require_routing, self._lookout, self._conductor)
        exports = ClusterExporter(
            self._config,
            Exporter(RaySink(), CONTROLLER_BUDGET, {"cluster": self._config.name}),
            self._peers,
            self._require_routing,
            self._lookout,
            self._conductor,
            self._pilot,
            lambda: self._state,
            restarted=self._restarted,
        )
        watching = (self._conductor, self._pilot, self._rollouts, exports)
        self._watching = [asyncio.create_task(each.rounds()) for each in watching]
        for task in self._watching:
            task.add_done_callback(_log_failure)

    # ---- what is there ----

    async def _look(self) -> Observed | None:
        """What is there now, None when nothing can be changed any more.

        A serving rank that died, or failed, breaks the epoch; one that only prepares does not.
        """
        registered = await self._lookout.registered(self._require_routing())
        if registered.recovering:
            await self._restore_registry()
            registered = await self._lookout.registered(self._require_routing())
        for rank, detail in (await self._lookout.look()).items():
            await self._bury(rank, detail)
        if self._lookout.failure and self._state is ClusterState.SERVING:
            self._failure = self._lookout.failure
            self._advance("lose_peer", self._failure)
        return self._lookout.observed() if self._state is ClusterState.SERVING else None

    async def _restore_registry(self) -> None:
        """The routing actor was started again: tell it what was live, and who holds which lease.

        A generation is in the journal before any rank is asked to stage it; one that has retired since retires again.
        """
        record = await asyncio.to_thread(self._journal.read)
        if record is not None:
            await self._lookout.restore(self._require_routing(), record.live, record.memory)

    async def _bury(self, rank: int, detail: str) -> None:
        """A serving peer is gone: its leases go back, and the survivors fail their calls now, not at a deadline."""
        if self._state is ClusterState.STOPPED:
            return  # we ended it ourselves
        self._advance("lose_peer", detail)
        for other, peer in self._peers.items():
            if other not in self._lookout.lost:
                peer.peer_lost.remote(detail)
        if self._routing is not None:
            await self._ask(self._routing.bury.remote(f"rank-{rank}"), f"release the leases of rank {rank}")

    # ---- changes: each returns the number of an operation ----

    async def publish(self, asker: asking.Asker, replicas: Mapping[tuple[int, int], int]) -> int:
        """Ask for the start rule's placement with these copies, 1 where absent. Raises `ConfigError`."""
        (_, serving), facts = await self._now(), self._known.facts
        homes = even_homes(dict.fromkeys(facts.moe_layers, facts.num_experts), serving, replicas)
        return await self.rebalance(asker, ByHomes(homes))

    async def rebalance(self, asker: asking.Asker, target: Target | None) -> int:
        """Ask for another placement over the same ranks, by default what suits the demand."""
        conductor, _ = await self._now()
        return conductor.begin(*asking.rebalance(conductor.control, asker, self._or_demand(target)))

    async def preview(self, target: Target | None) -> Preview:
        """What `rebalance` would do from the placement that is active now. Raises `ConfigError`, `PlacementError`."""
        return await asyncio.to_thread(preview, self._or_demand(target), await self.placement(), self._known.storage)

    async def scale(self, asker: asking.Asker, wanted: int) -> int | None:
        """Ask for `wanted` ranks; None where nothing has to change. Raises `ConfigError`."""
        (conductor, serving), config = await self._now(), self._config
        bounds = (config.fewest_peers, config.most_peers)
        control, operation = asking.scale(conductor.control, asker, serving, wanted, bounds)
        return conductor.begin(control, operation) if operation is not None else None

    async def drain(self, asker: asking.Asker, ranks: Sequence[int]) -> int:
        """Ask named ranks to leave. Raises `ConfigError`."""
        conductor, serving = await self._now()
        return conductor.begin(*asking.drain(conductor.control, asker, serving, ranks, self._config.fewest_peers))

    async def cancel(self, number: int, who: str) -> None:
        """Undo what has not been published yet. Raises `ConfigError`, `GenerationError` for an unknown number."""
        (await self._require_serving()).cancel(number, who)

    async def operation(self, number: int) -> Operation:
        """How far an operation is; `GenerationError` for an unknown number."""
        return (await self._require_conductor()).control.find(number)

    async def wait(self, number: int, seconds: float) -> Operation:
        """The operation once it has ended, or as it is after `seconds`."""
        return await (await self._require_serving()).wait(number, seconds)

    async def history(self) -> tuple[Operation, ...]:
        """Operations that have ended, oldest first, and those that are open."""
        control = (await self._require_conductor()).control
        return (*control.history, *control.operations)

    async def _now(self) -> tuple[Conductor, tuple[int, ...]]:
        """The conductor and the serving ranks. Raises `PeerLostError` or `NotServingError`."""
        await self._require_serving()
        await self._look()
        return await self._require_serving(), self._lookout.serving

    # ---- questions ----

    async def progress(self) -> dict[int, LoadProgress]:
        """How far each peer is with loading; empty before the peers exist."""
        return await self._lookout.progress()

    async def directory(self) -> Directory:
        """Peers and model, for clients. Raises `PeerLostError` or `NotServingError` when the cluster cannot serve."""
        control = (await self._require_serving()).control
        ranks = control.members or self._lookout.serving or tuple(self._peers)
        return Directory(
            self._known.config or self._config,
            self._known.model_path,
            self._known.facts,
            tuple(self._peers[rank] for rank in ranks),
            ranks,
            control.members_version,
            this_actor(),
        )

    async def status(self) -> ClusterStatus:
        """A fresh look at peers, slots, generations, references and what is under way."""
        conductor = await self._require_conductor()
        if self._state not in (ClusterState.SERVING, ClusterState.DEGRADED):
            raise NotServingError(f"cluster {self._config.name!r} is {self._state.value}")
        await self._look()
        routing = self._require_routing()
        generations: tuple[GenerationStatus, ...] = await self._ask(routing.status.remote(), "registry")
        active: PlacementSnapshot = await self._ask(routing.active.remote(), "active generation")
        peers = await self._lookout.statuses()
        return cluster_status(
            self._known.config or self._config,
            self._state.value,
            active,
            generations,
            peers,
            tuple(sorted(self._lookout.lost)),
            conductor.control.operations,
        )

    async def placement(self) -> PlacementSnapshot:
        """The active placement."""
        await self._now()
        return self._lookout.live[-1]

    # ---- down ----

    async def stop(self) -> None:
        """End the engines at one agreed step, then every actor but this one. A peer that does not follow is killed.

        Whoever asks again waits for the same end.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        with suppress(RayMoEError, RayActorError, OSError):  # who started us ends what we do not find
            await self.resume()
        in_step = self._state is ClusterState.SERVING
        if self._state is ClusterState.STARTING and self._starting is not None:
            self._starting.cancel()
        self._advance("stop")
        for task in self._watching:
            task.cancel()
        if self._conductor is not None:
            self._conductor.stop()
        if in_step:
            stops: list[Any] = [
                self._peers[rank].stop.remote() for rank in self._lookout.serving if rank in self._peers
            ]
            answers = await asyncio.gather(*(self._ask(call, "stop") for call in stops), return_exceptions=True)
            for result in answers:
                if isinstance(result, BaseException):
                    _LOG.warning("an engine did not stop in step with the others: %s", result)
        self._kill_all()

    def _kill_all(self) -> None:
        for actor in (*self._peers.values(), *((self._routing,) if self._routing is not None else ())):
            kill(actor)

    # ---- details ----

    def _or_demand(self, target: Target | None) -> Target:
        if target is not None:
            return target
        if self._pilot is None or self._pilot.demand is None:
            raise ConfigError("no demand has been reported yet: say where experts shall live")
        return ByLoads(self._pilot.demand.loads_LE)

    def _store_address(self) -> StoreAddress:
        assert self._store is not None
        return self._store.address

    async def _ask(self, ref: Any, what: str) -> Any:
        try:
            return await ray_await(ref, self._config.start_deadline_s, what)
        except RayActorError as error:
            # Left as it is, our caller would take it for the death of this actor.
            raise NotServingError(f"cluster {self._config.name!r}: {what}: the actor that was asked is gone") from error

    @property
    def _known(self) -> Record:
        record = self._conductor.record if self._conductor is not None else self._record
        if record is None:
            raise NotServingError(f"cluster {self._config.name!r} has not loaded its model yet")
        return record

    async def _require_conductor(self) -> Conductor:
        await self.resume()
        if self._conductor is None:
            raise NotServingError(f"cluster {self._config.name!r} is {self._state.value}")
        return self._conductor

    def _require_routing(self) -> ActorHandle:
        if self._routing is None:
            raise NotServingError(f"cluster {self._config.name!r} is {self._state.value}")
        return self._routing

    async def _require_serving(self) -> Conductor:
        await self.resume()
        if self._lookout.lost_serving:
            rank, detail = next(iter(self._lookout.lost_serving.items()))
            raise PeerLostError(detail, rank, *self._lookout.coordinates)
        if self._failure:
            epoch, _ = self._lookout.coordinates
            raise NotServingError(f"cluster {self._config.name!r}: epoch {epoch} is broken: {self._failure}")
        if self._state is not ClusterState.SERVING:
            raise NotServingError(f"cluster {self._config.name!r} is {self._state.value}")
        return await self._require_conductor()

    def _advance(self, event: str, reason: str = "") -> None:
        self._state = advance(self._config.name, self._state, event, reason)


def _log_failure(task: asyncio.Task[None]) -> None:
    """Nobody awaits the watch; an error in it must be seen all the same."""
    if not task.cancelled() and task.exception() is not None:
        _LOG.error("the controller stopped watching its peers", exc_info=task.exception())
