"""Which experts are hot, where their copies are, and what their rows cost: the page for placements."""

from __future__ import annotations

from ray_moe.observe.dashboards.model import CLUSTER, RANK, Dashboard, Panel, Query, Row, Shape, Variable
from ray_moe.observe.dashboards.queries import THIS_CLUSTER, latest, per_second, ratio

LAYER = Variable("layer", "Layer", 'label_values(ray_moe_expert_load_share{cluster="$cluster"}, layer)', several=True)
_LAYER = 'layer=~"$layer"'
_RANK = 'rank=~"$rank"'
_NAMED, _OTHER = 'expert!="other"', 'expert="other"'

HOTTEST = Panel(
    "Hottest experts now",
    (
        Query(
            f"topk(15, {latest('moe_expert_load_share', 'layer', 'expert', matchers=(THIS_CLUSTER, _LAYER, _NAMED))})",
            "layer {{layer}} expert {{expert}}",
        ),
    ),
    "Share of their layer's routes in the demand that the controller has. Of E equally busy experts each has 1/E.",
    unit="percentunit",
    shape=Shape.BARS,
    width=8,
    height=10,
)
LOADS = Panel(
    "Load of the named experts",
    (
        Query(
            latest("moe_expert_load_share", "layer", "expert", matchers=(THIS_CLUSTER, _LAYER, _NAMED)),
            "layer {{layer}} expert {{expert}}",
        ),
    ),
    "The busiest experts of the exported layers over time; all the rest are one series, `other`, which is not drawn.",
    unit="percentunit",
    width=8,
    height=10,
)
OTHERS = Panel(
    "Load of all the others",
    (Query(latest("moe_expert_load_share", "layer", matchers=(THIS_CLUSTER, _LAYER, _OTHER)), "layer {{layer}}"),),
    "What the experts without a series of their own have together. It falls when routing concentrates.",
    unit="percentunit",
    width=8,
    height=10,
)

IMBALANCE = Panel(
    "Imbalance, max over mean of ranks",
    (Query(latest("moe_imbalance", "layer_group"), "layers {{layer_group}}"),),
    "The fullest rank's routes over the mean rank's. 1 is even; a layer takes as long as its fullest rank.",
    least=1,
    steps=((1.5, "orange"), (2.0, "red")),
)
REPLICAS = Panel(
    "Copies per expert",
    (Query(latest("moe_expert_replicas", "layer_group", "stat"), "layers {{layer_group}}: {{stat}}"),),
    "Fewest, mean and most copies of an expert in the placement that serves. An expert that is lost with its only copy"
    " comes back from the checkpoint.",
)
DEMAND_AGE = Panel(
    "Age of the demand",
    (Query(latest("moe_demand_age_steps"), "steps"),),
    "Steps since the ranks' last report of what their routers asked for. Placements are decided on this demand.",
)

ROWS = Panel(
    "Rows per second, by rank",
    (
        Query(per_second("moe_rows_local", "rank", matchers=(THIS_CLUSTER, _RANK)), "rank {{rank}} local"),
        Query(per_second("moe_rows_sent", "rank", matchers=(THIS_CLUSTER, _RANK)), "rank {{rank}} sent"),
        Query(per_second("moe_rows_received", "rank", matchers=(THIS_CLUSTER, _RANK)), "rank {{rank}} received"),
    ),
    "Rows of routes that stayed on their rank, left it, and came from others.",
)
BYTES = Panel(
    "Bytes per second between ranks",
    (
        Query(per_second("moe_bytes_sent", "rank", matchers=(THIS_CLUSTER, _RANK)), "rank {{rank}} sent"),
        Query(per_second("moe_bytes_received", "rank", matchers=(THIS_CLUSTER, _RANK)), "rank {{rank}} received"),
    ),
    "What the ranks' groups have carried, headers included.",
    unit="Bps",
)
REMOTE = Panel(
    "Remote routes",
    (
        Query(ratio("moe_remote_route_ratio", THIS_CLUSTER), "{{release}} {{phase}}"),
        Query(ratio("moe_inter_node_route_ratio", THIS_CLUSTER), "{{release}} {{phase}} between nodes ({{topology}})"),
    ),
    "moe_remote_route_ratio and moe_inter_node_route_ratio: routes whose expert is on another rank, or on another node,"
    " over accepted routes.",
    unit="percentunit",
    most=1,
)
SLOTS = Panel(
    "Slots in use, by rank",
    (Query(latest("moe_slots_resident", "rank", matchers=(THIS_CLUSTER, _RANK)), "rank {{rank}}"),),
    "Slots that hold an expert, over all layers. While a placement changes old and new copies are both resident.",
)
SLOT_BYTES = Panel(
    "Slot memory, by rank",
    (Query(latest("moe_slot_bytes", "rank", matchers=(THIS_CLUSTER, _RANK)), "rank {{rank}}"),),
    "Bytes of the experts that are resident.",
    unit="bytes",
)
CALLS = Panel(
    "Single-layer calls per second",
    (Query(per_second("moe_bare_calls", "rank", matchers=(THIS_CLUSTER, _RANK)), "rank {{rank}}"),),
    "Calls of one expert layer by other programs.",
)

EXPERTS = Dashboard(
    "ray-moe-experts",
    "experts",
    "Load, balance and copies of experts, and what their rows cost.",
    (
        Row("Demand", (HOTTEST, LOADS, OTHERS)),
        Row("Placement", (IMBALANCE, REPLICAS, DEMAND_AGE)),
        Row("Exchange", (ROWS, BYTES, REMOTE)),
        Row("Slots", (SLOTS, SLOT_BYTES, CALLS)),
    ),
    (CLUSTER, LAYER, RANK),
)
