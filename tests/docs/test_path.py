"""The path of a call, as docs/design.md shows it: every function names the next one."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest
from docs_pages import DOCS, ROOT

PAGE = DOCS / "design.md"
_STEP = re.compile(r"^\d+\. `(?P<file>[^`]+\.py)`, `(?P<function>\w+)`", re.MULTILINE)
MOST_FILES = 8


def paths() -> dict[str, list[tuple[str, str]]]:
    """{heading: [(file, function)]} of the lists in the section."""
    section = PAGE.read_text().partition("\n## The path of a call\n")[2].partition("\n## ")[0]
    parts = re.split(r"^### (.+)$", section, flags=re.MULTILINE)[1:]
    return {
        heading: [(m["file"], m["function"]) for m in _STEP.finditer(text)] for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


def body_of(file: str, name: str) -> ast.AST:
    """The function, or class, of this name in a file, also inside of others."""
    found = [
        node
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
    ]
    assert len(found) == 1, f"{file} has {len(found)} of {name}"
    return found[0]


def names_in(node: ast.AST) -> set[str]:
    """The names in a function's body: calls, attributes, inner functions."""
    inside = [n for n in ast.walk(node) if n is not node]
    return {n.id for n in inside if isinstance(n, ast.Name)} | {n.attr for n in inside if isinstance(n, ast.Attribute)} | {
        n.name for n in inside if isinstance(n, ast.FunctionDef)
    }  # fmt: skip


def test_the_page_has_all_paths():
    assert [len(steps) > 3 for steps in paths().values()] == [True] * 3


@pytest.mark.parametrize("heading", paths())
def test_every_function_of_the_path_names_the_next(heading):
    steps = paths()[heading]
    missing = [
        f"{file}: {function} does not name {following}"
        for (file, function), (_, following) in pairwise(steps)
        if following not in names_in(body_of(file, function))
    ]
    assert not missing
    body_of(*steps[-1])


@pytest.mark.parametrize("heading", paths())
def test_a_call_goes_through_few_files(heading):
    files = {file for file, _ in paths()[heading]}
    assert len(files) <= MOST_FILES and all(Path(ROOT, file).is_file() for file in files)


def test_a_public_function_ends_in_run():
    """Its last statement returns the result of `run`, or of the family's helper that ends in `run`; nothing is cast."""
    for file in sorted((ROOT / "ssmgen" / "families").glob("*/*.py")):
        tree = ast.parse(file.read_text())
        for node in tree.body:
            made = isinstance(node, ast.FunctionDef) and any("operator" in ast.dump(d) for d in node.decorator_list)
            if not made:
                continue
            last = node.body[-1]
            assert isinstance(last, ast.Return) and isinstance(last.value, ast.Call), f"{file.name}: {node.name}"
            function = last.value.func
            assert isinstance(function, ast.Name) and function.id in ("run", "call", "_call", "decode", "commit"), f"{file}: {node.name}"
