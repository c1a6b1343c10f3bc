"""The architecture as rules over source text: who may import whom, which library lives where, how one waits.

Each rule is a function from one module's source to the violations in it. The same functions run over the whole package
and, below each, over small snippets that show that the rule catches what it is for. Imports inside functions, under
TYPE_CHECKING and through importlib count like any other.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE_LIMIT = 400

# ---------------------------------------------------------------------------------------------------------------------
# The rules' data. A unit is a module or a package right under ray_moe; "comm.rendezvous" is one module inside a unit.

TORCH_FREE_VOCABULARY = frozenset(
    [
        *("errors", "identity", "evidence", "topology", "topology_ledger", "placement"),
        *("manifest", "asked", "config", "relations", "plans", "metrics", "events", "telemetry"),
    ]
)
VOCABULARY = TORCH_FREE_VOCABULARY | {"routes"}
DATA = VOCABULARY | {"kernels", "comm"}
ENGINE = DATA | {"weights", "dataplane", "engine"}
ACTORS = ENGINE | {"controlplane", "actors", "observe"}
# How people come in; `models` ships the embedded checkpoint.
DOORS = ACTORS | {"cluster", "serve", "sdk", "text", "guidance", "models"}

# Unit -> the units it may import besides itself and `deadline`, which is a leaf that anybody may wait through.
ALLOWED_IMPORTS: dict[str, frozenset[str]] = {
    "__init__": frozenset({"http_client", "sdk", "plugin"}),
    "__main__": frozenset({"cli"}),
    "errors": frozenset(),
    "deadline": frozenset({"errors"}),
    **dict.fromkeys(TORCH_FREE_VOCABULARY - {"errors"}, TORCH_FREE_VOCABULARY),
    "priority": frozenset({"deadline"}),
    "routes": VOCABULARY,
    "models": VOCABULARY,
    "kernels": VOCABULARY,
    "comm": VOCABULARY | {"kernels"},
    "weights": DATA,
    "dataplane": DATA,
    "engine": DATA | {"weights", "dataplane"},
    "controlplane": TORCH_FREE_VOCABULARY,
    "actors": ENGINE | {"controlplane", "observe", "models", "priority", "text", "guidance"},
    "text": VOCABULARY,
    "guidance": VOCABULARY,
    "observe": VOCABULARY | {"controlplane"},
    "cluster": ACTORS | {"models"},
    "sdk": ACTORS | {"models", "cluster", "text"},
    "serve": ACTORS | {"models", "cluster", "sdk", "text", "guidance"},
    "http_client": frozenset({"errors"}),
    "plugin": ENGINE | {"sdk"},
    "batch": DOORS,
    "bench": DOORS | {"observe", "batch", "priority"},
    "cli": DOORS | {"observe", "batch", "bench", "priority"},
}

# Library -> the only places that may import it.
ONLY_IN: dict[str, frozenset[str]] = {
    "triton": frozenset({"kernels"}),
    "cupy": frozenset({"comm"}),
    "ray": frozenset(
        {"actors", "serve", "observe", "bench", "comm.rendezvous", "cluster", "sdk", "batch", "cli", "deadline"}
    ),
    # What others log with is the standard library's; where spans go is one module's business.
    "structlog": frozenset({"events"}),
    "opentelemetry": frozenset({"telemetry"}),
    # Frozen dataclasses cross every other boundary.
    "pydantic": frozenset({"manifest", "asked", "config", "relations", "plans", "serve.schema", "serve.messages"}),
}

# Library -> the places that must do without it.
TORCH_FREE = TORCH_FREE_VOCABULARY | {"controlplane"}
DETERMINISTIC = frozenset({"controlplane", "comm.agreement"})  # no I/O, time is an argument: a simulator can drive them
NEVER_IN: dict[str, frozenset[str]] = {
    **dict.fromkeys(("torch", "transformers"), TORCH_FREE),
    **dict.fromkeys(("time", "asyncio", "threading", "socket", "subprocess", "multiprocessing"), DETERMINISTIC),
}

# The first is Hugging Face's name; both work only from the project root, where ray_moe.kernels and ray_moe.actors work
# from anywhere.
BARE_FOLDERS = frozenset({"kernels", "actors"})

# Calls that block, however they are bounded, and methods that block for ever when they are given no timeout.
BLOCKING_FUNCTIONS = frozenset({"ray.get", "ray.wait", "time.sleep"})
BLOCKING_METHODS = frozenset({"wait"})
UNBOUNDED_METHODS = frozenset({"get", "join", "result", "communicate"})
BOUNDING_CALLS = frozenset({"asyncio.wait_for", "ray_moe.deadline.wait_for"})  # they take the awaitable as an argument
WAITING_MODULE = "deadline"

# "module: call" -> why this one is no unbounded wait, or cannot go through ray_moe/deadline.py.
ALLOWED_WAITS: dict[str, str] = {
    # Inside kernels: a warp waits for its own program's copies, which the same launch has begun.
    "kernels.decode_layer: mbarrier.wait": "on the device",
    "kernels.warp_gemm: mbarrier.wait": "on the device",
    "kernels.fp8_warp: mbarrier.wait": "on the device",
    # The product's own Ticket: its result() waits in deadline.wait_work under the group's deadline.
    "comm.gloo: self._group.wait": "GlooGroup.wait is where the ticket does so",
    "comm.gloo: self._gather(self._open(self._payload), line).result": "the count exchange's ticket",
    "cli.elastic: self.cluster.wait": "Cluster.wait waits in deadline.ray_get, under the seconds that it is given",
    "actors.lookout: asked.task.result": "the task is done",
    "bench.layer: transport.group.gather(record).result": "the same ticket, timed",
    "bench.gpu_exchange: rank.group.gather(record).result": "the same ticket, timed",
    "engine.loop: self._offer(plan).result": "the step agreement's ticket",
    "engine.loop: ticket.result": "the step agreement's ticket",
    "engine.offer: self._ticket.result": "the step agreement's ticket, inside the loop's own wrapper",
}

# torch.distributed's process-wide group is one per process and cannot be rebuilt per epoch.
DEFAULT_GROUP = frozenset(
    [
        "init_process_group",
        "destroy_process_group",
        "new_group",
        "new_subgroups",
        "is_initialized",
        "get_rank",
        "get_world_size",
        "get_backend",
        "WORLD",
        "_get_default_group",
        "_set_pg_timeout",
    ]
)
# These use it unless they are given another group.
COLLECTIVES = frozenset(
    [
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "isend",
        "irecv",
        "monitored_barrier",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    ]
)


# ---------------------------------------------------------------------------------------------------------------------
# Reading a module


@dataclass(frozen=True)
class Module:
    """One source file. `name` is its dotted name without "ray_moe.": "comm.gloo", and "comm" for the package itself."""

    name: str
    source: str
    is_package: bool = False

    @property
    def unit(self) -> str:
        return self.name.split(".")[0]

    def is_in(self, places: Iterable[str]) -> bool:
        return any(self.name == place or self.name.startswith(f"{place}.") for place in places)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.source)))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def bound_names(self) -> dict[str, str]:
        """Local name -> what an import statement anywhere in the file binds it to."""
        names = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{self.base_of(node)}.{alias.name}"
        return names

    def base_of(self, node: ast.ImportFrom) -> str:
        """The absolute dotted name that `from ... import` starts from."""
        if node.level == 0:
            return node.module or ""
        package = ["ray_moe", *self.name.split(".")]
        if self.name == "__init__":
            package = ["ray_moe"]
        elif not self.is_package:
            package.pop()
        package = package[: len(package) - (node.level - 1)]
        return ".".join([*package, *([node.module] if node.module else [])])

    def dotted(self, node: ast.AST) -> str | None:
        """`dist.group.WORLD` with its first name as imported; None if it starts from an expression."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join([self.bound_names.get(node.id, node.id), *reversed(parts)])

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, absolute dotted name) of everything imported; "?" for a name computed at run time."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(node.lineno, f"{self.base_of(node)}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Call) and self.dotted(node.func) in ("importlib.import_module", "__import__"):
                name = node.args[0] if node.args else None
                literal = isinstance(name, ast.Constant) and isinstance(name.value, str)
                found.append((node.lineno, name.value if literal else "?"))
        return found


def product_modules() -> Iterator[Module]:
    """Every module of the package, under its import name: the two linked folders are walked through their links."""
    top = ROOT / "ray_moe"
    for folder, _, files in os.walk(top, followlinks=True):
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder) / file
                parts = list(path.relative_to(top).with_suffix("").parts)
                is_package = parts[-1] == "__init__" and len(parts) > 1
                name = ".".join(parts[:-1] if is_package else parts)
                yield Module(name, path.read_text(encoding="utf-8"), is_package)


def other_modules() -> Iterator[Module]:
    """Tests and benchmark scripts; their names start with the folder's, which is no unit of the product."""
    for folder in ("tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield Module(".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text(encoding="utf-8"))


PRODUCT = list(product_modules())
OTHERS = list(other_modules())


# ---------------------------------------------------------------------------------------------------------------------
# The rules


def import_direction(module: Module) -> Iterator[str]:
    if module.unit not in ALLOWED_IMPORTS:
        yield f"{module.name}: {module.unit!r} has no row in ALLOWED_IMPORTS"
        return
    allowed = ALLOWED_IMPORTS[module.unit] | {module.unit, WAITING_MODULE}
    for line, name in module.imports:
        root, _, rest = name.partition(".")
        unit = rest.split(".")[0]
        if name == "?":
            yield f"{module.name}:{line}: imports a name computed at run time"
        elif root == "ray_moe" and unit not in allowed and not unit.startswith("__"):
            yield f"{module.name}:{line}: {module.unit} may not import {name}"


def libraries_in_their_place(module: Module) -> Iterator[str]:
    for line, name in module.imports:
        library = name.split(".")[0]
        if library in ONLY_IN and not module.is_in(ONLY_IN[library]):
            yield f"{module.name}:{line}: {library} belongs in {', '.join(sorted(ONLY_IN[library]))} only"
        if library in NEVER_IN and module.is_in(NEVER_IN[library]):
            yield f"{module.name}:{line}: no {library} in {module.name}"


def no_bare_folder_imports(module: Module) -> Iterator[str]:
    for line, name in module.imports:
        if name.split(".")[0] in BARE_FOLDERS:
            yield f"{module.name}:{line}: import ray_moe.{name}, not {name}"


def waits_through_deadline(module: Module) -> Iterator[str]:
    if module.name == WAITING_MODULE:
        return
    for node in module.nodes:
        if isinstance(node, ast.Call) and blocks(module, node) and not is_awaited(module, node):
            call = ast.unparse(node.func)
            if f"{module.name}: {call}" not in ALLOWED_WAITS:
                yield f"{module.name}:{node.lineno}: {call}(...) waits outside ray_moe/deadline.py"


def blocks(module: Module, call: ast.Call) -> bool:
    name = module.dotted(call.func)
    if name is not None and name.startswith(f"ray_moe.{WAITING_MODULE}."):
        return False
    if name in BLOCKING_FUNCTIONS:
        return True
    if not isinstance(call.func, ast.Attribute) or is_own_method(module, call.func):
        return False
    unbounded = not call.args and not any(keyword.arg in ("timeout", None) for keyword in call.keywords)
    return call.func.attr in BLOCKING_METHODS or (call.func.attr in UNBOUNDED_METHODS and unbounded)


def is_own_method(module: Module, function: ast.Attribute) -> bool:
    """`self.wait(...)` in a class that defines `wait`: what it waits on is seen in that method's own body."""
    owner: ast.AST = function
    while not isinstance(owner, ast.ClassDef | ast.Module):
        owner = module.parents[owner]
    methods = {node.name for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return (
        isinstance(owner, ast.ClassDef)
        and module.dotted(function) == f"self.{function.attr}"
        and function.attr in methods
    )


def is_awaited(module: Module, call: ast.Call) -> bool:
    """An asyncio wait suspends one task only: awaited as it is, or handed to a call that bounds it."""
    parent = module.parents[call]
    return isinstance(parent, ast.Await) or (
        isinstance(parent, ast.Call) and module.dotted(parent.func) in BOUNDING_CALLS
    )


def no_default_group(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            name = module.dotted(node)
            if name is not None and name.startswith("torch.distributed."):
                last = name.rpartition(".")[2]
                if last in DEFAULT_GROUP or (last in COLLECTIVES and not has_own_group(module, node)):
                    yield f"{module.name}:{node.lineno}: {name} uses the process-wide default group"


def has_own_group(module: Module, function: ast.AST) -> bool:
    call = module.parents[function]
    return isinstance(call, ast.Call) and call.func is function and any(k.arg == "group" for k in call.keywords)


def at_most_400_lines(module: Module) -> Iterator[str]:
    lines = len(module.source.splitlines())
    if lines > LINE_LIMIT:
        yield f"{module.name}: {lines} lines, the limit is {LINE_LIMIT}"


# ---------------------------------------------------------------------------------------------------------------------
# The package keeps every rule

Rule = Callable[[Module], Iterator[str]]


def violations(rule: Rule, modules: Iterable[Module]) -> list[str]:
    return [violation for module in modules for violation in rule(module)]


@pytest.mark.parametrize(
    "rule",
    [
        import_direction,
        libraries_in_their_place,
        no_bare_folder_imports,
        waits_through_deadline,
        no_default_group,
        at_most_400_lines,
    ],
)
def test_the_package_keeps(rule: Rule) -> None:
    assert violations(rule, PRODUCT) == []


@pytest.mark.parametrize("rule", [no_bare_folder_imports, no_default_group])
def test_tests_and_benchmarks_keep(rule: Rule) -> None:
    assert violations(rule, OTHERS) == []


def test_the_rules_see_the_whole_package_and_the_linked_folders_too() -> None:
    names = {module.name for module in PRODUCT}
    assert {"__init__", "errors", "placement", "dataplane", "actors", "kernels"} <= names
    assert len(PRODUCT) == len(names)


def test_the_table_of_allowed_imports_has_no_cycle_between_packages() -> None:
    vocabulary_as_one = {
        unit: {"vocabulary" if other in VOCABULARY else other for other in allowed} - {unit}
        for unit, allowed in ALLOWED_IMPORTS.items()
        if unit not in VOCABULARY
    }
    order = list(TopologicalSorter(vocabulary_as_one).static_order())
    chain = ["vocabulary", "kernels", "comm", "dataplane", "engine", "actors", "sdk", "cli"]
    assert sorted(chain, key=order.index) == chain


def test_every_allowed_wait_is_still_there() -> None:
    present = {
        f"{module.name}: {ast.unparse(node.func)}"
        for module in PRODUCT
        for node in module.nodes
        if isinstance(node, ast.Call)
    }
    assert ALLOWED_WAITS.keys() <= present


def test_the_control_plane_and_the_vocabulary_load_neither_torch_nor_ray() -> None:
    names = [f"ray_moe.{module.name}" for module in PRODUCT if module.is_in(TORCH_FREE)]
    assert "ray_moe.controlplane" in names
    program = (
        "import importlib, sys\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Each rule catches what it is for, and nothing else

CAUGHT: list[tuple[Rule, str, str]] = [
    (import_direction, "comm.gloo", "from ray_moe.dataplane.plan import Plan"),
    (import_direction, "comm.gloo", "from ray_moe import engine"),
    (import_direction, "comm.gloo", "from ..weights import slots"),
    (import_direction, "kernels.combine", "from .. import comm"),
    (import_direction, "comm.gloo", "import ray_moe.actors.expert"),
    (import_direction, "dataplane.layer", "def f():\n    from ray_moe.weights.slots import SlotPool"),
    (import_direction, "controlplane.solve", "if TYPE_CHECKING:\n    from ray_moe.routes import Routes"),
    (import_direction, "engine.loop", "import importlib\nimportlib.import_module('ray_moe.actors')"),
    (import_direction, "engine.loop", "from importlib import import_module as load\nload('ray_moe.actors.' + name)"),
    (import_direction, "placement", "from ray_moe.comm.group import ExpertGroup"),
    (import_direction, "errors", "from ray_moe.placement import PlacementSnapshot"),
    (import_direction, "deadline", "from ray_moe.routes import Routes"),
    (import_direction, "sdk", "from ray_moe.cli.main import main"),
    (import_direction, "helpers", "import json"),
    (libraries_in_their_place, "controlplane.solve", "import torch.nn.functional as F"),
    (libraries_in_their_place, "placement", "def f():\n    from torch import Tensor"),
    (libraries_in_their_place, "controlplane.autoscale", "from time import monotonic"),
    (libraries_in_their_place, "comm.agreement", "import threading"),
    (libraries_in_their_place, "dataplane.runners", "import triton.language as tl"),
    (libraries_in_their_place, "weights.transfer", "from cupy.cuda import runtime"),
    (libraries_in_their_place, "comm.gloo", "import ray"),
    (libraries_in_their_place, "engine.loop", "from ray.actor import ActorHandle"),
    (libraries_in_their_place, "engine.loop", "__import__('ray')"),
    (libraries_in_their_place, "serve.app", "from pydantic import BaseModel"),
    (no_bare_folder_imports, "engine.loop", "import kernels"),
    (no_bare_folder_imports, "engine.loop", "def f():\n    from actors.expert import ExpertActor"),
    (waits_through_deadline, "sdk", "import ray\nray.get(ref, timeout=1)"),
    (waits_through_deadline, "sdk", "import ray as r\nr.wait([ref])"),
    (waits_through_deadline, "sdk", "from ray import get as fetch\nfetch(ref)"),
    (waits_through_deadline, "comm.gloo", "work.wait()"),
    (waits_through_deadline, "comm.gloo", "self.group.all_to_all_single(out, rows).wait(timeout)"),
    (waits_through_deadline, "engine.loop", "self.stopped.wait(timeout=5)"),
    (waits_through_deadline, "engine.loop", "item = queue.get()"),
    (waits_through_deadline, "engine.loop", "item = queue.get(block=True)"),
    (waits_through_deadline, "engine.loop", "thread.join()"),
    (waits_through_deadline, "serve.app", "response.result()"),
    (waits_through_deadline, "comm.gloo", "class G:\n    def f(self):\n        self.wait(1)"),
    (waits_through_deadline, "comm.gloo", "class G:\n    def wait(self):\n        self.work.wait(1)"),
    (waits_through_deadline, "cli.up", "import time\ntime.sleep(1)"),
    (waits_through_deadline, "serve.app", "async def f(event):\n    waiter = event.wait()"),
    (no_default_group, "comm.gloo", "import torch\ntorch.distributed.init_process_group('gloo')"),
    (no_default_group, "comm.gloo", "from torch.distributed import init_process_group as join\njoin('nccl')"),
    (no_default_group, "comm.gloo", "from torch.distributed.distributed_c10d import _get_default_group as g\ng()"),
    (no_default_group, "comm.gloo", "import torch.distributed as dist\nrank = dist.get_rank()"),
    (no_default_group, "comm.gloo", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (no_default_group, "comm.gloo", "import torch.distributed as dist\nsome(dist.group.WORLD)"),
    (no_default_group, "tests.comm", "from torch import distributed as dist\nsetup = dist.init_process_group"),
    (at_most_400_lines, "engine.loop", "x = 1\n" * 401),
]

PERMITTED: list[tuple[Rule, str, str]] = [
    (
        import_direction,
        "dataplane.layer",
        "from ray_moe.comm.group import ExpertGroup\nfrom . import plan\nfrom .. import errors",
    ),
    (import_direction, "engine.loop", "from ray_moe.kernels.reference import permute"),
    (import_direction, "cli.main", "from ray_moe import __version__, batch, bench, observe, sdk"),
    (import_direction, "kernels.combine", "from ray_moe.deadline import Deadline"),
    (import_direction, "comm.gloo", "import importlib\nimportlib.import_module('cupy')"),
    (libraries_in_their_place, "comm.rendezvous", "import ray"),
    (libraries_in_their_place, "comm.nccl", "import cupy"),
    (libraries_in_their_place, "kernels.permute", "import triton"),
    (libraries_in_their_place, "controlplane.solve", "import numpy, torchless, ray_moe.errors"),
    (libraries_in_their_place, "serve.schema", "from pydantic import BaseModel"),
    (no_bare_folder_imports, "engine.loop", "from ray_moe import kernels\nfrom ray_moe.actors import expert"),
    (waits_through_deadline, "deadline", "import ray\nray.get(ref)"),
    (waits_through_deadline, "sdk", "from ray_moe import deadline\ndeadline.ray_get(ref, 5, 'x')"),
    (waits_through_deadline, "sdk", "from ray_moe import deadline\ndeadline.wait(event)"),
    (waits_through_deadline, "sdk", "async def f(event):\n    await event.wait()"),
    (waits_through_deadline, "sdk", "import asyncio\nasync def f(e):\n    await asyncio.wait_for(e.wait(), 5)"),
    (
        waits_through_deadline,
        "comm.gloo",
        "class G:\n    def wait(self):\n        ...\n    def f(self):\n        self.wait()",
    ),
    (waits_through_deadline, "sdk", "value = table.get('key')\ntext = ', '.join(parts)\nitem = queue.get(timeout=1)"),
    (no_default_group, "comm.gloo", "import torch.distributed as dist\ndist.PrefixStore('ep1', store)"),
    (no_default_group, "comm.gloo", "import torch.distributed as dist\ndist.all_reduce(x, group=self.group)"),
    (no_default_group, "comm.gloo", "self.group.all_reduce(x)\nself.get_rank()"),
    (at_most_400_lines, "engine.loop", "x = 1\n" * 400),
]


def case_name(case: object) -> str:
    return case.__name__ if callable(case) else str(case)[:60].replace("\n", "; ")


@pytest.mark.parametrize(("rule", "name", "source"), CAUGHT, ids=case_name)
def test_a_rule_catches(rule: Rule, name: str, source: str) -> None:
    found = violations(rule, [Module(name, source)])
    assert len(found) == 1
    assert found[0].startswith(name)


@pytest.mark.parametrize(("rule", "name", "source"), PERMITTED, ids=case_name)
def test_a_rule_permits(rule: Rule, name: str, source: str) -> None:
    assert violations(rule, [Module(name, source)]) == []


def test_a_relative_import_is_resolved_from_the_package_that_it_stands_in() -> None:
    in_module = Module("comm.gloo", "from .group import ExpertGroup\nfrom ..errors import ConfigError")
    in_package = Module("comm", "from .group import ExpertGroup\nfrom ..errors import ConfigError", is_package=True)
    in_root = Module("__init__", "from .errors import ConfigError")
    both = [(1, "ray_moe.comm.group.ExpertGroup"), (2, "ray_moe.errors.ConfigError")]
    assert in_module.imports == both
    assert in_package.imports == both
    assert in_root.imports == [(1, "ray_moe.errors.ConfigError")]
