"""The floors of ssmgen/: allowed imports, imports inside functions included, and the folder's number of entries."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lowest first; a module imports its own floor and lower floors. docs/design.md draws them.
FLOORS = (
    "errors",
    "settings",
    "spec",
    "compile",
    "cache",
    "select",
    "launch",
    "calls",
    "distributed",
    "engine",
    "emulator",
    "families",
    "compat",
    "work_sharing",
    "variants",
    "bench",
    "tune",
    "cli",
    "__main__",
)
# Modules of a family that belong to a higher floor: its benchmark, and the names of its default variants.
HIGHER = {"bench": "bench", "defaults": "variants"}
ENTRIES = 22


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "ssmgen").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def for_types_only(tree: ast.Module) -> set[int]:
    """Nodes under `if TYPE_CHECKING`, which no program runs."""
    guarded = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    return {id(inner) for node in guarded for inner in ast.walk(node)}


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a module imports, at its top or inside a function."""
    tree = ast.parse(path.read_text())
    unused = for_types_only(tree)
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        wanted: list[str] = []
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            wanted = [f"{module}.{alias.name}" for alias in node.names]
        for full in wanted if id(node) not in unused else []:
            while full and full not in known:
                full = full.rpartition(".")[0]
            if full and full != name:
                yield full


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imports(name, path, known)) for name, path in known.items()}


def floor(name: str) -> int:
    """The number of a module's floor; the package itself, which looks names up when they are asked for, is above all."""
    parts = name.split(".")
    if len(parts) == 1:
        return len(FLOORS)
    place = parts[1]
    if place == "families" and len(parts) > 3:
        place = HIGHER.get(parts[3].partition("_")[0], place)
    return FLOORS.index(place)


def test_no_module_imports_a_higher_floor(imported):
    up = [
        f"{name} imports {other}"
        for name, others in imported.items()
        for other in others
        if other != "ssmgen" and floor(other) > floor(name)
    ]
    assert not up, "move what is shared to a lower floor"


def test_no_circle(imported):
    TopologicalSorter({name: others - {"ssmgen"} for name, others in imported.items()}).prepare()  # CycleError shows the circle


def test_folder_is_short():
    inside = {path.relative_to(ROOT / "ssmgen") for path in (ROOT / "ssmgen").rglob("*.*") if "__pycache__" not in path.parts}
    entries = {path.parts[0] for path in inside if path.suffix != ".pyc"} - {"_templates"}
    assert len(entries) <= ENTRIES, "give what is new a place in one of the packages"


def test_every_floor_is_there():
    assert {name.split(".")[1] for name in modules() if "." in name} == set(FLOORS)
