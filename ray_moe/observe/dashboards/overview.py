"""Is it serving, how much, and is anything wrong that must never be: the page that stays open."""

from __future__ import annotations

from ray_moe.observe.dashboards.model import Dashboard, Panel, Query, Row, Shape
from ray_moe.observe.dashboards.queries import (
    THIS_CLUSTER,
    faults,
    latest,
    per_second,
    quantile,
    ratio,
    selector,
    summed,
    total,
)

_ERRORS = ((1, "red"),)

STATE = Panel(
    "Cluster",
    (Query(f"{latest('moe_cluster_state', 'state')} == 1", "{{state}}"),),
    "Where the cluster stands. Degraded: a rank is lost and its epoch is broken; requests fail by name.",
    shape=Shape.NUMBER,
    width=4,
    height=4,
    by_name=True,
)
RANKS = Panel(
    "Ranks that serve",
    (Query(latest("moe_ranks", matchers=(THIS_CLUSTER, 'state="serving"')), "serving"),),
    "Expert actors that take part in steps.",
    shape=Shape.NUMBER,
    width=4,
    height=4,
)
LOST = Panel(
    "Ranks lost",
    (Query(latest("moe_ranks", matchers=(THIS_CLUSTER, 'state="lost"')), "lost"),),
    "Expert actors that have died and were not replaced.",
    shape=Shape.NUMBER,
    steps=_ERRORS,
    width=4,
    height=4,
)
GENERATION = Panel(
    "Placement generation",
    (Query(latest("moe_generation"), "generation"),),
    "The newest that a rank serves; every change of a placement is one more.",
    shape=Shape.NUMBER,
    width=4,
    height=4,
)
EPOCH = Panel(
    "Epoch",
    (Query(latest("moe_epoch"), "epoch"),),
    "One life of the ranks' group; every rank that comes or goes begins another.",
    shape=Shape.NUMBER,
    width=4,
    height=4,
)
OPEN = Panel(
    "Operations under way",
    (Query(f"sum({latest('moe_operations_open', 'kind', 'stage')}) or vector(0)", "open"),),
    "Rebalances, grows and shrinks that have not ended; the elasticity page has their stages.",
    shape=Shape.NUMBER,
    width=4,
    height=4,
)

TOKENS = Panel(
    "Tokens per second, by rank",
    (Query(per_second("moe_tokens", "rank"), "rank {{rank}}"),),
    "Tokens that were sampled and committed.",
    unit="short",
    stacked=True,
)
REQUESTS = Panel(
    "Requests",
    (
        Query(summed(selector("moe_requests_running", THIS_CLUSTER)), "running"),
        Query(summed(selector("moe_requests_waiting", THIS_CLUSTER)), "waiting"),
    ),
    "In the engines. Waiting ones have no decode row or no KV blocks yet.",
)
KV = Panel(
    "KV cache used, by rank",
    (
        Query(
            f"{latest('moe_kv_blocks_used', 'rank')} / {latest('moe_kv_blocks_total', 'rank')}",
            "rank {{rank}}",
        ),
    ),
    "Blocks in use over blocks. At 1 requests wait for others to end.",
    unit="percentunit",
    most=1,
)
HTTP = Panel(
    "HTTP requests per second",
    (Query(per_second("moe_http_requests", "route", "status"), "{{route}} {{status}}"),),
    "Answers by route and status. 429 says that as many run and wait as may.",
    unit="reqps",
)
FIRST_TOKEN = Panel(
    "Time to first token",
    (
        Query(quantile(0.5, "moe_http_first_token_seconds"), "median"),
        Query(quantile(0.99, "moe_http_first_token_seconds"), "p99"),
    ),
    "From a request's arrival at a Serve replica to its first token, its time in queues included.",
    unit="s",
)
STEPS = Panel(
    "Steps per second, by rank",
    (Query(per_second("moe_steps_worked", "rank"), "rank {{rank}}"),),
    "Steps with work in them. All ranks step together: the lines lie on one another. None while requests run is"
    " a stall.",
    unit="short",
)

DROPPED = Panel(
    "Dropped routes",
    (Query(ratio("moe_route_drop_ratio", THIS_CLUSTER), "{{release}} {{phase}}"),),
    "moe_route_drop_ratio: dropped over attempted routes. The runtime drops none, so anything but 0 is a fault.",
    unit="percentunit",
    steps=((1e-9, "red"),),
    width=6,
)
FAULTS = Panel(
    "Faults in ten minutes",
    tuple(
        Query(f"sum({faults(name, THIS_CLUSTER)}) or vector(0)", legend)
        for name, legend in (
            ("moe_route_output_mismatches", "output mismatches"),
            ("moe_stale_handle_acceptances", "stale handles accepted"),
            ("moe_count_conservation_failures", "counts not conserved"),
        )
    ),
    "Audited outputs that differ from the reference, handles of an older generation that were accepted, and row counts"
    " that peers disagreed on. Each of them must stay 0.",
    shape=Shape.NUMBER,
    steps=_ERRORS,
    width=6,
)
FALLBACKS = Panel(
    "Fallback steps",
    (Query(ratio("moe_fallback_step_ratio", THIS_CLUSTER), "{{phase}}: {{reason}}"),),
    "moe_fallback_step_ratio: steps that ran eagerly though an executable was there, over all steps, and why.",
    unit="percentunit",
    width=6,
)
DEATHS = Panel(
    "Ranks that died in an hour",
    (Query(f"round(sum(increase({total('moe_rank_deaths', THIS_CLUSTER)}[1h])))", "deaths"),),
    "Expert actors whose death the controller has seen.",
    shape=Shape.NUMBER,
    steps=_ERRORS,
    width=6,
)

OVERVIEW = Dashboard(
    "ray-moe-overview",
    "overview",
    "Whether a cluster serves, how much, and whether anything is wrong.",
    (
        Row("State", (STATE, RANKS, LOST, GENERATION, EPOCH, OPEN)),
        Row("Traffic", (TOKENS, REQUESTS, KV, HTTP, FIRST_TOKEN, STEPS)),
        Row("What must not happen", (DROPPED, FAULTS, FALLBACKS, DEATHS)),
    ),
)
