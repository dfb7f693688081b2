"""A docstring is a sentence, or a noun with its complements, that is understood without its neighbours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from docs_pages import ROOT

# Words that a fragment begins with, which leans on the name above it: in the package, and in programs and tests.
LEANING = {"ssmgen": {"By", "For", "Likewise", "Of", "That", "Those", "To", "With", "Without"}, "tests": {"Of"}, "tools": {"Of"}}


def fragments(path: Path, words: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or "-"
            if text.replace(".", " ").split()[0] in words:
                yield f"{getattr(node, 'name', path.stem)}: {text.splitlines()[0]}"


def test_no_docstring_begins_with_a_word_that_leans_on_what_stands_around_it():
    paths = [(path, words) for folder, words in LEANING.items() for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): lines for path, words in paths if (lines := [*fragments(path, words)])}
    assert not found, "begin with what it is: 'Bytes of a sequence', not 'Of a sequence'"
