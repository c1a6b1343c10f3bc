"""The documentation is true where a program can tell: its links, its commands, its reference of fields."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from ray_moe.cli.config import fields, markdown, models
from ray_moe.cli.field_notes import NOTES
from ray_moe.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "cluster_configs" / "README.md", ROOT / "README.md"]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def page_name(path: object) -> str:
    return str(path.relative_to(ROOT)) if isinstance(path, Path) else str(path)


def anchors(path: Path) -> set[str]:
    """Headings as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    broken = []
    for link in _LINK.findall(page.read_text()):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if "://" not in link and (not path.exists() or (anchor and anchor not in anchors(path))):
            broken.append(link)
    assert broken == []


def commands() -> Iterator[tuple[str, str]]:
    """(page, line) of every `ray-moe` command in a fenced block, without what the shell does to it."""
    for page in PAGES:
        for _, block in _FENCE.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.search(r"(?:^|[\s/])ray-moe (.+)$", line.split("  #")[0])
                if found is not None and not line.lstrip().startswith("#"):
                    yield page_name(page), found[1]


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_every_command_parses(page: str, line: str) -> None:
    command = typer.main.get_command(app)
    arguments = shlex.split(line)
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    command.make_context(str(command.name), arguments)


def test_the_reference_is_what_the_models_say_now() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown(), (
        "ray-moe config reference > docs/configuration.md"
    )


def test_every_field_has_a_note_and_every_note_a_field() -> None:
    for name, model in models().items():
        rows = {row["field"]: row["note"] for row in fields(model)}
        assert [field for field, note in rows.items() if not note] == []
        others = {row["field"] for other in models() if NOTES[other] is NOTES[name] for row in fields(models()[other])}
        assert [field for field in NOTES[name] if field not in others] == []


def test_fields_that_the_pages_name_exist() -> None:
    """`field: value` in code on the pages for people who come from elsewhere, and of operations."""
    known = {row["field"] for model in models().values() for row in fields(model)}
    for page in ("coming-from.md", "operations.md"):
        text = (ROOT / "docs" / page).read_text()
        ours = [
            column for line in text.splitlines() for column in (line.split("|")[2:3] if line.startswith("| `") else [])
        ]
        named = {name for column in ours for name in re.findall(r"`([a-z_]+): [a-z0-9_]", column)}
        assert named <= known
