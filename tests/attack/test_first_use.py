"""Names are loaded when they are first used: by any number of threads, in any order.

Many more trials: python tests/attack/first_use.py 500
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from selection import costly

import ssmgen
from ssmgen.spec.family import PACKAGE, records

ROOT = Path(ssmgen.__file__).parent
PROGRAM = Path(__file__).with_name("first_use.py")


@costly(1)
@pytest.mark.parametrize("args", [("8",), ("1", "--own-torch")], ids=["8", "1-with-torch"])
def test_threads_that_begin_together(args):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *args], env={"PYTHONPATH": str(ROOT.parent), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{args[0]} trials, 0 wrong\n"


# Proof for all orders of the trials: each thread takes the locks of modules in the order in which they import each other.

MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if "cli" not in path.relative_to(ROOT).parts  # the command, which one thread runs
}


def at_import(nodes: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that importing a module runs."""
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from at_import(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for block in ("body", "orelse", "finalbody", "handlers"):
                yield from at_import(getattr(node, block, []))


def imported(name: str) -> list[str]:
    """The imports of a module, in order; `from a import b` also counts a.b."""
    package = name if MODULES[name].stem == "__init__" else name.rpartition(".")[0]
    found = []
    for node in at_import(ast.parse(MODULES[name].read_text()).body):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        else:
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


# Packages that people import by name, and that import their own modules.
DOORS = tuple(f"ssmgen.compat.{peer}" for peer in ("fla", "flashinfer", "hf", "mamba_ssm", "sglang", "vllm"))


def behind(door: str) -> set[str]:
    """Modules of a package that importing it imports."""
    found, todo = set(), [door]
    while todo:
        new = {m for m in imported(todo.pop()) if m in MODULES and m.startswith(f"{door}.")} - found
        found |= new
        todo += new
    return found


def test_no_two_modules_wait_for_each_other():
    """A module also waits for its package. A package that imports one of its modules would therefore close a circle, unless a door hides
    the modules: no other module imports them, so every thread comes through the door."""
    waits = {name: {m for m in (*imported(name), name.rpartition(".")[0]) if m in MODULES} - {name} for name in MODULES}
    for door in DOORS:
        hidden = behind(door)
        assert hidden
        for name in MODULES:
            if name in hidden:
                waits[name] -= {door}
            elif name != door and not name.startswith(f"{door}."):
                assert not waits[name] & hidden, f"{name} must import {door} itself"
    for family in records():  # modules imported by their place in the records
        home = f"{PACKAGE}.{family.name}"
        waits["ssmgen.select.catalog"] |= {
            home,
            *(f"{home}.{part.partition(':')[0]}" for k in family.kernels for part in (k.spec, k.problem or k.spec)),
        }
        waits["ssmgen.calls.api"] |= {home, *(f"{home}.{place.partition(':')[0]}" for place in family.functions.values())}
    assert waits["ssmgen.select.registry"] >= {"ssmgen.select", "ssmgen.select.catalog", "ssmgen.select.tuned"} and len(waits) > 100
    list(TopologicalSorter(waits).static_order())  # raises CycleError, which shows the circle


def test_torch_is_imported_whole_before_parts_of_it():
    """torch's modules do wait for each other: only a thread that imports torch itself first waits for all of it."""
    of_torch = {name: [m for m in imported(name) if m.partition(".")[0] == "torch"] for name in MODULES}
    assert {name: found[0] for name, found in of_torch.items() if found and found[0] != "torch"} == {}
