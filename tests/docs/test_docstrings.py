"""A docstring is a sentence, or a noun with its complements, that is understood without its neighbours."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from docs_pages import ROOT

from ssmgen.calls.api import FUNCTIONS

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


# Optional arguments that few calls need: they stand under a heading, after the arguments that everyone needs.
RARE = {
    "checkpoint_positions", "first_children", "intermediate_conv_window", "intermediate_states", "num_accepted_tokens", "parents",
    "rand_seed", "ring", "segments", "seq_idx", "state_scale", "workspace",
}  # fmt: skip
HEADING = re.compile(r"[A-Z][^.:]*:")


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_rare_arguments_follow_under_headings(function):
    lines = inspect.getdoc(function).splitlines()
    first = next((i for i, line in enumerate(lines) if HEADING.fullmatch(line)), len(lines))
    optional = {name for name, p in inspect.signature(function).parameters.items() if p.default is not p.empty}
    early = {line.partition(":")[0].partition(",")[0] for line in lines[:first]} & RARE & optional
    assert not early, "the first screen is for the formula and the arguments that everyone needs"


def test_headings_are_bold_on_the_site():
    pytest.importorskip("griffe")
    spec = spec_from_file_location("docstrings", ROOT / "docs/extensions/docstrings.py")
    spec.loader.exec_module(module := module_from_spec(spec))
    text = module.markdown("Adds.\n\nx: [n]\n\nSeveral tokens:\nT: how many\n\nTypes:\n\nAll are f32.")
    assert text.split("\n\n") == ["Adds.", "- `x`: \\[n\\]", "**Several tokens**", "- `T`: how many", "**Types**", "All are f32."]
