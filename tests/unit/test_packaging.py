"""The installed package, the folders on disk and the pinned set say the same thing."""

from __future__ import annotations

import importlib
import subprocess
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_packages

import ray_moe

ROOT = Path(__file__).resolve().parents[2]
LINKS = {"ray_moe/actors": "../actors", "ray_moe/kernels": "../kernels"}


@pytest.fixture(scope="module")
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins() -> dict[str, Version]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines if line)}


def folders_with_python(top: Path) -> Iterator[Path]:
    """`top` and every folder below it that holds a Python file, symbolic links followed."""
    if any(top.glob("*.py")):
        yield top
    for child in sorted(top.iterdir()):
        if child.is_dir() and child.name != "__pycache__":
            yield from folders_with_python(child)


def test_every_folder_with_python_files_is_a_package() -> None:
    bare = [
        str(folder.relative_to(ROOT))
        for folder in folders_with_python(ROOT / "ray_moe")
        if not (folder / "__init__.py").is_file()
    ]
    assert bare == [], "without an __init__.py a folder is left out of the wheel"


def test_setuptools_finds_exactly_the_packages_on_disk(pyproject: dict) -> None:
    configured = pyproject["tool"]["setuptools"]["packages"]["find"]
    found = set(find_packages(where=str(ROOT), **configured))
    on_disk = {".".join(folder.relative_to(ROOT).parts) for folder in folders_with_python(ROOT / "ray_moe")}
    assert found == on_disk
    assert {"ray_moe.actors", "ray_moe.kernels", "ray_moe.dataplane"} <= found


@pytest.mark.parametrize(("link", "target"), LINKS.items())
def test_the_two_links_are_relative_and_lead_to_the_top_level_folders(link: str, target: str) -> None:
    assert (ROOT / link).is_symlink()
    assert (ROOT / link).readlink() == Path(target)
    assert (ROOT / link).resolve() == ROOT / Path(link).name


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_two_links_are_committed_as_links() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "--", *LINKS], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    modes = {line.split("\t")[1]: line.split()[0] for line in listed}
    assert modes == dict.fromkeys(LINKS, "120000"), "git's mode of a symbolic link is 120000"


def test_the_linked_packages_import_under_the_products_name() -> None:
    for name in ("ray_moe.actors", "ray_moe.kernels"):
        module = importlib.import_module(name)
        assert module.__name__ == name
        assert Path(module.__file__ or "").resolve().parent == ROOT / name.split(".")[1]


def test_the_installed_version_is_the_packages() -> None:
    assert metadata.version("ray-moe") == ray_moe.__version__


def test_the_command_line_script_leads_to_something_callable() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="ray-moe")
    assert script.value == "ray_moe.cli.main:main"
    assert callable(script.load())


def test_every_requirement_is_pinned_inside_its_range(pyproject: dict, pins: dict[str, Version]) -> None:
    project = pyproject["project"]
    requirements = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]
    wrong = [
        str(requirement)
        for requirement in requirements
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), Version("0")))
    ]
    assert wrong == []


def test_everything_that_the_requirements_pull_in_is_pinned_too(pyproject: dict, pins: dict[str, Version]) -> None:
    project = pyproject["project"]
    waiting = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                waiting.append(needed)
    unpinned = {name for name, _ in seen} - pins.keys()
    # A CUDA build of torch brings its own parts, which a pinned set for CPU hosts cannot name.
    assert {name for name in unpinned if not name.startswith(("nvidia-", "cuda-", "triton"))} == set()
