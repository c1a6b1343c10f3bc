"""The documents that `ray-moe plan` and `ray-moe simulate` read. An edge: what comes in is checked here, once.

Every refusal is one `ConfigError` on one line that names file, field, value and bound.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ray_moe.errors import ConfigError
from ray_moe.manifest import AsTuple, Manifest, Natural, Positive, read_yaml, shown

PlanPolicy = Literal["auto", "hierarchical", "global", "greedy", "exact", "topology", "migration", "phase"]
_Weight = Annotated[float, Field(ge=0, le=1e9)]
# Beyond any machine and model that is built: a slip of the keyboard is refused, not computed.
_Slots = Annotated[int, Field(ge=1, le=1_000_000)]
_Ranks = Annotated[int, Field(ge=1, le=65_536)]
_Steps = Annotated[int, Field(ge=1, le=1_000_000)]
_Count = Annotated[int, Field(ge=1, le=1 << 24)]
_ElementBytes = Annotated[float, Field(gt=0, le=16)]


def _loads(given: object) -> object:
    return _rows(given, "demand", (int, float), "a number >= 0")


def _experts(given: object) -> object:
    return _rows(given, "prior", (int,), "an expert, a whole number >= 0")


def _rows(given: object, field: str, kinds: tuple[type, ...], bound: str) -> object:
    """Rows of equal length as tuples, the first offender named: a matrix has too many entries to name them all."""
    if not isinstance(given, list) or not given or not all(isinstance(row, list) and row for row in given):
        raise ValueError(f"{field}: found {shown(given)}, must be a list of rows, one per layer, none empty")
    for layer, row in enumerate(given):
        if len(row) != len(given[0]):
            raise ValueError(f"{field}[{layer}]: found {len(row)} entries, must be {len(given[0])} as in {field}[0]")
        for at, value in enumerate(row):
            if type(value) not in kinds or not 0 <= value < math.inf:
                raise ValueError(f"{field}[{layer}][{at}]: found {shown(value)}, must be {bound}")
    return tuple(map(tuple, given))


class DecodeStep(Manifest):
    """A decode batch, which the phase policy needs: its tokens, each to `top_k` experts."""

    tokens: _Count
    top_k: _Count


class Weights(Manifest):
    """Of the objective's terms (`controlplane.objective`); 0 ignores one."""

    balance: _Weight = 1.0
    phase: _Weight = 0.0
    topology: _Weight = 0.0
    migration: _Weight = 0.0
    resident: _Weight = 0.0
    churn: _Weight = 0.0


class ExpertDocument(Manifest):
    """A SwiGLU expert; the default is DeepSeek-V3's, one byte a weight, rows of two bytes an element."""

    hidden: _Count = 7168
    ffn: _Count = 2048
    weight_bytes: _ElementBytes = 1
    row_bytes: _ElementBytes = 2


class PlanRequest(Manifest):
    """A demand, [layers][experts] in any unit, and the cluster that is to carry it.

    Slots are per layer. `prior` is what slots hold now, [layers][slots]. With `slots_by_rank` ranks hold different
    numbers of slots; else they are dealt evenly. `pool_slots` are the slots that a rank has room for per layer while it
    migrates (default: old and new ones together). `expert_bytes` is one expert of one layer; `expert` gives its widths,
    and with them bytes and predicted times.
    """

    demand: Annotated[tuple[tuple[float, ...], ...], BeforeValidator(_loads)]
    num_slots: _Slots
    num_groups: Positive = 1
    num_nodes: Positive = 1
    num_gpus: _Ranks
    policy: PlanPolicy = "auto"
    prior: Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_experts)] | None = None
    expert_bytes: Positive | None = None
    expert: ExpertDocument | None = None
    pool_slots: Annotated[int, Field(ge=1, le=65_536)] | None = None
    slots_by_rank: AsTuple[Natural] | None = None
    min_replicas: Positive = 1
    anti_affinity: Literal["none", "rank", "node"] = "none"
    decode: DecodeStep | None = None
    weights: Weights | None = None

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        experts = len(self.demand[0])
        if self.num_slots < experts:
            raise ValueError(f"num_slots: found {self.num_slots}, must be >= the {experts} experts of demand")
        if self.num_nodes > self.num_gpus:
            raise ValueError(f"num_nodes: found {self.num_nodes}, must be <= num_gpus {self.num_gpus}")
        if self.slots_by_rank is not None:
            if len(self.slots_by_rank) != self.num_gpus:
                raise ValueError(
                    f"slots_by_rank: found {len(self.slots_by_rank)} entries, must be num_gpus {self.num_gpus}"
                )
            if sum(self.slots_by_rank) != self.num_slots:
                raise ValueError(
                    f"slots_by_rank: found a sum of {sum(self.slots_by_rank)}, must be num_slots {self.num_slots}"
                )
        elif self.num_slots < self.num_gpus:
            raise ValueError(f"num_slots: found {self.num_slots}, must be >= num_gpus {self.num_gpus}")
        if self.prior is not None:
            self._check_prior(self.prior, experts)
        return self

    def _check_prior(self, prior: tuple[tuple[int, ...], ...], experts: int) -> None:
        if len(prior) != len(self.demand):
            raise ValueError(f"prior: found {len(prior)} layers, must be {len(self.demand)} as in demand")
        if len(prior[0]) != self.num_slots:
            raise ValueError(f"prior: found {len(prior[0])} slots, must be num_slots {self.num_slots}")
        for layer, row in enumerate(prior):
            if max(row) >= experts:
                at = row.index(max(row))
                raise ValueError(f"prior[{layer}][{at}]: found {row[at]}, must be < the {experts} experts of demand")
            if len(set(row)) < experts:
                missing = min(set(range(experts)) - set(row))
                raise ValueError(f"prior[{layer}]: found no slot of expert {missing}, must be at least one")


# -- Simulation


class ConstantDocument(Manifest):
    """A figure of the cost model, with its unit and where it comes from."""

    value: Annotated[float, Field(gt=0)]
    unit: str
    source: Annotated[str, Field(min_length=1)]


class CostDocument(Manifest):
    """The constants of `controlplane.costs.CostModel`."""

    name: str
    flops_per_s: ConstantDocument
    memory_bytes_per_s: ConstantDocument
    compute_fraction: ConstantDocument
    memory_fraction: ConstantDocument
    kernel_fixed_s: ConstantDocument
    tile_rows: ConstantDocument
    exchange_fixed_s: ConstantDocument
    exchange_bytes_per_s: ConstantDocument
    inter_node_bytes_per_s: ConstantDocument
    peer_copy_bytes_per_s: ConstantDocument


class RecipeDocument(Manifest):
    """A trace to generate; fields as in `controlplane.traces.Recipe`.

    `shifts` records the steps at which it shifts: a trace that shifts at others is refused.
    """

    generator: str
    seed: Natural = 0
    steps: _Steps = 1000
    layers: Annotated[int, Field(ge=1, le=1024)] = 4
    experts: Annotated[int, Field(ge=1, le=65_536)] = 256
    routes: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 20
    exponent: float | None = None
    shift_every: int | None = None
    shift_share: float | None = None
    drift_spread: float | None = None
    drift_steps: int | None = None
    burst_factor: float | None = None
    burst_steps: int | None = None
    period: int | None = None
    prompts: int | None = None
    shifts: AsTuple[Natural] | None = None


class Scenario(Manifest):
    """What `ray-moe simulate` compares: clusters x policies x cadences over one trace.

    `trace` is a recipe or the path of a recorded one. A cluster of G GPUs has nodes of `gpus_per_node`, and
    `slots_per_gpu` slots per layer on each GPU, or as many as hold every expert and `spare` of all experts more.
    """

    trace: RecipeDocument | str = RecipeDocument(generator="drift")
    gpus: Annotated[AsTuple[_Ranks], Field(min_length=1)] = (32,)
    gpus_per_node: _Ranks = 8
    slots_per_gpu: Annotated[int, Field(ge=1, le=65_536)] | None = None
    spare: Annotated[float, Field(ge=0, le=1000)] = 0.125
    groups: Positive = 8
    policies: Annotated[AsTuple[str], Field(min_length=1)] = ("static", "reference", "reference_global", "migration")
    cadences: Annotated[AsTuple[_Steps], Field(min_length=1)] = (25,)
    estimator: str = "window"
    window: _Steps = 25
    migration_weight: _Weight = 0.1
    oracle_every: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    target: Annotated[float, Field(ge=1)] = 1.10
    grace: Annotated[int, Field(ge=0, le=1_000_000)] = 200
    expert: ExpertDocument = ExpertDocument()
    costs: str | None = None


def read_document(text: str, source: str) -> object:
    """JSON by the name's ending, else YAML; `ConfigError` prefixed with `source`."""
    if not source.endswith(".json"):
        return read_yaml(text, source)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists too deep
        raise ConfigError(f"{source}: not valid JSON: {error}") from error


def recipe_values(document: RecipeDocument) -> dict[str, Any]:
    """The fields of a recipe that are given."""
    return document.model_dump(exclude_none=True, exclude={"shifts"})
