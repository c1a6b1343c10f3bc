"""What a cluster holds between two changes, and what a change of its placement moved and may take: slots, processes,
memory, descriptors, threads, actors, reserved room. Everything runs on this machine, started by this process."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import ray

from ray_moe.actors.remote import NAMESPACE, find_expert
from ray_moe.actors.reports import ClusterStatus
from ray_moe.cluster import Cluster
from ray_moe.controlplane.effects import Peer
from ray_moe.controlplane.generations import State
from ray_moe.deadline import Deadline, pause, ray_get
from ray_moe.placement import PlacementSnapshot

_ASK_S, _SETTLE_S, _LOOK_S = 20.0, 30.0, 0.1
# Ray sets the title of a worker process to the class of its actor.
_KINDS = {"ray::ControllerActor": "controller", "ray::RoutingActor": "routing", "ray::IDLE": "spare workers"}


# -- A change of placement


@dataclass(frozen=True)
class Change:
    """From one placement to the next. A slot has moved when it holds what it did not hold before.

    `moved` is by layer the share of the new placement's slots; `replaced` are the layers of which no physical slot
    (rank and pool slot) is in both placements, so that whatever a token routes to there is served by another slot.
    `peak_bytes` is by rank what the plan needs: the slots of both, each counted once (specification 0x08F).
    """

    moved: Mapping[int, float]
    replaced: tuple[int, ...]
    peak_bytes: Mapping[int, int]

    @staticmethod
    def between(before: PlacementSnapshot, after: PlacementSnapshot, expert_bytes: int) -> Change:
        moved, replaced = {}, []
        places: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for layer, placement in after.layer.items():
            old, new = _held(before, layer), _held(after, layer)
            moved[layer] = len(new.items() - old.items()) / len(placement.slots)
            if not new.keys() & old.keys():
                replaced.append(layer)
            for rank, pool_slot in new.keys() | old.keys():
                places[rank].add((layer, pool_slot))
        return Change(moved, tuple(replaced), {rank: len(slots) * expert_bytes for rank, slots in places.items()})


def _held(snapshot: PlacementSnapshot, layer: int) -> dict[tuple[int, int], int]:
    """(rank, pool slot) -> expert."""
    return {
        (slot.destination_rank.value, slot.pool_slot): slot.logical_expert_id.value
        for slot in snapshot.layer[layer].slots
    }


def settled(cluster: Cluster) -> tuple[ClusterStatus, PlacementSnapshot]:
    """Wait until one generation is live and no slot is resident beyond its own. Raises `DeadlineError`."""
    deadline = Deadline(_SETTLE_S)
    while True:
        status, active = cluster.status(), cluster.placement()
        live = [row for row in status.generations if row.state is not State.RETIRED]
        if len(live) == 1 and _resident_slots(status) == active.num_slots:
            return status, active
        deadline.check(f"{len(live)} live generations, {_resident_slots(status)} slots of {active.num_slots}")
        pause(_LOOK_S)


def _resident_slots(status: ClusterStatus) -> int:
    return sum(sum(peer.resident_slots.values()) for peer in status.peers)


# -- What is there


@dataclass(frozen=True)
class Process:
    """One process: resident bytes, open descriptors, threads."""

    rss_bytes: int
    descriptors: int
    threads: int

    @staticmethod
    def read(pid: int) -> Process:
        """Raises `OSError` when it has ended."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        return Process(
            rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(status["Threads"]),
        )


@dataclass(frozen=True)
class Sample:
    """Everything between two changes. `processes` are sums by kind; `peers` is by rank."""

    processes: Mapping[str, Mapping[str, int]]
    peers: Mapping[int, Mapping[str, Any]]
    resident_slots: int
    placement_slots: int
    resident_bytes: int
    live_generations: int
    actors: int
    rooms: int

    @staticmethod
    def take(cluster: Cluster, status: ClusterStatus, active: PlacementSnapshot) -> Sample:
        ranks = [peer.rank for peer in status.peers]
        actors = [find_expert(cluster.name, rank) for rank in ranks]
        pids: list[int] = ray_get([actor.pid.remote() for actor in actors], _ASK_S, "process ids")
        reports: list[Peer] = ray_get([actor.report.remote(False) for actor in actors], _ASK_S, "reports")
        known = dict.fromkeys(pids, "experts")
        tree = _below(os.getpid())
        peers = {}
        for rank, pid, report in zip(ranks, pids, reports, strict=True):
            peers[rank] = {**asdict(Process.read(pid)), "epochs": len(report.epochs), "requests": report.requests}
        return Sample(
            processes=_summed({pid: known.get(pid, _kind(pid)) for pid in (*tree, os.getpid())}),
            peers=peers,
            resident_slots=_resident_slots(status),
            placement_slots=active.num_slots,
            resident_bytes=sum(peer.resident_bytes for peer in status.peers),
            live_generations=sum(row.state is not State.RETIRED for row in status.generations),
            actors=sum(
                found["namespace"] == NAMESPACE and found["name"].startswith(f"{cluster.name}.")
                for found in ray.util.list_named_actors(all_namespaces=True)
            ),
            rooms=sum(
                room["name"].startswith(f"{cluster.name}.") and room["state"] != "REMOVED"
                for room in ray.util.placement_group_table().values()
            ),
        )

    def numbers(self) -> dict[str, int]:
        """As one level of names."""
        flat = {f"{kind} {name}": value for kind, values in self.processes.items() for name, value in values.items()}
        epochs = sum(peer["epochs"] for peer in self.peers.values())
        for name in ("resident_slots", "resident_bytes", "live_generations", "actors", "rooms"):
            flat[name] = getattr(self, name)
        return {**flat, "epochs": epochs}


def first_and_last(samples: Sequence[Sample], count: int = 5) -> dict[str, dict[str, float]]:
    """The means of the first and of the last `count` samples (of half of them, where there are few), by name."""
    count = max(1, min(count, len(samples) // 2))
    numbers = [sample.numbers() for sample in samples]
    names = dict.fromkeys(name for each in numbers for name in each)
    ends = {"first": numbers[:count], "last": numbers[-count:]} if numbers else {}
    return {name: {end: mean(each.get(name, 0) for each in some) for end, some in ends.items()} for name in names}


def growth_of_survivors(samples: Sequence[Sample]) -> dict[str, float]:
    """Bytes of resident memory that a rank gained per cycle that it stayed through, over the ranks that did."""
    seen: dict[int, list[int]] = defaultdict(list)
    for sample in samples:
        for rank, peer in sample.peers.items():
            seen[rank].append(peer["rss_bytes"])
    stayed = [sizes for sizes in seen.values() if len(sizes) > 1]
    if not stayed:
        return {}
    gained, cycles = sum(sizes[-1] - sizes[0] for sizes in stayed), sum(len(sizes) - 1 for sizes in stayed)
    return {"ranks": len(stayed), "cycles": cycles, "bytes_per_cycle": gained / cycles}


def _summed(kind_of: Mapping[int, str]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for pid, kind in kind_of.items():
        try:
            read = asdict(Process.read(pid))
        except (OSError, KeyError):  # it has ended meanwhile: a process without memory has no VmRSS
            continue
        into = sums.setdefault(kind, {"processes": 0, **dict.fromkeys(read, 0)})
        into["processes"] += 1
        for name, value in read.items():
            into[name] += value
    return sums


def _kind(pid: int) -> str:
    if pid == os.getpid():
        return "client"
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return "ray"
    return next((kind for start, kind in _KINDS.items() if title.startswith(start)), "ray")


def _below(ancestor: int) -> list[int]:
    """All processes that descend from one."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid, parent in _parents():
        children[parent].append(pid)
    found, open_still = [], [ancestor]
    while open_still:
        some = children[open_still.pop()]
        found += some
        open_still += some
    return found


def _parents() -> Iterable[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        yield int(entry.name), int(after_name[1])
