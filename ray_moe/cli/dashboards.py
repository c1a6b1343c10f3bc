"""dashboards push, export: what Grafana shows and Prometheus watches, from the code into either."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ray_moe.cli.options import AsJson, parse_settings
from ray_moe.cli.output import output
from ray_moe.errors import ConfigError, RayMoEError

dashboards = typer.Typer(help="Grafana dashboards and Prometheus rules, from code.", no_args_is_help=True)

_FOLDER = "ray_moe"


@dashboards.command()
def push(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="Grafana's address, sub-path included.")],
    token: Annotated[
        str,
        typer.Option(
            "--token",
            envvar="GRAFANA_TOKEN",
            show_envvar=True,
            help="A service account's token, role Editor; better in the environment, where `ps` does not show it.",
        ),
    ] = "",
    folder: Annotated[
        str,
        typer.Option("--folder", metavar="TITLE|UID", help="Made if it is the default; any other must exist."),
    ] = _FOLDER,
    as_json: AsJson = False,
) -> None:
    """Create the dashboards in a Grafana, or bring those of an earlier push up to date."""
    from ray_moe.observe.dashboards.grafana import Grafana
    from ray_moe.observe.dashboards.pages import documents

    with output(as_json) as out:
        pushed = Grafana(url, token).push(documents(), folder)
        out.result({"url": url, "folder": folder, "dashboards": [asdict(each) for each in pushed]})
        if as_json:
            return
        for each in pushed:
            out.show(f"{each.title} (version {each.version}): {each.url or each.uid}")


@dashboards.command()
def export(
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write files ready for provisioning instead.")
    ] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="LIMIT=VALUE", help="Another limit of an alert, such as drain=1800; repeat."),
    ] = None,
    prometheus_url: Annotated[
        str, typer.Option("--prometheus", metavar="URL", help="Where Grafana reaches Prometheus.")
    ] = "http://localhost:9090",
    dashboards_path: Annotated[
        str | None,
        typer.Option(
            "--dashboards-path",
            metavar="DIR",
            help="Where Grafana finds the files (default: DIR/dashboards).",
        ),
    ] = None,
    scrape: Annotated[
        list[str] | None,
        typer.Option(
            "--scrape",
            metavar="HOST:PORT",
            help="Ray's endpoint on a node, as `ray-moe status` names it; repeat. Without, Prometheus is told the file "
            "that Ray's dashboard writes, and the Ray that `up` starts has one with --dashboard only.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print dashboards, rules, data source and scrape configuration as one JSON document; or write them as files."""
    from ray_moe.observe.dashboards.files import export_document, export_files
    from ray_moe.observe.dashboards.rules import Limits

    chosen, endpoints = Limits.of(parse_settings(limits or ())), scrape or []
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--scrape is {endpoint!r}; it must be HOST:PORT")
    with output(as_json or folder is None) as out:
        if folder is None:
            if dashboards_path is not None:
                raise ConfigError("--dashboards-path is for --out")
            out.result(export_document(chosen, prometheus_url, endpoints))
            return
        try:
            where = dashboards_path or str((folder / "dashboards").resolve())
            written = export_files(folder, chosen, prometheus_url, where, endpoints)
        except OSError as error:
            raise RayMoEError(f"cannot write to {folder}: {error.strerror or error}") from error
        out.result({"files": [str(path) for path in written]})
        if as_json:
            return
        for path in written:
            out.show(str(path))
