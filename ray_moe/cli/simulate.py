"""simulate: policies and cadences over traces of demand, on clusters that one need not have."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_moe.cli.options import AsJson, parse_settings
from ray_moe.cli.output import output
from ray_moe.cli.plan import cost_model, expert_shape, read, write, write_json
from ray_moe.errors import ConfigError

if TYPE_CHECKING:
    from ray_moe.controlplane.contenders import Contender, Setting
    from ray_moe.controlplane.costs import CostModel
    from ray_moe.controlplane.simulate import Course, Report, Summary
    from ray_moe.controlplane.traces import Trace
    from ray_moe.plans import Scenario


def simulate(
    file: Annotated[Path | None, typer.Argument(metavar="[SCENARIO]", help="A scenario (YAML or JSON).")] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE|GENERATOR", help="A recorded trace (.npz), or drift, zipf, bursts, ..."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Of a generated trace.")] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", metavar="N,...", help="Clusters to compare.")] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="NAME,...",
            help="static, reference, reference_global, relabelled, balanced, migration.",
        ),
    ] = None,
    cadences: Annotated[
        str | None, typer.Option("--cadences", metavar="N,...", help="Steps between decisions.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Any field of a scenario, for example spare=0.25."),
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON document.")] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw balance over time.")] = None,
    save: Annotated[Path | None, typer.Option("--save-trace", metavar="FILE", help="Write the trace (.npz).")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate: replay demand over clusters of 4 to 4,096 GPUs and compare policies. Nothing is measured."""
    from ray_moe.controlplane.simulate import simulate as replay
    from ray_moe.controlplane.simulate import summarise
    from ray_moe.observe.simulation import draw, render_cluster, render_simulation

    given = {"gpus": gpus, "policies": policies, "cadences": cadences}
    lists = {field: _list(text) for field, text in given.items() if text is not None}
    scenario = _scenario(file, parse_settings(settings or ()) | lists, trace, seed)
    demand = _trace(scenario, file)
    costs = cost_model(None if scenario.costs is None else _beside(file, scenario.costs))
    settings_by_cluster = [_setting(scenario, demand, costs, count) for count in scenario.gpus]
    contenders = _contenders(scenario)
    document: dict[str, Any] = {"trace": _described(demand), "scenario": scenario.model_dump(), "costs": asdict(costs)}
    with output(as_json) as out:
        if save is not None:
            write(save, demand.to_bytes())
        if not as_json:
            out.show(render_simulation(document))
        clusters, reports = [], []
        for setting in settings_by_cluster:
            report = replay(demand, setting, contenders, scenario.oracle_every)
            clusters.append(_cluster(report, summarise(report, scenario.target, scenario.grace)))
            reports.append(report)
            if not as_json:
                out.show(render_cluster(clusters[-1], scenario.target, scenario.grace))
        document["clusters"] = clusters
        out.result(document)
        if out_file is not None:
            write_json(out_file, document)
        if png is not None:
            write(png, draw(reports, scenario.target))


def _list(text: str) -> list[Any]:
    parts = [part.strip() for part in text.split(",")]
    return [int(part) if part.isdecimal() else part for part in parts]


def _scenario(file: Path | None, values: dict[str, Any], trace: str | None, seed: int | None) -> Scenario:
    """The file's fields, what was given over them, and then the trace and its seed."""
    from ray_moe.controlplane.traces import GENERATORS
    from ray_moe.plans import Scenario, read_document

    whole: dict[str, Any] = {}
    if file is not None:
        found = read_document(read(file), str(file))
        if not isinstance(found, dict):
            raise ConfigError(f"{file}: found {type(found).__name__}, must be fields of a scenario")
        whole |= found
    whole |= values
    if trace is not None:
        known = whole.get("trace")
        recipe = known if isinstance(known, dict) else {}
        whole["trace"] = {**recipe, "generator": trace} if trace in GENERATORS else trace
    scenario = Scenario.parse(whole, str(file or "scenario"))
    if seed is None:
        return scenario
    if isinstance(scenario.trace, str):
        raise ConfigError(f"--seed: found {seed}, but {scenario.trace} is recorded, not generated")
    return scenario.model_copy(update={"trace": scenario.trace.model_copy(update={"seed": seed, "shifts": None})})


def _trace(scenario: Scenario, file: Path | None) -> Trace:
    from ray_moe.controlplane.traces import Recipe, Trace
    from ray_moe.plans import recipe_values

    if isinstance(scenario.trace, str):
        path = _beside(file, scenario.trace)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        return Trace.from_bytes(content, str(path))
    try:
        trace = Trace.generated(Recipe(**recipe_values(scenario.trace)))
        if scenario.trace.shifts not in (None, trace.shifts):
            raise ConfigError(f"shifts: found {list(scenario.trace.shifts or ())}, the seed gives {list(trace.shifts)}")
    except ConfigError as error:
        raise ConfigError(f"{file or 'scenario'}: trace: {error}") from error
    return trace


def _beside(file: Path | None, name: str) -> Path:
    """A path as given, else seen from where the scenario is."""
    path = Path(name).expanduser()
    return path if file is None or path.is_absolute() or path.exists() else file.parent / path


def _setting(scenario: Scenario, trace: Trace, costs: CostModel, gpus: int) -> Setting:
    import math

    from ray_moe.controlplane.contenders import Setting
    from ray_moe.controlplane.placed import Shape

    per_node = scenario.gpus_per_node
    if gpus > per_node and gpus % per_node:
        raise ConfigError(f"gpus: found {gpus}, must be a multiple of gpus_per_node {per_node}, or less")
    slots = scenario.slots_per_gpu or math.ceil(trace.experts * (1 + scenario.spare) / gpus)
    if slots * gpus < trace.experts:
        raise ConfigError(f"slots_per_gpu: found {slots} on {gpus} gpus, must hold the {trace.experts} experts")
    return Setting(
        shape=Shape.even(slots * gpus, gpus, max(1, gpus // per_node)),
        groups=scenario.groups,
        expert=expert_shape(scenario.expert),
        costs=costs,
        migration_weight=scenario.migration_weight,
    )


def _contenders(scenario: Scenario) -> list[Contender]:
    """Every policy at every cadence; one that never decides once."""
    from ray_moe.controlplane.contenders import POLICIES, Contender

    found = []
    for policy in scenario.policies:
        for cadence in scenario.cadences if POLICIES.get(policy) is not None else scenario.cadences[:1]:
            found.append(Contender(policy, cadence, scenario.estimator, scenario.window))
    return found


# -- The document


def _described(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "unit": "routes",
        "steps": trace.steps,
        "layers": trace.layers,
        "experts": trace.experts,
        "shifts": list(trace.shifts),
        "recipe": None if trace.recipe is None else asdict(trace.recipe),
    }


def _cluster(report: Report, summaries: tuple[Summary, ...]) -> dict[str, Any]:
    shape = report.setting.shape
    courses = [*report.courses, *([report.oracle] if report.oracle is not None else [])]
    return {
        "gpus": shape.num_ranks,
        "nodes": shape.num_nodes,
        "slots": shape.num_slots,
        "spare_slots": shape.num_slots - report.trace.experts,
        "contenders": [
            {**_summary(summary), **_series(course)} for summary, course in zip(summaries, courses, strict=True)
        ],
    }


def _summary(summary: Summary) -> dict[str, Any]:
    """Amounts of the ledgers as whole bytes, predictions as seconds and named so."""
    values = {name: getattr(summary, name) for name in summary.__dataclass_fields__}
    for name in ("moved", "across_nodes", "duplicated", "kept", "resident", "peak_rank"):
        values[f"{name}_bytes"] = int(values.pop(name))
    for name in ("step", "step_p95"):
        values[f"predicted_{name}_s"] = values.pop(name).seconds
    return {**values, "settled": [{"from": at, "steps": steps} for at, steps in summary.settled]}


def _series(course: Course) -> dict[str, Any]:
    return {
        "balance_by_step": [round(float(value), 4) for value in course.balance_TL.mean(axis=1)],
        "decided_at": [decision.at for decision in course.decisions],
        "active_at": [decision.active for decision in course.decisions],
    }
