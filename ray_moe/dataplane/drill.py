"""A fault drill on one layer of a running peer: every fault is made on copies, and no payload moves (0x0E).

What each fault must end as is `ray_moe.controlplane.promotion.FAULTS`. A fault that the data plane lets through is
reported as `accepted`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ray_moe.dataplane.audit import check_handles
from ray_moe.dataplane.handle import DispatchHandle
from ray_moe.dataplane.layer import ExpertLayer
from ray_moe.dataplane.phases import Fallback
from ray_moe.dataplane.plan import Plan, agree_layouts, layout_record, make_plan
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.precision import QuantizedRows
from ray_moe.dataplane.schedule import Task, check_tasks
from ray_moe.errors import CountMismatchError, HandleError, RayMoEError, ScheduleError, StaleHandleError
from ray_moe.evidence import Units
from ray_moe.routes import Routes

_TOKENS, _INVOCATION = 4, 0


def drill(layer: ExpertLayer, top_k: int, gate: torch.dtype) -> dict[str, str]:
    """Fault -> how it ended, for the faults that one peer can make by itself."""
    plan = _plan(layer, top_k, gate)
    records = _records(layer, plan)
    (layout,) = agree_layouts(records, layer.slots)
    header = layer.header

    def disagree() -> None:
        wrong = records.clone()
        wrong[-1, 2] += 1  # one route more than its counts sum to
        agree_layouts(wrong, layer.slots)

    def corrupt() -> None:
        handle = _handle(layer, plan, layout, plan.order_N.roll(1))
        check_handles([handle], layer.slots)

    def stale() -> None:
        later = replace(header, generation=header.generation + 1)
        _handle(layer, plan, layout, plan.order_N).require(later, "combine")

    def unscaled() -> None:
        rows = QuantizedRows.of(torch.ones(_TOKENS, layer.weights.down.shape[1]), 128)
        QuantizedRows(rows.data_ND, rows.scales_NB[:-1], rows.block)

    def unscheduled() -> None:
        check_tasks([Task("combine_0", Units(1), "communication", ("expert_0",))])

    falls_back = layer.captured is None or isinstance(layer.captured.admit("decode", [layout, layout], top_k), Fallback)
    return {
        "F03": _ending(disagree, CountMismatchError, "abort_before_payload_exchange"),
        "F04": _ending(corrupt, HandleError, "reject_output_before_publish"),
        "F05": _ending(stale, StaleHandleError, "reject_handle_and_replan"),
        "F06": "explicit_eager_fallback" if falls_back else "accepted",
        "F07": _ending(unscaled, HandleError, "reject_payload_before_expert_compute"),
        "F09": _ending(unscheduled, ScheduleError, "reject_schedule"),
    }


def _plan(layer: ExpertLayer, top_k: int, gate: torch.dtype) -> Plan:
    device, experts = layer.weights.down.device, layer.slots.num_experts
    ids = (torch.arange(_TOKENS * top_k, device=device) % experts).view(_TOKENS, top_k)
    routes = Routes(ids, torch.full((_TOKENS, top_k), 1 / top_k, dtype=gate, device=device))
    return make_plan(routes, layer.slots, policy_named("token_hash"))


def _records(layer: ExpertLayer, plan: Plan) -> torch.Tensor:
    """What a count exchange gives in which the other peers have no tokens."""
    mine = layout_record([plan], layer.header.digest64, _INVOCATION)
    records = torch.zeros(layer.slots.num_peers, len(mine), dtype=mine.dtype, device=mine.device)
    records[:, :2] = mine[:2]
    records[layer.slots.my_peer] = mine
    return records


def _handle(layer: ExpertLayer, plan: Plan, layout: object, order_N: torch.Tensor) -> DispatchHandle:
    where = (0, "decode", layer.slots.layer, 0)
    return layer.header.bind(*where, plan, layout, order_N=order_N)  # type: ignore[arg-type]


def _ending(fault: Callable[[], None], expected: type[RayMoEError], safe: str) -> str:
    try:
        fault()
    except expected:
        return safe
    return "accepted"
