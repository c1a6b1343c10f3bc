"""Real peers for tests: a few processes that stay up, joined in a fresh real group for every job.

A job is a module-level function `work(group, *args)` that every peer runs; its results come back in peer-slot order.
A peer that died on purpose is replaced before the next job. No wait is without a deadline, and no process outlives
the tests: a peer ends when its pipe closes, whatever became of the parent.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.hierarchical import Hierarchical
from ray_moe.comm.join import in_chunks, join, transport_named
from ray_moe.comm.rendezvous import RendezvousStore, StoreAddress
from ray_moe.comm.transports import Transport
from ray_moe.deadline import Deadline
from ray_moe.identity import GlobalRank, ProcessGroupId
from ray_moe.topology import Domain, ProcessGroupSpec, Topology, derive_groups

GROUP = ProcessGroupId("ep-group-0")
# Longer than any healthy job takes on a busy machine, and longer than every group deadline.
JOB_SECONDS = 90.0


@dataclass(frozen=True)
class _Process:
    process: BaseProcess
    pipe: Connection


@dataclass(frozen=True)
class _Order:
    """One peer's part of a job, as it travels."""

    work: Callable[..., Any]
    args: tuple[Any, ...]
    spec: ProcessGroupSpec
    store: StoreAddress
    seconds: float
    kind: str


# What the process is working on, and what its work has joined beside its group; set for one job at a time.
_CURRENT: list[_Order] = []
_BESIDE: list[Transport] = []

# Every transport of the product, and chunked variants of a plain and of a staged one.
TRANSPORTS = (
    "all_to_all_v",
    "padded_all_to_all",
    "all_gather_filter",
    "hierarchical",
    "chunked",
    "chunked_hierarchical",
)


def transport_over(group: ExpertGroup, name: str, topology: Topology | None = None) -> Transport:
    """A transport for the job under way. `topology` is for the hierarchical ones: two nodes, by peer slot, by default.

    Groups that it needs beside `group` are joined here, by all peers, and closed with the job.
    """
    inner = {"chunked": "all_to_all_v", "chunked_hierarchical": "hierarchical"}.get(name, name)
    chunks = 1 if inner == name else 2
    if inner != "hierarchical":
        return transport_named(inner, group, chunks=chunks)
    if topology is None:
        topology = two_nodes(group.spec)
    order, rank = _CURRENT[-1], group.spec.peers[group.peer_slot]
    groups = derive_groups(topology, group.spec)

    def member_of(spec: ProcessGroupSpec) -> ExpertGroup:
        # Every transport of a job meets under a name of its own.
        own = dataclasses.replace(spec, process_group_id=ProcessGroupId(f"{spec.process_group_id}/{len(_BESIDE)}"))
        return join(order.kind, own, rank, order.store, order.seconds)

    relays = member_of(groups.relays) if rank in groups.relays else None
    transport = Hierarchical(group, member_of(groups.local_to(rank)), relays, topology)
    _BESIDE.append(transport)
    return in_chunks(transport, chunks)


def two_nodes(spec: ProcessGroupSpec) -> Topology:
    """The first half of the peers (one more of an odd number) on one node, the rest on another."""
    half = (len(spec) + 1) // 2
    parts = {"node-0": spec.peers[:half], "node-1": spec.peers[half:]}
    return Topology("topology-1", tuple(Domain(name, ranks) for name, ranks in parts.items() if ranks))


class Job:
    """Work that runs on peers right now."""

    def __init__(self, peers: Peers, pipes: dict[int, Connection], epoch: int) -> None:
        self._peers, self._pipes, self._epoch = peers, pipes, epoch
        self._answers: dict[int, tuple[bool, Any]] = {}

    def results(self, *ranks: int) -> list[Any]:
        """What `work` returned on these ranks (all, in peer-slot order, when none is named); raises what it raised."""
        wanted = ranks or tuple(self._pipes)
        deadline = Deadline(JOB_SECONDS)
        while missing := {rank for rank in wanted if rank not in self._answers}:
            ready = wait([self._pipes[rank] for rank in missing], timeout=deadline.left)
            if not ready:
                self._peers.close()
                raise TimeoutError(f"ranks {sorted(missing)} gave no result within {JOB_SECONDS:g} s")
            for rank in missing:
                if self._pipes[rank] in ready:
                    self._receive(rank)
        for rank in wanted:
            succeeded, value = self._answers[rank]
            if not succeeded:
                value.add_note(f"on rank {rank}")
                raise value
        return [self._answers[rank][1] for rank in wanted]

    def _receive(self, rank: int) -> None:
        """One answer; one to an earlier job, which nobody waited for, is passed over."""
        try:
            epoch, answer = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            # The pipe of a killed process closes before the process is over: until then it still looks alive.
            self._peers.bury(rank)
            epoch, answer = self._epoch, (False, RuntimeError("the process died"))
        if epoch == self._epoch:
            self._answers[rank] = answer


class Peers:
    """Processes by global rank, started when a job first needs them, and the store that their groups meet in."""

    def __init__(self) -> None:
        self.kind = "tcp"  # what carries the groups of the next jobs
        self._store = RendezvousStore("127.0.0.1", JOB_SECONDS)
        self._processes: dict[int, _Process] = {}
        self._epochs = 0

    def run(self, work: Callable[..., Any], *args: Any, ranks: Sequence[int], seconds: float = 60.0) -> list[Any]:
        """`work(group, *args)` on every rank, in a new epoch with peers in the order of `ranks`."""
        return self.start(work, *args, ranks=ranks, seconds=seconds).results()

    def start(self, work: Callable[..., Any], *args: Any, ranks: Sequence[int], seconds: float = 60.0) -> Job:
        """The same without waiting for the results. `seconds` is the group's own deadline."""
        self._epochs += 1
        spec = ProcessGroupSpec(GROUP, self._epochs, tuple(GlobalRank(rank) for rank in ranks))
        order = pickle.dumps(_Order(work, args, spec, self._store.address, seconds, self.kind))
        pipes = {rank: self._living(rank).pipe for rank in ranks}
        for pipe in pipes.values():
            pipe.send_bytes(order)
        return Job(self, pipes, self._epochs)

    def _living(self, rank: int) -> _Process:
        held = self._processes.get(rank)
        if held is not None and not held.process.is_alive():
            self.bury(rank)
            held = None
        if held is None:
            self._processes[rank] = held = _start(rank)
        return held

    def bury(self, rank: int) -> None:
        """Forgets a process that has died, or is about to; the next job on the rank starts another one."""
        held = self._processes.pop(rank)
        held.pipe.close()
        held.process.join(timeout=JOB_SECONDS)

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].process.pid
        assert pid is not None
        os.kill(pid, number)

    def close(self) -> None:
        """Ends every process for certain, a stopped one too."""
        for held in self._processes.values():
            held.pipe.close()
            held.process.kill()
        for held in self._processes.values():
            held.process.join(timeout=JOB_SECONDS)
        self._processes.clear()


@pytest.fixture(scope="session")
def peers() -> Peers:
    """One set of processes for all modules that import this fixture."""
    return shared_peers()


@pytest.fixture(scope="module", params=["tcp", "gloo"])
def peers_of_each_kind(request: pytest.FixtureRequest) -> Iterator[Peers]:
    """The same processes, once over each kind of group."""
    shared = shared_peers()
    shared.kind = request.param
    yield shared
    shared.kind = "tcp"


@functools.cache
def shared_peers() -> Peers:
    made = Peers()
    atexit.register(made.close)
    return made


def _start(rank: int) -> _Process:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(rank, theirs), name=f"peer-{rank}", daemon=True)
    process.start()
    theirs.close()
    return _Process(process, ours)


def _serve(rank: int, pipe: Connection) -> None:
    """One peer's life: take an order, join its group, work, answer."""
    torch.set_num_threads(1)
    while True:
        try:
            order = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_answer(rank, order))


def _answer(rank: int, pickled: bytes) -> bytes:
    order: _Order = pickle.loads(pickled)
    try:
        group = join(order.kind, order.spec, GlobalRank(rank), order.store, order.seconds)
        _CURRENT[:] = [order]
        try:
            return pickle.dumps((order.spec.epoch, (True, order.work(group, *order.args))))
        finally:
            for transport in _BESIDE:
                transport.close()
            _BESIDE.clear()
            group.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test that asked for the work gets it
        return pickle.dumps((order.spec.epoch, (False, error)))
