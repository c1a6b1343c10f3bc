"""The `ray-moe` command: the verbs, and how each of them ends.

Exit codes: 0; 1 for what went wrong, an operation that failed or was cancelled included; 2 for what was asked wrongly
(a `ConfigError`, an unknown option); 130 after Ctrl-C. Torch, Ray and transformers are imported by the verbs that need
them, so that --help answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ray_moe import __version__
from ray_moe.cli.batch import batch
from ray_moe.cli.config import config
from ray_moe.cli.dashboards import dashboards
from ray_moe.cli.demo import demo
from ray_moe.cli.elastic import cancel, drain, rebalance, scale
from ray_moe.cli.generate import generate
from ray_moe.cli.history import history
from ray_moe.cli.ledger import ledger
from ray_moe.cli.lifecycle import down, status, up
from ray_moe.cli.output import report
from ray_moe.cli.plan import plan
from ray_moe.cli.release import release
from ray_moe.cli.simulate import simulate
from ray_moe.cli.top import top
from ray_moe.cli.trace import trace
from ray_moe.errors import ConfigError, RayMoEError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="Serve Mixture-of-Experts models on a Ray cluster.", add_completion=False, pretty_exceptions_enable=False
)
for verb in (
    *(up, down, status, top, ledger, trace, generate, batch, demo),
    *(rebalance, scale, drain, cancel, history),
    *(plan, simulate),
):
    app.command()(verb)
app.add_typer(release, name="release")
app.add_typer(config, name="config")
app.add_typer(dashboards, name="dashboards")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ray-moe {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Expected errors are one line on stderr, and never a traceback."""
    as_json = "--json" in arguments
    try:
        code = int(app(list(arguments), prog_name="ray-moe", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except RayMoEError as error:
        code = EXIT_BAD_INPUT if isinstance(error, ConfigError) else EXIT_FAILED
        report(str(error), type(error).__name__, code, as_json=as_json, param=getattr(error, "param", None))
    except Exception as error:
        # Which class this is depends on the version of typer, some of which bring their own copy of click; and
        # Ray's are not to be imported for a look.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            code = error.exit_code
            report(error.format_message() or "no command given", "UsageError", code, as_json=as_json)
        elif type(error).__module__.split(".")[0] == "ray":
            code = EXIT_FAILED
            report(_first_line(error), type(error).__name__, code, as_json=as_json)
        else:
            raise
    if code == EXIT_INTERRUPTED:
        report("interrupted", "Interrupted", code, as_json=as_json)
    return code


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


if __name__ == "__main__":
    main()
