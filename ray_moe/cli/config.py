"""config reference: every field of the documents that people write, from the models that read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from ray_moe.cli.field_notes import NOTES
from ray_moe.cli.options import AsJson
from ray_moe.cli.output import output

config = typer.Typer(help="Configurations.", no_args_is_help=True)

# model -> (title, what the table is of)
_TABLES = {
    "ClusterConfig": (
        "Cluster",
        "A file for `ray-moe up --config`, `--set FIELD=VALUE` on the command line, the arguments of "
        "`ray_moe.serve.keeper:build`. Only `model` is required.",
    ),
    "AutopilotConfig": ("Autopilot", "What `autopilot:` of a cluster holds. Targets are for one rank; times seconds."),
    "AppArgs": ("HTTP API", "The arguments of `ray_moe.serve.app:build` in a Serve configuration."),
    "CompletionRequest": (
        "Completions",
        "The body of `POST /v1/completions`, and what a row of a batch may hold. null is the default.",
    ),
    "ChatRequest": ("Chat completions", "The body of `POST /v1/chat/completions`, and a row of a batch."),
}


@config.command()
def reference(as_json: AsJson = False) -> None:
    """Print every field, its type, bounds, default and meaning, as Markdown."""
    with output(as_json) as out:
        out.result({name: list(fields(model)) for name, model in models().items()})
        if not as_json:
            out.text(markdown())


def models() -> dict[str, type[Any]]:
    """The documents of the reference, in its order."""
    from ray_moe.config import AutopilotConfig, ClusterConfig
    from ray_moe.serve.schema import AppArgs, ChatRequest, CompletionRequest

    return {
        model.__name__: model for model in (ClusterConfig, AutopilotConfig, AppArgs, CompletionRequest, ChatRequest)
    }


def markdown() -> str:
    """The page docs/configuration.md."""
    parts = [
        "# Configuration reference\n\nMade by `ray-moe config reference` from the models that read these documents; "
        "a field that is not here, or a value of another type, is refused by name.\n"
    ]
    for name, model in models().items():
        title, lead = _TABLES[name]
        parts.append(f"\n## {title}\n\n{lead}\n\n| field | type | default | |\n|---|---|---|---|\n")
        parts += [
            f"| `{row['field']}` | {_cell(row['type'])} | {_cell(row['default'])} | {_cell(row['note'])} |\n"
            for row in fields(model)
        ]
    return "".join(parts)


def fields(model: type[Any]) -> Iterator[dict[str, str]]:
    """A row per field."""
    schema = model.model_json_schema()
    required = set(schema.get("required", ()))
    for name, found in schema["properties"].items():
        default = "required" if name in required else _shown(found.get("default"))
        yield {"field": name, "type": _type(found), "default": default, "note": NOTES[model.__name__].get(name, "")}


def _type(found: Mapping[str, Any]) -> str:
    """A JSON schema in a few words: `whole number >= 1`."""
    if "anyOf" in found:
        return " or ".join(dict.fromkeys(_type(one) for one in found["anyOf"] if one.get("type") != "null"))
    if "$ref" in found:
        return f"{found['$ref'].rpartition('/')[2]}"
    if "enum" in found or "const" in found:
        return ", ".join(f"`{value}`" for value in found.get("enum", [found.get("const")]))
    kind = found.get("type", "value")
    if kind == "array":
        return f"list of {_type(found['items'])}"
    words = {"integer": "whole number", "boolean": "true or false", "string": "text", "object": "mapping"}
    return " ".join([words.get(kind, kind), *_bounds(found)])


def _bounds(found: Mapping[str, Any]) -> list[str]:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [f"{sign} {found[name]:g}" for name, sign in signs.items() if name in found]
    return [" and ".join(bounds)] if bounds else []


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
