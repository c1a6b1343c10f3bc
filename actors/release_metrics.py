"""The specification's eight metrics (0x0DB), of the whole cluster: sums of what ranks have counted, by release."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from typing import Any

from ray_moe.actors.exporter import Exporter
from ray_moe.dataplane.phases import PHASES, FallbackReason
from ray_moe.engine.state import ReleaseCounts, Tallies
from ray_moe.metrics import LABELS, NO_GRAPH, OTHER

# Counted, and expected never to rise: a process that takes over exports what was counted before it, rather twice than
# never.
_FAILURES = ("dropped", "mismatches", "stale", "unconserved")
_DECODE = "decode"
_CAPTURED = tuple(reason for reason in FallbackReason if reason is not FallbackReason.PHASE_NOT_DECODE)

_Counts = dict[str, Counter[Any]]


class ReleaseTotals:
    """Totals since this process began, of ranks that have left among them. `restarted`: what a rank had counted when it
    is first heard of is another process's to have exported."""

    def __init__(self, *, restarted: bool = False) -> None:
        self._restarted = restarted
        self._heard: dict[int, Mapping[str, _Counts]] = {}  # by rank and release
        self._totals: dict[str, _Counts] = {}
        self._now: dict[str, Tallies] = {}  # by release that serves somewhere
        self._named: dict[str, list[int]] = {"placement_generation": [], "process_group_generation": []}

    def take(self, told: Tallies) -> None:
        """What a rank has counted by now."""
        counted = {release: _flat(counts) for release, counts in told.releases.items()}
        before, known = self._heard.get(told.rank, {}), told.rank in self._heard or not self._restarted
        for release, counts in counted.items():
            total = self._totals.setdefault(release, defaultdict(Counter))
            past: Mapping[str, Counter[Any]] = before.get(release, {})
            for name, now in counts.items():
                if known or name in _FAILURES:
                    old = past.get(name, Counter())
                    total[name].update({key: count - old[key] for key, count in now.items()})
        self._heard[told.rank] = counted
        self._now[told.release] = told

    def keep(self, ranks: Container[int]) -> None:
        """Ranks that are not among these have ended; what they counted stays in the totals."""
        self._heard = {rank: counted for rank, counted in self._heard.items() if rank in ranks}

    def push(self, export: Exporter) -> None:
        """Failures first: whatever else finds no room any more, they do."""
        for release, total in self._totals.items():
            self._push_failures(export, release, total)
        for release, total in self._totals.items():
            self._push_routes(export, release, total)
            _push_graphs(export, release, total)
            _push_steps(export, release, total)

    def _push_failures(self, export: Exporter, release: str, total: _Counts) -> None:
        for phase in PHASES:
            export.count("moe_routes_dropped", total["dropped"][phase], release=release, phase=phase)
            export.count("moe_route_output_mismatches", total["mismatches"][phase], release=release, phase=phase)
        serves = self._now.get(release)
        label, counts = "placement_generation", total["stale"]
        for name, count in self._by_name(label, counts, serves.generation if serves else None).items():
            export.count("moe_stale_handle_acceptances", count, release=release, placement_generation=name)
        label, counts = "process_group_generation", total["unconserved"]
        for name, count in self._by_name(label, counts, serves.epoch if serves else None).items():
            export.count("moe_count_conservation_failures", count, release=release, process_group_generation=name)

    def _by_name(self, label: str, counts: Counter[int], now: int | None) -> Counter[str]:
        """Counts by generation, 0 for the one that serves; those that came after as many as a label may have go by one
        name together."""
        named, found = self._named[label], Counter({} if now is None else {now: 0})
        found.update(counts)
        sums: Counter[str] = Counter()
        for number in sorted(found):
            if number not in named and len(named) < LABELS[label].cap:
                named.append(number)
            sums[str(number) if number in named else OTHER] += found[number]
        return sums

    def _push_routes(self, export: Exporter, release: str, total: _Counts) -> None:
        topologies = {topology for _, topology in total["accepted"]}
        if release in self._now:
            topologies.add(self._now[release].topology)
        for phase in PHASES:
            of = {"release": release, "phase": phase}
            seen = 0
            for topology in sorted(topologies):
                accepted, away = total["accepted"][phase, topology], total["inter_node"][phase, topology]
                export.count("moe_routes_accepted_by_topology", accepted, **of, topology=topology)
                export.count("moe_routes_inter_node", away, **of, topology=topology)
                if accepted:
                    export.set("moe_inter_node_route_ratio", away / accepted, **of, topology=topology)
                seen += accepted
            windowed, remote, attempted = (total[name][phase] for name in ("windowed", "remote", "attempted"))
            export.count("moe_routes_attempted", attempted, **of)
            export.count("moe_routes_accepted", seen + windowed, **of)
            export.count("moe_routes_remote", remote, **of)
            if windowed:
                export.count("moe_routes_windowed", windowed, **of)
            if attempted:
                export.set("moe_route_drop_ratio", total["dropped"][phase] / attempted, **of)
            if seen:
                export.set("moe_remote_route_ratio", remote / seen, **of)


def _push_graphs(export: Exporter, release: str, total: _Counts) -> None:
    of = {"release": release, "phase": _DECODE}
    fallbacks = total["fallbacks"].total()
    export.count("moe_graph_fallbacks", fallbacks, **of, graph=NO_GRAPH)
    whole = total["replays"].total() + fallbacks
    for graph, replays in total["replays"].items():
        export.count("moe_graph_replays", replays, **of, graph=graph)
    if whole:
        for graph, replays in (total["replays"] or Counter({NO_GRAPH: 0})).items():
            export.set("moe_graph_replay_ratio", replays / whole, **of, graph=graph)


def _push_steps(export: Exporter, release: str, total: _Counts) -> None:
    for phase in PHASES:
        export.count("moe_steps", total["steps"][phase], release=release, phase=phase)
    counts: Counter[tuple[str, str]] = Counter({(_DECODE, str(reason)): 0 for reason in _CAPTURED})
    counts.update({(unit, str(reason)): count for (unit, reason), count in total["fallback_steps"].items()})
    for (unit, reason), fallen in counts.items():
        of = {"release": release, "phase": unit, "reason": reason}
        export.count("moe_fallback_steps", fallen, **of)
        if steps := total["steps"][unit]:
            export.set("moe_fallback_step_ratio", fallen / steps, **of)


def _flat(counts: ReleaseCounts) -> _Counts:
    units = counts.units
    return {
        **vars(counts.routes),
        "fallbacks": counts.fallbacks,
        "steps": units.steps,
        "fallback_steps": units.fallbacks,
    }
