"""Metrics by name: what is counted over what, and which bounded labels tell series apart (specification 0x0DB).

Declarations only. Actors and serve export them (`ray_moe.actors.exporter`), and check every set of labels here before
they do: a label outside the schema would make the observability system a second unbounded workload.

`SERIES_CAP` is what a cluster of any model exports at most, on up to `CAPPED_RANKS` ranks and `CAPPED_REPLICAS` HTTP
replicas: the budgets of their processes add up to it. A rank more is `RANK_SERIES` more. A histogram is as many series
as Prometheus makes of it. Ray names a metric `ray_` and its name here, a counter with `_total` behind it, and adds
labels that say which process it is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ray_moe.errors import ConfigError


@dataclass(frozen=True)
class Label:
    """How many values a label may take in one process at a time; `values` where they are known beforehand."""

    cap: int
    values: tuple[str, ...] = ()


LABELS: Mapping[str, Label] = {
    "release": Label(cap=8),
    "phase": Label(cap=3, values=("prefill", "decode", "bare")),
    "topology": Label(cap=8),
    "graph": Label(cap=64),  # one for each captured executable
    "reason": Label(cap=16),  # why a step did not replay
    "placement_generation": Label(cap=8),
    "process_group_generation": Label(cap=8),
}
# Longer than any value that names a release, a generation or a reason; prompts are not.
LABEL_LENGTH = 128


@dataclass(frozen=True)
class Metric:
    """A ratio of two counts, or a counter where `denominator` is None.

    A ratio is exported as a gauge, and as its two `counts` by the names of their counters; of a counter it is one.
    """

    name: str
    numerator: str
    denominator: str | None
    labels: tuple[str, ...]
    counts: tuple[str, ...]


_RELEASE = ("release", "phase")
_ACCEPTED = "accepted routes"
METRICS: Mapping[str, Metric] = {
    name: Metric(name, over, under, labels, tuple(f"moe_{count}" for count in counts.split()))
    for name, over, under, labels, counts in (
        ("moe_route_drop_ratio", "dropped routes", "attempted routes", _RELEASE, "routes_dropped routes_attempted"),
        ("moe_remote_route_ratio", "remote routes", _ACCEPTED, _RELEASE, "routes_remote routes_accepted"),
        (
            *("moe_inter_node_route_ratio", "inter-node routes", _ACCEPTED, (*_RELEASE, "topology")),
            "routes_inter_node routes_accepted_by_topology",
        ),
        (
            *("moe_graph_replay_ratio", "graph replays", "replay + fallback", (*_RELEASE, "graph")),
            "graph_replays graph_fallbacks",
        ),
        (
            *("moe_fallback_step_ratio", "fallback steps", "all steps", (*_RELEASE, "reason")),
            "fallback_steps steps",
        ),
        ("route_output_mismatch_counter", "mismatches", None, _RELEASE, "route_output_mismatches"),
        (
            *("stale_handle_acceptance_counter", "accepted stale handles", None, ("release", "placement_generation")),
            "stale_handle_acceptances",
        ),
        (
            *("count_conservation_counter", "failures", None, ("release", "process_group_generation")),
            "count_conservation_failures",
        ),
    )
}

# -- What is exported


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Exported:
    """One exported metric. `bounds` are a histogram's upper bucket bounds, in the metric's unit. A process exports at
    `most` so many sets of its labels, where their caps alone would allow for many more."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = ()
    most: int | None = None

    @property
    def series(self) -> int:
        """How many series Prometheus makes of one set of labels: of a histogram its buckets, sum and count."""
        return len(self.bounds) + 3 if self.kind is Kind.HISTOGRAM else 1


# What else tells series apart.
OTHER_LABELS: Mapping[str, Label] = {
    "cluster": Label(cap=1),
    "rank": Label(cap=1),
    "state": Label(cap=8),
    "layer": Label(cap=8),
    "expert": Label(cap=64),
    "layer_group": Label(cap=8),
    "stat": Label(cap=3, values=("min", "mean", "max")),
    "kind": Label(cap=3, values=("rebalance", "grow", "shrink")),
    "outcome": Label(cap=3, values=("done", "failed", "cancelled")),
    "stage": Label(cap=10),
    "source": Label(cap=2, values=("peer", "checkpoint")),
    "route": Label(cap=16),
    "status": Label(cap=8),
}
# What a counter's label becomes when it has as many values as it may: their sum stays exact.
OTHER = "other"
# In place of a graph's name: a unit that none took.
NO_GRAPH = "none"

_STEP_BOUNDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_PAUSE_BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0)
_ANSWER_BOUNDS = (0.05, 0.25, 1.0, 5.0, 20.0)
_TOKEN_BOUNDS = (0.005, 0.02, 0.05, 0.1, 0.5)


def _table(
    kind: Kind, labels: tuple[str, ...], rows: str, bounds: tuple[float, ...] = (), most: int | None = None
) -> tuple[Exported, ...]:
    """A metric a line: name without its prefix, unit, help."""
    parts = [line.split(maxsplit=2) for line in rows.strip().splitlines()]
    return tuple(Exported(f"moe_{name}", kind, unit, told, labels, bounds, most) for name, unit, told in parts)


_RANK, _CLUSTER = ("cluster", "rank"), ("cluster",)

# The cluster's sums over its ranks, those that have left among them; exported by the controller.
_OF_RELEASES = (
    *(
        Exported(metric.name, Kind.GAUGE, "ratio", f"{metric.numerator} over {metric.denominator}.", metric.labels)
        for metric in METRICS.values()
        if metric.denominator is not None
    ),
    *_table(
        Kind.COUNTER,
        _RELEASE,
        """
        routes_attempted         routes       Routes that routers gave to layers that ran.
        routes_dropped           routes       Attempted routes that no handle of their invocation carried.
        routes_accepted          routes       Routes that were dispatched and combined.
        routes_remote            routes       Accepted routes whose expert was on another rank.
        routes_windowed          routes       Accepted routes of which only the device knows where they went.
        steps                    steps        Steps that ran a unit of this phase, on every rank.
        route_output_mismatches  invocations  Audited layer invocations whose routes or rows were not those that left.
        """,
    ),
    *_table(
        Kind.COUNTER,
        (*_RELEASE, "topology"),
        """
        routes_inter_node            routes  Accepted routes whose expert was on another node.
        routes_accepted_by_topology  routes  Accepted routes, without windowed ones, by nodes x ranks.
        """,
    ),
    *_table(
        Kind.COUNTER,
        (*_RELEASE, "graph"),
        """
        graph_replays    invocations  Layer invocations that a captured executable ran.
        graph_fallbacks  invocations  Layer invocations that could have been replayed, and were not.
        """,
    ),
    *_table(
        Kind.COUNTER,
        (*_RELEASE, "reason"),
        "fallback_steps  steps  Steps in which a layer fell back, on every rank, by the reason of the first one.",
    ),
    *_table(
        Kind.COUNTER,
        ("release", "placement_generation"),
        "stale_handle_acceptances  handles  Handles that were combined under another generation or epoch than theirs.",
    ),
    *_table(
        Kind.COUNTER,
        ("release", "process_group_generation"),
        "count_conservation_failures  invocations  Layer invocations on whose counts a rank found the ranks to differ.",
    ),
)

_OF_A_RANK = (
    *_table(
        Kind.COUNTER,
        _RANK,
        """
        tokens             tokens   Tokens that the engine gave to requests.
        steps_worked       steps    Steps that ran a unit.
        step_seconds_sum   seconds  Wall time of steps that ran a unit.
        agreement_seconds  seconds  Of it, the wait for the next step's agreement.
        rows_local         rows     Rows of this rank's routes whose expert was here.
        rows_sent          rows     Rows that left for other ranks' experts.
        rows_received      rows     Rows that came from other ranks.
        bytes_sent         bytes    Bytes that the group counted as sent.
        bytes_received     bytes    Bytes that the group counted as received.
        bare_calls         calls    Calls of single layers that were computed.
        """,
    ),
    *_table(
        Kind.GAUGE,
        _RANK,
        """
        requests_running    requests    Requests that run.
        requests_waiting    requests    Requests that wait to be admitted.
        outstanding_tokens  tokens      Tokens that are still owed, of prompts and of answers.
        kv_blocks_used      blocks      KV cache blocks in use.
        kv_blocks_total     blocks      KV cache blocks there are.
        slots_resident      slots       Pool slots that hold an expert, over all layers.
        slot_bytes          bytes       Bytes of the experts in them.
        generation          generation  The placement generation that this rank serves.
        epoch               epoch       The epoch of its group.
        committed_step      step        The last step that is done.
        """,
    ),
    *_table(
        Kind.HISTOGRAM,
        _RANK,
        """
        step_seconds         seconds  Steps that ran a unit, sampled.
        inter_token_seconds  seconds  Between two steps in a row that gave tokens, sampled.
        """,
        _STEP_BOUNDS,
    ),
)

_OF_A_CLUSTER = (
    *_table(
        Kind.GAUGE,
        (*_CLUSTER, "state"),
        """
        cluster_state  bool      1 for the state that the cluster is in.
        ranks          ranks     Ranks that serve, that join, and that died.
        releases       releases  Releases that the registry knows.
        """,
    ),
    *_table(
        Kind.GAUGE,
        _CLUSTER,
        """
        generations_live   generations  Placement generations that are not retired.
        drain_age_seconds  seconds      Since the oldest generation that drains began to, but held ones; 0 without.
        demand_age_steps   steps        Steps since the window that the estimate of demand is of.
        """,
    ),
    *_table(
        Kind.COUNTER,
        _CLUSTER,
        """
        rank_deaths      ranks  Ranks that died.
        migration_slots  slots  Slots that operations filled.
        """,
    ),
    *_table(Kind.COUNTER, (*_CLUSTER, "source"), "migration_bytes  bytes  Bytes of experts that operations moved."),
    *_table(
        Kind.GAUGE,
        (*_CLUSTER, "layer", "expert"),
        "expert_load_share  ratio  An expert's share of its layer's routes: the hottest, of layers evenly spread.",
        most=72,  # twice what is shown at a time: those that it was before disappear slowly
    ),
    *_table(
        Kind.GAUGE,
        (*_CLUSTER, "layer_group"),
        "imbalance  ratio  The fullest rank's load over the mean, in the worst layer of the group.",
    ),
    *_table(
        Kind.GAUGE,
        (*_CLUSTER, "layer_group", "stat"),
        "expert_replicas  copies  Copies of one expert, in the layers of the group.",
    ),
    *_table(Kind.COUNTER, (*_CLUSTER, "kind", "outcome"), "operations  operations  Operations that have ended."),
    *_table(Kind.GAUGE, (*_CLUSTER, "kind", "stage"), "operations_open  operations  Operations that have not ended."),
    *_table(
        Kind.GAUGE,
        (*_CLUSTER, "kind"),
        "operation_age_seconds  seconds  Since the oldest open one was asked for; 0 without.",
    ),
    *_table(
        Kind.HISTOGRAM,
        _CLUSTER,
        "switch_pause_seconds  seconds  The longest that one of an operation's switches kept a rank's step.",
        _PAUSE_BOUNDS,
    ),
)

_OF_A_REPLICA = (
    *_table(Kind.COUNTER, (*_CLUSTER, "route", "status"), "http_requests  requests  Requests answered.", most=20),
    *_table(Kind.COUNTER, (*_CLUSTER, "reason"), "http_refusals  requests  Requests refused before they ran.", most=8),
    *_table(
        Kind.COUNTER,
        _CLUSTER,
        """
        http_prompt_tokens      tokens   Prompt tokens taken in.
        http_completion_tokens  tokens   Tokens delivered.
        http_cancelled          answers  Answers that ended before they were complete.
        """,
    ),
    *_table(
        Kind.GAUGE,
        _CLUSTER,
        """
        http_running  generations  Generations that run.
        http_queued   requests     Requests that wait for their turn.
        """,
    ),
    *_table(
        Kind.HISTOGRAM,
        _CLUSTER,
        """
        http_first_token_seconds  seconds  Until the first token, sampled.
        http_request_seconds      seconds  Until the last token, sampled.
        """,
        _ANSWER_BOUNDS,
    ),
    *_table(
        Kind.HISTOGRAM,
        _CLUSTER,
        "http_token_seconds  seconds  Per token after the first, sampled.",
        _TOKEN_BOUNDS,
    ),
)

REFUSED = "moe_series_refused"
_OF_EACH = _table(
    Kind.COUNTER, _CLUSTER, "series_refused  series  Series that this process did not export, or not by their labels."
)

EXPORTED: Mapping[str, Exported] = {
    metric.name: metric for metric in (*_OF_RELEASES, *_OF_A_RANK, *_OF_A_CLUSTER, *_OF_A_REPLICA, *_OF_EACH)
}

# -- How many series

SERIES_CAP, CAPPED_RANKS, CAPPED_REPLICAS = 2000, 64, 2
# Steps are in lockstep: the histograms of the first seats of a group are those of all.
HISTOGRAM_SEATS = 8
RANK_SERIES = 21
# What one process of each kind may export.
RANK_BUDGET, CONTROLLER_BUDGET, REPLICA_BUDGET = 39, 368, 72


def check_labels(metric: str, labels: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless `metric` exists and `labels` are exactly its own, with values that they may have."""
    found = METRICS.get(metric) or EXPORTED.get(metric)
    if found is None:
        raise ConfigError(f"metric must be one of {', '.join({**METRICS, **EXPORTED})}, found {metric!r}")
    asked = found.labels
    for name in labels:
        if name not in asked:
            raise ConfigError(f"metric {metric}: label {name!r} is outside its schema: {', '.join(asked)}")
    for name in asked:
        if name not in labels:
            raise ConfigError(f"metric {metric}: label {name!r} is missing")
        value, known = labels[name], label(name).values
        if known and value not in known:
            raise ConfigError(f"metric {metric}: label {name} must be one of {', '.join(known)}, found {value[:40]!r}")
        if not 0 < len(value) <= LABEL_LENGTH:
            raise ConfigError(
                f"metric {metric}: label {name} must have 1 to {LABEL_LENGTH} characters, found {len(value)}"
            )


def label(name: str) -> Label:
    """The bounds of a label that some metric has."""
    return LABELS.get(name) or OTHER_LABELS[name]
