"""Recording rules and alerts, as Prometheus reads them.

The recording rules have the names of the specification's eight metrics (0x0DB) and their values over a whole cluster,
with the cluster as one more label. The alerts are for what an operator has to be woken for, or told in the morning:
each says what it means and what to do first. All are silent on a cluster that serves, busy or idle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_moe.errors import ConfigError
from ray_moe.observe.dashboards.queries import RATIOS, faults, gained, owned, per_second, ratio, summed, total

Json = dict[str, Any]

CRITICAL, WARNING = "critical", "warning"


@dataclass(frozen=True)
class Limits:
    """From where on something is wrong. Times are seconds; ratios as everywhere.

    `window` is what rates are taken over, and `stall` those of steps while requests run: four scrapes at the least.
    `hold` is how long a condition must hold before its alert fires, where the condition has no time of its own.
    """

    window: int = 300
    hold: int = 60
    stall: int = 60
    operation: int = 600
    slow_operation: int = 3600
    drain: int = 900
    imbalance: float = 1.5
    imbalance_hold: int = 1800
    fallback: float = 0.15  # the bound of the promotion gate (specification 0x0DC)
    kv_cache: float = 0.98
    missing: int = 900

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"limit {field.name} must be a number > 0, found {value!r}")
            if field.type == "int" and not isinstance(value, int):
                raise ConfigError(f"limit {field.name} must be whole seconds, found {value!r}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Limits:
        """The defaults with some of them changed; `ConfigError` for a name that is none."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"a limit is one of {', '.join(known)}; found {name!r}")
        return cls(**given)


@dataclass(frozen=True)
class Alert:
    """`seconds` is how long `expr` must have a value before it fires. `summary` and `action` may name labels."""

    name: str
    expr: str
    severity: str
    seconds: int
    summary: str
    action: str

    def to_json(self) -> Json:
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": f"{self.seconds}s"} if self.seconds else {}),
            "labels": {"severity": self.severity, "service": "ray_moe"},
            "annotations": {"summary": self.summary, "description": self.action},
        }


def alerts(limits: Limits) -> tuple[Alert, ...]:
    """Every alert, the most urgent first."""
    window = f"{limits.window}s"
    return (
        Alert(
            "RayMoERankLost",
            f'{_gained("moe_rank_deaths", window)} or max by (cluster) (ray_moe_ranks{{state="lost"}}) > 0',
            CRITICAL,
            0,
            "{{ $labels.cluster }}: an expert actor has died",
            "`ray-moe status` names the rank. Its epoch is broken: what serves is on the other ranks. Restart the"
            " cluster if it does not come back by itself.",
        ),
        Alert(
            "RayMoENotServing",
            'max by (cluster, state) (ray_moe_cluster_state{state=~"degraded|failed"}) == 1',
            CRITICAL,
            limits.hold,
            "{{ $labels.cluster }} is {{ $labels.state }}",
            "Requests fail by name. `ray-moe status` says why.",
        ),
        Alert(
            "RayMoEStepsStalled",
            "sum by (cluster) (ray_moe_requests_running) > 0 and on (cluster)"
            f" {_rate('moe_steps_worked', f'{limits.stall}s')} == 0",
            CRITICAL,
            limits.hold,
            "{{ $labels.cluster }}: requests run and no step ends",
            "A rank or its link hangs. `ray-moe status` shows whose steps stand still; `step_deadline_s` ends it.",
        ),
        Alert(
            "RayMoERoutesDropped",
            faults("moe_routes_dropped", window=window),
            CRITICAL,
            0,
            "{{ $labels.cluster }}: {{ $value }} routes were dropped",
            "The runtime drops none: answers since then may be wrong. `ray-moe ledger` shows an audited invocation;"
            " `ray-moe release rollback` brings the release before back.",
        ),
        Alert(
            "RayMoECountsNotConserved",
            faults("moe_count_conservation_failures", window=window),
            CRITICAL,
            0,
            "{{ $labels.cluster }}: peers disagreed on the rows that they exchange",
            "The step was refused before a row moved. If it comes again a peer computes other plans than the rest:"
            " `ray-moe drain RANK`, or restart.",
        ),
        Alert(
            "RayMoERouteOutputMismatch",
            faults("moe_route_output_mismatches", window=window),
            CRITICAL,
            0,
            "{{ $labels.cluster }}: audited outputs differ from the reference",
            "Answers may be wrong. `ray-moe release rollback` if a release was just promoted; else find the rank by"
            " `ray-moe ledger`.",
        ),
        Alert(
            "RayMoEStaleHandleAccepted",
            faults("moe_stale_handle_acceptances", window=window),
            CRITICAL,
            0,
            "{{ $labels.cluster }}: a dispatch handle of an older generation was accepted",
            "Rows may have gone to slots that hold other experts. Stop changing placements and restart.",
        ),
        Alert(
            "RayMoEOperationStalled",
            f"max by (cluster, kind) (ray_moe_operation_age_seconds) > {limits.operation} unless on (cluster)"
            f" {_rate('moe_migration_bytes', window)} > 0",
            WARNING,
            limits.hold,
            "{{ $labels.cluster }}: a {{ $labels.kind }} is open for {{ $value | humanizeDuration }} and moves nothing",
            "`ray-moe status` says what it waits for. `ray-moe cancel NUMBER` ends one that has published nothing.",
        ),
        Alert(
            "RayMoEOperationSlow",
            f"max by (cluster, kind) (ray_moe_operation_age_seconds) > {limits.slow_operation}",
            WARNING,
            limits.hold,
            "{{ $labels.cluster }}: a {{ $labels.kind }} is open for {{ $value | humanizeDuration }}",
            "It moves bytes, slowly: see `fill_bytes_per_s`, and what `ray-moe rebalance --dry-run` would move.",
        ),
        Alert(
            "RayMoEOperationFailed",
            _gained("moe_operations", window, 'outcome="failed"', by=("cluster", "kind")),
            WARNING,
            0,
            "{{ $labels.cluster }}: a {{ $labels.kind }} failed",
            "Nothing changed: what it had begun was given back. `ray-moe history` has the reason.",
        ),
        Alert(
            "RayMoEDrainTooOld",
            f"max by (cluster) (ray_moe_drain_age_seconds) > {limits.drain}",
            WARNING,
            limits.hold,
            "{{ $labels.cluster }}: a generation drains for {{ $value | humanizeDuration }}",
            "Its slots stay taken, so nothing else can move. `ray-moe status` names who holds it.",
        ),
        Alert(
            "RayMoEImbalance",
            f"max by (cluster, layer_group) (ray_moe_imbalance) > {limits.imbalance} and on (cluster)"
            f" {_rate('moe_tokens', window)} > 0",
            WARNING,
            limits.imbalance_hold,
            "{{ $labels.cluster }}: layers {{ $labels.layer_group }} wait for a rank with {{ $value | humanize }} times"
            " the mean load",
            "`ray-moe rebalance --dry-run` says what evens it out and what that moves; `autopilot` does it by itself.",
        ),
        Alert(
            "RayMoEFallbackSteps",
            f"sum by (cluster, release, phase) ({ratio('moe_fallback_step_ratio', window=window)}) > {limits.fallback}",
            WARNING,
            limits.window,
            "{{ $labels.cluster }}: {{ $value | humanizePercentage }} of {{ $labels.phase }} steps run eagerly",
            "The latency page has the reasons. Often more tokens than the largest of `decode_buckets` takes.",
        ),
        Alert(
            "RayMoEKVCacheFull",
            f"max by (cluster) (ray_moe_kv_blocks_used / ray_moe_kv_blocks_total) > {limits.kv_cache} and on (cluster)"
            " sum by (cluster) (ray_moe_requests_waiting) > 0",
            WARNING,
            limits.window,
            "{{ $labels.cluster }}: requests wait and a rank's KV cache is full",
            "More `kv_blocks`, more ranks (`ray-moe scale`), or fewer `max_decode_rows`.",
        ),
        Alert(
            "RayMoEMetricsMissing",
            f"max by (cluster) (max_over_time(ray_moe_cluster_state[{limits.missing}s])) unless on (cluster)"
            " (max by (cluster) (ray_moe_cluster_state) or max by (cluster)"
            f' (max_over_time(ray_moe_cluster_state{{state="stopped"}}[{limits.missing}s]) == 1))',
            WARNING,
            limits.window,
            "{{ $labels.cluster }}: its controller reports nothing any more",
            "The controller hangs, or Prometheus does not reach it. After `ray-moe down` this ends by itself"
            f" {limits.missing} s later.",
        ),
    )


def recordings(limits: Limits) -> tuple[Json, ...]:
    """The specification's eight metrics over the whole cluster."""
    window = f"{limits.window}s"
    counters = (
        ("route_output_mismatch_counter", "moe_route_output_mismatches", ("release", "phase")),
        ("stale_handle_acceptance_counter", "moe_stale_handle_acceptances", ("release", "placement_generation")),
        ("count_conservation_counter", "moe_count_conservation_failures", ("release", "process_group_generation")),
    )
    return (
        *({"record": name, "expr": ratio(name, window=window)} for name in RATIOS),
        *(
            {"record": name, "expr": summed(owned(total(counter), window=window), "cluster", *labels)}
            for name, counter, labels in counters
        ),
    )


def rules(limits: Limits | None = None) -> Json:
    """The document of a rule file."""
    limits = limits or Limits()
    return {
        "groups": [
            {"name": "ray_moe_ratios", "rules": [*recordings(limits)]},
            {"name": "ray_moe_alerts", "rules": [alert.to_json() for alert in alerts(limits)]},
        ]
    }


def _rate(name: str, window: str) -> str:
    return per_second(name, "cluster", matchers=(), window=window)


def _gained(name: str, window: str, *matchers: str, by: Sequence[str] = ("cluster",)) -> str:
    return summed(gained(name, *matchers, window=window), *by)
