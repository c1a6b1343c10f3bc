"""Options that several commands share, and what they make together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_moe.errors import ConfigError
from ray_moe.models import TINY_MOE

if TYPE_CHECKING:
    from ray_moe.config import ClusterConfig

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; all else goes to stderr.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="HOST:PORT", help="A running Ray cluster; auto: where `up` put this one, else a local Ray."
    ),
]
Name = Annotated[str | None, typer.Option("--name", help="The cluster's name (default: default).")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PATH|HUB_ID",
        help=f"The model (required, here or in --config); {TINY_MOE} is the one that ships with ray_moe.",
    ),
]
Revision = Annotated[str | None, typer.Option("--revision", help="Revision of a hub model.")]
Peers = Annotated[int | None, typer.Option("--peers", metavar="N", help="Expert actors (default: 4).")]
SpareSlots = Annotated[
    str | None,
    typer.Option(
        "--spare-slots",
        metavar="N|auto",
        help="Free slots per peer and layer (default: 0); auto: as many as fit.",
    ),
]
Replicas = Annotated[
    str | None,
    typer.Option("--replicas", metavar="LAYER:EXPERT=COUNT,...", help="Copies in all; LAYER * is every MoE layer."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A cluster configuration (YAML); options go before it.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 (default), bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu (default) or cuda.")]
TrustRemoteCode = Annotated[
    bool | None, typer.Option("--trust-remote-code", help="Run modelling code that the model brings along.")
]

ApiKeysFile = Annotated[
    Path | None,
    typer.Option(
        "--api-keys-file",
        metavar="FILE",
        help="Keys that open the HTTP API, one per line (also: RAY_MOE_API_KEYS); without any, only a loopback --host.",
    ),
]
AdminTokensFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-tokens-file",
        metavar="FILE",
        help="Tokens that open the admin routes (also: RAY_MOE_ADMIN_TOKENS); without any, these are off.",
    ),
]
LogJson = Annotated[
    bool,
    typer.Option("--log-json", help="What actors, replicas and this command log is a JSON document a line."),
]
NoAuth = Annotated[bool, typer.Option("--no-auth", help="Let everybody in who reaches the HTTP API's address.")]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any field of a cluster configuration, for example transport=hierarchical; may be given again.",
    ),
]


_EXAMPLES = {"--set": "transport=hierarchical", "--default": "max_tokens=64"}
_OWN_NOTATION = frozenset({"replicas", "decode_buckets", "node_labels"})


def cluster_config(file: Path | None, settings: list[str] | None = None, **options: Any) -> ClusterConfig:
    """The configuration file, if any, with the settings and then the options that were given over it. `ConfigError`.

    A model folder becomes its full path, since actors run elsewhere.
    """
    from ray_moe.config import ClusterConfig, load_config

    given = parse_settings(settings or ()) | {key: value for key, value in options.items() if value is not None}
    spare = str(given.get("spare_slots"))
    if spare.isdecimal():  # as an option it is text, since it may be "auto"
        given["spare_slots"] = int(spare)
    if file is None and "model" not in given:
        raise ConfigError("model: required, but not given (--model, or a --config file that names it)")
    config = load_config(file, given) if file is not None else ClusterConfig.parse(given)
    return config.model_copy(update={"model": resolved_model(config.model)})


def parse_settings(settings: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """FIELD=VALUE, the value as in a configuration file. `ConfigError` for text without a field, or one given twice."""
    from ray_moe.manifest import read_yaml

    found: dict[str, Any] = {}
    for text in settings:
        field, given, value = text.partition("=")
        if not given or not field.strip():
            raise ConfigError(f"{option} takes FIELD=VALUE, for example {_EXAMPLES[option]}; found {text!r}")
        if field.strip() in found:
            raise ConfigError(f"{option} gives {field.strip()} twice")
        field = field.strip()
        # What has a notation of its own is no YAML: 0x1 would be a number there, *:3=2 an alias, 1:2 minutes.
        own = field in _OWN_NOTATION and not value.lstrip().startswith("[")
        found[field] = value if own else read_yaml(value, f"{option} {field}")
    return found


def resolved_model(model: str) -> str:
    """`ConfigError` for a path that leads to no model folder; the embedded model's name and hub ids are kept."""
    if model == TINY_MOE:
        return model
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is not a model folder: it has no config.json")
        return str(folder.resolve())
    if model.startswith(("/", "./", "../", "~")) or len(folder.parts) > 2 or folder.exists():
        raise ConfigError(f"model {model!r} is not a folder")
    return model
