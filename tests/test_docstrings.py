"""A docstring is a sentence, or a noun with what it needs, that is understood without its neighbours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from docs_pages import ROOT

# Words that a fragment begins with, which leans on the name above it: in the package, and in programs and tests.
LEANING = {"ssmgen": {"By", "For", "Likewise", "Of", "That", "Those", "To", "With", "Without"}, "tests": {"Of"}, "tools": {"Of"}}
# Modules that have such docstrings, and how many. To be made fewer: no number may grow.
EXCEPTIONS: dict[str, int] = {
    "ssmgen/bench/layer_case.py": 7,
    "ssmgen/bench/layers.py": 1,
    "ssmgen/engine/layer_trial.py": 2,
    "ssmgen/engine/layer_views.py": 1,
    "ssmgen/families/delta_layer/gdn_spec.py": 1,
    "ssmgen/families/delta_layer/kda_spec.py": 1,
    "ssmgen/families/delta_layer/planning.py": 2,
    "ssmgen/families/delta_layer/spec.py": 3,
    "ssmgen/families/delta_layer/tokens_spec.py": 1,
    "ssmgen/families/delta_layer/trial.py": 1,
    "ssmgen/families/mamba2_layer/spec.py": 1,
    "ssmgen/families/mamba2_layer/trial.py": 1,
    "ssmgen/families/mamba2_layer/views.py": 2,
    "ssmgen/families/replay_selective_state_update/spec.py": 1,
    "ssmgen/families/selective_state_update/tokens_call.py": 1,
    "ssmgen/models.py": 6,
}


def fragments(path: Path, words: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or "-"
            if text.replace(".", " ").split()[0] in words:
                yield f"{getattr(node, 'name', path.stem)}: {text.splitlines()[0]}"


def test_no_docstring_begins_with_a_word_that_leans_on_what_stands_around_it():
    paths = [(path, words) for folder, words in LEANING.items() for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): lines for path, words in paths if (lines := [*fragments(path, words)])}
    more = {name: lines for name, lines in found.items() if len(lines) > EXCEPTIONS.get(name, 0)}
    assert not more, "begin with what it is: 'Bytes of a sequence', not 'Of a sequence'"
    fewer = {name: count for name, count in EXCEPTIONS.items() if count > len(found.get(name, []))}
    assert not fewer, f"make EXCEPTIONS { ({name: len(lines) for name, lines in found.items()}) }, so that they cannot come back"
