"""What is moving, how far it is, and what it has cost: the page for rebalances, grows, shrinks and releases."""

from __future__ import annotations

from ray_moe.observe.dashboards.model import CLUSTER, RANK, Dashboard, Panel, Query, Row, Shape
from ray_moe.observe.dashboards.queries import THIS_CLUSTER, latest, per_second, quantile_of_all, summed, total

_RANK = 'rank=~"$rank"'

STATE = Panel(
    "Cluster",
    (Query(f"{latest('moe_cluster_state', 'state')} == 1", "{{state}}"),),
    "Where the cluster stood when.",
    shape=Shape.STATES,
    names={"1": "yes"},
    height=6,
)
RANKS = Panel(
    "Ranks",
    (Query(latest("moe_ranks", "state"), "{{state}}"),),
    "Expert actors that serve, that are joining (loading beside the serving ones), and that were lost.",
    height=6,
)
GENERATIONS = Panel(
    "Generation and epoch, by rank",
    (
        Query(latest("moe_generation", "rank", matchers=(THIS_CLUSTER, _RANK)), "rank {{rank}} generation"),
        Query(latest("moe_epoch", "rank", matchers=(THIS_CLUSTER, _RANK)), "rank {{rank}} epoch"),
    ),
    "All ranks take a generation at one agreed step. A line that stays behind is a rank that does not step.",
    height=6,
)

OPEN = Panel(
    "Operations under way",
    (
        Query(f"sum({latest('moe_operations_open', 'kind', 'stage')})", "all"),
        Query(f"{latest('moe_operations_open', 'kind', 'stage')} > 0", "{{kind}} {{stage}}"),
    ),
    "All, and by stage. `ray-moe status` says what each waits for, `ray-moe cancel` ends one that has"
    " published nothing.",
)
AGE = Panel(
    "Age of the oldest operation",
    (Query(latest("moe_operation_age_seconds", "kind"), "{{kind}}"),),
    "Seconds since the oldest open operation was asked for; 0 while there is none. A line that only climbs while"
    " nothing moves is a stall.",
    unit="s",
)
ENDED = Panel(
    "Operations that ended in the time range",
    (
        Query(
            f"round(sum by (kind, outcome) (increase({total('moe_operations', THIS_CLUSTER)}[$__range])))",
            "{{kind}} {{outcome}}",
        ),
    ),
    "`ray-moe history` has who asked for each, why, what it moved and how it ended.",
    shape=Shape.BARS,
)

BYTES = Panel(
    "Bytes migrated per second",
    (Query(per_second("moe_migration_bytes", "source"), "from {{source}}"),),
    "Weights that arrived in slots, from other peers or from the checkpoint. `fill_bytes_per_s` caps it per rank.",
    unit="Bps",
    stacked=True,
)
MOVED = Panel(
    "Migrated so far",
    (Query(summed(total("moe_migration_bytes", THIS_CLUSTER), "source"), "from {{source}}"),),
    "Since the controller started.",
    unit="bytes",
)
SLOTS = Panel(
    "Slots filled per second",
    (Query(per_second("moe_migration_slots"), "slots"),),
    "Copies of experts that arrived and were verified by digest.",
)
PAUSE = Panel(
    "Pause of a switch",
    (
        Query(quantile_of_all(0.5, "moe_switch_pause_seconds"), "median"),
        Query(quantile_of_all(0.95, "moe_switch_pause_seconds"), "p95"),
    ),
    "How much longer a step took in which ranks went over to a new generation or epoch, of all switches so far.",
    unit="s",
)
DRAIN = Panel(
    "Age of the oldest draining generation",
    (Query(latest("moe_drain_age_seconds"), "draining"),),
    "A generation drains until its last lease comes back. Its slots are free only then; `ray-moe status` names who"
    " holds it.",
    unit="s",
)
LIVE = Panel(
    "Generations and releases that live",
    (
        Query(latest("moe_generations_live"), "generations"),
        Query(f"{latest('moe_releases', 'state')} > 0", "releases {{state}}"),
    ),
    "One generation at rest, two while one drains. Releases by state: a candidate is beside the active one.",
)

ELASTICITY = Dashboard(
    "ray-moe-elasticity",
    "elasticity",
    "Ranks that come and go, experts that move, and what that costs.",
    (
        Row("Cluster", (STATE, RANKS, GENERATIONS)),
        Row("Operations", (OPEN, AGE, ENDED)),
        Row("Weights on the move", (BYTES, MOVED, SLOTS)),
        Row("Switches and drains", (PAUSE, DRAIN, LIVE)),
    ),
    (CLUSTER, RANK),
)
