"""plan: from demand to a placement, what it is worth, and what it takes to get there. No cluster is needed."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_moe.cli.options import AsJson
from ray_moe.cli.output import output
from ray_moe.errors import ConfigError, PlacementError

if TYPE_CHECKING:
    from ray_moe.controlplane.costs import CostModel, ExpertShape
    from ray_moe.controlplane.demand import Demand
    from ray_moe.controlplane.placed import Placed
    from ray_moe.controlplane.planning import Problem, Solution
    from ray_moe.plans import ExpertDocument, PlanRequest


def plan(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Demand and cluster, as JSON or YAML.")],
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="Instead of the file's: auto, hierarchical, global (the pinned EPLB solver), greedy, exact, topology, "
            "migration, phase.",
        ),
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON document.")] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Write a heat map of experts x ranks, one layer.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", metavar="N", help="The heat map's layer (default: the least balanced).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan where experts go: placement, balance before and after, replicas, migration and memory."""
    from ray_moe.observe.plan import render_plan

    if png is not None and len(files) > 1:
        raise ConfigError(f"--png draws one plan, found {len(files)} files")
    documents = []
    with output(as_json) as out:
        for file in files:
            text = read(file)
            try:
                document, picture = _plan(file, text, policy, layer, draw=png is not None)
            except (ConfigError, PlacementError) as error:
                message = str(error)
                raise ConfigError(message if message.startswith(str(file)) else f"{file}: {message}") from error
            documents.append(document)
            if png is not None:
                write(png, picture)
            if not as_json:
                out.show(render_plan(document))
        whole: dict[str, Any] = documents[0] if len(documents) == 1 else {"plans": documents}
        out.result(whole)
        if out_file is not None:
            write_json(out_file, whole)


def _plan(file: Path, text: str, policy: str | None, layer: int | None, draw: bool) -> tuple[dict[str, Any], bytes]:
    """The document, and the heat map if one is asked for."""
    from hashlib import sha256

    import numpy as np

    from ray_moe.controlplane.demand import Demand
    from ray_moe.controlplane.planning import balance, rows_across_nodes, unplanned
    from ray_moe.observe.plan import heat_map
    from ray_moe.plans import PlanRequest, read_document

    values = read_document(text, str(file))
    if policy is not None and isinstance(values, dict):
        values = {**values, "policy": policy}
    request = PlanRequest.parse(values, str(file))
    digest = sha256(text.encode()).hexdigest()
    demand = Demand.stamped(np.array(request.demand), file.name, digest)
    if layer is not None and not 0 <= layer < len(demand.loads_LE):
        raise ConfigError(f"--layer: found {layer}, must be in [0, {len(demand.loads_LE)})")
    problem = _problem(request, demand)
    solution, first_ms, solve_ms = _timed(problem, request.policy)
    before = unplanned(problem)
    notes = _notes(request, solution)
    document = {
        "provenance": {"file": str(file), "sha256": digest, **_provenance(demand)},
        **_placement(problem, request, solution),
        "imbalance_before": balance(demand.loads_LE, before).tolist(),
        "rows_across_nodes_before": rows_across_nodes(demand.loads_LE, before).tolist(),
        "objective": {"before": _terms(problem, before), "after": _terms(problem, solution.placed)},
        "solve_ms": solve_ms,
        "first_solve_ms": first_ms,
        **_migration(problem, request, solution),
        "predicted": _predicted(problem, request, solution),
        "notes": notes,
    }
    if not draw:
        return document, b""
    worst = int(np.argmax(document["imbalance"])) if layer is None else layer
    return document, heat_map(demand.loads_LE[worst], worst, before, solution.placed)


def _problem(request: PlanRequest, demand: Demand) -> Problem:
    import numpy as np

    from ray_moe.controlplane.objective import Decode
    from ray_moe.controlplane.placed import Placed, Shape
    from ray_moe.controlplane.planning import Problem, objective_of

    experts = demand.loads_LE.shape[1]
    shape = Shape.even(request.num_slots, request.num_gpus, request.num_nodes)
    if request.slots_by_rank is not None:
        shape = Shape(request.slots_by_rank, shape.node_of_rank)
    if request.decode is not None:
        decode: Decode | None = Decode(request.decode.tokens, request.decode.top_k)
    else:
        decode = Decode(*assumed_decode(experts)) if request.policy == "phase" else None
    objective = objective_of(
        request.policy,
        request.min_replicas,
        request.anti_affinity,
        decode,
        None if request.weights is None else request.weights.model_dump(),
    )
    prior = None if request.prior is None else Placed(shape, experts, np.array(request.prior, np.int64))
    return Problem(demand.loads_LE, shape, request.num_groups, objective, prior)


def assumed_decode(experts: int) -> tuple[int, int]:
    """Tokens and top k of a decode step that nobody described."""
    return 128, min(8, experts)


def _timed(problem: Problem, policy: str) -> tuple[Solution, float, float]:
    """The solution, and milliseconds from the demand array to all four maps: the first call's, and the second's.

    The first call of a process also pays for what is loaded and allocated once. A solve of more than a second is not
    made twice.
    """
    from ray_moe.controlplane.planning import place

    spans: list[float] = []
    while not spans or (len(spans) < 2 and spans[0] < 1e3):
        start = perf_counter()
        solution = place(problem, policy)
        spans.append((perf_counter() - start) * 1e3)
    return solution, spans[0], spans[-1]


def _provenance(demand: Demand) -> dict[str, Any]:
    origin = demand.provenance
    return {"unit": origin.unit, "aggregation": origin.aggregation, "source": origin.source}


def _placement(problem: Problem, request: PlanRequest, solution: Solution) -> dict[str, Any]:
    from ray_moe.controlplane.planning import balance, ideal_rank_loads, ideal_slot_loads, rows_across_nodes

    return {
        "policy": request.policy,
        "policy_used": solution.policy,
        "num_groups": request.num_groups,
        "slots_by_rank": list(problem.shape.slots_by_rank),
        "node_of_rank": list(problem.shape.node_of_rank),
        "phy2log": solution.phy2log_LS.tolist(),
        "phyrank": solution.phyrank_LS.tolist(),
        "logcnt": solution.logcnt_LE.tolist(),
        "log2phy": solution.log2phy_LEC.tolist(),
        "tie_rule": solution.tie_rule,
        "ideal_slot_load": ideal_slot_loads(problem.loads_LE, solution.placed).tolist(),
        "rank_load": ideal_rank_loads(problem.loads_LE, solution.placed).tolist(),
        "imbalance": balance(problem.loads_LE, solution.placed).tolist(),
        "rows_across_nodes": rows_across_nodes(problem.loads_LE, solution.placed).tolist(),
    }


def _terms(problem: Problem, placed: Placed) -> dict[str, float]:
    """The objective's terms, unweighed, and the total that weights make of them: means over the layers."""
    terms = problem.objective.evaluate(problem.loads_LE, placed, problem.prior)
    names = ("balance", "phase", "topology", "migration", "resident", "churn", "total")
    return {name: float(getattr(terms, name).mean()) for name in names}


def _migration(problem: Problem, request: PlanRequest, solution: Solution) -> dict[str, Any]:
    """Copies by class and, where the size of an expert is known, bytes; and resident memory, shared slots once."""
    from ray_moe.controlplane.migrate import Pools, plan_migration
    from ray_moe.controlplane.occupancy import Occupancy, Wanted

    shape, layers = problem.shape, len(problem.loads_LE)
    size = request.expert_bytes
    if size is None and request.expert is not None:
        size = expert_shape(request.expert).expert_bytes
    unit = "experts" if size is None else "bytes"
    resident = layers * shape.num_slots * (size or 1)
    if problem.prior is None:
        return {"migration": None, "memory": {"unit": unit, "resident": resident, "peak": resident}}
    ranks = shape.rank_of_slot_S.tolist()
    room = [request.pool_slots or 2 * slots for slots in shape.slots_by_rank]
    migration = plan_migration(
        Occupancy.from_phy2log(problem.prior.phy2log_LS, ranks),
        Wanted.from_phy2log(solution.phy2log_LS, ranks),
        Pools(dict(enumerate(shape.node_of_rank)), dict(enumerate(room)), dict.fromkeys(range(layers), size or 1)),
    )
    ledger = migration.ledger
    classes = {
        str(kind): {"copies": copies, "bytes": None if size is None else int(ledger.payload[kind])}
        for kind, copies in ledger.copies.items()
    }
    moves = [
        {
            "layer": copy.slot.layer,
            "expert": copy.expert.value,
            "rank": copy.slot.rank.value,
            "pool_slot": copy.slot.pool_slot,
            "class": str(copy.kind),
            "source_rank": getattr(getattr(copy.source, "rank", None), "value", None),
            "wave": copy.wave,
        }
        for wave in migration.waves
        for copy in wave.copies
    ]
    return {
        "migration": {"classes": classes, "waves": len(migration.waves), "moves": moves},
        "memory": {
            "unit": unit,
            "prior": int(ledger.prior_resident),
            "resident": int(ledger.target_resident),
            "retained": int(ledger.retained),
            "peak": int(ledger.peak_resident),
        },
    }


def _predicted(problem: Problem, request: PlanRequest, solution: Solution) -> dict[str, Any] | None:
    """Seconds by rank and term if demand is the rows of one step; None where the expert's widths are not given."""
    from ray_moe.controlplane.costs import layer_times
    from ray_moe.controlplane.planning import ideal_slot_loads

    if request.expert is None:
        return None
    model, placed = cost_model(None), solution.placed
    rows_LS = ideal_slot_loads(problem.loads_LE, placed)
    times = layer_times(rows_LS, problem.shape, expert_shape(request.expert), model)
    return {
        "cost_model": model.name,
        "unit": "s (predicted, not measured)",
        "kernel": times.kernel_LG.tolist(),
        "dispatch": times.dispatch_LG.tolist(),
        "combine": times.combine_LG.tolist(),
        "layer": times.barrier_L.tolist(),
    }


def expert_shape(document: ExpertDocument) -> ExpertShape:
    from ray_moe.controlplane.costs import ExpertShape

    return ExpertShape(**document.model_dump())


def cost_model(file: Path | None) -> CostModel:
    """The constants of a file, or those that ship with ray_moe; `ConfigError` naming the file and the constant."""
    from importlib.resources import files

    from ray_moe.controlplane.costs import Constant, CostModel
    from ray_moe.plans import CostDocument

    if file is None:
        source, text = "h200.yaml", (files("ray_moe") / "controlplane" / "data" / "h200.yaml").read_text("utf-8")
    else:
        source, text = str(file), read(file)
    values = CostDocument.from_yaml(text, source).model_dump()
    try:
        return CostModel(values.pop("name"), **{name: Constant(**figure) for name, figure in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _notes(request: PlanRequest, solution: Solution) -> list[str]:
    notes = [
        "A bare file does not say what its numbers are: routes are assumed, which a running cluster would refuse.",
        "Rank load is ideal, every expert's load split evenly over its copies; it is neither time nor traffic.",
    ]
    if request.prior is None:
        notes.append("Before: no prior is given, so expert after expert, slot after slot.")
        if request.policy == "migration":
            notes.append("policy migration without a prior: nothing is in place that could be kept.")
    if request.policy == "phase" and request.decode is None:
        tokens, top_k = assumed_decode(len(request.demand[0]))
        notes.append(f"decode: {tokens} tokens, each to {top_k} experts (assumed).")
    if solution.policy == "greedy" and request.policy == "auto":
        notes.append("auto is greedy here: the pinned solver needs counts that divide, equal ranks and no constraints.")
    return notes


# -- Files


def read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error


def write_json(file: Path, document: dict[str, Any]) -> None:
    import json

    write(file, (json.dumps(document) + "\n").encode())
