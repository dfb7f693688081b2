"""The scaffold of a family works, and its files are the guide's. CI checks in a copy that all other tests pass with it."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import ROOT, blocks

from tools.guide import PAGE, filled
from tools.new_family.scaffold import EXTENDED, FILES, NAME, ScaffoldError, write


def fresh(root: Path) -> Path:
    """A folder with the files that the scaffold extends."""
    for path in (lines.path for lines in EXTENDED):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, root / path)
    return root


def texts(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The parts of a checkout that the family's own tests and the guide's commands need, with the family."""
    root = tmp_path_factory.mktemp("checkout")
    for folder in ("ssmgen", "templates"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    fresh(root)
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "tests" / "support").mkdir(parents=True)
    for name in ("conftest.py", *(f"support/{n}.py" for n in ("cards_of_tests", "native_build", "selection", "worker_memory"))):
        shutil.copy(ROOT / "tests" / name, root / "tests" / name)
    write(root, NAME)
    return root


def run(checkout: Path, *command: str) -> str:
    env = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-m", *command], cwd=checkout, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.matrix
def test_its_tests_pass(checkout):
    """Those that need a GPU or g++ are skipped without one."""
    shown = run(checkout, "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests")
    assert re.search(r"\b[2-6] passed", shown), shown


@pytest.mark.matrix
def test_the_guides_command_lines_work(checkout):
    lines = [shlex.split(line) for b in blocks(PAGE, "sh") for line in b.text.splitlines()]
    source, stats, checked = (run(checkout, *line) for line in lines)
    assert source.startswith("// token_shift for sm_90a") and "wait_for_upstream();" in source and "kVec = 8" in source
    assert "spill_stores           0" in stats and checked.startswith("ok     token_shift_d90")


def test_the_guide_shows_the_files_as_they_are():
    """If it does not: python -m tools.guide."""
    text = PAGE.read_text()
    assert filled(text) == text
    shown = {b.title for language in ("python", "jinja") for b in blocks(PAGE, language)}
    assert {path for path in texts(FILES) if path not in shown and f"`{Path(path).name}`" not in text and f"`{path}`" not in text} == set()


def test_a_family_has_its_name_everywhere(tmp_path):
    root, before = fresh(tmp_path), texts(fresh(tmp_path))
    written, extended = write(root, "column_mix")
    after = texts(root)
    assert after.keys() == before.keys() | set(written) and set(extended) == before.keys()
    for path in written:
        assert "column_mix" in path and not re.search("token_?shift", after[path], re.IGNORECASE)
    for path in extended:
        changes = [line for line in difflib.ndiff(before[path].splitlines(), after[path].splitlines()) if line[0] in "+-"]
        assert any("column_mix" in line for line in changes) and not any(line.startswith("-") for line in changes)


def test_what_is_wrong_is_named_and_nothing_is_written(tmp_path):
    root = fresh(tmp_path)
    (root / "templates/mine").mkdir(parents=True)
    (root / "templates/mine/mine.cu.j2").write_text("mine")
    (root / "mkdocs.yml").write_text("nav:\n")
    before = texts(root)
    with pytest.raises(ScaffoldError) as refused:
        write(root, "mine")
    assert refused.value.problems[0] == "templates/mine/mine.cu.j2 is there" and "mkdocs.yml has no line" in refused.value.problems[1]
    assert len(refused.value.problems) == 2 and "Nothing was written" in str(refused.value) and texts(root) == before


@pytest.mark.parametrize("name", ["", "Shift", "two__words", "class", "a-b", "9a", "ä"])
def test_names_that_are_none_are_refused(tmp_path, name):
    with pytest.raises(ScaffoldError, match="its name is no Python name"):
        write(tmp_path, name)


@pytest.mark.parametrize(("name", "reason"), [("kda", "ssmgen.kda is a public function"), ("errors", "ssmgen has a module errors")])
def test_names_that_are_taken_are_refused(tmp_path, name, reason):
    root = fresh(tmp_path)
    before = texts(root)
    with pytest.raises(ScaffoldError, match=reason):
        write(root, name)
    assert texts(root) == before
