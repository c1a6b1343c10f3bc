"""Where a token's time goes, from the client's side to the step: the page for slowness."""

from __future__ import annotations

from ray_moe.observe.dashboards.model import CLUSTER, RANK, Dashboard, Panel, Query, Row
from ray_moe.observe.dashboards.queries import (
    THIS_CLUSTER,
    latest,
    owned,
    per_second,
    quantile,
    rate,
    ratio,
    selector,
    summed,
)

_RANK = 'rank=~"$rank"'
_OF_RANKS = (THIS_CLUSTER, _RANK)


def _quantiles(name: str) -> tuple[Query, ...]:
    return tuple(
        Query(quantile(part, name), legend) for part, legend in ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
    )


FIRST_TOKEN = Panel(
    "Time to first token",
    _quantiles("moe_http_first_token_seconds"),
    "Seen by Serve's replicas, queues included.",
    unit="s",
)
TOKEN = Panel(
    "Time per token after the first",
    _quantiles("moe_http_token_seconds"),
    "Each answer's mean, seen by Serve's replicas.",
    unit="s",
)
REQUEST = Panel(
    "Time per request",
    _quantiles("moe_http_request_seconds"),
    "Until the last token, of answers that were completed.",
    unit="s",
)
HTTP_QUEUE = Panel(
    "In the replicas",
    (
        Query(summed(selector("moe_http_running", THIS_CLUSTER)), "running"),
        Query(summed(selector("moe_http_queued", THIS_CLUSTER)), "queued"),
    ),
    "Generations that run, and requests that wait for their turn.",
    width=6,
)
REFUSALS = Panel(
    "Refused or left, per second",
    (
        Query(per_second("moe_http_refusals", "reason"), "refused: {{reason}}"),
        Query(per_second("moe_http_cancelled"), "left before the end"),
    ),
    "Requests that never ran, and answers that ended before they were complete.",
    unit="reqps",
    width=6,
)
HTTP_TOKENS = Panel(
    "Tokens over HTTP per second",
    (
        Query(per_second("moe_http_prompt_tokens"), "prompt"),
        Query(per_second("moe_http_completion_tokens"), "completion"),
    ),
    "Taken in, and delivered with answers that have ended.",
    width=6,
)
OUTSTANDING = Panel(
    "Tokens owed, by rank",
    (Query(latest("moe_outstanding_tokens", "rank", matchers=_OF_RANKS), "rank {{rank}}"),),
    "What the rank's open requests may still ask for. New requests go where it is least.",
    width=6,
)

BETWEEN = Panel(
    "Time between tokens, in the engine",
    _quantiles("moe_inter_token_seconds"),
    "From one token of a request to its next, as the engines commit them. Observations are a sample of the steps.",
    unit="s",
)
STEP = Panel(
    "Step time",
    _quantiles("moe_step_seconds"),
    "Steps with work in them, all ranks; observations are a sample. What p99 has over the median is prompts, switches,"
    " a slow rank.",
    unit="s",
)
MEAN_STEP = Panel(
    "Mean step time, by rank",
    (
        Query(
            f"{per_second('moe_step_seconds_sum', 'rank', matchers=_OF_RANKS)}"
            f" / ({per_second('moe_steps_worked', 'rank', matchers=_OF_RANKS)} > 0)",
            "rank {{rank}}",
        ),
    ),
    "Exact, from totals.",
    unit="s",
)
AGREEMENT = Panel(
    "Waiting for the agreement",
    (
        Query(
            f"{per_second('moe_agreement_seconds', 'rank', matchers=_OF_RANKS)}"
            f" / ({per_second('moe_step_seconds_sum', 'rank', matchers=_OF_RANKS)} > 0)",
            "rank {{rank}}",
        ),
    ),
    "Share of step time that a rank waits for the others' records. The rank that waits least is the slow one.",
    unit="percentunit",
)
REPLAYED = Panel(
    "Replayed decode steps",
    (Query(ratio("moe_graph_replay_ratio", THIS_CLUSTER), "{{phase}} {{graph}}"),),
    "moe_graph_replay_ratio: replays over replays and fallbacks, by captured executable. What is missing to 1"
    " ran eagerly.",
    unit="percentunit",
    most=1,
)
REASONS = Panel(
    "Fallback steps per second, by reason",
    (
        Query(
            summed(owned(rate("moe_fallback_steps"), THIS_CLUSTER), "phase", "reason"),
            "{{phase}}: {{reason}}",
        ),
    ),
    "Steps that ran eagerly though an executable was there.",
)
STEPS = Panel(
    "Steps per second, by phase",
    (Query(summed(owned(rate("moe_steps"), THIS_CLUSTER), "phase"), "{{phase}}"),),
    "Prompts, decoding, and single layers for other programs, over all ranks.",
)

LATENCY = Dashboard(
    "ray-moe-latency",
    "latency",
    "Time to first token, between tokens and per step, and what takes it.",
    (
        Row("Clients, over HTTP", (FIRST_TOKEN, TOKEN, REQUEST, HTTP_QUEUE, REFUSALS, HTTP_TOKENS, OUTSTANDING)),
        Row("Engine", (BETWEEN, STEP, MEAN_STEP, AGREEMENT, REPLAYED, REASONS, STEPS)),
    ),
    (CLUSTER, RANK),
)
